"""Hand-over: an agent that hands a conversation to another one, which answers in its place until it hands it on.

Not here: reading the targets and planning for them (`services.teams`), handing a call over (`services.handing_over`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from .introspection import name_decorator

__all__ = ["hands_over_to"]

F = TypeVar("F", bound=Callable[..., Any])

HANDOVERS_MARK: Final = "__toolbox_hands_over_to__"

MOST_HANDOVERS: Final = 4
"""How often one call may be handed over."""


@dataclass(frozen=True, slots=True)
class HandoverMark:
    """A method to which a method hands over: the method itself, or a text such as `"Desk.chat"`."""

    target: Any
    description: str | None


def hands_over_to(method: Callable[..., Any] | str, description: str | None = None) -> Callable[[F], F]:
    """Let the model hand the conversation over to a method of this or another AI service, which answers instead.

        @hands_over_to(Billing.chat, description="invoices and refunds")
        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    The model is offered a tool, `transfer_to_billing`. From then on `Billing.chat` answers, also the next calls of this
    conversation, until it hands over. Use the decorator once per target. A target whose class comes later is a text:
    `"Desk.chat"`, or `"module.Desk.chat"`. `description` tells the model what the target is for; by default the
    docstring of the target's method or class.

    Returns the same method. Raises `TypeError` for a target that is neither a method nor a text, and below a class.
    """
    is_method = callable(method) and not isinstance(method, type)
    if not (is_method or (isinstance(method, str) and method.count(".") > 0)):
        fix = 'pass a method of a service, Billing.chat, or its name, "Billing.chat"'
        raise TypeError(f"@hands_over_to: expected a method of a service, got {method!r}; {fix}")
    if not (description is None or isinstance(description, str)):
        fix = "write one decorator for each method" if callable(description) else "pass a text, or leave it out"
        raise TypeError(f"@hands_over_to: description must be a str, got {type(description).__name__}; {fix}")

    def leave(target: F) -> F:
        if isinstance(target, type):
            raise TypeError(f"@hands_over_to: {target.__name__} is a class; put the decorator on its methods")
        mark = HandoverMark(method, description)
        setattr(target, HANDOVERS_MARK, (mark, *handovers_of(target)))  # in the order in which they are written
        return target

    return name_decorator("@hands_over_to", leave, method if is_method else None)


def handovers_of(function: object) -> tuple[HandoverMark, ...]:
    """Return the marks of a method, in the order in which they are written; none without the decorator."""
    marks: tuple[HandoverMark, ...] = getattr(function, HANDOVERS_MARK, ())
    return marks if isinstance(marks, tuple) else ()
