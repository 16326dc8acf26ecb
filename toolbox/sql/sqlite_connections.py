"""Connections of aiosqlite that run a statement, and read its rows, in one trip to the thread of the connection.

aiosqlite alone makes four trips: it creates a cursor, executes, fetches and closes the cursor. Each trip wakes two
threads, which takes longer than most statements.
"""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import Any

import aiosqlite

FIRST_ROWS = 100  # how many rows are read in the trip of their statement


def connect(database: Any, **options: Any) -> SqliteConnection:
    """Return a connection to a database, which opens when it is awaited; `options` are those of `sqlite3.connect`."""
    return SqliteConnection(lambda: sqlite3.connect(database, **options), iter_chunk_size=64)


class SqliteConnection(aiosqlite.Connection):
    """A connection whose cursors make as few trips as possible, and which rolls back only a transaction."""

    _is_abandoned = False
    """True after a task was cancelled while it waited for a trip, which may still be under way."""

    def cursor(self) -> SqliteCursor:  # type: ignore[override]  # it is used in the same way: awaited, or in `async with`
        """Return a cursor, without a trip."""
        return SqliteCursor(self)

    async def rollback(self) -> None:
        """Roll back; without a transaction there is nothing to do, and so no trip."""
        if self._is_abandoned or self.in_transaction:
            await super().rollback()

    async def _execute(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return await super()._execute(fn, *args, **kwargs)  # type: ignore[no-untyped-call]  # aiosqlite's own
        except Exception:
            raise
        except BaseException:
            self._is_abandoned = True
            raise


class SqliteCursor(aiosqlite.Cursor):
    """A cursor of aiosqlite. It holds rows that were read already; the others are read when they are asked for."""

    def __init__(self, connection: SqliteConnection) -> None:
        super().__init__(connection, None)  # type: ignore[arg-type]  # created in the first trip
        self._opened = connection
        self._rows: deque[Any] = deque()
        self._is_complete = True
        self._is_closed = False
        self._arraysize = 1
        self._row_factory: Any = None

    def __await__(self) -> Generator[Any, None, SqliteCursor]:
        return self
        yield

    async def execute(self, sql: str, parameters: Iterable[Any] | None = None) -> SqliteCursor:
        """Execute a statement, and read its first rows."""
        return await self._begin("execute", sql, () if parameters is None else parameters)

    async def executemany(self, sql: str, parameters: Iterable[Iterable[Any]]) -> SqliteCursor:
        """Execute a statement for each of the parameters."""
        return await self._begin("executemany", sql, parameters)

    async def executescript(self, sql_script: str) -> SqliteCursor:
        """Execute statements."""
        return await self._begin("executescript", sql_script)

    async def _execute(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await self._opened._execute(fn, *args, **kwargs)

    async def _begin(self, method: str, *arguments: Any) -> SqliteCursor:
        self._check_open()
        self._rows.clear()
        self._is_complete = False  # also if this is cancelled
        rows = await self._execute(self._begin_now, method, arguments)
        self._keep(rows, FIRST_ROWS)
        return self

    def _begin_now(self, method: str, arguments: tuple[Any, ...]) -> list[Any]:
        """Execute a statement on the connection's thread; return its first rows."""
        if self._cursor is None:
            self._cursor = self._opened._conn.cursor()
            if self._row_factory is not None:
                self._cursor.row_factory = self._row_factory
        getattr(self._cursor, method)(*arguments)
        return self._cursor.fetchmany(FIRST_ROWS)

    def _keep(self, rows: list[Any], asked: int) -> None:
        # After the last row, SQLite has ended the statement: the cursor needs not be closed.
        self._is_complete = len(rows) < asked
        self._rows.extend(rows)

    def _check_open(self) -> None:
        if self._is_closed:
            raise sqlite3.ProgrammingError("Cannot operate on a closed cursor.")

    async def fetchone(self) -> Any:
        """Return the next row, or None."""
        rows = await self.fetchmany(1)
        return rows[0] if rows else None

    async def fetchmany(self, size: int | None = None) -> list[Any]:
        """Return the next rows, up to `size` or `arraysize`."""
        self._check_open()
        count = self._arraysize if size is None else size
        if not self._is_complete and len(self._rows) < count:
            asked = max(count - len(self._rows), FIRST_ROWS)
            self._keep(await self._execute(self._cursor.fetchmany, asked), asked)
        return [self._rows.popleft() for _ in range(min(count, len(self._rows)))]

    async def fetchall(self) -> list[Any]:
        """Return all further rows."""
        self._check_open()
        if not self._is_complete:
            self._rows.extend(await self._execute(self._cursor.fetchall))
            self._is_complete = True
        rows = list(self._rows)
        self._rows.clear()
        return rows

    async def close(self) -> None:
        """Close the cursor."""
        self._is_closed = True
        self._rows.clear()
        if not self._is_complete and self._cursor is not None:
            await self._execute(self._cursor.close)
            self._is_complete = True

    @property
    def rowcount(self) -> int:
        """Return how many rows the last statement has changed; -1 for others."""
        return -1 if self._cursor is None else self._cursor.rowcount

    @property
    def lastrowid(self) -> int | None:
        """Return the id of the last row that was inserted."""
        return None if self._cursor is None else self._cursor.lastrowid

    @property
    def description(self) -> Any:
        """Return the columns of the last statement; None if it has no rows."""
        return None if self._cursor is None else self._cursor.description

    @property
    def arraysize(self) -> int:
        """Return how many rows `fetchmany` returns by default."""
        return self._arraysize

    @arraysize.setter
    def arraysize(self, value: int) -> None:
        self._arraysize = value

    @property
    def row_factory(self) -> Any:
        """Return the function that creates a row from a cursor and a tuple."""
        return self._row_factory if self._cursor is None else self._cursor.row_factory

    @row_factory.setter
    def row_factory(self, factory: Any) -> None:
        self._row_factory = factory
        if self._cursor is not None:
            self._cursor.row_factory = factory

    @property
    def connection(self) -> sqlite3.Connection:
        """Return the connection of `sqlite3`."""
        return self._opened._conn
