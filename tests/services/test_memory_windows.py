"""Memory ids, message windows, repair of conversations and the order of turns."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import pytest
from hypothesis import given, settings

from tests.generated import below, lists, made, sampled
from toolbox import (
    AiMessage,
    ChatMemoryKey,
    ChatMemoryStore,
    Container,
    InMemoryChatMemoryStore,
    InvalidMemoryIdError,
    MemoryId,
    Message,
    MessageWindow,
    SystemMessage,
    TokenWindow,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    UserMessage,
    register_ai_service,
)
from toolbox.conversations.memories import ChatMemories
from toolbox.conversations.views import estimate_tokens, repaired
from toolbox.testing import ScriptedChatModel

pytestmark = pytest.mark.anyio

REQUEST = ToolExecutionRequest("1", "add", "{}")
ROUND: list[Message] = [
    UserMessage("a"),
    AiMessage(None, [REQUEST]),
    ToolExecutionResultMessage.of(REQUEST, "5"),
    AiMessage("five"),
]
KEY = ChatMemoryKey("Service", "1")


class Store(InMemoryChatMemoryStore):
    """Records the requested keys."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[ChatMemoryKey] = []

    async def get_messages(self, key: ChatMemoryKey) -> Sequence[Message]:
        self.asked.append(key)
        return await super().get_messages(key)


@register_ai_service
class Assistant(Protocol):
    async def ask(self, room: MemoryId[str], question: str) -> str: ...
    def wait(self, room: MemoryId[str], question: str) -> str: ...
    def stream(self, room: MemoryId[str], question: str) -> AsyncIterator[str]: ...


@pytest.mark.parametrize("memory_id", ["a\0b", "\udc80", "x" * 3000, "日" * 1000])
async def test_invalid_memory_ids_are_rejected_before_the_store_is_called(memory_id: str) -> None:
    store, model = Store(), ScriptedChatModel([])
    container = Container(models={"default": model}).register(Assistant)
    container.register_instance(store, ChatMemoryStore)
    async with container:
        service = container.get(Assistant)
        with pytest.raises(InvalidMemoryIdError) as caught:
            await service.ask(memory_id, "q")
        with pytest.raises(ValueError, match="invalid memory id"):
            await asyncio.to_thread(service.wait, memory_id, "q")
        with pytest.raises(InvalidMemoryIdError):
            await anext(aiter(service.stream(memory_id, "q")))
        with pytest.raises(InvalidMemoryIdError):
            container.chat_memory(Assistant, memory_id)
    with pytest.raises(InvalidMemoryIdError):
        ChatMemoryKey("Service", memory_id)

    assert caught.value.memory_id == memory_id
    assert len(str(caught.value)) < 1000
    str(caught.value).encode()
    assert store.asked == []
    assert model.requests == []


def test_token_window_keeps_the_messages_that_fit() -> None:
    window = TokenWindow(6, count=lambda message: 1)

    assert window.newest([*ROUND, *ROUND]) == tuple(ROUND)
    assert TokenWindow(1, count=lambda message: 2).newest(ROUND) == tuple(ROUND)  # the newest turn stays
    assert estimate_tokens(UserMessage("four")) == 5


def test_unanswered_tool_calls_get_an_error_result() -> None:
    other = ToolExecutionRequest("2", "sub", "{}")
    stored = [UserMessage("a"), AiMessage(None, [REQUEST, other]), ToolExecutionResultMessage.of(REQUEST, "5")]

    fixed = repaired([*stored, UserMessage("b")])

    assert fixed[:3] == tuple(stored)
    answer = fixed[3]
    assert isinstance(answer, ToolExecutionResultMessage)
    assert (answer.id, answer.tool_name, answer.is_error) == ("2", "sub", True)
    assert fixed[4] == UserMessage("b")


def test_tool_results_without_calls_and_system_messages_are_removed() -> None:
    assert repaired([ToolExecutionResultMessage.of(REQUEST, "5"), SystemMessage("x"), UserMessage("a")]) == (
        UserMessage("a"),
    )


messages = lists(
    sampled(
        UserMessage("u"),
        AiMessage("a"),
        AiMessage(None, [ToolExecutionRequest("1", "x", "{}")]),
        AiMessage(None, [ToolExecutionRequest("1", "x", "{}"), ToolExecutionRequest("2", "y", "{}")]),
        ToolExecutionResultMessage("1", "x", "r"),
        ToolExecutionResultMessage("2", "y", "r"),
    ),
    12,
)


@settings(deadline=None)
@given(made(messages, size=16))
def test_repaired_conversations_answer_every_tool_call_exactly_once(drawn: tuple[list[Message]]) -> None:
    [stored] = drawn
    waiting: set[str] = set()
    for message in repaired(stored):
        if isinstance(message, ToolExecutionResultMessage):
            waiting.remove(message.id)
        else:
            assert not waiting
        if isinstance(message, AiMessage):
            waiting = {each.id for each in message.tool_execution_requests}
    assert not waiting


@settings(deadline=None)
@given(made(messages, below(6), size=16))
def test_valid_conversations_are_not_changed_by_the_repair(drawn: tuple[list[Message], int]) -> None:
    stored, size = drawn
    once = repaired(MessageWindow(1 + size).newest(repaired(stored)))

    assert repaired(once) == once


class Order:
    """Records the visits of a conversation in their order."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.inside = 0

    async def visit(self, memories: ChatMemories, name: str, key: ChatMemoryKey = KEY) -> None:
        async with memories.enter(key):
            self.inside += 1
            assert self.inside == 1
            self.seen.append(name)
            try:
                await asyncio.sleep(0)
            finally:
                self.inside -= 1


async def test_turns_are_first_come_first_served() -> None:
    memories, order = ChatMemories(InMemoryChatMemoryStore()), Order()

    await asyncio.gather(*(order.visit(memories, str(number)) for number in range(20)))

    assert order.seen == [str(number) for number in range(20)]


async def test_cancelled_waiters_do_not_keep_the_turn() -> None:
    memories, order = ChatMemories(InMemoryChatMemoryStore()), Order()
    leave = asyncio.Event()

    async def first() -> None:
        async with memories.enter(KEY):
            await leave.wait()

    holder = asyncio.create_task(first())
    await asyncio.sleep(0)
    waiting = [asyncio.create_task(order.visit(memories, name)) for name in "abc"]
    await asyncio.sleep(0)
    waiting[0].cancel()
    waiting[1].cancel()
    leave.set()
    await asyncio.gather(holder, *waiting, return_exceptions=True)

    assert order.seen == ["c"]
    assert memories._queues._waiting == {}


@pytest.mark.parametrize("steps", range(6))
async def test_a_turn_cancelled_at_any_moment_is_passed_on(steps: int) -> None:
    memories, order = ChatMemories(InMemoryChatMemoryStore()), Order()
    holder = asyncio.create_task(order.visit(memories, "a"))
    waiting = asyncio.create_task(order.visit(memories, "b"))
    last = asyncio.create_task(order.visit(memories, "c"))
    for _ in range(steps):
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(holder, waiting, last, return_exceptions=True)

    assert order.seen[-1] == "c"
    assert memories._queues._waiting == {}


def test_turns_work_across_event_loops() -> None:
    memories, order = ChatMemories(InMemoryChatMemoryStore()), Order()

    async def visits(name: str) -> None:
        for number in range(50):
            await order.visit(memories, f"{name}{number}")

    threads = [threading.Thread(target=lambda name=name: asyncio.run(visits(name))) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(order.seen) == 200
