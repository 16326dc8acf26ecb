"""Connections to SQLite: few trips to their thread, streamed rows, cancelled statements, and the driver's own use."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from toolbox import sql
from toolbox.sql.sqlite_connections import FIRST_ROWS, SqliteConnection, connect

pytestmark = pytest.mark.anyio

NUMBERS = "WITH RECURSIVE number(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM number WHERE n < {}) SELECT n FROM number"


@pytest.fixture
async def engine(sqlite_url: str) -> AsyncIterator[AsyncEngine]:
    async with sql.open_engine(sqlite_url) as engine:
        async with engine.begin() as connection:
            await connection.execute(text("CREATE TABLE notes (number INTEGER PRIMARY KEY, note VARCHAR)"))
        yield engine


@pytest.fixture
async def driver(sqlite_url: str) -> AsyncIterator[SqliteConnection]:
    opened = connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)
    await opened
    yield opened
    await opened.close()


@pytest.fixture
def trips(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the functions that ran on threads of connections."""
    made: list[str] = []
    execute = SqliteConnection._execute

    def counted(self: SqliteConnection, fn: Any, *args: Any, **kwargs: Any) -> Any:
        made.append(fn.__name__)
        return execute(self, fn, *args, **kwargs)

    monkeypatch.setattr(SqliteConnection, "_execute", counted)
    return made


async def test_a_statement_and_the_end_of_a_transaction_are_one_trip_each(
    engine: AsyncEngine, trips: list[str]
) -> None:
    async with engine.connect() as connection:
        trips.clear()  # the test of the connection before its use
        await connection.execute(text("INSERT INTO notes VALUES (1, 'one')"))
        assert trips == ["_begin_now"] * 2  # BEGIN is a statement
        assert (await connection.execute(text("SELECT * FROM notes"))).all() == [(1, "one")]
        assert trips == ["_begin_now"] * 3
        await connection.commit()
    assert trips == ["_begin_now"] * 3 + ["commit"]  # without a transaction, there is no rollback


async def test_a_transaction_that_is_left_is_rolled_back(engine: AsyncEngine, trips: list[str]) -> None:
    async with engine.connect() as connection:
        await connection.execute(text("INSERT INTO notes VALUES (1, 'one')"))
    assert trips[-1] == "rollback"
    async with engine.connect() as connection:
        assert await connection.scalar(text("SELECT COUNT(*) FROM notes")) == 0


@pytest.mark.parametrize("count", [0, 1, FIRST_ROWS - 1, FIRST_ROWS, FIRST_ROWS + 1, 3 * FIRST_ROWS])
async def test_all_rows_are_read_however_many_there_are(engine: AsyncEngine, count: int) -> None:
    statement = text(NUMBERS.format(count) + " WHERE n <= :count")
    expected = list(range(1, count + 1))
    async with engine.connect() as connection:
        assert list(await connection.scalars(statement, {"count": count})) == expected
        streamed = await connection.stream_scalars(statement, {"count": count})
        assert [each async for each in streamed] == expected
        portions = await connection.stream_scalars(statement, {"count": count})
        assert [each async for portion in portions.partitions(30) for each in portion] == expected
    async with AsyncSession(engine) as session:
        rows = await session.stream(statement, {"count": count})
        assert await rows.scalars().all() == expected


async def test_rows_are_streamed_and_not_all_held(driver: SqliteConnection, trips: list[str]) -> None:
    read: list[int] = []
    await driver.create_function("seen", 1, lambda number: read.append(number) or number)  # type: ignore[func-returns-value]
    trips.clear()
    async with driver.cursor() as cursor:
        await cursor.execute(f"SELECT seen(n) FROM ({NUMBERS.format(10 * FIRST_ROWS)})")
        assert len(read) <= FIRST_ROWS + 1
        assert await cursor.fetchone() == (1,)
        assert await cursor.fetchmany(2) == [(2,), (3,)]
        assert await cursor.fetchmany() == [(4,)]
        assert trips == ["_begin_now"]
        cursor.arraysize = FIRST_ROWS
        assert [row[0] for row in await cursor.fetchmany()] == list(range(5, FIRST_ROWS + 5))
        assert len(read) <= 2 * FIRST_ROWS + 1
    assert trips == ["_begin_now", "fetchmany", "close"]


