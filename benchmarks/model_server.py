"""A model server that costs next to nothing: it asks for tools while there are no results, then says "done".

    python -m benchmarks.model_server PORT

It calls the first offered tool once, or eight times when the user says "eight".
"""

from __future__ import annotations

import asyncio
import json
import sys

USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}


def reply(body: bytes) -> bytes:
    """The chat completion that answers this request."""
    asked = json.loads(body)
    messages = asked["messages"]
    if any(message["role"] == "tool" for message in messages):
        message, reason = {"role": "assistant", "content": "done"}, "stop"
    else:
        times = 8 if "eight" in str(messages[-1]["content"]) else 1
        function = {"name": asked["tools"][0]["function"]["name"], "arguments": "{}"}
        calls = [{"id": f"call_{number}", "type": "function", "function": function} for number in range(times)]
        message, reason = {"role": "assistant", "content": None, "tool_calls": calls}, "tool_calls"
    choice = {"index": 0, "message": message, "finish_reason": reason}
    whole = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": USAGE}
    return json.dumps(whole).encode()


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection, kept alive."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = 0
            for line in head.split(b"\r\n"):
                name, _, value = line.partition(b":")
                if name.lower() == b"content-length":
                    length = int(value)
            body = await reader.readexactly(length)
            answer = reply(body) if length else b"{}"
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: "
                + str(len(answer)).encode()
                + b"\r\n\r\n"
                + answer
            )
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def main() -> None:
    server = await asyncio.start_server(serve, "127.0.0.1", int(sys.argv[1]), backlog=1024)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
