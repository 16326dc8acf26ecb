"""Arguments of tool calls: conversion, rejection, ignored keys."""

from enum import Enum
from typing import Literal, Protocol

import pytest
from pydantic import BaseModel, ConfigDict, Field

from toolbox import (
    ToolArgumentsError,
    create_ai_service,
)
from toolbox.testing import ScriptedChatModel, tool_call

from .calls import add, call, nothing, refusal

pytestmark = pytest.mark.anyio


def echo(text: str) -> str:
    return text


class Colour(Enum):
    RED = "red"


# --- conversion


@pytest.mark.parametrize(
    ("text", "value"), [('{"a": "5"}', 5), ('{"a": 2.0}', 2), ('{"a": " 7 "}', 7), ('{"a": true}', 1)]
)
def test_values_are_converted_in_lax_mode(text: str, value: int) -> None:
    assert call(add, text) == value


def test_strings_and_numbers_are_converted_to_booleans() -> None:
    def flag(on: bool) -> list[bool]:
        return [on]

    assert call(flag, '{"on": "true"}') == [True]
    assert call(flag, '{"on": 0}') == [False]


@pytest.mark.parametrize(
    ("number", "text"),
    [("5", "5"), ("1.50", "1.50"), ("12345678901234567890123", "12345678901234567890123"), ("-0.1", "-0.1")],
)
def test_numbers_are_converted_to_strings_exactly_as_written(number: str, text: str) -> None:
    assert call(echo, f'{{"text": {number}}}') == text


def test_booleans_are_rejected_for_strings() -> None:
    assert refusal(echo, '{"text": true}').problems[0][0] == "text"


# --- rejection


@pytest.mark.parametrize(
    "text", ["[]", "5", '"x"', "true", '{"a": 1', "{'a': 1}", "a=1", '{"a": 1} {"a": 2}', "{a: 1}", '{"a": NaN}']
)
def test_invalid_json_and_other_values_than_objects_are_rejected(text: str) -> None:
    error = refusal(add, text)

    assert error.request.arguments == text
    assert error.problems
    assert all(isinstance(path, str) and isinstance(message, str) for path, message in error.problems)
    assert "f" in str(error)


def test_missing_and_invalid_values_are_named() -> None:
    error = refusal(add, '{"b": "banana"}')

    assert [path for path, _ in error.problems] == ["a", "b"]
    assert isinstance(error.problems, list)
    assert isinstance(error.problems[0], tuple)
    text = str(error)
    assert "'f'" in text or "f" in text
    assert "a" in text
    assert "b" in text


def test_errors_of_nested_values_have_their_path() -> None:
    class Stop(BaseModel):
        name: str

    def plan(stops: list[Stop]) -> int:
        return len(stops)

    [(path, _)] = refusal(plan, '{"stops": [{"name": "a"}, {}]}').problems
    assert path == "stops.1.name"


def test_empty_arguments_are_rejected_if_some_are_required() -> None:
    assert refusal(add, "").problems[0][0] == "a"
    assert refusal(add, "null").problems[0][0] == "a"


def test_invalid_values_are_not_replaced_by_the_default() -> None:
    assert refusal(add, '{"a": 1, "b": "banana"}').problems[0][0] == "b"


def test_fractions_are_rejected_for_integers() -> None:
    assert refusal(add, '{"a": 1.5}').problems[0][0] == "a"


def test_constraints_are_validated() -> None:
    def f(a: int = Field(gt=3)) -> int:
        return a

    assert refusal(f, '{"a": 3}').problems[0][0] == "a"
    assert call(f, '{"a": 4}') == 4


def test_unknown_enum_values_and_literals_are_rejected() -> None:
    def paint(colour: Colour, how: Literal["flat", "gloss"]) -> str:
        return f"{colour} {how}"

    assert [path for path, _ in refusal(paint, '{"colour": "blue", "how": "matt"}').problems] == ["colour", "how"]


def test_null_is_rejected_for_required_values() -> None:
    assert refusal(add, '{"a": null}').problems[0][0] == "a"


# --- unknown keys


def test_unknown_keys_are_ignored() -> None:
    assert call(add, '{"a": 1, "c": 5, "self": 3}') == 1
    assert call(nothing, '{"x": 1}') == "ran"


def test_unknown_keys_of_nested_objects_are_ignored_unless_forbidden() -> None:
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


# --- in a service


async def test_invalid_arguments_raise_by_default_and_the_tool_does_not_run() -> None:
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
