"""`Inject[T]` and `@toolbox` in endpoints: fills the parameters with beans and makes the tools active.

An `InjectRoute` hides the parameter from FastAPI and fills it when it calls the endpoint. Other routes (of a plain
`APIRouter`, of a WebSocket) use the FastAPI dependency in the annotation, which costs more. Also reads the endpoints
of an application: the beans and tools they need, and configuration problems in them. Not here: the request scope of
the beans (`application`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import takewhile
from types import CoroutineType
from typing import Annotated, Any, ForwardRef, cast
from weakref import WeakKeyDictionary, WeakSet

from fastapi import Depends, params
from fastapi.dependencies.models import Dependant
from fastapi.dependencies.utils import get_dependant, get_parameterless_sub_dependant, get_typed_signature
from fastapi.routing import APIRoute, RouteContext, iter_route_contexts
from fastapi.security.base import SecurityBase
from fastapi.sse import EventSourceResponse
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.routing import BaseRoute, Host, Mount, Route

from toolbox.bean_references import is_rest_client
from toolbox.container import Container, Offered, internals_of
from toolbox.di.decorators import scope_mark_of
from toolbox.di.graph import BeanGraph
from toolbox.di.injection_points import MISSING, InjectionPoint, point_of
from toolbox.di.registry import Fallback
from toolbox.errors import IllegalConfigurationError, Problem
from toolbox.hosts.bean_checks import identity_problems, tool_bean_problems
from toolbox.introspection import EMPTY, Unresolved, metadata_of, names_around, resolve, unwrapped
from toolbox.overview import Entry, entry_behind
from toolbox.parameters import (
    Inject,
    InjectMark,
    support_endpoints,
)
from toolbox.security import SecurityIdentity, identity_from, nearest_access
from toolbox.services.declaration import left_without_parentheses, service_options_of
from toolbox.services.implied_beans import named_beans, registrable
from toolbox.services.streams import ServiceStream
from toolbox.services.tools_of_blocks import tools_added
from toolbox.tools.marks import toolbox_of
from toolbox.tools.sources import bean_types, classes_of_methods, read_tools
from toolbox.tools.tool_calls import Tool

from .exchanges import AFTER_ENDPOINT, AFTER_RESPONSE, ANY_CHALLENGE, EXCHANGE_KEY, ClientExchange, exit_stack

ENDPOINT_MARK = "__toolbox_endpoint__"

OWN_IDENTITY_MARK = "__toolbox_own_identity__"
"""Marks an endpoint that does not get the identity of the application."""

IDENTITY_DEPENDENCY = "toolbox_identity"
"""Name of the attribute of an application's `state` that has the dependency which resolves the identity."""

CONNECTION = "toolbox_connection"
"""The parameter through which FastAPI passes its `Request` to an endpoint with injected parameters."""


def exchange_of(connection: HTTPConnection) -> ClientExchange:
    """Return the exchange of `connection`, and let it provide this same object to beans.

    Raises `IllegalConfigurationError` if the application has no container.
    """
    exchange: ClientExchange | None = connection.scope.get(EXCHANGE_KEY)
    if exchange is None:
        raise IllegalConfigurationError(
            [
                Problem(
                    "an endpoint with Inject[…]",
                    "its application has no container",
                    "call toolbox_fastapi.install(app, container) where you create the application",
                )
            ]
        )
    exchange.connection = connection
    return exchange


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
            return await exchange.container.aget(self.wanted)
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
    if left_without_parentheses(endpoint) == "@toolbox":
        [marked] = inspect.getclosurevars(endpoint).nonlocals["tools"]
        where = f"endpoint {getattr(marked, '__name__', marked)}"
        raise IllegalConfigurationError([Problem(where, "@toolbox has no parentheses", "write @toolbox(…)")])
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
        elif parameter.default is EMPTY and _is_bean(annotation):
            raise IllegalConfigurationError([_problem_without_inject(where, parameter.name, annotation)])
        elif service := _service_in_depends(parameter, annotation, dependencies):
            raise IllegalConfigurationError([_problem_without_inject(where, parameter.name, service)])
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


