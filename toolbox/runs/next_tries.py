"""Decides whether a failed run is tried again, and what its next execution must not take from its records.

Not here: executing a run again (`retrying`, `take_over`), what its records are for its body (`service_calls`).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ..errors import (
    EndsInvocation,
    InputGuardrailError,
    InvocationTimeoutError,
    ModelRefusedError,
    ModelTruncatedError,
    OAuthError,
    OutputGuardrailError,
    OutputParsingError,
    ToolArgumentsError,
    ToolCallsLimitExceededError,
    ToolRoundsExceededError,
    UnknownToolError,
)
from ..services.recording_needs import type_name_of
from ..tools.failures import message_of
from .places import RecordKey
from .run_session import RunSession

FINAL = (
    EndsInvocation,  # of the framework, a usage limit, a tool that ends the call on purpose, a tool's guardrail
    ToolRoundsExceededError,
    ToolCallsLimitExceededError,
    InvocationTimeoutError,
    ModelRefusedError,
    InputGuardrailError,
    OutputGuardrailError,
)
"""Errors after which a run is not tried again by itself: the next try would end in the same way."""

_CAUSED_BY_REPLY = {
    each.__name__
    for each in (
        ModelRefusedError,
        ModelTruncatedError,
        OutputGuardrailError,
        OutputParsingError,
        ToolArgumentsError,
        UnknownToolError,
    )
}
"""Errors that a model's reply has caused: to give the same reply again would only repeat them."""


def wait_before_next_try(
    error: Exception, wait_after: Callable[[int], timedelta | None], session: RunSession
) -> timedelta | None:
    """Return the time until a run that has failed is tried again; None if it has failed for good.

    `wait_after` returns the time after this number of failures; None if it is not tried again.
    """
    document = session.document
    if document is None or not document.follows or is_final(error) or were_tools_undone(session):
        return None
    return wait_after(document.failures + 1)


def is_final(error: Exception) -> bool:
    """Return True if a run is not tried again after this error. A token server that fails may work the next time."""
    return isinstance(error, FINAL) and not isinstance(error, OAuthError)


def were_tools_undone(session: RunSession) -> bool:
    """Return True if tools of a run were undone because it failed or was cancelled.

    Not if a service that is a tool has undone its own tools, and the call around it has gone on with this failure.
    """
    return any(
        session.recorded(RecordKey(each, "failed")) is not None and session.recorded(RecordKey(each)) is None
        for each in session.places
    )


def describe_failure(error: Exception, session: RunSession) -> dict[str, Any]:
    """Return what the document of a run says about the error with which it has failed."""
    name = type_name_of(error)
    asks_again = name in _CAUSED_BY_REPLY or session.lacks_reply
    return {"error_type": name, "error_text": message_of(error), "asks_again": asks_again}
