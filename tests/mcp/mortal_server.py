"""An MCP server over stdio with a tool that returns its process id and a tool that never ends."""

import asyncio
import os

from toolbox import Container, tool
from toolbox.mcp import serve_stdio


@tool("Says the process")
def pid() -> int:
    return os.getpid()


@tool("Never ends")
async def wait() -> None:
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve_stdio(Container(), [pid, wait]))
