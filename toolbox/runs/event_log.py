"""The events of a run: their versioned JSON, `EventLog`, which writes them, and following them in any process.

Not here: numbering and storing events (`store`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeAlias, cast, get_args

from ..chat import (
    BeforeToolExecution,
    ChatResponse,
    CompleteResponse,
    CompleteToolCall,
    IntermediateResponse,
    PartialReasoning,
    PartialResponse,
    PartialToolCall,
    RunSuspended,
    ServiceEvent,
    ToolExecuted,
    ToolProgress,
)
from ..errors import ContainerNotStartedError, LeaseLostError, RunNotFoundError, TranscriptError
from ..services.state import (
    execution_from_dict,
    execution_to_dict,
    request_from_dict,
    request_to_dict,
    response_from_dict,
    response_to_dict,
)
from ..transcripts import Json, read_json, write_json
from .documents import call_from_dict, stored_call_to_dict
from .store import ENDED, RunStatus, RunStore, StoredRun

VERSION = 1

_EVENT_PAUSE = 0.05  # seconds between two writes of pieces
_PIECES = (PartialResponse, PartialReasoning, PartialToolCall)

_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(ServiceEvent)}


def event_to_json(event: ServiceEvent) -> str:
    """Write an event as JSON. A tool's `result_object` is written as JSON if possible, or lost."""
    return write_json({"version": VERSION, "type": type(event).__name__, **_fields(event)})


def event_from_json(text: str) -> ServiceEvent:
    """Read an event written by `event_to_json`. Raises `TranscriptError` if it is invalid."""
    written = read_json(text, VERSION)
    try:
        kind = _KINDS[written["type"]]
        values = {name: value for name, value in written.items() if name not in ("version", "type")}
        if kind in (CompleteResponse, IntermediateResponse):
            return cast("ServiceEvent", kind(cast("ChatResponse", response_from_dict(values["response"]))))
        if kind is ToolExecuted:
            return ToolExecuted(execution_from_dict(values["execution"]))
        if kind is RunSuspended:
            started_by, written = values.get("started_by"), values["pending"]  # events of earlier versions have none
            ids = values.get("call_ids", [""] * len(written))
            calls = (call_from_dict(each, started_by, id_) for each, id_ in zip(written, ids, strict=True))
            return RunSuspended(values["run_id"], tuple(calls))
        if "request" in values:
            values["request"] = request_from_dict(values["request"])
        return cast("ServiceEvent", kind(**values))
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, TranscriptError):
            raise
        raise TranscriptError("", f"invalid event of a run: {error!r}") from error


def _fields(event: ServiceEvent) -> Json:
    match event:
        case PartialResponse() | PartialReasoning():
            return {"text": event.text}
        case PartialToolCall():
            names = ("index", "id", "name", "partial_arguments")
            return {name: getattr(event, name) for name in names}
        case CompleteToolCall():
            return {"index": event.index, "request": request_to_dict(event.request)}
        case BeforeToolExecution():
            return {"request": request_to_dict(event.request)}
        case CompleteResponse() | IntermediateResponse():
            return {"response": response_to_dict(event.response)}
        case ToolProgress():
            values = {"done": event.done, "total": event.total, "message": event.message}
            return {"request": request_to_dict(event.request), **values}
        case ToolExecuted():
            return {"execution": execution_to_dict(event.execution)}
        case RunSuspended():
            pending = [stored_call_to_dict(each) for each in event.pending]
            started_by = event.pending[0].started_by if event.pending else None
            ids = [each.call_id for each in event.pending]
            return {"run_id": event.run_id, "pending": pending, "started_by": started_by, "call_ids": ids}


# --- writing


class EventLog:
    """Writes the events of a run that this process executes.

    Pieces of text are written a few times a second, everything else as soon as possible; nothing waits for them.
    `taken` hands over what is not written yet, for a transaction that writes something else too.
    """

    def __init__(self, store: RunStore, run_id: str, generation: int, signals: RunSignals) -> None:
        self._store, self._run_id, self._generation, self._signals = store, run_id, generation, signals
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
                self._signals.announce(self._run_id)

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


_FIRST_PAUSE, _LONGEST_PAUSE, _SUSPENDED_PAUSE = 0.02, 0.25, 1.0  # seconds between two looks into the store
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


