"""The output schema of a served tool, and its results as structured content.

Not here: offering tools to MCP clients (`serving`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, get_args, get_origin

from ..chat import ToolExecutionResult
from ..contents import CONTENT_TYPES
from ..introspection import EMPTY, Unresolved
from ..json_text import written_by
from ..tools.results import awaited
from ..tools.tool_calls import Tool

if TYPE_CHECKING:
    from pydantic import TypeAdapter


# Types without structured content: plain text needs no schema, and the others already define what the model reads.
_TEXT_TYPES = (str, None, type(None), Any, object, EMPTY)
_CONTENT_TYPES = (*CONTENT_TYPES, ToolExecutionResult)
_DEFINITIONS = "#/$defs/"
_WRAPPER_FIELD = "result"


class StructuredOutput:
    """Output schema and structured content of one tool.

    MCP requires an object: any other value is wrapped as `{"result": …}`.
    """

    def __init__(self, adapter: TypeAdapter[Any], schema: dict[str, Any]) -> None:
        from jsonschema.validators import Draft202012Validator  # type: ignore[import-untyped]  # no type hints

        schema = _resolve_root(schema)
        self._is_wrapped = schema.get("type") != "object"
        if self._is_wrapped:
            definitions = schema.pop("$defs", None)
            schema = {"type": "object", "properties": {_WRAPPER_FIELD: schema}, "required": [_WRAPPER_FIELD]}
            if definitions is not None:
                schema["$defs"] = definitions
        self.schema = schema
        self._serializer: Any = adapter.serializer
        self._validator = Draft202012Validator(schema)

    @classmethod
    def of(cls, tool: Tool) -> StructuredOutput | None:
        """Return the structured output for a tool's return annotation, or None if a text is enough."""
        from pydantic import TypeAdapter

        returns = awaited(tool.returns)
        if hasattr(get_origin(returns) or returns, "__tool_value__"):  # `Result[T]` counts as T
            (returns,) = get_args(returns) or (EMPTY,)
        if isinstance(returns, Unresolved) or returns in _TEXT_TYPES or any(map(_is_content, _nested_types(returns))):
            return None
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(returns)
            return cls(adapter, adapter.json_schema(mode="serialization"))
        except Exception:  # pydantic does not support the type or has no schema for it: send text only
            return None

    def value(self, value: Any) -> dict[str, Any]:
        """Return a value as structured content. Raises if it does not match the schema."""
        encoded = written_by(self._serializer, value, warnings=False, by_alias=True, polymorphic_serialization=True)
        plain = json.loads(encoded)
        structured: dict[str, Any] = {_WRAPPER_FIELD: plain} if self._is_wrapped else plain
        self._validator.validate(structured)
        return structured


def _nested_types(annotation: Any) -> Iterator[Any]:
    yield annotation
    for each in get_args(annotation):
        yield from _nested_types(each)


def _is_content(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, _CONTENT_TYPES)


def _resolve_root(schema: dict[str, Any]) -> dict[str, Any]:
    """Replace a reference at the schema's root, as recursive types have, by the definition."""
    reference = schema.get("$ref", "")
    if not reference.startswith(_DEFINITIONS):
        return dict(schema)
    definitions = schema["$defs"]
    return {**definitions[reference.removeprefix(_DEFINITIONS)], "$defs": definitions}
