"""Checks of the bean graph: each rule is a generator of `Problem`s.

Not here: problems of one injection point (`graph`), of tools and services (their readers check them).
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator

from ..errors import Problem
from ..introspection import type_name
from .beans import FactoryKind, InjectionPoint
from .decorators import Scope
from .graph import Bean, BeanGraph, chain_text, provider_names

Check = Callable[[BeanGraph], Iterator[Problem]]


def problems_in(graph: BeanGraph) -> Iterator[Problem]:
    """Yield the problems of all rules."""
    for check in CHECKS:
        yield from check(graph)


def declarations(graph: BeanGraph) -> Iterator[Problem]:
    """Yield invalid definitions and bindings."""
    for definition in graph.definitions:
        yield from definition.problems
    yield from graph.binding_problems


def injection_points(graph: BeanGraph) -> Iterator[Problem]:
    """Yield missing and ambiguous beans, and annotations that are missing or cannot be resolved."""
    for bean in graph.beans:
        for point, value in bean.needs + bean.behind:
            yield from graph.problems_with(point, value)


def duplicate_names(graph: BeanGraph) -> Iterator[Problem]:
    """Yield beans whose provider has the same name as another provider."""
    first: dict[str, Bean] = {}
    for bean, name in zip(graph.beans, provider_names(graph), strict=True):
        definition = bean.definition
        if bean.key in graph.templates or definition.implicit or definition.problems:
            continue
        other = first.setdefault(name, bean)
        if other is not bean:
            what = f"duplicate provider name {name!r}, also used by {_origin(other)}"
            yield Problem(_origin(bean), what, "give one of them another name")


def _origin(bean: Bean) -> str:
    """Return the name of a bean with its module."""
    source = bean.definition.source
    module = getattr(source, "__module__", None)
    label = type_name(source) if inspect.isroutine(source) else bean.definition.label
    return f"{module}.{label}" if module else label


# --- cycles


def cycles(graph: BeanGraph) -> Iterator[Problem]:
    """Yield dependency cycles: a shortest one through each edge that is part of a cycle."""
    reported: set[tuple[int, ...]] = set()
    for component in _components(graph):
        inside = set(component)
        for start in component:
            for _, following in graph[start].holds:
                if following not in inside:
                    continue
                cycle = [start, *_shortest_path(graph, following, start, inside)][:-1]
                turn = cycle.index(min(cycle))
                cycle = cycle[turn:] + cycle[:turn]
                if tuple(cycle) not in reported:
                    reported.add(tuple(cycle))
                    yield _cycle_problem(graph, cycle)


def _cycle_problem(graph: BeanGraph, cycle: list[int]) -> Problem:
    labels = [graph[key].definition.label for key in [*cycle, cycle[0]]]
    point = next(point for point, held in graph[cycle[0]].holds if held == cycle[1 % len(cycle)])
    what = f"dependency cycle: {chain_text(labels)}"
    return Problem(point.where, what, f"use Instance[{labels[1]}] here to look it up later")


def _shortest_path(graph: BeanGraph, start: int, goal: int, inside: set[int]) -> list[int]:
    before: dict[int, int | None] = {start: None}
    queue = deque([start])
    while queue:
        here = queue.popleft()
        if here == goal:
            break
        for _, following in graph[here].holds:
            if following in inside and following not in before:
                before[following] = here
                queue.append(following)
    path: list[int] = []
    step: int | None = goal
    while step is not None:
        path.append(step)
        step = before[step]
    return path[::-1]


def _components(graph: BeanGraph) -> Iterator[list[int]]:
    """Yield the strongly connected components with a cycle (Tarjan's algorithm, without recursion)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    for root in range(len(graph.beans)):
        if root in index:
            continue
        work = [(root, iter([held for _, held in graph[root].holds]))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            here, rest = work[-1]
            following = next(rest, None)
            if following is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[here])
                if low[here] == index[here]:
                    component = [stack.pop()]
                    while component[-1] != here:
                        component.append(stack.pop())
                    on_stack.difference_update(component)
                    if len(component) > 1 or here in (held for _, held in graph[here].holds):
                        yield sorted(component)
            elif following not in index:
                index[following] = low[following] = len(index)
                stack.append(following)
                on_stack.add(following)
                work.append((following, iter([held for _, held in graph[following].holds])))
            elif following in on_stack:
                low[here] = min(low[here], index[following])


# --- captive beans


def captive_scopes(graph: BeanGraph) -> Iterator[Problem]:
    """Yield longer-lived beans that hold shorter-lived ones, directly or through dependent beans."""
    for bean in graph.beans:
        scope = bean.definition.scope
        if scope is Scope.DEPENDENT:
            continue
        reported: set[int] = set()
        for path in _held_through_dependents(graph, bean):
            held = graph[path[-1][1]].definition
            if held.scope.span < scope.span and path[-1][1] not in reported:
                reported.add(path[-1][1])
                yield _captive_problem(graph, bean, path)


def _captive_problem(graph: BeanGraph, bean: Bean, path: tuple[tuple[InjectionPoint, int], ...]) -> Problem:
    here, held = bean.definition, graph[path[-1][1]].definition
    between = [graph[key].definition.label for _, key in path[:-1]]
    through = "".join(f", through {each}" for each in between[:10])
    through += f" and {len(between) - 10} more" if len(between) > 10 else ""
    return Problem(
        path[0][0].where,
        f"{here.label} is {_scope_name(here.scope)} but holds {held.label}, "
        f"which is {_scope_name(held.scope)}{through}" + (" (a seed)" if held.factory_kind is FactoryKind.SEED else ""),
        f"use Instance[{held.label}] instead, or make {here.label} {_scope_name(held.scope)}",
    )


def _scope_name(scope: Scope) -> str:
    return f"{scope}_scoped"


def _held_through_dependents(graph: BeanGraph, bean: Bean) -> Iterator[tuple[tuple[InjectionPoint, int], ...]]:
    """Yield the paths from a bean to the scoped beans it holds, with only dependent beans in between."""
    queue: deque[tuple[tuple[InjectionPoint, int], ...]] = deque((step,) for step in bean.holds)
    seen: set[int] = set()
    while queue:
        path = queue.popleft()
        key = path[-1][1]
        if graph[key].definition.scope is not Scope.DEPENDENT:
            yield path
        elif key not in seen:
            seen.add(key)
            queue.extend((*path, step) for step in graph[key].holds)


CHECKS: tuple[Check, ...] = (declarations, injection_points, duplicate_names, cycles, captive_scopes)
