"""The chat completions API: encodes requests, interprets replies and streams.

Not here: assembling the fragments of a reply (`accumulator`), sending and receiving (`transport`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, assert_never

from ..chat import (
    AiMessage,
    ChatRequest,
    Message,
    ResponseFormat,
    SystemMessage,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    ToolSpecification,
    UserMessage,
)
from ..contents import (
    AudioContent,
    Content,
    ImageContent,
    Media,
    PdfContent,
    TextContent,
    base64_of,
    media_in,
    media_type_of,
    url_of,
)
from ..errors import ModelProtocolError, UnsupportedContentError
from ..json_text import compact_json, object_text
from .accumulator import (
    PartialCall,
    ReplyAccumulator,
    add_extras,
    merged_details,
    replace_extras,
    storable,
)
from .server_errors import error_in
from .sse import EVENT_STREAM
from .wire_encoding import (
    DOCUMENT,
    SHARED_FIELDS,
    Fields,
    SendReasoning,
    ToolBytes,
    encode_messages,
    encode_parts,
    function_name,
    is_any,
    json_bytes,
    offers_tools,
    shared_encoder,
    strict_answer,
    strict_tool,
)

REASONING_FIELD = "reasoning_field"
REASONING_FIELDS = ("reasoning_content", "reasoning")
REASONING_DETAILS = "reasoning_details"
EXTRA_CONTENT = "extra_content"
CACHE_CONTROL = "cache_control"
CONTINUED = ("prefix", "partial")
"""Attributes of a message that the model should continue: `prefix` (Mistral, DeepSeek), `partial` (Moonshot, Qwen)."""
MEDIA_FOLLOW = b"\0"
"""Marks the encoded result of a tool with images, documents or audio, which this API only accepts in a user message.
JSON never contains this byte."""
AUDIO_FORMATS = {
    "audio/wav": "wav",
    "audio/x-wav": "wav",
    "audio/wave": "wav",
    "audio/vnd.wave": "wav",
    "audio/mpeg": "mp3",
    "audio/mp3": "mp3",
}
_API = "the chat completions API"


_RECORDED = """
    cache_control frequency_penalty logit_bias logprobs max_completion_tokens max_tokens messages min_p
    modalities n parallel_tool_calls prediction presence_penalty reasoning reasoning_effort
    repetition_penalty response_format seed stop store stream_options text thinking verbosity
"""


class ChatWire:
    """Encodes the requests of one model; `server_model.Wire` says what the class attributes mean."""

    path = "/chat/completions"
    stream_type = EVENT_STREAM
    recorded_fields = SHARED_FIELDS.union(_RECORDED.split())

    def __init__(
        self,
        send_tool_metadata: tuple[str, ...] = (),
        strict_tools: bool = False,
        send_reasoning: SendReasoning = "with_calls",
    ) -> None:
        self._encode_message = shared_encoder(encode_message, send_reasoning=send_reasoning)
        self._tools = ToolBytes(shared_encoder(_encode_tool, metadata=send_tool_metadata, strict=strict_tools))

    def fields(self, request: ChatRequest) -> Fields:
        """Return the fields of a request as JSON, in the order of the API."""
        fields: Fields = {"messages": b"[%s]" % self._encode_messages(request.messages)}
        if request.tool_specifications:
            fields["tools"] = self._tools.of(request.tool_specifications)
        if request.tool_choice is not None and offers_tools(request):
            fields["tool_choice"] = _encode_tool_choice(request)
        if request.response_format is not None:
            fields["response_format"] = request.response_format.encoded_by(_encode_format, request.response_format)
        return fields

    def stream_fields(self, usage: bool) -> Fields:
        """Return the fields that request a stream, with token counts if `usage` is true."""
        return {"stream": b"true", "stream_options": b'{"include_usage":true}'} if usage else {"stream": b"true"}

    def parameter(self, name: str, value: Any) -> tuple[str, Any]:
        """Return a parameter's name and value in this API."""
        return name, value

    def interpreter(self, reply: ReplyAccumulator) -> ChatInterpreter:
        """Return an interpreter for one reply."""
        return ChatInterpreter(reply)

    def _encode_messages(self, messages: Sequence[Message]) -> bytes:
        forms = b",".join(filter(None, encode_messages(self._encode_message, messages)))
        return forms if MEDIA_FOLLOW not in forms else b",".join(_move_media(messages, self._encode_message))


