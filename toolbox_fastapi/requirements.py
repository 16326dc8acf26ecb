"""Reads the endpoints of an application: the beans and tools they need, and configuration problems in them.

Not here: how an endpoint gets its beans (`endpoints`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ForwardRef, cast
from weakref import WeakSet

from fastapi import Depends
from fastapi.dependencies.models import Dependant
from fastapi.dependencies.utils import get_parameterless_sub_dependant
from fastapi.routing import RouteContext, iter_route_contexts
from starlette.applications import Starlette
from starlette.routing import BaseRoute, Mount

from toolbox.container import Offered
from toolbox.di.beans import MISSING, InjectionPoint, point_of
from toolbox.di.graph import BeanGraph
from toolbox.errors import Problem
from toolbox.reach import Entry, services_behind
from toolbox.security import marked_access
from toolbox.services.hosting import identity_problems, registrable, tool_bean_problems
from toolbox.services.listing import named_beans
from toolbox.signatures import EMPTY
from toolbox.tools.marks import toolbox_of
from toolbox.tools.pipeline import Tool
from toolbox.tools.sources import bean_types, read_tools

from .endpoints import (
    ENDPOINT_MARK,
    OWN_IDENTITY_MARK,
    BeanDependency,
    endpoint_tools,
    enter_route_dependency,
    place_of,
    unresolved_inject,
)

installed: WeakSet[Starlette] = WeakSet()
"""The applications that have their own container."""


def endpoints_of(routes: Sequence[BaseRoute], prefix: str = "") -> Iterator[tuple[str, RouteContext]]:
    """Yield each endpoint with its name, such as `POST /chat (chat)`.

    Endpoints of mounted applications are included, unless the mounted application has its own container.
    """
    for context in iter_route_contexts(routes):
        path = f"{prefix}{context.path or ''}"
        inner = context.original_route
        if isinstance(inner, Mount):
            if isinstance(inner.app, Starlette) and inner.app in installed:
                continue
            yield from endpoints_of(inner.routes or (), path)
        elif context.endpoint is not None:
            methods = "/".join(sorted(context.methods or ())) or "WebSocket"
            yield f"{methods} {path} ({_name_of(context.endpoint)})", context


def entries_of(routes: Sequence[BaseRoute], graph: BeanGraph) -> Iterator[Entry]:
    """Yield the endpoints that can call AI services, also through other beans, with the tools that they add."""
    for where, context in endpoints_of(routes):
        name = where.rpartition(" (")[0]
        points = [point_of(each.wanted, name) for each in getattr(context.endpoint, ENDPOINT_MARK, ())]
        if (dependant := getattr(context, "dependant", None)) is not None:
            points += _points_in(dependant, name)
        tools, _ = read_tools(toolbox_of(context.endpoint) or (), name)
        if services := services_behind(points, graph):
            yield Entry(name, services, tools)


def tools_of_endpoints(routes: Sequence[BaseRoute]) -> Iterator[type]:
    """Yield the classes in the endpoints' `@toolbox`, and those that decorators name at them: beans by themselves."""
    for _, context in endpoints_of(routes):
        tools = toolbox_of(context.endpoint) or ()
        yield from registrable(bean_types(tools))
        yield from named_beans(tools)


def offers_of_endpoints(routes: Sequence[BaseRoute]) -> Iterator[Offered]:
    """Yield the tools that `@toolbox` adds to endpoints, by the endpoint's name."""
    for where, context in endpoints_of(routes):
        tools, _ = read_tools(toolbox_of(context.endpoint) or (), f"{where}, @toolbox")
        if tools:
            yield f"{where}, @toolbox", tuple(each.specification for each in tools)


def tools_added_by_endpoints(routes: Sequence[BaseRoute]) -> dict[str, tuple[Tool, ...]]:
    """Return the tools that `@toolbox` adds to endpoints, by the name of the endpoint's function."""
    marked = [context.endpoint for _, context in endpoints_of(routes) if toolbox_of(context.endpoint) is not None]
    return {place_of(each): endpoint_tools(each) for each in cast("list[Callable[..., Any]]", marked)}


