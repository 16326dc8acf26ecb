"""The arguments a model writes: what is accepted, what is repaired, what is refused and how."""

from enum import Enum
from typing import Any, Literal, Protocol

import pytest
from pydantic import BaseModel, ConfigDict, Field

from toolbox import (
    ToolArgumentsError,
    ToolExecutionRequest,
    create_ai_service,
    tool_executor_from,
)
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


def call(function: Any, arguments: str) -> Any:
    result: Any = tool_executor_from(function)(ToolExecutionRequest("1", "f", arguments), None)
    assert not result.is_error, result.text
    return result.result_object


def refusal(function: Any, arguments: str) -> ToolArgumentsError:
    with pytest.raises(ToolArgumentsError) as raised:
        call(function, arguments)
    return raised.value


def add(a: int, b: int = 0) -> int:
    return a + b


def echo(text: str) -> str:
    return text


def nothing() -> str:
    return "ran"


class Colour(Enum):
    RED = "red"


# --- lax


@pytest.mark.parametrize(
    ("text", "value"), [('{"a": "5"}', 5), ('{"a": 2.0}', 2), ('{"a": " 7 "}', 7), ('{"a": true}', 1)]
)
def test_pydantics_lax_mode_converts(text: str, value: int) -> None:
    assert call(add, text) == value


def test_a_boolean_may_be_a_text() -> None:
    def flag(on: bool) -> list[bool]:
        return [on]

    assert call(flag, '{"on": "true"}') == [True]
    assert call(flag, '{"on": 0}') == [False]


@pytest.mark.parametrize(
    ("number", "text"),
    [("5", "5"), ("1.50", "1.50"), ("12345678901234567890123", "12345678901234567890123"), ("-0.1", "-0.1")],
)
def test_a_number_for_a_text_is_taken_as_its_text(number: str, text: str) -> None:
    assert call(echo, f'{{"text": {number}}}') == text


def test_a_number_for_a_text_inside_is_taken_as_its_text() -> None:
    class Parcel(BaseModel):
        zip: str
        tags: list[str] = []

    def send(parcel: Parcel, other: str | None = None, mapped: dict[str, str] | None = None) -> list[Any]:
        return [parcel.zip, parcel.tags, other, mapped]

    arguments = '{"parcel": {"zip": 12345, "tags": [1, "b"]}, "other": 7, "mapped": {"x": 8}}'
    assert call(send, arguments) == ["12345", ["1", "b"], "7", {"x": "8"}]


def test_a_boolean_for_a_text_is_refused() -> None:
    assert refusal(echo, '{"text": true}').problems[0][0] == "text"


def test_big_integers_are_exact() -> None:
    assert call(add, '{"a": 9007199254740993}') == 9007199254740993
    assert call(add, '{"a": 123456789012345678901234567890}') == 123456789012345678901234567890


# --- refused


@pytest.mark.parametrize(
    "text", ["[]", "5", '"x"', "true", '{"a": 1', "{'a': 1}", "a=1", '{"a": 1} {"a": 2}', "{a: 1}", '{"a": NaN}']
)
def test_what_is_no_object_or_broken_is_refused(text: str) -> None:
    error = refusal(add, text)

    assert error.request.arguments == text
    assert error.problems
    assert all(isinstance(path, str) and isinstance(message, str) for path, message in error.problems)
    assert "f" in str(error)


def test_a_missing_and_a_wrong_value_are_named() -> None:
    error = refusal(add, '{"b": "banana"}')

    assert [path for path, _ in error.problems] == ["a", "b"]
    assert isinstance(error.problems, list)
    assert isinstance(error.problems[0], tuple)
    text = str(error)
    assert "'f'" in text or "f" in text
    assert "a" in text
    assert "b" in text


def test_the_path_of_a_nested_fault_is_told() -> None:
    class Stop(BaseModel):
        name: str

    def plan(stops: list[Stop]) -> int:
        return len(stops)

    [(path, _)] = refusal(plan, '{"stops": [{"name": "a"}, {}]}').problems
    assert path == "stops.1.name"


def test_no_arguments_where_some_are_needed_are_refused() -> None:
    assert refusal(add, "").problems[0][0] == "a"
    assert refusal(add, "null").problems[0][0] == "a"


