"""An application that mounts one with a container of its own: both containers run with its lifespan."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from toolbox import Container, ContainerNotStartedError, IllegalConfigurationError, produces, tool
from toolbox_fastapi import Inject, install, mount_mcp, sse

pytestmark = pytest.mark.anyio

log: list[str] = []


@pytest.fixture(autouse=True)
def _forget() -> None:
    log.clear()


class Database: ...


@produces(scope="application")
async def database() -> AsyncIterator[Database]:
    log.append("child opened")
    yield Database()
    log.append("child closed")


def child() -> tuple[FastAPI, Container]:
    app, container = FastAPI(), Container().register(database)
    install(app, container)

    @app.get("/")
    async def endpoint(database: Inject[Database]) -> str:
        return "child"

    return app, container


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    log.append("parent began")
    yield
    log.append("parent ended")


def parent_of(mounted: Any) -> FastAPI:
    app = FastAPI(lifespan=lifespan)
    install(app, Container())
    app.mount("/at", mounted)
    return app


def wrapped(app: FastAPI) -> Any:
    async def wrapper(scope: Any, receive: Any, send: Any) -> None:
        await app(scope, receive, send)

    return wrapper


def in_another(app: FastAPI) -> FastAPI:
    between = FastAPI()
    between.mount("/", app)
    return between


def in_one_with_a_container(app: FastAPI) -> FastAPI:
    between = FastAPI()
    install(between, Container())
    between.mount("/", app)
    return between


@pytest.mark.parametrize("wrap", [lambda app: app, wrapped, in_another, in_one_with_a_container])
def test_the_container_of_a_mounted_application_runs_with_the_parents_lifespan(wrap: Callable[[Any], Any]) -> None:
    inner, container = child()
    app = parent_of(wrap(inner))

    for _ in range(2):
        log.clear()
        with TestClient(app) as client:
            assert container.is_started
            assert client.get("/at/").json() == "child"

        assert not container.is_started
        assert log == ["parent began", "child opened", "child closed", "parent ended"]


def test_a_container_that_the_program_runs_itself_is_left_alone() -> None:
    inner, container = child()

    @asynccontextmanager
    async def starting(app: FastAPI) -> AsyncIterator[None]:
        async with container:
            yield
            log.append("parent ended")

    app = FastAPI(lifespan=starting)
    install(app, Container())
    app.mount("/at", inner)

    with TestClient(app) as client:
        assert client.get("/at/").json() == "child"

    assert log == ["child opened", "parent ended", "child closed"]


def test_a_lifespan_that_the_program_runs_itself_is_left_alone() -> None:
    inner, _ = child()

    @asynccontextmanager
    async def starting(app: FastAPI) -> AsyncIterator[None]:
        async with inner.router.lifespan_context(inner):
            yield
            log.append("parent ended")

    app = FastAPI(lifespan=starting)
    install(app, Container())
    app.mount("/at", inner)

    with TestClient(app) as client:
        assert client.get("/at/").json() == "child"

    assert log == ["child opened", "parent ended", "child closed"]


def test_one_that_cannot_start_ends_the_start() -> None:
    inner, _ = child()

    @inner.get("/broken")
    async def broken(missing: Inject[set]) -> None: ...  # type: ignore[type-arg]

    with pytest.raises(IllegalConfigurationError, match="/broken"), TestClient(parent_of(inner)):
        pass
    assert log == ["parent began"]


def test_a_parent_without_a_container_does_not_start_it() -> None:
    inner, _ = child()
    app = FastAPI()
    app.mount("/at", inner)

    with pytest.raises(ContainerNotStartedError), TestClient(app) as client:
        client.get("/at/")


async def test_open_streams_of_both_end_at_the_stop(running: Any) -> None:
    inner, _ = child()
    began = asyncio.Event()

    @inner.get("/stream")
    async def stream() -> Any:
        async def endless() -> AsyncIterator[str]:
            yield "x"
            began.set()
            await asyncio.Event().wait()

        return sse(endless())

    app = parent_of(inner)
    async with running(app) as client:
        reading = asyncio.create_task(client.get("/at/stream"))
        await began.wait()

    assert '"status": 503' in (await reading).text


class Orders:
    @tool
    def count(self) -> int:
        return 7


async def test_its_mcp_server_and_its_dev_ui_run_too(serving: Any, capsys: pytest.CaptureFixture[str]) -> None:
    inner, container = FastAPI(), Container()
    install(inner, container, dev_ui=True)
    mount_mcp(inner, container, [Orders])

    async with serving(parent_of(inner)) as client:
        url = f"{str(client.base_url).rstrip('/')}/at/mcp"
        async with Client(streamable_http_client(url)) as mcp:
            result = await mcp.call_tool("count", {})

    assert result.content[0].text == "7"
    assert "/at/dev-ui/" in capsys.readouterr().err
