"""The tables of the library are created once and migrated, also by concurrent processes."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest
from sqlalchemy import DDL, Column, Connection, Integer, inspect, text

from toolbox import ChatMemoryKey, IllegalConfigurationError, UserMessage, sql
from toolbox.sql.migrations import Step, migrate
from toolbox.sql.run_tables import RunTables

pytestmark = pytest.mark.anyio


def first(connection: Connection) -> None:
    connection.execute(text("CREATE TABLE things (name VARCHAR)"))
    connection.execute(text("INSERT INTO things VALUES ('of the first version')"))


def second(connection: Connection) -> None:
    connection.execute(text("ALTER TABLE things ADD COLUMN size INTEGER"))
    connection.execute(text("UPDATE things SET size = 1"))


def broken(connection: Connection) -> None:
    connection.execute(text("UPDATE things SET size = 2"))
    raise LookupError("half done")


async def test_a_database_applies_each_migration_once(database_url: str) -> None:
    async with sql.open_engine(database_url) as engine:
        await migrate(engine, "things", [first])
        await migrate(engine, "things", [first, second])
        await migrate(engine, "things", [first, second])

        async with engine.connect() as connection:
            assert (await connection.execute(text("SELECT * FROM things"))).all() == [("of the first version", 1)]
            assert (await connection.execute(text("SELECT * FROM toolbox_schemas"))).all() == [("things", 2)]


async def test_concurrent_migrations_wait_for_each_other(database_url: str) -> None:
    async with sql.open_engine(database_url) as one, sql.open_engine(database_url) as other:
        await asyncio.gather(*(migrate(engine, "things", [first, second]) for engine in (one, other) * 4))

        async with one.connect() as connection:
            assert (await connection.execute(text("SELECT * FROM things"))).all() == [("of the first version", 1)]


@pytest.mark.parametrize(
    "options",
    [
        {"isolation_level": "SERIALIZABLE"},
        {"isolation_level": "REPEATABLE READ"},
        {"isolation_level": "AUTOCOMMIT"},
        {"connect_args": {"server_settings": {"default_transaction_isolation": "serializable"}}},
    ],
)
async def test_processes_with_another_isolation_level_can_migrate_at_once(
    postgres_url: str, options: dict[str, Any]
) -> None:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(sql.open_engine(postgres_url, **options)) for _ in range(6)]
        stores = [sql.SqlRunStore(each) for each in engines]
        conversations = [sql.SqlChatMemoryStore(each) for each in engines]
        await asyncio.gather(*(migrate(each, "things", [first, second]) for each in engines))
        await asyncio.gather(*(each.open() for each in stores), *(each.ready() for each in conversations))

        async with engines[0].connect() as connection:
            assert (await connection.execute(text("SELECT * FROM things"))).all() == [("of the first version", 1)]


async def test_a_database_without_new_migrations_is_opened_while_another_program_writes(database_url: str) -> None:
    writing = "SELECT pg_advisory_xact_lock(0x746F6F6C626F78)" if "postgresql" in database_url else "BEGIN IMMEDIATE"
    async with sql.open_engine(database_url) as one, sql.open_engine(database_url) as other:
        await migrate(one, "things", [first])
        with sql.open_sync_engine(database_url) as writer, writer.connect() as connection:
            connection.connection.cursor().execute(writing)
            async with asyncio.timeout(20):
                await migrate(other, "things", [first])


async def test_a_step_that_fails_leaves_nothing(database_url: str) -> None:
    async with sql.open_engine(database_url) as engine:
        with pytest.raises(LookupError):
            await migrate(engine, "things", [first, second, broken])

        await migrate(engine, "things", [first, second])
        async with engine.connect() as connection:
            assert (await connection.execute(text("SELECT * FROM things"))).all() == [("of the first version", 1)]


async def test_an_older_release_leaves_a_newer_database_alone(database_url: str) -> None:
    async with sql.open_engine(database_url) as engine:
        await migrate(engine, "things", [first, second])

        with pytest.raises(IllegalConfigurationError, match="version 2, but this release supports versions up to 1"):
            await migrate(engine, "things", [first])


async def test_stores_in_one_database_can_use_separate_tables(database_url: str) -> None:
    key = ChatMemoryKey("shop.Assistant", "1")
    async with sql.open_engine(database_url) as engine:
        one, other = sql.SqlChatMemoryStore(engine), sql.SqlChatMemoryStore(engine, table="other_conversations")
        await asyncio.gather(one.update_messages(key, [UserMessage("a")]), other.update_messages(key, []))

        assert list(await one.get_messages(key)) == [UserMessage("a")]
        assert list(await other.get_messages(key)) == []
        async with engine.connect() as connection:
            found = (await connection.scalars(text("SELECT name FROM toolbox_schemas"))).all()
        assert sorted(found) == ["other_conversations", "toolbox_conversations"]


class NextRunTables(RunTables):
    """The tables of runs in a release that adds a column, as the page of `toolbox.sql.migrations` shows it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.runs.append_column(Column("priority", Integer))

    def steps(self) -> tuple[Step, ...]:
        def add_priority(connection: Connection) -> None:
            connection.execute(DDL(f"ALTER TABLE {self.name} ADD COLUMN priority INTEGER"))

        return (*super().steps(), add_priority)


async def test_a_release_that_adds_a_column_opens_old_and_new_databases(database_url: str) -> None:
    async with sql.open_engine(database_url) as engine:
        await migrate(engine, "old_runs", RunTables("old_runs").steps())
        for name in ("old_runs", "new_runs"):
            tables = NextRunTables(name)
            await migrate(engine, name, tables.steps())
            async with engine.connect() as connection:
                columns = await connection.run_sync(lambda found, name=name: inspect(found).get_columns(name))
                assert [each["name"] for each in columns] == [each.name for each in tables.runs.columns]
