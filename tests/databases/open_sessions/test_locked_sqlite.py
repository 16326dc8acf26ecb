"""SQLite: a session that has read before another one wrote cannot write any more, and what the page says about it."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Protocol

import pytest
from fastapi import FastAPI, Header
from fastapi.testclient import TestClient
from sqlalchemy import text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from tests.databases.open_sessions.desk import Desk, Program, Start, User, session_of
from toolbox import Container, Inject, MemoryId, ToolboxSettings, register_ai_service, sql
from toolbox.security import SecurityIdentity
from toolbox.settings import SqlSettings
from toolbox.testing import ScriptedChatModel
from toolbox_fastapi import install

pytestmark = pytest.mark.anyio

COUNT = text("UPDATE users SET questions = questions + 1")


@pytest.fixture
def database_url(sqlite_url: str) -> str:
    return sqlite_url


async def another_writes(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.execute(COUNT)


@sql.transactional
async def count(session: AsyncSession) -> None:
    await session.execute(COUNT)


async def nothing(_: Program, __: AsyncSession) -> None: ...


async def commit(_: Program, session: AsyncSession) -> None:
    await session.commit()


async def ask(program: Program, _: AsyncSession) -> None:
    await program.ask()


Between = Callable[[Program, AsyncSession], Awaitable[None]]


@pytest.mark.parametrize(("between", "is_written"), [(nothing, False), (commit, True), (ask, True)])
@pytest.mark.parametrize("write", [lambda session: session.execute(COUNT), count], ids=["session", "transactional"])
async def test_a_session_can_write_after_a_read_that_was_ended(
    write: Any, between: Between, is_written: bool, start: Start
) -> None:
    async with start() as program, program.container.request_scope():
        session = await session_of(program)
        await session.get_one(User, 7)
        await between(program, session)
        await another_writes(program.container.get(AsyncEngine))

        if is_written:
            await write(session)
        else:
            with pytest.raises(OperationalError, match="database is locked"):
                await write(session)
        await session.rollback()


async def with_the_session_of_the_request(
    session: Inject[AsyncSession], user: Annotated[int, Header()]
) -> SecurityIdentity:
    return SecurityIdentity((await session.get_one(User, user)).name)


async def with_a_session_that_ends(engine: Inject[AsyncEngine], user: Annotated[int, Header()]) -> SecurityIdentity:
    async with sql.open_session(engine) as session:
        return SecurityIdentity((await session.get_one(User, user)).name)


async def with_a_commit(session: Inject[AsyncSession], user: Annotated[int, Header()]) -> SecurityIdentity:
    found = await session.get_one(User, user)
    await session.commit()
    return SecurityIdentity(found.name)


@pytest.mark.parametrize(
    ("identity", "status"),
    [(with_the_session_of_the_request, 500), (with_a_session_that_ends, 200), (with_a_commit, 200)],
)
async def test_an_endpoint_can_write_if_its_identity_ended_its_read(
    identity: Any, status: int, start: Start, sqlite_url: str
) -> None:
    app = FastAPI()

    @app.post("/count")
    async def count(session: Inject[AsyncSession], engine: Inject[AsyncEngine], who: Inject[SecurityIdentity]) -> str:
        await another_writes(engine)
        await session.execute(COUNT)
        await session.commit()
        return who.name

    async with start():  # creates the tables
        pass
    settings = ToolboxSettings(sql=SqlSettings(url=sqlite_url))
    container = Container(models={"default": ScriptedChatModel([])}, settings=settings)
    install(app, container.register(sql.engine, sql.session, Desk), identity=identity)
    with TestClient(app, raise_server_exceptions=False) as client:
        assert client.post("/count", headers={"user": "7"}).status_code == status


@register_ai_service
class Rooms(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> str: ...


async def create_a_conversation(container: Container) -> None:
    await container.conversations.create(Rooms, "7")


async def start_a_run(container: Container) -> None:
    await container.runs.start(Rooms.chat, "7", "Hi")


async def write_in_another_session(container: Container) -> None:
    async with container.request_scope():
        await count(await container.aget(AsyncSession))


Writes = Callable[[Container], Awaitable[None]]


@sql.transactional
async def count_and(session: AsyncSession, ends: bool, write: Writes, container: Container) -> None:
    await count_before(session, ends, write, container)


async def count_before(session: AsyncSession, ends: bool, write: Writes, container: Container) -> None:
    await session.execute(COUNT)
    if ends:
        await session.commit()
    await write(container)


async def ask_with_memory(container: Container) -> None:
    await container.get(Rooms).chat("7", "Hi")


@pytest.mark.parametrize("write", [create_a_conversation, start_a_run, write_in_another_session, ask_with_memory])
@pytest.mark.parametrize(
    ("around", "holds"), [(count_and, "@transactional count_and"), (count_before, "UPDATE … users")]
)
@pytest.mark.parametrize("ends", [False, True])
async def test_a_write_that_waits_for_a_session_around_it_is_named_at_once(
    write: Writes,
    around: Callable[..., Awaitable[None]],
    holds: str,
    ends: bool,
    start: Start,
    sqlite_url: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with start():  # creates the tables
        pass
    async with sql.open_engine(sqlite_url, connect_args={"timeout": 0}) as engine:
        container = Container(models={"default": ScriptedChatModel(["Hi"])}).register_instance(engine, AsyncEngine)
        async with container.register(sql.session, *sql.stores, Rooms), container.request_scope():
            counting = around(await container.aget(AsyncSession), ends, write, container)
            if ends:
                await counting
            else:
                with pytest.raises(Exception, match=r"database is locked|a store failed"):
                    await counting

    warnings = [each.getMessage() for each in caplog.records if each.name == "toolbox.sql"]
    if ends:
        assert warnings == []
    else:
        # A call of a model may also warn that a session keeps its transaction while the model works.
        [waits] = [each for each in warnings if "a write to SQLite" in each]
        assert f"waits for the transaction of a session ({holds})" in waits
