"""`Cancelling`: asks the owner of a run to end it, or ends a run that nobody executes.

Not here: what the owner does (`run_execution`), compensation itself (`services.compensation`).
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from functools import partial
from typing import Any

from ..errors import RunIncompatibleError
from ..safe_text import printable
from .documents import RunDocument, cancellation_to_json, with_cancellation
from .event_log import EVENT_PAUSE
from .persons import history_name
from .prepared_runs import PreparedRuns
from .recorded_turns import RecordedTurns
from .run_answers import HistoryEntry
from .run_execution import RunExecution
from .run_session import store_errors_of
from .store import ENDED, RunChanges, RunLook, StoredRun, supports_of
from .stored_runs import StoredRuns, read_document

logger = logging.getLogger("toolbox.runs")


class Cancelling:
    """Cancels the runs of a host."""

    def __init__(
        self, runs: StoredRuns, preparing: PreparedRuns, execution: RunExecution, turns: RecordedTurns
    ) -> None:
        self._runs, self._preparing, self._execution, self._turns = runs, preparing, execution, turns

    async def cancel_run(self, run_id: str, reason: str | None, by: Any) -> StoredRun:
        """Cancel a run, undo its tools, and return it when it has ended. An ended run stays as it is."""
        # Only the owner can write what the call has said and done, so it is asked first. An owner that does not answer
        # in the time of a lease is gone, stands still or knows no wishes: the run is taken from it, as from one whose
        # lease has ended.
        reason = None if reason is None else printable(reason)
        entry = HistoryEntry(await self._runs.now(), history_name(by), None, None, "cancel", reason)
        has_asked = False
        while True:
            stored = await self._runs.load(run_id)
            if stored.status in ENDED:
                return stored
            try:
                document = read_document(stored)
            except RunIncompatibleError:  # of another version of the program; what it says is dropped
                document = RunDocument()
            if document.cancels:  # its owner undoes its tools, or was interrupted
                await self._execution.execute_or_wait(run_id, None)
            elif stored.owner is not None and not has_asked:
                has_asked = True
                await self._ask_owner(stored, document, entry)
            else:
                await self._take(stored, document, entry, by)

    async def _ask_owner(self, stored: StoredRun, document: RunDocument, entry: HistoryEntry) -> None:
        """Ask the owner of a run to end it, and wait at most one lease until nobody executes it."""
        store, run_id = await self._runs.open(), stored.id
        if "wishes" in supports_of(store):
            with store_errors_of(run_id):
                has_owner = await store.add_wish(run_id, cancellation_to_json(entry))
            if not has_owner:
                return
        elif stored.owner != self._runs.owner:
            if document.follows:
                await asyncio.sleep(2 * EVENT_PAUSE)  # the other process writes what its model has said so often
            return
        self._execution.leases.grant(run_id, entry)
        seen: RunLook | None = None
        with suppress(TimeoutError):
            async with asyncio.timeout(store.lease):
                # The first of the shared looks can be from before the owner took the run, so each is checked.
                while (now := await self._runs.look(run_id)).status == "running" and not now.is_runnable:
                    seen = await self._runs.looks.after(run_id, seen)

    async def _take(self, stored: StoredRun, document: RunDocument, entry: HistoryEntry, by: Any) -> None:
        """End a run that nobody executes, or take it to undo its tools; do nothing if it has changed since."""
        # What it waits for stays, for `runs.retry`; what has waited beside other calls asks again.
        waiting = document.waiting if stored.status == "suspended" else ()
        changed, must_undo = with_cancellation(document, entry, waiting), self._must_undo(stored)
        if must_undo:  # it ends when its tools are undone; after a crash another process continues
            text = changed.changed(waiting=(), cancels=True).to_json()
            changes = RunChanges(status="running", document=text, owner=self._runs.owner)
        else:
            changes = RunChanges(status="cancelled", document=changed.to_json())
        end = partial(self._runs.change, stored, document, changes)
        if (taken := await self._turns.keep_and_end(stored, end)) is None:
            return
        self._execution.leases.lose(stored.id)
        self._runs.looks.announce(stored.id)
        if taken.status == "cancelled":
            await self._execution.waiting_entries.end(self._runs.conversation_of(taken), taken.id, taken.status)
        if must_undo:
            await asyncio.shield(self._execution.spawn(stored.id, self._undo(taken, by)))

    def _must_undo(self, stored: StoredRun) -> bool:
        """Return True if tools of this run may have to be undone when it is cancelled."""
        if not self._preparing.may_undo_tools():
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
        await self._execution.execute_taken(taken, self._execution.continue_run(taken, person=by))
