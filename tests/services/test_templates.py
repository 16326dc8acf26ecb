"""Message templates."""

from datetime import date
from decimal import Decimal
from enum import Enum

import pytest
from pydantic import BaseModel

from toolbox.services.templates import doubled_names, parse, text_of


def rendered(text: str, **values: object) -> str:
    template, faults = parse(text)
    assert faults == []
    return template.render(values)


def test_variables_are_replaced_and_doubled_braces_are_kept_as_braces() -> None:
    assert rendered('Hello {name}, answer {{"a": 1}}', name="Ann") == 'Hello Ann, answer {"a": 1}'


def test_values_are_never_parsed_as_templates() -> None:
    assert rendered("{a} {b}", a="{b}", b="{{x}}") == "{b} {{x}}"


def test_templates_without_variables_render_unchanged() -> None:
    assert rendered("") == ""
    assert rendered("plain") == "plain"


@pytest.mark.parametrize("text", ["{", "}", "{a.b}", "{a b}", "{0}", "{a!r}", "{a:>3}", "{}", 'say {"a": 1}'])
def test_errors_of_a_single_brace_show_the_position(text: str) -> None:
    _, faults = parse(text)

    assert faults
    assert faults[0].startswith("a single brace ")
    assert " at " in faults[0]


def test_doubled_braces_around_a_known_variable_are_detected() -> None:
    assert doubled_names("Hello {{name}} and {{ other }} and {{unknown}}", frozenset({"name", "other"})) == [
        "name",
        "other",
    ]


def test_values_between_literal_braces_are_accepted() -> None:
    assert doubled_names("{{{name}}} and {{{{name}}}}", frozenset({"name"})) == []
    assert rendered("{{{name}}} and {{{{name}}}}", name="Ann") == "{Ann} and {{name}}"


class Colour(Enum):
    RED = "red"


class Point(BaseModel):
    x: int
    label: str


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a", "a"),
        (1, "1"),
        (1.5, "1.5"),
        (Decimal("1.10"), "1.10"),
        (Colour.RED, "red"),
        (date(2026, 11, 21), "2026-11-21"),
        (["é", 1], '["é",1]'),
        (Point(x=1, label="ß"), '{"x":1,"label":"ß"}'),
        (None, "null"),
    ],
)
def test_values_are_text_and_structures_compact_json(value: object, text: str) -> None:
    assert text_of(value) == text
