"""Conversations that release 0.1 has stored: nothing is lost, and nothing of two releases is mixed."""

import asyncio
import json
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError
from sqlalchemy import insert, select, text, update
from sqlalchemy.exc import DBAPIError
from typer.testing import CliRunner

from toolbox import AiMessage, ChatMemoryKey, Message, MessageWindow, TextContent, UserMessage, sql
from toolbox.cli import app
from toolbox.conversations.log import LogWrite, entries_of
from toolbox.conversations.memories import ChatMemories
from toolbox.sql.conversation_tables import ConversationTables, first_conversations_table
from toolbox.sql.migrations import migrate
from toolbox.store_checks.conversation_stores import EVERYTHING
from toolbox.transcripts import messages_to_json

from .conftest import open_store, pass_time
from .log_checks import append, read, say, texts

pytestmark = pytest.mark.anyio

TABLE = "toolbox_conversations"
CUT: list[Message] = [AiMessage("a0"), UserMessage("q1"), AiMessage("a1")]
"""What a window of three messages has left."""
STORED = (*EVERYTHING, UserMessage((TextContent("x"),), None, {"about": {"type": "user"}}))
"""The last message contains what a message begins with."""
WHOLE, SHORT, OTHER = (
    ChatMemoryKey("shop.Assistant", "whole"),
    ChatMemoryKey("shop.Assistant", "it's cut"),
    ChatMemoryKey("shop.Assistant", "other"),
)


# --- SQLite and PostgreSQL


@pytest.fixture
async def earlier_url(database_url: str) -> str:
    """A database as release 0.1 has left it, while a call of it holds a new conversation."""
    async with sql.open_engine(database_url) as engine:
        await migrate(engine, TABLE, ConversationTables(TABLE).steps()[:1])
        stored = {WHOLE: messages_to_json(STORED), SHORT: messages_to_json(CUT), OTHER: "{}"}
        rows = [{"service": key.service, "memory_id": key.memory_id, "messages": each} for key, each in stored.items()]
        async with engine.begin() as connection:
            await connection.execute(insert(first_conversations_table(TABLE)), rows)
            held = {
                "service": "shop.Assistant",
                "memory_id": "held",
                "lease_token": "t",
                "lease_until": round(time.time() * 1000) + 10_000,
            }
            await connection.execute(insert(first_conversations_table(TABLE)), [held])
    return database_url


async def test_messages_of_an_earlier_release_are_the_first_turn(earlier_url: str) -> None:
    async with open_store(earlier_url) as store:
        assert tuple(await store.get_messages(WHOLE)) == STORED
        assert list(await store.get_messages(SHORT)) == CUT
        heads = {each.key: each for each in await store.find_heads(limit=10)}
        assert {key: each.messages for key, each in heads.items()} == {WHOLE: len(STORED), SHORT: 3, OTHER: 0}
        assert len({each.id for each in heads.values()}) == 3
        page = await store.read_newest(WHOLE, 2)
        assert page is not None
        assert len([*entries_of(page.turns)]) == len(STORED)

        await append(store, SHORT, 2)
        assert await texts(store, SHORT) == ["a0", "q1", "a1", "q2", "a2"]
        excerpt = await ChatMemories(store).load(SHORT, MessageWindow(20))
        assert [each.text for each in excerpt.messages] == ["q1", "a1", "q2", "a2"]
        [*_, second, _] = entries_of((await read(store, SHORT)).turns)
        await store.rewind(SHORT, second.id)
        first = [*entries_of((await read(store, SHORT)).turns)][1]
        await store.rewind(SHORT, first.id)
        assert await texts(store, SHORT) == ["a0"]


async def test_two_processes_migrate_at_once(earlier_url: str) -> None:
    async with AsyncExitStack() as stack:
        stores = [await stack.enter_async_context(open_store(earlier_url)) for _ in range(4)]
        found = await asyncio.gather(*(each.get_messages(WHOLE) for each in stores))

    assert [tuple(each) for each in found] == [STORED] * 4


async def test_a_process_of_an_earlier_release_fails_and_mixes_nothing(earlier_url: str) -> None:
    old = first_conversations_table(TABLE)
    mine = (old.c.service == WHOLE.service) & (old.c.memory_id == WHOLE.memory_id)
    statements = (
        update(old).where(mine).values(messages=messages_to_json([UserMessage("old")])),
        update(old).where(mine).values(lease_token="old", lease_until=2**50),
        insert(old).values(service="shop.Assistant", memory_id="new", messages="{}"),
        insert(old).values(service="shop.Assistant", memory_id="new", lease_token="old"),
        select(old.c.messages),
    )
    async with open_store(earlier_url) as store, sql.open_engine(earlier_url) as engine:
        await append(store, WHOLE, 1)
        for statement in statements:
            with pytest.raises(DBAPIError):
                async with engine.begin() as connection:
                    await connection.execute(statement)
        assert len(await store.get_messages(WHOLE)) == len(STORED) + 2


async def test_a_call_of_an_earlier_release_keeps_its_conversation_until_its_lease_ends(earlier_url: str) -> None:
    async with open_store(earlier_url) as store:
        held = ChatMemoryKey("shop.Assistant", "held")
        assert not await store.take(held, "mine", 10)
        assert await store.read_since(held, lambda head: 0) is None
        async with sql.open_engine(earlier_url) as engine, engine.begin() as connection:
            await connection.execute(text(f"UPDATE {TABLE}_leases SET until = 0"))
        assert await store.take(held, "mine", 10)


