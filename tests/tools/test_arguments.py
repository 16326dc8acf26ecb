"""The arguments a model writes: what is accepted, what is repaired, what is refused and how."""

import json
import time
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal, Protocol

import pytest
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

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


# --- strings that are not what the schema wants


class Paint(Enum):
    RED = "red"
    GREEN = "Green"


class Part(BaseModel):
    number: int
    colours: list[Paint] = []
    inner: "Part | None" = None


@dataclass
class Size:
    width: int


class Cat(BaseModel):
    kind: Literal["cat"]


class Dog(BaseModel):
    kind: Literal["dog"]


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]


def given(annotation: Any, value: Any) -> Any:
    def f(a: Any) -> Any:
        return a

    f.__annotations__["a"] = annotation
    return call(f, value if isinstance(value, str) else json.dumps(value))


@pytest.mark.parametrize(
    "text",
    [
        '{"a": "one\ntwo"}',
        '{"a": "one\r\ntwo"}',
        '{"a": "one\ttwo\x00\x1f"}',
        '{"a": "one\ntwo",}',
        '{}{"a": "one\ntwo"}',
        '{"a": "one\ntwo"}{"a": "one\ntwo"}',
        '"{\\"a\\": \\"one\ntwo\\"}"',
        '"{\\"a\\": \\"one\\ntwo\\"}"',
    ],
)
def test_raw_control_characters_inside_strings_are_read_as_they_are(text: str) -> None:
    assert given(str, text).replace("\r", "") in ("one\ntwo", "one\ttwo\x00\x1f")


def test_control_characters_outside_of_strings_are_still_refused() -> None:
    for text in ('{"a": 1\x00}', '\x0c{"a": 1}', '{"a": tr\nue}'):
        refusal(add, text)


@pytest.mark.parametrize(
    ("annotation", "value", "taken"),
    [
        (list[int], "[1, 2]", [1, 2]),
        (list[int] | None, " [1, 2,] ", [1, 2]),
        (tuple[int, Paint], '[1, "RED"]', (1, Paint.RED)),
        (set[int], "[1, 1]", {1}),
        (dict[str, int], '{"x": "1"}', {"x": 1}),
        (Part, '{"number": 1}', Part(number=1)),
        (Part | None, '{"number": "1"}', Part(number=1)),
        (Part | list[int], "[1]", [1]),
        (Part | list[int], '{"number": 1}', Part(number=1)),
        (Size, '{"width": 1}', Size(1)),
        (list[Part], ['{"number": 1}'], [Part(number=1)]),
        (dict[str, list[str]], {"x": '["y\\nz", 1]'}, {"x": ["y\nz", "1"]}),
        (list[str], '["a\nb"]', ["a\nb"]),
        (list[Decimal], "[1.10]", [Decimal("1.10")]),
        (Part, {"number": 1, "inner": '{"number": 2, "inner": "{\\"number\\": 3}"}'}, None),
        (list[Pet], '[{"kind": "DOG"}]', [Dog(kind="dog")]),
    ],
)
def test_an_object_or_list_as_json_text_is_read_where_the_schema_wants_one(
    annotation: Any, value: Any, taken: Any
) -> None:
    if taken is None:
        taken = Part(number=1, inner=Part(number=2, inner=Part(number=3)))
    assert given(annotation, {"a": value}) == taken


@pytest.mark.parametrize("annotation", [str, str | None, str | list[int], Any, list[int] | str, Part | str])
@pytest.mark.parametrize("text", ["[1]", '{"number": 1}'])
def test_json_text_stays_text_where_a_text_is_allowed(annotation: Any, text: str) -> None:
    assert given(annotation, {"a": text}) == text


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (Annotated[str, Field(max_length=2)] | list[int], "[1, 2]"),
        (list[int], "[1"),
        (list[int], '{"a": 1}'),
        (Part, "[1]"),
        (list[int], '"[1]"'),
        (list[int], "1, 2"),
        (list[int], 1),
        (int, "[1]"),
        (list[int], "[" * 100_000),
    ],
)
def test_no_other_text_is_read_as_an_object_or_list(annotation: Any, value: Any) -> None:
    with pytest.raises(ToolArgumentsError):
        given(annotation, {"a": value})


@pytest.mark.parametrize(
    ("annotation", "value", "taken"),
    [
        (Paint, "RED", Paint.RED),
        (Paint | None, "green", Paint.GREEN),
        (Paint | int, "Red", Paint.RED),
        (Literal["low", "High"], "HIGH", "High"),
        (Literal["low"], "Low", "low"),
        (list[Paint], ["RED", "Green", "red"], [Paint.RED, Paint.GREEN, Paint.RED]),
        (dict[Paint, int], {"RED": 1, "green": 2}, {Paint.RED: 1, Paint.GREEN: 2}),
        (dict[str, Paint], {"RED": "RED"}, {"RED": Paint.RED}),
        (Part, {"number": 1, "colours": ["GREEN"]}, Part(number=1, colours=[Paint.GREEN])),
        (Pet, {"kind": "Cat"}, Cat(kind="cat")),
        (Cat | Dog, {"kind": "DOG"}, Dog(kind="dog")),
    ],
)
def test_an_enum_value_in_another_case_is_taken(annotation: Any, value: Any, taken: Any) -> None:
    assert given(annotation, {"a": value}) == taken


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (Literal["low", "LOW"], "Low"),
        (Paint, " red"),
        (Paint, "reds"),
        (list[Paint], "red"),
        (dict[Paint, int], {"RED": 1, "Red": 2}),
        (dict[Paint, int], {"red": 1, "Red": 2}),
    ],
)
def test_an_enum_value_that_fits_no_or_several_values_is_refused(annotation: Any, value: Any) -> None:
    with pytest.raises(ToolArgumentsError):
        given(annotation, {"a": value})


def test_a_repair_leaves_other_arguments_as_they_are() -> None:
    def f(
        numbers: list[int], words: Annotated[list[str], BeforeValidator(lambda text: [text])], amount: Decimal
    ) -> Any:
        return numbers, words, amount

    assert call(f, '{"numbers": "[1]", "words": "[2]", "amount": 1.10}') == ([1], ["[2]"], Decimal("1.10"))


def test_many_wrong_strings_are_read_in_linear_time() -> None:
    began = time.process_time()

    assert len(given(dict[str, list[Paint]], {"a": {str(number): ["RED"] for number in range(9_000)}})) == 9_000
    with pytest.raises(ToolArgumentsError):
        given(dict[Paint, int], {"a": {f"Red{number}": 1 for number in range(20_000)}})

    assert time.process_time() - began < 5


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
