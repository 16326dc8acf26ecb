"""`Telling`: adds a message of the user to a run, for its next model request.

Not here: reading it (`run_session`), what the loop does with it (`services.loop`).
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from ..chat import UserMessage
from ..errors import IllegalConfigurationError, RunStateError
from ..services.recording_needs import ToldMessage
from .documents import told_to_json
from .persons import history_name
from .prepared_runs import PreparedRuns
from .store import ENDED, no_messages, supports_of
from .stored_runs import StoredRuns


class Telling:
    """Adds messages to the runs of a host."""

    def __init__(self, runs: StoredRuns, preparing: PreparedRuns) -> None:
        self._runs, self._preparing = runs, preparing

    async def tell_run(self, run_id: str, message: UserMessage, by: Any, client_id: str | None = None) -> None:
        """Add a message to a run, after its body has checked it. A client gave `client_id` to it."""
        store = await self._runs.open()
        if "tell" not in supports_of(store):
            raise IllegalConfigurationError([no_messages(store)])
        stored = await self._runs.load(run_id)
        if stored.status in ENDED:
            raise RunStateError(run_id, f"it is {stored.status}, and takes no more messages")
        prepared = self._preparing.prepare(stored)
        message = await prepared.body.check_message(stored, prepared, message, by)
        written = told_to_json(ToldMessage(message, history_name(by), client_id))
        if not await store.add_message(run_id, uuid4().hex, written):
            status = (await self._runs.load(run_id)).status
            fact = f"it is {status}" if status in ENDED else "it has its answer, and is about to end"
            raise RunStateError(run_id, f"{fact}; it takes no more messages")
