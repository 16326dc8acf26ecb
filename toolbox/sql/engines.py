"""Opens engines (driver, URL checks, SQLite settings), and provides engines and sessions as beans.

Not here: committing and rolling back (`transactions`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from ..di.decorators import checks_settings, produces
from ..errors import IllegalConfigurationError, Problem
from ..settings import SqlSettings, ToolboxSettings

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
    `options` are those of `create_async_engine`. Connections are tested before use (`pool_pre_ping=True`), because
    servers and firewalls close idle ones. Raises `IllegalConfigurationError` for an invalid URL or a missing driver.
    """
    with _database(_read(url), _ASYNC, _SYNC) as address:
        engine = create_async_engine(address, **_options(address, options))
        _prepare(engine.sync_engine)
        try:
            yield engine
        finally:
            _close_returned_connections(engine.sync_engine)
            await engine.dispose()


@contextmanager
def open_sync_engine(url: str | URL, **options: Any) -> Iterator[Engine]:
    """Open a synchronous engine for `def` code and dispose it at the end of the block; see `open_engine`."""
    with _database(_read(url), _SYNC, _ASYNC) as address:
        engine = create_engine(address, **_options(address, options))
        _prepare(engine)
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
    def returned(connection: Any, record: Any) -> None:
        record.close()


# --- the address


def address_problems(url: str, *, asynchronous: bool) -> Iterator[Problem]:
    """Yield the problems of a database URL, without connecting."""
    drivers = (_ASYNC, _SYNC) if asynchronous else (_SYNC, _ASYNC)
    try:
        address = _with_driver(_read(url), *drivers)
        if not _is_in_memory(address):
            _check_place(address)
        address.get_dialect().import_dbapi()
    except IllegalConfigurationError as error:
        yield from error.problems
    except ModuleNotFoundError as error:
        what = f"the driver {error.name} is not installed"
        yield Problem("the database URL", what, f"install it: pip install {error.name}")


def _is_in_memory(url: URL) -> bool:
    return url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:")


def _read(url: str | URL) -> URL:
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
def _database(url: URL, own: dict[str, tuple[str, ...]], others: dict[str, tuple[str, ...]]) -> Iterator[URL]:
    url = _with_driver(url, own, others)
    if not _is_in_memory(url):
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


def _with_driver(url: URL, own: dict[str, tuple[str, ...]], others: dict[str, tuple[str, ...]]) -> URL:
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


def _options(url: URL, options: dict[str, Any]) -> dict[str, Any]:
    options = {"pool_pre_ping": True, **options}
    if url.get_backend_name() != "sqlite":
        return options
    # Without an isolation level, the driver does not begin transactions itself. It would begin them at the first write,
    # when earlier reads may be outdated.
    ours = {"timeout": _SQLITE_PATIENCE, "isolation_level": None}
    return {**options, "connect_args": {**ours, **options.get("connect_args", {})}}


def _prepare(engine: Engine) -> None:
    if engine.dialect.name != "sqlite":
        return
    locked = engine.dialect.loaded_dbapi.OperationalError

    @event.listens_for(engine, "connect")
    def connected(connection: Any, record: Any) -> None:
        cursor = connection.cursor()
        cursor.execute("PRAGMA foreign_keys = ON")
        # With write-ahead logging, readers do not block writers and see a consistent state. The mode is stored in the
        # database; only one connection can set it at a time.
        with suppress(locked):
            cursor.execute("PRAGMA journal_mode = WAL")
        cursor.close()

    @event.listens_for(engine, "invalidate")
    def given_up(connection: Any, record: Any, error: BaseException | None) -> None:
        # Closing does not end a transaction while something, such as a traceback, refers to its last statement.
        if isinstance(error, asyncio.CancelledError):
            with suppress(asyncio.CancelledError):  # cancelled again; the driver finishes by itself
                connection.rollback()

    @event.listens_for(engine, "begin")
    def begun(connection: Connection) -> None:
        writing = connection.get_execution_options().get("toolbox_for_writing", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writing else "BEGIN")


# --- producers


def _engine_problems(settings: ToolboxSettings) -> Iterator[Problem]:
    yield from _url_problems(settings.sql, asynchronous=True)


def _sync_engine_problems(settings: ToolboxSettings) -> Iterator[Problem]:
    yield from _url_problems(settings.sql, asynchronous=False)


def _url_problems(settings: SqlSettings, *, asynchronous: bool) -> Iterator[Problem]:
    try:
        address = _url(settings)
    except IllegalConfigurationError as error:
        yield from error.problems
    else:
        yield from address_problems(address, asynchronous=asynchronous)


@checks_settings(_engine_problems)
@produces(scope="application")
async def engine(settings: ToolboxSettings) -> AsyncIterator[AsyncEngine]:
    """Provide the engine of the database in `TOOLBOX_SQL__URL`; it is disposed when the container stops."""
    async with open_engine(_url(settings.sql), **_settings_options(settings.sql)) as made:
        yield made


@produces(scope="call")
async def session(engine: AsyncEngine) -> AsyncIterator[AsyncSession]:
    """Provide a session for each tool call, or for the request outside of tool calls.

    Uncommitted changes are rolled back when the session ends.
    """
    made = AsyncSession(engine, expire_on_commit=False)
    try:
        yield made
    finally:
        await made.close()


@checks_settings(_sync_engine_problems)
@produces(scope="application")
def sync_engine(settings: ToolboxSettings) -> Iterator[Engine]:
    """Provide the synchronous engine for `def` tools, which run on threads."""
    with open_sync_engine(_url(settings.sql), **_settings_options(settings.sql)) as made:
        yield made


@produces(scope="call")
def sync_session(engine: Engine) -> Iterator[Session]:
    """Provide a session for `def` tools; it is created, used and closed on the tool's thread."""
    with Session(engine, expire_on_commit=False) as made:
        yield made


def _url(settings: SqlSettings) -> str:
    if settings.url is None:
        fix = "set TOOLBOX_SQL__URL, such as sqlite:///shop.db or postgresql://user:password@host/shop"
        raise IllegalConfigurationError([Problem("toolbox.sql", "missing database URL", fix)])
    return settings.url.get_secret_value()


def _settings_options(settings: SqlSettings) -> dict[str, Any]:
    recycle = -1 if settings.pool_recycle is None else settings.pool_recycle
    return {**settings.model_dump(exclude={"url", "pool_recycle"}), "pool_recycle": recycle}
