"""Following a run in any process: `RunEvents` iterates over its events, and waits for the next.

Not here: writing events and their JSON (`event_log`), waiting for changes in the store (`run_looks`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from ..service_events import ServiceEvent, ServiceWork
from .event_log import event_from_json
from .store import ENDED, RunLook, RunStatus, StoredRun
from .stored_runs import StoredRuns

_AT_ONCE = 500  # events read at once

_LAST = 2**31 - 1  # the largest number that each database can compare


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


class RunEvents(AsyncIterator[RunEvent]):
    """The events of a run, from `runs.events(…)`. It continues over suspensions and ends with `RunEnded`.

    The iteration raises `RunNotFoundError`.
    """

    def __init__(
        self,
        runs: StoredRuns,
        run_id: str,
        after: int,
        error_of: Callable[[StoredRun], str | None],
        *,
        hidden: tuple[type[Any], ...] = (ServiceWork,),
    ) -> None:
        self.run_id = run_id
        self._runs, self._after, self._error_of, self._hidden = runs, after, error_of, hidden
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
        looks = self._runs.looks
        while not self._ready and not self._is_over:
            after = self._after
            look = await looks.after(self.run_id, self._seen)  # first: an ended run gets no more events
            found = await looks.shared(self.run_id, after, partial(self._read, after))
            self._ready.extend(each for each in found if not isinstance(each.event, self._hidden))
            if found and not self._ready:
                self._after = found[-1].number
            if len(found) == _AT_ONCE:
                continue
            self._seen = look
            if look.status in ENDED:
                # Its end comes after its last event. A reader who has a later number has seen the end.
                if after <= look.events:
                    self._ready.append(await looks.shared(self.run_id, "end", partial(self._read_end, look)))
                self._is_over = True

    async def _read(self, after: int) -> list[RunEvent]:
        async with self._runs.using(self.run_id) as store:
            found = await store.events(self.run_id, after, _AT_ONCE)
        find_service = self._runs.find_service
        return [RunEvent(each.number, each.at, event_from_json(each.data, find_service)) for each in found]

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
        is_number = after.isascii() and after.isdigit() and len(after) <= 18
        return min(int(after), _LAST) if is_number else 0
    if isinstance(after, bool) or not isinstance(after, int):
        raise TypeError(f"invalid after={after!r}; use an event's number, the text of Last-Event-ID, or None")
    if after < 0:
        raise ValueError(f"invalid after={after}; use the number of an event, or None for all")
    return min(after, _LAST)
