"""Model Context Protocol: tools of MCP servers in services, and a container's tools as an MCP server (extra `mcp`)."""

from __future__ import annotations

from ..errors import McpConnectionError, McpError, McpInputRequiredError, McpTimeoutError
from .notifications import McpEvent, McpListener, McpLog, McpProgress, McpToolChanged
from .resources import mcp_prompt, mcp_resource
from .server_tools import mcp_toolbox, mcp_tools
from .servers import McpServer, McpServers, mcp_server
from .serving import mcp_server_of, serve_stdio

__all__ = [
    "McpConnectionError",
    "McpError",
    "McpEvent",
    "McpInputRequiredError",
    "McpListener",
    "McpLog",
    "McpProgress",
    "McpServer",
    "McpServers",
    "McpTimeoutError",
    "McpToolChanged",
    "mcp_prompt",
    "mcp_resource",
    "mcp_server",
    "mcp_server_of",
    "mcp_toolbox",
    "mcp_tools",
    "serve_stdio",
]
