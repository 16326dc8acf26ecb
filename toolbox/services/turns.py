"""The turn that a call leaves in its conversation: of an answer, of a call that waits, or one that ended without one.

Not here: storing it (`layers`), the log itself (`conversations.log`), what undoes tools (`compensation`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ..chat import AiMessage, Message, ToolExecutionRequest, ToolExecutionResultMessage, UserMessage
from ..conversations.log import NO_USAGE, Turn, TurnState, make_waiting_turn
from ..passages import source_to_dict
from .invocation import Invocation
from .outputs import ANSWER_TOOL
from .state import PendingToolCall, State, identity_of

INTERRUPTED = "interrupted"
"""The error result of a call that has none when its invocation ends."""

_UNDONE_NOTE = "[This turn {what} before it had an answer. Its results say which of its tools were undone.]"
_AFTER_BEGIN = frozenset({"deferred", "unknown_outcome", "service"})
"""The kinds of suspended calls whose tools have begun."""


def answered_turn(invocation: Invocation) -> Turn:
    """Return the turn of an invocation that has an answer. That of a run has the same id in each process."""
    messages, usage = invocation.state.remembered, invocation.state.usage_of_turn
    place, sources = invocation.place, tuple(map(source_to_dict, invocation.state.passages))
    if place is None:
        return Turn(id=invocation.context.invocation_id, messages=messages, usage=usage, sources=sources)
    run_id = place.run_id if invocation.is_recorded else None
    return Turn(id=f"{place.run_id}:answered", run_id=run_id, messages=messages, usage=usage, sources=sources)


def unfinished_turn(invocation: Invocation, state: TurnState) -> Turn | None:
    """Return the turn of an invocation that ends without an answer; None if nothing of it is to be stored.

    Unless it was stopped, that is so if none of its tools has begun.
    """
    if not (invocation.was_stopped or has_begun_tool(invocation)):
        return None
    if invocation.has_begun:
        messages = unfinished_messages(invocation.state, "".join(invocation.said), invocation.undone)
        usage = invocation.state.usage_of_turn
    else:  # what the input guardrails have not judged is not stored
        messages, usage = () if invocation.unchecked else invocation.transcript, NO_USAGE
    if not messages:
        return None
    note = _UNDONE_NOTE.format(what=_VERBS[state]) if invocation.undone else None
    turn = Turn(messages=messages, state=state, usage=usage, note=note)
    is_of_run = invocation.is_recorded or invocation.has_waiting_turn
    if is_of_run and invocation.place is not None:  # another end of the run replaces it, by the run's id
        return replace(turn, run_id=invocation.place.run_id)
    # The id of the answered turn: if the write of that one failed, nobody knows whether it is there.
    return replace(turn, id=invocation.context.invocation_id)


def with_rest_of(stored: Turn | None, turn: Turn) -> Turn:
    """Return the turn of a run whose tools were undone, with what no record has of the turn that its end has stored.

    That is the reply that was on its way when the run was cancelled, or its answer.
    """
    if stored is None or stored.start:
        return turn
    rest = stored.messages[len(turn.messages) :]
    same = all(type(one) is type(other) for one, other in zip(stored.messages, turn.messages, strict=False))
    return replace(turn, messages=(*turn.messages, *rest)) if same else turn


_VERBS = {"failed": "failed", "stopped": "was stopped"}


def state_after(error: BaseException, invocation: Invocation) -> TurnState:
    """Return the state of the turn of an invocation that ends with an error."""
    if invocation.was_stopped:
        return "stopped"
    deadline = invocation.context.deadline  # also that of an outer call, at which this one is only cancelled
    is_late = deadline is not None and time.monotonic() >= deadline
    # A `KeyboardInterrupt` can arrive in a blocking tool, which runs on the thread that waits for the call.
    was_cancelled = not isinstance(invocation.error_behind(error), Exception)
    return "stopped" if was_cancelled and not is_late else "failed"


def client_ids_in(state: State, ids: Sequence[str | None]) -> dict[int, str]:
    """Return the ids that a client gave to messages of a turn, by their indexes there.

    `ids` are those of the user's message, and of the messages that were added, in their order.
    """
    found = {}
    for position, each in zip((0, *sorted(state.added)), ids, strict=False):
        # The first message is not the user's if a parameter gave the whole history.
        message = state.messages[position] if position < len(state.messages) else None
        if each is not None and isinstance(message, UserMessage):
            found[position - sum(other < position for other in state.unremembered)] = each
    return found


# --- of a call that waits for an answer: its run replaces it when it ends


def waiting_turn_of(invocation: Invocation) -> Turn | None:
    """Return the turn of an invocation that is being suspended; None without a message of the user."""
    place, asked = invocation.place, invocation.state.remembered[:1]
    if place is None or not asked or not isinstance(asked[0], UserMessage):
        return None
    return make_waiting_turn(place.run_id, place.run.suspensions, asked[0], place.pending)


# --- the messages


def has_begun_tool(invocation: Invocation) -> bool:
    """Return True if a tool of an invocation has begun, in this process or before."""
    if not invocation.has_begun:
        return False
    attempts = invocation.environment.attempts or {}
    return any(each.begun is not None for each in [*attempts.values()]) or shows_begun_tool(invocation.state)


def shows_begun_tool(state: State) -> bool:
    """Return True if a state shows that one of its tools has begun."""
    if state.ran or state.failed or any(each.arguments for each in state.all_executions):
        return True
    return any(
        each.details.get("kind") in _AFTER_BEGIN
        if each.outcome is None
        else each.status == "finished" and (each.outcome.ran or each.outcome.failed)
        for each in state.pending
    )


def unfinished_messages(state: State, said: str = "", undone: Mapping[int, bool] | None = None) -> tuple[Message, ...]:
    """Return the messages of an invocation that ended without an answer: the user's, the rounds, the text so far.

    `said` is the part of a reply that was sent to the reader of a stream. A call without a result gets the error
    result `INTERRUPTED`. `undone` are the positions of the executions that were undone; False if that failed. An
    answer that was refused, or that nobody got, is left out.
    """
    shown = state.changed(messages=_with_undone(state, undone or {}))
    messages = [_without_answer_calls(each, state) for each in shown.remembered]
    results = _results_of_pending(state, undone or {})
    if state.pending and not isinstance(state.last_message, AiMessage):  # they began before their reply was complete
        begun = AiMessage(said or None, [each.request for each in state.pending])
        return (*messages, begun, *results)
    if messages and isinstance(last := messages[-1], AiMessage):
        if requests := last.tool_execution_requests:
            return (*messages, *_paired(requests, state.pending, results))
        messages.pop()
    return (*messages, AiMessage(said)) if said else tuple(messages)


def _without_answer_calls(message: Message, state: State) -> Message:
    """Return a reply without calls of the answer tool, which get no results."""
    if state.mode != "tool" or not isinstance(message, AiMessage):
        return message
    requests = [each for each in message.tool_execution_requests if each.name != ANSWER_TOOL]
    return replace(message, tool_execution_requests=requests)


def _results_of_pending(state: State, undone: Mapping[int, bool]) -> list[ToolExecutionResultMessage]:
    """Return a result for each call of the current round."""
    results, position = [], len(state.executions)  # as in `all_executions`, without calls that have no result
    for each in state.pending:
        if each.outcome is None:
            results.append(_interrupted(each.request))
        else:
            results.append(_result_if_undone(each.outcome.message, undone.get(position)))
            position += 1
    return results


def _paired(
    requests: Sequence[ToolExecutionRequest],
    pending: Sequence[PendingToolCall],
    results: Sequence[ToolExecutionResultMessage],
) -> Iterator[ToolExecutionResultMessage]:
    """Yield a result for each request, in their order: calls that began early come first in `pending`."""
    free = list(range(len(pending)))
    for request in requests:
        found = (index for index in free if identity_of(pending[index].request) == identity_of(request))
        index = next(found, None)
        if index is None:  # a reply that was refused as a whole, for example because of too many rounds
            yield _interrupted(request)
        else:
            free.remove(index)
            yield results[index]


def _interrupted(request: ToolExecutionRequest) -> ToolExecutionResultMessage:
    return ToolExecutionResultMessage(request.id, request.name, INTERRUPTED, is_error=True)


def _with_undone(state: State, undone: Mapping[int, bool]) -> tuple[Message, ...]:
    """Return the messages of a state, in which the results of tools that were undone say so."""
    messages = [*state.messages]
    for position, index in state.result_positions().items() if undone else ():
        result = messages[index]
        assert isinstance(result, ToolExecutionResultMessage)
        messages[index] = _result_if_undone(result, undone.get(position))
    return tuple(messages)


def _result_if_undone(result: ToolExecutionResultMessage, is_undone: bool | None) -> ToolExecutionResultMessage:
    if is_undone is None:
        return result
    text = f"Tool {result.tool_name!r} was executed successfully but was rolled back because the call had no answer"
    if not is_undone:
        text = f"Tool {result.tool_name!r} was executed successfully; undoing it when the call had no answer failed"
    return ToolExecutionResultMessage(result.id, result.tool_name, text, True, result.attributes)
