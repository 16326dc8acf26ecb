"""Difficult arguments: exact numbers, deep and long JSON, errors of custom validators."""

from __future__ import annotations

import functools
import itertools
import time
from decimal import Decimal
from typing import Annotated, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from toolbox import FrameworkError, ToolAbort, ToolArgumentsError, ToolExecutionRequest, ToolRetry
from toolbox.hosts.executors import tool_executor_from

executor_of = functools.cache(tool_executor_from)


def taken(function: Any, arguments: str) -> Any:
    """Return the arguments that `function` returns after decoding `arguments`."""
    return executor_of(function)(ToolExecutionRequest("1", "give", arguments), None).result_object


def refused(function: Any, arguments: str) -> ToolArgumentsError:
    with pytest.raises(ToolArgumentsError) as raised:
        taken(function, arguments)
    return raised.value


class Line(BaseModel):
    """A strict model: pydantic converts decimals from JSON only."""

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


def number_and_text(value: int, text: str) -> tuple[int, str]:
    return value, text


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
def test_decimals_are_exact(number: str) -> None:
    assert str(taken(price, f'{{"value": {number}}}')) == str(Decimal(number.strip('"')))


def test_decimals_are_exact_next_to_floats() -> None:
    text = '{"value": 3.1400000000000000001, "share": 0.30000000000000000001, "anything": [1.5], "name": 1.10}'

    value, share, other, name = taken(mixed, text)

    assert (str(value), share, other, name) == ("3.1400000000000000001", 0.3, [1.5], "1.10")
    assert type(share) is float


def test_decimals_are_exact_in_strict_models() -> None:
    [line] = taken(lines, '{"value": [{"price": 1.10, "name": "a", "share": 1.25}]}')

    assert (str(line.price), line.share) == ("1.10", 1.25)


def five(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    """Return a strategy of five values: Hypothesis takes longer to prepare an example than to draw a value."""
    return st.lists(values, min_size=5, max_size=5)


@given(five(st.decimals(allow_nan=False, allow_infinity=False)))
@settings(deadline=None, max_examples=42)
def test_generated_decimals_are_exact(numbers: list[Decimal]) -> None:
    # a JSON number needs a digit before the exponent's sign, and has no leading zeros: Decimal writes such
    for number in numbers:
        assert taken(price, f'{{"value": {number}}}') == number


@given(five(st.integers()))
@settings(deadline=None, max_examples=22)
def test_generated_integers_are_exact_also_as_strings(numbers: list[int]) -> None:
    for number in numbers:
        assert taken(number_and_text, f'{{"value": {number}, "text": {number}}}') == (number, str(number))


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity", "[NaN]", '{"a": Infinity}'])
def test_nan_and_infinity_are_rejected_everywhere(constant: str) -> None:
    refused(anything, f'{{"value": {constant}}}')


def test_strings_may_contain_nan_and_infinity() -> None:
    assert taken(anything, '{"value": "NaN and Infinity"}') == "NaN and Infinity"


@pytest.mark.parametrize("number", ['"nan"', '"inf"', "1e999"])
def test_infinite_floats_are_rejected(number: str) -> None:
    def give(value: float) -> float:
        return value

    refused(give, f'{{"value": {number}}}')


@pytest.mark.parametrize("depth", [150, 10_000, 100_000])
@pytest.mark.parametrize(("opened", "closed"), [("[", "]"), ('{"a":', "}")])
@pytest.mark.parametrize("whole", [True, False])
def test_any_nesting_depth_is_accepted_or_rejected_cleanly(depth: int, opened: str, closed: str, whole: bool) -> None:
    text = f'{{"value":{opened * depth}{"1" if whole else ""}{closed * depth if whole else ""}}}'
    if depth == 150 and whole:
        assert taken(anything, text) is not None
    else:
        refused(anything, text)


def test_ten_megabytes_of_text_are_accepted() -> None:
    long = "x" * 10_000_000

    assert taken(anything, f'{{"value": "{long}"}}') == long


@pytest.mark.parametrize(
    "text",
    [
        '{"value": "' + '\\"' * 500_000,
        '{"value": [' + "1," * 500_000,
        '{"value": ' + '"",' * 300_000,
        "," * 1_000_000,
    ],
)
def test_long_invalid_json_is_rejected_in_linear_time(text: str) -> None:
    began = time.process_time()

    refused(anything, text)

    assert time.process_time() - began < 5


@given(five(st.text(max_size=60)))
@settings(deadline=None, max_examples=62)
def test_generated_text_is_accepted_or_rejected_cleanly(texts: list[str]) -> None:
    for text, function in itertools.product(texts, (anything, price, mixed)):
        try:
            taken(function, text)
        except ToolArgumentsError as error:
            str(error).encode()


def test_numbers_are_converted_to_strings_at_every_level() -> None:
    class Address(BaseModel):
        zip: str

    def give(one: list[str], by_name: dict[str, str], either: int | list[str], inside: list[Address]) -> Any:
        return one, by_name, either, inside[0].zip

    text = '{"one": ["a", 2, 3.50], "by_name": {"a": 1e3}, "either": [1], "inside": [{"zip": 12345}]}'

    assert taken(give, text) == (["a", "2", "3.50"], {"a": "1e3"}, ["1"], "12345")


def test_unions_prefer_the_number() -> None:
    def give(value: int | str) -> Any:
        return value

    assert taken(give, '{"value": 5}') == 5


def test_numbers_are_converted_to_strings_in_repaired_json() -> None:
    def give(value: str, other: int) -> Any:
        return value, other

    assert taken(give, '{}{"value": 1.10, "other": "7",}') == ("1.10", 7)


def test_converted_strings_do_not_hide_other_errors() -> None:
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


def test_errors_of_validators_are_arguments_errors() -> None:
    assert refused(raising(KeyError("a")), '{"value": 1}').problems == [("", "KeyError: 'a'")]
    assert refused(raising(ValueError("odd")), '{"value": 1}').problems == [("value", "Value error, odd")]


@pytest.mark.parametrize("error", [ToolAbort("stop"), FrameworkError("own")])
def test_aborts_and_framework_errors_of_validators_reach_the_caller(error: Exception) -> None:
    with pytest.raises(type(error)):
        taken(raising(error), '{"value": 1}')


def test_validators_can_raise_tool_retry() -> None:
    result = tool_executor_from(raising(ToolRetry("say a number")))(
        ToolExecutionRequest("1", "g", '{"value": 1}'), None
    )

    assert (result.is_error, result.text) == (True, "say a number")


def test_requests_without_arguments_are_accepted() -> None:
    def give(value: int = 3) -> int:
        return value

    request: Any = ToolExecutionRequest("1", "give", None)  # type: ignore[arg-type]  # what some clients hand over

    assert tool_executor_from(give)(request, None).result_object == 3


def test_arguments_are_read_by_alias() -> None:
    def give(value: Annotated[int, Field(alias="other")] = 1, *, more: Annotated[str, Field(alias="class")]) -> Any:
        return value, more

    assert taken(give, '{"other": 5, "class": "x", "value": 7}') == (5, "x")


def test_errors_of_model_validators_have_their_path() -> None:
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
