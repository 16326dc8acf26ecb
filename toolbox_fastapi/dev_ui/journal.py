"""The live log: a listener that records the events of services, models and tools, and the journal that keeps them.

Not here: the events (`toolbox.events`), sending the log to the page (`routes`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import suppress
from contextvars import ContextVar, Token
from dataclasses import fields
from typing import Any, TypeAlias, assert_never

from pydantic_core import from_json

from toolbox.chat import (
    AiMessage,
    ChatRequest,
    Message,
    SystemMessage,
    TokenUsage,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    UserMessage,
)
from toolbox.contents import (
    AudioContent,
    Content,
    ImageContent,
    Media,
    PdfContent,
    TextContent,
    media_type_of,
    url_of,
)
from toolbox.context import InvocationContext, current_invocation
from toolbox.events import (
    ConnectionReleasedEvent,
    EventListener,
    GuardrailExecutedEvent,
    InvocationEvent,
    MemoryWrittenEvent,
    ModelFailedEvent,
    ModelRequestEvent,
    ModelResponseEvent,
    ServiceCompletedEvent,
    ServiceFailedEvent,
    ServiceStartedEvent,
    ServiceSuspendedEvent,
    ToolExecutedEvent,
    ToolFailedEvent,
    ToolStartedEvent,
    ToolSuspendedEvent,
    UsageCountedEvent,
)
from toolbox.execution.threads import thread_watcher
from toolbox.services.outputs import Result
from toolbox.tools.failures import message_of

from ..streaming import as_json

MAX_ENTRIES = 1000

entry_callback: ContextVar[Callable[[Entry], None] | None] = ContextVar("toolbox.dev_ui.entry_callback", default=None)
"""A function that also gets the entries of all calls in the current context."""


class Journal:
    """Keeps the last entries and sends new ones to its followers; entries may come from any thread."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque(maxlen=MAX_ENTRIES)
        self._followers: dict[asyncio.Queue[Entry], asyncio.AbstractEventLoop] = {}

    def add(self, entry: Entry) -> None:
        """Add an entry and send it to the followers and to the callback of this context."""
        self._entries.append(entry)
        for queue, loop in list(self._followers.items()):
            try:
                loop.call_soon_threadsafe(queue.put_nowait, entry)
            except RuntimeError:  # the follower's loop has ended
                self._followers.pop(queue, None)
        if (callback := entry_callback.get()) is not None:
            callback(entry)

    async def follow(self) -> AsyncGenerator[Entry, None]:
        """Yield the kept entries, then new ones, without end."""
        queue: asyncio.Queue[Entry] = asyncio.Queue()
        self._followers[queue] = asyncio.get_running_loop()
        try:
            for entry in list(self._entries):
                yield entry
            while True:
                yield await queue.get()
        finally:
            self._followers.pop(queue, None)


# --- the listener


class _RunningCall:
    """A running tool call or model request: its number, start time and thread."""

    def __init__(self, number: int) -> None:
        self.number, self.began = number, time.time() * 1000
        self.thread = "event loop"
        self.watching: Token[Any] | None = None

    def watch_thread(self, request: ToolExecutionRequest) -> None:
        """Record the thread of the call if it does not run on the event loop."""

        def note_thread(label: str, thread: str) -> None:
            current = current_invocation.get()
            if label == request.name and current is not None and current.request is request:
                self.thread = thread

        self.watching = thread_watcher.set(note_thread)

    def unwatch(self) -> None:
        if self.watching is not None:
            with suppress(ValueError):  # a stream that is abandoned ends in another context
                thread_watcher.reset(self.watching)


