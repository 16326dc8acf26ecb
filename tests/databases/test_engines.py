"""Engines and sessions as beans: settings, drivers, disposal."""

import asyncio
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Protocol

import pytest
from sqlalchemy import Engine, event, make_url, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from toolbox import (
    ChatRequest,
    Container,
    IllegalConfigurationError,
    Inject,
    MemoryId,
    ToolboxSettings,
    register_ai_service,
    sql,
)
from toolbox.settings import SqlSettings
from toolbox.testing import ScriptedChatModel

from .conftest import end_connections

pytestmark = pytest.mark.anyio


async def test_the_database_is_the_one_that_the_environment_names(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("TOOLBOX_SQL__URL", f"sqlite:///{tmp_path}/shop.db")
    monkeypatch.setenv("TOOLBOX_SQL__POOL_SIZE", "3")

    async with Container().register(sql.engine, sql.session, sql.sync_engine) as container:
        engine = container.get(AsyncEngine)
        assert (engine.url.drivername, engine.url.database) == ("sqlite+aiosqlite", f"{tmp_path}/shop.db")
        assert engine.pool.size() == 3  # type: ignore[attr-defined]  # of a queue pool
        assert container.get(Engine).url.drivername == "sqlite+pysqlite"


@pytest.mark.parametrize(
    ("url", "setting", "tested"),
    [
        ("sqlite://", None, False),  # it has no server that closes connections
        ("sqlite://", "true", True),
        ("postgresql://localhost/shop", None, True),
        ("postgresql://localhost/shop", "false", False),
    ],
)
async def test_connections_to_servers_are_tested_before_use(
    url: str, setting: str | None, tested: bool, monkeypatch: Any
) -> None:
    monkeypatch.setenv("TOOLBOX_SQL__URL", url)
    if setting is not None:
        monkeypatch.setenv("TOOLBOX_SQL__POOL_PRE_PING", setting)

    async with Container().register(sql.engine, sql.sync_engine) as container:
        for pool in (container.get(AsyncEngine).pool, container.get(Engine).pool):
            assert pool._pre_ping is tested


async def test_a_missing_database_url_is_reported_at_startup() -> None:
    with pytest.raises(IllegalConfigurationError, match="TOOLBOX_SQL__URL"):
        async with Container(settings=ToolboxSettings()).register(sql.engine):
            pass


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("sqlite:///nowhere/shop.db", "the folder 'nowhere' does not exist"),
        ("oracle9://host/shop", "the database oracle9"),
        ("shop.db", "invalid URL"),
    ],
)
async def test_invalid_database_urls_are_reported_at_startup(url: str, says: str) -> None:
    with pytest.raises(IllegalConfigurationError, match=says):
        async with Container(settings=ToolboxSettings(sql=SqlSettings(url=url))).register(sql.engine):
            pass
    with pytest.raises(IllegalConfigurationError, match=says), sql.open_sync_engine(url):
        pass


async def test_postgresql_may_be_called_postgres() -> None:
    async with sql.open_engine("postgres://shop@host/shop") as engine:
        assert engine.url.get_backend_name() == "postgresql"


async def test_a_missing_engine_is_a_problem_before_the_start() -> None:
    [problem] = Container().register(sql.session).check()

    assert "AsyncEngine" in problem.what


def test_a_password_is_shown_nowhere() -> None:
    settings = ToolboxSettings(sql=SqlSettings(url="postgresql://shop:secret@db/shop"))

    assert "secret" not in f"{settings!r} {settings}"


async def test_the_engine_ends_with_its_container(database_url: str) -> None:
    settings = ToolboxSettings(sql=SqlSettings(url=database_url))
    async with Container(settings=settings).register(sql.engine) as container:
        engine = container.get(AsyncEngine)
        async with engine.connect() as connection:
            assert await connection.scalar(text("SELECT 1")) == 1
        assert engine.pool.checkedin() == 1  # type: ignore[attr-defined]  # of a queue pool

    assert engine.pool.checkedin() == 0  # type: ignore[attr-defined]  # of a queue pool


async def test_a_containers_own_engine_serves_its_sessions(database_url: str) -> None:
    async with sql.open_engine(database_url) as engine:
        container = Container().register_instance(engine, AsyncEngine).register(sql.session)
        async with container, container.request_scope():
            assert await (await container.aget(AsyncSession)).scalar(text("SELECT 1")) == 1


