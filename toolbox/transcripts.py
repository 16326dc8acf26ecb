"""Writes messages and tool specifications as JSON, and reads them again, for memory stores, logs and other programs.

The format has a version, and texts of earlier versions stay readable. Not here: the wire formats of model servers
(`models`).
"""

# These fields are written and read by hand, unlike those of states and documents of runs (`stored_forms`). Their form
# is not that of the classes: a message has a "type" and no empty fields, and bytes have another name than base64.
# Pydantic could only learn that from annotations at public classes, which would also apply to messages in a program's
# own models. And it is not strict enough for texts from outside: it reads "yes" as True, and writes objects as
# dictionaries.

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, assert_never

from .chat import (
    AiMessage,
    Message,
    SystemMessage,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    ToolSpecification,
    UserMessage,
)
from .contents import AudioContent, Content, ImageContent, PdfContent, TextContent, stored_content
from .errors import TranscriptError
from .safe_text import brief

__all__ = [
    "TranscriptError",
    "messages_from_json",
    "messages_to_json",
    "specification_from_json",
    "specification_to_json",
]

Json: TypeAlias = dict[str, Any]

VERSION = 1


def messages_to_json(messages: Iterable[Message]) -> str:
    """Return a conversation as JSON text.

    Raises `TranscriptError` if an attribute is not a JSON value.
    """
    return write_json({"version": VERSION, "messages": [message_to_dict(each) for each in messages]})


def messages_from_json(text: str | bytes) -> tuple[Message, ...]:
    """Return the messages in a text that `messages_to_json` wrote. Raises `TranscriptError` if it is invalid."""
    written = read_json(text)
    found = read_field(written, "messages", list, "")
    return tuple(message_from_dict(each, f"messages.{number}") for number, each in enumerate(found))


def specification_to_json(specification: ToolSpecification) -> str:
    """Return a tool specification as JSON text. Raises `TranscriptError` if a value is not a JSON value."""
    return write_json({"version": VERSION, **specification_to_dict(specification)})


def specification_from_json(text: str | bytes) -> ToolSpecification:
    """Return the tool specification in a text that `specification_to_json` wrote. Raises `TranscriptError`."""
    return specification_from_dict(read_json(text))


# --- messages


def message_to_dict(message: Message) -> Json:
    """Return one message as a dictionary of JSON values, without empty fields and without a version."""
    match message:
        case SystemMessage(text, role, name, attributes):
            about: Json = {} if role == "system" else {"role": role}
            return {"type": "system", "text": text, **about, **_name_to_dict(name), **_attributes_to_dict(attributes)}
        case UserMessage(contents, name, attributes):
            parts = [content_to_dict(each) for each in contents]
            return {"type": "user", "contents": parts, **_name_to_dict(name), **_attributes_to_dict(attributes)}
        case AiMessage(text, requests, reasoning, attributes, name):
            calls = [request_to_dict(each) for each in requests]
            fields: Json = {"text": text, "tool_execution_requests": calls, "reasoning": reasoning}
            return {"type": "ai", **_remove_empty(fields), **_name_to_dict(name), **_attributes_to_dict(attributes)}
        case ToolExecutionResultMessage(id, tool_name, text, is_error, attributes, contents):
            more: Json = {"is_error": is_error, "contents": [content_to_dict(each) for each in contents]}
            required = {"type": "tool_result", "id": id, "tool_name": tool_name, "text": text}
            return {**required, **_remove_empty(more), **_attributes_to_dict(attributes)}
    raise TranscriptError("", f"expected a message, got {type(message).__name__}")


def message_from_dict(written: Any, path: str = "") -> Message:
    """Return the message that `message_to_dict` wrote.

    `path` is its place in a larger document, for errors. Raises `TranscriptError` if it is invalid.
    """
    kind = read_field(written, "type", str, path)
    read = _READERS.get(kind)
    if read is None:
        raise TranscriptError(
            _join_path(path, "type"), f"unknown message type {brief(kind)!r}; use one of: {', '.join(_READERS)}"
        )
    return read(written, path)


def _read_system(written: Json, path: str) -> Message:
    role = read_field(written, "role", str, path, "system")
    if role not in ("system", "developer"):
        raise TranscriptError(_join_path(path, "role"), f"unknown role {brief(role)!r}; use one of: system, developer")
    return SystemMessage(
        read_field(written, "text", str, path),
        role,
        read_field(written, "name", (str, type(None)), path, None),
        read_field(written, "attributes", dict, path, {}),
    )


def _read_user(written: Json, path: str) -> Message:
    return UserMessage(
        _read_contents(written, path),
        read_field(written, "name", (str, type(None)), path, None),
        read_field(written, "attributes", dict, path, {}),
    )


def _read_ai(written: Json, path: str) -> Message:
    calls = read_field(written, "tool_execution_requests", list, path, [])
    return AiMessage(
        read_field(written, "text", (str, type(None)), path, None),
        [request_from_dict(each, f"{_join_path(path, 'tool_execution_requests')}.{n}") for n, each in enumerate(calls)],
        read_field(written, "reasoning", (str, type(None)), path, None),
        read_field(written, "attributes", dict, path, {}),
        read_field(written, "name", (str, type(None)), path, None),
    )


def _read_tool_result(written: Json, path: str) -> Message:
    return ToolExecutionResultMessage(
        read_field(written, "id", str, path),
        read_field(written, "tool_name", str, path),
        read_field(written, "text", str, path),
        read_field(written, "is_error", bool, path, False),
        read_field(written, "attributes", dict, path, {}),
        _read_contents(written, path),
    )


_READERS: dict[str, Callable[[Json, str], Message]] = {
    "system": _read_system,
    "user": _read_user,
    "ai": _read_ai,
    "tool_result": _read_tool_result,
}


