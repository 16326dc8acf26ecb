"""Streams to clients: server-sent events and WebSocket frames, what they say, and how they end."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest
from fastapi import BackgroundTasks, FastAPI, HTTPException, WebSocket
from fastapi.sse import EventSourceResponse, ServerSentEvent
from fastapi.testclient import TestClient

from toolbox import (
    BeforeToolExecution,
    Container,
    ModelHttpError,
    PartialResponse,
    Result,
    ToolboxError,
    ToolExecuted,
    ToolExecution,
    ToolExecutionRequest,
    ToolExecutionResult,
    ToolProgress,
)
from toolbox_fastapi import ClientDisconnectedError, install, send_stream, sse

pytestmark = pytest.mark.anyio


def streaming(stream: Callable[[], Any], **options: Any) -> FastAPI:
    app = FastAPI()
    install(app, Container())

    @app.get("/")
    async def endpoint() -> EventSourceResponse:
        return sse(stream(), **options)

    return app


async def of(*items: Any) -> AsyncIterator[Any]:
    for item in items:
        yield item


def events_in(text: str) -> list[dict[str, str]]:
    """Return the fields of each event, without comments."""
    found = []
    for block in text.strip().split("\n\n"):
        lines = [line.partition(": ") for line in block.splitlines() if not line.startswith(":")]
        found.append({field: value for field, _, value in lines})
    return found


async def test_texts_are_json_strings_and_the_stream_ends_with_done(running) -> None:
    async with running(streaming(lambda: of("Grüße,\n", "you"))) as client:
        reply = await client.get("/")

    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"
    assert events_in(reply.text) == [
        {"id": "0", "data": '"Grüße,\\n"'},
        {"data": '"you"'},
        {"event": "done", "data": "null"},
    ]


@pytest.mark.parametrize("asynchronous", [True, False])
async def test_an_endpoint_can_set_its_response_class(running, asynchronous: bool) -> None:
    app = FastAPI()
    install(app, Container())

    async def endpoint() -> EventSourceResponse:
        return sse(of("a"))

    def on_thread() -> EventSourceResponse:
        return sse(of("a"))

    app.get("/", response_class=EventSourceResponse)(endpoint if asynchronous else on_thread)

    async with running(app) as client:
        reply = await client.get("/")

    assert events_in(reply.text) == [{"id": "0", "data": '"a"'}, {"event": "done", "data": "null"}]
    assert list(app.openapi()["paths"]["/"]["get"]["responses"]["200"]["content"]) == ["text/event-stream"]


async def test_events_are_named_after_their_types(running) -> None:
    @dataclass
    class City:
        name: str

    class Odd:
        def __str__(self) -> str:
            return "odd"

    request = ToolExecutionRequest("1", "add", '{"a":1}', {"k": 1})
    execution = ToolExecution(request, "2", Odd(), False, datetime(2026, 1, 2, tzinfo=UTC), 0.5)
    progress = ToolProgress(request, 1, 2, "half")
    items = [PartialResponse("Hi"), progress, ToolExecuted(execution), City("Bonn"), {"a": float("nan")}, [1, 2]]

    async with running(streaming(lambda: of(*items))) as client:
        events = events_in((await client.get("/")).text)

    assert [(each.get("event"), json.loads(each["data"])) for each in events] == [
        ("PartialResponse", {"text": "Hi"}),
        (
            "ToolProgress",
            {
                "request": {"id": "1", "name": "add", "arguments": '{"a":1}', "attributes": {"k": 1}},
                "done": 1.0,
                "total": 2.0,
                "message": "half",
            },
        ),
        (
            "ToolExecuted",
            {
                "execution": {
                    "request": {"id": "1", "name": "add", "arguments": '{"a":1}', "attributes": {"k": 1}},
                    "result": "2",
                    "is_error": False,
                    "started_at": "2026-01-02T00:00:00Z",
                    "duration": 0.5,
                    "attributes": {},
                }
            },
        ),
        (None, {"name": "Bonn"}),
        (None, {"a": None}),
        (None, [1, 2]),
        ("done", None),
    ]


async def test_an_endpoint_can_send_its_own_events(running) -> None:
    made = [ServerSentEvent(data={"a": 1}, event="own", id="7"), ServerSentEvent(raw_data="[DONE]", retry=5)]

    async with running(streaming(lambda: of(*made))) as client:
        events = events_in((await client.get("/")).text)

    assert events == [
        {"event": "own", "data": '{"a":1}', "id": "7"},
        {"data": "[DONE]", "retry": "5"},
        {"event": "done", "data": "null"},
    ]


@pytest.mark.parametrize(
    ("error", "status"),
    [(ModelHttpError(500, "secret"), 502), (KeyError("secret"), 500), (HTTPException(403, "not yours"), 403)],
    ids=["ModelError", "KeyError", "HTTPException"],
)
async def test_a_failure_ends_the_stream_and_is_logged(running, caplog: Any, error: Exception, status: int) -> None:
    async def failing() -> AsyncIterator[str]:
        yield "a"
        raise error

    async with running(streaming(failing)) as client:
        *_, last = events = events_in((await client.get("/")).text)

    assert len(events) == 2
    assert last["event"] == "failure"
    assert json.loads(last["data"])["status"] == status
    assert "secret" not in last["data"]
    assert type(error).__name__ in caplog.text


async def test_a_reconnecting_client_gets_204_and_nothing_starts(running) -> None:
    started = False
    closed: list[bool] = []

    class Stream:
        def __aiter__(self) -> AsyncIterator[str]:
            nonlocal started
            started = True
            return of("a")

        async def aclose(self) -> None:
            closed.append(True)

    async with running(streaming(Stream)) as client:
        reply = await client.get("/", headers={"Last-Event-ID": "0"})

    assert (reply.status_code, reply.content) == (204, b"")
    assert not started
    assert closed == [True]


async def test_a_comment_is_sent_after_silence(connect) -> None:
    proceed = asyncio.Event()

    async def slow() -> AsyncIterator[str]:
        await proceed.wait()
        yield "a"

    app = streaming(slow, ping=0.01)
    async with app.router.lifespan_context(app):
        client = connect(app, "/")
        task = client.start()
        await client.sent("http.response.body")
        proceed.set()
        await task

    pings, _, rest = client.body.decode().rpartition(": ping\n")
    assert pings == pings.count(": ping\n") * ": ping\n"
    assert events_in(rest) == [{"id": "0", "data": '"a"'}, {"event": "done", "data": "null"}]
    assert client.response[-1]["more_body"] is False


async def test_a_disconnect_closes_the_stream_and_background_tasks_still_run(connect) -> None:
    happened: list[str] = []

    async def endless() -> AsyncIterator[str]:
        try:
            yield "a"
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            happened.append("cancelled")
            raise
        finally:
            await asyncio.sleep(0)
            happened.append("closed")

    app = FastAPI()
    install(app, Container())

    async def later() -> None:
        await asyncio.sleep(0)
        happened.append("later")

    @app.get("/")
    async def endpoint(background: BackgroundTasks) -> EventSourceResponse:
        background.add_task(later)
        return sse(endless())

    async with app.router.lifespan_context(app):
        client = connect(app, "/")
        task = client.start()
        await client.sent("http.response.body")
        client.leave()
        await task

    assert happened == ["cancelled", "closed", "later"]


async def test_a_slow_client_slows_the_stream_down(connect) -> None:
    made = 0
    enough = asyncio.Event()

    async def eager() -> AsyncIterator[int]:
        nonlocal made
        while True:
            made += 1
            if made == 3:
                enough.set()
            yield made

    app = streaming(eager, ping=0.01)
    async with app.router.lifespan_context(app):
        client = connect(app, "/")
        taken = asyncio.Semaphore(3)

        async def send(message: Any) -> None:
            await taken.acquire()
            client.response.append(message)

        client._send = send
        task = client.start()
        await enough.wait()
        await asyncio.sleep(0.05)
        assert made == 3
        client.leave()
        await task


async def test_a_synchronous_iterator_is_read_on_a_thread(running) -> None:
    import threading

    threads: set[str] = set()

    def texts() -> Iterator[str]:
        for text in "ab":
            threads.add(threading.current_thread().name)
            yield text

    async with running(streaming(texts)) as client:
        assert len(events_in((await client.get("/")).text)) == 3

    assert threading.current_thread().name not in threads


async def test_a_stopping_application_ends_its_streams(connect) -> None:
    closed = asyncio.Event()

    async def endless() -> AsyncIterator[str]:
        try:
            yield "a"
            await asyncio.Event().wait()
        finally:
            closed.set()

    app = streaming(endless)
    async with app.router.lifespan_context(app):
        client = connect(app, "/")
        task = client.start()
        await client.sent("http.response.body")
    await task

    assert closed.is_set()
    *_, last = events_in(client.body.decode())
    assert (last["event"], json.loads(last["data"])["status"]) == ("failure", 503)
    assert client.response[-1]["more_body"] is False


# --- WebSockets


def conversing(stream: Callable[[], Any], ended: list[Any]) -> FastAPI:
    app = FastAPI()
    install(app, Container())

    @app.websocket("/")
    async def endpoint(websocket: WebSocket) -> None:
        await websocket.accept()
        try:
            async for _ in websocket.iter_text():
                await send_stream(websocket, stream())
        except ToolboxError as error:
            ended.append(error)

    return app


async def frames_of(connect: Any, app: FastAPI) -> list[Any]:
    async with app.router.lifespan_context(app):
        client = connect(app, "/", "websocket")
        task = client.start()
        client.say({"type": "websocket.receive", "text": "go"})
        client.leave()
        await task
    return [json.loads(each["text"]) for each in client.response if each["type"] == "websocket.send"]


async def test_a_websocket_gets_each_item_as_a_frame(connect) -> None:
    frames = await frames_of(connect, conversing(lambda: of("Hi", PartialResponse("x"), {"a": 1}), []))

    assert frames == [
        {"event": "message", "data": "Hi"},
        {"event": "PartialResponse", "data": {"text": "x"}},
        {"event": "message", "data": {"a": 1}},
        {"event": "done", "data": None},
    ]


async def test_a_failure_on_a_websocket_is_a_frame_and_the_websocket_stays_open(connect) -> None:
    async def failing() -> AsyncIterator[str]:
        raise ModelHttpError(500, "secret")
        yield ""

    ended: list[Any] = []
    frames = await frames_of(connect, conversing(failing, ended))

    assert [(each["event"], each["data"]["status"]) for each in frames] == [("failure", 502)]
    assert ended == []


async def test_a_websocket_disconnect_closes_the_stream(connect) -> None:
    closed = asyncio.Event()

    async def endless() -> AsyncIterator[str]:
        try:
            yield "a"
            await asyncio.Event().wait()
        finally:
            closed.set()

    ended: list[Any] = []
    app = conversing(endless, ended)
    async with app.router.lifespan_context(app):
        client = connect(app, "/", "websocket")
        task = client.start()
        client.say({"type": "websocket.receive", "text": "go"})
        await client.sent("websocket.send")
        client.leave()
        await task

    assert closed.is_set()
    assert [type(each) for each in ended] == [ClientDisconnectedError]


async def test_messages_that_arrive_during_a_stream_are_kept_in_order(connect) -> None:
    proceed = asyncio.Event()

    async def slow() -> AsyncIterator[str]:
        yield "a"
        await proceed.wait()

    app = FastAPI()
    install(app, Container())
    heard: list[str] = []

    @app.websocket("/")
    async def endpoint(websocket: WebSocket) -> None:
        await websocket.accept()
        await send_stream(websocket, slow())
        async for text in websocket.iter_text():
            heard.append(text)

    async with app.router.lifespan_context(app):
        client = connect(app, "/", "websocket")
        task = client.start()
        await client.sent("websocket.send")
        for number in range(40):
            client.say({"type": "websocket.receive", "text": str(number)})
        await asyncio.sleep(0.01)
        proceed.set()
        client.leave()
        await task

    assert heard == [str(number) for number in range(40)]


# --- what a client may see

SECRET = {"password_hash": "secret"}


def executed() -> ToolExecuted:
    request = ToolExecutionRequest("1", "find", "{}")
    return ToolExecuted(ToolExecution(request, "found", SECRET, False, datetime.now(UTC), 0.1))


async def test_the_object_that_a_tool_returned_is_not_sent(running, connect) -> None:
    result = Result("answer", (executed().execution,))
    items = (executed(), executed().execution, ToolExecutionResult("found", SECRET), result)
    async with running(streaming(lambda: of(*items))) as client:
        text = (await client.get("/")).text

    assert text.count('"found"') == 4
    assert "secret" not in text
    assert "result_object" not in text


async def test_a_filter_decides_what_is_sent(running) -> None:
    def shown(event: Any) -> Any:
        match event:
            case ToolExecuted(execution):
                return {"tool": execution.request.name}
            case PartialResponse():
                return event
        return None

    request = ToolExecutionRequest("1", "find", "{}")
    items = (BeforeToolExecution(request), executed(), PartialResponse("text"))
    async with running(streaming(lambda: of(*items), filter=shown)) as client:
        events = events_in((await client.get("/")).text)

    assert events == [
        {"event": "ToolExecuted", "id": "0", "data": '{"tool":"find"}'},
        {"event": "PartialResponse", "data": '{"text":"text"}'},
        {"event": "done", "data": "null"},
    ]


async def test_a_filter_can_send_everything(running) -> None:
    async with running(streaming(lambda: of(executed()), filter=lambda event: event)) as client:
        assert "secret" in (await client.get("/")).text


async def test_a_failing_filter_ends_the_stream_as_a_failure(running) -> None:
    async with running(streaming(lambda: of("text"), filter=lambda event: event.missing)) as client:
        [event] = events_in((await client.get("/")).text)

    assert event["event"] == "failure"


def test_a_websocket_gets_no_more_than_server_sent_events(connect) -> None:
    app = FastAPI()
    install(app, Container())

    @app.websocket("/")
    async def talk(websocket: WebSocket) -> None:
        await websocket.accept()
        await send_stream(websocket, of(executed(), "x"))
        await send_stream(websocket, of(executed(), "x"), filter=lambda item: item if isinstance(item, str) else None)

    with TestClient(app) as client, client.websocket_connect("/") as websocket:
        frames = [websocket.receive_json() for _ in range(5)]

    assert [frame["event"] for frame in frames] == ["ToolExecuted", "message", "done", "message", "done"]
    assert "result_object" not in frames[0]["data"]["execution"]
