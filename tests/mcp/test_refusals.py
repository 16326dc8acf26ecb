"""MCP servers that refuse a client or are away: what the program learns, and servers that a call cannot do without."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import httpx2
import pytest
from fastapi import FastAPI, Request, Response

from tests.mcp.uvicorn_server import serving
from toolbox import (
    AiMessage,
    Container,
    Result,
    ToolboxSettings,
    ToolExecution,
    compensate_for,
    register_ai_service,
    tool,
    toolbox,
)
from toolbox.mcp import McpConnectionError, McpServers, mcp_server, mcp_toolbox
from toolbox.runs import RunIncompatibleError, RunStore, approve
from toolbox.sql import SqlRunStore
from toolbox.testing import ScriptedChatModel, skip_time, tool_call
from toolbox_fastapi import install, mount_mcp

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]
GONE = "http://127.0.0.1:9/mcp"


class Orders:
    @tool
    def mine(self) -> str:
        """Return my orders."""
        return "one order"


@asynccontextmanager
async def locked(status: int = 401, *, after: int = 0) -> AsyncIterator[str]:
    """Serve `Orders` to anybody for `after` calls of tools; refuse all other requests."""
    app = FastAPI()
    install(app, served := Container())
    mount_mcp(app, served, [Orders])
    calls = 0

    @app.middleware("http")
    async def refuse(request: Request, call_next: Any) -> Response:
        nonlocal calls
        method = (await request.json()).get("method")
        if after and not (method == "tools/call" and calls == after):
            calls += method == "tools/call"
            answer: Response = await call_next(request)
            return answer
        return Response("no", status, headers={"WWW-Authenticate": 'Bearer error="invalid_token"'})

    async with serving(app) as base:
        yield f"{base}/mcp"


@asynccontextmanager
async def interrupted() -> AsyncIterator[tuple[str, list[bool]]]:
    """Serve `Orders`, but for the time in which the list is not empty."""
    app = FastAPI()
    install(app, served := Container())
    mount_mcp(app, served, [Orders])
    is_away: list[bool] = []

    @app.middleware("http")
    async def refuse(request: Request, call_next: Any) -> Response:
        answer: Response = Response("away", 503) if is_away else await call_next(request)
        return answer

    async with serving(app) as base:
        yield f"{base}/mcp", is_away


@pytest.mark.parametrize("status", [401, 403, 404, 500, 503])
async def test_the_error_has_the_status_of_a_server_that_refuses(status: int) -> None:
    async with (
        locked(status) as url,
        Container().register(McpServers).register_instance(mcp_server("far", url=url), name="far") as container,
    ):
        with pytest.raises(McpConnectionError, match=f"it answered with status {status}") as raised:
            await container.get(McpServers).server("far").tools()

    assert raised.value.status == status
    assert raised.value.www_authenticate == 'Bearer error="invalid_token"'
    assert raised.value.server == "far"


async def test_a_server_that_refuses_later_tells_its_status() -> None:
    async with (
        locked(after=1) as url,
        Container().register(McpServers).register_instance(mcp_server("far", url=url), name="far") as container,
    ):
        server = container.get(McpServers).server("far")
        assert (await server.call("mine", {})).content[0].text == "one order"  # type: ignore[union-attr]  # a text
        with pytest.raises(McpConnectionError, match=r"could not run mine: it answered with status 401") as raised:
            await server.call("mine", {})

    assert (raised.value.status, raised.value.www_authenticate) == (401, 'Bearer error="invalid_token"')


async def test_without_a_reply_there_is_no_status() -> None:
    container = Container().register(McpServers).register_instance(mcp_server("far", url=GONE), name="far")
    async with container:
        with pytest.raises(McpConnectionError) as raised:
            await container.get(McpServers).server("far").tools()

    assert (raised.value.status, raised.value.www_authenticate) == (None, None)


class Bank:
    def __init__(self) -> None:
        self.done: list[str] = []

    @tool
    def credit(self) -> str:
        """Credit the account."""
        self.done.append("credit")
        return "credited"

    @compensate_for("credit")
    def undo(self, execution: ToolExecution) -> None:
        self.done.append("undo")


# --- required servers


@register_ai_service
class Clerk(Protocol):
    @mcp_toolbox()
    async def chat(self, question: str) -> Result[str]: ...


def clerk(url: str, *replies: Any, take_over_runs: bool = True, **options: Any) -> Container:
    model = ScriptedChatModel(list(replies))
    container = Container(models={"default": model}, take_over_runs=take_over_runs).register(Clerk)
    return container.register_instance(mcp_server("far", url=url, **options), name="far")


@pytest.mark.parametrize("command", [None, "no-such-command"])
async def test_a_call_fails_without_a_required_server(command: str | None) -> None:
    model = ScriptedChatModel(["never asked"])
    container = Container(models={"default": model}).register(Clerk)
    place = {"url": GONE} if command is None else {"command": command}
    container.register_instance(mcp_server("far", **place, required=True), name="far")  # type: ignore[arg-type]  # texts
    async with container:
        with pytest.raises(McpConnectionError, match="MCP server 'far': cannot be reached"):
            await container.get(Clerk).chat("q")

    assert model.requests == []


async def test_a_call_continues_without_the_tools_of_a_server_that_is_not_required(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with clerk(GONE, "fine") as container:
        with caplog.at_level(logging.WARNING, "toolbox.mcp"):
            result = await container.get(Clerk).chat("q")

    assert result.content == "fine"
    assert "its tools are not offered" in caplog.text


async def test_the_environment_can_require_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLBOX_MCP__FAR__URL", GONE)
    monkeypatch.setenv("TOOLBOX_MCP__FAR__REQUIRED", "true")
    container = Container(models={"default": ScriptedChatModel(["fine"])}, settings=ToolboxSettings()).register(Clerk)
    async with container:
        with pytest.raises(McpConnectionError):
            await container.get(Clerk).chat("q")


async def test_fastapi_answers_502_for_a_required_server_that_refuses() -> None:
    async with locked() as url:
        app = FastAPI()
        install(app, container := clerk(url, required=True))

        @app.get("/ask")
        async def ask() -> str:
            return str((await container.get(Clerk).chat("q")).content)

        async with serving(app) as base, httpx2.AsyncClient() as client:
            answer = await client.get(f"{base}/ask")

    assert answer.status_code == 502
    assert answer.json()["detail"] == "A server that this needs cannot be reached."
    assert "www-authenticate" not in answer.headers


async def test_a_run_that_continues_without_a_required_server_stays_as_it_is(tmp_path: Path) -> None:
    from sqlalchemy.ext.asyncio import create_async_engine

    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/runs.db")

    def program(url: str, *replies: Any) -> Container:
        container = clerk(url, *replies, required=True, approval="all", take_over_runs=False)
        return container.register_instance(SqlRunStore(engine), as_type=RunStore)

    async with locked(after=9) as url:
        async with program(url, AiMessage(None, [tool_call("mine")])) as container:
            first = await container.get(Clerk).chat("q")
        run_id, [pending] = first.run_id or "", first.pending
        async with program(GONE) as container:
            with pytest.raises(RunIncompatibleError, match="MCP server 'far': cannot be reached"):
                await container.runs.resume(run_id, {pending.id: approve()})
        async with program(url, "one") as container:
            result = await container.runs.resume(run_id, {})
    await engine.dispose()

    assert result.content == "one"
    assert [each.result for each in result.tool_executions] == ["one order"]


@pytest.mark.parametrize("required", [True, False])
async def test_a_run_is_tried_again_until_its_server_is_back(
    tmp_path: Path, required: bool, caplog: pytest.LogCaptureFixture
) -> None:
    from sqlalchemy.ext.asyncio import create_async_engine

    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/runs.db")

    def program(url: str, *replies: Any) -> Container:
        container = clerk(url, *replies, required=required, approval="all")
        return container.register_instance(SqlRunStore(engine), as_type=RunStore)

    async with interrupted() as (url, is_away):
        async with program(url, AiMessage(None, [tool_call("mine")])) as container:
            first = await container.get(Clerk).chat("q")
        run_id, [pending] = first.run_id or "", first.pending
        is_away.append(True)
        async with program(url, "one") as container:
            with pytest.raises(RunIncompatibleError):
                await container.runs.resume(run_id, {pending.id: approve()})
            while "cannot continue run" not in caplog.text:
                await skip_time(container, timedelta(minutes=1))
                await asyncio.sleep(0.01)  # the container tries it by itself
            is_away.clear()
            while (await container.runs.get(run_id)).status == "running":
                await skip_time(container, timedelta(minutes=1))
                await asyncio.sleep(0.01)
            result = await container.runs.result(run_id)
    await engine.dispose()

    assert result.content == "one"
    assert caplog.text.count("cannot continue run") == 1


@register_ai_service(compensate_on_failure=True)
class Payer(Protocol):
    @toolbox(Bank)
    @mcp_toolbox()
    async def pay(self, wish: str) -> Result[str]: ...


async def test_a_run_is_cancelled_and_undone_without_a_required_server(tmp_path: Path) -> None:
    from sqlalchemy.ext.asyncio import create_async_engine

    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/runs.db")

    def program(url: str, bank: Bank, *replies: Any) -> Container:
        container = Container(models={"default": ScriptedChatModel(list(replies))}).register(Payer)
        container.register_instance(bank)
        container.register_instance(mcp_server("far", url=url, required=True, approval="all"), name="far")
        return container.register_instance(SqlRunStore(engine), as_type=RunStore)

    async with locked(after=9) as url:
        calls = AiMessage(None, [tool_call("credit"), tool_call("mine")])
        async with program(url, bank := Bank(), calls) as container:
            first = await container.get(Payer).pay("Pay.")
        assert bank.done == ["credit"]
    async with program(GONE, bank := Bank()) as container:
        run = await container.runs.cancel(first.run_id or "", "enough")
    await engine.dispose()

    assert run.status == "cancelled"
    assert bank.done == ["undo"]