def test_a_wrong_value_is_not_replaced_by_the_default() -> None:
    assert refusal(add, '{"a": 1, "b": "banana"}').problems[0][0] == "b"


def test_a_fraction_is_no_integer() -> None:
    assert refusal(add, '{"a": 1.5}').problems[0][0] == "a"


def test_a_constraint_is_held() -> None:
    def f(a: int = Field(gt=3)) -> int:
        return a

    assert refusal(f, '{"a": 3}').problems[0][0] == "a"
    assert call(f, '{"a": 4}') == 4


def test_an_unknown_enum_value_or_literal_is_refused() -> None:
    def paint(colour: Colour, how: Literal["flat", "gloss"]) -> str:
        return f"{colour} {how}"

    assert [path for path, _ in refusal(paint, '{"colour": "blue", "how": "matt"}').problems] == ["colour", "how"]


def test_null_for_a_required_value_is_refused() -> None:
    assert refusal(add, '{"a": null}').problems[0][0] == "a"


# --- ignored


def test_unknown_keys_are_ignored() -> None:
    assert call(add, '{"a": 1, "c": 5, "self": 3}') == 1
    assert call(nothing, '{"x": 1}') == "ran"


def test_unknown_keys_inside_are_ignored_unless_the_type_forbids_them() -> None:
    class Loose(BaseModel):
        a: int

    class Tight(BaseModel):
        model_config = ConfigDict(extra="forbid")
        a: int

    def loose(value: Loose) -> int:
        return value.a

    def tight(value: Tight) -> int:
        return value.a

    assert call(loose, '{"value": {"a": 1, "b": 2}}') == 1
    assert refusal(tight, '{"value": {"a": 1, "b": 2}}').problems[0][0] == "value.b"


# --- repaired


@pytest.mark.parametrize("text", ["", " ", "\n\t ", "null", '"null"', "{}", '""', ' "null" '])
def test_no_arguments_in_all_their_forms(text: str) -> None:
    assert call(nothing, text) == "ran"


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "b": 2,}',
        '{"a": 1, "b": 2 , }',
        '{"a": 1,\n "b": 2,\n}',
        '"{\\"a\\": 1, \\"b\\": 2}"',
        '{}{"a": 1, "b": 2}',
        '{} {"a": 1, "b": 2}',
        '{"a": 1, "b": 2}{"a": 1, "b": 2}',
        '{"a": 1, "b": 2}\n{"b": 2, "a": 1}',
        ' {"a": 1, "b": 2} ',
        '\n{"a": 1, "b": 2}\n',
    ],
)
def test_what_is_repaired(text: str) -> None:
    assert call(add, text) == 3


def test_trailing_commas_inside_and_in_texts() -> None:
    def f(items: list[int], text: str) -> list[Any]:
        return [items, text]

    assert call(f, '{"items": [1, 2, ], "text": "a,}",}') == [[1, 2], "a,}"]


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1}{"a": 2}',
        '{"a": 1}{"a": 1}{"a": 1}',
        '```json\n{"a": 1}\n```',
        'Here you are: {"a": 1}',
        '{"a": 1}}',
        '{"a": 1 "b": 2}',
        '{"a": 1}{}',
        "{'a': 1}",
        '[{"a": 1}]',
        '{,"a": 1}',
    ],
)
def test_nothing_else_is_guessed(text: str) -> None:
    refusal(add, text)


# --- in a service


async def test_the_default_raises_the_error_and_the_tool_does_not_run() -> None:
    ran = []

    def note(a: int) -> None:
        ran.append(a)

    class Assistant(Protocol):
        async def chat(self, text: str) -> str: ...

    model = ScriptedChatModel([tool_call("note", "{broken")])
    service = create_ai_service(Assistant, chat_model=model, tools=(note,))

    with pytest.raises(ToolArgumentsError) as raised:
        await service.chat("x")
    assert raised.value.request.name == "note"
    assert raised.value.request.arguments == "{broken"
    assert "note" in str(raised.value)
    assert ran == []
    assert len(model.requests) == 1


@pytest.mark.parametrize("text", ["[" * 10_000, '{"text": ' + "[" * 10_000 + "]" * 10_000 + "}"])
def test_deep_nesting_is_a_typed_error(text: str) -> None:
    refusal(echo, text)