async def test_a_cursor_that_was_left_before_its_last_row_reads_no_more(engine: AsyncEngine, sqlite_url: str) -> None:
    rows = [{"note": f"note {number}"} for number in range(2 * FIRST_ROWS)]
    async with engine.begin() as connection:
        await connection.execute(text("INSERT INTO notes (note) VALUES (:note)"), rows)
    other = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), timeout=0, isolation_level=None)

    def is_read() -> bool:
        other.execute("INSERT INTO notes (note) VALUES ('new')")
        [(busy, *_)] = other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return bool(busy)

    for begin in ("BEGIN", "COMMIT"):  # in a transaction, and in none
        async with engine.connect() as connection:
            async with connection.stream(text("SELECT * FROM notes")) as streamed:
                await connection.exec_driver_sql(begin) if begin == "COMMIT" else None
                assert await streamed.fetchone() == (1, "note 0")
                assert is_read()
            assert is_read() == (begin == "BEGIN")
        assert not is_read()
    other.close()


async def test_rows_that_an_insert_returns_and_counts_of_rows(engine: AsyncEngine) -> None:
    rows = [{"note": f"note {number}"} for number in range(2 * FIRST_ROWS)]
    async with engine.begin() as connection:
        inserted = await connection.execute(text("INSERT INTO notes (note) VALUES ('x') RETURNING number"))
        assert inserted.all() == [(1,)]
        many = await connection.execute(text("INSERT INTO notes (note) VALUES (:note)"), rows)
        assert many.rowcount == len(rows)
        updated = await connection.execute(
            text("UPDATE notes SET note = 'y' RETURNING number"), execution_options={"preserve_rowcount": True}
        )
        assert len(updated.all()) == updated.rowcount == len(rows) + 1
        assert (await connection.execute(text("DELETE FROM notes WHERE number > 1"))).rowcount == len(rows)


async def test_a_statement_that_fails_leaves_its_connection_usable(engine: AsyncEngine) -> None:
    async with engine.connect() as connection:
        for statement in ("SELECT nothing FROM nowhere", "SELECT abs(-9223372036854775808)"):
            with pytest.raises(OperationalError):
                await connection.execute(text(statement))
            assert await connection.scalar(text("SELECT 1")) == 1


async def test_a_write_that_was_cancelled_while_it_waited_leaves_no_transaction(
    driver: SqliteConnection, sqlite_url: str
) -> None:
    path = sqlite_url.removeprefix("sqlite:///")
    with sqlite3.connect(path, isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        waiting = asyncio.ensure_future(driver.execute("BEGIN IMMEDIATE"))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not driver.in_transaction
        rolling_back = asyncio.ensure_future(driver.rollback())  # it waits until the thread has begun
        other.execute("COMMIT")
        await rolling_back
    other.close()
    assert not driver.in_transaction


async def test_the_drivers_own_cursors_work_as_documented(engine: AsyncEngine) -> None:
    async with engine.connect() as connection:
        driver: Any = (await connection.get_raw_connection()).driver_connection
        cursor = await driver.cursor()
        assert (cursor.rowcount, cursor.lastrowid, cursor.description, cursor.arraysize) == (-1, None, None, 1)
        cursor.row_factory = sqlite3.Row
        assert await cursor.execute("SELECT 1 AS one, 2 AS two") is cursor
        assert [each[0] for each in cursor.description] == ["one", "two"]
        [row] = await cursor.fetchall()
        assert row["two"] == 2
        cursor.row_factory = None
        await cursor.executemany("INSERT INTO notes VALUES (?, ?)", [(1, "one"), (2, "two")])
        assert cursor.rowcount == 2
        await cursor.execute("INSERT INTO notes VALUES (?, ?)", (7, "seven"))
        assert cursor.lastrowid == 7
        await cursor.executescript("DELETE FROM notes WHERE number = 1; DELETE FROM notes WHERE number = 2")
        await cursor.execute("SELECT number FROM notes")
        assert [each async for each in cursor] == [(7,)]
        assert await cursor.fetchone() is None
        assert cursor.connection is driver._conn
        await cursor.close()
        for use in (cursor.execute("SELECT 1"), cursor.fetchone(), cursor.fetchall()):
            with pytest.raises(sqlite3.ProgrammingError, match="closed"):
                await use
        async with driver.execute("SELECT COUNT(*) FROM notes") as counted:
            assert await counted.fetchone() == (1,)
