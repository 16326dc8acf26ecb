"""A container that serves its tools, resources and prompts over stdio, for the clients of others."""

import asyncio

from tests.compat.served import Served
from toolbox import Container
from toolbox.mcp import serve_stdio

if __name__ == "__main__":
    asyncio.run(serve_stdio(Container(), [Served]))
