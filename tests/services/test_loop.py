"""The tool loop without I/O."""

import pickle
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from pydantic import BaseModel

from tests.generated import below, built, lists, made, one_of, sampled, texts
from toolbox import (
    AiMessage,
    ChatResponse,
    FinishReason,
    ModelTruncatedError,
    OutputParsingError,
    SystemMessage,
    TokenUsage,
    ToolCallsLimitExceededError,
    ToolExecution,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    ToolRoundsExceededError,
    UserMessage,
)
from toolbox.errors import TranscriptError
from toolbox.services.loop import (
    CallModel,
    Effect,
    Fail,
    Finish,
    ModelReplied,
    Rules,
    RunTools,
    Suspend,
    ToolFinished,
    ToolResumed,
    ToolSuspended,
    advance,
    begin,
    next_effect,
    with_early_call,
)
from toolbox.services.outputs import ANSWER_TOOL, Kind, read_output
from toolbox.services.state import State
from toolbox.tools.tool_calls import ToolOutcome

USER = UserMessage("2 + 3?")


class Sum(BaseModel):
    total: int


STRUCTURE = read_output(Sum).structure


def call(name: str = "add", id_: str = "1", arguments: str = "{}") -> ToolExecutionRequest:
    return ToolExecutionRequest(id_, name, arguments)


def asks(*requests: ToolExecutionRequest, usage: TokenUsage | None = None) -> ModelReplied:
    return ModelReplied(
        ChatResponse(AiMessage(None, requests), usage, finish_reason=FinishReason.TOOL_EXECUTION),
    )


def says(text: str, reason: FinishReason = FinishReason.STOP, usage: TokenUsage | None = None) -> ModelReplied:
    return ModelReplied(ChatResponse(AiMessage(text), usage, reason))


def outcome(request: ToolExecutionRequest, *, failed: bool = False) -> ToolOutcome:
    return ToolOutcome(ToolExecution(request, "5", 5, failed, datetime.now(UTC), 0.0))


def run_all(rules: Rules, state: State, effect: Effect, *, failed: bool = False) -> tuple[State, Effect]:
    """Finishes the pending calls one by one."""
    while isinstance(effect, RunTools):
        request = state.pending[effect.first].request
        state, effect = advance(rules, state, ToolFinished(effect.first, outcome(request, failed=failed)))
    return state, effect


def follow(rules: Rules, *events: ModelReplied | str, mode: Any = "prompt") -> tuple[State, Effect]:
    """Run the loop with these model replies; tools succeed, or fail after "failed"."""
    effect: Effect
    state, effect = begin(rules, None, (), USER, mode=mode)
    failed = False
    for event in events:
        if event == "failed":
            failed = True
            continue
        assert isinstance(event, ModelReplied)
        state, effect = run_all(rules, state, effect, failed=failed)
        state, effect = advance(rules, state, event)
        state, effect = pickle.loads(pickle.dumps((state, effect)))
    return run_all(rules, state, effect, failed=failed)


def test_replies_without_tool_calls_end_the_call() -> None:
    state, effect = follow(Rules(), says("5"))

    assert isinstance(effect, Finish)
    assert (effect.value, effect.finish_reason) == ("5", FinishReason.STOP)
    assert state.remembered == (USER, AiMessage("5"))


def test_requests_contain_all_messages_with_the_system_message_first() -> None:
    system, before = SystemMessage("Add."), (UserMessage("hi"), AiMessage("ho"))
    effect: Effect
    state, effect = begin(Rules(), system, before, USER)
    assert isinstance(effect, CallModel)
    assert effect.request.messages == (system, *before, USER)

    state, effect = advance(Rules(), state, asks(call()))
    state, effect = run_all(Rules(), state, effect)

    assert isinstance(effect, CallModel)
    assert [type(each).__name__ for each in effect.request.messages[-3:]] == [
        "UserMessage",
        "AiMessage",
        "ToolExecutionResultMessage",
    ]


def test_an_answer_may_follow_the_last_allowed_round() -> None:
    _, effect = follow(Rules(max_rounds=2), asks(call()), asks(call()), says("5"))
    assert isinstance(effect, Finish)

    state, effect = follow(Rules(max_rounds=2), asks(call()), asks(call()), asks(call(id_="last")))
    assert isinstance(effect, Fail)
    assert isinstance(effect.error, ToolRoundsExceededError)
    assert effect.error.transcript == state.messages
    assert state.messages[-1] == AiMessage(None, [call(id_="last")])


def test_replies_with_too_many_calls_fail_before_any_tool_runs() -> None:
    _, effect = follow(Rules(max_calls=1), asks(call(id_="1"), call(id_="2")))

    assert isinstance(effect, Fail)
    assert isinstance(effect.error, ToolCallsLimitExceededError)
    assert (effect.error.limit, effect.error.attempted) == (1, 2)
    assert effect.error.transcript[-1] == AiMessage(None, [call(id_="1"), call(id_="2")])


