"""What MCP servers tell while they work: progress and log messages, and who listens to them.

Not here: the connections they come over (`connection`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class McpProgress:
    """How far a tool call has come: `progress` of `total`, where that is known."""

    server: str
    tool: str
    progress: float
    total: float | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True)
class McpLog:
    """A log message of a server; `level` as MCP names it (`debug` … `emergency`)."""

    server: str
    level: str
    logger: str | None
    data: Any


McpEvent: TypeAlias = McpProgress | McpLog


class McpListener(Protocol):
    """A bean that is told what servers tell. It must be quick: the connection waits for it."""

    def on_mcp_event(self, event: McpEvent) -> None:
        """Takes note of `event`."""
        ...
