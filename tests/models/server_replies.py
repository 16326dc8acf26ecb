"""Replies that break the wire's rules, as real servers send them, and what a robust client makes of each.

The server's deviation is in the first reply; what is asked next is answered "done".
"""

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tests.models.scripted_server import Scripted, call, chunk, completion, sse, stream
from toolbox import (
    ModelConnectionError,
    ModelError,
    ModelHttpError,
    ModelProtocolError,
    ModelRefusedError,
    ModelTruncatedError,
)

ADD = '{"a": 2, "b": 3}'
ADDED = ("add", {"a": 2, "b": 3})
NOW = ("now", {})


@dataclass(eq=False)
class Case:
    """A deviation and what a robust client makes of it: the calls that ran, or the error, or the text."""

    what: str
    reply: Scripted
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    error: type[ModelError] | None = None
    says: str = ""
    status: int | None = None
    text: str | None = None
    history: Callable[[list[dict[str, Any]]], object] | None = None
    result: str | None = None

    def __str__(self) -> str:
        return self.what

    @property
    def is_stream(self) -> bool:
        return self.reply.chunks is not None


def deltas(*entries: Any, finish: str | None = "tool_calls", done: bool = True, cut: bool = False) -> Scripted:
    """A stream with one delta per entry; a list of entries is one delta."""
    chunks = [chunk({"tool_calls": each if isinstance(each, list) else [each]}) for each in entries]
    last = [chunk({}, finish)] if finish else []
    return stream(chunk({"role": "assistant", "content": None}), *chunks, *last, done=done, cut=cut)


def whole(*calls: Any, finish: str = "tool_calls", **message: Any) -> Scripted:
    return completion({"role": "assistant", "content": None, "tool_calls": list(calls), **message}, finish)


def at(index: Any, name: Any = None, arguments: Any = None, **more: Any) -> dict[str, Any]:
    return call(name, arguments, index=index, **more)


def document(text: str, status: int = 200, content_type: str = "application/json") -> Scripted:
    return Scripted(text.encode(), status=status, content_type=content_type)


def assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    return next(each for each in messages if each["role"] == "assistant")


