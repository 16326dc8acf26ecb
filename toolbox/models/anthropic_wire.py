"""The Messages API of Anthropic: encodes requests, interprets messages and their streams.

Not here: assembling the fragments of a reply (`accumulator`), sending, settings and continued replies (`anthropic`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, assert_never

from ..chat import (
    AiMessage,
    ChatRequest,
    Message,
    SystemMessage,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    ToolSpecification,
    UserMessage,
)
from ..contents import AudioContent, Content, ImageContent, PdfContent, TextContent, base64_of, media_type_of
from ..errors import ModelRefusedError, UnsupportedContentError
from ..json_text import compact_json, object_text, strict_arguments
from ..schemas import with_properties
from .accumulator import PartialCall, ReplyAccumulator, key_of
from .chat_wire import CACHE_CONTROL
from .server_errors import error_in, message_of
from .sse import EVENT_STREAM
from .wire_encoding import (
    SHARED_FIELDS,
    Fields,
    ToolBytes,
    encode_messages,
    encode_parts,
    function_name,
    is_any,
    json_bytes,
    shared_encoder,
)

BLOCKS = "anthropic"
"""The attribute of a reply with its content blocks, as the server sent them."""
CONTAINER = "anthropic_container"
"""The attribute of a reply with the id of the container in which the server ran code. The next request needs it."""
MOST_MARKS = 4
"""Cache marks that the server accepts in a request."""

Marks = Mapping[str, str]


_RECORDED = """
    cache_control container max_tokens messages output_config stop_sequences system thinking
"""


class AnthropicWire:
    """Encodes the requests of one model; `server_model.Wire` says what the class attributes mean.

    `cache` is the cache mark that is set automatically, or None. `keeps_unsigned`: send thoughts without a signature
    back, which Anthropic rejects and other servers create.
    """

    path = "/messages"
    stream_type = EVENT_STREAM
    recorded_fields = SHARED_FIELDS.union(_RECORDED.split())

    def __init__(
        self,
        cache: Marks | None = None,
        send_tool_metadata: tuple[str, ...] = (),
        strict_tools: bool = False,
        keeps_unsigned: bool = True,
    ) -> None:
        self._cache = cache
        self._keeps_unsigned = keeps_unsigned
        self._encode_message = shared_encoder(encode_message, keeps_unsigned=keeps_unsigned)
        self._tools = ToolBytes(shared_encoder(_encode_tool, metadata=send_tool_metadata, strict=strict_tools))

    def fields(self, request: ChatRequest, said: bytes = b"", server_tools: Sequence[Any] = ()) -> Fields:
        """Return the fields of a request as JSON.

        `said` are the blocks of a reply that the model should continue, `server_tools` the tools that the server runs.
        """
        messages = without_open_server_calls(unique_ids(request.messages), server_tools)
        forms = encode_messages(self._encode_message, messages)
        last = messages[-1] if messages else None
        if type(last) is AiMessage and last.text and last.text[-1].isspace():
            forms[-1] = self._encode_message(_without_trailing_space(last))
        roles, turns, system = _join_turns(forms)
        tools = self._tools.of(request.tool_specifications)[1:-1] if request.tool_specifications else b""
        more_tools = b",".join(map(json_bytes, server_tools))
        automatic = 1 + bool(system) + bool(tools or more_tools) if self._cache is not None else 0
        if sum(form[:1].isupper() for form in forms) > MOST_MARKS - automatic:
            roles, turns, system = _join_turns(self._encode_with_marks(messages, MOST_MARKS - automatic))
        if self._cache is not None:
            mark = b',"%s":%s}' % (CACHE_CONTROL.encode(), json_bytes(self._cache))
            if (last_of_user := roles.rfind(b"u")) >= 0:
                turns[last_of_user] = _mark_last_block(turns[last_of_user][:-2], mark) + b"]}"
            if system:
                system = _mark_last_block(system, mark)
            if tools:
                tools = _mark_last_block(tools, mark)
            elif more_tools:
                more_tools = _mark_last_block(more_tools, mark)
        if said:
            turns.append(_MODEL + said + b"]}")
        fields: Fields = {}
        if system:
            fields["system"] = b"[%s]" % system
        if tools or more_tools:
            fields["tools"] = b"[%s]" % b",".join(filter(None, (tools, more_tools)))
        fields["messages"] = b"[%s]" % b",".join(turns)
        return fields

    def interpreter(self, reply: ReplyAccumulator) -> AnthropicInterpreter:
        """Return an interpreter for one reply."""
        return AnthropicInterpreter(reply)

    def _encode_with_marks(self, messages: Sequence[Message], left: int) -> list[bytes]:
        """Encode messages with only the last of their cache marks, so that the automatic ones fit in."""
        forms: list[bytes] = []
        for message in reversed(messages):
            is_marked = bool(message.attributes.get(CACHE_CONTROL))
            forms.append(encode_message(message, self._keeps_unsigned, marked=left > 0))
            left -= is_marked
        return forms[::-1]


# --- requests


_USER, _MODEL = b'{"role":"user","content":[', b'{"role":"assistant","content":['


def encode_message(message: Message, keeps_unsigned: bool, marked: bool = True) -> bytes:
    """Return a message after one byte for its role; upper case if it has a cache mark. Of system messages, only the
    blocks follow.
    """
    match message:
        case SystemMessage():
            role, blocks = b"s", [{"type": "text", "text": message.text}] if message.text.strip() else []
        case UserMessage():
            role, blocks = b"u", _encode_contents(message.contents)
        case ToolExecutionResultMessage():
            role, blocks = b"u", [_encode_result(message)]
        case AiMessage():
            role, blocks = b"a", _encode_reply(message, keeps_unsigned)
    if marked and blocks and (mark := message.attributes.get(CACHE_CONTROL)) and _can_be_marked(blocks[-1]):
        role, blocks[-1] = role.upper(), {**blocks[-1], CACHE_CONTROL: mark}
    if not blocks:
        return b""
    written = b",".join(map(json_bytes, blocks))
    return role + (written if role in b"sS" else (_USER if role in b"uU" else _MODEL) + written + b"]}")


def _encode_reply(message: AiMessage, keeps_unsigned: bool) -> list[dict[str, Any]]:
    """Return the blocks of a reply: the server's own while text and calls are unchanged."""
    kept = message.attributes.get(BLOCKS)
    if isinstance(kept, Sequence) and _says_the_same(kept, message):
        return [_with_valid_name(each) for each in kept if _can_return(each, keeps_unsigned)]
    text = (message.text or "").strip() and [{"type": "text", "text": message.text}]
    return [*(text or ()), *map(_encode_call, message.tool_execution_requests)]


