"""`mount_mcp`: serves a container's tools to MCP clients at a path, over streamable HTTP.

Not here: the MCP server itself (`toolbox.mcp`), the route that runs dependencies before it (`passed_on_routes`).
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.params import Depends
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Receive, Scope, Send

from toolbox.container import Container, internals_of
from toolbox.overview import ENTRIES, Entry
from toolbox.security import SecurityIdentity, caller_of_request, identity_from

from .application import run_while_served
from .exchanges import current_exchange, current_identity, exchange_of
from .identities import IDENTITY_DEPENDENCY
from .passed_on_routes import PassedOnRoute


def mount_mcp(
    app: FastAPI,
    container: Container,
    tools: Iterable[Any],
    path: str = "/mcp",
    *,
    name: str = "toolbox",
    allowed_hosts: Sequence[str] = (),
    dependencies: Sequence[Depends] = (),
    identity: Callable[[Request], Any] | None = None,
) -> None:
    """Serve `tools` to MCP clients at `path`. Call it after `install`. Each call of a tool has its own request scope.

        mount_mcp(app, container, [Orders], dependencies=[Depends(authenticate)])

    `tools` are classes, functions, instances, AI services, or single tools of them, such as `Orders.find`. Their
    resources and prompts (`@mcp_resource`, `@mcp_prompt`) are served too. `name` is the server's name in the protocol.

    `dependencies` run before each request, like those of a route, after the identity is known. The dependencies of
    `FastAPI(dependencies=[…])` do not run here. Requests must use a local host name or one of `allowed_hosts`:
    `example.org` or `example.org:*`.
    Only POST is supported: the server has no sessions and sends nothing on its own.

    `identity` is a function of the `Request`, `def` or `async def`, that returns the caller's `SecurityIdentity`, or
    None for an anonymous caller. Without it, the `identity` of `install` applies. A client sees only the tools that its
    identity may call.

    Raises `IllegalConfigurationError` for a source without tools, and `ImportError` if the extra `mcp` is not
    installed.
    """
    from toolbox.mcp import mcp_server_of
    from toolbox.mcp.serving import served_tools

    has_own_identity = identity is not None
    endpoint = _McpApplication(container, tuple(tools), name, tuple(allowed_hosts), has_own_identity)
    mcp_server_of(container, endpoint.tools, name)  # raises for invalid tools
    known = getattr(app.state, IDENTITY_DEPENDENCY, None)
    if identity is not None:
        internals_of(container).declare_seed(SecurityIdentity, current_identity, is_optional=True)
        known = _make_identity_dependency(identity)
    if known is not None:  # first, so that the other dependencies see the caller
        dependencies = [Depends(known), *dependencies]
    bare = path.rstrip("/")
    served = Entry(f"MCP {bare or '/'}", tools=served_tools(container, endpoint.tools), calls_services=False)
    setattr(app.state, ENTRIES, [*getattr(app.state, ENTRIES, ()), lambda graph: [served]])
    # Two routes and no redirect: proxies and clients follow redirects of a POST incorrectly.
    for each in (bare, f"{bare}/") if bare else ("/",):
        route = PassedOnRoute(app, each, endpoint, dependencies, methods=["POST"], has_own_identity=has_own_identity)
        app.router.routes.append(route)
    run_while_served(app, endpoint.run)


def _make_identity_dependency(identity: Callable[[Request], Any]) -> Callable[..., Any]:
    """Return the dependency that lets `identity`, a function of the request, find the caller."""

    async def resolve_identity(request: Request) -> None:
        found = (
            identity(request) if inspect.iscoroutinefunction(identity) else await run_in_threadpool(identity, request)
        )
        caller = identity_from(await found if inspect.isawaitable(found) else found, "identity= of mount_mcp(…)")
        exchange_of(request).identity = caller

    return resolve_identity


class _McpApplication:
    """Passes requests to an MCP server, which is created each time the application starts: it can run only once.

    With its own identity, the calls of a request are those of its caller; else the application knows the caller.
    """

    def __init__(
        self,
        container: Container,
        tools: tuple[Any, ...],
        name: str,
        allowed_hosts: tuple[str, ...],
        has_own_identity: bool,
    ) -> None:
        self._container, self.tools, self._name, self._hosts = container, tools, name, allowed_hosts
        self._has_own_identity = has_own_identity
        self._app: ASGIApp | None = None

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Run the MCP server inside the block."""
        from mcp.server.transport_security import TransportSecuritySettings

        from toolbox.mcp import mcp_server_of
        from toolbox.mcp.serving import reports_progress

        server = mcp_server_of(self._container, self.tools, self._name)
        # Only a stream of events can carry progress; without it, a plain JSON reply suits every client.
        is_plain = not reports_progress(self.tools, self._container)
        local = ["127.0.0.1", "127.0.0.1:*", "localhost", "localhost:*", "[::1]", "[::1]:*"]
        security = TransportSecuritySettings(
            allowed_hosts=[*local, *self._hosts],
            allowed_origins=[f"{scheme}://{host}" for scheme in ("http", "https") for host in (*local, *self._hosts)],
        )
        asgi = server.streamable_http_app(
            streamable_http_path="/", stateless_http=True, json_response=is_plain, transport_security=security
        )
        async with server.session_manager.run():
            self._app = asgi
            try:
                yield
            finally:
                self._app = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is None:
            raise RuntimeError("the MCP server is not started; run the application with its lifespan")
        root = scope["path"].rstrip("/")
        exchange = current_exchange() if self._has_own_identity else None
        token = caller_of_request.set(None if exchange is None else exchange.identity)
        try:
            await self._app({**scope, "root_path": root, "path": f"{root}/"}, receive, send)
        finally:
            caller_of_request.reset(token)
