"""Roles of endpoints: checks the caller before anything else of the request is read.

FastAPI reads and parses a body before it runs the first dependency. So the check solves the dependency `identity=` when
the route is reached, and FastAPI gets its results from there: each dependency still runs once. Not here: the marks
(`toolbox.security`), finding the endpoints (`endpoint_checks`), the response to a refused caller (`problems`).
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, Literal, cast
from weakref import WeakKeyDictionary

from fastapi import BackgroundTasks, Depends, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.dependencies.utils import SolvedDependency, get_parameterless_sub_dependant, solve_dependencies
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute, RouteContext
from fastapi.security.base import SecurityBase
from starlette.applications import Starlette
from starlette.requests import HTTPConnection
from starlette.types import Receive, Scope, Send

from toolbox.container import Container, internals_of
from toolbox.di.graph import BeanGraph
from toolbox.errors import IllegalConfigurationError, Problem
from toolbox.hosts.bean_checks import identity_problems
from toolbox.introspection import may_be_marked_in
from toolbox.security import Access, declared_access, identity_in, marked_access
from toolbox.tools.single_methods import class_defining, find_stricter, home_of

from .application_routes import endpoints_of, name_function
from .exchanges import (
    AFTER_ENDPOINT,
    AFTER_RESPONSE,
    ClientExchange,
    ReplayedReceive,
    current_exchange,
    exchange_of,
    exit_stack,
)

# --- which roles


def endpoint_access(endpoint: Any) -> Access | None:
    """Return the mark of an endpoint, as for a tool: its own, that of a method it overrides, or that of its class.

    An endpoint is a function, a method, a callable object or a class. Of wrappers, the outermost mark counts. None
    without a mark.
    """
    while endpoint is not None:
        if (found := declared_access(*home_of(endpoint))) is not None:
            return found
        endpoint = getattr(endpoint, "__wrapped__", None)
    return None


def _has_roles(endpoint: Any) -> bool:
    """Return True if a view of Starlette, or one of the methods of its class, has a mark of roles."""
    if endpoint_access(endpoint) is not None or not isinstance(endpoint, type):
        return endpoint_access(endpoint) is not None
    views = (view for base in endpoint.__mro__[:-1] for _, view in may_be_marked_in(base) if inspect.isroutine(view))
    return any(marked_access(view) is not None for view in views)


# --- checks at start


def role_problems(app: Starlette, graph: BeanGraph, resolve_identity: Callable[..., Any] | None) -> Iterator[Problem]:
    """Yield the problems of roles on endpoints: without an effect, or without an identity."""
    restricted = []
    for where, context in endpoints_of(app):
        yield from _problems_of_marks(where, context)
        access = endpoint_access(context.endpoint)
        if access is not None and not access.is_open and _is_of_fastapi(context):
            restricted.append(where)
    yield from identity_problems(graph, restricted)
    if (
        restricted
        and resolve_identity is not None
        and any(each.body_params for each in _find_dependants([_make_dependant(resolve_identity)]))
    ):
        fact = "identity= reads the request's body, but endpoints with roles check the caller before it is read"
        yield Problem("install(app, container)", fact, "take the caller from a header or a cookie")


def _problems_of_marks(where: str, context: RouteContext) -> Iterator[Problem]:
    """Yield the problems of marks that cannot be checked."""
    if not _is_of_fastapi(context):
        if _has_roles(context.endpoint):
            fix = "use a route of FastAPI: app.add_api_route(…), @app.get(…) or @app.websocket(…)"
            yield Problem(where, "the roles have no effect here: only routes of FastAPI check them", fix)
        return
    function = inspect.unwrap(cast("Any", context.endpoint))
    if (defining := class_defining(function)) is not None:
        attribute = function.__qualname__.rpartition(".")[2]
        if (other := find_stricter(defining, attribute, defining)) is not None:
            fact = f"is the same function as {other.__name__}.{attribute}, whose class may have other roles"
            yield Problem(where, fact, f"define {other.__name__}.{attribute} as well, or use a method of an instance")
    for each in _find_dependants(context.dependant.dependencies):
        if not isinstance(each.call, type) and endpoint_access(each.call) is not None:
            place = f"{where}, dependency {name_function(each.call)}"
            fix = "put them on the endpoint, below its route decorator"
            yield Problem(place, "the roles have no effect on a dependency", fix)


def _is_of_fastapi(context: RouteContext) -> bool:
    return getattr(context, "dependant", None) is not None


def _find_dependants(dependants: Sequence[Dependant]) -> Iterator[Dependant]:
    """Yield these dependencies, and those that they use."""
    for each in dependants:
        yield each
        yield from _find_dependants(each.dependencies)


def _make_dependant(call: Callable[..., Any], path: str = "/") -> Dependant:
    return get_parameterless_sub_dependant(depends=Depends(call), path=path)


# --- the check


def check_callers(app: Starlette, container: Container, resolve_identity: Callable[..., Any] | None) -> None:
    """Make all endpoints with roles check their callers, and refuse those whose roles cannot be checked.

    Has no effect on those that already do. At start, what cannot be checked is a problem; only routes that are added
    later are refused.
    """
    for where, context in endpoints_of(app):
        if problems := tuple(_problems_of_marks(where, context)):
            _refuse_all(context, problems)
            continue
        access, path = endpoint_access(context.endpoint), context.path or "/"
        if access is None or access.is_open or not _is_of_fastapi(context):
            continue
        dependant: Dependant = context.dependant
        check, route = _make_dependant(role_check(access, where, resolve_identity), path), context.original_route
        if isinstance(route, APIRoute):
            handle: Any = route.handle
            if not isinstance(handle, CheckedHandle):
                route.handle = handle = CheckedHandle(route)  # type: ignore[method-assign]
            handle.checks.setdefault(container, Dependant(dependencies=[check]))
        first = dependant.dependencies[0].call if dependant.dependencies else None
        if first is adopt_check or hasattr(first, CHECK_MARK):
            continue
        if isinstance(route, APIRoute):
            _solve_before(dependant, [each.call for each in _find_dependants([check]) if each.use_cache])
            check = _make_dependant(adopt_check, path)
        dependant.dependencies.insert(0, check)  # a WebSocket has no body, so FastAPI can run the check itself


def _refuse_all(context: RouteContext, problems: Sequence[Problem]) -> None:
    """Let a route raise its problems in place of its endpoint."""

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        raise IllegalConfigurationError(problems)

    async def refuse_request() -> None:
        raise IllegalConfigurationError(problems)

    if _is_of_fastapi(context):
        context.dependant.dependencies[:] = [_make_dependant(refuse_request, context.path or "/")]
    elif (route := getattr(context.handle, "__self__", None)) is not None:  # not refused yet
        route.handle = refuse


CHECK_MARK = "__toolbox_role_check__"


def role_check(access: Access, where: str, resolve_identity: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return the dependency that refuses callers that `access` does not allow; `where` is the endpoint."""

    async def check_role(connection: HTTPConnection, known: None = Depends(resolve_identity or _no_identity)) -> None:
        caller = await identity_in(internals_of(exchange_of(connection).container))
        if not access.allows(caller):
            raise access.refusal(caller, where)

    setattr(check_role, CHECK_MARK, True)
    return check_role


