"""A client that leaves cancels the invocations it started; what it did not start goes on."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any, Protocol

import pytest
import websockets
from fastapi import APIRouter, BackgroundTasks, FastAPI, Request, Response, WebSocket
from fastapi.responses import StreamingResponse

from toolbox import (
    AiMessage,
    ChatRequest,
    ChatResponse,
    CompleteResponse,
    Container,
    PartialResponse,
    StreamEvent,
    produces,
    register_ai_service,
)
from toolbox_fastapi import ClientDisconnectedError, Inject, install, sse

pytestmark = pytest.mark.anyio


@register_ai_service
class Assistant(Protocol):
    async def chat(self, text: str) -> str: ...

    def stream(self, text: str) -> AsyncIterator[str]: ...


@register_ai_service
class SyncAssistant(Protocol):
    def chat(self, text: str) -> str: ...


class Silent:
    """A model that is asked and does not answer; it counts who waits for it and whose waiting was ended."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.answer = asyncio.Event()
        self.cancelled = 0

    async def chat(self, request: ChatRequest) -> ChatResponse:
        self.asked.set()
        try:
            await self.answer.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return ChatResponse(AiMessage("answered"))

    async def stream(self, request: ChatRequest) -> AsyncIterator[StreamEvent]:
        yield PartialResponse("a")
        yield CompleteResponse(await self.chat(request))


class Session:
    ended: list[str]


class Probe:
    """An application, its silent model, and how its request scopes ended."""

    def __init__(self) -> None:
        self.model = Silent()
        self.ended: list[str] = []
        self.happened: list[str] = []
        self.over = asyncio.Event()

        @produces(scope="request")
        async def session() -> AsyncIterator[Session]:
            try:
                yield Session()
            except BaseException as error:
                self.ended.append(type(error).__name__)
                raise
            else:
                self.ended.append("well")
            finally:
                self.over.set()

        self.session = session
        self.container = Container(models={"default": self.model})
        self.container.register(session, Assistant, SyncAssistant)
        self.app = FastAPI()
        install(self.app, self.container)


def declare(probe: Probe, routes: Any) -> None:
    @routes.get("/awaited")
    async def awaited(assistant: Inject[Assistant], session: Inject[Session], background: BackgroundTasks) -> str:
        background.add_task(probe.happened.append, "background")
        return await assistant.chat("go")

    @routes.post("/posted")
    async def posted(body: dict[str, int], assistant: Inject[Assistant], session: Inject[Session]) -> str:
        return await assistant.chat("go")

    @routes.get("/collected")
    async def collected(assistant: Inject[Assistant], session: Inject[Session]) -> list[str]:
        return [text async for text in assistant.stream("go")]

    @routes.get("/gathered")
    async def gathered(assistant: Inject[Assistant], session: Inject[Session]) -> list[str]:
        return await asyncio.gather(assistant.chat("one"), assistant.chat("two"))

    @routes.get("/threaded")
    def threaded(assistant: Inject[SyncAssistant], session: Inject[Session]) -> str:
        return assistant.chat("go")

    @routes.get("/streamed")
    async def streamed(assistant: Inject[Assistant], session: Inject[Session]) -> StreamingResponse:
        return StreamingResponse(assistant.stream("go"))

    @routes.get("/events")
    async def events(assistant: Inject[Assistant], session: Inject[Session]) -> Any:
        return sse(assistant.stream("go"))


PATHS = ["/awaited", "/posted", "/collected", "/gathered", "/threaded", "/streamed", "/events"]


@pytest.mark.parametrize("plain", [False, True], ids=["own route", "plain router"])
@pytest.mark.parametrize("path", PATHS)
async def test_a_client_that_disconnects_cancels_its_invocation(connect, path: str, plain: bool) -> None:
    probe = Probe()
    routes: Any = APIRouter() if plain else probe.app
    declare(probe, routes)
    if plain:
        probe.app.include_router(routes)

    async with probe.app.router.lifespan_context(probe.app):
        posted = path == "/posted"
        client = connect(probe.app, path, method="POST" if posted else "GET", body=b'{"a": 1}' if posted else b"")
        task = client.start()
        await probe.model.asked.wait()
        await asyncio.sleep(0)
        client.leave()
        await asyncio.wait_for(task, 60)

    assert probe.model.cancelled == (2 if path == "/gathered" else 1)
    assert probe.ended == ["ClientDisconnectedError"]
    assert probe.happened == []


