"""Memory stores of services: beans, locks, errors, stores that containers share."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

import pytest

from toolbox import (
    AiMessage,
    ChatMemoryKey,
    ChatMemoryStore,
    Container,
    MemoryId,
    Message,
    UserMessage,
    application_scoped,
    call_scoped,
    produces,
    register_ai_service,
    request_scoped,
)
from toolbox.conversations.leases import Leases
from toolbox.testing import ScriptedChatModel

from .conversing import Other, said

pytestmark = pytest.mark.anyio


@application_scoped
class Store:
    """A store that records the calls of its methods."""

    def __init__(self) -> None:
        self.kept: dict[ChatMemoryKey, list[Message]] = {}
        self.asked: list[str] = []

    async def get_messages(self, key: ChatMemoryKey) -> list[Message]:
        self.asked.append("get")
        return list(self.kept.get(key, ()))

    async def update_messages(self, key: ChatMemoryKey, messages: Sequence[Message]) -> None:
        self.asked.append("update")
        self.kept[key] = list(messages)

    async def delete_messages(self, key: ChatMemoryKey) -> None:
        self.asked.append("delete")
        self.kept.pop(key, None)


class LockingStore(Store):
    def __init__(self) -> None:
        super().__init__()
        self.locked: list[ChatMemoryKey] = []
        self.held: set[ChatMemoryKey] = set()

    @asynccontextmanager
    async def lock(self, key: ChatMemoryKey) -> AsyncIterator[None]:
        assert key not in self.held
        self.locked.append(key)
        self.held.add(key)
        try:
            yield
        finally:
            self.held.discard(key)


async def test_store_bean_keeps_the_conversations() -> None:
    model = ScriptedChatModel(["a", "b"])
    container = Container(models={"default": model}).register(Other, Store).bind(ChatMemoryStore, Store)
    async with container:
        await container.get(Other).chat("s", "x")
        store = container.get(Store)
        assert store.asked == ["get", "update"]
        [key] = store.kept
        assert key.memory_id == "s"
        assert "Other" in key.service
        assert isinstance(key.service, str)
        store.kept[key] = [UserMessage("from"), AiMessage("elsewhere")]
        await container.get(Other).chat("s", "y")
    assert said(model.requests[1]) == ["from", "elsewhere", "y"]


async def test_stores_can_be_registered_as_an_instance_or_produced() -> None:
    store = Store()
    container = Container(models={"default": ScriptedChatModel(["a"])}).register(Other)
    async with container.register_instance(store, ChatMemoryStore):
        await container.get(Other).chat("s", "x")
    assert len(store.kept) == 1

    produced = Store()

    @produces(scope="application")
    async def made() -> ChatMemoryStore:
        return produced

    async with Container(models={"default": ScriptedChatModel(["a"])}).register(Other, made) as container:
        await container.get(Other).chat("s", "x")
    assert len(produced.kept) == 1


async def test_lock_method_of_the_store_is_used() -> None:
    store = LockingStore()
    container = Container(models={"default": ScriptedChatModel(["a", "b"])}).register(Other)
    async with container.register_instance(store, ChatMemoryStore):
        await asyncio.gather(container.get(Other).chat("s", "x"), container.get(Other).chat("t", "y"))
        assert {key.memory_id for key in store.locked} == {"s", "t"}
        assert not store.held


async def test_failed_calls_do_not_update_the_store() -> None:
    store = LockingStore()
    container = Container(models={"default": ScriptedChatModel([ConnectionError()])}).register(Other)
    async with container.register_instance(store, ChatMemoryStore):
        with pytest.raises(ConnectionError):
            await container.get(Other).chat("s", "x")
    assert store.asked == ["get"]
    assert not store.held


async def test_store_errors_reach_the_caller() -> None:
    class Full(Store):
        async def update_messages(self, key: ChatMemoryKey, messages: Sequence[Message]) -> None:
            raise OSError("disk full")

    container = Container(models={"default": ScriptedChatModel(["a"])}).register(Other)
    async with container.register_instance(Full(), ChatMemoryStore):
        with pytest.raises(OSError, match="disk full"):
            await container.get(Other).chat("s", "x")


def test_request_scoped_stores_are_a_problem() -> None:
    @register_ai_service
    class Remembering(Protocol):
        async def chat(self, session: MemoryId[str], text: str) -> str: ...

    @register_ai_service
    class Another(Protocol):
        async def chat(self, session: MemoryId[str], text: str) -> str: ...

    class Store(ChatMemoryStore):
        async def get_messages(self, key: ChatMemoryKey) -> Sequence[Message]:
            return ()

        async def update_messages(self, key: ChatMemoryKey, messages: Sequence[Message]) -> None: ...

        async def delete_messages(self, key: ChatMemoryKey) -> None: ...

    model = ScriptedChatModel([])
    for scoped in (request_scoped, call_scoped):
        store = scoped(type("ScopedStore", (Store,), {}))
        [problem] = Container(models={"default": model}).register(Remembering, Another, store).check()
        assert "ScopedStore" in problem.what
        assert "application" in problem.fix


async def test_stores_without_a_scope_live_as_long_as_the_container() -> None:
    stopped: list[bool] = []

    class Store(ChatMemoryStore):
        def __init__(self) -> None:
            self.kept: dict[ChatMemoryKey, Sequence[Message]] = {}

        async def get_messages(self, key: ChatMemoryKey) -> Sequence[Message]:
            assert not stopped
            return self.kept.get(key, ())

        async def update_messages(self, key: ChatMemoryKey, messages: Sequence[Message]) -> None:
            self.kept[key] = messages

        async def delete_messages(self, key: ChatMemoryKey) -> None: ...

        def stop(self) -> None:
            stopped.append(True)

    @register_ai_service
    class Remembering(Protocol):
        async def chat(self, session: MemoryId[str], text: str) -> str: ...

    model = ScriptedChatModel(["a", "b"])
    async with Container(models={"default": model}).register(Remembering, Store) as container:
        for text in ("x", "y"):
            async with container.request_scope():
                await container.get(Remembering).chat("s", text)
        assert stopped == []
    assert stopped == [True]
    assert len(model.requests[1].messages) == 3


async def test_containers_that_share_a_store_run_calls_one_after_another() -> None:
    class Store:
        def __init__(self) -> None:
            self.kept: dict[ChatMemoryKey, Sequence[Message]] = {}

        async def get_messages(self, key: ChatMemoryKey) -> Sequence[Message]:
            return self.kept.get(key, ())

        async def update_messages(self, key: ChatMemoryKey, messages: Sequence[Message]) -> None:
            await asyncio.sleep(0)
            self.kept[key] = messages

        async def delete_messages(self, key: ChatMemoryKey) -> None: ...

    @register_ai_service
    class Remembering(Protocol):
        async def chat(self, session: MemoryId[str], text: str) -> str: ...

    async def slowly(request: Any) -> str:
        await asyncio.sleep(0.001)
        return "answer"

    store = Store()

    def container() -> Container:
        made = Container(models={"default": ScriptedChatModel([slowly] * 5)}).register(Remembering)
        return made.register_instance(store, ChatMemoryStore)

    async with container() as one, container() as two:
        calls = [each.get(Remembering).chat("s", "x") for each in (one, two) for _ in range(5)]
        await asyncio.gather(*calls)
    [kept] = store.kept.values()
    assert len(kept) == 20


class SlowKeeper:
    """Keeps leases; each renewal and each release waits for its event."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.renewing, self.renewal = asyncio.Event(), asyncio.Event()
        self.releasing, self.release = asyncio.Event(), asyncio.Event()

    async def take(self, key: ChatMemoryKey, token: str, seconds: float) -> bool:
        return True

    async def renew(self, key: ChatMemoryKey, token: str, seconds: float) -> bool:
        self.renewing.set()
        await self.renewal.wait()
        self.order.append("renewed")
        return True

    async def give_back(self, key: ChatMemoryKey, token: str) -> None:
        self.releasing.set()
        try:
            await self.release.wait()
            self.order.append("released")
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # as when a connection is returned
            self.order.append("cancelled")
            raise


