"""Arguments that are hard: exact numbers, deep and long texts, what a type's own validators raise."""

from __future__ import annotations

import time
from decimal import Decimal
from typing import Annotated, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from toolbox import FrameworkError, ToolAbort, ToolArgumentsError, ToolExecutionRequest, ToolRetry
from toolbox.tools.standalone import tool_executor_from


def taken(function: Any, arguments: str) -> Any:
    """What `function`, which returns what it was given, is given."""
    return tool_executor_from(function)(ToolExecutionRequest("1", "give", arguments), None).result_object


def refused(function: Any, arguments: str) -> ToolArgumentsError:
    with pytest.raises(ToolArgumentsError) as raised:
        taken(function, arguments)
    return raised.value


class Line(BaseModel):
    """A strict model takes dates and the like from JSON only."""

    model_config = ConfigDict(strict=True)
    price: Decimal
    name: str
    share: float = 0.5


def price(value: Decimal) -> Decimal:
    return value


def mixed(value: Decimal, share: float, anything: Any, name: str) -> tuple[object, ...]:
    return value, share, anything, name


def lines(value: list[Line]) -> list[Line]:
    return value


def anything(value: Any) -> Any:
    return value


@pytest.mark.parametrize(
    "number",
    [
        "1.10",
        "0.1",
        "1234567890.123456789",
        "123456789012345678901234567890.5",
        "1e400",
        "-0.0",
        "5.0",
        "1E+2",
        "7",
        '"1.10"',
    ],
)
def test_decimals_are_taken_from_the_text(number: str) -> None:
    assert str(taken(price, f'{{"value": {number}}}')) == str(Decimal(number.strip('"')))


def test_decimals_beside_other_numbers() -> None:
    text = '{"value": 3.1400000000000000001, "share": 0.30000000000000000001, "anything": [1.5], "name": 1.10}'

    value, share, other, name = taken(mixed, text)

    assert (str(value), share, other, name) == ("3.1400000000000000001", 0.3, [1.5], "1.10")
    assert type(share) is float


def test_decimals_in_strict_models() -> None:
    [line] = taken(lines, '{"value": [{"price": 1.10, "name": "a", "share": 1.25}]}')

    assert (str(line.price), line.share) == ("1.10", 1.25)


@given(st.decimals(allow_nan=False, allow_infinity=False))
@settings(deadline=None, max_examples=200)
def test_any_decimal_is_exact(number: Decimal) -> None:
    # a JSON number needs a digit before the exponent's sign, and has no leading zeros: Decimal writes such
    assert taken(price, f'{{"value": {number}}}') == number


@given(st.integers())
@settings(deadline=None, max_examples=100)
def test_any_integer_is_exact_also_as_a_text(number: int) -> None:
    def give(value: int, text: str) -> tuple[int, str]:
        return value, text

    assert taken(give, f'{{"value": {number}, "text": {number}}}') == (number, str(number))


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity", "[NaN]", '{"a": Infinity}'])
def test_what_json_does_not_know_is_refused_anywhere(constant: str) -> None:
    refused(anything, f'{{"value": {constant}}}')


def test_texts_may_speak_of_such_constants() -> None:
    assert taken(anything, '{"value": "NaN and Infinity"}') == "NaN and Infinity"


@pytest.mark.parametrize("number", ['"nan"', '"inf"', "1e999"])
def test_no_float_is_infinite(number: str) -> None:
    def give(value: float) -> float:
        return value

    refused(give, f'{{"value": {number}}}')


@pytest.mark.parametrize("depth", [150, 10_000, 100_000])
@pytest.mark.parametrize(("opened", "closed"), [("[", "]"), ('{"a":', "}")])
@pytest.mark.parametrize("whole", [True, False])
def test_any_depth_is_a_value_or_a_typed_error(depth: int, opened: str, closed: str, whole: bool) -> None:
    text = f'{{"value":{opened * depth}{"1" if whole else ""}{closed * depth if whole else ""}}}'
    if depth == 150 and whole:
        assert taken(anything, text) is not None
    else:
        refused(anything, text)


def test_ten_megabytes_are_taken() -> None:
    long = "x" * 10_000_000

    assert taken(anything, f'{{"value": "{long}"}}') == long


