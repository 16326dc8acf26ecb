"""One HTTP request or WebSocket conversation as it goes on: how it ended, and whether its client is still there.

Not here: the bean scope around it (`application`), what is sent in it (`streaming`, `problems`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.types import Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketDisconnected

from toolbox.context import current_caller
from toolbox.di.beans import MISSING, Missing
from toolbox.errors import ToolboxError

if TYPE_CHECKING:
    from toolbox.container import Container

    from .stopping import Stopping

C = TypeVar("C", bound=HTTPConnection)

EXCHANGE_KEY = "toolbox.exchange"
"""Where an ASGI scope holds its `Exchange`."""

# As many messages are read ahead, to see the client leave behind them; uvicorn's are 64 KiB at most.
READ_AHEAD = 16


class ClientDisconnectedError(ToolboxError):
    """The client left before its answer was there; thrown into the generators of its request scope."""

    def __str__(self) -> str:
        return "the client left before the response had been sent"


class ApplicationStoppingError(ToolboxError):
    """The application stops, and what was asked of it took longer than that can wait."""

    def __str__(self) -> str:
        return "the application stops; raise TOOLBOX_STOP_TIMEOUT to let invocations take longer"


class Exchange:
    """Stands between the server and the application: passes messages on and notices what they mean.

    It is the `Caller` of the invocations begun in it. To notice that the client leaves, somebody must be receiving:
    while the application is not, and an invocation is under way, messages are read ahead and handed over later.
    """

    # What most exchanges never change stands on the class: one is made for every request.
    connection: HTTPConnection | None = None
    failure: BaseException | None = None
    completed = ended = left = entered = False
    _receiving = 0
    _watchers: dict[object, Callable[[Exception], None]] | None = None
    _ahead: deque[Message] | None = None
    reader: asyncio.Task[None] | None = None
    _arrived: asyncio.Event | None = None

    def __init__(
        self,
        container: Container,
        stopping: Stopping | None,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        self.container, self.stopping, self.scope = container, stopping, scope
        self.task = asyncio.current_task()
        self._receive, self._send = receive, send

    # --- how it ends

    def fail(self, error: BaseException) -> None:
        """Notes what left the endpoint, whether or not somebody makes a response of it."""
        if self.failure is None:
            self.failure = as_raised(error)

    def note(self, kind: object, error: BaseException | None, trace: object) -> None:
        """`fail`, as an exit of a context manager."""
        if error is not None:
            self.fail(error)

    def outcome(self, raised: BaseException | None) -> BaseException | None:
        """What is thrown into the scope's generators, `raised` being what left the application."""
        failure = self.failure or (raised and as_raised(raised))
        if isinstance(failure, (ClientDisconnect, WebSocketDisconnect)):
            return _departure(failure)
        if not self.left or isinstance(failure, ClientDisconnectedError):
            return failure
        if failure is None and self.scope["type"] == "websocket":
            return None  # its client may hang up when all is said; the endpoint has seen it and is content
        if failure is None or isinstance(failure, (asyncio.CancelledError, OSError, WebSocketDisconnected)):
            return _departure(failure)
        return failure

    def end(self) -> None:
        """Lets go of what holds it in turn: nothing here should wait for the garbage collector."""
        self.completed = self.ended = True
        self.connection = None

    async def stop_reading(self) -> None:
        """Ends the reading ahead."""
        if self.reader is not None and not self.reader.done():
            self.reader.cancel()
            await asyncio.wait({self.reader})

    # --- messages

    def send(self, message: Message) -> Awaitable[None]:
        """Passes a message to the client."""
        kind = message["type"]
        if (kind == "http.response.body" and not message.get("more_body")) or kind == "http.response.pathsend":
            self.completed = True
        return self._send(message)

    async def receive(self) -> Message:
        """The client's next message: one that was read ahead, else the one that comes."""
        while not self._ahead:
            if self.reader is None or self._arrived is None or self.reader.done():
                return await self._receive_now()
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
        if message["type"] in ("http.disconnect", "websocket.disconnect") and not (self.completed or self.left):
            self.left = True
            self.end_invocations(ClientDisconnectedError())

    # --- a client that may leave

    def end_invocations(self, error: Exception) -> None:
        """Cancels the invocations under way for this client; they raise `error`."""
        watchers, self._watchers = self._watchers, None
        for leave in (watchers or {}).values():
            leave(error)

    def watch(self, leave: Callable[[Exception], None]) -> Callable[[], None]:
        """See `toolbox.context.Caller`. What begins after the response, or when the client has left, is not watched."""
        if self.completed or self.left:
            return _nothing
        if self._watchers is None:
            self._watchers = {}
        key = object()
        self._watchers[key] = leave
        if self.reader is None or self.reader.done():
            loop = self._loop
            if asyncio._get_running_loop() is loop:
                self._read_ahead()
            else:
                loop.call_soon_threadsafe(self._read_ahead)
        return lambda: self._forget(key)

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        assert self.task is not None, "an ASGI application runs in a task"
        return self.task.get_loop()

    def _forget(self, key: object) -> None:
        if self._watchers is not None:
            self._watchers.pop(key, None)

    def _read_ahead(self) -> None:
        if not self._watchers or self._receiving or self.left:
            return
        if self._ahead is None:
            self._ahead = deque()
        if len(self._ahead) < READ_AHEAD and (self.reader is None or self.reader.done()):
            self._arrived = asyncio.Event()
            self.reader = self._loop.create_task(self._read(self._ahead, self._arrived))

    async def _read(self, ahead: deque[Message], arrived: asyncio.Event) -> None:
        try:
            while len(ahead) < READ_AHEAD and not self.left:
                message = await self._receive()
                self._notice(message)
                ahead.append(message)
                arrived.set()
        finally:
            arrived.set()


def as_raised(error: BaseException) -> BaseException:
    """The error as the endpoint or its stream raised it: too late for a handler, Starlette wraps it."""
    is_wrapped = isinstance(error, RuntimeError) and str(error).startswith("Caught handled exception")
    return error.__cause__ if is_wrapped and error.__cause__ is not None else error


def _departure(cause: BaseException | None) -> ClientDisconnectedError:
    departure = ClientDisconnectedError()
    departure.__cause__ = cause
    return departure


def _nothing() -> None:
    pass


def current_connection(kind: type[C]) -> C | Missing:
    """The `Request` or `WebSocket` of this code, the very one that its endpoint gets; `MISSING` outside of any."""
    exchange = current_exchange()
    if exchange is None or exchange.ended:
        return MISSING
    connection = exchange.connection
    if connection is None:
        of_kind = Request if exchange.scope["type"] == "http" else WebSocket
        connection = exchange.connection = of_kind(exchange.scope, exchange.receive, exchange.send)
    return connection if isinstance(connection, kind) else MISSING


def current_exchange() -> Exchange | None:
    """The exchange this code runs in."""
    caller = current_caller.get()
    return caller if isinstance(caller, Exchange) else None