def _with_valid_name(block: Mapping[str, Any]) -> dict[str, Any]:
    """Return a block with a tool's name that the server accepts: the model may have invented it."""
    is_call = block.get("type") == "tool_use"
    return {**block, "name": tool_name(str(block.get("name")))} if is_call else dict(block)


def _can_return(block: Mapping[str, Any], keeps_unsigned: bool) -> bool:
    if block.get("type") == "thinking":
        return keeps_unsigned or bool(block.get("signature"))
    return not _is_blank(block)


def _join_turns(forms: Sequence[bytes]) -> tuple[bytes, list[bytes], bytes]:
    """Join encoded messages to turns of user and model; return their roles, the turns, and the system blocks."""
    roles, turns, system = b"", list[bytes](), list[bytes]()
    for form in filter(None, forms):
        role, written = form[:1].lower(), form[1:]
        if role == b"s":
            system.append(written)
        elif role == roles[-1:]:
            start = _USER if role == b"u" else _MODEL
            turns[-1] = turns[-1][:-2] + b"," + written[len(start) :]
        else:
            turns.append(written)
            roles += role
    return roles, turns, b",".join(system)


def _without_trailing_space(message: AiMessage) -> AiMessage:
    """Remove white space at the end of a text that the model should continue, which the server rejects."""
    attributes = {name: value for name, value in message.attributes.items() if name != BLOCKS}
    return replace(message, text=(message.text or "").rstrip(), attributes=attributes)


_OWN_MARK = re.compile(rb'"cache_control":\{[^{}]*\}\}\Z')


def _mark_last_block(blocks: bytes, mark: bytes) -> bytes:
    """Return blocks with a cache mark in the last one, if it has none."""
    return blocks if _OWN_MARK.search(blocks[-200:]) else blocks[:-1] + mark


def _can_be_marked(block: Mapping[str, Any]) -> bool:
    return block.get("type") not in ("thinking", "redacted_thinking")


