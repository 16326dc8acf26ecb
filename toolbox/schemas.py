"""JSON schemas for models: built by pydantic, shortened and inlined, and their strict form.

Not here: the types of a schema (`tools.specification`, `services.outputs`), requests to models (`models`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from urllib.parse import unquote

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic.json_schema import GenerateJsonSchema

Schema: TypeAlias = dict[str, Any]

DEFINITION = "#/$defs/"

# Keywords that contain other schemas.
_BY_NAME = frozenset({"properties", "$defs", "patternProperties", "dependentSchemas"})
_LISTED = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SINGLE = frozenset({"items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "propertyNames"})
_SINGLE |= {"not", "if", "then", "else", "contains"}
_HOLDING_SCHEMAS = _BY_NAME | _LISTED | _SINGLE

INLINED_LIMIT = 50_000
"""Maximum characters of a schema with all definitions inlined."""
_DEEPEST = 100
"""Maximum depth of nested references."""

# Keywords without use for a model: names derived from names, defaults (the program applies them), uniqueness of sets
# (repeated members are removed anyway), and mappings to inlined definitions.
_NOISE = frozenset({"title", "default", "uniqueItems", "discriminator"})


MEMBER_NAMES = "x-member-names"
"""The keyword with the names of an enum's members and their values, in a schema with names."""


def schema_of(adapter: TypeAdapter[Any], *, with_names: bool = False) -> Schema:
    """Return the schema of the values that `adapter` accepts, in a form for models.

    It has no titles and defaults. Types are inlined where they are used; only recursive types are in `$defs`. A
    description at the use of a type overrides that of the type. `with_names` adds the names of enums, for the repair of
    what a model wrote. Raises the errors of pydantic for types without JSON.
    """
    return readable(adapter.json_schema(schema_generator=_make_generators()[with_names]))


def readable(schema: Schema) -> Schema:
    """Return a schema with definitions in `$defs` in the form of `schema_of`.

    Definitions stay in `$defs` if the inlined schema would be longer than `INLINED_LIMIT`: with types that use each
    other several times, each level multiplies the length.
    """
    raw = {key: value for key, value in schema.items() if key != "$defs"}
    definitions: Schema = schema.get("$defs", {})
    uses = {name: _find_uses(each) for name, each in definitions.items()}
    reached = _find_reachable(uses, _find_uses(raw))
    definitions = {name: each for name, each in definitions.items() if name in reached}
    recursive = _find_recursive({name: uses[name] & reached for name in definitions})
    try:
        inlining = _Inlining(definitions, recursive)
        inlined: Schema = _inline_references(raw, inlining, 0, open_recursion=True)
        used = _find_reachable(uses, _find_uses(inlined)) & recursive
        kept = {name: _inline_references(definitions[name], inlining, 0) for name in definitions if name in used}
    except _TooLarge:
        inlined = _inline_references(raw, _Inlining({}, set()), 0)
        kept = {name: _inline_references(each, _Inlining({}, set()), 0) for name, each in definitions.items()}
    return {**inlined, "$defs": kept} if kept else inlined


def unknown_references(schema: Schema) -> set[str]:
    """Return the references of a schema, direct or not, that are missing in its `$defs`."""
    definitions: Schema = schema.get("$defs", {})
    uses = {name: _find_uses(each) for name, each in definitions.items()}
    start = _find_uses({key: value for key, value in schema.items() if key != "$defs"})
    return (start | {each for name in _find_reachable(uses, start) for each in uses[name]}) - definitions.keys()


def without_null(schema: Schema) -> Schema:
    """Return the schema without the alternative null, if it has another one."""
    others = [each for each in schema.get("anyOf", ()) if each != {"type": "null"}]
    if not others or len(others) == len(schema["anyOf"]):
        return schema
    rest = {key: value for key, value in schema.items() if key != "anyOf"}
    return {**others[0], **rest} if len(others) == 1 else {"anyOf": others, **rest}


def admits_null(schema: Mapping[str, Any]) -> bool:
    """Return True if the schema allows null."""
    kinds = schema.get("type")
    if kinds == "null" or (isinstance(kinds, list) and "null" in kinds) or None in schema.get("enum", ()):
        return True
    return any(admits_null(each) for each in schema.get("anyOf", ()))


def with_properties(schema: Mapping[str, Any]) -> Schema:
    """Return the schema of a tool's arguments as servers accept it: an object with `properties`, even without any.

    MCP allows a schema without them, and OpenAI refuses each request that has one.
    """
    kind, properties = schema.get("type"), schema.get("properties")
    if isinstance(kind, str) and isinstance(properties, Mapping):
        return dict(schema)
    found = dict(properties) if isinstance(properties, Mapping) else {}
    return {**schema, "type": kind if isinstance(kind, str) else "object", "properties": found}


# --- the strict form


Optional: TypeAlias = Literal["null", "required", "refused"]
"""What the strict form makes of an optional property: one that may be null, one that is required, or no strict form."""


class NotStrict(Exception):  # noqa: N818 - a reason, not a failure
    """A schema has no strict form; the text says why."""


