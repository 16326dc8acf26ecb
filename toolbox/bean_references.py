"""References to beans: classes and instances that decorators name, such as guardrails, and the marks that keep them.

A class that is named in a decorator becomes a bean; an instance is used as it is. Not here: registering the classes
(`services.implied_beans`), checking them (`hosts.bean_checks`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, MappingProxyType
from typing import Annotated, Any, Final, TypeVar, get_args, get_origin

from .context import ActiveScope
from .introspection import may_be_marked, may_be_marked_in

D = TypeVar("D")
_NO_MARKS: Mapping[str, tuple[object, ...]] = MappingProxyType({})

REFERENCES_MARK = "__toolbox_references__"
DEFAULT_SCOPE_MARK = "__toolbox_default_scope__"
"""Class attribute, also inherited: the scope of a bean whose class has no scope decorator."""
GLOBAL_INTERCEPTOR_MARK = "__toolbox_global_interceptor__"
"""Class attribute, not inherited: the priority of a global interceptor."""
CLIENT_MARK = "__toolbox_rest_client__"
"""At classes that `@register_rest_client` decorates; here, so that reading it does not import `toolbox.rest`."""
REST_MARKS: Final = {
    "__toolbox_rest_request__": "the HTTP verb",
    "__toolbox_rest_fixed__": "a fixed parameter",
    "__toolbox_rest_exception_mapper__": "@client_exception_mapper",
}
"""The attributes that the decorators of `toolbox.rest` leave at methods and classes; here for the same reason."""
TOOL_MARK = "__toolbox_tool__"
COMPENSATION_MARK = "__toolbox_compensates__"
MCP_MARK = "__toolbox_mcp__"
"""The attribute of methods that `@mcp_resource` and `@mcp_prompt` mark."""
MODEL_MARKS = (TOOL_MARK, COMPENSATION_MARK, MCP_MARK)
"""At methods that run for a model; here, so that `toolbox.di` can tell them from the `stop()` of a bean."""


@dataclass(frozen=True, slots=True)
class BeanReference:
    """A class to look up for each call (also `Annotated` with a name), or an instance."""

    bean: Any = None
    instance: Any = None

    @classmethod
    def to(cls, named: object) -> BeanReference:
        """Return the reference to a class or an instance."""
        is_class = isinstance(named, type) or get_origin(named) is Annotated
        return cls(bean=named) if is_class else cls(instance=named)

    @property
    def type(self) -> Any:
        """The class, for checks and messages."""
        if self.bean is None:
            return type(self.instance)
        return get_args(self.bean)[0] if get_origin(self.bean) is Annotated else self.bean

    async def find(self, scope: ActiveScope) -> Any:
        """Return the instance, or the bean of the active scope. Raises the errors of `ActiveScope.aget`."""
        return self.instance if self.bean is None else await scope.aget(self.bean)


# --- marks


def name_beans(decorator: str, named: tuple[object, ...]) -> Callable[[D], D]:
    """Return a decorator that keeps `named` at its target, before those of the same decorator below it.

    Raises `TypeError` if there are none, or if the decorator was used without parentheses.
    """
    if not named:
        raise TypeError(f"@{decorator}() needs at least one class or instance; write @{decorator}(TheClass)")
    for each in named:
        if inspect.isroutine(each):
            name = getattr(each, "__name__", repr(each))
            raise TypeError(f"@{decorator}: {name} is a function; write @{decorator}(TheClass) with parentheses")

    def leave_mark(target: D) -> D:
        if not hasattr(target, "__dict__"):
            raise TypeError(f"@{decorator}: expected a function, a method or a class, got {target!r}")
        marks: Mapping[str, tuple[object, ...]] = vars(target).get(REFERENCES_MARK, {})
        # A new mapping: `functools.wraps` and subclasses share the old one.
        setattr(target, REFERENCES_MARK, {**marks, decorator: (*named, *marks.get(decorator, ()))})
        return target

    return leave_mark


def named_at(target: object, decorator: str) -> tuple[BeanReference, ...]:
    """Return what a decorator names at this function, static or class method, or class; without inherited ones."""
    named = _read_marks(target).get(decorator)
    return tuple(map(BeanReference.to, named)) if named else ()


def is_marked(*targets: object) -> bool:
    """Return True if a decorator names something at one of these functions and classes."""
    return any(map(_read_marks, targets))


def named_in_class(cls: type[Any], decorator: str) -> tuple[BeanReference, ...]:
    """Return what a decorator names at a class and its bases, those of bases first."""
    found: list[BeanReference] = []
    for base in reversed(cls.__mro__):
        if REFERENCES_MARK in base.__dict__:  # most classes have no marks
            found += named_at(base, decorator)
    return tuple(found)


def named_at_first(definitions: tuple[object, ...], decorator: str) -> tuple[BeanReference, ...]:
    """Return what a decorator names at the first of these definitions that has it, such as a method and its bases."""
    return next((found for each in definitions if (found := named_at(each, decorator))), ())


def definitions_of(cls: type[Any], name: str) -> tuple[Any, ...]:
    """Return the definitions of a method in a class and its bases, nearest first."""
    return tuple([base.__dict__[name] for base in cls.__mro__ if name in base.__dict__])


def all_named(target: object) -> Iterator[BeanReference]:
    """Yield everything that decorators name at a function, or at a class, its bases and their members."""
    targets: list[object] = [target] if may_be_marked(target) else []
    if isinstance(target, type):
        targets = []
        for base in target.__mro__[:-1]:  # without `object`
            targets += (base, *[each for _, each in may_be_marked_in(base)])
    for each in targets:
        if marks := _read_marks(each):
            yield from (BeanReference.to(one) for named in marks.values() for one in named)


def global_priority(cls: object) -> float | None:
    """Return the priority of a global interceptor, or None for other objects. Subclasses do not inherit it."""
    return vars(cls).get(GLOBAL_INTERCEPTOR_MARK) if isinstance(cls, type) else None


def _read_marks(target: object) -> Mapping[str, tuple[object, ...]]:
    kind = type(target)
    if kind is FunctionType or issubclass(kind, type):
        own: Mapping[str, tuple[object, ...]] = target.__dict__.get(REFERENCES_MARK, _NO_MARKS)
        return own
    for each in (target, getattr(target, "__func__", None)):
        # Not only `getattr`: attributes of classes may be objects that create their own attributes, or refuse to.
        if not any("__dict__" in base.__dict__ for base in type(each).__mro__):
            continue
        marks: Mapping[str, tuple[object, ...]] | None = getattr(each, "__dict__", {}).get(REFERENCES_MARK)
        if marks:
            return marks
    return _NO_MARKS


def is_rest_client(cls: object) -> bool:
    """Return True for a class that `@register_rest_client` decorates. Subclasses must be decorated themselves."""
    return isinstance(cls, type) and CLIENT_MARK in vars(cls)
