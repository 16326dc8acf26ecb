"""Parsing of replies into the declared type."""

import json
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
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
    return structure.read(text).value


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
def test_replies_are_parsed_with_and_without_the_wrapper(type_: Any, text: str, value: object) -> None:
    assert read(type_, text) == value


class Part(BaseModel):
    name: str
    sizes: list[int] = []
    more: dict[str, Decimal] | None = None
    text: str = ""
    anything: Any = None
    either: str | list[str] = ""


class Tagged(BaseModel):
    tags: list[str]


class Plain(BaseModel):
    tags: str


def quoted(value: Any) -> str:
    return json.dumps(value if isinstance(value, str) else json.dumps(value))


@pytest.mark.parametrize(
    ("type_", "text", "value"),
    [
        (list[int], f'{{"value": {quoted([1, 2])}}}', [1, 2]),
        (list[int], quoted([1, 2]), [1, 2]),
        (list[int], quoted({"value": [1, 2]}), [1, 2]),
        (list[int], quoted({"value": quoted([1])}), [1]),
        (list[int], f"```json\n{quoted([1, 2])}\n```", [1, 2]),
        (list[int], f'{{"value": {quoted("[1, 2, ]")}}}', [1, 2]),
        (tuple[int, str], f'{{"value": {quoted([1, "a"])}}}', (1, "a")),
        (dict[str, list[int]], f'{{"a": {quoted([1])}}}', {"a": [1]}),
        (list[int] | int, f'{{"value": {quoted([1])}}}', [1]),
        (City, quoted({"name": "Bern", "people": 3}), City(name="Bern", people=3)),
        (list[Part], f'{{"value": [{quoted({"name": "a"})}]}}', [Part(name="a")]),
        (Part, f'{{"name": "a", "sizes": {quoted([1])}}}', Part(name="a", sizes=[1])),
        (Part, '{"name": "a", "more": "{\\"x\\": 1.50}"}', Part(name="a", more={"x": Decimal("1.50")})),
        (Part, '{"name": "[1]", "text": "[1]"}', Part(name="[1]", text="[1]")),
        (Part, '{"name": "a", "anything": "[1]", "either": "[1]"}', Part(name="a", anything="[1]", either="[1]")),
        (Tagged | Plain, f'{{"kind": "Tagged", "tags": {quoted(["a"])}}}', Tagged(tags=["a"])),
        (Tagged | Plain, f'{{"kind": "plain", "tags": {quoted(["a"])}}}', Plain(tags='["a"]')),
        (Tagged | Plain, quoted({"value": {"kind": "Tagged", "tags": ["a"]}}), Tagged(tags=["a"])),
        (list[Tagged | Plain], f'{{"value": {quoted([{"kind": "Tagged", "tags": ["a"]}])}}}', [Tagged(tags=["a"])]),
    ],
)
def test_a_list_or_an_object_as_json_text_is_read_where_the_type_wants_one(type_: Any, text: str, value: Any) -> None:
    assert read(type_, text) == value


@pytest.mark.parametrize(
    ("type_", "text"),
    [
        (list[int], quoted("[1, 2")),
        (list[int], quoted("no list")),
        (list[int], quoted({"a": 1})),
        (City, quoted('{"name": "a", "name": "b", "people": 3}')),
    ],
)
def test_other_json_text_in_place_of_a_list_is_invalid(type_: Any, text: str) -> None:
    with pytest.raises(OutputParsingError):
        read(type_, text)


def test_json_text_is_not_read_in_streams_of_items() -> None:
    structure = read_output(AsyncIterator[Part]).structure
    assert structure is not None
    assert structure.item_type is not None
    reader, text = ItemReader(structure.item_type), f'[{{"name": "a", "sizes": {quoted([1])}}}]'

    with pytest.raises(OutputParsingError):
        list(reader.feed(text))
    with pytest.raises(OutputParsingError):  # what guardrails judge is the same
        structure.read(text)


BERN = '{"name": "Bern", "people": 3}'