@pytest.mark.parametrize(
    ("immediate", "calls", "failed", "ends"),
    [
        ({"add"}, ["add"], False, True),
        ({"add"}, ["add", "add"], False, True),
        ({"add"}, ["add", "sub"], False, False),
        ({"add"}, ["sub", "add"], False, False),
        ({"add"}, ["add"], True, False),
        (set(), ["add"], False, False),
    ],
)
def test_immediate_rounds_end_the_call_if_every_tool_is_immediate_and_succeeds(
    immediate: set[str], calls: list[str], failed: bool, ends: bool
) -> None:
    requests = [call(name, str(number)) for number, name in enumerate(calls)]
    state, effect = follow(Rules(immediate=frozenset(immediate)), *(["failed"] if failed else []), asks(*requests))

    assert isinstance(effect, Finish) is ends
    if isinstance(effect, Finish):
        assert (effect.value, effect.finish_reason) == (None, FinishReason.TOOL_EXECUTION)
        assert len(state.remembered) == 2 + len(calls)


def test_token_usage_is_summed_or_none_if_no_reply_had_any() -> None:
    state, _ = follow(Rules(), asks(call(), usage=TokenUsage(1, 2)), says("5"), says("5"))
    assert state.token_usage == TokenUsage(1, 2)

    state, _ = follow(Rules(), asks(call(), usage=TokenUsage(1, 2)), says("5", usage=TokenUsage(3, 4, 1, 1)))
    assert state.token_usage == TokenUsage(4, 6, 1, 1)

    state, _ = follow(Rules(), says("5"))
    assert state.token_usage is None


def test_invalid_replies_go_back_to_the_model_and_are_not_remembered() -> None:
    rules = Rules(kind=Kind.STRUCTURED, structure=STRUCTURE, max_output_retries=1)
    state, effect = follow(rules, says("five"))
    assert isinstance(effect, CallModel)
    assert effect.request.messages[1] == AiMessage("five")
    assert "JSON" in UserMessage(effect.request.messages[2].contents).text  # type: ignore[union-attr]  # it is the user's

    state, effect = advance(rules, state, says('{"total": 5}'))

    assert isinstance(effect, Finish)
    assert effect.value == Sum(total=5)
    assert state.remembered == (USER, AiMessage('{"total": 5}'))


def test_the_last_output_error_reaches_the_caller_after_all_retries() -> None:
    rules = Rules(kind=Kind.STRUCTURED, structure=STRUCTURE, max_output_retries=1)
    _, effect = follow(rules, says("five"), says("six"))

    assert isinstance(effect, Fail)
    assert isinstance(effect.error, OutputParsingError)
    assert effect.error.text == "six"


def test_structured_replies_cut_at_the_token_limit_raise_model_truncated_error() -> None:
    rules = Rules(kind=Kind.STRUCTURED, structure=STRUCTURE)
    _, effect = follow(rules, says('{"total"', FinishReason.LENGTH))

    assert isinstance(effect, Fail)
    assert isinstance(effect.error, ModelTruncatedError)


def test_calls_of_the_answer_tool_are_remembered_as_text() -> None:
    rules = Rules(kind=Kind.STRUCTURED, structure=STRUCTURE)
    state, effect = follow(rules, asks(call(ANSWER_TOOL, arguments='{"total": 5}')), mode="tool")

    assert isinstance(effect, Finish)
    assert (effect.value, effect.finish_reason) == (Sum(total=5), FinishReason.STOP)
    assert state.remembered[-1] == AiMessage('{"total": 5}')


def test_invalid_calls_of_the_answer_tool_get_their_errors_as_result() -> None:
    rules = Rules(kind=Kind.STRUCTURED, structure=STRUCTURE)
    state, effect = follow(rules, asks(call(ANSWER_TOOL, arguments='{"total": "x"}')), mode="tool")

    assert isinstance(effect, CallModel)
    assert isinstance(effect.request.messages[-1], ToolExecutionResultMessage)
    assert effect.request.messages[-1].is_error
    state, effect = advance(rules, state, asks(call(ANSWER_TOOL, arguments='{"total": 5}')))
    assert state.remembered == (USER, AiMessage('{"total": 5}'))


def test_a_stored_state_asks_again_after_an_invalid_answer_beside_an_immediate_call() -> None:
    rules = Rules(kind=Kind.STRUCTURED, structure=STRUCTURE, immediate_if_last=frozenset({"now"}))
    state, effect = follow(rules, asks(call(ANSWER_TOOL, arguments='{"total": "x"}'), call("now")), mode="tool")

    assert isinstance(effect, CallModel)
    assert next_effect(rules, State.from_json(state.to_json())) == effect


