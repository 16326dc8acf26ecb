"""`on_limit="answer"`: the model is asked for its answer where a limit of the service would raise."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Protocol

import pytest

from toolbox import (
    AiMessage,
    BeforeToolExecution,
    ChatResponse,
    Container,
    IllegalConfigurationError,
    IntermediateResponse,
    MemoryId,
    PartialResponse,
    Result,
    TokenStream,
    TokenUsage,
    ToolCallsLimitExceededError,
    ToolExecuted,
    ToolExecutionRequest,
    ToolRoundsExceededError,
    register_ai_service,
    tool,
)
from toolbox.limits import CostEstimator, UsageLimitExceededError, UsageLimits, usage_limits
from toolbox.services.outputs import ANSWER_TOOL
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio

CALL = tool_call("look", {"place": "Rome"})
SEVERAL = AiMessage(None, (tool_call("look", {"place": "Rome"}), tool_call("look", {"place": "Oslo"})))


def reply(text: str | None = None, *calls: ToolExecutionRequest, tokens: int = 0) -> ChatResponse:
    return ChatResponse(AiMessage(text, calls), token_usage=TokenUsage(tokens, 0))


def a_call(number: int = 1) -> ToolExecutionRequest:
    return ToolExecutionRequest(f"call-{number}", "look", '{"place": "Rome"}')


class Places:
    def __init__(self) -> None:
        self.seen: list[str] = []

    @tool
    async def look(self, place: str) -> str:
        """Look at a place."""
        self.seen.append(place)
        return f"{place} is sunny"


class Prices(CostEstimator):
    def estimate(self, model: str, usage: TokenUsage) -> Decimal | None:
        return Decimal(usage.input_tokens)


async def ask(
    script: list[Any], returns: Any = Result[str], **options: Any
) -> tuple[Any, ScriptedChatModel, Places, BaseException | None]:
    """Ask a service with these options once. Returns its value, the model, the tools and the error."""
    model, places = ScriptedChatModel(script), Places()

    class Guide(Protocol):
        async def ask(self, text: str) -> Any: ...

    Guide.ask.__annotations__["return"] = returns
    service = register_ai_service(tools=places, on_limit="answer", **options)(Guide)
    container = Container(models={"default": model}).register(service).register_instance(Prices())
    async with container:
        try:
            guide: Any = container.get(service)  # type: ignore[type-abstract]  # made by this test
            return await guide.ask("How is the weather?"), model, places, None
        except Exception as error:
            return None, model, places, error


LIMITS = [
    ("max_tool_rounds", {"max_tool_rounds": 1}, [CALL, CALL]),
    ("max_tool_calls_per_response", {"max_tool_calls_per_response": 1}, [CALL, SEVERAL]),
    ("model_calls", {"limits": UsageLimits(model_calls=1)}, [CALL]),
    ("tool_calls", {"limits": UsageLimits(tool_calls=1)}, [CALL, CALL]),
    ("total_tokens", {"limits": UsageLimits(total_tokens=10)}, [reply(None, a_call(), tokens=8)] * 2),
    ("input_tokens", {"limits": UsageLimits(input_tokens=10)}, [reply(None, a_call(), tokens=8)] * 2),
    ("cost", {"limits": UsageLimits(cost=Decimal(10))}, [reply(None, a_call(), tokens=8)] * 2),
]


@pytest.mark.parametrize(("limit", "options", "script"), LIMITS, ids=[each[0] for each in LIMITS])
async def test_at_each_limit_the_model_is_asked_for_its_answer(
    limit: str, options: dict[str, Any], script: list[Any]
) -> None:
    result, model, places, error = await ask([*script, "It is sunny."], **options)

    assert error is None
    assert (result.content, result.stopped_by) == ("It is sunny.", limit)
    assert places.seen == ["Rome"]  # the reply that goes too far is dropped
    last = model.requests[-1]
    assert last.tool_choice == "none"
    assert last.tool_specifications is model.requests[0].tool_specifications
    assert [type(each).__name__ for each in last.messages] == [
        "UserMessage",
        "AiMessage",
        "ToolExecutionResultMessage",
    ]
    assert [type(each).__name__ for each in result.messages] == [
        "UserMessage",
        "AiMessage",
        "ToolExecutionResultMessage",
        "AiMessage",
    ]


async def test_the_usage_has_the_reply_that_was_dropped() -> None:
    script = [reply(None, a_call(), tokens=8), reply(None, a_call(), tokens=8), reply("Sunny.", tokens=4)]

    result, *_ = await ask(script, limits=UsageLimits(total_tokens=10))

    assert result.token_usage.total_tokens == 20


async def test_an_answer_that_goes_too_far_is_the_answer() -> None:
    script = [reply(None, a_call(), tokens=8), reply("Sunny.", tokens=8)]

    result, model, *_ = await ask(script, limits=UsageLimits(total_tokens=10))

    assert (result.content, result.stopped_by, len(model.requests)) == ("Sunny.", "total_tokens", 2)


async def test_a_call_that_reaches_no_limit_is_not_stopped() -> None:
    result, *_ = await ask([CALL, "Sunny."], max_tool_rounds=1, limits=UsageLimits(model_calls=2))

    assert (result.content, result.stopped_by) == ("Sunny.", None)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"max_tool_rounds": 1}, ToolRoundsExceededError),
        ({"max_tool_calls_per_response": 0}, ToolCallsLimitExceededError),
        ({"limits": UsageLimits(tool_calls=1)}, UsageLimitExceededError),
    ],
)
async def test_a_last_reply_of_calls_alone_raises_the_error_of_the_limit(
    options: dict[str, Any], kind: type[Exception]
) -> None:
    _, model, places, error = await ask([CALL] * 5, **options)

    assert isinstance(error, kind)
    assert len(model.requests) == len(places.seen) + 2
    assert error.transcript[-1].has_tool_execution_requests  # type: ignore[attr-defined]  # each of them has it


async def test_calls_beside_a_last_answer_do_not_run() -> None:
    result, _, places, _ = await ask([CALL, CALL, reply("Sunny.", a_call())], max_tool_rounds=1)

    assert (result.content, places.seen) == ("Sunny.", ["Rome"])
    assert not result.messages[-1].tool_execution_requests


@dataclass
class Weather:
    degrees: int


@pytest.mark.parametrize("mode", ["schema", "tool", "prompt"])
async def test_structured_answers_are_asked_for_once(mode: str) -> None:
    answer = tool_call(ANSWER_TOOL, {"degrees": 20}) if mode == "tool" else '{"degrees": 20}'
    script = [CALL, CALL, answer]

    result, model, *_ = await ask(script, Result[Weather], max_tool_rounds=1, output_mode=mode)

    assert (result.content, result.stopped_by) == (Weather(20), "max_tool_rounds")
    expected = model.requests[-1].tool_specifications[-1].name if mode == "tool" else "none"
    assert model.requests[-1].tool_choice == expected


@pytest.mark.parametrize("mode", ["schema", "tool", "prompt"])
async def test_a_last_answer_that_does_not_fit_raises_the_error_of_the_limit(mode: str) -> None:
    _, model, _, error = await ask([CALL, CALL, "no idea"], Result[Weather], max_tool_rounds=1, output_mode=mode)

    assert isinstance(error, ToolRoundsExceededError)
    assert len(model.requests) == 3


async def test_limits_around_the_call_raise_as_ever() -> None:
    with usage_limits(model_calls=1), pytest.raises(UsageLimitExceededError):
        _, _, _, error = await ask([CALL, "Sunny."], limits=UsageLimits(model_calls=5))
        if error is not None:
            raise error


async def test_the_last_request_counts_for_the_limits_around_the_call() -> None:
    with usage_limits(model_calls=2):
        _, model, _, error = await ask([CALL, CALL, "Sunny."], max_tool_rounds=1, limits=UsageLimits(tool_calls=9))

    assert isinstance(error, UsageLimitExceededError)
    assert len(model.requests) == 2


# --- services as tools


@register_ai_service(tools=Places, model="inner", limits=UsageLimits(model_calls=1), on_limit="answer")
class Scout(Protocol):
    @tool
    async def explore(self, text: str) -> str:
        """Explore."""
        ...


async def test_a_service_that_is_a_tool_answers_at_its_own_limit() -> None:
    inner = ScriptedChatModel([CALL, "Rome is nice."])

    @register_ai_service(tools=Scout)
    class Guide(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    outer = ScriptedChatModel([tool_call("explore", {"text": "Rome"}), "Go to Rome."])
    container = Container(models={"default": outer, "inner": inner}).register(Guide, Scout, Places)
    async with container:
        result = await container.get(Guide).ask("Where?")

    assert [each.result for each in result.tool_executions] == ["Rome is nice."]
    assert result.stopped_by is None


@pytest.mark.parametrize("together", [False, True])
async def test_a_limit_that_is_reached_within_a_tool_ends_the_tool_and_asks_for_the_answer(together: bool) -> None:
    @register_ai_service(tools=Places, model="inner")
    class Endless(Protocol):
        @tool
        async def explore(self, text: str) -> str:
            """Explore."""
            ...

    @register_ai_service(
        tools=[Endless, Places], limits=UsageLimits(model_calls=3), on_limit="answer", concurrent_tools=together
    )
    class Guide(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

        def stream(self, text: str) -> TokenStream: ...

    def models() -> dict[str, Any]:
        calls = AiMessage(None, (tool_call("look", {"place": "Oslo"}), tool_call("explore", {"text": "Rome"})))
        return {"default": ScriptedChatModel([calls, "Oslo."]), "inner": ScriptedChatModel([CALL] * 9)}

    async with Container(models=models()).register(Guide, Endless, Places) as container:
        result = await container.get(Guide).ask("Where?")
    async with Container(models=models()).register(Guide, Endless, Places) as container:
        events = [each async for each in container.get(Guide).stream("Where?")]

    assert (result.content, result.stopped_by) == ("Oslo.", "model_calls")
    assert {each.request.name: each.is_error for each in result.tool_executions} == {"look": False, "explore": True}
    assert "model_calls=3" in next(each.result for each in result.tool_executions if each.is_error)
    begun = [each.request.name for each in events if isinstance(each, BeforeToolExecution)]
    ended = [each.execution.request.name for each in events if isinstance(each, ToolExecuted)]
    assert sorted(begun) == sorted(ended) == ["explore", "look"]


# --- streams and conversations


async def test_a_stream_ends_with_the_answer() -> None:
    @register_ai_service(tools=Places, max_tool_rounds=1, on_limit="answer")
    class Guide(Protocol):
        def events(self, text: str) -> TokenStream: ...
        def items(self, text: str) -> AsyncIterator[Weather]: ...

    too_far = reply('[{"degrees": 1}', a_call())
    model = ScriptedChatModel([CALL, reply("I look again.", a_call(2)), "Sunny."])
    async with Container(models={"default": model}).register(Guide, Places) as container:
        events = [each async for each in container.get(Guide).events("Where?")]
    items = ScriptedChatModel([CALL, too_far, '[{"degrees": 20}]'])
    async with Container(models={"default": items}).register(Guide, Places) as container:
        found = [each async for each in container.get(Guide).items("Where?")]

    kinds = [type(each) for each in events if isinstance(each, (PartialResponse, IntermediateResponse))]
    assert "".join(each.text for each in events if isinstance(each, PartialResponse)).endswith("Sunny.")
    assert kinds.count(IntermediateResponse) == 2  # of the round, and of the reply that was dropped
    assert sum(isinstance(each, BeforeToolExecution) for each in events) == 1
    assert found[-1] == Weather(20)


async def test_the_conversation_has_no_reply_that_was_dropped() -> None:
    @register_ai_service(tools=Places, max_tool_rounds=1, on_limit="answer")
    class Guide(Protocol):
        async def ask(self, room: MemoryId[str], text: str) -> str: ...

    model = ScriptedChatModel([CALL, CALL, "Sunny."])
    async with Container(models={"default": model}).register(Guide, Places) as container:
        await container.get(Guide).ask("ada", "Where?")
        messages = await container.chat_memory(Guide, "ada").messages()

    assert [type(each).__name__ for each in messages] == [
        "UserMessage",
        "AiMessage",
        "ToolExecutionResultMessage",
        "AiMessage",
    ]


async def test_an_unknown_value_is_a_problem_at_start() -> None:
    @register_ai_service(on_limit="stop")  # type: ignore[call-overload]  # what a program may say
    class Guide(Protocol):
        async def ask(self, text: str) -> str: ...

    with pytest.raises(IllegalConfigurationError, match="invalid on_limit='stop'"):
        async with Container(models={"default": ScriptedChatModel([])}).register(Guide):
            await asyncio.sleep(0)
