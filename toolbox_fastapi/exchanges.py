"""One HTTP request or WebSocket conversation as it goes on: how it ended, and whether its client is still there.

Not here: the bean scope around it (`application`), what is sent in it (`streaming`, `problems`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.types import Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from toolbox.errors import ToolboxError

if TYPE_CHECKING:
    from toolbox.container import Container

    from .stopping import Stopping

EXCHANGE_KEY = "toolbox.exchange"
"""Where an ASGI scope holds its `Exchange`."""

# As many messages are read ahead, to see the client leave behind them; uvicorn's are 64 KiB at most.
READ_AHEAD = 16


class ClientDisconnectedError(ToolboxError):
    """The client left before its answer was there; thrown into the generators of its request scope."""

    def __str__(self) -> str:
        return "the client left before the response had been sent"


class Exchange:
    """Stands between the server and the application: passes messages on and notices what they mean.

    It is the `Caller` of the invocations begun in it. To notice that the client leaves, somebody must be receiving:
    while the application is not, and an invocation is under way, messages are read ahead and handed over later.
    """

    __slots__ = (
        "_ahead",
        "_arrived",
        "_is_http",
        "_loop",
        "_reader",
        "_receive",
        "_receiving",
        "_send",
        "_watchers",
        "completed",
        "connection",
        "container",
        "entered",
        "failure",
        "left",
        "scope",
        "stopping",
        "task",
    )

    def __init__(
        self, container: Container, stopping: Stopping | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self.container, self.stopping, self.scope = container, stopping, scope
        if stopping is not None:
            stopping.opened(self)
        self.connection: HTTPConnection | None = None
        self.entered = False
        self.failure: BaseException | None = None
        self.completed = self.left = False
        self.task = asyncio.current_task()
        self._receive, self._send = receive, send
        self._is_http = scope["type"] == "http"
        self._loop = asyncio.get_running_loop()
        self._watchers: dict[object, Callable[[Exception], None]] = {}
        self._receiving = 0
        self._reader: asyncio.Task[None] | None = None
        self._ahead: deque[Message] = deque()
        self._arrived: asyncio.Event | None = None

    # --- how it ends

    def fail(self, error: BaseException) -> None:
        """Notes what left the endpoint, whether or not somebody makes a response of it."""
        if self.failure is None:
            self.failure = error

    def note(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """`fail`, as an exit of a context manager."""
        if error is not None:
            self.fail(error)

    def outcome(self, raised: BaseException | None) -> BaseException | None:
        """What is thrown into the scope's generators, `raised` being what left the application."""
        failure = self.failure or raised
        if not self.left or isinstance(failure, ClientDisconnectedError):
            return failure
        if failure is None:
            # A WebSocket client may hang up when all is said; the endpoint has seen it and is content.
            return ClientDisconnectedError() if self._is_http else None
        if isinstance(failure, (asyncio.CancelledError, ClientDisconnect, WebSocketDisconnect, OSError)):
            departure = ClientDisconnectedError()
            departure.__cause__ = failure
            return departure
        return failure

    def seeds(self) -> dict[type, object]:
        """The beans that the request scope begins with."""
        if self._is_http:
            return {Request: Request(self.scope, self.receive, self.send)}
        return {WebSocket: WebSocket(self.scope, self.receive, self.send)}

    def closed(self) -> None:
        """Its scope has been closed."""
        if self.stopping is not None:
            self.stopping.closed(self)

    async def end(self) -> None:
        """Stops reading ahead."""
        self._watchers.clear()
        self.completed = True
        if self._reader is not None and not self._reader.done():
            self._reader.cancel()
            await asyncio.wait({self._reader})

    # --- messages

    async def send(self, message: Message) -> None:
        """Passes a message to the client."""
        kind = message["type"]
        if (kind == "http.response.body" and not message.get("more_body")) or kind == "http.response.pathsend":
            self.completed = True
        try:
            await self._send(message)
        except OSError:
            self._leave()
            raise

    async def receive(self) -> Message:
        """The client's next message: one that was read ahead, else the one that comes."""
        while not self._ahead:
            if self._reader is None or self._reader.done():
                return await self._receive_now()
            assert self._arrived is not None
            self._arrived.clear()
            await self._arrived.wait()
        message = self._ahead.popleft()
        self._read_ahead()
        return message

    async def _receive_now(self) -> Message:
        self._receiving += 1
        try:
            message = await self._receive()
        finally:
            self._receiving -= 1
        self._notice(message)
        self._read_ahead()
        return message

    def _notice(self, message: Message) -> None:
        if message["type"] in ("http.disconnect", "websocket.disconnect"):
            self._leave()

    # --- a client that leaves

    @property
    def is_watched(self) -> bool:
        """Whether an invocation is under way for this client."""
        return bool(self._watchers)

    def watch(self, leave: Callable[[Exception], None]) -> Callable[[], None]:
        """See `toolbox.context.Caller`. What begins after the response, or when the client has left, is not watched."""
        if self.completed or self.left:
            return _nothing
        key = object()
        self._watchers[key] = leave
        if self._reader is None or self._reader.done():
            try:
                here = asyncio.get_running_loop() is self._loop
            except RuntimeError:
                here = False
            if here:
                self._read_ahead()
            else:
                self._loop.call_soon_threadsafe(self._read_ahead)
        return lambda: self._forget(key)

    def _forget(self, key: object) -> None:
        self._watchers.pop(key, None)

    def _leave(self) -> None:
        if self.completed or self.left:
            return
        self.left = True
        for leave in list(self._watchers.values()):
            leave(ClientDisconnectedError())
        self._watchers.clear()

    def _read_ahead(self) -> None:
        if not self._watchers or self._receiving or self.left or len(self._ahead) >= READ_AHEAD:
            return
        if self._reader is None or self._reader.done():
            self._arrived = self._arrived or asyncio.Event()
            self._reader = self._loop.create_task(self._read())

    async def _read(self) -> None:
        assert self._arrived is not None
        try:
            while len(self._ahead) < READ_AHEAD and not self.left:
                message = await self._receive()
                self._notice(message)
                self._ahead.append(message)
                self._arrived.set()
        finally:
            self._arrived.set()


def _nothing() -> None:
    pass


current_exchange: ContextVar[Exchange | None] = ContextVar("toolbox_fastapi.exchange", default=None)
