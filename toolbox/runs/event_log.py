"""The events of a run: their versioned JSON, and `EventLog`, which writes them.

Not here: numbering and storing events (`store`), following them (`run_events`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from typing import Any, TypeAlias, TypeVar, cast, get_args

from ..chat import (
    IntermediateResponse,
    PartialReasoning,
    PartialResponse,
    PartialToolCall,
    Retrieved,
    RunSuspended,
    UserMessage,
)
from ..context import InvocationContext
from ..errors import LeaseLostError, TranscriptError
from ..passages import source_from_dict, source_to_dict
from ..service_events import InnerEvent, ServiceEvent, ServiceWork
from ..service_names import stored_name
from ..services.stored_forms import execution_from_dict, execution_to_dict, response_from_dict, response_to_dict
from ..transcripts import (
    Json,
    message_from_dict,
    message_to_dict,
    read_json,
    request_from_dict,
    request_to_dict,
    write_json,
)
from .documents import call_from_dict, stored_call_to_dict, write_expiry
from .run_looks import RunLooks
from .run_session import RunSession
from .store import StoredEvent

T = TypeVar("T")

VERSION = 1

EVENT_PAUSE = 0.05  # seconds between two writes of pieces
_PIECES = (PartialResponse, PartialReasoning, PartialToolCall)

_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (*get_args(ServiceEvent), ServiceWork)}


FindService: TypeAlias = Callable[[str], "type[Any] | None"]


def _message_to_json(message: UserMessage | str | None) -> Any:
    """Return the message of a `ToldEvent`, or the text of a `ToolProgress`."""
    return message_to_dict(message) if isinstance(message, UserMessage) else message


def _message_from_json(written: Any) -> Any:
    return message_from_dict(written, "message") if isinstance(written, dict) else written


_FORMS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "request": (request_to_dict, request_from_dict),
    "response": (response_to_dict, response_from_dict),
    "execution": (execution_to_dict, execution_from_dict),
    "passages": (
        lambda passages: [source_to_dict(each) for each in passages],
        lambda written: tuple(source_from_dict(each) for each in written),
    ),
    "message": (_message_to_json, _message_from_json),
}
"""How the fields of events with these names are written and read; all others are JSON values."""


def event_to_json(event: ServiceEvent | ServiceWork) -> str:
    """Write an event as JSON. A tool's `result_object` is written as JSON if possible, or lost."""
    return write_json(_event_to_dict(event))


def _event_to_dict(event: ServiceEvent | ServiceWork) -> Json:
    written: Json = {"version": VERSION, "type": type(event).__name__}
    if isinstance(event, RunSuspended):
        written |= {"run_id": event.run_id, "pending": [stored_call_to_dict(each) for each in event.pending]}
        written["started_by"] = event.pending[0].started_by if event.pending else None
        written["call_ids"] = [each.call_id for each in event.pending]
        if any(each.expires_at is not None for each in event.pending):
            written["expire_at"] = [write_expiry(each) for each in event.pending]
        if any(each.may_remember for each in event.pending):
            written["may_remember"] = [each.may_remember for each in event.pending]
        return written
    for each in fields(event):
        value = getattr(event, each.name)
        if isinstance(value, InvocationContext):
            written[each.name] = _context_to_dict(value)
        elif isinstance(event, InnerEvent) and each.name == "event":
            written[each.name] = _event_to_dict(value)
        else:
            written[each.name] = _FORMS[each.name][0](value) if each.name in _FORMS else value
    return written


def _context_to_dict(context: InvocationContext) -> Json:
    """Return what an event keeps of its call: which one it was."""
    memory_id = None if context.memory_id is None else str(context.memory_id)
    names = {"service": stored_name(context.service), "method": context.method, "memory_id": memory_id}
    return {**names, "id": context.invocation_id, "outer_id": context.outer_invocation_id}


def _context_from_dict(written: Any, find_service: FindService) -> InvocationContext:
    return InvocationContext(
        service=find_service(written["service"]) or object,
        method=written["method"],
        memory_id=written["memory_id"],
        invocation_id=written["id"],
        outer_invocation_id=written["outer_id"],
    )


def event_from_json(text: str, find_service: FindService = lambda _: None) -> ServiceEvent:
    """Read an event written by `event_to_json`. Raises `TranscriptError` if it is invalid.

    `find_service` returns the class of a service by its stored name.
    """
    return _event_from_dict(read_json(text, VERSION), find_service)


def _event_from_dict(written: Json, find_service: FindService) -> ServiceEvent:
    try:
        kind = _KINDS[written["type"]]
        if kind is RunSuspended:
            pending, started_by = written["pending"], written.get("started_by")  # earlier versions have none
            ids = written.get("call_ids", [""] * len(pending))
            times = written.get("expire_at", [None] * len(pending))
            may_remember = written.get("may_remember", [False] * len(pending))
            newer = (
                {"started_by": started_by, "call_id": id_, "expires_at": expires_at, "may_remember": remembers}
                for id_, expires_at, remembers in zip(ids, times, may_remember, strict=True)
            )
            calls = (call_from_dict(each, **about) for each, about in zip(pending, newer, strict=True))
            return RunSuspended(written["run_id"], tuple(calls))
        # Other fields are of a later release.
        values = {each.name: written[each.name] for each in fields(kind) if each.name in written}
        for name in _FORMS.keys() & values.keys():
            values[name] = _FORMS[name][1](values[name])
        if "context" in values:
            values["context"] = _context_from_dict(values["context"], find_service)
        if "event" in values:
            values["event"] = _event_from_dict(values["event"], find_service)
        return cast("ServiceEvent", kind(**values))
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, TranscriptError):
            raise
        raise TranscriptError("", f"invalid event of a run: {error!r}") from error