def strict_parameters(schema: Mapping[str, Any], below: Optional = "refused") -> Schema | None:
    """Return the strict form of tool parameters: all required, optional ones nullable. None if there is none.

    `below` is for optional properties of objects inside of parameters: their types do not accept null.
    """
    try:
        return strict_form(schema, "null", below)
    except NotStrict:
        return None


def strict_output(schema: Mapping[str, Any]) -> Schema | None:
    """Return the strict form of an output schema without optional properties, or None if there is none."""
    try:
        return strict_form(schema, "refused", "refused")
    except NotStrict:
        return None


_STRICT_KEYWORDS = frozenset({"type", "enum", "const", "description", "properties", "required", "additionalProperties"})
_STRICT_KEYWORDS |= {"items", "minItems", "maxItems", "anyOf", "$ref", "$defs", "format", "pattern"}
_STRICT_KEYWORDS |= {"multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
# Removed: servers reject these keywords, and the program validates the arguments anyway.
_STRICT_LEFT_OUT = frozenset({"minLength", "maxLength", "examples", "deprecated", "readOnly", "writeOnly", *_NOISE})
_STRICT_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"})
_STRICT_DEPTH = 10
_STRICT_PROPERTIES = 5000


def strict_form(schema: Mapping[str, Any], optional: Optional = "required", below: Optional = "required") -> Schema:
    """Return the form of an object's schema that servers can enforce. Raises `NotStrict`.

    `optional` says what becomes of the optional properties, `below` of those of objects inside of it.
    """
    if schema.get("type") != "object":
        raise NotStrict("it is not an object")
    strict = _make_strict(schema, optional, below, 1)
    if sum(1 for _ in _name_properties(strict)) > _STRICT_PROPERTIES:
        raise NotStrict(f"it has more than {_STRICT_PROPERTIES} properties")
    return strict


def _make_strict(schema: Mapping[str, Any], optional: Optional, below: Optional, depth: int) -> Schema:
    if "oneOf" in schema:
        schema = {("anyOf" if key == "oneOf" else key): value for key, value in schema.items()}
    kept = {key: value for key, value in schema.items() if key in _STRICT_KEYWORDS}
    if unknown := sorted(schema.keys() - _STRICT_KEYWORDS - _STRICT_LEFT_OUT):
        raise NotStrict(f"it uses {', '.join(unknown)}")
    if not kept.keys() - {"description"}:
        raise NotStrict("it has a value of any type")
    if kept.get("format") not in _STRICT_FORMATS:
        kept.pop("format", None)
    if "(?" in kept.get("pattern", ""):
        del kept["pattern"]
    if kept.get("type") == "object":
        if depth > _STRICT_DEPTH:
            raise NotStrict(f"it has more than {_STRICT_DEPTH} levels")
        # Without properties, an object may contain anything, unless it says that it does not.
        if kept.get("additionalProperties", "properties" not in kept) is not False:
            raise NotStrict("it has an object whose keys are not known")
        kept["properties"] = dict(_make_strict_properties(kept, optional, below, depth))
        kept["required"] = list(kept["properties"])
        kept["additionalProperties"] = False
    elif kept.get("type") == "array" and "items" not in kept:
        raise NotStrict("it has a list of values of any type")
    change = functools.partial(_make_strict, optional=below, below=below, depth=depth + 1)
    for key in ("anyOf", "items", "$defs"):
        if key in kept:
            kept[key] = _change_each(kept[key], key, change)
    return kept


def _make_strict_properties(
    schema: Schema, optional: Optional, below: Optional, depth: int
) -> Iterator[tuple[str, Schema]]:
    required = schema.get("required", ())
    for name, each in (schema.get("properties") or {}).items():
        strict = _make_strict(each, below, below, depth + 1)
        if name in required or admits_null(strict) or optional == "required":
            yield name, strict
        elif optional == "null":
            yield name, allow_null(strict)
        else:  # the type rejects null, and the server rejects a missing property
            raise NotStrict(f"its property {name!r} is optional")


def allow_null(schema: Schema) -> Schema:
    """Return the schema of a value that may also be null."""
    if isinstance(schema.get("type"), str) and not schema.keys() & {"enum", "const"}:
        return {**schema, "type": [schema["type"], "null"]}
    description = {"description": schema["description"]} if "description" in schema else {}
    rest = {key: value for key, value in schema.items() if key != "description"}
    alternatives = rest.get("anyOf")
    branches = alternatives if isinstance(alternatives, list) and len(rest) == 1 else [rest]
    return {"anyOf": [*branches, {"type": "null"}], **description}


def _name_properties(schema: Any) -> Iterator[str]:
    for below in _find_nested(schema):
        yield from _name_properties(below)
    yield from schema.get("properties", ()) if isinstance(schema, dict) else ()


# --- walking


def _change_each(value: Any, key: str, change: Callable[[Any], Any]) -> Any:
    """Return the value of `key` with `change` applied to each schema in it."""
    if key in _BY_NAME and isinstance(value, dict):
        return {name: change(each) for name, each in value.items()}
    if isinstance(value, list) and (key in _LISTED or key in _SINGLE):
        return [change(each) for each in value]
    return change(value) if key in _SINGLE and isinstance(value, dict) else value


def _find_nested(schema: Any) -> Iterator[Any]:
    found: list[Any] = []
    for key, value in schema.items() if isinstance(schema, dict) else ():
        _change_each(value, key, found.append)
    return iter(found)


def _find_uses(schema: Any) -> set[str]:
    """Return the names of the definitions that a schema refers to directly."""
    used: set[str] = set()
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict) and isinstance(reference := each.get("$ref"), str):
            used.add(definition_name(reference))
        waiting += _find_nested(each)
    return used


