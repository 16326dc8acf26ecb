"""Tells listeners of a tool call, around it and in its context.

Not here: the call (`invocation`), what is told (`toolbox.events`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

from ..chat import ToolExecutionRequest, ToolSpecification
from ..context import current_invocation
from ..events import ToolExecutedEvent, ToolFailedEvent, ToolStartedEvent

if TYPE_CHECKING:
    from .invocation import ToolOutcome, ToolSurroundings

A = TypeVar("A")


async def observed(
    run: Callable[[A, ToolExecutionRequest, ToolSurroundings], Awaitable[ToolOutcome]],
    called: A,
    specification: ToolSpecification | None,
    request: ToolExecutionRequest,
    surroundings: ToolSurroundings,
) -> ToolOutcome:
    """`run(called, request, surroundings)`, told to the surroundings' listeners. Raises what that raises."""
    assert surroundings.listeners is not None
    tell, context, clock = surroundings.listeners.tell, surroundings.context.in_tool(request), perf_counter()
    token = current_invocation.set(context)
    raised: list[Exception] = []
    try:
        tell(ToolStartedEvent(context, request, specification))
        try:
            outcome = await run(called, request, replace(surroundings, listeners=None, raised=raised))
        except BaseException as error:
            tell(ToolFailedEvent(context, request, error, perf_counter() - clock))
            raise
        tell(ToolExecutedEvent(context, outcome.execution, raised[-1] if raised else None))
        return outcome
    finally:
        raised.clear()  # an error's traceback knows the frames that know this list
        with suppress(ValueError):  # left in another context than entered, as when a coroutine is closed from outside
            current_invocation.reset(token)
