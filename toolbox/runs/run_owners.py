"""Whose run it is: who may see it, and which of its pending calls a person may answer.

Not here: who may answer a call by its own rules (`answer_checks`), reading runs (`stored_runs`).
"""

from __future__ import annotations

from typing import Any

from ..conversations.keys import Owner
from ..errors import AnswerForbiddenError
from ..security import SecurityIdentity
from .answer_checks import check_person
from .prepared_runs import PreparedRuns
from .run_answers import Run
from .runs_host import RunsHost
from .stored_runs import StoredRuns


class RunOwners:
    """Decides what a person may do with the runs of others."""

    def __init__(self, host: RunsHost, runs: StoredRuns, preparing: PreparedRuns) -> None:
        self._host, self._runs, self._preparing = host, runs, preparing

    def is_of(self, run: Run[Any], identity: SecurityIdentity) -> bool:
        """Return True if the identity has started the run: its name, and what `run_identity` names. Also if nobody has.

        A run that an anonymous caller started belongs to everyone who knows its id.
        """
        if run.started_by is None:
            return True
        starter, names = SecurityIdentity(run.started_by, (), run.identity_attributes), self._host.run_identity
        return Owner.of(identity, names) == Owner.of(starter, names)

    async def find_answerable(self, run_id: str, identity: SecurityIdentity) -> frozenset[str]:
        """Return the ids of the pending calls that a person may answer.

        Those of another's run only if their own rules, `approvers=` or `not_self=`, admit the person. Raises
        `RunNotFoundError` and `RunIncompatibleError`.
        """
        stored = await self._runs.load(run_id)
        if stored.status != "suspended":
            return frozenset()
        prepared, is_own = self._preparing.prepare(stored), self.is_of(self._runs.show(stored), identity)
        found = set()
        for each in prepared.document.waiting:
            if not is_own and not any(prepared.body.find_rules(run_id, prepared, each)):
                continue
            try:
                check_person(run_id, each, prepared, "approve", identity)
            except AnswerForbiddenError:
                continue
            found.add(each.call.id)
        return frozenset(found)
