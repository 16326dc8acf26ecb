"""Starts runs, owns them while they run here, takes over those whose process is gone, and follows them.

A run has one owner at a time, which renews its lease. Not here: what happens inside a run (`places`), answers
(`inbox`), engines on many machines (`toolbox.dbos`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, nullcontext, suppress
from contextvars import Context
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload
from uuid import uuid4

from ..errors import (
    LeaseLostError,
    McpConnectionError,
    RunBusyError,
    RunConflictError,
    RunIncompatibleError,
    RunNotFoundError,
)
from ..limits import current_account, refuse_if_used_up
from .event_log import RunEvents, RunSignals, number_after, pauses
from .store import ENDED, RenewsApart, Run, RunStore, StoredRecord, StoredRun

logger = logging.getLogger("toolbox.runs")

AT_ONCE = 100
"""Runs that a process takes over at the same time."""

_RENEWALS = 3  # per lease
_FIRST_PAUSE = 0.25  # seconds before a run that could not continue is tried again; each time twice as long
_AFTER_ERRORS = 1.0  # seconds between two looks for lapsed runs while the store fails

P = ParamSpec("P")
T = TypeVar("T")


def owner_name() -> str:
    """Return a name for this start of a container: host, process and a random part."""
    return f"{socket.gethostname()}:{os.getpid()}:{uuid4().hex[:8]}"


# --- owning


@dataclass(slots=True, eq=False)
class _Held:
    """A run that a task of this process executes."""

    run_id: str
    generation: int
    task: asyncio.Task[Any]
    is_lost: bool = False
    renewing: asyncio.Task[None] | None = None

    def lose(self) -> None:
        """Cancel the task, once: a tool that takes long to end must not be cancelled again by the next renewal."""
        if not self.is_lost:
            self.is_lost = True
            self.task.cancel()


class OwnedRuns:
    """Renews the leases of the runs that this process executes; cancels the task of a run that was lost."""

    def __init__(self, opened: Callable[[], Awaitable[RunStore]]) -> None:
        self._opened = opened
        self._held: set[_Held] = set()
        self._renewing: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def owned(self, run_id: str, generation: int) -> AsyncIterator[None]:
        """Renew the lease inside the block, and end it afterwards if the run is still running.

        Raises `LeaseLostError` at the next `await` inside the block if another process has taken the run.
        """
        task = asyncio.current_task()
        assert task is not None
        held = _Held(run_id, generation, task)
        self._held.add(held)
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.get_running_loop().create_task(self._renew(), context=Context())
        try:
            yield
        except asyncio.CancelledError:
            if not held.is_lost or task.uncancel() > 0:
                raise
            raise LeaseLostError(run_id) from None
        finally:
            self._held.discard(held)
            if not held.is_lost:
                await self._released(held)

    def ids(self) -> set[str]:
        """Return the ids of the runs that this process executes."""
        return {each.run_id for each in self._held}

    async def give_up(self, run_id: str) -> None:
        """Cancel the execution of a run that was taken from here, and wait for its end, at most one lease."""
        tasks = []
        for each in self._held:
            if each.run_id == run_id:
                each.lose()
                tasks.append(each.task)
        if tasks:
            await asyncio.wait(tasks, timeout=(await self._opened()).lease)

    async def _released(self, held: _Held) -> None:
        async def release() -> None:
            with suppress(Exception):  # the lease then ends by itself
                await (await self._opened()).release(held.run_id, held.generation)

        releasing = asyncio.ensure_future(release())
        try:
            await asyncio.shield(releasing)
        except asyncio.CancelledError:
            await asyncio.wait([releasing], timeout=1.0)
            raise

    async def _renew(self) -> None:
        """Renew all leases until there are none."""
        store = await self._opened()
        while self._held:
            # Tools can take all connections of a pool, so a store may renew on others, and close them afterwards.
            async with store.renewing() if isinstance(store, RenewsApart) else nullcontext():
                await self._renew_until_idle(store)

    async def _renew_until_idle(self, store: RunStore) -> None:
        """Renew all leases. A renewal that has to wait does not delay the others."""
        while self._held:
            await asyncio.sleep(store.lease / _RENEWALS)
            for each in self._held:
                if each.renewing is None or each.renewing.done():
                    each.renewing = asyncio.create_task(self._renew_one(store, each))

    async def _renew_one(self, store: RunStore, held: _Held) -> None:
        try:
            is_ours = await store.renew(held.run_id, held.generation)
            if not is_ours:
                # No lease of the same generation: the run has just ended in this process.
                found = await store.load(held.run_id)
                is_ours = found is not None and found.generation == held.generation
        except Exception as error:  # another try follows; if the lease is lost until then, writes are refused
            logger.warning("cannot renew the lease of run %s: %s: %s", held.run_id, type(error).__name__, error)
            return
        if not is_ours and held in self._held:
            held.lose()

    async def stop(self) -> None:
        """Stop renewing."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)


