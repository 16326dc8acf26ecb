"""Results of tools: text for the model and values for the program."""

import json
import math
from collections.abc import Awaitable, Coroutine
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, Protocol

import pytest
from pydantic import BaseModel, ConfigDict, Field, field_serializer

from toolbox import (
    AiServiceTool,
    Container,
    ImageContent,
    Result,
    TextContent,
    ToolboxSettings,
    ToolExecution,
    ToolExecutionRequest,
    ToolExecutionResult,
    ToolExecutionResultMessage,
    ToolSpecification,
    create_ai_service,
    register_ai_service,
    tool,
    tool_executor_from,
    tools_from,
)
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


class Assistant(Protocol):
    async def chat(self, text: str) -> Result[str]: ...


Received = tuple[ToolExecutionResultMessage, ToolExecution]


async def received(*tools: Any, name: str | None = None, **options: Any) -> Received:
    """Return the message for the model and the execution for the program of one tool call."""
    model = ScriptedChatModel([tool_call(name or tools[0].__name__), "done"])
    result = await create_ai_service(Assistant, chat_model=model, tools=tools, **options).chat("x")
    message = model.requests[1].messages[-1]
    assert isinstance(message, ToolExecutionResultMessage)
    [execution] = result.tool_executions
    assert execution.result == message.text
    assert execution.is_error == message.is_error
    return message, execution


def returning(value: object, annotation: Any = ...) -> Any:
    def give():  # type: ignore[no-untyped-def]
        return value

    if annotation is not ...:
        give.__annotations__["return"] = annotation
    return give


class Colour(Enum):
    RED = "red"


class City(BaseModel):
    name: str
    founded: date | None = None


class Aliased(BaseModel):
    inner_name: str = Field(serialization_alias="outerName")


@dataclass
class Point:
    x: int
    y: float


CITY = City(name="Zürich", founded=date(1200, 1, 2))


@pytest.mark.parametrize(
    ("value", "annotation", "text"),
    [
        (None, ..., "Success"),
        (None, None, "Success"),
        (None, str, "null"),
        (None, int | None, "null"),
        (None, Any, "null"),
        ("x", str, "x"),
        ("", str, ""),
        (" ", str, " "),
        ('"quoted"', ..., '"quoted"'),
        ("ü\n", str, "ü\n"),
        (3, int, "3"),
        (3, ..., "3"),
        (4.0, float, "4.0"),
        (True, bool, "true"),
        (Decimal("4.0"), Decimal, '"4.0"'),
        (Colour.RED, Colour, '"red"'),
        (date(2026, 1, 2), date, '"2026-01-02"'),
        (datetime(2026, 1, 2, 3, tzinfo=UTC), datetime, '"2026-01-02T03:00:00Z"'),
        (timedelta(hours=1), timedelta, '"PT1H"'),
        ([1, "ü"], list[Any], '[1,"ü"]'),
        ((1, 2), ..., "[1,2]"),
        ({"a": {"b": None}}, ..., '{"a":{"b":null}}'),
        ([], list[int], "[]"),
        ({}, dict[str, int], "{}"),
        (CITY, City, '{"name":"Zürich","founded":"1200-01-02"}'),
        ([CITY], list[City], '[{"name":"Zürich","founded":"1200-01-02"}]'),
        (CITY, ..., '{"name":"Zürich","founded":"1200-01-02"}'),
        (Point(1, 2.5), Point, '{"x":1,"y":2.5}'),
        ({"at": Point(1, 2.5)}, ..., '{"at":{"x":1,"y":2.5}}'),
    ],
)
async def test_values_are_encoded_as_text_or_json(value: object, annotation: Any, text: str) -> None:
    message, execution = await received(returning(value, annotation))

    assert message.text == text
    assert not message.is_error
    assert execution.result_object == value


class Measured(BaseModel):
    """Pydantic writes NaN in a model as null, whatever is around it."""

    mean: float
    unit: str | None = None


class Constants(BaseModel):
    model_config = ConfigDict(ser_json_inf_nan="constants")
    mean: float


class Serialized(Measured):
    @field_serializer("unit")
    def write_unit(self, unit: str | None) -> str:
        return unit or "none"


