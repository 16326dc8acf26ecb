"""The events of a run: their versioned JSON, `EventLog`, which writes them, and following them in any process.

Not here: numbering and storing events (`store`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import datetime
from functools import partial
from typing import Any, Protocol, TypeVar, cast, get_args

from ..chat import (
    IntermediateResponse,
    PartialReasoning,
    PartialResponse,
    PartialToolCall,
    RunSuspended,
    ServiceEvent,
)
from ..errors import LeaseLostError, TranscriptError
from ..services.stored_forms import execution_from_dict, execution_to_dict, response_from_dict, response_to_dict
from ..transcripts import Json, read_json, request_from_dict, request_to_dict, write_json
from .documents import call_from_dict, stored_call_to_dict
from .run_looks import RunLooks
from .store import ENDED, RunLook, RunStatus, RunStore, StoredRun

T = TypeVar("T")

VERSION = 1

_EVENT_PAUSE = 0.05  # seconds between two writes of pieces
_PIECES = (PartialResponse, PartialReasoning, PartialToolCall)

_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(ServiceEvent)}


_FORMS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "request": (request_to_dict, request_from_dict),
    "response": (response_to_dict, response_from_dict),
    "execution": (execution_to_dict, execution_from_dict),
}
"""How the fields of events with these names are written and read; all others are JSON values."""


def event_to_json(event: ServiceEvent) -> str:
    """Write an event as JSON. A tool's `result_object` is written as JSON if possible, or lost."""
    written: Json = {"version": VERSION, "type": type(event).__name__}
    if isinstance(event, RunSuspended):
        written |= {"run_id": event.run_id, "pending": [stored_call_to_dict(each) for each in event.pending]}
        written["started_by"] = event.pending[0].started_by if event.pending else None
        written["call_ids"] = [each.call_id for each in event.pending]
        return write_json(written)
    for each in fields(event):
        value = getattr(event, each.name)
        written[each.name] = _FORMS[each.name][0](value) if each.name in _FORMS else value
    return write_json(written)


def event_from_json(text: str) -> ServiceEvent:
    """Read an event written by `event_to_json`. Raises `TranscriptError` if it is invalid."""
    written = read_json(text, VERSION)
    try:
        kind = _KINDS[written["type"]]
        if kind is RunSuspended:
            pending, started_by = written["pending"], written.get("started_by")  # earlier versions have none
            ids = written.get("call_ids", [""] * len(pending))
            calls = (call_from_dict(each, started_by, id_) for each, id_ in zip(pending, ids, strict=True))
            return RunSuspended(written["run_id"], tuple(calls))
        values = {name: value for name, value in written.items() if name not in ("version", "type")}
        for name in _FORMS.keys() & values.keys():
            values[name] = _FORMS[name][1](values[name])
        return cast("ServiceEvent", kind(**values))
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, TranscriptError):
            raise
        raise TranscriptError("", f"invalid event of a run: {error!r}") from error


# --- writing


class EventLog:
    """Writes the events of a run that this process executes.

    Pieces of text are written a few times a second, everything else as soon as possible; nothing waits for them.
    `taken` hands over what is not written yet, for a transaction that writes something else too.
    """

    def __init__(self, store: RunStore, run_id: str, generation: int, looks: RunLooks) -> None:
        self._store, self._run_id, self._generation, self._looks = store, run_id, generation, looks
        self._ready: list[str] = []
        self._seen: list[str] = []  # written by an earlier owner in the round that continues now
        self._writing: asyncio.Task[None] | None = None
        self._is_urgent = asyncio.Event()

    async def open(self) -> None:
        """Read which events of the current round an earlier owner has written."""
        if self._generation <= 1:
            return
        after = 0
        while found := await self._store.events(self._run_id, after):
            after = found[-1].number
            for each in found:
                event = event_from_json(each.data)
                if isinstance(event, IntermediateResponse):
                    self._seen.clear()
                elif not isinstance(event, _PIECES):
                    self._seen.append(_identity(event))

    def put(self, event: ServiceEvent) -> None:
        """Write this event soon, unless an earlier owner has written it."""
        if not isinstance(event, _PIECES):
            identity = _identity(event)
            if identity in self._seen:
                self._seen.remove(identity)
                return
            self._is_urgent.set()
        self._ready.append(event_to_json(event))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())

    def taken(self) -> list[str]:
        """Return the events that are not written yet; the caller writes them."""
        ready, self._ready = self._ready, []
        return ready

    async def _write(self) -> None:
        while self._ready:
            with suppress(TimeoutError):
                async with asyncio.timeout(_EVENT_PAUSE):
                    await self._is_urgent.wait()
            self._is_urgent.clear()
            if ready := self.taken():
                try:
                    await self._store.add_events(self._run_id, self._generation, ready)
                except LeaseLostError:
                    return
                except BaseException:
                    self._ready[:0] = ready
                    raise
                self._looks.announce(self._run_id)

    async def flush(self) -> None:
        """Wait until all events are written. Raises the store's errors."""
        while self._writing is not None and not self._writing.done():
            self._is_urgent.set()
            await asyncio.shield(self._writing)
        if self._writing is not None and not self._writing.cancelled():
            self._writing.result()


