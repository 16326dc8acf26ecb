"""`install`: joins an application and a container, in start and stop, in each request and WebSocket, in errors.

Not here: how an endpoint gets its beans (`endpoints`), what a client is told of an error (`problems`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from fastapi import FastAPI
from fastapi.routing import APIRoute, iter_route_contexts
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException, WebSocketException
from starlette.middleware import Middleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import HTTPConnection, Request
from starlette.routing import BaseRoute, Mount
from starlette.types import ASGIApp, Lifespan, Receive, Scope, Send
from starlette.websockets import WebSocket

from toolbox.container import APPLICATION_CONTAINER, Container, internals_of
from toolbox.context import current_caller
from toolbox.errors import IllegalConfigurationError, Problem, ToolboxError
from toolbox.rest import propagate_headers
from toolbox.settings import ToolboxSettings

from .dev_ui.access import DevUi
from .endpoints import InjectRoute
from .exchanges import (
    EXCHANGE_KEY,
    ClientDisconnectedError,
    Exchange,
    as_raised,
    current_connection,
    current_exchange,
)
from .problems import answer_with_problem, is_async_handler
from .requirements import complete, endpoint_problems, installed, tools_of_endpoints
from .stopping import Stopping

if TYPE_CHECKING:
    from .dev_ui.routes import DevUiApplication


def install(app: FastAPI, container: Container, *, dev_ui: bool | str | DevUi = False) -> None:
    """Makes `container` the one of `app`; to be called first, before routes are added.

    The application's lifespan starts and stops it, around the lifespan that the application has; each request and
    WebSocket gets a request scope; `ToolboxError`s are answered with problem details, unless the application has
    handlers of its own for them.

    `dev_ui`: True, its path, or a `DevUi` serves a page that shows the program and tries it; for development. Its
    address is printed at start. `FastAPI(dependencies=[…])` does not guard it, `DevUi(dependencies=[…])` does. Raises
    `IllegalConfigurationError` for an application that has a container already.
    """
    if not isinstance(app, FastAPI):
        raise TypeError(f"install(app, container) takes the FastAPI application first, not a {type(app).__name__}")
    if app in installed:
        what, fix = "the application has a container already", "install one, in which everything is registered"
        raise IllegalConfigurationError([Problem("install(app, container)", what, fix)])
    installation = Installation(app, container)
    internals = internals_of(container)
    installed.add(app)
    setattr(app.state, APPLICATION_CONTAINER, container)
    for kind in (HTTPConnection, Request, WebSocket):
        internals.declare_seed(kind, partial(current_connection, kind))
    internals.add_implied(lambda: tools_of_endpoints(app.routes))
    internals.add_check(lambda graph: endpoint_problems(app.routes, graph))
    if app.router.route_class is APIRoute:
        app.router.route_class = InjectRoute
    app.router.lifespan_context = installation.around(app.router.lifespan_context)
    see_failures(app)
    build = app.build_middleware_stack
    # The outermost layer: what other middlewares do belongs to the request as well.
    app.build_middleware_stack = lambda: RequestScopes(build(), installation)  # type: ignore[method-assign]
    if dev_ui:
        from .dev_ui.routes import mount_dev_ui

        installation.dev_ui = mount_dev_ui(app, container, DevUi.of(dev_ui))


class Installation:
    """One application with its container; `stopping` is there while its lifespan runs."""

    def __init__(self, app: FastAPI, container: Container) -> None:
        self.app, self.container = app, container
        self.stopping: Stopping | None = None
        self.dev_ui: DevUiApplication | None = None

    def around(self, lifespan: Lifespan[Any]) -> Lifespan[Any]:
        """The application's `lifespan`, inside that of the container."""

        @asynccontextmanager
        async def started(app: FastAPI) -> AsyncIterator[Any]:
            complete(app.routes)
            for each in mounted_in(app.routes):
                see_failures(each)
            async with self._started(), lifespan(app) as state:
                settings = await self.container.aget(ToolboxSettings)
                self.stopping = stopping = Stopping(settings.stop_timeout)
                if self.dev_ui is not None:
                    self.dev_ui.start(settings)
                try:
                    with stopping.listening():
                        yield state
                finally:
                    await stopping.wait()
                    self.stopping = None

        return started

    def _started(self) -> AbstractAsyncContextManager[object]:
        """The container's life; of one that somebody else has started, nothing."""
        return nullcontext() if self.container.is_started else self.container


