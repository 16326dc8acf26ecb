"""Statuses, headers and compressed errors of servers."""

import asyncio
import email.utils
import gzip
import json
import time
from typing import Any

import pytest

from tests.models.scripted_server import HI, OK, OK_STREAM, Scripted, Serve, chunk, completion, stream
from toolbox import (
    ChatRequest,
    CompleteResponse,
    ImageContent,
    ModelError,
    ModelHttpError,
    OpenAiChatModel,
    UserMessage,
)

pytestmark = pytest.mark.anyio

BUSY = b'{"error": {"message": "slow down"}}'


async def answer(model: OpenAiChatModel, streamed: bool, request: ChatRequest = HI) -> str | None:
    try:
        if not streamed:
            return (await model.chat(request)).ai_message.text
        *_, last = [event async for event in model.stream(request)]
        assert isinstance(last, CompleteResponse)
        return last.response.ai_message.text
    finally:
        await model.aclose()


def in_seconds(seconds: float) -> str:
    return email.utils.formatdate(time.time() + seconds, usegmt=True)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("headers", "at_least", "at_most"),
    [
        ({"retry-after-ms": "300"}, 0.3, 2),
        ({"retry-after": "0.3"}, 0.3, 2),
        ({"retry-after": "0", "retry-after-ms": "300"}, 0.3, 2),
        ({"retry-after": in_seconds(-100)}, 0, 2),
        ({"retry-after": "soon"}, 0, 2),
        ({}, 0, 2),
    ],
)
@pytest.mark.usefixtures("loaded")
async def test_the_delay_in_retry_headers_is_respected(
    serve: Serve, headers: dict[str, str], at_least: float, at_most: float, streamed: bool
) -> None:
    server = await serve([Scripted(BUSY, status=429, headers=headers), OK_STREAM if streamed else OK])

    began = time.monotonic()
    assert await answer(OpenAiChatModel("m", server.url), streamed) == "ok"

    assert at_least <= time.monotonic() - began < at_most
    assert len(server.requests) == 2


MALFORMED = """
1e400|nan|-nan|inf|-inf|-5|| |0x10|1,5|Mon, 99 Foo 99999 99:99:99 GMT|Fri, 31 Dec 9999 23:59:59 GMT
Fri, 31 Dec 99999999999 23:59:59 GMT|Thu, 01 Jan 1000 00:00:00 GMT|Mon, 01 Jan 2026 00:00:00 +99999999999999|\xb2
"""


async def test_a_malformed_retry_after_is_ignored_or_ends_the_retries(serve: Serve) -> None:
    values = [*MALFORMED.strip().replace("\n", "|").split("|"), "9" * 5000, "1" * 100]

    async def asked(headers: dict[str, str]) -> tuple[object, int]:
        server = await serve([Scripted(BUSY, status=429, headers=headers), OK])
        try:
            return await answer(OpenAiChatModel("m", server.url), False), len(server.requests)
        except ModelHttpError as error:
            return error.status, len(server.requests)

    names = ("retry-after", "retry-after-ms")
    results = await asyncio.gather(*(asked({name: value}) for name in names for value in values))

    # A server that asks for more than the client ever waits gets no second request.
    assert set(results) == {("ok", 2), (429, 1)}


@pytest.mark.usefixtures("loaded")
async def test_a_date_in_retry_after_is_respected(serve: Serve) -> None:
    def reply(_: object) -> Scripted:
        # The header names a moment: it is written when the request is there.
        return Scripted(BUSY, status=503, headers={"retry-after": in_seconds(2)}) if len(server.requests) == 1 else OK

    server = await serve(reply)

    began = time.monotonic()
    assert await answer(OpenAiChatModel("m", server.url), False) == "ok"

    assert 0.9 <= time.monotonic() - began < 4


@pytest.mark.parametrize(
    "headers", [{"retry-after": "3600"}, {"retry-after": in_seconds(3600)}, {"x-should-retry": "false"}]
)
async def test_long_or_forbidden_retries_are_not_attempted(serve: Serve, headers: dict[str, str]) -> None:
    server = await serve([Scripted(BUSY, status=429, headers=headers), OK])

    with pytest.raises(ModelHttpError, match=r"429.*slow down"):
        await answer(OpenAiChatModel("m", server.url), False)

    assert len(server.requests) == 1


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("header", ["x-request-id", "request-id", "apim-request-id", "x-amzn-RequestId", "CF-RAY"])
async def test_errors_contain_the_request_id_of_the_server(serve: Serve, header: str, streamed: bool) -> None:
    bad = Scripted(b"<html>", headers={"x-request-id": "", header: "id-7"})
    server = await serve([bad, Scripted(BUSY, status=400, headers={"x-request-id": "", header: "id-8"})])

    for request_id in ("id-7", "id-8"):
        with pytest.raises(ModelError, match=f"request {request_id}"):
            await answer(OpenAiChatModel("m", server.url), streamed)


@pytest.mark.parametrize("transport", ["aiohttp", "httpx2"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_compressed_errors_are_read(serve: Serve, streamed: bool, transport: Any) -> None:
    body = gzip.compress(json.dumps({"error": {"message": "no such model"}}).encode())
    server = await serve([Scripted(body, status=404, headers={"content-encoding": "gzip"})])

    with pytest.raises(ModelHttpError, match=r"404.*no such model"):
        await answer(OpenAiChatModel("m", server.url, transport=transport), streamed)


@pytest.mark.parametrize("transport", ["aiohttp", "httpx2"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_large_request_is_sent_whole_and_retried(serve: Serve, streamed: bool, transport: Any) -> None:
    server = await serve([Scripted(BUSY, status=500, headers={"retry-after-ms": "1"}), OK_STREAM if streamed else OK])
    request = ChatRequest([UserMessage(["What is it?", ImageContent(data=b"\x89PNG" + b"\0" * 3_000_000)])])

    assert await answer(OpenAiChatModel("m", server.url, transport=transport), streamed, request) == "ok"

    assert server.requests[0] == server.requests[1]
    assert len(json.dumps(server.requests[0])) > 4_000_000
    assert "transfer-encoding" not in server.headers[1]


async def test_a_large_reply_is_read(serve: Serve) -> None:
    said = "é😀" * 500_000  # 9 MB of JSON
    server = await serve([completion({"content": said}), stream(chunk({"content": said}), chunk({}, "stop"))])

    assert await answer(OpenAiChatModel("m", server.url), False) == said
    assert await answer(OpenAiChatModel("m", server.url), True) == said
