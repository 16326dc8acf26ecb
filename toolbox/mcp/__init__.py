"""MCP servers as tools of services, and a container's tools as an MCP server (extra `mcp`)."""

from __future__ import annotations

from .errors import McpConnectionError, McpError, McpTimeoutError
from .events import McpEvent, McpListener, McpLog, McpProgress
from .offering import mcp_toolbox, mcp_tools
from .servers import McpServer, McpServers, mcp_server
from .serving import mcp_server_of, serve_stdio

__all__ = [
    "McpConnectionError",
    "McpError",
    "McpEvent",
    "McpListener",
    "McpLog",
    "McpProgress",
    "McpServer",
    "McpServers",
    "McpTimeoutError",
    "mcp_server",
    "mcp_server_of",
    "mcp_toolbox",
    "mcp_tools",
    "serve_stdio",
]
