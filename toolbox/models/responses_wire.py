"""The Responses API: encodes requests, interprets responses and their streams.

Not here: assembling the fragments of a reply (`accumulator`), sending and receiving (`transport`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, assert_never

from typing_extensions import TypeIs

from ..chat import (
    AiMessage,
    ChatRequest,
    FinishReason,
    Message,
    ResponseFormat,
    SystemMessage,
    ToolExecutionResultMessage,
    ToolSpecification,
    UserMessage,
)
from ..contents import AudioContent, Content, ImageContent, PdfContent, TextContent, base64_of, media_in, url_of
from ..errors import ModelHttpError, UnsupportedContentError
from ..json_text import compact_json, object_text
from .accumulator import (
    PartialCall,
    ReplyAccumulator,
    add_extras,
    key_of,
    replace_extras,
    storable,
)
from .server_errors import error_in, message_of
from .sse import EVENT_STREAM, excerpt
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

LAYOUT = "responses_output"
"""The attribute of a reply with the order of its items: whole reasoning items, ids of calls, and for the text whole
messages or `""`."""

LARGEST_ITEM = 2**14
"""Characters of an item of a server-side tool that is sent back between the reasoning and the text."""

_RENAMED = {"max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens"}


_RECORDED = """
    include input instructions max_output_tokens parallel_tool_calls previous_response_id reasoning
    store text truncation
"""


class ResponsesWire:
    """Encodes the requests of one model; `server_model.Wire` says what the class attributes mean."""

    path = "/responses"
    stream_type = EVENT_STREAM
    recorded_fields = SHARED_FIELDS.union(_RECORDED.split())

    def __init__(
        self,
        send_tool_metadata: tuple[str, ...] = (),
        strict_tools: bool = False,
        send_reasoning: SendReasoning = "always",
    ) -> None:
        self._encode_message = shared_encoder(encode_items, send_reasoning=send_reasoning)
        self._tools = ToolBytes(shared_encoder(_encode_tool, metadata=send_tool_metadata, strict=strict_tools))

    def fields(self, request: ChatRequest) -> Fields:
        """Return the fields of a request as JSON, in the order of the API."""
        items = b",".join(filter(None, encode_messages(self._encode_message, request.messages)))
        fields: Fields = {"input": b"[%s]" % items}
        if request.tool_specifications:
            fields["tools"] = self._tools.of(request.tool_specifications)
        if request.tool_choice is not None and offers_tools(request):
            fields["tool_choice"] = _encode_tool_choice(request)
        if request.response_format is not None:
            fields["text"] = request.response_format.encoded_by(_encode_format, request.response_format)
        return fields

    def stream_fields(self, usage: bool) -> Fields:
        """Return the field that requests a stream. Token counts are always sent."""
        return {"stream": b"true"}

    def parameter(self, name: str, value: Any) -> tuple[str, Any]:
        """Return a parameter's name and value in this API. Names of the chat completions API are translated."""
        if name == "reasoning_effort":
            return "reasoning", {"effort": value}
        return _RENAMED.get(name, name), value

    def interpreter(self, reply: ReplyAccumulator) -> ResponsesInterpreter:
        """Return an interpreter for one reply."""
        return ResponsesInterpreter(reply)


# --- requests


def encode_items(message: Message, send_reasoning: SendReasoning = "always") -> bytes:
    """Encode the items of one message, separated by commas. An empty reply becomes `b""`."""
    match message:
        case SystemMessage():
            return json_bytes({"role": message.role, "content": message.text})
        case UserMessage():
            parts = encode_parts(_encode_part, message.contents)
            only_text = all(each["type"] == "input_text" for each in parts)
            return json_bytes({"role": "user", "content": message.text if only_text else parts})
        case ToolExecutionResultMessage():
            output: Any = message.text
            if message.contents and media_in(message.contents):
                output = encode_parts(_encode_part, message.contents)
            return json_bytes({"type": "function_call_output", "call_id": message.id, "output": output})
        case AiMessage():
            return b",".join(json_bytes(each) for each in _encode_reply(message, send_reasoning))


