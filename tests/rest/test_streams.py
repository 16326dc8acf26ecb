"""Replies that are given piece by piece."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Protocol

import httpx2
import pytest
from pydantic import BaseModel

from tests.rest.http_server import Answer
from toolbox import rest
from toolbox.errors import BlockingCallNotAllowedError, RestClientError, RestDecodeError, RestTimeoutError

pytestmark = pytest.mark.anyio


class Tick(BaseModel):
    n: int


@rest.register_rest_client(config_key="ticks")
class Ticks(Protocol):
    @rest.get("/lines")
    def lines(self) -> AsyncIterator[str]: ...

    @rest.get("/items")
    def items(self) -> AsyncIterator[Tick]: ...

    @rest.get("/events")
    def events(self) -> AsyncIterator[rest.ServerSentEvent]: ...

    @rest.get("/bytes")
    def chunks(self) -> AsyncIterator[bytes]: ...

    @rest.get("/items")
    def items_now(self) -> Iterator[Tick]: ...


async def collected(stream):
    return [each async for each in stream]


async def test_lines_are_given_as_they_are_complete(server) -> None:
    server.answer(Answer(iter(["grü".encode()[:3], "grü".encode()[3:] + b"n\r\nro", b"t\n\nblau"])))
    ticks = rest.create_rest_client(Ticks, url=server.url)

    assert await collected(ticks.lines()) == ["grün", "rot", "", "blau"]


async def test_a_line_is_there_before_the_next_is_sent(server) -> None:
    seen = threading.Event()

    def chunks():
        yield b"first\n"
        assert seen.wait(60)
        yield b"second\n"

    server.answer(Answer(chunks()))
    ticks = rest.create_rest_client(Ticks, url=server.url)
    stream = ticks.lines()

    assert await anext(stream) == "first"
    seen.set()
    assert await anext(stream) == "second"
    await stream.aclose()


@pytest.mark.parametrize(
    ("media_type", "text"),
    [
        ("application/x-ndjson", b'{"n":1}\n\n{"n":2}'),
        ("application/json-seq", b'\x1e{"n":1}\n\x1e{"n":2}\n'),
        ("text/event-stream; charset=utf-8", b': hello\ndata: {"n":\ndata: 1}\n\nid: 7\nevent: t\ndata:{"n":2}\n\n'),
        ("application/json", b' [{"n": 1}, {"n": 2}]'),
    ],
)
async def test_items_are_read_from_every_usual_form(server, media_type, text) -> None:
    ticks = rest.create_rest_client(Ticks, url=server.url)

    server.answer(Answer(text, headers={"Content-Type": media_type}))
    assert await collected(ticks.items()) == [Tick(n=1), Tick(n=2)]
    server.answer(Answer(text, headers={"Content-Type": media_type}))
    assert await asyncio.to_thread(lambda: list(ticks.items_now())) == [Tick(n=1), Tick(n=2)]


async def test_an_event_has_its_name_and_id(server) -> None:
    server.answer(Answer(b"id: 7\nevent: t\ndata: a\n\ndata: b", headers={"Content-Type": "text/event-stream"}))
    ticks = rest.create_rest_client(Ticks, url=server.url)

    assert await collected(ticks.events()) == [rest.ServerSentEvent("a", "t", "7"), rest.ServerSentEvent("b")]
    assert server.last.header("Accept") == "text/event-stream"


async def test_bytes_are_passed_on_unchanged(server) -> None:
    server.answer(Answer(iter([b"\x00\xff", b"\x01"])))
    ticks = rest.create_rest_client(Ticks, url=server.url)

    assert b"".join(await collected(ticks.chunks())) == b"\x00\xff\x01"


async def test_a_bad_item_is_an_error_at_its_place(server) -> None:
    server.answer(Answer(b'{"n":1}\n{"m":2}\n', headers={"Content-Type": "application/x-ndjson"}))
    ticks = rest.create_rest_client(Ticks, url=server.url)
    stream = ticks.items()

    assert await anext(stream) == Tick(n=1)
    with pytest.raises(RestDecodeError, match="n: Field required"):
        await anext(stream)


async def test_a_failure_is_raised_in_the_iteration_with_its_body(server) -> None:
    server.answer(Answer("nothing here", 404))
    ticks = rest.create_rest_client(Ticks, url=server.url)

    with pytest.raises(RestClientError, match="nothing here") as caught:
        await anext(ticks.lines())

    assert caught.value.status == 404


async def test_leaving_a_stream_ends_its_connection(server) -> None:
    left = threading.Event()

    def endless():
        try:
            while True:
                yield b"x\n" * 1000
        finally:
            left.set()

    server.handler = lambda received: Answer(endless())
    ticks = rest.create_rest_client(Ticks, url=server.url)
    stream = ticks.lines()

    assert await anext(stream) == "x"
    await stream.aclose()

    assert await asyncio.to_thread(left.wait, 60)


class Unread(httpx2.AsyncByteStream):
    """A body that never ends."""

    def __init__(self) -> None:
        self.is_closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"x"
        await asyncio.Event().wait()

    async def aclose(self) -> None:
        self.is_closed = True


async def test_a_call_that_is_cancelled_in_a_response_filter_releases_its_connection() -> None:
    waits = asyncio.Event()

    async def wait(response: httpx2.Response) -> None:
        waits.set()
        await asyncio.Event().wait()

    @rest.register_rest_client(response_filters=[wait])
    class Filtered(Protocol):
        @rest.get("/lines")
        def lines(self) -> AsyncIterator[str]: ...

    body = Unread()
    transport = httpx2.MockTransport(lambda request: httpx2.Response(200, stream=body))
    client = rest.create_rest_client(Filtered, url="http://x.test", transport=transport)
    reading = asyncio.create_task(collected(client.lines()))
    await waits.wait()
    reading.cancel()
    await asyncio.wait([reading])

    assert reading.cancelled()
    assert body.is_closed


async def test_the_timeout_of_a_method_limits_reading_the_body_of_a_failure() -> None:
    @rest.register_rest_client
    class Limited(Protocol):
        @rest.get("/lines", timeout=0.05)
        def lines(self) -> AsyncIterator[str]: ...

    body = Unread()
    transport = httpx2.MockTransport(lambda request: httpx2.Response(400, stream=body))
    client = rest.create_rest_client(Limited, url="http://x.test", transport=transport, timeout=3600)

    async with asyncio.timeout(60):
        with pytest.raises(RestTimeoutError):
            await anext(client.lines())
    assert body.is_closed


async def test_a_synchronous_stream_on_the_thread_of_a_loop_is_refused(server) -> None:
    ticks = rest.create_rest_client(Ticks, url=server.url)

    with pytest.raises(BlockingCallNotAllowedError):
        ticks.items_now()


async def test_a_stream_is_retried_until_it_has_begun(server) -> None:
    server.answer(Answer("", 503), Answer(iter([b"here\n"])))
    ticks = rest.create_rest_client(Ticks, url=server.url, retries=1)

    assert await collected(ticks.lines()) == ["here"]
