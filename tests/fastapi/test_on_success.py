"""Tests `@on_success` in requests and WebSockets: before the first byte, and how its errors are answered."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx2
import pytest
from fastapi import APIRouter, BackgroundTasks, Depends, FastAPI, HTTPException, Request, Response, WebSocket
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.testclient import TestClient
from starlette.applications import Starlette
from starlette.routing import Mount, Route
from starlette.websockets import WebSocketDisconnect

from toolbox import Container, Inject, RunSuspendedError, ToolboxError, on_success, produces, request_scoped
from toolbox.security import SecurityIdentity, authenticated
from toolbox_fastapi import InjectRoute, install, sse

pytestmark = pytest.mark.anyio

log: list[str] = []


ERRORS = {
    "http": HTTPException(409, "taken"),
    "toolbox": ToolboxError("taken"),
    "handled": ValueError("taken"),
    "unhandled": KeyError("taken"),
}
STATUSES = {"http": 409, "toolbox": 500, "handled": 418, "unhandled": 500}


@request_scoped
class Unit:
    """Fails at its end as it was told."""

    fails: str | None = None

    @on_success
    def commit(self) -> None:
        log.append("failing" if self.fails else "committed")
        if self.fails is not None:
            raise ERRORS[self.fails]


@request_scoped
class Late:
    """A bean that is made after the first byte, or by other code than the endpoint's."""

    fails: str | None = None

    @on_success
    async def commit(self) -> None:
        log.append("late failing" if self.fails else "late")
        if self.fails is not None:
            raise ERRORS[self.fails]


class Connection: ...


@produces(scope="request")
async def connection() -> AsyncIterator[Connection]:
    try:
        yield Connection()
    except BaseException as error:
        log.append(f"rolled back: {type(error).__name__}")
        raise
    else:
        log.append("closed")


@pytest.fixture(autouse=True)
def _forget() -> None:
    log.clear()


async def teapot(request: Request, error: Exception) -> Response:
    return JSONResponse({}, 418)


def application() -> tuple[FastAPI, Container]:
    app, container = FastAPI(), Container().register(Unit, Late, connection)
    install(app, container)
    app.add_exception_handler(ValueError, teapot)
    return app, container


# --- endpoints of FastAPI


def injected(owner: Any, container: Container) -> None:
    @owner.get("/")
    async def endpoint(unit: Inject[Unit], connection: Inject[Connection], fails: str | None = None) -> str:
        unit.fails = fails
        return "stored"


def on_a_thread(owner: Any, container: Container) -> None:
    @owner.get("/")
    def endpoint(unit: Inject[Unit], connection: Inject[Connection], fails: str | None = None) -> str:
        unit.fails = fails
        return "stored"


def by_a_dependency(owner: Any, container: Container) -> None:
    async def give(unit: Inject[Unit], connection: Inject[Connection], fails: str | None = None) -> None:
        unit.fails = fails

    @owner.get("/", dependencies=[Depends(give)])
    async def endpoint() -> str:
        return "stored"


def by_hand(owner: Any, container: Container) -> None:
    @owner.get("/")
    async def endpoint(fails: str | None = None) -> str:
        await container.aget(Connection)
        (await container.aget(Unit)).fails = fails
        return "stored"


def own(app: FastAPI) -> Any:
    return app


def plain_router(app: FastAPI) -> Any:
    return APIRouter()


def our_router(app: FastAPI) -> Any:
    return APIRouter(route_class=InjectRoute)


def mounted(app: FastAPI) -> Any:
    inner = FastAPI()
    inner.add_exception_handler(ValueError, teapot)
    return inner


def connected(app: FastAPI, owner: Any) -> None:
    if isinstance(owner, APIRouter):
        app.include_router(owner, prefix="/at")
    elif owner is not app:
        app.mount("/at", owner)


