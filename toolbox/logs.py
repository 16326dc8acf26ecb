"""Invocations in the program's logs: a listener that logs what happens, a filter that says which invocation logs.

Both put facts on the records as attributes, where a formatter for structured logs finds them. Not here: spans (`otel`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from .chat import TokenUsage
from .context import InvocationContext
from .errors import UnknownToolError
from .events import (
    EventListener,
    InvocationEvent,
    MemoryWrittenEvent,
    ModelFailedEvent,
    ModelRequestEvent,
    ModelResponseEvent,
    ServiceCompletedEvent,
    ServiceFailedEvent,
    ServiceStartedEvent,
    ToolExecutedEvent,
    ToolFailedEvent,
    ToolStartedEvent,
)
from .printable import for_line

Facts = Mapping[str, Any]


def invocation_facts(context: InvocationContext | None) -> dict[str, Any]:
    """Which invocation it is, under the names that log records have; all None outside of one."""
    if context is None:
        return dict.fromkeys(("invocation_id", "outer_invocation_id", "service", "method", "tool"))
    return {
        "invocation_id": context.invocation_id,
        "outer_invocation_id": context.outer_invocation_id,
        "service": context.service.__name__,
        "method": context.method,
        "tool": context.request.name if context.request is not None else None,
    }


class InvocationLogFilter(logging.Filter):
    """Put on a handler, gives each record `invocation_id`, `outer_invocation_id`, `service`, `method` and `tool`.

    They say in which invocation, and in which tool call of it, the program has logged; None outside of one.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Lets every record pass."""
        for name, value in invocation_facts(InvocationContext.current()).items():
            if not hasattr(record, name):  # what the program says itself stays
                setattr(record, name, value)
        return True


class LoggingListener(EventListener):
    """Logs each event: its facts in the text, and as attributes of the record.

    Those are `event`, what `InvocationLogFilter` gives, and by event `duration` (seconds), `input_tokens`,
    `output_tokens`, `finish_reason`, `model`, `messages` and `tool_calls` (how many), `is_error`, `error_type`. Nothing
    of what was asked or answered is logged, nor the text of an error. A failure is a warning, a cancellation is not.
    """

    def __init__(self, logger: logging.Logger | str = "toolbox.invocations", level: int = logging.INFO) -> None:
        self._logger = logging.getLogger(logger) if isinstance(logger, str) else logger
        self._level = level

    def on_event(self, event: InvocationEvent) -> None:
        """See `EventListener`."""
        name, facts = _facts_of(event)
        failed = facts.get("error_type") not in (None, "CancelledError")
        level = max(self._level, logging.WARNING) if failed else self._level
        if not self._logger.isEnabledFor(level):
            return
        where = invocation_facts(event.context)
        if _is_made_up(event):
            where["tool"] = None
        told = " ".join(f"{key}={_short(value)}" for key, value in facts.items() if value is not None)
        what = f"{where['service']}.{where['method']}" + (f" {where['tool']}" if where["tool"] else "")
        extra = {"event": name, **where, **facts}
        self._logger.log(
            level, "%s: %s [%s] %s", name, for_line(what), where["invocation_id"], for_line(told), extra=extra
        )


def _is_made_up(event: InvocationEvent) -> bool:
    """Whether it is of a tool there is none of: its name is only what a model has said."""
    match event:
        case ToolStartedEvent(specification=specification):
            return specification is None
        case ToolExecutedEvent(error=error) | ToolFailedEvent(error=error):
            return isinstance(error, UnknownToolError)
    return False


def _short(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _facts_of(event: InvocationEvent) -> tuple[str, Facts]:
    match event:
        case ServiceStartedEvent():
            return "service_started", {}
        case ServiceCompletedEvent(duration=duration, token_usage=usage, tool_executions=executions):
            return "service_completed", {"duration": duration, **_tokens(usage), "tool_calls": len(executions)}
        case ServiceFailedEvent(error=error, duration=duration):
            return "service_failed", {"duration": duration, "error_type": type(error).__name__}
        case ModelRequestEvent(request=request):
            return "model_request", {"model": event.model_name, "messages": len(request.messages)}
        case ModelResponseEvent(response=response, duration=duration):
            reason = response.finish_reason.value if response.finish_reason is not None else None
            facts = {"model": response.model, "duration": duration, "finish_reason": reason}
            return "model_response", {**facts, **_tokens(response.token_usage)}
        case ModelFailedEvent(error=error, duration=duration):
            return "model_failed", {"duration": duration, "error_type": type(error).__name__}
        case ToolStartedEvent():
            return "tool_started", {}
        case ToolExecutedEvent(execution=execution, error=raised):
            failed = type(raised).__name__ if raised is not None else None
            return "tool_executed", {
                "duration": execution.duration,
                "is_error": execution.is_error,
                "error_type": failed,
            }
        case ToolFailedEvent(error=error, duration=duration):
            return "tool_failed", {"duration": duration, "error_type": type(error).__name__}
        case MemoryWrittenEvent(messages=messages):
            return "memory_written", {"messages": len(messages)}
    return type(event).__name__, {}


def _tokens(usage: TokenUsage | None) -> Facts:
    if usage is None:
        return {"input_tokens": None, "output_tokens": None}
    return {"input_tokens": usage.input_tokens, "output_tokens": usage.output_tokens}
