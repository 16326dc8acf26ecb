"""A reply reads the same for all chunk sizes, as a stream and as a document.

Reads every reply of the tables in this folder, without a network.
"""

import functools
import json
from typing import Any

import pytest

from tests.models.seen import Case
from tests.models.test_tolerance import CASES
from toolbox import ChatResponse, CompleteResponse, CompleteToolCall, ModelError
from toolbox.models.accumulator import ReplyAccumulator
from toolbox.models.chat_wire import ChatWire
from toolbox.models.reply_reader import ReplyReader

READABLE = [each for each in CASES if each.reply.status == 200 and not each.reply.headers and not each.reply.cut]
SHORT = 5_000
"""Bytes of a reply that may be read byte by byte."""


def body_of(case: Case) -> bytes:
    return case.reply.body if case.reply.chunks is None else b"".join(case.reply.chunks)


def reader() -> ReplyReader:
    return ReplyReader(ChatWire().interpreter(ReplyAccumulator({"add", "now", "echo"})))


def outcome(reply: ChatResponse | ModelError) -> Any:
    """What a reply comes to: its kind of error, or its text and calls, without ids that were made."""
    if isinstance(reply, ModelError):
        return type(reply)
    message = reply.ai_message
    calls = [(each.name, each.arguments) for each in message.tool_execution_requests]
    return message.text, calls, message.reasoning, reply.finish_reason, reply.token_usage


def as_document(body: bytes) -> ChatResponse | ModelError:
    try:
        whole = reader()
        whole.load(body)
        return whole.end()
    except ModelError as error:
        return error


def as_stream(blocks: list[bytes]) -> ChatResponse | ModelError:
    reading = reader()
    try:
        events = [event for block in blocks for event in reading.feed(block)] + reading.finish()
    except ModelError as error:
        return error
    complete = [event.request for event in events if isinstance(event, CompleteToolCall)]
    last = events[-1]
    assert isinstance(last, CompleteResponse)
    assert sorted(each.id for each in complete) == sorted(
        each.id for each in last.response.ai_message.tool_execution_requests
    )
    return last.response


@functools.cache
def whole(case: Case) -> Any:
    """What a reply comes to that arrives in one block."""
    return outcome(as_stream([body_of(case)]))


def pieces(body: bytes, size: int) -> list[bytes]:
    return [body[start : start + size] for start in range(0, len(body), size)]


@pytest.mark.parametrize("case", READABLE, ids=str)
def test_a_reply_reads_the_same_for_all_chunk_sizes(case: Case) -> None:
    body = body_of(case)

    for size in (1, 2, 7, 64) if len(body) < SHORT else (100_000,):
        assert outcome(as_stream(pieces(body, size))) == whole(case)


@pytest.mark.parametrize("case", READABLE, ids=str)
def test_a_reply_reads_the_same_as_a_document_and_as_a_stream(case: Case) -> None:
    assert outcome(as_document(body_of(case))) == whole(case)


FRAMES = ((b"\n", b"\r\n"), (b"\n", b"\r"), (b"data: ", b"data:"), (b"\n\ndata: ", b"\n\nid: 1\nretry: 1\ndata: "))


@pytest.mark.parametrize("case", [each for each in READABLE if each.is_stream], ids=str)
def test_a_stream_reads_the_same_with_all_line_endings(case: Case) -> None:
    body = body_of(case)

    for old, new in FRAMES:
        assert outcome(as_stream([body.replace(old, new)])) == whole(case)


@functools.cache
def indented(case: Case) -> bytes | None:
    try:
        return json.dumps(json.loads(body_of(case)), indent=2).encode()
    except (ValueError, RecursionError):
        return None


@pytest.mark.parametrize("case", [each for each in READABLE if not each.is_stream and indented(each)], ids=str)
def test_a_document_reads_the_same_when_it_is_indented(case: Case) -> None:
    body = indented(case)
    assert body is not None

    read = outcome(as_document(body))
    assert read == outcome(as_document(body_of(case)))
    assert outcome(as_stream(pieces(body, 1000))) == read
