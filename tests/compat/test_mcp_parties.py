"""MCP servers and clients of other authors, from the package indexes, which `make compat` installs."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest
from fastapi import FastAPI

from tests.compat.conftest import node_module, python_with
from tests.compat.served import Served
from tests.mcp.uvicorn_server import serving
from toolbox import AiMessage, Container, ImageContent, Result, register_ai_service
from toolbox.mcp import McpServer, McpServers, mcp_server, mcp_toolbox
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox_fastapi import install, mount_mcp

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parent.parent.parent
HERE = Path(__file__).parent
SCOPE = "@modelcontextprotocol"


@register_ai_service
class Assistant(Protocol):
    @mcp_toolbox("party")
    async def chat(self, question: str) -> Result[str]: ...


@asynccontextmanager
async def assistant(server: McpServer, *calls: Any) -> AsyncIterator[tuple[Container, ScriptedChatModel]]:
    model = ScriptedChatModel([AiMessage(None, calls), "done"])
    container = Container(models={"default": model}).register(Assistant)
    async with container.register_instance(server, name="party"):
        yield container, model


def node_server(name: str, *arguments: str, **options: Any) -> McpServer:
    script = node_module(f"{SCOPE}/server-{name}") / "dist" / "index.js"
    return mcp_server("party", command="node", args=[str(script), *arguments], **options)


def python_server(package: str, *arguments: str, **options: Any) -> McpServer:
    python = python_with(f"mcp-{package}")
    return mcp_server("party", command=python, args=["-m", f"mcp_server_{package}", *arguments], **options)


# --- servers


async def test_everything() -> None:
    calls = [
        tool_call("echo", {"message": "hällo"}),
        tool_call("get-tiny-image", {}),
        tool_call("get-structured-content", {"location": "Chicago"}),
        tool_call("list_resources"),
    ]
    async with assistant(node_server("everything", "stdio", expose_resources=True), *calls) as (container, model):
        result = await container.get(Assistant).chat("q")
        server = container.get(McpServers).server("party")
        messages = await server.prompt_messages("args-prompt", {"city": "Bern"})
        resources = await server.resources()
        assert (await server.read_resource(str(resources[0].uri))).contents

    echoed, image, structured, listed = result.tool_executions
    assert "hällo" in echoed.result
    assert any(isinstance(each, ImageContent) for each in model.requests[1].messages[3].contents)  # type: ignore[union-attr]  # a result
    assert structured.result_object["temperature"]  # type: ignore[index]  # an object
    assert json.loads(listed.result)
    assert "Bern" in messages[0].text
    assert not image.is_error


async def test_filesystem_with_approval_by_annotations(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("milk")
    read = tool_call("read_text_file", {"path": str(tmp_path / "note.txt")})
    write = tool_call("write_file", {"path": str(tmp_path / "note.txt"), "content": "bread"})
    server = node_server("filesystem", str(tmp_path), approval="destructive")
    async with assistant(server, read, write) as (container, _):
        result = await container.get(Assistant).chat("q")

    assert "milk" in result.tool_executions[0].result
    assert [each.tool_name for each in result.pending] == ["write_file"]
    assert (tmp_path / "note.txt").read_text() == "milk"


async def test_memory(tmp_path: Path) -> None:
    entity = {"name": "Ann", "entityType": "person", "observations": ["likes soup"]}
    calls = [tool_call("create_entities", {"entities": [entity]}), tool_call("search_nodes", {"query": "soup"})]
    server = node_server("memory", env={"MEMORY_FILE_PATH": str(tmp_path / "memory.jsonl")})
    async with assistant(server, *calls) as (container, _):
        result = await container.get(Assistant).chat("q")

    assert [each.is_error for each in result.tool_executions] == [False, False]
    assert "likes soup" in result.tool_executions[1].result


async def test_sequential_thinking() -> None:
    thought = {"thought": "Hm", "nextThoughtNeeded": False, "thoughtNumber": 1, "totalThoughts": 1}
    async with assistant(node_server("sequential-thinking"), tool_call("sequentialthinking", thought)) as (
        container,
        _,
    ):
        result = await container.get(Assistant).chat("q")

    assert not result.tool_executions[0].is_error


async def test_time() -> None:
    async with assistant(python_server("time"), tool_call("get_current_time", {"timezone": "Asia/Tokyo"})) as (c, _):
        result = await c.get(Assistant).chat("q")

    assert "Asia/Tokyo" in result.tool_executions[0].result


async def test_git(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec("git", "init", "-q", str(tmp_path))
    assert await process.wait() == 0
    (tmp_path / "note.txt").write_text("milk")
    status = tool_call("git_status", {"repo_path": str(tmp_path)})
    async with assistant(python_server("git", "--repository", str(tmp_path)), status) as (container, _):
        result = await container.get(Assistant).chat("q")

    assert "note.txt" in result.tool_executions[0].result


async def test_fetch() -> None:
    app = FastAPI()

    @app.get("/page")
    def page() -> dict[str, str]:
        return {"soup": "hot"}

    async with serving(app) as base:
        server = python_server("fetch", "--ignore-robots-txt", "--allow-private-ips")
        async with assistant(server, tool_call("fetch", {"url": f"{base}/page"})) as (container, _):
            result = await container.get(Assistant).chat("q")
            prompts = [each.name for each in await container.get(McpServers).server("party").prompts()]

    assert "hot" in result.tool_executions[0].result
    assert prompts == ["fetch"]


# --- clients


def check(found: dict[str, Any]) -> None:
    """Check what a client got."""
    assert found["tools"] == ["add", "count"]
    assert found["sum"]["structuredContent"] == {"result": 5}
    assert found["sum"]["content"][0]["text"] == "5"
    assert found["wrong"]["isError"] is True
    assert "a: " in found["wrong"]["content"][0]["text"]
    assert found["counted"]["content"][0]["text"] == "three"
    assert found["progress"] == [[1, 3], [2, 3], [3, 3]]
    heard = found.get("heard", found["progress"])
    assert heard
    assert heard == found["progress"][: len(heard)]
    assert found["resources"] == ["notes://plan.pdf"]
    assert found["templates"] == ["notes://{number}"]
    assert found["note"]["contents"][0]["text"] == "note 7"
    assert found["prompts"] == ["greet"]
    assert found["prompt"]["messages"][0]["content"]["text"] == "Greet Ann."


async def output_of(*command: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, cwd=ROOT
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()[-3000:]
    found: dict[str, Any] = json.loads(output.decode().strip().splitlines()[-1])
    return found


@asynccontextmanager
async def served() -> AsyncIterator[str]:
    app, container = FastAPI(), Container()
    install(app, container)
    mount_mcp(app, container, [Served])
    async with serving(app) as base:
        yield f"{base}/mcp"


@pytest.mark.parametrize("transport", ["http", "stdio"])
async def test_the_typescript_sdk(transport: str) -> None:
    sdk = node_module(f"{SCOPE}/sdk")
    client = ("node", str(HERE / "sdk_client.js"), str(sdk))
    if transport == "stdio":
        # The SDK's client passes only a few variables on to the server.
        start = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import runpy; "
        script = f"{start}runpy.run_module('tests.compat.stdio_server', run_name='__main__')"
        check(await output_of(*client, sys.executable, "-c", script))
        return
    async with served() as url:
        check(await output_of(*client, url))


async def test_the_client_of_fastmcp() -> None:
    python = python_with("fastmcp")
    async with served() as url:
        check(await output_of(python, str(HERE / "fastmcp_client.py"), url))
