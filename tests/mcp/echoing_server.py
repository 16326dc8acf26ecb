"""An MCP server over stdio whose tool returns its arguments as they came, or rejects them.

The argument is the tool's input schema. A call with `reject` is rejected with that JSON-RPC error code.
"""

import asyncio
import json
import sys
from typing import Any

from mcp.server import Server
from mcp.server.stdio import stdio_server
from mcp.shared.exceptions import MCPError
from mcp_types import CallToolResult, ListToolsResult, TextContent, Tool


async def list_tools(context: Any, params: Any) -> ListToolsResult:
    return ListToolsResult(tools=[Tool(name="echo", input_schema=json.loads(sys.argv[1]))])


async def call_tool(context: Any, params: Any) -> CallToolResult:
    if "reject" in params.arguments:
        raise MCPError(params.arguments["reject"], f"no place for {params.arguments.get('text')}")
    return CallToolResult(content=[TextContent(text=json.dumps(params.arguments))])


async def main() -> None:
    server = Server("echoing", on_list_tools=list_tools, on_call_tool=call_tool)
    async with stdio_server() as (reading, writing):
        await server.run(reading, writing, server.create_initialization_options())


asyncio.run(main())
