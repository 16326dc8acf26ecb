"""The state of one HTTP request or WebSocket while it runs: its error, and whether the client is still connected.

Not here: the bean scope of the request (`application`), the responses (`streaming`, `problems`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from fastapi.dependencies.utils import SolvedDependency
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.types import Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketDisconnected

from toolbox.callers import current_caller
from toolbox.di.injection_points import MISSING, Missing
from toolbox.di.scopes import RequestScope
from toolbox.errors import IllegalConfigurationError, Problem, ToolboxError, is_suspension
from toolbox.execution.threads import call_on
from toolbox.security import SecurityIdentity, caller_of_request

if TYPE_CHECKING:
    from toolbox.container import Container

    from .application_routes import PreparedRoutes

C = TypeVar("C", bound=HTTPConnection)
_Watchers: TypeAlias = dict[object, Callable[[Exception], None]]

EXCHANGE_KEY = "toolbox.exchange"
"""The key of the `ClientExchange` in an ASGI scope."""

AFTER_ENDPOINT, AFTER_RESPONSE = "fastapi_function_astack", "fastapi_inner_astack"
"""The keys in an ASGI scope of the exit stacks that FastAPI closes after the endpoint, and after its response.

Private names of FastAPI: it has no public way for a dependency to add, while it runs, what ends at these moments.
"""

ANY_CHALLENGE = "Bearer"
"""The `WWW-Authenticate` header if the identity comes from no security scheme of FastAPI: a 401 must have one."""

READ_AHEAD = 16
"""How many messages are read ahead to notice that the client left; uvicorn's messages have 64 KiB at most."""


class ClientDisconnectedError(ToolboxError):
    """The client disconnected before the response was complete.

    It is raised in the endpoint's invocations, and thrown into the generators of the request scope.
    """

    def __str__(self) -> str:
        return "the client disconnected before the response was complete"


class ApplicationStoppingError(ToolboxError):
    """The application is shutting down and the invocation did not finish in time."""

    def __str__(self) -> str:
        return "the application is shutting down; increase TOOLBOX_STOP_TIMEOUT to give invocations more time"


