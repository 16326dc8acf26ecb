"""The promises of a `ChatMemoryStore`, a check for each: messages, distinct conversations, the optional lock.

Not here: the promises themselves (`conversations.stores`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeAlias, cast
from uuid import uuid4

from ..chat import AiMessage, Message, SystemMessage, ToolExecutionRequest, ToolExecutionResultMessage, UserMessage
from ..contents import ImageContent, TextContent
from ..conversations.keys import ChatMemoryKey
from ..conversations.stores import ChatMemoryStore
from . import DISTINCT_TEXTS, PATIENCE

NewConversationStore: TypeAlias = Callable[[], ChatMemoryStore]
"""Creates a store of the same conversations: that of another process, or the same again."""
ConversationStoreCheck: TypeAlias = Callable[[NewConversationStore], Awaitable[None]]


class LockingStore(ChatMemoryStore, Protocol):
    """A store of conversations with the optional `lock`."""

    def lock(self, key: ChatMemoryKey) -> AbstractAsyncContextManager[None]:
        """Let one caller at a time into a conversation."""
        ...


REQUEST = ToolExecutionRequest("1", "add", '{"a": 1}', {"thought": "x"})
EVERYTHING: tuple[Message, ...] = (
    SystemMessage("Be brief."),
    UserMessage([TextContent("what is this? \U0001f99c \x00 'quoted' \\"), ImageContent(data=b"\x89PNG\x00")]),
    AiMessage(None, [REQUEST], reasoning="hm", attributes={"signature": "abc"}),
    ToolExecutionResultMessage("1", "add", "", is_error=True, attributes={"status": 422}),
    AiMessage("lone \ud800 surrogate"),
)
"""All kinds of messages, with texts that some formats cannot hold."""


def _new_key(memory_id: str = "room 7") -> ChatMemoryKey:
    """Return a conversation of a service that no other check uses."""
    return ChatMemoryKey(f"shop.Assistant{uuid4().hex}", memory_id)


def _open_two_locking(new_store: NewConversationStore) -> tuple[LockingStore, LockingStore] | None:
    """Return the stores of two processes; None if they have no `lock`, which is optional."""
    stores = new_store(), new_store()
    return cast("tuple[LockingStore, LockingStore]", stores) if hasattr(stores[0], "lock") else None


async def _add_message(store: LockingStore, key: ChatMemoryKey, text: str) -> None:
    """Add a message as a call does: read, then write everything."""
    async with store.lock(key):
        before = await store.get_messages(key)
        await asyncio.sleep(0)
        await store.update_messages(key, [*before, UserMessage(text)])


async def _read_messages(store: ChatMemoryStore, key: ChatMemoryKey) -> list[Message]:
    return list(await store.get_messages(key))


async def messages_come_back_as_they_were(new_store: NewConversationStore) -> None:
    """All kinds of messages, in this store and in that of another process."""
    store, other, key = new_store(), new_store(), _new_key()

    await store.update_messages(key, EVERYTHING)

    assert await _read_messages(store, key) == [*EVERYTHING]
    assert await _read_messages(other, key) == [*EVERYTHING]


async def an_unknown_conversation_is_empty(new_store: NewConversationStore) -> None:
    """Also after it was deleted."""
    store, key = new_store(), _new_key()

    assert await _read_messages(store, key) == []
    await store.delete_messages(key)
    assert await _read_messages(store, key) == []


async def messages_are_replaced_and_deleted(new_store: NewConversationStore) -> None:
    """`update_messages` gets all messages of the conversation each time."""
    store, key = new_store(), _new_key()

    await store.update_messages(key, [UserMessage("a")])
    await store.update_messages(key, [UserMessage("b"), AiMessage("c")])
    assert await _read_messages(store, key) == [UserMessage("b"), AiMessage("c")]
    await store.delete_messages(key)
    assert await _read_messages(store, key) == []
    await store.update_messages(key, [UserMessage("d")])
    assert await _read_messages(store, key) == [UserMessage("d")]


async def memory_ids_can_be_any_text_and_never_collide(new_store: NewConversationStore) -> None:
    """A memory id often comes from a client."""
    store = new_store()
    service = _new_key().service
    keys = [ChatMemoryKey(service, each) for each in (*DISTINCT_TEXTS, "x" * 1000)]
    for key in keys:
        await store.update_messages(key, [UserMessage(key.memory_id)])

    for key in keys:
        assert await _read_messages(store, key) == [UserMessage(key.memory_id)]
        assert await _read_messages(store, ChatMemoryKey("another service", key.memory_id)) == []


async def a_locked_conversation_is_read_and_written(new_store: NewConversationStore) -> None:
    """As a call does it; the messages are there afterwards."""
    if (stores := _open_two_locking(new_store)) is None:
        return
    (store, other), key = stores, _new_key()

    async with store.lock(key):
        await store.update_messages(key, [UserMessage("a")])
        await store.delete_messages(key)
        assert await _read_messages(store, key) == []
        await store.update_messages(key, [UserMessage("b")])

    assert await _read_messages(other, key) == [UserMessage("b")]


async def no_message_of_concurrent_calls_is_lost(new_store: NewConversationStore) -> None:
    """A lock lets one caller at a time into a conversation, over all processes."""
    if (stores := _open_two_locking(new_store)) is None:
        return
    texts, key = [str(number) for number in range(24)], _new_key()

    await asyncio.gather(*(_add_message(stores[int(text) % 2], key, text) for text in texts))

    kept = [each.text for each in await _read_messages(stores[0], key) if isinstance(each, UserMessage)]
    assert sorted(kept, key=int) == texts


async def other_conversations_do_not_wait(new_store: NewConversationStore) -> None:
    """A lock is for one conversation."""
    if (stores := _open_two_locking(new_store)) is None:
        return
    store, _ = stores

    async with asyncio.timeout(PATIENCE), store.lock(_new_key()), store.lock(_new_key("room 8")):
        pass


async def a_waiting_call_continues_when_the_lock_is_released(new_store: NewConversationStore) -> None:
    """And not before."""
    if (stores := _open_two_locking(new_store)) is None:
        return
    (one, other), key = stores, _new_key()
    entered = asyncio.Event()

    async def enter() -> None:
        async with other.lock(key):
            entered.set()

    async with one.lock(key):
        waiting = asyncio.create_task(enter())
        await asyncio.sleep(0.1)  # a wrong lock lets it in during this time
        assert not entered.is_set()
    await asyncio.wait_for(waiting, PATIENCE)


async def a_call_that_is_cancelled_releases_the_lock(new_store: NewConversationStore) -> None:
    """At any moment: a conversation that stays locked is lost."""
    if (stores := _open_two_locking(new_store)) is None:
        return
    store, other = stores
    for moment in range(8):
        key = _new_key()
        caller = asyncio.create_task(_add_message(store, key, "a"))
        for _ in range(2 * moment):
            await asyncio.sleep(0.0005)

        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)

        await asyncio.wait_for(_add_message(other, key, "b"), PATIENCE)
        assert (await _read_messages(other, key))[-1] == UserMessage("b")


async def a_waiting_call_that_gives_up_leaves_nothing(new_store: NewConversationStore) -> None:
    """It neither writes nor keeps its place."""
    if (stores := _open_two_locking(new_store)) is None:
        return
    (one, other), key = stores, _new_key()
    async with one.lock(key):
        waiting = asyncio.create_task(_add_message(other, key, "a"))
        await asyncio.sleep(0.1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    assert await _read_messages(one, key) == []
    await asyncio.wait_for(_add_message(other, key, "b"), PATIENCE)


CONVERSATION_STORE_CHECKS: tuple[ConversationStoreCheck, ...] = (
    messages_come_back_as_they_were,
    an_unknown_conversation_is_empty,
    messages_are_replaced_and_deleted,
    memory_ids_can_be_any_text_and_never_collide,
    a_locked_conversation_is_read_and_written,
    no_message_of_concurrent_calls_is_lost,
    other_conversations_do_not_wait,
    a_waiting_call_continues_when_the_lock_is_released,
    a_call_that_is_cancelled_releases_the_lock,
    a_waiting_call_that_gives_up_leaves_nothing,
)
