"""Reads and checks tool calls that are stored: their JSON, and if their tools are still the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, cast

from pydantic_core import to_jsonable_python

from ...chat import ToolExecutionRequest, ToolSpecification
from ...deferred_answers import TOOL_ORIGIN, ToolOrigin
from ...errors import IllegalConfigurationError, Problem, ToolArgumentsError, ToolDeferred
from ...execution.markers import COROUTINE
from ...safe_text import faults_text
from ...settings import settings_key
from ...tools.failures import message_of
from ...tools.results import Encoded
from ...tools.tool_calls import Tool, ToolCall


def json_attributes(tool: Tool, deferred: ToolDeferred) -> dict[str, Any]:
    """Return the attributes of a deferred call as JSON values. Raises `IllegalConfigurationError`."""
    try:
        return dict(json.loads(json.dumps(to_jsonable_python(deferred.attributes))))
    except Exception as error:
        fact = f"the attributes of ToolDeferred cannot be written as JSON ({error})"
        raise IllegalConfigurationError([Problem(tool.where, fact, "use JSON values")]) from error


def tool_that_gives(give: Callable[[ToolCall], Encoded], name: str) -> Tool:
    """Return a tool that runs nothing: it gives a known result."""

    async def run(call: ToolCall) -> Encoded:
        return give(call)

    return Tool(
        specification=ToolSpecification(name),
        execution=COROUTINE,
        where=name,
        function=None,
        encode=lambda value: Encoded("", value),
        step=run,
    )


def find_fault(tool: Tool, request: ToolExecutionRequest) -> str | None:
    """Return what is wrong with the arguments of a call; None if they are valid."""
    if tool.decode is None:
        return None
    try:
        tool.decode(request)
    except ToolArgumentsError as error:
        return faults_text(error.problems)
    except Exception as error:  # of a type's own validators
        return message_of(error)
    return None


def origin_of(tool: Tool, request: ToolExecutionRequest) -> ToolOrigin | None:
    """Return where a call of the tool goes, if that is another server."""
    origin = getattr(tool.function, TOOL_ORIGIN, None)
    return None if origin is None else cast("ToolOrigin", origin(request))


def find_other_origin(name: str, now: ToolOrigin | None, seen: ToolOrigin | None) -> str | None:
    """Return why a tool is not the one that a person saw; None for the same tool of the same server.

    The name of the server can be stored in another spelling, and its address may be missing in earlier versions.
    """
    if seen is None and now is None:
        return None
    if seen is None:
        return f"the tool {name!r} was not of an MCP server when its call was answered, and now is"
    is_here = now is not None and settings_key(now.mcp_server) == settings_key(seen.mcp_server)
    if now is None or not is_here or now.fingerprint != seen.fingerprint:
        return f"MCP server {seen.mcp_server!r} does not offer the tool {name!r} now, or has changed it"
    if seen.address not in ("", now.address):
        return f"MCP server {seen.mcp_server!r} has another address or command than when the call was answered"
    return None
