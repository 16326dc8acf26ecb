"""`TakeOver`: hands runs to the engine, and looks for runs whose process is gone or whose time has come.

Not here: leases of the runs that execute here (`run_leases`), engines (`run_engines`).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from contextvars import Context
from typing import Any

from ..errors import McpConnectionError, RunBusyError, RunIncompatibleError, RunNotFoundError
from ..safe_text import describe_store_error
from ..security import UnauthenticatedError
from ..store_clock import StoreClock, clock_of
from .run_engines import LocalRunEngine, RunEngine
from .run_execution import RunExecution
from .runs_host import RunsHost
from .store import ENDED, RunStore, StoredRun
from .stored_runs import StoredRuns

logger = logging.getLogger("toolbox.runs")

AT_ONCE = 100
"""Runs that a process takes over at the same time."""

_FIRST_PAUSE = 0.25  # seconds before a run that could not continue is tried again; each time twice as long
_UNTIL_NEXT_TIME = 0.5  # seconds between two looks where runs are tried again, or their pending calls expire
_AFTER_ERRORS = 1.0  # seconds between two looks for lapsed runs while the store fails


class TakeOver:
    """Submits runs to the engine: new ones, answered ones, and those whose lease has expired.

    `expire` rejects the calls of a run that have expired. `may_wait` returns True if runs of this program may wait for
    a time.
    """

    def __init__(
        self,
        host: RunsHost,
        runs: StoredRuns,
        execution: RunExecution,
        expire: Callable[[str], Awaitable[Coroutine[Any, Any, object] | None]],
        may_wait: Callable[[], bool],
    ) -> None:
        self._host, self._runs, self._execution, self._expire = host, runs, execution, expire
        self._may_wait = may_wait
        self._engine: RunEngine | None = None
        self._clock = StoreClock()
        self._sweeping: asyncio.Task[None] | None = None
        self._watches_times = False
        self._rejecting: list[asyncio.Event] = []  # set when the expired calls of a run are rejected
        self._wakes = asyncio.Event()  # the next look begins at once
        self._asked: list[asyncio.Future[None]] = []  # those who wait for its end
        self._has_more = False
        execution.when_one_ends = self._look_if_there_is_more
        self._refused: set[str] = set()  # the runs that this program cannot continue
        self._reported: dict[str, str] = {}  # the last reason that was logged
        self._later: dict[str, float] = {}  # when to try a run again that could not continue here
        self._tries: dict[str, int] = {}  # how often it could not

    async def open(self, runs: object, *, take_over: bool) -> None:
        """Open the store and the engine, which gets `runs`; take over lapsed runs from now on if asked for."""
        if self.is_open:  # a function that runs at startup has started a run
            await self.close()
        store = await self._runs.open()
        self._clock = clock_of(store)
        self._engine = await self._host.run_engine()
        if (attach := getattr(self._engine, "attach", None)) is not None:
            await attach(runs, take_over)
        self._watches_times = self._may_wait()
        if take_over:
            self._start_sweeping(store)

    def watch_times(self, store: RunStore) -> None:
        """Look often from now on: a run waits for its next try, or for the expiry of a call."""
        if self._sweeping is None or self._sweeping.done():
            self._start_sweeping(store)
        if not self._watches_times:
            self._watches_times = True
            self._wakes.set()

    def _start_sweeping(self, store: RunStore) -> None:
        self._sweeping = asyncio.get_running_loop().create_task(self._sweep(store), context=Context())

    @property
    def is_open(self) -> bool:
        """True from `open` to `close`."""
        return self._engine is not None

    async def submit(self, stored: StoredRun) -> None:
        """Hand the run to the engine. An engine that fails is called again later, by a process that takes over runs."""
        assert self._engine is not None

        try:
            await self._engine.submit(stored.id, stored.generation)
        except Exception as error:
            logger.error("the run engine failed to take run %s; it is submitted again later", stored.id, exc_info=error)

    async def stop(self) -> None:
        """Take over no more runs; those that run here continue."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)
            self._sweeping = None

    async def close(self) -> None:
        """Close the engine."""
        engine, self._engine = self._engine, None
        if (detach := getattr(engine, "detach", None)) is not None:
            await detach()

    # --- executing what an engine delivers

    async def execute_in_background(self, run_id: str) -> None:
        """Execute the run in a task, unless it already has one."""
        if run_id not in self._execution.kept_ids():
            self._execution.spawn(run_id, self.execute_or_try_later(run_id))

    async def execute_or_try_later(self, run_id: str) -> None:
        """Execute a run; log what keeps it from continuing here, and note when to submit it again."""
        await self._try(run_id, self._execution.execute_or_wait(run_id, 0))

    async def _try(self, run_id: str, execution: Coroutine[Any, Any, object]) -> None:
        """Await the execution of a run; log what keeps it from continuing here, and note when to try again."""
        try:
            await execution
            self._refused.discard(run_id)
            self._tries.pop(run_id, None)
        except (RunBusyError, RunNotFoundError):
            return  # another process was faster
        except RunIncompatibleError as error:
            if isinstance(error.__cause__, McpConnectionError):
                # Not the program has changed: a server with the run's tools is away, perhaps for a minute.
                await self._try_later(run_id)
            else:
                self._refused.add(run_id)
            if self._reported.get(run_id) != error.reason:
                self._reported[run_id] = error.reason
                logger.error("cannot continue run %s: %s", run_id, error)
        except Exception as error:
            if isinstance(error, UnauthenticatedError) and error.lacks_token:
                self._refused.add(run_id)  # only its user can help, who continues it with `resume`
                self._reported[run_id] = str(error)
                logger.warning("run %s waits for its user: %s", run_id, error)
            else:
                await self._try_later(run_id)
                logger.error("run %s failed and will be retried: %s", run_id, error, exc_info=error)

    async def _try_later(self, run_id: str) -> None:
        """Let the run be taken again after a pause, which grows up to one lease."""
        store = await self._runs.open()
        tries = self._tries[run_id] = self._tries.get(run_id, 0) + 1
        self._later[run_id] = self._clock.monotonic() + min(_FIRST_PAUSE * 2 ** min(tries, 10), store.lease)

    async def _reject_expired(self, run_id: str, rejected: asyncio.Event) -> None:
        """Reject the calls of a run that have expired, and continue it here."""
        try:
            execution = await self._expire(run_id)
        finally:
            rejected.set()
        if execution is not None:
            await execution

    # --- looking for lapsed runs

    async def look_now(self) -> None:
        """Look for lapsed runs at once, and return when expired calls are rejected.

        Does nothing in a container that takes no runs over.
        """
        if self._sweeping is None or self._sweeping.done():
            return
        looked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked.append(looked)
        self._wakes.set()
        await asyncio.wait({looked, self._sweeping}, return_when=asyncio.FIRST_COMPLETED)
        for rejected in [*self._rejecting]:
            await rejected.wait()

    def _look_if_there_is_more(self) -> None:
        if self._has_more:
            self._wakes.set()

    async def _sweep(self, store: RunStore) -> None:
        while True:
            self._wakes.clear()
            asked, self._asked, self._has_more = self._asked, [], False
            pause = min(_UNTIL_NEXT_TIME, store.lease) if self._watches_times else store.lease
            try:
                self._has_more = await self._take_over(store)
            except Exception as error:
                pause = min(_AFTER_ERRORS, pause)
                logger.warning("cannot look for runs with expired leases: %s", describe_store_error(error))
            for each in asked:
                if not each.done():  # its caller may have left
                    each.set_result(None)
            now = self._clock.monotonic()
            pause = min([pause, *(max(at - now, _FIRST_PAUSE) for at in self._later.values())])
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wakes.wait()

    async def _take_over(self, store: RunStore) -> bool:
        """Submit lapsed runs to the engine, and reject expired calls of others.

        Returns True if there may be more as soon as one has ended.
        """
        self._rejecting = [each for each in self._rejecting if not each.is_set()]
        busy = self._execution.kept_ids()
        room = AT_ONCE - len(busy)
        self._later = {run_id: at for run_id, at in self._later.items() if at > self._clock.monotonic()}
        self._tries = {run_id: self._tries[run_id] for run_id in self._tries if run_id in {*self._later, *busy}}
        # After the event loop stood still for a lease, also runs that continue here are lapsed until they are renewed.
        known = {*self._refused, *busy, *self._later, *self._execution.leases.held_ids()}
        lapsed = [each for each in await store.lapsed(AT_ONCE + len(known)) if each not in known]
        # Each process begins elsewhere, so that they do not all try to take the same runs.
        random.shuffle(lapsed)
        for run_id in lapsed[: max(room, 0)]:
            stored = await store.load(run_id)
            if stored is not None and stored.status == "running":
                await self.submit(stored)
            elif stored is not None and stored.status == "suspended":
                self._rejecting.append(rejected := asyncio.Event())
                self._execution.spawn(run_id, self._try(run_id, self._reject_expired(run_id, rejected)))
        for run_id in [*self._reported]:  # the program of another process may have been able to continue it
            stored = await store.load(run_id)
            if stored is None or stored.status in ENDED:
                del self._reported[run_id]
                self._refused.discard(run_id)
        return len(lapsed) > 0 and isinstance(self._engine, LocalRunEngine)
