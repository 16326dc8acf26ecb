"""One `container.override(…)`: found in a graph, applied to a started container, taken back.

Not here: what becomes of beans that hold the overridden one (`layers`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..errors import AmbiguousBeanError, FrameworkError, IllegalConfigurationError, Problem
from ..type_keys import type_name
from .graph import BeanGraph, One

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
        if isinstance(value, One):
            return value.bean
        what = "it is no single bean"
        raise IllegalConfigurationError([Problem(self._where, what, "override the beans it is made of, one by one")])

    @property
    def _where(self) -> str:
        return f"override({type_name(self._wanted)}, …)"

    def problems(self, graph: BeanGraph) -> Iterator[Problem]:
        """What is wrong with it before the container starts."""
        try:
            self._key_in(graph)
        except AmbiguousBeanError as error:
            yield Problem(self._where, f"it is provided by {', '.join(error.candidates)}", "override one of them")
        except IllegalConfigurationError as error:
            yield from error.problems
        except FrameworkError:
            yield Problem(self._where, "there is no such bean", "register the bean that the fake stands for")

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
