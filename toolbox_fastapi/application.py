"""`install`: connects an application and a container at startup, in requests and WebSockets, at errors and shutdown.

Not here: how an endpoint gets its beans (`endpoints`), the response to an error (`problems`).
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakSet

from fastapi import Depends, FastAPI
from fastapi.routing import APIRoute
from starlette.applications import Starlette
from starlette.exceptions import HTTPException, WebSocketException
from starlette.middleware import Middleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Lifespan, Receive, Scope, Send
from starlette.websockets import WebSocket

from toolbox.callers import current_caller
from toolbox.container import APPLICATION_CONTAINER, Container, internals_of
from toolbox.errors import IllegalConfigurationError, Problem, ToolboxError
from toolbox.overview import ENTRIES
from toolbox.security import SecurityIdentity
from toolbox.settings import ToolboxSettings

from .application_routes import PreparedRoutes, applications_within, installed
from .dev_ui.access import DevUi
from .endpoint_checks import (
    complete_dependencies,
    endpoint_problems,
    entries_of,
    find_implied_beans,
    offers_of_endpoints,
    tools_added_by_endpoints,
)
from .endpoint_roles import check_callers, role_problems
from .endpoints import InjectRoute
from .exchanges import (
    EXCHANGE_KEY,
    ApplicationStoppingError,
    ClientDisconnectedError,
    ClientExchange,
    current_connection,
    current_exchange,
    current_identity,
    record_failure,
    unwrapped_error,
)
from .identities import IDENTITY_DEPENDENCY, identity_dependency
from .problems import answer_group, answer_with_problem, is_async_handler

if TYPE_CHECKING:
    from .dev_ui.routes import DevUiApplication


def install(
    app: FastAPI,
    container: Container,
    *,
    dev_ui: bool | str | DevUi = False,
    identity: Callable[..., Any] | None = None,
) -> None:
    """Connect `container` to `app`. Call it once, before you add routes.

        app = FastAPI()
        install(app, Container().register(Menu, Waiter))

    The application's lifespan starts and stops the container, around the lifespan that you pass to `FastAPI`. A
    container that is already started is used as it is. Each request and each WebSocket gets a request scope. A
    `ToolboxError` becomes a response with problem details, unless the application has its own handler for it.

    `dev_ui` serves a page for development that shows the program and calls its tools and services: True (at
    `/dev-ui`), a path, or a `DevUi`. Its address is printed at startup. `FastAPI(dependencies=[…])` does not protect
    it, `DevUi(dependencies=[…])` does.

    `identity` is a FastAPI dependency that returns the caller's `SecurityIdentity`, or None for an anonymous caller:

        async def current_user(token: Annotated[str, Depends(scheme)]) -> SecurityIdentity | None: ...

    It runs once for each request and each WebSocket, before the endpoint, also for the calls of the dev UI and for
    `mount_mcp`; its exceptions are those of the application. `Inject[SecurityIdentity]` gets the result.

    Raises `TypeError` if `app` is not a FastAPI application, or `container` is not a `Container`. Raises
    `IllegalConfigurationError` if the application already has a container.
    """
    if not isinstance(app, FastAPI):
        raise TypeError(f"install(app, container): app must be a FastAPI application, got {type(app).__name__}")
    if not isinstance(container, Container):
        raise TypeError(f"install(app, container): container must be a Container, got {type(container).__name__}")
    if app in installed:
        what, fix = "the application already has a container", "call install once, with one container for everything"
        raise IllegalConfigurationError([Problem("install(app, container)", what, fix)])
    resolve_identity = None if identity is None else identity_dependency(identity, "install(app, container)")
    installation = Installation(app, container, resolve_identity)
    internals = internals_of(container)
    installed.add(app)
    setattr(app.state, INSTALLATION, installation)
    setattr(app.state, APPLICATION_CONTAINER, container)
    for kind in (HTTPConnection, Request, WebSocket):
        internals.declare_seed(kind, partial(current_connection, kind))
    if resolve_identity is not None:
        internals.declare_seed(SecurityIdentity, current_identity)
        setattr(app.state, IDENTITY_DEPENDENCY, resolve_identity)
        app.router.dependencies.insert(0, Depends(resolve_identity))
    internals.add_implied(lambda: find_implied_beans(app))
    internals.add_offers(lambda: offers_of_endpoints(app))
    internals.add_tool_finder(lambda graph: tools_added_by_endpoints(app, graph))
    internals.add_check(lambda graph: endpoint_problems(app, graph))
    internals.add_check(lambda graph: role_problems(app, graph, resolve_identity))
    setattr(app.state, ENTRIES, [lambda graph: entries_of(app, graph)])
    if app.router.route_class is APIRoute:
        app.router.route_class = InjectRoute
    app.router.lifespan_context = installation.wrap_lifespan(app.router.lifespan_context)
    record_failures(app)
    build = app.build_middleware_stack
    # The outermost layer, because other middleware belongs to the request as well.
    app.build_middleware_stack = lambda: RequestScopes(build(), installation)  # type: ignore[method-assign]
    if dev_ui:
        from .dev_ui.routes import mount_dev_ui

        installation.dev_ui = mount_dev_ui(app, container, DevUi.of(dev_ui))


Server: TypeAlias = Callable[[], AbstractAsyncContextManager[None]]
"""Runs something that answers requests of an application, such as an MCP server."""

INSTALLATION = "toolbox_installation"
"""Name of the attribute of an application's `state` that has its `Installation`."""


