"""Plans what async code must create before a value can be created without await.

Stored beans that need `await` are created first, in order of need. A dependent bean that needs `await` belongs to its
holder, which then needs `await` as well. Not here: how a bean is created (`resolvers`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .graph import BeanGraph
from .injection_points import MISSING
from .values import SingleBean, Value, as_key, beans_in


@dataclass(frozen=True, slots=True)
class Plan:
    """Beans to create with await, in order (`awaited`), before a value can be created without; `others` follow.

    `goal` is the bean whose instance in its scope is the value, if it is one: once that exists, nothing is to be done.
    `is_direct`: the value itself needs no await after that.
    """

    goal: int | None
    awaited: tuple[int, ...]
    others: frozenset[int]
    is_direct: bool


class Planner:
    """The plans of a graph whose `overridden` beans are replaced, so that what these need is not created.

    `asked` are the beans whose provider now returns an awaitable, because an override has put an async one in its
    place. `awaited` are these and all other beans that async code creates.
    """

    def __init__(self, graph: BeanGraph, overridden: frozenset[int], asked: frozenset[int]) -> None:
        self._graph, self.overridden, self.asked = graph, overridden, asked
        self._plans: dict[Value, Plan] = {}
        self.awaited = self._find_awaited()

    def _find_awaited(self) -> frozenset[int]:
        """Return the beans with an async factory, and the beans that hold an async dependent bean."""
        definitions, beans = self._graph.definitions, self._graph.beans
        holders: dict[int, list[int]] = {}
        for bean in beans:
            for held in bean.held:
                if held in self.asked or not definitions[held].is_shared:
                    holders.setdefault(held, []).append(bean.key)
        found = {bean.key for bean in beans if bean.definition.is_awaited} - self.overridden
        found |= self.asked
        todo = list(found)
        while todo:
            more = {*holders.get(todo.pop(), ())} - found - self.overridden
            found |= more
            todo += more
        return frozenset(found)

    def is_made_for_one(self, key: int) -> bool:
        """Return True for beans that each holder and each lookup awaits: no scope stores them."""
        return key in self.asked or (key in self.awaited and not self._graph.definitions[key].is_shared)

    def plan(self, value: Value) -> Plan:
        """Return the plan for a value."""
        key = as_key(value)
        if (plan := self._plans.get(key)) is None:
            plan = self._plans[key] = self._new_plan(value, lambda _: False)
        return plan

    def plan_outside(self, value: Value) -> Plan:
        """Return the plan for a value where no request scope is active, without the identity and what it needs."""
        return self._new_plan(value, lambda key: self._graph.outside(key) is not MISSING)

    def plan_without(self, is_there: Callable[[int], bool], value: Value) -> Plan:
        """Return the plan for a value in a request with seeds, without the beans that are there and what these need."""
        return self._new_plan(value, is_there)

    def _new_plan(self, value: Value, is_there: Callable[[int], bool]) -> Plan:
        order: dict[int, None] = {}
        seen: set[int] = set()
        path: list[tuple[int, Iterator[int]]] = [(-1, iter(beans_in(value)))]
        while path:
            here, held = path[-1]
            key = next(held, None)
            if key is None:
                path.pop()
                if here >= 0 and self._graph.definitions[here].is_shared and here not in self.asked:
                    order[here] = None
            elif key not in seen and key not in self.overridden and not is_there(key):
                seen.add(key)
                path.append((key, iter(self._graph[key].held)))
        awaited = tuple(key for key in order if key in self.awaited)
        goal = value.bean if isinstance(value, SingleBean) and value.bean in order else None
        if goal is not None and not self._graph.definitions[goal].is_created_in_scope:
            goal = None
        return Plan(
            goal,
            awaited,
            frozenset(order).difference(awaited),
            is_direct=not any(self.is_made_for_one(key) for key in beans_in(value)),
        )

    def path(self, value: Value, goal: int) -> list[int]:
        """Return the shortest path from a value to an async bean, and on to the async producer."""
        path = self._shortest(value, goal)
        definitions = self._graph.definitions
        while not (
            definitions[path[-1]].is_awaited or path[-1] in self.asked
        ):  # it is async because of a dependent bean that it holds
            path.append(next(key for key in self._graph[path[-1]].held if self.is_made_for_one(key)))
        return path

    def _shortest(self, value: Value, goal: int) -> list[int]:
        before: dict[int, int | None] = dict.fromkeys(beans_in(value))
        queue = deque(before)
        while queue and goal not in before:
            here = queue.popleft()
            for key in self._graph[here].held:
                if key not in before:
                    before[key] = here
                    queue.append(key)
        path: list[int] = []
        step: int | None = goal
        while step is not None:
            path.append(step)
            step = before.get(step)
        return path[::-1]
