"""The tool loop: rounds, their limits, forced choices, parameters, and what is sent.

Not here: tools that run at the same time (`test_concurrent_tools`) or end the call (`test_immediate_return`).
"""

from typing import Any, Protocol

import pytest

from tests.services.rounds import Assistant, Tools, assistant, calls, results
from toolbox import (
    AiMessage,
    ChatRequest,
    Container,
    IllegalConfigurationError,
    Result,
    SystemMessage,
    TokenStream,
    ToolAbort,
    ToolCallsLimitExceededError,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    ToolRoundsExceededError,
    UserMessage,
    create_ai_service,
    register_ai_service,
    return_to_model,
    system_message,
    tool,
    tool_specifications_from,
)
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


# --- rounds


async def test_tool_results_go_back_to_the_model() -> None:
    service, model, _ = assistant(calls("sync", "later"), calls("sync"), "done")
    result = await service.chat("x")

    assert [len(request.messages) for request in model.requests] == [1, 4, 6]
    kinds = [type(each).__name__ for each in model.requests[2].messages]
    assert kinds == [
        "UserMessage",
        "AiMessage",
        "ToolExecutionResultMessage",
        "ToolExecutionResultMessage",
        "AiMessage",
        "ToolExecutionResultMessage",
    ]
    assert [each.request.name for each in result.tool_executions] == ["sync", "later", "sync"]
    assert all(request.tool_specifications is model.requests[0].tool_specifications for request in model.requests)


async def test_text_next_to_tool_calls_does_not_end_the_loop() -> None:
    request = tool_call("sync", {"n": 3})
    service, _, _ = assistant(AiMessage("Let me see.", [request]), "done")
    result = await service.chat("x")

    assert result.content == "done"
    assert result.messages[1] == AiMessage("Let me see.", [request])


async def test_results_are_sent_in_call_order() -> None:
    message = calls("later", "sync", "fail", "later")
    service, model, _ = assistant(message, "done")
    result = await service.chat("x")

    answers = [each for each in model.requests[1].messages if isinstance(each, ToolExecutionResultMessage)]
    assert [each.id for each in answers] == [each.id for each in message.tool_execution_requests]
    assert [each.tool_name for each in answers] == ["later", "sync", "fail", "later"]
    assert [each.text for each in answers] == ["0", "1", "broken", "3"]
    assert [each.is_error for each in answers] == [False, False, True, False]
    assert [each.is_error for each in result.tool_executions] == [False, False, True, False]


async def test_tools_run_one_after_another_by_default() -> None:
    service, _, tools = assistant(calls("later", "sync", "later"), "done")
    await service.chat("x")
    assert tools.ran == [("later", 0), ("sync", 1), ("later", 2)]


async def test_calls_without_an_id_or_with_the_same_id_all_run() -> None:
    requests = [ToolExecutionRequest("1", "sync", '{"n": 1}'), ToolExecutionRequest("1", "sync", '{"n": 2}')]
    for together in (False, True):
        service, model, _ = assistant(AiMessage(None, requests), "done", concurrent_tools=together)
        await service.chat("x")
        assert results(model) == ["1", "2"]


# --- limits


async def test_an_answer_may_follow_the_last_allowed_round() -> None:
    service, _, tools = assistant(calls("sync"), calls("sync"), "done", max_tool_rounds=2)
    assert (await service.chat("x")).content == "done"
    assert len(tools.ran) == 2


async def test_exceeding_max_tool_rounds_raises_before_any_tool_runs() -> None:
    last = calls("sync", "later")
    service, model, tools = assistant(calls("sync"), calls("sync"), last, "never", max_tool_rounds=2)
    with pytest.raises(ToolRoundsExceededError) as raised:
        await service.chat("x")

    assert len(tools.ran) == 2
    assert len(model.requests) == 3
    assert "2" in str(raised.value)
    assert isinstance(raised.value.transcript, tuple)
    assert raised.value.transcript == (*model.requests[2].messages, last)


async def test_max_tool_rounds_can_be_zero() -> None:
    service, _, tools = assistant(calls("sync"), max_tool_rounds=0)
    with pytest.raises(ToolRoundsExceededError):
        await service.chat("x")
    assert tools.ran == []


async def test_default_max_tool_rounds_is_ten() -> None:
    service, _, tools = assistant(*[calls("sync")] * 10, "done")
    assert (await service.chat("x")).content == "done"
    service, _, tools = assistant(*[calls("sync")] * 11, "done")
    with pytest.raises(ToolRoundsExceededError):
        await service.chat("x")
    assert len(tools.ran) == 10


async def test_too_many_tool_calls_in_a_reply_raise_before_any_tool_runs() -> None:
    message = calls("sync", "sync", "sync")
    service, _, tools = assistant(calls("sync", "sync"), message, max_tool_calls_per_response=2)
    with pytest.raises(ToolCallsLimitExceededError) as raised:
        await service.chat("x")

    assert len(tools.ran) == 2
    assert raised.value.transcript[-1] == message
    assert raised.value.transcript[0] == UserMessage("x")
    assert "3" in str(raised.value)
    assert "2" in str(raised.value)


async def test_tool_calls_limit_applies_per_response() -> None:
    service, _, tools = assistant(calls("sync", "sync"), calls("sync", "sync"), "done", max_tool_calls_per_response=2)
    await service.chat("x")
    assert len(tools.ran) == 4