class DevUiListener(EventListener):
    """Writes events into the journal; runs on the event loop, one event at a time."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._calls: dict[int, _RunningCall] = {}
        self._open: set[str] = set()
        self._counted = 0

    def on_event(self, event: InvocationEvent) -> None:
        """Write the entry of an event."""
        context = event.context
        match event:
            case ServiceStartedEvent():
                self._on_service_started(context)
            case ServiceCompletedEvent():
                value = event.value.content if isinstance(event.value, Result) else event.value
                text = event.response.ai_message.text
                content = text if value is None else value
                answer = {"value": plain(content), "usage": usage_of(event.token_usage)}
                self._on_service_ended(context, event.duration, answer=answer)
            case ServiceFailedEvent():
                self._on_service_ended(context, event.duration, failed=make_failure_entry(event.error))
            case ServiceSuspendedEvent():
                self._on_service_ended(context, event.duration, waits=True)
            case ModelRequestEvent():
                self._on_model_asked(event)
            case ModelResponseEvent():
                text = model_text(event.response.ai_message)
                self._on_model_answered(context, event.request, event.duration, text, usage=event.response.token_usage)
            case ModelFailedEvent():
                text = failure_line(event.error)
                self._on_model_answered(context, event.request, event.duration, text, is_error=True)
            case ToolStartedEvent():
                self._on_tool_started(event)
            case ToolExecutedEvent():
                self._on_tool_ended(context, event.execution.duration, event.execution.result, event.execution.is_error)
            case ToolFailedEvent():
                self._on_tool_ended(context, event.duration, failure_line(event.error), is_error=True)
            case ToolSuspendedEvent():
                self._on_tool_ended(context, event.duration, "waits for an answer", is_error=False)
            case ConnectionReleasedEvent():
                self._add_moment(context, "connection", "a database session gave its connection back")
            case UsageCountedEvent():
                self._on_usage_counted(event)
            case GuardrailExecutedEvent():
                self._on_guardrail_executed(event)
            case MemoryWrittenEvent():
                self._add_entry(context, {"type": "memory", "messages": len(event.messages)})

    def _add_entry(self, context: InvocationContext, entry: Entry) -> None:
        self._journal.add({"run": context.invocation_id, "at": time.time() * 1000, **entry})

    # --- invocations

    def _on_service_started(self, context: InvocationContext) -> None:
        self._open.add(context.invocation_id)
        memory_id = context.memory_id
        message = context.user_message
        started = {
            "type": "started",
            "where": f"{context.service.__name__}.{context.method}",
            "parent": context.outer_invocation_id,
            "user_message": None if message is None else shorten_text(user_text(message)),
            "memory_id": None if memory_id is None else str(memory_id),
        }
        self._add_entry(context, started)

    def _on_service_ended(
        self,
        context: InvocationContext,
        duration: float,
        *,
        answer: Entry | None = None,
        failed: Entry | None = None,
        waits: bool = False,
    ) -> None:
        self._open.discard(context.invocation_id)
        self._add_entry(
            context, {"type": "ended", "duration": duration, "answer": answer, "failure": failed, "waits": waits}
        )

    # --- models

    def _start_call(self, of: object) -> _RunningCall:
        self._counted += 1
        call = self._calls[id(of)] = _RunningCall(self._counted)
        return call

    def _on_model_asked(self, event: ModelRequestEvent) -> None:
        call = self._start_call(event.request)
        shown = {
            "type": "model_started",
            "call": call.number,
            "name": event.model_name,
            "sent": shorten_text(conversation(event.request.messages)),
        }
        self._add_entry(event.context, shown)

    def _on_model_answered(
        self,
        context: InvocationContext,
        request: ChatRequest,
        duration: float,
        text: str,
        *,
        usage: TokenUsage | None = None,
        is_error: bool = False,
    ) -> None:
        call = self._calls.pop(id(request), None) or _RunningCall(0)
        shown = {
            "type": "model",
            "call": call.number,
            "at": call.began,
            "duration": duration,
            "result": shorten_text(text),
            "is_error": is_error,
            "usage": usage_of(usage),
        }
        self._add_entry(context, shown)

    # --- tools

    def _on_tool_started(self, event: ToolStartedEvent) -> None:
        context, request = event.context, event.request
        if context.invocation_id not in self._open:  # called outside of a service
            self._on_service_started(context)
            self._open.discard(context.invocation_id)
        call = self._start_call(context)
        call.watch_thread(request)
        shown = {
            "type": "tool_started",
            "call": call.number,
            "name": request.name,
            "arguments": shorten_text(request.arguments),
        }
        self._add_entry(context, shown)

    def _on_tool_ended(self, context: InvocationContext, duration: float, text: str, is_error: bool) -> None:
        call = self._calls.pop(id(context), None) or _RunningCall(0)
        call.unwatch()
        shown = {
            "type": "tool",
            "call": call.number,
            "at": call.began,
            "duration": duration,
            "thread": call.thread,
            "result": shorten_text(text),
            "is_error": is_error,
        }
        self._add_entry(context, shown)
        if context.invocation_id not in self._open:
            self._on_service_ended(context, duration)

    # --- guardrails

    def _on_usage_counted(self, event: UsageCountedEvent) -> None:
        limits = [(each.name, getattr(event.limits, each.name)) for each in fields(event.limits)]
        used = [f"{name} {event.usage.of(name)} of {allowed}" for name, allowed in limits if allowed is not None]
        self._add_moment(event.context, "usage", ", ".join(used) or "no limits")

    def _add_moment(self, context: InvocationContext, kind: str, text: str) -> None:
        """Add something that takes no time, between two model requests."""
        self._counted += 1
        shown = {
            "type": kind,
            "call": f"{kind} {self._counted}",
            "name": kind,
            "at": time.time() * 1000,
            "duration": 0,
            "result": text,
            "is_error": False,
        }
        self._add_entry(context, shown)

    def _on_guardrail_executed(self, event: GuardrailExecutedEvent) -> None:
        self._counted += 1
        shown = {
            "type": "guardrail",
            "call": f"guardrail {self._counted}",
            "name": f"guardrail {event.guardrail.__name__}",
            "at": (time.time() - event.duration) * 1000,
            "duration": event.duration,
            "result": event.outcome,
            "refused": event.outcome not in ("success", "modified"),
        }
        self._add_entry(event.context, shown)


# --- entries: events as JSON

Entry: TypeAlias = dict[str, Any]
"""An event for the page, as JSON: `type`, `run` (the invocation's id), `at` (ms since 1970) and more."""

MAX_TEXT_CHARS = 20_000


def shorten_text(text: str) -> str:
    """Shorten a long text and append its length."""
    if len(text) <= MAX_TEXT_CHARS:
        return text
    return f"{text[:MAX_TEXT_CHARS]}… ({len(text)} characters)"


def plain(value: object) -> Any:
    """Convert a value to plain JSON data."""
    return from_json(as_json(value))


def make_failure_entry(error: BaseException) -> Entry:
    """Return an error as an entry with its class and message."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return {"type": "failure", "kind": type(error).__name__, "message": message_of(error)}


def usage_of(usage: TokenUsage | None) -> Entry | None:
    """Return the token counts as JSON data, or None."""
    return None if usage is None else plain(usage)


def failure_line(error: BaseException) -> str:
    """Return an error as one line: its class and message."""
    entry = make_failure_entry(error)
    return f"{entry['kind']}: {entry['message']}"


# --- a conversation as text


def conversation(messages: Iterable[Message]) -> str:
    """Return the messages of a model request as text."""
    return "\n\n".join(_write_lines(messages))


def _write_lines(messages: Iterable[Message]) -> Iterable[str]:
    for message in messages:
        match message:
            case SystemMessage(text):
                yield f"system: {text}"
            case UserMessage():
                yield f"user: {user_text(message)}"
            case AiMessage():
                yield f"model: {model_text(message)}"
            case ToolExecutionResultMessage():
                yield f"{message.tool_name}: {message.text}"
            case _:
                assert_never(message)


def user_text(message: UserMessage) -> str:
    """Return the text of a user message, with a placeholder for each image, document and recording."""
    others = [note for each in message.contents if (note := _placeholder(each))]
    return "\n".join([*([message.text] if message.text else []), *others])


def _placeholder(content: Content) -> str:
    match content:
        case TextContent():
            return ""
        case ImageContent():
            return "(an image)"
        case PdfContent(name=name):
            return f"(a PDF document: {name})" if name else "(a PDF document)"
        case AudioContent():
            return "(audio)"
        case _:
            assert_never(content)


def media_entry(content: Media) -> Entry:
    """Return an image, document or recording for the page: `kind`, `name` and `url`, which may be a data URL."""
    match content:
        case ImageContent():
            return {"kind": "image", "name": f"image.{_find_suffix(media_type_of(content))}", "url": url_of(content)}
        case PdfContent():
            return {"kind": "document", "name": content.name or "document.pdf", "url": url_of(content)}
        case AudioContent():
            return {"kind": "audio", "name": f"audio.{_find_suffix(media_type_of(content))}", "url": url_of(content)}
        case _:
            assert_never(content)


def _find_suffix(media_type: str) -> str:
    return media_type.partition("/")[2].partition(";")[0].partition("+")[0].removeprefix("x-")


def model_text(message: AiMessage) -> str:
    """Return the text of a model's message, with a line for each tool call."""
    calls = [f"→ {each.name} {each.arguments}" for each in message.tool_execution_requests]
    return "\n".join([*([message.text] if message.text else []), *calls])