class Installation:
    """An application with its container; `shutdown` is set while a lifespan runs, its own or that of a parent.

    `servers` run inside of it.
    """

    def __init__(self, app: FastAPI, container: Container, resolve_identity: Callable[..., Any] | None) -> None:
        self.app, self.container, self._resolve_identity = app, container, resolve_identity
        self.shutdown: Shutdown | None = None
        self.dev_ui: DevUiApplication | None = None
        self.servers: list[Server] = []
        self.routes = PreparedRoutes(app, self._prepare_routes)

    def wrap_lifespan(self, lifespan: Lifespan[Any]) -> Lifespan[Any]:
        """Return a lifespan that starts the container, runs the application's `lifespan`, and stops the container.

        The containers of applications within, whose lifespans nobody runs, are started and stopped too.
        """

        @asynccontextmanager
        async def start_and_serve(app: FastAPI) -> AsyncIterator[Any]:
            async with self._start_container(), lifespan(app) as state, AsyncExitStack() as within:
                settings = await self.container.aget(ToolboxSettings)
                shutdown = Shutdown(settings.stop_timeout)
                await within.enter_async_context(self._serve(shutdown))
                for path, each in applications_within(app):
                    # The program may have started the container, or run the lifespan itself.
                    inner: Installation | None = getattr(getattr(each, "state", None), INSTALLATION, None)
                    if inner is not None and inner.shutdown is None:
                        await within.enter_async_context(inner._serve(shutdown, path))
                try:
                    with shutdown.notice_signals():
                        yield state
                finally:
                    await shutdown.wait()

        return start_and_serve

    @asynccontextmanager
    async def _serve(self, shutdown: Shutdown, path: str = "") -> AsyncIterator[None]:
        """Let the application answer requests inside the block; `path` is where it is mounted."""
        async with self._start_container(), AsyncExitStack() as running:
            self.routes.refresh()
            for each in self.servers:
                await running.enter_async_context(each())
            self.shutdown = shutdown
            if self.dev_ui is not None:
                self.dev_ui.start(await self.container.aget(ToolboxSettings), path)
            try:
                yield
            finally:
                self.shutdown = None

    def _start_container(self) -> AbstractAsyncContextManager[object]:
        """Return the container as a context manager, or an empty one if it is already started."""
        return nullcontext() if self.container.is_started else self.container

    def _prepare_routes(self) -> None:
        complete_dependencies(self.app, internals_of(self.container).graph, self._resolve_identity)
        check_callers(self.app, self.container, self._resolve_identity)
        for _, each in applications_within(self.app):
            if isinstance(each, Starlette):
                record_failures(each)


