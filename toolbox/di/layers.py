"""Where application beans live while a bean they hold is overridden: made anew, for that time.

Not here: finding the overridden bean (`overriding`), putting something in its place (`providers`, `foreign`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from .graph import BeanGraph
from .marks import Scope
from .scopes import ApplicationScope, Home


@dataclass(frozen=True, slots=True)
class _Layer:
    """An override under way: application beans that hold the overridden one live in `scope` meanwhile."""

    key: int
    holders: frozenset[int]
    scope: ApplicationScope


class Layers:
    """The overrides of one started container that are under way, the last one on top; false when there is none."""

    def __init__(self, graph: BeanGraph, home: Home) -> None:
        self._graph, self._home = graph, home
        self._layers: list[_Layer] = []

    def __bool__(self) -> bool:
        return bool(self._layers)

    def place_of(self, key: int) -> ApplicationScope:
        """The scope that an application bean lives in now."""
        for layer in reversed(self._layers):
            if key in layer.holders:
                return layer.scope
        return self._home.application

    def begin(self, key: int, outside: Iterable[int]) -> None:
        """A bean is overridden; `outside` are those of other containers that hold it."""
        self._layers.append(_Layer(key, self._application_holders(key, outside), ApplicationScope(self._home)))

    def end(self, key: int) -> ApplicationScope:
        """Its last override ends: what lived in this scope, which is still to be closed, has gone."""
        layer = next(layer for layer in reversed(self._layers) if layer.key == key)
        self._layers.remove(layer)
        return layer.scope

    def close(self, scope: ApplicationScope) -> None:
        """Closes what an override has left behind; what has to be awaited for that can wait for the stop."""
        scope.close_here(None)
        if not scope.closers:
            return
        if asyncio._get_running_loop() is None:
            scope.close_waiting(None)
        else:
            self._home.application.closers.extend(scope.closers)

    def merge(self) -> None:
        """Lets the application scope close what was made during overrides that are still under way."""
        for layer in self._layers:
            layer.scope.closing = True
            self._home.application.closers.extend(layer.scope.closers)
            layer.scope.closers.clear()

    def _application_holders(self, key: int, outside: Iterable[int]) -> frozenset[int]:
        """The application beans that hold a bean, directly or through others."""
        holders: dict[int, list[int]] = {}
        for bean in self._graph.beans:
            for _, held in bean.holds:
                holders.setdefault(held, []).append(bean.key)
        found = set(outside)
        todo = [key, *found]
        while todo:
            for holder in holders.get(todo.pop(), ()):
                if holder not in found:
                    found.add(holder)
                    todo.append(holder)
        return frozenset(each for each in found if self._graph.definitions[each].scope is Scope.APPLICATION)
