"""A tool call at the end of a reply that the token limit cut does not run, even if a server completed its JSON."""

from collections.abc import AsyncIterator
from typing import Any, Protocol

import pytest
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

from tests.models import messages_api
from tests.models.messages_api import END, ending, events, start, started, stop
from tests.models.scripted_server import Scripted, Serve, call, chunk, completion, stream
from toolbox import (
    AnthropicChatModel,
    ModelTruncatedError,
    OpenAiChatModel,
    PydanticAiChatModel,
    create_ai_service,
    tool,
)
from toolbox.chat import ChatModel

pytestmark = pytest.mark.anyio

DELETE = messages_api.tool_use("delete", {"path": "/"})
OBJECT = call("delete", {"path": "/"}, id="c1", index=0, type="function")


class Cleaner(Protocol):
    async def clean(self, task: str) -> str: ...
    def clean_slowly(self, task: str) -> AsyncIterator[str]: ...


class Disk:
    def __init__(self) -> None:
        self.deleted: list[str] = []

    @tool
    def delete(self, path: str) -> str:
        """Delete a folder."""
        self.deleted.append(path)
        return "deleted"


async def assert_nothing_is_deleted(model: ChatModel, streamed: bool) -> None:
    disk = Disk()
    cleaner = create_ai_service(Cleaner, chat_model=model, tools=[disk])

    with pytest.raises(ModelTruncatedError):
        if streamed:
            async for _ in cleaner.clean_slowly("Clean up."):
                pass
        else:
            await cleaner.clean("Clean up.")

    assert disk.deleted == []


@pytest.mark.parametrize(
    ("reply", "streamed"),
    [
        (messages_api.message(DELETE, stop="max_tokens"), False),
        (messages_api.message(messages_api.text("So"), DELETE, stop="max_tokens"), False),
        (messages_api.streamed(DELETE, stop="max_tokens"), True),
        (events(started(), start(0, DELETE), stop(0), ending("max_tokens"), END), True),
        (messages_api.message(DELETE, stop="max_tokens"), True),
    ],
    ids=["whole", "after a text", "streamed", "a whole block in a stream", "a whole reply for a stream"],
)
async def test_a_cut_call_of_the_messages_api_does_not_run(serve: Serve, reply: Scripted, streamed: bool) -> None:
    server = await serve([reply])
    model = AnthropicChatModel("m", base_url=server.url.removesuffix("/v1"))

    await assert_nothing_is_deleted(model, streamed)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_cut_call_with_arguments_that_the_server_parsed_does_not_run(serve: Serve, streamed: bool) -> None:
    whole = completion({"role": "assistant", "content": None, "tool_calls": [OBJECT]}, "length")
    server = await serve([stream(chunk({"tool_calls": [OBJECT]}), chunk({}, "length")) if streamed else whole])

    await assert_nothing_is_deleted(OpenAiChatModel("m", server.url), streamed)


@pytest.mark.parametrize("arguments", [{"path": "/"}, '{"path": "/"}'], ids=["an object", "a text"])
async def test_a_cut_call_of_a_library_model_does_not_run(arguments: Any) -> None:
    def reply(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        return ModelResponse([TextPart("So"), ToolCallPart("delete", arguments, "c1")], finish_reason="length")

    await assert_nothing_is_deleted(PydanticAiChatModel(FunctionModel(reply)), streamed=False)


async def test_a_cut_call_in_the_stream_of_a_library_model_does_not_run(serve: Serve) -> None:
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    server = await serve([messages_api.streamed(messages_api.text("So"), DELETE, stop="max_tokens")])
    provider = AnthropicProvider(base_url=server.url.removesuffix("/v1"), api_key="key-of-the-test")

    model = PydanticAiChatModel(AnthropicModel("claude-test", provider=provider))

    await assert_nothing_is_deleted(model, streamed=True)
    await model.aclose()


async def test_a_call_before_the_cut_text_runs(serve: Serve) -> None:
    cut = messages_api.message(DELETE, messages_api.text("And"), stop="max_tokens")
    server = await serve([cut, messages_api.message(messages_api.text("Done."))])
    disk = Disk()
    model = AnthropicChatModel("m", base_url=server.url.removesuffix("/v1"))

    answer = await create_ai_service(Cleaner, chat_model=model, tools=[disk]).clean("Clean up.")

    assert (answer, disk.deleted) == ("Done.", ["/"])
