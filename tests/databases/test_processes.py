"""Several processes in one conversation, and one that is killed at the worst moment."""

import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from toolbox import AiMessage, ChatMemoryKey, ChatMemoryStore, ChatRequest, Container, UserMessage, sql

from . import conversation
from .conftest import end_lease
from .forge import Reporting

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that fork"),
    pytest.mark.timeout(400),  # starts processes
]


@pytest.fixture
async def engine(store_url: str, sqlite_url: str) -> AsyncIterator[AsyncEngine]:
    """The database of the notes: that of the conversations, or another one beside Redis."""
    url = sqlite_url if store_url.startswith("unix:") else store_url
    async with sql.open_engine(url) as engine:
        async with engine.begin() as connection:
            await connection.execute(text("DROP TABLE IF EXISTS notes"))
            await connection.execute(text("CREATE TABLE notes (note VARCHAR)"))
        yield engine


@pytest.fixture
def places(store_url: str, sqlite_url: str, engine: AsyncEngine) -> tuple[str, str]:
    """The database with the conversations and the notes."""
    return store_url, sqlite_url if store_url.startswith("unix:") else store_url


@pytest.fixture
def process(begin_reporting: Callable[..., Reporting]) -> Callable[..., AbstractContextManager[tuple[Reporting, Any]]]:
    """Runs `conversation` in a process; yields the process and a connection to it."""

    @contextmanager
    def run(*arguments: str) -> Iterator[tuple[Reporting, Any]]:
        running = begin_reporting(conversation.converse.__name__, *arguments)
        try:
            yield running, running.connection
        finally:
            running.kill()

    return run


@pytest.fixture
async def here(places: tuple[str, str]) -> AsyncIterator[Container]:
    """The same service in this process."""

    def reply(request: ChatRequest) -> str:
        return "answered here"

    async with AsyncExitStack() as stack:
        yield await stack.enter_async_context(conversation.container_of(*places, reply))


async def take(container: Container, memory_id: str) -> bool:
    """Return True if no process has a lease on the conversation."""
    store: Any = await container.aget(ChatMemoryStore)
    return bool(await store.take(ChatMemoryKey.of(conversation.Assistant, memory_id), "a try", 0.001))


async def notes_in(engine: AsyncEngine) -> list[str]:
    async with engine.connect() as connection:
        return sorted((await connection.scalars(text("SELECT note FROM notes"))).all())


async def test_two_processes_write_one_conversation_and_lose_nothing(
    places: tuple[str, str], here: Container, process: Any, request: pytest.FixtureRequest
) -> None:
    memory_id, calls = request.node.name, 12

    with (
        process(*places, memory_id, "count", "one", str(calls)) as one,
        process(*places, memory_id, "count", "other", str(calls)) as other,
    ):
        for _, connection in (one, other):
            assert connection.recv() == "ready"
        for _, connection in (one, other):
            connection.send("go")
        for _, connection in (one, other):
            assert connection.recv() == "done"

    kept = await here.chat_memory(conversation.Assistant, memory_id).messages()
    pairs = list(zip(kept[::2], kept[1::2], strict=True))
    assert len(pairs) == 2 * calls
    for question, answer in pairs:
        assert isinstance(question, UserMessage)
        assert answer == AiMessage(f"answer to {question.text}")
    for name in ("one", "other"):
        texts = [question.text for question, _ in pairs if question.text.startswith(f"{name} ")]  # type: ignore[union-attr]
        assert texts == [f"{name} {number}" for number in range(calls)]


@pytest.mark.parametrize(
    ("note", "where", "kept"), [("never committed", "in the tool", []), ("committed", "after the tool", ["committed"])]
)
async def test_another_process_continues_after_one_is_killed(
    places: tuple[str, str],
    process: Any,
    engine: AsyncEngine,
    here: Container,
    request: pytest.FixtureRequest,
    note: str,
    where: str,
    kept: list[str],
) -> None:
    """The tool's work is kept whole or not at all, the conversation has nothing of the call, and is free again."""
    memory_id = request.node.name
    await here.get(conversation.Assistant).chat(memory_id, "before")

    with process(*places, memory_id, note) as (running, connection):
        assert connection.recv() == where
        if kept:  # else SQLite keeps everybody from writing at all
            assert not await take(here, memory_id)
        running.kill()
    await end_lease(await here.aget(ChatMemoryStore), ChatMemoryKey.of(conversation.Assistant, memory_id))
    answer = await here.get(conversation.Assistant).chat(memory_id, "afterwards")

    assert answer == "answered here"
    messages = await here.chat_memory(conversation.Assistant, memory_id).messages()
    assert [each.text for each in messages] == ["before", "answered here", "afterwards", "answered here"]
    assert await notes_in(engine) == kept
