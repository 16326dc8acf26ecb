"""Converts the schemas of an OpenAPI document to one dialect of JSON Schema, and finds the properties they declare.

Not here: schemas of Python types, and their form for models (`schemas`); validating arguments (`arguments`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..schemas import DEFINITION, Schema, allow_null, definition_name

_COMPONENT = "#/components/schemas/"
_BY_NAME = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs"})
_VERBATIM = frozenset({"enum", "const", "required", "type", "examples"})
# Keywords that only OpenAPI has, and those that name parts of a schema: documents could use them to mislead.
# jsonschema would match unevaluated properties with Python's regular expressions, which a pattern can block.
_LEFT_OUT = frozenset(
    {"nullable", "xml", "externalDocs", "example", "discriminator", "deprecated", "unevaluatedProperties"}
)
_LEFT_OUT |= {"$id", "$schema", "$anchor", "$comment", "$vocabulary", "$dynamicRef", "$dynamicAnchor", "$recursiveRef"}


def request_schema(schema: Mapping[str, Any]) -> Schema:
    """Return the JSON schema of a sent value; read-only properties are omitted."""
    converted: Schema = _convert_schema(schema)
    return converted


def declared_properties(schema: object, definitions: Mapping[str, Any]) -> set[str]:
    """Return the names of all properties of a schema, also in its references and alternatives."""
    declared: set[str] = set()
    seen: set[str] = set()
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if not isinstance(each, Mapping):
            continue
        properties = each.get("properties")
        declared.update(properties if isinstance(properties, Mapping) else ())
        for key in ("allOf", "anyOf", "oneOf"):
            waiting += each[key] if isinstance(each.get(key), list) else ()
        reference = each.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            waiting.append(definitions.get(definition_name(reference)))
    return declared


def _convert_schema(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_convert_schema(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    converted: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str):
            converted[key] = value.replace(_COMPONENT, DEFINITION, 1)
        elif key in _BY_NAME and isinstance(value, Mapping):
            converted[key] = {name: _convert_schema(each) for name, each in value.items() if not _is_read_only(each)}
        elif key not in _LEFT_OUT:
            converted[key] = value if key in _VERBATIM else _convert_schema(value)
    if "required" in converted and "properties" in converted:
        converted["required"] = [name for name in converted["required"] if name in converted["properties"]]
    _convert_bounds(converted)
    return allow_null(converted) if schema.get("nullable") is True else converted


def _is_read_only(schema: object) -> bool:
    return isinstance(schema, Mapping) and schema.get("readOnly") is True


def _convert_bounds(schema: dict[str, Any]) -> None:
    """Convert exclusive bounds of OpenAPI 3.0, which are flags next to the bound."""
    for flag, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(schema.get(flag), bool) and schema.pop(flag) and bound in schema:
            schema[flag] = schema.pop(bound)
