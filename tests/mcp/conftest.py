"""MCP servers for the tests: our own in process-wide scripts, and those that others wrote, installed into a cache."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CACHE = Path(__file__).parent.parent.parent / ".cache" / "mcp"
NPM = ["@modelcontextprotocol/server-everything", "@modelcontextprotocol/server-filesystem"]


@pytest.fixture(scope="session")
def node_servers() -> Path:
    """The folder with the servers from npm."""
    modules = CACHE / "node_modules"
    if not all((modules / name).is_dir() for name in NPM):
        if shutil.which("npm") is None or shutil.which("node") is None:
            pytest.skip("node and npm are not installed")
        CACHE.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--prefix", str(CACHE), "--no-audit", "--no-fund", "--ignore-scripts", *NPM]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        if done.returncode:
            pytest.skip(f"npm could not install them: {done.stderr[-300:]}")
    return modules / "@modelcontextprotocol"


@pytest.fixture(scope="session")
def time_server() -> tuple[str, ...]:
    """The command of `mcp-server-time`, from PyPI, in an environment of its own."""
    environment = CACHE / f"python{sys.version_info.major}.{sys.version_info.minor}"
    python = environment / "bin" / "python"
    if not (environment / ".installed").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "mcp-server-time"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        if done.returncode:
            pytest.skip(f"pip could not install it: {done.stderr[-300:]}")
        (environment / ".installed").touch()
    return (str(python), "-m", "mcp_server_time")
