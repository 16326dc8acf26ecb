"""Reads the endpoints of an application at startup: the beans and tools that they need, and problems in them.

Also completes routes with what FastAPI cannot know. Not here: injection into endpoints (`endpoints`), roles
(`endpoint_roles`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, ForwardRef, cast

from fastapi import Depends, params
from fastapi.dependencies.models import Dependant
from fastapi.dependencies.utils import get_parameterless_sub_dependant, get_typed_signature
from starlette.applications import Starlette
from typing_extensions import is_protocol

from toolbox.container import Offered
from toolbox.di.beans import BeanDefinition
from toolbox.di.conditions import conditions_of
from toolbox.di.decorators import Scope
from toolbox.di.graph import BeanGraph
from toolbox.di.injection_points import MISSING, InjectionPoint, point_of
from toolbox.di.registry import Fallback
from toolbox.errors import Problem
from toolbox.hosts.bean_checks import identity_problems, tool_bean_problems
from toolbox.hosts.ineffective_marks import Use, function_problems
from toolbox.introspection import EMPTY, class_of, metadata_of, names_around, resolve
from toolbox.overview import Entry, entry_behind
from toolbox.parameters import InjectMark
from toolbox.request_hooks import ON_SUCCESS, hooks_of
from toolbox.services.implied_beans import named_beans, registrable
from toolbox.tools.marks import toolbox_of
from toolbox.tools.sources import bean_types, classes_of_methods, read_tools
from toolbox.tools.tool_calls import Tool

from .application_routes import endpoints_of, name_function
from .endpoint_roles import endpoint_access
from .endpoints import (
    ENDPOINT_MARK,
    BeanDependency,
    enter_route_dependency,
    is_marked_bean,
    is_service,
    place_of,
    problem_without_inject,
    read_endpoint_tools,
    settle_after_endpoint,
    unresolved_inject,
)
from .identities import OWN_IDENTITY_MARK


def entries_of(app: Starlette, graph: BeanGraph) -> Iterator[Entry]:
    """Yield the endpoints that can call AI services, also through other beans, with the tools that they add."""
    for where, context in endpoints_of(app):
        name = where.rpartition(" (")[0]
        points = [point_of(each.wanted, name) for each in getattr(context.endpoint, ENDPOINT_MARK, ())]
        if (dependant := getattr(context, "dependant", None)) is not None:
            points += _find_points(dependant, name)
        tools, _ = read_tools(toolbox_of(context.endpoint) or (), name, graph.class_behind)
        if entry := entry_behind(name, points, graph, tools, endpoint_access(context.endpoint)):
            yield entry


def find_implied_beans(app: Starlette) -> Iterator[type | Fallback]:
    """Yield the classes in the endpoints' `@toolbox`, and those that decorators name at them: beans by themselves."""
    for _, context in endpoints_of(app):
        tools = toolbox_of(context.endpoint) or ()
        yield from registrable(bean_types(tools))
        yield from map(Fallback, registrable(classes_of_methods(tools)))
        yield from named_beans(tools)


def offers_of_endpoints(app: Starlette) -> Iterator[Offered]:
    """Yield the tools that `@toolbox` adds to endpoints, by the endpoint's name."""
    for where, context in endpoints_of(app):
        tools, _ = read_tools(toolbox_of(context.endpoint) or (), f"{where}, @toolbox")
        if tools:
            yield f"{where}, @toolbox", tuple(each.specification for each in tools)


def tools_added_by_endpoints(app: Starlette, graph: BeanGraph) -> dict[str, tuple[Tool, ...]]:
    """Return the tools that `@toolbox` adds to endpoints, by the name of the endpoint's function."""
    marked = [context.endpoint for _, context in endpoints_of(app) if toolbox_of(context.endpoint) is not None]
    return {place_of(each): read_endpoint_tools(each, graph) for each in cast("list[Callable[..., Any]]", marked)}


def endpoint_problems(app: Starlette, graph: BeanGraph) -> Iterator[Problem]:
    """Yield the problems of the `Inject[…]` parameters and the tools of all endpoints and their dependencies."""
    for where, context in endpoints_of(app):
        for each in getattr(context.endpoint, ENDPOINT_MARK, ()):
            default = MISSING if each.default is EMPTY else each.default
            place = f"{where}, parameter {each.name!r}"
            yield from graph.problems_of(point_of(each.wanted, place, parameter=each.name, default=default))
        dependant = getattr(context, "dependant", None)
        yield from _problems_of_marks(context.endpoint, where, Use.ENDPOINT)
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