async def _no_identity() -> None:
    """Take the place of `identity=` if the container has a producer of the identity."""


class CheckedHandle:
    """The `handle` of a route with roles: solves the check of the container, then lets the route go on.

    FastAPI shares the routes of a router between the applications that include it, so there is a check for each
    container. The route does not keep the containers alive: a test can create one application after the other.
    """

    def __init__(self, route: APIRoute) -> None:
        self.checks: WeakKeyDictionary[Container, Dependant] = WeakKeyDictionary()
        self._inner, self._methods = route.handle, frozenset(route.methods or ())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        messages = ReplayedReceive(receive)
        request = Request(scope, messages, send)
        exchange = exchange_of(request)
        check = self.checks.get(exchange.container)
        if check is None or request.method not in self._methods:  # the route answers 405 by itself
            await self._inner(scope, receive, send)
            return
        async with _collect_generators(exchange) as stack:
            scope[AFTER_RESPONSE] = scope[AFTER_ENDPOINT] = stack
            exchange.checked = await solve_dependencies(
                request=request,
                dependant=check,
                dependency_overrides_provider=scope["app"],
                async_exit_stack=stack,
                embed_body_fields=False,
            )
            if exchange.checked.errors:
                raise RequestValidationError(exchange.checked.errors)
            messages.rewind()
            await self._inner(scope, messages, send)


