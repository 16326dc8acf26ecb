"""JSON schemas as models are given them: made by pydantic, without noise, inlined; and their strict form.

Not here: which types a schema is made of (`tools.specification`, `services.outputs`), the wire (`models`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic.json_schema import GenerateJsonSchema

Schema: TypeAlias = dict[str, Any]

DEFINITION = "#/$defs/"

# Where a schema holds further ones.
_BY_NAME = frozenset({"properties", "$defs", "patternProperties", "dependentSchemas"})
_LISTED = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SINGLE = frozenset({"items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "propertyNames"})
_SINGLE |= {"not", "if", "then", "else", "contains"}

# What says nothing to a model: names derived from names, defaults (which the program fills in), a set's uniqueness
# (repeated members are dropped anyway), and a mapping to definitions that are inlined.
_NOISE = frozenset({"title", "default", "uniqueItems", "discriminator"})


def schema_of(adapter: TypeAdapter[Any]) -> Schema:
    """The schema of what `adapter` accepts, for a model to read.

    No titles or defaults; every type where it is used; only recursive ones are in `$defs`. Descriptions stay, the one
    nearer to the use first. Raises pydantic's errors for types that JSON cannot say.
    """
    return readable(adapter.json_schema(schema_generator=_generator()))


def readable(schema: Schema) -> Schema:
    """A schema with its definitions in `$defs`, as `schema_of` gives one."""
    raw = {key: value for key, value in schema.items() if key != "$defs"}
    definitions: Schema = schema.get("$defs", {})
    recursive = {name for name in definitions if name in _reachable(definitions, name)}
    inlined: Schema = _inlined(raw, definitions, recursive, open_recursion=True)
    used = {name for name in recursive if f"{DEFINITION}{name}" in set(_references(inlined))}
    used |= {each for name in used for each in _reachable(definitions, name) if each in recursive}
    if used:
        inlined["$defs"] = {
            name: _inlined(schema, definitions, recursive, open_recursion=False)
            for name, schema in definitions.items()
            if name in used
        }
    return inlined


def without_null(schema: Schema) -> Schema:
    """The schema without the alternative null, where it has another."""
    others = [each for each in schema.get("anyOf", ()) if each != {"type": "null"}]
    if not others or len(others) == len(schema["anyOf"]):
        return schema
    rest = {key: value for key, value in schema.items() if key != "anyOf"}
    return {**others[0], **rest} if len(others) == 1 else {"anyOf": others, **rest}


def admits_null(schema: Mapping[str, Any]) -> bool:
    """Whether null is one of the alternatives of a schema."""
    kinds = schema.get("type")
    if kinds == "null" or (isinstance(kinds, list) and "null" in kinds) or None in schema.get("enum", ()):
        return True
    return any(admits_null(each) for each in schema.get("anyOf", ()))


# --- the strict form


def is_strict_compatible(schema: Mapping[str, Any]) -> bool:
    """Whether a tool's schema has a strict form, for servers that hold a model to it (`strict: true`)."""
    return strict_parameters(schema) is not None


def strict_parameters(schema: Mapping[str, Any]) -> Schema | None:
    """A tool's parameters in strict form: all required, the optional ones null instead; None if that cannot be."""
    return _strict_root(schema, optional_as_null=True)


def strict_output(schema: Mapping[str, Any]) -> Schema | None:
    """The schema of a reply in strict form; None if it has no strict form."""
    return _strict_root(schema, optional_as_null=False)


class _NotStrict(Exception):  # noqa: N818 - never leaves this module
    """A schema says what strict ones cannot."""


