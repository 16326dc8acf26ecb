"""Replaces beans while a container runs: `container.override(…)`, and the beans that hold a replaced one.

Application beans that hold a replaced bean get separate instances during the override. Not here: asking an
overridden provider (`wiring`), overriding providers of included containers (`foreign`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import AmbiguousBeanError, FrameworkError, IllegalConfigurationError, Problem
from ..execution.threads import running_loop
from ..introspection import type_name
from .decorators import Scope
from .graph import BeanGraph
from .injection_points import point_of
from .scopes import ApplicationScope, Home
from .values import NotFound, SingleBean


class Overridable(Protocol):
    """The beans of a started container."""

    graph: BeanGraph

    def follow_graph(self) -> None:
        """Add what beans that the graph gained need."""
        ...

    def override(self, key: int, fake: Any) -> Callable[[], None]:
        """Replace a bean by `fake`. Return a function that ends the override."""
        ...


class Override:
    """A replacement of the bean of a type and name."""

    def __init__(self, wanted: Any, fake: Any, name: str | None) -> None:
        self._wanted, self._fake, self._name = wanted, fake, name
        self._applied: tuple[Overridable, Callable[[], None]] | None = None

    def name_of(self, wanted: Any, default: str) -> str | None:
        """Return the name of the replaced bean of this type, `default` without one; None if it has another type."""
        point = point_of(self._wanted, "")
        return self._name or point.name or default if point.wants == wanted else None

    def key_in(self, graph: BeanGraph) -> int | None:
        """Return the key of the overridden bean; None if no single bean matches."""
        try:
            return self._key_in(graph)
        except FrameworkError:
            return None

    def _key_in(self, graph: BeanGraph) -> int:
        value = graph.find(self._wanted, self._name)
        if isinstance(value, NotFound):
            raise graph.missing(self._wanted, self._name)
        if isinstance(value, SingleBean):
            return value.bean
        what = "the type is not a single bean"
        raise IllegalConfigurationError([Problem(self._where, what, "override its beans one by one")])

    @property
    def _where(self) -> str:
        return f"override({type_name(self._wanted)}, …)"

    def problems(self, graph: BeanGraph) -> Iterator[Problem]:
        """Yield the problems of the override before start."""
        try:
            self._key_in(graph)
        except AmbiguousBeanError as error:
            yield Problem(
                self._where, f"multiple beans provide it: {', '.join(error.candidates)}", "override one of them"
            )
        except IllegalConfigurationError as error:
            yield from error.problems
        except FrameworkError:
            absent = "; ".join(map(str, graph.left_out_for(self._wanted)))
            what = f"no bean provides it: {absent}" if absent else "no bean provides it"
            yield Problem(self._where, what, "register the bean that the fake replaces")

    def apply(self, wiring: Overridable) -> None:
        """Replace the bean by the fake. Raises if no bean, or more than one, matches."""
        key = self._key_in(wiring.graph)
        wiring.follow_graph()
        self._applied = wiring, wiring.override(key, self._fake)

    def take_back(self, wiring: Overridable) -> None:
        """End the override."""
        if self._applied is not None and self._applied[0] is wiring:
            _, end = self._applied
            self._applied = None
            end()


# --- scopes of beans during an override


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