def _find_reachable(uses: Mapping[str, set[str]], start: set[str]) -> set[str]:
    """Return the definitions of `start` and all definitions that they refer to, directly or not."""
    reached: set[str] = set()
    waiting = list(start)
    while waiting:
        name = waiting.pop()
        if name in uses and name not in reached:
            reached.add(name)
            waiting += uses[name]
    return reached


def _find_recursive(uses: Mapping[str, set[str]]) -> set[str]:
    """Return the definitions that refer to themselves, directly or not, and those on a path between two of them."""
    users: dict[str, set[str]] = {name: set() for name in uses}
    for name, used in uses.items():
        for each in used:
            users[each].add(name)
    left = set(uses)
    for ahead, back in ((uses, users), (users, uses)):
        open_ends = {name: len(ahead[name] & left) for name in left}
        waiting = [name for name, count in open_ends.items() if not count]
        while waiting:
            name = waiting.pop()
            left.discard(name)
            for each in back[name] & left:
                open_ends[each] -= 1
                if not open_ends[each]:
                    waiting.append(each)
    return left


class _TooLarge(Exception):  # noqa: N818 - never leaves this module
    """A schema would become too long or too deep with its definitions inlined."""


class _Inlining:
    """The definitions to inline, the recursive ones, and the number of characters left."""

    def __init__(self, definitions: Schema, recursive: set[str]) -> None:
        self.definitions, self.recursive = definitions, recursive
        self._left = INLINED_LIMIT if definitions else None

    def write_schema(self, schema: Schema) -> None:
        """Count the characters of a schema without nested schemas. Raises `_TooLarge`."""
        if self._left is None:
            return
        for key, value in schema.items():
            self._left -= len(key) + (0 if key in _HOLDING_SCHEMAS else len(str(value)))
        if self._left < 0:
            raise _TooLarge


def _inline_references(schema: Any, inlining: _Inlining, followed: int, *, open_recursion: bool = False) -> Any:
    """Return `schema` with its references inlined; recursive types once, if `open_recursion`.

    `followed` counts the references on the path to this schema.
    """
    if not isinstance(schema, dict):
        return schema
    reference = schema.get("$ref")
    name = definition_name(reference) if isinstance(reference, str) else None
    if name in inlining.definitions and (name not in inlining.recursive or open_recursion):
        if followed >= _DEEPEST:
            raise _TooLarge
        nearer = {key: value for key, value in schema.items() if key != "$ref"}
        target = inlining.definitions[name]
        target = target if isinstance(target, dict) else {}
        open_below = open_recursion and name not in inlining.recursive
        return _inline_references({**target, **nearer}, inlining, followed + 1, open_recursion=open_below)
    inlining.write_schema(schema)
    below = functools.partial(_inline_references, inlining=inlining, followed=followed, open_recursion=open_recursion)
    return {key: _change_each(value, key, below) for key, value in schema.items() if not _is_noise(key, value)}


def definition_name(reference: str) -> str:
    """Return the definition name of a `$ref`."""
    return decode_pointer_part(reference.removeprefix(DEFINITION))


def decode_pointer_part(part: str) -> str:
    """Return a part of a JSON pointer in a `$ref`, with the escapes of URLs and pointers resolved."""
    return unquote(part).replace("~1", "/").replace("~0", "~") if "%" in part or "~" in part else part


def _is_noise(key: str, value: object) -> bool:
    return key in _NOISE or (key == "additionalProperties" and value is True)


@functools.cache
def _make_generators() -> tuple[type[GenerateJsonSchema], type[GenerateJsonSchema]]:
    """Return the generators of schemas without and with the names of enums."""
    from pydantic.json_schema import GenerateJsonSchema
    from pydantic_core import to_jsonable_python

    class ModelReadable(GenerateJsonSchema):
        """Keeps the docstring of a named tuple, as pydantic does for other classes."""

        def named_tuple_schema(self, schema: Any) -> Schema:
            made = super().named_tuple_schema(schema)
            named = schema.get("cls")
            text = inspect.cleandoc(getattr(named, "__doc__", None) or "")
            if text and not text.startswith(f"{getattr(named, '__name__', '')}("):
                made = {"description": text, **made}
            return made

    class WithNames(ModelReadable):
        """Adds the names of an enum's members."""

        def enum_schema(self, schema: Any) -> Schema:
            members = schema["cls"].__members__.items()
            names = {name: to_jsonable_python(member.value, fallback=str) for name, member in members}
            return {**super().enum_schema(schema), MEMBER_NAMES: names}

    return ModelReadable, WithNames