@pytest.mark.parametrize(
    ("type_", "text", "value"),
    [
        (City, f"Here you are: {BERN}", City(name="Bern", people=3)),
        (City, f"{BERN}\n\nAnything else?", City(name="Bern", people=3)),
        (City, f"```json\n{BERN}", City(name="Bern", people=3)),
        (City, f"Sure:\n```json\n{BERN}\nHope it helps.", City(name="Bern", people=3)),
        (City, f"<answer>{BERN}</answer>", City(name="Bern", people=3)),
        (City, f"In the set {{Bern, Basel}} [see note] I chose {BERN} [1].", City(name="Bern", people=3)),
        (City, f'He said "{{" and "[": {BERN}', City(name="Bern", people=3)),
        (City, 'So: {"name": "B} {\\"x\\": 1}", "people": 3}.', City(name='B} {"x": 1}', people=3)),
        (City, 'So: {"name": "```json```", "people": 3}.', City(name="```json```", people=3)),
        (City, f'The input was {{"x": 1}}.\n```json\n{BERN}\n```', City(name="Bern", people=3)),
        (list[City], f"Here: [{BERN}]", [City(name="Bern", people=3)]),
        (list[City], f'Here: {{"value": [{BERN}]}}', [City(name="Bern", people=3)]),
        (list[int], "The numbers are [1, 2].", [1, 2]),
        (int, 'The answer is {"value": 12345678901234567890123}.', 12345678901234567890123),
        (int, "```\n42", 42),
        (bool, 'Yes: {"value": true}', True),
        (Mood, 'I feel {"value": "good"} today.', Mood.GOOD),
        (date, 'It was {"value": "2026-11-21"} [3]', date(2026, 11, 21)),
        (City | Pair, 'A pair: {"left": 1, "right": 2}', Pair(1, 2)),
    ],
)
def test_a_single_json_value_is_parsed_from_surrounding_text(type_: Any, text: str, value: object) -> None:
    assert read(type_, text) == value


@pytest.mark.parametrize(
    ("type_", "text"),
    [
        (City, f"{BERN} or {BERN}"),
        (City, f'{{"name": "Bern", "people": "x"}} no: {BERN}'),
        (City, f"```json\n{BERN}\n```\nor\n```json\n{BERN}\n```"),
        (list[int], "[1] The numbers are [1, 2]."),
        (int, '{"value": 1} {"value": 2}'),
    ],
)
def test_several_json_values_are_rejected(type_: Any, text: str) -> None:
    with pytest.raises(OutputParsingError) as caught:
        read(type_, text)

    assert caught.value.problems == [("", "expected one JSON value, got 2")]


@dataclass
class Loose:
    name: str = ""
    inner: Any = None


@pytest.mark.parametrize(
    "text",
    [
        'Cut: {"name": "a", "inner": {"name": "b"}',
        'Cut: [{"name": "a"}, {"name": "b"',
        'Wrong: {"inner": {"name": "b"},}',
        'Wrong: {"inner": {"name": "b"}, name: 1}',
        'A list: [{"name": "a"}]',
        '```json\n{"name": "a", "inner": {"name": "b"}',
        "{'name': 'a'}",
    ],
)
def test_parts_of_a_json_value_are_not_parsed(text: str) -> None:
    with pytest.raises(OutputParsingError):
        read(Loose, text)


def test_errors_of_a_value_in_prose_name_the_fields_of_the_value() -> None:
    with pytest.raises(OutputParsingError) as caught:
        read(City, 'Here: {"name": "Bern", "people": "many"}')

    assert [path for path, _ in caught.value.problems] == ["people"]


@pytest.mark.parametrize(
    "text",
    [
        "{" * 200_000,
        "[" * 200_000,
        "[1," * 100_000,
        '{"a":' * 200_000,
        '{"' * 100_000,
        '["' * 100_000,
        '["' + "x" * 1_000_000,
        "{ " * 100_000,
        '{"a' * 300_000,
        "{}" * 100_000,
        "```" * 300_000,
        "```json\n" * 100_000,
        '{"' + "x" * 1_000_000,
        "{" + " " * 1_000_000,
    ],
    ids=lambda text: text[:8],
)
def test_hostile_replies_are_rejected_in_linear_time(text: str) -> None:
    began = time.process_time()

    with pytest.raises(OutputParsingError):
        read(City, text)
    with pytest.raises(OutputParsingError):
        items(City, "so: " + text, 10_000)

    assert time.process_time() - began < 5


@pytest.mark.parametrize("text", ["", "no idea", '{"name": "Bern"}', '{"name": "Bern", "people": "many"}', "[1"])
def test_validation_errors_name_the_path(text: str) -> None:
    with pytest.raises(OutputParsingError) as caught:
        read(City, text)

    assert caught.value.text == text
    assert caught.value.problems


def test_types_other_than_objects_are_requested_in_a_wrapper() -> None:
    structure = read_output(list[City]).structure

    assert structure is not None
    assert structure.schema["type"] == "object"
    assert structure.schema["required"] == ["value"]
    assert structure.schema["properties"]["value"]["items"]["required"] == ["name", "people"]


def test_output_schemas_are_as_short_as_tool_schemas() -> None:
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
def test_return_annotations_determine_shape_and_kind(annotation: object, output: Output) -> None:
    assert read_output(annotation) == output


def test_synchronous_streams_of_other_types_than_text_are_rejected() -> None:
    with pytest.raises(TypeError, match="Iterator"):
        read_output(Iterator[City])


