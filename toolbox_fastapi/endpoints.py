"""`Inject[T]` and `@toolbox` on an endpoint: what they ask for, and how the endpoint gets it.

Two ways lead to a bean. A route of our class hides the parameter from FastAPI and fills it when it calls the endpoint;
any other route (of a plain `APIRouter`, of a WebSocket) finds a dependency in the annotation, which does the same at a
higher price. Not here: the request scope that beans live in (`application`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast
from weakref import WeakKeyDictionary

from fastapi import Depends, params
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute, RouteContext, iter_route_contexts
from starlette.concurrency import run_in_threadpool
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount

from toolbox.context import INJECT, InjectMark, current_caller
from toolbox.di.beans import MISSING, InjectionPoint, point_of
from toolbox.di.graph import BeanGraph
from toolbox.errors import IllegalConfigurationError, MissingBeanError, Problem
from toolbox.services.hosting import registrable, tool_bean_problems
from toolbox.services.plans import tools_added
from toolbox.signatures import EMPTY, metadata_of, resolve
from toolbox.tools.invocation import Tool
from toolbox.tools.marks import toolbox_of
from toolbox.tools.sources import bean_types, read_tools

from .exchanges import Exchange, current_exchange

T = TypeVar("T")

ENDPOINT_MARK = "__toolbox_endpoint__"


def the_exchange() -> Exchange:
    """The exchange this code runs in. Raises `IllegalConfigurationError` in an application without the container."""
    exchange = current_caller.get()
    if type(exchange) is not Exchange:
        raise IllegalConfigurationError(
            [
                Problem(
                    "an endpoint with Inject[…]",
                    "its application has no container",
                    "call toolbox_fastapi.install(app, container) where the application is made",
                )
            ]
        )
    return exchange


# --- Inject[T]


class BeanOf:
    """The dependency behind `Inject[T]`; two of one type are equal, so `dependency_overrides` finds it."""

    __slots__ = ("wanted",)

    def __init__(self, wanted: Any) -> None:
        self.wanted = wanted

    def __eq__(self, other: object) -> bool:
        return type(other) is BeanOf and other.wanted == self.wanted

    def __hash__(self) -> int:
        return hash((BeanOf, self.wanted))

    def __repr__(self) -> str:
        return f"BeanOf({self.wanted!r})"

    async def __call__(self, connection: HTTPConnection) -> Any:
        exchange = the_exchange()
        enter_route(exchange, connection)
        return await exchange.container.aget(self.wanted)


if TYPE_CHECKING:
    Inject = Annotated[T, INJECT]
else:

    class Inject:
        """`Inject[T]`: a parameter of an endpoint, a dependency or a tool that is a bean of the current scope."""

        def __class_getitem__(cls, item: object) -> object:
            return Annotated[item, INJECT, Depends(BeanOf(item), use_cache=False)]


@dataclass(frozen=True, slots=True)
class Injected:
    """A parameter to be filled with a bean; `default` is what it keeps when there is none, or `EMPTY`."""

    name: str
    wanted: Any
    default: Any = EMPTY


# --- a route that fills parameters itself


class InjectRoute(APIRoute):
    """Fills `Inject[…]` parameters when it calls its endpoint, at a third of what FastAPI's dependencies cost.

    `install` sets it for the application's own routes; elsewhere: `APIRouter(route_class=InjectRoute)`. Without it, all
    works as well.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, filled(endpoint), **options)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_noting(request: Request) -> Response:
            exchange = current_exchange()
            if exchange is None:
                return await handle(request)
            exchange.connection = request
            try:
                return await handle(request)
            except BaseException as error:
                exchange.fail(error)
                raise

        return handle_noting


def filled(endpoint: Callable[..., Any]) -> Callable[..., Any]:
    """`endpoint` as FastAPI should see it: without its injected parameters, and calling with its tools around it.

    A generator, or anything but a function, is left as it is: its beans have to be there before it is called.
    """
    if not inspect.isroutine(endpoint) or _is_generator(endpoint):
        return endpoint
    injected, signature = _split_signature(endpoint)
    if not injected and toolbox_of(endpoint) is None:
        return endpoint
    caller = _async_caller if _is_coroutine(endpoint) else _thread_caller
    call = functools.wraps(endpoint)(caller(endpoint, injected))
    call.__signature__ = signature  # type: ignore[attr-defined]  # what inspect looks at before anything else
    setattr(call, ENDPOINT_MARK, injected)
    return call


def _is_generator(endpoint: Callable[..., Any]) -> bool:
    plain = inspect.unwrap(endpoint)
    return inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain)


