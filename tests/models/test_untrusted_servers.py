"""A model server only receives its own secrets, and cannot fill the memory or leak secrets through errors."""

import functools
import gzip
import json
import pickle
import struct
import traceback
import tracemalloc
import zlib
from typing import Any, Literal

import pytest

from tests.models.scripted_server import HI, OK, OK_STREAM, Scripted, Serve, chunk, sse, stream
from toolbox import (
    ChatRequest,
    ChatResponse,
    CompleteResponse,
    ModelConnectionError,
    ModelError,
    ModelHttpError,
    ModelProtocolError,
    OpenAiChatModel,
    UserMessage,
)
from toolbox.models.selection import NamedModels
from toolbox.settings import ToolboxSettings

pytestmark = pytest.mark.anyio

SECRET = "sk-proj-/5f1c+9a77d0=e4b2\"38c6a1'd7"

both_transports = pytest.mark.parametrize("transport", ["aiohttp", "httpx2"])
both_ways = pytest.mark.parametrize("streamed", [False, True])


async def ask(model: OpenAiChatModel, streamed: bool, request: ChatRequest = HI) -> ChatResponse:
    try:
        if not streamed:
            return await model.chat(request)
        *_, last = [event async for event in model.stream(request)]
        assert isinstance(last, CompleteResponse)
        return last.response
    finally:
        await model.aclose()


# --- redirects


@both_transports
@both_ways
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_not_followed(serve: Serve, status: int, streamed: bool, transport: Any) -> None:
    there = await serve([OK_STREAM if streamed else OK])
    here = await serve([Scripted(status=status, headers={"location": f"{there.url}/chat/completions?key={SECRET}"})])
    model = OpenAiChatModel("m", here.url, SECRET, transport=transport, extra_headers={"x-key": "header-5f1c9a77"})

    with pytest.raises(ModelHttpError, match="redirects are not followed") as caught:
        await ask(model, streamed)

    assert there.requests == []
    assert caught.value.status == status
    assert there.url.removesuffix("/v1") in str(caught.value)
    assert SECRET not in f"{caught.value} {caught.value!r}"


# --- which server the key of the environment is for


@pytest.mark.parametrize(
    ("address", "environment", "is_sent"),
    [
        ("https://api.openai.com/v1", None, True),
        ("https://eu.api.openai.com/v1", None, True),
        ("http://api.openai.com/v1", None, False),
        ("https://api.openai.com.example/v1", None, False),
        ("https://evilapi.openai.com/v1", None, False),
        ("https://api.openai.com@evil.example/v1", None, False),
        ("https://gateway.example/v1", "https://gateway.example/v1", True),
        ("https://gateway.example/v1/", "https://GATEWAY.example:443/v1", True),
        ("https://gateway.example:8443/v1", "https://gateway.example/v1", False),
        ("https://gateway.example/other", "https://gateway.example/v1", False),
        ("http://gateway.example/v1", "https://gateway.example/v1", False),
        ("https://other.example/v1", "https://gateway.example/v1", False),
    ],
)
def test_the_key_in_the_environment_is_sent_only_to_its_server(
    monkeypatch: pytest.MonkeyPatch, address: str, environment: str | None, is_sent: bool
) -> None:
    from toolbox.models.openai_settings import OpenAiSettings

    if environment is not None:
        monkeypatch.setenv("OPENAI_BASE_URL", environment)

    assert OpenAiSettings.is_from_environment(address) is is_sent


async def test_headers_from_the_environment_are_not_sent_to_other_servers(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    main, other = await serve([OK]), await serve([OK])
    monkeypatch.setenv("OPENAI_MODEL", "m")
    monkeypatch.setenv("OPENAI_BASE_URL", main.url)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-environment-5f1c9a77")
    monkeypatch.setenv("OPENAI_ORG_ID", "org-5f1c9a77")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "proj-5f1c9a77")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Gateway-Key: gw-5f1c9a77")
    monkeypatch.setenv("TOOLBOX_MODELS__OTHER__MODEL", "m")
    monkeypatch.setenv("TOOLBOX_MODELS__OTHER__BASE_URL", other.url)
    models = NamedModels(None, ToolboxSettings())
    try:
        await models.find().chat(HI)
        await models.find("other").chat(HI)
    finally:
        await models.aclose()

    assert main.headers[0]["authorization"] == "Bearer sk-environment-5f1c9a77"
    assert main.headers[0]["x-gateway-key"] == "gw-5f1c9a77"
    assert "5f1c9a77" not in str(other.headers)


# --- how much of a reply is read


