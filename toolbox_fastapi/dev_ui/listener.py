"""Listens to everything a container's services, models and tools do, and writes it into the journal.

Not here: the events (`toolbox.events`), keeping and following what is written (`journal`).
"""

from __future__ import annotations

import time
from contextlib import suppress
from contextvars import Token
from typing import Any

from toolbox.chat import (
    ChatRequest,
    TokenUsage,
    ToolExecutionRequest,
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

from .entries import Entry, conversation, failure, failure_text, plain, said_by, shortened, text_of, usage_of
from .journal import Journal


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
                answer = {"value": plain(text if value is None else value), "usage": usage_of(event.token_usage)}
                self._ended(context, event.duration, answer=answer)
            case ServiceFailedEvent():
                self._ended(context, event.duration, failed=failure(event.error))
            case ModelRequestEvent():
                self._model_asked(event)
            case ModelResponseEvent():
                told = text_of(event.response.ai_message)
                self._model_answered(context, event.request, event.duration, told, usage=event.response.token_usage)
            case ModelFailedEvent():
                told = failure_text(event.error)
                self._model_answered(context, event.request, event.duration, told, is_error=True)
            case ToolStartedEvent():
                self._tool_started(event)
            case ToolExecutedEvent():
                told = event.execution.result
                self._tool_ended(context, event.execution.duration, told, event.execution.is_error)
            case ToolFailedEvent():
                self._tool_ended(context, event.duration, failure_text(event.error), is_error=True)
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
            "user_message": None if said is None else shortened(said_by(said)),
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
            "sent": shortened(conversation(event.request.messages)),
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
            "usage": usage_of(usage),
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
