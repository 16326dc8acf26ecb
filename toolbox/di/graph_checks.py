"""Checks beans: declarations, injection points, names, cycles, long chains, and beans that live too short.

Each check is a generator of `Problem`s. The start checks the whole graph, a lookup the beans that it has added. Not
here: the problems of one injection point (`graph`), of settings (`registry`), of tools and services (their readers
check them).
"""

from __future__ import annotations

import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from ..errors import Problem
from ..introspection import type_name
from .beans import FactoryKind
from .decorators import Scope
from .descriptions import provider_names
from .graph import Bean, BeanGraph
from .injection_points import InjectionPoint, name_problem
from .problem_texts import chain_text

Check = Callable[[BeanGraph, Sequence[Bean]], Iterator[Problem]]


def find_problems(graph: BeanGraph) -> Iterator[Problem]:
    """Yield the problems of the whole graph."""
    yield from graph.binding_problems
    yield from graph.decorations.problems
    yield from find_bean_problems(graph, graph.beans)
    yield from find_duplicate_names(graph)


def find_bean_problems(graph: BeanGraph, beans: Sequence[Bean]) -> Iterator[Problem]:
    """Yield why beans cannot be created. `beans` also has those that they hold, unless they were checked before."""
    for check in CHECKS:
        yield from check(graph, beans)


def find_invalid_declarations(graph: BeanGraph, beans: Sequence[Bean]) -> Iterator[Problem]:
    """Yield the problems of definitions, and of decorators that cannot be put around a bean."""
    for bean in beans:
        definition = bean.definition
        yield from definition.problems
        source = definition.source if inspect.isroutine(definition.source) else definition.provides
        if (problem := name_problem(definition.name, type_name(source))) is not None:
            yield problem
        yield from graph.decorations.problems_of.get(bean.key, ())


def find_unmet_points(graph: BeanGraph, beans: Sequence[Bean]) -> Iterator[Problem]:
    """Yield missing and ambiguous beans, and annotations that are missing or cannot be resolved."""
    for bean in beans:
        for point, value in bean.needs + bean.behind:
            yield from graph.problems_with(point, value)


def find_duplicate_names(graph: BeanGraph) -> Iterator[Problem]:
    """Yield beans whose provider has the same name as another provider."""
    first: dict[str, Bean] = {}
    beans = graph.beans
    for bean, name in zip(beans, provider_names(graph, beans), strict=True):
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


def find_cycles(graph: BeanGraph, beans: Sequence[Bean]) -> Iterator[Problem]:
    """Yield dependency cycles: a shortest one through each edge that is part of a cycle."""
    reported: set[tuple[int, ...]] = set()
    for component in _components(graph, beans):
        inside = set(component)
        edges = {key: [held for held in dict.fromkeys(graph[key].held) if held in inside] for key in component}
        is_ring = all(len(each) == 1 for each in edges.values())  # then it is the only cycle
        for start in component[:1] if is_ring else component:
            for following in edges[start]:
                cycle = [start, *_shortest_path(edges, following, start)][:-1]
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


def _shortest_path(edges: Mapping[int, Sequence[int]], start: int, goal: int) -> list[int]:
    before: dict[int, int | None] = {start: None}
    queue = deque([start])
    while queue:
        here = queue.popleft()
        if here == goal:
            break
        for following in edges[here]:
            if following not in before:
                before[following] = here
                queue.append(following)
    path: list[int] = []
    step: int | None = goal
    while step is not None:
        path.append(step)
        step = before[step]
    return path[::-1]


def _components(graph: BeanGraph, beans: Sequence[Bean]) -> Iterator[list[int]]:
    """Yield the strongly connected components with a cycle (Tarjan's algorithm, without recursion)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    for root in (bean.key for bean in beans):
        if root in index:
            continue
        work = [(root, iter(graph[root].held))]
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
                    if len(component) > 1 or here in graph[here].held:
                        yield sorted(component)
            elif following not in index:
                index[following] = low[following] = len(index)
                stack.append(following)
                on_stack.add(following)
                work.append((following, iter(graph[following].held)))
            elif following in on_stack:
                low[here] = min(low[here], index[following])


# --- long chains

CALLS_PER_BEAN = 4
"""How many calls are nested at most for each bean of a chain, with a margin for the program's own calls."""


def find_long_chains(graph: BeanGraph, beans: Sequence[Bean]) -> Iterator[Problem]:
    """Yield the longest chain of beans if Python cannot create it: a bean is created inside the call for its holder."""
    limit = sys.getrecursionlimit() // CALLS_PER_BEAN
    lengths, longest_held = _chain_lengths(graph, beans)
    top = max(lengths, key=lambda key: lengths[key], default=None)
    if top is None or lengths[top] <= limit:
        return
    chain: list[int] = []
    step: int | None = top
    while step is not None:
        chain.append(step)
        step = longest_held[step]
    labels = [graph[key].definition.label for key in chain]
    what = f"a chain of {len(chain)} beans is too long for Python, which can nest {limit}: {chain_text(labels)}"
    fix = "let one of them take an Instance[…] of the next, or raise sys.setrecursionlimit before the start"
    yield Problem(labels[0], what, fix)


def _chain_lengths(graph: BeanGraph, beans: Sequence[Bean]) -> tuple[dict[int, int], dict[int, int | None]]:
    """Return the length of the longest chain below each bean, and the next bean of that chain; cycles do not count."""
    lengths: dict[int, int] = {}
    longest_held: dict[int, int | None] = {}
    path: list[tuple[int, Iterator[int]]] = [(-1, iter([bean.key for bean in beans]))]
    begun: set[int] = set()
    while path:
        here, rest = path[-1]
        key = next(rest, None)
        if key is None:
            path.pop()
            if here >= 0:
                held = [each for each in graph[here].held if each in lengths]
                longest_held[here] = max(held, key=lambda each: lengths[each], default=None)
                lengths[here] = 1 + max((lengths[each] for each in held), default=0)
        elif key not in begun:
            begun.add(key)
            path.append((key, iter(graph[key].held)))
    return lengths, longest_held


# --- captive beans


def find_captive_beans(graph: BeanGraph, beans: Sequence[Bean]) -> Iterator[Problem]:
    """Yield longer-lived beans that hold shorter-lived ones, directly or through dependent beans."""
    for bean in beans:
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
    shorter = held.scope if held.scope.rule.can_be_produced else Scope.CALL  # only few classes can be stored
    between = [graph[key].definition.label for _, key in path[:-1]]
    through = "".join(f", through {each}" for each in between[:10])
    through += f" and {len(between) - 10} more" if len(between) > 10 else ""
    return Problem(
        path[0][0].where,
        f"{here.label} is {here.scope}_scoped but holds {held.label}, "
        f"which is {held.scope}_scoped{through}" + (" (a seed)" if held.factory_kind is FactoryKind.SEED else ""),
        f"use Instance[{held.label}] instead, or make {here.label} {shorter}_scoped",
    )


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


CHECKS: tuple[Check, ...] = (
    find_invalid_declarations,
    find_unmet_points,
    find_cycles,
    find_long_chains,
    find_captive_beans,
)
