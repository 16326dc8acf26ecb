"""Engines (driver, URL checks, SQLite settings) and sessions as beans, and `@transactional`.

The decorator commits the database work of a function before it returns, or rolls all of it back.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, overload

from sqlalchemy import (
    URL,
    Connection,
    Dialect,
    Engine,
    QueuePool,
    SingletonThreadPool,
    StaticPool,
    create_engine,
    event,
    make_url,
)
from sqlalchemy.exc import ArgumentError, InvalidRequestError, NoSuchModuleError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from ..context import TRANSACTIONAL_MARK, ActiveScope, TransactionRecorder, current_invocation, current_recorder
from ..di.decorators import checks_settings, produces
from ..di.scopes import innermost_scope
from ..errors import (
    IllegalConfigurationError,
    MissingBeanError,
    Problem,
    ScopeNotActiveError,
    ToolDeferred,
    TransactionRolledBackError,
)
from ..settings import SqlSettings, ToolboxSettings
from ..tools.marks import with_effects

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

    connection: Any = aiosqlite.connect(*arguments, **options)
    # As SQLAlchemy does it: a connection that nobody closes does not keep the process alive.
    connection._thread.daemon = True
    opening = asyncio.ensure_future(connection)
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        with suppress(Exception):
            await (await opening).close()
        raise


def _prepare(engine: Engine) -> None:
    if engine.dialect.driver == "asyncpg":
        _test_connections_at_once(engine.dialect)
    if engine.dialect.name == "sqlite":
        _prepare_sqlite(engine)


def _test_connections_at_once(dialect: Dialect) -> None:
    """Let `pool_pre_ping` ask a server once. SQLAlchemy asks three times, because it also opens a transaction.

    It does this for poolers in front of servers. For them, one simple query such as this is a whole transaction.
    """
    ping = dialect.do_ping

    def ping_once(dbapi_connection: Any) -> bool:
        with suppress(Exception):
            dbapi_connection.run_async(lambda connection: connection.execute("SELECT 1"))
            return True
        return ping(dbapi_connection)  # it raises the error that makes SQLAlchemy replace the connection

    dialect.do_ping = ping_once  # type: ignore[method-assign]  # a new dialect would need another URL


def _prepare_sqlite(engine: Engine) -> None:
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
        if not _is_for_writing(connection):
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


def _begin_as_writer(connection: Connection) -> None:
    if not _is_for_writing(connection):
        return
    # The driver, or the program's own listener, may have begun a transaction that would write only later. It is empty.
    if getattr(connection.connection.driver_connection, "in_transaction", False):
        connection.exec_driver_sql("ROLLBACK")
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _is_for_writing(connection: Connection) -> bool:
    return bool(connection.get_execution_options().get("toolbox_for_writing", False))


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
    by_database = {"pool_pre_ping"} - settings.model_fields_set
    return {**settings.model_dump(exclude={"url", "pool_recycle"} | by_database), "pool_recycle": recycle}


# --- transactions


F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S", AsyncSession, Session)

_TRANSACTION = "toolbox.transaction"  # key of the current transaction in `session.info`


class _Transaction:
    """A running `@transactional` call; `failed` is True after a nested call failed."""

    __slots__ = ("failed",)

    def __init__(self) -> None:
        self.failed = False


_entered: ContextVar[tuple[_Transaction, ...]] = ContextVar("toolbox.transactions", default=())


@overload
def transactional(function: F, /) -> F: ...


@overload
def transactional(*, name: str | None = None, isolation: str | None = None) -> Callable[[F], F]: ...


def transactional(
    function: Callable[..., Any] | None = None, /, *, name: str | None = None, isolation: str | None = None
) -> Any:
    """Commit when the function returns, roll back when it raises. A nested call joins the outer transaction.

        @tool
        @sql.transactional
        async def book(self, car: int) -> Booking: ...

    An `async def` uses an `AsyncSession`, a `def` a `Session`: the one among its arguments, otherwise the one in an
    attribute of `self`, otherwise the one of the current scope. `name` selects a named session. If a nested call fails,
    the outer transaction is rolled back too; it raises `TransactionRolledBackError` if the outer function
    suppressed the failure. `isolation` is the isolation level of a new transaction, such as `"SERIALIZABLE"`.
    """
    if function is None:
        return lambda marked: _transactional(marked, name, isolation)
    return _transactional(function, name, isolation)


def _transactional(function: Callable[..., Any], name: str | None, isolation: str | None) -> Any:
    if isinstance(function, (staticmethod, classmethod)):
        raise TypeError(f"write @transactional below @{type(function).__name__}, directly on the function")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"{function.__qualname__} is a generator; @transactional supports only functions that return")
    label = function.__qualname__

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            session = _session_in_arguments(AsyncSession, label, args, kwargs) if name is None else None
            if session is None:
                session = await _awaited_session(label, name)
            with _join_or_begin(session, label) as transaction:
                if transaction is None:
                    return await function(*args, **kwargs)
                recorder = _recorder_of(awaited)
                if recorder is not None and not recorder.writes_to(_bind_of(session.sync_session)):
                    await recorder.outside()
                    recorder = None
                deferred: ToolDeferred | None = None
                try:
                    if options := _begin_options(session.sync_session, isolation):
                        await session.connection(execution_options=options)
                    with _noting_commits(session.sync_session, recorder):
                        try:
                            value = await function(*args, **kwargs)
                        except ToolDeferred as error:  # the call ends normally, and its result comes later
                            value = deferred = error
                    _check_commit_allowed(transaction, label)
                    if recorder is not None:
                        await session.flush()  # the record comes last
                        await (await session.connection()).run_sync(recorder.record_in, value)
                    await session.commit()
                except BaseException:
                    await _rollback_async(session)
                    raise
                if deferred is not None:
                    raise deferred
                return value

        return _marked(awaited)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        session = _session_in_arguments(Session, label, args, kwargs) if name is None else None
        if session is None:
            session = _session(label, name)
        with _join_or_begin(session, label) as transaction:
            if transaction is None:
                return function(*args, **kwargs)
            recorder = _recorder_of(called)
            if recorder is not None and not recorder.writes_to(_bind_of(session)):
                recorder.outside_waiting()
                recorder = None
            deferred: ToolDeferred | None = None
            try:
                if options := _begin_options(session, isolation):
                    session.connection(execution_options=options)
                with _noting_commits(session, recorder):
                    try:
                        value = function(*args, **kwargs)
                    except ToolDeferred as error:  # as above
                        value = deferred = error
                _check_commit_allowed(transaction, label)
                if recorder is not None:
                    session.flush()  # the record comes last
                    recorder.record_in(session.connection(), value)
                session.commit()
            except BaseException:
                _rollback(session)
                raise
            if deferred is not None:
                raise deferred
            return value

    return _marked(called)


def _marked(function: F) -> F:
    """Mark a transactional function, for the durable runs of which it is a tool, and for reports."""
    setattr(function, TRANSACTIONAL_MARK, function)  # itself: outer decorators copy its attributes
    return with_effects(function, "transactional")


# --- recording the result of a tool in a durable run


def _recorder_of(function: object) -> TransactionRecorder | None:
    """Return the recorder of the current tool call, if this function is the tool."""
    recorder = current_recorder.get()
    return recorder if recorder is not None and recorder.belongs_to(function) else None


def _bind_of(session: Session) -> Any:
    try:
        return session.get_bind()
    except InvalidRequestError:  # it has several engines
        return None


@contextmanager
def _noting_commits(session: Session, recorder: TransactionRecorder | None) -> Iterator[None]:
    """Note the commits of the function itself, which do not contain the record of its result."""
    if recorder is None:
        yield
        return

    def committing(committed: Session) -> None:
        if committed.get_nested_transaction() is None:
            recorder.outside_in(committed.connection())

    event.listen(session, "before_commit", committing)
    try:
        yield
    finally:
        event.remove(session, "before_commit", committing)


# --- finding the session


def _session_in_arguments(kind: type[S], label: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> S | None:
    """Return the session among the arguments, or in an attribute of `self`. Raises for more than one."""
    for candidates in ((*args, *kwargs.values()), tuple(getattr(args[0], "__dict__", {}).values()) if args else ()):
        found = {id(each): each for each in candidates if isinstance(each, kind)}
        if len(found) == 1:
            return next(iter(found.values()))
        if found:
            fix = "name each session and choose one with @transactional(name=…)"
            raise IllegalConfigurationError([Problem(label, f"found {len(found)} sessions, expected one", fix)])
    return None


async def _awaited_session(label: str, name: str | None) -> AsyncSession:
    try:
        return await _scope(label).aget(AsyncSession, name)
    except MissingBeanError as error:
        raise MissingBeanError(
            f"{error.wanted} for {label}, which is `async def`", _missing_session_hints(error, "session")
        ) from None


def _session(label: str, name: str | None) -> Session:
    try:
        return _scope(label).get(Session, name)
    except MissingBeanError as error:
        raise MissingBeanError(
            f"{error.wanted} for {label}, which is `def`", _missing_session_hints(error, "sync_session")
        ) from None


def _missing_session_hints(error: MissingBeanError, producer: str) -> tuple[str, ...]:
    return (*error.near, f"toolbox.sql.{producer}")


def _scope(label: str) -> ActiveScope:
    """Return the innermost scope. Raises `ScopeNotActiveError`."""
    scope = innermost_scope()
    if scope is None:
        raise ScopeNotActiveError(f"the session of {label}", "no scope is active")
    return scope


# --- the transaction


@contextmanager
def _join_or_begin(session: AsyncSession | Session, label: str) -> Iterator[_Transaction | None]:
    """Begin a transaction; yield None if the session is already in a transaction of this call."""
    around = session.info.get(_TRANSACTION)
    if around is not None:
        if around not in _entered.get():
            what = "its session is already in a transaction of another task or thread"
            fix = "use one session per task: call it as a tool, or in a separate request scope"
            raise IllegalConfigurationError([Problem(label, what, fix)])
        try:
            yield None
        except BaseException:
            around.failed = True
            raise
        return
    transaction = session.info[_TRANSACTION] = _Transaction()
    token = _entered.set((*_entered.get(), transaction))
    try:
        yield transaction
    finally:
        _entered.reset(token)
        del session.info[_TRANSACTION]


def _begin_options(session: Session, isolation: str | None) -> dict[str, Any]:
    """Return execution options for the connection of a new transaction; none if it has already begun."""
    if session.in_transaction():
        return {}
    writing: dict[str, Any] = {}
    if session.bind is not None and session.bind.dialect.name == "sqlite":
        prepare_to_write(session.bind.engine)
        writing = FOR_WRITING
    return {**writing, **({"isolation_level": isolation} if isolation is not None else {})}


def _check_commit_allowed(transaction: _Transaction, label: str) -> None:
    """Raise `TransactionRolledBackError` if a function that returned must not be committed."""
    if transaction.failed:
        reason = "a nested @transactional call failed; let its error through, or run the nested work in a savepoint"
        raise TransactionRolledBackError(label, f"{reason} (`session.begin_nested()`)")
    invocation = current_invocation.get()
    if invocation is not None and invocation.cancelled:  # a thread runs on after its call was cancelled
        reason = "its call timed out or was cancelled before it finished; give the tool a longer timeout="
        raise TransactionRolledBackError(label, reason)


async def _rollback_async(session: AsyncSession) -> None:
    try:
        await session.rollback()
    except Exception as error:  # the caller gets the original error
        logger.warning("cannot roll back a transaction, its connection is discarded: %s", error)


def _rollback(session: Session) -> None:
    try:
        session.rollback()
    except Exception as error:  # the caller gets the original error
        logger.warning("cannot roll back a transaction, its connection is discarded: %s", error)
