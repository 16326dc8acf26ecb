"""Tests request scopes: one per request and WebSocket, open until the response is sent, closed with its error."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated, Any

import pytest
from fastapi import (
    APIRouter,
    BackgroundTasks,
    Depends,
    FastAPI,
    HTTPException,
    Request,
    Response,
    WebSocket,
    WebSocketDisconnect,
)
from fastapi.middleware.gzip import GZipMiddleware
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.sse import EventSourceResponse
from fastapi.testclient import TestClient
from starlette.applications import Starlette
from starlette.routing import Mount, Route

from toolbox import Container, MissingBeanError, ToolboxError, produces, request_scoped
from toolbox_fastapi import ClientDisconnectedError, Inject, InjectRoute, install, send_stream, sse
from toolbox_fastapi.exchanges import AFTER_ENDPOINT, exit_stack

pytestmark = pytest.mark.anyio


class Session:
    """Keeps what happened to it in `log`: used, then committed or rolled back."""

    def __init__(self) -> None:
        self.log: list[str] = ["begun"]

    def use(self) -> None:
        self.log.append("used")


sessions: list[Session] = []


@produces(scope="request")
async def session() -> AsyncIterator[Session]:
    made = Session()
    sessions.append(made)
    try:
        yield made
    except BaseException as error:
        made.log.append(f"rolled back: {type(error).__name__}")
        raise
    else:
        made.log.append("committed")


@pytest.fixture(autouse=True)
def _no_sessions() -> Iterator[None]:
    sessions.clear()
    yield
    sessions.clear()


def application(**options: Any) -> FastAPI:
    app = FastAPI(**options)
    install(app, Container().register(session))
    return app


def fail(error: Exception) -> Callable[..., None]:
    async def endpoint(session: Inject[Session]) -> None:
        session.use()
        raise error

    return endpoint


async def test_a_scope_ends_without_an_error_when_the_endpoint_returns(running) -> None:
    app = application()

    @app.get("/")
    async def endpoint(session: Inject[Session]) -> str:
        session.use()
        return "fine"

    async with running(app) as client:
        assert (await client.get("/")).json() == "fine"
        assert (await client.get("/")).json() == "fine"

    assert [each.log for each in sessions] == [["begun", "used", "committed"]] * 2


async def test_all_parts_of_a_request_share_its_beans(running) -> None:
    app = application()
    seen: list[object] = []

    def by_dependency(session: Inject[Session]) -> Session:
        return session

    @app.get("/")
    def endpoint(
        one: Inject[Session], other: Inject[Session], third: Annotated[Session, Depends(by_dependency)]
    ) -> None:
        seen.extend([one, other, third])

    async with running(app) as client:
        await client.get("/")

    assert len(seen) == 3
    assert len({id(each) for each in seen}) == 1


@pytest.mark.parametrize("routes", ["the application's", "a plain router's", "our router's", "a mounted application's"])
@pytest.mark.parametrize("error", [HTTPException(409, "taken"), KeyError("unhandled"), ValueError("handled")], ids=repr)
async def test_errors_of_an_endpoint_are_raised_in_the_producers(running, routes: str, error: Exception) -> None:
    app = application()
    owner: Any = app
    if routes == "a plain router's":
        owner = APIRouter()
    elif routes == "our router's":
        owner = APIRouter(route_class=InjectRoute)
    elif routes == "a mounted application's":
        owner = FastAPI()
    owner.get("/")(fail(error))

    async def conflict(request: Request, error: Exception) -> Response:
        return JSONResponse({}, 418)

    app.add_exception_handler(ValueError, conflict)
    if isinstance(owner, APIRouter):
        app.include_router(owner, prefix="/inner")
    elif owner is not app:
        owner.add_exception_handler(ValueError, conflict)
        app.mount("/inner", owner)

    async with running(app) as client:
        reply = await client.get("/" if owner is app else "/inner/")

    assert reply.status_code == {HTTPException: 409, KeyError: 500, ValueError: 418}[type(error)]
    assert [each.log for each in sessions] == [["begun", "used", f"rolled back: {type(error).__name__}"]]


async def test_a_handled_error_is_recorded_without_injected_parameters(running) -> None:
    container = Container().register(session)
    app = FastAPI()
    install(app, container)
    router = APIRouter()

    @router.get("/")
    async def endpoint() -> None:
        await container.aget(Session)
        raise HTTPException(409)

    app.include_router(router)

    async with running(app) as client:
        assert (await client.get("/")).status_code == 409

    assert sessions[0].log == ["begun", "rolled back: HTTPException"]


@pytest.mark.parametrize("around", [None, GZipMiddleware], ids=["bare", "in a middleware"])
async def test_a_handled_error_in_a_mounted_starlette_application_is_recorded(running, around: Any) -> None:
    container = Container().register(session)
    app = FastAPI()
    install(app, container)

    async def endpoint(request: Request) -> Response:
        await container.aget(Session)
        raise HTTPException(409) if request.path_params["how"] == "http" else ToolboxError("inner text")

    mounted = Starlette(routes=[Mount("/below", routes=[Route("/{how}", endpoint)])])
    app.mount("/mounted", around(mounted) if around else mounted)

    async with running(app) as client:
        assert (await client.get("/mounted/below/http")).status_code == 409
        assert (await client.get("/mounted/below/toolbox")).json()["title"] == "Internal Server Error"

    assert [each.log[-1] for each in sessions] == ["rolled back: HTTPException", "rolled back: ToolboxError"]


async def test_an_error_that_middleware_answers_is_recorded(running) -> None:
    app = application()
    router = APIRouter()
    router.get("/")(fail(KeyError("lost")))
    app.include_router(router)

    @app.middleware("http")
    async def forgiving(request: Request, call_next: Any) -> Response:
        try:
            return await call_next(request)
        except KeyError:
            return Response(status_code=200)

    async with running(app) as client:
        assert (await client.get("/")).status_code == 200

    assert sessions[0].log[-1] == "rolled back: KeyError"


async def test_an_invalid_body_rolls_back_and_gets_fastapis_response(running) -> None:
    app = application()

    async def uses(session: Inject[Session]) -> None:
        session.use()

    @app.post("/", dependencies=[Depends(uses)])
    async def endpoint(number: int) -> None: ...

    async with running(app) as client:
        reply = await client.post("/?number=many")

    assert reply.status_code == 422
    assert reply.json()["detail"][0]["type"] == "int_parsing"
    assert sessions[0].log[-1] == "rolled back: RequestValidationError"


async def test_the_scope_is_open_until_the_body_has_been_sent_and_background_tasks_are_done(running) -> None:
    app = application()
    happened: list[str] = []

    @app.get("/")
    async def endpoint(session: Inject[Session], background: BackgroundTasks) -> StreamingResponse:
        async def body() -> AsyncIterator[str]:
            happened.append(f"body, {session.log[-1]}")
            yield "x"

        def later() -> None:
            happened.append(f"later, {session.log[-1]}")

        background.add_task(later)
        return StreamingResponse(body())

    async with running(app) as client:
        assert (await client.get("/")).text == "x"

    assert happened == ["body, begun", "later, begun"]
    assert sessions[0].log == ["begun", "committed"]


async def test_middleware_runs_inside_the_scope_whenever_it_was_added(running) -> None:
    container = Container().register(session)
    app = FastAPI()
    install(app, container)
    seen: list[Session] = []

    @app.middleware("http")
    async def using(request: Request, call_next: Any) -> Response:
        seen.append(await container.aget(Session))
        return await call_next(request)

    @app.get("/")
    async def endpoint(session: Inject[Session]) -> None:
        seen.append(session)

    async with running(app) as client:
        await client.get("/")

    assert seen[0] is seen[1]


@pytest.mark.parametrize("error", [KeyError("failed"), ToolboxError("failed"), HTTPException(409)], ids=repr)
async def test_a_failing_stream_rolls_back(running, error: Exception) -> None:
    app = application()

    @app.get("/")
    async def endpoint(session: Inject[Session]) -> StreamingResponse:
        async def body() -> AsyncIterator[str]:
            yield "x"
            raise error

        return StreamingResponse(body())

    async with running(app) as client:
        await client.get("/")

    assert sessions[0].log[-1] == f"rolled back: {type(error).__name__}"


async def test_generator_endpoints_have_the_scope(running) -> None:
    app = application()

    @app.get("/")
    async def endpoint(session: Inject[Session]) -> AsyncIterator[int]:
        session.use()
        yield 1
        session.use()
        yield 2

    async with running(app) as client:
        assert (await client.get("/")).text.split() == ["1", "2"]

    assert sessions[0].log == ["begun", "used", "used", "committed"]


async def test_a_disconnect_during_a_stream_is_raised_in_the_producers(connect) -> None:
    app = application()

    @app.get("/")
    async def endpoint(session: Inject[Session]) -> StreamingResponse:
        async def body() -> AsyncIterator[str]:
            yield "x"
            await asyncio.Event().wait()

        return StreamingResponse(body())

    async with app.router.lifespan_context(app):
        client = connect(app, "/")
        task = client.start()
        await client.sent("http.response.body")
        client.leave()
        await task

    assert sessions[0].log == ["begun", f"rolled back: {ClientDisconnectedError.__name__}"]


async def test_a_websocket_has_one_scope_until_it_closes(connect) -> None:
    app = application()

    @app.websocket("/")
    async def endpoint(websocket: WebSocket, session: Inject[Session]) -> None:
        await websocket.accept()
        async for _ in websocket.iter_text():
            session.use()

    async with app.router.lifespan_context(app):
        client = connect(app, "/", "websocket")
        task = client.start()
        client.say({"type": "websocket.receive", "text": "a"})
        client.say({"type": "websocket.receive", "text": "b"})
        client.leave()
        await task

    assert sessions[0].log == ["begun", "used", "used", "committed"]


async def test_an_unhandled_websocket_disconnect_rolls_back(connect) -> None:
    app = application()

    @app.websocket("/")
    async def endpoint(websocket: WebSocket, session: Inject[Session]) -> None:
        await websocket.accept()
        while True:
            await websocket.receive_text()

    async with app.router.lifespan_context(app):
        client = connect(app, "/", "websocket")
        task = client.start()
        client.leave()
        with pytest.raises(WebSocketDisconnect):
            await task

    assert sessions[0].log == ["begun", "rolled back: ClientDisconnectedError"]


async def test_request_and_websocket_are_beans(running, connect) -> None:
    seen: list[object] = []

    @request_scoped
    class Agent:
        def __init__(self, request: Request) -> None:
            self.name = request.headers["user-agent"]

    app = FastAPI()
    install(app, Container().register(Agent))

    @app.get("/")
    async def endpoint(agent: Inject[Agent], bean: Inject[Request], request: Request) -> str:
        seen.append(bean is request)
        return agent.name

    @app.websocket("/ws")
    async def conversation(websocket: WebSocket, bean: Inject[WebSocket]) -> None:
        seen.append(bean is websocket)
        await bean.accept()
        await bean.close()

    async with running(app) as client:
        assert (await client.get("/", headers={"user-agent": "me"})).json() == "me"
        await connect(app, "/ws", "websocket").start()

    assert seen == [True, True]


async def test_a_bean_can_read_the_body_after_fastapi(running) -> None:
    @request_scoped
    class Raw:
        def __init__(self, request: Request) -> None:
            self.request = request

    app = FastAPI()
    install(app, Container().register(Raw))

    @app.post("/")
    async def endpoint(number: dict[str, int], raw: Inject[Raw]) -> str:
        return (await raw.request.body()).decode()

    async with running(app) as client:
        assert (await client.post("/", json={"a": 1})).json() == '{"a":1}'


@pytest.mark.parametrize("kind", [Request, WebSocket])
def test_a_request_that_is_missing_outside_of_fastapi_is_explained_with_the_right_fix(kind: type) -> None:
    app, container = FastAPI(), Container()
    install(app, container)

    with Container() as plain, pytest.raises(MissingBeanError) as raised:
        plain.get(kind)
    assert "toolbox_fastapi.install" in str(raised.value)
    assert "register one" not in str(raised.value)
    with TestClient(app), container.request_scope(), pytest.raises(MissingBeanError) as raised:
        container.get(kind)
    assert f"`{kind.__name__} | None`" in str(raised.value)
    assert "register one" not in str(raised.value)


# --- a scope closes whole


def test_the_end_of_a_websocket_in_a_test_client_does_not_cut_the_closing_of_its_scope() -> None:
    log: list[str] = []

    @produces(scope="request")
    async def session() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            for _ in range(3):
                await asyncio.sleep(0.001)
            log.append("closed")

    app = FastAPI()
    install(app, Container().register(session))

    @app.websocket("/")
    async def conversation(websocket: WebSocket, value: Inject[int]) -> None:
        await websocket.accept()
        await websocket.receive_text()

    with TestClient(app) as client:
        for _ in range(5):
            with client.websocket_connect("/"):
                pass
    assert log == ["closed"] * 5


# --- streams that end with an error


async def failing() -> AsyncIterator[str]:
    yield "a"
    raise ValueError("broken")


async def cancelling_itself() -> AsyncIterator[str]:
    yield "a"
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("stream", "error"), [(failing, "ValueError"), (cancelling_itself, "CancelledError")], ids=["fails", "cancels"]
)
async def test_a_stream_that_fails_rolls_back(running, stream: Callable[[], AsyncIterator[str]], error: str) -> None:
    app = application()

    @app.get("/")
    async def endpoint(session: Inject[Session]) -> EventSourceResponse:
        return sse(stream())

    async with running(app) as client:
        text = (await client.get("/")).text

    assert "event: failure" in text
    assert '"status": 500' in text
    assert [each.log for each in sessions] == [["begun", f"rolled back: {error}"]]


async def test_a_stream_that_shutdown_ends_rolls_back(connect) -> None:
    app = application()

    async def endless() -> AsyncIterator[str]:
        yield "a"
        await asyncio.Event().wait()

    @app.get("/")
    async def endpoint(session: Inject[Session]) -> EventSourceResponse:
        return sse(endless())

    async with app.router.lifespan_context(app):
        client = connect(app, "/")
        task = client.start()
        await client.sent("http.response.body")
    await task

    assert b'"status": 503' in client.body
    assert [each.log for each in sessions] == [["begun", "rolled back: ApplicationStoppingError"]]


async def test_a_stream_that_fails_on_a_websocket_rolls_back(connect) -> None:
    app = application()

    @app.websocket("/")
    async def endpoint(websocket: WebSocket, session: Inject[Session]) -> None:
        await websocket.accept()
        await send_stream(websocket, failing())
        await websocket.close()

    async with app.router.lifespan_context(app):
        await connect(app, "/", "websocket").start()

    assert [each.log for each in sessions] == [["begun", "rolled back: ValueError"]]


def test_a_missing_exit_stack_of_fastapi_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="use a version of FastAPI that toolbox supports"):
        exit_stack(Request({"type": "http"}), AFTER_ENDPOINT)
