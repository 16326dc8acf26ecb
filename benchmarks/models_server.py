"""A model server that costs next to nothing: four rounds with a tool, then an answer; or a stream of text.

    python -m benchmarks.models_server PORT

`/<delay in ms>/v1/chat/completions`, and `/<delay in ms>/v1/messages` for Anthropic's Messages API. The number of
results in the request says which round it is. Streamed events have the fields that OpenAI's API sends (its reference
for `chat.completion.chunk`, with `include_usage` and obfuscation) and the events of Anthropic's Messages API; each
chunk has another text.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys

ROUNDS = 4
CHUNKS = 200
USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
STREAMED = re.compile(rb'"stream": ?true')
PATH = re.compile(rb"POST /(\d+)/")
LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


def with_head(value: object) -> bytes:
    """A JSON reply with its head."""
    body = json.dumps(value).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


def whole(message: dict[str, object], reason: str) -> bytes:
    """A chat completion with its head."""
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason}
    value = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": USAGE}
    return with_head(value)


def calls(number: int) -> bytes:
    """The reply that asks for the first tool."""
    function = {"name": "tool_0", "arguments": '{"city": "Valence", "days": 3, "metric": true}'}
    return whole(
        {"content": None, "tool_calls": [{"id": f"call_{number}", "type": "function", "function": function}]},
        "tool_calls",
    )


TEXT = "The forecast for Valence is mild and dry until Thursday, with light wind from the north and clear nights."
WORDS = [f"{TEXT.split()[number % 19]} " for number in range(CHUNKS)]


def event(choices: list[dict[str, object]], usage: object = None, padding: str = "") -> bytes:
    """An event of a stream, with the fields that OpenAI's servers send."""
    value: dict[str, object] = {
        "id": "chatcmpl-B9MBs8CjcvOU2jLn4n570S5qMJKcT",
        "object": "chat.completion.chunk",
        "created": 1741569952,
        "model": "gpt-4.1-2025-04-14",
        "service_tier": "default",
        "system_fingerprint": "fp_44709d6fcb",
        "choices": choices,
        "usage": usage,
        "obfuscation": padding,
    }
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def choice(delta: dict[str, object], reason: str | None = None) -> list[dict[str, object]]:
    """The choices of an event: one."""
    return [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]


def padded(word: str, number: int) -> bytes:
    """An event with a word, and padding that hides its length, as OpenAI sends it."""
    return event(choice({"content": word}), padding="kLq7ZtPw3XcVbN9"[: 15 - len(word) % 12 - number % 3])


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
STREAM = [
    event(choice({"role": "assistant", "content": "", "refusal": None}), padding="a1B"),
    *(padded(word, number) for number, word in enumerate(WORDS)),
    event(choice({}, "stop"), padding="Zk"),
    event([], USAGE),
    b"data: [DONE]\n\n",
]
STREAM_REPLY = STREAM_HEAD + b"".join(b"%x\r\n%s\r\n" % (len(each), each) for each in STREAM) + b"0\r\n\r\n"

# --- Anthropic's Messages API

MESSAGE_USAGE = {"input_tokens": 1, "output_tokens": 1}


def message(block: dict[str, object], reason: str) -> dict[str, object]:
    """A message."""
    head = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "stop_sequence": None}
    return {**head, "content": [block], "stop_reason": reason, "usage": MESSAGE_USAGE}


def tool_use(number: int) -> bytes:
    """The message that asks for the first tool."""
    given = {"city": "Valence", "days": 3, "metric": True}
    return with_head(
        message({"type": "tool_use", "id": f"toolu_{number}", "name": "tool_0", "input": given}, "tool_use")
    )


def named(value: dict[str, object]) -> bytes:
    """An event with its name."""
    body = json.dumps(value, separators=(",", ":")).encode()
    return b"event: %s\ndata: %s\n\n" % (str(value["type"]).encode(), body)


def piece(word: str) -> bytes:
    """An event with a word."""
    return named({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": word}})


MESSAGE_STREAM = [
    named({"type": "message_start", "message": {**message({}, ""), "content": [], "stop_reason": None}}),
    named({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}),
    *map(piece, WORDS),
    named({"type": "content_block_stop", "index": 0}),
    named({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 1}}),
    named({"type": "message_stop"}),
]
MESSAGE_STREAM_REPLY = (
    STREAM_HEAD + b"".join(b"%x\r\n%s\r\n" % (len(each), each) for each in MESSAGE_STREAM) + b"0\r\n\r\n"
)
TOOL_USES = [tool_use(number) for number in range(ROUNDS)]
MESSAGE_ANSWER = with_head(message({"type": "text", "text": "done"}, "end_turn"))

CALLS = [calls(number) for number in range(ROUNDS)]
ANSWER = whole({"content": "done"}, "stop")


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection, kept alive."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length, path = LENGTH.search(head), PATH.match(head)
            body = await reader.readexactly(int(length[1]) if length else 0)
            if path and int(path[1]):
                await asyncio.sleep(int(path[1]) / 1000)
            if b"/v1/messages " in head:
                results = body.count(b'"tool_use_id"')
                reply = TOOL_USES[results] if results < ROUNDS else MESSAGE_ANSWER
                writer.write(MESSAGE_STREAM_REPLY if STREAMED.search(body) else reply)
                await writer.drain()
                continue
            results = body.count(b'"tool_call_id"')
            writer.write(STREAM_REPLY if STREAMED.search(body) else CALLS[results] if results < ROUNDS else ANSWER)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def main() -> None:
    """Serves until it is ended."""
    server = await asyncio.start_server(serve, "127.0.0.1", int(sys.argv[1]), backlog=2048, limit=1 << 22)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
