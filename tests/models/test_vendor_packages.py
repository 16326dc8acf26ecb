"""Well-formed replies of OpenAI's two APIs, read here and by the accumulators of the package `openai`."""

import json
from typing import Any

import pytest
from openai._models import construct_type
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response

from toolbox import ChatResponse, CompleteResponse, FinishReason
from toolbox.models.accumulator import ReplyAccumulator
from toolbox.models.chat_wire import ChatInterpreter
from toolbox.models.reply_reader import Interpreter, ReplyReader
from toolbox.models.responses_wire import ResponsesInterpreter

USAGE = {
    "prompt_tokens": 20,
    "completion_tokens": 9,
    "total_tokens": 29,
    "prompt_tokens_details": {"cached_tokens": 8},
    "completion_tokens_details": {"reasoning_tokens": 4},
}
REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "tool_calls": FinishReason.TOOL_EXECUTION,
}


def call(at: int, name: str, arguments: str) -> dict[str, Any]:
    return {"index": at, "id": f"call_{at}", "type": "function", "function": {"name": name, "arguments": arguments}}


def rest(at: int, arguments: str) -> dict[str, Any]:
    return {"index": at, "function": {"arguments": arguments}}


CHATS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "text": ([{"role": "assistant", "content": ""}, {"content": "Grüße, "}, {"content": "Ada 👋"}], "stop"),
    "cut": ([{"role": "assistant", "content": "Once"}, {"content": " upon"}], "length"),
    "reasoning": ([{"reasoning_content": "Hm"}, {"reasoning_content": "."}, {"content": "Yes"}], "stop"),
    "one call": ([{"role": "assistant", "tool_calls": [call(0, "add", "")]}, {"tool_calls": [rest(0, '{"a"')]},
                  {"tool_calls": [rest(0, ": 1}")]}], "tool_calls"),
    "calls in turns": ([{"tool_calls": [call(0, "add", '{"a":'), call(1, "now", "{")]},
                        {"tool_calls": [rest(1, "}"), rest(0, " 2}")]}], "tool_calls"),
    "text and a call": ([{"content": "I look. "}, {"tool_calls": [call(0, "now", "{}")]}], "tool_calls"),
}  # fmt: skip


def chunks(deltas: list[dict[str, Any]], reason: str) -> list[dict[str, Any]]:
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "gpt-test"}
    choices = [{"index": 0, "delta": each, "finish_reason": None} for each in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": reason})
    return [*({**head, "choices": [each]} for each in choices), {**head, "choices": [], "usage": USAGE}]


def read(interpreter: Interpreter, values: list[dict[str, Any]], size: int) -> ChatResponse:
    reader = ReplyReader(interpreter)
    body = b"".join(b"data: " + json.dumps(each, ensure_ascii=False).encode() + b"\n\n" for each in values)
    found = [event for at in range(0, len(body), size) for event in reader.feed(body[at : at + size])]
    *_, last = [*found, *reader.finish()]
    assert isinstance(last, CompleteResponse)
    return last.response


def check_chat(ours: ChatResponse, theirs: ChatCompletion) -> None:
    [choice] = theirs.choices
    message, usage = choice.message, theirs.usage
    assert usage is not None
    assert (ours.ai_message.text or "") == (message.content or "")
    assert ours.ai_message.reasoning == getattr(message, "reasoning_content", None)
    assert [(each.id, each.name, json.loads(each.arguments)) for each in ours.ai_message.tool_execution_requests] == [
        (each.id, each.function.name, json.loads(each.function.arguments))
        for each in message.tool_calls or ()
        if each.type == "function"
    ]
    assert ours.finish_reason is REASONS[choice.finish_reason]
    counted = ours.token_usage
    assert counted is not None
    assert usage.prompt_tokens_details is not None
    assert usage.completion_tokens_details is not None
    assert (counted.input_tokens, counted.output_tokens) == (usage.prompt_tokens, usage.completion_tokens)
    assert counted.cached_input_tokens == usage.prompt_tokens_details.cached_tokens
    assert counted.reasoning_tokens == usage.completion_tokens_details.reasoning_tokens
    assert (ours.id, ours.model) == (theirs.id, theirs.model)


@pytest.mark.parametrize("size", [1, 64, 100_000])
@pytest.mark.parametrize("name", CHATS)
def test_a_stream_is_read_as_the_package_accumulates_it(name: str, size: int) -> None:
    values = chunks(*CHATS[name])
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    for each in values:
        chunk: Any = construct_type(type_=ChatCompletionChunk, value=each)
        state.handle_chunk(chunk)
    theirs = state.current_completion_snapshot

    check_chat(read(ChatInterpreter(ReplyAccumulator({"add", "now"})), values, size), theirs)


OUTPUTS: dict[str, list[dict[str, Any]]] = {
    "text": [
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Grüße, Ada 👋", "annotations": []}],
        }
    ],
    "reasoning and calls": [
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call", "id": "fc_2", "call_id": "c2", "name": "now", "arguments": "{}"},
    ],
}


@pytest.mark.parametrize("size", [1, 64, 100_000])
@pytest.mark.parametrize("name", OUTPUTS)
def test_a_response_is_read_as_the_package_reads_it(name: str, size: int) -> None:
    usage = {
        "input_tokens": 20,
        "output_tokens": 9,
        "total_tokens": 29,
        "input_tokens_details": {"cached_tokens": 8},
        "output_tokens_details": {"reasoning_tokens": 4},
    }
    whole = {"id": "resp_1", "object": "response", "model": "m", "status": "completed", "output": OUTPUTS[name]}
    whole["usage"] = usage
    done = [
        {"type": "response.output_item.done", "output_index": at, "item": each} for at, each in enumerate(OUTPUTS[name])
    ]
    values = [*done, {"type": "response.completed", "response": whole}]
    theirs: Any = construct_type(type_=Response, value=whole)

    ours = read(ResponsesInterpreter(ReplyAccumulator({"add", "now"})), values, size)

    message = ours.ai_message
    assert (message.text or "") == theirs.output_text
    assert [(each.id, each.name, each.arguments) for each in message.tool_execution_requests] == [
        (each.call_id, each.name, each.arguments) for each in theirs.output if each.type == "function_call"
    ]
    thoughts = [part.text for each in theirs.output if each.type == "reasoning" for part in each.summary]
    assert (message.reasoning or "") == "".join(thoughts)
    counted = ours.token_usage
    assert counted is not None
    assert (counted.input_tokens, counted.output_tokens) == (theirs.usage.input_tokens, theirs.usage.output_tokens)
    assert counted.cached_input_tokens == theirs.usage.input_tokens_details.cached_tokens
    assert counted.reasoning_tokens == theirs.usage.output_tokens_details.reasoning_tokens
