"""The live log: a listener that records the events of services, models and tools, and the journal that keeps them.

`LogEntry` is a table of the entries; `page/timeline.js` has the same one. An invocation is one call of a service
method; runs are what the inbox shows.
Not here: the events (`toolbox.events`), sending the log to the page (`routes`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import suppress
from contextvars import ContextVar, Token
from dataclasses import fields
from typing import Any, Literal, NotRequired, TypeAlias, TypedDict, assert_never

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
    HandedOverEvent,
    InvocationEvent,
    MemoryWrittenEvent,
    ModelFailedEvent,
    ModelRequestEvent,
    ModelResponseEvent,
    RetrievedEvent,
    ServiceCompletedEvent,
    ServiceFailedEvent,
    ServiceStartedEvent,
    ServiceSuspendedEvent,
    ToldEvent,
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

# --- the table of entries: events as JSON for the page


class _Logged(TypedDict):
    invocation: str
    """The id of the invocation."""
    at: float
    """Milliseconds since 1970."""


class StartedEntry(_Logged):
    """An invocation began. `parent` is the invocation in which it was called."""

    type: Literal["started"]
    where: str
    parent: str | None
    user_message: str | None
    memory_id: str | None


class EndedEntry(_Logged):
    """An invocation ended with an answer or a failure, or waits for an answer."""

    type: Literal["ended"]
    duration: float
    answer: Entry | None
    failure: Entry | None
    waits: bool


class CallStartedEntry(_Logged):
    """A model request or a tool call began. Its other entry has the same `call`."""

    type: Literal["model_started", "tool_started"]
    call: int
    name: str
    sent: NotRequired[str]
    arguments: NotRequired[str]


class CallEndedEntry(_Logged):
    """A model request or a tool call ended; `at` is when it began."""

    type: Literal["model", "tool"]
    call: int
    duration: float
    result: str
    is_error: bool
    usage: NotRequired[Entry | None]
    thread: NotRequired[str]


MomentKind: TypeAlias = Literal["guardrail", "usage", "connection", "retrieval", "handover", "told"]


class MomentEntry(_Logged):
    """Something between the calls, with one entry."""

    type: MomentKind
    call: str
    name: str
    duration: float
    result: str
    refused: bool


class MemoryEntry(_Logged):
    """The conversation was saved."""

    type: Literal["memory"]
    messages: int


Entry: TypeAlias = Mapping[str, Any]
"""What the page gets as JSON; also the parts of a `LogEntry`, and what only the chat gets."""
LogEntry: TypeAlias = StartedEntry | EndedEntry | CallStartedEntry | CallEndedEntry | MomentEntry | MemoryEntry


# --- the journal


MAX_ENTRIES = 1000

entry_callback: ContextVar[Callable[[LogEntry], None] | None] = ContextVar(
    "toolbox.dev_ui.entry_callback", default=None
)
"""A function that also gets the entries of all calls in the current context."""


class Journal:
    """Keeps the last entries and sends new ones to its followers; entries may come from any thread."""

    def __init__(self) -> None:
        self._entries: deque[LogEntry] = deque(maxlen=MAX_ENTRIES)
        self._followers: dict[asyncio.Queue[LogEntry], asyncio.AbstractEventLoop] = {}

    def add(self, entry: LogEntry) -> None:
        """Add an entry and send it to the followers and to the callback of this context."""
        self._entries.append(entry)
        for queue, loop in list(self._followers.items()):
            try:
                loop.call_soon_threadsafe(queue.put_nowait, entry)
            except RuntimeError:  # the follower's loop has ended
                self._followers.pop(queue, None)
        if (callback := entry_callback.get()) is not None:
            callback(entry)

    async def follow(self) -> AsyncGenerator[LogEntry, None]:
        """Yield the kept entries, then new ones, without end."""
        queue: asyncio.Queue[LogEntry] = asyncio.Queue()
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
        self.number, self.began = number, _now()
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
                text = "a database session gave its connection back"
                self._add_moment(context, "connection", "connection", text)
            case UsageCountedEvent():
                limits = [(each.name, getattr(event.limits, each.name)) for each in fields(event.limits)]
                used = [f"{name} {event.usage.of(name)} of {limit}" for name, limit in limits if limit is not None]
                self._add_moment(context, "usage", "usage", ", ".join(used) or "no limits")
            case GuardrailExecutedEvent():
                name, refused = f"guardrail {event.guardrail.__name__}", event.outcome not in ("success", "modified")
                self._add_moment(context, "guardrail", name, event.outcome, duration=event.duration, refused=refused)
            case RetrievedEvent():
                name, text = f"retriever {event.retriever.__name__}", shorten_text(_search_text(event))
                self._add_moment(context, "retrieval", name, text, duration=event.duration)
            case HandedOverEvent():
                self._add_moment(context, "handover", "hand-over", f"{event.source} → {event.target}")
            case ToldEvent():
                by = "" if event.by is None else f" by {event.by}"
                self._add_moment(context, "told", f"message added{by}", shorten_text(user_text(event.message)))
            case MemoryWrittenEvent():
                saved = MemoryEntry(
                    type="memory", invocation=context.invocation_id, at=_now(), messages=len(event.messages)
                )
                self._journal.add(saved)

    # --- invocations

    def _on_service_started(self, context: InvocationContext) -> None:
        self._open.add(context.invocation_id)
        memory_id = context.memory_id
        message = context.user_message
        started = StartedEntry(
            type="started",
            invocation=context.invocation_id,
            at=_now(),
            where=f"{context.service.__name__}.{context.method}",
            parent=context.outer_invocation_id,
            user_message=None if message is None else shorten_text(user_text(message)),
            memory_id=None if memory_id is None else str(memory_id),
        )
        self._journal.add(started)

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
        ended = EndedEntry(
            type="ended",
            invocation=context.invocation_id,
            at=_now(),
            duration=duration,
            answer=answer,
            failure=failed,
            waits=waits,
        )
        self._journal.add(ended)

    # --- models

    def _start_call(self, of: object) -> _RunningCall:
        self._counted += 1
        call = self._calls[id(of)] = _RunningCall(self._counted)
        return call

    def _on_model_asked(self, event: ModelRequestEvent) -> None:
        call = self._start_call(event.request)
        asked = CallStartedEntry(
            type="model_started",
            invocation=event.context.invocation_id,
            at=_now(),
            call=call.number,
            name=event.model_name,
            sent=shorten_text(conversation(event.request.messages)),
        )
        self._journal.add(asked)

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
        answered = CallEndedEntry(
            type="model",
            invocation=context.invocation_id,
            at=call.began,
            call=call.number,
            duration=duration,
            result=shorten_text(text),
            is_error=is_error,
            usage=usage_of(usage),
        )
        self._journal.add(answered)

    # --- tools

    def _on_tool_started(self, event: ToolStartedEvent) -> None:
        context, request = event.context, event.request
        if context.invocation_id not in self._open:  # called outside of a service
            self._on_service_started(context)
            self._open.discard(context.invocation_id)
        call = self._start_call(context)
        call.watch_thread(request)
        started = CallStartedEntry(
            type="tool_started",
            invocation=context.invocation_id,
            at=_now(),
            call=call.number,
            name=request.name,
            arguments=shorten_text(request.arguments),
        )
        self._journal.add(started)

    def _on_tool_ended(self, context: InvocationContext, duration: float, text: str, is_error: bool) -> None:
        call = self._calls.pop(id(context), None) or _RunningCall(0)
        call.unwatch()
        ended = CallEndedEntry(
            type="tool",
            invocation=context.invocation_id,
            at=call.began,
            call=call.number,
            duration=duration,
            thread=call.thread,
            result=shorten_text(text),
            is_error=is_error,
        )
        self._journal.add(ended)
        if context.invocation_id not in self._open:
            self._on_service_ended(context, duration)

    # --- what happens between the calls

    def _add_moment(
        self,
        context: InvocationContext,
        kind: MomentKind,
        name: str,
        text: str,
        *,
        duration: float = 0,
        refused: bool = False,
    ) -> None:
        self._counted += 1
        moment = MomentEntry(
            type=kind,
            invocation=context.invocation_id,
            at=_now() - duration * 1000,
            call=f"{kind} {self._counted}",
            name=name,
            duration=duration,
            result=text,
            refused=refused,
        )
        self._journal.add(moment)


def _now() -> float:
    return time.time() * 1000


# --- the parts of entries

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


def _search_text(event: RetrievedEvent) -> str:
    """Return a query and the passages that were found for it."""
    found = [f"{' '.join(filter(None, (each.title, each.source)))}\n{each.text}".strip() for each in event.passages]
    return "\n\n".join([f"Query: {event.query.text}", *(found or ["Nothing was found."])])


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
