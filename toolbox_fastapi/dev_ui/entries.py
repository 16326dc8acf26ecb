"""What happened, as the page reads it: values and errors as JSON, messages as text.

Not here: what happens (`listener`, `calls`), keeping it (`journal`).
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
"""One thing that happened, as the page reads it: `type`, `run` (the invocation's id), `at` (ms since 1970) and more."""

LONGEST_TEXT = 20_000


def shortened(text: str) -> str:
    """A text as it is kept."""
    if len(text) <= LONGEST_TEXT:
        return text
    return f"{text[:LONGEST_TEXT]}… ({len(text)} characters)"


def plain(value: object) -> Any:
    """A value as JSON has it."""
    return from_json(as_json(value))


def failure(error: BaseException) -> Entry:
    """What went wrong, for the developer."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return {"type": "failure", "kind": type(error).__name__, "message": message_of(error)}


def usage_of(usage: TokenUsage | None) -> Entry | None:
    """Token counts, where there are any."""
    return None if usage is None else plain(usage)


def failure_text(error: BaseException) -> str:
    """What went wrong, in a line."""
    told = failure(error)
    return f"{told['kind']}: {told['message']}"


# --- a conversation as text


def conversation(messages: Iterable[Message]) -> str:
    """What a model is sent."""
    return "\n\n".join(_lines(messages))


def _lines(messages: Iterable[Message]) -> Iterable[str]:
    for message in messages:
        match message:
            case SystemMessage(text):
                yield f"system: {text}"
            case UserMessage():
                yield f"user: {said_by(message)}"
            case AiMessage():
                yield f"model: {text_of(message)}"
            case ToolExecutionResultMessage():
                yield f"{message.tool_name}: {message.text}"
            case _:
                assert_never(message)


def said_by(message: UserMessage) -> str:
    """What the user says."""
    others = [note for each in message.contents if (note := _beside_text(each))]
    return "\n".join([*([message.text] if message.text else []), *others])


def _beside_text(content: Content) -> str:
    match content:
        case TextContent():
            return ""
        case ImageContent():
            return "(an image)"
        case _:
            assert_never(content)


def text_of(message: AiMessage) -> str:
    """What a model says, and asks for."""
    calls = [f"→ {each.name} {each.arguments}" for each in message.tool_execution_requests]
    return "\n".join([*([message.text] if message.text else []), *calls])
