"""Conversations with Anthropic's Messages API: pauses, streams, retries, keys, recordings, services with memory."""

import asyncio
import gzip
import json
import logging
import socket
import time
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.models.messages_api import (
    END,
    USAGE,
    ending,
    events,
    fields,
    message,
    said,
    start,
    started,
    stop,
    streamed,
    text,
    thinking,
    tool_use,
)
from tests.models.scripted_server import Scripted, Serve
from toolbox import (
    AnthropicChatModel,
    ChatRequest,
    CompleteResponse,
    IllegalConfigurationError,
    Message,
    ModelConnectionError,
    ModelHttpError,
    ModelProtocolError,
    ModelRefusedError,
    ModelTimeoutError,
    OpenAiChatModel,
    PartialReasoning,
    PartialResponse,
    StreamEvent,
    TokenUsage,
    ToolExecutionResultMessage,
    ToolSpecification,
    UserMessage,
    create_ai_service,
)
from toolbox.recordings import Recording
from toolbox.transcripts import messages_from_json, messages_to_json

pytestmark = pytest.mark.anyio

HI = ChatRequest([UserMessage("Hi")])
OK, OK_STREAM = message(text("ok")), streamed(text("ok"))
SOON = {"retry-after-ms": "1"}
SEARCH = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}}


def address(server: Any) -> str:
    url: str = server.url
    return url.removesuffix("/v1")


async def text_of(model: AnthropicChatModel, streamed: bool, request: ChatRequest = HI) -> str | None:
    if not streamed:
        return (await model.chat(request)).ai_message.text
    *_, last = [event async for event in model.stream(request)]
    assert isinstance(last, CompleteResponse)
    return last.response.ai_message.text


# --- pauses


@pytest.mark.parametrize("how", [message, streamed])
async def test_a_paused_reply_is_continued_with_its_text(serve: Serve, how: Any) -> None:
    container = {"container": {"id": "container_1"}}
    first = [thinking("Hm."), text("I search. "), text(" "), SEARCH]
    server = await serve([how(*first, stop="pause_turn", **container), how(text("Found."))])
    model = AnthropicChatModel("claude-test", base_url=address(server))
    seen: list[StreamEvent] = []
    if how is streamed:
        seen = [event async for event in model.stream(HI)]
        last = seen[-1]
        assert isinstance(last, CompleteResponse)
        response = last.response
    else:
        response = await model.chat(HI)
    await model.aclose()

    assert response.ai_message.text == "I search.  Found."
    assert response.ai_message.attributes["anthropic"] == [*first, text("Found.")]
    assert response.token_usage == TokenUsage(30, 10, 6, 0, 4)
    assert sum(isinstance(each, CompleteResponse) for each in seen) == (how is streamed)
    asked, continued = server.requests
    assert continued["messages"][:1] == asked["messages"]
    assert continued["messages"][1] == {"role": "assistant", "content": [first[0], first[1], SEARCH]}
    assert (asked.get("container"), continued["container"]) == (None, "container_1")


async def test_calls_after_a_pause_are_numbered_on(serve: Serve) -> None:
    calls = [tool_use("add", {"a": number}, f"toolu_{number}") for number in (1, 2)]
    server = await serve([streamed(calls[0], stop="pause_turn"), streamed(calls[1], stop="tool_use")])
    model = AnthropicChatModel("claude-test", base_url=address(server))

    response = [event async for event in model.stream(ChatRequest([UserMessage("Hi")], (ToolSpecification("add"),)))][
        -1
    ]
    await model.aclose()

    assert isinstance(response, CompleteResponse)
    assert [each.id for each in response.response.ai_message.tool_execution_requests] == ["toolu_1", "toolu_2"]


@pytest.mark.parametrize("how", [message, streamed])
async def test_a_reply_is_continued_at_most_ten_times(serve: Serve, how: Any) -> None:
    server = await serve(lambda _: how(text("x"), stop="pause_turn"))
    model = AnthropicChatModel("claude-test", base_url=address(server))

    with pytest.raises(ModelProtocolError, match="10 continuations"):
        await text_of(model, how is streamed)
    await model.aclose()

    assert len(server.requests) == 11


