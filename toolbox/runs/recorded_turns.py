"""The turn that a run leaves in its conversation when it is cancelled and nobody executes it: read from its records.

Not here: the turn of a call that ends in this process (`services.turns`, `services.layers`), cancelling (`cancelling`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ..chat import UserMessage
from ..conversations.log import NO_USAGE, Turn, only_beans
from ..errors import LeaseLostError, RunStoreError
from ..safe_text import describe_store_error
from ..services.plans import MethodPlan
from ..services.state import State
from ..services.turns import client_ids_in, unfinished_messages
from .new_documents import read_user_message
from .persons import starter_of
from .prepared_runs import PreparedRuns
from .run_session import RunSession, TurnWriteError, write_together
from .runs_host import RunsHost
from .service_calls import ServiceCall
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
            plan = self._host.plans_of(stored.service).get(stored.method)
            if plan is None or plan.options.unfinished_turns != "keep":
                return None
            document = read_document(stored)
            key, memories = plan.find_conversation(document.memory_id), await self._host.memories()
            if key is None or not memories.keeps_logs or (turn := await self._read_turn(stored, plan)) is None:
                return None
            turn = turn if plan.window is not None else only_beans(turn)
            owner = starter_of(document.identity, self._host.run_identity)
        except Exception as error:
            _log_loss(stored, error)
            return None

        async def keep() -> None:
            before = await memories.read_run(key, stored.id)
            if before is None or before.state != "answered":  # it has ended, but its process could not write that
                await memories.write(key, turn, owner)

        return keep

    async def _read_turn(self, stored: StoredRun, plan: MethodPlan) -> Turn | None:
        """Return the turn of a run until now. Raises `RunIncompatibleError`."""
        session = await self._runs.session_of(stored, read_document(stored))
        state = state_until_now(session)
        ids = await session.client_ids(0 if state is None else len(state.added))
        client_ids = {0: ids[0]} if ids[0] is not None else {}
        if state is not None:
            client_ids = client_ids_in(state, ids)
            messages, usage = unfinished_messages(state), state.token_usage or NO_USAGE
        elif plan.messages.continues_history:
            return None
        else:
            messages, usage = (self.question_of(stored)[0],), NO_USAGE
        beans = session.recorded_beans
        in_charge = state.in_charge if state is not None and plan.team else None
        return Turn(
            run_id=stored.id,
            messages=messages,
            usage=usage,
            state="stopped",
            beans=beans,
            client_ids=client_ids,
            in_charge=in_charge,
        )

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

    def question_of(self, stored: StoredRun) -> tuple[UserMessage, str | None]:
        """Return the user's message of a run, and the id that a client gave to it. Raises `RunIncompatibleError`."""
        prepared = self._preparing.prepare(stored)
        message = read_user_message(stored.id, prepared.document)
        asked = prepared.plan.messages.make_user_message(prepared.arguments) if message is None else message
        return asked, prepared.document.client_id


def _log_loss(stored: StoredRun, error: Exception) -> None:
    what = describe_store_error(error)
    logger.error("run %s was cancelled; what it did is not stored in its conversation: %s", stored.id, what)


def state_until_now(session: RunSession) -> State | None:
    """Return the state of a run with everything that is recorded; None before its first reply.

    Raises `RunIncompatibleError`.
    """
    call = ServiceCall(session)
    restored = call.restored("")
    if restored is None:
        return None
    return restored.state if restored.failure is not None else call.with_recorded_round("", restored.state)