def endpoint_problems(routes: Sequence[BaseRoute], graph: BeanGraph) -> Iterator[Problem]:
    """Yield the problems of the `Inject[…]` parameters and the tools of all endpoints and their dependencies."""
    for where, context in endpoints_of(routes):
        for each in getattr(context.endpoint, ENDPOINT_MARK, ()):
            default = MISSING if each.default is EMPTY else each.default
            place = f"{where}, parameter {each.name!r}"
            yield from graph.problems_of(point_of(each.wanted, place, parameter=each.name, default=default))
        dependant = getattr(context, "dependant", None)
        yield from _unresolved_injects(dependant, where)
        for point in _points_in(dependant, where) if dependant is not None else ():
            yield from graph.problems_of(point)
        if (
            toolbox_of(context.endpoint) is None
            and toolbox_of(inspect.unwrap(cast("Any", context.endpoint))) is not None
        ):
            what = "@toolbox is above the route decorator and has no effect"
            yield Problem(where, what, "put @toolbox below the route decorator, next to the function")
        tools, problems = read_tools(toolbox_of(context.endpoint) or (), f"{where}, @toolbox")
        yield from problems
        yield from identity_problems(graph, (f"{where}, tool {tool.name}" for tool in tools if tool.access is not None))
        if marked_access(context.endpoint) is not None:
            fix = "put it on the tools and AI services that the endpoint uses, and protect the endpoint with Depends(…)"
            yield Problem(where, "the roles have no effect on an endpoint", fix)
        for tool in tools:
            yield from tool_bean_problems(f"{where}, tool {tool.specification.name}", tool, graph)


def _unresolved_injects(dependant: Dependant | None, where: str) -> Iterator[Problem]:
    """Yield a problem for each `Inject[…]` that FastAPI could not resolve, and so treats as a query parameter."""
    for field in dependant.query_params if dependant is not None else ():
        annotation = field.field_info.annotation
        text = annotation.__forward_arg__ if isinstance(annotation, ForwardRef) else None
        if problem := unresolved_inject(where, field.name, text):
            yield problem


def _points_in(dependant: Dependant, where: str) -> Iterator[InjectionPoint]:
    for each, asking, place in _beans_in(dependant, where):
        default = _default_in(asking, each)
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
        beans = list(_beans_in(dependant, where))
        for each, asking, _ in beans:
            default = _default_in(asking, each)
            if default is not EMPTY:
                each.call = BeanDependency(cast("BeanDependency", each.call).wanted, default)
        is_entered = beans or any(each.call is enter_route_dependency for each in dependant.dependencies)
        if toolbox_of(context.endpoint) is not None and not is_entered and not hasattr(context.endpoint, ENDPOINT_MARK):
            entering = get_parameterless_sub_dependant(depends=Depends(enter_route_dependency), path=context.path or "")
            dependant.dependencies.insert(0, entering)
        if resolve_identity is None or hasattr(context.endpoint, OWN_IDENTITY_MARK):
            continue
        if not any(each.call is resolve_identity for each in dependant.dependencies):
            identity = get_parameterless_sub_dependant(depends=Depends(resolve_identity), path=context.path or "")
            dependant.dependencies.insert(0, identity)


def _beans_in(dependant: Dependant, where: str) -> Iterator[tuple[Dependant, Dependant, str]]:
    """Yield each `Inject[…]` dependency of an endpoint, with its parent dependency and the place for messages."""
    for each in dependant.dependencies:
        if isinstance(each.call, BeanDependency):
            yield each, dependant, where
        else:
            yield from _beans_in(each, f"{where}, dependency {_name_of(each.call)}")


def _default_in(asking: Dependant, bean: Dependant) -> Any:
    """Return the default of the parameter of `asking` that gets `bean`, or `EMPTY`."""
    if asking.call is None or bean.name is None:
        return EMPTY
    parameter = inspect.signature(asking.call).parameters.get(bean.name)
    return EMPTY if parameter is None else parameter.default


def _name_of(function: object) -> str:
    return getattr(function, "__name__", None) or type(function).__name__
