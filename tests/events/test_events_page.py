"""The table of `docs/events.md` has a row for each event, which names its fields."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from toolbox import events
from toolbox.events import InvocationEvent

PAGE = Path(__file__).parents[2] / "docs" / "events.md"
ROWS = dict(re.findall(r"^\| `(\w+Event)` \|(.*)\|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
EVENTS = {name: getattr(events, name) for name in events.__all__ if name.endswith("Event")}
# Fields that the page describes once for all events, or in the text of the row.
ELSEWHERE = {field.name for field in fields(InvocationEvent)}


def test_each_event_has_a_row() -> None:
    assert ROWS.keys() == EVENTS.keys() - {"InvocationEvent"}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_names_the_fields_of_its_event(name: str) -> None:
    of_the_event = {field.name for field in fields(EVENTS[name])} - ELSEWHERE

    assert [field for field in sorted(of_the_event) if f"`{field}`" not in ROWS[name]] == []
