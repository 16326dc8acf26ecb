"""Stores of logs: the checks of all of them, and what a write costs."""

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import event

from tests.conversations.made_logs import make_turn
from tests.generated import Choices
from toolbox import ChatMemoryKey, IllegalConfigurationError, InMemoryChatMemoryStore, Message, UserMessage
from toolbox.conversations import FullHistory
from toolbox.conversations.log import LogWrite, Position, Turn, ViewNotes, entries_of, newest_entries
from toolbox.conversations.memories import ChatMemories
from toolbox.conversations.stores import LogStore

from .conftest import open_store
from .log_checks import (
    CHECKS,
    Check,
    append,
    conversations_are_listed_by_their_newest_turn,
    new_key,
    read,
    texts,
)

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["memory", "sqlite_url", "shared_postgres_url", "redis_url"])
async def new_log_store(request: pytest.FixtureRequest) -> AsyncIterator[Callable[[], Awaitable[LogStore]]]:
    """Opens stores of the same conversations, each like that of a separate process."""
    if request.param == "memory":
        store = InMemoryChatMemoryStore()

        async def same() -> LogStore:
            return store

        yield same
        return
    url = request.getfixturevalue(request.param)
    async with AsyncExitStack() as stack:

        async def make(**options: Any) -> LogStore:
            opened: LogStore = await stack.enter_async_context(open_store(url, **options))
            return opened

        yield make


def _is_redis(request: pytest.FixtureRequest) -> bool:
    return bool(request.node.callspec.params["new_log_store"] == "redis_url")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_it_keeps_the_promises_of_a_store_of_logs(
    check: Check, new_log_store: Any, request: pytest.FixtureRequest
) -> None:
    if check is conversations_are_listed_by_their_newest_turn and _is_redis(request):
        with pytest.raises(IllegalConfigurationError, match="SqlChatMemoryStore"):
            await check(new_log_store)
        return
    await check(new_log_store)


# --- what a write costs


@pytest.mark.parametrize("url", ["sqlite_url", "shared_postgres_url"])
async def test_a_turn_costs_the_same_number_of_statements_in_a_log_of_any_length(
    url: str, request: pytest.FixtureRequest
) -> None:
    async with open_store(request.getfixturevalue(url)) as store:
        key, statements = new_key(), list[str]()

        @event.listens_for(store._engine.sync_engine, "before_cursor_execute")
        def note(connection: Any, cursor: Any, statement: str, *_: object) -> None:
            statements.append(statement)

        counts = []
        for number in range(1, 60):
            await append(store, key, number)
            counts.append(len(statements))
            statements.clear()
        read = await store.read_since(key, lambda head: head.next_number - 3)

    assert len(set(counts[1:])) == 1
    assert counts[-1] <= 5
    assert read is not None
    assert len(read.turns) == 3


# --- the store in memory


async def test_the_store_in_memory_keeps_the_newest_messages() -> None:
    store, key = InMemoryChatMemoryStore(max_messages=5), new_key()
    await append(store, key, 1, 2, 3)
    assert await texts(store, key) == ["a1", "q2", "a2", "q3", "a3"]
    assert (await read(store, key)).head.messages == 5

    excerpt = await ChatMemories(store).load(key, FullHistory())
    assert [each.text for each in excerpt.messages] == ["q2", "a2", "q3", "a3"]
    with pytest.raises(ValueError, match="max_messages=0"):
        InMemoryChatMemoryStore(max_messages=0)


async def test_a_subclass_with_its_own_messages_is_used_as_a_store_of_messages() -> None:
    class Upper(InMemoryChatMemoryStore):
        async def get_messages(self, key: ChatMemoryKey) -> Sequence[Message]:
            return [UserMessage((each.text or "").upper()) for each in await super().get_messages(key)]

    store, key = Upper(), new_key()
    await append(store, key, 1)

    excerpt = await ChatMemories(store).load(key, FullHistory())
    assert [each.text for each in excerpt.messages] == ["Q1\nA1"]


# --- all stores do the same


@pytest.mark.parametrize("url", ["sqlite_url", "shared_postgres_url", "redis_url"])
async def test_any_sequence_of_writes_has_the_same_result_in_all_stores(
    url: str, request: pytest.FixtureRequest
) -> None:
    async with open_store(request.getfixturevalue(url)) as store:
        for seed in range(12):
            choices, key = Choices(random.Random(seed).randbytes(400)), new_key()
            model = InMemoryChatMemoryStore()
            for step in range(10):
                await write_both((model, store), key, choices, f"{key.service} {step}")
                assert await described(store, key) == await described(model, key), (seed, step)


async def write_both(stores: tuple[LogStore, LogStore], key: ChatMemoryKey, choices: Choices, name: str) -> None:
    """Do one random thing in both stores."""
    kind, run_id = choices.below(8), f"{key.service} run {choices.below(2)}" if choices.below(2) else None
    made = make_turn(choices, name)
    beans = {f"Bean{choices.below(2)}": {"step": name}} if choices.below(2) else {}
    in_charge = choices.one_of((None, None, f"Desk.{name}"))
    place, size = choices.below(5), choices.below(7)
    for store in stores:
        if kind == 0:
            await rewind_to(store, key, place)
        elif kind == 1:
            before = [*await store.get_messages(key)]
            await store.update_messages(key, [*before[: len(before) if size % 2 else size], UserMessage(name)])
        elif kind == 2:
            await store.write(key, LogWrite(turn=Turn(id=name, beans=beans)))
        elif kind == 3 and size == 0:
            await store.delete(key)
        else:
            turn = replace(made, run_id=run_id, beans=beans, in_charge=in_charge)
            await store.write(key, LogWrite(turn=turn, notes=ViewNotes(Position(size), "MessageWindow")))


async def rewind_to(store: LogStore, key: ChatMemoryKey, place: int) -> None:
    log = await store.read_since(key, lambda head: 0)
    asked = [each for each in entries_of(log.turns if log else ()) if isinstance(each.message, UserMessage)]
    if asked:
        await store.rewind(key, asked[min(place, len(asked) - 1)].id)


async def described(store: LogStore, key: ChatMemoryKey) -> Any:
    """Return all that can be seen of a conversation, without ids and times that each store makes."""
    log = await store.read_since(key, lambda head: 0)
    if log is None:
        return None
    head = log.head
    newest = await store.read_newest(key, 3)
    assert newest is not None
    return (
        [(each.message, each.state, each.usage, each.run_id) for each in entries_of(log.turns)],
        [(each.number, each.start, each.hidden_from, each.beans, each.in_charge) for each in log.turns],
        (head.messages, head.usage, head.next_number, head.notes, head.beans, head.in_charge),
        [each.message for each in newest_entries(newest.turns, 3)],
    )
