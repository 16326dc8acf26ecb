"""What was said, as spans hold it where that is wanted: messages and tools as JSON in the conventions' form.

Not here: whether it is wanted (`listener`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, assert_never

from opentelemetry.util.types import AttributeValue

from ..chat import (
    AiMessage,
    ChatRequest,
    ChatResponse,
    Content,
    ImageContent,
    Message,
    SystemMessage,
    TextContent,
    ToolExecutionRequest,
    UserMessage,
)
from .attributes import finish_reason

VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
INPUT = "gen_ai.input.messages"
OUTPUT = "gen_ai.output.messages"


def is_wanted() -> bool:
    """Whether the environment asks for content on spans; what it asks for on log events alone is not."""
    return os.environ.get(VARIABLE, "").strip().lower() in ("true", "span_only", "span_and_event")


def input_content(messages: Sequence[Message]) -> dict[str, AttributeValue]:
    """What a model, or a service, is told."""
    return {INPUT: _json([_message(each) for each in messages])}


def request_content(request: ChatRequest) -> dict[str, AttributeValue]:
    """What a model is told, and the tools it is offered."""
    found = input_content(request.messages)
    if request.tool_specifications:
        found["gen_ai.tool.definitions"] = _json(
            [
                {"type": "function", "name": each.name, "description": each.description, "parameters": each.parameters}
                for each in request.tool_specifications
            ]
        )
    return found


def output_content(response: ChatResponse) -> dict[str, AttributeValue]:
    """What a model answers."""
    return {OUTPUT: _json([{**_message(response.ai_message), "finish_reason": finish_reason(response)}])}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)


def _message(message: Message) -> dict[str, Any]:
    if isinstance(message, SystemMessage):
        return {"role": "system", "parts": [_text(message.text)]}
    if isinstance(message, UserMessage):
        return {"role": "user", "parts": [_part(each) for each in message.contents]}
    if isinstance(message, AiMessage):
        parts = [{"type": "reasoning", "content": message.reasoning}] if message.reasoning else []
        parts += [_text(message.text)] if message.text else []
        return {"role": "assistant", "parts": parts + [_call(each) for each in message.tool_execution_requests]}
    answer = {"type": "tool_call_response", "id": message.id, "response": message.text}
    parts = [_part(each) for each in message.contents]
    return {"role": "tool", "parts": [answer, *(each for each in parts if each["type"] != "text")]}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "content": text}


def _call(request: ToolExecutionRequest) -> dict[str, Any]:
    arguments: Any = request.arguments
    with suppress(ValueError):  # else the text, as the model wrote it
        arguments = json.loads(arguments)
    return {"type": "tool_call", "id": request.id, "name": request.name, "arguments": arguments}


def _part(content: Content) -> dict[str, Any]:
    match content:
        case TextContent(text):
            return _text(text)
        case ImageContent(str() as url) if not url.startswith("data:"):
            return {"type": "uri", "modality": "image", "mime_type": content.mime_type, "uri": url}
        case ImageContent():  # its bytes are more than a span should carry
            return {"type": "image", "mime_type": content.mime_type}
        case _:
            assert_never(content)
