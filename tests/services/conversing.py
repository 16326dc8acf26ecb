"""A service with conversations, and the texts that its model gets."""

from typing import Any, Protocol

from toolbox import MemoryId, register_ai_service


def said(request: Any) -> list[str]:
    """Return the texts of a request to a model."""
    return [each.text for each in request.messages]


@register_ai_service
class Other(Protocol):
    async def chat(self, session: MemoryId[str], text: str) -> str: ...
