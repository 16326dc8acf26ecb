"""Texts of validation errors stay short for any input, and secrets are hidden."""

import base64
import html
import json
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
from pydantic import TypeAdapter, ValidationError

from toolbox import ToolExecutionRequest, UnknownToolError, tool_executor_from
from toolbox.errors import OutputParsingError, ToolArgumentsError
from toolbox.safe_text import COUNTED, LONGEST, SHOWN, faults_of, hide_secrets, without_secrets
from toolbox.services.outputs import read_output


def found(type_: Any, value: object) -> list[tuple[str, str]]:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(type_).validate_json(json.dumps(value))
    return faults_of(caught.value)


def test_the_first_errors_are_listed_and_the_rest_counted() -> None:
    faults = found(list[int], ["a"] * (SHOWN + 7))

    assert len(faults) == SHOWN + 1
    assert faults[0][0] == "0"
    assert faults[-1] == ("", "and 7 more")


def test_only_the_count_of_very_many_errors_is_shown() -> None:
    assert found(list[int], ["a"] * (COUNTED + 1)) == [("", f"{COUNTED + 1} values are invalid")]


def test_long_paths_are_cut() -> None:
    [(path, _)] = found(dict[str, int], {"k" * 1_000_000: "a"})

    assert len(path) <= LONGEST + 1


def cut(numbers: list[int]) -> str:
    return ""


def test_tool_calls_with_very_many_errors_have_a_short_message() -> None:
    with pytest.raises(ToolArgumentsError) as caught:
        tool_executor_from(cut)(ToolExecutionRequest("1", "cut", json.dumps({"numbers": ["a"] * 100_000})), None)

    assert str(caught.value) == "invalid arguments for tool 'cut': 100000 values are invalid"


def test_replies_with_very_many_errors_have_a_short_message() -> None:
    structure = read_output(list[int]).structure
    assert structure is not None
    with pytest.raises(OutputParsingError) as caught:
        structure.read(json.dumps(["a"] * 50_000))

    assert caught.value.problems == [("", "50000 values are invalid")]


def test_long_unknown_tool_names_are_cut() -> None:
    error = UnknownToolError(ToolExecutionRequest("1", "n" * 10_000_000, "{}"), ("sum",))

    assert len(str(error)) < 2 * LONGEST


SECRET = 'sk-Fj3/9+Qz&7 "x\\é-Lm40TtWc'


@pytest.mark.parametrize(
    "written",
    [
        SECRET,
        quote(SECRET),
        quote(SECRET, safe=""),
        quote(SECRET, safe="").lower().replace("fj3", "Fj3").replace("qz", "Qz").replace("lm40ttwc", "Lm40TtWc"),
        quote_plus(SECRET),
        json.dumps(SECRET)[1:-1],
        json.dumps(SECRET, ensure_ascii=False)[1:-1],
        json.dumps(SECRET)[1:-1].replace("/", "\\/").replace("&", "\\u0026"),
        html.escape(SECRET),
        repr(SECRET.encode())[2:-1],
    ],
)
def test_secrets_are_hidden_in_every_encoding(written) -> None:
    assert without_secrets(f"the key <{written}> is wrong", [SECRET]) == "the key <***> is wrong"


@pytest.mark.parametrize("user", ["", "u:", "us:", "use:", "user:"])
@pytest.mark.parametrize("encode", [base64.b64encode, base64.urlsafe_b64encode])
def test_secrets_are_hidden_in_base64(user, encode) -> None:
    written = encode(f"{user}{SECRET}".encode()).decode()

    shown = without_secrets(f"Basic {written}", [SECRET])

    assert "***" in shown
    assert len(shown) < len("Basic ") + 16


@pytest.mark.parametrize("part", [SECRET[:20], SECRET[:8], SECRET[5:20], SECRET[-8:]])
def test_parts_of_a_secret_are_hidden(part) -> None:
    assert without_secrets(f"the key <{part}> is wrong", [SECRET]) == "the key <***> is wrong"


@pytest.mark.parametrize("text", ["the key sk-Fj", "the key sk-Fj… is wrong"])
def test_the_start_of_a_secret_is_hidden_at_the_end_of_a_cut_text(text) -> None:
    assert "sk-Fj" not in without_secrets(text, [SECRET])


def test_secrets_that_contain_another_are_hidden_completely() -> None:
    assert without_secrets("it was abcd-and-more", ["abcd", "abcd-and-more"]) == "it was ***"


def test_ordinary_text_is_not_changed() -> None:
    text = "100% of &amp; \\u00e9 and é, 50%20off; no key"

    assert without_secrets(text, [SECRET, "", "no", "key"]) == text


def test_errors_show_no_secrets_in_arguments_attributes_notes_or_causes() -> None:
    try:
        try:
            raise ValueError(f"got {SECRET[:12]}")
        except ValueError as cause:
            raise RuntimeError(f"failed: {SECRET}", [SECRET]) from cause
    except RuntimeError as raised:
        error = raised
    error.add_note(f"note: {SECRET}")
    error.body = (SECRET,)  # type: ignore[attr-defined]  # as errors of ours have

    hide_secrets(error, [SECRET])

    assert error.args == ("failed: ***", ["***"])
    assert vars(error) == {"__notes__": ["note: ***"], "body": ("***",)}
    assert error.__cause__ is None


def test_errors_that_are_their_own_cause_are_searched_once() -> None:
    error, other = ValueError("contains secret-5f1c9a77"), ValueError("harmless")
    error.__cause__, other.__cause__ = other, error

    hide_secrets(error, ["secret-5f1c9a77"])

    assert error.args == ("contains ***",)
    assert error.__cause__ is other
