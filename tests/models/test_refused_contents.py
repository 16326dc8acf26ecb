"""Parts of messages that no model server may get: other addresses than those of the web, and unknown bytes."""

import base64
import dataclasses
import json
import pickle
from typing import Any

import pytest
from pydantic_ai.models.test import TestModel
from pydantic_ai.profiles import ModelProfile

from tests.models.scripted_server import Serve
from toolbox import (
    AiMessage,
    AnthropicChatModel,
    AudioContent,
    ChatRequest,
    ImageContent,
    Message,
    OpenAiChatModel,
    PdfContent,
    PydanticAiChatModel,
    TextContent,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    UnsupportedContentError,
    UserMessage,
)
from toolbox.contents import Content, media_type_of
from toolbox.errors import TranscriptError
from toolbox.transcripts import messages_from_json, messages_to_json

pytestmark = pytest.mark.anyio

REFUSED = [
    "file:///etc/passwd",
    "FILE:///etc/passwd",
    "/etc/passwd",
    "plan.png",
    "",
    "ftp://a/b.png",
    "javascript:alert(1)",
    "gs://bucket/plan.png",
    " https://a/b.png",
    "httpsx://a/b.png",
    "http:",
]


@pytest.mark.parametrize("kind", [ImageContent, PdfContent])
@pytest.mark.parametrize("url", REFUSED)
def test_other_addresses_are_refused(kind: Any, url: str) -> None:
    with pytest.raises(ValueError, match=rf"{kind.__name__}\.url: expected an http, https or data URL"):
        kind(url)


@pytest.mark.parametrize(
    "url", ["https://a/b.png", "HTTP://a/b.png", "Https://a", "DATA:image/png;base64,iVBORw0KGgo="]
)
def test_web_and_data_addresses_are_accepted_in_any_case(url: str) -> None:
    assert ImageContent(url).url == url


@pytest.mark.parametrize("data", [b"", b"no image", b"%PDF-1.4", b"\x00" * 50, base64.b64encode(b"no image").decode()])
def test_unknown_bytes_without_a_type_are_refused(data: bytes | str) -> None:
    with pytest.raises(ValueError, match=r"ImageContent\.data: these bytes are not a known image; pass mime_type="):
        ImageContent(data=data)

    assert ImageContent(data=data, mime_type="image/x-own").data == data


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"\x89PNG\r\n\x1a\n", "image/png"),
        (b"\xff\xd8\xff\xe0", "image/jpeg"),
        (b"GIF89a", "image/gif"),
        (b"RIFF\0\0\0\0WEBP", "image/webp"),
        (b"BM6\0", "image/bmp"),
        (b"II*\0", "image/tiff"),
        (b"MM\0*", "image/tiff"),
        (b"\0\0\0\x1cftypavif", "image/avif"),
        (b"\0\0\0\x18ftypheic", "image/heic"),
    ],
)
def test_known_images_need_no_type(head: bytes, kind: str) -> None:
    assert media_type_of(ImageContent(data=head + bytes(50))) == kind
    assert media_type_of(ImageContent(data=base64.b64encode(head + bytes(50)).decode())) == kind


# --- stored parts

STORED: list[dict[str, Any]] = [
    {"type": "image", "url": "file:///etc/passwd"},
    {"type": "pdf", "url": "file:///etc/passwd", "name": "a.pdf"},
    {"type": "image", "bytes": base64.b64encode(b"no image").decode()},
    {"type": "image", "base64": base64.b64encode(b"no image").decode(), "detail": "low"},
]
stored = pytest.mark.parametrize("part", STORED, ids=["image", "document", "bytes", "base64"])


def read(part: dict[str, Any], in_result: bool = False) -> tuple[Message, ...]:
    parts = [{"type": "text", "text": "Look"}, part]
    user: dict[str, Any] = {"type": "user", "contents": parts}
    if in_result:
        result = {"type": "tool_result", "id": "c1", "tool_name": "look", "text": "", "contents": parts}
        call = {"id": "c1", "name": "look", "arguments": "{}"}
        messages = [
            {"type": "user", "contents": parts[:1]},
            {"type": "ai", "tool_execution_requests": [call]},
            result,
        ]
    else:
        messages = [user]
    return messages_from_json(json.dumps({"version": 1, "messages": messages}))