@pytest.mark.parametrize("fails", [None, *ERRORS])
@pytest.mark.parametrize("declare", [injected, on_a_thread, by_a_dependency, by_hand])
@pytest.mark.parametrize("make_owner", [own, plain_router, our_router, mounted])
async def test_an_endpoint_answers_after_the_methods_or_with_their_error(
    running: Any, make_owner: Any, declare: Any, fails: str | None
) -> None:
    app, container = application()
    owner = make_owner(app)
    declare(owner, container)
    connected(app, owner)

    async with running(app) as client:
        path = "/" if owner is app else "/at/"
        reply = await client.get(path, params={} if fails is None else {"fails": fails})

    if fails is None:
        assert (reply.status_code, reply.json(), log) == (200, "stored", ["committed", "closed"])
    else:
        assert reply.status_code == STATUSES[fails]
        assert log == ["failing", f"rolled back: {type(ERRORS[fails]).__name__}"]


async def test_an_endpoint_with_roles_answers_with_the_error_too(running: Any) -> None:
    app, container = FastAPI(), Container().register(Unit, connection)
    install(app, container, identity=lambda: SecurityIdentity("ann"))
    app.get("/")(authenticated(failing_endpoint))

    async with running(app) as client:
        assert (await client.get("/?fails=http")).status_code == 409

    assert log == ["failing", "rolled back: HTTPException"]


async def failing_endpoint(unit: Inject[Unit], connection: Inject[Connection], fails: str) -> None:
    unit.fails = fails


@pytest.mark.parametrize("make_owner", [plain_router, our_router, mounted])
async def test_routes_that_are_added_after_the_start_answer_with_the_error_too(running: Any, make_owner: Any) -> None:
    app, container = application()
    owner = make_owner(app)
    owner.get("/first")(lambda: "first")
    connected(app, owner)

    async with running(app) as client:
        assert (await client.get("/at/first")).json() == "first"
        injected(owner, container)
        reply = await client.get("/at/?fails=http")

    assert reply.status_code == 409
    assert log == ["failing", "rolled back: HTTPException"]


async def test_the_next_request_sees_what_was_committed(serving: Any) -> None:
    app, stored = FastAPI(), []

    @request_scoped
    class Notes:
        new = ""

        @on_success
        async def commit(self) -> None:
            await asyncio.sleep(0.05)  # the answer would be there long before
            stored.append(self.new)

    install(app, Container().register(Notes))

    @app.post("/{text}")
    async def add(text: str, notes: Inject[Notes]) -> str:
        notes.new = text
        return "stored"

    async with serving(app) as client:
        await client.post("/good")
        assert stored == ["good"]


async def test_a_status_of_the_endpoints_own_is_no_failure(running: Any) -> None:
    app, _ = application()

    @app.get("/")
    async def endpoint(unit: Inject[Unit]) -> Response:
        return Response("taken", status_code=409)

    async with running(app) as client:
        assert (await client.get("/")).status_code == 409

    assert log == ["committed"]


@pytest.mark.parametrize("make_owner", [own, plain_router, mounted])
@pytest.mark.parametrize("fails", list(ERRORS))
async def test_an_endpoint_that_fails_calls_nothing(running: Any, make_owner: Any, fails: str) -> None:
    app, container = application()
    owner = make_owner(app)

    @owner.get("/")
    async def endpoint() -> str:
        await container.aget(Unit)
        raise ERRORS[fails]

    connected(app, owner)
    async with running(app) as client:
        reply = await client.get("/" if owner is app else "/at/")

    assert reply.status_code == STATUSES[fails]
    assert log == []


async def test_an_answer_that_cannot_be_sent_is_a_failure(running: Any) -> None:
    app, _ = application()

    @app.get("/")
    async def endpoint(unit: Inject[Unit]) -> int:
        return "not a number"  # type: ignore[return-value]

    async with running(app) as client:
        assert (await client.get("/")).status_code == 500

    assert log == []


async def test_a_suspension_has_not_failed(running: Any) -> None:
    app, _ = application()

    @app.get("/")
    async def endpoint(unit: Inject[Unit], connection: Inject[Connection]) -> str:
        raise RunSuspendedError("7")

    async with running(app) as client:
        assert (await client.get("/")).status_code == 202

    assert log == ["committed", "rolled back: RunSuspendedError"]