WHICH_CALL = [
    Case(
        "fragments joined by index",
        deltas(at(0, "add", "", id="c"), at(0, None, '{"a": 2,'), at(0, None, ' "b": 3}')),
        [ADDED],
    ),
    Case("index is a key, not a position", deltas(at(7, "add", ADD, id="c"), at(3, "now", "{}", id="d")), [ADDED, NOW]),
    Case(
        "interleaved fragments of two indexes",
        deltas(
            at(0, "add", '{"a": 2,', id="c"),
            at(1, "echo", '{"text":', id="d"),
            at(0, None, '"b": 3}'),
            at(1, None, '"x"}'),
        ),
        [ADDED, ("echo", {"text": "x"})],
    ),
    Case("index 0 for all", deltas(at(0, "add", ADD, id="c"), at(0, "now", "{}", id="d")), [ADDED, NOW]),
    Case(
        "index 0 for all, in fragments",
        deltas(at(0, "add", "", id="c"), at(0, None, ADD), at(0, "add", "", id="d"), at(0, None, '{"a": 10, "b": 20}')),
        [ADDED, ("add", {"a": 10, "b": 20})],
    ),
    Case(
        "index 0 for all, in one delta", deltas([at(0, "add", ADD, id="c"), at(0, "now", "{}", id="d")]), [ADDED, NOW]
    ),
    Case("index 0 for all, no ids", deltas(at(0, "add", ADD), at(0, "now", "{}")), [ADDED, NOW]),
    Case(
        "id changes within a call",
        deltas(at(0, "add", "", id="c"), at(0, None, '{"a": 2,', id="d"), at(0, None, '"b": 3}', id="e")),
        [ADDED],
    ),
    Case("no index, whole calls", deltas(call("add", ADD, id="c"), call("now", "{}", id="d")), [ADDED, NOW]),
    Case(
        "no index, fragments without id",
        deltas(call("add", "", id="c"), call(None, '{"a": 2,'), call(None, '"b": 3}')),
        [ADDED],
    ),
    Case(
        "no index, the same id on each fragment",
        deltas(call("add", '{"a": 2,', id="c"), call(None, '"b": 3}', id="c")),
        [ADDED],
    ),
    Case(
        "no index, id and name on each fragment",
        deltas(call("add", '{"a": 2,', id="c"), call("add", '"b": 3}', id="c")),
        [ADDED],
    ),
    Case("no index, no ids, a name opens", deltas(call("add", ADD), call("now", "{}")), [ADDED, NOW]),
    Case("no index, no ids, the same name twice", deltas(call("add", ADD), call("add", ADD)), [ADDED, ADDED]),
    Case(
        "no index, no ids, the name on each fragment", deltas(call("add", '{"a": 2,'), call("add", '"b": 3}')), [ADDED]
    ),
    Case("index null", deltas(at(None, "add", ADD, id="c") | {"index": None}), [ADDED]),
    Case("index an empty text", deltas(at("", "add", '{"a": 2,', id="c"), at("", None, '"b": 3}')), [ADDED]),
    Case("index as text, then as number", deltas(at("0", "add", '{"a": 2,', id="c"), at(0, None, '"b": 3}')), [ADDED]),
    Case(
        "empty id and name on later fragments",
        deltas(at(0, "add", "", id="c"), at(0, "", '{"a": 2,', id=""), at(0, "", '"b": 3}', id="")),
        [ADDED],
    ),
    Case(
        "null id, name and role on later fragments",
        deltas(
            at(0, "add", "", id="c"),
            {"index": 0, "id": None, "type": None, "function": {"name": None, "arguments": '{"a": 2, "b": 3}'}},
            {"index": 0, "id": None, "type": None, "function": {"name": None, "arguments": None}},
        ),
        [ADDED],
    ),
    Case("id only later", deltas(at(0, "add", '{"a": 2,'), at(0, None, '"b": 3}', id="c")), [ADDED]),
    Case("name only later", deltas(at(0, None, "", id="c"), at(0, "add", ADD)), [ADDED]),
    Case("name after the arguments", deltas(at(0, None, ADD, id="c"), at(0, "add")), [ADDED]),
    Case("opener without function", deltas({"index": 0, "id": "c", "type": "function"}, at(0, "add", ADD)), [ADDED]),
    Case("function null", deltas({"index": 0, "id": "c", "function": None}, at(0, "add", ADD)), [ADDED]),
    Case("flat entries", deltas({"index": 0, "id": "c", "name": "add", "arguments": ADD}), [ADDED]),
    Case(
        "tool_calls is one object",
        stream(chunk({"tool_calls": at(0, "add", ADD, id="c")}), chunk({}, "tool_calls")),
        [ADDED],
    ),
    Case("entries that are null", deltas([None, at(0, "add", ADD, id="c")]), [ADDED]),
    Case("orphan at the end with a new index", deltas(at(0, "add", ADD, id="c"), at(99, None, "")), [ADDED]),
    Case("orphan with an id and nothing else", deltas(at(0, "add", ADD, id="c"), at(1, "", "", id="d")), [ADDED]),
    Case("the index counts fragments", deltas(at(0, "add", "", id="c"), at(1, None, ADD)), [ADDED]),
    Case(
        "the index counts fragments, with the id",
        deltas(at(0, "add", '{"a": 2,', id="c"), at(1, None, '"b": 3}', id="c")),
        [ADDED],
    ),
    Case("two calls in one delta", deltas([at(0, "add", ADD, id="c"), at(1, "now", "{}", id="d")]), [ADDED, NOW]),
    Case("the same id for two indexes", deltas(at(0, "add", ADD, id="c"), at(1, "now", "{}", id="c")), [ADDED, NOW]),
    Case(
        "calls beside a text",
        stream(
            chunk({"content": "Let me see. "}),
            chunk({"tool_calls": [at(0, "now", "{}", id="c")]}),
            chunk({}, "tool_calls"),
        ),
        [NOW],
        history=lambda sent: assistant(sent)["content"] == "Let me see. ",
    ),
    Case(
        "message in place of delta",
        stream(
            {
                "choices": [
                    {"index": 0, "message": {"tool_calls": [call("add", ADD, id="c")]}, "finish_reason": "tool_calls"}
                ]
            }
        ),
        [ADDED],
    ),
    Case(
        "other choices are not ours",
        stream(
            {
                "choices": [
                    {"index": 0, "delta": {"tool_calls": [at(0, "now", "", id="c")]}},
                    {"index": 1, "delta": {"content": "x"}},
                ]
            },
            chunk({}, "stop"),
        ),
        [NOW],
    ),
    Case(
        "the retired function_call",
        stream(
            chunk({"function_call": {"name": "add", "arguments": ""}}),
            chunk({"function_call": {"arguments": ADD}}),
            chunk({}, "function_call"),
        ),
        [ADDED],
    ),
    Case(
        "the retired function_call, whole",
        completion({"content": None, "function_call": {"name": "add", "arguments": ADD}}, "function_call"),
        [ADDED],
    ),
]

