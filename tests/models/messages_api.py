"""Replies of Anthropic's Messages API, whole and as streams, for a scripted server."""

import json
from typing import Any

from tests.models.scripted_server import Scripted

USAGE = {"input_tokens": 10, "output_tokens": 5, "cache_read_input_tokens": 3, "cache_creation_input_tokens": 2}


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def thinking(thought: str, signature: str | None = "sig") -> dict[str, Any]:
    signed = {} if signature is None else {"signature": signature}
    return {"type": "thinking", "thinking": thought, **signed}


def tool_use(name: str, given: Any, id: str = "toolu_1") -> dict[str, Any]:  # noqa: A002
    return {"type": "tool_use", "id": id, "name": name, "input": given}


def fields(*blocks: dict[str, Any], stop: str | None = "end_turn", **more: Any) -> dict[str, Any]:
    found = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "claude-test",
        "content": list(blocks),
        "stop_reason": stop,
        "stop_sequence": None,
        "usage": USAGE,
    }
    return found | more


def message(*blocks: dict[str, Any], stop: str | None = "end_turn", **more: Any) -> Scripted:
    return Scripted(json.dumps(fields(*blocks, stop=stop, **more)).encode())


def events(*values: dict[str, Any], named: bool = True) -> Scripted:
    names = [f"event: {each.get('type')}\n" if named else "" for each in values]
    chunks = [f"{name}data: {json.dumps(each)}\n\n".encode() for name, each in zip(names, values, strict=True)]
    return Scripted(chunks=chunks, content_type="text/event-stream; charset=utf-8")


def started(**more: Any) -> dict[str, Any]:
    return {"type": "message_start", "message": fields(stop=None, usage=USAGE | {"output_tokens": 1}) | more}


def start(index: int, block: dict[str, Any]) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": block}


def delta(index: int, kind: str, **more: Any) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, **more}}


def said(index: int, piece: str) -> dict[str, Any]:
    return delta(index, "text_delta", text=piece)


def given(index: int, piece: str) -> dict[str, Any]:
    return delta(index, "input_json_delta", partial_json=piece)


def stop(index: int) -> dict[str, Any]:
    return {"type": "content_block_stop", "index": index}


def ending(reason: str | None = "end_turn", usage: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    details = {"stop_reason": reason, "stop_sequence": None, **more}
    return {"type": "message_delta", "delta": details, "usage": usage or {"output_tokens": 5}}


END = {"type": "message_stop"}
PING = {"type": "ping"}


def block_events(index: int, block: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of one block, its text or input in two pieces."""
    match block["type"]:
        case "text":
            half = len(block["text"]) // 2
            pieces = [said(index, block["text"][:half]), said(index, block["text"][half:])]
            return [start(index, {**block, "text": ""}), *pieces, stop(index)]
        case "thinking":
            begun = start(index, {**block, "thinking": "", "signature": ""})
            thought = delta(index, "thinking_delta", thinking=block["thinking"])
            return [begun, thought, delta(index, "signature_delta", signature=block["signature"]), stop(index)]
        case "tool_use" | "server_tool_use":
            written = json.dumps(block["input"]) if block["input"] else ""
            half = len(written) // 2
            pieces = [given(index, ""), given(index, written[:half]), given(index, written[half:])]
            return [start(index, {**block, "input": {}}), *pieces, stop(index)]
        case _:
            return [start(index, block), stop(index)]


def streamed(*blocks: dict[str, Any], stop: str | None = "end_turn", **more: Any) -> Scripted:
    """The same reply as `message`, as a stream."""
    inside = [event for index, block in enumerate(blocks) for event in block_events(index, block)]
    return events(started(), PING, *inside, ending(stop, **more), END)
