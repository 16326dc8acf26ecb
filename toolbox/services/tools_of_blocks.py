"""Tools that a block of code adds to the calls inside it: those of `with additional_tools(…)`, and of endpoints.

Not here: offering them in a call (`added_tools`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ..context import InvocationContext, current_invocation
from ..errors import IllegalConfigurationError
from ..tools.sources import read_tools
from ..tools.tool_calls import Tool

current_additional_tools: ContextVar[tuple[Sequence[Tool], InvocationContext | None, str] | None]
current_additional_tools = ContextVar("toolbox.added_tools", default=None)
"""The tools that surrounding blocks add, the invocation that contains the innermost block, and that block's place."""


@contextmanager
def additional_tools(sources: Sequence[Any], where: str = "@toolbox") -> Iterator[None]:
    """Add tools to the services that the block calls directly, but not to services called as tools.

    Raises `IllegalConfigurationError` for invalid tools.
    """
    tools, problems = read_tools(sources, where)
    if problems:
        raise IllegalConfigurationError(problems)
    with tools_added(tools):
        yield


@contextmanager
def tools_added(tools: Sequence[Tool], place: str = "") -> Iterator[None]:
    """Add tools that have already been read; see `additional_tools`.

    `place` names the code that adds them, so that a stored run finds them again; the container must know it.
    """
    token = current_additional_tools.set((tools, current_invocation.get(), place))
    try:
        yield
    finally:
        current_additional_tools.reset(token)


def place_of_added_tools() -> str:
    """Return the place that adds tools to a call that starts here; an empty text if none does."""
    added = current_additional_tools.get()
    return "" if added is None or added[1] is not current_invocation.get() else added[2]
