"""Names of calls, as some servers and gateways send them."""

from tests.models.scripted_server import call, chunk, stream
from tests.models.seen import HEL, seen
from tests.models.server_replies import ADD, ADDED, NOW, assistant, at, deltas, whole
from toolbox import ModelProtocolError, ModelTruncatedError

NAMES = [
    seen(
        "litellm#12513",
        "the word null for a name on later fragments",
        deltas(at(0, "add", '{"a": 2,', id="c", type="FUNCTION"), at(0, "null", '"b": 3}', id="")),
        ADDED,
    ),
    seen(
        "NVIDIA NIM, hermes-agent#8259",
        "the whole name on each of many fragments",
        deltas(*(at(0, "add", piece, id="c") for piece in ("", '{"a"', ": 2,", ' "b"', ": 3}", ""))),
        ADDED,
    ),
    seen("continue#5849", "a name in two pieces", deltas(at(0, "a", id="c"), at(0, "dd"), at(0, None, ADD)), ADDED),
    seen(
        "continue#5849",
        "a name in three pieces, the id on each",
        deltas(at(0, "a", "", id="c"), at(0, "d", "", id="c"), at(0, "d", "", id="c"), at(0, None, ADD, id="c")),
        ADDED,
    ),
    seen(
        "vercel/ai#16507",
        "the name empty first",
        deltas(at(0, "", "", id="c"), at(0, "add", ""), at(0, None, ADD)),
        ADDED,
    ),
    seen(
        "vercel/ai#16507",
        "arguments before the name",
        deltas(at(0, "", '{"a": 2,', id="c"), at(0, "add", ' "b": 3}')),
        ADDED,
    ),
    seen(
        "gpt-oss",
        "under functions., padded",
        whole(call(" functions.add ", ADD, id="c")),
        ADDED,
        history=lambda sent: assistant(sent)["tool_calls"][0]["function"]["name"] == "add",
    ),
    seen(
        "gpt-oss",
        "under functions., in pieces",
        deltas(at(0, "functions.", id="c"), at(0, "add"), at(0, None, ADD)),
        ADDED,
    ),
    seen(
        "Kimi",
        "an id of the form functions.add:0",
        deltas(at(0, "add", ADD, id="functions.add:0"), at(1, "now", "{}", id="functions.now:1")),
        ADDED,
        NOW,
        history=lambda sent: (
            [each["id"] for each in assistant(sent)["tool_calls"]] == ["functions.add:0", "functions.now:1"]
        ),
    ),
    seen(
        "gpt-oss",
        "special tokens in the name: no known tool",
        whole(call("add<|channel|>commentary", ADD, id="c")),
        result="add",
    ),
    seen("vLLM", "a line end after the name", whole(call("add\n", ADD, id="c")), ADDED),
    seen("any", "a name that was not offered", whole(call("subtract", ADD, id="c")), result="add"),
    seen("any", "a name too long to be sent back", whole(call("x" * 200, ADD, id="c")), result="add"),
    seen("any", "a name that is a number", whole(call(17, ADD, id="c")), result="add"),
    seen(
        "any",
        "function is the name",
        whole({"id": "c", "type": "function", "function": "add", "arguments": ADD}),
        ADDED,
    ),
    seen(
        "opencodex#1514",
        "arguments and never a name",
        deltas(at(0, None, ADD, id="c")),
        error=ModelProtocolError,
        says="without a name",
    ),
    seen(
        "opencodex#1514",
        "arguments and never a name, beside a text",
        stream(HEL, chunk({"tool_calls": [at(0, None, ADD, id="c")]}), chunk({}, "tool_calls")),
        error=ModelProtocolError,
        says="without a name",
    ),
    seen(
        "any", "whole, without a name", whole(call(None, ADD, id="c")), error=ModelProtocolError, says="without a name"
    ),
    seen(
        "any",
        "whole, one without a name or anything",
        whole({"id": "d", "type": "function", "function": {"name": "", "arguments": ""}}, call("add", ADD, id="c")),
        ADDED,
    ),
    seen("any", "cut before the name", deltas(at(0, "", "", id="c"), finish="length"), error=ModelTruncatedError),
]
