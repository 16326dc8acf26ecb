"""Finds the endpoints of an application: its own, those of mounted applications, and those behind ASGI wrappers.

Also notices routes that are added later. Not here: what is checked and completed at them (`endpoint_checks`,
`endpoint_roles`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import is_
from types import FunctionType, MethodType
from typing import Any, TypeAlias, cast
from weakref import WeakSet

from fastapi.routing import APIRoute, APIWebSocketRoute, RouteContext, iter_route_contexts
from starlette.applications import Starlette
from starlette.routing import BaseRoute, Host, Mount, Route, Router

Application: TypeAlias = Starlette | Router

installed: WeakSet[Starlette] = WeakSet()
"""The applications that have their own container."""


def endpoints_of(
    app: Application, prefix: str = "", around: tuple[Application, ...] = ()
) -> Iterator[tuple[str, RouteContext]]:
    """Yield each endpoint with its name, such as `POST /chat (chat)`.

    Endpoints of applications within are included, except of those that have their own container. `around` are the
    applications that lead to this one.
    """
    around = (*around, app)
    for context in iter_route_contexts(app.routes):
        path, inner = f"{prefix}{context.path or ''}", context.original_route
        if not isinstance(inner, (Mount, Host)) and context.endpoint is not None:
            methods = "/".join(sorted(context.methods or ())) or ("HTTP" if isinstance(inner, Route) else "WebSocket")
            yield f"{methods} {path} ({name_function(context.endpoint)})", context
        for each in _applications_behind(inner):
            if not _is_among(each, around) and not _has_own_container(each):
                yield from endpoints_of(each, path, around)
    for each in _applications_in_middleware(app):
        if not _is_among(each, around) and not _has_own_container(each):
            yield from endpoints_of(each, prefix, around)


def _is_among(app: Application, others: Iterable[Application]) -> bool:
    return any(app is each for each in others)  # two routers with equal routes are equal


def _has_own_container(app: Application) -> bool:
    return isinstance(app, Starlette) and app in installed


def applications_within(app: Application) -> list[tuple[str, Application]]:
    """Return the applications that this one mounts or keeps behind ASGI wrappers, at any depth, each once, by path."""
    found = [("", app)]
    for path, each in found:  # it grows
        inner = [(path, one) for one in _applications_in_middleware(each)]
        for context in iter_route_contexts(each.routes):
            inner += [(f"{path}{context.path or ''}", one) for one in _applications_behind(context.original_route)]
        for below, one in inner:
            if not _is_among(one, (known for _, known in found)):
                found.append((below, one))
    return found[1:]


def name_function(function: object) -> str:
    """Return the name of an endpoint or a dependency."""
    return getattr(function, "__name__", None) or type(function).__name__


# --- behind ASGI wrappers


def _applications_behind(route: BaseRoute) -> Iterator[Application]:
    """Yield the applications to which a route can pass requests; FastAPI calls the endpoints of its routes itself."""
    if not isinstance(route, (APIRoute, APIWebSocketRoute)):
        yield from _applications_in(*vars(route).values())


def _applications_in_middleware(app: Application) -> Iterator[Application]:
    for each in getattr(app, "user_middleware", ()):
        yield from _applications_in(each.args, each.kwargs)


def _applications_in(*searched: object) -> Iterator[Application]:
    """Yield the applications in these objects: in the attributes and closures of wrappers, and in their arguments.

    Wrappers have no common attribute for the application inside. One that was not found would run without its checks.
    """
    pending, seen = [*searched], set[int]()
    for each in pending:  # it grows
        if id(each) in seen:
            continue
        seen.add(id(each))
        # Not `isinstance`: the `__class__` of a proxy may not be known outside of a request.
        if issubclass(type(each), (Starlette, Router)):
            yield cast("Application", each)
        else:
            pending += _parts_of(each, type(each))


def _parts_of(asgi: Any, kind: type) -> Iterator[object]:
    """Yield the objects in which a wrapper can keep an application."""
    if issubclass(kind, FunctionType):
        for cell in asgi.__closure__ or ():
            with suppress(ValueError):  # nothing is in it yet
                yield cell.cell_contents
        yield from (*(asgi.__defaults__ or ()), *(asgi.__kwdefaults__ or {}).values(), *vars(asgi).values())
        # A function can name all others of its module: only applications count there.
        named = [asgi.__globals__.get(name) for name in asgi.__code__.co_names]
        yield from (each for each in named if issubclass(type(each), (Starlette, Router)))
    elif issubclass(kind, MethodType):
        yield from (asgi.__self__, asgi.__func__)
    elif issubclass(kind, partial):
        yield from (asgi.func, *asgi.args, *asgi.keywords.values())
    elif issubclass(kind, Mapping):
        yield from list(asgi.values())
    elif issubclass(kind, (list, tuple, set, frozenset)):
        yield from list(asgi)
    elif callable(asgi) and not issubclass(kind, type):
        yield inspect.getattr_static(kind, "__call__")
        with suppress(Exception):  # those of a proxy may not be known outside of a request
            yield from list(vars(asgi).values())
        for name in {name for cls in kind.__mro__ for name in _names_of_slots(cls)}:
            with suppress(Exception):  # it may not be set
                yield getattr(asgi, name)


def _names_of_slots(cls: type) -> Sequence[str]:
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


# --- routes that are added later


class PreparedRoutes:
    """Calls `prepare` for the routes of an application, and again when routes were added or replaced anywhere in it."""

    def __init__(self, app: Starlette, prepare: Callable[[], None]) -> None:
        self._app, self._prepare = app, prepare
        self._seen: list[tuple[list[BaseRoute], list[BaseRoute]]] | None = None

    def refresh(self) -> None:
        """Prepare the routes if they have changed since the last time. Asked before each request: it must be cheap."""
        # Two routes can be equal, so their identity counts.
        if self._seen is None or not all(
            len(routes) == len(seen) and all(map(is_, routes, seen)) for routes, seen in self._seen
        ):
            self._prepare()
            self._seen = [(routes, [*routes]) for routes in self._lists()]

    def _lists(self) -> Iterator[list[BaseRoute]]:
        """Yield the lists of routes of the application, of those within, and of included routers."""
        pending = [self._app.routes, *(app.routes for _, app in applications_within(self._app))]
        for routes in pending:  # it grows
            yield routes
            # FastAPI has no public name for the router behind a route: it keeps the router, and reads it again.
            included = [getattr(route, "original_router", None) for route in routes]
            pending += [each.routes for each in included if isinstance(each, Router)]