# --- requests


def encode_message(message: Message, send_reasoning: SendReasoning = "with_calls") -> bytes:
    """Encode one message. An empty reply becomes `b""`, because servers reject it in a history."""
    match message:
        case SystemMessage():
            return json_bytes(
                {"role": message.role, **_make_content_field(message.text, message), **_make_name_field(message)}
            )
        case UserMessage():
            return json_bytes(
                {"role": "user", **_make_content_field(_encode_content(message), message), **_make_name_field(message)}
            )
        case ToolExecutionResultMessage():
            form = json_bytes(
                {"role": "tool", "tool_call_id": message.id, **_make_content_field(message.text, message)}
            )
            if not message.contents or not media_in(message.contents):
                return form
            encode_parts(_encode_part, message.contents)  # raises for a part that user messages do not support
            return form + MEDIA_FOLLOW
        case AiMessage():
            return _encode_reply(message, send_reasoning)


def _make_content_field(content: str | list[dict[str, Any]], message: Message) -> dict[str, Any]:
    """Return the content field, with the message's `cache_control` on its last part."""
    mark = message.attributes.get(CACHE_CONTROL)
    if not mark:
        return {"content": content}
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {"content": [*parts[:-1], {**parts[-1], CACHE_CONTROL: mark}]} if parts else {"content": content}


def _make_name_field(message: SystemMessage | UserMessage | AiMessage) -> dict[str, str]:
    return {"name": message.name} if message.name else {}


def _encode_image(image: ImageContent) -> dict[str, Any]:
    return {"url": url_of(image), "detail": image.detail} if image.detail else {"url": url_of(image)}


def _encode_content(message: UserMessage) -> str | list[dict[str, Any]]:
    parts = encode_parts(_encode_part, message.contents)
    return message.text if all(each["type"] == "text" for each in parts) else parts


def _encode_part(content: Content) -> dict[str, Any]:
    match content:
        case TextContent(text):
            return {"type": "text", "text": text}
        case ImageContent():
            return {"type": "image_url", "image_url": _encode_image(content)}
        case PdfContent():
            if (data := base64_of(content)) is None:
                raise UnsupportedContentError("PdfContent", f"{_API} does not support URLs of documents; pass data=")
            file = {"filename": content.name or DOCUMENT, "file_data": f"data:application/pdf;base64,{data}"}
            return {"type": "file", "file": file}
        case AudioContent():
            kind = media_type_of(content).partition(";")[0].strip().lower()
            if (form := AUDIO_FORMATS.get(kind)) is None:
                raise UnsupportedContentError(
                    "AudioContent", f"{_API} does not support {kind}; pass audio/wav or audio/mpeg"
                )
            return {"type": "input_audio", "input_audio": {"data": base64_of(content), "format": form}}
        case _:
            assert_never(content)


def _move_media(messages: Sequence[Message], encode: Callable[[Message], bytes]) -> Iterator[bytes]:
    """Yield the encoded messages. Images, documents and audio of tool results follow the round's last result.

    They are sent in one message with the user's next one: some servers refuse two of the user in a row.
    """
    media: list[Media] = []
    for message in messages:
        if media and isinstance(message, UserMessage):
            message, media = replace(message, contents=(*media, *message.contents)), []
        elif media and not isinstance(message, ToolExecutionResultMessage):
            yield _encode_media(media)
            media = []
        if form := message.encoded_by(encode, message):
            yield form.removesuffix(MEDIA_FOLLOW)
        if isinstance(message, ToolExecutionResultMessage):
            media += media_in(message.contents)
    if media:
        yield _encode_media(media)


