"""`Inject[T]` and `@toolbox` in endpoints: fills the parameters with beans and makes the tools active.

An `InjectRoute` hides the parameter from FastAPI and fills it when it calls the endpoint. Other routes (of a plain
`APIRouter`, of a WebSocket) use the FastAPI dependency in the annotation, which costs more. Not here: the request scope
of the beans (`application`), the checks of all endpoints at startup (`endpoint_checks`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
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

from toolbox.bean_references import is_rest_client
from toolbox.container import Container, internals_of
from toolbox.di.decorators import scope_mark_of
from toolbox.di.graph import BeanGraph
from toolbox.errors import IllegalConfigurationError, Problem
from toolbox.introspection import EMPTY, Unresolved, bare_decorator, metadata_of, names_around, resolve, unwrapped
from toolbox.parameters import Inject, InjectMark, support_endpoints
from toolbox.services.declaration import service_options_of
from toolbox.services.streams import ServiceStream
from toolbox.services.tools_of_blocks import tools_added
from toolbox.tools.marks import toolbox_of
from toolbox.tools.sources import read_tools
from toolbox.tools.tool_calls import Tool

from .exchanges import AFTER_ENDPOINT, AFTER_RESPONSE, ClientExchange, exchange_of, exit_stack

ENDPOINT_MARK = "__toolbox_endpoint__"

CONNECTION = "toolbox_connection"
"""The parameter through which FastAPI passes its `Request` to an endpoint with injected parameters."""


# --- Inject[T]


class BeanDependency:
    """The FastAPI dependency behind `Inject[T]`; equal for equal types, so that `dependency_overrides` finds it.

    `default` is the parameter's default, used when there is no bean. FastAPI does not pass it to dependencies;
    `complete_dependencies` sets it.
    """

    __slots__ = ("default", "wanted")

    def __init__(self, wanted: Any, default: Any = EMPTY) -> None:
        self.wanted, self.default = wanted, default

    def __eq__(self, other: object) -> bool:
        return type(other) is BeanDependency and other.wanted == self.wanted

    def __hash__(self) -> int:
        return hash((BeanDependency, self.wanted))

    def __repr__(self) -> str:
        return f"BeanDependency({self.wanted!r})"

    async def __call__(self, connection: HTTPConnection) -> Any:
        exchange = exchange_of(connection)
        enter_route(exchange, connection)
        if self.default is EMPTY:
            return await internals_of(exchange.container).aget(self.wanted)
        found = await internals_of(exchange.container).find(self.wanted)
        return self.default if found is None else found


support_endpoints(lambda wanted: (Depends(BeanDependency(wanted), use_cache=False),))


@dataclass(frozen=True, slots=True)
class Injected:
    """A parameter that gets a bean; `default` is used when there is no bean, `EMPTY` if it has no default."""

    name: str
    wanted: Any
    default: Any = EMPTY


# --- a route that fills the parameters itself


class InjectRoute(APIRoute):
    """A route class that fills `Inject[…]` parameters itself, at half the cost of FastAPI's dependencies.

        router = APIRouter(route_class=InjectRoute)

    `install` sets it for the routes of the application itself. `Inject[…]` works with other route classes as well.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        response = options.get("response_class")
        if isinstance(response, type) and issubclass(response, EventSourceResponse) and not _is_generator(endpoint):
            # FastAPI would treat it as a generator, never await it, and send an empty response.
            options["response_class"] = EventStreamDocumented
        super().__init__(path, fill_parameters(endpoint), **options)


class EventStreamDocumented(Response):
    """The response class in the OpenAPI document for endpoints that return `sse(…)`."""

    media_type = EventSourceResponse.media_type