def run_while_served(app: FastAPI, server: Server) -> None:
    """Run `server` while `app` answers requests: in its lifespan, or in that of an application that mounts it."""
    installation: Installation | None = getattr(app.state, INSTALLATION, None)
    if installation is not None:
        installation.servers.append(server)
        return
    lifespan = app.router.lifespan_context

    @asynccontextmanager
    async def run_and_serve(app: FastAPI) -> AsyncIterator[Any]:
        async with lifespan(app) as state, server():
            yield state

    app.router.lifespan_context = run_and_serve


# --- each request and WebSocket


class RequestScopes:
    """ASGI middleware: opens a request scope for each HTTP request and WebSocket, until its response has been sent.

    Background tasks run in the scope. When it closes, it learns the error that left the endpoint, also if an exception
    handler turned this error into a response.
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
        beans, shutdown = container.request_scope(), self._installation.shutdown
        begun = None if shutdown is None else shutdown.begun
        exchange = ClientExchange(container, beans, self._installation.routes, begun, scope, receive, send)
        exchange.outer = outer
        scope[EXCHANGE_KEY] = exchange
        if shutdown is not None:
            shutdown.add_exchange(exchange)
        token = current_caller.set(exchange)
        raised: BaseException | None = None
        await beans.__aenter__()
        try:
            try:
                await self.app(scope, exchange.receive, exchange.send)
            except Exception as error:
                # An application that is not FastAPI's had begun to answer when its `@on_success` methods failed.
                if not exchange.unsettled or exchange.started:
                    raise
                logger.error("http %s failed", scope["path"], exc_info=exchange.failure or error)
                await PlainTextResponse("Internal Server Error", 500)(scope, exchange.receive, exchange.send)
        except BaseException as error:
            raised = error
            # A client that leaves during a response is not an error for the server's log.
            if not (exchange.left and isinstance(unwrapped_error(error), ClientDisconnectedError)):
                raise
        finally:
            current_caller.reset(token)
            scope[EXCHANGE_KEY] = outer
            exchange.end()
            ending = exchange.outcome(raised) if raised or exchange.failure or exchange.left else None
            try:
                await beans.__aexit__(None if ending is None else type(ending), ending, None)
            finally:
                if shutdown is not None:
                    shutdown.forget_exchange(exchange)
                if exchange.reader is not None:
                    await exchange.stop_reading()


# --- errors

_recorded_apps: WeakSet[Starlette] = WeakSet()


def record_failures(app: Starlette) -> None:
    """Make `app` record the errors that leave its endpoints, also those that exception handlers answer.

    Middleware never sees a handled exception. Without this, a session would be committed after an `HTTPException`.
    """
    if app in _recorded_apps:
        return
    _recorded_apps.add(app)
    # Starlette adds its own handlers when it builds the stack; they must be wrapped as well.
    plain = ExceptionMiddleware(app.router)
    own: dict[Any, Any] = {
        ToolboxError: answer_with_problem,
        ExceptionGroup: answer_group,
        HTTPException: plain.http_exception,
        WebSocketException: plain.websocket_exception,
    }
    app.exception_handlers = {**own, **app.exception_handlers}
    build = app.build_middleware_stack

    def build_recording() -> ASGIApp:
        handlers, middlewares = app.exception_handlers, app.user_middleware
        app.exception_handlers = {kind: recording(handler) for kind, handler in handlers.items()}
        outermost = [Middleware(RecordFailures)] if middlewares else []
        app.user_middleware = [*outermost, *middlewares, Middleware(BeforeRoutes)]
        try:
            return build()
        finally:
            app.exception_handlers, app.user_middleware = handlers, middlewares

    app.build_middleware_stack = build_recording  # type: ignore[method-assign]


def recording(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Return an exception handler that records the error, then calls `handler`; `def` or `async def` like `handler`."""
    if is_async_handler(handler):

        async def handle(connection: Any, error: Exception) -> Any:
            record_failure(error)
            return await handler(connection, error)

        return handle

    def handle_on_thread(connection: Any, error: Exception) -> Any:
        record_failure(error)
        return handler(connection, error)

    return handle_on_thread


