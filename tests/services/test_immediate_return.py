"""Tools whose value is the answer: when a round ends the call, and which types fit the method."""

from typing import Annotated, Any, Literal, Protocol

import pytest
from pydantic import BaseModel

from tests.services.rounds import Tools, assistant, calls, results
from toolbox import (
    AiMessage,
    AiServiceTool,
    ChatResponse,
    FinishReason,
    IllegalConfigurationError,
    MemoryId,
    Problem,
    Result,
    ReturnBehavior,
    TokenStream,
    TokenUsage,
    ToolExecutionResult,
    ToolExecutionResultMessage,
    ToolProviderResult,
    ToolSpecification,
    UserMessage,
    create_ai_service,
    return_to_model,
    tool,
    toolbox,
)
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("names", "ends"),
    [
        (("now",), True),
        (("now", "now"), True),
        (("now", "now_nothing"), True),
        (("sync",), False),
        (("now", "sync"), False),
        (("sync", "now"), False),
        (("now_fails",), False),
        (("now", "now_fails"), False),
        (("now", "fail"), False),
        (("now", "unknown"), False),
    ],
)
@pytest.mark.parametrize("together", [False, True])
async def test_immediate_return_requires_that_every_tool_is_immediate_and_succeeds(
    names: tuple[str, ...], ends: bool, together: bool
) -> None:
    service, model, _ = assistant(calls(*names), "done", concurrent_tools=together, on_unknown_tool=return_to_model)
    result = await service.chat("x")

    assert len(result.tool_executions) == len(names)
    if ends:
        assert len(model.requests) == 1
        assert result.content is None
        assert result.finish_reason is FinishReason.TOOL_EXECUTION
        assert isinstance(result.messages[-1], ToolExecutionResultMessage)
    else:
        assert result.content == "done"
        assert results(model)[-1] is not None


async def test_the_value_of_an_immediate_tool_is_in_the_last_execution() -> None:
    service, _, _ = assistant(calls("sync"), calls("now", "now"))
    result = await service.chat("x")

    assert result.tool_executions[-1].result_object == 1
    assert result.tool_executions[-1].result == "1"
    assert [each.result_object for each in result.tool_executions] == [0, 0, 1]


async def test_immediate_tools_without_a_value_succeed() -> None:
    service, _, _ = assistant(calls("now_nothing"))
    result = await service.chat("x")
    assert result.tool_executions[-1].result == "Success"
    assert result.tool_executions[-1].result_object is None
    assert result.content is None


async def test_immediate_results_have_usage_and_messages() -> None:

    message = calls("now")
    service, _, _ = assistant(ChatResponse(message, TokenUsage(1, 2), FinishReason.TOOL_EXECUTION))
    result = await service.chat("x")
    assert result.token_usage == TokenUsage(1, 2)
    assert result.messages[:2] == (UserMessage("x"), message)
    assert len(result.messages) == 3


async def test_immediate_returns_are_remembered() -> None:
    class Remembering(Protocol):
        async def chat(self, session: MemoryId[str], text: str) -> Result[str]: ...

    model = ScriptedChatModel([calls("now"), calls("now"), "answer"])
    service = create_ai_service(Remembering, chat_model=model, tools=(Tools(),))
    assert (await service.chat("room", "one")).content is None
    assert (await service.chat("room", "two")).content is None
    assert (await service.chat("room", "three")).content == "answer"
    assert [type(each).__name__ for each in model.requests[2].messages] == [
        *("UserMessage", "AiMessage", "ToolExecutionResultMessage") * 2,
        "UserMessage",
    ]


