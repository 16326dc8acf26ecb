"""Content of messages in spans: none unless it is enabled."""

import json

import pytest

from tests.otel.telemetry import SECRET, VARIABLE, Assistant, Telemetry, container_with
from toolbox import (
    AiMessage,
    AudioContent,
    ChatResponse,
    FinishReason,
    ImageContent,
    PdfContent,
    SystemMessage,
    TokenUsage,
    UserMessage,
)
from toolbox.otel.span_content import input_content
from toolbox.testing import tool_call

pytestmark = pytest.mark.anyio


async def test_spans_and_metrics_contain_no_content_by_default(telemetry: Telemetry) -> None:
    reply = ChatResponse(AiMessage(SECRET, reasoning=SECRET), TokenUsage(1, 1), FinishReason.STOP)
    calls = tool_call("look", {"n": 1, "extra": SECRET})
    async with container_with(telemetry, calls, reply) as container:
        await container.get(Assistant).remember("s", SECRET)

    assert len(telemetry.spans) == 4
    assert SECRET not in telemetry.text
    assert "Be brief." not in telemetry.text


async def test_spans_contain_content_if_it_is_enabled(telemetry: Telemetry) -> None:
    async with container_with(telemetry, tool_call("look", {"n": 1}, id="c1"), "done", content=True) as container:
        await container.get(Assistant).remember("s", "Go")

    service, _, executed, answered = telemetry.spans
    result = executed.attributes["gen_ai.tool.call.result"]
    assert executed.attributes["gen_ai.tool.call.arguments"] == '{"n": 1}'
    assert json.loads(answered.attributes["gen_ai.input.messages"]) == [
        {"role": "system", "parts": [{"type": "text", "content": "Be brief."}]},
        {"role": "user", "parts": [{"type": "text", "content": "Go"}]},
        {"role": "assistant", "parts": [{"type": "tool_call", "id": "c1", "name": "look", "arguments": {"n": 1}}]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": result}]},
    ]
    assert json.loads(answered.attributes["gen_ai.output.messages"]) == [
        {"role": "assistant", "parts": [{"type": "text", "content": "done"}], "finish_reason": "stop"}
    ]
    assert json.loads(answered.attributes["gen_ai.tool.definitions"])[0]["name"] == "look"
    assert json.loads(service.attributes["gen_ai.input.messages"])[0]["parts"] == [{"type": "text", "content": "Go"}]
    assert json.loads(service.attributes["gen_ai.output.messages"])[0]["parts"] == [{"type": "text", "content": "done"}]


async def test_error_texts_are_recorded_as_content(telemetry: Telemetry) -> None:
    async with container_with(telemetry, tool_call("fail"), "done", content=True) as container:
        await container.get(Assistant).ask("Go")

    failed = telemetry.span("execute_tool fail")
    assert failed.status.description == SECRET
    assert failed.events[0].attributes["exception.message"] == SECRET


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("", False),
        ("no_content", False),
        ("event_only", False),
        ("false", False),
        ("SPAN_ONLY", True),
        ("span_and_event", True),
        ("true", True),
    ],
)
async def test_an_environment_variable_enables_content(
    telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch, value: str, wanted: bool
) -> None:
    monkeypatch.setenv(VARIABLE, value)
    async with container_with(telemetry, SECRET) as container:
        await container.get(Assistant).ask("Go")

    assert (SECRET in telemetry.text) is wanted


async def test_capture_content_overrides_the_environment(telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "span_only")
    async with container_with(telemetry, SECRET, content=False) as container:
        await container.get(Assistant).ask("Go")

    assert SECRET not in telemetry.text


def test_images_documents_and_audio_are_recorded_without_their_bytes() -> None:
    said = input_content(
        (
            SystemMessage("Look."),
            UserMessage(
                [
                    "This?",
                    ImageContent("https://a.example/x.png"),
                    ImageContent(data="QUJD", mime_type="image/png"),
                    PdfContent("https://a.example/x.pdf"),
                    PdfContent(data="QUJD", name="x.pdf"),
                    AudioContent("QUJD", "audio/wav"),
                ]
            ),
            AiMessage("A cat", [tool_call("pet", id="c1")], reasoning="whiskers"),
        )
    )

    _, user, assistant = json.loads(str(said["gen_ai.input.messages"]))
    assert user["parts"] == [
        {"type": "text", "content": "This?"},
        {"type": "uri", "modality": "image", "mime_type": None, "uri": "https://a.example/x.png"},
        {"type": "image", "mime_type": "image/png"},
        {"type": "uri", "modality": "document", "mime_type": "application/pdf", "uri": "https://a.example/x.pdf"},
        {"type": "document", "mime_type": "application/pdf", "name": "x.pdf"},
        {"type": "audio", "mime_type": "audio/wav"},
    ]
    assert [each["type"] for each in assistant["parts"]] == ["reasoning", "text", "tool_call"]
