"""Streams of any `ChatModel`: its reply as events, a whole reply as the events it would have streamed, and its checks.

Not here: a model server's bytes (`models`), a service's stream (`services`).
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
    """The reply of `model` as events; of a model without `stream`, the whole reply at once."""
    stream: Callable[[ChatRequest], AsyncIterator[StreamEvent]] | None = getattr(model, "stream", None)
    return _whole(model, request) if stream is None else stream(request)


async def _whole(model: ChatModel, request: ChatRequest) -> AsyncIterator[StreamEvent]:
    for event in events_of(await model.chat(request)):
        yield event


def events_of(response: ChatResponse, pieces: Callable[[str], Iterator[str]] | None = None) -> Iterator[StreamEvent]:
    """The events that stream `response`: reasoning, text, calls, the whole. `pieces` cuts its texts, if it is given."""
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
    """`text` in pieces that end after a space, as models stream it."""
    start = 0
    while start < len(text):
        end = text.find(" ", start) + 1 or len(text)
        yield text[start:end]
        start = end


# --- a program's own model


def response_of(model: ChatModel, response: object) -> ChatResponse:
    """Return what a model has answered, if it is a `ChatResponse`. Raises `TypeError`."""
    if isinstance(response, ChatResponse):
        return response
    raise TypeError(f"{type(model).__name__} answered with a {type(response).__name__}; a model answers a ChatResponse")


def no_response(model: ChatModel) -> RuntimeError:
    """Return the error of a stream that ended without a response."""
    return RuntimeError(f"the stream of {type(model).__name__} ended without a CompleteResponse")


def answer_stream(model: ChatModel, request: ChatRequest) -> AsyncGenerator[StreamEvent, None]:
    """Return the answer of `model` as events, with an `aclose` even if its own iterator has none."""
    stream = stream_of(model, request)
    return stream if hasattr(stream, "aclose") else _closable(stream)  # type: ignore[return-value]  # aclose is enough


async def _closable(stream: AsyncIterator[StreamEvent]) -> AsyncGenerator[StreamEvent, None]:
    async for event in stream:
        yield event
