"""Which transactional tools take effect exactly once in a durable run: those whose transaction can have the record.

Reads marks and the bean graph; at start also the store and the engines. Not here: writing the record (`recorder`),
reporting a problem (`start_checks`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from enum import Enum
from typing import Any

from ..di.decorators import Scope
from ..di.graph import BeanGraph
from ..di.injection_points import InjectionPoint, point_of
from ..di.values import SingleBean
from ..tools.tool_calls import Tool
from ..transaction_recorder import DATABASE_MARK, SESSION_MARK, TRANSACTIONAL_MARK, SessionNeed
from .store import RunStore


class ExactlyOnce(Enum):
    """If a tool takes effect exactly once, because the record of its result is part of its transaction."""

    NONE = "the tool is not transactional"
    YES = "the engine of its session is that of the store"
    HIDDEN = "a wrapper hides the transaction"
    ELSEWHERE = "the engine of its session is not that of the store"
    UNKNOWN = "the engine is not known before the program runs"


def transactional_function(tool: Tool) -> Any:
    """Return the function of a tool if `@sql.transactional` made it, else None."""
    function = _function_of(tool)
    return function if getattr(function, TRANSACTIONAL_MARK, None) is function else None


def exactly_once_of(tool: Tool, graph: BeanGraph) -> ExactlyOnce:
    """Return if the transaction of a tool can have the record of its result."""
    function = _function_of(tool)
    if function is None or getattr(function, TRANSACTIONAL_MARK, None) is None:
        return ExactlyOnce.NONE
    if transactional_function(tool) is None:  # a decorator above @transactional has copied its marks
        return ExactlyOnce.HIDDEN
    store = graph.resolve(point_of(RunStore | None, tool.where))
    need: SessionNeed | None = getattr(function, SESSION_MARK, None)
    if need is None or not isinstance(store, SingleBean):
        return ExactlyOnce.UNKNOWN
    found = {_compare(store.bean, engine, need, graph) for engine in _engines_of(tool, need, graph)}
    return found.pop() if len(found) == 1 else ExactlyOnce.UNKNOWN


async def exactly_once_at_start(
    tool: Tool, graph: BeanGraph, store: RunStore, find_bean: Callable[[int], Awaitable[Any]]
) -> ExactlyOnce:
    """Return the same for the opened store, by the engines themselves: they may be instances, or overridden."""
    found = exactly_once_of(tool, graph)
    need: SessionNeed | None = getattr(_function_of(tool), SESSION_MARK, None)
    uses: Callable[[Any], bool] | None = getattr(store, "uses", None)
    if found in (ExactlyOnce.NONE, ExactlyOnce.HIDDEN) or need is None or uses is None:
        return found
    engines = _engines_of(tool, need, graph)
    if any(graph.definitions[key].scope is not Scope.APPLICATION for key in engines):
        return found
    used = {uses(await find_bean(key)) for key in engines}
    if len(used) != 1:
        return found
    return ExactlyOnce.YES if used.pop() else ExactlyOnce.ELSEWHERE


def _engines_of(tool: Tool, need: SessionNeed, graph: BeanGraph) -> set[int]:
    """Return the engines that the transaction of a tool may use."""
    return {key for session in _sessions_of(tool, need, graph) for key in _engines_behind(session, need, graph)}


def _compare(store: int, engine: int, need: SessionNeed, graph: BeanGraph) -> ExactlyOnce:
    kept = graph.definitions[store]
    if not hasattr(kept.source, "record_in") and not hasattr(kept.provides, "record_in"):
        return ExactlyOnce.UNKNOWN
    ours = set(_engines_behind(store, need, graph))
    if engine in ours:
        return ExactlyOnce.YES
    used, instance = graph.definitions[engine].source, kept.source
    uses: Any = None if isinstance(instance, type) else getattr(instance, "uses", None)
    if uses is not None and hasattr(used, "dialect"):  # a store and an engine that the program made itself
        return ExactlyOnce.YES if uses(used) else ExactlyOnce.ELSEWHERE
    if len(ours) != 1:
        return ExactlyOnce.UNKNOWN
    of_store = graph.definitions[ours.pop()]
    database = getattr(of_store.source, DATABASE_MARK, None)
    if database is not None and database == getattr(used, DATABASE_MARK, None):
        return ExactlyOnce.YES  # one database, with an asynchronous and a synchronous engine
    # Engines of one kind are different databases for a transaction, also with the same address.
    is_same_kind = of_store.provides is graph.definitions[engine].provides
    return ExactlyOnce.ELSEWHERE if is_same_kind else ExactlyOnce.UNKNOWN


def _sessions_of(tool: Tool, need: SessionNeed, graph: BeanGraph) -> Iterator[int]:
    """Yield the beans that the transaction of a tool may use as its session, as `@transactional` looks for it."""
    points: list[InjectionPoint] = []
    if need.name is None:
        points = [point_of(each.wanted, tool.where) for each in tool.injected]
        points = [each for each in points if _is_of(each.wants, (need.session,))]
    if points:
        yield from (value.bean for each in points if isinstance(value := graph.resolve(each), SingleBean))
        return
    owner = graph.resolve(point_of(tool.bean, tool.where)) if tool.bean is not None and need.name is None else None
    if isinstance(owner, SingleBean):
        held = [key for key in graph[owner.bean].held if _is_of(graph.definitions[key].provides, (need.session,))]
        if held:
            yield from held
            return
    value = graph.resolve(replace(point_of(need.session, tool.where), name=need.name))
    if isinstance(value, SingleBean):
        yield value.bean


def _engines_behind(
    bean: int, need: SessionNeed, graph: BeanGraph, seen: frozenset[int] = frozenset()
) -> Iterator[int]:
    """Yield the engines that a bean needs, also indirectly."""
    for key in graph[bean].held:
        if _is_of(graph.definitions[key].provides, need.engines):
            yield key
        elif key not in seen:
            yield from _engines_behind(key, need, graph, seen | {key})


def _is_of(provided: Any, kinds: tuple[type[Any], ...]) -> bool:
    return isinstance(provided, type) and issubclass(provided, kinds)


def _function_of(tool: Tool) -> Any:
    function: Any = tool.function
    if function is None and isinstance(tool.bean, type):
        function = getattr(tool.bean, tool.member, None)
    return getattr(function, "__func__", function)
