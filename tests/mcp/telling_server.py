"""An MCP server over stdio with the newer protocol that sends progress and log messages."""

import warnings

from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("telling")


@server.tool()
async def work(context: Context) -> str:
    """Works, and tells about it."""
    await context.report_progress(1, 2, "half")
    with warnings.catch_warnings(action="ignore"):  # log messages are deprecated in the protocol
        await context.log("warning", {"left": 1}, logger_name="work")
    await context.report_progress(2, 2)
    return "done"


@server.tool(name="notes.list", structured_output=False)
async def notes() -> str:
    """Has a name with a dot."""
    return "no notes"


if __name__ == "__main__":
    server.run("stdio")
