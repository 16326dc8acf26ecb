"""Replies are limited in size and time, whatever the server sends."""

import asyncio
import contextlib
import functools
import gzip
import socket
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Protocol

import httpx2
import pytest

from tests.rest.http_server import Answer
from toolbox import Container, rest
from toolbox.settings import RestSettings

pytestmark = pytest.mark.anyio

KIB = 1024


@rest.register_rest_client(config_key="bounded")
class Bounded(Protocol):
    @rest.get("/x")
    async def text(self) -> str: ...

    @rest.get("/x")
    def text_now(self) -> str: ...

    @rest.get("/x")
    async def raw(self) -> bytes: ...

    @rest.get("/x")
    async def value(self) -> list[int]: ...

    @rest.get("/x")
    def chunks(self) -> AsyncIterator[bytes]: ...

    @rest.get("/x")
    def lines(self) -> AsyncIterator[str]: ...

    @rest.get("/x")
    def lines_now(self) -> Iterator[str]: ...

    @rest.get("/x")
    def items(self) -> AsyncIterator[int]: ...

    @rest.get("/x")
    def events(self) -> AsyncIterator[rest.ServerSentEvent]: ...


class Endless:
    """A body without an end, which counts what the client has taken of it."""

    def __init__(self, piece: bytes) -> None:
        self.piece = piece
        self.sent = 0

    def __call__(self, received: object) -> Answer:
        return Answer(self._pieces(), self.status, self.headers)

    status = 200
    headers: dict[str, str] = {}  # noqa: RUF012 - replaced, never changed

    def _pieces(self) -> Iterator[bytes]:
        while True:
            self.sent += len(self.piece)
            yield self.piece


async def both(client: Bounded) -> list[rest.RestClientError]:
    """The errors of the asynchronous and the synchronous method."""
    errors: list[rest.RestClientError] = []
    for ask in (client.text(), asyncio.to_thread(client.text_now)):
        with pytest.raises(rest.RestClientError) as caught:
            await ask
        errors.append(caught.value)
    return errors


@pytest.mark.parametrize("status", [200, 404, 500])
async def test_an_endless_body_is_an_error_at_the_limit(server, status) -> None:
    endless = server.handler = Endless(b"x" * 16 * KIB)
    endless.status = status
    client = rest.create_rest_client(Bounded, url=server.url, max_reply_bytes=64 * KIB)

    for error in await both(client):
        assert "longer than max_reply_bytes (65536 bytes)" in str(error)
        assert error.status == status
    assert endless.sent < 50 * 2**20  # what fits into the buffers of sockets comes on top


async def test_a_body_of_exactly_the_limit_is_read(server) -> None:
    server.answer("x" * 100)
    client = rest.create_rest_client(Bounded, url=server.url, max_reply_bytes=100)
    assert len(await client.text()) == 100

    server.answer("x" * 101)
    await both(client)


@functools.cache
def bomb(coding):
    return (gzip.compress if coding == "gzip" else zlib.compress)(bytes(16 * 2**20))


@pytest.mark.parametrize("headers", [{}, {"Accept-Encoding": "gzip, deflate"}])
@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_a_decompression_bomb_is_an_error(server, headers, coding) -> None:
    server.answer(Answer(bomb(coding), headers={"Content-Encoding": coding}))
    client = rest.create_rest_client(Bounded, url=server.url, max_reply_bytes=2**20, headers=headers)

    await both(client)


async def test_compressed_bodies_are_read_only_when_the_program_asks_for_them(server) -> None:
    server.answer(Answer(gzip.compress(b"[1]"), headers={"Content-Encoding": "gzip"}))

    with pytest.raises(rest.RestDecodeError, match=r"compressed \(gzip\), which was not requested"):
        await rest.create_rest_client(Bounded, url=server.url).value()
    assert server.last.header("Accept-Encoding") == "identity"

    asking = rest.create_rest_client(Bounded, url=server.url, headers={"accept-encoding": "br;q=0, gzip;q=0.5"})
    assert await asking.value() == [1]
    assert server.last.header("Accept-Encoding") == "br;q=0, gzip;q=0.5"
    server.answer(Answer(b"x", headers={"Content-Encoding": "br"}))
    with pytest.raises(rest.RestDecodeError):
        await asking.raw()


async def test_a_compressed_bomb_in_a_stream_is_decoded_in_pieces(server) -> None:
    server.answer(Answer(gzip.compress(bytes(4 * 2**20)), headers={"Content-Encoding": "gzip"}))
    client = rest.create_rest_client(
        Bounded, url=server.url, max_reply_bytes=2**20, headers={"Accept-Encoding": "gzip"}
    )

    sizes = [len(chunk) async for chunk in client.chunks()]
    assert sum(sizes) == 4 * 2**20
    assert max(sizes) <= 2**20

    with pytest.raises(rest.RestClientError, match="a piece of the reply is longer than max_reply_bytes"):
        await anext(client.lines())
    with pytest.raises(rest.RestClientError, match="a piece of the reply"):
        await asyncio.to_thread(lambda: next(iter(client.lines_now())))


