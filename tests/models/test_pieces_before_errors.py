"""Pieces of a streamed reply that arrive together with an error reach the caller, and none arrives twice."""

import json
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

from tests.models import messages_api
from tests.models.scripted_server import Scripted, Serve, call, chunk, sse
from toolbox import (
    AnthropicChatModel,
    ChatRequest,
    CompleteResponse,
    CompleteToolCall,
    ModelConnectionError,
    ModelError,
    ModelHttpError,
    ModelProtocolError,
    OpenAiChatModel,
    PartialResponse,
    PydanticAiChatModel,
    ToolSpecification,
    UserMessage,
)
from toolbox.chat import ChatModel
from toolbox.chat_streams import answer_stream
from toolbox.models.selection import NamedModels
from toolbox.settings import ToolboxSettings
from toolbox.testing import ScriptedChatModel

pytestmark = pytest.mark.anyio

HI = ChatRequest([UserMessage("Hi")])
ADD = ToolSpecification("add", "Adds")
Pieces: TypeAlias = tuple[list[str], BaseException | None]


def delta(text: str) -> dict[str, Any]:
    return {"type": "response.output_text.delta", "output_index": 0, "content_index": 0, "delta": text}


def chat_pieces(*texts: str) -> list[dict[str, Any]]:
    return [chunk({"content": each}) for each in texts]


def response_pieces(*texts: str) -> list[dict[str, Any]]:
    return [delta(each) for each in texts]


def message_pieces(*texts: str) -> list[dict[str, Any]]:
    start = [messages_api.started(), messages_api.start(0, messages_api.text(""))]
    return [*start, *(messages_api.said(0, each) for each in texts)]


WIRES: dict[str, Callable[..., list[dict[str, Any]]]] = {
    "chat": chat_pieces,
    "responses": response_pieces,
    "anthropic": message_pieces,
}
wires = pytest.mark.parametrize("wire", WIRES)


def model_of(wire: str, url: str, **more: Any) -> OpenAiChatModel | AnthropicChatModel:
    more = {"max_retries": 0} | more
    if wire == "anthropic":
        return AnthropicChatModel("m", base_url=url.removesuffix("/v1"), **more)
    return OpenAiChatModel("m", url, wire="responses" if wire == "responses" else "chat", **more)


def one_block(*values: Any, end: bytes = b"", **more: Any) -> Scripted:
    """These events and bytes in one network block."""
    block = b"".join(sse(*values, done=False)) + end
    return Scripted(chunks=[block], content_type="text/event-stream", **more)


async def received(model: ChatModel) -> Pieces:
    texts: list[str] = []
    try:
        async for event in answer_stream(model, HI):
            assert not isinstance(event, CompleteResponse)
            texts += [event.text] if isinstance(event, PartialResponse) else []
    except ModelError as error:
        return texts, error
    return texts, None


FAILED = {"error": {"type": "overloaded_error", "message": "overloaded", "code": 529}}
BROKEN = b'data: {"choices": [\n\n'


@wires
@pytest.mark.parametrize(
    ("end", "error"),
    [
        (f"event: error\ndata: {json.dumps(FAILED)}\n\n".encode(), ModelHttpError),
        (BROKEN, ModelProtocolError),
        (b"", ModelProtocolError),
    ],
    ids=["an error event", "an event that is not JSON", "the end"],
)
async def test_pieces_in_the_block_of_an_error_arrive(
    serve: Serve, wire: str, end: bytes, error: type[ModelError]
) -> None:
    server = await serve([one_block(*WIRES[wire]("Hel", "lo"), end=end)])

    texts, found = await received(model_of(wire, server.url))

    assert texts == ["Hel", "lo"]
    assert type(found) is error


@wires
async def test_a_piece_in_an_unfinished_line_at_the_end_arrives(serve: Serve, wire: str) -> None:
    *whole, last = WIRES[wire]("Hel", "lo")
    server = await serve([one_block(*whole, end=b"data: " + json.dumps(last).encode())])

    texts, found = await received(model_of(wire, server.url))

    assert texts == ["Hel", "lo"]
    assert type(found) is ModelProtocolError


