"""Reading the argument texts of real models."""

import json

import pytest

from toolbox.json_text import compact_json, object_text, parse_json, read_arguments, strict_arguments


@pytest.mark.parametrize("text", ["", "  \n", "null", " null ", '"null"', '""', '"{}"', "{}"])
def test_empty_argument_texts_are_read_as_no_arguments(text: str) -> None:
    assert read_arguments(text) == {}
    assert strict_arguments(text) == {}
    assert json.loads(object_text(text)) == {}


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1}',
        '"{\\"a\\": 1}"',
        '{}{"a": 1}',
        '{} {"a": 1}',
        '{"a": 1}{"a": 1}',
        '{"a": 1}\n{"a":1}',
        '{}{"a": 1}{"a": 1}',
        '{"a": 1,}',
    ],
)
def test_common_mistakes_in_argument_texts_are_repaired(text: str) -> None:
    assert read_arguments(text) == {"a": 1}
    assert json.loads(object_text(text)) == {"a": 1}


def test_a_trailing_comma_inside_a_string_stays() -> None:
    assert read_arguments('{"a": "x,}", "b": [1, 2,],}') == {"a": "x,}", "b": [1, 2]}


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1',
        "{'a': 1}",
        "a=1",
        "[1]",
        "1",
        "true",
        '{"a": NaN}',
        '{"a": 1}{"a": 2}',
        '{"a": 1}{}',
        '{"a": 1} and more',
        '"\\"{}\\""',
        '{"a": 1}' * 3,
        "{a: 1}",
        '```json\n{"a": 1}\n```',
        "[" * 100_000,
        '{"a":' * 100_000,
        '"abc',
        "\ud800",
    ],
)
def test_other_invalid_argument_texts_are_rejected(text: str) -> None:
    with pytest.raises(ValueError):
        read_arguments(text)
    assert strict_arguments(text) is None
    assert object_text(text) == "{}"


@pytest.mark.parametrize("text", ['{}{"a": 1}', '{"a": 1,}', '{"a": 1}{"a": 1}'])
def test_argument_texts_that_need_repair_are_not_strict(text: str) -> None:
    assert strict_arguments(text) is None


def test_deeply_nested_arguments_are_read_or_rejected() -> None:
    text = '{"a":' + "[" * 500 + "]" * 500 + "}"

    assert object_text(text) == text


def test_surrogates_do_not_break_reading_or_writing() -> None:
    value = read_arguments('{"a": "\\ud83d"}')

    assert parse_json(compact_json(value)) == value
    assert compact_json({"a": "é😀"}) == '{"a":"é😀"}'
