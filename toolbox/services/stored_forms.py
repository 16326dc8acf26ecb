"""How the data of a call is stored: pydantic writes and reads data classes whose field types say how.

Includes the forms of requests, replies and executions. Not here: messages and JSON text (`transcripts`), the data
classes themselves (`state`, and `documents` of runs).
"""

# Pydantic turns a data class into a dictionary of Python values and back. `json` turns the dictionary into text: the
# JSON of pydantic would have null for NaN and lists for sets, and refuse half a surrogate and more than 255 levels.
#
# What models and tools have made is written and read by functions: a message has a "type" and no empty fields, and the
# value that a tool returned may have no JSON form. Pydantic could only learn that from annotations at the public
# classes of `chat`, and these would also apply to messages in a program's own models.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from functools import cache
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic_core import CoreSchema, core_schema

from ..chat import (
    AiMessage,
    ChatResponse,
    FinishReason,
    Message,
    SystemMessage,
    TokenUsage,
    ToolExecution,
    UserMessage,
)
from ..errors import TranscriptError
from ..limits import Usage
from ..tools.results import json_values
from ..transcripts import Json, message_from_dict, message_to_dict, request_from_dict, request_to_dict

T = TypeVar("T")


# --- data classes


def fields_to_dict(value: Any) -> Json:
    """Return the fields of a data class as they are stored, without a version."""
    written: Json = adapter_of(type(value)).dump_python(value, warnings=False)
    return written


def fields_from_dict(kind: type[T], written: Any) -> T:
    """Return the data class that `fields_to_dict` wrote. Fields that it does not know are of a later release.

    Raises `TranscriptError`, which names the place.
    """
    try:
        read: T = adapter_of(kind).validate_python(written)
    except ValidationError as error:
        raise _first_fault(error) from error
    return read


@cache
def _cached_adapter(annotation: Any) -> TypeAdapter[Any]:
    return TypeAdapter(annotation)


def adapter_of(annotation: Any) -> Any:
    """Return pydantic's adapter for a type. Raises whatever pydantic raises for types that it does not know."""
    try:
        return _cached_adapter(annotation)
    except TypeError:  # an annotation that cannot be hashed
        return TypeAdapter(annotation)


def _first_fault(error: ValidationError) -> TranscriptError:
    fault = error.errors(include_url=False, include_input=False)[0]
    place = [*map(str, fault["loc"])]
    cause = fault.get("ctx", {}).get("error")
    if not isinstance(cause, TranscriptError):
        return TranscriptError(".".join(place), fault["msg"])
    return TranscriptError(".".join([*place, cause.path] if cause.path else place), cause.what)


# --- types of fields


@dataclass(frozen=True, slots=True)
class StoredForm:
    """Stores a field as `write` returns it, and reads it with `read`: `Annotated[Message, StoredForm(…, …)]`."""

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, kind: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of the field, for pydantic."""

        def read_field(written: Any) -> Any:
            try:
                value = self.read(written)
            except (KeyError, TypeError) as error:
                raise ValueError(repr(error)) from error
            return _refuse_other_kind(kind, value, "") if isinstance(kind, type) else value

        # What `write` returns stays as it is, because this converts values only for pydantic's own JSON. Pydantic would
        # else turn objects in attributes into dictionaries, where an error tells the caller that they are not JSON.
        as_it_is = core_schema.any_schema(serialization=core_schema.to_string_ser_schema(when_used="json"))
        writing = core_schema.plain_serializer_function_ser_schema(self.write, return_schema=as_it_is)
        return core_schema.no_info_plain_validator_function(read_field, serialization=writing)


def _refuse_other_kind(kind: type[T], value: object, path: str) -> T:
    if not isinstance(value, kind):
        raise TranscriptError(path, f"expected {kind.__name__}, got {type(value).__name__}")
    return value


def response_to_dict(response: ChatResponse) -> Json:
    """Return a reply as a dictionary of JSON values."""
    others = {name: getattr(response, name) for name in ChatResponse.__slots__}
    usage = None if response.token_usage is None else fields_to_dict(response.token_usage)
    return {**others, "ai_message": message_to_dict(response.ai_message), "token_usage": usage}


def response_from_dict(written: Any) -> ChatResponse:
    """Return the reply that `response_to_dict` wrote."""
    message, usage, reason = written["ai_message"], written["token_usage"], written["finish_reason"]
    known = {
        "ai_message": _refuse_other_kind(AiMessage, message_from_dict(message, "ai_message"), "ai_message"),
        "token_usage": None if usage is None else fields_from_dict(TokenUsage, usage),
        "finish_reason": None if reason is None else FinishReason(reason),
    }
    return ChatResponse(**{**_known_fields(written, ChatResponse), **known})


def usage_to_dict(usage: Usage) -> Json:
    """Return what a call with limits has used as JSON values."""
    tokens = fields_to_dict(usage.tokens)
    cost = None if usage.cost is None else str(usage.cost)
    return {"model_calls": usage.model_calls, "tool_calls": usage.tool_calls, "tokens": tokens, "cost": cost}


def usage_from_dict(written: Any) -> Usage:
    """Return the usage that `usage_to_dict` wrote."""
    cost = None if written["cost"] is None else Decimal(written["cost"])
    return Usage(written["model_calls"], written["tool_calls"], fields_from_dict(TokenUsage, written["tokens"]), cost)


def execution_to_dict(execution: ToolExecution) -> Json:
    """Return an execution as a dictionary of JSON values; a `result_object` without a JSON form becomes None."""
    try:
        value = json_values(execution.result_object)
    except Exception:  # any exception of the value's own serializers
        value = None
    others = {name: getattr(execution, name) for name in ToolExecution.__slots__}
    known = {"request": request_to_dict(execution.request), "started_at": execution.started_at.isoformat()}
    mappings = {"attributes": dict(execution.attributes), "arguments": dict(execution.arguments)}
    return {**others, **known, "result_object": value, **mappings}


def execution_from_dict(written: Any) -> ToolExecution:
    """Return the execution that `execution_to_dict` wrote."""
    known = {
        "request": request_from_dict(written["request"], "request"),
        "started_at": datetime.fromisoformat(written["started_at"]),
    }
    return ToolExecution(**{**_known_fields(written, ToolExecution), **known})


def _known_fields(written: Json, kind: type[Any]) -> Json:
    """Return the fields that `kind` has. Others are of a later release."""
    return {name: written[name] for name in kind.__slots__ if name in written}


_MESSAGE = StoredForm(message_to_dict, message_from_dict)

StoredMessage: TypeAlias = Annotated[Message, _MESSAGE]
StoredSystemMessage: TypeAlias = Annotated[SystemMessage, _MESSAGE]
StoredUserMessage: TypeAlias = Annotated[UserMessage, _MESSAGE]
StoredResponse: TypeAlias = Annotated[ChatResponse, StoredForm(response_to_dict, response_from_dict)]
StoredExecution: TypeAlias = Annotated[ToolExecution, StoredForm(execution_to_dict, execution_from_dict)]
