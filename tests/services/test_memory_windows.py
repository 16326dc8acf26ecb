"""Memory ids, message windows, repair of conversations and the order of turns."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from itertools import dropwhile
from typing import Any, Protocol

import pytest
from hypothesis import given, settings

from tests.generated import below, built, lists, made, sampled
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
from toolbox.services.memory import ChatMemories
from toolbox.services.windows import Window, estimate_tokens, keep_newest, repaired
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
    window = TokenWindow(7, count=lambda message: 1)

    assert window.newest([*ROUND, *ROUND]) == tuple(ROUND)
    assert window.newest(ROUND) == tuple(ROUND)
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


# --- where a window cuts


class Last:
    """A window of the program's own, which knows nothing of turns."""

    def __init__(self, size: int) -> None:
        self.size = size

    def newest(self, messages: Sequence[Message]) -> list[Message]:
        return list(messages[len(messages) - self.size :] if self.size < len(messages) else messages)


class FirstAndLast(Last):
    """A window that keeps the first message, too: what it leaves out of the middle is its own decision."""

    def newest(self, messages: Sequence[Message]) -> list[Message]:
        return list(messages) if len(messages) <= self.size else [messages[0], *super().newest(messages)]


class Forgetful(Last):
    def newest(self, messages: Sequence[Message]) -> list[Message]:
        return [] if len(messages) > self.size else list(messages)


def window_of(kind: int, size: int) -> Any:
    tokens = TokenWindow(10 * (1 + size), count=lambda message: 4 + 3 * len(message.text or ""))
    return (MessageWindow(1 + size), tokens, Last(size), FirstAndLast(size), Forgetful(size))[kind]


def one_turn(rounds: list[list[str]], question: str) -> list[Message]:
    """Return a question, rounds of tool calls with their results, and an answer."""
    turn: list[Message] = [UserMessage(question)]
    for number, names in enumerate(rounds):
        requests = [ToolExecutionRequest(f"{number}-{index}", name, "{}") for index, name in enumerate(names)]
        turn += [AiMessage(None, requests), *(ToolExecutionResultMessage.of(each, "found") for each in requests)]
    return [*turn, AiMessage("answer")]


turns = lists(built(one_turn, lists(sampled(["look"], ["find", "look"], ["look"] * 3), 3), sampled("q", "", "yes")), 6)
greetings = lists(built(AiMessage, sampled("Welcome!", "How are you?")), 2)


@settings(deadline=None)
@given(made(greetings, turns, below(5), below(12), size=64))
def test_every_window_cuts_before_a_user_message_and_keeps_the_newest_turn(drawn: tuple[Any, ...]) -> None:
    greeting, said, kind, size = drawn
    log, window = (*greeting, *(message for turn in said for message in turn)), window_of(kind, size)

    kept = keep_newest(window, log)

    if kept != log:
        assert not kept or isinstance(kept[0], UserMessage)
    if said and not isinstance(window, FirstAndLast):
        assert kept[-len(said[-1]) :] == tuple(said[-1])
    if isinstance(window, MessageWindow | TokenWindow):
        assert kept == window.newest(log) == log[len(log) - len(kept) :]
        assert keep_newest(window, kept) == kept


@settings(deadline=None)
@given(made(turns, below(5), below(12), below(60), size=64))
async def test_no_call_or_result_is_sent_first_wherever_an_earlier_release_has_cut(drawn: tuple[Any, ...]) -> None:
    said, kind, size, at = drawn
    log = [message for turn in said for message in turn]
    store = InMemoryChatMemoryStore()
    await store.update_messages(KEY, log[at:])

    loaded = await ChatMemories(store).load(KEY, window_of(kind, size))

    assert not loaded or isinstance(loaded[0], UserMessage) or loaded[0] == log[at] == AiMessage("answer")


@settings(deadline=None)
@given(made(turns, sampled(*range(1, 12)), size=64))
async def test_no_answer_is_sent_first_if_an_earlier_release_has_filled_the_window(drawn: tuple[Any, ...]) -> None:
    said, size = drawn
    log = [message for turn in said for message in turn]
    left = tuple(dropwhile(lambda each: isinstance(each, ToolExecutionResultMessage), log[-size:]))
    store = InMemoryChatMemoryStore()
    await store.update_messages(KEY, left)

    loaded = await ChatMemories(store).load(KEY, MessageWindow(size))

    if 2 * len(left) > size:
        assert not loaded or isinstance(loaded[0], UserMessage)


@pytest.mark.parametrize("window", [MessageWindow(6), MessageWindow(20), TokenWindow(500), Last(9)])
async def test_a_greeting_of_the_program_is_sent_until_the_window_is_full(window: Window) -> None:
    model = ScriptedChatModel(["ok"] * 12)

    @register_ai_service(chat_memory=window)
    class Travels(Protocol):
        async def ask(self, room: MemoryId[str], question: str) -> str: ...

    async with Container(models={"default": model}).register(Travels) as container:
        await container.chat_memory(Travels, "r").add(AiMessage("Where do you want to go?"))
        for _ in range(12):
            await container.get(Travels).ask("r", "Rome " * 20)

    first = [request.messages[0] for request in model.requests]
    assert first[:2] == [AiMessage("Where do you want to go?")] * 2
    assert isinstance(first[-1], UserMessage)


class Order:
    """Records the visits of a conversation in their order."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.inside = 0

    async def visit(self, memories: ChatMemories, name: str, key: ChatMemoryKey = KEY) -> None:
        async with memories.turn(key):
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
        async with memories.turn(KEY):
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
    assert memories._turns._waiting == {}


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
    assert memories._turns._waiting == {}


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