def _encode_contents(contents: Sequence[Content]) -> list[dict[str, Any]]:
    """Return the blocks of contents, without blank texts, which the server rejects, unless there is nothing else."""
    blocks = encode_parts(_encode_content, contents)
    return [each for each in blocks if not _is_blank(each)] or blocks[:1]


def _is_blank(block: Mapping[str, Any]) -> bool:
    return block.get("type") == "text" and not str(block.get("text")).strip()


def _encode_content(content: Content) -> dict[str, Any]:
    match content:
        case TextContent(text):
            return {"type": "text", "text": text}
        case ImageContent():
            if (data := base64_of(content)) is None:
                return {"type": "image", "source": {"type": "url", "url": content.url}}
            kind = media_type_of(content).partition(";")[0].strip().lower()
            if (kind := _SAME_TYPES.get(kind, kind)) not in _IMAGES:
                raise UnsupportedContentError(
                    "ImageContent", f"{_API} does not support {kind}; pass a PNG or JPEG image"
                )
            return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}
        case PdfContent():
            title = {"title": content.name} if content.name else {}
            if (data := base64_of(content)) is None:
                return {"type": "document", "source": {"type": "url", "url": content.url}, **title}
            source = {"type": "base64", "media_type": "application/pdf", "data": data}
            return {"type": "document", "source": source, **title}
        case AudioContent():
            raise UnsupportedContentError("AudioContent", f"{_API} does not support audio; use another model")
        case _:
            assert_never(content)


_API = "Anthropic's Messages API"
_IMAGES = ("image/png", "image/jpeg", "image/gif", "image/webp")
_SAME_TYPES = {"image/jpg": "image/jpeg"}


def _encode_result(message: ToolExecutionResultMessage) -> dict[str, Any]:
    form: dict[str, Any] = {"type": "tool_result", "tool_use_id": valid_id(message.id)}
    blocks = _encode_contents(message.contents)
    if any(each["type"] != "text" for each in blocks):
        has_text = any(each["type"] == "text" for each in blocks)
        text = [{"type": "text", "text": message.text}] if message.text.strip() and not has_text else []
        form["content"] = [*text, *blocks]
    elif message.text.strip():
        form["content"] = message.text
    if message.is_error:
        form["is_error"] = True
    return form


def _encode_call(request: ToolExecutionRequest) -> dict[str, Any]:
    named = {"id": valid_id(request.id), "name": tool_name(request.name)}
    return {"type": "tool_use", **named, "input": _input_of(request)}


def _input_of(request: ToolExecutionRequest) -> dict[str, Any]:
    return strict_arguments(object_text(request.arguments)) or {}


def _says_the_same(blocks: Sequence[Any], message: AiMessage) -> bool:
    """Return True if the blocks have the text and the calls of the message."""
    if not all(isinstance(each, Mapping) for each in blocks):
        return False
    text = "".join(str(each.get("text") or "") for each in blocks if each.get("type") == "text")
    calls = [each for each in blocks if each.get("type") == "tool_use"]
    requests = message.tool_execution_requests
    return text == (message.text or "") and len(calls) == len(requests) and all(map(_is_same_call, calls, requests))


def _is_same_call(call: Mapping[str, Any], request: ToolExecutionRequest) -> bool:
    named = (call.get("id"), call.get("name")) == (request.id, request.name)
    return named and valid_id(request.id) == request.id and call.get("input") == _input_of(request)


_ILLEGAL = re.compile(r"[^a-zA-Z0-9_-]")
_LONGEST_ID = 64
_LONGEST_NAME = 128


def valid_id(given: str) -> str:
    """Return the id of a call as the server accepts it; ids of other servers may contain other characters."""
    if 0 < len(given) <= _LONGEST_ID and _ILLEGAL.search(given) is None:
        return given
    return f"call_{hashlib.blake2s(given.encode('utf-8', 'replace'), digest_size=12).hexdigest()}"


def tool_name(name: str) -> str:
    """Return a tool's name that the server accepts in a history."""
    return name if len(name) <= _LONGEST_NAME and name and _ILLEGAL.search(name) is None else function_name(name)


