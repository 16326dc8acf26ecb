"""What pydantic finds wrong is told in a text that stays short, whatever a stranger has sent."""

import json
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from toolbox import ToolExecutionRequest, UnknownToolError, tool_executor_from
from toolbox.errors import OutputParsingError, ToolArgumentsError
from toolbox.faults import COUNTED, LONGEST, SHOWN, faults_of
from toolbox.services.outputs import read_output


def found(type_: Any, value: object) -> list[tuple[str, str]]:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(type_).validate_json(json.dumps(value))
    return faults_of(caught.value)


def test_the_first_faults_are_listed_and_the_others_counted() -> None:
    faults = found(list[int], ["a"] * (SHOWN + 7))

    assert len(faults) == SHOWN + 1
    assert faults[0][0] == "0"
    assert faults[-1] == ("", "and 7 more")


def test_of_very_many_faults_only_their_number_is_told() -> None:
    assert found(list[int], ["a"] * (COUNTED + 1)) == [("", f"{COUNTED + 1} values in it are wrong")]


def test_a_path_made_of_what_was_sent_is_cut() -> None:
    [(path, _)] = found(dict[str, int], {"k" * 1_000_000: "a"})

    assert len(path) <= LONGEST + 1


def cut(numbers: list[int]) -> str:
    return ""


def test_a_tool_call_with_very_many_faults_has_a_short_error() -> None:
    with pytest.raises(ToolArgumentsError) as caught:
        tool_executor_from(cut)(ToolExecutionRequest("1", "cut", json.dumps({"numbers": ["a"] * 100_000})), None)

    assert str(caught.value) == "the arguments of tool 'cut' cannot be used: 100000 values in it are wrong"


def test_a_reply_with_very_many_faults_has_a_short_error() -> None:
    structure = read_output(list[int]).structure
    assert structure is not None
    with pytest.raises(OutputParsingError) as caught:
        structure.read(json.dumps(["a"] * 50_000))

    assert caught.value.problems == [("", "50000 values in it are wrong")]


def test_a_made_up_tool_name_is_shown_by_its_beginning() -> None:
    error = UnknownToolError(ToolExecutionRequest("1", "n" * 10_000_000, "{}"), ("sum",))

    assert len(str(error)) < 2 * LONGEST