@pytest.mark.parametrize(
    ("method", "piece", "media_type"),
    [
        ("lines", b"x" * 4000, "text/plain"),
        ("items", b"[" * 4000, "application/x-ndjson"),
        ("items", b"1," * 4000, "application/json"),
        ("events", b"data: x\n" * 1000, "text/event-stream"),
        ("events", b"event: " + b"x" * 4000, "text/event-stream"),
    ],
)
async def test_incomplete_items_of_a_stream_are_limited(server, method, piece, media_type) -> None:
    server.handler = Endless(piece)
    server.handler.headers = {"Content-Type": media_type}
    client = rest.create_rest_client(Bounded, url=server.url, max_reply_bytes=64 * KIB)

    with pytest.raises(rest.RestClientError, match="a piece of the reply"):
        await anext(getattr(client, method)())


async def test_streams_may_be_longer_than_the_limit(server) -> None:
    server.answer(Answer(b"line\n" * 10_000, headers={"Content-Type": "text/plain"}))
    client = rest.create_rest_client(Bounded, url=server.url, max_reply_bytes=100)
    assert len([line async for line in client.lines()]) == 10_000

    server.answer(Answer(b"data: x\n\n" * 1000, headers={"Content-Type": "text/event-stream"}))
    assert len([event async for event in client.events()]) == 1000


async def test_the_limit_is_a_setting_of_each_client(server, monkeypatch) -> None:
    assert RestSettings().max_reply_bytes == 64 * 2**20
    monkeypatch.setenv("TOOLBOX_REST__BOUNDED__MAX_REPLY_BYTES", "10")
    monkeypatch.setenv("TOOLBOX_REST__BOUNDED__URL", server.url)
    server.answer("x" * 11)

    async with Container().register(Bounded) as container:
        with pytest.raises(rest.RestClientError, match="10 bytes"):
            await container.get(Bounded).text()
    async with Container().register(Bounded, rest.rest_settings("bounded", max_reply_bytes=11)) as container:
        assert await container.get(Bounded).text() == "x" * 11


async def test_the_limit_holds_for_transports_without_a_network_too() -> None:
    transport = httpx2.MockTransport(lambda request: httpx2.Response(200, text="x" * 11))
    client = rest.create_rest_client(Bounded, url="http://x.example", transport=transport, max_reply_bytes=10)

    with pytest.raises(rest.RestClientError, match="10 bytes"):
        await client.text()


async def test_a_body_that_the_authentication_reads_is_limited_too(server) -> None:
    class Reading(httpx2.Auth):
        requires_response_body = True

    server.handler = Endless(b"x" * 16 * KIB)
    client = rest.create_rest_client(Bounded, url=server.url, max_reply_bytes=64 * KIB, auth=Reading())

    await both(client)


async def test_clients_still_work_after_a_reply_that_was_too_long(server) -> None:
    client = rest.create_rest_client(Bounded, url=server.url, max_reply_bytes=100, max_connections=1)

    for _ in range(3):
        server.answer("x" * 1000)
        await both(client)
        server.answer("good")
        assert await client.text() == "good"
        assert await asyncio.to_thread(client.text_now) == "good"


@pytest.mark.parametrize("charset", ["zlib", "hex", "idna", "undefined", "punycode", "no such", "rot13", "\x01"])
async def test_an_encoding_that_is_not_for_text_is_read_as_utf_8(server, charset) -> None:
    headers = {"Content-Type": f"text/plain; charset={charset}"}
    client = rest.create_rest_client(Bounded, url=server.url)

    server.answer(Answer("Grüße".encode(), headers=headers))
    if charset != "\x01":  # which the HTTP library refuses
        assert await client.text() == "Grüße"
        assert [line async for line in client.lines()] == ["Grüße"]


async def test_endless_headers_are_errors(server) -> None:
    server.answer(Answer("x", headers={f"X-{n}": "y" * 1000 for n in range(300)}))
    client = rest.create_rest_client(Bounded, url=server.url)

    await both(client)


async def test_deeply_nested_json_is_an_error(server) -> None:
    server.answer(Answer(b"[" * 100_000, headers={"Content-Type": "application/json"}))
    client = rest.create_rest_client(Bounded, url=server.url)

    with pytest.raises(rest.RestDecodeError):
        await client.value()
    with pytest.raises(rest.RestDecodeError):
        await anext(client.items())


