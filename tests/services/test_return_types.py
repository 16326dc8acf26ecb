"""Return types of service methods: formats, output modes, retries and `Result`."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypeVar
from uuid import UUID

import pytest
from pydantic import BaseModel, Field

from tests.problems import problems_of
from toolbox import (
    AiMessage,
    ChatResponse,
    Container,
    FinishReason,
    IllegalConfigurationError,
    MemoryId,
    ModelTruncatedError,
    OutputParsingError,
    Result,
    SystemMessage,
    TokenUsage,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    UserMessage,
    create_ai_service,
    register_ai_service,
    tool,
)
from toolbox.models.chat_wire import ChatWire
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


class City(BaseModel):
    """A city."""

    name: str = Field(description="as its people call it")
    founded: date | None = None


@dataclass
class Point:
    x: int
    y: float


class Colour(Enum):
    RED = "red"
    GREEN = "green"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Pair(NamedTuple):
    a: int
    b: str


class Node(BaseModel):
    value: int
    children: list["Node"] = []


def service_of(annotation: Any, *replies: Any, **options: Any) -> tuple[Any, ScriptedChatModel]:
    async def chat(self, text: str):  # type: ignore[no-untyped-def]
        ...

    chat.__annotations__ = {"text": str, "return": annotation}
    model = ScriptedChatModel(replies, supports_response_format=options.pop("supports", False))
    bases: Any = (Protocol,)
    cls = type("Assistant", bases, {"chat": chat, "__module__": __name__})
    return create_ai_service(cls, chat_model=model, **options), model


async def answer(annotation: Any, *replies: Any, **options: Any) -> Any:
    service, _ = service_of(annotation, *replies, **options)
    return await service.chat("x")


# --- types


@pytest.mark.parametrize("reply", ["hello", "", " spaced ", "```json\n{}\n```", "null"])
async def test_text_replies_are_returned_unchanged(reply: str) -> None:
    assert await answer(str, reply) == reply


async def test_empty_replies_are_returned_as_empty_text() -> None:
    assert await answer(str, AiMessage(None)) == ""
    assert (await answer(Result[str], AiMessage(None))).content == ""


async def test_an_empty_reply_is_a_note_for_the_model_that_is_asked_again() -> None:
    class Counter(Protocol):
        async def count(self, text: str) -> Result[int]: ...

    model = ScriptedChatModel(["", '{"value": 5}'])
    result = await create_ai_service(Counter, chat_model=model).count("How many?")

    roles = [each["role"] for each in json.loads(ChatWire().fields(model.requests[1])["messages"])]
    assert roles == ["user", "assistant", "user"]
    assert [each.text for each in result.messages] == ["How many?", '{"value": 5}']


async def test_methods_that_return_none_discard_the_reply() -> None:
    assert await answer(None, "whatever") is None
    assert (await answer(Result[None], "whatever")).content is None


async def test_methods_that_return_ai_message_return_the_reply_itself() -> None:
    message = AiMessage("hi", reasoning="because", attributes={"a": 1})
    assert await answer(AiMessage, message) is message
    assert (await answer(Result[AiMessage], message)).content is message


VALUES: list[tuple[Any, str, Any]] = [
    (bool, "true", True),
    (bool, '{"value": false}', False),
    (bool, "True", True),
    (int, "3", 3),
    (int, '{"value": 3}', 3),
    (int, " 42\n", 42),
    (int, '"42"', 42),
    (int, '{"value": "42"}', 42),
    (float, "3.5", 3.5),
    (float, "3", 3.0),
    (Decimal, '{"value": "1.10"}', Decimal("1.10")),
    (Colour, "red", Colour.RED),
    (Colour, '"red"', Colour.RED),
    (Colour, '{"value": "red"}', Colour.RED),
    (Colour, "RED", Colour.RED),
    (Level, "2", Level.HIGH),
    (Level, '{"value": 2}', Level.HIGH),
    (Literal["yes", "no"], "yes", "yes"),
    (Literal["yes", "no"], '"yes"', "yes"),
    (Literal["yes", "no"], '{"value": "no"}', "no"),
    (Literal[1, 2], "2", 2),
    (date, "2026-01-02", date(2026, 1, 2)),
    (date, '{"value": "2026-01-02"}', date(2026, 1, 2)),
    (datetime, '"2026-01-02T03:04:05"', datetime(2026, 1, 2, 3, 4, 5)),
    (time, "03:04", time(3, 4)),
    (timedelta, '"PT1H"', timedelta(hours=1)),
    (UUID, "00000000-0000-0000-0000-000000000001", UUID(int=1)),
    (City, '{"name": "Bern"}', City(name="Bern")),
    (
        City,
        'Here:\n```json\n{"name": "Bern", "founded": "1191-01-01"}\n```\n',
        City(name="Bern", founded=date(1191, 1, 1)),
    ),
    (City, '```\n{"name": "Bern"}\n```', City(name="Bern")),
    (Point, '{"x": 1, "y": 2.5}', Point(1, 2.5)),
    (Node, '{"value": 1, "children": [{"value": 2}]}', Node(value=1, children=[Node(value=2)])),
    (Pair, '{"value": [1, "b"]}', Pair(1, "b")),
    (list[City], '{"value": [{"name": "Bern"}]}', [City(name="Bern")]),
    (list[City], '[{"name": "Bern"}]', [City(name="Bern")]),
    (list[City], "[]", []),
    (list[str], '["a", "b"]', ["a", "b"]),
    (list[str], '```json\n["a"]\n```', ["a"]),
    (set[int], "[1, 1]", {1}),
    (tuple[int, str], '[1, "a"]', (1, "a")),
    (dict[str, int], '{"a": 1}', {"a": 1}),
    (dict[str, int], '{"value": 1}', {"value": 1}),
    (City | Point, '{"x": 1, "y": 2}', Point(1, 2)),
    (City | Point, '{"value": {"name": "Bern"}}', City(name="Bern")),
    (City | None, "null", None),
    (City | None, '{"value": null}', None),
    (City | None, '{"name": "Bern"}', City(name="Bern")),
    (int | str, '{"value": 3}', 3),
    (int | str, '{"value": "a"}', "a"),
    (str | None, '{"value": "a"}', "a"),
    (str | None, '{"value": null}', None),
    (list[int] | City, "[1]", [1]),
    (Annotated[int, Field(gt=0)], "3", 3),
    (Any, '{"value": [1]}', [1]),
]


@pytest.mark.parametrize(("annotation", "reply", "value"), VALUES, ids=[f"{a}-{r}" for a, r, _ in VALUES])
async def test_replies_are_converted_to_the_declared_type(annotation: Any, reply: str, value: object) -> None:
    got = await answer(annotation, reply)

    assert got == value
    assert type(got) is type(value)
    assert (await answer(Result[annotation], reply)).content == value


async def test_types_other_than_objects_are_wrapped_in_the_schema() -> None:
    service, model = service_of(int, "3", supports=True)
    await service.chat("x")
    schema = model.requests[0].response_format.schema  # type: ignore[union-attr]
    assert schema["type"] == "object"
    assert list(schema["properties"]) == ["value"]
    assert schema["properties"]["value"]["type"] == "integer"
    assert schema["required"] == ["value"]

    service, model = service_of(City, '{"name": "x"}', supports=True)
    await service.chat("x")
    schema = model.requests[0].response_format.schema  # type: ignore[union-attr]
    assert list(schema["properties"]) == ["name", "founded"]
    assert schema["properties"]["name"]["description"] == "as its people call it"


# --- output modes


async def test_output_mode_is_schema_if_the_model_supports_it_and_prompt_otherwise() -> None:
    service, model = service_of(City, '{"name": "x"}', supports=True)
    await service.chat("x")
    assert model.requests[0].response_format is not None
    assert model.requests[0].messages == (UserMessage("x"),)

    service, model = service_of(City, '{"name": "x"}')
    await service.chat("x")
    assert model.requests[0].response_format is None
    text = model.requests[0].messages[0].text or ""
    assert text.startswith("x")
    assert "JSON" in text
    assert '"name"' in text


async def test_the_configured_output_mode_is_used() -> None:
    service, model = service_of(City, '{"name": "x"}', supports=True, output_mode="prompt")
    await service.chat("x")
    assert model.requests[0].response_format is None
    assert "JSON" in model.requests[0].messages[0].text  # type: ignore[union-attr]

    service, model = service_of(City, '{"name": "x"}', output_mode="schema")
    await service.chat("x")
    assert model.requests[0].response_format is not None

    def reply(request: Any) -> ToolExecutionRequest:
        [specification] = request.tool_specifications
        return tool_call(specification.name, {"name": "Bern"})

    service, model = service_of(City, reply, output_mode="tool")
    assert await service.chat("x") == City(name="Bern")
    assert model.requests[0].response_format is None
    assert model.requests[0].tool_choice is not None
    assert list(model.requests[0].tool_specifications[0].parameters["properties"]) == ["name", "founded"]


async def test_text_methods_use_no_output_mode() -> None:
    for mode in ("schema", "tool", "prompt"):
        service, model = service_of(str, "hi", supports=True, output_mode=mode)
        assert await service.chat("x") == "hi"
        assert model.requests[0].response_format is None
        assert model.requests[0].tool_specifications == ()
        assert model.requests[0].messages == (UserMessage("x"),)


async def test_format_instructions_are_not_remembered() -> None:
    class Assistant(Protocol):
        async def chat(self, session: MemoryId[str], text: str) -> City: ...

    model = ScriptedChatModel(['{"name": "a"}', '{"name": "b"}'])
    service = create_ai_service(Assistant, chat_model=model)
    await service.chat("room", "one")
    await service.chat("room", "two")

    assert model.requests[1].messages[:2] == (UserMessage("one"), AiMessage('{"name": "a"}'))


async def test_other_tools_run_before_the_answer_tool() -> None:
    ran = []

    def find(name: str) -> str:
        ran.append(name)
        return "found"

    def last(request: Any) -> ToolExecutionRequest:
        answer_tool = request.tool_specifications[-1]
        return tool_call(answer_tool.name, {"name": "Bern"})

    replies = tool_call("find", {"name": "b"}), last
    result = await answer(Result[City], *replies, output_mode="tool", tools=(find,))
    assert result.content == City(name="Bern")
    assert ran == ["b"]
    assert [each.request.name for each in result.tool_executions] == ["find"]
    assert result.finish_reason is FinishReason.STOP
    assert isinstance(result.messages[-1], AiMessage)


async def test_text_replies_are_parsed_in_output_mode_tool() -> None:
    assert await answer(City, '{"name": "Bern"}', output_mode="tool") == City(name="Bern")


async def test_the_response_format_is_sent_again_after_tool_rounds() -> None:
    def find() -> str:
        return "found"

    service, model = service_of(City, tool_call("find"), '{"name": "Bern"}', tools=(find,), supports=True)
    assert await service.chat("x") == City(name="Bern")
    assert all(request.response_format is not None for request in model.requests)
    assert model.requests[0].response_format == model.requests[1].response_format


# --- replies that do not validate


async def test_invalid_replies_go_back_to_the_model_with_their_errors() -> None:
    service, model = service_of(Result[City], '{"nome": "Bern"}', '{"name": "Bern"}')
    result = await service.chat("x")

    assert result.content == City(name="Bern")
    *_, bad, correction = model.requests[1].messages
    assert bad == AiMessage('{"nome": "Bern"}')
    assert isinstance(correction, UserMessage)
    assert "name" in correction.text
    assert result.messages == (UserMessage("x"), AiMessage('{"name": "Bern"}'))


async def test_only_the_valid_reply_is_remembered() -> None:
    class Assistant(Protocol):
        async def chat(self, session: MemoryId[str], text: str) -> int: ...

    model = ScriptedChatModel(["many", "several", "3", "4"])
    service = create_ai_service(Assistant, chat_model=model)
    assert await service.chat("room", "how many?") == 3
    assert await service.chat("room", "more?") == 4

    *earlier, _ = model.requests[3].messages
    assert earlier == [UserMessage("how many?"), AiMessage("3")]


async def test_output_parsing_error_has_the_reply_and_its_problems() -> None:
    service, model = service_of(City, "one", '{"name": 1.5, "founded": "x"}', '{"founded": "never"}')
    with pytest.raises(OutputParsingError) as raised:
        await service.chat("x")

    assert len(model.requests) == 3
    assert raised.value.text == '{"founded": "never"}'
    assert {path for path, _ in raised.value.problems} == {"name", "founded"}
    assert isinstance(raised.value.problems, list)


@pytest.mark.parametrize(("retries", "asked"), [(0, 1), (1, 2), (2, 3)])
async def test_max_output_retries_limits_the_retries(retries: int, asked: int) -> None:
    service, model = service_of(int, *["no"] * 5, max_output_retries=retries)
    with pytest.raises(OutputParsingError):
        await service.chat("x")
    assert len(model.requests) == asked


@pytest.mark.parametrize("reply", ["", "no JSON", "{", '{"name": NaN}', "[1]"])
async def test_replies_that_are_not_valid_json_are_rejected(reply: str) -> None:
    with pytest.raises(OutputParsingError) as raised:
        await answer(City, reply, max_output_retries=0)
    assert raised.value.text == reply
    assert raised.value.problems


async def test_invalid_calls_of_the_answer_tool_go_back_as_error_results() -> None:
    def reply(arguments: dict[str, Any]) -> Any:
        return lambda request: tool_call(request.tool_specifications[-1].name, arguments)

    service, model = service_of(City, reply({"nome": "x"}), reply({"name": "Bern"}), output_mode="tool")
    assert await service.chat("x") == City(name="Bern")
    last = model.requests[1].messages[-1]
    assert isinstance(last, ToolExecutionResultMessage)
    assert last.is_error
    assert "name" in last.text


async def test_unknown_enum_values_are_rejected() -> None:
    with pytest.raises(OutputParsingError):
        await answer(Colour, "blue", max_output_retries=0)


async def test_truncated_structured_replies_raise_model_truncated_error() -> None:
    cut = ChatResponse(AiMessage('{"name": "Be'), finish_reason=FinishReason.LENGTH)
    with pytest.raises(ModelTruncatedError):
        await answer(City, cut)


@pytest.mark.parametrize(
    ("type_", "reply"),
    [
        (int, "12"),
        (float, "1.5"),
        (int | None, "12"),
        (date | datetime, "2026-01-02"),
        (int | str, "The answer is"),
        (list[int], "[1, 2"),
        (City | str, 'It is {"na'),
        (int, "```json\n12"),
        (date, "It was\n```\n2026-01-02"),
        (str | None, "Run ```ls``` and"),
        (str | None, '```json\n{"value": "hel'),
        (Literal["no", "No idea"], "no"),
        (Literal[1, 12] | None, "1"),
    ],
)
async def test_a_truncated_reply_that_may_go_on_is_no_answer(type_: Any, reply: str) -> None:
    with pytest.raises(ModelTruncatedError):
        await answer(type_, ChatResponse(AiMessage(reply), finish_reason=FinishReason.LENGTH))


@pytest.mark.parametrize(
    ("type_", "reply", "expected"),
    [
        (int, '{"value": 12}', 12),
        (int | str, '"twelve"', "twelve"),
        (bool, "true", True),
        (Colour, "red", Colour.RED),
        (Literal["yes", "no"] | None, "no", "no"),
        (list[int], "[1, 2]", [1, 2]),
        (City, '{"name": "Bern"} and', City(name="Bern")),
        (int, "```json\n12\n``` and", 12),
        (City, '```json\n{"name": "Bern"}', City(name="Bern")),
        (Literal["no", "no idea"], '"no"', "no"),
        (Literal["no", "no idea"], "no idea", "no idea"),
    ],
)
async def test_a_whole_answer_at_the_token_limit_is_read(type_: Any, reply: str, expected: Any) -> None:
    assert await answer(type_, ChatResponse(AiMessage(reply), finish_reason=FinishReason.LENGTH)) == expected


async def test_a_stream_of_items_that_was_cut_ends_with_model_truncated_error() -> None:
    class Numbers(Protocol):
        def count(self, text: str) -> AsyncIterator[int]: ...

    cut = ChatResponse(AiMessage("[1, 2"), finish_reason=FinishReason.LENGTH)
    numbers = create_ai_service(Numbers, chat_model=ScriptedChatModel([cut]))
    read = []
    with pytest.raises(ModelTruncatedError) as caught:
        async for number in numbers.count("to three"):
            read.append(number)
    assert read == [1]
    assert caught.value.text == "[1, 2"


async def test_truncated_text_replies_are_returned() -> None:
    cut = ChatResponse(AiMessage("Once upon"), finish_reason=FinishReason.LENGTH)
    result = await answer(Result[str], cut)
    assert result.content == "Once upon"
    assert result.finish_reason is FinishReason.LENGTH


# --- Result


def add(a: int, b: int) -> int:
    return a + b


async def test_result_has_usage_messages_and_tool_executions() -> None:
    request = tool_call("add", {"a": 1, "b": 2})
    asked = ChatResponse(AiMessage(None, [request]), TokenUsage(10, 5, 2, 1), FinishReason.TOOL_EXECUTION)
    said = ChatResponse(AiMessage("3"), TokenUsage(20, 7, 3, 2), FinishReason.STOP)
    result = await answer(Result[str], asked, said, tools=(add,))

    assert result.content == "3"
    assert result.token_usage == TokenUsage(30, 12, 5, 3)
    assert result.token_usage.total_tokens == 42
    assert result.finish_reason is FinishReason.STOP
    assert result.messages == (
        UserMessage("x"),
        AiMessage(None, [request]),
        ToolExecutionResultMessage(request.id, "add", "3"),
        AiMessage("3"),
    )
    [execution] = result.tool_executions
    assert execution.request == request
    assert execution.result == "3"
    assert execution.result_object == 3
    assert isinstance(result.tool_executions, tuple)
    assert isinstance(result.messages, tuple)


async def test_token_usage_is_summed_and_none_if_unknown() -> None:
    request = tool_call("add", {"a": 1, "b": 2})
    result = await answer(
        Result[str],
        ChatResponse(AiMessage(None, [request])),
        ChatResponse(AiMessage("3"), TokenUsage(1, 2)),
        tools=(add,),
    )
    assert result.token_usage == TokenUsage(1, 2)
    assert (await answer(Result[str], "x")).token_usage is None


async def test_token_usage_includes_rejected_replies() -> None:
    result = await answer(
        Result[int], ChatResponse(AiMessage("no"), TokenUsage(1, 2)), ChatResponse(AiMessage("3"), TokenUsage(10, 20))
    )
    assert result.token_usage == TokenUsage(11, 22)


async def test_result_messages_are_those_of_the_call_only() -> None:
    class Assistant(Protocol):
        async def chat(self, session: MemoryId[str], text: str) -> Result[str]: ...

    service = create_ai_service(Assistant, chat_model=ScriptedChatModel(["one", "two"]))
    await service.chat("room", "x")
    assert (await service.chat("room", "y")).messages == (UserMessage("y"), AiMessage("two"))


async def test_a_result_without_type_argument_contains_text() -> None:
    assert (await answer(Result, "hi")).content == "hi"


@pytest.mark.parametrize("reason", list(FinishReason))
async def test_finish_reason_comes_from_the_model(reason: FinishReason) -> None:
    if reason is FinishReason.TOOL_EXECUTION:
        return
    result = await answer(Result[str], ChatResponse(AiMessage("x"), finish_reason=reason))
    assert result.finish_reason is reason


# --- generics


T = TypeVar("T")


class Extractor(Protocol[T]):
    async def extract(self, text: str) -> T: ...

    async def all(self, text: str) -> Result[list[T]]: ...

    def each(self, text: str) -> AsyncIterator[T]: ...


@register_ai_service
class CityExtractor(Extractor[City], Protocol):
    async def count(self, text: str) -> int: ...


async def test_type_variables_are_resolved_by_the_service_class() -> None:
    model = ScriptedChatModel(['{"name": "a"}', '[{"name": "b"}]', '[{"name": "c"}]', "3"])
    async with Container(models={"default": model}).register(CityExtractor) as container:
        extractor = container.get(CityExtractor)
        assert await extractor.extract("x") == City(name="a")
        assert (await extractor.all("x")).content == [City(name="b")]
        assert [each async for each in extractor.each("x")] == [City(name="c")]
        assert await extractor.count("x") == 3


# --- problems


def test_missing_return_annotations_are_a_problem() -> None:
    class Assistant(Protocol):
        async def chat(self, text: str): ...  # type: ignore[no-untyped-def]

    [problem] = problems_of(Assistant)
    assert problem.where == "Assistant.chat"
    assert "return" in problem.what


def test_types_that_pydantic_cannot_validate_are_a_problem() -> None:
    class Socket: ...

    class Assistant(Protocol):
        async def chat(self, text: str) -> Socket: ...

        async def result(self, text: str) -> Result[Socket]: ...

        async def many(self, text: str) -> list[Socket]: ...

    problems = problems_of(Assistant)
    assert [problem.where for problem in problems] == ["Assistant.chat", "Assistant.result", "Assistant.many"]
    assert all("Socket" in problem.what for problem in problems)
    assert all(len(str(problem)) < 400 for problem in problems)


def test_async_methods_that_return_a_stream_are_a_problem() -> None:
    class Assistant(Protocol):
        async def chat(self, text: str) -> AsyncIterator[str]: ...

    [problem] = problems_of(Assistant)
    assert problem.where == "Assistant.chat"
    assert "def chat" in problem.fix


async def test_replies_with_several_json_values_are_rejected() -> None:
    with pytest.raises(OutputParsingError):
        await answer(City, '{"name": "a"}{"name": "b"}', max_output_retries=0)


async def test_the_schema_is_sent_as_json() -> None:
    for annotation in (City, Node, list[City], Colour, City | None, dict[str, Point]):
        service, model = service_of(annotation, "x", supports=True, max_output_retries=0)
        with pytest.raises(OutputParsingError):
            await service.chat("x")
        json.dumps(model.requests[0].response_format.schema)  # type: ignore[union-attr]


async def test_the_answer_tool_does_not_clash_with_other_tools() -> None:
    class Tools:
        @tool
        def final_answer(self) -> str:
            return "not this"

    with pytest.raises(IllegalConfigurationError, match="final_answer"):
        service_of(City, output_mode="tool", tools=(Tools(),))


async def test_the_system_message_stays_first_after_an_output_retry() -> None:
    from toolbox import system_message

    class Assistant(Protocol):
        @system_message("Count.")
        async def chat(self, text: str) -> int: ...

    model = ScriptedChatModel(["no", "3"])
    await create_ai_service(Assistant, chat_model=model).chat("x")
    assert all(request.messages[0] == SystemMessage("Count.") for request in model.requests)


async def test_arguments_of_the_answer_tool_are_repaired_like_other_arguments() -> None:
    call = ToolExecutionRequest("1", "final_answer", '{"name": "Be\nrn",}')

    assert await answer(City, call, output_mode="tool") == City(name="Be\nrn")
