"""An MCP server over stdio that `toolbox.mcp.serve_stdio` makes of a container's tools."""

import asyncio
import os

from toolbox import Container, request_scoped, tool
from toolbox.mcp import serve_stdio


@request_scoped
class Visit:
    """A bean that exists once per call."""

    count = 0

    def __init__(self) -> None:
        Visit.count += 1
        self.number = Visit.count


class Counter:
    def __init__(self, visit: Visit) -> None:
        self.visit = visit

    @tool("Adds two numbers")
    def add(self, a: int, b: int = 1) -> int:
        return a + b

    @tool("Says which request this is")
    async def visit_number(self) -> dict[str, int]:
        return {"number": self.visit.number}

    @tool("Fails")
    def fail(self) -> None:
        raise ValueError("no luck")

    @tool("Ends the process")
    def die(self) -> None:
        os._exit(3)

    @tool("Never ends")
    async def wait(self) -> None:
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve_stdio(Container().register(Visit), [Counter]))
