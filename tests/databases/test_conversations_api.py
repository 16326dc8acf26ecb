"""`Conversations` in each store: in memory, in SQLite, PostgreSQL and Redis."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Protocol
from uuid import uuid4

import pytest

from tests.databases.conftest import open_store
from toolbox import (
    AccessDeniedError,
    AiMessage,
    ChatMemoryStore,
    Container,
    ConversationBusyError,
    ConversationNotFoundError,
    IllegalConfigurationError,
    InMemoryChatMemoryStore,
    MemoryId,
    MemoryInUseError,
    Message,
    UserMessage,
    register_ai_service,
    tool,
)
from toolbox.conversations import Conversation, ConversationInfo, Conversations, LogEntry
from toolbox.errors import TranscriptError
from toolbox.security import SecurityIdentity
from toolbox.service_names import stored_name
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio

ANN, BOB = SecurityIdentity("ann"), SecurityIdentity("bob")

Script = Callable[[Any], Any]


class Desk(Protocol):
    """Each test registers a class of its own of this form, with a stored name that no other test uses."""

    async def chat(self, room: MemoryId[str], text: str) -> str: ...


def new_service(**options: Any) -> type[Desk]:
    @register_ai_service(**{"name": f"desk-{uuid4().hex}", **options})
    class Service(Desk, Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    return Service


@pytest.fixture(params=["memory", "sqlite_url", "shared_postgres_url", "redis_url"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    if request.param == "memory":
        yield InMemoryChatMemoryStore()
        return
    async with open_store(request.getfixturevalue(request.param)) as opened:
        yield opened


@pytest.fixture
def lists(store: Any) -> bool:
    """Whether the store can list its conversations."""
    return type(store).__name__ != "RedisChatMemoryStore"


def echo(request: Any) -> str:
    return f"a{request.messages[-1].text}"


def container_of(store: Any, *services: Any, script: Script = echo, **options: Any) -> Container:
    models = {"default": ScriptedChatModel([script] * 50)}
    container = Container(models=models, **{"seeds": [SecurityIdentity], **options}).register(*services)
    return container.register_instance(store, ChatMemoryStore)


@asynccontextmanager
async def acting(container: Container, identity: SecurityIdentity | None) -> AsyncIterator[None]:
    async with container.request_scope({} if identity is None else {SecurityIdentity: identity}):
        yield


async def say(container: Container, service: type[Desk], room: str, *texts: str, by: Any = None) -> None:
    async with AsyncExitStack() as stack:
        if by is not None:
            await stack.enter_async_context(acting(container, by))
        for each in texts:
            await container.get(service).chat(room, each)


async def texts(room: Conversation) -> list[str | None]:
    return [each.message.text for each in await room.history()]


def text_of(messages: list[Message]) -> list[str | None]:
    return [each.text for each in messages]


# --- creating and reading


async def test_a_conversation_is_read_by_pages_of_its_log(store: Any) -> None:
    service = new_service()
    async with container_of(store, service) as container:
        await say(container, service, "room", "1", "2", "3")
        room = container.conversations.of(service, "room")

        newest = await room.history(limit=3)
        assert [each.message.text for each in newest] == ["a2", "3", "a3"]
        earlier = await room.history(limit=2, before=newest[0])
        assert [each.message.text for each in earlier] == ["a1", "2"]
        assert [each.message.text for each in await room.history(before=earlier[0].id)] == ["1"]
        assert await room.history(limit=0) == []
        assert text_of(await room.messages()) == ["1", "a1", "2", "a2", "3", "a3"]
        for before in ("", "x", "x.0", f"{newest[0].id}0", "\0.0", "\ud800.0", "x.\u0663", "x" * 10_000 + ".0"):
            with pytest.raises(ValueError, match="unknown entry"):
                await room.history(before=before)
        with pytest.raises(ValueError, match="limit=-1"):
            await room.history(limit=-1)


async def test_what_is_known_of_a_conversation(store: Any) -> None:
    service = new_service()
    async with container_of(store, service) as container:
        conversations = await container.aget(Conversations)
        room = await conversations.create(service, 7, owner=ANN, title="Trip \ud800")
        assert (room.service, room.memory_id) == (stored_name(service), "7")
        created = await room.info()
        assert (created.service, created.memory_id, created.owner) == (stored_name(service), "7", "ann")
        assert (created.title, created.messages, created.created_at) == ("Trip \ufffd", 0, created.updated_at)
        with pytest.raises(ValueError, match="exists"):
            await conversations.create(service, "7")

        await say(container, service, "7", "1", by=ANN)
        after = await room.info()
        assert after.messages == 2
        assert after.updated_at > created.updated_at
        await room.rename(None)
        await room.adopt("bob")
        renamed = await room.info()
        assert (renamed.title, renamed.owner, renamed.updated_at) == (None, "bob", after.updated_at)
        await room.delete()
        await conversations.create(service, "7")


async def test_an_unknown_conversation(store: Any) -> None:
    service = new_service()
    async with container_of(store, service) as container:
        room = container.conversations.of(service, "nowhere")
        assert await room.history() == await room.messages() == []
        assert await room.run() is None
        assert await room.stop() is False
        calls = (
            room.info,
            lambda: room.rename("x"),
            lambda: room.adopt("ann"),
            room.delete,
            lambda: room.rewind("x.0"),
            lambda: room.fork("other"),
            room.export,
        )
        for call in calls:
            with pytest.raises(ConversationNotFoundError) as raised:
                await call()
            assert raised.value.memory_id == "nowhere"
        await container.chat_memory(service, "nowhere").clear()
        counts = {"conversations": 0, "messages": 0, "beans": 0, "runs": 0}
        assert await container.conversations.forget(service=service, memory_id="nowhere") == counts


async def test_lists_have_the_newest_turns_first_in_pages(store: Any, lists: bool) -> None:
    service, other = new_service(), new_service()
    async with container_of(store, service, other) as container:
        conversations = container.conversations
        if not lists:
            for call in (
                conversations.list(),
                conversations.forget(owner="ann"),
                conversations.forget(service=service),
            ):
                with pytest.raises(IllegalConfigurationError, match="SqlChatMemoryStore"):
                    await call
            return
        for number in range(5):
            await say(container, service, str(number), "1", by=ANN if number % 2 else BOB)
            await asyncio.sleep(0.002)  # the times of databases have milliseconds
        await say(container, other, "0", "1", by=ANN)

        async def pages(**of: Any) -> list[str]:
            found, before = [], None
            while page := await conversations.list(limit=2, before=before, **of):
                assert len(page) <= 2
                found += [each.memory_id for each in page]
                before = page[-1] if len(found) % 4 else page[-1].cursor
            return found

        assert await pages(service=service) == ["4", "3", "2", "1", "0"]
        await asyncio.sleep(0.002)
        await say(container, service, "1", "2", by=ANN)
        assert await pages(service=stored_name(service)) == ["1", "4", "3", "2", "0"]
        assert await pages(service=service, owner="ann") == ["1", "3"]
        assert await pages(service=service, owner=ANN) == ["1", "3"]
        assert [each.memory_id for each in await conversations.list(owner="ann", service=other)] == ["0"]
        nothing: list[ConversationInfo] = []
        assert await conversations.list(owner="") == nothing
        assert await conversations.list(owner=SecurityIdentity.anonymous()) == nothing
        assert await conversations.list(service="") == await conversations.list(limit=0) == nothing
        assert await conversations.list(service="\0") == await conversations.list(service="\ud800") == nothing
        assert len(await conversations.list(service=service, limit=10**30)) == 5
        with pytest.raises(TypeError, match="service=7"):
            await conversations.list(service=7)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="service="):
            conversations.of("\0", "room")
        for before in ("", "x", "1", "x.y", "9" * 40 + ".x", "1.\0", "1.\ud800", "1.x y"):
            with pytest.raises(ValueError, match="before="):
                await conversations.list(before=before)


# --- changing


async def test_a_rewind_hides_what_follows_a_question(store: Any) -> None:
    service = new_service()
    async with container_of(store, service) as container:
        await say(container, service, "room", "1", "2", "3")
        room = container.conversations.of(service, "room")
        entries = await room.history()
        for wrong in (entries[1], entries[1].id, "x.0"):
            with pytest.raises(ValueError, match="entry"):
                await room.rewind(wrong)
        await room.rewind(entries[2].id)
        with pytest.raises(ValueError, match="unknown entry"):
            await room.rewind(entries[4])
        await say(container, service, "room", "2b")

        assert await texts(room) == ["1", "a1", "2b", "a2b"]
        assert text_of(await room.messages()) == ["1", "a1", "2b", "a2b"]
        assert (await room.info()).messages == 4
        exported = await room.export()
        assert [len(each["messages"]) for each in exported["turns"]] == [2, 2]


async def test_a_fork_is_a_conversation_of_the_same_owner(store: Any) -> None:
    service = new_service()
    async with container_of(store, service) as container:
        await say(container, service, "room", "1", "2", by=ANN)
        room = container.conversations.of(service, "room")
        entries = await room.history()
        whole, part = await room.fork(8), await room.fork("9", upto=entries[0])
        for taken in ("room", "8"):
            with pytest.raises(ValueError, match="exists"):
                await room.fork(taken)
        with pytest.raises(ValueError, match="unknown entry"):
            await room.fork("10", upto="x.0")
        await say(container, service, "8", "3", by=ANN)

        assert await texts(whole) == ["1", "a1", "2", "a2", "3", "a3"]
        assert await texts(part) == ["1", "a1"]
        assert await texts(room) == ["1", "a1", "2", "a2"]
        assert (await part.info()).owner == "ann"
        assert not {each.id for each in await part.history()} & {each.id for each in entries}
        await room.delete()
        assert await texts(part) == ["1", "a1"]


async def test_what_was_exported_is_restored(store: Any) -> None:
    service, other = new_service(), new_service()
    async with container_of(store, service, other) as container:
        conversations = container.conversations
        await say(container, service, "room", "1", "2")
        room = conversations.of(service, "room")
        await room.rename("Trip")
        exported = await room.export()
        copied = await conversations.restore(other, "copy", exported, owner="ann")
        with pytest.raises(ValueError, match="exists"):
            await conversations.restore(other, "copy", exported)
        await say(container, other, "copy", "3", by=ANN)

        assert await texts(copied) == ["1", "a1", "2", "a2", "3", "a3"]
        info, original = await copied.info(), await room.info()
        assert (info.title, info.owner, info.created_at) == ("Trip", "ann", original.created_at)
        again = await copied.export()
        assert again["turns"][:2] == exported["turns"]
        assert (again["service"], again["owner"]) == (stored_name(other), "ann")
        with pytest.raises(TranscriptError, match=r"turns\.1\.messages\.0\.type: .*; use what export\(\)"):
            broken = [{"messages": []}, {"messages": [{"type": "?"}]}]
            await conversations.restore(other, "broken", {"turns": broken})
        with pytest.raises(ConversationNotFoundError):
            await conversations.of(other, "broken").info()


# --- deleting


async def test_forgetting_deletes_what_is_named_and_counts_it(store: Any, lists: bool) -> None:
    service, other = new_service(), new_service()
    async with container_of(store, service, other) as container:
        conversations = container.conversations
        await say(container, service, "1", "1", "2", by=ANN)
        await say(container, service, "2", "1", by=BOB)
        await say(container, other, "1", "1", by=ANN)
        nothing = {"conversations": 0, "messages": 0, "beans": 0, "runs": 0}
        assert await conversations.forget(owner="bob", service=service, memory_id="1") == nothing
        assert await conversations.forget(owner="", service=service) == nothing
        deleted = await conversations.forget(owner="bob", service=service, memory_id="2")
        assert deleted == {**nothing, "conversations": 1, "messages": 2}
        assert await texts(conversations.of(service, "1")) == ["1", "a1", "2", "a2"]
        if lists:
            assert await conversations.forget(owner=ANN, service=service) == {
                **nothing,
                "conversations": 1,
                "messages": 4,
            }
            assert await texts(conversations.of(service, "1")) == []
            assert await conversations.forget(service=stored_name(other)) == {
                **nothing,
                "conversations": 1,
                "messages": 2,
            }


async def test_inside_a_call_its_conversation_cannot_be_deleted_or_rewound(store: Any, lists: bool) -> None:
    done: list[str] = []

    @tool
    async def tidy() -> str:
        """Tidy up."""
        conversations = container.conversations
        room = conversations.of(service, "room")
        calls = [
            room.delete,
            lambda: room.rewind(entry),
            lambda: conversations.forget(service=service, memory_id="room"),
        ]
        if lists:
            calls += [lambda: conversations.forget(service=service), lambda: conversations.forget(owner="ann")]
        for call in calls:
            with pytest.raises(MemoryInUseError):
                await call()
        await room.rename("From within")
        done.append("tidied")
        return "done"

    def answer(request: Any) -> Any:
        asks = request.messages[-1].text == "tidy"
        return tool_call("tidy") if asks else "ok"

    service = new_service(tools=tidy)
    async with container_of(store, service, script=answer) as container:
        await say(container, service, "room", "1", by=ANN)
        room = container.conversations.of(service, "room")
        entry = (await room.history())[0]
        await say(container, service, "room", "tidy", by=ANN)
        await say(container, service, "new", "1", by=ANN)
        await say(container, service, "other", "1", by=BOB)

        assert done == ["tidied"]
        assert len(await room.history()) == 6
        assert (await room.info()).title == "From within"


async def test_inside_a_block_nothing_of_it_is_deleted(store: Any, lists: bool) -> None:
    service = new_service()
    async with container_of(store, service) as container:
        await say(container, service, "other", "1", by=ANN)
        await say(container, service, "room", "1", by=ANN)
        conversations = container.conversations
        async with container.conversation_scope(service, "room") as room:
            calls = [room.delete, lambda: conversations.forget(service=service, memory_id="room")]
            if lists:
                calls += [lambda: conversations.forget(service=service), lambda: conversations.forget(owner="ann")]
            for call in calls:
                with pytest.raises(MemoryInUseError):
                    await call()
            await room.rename("Held")
            await container.get(service).chat("room", "2")
            assert await texts(room) == ["1", "a1", "2", "a2"]
        assert await texts(conversations.of(service, "other")) == ["1", "a1"]


async def test_a_call_that_is_not_stored_yet_keeps_its_person_from_being_forgotten(store: Any, lists: bool) -> None:
    if not lists:
        pytest.skip("Redis cannot forget a person")

    @tool
    async def forget_me() -> str:
        """Forget me."""
        with pytest.raises(MemoryInUseError):
            await container.conversations.forget(owner="ann")
        return str((await container.conversations.forget(owner="bob"))["conversations"])

    def answer(request: Any) -> Any:
        return tool_call("forget_me") if isinstance(request.messages[-1], UserMessage) else "ok"

    service = new_service(tools=forget_me)
    async with container_of(store, service, script=answer) as container:
        await say(container, service, "first", "1", by=ANN)
        [info] = await container.conversations.list(owner="ann", service=service)
        assert info.messages == 4


async def test_deleting_waits_for_the_call_at_work(store: Any) -> None:
    entered, released = asyncio.Event(), asyncio.Event()

    @tool
    async def wait() -> str:
        """Wait."""
        entered.set()
        await released.wait()
        return "done"

    def answer(request: Any) -> Any:
        return tool_call("wait") if request.messages[-1].text == "wait" else "ok"

    service = new_service(tools=wait)
    async with container_of(store, service, script=answer) as container:
        await say(container, service, "room", "1")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(say(container, service, "room", "wait"))
            await entered.wait()
            room = container.conversations.of(service, "room")
            forgetting = tasks.create_task(container.conversations.forget(service=service, memory_id="room"))
            assert len(await room.history()) == 2  # reading does not wait
            await room.rename("Waits")
            assert not forgetting.done()
            released.set()
        assert forgetting.result()["messages"] == 6
        assert await room.history() == []


# --- former names


async def test_conversations_under_former_names_are_found_listed_and_forgotten(store: Any, lists: bool) -> None:
    old = new_service()
    new = new_service(former_names=(stored_name(old),))
    async with container_of(store, old) as container:
        await say(container, old, "1", "1", by=ANN)
        await say(container, old, "2", "1", by=ANN)
        await say(container, old, "3", "1", by=ANN)
    async with container_of(store, new) as container:
        conversations = container.conversations
        room = conversations.of(stored_name(old), "1")
        assert room.service == stored_name(new)
        assert await texts(room) == ["1", "a1"]
        info = await room.info()
        assert info.service == (await room.export())["service"] == stored_name(new)
        if lists:
            assert {each.service for each in await conversations.list(service=new)} == {stored_name(new)}
            assert len(await conversations.list(service=stored_name(old))) == 3
        await room.rename("Found")
        with pytest.raises(ValueError, match="exists"):
            await conversations.create(new, "1")
        with pytest.raises(AccessDeniedError):
            await say(container, new, "1", "2", by=BOB)
        await say(container, new, "1", "2", by=ANN)  # moves it
        forked = await conversations.of(new, "2").fork("4")
        assert await texts(forked) == ["1", "a1"]
        if lists:
            assert len(await conversations.list(service=new)) == 4
    async with container_of(store, old) as container:
        assert await texts(container.conversations.of(old, "1")) == []
        await say(container, old, "1", "of an old process", by=ANN)
    async with container_of(store, new) as container:
        conversations = container.conversations
        assert await texts(conversations.of(new, "1")) == ["1", "a1", "2", "a2"]
        if lists:
            listed = await conversations.list(service=new, limit=2)
            assert len(listed) == 2
            rest = await conversations.list(service=new, limit=10, before=listed[-1])
            assert sorted(each.memory_id for each in (*listed, *rest)) == ["1", "2", "3", "4"]
        assert (await conversations.forget(service=new, memory_id="1"))["conversations"] == 2
        if lists:
            assert (await conversations.forget(owner="ann"))["conversations"] >= 3
            assert await conversations.list(service=new) == []


# --- owners, and calls that do not wait


async def test_a_conversation_belongs_to_the_identity_of_its_first_call(store: Any) -> None:
    service = new_service()
    async with container_of(store, service) as container:
        await say(container, service, "room", "1", by=ANN)
        for other in (BOB, SecurityIdentity.anonymous()):
            with pytest.raises(AccessDeniedError, match="shared_conversations=True") as raised:
                await say(container, service, "room", "2", by=other)
            assert (raised.value.memory_id, raised.value.identity) == ("room", other.name)
        await say(container, service, "room", "3", by=ANN)
        await say(container, service, "room", "4")  # the program's
        room = container.conversations.of(service, "room")
        assert await texts(room) == ["1", "a1", "3", "a3", "4", "a4"]


async def test_a_busy_conversation_is_refused_also_by_another_process(store: Any, request: Any) -> None:
    entered, released = asyncio.Event(), asyncio.Event()

    @tool
    async def wait() -> str:
        """Wait."""
        entered.set()
        await released.wait()
        return "done"

    def answer(request: Any) -> Any:
        return tool_call("wait") if request.messages[-1].text == "wait" else "ok"

    service = new_service(tools=wait, when_busy="raise")
    async with AsyncExitStack() as stack:
        container = await stack.enter_async_context(container_of(store, service, script=answer))
        param = request.node.callspec.params["store"]
        url = None if param == "memory" else request.getfixturevalue(param)
        other = store if url is None else await stack.enter_async_context(open_store(url))
        there = await stack.enter_async_context(container_of(other, service, script=answer))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(say(container, service, "room", "wait"))
            await entered.wait()
            for each in (container, there):
                with pytest.raises(ConversationBusyError):
                    await say(each, service, "room", "2")
            await say(there, service, "another", "1")
            released.set()
        await say(there, service, "room", "2")
        assert await texts(container.conversations.of(service, "room")) == ["wait", None, "done", "ok", "2", "ok"]


# --- any loop


async def test_all_methods_can_be_awaited_on_any_event_loop(store: Any) -> None:
    service = new_service()
    async with container_of(store, service) as container:

        async def use() -> list[LogEntry]:
            conversations = container.conversations
            room = await conversations.create(service, "room", title="T")
            await container.get(service).chat("room", "1")
            entries = await room.history()
            await room.rewind(entries[0])
            await room.rename("X")
            restored = await conversations.restore(service, "copy", await room.export())
            await (await restored.fork("third")).delete()
            assert await room.messages() == []
            await conversations.forget(service=service, memory_id="copy")
            await room.delete()
            return entries

        entries = await asyncio.to_thread(lambda: asyncio.run(use()))
        assert [type(each.message) for each in entries] == [UserMessage, AiMessage]