def fill_parameters(endpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Return `endpoint` for FastAPI: without its injected parameters, and with its tools active during the call.

    Generators and callables other than functions are returned unchanged; `BeanDependency` fills their parameters.
    """
    if (bare := bare_decorator(endpoint)) is not None:
        where = f"endpoint {getattr(bare.function, '__name__', bare.function)}"
        raise IllegalConfigurationError([Problem(where, f"{bare.name} has no parentheses", f"write {bare.name}(…)")])
    if not inspect.isroutine(endpoint) or _is_generator(endpoint):
        return endpoint
    injected, signature = _split_signature(endpoint)
    if not injected and toolbox_of(endpoint) is None:
        return endpoint
    signature, connection = _add_connection(signature, endpoint)
    call = functools.wraps(endpoint)(_call_with_beans(endpoint, injected, connection))
    call.__signature__ = signature  # type: ignore[attr-defined]  # what inspect looks at before anything else
    setattr(call, ENDPOINT_MARK, injected)
    return call


def _is_generator(endpoint: Callable[..., Any]) -> bool:
    plain = inspect.unwrap(endpoint)
    return inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain)


def _is_coroutine(endpoint: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(endpoint) or inspect.iscoroutinefunction(inspect.unwrap(endpoint))


def _split_signature(endpoint: Callable[..., Any]) -> tuple[tuple[Injected, ...], inspect.Signature]:
    """Return the injected parameters, and the signature without them."""
    signature = inspect.signature(endpoint)
    names, around = getattr(inspect.unwrap(endpoint), "__globals__", {}), names_around(inspect.unwrap(endpoint))
    where = f"endpoint {endpoint.__name__}"
    injected, others = [], []
    for parameter in signature.parameters.values():
        annotation = resolve(parameter.annotation, names, around)
        metadata = metadata_of(annotation)
        dependencies = [each.dependency for each in metadata if isinstance(each, params.Depends)]
        if bean := next((each for each in dependencies if isinstance(each, BeanDependency)), None):
            injected.append(Injected(parameter.name, bean.wanted, parameter.default))
        elif any(isinstance(each, InjectMark) for each in metadata):  # evaluated before FastAPI was imported
            injected.append(Injected(parameter.name, _find_wanted(annotation), parameter.default))
        elif parameter.default is EMPTY and is_marked_bean(annotation):
            raise IllegalConfigurationError([problem_without_inject(where, parameter.name, annotation)])
        elif service := _service_in_depends(parameter, annotation, dependencies):
            raise IllegalConfigurationError([problem_without_inject(where, parameter.name, service)])
        elif annotation is Inject:
            raise IllegalConfigurationError([_problem_without_class(where, parameter.name)])
        elif problem := unresolved_inject(where, parameter.name, annotation):
            raise IllegalConfigurationError([problem])
        else:
            known = around and not isinstance(annotation, Unresolved)
            others.append(parameter.replace(annotation=annotation) if known else parameter)
    return tuple(injected), signature.replace(parameters=others)


def unresolved_inject(where: str, parameter: str, annotation: object) -> Problem | None:
    """Return a problem if the text of an `Inject[…]` annotation cannot be resolved; FastAPI would ask the client."""
    text = annotation.text if isinstance(annotation, Unresolved) else annotation
    if not isinstance(text, str) or "Inject[" not in text:
        return None
    what = f"the annotation {text!r} cannot be resolved"
    return Problem(f"{where}, parameter {parameter!r}", what, "import or define what it names at the top of the module")


def _add_connection(signature: inspect.Signature, endpoint: Callable[..., Any]) -> tuple[inspect.Signature, str]:
    """Return the signature with a hidden parameter for FastAPI's `Request`, and the name of this parameter."""
    names = getattr(inspect.unwrap(endpoint), "__globals__", {})
    for each in signature.parameters.values():
        if resolve(each.annotation, names) is HTTPConnection:  # FastAPI fills no more than one of this type
            return signature, each.name
    connection = inspect.Parameter(CONNECTION, inspect.Parameter.KEYWORD_ONLY, annotation=HTTPConnection)
    parameters = sorted([*signature.parameters.values(), connection], key=lambda each: each.kind)
    return signature.replace(parameters=parameters), CONNECTION


def _find_wanted(annotation: Any) -> Any:
    """Return T of `Inject[T]`, with T's metadata but without the mark."""
    own = tuple(takewhile(lambda each: not isinstance(each, InjectMark), metadata_of(annotation)))
    return Annotated[(annotation.__origin__, *own)] if own else annotation.__origin__


def is_marked_bean(annotation: object) -> bool:
    """Return True for a class that is marked as a bean; a request cannot contain one."""
    if not isinstance(annotation, type):
        return False
    marks = (scope_mark_of(annotation), service_options_of(annotation))
    return any(mark is not None for mark in marks) or is_rest_client(annotation)


def _service_in_depends(parameter: inspect.Parameter, annotation: Any, dependencies: Sequence[Any]) -> type[Any] | None:
    """Return the AI service or REST client in `Depends()`, if there is one: FastAPI cannot create a Protocol."""
    default = parameter.default
    if isinstance(default, params.Depends):
        dependencies = [*dependencies, default.dependency]
    plain = unwrapped(annotation).type
    for each in dependencies:
        cls = plain if each is None else each
        if is_service(cls):
            return cast("type[Any]", cls)
    return None


def is_service(cls: object) -> bool:
    return isinstance(cls, type) and (service_options_of(cls) is not None or is_rest_client(cls))


def _problem_without_class(where: str, parameter: str) -> Problem:
    return Problem(
        f"{where}, parameter {parameter!r}",
        "Inject has no class",
        f"write `{parameter}: Inject[…]` with the class of the bean in the brackets",
    )


def problem_without_inject(where: str, parameter: str, bean: type[Any]) -> Problem:
    return Problem(
        f"{where}, parameter {parameter!r}",
        f"{bean.__name__} is a bean, but FastAPI would read it from the request",
        f"write `{parameter}: Inject[{bean.__name__}]`, with `from toolbox import Inject`",
    )


def _call_with_beans(endpoint: Callable[..., Any], injected: Sequence[Injected], connection: str) -> Callable[..., Any]:
    run, has_tools = _as_coroutine(endpoint), toolbox_of(endpoint) is not None
    wanted_by_itself = connection != CONNECTION
    beans = [(each.name, each.wanted, each.default) for each in injected]

    async def call_endpoint(**values: Any) -> Any:
        exchange = exchange_of(values[connection] if wanted_by_itself else values.pop(connection))
        try:
            for name, wanted, default in beans:
                if default is EMPTY:
                    values[name] = await internals_of(exchange.container).aget(wanted)
                elif (bean := await internals_of(exchange.container).find(wanted)) is not None:
                    values[name] = bean
            with activate_endpoint_tools(endpoint, exchange.container) if has_tools else nullcontext():
                value = await run(**values)
            if type(value) is CoroutineType:
                value.close()
                raise IllegalConfigurationError([_problem_not_awaited(endpoint, value)])
            if isinstance(value, ServiceStream):
                raise IllegalConfigurationError([_problem_not_sent(endpoint)])
            return value
        except BaseException as error:
            exchange.fail(error)
            raise

    return call_endpoint


def _problem_not_awaited(endpoint: Callable[..., Any], returned: CoroutineType[Any, Any, Any]) -> Problem:
    called = returned.__qualname__.rpartition("<locals>.")[2]
    what = f"it returns the coroutine of {called}, which is not awaited"
    return Problem(f"endpoint {endpoint.__name__}", what, "declare it `async def` and write `return await …`")


def _problem_not_sent(endpoint: Callable[..., Any]) -> Problem:
    what = "it returns a service's stream, but FastAPI cannot send it"
    fix = "write `return sse(…)`, with `from toolbox_fastapi import sse`"
    return Problem(f"endpoint {endpoint.__name__}", what, fix)


def _as_coroutine(endpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Return the endpoint as a coroutine function; `def` endpoints run on a thread, in the same context."""
    if _is_coroutine(endpoint):
        return endpoint

    async def on_thread(**values: Any) -> Any:
        return await run_in_threadpool(functools.partial(endpoint, **values))

    return on_thread


# --- @toolbox on an endpoint

_tools_read: WeakKeyDictionary[BeanGraph, dict[Callable[..., Any], tuple[Tool, ...]]] = WeakKeyDictionary()


def read_endpoint_tools(endpoint: Callable[..., Any], graph: BeanGraph) -> tuple[Tool, ...]:
    """Return the tools of the endpoint's `@toolbox` with the beans of `graph`, which reads them once.

    Raises `IllegalConfigurationError` for invalid tools.
    """
    plain = getattr(endpoint, "__func__", endpoint)
    read = _tools_read.setdefault(graph, {})
    if plain not in read:
        where = f"@toolbox of endpoint {plain.__name__}"
        tools, problems = read_tools(toolbox_of(plain) or (), where, graph.class_behind)
        if problems:
            raise IllegalConfigurationError(problems)
        read[plain] = tools
    return read[plain]


def activate_endpoint_tools(endpoint: Callable[..., Any], container: Container) -> AbstractContextManager[None]:
    """Add the tools of the endpoint's `@toolbox` inside the block."""
    tools = read_endpoint_tools(endpoint, internals_of(container).graph)
    return tools_added(tools, place_of(endpoint) if tools else "")


def place_of(endpoint: Callable[..., Any]) -> str:
    """Return the name of an endpoint's function, by which stored runs find its tools again."""
    plain = getattr(endpoint, "__func__", endpoint)
    return f"{plain.__module__}.{plain.__qualname__}"


def enter_route(exchange: ClientExchange, connection: HTTPConnection) -> None:
    """For routes of other classes: record the error that leaves the endpoint, and make the endpoint's tools active."""
    endpoint = connection.scope.get("endpoint")
    if exchange.entered or hasattr(endpoint, ENDPOINT_MARK):
        return
    exchange.entered = True
    stack = exit_stack(connection, AFTER_ENDPOINT)
    stack.push(exchange.note)
    if callable(endpoint) and toolbox_of(endpoint) is not None:
        if _is_generator(endpoint):  # it runs until the response has been sent
            stack = exit_stack(connection, AFTER_RESPONSE)
        stack.enter_context(activate_endpoint_tools(endpoint, exchange.container))


async def enter_route_dependency(connection: HTTPConnection) -> None:
    """The dependency of an endpoint that has tools but no injected parameters."""
    enter_route(exchange_of(connection), connection)


# --- @on_success


async def settle_after_endpoint(connection: HTTPConnection) -> None:
    """The dependency of endpoints whose beans can have `@on_success` methods: calls them before the response begins.

    An exception handler can still answer what they raise. It is the first dependency, so that those that end with the
    endpoint (`scope="function"`) have ended.
    """
    exit_stack(connection, AFTER_ENDPOINT).push_async_exit(exchange_of(connection).settle_unless_failed)