async def test_any_number_of_tool_calls_runs_without_a_limit() -> None:
    service, _, tools = assistant(calls(*["sync"] * 50), "done")
    await service.chat("x")
    assert len(tools.ran) == 50


async def test_limits_apply_to_streams_and_concurrent_tools() -> None:
    class Streaming(Protocol):
        def chat(self, text: str) -> TokenStream: ...

    cases: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"max_tool_rounds": 1}, ToolRoundsExceededError),
        ({"max_tool_calls_per_response": 1}, ToolCallsLimitExceededError),
    ]
    for together in (False, True):
        for options, error in cases:
            tools = Tools()
            model = ScriptedChatModel([calls("sync"), calls("later", "sync"), "never"])
            service: Any = create_ai_service(
                Streaming, chat_model=model, tools=(tools,), concurrent_tools=together, **options
            )
            with pytest.raises(error):
                async for _ in service.chat("x"):
                    pass
            assert tools.ran == [("sync", 0)]


@pytest.mark.parametrize(
    "options",
    [
        {"max_tool_rounds": -1},
        {"max_tool_calls_per_response": -1},
        {"max_output_retries": -1},
        {"max_result_chars": -1},
        {"timeout": -1},
    ],
)
def test_negative_limits_are_a_problem(options: dict[str, Any]) -> None:
    [name] = options
    with pytest.raises(IllegalConfigurationError) as raised:
        assistant(**options)
    [problem] = raised.value.problems
    assert name in problem.what
    assert "-1" in problem.what
    assert problem.where == "Assistant"

    @register_ai_service(**options)
    class Marked(Protocol):
        async def chat(self, text: str) -> str: ...

    [problem] = Container(models={"default": ScriptedChatModel([])}).register(Marked).check()
    assert name in problem.what


# --- forced choice and parameters


async def test_forced_tool_choice_is_relaxed_after_the_first_round() -> None:
    for choice in ("required", "sync"):
        service, model, _ = assistant(calls("sync"), calls("later"), "done", tool_choice=choice)
        await service.chat("x")
        assert model.requests[0].tool_choice == choice
        assert all(request.tool_choice in (None, "auto") for request in model.requests[1:])


async def test_tool_choices_auto_and_none_are_sent_in_every_round() -> None:
    for choice in ("auto", "none"):
        service, model, _ = assistant(calls("sync"), "done", tool_choice=choice)
        await service.chat("x")
        assert [request.tool_choice for request in model.requests] == [choice, choice]


def test_tool_choice_with_an_unknown_tool_is_a_problem() -> None:
    with pytest.raises(IllegalConfigurationError, match="nothing_like_it"):
        assistant(tool_choice="nothing_like_it")
    with pytest.raises(IllegalConfigurationError, match="invalid tool_choice='required': the method offers no tools"):
        create_ai_service(Assistant, chat_model=ScriptedChatModel([]), tool_choice="required")


async def test_parameters_are_sent_with_their_wire_names() -> None:
    service, model, _ = assistant(
        calls("sync"), "done", temperature=0.5, parameters={"seed": 1, "reasoning_effort": "low"}
    )
    await service.chat("x")
    assert all(
        (request.parameters, request.temperature) == ({"seed": 1, "reasoning_effort": "low"}, 0.5)
        for request in model.requests
    )


async def test_temperature_zero_is_sent_and_none_is_not() -> None:
    service, model, _ = assistant("done", temperature=0)
    await service.chat("x")
    assert model.requests[0].temperature == 0
    service, model, _ = assistant("done")
    await service.chat("x")
    assert model.requests[0].temperature is None
    assert model.requests[0].parameters == {}
    assert model.requests[0].tool_choice is None


# --- requests


async def test_tool_specifications_are_sent_unchanged() -> None:
    service, model, tools = assistant("done")
    await service.chat("x")
    assert list(model.requests[0].tool_specifications) == tool_specifications_from(tools)


async def test_system_message_is_first_in_every_round() -> None:
    class Brief(Protocol):
        @system_message("Be brief.")
        async def chat(self, text: str) -> Result[str]: ...

    model = ScriptedChatModel([calls("sync"), calls("sync"), "done"])
    result = await create_ai_service(Brief, chat_model=model, tools=(Tools(),)).chat("x")
    assert all(request.messages[0] == SystemMessage("Be brief.") for request in model.requests)
    assert SystemMessage("Be brief.") not in result.messages


async def test_model_errors_reach_the_caller() -> None:
    error = ConnectionError("gone")

    def reply(request: ChatRequest) -> str:
        raise error

    service, _, _ = assistant(calls("sync"), reply)
    with pytest.raises(ConnectionError) as raised:
        await service.chat("x")
    assert raised.value is error


async def test_tool_abort_ends_the_call_immediately() -> None:
    class Enough(ToolAbort):
        pass

    error = Enough("no more", 3)

    @tool
    def stop() -> str:
        raise error

    tools = Tools()
    for together in (False, True):
        model = ScriptedChatModel([AiMessage(None, [tool_call("stop"), tool_call("sync")]), "never"])
        service = create_ai_service(
            Assistant,
            chat_model=model,
            tools=(stop, tools),
            concurrent_tools=together,
            on_tool_execution_error=return_to_model,
        )
        with pytest.raises(Enough) as raised:
            await service.chat("x")
        assert raised.value is error
        assert len(model.requests) == 1
    assert len(tools.ran) <= 1