async def pass_on(request: Request, call_next: Any) -> Response:
    return await call_next(request)


@pytest.mark.parametrize("middleware", [False, True], ids=["", "through a middleware"])
@pytest.mark.parametrize("path", PATHS)
async def test_a_disconnect_under_uvicorn_is_not_logged_as_an_error(
    serving, caplog: pytest.LogCaptureFixture, path: str, middleware: bool
) -> None:
    probe = Probe()
    declare(probe, probe.app)
    if middleware:
        probe.app.middleware("http")(pass_on)

    async with serving(probe.app) as client:
        logging.getLogger("uvicorn").addHandler(caplog.handler)
        port = client.base_url.port
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        method, body = ("POST", b'{"a": 1}') if path == "/posted" else ("GET", b"")
        writer.write(
            f"{method} {path} HTTP/1.1\r\nhost: app\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        await probe.model.asked.wait()
        writer.close()
        await asyncio.wait_for(probe.over.wait(), 60)

    assert probe.model.cancelled == (2 if path == "/gathered" else 1)
    assert probe.ended == ["ClientDisconnectedError"]
    assert caplog.messages == []


async def test_a_websocket_disconnect_is_not_an_error_for_uvicorn(serving, caplog: pytest.LogCaptureFixture) -> None:
    probe = Probe()

    @probe.app.websocket("/")
    async def conversation(websocket: WebSocket, assistant: Inject[Assistant], session: Inject[Session]) -> None:
        await websocket.accept()
        await websocket.send_text(await assistant.chat("go"))

    async with serving(probe.app) as client:
        logging.getLogger("uvicorn").addHandler(caplog.handler)
        async with websockets.connect(f"ws://127.0.0.1:{client.base_url.port}/"):
            await probe.model.asked.wait()
        await asyncio.wait_for(probe.over.wait(), 60)

    assert probe.ended == ["ClientDisconnectedError"]
    assert caplog.messages == []


async def test_an_endpoint_can_catch_the_disconnect_and_continue(connect) -> None:
    probe = Probe()

    @probe.app.get("/")
    async def endpoint(assistant: Inject[Assistant], session: Inject[Session], later: BackgroundTasks) -> None:
        later.add_task(probe.happened.append, "later")
        try:
            await assistant.chat("go")
        except ClientDisconnectedError:
            probe.happened.append("seen")
            probe.model.answer.set()
            probe.happened.append(await assistant.chat("note it down"))

    async with probe.app.router.lifespan_context(probe.app):
        client = connect(probe.app, "/")
        task = client.start()
        await probe.model.asked.wait()
        client.leave()
        await task

    assert probe.happened == ["seen", "answered", "later"]
    assert probe.ended == ["ClientDisconnectedError"]


async def test_background_tasks_are_not_cancelled(connect) -> None:
    probe = Probe()

    @probe.app.get("/")
    async def endpoint(assistant: Inject[Assistant], session: Inject[Session], background: BackgroundTasks) -> None:
        async def later() -> None:
            probe.happened.append(await assistant.chat("later"))

        background.add_task(later)

    async with probe.app.router.lifespan_context(probe.app):
        client = connect(probe.app, "/")
        task = client.start()
        await probe.model.asked.wait()
        client.leave()
        await asyncio.sleep(0.01)
        assert not task.done()
        probe.model.answer.set()
        await task

    assert probe.happened == ["answered"]
    assert probe.ended == ["well"]


async def test_background_tasks_of_a_broken_stream_are_not_cancelled(connect) -> None:
    probe = Probe()

    @probe.app.get("/")
    async def endpoint(assistant: Inject[Assistant], background: BackgroundTasks) -> StreamingResponse:
        async def later() -> None:
            probe.happened.append(await assistant.chat("later"))

        async def body() -> AsyncIterator[str]:
            yield "a"
            await asyncio.Event().wait()

        background.add_task(later)
        return StreamingResponse(body())

    async with probe.app.router.lifespan_context(probe.app):
        client = connect(probe.app, "/")
        task = client.start()
        await client.sent("http.response.body")
        client.leave()
        await probe.model.asked.wait()
        await asyncio.sleep(0.01)
        probe.model.answer.set()
        await task

    assert probe.happened == ["answered"]


async def test_an_endpoint_that_started_no_invocation_runs_to_its_end(connect) -> None:
    probe = Probe()
    proceed = asyncio.Event()

    @probe.app.get("/")
    async def endpoint(session: Inject[Session]) -> None:
        await proceed.wait()
        probe.happened.append("done")

    async with probe.app.router.lifespan_context(probe.app):
        client = connect(probe.app, "/")
        task = client.start()
        await asyncio.sleep(0.01)
        client.leave()
        await asyncio.sleep(0.01)
        proceed.set()
        await task

    assert probe.happened == ["done"]
    assert probe.ended == ["well"]


async def test_a_body_that_is_still_arriving_is_not_lost(connect) -> None:
    probe = Probe()
    read: list[bytes] = []

    @probe.app.post("/")
    async def endpoint(request: Request, assistant: Inject[Assistant]) -> str:
        said = await assistant.chat("before the body is read")
        async for chunk in request.stream():
            read.append(chunk)
        return said

    async with probe.app.router.lifespan_context(probe.app):
        client = connect(probe.app, "/", method="POST")
        client._incoming.get_nowait()
        task = client.start()
        chunks = [bytes([number]) * 1000 for number in range(50)]
        for chunk in chunks:
            client.say({"type": "http.request", "body": chunk, "more_body": True})
        client.say({"type": "http.request", "body": b"end", "more_body": False})
        await probe.model.asked.wait()
        await asyncio.sleep(0.01)
        probe.model.answer.set()
        await task

    assert b"".join(read) == b"".join(chunks) + b"end"
    assert client.status == 200


async def test_a_websocket_client_that_disconnects_cancels_its_invocation(connect) -> None:
    probe = Probe()

    @probe.app.websocket("/")
    async def endpoint(websocket: WebSocket, assistant: Inject[Assistant], session: Inject[Session]) -> None:
        await websocket.accept()
        async for text in websocket.iter_text():
            await websocket.send_text(await assistant.chat(text))

    async with probe.app.router.lifespan_context(probe.app):
        client = connect(probe.app, "/", "websocket")
        task = client.start()
        client.say({"type": "websocket.receive", "text": "go"})
        await probe.model.asked.wait()
        client.leave()
        await task

    assert probe.model.cancelled == 1
    assert probe.ended == ["ClientDisconnectedError"]


async def test_other_cancellations_are_not_reported_as_disconnects(connect) -> None:
    probe = Probe()
    declare(probe, probe.app)

    async with probe.app.router.lifespan_context(probe.app):
        client = connect(probe.app, "/awaited")
        task = client.start()
        await probe.model.asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    assert probe.ended == ["CancelledError"]


class Pausing:
    """A model that answers, each time after some turns of the loop."""

    async def chat(self, request: ChatRequest) -> ChatResponse:
        for _ in range(3):
            await asyncio.sleep(0)
        return ChatResponse(AiMessage("answered"))

    async def stream(self, request: ChatRequest) -> AsyncIterator[StreamEvent]:
        yield PartialResponse("answered")
        yield CompleteResponse(await self.chat(request))


@pytest.mark.parametrize("path", PATHS)
async def test_a_client_can_disconnect_at_any_time(connect, path: str) -> None:
    probe = Probe()
    probe.container = Container(models={"default": Pausing()}).register(Assistant, SyncAssistant, probe.session)
    probe.app = FastAPI()
    install(probe.app, probe.container)
    declare(probe, probe.app)

    async with probe.app.router.lifespan_context(probe.app):
        before = asyncio.all_tasks()
        for turns in range(60):
            probe.ended.clear()
            posted = path == "/posted"
            client = connect(probe.app, path, method="POST" if posted else "GET", body=b'{"a": 1}' if posted else b"")
            task = client.start()
            for _ in range(turns):
                await asyncio.sleep(0)
            client.leave()
            await asyncio.wait_for(task, 60)

            # Noticed or not, each scope ends once; what was not answered has not ended well.
            assert probe.ended in ([], ["ClientDisconnectedError"], ["well"])
            if probe.ended == ["well"]:
                assert client.status == 200
                assert client.is_complete
            assert asyncio.all_tasks() == before

        probe.ended.clear()
        posted = path == "/posted"
        client = connect(probe.app, path, method="POST" if posted else "GET", body=b'{"a": 1}' if posted else b"")
        await asyncio.wait_for(client.start(), 60)

    assert probe.ended == ["well"]  # one that stays is answered