NAMES = [
    Case(
        "name on each fragment",
        deltas(at(0, "add", "", id="c"), at(0, "add", '{"a": 2,'), at(0, "add", '"b": 3}')),
        [ADDED],
    ),
    Case("a split name", deltas(at(0, "a", "", id="c"), at(0, "dd", ""), at(0, None, ADD)), [ADDED]),
    Case("a name said again cumulatively", deltas(at(0, "a", "", id="c"), at(0, "add", ""), at(0, None, ADD)), [ADDED]),
    Case(
        "another name after the arguments began",
        deltas(at(0, "add", '{"a": 2,', id="c"), at(0, "xyz", '"b": 3}')),
        [ADDED],
    ),
    Case("a known name is not joined", deltas(at(0, "add", "", id="c"), at(0, "er", ADD)), [ADDED]),
    Case("padded", whole(call(" add\n", ADD, id="c")), [ADDED]),
    Case(
        "under functions.",
        whole(call("functions.add", ADD, id="c")),
        [ADDED],
        history=lambda sent: assistant(sent)["tool_calls"][0]["function"]["name"] == "add",
    ),
    Case(
        "split under functions.", deltas(at(0, "functions.", "", id="c"), at(0, "add", ""), at(0, None, ADD)), [ADDED]
    ),
    Case("unknown", whole(call("subtract", ADD, id="c")), [], result="add"),
    Case("unknown and illegal", whole(call("sub tract!", ADD, id="c")), [], result="add"),
    Case("unknown and too long", whole(call("x" * 100, ADD, id="c")), [], result="add"),
    Case("nothing but a call without a name", whole(call("", "{}", id="c")), error=ModelProtocolError),
    Case("one of two without a name", whole(call("add", ADD, id="c"), call(None, "", id="d")), [ADDED]),
]

