"""Sessions that have only read, and are kept all the same: snapshots, driver connections, and listeners to commits."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, Engine, event, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session, sessionmaker

from tests.databases.open_sessions.desk import Desk, Order, Program, Start, User, Watching, session_of
from toolbox import Container, OpenTransactionError, ToolboxSettings, sql
from toolbox.settings import SqlSettings

pytestmark = pytest.mark.anyio


# --- snapshots


COUNT = {"postgresql": "SELECT count(*) FROM pg_class", "sqlite": "SELECT count(*) FROM sqlite_schema"}


@contextlib.asynccontextmanager
async def started(engine: AsyncEngine, **options: Any) -> AsyncIterator[Program]:
    """A program with this engine."""
    model, settings = Watching(), ToolboxSettings(sql=SqlSettings(**options))
    container = Container(models={"default": model}, settings=settings).register_instance(engine, AsyncEngine)
    async with container.register(sql.session, Desk):
        model.engines.append(engine)
        yield Program(container, model)


async def is_kept(program: Program) -> bool:
    """Read, ask the model, and return True if the transaction went on."""
    async with program.container.request_scope():
        session = await session_of(program)
        await session.execute(text(COUNT[program.model.engines[0].dialect.name]))
        assert await program.ask() == int(session.in_transaction())
        return session.in_transaction()


Way = Callable[[str, str], contextlib.AbstractAsyncContextManager[AsyncEngine]]


def of_the_engine(url: str, level: str) -> Any:
    return sql.open_engine(url, isolation_level=level)


@contextlib.asynccontextmanager
async def of_its_options(url: str, level: str) -> AsyncIterator[AsyncEngine]:
    async with sql.open_engine(url) as engine:
        yield engine.execution_options(isolation_level=level)


@contextlib.contextmanager
def database_with(url: str, setting: str, value: str) -> Iterator[None]:
    with psycopg.connect(url, autocommit=True) as connection:
        database = f"ALTER DATABASE {connection.info.dbname}"
        connection.execute(f"{database} SET {setting} = '{value}'")
        yield
        connection.execute(f"{database} RESET {setting}")


@contextlib.asynccontextmanager
async def of_the_server(url: str, level: str) -> AsyncIterator[AsyncEngine]:
    plain = url.replace("+asyncpg", "").replace("+psycopg", "")
    with database_with(plain, "default_transaction_isolation", level.lower()):
        async with sql.open_engine(url) as engine:
            yield engine


def of_the_connection_string(url: str, level: str) -> Any:
    settings = {"default_transaction_isolation": level.lower()}
    options = "-c default_transaction_isolation=" + level.lower().replace(" ", "\\ ")
    return sql.open_engine(
        url, connect_args={"server_settings": settings} if "asyncpg" in url else {"options": options}
    )


@contextlib.asynccontextmanager
async def of_new_connections(url: str, level: str) -> AsyncIterator[AsyncEngine]:
    async with sql.open_engine(url) as engine:

        @event.listens_for(engine.sync_engine, "connect")
        def set_level(connection: Any, _: Any) -> None:
            cursor = connection.cursor()
            cursor.execute(f"SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL {level}")
            cursor.close()
            connection.commit()

        yield engine


@contextlib.asynccontextmanager
async def of_each_transaction(url: str, level: str) -> AsyncIterator[AsyncEngine]:
    async with sql.open_engine(url) as engine:

        @event.listens_for(engine.sync_engine, "begin")
        def set_level(connection: Connection) -> None:
            connection.exec_driver_sql(f"SET TRANSACTION ISOLATION LEVEL {level}")

        yield engine


WAYS = [
    of_the_engine,
    of_its_options,
    of_the_server,
    of_the_connection_string,
    of_new_connections,
    of_each_transaction,
]


def with_driver(url: str, driver: str) -> str:
    return url.replace("postgresql:", f"postgresql+{driver}:")


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("way", WAYS)
async def test_a_session_that_reads_a_snapshot_is_kept(
    way: Way, level: str, driver: str, postgres_url: str, warnings: list[str]
) -> None:
    async with way(with_driver(postgres_url, driver), level) as engine, started(engine) as program:
        assert await is_kept(program)
        assert await is_kept(program)
    [warning] = warnings
    assert f"isolation level {level}" in warning
    assert "read again after" in warning


@pytest.mark.parametrize("way", WAYS)
async def test_a_session_that_reads_what_is_committed_is_released(
    way: Way, postgres_url: str, warnings: list[str]
) -> None:
    async with way(with_driver(postgres_url, "asyncpg"), "READ COMMITTED") as engine, started(engine) as program:
        assert not await is_kept(program)
        assert not await is_kept(program)
    assert warnings == []


async def test_a_session_without_transactions_is_released(postgres_url: str, warnings: list[str]) -> None:
    async with sql.open_engine(postgres_url, isolation_level="AUTOCOMMIT") as engine, started(engine) as program:
        assert not await is_kept(program)
    assert warnings == []


async def test_with_the_setting_raise_a_snapshot_is_an_error_and_nothing_is_sent(postgres_url: str) -> None:
    engine_of = sql.open_engine(postgres_url, isolation_level="SERIALIZABLE")
    async with engine_of as engine, started(engine, while_a_model_works="raise") as program:
        with pytest.raises(OpenTransactionError, match="isolation level SERIALIZABLE"):
            await is_kept(program)
        assert program.model.requests == []


async def test_a_listener_may_choose_another_level_for_each_transaction(postgres_url: str) -> None:
    levels = iter(["READ COMMITTED", "REPEATABLE READ", "READ COMMITTED", "SERIALIZABLE"])
    async with sql.open_engine(postgres_url) as engine, started(engine) as program:

        @event.listens_for(engine.sync_engine, "begin")
        def set_level(connection: Connection) -> None:
            connection.exec_driver_sql(f"SET TRANSACTION ISOLATION LEVEL {next(levels)}")

        assert [await is_kept(program) for _ in range(4)] == [False, True, False, True]


async def test_a_synchronous_session_that_reads_a_snapshot_is_kept(postgres_url: str, warnings: list[str]) -> None:
    def ask() -> None:
        with sql.open_sync_engine(postgres_url, isolation_level="SERIALIZABLE") as engine:
            container = Container(models={"default": Watching()}).register_instance(engine, Engine)
            with container.register(sql.sync_session, Desk), container.request_scope():
                session = container.get(Session)
                session.execute(text("SELECT count(*) FROM pg_class"))
                asyncio.run_coroutine_threadsafe(container.get(Desk).chat("?"), loop).result()
                assert session.in_transaction()

    loop = asyncio.get_running_loop()
    await asyncio.to_thread(ask)
    assert len(warnings) == 1


def log_of(postgres: Any) -> str:
    return Path(postgres.log).read_text(encoding="utf-8", errors="replace")


async def test_the_server_is_asked_for_its_level_once_per_engine(postgres_url: str, postgres: Any) -> None:
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(database_with(postgres_url, "log_statement", "all"))
        engine = await stack.enter_async_context(sql.open_engine(postgres_url))
        program = await stack.enter_async_context(started(engine))
        before = log_of(postgres)
        assert not await is_kept(program)
        asked = log_of(postgres)[len(before) :]
        for _ in range(3):
            assert not await is_kept(program)
        async with started(engine.execution_options(some="option")) as other:
            assert not await is_kept(other)
        later = log_of(postgres)[len(before) + len(asked) :]
    assert "show transaction isolation level" in asked
    assert "show transaction isolation level" not in later
    assert later.count("SELECT count(*)") == 4


async def test_a_serializable_program_does_not_pay_more_than_there_is(postgres_url: str, warnings: list[str]) -> None:
    async with sql.open_engine(postgres_url, isolation_level="SERIALIZABLE") as engine, started(engine) as program:
        async with engine.begin() as connection:
            await connection.execute(text("CREATE TABLE payments (amount INTEGER)"))

        async def pay(amount: int) -> None:
            async with program.container.request_scope():
                session = await session_of(program)
                paid = await session.scalar(text("SELECT coalesce(sum(amount), 0) FROM payments"))
                await program.ask()
                await both_asked.wait()
                if paid + amount <= 100:
                    await session.execute(text("INSERT INTO payments VALUES (:amount)"), {"amount": amount})
                    await session.commit()

        both_asked = asyncio.Barrier(2)
        outcomes = await asyncio.gather(pay(80), pay(80), return_exceptions=True)

        async with engine.connect() as connection:
            assert await connection.scalar(text("SELECT sum(amount) FROM payments")) == 80
        assert [type(each) for each in outcomes if each is not None] == [DBAPIError]
    assert len(warnings) == 1


async def test_a_snapshot_of_sqlite_is_released(sqlite_url: str, warnings: list[str]) -> None:
    async with sql.open_engine(sqlite_url, isolation_level="SERIALIZABLE") as engine, started(engine) as program:
        assert not await is_kept(program)
    assert warnings == []


async def test_a_failed_transaction_whose_level_cannot_be_asked_is_kept(postgres_url: str, warnings: list[str]) -> None:
    async with sql.open_engine(postgres_url) as engine, started(engine) as program:
        async with program.container.request_scope():
            session = await session_of(program)
            with pytest.raises(DBAPIError):
                await session.execute(text("SELECT name FROM missing"))
            assert await program.ask() == 1
            await session.rollback()
        assert not await is_kept(program)
    [warning] = warnings
    assert "a statement has failed); roll back before the call" in warning


# --- connections of the driver

INSERT = "INSERT INTO orders (user_id) VALUES (7)"


async def insert_with_driver(connection: Any) -> None:
    """Insert a row through a connection of asyncpg, or of aiosqlite."""
    await connection.execute(INSERT)


async def raw_connection(session: AsyncSession) -> None:
    raw = await (await session.connection()).get_raw_connection()
    await insert_with_driver(raw.driver_connection)


async def raw_cursor(session: AsyncSession) -> None:
    raw = await (await session.connection()).get_raw_connection()
    await session.run_sync(lambda _: raw.cursor().execute(INSERT))


async def raw_connection_of_the_second_call(session: AsyncSession) -> None:
    first, second = await session.connection(), await session.connection()
    assert first is second
    raw = await second.get_raw_connection()
    await insert_with_driver(raw.driver_connection)


async def function_with_connection(session: AsyncSession) -> None:
    connection = await session.connection()
    await connection.run_sync(lambda inner: inner.connection.cursor().execute(INSERT))


async def function_with_session(session: AsyncSession) -> None:
    await session.run_sync(lambda inner: inner.connection().connection.cursor().execute(INSERT))


async def driver_of_function(session: AsyncSession) -> None:
    driver = await (await session.connection()).run_sync(lambda inner: inner.connection.driver_connection)
    await insert_with_driver(driver)


@pytest.mark.parametrize(
    "insert",
    [
        raw_connection,
        raw_cursor,
        raw_connection_of_the_second_call,
        function_with_connection,
        function_with_session,
        driver_of_function,
    ],
)
async def test_a_session_whose_driver_connection_was_used_is_kept_until_its_transaction_ends(
    insert: Callable[[AsyncSession], Awaitable[None]], start: Start, warnings: list[str]
) -> None:
    async with start() as program, program.container.request_scope():
        session = await session_of(program)
        await session.get_one(User, 7)
        await insert(session)

        assert await program.ask() == 1

        await session.rollback()  # the request has failed
        assert (await session.scalars(select(Order.id))).all() == [1000]
        assert await program.ask() == 0
    [warning] = warnings
    assert "session.connection()" in warning
    assert "commit before the call" in warning


async def test_a_synchronous_session_whose_driver_connection_was_used_is_kept(
    start: Start, warnings: list[str]
) -> None:
    async with start() as program, program.container.request_scope():
        session = await asyncio.to_thread(program.container.get, Session)

        def insert() -> None:
            session.connection().connection.cursor().execute(INSERT)

        await asyncio.to_thread(insert)
        assert await program.ask() == 1
        await asyncio.to_thread(session.rollback)
        assert (await asyncio.to_thread(session.scalars, select(Order.id))).all() == [1000]
    assert len(warnings) == 1


# --- listeners


def of_session(program: Program, session: AsyncSession) -> Any:
    return session.sync_session


def of_all_sessions(program: Program, session: AsyncSession) -> Any:
    return Session


def of_other_sessions(program: Program, session: AsyncSession) -> Any:
    return sessionmaker()


def of_engine(program: Program, session: AsyncSession) -> Any:
    return session.get_bind()


def of_all_engines(program: Program, session: AsyncSession) -> Any:
    return Engine


LISTENERS = [
    *((of_session, name) for name in ("before_commit", "after_commit", "after_transaction_end")),
    *((of_all_sessions, name) for name in ("before_commit", "after_commit", "after_transaction_end")),
    (of_engine, "commit"),
    (of_all_engines, "commit"),
]


@contextlib.contextmanager
def listening(target: Any, name: str, called: list[str]) -> Iterator[None]:
    def listen(*_: Any) -> None:
        called.append(name)

    event.listen(target, name, listen)
    try:
        yield
    finally:
        event.remove(target, name, listen)


@pytest.mark.parametrize(("target_of", "name"), LISTENERS)
async def test_a_session_with_a_listener_to_its_commits_is_kept(
    target_of: Any, name: str, start: Start, warnings: list[str]
) -> None:
    called: list[str] = []
    async with start() as program, program.container.request_scope():
        session = await session_of(program)
        with listening(target_of(program, session), name, called):
            await session.get_one(User, 7)
            called.clear()
            assert await program.ask() == 1
            assert called == []
            await session.commit()
            assert called == [name]
        await session.get_one(User, 7)
        assert await program.ask() == 0  # the program listens no more
    [warning] = warnings
    assert f"the program listens to {name}" in warning
    assert "commit before the call" in warning


async def test_a_listener_of_the_connection_is_one_to_commits_too(start: Start, warnings: list[str]) -> None:
    called: list[str] = []
    async with start() as program, program.container.request_scope():
        session = await session_of(program)

        @event.listens_for(session.sync_session, "after_begin")
        def listen(_: Session, __: Any, connection: Connection) -> None:
            event.listen(connection, "commit", lambda _: called.append("commit"))

        await session.get_one(User, 7)
        assert await program.ask() == 1
        assert called == []
    assert "the program listens to commit" in warnings[0]


@pytest.mark.parametrize(
    ("target_of", "name"),
    [
        (of_other_sessions, "after_commit"),
        (of_session, "after_begin"),
        (of_session, "after_rollback"),
        (of_session, "before_flush"),
        (of_session, "do_orm_execute"),
        (of_engine, "begin"),
        (of_engine, "before_cursor_execute"),
        (of_engine, "rollback"),
        (of_engine, "checkin"),
    ],
)
async def test_a_session_with_other_listeners_is_released(
    target_of: Any, name: str, start: Start, warnings: list[str]
) -> None:
    async with start() as program, program.container.request_scope():
        session = await session_of(program)
        with listening(target_of(program, session), name, []):
            await session.get_one(User, 7)
            assert await program.ask() == 0
    assert warnings == []


@pytest.mark.parametrize(("target", "name"), [(Session, "before_flush"), (User, "before_update")])
async def test_listeners_to_a_flush_may_change_what_has_the_same_value_again(
    target: Any, name: str, start: Start, warnings: list[str]
) -> None:
    def listen(*arguments: Any) -> None:
        changed = arguments[-1] if name == "before_update" else next(iter(arguments[0].dirty))
        changed.questions += 1

    async with start() as program, program.container.request_scope():
        session = await session_of(program)
        user = await session.get_one(User, 7)
        event.listen(target, name, listen)
        try:
            user.name = "Ada"
            assert await program.ask() == 1
            await session.rollback()
        finally:
            event.remove(target, name, listen)
        assert await session.scalar(select(User.questions)) == 0
    assert "changed objects of users" in warnings[0]
