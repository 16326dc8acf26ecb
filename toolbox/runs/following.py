"""Follows a run in any process: its events by number, and its end.

Not here: the JSON of events and writing them (`event_log`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeAlias

from ..chat import ServiceEvent
from ..errors import ContainerNotStartedError, RunNotFoundError
from .event_log import event_from_json
from .store import ENDED, RunStatus, RunStore, StoredRun

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
    """Return a function that waits for a change, each time a little longer, and short again once `reset` is called."""
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
