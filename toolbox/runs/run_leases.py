"""`RunLeases`: which runs this process executes, and the renewal of their leases.

A run has one owner at a time, which renews its lease. Not here: executing a run (`run_execution`), taking over
runs whose owner is gone (`take_over`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from contextvars import Context
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from ..errors import LeaseLostError
from ..execution.cancellation import CancellationsHere
from .store import RenewsApart, RunStore

logger = logging.getLogger("toolbox.runs")

_RENEWALS = 3  # per lease


def owner_name() -> str:
    """Return a name for this start of a container: host, process and a random part."""
    return f"{socket.gethostname()}:{os.getpid()}:{uuid4().hex[:8]}"


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


class RunLeases:
    """Renews the leases of the runs that this process executes; cancels the task of a run that was lost."""

    def __init__(self, opened: Callable[[], Awaitable[RunStore]]) -> None:
        self._opened = opened
        self._held: set[_Held] = set()
        self._renewing: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def hold(self, run_id: str, generation: int) -> AsyncIterator[None]:
        """Renew the lease inside the block, and end it afterwards if the run is still running.

        Raises `LeaseLostError` at the next `await` inside the block if another process has taken the run.
        """
        cancellations = CancellationsHere()
        assert cancellations.task is not None
        held = _Held(run_id, generation, cancellations.task)
        self._held.add(held)
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.get_running_loop().create_task(self._renew(), context=Context())
        try:
            yield
        except asyncio.CancelledError:
            if not held.is_lost or not cancellations.take_back():
                raise
            raise LeaseLostError(run_id) from None
        finally:
            self._held.discard(held)
            if not held.is_lost:
                await self._release(held)

    def held_ids(self) -> set[str]:
        """Return the ids of the runs that this process executes."""
        return {each.run_id for each in self._held}

    def lose(self, run_id: str) -> list[asyncio.Task[Any]]:
        """Cancel the execution of a run that was taken from here now, not at the next renewal. Returns its tasks."""
        held = [each for each in self._held if each.run_id == run_id]
        for each in held:
            each.lose()
        return [each.task for each in held]

    async def give_up(self, run_id: str) -> None:
        """Do the same, and wait for the end of the execution, at most one lease."""
        if tasks := self.lose(run_id):
            await asyncio.wait(tasks, timeout=(await self._opened()).lease)

    async def _release(self, held: _Held) -> None:
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
