"""Converts values, errors and messages into the JSON and text that the page shows.

Not here: creating entries (`journal`, `calls`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias, assert_never

from pydantic_core import from_json

from toolbox.chat import (
    AiMessage,
    Content,
    ImageContent,
    Message,
    SystemMessage,
    TextContent,
    TokenUsage,
    ToolExecutionResultMessage,
    UserMessage,
)
from toolbox.tools.failures import message_of

from ..streaming import as_json

Entry: TypeAlias = dict[str, Any]
"""An event for the page, as JSON: `type`, `run` (the invocation's id), `at` (ms since 1970) and more."""

MAX_TEXT_CHARS = 20_000


def shortened(text: str) -> str:
    """Shorten a long text and append its length."""
    if len(text) <= MAX_TEXT_CHARS:
        return text
    return f"{text[:MAX_TEXT_CHARS]}… ({len(text)} characters)"


def plain(value: object) -> Any:
    """Convert a value to plain JSON data."""
    return from_json(as_json(value))


def failure(error: BaseException) -> Entry:
    """Return an error as an entry with its class and message."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return {"type": "failure", "kind": type(error).__name__, "message": message_of(error)}


def usage_of(usage: TokenUsage | None) -> Entry | None:
    """Return the token counts as JSON data, or None."""
    return None if usage is None else plain(usage)


def failure_line(error: BaseException) -> str:
    """Return an error as one line: its class and message."""
    entry = failure(error)
    return f"{entry['kind']}: {entry['message']}"


# --- a conversation as text


def conversation(messages: Iterable[Message]) -> str:
    """Return the messages of a model request as text."""
    return "\n\n".join(_lines(messages))


def _lines(messages: Iterable[Message]) -> Iterable[str]:
    for message in messages:
        match message:
            case SystemMessage(text):
                yield f"system: {text}"
            case UserMessage():
                yield f"user: {user_text(message)}"
            case AiMessage():
                yield f"model: {model_text(message)}"
            case ToolExecutionResultMessage():
                yield f"{message.tool_name}: {message.text}"
            case _:
                assert_never(message)


def user_text(message: UserMessage) -> str:
    """Return the text of a user message, with a placeholder for each image."""
    others = [note for each in message.contents if (note := _placeholder(each))]
    return "\n".join([*([message.text] if message.text else []), *others])


def _placeholder(content: Content) -> str:
    match content:
        case TextContent():
            return ""
        case ImageContent():
            return "(an image)"
        case _:
            assert_never(content)


def model_text(message: AiMessage) -> str:
    """Return the text of a model's message, with a line for each tool call."""
    calls = [f"→ {each.name} {each.arguments}" for each in message.tool_execution_requests]
    return "\n".join([*([message.text] if message.text else []), *calls])