@asynccontextmanager
async def _collect_generators(exchange: ClientExchange) -> AsyncIterator[AsyncExitStack]:
    """Keep the generators of dependencies open until the response is sent.

    They see the error of the endpoint also if an exception handler has answered it, as they would inside FastAPI.
    """
    answered: BaseException | None = None
    try:
        async with AsyncExitStack() as stack:
            yield stack
            if (answered := exchange.failure) is not None:
                raise answered
    except BaseException as error:
        if error is not answered:
            raise


# --- what FastAPI gets from the check


async def adopt_check(connection: HTTPConnection, response: Response, tasks: BackgroundTasks) -> None:
    """Add the headers, the status and the background tasks that dependencies of the check have set."""
    checked = checked_in(exchange_of(connection))
    response.headers.raw.extend(checked.response.headers.raw)
    response.status_code = checked.response.status_code or response.status_code
    tasks.tasks.extend(getattr(checked.background_tasks, "tasks", ()))


def checked_in(exchange: ClientExchange) -> SolvedDependency:
    """Return what the check has solved. Raises `RuntimeError` if the route was reached without its check."""
    if exchange.checked is None:
        raise RuntimeError("the roles of this endpoint were not checked")
    return exchange.checked


def _solve_before(dependant: Dependant, solved: Sequence[Any]) -> None:
    """Let the dependencies that the check has solved return its values. What documents them stays as it is."""
    for each in dependant.dependencies:
        is_shared = each.use_cache and not (each.own_oauth_scopes or each.parent_oauth_scopes)
        if is_shared and any(each.call is call for call in solved) and not isinstance(each.call, SecurityBase):
            each.scope = _scope_of(each)
            each.call = SolvedBefore(_copy_dependant(each))
            for inner in _find_dependants(each.dependencies):
                if not isinstance(inner.call, SecurityBase):  # a scheme only reads a header, and is documented
                    inner.call = _use_solved
        else:
            _solve_before(each, solved)


def _scope_of(dependant: Dependant) -> Literal["function", "request"] | None:
    """Return the scope of a dependency, by which FastAPI's cache knows it: generators have one."""
    function = inspect.unwrap(dependant.call) if dependant.call is not None else None
    is_generator = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    return dependant.scope or ("request" if is_generator else None)


async def _use_solved(**values: Any) -> None:
    """Take the place of a dependency that only dependencies which are already solved need."""


_use_solved.__signature__ = inspect.Signature()  # type: ignore[attr-defined]  # no parameters for FastAPI


def _copy_dependant(dependant: Dependant) -> Dependant:
    return replace(dependant, dependencies=[_copy_dependant(each) for each in dependant.dependencies])


class SolvedBefore:
    """Takes the place of a dependency that the check has solved: FastAPI's cache of that check has its value.

    If a test overrides the identity, the check did not need the dependency, and it is solved now. Equal to the
    dependency, so that `dependency_overrides` finds it, and FastAPI's cache has one value for both.
    """

    __signature__ = inspect.Signature()

    def __init__(self, dependant: Dependant) -> None:
        self.solves = dependant.call
        self._dependant = Dependant(dependencies=[replace(dependant, name="value")])

    def __eq__(self, other: object) -> bool:
        return self is other or self.solves is other

    def __hash__(self) -> int:
        return hash(self.solves)

    async def __call__(self, **values: Any) -> Any:
        exchange = current_exchange()
        assert exchange is not None, "endpoints run inside of the request's scope"
        request, checked = exchange.connection, checked_in(exchange)
        assert isinstance(request, Request), "the check has set it"
        solved = await solve_dependencies(
            request=request,
            dependant=self._dependant,
            dependency_overrides_provider=request.scope["app"],
            dependency_cache=checked.dependency_cache,
            async_exit_stack=exit_stack(request, AFTER_RESPONSE),
            embed_body_fields=False,
        )
        if solved.errors:
            raise RequestValidationError(solved.errors)
        return solved.values["value"]
