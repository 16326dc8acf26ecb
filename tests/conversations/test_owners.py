"""Whose a conversation is: the identity of its first call, and who may use it."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any, Protocol

import pytest

from tests.conversations.three_methods import ThreeMethods
from toolbox import (
    AccessDeniedError,
    ChatMemoryStore,
    Container,
    ForbiddenError,
    IllegalConfigurationError,
    InMemoryChatMemoryStore,
    MemoryId,
    Result,
    UserMessage,
    create_ai_service,
    produces,
    register_ai_service,
    tool,
)
from toolbox.container import internals_of
from toolbox.conversations import Conversation
from toolbox.conversations.conversations_bean import find_open_runs
from toolbox.errors import ConversationSuspendedError
from toolbox.runs import InMemoryRunStore, RunStore, approve, runs_of
from toolbox.security import SecurityIdentity
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio

ANN, BOB, NOBODY = SecurityIdentity("ann"), SecurityIdentity("bob"), SecurityIdentity.anonymous()
ran: list[int] = []


@tool(requires_approval=True)
async def refund(order: int) -> str:
    """Refund an order."""
    ran.append(order)
    return "refunded"


class Chat(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...


@register_ai_service(name="desk", tools=refund)
class Desk(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...


@register_ai_service(name="shared", tools=refund, shared_conversations=True)
class Shared(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...


@register_ai_service(name="cancelling", tools=refund, on_suspended="cancel")
class Cancelling(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...


def answer(request: Any) -> Any:
    newest = request.messages[-1]
    return tool_call("refund", {"order": 7}) if newest.text == "refund" else f"a{newest.text}"


def container_of(*services: type[Any], **options: Any) -> Container:
    made = Container(models={"default": ScriptedChatModel([answer] * 50)}, seeds=[SecurityIdentity], **options)
    return made.register(*services)


async def say(container: Container, service: type[Chat], text: str, by: Any = None, room: str = "room") -> Result[str]:
    async with AsyncExitStack() as stack:
        if by is not None:
            await stack.enter_async_context(container.request_scope({SecurityIdentity: by}))
        return await container.get(service).chat(room, text)


async def owner_of(container: Container, service: type[Chat], room: str = "room") -> str | None:
    return (await container.conversations.of(service, room).info()).owner


# --- calls


async def test_a_refused_call_sends_and_cancels_nothing() -> None:
    async with container_of(Cancelling) as container:
        suspended = await say(container, Cancelling, "refund", by=ANN)
        model: Any = container.models["default"]
        sent = len(model.requests)
        for other in (BOB, NOBODY):
            with pytest.raises(AccessDeniedError) as raised:
                await say(container, Cancelling, "hello", by=other)
            assert isinstance(raised.value, ForbiddenError)
        assert len(model.requests) == sent
        assert (await container.runs.get(suspended.run_id or "")).status == "suspended"


async def test_the_first_call_that_is_suspended_owns_the_conversation() -> None:
    async with container_of(Desk) as container:
        suspended = await say(container, Desk, "refund", by=ANN)
        assert await owner_of(container, Desk) == "ann"
        assert await container.conversations.of(Desk, "room").history() == []
        with pytest.raises(AccessDeniedError):
            await say(container, Desk, "hello", by=BOB)
        with pytest.raises(ConversationSuspendedError):
            await say(container, Desk, "hello", by=ANN)
        async with container.request_scope({SecurityIdentity: BOB}):  # who may answer is not asked here
            await container.runs.resume(suspended.run_id or "", {suspended.pending[0].id: approve()}, by=BOB)
        assert await owner_of(container, Desk) == "ann"
        assert len(await container.conversations.of(Desk, "room").history()) == 4


@pytest.mark.parametrize("first", [None, NOBODY])
async def test_what_has_no_owner_is_not_checked(first: SecurityIdentity | None) -> None:
    async with container_of(Desk) as container:
        for by in (first, ANN, BOB, NOBODY, None):
            await say(container, Desk, "hello", by=by)
        assert await owner_of(container, Desk) is None


@pytest.mark.parametrize("text", ["hello", "refund"])
async def test_a_conversation_that_was_created_without_an_owner_belongs_to_its_first_caller(text: str) -> None:
    async with container_of(Desk) as container:
        conversations = container.conversations
        for title in ("first", "second", "third"):
            await conversations.create(Desk, title, title=title)
        await say(container, Desk, text, by=ANN, room="first")
        assert await owner_of(container, Desk, "first") == "ann"
        with pytest.raises(AccessDeniedError):
            await say(container, Desk, "hello", by=BOB, room="first")
        await say(container, Desk, "hello", by=NOBODY, room="second")
        await say(container, Desk, text, by=ANN, room="second")
        assert await owner_of(container, Desk, "second") is None
        await conversations.of(Desk, "third").adopt("bob")
        await say(container, Desk, text, room="third")
        assert await owner_of(container, Desk, "third") == "bob"


async def test_a_call_that_fails_owns_nothing() -> None:
    def fail(request: Any) -> Any:
        raise RuntimeError("down")

    async with Container(models={"default": ScriptedChatModel([fail, "ok"])}, seeds=[SecurityIdentity]).register(
        Desk
    ) as container:
        with pytest.raises(RuntimeError):
            await say(container, Desk, "hello", by=ANN)
        await say(container, Desk, "hello", by=BOB)
        assert await owner_of(container, Desk) == "bob"


async def test_of_two_first_calls_the_first_in_its_turn_owns_the_conversation() -> None:
    async with container_of(Desk) as container:
        calls = [say(container, Desk, "hello", by=each) for each in (ANN, BOB)]
        first, second = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(first, Result)
        assert isinstance(second, AccessDeniedError)


async def test_attributes_that_run_identity_names_are_part_of_the_owner() -> None:
    def person(name: str, tenant: str | None) -> SecurityIdentity:
        attributes = {"token": "secret", "other": object()} | ({} if tenant is None else {"tenant": tenant})
        return SecurityIdentity(name, attributes=attributes)

    async with container_of(Desk, run_identity=("tenant",)) as container:
        await say(container, Desk, "hello", by=person("ann", "a"))
        await say(container, Desk, "hello", by=person("ann", "a"))
        for other in (person("ann", "b"), person("ann", None), person("bob", "a")):
            with pytest.raises(AccessDeniedError):
                await say(container, Desk, "hello", by=other)
        conversations = container.conversations
        for call in (
            lambda: conversations.create(Desk, "x", owner="ann"),
            lambda: conversations.restore(Desk, "x", {"turns": []}, owner="ann"),
            lambda: conversations.of(Desk, "room").adopt("ann"),
            lambda: conversations.list(owner="ann"),
            lambda: conversations.forget(owner="ann"),
        ):
            with pytest.raises(ValueError, match="tenant"):
                await call()
        assert [each.owner for each in await conversations.list(owner=person("ann", "a"))] == ["ann"]
        assert await conversations.list(owner=person("ann", "b")) == []
        await conversations.of(Desk, "room").adopt(person("bob", "b"))
        await say(container, Desk, "hello", by=person("bob", "b"))
        assert "secret" not in str(await conversations.of(Desk, "room").export())


async def test_several_people_use_a_shared_conversation() -> None:
    async with container_of(Shared) as container:
        for each in (ANN, BOB, NOBODY):
            await say(container, Shared, "hello", by=each)
        assert await owner_of(container, Shared) == "ann"
        async with container.request_scope({SecurityIdentity: BOB}):
            assert len(await container.conversations.of(Shared, "room").history()) == 6
            await container.runs.result(await container.runs.start(Shared.chat, "room", "hello"))


# --- runs


async def test_a_run_is_refused_before_it_is_stored() -> None:
    async with container_of(Desk) as container:
        await say(container, Desk, "hello", by=ANN)
        async with container.request_scope({SecurityIdentity: BOB}):
            with pytest.raises(AccessDeniedError):
                await container.runs.start(Desk.chat, "room", "hello")
        assert await container.runs.list() == []
        async with container.request_scope({SecurityIdentity: ANN}):
            run = await container.runs.start(Desk.chat, "room", "hello")
        await container.runs.result(run)
        run = await container.runs.start(Desk.chat, "room", "hello")  # the program's
        assert await container.runs.result(run)
        suspended = await container.runs.start(Desk.chat, "room", "refund")
        await container.runs.execute(suspended.id)  # until it is suspended
        await container.runs.resume(suspended.id, {"0": approve()})
        assert len(await container.conversations.of(Desk, "room").history()) == 10


async def test_of_two_first_runs_the_second_one_fails() -> None:
    async with container_of(Desk) as container:
        runs = []
        for each in (ANN, BOB):
            async with container.request_scope({SecurityIdentity: each}):
                runs.append(await container.runs.start(Desk.chat, "room", "hello"))
        ended = [await container.runs.execute(each.id) for each in runs]
        statuses = [(each.status, (each.error or "").partition(":")[0]) for each in ended]
        assert sorted(statuses) == [("completed", ""), ("failed", "AccessDeniedError")]


async def test_a_conversation_belongs_to_who_began_its_first_run_before_anything_is_stored() -> None:
    async with container_of(Desk, take_over_runs=False) as container:
        async with container.request_scope({SecurityIdentity: ANN}):
            run = await container.runs.start(Desk.chat, "room", "hello")
        room = container.conversations.of(Desk, "room")
        for other in (BOB, NOBODY):
            async with container.request_scope({SecurityIdentity: other}):
                for operation in (room.run, room.stop):
                    with pytest.raises(AccessDeniedError):
                        await operation()
                operator = container.conversations.of(Desk, "room", operator=True)
                assert await operator.run() == await container.runs.get(run.id)
        async with container.request_scope({SecurityIdentity: ANN}):
            assert (await room.run()).id == run.id
            assert await room.stop()
            assert (await container.runs.get(run.id)).status == "cancelled"
            assert await room.run() is None
            assert not await room.stop()


# --- operations


async def test_all_operations_of_a_room_are_for_its_owner() -> None:
    async with container_of(Desk) as container:
        await say(container, Desk, "hello", by=ANN)
        conversations = container.conversations
        [entry, _] = await conversations.of(Desk, "room").history()
        operations: dict[str, Callable[[Conversation], Any]] = {
            "info": lambda room: room.info(),
            "history": lambda room: room.history(),
            "messages": lambda room: room.messages(),
            "export": lambda room: room.export(),
            "run": lambda room: room.run(),
            "run of front ends": find_open_runs,
            "stop": lambda room: room.stop(),
            "approvals": lambda room: room.approvals(),
            "forget_approvals": lambda room: room.forget_approvals(),
            "rename": lambda room: room.rename("mine"),
            "fork": lambda room: room.fork("copy"),
            "rewind": lambda room: room.rewind(entry.id),
            "adopt": lambda room: room.adopt("bob"),
            "delete": lambda room: room.delete(),
        }
        public = {each for each in vars(Conversation) if not each.startswith("_")}
        assert {*operations, "put_in_charge"} - {"run of front ends"} == public - {"service", "memory_id"}
        for other in (BOB, NOBODY):
            async with container.request_scope({SecurityIdentity: other}):
                for operation in (*operations.values(), lambda room: room.put_in_charge(Desk.chat)):
                    with pytest.raises(AccessDeniedError):
                        await operation(conversations.of(Desk, "room"))
        assert (await conversations.of(Desk, "room").info()).title is None
        async with container.request_scope({SecurityIdentity: ANN}):
            for operation in operations.values():
                await operation(conversations.of(Desk, "room"))
                if operation is operations["adopt"]:
                    break
        async with container.request_scope({SecurityIdentity: ANN}):  # it is Bob's now
            with pytest.raises(AccessDeniedError):
                await conversations.of(Desk, "room").delete()
            operator = conversations.of(Desk, "room", operator=True)
            assert await (await operator.fork("third")).history() == []
            await operator.delete()
        async with container.request_scope():  # nobody has said who it is
            with pytest.raises(AccessDeniedError):
                await conversations.of(Desk, "copy").info()
        assert (await conversations.of(Desk, "copy").info()).owner == "ann"


async def test_creating_restoring_listing_and_forgetting_are_the_programs() -> None:
    async with container_of(Desk) as container:
        conversations = container.conversations
        async with container.request_scope({SecurityIdentity: BOB}):
            await conversations.create(Desk, "room", owner="ann")
            await conversations.restore(Desk, "old", {"turns": []}, owner=ANN)
            assert len(await conversations.list(owner="ann")) == 2
            with pytest.raises(AccessDeniedError):
                await say(container, Desk, "hello", by=BOB)
            await container.chat_memory(Desk, "room").add(UserMessage("from the program"))
            assert len(await container.chat_memory(Desk, "room").messages()) == 1
            assert (await conversations.forget(owner="ann"))["conversations"] == 2
        for nobody in (None, "", NOBODY):
            created = await conversations.create(Desk, f"of {nobody!s}", owner=nobody)
            assert (await created.info()).owner is None
            if nobody is not None:
                with pytest.raises(ValueError, match="anonymous"):
                    await created.adopt(nobody)
        with pytest.raises(TypeError, match="owner="):
            await conversations.create(Desk, "x", owner=7)  # type: ignore[arg-type]


async def test_an_identity_that_a_producer_provides_counts_in_requests_only() -> None:
    current = [ANN]

    @produces(scope="request")
    async def identity() -> SecurityIdentity:
        return current[0]

    models = {"default": ScriptedChatModel([answer] * 9)}
    async with Container(models=models).register(Desk, identity) as container:
        async with container.request_scope():
            await container.get(Desk).chat("room", "hello")
        assert await owner_of(container, Desk) == "ann"
        current[0] = BOB
        async with container.request_scope():
            with pytest.raises(AccessDeniedError):
                await container.get(Desk).chat("room", "hello")
        await container.get(Desk).chat("room", "hello")


async def test_a_scope_that_the_framework_opens_for_the_program_has_no_caller() -> None:
    async with container_of(Desk) as container:
        await say(container, Desk, "hello", by=ANN)
        internals = internals_of(container)
        scope = internals.request_scope({})
        scope.is_of_program = True
        async with scope:
            await container.get(Desk).chat("room", "hello")
            with pytest.raises(AccessDeniedError):
                await say(container, Desk, "hello", by=BOB)


async def test_a_service_without_a_container_checks_the_identity_that_it_has() -> None:
    who: list[SecurityIdentity | None] = [ANN]
    model = ScriptedChatModel([answer] * 9)
    desk = create_ai_service(Desk, chat_model=model, identity=lambda: who[0])
    await desk.chat("room", "hello")
    suspended = await desk.chat("room", "refund")
    for other in (BOB, None):
        who[0] = other
        with pytest.raises(AccessDeniedError):
            await desk.chat("room", "hello")
    await runs_of(desk).resume(suspended.run_id or "", {"0": approve()})
    who[0] = ANN
    await desk.chat("room", "hello")
    plain = create_ai_service(Desk, chat_model=model)
    await plain.chat("room", "hello")


# --- stores of programs


async def test_a_store_of_three_methods_keeps_no_owners_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    container = container_of(Desk).register_instance(ThreeMethods(), ChatMemoryStore)
    async with container:
        with caplog.at_level(logging.WARNING, "toolbox"):
            await say(container, Desk, "hello")
            await say(container, Desk, "hello", by=NOBODY)
            assert caplog.text == ""
            for each in (ANN, BOB):
                await say(container, Desk, "hello", by=each)
        assert caplog.text.count("ThreeMethods keeps no owners") == 1
        room = container.conversations.of(Desk, "room")
        for call in (
            room.info(),
            room.history(),
            container.conversations.list(),
            container.conversations.forget("ann"),
        ):
            with pytest.raises(IllegalConfigurationError, match="has only a view"):
                await call


@register_ai_service(name="asking", shared_conversations=True, when_busy="raise", former_names=["earlier"])
class Asking(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> str: ...


@register_ai_service(shared_conversations=True, when_busy="raise", former_names=["x"])
class Stateless(Protocol):
    async def ask(self, text: str) -> str: ...


@produces(scope="application")
def produced() -> ChatMemoryStore:
    return ThreeMethods()


@pytest.mark.parametrize("how", ["class", "instance", "producer"])
async def test_options_that_need_logs_are_problems_with_a_store_of_three_methods(how: str) -> None:
    container = container_of(Asking, Stateless)
    if how == "class":
        container.register(ThreeMethods)
    elif how == "instance":
        container.register_instance(ThreeMethods())
    else:
        container.register(produced)
    with pytest.raises(IllegalConfigurationError) as raised:
        async with container:
            pass
    problems = raised.value.problems
    assert {each.where for each in problems} == {"Asking"}
    options = ["shared_conversations=True", 'when_busy="raise"', "former_names="]
    assert [each.what.partition(" needs")[0] for each in problems] == options
    assert len(container.check()) == (3 if how != "producer" else 0)


async def test_invalid_options_are_problems() -> None:
    @register_ai_service(when_busy="never", shared_conversations=1)  # type: ignore[arg-type]
    class Wrong(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    facts = [each.what for each in container_of(Wrong).check()]
    assert facts == ["invalid when_busy='never'", "invalid shared_conversations=1"]


def test_the_default_store_supports_all_options() -> None:
    container = (
        container_of(Asking)
        .register_instance(InMemoryChatMemoryStore())
        .register_instance(InMemoryRunStore(), RunStore)
    )
    assert container.check() == []
