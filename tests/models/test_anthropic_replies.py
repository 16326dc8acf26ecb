"""Replies of Anthropic's Messages API and of servers that imitate it, read as the vendor's own package reads them."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.models.messages_api import (
    END,
    PING,
    USAGE,
    delta,
    ending,
    events,
    fields,
    given,
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
from tests.models.scripted_server import Scripted, ScriptedServer
from toolbox import (
    AnthropicChatModel,
    ChatRequest,
    ChatResponse,
    CompleteResponse,
    CompleteToolCall,
    ContextLengthError,
    FinishReason,
    ModelConnectionError,
    ModelError,
    ModelHttpError,
    ModelProtocolError,
    ModelRefusedError,
    ModelTruncatedError,
    TokenUsage,
    ToolSpecification,
    UserMessage,
)
from toolbox.models.accumulator import ReplyAccumulator
from toolbox.models.anthropic_wire import AnthropicWire
from toolbox.models.reply_reader import ReplyReader

pytestmark = pytest.mark.anyio

ADD = ToolSpecification("add", "Adds")
NOW = ToolSpecification("now", "Tells the time")
SUM = ("add", {"a": 1})
USED = TokenUsage(15, 5, 3, 0, 2)
CALL = tool_use("add", {"a": 1})
HELLO = [start(0, text("")), said(0, "Hel"), said(0, "lo"), stop(0)]
ASKS = [start(0, tool_use("add", {})), given(0, '{"a"'), given(0, ": 1}"), stop(0)]


@dataclass
class Case:
    """What a server sends, and what a client makes of it: the text, the calls, the blocks, or the error."""

    what: str
    reply: Scripted
    text: str | None = None
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    blocks: list[dict[str, Any]] | None = None
    error: type[ModelError] | None = None
    status: int | None = None
    says: str = ""
    finish: FinishReason | None = None
    usage: TokenUsage | None = None
    check: Callable[[ChatResponse], bool] | None = None

    def __str__(self) -> str:
        return self.what


def raw(*pieces: str | bytes, **more: Any) -> Scripted:
    chunks = [each.encode() if isinstance(each, str) else each for each in pieces]
    return Scripted(chunks=chunks, content_type="text/event-stream", **more)


def body(value: Any, status: int = 200, content_type: str = "application/json") -> Scripted:
    return Scripted(
        value.encode() if isinstance(value, str) else json.dumps(value).encode(), None, status, content_type
    )


def error(kind: str, said: str = "No.") -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": said}}


def line(value: Any) -> str:
    return f"data: {json.dumps(value)}\n\n"


SEARCH = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}}
FOUND = {
    "type": "web_search_tool_result",
    "tool_use_id": "srvtoolu_1",
    "content": [{"type": "web_search_result", "url": "https://a.example", "title": "A", "encrypted_content": "zzz"}],
}
CITED = {"type": "char_location", "cited_text": "x", "document_index": 0, "start_char_index": 0, "end_char_index": 1}

WELL_FORMED = [
    *(
        case
        for how, reply in (("whole", message), ("streamed", streamed))
        for case in (
            Case(f"a text, {how}", reply(text("Hello")), "Hello", finish=FinishReason.STOP, usage=USED),
            Case(
                f"a call, {how}", reply(CALL, stop="tool_use"), None, [SUM], [CALL], finish=FinishReason.TOOL_EXECUTION
            ),
            Case(f"a call without arguments, {how}", reply(tool_use("now", {}), stop="tool_use"), None, [("now", {})]),
            Case(
                f"thoughts, a text and two calls, {how}",
                reply(thinking("Hm."), text("So"), CALL, tool_use("now", {}, "toolu_2"), stop="tool_use"),
                "So",
                [SUM, ("now", {})],
                [thinking("Hm."), text("So"), CALL, tool_use("now", {}, "toolu_2")],
                check=lambda response: response.ai_message.reasoning == "Hm.",
            ),
            Case(
                f"redacted thoughts, {how}",
                reply({"type": "redacted_thinking", "data": "abc"}, text("So")),
                "So",
                blocks=[{"type": "redacted_thinking", "data": "abc"}, text("So")],
            ),
            Case(
                f"a tool that runs on the server, {how}",
                reply(text("I search. "), SEARCH, FOUND, text("Found.")),
                "I search. Found.",
                blocks=[text("I search. "), SEARCH, FOUND, text("Found.")],
            ),
            Case(f"an empty answer, {how}", reply(), "", finish=FinishReason.STOP),
            Case(f"thoughts alone, {how}", reply(thinking("Hm.")), ""),
            Case(
                f"a stop sequence, {how}", reply(text("Hello"), stop="stop_sequence"), "Hello", finish=FinishReason.STOP
            ),
            Case(f"a cut text, {how}", reply(text("Hello"), stop="max_tokens"), "Hello", finish=FinishReason.LENGTH),
            Case(
                f"a full context window, {how}",
                reply(text("Hello"), stop="model_context_window_exceeded"),
                error=ContextLengthError,
            ),
            Case(f"nothing before the limit, {how}", reply(stop="max_tokens"), error=ModelTruncatedError),
            Case(
                f"a call cut before its arguments, {how}",
                reply(text("So"), tool_use("add", {}), stop="max_tokens"),
                error=ModelTruncatedError,
            ),
            Case(f"a call at the end, {how}", reply(CALL, stop="max_tokens"), error=ModelTruncatedError),
            Case(
                f"a call before the context window was full, {how}",
                reply(CALL, stop="model_context_window_exceeded"),
                error=ContextLengthError,
            ),
            Case(
                f"a call before the text that was cut, {how}",
                reply(CALL, text("So"), stop="max_tokens"),
                "So",
                [SUM],
                finish=FinishReason.LENGTH,
            ),
            Case(f"a refusal, {how}", reply(text("I can't"), stop="refusal"), error=ModelRefusedError, says="I can't"),
            Case(
                f"a refusal without a text, {how}",
                reply(stop="refusal", stop_details={"type": "refusal", "category": "bio", "explanation": "Too risky."}),
                error=ModelRefusedError,
                says="Too risky.",
            ),
            Case(f"a refusal after a call, {how}", reply(CALL, stop="refusal"), error=ModelRefusedError),
            Case(
                f"an unknown stop reason, {how}", reply(text("Hello"), stop="bored"), "Hello", finish=FinishReason.OTHER
            ),
        )
    ),
    Case(
        "citations in a stream",
        events(started(), HELLO[0], HELLO[1], delta(0, "citations_delta", citation=CITED), *HELLO[2:], ending(), END),
        "Hello",
        blocks=[text("Hello", citations=[CITED])],
    ),
    Case(
        "counts in message_delta replace those of the start",
        events(
            started(),
            *HELLO,
            ending(usage={"input_tokens": 20, "output_tokens": 9, "cache_read_input_tokens": None}),
            END,
        ),
        "Hello",
        usage=TokenUsage(25, 9, 3, 0, 2),
    ),
    Case(
        "tokens of thoughts",
        message(text("Hello"), usage=USAGE | {"output_tokens_details": {"thinking_tokens": 4}}),
        "Hello",
        usage=TokenUsage(15, 5, 3, 4, 2),
    ),
    Case(
        "further fields are attributes",
        message(text("Hello"), container={"id": "c", "expires_at": "x"}, usage=USAGE | {"service_tier": "priority"}),
        "Hello",
        check=lambda response: (
            response.attributes == {"container": {"id": "c", "expires_at": "x"}, "usage": {"service_tier": "priority"}}
        ),
    ),
]

TYPES = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "conflict_error": 409,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}
ERRORS = [
    *(
        Case(
            f"an error event of type {kind}",
            events(started(), *HELLO[:2], error(kind)),
            error=ModelHttpError,
            status=status,
        )
        for kind, status in TYPES.items()
    ),
    Case(
        "an error as the first event", events(error("overloaded_error")), error=ModelHttpError, status=529, says="No."
    ),
    Case("an error with status 200", body(error("rate_limit_error")), error=ModelHttpError, status=429),
    Case(
        "an error with a status",
        body(error("not_found_error", "model: x"), 404),
        error=ModelHttpError,
        status=404,
        says="model: x",
    ),
    Case("an error of an unknown type", events(started(), error("new_error")), error=ModelHttpError, says="No."),
    Case(
        "an error event that is not JSON",
        raw(line(started()), "event: error\ndata: overloaded\n\n"),
        error=ModelHttpError,
        says="overloaded",
    ),
    Case(
        "an error event without an envelope",
        raw("event: error\n" + line({"type": "overloaded_error", "message": "No."})),
        error=ModelHttpError,
        status=529,
    ),
    Case("an HTML page", body("<html>Bad gateway</html>", 200, "text/html"), error=ModelProtocolError),
    Case("an empty body", body(""), error=ModelProtocolError),
    Case("a list", body("[]"), error=ModelProtocolError),
    Case(
        "another API's reply",
        body({"choices": [{"message": {"content": "Hello"}}]}),
        error=ModelProtocolError,
        says="message",
    ),
]

OFF_SPEC = [
    Case("events without names", events(started(), *HELLO, ending(), END, named=False), "Hello"),
    Case("no message_start", events(*HELLO, ending(), END), "Hello"),
    Case(
        "a message_start without content and usage (cc-switch-cli#320)",
        events({"type": "message_start", "message": {"id": "m"}}, *HELLO, ending(), END),
        "Hello",
    ),
    Case(
        "content in the message_start",
        events(
            {"type": "message_start", "message": fields(text("Hel"), stop=None)},
            start(1, text("")),
            said(1, "lo"),
            stop(1),
            ending(),
            END,
        ),
        "Hello",
    ),
    Case("no message_stop (DeepSeek-Reasonix#8756)", events(started(), *HELLO, ending()), "Hello"),
    Case("no message_delta, but a message_stop", events(started(), *HELLO, END), "Hello"),
    Case("two message_stops (plano#898)", events(started(), *HELLO, ending(), END, END), "Hello"),
    Case(
        "[DONE] after message_stop",
        raw(*(line(each) for each in (started(), *HELLO, ending(), END)), "data: [DONE]\n\n"),
        "Hello",
    ),
    Case(
        "events after message_stop do not count",
        events(started(), *HELLO, ending(), END, start(1, CALL), stop(1)),
        "Hello",
        blocks=[text("Hello")],
    ),
    Case("no content_block_stop", events(started(), *HELLO[:3], ending(), END), "Hello"),
    Case("a call without content_block_stop", events(started(), *ASKS[:3], ending("tool_use"), END), None, [SUM]),
    Case(
        "a delta without a start (sub2api#4294)",
        events(started(), said(0, "Hello"), ending(), END),
        "Hello",
        blocks=[text("Hello")],
    ),
    Case(
        "arguments without a start are ignored", events(started(), *HELLO, given(5, '{"a": 1}'), ending(), END), "Hello"
    ),
    Case(
        "the same index for each block",
        events(started(), *HELLO, start(0, CALL), stop(0), ending("tool_use"), END),
        "Hello",
        [SUM],
    ),
    Case(
        "indexes that begin with 1",
        events(started(), start(1, text("")), said(1, "Hello"), stop(1), ending(), END),
        "Hello",
    ),
    Case(
        "no index at all",
        events(
            started(),
            *({k: v for k, v in each.items() if k != "index"} for each in (*HELLO, *ASKS)),
            ending("tool_use"),
            END,
        ),
        "Hello",
        [SUM],
    ),
    Case(
        "no input in the start (llama.cpp#22960)",
        events(
            started(),
            start(0, {"type": "tool_use", "id": "toolu_1", "name": "add"}),
            *ASKS[1:],
            ending("tool_use"),
            END,
        ),
        None,
        [SUM],
    ),
    Case(
        "the whole input in the start (narracat#16)",
        events(started(), start(0, CALL), stop(0), ending("tool_use"), END),
        None,
        [SUM],
        [CALL],
    ),
    Case(
        "the whole input in the start and an empty delta",
        events(started(), start(0, CALL), given(0, ""), stop(0), ending("tool_use"), END),
        None,
        [SUM],
    ),
    Case(
        "the input in the start and in deltas",
        events(started(), start(0, tool_use("add", {"a": 9})), *ASKS[1:], ending("tool_use"), END),
        None,
        [SUM],
        [CALL],
    ),
    Case(
        "no arguments, and no delta",
        events(started(), start(0, tool_use("now", {})), stop(0), ending("tool_use"), END),
        None,
        [("now", {})],
    ),
    Case("input null", message(tool_use("now", None), stop="tool_use"), None, [("now", {})]),
    Case(
        "input as JSON text (fantasy#219)", message(tool_use("add", '{"a": 1}'), stop="tool_use"), None, [SUM], [CALL]
    ),
    Case("input is an empty text", message(tool_use("now", ""), stop="tool_use"), None, [("now", {})]),
    Case(
        "a delta with an object",
        events(
            started(),
            start(0, tool_use("add", {})),
            delta(0, "input_json_delta", partial_json={"a": 1}),
            stop(0),
            ending("tool_use"),
            END,
        ),
        None,
        [SUM],
    ),
    Case(
        "no id of a call",
        message({"type": "tool_use", "name": "add", "input": {"a": 1}}, stop="tool_use"),
        None,
        [SUM],
        check=lambda response: bool(response.ai_message.attributes["anthropic"][0]["id"]),
    ),
    Case(
        "the same id twice",
        message(CALL, CALL, stop="tool_use"),
        None,
        [SUM, SUM],
        check=lambda response: len({each["id"] for each in response.ai_message.attributes["anthropic"]}) == 2,
    ),
    Case(
        "a call without a name",
        message({"type": "tool_use", "id": "toolu_1", "input": {"a": 1}}, stop="tool_use"),
        error=ModelProtocolError,
    ),
    Case("end_turn with a call", message(CALL), None, [SUM], finish=FinishReason.TOOL_EXECUTION),
    Case("tool_use without a call", message(text("Hello"), stop="tool_use"), "Hello", finish=FinishReason.STOP),
    Case("tool_use and nothing", message(stop="tool_use"), error=ModelProtocolError),
    Case("stop_reason null", message(text("Hello"), stop=None), "Hello"),
    Case("no stop_reason and no content", body({"type": "message", "role": "assistant"}), error=ModelProtocolError),
    Case("no type", body({"role": "assistant", "content": [text("Hello")], "stop_reason": "end_turn"}), "Hello"),
    Case("content is a text", body({"type": "message", "content": "Hello", "stop_reason": "end_turn"}), "Hello"),
    Case(
        "no usage",
        body({"type": "message", "content": [text("Hello")], "stop_reason": "end_turn"}),
        "Hello",
        check=lambda response: response.token_usage is None,
    ),
    Case(
        "usage without the cache",
        message(text("Hello"), usage={"input_tokens": 7, "output_tokens": 2}),
        "Hello",
        usage=TokenUsage(7, 2),
    ),
    Case(
        "counts that are null",
        message(text("Hello"), usage={"input_tokens": 7, "output_tokens": 2, "cache_read_input_tokens": None}),
        "Hello",
        usage=TokenUsage(7, 2),
    ),
    Case(
        "a message_delta without usage",
        events(started(), *HELLO, {"type": "message_delta", "delta": {"stop_reason": "end_turn"}}, END),
        "Hello",
        usage=TokenUsage(15, 1, 3, 0, 2),
    ),
    Case("a null text", message({"type": "text", "text": None}, text("Hello")), "Hello"),
    Case(
        "a thought without a signature (llama.cpp#20090)",
        message({"type": "thinking", "thinking": "Hm."}, text("Hello")),
        "Hello",
        blocks=[thinking("Hm.", None), text("Hello")],
    ),
    Case(
        "the last signature counts",
        events(
            started(),
            start(0, thinking("", "")),
            delta(0, "thinking_delta", thinking="Hm."),
            delta(0, "signature_delta", signature="a"),
            delta(0, "signature_delta", signature="sig"),
            stop(0),
            start(1, text("")),
            said(1, "So"),
            stop(1),
            ending(),
            END,
        ),
        "So",
        blocks=[thinking("Hm."), text("So")],
    ),
    Case(
        "a text delta in a block of thoughts is ignored",
        events(
            started(),
            start(0, thinking("", "")),
            said(0, "So"),
            stop(0),
            *[each | {"index": 1} for each in HELLO],
            ending(),
            END,
        ),
        "Hello",
    ),
    Case(
        "an unknown block is kept",
        message({"type": "new_block", "data": 1}, text("Hello")),
        "Hello",
        blocks=[{"type": "new_block", "data": 1}, text("Hello")],
    ),
    Case(
        "an unknown delta",
        events(started(), HELLO[0], delta(0, "new_delta", data=1), *HELLO[1:], ending(), END),
        "Hello",
    ),
    Case("an unknown event", events(started(), {"type": "new_event", "data": 1}, *HELLO, ending(), END), "Hello"),
    Case(
        "pings everywhere",
        events(PING, started(), PING, HELLO[0], PING, *HELLO[1:], PING, ending(), PING, END),
        "Hello",
    ),
    Case(
        "comments and blank lines",
        raw(": hi\n\n", line(started()), "\n\n: keep-alive\n\n", *map(line, (*HELLO, ending(), END))),
        "Hello",
    ),
    Case(
        "CRLF and no space after data:",
        raw(*(f"event: x\r\ndata:{json.dumps(each)}\r\n\r\n" for each in (started(), *HELLO, ending(), END))),
        "Hello",
    ),
    Case(
        "no blank line at the end", raw(*(line(each) for each in (started(), *HELLO)), line(ending()).rstrip()), "Hello"
    ),
    Case("a message instead of a stream", raw(json.dumps(fields(text("Hello")))), "Hello"),
    Case("a whole message in an event", events(fields(text("Hello"))), "Hello"),
    Case(
        "a stream instead of a message",
        Scripted(b"".join(streamed(text("Hello")).chunks or ()), content_type="text/event-stream"),
        "Hello",
    ),
    Case(
        "surrogates in two deltas",
        events(started(), start(0, text("")), said(0, "\ud83d"), said(0, "\ude00"), stop(0), ending(), END),
        "😀",
    ),
    Case(
        "a trailing comma in the arguments",
        events(started(), start(0, tool_use("add", {})), given(0, '{"a": 1,}'), stop(0), ending("tool_use"), END),
        None,
        [SUM],
        [CALL],
    ),
    Case(
        "the text ends without an end (gpt-load#736)",
        events(started(), *HELLO),
        error=ModelProtocolError,
        says="ended before",
    ),
    Case("a call ends without an end", events(started(), *ASKS), error=ModelProtocolError),
    Case(
        "an index that is not a number",
        events(
            started(),
            *({**each, "index": [0]} if "index" in each else each for each in HELLO),
            *({**each, "index": {"a": 1}} if "index" in each else each for each in ASKS),
            ending("tool_use"),
            END,
        ),
        "Hello",
        [SUM],
    ),
    Case("nothing but a start", events(started()), error=ModelProtocolError),
    Case("nothing but pings", events(PING, PING), error=ModelProtocolError),
    Case(
        "a connection that breaks",
        Scripted(chunks=events(started(), *HELLO[:2]).chunks, content_type="text/event-stream", cut=True),
        error=ModelConnectionError,
    ),
    Case(
        "an event that is cut", raw(line(started()), *map(line, HELLO), line(ending())[:-30]), error=ModelProtocolError
    ),
    Case(
        "arguments cut at the limit (qwen-code#9013)",
        events(started(), *ASKS[:2], stop(0), ending("max_tokens"), END),
        error=ModelTruncatedError,
    ),
    Case(
        "a whole call and a cut one",
        events(
            started(),
            *ASKS,
            start(1, tool_use("now", {}, "toolu_2")),
            given(1, '{"x": '),
            stop(1),
            ending("max_tokens"),
            END,
        ),
        error=ModelTruncatedError,
    ),
    Case(
        "a call whose whole block is one event, at the limit",
        events(started(), start(0, CALL), stop(0), ending("max_tokens"), END),
        error=ModelTruncatedError,
    ),
]

CASES = [*WELL_FORMED, *ERRORS, *OFF_SPEC]


def test_there_are_at_least_forty_replies_that_break_the_rules() -> None:
    assert len(OFF_SPEC) >= 40
    assert len({each.what for each in CASES}) == len(CASES)


def check(case: Case, response: ChatResponse) -> None:
    reply = response.ai_message
    assert case.error is None
    assert reply.text == case.text
    assert [(each.name, json.loads(each.arguments)) for each in reply.tool_execution_requests] == case.calls
    if case.blocks is not None:
        assert reply.attributes["anthropic"] == case.blocks
    if case.finish is not None:
        assert response.finish_reason is case.finish
    if case.usage is not None:
        assert response.token_usage == case.usage
    assert case.check is None or case.check(response)


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_a_reply_is_read_as_the_vendor_reads_it(scripted: ScriptedServer, case: Case) -> None:
    scripted.script(lambda _: case.reply)
    model = AnthropicChatModel("claude-test", base_url=scripted.url.removesuffix("/v1"), max_retries=0)
    request = ChatRequest([UserMessage("Hi")], (ADD, NOW))

    async def reply() -> ChatResponse:
        if case.reply.chunks is None:
            return await model.chat(request)
        *_, last = [event async for event in model.stream(request)]
        assert isinstance(last, CompleteResponse)
        return last.response

    if case.error is None:
        check(case, await reply())
    else:
        with pytest.raises(case.error) as caught:
            await reply()
        found = caught.value
        assert case.says in str(found) or case.says == getattr(found, "text", None)
        assert case.status is None or getattr(found, "status", None) == case.status
        assert getattr(found, "request_id", "req_1") == "req_1"
    await model.aclose()


# --- without a server

READABLE = [each for each in CASES if each.reply.status == 200 and not each.reply.cut]


def bytes_of(case: Case) -> bytes:
    return case.reply.body if case.reply.chunks is None else b"".join(case.reply.chunks)


def reader() -> ReplyReader:
    return ReplyReader(AnthropicWire().interpreter(ReplyAccumulator({"add", "now"})))


def outcome(read: Callable[[], ChatResponse]) -> Any:
    try:
        response = read()
    except ModelError as found:
        return type(found), found.args[0] if isinstance(found, ModelHttpError) else None
    message = response.ai_message
    calls = [(each.name, each.arguments) for each in message.tool_execution_requests]
    return message.text, calls, message.reasoning, response.finish_reason, response.token_usage


def at_once(body: bytes) -> ChatResponse:
    reading = reader()
    reading.load(body)
    return reading.end()


def in_pieces(body: bytes, size: int) -> ChatResponse:
    reading = reader()
    found = [event for at in range(0, len(body), size) for event in reading.feed(body[at : at + size])]
    found += reading.finish()
    complete = [event.request for event in found if isinstance(event, CompleteToolCall)]
    last = found[-1]
    assert isinstance(last, CompleteResponse)
    assert sorted(each.id for each in complete) == sorted(
        each.id for each in last.response.ai_message.tool_execution_requests
    )
    return last.response


@pytest.mark.parametrize("case", READABLE, ids=str)
def test_a_message_reads_the_same_for_all_chunk_sizes(case: Case) -> None:
    body = bytes_of(case)
    whole = outcome(lambda: at_once(body))

    for size in (1, 7, 64, len(body) + 1):
        assert outcome(lambda size=size: in_pieces(body, size)) == whole  # type: ignore[misc]  # a default, to bind it


SHAPES = (
    [text("Hello"), text(" you")],
    [thinking("Hm."), text("So"), CALL, tool_use("now", {}, "toolu_2")],
    [{"type": "redacted_thinking", "data": "x"}, text("I search. "), SEARCH, FOUND, text("Done.")],
)


@pytest.mark.parametrize("blocks", SHAPES, ids=["texts", "calls", "server tools"])
def test_a_stream_is_read_as_the_package_of_the_vendor_accumulates_it(blocks: list[dict[str, Any]]) -> None:
    from anthropic._models import construct_type
    from anthropic.lib.streaming._messages import accumulate_event
    from anthropic.types import RawMessageStreamEvent

    reply = streamed(*blocks, stop="tool_use")
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for chunk in reply.chunks or ():
        value = json.loads(chunk.partition(b"data: ")[2])
        if value["type"] != "ping":
            event: Any = construct_type(type_=RawMessageStreamEvent, value=value)
            snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)
    theirs = [each.to_dict() for each in snapshot.content]

    response = in_pieces(b"".join(reply.chunks or ()), 50)

    assert response.ai_message.attributes["anthropic"] == [
        {name: value for name, value in each.items() if name != "parsed_output"} for each in theirs
    ]
    assert response.ai_message.text == ("".join(each.text for each in snapshot.content if each.type == "text") or None)
    assert response.id == snapshot.id