def _is_bean(annotation: object) -> bool:
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
        if _is_service(cls):
            return cast("type[Any]", cls)
    return None


def _is_service(cls: object) -> bool:
    return isinstance(cls, type) and (service_options_of(cls) is not None or is_rest_client(cls))


def _problem_without_class(where: str, parameter: str) -> Problem:
    return Problem(
        f"{where}, parameter {parameter!r}",
        "Inject has no class",
        f"write `{parameter}: Inject[…]` with the class of the bean in the brackets",
    )


def _problem_without_inject(where: str, parameter: str, bean: type[Any]) -> Problem:
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
                    values[name] = await exchange.container.aget(wanted)
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


def identity_dependency(identity: Any, where: str) -> Callable[..., Any]:
    """Return the dependency that resolves `identity`, a FastAPI dependency, for the beans of the request.

    Raises `IllegalConfigurationError` if it is not a dependency; `where` is the place.
    """
    dependency = identity if isinstance(identity, params.Depends) else Depends(identity)
    if not callable(dependency.dependency) or isinstance(identity, SecurityIdentity):
        fix = "pass a function that FastAPI can call, such as `async def current_user(…) -> SecurityIdentity | None`"
        raise IllegalConfigurationError([Problem(where, f"identity={identity!r} is not a FastAPI dependency", fix)])
    name = getattr(dependency.dependency, "__name__", repr(dependency.dependency))

    async def resolve_identity(connection: HTTPConnection, found: Any = dependency) -> None:
        exchange = exchange_of(connection)
        exchange.identity = identity_from(found, f"the dependency {name}, identity= of install(…),")
        exchange.find_challenge = find_challenge

    find_challenge = functools.cache(functools.partial(challenge_of, resolve_identity))
    return resolve_identity


def challenge_of(dependency: Callable[..., Any]) -> str:
    """Return the `WWW-Authenticate` header for the security schemes that a dependency uses, such as `Bearer`."""
    found: dict[str, None] = {}
    todo = [get_dependant(path="/", call=dependency)]
    while todo:
        dependant = todo.pop(0)
        todo += dependant.dependencies
        if isinstance(dependant.call, SecurityBase):
            make_error = getattr(dependant.call, "make_not_authenticated_error", None)
            headers = make_error().headers if make_error is not None else None
            found[(headers or {}).get("WWW-Authenticate", ANY_CHALLENGE)] = None
    return ", ".join(found) or ANY_CHALLENGE


async def enter_route_dependency(connection: HTTPConnection) -> None:
    """The dependency of an endpoint that has tools but no injected parameters."""
    enter_route(exchange_of(connection), connection)


# --- what the endpoints of an application need


installed: WeakSet[Starlette] = WeakSet()
"""The applications that have their own container."""


def endpoints_of(routes: Sequence[BaseRoute], prefix: str = "") -> Iterator[tuple[str, RouteContext]]:
    """Yield each endpoint with its name, such as `POST /chat (chat)`.

    Endpoints of mounted applications are included, unless the mounted application has its own container.
    """
    for context in iter_route_contexts(routes):
        path = f"{prefix}{context.path or ''}"
        inner = context.original_route
        if isinstance(inner, (Mount, Host)):
            mounted = mounted_in(inner)
            if not (isinstance(mounted, Starlette) and mounted in installed):
                yield from endpoints_of(getattr(mounted, "routes", ()), path)
        elif context.endpoint is not None:
            methods = "/".join(sorted(context.methods or ())) or ("HTTP" if isinstance(inner, Route) else "WebSocket")
            yield f"{methods} {path} ({_name_function(context.endpoint)})", context


def mounted_in(route: Mount | Host) -> Any:
    """Return the application or router that a route mounts, without the middleware around it."""
    mounted: Any = route.app
    while not hasattr(mounted, "routes") and hasattr(mounted, "app"):
        mounted = mounted.app
    return mounted