def items(type_: Any, text: str, size: int) -> list[Any]:
    structure = read_output(AsyncIterator[type_]).structure
    assert structure is not None
    assert structure.item_type is not None
    reader = ItemReader(structure.item_type, structure.item_beginnings)
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
        ('Here is the list: [{"name": "B", "people": 1}]', [("B", 1)]),
        ('Here [1] is {"value": [ {"name": "B", "people": 1}]} [2]', [("B", 1)]),
        ('See [below]:\n```json\n[{"name": "B", "people": 1}]', [("B", 1)]),
        ("There are none: [ ]", []),
        ('Sure, here you go: {"value": [{"name": "B", "people": 1}]}', [("B", 1)]),
        ('Here you are, [{"name": "B", "people": 1}]', [("B", 1)]),
        (' [ {"name": "B", "people": 1} , ] ', [("B", 1)]),
    ],
)
def test_items_are_parsed_as_soon_as_they_are_complete(size: int, text: str, found: list[tuple[str, int]]) -> None:
    assert items(City, text, size) == [City(name=name, people=people) for name, people in found]


def test_scalar_items_end_at_the_comma() -> None:
    structure = read_output(AsyncIterator[int]).structure
    assert structure is not None
    assert structure.item_type is not None
    reader = ItemReader(structure.item_type)

    assert list(reader.feed("[1, 23")) == [1]
    assert list(reader.feed("4,")) == [234]
    assert list(reader.feed(" 5 ] and more")) == [5]
    reader.finish()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "none",
        '[{"name": "B", "people": 1}',
        '{"value": ',
        'Here: {"other": [{"name": "B", "people": 1}]}',
        'Here: [[{"name": "B", "people": 1}]]',
        'Here: {"x": {"value": [{"name": "B", "people": 1}]}}',
        "none [",
        'Here: [{"x": 1}, {"value": [{"name": "B", "people": 1}]}]',
    ],
)
def test_incomplete_lists_are_rejected(text: str) -> None:
    with pytest.raises(OutputParsingError):
        items(City, text, 5)


def test_invalid_items_are_rejected_at_their_position() -> None:
    with pytest.raises(OutputParsingError) as caught:
        items(City, '[{"name": "B", "people": "x"}]', 4)

    assert caught.value.problems[0][0] == "people"


@pytest.mark.parametrize(
    ("text", "size", "count"),
    [
        ('["' + "x" * 500_000 + '"]', 1, 1),
        ("[" + '"x",' * 100_000 + '"x"]', 10_000_000, 100_001),
        ("see [1] " * 100_000 + '```json\n["x"]\n```', 8, 1),
        (" " * 500_000 + '["x"]', 1, 1),
        ('["' + '\\"' * 200_000 + '"]', 1, 1),
    ],
    ids=["a long item", "many items at once", "brackets in a text before it", "blanks before it", "escapes"],
)
def test_items_are_parsed_in_linear_time(text: str, size: int, count: int) -> None:
    """With quadratic cost, each case would take minutes."""
    assert len(items(str | int, text, size)) == count


# --- lists without JSON


@pytest.mark.parametrize(
    ("type_", "text", "value"),
    [
        (list[str], "- red wine\n- bread", ["red wine", "bread"]),
        (list[str], "* a\n\n* b", ["a", "b"]),
        (list[str], "1. a\n2) b\n10. c", ["a", "b", "c"]),
        (list[str], "• a\n• b", ["a", "b"]),
        (list[str], "a\nb", ["a", "b"]),
        (list[str], "Here they are:\n- a\n- b\nAnything else?", ["a", "b"]),
        (list[str], "- only one", ["only one"]),
        (list[int], "1\n2", [1, 2]),
        (list[int], "- 7", [7]),
        (list[Mood], "- GOOD\n- bad", [Mood.GOOD, Mood.BAD]),
        (list[Mood], "good\nbad", [Mood.GOOD, Mood.BAD]),
        (set[Literal["a", "b"]], "a\nb", {"a", "b"}),
        (tuple[str, ...], "- a\n- b", ("a", "b")),
        (Mood, "[GOOD]", Mood.GOOD),
        (Mood, "['bad']", Mood.BAD),
    ],
)
def test_lists_in_lines_and_enums_in_brackets_are_read(type_: Any, text: str, value: Any) -> None:
    assert read(type_, text) == value


@pytest.mark.parametrize(
    ("type_", "text"),
    [
        (list[str], "I do not know."),
        (list[str], '["a", "b"'),
        (list[str], "- a\nand then\n- b"),
        (list[int], "- one\n- two"),
        (list[Mood], "- good\n- mediocre"),
        (list[City], "- Bern\n- Bonn"),
        (str | int, "- a\n- b\n- ["),
        (Mood, "[GOOD, BAD]"),
        (City, "- Bern"),
    ],
)
def test_other_texts_are_not_read_as_lists(type_: Any, text: str) -> None:
    if type_ == str | int:
        assert read(type_, text) == text
        return
    with pytest.raises(OutputParsingError):
        read(type_, text)


def test_a_list_in_lines_that_was_cut_off_is_not_read() -> None:
    structure = read_output(list[str]).structure
    assert structure is not None
    with pytest.raises(OutputParsingError):
        structure.read("- a\n- b", complete=False)
