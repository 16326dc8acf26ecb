"""Opens engines: drivers, checks of URLs, what SQLite needs, and separate connections for leases.

Not here: engines and sessions as beans (`sessions`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

from sqlalchemy import (
    URL,
    Connection,
    Engine,
    QueuePool,
    SingletonThreadPool,
    StaticPool,
    create_engine,
    event,
    make_url,
)
from sqlalchemy.exc import ArgumentError, NoSuchModuleError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from ..di.scopes import request_hooks
from ..errors import IllegalConfigurationError, Problem
from ..request_hooks import HOLDS_DATABASE

logger = logging.getLogger("toolbox.sql")

FOR_WRITING = {"toolbox_for_writing": True}
"""Execution options of a connection whose next transaction will write.

SQLite rejects a write in a transaction that has read before, if another transaction has written in between. A
transaction that begins as a writer waits for its turn instead.
"""

_SQLITE_PATIENCE = 30.0  # seconds that a connection waits for a write of another

# Drivers by database; the first installed one is used.
_ASYNC = {"sqlite": ("aiosqlite",), "postgresql": ("asyncpg", "psycopg")}
_SYNC = {"sqlite": ("pysqlite",), "postgresql": ("psycopg", "psycopg2")}
_MODULES = {"pysqlite": "sqlite3"}


@asynccontextmanager
async def open_engine(url: str | URL, **options: Any) -> AsyncIterator[AsyncEngine]:
    """Open an asynchronous engine and dispose it at the end of the block.

        async with sql.open_engine("postgresql://user:password@host/shop") as engine: ...

    A `url` without a driver gets an installed one. `sqlite://` is a temporary database that is deleted at the end.
    `options` are those of `create_async_engine`. Connections to a server are tested before use (`pool_pre_ping=True`),
    because servers and firewalls close idle ones. Raises `IllegalConfigurationError` for an invalid URL or a missing
    driver.
    """
    with _check_url(_parse_url(url), _ASYNC, _SYNC) as address:
        engine = create_async_engine(address, **_choose_options(address, options))
        _prepare_engine(engine.sync_engine)
        try:
            yield engine
        finally:
            _close_returned_connections(engine.sync_engine)
            await engine.dispose()


@contextmanager
def open_sync_engine(url: str | URL, **options: Any) -> Iterator[Engine]:
    """Open a synchronous engine for `def` code and dispose it at the end of the block.

        with sql.open_sync_engine("postgresql://user:password@host/shop") as engine: ...

    `url` is as for `open_engine`, and the same errors are raised. `options` are those of `create_engine`.
    """
    with _check_url(_parse_url(url), _SYNC, _ASYNC) as address:
        engine = create_engine(address, **_choose_options(address, options))
        _prepare_engine(engine)
        try:
            yield engine
        finally:
            _close_returned_connections(engine)
            engine.dispose()


def _close_returned_connections(engine: Engine) -> None:
    """Close connections that are still in use, such as in a cancelled task, as soon as they are returned.

    `dispose` closes only those that are not in use.
    """

    @event.listens_for(engine, "checkin")
    def close_returned(connection: Any, record: Any) -> None:
        record.close()


# --- the address


def address_problems(url: str, *, asynchronous: bool) -> Iterator[Problem]:
    """Yield the problems of a database URL, without connecting."""
    drivers = (_ASYNC, _SYNC) if asynchronous else (_SYNC, _ASYNC)
    try:
        address = _set_driver(_parse_url(url), *drivers)
        if not is_in_memory(address):
            _check_place(address)
        address.get_dialect().import_dbapi()
    except IllegalConfigurationError as error:
        yield from error.problems
    except ModuleNotFoundError as error:
        what = f"the driver {error.name} is not installed"
        yield Problem("the database URL", what, f"install it: pip install {error.name}")


def is_in_memory(url: URL) -> bool:
    """Return True for an SQLite database without a file."""
    return url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:")


def _parse_url(url: str | URL) -> URL:
    try:
        address = make_url(url)
        # Hosting services often write postgres:// for postgresql://.
        database, plus, driver = address.drivername.partition("+")
        return address.set(drivername=f"postgresql{plus}{driver}") if database == "postgres" else address
    except ArgumentError:
        problem = Problem("the database URL", "invalid URL", "use a URL such as sqlite:///shop.db")
    # Raised outside of the handler, because the original error may show the password.
    raise IllegalConfigurationError([problem])


@contextmanager
def _check_url(url: URL, own: dict[str, tuple[str, ...]], others: dict[str, tuple[str, ...]]) -> Iterator[URL]:
    url = _set_driver(url, own, others)
    if not is_in_memory(url):
        _check_place(url)
        yield url
        return
    # A database in memory would need one connection for all sessions, and so one transaction.
    with TemporaryDirectory(prefix="toolbox-", ignore_cleanup_errors=True) as folder:
        yield url.set(database=str(Path(folder, "database.sqlite")))


def _check_place(url: URL) -> None:
    """Raise `IllegalConfigurationError` for an unknown database type or a missing folder of an SQLite file."""
    try:
        url.get_dialect()
    except NoSuchModuleError:
        what, fix = "unknown database type", "use sqlite:///… or postgresql://…"
        raise IllegalConfigurationError([Problem(f"the database {url.drivername}", what, fix)]) from None
    folder = Path(url.database or "").parent
    if url.get_backend_name() == "sqlite" and not str(url.database).startswith("file:") and not folder.is_dir():
        problem = Problem(
            f"the database {url.database}",
            f"the folder {str(folder)!r} does not exist",
            "create it, or correct the URL",
        )
        raise IllegalConfigurationError([problem])


def _set_driver(url: URL, own: dict[str, tuple[str, ...]], others: dict[str, tuple[str, ...]]) -> URL:
    database, _, driver = url.drivername.partition("+")
    known = own.get(database)
    if known is None or (driver and (driver in known or driver not in others[database])):
        return url
    for each in known:
        if find_spec(_MODULES.get(each, each)) is not None:
            return url.set(drivername=f"{database}+{each}")
    kind = "asynchronous" if own is _ASYNC else "synchronous"
    fix = f"install one: pip install {known[0]}"
    raise IllegalConfigurationError([Problem(f"the database {database}", f"no {kind} driver for it is installed", fix)])


# --- SQLite


def _choose_options(url: URL, options: dict[str, Any]) -> dict[str, Any]:
    if url.get_backend_name() != "sqlite":
        return {"pool_pre_ping": True, **options}
    # Without an isolation level, the driver does not begin transactions itself. It would begin them at the first write,
    # when earlier reads may be outdated.
    ours: dict[str, Any] = {"timeout": _SQLITE_PATIENCE, "isolation_level": None}
    if url.get_driver_name() == "aiosqlite":
        ours["async_creator_fn"] = _connect_to_sqlite
    return {**options, "connect_args": {**ours, **options.get("connect_args", {})}}


async def _connect_to_sqlite(*arguments: Any, **options: Any) -> Any:
    """Open a connection of aiosqlite. If the caller is cancelled, it waits until the connection is closed again.

    aiosqlite alone would leave its thread behind, which may open the file after the event loop is closed.
    """
    import aiosqlite

    created: list[Any] = []
    # A connection has a thread. Created on a daemon thread, it is a daemon thread too, and so a connection that nobody
    # closes does not keep the process alive.
    creating = Thread(target=lambda: created.append(aiosqlite.connect(*arguments, **options)), daemon=True)
    creating.start()
    creating.join()
    opening = asyncio.ensure_future(created.pop())
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        with suppress(Exception):
            await (await opening).close()
        raise


def _prepare_engine(engine: Engine) -> None:
    if engine.dialect.name == "sqlite":
        _prepare_sqlite(engine)


def _prepare_sqlite(engine: Engine) -> None:
    locked = engine.dialect.loaded_dbapi.OperationalError

    @event.listens_for(engine, "connect")
    def prepare_connection(connection: Any, record: Any) -> None:
        cursor = connection.cursor()
        cursor.execute("PRAGMA foreign_keys = ON")
        # With write-ahead logging, readers do not block writers and see a consistent state. The mode is stored in the
        # database; only one connection can set it at a time.
        with suppress(locked):
            cursor.execute("PRAGMA journal_mode = WAL")
        cursor.close()

    @event.listens_for(engine, "invalidate")
    def close_given_up(connection: Any, record: Any, error: BaseException | None) -> None:
        # Closing does not end a transaction while something, such as a traceback, refers to its last statement.
        if isinstance(error, asyncio.CancelledError):
            with suppress(asyncio.CancelledError):  # cancelled again; the driver finishes by itself
                connection.rollback()

    @event.listens_for(engine, "begin")
    def begin_transaction(connection: Connection) -> None:
        if not is_for_writing(connection):
            connection.exec_driver_sql("BEGIN")

    prepare_to_write(engine)


def prepare_to_write(engine: Engine) -> None:
    """Let the transactions of an SQLite engine begin as writers where `FOR_WRITING` is set; changes nothing else.

    Engines of other databases stay as they are, and so do those of `shares_connections`.
    """
    if engine.dialect.name != "sqlite" or shares_connections(engine):
        return
    if not event.contains(engine, "begin", _begin_as_writer):
        event.listen(engine, "begin", _begin_as_writer)


def shares_connections(engine: Engine) -> bool:
    """Return True if sessions share a connection, and so one transaction, as in an SQLite database in memory."""
    return isinstance(engine.pool, (StaticPool, SingletonThreadPool))


def address_of(engine: Engine) -> tuple[object, ...]:
    """Return what two engines of one database have in common, whatever their drivers and users are."""
    url = engine.url
    database = url.database
    if engine.dialect.name == "sqlite" and database:
        database = str(Path(database).resolve())
    return engine.dialect.name, url.host, url.port, database, tuple(sorted(url.query.items()))


def _begin_as_writer(connection: Connection) -> None:
    if not is_for_writing(connection):
        return
    # The driver, or the program's own listener, may have begun a transaction that would write only later. It is empty.
    if getattr(connection.connection.driver_connection, "in_transaction", False):
        connection.exec_driver_sql("ROLLBACK")
    _warn_of_sessions_around(connection.engine)
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _warn_of_sessions_around(engine: Engine) -> None:
    """Warn of a session of this request that holds the lock: it waits for this write, and this write for it."""
    for find_held in request_hooks(HOLDS_DATABASE):
        held: tuple[Engine, str] | None = find_held()
        if held is not None and address_of(held[0]) == address_of(engine):
            logger.warning(
                "a write to SQLite waits for the transaction of a session (%s), whose code waits for the write: SQLite "
                "lets one connection write at a time. Commit before it: conversations, runs and other sessions have "
                "their own connections.",
                held[1],
            )
            return


def is_for_writing(connection: Connection) -> bool:
    """Return True for a connection whose transaction begins as a writer, with `FOR_WRITING`."""
    return bool(connection.get_execution_options().get("toolbox_for_writing", False))


# --- one transaction of two stores

_joined: ContextVar[AsyncConnection | None] = ContextVar("toolbox.joined_connection", default=None)


@contextmanager
def joining(connection: AsyncConnection) -> Iterator[None]:
    """Let the stores of this engine write in the transaction of this connection inside the block.

    None of them ends it, and none writes elsewhere: a second connection would wait for the first one.
    """
    token = _joined.set(connection)
    try:
        yield
    finally:
        _joined.reset(token)


def joined_connection(engine: AsyncEngine) -> AsyncConnection | None:
    """Return the connection whose transaction this code joins, if it is one of this engine."""
    connection = _joined.get()
    return connection if connection is not None and shares_pool(connection.engine, engine) else None


def shares_pool(engine: AsyncEngine, other: AsyncEngine) -> bool:
    """Return True for two engines with the same connections, as those that differ only in execution options."""
    return engine.sync_engine.pool is other.sync_engine.pool


# --- connections for leases


class SeparateConnections:
    """Connections of a store that renew its leases, apart from those of its engine.

    Long transactions of tools can take all connections of the engine. If renewals waited for them, the leases would
    end, other processes would begin the same calls, and none would ever be committed.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._separate: AsyncEngine | None = None
        self._holders = 0

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Let `engine` be a separate one inside the block. The last block that ends closes its connections."""
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1
            if self._holders == 0 and self._separate is not None:
                separate, self._separate = self._separate, None
                _close_returned_connections(separate.sync_engine)
                await separate.dispose()

    @property
    def engine(self) -> AsyncEngine:
        """The engine for renewals. It has the pool's settings and `connect` listeners, but connects by itself."""
        pool = self._engine.sync_engine.pool
        if self._holders == 0 or not isinstance(pool, QueuePool):
            return self._engine  # other pools open a connection for each use, or have only one
        if self._separate is None:
            options = self._engine.get_execution_options()
            self._separate = create_async_engine(self._engine.url, pool=pool.recreate(), execution_options=options)
            prepare_to_write(self._separate.sync_engine)
        return self._separate
