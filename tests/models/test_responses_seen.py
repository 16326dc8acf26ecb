"""Responses and streams of real servers: with missing, repeated or different fields.

`test_responses` has the kinds in order.
"""

import json
from typing import Any

import pytest

from tests.models.scripted_server import Scripted, ScriptedServer, completion
from tests.models.seen import Case, raw, seen
from tests.models.test_responses import ADD, DELTA, THOUGHT, events, model_of, response, streamed, text, whole
from tests.models.test_tolerance import ask, ask_streamed, tools
from toolbox import ModelConnectionError, ModelHttpError, ModelProtocolError, ModelRefusedError, ModelTruncatedError

pytestmark = pytest.mark.anyio

ADDED = ("add", {"a": 2, "b": 3})
NOW = ("now", {})
CALL_NOW = {"type": "function_call", "id": "fc_2", "call_id": "call_2", "name": "now", "arguments": "{}"}


def event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": f"response.{kind}", **fields}


def completed(*output: Any, **more: Any) -> dict[str, Any]:
    return event("completed", response=response(*output, **more))


def added(item: dict[str, Any], **place: Any) -> dict[str, Any]:
    return event("output_item.added", item={**item, "arguments": ""}, **place)


def arguments(piece: Any, kind: str = "delta", **place: Any) -> dict[str, Any]:
    field = "delta" if kind == "delta" else "arguments"
    return event(f"function_call_arguments.{kind}", **{field: piece}, **place)


def done(item: dict[str, Any], **place: Any) -> dict[str, Any]:
    return event("output_item.done", item=item, **place)


def said(piece: str, **place: Any) -> dict[str, Any]:
    return event("output_text.delta", delta=piece, **place)


def named(item: dict[str, Any], identity: str) -> dict[str, Any]:
    return {**item, "id": identity}


SAID_ONCE = [
    seen(
        "proxies",
        "content_index 1 on the deltas, the part at 0 in the item",
        events(
            said("Hel", output_index=0, content_index=1),
            said("lo", output_index=0, content_index=1),
            done(text("Hello"), output_index=0),
            completed(text("Hello")),
        ),
        text="Hello",
    ),
    seen(
        "proxies",
        "content_index 1 on the deltas, 0 on the text that is done",
        events(
            said("Hello", output_index=0, content_index=1),
            event("output_text.done", text="Hello", output_index=0, content_index=0),
            completed(text("Hello")),
        ),
        text="Hello",
    ),
    seen(
        "proxies",
        "no output_index on the item that is done",
        events(said("Hello", output_index=0, item_id="m"), done(named(text("Hello"), "m")), completed(text("Hello"))),
        text="Hello",
    ),
    seen(
        "proxies",
        "no output_index and another id on the item that is done",
        events(said("Hello", output_index=0, item_id="m"), done(named(text("Hello"), "n")), completed(text("Hello"))),
        text="Hello",
    ),
    seen(
        "proxies",
        "no output_index on the item that is done, and no id on the deltas",
        events(said("Hello", output_index=0), done(named(text("Hello"), "m")), completed()),
        text="Hello",
    ),
    seen(
        "proxies",
        "another output_index in the whole",
        events(said("Hello", output_index=1), done(text("Hello"), output_index=1), completed(text("Hello"))),
        text="Hello",
    ),
    seen(
        "proxies",
        "a part of the text only in the item",
        events(said("Hel", output_index=0, content_index=0), done(text("Hello"), output_index=0), completed()),
        text="Hello",
    ),
    seen(
        "proxies",
        "an item that begins, and its text only in the whole",
        events(event("output_item.added", output_index=0, item={**text(""), "content": []}), completed(text("Hello"))),
        text="Hello",
    ),
    seen(
        "proxies",
        "a second part only in the item",
        events(
            said("Hel", output_index=0, content_index=0),
            done({**text("Hel"), "content": [*text("Hel")["content"], *text("lo")["content"]]}, output_index=0),
            completed(),
        ),
        text="Hello",
    ),
    seen("any", "two equal messages", whole(text("Hel"), text("Hel")), text="HelHel"),
]
UNREAD = [
    seen(
        "OpenAI",
        f"nothing but {kind}",
        make({"type": kind, "id": "x", "status": "completed"}),
        error=ModelProtocolError,
        says=kind,
    )
    for kind in (
        *("custom_tool_call", "shell_call", "local_shell_call", "apply_patch_call", "computer_call"),
        *("mcp_approval_request", "image_generation_call", "web_search_call", "something_new"),
    )
    for make in (whole, streamed)
]


