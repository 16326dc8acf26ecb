"""Engines that the program creates itself, such as with `create_async_engine`, for transactional tools on SQLite."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

import pytest
from sqlalchemy import Engine, StaticPool, create_engine, event, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from toolbox import ChatMemoryStore, Container, IllegalConfigurationError, Inject, register_ai_service, sql, tool
from toolbox.runs import RunId, RunStore
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


class Counter:
    """Reads a number and then writes it."""

    @tool
    @sql.transactional
    async def count(self, session: Inject[AsyncSession]) -> int:
        number = await session.scalar(text("SELECT number FROM counter")) + 1
        await asyncio.sleep(0)
        await session.execute(text("UPDATE counter SET number = :number"), {"number": number})
        return int(number)

    @tool
    @sql.transactional
    def count_on_a_thread(self, session: Inject[Session]) -> int:
        number = session.scalar(text("SELECT number FROM counter")) + 1
        session.execute(text("UPDATE counter SET number = :number"), {"number": number})
        return int(number)


@register_ai_service(tools=Counter, durable=True)
class Counting(Protocol):
    async def count(self, run: RunId, order: str) -> str: ...


def begin_by_itself(engine: AsyncEngine) -> None:
    """Begin transactions as SQLAlchemy's documentation on SQLite says."""

    @event.listens_for(engine.sync_engine, "connect")
    def connected(connection: Any, record: Any) -> None:
        connection.isolation_level = None

    @event.listens_for(engine.sync_engine, "begin")
    def begun(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN")


@asynccontextmanager
async def counting(engine: AsyncEngine, tool_name: str, times: int) -> AsyncIterator[Container]:
    """A started container whose calls count once each."""
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE counter (number INTEGER)"))
        await connection.execute(text("INSERT INTO counter VALUES (0)"))
    blocking = create_engine(engine.url.set(drivername="sqlite"))

    def reply(request: Any) -> Any:
        return "done" if len(request.messages) > 1 else tool_call(tool_name)

    container = Container(models={"default": ScriptedChatModel([reply] * 2 * times)}, take_over_runs=False)
    container.register_instance(engine, AsyncEngine).register_instance(blocking, Engine)
    container.register_instance(sql.SqlRunStore(engine), RunStore)
    async with container.register(sql.session, sql.sync_session, Counting):
        yield container
    blocking.dispose()
    await engine.dispose()


@pytest.mark.parametrize("kind", ["plain", "autocommit", "begins by itself"])
@pytest.mark.parametrize("tool_name", ["count", "count_on_a_thread"])
async def test_tools_that_read_and_then_write_lose_no_update(sqlite_url: str, kind: str, tool_name: str) -> None:
    options = {"isolation_level": "AUTOCOMMIT"} if kind == "autocommit" else {}
    engine = create_async_engine(sqlite_url.replace("sqlite:", "sqlite+aiosqlite:"), **options)
    if kind == "begins by itself":
        begin_by_itself(engine)
    async with counting(engine, tool_name, 12) as container:
        service = container.get(Counting)
        await asyncio.gather(*(service.count(f"run {number}", "order") for number in range(12)))

        async with engine.connect() as connection:
            assert await connection.scalar(text("SELECT number FROM counter")) == 12


async def test_other_settings_of_the_programs_engine_stay(sqlite_url: str) -> None:
    engine = create_async_engine(sqlite_url.replace("sqlite:", "sqlite+aiosqlite:"))
    async with counting(engine, "count", 1) as container:
        await container.get(Counting).count("run", "order")

        async with engine.connect() as connection:
            raw: Any = (await connection.get_raw_connection()).driver_connection
            assert await connection.scalar(text("PRAGMA foreign_keys")) == 0
            assert await connection.scalar(text("PRAGMA journal_mode")) == "delete"
            assert raw.isolation_level == ""
            assert not raw.in_transaction  # as ever: a transaction begins with its first write


@pytest.mark.parametrize("address", ["sqlite+aiosqlite://", "sqlite+aiosqlite:///{path}"])
async def test_an_engine_whose_sessions_share_a_connection_is_a_problem_at_start(sqlite_url: str, address: str) -> None:
    path = sqlite_url.removeprefix("sqlite:///")
    engine = create_async_engine(address.format(path=path), poolclass=StaticPool)

    @register_ai_service(durable=True)
    class Writer(Protocol):
        async def write(self, run: RunId, order: str) -> str: ...

    container = Container(models={"default": ScriptedChatModel([])}).register(Writer)
    container.register_instance(engine, AsyncEngine).register_instance(sql.SqlRunStore(engine), RunStore)
    with pytest.raises(IllegalConfigurationError, match="share one connection"):
        async with container:
            pass
    await engine.dispose()


@pytest.mark.parametrize("is_bean", [True, False], ids=["a bean", "an instance"])
async def test_a_store_of_conversations_refuses_such_an_engine_too(is_bean: bool) -> None:
    engine = create_async_engine("sqlite+aiosqlite://", poolclass=StaticPool)
    container = Container().register_instance(engine, AsyncEngine)
    if is_bean:
        container.register(sql.SqlChatMemoryStore)
    else:
        container.register_instance(sql.SqlChatMemoryStore(engine), ChatMemoryStore)
    with pytest.raises(IllegalConfigurationError, match="share one connection"):
        async with container:
            pass
    await engine.dispose()


async def test_an_engine_is_prepared_by_the_store_of_conversations_too(sqlite_url: str) -> None:
    engine = create_async_engine(sqlite_url.replace("sqlite:", "sqlite+aiosqlite:"))
    sql.SqlChatMemoryStore(engine)
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE counter (number INTEGER)"))
        await connection.execute(text("INSERT INTO counter VALUES (0)"))

    async def count() -> None:
        async with AsyncSession(engine) as session:
            await Counter().count(session)

    await asyncio.gather(*(count() for _ in range(8)))

    async with engine.connect() as connection:
        assert await connection.scalar(text("SELECT number FROM counter")) == 8
    await engine.dispose()
