"""Logging of invocations: a listener that logs events, and a filter that adds the invocation to log records.

Both set attributes of the log records, for formatters of structured logs. `own_frames` shortens the traceback of a
tool's error. Not here: the logs of other libraries (`library_logs`), traces and metrics (`otel`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import FrameType, TracebackType
from typing import Any, TypeAlias

from .chat import TokenUsage
from .context import InvocationContext
from .errors import UnknownToolError
from .events import (
    CompensatedEvent,
    ConnectionReleasedEvent,
    EventListener,
    FallbackUsedEvent,
    GuardrailExecutedEvent,
    HandedOverEvent,
    InvocationEvent,
    MemoryWrittenEvent,
    ModelFailedEvent,
    ModelRequestEvent,
    ModelResponseEvent,
    ModelSkippedEvent,
    RetrievedEvent,
    RunAnsweredEvent,
    RunResumedEvent,
    RunStartedEvent,
    ServiceCompletedEvent,
    ServiceFailedEvent,
    ServiceStartedEvent,
    ServiceSuspendedEvent,
    ToldEvent,
    ToolExecutedEvent,
    ToolFailedEvent,
    ToolProgressEvent,
    ToolStartedEvent,
    ToolSuspendedEvent,
    UsageCountedEvent,
)
from .safe_text import for_line

Facts = Mapping[str, Any]


_OF_INVOCATION = ("invocation_id", "outer_invocation_id", "service", "method", "tool", "conversation", "user")


def invocation_facts(context: InvocationContext | None) -> dict[str, Any]:
    """Return the log record attributes of an invocation; all are None without an invocation."""
    if context is None:
        return dict.fromkeys(_OF_INVOCATION)
    return {
        "invocation_id": context.invocation_id,
        "outer_invocation_id": context.outer_invocation_id,
        "service": context.service.__name__,
        "method": context.method,
        "tool": context.request.name if context.request is not None else None,
        # Clients can choose these two.
        "conversation": for_line(str(context.memory_id)) if context.memory_id is not None else None,
        "user": for_line(context.user) if context.user is not None else None,
    }


Failure: TypeAlias = "tuple[type[BaseException], BaseException, TracebackType | None]"


def own_frames(error: BaseException) -> Failure:
    """Return the `exc_info` to log for an error of a tool: the frames of the tool, without those of this package.

    A tool's error has passed the layers, threads and scopes around the call, which tell its author nothing. The
    innermost frame is kept in any case: an error of this package's own tools has no other.
    """
    frames: list[TracebackType] = []
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_next is None or not _is_of_framework(trace.tb_frame):
            frames.append(trace)
        trace = trace.tb_next
    kept: TracebackType | None = None
    for each in reversed(frames):
        kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return type(error), error, kept


def _is_of_framework(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in ("toolbox", "toolbox_fastapi")


class InvocationLogFilter(logging.Filter):
    """Adds the current invocation to log records. Add it to a log handler.

        handler.addFilter(InvocationLogFilter())

    Sets `invocation_id`, `outer_invocation_id`, `service`, `method`, `tool`, `conversation` (the memory id) and `user`
    (the name of the caller's `SecurityIdentity`). They are None outside of an invocation.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the attributes and return True."""
        for name, value in invocation_facts(InvocationContext.current()).items():
            if not hasattr(record, name):  # keep attributes that the program set
                setattr(record, name, value)
        return True


class LoggingListener(EventListener):
    """Logs each event of service calls, model requests and tool calls. Register it as a bean.

        container.register(LoggingListener)

    The records have the attributes `event`, those of `InvocationLogFilter`, and depending on the event `duration`
    (seconds), `input_tokens`, `output_tokens`, `finish_reason`, `model`, `messages` and `tool_calls` (counts),
    `is_error`, `error_type`, `guardrail`, `outcome`, `run_id`, `pending` (count), `kind`, `answer`, `model_calls`,
    `cost`, `until`, `done`, `total`, `source` and `target` (of a hand-over). Messages, arguments, results and error
    texts are not logged. Failures are logged as warnings, cancellations at `level`, and the progress of tools at
    `DEBUG`.
    """

    def __init__(self, logger: logging.Logger | str = "toolbox.invocations", level: int = logging.INFO) -> None:
        self._logger = logging.getLogger(logger) if isinstance(logger, str) else logger
        self._level = level

    def on_event(self, event: InvocationEvent) -> None:
        """Log `event`."""
        name, facts = _collect_facts(event)
        failed = facts.get("error_type") not in (None, "CancelledError")
        level = max(self._level, logging.WARNING) if failed else self._level
        if isinstance(event, ToolProgressEvent):  # a long tool reports often
            level = min(self._level, logging.DEBUG)
        if not self._logger.isEnabledFor(level):
            return
        where = invocation_facts(event.context)
        if _is_unknown_tool(event):
            where["tool"] = None
        details = " ".join(f"{key}={_format_value(value)}" for key, value in facts.items() if value is not None)
        what = f"{where['service']}.{where['method']}" + (f" {where['tool']}" if where["tool"] else "")
        extra = {"event": name, **where, **facts}
        self._logger.log(
            level, "%s: %s [%s] %s", name, for_line(what), where["invocation_id"], for_line(details), extra=extra
        )


def _is_unknown_tool(event: InvocationEvent) -> bool:
    """Return True for an event of an unknown tool: the model invented its name, which is not logged."""
    match event:
        case ToolStartedEvent(specification=specification):
            return specification is None
        case ToolExecutedEvent(error=error) | ToolFailedEvent(error=error):
            return isinstance(error, UnknownToolError)
    return False


def _format_value(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _collect_facts(event: InvocationEvent) -> tuple[str, Facts]:
    match event:
        case ServiceStartedEvent():
            return "service_started", {}
        case ServiceCompletedEvent(duration=duration, token_usage=usage, tool_executions=executions):
            return "service_completed", {"duration": duration, **_count_tokens(usage), "tool_calls": len(executions)}
        case ServiceFailedEvent(error=error, duration=duration):
            return "service_failed", {"duration": duration, "error_type": type(error).__name__}
        case ModelRequestEvent(request=request):
            return "model_request", {"model": event.model_name, "messages": len(request.messages)}
        case ModelResponseEvent(response=response, duration=duration):
            reason = response.finish_reason.value if response.finish_reason is not None else None
            facts = {"model": response.model, "duration": duration, "finish_reason": reason}
            return "model_response", {**facts, **_count_tokens(response.token_usage)}
        case ModelFailedEvent(error=error, duration=duration):
            return "model_failed", {"duration": duration, "error_type": type(error).__name__}
        case ModelSkippedEvent(model=model, until=until):
            return "model_skipped", {"model": model, "until": until.isoformat()}
        case FallbackUsedEvent(error=error):
            return "fallback_used", {"error_type": type(error).__name__}
        case HandedOverEvent(source=source, target=target):
            return "handed_over", {"source": source, "target": target}
        case UsageCountedEvent(usage=usage):
            counted = {"model_calls": usage.model_calls, "tool_calls": usage.tool_calls}
            cost = str(usage.cost) if usage.cost is not None else None
            return "usage_counted", {**counted, **_count_tokens(usage.tokens), "cost": cost}
        case ConnectionReleasedEvent():
            return "connection_released", {}
        case ToolStartedEvent():
            return "tool_started", {}
        case ToolProgressEvent(done=done, total=total):
            return "tool_progress", {"done": done, "total": total}
        case ToolExecutedEvent(execution=execution, error=raised):
            failed = type(raised).__name__ if raised is not None else None
            return "tool_executed", {
                "duration": execution.duration,
                "is_error": execution.is_error,
                "error_type": failed,
            }
        case ToolFailedEvent(error=error, duration=duration):
            return "tool_failed", {"duration": duration, "error_type": type(error).__name__}
        case CompensatedEvent(error=error, duration=duration):
            failed = type(error).__name__ if error is not None else None
            return "compensated", {"duration": duration, "error_type": failed}
        case GuardrailExecutedEvent(guardrail=guardrail, outcome=outcome, duration=duration):
            return "guardrail_executed", {"guardrail": guardrail.__name__, "outcome": outcome, "duration": duration}
        case RetrievedEvent(retriever=retriever, passages=passages, duration=duration):
            return "retrieved", {"retriever": retriever.__name__, "passages": len(passages), "duration": duration}
        case ServiceSuspendedEvent(run_id=run_id, pending=pending, duration=duration):
            return "service_suspended", {"duration": duration, "run_id": run_id, "pending": len(pending)}
        case ToolSuspendedEvent(kind=kind, duration=duration):
            return "tool_suspended", {"duration": duration, "kind": kind}
        case RunAnsweredEvent(run_id=run_id, answer=answer):
            return "run_answered", {"run_id": run_id, "answer": answer}
        case ToldEvent():
            return "message_added", {}
        case RunStartedEvent(run_id=run_id):
            return "run_started", {"run_id": run_id}
        case RunResumedEvent(run_id=run_id):
            return "run_resumed", {"run_id": run_id}
        case MemoryWrittenEvent(messages=messages):
            return "memory_written", {"messages": len(messages)}
    return type(event).__name__, {}


def _count_tokens(usage: TokenUsage | None) -> Facts:
    if usage is None:
        return {"input_tokens": None, "output_tokens": None}
    return {"input_tokens": usage.input_tokens, "output_tokens": usage.output_tokens}