@pytest.mark.parametrize(
    ("url", "asynchronous", "synchronous"),
    [
        ("sqlite:///x.db", "sqlite+aiosqlite", "sqlite+pysqlite"),
        ("sqlite+aiosqlite:///x.db", "sqlite+aiosqlite", "sqlite+pysqlite"),
        ("postgresql://h/d", "postgresql+asyncpg", "postgresql+psycopg"),
        ("postgresql+psycopg://h/d", "postgresql+psycopg", "postgresql+psycopg"),
        ("postgresql+asyncpg://h/d", "postgresql+asyncpg", "postgresql+psycopg"),
    ],
)
async def test_one_url_works_for_sync_and_async_engines(url: str, asynchronous: str, synchronous: str) -> None:
    pytest.importorskip("psycopg")
    async with sql.open_engine(url) as engine:
        assert engine.url.drivername == asynchronous
    with sql.open_sync_engine(url) as sync_engine:
        assert sync_engine.url.drivername == synchronous


async def test_other_databases_keep_the_defaults_of_sqlalchemy() -> None:
    with pytest.raises(ModuleNotFoundError, match="aiomysql"):
        async with sql.open_engine("mysql+aiomysql://h/d"):
            pass


async def test_a_missing_driver_is_named(monkeypatch: Any) -> None:
    monkeypatch.setattr("toolbox.sql.engines.find_spec", lambda name: None)

    with pytest.raises(IllegalConfigurationError, match="pip install asyncpg"):
        async with sql.open_engine("postgresql://h/d"):
            pass


def is_there(file: Path) -> bool:
    return file.exists()


@pytest.mark.parametrize("exists", [True, False])
async def test_a_cancelled_connection_to_sqlite_is_closed_before_its_task_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    connect = sqlite3.connect
    begun, may_go_on = threading.Event(), threading.Event()
    opened: list[sqlite3.Connection] = []
    threads: list[threading.Thread] = []

    def slow(*arguments: Any, **options: Any) -> sqlite3.Connection:
        threads.append(threading.current_thread())
        begun.set()
        assert may_go_on.wait(60)
        if not exists:
            raise sqlite3.OperationalError("unable to open database file")
        opened.append(connect(*arguments, **options))
        return opened[-1]

    monkeypatch.setattr(sqlite3, "connect", slow)
    async with sql.open_engine(f"sqlite:///{tmp_path}/shop.db") as engine:
        connecting = asyncio.create_task(engine.connect().start())
        assert await asyncio.to_thread(begun.wait, 60)
        connecting.cancel()
        done, _ = await asyncio.wait([connecting], timeout=0.05)
        assert not done  # its thread is still at work
        may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await connecting

    [thread] = threads  # the driver's; it tells the loop that it ends
    await asyncio.to_thread(thread.join, 60)
    assert not thread.is_alive()
    assert len(opened) == exists
    for each in opened:
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            each.execute("SELECT 1")


async def test_a_database_without_a_name_lasts_as_long_as_its_engine() -> None:
    async with sql.open_engine("sqlite://") as engine:
        file = Path(make_url(engine.url).database or "")
        async with engine.begin() as first:
            await first.execute(text("CREATE TABLE notes (note VARCHAR)"))
        async with engine.connect() as first, engine.connect() as second:
            await first.execute(text("INSERT INTO notes VALUES ('a')"))
            assert await second.scalar(text("SELECT count(*) FROM notes")) == 0
        assert is_there(file)

    assert not is_there(file)


async def test_sqlite_checks_foreign_keys(sqlite_url: str) -> None:
    async with sql.open_engine(sqlite_url) as engine, engine.connect() as connection:
        await connection.execute(text("CREATE TABLE a (id INTEGER PRIMARY KEY)"))
        await connection.execute(text("CREATE TABLE b (a INTEGER REFERENCES a)"))
        with pytest.raises(IntegrityError):
            await connection.execute(text("INSERT INTO b VALUES (7)"))