class RunSignals:
    """Wakes those who wait for a run that changes in this process; changes elsewhere are found by looking."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._is_closed = False

    def close(self) -> None:
        """End all waiting: `wait` raises `ContainerNotStartedError` from now on."""
        self._is_closed = True
        for run_id in [*self._waiting]:
            self.announce(run_id)

    def announce(self, run_id: str) -> None:
        """Wake all who wait for this run. Call it on the container's loop."""
        for each in self._waiting.pop(run_id, ()):
            if not each.done():
                each.get_loop().call_soon_threadsafe(_wake, each)

    async def wait(self, run_id: str, seconds: float) -> None:
        """Wait for a change, at most so long. Raises `ContainerNotStartedError` when the container stops."""
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(run_id, set()).add(waiting)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await waiting
        finally:
            others = self._waiting.get(run_id)
            if others is not None:
                others.discard(waiting)
                if not others:
                    del self._waiting[run_id]
        if self._is_closed:
            raise ContainerNotStartedError(f"waiting for run {run_id}", "the container has stopped")


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


Pause: TypeAlias = Callable[[StoredRun | None], Awaitable[None]]
"""Waits until the run may have changed."""


def pauses(run_id: str, signals: RunSignals) -> Pause:
    """Return a function that waits for the run to change, with growing delays; call it with None to begin again."""
    seconds = _FIRST_PAUSE

    async def pause(run: StoredRun | None) -> None:
        nonlocal seconds
        longest = _SUSPENDED_PAUSE if run is not None and run.status == "suspended" else _LONGEST_PAUSE
        if run is None:
            seconds = _FIRST_PAUSE
            return
        await signals.wait(run_id, min(seconds, longest))
        seconds = min(seconds * 1.5, longest)

    return pause


class RunEvents(AsyncIterator[RunEvent]):
    """The events of a run, from `runs.events(…)`. It continues over suspensions and ends with `RunEnded`."""

    def __init__(
        self,
        run_id: str,
        after: int,
        on_home: Callable[[Callable[[], Coroutine[Any, Any, Any]]], Awaitable[Any]],
        opened: Callable[[], Awaitable[RunStore]],
        signals: RunSignals,
        error_of: Callable[[StoredRun], str | None],
    ) -> None:
        self.run_id = run_id
        self._after, self._on_home, self._opened, self._error_of = after, on_home, opened, error_of
        self._pause = pauses(run_id, signals)
        self._ready: deque[RunEvent] = deque()
        self._is_over = False

    def __aiter__(self) -> RunEvents:
        return self

    async def __anext__(self) -> RunEvent:
        """Return the next event; wait for it. Raises `RunNotFoundError`."""
        if not self._ready and not self._is_over:
            await self._on_home(self._wait)
        if not self._ready:
            raise StopAsyncIteration
        event = self._ready.popleft()
        self._after = event.number
        return event

    async def is_over(self) -> bool:
        """Return True if the run has ended and nothing is newer. Raises `RunNotFoundError`."""
        if not self._ready and not self._is_over:
            await self._on_home(self._read)
        return self._is_over and not self._ready

    async def aclose(self) -> None:
        """End the iteration; the run continues."""
        self._ready.clear()
        self._is_over = True

    async def _wait(self) -> None:
        while not self._ready and not self._is_over:
            run = await self._read()
            if not self._ready and not self._is_over:
                await self._pause(run)

    async def _read(self) -> StoredRun:
        """Read the next events into `_ready`. After the last event of an ended run, add `RunEnded`."""
        store = await self._opened()
        run = await store.load(self.run_id)  # before the events: an ended run gets no more of them
        if run is None:
            raise RunNotFoundError(self.run_id)
        found = await store.events(self.run_id, self._after, _AT_ONCE)
        self._ready.extend(RunEvent(each.number, each.at, event_from_json(each.data)) for each in found)
        if found:
            await self._pause(None)
        if run.status in ENDED and len(found) < _AT_ONCE:
            last = found[-1].number if found else self._after
            # Without a stored event at `after`, the reader has seen the end, which comes after the last stored event.
            if found or last == 0 or await store.events(self.run_id, last - 1, 1):
                end = RunEnded(run.status, self._error_of(run))
                self._ready.append(RunEvent(last + 1, run.updated_at, end))
            self._is_over = True
        return run


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
        raise TypeError(f"after={after!r}; use an event's number, the text of Last-Event-ID, or None")
    if after < 0:
        raise ValueError(f"after={after}; use the number of an event, or None for all")
    return after
