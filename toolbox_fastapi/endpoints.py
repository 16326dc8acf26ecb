"""`Inject[T]` and `@toolbox` on an endpoint: how the endpoint gets what they ask for.

Two ways lead to a bean. A route of our class hides the parameter from FastAPI and fills it when it calls the endpoint;
any other route (of a plain `APIRouter`, of a WebSocket) finds a dependency in the annotation, which does the same at a
higher price. Not here: what is wrong with what they ask for (`requirements`), the request scope that beans live in
(`application`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import takewhile
from types import CoroutineType
from typing import Annotated, Any, cast
from weakref import WeakKeyDictionary

from fastapi import Depends, params
from fastapi.routing import APIRoute
from fastapi.sse import EventSourceResponse
from starlette.concurrency import run_in_threadpool
from starlette.requests import HTTPConnection
from starlette.responses import Response

from toolbox.context import Inject, InjectMark, support_endpoints
from toolbox.di.marks import scope_mark_of
from toolbox.errors import IllegalConfigurationError, MissingBeanError, Problem
from toolbox.rest.marks import client_mark_of
from toolbox.services.declaration import left_without_parentheses, service_options_of
from toolbox.services.plans import tools_added
from toolbox.services.streams import ServiceStream
from toolbox.signatures import EMPTY, Unresolved, names_around, resolve
from toolbox.tools.marks import toolbox_of
from toolbox.tools.pipeline import Tool
from toolbox.tools.sources import read_tools
from toolbox.type_keys import metadata_of, unwrapped

from .exchanges import EXCHANGE_KEY, Exchange

ENDPOINT_MARK = "__toolbox_endpoint__"

CONNECTION = "toolbox_connection"
"""The parameter by which a filled endpoint gets its `Request`."""


def the_exchange(connection: HTTPConnection) -> Exchange:
    """The exchange of a request or WebSocket, which is given the endpoint's own object for it.

    Raises `IllegalConfigurationError` in an application without a container.
    """
    exchange: Exchange | None = connection.scope.get(EXCHANGE_KEY)
    if exchange is None:
        raise IllegalConfigurationError(
            [
                Problem(
                    "an endpoint with Inject[…]",
                    "its application has no container",
                    "call toolbox_fastapi.install(app, container) where the application is made",
                )
            ]
        )
    exchange.connection = connection
    return exchange


# --- Inject[T]


class BeanOf:
    """The dependency behind `Inject[T]`; two of one type are equal, so `dependency_overrides` finds it.

    `default` is what its parameter keeps when there is no bean; FastAPI does not tell, so `requirements.complete` does.
    """

    __slots__ = ("default", "wanted")

    def __init__(self, wanted: Any, default: Any = EMPTY) -> None:
        self.wanted, self.default = wanted, default

    def __eq__(self, other: object) -> bool:
        return type(other) is BeanOf and other.wanted == self.wanted

    def __hash__(self) -> int:
        return hash((BeanOf, self.wanted))

    def __repr__(self) -> str:
        return f"BeanOf({self.wanted!r})"

    async def __call__(self, connection: HTTPConnection) -> Any:
        exchange = the_exchange(connection)
        enter_route(exchange, connection)
        try:
            return await exchange.container.aget(self.wanted)
        except MissingBeanError:
            if self.default is EMPTY:
                raise
            return self.default


support_endpoints(lambda wanted: (Depends(BeanOf(wanted), use_cache=False),))


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
        response = options.get("response_class")
        if isinstance(response, type) and issubclass(response, EventSourceResponse) and not _is_generator(endpoint):
            # FastAPI would take it for a generator, never await it, and answer with nothing.
            options["response_class"] = EventStreamDocumented
        super().__init__(path, filled(endpoint), **options)


class EventStreamDocumented(Response):
    """What the OpenAPI document knows of an endpoint that returns `sse(…)`."""

    media_type = EventSourceResponse.media_type


def filled(endpoint: Callable[..., Any]) -> Callable[..., Any]:
    """`endpoint` as FastAPI should see it: without its injected parameters, and calling with its tools around it.

    A generator, or anything but a function, is left as it is: its beans have to be there before it is called.
    """
    if left_without_parentheses(endpoint) == "@toolbox":
        [marked] = inspect.getclosurevars(endpoint).nonlocals["tools"]
        where = f"endpoint {getattr(marked, '__name__', marked)}"
        raise IllegalConfigurationError([Problem(where, "@toolbox has no parentheses", "write @toolbox(…)")])
    if not inspect.isroutine(endpoint) or _is_generator(endpoint):
        return endpoint
    injected, signature = _split_signature(endpoint)
    if not injected and toolbox_of(endpoint) is None:
        return endpoint
    signature, connection = _with_connection(signature, endpoint)
    call = functools.wraps(endpoint)(_filling(endpoint, injected, connection))
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
    names, around = getattr(inspect.unwrap(endpoint), "__globals__", {}), names_around(inspect.unwrap(endpoint))
    injected, others = [], []
    for parameter in signature.parameters.values():
        annotation = resolve(parameter.annotation, names, around)
        metadata = metadata_of(annotation)
        dependencies = [each.dependency for each in metadata if isinstance(each, params.Depends)]
        if bean := next((each for each in dependencies if isinstance(each, BeanOf)), None):
            injected.append(Injected(parameter.name, bean.wanted, parameter.default))
        elif any(isinstance(each, InjectMark) for each in metadata):  # evaluated before FastAPI was imported
            injected.append(Injected(parameter.name, _wanted_by(annotation), parameter.default))
        elif parameter.default is EMPTY and _is_bean(annotation):
            raise IllegalConfigurationError([_no_inject(endpoint, parameter.name, annotation)])
        elif service := _service_that_fastapi_would_make(parameter, annotation, dependencies):
            raise IllegalConfigurationError([_no_inject(endpoint, parameter.name, service)])
        elif annotation is Inject:
            raise IllegalConfigurationError([_of_nothing(endpoint, parameter.name)])
        elif problem := unreadable_inject(f"endpoint {endpoint.__name__}", parameter.name, annotation):
            raise IllegalConfigurationError([problem])
        else:
            known = around and not isinstance(annotation, Unresolved)
            others.append(parameter.replace(annotation=annotation) if known else parameter)
    return tuple(injected), signature.replace(parameters=others)


def unreadable_inject(where: str, parameter: str, annotation: object) -> Problem | None:
    """A problem if what seems to be `Inject[…]` names something that cannot be found: FastAPI would ask the client."""
    text = annotation.text if isinstance(annotation, Unresolved) else annotation
    if not isinstance(text, str) or "Inject[" not in text:
        return None
    what = f"the annotation {text!r} cannot be resolved"
    return Problem(f"{where}, parameter {parameter!r}", what, "import or define what it names at the top of the module")


def _with_connection(signature: inspect.Signature, endpoint: Callable[..., Any]) -> tuple[inspect.Signature, str]:
    """The signature with a parameter by which FastAPI passes its `Request`, undocumented; and that parameter's name."""
    names = getattr(inspect.unwrap(endpoint), "__globals__", {})
    for each in signature.parameters.values():
        if resolve(each.annotation, names) is HTTPConnection:  # FastAPI fills no more than one of this type
            return signature, each.name
    connection = inspect.Parameter(CONNECTION, inspect.Parameter.KEYWORD_ONLY, annotation=HTTPConnection)
    parameters = sorted([*signature.parameters.values(), connection], key=lambda each: each.kind)
    return signature.replace(parameters=parameters), CONNECTION


