"""The tools that the client of a call runs: their stored form, and deferred tools that wait for the client's result.

Not here: which tools a client may have (`toolbox_fastapi`), waiting for a result (`tool_records`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...chat import ToolExecutionRequest, ToolSpecification
from ...errors import IllegalConfigurationError, ToolDeferred
from ...tools.sources import AiServiceTool, read_tools
from ...tools.tool_calls import Tool


def write_client_tool(specification: ToolSpecification) -> dict[str, Any]:
    """Return a tool as JSON values."""
    written: dict[str, Any] = {"name": specification.name, "description": specification.description}
    return {**written, "parameters": dict(specification.parameters)}


def read_client_tools(written: Sequence[Mapping[str, Any]]) -> tuple[Tool, ...]:
    """Return the tools that `write_client_tool` wrote. Raises `IllegalConfigurationError` for invalid ones."""
    known = (ToolSpecification(each["name"], each["description"], each["parameters"]) for each in written)
    tools, problems = read_tools([AiServiceTool(each, _defer, deferred=True) for each in known], "client tools")
    if problems:
        raise IllegalConfigurationError(problems)
    return tools


def _defer(request: ToolExecutionRequest, memory_id: object) -> object:
    raise ToolDeferred("the client runs this tool")
