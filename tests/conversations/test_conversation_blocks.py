"""`container.conversation_scope(…)`: holding a conversation with its beans, on a store in memory."""

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from pydantic import BaseModel

from tests.conversations.three_methods import ThreeMethods
from toolbox import (
    BlockingCallNotAllowedError,
    ChatMemoryStore,
    Container,
    IllegalConfigurationError,
    ScopeNotActiveError,
    StoredBeanError,
    on_success,
    request_scoped,
)
from toolbox.container import internals_of
from toolbox.conversations import conversation_scoped
from toolbox.conversations.conversation_blocks import ConversationBlock, HeldConversation
from toolbox.di.scopes import find_conversation
from toolbox.di.stored_beans import StoredBeans
from toolbox.di.wiring import Wiring
from toolbox.security import SecurityIdentity

NAME = f"{__name__}.Order"


@conversation_scoped
class Order(BaseModel):
    lines: list[str] = []


class Refused(Exception):
    pass


@dataclass
class Store:
    """Keeps the beans of one conversation, for one caller at a time."""

    beans: dict[str, Any] = field(default_factory=dict)
    writes: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    events: list[str] = field(default_factory=list)
    scopes: list[Any] = field(default_factory=list)
    refuses: bool = False

    @asynccontextmanager
    async def hold(self, wiring: Wiring) -> AsyncIterator[HeldConversation]:
        async with asyncio.timeout(10), self.lock:
            if self.refuses:
                raise Refused
            self.scopes.append(wiring.active_scope().request)
            self.events.append("held")
            try:
                yield HeldConversation("room", dict(self.beans), "the room", self.write)
            except BaseException as error:
                self.events.append(type(error).__name__)
                raise
            finally:
                self.events.append("released")

    async def write(self, beans: Mapping[str, Any]) -> None:
        self.beans.update(beans)
        self.writes += 1
        self.events.append("stored")


def wiring_of(container: Container) -> Wiring:
    wiring = internals_of(container).wiring
    assert wiring is not None
    return wiring


def block(container: Container, store: Store) -> ConversationBlock:
    wiring, internals = wiring_of(container), internals_of(container)
    at_home, track = partial(internals.at_home, what="a block"), partial(internals.host.running.task, "a block")
    return ConversationBlock(wiring, partial(store.hold, wiring), at_home, track)


def test_a_block_stores_what_changed_and_releases_the_conversation() -> None:
    async def run() -> None:
        store = Store()
        async with Container().register(Order) as container:
            async with block(container, store) as room:
                assert room == "the room"
                (await container.aget(Order)).lines.append("soup")
            assert store.beans == {NAME: {"lines": ["soup"]}}
            async with block(container, store):
                assert container.get(Order).lines == ["soup"]
            with pytest.raises(ScopeNotActiveError):
                container.get(Order)
        assert store.writes == 1
        assert store.events == ["held", "stored", "released", "held", "released"]

    asyncio.run(run())


def test_a_block_works_on_threads_without_an_event_loop() -> None:
    store = Store()
    with Container().register(Order) as container:
        for line in ("soup", "bread"):
            with block(container, store):
                container.get(Order).lines.append(line)
        with pytest.raises(Refused), block(container, store):
            container.get(Order).lines.append("cake")
            raise Refused

    assert store.beans == {NAME: {"lines": ["soup", "bread"]}}
    assert store.events[-2:] == ["Refused", "released"]


def test_a_block_on_another_event_loop_holds_the_conversation_on_that_of_the_container() -> None:
    store = Store()

    async def use(container: Container) -> None:
        async with block(container, store):
            (await container.aget(Order)).lines.append("soup")

    with Container().register(Order) as container:
        asyncio.run(use(container))
        asyncio.run(use(container))

    assert store.beans == {NAME: {"lines": ["soup", "soup"]}}


def test_with_is_refused_on_an_event_loop() -> None:
    async def run() -> None:
        async with Container().register(Order) as container:
            with pytest.raises(BlockingCallNotAllowedError), block(container, Store()):
                pass

    asyncio.run(run())


def test_a_block_that_raises_stores_nothing_and_the_store_gets_the_error() -> None:
    async def run() -> None:
        store = Store()
        async with Container().register(Order) as container:
            with pytest.raises(Refused):
                async with block(container, store):
                    container.get(Order).lines.append("soup")
                    raise Refused
        assert (store.beans, store.events) == ({}, ["held", "Refused", "released"])

    asyncio.run(run())


