"""`RunLeases`: which runs this process executes, and the renewal of their leases.

A run has one owner at a time, which renews its lease. Not here: executing a run (`run_execution`), taking over
runs whose owner is gone (`take_over`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from contextvars import Context
from dataclasses import dataclass
from typing import Any

from ..errors import LeaseLostError
from ..execution.cancellation import CancellationsHere
from .store import RenewsApart, RunStore, StoredRun
from .stored_runs import StoredRuns

logger = logging.getLogger("toolbox.runs")

_RENEWALS = 3  # per lease


class TakenHereError(LeaseLostError):
    """This process itself has taken the run from the task that executes it, to cancel it."""


@dataclass(slots=True, eq=False)
class HeldRun:
    """A run that a task of this process executes. `has_left` is True if its last write has ended the lease.

    `is_taken_here` is True if this process itself takes the run from the task. `write_events` waits until the events so
    far are stored; None if they are not.
    """

    run: StoredRun
    task: asyncio.Task[Any]
    has_left: bool = False
    is_lost: bool = False
    is_taken_here: bool = False
    write_events: Callable[[], Awaitable[None]] | None = None

    def lose(self) -> None:
        """Cancel the task, once: a tool that takes long to end must not be cancelled again by the next renewal."""
        if not self.is_lost:
            self.is_lost = True
            self.task.cancel()


class RunLeases:
    """Renews the leases of the runs that this process executes; cancels the task of a run that was lost."""

    def __init__(self, runs: StoredRuns) -> None:
        self._runs = runs
        self._held: set[HeldRun] = set()
        self._renewing: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def hold(self, run: StoredRun) -> AsyncIterator[HeldRun]:
        """Renew the lease of a run that this process owns inside the block, and end it afterwards.

        Raises `LeaseLostError` at the next `await` inside the block if another process has taken the run.
        """
        # The renewal notices that the run is lost while the block waits for something else, perhaps for an hour. All
        # it can do from outside is to cancel the task of the block. The code around the block must not take that for
        # a cancellation by its own caller: so exactly this one is taken back, and becomes an error.
        cancellations = CancellationsHere()
        assert cancellations.task is not None
        held = HeldRun(run, cancellations.task)
        self._held.add(held)
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.get_running_loop().create_task(self._renew(), context=Context())
        try:
            yield held
        except asyncio.CancelledError:
            if not held.is_lost or not cancellations.take_back():
                raise
            raise (TakenHereError if held.is_taken_here else LeaseLostError)(run.id) from None
        except LeaseLostError as error:  # noticed by a write
            if held.is_taken_here and error.run_id == run.id:
                raise TakenHereError(run.id) from None
            raise
        finally:
            self._held.discard(held)
            try:
                if not (held.is_lost or held.has_left):
                    await self._release(run)
            finally:
                self._runs.looks.announce(run.id)

    def held_ids(self) -> set[str]:
        """Return the ids of the runs that this process executes."""
        return {each.run.id for each in self._held}

    @asynccontextmanager
    async def taking(self, run_id: str) -> AsyncIterator[None]:
        """Take a run inside the block, perhaps from a task of this process. What it has sent so far is stored before.

        Nothing that the task writes later is stored.
        """
        held = [each for each in self._held if each.run.id == run_id]
        for each in held:
            if each.write_events is not None:
                with suppress(Exception):  # the task gets the error as well
                    await each.write_events()
            each.is_taken_here = True
        try:
            yield
        finally:
            for each in held:
                each.is_taken_here = each.is_lost

    def lose(self, run_id: str) -> list[asyncio.Task[Any]]:
        """Cancel the execution of a run that was taken from here now, not at the next renewal. Returns its tasks."""
        held = [each for each in self._held if each.run.id == run_id]
        for each in held:
            each.lose()
        return [each.task for each in held]

    async def give_up(self, run_id: str) -> None:
        """Do the same, and wait for the end of the execution, at most one lease."""
        if tasks := self.lose(run_id):
            await asyncio.wait(tasks, timeout=(await self._runs.open()).lease)

    async def _release(self, run: StoredRun) -> None:
        """End the lease, so that another process continues at once. A cancellation waits a moment for it."""

        async def release() -> None:
            with suppress(Exception):  # the lease then ends by itself
                await (await self._runs.open()).release(run.id, run.generation)

        # Shielded: a stop cancels the block, and this is what the stop wants to reach.
        releasing = asyncio.ensure_future(release())
        try:
            await asyncio.shield(releasing)
        except asyncio.CancelledError:
            await asyncio.wait([releasing], timeout=1.0)
            raise

    async def _renew(self) -> None:
        """Renew all leases until there are none."""
        store = await self._runs.open()
        while self._held:
            # Tools can take all connections of a pool, so a store may renew on others, and close them afterwards.
            async with store.renewing() if isinstance(store, RenewsApart) else nullcontext():
                await self._renew_until_idle(store)

    async def _renew_until_idle(self, store: RunStore) -> None:
        """Renew all leases. A renewal that has to wait does not delay the others."""
        renewals: dict[HeldRun, asyncio.Task[None]] = {}
        try:
            while self._held:
                await asyncio.sleep(store.lease / _RENEWALS)
                renewals = {held: renewal for held, renewal in renewals.items() if not renewal.done()}
                for each in self._held - renewals.keys():
                    renewals[each] = asyncio.create_task(self._renew_one(store, each))
        finally:
            # No run is held, or the container stops: what they use is closed next.
            for renewal in renewals.values():
                renewal.cancel()
            await asyncio.gather(*renewals.values(), return_exceptions=True)

    async def renew_now(self) -> None:
        """Renew all leases once, outside of their turn."""
        if held := [*self._held]:
            store = await self._runs.open()
            await asyncio.gather(*(self._renew_one(store, each) for each in held))

    async def _renew_one(self, store: RunStore, held: HeldRun) -> None:
        run = held.run
        try:
            is_ours = await store.renew(run.id, run.generation)
            if not is_ours:
                # No lease of the same generation: the run has just ended in this process.
                found = await store.load(run.id)
                is_ours = found is not None and found.generation == run.generation
        except Exception as error:  # another try follows; if the lease is lost until then, writes are refused
            logger.warning("cannot renew the lease of run %s: %s: %s", run.id, type(error).__name__, error)
            return
        if not is_ours and held in self._held:
            held.lose()

    async def stop(self) -> None:
        """Stop renewing."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
