"""What a tool returns as MCP's structured content: its output schema, and each value as that schema says.

Not here: the text of a result, which every client reads (`tools.codec`), answering a call (`serving`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, get_args, get_origin

from ..chat import ImageContent, TextContent, ToolExecutionResult
from ..signatures import EMPTY, Unresolved
from ..tools.codec import awaited
from ..tools.pipeline import Tool

if TYPE_CHECKING:
    from pydantic import TypeAdapter

# A text is what it is, and the other types say themselves what a model reads.
_WITHOUT_STRUCTURE = (str, None, type(None), Any, object, EMPTY)
_CONTENTS = (TextContent, ImageContent, ToolExecutionResult)
_REFERENCE = "#/$defs/"
_WRAPPED = "result"


class StructuredOutput:
    """The structured form of one tool's results.

    `schema` is that of an object, as the protocol demands: another value is the field `result` of one.
    """

    def __init__(self, adapter: TypeAdapter[Any], schema: dict[str, Any]) -> None:
        from jsonschema.validators import Draft202012Validator  # type: ignore[import-untyped]  # it has no types

        schema = _root(schema)
        self._is_wrapped = schema.get("type") != "object"
        if self._is_wrapped:
            definitions = schema.pop("$defs", None)
            schema = {"type": "object", "properties": {_WRAPPED: schema}, "required": [_WRAPPED]}
            if definitions is not None:
                schema["$defs"] = definitions
        self.schema = schema
        self._serializer: Any = adapter.serializer
        self._validator = Draft202012Validator(schema)

    @classmethod
    def of(cls, tool: Tool) -> StructuredOutput | None:
        """Return the form that a tool's return annotation gives, or None where it says nothing more than a text."""
        from pydantic import TypeAdapter

        returns = awaited(tool.returns)
        if hasattr(get_origin(returns) or returns, "__tool_value__"):  # a `Result[T]` stands for its T
            (returns,) = get_args(returns) or (EMPTY,)
        if (
            isinstance(returns, Unresolved)
            or returns in _WITHOUT_STRUCTURE
            or any(map(_is_content, _types_in(returns)))
        ):
            return None
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(returns)
            return cls(adapter, adapter.json_schema(mode="serialization"))
        except Exception:  # a type that pydantic does not know or cannot describe; its values are texts
            return None

    def value(self, value: Any) -> dict[str, Any]:
        """Return a value as the schema says. Raises when it does not match the schema."""
        encoded = self._serializer.to_json(value, warnings=False, by_alias=True, polymorphic_serialization=True)
        plain = json.loads(encoded)
        structured: dict[str, Any] = {_WRAPPED: plain} if self._is_wrapped else plain
        self._validator.validate(structured)
        return structured


def _types_in(annotation: Any) -> Iterator[Any]:
    yield annotation
    for each in get_args(annotation):
        yield from _types_in(each)


def _is_content(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, _CONTENTS)


def _root(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with its root written out: of a recursive type it is only a reference."""
    reference = schema.get("$ref", "")
    if not reference.startswith(_REFERENCE):
        return dict(schema)
    definitions = schema["$defs"]
    return {**definitions[reference.removeprefix(_REFERENCE)], "$defs": definitions}