@pytest.mark.parametrize(
    "text",
    [
        '{"value": "' + '\\"' * 2_000_000,
        '{"value": [' + "1," * 2_000_000,
        '{"value": ' + '"",' * 1_000_000,
        "," * 4_000_000,
    ],
)
def test_long_broken_texts_are_refused_in_linear_time(text: str) -> None:
    began = time.process_time()

    refused(anything, text)

    assert time.process_time() - began < 5


@given(st.text(max_size=60))
@settings(deadline=None, max_examples=300)
def test_any_text_is_arguments_or_a_typed_error(text: str) -> None:
    for function in (anything, price, mixed):
        try:
            taken(function, text)
        except ToolArgumentsError as error:
            str(error).encode()


def test_numbers_for_texts_in_all_places() -> None:
    class Address(BaseModel):
        zip: str

    def give(one: list[str], by_name: dict[str, str], either: int | list[str], inside: list[Address]) -> Any:
        return one, by_name, either, inside[0].zip

    text = '{"one": ["a", 2, 3.50], "by_name": {"a": 1e3}, "either": [1], "inside": [{"zip": 12345}]}'

    assert taken(give, text) == (["a", "2", "3.50"], {"a": "1e3"}, ["1"], "12345")


def test_a_union_prefers_the_number() -> None:
    def give(value: int | str) -> Any:
        return value

    assert taken(give, '{"value": 5}') == 5


def test_numbers_become_texts_in_a_repaired_text_too() -> None:
    def give(value: str, other: int) -> Any:
        return value, other

    assert taken(give, '{}{"value": 1.10, "other": "7",}') == ("1.10", 7)


def test_a_mended_text_does_not_hide_another_fault() -> None:
    def give(value: str, other: int) -> Any:
        return value, other

    assert refused(give, '{"value": 1, "other": "x"}').problems == [
        ("other", "Input should be a valid integer, unable to parse string as an integer")
    ]


def raising(error: Exception) -> Any:
    def refuse(value: Any) -> Any:
        raise error

    def give(value: int) -> int:
        return value

    give.__annotations__["value"] = Annotated[int, BeforeValidator(refuse)]
    return give


def test_what_a_types_own_validator_raises_is_an_arguments_error() -> None:
    assert refused(raising(KeyError("a")), '{"value": 1}').problems == [("", "KeyError: 'a'")]
    assert refused(raising(ValueError("odd")), '{"value": 1}').problems == [("value", "Value error, odd")]


@pytest.mark.parametrize("error", [ToolAbort("stop"), FrameworkError("own")])
def test_what_must_reach_the_caller_does_from_a_validator_too(error: Exception) -> None:
    with pytest.raises(type(error)):
        taken(raising(error), '{"value": 1}')


def test_a_validator_may_ask_for_another_try() -> None:
    result = tool_executor_from(raising(ToolRetry("say a number")))(
        ToolExecutionRequest("1", "g", '{"value": 1}'), None
    )

    assert (result.is_error, result.text) == (True, "say a number")


def test_no_arguments_at_all_in_a_request_made_by_hand() -> None:
    def give(value: int = 3) -> int:
        return value

    request: Any = ToolExecutionRequest("1", "give", None)  # type: ignore[arg-type]  # what some clients hand over

    assert tool_executor_from(give)(request, None).result_object == 3


def test_an_alias_is_the_name_that_the_model_uses() -> None:
    def give(value: Annotated[int, Field(alias="other")] = 1, *, more: Annotated[str, Field(alias="class")]) -> Any:
        return value, more

    assert taken(give, '{"other": 5, "class": "x", "value": 7}') == (5, "x")


def test_a_models_own_validator_speaks_with_its_path() -> None:
    class Odd(BaseModel):
        n: int

        @field_validator("n")
        @classmethod
        def check(cls, n: int) -> int:
            if n % 2 == 0:
                raise ValueError("is even")
            return n

    def give(value: list[Odd]) -> Any:
        return value

    assert refused(give, '{"value": [{"n": 1}, {"n": 2}]}').problems == [("value.1.n", "Value error, is even")]
