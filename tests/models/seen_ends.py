"""Ends of replies, real and apparent, as some servers and gateways send them."""

from tests.models.scripted_server import chunk, completion, stream
from tests.models.seen import HEL, LO, SAID, STOP, events, raw, seen
from tests.models.server_replies import ADDED, ERROR, NOW, at, deltas, document
from toolbox import ModelHttpError, ModelProtocolError, ModelTruncatedError

ENDS = [
    *(
        seen("any", f"finish_reason {word!r} with a call", deltas(at(0, "now", "{}", id="c"), finish=word), NOW)
        for word in ("stop", "function_call", "tool_use", "eos", "unknown", "STOP", "end_turn", "content_filter")
    ),
    *(
        seen("any", f"finish_reason {word!r} with a text", completion(SAID, word), text="Hello")
        for word in (None, "", "null", "eos", "abort", "insufficient_system_resource", "end_turn", "unknown")
    ),
    seen(
        "opencrabs#1499",
        "an empty finish_reason on each chunk of a call",
        stream(
            *(chunk({"tool_calls": [each]}, "") for each in (at(0, "add", '{"a": 2,', id="c"), at(0, None, '"b": 3}'))),
            chunk({}, "tool_calls"),
        ),
        ADDED,
    ),
    seen(
        "ChatMock#114",
        "tool_calls, then stop",
        stream(
            chunk({"content": "Let me see."}),
            chunk({"tool_calls": [at(0, "now", "{}", id="c")]}),
            chunk({}, "tool_calls"),
            STOP,
        ),
        NOW,
    ),
    seen(
        "OpenRouter",
        "the last chunk twice, with usage",
        deltas(at(0, "now", "{}", id="c"), finish=None, done=False)
        and stream(
            chunk({"tool_calls": [at(0, "now", "{}", id="c")]}),
            chunk({}, "tool_calls"),
            chunk(
                {"role": "assistant", "content": ""}, "tool_calls", usage={"prompt_tokens": 1, "completion_tokens": 2}
            ),
        ),
        NOW,
    ),
    seen(
        "OpenRouter",
        "length, then stop",
        stream(chunk({"tool_calls": [at(0, "add", '{"a"', id="c")]}), chunk({}, "length"), STOP),
        error=ModelTruncatedError,
    ),
    seen(
        "vLLM",
        "finish_reason stop on each chunk",
        stream(chunk({"content": "Hel"}, "stop"), chunk({"content": "lo"}, "stop")),
        text="Hello",
    ),
    seen("vllm#53269", "tool_calls for a call that was cut", deltas(at(0, "add", '{"a": 2,', id="c")), result="add"),
    seen(
        "livekit/agents#4307",
        "the finish_reason in a chunk without delta",
        stream(
            chunk({"tool_calls": [at(0, "now", "{}", id="c")]}), {"choices": [{"index": 0, "finish_reason": "stop"}]}
        ),
        NOW,
    ),
    seen(
        "litellm#32686",
        "two calls, the second half, a clean end",
        deltas(at(0, "now", "{}", id="c"), at(1, "add", '{"a"', id="d"), finish=None, done=False),
        error=ModelProtocolError,
    ),
    seen(
        "CommandCode#785",
        "nothing but a role, a clean end",
        stream(chunk({"role": "assistant"}), done=False),
        error=ModelProtocolError,
    ),
    seen(
        "omnigent#1118",
        "nothing but a role, then [DONE]",
        stream(chunk({"role": "assistant", "content": ""})),
        error=ModelProtocolError,
        says="empty",
    ),
    seen(
        "OmniRoute#7000",
        "null content and no finish_reason",
        document('{"choices": [{"message": {"role": "assistant", "content": null}}]}'),
        error=ModelProtocolError,
        says="empty",
    ),
    seen(
        "Gemini, pydantic-ai#3300",
        "MALFORMED_FUNCTION_CALL and nothing else",
        stream(chunk({"role": "assistant"}, "MALFORMED_FUNCTION_CALL")),
        error=ModelProtocolError,
        says="MALFORMED_FUNCTION_CALL",
    ),
    seen(
        "Gemini",
        "MALFORMED_FUNCTION_CALL, whole",
        completion({"content": None}, "function_call_filter: MALFORMED_FUNCTION_CALL"),
        error=ModelProtocolError,
        says="MALFORMED_FUNCTION_CALL",
    ),
    seen(
        "openai-agents#4510",
        "length before anything was said",
        completion({"content": "", "reasoning_content": "Hm, "}, "length"),
        error=ModelTruncatedError,
    ),
    seen(
        "stella#1088",
        "length before anything was said, in a stream",
        stream(chunk({"reasoning": "Hm, "}), chunk({}, "length")),
        error=ModelTruncatedError,
    ),
    seen("any", "stop after thoughts alone", stream(chunk({"reasoning_content": "Hm."}), STOP), text=""),
    seen("llama.cpp", "[DONE] without a line end", raw(events(HEL, LO), events(STOP), "data: [DONE]"), text="Hello"),
    seen("any", "[DONE] without data:", raw(events(HEL, LO), "[DONE]\n\n"), text="Hello"),
    seen("any", "[done]", raw(events(HEL, LO), "data: [done]\n\n"), text="Hello"),
    seen(
        "any",
        "no end of the last line after the finish_reason",
        raw(events(HEL, LO), events(STOP).rstrip()),
        text="Hello",
    ),
    seen("any", "cut inside the last event", raw(events(HEL, LO), events(STOP)[:-20]), error=ModelProtocolError),
    seen(
        "any",
        "calls after [DONE] do not count",
        raw(events(HEL, LO, STOP), "data: [DONE]\n\n", events(chunk({"tool_calls": [at(0, "now", "{}", id="c")]}))),
        text="Hello",
    ),
    seen(
        "any",
        "usage after the finish_reason, [DONE] twice",
        raw(events(HEL, LO, STOP, {"choices": [], "usage": {"prompt_tokens": 1}}), "data: [DONE]\n\ndata: [DONE]\n\n"),
        text="Hello",
    ),
    seen("any", "an error after the finish_reason", stream(HEL, STOP, ERROR), error=ModelHttpError, says="overloaded"),
]