def test_a_conversation_that_is_refused_opens_no_scope() -> None:
    async def run() -> None:
        store = Store(refuses=True)
        async with Container().register(Order) as container:
            with pytest.raises(Refused):
                async with block(container, store):
                    raise AssertionError
            with pytest.raises(ScopeNotActiveError):
                container.get(Order)
            assert not store.lock.locked()

    asyncio.run(run())


def test_a_request_scope_is_opened_if_none_is_active_and_after_the_conversation_is_held() -> None:
    @request_scoped
    class Cart:
        pass

    async def run() -> None:
        store = Store()
        async with Container(seeds=[SecurityIdentity]).register(Order, Cart) as container:
            async with block(container, store):
                container.get(Cart)
            async with container.request_scope({SecurityIdentity: SecurityIdentity("ann")}):
                cart = container.get(Cart)
                async with block(container, store):
                    assert container.get(Cart) is cart
                    assert container.get(SecurityIdentity).name == "ann"
        outside, inside = store.scopes
        assert outside is None
        assert inside is not None

    asyncio.run(run())


def test_methods_on_success_of_the_requests_beans_are_called_before_the_beans_are_stored() -> None:
    store = Store()

    @request_scoped
    class Work:
        @on_success
        def commit(self) -> None:
            store.events.append("committed")
            if store.refuses:
                raise Refused

    async def run() -> None:
        async with Container().register(Order, Work) as container:
            async with block(container, store):
                container.get(Work)
                container.get(Order).lines.append("soup")
            assert store.events == ["held", "committed", "stored", "released"]
            with pytest.raises(Refused):
                async with block(container, store):
                    store.refuses = True
                    container.get(Work)
                    container.get(Order).lines.append("bread")
        assert store.beans == {NAME: {"lines": ["soup"]}}
        assert store.events[-1] == "released"

    asyncio.run(run())


def test_what_a_call_inside_has_stored_is_not_stored_again() -> None:
    async def run() -> None:
        store = Store()
        async with Container().register(Order) as container, block(container, store):
            order = await container.aget(Order)
            order.lines.append("soup")
            joined = find_conversation("room")
            assert joined is not None
            joined.beans.note_stored(joined.beans.changed())  # as the call does at its end
        assert store.writes == 0

    asyncio.run(run())


def test_an_invalid_bean_is_the_error_of_the_block_and_the_conversation_is_released() -> None:
    async def run() -> None:
        store = Store()
        async with Container().register(Order) as container:
            with pytest.raises(StoredBeanError):
                async with block(container, store):
                    container.get(Order).lines = 3  # type: ignore[assignment]
        assert (store.beans, store.events) == ({}, ["held", "StoredBeanError", "released"])

    asyncio.run(run())


def test_a_cancelled_block_stores_nothing_and_releases_the_conversation() -> None:
    async def run() -> None:
        store = Store()
        async with Container().register(Order) as container:
            entered = asyncio.Event()

            async def hold() -> None:
                async with block(container, store):
                    container.get(Order).lines.append("soup")
                    entered.set()
                    await asyncio.Event().wait()

            holding = asyncio.create_task(hold())
            await entered.wait()
            waiting = asyncio.create_task(hold())
            await asyncio.sleep(0)
            waiting.cancel()
            holding.cancel()
            for task in (waiting, holding):
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert not store.lock.locked()
        assert store.beans == {}

    asyncio.run(run())


def test_blocks_of_threads_wait_for_each_other() -> None:
    store = Store()

    def add(container: Container) -> None:
        for _ in range(10):
            with block(container, store):
                container.get(Order).lines.append("soup")

    with Container().register(Order) as container:
        threads = [threading.Thread(target=add, args=(container,)) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()

    assert len(store.beans[NAME]["lines"]) == 40


def test_a_container_whose_store_keeps_no_beans_says_so() -> None:
    class Assistant: ...

    with (
        Container().register_instance(ThreeMethods(), as_type=ChatMemoryStore) as container,
        pytest.raises(IllegalConfigurationError, match="does not keep beans"),
        container.conversation_scope(Assistant, "room"),
    ):
        pass


def test_the_beans_of_a_block_that_was_never_entered_are_not_loaded() -> None:
    assert StoredBeans({NAME: {"lines": 3}}).changed() == {}
