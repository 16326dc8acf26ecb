"""What the endpoints of an application ask of its container, read from its routes: beans, tools, defaults.

Not here: how an endpoint gets it (`endpoints`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any, ForwardRef, cast
from weakref import WeakSet

from fastapi import Depends
from fastapi.dependencies.models import Dependant
from fastapi.dependencies.utils import get_parameterless_sub_dependant
from fastapi.routing import RouteContext, iter_route_contexts
from starlette.applications import Starlette
from starlette.routing import BaseRoute, Mount

from toolbox.di.beans import MISSING, InjectionPoint, point_of
from toolbox.di.graph import BeanGraph
from toolbox.errors import Problem
from toolbox.services.checks import tool_bean_problems
from toolbox.services.hosting import registrable
from toolbox.signatures import EMPTY
from toolbox.tools.marks import toolbox_of
from toolbox.tools.sources import bean_types, read_tools

from .endpoints import ENDPOINT_MARK, BeanOf, enter_by_itself, unreadable_inject

installed: WeakSet[Starlette] = WeakSet()
"""The applications that have a container of their own."""


def endpoints_of(routes: Sequence[BaseRoute], prefix: str = "") -> Iterator[tuple[str, RouteContext]]:
    """The endpoints of an application and of those mounted in it that share its container, as `POST /chat (chat)`."""
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
        yield from _unreadable(dependant, where)
        for point in _points_in(dependant, where) if dependant is not None else ():
            yield from graph.problems_of(point)
        if (
            toolbox_of(context.endpoint) is None
            and toolbox_of(inspect.unwrap(cast("Any", context.endpoint))) is not None
        ):
            what = "its @toolbox stands above the route's decorator, which did not see it"
            yield Problem(where, what, "put @toolbox below, next to the function")
        tools, problems = read_tools(toolbox_of(context.endpoint) or (), f"{where}, @toolbox")
        yield from problems
        for tool in tools:
            yield from tool_bean_problems(f"{where}, tool {tool.specification.name}", tool, graph)


def _unreadable(dependant: Dependant | None, where: str) -> Iterator[Problem]:
    """The parameters that FastAPI takes for the query's, because it could not read their `Inject[…]`."""
    for field in dependant.query_params if dependant is not None else ():
        annotation = field.field_info.annotation
        text = annotation.__forward_arg__ if isinstance(annotation, ForwardRef) else None
        if problem := unreadable_inject(where, field.name, text):
            yield problem


def _points_in(dependant: Dependant, where: str) -> Iterator[InjectionPoint]:
    for each, asking, place in _beans_in(dependant, where):
        default = _default_in(asking, each)
        yield point_of(
            cast("BeanOf", each.call).wanted,
            f"{place}, parameter {each.name!r}",
            parameter=each.name or "",
            default=MISSING if default is EMPTY else default,
        )


def complete(routes: Sequence[BaseRoute]) -> None:
    """Tells FastAPI what a route of its own class cannot know: the defaults of `Inject[…]`, an endpoint's tools."""
    for where, context in endpoints_of(routes):
        dependant: Dependant | None = getattr(context, "dependant", None)
        if dependant is None:
            continue
        beans = list(_beans_in(dependant, where))
        for each, asking, _ in beans:
            default = _default_in(asking, each)
            if default is not EMPTY:
                each.call = BeanOf(cast("BeanOf", each.call).wanted, default)
        is_entered = beans or any(each.call is enter_by_itself for each in dependant.dependencies)
        if toolbox_of(context.endpoint) is not None and not is_entered and not hasattr(context.endpoint, ENDPOINT_MARK):
            entering = get_parameterless_sub_dependant(depends=Depends(enter_by_itself), path=context.path or "")
            dependant.dependencies.insert(0, entering)


def _beans_in(dependant: Dependant, where: str) -> Iterator[tuple[Dependant, Dependant, str]]:
    """Each `Inject[…]` that FastAPI sees in an endpoint: itself, what has it as a parameter, and where that is."""
    for each in dependant.dependencies:
        if isinstance(each.call, BeanOf):
            yield each, dependant, where
        else:
            yield from _beans_in(each, f"{where}, dependency {_name_of(each.call)}")


def _default_in(asking: Dependant, bean: Dependant) -> Any:
    """The default of the parameter of `asking` that `bean` is for; `EMPTY` without one."""
    if asking.call is None or bean.name is None:
        return EMPTY
    parameter = inspect.signature(asking.call).parameters.get(bean.name)
    return EMPTY if parameter is None else parameter.default


def _name_of(function: object) -> str:
    return getattr(function, "__name__", None) or type(function).__name__