def _wanted_by(annotation: Any) -> Any:
    """Return T of `Inject[T]`, with the metadata that T has itself."""
    own = tuple(takewhile(lambda each: not isinstance(each, InjectMark), metadata_of(annotation)))
    return Annotated[(annotation.__origin__, *own)] if own else annotation.__origin__


def _is_bean(annotation: object) -> bool:
    """Whether it is a class that is marked as a bean, which no request can hold."""
    if not isinstance(annotation, type):
        return False
    marks = (scope_mark_of(annotation), service_options_of(annotation), client_mark_of(annotation))
    return any(mark is not None for mark in marks)


def _service_that_fastapi_would_make(
    parameter: inspect.Parameter, annotation: Any, dependencies: Sequence[Any]
) -> type[Any] | None:
    """The AI service or REST client that `Depends()` stands for, if it does for one: FastAPI cannot make a Protocol."""
    default = parameter.default
    if isinstance(default, params.Depends):
        dependencies = [*dependencies, default.dependency]
    plain = unwrapped(annotation).type
    for each in dependencies:
        cls = plain if each is None else each
        if isinstance(cls, type) and (service_options_of(cls) or client_mark_of(cls)) is not None:
            return cls
    return None


def _of_nothing(endpoint: Callable[..., Any], parameter: str) -> Problem:
    return Problem(
        f"endpoint {endpoint.__name__}, parameter {parameter!r}",
        "Inject does not say which bean",
        f"write `{parameter}: Inject[…]`, with the bean's class in the brackets",
    )


