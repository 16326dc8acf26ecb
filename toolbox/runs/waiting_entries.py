"""`WaitingEntries`: what becomes of the turn of a suspended run in its conversation if no other turn of it is stored.

Not here: the turn itself, and storing it at a suspension (`services.turns`, `services.layers`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from ..chat import UserMessage
from ..conversations.keys import ChatMemoryKey
from ..conversations.log import TurnState, make_waiting_turn
from ..errors import RunNotFoundError
from ..safe_text import describe_store_error
from ..services.recording_needs import TurnWrite
from .documents import RunDocument
from .runs_host import RunsHost
from .store import ENDED, RunStatus
from .stored_runs import StoredRuns

logger = logging.getLogger("toolbox.runs")

_STATES: dict[RunStatus, TurnState] = {"cancelled": "stopped", "failed": "failed", "completed": "failed"}


class WaitingEntries:
    """The turns of the suspended runs of a host."""

    def __init__(self, host: RunsHost, runs: StoredRuns) -> None:
        self._host, self._runs = host, runs

    async def state_after(self, run_id: str) -> TurnState | None:
        """Return the state in which the turn of a run ends that has stored no other; None while the run goes on.

        An unknown run was never stored: its process was killed at the suspension.
        """
        try:
            status = (await self._runs.look(run_id)).status
        except RunNotFoundError:
            return "failed"
        return _STATES[status] if status in ENDED else None

    async def when_run_ends(self, key: ChatMemoryKey | None, run_id: str) -> Callable[[RunStatus], TurnWrite] | None:
        """Return what does the same as `end`, in one transaction with the end of the run; None without a log."""
        memories = await self._host.memories()
        if key is None or not memories.keeps_logs:
            return None

        def write_of(status: RunStatus) -> TurnWrite:
            async def write() -> None:
                await memories.end_waiting(key, run_id, _STATES[status])

            return TurnWrite(memories.store, write, may_fail=True)

        return write_of

    async def end(self, key: ChatMemoryKey | None, run_id: str, status: RunStatus) -> None:
        """Let the turn of a run that has ended wait no more, unless the run has stored another one.

        If that fails, the next call of the conversation does it.
        """
        if key is None:
            return
        try:
            await (await self._host.memories()).end_waiting(key, run_id, _STATES[status])
        except Exception as error:
            _warn(run_id, error)

    async def wait_again(self, key: ChatMemoryKey | None, run_id: str, suspensions: int, document: RunDocument) -> None:
        """Let the turn of a run wait again that was cancelled while it waited. Its conversation may be gone."""
        if key is None:
            return
        try:
            memories = await self._host.memories()
            turn = await memories.read_run(key, run_id)
            asked = () if turn is None or not turn.counts else turn.messages[:1]
            if asked and isinstance(asked[0], UserMessage):
                waiting = make_waiting_turn(run_id, suspensions, asked[0], document.pending)
                client_ids = {} if document.client_id is None else {0: document.client_id}
                await memories.write(key, replace(waiting, client_ids=client_ids))
        except Exception as error:
            _warn(run_id, error)


def _warn(run_id: str, error: Exception) -> None:
    logger.warning(
        "the conversation of run %s does not show that its state has changed: %s", run_id, describe_store_error(error)
    )
