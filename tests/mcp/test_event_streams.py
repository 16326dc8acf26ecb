"""Event streams of MCP servers that end are opened again: later and later, and not without end for a call."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.streamable_http import EventCallback, EventMessage, EventStore
from mcp_types import JSONRPCMessage
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.conftest import Clock
from tests.mcp.test_hostile_servers import LISTED, answered, handshake
from tests.mcp.uvicorn_server import serving
from toolbox import Container
from toolbox.mcp import McpServers, McpTimeoutError, mcp_server
from toolbox.mcp.connection import McpConnection

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]
AT_ONCE = "id: 1\nretry: 0\ndata: \n\n"
"""An event without a message, after which a client may open the stream again at once."""


@asynccontextmanager
async def connected(app: Any, query: str = "", **options: Any) -> AsyncIterator[McpConnection]:
    made = Container().register(McpServers)
    async with (
        serving(app) as base,
        made.register_instance(mcp_server("far", url=f"{base}/mcp{query}", **options), name="far"),
    ):
        yield made.get(McpServers).server("far")


class StreamServer:
    """A server whose event streams end as a test wants; `opened` has the moments of the requests that open one.

    A reply to a call is a stream that ends at once, so that the client has to ask for the rest. With `?session` in its
    URL, the server has a stream beside the calls.
    """

    def __init__(self) -> None:
        self.app = FastAPI()
        self.opened: list[float] = []
        self.asked = asyncio.Event()
        self.called = asyncio.Event()
        self.answers_calls = True
        self.replies: Iterator[str] = iter(())
        self.hold = asyncio.Event()
        self.hold.set()
        self.app.get("/mcp")(self.open_stream)
        self.app.post("/mcp")(self.answer)

    async def open_stream(self, request: Request) -> Response:
        self.opened.append(time.monotonic())
        self.asked.set()
        return StreamingResponse(self.events(), media_type="text/event-stream")

    async def events(self) -> AsyncIterator[str]:
        yield AT_ONCE
        await self.hold.wait()
        yield next(self.replies, "")

    async def answer(self, request: Request) -> Response:
        message = await request.json()
        match message["method"]:
            case "tools/list":
                return answered(message, LISTED["tools/list"][0])
            case "tools/call":
                body = {
                    "jsonrpc": "2.0",
                    "id": message["id"],
                    "result": {"content": [{"type": "text", "text": "paid"}]},
                }
                if self.answers_calls:
                    self.replies = iter(("", "", f"id: 2\ndata: {json.dumps(body)}\n\n"))
                self.opened.append(time.monotonic())
                self.called.set()
                return Response(AT_ONCE, media_type="text/event-stream")
            case method:
                reply = handshake(message)
                if method == "initialize" and "session" in request.url.query:
                    reply.headers["Mcp-Session-Id"] = "1"
                return reply

    async def opened_after(self, pause: float, clock: Clock) -> bool:
        """Move the clock until a stream is opened again. Return True if the client waited for `pause` seconds."""
        await asyncio.sleep(0.05)  # the client learns that the stream before has ended
        clock.advance(pause * 0.9)
        with suppress(TimeoutError):
            await asyncio.wait_for(self.asked.wait(), 0.05)
        while not self.asked.is_set():
            clock.advance(pause * 0.2)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.asked.wait(), 0.3)
        self.asked.clear()
        # On a busy machine, the client may learn of the end only after the clock was moved first.
        return pause <= self.opened[-1] - self.opened[-2] < pause * 2 + 1


async def test_a_stream_that_ends_is_opened_again_after_a_second_and_then_later_and_later(clock: Clock) -> None:
    server = StreamServer()
    async with connected(server.app, "?session", timeout=1000) as far:
        await far.tools()
        await server.asked.wait()
        server.asked.clear()
        for pause in (1, 2, 4, 8, 16, 32, 60, 60):
            assert await server.opened_after(pause, clock)


async def test_the_pauses_begin_again_after_a_stream_that_stayed_open(clock: Clock) -> None:
    server = StreamServer()
    async with connected(server.app, "?session", timeout=1000) as far:
        await far.tools()
        await server.asked.wait()
        server.asked.clear()
        assert await server.opened_after(1, clock)
        assert await server.opened_after(2, clock)
        server.hold.clear()
        assert await server.opened_after(4, clock)
        clock.advance(60)
        server.opened.append(time.monotonic())
        server.hold.set()
        assert await server.opened_after(1, clock)


async def test_the_reply_to_a_call_is_asked_for_again_after_a_second_and_then_later(clock: Clock) -> None:
    server = StreamServer()
    async with connected(server.app, timeout=1000) as far:
        call = asyncio.create_task(far.call("good", {}))
        await server.called.wait()
        for pause in (1, 2, 4):
            assert await server.opened_after(pause, clock)
        result = await call

    assert result.content[0].text == "paid"  # type: ignore[union-attr]  # a text


async def test_the_reply_to_a_call_that_has_timed_out_is_not_asked_for_any_more(clock: Clock) -> None:
    server = StreamServer()
    server.answers_calls = False
    async with connected(server.app, timeout=10) as far:
        call = asyncio.create_task(far.call("good", {}))
        await server.called.wait()
        assert await server.opened_after(1, clock)
        assert await server.opened_after(2, clock)
        clock.advance(10)
        with pytest.raises(McpTimeoutError):
            await call
        count = len(server.opened)
        for _ in range(100):
            clock.advance(1)
            await asyncio.sleep(0.005)

    assert len(server.opened) == count


# --- servers of the SDK


class KeptEvents(EventStore):
    """Keeps the events of all streams in memory."""

    def __init__(self) -> None:
        self.events: list[tuple[str, JSONRPCMessage | None]] = []

    async def store_event(self, stream_id: str, message: JSONRPCMessage | None) -> str:
        self.events.append((stream_id, message))
        return str(len(self.events))

    async def replay_events_after(self, last_event_id: str, send_callback: EventCallback) -> str | None:
        stream, _ = self.events[int(last_event_id) - 1]
        for number, (each, message) in enumerate(self.events, 1):
            if each == stream and number > int(last_event_id) and message is not None:
                await send_callback(EventMessage(message, str(number)))
        return stream


def with_old_protocol(app: ASGIApp) -> ASGIApp:
    """Refuse the request by which a client finds out that a server knows the newest protocol."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        if (b"mcp-method", b"server/discover") in scope.get("headers", ()):
            error = {"jsonrpc": "2.0", "id": None, "error": {"code": -32601, "message": "unknown method"}}
            await Response(json.dumps(error), 400, media_type="application/json")(scope, receive, send)
        else:
            await app(scope, receive, send)

    return call


