"""Windows: how much of a conversation a service keeps, with its tool calls and results complete.

Not here: stores and the order of calls (`memory`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from operator import eq
from typing import TypeAlias, assert_never

from ..chat import AiMessage, Message, SystemMessage, ToolExecutionResultMessage, UserMessage
from ..contents import AudioContent, Content, ImageContent, PdfContent, TextContent, bytes_of


def _whole_turns(kept: Sequence[Message], messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the kept messages from the first user message on; without one, the newest turn, however long it is.

    Several model servers refuse a conversation that begins with an answer, a tool call or a result: the call would
    fail, store nothing, and all later ones would fail like it.
    """
    if len(kept) == len(messages) and all(map(eq, kept, messages)):
        return tuple(messages)  # nothing was left out
    return _from_user_message(kept) or _newest_turn(messages)


def _from_user_message(messages: Sequence[Message]) -> tuple[Message, ...]:
    return tuple(dropwhile(lambda each: not isinstance(each, UserMessage), messages))


def _newest_turn(messages: Sequence[Message]) -> tuple[Message, ...]:
    users = [index for index, each in enumerate(messages) if isinstance(each, UserMessage)]
    return tuple(messages[users[-1] :]) if users else ()


@dataclass(frozen=True, slots=True)
class MessageWindow:
    """Keeps the last `max_messages` messages: `@register_ai_service(chat_memory=MessageWindow(50))`."""

    max_messages: int = 20

    @property
    def limit(self) -> int:
        """Return `max_messages`, which must be 1 or more at startup."""
        return self.max_messages

    def newest(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Return the messages to keep, oldest first."""
        return _whole_turns(messages[-self.max_messages :], messages)


def estimate_tokens(message: Message) -> int:
    """Estimate the tokens of a message without a tokenizer.

    1 per 4 bytes of text, 85 per image, 1500 per page of a PDF document, 1 per 1600 bytes of audio, plus 4.
    """
    match message:
        case SystemMessage(text):
            texts = [text]
        case UserMessage(contents):
            return _estimate_tokens(message.text) + sum(map(_beside_text, contents)) + 4
        case AiMessage(text, requests):
            texts = [text or "", *(f"{each.name}{each.arguments}" for each in requests)]
        case ToolExecutionResultMessage():
            besides = sum(map(_beside_text, message.contents)) if message.contents else 0
            return _estimate_tokens(message.tool_name) + _estimate_tokens(message.text) + besides + 4
    return sum(map(_estimate_tokens, texts)) + 4


_PAGE = re.compile(rb"/Type\s*/Page\b")


def _beside_text(content: Content) -> int:
    match content:
        case TextContent():
            return 0
        case ImageContent():
            return 85
        case PdfContent():
            return 1500 * max(1, len(_PAGE.findall(bytes_of(content) or b"")))
        case AudioContent():
            return len(bytes_of(content) or b"") // 1600
        case _:
            assert_never(content)


def _estimate_tokens(text: str) -> int:
    return -(-len(text.encode(errors="surrogatepass")) // 4)


@dataclass(frozen=True, slots=True)
class TokenWindow:
    """Keeps the last messages that fit into `max_tokens`: `@register_ai_service(chat_memory=TokenWindow(8000))`.

    `count` returns the tokens of one message; the default is an estimate from its length in bytes.
    """

    max_tokens: int
    count: Callable[[Message], int] = estimate_tokens

    @property
    def limit(self) -> int:
        """Return `max_tokens`, which must be 1 or more at startup."""
        return self.max_tokens

    def newest(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Return the messages to keep, oldest first."""
        left, first = self.max_tokens, len(messages)
        while first > 0 and (left := left - self.count(messages[first - 1])) >= 0:
            first -= 1
        return _whole_turns(messages[first:], messages)


Window: TypeAlias = MessageWindow | TokenWindow


def keep_newest(window: Window, messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages that a window keeps, whole turns also if it is an object of the program's own."""
    return _whole_turns(window.newest(messages), messages)


def without_cut_turn(window: Window, messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return stored messages without the rest of a turn at their beginning, which an earlier release has cut.

    A conversation may begin with an answer that the program has added, such as a greeting. Earlier releases cut only
    what was longer than the window. So if the window has space for as much again, nothing was cut.
    """
    first = next((each for each in messages if not isinstance(each, SystemMessage)), None)
    if isinstance(first, AiMessage) and not first.tool_execution_requests:
        twice = (*messages, *messages)
        if len(window.newest(twice)) == len(twice):
            return tuple(messages)
    return _from_user_message(messages)


def repaired(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages with a result after every tool call, as model servers require.

    After a crash, calls may have no results, or results no calls. Missing results are added as errors; results without
    a call are removed.
    """
    kept: list[Message] = []
    waiting: dict[str, str] = {}
    for message in messages:
        if isinstance(message, ToolExecutionResultMessage):
            if message.id in waiting:
                del waiting[message.id]
                kept.append(message)
            continue
        kept += _answer_interrupted(waiting)
        waiting = {}
        if isinstance(message, SystemMessage):
            continue  # the system message is created for each call
        if isinstance(message, AiMessage):
            waiting = {each.id: each.name for each in message.tool_execution_requests}
        kept.append(message)
    return (*kept, *_answer_interrupted(waiting))


def _answer_interrupted(waiting: dict[str, str]) -> list[Message]:
    text = "This call was interrupted; whether it had an effect is not known."
    return [ToolExecutionResultMessage(id_, name, text, is_error=True) for id_, name in waiting.items()]