# --- where a run executes


class RunEngine(Protocol):
    """Brings a run to a process that calls `runs.execute(run_id)`. Register a bean of this type to use it.

    An engine that also has `async def attach(runs, executes)` is given the `Runs` of its container at start; `executes`
    is False in a container with `take_over_runs=False`, which only submits. `async def detach()` is called at the stop.
    """

    async def submit(self, run_id: str, generation: int) -> None:
        """Have the run executed at least once, in any process; return without waiting for it.

        Called when a run starts or was resumed, and for each run whose owner is gone, until it has an owner again.
        `generation` is the run's generation at that time, so `run_id` and `generation` name one delivery.
        """
        ...


class LocalRunEngine(RunEngine):
    """Executes runs as tasks of this process. This is the default engine."""

    def __init__(self) -> None:
        self._execute: Callable[[str], Awaitable[None]] | None = None

    async def attach(self, runs: RunStarting, executes: bool) -> None:
        """See `RunEngine`."""
        self._execute = runs.execute_in_background

    async def submit(self, run_id: str, generation: int) -> None:
        """See `RunEngine`."""
        if self._execute is not None:
            await self._execute(run_id)


# --- starting, executing and taking over


class RunStarting:
    """The part of `Runs` that starts, executes, takes over and follows runs. `Runs` provides the abstract members."""

    def __init__(self) -> None:
        self.signals = RunSignals()
        self.owner = owner_name()
        self.progress: Callable[[str, StoredRun], None] | None = None
        self._owned = OwnedRuns(self._opened)
        self._engine: RunEngine | None = None
        self._background: dict[str, asyncio.Task[Any]] = {}
        self._detached_tasks: set[asyncio.Task[Any]] = set()
        self._sweeping: asyncio.Task[None] | None = None
        self._refused: set[str] = set()  # the runs that this program cannot continue
        self._reported: dict[str, str] = {}  # the last reason that was logged
        self._later: dict[str, float] = {}  # when to try a run again that could not continue here
        self._tries: dict[str, int] = {}  # how often it could not
        self._room = asyncio.Event()

    # --- provided by `Runs`

    async def _opened(self) -> RunStore:
        raise NotImplementedError

    async def _on_own_loop(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        raise NotImplementedError

    async def _run_engine(self) -> RunEngine:
        raise NotImplementedError

    def _home(self) -> asyncio.AbstractEventLoop | None:
        """Return the loop of the container; None for the loop of the caller. Raises `ContainerNotStartedError`."""
        raise NotImplementedError

    async def _drive(self, stored: StoredRun) -> None:
        raise NotImplementedError

    def _public(self, stored: StoredRun) -> Run[Any]:
        raise NotImplementedError

    # --- the public part

    @overload
    async def start(self, method: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> Run[T]: ...

    @overload
    async def start(
        self, method: Callable[Concatenate[Any, P], Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Run[T]: ...

    async def start(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Run[Any]:
        """Start a call of a service method as a run, and return without waiting for it.

            run = await runs.start(transfers.transfer, "order-7", order)

        `method` is a method of a service bean, or of a service class that one registered service has. The run continues
        when the caller leaves. If the run of this id exists with the same call, it is returned. Inside a `usage_limits`
        block, or in a tool with limits, what is left of them is the run's own limit. Raises `RunConflictError` if the
        run exists with another method, identity, arguments or attributes, `UsageLimitExceededError` if nothing is left,
        `UnauthenticatedError` or `ForbiddenError`, and `TypeError` for arguments that do not fit.
        """
        return await self._on_own_loop(lambda: self._start(method, args, kwargs))

    async def _start(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run[Any]:
        wanted, records = await self._new_run(method, args, kwargs)
        store = await self._opened()
        if (account := current_account.get()) is not None and await store.load(wanted.id) is None:
            refuse_if_used_up(account)
        while True:
            if is_new := await store.create(wanted, records):
                await self._submit(wanted)
            found = await store.load(wanted.id)
            if found is None:  # deleted in between
                continue
            if not is_new:
                if (reason := self._conflict(found, wanted)) is not None:
                    raise RunConflictError(wanted.id, reason)
                if found.status == "running" and found.owner is None:  # the process that created it may have crashed
                    await self._submit(found)
            return self._public(found)

    async def execute(self, run_id: str, timeout: float | None = None) -> Run[Any]:
        """Continue one run in this process, and return it when it has ended or is suspended.

        Waits while another process owns the run. After `timeout` seconds without owning it, raises `RunBusyError`, so
        that a queue can deliver the run again. Safe to call any number of times, in any process. If the caller is
        cancelled, the run stays `running` for another process. Raises `RunNotFoundError` and `RunIncompatibleError`.
        """
        return await self._on_home(lambda: self._execute(run_id, timeout))

    async def _execute(self, run_id: str, timeout: float | None) -> Run[Any]:
        store = await self._opened()
        until = None if timeout is None else time.monotonic() + timeout
        pause = pauses(run_id, self.signals)
        while True:
            stored = await store.load(run_id)
            if stored is None:
                raise RunNotFoundError(run_id)
            if stored.status != "running":
                return self._public(stored)
            if (owned := await store.acquire(run_id, self.owner)) is not None:
                await self._continue(owned)
            elif until is not None and time.monotonic() >= until:
                raise RunBusyError(run_id)
            else:
                await pause(stored)

    def events(self, run_id: str | Run[Any], after: int | str | None = None) -> RunEvents:
        """Return the events of a run, in any process: `async for event in runs.events(run_id): ...`.

        Yields `RunEvent(number, at, event)`, waits for more, continues over suspensions, and ends after `RunEnded`.
        `after` is the number of the last event that the reader has, also as the text of the header `Last-Event-ID`;
        None yields all. The iteration raises `RunNotFoundError`.
        """
        return RunEvents(_id(run_id), number_after(after), self._on_home, self._opened, self.signals, self._error_text)

    @overload
    async def result(self, run: Run[T], timeout: float | None = None) -> T: ...

    @overload
    async def result(self, run: str, timeout: float | None = None) -> Any: ...

    async def result(self, run: str | Run[Any], timeout: float | None = None) -> Any:
        """Wait for the end of a run, also over suspensions, and return the value of its method.

        Raises `RunFailedError`, `RunCancelledError`, `RunNotFoundError`, and `TimeoutError` after `timeout` seconds.
        """
        async with asyncio.timeout(timeout):
            stored = await self._on_home(lambda: self._until_ended(_id(run)))
        return self._outcome(stored)

    async def _until_ended(self, run_id: str) -> StoredRun:
        store, pause = await self._opened(), pauses(run_id, self.signals)
        while True:
            stored = await store.load(run_id)
            if stored is None:
                raise RunNotFoundError(run_id)
            if stored.status in ENDED:
                return stored
            await pause(stored)

    async def _on_home(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Await `work()` on the container's loop. The container does not wait for it when it stops."""
        home = self._home()
        if home is None or home is asyncio.get_running_loop():
            return await work()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(), home))

    # --- executing

    async def _continue(self, stored: StoredRun) -> None:
        """Execute a run that this process has just acquired; returns also if it was lost."""
        if self.progress is not None:
            self.progress("executes", stored)

        async def work() -> None:
            async with self._owned.owned(stored.id, stored.generation):
                await self._drive(stored)

        try:
            # In an empty context: the run belongs to no request, limit or trace of the code that continues it.
            await asyncio.create_task(work(), context=Context())
        except LeaseLostError:
            logger.warning("another process has taken over run %s", stored.id)
        finally:
            self.signals.announce(stored.id)
            if self.progress is not None:
                await self._report_end(self.progress, stored)

    async def _report_end(self, progress: Callable[[str, StoredRun], None], stored: StoredRun) -> None:
        with suppress(Exception):  # the database is away
            now = await (await self._opened()).load(stored.id)
            progress(now.status if now is not None else "deleted", stored)

    async def execute_in_background(self, run_id: str) -> None:
        """Execute the run in a task, unless it already has one."""
        if run_id in self._background:
            return
        task = asyncio.get_running_loop().create_task(self._execute_logged(run_id), context=Context())
        self._keep_in_background(run_id, task)

    def _keep_in_background(self, key: str, task: asyncio.Task[Any]) -> None:
        """Keep a task until it has ended; the stop cancels it."""

        def ended(done: asyncio.Task[Any]) -> None:
            if self._background.get(key) is done:  # not a later one, after this one has lost the run
                del self._background[key]
            self._room.set()
            if not done.cancelled() and (error := done.exception()) is not None:  # also reads it for callers that left
                logger.debug("run %s ended with %s", key.partition("\0")[0], type(error).__name__)

        self._background[key] = task
        task.add_done_callback(ended)

    async def _execute_logged(self, run_id: str) -> None:
        try:
            await self._execute(run_id, 0)
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
                logger.error("cannot continue a run: %s", error)
        except Exception as error:
            await self._try_later(run_id)
            logger.error("run %s stays as it is and is tried again: %s", run_id, error, exc_info=error)

    async def _try_later(self, run_id: str) -> None:
        """Let the run be taken again after a pause, which grows up to one lease."""
        store = await self._opened()
        tries = self._tries[run_id] = self._tries.get(run_id, 0) + 1
        self._later[run_id] = time.monotonic() + min(_FIRST_PAUSE * 2 ** min(tries, 10), store.lease)

    async def _submit(self, stored: StoredRun) -> None:
        """Hand the run to the engine. An engine that fails is called again later, by a process that takes over runs."""
        if self._engine is None:
            await self.open(take_over=False)
        assert self._engine is not None
        try:
            await self._engine.submit(stored.id, stored.generation)
        except Exception as error:
            logger.error("the run engine failed to take run %s; it is submitted again later", stored.id, exc_info=error)

    # --- taking over

    async def store(self) -> RunStore:
        """Return the opened store."""
        return await self._opened()

    async def open(self, *, take_over: bool) -> None:
        """Open the store and the engine; take over lapsed runs from now on if asked for. Called at start."""
        store = await self._opened()
        self._engine = await self._run_engine()
        if (attach := getattr(self._engine, "attach", None)) is not None:
            await attach(self, take_over)
        if take_over:
            self._sweeping = asyncio.get_running_loop().create_task(self._sweep(store), context=Context())

    async def stop_taking_over(self) -> None:
        """Begin no more runs; those that run here continue. The first part of the stop."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)
            self._sweeping = None

    async def close(self) -> None:
        """Cancel the runs that this process executes, and end their leases and all waiting."""
        engine, self._engine = self._engine, None
        self.signals.close()
        if (detach := getattr(engine, "detach", None)) is not None:
            await detach()
        running = [*self._background.values(), *self._detached_tasks]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._owned.stop()

    async def _sweep(self, store: RunStore) -> None:
        while True:
            more, pause = False, store.lease
            try:
                more = await self._take_over(store)
            except Exception as error:
                pause = min(_AFTER_ERRORS, pause)
                logger.warning("cannot look for runs with expired leases: %s: %s", type(error).__name__, error)
            now = time.monotonic()
            pause = min([pause, *(max(at - now, _FIRST_PAUSE) for at in self._later.values())])
            self._room.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    if more:
                        await self._room.wait()
                    else:
                        await asyncio.sleep(pause)

    async def _take_over(self, store: RunStore) -> bool:
        """Submit lapsed runs to the engine. Returns True if there may be more as soon as one has ended."""
        room = AT_ONCE - len(self._background)
        self._later = {run_id: at for run_id, at in self._later.items() if at > time.monotonic()}
        self._tries = {
            run_id: self._tries[run_id] for run_id in self._tries if run_id in {*self._later, *self._background}
        }
        # After the event loop stood still for a lease, also runs that continue here are lapsed until they are renewed.
        known = {*self._refused, *self._background, *self._later, *self._owned.ids()}
        lapsed = [each for each in await store.lapsed(AT_ONCE + len(known)) if each not in known]
        # Each process begins elsewhere, so that they do not all try to take the same runs.
        random.shuffle(lapsed)
        for run_id in lapsed[: max(room, 0)]:
            stored = await store.load(run_id)
            if stored is not None and stored.status == "running":
                await self._submit(stored)
        for run_id in [*self._reported]:  # the program of another process may have been able to continue it
            stored = await store.load(run_id)
            if stored is None or stored.status in ENDED:
                del self._reported[run_id]
                self._refused.discard(run_id)
        return len(lapsed) > 0 and isinstance(self._engine, LocalRunEngine)

    # --- provided by `Runs`, too

    async def _new_run(
        self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[StoredRun, list[StoredRecord]]:
        raise NotImplementedError

    def _conflict(self, found: StoredRun, wanted: StoredRun) -> str | None:
        raise NotImplementedError

    def _error_text(self, stored: StoredRun) -> str | None:
        raise NotImplementedError

    def _outcome(self, stored: StoredRun) -> Any:
        raise NotImplementedError


def _id(run: str | Run[Any]) -> str:
    return run.id if isinstance(run, Run) else run