# --- streams


async def test_pieces_arrive_as_they_are_sent(serve: Serve) -> None:
    waiting = asyncio.Event()
    first = events(started(), start(0, thinking("Hm.")), stop(0), start(1, text("Hel")))
    rest = events(said(1, "lo"), stop(1), ending(), END)
    arrived: list[StreamEvent] = []

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        writer.write(b"".join(first.chunks or ()))
        await waiting.wait()
        writer.write(b"".join(rest.chunks or ()))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(reply, "127.0.0.1", 0)
    model = AnthropicChatModel("claude-test", base_url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    async for event in model.stream(HI):
        arrived.append(event)
        if event == PartialResponse("Hel"):
            waiting.set()
    await model.aclose()
    server.close()

    assert arrived[:3] == [PartialReasoning("Hm."), PartialResponse("Hel"), PartialResponse("lo")]


async def test_a_complete_reply_does_not_wait_for_the_end_of_the_connection(serve: Serve) -> None:
    """See https://github.com/earendil-works/pi/issues/5592."""
    never = asyncio.Event()

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + b"".join(OK_STREAM.chunks or ()))
        await never.wait()
        writer.close()

    server = await asyncio.start_server(reply, "127.0.0.1", 0)
    model = AnthropicChatModel("claude-test", base_url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    began = time.monotonic()
    assert await text_of(model, True) == "ok"
    await model.aclose()
    never.set()
    server.close()

    assert time.monotonic() - began < 3


# --- failures


@pytest.mark.parametrize("status", [408, 409, 429, 500, 503, 529])
@pytest.mark.parametrize("streamed", [False, True])
async def test_transient_statuses_are_retried(serve: Serve, status: int, streamed: bool) -> None:
    failing = Scripted(b'{"type": "error", "error": {"type": "x", "message": "no"}}', status=status, headers=SOON)
    server = await serve([failing, failing, OK_STREAM if streamed else OK])
    model = AnthropicChatModel("claude-test", base_url=address(server))

    answer = await text_of(model, streamed)
    await model.aclose()

    assert (answer, len(server.requests)) == ("ok", 3)


@pytest.mark.parametrize("streamed", [False, True])
async def test_there_is_one_layer_of_retries(serve: Serve, streamed: bool) -> None:
    server = await serve(lambda _: Scripted(b"{}", status=503, headers=SOON))
    model = AnthropicChatModel("claude-test", base_url=address(server))

    with pytest.raises(ModelHttpError):
        await text_of(model, streamed)
    await model.aclose()

    assert len(server.requests) == 3


async def test_other_statuses_and_long_waits_are_not_retried(serve: Serve) -> None:
    for reply in (Scripted(b"{}", status=400), Scripted(b"{}", status=429, headers={"retry-after": "3600"})):
        server = await serve([reply, OK])
        model = AnthropicChatModel("claude-test", base_url=address(server))

        with pytest.raises(ModelHttpError):
            await model.chat(HI)
        await model.aclose()

        assert len(server.requests) == 1


async def test_a_stream_is_not_retried_after_a_piece(serve: Serve) -> None:
    broken = events(started(), start(0, text("Hel")))
    server = await serve([Scripted(chunks=broken.chunks, content_type=broken.content_type, cut=True), OK_STREAM])
    model = AnthropicChatModel("claude-test", base_url=address(server))

    with pytest.raises(ModelConnectionError):
        await text_of(model, True)
    await model.aclose()

    assert len(server.requests) == 1


async def test_a_connection_that_breaks_before_the_first_event_is_retried(serve: Serve) -> None:
    server = await serve([Scripted(chunks=[b": hi\n\n"], content_type="text/event-stream", cut=True), OK_STREAM])
    model = AnthropicChatModel("claude-test", base_url=address(server))

    assert await text_of(model, True) == "ok"
    await model.aclose()

    assert len(server.requests) == 2


async def test_an_unreachable_server_is_a_connection_error() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        model = AnthropicChatModel("claude-test", base_url=url, max_retries=0)

        with pytest.raises(ModelConnectionError, match="cannot connect"):
            await model.chat(HI)
        await model.aclose()


async def test_a_reply_that_takes_too_long_is_a_timeout(serve: Serve) -> None:
    server = await serve([Scripted(b"{}", wait=asyncio.Event())])
    model = AnthropicChatModel("claude-test", base_url=address(server), timeout=0.1, max_retries=0)

    with pytest.raises(ModelTimeoutError):
        await model.chat(HI)
    await model.aclose()


@pytest.mark.parametrize("streamed", [False, True])
async def test_replies_are_limited_in_size(serve: Serve, streamed: bool) -> None:
    large = [text("x" * 5000)]
    server = await serve(
        [events(started(), start(0, large[0]), stop(0), ending(), END) if streamed else message(*large)]
    )
    model = AnthropicChatModel("claude-test", base_url=address(server), max_reply_bytes=2000)

    with pytest.raises(ModelProtocolError, match="max_reply_bytes"):
        await text_of(model, streamed)
    await model.aclose()


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_limit_holds_for_all_parts_of_a_continued_reply(serve: Serve, streamed: bool) -> None:
    def part(reason: str) -> Scripted:
        block = text("x" * 3000)
        if not streamed:
            return message(block, stop=reason)
        return events(started(), start(0, block), stop(0), ending(reason), END)

    server = await serve([part("pause_turn"), part("pause_turn"), part("end_turn")])
    model = AnthropicChatModel("claude-test", base_url=address(server), max_reply_bytes=9000)

    with pytest.raises(ModelProtocolError, match="larger than 9000 bytes; raise max_reply_bytes="):
        await text_of(model, streamed)
    await model.aclose()

    assert len(server.requests) == 3


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "flood",
    [b": keep\n\n" * 100, b'event: ping\ndata: {"type": "ping"}\n\n' * 50, b"data: " + b"x" * 4000, b"x" * 4000],
    ids=["comments", "pings", "a giant event", "a giant line"],
)
async def test_endless_replies_are_aborted(serve: Serve, flood: bytes, streamed: bool) -> None:
    first = (events(started()).chunks or [])[0]
    server = await serve([Scripted(chunks=[first, *[flood] * 400], content_type="text/event-stream")])
    model = AnthropicChatModel("claude-test", base_url=address(server), max_reply_bytes=100_000)

    with pytest.raises(ModelProtocolError, match="max_reply_bytes"):
        await text_of(model, streamed)
    await model.aclose()

    assert len(server.requests) == 1


