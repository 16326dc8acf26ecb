"""Fragments of calls without a clear index or id, as some servers and gateways send them."""

import json

from tests.models.scripted_server import call, chunk, stream
from tests.models.seen import ADDED_TEN, TEN, seen
from tests.models.server_replies import ADD, ADDED, NOW, assistant, at, deltas, document, whole

CALLS = [
    seen(
        "Ollama",
        "index 0 for all, arguments whole",
        deltas(at(0, "add", ADD, id="c"), at(0, "add", TEN, id="d")),
        ADDED,
        ADDED_TEN,
    ),
    seen(
        "Ollama",
        "index 0 for all, in one delta, one tool twice",
        deltas([at(0, "add", ADD, id="c"), at(0, "add", TEN, id="d")]),
        ADDED,
        ADDED_TEN,
    ),
    seen(
        "smolagents#1958",
        "index 0 for all, one tool twice, no ids",
        deltas(at(0, "add", ADD), at(0, "add", TEN)),
        ADDED,
        ADDED_TEN,
    ),
    seen(
        "Gemini",
        "index 0 for all, one tool twice, ids empty",
        deltas(at(0, "add", ADD, id=""), at(0, "add", TEN, id="")),
        ADDED,
        ADDED_TEN,
    ),
    seen(
        "hass_local_openai_llm#92",
        "index and id are the same for all",
        deltas(at(0, "now", "{}", id="c"), at(0, "add", ADD, id="c")),
        NOW,
        ADDED,
    ),
    seen(
        "hass_local_openai_llm#92",
        "index and id are the same for all, one tool",
        deltas(at(0, "add", ADD, id="c"), at(0, "add", TEN, id="c")),
        ADDED,
        ADDED_TEN,
    ),
    seen(
        "Gemini",
        "index 0 for all, no ids, a call without arguments first",
        deltas(at(0, "now", ""), at(0, "add", ADD)),
        NOW,
        ADDED,
    ),
    seen(
        "Gemini",
        "index 0 for all, no ids, {} first",
        deltas(at(0, "now", "{}"), at(0, "add", ADD), at(0, "now", "{}")),
        NOW,
        ADDED,
        NOW,
    ),
    seen(
        "plexus#691",
        "index 0 for all, openers before fragments",
        deltas(
            at(0, "add", "", id="c"),
            at(0, None, '{"a": 2,'),
            at(0, None, '"b": 3}'),
            at(0, "add", "", id="d"),
            at(0, None, TEN[:6]),
            at(0, None, TEN[6:]),
        ),
        ADDED,
        ADDED_TEN,
    ),
    seen(
        "dynamo#4723",
        "index 0 for all, a text between",
        stream(
            chunk({"tool_calls": [at(0, "add", ADD, id="c")]}),
            chunk({"content": "\n"}),
            chunk({"tool_calls": [at(0, "now", "{}", id="d")]}),
            chunk({}, "tool_calls"),
        ),
        ADDED,
        NOW,
    ),
    seen(
        "unsloth#8755",
        "an index that begins again; bare fragments follow",
        deltas(
            at(0, "add", "", id="c"),
            at(0, None, ADD),
            at(0, "echo", "", id="d"),
            at(0, None, '{"text"'),
            at(0, None, ': "x"}'),
        ),
        ADDED,
        ("echo", {"text": "x"}),
    ),
    seen(
        "Qwen-Agent#943",
        "interleaved, ids on the first fragment only",
        deltas(
            [at(0, "add", "", id="c"), at(1, "echo", "", id="d")],
            [at(0, None, '{"a": 2,'), at(1, None, '{"text":')],
            [at(0, None, '"b": 3}'), at(1, None, '"x"}')],
        ),
        ADDED,
        ("echo", {"text": "x"}),
    ),
    seen(
        "Bamboo-agent#236",
        "both openers first, then fragments of the first",
        deltas([at(0, "add", id="c"), at(1, "now", id="d")], at(0, None, ADD)),
        ADDED,
        NOW,
    ),
    seen(
        "ollama#7881",
        "no index, fragments of two calls, by id",
        deltas(
            call("add", "", id="c"),
            call(None, ADD, id="c"),
            call("echo", "", id="d"),
            call(None, '{"text": "x"}', id="d"),
        ),
        ADDED,
        ("echo", {"text": "x"}),
    ),
    seen(
        "opik#8361",
        "no index, two open calls, fragments by id",
        deltas(
            [call("add", '{"a": 2,', id="c"), call("echo", '{"text":', id="d")],
            call(None, '"b": 3}', id="c"),
            call(None, '"x"}', id="d"),
        ),
        ADDED,
        ("echo", {"text": "x"}),
    ),
    seen(
        "agentscope-java#1216",
        "no index, the last fragment has a name and no id",
        deltas(call("add", '{"a": 2, "b": 3', id="c"), call("add", "}")),
        ADDED,
    ),
    seen(
        "agentscope-java#1216",
        "an index, the last fragment has a name and no id",
        deltas(at(0, "add", '{"a": 2, "b": 3', id="c"), at(0, "add", "}")),
        ADDED,
    ),
    seen(
        "TGI",
        "one object for tool_calls, ids empty, in fragments",
        stream(
            *(
                chunk({"tool_calls": at(0, name, piece, id="")})
                for name, piece in (("add", ""), ("", '{"a": 2,'), ("", '"b": 3}'))
            ),
            chunk({}, "eos_token"),
        ),
        ADDED,
    ),
    seen(
        "TGI",
        "whole, id 0 and a description",
        whole(
            {
                "id": 0,
                "type": "function",
                "function": {"description": None, "name": "add", "arguments": {"a": 2, "b": 3}},
            }
        ),
        ADDED,
    ),
    seen(
        "qwen-code#6794",
        "phantom entries between and after",
        deltas(
            at(0, "add", ADD, id="c"),
            {"index": 1},
            {"index": 2, "function": {}},
            {"index": 3, "id": None, "function": {"name": "", "arguments": ""}},
        ),
        ADDED,
    ),
    seen(
        "aichat#1522",
        "fragments without id whose index is text",
        deltas(at("0", "add", "", id="c"), at("0", None, ADD)),
        ADDED,
    ),
    seen("Together", "index negative", deltas(at(-1, "add", '{"a": 2,', id="c"), at(-1, None, '"b": 3}')), ADDED),
    seen(
        "LiteLLM",
        "the index counts fragments, arguments in pieces",
        deltas(at(0, "add", "", id="c"), at(1, None, '{"a": 2,'), at(2, None, '"b": 3}')),
        ADDED,
    ),
    seen(
        "LiteLLM",
        "the index counts fragments, from the first piece on",
        deltas(at(0, "add", '{"a": 2,', id="c"), at(1, None, '"b": 3}')),
        ADDED,
    ),
    seen(
        "vLLM",
        "whole call in one chunk, then an empty one",
        deltas(at(0, "add", ADD, id="c"), at(0, None, ""), at(0, "", "", id="")),
        ADDED,
    ),
    seen(
        "vLLM",
        "type and function null on later fragments",
        deltas(at(0, "add", "", id="c", type="function"), {"index": 0, "type": None, "function": {"arguments": ADD}}),
        ADDED,
    ),
    seen(
        "DashScope",
        "id and name empty on later fragments, type kept",
        deltas(
            at(0, "add", '{"a"', id="c", type="function"),
            {"index": 0, "id": "", "type": "function", "function": {"name": "", "arguments": ': 2, "b": 3}'}},
        ),
        ADDED,
    ),
    seen(
        "SGLang",
        "nulls beside each fragment",
        stream(
            chunk({"role": "assistant", "content": None, "reasoning_content": None, "tool_calls": None}),
            chunk(
                {
                    "role": None,
                    "content": None,
                    "tool_calls": [
                        {"id": None, "index": 0, "type": "function", "function": {"name": "add", "arguments": ADD}}
                    ],
                }
            ),
            chunk({"role": None, "content": None, "tool_calls": []}, "tool_calls"),
        ),
        ADDED,
    ),
    seen(
        "Groq",
        "all in one chunk with its finish_reason",
        stream(
            chunk(
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [at(0, "add", ADD, id="c"), at(1, "now", "{}", id="d")],
                },
                "tool_calls",
            )
        ),
        ADDED,
        NOW,
    ),
    seen(
        "Gemini",
        "type missing, no id, no index",
        stream(chunk({"tool_calls": [{"function": {"name": "add", "arguments": ADD}}]}, "stop")),
        ADDED,
    ),
    seen(
        "copilot, zeroclaw#2136",
        "text and calls in two choices without index",
        document(
            json.dumps(
                {
                    "choices": [
                        {"message": {"content": "Let me see."}, "finish_reason": "tool_calls"},
                        {"message": {"tool_calls": [call("add", ADD, id="c")]}, "finish_reason": "tool_calls"},
                    ]
                }
            )
        ),
        ADDED,
        history=lambda sent: assistant(sent)["content"] == "Let me see.",
    ),
    seen(
        "any, n=2",
        "a second choice with other calls",
        document(
            json.dumps(
                {
                    "choices": [
                        {"index": 0, "message": {"tool_calls": [call("now", "{}", id="c")]}},
                        {"index": 1, "message": {"tool_calls": [call("add", ADD, id="d")]}},
                    ]
                }
            )
        ),
        NOW,
    ),
    seen(
        "LiteLLM",
        "choice index as text, then as number",
        stream(
            *(
                {"choices": [{"index": index, "delta": {"content": text}, "finish_reason": end}]}
                for index, text, end in (("0", "Hel", None), (0, "lo", "stop"))
            )
        ),
        text="Hello",
    ),
]
