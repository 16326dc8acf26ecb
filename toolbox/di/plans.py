"""Which beans have to be awaited, and in which order, before a value can be made without awaiting.

Pure functions over the graph and over what is overridden in it. Not here: awaiting them (`wiring`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .graph import BeanGraph, Value, beans_in
from .providers import has_place
from .scopes import OpenScope


@dataclass(frozen=True, slots=True)
class Plan:
    """What has to happen before a value can be made without awaiting: `awaited` in order; `others` are made then.

    `is_direct` when the value itself is made without awaiting then, `is_plain` when nothing in it is ever awaited.
    """

    awaited: tuple[int, ...]
    others: frozenset[int]
    is_direct: bool
    is_plain: bool


class Planner:
    """The plans of a graph in which the beans in `overridden` are not made.

    `awaited` are the beans that are made by awaiting; `stepwise` those that are given one made for them alone.
    """

    def __init__(self, graph: BeanGraph, overridden: frozenset[int]) -> None:
        self._graph, self.overridden = graph, overridden
        self._plans: dict[Value, Plan] = {}
        self.awaited = self._find_awaited()
        self.stepwise = frozenset(
            bean.key for bean in graph.beans if any(self.is_made_for_one(held) for _, held in bean.holds)
        )

    def _find_awaited(self) -> frozenset[int]:
        """Those whose own factory is awaited, and those that hold a dependent bean which is awaited."""
        definitions = self._graph.definitions
        holders: dict[int, list[int]] = {}
        for bean in self._graph.beans:
            for _, held in bean.holds:
                if not has_place(definitions[held]):
                    holders.setdefault(held, []).append(bean.key)
        found = {bean.key for bean in self._graph.beans if bean.definition.is_awaited} - self.overridden
        todo = list(found)
        while todo:
            more = {*holders.get(todo.pop(), ())} - found - self.overridden
            found |= more
            todo += more
        return frozenset(found)

    def is_made_for_one(self, key: int) -> bool:
        """Whether it is a dependent bean that is made by awaiting."""
        return key in self.awaited and not has_place(self._graph.definitions[key])

    def plan(self, value: Value) -> Plan:
        """The plan for a value."""
        try:
            plan = self._plans.get(value)
            if plan is None:
                plan = self._plans[value] = self._new_plan(value, lambda _: False)
        except TypeError:  # a default that cannot be hashed
            return self._new_plan(value, lambda _: False)
        return plan

    def plan_in(self, request: OpenScope, value: Value) -> Plan:
        """The plan for a value in a request scope that was given seeds: of what these leave to be made."""
        seeds = request.seeds or {}
        return self._new_plan(value, lambda key: key in request.store or key in seeds)

    def _new_plan(self, value: Value, is_there: Callable[[int], bool]) -> Plan:
        order: dict[int, None] = {}
        seen: set[int] = set()
        # Not by recursion: a chain of beans may be of any length.
        path: list[tuple[int, Iterator[int]]] = [(-1, iter(beans_in(value)))]
        while path:
            here, held = path[-1]
            key = next(held, None)
            if key is None:
                path.pop()
                if here >= 0 and has_place(self._graph.definitions[here]):
                    order[here] = None
            elif key not in seen and key not in self.overridden and not is_there(key):
                seen.add(key)
                path.append((key, iter([each for _, each in self._graph[key].holds])))
        awaited = tuple(key for key in order if key in self.awaited)
        return Plan(
            awaited,
            frozenset(order).difference(awaited),
            is_direct=not any(self.is_made_for_one(key) for key in beans_in(value)),
            is_plain=self.awaited.isdisjoint(seen),
        )

    def path(self, value: Value, goal: int) -> list[int]:
        """The shortest way from a value to a bean that has to be awaited, and on to why it has to be."""
        path = self._shortest(value, goal)
        definitions = self._graph.definitions
        while not definitions[path[-1]].is_awaited:  # it is made by awaiting for a dependent bean in it
            path.append(next(key for _, key in self._graph[path[-1]].holds if self.is_made_for_one(key)))
        return path

    def _shortest(self, value: Value, goal: int) -> list[int]:
        before: dict[int, int | None] = dict.fromkeys(beans_in(value))
        queue = deque(before)
        while queue and goal not in before:
            here = queue.popleft()
            for _, key in self._graph[here].holds:
                if key not in before:
                    before[key] = here
                    queue.append(key)
        path: list[int] = []
        step: int | None = goal
        while step is not None:
            path.append(step)
            step = before.get(step)
        return path[::-1]


DEPTH = 32
"""How many beans deep a bean may be, counting those it needs, for its constructor calls to be nested."""


def deep_beans(graph: BeanGraph) -> frozenset[int]:
    """Return the beans at the end of a chain longer than `DEPTH`: they are made step by step, not by nested calls."""
    depth: dict[int, int] = {}
    path: list[tuple[int, Iterator[int]]] = [(-1, iter(range(len(graph.beans))))]
    while path:
        here, held = path[-1]
        key = next(held, None)
        if key is None:
            path.pop()
            if here >= 0:
                depth[here] = 1 + max((depth[each] for _, each in graph[here].holds), default=0)
        elif key not in depth:
            path.append((key, iter([each for _, each in graph[key].holds])))
    return frozenset(key for key, count in depth.items() if count > DEPTH)
