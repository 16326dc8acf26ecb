"""The tool loop, without any I/O."""

import pickle
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

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
from toolbox.services.loop import (
    CallModel,
    Effect,
    Fail,
    Finish,
    ModelReplied,
    Rules,
    RunTools,
    State,
    ToolsRan,
    advance,
    begin,
)
from toolbox.services.outputs import ANSWER_TOOL, Kind, read_output

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


def ran(effect: Effect, *, failed: bool = False) -> ToolsRan:
    assert isinstance(effect, RunTools)
    executions = [ToolExecution(each, "5", 5, failed, datetime.now(UTC), 0.0) for each in effect.requests]
    messages = [ToolExecutionResultMessage.of(each, "5") for each in effect.requests]
    return ToolsRan(effect.response, executions, messages)


def follow(rules: Rules, *events: ModelReplied | str) -> tuple[State, Effect]:
    """Plays the model's replies; tools succeed, or fail after "failed"."""
    effect: Effect
    state, effect = begin(None, (), USER)
    failed = False
    for event in events:
        if event == "failed":
            failed = True
            continue
        assert isinstance(event, ModelReplied)
        if isinstance(effect, RunTools):
            state, effect = advance(rules, state, ran(effect, failed=failed))
        state, effect = advance(rules, state, event)
        state, effect = pickle.loads(pickle.dumps((state, effect)))
    if isinstance(effect, RunTools):
        state, effect = advance(rules, state, ran(effect, failed=failed))
    return state, effect


def test_a_reply_without_calls_ends_the_call() -> None:
    state, effect = follow(Rules(), says("5"))

    assert isinstance(effect, Finish)
    assert (effect.value, effect.finish_reason) == ("5", FinishReason.STOP)
    assert state.remembered == (USER, AiMessage("5"))


def test_the_model_is_asked_with_everything_so_far_and_the_system_message_first() -> None:
    system, before = SystemMessage("Add."), (UserMessage("hi"), AiMessage("ho"))
    effect: Effect
    state, effect = begin(system, before, USER)
    assert effect == CallModel((system, *before, USER), first=True)

    state, effect = advance(Rules(), state, asks(call()))
    state, effect = advance(Rules(), state, ran(effect))

    assert isinstance(effect, CallModel)
    assert not effect.first
    assert [type(each).__name__ for each in effect.messages[-3:]] == [
        "UserMessage",
        "AiMessage",
        "ToolExecutionResultMessage",
    ]


def test_as_many_rounds_run_as_allowed_and_an_answer_may_follow() -> None:
    _, effect = follow(Rules(max_rounds=2), asks(call()), asks(call()), says("5"))
    assert isinstance(effect, Finish)

    state, effect = follow(Rules(max_rounds=2), asks(call()), asks(call()), asks(call(id_="last")))
    assert isinstance(effect, Fail)
    assert isinstance(effect.error, ToolRoundsExceededError)
    assert effect.error.transcript == state.messages
    assert state.messages[-1] == AiMessage(None, [call(id_="last")])


def test_a_reply_with_too_many_calls_fails_before_any_of_them_runs() -> None:
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
def test_an_immediate_round_ends_the_call_when_all_of_it_is_immediate_and_nothing_failed(
    immediate: set[str], calls: list[str], failed: bool, ends: bool
) -> None:
    requests = [call(name, str(number)) for number, name in enumerate(calls)]
    state, effect = follow(Rules(immediate=frozenset(immediate)), *(["failed"] if failed else []), asks(*requests))

    assert isinstance(effect, Finish) is ends
    if isinstance(effect, Finish):
        assert (effect.value, effect.finish_reason) == (None, FinishReason.TOOL_EXECUTION)
        assert len(state.remembered) == 2 + len(calls)