def _problems_of_marks(function: Any, where: str, use: Use) -> Iterator[Problem]:
    """Yield a problem for each mark that has no effect on an endpoint or a dependency."""
    yield from function_problems(where, function, use)
    if conditions_of(function):
        fix = "add the route or the dependency under an `if`"
        yield Problem(where, "@only_if has no effect here: it is not a bean", fix)


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
    """Yield a problem for each bean that FastAPI would read from the request, also in dependencies, and their marks.

    An `InjectRoute` refuses them when it is declared; other routes and dependencies are only seen here.
    """
    parameters = get_typed_signature(dependant.call).parameters if dependant.call is not None else {}
    for field in (*dependant.query_params, *dependant.body_params):
        annotation, is_required = field.field_info.annotation, field.field_info.is_required()
        if (parameter := parameters.get(field.name)) is not None:  # the check of roles replaces dependencies
            annotation, is_required = parameter.annotation, parameter.default is EMPTY
        text = annotation.__forward_arg__ if isinstance(annotation, ForwardRef) else None
        if problem := unresolved_inject(where, field.name, text):
            yield problem
        elif is_required and is_marked_bean(annotation):
            yield problem_without_inject(where, field.name, cast("type[Any]", annotation))
    for each in dependant.dependencies:
        if is_service(each.call):
            yield problem_without_inject(where, each.name or "", cast("type[Any]", each.call))
        elif not isinstance(each.call, BeanDependency):
            place = f"{where}, dependency {name_function(each.call)}"
            yield from _problems_of_marks(each.call, place, Use.DEPENDENCY)
            yield from _problems_of_requested_beans(each, place)


def _find_points(dependant: Dependant, where: str) -> Iterator[InjectionPoint]:
    for each, asking, place in _find_beans(dependant, where):
        default = _find_default(asking, each)
        yield point_of(
            cast("BeanDependency", each.call).wanted,
            f"{place}, parameter {each.name!r}",
            parameter=each.name or "",
            default=MISSING if default is EMPTY else default,
        )


def complete_dependencies(app: Starlette, graph: BeanGraph, resolve_identity: Callable[..., Any] | None = None) -> None:
    """Add to FastAPI's own routes what they cannot know: the defaults of `Inject[…]` and the endpoints' tools.

    `resolve_identity` is added to routes that do not have it, such as those of mounted applications. All get the
    dependency that calls `@on_success` methods, if beans can have them.
    """
    settles = any(map(_can_have_success_methods, graph.definitions))
    for where, context in endpoints_of(app):
        dependant: Dependant | None = getattr(context, "dependant", None)
        if dependant is None:
            continue
        beans = list(_find_beans(dependant, where))
        for each, asking, _ in beans:
            default = _find_default(asking, each)
            if default is not EMPTY:
                each.call = BeanDependency(cast("BeanDependency", each.call).wanted, default)
        path = context.path or ""
        has_tools = toolbox_of(context.endpoint) is not None
        if has_tools and not beans and not hasattr(context.endpoint, ENDPOINT_MARK):
            _put_first(dependant, enter_route_dependency, path)
        if settles:
            _put_first(dependant, settle_after_endpoint, path)
        if resolve_identity is not None and not hasattr(context.endpoint, OWN_IDENTITY_MARK):
            _put_first(dependant, resolve_identity, path)


def _put_first(dependant: Dependant, call: Callable[..., Any], path: str) -> None:
    """Add a dependency, unless the endpoint has it."""
    # After a check of roles, which has solved it, another callable has its place.
    if not any(getattr(each.call, "solves", each.call) is call for each in dependant.dependencies):
        dependant.dependencies.insert(0, get_parameterless_sub_dependant(depends=Depends(call), path=path))


def _can_have_success_methods(definition: BeanDefinition) -> bool:
    """Return True if a request-scoped bean has `@on_success` methods, or if only its instance can tell."""
    cls = class_of(definition.provides)
    if definition.scope is not Scope.REQUEST or not isinstance(cls, type):
        return False
    return bool(hooks_of(cls, ON_SUCCESS)) or inspect.isabstract(cls) or is_protocol(cls)


def _find_beans(dependant: Dependant, where: str) -> Iterator[tuple[Dependant, Dependant, str]]:
    """Yield each `Inject[…]` dependency of an endpoint, with its parent dependency and the place for messages."""
    for each in dependant.dependencies:
        if isinstance(each.call, BeanDependency):
            yield each, dependant, where
        else:
            yield from _find_beans(each, f"{where}, dependency {name_function(each.call)}")


def _find_default(asking: Dependant, bean: Dependant) -> Any:
    """Return the default of the parameter of `asking` that gets `bean`, or `EMPTY`."""
    if asking.call is None or bean.name is None:
        return EMPTY
    parameter = inspect.signature(asking.call).parameters.get(bean.name)
    return EMPTY if parameter is None else parameter.default