@functools.cache
def bomb(form: str, begin: bytes = b"", megabytes: int = 60) -> bytes:
    """Return `begin` and MB of blanks, compressed. It repeats one compressed MB, which takes less time."""
    blanks = b" " * 1_000_000
    compressor = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    first, repeated = (compressor.compress(each) + compressor.flush(zlib.Z_FULL_FLUSH) for each in (begin, blanks))
    raw = first + repeated * megabytes + compressor.flush()
    check = {"gzip": zlib.crc32, "deflate": zlib.adler32, "raw deflate": zlib.adler32}[form]
    found = functools.reduce(lambda before, _: check(blanks, before), range(megabytes), check(begin))
    match form:
        case "gzip":
            size = len(begin) + megabytes * len(blanks)
            return b"\x1f\x8b\x08" + bytes(7) + raw + struct.pack("<II", found, size)
        case "deflate":
            return b"\x78\xda" + raw + struct.pack(">I", found)
        case _:
            return raw


@pytest.mark.parametrize(("form", "bits"), [("gzip", 31), ("deflate", 15), ("raw deflate", -15)])
def test_the_bombs_of_these_tests_are_valid(form: str, bits: int) -> None:
    assert zlib.decompress(bomb(form, b"begin", 2), bits) == b"begin" + b" " * 2_000_000


@both_transports
@both_ways
@pytest.mark.parametrize("form", ["gzip", "deflate", "raw deflate"])
async def test_the_reply_limit_applies_to_decoded_bytes(
    serve: Serve, form: str, streamed: bool, transport: Any
) -> None:
    body = bomb(form)
    assert len(body) < 1_000_000
    server = await serve([Scripted(body, headers={"content-encoding": form.split()[-1]})])
    tracemalloc.start()
    try:
        with pytest.raises(ModelProtocolError, match=r"larger than 1000000 bytes.*max_reply_bytes"):
            await ask(OpenAiChatModel("m", server.url, max_reply_bytes=1_000_000, transport=transport), streamed)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert len(server.requests) == 1
    assert most < 20_000_000


@both_transports
@both_ways
async def test_an_endless_reply_is_aborted(serve: Serve, streamed: bool, transport: Any) -> None:
    endless = Scripted(chunks=sse(*[chunk({"content": "x" * 1000})] * 2000), content_type="text/event-stream")
    server = await serve([endless])

    with pytest.raises(ModelProtocolError, match="larger than 100000 bytes"):
        await ask(OpenAiChatModel("m", server.url, max_reply_bytes=100_000, transport=transport), streamed)

    assert len(server.requests) == 1


@both_transports
@both_ways
async def test_only_the_beginning_of_an_error_body_is_read(serve: Serve, streamed: bool, transport: Any) -> None:
    large = bomb("gzip", b"out of memory")
    server = await serve([Scripted(large, status=400, headers={"content-encoding": "gzip"})])
    tracemalloc.start()
    try:
        with pytest.raises(ModelHttpError, match=r"400.*out of memory"):
            await ask(OpenAiChatModel("m", server.url, transport=transport), streamed)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert most < 20_000_000


@both_ways
async def test_a_reply_of_exactly_the_limit_is_read(serve: Serve, streamed: bool) -> None:
    reply = OK_STREAM if streamed else OK
    size = len(b"".join(reply.chunks or ())) or len(reply.body)
    server = await serve([reply] * 2)

    assert (await ask(OpenAiChatModel("m", server.url, max_reply_bytes=size), streamed)).ai_message.text == "ok"
    with pytest.raises(ModelProtocolError, match="larger than"):
        await ask(OpenAiChatModel("m", server.url, max_reply_bytes=size - 5), False)


@pytest.mark.parametrize(
    ("asked", "encoding", "says"),
    [
        ("gzip, deflate", "br", "did not accept that"),
        ("identity", "gzip", "did not accept that"),
        ("gzip, deflate", "gzip, gzip", "did not accept that"),
        ("br", "br", "unsupported compression"),
    ],
)
@both_ways
async def test_unrequested_compression_is_rejected(
    serve: Serve, asked: str, encoding: str, says: str, streamed: bool
) -> None:
    server = await serve([Scripted(gzip.compress(OK.body), headers={"content-encoding": encoding})])
    model = OpenAiChatModel("m", server.url, extra_headers={"accept-encoding": asked})

    with pytest.raises(ModelProtocolError, match=says):
        await ask(model, streamed)


async def test_a_compressed_reply_of_several_parts_is_read(serve: Serve) -> None:
    half = len(OK.body) // 2
    body = gzip.compress(OK.body[:half]) + gzip.compress(OK.body[half:])
    server = await serve([Scripted(body, headers={"content-encoding": "gzip"})])

    assert (await ask(OpenAiChatModel("m", server.url), False)).ai_message.text == "ok"
    assert server.headers[0]["accept-encoding"] == "gzip, deflate"