def mounted_in(routes: Sequence[BaseRoute]) -> Iterator[Starlette]:
    """The applications mounted among these routes, at any depth, FastAPI's or not."""
    for context in iter_route_contexts(routes):
        if isinstance(context.original_route, Mount):
            inner: Any = context.original_route.app
            while not isinstance(inner, Starlette) and hasattr(inner, "app"):  # a middleware around it
                inner = inner.app
            if isinstance(inner, Starlette):
                yield inner
            yield from mounted_in(context.original_route.routes or getattr(inner, "routes", ()))


# --- each request and WebSocket


class RequestScopes:
    """ASGI middleware: a request scope around each HTTP request and WebSocket, until its response has been sent.

    Background tasks belong to it. The scope is told how the exchange ended, also when that was made into a response.
    """

    def __init__(self, app: ASGIApp, installation: Installation) -> None:
        self.app, self._installation = app, installation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        container = self._installation.container
        outer = scope.get(EXCHANGE_KEY)
        if scope["type"] == "http" and (dev_ui := self._installation.dev_ui) is not None:
            dev_ui.hide_token(scope)
        if scope["type"] not in ("http", "websocket") or (outer is not None and outer.container is container):
            await self.app(scope, receive, send)
            return
        beans, stopping = container.request_scope(), self._installation.stopping
        exchange = scope[EXCHANGE_KEY] = Exchange(container, stopping, scope, receive, send)
        if stopping is not None:
            stopping.open.add(exchange)
        token = current_caller.set(exchange)
        raised: BaseException | None = None
        await beans.__aenter__()
        try:
            with propagate_headers(Headers(scope=scope)):
                await self.app(scope, exchange.receive, exchange.send)
        except BaseException as error:
            raised = error
            # That the client left in the middle of a response is nothing for the server to complain about.
            if not (exchange.left and isinstance(as_raised(error), ClientDisconnectedError)):
                raise
        finally:
            current_caller.reset(token)
            scope[EXCHANGE_KEY] = outer
            exchange.end()
            ending = exchange.outcome(raised) if raised or exchange.failure or exchange.left else None
            try:
                await beans.__aexit__(None if ending is None else type(ending), ending, None)
            finally:
                if stopping is not None:
                    stopping.closed(exchange)
                if exchange.reader is not None:
                    await exchange.stop_reading()


# --- errors

_seen: WeakSet[Starlette] = WeakSet()


def see_failures(app: Starlette) -> None:
    """Lets exchanges of `app` know what leaves an endpoint, though a handler makes a response of it.

    Handled exceptions never reach a middleware: after an `HTTPException` a session would be committed.
    """
    if app in _seen:
        return
    _seen.add(app)
    # Starlette's own handlers are put where they can be seen.
    plain = ExceptionMiddleware(app.router)
    own: dict[Any, Any] = {
        ToolboxError: answer_with_problem,
        HTTPException: plain.http_exception,
        WebSocketException: plain.websocket_exception,
    }
    app.exception_handlers = {**own, **app.exception_handlers}
    build = app.build_middleware_stack

    def build_seeing() -> ASGIApp:
        handlers, middlewares = app.exception_handlers, app.user_middleware
        app.exception_handlers = {kind: seeing(handler) for kind, handler in handlers.items()}
        app.user_middleware = [*middlewares, Middleware(SeeFailures)] if middlewares else []
        try:
            return build()
        finally:
            app.exception_handlers, app.user_middleware = handlers, middlewares

    app.build_middleware_stack = build_seeing  # type: ignore[method-assign]


def see(error: BaseException) -> None:
    """Tells the exchange that this code runs in."""
    exchange = current_exchange()
    if exchange is not None:
        exchange.fail(error)


def seeing(handler: Callable[..., Any]) -> Callable[..., Any]:
    """An exception handler that tells the exchange before it does its work; as synchronous as it was."""
    if is_async_handler(handler):

        async def handle(connection: Any, error: Exception) -> Any:
            see(error)
            return await handler(connection, error)

        return handle

    def handle_on_thread(connection: Any, error: Exception) -> Any:
        see(error)
        return handler(connection, error)

    return handle_on_thread


class SeeFailures:
    """ASGI middleware, the innermost: sees what no handler has handled, before another middleware answers it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.app(scope, receive, send)
        except BaseException as error:
            see(error)
            raise
