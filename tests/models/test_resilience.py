"""Servers that fail, delay, disconnect or never answer; limits; connections and event loops."""

import asyncio
import gc
import json
import socket
import ssl
import threading
import time
import weakref
from typing import Any

import httpx2
import pytest

from tests.conftest import Clock
from tests.models.scripted_server import HI, OK, OK_STREAM, Scripted, ScriptedServer, Serve, chunk, serving, sse, stream
from toolbox import (
    ChatResponse,
    CompleteResponse,
    ModelConnectionError,
    ModelError,
    ModelHttpError,
    ModelProtocolError,
    ModelTimeoutError,
    OpenAiChatModel,
    PartialResponse,
    StreamEvent,
)
from toolbox.models.pools import ConnectionPools

pytestmark = pytest.mark.anyio

SOON = {"retry-after-ms": "1"}


def failing(status: int, **headers: str) -> Scripted:
    return Scripted(b'{"error": {"message": "no"}}', status=status, headers=headers or SOON)


async def text_of(model: OpenAiChatModel) -> str | None:
    *_, last = [event async for event in model.stream(HI)]
    assert isinstance(last, CompleteResponse)
    return last.response.ai_message.text


@pytest.mark.parametrize("status", [408, 409, 429, 500, 503, 529])
@pytest.mark.parametrize("streamed", [False, True])
async def test_transient_statuses_are_retried(serve: Serve, status: int, streamed: bool) -> None:
    server = await serve([failing(status), failing(status), OK_STREAM if streamed else OK])
    model = OpenAiChatModel("m", server.url)

    answer = await text_of(model) if streamed else (await model.chat(HI)).ai_message.text
    await model.aclose()

    assert (answer, len(server.requests)) == ("ok", 3)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422])
async def test_permanent_errors_are_not_retried(serve: Serve, status: int) -> None:
    server = await serve([failing(status), OK])
    model = OpenAiChatModel("m", server.url)

    with pytest.raises(ModelHttpError) as caught:
        await model.chat(HI)
    await model.aclose()

    assert (caught.value.status, len(server.requests)) == (status, 1)


async def test_there_is_one_layer_of_retries(serve: Serve) -> None:
    server = await serve(lambda _: failing(503))
    model = OpenAiChatModel("m", server.url, max_retries=3)

    with pytest.raises(ModelHttpError, match="503"):
        await model.chat(HI)
    with pytest.raises(ModelHttpError, match="503"):
        await text_of(model)
    await model.aclose()

    assert len(server.requests) == 8


@pytest.mark.usefixtures("loaded")
async def test_retry_after_is_respected(serve: Serve) -> None:
    server = await serve([failing(429, **{"retry-after": "0.2"}), OK])
    model = OpenAiChatModel("m", server.url)

    began = time.monotonic()
    await model.chat(HI)
    waited = time.monotonic() - began
    await model.aclose()

    assert 0.2 <= waited < 2


async def test_an_unreachable_server_raises_a_connection_error() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        model = OpenAiChatModel("m", f"http://127.0.0.1:{unused.getsockname()[1]}/v1", max_retries=0)

        with pytest.raises(ModelConnectionError):
            await model.chat(HI)
        with pytest.raises(ModelConnectionError):
            await text_of(model)
        await model.aclose()


