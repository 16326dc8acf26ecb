"""The turn that a service call leaves in its conversation when its run is cancelled: read from its records.

Not here: the turn of a call that ends in this process (`services.turns`), storing it (`runs.recorded_turns`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime

from ...chat import ToolExecution, UserMessage
from ...conversations.log import NO_USAGE, Turn
from ...services.outputs import ANSWER_TOOL
from ...services.plans import MethodPlan
from ...services.state import PendingToolCall, State
from ...services.turns import client_ids_in, unfinished_messages
from ...tools.failures import message_of
from ...tools.tool_calls import ToolOutcome
from ..places import RecordKey, place_below
from ..run_session import RunSession
from .record_contents import has_run_in, reply_from_dict, result_from_dict
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
    state, reply = restored.state, session.recorded(RecordKey("", "r", call.at("").next_reply))
    if reply is not None:
        written = session.read_record(reply)
        with session.reading():
            response = reply_from_dict(written).response
        requests = [
            each
            for each in response.ai_message.tool_execution_requests
            if state.mode != "tool" or each.name != ANSWER_TOOL
        ]
        usage = response.token_usage
        if usage is not None and state.token_usage is not None:
            usage = state.token_usage + usage
        state = state.changed(
            messages=(*state.messages, response.ai_message),
            pending=tuple(map(PendingToolCall, requests)),
            token_usage=usage or state.token_usage,
        )
    with session.reading():
        return state.changed(pending=tuple(_with_results(state, call)))


def _with_results(state: State, call: ServiceCall) -> Iterator[PendingToolCall]:
    """Yield the calls of the current round, with the results that are recorded."""
    for index, each in enumerate(state.pending):
        place = place_below("", state.position_of(index))
        if each.outcome is not None or not call.session.has_result(place):
            yield each
            continue
        written = call.session.facts_of(call.tools.last_result(place))
        result = result_from_dict(written)
        is_error = isinstance(result, Exception) or result.is_error
        text = message_of(result) if isinstance(result, Exception) else result.text
        execution = ToolExecution(each.request, text, None, is_error, datetime.now(UTC), 0.0)
        outcome = ToolOutcome(execution, ran=has_run_in(written))
        if not isinstance(result, Exception):
            outcome.contents = tuple(result.contents)
        yield replace(each, status="finished", outcome=outcome)
