"""`Override`: replaces a bean of a container by a fake, and ends that; also checked before the start.

Not here: the instances that exist during an override (`override_layers`), asking an overridden provider (`wiring`),
overriding providers of included containers (`foreign`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..errors import AmbiguousBeanError, FrameworkError, IllegalConfigurationError, Problem
from ..introspection import type_name
from .graph import BeanGraph
from .injection_points import point_of
from .values import NotFound, SingleBean

if TYPE_CHECKING:
    from .wiring import Wiring


class Override:
    """A replacement of the bean of a type and name."""

    def __init__(self, wanted: Any, fake: Any, name: str | None) -> None:
        self._wanted, self._fake, self._name = wanted, fake, name
        self._applied: tuple[Wiring, Callable[[], None]] | None = None

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

    def apply(self, wiring: Wiring) -> None:
        """Replace the bean by the fake. Raises if no bean, or more than one, matches."""
        key = self._key_in(wiring.graph)
        wiring.follow_graph()
        self._applied = wiring, wiring.override(key, self._fake)

    def take_back(self, wiring: Wiring) -> None:
        """End the override."""
        if self._applied is not None and self._applied[0] is wiring:
            _, end = self._applied
            self._applied = None
            end()
