"""`RunLeases`: which runs this process executes, the renewal of their leases, and what others wish for them.

A run has one owner at a time, which renews its lease. Not here: executing a run (`run_execution`), taking over
runs whose owner is gone (`take_over`), writing a wish (`cancelling`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from contextvars import Context
from dataclasses import dataclass
from typing import Any

from ..errors import LeaseLostError
from ..execution.cancellation import CancellationsHere
from ..safe_text import describe_store_error
from .documents import cancellation_from_json
from .run_answers import HistoryEntry
from .store import RenewsApart, RunStore, StoredRun, supports_of
from .stored_runs import StoredRuns

logger = logging.getLogger("toolbox.runs")

_RENEWALS = 3  # per lease
_BETWEEN_LOOKS = 1.0  # seconds between two looks for wishes


@dataclass(slots=True, eq=False)
class HeldRun:
    """A run that a task of this process executes, with its lease. `has_left`: its last write has ended the lease.

    `wish` is the cancellation for which the task was cancelled.
    """

    run: StoredRun
    cancellations: CancellationsHere
    has_left: bool = False
    is_lost: bool = False
    wish: HistoryEntry | None = None
    _takes_wishes: bool = False

    @property
    def task(self) -> asyncio.Task[Any]:
        """The task that executes the run."""
        assert self.cancellations.task is not None
        return self.cancellations.task

    def lose(self) -> None:
        """Cancel the task, once: a tool that takes long to end must not be cancelled again by the next renewal."""
        if not self.is_lost:
            self.is_lost = True
            if self.wish is None:
                self.task.cancel()

    # A wish is granted between `begin` and `leave`. Before, nothing of the run is here that could be ended well. After,
    # the write that suspends or ends the run is under way, and nobody knows if it happens when its task is cancelled:
    # the owner would write a second end over the first one, which others may have seen.

    def begin(self) -> None:
        """Grant wishes from now on."""
        self._takes_wishes = True

    def leave(self) -> None:
        """Grant no wishes from now on. Raises `CancelledError` if one was granted, and other code caught the error."""
        if self.wish is not None:
            raise asyncio.CancelledError
        self._takes_wishes = False

    def grant(self, wish: HistoryEntry) -> None:
        """Cancel the task for a wish, once; do nothing outside of `begin` and `leave`."""
        if self._takes_wishes and not self.is_lost:
            self.wish, self._takes_wishes = wish, False
            self.task.cancel()

    async def take_wish(self) -> HistoryEntry | None:
        """Return the wish for which the task was cancelled, and take its cancellation back.

        None if the run was lost since, or others have cancelled the task too: then somebody else grants the wish.
        """
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)  # the code of the run may have ended before the cancellation came
        if self.is_lost or not self.cancellations.take_back():
            return None
        wish, self.wish = self.wish, None
        return wish


class RunLeases:
    """Renews the leases of the runs that this process executes; cancels the task of a run that was lost."""

    def __init__(self, runs: StoredRuns) -> None:
        self._runs = runs
        self._held: set[HeldRun] = set()
        self._keeping: asyncio.Task[None] | None = None

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
        held = HeldRun(run, cancellations)
        self._held.add(held)
        if self._keeping is None or self._keeping.done():
            self._keeping = asyncio.get_running_loop().create_task(self._keep(), context=Context())
        try:
            yield held
        except asyncio.CancelledError:
            if not held.is_lost or not cancellations.take_back():
                raise
            raise LeaseLostError(run.id) from None
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

    def grant(self, run_id: str, wish: HistoryEntry) -> None:
        """End the execution of a run here as cancelled, at once; do nothing if it is not executed here."""
        for each in self._held:
            if each.run.id == run_id:
                each.grant(wish)

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

    async def _keep(self) -> None:
        """Renew all leases and grant all wishes until there are no leases."""
        store = await self._runs.open()
        while self._held:
            # Tools can take all connections of a pool, so a store may renew on others, and close them afterwards.
            async with store.renewing() if isinstance(store, RenewsApart) else nullcontext():
                looking = asyncio.create_task(self._look_for_wishes(store))
                try:
                    await self._renew_until_idle(store)
                finally:
                    looking.cancel()
                    await asyncio.gather(looking, return_exceptions=True)

    async def _look_for_wishes(self, store: RunStore) -> None:
        """Look for the wishes of other processes, in one query for all runs that are executed here."""
        if "wishes" not in supports_of(store):
            return
        while True:
            await asyncio.sleep(min(_BETWEEN_LOOKS, store.lease / _RENEWALS))
            try:
                wishes = await store.wishes(self.held_ids())
            except Exception as error:  # the caller of `cancel` takes the run when its lease has ended
                logger.warning("cannot look for the wishes for runs: %s", describe_store_error(error))
                continue
            for run_id, text in wishes.items():
                if (wish := cancellation_from_json(text)) is not None:
                    self.grant(run_id, wish)

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
            logger.warning("cannot renew the lease of run %s: %s", run.id, describe_store_error(error))
            return
        if not is_ours and held in self._held:
            held.lose()

    async def stop(self) -> None:
        """Stop renewing."""
        if self._keeping is not None and not self._keeping.done():
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
