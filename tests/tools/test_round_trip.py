"""Values of every type that pydantic validates match their schema and are accepted as arguments again.

The exceptions are in `NOT_BACK`, each with its reason.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import ipaddress
import json
import pathlib
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, NotRequired, TypeVar, Union

import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass
from typing_extensions import TypeAliasType, TypedDict

from toolbox import ToolExecutionRequest
from toolbox.hosts.executors import tool_executor_from, tool_specification_from

# --- the types


class Color(enum.Enum):
    RED = "red"
    GREEN = "green"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Word(enum.StrEnum):
    YES = "yes"
    NO = "no"


class Address(BaseModel):
    """A postal address."""

    street: str
    zip: str = Field(pattern=r"^[0-9]{5}$")


class Person(BaseModel):
    name: str = Field(alias="fullName")
    born: datetime.date
    home: Address | None = None
    tags: set[str] = set()


class Node(BaseModel):
    value: int
    children: list[Node] = []


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: str


@dataclasses.dataclass(frozen=True)
class Point:
    x: float
    y: float = 0.0


@pydantic_dataclass
class Box:
    corner: Point
    sizes: tuple[int, int]


class Movie(TypedDict):
    title: str
    year: NotRequired[int]


class Pair(NamedTuple):
    left: int
    right: str = "r"


T = TypeVar("T")


class Page(BaseModel, Generic[T]):
    items: list[T]
    total: Decimal = decimal.Decimal(0)


Decimal = decimal.Decimal
Page.model_rebuild()
Node.model_rebuild()

UserId = NewType("UserId", int)
Json = TypeAliasType("Json", "dict[str, Json] | list[Json] | str | int | float | bool | None")

# --- their values

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
floats = st.floats(allow_nan=False, allow_infinity=False)
decimals = st.decimals(allow_nan=False, allow_infinity=False)
naive = st.datetimes()
aware = st.datetimes(timezones=st.just(datetime.UTC))
durations = st.timedeltas(datetime.timedelta(days=-99_999), datetime.timedelta(days=99_999))
points = st.builds(Point, floats, floats)
addresses = st.builds(Address, street=texts, zip=st.from_regex(r"^[0-9]{5}\Z"))
people = st.builds(
    lambda name, born, home, tags: Person(fullName=name, born=born, home=home, tags=tags),
    texts, st.dates(), st.none() | addresses, st.sets(texts, max_size=3),
)  # fmt: skip
nodes: st.SearchStrategy[Node] = st.recursive(
    st.builds(Node, value=st.integers()),
    lambda inner: st.builds(Node, value=st.integers(), children=st.lists(inner, max_size=3)),
    max_leaves=5,
)
movies = st.fixed_dictionaries({"title": texts}, optional={"year": st.integers()})
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | floats | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


def few(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(values, max_size=4)


CASES: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "bool": (bool, st.booleans()),
    "int": (int, st.integers()),
    "float": (float, floats),
    "str": (str, texts),
    "None": (None, st.none()),
    "bytes": (bytes, texts.map(str.encode)),
    "Decimal": (decimal.Decimal, decimals),
    "Fraction": (fractions.Fraction, st.fractions()),
    "complex": (complex, st.complex_numbers(allow_nan=False, allow_infinity=False)),
    "date": (datetime.date, st.dates()),
    "datetime": (datetime.datetime, naive | aware),
    "aware datetime": (pydantic.AwareDatetime, aware),
    "time": (datetime.time, st.times()),
    "timedelta": (datetime.timedelta, durations),
    "UUID": (uuid.UUID, st.uuids()),
    "Path": (pathlib.PurePosixPath, st.sampled_from(["/", "a", "/a/b", "é/x"]).map(pathlib.PurePosixPath)),
    "IPv4": (ipaddress.IPv4Address, st.ip_addresses(v=4)),
    "IPv6": (ipaddress.IPv6Address, st.ip_addresses(v=6)),
    "IP network": (ipaddress.IPv4Network, st.ip_addresses(v=4).map(lambda each: ipaddress.IPv4Network(f"{each}/32"))),
    "Pattern": (re.Pattern[str], st.sampled_from(["a+", "[x]", ""]).map(re.compile)),
    "URL": (pydantic.AnyUrl, st.sampled_from(["http://a/b?c=d", "ftp://x:2/"]).map(pydantic.AnyUrl)),
    "byte size": (pydantic.ByteSize, st.integers(0, 10**15).map(pydantic.ByteSize)),
    "enum": (Color, st.sampled_from(Color)),
    "int enum": (Level, st.sampled_from(Level)),
    "str enum": (Word, st.sampled_from(Word)),
    "Literal": (Literal["a", 1, True, None], st.sampled_from(["a", 1, True, None])),
    "Literal of enum": (Literal[Word.YES], st.just(Word.YES)),
    "optional": (int | None, st.none() | st.integers()),
    "union": (int | str | list[int], st.integers() | texts | few(st.integers())),
    "union of float and int": (int | float, st.integers() | floats),
    "tagged union": (
        Annotated[Cat | Dog, Field(discriminator="kind")],
        st.builds(Cat, lives=st.integers()) | st.builds(Dog, name=texts),
    ),
    "constrained": (Annotated[int, Field(gt=0, le=9)], st.integers(1, 9)),
    "constrained str": (Annotated[str, Field(min_length=1, max_length=3)], texts.filter(lambda t: 1 <= len(t) <= 3)),
    "constrained list": (Annotated[list[int], Field(max_length=3)], st.lists(st.integers(), max_size=3)),
    "list": (list[int], few(st.integers())),
    "sequence": (Sequence[str], few(texts)),
    "set": (set[datetime.date], st.sets(st.dates(), max_size=4)),
    "frozenset": (frozenset[Color], st.frozensets(st.sampled_from(Color))),
    "tuple": (tuple[int, str, bool], st.tuples(st.integers(), texts, st.booleans())),
    "open tuple": (tuple[float, ...], few(floats).map(tuple)),
    "deque": (collections.deque[int], few(st.integers()).map(collections.deque)),
    "dict": (dict[str, list[int]], st.dictionaries(texts, few(st.integers()), max_size=3)),
    "dict by int": (dict[int, str], st.dictionaries(st.integers(), texts, max_size=3)),
    "dict by date": (dict[datetime.date, int], st.dictionaries(st.dates(), st.integers(), max_size=3)),
    "dict by enum": (dict[Color, int], st.dictionaries(st.sampled_from(Color), st.integers(), max_size=2)),
    "mapping": (Mapping[str, float], st.dictionaries(texts, floats, max_size=3)),
    "Counter": (collections.Counter[str], st.dictionaries(texts, st.integers(), max_size=3).map(collections.Counter)),
    "any JSON": (Any, json_values),
    "JsonValue": (pydantic.JsonValue, json_values),
    "recursive alias": (Json, json_values),
    "NewType": (UserId, st.integers()),
    "model": (Person, people),
    "models": (list[Person], few(people)),
    "recursive model": (Node, nodes),
    "generic model": (Page[Point], st.builds(Page[Point], items=few(points), total=decimals)),
    "dataclass": (Point, points),
    "pydantic dataclass": (Box, st.builds(Box, points, st.tuples(st.integers(), st.integers()))),
    "TypedDict": (Movie, movies),
    "NamedTuple": (Pair, st.builds(Pair, st.integers(), texts)),
    "root model": (pydantic.RootModel[list[int]], few(st.integers()).map(pydantic.RootModel[list[int]])),
}


def tool_of(kind: Any) -> Callable[..., Any]:
    def give(value: Any) -> Any:
        return value

    give.__annotations__ = {"value": kind, "return": kind}
    return give


def encoder(kind: Any) -> Callable[[Any], str]:
    """Return a function that returns what the model receives for a value, as JSON."""
    value: Any = None

    def give() -> Any:
        return value

    give.__annotations__ = {"return": kind}
    execute = tool_executor_from(give)

    def encoded(given: Any) -> str:
        nonlocal value
        value = given
        result = execute(ToolExecutionRequest("1", "give", "{}"), None)
        assert not result.is_error, result.text
        if value is None and kind is None:
            return "null"  # "Success"
        return json.dumps(result.text) if isinstance(value, str) else result.text

    return encoded


@pytest.mark.parametrize("name", CASES)
def test_results_match_the_schema_and_are_accepted_as_arguments(name: str) -> None:
    kind, values = CASES[name]
    function = tool_of(kind)
    judge = Draft202012Validator(tool_specification_from(function).parameters)
    encoded, take = encoder(kind), tool_executor_from(function)

    # Five values in each example: Hypothesis takes longer to prepare one than to draw a value.
    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(values, min_size=5, max_size=5))
    def check(drawn: list[Any]) -> None:
        for value in drawn:
            arguments = f'{{"value":{encoded(value)}}}'
            judge.validate(json.loads(arguments))
            taken = take(ToolExecutionRequest("1", "give", arguments), None)
            assert not taken.is_error, taken.text
            assert taken.result_object == value
            assert type(taken.result_object) is type(value)

    check()


NOT_BACK: dict[str, tuple[Any, Any, str]] = {
    "bytes that are not UTF-8": (bytes, b"\xff", "pydantic writes bytes as text: they are a tool error"),
    "not a number": (float, float("nan"), "JSON has no NaN: it is written as null, which is not a number"),
    "infinity": (float, float("inf"), "JSON has no infinity: it is written as null"),
    "secrets": (pydantic.SecretStr, pydantic.SecretStr("s"), "they are written as asterisks on purpose"),
    "JSON in a text": (pydantic.Json[list[int]], [1], "the argument is text, the result is its value"),
    "dates or strings": (Union[str, datetime.date], datetime.date(2024, 1, 1), "strings are tried first"),  # noqa: UP007
    "sets or lists": (Union[list[int], set[int]], {1}, "lists are tried first"),  # noqa: UP007
    "patterns with flags": (re.Pattern[str], re.compile("a", re.IGNORECASE), "the flags are not part of the text"),
    "dictionaries by tuples": (dict[tuple[int, int], str], {(1, 2): "a"}, "JSON keys are strings"),
    "enums of tuples": (enum.Enum("Pairs", {"A": (1, 2)}), None, "a JSON list is not a tuple"),
    "a Literal of a plain enum": (Literal[Color.RED], Color.RED, "pydantic takes the members of a StrEnum only"),
    "custom serializers": (
        Annotated[int, pydantic.PlainSerializer(lambda value: f"#{value}")],
        3,
        "the serializer decides how it is written",
    ),
}


@pytest.mark.parametrize("name", NOT_BACK)
def test_exceptions_from_the_round_trip_are_listed_with_a_reason(name: str) -> None:
    kind, value, reason = NOT_BACK[name]
    value = next(iter(kind)) if value is None else value
    take = tool_executor_from(tool_of(kind))

    def outcome() -> Any:
        try:
            return take(ToolExecutionRequest("1", "give", f'{{"value":{encoder(kind)(value)}}}'), None).result_object
        except Exception as error:
            return error

    assert reason
    assert outcome() != value