ARGUMENTS = [
    Case("an object", whole(call("add", {"a": 2, "b": 3}, id="c")), [ADDED]),
    Case("an object in a stream", deltas(at(0, "add", {"a": 2, "b": 3}, id="c")), [ADDED]),
    *(
        Case(f"none: {text!r}", whole(call("now", id="c") | {"function": {"name": "now", "arguments": text}}), [NOW])
        for text in (None, "", "  ", "null", '"null"', "{}", {})
    ),
    *(
        Case(
            f"none in a stream: {text!r}",
            deltas({"index": 0, "id": "c", "function": {"name": "now", "arguments": text}}),
            [NOW],
        )
        for text in (None, "", " ", "null", {})
    ),
    Case("absent", whole({"id": "c", "function": {"name": "now"}}), [NOW]),
    Case("absent in a stream", deltas({"index": 0, "id": "c", "function": {"name": "now"}}), [NOW]),
    Case("encoded twice", whole(call("add", json.dumps(ADD), id="c")), [ADDED]),
    Case("a leading {}", deltas(at(0, "add", "{}", id="c"), at(0, None, ADD)), [ADDED]),
    Case("cumulative", deltas(at(0, "add", '{"a"', id="c"), at(0, None, '{"a": 2,'), at(0, None, ADD)), [ADDED]),
    Case(
        "cumulative, repeated at the end",
        deltas(at(0, "add", '{"a"', id="c"), at(0, None, ADD), at(0, None, ADD)),
        [ADDED],
    ),
    Case(
        "said again whole", deltas(at(0, "add", '{"a": 2,', id="c"), at(0, None, ' "b": 3}'), at(0, None, ADD)), [ADDED]
    ),
    Case("the same object twice", whole(call("add", ADD + ADD, id="c")), [ADDED]),
    Case("broken", whole(call("add", '{"a": 2, "b"', id="c")), [], result="add"),
    Case("single quotes", whole(call("add", "{'a': 2}", id="c")), [], result="add"),
    Case("not an object", whole(call("add", "[2, 3]", id="c")), [], result="add"),
    Case("a number", whole(call("add", 5, id="c")), [], result="add"),
    Case("NaN", whole(call("echo", '{"text": NaN}', id="c")), [], result="echo"),
    Case("two different objects", whole(call("add", ADD + '{"a": 1, "b": 1}', id="c")), [], result="add"),
    Case("text around", whole(call("now", "Sure: {}", id="c")), [], result="now"),
    Case("deep", whole(call("echo", '{"text": ' + "[" * 3000 + "]" * 3000 + "}", id="c")), [], result="echo"),
    Case("half a character", whole(call("echo", '{"text": "\\ud83d"}', id="c")), [("echo", {"text": "\ud83d"})]),
    Case(
        "a character in two escapes",
        deltas(at(0, "echo", '{"text": "\\ud83d', id="c"), at(0, None, '\\ude00"}')),
        [("echo", {"text": "😀"})],
    ),
    Case(
        "long",
        deltas(at(0, "echo", '{"text": "', id="c"), *[at(0, None, "x" * 1000)] * 300, at(0, None, '"}')),
        [("echo", {"text": "x" * 300_000})],
    ),
]

IDS = [
    Case("missing", whole(call("add", ADD), call("now", "{}")), [ADDED, NOW]),
    Case("empty and null", whole(call("add", ADD, id=""), call("now", "{}") | {"id": None}), [ADDED, NOW]),
    Case("blank", whole(call("now", "{}", id="  ")), [NOW]),
    Case("double", whole(call("add", ADD, id="c"), call("now", "{}", id="c")), [ADDED, NOW]),
    Case("too long", whole(call("now", "{}", id="c" * 65)), [NOW]),
    Case(
        "a number",
        whole(call("now", "{}", id=17)),
        [NOW],
        history=lambda sent: assistant(sent)["tool_calls"][0]["id"] == "17",
    ),
    Case("missing in a stream", deltas(at(0, "add", ADD), at(1, "now", "{}")), [ADDED, NOW]),
]