@wires
@pytest.mark.parametrize("transport", ["aiohttp", "httpx2"])
async def test_pieces_arrive_before_the_error_of_a_broken_connection(serve: Serve, wire: str, transport: Any) -> None:
    server = await serve([one_block(*WIRES[wire]("Hel", "lo"), cut=True)])
    model = model_of(wire, server.url, transport=transport)

    texts, found = await received(model)
    await model.aclose()

    assert texts == ["Hel", "lo"]
    assert type(found) is ModelConnectionError


@wires
async def test_pieces_in_the_block_that_exceeds_the_size_limit_arrive(serve: Serve, wire: str) -> None:
    pieces = WIRES[wire]("Hel", "lo", "x" * 5000)
    server = await serve([one_block(*pieces)])

    texts, found = await received(model_of(wire, server.url, max_reply_bytes=3000))

    assert texts == ["Hel", "lo"]
    assert isinstance(found, ModelProtocolError)
    assert "3000 bytes" in str(found)


async def test_pieces_of_a_library_model_arrive_before_its_error(serve: Serve) -> None:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    server = await serve([one_block(*chat_pieces("Hel", "lo"), FAILED)])
    provider = OpenAIProvider(base_url=server.url, api_key="key-of-the-test")

    model = PydanticAiChatModel(OpenAIChatModel("gpt-4o", provider=provider))

    texts, found = await received(model)
    await model.aclose()

    assert texts == ["Hel", "lo"]
    assert found is not None


async def test_a_complete_call_arrives_before_the_error_in_its_block(serve: Serve) -> None:
    calls = [call("add", '{"a": 1}', id="c1", index=0), call("add", '{"a"', id="c2", index=1)]
    values = [chunk({"tool_calls": [each]}) for each in calls]
    server = await serve([one_block(*values, FAILED)])

    names: list[str] = []
    with pytest.raises(ModelHttpError):
        async for event in model_of("chat", server.url).stream(ChatRequest([UserMessage("Hi")], (ADD,))):
            names += [event.request.id] if isinstance(event, CompleteToolCall) else []

    assert names == ["c1"]


# --- repeated requests


@pytest.mark.parametrize("is_whole", [True, False], ids=["a whole event", "half an event"])
@wires
async def test_bytes_of_a_connection_that_broke_are_not_read_again(serve: Serve, wire: str, is_whole: bool) -> None:
    event = b"data: " + json.dumps(WIRES[wire]("Hel")[-1]).encode()
    first = Scripted(chunks=[event if is_whole else event[:-9]], content_type="text/event-stream", cut=True)
    server = await serve([first, one_block(*WIRES[wire]("Hel"), FAILED)])
    model = model_of(wire, server.url, max_retries=1)

    texts, found = await received(model)
    await model.aclose()

    assert texts == ["Hel"]
    assert isinstance(found, ModelHttpError)
    assert len(server.requests) == 2


async def test_a_refused_option_repeats_the_request_only_before_the_first_piece(serve: Serve) -> None:
    refused = {"error": {"message": "unknown field stream_options", "code": 400}}
    complete = one_block(chunk({"content": "ok"}), chunk({}, "stop"))
    server = await serve([one_block(*chat_pieces("Hel"), refused), complete, one_block(refused), complete])
    model = model_of("chat", server.url)

    texts, found = await received(model)

    assert texts == ["Hel"]
    assert isinstance(found, ModelHttpError)
    assert len(server.requests) == 1


async def test_another_model_is_not_asked_after_a_piece_in_the_block_of_an_error(serve: Serve) -> None:
    server = await serve([one_block(*chat_pieces("Hel"), FAILED), one_block(FAILED)])
    other = ScriptedChatModel(["Goodbye"])
    first = OpenAiChatModel("m", server.url, fallback=("other",), max_retries=0)
    model = NamedModels({"default": first, "other": other}, ToolboxSettings()).find()

    texts, found = await received(model)

    assert (texts, type(found)) == (["Hel"], ModelHttpError)
    assert other.requests == []
