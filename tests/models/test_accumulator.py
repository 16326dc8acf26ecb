"""Arbitrary bytes return a reply or raise a model error, and valid replies do not depend on chunk sizes."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.generated import (
    Choices,
    Make,
    below,
    blobs,
    built,
    dictionaries,
    just,
    lists,
    made,
    nested,
    objects,
    one_of,
    sampled,
    texts,
)
from tests.models.scripted_server import chunk, sse
from toolbox import (
    CompleteResponse,
    CompleteToolCall,
    ModelError,
    ModelProtocolError,
    PartialResponse,
    PartialToolCall,
    StreamEvent,
)
from toolbox.json_text import parse_json
from toolbox.models.accumulator import ReplyAccumulator
from toolbox.models.anthropic_wire import AnthropicWire
from toolbox.models.anthropic_wire import encode_message as encode_with_role
from toolbox.models.chat_wire import ChatWire, encode_message
from toolbox.models.reply_reader import ReplyReader
from toolbox.models.responses_wire import ResponsesWire, encode_items
from toolbox.models.sse import EventReader

WIRES: dict[str, Any] = {"chat": ChatWire(), "responses": ResponsesWire(), "anthropic": AnthropicWire()}

ENCODE: dict[str, Any] = {
    "chat": encode_message,
    "responses": encode_items,
    "anthropic": lambda message: encode_with_role(message, keeps_unsigned=True)[1:],  # the first byte is the role
}


def reader_of(wire: str) -> ReplyReader:
    return ReplyReader(WIRES[wire].interpreter(ReplyAccumulator({"add", "now"})))


def read(wire: str, *blocks: bytes) -> list[StreamEvent]:
    reader = reader_of(wire)
    events: list[StreamEvent] = []
    for block in blocks:
        events += reader.feed(block)
    return [*events, *reader.finish()]


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({place % (len(data) + 1) for place in places} | {len(data)})
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def check(wire: str, *blocks: bytes) -> None:
    """An answer that holds what it must, or one of our errors."""
    try:
        *_, last = read(wire, *blocks)
    except ModelError as error:
        str(error)
        return
    assert isinstance(last, CompleteResponse)
    message = last.response.ai_message
    ids = [each.id for each in message.tool_execution_requests]
    assert len(set(ids)) == len(ids)
    assert all(0 < len(each) <= 64 for each in ids)
    (message.text or "").encode()
    sent = ENCODE[wire](message)
    if sent:
        parse_json(b"[" + sent + b"]")


integer = one_of(Choices.integer, below(5))
text_of_any_kind = texts(8)
anything = nested(
    one_of(just(None), sampled(False, True), integer, Choices.number, text_of_any_kind),
    lambda inner: one_of(lists(inner, 3), dictionaries(text_of_any_kind, inner, 3)),
)
name = one_of(sampled("add", "now", "functions.add", "a", "dd", "", " "), anything)
arguments = one_of(
    sampled('{"a": 1}', '{"a"', ": 1}", "{}", "null", '"{}"', "", "{}{}", '"', "\\ud83d", "\ud83d"), anything
)
index = one_of(sampled(0, 1, "0", "", None), anything)
identity = one_of(sampled("c", "d", "", None, "x" * 70, 3), anything)

entry = one_of(
    objects(index=index, id=identity, function=one_of(objects(name=name, arguments=arguments), anything), name=name),
    anything,
)
text = one_of(texts(5), lists(objects(type=just("text"), text=texts(5)), 2), anything)
delta = one_of(
    objects(
        content=text,
        role=anything,
        refusal=anything,
        reasoning_content=text,
        reasoning=text,
        reasoning_details=one_of(lists(objects(type=just("t"), text=text, index=index), 3), anything),
        tool_calls=one_of(lists(entry, 3), anything),
        function_call=one_of(objects(name=name, arguments=arguments), anything),
        extra_content=anything,
    ),
    anything,
)
finish = one_of(sampled("stop", "length", "tool_calls", "content_filter", "error", "", None), anything)
usage = one_of(objects(prompt_tokens=anything, completion_tokens=anything, prompt_tokens_details=anything), anything)
choice = one_of(objects(index=index, delta=delta, message=delta, finish_reason=finish, error=anything), anything)
chat_event = one_of(
    objects(
        id=anything,
        model=anything,
        choices=one_of(lists(choice, 2), anything),
        usage=usage,
        error=anything,
        object=anything,
    ),
    anything,
)

item = one_of(
    objects(
        type=one_of(sampled("function_call", "message", "reasoning"), anything),
        id=identity,
        call_id=identity,
        name=name,
        arguments=arguments,
        content=one_of(lists(objects(type=sampled("output_text", "refusal"), text=text, refusal=text), 2), anything),
        summary=one_of(lists(objects(text=text), 2), anything),
        encrypted_content=anything,
    ),
    anything,
)
response = one_of(
    objects(
        status=one_of(sampled("completed", "incomplete", "failed"), anything),
        output=one_of(lists(item, 3), anything),
        error=anything,
        usage=usage,
        incomplete_details=one_of(objects(reason=sampled("max_output_tokens", "content_filter")), anything),
        store=anything,
    ),
    anything,
)
kinds = sampled(
    "response.output_text.delta",
    "response.output_text.done",
    "response.refusal.delta",
    "response.refusal.done",
    "response.reasoning_summary_text.delta",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.added",
    "response.output_item.done",
    "response.completed",
    "response.incomplete",
    "response.failed",
)
responses_event = one_of(
    objects(
        type=kinds,
        output_index=index,
        item_id=identity,
        content_index=index,
        delta=text,
        text=text,
        arguments=arguments,
        item=item,
        response=response,
    ),
    response,
)
block = one_of(
    objects(
        type=one_of(sampled("text", "thinking", "redacted_thinking", "tool_use", "server_tool_use"), anything),
        text=text,
        thinking=text,
        signature=anything,
        citations=anything,
        data=anything,
        id=identity,
        name=name,
        input=arguments,
    ),
    anything,
)
anthropic_message = objects(
    type=one_of(just("message"), anything),
    id=anything,
    model=anything,
    role=anything,
    content=one_of(lists(block, 3), anything),
    stop_reason=one_of(sampled("end_turn", "tool_use", "max_tokens", "refusal", "pause_turn"), anything),
    usage=one_of(objects(input_tokens=anything, output_tokens=anything, cache_read_input_tokens=anything), anything),
)
anthropic_delta = one_of(
    objects(
        type=one_of(
            sampled("text_delta", "thinking_delta", "input_json_delta", "signature_delta", "citations_delta"), anything
        ),
        text=text,
        thinking=text,
        partial_json=arguments,
        signature=anything,
        citation=anything,
        stop_reason=one_of(sampled("end_turn", "tool_use", "pause_turn"), anything),
    ),
    anything,
)
anthropic_event = one_of(
    objects(
        type=one_of(
            sampled("message_start", "content_block_start", "content_block_delta", "content_block_stop"),
            sampled("message_delta", "message_stop", "ping", "error"),
            anything,
        ),
        index=index,
        message=one_of(anthropic_message, anything),
        content_block=block,
        delta=anthropic_delta,
        usage=anything,
        error=anything,
    ),
    anything,
)
places = lists(below(2001), 6)
wires = sampled("chat", "responses")


@settings(max_examples=300, deadline=None)
@given(made(wires, blobs(200), places))
def test_arbitrary_bytes_return_a_reply_or_raise_a_model_error(drawn: tuple[str, bytes, list[int]]) -> None:
    wire, data, at = drawn
    check(wire, *cut(data, at))


frames = lists(
    sampled(
        b"data: ",
        b"data:",
        b"\n",
        b"\n\n",
        b"\r\n",
        b"\r",
        b"{",
        b"}",
        b'{"choices": []}',
        b"[DONE]",
        b"event: error",
        b":",
        b"\xef\xbb\xbf",
        b'"x"',
        b"event: ping",
        b"[",
        b"<",
        b"\xff",
        b"null",
    ),
    20,
)


@settings(max_examples=300, deadline=None)
@given(made(wires, frames, places))
def test_arbitrary_frames_return_a_reply_or_raise_a_model_error(drawn: tuple[str, list[bytes], list[int]]) -> None:
    wire, parts, at = drawn
    check(wire, *cut(b"".join(parts), at))


@settings(max_examples=400, deadline=None)
@given(made(sampled(False, True), places, lists(chat_event, 4)))
def test_arbitrary_chat_events_return_a_reply_or_raise_a_model_error(drawn: tuple[bool, list[int], list[Any]]) -> None:
    done, at, values = drawn
    check("chat", *cut(b"".join(sse(*values, done=done)), at))


@settings(max_examples=200, deadline=None)
@given(made(chat_event))
def test_arbitrary_chat_documents_return_a_reply_or_raise_a_model_error(drawn: tuple[Any]) -> None:
    check("chat", json.dumps(drawn[0]).encode())


@settings(max_examples=400, deadline=None)
@given(made(places, lists(responses_event, 5)))
@example(([], [{"type": "response.output_item.done", "output_index": 0, "item": {"type": ["message"]}}]))
def test_arbitrary_response_events_return_a_reply_or_raise_a_model_error(drawn: tuple[list[int], list[Any]]) -> None:
    at, values = drawn
    check("responses", *cut(b"".join(sse(*values, done=False)), at))


@settings(max_examples=200, deadline=None)
@given(made(response))
def test_arbitrary_response_documents_return_a_reply_or_raise_a_model_error(drawn: tuple[Any]) -> None:
    check("responses", json.dumps(drawn[0]).encode())


@settings(max_examples=400, deadline=None)
@given(made(places, lists(anthropic_event, 6)))
@example(([], [{"type": "content_block_delta", "delta": {"type": ["text_delta"]}}]))
@example(
    (
        [],
        [
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "citations": 1}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "citations_delta", "citation": {}}},
        ],
    )
)
def test_arbitrary_anthropic_events_return_a_reply_or_raise_a_model_error(drawn: tuple[list[int], list[Any]]) -> None:
    at, values = drawn
    check("anthropic", *cut(b"".join(sse(*values, done=False)), at))


@settings(max_examples=200, deadline=None)
@given(made(anthropic_message))
def test_arbitrary_anthropic_documents_return_a_reply_or_raise_a_model_error(drawn: tuple[Any]) -> None:
    check("anthropic", json.dumps(drawn[0]).encode())


GOOD = b"".join(
    sse(
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": "Hé "}),
        chunk({"content": "😀"}),
        chunk({"tool_calls": [{"index": 0, "id": "c", "function": {"name": "add", "arguments": ""}}]}),
        *(chunk({"tool_calls": [{"index": 0, "function": {"arguments": each}}]}) for each in ('{"a"', ": 1", "}")),
        chunk({"tool_calls": [{"index": 1, "id": "d", "function": {"name": "now", "arguments": "{}"}}]}),
        chunk({}, "tool_calls"),
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}},
    )
)


@settings(max_examples=200, deadline=None)
@given(made(places, size=16))
def test_a_valid_stream_reads_the_same_for_all_chunk_sizes(drawn: tuple[list[int]]) -> None:
    assert read("chat", *cut(GOOD, drawn[0])) == read("chat", GOOD)


def test_the_events_of_a_stream_come_in_order() -> None:
    events = read("chat", GOOD)

    assert [type(each).__name__ for each in events] == [
        "PartialResponse",
        "PartialResponse",
        "PartialToolCall",
        "PartialToolCall",
        "PartialToolCall",
        "CompleteToolCall",
        "PartialToolCall",
        "CompleteToolCall",
        "CompleteResponse",
    ]
    first = next(each for each in events if isinstance(each, PartialToolCall))
    assert first == PartialToolCall(0, "c", "add", '{"a"')
    last = events[-1]
    assert isinstance(last, CompleteResponse)
    assert last.response.ai_message.text == "Hé 😀"
    assert last.response.token_usage is not None
    assert last.response.token_usage.total_tokens == 7


def test_a_call_is_complete_when_the_next_begins_and_not_before() -> None:
    reader = reader_of("chat")
    entries = [
        {"index": 0, "id": "c", "function": {"name": "add", "arguments": '{"a": 1}'}},
        {"index": 1, "id": "d", "function": {"name": "now", "arguments": "{"}},
        {"index": 0, "function": {"arguments": '{"a": 1}'}},
        {"index": 1, "function": {"arguments": "}"}},
    ]
    complete = []
    for each in entries:
        events = reader.feed(sse(chunk({"tool_calls": [each]}))[0])
        complete.append([event.request.name for event in events if isinstance(event, CompleteToolCall)])

    assert complete == [[], ["add"], [], []]


def test_an_incomplete_call_is_not_reported_when_the_next_begins() -> None:
    reader = reader_of("chat")
    for each in (
        {"index": 0, "id": "c", "function": {"name": "add", "arguments": "{"}},
        {"index": 1, "id": "d", "function": {"name": "now", "arguments": "{}"}},
    ):
        events = reader.feed(sse(chunk({"tool_calls": [each]}))[0])
        assert not any(isinstance(event, CompleteToolCall) for event in events)
    with pytest.raises(ModelProtocolError):
        reader.finish()


# --- events that differ only in the text

piece = one_of(sampled("word ", "a", "text", "index", '"', "\\", "\ud83d", "\ude00", "\u2028", "", "\x00"), texts(4))
chat_piece = built(lambda text: chunk({"content": text}, created=1), piece)
chat_event = one_of(
    chat_piece,
    chat_piece,
    built(lambda text, at: chunk({"content": text}, created=at, text="a"), piece, sampled(1, 2)),
    built(lambda text: chunk({"content": text, "refusal": text}), piece),
    built(lambda text: {"choices": [{"index": 1, "delta": {"content": text}}]}, piece),
    built(lambda text, used: chunk({"content": text}, usage={"completion_tokens": used}), piece, below(3)),
    just(chunk({}, "stop")),
    sampled("{", "[]", "[DONE]", {"error": {"message": "no"}}),
)
block_piece = built(
    lambda text, at: {"type": "content_block_delta", "index": at, "delta": {"type": "text_delta", "text": text}},
    piece,
    below(2),
)
block_event = one_of(
    built(lambda at: {"type": "content_block_start", "index": at, "content_block": {"type": "text"}}, below(2)),
    block_piece,
    block_piece,
    block_piece,
    built(lambda at: {"type": "content_block_stop", "index": at}, below(2)),
    sampled({"type": "message_stop"}, {"type": "message_delta", "delta": {"stop_reason": "end_turn"}}),
)


def outcome(wire: str, values: list[Any], separator: str, places: list[int] | None, *, is_ascii: bool) -> Any:
    """Read the events, cut at these places; if None, at their ends."""
    lines = [each if isinstance(each, str) else json.dumps(each, ensure_ascii=is_ascii) for each in values]
    head = "event: message\ndata: " if wire == "anthropic" and separator == "\n\n" else "data: "
    events = [f"{head}{line}{separator}".encode("utf-8", "surrogatepass") for line in lines]
    try:
        return read(wire, *(events if places is None else cut(b"".join(events), places)))
    except ModelError as error:
        return repr(error)


@pytest.mark.parametrize(
    ("wire", "event"), [("chat", chat_event), ("anthropic", block_event)], ids=["chat", "anthropic"]
)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_similar_events_mean_the_same_as_events_that_are_read_line_by_line(
    wire: str, event: Make, data: st.DataObject
) -> None:
    places = one_of(just(None), lists(below(2001), 4))
    is_ascii, at, values = data.draw(made(sampled(False, True), places, lists(event, 12)))

    # Events with such line ends are never read as similar ones.
    assert outcome(wire, values, "\n\n", at, is_ascii=is_ascii) == outcome(wire, values, "\r\r", [], is_ascii=is_ascii)


def test_a_long_line_in_small_pieces_takes_linear_time() -> None:
    reader = EventReader()
    line = b'data: {"choices": [], "pad": "' + b"x" * 2_000_000 + b'"}\n\n'

    values = [value for at in range(0, len(line), 100) for value in reader.feed(line[at : at + 100])]

    assert len(values) == 1


def test_ten_thousand_fragments_are_joined() -> None:
    first = {"index": 0, "id": "c", "function": {"name": "add", "arguments": '{"a": "'}}
    more = {"index": 0, "function": {"name": "add", "arguments": "xy"}}
    last_piece = {"index": 0, "function": {"arguments": '"}'}}
    begin, middle, end, done = sse(*(chunk({"tool_calls": [each]}) for each in (first, more, last_piece)))

    *_, last = read("chat", begin, *[middle] * 10_000, end, done)

    assert isinstance(last, CompleteResponse)
    assert len(last.response.ai_message.tool_execution_requests[0].arguments) == 20_009


def test_the_text_of_the_events_is_the_text_of_the_reply() -> None:
    events = read(
        "chat", *sse(*(chunk({"content": each}) for each in ("a\ud83d", "\ude00b", "\ud83d")), chunk({}, "stop"))
    )

    assert "".join(each.text for each in events if isinstance(each, PartialResponse)) == "a😀b\ufffd"
