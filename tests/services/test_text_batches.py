"""Pieces of text that arrive together: order, closing and deadlines inside a batch, streams of lists."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Protocol

import pytest

from tests.conftest import Clock
from toolbox import (
    AiMessage,
    ChatRequest,
    ChatResponse,
    CompleteResponse,
    FinishReason,
    InvocationTimeoutError,
    PartialResponse,
    StreamEvent,
    TokenStream,
    create_ai_service,
    time_limit,
)

pytestmark = pytest.mark.anyio


class Batching:
    """A model that yields several pieces without waiting, like a server that sends several chunks at once."""

    def __init__(self, *batches: list[str]) -> None:
        self.batches, self.sent, self.is_closed = batches, 0, False

    async def chat(self, request: ChatRequest) -> ChatResponse:
        return self._response()

    def _response(self) -> ChatResponse:
        text = "".join(piece for batch in self.batches for piece in batch)
        return ChatResponse(AiMessage(text), finish_reason=FinishReason.STOP)

    async def stream(self, request: ChatRequest) -> AsyncIterator[StreamEvent]:
        try:
            for batch in self.batches:
                self.sent += 1
                for piece in batch:
                    yield PartialResponse(piece)
            yield CompleteResponse(self._response())
        finally:
            self.is_closed = True


class Streaming(Protocol):
    def text(self, text: str) -> AsyncIterator[str]: ...

    def events(self, text: str) -> TokenStream: ...

    def lists(self, text: str) -> AsyncIterator[list[int]]: ...


BATCHES = ["one ", "two ", "three "], ["four"]


def streaming(model: Any) -> Streaming:
    return create_ai_service(Streaming, chat_model=model)


async def test_pieces_of_a_batch_are_yielded_one_by_one() -> None:
    assert [piece async for piece in streaming(Batching(*BATCHES)).text("count")] == ["one ", "two ", "three ", "four"]


async def test_events_of_a_batch_are_yielded_one_by_one() -> None:
    events = [event async for event in streaming(Batching(*BATCHES)).events("count")]

    assert events[:4] == [PartialResponse(piece) for batch in BATCHES for piece in batch]
    assert [type(event) for event in events[4:]] == [CompleteResponse]


async def test_an_empty_batch_is_skipped() -> None:
    assert [piece async for piece in streaming(Batching(["one"], [], ["two"])).text("count")] == ["one", "two"]


@pytest.mark.parametrize("taken", [1, 2, 4])
async def test_closing_inside_a_batch_closes_the_model_and_drops_the_rest(taken: int) -> None:
    model = Batching(*BATCHES, ["five"])
    stream: Any = streaming(model).text("count")
    async with aclosing(stream):
        for _ in range(taken):
            await anext(stream)
        sent = model.sent

    assert model.is_closed
    assert model.sent == sent  # closing does not request the next batch
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


@pytest.mark.parametrize("taken", [1, 2])
async def test_a_deadline_that_passes_inside_a_batch_ends_the_stream(taken: int, clock: Clock) -> None:
    model = Batching(*BATCHES)
    with time_limit(100):
        stream: Any = streaming(model).text("count")
        for _ in range(taken):
            await anext(stream)
    clock.advance(101)  # the consumer is busy until the deadline has passed

    with pytest.raises(InvocationTimeoutError):
        [piece async for piece in stream]
    assert model.is_closed
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


@pytest.mark.parametrize(
    "batches", [(['{"value": [[1, 2], ', "[3], [", "]]}"],), (['{"value": '], ["[[1, 2], [3], []]}"])]
)
async def test_items_that_are_lists_are_not_mistaken_for_batches(batches: tuple[list[str], ...]) -> None:
    assert [item async for item in streaming(Batching(*batches)).lists("give")] == [[1, 2], [3], []]