CALLS = [
    seen("OpenAI", "two calls", streamed(ADD, CALL_NOW), ADDED, NOW),
    seen("OpenAI", "two calls, whole", whole(ADD, CALL_NOW), ADDED, NOW),
    seen(
        "OpenAI",
        "fragments of two calls, interleaved",
        events(
            added(ADD, output_index=0),
            added({**CALL_NOW, "name": "echo"}, output_index=1),
            arguments('{"a": 2,', output_index=0),
            arguments('{"text":', output_index=1),
            arguments('"b": 3}', output_index=0),
            arguments('"x"}', output_index=1),
            completed(),
        ),
        ADDED,
        ("echo", {"text": "x"}),
    ),
    seen(
        "proxies",
        "output_index 0 for all",
        events(
            *(
                each
                for item in (ADD, CALL_NOW)
                for each in (
                    added(item, output_index=0),
                    arguments(item["arguments"], output_index=0),
                    done(item, output_index=0),
                )
            ),
            completed(),
        ),
        ADDED,
        NOW,
    ),
    seen(
        "verlet-kernel#153",
        "item_id alone on the fragments",
        events(
            added(ADD, output_index=0),
            arguments(ADD["arguments"], item_id="fc_1"),
            done(ADD, output_index=0),
            completed(ADD),
        ),
        ADDED,
    ),
    seen("proxies", "no place at all", events(added(ADD), arguments(ADD["arguments"]), completed(ADD)), ADDED),
    seen(
        "Copilot",
        "the item's id changes from event to event",
        events(
            added({**ADD, "id": "x1"}, output_index=0, item_id="x1"),
            arguments(ADD["arguments"], output_index=0, item_id="x2"),
            done({**ADD, "id": "x3"}, output_index=0),
            completed({**ADD, "id": "x4"}),
        ),
        ADDED,
    ),
    seen(
        "proxies",
        "fragments before the item",
        events(
            arguments('{"a": 2,', output_index=0),
            added(ADD, output_index=0),
            arguments('"b": 3}', output_index=0),
            completed(),
        ),
        ADDED,
    ),
    seen(
        "proxies",
        "the whole at the end under another index",
        events(done(ADD, output_index=0), completed(THOUGHT, ADD)),
        ADDED,
    ),
    seen(
        "proxies",
        "arguments only in the item that is done",
        events(added(ADD, output_index=0), done(ADD, output_index=0), completed()),
        ADDED,
    ),
    seen(
        "proxies",
        "arguments whole on the opener, and again",
        events(
            event("output_item.added", output_index=0, item=ADD),
            arguments(ADD["arguments"], "done", output_index=0),
            completed(ADD),
        ),
        ADDED,
    ),
    seen(
        "vLLM",
        "[DONE] and no completed",
        raw(
            "".join(
                f"data: {json.dumps(each)}\n\n" for each in (added(ADD, output_index=0), done(ADD, output_index=0))
            ),
            "data: [DONE]\n\n",
        ),
        ADDED,
    ),
    seen(
        "any",
        "no ids",
        whole(
            {"type": "function_call", "name": "add", "arguments": ADD["arguments"]},
            {"type": "function_call", "name": "now", "arguments": ""},
        ),
        ADDED,
        NOW,
    ),
    seen("any", "the same call_id twice", whole(ADD, {**CALL_NOW, "call_id": "call_1"}), ADDED, NOW),
    *(
        seen("any", f"arguments {value!r}", whole({**CALL_NOW, "arguments": value}), NOW)
        for value in (None, "", " ", "null", {}, '"{}"')
    ),
    seen(
        "any",
        "an object for the arguments, in a stream",
        events(done({**ADD, "arguments": {"a": 2, "b": 3}}, output_index=0), completed()),
        ADDED,
    ),
    seen("any", "under functions.", whole({**ADD, "name": "functions.add"}), ADDED),
    seen("any", "broken arguments", whole({**ADD, "arguments": '{"a": 2,'}), result="add"),
    seen(
        "any",
        "items that ran on the server",
        whole(
            {"type": "web_search_call", "id": "ws", "status": "completed"}, ADD, {"type": "mcp_list_tools", "tools": []}
        ),
        ADDED,
    ),
    seen("any", "invalid items", whole(None, "x", 7, ADD), ADDED),
    seen(
        "LM Studio",
        "status in_progress in the last event",
        events(done(ADD, output_index=0), event("completed", response=response(ADD, status="in_progress"))),
        ADDED,
    ),
]

TEXTS = [
    seen(
        "any",
        "deltas without a place, then the whole",
        events(
            event("output_text.delta", delta="Hel"), event("output_text.delta", delta="lo"), completed(text("Hello"))
        ),
        text="Hello",
    ),
    seen(
        "any",
        "deltas, then the whole under another index",
        events(DELTA, completed(THOUGHT, text("Hello"))),
        text="Hello",
    ),
    seen(
        "vLLM",
        "[DONE] after completed",
        raw(f"data: {json.dumps(DELTA)}\n\ndata: {json.dumps(completed())}\n\ndata: [DONE]\n\n"),
        text="Hello",
    ),
    seen(
        "any", "output null", events(DELTA, event("completed", response={"output": None, "usage": None})), text="Hello"
    ),
    seen(
        "any",
        "parts named text",
        whole({"type": "message", "content": [{"type": "text", "text": "Hello"}]}),
        text="Hello",
    ),
    seen(
        "any",
        "parts that are null",
        whole({"type": "message", "content": [None, {"type": "output_text", "text": "Hello", "annotations": None}]}),
        text="Hello",
    ),
    seen("any", "two messages", whole(text("Hel"), text("lo")), text="Hello"),
    seen(
        "any",
        "unknown events",
        events({"type": "response.queued"}, {"type": "keepalive"}, {"type": "codex.rate_limits"}, DELTA, completed()),
        text="Hello",
    ),
    seen(
        "any",
        "a stream for a document",
        Scripted(b"".join(events(DELTA, completed()).chunks or ()), content_type="text/event-stream"),
        text="Hello",
    ),
    seen("any", "usage of no kind", whole(text("Hello"), usage="none"), text="Hello"),
    seen(
        "any",
        "cut in a text",
        events(
            DELTA,
            event(
                "incomplete", response=response(status="incomplete", incomplete_details={"reason": "max_output_tokens"})
            ),
        ),
        text="Hello",
    ),
    seen("any", "stop after thoughts alone", whole(THOUGHT), text=""),
]