@pytest.fixture(scope="module")
def bomb() -> bytes:
    return gzip.compress(b" " * 20_000_000, 1)


@pytest.mark.parametrize("streamed", [False, True])
async def test_compressed_replies_are_limited_after_decoding(serve: Serve, bomb: bytes, streamed: bool) -> None:
    server = await serve(
        [
            Scripted(bomb, headers={"content-encoding": "gzip"}),
            Scripted(bomb, status=400, headers={"content-encoding": "gzip"}),
        ]
    )
    model = AnthropicChatModel("claude-test", base_url=address(server), max_reply_bytes=100_000)
    tracemalloc.start()
    try:
        with pytest.raises(ModelProtocolError, match="max_reply_bytes"):
            await text_of(model, streamed)
        with pytest.raises(ModelHttpError) as caught:
            await text_of(model, streamed)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    await model.aclose()

    assert most < 10_000_000
    assert (caught.value.status, len(caught.value.body or "")) < (401, 10_000)


async def test_redirects_are_not_followed(serve: Serve) -> None:
    other = await serve([OK])
    server = await serve([Scripted(status=307, headers={"location": f"{other.url}/messages"})])
    model = AnthropicChatModel("claude-test", "a-secret-key", address(server))

    with pytest.raises(ModelHttpError, match="redirects are not followed"):
        await model.chat(HI)
    await model.aclose()

    assert other.requests == []


