"""The program that has written `runs_of_version_1.sql` with the first release that stored runs."""

from typing import Protocol

from toolbox import MemoryId, register_ai_service, tool


class Refunds:
    @tool(requires_approval=True)
    def refund(self, order: str, euros: int) -> str:
        """Refund an order."""
        return f"refunded {euros} euros of {order}"


@register_ai_service(tools=Refunds)
class Desk(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> str: ...