FAILURES = [
    seen(
        "OpenAI",
        "an error event with an object",
        events(DELTA, {"type": "error", "error": {"message": "overloaded", "code": "server_error"}}),
        error=ModelHttpError,
        says="overloaded",
    ),
    seen(
        "OpenAI",
        "failed in the middle",
        events(
            DELTA,
            event(
                "failed",
                response=response(status="failed") | {"error": {"code": "rate_limit_exceeded", "message": "slow down"}},
            ),
        ),
        error=ModelHttpError,
        says="slow down",
    ),
    seen("any", "failed without a reason", whole(status="failed"), error=ModelHttpError, says="failed"),
    seen(
        "any",
        "an event named error",
        raw('event: error\ndata: {"message": "overloaded", "code": 503}\n\n'),
        error=ModelHttpError,
        says="overloaded",
        status=503,
    ),
    seen("any", "error text", Scripted(b'{"error": "overloaded"}'), error=ModelHttpError, says="overloaded"),
    seen(
        "FastAPI",
        "detail",
        Scripted(b'{"detail": "Not Found"}', status=404),
        error=ModelHttpError,
        says="Not Found",
        status=404,
    ),
    seen("any", "a chat completion", completion({"content": "Hello"}), error=ModelProtocolError, says="Hello"),
    seen("any", "queued, in the background", whole(status="queued"), error=ModelProtocolError, says="queued"),
    seen(
        "any",
        "cancelled",
        events(event("cancelled", response=response(status="cancelled"))),
        error=ModelHttpError,
        status=503,
        says="cancelled",
    ),
    seen(
        "any",
        "cut before anything was said",
        whole(THOUGHT, status="incomplete", incomplete_details={"reason": "max_output_tokens"}),
        error=ModelTruncatedError,
    ),
    seen(
        "any",
        "stopped by the filter",
        whole(status="incomplete", incomplete_details={"reason": "content_filter"}),
        error=ModelRefusedError,
    ),
    seen(
        "any",
        "a clean end in the middle of a call",
        events(added(ADD, output_index=0), arguments('{"a"', output_index=0)),
        error=ModelProtocolError,
    ),
    seen("any", "broken off in a text", Scripted(chunks=events(DELTA).chunks, cut=True), error=ModelConnectionError),
    seen("any", "a call without a name", whole({**ADD, "name": None}), error=ModelProtocolError, says="without a name"),
    seen("any", "only [DONE]", raw("data: [DONE]\n\n"), error=ModelProtocolError),
    seen("any", "a page", raw("<html>Log in</html>"), error=ModelProtocolError, says="Log in"),
]


@pytest.mark.parametrize("case", [*CALLS, *TEXTS, *SAID_ONCE], ids=str)
async def test_a_response_is_understood(scripted: ScriptedServer, case: Case) -> None:
    end = streamed(text("done")) if case.is_stream else whole(text("done"))
    scripted.script([case.reply, end])
    ran: list[Any] = []
    model = model_of(scripted.url)

    answer = await (ask_streamed if case.is_stream else ask)(model, tools(ran))
    await model.aclose()

    assert ran == case.calls
    assert answer == (case.text if case.text is not None else "done")
    if case.text is None:
        items = [each for each in scripted.requests[1]["input"] if each.get("type") == "function_call"]
        results = [each for each in scripted.requests[1]["input"] if each.get("type") == "function_call_output"]
        assert [each["call_id"] for each in items] == [each["call_id"] for each in results]
        assert len({each["call_id"] for each in items}) == len(items) == max(1, len(case.calls))
        assert all(isinstance(json.loads(each["arguments"]), dict) for each in items)
        assert case.result is None or case.result in results[0]["output"]


@pytest.mark.parametrize("case", [*FAILURES, *UNREAD], ids=str)
async def test_a_failure_raises_the_expected_error(scripted: ScriptedServer, case: Case) -> None:
    scripted.script([case.reply])
    ran: list[Any] = []
    model = model_of(scripted.url)
    assert case.error is not None

    with pytest.raises(case.error) as caught:
        await (ask_streamed if case.is_stream else ask)(model, tools(ran))
    await model.aclose()

    assert caught.type is case.error
    assert case.says in str(caught.value)
    assert case.status in (None, getattr(caught.value, "status", None))
    assert ran == []
