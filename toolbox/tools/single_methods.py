"""Finds the class of a method that is listed by itself, such as `Calculator.add`, which is a plain function.

Nothing in Python tells a method that a subclass inherits from that of its base class: both are the same function. Not
here: reading the method as a tool (`sources`), choosing the bean that provides the class (`di.graph`).
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from ..bean_references import definitions_of, is_marked
from ..security import class_access

Home: TypeAlias = Callable[[type], type]
"""Returns the class of the bean that provides a class: the class itself, or a subclass."""


def class_defining(function: object) -> type | None:
    """Return the class that defines a function, as `Calculator` for `Calculator.add`; None for other functions."""
    if not inspect.isfunction(function):
        return None
    name, _, attribute = function.__qualname__.rpartition(".")
    if not name or name.endswith(">"):  # made by a function, a comprehension or a lambda
        return None
    for cls in _local_classes(name) if "<locals>" in name else _class_in_module(function.__module__, name):
        member = vars(cls).get(attribute)
        if getattr(member, "__func__", member) is function:
            return cls
    return None


def home_of(called: Any) -> tuple[type[Any] | None, tuple[Any, ...]]:
    """Return the class of what is called, if it has one, and the places where decorators leave their marks.

    That is a function, a method, a callable object or a class, or a `partial` of one.
    """
    inner = called
    while isinstance(inner, functools.partial):
        inner = inner.func
    given = () if called is inner else (called,)
    if inspect.ismethod(inner):
        owner = inner.__self__ if isinstance(inner.__self__, type) else type(inner.__self__)
        return owner, (*given, *definitions_of(owner, inner.__name__), inner.__func__)
    if isinstance(inner, type):
        return inner, given
    if not inspect.isroutine(inner):
        return type(inner), (called, inner, *definitions_of(type(inner), "__call__"))
    if (defining := class_defining(inner)) is not None:
        attribute = inner.__qualname__.rpartition(".")[2]
        return defining, (called, inner, *definitions_of(defining, attribute))
    return None, (called, inner)


def find_stricter(defining: type, attribute: str, cls: type) -> type | None:
    """Return a class that inherits this method of `defining`, and adds roles, guardrails or interceptors.

    `cls` is the class that was chosen: if the other one was meant, its checks would be passed over. Classes that
    functions have made do not count, because they come and go.
    """
    found = definitions_of(cls, attribute)[0]
    for other in _subclasses_of(defining):
        if "<locals>" in other.__qualname__:
            continue
        apart = [each for each in other.__mro__ if each not in cls.__mro__]
        access = class_access(other)
        is_restricted = access is not None and not access.is_open and access != class_access(cls)
        if (is_restricted or is_marked(*apart)) and definitions_of(other, attribute)[0] is found:
            return other
    return None


def _class_in_module(module: str, name: str) -> Iterator[type]:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if isinstance(found, type):
        yield found


def _local_classes(name: str) -> Iterator[type]:
    """Yield the classes with this qualified name that functions have made: no module has them."""
    return (each for each in _subclasses_of(object) if each.__qualname__ == name)


def _subclasses_of(cls: type) -> Iterator[type]:
    pending: list[type[Any]] = [cls]
    seen: set[type[Any]] = set()
    while pending:
        subclasses: list[type[Any]] = type.__subclasses__(pending.pop())
        for each in subclasses:
            if each not in seen:
                seen.add(each)
                pending.append(each)
                yield each
