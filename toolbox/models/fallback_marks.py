"""`@fallback`: a function that gives the answer of a service method when no model answers.

Not here: checking the function (`services.planning`), calling it (`services.fallback_answers`), other models that are
asked before it (`fallbacks`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final, TypeVar

from ..introspection import name_decorator

F = TypeVar("F", bound="Callable[..., Any] | staticmethod[..., Any]")

FALLBACK_MARK: Final = "__toolbox_fallbacks__"
"""Attribute of a service method: the functions that `@fallback` names it in."""


def fallback(method: Callable[..., Any]) -> Callable[[F], F]:
    """Let a function give the answer of a service method if the last model of its chain failed.

        @register_ai_service
        class Desk(Protocol):
            async def chat(self, text: str) -> str: ...

            @fallback(chat)
            @staticmethod
            def offline(error: ModelError, text: str) -> str:
                return f"I cannot answer {text!r} now. Please call us."

    A function outside of the class names the method as `Desk.chat`. It takes the error as `error`, and parameters of
    the method by their names. It returns what the method returns; for a `Result[T]` also a `T`. It is called for errors
    that are worth another model, not if the model refused, if its answer was cut off, or if the request was wrong.

    Raises `TypeError` for anything but a method, and for anything but a function.
    """
    if not inspect.isfunction(method):
        raise TypeError(f"@fallback: expected the method of a service: @fallback(chat), got {method!r}")

    def leave(target: F) -> F:
        function = getattr(target, "__func__", target)
        if not inspect.isfunction(function):
            raise TypeError(f"@fallback: expected a function or a static method, got {target!r}")
        # A module that is loaded again, as in a notebook, replaces its function.
        others = (each for each in fallbacks_at(method) if _name_of(each) != _name_of(function))
        setattr(method, FALLBACK_MARK, (*others, function))
        return target

    return name_decorator("@fallback", leave, method)


def fallbacks_at(method: Any) -> tuple[Callable[..., Any], ...]:
    """Return the functions that give the answer of a method."""
    found: tuple[Callable[..., Any], ...] = getattr(method, FALLBACK_MARK, ())
    return found


def _name_of(function: Any) -> tuple[str, str]:
    return function.__module__, function.__qualname__
