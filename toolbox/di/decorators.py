"""Decorators and annotations for beans: scopes, `@produces`, `Named`, `Instance`.

A decorator sets one attribute and returns the same object. Not here: reading the marks (`beans`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Generic, Literal, Protocol, TypeVar

from typing_extensions import TypeForm

from ..context import ActiveScope
from ..errors import Problem
from ..introspection import local_names

T = TypeVar("T")
C = TypeVar("C", bound=type[Any])
F = TypeVar("F", bound=Callable[..., Any])

SCOPE_MARK = "__toolbox_scope__"
PRODUCER_MARK = "__toolbox_producer__"


class Scope(StrEnum):
    """Lifetime of a bean. One without a decorator is dependent: each lookup, and each holder, gets a new instance."""

    APPLICATION = "application"
    REQUEST = "request"
    CONVERSATION = "conversation"
    CALL = "call"
    DEPENDENT = "dependent"

    @property
    def rule(self) -> ScopeRule:
        """Return its row of `SCOPES`."""
        return SCOPES[self]

    @property
    def span(self) -> int:
        """Return a number that is larger for longer lifetimes. Dependent beans live as long as their holder."""
        return _SPANS[self]

    @property
    def is_temporary(self) -> bool:
        """Return True if scopes of this kind are opened and closed again while the container runs."""
        return self.rule.holder is not None


ITSELF = "scope"
"""The holder of beans that the active scope stores itself, unless it is the application scope."""


@dataclass(frozen=True, slots=True)
class ScopeRule:
    """What differs between the scopes.

    - `decorator`: marks a class with it.
    - `holder`: where lookups, also in generated code, find the store of its beans: the name of an attribute of the
      active scope, which is None if no such scope is around it, or `ITSELF`. None for beans that open scopes do not
      store: the container stores those of the application, and dependent beans belong to what holds them.
    - `inactive`: why a lookup without a store fails, for `ScopeNotActiveError`; `opened_by`: what opens such a scope.
    - `is_in_request`: its beans belong to a request.
    - `can_be_produced`: `@produces` functions can make its beans.
    """

    decorator: str
    holder: str | None = None
    inactive: str = ""
    opened_by: str = "container.request_scope()"
    is_in_request: bool = False
    can_be_produced: bool = True


SCOPES: Mapping[Scope, ScopeRule] = MappingProxyType(
    {
        Scope.APPLICATION: ScopeRule("@application_scoped"),
        Scope.REQUEST: ScopeRule(
            "@request_scoped", holder="request", inactive="no request scope is active here", is_in_request=True
        ),
        Scope.CONVERSATION: ScopeRule(
            "@conversation_scoped",
            holder="conversation",
            inactive="no conversation is active here",
            opened_by="container.conversation_scope(Service, memory_id)",
            is_in_request=True,
            can_be_produced=False,
        ),
        # Outside of tool calls, there is one in each request scope and conversation.
        Scope.CALL: ScopeRule("@call_scoped", holder=ITSELF, inactive="no request scope is active here"),
        Scope.DEPENDENT: ScopeRule("@dependent"),
    }
)
"""All scopes, those with the longest lifetime first. A bean may hold beans of the same scope and of earlier ones."""

_SPANS = {scope: -place for place, scope in enumerate(SCOPES)}


def mark_class(cls: C, scope: Scope) -> C:
    """Leave the mark of a scope at a class. Raises `TypeError` for anything but a class, and for a second scope."""
    if not isinstance(cls, type):
        if not scope.rule.can_be_produced:
            raise TypeError(f"{scope.rule.decorator} supports only classes, got {cls!r}")
        raise TypeError(
            f"{scope.rule.decorator} supports only classes; use @produces(scope={scope.value!r}) for functions"
        )
    earlier = vars(cls).get(SCOPE_MARK)
    if earlier not in (None, scope):
        raise TypeError(f"{cls.__qualname__} has two scopes, {earlier} and {scope}; remove one of the decorators")
    setattr(cls, SCOPE_MARK, scope)
    return cls


def application_scoped(cls: C) -> C:
    """Create one instance of the class per container.

        @application_scoped
        class Catalogue: ...

    Raises `TypeError` for anything but a class, and for a second scope.
    """
    return mark_class(cls, Scope.APPLICATION)


def request_scoped(cls: C) -> C:
    """Create one instance of the class per request scope.

        @request_scoped
        class Basket: ...

    Raises `TypeError` for anything but a class, and for a second scope.
    """
    return mark_class(cls, Scope.REQUEST)


def call_scoped(cls: C) -> C:
    """Create one instance of the class per tool call; outside tool calls, one per request scope.

        @call_scoped
        class Attempt: ...

    Raises `TypeError` for anything but a class, and for a second scope.
    """
    return mark_class(cls, Scope.CALL)


def dependent(cls: C) -> C:
    """Create a new instance of the class per injection point; close it with the bean or scope that requested it.

        @dependent
        class Timer: ...

    Raises `TypeError` for anything but a class, and for a second scope.
    """
    return mark_class(cls, Scope.DEPENDENT)


@dataclass(frozen=True, slots=True)
class ProducerMark:
    """The arguments of `@produces`, and the `local_names` in the annotations, which are available only then."""

    scope: Scope
    name: str | None = None
    own_task: bool = False
    local_names: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False, repr=False)


def produces(
    scope: Literal["application", "request", "call", "dependent"] = "dependent",
    name: str | None = None,
    *,
    own_task: bool = False,
) -> Callable[[F], F]:
    """Use the function to create a bean of its return type, or of the type that a generator yields.

        @produces(scope="application")
        def pool() -> Iterator[Pool]:
            with Pool() as pool:
                yield pool

    The code after `yield` closes the bean. `own_task=True` runs an async generator in a separate task from start to
    end: required if it holds an anyio task group or cancel scope across its `yield`. `name` is the name of the bean.

    Raises `ValueError` for an unknown scope, and `TypeError` for a bound method, for a built-in function and without
    parentheses.
    """
    if callable(scope):
        name = getattr(scope, "__name__", scope)
        if scope in (application_scoped, request_scoped, call_scoped, dependent):
            raise TypeError(f'@produces: scope must be a string; write scope="{str(name).removesuffix("_scoped")}"')
        raise TypeError(f"@produces needs parentheses: write @produces() or @produces(scope=…) above {name}")
    known = [each for each, rule in SCOPES.items() if rule.can_be_produced]
    if scope not in known:
        raise ValueError(f"@produces: unknown scope {scope!r}; use one of: {', '.join(known)}")
    mark = ProducerMark(Scope(scope), name, own_task)

    def apply(function: F) -> F:
        if inspect.ismethod(function):
            fix = "decorate the function or the class method where it is defined"
            raise TypeError(f"@produces does not support bound methods, got {function.__qualname__}: {fix}")
        # Not at a class method itself: its bound method would not show the mark.
        inner = getattr(function, "__func__", function)
        try:
            setattr(inner, PRODUCER_MARK, replace(mark, local_names=local_names([inner], sys._getframe(1))))
        except (AttributeError, TypeError):  # a built-in one takes no mark
            fix = "write a function that returns the bean"
            raise TypeError(f"@produces: expected a Python function, got {function!r}; {fix}") from None
        return function

    return apply


SETTINGS_CHECK = "__toolbox_settings_check__"

SettingsCheck = Callable[[Any], "Iterable[Problem]"]


def checks_settings(check: SettingsCheck) -> Callable[[F], F]:
    """Mark a producer: `check(settings)` yields the problems that prevent creation, without creating the bean."""

    def apply(function: F) -> F:
        setattr(function, SETTINGS_CHECK, check)
        return function

    return apply


def settings_check_of(function: object) -> SettingsCheck | None:
    """Return the check set by `@checks_settings`, or None."""
    check: SettingsCheck | None = getattr(function, SETTINGS_CHECK, None) if inspect.isfunction(function) else None
    return check


def scope_mark_of(cls: type[Any]) -> Scope | None:
    """Return the scope of the class itself, or None. Subclasses do not inherit it."""
    mark: Scope | None = vars(cls).get(SCOPE_MARK)
    return mark


def producer_mark_of(function: object) -> ProducerMark | None:
    """Return the mark set by `@produces`, or None."""
    mark = getattr(function, PRODUCER_MARK, None)
    return mark if isinstance(mark, ProducerMark) else None


@dataclass(frozen=True, slots=True)
class Named:
    """Selects the bean of type T with this name: `Annotated[T, Named("x")]`."""

    name: str


class LendingScope(ActiveScope, Protocol):
    """The active scope, with lookups whose dependent beans can be given back."""

    def lend(self, wanted: TypeForm[T], name: str | None) -> T:
        """Return the bean as `get` does."""
        ...

    async def lend_awaiting(self, wanted: TypeForm[T], name: str | None) -> T:
        """Return the bean as `aget` does."""
        ...

    def give_back(self, bean: object) -> None:
        """Close what was created for this bean alone. Raises `IllegalConfigurationError` if that must be awaited."""
        ...

    async def give_back_awaiting(self, bean: object) -> None:
        """Close what was created for this bean alone."""
        ...


class Instance(Generic[T]):
    """Looks up a bean in the active scope at each call.

        def __init__(self, basket: Instance[Basket]) -> None: ...

    A longer-lived bean can use it to get a shorter-lived one. Dependent beans from it close with the active scope, or
    when they are given back with `close` or `aclose`.
    """

    __slots__ = ("_name", "_scope", "_wanted")

    def __init__(self, scope: LendingScope, wanted: TypeForm[T], name: str | None = None) -> None:
        self._scope, self._wanted, self._name = scope, wanted, name

    def get(self) -> T:
        """Return the bean. Raises the errors of `Container.get`."""
        return self._scope.lend(self._wanted, self._name)

    async def aget(self) -> T:
        """Return the bean; await async producers if necessary. Raises the errors of `Container.aget`."""
        return await self._scope.lend_awaiting(self._wanted, self._name)

    def close(self, bean: T) -> None:
        """Close a dependent bean that `get` or `aget` returned, with the dependent beans that were created for it.

        Beans of other scopes stay open, and objects that are no such beans are ignored. Raises an `ExceptionGroup` if
        closing fails, and `IllegalConfigurationError` on an event loop for a bean that async code closes.
        """
        self._scope.give_back(bean)

    async def aclose(self, bean: T) -> None:
        """Close a dependent bean as `close` does; await async code."""
        await self._scope.give_back_awaiting(bean)
