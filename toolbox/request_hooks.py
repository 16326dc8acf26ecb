"""`@before_model_request` and `@on_success`: mark methods of beans that are called in their scope, and read the marks.

Not here: which beans are asked, and calling `@on_success` methods (`di.scopes`), calling those before a model request
(`services.model_calls`), checks (`hosts.bean_checks`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from .introspection import may_be_marked_in

F = TypeVar("F", bound="Callable[..., Any] | staticmethod[..., Any] | classmethod[Any, ..., Any]")


@dataclass(frozen=True, slots=True)
class Hook:
    """A moment at which marked methods of beans are called: the decorator, and the mark that it leaves."""

    decorator: str
    mark: str


BEFORE_MODEL_REQUEST: Final = Hook("@before_model_request", "__toolbox_before_model_request__")
RELEASES_CONNECTION: Final = Hook("@_releases_connection", "__toolbox_releases_connection__")
"""For database sessions of this library: such a method is called before retrievers run too, and returns True if it has
given a connection back."""
HOLDS_DATABASE: Final = Hook("@_holds_database", "__toolbox_holds_database__")
"""For database sessions of this library: such a method returns the engine to whose database its open transaction has
written, and what; None if it has only read."""
ON_SUCCESS: Final = Hook("@on_success", "__toolbox_on_success__")


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
    return _leave_mark(method, BEFORE_MODEL_REQUEST)


def releases_connection(method: F) -> F:
    """Call a method also before retrievers run, and tell listeners if it returns True. For this library only."""
    return _leave_mark(method, RELEASES_CONNECTION)


def holds_database(method: F) -> F:
    """Ask a method whether others that write to a database have to wait for its bean. For this library only."""
    return _leave_mark(method, HOLDS_DATABASE)


def is_marked(method: Callable[..., Any], hook: Hook) -> bool:
    """Return True for a method that `hook` marks, above or below `@staticmethod` and `@classmethod`."""
    return getattr(getattr(method, "__func__", method), hook.mark, getattr(method, hook.mark, False)) is True


def on_success(method: F) -> F:
    """Call a method of a request-scoped bean when the work of its request has ended well, for example to commit.

        @request_scoped
        class Transaction:
            @on_success
            def commit(self) -> None: ...

    The method has no parameters, and is `def` or `async def`; a `def` runs where a `def` tool would. It is called
    before the result is handed on: before the first byte of a response, before an MCP result is sent, before an
    injected function returns, before a run is stored as completed or suspended, and when a WebSocket or a
    `request_scope()` block ends. The methods are called in the order in which their beans were made. An error that one
    raises is the error of the work: the others are not called, and producers that have yielded get it. Beans that are
    made after the first byte of a stream are called when the stream has ended well. Nothing is called if the work
    failed; a call that was suspended has not failed. Raises `TypeError` for anything but a function.
    """
    return _leave_mark(method, ON_SUCCESS)


def _leave_mark(method: F, hook: Hook) -> F:
    if isinstance(method, type) or not callable(getattr(method, "__func__", method)):
        raise TypeError(f"{hook.decorator}: expected a method, got {method!r}; put it above a `def` in a class")
    setattr(method, hook.mark, True)
    return method


@functools.lru_cache(maxsize=4096)
def hooks_of(cls: type[Any], hook: Hook) -> tuple[str, ...]:
    """Return the names of the marked methods of a class, also of those that a subclass defines again."""
    return tuple(dict.fromkeys(name for base in reversed(cls.__mro__) for name in _find_marked(base, hook)))


@functools.lru_cache(maxsize=4096)
def _find_marked(cls: type[Any], hook: Hook) -> tuple[str, ...]:
    return tuple(name for name, member in may_be_marked_in(cls) if is_marked(member, hook))
