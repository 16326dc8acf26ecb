"""A route that runs FastAPI dependencies before it passes a request to an ASGI application.

`app.mount` runs no dependencies, not even those of `FastAPI(dependencies=[…])`. Not here: the applications behind the
route (`dev_ui`).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from fastapi import FastAPI, params
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from toolbox.errors import Problem

from .endpoints import InjectRoute

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


def dependency_problems(where: str, dependencies: Sequence[Any]) -> Iterator[Problem]:
    """Yield a problem for each of `dependencies` that is not made with `Depends` or `Security`."""
    for each in dependencies:
        if not isinstance(each, params.Depends):
            name = getattr(each, "__name__", repr(each))
            yield Problem(where, f"dependencies has {name!r}, which is not a dependency", f"write Depends({name})")


class ForwardedResponse(Response):
    """A response that lets the application `inner` answer the request."""

    def __init__(self, inner: ASGIApp, below: str) -> None:
        super().__init__()
        self._inner, self._below = inner, below

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        root_path = scope.get("root_path", "") + self._below
        await self._inner({**scope, "root_path": root_path}, receive, send)


def guarded_route(
    app: FastAPI, path: str, inner: ASGIApp, dependencies: Sequence[params.Depends], *, below: str = ""
) -> InjectRoute:
    """Return a route at `path` that runs `dependencies` and then passes the request to `inner`.

    `below` is the part of the path that `inner` does not see, like the path of a mount. Dependencies may use
    `Inject[…]`. They must not read the body: `inner` reads it.
    """
    return InjectRoute(
        path,
        _endpoint(inner, below),
        methods=list(METHODS),
        dependencies=list(dependencies),
        dependency_overrides_provider=app,
        include_in_schema=False,
        response_model=None,
        name=path.partition("{")[0].strip("/") or "guarded",
    )


def _endpoint(inner: ASGIApp, below: str) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    async def pass_on(request: Request) -> Response:
        return ForwardedResponse(inner, below)

    return pass_on
