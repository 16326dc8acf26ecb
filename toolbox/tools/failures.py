"""Error handlers of tool calls: the settings for them, the included handlers and the defaults.

Not here: choosing and calling the handler of an error (`pipeline`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

from ..chat import ToolExecutionResult
from ..context import InvocationContext
from ..errors import EndsInvocation, ToolArgumentsError, ToolRetry, UnknownToolError
from ..execution.markers import non_blocking
from ..logs import own_frames
from ..safe_text import brief

logger = logging.getLogger("toolbox.tools")

PASSED_ON = (EndsInvocation, ToolRetry)
"""Exceptions of user code that are not converted into argument or result errors."""

Handler: TypeAlias = Callable[[Any, InvocationContext], Any]
"""An error handler, `def` or `async def`: takes the error and the `InvocationContext` (with `.request`) and returns the
text for the model or a `ToolExecutionResult`. Its own exceptions end the invocation and reach the caller."""


@dataclass(frozen=True, slots=True)
class ToolErrors:
    """Error handlers for tool calls. Each takes `(error, context)` and returns the text for the model.

        ToolErrors(on_unknown_tool=return_to_model, on_tool_arguments_error=return_to_model)

    `on_unknown_tool` gets an `UnknownToolError`, `on_tool_arguments_error` a `ToolArgumentsError`, and
    `on_tool_execution_error` the tool's own exception. A service without a handler uses the container's. By default,
    unknown tools and invalid arguments raise their error, and the message of a tool's exception goes to the model.
    """

    on_unknown_tool: Handler | None = None
    on_tool_arguments_error: Handler | None = None
    on_tool_execution_error: Handler | None = None

    def over(self, outer: ToolErrors) -> ToolErrors:
        """Return these handlers, completed with those of `outer`."""
        return ToolErrors(
            self.on_unknown_tool or outer.on_unknown_tool,
            self.on_tool_arguments_error or outer.on_tool_arguments_error,
            self.on_tool_execution_error or outer.on_tool_execution_error,
        )


# --- included handlers; none of them blocks


@non_blocking
def return_to_model(error: Exception, context: InvocationContext) -> str:
    """Send the error to the model, so that it can try again.

    The model reads the names of the valid tools, the invalid arguments, or the message of the tool's exception. Use it
    for any of the three handlers: `@register_ai_service(on_unknown_tool=return_to_model)`.
    """
    match error:
        case UnknownToolError():
            names = ", ".join(error.tool_names)
            valid = f"The tools are: {names}." if names else "There are no tools."
            search = f" Find more tools with {error.search_tool!r}." if error.search_tool is not None else ""
            return f"There is no tool named {brief(error.request.name)!r}. {valid}{search}"
        case ToolArgumentsError():
            faults = "".join(f"\n- {path}: {message}" if path else f"\n- {message}" for path, message in error.problems)
            return f"The arguments of tool {error.request.name!r} are not valid:{faults}"
        case _:
            return message_of(error)


@non_blocking
def hide_details(error: Exception, context: InvocationContext) -> str:
    """Tell the model only that the tool failed, and log the exception as an error.

    Use it for `on_tool_execution_error` if messages of exceptions may contain secrets.
    """
    name = _tool_name(context)
    logger.error("tool %r failed: %s", name, message_of(error), exc_info=own_frames(error))
    return f"The tool {name!r} failed."


@non_blocking
def send_message(error: Exception, context: InvocationContext) -> str:
    """Send the exception's message to the model and log a warning; the default of `on_tool_execution_error`."""
    message = message_of(error)
    logger.warning(
        "tool %r failed and the model reads its message: %s", _tool_name(context), message, exc_info=own_frames(error)
    )
    return message


@non_blocking
def fail(error: Exception, context: InvocationContext) -> NoReturn:
    """Raise the error to the caller; the default for unknown tools and invalid arguments."""
    option = "on_unknown_tool" if isinstance(error, UnknownToolError) else "on_tool_arguments_error"
    # A note, not part of the message: a handler may send the message to the model.
    error.add_note(f"set {option}=return_to_model to send this error to the model, so that it can try again")
    raise error


READY = frozenset({return_to_model, hide_details, send_message, fail})
"""Handlers that can be called directly on the event loop."""

DEFAULTS = ToolErrors(fail, fail, send_message)


def message_of(error: BaseException) -> str:
    """Return an exception's message, or its class name if the message is blank."""
    try:
        message = str(error)
    except Exception:  # an exception whose own __str__ fails
        message = ""
    return message if message.strip() else type(error).__name__


def check_answer(answer: object, handler: Handler) -> str | ToolExecutionResult:
    """Return a handler's result if it has a valid type. Raises `TypeError` otherwise."""
    if isinstance(answer, (str, ToolExecutionResult)):
        return answer
    name = getattr(handler, "__qualname__", repr(handler))
    raise TypeError(
        f"error handler {name} returned {type(answer).__name__}; return the text for the model or a ToolExecutionResult"
    )


def _tool_name(context: InvocationContext) -> str:
    return context.request.name if context.request is not None else "?"
