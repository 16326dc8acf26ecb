"""Places in a run, and the keys of its records: what is stored must stay readable."""

import importlib
import pkgutil
from typing import get_args

import pytest

import toolbox.services
from toolbox.runs.places import (
    RecordedFact,
    RecordKey,
    calls_around,
    invocation_of,
    is_attempt_of,
    is_within,
    place_below,
    place_of_attempt,
    place_to_undo,
    position_of,
    without_attempt,
)
from toolbox.services.recording_needs import EffectForm


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("0/1.2", RecordKey("0/1.2")),
        ("0#start", RecordKey("0", "start", 1)),
        ("0#start.2", RecordKey("0", "start", 2)),
        ("0.2#outside", RecordKey("0.2", "outside")),
        ("#r0", RecordKey("", "r", 0)),
        ("0/1#r3", RecordKey("0/1", "r", 3)),
        ("#s1", RecordKey("", "s", 1)),
        ("#failed", RecordKey("", "failed")),
        ("0.0", RecordKey(place_to_undo("0"))),
    ],
)
def test_keys_of_records_are_read_as_they_were_written(text: str, key: RecordKey) -> None:
    assert str(key) == text
    assert RecordKey.read(text) == key


def test_the_records_of_each_kind_of_effect_can_be_read_again() -> None:
    """A run could never be continued after a record whose fact is not in `RecordedFact`."""
    modules = [
        importlib.import_module(each.name)
        for each in pkgutil.iter_modules(toolbox.services.__path__, "toolbox.services.")
    ]
    forms = {id(form): form for each in modules for form in vars(each).values() if isinstance(form, EffectForm)}
    facts = sorted(form.fact for form in forms.values())

    assert "summary" in facts
    assert len(facts) == len(set(facts))
    assert set(facts) <= set(get_args(RecordedFact))
    keys = [RecordKey("0/1", fact, number) for fact in get_args(RecordedFact) for number in (1, 12) if fact]
    assert [RecordKey.read(str(each)) for each in keys] == keys


@pytest.mark.parametrize("text", ["0#other", "0#r", "0#rx", "0#start.x", "0#"])
def test_other_keys_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        RecordKey.read(text)


def test_attempts_of_a_call_are_told_from_places_within() -> None:
    assert place_below(place_of_attempt(place_below("", 0), 2), 1) == "0.2/1"
    assert [each for each in ("0", "0.2", "0.2/1", "0/1", "1", "01", "0.0") if is_attempt_of(each, "0")] == ["0", "0.2"]
    assert [each for each in ("0", "0.2", "0.2/1", "0/1", "1", "01", "10") if is_within(each, "0")] == [
        "0",
        "0.2",
        "0.2/1",
        "0/1",
    ]


def test_a_place_is_taken_apart_as_it_was_made() -> None:
    attempt = place_of_attempt(place_below("0.2", 11), 3)

    assert attempt == "0.2/11.3"
    assert (without_attempt(attempt), invocation_of(attempt), position_of(attempt)) == ("0.2/11", "0.2", 11)
    assert (without_attempt("0.2"), invocation_of("0"), position_of("0.2")) == ("0", "", 0)
    assert (calls_around(attempt), calls_around("")) == (["0.2", "0.2/11.3"], [])
