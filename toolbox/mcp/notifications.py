"""What MCP servers tell the program: progress, log messages and changed tools, and the listener that receives them.

Not here: receiving them from a server (`client_session`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class McpProgress:
    """A server reports the progress of a tool call: `progress` out of `total`, if the total is known."""

    server: str
    tool: str
    progress: float
    total: float | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True)
class McpLog:
    """A server sent a log message; `level` is the MCP name of the level (`debug` … `emergency`).

    Protocol logging is deprecated in MCP. Servers are not asked for log messages; older ones send them all the same.
    """

    server: str
    level: str
    logger: str | None
    data: Any


@dataclass(frozen=True, slots=True)
class McpToolChanged:
    """A tool differs from its first listing. `changed` are parts of it: `description`, `schema`, `annotations`.

    `refused` is True if the tool is no longer offered (`pin_tools=True`).
    """

    server: str
    tool: str
    changed: tuple[str, ...]
    refused: bool = False


McpEvent: TypeAlias = McpProgress | McpLog | McpToolChanged
"""The events that an `McpListener` receives."""


class McpListener(Protocol):
    """Receives progress, log messages and changed tools of MCP servers. Implement it in a bean.

        @application_scoped
        class ProgressBar(McpListener):
            def on_mcp_event(self, event: McpEvent) -> None: ...

    `on_mcp_event` must return quickly: the connection waits for it. Exceptions are logged and ignored.
    """

    def on_mcp_event(self, event: McpEvent) -> None:
        """Handle `event`: an `McpProgress`, `McpLog` or `McpToolChanged`."""
