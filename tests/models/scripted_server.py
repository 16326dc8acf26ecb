"""A local model server that sends scripted replies byte for byte and keeps the requests."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

from toolbox import ChatRequest, UserMessage


@dataclass
class Scripted:
    """One reply. `chunks` leave one by one; `cut` breaks the connection after the last; `wait` is for an event."""

    body: bytes = b""
    chunks: list[bytes] | None = None
    status: int = 200
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    cut: bool = False
    wait: asyncio.Event | None = None


Replies = list[Scripted] | Callable[[dict[str, Any]], Scripted]


class ScriptedServer:
    """Serves `replies` in order, or what the function makes of each request's body."""

    def __init__(self, replies: Replies) -> None:
        self.replies = replies
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.open = 0
        self.most_open = 0
        self.connections = 0
        self.url = ""
        self._changed = asyncio.Event()

    def script(self, replies: Replies) -> None:
        """Serve these replies from now on, and forget the requests so far: the next test begins."""
        self.replies = replies
        self.requests, self.headers, self.paths = [], [], []
        self.most_open = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                first, *lines = head.split("\r\n")
                headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines if line)}
                body = json.loads(await reader.readexactly(int(headers.get("content-length", "0"))))
                self.requests.append(body)
                self.headers.append(headers)
                self.paths.append(first.split(" ")[1])
                self.open += 1
                self.most_open = max(self.most_open, self.open)
                self._changed.set()
                try:
                    await self.reply(self.next(body), writer)
                finally:
                    self.open -= 1
                    self._changed.set()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client went away
        finally:
            writer.close()

    async def until(self, happened: Callable[[], bool]) -> None:
        """Waits until a request's coming or going has made this true."""
        while not happened():
            self._changed.clear()
            await self._changed.wait()

    def next(self, body: dict[str, Any]) -> Scripted:
        if not isinstance(self.replies, list):
            return self.replies(body)
        at = len(self.requests) - 1
        if at >= len(self.replies):
            return Scripted(b'{"error": {"message": "the script is exhausted"}}', status=400)
        return self.replies[at]

    async def reply(self, reply: Scripted, writer: asyncio.StreamWriter) -> None:
        if reply.wait is not None:
            await reply.wait.wait()
        headers = {"content-type": reply.content_type, "x-request-id": "req_1", **reply.headers}
        size = f"content-length: {len(reply.body)}" if reply.chunks is None else "transfer-encoding: chunked"
        lines = [f"HTTP/1.1 {reply.status} Scripted", *(f"{k}: {v}" for k, v in headers.items()), size]
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + reply.body)
        for chunk in reply.chunks or ():
            writer.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            await writer.drain()
            await asyncio.sleep(0)
        if reply.cut:
            await asyncio.sleep(0.01)  # what was written must leave before the connection breaks
            writer.transport.abort()
            raise ConnectionError
        if reply.chunks is not None:
            writer.write(b"0\r\n\r\n")
        await writer.drain()


@asynccontextmanager
async def serving(replies: Replies) -> AsyncIterator[ScriptedServer]:
    scripted = ScriptedServer(replies)
    server = await asyncio.start_server(scripted.handle, "127.0.0.1", 0, limit=1 << 22)
    scripted.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield scripted
    finally:
        server.close()


class Serve:
    """`async with Serve() as serve: server = await serve([...])`: the servers of one test, closed in its end."""

    def __init__(self) -> None:
        self._servers = AsyncExitStack()

    def __call__(self, replies: Replies) -> Awaitable[ScriptedServer]:
        return self._servers.enter_async_context(serving(replies))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._servers.aclose()


# --- replies


def sse(*values: Any, done: bool = True, separator: str = "\n\n") -> list[bytes]:
    """Return each value as a separate event."""
    lines = [f"data: {each if isinstance(each, str) else json.dumps(each)}{separator}".encode() for each in values]
    return [*lines, f"data: [DONE]{separator}".encode()] if done else lines


def stream(*values: Any, done: bool = True, cut: bool = False) -> Scripted:
    return Scripted(chunks=sse(*values, done=done), content_type="text/event-stream; charset=utf-8", cut=cut)


def chunk(delta: Any = None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": {} if delta is None else delta, "finish_reason": finish}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "m", "choices": [choice], **more}


def completion(message: Any, finish: str | None = "stop", **more: Any) -> Scripted:
    value = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18},
        **more,
    }
    return Scripted(json.dumps(value).encode())


HI = ChatRequest([UserMessage("Hi")])
OK = completion({"content": "ok"})
OK_STREAM = stream(chunk({"content": "ok"}), chunk({}, "stop"))


def call(name: Any = None, arguments: Any = None, *, id: Any = None, **more: Any) -> dict[str, Any]:  # noqa: A002
    """An entry of tool_calls, without what is not given."""
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    entry = {"id": id, "function": function or None, **more}
    return {key: value for key, value in entry.items() if value is not None}