def entries_of(routes: Sequence[BaseRoute], graph: BeanGraph) -> Iterator[Entry]:
    """Yield the endpoints that can call AI services, also through other beans, with the tools that they add."""
    for where, context in endpoints_of(routes):
        name = where.rpartition(" (")[0]
        points = [point_of(each.wanted, name) for each in getattr(context.endpoint, ENDPOINT_MARK, ())]
        if (dependant := getattr(context, "dependant", None)) is not None:
            points += _find_points(dependant, name)
        tools, _ = read_tools(toolbox_of(context.endpoint) or (), name, graph.class_behind)
        if entry := entry_behind(name, points, graph, tools, nearest_access(context.endpoint)):
            yield entry


def find_implied_beans(routes: Sequence[BaseRoute]) -> Iterator[type | Fallback]:
    """Yield the classes in the endpoints' `@toolbox`, and those that decorators name at them: beans by themselves."""
    for _, context in endpoints_of(routes):
        tools = toolbox_of(context.endpoint) or ()
        yield from registrable(bean_types(tools))
        yield from map(Fallback, registrable(classes_of_methods(tools)))
        yield from named_beans(tools)


def offers_of_endpoints(routes: Sequence[BaseRoute]) -> Iterator[Offered]:
    """Yield the tools that `@toolbox` adds to endpoints, by the endpoint's name."""
    for where, context in endpoints_of(routes):
        tools, _ = read_tools(toolbox_of(context.endpoint) or (), f"{where}, @toolbox")
        if tools:
            yield f"{where}, @toolbox", tuple(each.specification for each in tools)


def tools_added_by_endpoints(routes: Sequence[BaseRoute], graph: BeanGraph) -> dict[str, tuple[Tool, ...]]:
    """Return the tools that `@toolbox` adds to endpoints, by the name of the endpoint's function."""
    marked = [context.endpoint for _, context in endpoints_of(routes) if toolbox_of(context.endpoint) is not None]
    return {place_of(each): read_endpoint_tools(each, graph) for each in cast("list[Callable[..., Any]]", marked)}


def endpoint_problems(routes: Sequence[BaseRoute], graph: BeanGraph) -> Iterator[Problem]:
    """Yield the problems of the `Inject[…]` parameters and the tools of all endpoints and their dependencies."""
    for where, context in endpoints_of(routes):
        for each in getattr(context.endpoint, ENDPOINT_MARK, ()):
            default = MISSING if each.default is EMPTY else each.default
            place = f"{where}, parameter {each.name!r}"
            yield from graph.problems_of(point_of(each.wanted, place, parameter=each.name, default=default))
        dependant = getattr(context, "dependant", None)
        if dependant is None and callable(context.endpoint):
            yield from _problems_of_plain_route(context.endpoint, where)
        if dependant is not None:
            yield from _problems_of_requested_beans(dependant, where)
            for point in _find_points(dependant, where):
                yield from graph.problems_of(point)
        if (
            toolbox_of(context.endpoint) is None
            and toolbox_of(inspect.unwrap(cast("Any", context.endpoint))) is not None
        ):
            what = "@toolbox is above the route decorator and has no effect"
            yield Problem(where, what, "put @toolbox below the route decorator, next to the function")
        tools, problems = read_tools(toolbox_of(context.endpoint) or (), f"{where}, @toolbox", graph.class_behind)
        yield from problems
        yield from identity_problems(graph, (f"{where}, tool {tool.name}" for tool in tools if tool.access is not None))
        for tool in tools:
            yield from tool_bean_problems(f"{where}, tool {tool.specification.name}", tool, graph)


def _problems_of_plain_route(endpoint: Callable[..., Any], where: str) -> Iterator[Problem]:
    """Yield a problem for each `Inject[…]` of a view that Starlette calls: with the request only."""
    views = vars(endpoint).values() if isinstance(endpoint, type) else (endpoint,)
    for view in filter(inspect.isroutine, views):
        for each in inspect.signature(view).parameters.values():
            names = getattr(inspect.unwrap(view), "__globals__", {})
            annotation = resolve(each.annotation, names, names_around(inspect.unwrap(view)))
            dependencies = [mark.dependency for mark in metadata_of(annotation) if isinstance(mark, params.Depends)]
            is_injected = any(isinstance(mark, InjectMark) for mark in metadata_of(annotation))
            if is_injected or any(isinstance(dependency, BeanDependency) for dependency in dependencies):
                what = "Inject has no effect here: Starlette calls the views of add_route with the request only"
                fix = "use a route of FastAPI: app.add_api_route(…), @app.get(…) or @app.websocket(…)"
                yield Problem(f"{where}, parameter {each.name!r}", what, fix)


