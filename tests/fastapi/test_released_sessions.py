"""Sessions of requests while a model works: of endpoints, identities and streams; and the dev UI's timeline."""

import json
from typing import Any, Protocol

import pytest
from fastapi import FastAPI
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from toolbox import Container, TokenStream, ToolboxSettings, register_ai_service, sql, tool
from toolbox.security import SecurityIdentity
from toolbox.settings import SqlSettings
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox_fastapi import DevUi, Inject, install, sse

pytestmark = pytest.mark.anyio

HERE = {"host": "localhost"}
READ = text("SELECT count(*) FROM sqlite_schema")


class Books:
    def __init__(self, session: AsyncSession) -> None:
        self.session = session

    @tool
    async def count(self) -> int:
        """Count the tables."""
        return int(await self.session.scalar(READ) or 0)


@register_ai_service(tools=Books)
class Desk(Protocol):
    async def chat(self, question: str) -> str: ...
    def stream(self, question: str) -> TokenStream: ...


class Shelves:
    def __init__(self, session: AsyncSession, desk: Desk) -> None:
        self.session, self.desk = session, desk

    @tool
    async def look(self) -> str:
        """Read, and ask another service."""
        await self.session.scalar(READ)
        return await self.desk.chat("?")


@register_ai_service(tools=Shelves)
class Agent(Protocol):
    async def chat(self, question: str) -> str: ...


async def find_user(session: Inject[AsyncSession]) -> SecurityIdentity:
    await session.scalar(READ)
    return SecurityIdentity("ada")


class Program:
    def __init__(self, *replies: Any, setting: Any = "release", **options: Any) -> None:
        self.used: list[int] = []
        model = ScriptedChatModel([self.noting(each) for each in replies])
        settings = ToolboxSettings(sql=SqlSettings(url="sqlite://", while_a_model_works=setting))
        self.container = Container(models={"default": model}, settings=settings)
        self.container.register(sql.engine, sql.session, Books, Desk, Shelves, Agent)
        self.app = FastAPI()
        install(self.app, self.container, **options)

    def noting(self, reply: Any) -> Any:
        def note(_: object) -> Any:
            self.used.append(self.container.get(AsyncEngine).pool.checkedout())  # type: ignore[attr-defined]
            return reply

        return note


async def test_the_session_of_an_endpoint_and_of_its_identity_is_released(running: Any) -> None:
    program = Program("ok", identity=find_user)

    @program.app.get("/ask")
    async def ask(session: Inject[AsyncSession], desk: Inject[Desk], user: Inject[SecurityIdentity]) -> str:
        await session.scalar(READ)
        return f"{user.name}: {await desk.chat('?')}"

    @program.app.get("/only-identity")
    async def only_identity(desk: Inject[Desk]) -> str:
        return await desk.chat("?")

    async with running(program.app) as client:
        assert (await client.get("/ask")).json() == "ada: ok"
        program.container.models["default"].will_reply(program.noting("ok"))  # type: ignore[attr-defined]
        assert (await client.get("/only-identity")).json() == "ok"
    assert program.used == [0, 0]


async def test_a_stream_of_events_releases_the_session_of_its_endpoint(running: Any) -> None:
    program = Program(tool_call("count"), "done")

    @program.app.get("/stream")
    async def stream(session: Inject[AsyncSession], desk: Inject[Desk]) -> Any:
        await session.scalar(READ)
        return sse(desk.stream("?"))

    async with running(program.app) as client:
        assert "done" in (await client.get("/stream")).text
    assert program.used == [0, 0]


async def test_an_open_transaction_is_status_500(running: Any) -> None:
    program = Program("ok", setting="raise")

    @program.app.get("/ask")
    async def ask(session: Inject[AsyncSession], desk: Inject[Desk]) -> str:
        await session.execute(text("CREATE TABLE more (id INTEGER)"))
        return await desk.chat("?")

    async with running(program.app) as client:
        assert (await client.get("/ask")).status_code == 500
    assert program.used == []


async def test_the_timeline_of_the_dev_ui_shows_when_a_connection_was_given_back(running: Any) -> None:
    program = Program(tool_call("look"), "inner", "outer", dev_ui=DevUi(token=False))

    async with running(program.app) as client:
        body = {"method": "Agent.chat", "arguments": json.dumps({"question": "?"})}
        reply = await client.post("/dev-ui/api/ask", json=body, headers=HERE)
    events = [dict(line.split(": ", 1) for line in e.splitlines() if ": " in line) for e in reply.text.split("\n\n")]
    entries = [json.loads(each["data"]) for each in events if "data" in each and "event" not in each]
    shown = [each["type"] for each in entries if each.get("type") in ("model_started", "connection", "tool_started")]

    assert shown == ["model_started", "tool_started", "connection", "model_started", "model_started"]
    [released] = [each for each in entries if each.get("type") == "connection"]
    assert (released["name"], released["duration"], released["refused"]) == ("connection", 0, False)
    assert program.used == [0, 0, 0]
