"""JSON schemas of types and their strict form."""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any, Literal, NamedTuple

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field, TypeAdapter

from toolbox import ToolSpecification, tool
from toolbox.hosts.executors import tool_specification_from
from toolbox.schemas import schema_of, strict_output, strict_parameters


class Address(BaseModel):
    """A postal address."""

    title: str = Field(description="of the street", title="T")
    country: str | None = None


class Person(BaseModel):
    """Somebody."""

    home: Address
    work: Address = Field(description="where they work")
    friends: list[Person] = []


class A(BaseModel):
    b: B | None = None
    c: list[C] = []


class B(BaseModel):
    a: A
    c: C


class C(BaseModel):
    a: A | None = None


class Pair(NamedTuple):
    """Two numbers."""

    left: int
    right: int


def parameters(function: Any) -> Any:
    return tool_specification_from(function).parameters


def test_specification_of_the_documentation_example() -> None:
    @tool(name="sum", description="…", metadata={"k": 1})
    def add(a: int, b: Annotated[int, "second"] = 0) -> int:
        return a + b

    assert tool_specification_from(add) == ToolSpecification(
        "sum",
        "…",
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "description": "second"}},
            "required": ["a"],
        },
        {"k": 1},
    )


def test_types_used_twice_are_inlined_with_the_closer_description() -> None:
    schema = schema_of(TypeAdapter(Person))
    home, work = schema["properties"]["home"], schema["properties"]["work"]

    assert home["properties"] == work["properties"]
    assert home["properties"]["title"] == {"type": "string", "description": "of the street"}
    assert (home["description"], work["description"]) == ("A postal address.", "where they work")
    assert list(schema["$defs"]) == ["Person"]
    assert schema["properties"]["friends"]["items"] == {"$ref": "#/$defs/Person"}


def test_schemas_of_mutually_recursive_types_are_finite() -> None:
    def take(a: A, more: list[C]) -> None: ...

    schema = parameters(take)

    assert sorted(schema["$defs"]) == ["A", "B", "C"]
    judge = Draft202012Validator(schema)
    judge.check_schema(schema)
    assert judge.is_valid({"a": {"b": {"a": {}, "c": {"a": {}}}}, "more": [{"a": None}]})
    assert not judge.is_valid({"a": {"b": {"a": {"c": [1]}, "c": {}}}, "more": []})


def test_schemas_have_no_titles_defaults_or_unused_references() -> None:
    def take(person: Address, kind: Annotated[A | Address, Field(title="X")] | None = None, n: int = 3) -> None: ...

    text = json.dumps(parameters(take))

    assert '"title": "' not in text
    assert '"default"' not in text
    assert "Address" not in text


def test_null_is_part_of_the_schema_only_where_it_has_a_meaning() -> None:
    def take(needed: int | None, left_out: int | None = None, inside: Address | None = None) -> None: ...

    found = parameters(take)

    assert found["properties"]["needed"] == {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    assert found["properties"]["left_out"] == {"type": "integer"}
    assert found["properties"]["inside"]["properties"]["country"]["anyOf"][1] == {"type": "null"}
    assert found["required"] == ["needed"]


def test_collections_and_maps() -> None:
    def take(a: set[int], b: dict[str, Any], c: dict[str, int], d: Pair, e: Any, f: Decimal) -> None: ...

    assert parameters(take)["properties"] == {
        "a": {"type": "array", "items": {"type": "integer"}},
        "b": {"type": "object"},
        "c": {"type": "object", "additionalProperties": {"type": "integer"}},
        "d": {
            "type": "array",
            "prefixItems": [{"type": "integer"}, {"type": "integer"}],
            "minItems": 2,
            "maxItems": 2,
            "description": "Two numbers.",
        },
        "e": {},
        "f": {"anyOf": [{"type": "number"}, {"type": "string"}]},
    }


# --- strict


def test_nested_optional_fields_have_no_strict_form_unless_null_is_allowed() -> None:
    class Town(BaseModel):
        country: str = "France"

    def take(town: Town) -> None: ...

    def take_address(address: Address) -> None: ...

    assert strict_parameters(parameters(take)) is None
    assert strict_parameters(parameters(take_address)) is not None


class Place(BaseModel):
    name: str = Field(max_length=80)
    country: str | None


def test_strict_schemas_require_every_property() -> None:
    def take(
        place: Annotated[Place, "where"],
        age: Annotated[int, Field(ge=0)] = 3,
        kind: Annotated[Literal["a", "b"], "which"] = "a",
        when: list[Place] | str = "",
    ) -> None: ...

    schema = parameters(take)
    place = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "country": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
        "required": ["name", "country"],
        "additionalProperties": False,
    }

    assert strict_parameters(schema) == {
        "type": "object",
        "properties": {
            "place": {**place, "description": "where"},
            "age": {"type": ["integer", "null"], "minimum": 0},
            "kind": {"anyOf": [{"type": "string", "enum": ["a", "b"]}, {"type": "null"}], "description": "which"},
            "when": {"anyOf": [{"type": "array", "items": place}, {"type": "string"}, {"type": "null"}]},
        },
        "required": ["place", "age", "kind", "when"],
        "additionalProperties": False,
    }
    assert strict_output(schema) is None  # in an answer, null is not a default
    assert "minLength" not in json.dumps(schema)