COMPLETE = [
    Case("finish_reason stop", whole(call("now", "{}", id="c"), finish="stop"), [NOW]),
    Case("finish_reason stop in a stream", deltas(at(0, "now", "{}", id="c"), finish="stop"), [NOW]),
    Case("no finish_reason but [DONE]", deltas(at(0, "now", "{}", id="c"), finish=None), [NOW]),
    Case("no [DONE] but a finish_reason", deltas(at(0, "now", "{}", id="c"), done=False), [NOW]),
    Case(
        "a call after the finish_reason",
        stream(chunk({}, "stop"), chunk({"tool_calls": [at(0, "now", "{}", id="c")]})),
        [NOW],
    ),
    Case(
        "finish_reason on the delta of the call",
        stream(chunk({"tool_calls": [at(0, "now", "{}", id="c")]}, "tool_calls")),
        [NOW],
    ),
    Case(
        "finish_reason an empty text until the end",
        stream(chunk({"content": "Hel"}, ""), chunk({"content": "lo"}, ""), chunk({}, "stop")),
        text="Hello",
    ),
    Case("finish_reason tool_calls with a text", completion({"content": "Hello"}, "tool_calls"), text="Hello"),
    Case(
        "finish_reason tool_calls with nothing", completion({"content": None}, "tool_calls"), error=ModelProtocolError
    ),
    Case("broken off after the finish_reason", deltas(at(0, "now", "{}", id="c"), done=False, cut=True), [NOW]),
    Case(
        "nothing after [DONE] counts",
        Scripted(
            chunks=[*sse(chunk({"content": "Hello"}), chunk({}, "stop")), b"data: garbage\n\n"],
            content_type="text/event-stream",
        ),
        text="Hello",
    ),
    Case(
        "half a call at a clean end",
        deltas(at(0, "add", '{"a": 2,', id="c"), finish=None, done=False),
        error=ModelProtocolError,
    ),
    Case("a call and no end", deltas(at(0, "now", "{}", id="c"), finish=None, done=False), error=ModelProtocolError),
    Case("half a text at a clean end", stream(chunk({"content": "Hel"}), done=False), error=ModelProtocolError),
    Case(
        "broken off in a call",
        deltas(at(0, "add", '{"a": 2,', id="c"), finish=None, done=False, cut=True),
        error=ModelConnectionError,
    ),
    Case("broken off in a text", stream(chunk({"content": "Hel"}), done=False, cut=True), error=ModelConnectionError),
    Case("broken call, whole end", deltas(at(0, "add", '{"a": 2,', id="c")), [], result="add"),
    Case("truncated", whole(call("add", '{"a": 2, "b', id="c"), finish="length"), error=ModelTruncatedError),
    Case(
        "truncated in a stream", deltas(at(0, "add", '{"a": 2, "b', id="c"), finish="length"), error=ModelTruncatedError
    ),
    Case(
        "truncated before the arguments", deltas(at(0, "now", "", id="c"), finish="length"), error=ModelTruncatedError
    ),
    Case(
        "truncated in the second call",
        deltas(at(0, "now", "{}", id="c"), at(1, "add", '{"a"', id="d"), finish="length"),
        error=ModelTruncatedError,
    ),
    Case(
        "truncated where a repair would do",
        whole(call("add", '{"a": 2, "b": 3,}', id="c"), finish="length"),
        error=ModelTruncatedError,
    ),
    Case("length after a whole call", whole(call("add", ADD, id="c"), finish="length"), [ADDED]),
    Case(
        "max_tokens for length", whole(call("add", '{"a": 2', id="c"), finish="MAX_TOKENS"), error=ModelTruncatedError
    ),
    Case("length in a text", completion({"content": "Hel"}, "length"), text="Hel"),
]

