"""Finds the methods of a Protocol or ABC that a service must implement.

Not here: reading these methods (`planning`), implementing them (`implementation`).
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
    """Return True for a Protocol or an ABC."""
    return bool(getattr(cls, "_is_protocol", False)) or issubclass(cls, ABC) or inspect.isabstract(cls)


def method_names(cls: type[Any]) -> list[str]:
    """Return the methods to implement: the abstract methods of an ABC, or a Protocol's methods without a body."""
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
    """Yield a problem for each decorator that is used without parentheses."""
    for name, member in vars(cls).items():
        if (decorator := left_without_parentheses(member)) is not None:
            yield Problem(f"{cls.__name__}.{name}", f"{decorator} has no parentheses", f"write {decorator}(…)")
