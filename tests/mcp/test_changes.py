"""MCP servers over streamable HTTP, and servers whose tools change."""

import asyncio
from pathlib import Path
from typing import Protocol

import pytest
from fastapi import FastAPI

from tests.mcp.uvicorn_server import serving
from tests.mcp.warm_servers import stdio_command
from toolbox import AiMessage, Container, Result, register_ai_service, tool
from toolbox.mcp import McpServers, mcp_server, mcp_toolbox
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox_fastapi import install, mount_mcp

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]  # starts processes
GROWING = Path(__file__).parent / "growing_server.py"


@tool("Adds")
def add(a: int, b: int) -> int:
    return a + b


@register_ai_service
class Assistant(Protocol):
    @mcp_toolbox("remote")
    async def chat(self, question: str) -> Result[str]: ...


async def test_http_servers_offer_their_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    app, serving_container = FastAPI(), Container()
    install(app, serving_container)
    mount_mcp(app, serving_container, [add])
    async with serving(app) as base:
        monkeypatch.setenv("TOOLBOX_MCP__REMOTE__URL", f"{base}/mcp/")
        asks = AiMessage(None, [tool_call("add", {"a": 2, "b": 3})])
        container = Container(models={"default": ScriptedChatModel([asks, "five"])}).register(Assistant)
        async with container:
            result = await container.get(Assistant).chat("2 + 3?")

    assert result.tool_executions[0].result == "5"


async def test_tools_that_a_server_adds_later_are_offered() -> None:
    command, *arguments = stdio_command(GROWING)
    growing = mcp_server("remote", command=command, args=arguments, connect_timeout=110)
    grow = AiMessage(None, [tool_call("grow")])
    model = ScriptedChatModel([grow, "grown", "seen"])
    container = Container(models={"default": model}).register(Assistant).register_instance(growing, name="remote")
    async with container:
        await container.get(Assistant).chat("grow")
        server = container.get(McpServers).server("remote")
        async with asyncio.timeout(60):
            while len(await server.tools()) < 2:  # the notification can arrive after the reply
                await server.call("grow", {})
        await container.get(Assistant).chat("look")

    assert [each.name for each in model.requests[0].tool_specifications] == ["grow"]
    assert [each.name for each in model.requests[2].tool_specifications] == ["grow", "grown"]
