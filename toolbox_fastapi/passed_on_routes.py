"""`PassedOnRoute`: a route that runs FastAPI dependencies, then passes the request to an ASGI application.

`app.mount` runs no dependencies. Not here: the applications (`mcp_endpoint`, `dev_ui.routes`).
"""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI, params
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from .endpoints import InjectRoute
from .exchanges import ReplayedReceive
from .identities import OWN_IDENTITY_MARK


class PassedOnRoute(InjectRoute):
    """A route that runs `dependencies`, which may use `Inject[…]`, and then lets `inner` answer the request.

    Dependencies may read the body: `inner` can read it again. `below` is the part of the path that `inner` does not
    see, like the path of a mount. With `has_own_identity`, the route does not get the identity of the application.
    """

    def __init__(
        self,
        app: FastAPI,
        path: str,
        inner: ASGIApp,
        dependencies: Sequence[params.Depends],
        *,
        methods: Sequence[str],
        has_own_identity: bool,
        below: str = "",
    ) -> None:
        async def pass_on() -> Response:
            return _PassedOnResponse(inner, below)

        if has_own_identity:
            setattr(pass_on, OWN_IDENTITY_MARK, True)
        super().__init__(
            path,
            pass_on,
            methods=list(methods),
            dependencies=list(dependencies),
            dependency_overrides_provider=app,
            include_in_schema=False,
            response_model=None,
        )

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, whose messages can be received twice."""
        await super().handle(scope, ReplayedReceive(receive), send)


class _PassedOnResponse(Response):
    """A response that lets the application `inner` answer the request."""

    def __init__(self, inner: ASGIApp, below: str) -> None:
        super().__init__()
        self._inner, self._below = inner, below

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if isinstance(receive, ReplayedReceive):
            receive.rewind()
        root_path = scope.get("root_path", "") + self._below
        await self._inner({**scope, "root_path": root_path}, receive, send)
