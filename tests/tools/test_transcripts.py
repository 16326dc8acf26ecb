"""Conversations and specifications as JSON."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

import pytest
from hypothesis import given, settings

from tests.generated import Choices, blobs, built, dictionaries, just, lists, made, one_of, sampled, texts
from toolbox import (
    AiMessage,
    AudioContent,
    ImageContent,
    PdfContent,
    SystemMessage,
    TextContent,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    ToolSpecification,
    UserMessage,
)
from toolbox.errors import TranscriptError
from toolbox.transcripts import (
    message_from_dict,
    message_to_dict,
    messages_from_json,
    messages_to_json,
    specification_from_json,
    specification_to_json,
)

text = texts(20)
data = one_of(blobs(9), built(lambda each: b64encode(each).decode(), blobs(9)))
values = one_of(just(None), sampled(False, True), Choices.integer, text, lists(text, 4))
attributes = dictionaries(text, values, 3)
contents = lists(
    one_of(
        built(TextContent, text),
        built(lambda url: ImageContent(url=f"https://{url}"), text),
        built(lambda each, kind: ImageContent(data=each, mime_type=kind), data, sampled("image/webp", "image/png")),
        built(lambda each: ImageContent(data=b"\x89PNG" + each), blobs(9)),
        built(lambda url, name: PdfContent(url=f"http://{url}", name=name), text, one_of(just(None), text)),
        built(lambda each, name: PdfContent(data=each, name=name), data, one_of(just(None), text)),
        built(lambda each: AudioContent(data=each, mime_type="audio/wav"), data),
    ),
    3,
)
requests = built(ToolExecutionRequest, text, text, text, attributes)
messages = one_of(
    built(SystemMessage, text),
    built(UserMessage, contents),
    built(AiMessage, one_of(just(None), text), lists(requests, 3), one_of(just(None), text), attributes),
    built(ToolExecutionResultMessage, text, text, text, sampled(False, True), attributes, contents),
)


@given(made(lists(messages, 5), size=1024))
@settings(deadline=None)
def test_generated_conversations_survive_json(drawn: tuple[list[Any]]) -> None:
    [conversation] = drawn
    text = messages_to_json(conversation)

    assert messages_from_json(text) == tuple(conversation)
    assert messages_from_json(text.encode()) == tuple(conversation)


def test_json_has_a_version_and_no_empty_fields() -> None:
    text = messages_to_json([UserMessage("é"), AiMessage("ok"), AiMessage("")])

    assert text == (
        '{"version":1,"messages":[{"type":"user","contents":[{"type":"text","text":"é"}]},'
        '{"type":"ai","text":"ok"},{"type":"ai","text":""}]}'
    )


def test_single_messages_survive_json() -> None:
    message = ToolExecutionResultMessage("1", "add", "3", is_error=True, attributes={"a": [1]})

    assert message_from_dict(json.loads(json.dumps(message_to_dict(message)))) == message


@pytest.mark.parametrize(
    "specification",
    [
        ToolSpecification("add"),
        ToolSpecification("add", "Adds", {"type": "object", "properties": {"a": {"type": "integer"}}}, {"k": {"x": 1}}),
        ToolSpecification("add", ""),
    ],
)
def test_specifications_survive_json(specification: ToolSpecification) -> None:
    assert specification_from_json(specification_to_json(specification)) == specification


@pytest.mark.parametrize(
    ("text", "path", "what"),
    [
        ("{", "", "invalid JSON"),
        ("[" * 100_000, "", "invalid JSON"),
        ("[]", "", "expected an object"),
        ('{"messages":[]}', "version", "missing required field"),
        ('{"version":2,"messages":[]}', "version", "unsupported version 2"),
        ('{"version":1}', "messages", "missing required field"),
        ('{"version":1,"messages":[1]}', "messages.0", "expected an object"),
        ('{"version":1,"messages":[{"type":"dog"}]}', "messages.0.type", "unknown message type 'dog'"),
        ('{"version":1,"messages":[{"type":"system","text":1}]}', "messages.0.text", "expected str, got int"),
        (
            '{"version":1,"messages":[{"type":"ai","tool_execution_requests":[{"id":"1","name":"a"}]}]}',
            "messages.0.tool_execution_requests.0.arguments",
            "missing required field",
        ),
        (
            '{"version":1,"messages":[{"type":"user","contents":[{"type":"image","bytes":"?"}]}]}',
            "messages.0.contents.0.bytes",
            "invalid base64",
        ),
        (
            '{"version":1,"messages":[{"type":"user","contents":[{"type":"pdf","base64":"?"}]}]}',
            "messages.0.contents.0",
            "PdfContent.data: invalid base64",
        ),
        (
            '{"version":1,"messages":[{"type":"user","contents":[{"type":"audio","base64":"AA==","mime_type":"x"}]}]}',
            "messages.0.contents.0",
            "invalid media type 'x'",
        ),
        (
            '{"version":1,"messages":[{"type":"user","contents":[{"type":"audio","mime_type":"audio/wav"}]}]}',
            "messages.0.contents.0",
            "an AudioContent needs data=",
        ),
        ('{"version":1,"messages":[{"type":"user","contents":[{"type":"image"}]}]}', "messages.0.contents.0", "url="),
        ('{"version":1,"messages":[{"type":"user","contents":[{"type":"x"}]}]}', "messages.0.contents.0.type", "'x'"),
    ],
)
def test_invalid_conversations_are_rejected_with_the_path(text: str, path: str, what: str) -> None:
    with pytest.raises(TranscriptError) as raised:
        messages_from_json(text)

    assert raised.value.path == path
    assert what in raised.value.what


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("value", ["half \ud83d", 10**40, nested(400)], ids=["lone surrogate", "large", "deep"])
def test_unusual_values_of_models_survive_json(value: Any) -> None:
    message = AiMessage(value if isinstance(value, str) else "x", attributes={"value": value})

    assert messages_from_json(messages_to_json([message])) == (message,)


@pytest.mark.parametrize("value", [object(), float("nan"), {1, 2}])
def test_values_that_json_does_not_support_are_rejected(value: object) -> None:
    with pytest.raises(TranscriptError, match="cannot be written as JSON"):
        messages_to_json([AiMessage("x", attributes={"a": value})])


def test_values_that_are_not_messages_are_rejected() -> None:
    wrong: Any = "hello"
    with pytest.raises(TranscriptError, match="expected a message, got str"):
        messages_to_json([wrong])