def without_open_server_calls(messages: Sequence[Message], server_tools: Sequence[Any]) -> Sequence[Message]:
    """Return the messages without calls of server-side tools that have no result, if the request has no such tool.

    A model can invent such a call, and the server rejects every later request with it. A call of a tool in the request
    may still wait: code on the server waits for the results of the program's tools.
    """
    blocks = [
        block for each in messages if each.attributes and BLOCKS in each.attributes for block in _kept_blocks(each)
    ]
    calls = [block for block in blocks if block.get("type") == "server_tool_use"]
    if not calls:
        return messages
    answered = [block["tool_use_id"] for block in blocks if "tool_use_id" in block]
    left_out = [
        each for each in calls if each.get("id") not in answered and not _can_run(str(each.get("name")), server_tools)
    ]
    return [_without_blocks(message, left_out) for message in messages] if left_out else messages


def _kept_blocks(message: Message) -> Sequence[Mapping[str, Any]]:
    kept = message.attributes.get(BLOCKS) if type(message) is AiMessage else None
    return [each for each in kept if isinstance(each, Mapping)] if isinstance(kept, Sequence) else ()


def _can_run(name: str, server_tools: Sequence[Any]) -> bool:
    """Return True if one of these tools runs calls of this name. Some web tools also run code."""
    kinds = [str(each.get("type")) for each in server_tools if isinstance(each, Mapping)]
    named = any(isinstance(each, Mapping) and each.get("name") == name for each in server_tools)
    bases = ("code_execution", "web_") if name.endswith("code_execution") else (name,)
    return named or (name != "" and any(kind.startswith(bases) for kind in kinds))


def _without_blocks(message: Message, left_out: Sequence[Mapping[str, Any]]) -> Message:
    blocks = _kept_blocks(message)
    kept = [block for block in blocks if not any(block is each for each in left_out)]
    if len(kept) == len(blocks) or type(message) is not AiMessage:
        return message
    return replace(message, attributes={**message.attributes, BLOCKS: kept})


def unique_ids(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages, with new ids for calls whose id was used before: other servers begin again in each reply."""
    seen: set[str] = set()
    twice = False
    for message in messages:
        if type(message) is AiMessage and message.tool_execution_requests:
            for each in message.tool_execution_requests:
                twice = twice or each.id in seen
                seen.add(each.id)
    return _renumber_calls(messages) if twice else messages


def _renumber_calls(messages: Sequence[Message]) -> list[Message]:
    counts: dict[str, int] = {}
    latest: dict[str, list[str]] = {}
    changed: list[Message] = []
    for message in messages:
        match message:
            case AiMessage(text, requests, reasoning, attributes, name) if requests:
                latest = {}
                calls: list[ToolExecutionRequest] = []
                for each in requests:
                    counts[each.id] = number = counts.get(each.id, 0) + 1
                    own = each.id if number == 1 else valid_id(f"{each.id} {number}")
                    latest.setdefault(each.id, []).append(own)
                    calls.append(ToolExecutionRequest(own, each.name, each.arguments, each.attributes))
                message = AiMessage(text, calls, reasoning, attributes, name)
            case ToolExecutionResultMessage(id, tool_name, text, is_error, attributes, contents) if latest.get(id):
                own = latest[id].pop(0)
                message = ToolExecutionResultMessage(own, tool_name, text, is_error, attributes, contents)
            case _:
                pass
        changed.append(message)
    return changed


def _encode_tool(tool: ToolSpecification, metadata: Sequence[str], strict: bool) -> bytes:
    form: dict[str, Any] = {"name": tool.name}
    if tool.description:
        form["description"] = tool.description
    wanted = strict if tool.strict is None else tool.strict
    schema = closed_schema(tool.parameters) if wanted else None
    form["input_schema"] = with_properties(tool.parameters) if schema is None else schema
    if schema is not None:
        form["strict"] = True
    form |= {key: tool.metadata[key] for key in metadata if key in tool.metadata}
    return json_bytes(form)


def tool_choice(request: ChatRequest, parallel: bool) -> dict[str, Any] | None:
    """Return the tool choice; `parallel` allows several calls in one reply. None for the server's default."""
    match request.tool_choice:
        case None if parallel:
            return None
        case None | "auto":
            choice: dict[str, Any] = {"type": "auto"}
        case "none":
            return {"type": "none"}
        case "required":
            choice = {"type": "any"}
        case name:
            choice = {"type": "any"} if is_any(request) else {"type": "tool", "name": name}
    return choice if parallel else {**choice, "disable_parallel_tool_use": True}


# --- schemas

_KEYWORDS = frozenset({"type", "enum", "const", "description", "title", "properties", "required", "items", "anyOf"})
_KEYWORDS |= {"$ref", "$defs", "format", "default", "additionalProperties"}
_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "uri", "ipv4", "ipv6", "uuid"})


