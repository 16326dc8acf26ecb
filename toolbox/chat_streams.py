"""Turns the reply of any `ChatModel` into stream events, and checks the replies of a program's own models.

Not here: reading the stream of a model server (`models`), the stream of a service (`services`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING

from .chat import (
    ChatResponse,
    CompleteResponse,
    CompleteToolCall,
    PartialReasoning,
    PartialResponse,
    PartialToolCall,
    StreamEvent,
)

if TYPE_CHECKING:
    from .chat import ChatModel, ChatRequest


def stream_of(model: ChatModel, request: ChatRequest) -> AsyncIterator[StreamEvent]:
    """Return the reply of `model` as stream events. A model without `stream` sends its whole reply at once."""
    stream: Callable[[ChatRequest], AsyncIterator[StreamEvent]] | None = getattr(model, "stream", None)
    return _stream_whole(model, request) if stream is None else stream(request)


async def _stream_whole(model: ChatModel, request: ChatRequest) -> AsyncIterator[StreamEvent]:
    for event in events_of(await model.chat(request)):
        yield event


def events_of(response: ChatResponse, pieces: Callable[[str], Iterator[str]] | None = None) -> Iterator[StreamEvent]:
    """Yield the events of a finished reply: reasoning, text, tool calls, then `CompleteResponse`.

    `pieces` splits texts into parts; without it, each text is one event.
    """
    cut = pieces or (lambda text: iter((text,)))
    message = response.ai_message
    if message.reasoning:
        yield from (PartialReasoning(piece) for piece in cut(message.reasoning))
    if message.text:
        yield from (PartialResponse(piece) for piece in cut(message.text))
    for index, request in enumerate(message.tool_execution_requests):
        yield from (PartialToolCall(index, request.id, request.name, piece) for piece in cut(request.arguments))
        yield CompleteToolCall(index, request)
    yield CompleteResponse(response)


def words(text: str) -> Iterator[str]:
    """Split `text` into parts that end after a space, as models stream them."""
    start = 0
    while start < len(text):
        end = text.find(" ", start) + 1 or len(text)
        yield text[start:end]
        start = end


# --- a program's own model


def response_of(model: ChatModel, response: object) -> ChatResponse:
    """Return `response` if it is a `ChatResponse`. Raises `TypeError` for anything else."""
    if isinstance(response, ChatResponse):
        return response
    raise TypeError(f"{type(model).__name__}: chat() must return a ChatResponse, got {type(response).__name__}")


def no_response(model: ChatModel) -> RuntimeError:
    """Return the error for a stream that ended without a response."""
    return RuntimeError(
        f"{type(model).__name__}: stream() ended without a CompleteResponse; yield one as its last event"
    )


def answer_stream(model: ChatModel, request: ChatRequest) -> AsyncGenerator[StreamEvent, None]:
    """Return the reply of `model` as stream events. The result always has `aclose`."""
    stream = stream_of(model, request)
    return stream if hasattr(stream, "aclose") else _make_closable(stream)  # type: ignore[return-value]  # aclose is enough


async def _make_closable(stream: AsyncIterator[StreamEvent]) -> AsyncGenerator[StreamEvent, None]:
    async for event in stream:
        yield event