def test_concurrent_first_connections_to_a_new_database_all_succeed(sqlite_url: str) -> None:
    together, modes = threading.Barrier(8), []

    def enter() -> None:
        together.wait()
        with sql.open_sync_engine(sqlite_url) as engine:
            with engine.connect() as connection:
                connection.execute(text("SELECT * FROM sqlite_schema"))
            engine.dispose()
            with engine.connect() as connection:
                modes.append(connection.scalar(text("PRAGMA journal_mode")))

    threads = [threading.Thread(target=enter) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(modes) == 8
    assert "wal" in modes


async def test_options_are_the_engines(sqlite_url: str) -> None:
    async with sql.open_engine(sqlite_url, pool_size=1, max_overflow=0, connect_args={"timeout": 1}) as engine:
        assert engine.pool.size() == 1  # type: ignore[attr-defined]  # of a queue pool


def test_a_missing_library_is_reported_with_its_install_command() -> None:
    script = """
import builtins, importlib
imported = builtins.__import__
def without(name, globals=None, locals=None, fromlist=(), level=0):
    if not level and name.partition(".")[0] in ("sqlalchemy", "redis"):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])
    return imported(name, globals, locals, fromlist, level)
builtins.__import__ = without
import toolbox, toolbox.testing
for name in ("sql", "redis"):
    try:
        importlib.import_module(f"toolbox.{name}")
    except ImportError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    of_sql, of_redis = done.stdout.splitlines()
    assert "pip install 'toolbox-di[sql]'" in of_sql
    assert "pip install 'toolbox-di[redis]'" in of_redis


def test_the_module_toolbox_redis_is_not_the_library() -> None:
    import redis

    from toolbox import redis as ours

    assert redis is not ours
    assert hasattr(redis, "Redis")


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_a_connection_that_the_server_has_dropped_is_replaced(
    postgres: Any, postgres_url: str, driver: str
) -> None:
    url = make_url(postgres_url)
    settings = ToolboxSettings(
        sql=SqlSettings(url=url.set(drivername=f"postgresql+{driver}").render_as_string(hide_password=False))
    )
    async with Container(settings=settings).register(sql.engine, sql.session, sql.sync_engine) as container:

        async def ask() -> None:
            async with container.request_scope():
                assert await (await container.aget(AsyncSession)).scalar(text("SELECT 1")) == 1

        def ask_synchronously() -> None:
            with container.get(Engine).connect() as connection:
                assert connection.scalar(text("SELECT 1")) == 1

        await ask()
        ask_synchronously()
        end_connections(postgres, url.database)
        await ask()
        ask_synchronously()


async def test_an_answer_is_not_lost_when_the_server_has_dropped_the_connection(
    postgres: Any, postgres_url: str
) -> None:
    class Desk(Protocol):
        async def chat(self, room: MemoryId[str], question: str) -> str: ...

    async def reply(request: ChatRequest) -> str:
        end_connections(postgres, make_url(postgres_url).database)  # while the model thinks
        return "hello"

    service = register_ai_service(tools=())(Desk)
    settings = ToolboxSettings(sql=SqlSettings(url=postgres_url))
    container = Container(models={"default": ScriptedChatModel([reply])}, settings=settings)
    async with container.register(sql.engine, sql.SqlChatMemoryStore, service):
        assert await container.get(Desk).chat("room 7", "hi") == "hello"
        assert len(await container.chat_memory(Desk, "room 7").messages()) == 2


async def test_connections_in_use_at_the_end_are_closed_when_they_are_returned(database_url: str) -> None:
    closed: list[Any] = []
    async with sql.open_engine(database_url) as engine:
        event.listen(engine.sync_engine, "close", lambda connection, record: closed.append(connection))
        connection = await engine.connect()
        await connection.execute(text("SELECT 1"))
    assert closed == []
    await connection.close()
    assert len(closed) == 1

    with sql.open_sync_engine(database_url) as sync_engine:
        event.listen(sync_engine, "close", lambda connection, record: closed.append(connection))
        sync_connection = sync_engine.connect()
        sync_connection.execute(text("SELECT 1"))
    assert len(closed) == 1
    sync_connection.close()
    assert len(closed) == 2


def test_jobs_on_loops_of_their_own_share_the_pool(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLBOX_SQL__URL", postgres_url)
    monkeypatch.setenv("TOOLBOX_SQL__POOL_SIZE", "1")

    async def job(number: int, session: Inject[AsyncSession]) -> int:
        return await session.scalar(text(f"SELECT {number}")) or 0

    async def look_up() -> int:
        async with container.request_scope():
            await container.aget(AsyncSession)
            return await container.acall(job, number=4)

    with Container().register(sql.engine, sql.session) as container:
        injected = container.injected(job)

        assert [asyncio.run(injected(number)) for number in (1, 2, 3)] == [1, 2, 3]
        assert asyncio.run(look_up()) == 4
        assert asyncio.run(look_up()) == 4