@pytest.mark.parametrize(("number", "text"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")])
async def test_nan_and_infinity_are_texts_wherever_they_are(number: float, text: str) -> None:
    values: list[tuple[Any, Any, str]] = [
        (number, float, text),
        (number, ..., text),
        ([1.5, number, None], list[Any], f'[1.5,"{text}",null]'),
        ({"a": {"b": (number,)}}, ..., f'{{"a":{{"b":["{text}"]}}}}'),
        (Point(1, number), Point, f'{{"x":1,"y":"{text}"}}'),
        (Measured(mean=number), Measured, f'{{"mean":"{text}","unit":null}}'),
        ({"m": [Measured(mean=number)]}, ..., f'{{"m":[{{"mean":"{text}","unit":null}}]}}'),
        (Constants(mean=number), Constants, f'{{"mean":"{text}"}}'),
        (Serialized(mean=number), Serialized, f'{{"mean":"{text}","unit":"none"}}'),
        ([Serialized(mean=number)], list[Serialized], f'[{{"mean":"{text}","unit":"none"}}]'),
        ("NaN null", str, "NaN null"),
        ({"said": "NaN null Infinity"}, ..., '{"said":"NaN null Infinity"}'),
    ]
    for value, annotation, expected in values:
        message, execution = await received(returning(value, annotation))

        assert message.text == expected
        assert execution.result_object is value


async def test_none_is_success_with_a_string_annotation() -> None:
    def give() -> "None":
        return None

    message, _ = await received(give)
    assert message.text == "Success"


async def test_the_type_inside_an_awaitable_annotation_is_used() -> None:
    async def later() -> None: ...

    async def missing() -> str | None:
        return None

    def coroutine() -> Coroutine[Any, Any, None]:
        return later()

    def awaitable() -> Awaitable[str | None]:
        return missing()

    assert (await received(later))[0].text == "Success"
    assert (await received(missing))[0].text == "null"
    assert (await received(coroutine))[0].text == "Success"
    assert (await received(awaitable))[0].text == "null"


async def test_tool_execution_has_the_value_itself() -> None:
    _, execution = await received(returning(CITY, City))

    assert execution.result_object is CITY
    assert execution.request.name == "give"
    assert execution.started_at.tzinfo is not None
    assert execution.started_at <= datetime.now(UTC)
    assert 0 <= execution.duration < 10


async def test_tool_execution_results_are_used_unchanged() -> None:
    ready = ToolExecutionResult("ready", {"raw": 1}, False, {"status": 7})
    message, execution = await received(returning(ready))

    assert (message.text, message.is_error, message.attributes) == ("ready", False, {"status": 7})
    assert execution.result_object == {"raw": 1}
    assert execution.attributes == {"status": 7}


async def test_tool_execution_results_with_is_error_are_errors() -> None:
    message, execution = await received(returning(ToolExecutionResult("no", "object", is_error=True)))

    assert message.is_error
    assert message.text == "no"
    assert execution.is_error
    assert execution.result_object is None


async def test_content_parts_are_sent_as_contents() -> None:
    image = ImageContent(url="http://x/y.png")
    parts = [TextContent("a"), image, TextContent("b")]

    message, execution = await received(returning(parts))
    assert message.contents == (TextContent("a"), image, TextContent("b"))
    assert message.text == "a\nb"
    assert execution.result_object == parts

    message, _ = await received(returning(image))
    assert message.contents == (image,)
    assert message.text == ""

    message, _ = await received(returning(TextContent("only"), TextContent))
    assert message.contents == (TextContent("only"),)
    assert message.text == "only"


async def test_aliases_are_used() -> None:
    message, _ = await received(returning(Aliased(inner_name="x"), Aliased))

    assert json.loads(message.text) == {"outerName": "x"}


async def test_values_that_cannot_be_encoded_are_errors_that_name_their_type() -> None:
    class Socket: ...

    message, execution = await received(returning(Socket()))
    assert message.is_error
    assert "Socket" in message.text
    assert execution.is_error
    assert execution.result_object is None


async def test_awaitables_returned_by_a_def_are_awaited() -> None:
    async def inner() -> int:
        return 3

    def outer():  # type: ignore[no-untyped-def]
        return inner()

    message, _ = await received(outer)
    assert message.text == "3"


# --- executors


@pytest.mark.parametrize(
    ("value", "text"), [(None, "Success"), ("42", "42"), (42, "42"), ({"a": 1}, '{"a":1}'), ("", "")]
)
async def test_values_of_executors_are_encoded_like_unannotated_values(value: object, text: str) -> None:
    specification = ToolSpecification("by_hand")

    message, execution = await received({specification: lambda request, memory_id: value}, name="by_hand")
    assert message.text == text
    assert execution.result_object == value

    message, _ = await received(AiServiceTool(specification, lambda request, memory_id: value), name="by_hand")
    assert message.text == text


async def test_awaitables_of_executors_are_awaited() -> None:
    async def later(request: ToolExecutionRequest, memory_id: object) -> str:
        return request.arguments

    def sooner(request: ToolExecutionRequest, memory_id: object) -> Any:
        return later(request, memory_id)

    for executor in (later, sooner):
        message, _ = await received({ToolSpecification("by_hand"): executor}, name="by_hand")
        assert message.text == "{}"


async def test_executors_can_be_callable_objects() -> None:
    class Sync:
        def __call__(self, request: ToolExecutionRequest, memory_id: object) -> str:
            return "sync"

    class Async:
        async def __call__(self, request: ToolExecutionRequest, memory_id: object) -> str:
            return "async"

    assert (await received({ToolSpecification("f"): Sync()}, name="f"))[0].text == "sync"
    assert (await received({ToolSpecification("f"): Async()}, name="f"))[0].text == "async"


# --- low level


def test_tool_executor_from_returns_a_result() -> None:
    def add(a: int, b: int = 2) -> int:
        return a + b

    executor = tool_executor_from(add)

    assert executor(ToolExecutionRequest("1", "add", '{"a": "1"}'), None) == ToolExecutionResult("3", 3)


async def test_tool_executor_from_a_coroutine_function_is_awaited() -> None:
    async def add(a: int) -> int:
        return a

    executed: Any = tool_executor_from(add)(ToolExecutionRequest("1", "add", '{"a": 1}'), None)
    assert await executed == ToolExecutionResult("1", 1)


def test_tool_executor_from_returns_errors_as_results() -> None:
    def fail() -> int:
        raise ValueError("broken")

    def silent() -> int:
        raise ValueError

    assert tool_executor_from(fail)(ToolExecutionRequest("1", "f", "{}"), None) == ToolExecutionResult(
        "broken", is_error=True
    )
    assert tool_executor_from(silent)(ToolExecutionRequest("1", "f", "{}"), None) == ToolExecutionResult(
        "ValueError", is_error=True
    )


async def test_tools_from_returns_a_mapping_for_services() -> None:
    class Tools:
        @tool
        def one(self) -> int:
            return 1

        @tool
        async def two(self) -> int:
            return 2

    tools = tools_from(Tools())
    assert [each.name for each in tools] == ["one", "two"]
    one, two = (executor(ToolExecutionRequest("1", "x", ""), None) for executor in tools.values())
    assert one == ToolExecutionResult("1", 1)
    assert await two == ToolExecutionResult("2", 2)  # type: ignore[misc]
    assert (await received(tools, name="two"))[0].text == "2"

    model = ScriptedChatModel([tool_call("one"), "done"])
    assert (await create_ai_service(Assistant, chat_model=model, tools=tools).chat("x")).content == "done"


# --- limits of a result's text


async def test_result_limits_of_tools_override_services_and_services_override_containers() -> None:
    class Tools:
        @tool(max_result_chars=5)
        def five(self) -> str:
            return "x" * 100

        @tool
        def any(self) -> str:
            return "x" * 100

    @register_ai_service(tools=(Tools,), max_result_chars=10)
    class Ten(Protocol):
        async def chat(self, text: str) -> str: ...

    @register_ai_service(tools=(Tools,))
    class Twenty(Protocol):
        async def chat(self, text: str) -> str: ...

    replies = [tool_call("five"), tool_call("any"), "done"]
    model = ScriptedChatModel([*replies, *replies])
    container = Container(models={"default": model}, settings=ToolboxSettings(max_result_chars=20))
    async with container.register(Ten, Twenty):
        await container.get(Ten).chat("x")
        await container.get(Twenty).chat("x")

    results = [
        each.text
        for request in (model.requests[2], model.requests[5])
        for each in request.messages
        if isinstance(each, ToolExecutionResultMessage)
    ]
    assert [each.count("x") for each in results] == [5, 10, 5, 20]
    assert all(len(each) > each.count("x") for each in results)  # the note that says so


async def test_results_as_long_as_the_limit_are_not_cut() -> None:
    message, execution = await received(returning("x" * 10), max_result_chars=10)
    assert message.text == "x" * 10

    message, execution = await received(returning("x" * 11), max_result_chars=10)
    assert message.text.startswith("x" * 10)
    assert "11" in message.text
    assert execution.result_object == "x" * 11