async def test_immediate_tools_work_with_every_allowed_return_type() -> None:
    class Allowed(Protocol):
        async def result(self, text: str) -> Result[str]: ...

        async def structured(self, text: str) -> Result[int]: ...

        async def none(self, text: str) -> None: ...

        def events(self, text: str) -> TokenStream: ...

    model = ScriptedChatModel([calls("now")] * 4)
    service = create_ai_service(Allowed, chat_model=model, tools=(Tools(),))
    assert (await service.result("x")).content is None
    assert (await service.structured("x")).content is None
    await service.none("x")
    events = [each async for each in service.events("x")]
    assert type(events[-1]).__name__ == "CompleteResponse"
    assert events[-1].response.ai_message.has_tool_execution_requests  # type: ignore[union-attr]
    assert len(model.requests) == 4


def test_immediate_tools_of_another_type_than_the_method_are_problems() -> None:
    class Plain(Protocol):
        async def chat(self, text: str) -> str: ...

        @toolbox()
        async def without(self, text: str) -> str: ...

    with pytest.raises(IllegalConfigurationError) as raised:
        create_ai_service(Plain, chat_model=ScriptedChatModel([]), tools=(Tools(),))
    assert raised.value.problems == (
        Problem(
            "Plain.chat",
            "the immediate tool 'now' returns int, which cannot be the method's str",
            "return Result[…], None or a stream, or let the result go to the model",
        ),
        Problem(
            "Plain.chat",
            "the immediate tool 'now_nothing' returns None, which cannot be the method's str",
            "return Result[…], None or a stream, or let the result go to the model",
        ),
    )


class Point(BaseModel):
    x: int


class Circle(Point):
    radius: int


IMMEDIATE = ReturnBehavior.IMMEDIATE

IF_LAST = ReturnBehavior.IMMEDIATE_IF_LAST


@pytest.mark.parametrize(
    ("declared", "wanted", "fits"),
    [
        (int, int, True),
        (int, float, True),
        (float, int, False),
        (bool, int, False),
        (int, str | int, True),
        (str | None, str, True),
        (None, str, False),
        (None, str | None, True),
        (Any, str, True),
        (object, int, True),
        (Circle, Point, True),
        (Point, Circle, True),
        (Point, str, False),
        (dict[str, int], Point, True),
        (list[int], list[str], True),
        (list[int], dict[str, int], False),
        (Literal["a"], str, True),
        (Literal["a"], Literal["b", 1], True),
        (Literal[1], str, False),
        (Annotated[int, "n"], int, True),
        (Result[int], int, True),
        (Result[int], str, False),
        (ToolExecutionResult, str, True),
    ],
)
async def test_the_declared_type_of_an_immediate_tool_must_fit_that_of_the_method(
    declared: Any, wanted: Any, fits: bool
) -> None:
    async def given() -> Any: ...

    class Plain(Protocol):
        async def chat(self, text: str) -> Any: ...

    given.__annotations__["return"] = declared
    Plain.chat.__annotations__["return"] = wanted
    tools = [tool(return_behavior=IMMEDIATE)(given)]
    if fits:
        create_ai_service(Plain, chat_model=ScriptedChatModel([]), tools=tools)
    else:
        with pytest.raises(IllegalConfigurationError, match="the immediate tool 'given' returns"):
            create_ai_service(Plain, chat_model=ScriptedChatModel([]), tools=tools)


@pytest.mark.parametrize(
    ("wanted", "values", "answer"),
    [
        (str, ["x"], "x"),
        (str, [3], "done"),
        (int, [3], 3),
        (int, [True], 3),
        (float, [1], 1.0),
        (str, ["x", "y"], "done"),
        (str, [None, "x", None], "x"),
        (str, [None], "done"),
        (str | None, [None], None),
        (Point, [Circle(x=1, radius=2)], Circle(x=1, radius=2)),
        (Point, ["x"], Point(x=9)),
        (AiMessage, [AiMessage("now")], AiMessage("now")),
    ],
)
async def test_one_immediate_value_of_the_methods_type_is_the_answer(
    wanted: Any, values: list[Any], answer: Any
) -> None:
    class Plain(Protocol):
        async def chat(self, text: str) -> Any: ...

    Plain.chat.__annotations__["return"] = wanted
    left = iter(values)
    fast = AiServiceTool(ToolSpecification("fast"), lambda r, m: next(left), IMMEDIATE)
    replies = {int: "3", Point: '{"x": 9}', float: "1.0"}
    model = ScriptedChatModel([AiMessage(None, [tool_call("fast")] * len(values)), replies.get(wanted, "done")])
    service: Any = create_ai_service(Plain, chat_model=model, tools=[fast])

    assert await service.chat("x") == answer
    assert len(model.requests) == (2 if answer in ("done", Point(x=9)) or values[0] is True else 1)


