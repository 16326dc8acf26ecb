"""Holds a program's own model to what a model must answer: a `ChatResponse`, or a stream that ends with one.

Not here: what a server answers (`reading`), any model as a stream (`streaming`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING

from ..chat import ChatResponse, StreamEvent
from .streaming import stream_of

if TYPE_CHECKING:
    from ..chat import ChatModel, ChatRequest


def response_of(model: ChatModel, response: object) -> ChatResponse:
    """What a model has answered, if it is an answer. Raises `TypeError`."""
    if isinstance(response, ChatResponse):
        return response
    raise TypeError(f"{type(model).__name__} answered with a {type(response).__name__}; a model answers a ChatResponse")


def no_response(model: ChatModel) -> RuntimeError:
    """What to raise when a stream is over and has brought no answer."""
    return RuntimeError(f"the stream of {type(model).__name__} ended without a CompleteResponse")


def answer_stream(model: ChatModel, request: ChatRequest) -> AsyncGenerator[StreamEvent, None]:
    """The answer of `model` as events, with an `aclose` even where its own iterator has none."""
    stream = stream_of(model, request)
    return stream if hasattr(stream, "aclose") else _closable(stream)  # type: ignore[return-value]  # aclose is enough


async def _closable(stream: AsyncIterator[StreamEvent]) -> AsyncGenerator[StreamEvent, None]:
    async for event in stream:
        yield event
