"""MCP servers of other authors. `make compat` installs them; without that, the tests that use them are skipped."""

from pathlib import Path

import pytest

from tests.compat.conftest import node_module, python_with


@pytest.fixture(scope="session")
def node_servers() -> Path:
    """Return the folder with the servers from npm."""
    return node_module("@modelcontextprotocol/server-everything").parent


@pytest.fixture(scope="session")
def time_server() -> tuple[str, ...]:
    """Return the command of `mcp-server-time`, in a separate environment."""
    return (python_with("mcp-time"), "-m", "mcp_server_time")