@pytest.mark.parametrize("kind", [Any, dict[str, int], dict, list, tuple[int, str], A, Person])
def test_maps_tuples_and_unknown_types_have_no_strict_form(kind: Any) -> None:
    def take(value: Any) -> None: ...

    take.__annotations__["value"] = kind
    assert strict_parameters(parameters(take)) is None


def test_tools_without_parameters_have_an_empty_strict_form() -> None:
    def take() -> None: ...

    assert strict_parameters(parameters(take)) == {
        "type": "object",
        "properties": {},
        "required": [],
        "additionalProperties": False,
    }


def test_tagged_unions_and_recursive_types_have_a_strict_form() -> None:
    class Leaf(BaseModel):
        kind: Literal["leaf"]

    class Branch(BaseModel):
        kind: Literal["branch"]
        left: Branch | Leaf

    def take(tree: Annotated[Branch | Leaf, Field(discriminator="kind")]) -> None: ...

    strict: Any = strict_parameters(parameters(take))

    assert "oneOf" not in json.dumps(strict)
    assert strict["$defs"]["Branch"]["additionalProperties"] is False
    assert Draft202012Validator(strict).is_valid({"tree": {"kind": "branch", "left": {"kind": "leaf"}}})


def begins_on_the_first_line(city: str, days: int) -> None:
    """Args:
    city: where
    days: how many
    """


def begins_on_the_next_line(city: str, days: int) -> None:
    """
    Args:
        city: where
        days: how many
    """


def made_elsewhere(city: str, days: int) -> None: ...


made_elsewhere.__doc__ = "Args:\r\n    city: where\r\n    days: how many\r\n"


@pytest.mark.parametrize("function", [begins_on_the_first_line, begins_on_the_next_line, made_elsewhere])
def test_docstrings_with_arguments_only_describe_the_parameters(function: Callable[..., None]) -> None:
    specification = tool_specification_from(function)

    assert specification.description is None
    assert specification.parameters["properties"]["city"]["description"] == "where"
    assert specification.parameters["properties"]["days"]["description"] == "how many"


def test_tools_with_similar_parameters_have_schemas_that_match_their_types_and_defaults() -> None:
    def city(name: str, days: int | str = 1) -> str:
        """Return a city.

        Args:
            name: its name
        """
        return name

    def town(name: str, days: str | int = 2) -> str:
        return name

    def hamlet(name: str, days: int | str) -> str:
        return name

    def village(name: Literal[1], days: int | str = 1) -> str:
        return str(name)

    def farm(name: Literal[True], days: int | str = 1) -> str:
        return str(name)

    first = parameters(city)
    assert first["properties"]["name"] == {"type": "string", "description": "its name"}
    assert [each["type"] for each in first["properties"]["days"]["anyOf"]] == ["integer", "string"]
    assert first["required"] == ["name"]
    assert parameters(town)["properties"]["name"] == {"type": "string"}
    assert [each["type"] for each in parameters(town)["properties"]["days"]["anyOf"]] == ["string", "integer"]
    assert parameters(hamlet)["required"] == ["name", "days"]
    assert parameters(village)["properties"]["name"] == {"type": "integer", "const": 1}
    assert parameters(farm)["properties"]["name"] == {"type": "boolean", "const": True}

    first["properties"]["days"]["anyOf"].clear()
    first["properties"].pop("name")

    def suburb(name: str, days: int | str = 1) -> str:
        return name

    assert parameters(suburb)["properties"] == {
        "name": {"type": "string"},
        "days": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
    }
