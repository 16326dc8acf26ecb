"""Mutated replies (cut, doubled, reordered, changed bytes) return a reply or raise a model error.

First the reading alone, then the whole way over a connection. Bytes that were never a reply: `test_accumulator`.
"""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings

from tests.generated import Choices, Make, made, sampled
from tests.models.test_accumulator import check, cut, places
from tests.models.test_replays import READABLE, SHORT, body_of
from tests.models.test_responses_seen import CALLS, FAILURES, TEXTS
from toolbox import ChatRequest, CompleteResponse, ModelError, OpenAiChatModel, ToolSpecification, UserMessage

WIRES = ("chat", "responses")
BODIES = {
    "chat": [body for each in READABLE if 0 < len(body := body_of(each)) < SHORT],
    "responses": [body for each in (*CALLS, *TEXTS, *FAILURES) if 0 < len(body := body_of(each)) < SHORT],
}
TOKENS = (
    *(
        b"data: ",
        b"\n\n",
        b"\r",
        b"[DONE]",
        b"event: error\n",
        b"null",
        b"{}",
        b"[]",
        b'""',
        b'"\\ud83d"',
        b"NaN",
        b"\xff",
    ),
    *(
        b'"error":',
        b'"choices":',
        b'"tool_calls":',
        b'"length"',
        b'"finish_reason":',
        b'"output":',
        b"\xef\xbb\xbf",
        b"\0",
    ),
)


def mutated(wire: str) -> Make:
    """Return a maker of replies of the tables, after up to four changes."""

    def make(choices: Choices) -> bytes:
        body: bytes = choices.one_of(BODIES[wire])
        for _ in range(1 + choices.below(4)):
            start, end = sorted((choices.below(len(body) + 1), choices.below(len(body) + 1)))
            match choices.one_of(("cut", "drop", "double", "token", "byte", "shuffle", "join")):
                case "cut":
                    body = body[:end]
                case "drop":
                    body = body[:start] + body[end:]
                case "double":
                    body = body[:end] + body[start:]
                case "token":
                    body = body[:start] + choices.one_of(TOKENS) + body[start:]
                case "byte":
                    body = body[:start] + choices.bytes(1) + body[start + 1 :]
                case "shuffle":
                    body = b"\n\n".join(choices.shuffled(body.split(b"\n\n")[:12]))
                case "join":
                    body += choices.one_of(BODIES[wire])
        return body

    return make


MUTATED = {wire: mutated(wire) for wire in WIRES}


@settings(max_examples=400, deadline=None)
@given(made(lambda choices: (wire := choices.one_of(WIRES), MUTATED[wire](choices)), places))
def test_mutated_replies_return_a_reply_or_raise_a_model_error(drawn: tuple[tuple[str, bytes], list[int]]) -> None:
    (wire, body), at = drawn
    check(wire, *cut(body, at))


class Counterpart:
    """A server that answers every request with the same bytes, head and all, and hangs up."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.reply = b""
        self.listener = loop.run_until_complete(asyncio.start_server(self.handle, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.sockets[0].getsockname()[1]}/v1"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(int(head.partition(b"content-length:")[2].split()[0]))
            writer.write(self.reply)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client has left
        finally:
            writer.close()

    def ask(self, wire: Any, transport: Any, streamed: bool) -> None:
        """Raises nothing but what is wrong."""
        self.loop.run_until_complete(asyncio.wait_for(self._ask(wire, transport, streamed), 60))

    async def _ask(self, wire: Any, transport: Any, streamed: bool) -> None:
        model = OpenAiChatModel("m", self.url, "test", wire=wire, transport=transport, max_retries=0, timeout=8)
        request = ChatRequest([UserMessage("Go.")], [ToolSpecification("add"), ToolSpecification("now")])
        try:
            if not streamed:
                await model.chat(request)
                return
            *_, last = [event async for event in model.stream(request)]
            assert isinstance(last, CompleteResponse)
        except ModelError as error:
            str(error)
        finally:
            await model.aclose()


@pytest.fixture(scope="module")
def counterpart() -> Iterator[Counterpart]:
    loop = asyncio.new_event_loop()
    server = Counterpart(loop)
    yield server
    server.listener.close()
    loop.run_until_complete(server.listener.wait_closed())
    loop.run_until_complete(asyncio.sleep(0))  # what hung up comes to its end
    loop.close()


def over_http(body: bytes, framing: str) -> bytes:
    """The bytes of an HTTP reply; the framing may be wrong about its length."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-request-id: r\r\nconnection: close\r\n"
    match framing:
        case "length":
            return head + b"content-length: %d\r\n\r\n" % len(body) + body
        case "more":
            return head + b"content-length: %d\r\n\r\n" % (len(body) + 7) + body
        case "less":
            return head + b"content-length: %d\r\n\r\n" % (len(body) // 2) + body
        case "chunked":
            return head + b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        case "half":
            return head + b"transfer-encoding: chunked\r\n\r\n%x\r\n%s" % (len(body) + 5, body)
        case _:
            return head + b"\r\n" + body


framing = sampled("length", "more", "less", "chunked", "half", "close")
transport = sampled("aiohttp", "httpx2")
yes_or_no = sampled(False, True)


def mutated_over_http(choices: Choices) -> tuple[str, bytes]:
    wire = choices.one_of(WIRES)
    return wire, over_http(MUTATED[wire](choices), framing(choices))


@settings(max_examples=150, deadline=None)
@given(drawn=made(mutated_over_http, transport, yes_or_no))
def test_mutated_replies_over_a_connection_return_a_reply_or_raise_a_model_error(
    counterpart: Counterpart, drawn: tuple[tuple[str, bytes], str, bool]
) -> None:
    (wire, counterpart.reply), transport, streamed = drawn

    counterpart.ask(wire, transport, streamed)


def broken(choices: Choices) -> bytes:
    """Return a reply over HTTP with up to three changed bytes."""
    reply = over_http(choices.one_of(BODIES["chat"]), framing(choices))
    place = choices.below(min(len(reply), 200) + 1)
    # The package's adapter for aiohttp leaves a connection to the garbage collector when a reason is not UTF-8.
    is_first_line = place < reply.index(b"\r\n") + 2
    changed = choices.text(3).encode() if is_first_line else choices.bytes(choices.below(4))
    return reply[:place] + changed + reply[place + len(changed) :]


@settings(max_examples=100, deadline=None)
@given(drawn=made(broken, transport, yes_or_no))
def test_broken_connections_return_a_reply_or_raise_a_model_error(
    counterpart: Counterpart, drawn: tuple[bytes, str, bool]
) -> None:
    counterpart.reply, transport, streamed = drawn

    counterpart.ask("chat", transport, streamed)
