"""Stores of conversations in databases: the checks of all stores, and what only databases have: leases, expiry."""

import asyncio
import itertools
import time
from typing import Any, Protocol
from uuid import uuid4

import pytest

from toolbox import (
    AiMessage,
    ChatMemoryKey,
    ChatMemoryStore,
    Container,
    IllegalConfigurationError,
    MemoryId,
    MessageWindow,
    ToolboxSettings,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    UserMessage,
    redis,
    register_ai_service,
    sql,
)
from toolbox.conversations.log import LogWrite, Turn
from toolbox.errors import MemoryLeaseLostError, TranscriptError
from toolbox.redis import RedisChatMemoryStore
from toolbox.settings import RedisSettings
from toolbox.sql import SqlChatMemoryStore
from toolbox.store_checks.conversation_stores import ConversationStoreCheck
from toolbox.testing import ScriptedChatModel, conversation_store_checks

from .conftest import pass_time, skip_time_of

pytestmark = pytest.mark.anyio


@register_ai_service
class Assistant(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> str: ...


@pytest.mark.parametrize("check", conversation_store_checks())
async def test_it_keeps_the_promises_of_a_conversation_store(check: ConversationStoreCheck, new_store: Any) -> None:
    stores = itertools.cycle([await new_store(lease=1000), await new_store(lease=1000)])

    await check(lambda: next(stores))


async def within(seconds: float, holds: Any) -> None:
    """Waits until `await holds()`, of something that comes with time."""
    until = time.monotonic() + seconds
    while not await holds():
        assert time.monotonic() < until
        await asyncio.sleep(0.02)


async def test_a_container_finds_it_as_its_memory_store(new_store: Any) -> None:
    assert ChatMemoryStore in type(await new_store()).__mro__  # so that it needs no bind


async def test_data_of_later_releases_is_rejected(new_store: Any, key: ChatMemoryKey, monkeypatch: Any) -> None:
    store = await new_store()
    with monkeypatch.context() as later:
        later.setattr("toolbox.transcripts.VERSION", 2)
        await store.update_messages(key, [UserMessage("a")])

    with pytest.raises(TranscriptError, match="unsupported version 2"):
        await store.get_messages(key)


@register_ai_service(chat_memory=MessageWindow(4))
class Clerk(Protocol):
    async def ask(self, room: MemoryId[str], question: str) -> str: ...


async def test_what_an_earlier_release_has_cut_is_sent_and_stored_from_a_user_message_on(new_store: Any) -> None:
    store, model = await new_store(), ScriptedChatModel(["five", "six", "seven"])
    call = ToolExecutionRequest("1", "look", "{}")
    cut = [AiMessage(None, [call]), ToolExecutionResultMessage.of(call, "a door"), AiMessage("one")]
    await store.update_messages(ChatMemoryKey.of(Clerk, "7"), [*cut, UserMessage("2"), AiMessage("two")])

    async with Container(models={"default": model}).register(Clerk).register_instance(store, ChatMemoryStore) as it:
        for question in "567":
            await it.get(Clerk).ask("7", question)
        stored = [each.text for each in await it.chat_memory(Clerk, "7").messages()]

    sent = [[each.text for each in request.messages] for request in model.requests]
    assert sent == [["2", "two", "5"], ["2", "two", "5", "five", "6"], ["6", "six", "7"]]
    assert stored == [each.text for each in cut] + ["2", "two", "5", "five", "6", "six", "7", "seven"]


# --- one caller at a time


async def add(store: Any, key: ChatMemoryKey, text: str) -> None:
    async with store.lock(key):
        before = await store.get_messages(key)
        await asyncio.sleep(0)
        await store.update_messages(key, [*before, UserMessage(text)])


async def test_within_a_process_it_is_first_come_first_served(new_store: Any, key: ChatMemoryKey) -> None:
    store = await new_store()
    texts = [f"{number}" for number in range(10)]

    await asyncio.gather(*(add(store, key, text) for text in texts))

    assert [each.text for each in await store.get_messages(key)] == texts


@pytest.mark.parametrize("store_url", ["shared_postgres_url", "redis_url"], indirect=True)
async def test_a_lease_is_renewed_as_long_as_it_is_held(new_store: Any, key: ChatMemoryKey) -> None:
    one, other = await new_store(lease=2.0), await new_store()
    renew, taken = one.renew, list[bool]()
    is_longer_than_a_lease = asyncio.Event()

    async def renewed(*arguments: Any) -> bool:
        is_kept = bool(await renew(*arguments))
        taken.append(await other.take(key, "other", 10))
        if taken[-1] or len(taken) == 4:  # three in each lease
            is_longer_than_a_lease.set()
        return is_kept

    one.renew = renewed
    assert not await other.get_messages(key)  # it has prepared the tables and opened a connection
    async with one.lock(key):
        await is_longer_than_a_lease.wait()
        await one.update_messages(key, [UserMessage("kept")])
    assert not any(taken)

    assert await other.take(key, "other", 10)
    assert list(await other.get_messages(key)) == [UserMessage("kept")]


async def test_the_lease_of_a_dead_process_expires(new_store: Any, key: ChatMemoryKey) -> None:
    dead, other = await new_store(), await new_store()
    await dead.take(key, "of a process that is no more", 0.2)
    skip_time_of(other, 0.2)

    await asyncio.wait_for(add(other, key, "a"), 60)

    assert list(await other.get_messages(key)) == [UserMessage("a")]


async def test_calls_that_lost_their_lease_do_not_write(
    new_store: Any, key: ChatMemoryKey, store_url: str, another_writes: Any
) -> None:
    store = await new_store(lease=0.2)

    async with store.lock(key):
        another_writes(store_url, key, "the other's")
        for write in (store.update_messages(key, [UserMessage("late")]), store.delete_messages(key)):
            with pytest.raises(MemoryLeaseLostError, match=key.memory_id):
                await write

    assert list(await store.get_messages(key)) == [UserMessage("the other's")]


async def test_leaving_late_does_not_throw_the_next_one_out(
    new_store: Any, key: ChatMemoryKey, store_url: str, another_writes: Any
) -> None:
    store, next_one, third = await new_store(lease=0.2), await new_store(), await new_store()

    async with store.lock(key):
        another_writes(store_url, key, "the other's")
        assert await next_one.take(key, "next", 10)

    assert not await third.take(key, "third", 10)
    assert await next_one.renew(key, "next", 10)
    await next_one.give_back(key, "next")
    assert await third.take(key, "third", 10)


async def test_a_lease_that_another_has_taken_is_not_renewed(new_store: Any, key: ChatMemoryKey) -> None:
    store = await new_store()
    await store.take(key, "mine", 0.05)
    await pass_time(store, 0.1)
    assert await store.take(key, "another's", 10)

    assert not await store.renew(key, "mine", 10)
    assert await store.renew(key, "another's", 10)


async def test_the_last_write_of_a_call_releases_its_lease(new_store: Any) -> None:
    one, other = await new_store(), await new_store()
    free, given_back, services = list[bool](), list[str](), ChatMemoryKey.of(Assistant, f"room {uuid4().hex}")
    write, give_back = one.write, one.give_back

    async def write_and_look(*arguments: Any) -> None:
        await write(*arguments)
        free.append(await other.holder(services) is None)

    async def count(*arguments: Any) -> None:
        given_back.append("once")
        await give_back(*arguments)

    one.write, one.give_back = write_and_look, count
    container = Container(models={"default": ScriptedChatModel(["one", "two"])}).register(Assistant)
    async with container.register_instance(one, ChatMemoryStore):
        await container.get(Assistant).chat(services.memory_id, "1")
        await container.chat_memory(Assistant, services.memory_id).add(UserMessage("added"), AiMessage("so"))
        assert (free, given_back) == ([True, True], [])
        async with container.conversation_scope(Assistant, services.memory_id):  # it holds the lease itself
            await container.get(Assistant).chat(services.memory_id, "2")
            assert free.pop() is False
        assert await other.holder(services) is None


async def test_a_renewal_that_comes_after_the_last_write_is_no_lost_lease(
    new_store: Any, key: ChatMemoryKey, caplog: pytest.LogCaptureFixture
) -> None:
    store = await new_store(lease=0.3)
    renew, renewals = store.renew, list[bool]()
    is_renewed = asyncio.Event()

    async def renewed(*arguments: Any) -> bool:
        renewals.append(await renew(*arguments))
        is_renewed.set()
        return renewals[-1]

    store.renew = renewed
    async with store.lock(key):
        await store.write(key, LogWrite(turn=Turn(messages=(UserMessage("last"),)), leaves=True))
        await is_renewed.wait()

    assert renewals == [False]
    assert caplog.messages == []


async def test_a_last_write_that_fails_leaves_the_lease_to_be_given_back(
    new_store: Any, key: ChatMemoryKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = await new_store(), await new_store()
    unreadable = LogWrite(turn=Turn(messages=(object(),)), leaves=True)  # type: ignore[arg-type]

    async with store.lock(key):
        with pytest.raises((TypeError, AttributeError, TranscriptError)):
            await store.write(key, unreadable)
        assert await other.holder(key) is not None

    assert await other.take(key, "next", 10)


async def test_a_lease_of_no_time_is_refused(new_store: Any) -> None:
    with pytest.raises(ValueError, match="greater than 0"):
        await new_store(lease=0)


async def test_a_life_of_no_time_is_refused(new_store: Any) -> None:
    with pytest.raises(ValueError, match="expires_after=0"):
        await new_store(expires_after=0)


@pytest.mark.parametrize("store", [SqlChatMemoryStore, RedisChatMemoryStore])
def test_stores_reject_arguments_that_are_not_connections(store: Any) -> None:
    with pytest.raises(TypeError, match=r"an? .*got .*str"):
        store("sqlite:///conversations.db")


async def test_the_error_of_an_unreachable_database_hides_the_password() -> None:
    async with sql.open_engine("postgresql://shop:sesame@127.0.0.1:1/shop") as engine:
        with pytest.raises(OSError, match=r"127\.0\.0\.1") as caught:
            await SqlChatMemoryStore(engine).get_messages(ChatMemoryKey("service", "room 7"))

    [note] = caught.value.__notes__
    assert "127.0.0.1:1/shop" in note
    assert "sesame" not in note


def test_missing_and_invalid_redis_settings_are_problems_with_fixes() -> None:
    [problem] = Container().register(RedisChatMemoryStore).check()
    assert "toolbox.redis.client" in problem.fix

    wrong = ToolboxSettings(redis=RedisSettings.model_validate({"url": "http://host:6379"}))
    with (
        pytest.raises(IllegalConfigurationError, match="redis://"),
        Container(settings=wrong).register(redis.client, RedisChatMemoryStore),
    ):
        pass


# --- expiry


async def test_conversations_expire(new_store: Any, key: ChatMemoryKey) -> None:
    slow, fast = await new_store(expires_after=60), await new_store(expires_after=0.3)
    await add(slow, key, "a")
    assert list(await slow.get_messages(key)) == [UserMessage("a")]
    await add(fast, key, "b")

    async def is_gone() -> bool:
        return not await fast.get_messages(key)

    skip_time_of(fast, 0.3)
    await within(30, is_gone)
    await add(slow, key, "c")
    assert list(await slow.get_messages(key)) == [UserMessage("c")]


async def test_each_call_restarts_the_expiry_of_its_conversation(new_store: Any, key: ChatMemoryKey) -> None:
    fast, slow = await new_store(expires_after=1.0), await new_store(expires_after=60)
    await add(fast, key, "0")
    await add(slow, key, "1")
    assert len(await slow.get_messages(key)) == 2

    await pass_time(fast, 1.1)  # longer than the first call keeps it

    assert [each.text for each in await fast.get_messages(key)] == ["0", "1"]
