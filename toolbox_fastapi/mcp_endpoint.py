"""A container's tools as an MCP server at a path of the application, over streamable HTTP.

Not here: the server itself (`toolbox.mcp`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.routing import Route
from starlette.types import ASGIApp, Lifespan, Receive, Scope, Send

from toolbox import Container


def mount_mcp(
    app: FastAPI,
    container: Container,
    tools: Iterable[Any],
    path: str = "/mcp",
    *,
    name: str = "toolbox",
    allowed_hosts: Sequence[str] = (),
) -> None:
    """Serves `tools` to MCP clients at `path`; call it after `install`. Each call has a request scope of its own.

    Only local host names are answered; further ones are named in `allowed_hosts`, as `example.org` or `example.org:*`.
    Raises `IllegalConfigurationError` for what is no tool, and `ImportError` without the extra `mcp`.
    """
    from toolbox.mcp import mcp_server_of

    endpoint = _Endpoint(container, tuple(tools), name, tuple(allowed_hosts))
    mcp_server_of(container, endpoint.tools, name)  # what is wrong with the tools is said here
    if bare := path.rstrip("/"):  # without a redirect to the slash, which proxies and clients get wrong
        app.router.routes.append(Route(bare, endpoint=endpoint, include_in_schema=False))
    app.mount(path, endpoint)
    app.router.lifespan_context = endpoint.around(app.router.lifespan_context)


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
        if not scope["path"].endswith("/"):
            scope = {**scope, "root_path": scope["path"], "path": f"{scope['path']}/"}
        await self._app(scope, receive, send)