ERROR = {"error": {"message": "the engine is overloaded", "type": "overloaded", "code": 503}}
ERRORS = [
    Case("an object in a 200", document(json.dumps(ERROR)), error=ModelHttpError, says="overloaded"),
    Case("a text in a 200", document('{"error": "the engine is overloaded"}'), error=ModelHttpError, says="overloaded"),
    Case(
        "beside null choices", document(json.dumps({"choices": None, **ERROR})), error=ModelHttpError, says="overloaded"
    ),
    Case(
        "in the choice",
        document(json.dumps({"choices": [{"finish_reason": "error", "message": {"content": ""}, **ERROR}]})),
        error=ModelHttpError,
        says="overloaded",
    ),
    Case("in a list", document(json.dumps([ERROR])), error=ModelHttpError, says="overloaded"),
    Case(
        "object error",
        document('{"object": "error", "message": "the engine is overloaded", "code": 503}'),
        error=ModelHttpError,
        says="overloaded",
    ),
    Case("detail", document('{"detail": "the engine is overloaded"}'), error=ModelHttpError, says="overloaded"),
    Case("error null means success", completion({"content": "Hello"}, error=None), text="Hello"),
    Case("an event", stream(chunk({"content": "Hel"}), ERROR), error=ModelHttpError, says="overloaded"),
    Case("the first event", stream(ERROR, done=False), error=ModelHttpError, says="overloaded"),
    Case(
        "an event without a message", stream(chunk({"content": "Hel"}), {"error": {"code": 500}}), error=ModelHttpError
    ),
    Case("an empty error event", stream(chunk({"content": "Hel"}), {"error": {}}), error=ModelHttpError),
    Case(
        "an event named error",
        Scripted(
            chunks=[*sse(chunk({"content": "Hel"}), done=False), b'event: error\ndata: {"message": "overloaded"}\n\n'],
            content_type="text/event-stream",
        ),
        error=ModelHttpError,
        says="overloaded",
    ),
    Case(
        "an event named error with a text",
        Scripted(
            chunks=[*sse(chunk({"content": "Hel"}), done=False), b"event: error\ndata: overloaded\n\n"],
            content_type="text/event-stream",
        ),
        error=ModelHttpError,
        says="overloaded",
    ),
    Case(
        "an error object in place of a stream",
        Scripted(chunks=[json.dumps(ERROR).encode()]),
        error=ModelHttpError,
        says="overloaded",
    ),
    Case("finish_reason error", stream(chunk({"content": "Hel"}), chunk({}, "error")), error=ModelHttpError),
    Case("a status", document(json.dumps(ERROR), status=400), error=ModelHttpError, says="overloaded"),
    Case(
        "a status with a page",
        document("<html>Bad</html>", status=400, content_type="text/html"),
        error=ModelHttpError,
        says="400",
    ),
    Case("a status with nothing", document("", status=404), error=ModelHttpError, says="404"),
    Case(
        "a status for a stream",
        Scripted(chunks=[json.dumps(ERROR).encode()], status=400),
        error=ModelHttpError,
        says="overloaded",
    ),
    Case(
        "a web page",
        document("<!doctype html><html>Login</html>", content_type="text/html"),
        error=ModelProtocolError,
        says="Login",
    ),
    Case(
        "a web page for a stream",
        Scripted(chunks=[b"<html>", b"Login</html>"], content_type="text/html"),
        error=ModelProtocolError,
        says="Login",
    ),
    Case("an empty body", document(""), error=ModelProtocolError),
    Case("an empty stream", Scripted(chunks=[], content_type="text/event-stream"), error=ModelProtocolError),
    Case("only [DONE]", stream(), error=ModelProtocolError),
    Case("no choices", document('{"id": "x", "choices": []}'), error=ModelProtocolError),
    Case("choices null", document('{"id": "x", "choices": null}'), error=ModelProtocolError),
    Case("another document", document('{"hello": "world"}'), error=ModelProtocolError),
    Case("message null", document('{"choices": [{"index": 0, "message": null}]}'), error=ModelProtocolError),
    Case("a choice null", document('{"choices": [null]}'), error=ModelProtocolError),
    Case(
        "no JSON", document("upstream timed out", content_type="text/plain"), error=ModelProtocolError, says="upstream"
    ),
    Case("broken JSON", document('{"choices": [{"mess'), error=ModelProtocolError),
    Case("a broken event", stream(chunk({"content": "Hel"}), '{"choices": [{'), error=ModelProtocolError),
    Case(
        "no choices in a whole stream",
        stream({"choices": []}, {"usage": {"prompt_tokens": 1}}),
        error=ModelProtocolError,
    ),
    Case(
        "a refusal",
        completion({"content": None, "refusal": "I will not."}),
        error=ModelRefusedError,
        says="I will not.",
    ),
    Case(
        "a refusal in a stream",
        stream(chunk({"refusal": "I will"}), chunk({"refusal": " not."}), chunk({}, "stop")),
        error=ModelRefusedError,
        says="I will not.",
    ),
    Case("content_filter and nothing else", completion({"content": None}, "content_filter"), error=ModelRefusedError),
    Case(
        "a body that breaks off",
        Scripted(b"", status=200, headers={"content-length": "100"}, cut=True, chunks=None),
        error=ModelConnectionError,
    ),
]