async def test_a_lease_is_released_after_the_renewal_in_progress() -> None:
    keeper = SlowKeeper()
    keeper.release.set()
    async with Leases(keeper, 0.03).lock(ChatMemoryKey("service", "room 7")):
        await keeper.renewing.wait()
        asyncio.get_running_loop().call_later(0.01, keeper.renewal.set)

    assert keeper.order == ["renewed", "released"]


async def test_a_database_that_does_not_answer_does_not_hold_a_call_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolbox.conversations.leases._LAST_WORK", 0.05)
    keeper = SlowKeeper()  # neither a renewal in progress nor the release ends
    leases = Leases(keeper, 0.03)
    async with asyncio.timeout(60):
        async with leases.lock(ChatMemoryKey("service", "room 7")):
            await keeper.renewing.wait()
        await leases.stop()

    assert keeper.order == []


async def test_releases_that_take_too_long_have_ended_when_the_store_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolbox.conversations.leases._LAST_WORK", 0.05)
    keeper = SlowKeeper()
    leases = Leases(keeper, 10)

    async def call() -> None:
        async with leases.lock(ChatMemoryKey("service", "room 7")):
            pass

    task = asyncio.create_task(call())
    await keeper.releasing.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await leases.stop()

    assert keeper.order == ["cancelled"]


class ForgetfulKeeper(SlowKeeper):
    """Loses a cancellation while it takes a lease, as `asyncio.wait_for` of Python 3.11 can."""

    def __init__(self, taken: bool) -> None:
        super().__init__()
        self.release.set()
        self.taken, self.taking = taken, asyncio.Event()

    async def take(self, key: ChatMemoryKey, token: str, seconds: float) -> bool:
        self.taking.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return self.taken


@pytest.mark.parametrize("taken", [True, False])
async def test_a_call_whose_cancellation_the_store_has_lost_stops_waiting(taken: bool) -> None:
    keeper = ForgetfulKeeper(taken)
    leases = Leases(keeper, 10)

    async def call() -> None:
        async with leases.lock(ChatMemoryKey("service", "room 7")):
            pytest.fail("the call has gone on")

    task = asyncio.create_task(call())
    await keeper.taking.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 60)

    assert keeper.order == ["released"]