async def test_dependencies_that_end_with_the_endpoint_end_before(running: Any) -> None:
    app, _ = application()

    def give(fails: bool = False) -> Iterator[None]:
        yield
        log.append("dependency ended")
        if fails:
            raise HTTPException(409)

    @app.get("/")
    async def endpoint(unit: Inject[Unit], given: None = Depends(give, scope="function")) -> str:
        return "stored"

    async with running(app) as client:
        assert (await client.get("/")).status_code == 200
        assert log == ["dependency ended", "committed"]
        assert (await client.get("/?fails=true")).status_code == 409
        assert log[2:] == ["dependency ended"]


async def test_background_tasks_run_after_it(running: Any) -> None:
    app, container = application()

    @app.get("/")
    async def endpoint(unit: Inject[Unit], background: BackgroundTasks) -> str:
        async def work() -> None:
            await container.aget(Late)
            log.append("background")

        background.add_task(work)
        return "stored"

    async with running(app) as client:
        await client.get("/")

    assert log == ["committed", "background", "late"]


async def test_a_client_that_has_left_before_the_answer_is_a_failure(connect: Any) -> None:
    app, _ = application()

    @app.get("/")
    async def endpoint(unit: Inject[Unit], request: Request) -> str:
        while not await request.is_disconnected():
            pass
        return "stored"

    async with app.router.lifespan_context(app):
        client = connect(app, "/")
        client.leave()
        await client.start()

    assert log == []


# --- streams


def plain(body: AsyncIterator[str]) -> Response:
    return StreamingResponse(body)


@pytest.mark.parametrize("send", [sse, plain])
async def test_a_stream_begins_after_the_methods(running: Any, send: Callable[[Any], Response]) -> None:
    app, _ = application()

    @app.get("/")
    async def endpoint(unit: Inject[Unit], fails: str | None = None) -> Response:
        async def body() -> AsyncIterator[str]:
            log.append("first byte")
            yield "x"

        unit.fails = fails
        return send(body())

    async with running(app) as client:
        assert (await client.get("/")).status_code == 200
        assert log == ["committed", "first byte"]
        assert (await client.get("/?fails=http")).status_code == 409
        assert log[2:] == ["failing"]


def streaming(app: FastAPI, container: Container, send: Callable[[Any], Response], fails: str | None) -> None:
    @app.get("/")
    async def endpoint(connection: Inject[Connection]) -> Response:
        async def body() -> AsyncIterator[str]:
            yield "x"
            (await container.aget(Late)).fails = fails
            yield "y"
            log.append("last byte")

        return send(body())


@pytest.mark.parametrize("send", [sse, plain])
async def test_beans_of_a_stream_are_asked_when_it_has_ended_well(
    running: Any, send: Callable[[Any], Response]
) -> None:
    app, container = application()
    streaming(app, container, send, None)

    async with running(app) as client:
        await client.get("/")

    assert log == ["last byte", "late", "closed"]


async def test_what_they_raise_ends_server_sent_events_with_a_failure(serving: Any) -> None:
    app, container = application()
    streaming(app, container, sse, "http")

    async with serving(app) as client:
        reply = await client.get("/")

    events = [line.partition(" ")[2] for line in reply.text.splitlines() if line.startswith("event:")]
    assert events == ["failure"]
    assert '"status": 409' in reply.text
    assert log == ["last byte", "late failing", "rolled back: HTTPException"]


async def test_what_they_raise_cuts_another_stream(serving: Any) -> None:
    app, container = application()
    streaming(app, container, plain, "unhandled")

    async with serving(app) as client:
        with pytest.raises(httpx2.RemoteProtocolError):
            await client.get("/")

    assert log == ["last byte", "late failing", "rolled back: KeyError"]


@pytest.mark.parametrize("send", [sse, plain])
async def test_a_stream_that_fails_asks_none_of_its_beans(running: Any, send: Callable[[Any], Response]) -> None:
    app, container = application()

    @app.get("/")
    async def endpoint() -> Response:
        async def body() -> AsyncIterator[str]:
            yield "x"
            await container.aget(Late)
            raise KeyError("lost")

        return send(body())

    async with running(app) as client:
        await client.get("/")

    assert log == []


# --- routes of others


async def view(request: Request) -> Response:
    container = request.app.state.container
    await container.aget(Connection)
    (await container.aget(Unit)).fails = request.query_params.get("fails")
    return Response("stored")


def added_route(app: FastAPI) -> None:
    app.add_route("/at/", view)