def test_token_usage_is_summed_and_none_when_no_reply_had_one() -> None:
    state, _ = follow(Rules(), asks(call(), usage=TokenUsage(1, 2)), says("5"), says("5"))
    assert state.token_usage == TokenUsage(1, 2)

    state, _ = follow(Rules(), asks(call(), usage=TokenUsage(1, 2)), says("5", usage=TokenUsage(3, 4, 1, 1)))
    assert state.token_usage == TokenUsage(4, 6, 1, 1)

    state, _ = follow(Rules(), says("5"))
    assert state.token_usage is None


def test_a_reply_that_does_not_validate_goes_back_and_is_not_remembered() -> None:
    rules = Rules(kind=Kind.STRUCTURED, structure=STRUCTURE, max_output_retries=1)
    state, effect = follow(rules, says("five"))
    assert isinstance(effect, CallModel)
    assert effect.messages[1] == AiMessage("five")
    assert "JSON" in UserMessage(effect.messages[2].contents).text  # type: ignore[union-attr]  # it is the user's

    state, effect = advance(rules, state, says('{"total": 5}'))

    assert isinstance(effect, Finish)
    assert effect.value == Sum(total=5)
    assert state.remembered == (USER, AiMessage('{"total": 5}'))


def test_retries_are_counted_and_the_last_error_reaches_the_caller() -> None:
    rules = Rules(kind=Kind.STRUCTURED, structure=STRUCTURE, max_output_retries=1)
    _, effect = follow(rules, says("five"), says("six"))

    assert isinstance(effect, Fail)
    assert isinstance(effect.error, OutputParsingError)
    assert effect.error.text == "six"


def test_a_structured_reply_cut_at_the_token_limit_is_truncated() -> None:
    rules = Rules(kind=Kind.STRUCTURED, structure=STRUCTURE)
    _, effect = follow(rules, says('{"total"', FinishReason.LENGTH))

    assert isinstance(effect, Fail)
    assert isinstance(effect.error, ModelTruncatedError)


def test_the_answer_tools_call_is_the_answer_and_is_remembered_as_text() -> None:
    rules = Rules(kind=Kind.STRUCTURED, structure=STRUCTURE, mode="tool")
    state, effect = follow(rules, asks(call(ANSWER_TOOL, arguments='{"total": 5}')))

    assert isinstance(effect, Finish)
    assert (effect.value, effect.finish_reason) == (Sum(total=5), FinishReason.STOP)
    assert state.remembered[-1] == AiMessage('{"total": 5}')


def test_a_bad_call_of_the_answer_tool_is_answered_with_its_errors() -> None:
    rules = Rules(kind=Kind.STRUCTURED, structure=STRUCTURE, mode="tool")
    state, effect = follow(rules, asks(call(ANSWER_TOOL, arguments='{"total": "x"}')))

    assert isinstance(effect, CallModel)
    assert isinstance(effect.messages[-1], ToolExecutionResultMessage)
    assert effect.messages[-1].is_error
    state, effect = advance(rules, state, asks(call(ANSWER_TOOL, arguments='{"total": 5}')))
    assert state.remembered == (USER, AiMessage('{"total": 5}'))


@given(
    st.lists(
        st.one_of(
            st.text(max_size=5).map(says), st.integers(1, 4).map(lambda n: asks(*[call(id_=str(i)) for i in range(n)]))
        ),
        max_size=8,
    ),
    st.integers(0, 4),
    st.one_of(st.none(), st.integers(0, 3)),
)
def test_whatever_the_model_replies_every_call_is_answered_once_and_right_after_it(
    replies: list[ModelReplied], max_rounds: int, max_calls: int | None
) -> None:
    rules = Rules(max_rounds=max_rounds, max_calls=max_calls, immediate=frozenset({"now"}))
    effect: Effect
    state, effect = begin(None, (), USER)
    for reply in replies:
        if not isinstance(effect, CallModel):
            break
        waiting: list[str] = []
        for message in effect.messages:
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
            assert max_calls is None or len(effect.requests) <= max_calls
            state, effect = advance(rules, state, ran(effect))