async def test_the_limit_is_a_setting(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = await serve([OK])
    monkeypatch.setenv("TOOLBOX_MODELS__DEFAULT__MODEL", "m")
    monkeypatch.setenv("TOOLBOX_MODELS__DEFAULT__BASE_URL", server.url)
    monkeypatch.setenv("TOOLBOX_MODELS__DEFAULT__MAX_REPLY_BYTES", "10")
    models = NamedModels(None, ToolboxSettings())

    with pytest.raises(ModelProtocolError, match="larger than 10 bytes"):
        await models.find().chat(HI)
    await models.aclose()


# --- what errors show


def echoes(secret: str) -> list[Any]:
    """A server's ways to repeat what it was sent, near the place where an excerpt ends."""
    page = f"<html>{'x' * 470}{secret}</html>"
    return [
        Scripted(page.encode(), status=400),
        Scripted(page.encode()),
        Scripted(f"{'x' * 480}{secret}".encode(), status=503),
        Scripted(json.dumps({"error": {"message": "x" * 460 + secret}}).encode(), status=400),
        Scripted(json.dumps({"error": {"message": "bad key", "sent": "x" * 420 + secret}}).encode(), status=400),
        Scripted(json.dumps({"error": {"message": "x" * 1980 + secret}}).encode()),
        Scripted(json.dumps({"error": {"message": "p", "metadata": {"raw": "x" * 190 + secret}}}).encode(), status=400),
        Scripted(json.dumps({"nothing": "x" * 480 + secret}).encode()),
        Scripted(chunks=sse("{" + "x" * 490 + secret), content_type="text/event-stream"),
        stream({"error": {"message": "x" * 470 + secret}}),
    ]


@both_ways
@pytest.mark.parametrize("number", range(len(echoes(SECRET))))
async def test_a_secret_is_hidden_before_an_excerpt_is_cut(serve: Serve, number: int, streamed: bool) -> None:
    server = await serve([echoes(SECRET)[number]] * 3)

    with pytest.raises(ModelError) as caught:
        await ask(OpenAiChatModel("m", server.url, SECRET, max_retries=0), streamed)

    shown = "".join(traceback.format_exception(caught.value)) + repr(pickle.dumps(caught.value))
    assert SECRET[:12] not in shown
    assert "5f1c" not in shown
    assert len(caught.value.message) <= 2010
    assert len(getattr(caught.value, "body", "")) <= 510


@pytest.mark.parametrize(
    "parameters",
    [
        {"extra_headers": {"x-team": SECRET}},
        {"extra_body": {"api_key": SECRET}},
        {"metadata": {"auth": {"value": SECRET}}},
        {"tools": [{"type": "mcp", "server_label": "a", "headers": {"x-team": SECRET}}]},
    ],
)
async def test_the_secrets_of_one_request_are_hidden_too(serve: Serve, parameters: dict[str, Any]) -> None:
    server = await serve([Scripted(json.dumps({"error": {"message": f"bad {SECRET}"}}).encode(), status=400)])

    with pytest.raises(ModelHttpError, match="bad") as caught:
        await ask(OpenAiChatModel("m", server.url), False, ChatRequest([UserMessage("Hi")], parameters=parameters))

    assert "5f1c" not in f"{caught.value} {caught.value.body} {caught.value!r}"


async def test_the_scheme_of_a_credential_does_not_hide_it(serve: Serve) -> None:
    server = await serve([Scripted(b'{"error": {"message": "unknown token 5f1c9a77d0e4b238"}}', status=400)])
    model = OpenAiChatModel("m", server.url, extra_headers={"authorization": "Token 5f1c9a77d0e4b238"})

    with pytest.raises(ModelHttpError, match=r"unknown t.*\*\*\*") as caught:
        await ask(model, False)
    assert "5f1c" not in f"{caught.value} {caught.value.body}"


# --- connections


@both_transports
async def test_a_broken_stream_error_does_not_mention_base_url(
    serve: Serve, transport: Literal["aiohttp", "httpx2"]
) -> None:
    server = await serve([stream(chunk({"content": "Hel"}), done=False, cut=True)])
    model = OpenAiChatModel("m", server.url, transport=transport)

    with pytest.raises(ModelConnectionError, match="lost during the reply") as caught:
        await ask(model, True)

    assert "base_url" not in str(caught.value)


@both_transports
async def test_an_address_without_a_server_is_shown_in_the_error(transport: Literal["aiohttp", "httpx2"]) -> None:
    model = OpenAiChatModel("m", "http://127.0.0.1:9/v1", transport=transport, max_retries=0)

    with pytest.raises(
        ModelConnectionError, match=r"cannot connect to .*127\.0\.0\.1:9/v1.*check that it is running and that base_url"
    ):
        await ask(model, False)
