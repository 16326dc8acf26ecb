"""The turn that a service call leaves in its conversation when its run is cancelled: read from its records.

Not here: the turn of a call that ends in this process (`services.turns`), storing it (`runs.recorded_turns`).
"""

from __future__ import annotations

from collections.abc import Callable

from ...chat import UserMessage
from ...conversations.log import NO_USAGE, Turn
from ...services.plans import MethodPlan
from ...services.state import State
from ...services.turns import client_ids_in, unfinished_messages
from ..run_session import RunSession
from .run_invocations import ServiceCall


async def read_cancelled_turn(
    session: RunSession, plan: MethodPlan, read_question: Callable[[], UserMessage]
) -> Turn | None:
    """Return the turn of a run until now; None if it leaves none. Raises `RunIncompatibleError`.

    `read_question` returns the message of the user, for a run without a reply.
    """
    state = state_until_now(session)
    ids = await session.client_ids(0 if state is None else len(state.added))
    client_ids = {0: ids[0]} if ids[0] is not None else {}
    if state is not None:
        client_ids = client_ids_in(state, ids)
        messages, usage = unfinished_messages(state), state.token_usage or NO_USAGE
    elif plan.messages.continues_history:
        return None
    else:
        messages, usage = (read_question(),), NO_USAGE
    return Turn(
        run_id=session.id,
        messages=messages,
        usage=usage,
        state="stopped",
        beans=session.recorded_beans,
        client_ids=client_ids,
        in_charge=state.in_charge if state is not None and plan.team else None,
    )


def state_until_now(session: RunSession) -> State | None:
    """Return the state of a run with everything that is recorded; None before its first reply.

    Raises `RunIncompatibleError`.
    """
    call = ServiceCall(session)
    restored = call.restored("")
    if restored is None:
        return None
    return restored.state if restored.failure is not None else call.with_recorded_round("", restored.state)