# --- Redis


async def redis_client(url: str, stack: AsyncExitStack) -> Any:
    client = Redis.from_url(url)
    stack.push_async_callback(client.aclose)
    return client


async def store_earlier(client: Any, key: ChatMemoryKey, messages: Any, **options: Any) -> str:
    """Store messages as release 0.1 does, and return the key."""
    name = f"toolbox:{{{key.service}:{key.memory_id}}}:messages"
    await client.set(name, messages_to_json(messages), **options)
    return name


async def test_redis_reads_what_an_earlier_release_has_stored_and_changes_it_at_the_first_write(
    redis_url: str, key: ChatMemoryKey
) -> None:
    async with AsyncExitStack() as stack:
        client = await redis_client(redis_url, stack)
        store = await stack.enter_async_context(open_store(redis_url))
        name = await store_earlier(client, key, CUT)
        entries = [*entries_of((await read(store, key)).turns)]
        assert [each.message for each in entries] == CUT
        assert await client.type(name) == b"string"

        await append(store, key, 2)
        assert await client.type(name) == b"hash"
        assert await texts(store, key) == ["a0", "q1", "a1", "q2", "a2"]
        log = await read(store, key)
        assert [each.id for each in entries_of(log.turns)][:3] == [each.id for each in entries]
        assert log.head.messages == 5
        excerpt = await ChatMemories(store).load(key, MessageWindow(20))
        assert [each.text for each in excerpt.messages] == ["q1", "a1", "q2", "a2"]

        with pytest.raises(ResponseError, match="WRONGTYPE"):
            await client.get(name)  # the first that a call of an earlier release does


async def test_redis_waits_for_a_call_of_an_earlier_release(redis_url: str, key: ChatMemoryKey) -> None:
    async with AsyncExitStack() as stack:
        client = await redis_client(redis_url, stack)
        store = await stack.enter_async_context(open_store(redis_url))
        await store_earlier(client, key, CUT)
        lease = f"toolbox:{{{key.service}:{key.memory_id}}}:lease"
        await client.set(lease, "old", nx=True, px=60_000)

        writing = asyncio.create_task(store.write(key, LogWrite(turn=say(2))))
        await asyncio.sleep(0.1)
        assert not writing.done()
        await store_earlier(client, key, [*CUT, UserMessage("old"), AiMessage("call")])
        await client.delete(lease)
        await asyncio.wait_for(writing, 60)

        assert await texts(store, key) == ["a0", "q1", "a1", "old", "call", "q2", "a2"]


async def test_redis_migrates_all_conversations_and_keeps_when_they_expire(redis_url: str) -> None:
    async with AsyncExitStack() as stack:
        client = await redis_client(redis_url, stack)
        await client.flushdb()
        store = await stack.enter_async_context(open_store(redis_url))
        keys = [ChatMemoryKey("shop.Assistant", each) for each in ("a:b", "c}d", "*")]
        names = [await store_earlier(client, each, EVERYTHING, px=60_000) for each in keys]
        other = ChatMemoryKey("shop.Assistant", "new")
        await append(store, other, 1)

        assert await store.migrate_all() == 3
        assert await store.migrate_all() == 0
        for key, name in zip(keys, names, strict=True):
            assert await client.type(name) == b"hash"
            assert 0 < await client.pttl(name) <= 60_000
            assert tuple(await store.get_messages(key)) == EVERYTHING
        assert await texts(store, other) == ["q1", "a1"]


@pytest.mark.parametrize("store_url", ["sqlite_url", "shared_postgres_url", "redis_url"], indirect=True)
async def test_all_of_a_conversation_expires_together(store_url: str, key: ChatMemoryKey) -> None:
    async with open_store(store_url, expires_after=0.2) as store, open_store(store_url) as other:
        turn = say(1, beans={"Cart": {"items": 1}})
        await store.write(key, LogWrite(turn=turn))
        await pass_time(store, 0.3)

        assert await other.read_since(key, lambda head: 0) is None
        await other.write(key, LogWrite(turn=say(2, id=turn.id)))
        log = await read(other, key)
        assert [each.message.text for each in entries_of(log.turns)] == ["q2", "a2"]
        assert (log.head.beans, log.head.messages, json.dumps(dict(log.head.beans))) == ({}, 2, "{}")


def test_the_command_migrates_redis(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def prepare() -> None:
        async with AsyncExitStack() as stack:
            client = await redis_client(redis_url, stack)
            await client.flushdb()
            await store_earlier(client, SHORT, CUT)

    asyncio.run(prepare())
    (tmp_path / "redis_shop.py").write_text(
        "from toolbox import Container, redis\ndef shop(): return Container().register(redis.client, *redis.stores)\n"
        "container, the_same = shop(), shop()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    done, again = (
        CliRunner().invoke(app, ["migrate", f"redis_shop:{name}"], env={"TOOLBOX_REDIS__URL": redis_url})
        for name in ("container", "the_same")
    )

    assert "RedisChatMemoryStore: 1 conversations migrated" in done.stdout, done.stderr
    assert "RedisChatMemoryStore: nothing to do" in again.stdout
