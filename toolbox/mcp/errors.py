"""Errors of MCP servers: refused requests, broken connections, timeouts."""

from __future__ import annotations

from ..errors import ToolboxError


class McpError(ToolboxError):
    """An MCP server refused a request or reported an error.

    `server` is its name, `message` the text, `code` the JSON-RPC error code, or None.
    """

    def __init__(self, server: str, message: str, code: int | None = None) -> None:
        super().__init__(server, message, code)
        self.server, self.message, self.code = server, message, code

    def __str__(self) -> str:
        return self.message


class McpConnectionError(McpError):
    """An MCP server cannot be reached, or the connection broke. The next call opens a new connection."""

    def __str__(self) -> str:
        return f"MCP server {self.server!r}: {self.message}"


class McpTimeoutError(McpError, TimeoutError):
    """An MCP server did not answer in time; `timeout` of its settings is the limit."""

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.server, self.message, self.code)