SHAPES = [
    Case("a plain text", completion({"content": "Hello"}), text="Hello"),
    Case("no text at all", completion({"content": None}), text=""),
    Case("an empty stream of a reply", stream(chunk({"role": "assistant", "content": ""}), chunk({}, "stop")), text=""),
    Case(
        "content in parts",
        completion({"content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}),
        text="Hello",
    ),
    Case(
        "content in parts, in a stream",
        stream(
            chunk({"content": [{"type": "text", "text": "Hel"}]}),
            chunk({"content": [{"type": "text", "text": "lo"}]}),
            chunk({}, "stop"),
        ),
        text="Hello",
    ),
    Case("tool_calls empty", completion({"content": "Hello", "tool_calls": []}), text="Hello"),
    Case("tool_calls null", completion({"content": "Hello", "tool_calls": None, "function_call": None}), text="Hello"),
    Case("refusal null", completion({"content": "Hello", "refusal": None}), text="Hello"),
    Case(
        "delta null",
        stream(chunk({"content": "Hello"}), {"choices": [{"index": 0, "delta": None, "finish_reason": "stop"}]}),
        text="Hello",
    ),
    Case(
        "choices null between",
        stream(chunk({"content": "Hel"}), {"choices": None}, chunk({"content": "lo"}), chunk({}, "stop")),
        text="Hello",
    ),
    Case(
        "role on each chunk",
        stream(
            chunk({"role": "assistant", "content": "Hel"}),
            chunk({"role": "assistant", "content": "lo"}),
            chunk({}, "stop"),
        ),
        text="Hello",
    ),
    Case("usage null", stream(chunk({"content": "Hello"}, usage=None), chunk({}, "stop", usage=None)), text="Hello"),
    Case("a document for a stream", Scripted(chunks=[completion({"content": "Hello"}).body]), text="Hello"),
    Case("a document with a call for a stream", Scripted(chunks=[whole(call("add", ADD, id="c")).body]), [ADDED]),
    Case(
        "an indented document for a stream",
        Scripted(chunks=[json.dumps(json.loads(completion({"content": "Hello"}).body), indent=2).encode()]),
        text="Hello",
    ),
    Case("a whole completion as an event", stream(json.loads(completion({"content": "Hello"}).body)), text="Hello"),
    Case(
        "a stream for a document",
        Scripted(b"".join(sse(chunk({"content": "Hello"}), chunk({}, "stop"))), content_type="text/event-stream"),
        text="Hello",
    ),
    Case(
        "lines of JSON",
        Scripted(
            chunks=[
                json.dumps(chunk({"content": "Hello"})).encode() + b"\n",
                json.dumps(chunk({}, "stop")).encode() + b"\n",
            ]
        ),
        text="Hello",
    ),
    Case(
        "a message after the deltas",
        stream(
            chunk({"content": "Hello"}),
            {"choices": [{"index": 0, "delta": {}, "message": {"content": "Hello"}, "finish_reason": "stop"}]},
        ),
        text="Hello",
    ),
]


SHAPES += [
    Case(
        "a message with everything as the last event, without delta",
        stream(
            chunk({"content": "Hello"}),
            {"choices": [{"index": 0, "message": {"content": "Hello"}, "finish_reason": "stop"}]},
        ),
        text="Hello",
    ),
    Case(
        "NaN among the log probabilities",
        document('{"choices": [{"message": {"content": "Hello"}, "logprobs": NaN}]}'),
        text="Hello",
    ),
    Case("a raw line end in a text", document('{"choices": [{"message": {"content": "Hel\nlo"}}]}'), text="Hel\nlo"),
    Case("invalid UTF-8", Scripted(b'{"choices": [{"message": {"content": "Hel\xfflo"}}]}'), text="Hel\ufffdlo"),
    Case(
        "compressed",
        Scripted(gzip.compress(completion({"content": "Hello"}).body), headers={"content-encoding": "gzip"}),
        text="Hello",
    ),
    Case(
        "compressed, for a stream",
        Scripted(
            chunks=[gzip.compress(b"".join(sse(chunk({"content": "Hello"}), chunk({}, "stop"))))],
            content_type="text/event-stream",
            headers={"content-encoding": "gzip"},
        ),
        text="Hello",
    ),
    Case("compressed badly", Scripted(b"no gzip", headers={"content-encoding": "gzip"}), error=ModelProtocolError),
    Case(
        "garbage after the finish_reason",
        stream(chunk({"content": "Hello"}), chunk({}, "stop"), "END", done=False),
        text="Hello",
    ),
    Case("an empty list of parts", completion({"content": []}), text=""),
    Case("three hundred calls", whole(*[call("now", "{}", id=f"c{i}") for i in range(300)]), [NOW] * 300),
]


def framed(*chunks: bytes, what: str) -> Case:
    return Case(what, Scripted(chunks=list(chunks), content_type="text/event-stream"), text="Hé😀lo")


LINES = [json.dumps(chunk({"content": text}), ensure_ascii=False).encode() for text in ("Hé", "😀", "lo")]
LINES.append(json.dumps(chunk({}, "stop")).encode())
BODY = b"".join(b"data: " + line + b"\n\n" for line in LINES) + b"data: [DONE]\n\n"
FRAMES = [
    framed(BODY, what="all at once"),
    framed(*(BODY[i : i + 1] for i in range(len(BODY))), what="byte by byte"),
    framed(*(BODY[i : i + 7] for i in range(0, len(BODY), 7)), what="in pieces that cut characters"),
    framed(BODY.replace(b"\n", b"\r\n"), what="CRLF"),
    framed(*(BODY.replace(b"\n", b"\r\n")[i : i + 5] for i in range(0, 2 * len(BODY), 5)), what="CRLF in pieces"),
    framed(BODY.replace(b"\n", b"\r"), what="CR"),
    framed(BODY.replace(b"data: ", b"data:"), what="no space after the colon"),
    framed(BODY.replace(b"\n\n", b"\n"), what="no blank lines"),
    framed(BODY.rstrip(b"\n"), what="no line end at the end"),
    framed(b"\xef\xbb\xbf" + BODY, what="a byte order mark"),
    framed(b"\n\n" + BODY, what="blank lines first"),
    framed(b": ping\n\nretry: 100\nid: 1\nevent: message\n" + BODY, what="comments and other fields"),
    framed(b"data:\n\n" + BODY.replace(b"\n\n", b"\n\ndata: \n\n"), what="empty data"),
    framed(b"event: ping\ndata: now\n\n" + BODY, what="a ping that is not JSON"),
    framed(b'data: {"type": "ping"}\n\n' + BODY, what="a ping that is JSON"),
    framed(b'data: 7\n\ndata: null\n\ndata: "x"\n\n' + BODY, what="JSON that is not an object"),
    framed(
        b"".join(
            b"".join(
                b"data: " + part + b"\n"
                for part in json.dumps(json.loads(line), indent=1, ensure_ascii=False).encode().split(b"\n")
            )
            + b"\n"
            for line in LINES
        ),
        what="an event over several data lines",
    ),
    framed(BODY.replace(b"\n\n", b""), what="all events in one line"),
    framed(b"".join(b"event: chunk\ndata: " + line + b"\n" for line in LINES), what="named events without blank lines"),
    framed(BODY + b"event: done\ndata: bye\n\n", what="an event named done"),
    framed(BODY.replace(b"[DONE]", b'"[DONE]"'), what="[DONE] in quotes"),
    framed(BODY.replace(b"[DONE]", b" [DONE] "), what="[DONE] padded"),
    framed(
        b"".join(
            b"data: " + json.dumps(chunk({"content": each})).encode() + b"\n\n"
            for each in ("H\u00e9", "\ud83d", "\ude00", "lo")
        )
        + b"data: "
        + LINES[-1]
        + b"\n\n",
        what="the halves of a character in two events",
    ),
]

GROUPS = {
    "which call": WHICH_CALL,
    "name": NAMES,
    "arguments": ARGUMENTS,
    "id": IDS,
    "end": COMPLETE,
    "error": ERRORS,
    "shape": SHAPES,
    "frame": FRAMES,
}
ALL = [replace(case, what=f"{group}: {case.what}") for group, cases in GROUPS.items() for case in cases]
