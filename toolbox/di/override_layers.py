"""Scopes of beans while an override is active: application beans that hold a replaced bean get separate instances.

Not here: what a program replaces (`overriding`), asking an overridden provider (`wiring`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..execution.threads import running_loop
from .decorators import Scope
from .graph import BeanGraph
from .scopes import ApplicationScope, Home


@dataclass(frozen=True, slots=True)
class _Layer:
    """An active override: `scope` stores the application beans (`holders`) that hold the overridden bean."""

    key: int
    holders: frozenset[int]
    scope: ApplicationScope


class OverrideLayers:
    """The active overrides of a started container, newest last. False if there is none."""

    def __init__(self, graph: BeanGraph, home: Home) -> None:
        self._graph, self._home = graph, home
        self._layers: list[_Layer] = []

    def __bool__(self) -> bool:
        return bool(self._layers)

    def place_of(self, key: int) -> ApplicationScope:
        """Return the scope that currently stores an application bean."""
        for layer in reversed(self._layers):
            if key in layer.holders:
                return layer.scope
        return self._home.application

    def begin(self, key: int, outside: Iterable[int]) -> None:
        """Start an override; `outside` are the beans of included containers that hold the bean."""
        self._layers.append(_Layer(key, self._application_holders(key, outside), ApplicationScope(self._home)))

    def end(self, key: int) -> ApplicationScope:
        """End the last override of a bean; return its scope, which the caller must close."""
        layer = next(layer for layer in reversed(self._layers) if layer.key == key)
        self._layers.remove(layer)
        return layer.scope

    def close(self, scope: ApplicationScope) -> None:
        """Close the beans of an ended override; on an event loop, async closers wait until the stop."""
        scope.close_here(None)
        if not scope.closers:
            return
        if running_loop() is None:
            scope.close_waiting(None)
        else:
            self._home.application.closers.extend(scope.closers)

    def merge(self) -> None:
        """Move the closers of active overrides to the application scope."""
        for layer in self._layers:
            layer.scope.closing = True
            self._home.application.closers.extend(layer.scope.closers)
            layer.scope.closers.clear()

    def _application_holders(self, key: int, outside: Iterable[int]) -> frozenset[int]:
        """Return the application beans that hold a bean, directly or indirectly."""
        holders: dict[int, list[int]] = {}
        for bean in self._graph.beans:
            for held in bean.held:
                holders.setdefault(held, []).append(bean.key)
        found = set(outside)
        todo = [key, *found]
        while todo:
            for holder in holders.get(todo.pop(), ()):
                if holder not in found:
                    found.add(holder)
                    todo.append(holder)
        return frozenset(each for each in found if self._graph.definitions[each].scope is Scope.APPLICATION)