def request_to_dict(request: ToolExecutionRequest) -> Json:
    """Return a tool call as a dictionary of JSON values."""
    fields = {"id": request.id, "name": request.name, "arguments": request.arguments}
    return {**fields, **_attributes_to_dict(request.attributes)}


def request_from_dict(written: Any, path: str = "") -> ToolExecutionRequest:
    """Return the tool call that `request_to_dict` wrote. Raises `TranscriptError` if it is invalid."""
    return ToolExecutionRequest(
        read_field(written, "id", str, path),
        read_field(written, "name", str, path),
        read_field(written, "arguments", str, path),
        read_field(written, "attributes", dict, path, {}),
    )


# --- contents


def content_to_dict(content: Content) -> Json:
    """Return one part of a message as a dictionary of JSON values, without empty fields."""
    match content:
        case TextContent(text):
            return {"type": "text", "text": text}
        case ImageContent(url, data, mime_type, detail):
            more: Json = {"url": url, **_data_to_dict(data), "mime_type": mime_type, "detail": detail}
            return {"type": "image", **_remove_empty(more)}
        case PdfContent(url, data, name):
            return {"type": "pdf", **_remove_empty({"url": url, **_data_to_dict(data), "name": name})}
        case AudioContent(data, mime_type):
            return {"type": "audio", **_data_to_dict(data), "mime_type": mime_type}
        case _:
            assert_never(content)


def _data_to_dict(data: bytes | str | None) -> Json:
    # Two names, so that bytes are read as bytes and base64 text as text.
    return {"bytes": b64encode(data).decode()} if isinstance(data, bytes) else {"base64": data}


def _read_contents(written: Json, path: str) -> list[Content]:
    found = read_field(written, "contents", list, path, [])
    return [content_from_dict(each, f"{_join_path(path, 'contents')}.{number}") for number, each in enumerate(found)]


def content_from_dict(written: Any, path: str = "") -> Content:
    """Return the part that `content_to_dict` wrote. Raises `TranscriptError` if it is invalid."""
    kind = read_field(written, "type", str, path)
    if kind == "text":
        return TextContent(read_field(written, "text", str, path))
    data: Any = read_field(written, "base64", (str, type(None)), path, None)
    if "bytes" in written:
        try:
            data = b64decode(read_field(written, "bytes", str, path), validate=True)
        except ValueError:
            raise TranscriptError(_join_path(path, "bytes"), "invalid base64") from None

    def optional(name: str) -> str | None:
        found: str | None = read_field(written, name, (str, type(None)), path, None)
        return found

    try:
        match kind:
            case "image":
                return stored_content(ImageContent, optional("url"), data, optional("mime_type"), optional("detail"))
            case "pdf":
                return stored_content(PdfContent, optional("url"), data, optional("name"))
            case "audio":
                return AudioContent(data, read_field(written, "mime_type", str, path))
    except ValueError as error:
        raise TranscriptError(path, str(error)) from error
    raise TranscriptError(
        _join_path(path, "type"), f"unknown content type {brief(kind)!r}; use one of: text, image, pdf, audio"
    )


# --- specifications


def specification_to_dict(specification: ToolSpecification) -> Json:
    """Return a tool specification as a dictionary of JSON values, without a version."""
    more = {"description": specification.description, "metadata": dict(specification.metadata)}
    strict = {} if specification.strict is None else {"strict": specification.strict}
    return {"name": specification.name, **_remove_empty(more), "parameters": dict(specification.parameters), **strict}


def specification_from_dict(written: Any, path: str = "") -> ToolSpecification:
    """Return the tool specification that `specification_to_dict` wrote. Raises `TranscriptError` if it is invalid."""
    return ToolSpecification(
        read_field(written, "name", str, path),
        read_field(written, "description", (str, type(None)), path, None),
        read_field(written, "parameters", dict, path),
        read_field(written, "metadata", dict, path, {}),
        read_field(written, "strict", (bool, type(None)), path, None),
    )


# --- JSON

_REQUIRED = object()


def read_field(written: Any, name: str, kind: type | tuple[type, ...], path: str, default: Any = _REQUIRED) -> Any:
    """Return the field `name` of a JSON object, which must be of type `kind`. Raises `TranscriptError`."""
    if not isinstance(written, Mapping):
        raise TranscriptError(path, f"expected an object, got {type(written).__name__}")
    value = written.get(name, default)
    if value is _REQUIRED:
        raise TranscriptError(_join_path(path, name), "missing required field")
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        wanted = " or ".join(each.__name__ for each in kinds)
        raise TranscriptError(_join_path(path, name), f"expected {wanted}, got {type(value).__name__}")
    return value


def _join_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _remove_empty(values: Mapping[str, Any]) -> Json:
    # An empty text is a value, and is kept.
    return {name: value for name, value in values.items() if value or value == ""}


def _name_to_dict(name: str | None) -> Json:
    return {"name": name} if name is not None else {}


def _attributes_to_dict(attributes: Mapping[str, Any]) -> Json:
    return {"attributes": dict(attributes)} if attributes else {}


def write_json(value: Json) -> str:
    """Return a JSON object as text, with lone surrogates escaped. Raises `TranscriptError`."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        text.encode()
    except UnicodeEncodeError:  # lone surrogates; escaped, any store can keep them
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise TranscriptError("", f"cannot be written as JSON: {error}") from error
    return text


def read_json(text: str | bytes, reads: int = VERSION) -> Json:
    """Return a JSON object whose version is `reads`. Raises `TranscriptError`."""
    try:
        written = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TranscriptError("", f"invalid JSON: {error}") from error
    version = read_field(written, "version", int, "")
    if version != reads:
        raise TranscriptError("version", f"unsupported version {version}; this release reads version {reads}")
    found: Json = written
    return found
