"""Streams of items: each item is yielded as soon as the model has written it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.services.streaming import ADD, City, Streaming, streaming
from toolbox import (
    AiMessage,
    ChatRequest,
    ChatResponse,
    CompleteResponse,
    OutputParsingError,
    PartialResponse,
    StreamEvent,
    create_ai_service,
)
from toolbox.testing import ScriptedChatModel

pytestmark = pytest.mark.anyio


async def test_items_are_yielded_as_soon_as_they_are_complete() -> None:
    gate = asyncio.Event()

    class Slow:
        async def chat(self, request: ChatRequest) -> ChatResponse:
            raise AssertionError("not asked for")

        async def stream(self, request: ChatRequest) -> AsyncIterator[StreamEvent]:
            yield PartialResponse('{"value": [{"name": "Bern"}')
            yield PartialResponse(', {"name"')
            await gate.wait()
            yield PartialResponse(': "Basel"}]}')
            yield CompleteResponse(ChatResponse(AiMessage("…")))

    service: Any = create_ai_service(Streaming, chat_model=Slow())
    stream = service.items("x")
    assert await anext(stream) == City(name="Bern")
    waiting = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    assert not waiting.done()
    gate.set()
    assert await waiting == City(name="Basel")
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


@pytest.mark.parametrize(
    ("reply", "found"),
    [
        ("[1, 2, 3]", [1, 2, 3]),
        ("[]", []),
        ('{"value": [1]}', [1]),
        ('{"value":[]}', []),
        ("```json\n[1, 2]\n```", [1, 2]),
        ("```\n[1]\n```", [1]),
        ('```json\n{"value": [1]}\n```', [1]),
        (' \n [ "4" ,5] ', [4, 5]),
        ("Here you are:\n\n```json\n[1, 2]\n```\nEnjoy!", [1, 2]),
    ],
)
async def test_lists_are_parsed_with_and_without_a_wrapper(reply: str, found: list[int]) -> None:
    service, _ = streaming(reply)
    assert [each async for each in service.numbers("x")] == found


async def test_invalid_items_raise_at_their_position() -> None:
    service, _ = streaming('[{"name": "Bern"}, {"nome": "Basel"}, {"name": "Genf"}]')
    stream = service.items("x")
    assert await anext(stream) == City(name="Bern")
    with pytest.raises(OutputParsingError) as raised:
        await anext(stream)
    assert "nome" in raised.value.text
    assert raised.value.problems[0][0] == "name"
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


@pytest.mark.parametrize("reply", ["no list", "[1, 2", "", '{"values": [1]}', "[1 2]", "[1, x]"])
async def test_incomplete_and_missing_lists_are_rejected(reply: str) -> None:
    service, _ = streaming(reply)
    with pytest.raises(OutputParsingError):
        async for _ in service.numbers("x"):
            pass


async def test_items_are_requested_as_a_list() -> None:
    service, model = streaming("[]")
    async for _ in service.items("x"):
        pass
    assert "JSON" in model.requests[0].messages[0].text  # type: ignore[union-attr]

    model = ScriptedChatModel(["[]"], supports_response_format=True)
    service = create_ai_service(Streaming, chat_model=model)
    async for _ in service.items("x"):
        pass
    schema = model.requests[0].response_format.schema  # type: ignore[union-attr]
    assert schema["properties"]["value"]["type"] == "array"


async def test_items_are_yielded_after_tool_rounds() -> None:
    service, _ = streaming(AiMessage("Let me look.", [ADD]), "[1, 2]")
    assert [each async for each in service.numbers("x")] == [1, 2]
