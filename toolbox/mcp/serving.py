"""A container's tools as an MCP server: over stdio, or for a web framework to mount.

Each call has a request scope of its own. Not here: mounting it in FastAPI (`toolbox_fastapi`), MCP servers as tools of
services (`offering`).
"""

from __future__ import annotations

import base64
import logging
import sys
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

from ..chat import ImageContent, ToolExecutionRequest, ToolExecutionResultMessage
from ..container import Container
from ..errors import FrameworkError, IllegalConfigurationError, ToolAbort
from ..json_text import compact_json
from ..tools.failures import ToolErrors, return_to_model
from ..tools.prepared import Tool
from ..tools.sources import bean_types, read_tools

if TYPE_CHECKING:
    from mcp.server import Server

logger = logging.getLogger("toolbox.mcp")

INTERNAL_ERROR = -32603
TO_CLIENT = ToolErrors(
    on_unknown_tool=return_to_model, on_tool_arguments_error=return_to_model, on_tool_execution_error=None
)


class McpEndpoint:
    """What `InvocationContext.service` is in a tool that an MCP client called."""


def mcp_server_of(container: Container, tools: Iterable[Any], name: str = "toolbox") -> Server[Any]:
    """The `tools` (classes, functions, instances, services …) as an `mcp.server.Server`.

    Made before the container starts, so that classes among the tools become beans; its calls need the container to be
    started. Raises `IllegalConfigurationError` for what is no tool.
    """
    from mcp.server import Server

    sources = tuple(tools)
    read, problems = read_tools(sources, f"MCP server {name!r}")
    if problems:
        raise IllegalConfigurationError(problems)
    container.register(*(each for each in bean_types(sources) if not container.knows(each)))
    handlers = _Handlers(container, read)
    return Server(name, on_list_tools=handlers.list_tools, on_call_tool=handlers.call_tool)


async def serve_stdio(container: Container, tools: Iterable[Any], name: str = "toolbox") -> None:
    """Serves the tools on standard input and output, until the client leaves; starts and stops the container.

    What the program prints meanwhile goes to standard error.
    """
    from mcp.server.stdio import stdio_server

    server = mcp_server_of(container, tools, name)
    async with stdio_server() as (reading, writing):
        with redirect_stdout(sys.stderr):
            async with container:
                await server.run(reading, writing, server.create_initialization_options())


class _Handlers:
    """Answers a client's requests."""

    def __init__(self, container: Container, tools: Sequence[Tool]) -> None:
        self._container = container
        self._tools = {tool.specification.name: tool for tool in tools}

    async def list_tools(self, context: Any, params: Any) -> Any:
        from mcp_types import ListToolsResult
        from mcp_types import Tool as McpTool

        offered = [
            McpTool(name=each.name, description=each.description, input_schema=dict(each.parameters))
            for each in (tool.specification for tool in self._tools.values())
        ]
        return ListToolsResult(tools=offered)

    async def call_tool(self, context: Any, params: Any) -> Any:
        from mcp import MCPError

        request = ToolExecutionRequest(str(context.request_id), params.name, compact_json(params.arguments or {}))
        try:
            async with self._container.request_scope():
                outcome = await self._container.host.execute(self._tools, request, McpEndpoint, TO_CLIENT)
        except FrameworkError as error:
            # What the program says of itself is its maintainer's to read, not the client's.
            logger.exception("tool %r could not be run", params.name)
            raise MCPError(INTERNAL_ERROR, f"tool {params.name!r} could not be run") from error
        except ToolAbort as error:
            return _answer(ToolExecutionResultMessage.of(request, str(error)), None, failed=True)
        message = outcome.message
        return _answer(message, outcome.execution.result_object, failed=message.is_error)


def _answer(message: ToolExecutionResultMessage, value: object, *, failed: bool) -> Any:
    from mcp_types import CallToolResult
    from mcp_types import ImageContent as McpImage
    from mcp_types import TextContent as McpText

    content: list[Any] = [McpText(type="text", text=message.text)] if message.text or not message.contents else []
    for each in message.contents:
        if isinstance(each, ImageContent) and each.data is not None:
            data = each.data if isinstance(each.data, str) else base64.b64encode(each.data).decode()
            content.append(McpImage(type="image", data=data, mime_type=each.mime_type or "image/png"))
    return CallToolResult(content=content, is_error=failed)