@stored
def test_a_stored_part_is_read_and_written_as_it_is(part: dict[str, Any]) -> None:
    messages = read(part)

    assert json.loads(messages_to_json(messages))["messages"][0]["contents"][1] == part
    assert pickle.loads(pickle.dumps(messages)) == messages


def test_other_faults_of_a_stored_part_are_errors() -> None:
    for part in ({"type": "image"}, {"type": "image", "base64": "%"}, {"type": "image", "url": "data:text/html,x"}):
        with pytest.raises(TranscriptError):
            read(part)


def models(url: str) -> list[Any]:
    return [
        OpenAiChatModel("m", url, "test"),
        OpenAiChatModel("m", url, "test", wire="responses"),
        AnthropicChatModel("m", base_url=url.removesuffix("/v1")),
        PydanticAiChatModel(TestModel()),
    ]


@stored
@pytest.mark.parametrize("in_result", [False, True], ids=["user message", "tool result"])
@pytest.mark.parametrize("number", range(4), ids=["chat", "responses", "anthropic", "pydantic-ai"])
async def test_a_stored_part_that_must_not_be_sent_is_refused(
    serve: Serve, part: dict[str, Any], in_result: bool, number: int
) -> None:
    server = await serve([])
    model = models(server.url)[number]
    request = ChatRequest(read(part, in_result))

    with pytest.raises(UnsupportedContentError) as raised:
        await model.chat(request)
    with pytest.raises(UnsupportedContentError):
        [event async for event in model.stream(request)]
    await model.aclose()

    assert raised.value.content == ("PdfContent" if part["type"] == "pdf" else "ImageContent")
    assert raised.value.place == ("messages.2.contents.1" if in_result else "messages.0.contents.1")
    assert server.requests == []


def test_changing_a_stored_part_checks_it() -> None:
    [message] = read(STORED[0])
    assert isinstance(message, UserMessage)
    image = message.contents[1]
    assert isinstance(image, ImageContent)

    with pytest.raises(ValueError, match="expected an http"):
        dataclasses.replace(image, detail="low")
    assert dataclasses.replace(image, url="https://a/b.png").url == "https://a/b.png"


# --- the profile of a model of pydantic-ai

PNG = ImageContent(data=b"\x89PNG")
BILL = PdfContent(data=b"%PDF")
VOICE = AudioContent(b"RIFF", "audio/wav")


@pytest.mark.parametrize("in_result", [False, True], ids=["user message", "tool result"])
@pytest.mark.parametrize(
    ("content", "profile", "kind"),
    [
        (PNG, ModelProfile(supports_image_input=False), "images"),
        (ImageContent("https://a/b.png"), ModelProfile(supports_image_input=False), "images"),
        (BILL, ModelProfile(supports_document_input=False), "PDF documents"),
        (BILL, ModelProfile(supported_document_media_types=frozenset({"text/plain"})), "PDF documents"),
        (VOICE, ModelProfile(supports_audio_file_input=False), "audio"),
    ],
    ids=["image", "address of an image", "document", "type of document", "audio"],
)
async def test_parts_that_a_profile_does_not_support_are_refused(
    content: Content, profile: ModelProfile, kind: str, in_result: bool
) -> None:
    library = TestModel(profile=profile)
    model = PydanticAiChatModel(library)
    messages: list[Message] = [UserMessage(["Look", content])]
    if in_result:
        call = AiMessage(None, [ToolExecutionRequest("c1", "look", "{}")])
        result = ToolExecutionResultMessage("c1", "look", "", contents=[TextContent("Look"), content])
        messages = [UserMessage("Go"), call, result]

    with pytest.raises(UnsupportedContentError, match=f"does not support {kind}; use another model") as raised:
        await model.chat(ChatRequest(messages))
    with pytest.raises(UnsupportedContentError):
        [event async for event in model.stream(ChatRequest(messages))]

    assert raised.value.content == type(content).__name__
    assert raised.value.place == f"messages.{2 if in_result else 0}.contents.1"
    assert library.last_model_request_parameters is None


async def test_parts_that_a_profile_supports_are_sent() -> None:
    types = frozenset({"application/pdf"})
    library = TestModel(profile=ModelProfile(supported_document_media_types=types), custom_output_text="ok")

    reply = await PydanticAiChatModel(library).chat(ChatRequest([UserMessage(["Look", PNG, BILL, VOICE])]))

    assert reply.ai_message.text == "ok"
