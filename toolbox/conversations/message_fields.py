"""Messages as fields of what pydantic reads and writes, such as the responses of endpoints.

Not here: the form of a message (`toolbox.transcripts`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from ..chat import Message
from ..transcripts import Json, message_from_dict, message_to_dict

if TYPE_CHECKING:
    from pydantic_core import CoreSchema


class AsTranscript:
    """Lets pydantic write and read a message in the form of `toolbox.transcripts`: `Annotated[Message, …]`.

    Its own form does not say which message it is, and fails for bytes and for half a character.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        """Return the schema."""
        from pydantic_core import core_schema

        writing = core_schema.plain_serializer_function_ser_schema(_write_for_clients)
        return core_schema.no_info_plain_validator_function(_read_given, serialization=writing)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> Json:
        """Return the JSON schema."""
        return {"oneOf": [_schema_of(kind) for kind in _FIELDS]}


def _read_given(value: Any) -> Message:
    return value if isinstance(value, get_args(Message)) else message_from_dict(value)


def _write_for_clients(message: Message) -> Any:
    from ..json_text import whole_json  # late: programs without such models do not need it

    return json.loads(whole_json(message_to_dict(message)))


_OBJECTS: Json = {"type": "array", "items": {"type": "object", "additionalProperties": True}}
_SCHEMAS_OF_FIELDS: Mapping[str, Json] = {
    "contents": _OBJECTS,
    "tool_execution_requests": _OBJECTS,
    "is_error": {"type": "boolean"},
    "attributes": {"type": "object", "additionalProperties": True},
}
_FIELDS: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "system": (["text"], ["role", "name", "attributes"]),
    "user": (["contents"], ["name", "attributes"]),
    "ai": ([], ["text", "tool_execution_requests", "reasoning", "name", "attributes"]),
    "tool_result": (["id", "tool_name", "text"], ["is_error", "contents", "attributes"]),
}
"""The required and the optional fields of each message; those that are not in `_SCHEMAS_OF_FIELDS` are texts."""


def _schema_of(kind: str) -> Json:
    required, optional = _FIELDS[kind]
    properties = {name: _SCHEMAS_OF_FIELDS.get(name, {"type": "string"}) for name in (*required, *optional)}
    properties = {"type": {"const": kind, "type": "string"}, **properties}
    return {"type": "object", "title": kind, "properties": properties, "required": ["type", *required]}