@pytest.mark.parametrize("streamed", [False, True])
async def test_errors_contain_facts_and_no_secrets(serve: Serve, streamed: bool) -> None:
    said = "bad key a-secret-key of x-own: another-secret"
    reply = Scripted(
        json.dumps({"type": "error", "error": {"type": "authentication_error", "message": said}}).encode(), status=401
    )
    server = await serve([reply])
    model = AnthropicChatModel(
        "claude-test", "a-secret-key", address(server), extra_headers={"x-own": "another-secret"}
    )

    with pytest.raises(ModelHttpError) as caught:
        await text_of(model, streamed)
    await model.aclose()

    found = caught.value
    assert (found.status, found.request_id) == (401, "req_1")
    assert "bad key" in found.message
    assert "secret" not in f"{found}{found.body}{found.args}{model!r}"


async def test_a_refusal_is_an_error_even_after_pieces(serve: Serve) -> None:
    server = await serve([streamed(text("I can"), stop="refusal")])
    model = AnthropicChatModel("claude-test", base_url=address(server))
    seen: list[StreamEvent] = []

    async def read() -> None:
        async for event in model.stream(HI):
            seen.append(event)

    with pytest.raises(ModelRefusedError) as caught:
        await read()
    await model.aclose()

    assert caught.value.text == "I can"
    assert all(isinstance(each, PartialResponse) for each in seen)


# --- keys


async def test_the_key_is_sent_as_the_package_sends_it(serve: Serve) -> None:
    server = await serve([OK, OK])

    async def key() -> str:
        return "key-of-now"

    for given in ("a-key", key):
        model = AnthropicChatModel("claude-test", given, address(server))
        await model.chat(HI)
        await model.aclose()

    assert [each["authorization"] for each in server.headers] == ["Bearer a-key", "Bearer key-of-now"]
    assert all(each["anthropic-version"] for each in server.headers)
    assert not any(name.startswith("x-stainless-os") for name in server.headers[0])


@pytest.mark.parametrize(("own", "sent"), [(True, "Bearer env-key"), (False, "Bearer none")])
async def test_the_key_in_the_environment_is_sent_only_to_its_server(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, own: bool, sent: str
) -> None:
    server = await serve([OK])
    monkeypatch.setenv("ANTHROPIC_API_KEY", "env-key")
    monkeypatch.setenv("ANTHROPIC_CUSTOM_HEADERS", "x-team: red")
    monkeypatch.setenv("ANTHROPIC_BASE_URL", address(server) if own else "https://other.example")
    model = AnthropicChatModel("claude-test", base_url=address(server))
    await model.chat(HI)
    await model.aclose()

    [headers] = server.headers
    assert headers["authorization"] == sent
    assert headers.get("x-team") == ("red" if own else None)


def test_the_public_address_gets_the_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from toolbox.models.anthropic_settings import AnthropicSettings

    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "env-key")

    assert AnthropicChatModel("claude-opus-5").base_url == "https://api.anthropic.com"
    assert AnthropicSettings.is_from_environment("https://api.anthropic.com/")
    for other in ("http://api.anthropic.com", "https://api.anthropic.com.evil.example", "https://evil.example"):
        assert not AnthropicSettings.is_from_environment(other)


async def test_repeated_requests_have_the_headers_of_the_first(serve: Serve) -> None:
    server = await serve([OK, OK, Scripted(status=503, headers=SOON), OK, OK_STREAM, OK])
    keys = iter(["key-1", "key-1", *["key-2"] * 4])

    async def key() -> str:
        return next(keys)

    model = AnthropicChatModel("claude-test", key, address(server), extra_headers={"x-team": "red"})
    await model.chat(HI)
    await model.chat(ChatRequest([UserMessage("A longer question than the first one")]))
    await model.chat(HI)
    await text_of(model, True)
    await model.chat(ChatRequest([UserMessage("Hi")], parameters={"extra_headers": {"x-team": "blue"}}))
    await model.aclose()

    assert [each["authorization"][-5:] for each in server.headers] == ["key-1"] * 2 + ["key-2"] * 4
    assert [each["x-team"] for each in server.headers] == ["red"] * 5 + ["blue"]
    assert [each["x-stainless-retry-count"] for each in server.headers] == ["0", "0", "0", "1", "0", "0"]
    alike = ({*each} for each in server.headers)
    assert len({frozenset(each) for each in alike}) == 1
    assert server.requests[1]["messages"][0]["content"][0]["text"].startswith("A longer")


