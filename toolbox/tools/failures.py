"""What becomes of a tool call that went wrong: the handlers, ready ones among them, and their defaults.

Not here: telling what went wrong, calling a handler where it belongs (`pipeline`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

from ..chat import ToolExecutionResult
from ..context import InvocationContext
from ..errors import ToolArgumentsError, UnknownToolError
from ..execution import non_blocking
from ..validation_text import brief

logger = logging.getLogger("toolbox.tools")

Handler: TypeAlias = Callable[[Any, InvocationContext], Any]
"""Takes the error and the context of the call, `.request` in it; returns (or is awaited for) the text for the model, or
a `ToolExecutionResult`. What it raises ends the invocation and reaches the caller."""


@dataclass(frozen=True, slots=True)
class ToolErrors:
    """The handlers of a container or a service; None: those around it, in the end the upstream documents' defaults.

    `on_unknown_tool` is given an `UnknownToolError`, `on_tool_arguments_error` a `ToolArgumentsError`,
    `on_tool_execution_error` the tool's own exception.
    """

    on_unknown_tool: Handler | None = None
    on_tool_arguments_error: Handler | None = None
    on_tool_execution_error: Handler | None = None

    def over(self, outer: ToolErrors) -> ToolErrors:
        """These handlers, and those of `outer` where there is none."""
        return ToolErrors(
            self.on_unknown_tool or outer.on_unknown_tool,
            self.on_tool_arguments_error or outer.on_tool_arguments_error,
            self.on_tool_execution_error or outer.on_tool_execution_error,
        )


# --- ready handlers; none of them waits


@non_blocking
def return_to_model(error: Exception, context: InvocationContext) -> str:
    """Tells the model what was wrong, so that it can do better: the valid tools, the faults, the tool's message."""
    match error:
        case UnknownToolError():
            names = ", ".join(error.tool_names)
            valid = f"The tools are: {names}." if names else "There are no tools."
            return f"There is no tool named {brief(error.request.name)!r}. {valid}"
        case ToolArgumentsError():
            faults = "".join(f"\n- {path}: {message}" if path else f"\n- {message}" for path, message in error.problems)
            return f"The arguments of tool {error.request.name!r} are not valid:{faults}"
        case _:
            return message_of(error)


@non_blocking
def hide_details(error: Exception, context: InvocationContext) -> str:
    """Tells the model only that the tool failed; the log has the rest."""
    name = _tool_name(context)
    logger.error("tool %r failed: %s", name, message_of(error), exc_info=error)
    return f"The tool {name!r} failed."


@non_blocking
def send_message(error: Exception, context: InvocationContext) -> str:
    """The default for what a tool raises: its message, or its class name when that is blank; logged as a warning."""
    message = message_of(error)
    logger.warning("tool %r failed, its message goes to the model: %s", _tool_name(context), message, exc_info=error)
    return message


@non_blocking
def fail(error: Exception, context: InvocationContext) -> NoReturn:
    """The default for unknown tools and unusable arguments: the error reaches the caller."""
    option = "on_unknown_tool" if isinstance(error, UnknownToolError) else "on_tool_arguments_error"
    # No part of its text: a handler may hand that on to the model.
    error.add_note(f"{option}=return_to_model tells the model instead, which may then do better.")
    raise error


READY = frozenset({return_to_model, hide_details, send_message, fail})
"""Handlers that may be called wherever the loop is."""

DEFAULTS = ToolErrors(fail, fail, send_message)


def message_of(error: BaseException) -> str:
    """An exception's message, or its class name when that is blank."""
    try:
        message = str(error)
    except Exception:  # an exception whose own __str__ fails
        message = ""
    return message if message.strip() else type(error).__name__


def check_answer(answer: object, handler: Handler) -> str | ToolExecutionResult:
    """What a handler returned, if it is what a handler may return; else `TypeError`."""
    if isinstance(answer, (str, ToolExecutionResult)):
        return answer
    name = getattr(handler, "__qualname__", repr(handler))
    raise TypeError(
        f"the handler {name} returned {type(answer).__name__}; return the text for the model or a ToolExecutionResult"
    )


def _tool_name(context: InvocationContext) -> str:
    return context.request.name if context.request is not None else "?"
