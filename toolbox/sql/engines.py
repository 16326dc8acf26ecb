"""From an address to an engine: the driver, SQLite's transactions, a database that lasts as long as its engine.

Not here: engines and sessions as beans (`producers`).
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

from ..di.marks import checks_settings, produces
from ..errors import IllegalConfigurationError, Problem
from ..settings import SqlSettings, ToolboxSettings

FOR_WRITING = {"toolbox_for_writing": True}
"""Execution options of a connection whose next transaction is going to write.

SQLite refuses a transaction that has read and then wants to write, if another one has written in between. One that
says so when it begins waits for its turn.
"""

_SQLITE_PATIENCE = 30.0  # seconds that a connection waits for another one's write

# Drivers by database, the first installed one is taken.
_ASYNC = {"sqlite": ("aiosqlite",), "postgresql": ("asyncpg", "psycopg")}
_SYNC = {"sqlite": ("pysqlite",), "postgresql": ("psycopg", "psycopg2")}
_MODULES = {"pysqlite": "sqlite3"}


@asynccontextmanager
async def open_engine(url: str | URL, **options: Any) -> AsyncIterator[AsyncEngine]:
    """Open an asynchronous engine and dispose it at the end; `options` are those of `create_async_engine`.

    Connections are tested before use (`pool_pre_ping=True`), because database servers and firewalls close idle ones. A
    `url` without a driver gets an installed one. `sqlite://` is a database of its own that is gone in the end.
    """
    with _database(_read(url), _ASYNC, _SYNC) as address:
        engine = create_async_engine(address, **_options(address, options))
        _prepare(engine.sync_engine)
        try:
            yield engine
        finally:
            await engine.dispose()


@contextmanager
def open_sync_engine(url: str | URL, **options: Any) -> Iterator[Engine]:
    """Open a synchronous engine; the same for `def` code."""
    with _database(_read(url), _SYNC, _ASYNC) as address:
        engine = create_engine(address, **_options(address, options))
        _prepare(engine)
        try:
            yield engine
        finally:
            engine.dispose()


# --- the address


def address_problems(url: str, *, asynchronous: bool) -> Iterator[Problem]:
    """Yield what would keep an engine from being opened, without opening one."""
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
        yield Problem("the database's address", what, f"install it: pip install {error.name}")


def _is_in_memory(url: URL) -> bool:
    return url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:")


def _read(url: str | URL) -> URL:
    try:
        address = make_url(url)
        # The name libpq also goes by, in what hosting services hand out.
        database, plus, driver = address.drivername.partition("+")
        return address.set(drivername=f"postgresql{plus}{driver}") if database == "postgres" else address
    except ArgumentError:
        problem = Problem("the database's address", "it is no URL", "write one such as sqlite:///shop.db")
    # Outside of the handler, so that no password in it is shown.
    raise IllegalConfigurationError([problem])


@contextmanager
def _database(url: URL, own: dict[str, tuple[str, ...]], others: dict[str, tuple[str, ...]]) -> Iterator[URL]:
    url = _with_driver(url, own, others)
    if not _is_in_memory(url):
        _check_place(url)
        yield url
        return
    # In memory, all connections would have to be one connection, and two sessions one transaction.
    with TemporaryDirectory(prefix="toolbox-", ignore_cleanup_errors=True) as folder:
        yield url.set(database=str(Path(folder, "database.sqlite")))


def _check_place(url: URL) -> None:
    """Refuses what the database's library would refuse with the first connection, and with fewer words."""
    try:
        url.get_dialect()
    except NoSuchModuleError:
        what, fix = "SQLAlchemy knows no database of this name", "write sqlite:///… or postgresql://…"
        raise IllegalConfigurationError([Problem(f"the database {url.drivername}", what, fix)]) from None
    folder = Path(url.database or "").parent
    if url.get_backend_name() == "sqlite" and not str(url.database).startswith("file:") and not folder.is_dir():
        problem = Problem(
            f"the database {url.database}", f"there is no folder {str(folder)!r}", "make it, or mend the URL"
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
    # Without a level, the driver leaves the beginning of transactions to us: by itself it begins them only when
    # something is written, so that what was read before may have changed by then.
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
        # Who reads does not keep others from writing, and sees what there was when it began. It is said once for a
        # database; while one connection says it, another cannot.
        with suppress(locked):
            cursor.execute("PRAGMA journal_mode = WAL")
        cursor.close()

    @event.listens_for(engine, "invalidate")
    def given_up(connection: Any, record: Any, error: BaseException | None) -> None:
        # Closing ends a transaction only when its last statement is no longer remembered, by a traceback for example.
        if isinstance(error, asyncio.CancelledError):
            with suppress(asyncio.CancelledError):  # cancelled once more; the driver goes on by itself
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
    """The engine of the settings' database (`TOOLBOX_SQL__URL`), disposed when the container stops."""
    async with open_engine(_url(settings.sql), **_settings_options(settings.sql)) as made:
        yield made


@produces(scope="call")
async def session(engine: AsyncEngine) -> AsyncIterator[AsyncSession]:
    """A session for each tool call, or for the request outside of one; what was not committed is rolled back."""
    made = AsyncSession(engine, expire_on_commit=False)
    try:
        yield made
    finally:
        await made.close()


@checks_settings(_sync_engine_problems)
@produces(scope="application")
def sync_engine(settings: ToolboxSettings) -> Iterator[Engine]:
    """The same engine for `def` tools, which run on threads."""
    with open_sync_engine(_url(settings.sql), **_settings_options(settings.sql)) as made:
        yield made


@produces(scope="call")
def sync_session(engine: Engine) -> Iterator[Session]:
    """The same session for `def` tools; made, used and closed on the tool's thread."""
    with Session(engine, expire_on_commit=False) as made:
        yield made


def _url(settings: SqlSettings) -> str:
    if settings.url is None:
        fix = "set TOOLBOX_SQL__URL, such as sqlite:///shop.db or postgresql://user:password@host/shop"
        raise IllegalConfigurationError([Problem("toolbox.sql", "no database is named", fix)])
    return settings.url.get_secret_value()


def _settings_options(settings: SqlSettings) -> dict[str, Any]:
    recycle = -1 if settings.pool_recycle is None else settings.pool_recycle
    return {**settings.model_dump(exclude={"url", "pool_recycle"}), "pool_recycle": recycle}
