"""A container's tools as an MCP server at a path of the application, over streamable HTTP.

Not here: the server itself (`toolbox.mcp`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.params import Depends
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Lifespan, Message, Receive, Scope, Send

from toolbox import Container


def mount_mcp(
    app: FastAPI,
    container: Container,
    tools: Iterable[Any],
    path: str = "/mcp",
    *,
    name: str = "toolbox",
    allowed_hosts: Sequence[str] = (),
    dependencies: Sequence[Depends] = (),
) -> None:
    """Serve `tools` to MCP clients at `path`; call it after `install`. Each call has its own request scope.

    `tools` are classes, functions, instances, services, and single tools of them, such as `Orders.find`.
    `dependencies` run before each request, as those of a route: `[Depends(authenticate)]`; those of
    `FastAPI(dependencies=[…])` do not. Only local host names are answered; name others in `allowed_hosts`, as
    `example.org` or `example.org:*`. Only POST is: the server keeps no sessions and sends nothing by itself.

    Raises `IllegalConfigurationError` for what is not a tool, and `ImportError` without the extra `mcp`.
    """
    from toolbox.mcp import mcp_server_of

    endpoint = _Endpoint(container, tuple(tools), name, tuple(allowed_hosts))
    mcp_server_of(container, endpoint.tools, name)  # raises what is wrong with the tools
    bare = path.rstrip("/")
    # Both without a redirect to the other, which proxies and clients get wrong.
    for each in (bare, f"{bare}/") if bare else ("/",):
        app.router.routes.append(_McpRoute(each, endpoint, dependencies, app))
    app.router.lifespan_context = endpoint.around(app.router.lifespan_context)


class _McpRoute(APIRoute):
    """A route of FastAPI, for its dependencies, with an ASGI application behind it."""

    def __init__(self, path: str, application: ASGIApp, dependencies: Sequence[Depends], app: FastAPI) -> None:
        async def mcp(request: Request) -> Response:
            return _Answer(application)

        super().__init__(
            path,
            mcp,
            methods=["POST"],
            dependencies=list(dependencies),
            response_model=None,
            include_in_schema=False,
            dependency_overrides_provider=app,
        )

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; what its dependencies read of the body is read again by the application."""
        await super().handle(scope, _Replayed(receive), send)


class _Replayed:
    """A request's messages, which can be received once more after `rewind`."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._read: list[Message] = []
        self._again: list[Message] | None = None

    async def __call__(self) -> Message:
        if self._again:
            return self._again.pop(0)
        message = await self._receive()
        if self._again is None:
            self._read.append(message)
        return message

    def rewind(self) -> None:
        self._again, self._read = self._read, []


class _Answer(Response):
    """The answer that an ASGI application gives to the request."""

    def __init__(self, application: ASGIApp) -> None:
        super().__init__()
        self._application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if isinstance(receive, _Replayed):
            receive.rewind()
        await self._application(scope, receive, send)


class _Endpoint:
    """Passes requests on to the server of the application's current life: one server serves one life only."""

    def __init__(self, container: Container, tools: tuple[Any, ...], name: str, allowed_hosts: tuple[str, ...]) -> None:
        self._container, self.tools, self._name, self._hosts = container, tools, name, allowed_hosts
        self._app: ASGIApp | None = None

    def around(self, lifespan: Lifespan[Any]) -> Lifespan[Any]:
        @asynccontextmanager
        async def serving(app: FastAPI) -> AsyncIterator[Any]:
            from mcp.server.transport_security import TransportSecuritySettings

            from toolbox.mcp import mcp_server_of

            server = mcp_server_of(self._container, self.tools, self._name)
            local = ["127.0.0.1", "127.0.0.1:*", "localhost", "localhost:*", "[::1]", "[::1]:*"]
            security = TransportSecuritySettings(
                allowed_hosts=[*local, *self._hosts],
                allowed_origins=[
                    f"{scheme}://{host}" for scheme in ("http", "https") for host in (*local, *self._hosts)
                ],
            )
            asgi = server.streamable_http_app(
                streamable_http_path="/", stateless_http=True, json_response=True, transport_security=security
            )
            async with lifespan(app) as state, server.session_manager.run():
                self._app = asgi
                try:
                    yield state
                finally:
                    self._app = None

        return serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is None:
            raise RuntimeError("the MCP server is not started: the application's lifespan has not been run")
        root = scope["path"].rstrip("/")
        await self._app({**scope, "root_path": root, "path": f"{root}/"}, receive, send)
