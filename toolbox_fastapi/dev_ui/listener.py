"""Listens to everything a container's services, models and tools do, and writes it into the journal.

Not here: the events (`toolbox.events`), keeping and following what is written (`journal`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from contextvars import Token
from typing import Any, assert_never

from pydantic_core import from_json

from toolbox.chat import (
    AiMessage,
    ChatRequest,
    ChatResponse,
    ImageContent,
    Message,
    SystemMessage,
    TokenUsage,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    UserMessage,
)
from toolbox.context import InvocationContext, current_invocation
from toolbox.events import (
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
from toolbox.execution import thread_watcher
from toolbox.services.outputs import Result
from toolbox.tools.failures import message_of

from ..streaming import as_json
from .journal import Entry, Journal, shortened


def plain(value: object) -> Any:
    """A value as JSON has it."""
    return from_json(as_json(value))


def failure(error: BaseException) -> Entry:
    """What went wrong, for the developer."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return {"type": "failure", "kind": type(error).__name__, "message": message_of(error)}


class _Call:
    """A tool call or a question to a model that is under way: its number, when it began, on which thread it runs."""

    def __init__(self, number: int) -> None:
        self.number, self.began = number, time.time() * 1000
        self.thread = "event loop"
        self.watching: Token[Any] | None = None

    def watch(self, request: ToolExecutionRequest) -> None:
        """Notices the thread that the call runs on, if it leaves the event loop."""

        def note(label: str, thread: str) -> None:
            current = current_invocation.get()
            if label == request.name and current is not None and current.request is request:
                self.thread = thread

        self.watching = thread_watcher.set(note)

    def unwatch(self) -> None:
        if self.watching is not None:
            with suppress(ValueError):  # ended in another context than begun, as a stream that is left
                thread_watcher.reset(self.watching)


class DevUiListener(EventListener):
    """Writes events into the journal; on the event loop, one after another."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._calls: dict[int, _Call] = {}
        self._open: set[str] = set()
        self._counted = 0

    def on_event(self, event: InvocationEvent) -> None:
        """See `EventListener`."""
        context = event.context
        match event:
            case ServiceStartedEvent():
                self._started(context)
            case ServiceCompletedEvent():
                value = event.value.content if isinstance(event.value, Result) else event.value
                text = event.response.ai_message.text
                answer = {"value": plain(text if value is None else value), "usage": _usage(event.token_usage)}
                self._ended(context, event.duration, answer=answer)
            case ServiceFailedEvent():
                self._ended(context, event.duration, failed=failure(event.error))
            case ModelRequestEvent():
                self._model_asked(event)
            case ModelResponseEvent():
                told = _reply(event.response)
                self._model_answered(context, event.request, event.duration, told, usage=event.response.token_usage)
            case ModelFailedEvent():
                told = _failure_text(event.error)
                self._model_answered(context, event.request, event.duration, told, is_error=True)
            case ToolStartedEvent():
                self._tool_started(event)
            case ToolExecutedEvent():
                told = event.execution.result
                self._tool_ended(context, event.execution.duration, told, event.execution.is_error)
            case ToolFailedEvent():
                self._tool_ended(context, event.duration, _failure_text(event.error), is_error=True)
            case MemoryWrittenEvent():
                self._add(context, {"type": "memory", "messages": len(event.messages)})

    def _add(self, context: InvocationContext, entry: Entry) -> None:
        self._journal.add({"run": context.invocation_id, "at": time.time() * 1000, **entry})

    # --- invocations

    def _started(self, context: InvocationContext) -> None:
        self._open.add(context.invocation_id)
        memory_id = context.memory_id
        said = context.user_message
        started = {
            "type": "started",
            "where": f"{context.service.__name__}.{context.method}",
            "parent": context.outer_invocation_id,
            "user_message": None if said is None else shortened(_said(said)),
            "memory_id": None if memory_id is None else str(memory_id),
        }
        self._add(context, started)

    def _ended(
        self, context: InvocationContext, duration: float, answer: Entry | None = None, failed: Entry | None = None
    ) -> None:
        self._open.discard(context.invocation_id)
        self._add(context, {"type": "ended", "duration": duration, "answer": answer, "failure": failed})

    # --- models

    def _new_call(self, of: object) -> _Call:
        self._counted += 1
        call = self._calls[id(of)] = _Call(self._counted)
        return call

    def _model_asked(self, event: ModelRequestEvent) -> None:
        call = self._new_call(event.request)
        shown = {
            "type": "model_started",
            "call": call.number,
            "name": event.model_name,
            "sent": shortened("\n\n".join(_lines(event.request.messages))),
        }
        self._add(event.context, shown)

    def _model_answered(
        self,
        context: InvocationContext,
        request: ChatRequest,
        duration: float,
        told: str,
        *,
        usage: TokenUsage | None = None,
        is_error: bool = False,
    ) -> None:
        call = self._calls.pop(id(request), None) or _Call(0)
        shown = {
            "type": "model",
            "call": call.number,
            "at": call.began,
            "duration": duration,
            "result": shortened(told),
            "is_error": is_error,
            "usage": _usage(usage),
        }
        self._add(context, shown)

    # --- tools

    def _tool_started(self, event: ToolStartedEvent) -> None:
        context, request = event.context, event.request
        if context.invocation_id not in self._open:  # called from outside of a service
            self._started(context)
            self._open.discard(context.invocation_id)
        call = self._new_call(context)
        call.watch(request)
        shown = {
            "type": "tool_started",
            "call": call.number,
            "name": request.name,
            "arguments": shortened(request.arguments),
        }
        self._add(context, shown)

    def _tool_ended(self, context: InvocationContext, duration: float, told: str, is_error: bool) -> None:
        call = self._calls.pop(id(context), None) or _Call(0)
        call.unwatch()
        shown = {
            "type": "tool",
            "call": call.number,
            "at": call.began,
            "duration": duration,
            "thread": call.thread,
            "result": shortened(told),
            "is_error": is_error,
        }
        self._add(context, shown)
        if context.invocation_id not in self._open:
            self._ended(context, duration)


def _usage(usage: TokenUsage | None) -> Entry | None:
    return None if usage is None else plain(usage)


def _failure_text(error: BaseException) -> str:
    told = failure(error)
    return f"{told['kind']}: {told['message']}"


# --- a conversation as text


def _lines(messages: Iterable[Message]) -> Iterable[str]:
    for message in messages:
        match message:
            case SystemMessage(text):
                yield f"system: {text}"
            case UserMessage():
                yield f"user: {_said(message)}"
            case AiMessage():
                yield f"model: {_of_model(message)}"
            case ToolExecutionResultMessage():
                yield f"{message.tool_name}: {message.text}"
            case _:
                assert_never(message)


def _said(message: UserMessage) -> str:
    images = sum(isinstance(each, ImageContent) for each in message.contents)
    return "\n".join([*([message.text] if message.text else []), *["(an image)"] * images])


def _of_model(message: AiMessage) -> str:
    calls = [f"→ {each.name} {each.arguments}" for each in message.tool_execution_requests]
    return "\n".join([*([message.text] if message.text else []), *calls])


def _reply(response: ChatResponse) -> str:
    return _of_model(response.ai_message)
