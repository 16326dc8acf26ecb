"""Repairs of invalid arguments: JSON that models write wrongly, JSON text in strings, enum values in another case."""

import json
import time
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, BeforeValidator, Field

from toolbox import (
    ToolArgumentsError,
)

from .calls import add, call, nothing, refusal


@pytest.mark.parametrize("text", ["", " ", "\n\t ", "null", '"null"', "{}", '""', ' "null" '])
def test_empty_arguments_are_accepted_in_every_form(text: str) -> None:
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
def test_common_json_mistakes_are_repaired(text: str) -> None:
    assert call(add, text) == 3


def test_trailing_commas_are_removed_outside_of_strings_only() -> None:
    def f(items: list[int], text: str) -> list[Any]:
        return [items, text]

    assert call(f, '{"items": [1, 2, ], "text": "a,}",}') == [[1, 2], "a,}"]


class Square(BaseModel):
    kind: Literal["square"]
    sizes: list[int]


class Label(BaseModel):
    kind: Literal["label", "title"]
    sizes: str


def test_the_kind_of_a_member_of_a_union_decides_what_json_text_becomes() -> None:
    def draw(shape: Square | Label) -> Any:
        return shape.sizes

    for kind, sizes in [("square", [1]), ("label", "[1]"), ("title", "[1]")]:
        assert call(draw, json.dumps({"shape": {"kind": kind, "sizes": "[1]"}})) == sizes


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
def test_raw_control_characters_in_strings_are_accepted(text: str) -> None:
    assert given(str, text).replace("\r", "") in ("one\ntwo", "one\ttwo\x00\x1f")


def test_control_characters_outside_of_strings_are_rejected() -> None:
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
def test_json_text_is_parsed_where_the_schema_requires_an_object_or_list(
    annotation: Any, value: Any, taken: Any
) -> None:
    if taken is None:
        taken = Part(number=1, inner=Part(number=2, inner=Part(number=3)))
    assert given(annotation, {"a": value}) == taken


@pytest.mark.parametrize("annotation", [str, str | None, str | list[int], Any, list[int] | str, Part | str])
@pytest.mark.parametrize("text", ["[1]", '{"number": 1}'])
def test_json_text_stays_text_where_a_string_is_allowed(annotation: Any, text: str) -> None:
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
def test_other_text_is_not_parsed_as_an_object_or_list(annotation: Any, value: Any) -> None:
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
def test_enum_values_in_another_case_are_accepted(annotation: Any, value: Any, taken: Any) -> None:
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
def test_unknown_and_ambiguous_enum_values_are_rejected(annotation: Any, value: Any) -> None:
    with pytest.raises(ToolArgumentsError):
        given(annotation, {"a": value})


def test_repairs_do_not_change_other_arguments() -> None:
    def f(
        numbers: list[int], words: Annotated[list[str], BeforeValidator(lambda text: [text])], amount: Decimal
    ) -> Any:
        return numbers, words, amount

    assert call(f, '{"numbers": "[1]", "words": "[2]", "amount": 1.10}') == ([1], ["[2]"], Decimal("1.10"))


def test_many_invalid_strings_are_repaired_in_linear_time() -> None:
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
def test_other_mistakes_are_rejected(text: str) -> None:
    refusal(add, text)
