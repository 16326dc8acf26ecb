"""What spans record of messages and tools, as JSON by OpenTelemetry's conventions, if the program asks for it.

It can contain secrets. Not here: the other attributes of spans (`span_attributes`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, assert_never

from ..chat import (
    AiMessage,
    ChatRequest,
    ChatResponse,
    Message,
    SystemMessage,
    ToolExecutionRequest,
    UserMessage,
)
from ..contents import PDF, AudioContent, Content, ImageContent, PdfContent, TextContent
from .span_attributes import Attributes, finish_reason

_CAPTURE_VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
_INPUT_MESSAGES = "gen_ai.input.messages"
_OUTPUT_MESSAGES = "gen_ai.output.messages"


def captures_content() -> bool:
    """Return True if the environment asks for message content on spans (not only on log events)."""
    return os.environ.get(_CAPTURE_VARIABLE, "").strip().lower() in ("true", "span_only", "span_and_event")


def input_content(messages: Sequence[Message]) -> Attributes:
    """Return the input messages of a model or service as JSON."""
    return {_INPUT_MESSAGES: _write_json([_describe_message(each) for each in messages])}


def request_content(request: ChatRequest) -> Attributes:
    """Return the input messages and tool definitions of a model request as JSON."""
    found = input_content(request.messages)
    if request.tool_specifications:
        found["gen_ai.tool.definitions"] = _write_json(
            [
                {"type": "function", "name": each.name, "description": each.description, "parameters": each.parameters}
                for each in request.tool_specifications
            ]
        )
    return found


def output_content(response: ChatResponse) -> Attributes:
    """Return the output message of a model as JSON."""
    return {
        _OUTPUT_MESSAGES: _write_json(
            [{**_describe_message(response.ai_message), "finish_reason": finish_reason(response)}]
        )
    }


def _write_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)


def _describe_message(message: Message) -> dict[str, Any]:
    if isinstance(message, SystemMessage):
        return {"role": "system", "parts": [_describe_text(message.text)]}
    if isinstance(message, UserMessage):
        return {"role": "user", "parts": [_describe_content(each) for each in message.contents]}
    if isinstance(message, AiMessage):
        parts = [{"type": "reasoning", "content": message.reasoning}] if message.reasoning else []
        parts += [_describe_text(message.text)] if message.text else []
        return {
            "role": "assistant",
            "parts": parts + [_describe_tool_call(each) for each in message.tool_execution_requests],
        }
    answer = {"type": "tool_call_response", "id": message.id, "response": message.text}
    parts = [_describe_content(each) for each in message.contents]
    return {"role": "tool", "parts": [answer, *(each for each in parts if each["type"] != "text")]}


def _describe_text(text: str) -> dict[str, Any]:
    return {"type": "text", "content": text}


def _describe_tool_call(request: ToolExecutionRequest) -> dict[str, Any]:
    arguments: Any = request.arguments
    with suppress(ValueError):  # keep invalid JSON as text
        arguments = json.loads(arguments)
    return {"type": "tool_call", "id": request.id, "name": request.name, "arguments": arguments}


def _describe_content(content: Content) -> dict[str, Any]:
    match content:
        case TextContent(text):
            return _describe_text(text)
        case ImageContent(str() as url) if not url.startswith("data:"):
            return {"type": "uri", "modality": "image", "mime_type": content.mime_type, "uri": url}
        case ImageContent():  # data is too large for a span
            return {"type": "image", "mime_type": content.mime_type}
        case PdfContent(str() as url) if not url.startswith("data:"):
            return {"type": "uri", "modality": "document", "mime_type": PDF, "uri": url}
        case PdfContent():
            return {"type": "document", "mime_type": PDF, **({"name": content.name} if content.name else {})}
        case AudioContent():
            return {"type": "audio", "mime_type": content.mime_type}
        case _:
            assert_never(content)
