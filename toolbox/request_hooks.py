"""`@before_model_request`: marks methods of beans that are called before each model request, and reads the marks.

Not here: which beans are asked (`di.scopes`), calling them (`services.model_calls`), checks (`hosts.bean_checks`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, TypeVar

from .introspection import may_be_marked_in

F = TypeVar("F", bound="Callable[..., Any] | staticmethod[..., Any] | classmethod[Any, ..., Any]")

REQUEST_HOOK_MARK: Final = "__toolbox_before_model_request__"


def before_model_request(method: F) -> F:
    """Call a method of a request- or call-scoped bean before each model request, for example to release a lock.

        @request_scoped
        class Basket:
            @before_model_request
            async def unlock(self) -> None: ...

    The method has no parameters, and is `def` or `async def`; a `def` runs where a `def` tool would. It is called right
    before each model request of the current request and of the tool calls that led there. An error that it raises ends
    the invocation. Raises `TypeError` for anything but a function.
    """
    if isinstance(method, type) or not callable(getattr(method, "__func__", method)):
        raise TypeError(f"@before_model_request: expected a method, got {method!r}; put it above a `def` in a class")
    setattr(method, REQUEST_HOOK_MARK, True)
    return method


@functools.lru_cache(maxsize=4096)
def request_hooks_of(cls: type[Any]) -> tuple[str, ...]:
    """Return the names of the marked methods of a class, also of those that a subclass defines again."""
    return tuple(dict.fromkeys(name for base in reversed(cls.__mro__) for name in _find_marked(base)))


@functools.lru_cache(maxsize=4096)
def _find_marked(cls: type[Any]) -> tuple[str, ...]:
    return tuple(name for name, member in may_be_marked_in(cls) if _has_hook(member))


def _has_hook(member: object) -> bool:
    # `@staticmethod` copies the marks of its function, so that the order of the two decorators does not matter.
    return getattr(member, REQUEST_HOOK_MARK, False) is True
