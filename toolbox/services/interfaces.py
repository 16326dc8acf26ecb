"""Reads which methods a Protocol or an ABC leaves to be implemented.

Not here: what such a method means (`planning`), implementing it (`implementation`).
"""

from __future__ import annotations

import inspect
from abc import ABC
from collections.abc import Iterator
from typing import Any

from ..errors import Problem
from ..signatures import has_body
from .declaration import SYSTEM_MARK, USER_MARK, left_without_parentheses


def is_interface(cls: type[Any]) -> bool:
    """Whether a class is a Protocol or an ABC."""
    return bool(getattr(cls, "_is_protocol", False)) or issubclass(cls, ABC) or inspect.isabstract(cls)


def method_names(cls: type[Any]) -> list[str]:
    """The methods that a service implements: the abstract ones of an ABC; of a Protocol those without a body."""
    names: list[str] = []
    for base in reversed(cls.__mro__):
        for name, member in vars(base).items():
            if not inspect.isfunction(member) or (name.startswith("__") and name.endswith("__")):
                continue
            if name in names:
                names.remove(name)
            if _is_declared_only(base, member):
                names.append(name)
    return names


def _is_declared_only(owner: type[Any], function: Any) -> bool:
    if getattr(function, "__isabstractmethod__", False):
        return True
    if hasattr(function, USER_MARK) or hasattr(function, SYSTEM_MARK):
        return True
    return bool(getattr(owner, "_is_protocol", False)) and not has_body(function)


def bare_decorators(cls: type[Any]) -> Iterator[Problem]:
    """A problem for each decorator that stands on a method without its parentheses."""
    for name, member in vars(cls).items():
        if (decorator := left_without_parentheses(member)) is not None:
            yield Problem(f"{cls.__name__}.{name}", f"{decorator} has no parentheses", f"write {decorator}(…)")
