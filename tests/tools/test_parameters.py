"""Parameters of tools: descriptions, defaults, hidden parameters and schemas."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NewType
from uuid import UUID

import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from toolbox import (
    Inject,
    InvocationContext,
    MemoryId,
    ToolExecutionRequest,
    tool,
    tool_executor_from,
    tool_specification_from,
)

from .calls import call

NOTHING = {"type": "object", "properties": {}}


def parameters(function: Any) -> Any:
    return tool_specification_from(function).parameters


def properties(function: Any) -> Any:
    return parameters(function)["properties"]


# --- descriptions


def test_strings_in_annotated_are_descriptions() -> None:
    def f(a: Annotated[int, "first", "of all"], b: Annotated[int, Field(description="second")]) -> int:
        return a

    assert properties(f) == {
        "a": {"type": "integer", "description": "first\nof all"},
        "b": {"type": "integer", "description": "second"},
    }


def google(a: int, b: int) -> int:
    """Adds.

    Args:
        a: the first
        b (int): the second,
            of two
    """
    return a


def numpy(a: int, b: int) -> int:
    """Adds.

    Parameters
    ----------
    a : int
        the first
    b : int
        the second, of two
    """
    return a


def sphinx(a: int, b: int) -> int:
    """Adds.

    :param a: the first
    :param int b: the second, of two
    :returns: the sum
    """
    return a


@pytest.mark.parametrize("function", [google, numpy, sphinx])
def test_google_numpy_and_sphinx_docstrings_are_descriptions(function: Any) -> None:
    assert tool_specification_from(function).description == "Adds."
    assert properties(function) == {
        "a": {"type": "integer", "description": "the first"},
        "b": {"type": "integer", "description": "the second, of two"},
    }


def test_annotated_strings_override_fields_and_fields_override_docstrings() -> None:
    def f(
        a: Annotated[int, "text", Field(description="field")], b: Annotated[int, Field(description="field")], c: int
    ) -> int:
        """Does.

        Args:
            a: docstring
            b: docstring
            c: docstring
        """
        return a

    assert {name: each["description"] for name, each in properties(f).items()} == {
        "a": "text",
        "b": "field",
        "c": "docstring",
    }


# --- required parameters and defaults


def test_parameters_without_default_are_required() -> None:
    def f(a: int, b: str = "x", c: list[int] | None = None, d: int | None = 3) -> int:
        return a

    assert parameters(f)["required"] == ["a"]
    assert list(properties(f)) == ["a", "b", "c", "d"]


def test_missing_and_null_arguments_use_the_default() -> None:
    def f(a: int = 1, b: int | None = 2, c: str | None = None) -> list[Any]:
        return [a, b, c]

    assert call(f) == [1, 2, None]
    assert call(f, '{"a": null, "b": null, "c": null}') == [1, 2, None]
    assert call(f, '{"a": 5, "b": 6, "c": ""}') == [5, 6, ""]


def test_mutable_defaults_are_copied_for_each_call() -> None:
    class Box(BaseModel):
        items: list[int] = []

    @dataclass
    class Data:
        items: list[int] = field(default_factory=list)

    def f(a: list[int] = [], b: dict[str, int] = {}, c: Box = Box(), d: Data = Data()) -> list[int]:  # noqa: B006, B008
        for each in (a, c.items, d.items):
            each.append(1)
        b["x"] = 1
        return [len(a), len(b), len(c.items), len(d.items)]

    executor = tool_executor_from(f)
    for _ in range(2):
        result: Any = executor(ToolExecutionRequest("1", "f", "{}"), None)
        assert result.result_object == [1, 1, 1, 1]


def test_defaults_of_pydantic_fields_are_used() -> None:
    def f(
        a: int = Field(3, description="number"),
        b: list[int] = Field(default_factory=list),  # noqa: B008 - as pydantic's users write it
    ) -> list[Any]:
        return [a, b]

    assert "required" not in parameters(f)
    assert properties(f)["a"] == {"type": "integer", "description": "number"}
    assert call(f) == [3, []]


def test_required_optional_parameters_may_be_missing() -> None:
    def f(a: int | None, b: str) -> list[Any]:
        return [a, b]

    assert parameters(f)["required"] == ["a", "b"]
    assert call(f, '{"b": "x"}') == [None, "x"]
    assert call(f, '{"a": null, "b": "x"}') == [None, "x"]


def test_keyword_only_and_positional_only_parameters_are_passed() -> None:
    def f(a: int, b: int = 5, /, *, c: int, d: int = 7) -> list[int]:
        return [a, b, c, d]

    assert call(f, '{"a": 1, "c": 2}') == [1, 5, 2, 7]
    assert call(f, '{"a": 1, "b": 9, "c": 2, "d": 3}') == [1, 9, 2, 3]


# --- hidden from the model


class Bean: ...


def test_injected_parameters_are_hidden_also_if_optional() -> None:
    class Tools:
        @tool
        def f(
            self,
            a: int,
            memory: MemoryId[str],
            maybe_memory: MemoryId[str] | None,
            inner_memory: MemoryId[str | None],
            context: InvocationContext,
            maybe_context: InvocationContext | None,
            bean: Inject[Bean],
            maybe_bean: Inject[Bean] | None,
            inner_bean: Inject[Bean | None],
        ) -> int:
            return a

    assert parameters(Tools().f) == {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
    }


def test_tools_without_visible_parameters_have_an_empty_object() -> None:
    def nothing() -> int:
        return 1

    def hidden(memory: MemoryId[str], context: InvocationContext | None = None) -> int:
        return 1

    assert parameters(nothing) == NOTHING
    assert parameters(hidden) == NOTHING


def test_arguments_never_reach_hidden_parameters() -> None:
    def f(memory: MemoryId[str | None], context: InvocationContext | None, a: int = 0) -> list[Any]:
        return [memory, context, a]

    assert call(f, '{"memory": "x", "context": "y", "a": 1, "other": 2}', "room 7") == ["room 7", None, 1]


def test_executors_receive_the_memory_id() -> None:
    def f(memory: MemoryId[int]) -> object:
        return memory

    assert call(f, "{}", 7) == 7


# --- the schema


class Colour(Enum):
    RED = "r"
    GREEN = "g"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Address(BaseModel):
    """A postal address."""

    street: str = Field(description="with its number")
    city: str | None = None


@dataclass
class Person:
    """A person."""

    name: str
    address: Address
    other: Address


class Node(BaseModel):
    """A node."""

    value: int
    children: list["Node"] = []


class Movie(TypedDict):
    title: str


class Point(NamedTuple):
    x: int
    y: int


UserId = NewType("UserId", int)


def has_no(key: str, schema: Any) -> bool:
    if isinstance(schema, dict):
        return key not in schema and all(has_no(key, each) for each in schema.values())
    return not isinstance(schema, list) or all(has_no(key, each) for each in schema)


def test_enums_are_described_by_value() -> None:
    def f(colour: Colour, level: Level, text: Literal["a", "b"]) -> str:
        return repr([colour, level, text])

    assert properties(f)["colour"]["enum"] == ["r", "g"]
    assert properties(f)["level"]["enum"] == [1, 2]
    assert properties(f)["text"]["enum"] == ["a", "b"]
    assert call(f, '{"colour": "g", "level": 2, "text": "a"}') == repr([Colour.GREEN, Level.HIGH, "a"])


def test_types_are_inlined_and_have_no_titles() -> None:
    def f(person: Person) -> str:
        return person.name

    schema = parameters(f)
    person = schema["properties"]["person"]
    assert "$defs" not in schema
    assert has_no("title", schema)
    assert has_no("$ref", schema)
    assert person["description"] == "A person."
    assert person["properties"]["address"]["properties"]["street"] == {
        "type": "string",
        "description": "with its number",
    }
    assert person["properties"]["address"] == person["properties"]["other"]
    assert person["properties"]["address"]["description"] == "A postal address."


def test_properties_named_title_are_kept() -> None:
    def f(title: str, movie: Movie) -> str:
        return title + movie["title"]

    assert list(properties(f)) == ["title", "movie"]
    assert list(properties(f)["movie"]["properties"]) == ["title"]


def test_descriptions_of_parameters_override_those_of_their_class() -> None:
    def f(a: Annotated[Address, "the old one"], b: Address) -> str:
        return a.street

    assert properties(f)["a"]["description"] == "the old one"
    assert properties(f)["b"]["description"] == "A postal address."


def test_recursive_types_are_references() -> None:
    def f(node: Node) -> int:
        return len(node.children)

    schema = parameters(f)
    assert list(schema["$defs"]) == ["Node"]
    assert has_no("title", schema)
    assert call(f, '{"node": {"value": 1, "children": [{"value": 2}, {"value": 3}]}}') == 2


def test_two_recursive_parameters_keep_their_own_descriptions() -> None:
    def f(a: Annotated[Node, "first"], b: Annotated[Node, "second"]) -> int:
        return 1

    assert properties(f)["a"]["description"] == "first"
    assert properties(f)["b"]["description"] == "second"


def test_defaults_are_not_part_of_the_schema() -> None:
    def f(a: int = 3, b: str | None = None) -> int:
        return a

    assert properties(f)["a"]["type"] == "integer"
    assert properties(f)["b"]["type"] == "string"


JSON_OF: list[tuple[Any, str, Any]] = [
    (int, "1", 1),
    (float, "1.5", 1.5),
    (bool, "true", True),
    (str, '"x"', "x"),
    (bytes, '"x"', b"x"),
    (Decimal, "0.1", Decimal("0.1")),
    (date, '"2026-01-02"', date(2026, 1, 2)),
    (datetime, '"2026-01-02T03:04:05"', datetime(2026, 1, 2, 3, 4, 5)),
    (time, '"03:04"', time(3, 4)),
    (timedelta, '"PT1H"', timedelta(hours=1)),
    (UUID, '"00000000-0000-0000-0000-000000000001"', UUID(int=1)),
    (Path, '"/tmp"', Path("/tmp")),
    (list[int], "[1, 2]", [1, 2]),
    (Sequence[int], "[1, 2]", [1, 2]),
    (tuple[int, str], '[1, "a"]', (1, "a")),
    (tuple[int, ...], "[1, 2]", (1, 2)),
    (set[str], '["a", "a"]', {"a"}),
    (frozenset[int], "[1]", frozenset({1})),
    (dict[str, int], '{"a": 1}', {"a": 1}),
    (Mapping[str, int], '{"a": 1}', {"a": 1}),
    (dict[str, Any], '{"a": [1]}', {"a": [1]}),
    (Any, '{"a": [1]}', {"a": [1]}),
    (int | str, '"x"', "x"),
    (Colour, '"r"', Colour.RED),
    (Literal["a", 1], "1", 1),
    (Address, '{"street": "s"}', Address(street="s")),
    (list[Address], '[{"street": "s"}]', [Address(street="s")]),
    (
        Person,
        '{"name": "n", "address": {"street": "s"}, "other": {"street": "t"}}',
        Person("n", Address(street="s"), Address(street="t")),
    ),
    (Movie, '{"title": "t"}', {"title": "t"}),
    (Point, '{"x": 1, "y": 2}', Point(1, 2)),
    (UserId, "7", 7),
    (Annotated[int, Field(gt=0)], "1", 1),
    (str | None, '"x"', "x"),
]


@pytest.mark.parametrize(("kind", "json", "value"), JSON_OF, ids=[str(each[0]) for each in JSON_OF])
def test_arguments_are_converted_to_every_pydantic_type(kind: Any, json: str, value: object) -> None:
    def f(a):  # type: ignore[no-untyped-def]
        return [a]

    f.__annotations__ = {"a": kind}
    if kind is Point:
        json = "[1, 2]"

    [given] = call(f, f'{{"a": {json}}}')
    assert given == value
    assert type(given) is type(value)


@pytest.mark.parametrize(
    ("annotation", "arguments", "value"),
    [
        (Collection[int], '{"x": ["1", 2]}', [1, 2]),
        (Collection, '{"x": ["a"]}', ["a"]),
        (Collection[Collection[str]] | None, '{"x": [["a"]]}', [["a"]]),
        (Annotated[Collection[str], "names"], '{"x": ["a"]}', ["a"]),
    ],
)
def test_a_collection_is_a_list(annotation: Any, arguments: str, value: Any) -> None:
    def take(x: Any) -> Any:
        return x

    take.__annotations__["x"] = annotation
    assert "array" in str(tool_specification_from(take).parameters["properties"]["x"])
    result = tool_executor_from(take)(ToolExecutionRequest("1", "take", arguments), None)
    assert result.result_object == value
