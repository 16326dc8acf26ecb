"""`Cancelling`: cancels a run, and has its tools undone where the service asks for it.

Not here: compensation itself (`services.compensation`).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ..errors import RunIncompatibleError
from ..safe_text import printable
from ..services.inner_plans import services_below
from .documents import RunDocument
from .event_log import EVENT_PAUSE
from .persons import history_name
from .prepared_runs import PreparedRuns
from .run_answers import HistoryEntry
from .run_execution import RunExecution
from .store import ENDED, RunChanges, StoredRun
from .stored_runs import RunsHost, StoredRuns, read_document

logger = logging.getLogger("toolbox.runs")


class Cancelling:
    """Cancels the runs of a host."""

    def __init__(self, host: RunsHost, runs: StoredRuns, preparing: PreparedRuns, execution: RunExecution) -> None:
        self._host, self._runs, self._preparing, self._execution = host, runs, preparing, execution

    async def cancel_run(self, run_id: str, reason: str | None, by: Any) -> StoredRun:
        """Cancel a run, undo its tools, and return it when it has ended. An ended run stays as it is."""

        store, reason, name = await self._runs.open(), None if reason is None else printable(reason), history_name(by)
        has_waited = False
        while True:
            stored = await self._runs.load(run_id)
            if stored.status in ENDED:
                return stored
            try:
                document = read_document(stored)
            except RunIncompatibleError:  # of another version of the program; what it says is dropped
                document = RunDocument()
            if document.cancels:  # by another caller, or before a crash
                await self._execution.execute_or_wait(run_id, None)
                continue
            if document.follows and stored.owner not in (None, self._runs.owner) and not has_waited:
                has_waited = True
                await asyncio.sleep(2 * EVENT_PAUSE)  # the other process writes what its model has said so often
                continue
            entry = HistoryEntry(await self._runs.now(), name, None, None, "cancel", reason)
            changed = document.changed(waiting=(), reason=reason, history=(*document.history, entry))
            must_undo = self._must_undo(stored)
            if must_undo:  # it ends when its tools are undone; after a crash another process continues
                document = changed.changed(cancels=True)
                changes = RunChanges(status="running", document=document.to_json(), owner=self._runs.owner)
            else:
                changes = RunChanges(status="cancelled", document=changed.to_json())
            async with self._execution.leases.taking(run_id):
                if (taken := await store.change(run_id, stored.version, changes)) is None:
                    continue
                self._execution.leases.lose(run_id)
            self._runs.looks.announce(run_id)
            if not must_undo:
                return taken
            await asyncio.shield(self._execution.spawn(run_id, self._undo(taken, by)))

    def _must_undo(self, stored: StoredRun) -> bool:
        """Return True if tools of this run may have to be undone when it is cancelled."""
        own = [plan for methods in self._host.plans.values() for plan in methods.values()]
        everything = [*own, *(inner for plan in own for inner in services_below(plan))]
        if not any(each.options.compensate_on_failure for each in everything):
            return False
        try:
            self._preparing.prepare(stored)
        except RunIncompatibleError as error:  # without a traceback, which would show the stored arguments
            logger.error(
                "run %s was cancelled; if its tools have compensations, they did not run: %s", stored.id, error
            )
            return False
        return True

    async def _undo(self, taken: StoredRun, by: Any) -> None:
        """Undo the tools of a run that was cancelled, as soon as its execution here has ended."""
        await self._execution.leases.give_up(taken.id)
        await self._execution.execute_taken(taken, by)