_STRICT_KEYWORDS = frozenset({"type", "enum", "const", "description", "properties", "required", "additionalProperties"})
_STRICT_KEYWORDS |= {"items", "minItems", "maxItems", "anyOf", "$ref", "$defs", "format", "pattern"}
_STRICT_KEYWORDS |= {"multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
# Left out: the server would refuse them, and the program checks them when the arguments arrive.
_STRICT_LEFT_OUT = frozenset({"minLength", "maxLength", "examples", "deprecated", "readOnly", "writeOnly", *_NOISE})
_STRICT_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"})
_STRICT_DEPTH = 10
_STRICT_PROPERTIES = 5000


def _strict_root(schema: Mapping[str, Any], *, optional_as_null: bool) -> Schema | None:
    if schema.get("type") != "object":
        return None
    try:
        strict = _strict(schema, optional_as_null=optional_as_null, depth=1)
    except _NotStrict:
        return None
    return strict if sum(1 for _ in _properties(strict)) <= _STRICT_PROPERTIES else None


def _strict(schema: Mapping[str, Any], *, optional_as_null: bool, depth: int) -> Schema:
    if "oneOf" in schema:
        schema = {("anyOf" if key == "oneOf" else key): value for key, value in schema.items()}
    kept = {key: value for key, value in schema.items() if key in _STRICT_KEYWORDS}
    if schema.keys() - _STRICT_KEYWORDS - _STRICT_LEFT_OUT or not kept.keys() - {"description"}:
        raise _NotStrict
    if kept.get("format") not in _STRICT_FORMATS:
        kept.pop("format", None)
    if "(?" in kept.get("pattern", ""):
        del kept["pattern"]
    if kept.get("type") == "object":
        if depth > _STRICT_DEPTH or kept.get("additionalProperties", False) is not False or "properties" not in kept:
            raise _NotStrict
        kept["properties"] = dict(_strict_properties(kept, optional_as_null, depth))
        kept["required"] = list(kept["properties"])
        kept["additionalProperties"] = False
    elif kept.get("type") == "array" and "items" not in kept:
        raise _NotStrict
    below = functools.partial(_strict, optional_as_null=False, depth=depth + 1)
    for key in ("anyOf", "items", "$defs"):
        if key in kept:
            kept[key] = _each(kept[key], key, below)
    return kept


def _strict_properties(schema: Schema, optional_as_null: bool, depth: int) -> Iterator[tuple[str, Schema]]:
    required = schema.get("required", ())
    for name, each in schema["properties"].items():
        strict = _strict(each, optional_as_null=False, depth=depth + 1)
        if name in required or admits_null(strict):
            yield name, strict
        elif optional_as_null:
            yield name, _or_null(strict)
        else:  # null would be refused by the type, and leaving it out by the server
            raise _NotStrict


def _or_null(schema: Schema) -> Schema:
    if isinstance(schema.get("type"), str) and not schema.keys() & {"enum", "const"}:
        return {**schema, "type": [schema["type"], "null"]}
    description = {"description": schema["description"]} if "description" in schema else {}
    rest = {key: value for key, value in schema.items() if key != "description"}
    branches = rest["anyOf"] if rest.keys() == {"anyOf"} else [rest]
    return {"anyOf": [*branches, {"type": "null"}], **description}


def _properties(schema: Any) -> Iterator[str]:
    for below in _below(schema):
        yield from _properties(below)
    yield from schema.get("properties", ()) if isinstance(schema, dict) else ()


# --- walking


def _each(value: Any, key: str, change: Callable[[Any], Any]) -> Any:
    """What stands under `key`, with `change` applied to each schema in it."""
    if key in _BY_NAME and isinstance(value, dict):
        return {name: change(each) for name, each in value.items()}
    if isinstance(value, list) and (key in _LISTED or key in _SINGLE):
        return [change(each) for each in value]
    return change(value) if key in _SINGLE and isinstance(value, dict) else value


def _below(schema: Any) -> Iterator[Any]:
    found: list[Any] = []
    for key, value in schema.items() if isinstance(schema, dict) else ():
        _each(value, key, found.append)
    return iter(found)


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict) and isinstance(reference := schema.get("$ref"), str):
        yield reference
    for each in _below(schema):
        yield from _references(each)


def _reachable(definitions: Schema, start: str) -> set[str]:
    """The definitions that `start` refers to, directly or not; itself only if it is recursive."""
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        for reference in _references(definitions.get(waiting.pop(), {})):
            name = reference.removeprefix(DEFINITION)
            if name not in reached:
                reached.add(name)
                waiting.append(name)
    return reached


def _inlined(schema: Any, definitions: Schema, recursive: set[str], *, open_recursion: bool) -> Any:
    """`schema` with what it refers to in place, a recursive type once, when `open_recursion`."""
    if not isinstance(schema, dict):
        return schema
    reference = schema.get("$ref", "")
    name = reference.removeprefix(DEFINITION)
    again = functools.partial(_inlined, definitions=definitions, recursive=recursive)
    if name in definitions and (name not in recursive or open_recursion):
        nearer = {key: value for key, value in schema.items() if key != "$ref"}
        return again({**definitions[name], **nearer}, open_recursion=open_recursion and name not in recursive)
    below = functools.partial(again, open_recursion=open_recursion)
    return {key: _each(value, key, below) for key, value in schema.items() if not _is_noise(key, value)}


def _is_noise(key: str, value: object) -> bool:
    return key in _NOISE or (key == "additionalProperties" and value is True)


@functools.cache
def _generator() -> type[GenerateJsonSchema]:
    from pydantic.json_schema import GenerateJsonSchema

    class ModelReadable(GenerateJsonSchema):
        """Keeps the docstring of a named tuple, as pydantic does for other classes."""

        def named_tuple_schema(self, schema: Any) -> Schema:
            made = super().named_tuple_schema(schema)
            named = schema.get("cls")
            text = inspect.cleandoc(getattr(named, "__doc__", None) or "")
            if text and not text.startswith(f"{getattr(named, '__name__', '')}("):
                made = {"description": text, **made}
            return made

    return ModelReadable
