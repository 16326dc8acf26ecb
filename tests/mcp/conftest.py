"""MCP servers of other authors."""

from pathlib import Path

import pytest

from tests.installing import from_npm, from_pypi


@pytest.fixture(scope="session")
def node_servers() -> Path:
    """Return the folder with the servers from npm."""
    names = ("@modelcontextprotocol/server-everything", "@modelcontextprotocol/server-filesystem")
    return from_npm("mcp", *names) / "@modelcontextprotocol"


@pytest.fixture(scope="session")
def time_server() -> tuple[str, ...]:
    """Return the command of `mcp-server-time`, in a separate environment."""
    return (str(from_pypi("mcp", "mcp-server-time")), "-m", "mcp_server_time")