def _encode_part(content: Content) -> dict[str, Any]:
    match content:
        case TextContent(text):
            return {"type": "input_text", "text": text}
        case ImageContent():
            detail = {"detail": content.detail} if content.detail else {}
            return {"type": "input_image", "image_url": url_of(content), **detail}
        case PdfContent():
            if (data := base64_of(content)) is None:
                return {"type": "input_file", "file_url": content.url}
            name = content.name or DOCUMENT
            return {"type": "input_file", "filename": name, "file_data": f"data:application/pdf;base64,{data}"}
        case AudioContent():
            raise UnsupportedContentError("AudioContent", "the Responses API does not support audio; use wire='chat'")
        case _:
            assert_never(content)


def _encode_reply(message: AiMessage, send_reasoning: SendReasoning) -> Iterator[dict[str, Any]]:
    calls = {each.id: each for each in message.tool_execution_requests}
    text = message.text
    phase = {"phase": found} if isinstance(found := message.attributes.get("phase"), str) else {}
    # A reasoning item must precede the item that followed it. Without an order from the server, text comes first; so
    # it does if the calls are others, such as after a call that was the answer.
    layout = message.attributes.get(LAYOUT) or ()
    if calls.keys() != {each for each in layout if each and isinstance(each, str)} or not layout:
        layout = ("", *calls)
    wholes = [each for each in layout if _is_message(each)]
    is_unchanged = not wholes or "".join(map(_text_of_message, wholes)) == (text or "")
    thinks = send_reasoning == "always" or (send_reasoning == "with_calls" and bool(calls))
    for entry in layout:
        if _is_message(entry):
            if is_unchanged:
                # The server rejects the id of a message whose reasoning is missing.
                yield {key: value for key, value in entry.items() if key != "id" or thinks}
            elif text:
                yield {"role": "assistant", "content": text, **phase}
                text = None
        elif isinstance(entry, Mapping):
            if (calls or is_unchanged) and (thinks or entry.get("type") != "reasoning"):
                yield dict(entry)
        elif not entry:
            if text:
                yield {"role": "assistant", "content": text, **phase}
                text = None
        elif (call := calls.pop(entry, None)) is not None:
            arguments = object_text(call.arguments)
            name = function_name(call.name)
            item = {"type": "function_call", "call_id": call.id, "name": name, "arguments": arguments}
            # A tool of a namespace is only known together with it.
            yield item | ({"namespace": found} if isinstance(found := call.attributes.get("namespace"), str) else {})


def _is_message(entry: object) -> TypeIs[Mapping[str, Any]]:
    return isinstance(entry, Mapping) and entry.get("type") == "message"


def _text_of_message(item: Mapping[str, Any]) -> str:
    return "".join(str(part.get("text") or "") for part in _message_parts(item))


def _encode_tool(tool: ToolSpecification, metadata: Sequence[str], strict: bool) -> bytes:
    form: dict[str, Any] = {"type": "function", "name": tool.name}
    if tool.description:
        form["description"] = tool.description
    # This API treats every schema as strict unless `strict` is false.
    form["parameters"], form["strict"] = strict_tool(tool, strict)
    form |= {key: tool.metadata[key] for key in metadata if key in tool.metadata}
    return json_bytes(form)


def _encode_tool_choice(request: ChatRequest) -> bytes:
    choice = "required" if is_any(request) else request.tool_choice
    if choice in ("auto", "none", "required"):
        return json_bytes(choice)
    return json_bytes({"type": "function", "name": choice})


def _encode_format(response_format: ResponseFormat) -> bytes:
    schema, strict = strict_answer(response_format)
    name = function_name(response_format.name)
    form: dict[str, Any] = {"type": "json_schema", "name": name, "schema": schema, "strict": strict}
    if response_format.description:
        form["description"] = response_format.description
    return json_bytes({"format": form})


# --- replies

_TEXT_PARTS = ("output_text", "refusal", "text", None)
# All other fields of an item or a part of a message become attributes.
_OF_ITEM = frozenset({"id", "type", "role", "status", "content"})
_OF_CALL = frozenset({"id", "type", "status", "call_id", "name", "arguments"})
_OWN_ITEMS = ("function_call", "message", "reasoning")  # a tuple, because a server can send any type
_OF_PART = frozenset({"type", "text", "refusal", "logprobs"})
# Most of the fields of a response repeat the request.
_OF_RESPONSE = frozenset(
    {"id", "object", "model", "output", "output_text", "usage", "status", "error", "incomplete_details", "type"}
    | {"input", "instructions", "tools", "tool_choice", "temperature", "top_p", "parallel_tool_calls", "text", "store"}
    | {"truncation", "max_output_tokens", "max_tool_calls", "top_logprobs", "prompt", "user", "reasoning", "background"}
    | {"safety_identifier", "prompt_cache_key", "frequency_penalty", "presence_penalty", "sequence_number", "response"}
)