# --- writing


class EventLog:
    """Writes the events of a run that this process executes.

    Pieces of text are written a few times a second, everything else as soon as possible; nothing waits for them, until
    `flush`. Close it when the execution ends.
    """

    def __init__(self, run: RunSession, looks: RunLooks) -> None:
        assert run.generation is not None
        self._run, self._generation, self._looks = run, run.generation, looks
        self._ready: list[str] = []
        self._seen: list[str] = []  # written by an earlier owner in the round that continues now
        self._writing: asyncio.Task[None] | None = None
        self._is_urgent = asyncio.Event()
        self._is_closed = False

    async def open(self) -> None:
        """Read which events of the current round an earlier execution has written."""
        found: list[StoredEvent] = []
        while True:
            with self._run.using_store() as store:
                found = await store.events(self._run.id, found[-1].number if found else 0)
            if not found:
                return
            for each in found:
                with self._run.reading():
                    event = event_from_json(each.data)
                if isinstance(event, (IntermediateResponse, RunSuspended)):
                    self._seen.clear()  # what was before a suspension is not produced again
                elif isinstance(event, InnerEvent) and isinstance(event.event, IntermediateResponse):
                    self._forget(_inner_prefix(event))
                if not _is_piece(event):
                    self._seen.append(_identity(event))

    def put(self, event: ServiceEvent | ServiceWork) -> None:
        """Write this event soon, unless an earlier owner has written it."""
        # After the execution, code that goes on on a thread may still report.
        if self._is_closed or not self._is_new(event):
            return
        if not _is_piece(event):
            self._is_urgent.set()
        self._ready.append(event_to_json(event))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())
            self._writing.add_done_callback(_read_error)

    def put_last(self, event: ServiceEvent) -> None:
        """Write this event with the end of the run: who reads it finds the turn in the conversation."""
        if self._is_new(event):
            self._run.last_events.append(event_to_json(event))

    def _is_new(self, event: ServiceEvent | ServiceWork) -> bool:
        """Return False, once, for an event that an earlier owner has written."""
        if _is_piece(event):  # of the next reply: models may repeat the calls of this one
            self._forget(_inner_prefix(event) if isinstance(event, InnerEvent) else "")
            return True
        identity = _identity(event)
        if identity not in self._seen:
            return True
        self._seen.remove(identity)
        return False

    def _forget(self, prefix: str) -> None:
        """Forget what an earlier owner has written of the services with this prefix; of all for an empty one."""
        self._seen = [each for each in self._seen if not each.startswith(prefix)]

    async def _write(self) -> None:
        while self._ready:
            with suppress(TimeoutError):
                async with asyncio.timeout(EVENT_PAUSE):
                    await self._is_urgent.wait()
            self._is_urgent.clear()
            ready, self._ready = self._ready, []
            try:
                with self._run.using_store() as store:
                    await store.add_events(self._run.id, self._generation, ready)
            except LeaseLostError:
                return
            except BaseException:
                self._ready[:0] = ready
                raise
            self._looks.announce(self._run.id)

    async def flush(self) -> None:
        """Wait until all events are written. Raises the store's errors."""
        while self._writing is not None and not self._writing.done():
            self._is_urgent.set()
            await asyncio.shield(self._writing)
        if self._writing is not None and not self._writing.cancelled():
            self._writing.result()

    async def close(self) -> None:
        """Write nothing more. What is not written is lost: the next owner produces the events of the round again."""
        self._is_closed = True
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)


def _read_error(done: asyncio.Task[None]) -> None:
    """Tell asyncio that the error of a writer is known: `flush` raises it, unless the next writer succeeds."""
    if not done.cancelled():
        done.exception()


def _is_piece(event: ServiceEvent | ServiceWork) -> bool:
    return isinstance(event.event if isinstance(event, InnerEvent) else event, _PIECES)


def _inner_prefix(event: InnerEvent) -> str:
    return f"{event.service} {event.call_id}: "


def _identity(event: ServiceEvent | ServiceWork) -> str:
    if isinstance(event, ServiceWork):
        return str(event)
    if isinstance(event, InnerEvent):
        return _inner_prefix(event) + _identity(event.event)
    if isinstance(event, Retrieved):  # the next owner may find more than the one before
        return f"Retrieved {[(each.source, each.title) for each in event.passages]}"
    request = getattr(event, "request", None) or getattr(getattr(event, "execution", None), "request", None)
    return (
        f"{type(event).__name__} {request.id} {request.name} {request.arguments}" if request else type(event).__name__
    )
