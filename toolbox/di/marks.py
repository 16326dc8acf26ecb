"""What a program writes to say how its beans live and are made: scope and producer marks, `Named`, `Instance`.

A mark is one attribute on the object, which is returned as it was. Not here: what the marks come to mean (`beans`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, Literal, TypeVar

from typing_extensions import TypeForm

from ..context import ActiveScope
from ..errors import Problem

T = TypeVar("T")
C = TypeVar("C", bound=type[Any])
F = TypeVar("F", bound=Callable[..., Any])

SCOPE_MARK = "__toolbox_scope__"
PRODUCER_MARK = "__toolbox_producer__"


class Scope(StrEnum):
    """How long a bean lives."""

    APPLICATION = "application"
    REQUEST = "request"
    CALL = "call"
    DEPENDENT = "dependent"

    @property
    def span(self) -> int:
        """Longer-lived scopes have the larger number; a dependent bean lives as long as what holds it."""
        return _SPANS[self]


_SPANS = {Scope.APPLICATION: 3, Scope.REQUEST: 2, Scope.CALL: 1, Scope.DEPENDENT: 0}


def _mark_class(cls: C, scope: Scope) -> C:
    if not isinstance(cls, type):
        raise TypeError(f"@{scope}_scoped supports only classes; use @produces(scope={scope.value!r}) for functions")
    earlier = vars(cls).get(SCOPE_MARK)
    if earlier not in (None, scope):
        raise TypeError(f"{cls.__qualname__} has two scopes, {earlier} and {scope}; remove one of the decorators")
    setattr(cls, SCOPE_MARK, scope)
    return cls


def application_scoped(cls: C) -> C:
    """One instance per container."""
    return _mark_class(cls, Scope.APPLICATION)


def request_scoped(cls: C) -> C:
    """One instance per request scope."""
    return _mark_class(cls, Scope.REQUEST)


def call_scoped(cls: C) -> C:
    """One instance per tool call; outside a tool call, one per request scope."""
    return _mark_class(cls, Scope.CALL)


def dependent(cls: C) -> C:
    """A new instance per injection point, closed with the bean or scope that asked for it."""
    return _mark_class(cls, Scope.DEPENDENT)


@dataclass(frozen=True, slots=True)
class ProducerMark:
    """What `@produces` says of a function."""

    scope: Scope
    name: str | None = None
    own_task: bool = False


def produces(
    scope: Literal["application", "request", "call", "dependent"] = "dependent",
    name: str | None = None,
    *,
    own_task: bool = False,
) -> Callable[[F], F]:
    """The function makes a bean of its return annotation; of a generator, of what it yields.

    What follows the `yield` closes the bean. `own_task` runs an asynchronous generator, from beginning to end, in a
    task of its own: for one that holds an anyio task group or cancel scope across its `yield`.
    """
    if callable(scope):
        name = getattr(scope, "__name__", scope)
        raise TypeError(f"@produces needs parentheses: write @produces() or @produces(scope=…) above {name}")
    if scope not in tuple(Scope):
        raise ValueError(
            f"unknown scope {scope!r} in @produces; expected one of {', '.join(map(repr, map(str, Scope)))}"
        )
    mark = ProducerMark(Scope(scope), name, own_task)

    def apply(function: F) -> F:
        setattr(function, PRODUCER_MARK, mark)
        return function

    return apply


SETTINGS_CHECK = "__toolbox_settings_check__"

SettingsCheck = Callable[[Any], "Iterable[Problem]"]


def checks_settings(check: SettingsCheck) -> Callable[[F], F]:
    """Mark a producer: `check(settings)` yields what would keep it from making its bean, without making it."""

    def apply(function: F) -> F:
        setattr(function, SETTINGS_CHECK, check)
        return function

    return apply


def settings_check_of(function: object) -> SettingsCheck | None:
    """Return the check that `@checks_settings` left."""
    check: SettingsCheck | None = getattr(function, SETTINGS_CHECK, None) if inspect.isfunction(function) else None
    return check


def scope_mark_of(cls: type[Any]) -> Scope | None:
    """The mark on the class itself: a subclass does not inherit one."""
    mark: Scope | None = vars(cls).get(SCOPE_MARK)
    return mark


def producer_mark_of(function: object) -> ProducerMark | None:
    """The mark that `@produces` left."""
    mark = getattr(function, PRODUCER_MARK, None)
    return mark if isinstance(mark, ProducerMark) else None


@dataclass(frozen=True, slots=True)
class Named:
    """`Annotated[T, Named("x")]`: the bean of type T that has this name."""

    name: str


class Instance(Generic[T]):
    """Looks a bean up in the scope that is active when it is asked, at each call.

    So a longer-lived bean reaches a shorter-lived one. A dependent bean looked up so closes with that scope.
    """

    __slots__ = ("_name", "_scope", "_wanted")

    def __init__(self, scope: ActiveScope, wanted: TypeForm[T], name: str | None = None) -> None:
        self._scope, self._wanted, self._name = scope, wanted, name

    def get(self) -> T:
        """The bean; raises `AsyncBeanError` when a part of it has to be awaited."""
        return self._scope.get(self._wanted, self._name)

    async def aget(self) -> T:
        """The bean, awaiting what has to be."""
        return await self._scope.aget(self._wanted, self._name)