@settings(deadline=None)
@given(
    made(
        lists(
            one_of(built(says, texts(5)), built(lambda n: asks(*[call(id_=str(i)) for i in range(1 + n)]), below(4))),
            8,
        ),
        below(5),
        sampled(None, 0, 1, 2, 3),
        size=256,
    )
)
def test_every_tool_call_is_answered_exactly_once_for_any_replies(
    drawn: tuple[list[ModelReplied], int, int | None],
) -> None:
    replies, max_rounds, max_calls = drawn
    rules = Rules(max_rounds=max_rounds, max_calls=max_calls, immediate=frozenset({"now"}))
    effect: Effect
    state, effect = begin(rules, None, (), USER)
    for reply in replies:
        if not isinstance(effect, CallModel):
            break
        waiting: list[str] = []
        for message in effect.request.messages:
            if isinstance(message, ToolExecutionResultMessage):
                assert message.id == waiting.pop(0)
            else:
                assert waiting == []
            if isinstance(message, AiMessage):
                waiting = [each.id for each in message.tool_execution_requests]
        assert waiting == []
        state, effect = advance(rules, state, reply)
        if isinstance(effect, RunTools):
            assert state.rounds <= max_rounds
            assert max_calls is None or len(effect.indexes) <= max_calls
            state, effect = run_all(rules, state, effect)


# --- one finished tool is one event


def test_finished_tools_are_stored_in_the_state_while_others_are_pending() -> None:
    state, _ = begin(Rules(), None, (), USER)
    first, second = call(id_="1"), call(id_="2")
    state, effect = advance(Rules(), state, asks(first, second))
    assert isinstance(effect, RunTools)
    assert effect.indexes == [0, 1]

    state, effect = advance(Rules(), state, ToolFinished(1, outcome(second)))

    assert isinstance(effect, RunTools)
    assert effect.indexes == [0]
    assert [each.request for each in state.all_executions] == [second]
    state, effect = advance(Rules(), state, ToolFinished(0, outcome(first)))
    assert isinstance(effect, CallModel)
    assert [each.id for each in effect.request.messages[-2:]] == ["1", "2"]  # type: ignore[union-attr]  # results


def test_suspended_calls_end_the_round_and_run_after_their_answer() -> None:
    state, _ = begin(Rules(), None, (), USER)
    first, second = call(id_="1"), call(id_="2")
    state, _ = advance(Rules(), state, asks(first, second))
    state, effect = advance(Rules(), state, ToolSuspended(0, {"kind": "approval"}))
    assert isinstance(effect, RunTools)
    state, effect = advance(Rules(), state, ToolFinished(1, outcome(second)))
    assert effect == Suspend([0])

    stored = State.from_json(state.to_json())
    assert next_effect(Rules(), stored) == Suspend([0])
    state, effect = advance(Rules(), stored, ToolResumed(0, {"by": "ann"}))

    assert isinstance(effect, RunTools)
    assert effect.indexes == [0]
    assert state.pending[0].details == {"by": "ann"}


def test_calls_that_started_early_are_matched_by_content_and_answered_in_reply_order() -> None:
    rules = Rules()
    state, _ = begin(rules, None, (), USER)
    first, second = call(id_="1"), call(id_="2")
    state, index = with_early_call(rules, state, second)
    assert index == 0

    state, effect = advance(rules, state, asks(first, second))
    assert isinstance(effect, RunTools)
    assert [each.request for each in state.pending] == [second, first]
    _, effect = run_all(rules, state, effect)

    assert isinstance(effect, CallModel)
    assert [each.id for each in effect.request.messages[-2:]] == ["1", "2"]  # type: ignore[union-attr]  # results


def test_messages_added_during_a_call_are_sent_and_not_remembered() -> None:
    state, _ = begin(Rules(), None, (), USER)
    aside = (AiMessage("rude"), UserMessage("Be polite."))
    state, effect = advance(Rules(), state, ModelReplied(asks(call()).response, aside))
    state, effect = run_all(Rules(), state, effect)

    assert isinstance(effect, CallModel)
    assert set(aside) <= set(effect.request.messages)
    assert not set(aside) & set(state.remembered)


# --- the state as JSON


@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_states_survive_json_between_any_two_events(rounds: int) -> None:
    rules = Rules(kind=Kind.STRUCTURED, structure=STRUCTURE)
    effect: Effect
    state, effect = begin(rules, SystemMessage("Add."), (UserMessage("hi"),), USER)
    assert state.prompted is not None
    usage = TokenUsage(1, 2)
    played = [asks(call(id_=f"{n}a"), call(id_=f"{n}b"), usage=usage) for n in range(rounds)]
    for event in [*played, says("no"), says('{"total": 5}')]:
        while True:
            again = State.from_json(state.to_json())
            assert again == state
            assert type(next_effect(rules, again)) is type(effect)
            state = again
            if not isinstance(effect, RunTools):
                break
            request = state.pending[effect.first].request
            state, effect = advance(rules, state, ToolFinished(effect.first, outcome(request)))
        state, effect = advance(rules, state, event)

    assert isinstance(effect, Finish)
    assert next_effect(rules, State.from_json(state.to_json())) == effect


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 99}', '{"version": 1}', '{"version": 1, "history": 3}'])
def test_invalid_states_are_rejected(text: str) -> None:
    with pytest.raises(TranscriptError):
        State.from_json(text)