@pytest.mark.parametrize("transport", ["aiohttp", "httpx2"])
@pytest.mark.parametrize("of_openai", [False, True], ids=["anthropic", "openai"])
async def test_a_request_of_several_megabytes_is_sent_whole(serve: Serve, of_openai: bool, transport: Any) -> None:
    reply = {"choices": [{"message": {"content": "ok"}, "finish_reason": "stop"}]}
    server = await serve([Scripted(json.dumps(reply).encode())] * 2 if of_openai else [OK, OK])
    model: Any = (
        OpenAiChatModel("m", server.url, transport=transport)
        if of_openai
        else AnthropicChatModel("claude-test", base_url=address(server), transport=transport)
    )
    for size in (3_000_000, 10):
        await model.chat(ChatRequest([UserMessage("x" * size)]))
    await model.aclose()

    large, small = (str(each["messages"]) for each in server.requests)
    assert ("x" * 3_000_000 in large, "x" * 11 in small) == (True, False)
    assert int(server.headers[0]["content-length"]) > 3_000_000


async def test_cookies_of_the_server_are_not_kept(serve: Serve) -> None:
    body = json.dumps(fields(text("ok"))).encode()
    server = await serve([Scripted(body, headers={"set-cookie": "session=1"}), OK, OK])
    model = AnthropicChatModel("claude-test", base_url=address(server).replace("127.0.0.1", "localhost"))
    for _ in range(3):
        await model.chat(HI)
    await model.aclose()

    assert not any("cookie" in each for each in server.headers)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "anthropic", None)

    with pytest.raises(IllegalConfigurationError, match=r"toolbox-di\[anthropic\]"):
        AnthropicChatModel("claude-opus-5", "k")


# --- tests and traces


