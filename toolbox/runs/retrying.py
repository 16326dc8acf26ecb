"""Executes a run again that has failed or was cancelled: when a program asks for it, or by itself after a time.

A run goes on from its records, except from those that can only fail again; its body leaves them out. Not here:
executing a run (`run_execution`), finding the runs whose time has come (`take_over`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from ..errors import ConversationSuspendedError, RunStateError
from ..services.outputs import Result
from .documents import RunDocument, next_expiry, with_expiries
from .next_tries import were_tools_undone
from .persons import history_name
from .prepared_runs import PreparedRuns
from .run_answers import HistoryEntry
from .run_body import PreparedRun
from .run_execution import RunExecution, wait_unless_lost
from .store import RunChanges, StoredRun
from .stored_runs import StoredRuns, read_document


class Retrying:
    """Executes runs of a host again."""

    def __init__(
        self,
        runs: StoredRuns,
        preparing: PreparedRuns,
        execution: RunExecution,
        watch_times: Callable[[], Awaitable[None]],
    ) -> None:
        self._runs, self._preparing, self._execution, self._watch_times = runs, preparing, execution, watch_times

    async def retry_run(self, run_id: str, by: Any) -> Result[Any]:
        """Let a run go on, and wait for it; cancelling this ends the waiting, not the run."""
        await self._execution.refuse_inside_conversation(run_id)
        async with self._execution.within_time_limit(run_id):
            task = self._execution.spawn(run_id, self._go_on(run_id, by))
            if (result := await wait_unless_lost(task, run_id)) is not None:
                return result
            return await self._execution.settle(run_id, person=by)

    async def _go_on(self, run_id: str, by: Any) -> Result[Any] | None:
        """Take a run and execute it; return None if it waits for an answer, or for its next try."""
        stored = await self._runs.load(run_id)
        document, suspensions = await self._read_ended(stored)
        prepared = await self._preparing.admit_to_method(run_id, self._preparing.prepare(stored), by)
        await self._refuse_beside_suspended(stored, prepared)

        entry = HistoryEntry(await self._runs.now(), history_name(by), None, None, "retry")
        document = document.changed(
            error_type=None, error_text=None, reason=None, cancels=False, history=(*document.history, entry)
        )
        if document.waiting:  # it was cancelled while it waited
            unlimited = [replace(each, call=replace(each.call, expires_at=None)) for each in document.waiting]
            document = document.changed(waiting=with_expiries(unlimited, await self._runs.store_time()))
            since, next_at = document.waiting_since, next_expiry(document.waiting)
            changes = RunChanges(status="suspended", waiting_since=since, next_at=next_at)
        else:
            failures = document.failures + (1 if stored.status == "failed" else 0)
            document = document.changed(attempts=document.attempts + 1, failures=failures)
            changes = RunChanges(status="running", owner=self._runs.owner)
        changes = replace(changes, document=document.to_json())
        if (taken := await self._runs.change(stored, document, changes)) is None:
            raise RunStateError(run_id, "it has changed just now; read it again with runs.get(run_id)")
        self._runs.looks.announce(run_id)
        if document.waiting:
            if prepared.body.waits_in_conversation:
                key = self._runs.conversation_of(taken)
                await self._execution.waiting_entries.wait_again(key, run_id, suspensions - 1, document)
            await self._watch_times()
            return None
        return await self._execution.continue_run(taken, None, replace(prepared, document=document, before=stored))

    async def _read_ended(self, stored: StoredRun) -> tuple[RunDocument, int]:
        """Return the document of a run that can go on, and how often it was suspended. Raises `RunStateError`."""
        if stored.status not in ("failed", "cancelled"):
            raise RunStateError(stored.id, f"it is {stored.status}; only a failed or cancelled run can be retried")
        document = read_document(stored)
        if document.is_reduced:
            raise RunStateError(stored.id, "its store deletes the records of ended runs, so it cannot be retried")
        session = await self._runs.session_of(stored, document)
        if were_tools_undone(session):
            raise RunStateError(stored.id, "its tools were undone, so it cannot be retried; start a new run")
        return document, session.suspensions

    async def _refuse_beside_suspended(self, stored: StoredRun, prepared: PreparedRun) -> None:
        """Raise `ConversationSuspendedError` if another run of the conversation waits for an answer."""
        if prepared.body.waits_in_conversation:
            return
        if (key := prepared.conversation) is not None and (other := await self._runs.suspended_in(key)) is not None:
            raise ConversationSuspendedError(self._runs.label_of(stored.service), other)