def _encode_media(media: Sequence[Media]) -> bytes:
    return json_bytes({"role": "user", "content": [_encode_part(each) for each in media]})


def _encode_reply(message: AiMessage, send_reasoning: SendReasoning) -> bytes:
    fields: dict[str, Any] = {"role": "assistant", **_make_name_field(message)}
    if message.text:
        fields |= _make_content_field(message.text, message)
    elif mark := message.attributes.get(CACHE_CONTROL):
        fields[CACHE_CONTROL] = mark
    fields |= {name: True for name in CONTINUED if message.attributes.get(name) is True}
    # Reasoning models expect their reasoning again together with the call, some servers with every reply.
    if send_reasoning == "always" or (send_reasoning == "with_calls" and message.tool_execution_requests):
        name = message.attributes.get(REASONING_FIELD)
        if name in REASONING_FIELDS and (message.reasoning or message.tool_execution_requests):
            fields[name] = message.reasoning or ""
        if details := message.attributes.get(REASONING_DETAILS):
            fields[REASONING_DETAILS] = details
    if message.tool_execution_requests:
        fields["tool_calls"] = [_encode_call(each) for each in message.tool_execution_requests]
    elif not message.text:
        return b""
    if extra := message.attributes.get(EXTRA_CONTENT):
        fields[EXTRA_CONTENT] = extra
    return json_bytes(fields)


def _encode_call(request: ToolExecutionRequest) -> dict[str, Any]:
    function = {"name": function_name(request.name), "arguments": object_text(request.arguments)}
    call = {"id": request.id, "type": "function", "function": function}
    if extra := request.attributes.get(EXTRA_CONTENT):
        call[EXTRA_CONTENT] = extra
    return call


def _encode_tool(tool: ToolSpecification, metadata: Sequence[str], strict: bool) -> bytes:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    function["parameters"], strict = strict_tool(tool, strict)
    if strict or tool.strict is False:
        function["strict"] = strict
    function |= {key: tool.metadata[key] for key in metadata if key in tool.metadata}
    return json_bytes({"type": "function", "function": function})


def _encode_tool_choice(request: ChatRequest) -> bytes:
    choice = request.tool_choice
    if choice in ("auto", "none", "required") or is_any(request):
        return json_bytes(choice)
    return json_bytes({"type": "function", "function": {"name": choice}})


def _encode_format(response_format: ResponseFormat) -> bytes:
    schema, strict = strict_answer(response_format)
    named: dict[str, Any] = {"name": function_name(response_format.name), "schema": schema}
    if response_format.description:
        named["description"] = response_format.description
    if strict or response_format.strict is False:
        named["strict"] = strict
    return json_bytes({"type": "json_schema", "json_schema": named})


# --- replies

# All other fields of a reply, a choice or a message become attributes.
_OF_REPLY = frozenset({"id", "object", "model", "choices", "usage", "x_groq", "obfuscation", "error", "type"})
_REPEATED = ("created", "service_tier", "system_fingerprint")
"""Other attributes of a reply that servers repeat in each chunk, nearly always with the same values."""
_OF_CHUNK = _OF_REPLY.union(_REPEATED)
_OF_CHOICE = frozenset({"index", "delta", "message", "finish_reason", "text", "error", "usage"})
_OF_MESSAGE = frozenset(
    {"role", "content", "refusal", "tool_calls", "function_call", *REASONING_FIELDS, REASONING_DETAILS, EXTRA_CONTENT}
    | {"name", CACHE_CONTROL, REASONING_FIELD, *CONTINUED}  # as attributes, these would be sent back
)
_OF_CALL = frozenset({"index", "id", "type", "function", "name", "arguments"})
_ANSWERS = ("audio", "images", "image", "video", "files")
"""Fields of a message that may be an answer without text."""


