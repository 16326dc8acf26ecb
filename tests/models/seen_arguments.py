"""Arguments of calls, as some servers, gateways and models write them."""

import json

from tests.models.scripted_server import call, chunk
from tests.models.seen import events, raw, seen
from tests.models.server_replies import ADD, ADDED, NOW, at, deltas, document, whole

ARGUMENTS = [
    seen(
        "Baidu, hermes-agent#35592",
        "all so far on each fragment",
        deltas(at(0, "add", "", id="c"), *(at(0, None, ADD[:end]) for end in (4, 8, len(ADD), len(ADD)))),
        ADDED,
    ),
    seen(
        "Baidu, hermes-agent#35592",
        "all so far, name and id on each",
        deltas(*(at(0, "add", ADD[:end], id="c") for end in (1, 9, len(ADD)))),
        ADDED,
    ),
    seen("opencode#12425", "the whole three times", deltas(*[at(0, "add", ADD, id="c")] * 3), ADDED),
    seen(
        "opencodex#361",
        "in pieces, then the whole again",
        deltas(at(0, "add", "", id="c"), at(0, None, ADD[:7]), at(0, None, ADD[7:]), at(0, None, ADD)),
        ADDED,
    ),
    seen(
        "opencodex#361",
        "in pieces, the last left out, then the whole",
        deltas(at(0, "add", "", id="c"), at(0, None, ADD[:4]), at(0, None, ADD[4:7]), at(0, None, ADD)),
        ADDED,
    ),
    seen(
        "GLM", "the whole again in other spaces", deltas(at(0, "add", ADD, id="c"), at(0, None, '{"a":2,"b":3}')), ADDED
    ),
    seen(
        "Anthropic gateways",
        "a leading {} on the opener",
        deltas(at(0, "add", "{}", id="c"), at(0, None, ADD[:5]), at(0, None, ADD[5:])),
        ADDED,
    ),
    seen(
        "Anthropic gateways",
        "an object for the opener, text for the rest",
        deltas({"index": 0, "id": "c", "function": {"name": "add", "arguments": {}}}, at(0, None, ADD)),
        ADDED,
    ),
    seen(
        "llama.cpp",
        "fragments that cut escapes",
        deltas(at(0, "echo", '{"text": "a\\', id="c"), at(0, None, "n\\u00"), at(0, None, 'e9"}')),
        ("echo", {"text": "a\né"}),
    ),
    seen("Mistral", "text that holds a JSON text", whole(call("add", json.dumps(ADD), id="c")), ADDED),
    seen(
        "Mistral",
        "text that holds a JSON text, in fragments",
        deltas(at(0, "add", json.dumps(ADD)[:9], id="c"), at(0, None, json.dumps(ADD)[9:])),
        ADDED,
    ),
    seen(
        "any",
        "text that holds a JSON text that holds one",
        whole(call("add", json.dumps(json.dumps(ADD)), id="c")),
        result="add",
    ),
    seen("any", "blanks around", whole(call("add", f"\n {ADD}\t", id="c")), ADDED),
    seen("any", "a byte order mark before", whole(call("add", "\ufeff" + ADD, id="c")), result="add"),
    seen("any", "Infinity", whole(call("echo", '{"text": Infinity}', id="c")), result="echo"),
    seen(
        "any",
        "NaN in an object instead of a text",
        document(
            '{"choices": [{"message": {"tool_calls": [{"id": "c", '
            '"function": {"name": "echo", "arguments": {"text": NaN}}}]}}]}'
        ),
        result="echo",
    ),
    seen(
        "any", "a list for an object", whole({"id": "c", "function": {"name": "add", "arguments": [ADD]}}), result="add"
    ),
    seen(
        "any", "false for an object", whole({"id": "c", "function": {"name": "add", "arguments": False}}), result="add"
    ),
    seen(
        "any",
        "true in a stream",
        deltas({"index": 0, "id": "c", "function": {"name": "add", "arguments": True}}),
        result="add",
    ),
    seen("any", "unknown keys", whole(call("now", '{"zone": "UTC"}', id="c")), NOW),
    seen("any", "a key twice", whole(call("add", '{"a": 1, "a": 2, "b": 3}', id="c")), result="add"),
    seen("any", "numbers as text", whole(call("add", '{"a": "2", "b": 3.0}', id="c")), ADDED),
    seen(
        "any", "a line end inside a text", whole(call("echo", '{"text": "a\nb"}', id="c")), ("echo", {"text": "a\nb"})
    ),
    seen("any", "a fence around", whole(call("add", f"```json\n{ADD}\n```", id="c")), result="add"),
    seen("any", "Python's words", whole(call("add", "{'a': 2, 'b': None}", id="c")), result="add"),
    seen("API", "trailing commas", whole(call("add", '{"a": 2, "b": 3,}', id="c")), ADDED),
    seen(
        "any",
        "a lone surrogate in a stream",
        raw(events(chunk({"tool_calls": [at(0, "echo", '{"text": "x\ud83d"}', id="c")]}), chunk({}, "tool_calls"))),
        ("echo", {"text": "x\ufffd"}),
    ),
    seen(
        "any",
        "large",
        whole(call("echo", json.dumps({"text": "é" * 500_000}), id="c")),
        ("echo", {"text": "é" * 500_000}),
    ),
    seen(
        "any", "a number beyond all floats", whole(call("echo", '{"text": 1e999}', id="c")), ("echo", {"text": "1e999"})
    ),
]