def _is_coroutine(endpoint: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(endpoint) or inspect.iscoroutinefunction(inspect.unwrap(endpoint))


def _split_signature(endpoint: Callable[..., Any]) -> tuple[tuple[Injected, ...], inspect.Signature]:
    """The parameters we fill, and the signature without them."""
    signature = inspect.signature(endpoint)
    names = getattr(inspect.unwrap(endpoint), "__globals__", {})
    injected, others = [], []
    for parameter in signature.parameters.values():
        metadata = metadata_of(resolve(parameter.annotation, names))
        dependencies = [each.dependency for each in metadata if isinstance(each, params.Depends)]
        if bean := next((each for each in dependencies if isinstance(each, BeanOf)), None):
            injected.append(Injected(parameter.name, bean.wanted, parameter.default))
        elif any(isinstance(each, InjectMark) for each in metadata):
            raise IllegalConfigurationError([_wrong_inject(endpoint, parameter.name)])
        else:
            others.append(parameter)
    return tuple(injected), signature.replace(parameters=others)


def _wrong_inject(endpoint: Callable[..., Any], parameter: str) -> Problem:
    return Problem(
        f"endpoint {endpoint.__name__}, parameter {parameter!r}",
        "toolbox.Inject is for tools and injected functions, not for endpoints",
        "write `from toolbox_fastapi import Inject` in the module of the endpoint",
    )


def _async_caller(endpoint: Callable[..., Any], injected: Sequence[Injected]) -> Callable[..., Any]:
    if toolbox_of(endpoint) is None and all(each.default is EMPTY for each in injected):
        beans = [(each.name, each.wanted) for each in injected]

        async def call(**values: Any) -> Any:
            container = the_exchange().container
            for name, wanted in beans:
                values[name] = await container.aget(wanted)
            return await endpoint(**values)

        return call

    async def call_with_tools(**values: Any) -> Any:
        await _fill(values, injected)
        with tools_added(endpoint_tools(endpoint)):
            return await endpoint(**values)

    return call_with_tools


def _thread_caller(endpoint: Callable[..., Any], injected: Sequence[Injected]) -> Callable[..., Any]:
    def call_here(values: dict[str, Any]) -> Any:
        with tools_added(endpoint_tools(endpoint)):
            return endpoint(**values)

    async def call(**values: Any) -> Any:
        await _fill(values, injected)
        return await run_in_threadpool(call_here, values)

    return call


async def _fill(values: dict[str, Any], injected: Sequence[Injected]) -> None:
    container = the_exchange().container
    for each in injected:
        try:
            values[each.name] = await container.aget(each.wanted)
        except MissingBeanError:
            if each.default is EMPTY:
                raise  # else FastAPI knows nothing of the parameter, and it keeps its default


# --- @toolbox on an endpoint

_tools_read: WeakKeyDictionary[Callable[..., Any], tuple[Tool, ...]] = WeakKeyDictionary()


def endpoint_tools(endpoint: Callable[..., Any]) -> tuple[Tool, ...]:
    """The tools of the endpoint's `@toolbox`, read once. Raises `IllegalConfigurationError` for what is no tool."""
    plain = getattr(endpoint, "__func__", endpoint)
    tools = _tools_read.get(plain)
    if tools is None:
        tools, problems = read_tools(toolbox_of(plain) or (), f"@toolbox of endpoint {plain.__name__}")
        if problems:
            raise IllegalConfigurationError(problems)
        _tools_read[plain] = tools
    return tools


def enter_route(exchange: Exchange, connection: HTTPConnection) -> None:
    """For a route that is not of our class: sees what leaves its endpoint, and puts the endpoint's tools around it.

    FastAPI keeps, for each request, a stack of what ends with the endpoint and one of what ends with the response.
    """
    exchange.connection = connection
    endpoint = connection.scope.get("endpoint")
    if exchange.entered or hasattr(endpoint, ENDPOINT_MARK):
        return
    exchange.entered = True
    stack: AsyncExitStack | None = connection.scope.get("fastapi_function_astack")
    if stack is None:
        return
    stack.push(exchange.note)
    if callable(endpoint) and toolbox_of(endpoint) is not None:
        if _is_generator(endpoint):  # runs when FastAPI thinks it has returned, until the response has been sent
            stack = cast("AsyncExitStack", connection.scope["fastapi_inner_astack"])
        stack.enter_context(tools_added(endpoint_tools(endpoint)))


# --- what endpoints ask for


def endpoints_of(routes: Sequence[BaseRoute], prefix: str = "") -> Iterator[tuple[str, RouteContext]]:
    """The endpoints of an application and of those mounted in it, each as `POST /chat (chat)`."""
    for context in iter_route_contexts(routes):
        path = f"{prefix}{context.path or ''}"
        inner = context.original_route
        if isinstance(inner, Mount):
            yield from endpoints_of(inner.routes or (), path)
        elif context.endpoint is not None:
            methods = "/".join(sorted(context.methods or ())) or "WebSocket"
            yield f"{methods} {path} ({_name_of(context.endpoint)})", context


def tools_of_endpoints(routes: Sequence[BaseRoute]) -> Iterator[type]:
    """The tool classes among what the endpoints' `@toolbox` lists: beans that need no registration."""
    for _, context in endpoints_of(routes):
        yield from registrable(bean_types(toolbox_of(context.endpoint) or ()))


def endpoint_problems(routes: Sequence[BaseRoute], graph: BeanGraph) -> Iterator[Problem]:
    """What is wrong with the `Inject[…]` parameters of all endpoints and their dependencies, and with their tools."""
    for where, context in endpoints_of(routes):
        for each in getattr(context.endpoint, ENDPOINT_MARK, ()):
            default = MISSING if each.default is EMPTY else each.default
            place = f"{where}, parameter {each.name!r}"
            yield from graph.problems_of(point_of(each.wanted, place, parameter=each.name, default=default))
        dependant = getattr(context, "dependant", None)
        for point in _points_in(dependant, where) if dependant is not None else ():
            yield from graph.problems_of(point)
        tools, problems = read_tools(toolbox_of(context.endpoint) or (), f"{where}, @toolbox")
        yield from problems
        for tool in tools:
            yield from tool_bean_problems(f"{where}, tool {tool.specification.name}", tool, graph)


def _points_in(dependant: Dependant, where: str) -> Iterator[InjectionPoint]:
    for each in dependant.dependencies:
        if isinstance(each.call, BeanOf):
            yield point_of(each.call.wanted, f"{where}, parameter {each.name!r}", parameter=each.name or "")
        else:
            yield from _points_in(each, f"{where}, dependency {_name_of(each.call)}")


def _name_of(function: object) -> str:
    return getattr(function, "__name__", None) or type(function).__name__