async def test_provided_immediate_tools_of_another_type_fail_the_call() -> None:
    class Plain(Protocol):
        async def chat(self, text: str) -> str: ...

    @tool(return_behavior=IMMEDIATE)
    async def fast() -> int:
        return 1

    model = ScriptedChatModel([])
    service = create_ai_service(Plain, chat_model=model, tool_provider=lambda request: ToolProviderResult([fast]))
    with pytest.raises(IllegalConfigurationError, match="fast"):
        await service.chat("x")
    assert model.requests == []


def behaving(letters: str, fails: int | None = None) -> list[AiServiceTool]:
    def executor(request: Any, memory_id: Any) -> str:
        if fails is not None and request.name == f"t{fails}":
            raise ValueError("broken")
        return request.name

    kinds = {"L": ReturnBehavior.TO_LLM, "I": IMMEDIATE, "Z": IF_LAST}
    return [
        AiServiceTool(ToolSpecification(f"t{number}"), executor, kinds[letter]) for number, letter in enumerate(letters)
    ]


class Streaming(Protocol):
    async def chat(self, text: str) -> Result[str]: ...

    def events(self, text: str) -> TokenStream: ...

    async def plain(self, text: str) -> str: ...


ENDS = ("I", "II", "Z", "ZZ", "LZ", "IZ", "ZI", "LIZ", "ILZ")

GOES_ON = ("L", "LL", "LI", "IL", "ZL", "LZI", "IZL", "ZLI", "ZIL")


@pytest.mark.parametrize("letters", [*ENDS, *GOES_ON])
async def test_the_last_tool_decides_whether_a_round_ends_the_call(letters: str) -> None:
    def fresh() -> tuple[Streaming, ScriptedChatModel]:
        calls = AiMessage(None, [tool_call(f"t{number}") for number in range(len(letters))])
        model = ScriptedChatModel([calls, "done"])
        return create_ai_service(Streaming, chat_model=model, tools=behaving(letters)), model

    service, model = fresh()
    result = await service.chat("x")
    ends = letters in ENDS
    assert (result.content, len(model.requests)) == ((None, 1) if ends else ("done", 2))
    assert len(result.tool_executions) == len(letters)

    service, model = fresh()
    events = [each async for each in service.events("x")]
    names = [type(each).__name__ for each in events]
    assert len(model.requests) == (1 if ends else 2)
    assert names.count("IntermediateResponse") == (0 if ends else 1)
    assert names[-1] == "CompleteResponse"
    assert names.count("CompleteResponse") == 1


@pytest.mark.parametrize("letters", ENDS)
async def test_a_failed_tool_sends_all_results_of_the_round_to_the_model(letters: str) -> None:
    for fails in range(len(letters)):
        calls = AiMessage(None, [tool_call(f"t{number}") for number in range(len(letters))])
        model = ScriptedChatModel([calls, "done"])
        service = create_ai_service(Streaming, chat_model=model, tools=behaving(letters, fails))
        assert (await service.chat("x")).content == "done"


async def test_the_value_of_the_last_tool_is_the_answer_of_a_plain_method() -> None:
    calls = AiMessage(None, [tool_call("t0"), tool_call("t1")])
    service = create_ai_service(Streaming, chat_model=ScriptedChatModel([calls]), tools=behaving("LZ"))
    assert await service.plain("x") == "t1"