class ResponsesInterpreter:
    """Interprets a response or the events of its stream."""

    kind = "response: it has no output"
    is_paused = False

    def __init__(self, reply: ReplyAccumulator) -> None:
        self.reply = reply
        self.answered = False
        self.ended = False
        self._calls: dict[object, PartialCall] = {}
        self._places: dict[object, object] = {}  # of items by id, for events without an index
        self._layout: list[Any] = []
        self._said: dict[tuple[object, str], dict[object, list[str]]] = {}  # by item and kind, then by part
        self._complete: set[object] = set()
        self._is_streamed = False
        self._output: dict[object, Mapping[str, Any]] = {}
        self._stored = True

    @property
    def final(self) -> bool:
        """True if everything that follows is ignored."""
        return self.ended

    def take(self, value: dict[str, Any], is_document: bool) -> None:
        """Read a response or an event. Raises `ModelHttpError` if it is an error."""
        if self.ended:
            return
        kind = value.get("type")
        if isinstance(kind, str) and kind.startswith("response."):
            self._is_streamed = True
            self._read_event(kind, value)
        elif "output" in value or value.get("status") == "failed":
            self._read_response(value)
        elif (error := error_in(value)) is not None:
            raise error

    # --- events

    def _read_event(self, kind: str, value: dict[str, Any]) -> None:
        key, identity = _first_key(value, "output_index"), _first_key(value, "item_id")
        if key is None:
            key = self._places.get(identity, identity)
        elif identity is not None:
            self._places.setdefault(identity, key)
        match kind.removeprefix("response."):
            case (
                "output_text.delta" | "refusal.delta" | "reasoning_summary_text.delta" | "reasoning_text.delta" as name
            ):
                self._read_piece(key, name.partition(".")[0], _part_of(value), value.get("delta"))
                if name == "output_text.delta" and "" not in self._layout:
                    self._layout.append("")
            case "output_text.done" | "refusal.done" | "reasoning_summary_text.done" | "reasoning_text.done" as name:
                self._read_rest(key, name.partition(".")[0], _part_of(value), value.get("text", value.get("refusal")))
            case "function_call_arguments.delta":
                self._find_call(key, {"arguments": value.get("delta")})
            case "function_call_arguments.done":
                if key in self._calls:
                    self.reply.end_call(self._calls[key], value.get("arguments"))
            case "output_item.added":
                self._read_item(key, value.get("item"), done=False)
            case "output_item.done":
                self._read_item(key, value.get("item"), done=True)
            case "completed" | "incomplete" | "failed" | "cancelled" | "done":
                response = value.get("response")
                self._read_response(response if isinstance(response, dict) else {})

    def _read_piece(self, key: object, name: str, part: object, piece: object) -> None:
        self.answered = True
        if not isinstance(piece, str) or not piece:
            return
        self._said.setdefault((key, name), {}).setdefault(part, []).append(piece)
        if name == "output_text":
            self.reply.text(piece)
        elif name == "refusal":
            self.reply.refusal(piece)
        else:
            self.reply.reasoning(piece)

    def _read_rest(self, key: object, name: str, part: object, text: object) -> None:
        """Add the text of a complete part that its deltas did not contain."""
        self.answered = True
        if not isinstance(text, str):
            return
        said = self._said.get((key, name), {})
        if part in said:
            before = "".join(said[part])
            if text.startswith(before):
                self._read_piece(key, name, part, text[len(before) :])
        elif text not in _join_parts(said):
            self._read_piece(key, name, part, text)

    def _read_parts(self, key: object, name: str, texts: Sequence[str], open_only: bool) -> None:
        """Add the texts of a complete item that its deltas did not contain. Servers number parts differently."""
        said = _join_parts(self._said.get((key, name), {}))
        if not said and self._is_streamed:
            # It may have been streamed under another key: an event without an index, for example.
            others = [
                _join_parts(parts)
                for (other, kind), parts in self._said.items()
                if kind == name and not (open_only and other in self._complete)
            ]
            if (whole := "".join(texts)) and whole in "".join(others):
                return
        everything = said
        for part, text in enumerate(texts):
            if said.startswith(text):
                said = said[len(text) :]
            elif said and text.startswith(said):
                said, rest = "", text[len(said) :]
                self._read_piece(key, name, part, rest)
            elif not said or text not in everything:
                self._read_piece(key, name, part, text)

    def _find_call(self, key: object, part: Mapping[str, Any]) -> PartialCall:
        self.answered = True
        call = self.reply.call_piece(key, part.get("call_id"), part.get("name"), part.get("arguments"))
        self._calls[key] = call
        return call

    def _read_item(self, key: object, item: object, done: bool) -> None:
        """Read an item that begins or is complete. Items of server-side tools are read in `close`."""
        if not isinstance(item, Mapping):
            return
        identity = _first_key(item, "id")
        key = self._places.get(identity, identity) if key is None else key
        if identity is not None:
            self._places[identity] = key
        self._output[key] = item
        match item.get("type"):
            case "function_call":
                call_id = item.get("call_id") or (None if key in self._calls else item.get("id"))
                call = self._find_call(key, {"call_id": call_id, "name": item.get("name")})
                if not any(each is call for each in self._layout):
                    self._layout.append(call)
                if done:
                    if not _OF_CALL.issuperset(item):
                        replace_extras(call.attributes, storable(item), item.keys() - _OF_CALL)
                    self.reply.end_call(call, item.get("arguments"))
            case "message":
                if "" not in self._layout:
                    self._layout.append("")
                if done:
                    self._read_message(key, item)
            case "reasoning" if done:
                self._layout.append(_without_nulls(item))
                self._read_thoughts(key, item)

    def _read_message(self, key: object, item: Mapping[str, Any], open_only: bool = True) -> None:
        self.answered = True
        texts: dict[str, list[str]] = {"output_text": [], "refusal": []}
        for part in _message_parts(item):
            name = "refusal" if part.get("type") == "refusal" else "output_text"
            text = part.get("refusal") if name == "refusal" else part.get("text")
            texts[name].append(text if isinstance(text, str) else "")
        for name, each in texts.items():
            self._read_parts(key, name, each, open_only)
        self._complete.add(key)

    def _read_thoughts(self, key: object, item: Mapping[str, Any]) -> None:
        self.answered = True
        for field, name in (("summary", "reasoning_summary_text"), ("content", "reasoning_text")):
            parts = item.get(field)
            found = [part.get("text") for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []
            self._read_parts(key, name, [each if isinstance(each, str) else "" for each in found], True)
        self._complete.add(key)

    # --- the whole

    def _read_response(self, response: Mapping[str, Any]) -> None:
        """Read a whole response, which also ends a stream. Texts that its deltas contained are not added again."""
        status = response.get("status")
        if (error := response.get("error")) or status == "failed":
            message = message_of(error) or "the response failed without a message"
            body = excerpt(compact_json(dict(response)).encode())
            found = error_in({"error": error}) if error else None
            raise found or ModelHttpError(200, message, body)
        self._stored = response.get("store") is not False
        output = response.get("output")
        streamed = list(self._layout)
        for index, item in enumerate(output if isinstance(output, list) else ()):
            if self._is_streamed and isinstance(item, Mapping) and item.get("type") == "message":
                self._read_message(index, item, open_only=False)
            elif index not in self._calls and not _is_known(item, streamed):
                self._read_item(index, item, done=True)
        if isinstance(output, list):
            self.answered = True
            if output:
                self._output = {index: each for index, each in enumerate(output) if isinstance(each, Mapping)}
        reply = self.reply
        reply.count(response.get("usage"))
        replace_extras(reply.of_response, response, response.keys() - _OF_RESPONSE)
        reply.id = response["id"] if isinstance(response.get("id"), str) else None
        reply.model = response["model"] if isinstance(response.get("model"), str) else None
        details = response.get("incomplete_details")
        reason = details.get("reason") if isinstance(details, Mapping) else None
        if reason is not None or status == "incomplete":
            reply.end(str(reason))
        elif status in ("queued", "in_progress", "cancelled"):
            reply.end(status)
        else:
            reply.finish_reason = FinishReason.STOP
        self.ended = True

    def close(self) -> None:
        """Keep other fields as attributes, and the order of items if there are reasoning items.

        The server requires the same order in the next request.
        """
        for item in self._output.values():
            self._keep_item(item)
        thoughts = [each for each in self._layout if isinstance(each, dict) and self._can_return(each)]
        calls = any(isinstance(each, PartialCall) for each in self._layout)
        phases = sum(1 for item in self._output.values() if item.get("phase"))
        on_server = any(item.get("type") not in _OWN_ITEMS for item in self._output.values())
        needs_whole = (thoughts and (on_server or not calls)) or phases > 1 or (phases and thoughts)
        if needs_whole and (whole := self._find_layout(thoughts)) is not None:
            self.reply.attributes[LAYOUT] = whole
            return
        # The server rejects a thought without the item of a server-side tool that followed it.
        if not thoughts or not calls or on_server:
            return
        layout: list[Any] = []
        for each in self._layout:
            if isinstance(each, PartialCall) and each.name is not None:
                layout.append(self.reply.id_of(each))
            elif each == "" or each in thoughts:
                layout.append(each)
        self.reply.attributes[LAYOUT] = layout

    def _find_layout(self, thoughts: list[dict[str, Any]]) -> list[Any] | None:
        """Return the order of the items with whole messages, or None if it is not known."""
        layout: list[Any] = []
        for key, item in self._output.items():
            match item.get("type"):
                case "reasoning":
                    layout += [each for each in (_without_nulls(item),) if each in thoughts]
                case "function_call":
                    if (call := self._calls.get(key)) is None or call.name is None:
                        return None
                    layout.append(self.reply.id_of(call))
                case "message":
                    parts = _message_parts(item)
                    if any(part.get("type") not in ("output_text", "text", None) for part in parts):
                        return None
                    about = {name: item[name] for name in ("id", "phase") if item.get(name)}
                    if not self._stored:
                        about.pop("id", None)
                    said = [{"type": "output_text", "text": _text_of_message(item), "annotations": []}]
                    layout.append(
                        {"type": "message", "role": "assistant", "status": "completed", **about, "content": said}
                    )
                case _:
                    if not thoughts:
                        continue
                    if len(compact_json(dict(item))) > LARGEST_ITEM:
                        return None
                    layout.append(dict(item))
        return layout

    def _keep_item(self, item: Mapping[str, Any]) -> None:
        """Keep other fields of a complete item as attributes, and whole items of server-side tools."""
        reply, kind = self.reply, item.get("type")
        if kind == "message":
            add_extras(reply.of_message, item, item.keys() - _OF_ITEM)
            for part in _message_parts(item):
                if part.get("type") in _TEXT_PARTS:
                    add_extras(reply.of_message, part, part.keys() - _OF_PART)
                    add_extras(reply.of_response, part, part.keys() & {"logprobs"})
                else:
                    reply.unread.append(f"{part.get('type')} content")
                    add_extras(reply.of_message, {"content_parts": [dict(part)]}, ("content_parts",))
        elif kind not in ("function_call", "reasoning"):
            reply.unread.append(f"{kind} item")
            add_extras(reply.of_response, {"output_items": [dict(item)]}, ("output_items",))

    def _can_return(self, thought: dict[str, Any]) -> bool:
        """Return True if the server can read a reasoning item again: it has stored it, or the item is whole.

        DeepSeek and servers of open models send the thoughts themselves and store nothing.
        """
        return "encrypted_content" in thought or (self._stored and "id" in thought) or bool(thought.get("content"))


def _message_parts(item: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    parts = item.get("content")
    if isinstance(parts, str):
        return [{"type": "output_text", "text": parts}]
    return [each for each in parts if isinstance(each, Mapping)] if isinstance(parts, list) else []


def _join_parts(parts: Mapping[object, list[str]]) -> str:
    return "".join(piece for pieces in parts.values() for piece in pieces)


def _part_of(value: Mapping[str, Any]) -> object:
    return _first_key(value, "content_index", "summary_index")


def _first_key(value: Mapping[str, Any], *names: str) -> Hashable | None:
    return next((key for name in names if (key := key_of(value.get(name))) is not None), None)


def _is_known(item: object, layout: list[Any]) -> bool:
    """Return True if an item of the whole response was streamed under another key."""
    if not isinstance(item, Mapping):
        return True
    if item.get("type") == "message":
        return "" in layout
    if item.get("type") == "function_call":
        identity = item.get("call_id") or item.get("id")
        return any(isinstance(each, PartialCall) and each.id == identity for each in layout)
    return _without_nulls(item) in layout


def _without_nulls(item: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if value is not None}