@pytest.mark.parametrize("transport", ["aiohttp", "httpx2"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_connection_that_breaks_before_the_reply_is_retried(
    serve: Serve, transport: Any, streamed: bool
) -> None:
    end = OK_STREAM if streamed else OK
    server = await serve([Scripted(chunks=[], cut=True, content_type="text/event-stream"), end])
    model = OpenAiChatModel("m", server.url, transport=transport)

    answer = await text_of(model) if streamed else (await model.chat(HI)).ai_message.text
    await model.aclose()

    assert (answer, len(server.requests)) == ("ok", 2)


@pytest.mark.parametrize("transport", ["aiohttp", "httpx2"])
async def test_a_stream_is_not_retried_after_its_first_event(serve: Serve, transport: Any) -> None:
    server = await serve([stream(chunk({"role": "assistant"}), done=False, cut=True), OK_STREAM])
    model = OpenAiChatModel("m", server.url, transport=transport)

    with pytest.raises(ModelConnectionError):
        await text_of(model)
    await model.aclose()

    assert len(server.requests) == 1


@pytest.mark.parametrize("transport", ["aiohttp", "httpx2"])
async def test_the_timeout_is_for_the_whole_call(serve: Serve, transport: Any, clock: Clock) -> None:
    never = asyncio.Event()

    def late(_: object) -> Scripted:
        clock.advance(101)
        return Scripted(wait=never)

    server = await serve(late)
    model = OpenAiChatModel("m", server.url, timeout=100, transport=transport)

    began = time.perf_counter()
    with pytest.raises(ModelTimeoutError):
        await model.chat(HI)
    with pytest.raises(TimeoutError):
        await text_of(model)
    waited = time.perf_counter() - began
    never.set()
    await model.aclose()

    assert waited < 5
    assert len(server.requests) == 2


async def test_the_timeout_applies_to_a_running_stream(serve: Serve, clock: Clock) -> None:
    never = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + sse(chunk({"content": "Hel"}))[0])
        await never.wait()
        writer.close()

    listener = await asyncio.start_server(handle, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/v1"
    seen: list[StreamEvent] = []
    model = OpenAiChatModel("m", url, timeout=100)
    slow_reads = OpenAiChatModel("m", url, read_timeout=0.2, max_retries=0)

    with pytest.raises(ModelTimeoutError):
        async for event in model.stream(HI):
            seen.append(event)
            clock.advance(101)
    with pytest.raises(ModelTimeoutError):
        await text_of(slow_reads)
    never.set()
    await model.aclose()
    await slow_reads.aclose()
    listener.close()

    assert seen == [PartialResponse("Hel")]


async def test_concurrent_requests_are_limited_and_others_wait(serve: Serve) -> None:
    gate = asyncio.Event()
    server = await serve(lambda body: Scripted(OK.body, wait=gate) if not body.get("stream") else OK_STREAM)
    model = OpenAiChatModel("m", server.url, max_concurrent_requests=2)

    calls = [asyncio.create_task(model.chat(HI)) for _ in range(4)]
    streams = [asyncio.create_task(text_of(model)) for _ in range(2)]
    await server.until(lambda: server.open == 2)
    assert len(server.requests) == 2
    gate.set()
    await asyncio.gather(*calls, *streams)
    await model.aclose()

    assert server.most_open == 2
    assert len(server.requests) == 6


async def test_waiting_for_the_limit_counts_towards_the_timeout(serve: Serve) -> None:
    server = await serve([OK_STREAM])
    model = OpenAiChatModel("m", server.url, max_concurrent_requests=1, timeout=2)

    events = model.stream(HI)
    await anext(events)  # holds the only place until it is left
    with pytest.raises(ModelTimeoutError):
        await model.chat(HI)
    await events.aclose()  # type: ignore[attr-defined]  # an asynchronous generator
    await model.aclose()

    assert len(server.requests) == 1


async def test_leaving_a_stream_closes_its_connection(serve: Serve) -> None:
    server = await serve(
        lambda _: Scripted(
            chunks=[each for _ in range(2000) for each in sse(chunk({"content": "x" * 1000}), done=False)],
            content_type="text/event-stream",
        )
    )
    model = OpenAiChatModel("m", server.url)

    events = model.stream(HI)
    async for _ in events:
        break
    await events.aclose()  # type: ignore[attr-defined]  # an asynchronous generator
    await server.until(lambda: server.open == 0)
    await model.aclose()


async def test_cancelling_a_call_closes_its_connection_and_releases_the_limit(serve: Serve) -> None:
    gate = asyncio.Event()
    server = await serve(lambda _: Scripted(OK.body, wait=gate))
    model = OpenAiChatModel("m", server.url, max_concurrent_requests=1)

    task = asyncio.create_task(model.chat(HI))
    await server.until(lambda: server.open == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.set()
    assert (await model.chat(HI)).ai_message.text == "ok"
    await model.aclose()


@pytest.mark.usefixtures("loaded")
async def test_a_finished_stream_that_the_server_never_closes_does_not_delay_the_reply(serve: Serve) -> None:
    never = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        writer.write(b"".join(sse(chunk({"content": "ok"}), chunk({}, "stop"))))
        await never.wait()
        writer.close()

    listener = await asyncio.start_server(handle, "127.0.0.1", 0)
    model = OpenAiChatModel("m", f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/v1")

    began = time.monotonic()
    assert await text_of(model) == "ok"
    waited = time.monotonic() - began
    never.set()
    await model.aclose()
    listener.close()

    assert waited < 2


async def test_connections_are_reused() -> None:
    opened = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        await server.handle(reader, writer)

    server = ScriptedServer(lambda body: OK_STREAM if body.get("stream") else OK)
    listener = await asyncio.start_server(handle, "127.0.0.1", 0)
    model = OpenAiChatModel("m", f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/v1")

    for _ in range(3):
        await model.chat(HI)
        await text_of(model)
    await model.aclose()
    listener.close()

    assert opened == 1


@pytest.mark.parametrize("transport", ["aiohttp", "httpx2"])
async def test_models_share_the_certificates_of_the_system(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, transport: Any
) -> None:
    server = await serve([OK, OK])

    async def answer() -> str | None:
        model = OpenAiChatModel("m", server.url, transport=transport)
        try:
            return (await model.chat(HI)).ai_message.text
        finally:
            await model.aclose()

    await answer()

    def load_verify_locations(self: ssl.SSLContext, *_: Any, **__: Any) -> None:
        raise AssertionError("the certificates were read again")

    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", load_verify_locations)

    assert await answer() == "ok"


def test_one_model_serves_several_event_loops() -> None:
    server_loop = asyncio.new_event_loop()
    thread = threading.Thread(target=server_loop.run_forever)
    thread.start()
    context = serving(lambda _: OK)
    server = asyncio.run_coroutine_threadsafe(context.__aenter__(), server_loop).result(5)
    model = OpenAiChatModel("m", server.url)

    async def ask() -> str | None:
        replies = await asyncio.gather(model.chat(HI), model.chat(HI))
        return replies[0].ai_message.text

    async def ask_and_close() -> str | None:
        try:
            return await ask()
        finally:
            await model.aclose()

    assert asyncio.run(ask_and_close()) == "ok"
    assert asyncio.run(ask_and_close()) == "ok"  # it may be used again after it was closed
    elsewhere = asyncio.run_coroutine_threadsafe(ask(), server_loop).result(5)
    assert (elsewhere, asyncio.run(ask_and_close())) == ("ok", "ok")

    asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), server_loop).result(5)
    server_loop.call_soon_threadsafe(server_loop.stop)
    thread.join()
    server_loop.close()


def test_an_event_loop_that_ends_without_aclose_causes_no_warnings(recwarn: pytest.WarningsRecorder) -> None:
    with pytest.raises(ModelConnectionError):
        asyncio.run(_fails())
    gc.collect()


def test_closed_event_loops_are_forgotten() -> None:
    reply = httpx2.Response(200, content=OK.body, headers={"content-type": "application/json"})
    transport = httpx2.MockTransport(lambda request: reply)
    model = OpenAiChatModel("m", "http://x.test/v1", transport=transport)
    pools = ConnectionPools()
    loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []

    async def ask() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        await model.chat(HI)
        pools.pool("here", lambda: httpx2.AsyncHTTPTransport())

    for _ in range(4):
        asyncio.run(ask())
    gc.collect()

    assert [each() is None for each in loops] == [True, True, True, False]


async def test_errors_that_are_not_converted_are_not_their_own_cause() -> None:
    given = LookupError("the vault is down")

    def key() -> str:
        raise given

    with pytest.raises(LookupError) as caught:
        await OpenAiChatModel("m", "http://127.0.0.1:9/v1", key).chat(HI)

    assert caught.value is given
    assert caught.value.__cause__ is None


async def _fails() -> ChatResponse:
    model = OpenAiChatModel("m", "http://127.0.0.1:9/v1", max_retries=0)
    try:
        return await model.chat(HI)
    finally:
        await model.aclose()


async def test_every_invalid_reply_raises_a_model_error(serve: Serve) -> None:
    """Invalid HTTP heads and wrong content lengths."""
    heads = [
        b"",
        b"garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json; charset=x\r\ncontent-length: 2\r\n\r\n\xff{",
        b"HTTP/1.1 999 Odd\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 302 Away\r\nlocation: http://127.0.0.1:9/\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 204 Empty\r\n\r\n",
    ]
    for transport in ("aiohttp", "httpx2"):
        for head in heads:
            for ask in (OpenAiChatModel.chat, lambda model, _: text_of(model)):
                await _fails_with_model_error(head, transport, ask)


async def _fails_with_model_error(head: bytes, transport: Any, ask: Any) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head)
        writer.close()

    listener = await asyncio.start_server(handle, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/v1"
    model = OpenAiChatModel("m", url, max_retries=0, timeout=5.0, transport=transport)
    try:
        with pytest.raises(ModelError):
            await ask(model, HI)
    finally:
        await model.aclose()
        listener.close()


async def test_a_protocol_error_contains_status_request_id_and_excerpt(serve: Serve) -> None:
    server = await serve([Scripted(b"<html>Log in</html>"), Scripted(chunks=[b"<html>Log in</html>"])])
    model = OpenAiChatModel("m", server.url)

    for ask in (model.chat(HI), text_of(model)):
        with pytest.raises(ModelProtocolError) as caught:
            await ask
        assert (caught.value.status, caught.value.request_id) == (200, "req_1")
        assert "Log in" in caught.value.body
    await model.aclose()


async def test_an_error_with_a_successful_status_contains_the_request_id(serve: Serve) -> None:
    server = await serve([Scripted(json.dumps({"error": {"message": "no", "code": 502}}).encode())])
    model = OpenAiChatModel("m", server.url)

    with pytest.raises(ModelHttpError) as caught:
        await model.chat(HI)
    await model.aclose()

    assert (caught.value.status, caught.value.request_id) == (502, "req_1")


async def test_endless_pings_after_a_reply_are_ignored(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolbox.models.transport.AFTER_END", 0.2)
    pings = [b": ping\n\n"] * 100_000
    whole = sse(chunk({"content": "ok"}), chunk({}, "stop"), done=False)
    server = await serve([Scripted(chunks=[*whole, *pings], content_type="text/event-stream")])
    model = OpenAiChatModel("m", server.url, timeout=30)

    assert await text_of(model) == "ok"
    await model.aclose()
