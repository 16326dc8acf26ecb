"""An MCP server over stdio that says which process it is, and waits for good when asked to."""

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
