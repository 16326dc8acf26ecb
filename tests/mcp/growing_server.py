"""An MCP server over stdio that has one tool more once `grow` has been called, and says so."""

from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("growing")


@server.tool()
async def grow(context: Context) -> str:
    """Adds a tool."""
    server.add_tool(grown)
    await context.notify_tools_changed()  # the newer protocol's way
    await context.session.send_tool_list_changed()  # the older one's
    return "grown"


def grown() -> str:
    """Was not there before."""
    return "here"


if __name__ == "__main__":
    server.run("stdio")