class ClientExchange:
    """Passes ASGI messages between the server and the application, and notices the end and a client that leaves.

    It is the `Caller` of the invocations that start in it. A disconnect is only visible in a received message. So
    messages are read ahead while an invocation runs and the application does not receive.

    `started` and `completed` say how far the response is. `unsettled` is True if an `@on_success` method has failed
    when the response was to begin or to end. `outer` is the exchange of the same request in another container.
    """

    # Defaults are class attributes: an object is created for each request, and most never change them.
    outer: ClientExchange | None = None
    connection: HTTPConnection | None = None
    identity: SecurityIdentity | None = None
    find_challenge: Callable[[], str] | None = None
    checked: SolvedDependency | None = None
    failure: BaseException | None = None
    completed = ended = left = entered = accepted = started = unsettled = False
    _receiving = 0
    _watchers: _Watchers | None = None
    _watchers_of_stop: _Watchers | None = None
    _stopped: Exception | None = None
    _ahead: deque[Message] | None = None
    reader: asyncio.Task[None] | None = None
    _arrived: asyncio.Event | None = None

    def __init__(
        self,
        container: Container,
        beans: RequestScope,
        routes: PreparedRoutes,
        shutdown_begun: asyncio.Event | None,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        self.container, self.beans, self.routes = container, beans, routes
        self.shutdown_begun, self.scope = shutdown_begun, scope
        self.task = asyncio.current_task()
        self._receive, self._send = receive, send

    @property
    def headers(self) -> Headers:
        """The headers of the request, which REST clients may pass on."""
        return Headers(scope=self.scope)

    # --- how it ends

    def fail(self, error: BaseException) -> None:
        """Record the error that left the endpoint, whether or not a handler turns it into a response."""
        if self.failure is None:
            self.failure = unwrapped_error(error)

    def fail_unhandled(self, error: BaseException) -> None:
        """Record an error that no exception handler has answered: it also leaves the applications around this one."""
        exchange: ClientExchange | None = self
        while exchange is not None:
            exchange.fail(error)
            exchange = exchange.outer

    def note(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Call `fail` as the exit of a context manager."""
        if error is not None:
            self.fail(error)

    def outcome(self, raised: BaseException | None) -> BaseException | None:
        """Return the error to throw into the scope's generators; `raised` is the error that left the application."""
        failure = self.failure or (raised and unwrapped_error(raised))
        if isinstance(failure, (ClientDisconnect, WebSocketDisconnect)):
            return _make_disconnect_error(failure)
        if not self.left or isinstance(failure, ClientDisconnectedError):
            return failure
        if failure is None and self.scope["type"] == "websocket":
            return None  # the endpoint received the disconnect and returned normally
        if failure is None or isinstance(failure, (asyncio.CancelledError, OSError, WebSocketDisconnected)):
            return _make_disconnect_error(failure)
        return failure

    async def settle(self) -> None:
        """Call the `@on_success` methods of the beans so far, unless the work has failed: it has ended well.

        What one raises is the error of the work.
        """
        has_left = self.left and self.scope["type"] == "http"
        if has_left or not (self.failure is None or is_suspension(self.failure)):
            return
        try:
            await self.beans.settle()
        except BaseException as error:
            self.failure = error
            raise

    async def settle_unless_failed(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Call `settle` as the exit of a context manager."""
        if error is None or is_suspension(error):
            await self.settle()

    def end(self) -> None:
        """Mark the end, and break the reference cycle with the connection."""
        self.completed = self.ended = True
        self.connection = None

    async def stop_reading(self) -> None:
        """Stop reading ahead."""
        if self.reader is not None and not self.reader.done():
            self.reader.cancel()
            await asyncio.wait({self.reader})

    # --- messages

    def send(self, message: Message) -> Awaitable[None]:
        """Send a message to the client. Before the first and the last one, the work has ended well, or has failed."""
        kind = message["type"]
        is_last = (kind == "http.response.body" and not message.get("more_body")) or kind == "http.response.pathsend"
        if (is_last or kind == "http.response.start") and not self.beans.is_settled:
            return self._settle_and_send(message)
        if is_last:
            self.completed = True
        elif kind == "http.response.start":
            self.started = True
        elif kind == "websocket.accept":
            self.accepted = True
        return self._send(message)

    async def _settle_and_send(self, message: Message) -> None:
        """Send the first or the last message of a response after `settle`.

        Endpoints of FastAPI have settled before they begin to answer. These are the others, and beans that a stream has
        made: the application believes that it has begun to answer, so no exception handler answers the error.
        """
        try:
            await self.settle()
        except BaseException:
            self.unsettled = True
            raise
        if message["type"] == "http.response.start":
            self.started = True
        else:
            self.completed = True
        await self._send(message)

    async def receive(self) -> Message:
        """Return the client's next message, from those read ahead or from the server."""
        while not self._ahead:
            if self.reader is None or self._arrived is None or self.reader.done():
                return await self._receive_next()
            self._arrived.clear()
            await self._arrived.wait()
        message = self._ahead.popleft()
        self._read_ahead()
        return message

    async def _receive_next(self) -> Message:
        self._receiving += 1
        try:
            message = await self._receive()
        finally:
            self._receiving -= 1
        self._notice_message(message)
        self._read_ahead()
        return message

    def _notice_message(self, message: Message) -> None:
        if message["type"] in ("http.disconnect", "websocket.disconnect") and not (self.completed or self.left):
            self.left = True
            self._end_invocations(ClientDisconnectedError())

    # --- a client that may leave, and an application that stops

    def stop_invocations(self, error: Exception) -> None:
        """Cancel the running invocations, also those of background tasks, and later ones; they raise `error`."""
        self._stopped = error
        self._end_invocations(error)
        watchers, self._watchers_of_stop = self._watchers_of_stop, None
        for leave in (watchers or {}).values():
            leave(error)

    def _end_invocations(self, error: Exception) -> None:
        watchers, self._watchers = self._watchers, None
        for leave in (watchers or {}).values():
            leave(error)

    def watch(self, leave: Callable[[Exception], None]) -> Callable[[], object]:
        """Call `leave(error)` when the client disconnects, or the application stops. Return what stops watching.

        Invocations that start after the response or the disconnect go on without the client.
        """
        if self._stopped is not None or self.completed or self.left:
            return self.watch_application(leave)
        if self._watchers is None:
            self._watchers = {}
        stop_watching = _add_watcher(self._watchers, leave)
        if self.reader is None or self.reader.done():
            assert self.task is not None, "an ASGI application runs in a task"
            call_on(self.task.get_loop(), self._read_ahead)
        return stop_watching

    def watch_application(self, leave: Callable[[Exception], None]) -> Callable[[], object]:
        """Call `leave(error)` when the application stops. Return a function that stops watching."""
        if self._stopped is not None:
            leave(self._stopped)
            return _do_nothing
        if self._watchers_of_stop is None:
            self._watchers_of_stop = {}
        return _add_watcher(self._watchers_of_stop, leave)

    def _read_ahead(self) -> None:
        if not self._watchers or self._receiving or self.left:
            return
        if self._ahead is None:
            self._ahead = deque()
        if len(self._ahead) < READ_AHEAD and (self.reader is None or self.reader.done()):
            self._arrived = asyncio.Event()
            self.reader = asyncio.create_task(self._read_messages(self._ahead, self._arrived))

    async def _read_messages(self, ahead: deque[Message], arrived: asyncio.Event) -> None:
        try:
            while len(ahead) < READ_AHEAD and not self.left:
                message = await self._receive()
                self._notice_message(message)
                ahead.append(message)
                arrived.set()
        finally:
            arrived.set()


class ReplayedReceive:
    """The messages of a request, which can be received again after `rewind`."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._read_messages: list[Message] = []
        self._again: list[Message] | None = None

    async def __call__(self) -> Message:
        if self._again:
            return self._again.pop(0)
        message = await self._receive()
        if self._again is None:
            self._read_messages.append(message)
        return message

    def rewind(self) -> None:
        """Return the messages that were received so far again, before further ones."""
        self._again, self._read_messages = self._read_messages, []


def unwrapped_error(error: BaseException) -> BaseException:
    """Return the error as the endpoint or its stream raised it; Starlette wraps errors that come too late."""
    is_wrapped = isinstance(error, RuntimeError) and str(error).startswith("Caught handled exception")
    return error.__cause__ if is_wrapped and error.__cause__ is not None else error


def _make_disconnect_error(cause: BaseException | None) -> ClientDisconnectedError:
    error = ClientDisconnectedError()
    error.__cause__ = cause
    return error


def _add_watcher(watchers: _Watchers, leave: Callable[[Exception], None]) -> Callable[[], object]:
    key = object()
    watchers[key] = leave
    return partial(watchers.pop, key, None)


def _do_nothing() -> None:
    pass


def current_connection(kind: type[C]) -> C | Missing:
    """Return the `Request` or `WebSocket` of the running code, the same object as the endpoint's; else `MISSING`."""
    exchange = current_exchange()
    if exchange is None or exchange.ended:
        return MISSING
    connection = exchange.connection
    if connection is None:
        of_kind = Request if exchange.scope["type"] == "http" else WebSocket
        connection = exchange.connection = of_kind(exchange.scope, exchange.receive, exchange.send)
    return connection if isinstance(connection, kind) else MISSING


def current_identity() -> SecurityIdentity:
    """Return the identity of the running request or WebSocket; the anonymous one outside, or before it is known."""
    exchange = current_exchange()
    found = None if exchange is None else exchange.identity
    return found or caller_of_request.get() or SecurityIdentity.anonymous()


def exchange_of(connection: HTTPConnection) -> ClientExchange:
    """Return the exchange of `connection`, and let it provide this same object to beans.

    Raises `IllegalConfigurationError` if the application has no container.
    """
    exchange: ClientExchange | None = connection.scope.get(EXCHANGE_KEY)
    if exchange is None:
        raise IllegalConfigurationError(
            [
                Problem(
                    "an endpoint with Inject[…]",
                    "its application has no container",
                    "call toolbox_fastapi.install(app, container) where you create the application",
                )
            ]
        )
    exchange.connection = connection
    return exchange


def exit_stack(connection: HTTPConnection, key: str) -> AsyncExitStack:
    """Return the exit stack of FastAPI with this key. Raises `RuntimeError` if FastAPI has not set it."""
    stack = connection.scope.get(key)
    if not isinstance(stack, AsyncExitStack):
        raise RuntimeError(f"FastAPI has set no exit stack {key!r}; use a version of FastAPI that toolbox supports")
    return stack


def current_exchange() -> ClientExchange | None:
    """Return the exchange of the running code, or None outside of requests and WebSockets."""
    caller = current_caller.get()
    return caller if isinstance(caller, ClientExchange) else None


def record_failure(error: BaseException) -> None:
    """Record an error in the exchange of the running code, if there is one."""
    exchange = current_exchange()
    if exchange is not None:
        exchange.fail(error)


async def settle_exchange() -> None:
    """Call the `@on_success` methods of the request of the running code, if there is one. Raises their error."""
    exchange = current_exchange()
    if exchange is not None:
        await exchange.settle()
