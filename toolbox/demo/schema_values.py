"""JSON schemas as models are sent them: whether a value fits, what an example would be.

Not here: making a schema of a Python type (`tools.specification`), validating what a user's code is given (pydantic).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

Schema: TypeAlias = Mapping[str, Any]


def resolved(schema: object, root: Schema) -> Schema:
    """`schema` without its `$ref`, which is looked up in `root`; what is no schema, or refers in a circle, is empty."""
    for _ in range(20):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        target: object = root
        for part in reference.removeprefix("#").strip("/").split("/"):
            target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        schema = target
    return {}


def types_of(schema: Schema) -> tuple[str, ...]:
    """What `type` says, as a tuple; empty when it says nothing."""
    kind = schema.get("type")
    return (kind,) if isinstance(kind, str) else tuple(kind) if isinstance(kind, list) else ()


def branches(schema: Schema) -> Sequence[object]:
    """The alternatives of a schema that has some."""
    found = schema.get("anyOf") or schema.get("oneOf")
    return found if isinstance(found, list) else ()


def fits(value: object, schema: object, root: Schema) -> bool:
    """Whether `value` is valid, by the keywords that the schemas of tool parameters use."""
    schema = resolved(schema, root)
    if "const" in schema and not _same(value, schema["const"]):
        return False
    if "enum" in schema and not any(_same(value, each) for each in schema["enum"]):
        return False
    if (kinds := types_of(schema)) and not any(_TYPES.get(kind, _never)(value) for kind in kinds):
        return False
    if (found := branches(schema)) and not any(fits(value, each, root) for each in found):
        return False
    if not all(fits(value, each, root) for each in schema.get("allOf", ())):
        return False
    match value:
        case str():
            return _string_fits(value, schema)
        case bool() | None:
            return True
        case int() | float():
            return _number_fits(value, schema)
        case list():
            return _list_fits(value, schema, root)
        case dict():
            return _object_fits(value, schema, root)
    return False


def example(schema: object, root: Schema, fill: Callable[[str | None, Schema], object], name: str | None = None) -> Any:
    """A value of `schema`; each scalar is `fill(property name, its schema)` if that fits, else the plainest value."""
    schema = resolved(schema, root)
    if alternatives := branches(schema):
        chosen = next((each for each in alternatives if types_of(resolved(each, root)) != ("null",)), alternatives[0])
        return example(chosen, root, fill, name)
    kinds = types_of(schema)
    if "object" in kinds or "properties" in schema:
        required = schema.get("required", ())
        properties = schema.get("properties", {})
        return {key: example(each, root, fill, key) for key, each in properties.items() if key in required}
    filled = fill(name, schema)
    if filled is not None and fits(filled, schema, root):
        return filled
    if "array" in kinds:
        return [example(schema["items"], root, fill, name)] if "items" in schema else []
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    return next((_PLAINEST[kind] for kind in kinds if kind in _PLAINEST), "")


def schema_in(text: str) -> dict[str, Any] | None:
    """The JSON schema that a prompt shows the model, if it shows one."""
    decoder = json.JSONDecoder()
    for start in re.finditer(r"\{", text):
        try:
            value, _ = decoder.raw_decode(text, start.start())
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and ("properties" in value or "$defs" in value or "enum" in value):
            return value
    return None


_PLAINEST: dict[str, Any] = {"string": "", "integer": 0, "number": 0, "boolean": False, "null": None, "array": []}


def _never(_: object) -> bool:
    return False


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_TYPES: dict[str, Callable[[object], bool]] = {
    "string": lambda value: isinstance(value, str),
    "number": _is_number,
    "integer": lambda value: _is_number(value) and value == int(value),  # type: ignore[call-overload]  # a number
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def _same(left: object, right: object) -> bool:
    return left == right and isinstance(left, bool) == isinstance(right, bool)


def _within(size: float, schema: Schema, least: str, most: str) -> bool:
    low, high = schema.get(least), schema.get(most)
    return not ((_is_number(low) and size < low) or (_is_number(high) and size > high))  # type: ignore[operator]  # numbers


def _string_fits(value: str, schema: Schema) -> bool:
    if not _within(len(value), schema, "minLength", "maxLength"):
        return False
    pattern = schema.get("pattern")
    try:
        if isinstance(pattern, str) and not re.search(pattern, value):
            return False
    except re.error:
        pass  # a pattern of another dialect says nothing here
    form = _FORMATS.get(str(schema.get("format")))
    return form is None or form.fullmatch(value) is not None


_FORMATS = {
    "date": re.compile(r"\d{4}-\d{2}-\d{2}"),
    "date-time": re.compile(r"\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}.*"),
    "time": re.compile(r"\d{2}:\d{2}.*"),
    "email": re.compile(r"[^@\s]+@[^@\s]+"),
    "uuid": re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"),
    "uri": re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*:\S+"),
    "duration": re.compile(r"-?P.+"),
}


def _number_fits(value: float, schema: Schema) -> bool:
    if not _within(value, schema, "minimum", "maximum"):
        return False
    low, high = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if (_is_number(low) and value <= low) or (_is_number(high) and value >= high):  # type: ignore[operator]  # numbers
        return False
    step = schema.get("multipleOf")
    return not (_is_number(step) and step and value % step)


def _list_fits(value: list[Any], schema: Schema, root: Schema) -> bool:
    items = schema.get("items")
    return _within(len(value), schema, "minItems", "maxItems") and (
        not isinstance(items, Mapping) or all(fits(each, items, root) for each in value)
    )


def _object_fits(value: dict[str, Any], schema: Schema, root: Schema) -> bool:
    properties = schema.get("properties", {})
    if any(name not in value for name in schema.get("required", ())):
        return False
    others = schema.get("additionalProperties", True)
    for name, each in value.items():
        if name in properties:
            if not fits(each, properties[name], root):
                return False
        elif others is False or (isinstance(others, Mapping) and not fits(each, others, root)):
            return False
    return True


def values_named(name: str, value: object) -> Iterator[object]:
    """What stands under `name` in `value`, at any depth of objects and lists, the shallowest first."""
    level = [value]
    while level:
        below: list[object] = []
        for each in level:
            if isinstance(each, dict):
                if name in each:
                    yield each[name]
                below += each.values()
            elif isinstance(each, list):
                below += each
        level = below
