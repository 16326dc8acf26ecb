"""Leases of runs and conversations: renewed while tools use all connections, and not believed from a wrong clock."""

import asyncio
import logging
from typing import Protocol

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from toolbox import ChatMemoryKey, Container, Inject, register_ai_service, sql, tool
from toolbox.runs import RunId, RunStore
from toolbox.sql import SqlChatMemoryStore, SqlRunStore
from toolbox.testing import ScriptedChatModel, tool_call

from .test_lost_connections import run_of

pytestmark = pytest.mark.anyio

HOUR = 3_600_000  # milliseconds
ONE_CONNECTION = {"pool_size": 1, "max_overflow": 0}


async def renewed(engine: AsyncEngine, column: str, table: str, times: int = 3) -> None:
    """Wait until a lease was renewed so often."""
    seen: set[int] = set()
    while len(seen) <= times:
        async with engine.connect() as connection:
            found = await connection.scalar(text(f"SELECT {column} FROM {table}"))
        if found is not None:
            seen.add(found)
        await asyncio.sleep(0.02)


async def test_the_leases_of_runs_are_renewed_while_their_tools_use_all_connections(postgres_url: str) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    class Bank:
        @tool
        @sql.transactional
        async def pay(self, session: Inject[AsyncSession]) -> str:
            await session.execute(text("INSERT INTO ledger VALUES (5)"))
            begun.set()
            await go_on.wait()
            return "paid"

    @register_ai_service(tools=Bank, durable=True)
    class Transfers(Protocol):
        async def transfer(self, run: RunId, order: str) -> str: ...

    async with (
        sql.open_engine(postgres_url, **ONE_CONNECTION) as engine,
        sql.open_engine(postgres_url) as other,
        asyncio.timeout(60),
    ):
        async with engine.begin() as connection:
            await connection.execute(text("CREATE TABLE ledger (cents INTEGER)"))
        container = Container(models={"default": ScriptedChatModel([tool_call("pay"), "done"])}, take_over_runs=False)
        container.register_instance(engine, AsyncEngine).register_instance(SqlRunStore(engine, 1.0), RunStore)
        async with container.register(sql.session, Transfers):
            call = asyncio.create_task(container.get(Transfers).transfer("run", "order"))
            await begun.wait()
            await renewed(other, "until", "toolbox_runs_leases")
            assert await SqlRunStore(other, 1.0).acquire("run", "another") is None
            go_on.set()
            assert await call == "done"


async def test_the_lease_of_a_conversation_is_renewed_while_tools_use_all_connections(postgres_url: str) -> None:
    key = ChatMemoryKey("shop.Assistant", "1")
    async with (
        sql.open_engine(postgres_url, **ONE_CONNECTION) as engine,
        sql.open_engine(postgres_url) as other,
        asyncio.timeout(60),
    ):
        store = SqlChatMemoryStore(engine, lease=1.0)
        async with store.lock(key), engine.connect():
            await renewed(other, "until", "toolbox_conversations_leases")
        await store.stop()


async def test_the_wish_to_stop_is_found_while_tools_use_all_connections(postgres_url: str) -> None:
    key = ChatMemoryKey("shop.Assistant", "1")
    async with (
        sql.open_engine(postgres_url, **ONE_CONNECTION) as engine,
        sql.open_engine(postgres_url) as other,
        asyncio.timeout(60),
    ):
        store = SqlChatMemoryStore(engine)
        async with store.lock(key), engine.connect():
            assert await SqlChatMemoryStore(other).ask_to_stop(key, "ann")
            assert await store.wishes() == {key: "ann"}
        await store.stop()


async def test_connections_for_renewals_are_closed_when_no_run_is_left(postgres_url: str) -> None:
    others = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'here' AND pid <> pg_backend_pid()"
    here = {"connect_args": {"server_settings": {"application_name": "here"}}}
    async with sql.open_engine(postgres_url, **ONE_CONNECTION, **here) as engine, asyncio.timeout(60):
        store = SqlRunStore(engine)
        await store.create(run_of("run"), owner="me")
        async with store.renewing():
            assert await store.renew("run", 1)
            async with engine.connect() as connection:
                assert await connection.scalar(text(others)) == 1
        async with engine.connect() as connection:
            while await connection.scalar(text(others)):
                await connection.commit()


@pytest.mark.parametrize("table", ["runs", "conversations"])
async def test_a_lease_further_away_than_two_leases_has_ended(sqlite_url: str, table: str) -> None:
    key = ChatMemoryKey("shop.Assistant", "1")
    async with sql.open_engine(sqlite_url) as engine:
        runs, conversations = SqlRunStore(engine, 60.0), SqlChatMemoryStore(engine, lease=60.0)
        await runs.create(run_of("run"), owner="an hour ahead")
        await conversations.take(key, "an hour ahead", 60.0)

        async def taken() -> bool:
            if table == "runs":
                is_listed = await runs.lapsed() == ["run"]
                assert (await runs.acquire("run", "next") is not None) is is_listed
                return is_listed
            return await conversations.take(key, "next", 60.0)

        assert not await taken()
        async with engine.begin() as connection:
            for each in ("toolbox_runs_leases", "toolbox_conversations_leases"):
                await connection.execute(text(f"UPDATE {each} SET until = until + :hour"), {"hour": HOUR})
        assert await taken()
        assert not await taken()


async def test_warnings_about_leases_of_conversations_have_no_statements(
    sqlite_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values of a statement are the token of the lease, with which others could write."""
    warned = asyncio.Event()

    class Noting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warned.set()

    monkeypatch.setattr(logging.getLogger("toolbox.memory"), "handlers", [Noting()])
    async with sql.open_engine(sqlite_url) as engine, asyncio.timeout(60):
        store = SqlChatMemoryStore(engine, lease=0.3)
        async with store.lock(ChatMemoryKey("shop.Assistant", "1")):
            async with engine.begin() as connection:
                await connection.execute(text("DROP TABLE toolbox_conversations_leases"))
            await warned.wait()
        await store.stop()

    assert "cannot renew the lease" in caplog.text
    assert "cannot release the lease" in caplog.text
    assert "no such table: toolbox_conversations_leases" in caplog.text
    assert "SQL:" not in caplog.text
    assert "parameters" not in caplog.text
