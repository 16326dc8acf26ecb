"""The Responses API behaves like the chat completions API: through a service, streaming and not."""

import json
from typing import Any

import pytest

from tests.models.scripted_server import Scripted, Serve, sse
from tests.models.test_tolerance import ask, ask_streamed, tools
from toolbox import (
    AiMessage,
    ChatRequest,
    FinishReason,
    ImageContent,
    ModelError,
    ModelHttpError,
    ModelProtocolError,
    ModelRefusedError,
    ModelTruncatedError,
    OpenAiChatModel,
    ResponseFormat,
    SystemMessage,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    ToolSpecification,
    UserMessage,
)

pytestmark = pytest.mark.anyio

ADD = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "add", "arguments": '{"a": 2, "b": 3}'}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}], "status": None}


def text(said: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": said}]}


def response(*output: Any, status: str = "completed", **more: Any) -> dict[str, Any]:
    usage = {"input_tokens": 5, "output_tokens": 3, "output_tokens_details": {"reasoning_tokens": 1}}
    return {
        "id": "resp_1",
        "object": "response",
        "status": status,
        "error": None,
        "output": list(output),
        "usage": usage,
        **more,
    }


def whole(*output: Any, **more: Any) -> Scripted:
    return Scripted(json.dumps(response(*output, **more)).encode())


def events(*values: Any, named: bool = True) -> Scripted:
    chunks = [f"event: {each['type']}\n".encode() * named + sse(each, done=False)[0] for each in values]
    return Scripted(chunks=chunks, content_type="text/event-stream")


def streamed(*output: Any, **more: Any) -> Scripted:
    """A response as OpenAI streams it."""
    values: list[Any] = [{"type": "response.created", "response": {**response(), "status": "in_progress"}}]
    for index, item in enumerate(output):
        begun = {
            **item,
            **({"arguments": ""} if "arguments" in item else {}),
            **({"content": []} if "content" in item else {}),
        }
        values.append({"type": "response.output_item.added", "output_index": index, "item": begun})
        place = {"output_index": index, "item_id": item.get("id")}
        for part in item.get("content", []):
            place |= {"content_index": 0}
            values += [{"type": "response.output_text.delta", **place, "delta": each} for each in part["text"]]
            values.append({"type": "response.output_text.done", **place, "text": part["text"]})
        if "arguments" in item:
            for each in item["arguments"]:
                values.append({"type": "response.function_call_arguments.delta", **place, "delta": each})
            values.append({"type": "response.function_call_arguments.done", **place, "arguments": item["arguments"]})
        values.append({"type": "response.output_item.done", "output_index": index, "item": item})
    done = response(*output, **more)
    values.append({"type": f"response.{done['status']}", "response": done})
    return events(*values)


def model_of(url: str, **more: Any) -> OpenAiChatModel:
    return OpenAiChatModel("m", url, "test", wire="responses", max_retries=0, **more)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_call_and_its_result_are_exchanged(serve: Serve, stream: bool) -> None:
    make = streamed if stream else whole
    server = await serve([make(THOUGHT, text("Let me see."), ADD), make(text("done"))])
    ran: list[Any] = []
    model = model_of(server.url)

    answer = await (ask_streamed if stream else ask)(model, tools(ran))
    await model.aclose()

    assert (answer, ran) == ("done", [("add", {"a": 2, "b": 3})])
    assert server.paths == ["/v1/responses"] * 2
    assert server.requests[1]["input"] == [
        {"role": "user", "content": "Go."},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"role": "assistant", "content": "Let me see."},
        {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"a": 2, "b": 3}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "5"},
    ]
    assert server.requests[0]["tools"][0]["strict"] is False


async def test_details_of_the_response_are_kept(serve: Serve) -> None:
    server = await serve([whole(THOUGHT, text("Hello"))])
    model = model_of(server.url)

    reply = await model.chat(ChatRequest([UserMessage("Hi")]))
    await model.aclose()

    assert (reply.id, reply.finish_reason) == ("resp_1", FinishReason.STOP)
    assert reply.token_usage is not None
    assert (reply.token_usage.total_tokens, reply.token_usage.reasoning_tokens) == (8, 1)
    assert (reply.ai_message.text, reply.ai_message.reasoning) == ("Hello", "Hm.")


async def test_a_request_has_the_format_of_the_responses_api(serve: Serve) -> None:
    server = await serve([whole(text("ok"))])
    model = model_of(server.url, max_tokens=9, parameters={"reasoning_effort": "low"})
    call = ToolExecutionRequest("c", "look", '{"broken')
    image = ImageContent(data=b"\x89PNG")

    await model.chat(
        ChatRequest(
            [
                SystemMessage("Be brief."),
                UserMessage(["What is it?", image]),
                AiMessage("", [call]),
                ToolExecutionResultMessage("c", "look", "", contents=[image]),
            ],
            [ToolSpecification("look", "Looks")],
            ResponseFormat("answer", {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}),
            tool_choice="look",
        )
    )
    await model.aclose()

    [body] = server.requests
    shown = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw=="}
    assert body["max_output_tokens"] == 9
    assert body["reasoning"] == {"effort": "low"}
    assert body["tool_choice"] == {"type": "function", "name": "look"}
    assert body["text"]["format"]["strict"] is True
    assert body["input"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "What is it?"}, shown]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [shown]},
    ]


