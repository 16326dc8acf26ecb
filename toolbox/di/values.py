"""Values of injection points: one bean, several beans, a fixed object, or a lookup later.

Not here: which value a point gets (`graph`), the functions that create a value (`resolvers`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from ..introspection import is_hashable
from .injection_points import MISSING


@dataclass(frozen=True, slots=True)
class SingleBean:
    """The bean with this key; `absent` replaces a seed that the request scope does not have, and a producer's None."""

    bean: int
    absent: Any = MISSING


@dataclass(frozen=True, slots=True)
class BeanList:
    """All beans with these keys, as a list or a tuple; None is left out."""

    beans: tuple[int, ...]
    as_tuple: bool = False


@dataclass(frozen=True, slots=True)
class BeanDict:
    """Beans by their names, as a dict; None is left out."""

    beans: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Constant:
    """A fixed object."""

    value: Any


@dataclass(frozen=True, slots=True)
class LazyBean:
    """An `Instance` that looks up the bean later; `found` are the beans that match now."""

    wanted: Any
    name: str | None
    found: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class NotFound:
    """No bean matches, or several do: `candidates`."""

    candidates: tuple[int, ...] = ()


Value: TypeAlias = SingleBean | BeanList | BeanDict | Constant | LazyBean | NotFound

DEFAULT = Constant(MISSING)
"""The parameter is omitted, so its default applies."""


class _ByIdentity:
    """A default that cannot be hashed: equal to itself only."""

    __slots__ = ("default",)

    def __init__(self, default: object) -> None:
        self.default = default

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and other.default is self.default

    def __hash__(self) -> int:
        return id(self.default)


def as_key(value: Value) -> Value:
    """Return what stands for a value in the keys of a dict: the value, unless its default cannot be hashed."""
    if isinstance(value, SingleBean) and not is_hashable(value.absent):
        return SingleBean(value.bean, _ByIdentity(value.absent))
    return value


def beans_in(value: Value) -> tuple[int, ...]:
    """Return the beans that must exist for this value; none for an `Instance`."""
    if isinstance(value, SingleBean):
        return (value.bean,)
    if isinstance(value, BeanList):
        return value.beans
    if isinstance(value, BeanDict):
        return tuple(bean for _, bean in value.beans)
    return ()
