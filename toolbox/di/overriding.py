"""Overriding beans: `container.override(…)`, and the scopes that application beans get while it lasts.

Not here: putting the fake into the providers (`providers`, `foreign`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import AmbiguousBeanError, FrameworkError, IllegalConfigurationError, Problem
from ..type_keys import type_name
from .graph import BeanGraph, SingleBean
from .marks import Scope
from .scopes import ApplicationScope, Home

if TYPE_CHECKING:
    from .wiring import Wiring


class Override:
    """A fake for the bean of a type and name."""

    def __init__(self, wanted: Any, fake: Any, name: str | None) -> None:
        self._wanted, self._fake, self._name = wanted, fake, name
        self._applied: tuple[Wiring, Callable[[], None]] | None = None

    def key_in(self, graph: BeanGraph) -> int | None:
        """The bean that is overridden; None when there is not one."""
        try:
            return self._key_in(graph)
        except FrameworkError:
            return None

    def _key_in(self, graph: BeanGraph) -> int:
        value = graph.find(self._wanted, self._name)
        if isinstance(value, SingleBean):
            return value.bean
        what = "the type is not a single bean"
        raise IllegalConfigurationError([Problem(self._where, what, "override its beans one by one")])

    @property
    def _where(self) -> str:
        return f"override({type_name(self._wanted)}, …)"

    def problems(self, graph: BeanGraph) -> Iterator[Problem]:
        """What is wrong with it before the container starts."""
        try:
            self._key_in(graph)
        except AmbiguousBeanError as error:
            yield Problem(
                self._where, f"multiple beans provide it: {', '.join(error.candidates)}", "override one of them"
            )
        except IllegalConfigurationError as error:
            yield from error.problems
        except FrameworkError:
            yield Problem(self._where, "no bean provides it", "register the bean that the fake replaces")

    def apply(self, wiring: Wiring) -> None:
        """From now on the fake stands for the bean. Raises when there is no such bean, or more than one."""
        key = self._key_in(wiring.graph)
        wiring.follow_graph()
        self._applied = wiring, wiring.override(key, self._fake)

    def take_back(self, wiring: Wiring) -> None:
        """The bean is itself again."""
        if self._applied is not None and self._applied[0] is wiring:
            _, end = self._applied
            self._applied = None
            end()


# --- scopes of beans during an override


@dataclass(frozen=True, slots=True)
class _Layer:
    """An override under way: application beans that hold the overridden one live in `scope` meanwhile."""

    key: int
    holders: frozenset[int]
    scope: ApplicationScope


class OverrideLayers:
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