@pytest.mark.parametrize(
    "value",
    [
        "9" * 400,
        "9" * 10_000,
        "1e999",
        "-1",
        "nan",
        "inf",
        "٣٣٣٣٣٣٣٣٣",
        "Fri, 31 Dec 99999 23:59:59 GMT",
        "Fri, 99 Dec 2026 23:59:59 GMT",
        "Fri, 31 Dec 9999 23:59:59 -9999",
        "Mon, 01 Jan 0001 00:00:00 +2359",
        "Fri, 31 Dec 2026 23:59:59 +99999999999",
        "Fri, 31 Dec",
        ",",
        "1 2 3 4 5",
        ", ".join(["1"] * 50),
        "\xff\xfe",
    ],
)
@pytest.mark.parametrize("status", [429, 503])
async def test_an_invalid_retry_after_never_hides_the_failure(server, value, status) -> None:
    server.answer(Answer("busy", status, {"Retry-After": value.encode().decode("latin-1")}))
    client = rest.create_rest_client(Bounded, url=server.url, retries=1, retry_max_wait=0.01)

    for error in await both(client):
        assert error.status == status


def test_the_limit_is_positive() -> None:
    with pytest.raises(ValueError, match="max_reply_bytes"):
        rest.rest_settings("bounded", max_reply_bytes=0)


def test_the_errors_of_clients_are_exported_with_them() -> None:
    import toolbox

    for name in ("RestClientError", "RestTimeoutError", "RestDecodeError"):
        assert getattr(rest, name) is getattr(toolbox, name)
        assert name in rest.__all__


@contextlib.contextmanager
def raw_server(serve: Callable[[socket.socket, threading.Event], None]) -> Iterator[str]:
    """Run `serve` for each connection until it is closed or the event is set; yield the URL."""
    stopped = threading.Event()
    listening = socket.create_server(("127.0.0.1", 0))

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            serve(connection, stopped)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                if stopped.is_set():
                    connection.close()
                    return
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        stopped.set()
        with contextlib.suppress(OSError):
            socket.create_connection(listening.getsockname()).close()
        accepting.join()
        listening.close()


def trickle_headers(connection: socket.socket, stopped: threading.Event) -> None:
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\nX-Long: ")
    while not stopped.wait(0.05):
        connection.sendall(b"x")


def trickle_status_line(connection: socket.socket, stopped: threading.Event) -> None:
    connection.recv(65536)
    for byte in b"HTTP/1.1 200 " + b"O" * 10_000:
        if stopped.wait(0.05):
            return
        connection.sendall(bytes((byte,)))


def send_interim_replies(connection: socket.socket, stopped: threading.Event) -> None:
    connection.recv(65536)
    while not stopped.wait(0.05):
        connection.sendall(b"HTTP/1.1 102 Processing\r\n\r\n")


def flood_with_interim_replies(connection: socket.socket, stopped: threading.Event) -> None:
    connection.recv(65536)
    while not stopped.is_set():
        connection.sendall(b"HTTP/1.1 103 Early Hints\r\nLink: <x>\r\n\r\n" * 50)


def trickle_after_a_good_reply(connection: socket.socket, stopped: threading.Event) -> None:
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
    trickle_headers(connection, stopped)


@pytest.mark.parametrize(
    ("serve", "timeout"),
    [
        (trickle_headers, 0.4),
        (trickle_status_line, 0.4),
        (send_interim_replies, 0.4),
        (flood_with_interim_replies, 0.2),  # it keeps both threads busy
    ],
)
async def test_the_timeout_is_for_the_whole_wait_for_headers_in_both_kinds_of_method(serve, timeout) -> None:
    with raw_server(serve) as url:
        client = rest.create_rest_client(Bounded, url=url, timeout=timeout)
        for ask in (client.text, lambda: asyncio.to_thread(client.text_now)):
            started = time.monotonic()
            with pytest.raises(rest.RestTimeoutError):
                await asyncio.wait_for(ask(), 60)
            assert time.monotonic() - started < 10


def test_the_timeout_holds_for_later_requests_on_one_connection_too() -> None:
    with raw_server(trickle_after_a_good_reply) as url:
        client = rest.create_rest_client(Bounded, url=url, timeout=1.5, max_connections=1)
        assert client.text_now() == "ok"
        with pytest.raises(rest.RestTimeoutError):
            client.text_now()
        assert client.text_now() == "ok"


def test_the_timeout_holds_for_a_synchronous_stream_until_its_headers_are_there() -> None:
    with raw_server(trickle_headers) as url:
        client = rest.create_rest_client(Bounded, url=url, timeout=0.4)
        with pytest.raises(rest.RestTimeoutError):
            next(iter(client.lines_now()))


def test_a_trace_function_of_a_filter_is_still_called(server) -> None:
    events: list[str] = []

    def trace(request: httpx2.Request) -> None:
        request.extensions["trace"] = lambda event, info: events.append(event)

    @rest.register_rest_client(config_key="traced", request_filters=[trace])
    class Traced(Protocol):
        @rest.get("/x")
        def text_now(self) -> str: ...

    server.answer("ok")
    assert rest.create_rest_client(Traced, url=server.url).text_now() == "ok"
    assert "http11.receive_response_headers.complete" in events
