"""Replies read into the declared type."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import date
from enum import Enum
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from toolbox import OutputParsingError
from toolbox.services.outputs import ItemReader, Kind, Output, Result, Shape, TokenStream, read_output


class City(BaseModel):
    name: str
    people: int


class Mood(Enum):
    GOOD = "good"
    BAD = "bad"


@dataclass
class Pair:
    left: int
    right: int


def read(type_: Any, text: str) -> Any:
    structure = read_output(type_).structure
    assert structure is not None
    return structure.read(text)


@pytest.mark.parametrize(
    ("type_", "text", "value"),
    [
        (City, '{"name": "Bern", "people": 3}', City(name="Bern", people=3)),
        (City, '```json\n{"name": "Bern", "people": 3}\n```', City(name="Bern", people=3)),
        (City, 'Here you are:\n```\n{"name": "Bern", "people": 3}\n```\nBye.', City(name="Bern", people=3)),
        (Pair, '{"left": 1, "right": 2}', Pair(1, 2)),
        (int, '{"value": 3}', 3),
        (int, "3", 3),
        (int, '{"value": 12345678901234567890123}', 12345678901234567890123),
        (float, "2.5", 2.5),
        (bool, "true", True),
        (bool, '{"value": false}', False),
        (Mood, '{"value": "good"}', Mood.GOOD),
        (Mood, '"bad"', Mood.BAD),
        (Mood, "good", Mood.GOOD),
        (Mood, "GOOD", Mood.GOOD),
        (Literal["a", "b"], "b", "b"),
        (date, "2026-11-21", date(2026, 11, 21)),
        (date, '{"value": "2026-11-21"}', date(2026, 11, 21)),
        (list[City], '{"value": [{"name": "Bern", "people": 3}]}', [City(name="Bern", people=3)]),
        (list[City], '[{"name": "Bern", "people": 3}]', [City(name="Bern", people=3)]),
        (int | None, "null", None),
        (City | Pair, '{"left": 1, "right": 2}', Pair(1, 2)),
        (dict[str, int], '{"value": 3}', {"value": 3}),
    ],
)
def test_a_reply_is_read_with_and_without_its_wrapper(type_: Any, text: str, value: object) -> None:
    assert read(type_, text) == value


@pytest.mark.parametrize("text", ["", "no idea", '{"name": "Bern"}', '{"name": "Bern", "people": "many"}', "[1"])
def test_a_reply_that_does_not_validate_tells_where(text: str) -> None:
    with pytest.raises(OutputParsingError) as caught:
        read(City, text)

    assert caught.value.text == text
    assert caught.value.problems


def test_a_type_that_is_no_object_is_asked_for_in_a_wrapper() -> None:
    structure = read_output(list[City]).structure

    assert structure is not None
    assert structure.schema["type"] == "object"
    assert structure.schema["required"] == ["value"]
    assert structure.schema["properties"]["value"]["items"]["required"] == ["name", "people"]


def test_a_reply_s_schema_is_as_short_as_a_tool_s() -> None:
    structure = read_output(City).structure

    assert structure is not None
    assert "title" not in structure.instructions
    assert "$defs" not in structure.schema


@pytest.mark.parametrize(
    ("annotation", "output"),
    [
        (str, Output(Shape.VALUE, Kind.TEXT, str)),
        (None, Output(Shape.VALUE, Kind.NOTHING, None)),
        (Result[str], Output(Shape.RESULT, Kind.TEXT, str)),
        (Result[None], Output(Shape.RESULT, Kind.NOTHING, type(None))),
        (AsyncIterator[str], Output(Shape.TEXT_STREAM, Kind.TEXT, str)),
        (Iterator[str], Output(Shape.TEXT_STREAM, Kind.TEXT, str, synchronous=True)),
        (AsyncIterator[City], Output(Shape.ITEM_STREAM, Kind.STRUCTURED, City)),
        (TokenStream, Output(Shape.EVENT_STREAM, Kind.TEXT, str)),
        (City, Output(Shape.VALUE, Kind.STRUCTURED, City)),
    ],
)
def test_a_return_annotation_tells_shape_and_kind(annotation: object, output: Output) -> None:
    assert read_output(annotation) == output


def test_a_synchronous_stream_of_anything_but_text_is_refused() -> None:
    with pytest.raises(TypeError, match="Iterator"):
        read_output(Iterator[City])


def items(type_: Any, text: str, size: int) -> list[Any]:
    structure = read_output(AsyncIterator[type_]).structure
    assert structure is not None
    assert structure.item_adapter is not None
    reader = ItemReader(structure.item_adapter)
    found: list[Any] = []
    for start in range(0, len(text), size):
        found += reader.feed(text[start : start + size])
    reader.finish()
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('[{"name": "B, [x]\\"}", "people": 1}, {"name": "C", "people": 2}]', [('B, [x]"}', 1), ("C", 2)]),
        ('{"value": [{"name": "B", "people": 1}]}', [("B", 1)]),
        ('```json\n[{"name": "B", "people": 1}]\n```', [("B", 1)]),
        ("[]", []),
        (' [ {"name": "B", "people": 1} , ] ', [("B", 1)]),
    ],
)
def test_items_come_as_soon_as_they_are_complete(size: int, text: str, found: list[tuple[str, int]]) -> None:
    assert items(City, text, size) == [City(name=name, people=people) for name, people in found]


def test_scalar_items_end_at_their_comma() -> None:
    structure = read_output(AsyncIterator[int]).structure
    assert structure is not None
    assert structure.item_adapter is not None
    reader = ItemReader(structure.item_adapter)

    assert list(reader.feed("[1, 23")) == [1]
    assert list(reader.feed("4,")) == [234]
    assert list(reader.feed(" 5 ] and more")) == [5]
    reader.finish()


@pytest.mark.parametrize("text", ["", "none", '[{"name": "B", "people": 1}', '{"value": '])
def test_a_list_that_does_not_end_is_an_error(text: str) -> None:
    with pytest.raises(OutputParsingError):
        items(City, text, 5)


def test_a_bad_item_is_an_error_where_it_stands() -> None:
    with pytest.raises(OutputParsingError) as caught:
        items(City, '[{"name": "B", "people": "x"}]', 4)

    assert caught.value.problems[0][0] == "people"


@pytest.mark.parametrize(
    ("text", "size", "count"),
    [
        ('["' + "x" * 1_000_000 + '"]', 1, 1),
        ("[" + '"x",' * 200_000 + '"x"]', 10_000_000, 200_001),
        ("see [1] " * 100_000 + '```json\n["x"]\n```', 8, 1),
        (" " * 1_000_000 + '["x"]', 1, 1),
        ('["' + '\\"' * 500_000 + '"]', 1, 1),
    ],
    ids=["a long item", "many items at once", "brackets in a text before it", "blanks before it", "escapes"],
)
def test_reading_items_costs_what_their_length_does(text: str, size: int, count: int) -> None:
    """With a cost that grows as the square, each of them would take minutes."""
    assert len(items(str | int, text, size)) == count
