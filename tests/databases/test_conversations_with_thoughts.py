"""Conversations with thoughts and tools survive every memory store, and go on in another process."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

import pytest

from tests.databases.conftest import open_store
from tests.models.messages_api import message, text, thinking, tool_use
from tests.models.scripted_server import serving
from toolbox import (
    AnthropicChatModel,
    ChatMemoryStore,
    Container,
    InMemoryChatMemoryStore,
    MemoryId,
    MessageWindow,
    register_ai_service,
    tool,
)

pytestmark = pytest.mark.anyio

SIGNED = [thinking("Hm.", "sig/+="), {"type": "redacted_thinking", "data": "x"}, tool_use("add", {"a": 1})]
ANSWER = [thinking("So.", "sig2"), text("It is 2.")]

Opening = Callable[[], AbstractAsyncContextManager[Any]]


class Sums:
    @tool
    def add(self, a: int) -> str:
        """Add 1."""
        return str(a + 1)


@register_ai_service(tools=Sums, chat_memory=MessageWindow(20))
class Chat(Protocol):
    async def ask(self, who: MemoryId[str], question: str) -> str: ...


@pytest.fixture(params=["in memory", "sqlite_url", "postgres_url", "redis_url"])
def opening(request: pytest.FixtureRequest) -> Opening:
    """Opens a store: each time a new one, on the same data."""
    if request.param != "in memory":
        url = request.getfixturevalue(request.param)
        return lambda: open_store(url)
    kept = InMemoryChatMemoryStore()

    @asynccontextmanager
    async def same() -> AsyncIterator[Any]:
        yield kept

    return same


async def test_a_conversation_with_thoughts_and_tools_continues_after_every_store(opening: Opening) -> None:
    replies = [message(*SIGNED, stop="tool_use"), message(*ANSWER), message(text("Yes."))]
    async with serving(replies) as server:
        for question in ("1 + 1?", "Really?"):  # each with a new model and a new store, as in another process
            model = AnthropicChatModel("claude-sonnet-4-6", base_url=server.url.removesuffix("/v1"), reasoning="low")
            async with opening() as store:
                container = Container(models={"default": model}).bind(ChatMemoryStore, InMemoryChatMemoryStore)
                if not isinstance(store, InMemoryChatMemoryStore):
                    container = Container(models={"default": model})
                container = container.register_instance(store).register(Sums, Chat)
                async with container:
                    await container.get(Chat).ask("ada with thoughts", question)
            await model.aclose()

    turns = server.requests[2]["messages"]
    assert [each["role"] for each in turns] == ["user", "assistant", "user", "assistant", "user"]
    assert turns[1]["content"] == SIGNED
    assert turns[2]["content"] == [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "2"}]
    assert turns[3]["content"] == ANSWER
    assert turns[4]["content"][-1]["text"] == "Really?"
