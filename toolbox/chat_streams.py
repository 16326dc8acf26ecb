"""Turns the reply of any `ChatModel` into stream events, and checks the replies of a program's own models.

Not here: reading the stream of a model server (`models`), the stream of a service (`services`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

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
    return _whole(model, request) if stream is None else stream(request)


async def _whole(model: ChatModel, request: ChatRequest) -> AsyncIterator[StreamEvent]:
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


TEXT_PIECES = frozenset({PartialResponse, PartialReasoning})
"""The events that only have to be passed on."""


class TextPieces(list[StreamEvent]):
    """Pieces of text that arrived together, each one of `TEXT_PIECES`."""


def pieces_in(event: Any) -> Sequence[Any]:
    """Return the events of `TextPieces`; another event alone."""
    return event if isinstance(event, TextPieces) else (event,)


class PieceStream(AsyncIterator[StreamEvent]):
    """A model's stream of events, some of which arrive together.

    `pieces` yields the same events, but pieces of text that arrived together as one `TextPieces`.
    """

    __slots__ = ("_ready", "pieces")

    def __init__(self, pieces: AsyncGenerator[StreamEvent | TextPieces, None]) -> None:
        self.pieces = pieces
        self._ready: deque[StreamEvent] = deque()

    async def __anext__(self) -> StreamEvent:
        while not self._ready:
            found = await self.pieces.__anext__()
            if not isinstance(found, TextPieces):
                return found
            self._ready.extend(found)
        return self._ready.popleft()

    async def aclose(self) -> None:
        """Close the connection of the stream."""
        self._ready.clear()
        await self.pieces.aclose()


def answer_pieces(model: ChatModel, request: ChatRequest) -> AsyncGenerator[StreamEvent | TextPieces, None]:
    """Return the answer of `model` as events; pieces of text that arrived together may be one `TextPieces`."""
    stream = answer_stream(model, request)
    return stream.pieces if isinstance(stream, PieceStream) else stream


def answer_stream(model: ChatModel, request: ChatRequest) -> AsyncGenerator[StreamEvent, None]:
    """Return the reply of `model` as stream events. The result always has `aclose`."""
    stream = stream_of(model, request)
    return stream if hasattr(stream, "aclose") else _closable(stream)  # type: ignore[return-value]  # aclose is enough


async def _closable(stream: AsyncIterator[StreamEvent]) -> AsyncGenerator[StreamEvent, None]:
    async for event in stream:
        yield event
