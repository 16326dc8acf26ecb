"""`RunLooks`: looks into the store for all in this process who wait for a run, so that many cost as much as one.

Not here: what they wait for (`run_events`, `run_execution`, `stored_runs`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from contextlib import suppress
from contextvars import Context
from typing import Any, TypeVar

from ..errors import ContainerNotStartedError
from .store import RunLook

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE, _SUSPENDED_PAUSE = 0.02, 0.25, 1.0  # seconds between two looks into the store
_KEPT = 0.25  # seconds that a watch stays without anyone who waits: after a change they read, and then wait again


class _Watch:
    """One run that somebody waits for, on one event loop: the last look, and what was read since then."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.last: RunLook | None = None
        self.next: asyncio.Future[RunLook] = self.loop.create_future()
        self.shared: dict[Hashable, asyncio.Task[Any]] = {}
        self.waiting = 0
        self.wakes = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def publish(self, look: RunLook) -> None:
        """Wake all who wait, and forget what was read before this look."""
        self.last, self.shared = look, {}
        done, self.next = self.next, self.loop.create_future()
        if not done.done():
            done.set_result(look)

    def fail(self, error: BaseException) -> None:
        """Raise an error in all who wait."""
        if not self.next.done():
            self.next.set_exception(error)
            self.next.exception()  # perhaps nobody waits


class RunLooks:
    """What this process knows about the runs that somebody waits for. `look` reads one, `announce` tells of changes."""

    def __init__(self, look: Callable[[str], Awaitable[RunLook]]) -> None:
        """`look` raises `RunNotFoundError`."""
        self._look = look
        self._watches: dict[tuple[str, asyncio.AbstractEventLoop], _Watch] = {}
        self._is_closed = False

    async def close(self) -> None:
        """End all waiting: it raises `ContainerNotStartedError` from now on.

        Waits for the looks of this event loop: the stores that they ask are closed next.
        """
        self._is_closed = True
        here, ending = asyncio.get_running_loop(), []
        for (run_id, _), watch in [*self._watches.items()]:
            if watch.loop is not here:
                watch.loop.call_soon_threadsafe(self._end_watch, run_id, watch)
                continue
            self._end_watch(run_id, watch)
            if watch.task is not None:
                ending.append(watch.task)
        await asyncio.gather(*ending, return_exceptions=True)

    def announce(self, run_id: str) -> None:
        """Look again at once: this process has changed the run. Changes elsewhere are found by looking."""
        for (watched, _), watch in [*self._watches.items()]:
            if watched == run_id:
                watch.loop.call_soon_threadsafe(watch.wakes.set)

    def announce_all(self) -> None:
        """Look at all runs again at once."""
        for watch in [*self._watches.values()]:
            watch.loop.call_soon_threadsafe(watch.wakes.set)

    async def after(self, run_id: str, seen: RunLook | None) -> RunLook:
        """Return a look that differs from `seen`; wait for it. None returns the present one, perhaps of a moment ago.

        Nothing is missed by those who look first, then read, and then wait for a look after that one. Raises
        `RunNotFoundError`, the errors of the store, and `ContainerNotStartedError` when the container stops.
        """
        if self._is_closed:
            raise _make_stopped_error(run_id)
        watch = self._watch(run_id)
        watch.waiting += 1
        watch.wakes.set()
        try:
            if watch.last is not None and watch.last != seen:
                return watch.last
            return await asyncio.shield(watch.next)
        finally:
            watch.waiting -= 1

    async def shared(self, run_id: str, key: Hashable, read: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return what `read()` returns. Those who ask for the same key after the same look share one reading."""
        watch = self._watch(run_id)
        reading = watch.shared.get(key)
        if reading is None:
            reading = watch.shared[key] = watch.loop.create_task(read(), context=Context())
            shared = watch.shared
            reading.add_done_callback(lambda done: None if _has_succeeded(done) else shared.pop(key, None))
        found: T = await asyncio.shield(reading)
        return found

    def _watch(self, run_id: str) -> _Watch:
        key = (run_id, asyncio.get_running_loop())
        watch = self._watches.get(key)
        if watch is None:
            watch = self._watches[key] = _Watch()
            # In an empty context: it belongs to none of those who wait.
            watch.task = watch.loop.create_task(self._keep_looking(run_id, watch), context=Context())
        return watch

    async def _keep_looking(self, run_id: str, watch: _Watch) -> None:
        pause = _FIRST_PAUSE
        try:
            while not self._is_closed:
                watch.wakes.clear()
                look = await self._look(run_id)
                if look != watch.last:
                    watch.publish(look)
                    pause = _FIRST_PAUSE
                longest = _SUSPENDED_PAUSE if look.status == "suspended" else _LONGEST_PAUSE
                await _wait_for(watch.wakes, min(pause, longest))
                pause = min(pause * 1.5, longest)
                if not watch.waiting and not await _wait_for(watch.wakes, _KEPT):
                    return
        except Exception as error:
            watch.fail(error)
        finally:
            self._forget(run_id, watch)

    def _end_watch(self, run_id: str, watch: _Watch) -> None:
        watch.fail(_make_stopped_error(run_id))
        if watch.task is not None:
            watch.task.cancel()

    def _forget(self, run_id: str, watch: _Watch) -> None:
        if self._watches.get((run_id, watch.loop)) is watch:
            del self._watches[run_id, watch.loop]
        if watch.waiting:  # the loop stops, or somebody has just begun to wait
            watch.fail(_make_stopped_error(run_id))


async def _wait_for(event: asyncio.Event, seconds: float) -> bool:
    """Return True as soon as the event is set, and False after this time."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


def _has_succeeded(done: asyncio.Task[Any]) -> bool:
    return not done.cancelled() and done.exception() is None


def _make_stopped_error(run_id: str) -> ContainerNotStartedError:
    return ContainerNotStartedError(f"waiting for run {run_id}", "the container has stopped")
