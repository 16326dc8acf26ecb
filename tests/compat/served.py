"""The tools, resources and prompts that the clients of others use."""

from toolbox import PdfContent, Progress
from toolbox import tool as as_tool
from toolbox.mcp import mcp_prompt, mcp_resource


class Served:
    @as_tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    @as_tool
    async def count(self, progress: Progress) -> str:
        """Count to three."""
        for number in range(3):
            await progress(number + 1, 3)
        return "three"

    @mcp_resource("notes://plan.pdf")
    def plan(self) -> PdfContent:
        return PdfContent(data=b"%PDF")

    @mcp_resource("notes://{number}")
    def note(self, number: int) -> str:
        return f"note {number}"

    @mcp_prompt
    def greet(self, name: str) -> str:
        return f"Greet {name}."