def mounted_starlette(app: FastAPI) -> None:
    inner = Starlette(routes=[Route("/", view)])
    inner.state.container = app.state.container
    app.mount("/at", inner)


def mounted_routes(app: FastAPI) -> None:
    app.router.routes.append(Mount("/at", routes=[Route("/", view)]))


@pytest.mark.parametrize("fails", [None, *ERRORS])
@pytest.mark.parametrize("connect_view", [added_route, mounted_starlette, mounted_routes])
async def test_other_routes_answer_after_the_methods_or_with_a_500(
    running: Any, connect_view: Any, fails: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    app, container = application()
    app.state.container = container
    connect_view(app)

    with caplog.at_level(logging.ERROR, "toolbox.fastapi"):
        async with running(app) as client:
            reply = await client.get("/at/", params={} if fails is None else {"fails": fails})

    if fails is None:
        assert (reply.status_code, reply.text, log) == (200, "stored", ["committed", "closed"])
    else:
        assert (reply.status_code, reply.text) == (500, "Internal Server Error")
        assert log == ["failing", f"rolled back: {type(ERRORS[fails]).__name__}"]
        [record] = caplog.records
        assert record.getMessage() == "http /at/ failed"
        assert record.exc_info is not None
        assert record.exc_info[1] is ERRORS[fails]


@pytest.mark.parametrize("fails", ["http", "unhandled"])
async def test_other_routes_that_fail_call_nothing(running: Any, fails: str) -> None:
    app, container = application()

    async def failing(request: Request) -> Response:
        await container.aget(Unit)
        raise ERRORS[fails]

    app.add_route("/", failing)
    async with running(app) as client:
        assert (await client.get("/")).status_code == STATUSES[fails]

    assert log == []


@pytest.mark.parametrize("where", ["before", "after"])
async def test_a_middleware_that_fails_calls_nothing_of_other_routes(running: Any, where: str) -> None:
    app, container = application()

    @app.middleware("http")
    async def broken(request: Request, call_next: Any) -> Response:
        await container.aget(Unit)
        if where == "after":
            await call_next(request)
        raise KeyError("broken")

    app.add_route("/", lambda request: Response("fine"))
    async with running(app) as client:
        assert (await client.get("/")).status_code == 500

    assert log == []


async def test_an_unhandled_error_of_an_application_within_is_a_failure_of_the_one_around(running: Any) -> None:
    app, container = application()
    inner = FastAPI()
    install(inner, Container())

    @app.middleware("http")
    async def using(request: Request, call_next: Any) -> Response:
        await container.aget(Unit)
        return await call_next(request)

    @inner.get("/")
    async def endpoint() -> str:
        raise KeyError("lost")

    app.mount("/at", inner)
    async with running(app) as client:
        assert (await client.get("/at/")).status_code == 500

    assert log == []


# --- WebSockets


@pytest.mark.parametrize("fails", [None, "http", "unhandled"])
async def test_a_websocket_calls_them_at_its_end(connect: Any, fails: str | None) -> None:
    app, _ = application()

    @app.websocket("/")
    async def endpoint(websocket: WebSocket, unit: Inject[Unit], connection: Inject[Connection]) -> None:
        await websocket.accept()
        unit.fails = fails
        async for _ in websocket.iter_text():
            log.append("message")

    async with app.router.lifespan_context(app):
        client = connect(app, "/", "websocket")
        task = client.start()
        await client.sent("websocket.accept")
        client.say({"type": "websocket.receive", "text": "hello"})
        client.leave()
        await asyncio.wait([task])

    ended = ["committed", "closed"] if fails is None else ["failing", f"rolled back: {type(ERRORS[fails]).__name__}"]
    assert log == ["message", *ended]


def test_a_websocket_of_starlette_calls_them_too() -> None:
    app, container = application()

    async def talk(websocket: WebSocket) -> None:
        await websocket.accept()
        await container.aget(Unit)
        await websocket.close()

    app.router.add_websocket_route("/", talk)
    with TestClient(app) as client, client.websocket_connect("/") as websocket, pytest.raises(WebSocketDisconnect):
        websocket.receive_text()

    assert log == ["committed"]
