"""An MCP server over stdio that adds a tool and sends a notification when `grow` is called."""

from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("growing")


@server.tool()
async def grow(context: Context) -> str:
    """Adds a tool."""
    server.add_tool(grown)
    await context.notify_tools_changed()  # newer protocol
    await context.session.send_tool_list_changed()  # older protocol
    return "grown"


def grown() -> str:
    """Was not there before."""
    return "here"


if __name__ == "__main__":
    server.run("stdio")
