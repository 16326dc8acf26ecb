"""A model server that costs next to nothing: four rounds with a tool, then an answer; or a stream of text.

    python -m benchmarks.models_server PORT

`/<delay in ms>/v1/chat/completions`. The number of results in the request says which round it is.
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


def whole(message: dict[str, object], reason: str) -> bytes:
    """A reply with its head."""
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason}
    value = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": USAGE}
    body = json.dumps(value).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


def calls(number: int) -> bytes:
    """The reply that asks for the first tool."""
    function = {"name": "tool_0", "arguments": '{"city": "Valence", "days": 3, "metric": true}'}
    return whole(
        {"content": None, "tool_calls": [{"id": f"call_{number}", "type": "function", "function": function}]},
        "tool_calls",
    )


def event(delta: dict[str, object], reason: str | None = None) -> bytes:
    """An event of a stream."""
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    value = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return b"data: " + json.dumps(value).encode() + b"\n\n"


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
STREAM = [event({"role": "assistant", "content": ""}), *[event({"content": "word "})] * CHUNKS, event({}, "stop")]
STREAM.append(b"data: [DONE]\n\n")
STREAM_REPLY = STREAM_HEAD + b"".join(b"%x\r\n%s\r\n" % (len(each), each) for each in STREAM) + b"0\r\n\r\n"
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