def _no_inject(endpoint: Callable[..., Any], parameter: str, bean: type[Any]) -> Problem:
    return Problem(
        f"endpoint {endpoint.__name__}, parameter {parameter!r}",
        f"{bean.__name__} is a bean, and FastAPI would look for it in the request",
        f"write `{parameter}: Inject[{bean.__name__}]`, with `from toolbox import Inject`",
    )


def _filling(endpoint: Callable[..., Any], injected: Sequence[Injected], connection: str) -> Callable[..., Any]:
    run = _running(endpoint)
    wanted_by_itself = connection != CONNECTION
    beans = [(each.name, each.wanted, each.default) for each in injected]

    async def call(**values: Any) -> Any:
        exchange = the_exchange(values[connection] if wanted_by_itself else values.pop(connection))
        try:
            for name, wanted, default in beans:
                try:
                    values[name] = await exchange.container.aget(wanted)
                except MissingBeanError:
                    if default is EMPTY:
                        raise  # else the parameter, of which FastAPI knows nothing, keeps its default
            value = await run(**values)
            if type(value) is CoroutineType:
                value.close()
                raise IllegalConfigurationError([_not_awaited(endpoint, value)])
            if isinstance(value, ServiceStream):
                raise IllegalConfigurationError([_not_sent(endpoint)])
            return value
        except BaseException as error:
            exchange.fail(error)
            raise

    return call


def _not_awaited(endpoint: Callable[..., Any], returned: CoroutineType[Any, Any, Any]) -> Problem:
    called = returned.__qualname__.rpartition("<locals>.")[2]
    what = f"it returns the coroutine of {called}, which nobody awaits"
    return Problem(f"endpoint {endpoint.__name__}", what, "declare it `async def` and write `return await …`")


def _not_sent(endpoint: Callable[..., Any]) -> Problem:
    what = "it returns a service's stream, which FastAPI cannot send"
    fix = "write `return sse(…)` around it, with `from toolbox_fastapi import sse`"
    return Problem(f"endpoint {endpoint.__name__}", what, fix)


def _running(endpoint: Callable[..., Any]) -> Callable[..., Any]:
    """The endpoint as a coroutine function, with its tools around it."""
    if not _is_coroutine(endpoint):

        def call_here(values: dict[str, Any]) -> Any:
            with tools_added(endpoint_tools(endpoint)):
                return endpoint(**values)

        async def on_thread(**values: Any) -> Any:
            return await run_in_threadpool(call_here, values)

        return on_thread
    if toolbox_of(endpoint) is None:
        return endpoint

    async def with_tools(**values: Any) -> Any:
        with tools_added(endpoint_tools(endpoint)):
            return await endpoint(**values)

    return with_tools


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


async def enter_by_itself(connection: HTTPConnection) -> None:
    """The dependency of an endpoint that has tools and injects nothing."""
    enter_route(the_exchange(connection), connection)
