"""A container's tools as an MCP server, asked by the official client: in process, over stdio, over HTTP in FastAPI."""

import sys
from pathlib import Path
from typing import Any, Protocol

import httpx2
import pytest
from fastapi import FastAPI
from mcp import Client, MCPError, StdioServerParameters

from tests.mcp.uvicorn_server import serving
from toolbox import (
    Container,
    IllegalConfigurationError,
    ImageContent,
    Inject,
    TextContent,
    ToolAbort,
    register_ai_service,
    request_scoped,
    tool,
)
from toolbox.mcp import mcp_server_of
from toolbox.testing import ScriptedChatModel
from toolbox_fastapi import install, mount_mcp

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parent.parent.parent


@request_scoped
class Visit:
    made = 0

    def __init__(self) -> None:
        Visit.made += 1


class Tools:
    def __init__(self, visit: Visit) -> None:
        self.visit = visit

    @tool("Adds")
    def add(self, a: int, b: int = 1) -> int:
        return a + b

    @tool("Fails")
    async def fail(self) -> None:
        raise ValueError("no luck")

    @tool("Gives up")
    async def abort(self) -> None:
        raise ToolAbort("stopped by hand")

    @tool("Looks for what is not there")
    async def broken(self, missing: Inject[int | None], container: Inject[Container]) -> str:
        return str(container.get(dict))

    @tool("Draws")
    async def draw(self) -> list[TextContent | ImageContent]:
        return [TextContent("a dot"), ImageContent(data=b"\x89PNG", mime_type="image/png")]


@register_ai_service
class Expert(Protocol):
    @tool("Answers")
    async def ask(self, question: str) -> str: ...


def container() -> Container:
    return Container(models={"default": ScriptedChatModel(["forty-two"])}).register(Visit)


async def test_the_official_client_lists_and_calls_tools() -> None:
    made = container()
    server = mcp_server_of(made, [Tools, Expert])
    Visit.made = 0
    async with made, Client(server) as client:
        offered = (await client.list_tools()).tools
        added = await client.call_tool("add", {"a": 2})
        asked = await client.call_tool("ask", {"question": "?"})
        await client.call_tool("add", {"a": 2, "b": 3})

    assert [each.name for each in offered] == ["add", "fail", "abort", "broken", "draw", "ask"]
    assert offered[0].input_schema["required"] == ["a"]
    assert (added.content[0].text, added.is_error) == ("3", False)
    assert asked.content[0].text == "forty-two"
    assert Visit.made == 2


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("fail", {}, "no luck"),
        ("abort", {}, "stopped by hand"),
        ("add", {"a": "x"}, "a"),
        ("nowhere", {}, "nowhere"),
    ],
)
async def test_what_goes_wrong_in_a_tool_is_its_error_result(name: str, arguments: dict[str, Any], text: str) -> None:
    made = container()
    server = mcp_server_of(made, [Tools])
    async with made, Client(server) as client:
        result = await client.call_tool(name, arguments)

    assert result.is_error
    assert text in result.content[0].text


async def test_what_the_framework_says_of_itself_is_not_told() -> None:
    made = container()
    server = mcp_server_of(made, [Tools])
    async with made, Client(server) as client:
        with pytest.raises(MCPError) as caught:
            await client.call_tool("broken", {})

    assert "dict" not in str(caught.value)


async def test_images_go_along() -> None:
    made = container()
    server = mcp_server_of(made, [Tools])
    async with made, Client(server) as client:
        result = await client.call_tool("draw", {})

    assert [each.type for each in result.content] == ["text", "image"]


def test_what_is_no_tool_is_refused() -> None:
    with pytest.raises(IllegalConfigurationError):
        mcp_server_of(container(), [object()])


async def test_over_stdio() -> None:
    server = StdioServerParameters(
        command=sys.executable,
        args=[str(Path(__file__).parent / "counting_server.py")],
        env={"PYTHONPATH": str(ROOT)},
    )
    async with Client(server) as client:
        assert (await client.call_tool("add", {"a": 41})).content[0].text == "42"


async def test_by_the_command_line_where_nothing_printed_gets_in_between(caplog: pytest.LogCaptureFixture) -> None:
    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "toolbox.cli", "mcp", "tests.mcp.program:container", "--tools", "tests.mcp.program:Adder"],
        env={"PYTHONPATH": str(ROOT)},
        cwd=str(ROOT),
    )
    async with Client(server) as client:
        assert [each.name for each in (await client.list_tools()).tools] == ["add"]
        assert (await client.call_tool("add", {"a": 41})).content[0].text == "42"
    assert not [each for each in caplog.records if each.name.startswith("mcp")]  # it tells what it cannot read


async def test_mounted_in_fastapi_over_http() -> None:
    app, made = FastAPI(), container()
    install(app, made)
    mount_mcp(app, made, [Tools])

    @app.get("/health")
    async def health() -> str:
        return "up"

    Visit.made = 0
    async with serving(app) as base, Client(f"{base}/mcp") as client, Client(f"{base}/mcp/") as other:
        assert (await client.call_tool("add", {"a": 41})).content[0].text == "42"
        assert (await other.call_tool("fail", {})).is_error
        async with httpx2.AsyncClient(base_url=base) as http:  # no redirect to where a proxy may not lead
            assert (await http.post("/mcp", json={})).status_code == 400
            assert (await http.post("/mcp", json={}, headers={"Host": "evil.example"})).status_code == 421
            assert (await http.get("/health")).json() == "up"
    assert Visit.made == 2
    assert "/mcp" not in str(app.openapi())
