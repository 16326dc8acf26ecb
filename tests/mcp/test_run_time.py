"""MCP servers that a program adds and removes while its container runs."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

import pytest
from fastapi import FastAPI

from tests.mcp.uvicorn_server import serving
from toolbox import AiMessage, Container, Result, ToolboxSettings, register_ai_service, tool
from toolbox.mcp import McpConnectionError, McpServers, mcp_server, mcp_toolbox
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox_fastapi import install, mount_mcp

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]
GONE = "http://127.0.0.1:9/mcp"


@register_ai_service
class Clerk(Protocol):
    @mcp_toolbox()
    async def ask(self, question: str) -> Result[str]: ...


@register_ai_service
class Bookkeeper(Protocol):
    @mcp_toolbox("books")
    async def ask(self, question: str) -> Result[str]: ...


class Archive:
    """Its tool waits until `go` is set."""

    def __init__(self) -> None:
        self.began, self.go = asyncio.Event(), asyncio.Event()

    @tool
    async def find(self) -> str:
        """Find the file."""
        self.began.set()
        await self.go.wait()
        return "found"


@asynccontextmanager
async def serving_archive(archive: Archive) -> AsyncIterator[str]:
    app = FastAPI()
    install(app, served := Container().register_instance(archive))
    mount_mcp(app, served, [Archive])
    async with serving(app) as base:
        yield f"{base}/mcp"
        archive.go.set()


def office(*replies: Any, **settings: Any) -> Container:
    model = ScriptedChatModel(list(replies))
    return Container(models={"default": model}, settings=ToolboxSettings(**settings)).register(Clerk, McpServers)


FIND = AiMessage(None, [tool_call("find")])


async def test_added_servers_are_offered_from_the_next_call_until_they_are_removed() -> None:
    archive = Archive()
    archive.go.set()
    async with serving_archive(archive) as url, office("none", FIND, "one", "none") as container:
        servers = container.get(McpServers)
        before = await container.get(Clerk).ask("q")
        await servers.add(mcp_server("archive", url=url))
        assert servers.names == ("archive",)
        during = await container.get(Clerk).ask("q")
        await servers.remove("archive")
        assert servers.names == ()
        after = await container.get(Clerk).ask("q")
        await servers.add(mcp_server("archive", url=url))
        assert [each.name for each in await servers.server("archive").tools()] == ["find"]

    assert [each.result for each in during.tool_executions] == ["found"]
    assert not before.tool_executions
    assert not after.tool_executions


async def test_names_that_are_taken_or_named_or_unknown_are_refused() -> None:
    container = office().register(Bookkeeper)
    container.register_instance(mcp_server("books", url=GONE), name="books")
    async with container:
        servers = container.get(McpServers)
        with pytest.raises(ValueError, match="there is an MCP server 'books'"):
            await servers.add(mcp_server("books", url=GONE))
        with pytest.raises(ValueError, match=r"MCP server 'books' cannot be removed: Bookkeeper\.ask names it"):
            await servers.remove("books")
        with pytest.raises(KeyError, match="other"):
            await servers.remove("other")
        with pytest.raises(KeyError, match="None"):
            await servers.remove(None)  # type: ignore[arg-type]  # the mistake
        with pytest.raises(TypeError, match=r"McpServers\.add: expected an mcp_server\(…\), got str"):
            await servers.add("books")  # type: ignore[arg-type]  # the mistake
        assert servers.names == ("books",)


async def test_only_a_required_server_is_connected_when_it_is_added() -> None:
    archive = Archive()
    async with serving_archive(archive) as url, office() as container:
        servers = container.get(McpServers)
        await servers.add(mcp_server("later", url=GONE))
        with pytest.raises(McpConnectionError):
            await servers.add(mcp_server("now", url=GONE, required=True))
        assert servers.names == ("later",)
        await servers.add(mcp_server("now", url=url, required=True))
        assert servers.names == ("later", "now")


async def test_a_running_call_of_a_removed_server_can_finish() -> None:
    archive = Archive()
    async with serving_archive(archive) as url, office(FIND, "done") as container:
        servers = container.get(McpServers)
        await servers.add(mcp_server("archive", url=url))
        asking = asyncio.create_task(container.get(Clerk).ask("q"))
        await archive.began.wait()
        removing = asyncio.create_task(servers.remove("archive"))
        await asyncio.sleep(0)
        assert servers.names == ()
        archive.go.set()
        result = await asking
        await removing

    assert [each.result for each in result.tool_executions] == ["found"]


async def test_a_call_that_takes_longer_than_the_stop_timeout_ends_with_the_connection() -> None:
    archive = Archive()
    async with serving_archive(archive) as url, office(FIND, "sorry", stop_timeout=0.2) as container:
        servers = container.get(McpServers)
        await servers.add(mcp_server("archive", url=url))
        asking = asyncio.create_task(container.get(Clerk).ask("q"))
        await archive.began.wait()
        server = servers.server("archive")
        await servers.remove("archive")
        result = await asking
        with pytest.raises(McpConnectionError, match="the server was removed"):
            await server.tools()

    assert result.content == "sorry"
    assert result.tool_executions[0].is_error


async def test_a_call_that_still_connects_reads_that_its_server_was_removed() -> None:
    silent = mcp_server("silent", command=sys.executable, args=["-c", "import sys; sys.stdin.read()"])
    async with office(stop_timeout=0.01) as container:
        servers = container.get(McpServers)
        await servers.add(silent)
        asking = asyncio.create_task(servers.server("silent").takes_input())
        await asyncio.sleep(0)  # it waits for the connection
        await servers.remove("silent")
        with pytest.raises(McpConnectionError, match="'silent': the server was removed"):
            await asking