FAILED = response(status="failed") | {"error": {"code": "server_error", "message": "overloaded"}}
REFUSAL = {"type": "message", "content": [{"type": "refusal", "refusal": "No."}]}
CUT = {"incomplete_details": {"reason": "max_output_tokens"}, "status": "incomplete"}


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (Scripted(json.dumps(FAILED).encode()), ModelHttpError),
        (Scripted(b'{"error": {"message": "overloaded"}}'), ModelHttpError),
        (whole(REFUSAL), ModelRefusedError),
        (whole({**ADD, "arguments": '{"a": 2'}, **CUT), ModelTruncatedError),
        (Scripted(b"<html>"), ModelProtocolError),
        (Scripted(b"{}"), ModelProtocolError),
        (Scripted(b""), ModelProtocolError),
        (streamed({**ADD, "arguments": '{"a": 2'}, **CUT), ModelTruncatedError),
        (events({"type": "response.failed", "response": FAILED}), ModelHttpError),
        (events({"type": "error", "code": "x", "message": "overloaded"}), ModelHttpError),
        (
            events(
                {"type": "response.refusal.delta", "delta": "No."},
                {"type": "response.completed", "response": response(REFUSAL)},
            ),
            ModelRefusedError,
        ),
        (events({"type": "response.output_text.delta", "delta": "Hel"}), ModelProtocolError),
        (events({"type": "response.output_item.added", "output_index": 0, "item": ADD}), ModelProtocolError),
        (events(), ModelProtocolError),
    ],
)
async def test_a_failure_raises_the_expected_error(serve: Serve, reply: Scripted, kind: type[ModelError]) -> None:
    server = await serve([reply])
    ran: list[Any] = []
    model = model_of(server.url)

    with pytest.raises(kind):
        await (ask if reply.chunks is None else ask_streamed)(model, tools(ran))
    await model.aclose()

    assert ran == []


DELTA = {"type": "response.output_text.delta", "output_index": 0, "delta": "Hello"}


@pytest.mark.parametrize(
    "reply",
    [
        events({"type": "response.completed", "response": response(text("Hello"))}),
        events(DELTA, {"type": "response.completed", "response": {}}),
        events(DELTA, {"type": "response.completed", "response": response(text("Hello"))}),
        events(
            {**DELTA, "output_index": None, "item_id": "m"},
            {"type": "response.output_item.done", "item_id": "m", "item": text("Hello")},
            {"type": "response.completed", "response": response(text("Hello"))},
        ),
        events(
            {"type": "response.output_text.done", "output_index": 0, "text": "Hello"},
            {"type": "response.completed", "response": None},
        ),
        events(
            {"type": "response.output_item.done", "output_index": 0, "item": text("Hello")},
            {"type": "response.completed", "response": response(text("Hello"))},
            named=False,
        ),
        whole({"type": "message", "content": "Hello"}),
        Scripted(chunks=[json.dumps(response(text("Hello"))).encode()]),
    ],
)
async def test_incomplete_and_repeated_events_are_understood(serve: Serve, reply: Scripted) -> None:
    server = await serve([reply])
    model = model_of(server.url)

    answer = await (ask if reply.chunks is None else ask_streamed)(model, tools([]))
    await model.aclose()

    assert answer == "Hello"


@pytest.mark.parametrize(
    "reply",
    [
        events(
            {"type": "response.output_item.done", "output_index": 0, "item": ADD},
            {"type": "response.completed", "response": response(ADD)},
        ),
        events({"type": "response.completed", "response": response(ADD)}),
        events(
            {"type": "response.output_item.added", "output_index": 0, "item": {**ADD, "arguments": ""}},
            {"type": "response.function_call_arguments.done", "output_index": 0, "arguments": ADD["arguments"]},
            {"type": "response.completed", "response": response(ADD)},
        ),
        events(
            {"type": "response.output_item.added", "item_id": "fc_1", "item": {**ADD, "arguments": ""}},
            {"type": "response.function_call_arguments.delta", "item_id": "fc_1", "delta": ADD["arguments"]},
            {"type": "response.completed", "response": response(ADD)},
        ),
        whole({**ADD, "call_id": None}),
        whole({**ADD, "arguments": {"a": 2, "b": 3}}),
    ],
)
async def test_calls_in_unusual_formats_run_once(serve: Serve, reply: Scripted) -> None:
    stream = reply.chunks is not None
    server = await serve([reply, streamed(text("done")) if stream else whole(text("done"))])
    ran: list[Any] = []
    model = model_of(server.url)

    answer = await (ask_streamed if stream else ask)(model, tools(ran))
    await model.aclose()

    assert (answer, ran) == ("done", [("add", {"a": 2, "b": 3})])


async def test_reasoning_is_an_effort_together_with_other_settings_of_reasoning(serve: Serve) -> None:
    said = {"type": "message", "content": [{"type": "output_text", "text": "ok"}]}
    server = await serve([whole(said), whole(said)])
    model = OpenAiChatModel(
        "m", server.url, wire="responses", reasoning="low", parameters={"reasoning": {"summary": "auto"}}
    )
    await model.chat(ChatRequest([UserMessage("Hi")]))
    await model.chat(ChatRequest([UserMessage("Hi")], reasoning="high"))
    await model.aclose()

    assert [each["reasoning"] for each in server.requests] == [
        {"summary": "auto", "effort": "low"},
        {"summary": "auto", "effort": "high"},
    ]
    assert "reasoning_effort" not in server.requests[0]