def _identity(event: ServiceEvent) -> str:
    request = getattr(event, "request", None) or getattr(getattr(event, "execution", None), "request", None)
    return (
        f"{type(event).__name__} {request.id} {request.name} {request.arguments}" if request else type(event).__name__
    )


# --- following a run


_AT_ONCE = 500  # events read at once


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The run has ended: `status` is `"completed"`, `"failed"` or `"cancelled"`.

    `error` is type and text of the error of a failed run, the reason of a cancelled one, else None.
    """

    status: RunStatus
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RunEvent:
    """One event of a run. `number` counts from 1 and never changes; `at` is in UTC."""

    number: int
    at: datetime
    event: ServiceEvent | RunEnded


class FollowedRuns(Protocol):
    """The stored runs, as `RunEvents` needs them."""

    looks: RunLooks

    async def open(self) -> RunStore:
        """Return the opened store."""
        ...

    async def load(self, run_id: str) -> StoredRun:
        """Return a run. Raises `RunNotFoundError`."""
        ...

    async def look(self, run_id: str) -> RunLook:
        """Return what changes of a run. Raises `RunNotFoundError`."""
        ...

    async def on_home(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Await `work()` on the container's loop."""
        ...


class RunEvents(AsyncIterator[RunEvent]):
    """The events of a run, from `runs.events(…)`. It continues over suspensions and ends with `RunEnded`.

    The iteration raises `RunNotFoundError`.
    """

    def __init__(
        self, runs: FollowedRuns, run_id: str, after: int, error_of: Callable[[StoredRun], str | None]
    ) -> None:
        self.run_id = run_id
        self._runs, self._after, self._error_of = runs, after, error_of
        self._seen: RunLook | None = None  # everything up to this look was read
        self._ready: deque[RunEvent] = deque()
        self._is_over = False

    def __aiter__(self) -> RunEvents:
        return self

    async def __anext__(self) -> RunEvent:
        """Return the next event; wait for it. Raises `RunNotFoundError`."""
        if not self._ready and not self._is_over:
            await self._runs.on_home(self._wait)
        if not self._ready:
            raise StopAsyncIteration
        event = self._ready.popleft()
        self._after = event.number
        return event

    async def is_over(self) -> bool:
        """Return True if the run has ended and nothing is newer. Raises `RunNotFoundError`."""
        if not self._ready and not self._is_over:
            look = await self._runs.on_home(lambda: self._runs.look(self.run_id))
            self._is_over = look.status in ENDED and self._after > look.events
        return self._is_over and not self._ready

    async def aclose(self) -> None:
        """End the iteration; the run continues."""
        self._ready.clear()
        self._is_over = True

    async def _wait(self) -> None:
        """Wait until `_ready` has the next events, or no more can come."""
        looks, after = self._runs.looks, self._after
        while not self._ready and not self._is_over:
            look = await looks.after(self.run_id, self._seen)  # first: an ended run gets no more events
            found = await looks.shared(self.run_id, after, partial(self._read, after))
            self._ready.extend(found)
            if len(found) == _AT_ONCE:
                continue
            self._seen = look
            if look.status in ENDED:
                # Its end comes after its last event. A reader who has a later number has seen the end.
                if after <= look.events:
                    self._ready.append(await looks.shared(self.run_id, "end", partial(self._read_end, look)))
                self._is_over = True

    async def _read(self, after: int) -> list[RunEvent]:
        found = await (await self._runs.open()).events(self.run_id, after, _AT_ONCE)
        return [RunEvent(each.number, each.at, event_from_json(each.data)) for each in found]

    async def _read_end(self, look: RunLook) -> RunEvent:
        run = await self._runs.load(self.run_id)
        return RunEvent(look.events + 1, run.updated_at, RunEnded(look.status, self._error_of(run)))


def number_after(after: int | str | None) -> int:
    """Return the number that a reader has seen; 0 for None, and for a header that no run has sent.

    Raises `ValueError` for a negative number and `TypeError` for other types.
    """
    if after is None:
        return 0
    if isinstance(after, str):
        # `Last-Event-ID` comes from outside: a reader with another text gets everything.
        return int(after) if after.isascii() and after.isdigit() and len(after) <= 18 else 0
    if isinstance(after, bool) or not isinstance(after, int):
        raise TypeError(f"invalid after={after!r}; use an event's number, the text of Last-Event-ID, or None")
    if after < 0:
        raise ValueError(f"invalid after={after}; use the number of an event, or None for all")
    return after
