"""The events of a run as server-sent events: with their numbers, so that a client that reconnects misses nothing."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

import httpx2
import pytest
from fastapi import FastAPI, Header, WebSocket

from tests.runs.one_run import NOW, events_of, store_with_a_run
from toolbox import BeforeToolExecution, Container, PartialResponse, ToolExecuted, ToolExecution, ToolExecutionRequest
from toolbox.runs import InMemoryRunStore, RunChanges
from toolbox.runs.event_log import event_to_json
from toolbox.runs.run_events import RunEnded, RunEvents
from toolbox_fastapi import install, send_stream, sse

pytestmark = pytest.mark.anyio

REQUEST = ToolExecutionRequest("c1", "add", "{}")


@pytest.fixture
async def store() -> InMemoryRunStore:
    return await store_with_a_run()


@pytest.fixture
def app(store: InMemoryRunStore) -> FastAPI:
    app = FastAPI()
    install(app, Container())

    def events(after: str | None, run_id: str = "run") -> RunEvents:
        return events_of(store, after, run_id)

    @app.get("/events")
    async def follow(last_event_id: Annotated[str | None, Header()] = None) -> Any:
        return sse(events(last_event_id))

    @app.get("/filtered")
    async def filtered() -> Any:
        return sse(events(None), filter=lambda event: event if isinstance(event, PartialResponse) else None)

    @app.get("/unknown")
    async def unknown() -> Any:
        return sse(events(None, "unknown"))

    @app.websocket("/socket")
    async def socket(websocket: WebSocket) -> None:
        await websocket.accept()
        await send_stream(websocket, events(websocket.headers.get("last-event-id")))

    return app


async def add(store: InMemoryRunStore, *events: Any) -> None:
    await store.add_events("run", 1, [event_to_json(each) for each in events])


def frames(text: str) -> list[dict[str, str]]:
    """The frames of a body: their fields."""
    return [dict(line.split(": ", 1) for line in frame.splitlines()) for frame in text.split("\n\n") if frame.strip()]


async def test_events_have_their_numbers_as_ids(
    store: InMemoryRunStore, app: FastAPI, running: Callable[..., Any]
) -> None:
    execution = ToolExecution(REQUEST, "3", {"secret": 1}, False, NOW, 0.5)
    await add(store, PartialResponse("a\nb"), BeforeToolExecution(REQUEST), ToolExecuted(execution))
    await store.append("run", 1, [], RunChanges(status="completed"))

    async with running(app) as client:
        reply = await client.get("/events")

    sent = frames(reply.text)
    assert [(each.get("id"), each["event"]) for each in sent] == [
        ("1", "PartialResponse"),
        ("2", "BeforeToolExecution"),
        ("3", "ToolExecuted"),
        ("4", "RunEnded"),
        (None, "done"),
    ]
    assert json.loads(sent[0]["data"]) == {"text": "a\nb"}
    assert "secret" not in reply.text
    assert json.loads(sent[3]["data"]) == {"status": "completed", "error": None}


async def test_a_client_that_reconnects_misses_nothing(
    store: InMemoryRunStore, app: FastAPI, serving: Callable[..., Any]
) -> None:
    await add(store, PartialResponse("a"), PartialResponse("b"))

    async with serving(app) as client:
        seen = await first_frame(client, {})
        assert seen["id"] == "1"
        await add(store, PartialResponse("c"))
        await store.append("run", 1, [], RunChanges(status="failed"))
        rest = await client.get("/events", headers={"Last-Event-ID": seen["id"]})
        again = await client.get("/events", headers={"Last-Event-ID": "4"})

    assert [each.get("id") for each in frames(rest.text)] == ["2", "3", "4", None]
    assert (again.status_code, again.content) == (204, b"")


async def first_frame(client: httpx2.AsyncClient, headers: dict[str, str]) -> dict[str, str]:
    """Reads one frame, then hangs up."""
    text = ""
    async with client.stream("GET", "/events", headers=headers) as reply:
        async for chunk in reply.aiter_text():
            text += chunk
            if "\n\n" in text:
                break
    return frames(text)[0]


async def test_two_viewers_see_the_same(store: InMemoryRunStore, app: FastAPI, serving: Callable[..., Any]) -> None:
    async with serving(app) as client:
        viewers = [asyncio.create_task(client.get("/events")) for _ in range(2)]
        await add(store, PartialResponse("a"))
        await add(store, PartialResponse("b"))
        await store.append("run", 1, [], RunChanges(status="completed"))
        one, other = await asyncio.gather(*viewers)

    assert one.text == other.text
    assert [each.get("id") for each in frames(one.text)] == ["1", "2", "3", None]


async def test_a_running_run_keeps_a_client_that_has_everything(
    store: InMemoryRunStore, app: FastAPI, serving: Callable[..., Any]
) -> None:
    await add(store, PartialResponse("a"))

    async with serving(app) as client:
        waiting = asyncio.create_task(client.get("/events", headers={"Last-Event-ID": "1"}))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await store.append("run", 1, [], RunChanges(status="completed"))
        reply = await waiting

    assert [each["event"] for each in frames(reply.text)] == ["RunEnded", "done"]


async def test_a_filter_gets_the_events_without_numbers(
    store: InMemoryRunStore, app: FastAPI, running: Callable[..., Any]
) -> None:
    await add(store, BeforeToolExecution(REQUEST), PartialResponse("a"))
    await store.append("run", 1, [], RunChanges(status="completed"))

    async with running(app) as client:
        reply = await client.get("/filtered")

    assert [(each.get("id"), each["event"]) for each in frames(reply.text)] == [
        ("2", "PartialResponse"),
        (None, "done"),
    ]


@pytest.mark.parametrize("filtered", [False, True])
async def test_clients_get_only_the_type_of_a_runs_error(filtered: bool, running: Callable[..., Any]) -> None:
    app = FastAPI()
    install(app, Container())

    async def stored() -> AsyncIterator[Any]:
        yield RunEnded("failed", "ConnectionError: postgres://user:secret@db")

    @app.get("/")
    async def endpoint() -> Any:
        return sse(stored(), filter=(lambda event: event) if filtered else None)

    async with running(app) as client:
        reply = await client.get("/")

    assert json.loads(frames(reply.text)[0]["data"]) == {"status": "failed", "error": "ConnectionError"}


async def test_an_unknown_run_is_answered_before_the_stream(app: FastAPI, running: Callable[..., Any]) -> None:
    async with running(app) as client:
        reply = await client.get("/unknown")

    assert reply.status_code >= 400
    assert reply.headers["content-type"] == "application/problem+json"


async def test_frames_of_a_web_socket_have_the_number(
    store: InMemoryRunStore, app: FastAPI, serving: Callable[..., Any]
) -> None:
    from websockets.asyncio.client import connect

    await add(store, PartialResponse("a"), PartialResponse("b"))
    await store.append("run", 1, [], RunChanges(status="completed"))

    async with serving(app) as client:
        address = f"ws://127.0.0.1:{client.base_url.port}/socket"
        async with connect(address, additional_headers={"Last-Event-ID": "1"}) as socket:
            sent = [json.loads(await socket.recv()) for _ in range(3)]

    assert [(each["event"], each.get("id")) for each in sent] == [
        ("PartialResponse", 2),
        ("RunEnded", 3),
        ("done", None),
    ]
