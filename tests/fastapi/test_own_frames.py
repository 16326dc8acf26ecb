"""`sse(…, encode=…)`: every frame of a stream is as a function of the program says."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.sse import EventSourceResponse, ServerSentEvent

from tests.runs.one_run import events_of, store_with_a_run
from toolbox import Container, ModelHttpError, PartialResponse
from toolbox.runs import RunChanges
from toolbox.runs.event_log import event_to_json
from toolbox.runs.run_events import RunEnded
from toolbox_fastapi import StreamEnded, StreamFailed, install, sse

pytestmark = pytest.mark.anyio


async def of(*items: Any) -> AsyncIterator[Any]:
    for item in items:
        if isinstance(item, Exception):
            raise item
        yield item


def streaming(stream: Callable[[], Any], **options: Any) -> FastAPI:
    app = FastAPI()
    install(app, Container())

    @app.get("/")
    async def endpoint() -> EventSourceResponse:
        return sse(stream(), **options)

    return app


def as_front_end(item: Any) -> Any:
    """Write the format of an existing front end."""
    match item:
        case str():
            return {"type": "delta", "text": item}
        case StreamEnded():
            return ServerSentEvent(raw_data="[DONE]")
        case StreamFailed(problem):
            return {"type": "error", "status": problem["status"], "title": problem["title"]}
        case _:
            return None


async def text_of(running: Any, *items: Any, encode: Any = as_front_end) -> str:
    async with running(streaming(lambda: of(*items), encode=encode)) as client:
        return str((await client.get("/")).text)


async def test_a_json_value_is_a_frame_with_data_alone(running: Any) -> None:
    assert await text_of(running, "a", "b\n") == (
        'data: {"type":"delta","text":"a"}\n\ndata: {"type":"delta","text":"b\\n"}\n\ndata: [DONE]\n\n'
    )


@pytest.mark.parametrize(
    ("value", "data"), [("ä", '"ä"'), (3, "3"), ([1, None], "[1,null]"), ({}, "{}"), (False, "false"), ("", '""')]
)
async def test_every_json_value_can_be_sent(running: Any, value: Any, data: str) -> None:
    text = await text_of(running, "x", encode=lambda item: value if item == "x" else None)

    assert text == f"data: {data}\n\n"


async def test_none_sends_nothing_also_at_the_end(running: Any) -> None:
    assert await text_of(running, "a", 1, encode=lambda item: item if item == 1 else None) == "data: 1\n\n"


async def test_an_event_has_the_fields_that_the_function_sets(running: Any) -> None:
    def encode(item: Any) -> Any:
        if item == "x":
            return ServerSentEvent(data={"n": 1}, event="delta", id="7", retry=5)
        return None

    assert await text_of(running, "x", encode=encode) == 'event: delta\ndata: {"n":1}\nid: 7\nretry: 5\n\n'


async def test_it_gets_each_item_and_the_end_once(running: Any) -> None:
    seen: list[Any] = []

    await text_of(running, "a", PartialResponse("b"), {"c": 1}, encode=seen.append)

    assert seen == ["a", PartialResponse("b"), {"c": 1}, StreamEnded()]


async def test_a_failure_is_the_last_and_has_the_problem_details(running: Any) -> None:
    seen: list[Any] = []

    def encode(item: Any) -> Any:
        seen.append(item)
        return as_front_end(item)

    text = await text_of(running, "a", ModelHttpError(503, "secret"), encode=encode)

    assert text.split("\n\n")[1] == 'data: {"type":"error","status":502,"title":"Bad Gateway"}'
    assert "secret" not in text
    [_, failed] = seen
    assert failed.problem == {
        "type": "about:blank",
        "title": "Bad Gateway",
        "status": 502,
        "detail": "The language model did not return a usable answer.",
    }


@pytest.mark.parametrize("fails_at", ["a", StreamEnded()], ids=["an item", "the end"])
async def test_an_error_of_the_function_is_a_failure_of_the_stream(running: Any, fails_at: Any) -> None:
    def encode(item: Any) -> Any:
        if item == fails_at:
            raise KeyError("bug")
        return as_front_end(item)

    text = await text_of(running, "a", encode=encode)

    assert text.endswith('data: {"type":"error","status":500,"title":"Internal Server Error"}\n\n')


async def test_a_function_that_always_fails_ends_the_stream(running: Any, caplog: pytest.LogCaptureFixture) -> None:
    def encode(item: Any) -> Any:
        raise KeyError("bug")

    with caplog.at_level(logging.ERROR, "toolbox.fastapi"):
        assert await text_of(running, "a", encode=encode) == ""

    assert [each.getMessage() for each in caplog.records] == [
        "a stream of server-sent events failed",
        "encode= of a stream of server-sent events failed",
    ]


async def test_events_of_the_stream_keep_their_ids(running: Any) -> None:
    events = [ServerSentEvent(data="a", id="1"), ServerSentEvent(data="b", id="2"), ServerSentEvent(data="c")]

    def encode(item: Any) -> Any:
        match item:
            case ServerSentEvent(data="a"):
                return {"kept": True}
            case ServerSentEvent(data="b"):
                return ServerSentEvent(data="b", id="own")
            case ServerSentEvent():
                return "no id"
        return None

    assert await text_of(running, *events, encode=encode) == (
        'data: {"kept":true}\nid: 1\n\ndata: "b"\nid: own\n\ndata: "no id"\n\n'
    )


async def test_the_events_of_a_run_keep_their_numbers(running: Any) -> None:
    store = await store_with_a_run()
    await store.add_events("run", 1, [event_to_json(PartialResponse(each)) for each in "abc"])
    await store.append("run", 1, [], RunChanges(status="completed"))
    seen: list[Any] = []

    def encode(item: Any) -> Any:
        seen.append(item)
        match item:
            case PartialResponse("b"):
                return None
            case PartialResponse("c"):
                return ServerSentEvent(data="c", event="delta")
            case PartialResponse(text):
                return text
            case RunEnded(status):
                return ServerSentEvent(data=status, id="own")
        return None

    async with running(streaming(lambda: events_of(store, None, "run"), encode=encode)) as client:
        text = (await client.get("/")).text

    assert text == ('data: "a"\nid: 1\n\nevent: delta\ndata: "c"\nid: 3\n\ndata: "completed"\nid: own\n\n')
    assert seen == [*map(PartialResponse, "abc"), RunEnded("completed", None), StreamEnded()]


async def test_the_stop_of_the_application_is_a_failure_too(running: Any) -> None:
    began = asyncio.Event()

    async def endless() -> AsyncIterator[str]:
        yield "a"
        began.set()
        await asyncio.Event().wait()

    async with running(streaming(endless, encode=as_front_end)) as client:
        reading = asyncio.create_task(client.get("/"))
        await began.wait()

    assert (await reading).text.split("\n\n")[1:] == [
        'data: {"type":"error","status":503,"title":"Service Unavailable"}',
        "",
    ]


async def test_a_filter_beside_it_is_a_mistake() -> None:
    with pytest.raises(TypeError, match="pass filter= or encode=, not both"):
        sse(of("a"), filter=lambda item: item, encode=as_front_end)


@pytest.mark.parametrize("option", ["filter", "encode"])
async def test_a_coroutine_function_is_a_mistake(option: Any) -> None:
    async def later(item: Any) -> Any:
        return item

    options: dict[str, Any] = {option: later}
    with pytest.raises(TypeError, match="called without await"):
        sse(of("a"), **options)


async def test_an_empty_id_that_the_function_sets_is_sent(running: Any) -> None:
    """An empty `id:` tells a browser to forget the last one."""

    def encode(item: Any) -> Any:
        return None if isinstance(item, StreamEnded) else ServerSentEvent(data=1, id="")

    assert await text_of(running, ServerSentEvent(data="a", id="1"), encode=encode) == "data: 1\nid: \n\n"