class _Open(Exception):  # noqa: N818 - never leaves this module
    """A schema allows something that the server cannot enforce."""


def closed_schema(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a schema in the form that the server can enforce, or None if it has no such form.

    Limits of numbers, lengths and the like become part of the description, because the server rejects them.
    """
    if schema.get("type") != "object" or _is_recursive(schema):
        return None
    try:
        return _close_schema(schema)
    except _Open:
        return None


def _close_schema(schema: Any) -> dict[str, Any]:
    if not isinstance(schema, Mapping):
        raise _Open
    kept = {("anyOf" if key == "oneOf" else key): value for key, value in schema.items()}
    notes = {key: kept.pop(key) for key in list(kept) if key not in _KEYWORDS}
    if "minItems" in notes and notes["minItems"] in (0, 1):
        kept["minItems"] = notes.pop("minItems")
    if kept.get("format", "date") not in _FORMATS:
        notes["format"] = kept.pop("format")
    if notes.keys() & {"allOf", "not", "if", "patternProperties", "prefixItems", "unevaluatedProperties"}:
        raise _Open
    if kept.get("type") == "object" or "properties" in kept:
        if kept.get("additionalProperties", "properties" not in kept) not in (None, False):
            raise _Open
        kept["properties"] = {name: _close_schema(each) for name, each in (kept.get("properties") or {}).items()}
        kept["additionalProperties"] = False
    elif not kept.keys() & {"type", "anyOf", "$ref", "enum", "const"}:
        raise _Open
    if "items" in kept:
        kept["items"] = _close_schema(kept["items"])
    elif kept.get("type") == "array":
        raise _Open
    for key in ("anyOf",):
        if key in kept:
            kept[key] = [_close_schema(each) for each in kept[key]]
    if "$defs" in kept:
        kept["$defs"] = {name: _close_schema(each) for name, each in kept["$defs"].items()}
    if notes := {key: value for key, value in notes.items() if key not in ("examples", "deprecated", "discriminator")}:
        limits = ", ".join(f"{key}: {compact_json(value)}" for key, value in notes.items())
        kept["description"] = f"{kept['description']} ({limits})" if kept.get("description") else limits
    return kept


def _is_recursive(schema: Mapping[str, Any]) -> bool:
    definitions = schema.get("$defs")
    if not isinstance(definitions, Mapping):
        return bool(set(_find_references(schema)))
    below = {f"#/$defs/{name}": set(_find_references(each)) for name, each in definitions.items()}
    for name in below:
        reached, waiting = set[str](), list(below[name])
        while waiting:
            if (each := waiting.pop()) not in reached:
                reached.add(each)
                waiting += below.get(each, ())
        if name in reached:
            return True
    return "#" in _find_references(schema)


def _find_references(schema: Any) -> Iterator[str]:
    if isinstance(schema, Mapping):
        if isinstance(reference := schema.get("$ref"), str):
            yield reference
        for each in schema.values():
            yield from _find_references(each)
    elif isinstance(schema, (list, tuple)):
        for each in schema:
            yield from _find_references(each)


# --- replies

_STATUS = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "conflict_error": 409,
    "memory_path_conflict_error": 409,
    "memory_precondition_failed_error": 412,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}
"""The HTTP status of each type of error; in a stream, only the type is sent."""
# All other fields of a message become attributes.
_OF_MESSAGE = frozenset({"id", "type", "role", "model", "content", "stop_reason", "usage"})
_TEXTS = {"text_delta": ("text", "text"), "thinking_delta": ("thinking", "thinking")}


def http_status(error: object) -> int | None:
    """Return the HTTP status of an error object's type, or None."""
    return _STATUS.get(str(error.get("type"))) if isinstance(error, Mapping) else None


class _Block:
    """A content block: the server's fields, and the fragments of its text or input."""

    __slots__ = ("call", "fields", "fragments", "number", "type", "was_streamed")

    def __init__(self, fields: dict[str, Any], number: int) -> None:
        self.fields = fields
        self.type: object = fields.get("type")
        self.number = number
        self.fragments: list[str] = []
        self.call: PartialCall | None = None
        self.was_streamed = False

    def whole(self) -> dict[str, Any]:
        """Return the block with its fragments."""
        fields = self.fields
        name = {"text": "text", "thinking": "thinking"}.get(str(self.type))
        if name is not None:
            return {**fields, name: f"{fields.get(name) or ''}{''.join(self.fragments)}"}
        if self.call is not None and (request := self.call.complete) is not None:
            is_whole = not self.was_streamed and type(fields.get("input")) is dict
            if is_whole and (fields.get("id"), fields.get("name")) == (request.id, request.name):
                return fields
            return {**fields, "id": request.id, "name": request.name, "input": _input_of(request)}
        if "input" not in fields:
            return fields
        given = strict_arguments("".join(self.fragments)) if self.fragments else fields.get("input")
        return {**fields, "input": given if isinstance(given, dict) else {}}


class AnthropicInterpreter:
    """Interprets a message or the events of its stream; of a reply in several parts, one after the other."""

    kind = "message: it has no content"

    def __init__(self, reply: ReplyAccumulator) -> None:
        self.reply = reply
        self.answered = False
        self.ended = False
        self.stop_reason: str | None = None
        self.container: str | None = None
        self._is_over = False
        self._blocks: list[_Block] = []
        self._at: dict[object, _Block] = {}
        self._latest: _Block | None = None
        self._stopped: _Block | None = None
        self._explanation: str | None = None

    @property
    def final(self) -> bool:
        """True if everything that follows is ignored."""
        return self._is_over

    @property
    def is_paused(self) -> bool:
        """True if the server wants to continue the reply in another request."""
        return self.stop_reason == "pause_turn"

    def take(self, value: dict[str, Any], is_document: bool) -> None:
        """Read a message or an event. Raises `ModelHttpError` if it is an error."""
        if self._is_over:
            return
        match value.get("type"):
            case "content_block_delta":
                self._read_delta(key_of(value.get("index")), value.get("delta"))
            case "content_block_start":
                self._start_block(key_of(value.get("index")), value.get("content_block"))
            case "content_block_stop":
                self._stop_block(key_of(value.get("index")))
            case "message_start":
                self._read_message(value.get("message"))
            case "message_delta":
                self._read_message_delta(value)
            case "message_stop":
                self.answered = self.ended = self._is_over = True
            case "ping":
                pass
            case kind if (kind == "message" or isinstance(value.get("content"), list)) and not value.get("error"):
                self._read_message(value)
                self.ended = True
            case _:
                status = http_status(value.get("error")) or http_status(value) or 200
                if (error := error_in(value, status)) is not None:
                    raise error

    # --- events

    def _read_message(self, message: object) -> None:
        """Read a whole message, or the beginning of one."""
        if not isinstance(message, Mapping):
            return
        self.answered = True
        reply = self.reply
        reply.id = message["id"] if isinstance(message.get("id"), str) and message["id"] else reply.id
        reply.model = message["model"] if isinstance(message.get("model"), str) and message["model"] else reply.model
        content = message.get("content")
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        for number, each in enumerate(content if isinstance(content, list) else ()):
            self._start_block(number, each)
            self._stop_block(number)
        reply.count(message.get("usage"))
        self._read_ending(message)
        self._keep_fields(message, message.keys() - _OF_MESSAGE)

    def _read_message_delta(self, value: Mapping[str, Any]) -> None:
        if isinstance(delta := value.get("delta"), Mapping):
            self._read_ending(delta)
            self._keep_fields(delta, delta.keys() - _OF_MESSAGE)
        self.reply.count(value.get("usage"))
        self._keep_fields(value, value.keys() - {"type", "delta", "usage"})

    def _read_ending(self, fields: Mapping[str, Any]) -> None:
        if isinstance(container := fields.get("container"), Mapping) and isinstance(container.get("id"), str):
            self.container = container["id"]
        if isinstance(details := fields.get("stop_details"), Mapping):
            self._explanation = message_of(details.get("explanation")) or self._explanation
        reason = fields.get("stop_reason")
        if isinstance(reason, str) and reason:
            self.stop_reason = reason
            self.answered = self.ended = True

    def _keep_fields(self, fields: Mapping[str, Any], names: Any) -> None:
        self.reply.of_response |= {name: fields[name] for name in names if fields[name] not in (None, "", [], {})}

    def _start_block(self, index: object, given: object) -> None:
        """Read the beginning of a block. Servers that are not Anthropic may send a whole block."""
        if not isinstance(given, Mapping):
            return
        self.answered = True
        self._report_stopped()
        block = _Block(dict(given), len(self._blocks))
        self._blocks.append(block)
        self._at[index] = self._latest = block
        match block.type:
            case "text":
                self._read_text(given.get("text"))
            case "thinking":
                self._read_thought(given.get("thinking"))
            case "tool_use":
                block.call = self.reply.call_piece(block.number, given.get("id"), given.get("name"), None)

    def _read_delta(self, index: object, delta: object) -> None:
        if not isinstance(delta, Mapping):
            return
        self.answered = True
        kind = delta.get("type")
        block = self._at.get(index) if index is not None else self._latest
        if block is None:
            if not isinstance(kind, str) or kind not in _TEXTS:
                return
            self._start_block(index, {"type": _TEXTS[kind][0]})
            block = self._blocks[-1]
        match kind:
            case "text_delta" if block.type == "text":
                if isinstance(text := delta.get("text"), str):
                    block.fragments.append(text)
                    self._read_text(text)
            case "thinking_delta" if block.type == "thinking":
                if isinstance(thought := delta.get("thinking"), str):
                    block.fragments.append(thought)
                    self._read_thought(thought)
            case "input_json_delta":
                self._read_input(block, delta.get("partial_json"))
            case "signature_delta" if block.type == "thinking":
                block.fields["signature"] = delta.get("signature")
            case "citations_delta" if block.type == "text":
                before = block.fields.get("citations")
                block.fields["citations"] = [*(before if isinstance(before, list) else ()), delta.get("citation")]

    def _read_input(self, block: _Block, piece: object) -> None:
        if isinstance(piece, Mapping):
            piece = compact_json(dict(piece))
        if not isinstance(piece, str) or not piece:
            return
        block.fragments.append(piece)
        block.was_streamed = True
        if block.call is not None:
            self.reply.call_piece(block.number, None, None, piece)

    def _stop_block(self, index: object) -> None:
        # The last call is complete when the reply is. If a token limit ends the reply inside its input, servers
        # complete the JSON of a whole block, and a tool that starts here would run with a part of its arguments.
        self._report_stopped()
        self._stopped = self._at.get(index) if index is not None else self._latest

    def _report_stopped(self) -> None:
        """Report the call in the block that stopped last, as soon as another block shows that it was not cut."""
        block, self._stopped = self._stopped, None
        if block is not None and block.call is not None:
            whole = (not block.fragments and block.fields.get("input")) or None
            self.reply.end_call(block.call, json_bytes(whole).decode() if type(whole) is dict else whole)

    def _read_text(self, text: object) -> None:
        if isinstance(text, str) and text:
            self.reply.text(text)

    def _read_thought(self, thought: object) -> None:
        if isinstance(thought, str) and thought:
            self.reply.reasoning(thought)

    # --- the end

    def encode_paused_reply(self) -> bytes:
        """Return the blocks of a reply that was paused, for the request that continues it."""
        wholes = [each.whole() for each in self._blocks]
        return b",".join(json_bytes(_with_valid_name(each)) for each in wholes if not _is_blank(each))

    def go_on(self) -> None:
        """Prepare for the next part of the reply."""
        self.reply.add_counts()
        self._at, self._latest = {}, None
        self.answered = self.ended = self._is_over = False
        self.stop_reason = None

    def close(self) -> None:
        """Keep the blocks as attributes. Raises `ModelRefusedError` if the model refused."""
        reply, reason = self.reply, self.stop_reason
        if reason == "refusal":
            wholes = [each.whole() for each in self._blocks]
            text = "".join(str(each.get("text") or "") for each in wholes if each.get("type") == "text")
            explained = f": {self._explanation}" if self._explanation else ""
            raise ModelRefusedError(f"the model refused to answer{explained}", text or self._explanation or "")
        if reason is not None:
            reply.end(reason)
        is_cut = reply.is_cut
        if is_cut and self._blocks and self._blocks[-1].call is not None:
            reply.ends_in_call = True  # the last call is not completed: a tool must not get a part of its arguments
            return
        for each in self._blocks:
            if (call := each.call) is None or call.name is None:
                continue
            if not call.fragments:
                reply.end_call(call, each.fields.get("input") or {})
            if not is_cut or strict_arguments(call.arguments) is not None:
                reply.id_of(call)
        if self._blocks:
            reply.attributes[BLOCKS] = [each.whole() for each in self._blocks]
        if self.container is not None:
            reply.attributes[CONTAINER] = self.container
