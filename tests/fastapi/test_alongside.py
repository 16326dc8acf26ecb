"""What else an application may have: middlewares, test clients, own route classes, a container that runs, uvicorn."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any, Protocol

import pytest
import websockets
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response, WebSocket
from fastapi.middleware.gzip import GZipMiddleware
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient
from starlette.requests import HTTPConnection

from toolbox import (
    ChatRequest,
    ChatResponse,
    Container,
    ContainerNotStartedError,
    MissingBeanError,
    produces,
    register_ai_service,
    request_scoped,
    tool,
)
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox_fastapi import Inject, InjectRoute, install, send_stream, sse

pytestmark = pytest.mark.anyio


@register_ai_service
class Assistant(Protocol):
    async def chat(self, text: str) -> str: ...

    def stream(self, text: str) -> AsyncIterator[str]: ...


class Silent:
    def __init__(self) -> None:
        self.asked, self.ended = asyncio.Event(), asyncio.Event()

    async def chat(self, request: ChatRequest) -> ChatResponse:
        self.asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()
        raise AssertionError


@request_scoped
class Visitor:
    def __init__(self, connection: HTTPConnection, request: Request | None, websocket: WebSocket | None) -> None:
        self.kinds = [type(each).__name__ for each in (connection, request, websocket)]


@request_scoped
class Page:
    def __init__(self, request: Request) -> None:
        self.path = request.url.path


def application(model: Any = None) -> FastAPI:
    app = FastAPI()
    install(app, Container(models={"default": model or Silent()}).register(Assistant, Visitor, Page))
    return app


# --- middlewares


def with_middlewares(app: FastAPI) -> None:
    @app.middleware("http")
    async def passing(request: Request, call_next: Any) -> Response:
        return await call_next(request)

    app.add_middleware(GZipMiddleware)


@pytest.mark.parametrize("path", ["/awaited", "/events"])
async def test_a_client_disconnect_is_noticed_behind_other_middleware(connect, path: str) -> None:
    model = Silent()
    app = application(model)
    with_middlewares(app)

    @app.get("/awaited")
    async def awaited(assistant: Inject[Assistant]) -> str:
        return await assistant.chat("go")

    @app.get("/events")
    async def events(assistant: Inject[Assistant]) -> Any:
        return sse(assistant.stream("go"))

    async with app.router.lifespan_context(app):
        client = connect(app, path)
        task = client.start()
        await model.asked.wait()
        client.leave()
        await asyncio.wait_for(task, 60)

    assert model.ended.is_set()


# --- beans of the connection


async def test_the_request_or_websocket_is_a_bean(running, connect) -> None:
    app = application()
    seen: list[list[str]] = []

    @app.get("/")
    async def endpoint(visitor: Inject[Visitor]) -> list[str]:
        return visitor.kinds

    @app.websocket("/ws")
    async def conversation(websocket: WebSocket, visitor: Inject[Visitor]) -> None:
        seen.append(visitor.kinds)
        await websocket.close()

    async with running(app) as client:
        assert (await client.get("/")).json() == ["Request", "Request", "NoneType"]
        await connect(app, "/ws", "websocket").start()

    assert seen == [["WebSocket", "NoneType", "WebSocket"]]


async def test_there_is_no_request_bean_outside_of_requests(running) -> None:
    container = Container().register(Page)
    app = FastAPI()
    install(app, container)

    @request_scoped
    class Optional:
        def __init__(self, request: Request | None) -> None:
            self.request = request

    container.register(Optional)
    async with running(app), container.request_scope():
        assert (await container.aget(Optional)).request is None
        with pytest.raises(MissingBeanError, match="Request"):
            await container.aget(Page)

    async with running(app):
        fake = Request({"type": "http", "path": "/fake", "headers": [], "server": ("x", 80)})
        async with container.request_scope({Request: fake}):
            assert (await container.aget(Page)).path == "/fake"


async def test_middleware_can_get_a_bean_that_needs_the_request(running) -> None:
    container = Container().register(Page)
    app = FastAPI()
    install(app, container)
    paths: list[str] = []

    @app.middleware("http")
    async def noting(request: Request, call_next: Any) -> Response:
        paths.append((await container.aget(Page)).path)
        return await call_next(request)

    @app.get("/here")
    async def endpoint(page: Inject[Page]) -> None:
        paths.append(page.path)

    async with running(app) as client:
        await client.get("/here")

    assert paths == ["/here", "/here"]


# --- other ways to start


async def test_a_container_that_is_already_started_keeps_running(running) -> None:
    container = Container().register(Page)
    app = FastAPI()
    install(app, container)

    @app.get("/here")
    async def endpoint(page: Inject[Page]) -> str:
        return page.path

    async with container:
        for _ in range(2):
            async with running(app) as client:
                assert (await client.get("/here")).json() == "/here"
        assert container.is_started


def test_install_works_with_the_test_client() -> None:
    app = application(ScriptedChatModel(["Hi", "Hello"]))

    @app.get("/")
    async def endpoint(page: Inject[Page], assistant: Inject[Assistant]) -> list[str]:
        return [page.path, await assistant.chat("go")]

    @app.websocket("/ws")
    async def conversation(websocket: WebSocket, assistant: Inject[Assistant]) -> None:
        await websocket.accept()
        async for text in websocket.iter_text():
            await send_stream(websocket, assistant.stream(text))

    with TestClient(app) as client:
        assert client.get("/").json() == ["/", "Hi"]
        with client.websocket_connect("/ws") as websocket:
            websocket.send_text("go")
            frames = [websocket.receive_json()]
            while frames[-1]["event"] != "done":
                frames.append(websocket.receive_json())

    assert "".join(each["data"] or "" for each in frames) == "Hello"


def test_an_application_without_its_lifespan_reports_what_is_missing() -> None:
    app = application()

    @app.get("/")
    async def endpoint(page: Inject[Page]) -> None: ...

    with pytest.raises(ContainerNotStartedError):
        TestClient(app).get("/")


async def test_the_applications_own_route_class_is_kept(running) -> None:
    class Own(APIRoute): ...

    app = FastAPI()
    app.router.route_class = Own
    install(app, Container().register(Page))

    @app.get("/here")
    async def endpoint(page: Inject[Page]) -> str:
        return page.path

    async with running(app) as client:
        assert (await client.get("/here")).json() == "/here"

    assert [type(each) for each in app.routes if isinstance(each, APIRoute)] == [Own]


# --- Inject elsewhere


async def test_the_same_inject_works_in_tools_and_injected_functions(running) -> None:
    container = Container(
        models={"default": ScriptedChatModel([tool_call("where"), lambda request: request.messages[-1].text])}
    )

    @tool
    def where(page: Inject[Page]) -> str:
        """Return the page of the user."""
        return page.path

    @register_ai_service(tools=[where])
    class Guide(Protocol):
        async def chat(self, text: str) -> str: ...

    def path_of(page: Inject[Page]) -> str:
        return page.path

    app = FastAPI()
    install(app, container.register(Guide, Page))

    @app.get("/here")
    async def endpoint(guide: Inject[Guide]) -> list[str]:
        return [await guide.chat("?"), container.call(path_of)]

    async with running(app) as client:
        assert (await client.get("/here")).json() == ["/here", "/here"]


async def test_classes_and_methods_can_be_endpoints_and_dependencies(running) -> None:
    class Filter:
        def __init__(self, page: Inject[Page], limit: int = 3) -> None:
            self.text = f"{page.path} {limit}"

    class Pages:
        async def show(self, page: Inject[Page]) -> str:
            return page.path

        def __call__(self, page: Inject[Page]) -> str:
            return page.path

    app = application()
    router = APIRouter(route_class=InjectRoute)
    router.add_api_route("/method", Pages().show)
    router.add_api_route("/object", Pages())

    @router.get("/filter")
    def filtered(wanted: Annotated[Filter, Depends(Filter)]) -> str:
        return wanted.text

    app.include_router(router)

    async with running(app) as client:
        assert (await client.get("/method")).json() == "/method"
        assert (await client.get("/object")).json() == "/object"
        assert (await client.get("/filter?limit=7")).json() == "/filter 7"


async def test_an_endpoint_can_have_a_parameter_for_the_connection(running) -> None:
    app = application()

    @app.get("/here")
    async def endpoint(page: Inject[Page], connection: HTTPConnection, request: Request) -> list[Any]:
        return [page.path, connection.url.path, connection is request]

    async with running(app) as client:
        assert (await client.get("/here")).json() == ["/here", "/here", True]


async def test_dependency_overrides_still_work(running) -> None:
    app = application()

    def who() -> str:
        raise HTTPException(401)

    @app.get("/here")
    async def endpoint(page: Inject[Page], name: str = Depends(who)) -> str:
        return f"{name} {page.path}"

    app.dependency_overrides[who] = lambda: "me"

    async with running(app) as client:
        assert (await client.get("/here")).json() == "me /here"


# --- under uvicorn


async def test_events_are_sent_as_they_arrive(serving) -> None:
    proceed = asyncio.Event()

    async def slowly() -> AsyncIterator[str]:
        yield "a"
        await proceed.wait()
        yield "b"

    app = application()

    @app.get("/")
    async def endpoint() -> Any:
        return sse(slowly())

    async with serving(app) as client, client.stream("GET", "/") as reply:
        lines = reply.aiter_lines()
        first = [await anext(lines) for _ in range(3)]
        proceed.set()
        rest = [line async for line in lines if line]

    assert sorted(first) == ["", 'data: "a"', "id: 0"]
    assert rest == ['data: "b"', "event: done", "data: null"]


async def test_a_websocket_client_that_disconnects_cancels_its_invocation(serving) -> None:
    model = Silent()
    ended: asyncio.Queue[str] = asyncio.Queue()

    class Session: ...

    @produces(scope="request")
    async def session() -> AsyncIterator[Session]:
        try:
            yield Session()
        except BaseException as error:
            ended.put_nowait(type(error).__name__)
            raise

    app = FastAPI()
    install(app, Container(models={"default": model}).register(Assistant, session))

    @app.websocket("/ws")
    async def conversation(websocket: WebSocket, assistant: Inject[Assistant], session: Inject[Session]) -> None:
        await websocket.accept()
        async for text in websocket.iter_text():
            await websocket.send_text(f"asked {text}")
            await send_stream(websocket, assistant.stream(text))

    async with serving(app) as client:
        async with websockets.connect(f"ws://127.0.0.1:{client.base_url.port}/ws") as websocket:
            await websocket.send("go")
            assert await websocket.recv() == "asked go"
            await model.asked.wait()
        assert await asyncio.wait_for(ended.get(), 60) == "ClientDisconnectedError"

    assert model.ended.is_set()


async def test_a_websocket_under_uvicorn_gets_frames(serving) -> None:
    app = application(ScriptedChatModel(["Hello"]))

    @app.websocket("/ws")
    async def conversation(websocket: WebSocket, assistant: Inject[Assistant]) -> None:
        await websocket.accept()
        async for text in websocket.iter_text():
            await send_stream(websocket, assistant.stream(text))

    async with (
        serving(app) as client,
        websockets.connect(f"ws://127.0.0.1:{client.base_url.port}/ws") as websocket,
    ):
        await websocket.send("go")
        frames = [json.loads(await websocket.recv())]
        while frames[-1]["event"] != "done":
            frames.append(json.loads(await websocket.recv()))

    assert "".join(each["data"] or "" for each in frames) == "Hello"
