"""Replies in unusual formats, as some servers and gateways send them."""

import json

from tests.models.scripted_server import Scripted, chunk, completion, sse, stream
from tests.models.seen import HEL, LO, SAID, STOP, choice, events, json_text, raw, seen
from tests.models.server_replies import ADD, ADDED, assistant, document

SHAPES = [
    seen(
        "Azure",
        "a first chunk without choices",
        stream({"choices": [], "prompt_filter_results": [{"prompt_index": 0}]}, HEL, LO, STOP),
        text="Hello",
    ),
    seen(
        "Azure",
        "content_filter_results beside",
        stream(
            {
                "choices": [
                    {
                        "index": 0,
                        "delta": {"content": "Hello"},
                        "content_filter_results": {},
                        "content_filter_offsets": {},
                    }
                ]
            },
            STOP,
        ),
        text="Hello",
    ),
    seen(
        "OpenRouter",
        "comments between",
        raw(": OPENROUTER PROCESSING\n\n", events(HEL), ": OPENROUTER PROCESSING\n\n", events(LO, STOP)),
        text="Hello",
    ),
    seen(
        "OpenRouter", "a comment as data", raw("data: : OPENROUTER PROCESSING\n\n", events(HEL, LO, STOP)), text="Hello"
    ),
    seen(
        "any",
        "pings as data",
        raw("data: ping\n\n", events(HEL), "data: keep-alive\n\n", events(LO, STOP)),
        text="Hello",
    ),
    seen("llama.cpp", "a colon alone", raw(":\n\n", events(HEL), ":\n\n", events(LO, STOP)), text="Hello"),
    seen(
        "DeepSeek", "blank lines before a document", document("\n\n\n" + completion(SAID).body.decode()), text="Hello"
    ),
    seen(
        "OpenRouter",
        "comments before a document",
        document(": OPENROUTER PROCESSING\n\n" + completion(SAID).body.decode()),
        text="Hello",
    ),
    seen(
        "any", "a byte order mark before a document", document("\ufeff" + completion(SAID).body.decode()), text="Hello"
    ),
    seen(
        "any",
        "a page's type for a document",
        document(completion(SAID).body.decode(), content_type="text/html"),
        text="Hello",
    ),
    seen(
        "any",
        "no event stream's type",
        Scripted(chunks=sse(HEL, LO, STOP), content_type="application/json"),
        text="Hello",
    ),
    seen(
        "any", "an indented stream", raw(*(f"  data: {json.dumps(each)}\n\n" for each in (HEL, LO, STOP))), text="Hello"
    ),
    seen(
        "any",
        "id:, retry: and event: on each",
        raw(
            *(
                f"id: {n}\nretry: 5\nevent: message\ndata: {json.dumps(each)}\n\n"
                for n, each in enumerate((HEL, LO, STOP))
            )
        ),
        text="Hello",
    ),
    seen(
        "any",
        "fields after the data",
        raw(*(f"data: {json.dumps(each)}\nid: 1\n\n" for each in (HEL, LO, STOP))),
        text="Hello",
    ),
    seen("any", "a stream as a list", Scripted(chunks=[json.dumps([HEL, LO, STOP]).encode()]), text="Hello"),
    seen(
        "Mistral",
        "thoughts among the parts",
        completion(
            {
                "content": [
                    {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]},
                    {"type": "text", "text": "Hello"},
                ]
            }
        ),
        text="Hello",
    ),
    seen(
        "Anthropic gateways",
        "a thought as a text",
        completion(
            {"content": [{"type": "thinking", "thinking": "Hm.", "signature": "x"}, {"type": "text", "text": "Hello"}]}
        ),
        text="Hello",
    ),
    seen(
        "Databricks",
        "reasoning with a summary",
        completion(
            {
                "content": [
                    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
                    {"type": "text", "text": "Hello"},
                ]
            }
        ),
        text="Hello",
    ),
    seen(
        "any",
        "reasoning with a text",
        completion({"content": [{"type": "reasoning", "text": "Hm."}, {"type": "text", "text": "Hello"}]}),
        text="Hello",
    ),
    seen("any", "parts that are texts", completion({"content": ["Hel", "lo"]}), text="Hello"),
    seen("any", "one part, not in a list", completion({"content": {"type": "text", "text": "Hello"}}), text="Hello"),
    seen(
        "any",
        "parts that are null",
        completion({"content": [None, {"type": "text", "text": "Hello"}, {"type": "text", "text": None}]}),
        text="Hello",
    ),
    seen("any", "an object for the content", completion({"content": {"value": 3}}), text='{"value":3}'),
    seen("any", "a number for the content", completion({"content": 42}), text="42"),
    seen(
        "LiteLLM",
        "nulls all over",
        stream(
            {
                "id": None,
                "created": None,
                "model": None,
                "object": None,
                "choices": [
                    {
                        "index": None,
                        "delta": {
                            "role": None,
                            "content": "Hello",
                            "tool_calls": None,
                            "function_call": None,
                            "refusal": None,
                            "audio": None,
                        },
                        "finish_reason": None,
                        "logprobs": None,
                    }
                ],
                "usage": None,
            },
            STOP,
        ),
        text="Hello",
    ),
    seen(
        "any",
        "ids, model and times of wrong types",
        completion(SAID, id=7, model=["m"], created="now", system_fingerprint=1),
        text="Hello",
    ),
    seen(
        "Perplexity",
        "a delta and all so far as a message",
        stream(
            *(
                choice(delta={"content": piece}, message={"role": "assistant", "content": so_far}, finish_reason=end)
                for piece, so_far, end in (("Hel", "Hel", None), ("lo", "Hello", "stop"))
            )
        ),
        text="Hello",
    ),
    seen(
        "OpenRouter",
        "reasoning twice, under both names",
        completion({"content": "Hello", "reasoning": "Hm.", "reasoning_content": "Hm."}),
        text="Hello",
    ),
    seen(
        "Groq",
        "usage under x_groq",
        stream(HEL, LO, chunk({}, "stop", x_groq={"id": "r", "usage": {"prompt_tokens": 3, "completion_tokens": 4}})),
        text="Hello",
    ),
    seen(
        "Moonshot",
        "usage in the choice",
        stream(HEL, LO, choice(delta={}, finish_reason="stop", usage={"prompt_tokens": 3, "completion_tokens": 4})),
        text="Hello",
    ),
    *(
        seen("any", f"usage {usage!r}", completion(SAID, usage=usage), text="Hello")
        for usage in (
            None,
            {},
            [],
            "none",
            3,
            {"prompt_tokens": "11"},
            {"prompt_tokens": None, "completion_tokens": -1},
            {"prompt_tokens": 1.5, "prompt_tokens_details": None},
        )
    ),
    seen(
        "any",
        "usage that is NaN",
        document(
            '{"choices": [{"message": {"content": "Hello"}}], '
            '"usage": {"prompt_tokens": NaN, "completion_tokens": 1e400}}'
        ),
        text="Hello",
    ),
    seen(
        "xAI",
        "usage in each chunk",
        stream(
            *({**each, "usage": {"prompt_tokens": 3, "completion_tokens": n}} for n, each in enumerate((HEL, LO, STOP)))
        ),
        text="Hello",
    ),
    seen(
        "DeepSeek",
        "role and content null in the delta of the end",
        stream(HEL, LO, chunk({"role": None, "content": None, "reasoning_content": None}, "stop")),
        text="Hello",
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
        "legacy",
        "function_call with an object",
        completion({"content": None, "function_call": {"name": "add", "arguments": {"a": 2, "b": 3}}}, "function_call"),
        ADDED,
    ),
    seen(
        "legacy",
        "function_call in fragments, its name on each",
        stream(
            *(chunk({"function_call": {"name": "add", "arguments": piece}}) for piece in ("", ADD[:6], ADD[6:])),
            chunk({}, "function_call"),
        ),
        ADDED,
    ),
    seen(
        "any",
        "a hundred thousand events",
        raw(events(HEL) + events(chunk({"content": ""})) * 20_000 + events(LO, STOP)),
        text="Hello",
    ),
    seen(
        "Perplexity",
        "a message and an empty delta",
        json_text(
            object="chat.completion",
            choices=[
                {"index": 0, "finish_reason": "stop", "message": SAID, "delta": {"role": "assistant", "content": ""}}
            ],
        ),
        text="Hello",
    ),
    seen(
        "Perplexity",
        "deltas, and the text so far beside each",
        stream(
            choice(delta={"content": "Hel"}, message={"content": "Hel"}) | {"object": "chat.completion"},
            choice(delta={"content": "lo"}, message=SAID, finish_reason="stop") | {"object": "chat.completion"},
        ),
        text="Hello",
    ),
    seen(
        "Perplexity",
        "one event with a message and an empty delta",
        stream(choice(delta={"role": "assistant", "content": ""}, message=SAID, finish_reason="stop")),
        text="Hello",
    ),
    seen(
        "legacy",
        "the text of the completions wire",
        json_text(choices=[{"text": "Hello", "finish_reason": "stop"}]),
        text="Hello",
    ),
    seen(
        "legacy",
        "the text of the completions wire, streamed",
        stream(
            {"choices": [{"index": 0, "text": "Hel", "finish_reason": None}]},
            {"choices": [{"index": 0, "text": "lo", "finish_reason": "stop"}]},
        ),
        text="Hello",
    ),
    seen(
        "OpenAI",
        "a text beside audio",
        completion({"content": "Hello", "audio": {"id": "a", "data": "UklGRg==", "transcript": "Hello"}}),
        text="Hello",
    ),
]