class ChatInterpreter:
    """Interprets a chat completion or the chunks of its stream."""

    kind = "chat completion: it has no choices"
    final = is_paused = False

    def __init__(self, reply: ReplyAccumulator) -> None:
        self.reply = reply
        self.answered = False
        self._choice: object = None
        self._by_deltas = False
        self._is_whole = False
        self._said_again: dict[str, Any] | None = None
        self._lacks_message = False
        self._empty_thought: str | None = None
        self._others: dict[object, dict[str, Any]] = {}
        self._repeated: list[object] = []

    @property
    def ended(self) -> bool:
        """True if the server has said that the reply is complete."""
        return self._is_whole or self.reply.finish_reason is not None

    def close(self) -> None:
        """Read a message that was sent with empty deltas. Raises `ModelProtocolError` if there is no message."""
        reply = self.reply
        if self._said_again is not None and not reply.says_something:
            self._read_delta(self._said_again, whole=True)
        is_empty = self._lacks_message and not reply.says_something and not self._by_deltas
        if is_empty and not reply.was_stopped:  # Azure sends no message if its filter stopped the reply
            raise ModelProtocolError("the reply's message is null")
        if self._empty_thought is not None and reply.has_calls:  # DeepSeek wants it again with the call
            reply.attributes.setdefault(REASONING_FIELD, self._empty_thought)
        if self._others:
            reply.of_response["choices"] = list(self._others.values())

    def take(self, value: dict[str, Any], is_document: bool) -> None:
        """Read a completion or a chunk. Raises `ModelHttpError` if it is an error."""
        choices = value.get("choices")
        if (choices is None or value.get("error")) and (error := error_in(value)) is not None:
            raise error
        usage = value.get("usage")
        if usage:
            self.reply.count(usage)
        elif (groq := value.get("x_groq")) and isinstance(groq, dict):
            self.reply.count(groq.get("usage"))
        repeated: list[object] = [value.get(name) for name in _REPEATED]
        if repeated != self._repeated or not _OF_CHUNK.issuperset(value):
            self._repeated = repeated
            replace_extras(self.reply.of_response, value, value.keys() - _OF_REPLY)
        if not choices or not isinstance(choices, list):
            return
        if self.reply.id is None:
            self._read_head(value)
        for choice in choices:
            if isinstance(choice, dict):
                self._read_choice(choice, is_document, is_document or value.get("object") == "chat.completion")

    def _read_head(self, value: dict[str, Any]) -> None:
        if isinstance(found := value.get("id"), str):
            self.reply.id = found or None
        if isinstance(found := value.get("model"), str):
            self.reply.model = found or None

    def _read_choice(self, choice: dict[str, Any], is_document: bool, whole: bool) -> None:
        index = choice.get("index") or 0
        if self._choice is None:
            self._choice = index
        elif index != self._choice and str(index) != str(self._choice):
            self._read_other_choice(index, choice)
            return
        if not _OF_CHOICE.issuperset(choice):
            add_extras(self.reply.of_response, choice, choice.keys() - _OF_CHOICE)
        if (error := choice.get("error")) and (found := error_in({"error": error})) is not None:
            raise found
        reason = choice.get("finish_reason")
        delta, message = choice.get("delta"), choice.get("message")
        if message is None and not delta and isinstance(text := choice.get("text"), str):
            delta = {"content": text}  # the older completions API
        elif isinstance(message, str):
            message = {"content": message}
        if isinstance(message, dict) and (not delta or not isinstance(delta, dict) or (is_document and message)):
            # After deltas, a message only repeats them.
            if not self._by_deltas:
                self.answered = True
                self._is_whole = self._is_whole or whole
                self._read_delta(message, whole or bool(reason))
        elif isinstance(delta, dict) and (delta or "message" not in choice):
            if delta:
                self.answered = self._by_deltas = True
                self._read_delta(delta, whole=False)
            if isinstance(message, dict):
                self._said_again = message
        elif whole or "message" in choice:
            self._lacks_message = True
            self._is_whole = self._is_whole or whole
            self.answered = True
        if reason:
            self.answered = True
            if str(reason).lower() != "null":
                self.reply.end(str(reason))
            self.reply.count(choice.get("usage"))

    def _read_other_choice(self, index: object, choice: dict[str, Any]) -> None:
        """Keep a further choice, assembled to a whole one."""
        kept = self._others.setdefault(str(index), {"index": index, "message": {}})
        for said in (choice.get("delta"), choice.get("message")):
            if isinstance(said, dict):
                add_extras(kept["message"], said, said.keys())
        add_extras(kept, choice, choice.keys() - {"index", "delta", "message"})

    def _read_delta(self, delta: dict[str, Any], whole: bool) -> None:
        reply = self.reply
        content = delta.get("content")
        if content:
            if type(content) is str:
                reply.text(content)
            else:
                self._read_parts(content)
        for name in REASONING_FIELDS:
            thought = delta.get(name)
            if thought and isinstance(thought, str):
                reply.attributes.setdefault(REASONING_FIELD, name)
                if reply.attributes[REASONING_FIELD] == name:
                    reply.reasoning(thought)
            elif thought == "":
                self._empty_thought = name
        if refusal := delta.get("refusal"):
            reply.refusal(str(refusal))
        if calls := delta.get("tool_calls"):
            for entry in calls if isinstance(calls, list) else [calls]:
                if isinstance(entry, dict):
                    self._read_call(entry, whole)
        elif isinstance(retired := delta.get("function_call"), dict) and retired:
            reply.call_piece("function_call", None, retired.get("name"), retired.get("arguments"))
        if details := delta.get(REASONING_DETAILS):
            merged_details(reply.attributes.setdefault(REASONING_DETAILS, []), details)
        if extra := delta.get(EXTRA_CONTENT):
            reply.attributes[EXTRA_CONTENT] = extra
        if more := delta.keys() - _OF_MESSAGE:
            add_extras(reply.of_message, delta, more)
            reply.unread += [name for name in _ANSWERS if delta.get(name)]

    def _read_parts(self, parts: object) -> None:
        """Read content that is a list of parts, including reasoning."""
        for part in parts if isinstance(parts, list) else [parts]:
            if isinstance(part, str):
                self.reply.text(part)
            elif isinstance(part, (int, float)):
                self.reply.text(compact_json(part))
            elif not isinstance(part, dict):
                continue
            elif part.get("type") in ("thinking", "reasoning"):
                self._read_thoughts(
                    next(filter(None, map(part.get, ("thinking", "reasoning", "summary", "text"))), None)
                )
            elif isinstance(text := part.get("text"), str):
                self.reply.text(text)
            elif isinstance(refusal := part.get("refusal"), str):
                self.reply.refusal(refusal)
            elif part is parts:  # a structured answer that is a JSON object instead of text
                self.reply.text(compact_json(part))
            elif part.get("type") not in ("text", None):
                self.reply.unread.append(f"{part['type']} content")
                add_extras(self.reply.of_message, {"content_parts": [part]}, ("content_parts",))

    def _read_thoughts(self, thoughts: object) -> None:
        for thought in thoughts if isinstance(thoughts, list) else [thoughts]:
            text = thought.get("text") if isinstance(thought, dict) else thought
            if isinstance(text, str):
                self.reply.reasoning(text)

    def _read_call(self, entry: dict[str, Any], whole: bool) -> None:
        function, kind = entry.get("function"), entry.get("type")
        if function is None and isinstance(kind, str) and isinstance(entry.get(kind), dict):
            self.reply.unread.append(f"{kind} tool call")  # a call of a tool in `parameters`
            add_extras(self.reply.of_message, {"tool_calls": [entry]}, ("tool_calls",))
            return
        part = function if isinstance(function, dict) else entry
        name, arguments = part.get("name"), part.get("arguments")
        if name is None and isinstance(function, str):
            name = function
        call: PartialCall
        if whole:
            call = self.reply.whole_call(entry.get("id"), name, arguments)
        else:
            call = self.reply.call_piece(entry.get("index"), entry.get("id"), name, arguments)
        self.reply.ends_in_call = isinstance(arguments, dict)  # the server has read the model's text
        if not _OF_CALL.issuperset(entry):
            add_extras(call.attributes, storable(entry), entry.keys() - _OF_CALL)