class RecordFailures:
    """ASGI middleware outside and inside of all others: records unhandled errors before anything answers them."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.app(scope, receive, send)
        except BaseException as error:
            if (exchange := current_exchange()) is not None:
                exchange.fail_unhandled(error)
            raise


class BeforeRoutes(RecordFailures):
    """The innermost one: also prepares routes that were added since the last request."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (exchange := current_exchange()) is not None:
            exchange.routes.refresh()
        await super().__call__(scope, receive, send)


logger = logging.getLogger("toolbox.fastapi")

Handler: TypeAlias = Callable[[int, FrameType | None], Any]

SIGNALS = (signal.SIGTERM, signal.SIGINT)


# --- graceful shutdown
# uvicorn waits without a limit for open responses before it ends the lifespan, so an open stream would keep the process
# alive. That is why the signal is handled here as well.


class Shutdown:
    """The open exchanges of an application, and whether it is shutting down (`begun`).

    `timeout` seconds after the signal, invocations are cancelled, also those that begin later. `timeout` seconds after
    the lifespan starts to end, open requests are cancelled.
    """

    def __init__(self, timeout: float) -> None:
        self.begun = asyncio.Event()
        self._timeout = timeout
        self.open: set[ClientExchange] = set()
        self._closed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._ends_invocations = False

    def add_exchange(self, exchange: ClientExchange) -> None:
        """Add an exchange that begins."""
        self.open.add(exchange)
        if self._ends_invocations:
            exchange.stop_invocations(ApplicationStoppingError())

    def forget_exchange(self, exchange: ClientExchange) -> None:
        """Remove an exchange whose scope is closed."""
        self.open.discard(exchange)
        if self.begun.is_set():
            self._closed.set()

    # --- the signal

    @contextmanager
    def notice_signals(self) -> Iterator[None]:
        """Notice the signals that end the process, then call the handler that was installed before (uvicorn's)."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        chained = [each for each in map(self._chain_handler, SIGNALS) if each is not None]
        try:
            yield
        finally:
            for number, former, ours in chained:
                if signal.getsignal(number) is ours:
                    signal.signal(number, former)
            if self._timer is not None:
                self._timer.cancel()

    def _chain_handler(self, number: signal.Signals) -> tuple[signal.Signals, Handler, Handler] | None:
        former = signal.getsignal(number)
        if not callable(former) or former is signal.default_int_handler:
            return None

        def notice(caught: int, frame: FrameType | None) -> None:
            with suppress(RuntimeError):  # the loop may already be closed
                self._loop.call_soon_threadsafe(self._begin_shutdown)
            former(caught, frame)

        signal.signal(number, notice)
        return number, former, notice

    def _begin_shutdown(self) -> None:
        if not self.begun.is_set():
            self.begun.set()
            self._timer = self._loop.call_later(self._timeout, self._end_invocations)

    def _end_invocations(self) -> None:
        self._ends_invocations = True
        for exchange in list(self.open):
            exchange.stop_invocations(ApplicationStoppingError())

    # --- the end

    async def wait(self) -> None:
        """Wait for the open exchanges; cancel those that are still open after the timeout."""
        self.begun.set()
        await self._wait_for_open(self._timeout)
        late = list(self.open)
        for exchange in late:
            if exchange.task is not None:
                exchange.task.cancel()
        if late:
            await self._wait_for_open(1.0)
        for exchange in late:
            outcome = "still running after it was cancelled" if exchange in self.open else "cancelled"
            logger.warning("%s %s at shutdown: %s", exchange.scope["type"], exchange.scope["path"], outcome)

    async def _wait_for_open(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.open:
                    self._closed.clear()
                    await self._closed.wait()