def _problems_of_requested_beans(dependant: Dependant, where: str) -> Iterator[Problem]:
    """Yield a problem for each bean that FastAPI would read from the request, also in dependencies.

    An `InjectRoute` refuses them when it is declared; other routes and dependencies are only seen here.
    """
    parameters = get_typed_signature(dependant.call).parameters if dependant.call is not None else {}
    for field in (*dependant.query_params, *dependant.body_params):
        parameter = parameters.get(field.name)  # None for a dependency that the check of roles has replaced
        annotation = field.field_info.annotation if parameter is None else parameter.annotation
        text = annotation.__forward_arg__ if isinstance(annotation, ForwardRef) else None
        if problem := unresolved_inject(where, field.name, text):
            yield problem
        elif _is_bean(annotation) and (parameter is None or parameter.default is EMPTY):
            yield _problem_without_inject(where, field.name, cast("type[Any]", annotation))
    for each in dependant.dependencies:
        if _is_service(each.call):
            yield _problem_without_inject(where, each.name or "", cast("type[Any]", each.call))
        elif not isinstance(each.call, BeanDependency):
            yield from _problems_of_requested_beans(each, f"{where}, dependency {_name_function(each.call)}")


def _find_points(dependant: Dependant, where: str) -> Iterator[InjectionPoint]:
    for each, asking, place in _find_beans(dependant, where):
        default = _find_default(asking, each)
        yield point_of(
            cast("BeanDependency", each.call).wanted,
            f"{place}, parameter {each.name!r}",
            parameter=each.name or "",
            default=MISSING if default is EMPTY else default,
        )


def complete_dependencies(routes: Sequence[BaseRoute], resolve_identity: Callable[..., Any] | None = None) -> None:
    """Add to FastAPI's own routes what they cannot know: the defaults of `Inject[…]` and the endpoints' tools.

    `resolve_identity` is added to routes that do not have it, such as those of mounted applications.
    """
    for where, context in endpoints_of(routes):
        dependant: Dependant | None = getattr(context, "dependant", None)
        if dependant is None:
            continue
        beans = list(_find_beans(dependant, where))
        for each, asking, _ in beans:
            default = _find_default(asking, each)
            if default is not EMPTY:
                each.call = BeanDependency(cast("BeanDependency", each.call).wanted, default)
        is_entered = beans or any(each.call is enter_route_dependency for each in dependant.dependencies)
        if toolbox_of(context.endpoint) is not None and not is_entered and not hasattr(context.endpoint, ENDPOINT_MARK):
            entering = get_parameterless_sub_dependant(depends=Depends(enter_route_dependency), path=context.path or "")
            dependant.dependencies.insert(0, entering)
        if resolve_identity is None or hasattr(context.endpoint, OWN_IDENTITY_MARK):
            continue
        # After a check of roles, which has solved it, another callable has its place.
        if not any(getattr(each.call, "solves", each.call) is resolve_identity for each in dependant.dependencies):
            identity = get_parameterless_sub_dependant(depends=Depends(resolve_identity), path=context.path or "")
            dependant.dependencies.insert(0, identity)


def _find_beans(dependant: Dependant, where: str) -> Iterator[tuple[Dependant, Dependant, str]]:
    """Yield each `Inject[…]` dependency of an endpoint, with its parent dependency and the place for messages."""
    for each in dependant.dependencies:
        if isinstance(each.call, BeanDependency):
            yield each, dependant, where
        else:
            yield from _find_beans(each, f"{where}, dependency {_name_function(each.call)}")


def _find_default(asking: Dependant, bean: Dependant) -> Any:
    """Return the default of the parameter of `asking` that gets `bean`, or `EMPTY`."""
    if asking.call is None or bean.name is None:
        return EMPTY
    parameter = inspect.signature(asking.call).parameters.get(bean.name)
    return EMPTY if parameter is None else parameter.default


def _name_function(function: object) -> str:
    return getattr(function, "__name__", None) or type(function).__name__
