"""Stores the turn that a run leaves in its conversation when it is cancelled and nobody executes it.

Not here: the turn itself, which the body of the run reads from its records (`run_body`), cancelling (`cancelling`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ..errors import LeaseLostError, RunStoreError
from ..safe_text import describe_store_error
from .persons import starter_of
from .prepared_runs import PreparedRuns
from .run_session import TurnWriteError, write_together
from .runs_host import RunsHost
from .store import ENDED, StoredRun, joins
from .stored_runs import StoredRuns, read_document

logger = logging.getLogger("toolbox.runs")


class RecordedTurns:
    """Stores the turns of cancelled runs of a host."""

    def __init__(self, host: RunsHost, runs: StoredRuns, preparing: PreparedRuns) -> None:
        self._host, self._runs, self._preparing = host, runs, preparing

    async def keep_and_end(self, stored: StoredRun, end: Callable[[], Awaitable[StoredRun | None]]) -> StoredRun | None:
        """Store what a run has said and done until it was cancelled, and await `end`; return what that returns.

        The two are one transaction if the stores can have one, and then nothing is stored if `end` returns None. Else
        the turn comes first, so that after a crash the run is cancelled and its turn stored again. What keeps the turn
        from being stored is logged.
        """
        keep = await self._find_write(stored)
        if keep is None:
            return await end()
        store, conversations = await self._runs.open(), (await self._host.memories()).store
        taken: StoredRun | None = None

        async def end_run() -> StoredRun | None:
            nonlocal taken
            taken = await end()
            return taken

        async def keep_if_ended() -> None:
            if taken is not None:
                await keep()

        try:
            if joins(store, conversations):
                return await write_together(store, conversations, end_run, keep_if_ended)
            await keep()
        except (LeaseLostError, RunStoreError):
            raise
        except Exception as error:
            _log_loss(stored, error.error if isinstance(error, TurnWriteError) else error)
        return await end()

    async def _find_write(self, stored: StoredRun) -> Callable[[], Awaitable[None]] | None:
        """Return what stores the turn of a run; None if it leaves none, or an error was logged."""
        try:
            body = self._preparing.find_body(stored)
            document = read_document(stored)
            found = None if body is None else await body.read_turn(stored, document)
            if found is None:
                return None
            (key, turn), memories = found, await self._host.memories()
            owner = starter_of(document.identity, self._host.run_identity)
        except Exception as error:
            _log_loss(stored, error)
            return None

        async def keep() -> None:
            before = await memories.read_run(key, stored.id)
            if before is None or before.state != "answered":  # it has ended, but its process could not write that
                await memories.write(key, turn, owner)

        return keep

    async def beans_of(self, run_id: str) -> Mapping[str, Any]:
        """Return the JSON values of the beans of a run's conversation as the run has left them so far, by name."""
        stored = await self._runs.load(run_id)
        if (key := self._runs.conversation_of(stored)) is None:
            return {}
        head = await (await self._host.memories()).head(key)
        beans = {} if head is None else dict(head.beans)
        if stored.status in ENDED:
            return beans
        session = await self._runs.session_of(stored, read_document(stored))
        return {**beans, **session.recorded_beans}


def _log_loss(stored: StoredRun, error: Exception) -> None:
    what = describe_store_error(error)
    logger.error("run %s was cancelled; what it did is not stored in its conversation: %s", stored.id, what)
