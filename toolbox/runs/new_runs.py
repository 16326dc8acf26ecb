"""`NewRuns`: creates a run once, under its id, and refuses a different call with this id.

Not here: making the header of a new run, which each kind of body does (`service_calls`), executing it
(`run_execution`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextvars import copy_context
from typing import Any

from ..errors import RunConflictError
from ..services.outputs import Result
from .documents import are_arguments_of, make_comparable
from .run_execution import NewRun, RunExecution, wait_unless_lost
from .runs_host import RunsHost
from .store import StoredRun
from .stored_runs import StoredRuns, read_document


class NewRuns:
    """Creates the runs of a host. `submit` hands a stored run to the engine."""

    def __init__(
        self,
        host: RunsHost,
        runs: StoredRuns,
        execution: RunExecution,
        submit: Callable[[StoredRun], Awaitable[None]],
    ) -> None:
        self._host, self._runs, self._execution = host, runs, execution
        self._submit = submit

    async def start_run(self, new: NewRun) -> StoredRun:
        """Create a run and hand it to the engine; return it, or the run of the same call."""
        wanted = new.stored
        while True:
            async with self._runs.using(wanted.id) as store:
                is_new = await store.create(wanted)
            if is_new:
                self._execution.remember_starter(wanted.id, new.prepared.identity)
                await self._submit(wanted)
            found = await self._runs.find(wanted.id)
            if found is None:  # deleted in between
                continue
            if not is_new:
                self._refuse_conflict(found, new)
                if found.status == "running" and found.owner is None:  # the process that created it may have crashed
                    self._execution.remember_starter(found.id, new.prepared.identity)
                    await self._submit(found)
            return found

    async def execute_here(self, new: NewRun) -> Result[Any] | None:
        """Create a run and execute it; return None if there is a run with its id, or another process has taken it."""
        # In a task: if the caller leaves while the run is created, the run must still be executed.
        run_id = new.stored.id
        task = self._execution.spawn(run_id, self._execution.create_and_execute(new), copy_context())
        return await wait_unless_lost(task, run_id)

    async def wait_for(self, new: NewRun) -> Result[Any]:
        """Wait for the run of the same call, and return its result; continue it if no process runs it."""
        run_id = new.stored.id
        async with self._execution.within_time_limit(run_id):
            found = await self._runs.load(run_id)
            self._refuse_conflict(found, new)
            return await self._execution.settle(run_id, stored=found, person=new.prepared.identity)

    def _refuse_conflict(self, found: StoredRun, new: NewRun) -> None:
        """Raise `RunConflictError` if the stored run with this id belongs to another call."""
        if (reason := self._find_conflict(found, new)) is not None:
            raise RunConflictError(found.id, reason)

    def _find_conflict(self, found: StoredRun, new: NewRun) -> str | None:
        """Return how a stored run differs from a call with its id; None if the call may have its answer."""
        if found.service not in self._runs.names_of(new.stored.service) or found.method != new.stored.method:
            return "another method"
        old, now = read_document(found), new.prepared.document
        person, caller = old.identity or {}, now.identity or {}
        if person.get("name") != caller.get("name"):
            return "another identity"
        attributes = person.get("attributes", {}), make_comparable(old, caller.get("attributes", {}))
        if keys := [each for each in _find_differing(*attributes) if each in self._host.run_identity]:
            return f"other attributes of the identity: {', '.join(keys)}"
        if now.identity is None and (keys := _find_differing(old.seeds, make_comparable(old, now.seeds))):
            return f"other seeds: {', '.join(keys)}"
        if not are_arguments_of(old, new.given):
            return "other arguments"
        if keys := _find_differing(old.attributes, make_comparable(old, now.attributes)):
            return f"other invocation attributes: {', '.join(keys)}"
        return None


def _find_differing(stored: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values differ, sorted."""
    nothing = object()
    keys = sorted({*stored, *given})
    return [each for each in keys if stored.get(each, nothing) != given.get(each, nothing)]