async def test_a_tool_that_closes_its_stream_and_goes_on_is_answered(clock: Clock) -> None:
    server = MCPServer("slow")
    gone = asyncio.Event()

    @server.tool()
    async def work(context: Context) -> str:
        await context.close_sse_stream()
        await gone.wait()
        return "done"

    app = server.streamable_http_app(event_store=KeptEvents(), retry_interval=0)
    async with connected(with_old_protocol(app)) as far:
        call = asyncio.create_task(far.call("work", {}))
        for _ in range(6):
            clock.advance(0.5)
            await asyncio.sleep(0.02)
        gone.set()
        result = await call

    assert result.content[0].text == "done"  # type: ignore[union-attr]  # a text


class Cut:
    """Ends the streams of subscriptions to changes when a test calls `cut`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app, self._cut = app, asyncio.Event()
        self.is_open = asyncio.Event()
        self.count = 0

    def cut(self) -> None:
        self.is_open.clear()
        self._cut.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (b"mcp-method", b"subscriptions/listen") not in scope.get("headers", ()):
            await self._app(scope, receive, send)
            return

        async def send_and_note(message: Message) -> None:
            await send(message)
            if message["type"] == "http.response.body":
                self.is_open.set()

        self._cut.clear()
        self.count += 1
        inner = asyncio.ensure_future(self._app(scope, receive, send_and_note))
        cut = asyncio.ensure_future(self._cut.wait())
        await asyncio.wait([inner, cut], return_when=asyncio.FIRST_COMPLETED)
        if cut.done():
            inner.cancel()
            await asyncio.wait([inner])
            await send({"type": "http.response.body", "body": b""})
        cut.cancel()


async def test_a_subscription_to_changes_that_ends_is_opened_again(clock: Clock) -> None:
    server = MCPServer("growing")
    server.add_tool(lambda: "old", name="old")
    app = Cut(server.streamable_http_app())
    async with connected(app) as far:
        assert [each.name for each in await far.tools()] == ["old"]
        await app.is_open.wait()
        app.cut()
        server.add_tool(lambda: "new", name="new")
        while not app.is_open.is_set():
            clock.advance(0.5)
            await asyncio.sleep(0.01)
        async with asyncio.timeout(60):
            while len(await far.tools()) < 2:  # the client learns a little later that the stream is open
                pass

    assert app.count == 2