async def test_a_test_run_can_refuse_requests(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    from toolbox.models import model_requests

    server = await serve([OK])
    asked: list[str] = []

    def refuse(url: str) -> None:
        asked.append(url)
        raise PermissionError(url)

    monkeypatch.setattr(model_requests, "check", refuse)
    model = AnthropicChatModel("claude-test", base_url=address(server))
    for is_stream in (False, True):
        with pytest.raises(PermissionError):
            await text_of(model, is_stream)
    await model.aclose()

    assert (asked, server.requests) == ([address(server)] * 2, [])


@pytest.mark.parametrize("streamed", [False, True])
async def test_traffic_can_be_recorded_and_replayed(serve: Serve, tmp_path: Path, streamed: bool) -> None:
    server = await serve([OK_STREAM if streamed else OK])
    for mode in ("record", "replay"):
        recording = Recording(tmp_path / "anthropic.json", mode)  # type: ignore[arg-type]  # a mode
        model = AnthropicChatModel("claude-test", "a-secret-key", address(server), reasoning="low", transport=recording)

        assert await text_of(model, streamed) == "ok"
        await model.aclose()

    written = (tmp_path / "anthropic.json").read_text()
    assert len(server.requests) == 1
    assert "a-secret-key" not in written
    assert '"thinking"' in written
    assert "not recorded" not in written


async def test_the_package_writes_no_spans(serve: Serve) -> None:
    server = await serve([OK])
    model = AnthropicChatModel("claude-test", base_url=address(server))
    await model.chat(HI)
    [connections] = model._transport._connections.values()
    [connection] = connections.values()
    await model.aclose()

    assert connection.client._tracer is None
    assert model.provider_name == "anthropic"


# --- services


class Sums:
    def add(self, a: int) -> str:
        """Add."""
        return str(a + 1)


class Desk(Protocol):
    async def ask(self, text: str) -> str: ...


async def test_a_service_runs_parallel_tools_and_answers(serve: Serve) -> None:
    calls = [tool_use("add", {"a": 1}), tool_use("add", {"a": 2}, "toolu_2")]
    for how in (message, streamed):
        server = await serve([how(thinking("Hm."), *calls, stop="tool_use"), how(text("5"))])
        model = AnthropicChatModel("claude-sonnet-4-6", base_url=address(server), reasoning="low")
        if how is message:
            desk = create_ai_service(Desk, chat_model=model, tools=[Sums().add])
            assert await desk.ask("1 + 1, 2 + 1?") == "5"
        else:

            class Streams(Protocol):
                def ask(self, text: str) -> AsyncIterator[str]: ...

            streams = create_ai_service(Streams, chat_model=model, tools=[Sums().add])
            assert "".join([piece async for piece in streams.ask("1 + 1, 2 + 1?")]) == "5"
        await model.aclose()

        _, reply, turn = server.requests[1]["messages"]
        assert reply["content"] == [thinking("Hm."), *calls]
        assert [(each["tool_use_id"], each["content"]) for each in turn["content"]] == [
            ("toolu_1", "2"),
            ("toolu_2", "3"),
        ]


async def test_a_structured_answer_uses_a_schema(serve: Serve) -> None:
    class Counts(Protocol):
        async def count(self, text: str) -> dict[str, int]: ...

        async def total(self, text: str) -> int: ...

    server = await serve([message(text('{"value": 3}')), message(text('{"a": 1}'))])
    model = AnthropicChatModel("claude-sonnet-4-6", base_url=address(server))
    counts = create_ai_service(Counts, chat_model=model)

    assert await counts.total("Hi") == 3
    assert await counts.count("Hi") == {"a": 1}
    await model.aclose()

    assert server.requests[0]["output_config"]["format"]["type"] == "json_schema"


# --- memory

SIGNED = [thinking("Hm.", "sig/+="), {"type": "redacted_thinking", "data": "x"}, tool_use("add", {"a": 1})]


async def test_a_conversation_moves_to_another_model_and_back(serve: Serve) -> None:
    from tests.models.scripted_server import call, completion

    openai = await serve(
        [
            completion(
                {"content": None, "tool_calls": [call("add", '{"a": 1}', id="functions.add:0", type="function")]},
                "tool_calls",
            )
        ]
    )
    anthropic = await serve([message(*SIGNED, stop="tool_use"), OK])
    one = AnthropicChatModel("claude-sonnet-4-6", base_url=address(anthropic))
    other = OpenAiChatModel("m", openai.url)
    tools = (ToolSpecification("add"),)
    messages: list[Message] = [UserMessage("Hi")]

    for model in (one, other, one):
        reply = (await model.chat(ChatRequest(messages, tools))).ai_message
        messages = list(messages_from_json(messages_to_json([*messages, reply])))
        messages += [ToolExecutionResultMessage.of(each, "2") for each in reply.tool_execution_requests]
    await one.aclose()
    await other.aclose()

    assert "thinking" not in json.dumps(openai.requests[0])
    assert "signature" not in json.dumps(openai.requests[0])
    last = anthropic.requests[1]["messages"]
    ids = [
        each.get("id") or each.get("tool_use_id") for turn in last[1:] for each in turn["content"] if "text" not in each
    ]
    assert last[1]["content"] == SIGNED
    assert ids[-2] == ids[-1]
    assert ":" not in ids[-1]


async def test_a_warning_is_logged_once(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    server = await serve(lambda _: OK)
    model = AnthropicChatModel("claude-opus-5", base_url=address(server), temperature=0.5)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            await model.chat(HI)
    await model.aclose()

    assert len(caplog.records) == 1


def test_the_usage_of_the_tests_is_what_the_api_sends() -> None:
    assert fields()["usage"] == USAGE
