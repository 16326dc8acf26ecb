"""Replies of real servers whose cases do not fit a data file: large ones, and checks of what is sent back."""

import json

from tests.models.scripted_server import call, chunk, completion
from tests.models.seen import HEL, LO, STOP, events, raw, seen
from tests.models.server_replies import ADD, ADDED, NOW, assistant, at, deltas, document, whole

IN_CODE = [
    seen(
        "any",
        "large",
        whole(call("echo", json.dumps({"text": "é" * 500_000}), id="c")),
        ("echo", {"text": "é" * 500_000}),
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
        "gpt-oss",
        "under functions., padded",
        whole(call(" functions.add ", ADD, id="c")),
        ADDED,
        history=lambda sent: assistant(sent)["tool_calls"][0]["function"]["name"] == "add",
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
        "legacy",
        "function_call beside tool_calls null",
        completion(
            {"content": None, "tool_calls": None, "function_call": {"name": "add", "arguments": ADD}}, "function_call"
        ),
        ADDED,
        history=lambda sent: "function_call" not in assistant(sent),
    ),
    seen(
        "any",
        "a hundred thousand events",
        raw(events(HEL) + events(chunk({"content": ""})) * 20_000 + events(LO, STOP)),
        text="Hello",
    ),
]
