"""Conversation-scoped beans in runs: recorded with results of tools, kept while a run waits, stored with its turn."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import pytest
from pydantic import BaseModel

from tests.runs.replies import asks, says
from toolbox import (
    ChatMemoryKey,
    ChatMemoryStore,
    Container,
    ConversationSuspendedError,
    Inject,
    InMemoryChatMemoryStore,
    MemoryId,
    Result,
    register_ai_service,
    tool,
)
from toolbox.conversations import FullHistory, conversation_scoped
from toolbox.interceptors import ToolInterceptor, ToolInvocation, ToolProceed, interceptors
from toolbox.runs import (
    InMemoryRunStore,
    Retries,
    RunChanges,
    RunFailedError,
    RunId,
    RunStore,
    RunStoreError,
    StoredRecord,
    ToolDeferred,
    approve,
    durable,
    respond,
)
from toolbox.testing import ScriptedChatModel, skip_time, tool_call

pytestmark = pytest.mark.anyio

HOUR = timedelta(hours=1)

NAME = f"{__name__}.Cart"


@conversation_scoped
class Cart(BaseModel):
    items: list[str] = []

    @tool
    def add(self, item: str) -> str:
        """Add an item."""
        self.items.append(item)
        return ", ".join(self.items)

    @tool(deferred=True)
    def order(self, item: str) -> str:
        """Order an item that arrives later."""
        self.items.append(f"{item} (ordered)")
        raise ToolDeferred("ordered")

    @tool(requires_approval=True)
    def pay(self) -> str:
        """Pay for everything."""
        self.items.append("paid")
        return "paid"


@register_ai_service(name="shop", tools=Cart)
class Shop(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    @durable
    async def buy(self, run: RunId, room: MemoryId[str], text: str) -> str: ...


@register_ai_service(name="till", tools=Cart, chat_memory=None)
class Till(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...


class LastingRunStore(InMemoryRunStore):
    """A store for several containers, as those of processes. The first end of a run can be lost."""

    persistent = True

    def __init__(self, *, loses: str = "") -> None:
        super().__init__()
        self.loses = loses
        self.written: list[StoredRecord] = []

    async def append(
        self,
        run_id: str,
        generation: int,
        records: Sequence[StoredRecord],
        changes: RunChanges | None = None,
        events: Sequence[str] = (),
    ) -> int:
        lost = self.loses == "end" and changes is not None and changes.status == "completed"
        if lost or (self.loses and any(each.key == self.loses for each in records)):
            self.loses = ""
            raise ConnectionError
        self.written += records
        return await super().append(run_id, generation, records, changes, events)


def process(runs: Any, conversations: Any, *replies: Any, services: Any = (Shop, Till)) -> Container:
    container = Container(models={"default": ScriptedChatModel(replies)}).register(*services)
    return container.register_instance(conversations, ChatMemoryStore).register_instance(runs, RunStore)


async def items(conversations: InMemoryChatMemoryStore, service: str = "shop", room: str = "7") -> Any:
    log = await conversations.read_since(ChatMemoryKey(service, room), lambda head: 0)
    return None if log is None else log.head.beans.get(NAME, {}).get("items")


async def until_it_waits(here: Container, run_id: str) -> None:
    """Wait until the first try of a run has failed."""
    run = await here.runs.get(run_id)
    while run.error is None:
        await asyncio.sleep(0.01)
        run = await here.runs.get(run_id)


def add(item: str) -> Any:
    return tool_call("add", {"item": item})


PAY = tool_call("pay", {})


async def test_a_suspended_run_keeps_the_bean_as_it_was_and_stores_it_when_it_ends() -> None:
    runs, conversations = LastingRunStore(), InMemoryChatMemoryStore()
    async with process(runs, conversations, asks(add("soup")), asks(PAY)) as here:
        run_id = (await here.get(Shop).chat("7", "soup, please")).run_id
        assert run_id is not None
        assert await items(conversations) is None
    async with process(runs, conversations, asks(add("bread")), asks(PAY)) as here:
        await here.runs.resume(run_id, {"1": approve()})
        assert await items(conversations) is None  # it waits again
    async with process(runs, conversations, says("done")) as here:
        await here.runs.resume(run_id, {"3": approve()})

    assert await items(conversations) == ["soup", "paid", "bread", "paid"]


@pytest.mark.parametrize("loses", ["#r1", "1", "#r2", "end"])
async def test_a_run_goes_on_with_the_bean_as_its_last_recorded_tool_left_it(loses: str) -> None:
    runs, conversations = LastingRunStore(loses=loses), InMemoryChatMemoryStore()
    replies = {"#r0": asks(add("soup")), "#r1": asks(add("bread")), "#r2": says("done")}
    async with process(runs, conversations, *replies.values()) as here:
        with pytest.raises(RunStoreError):
            await here.get(Shop).buy("order 1", "7", "soup and bread")
        assert await items(conversations) == (["soup", "bread"] if loses == "end" else None)
    recorded = {each.key for each in runs.written}
    left = [reply for name, reply in replies.items() if name not in recorded]
    tells_unknown = [says("done")] if loses == "1" else []  # the tool had begun: the model reads that nobody knows
    async with process(runs, conversations, *left, *tells_unknown) as here:
        assert await here.get(Shop).buy("order 1", "7", "soup and bread") == "done"

    assert await items(conversations) == (["soup"] if loses == "1" else ["soup", "bread"])
    assert len(await conversations.get_messages(ChatMemoryKey("shop", "7"))) == 6


async def test_a_run_that_is_tried_again_does_not_overwrite_what_others_changed_after_its_failure() -> None:
    runs, conversations = LastingRunStore(), InMemoryChatMemoryStore()
    replies = asks(add("soup")), ConnectionError("away"), asks(add("bread")), says("done")
    async with process(runs, conversations, *replies) as here:
        with pytest.raises(ConnectionError):
            await here.get(Shop).buy("order 1", "7", "soup")
        assert await items(conversations) == ["soup"]
        await here.get(Shop).chat("7", "bread")
    async with process(runs, conversations, asks(add("cake")), says("done")) as here:
        await here.runs.retry("order 1")

    assert await items(conversations) == ["soup", "bread", "cake"]


@pytest.mark.parametrize("service", [Shop, Till])
async def test_a_run_that_failed_went_on_and_was_cancelled_keeps_the_beans_of_its_last_part(service: Any) -> None:
    conversations, name = InMemoryChatMemoryStore(), service.__name__.lower()
    replies = asks(add("soup")), ConnectionError("away"), asks(add("bread")), asks(PAY)
    async with process(LastingRunStore(), conversations, *replies) as here:
        run = await here.runs.start(service.chat, "7", "soup and bread")
        with pytest.raises(RunFailedError):
            await here.runs.result(run.id, timeout=30)
        assert await items(conversations, name) == ["soup"]
        await here.runs.retry(run.id)
        await here.runs.cancel(run.id)

    assert await items(conversations, name) == ["soup", "bread"]


@pytest.mark.parametrize("view", [FullHistory(), None])
async def test_a_fork_goes_on_from_the_beans_that_a_waiting_run_has_stored(view: Any) -> None:
    @register_ai_service(name="patient", tools=Cart, chat_memory=view, on_suspended="continue")
    class Patient(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    conversations = InMemoryChatMemoryStore()
    replies = asks(add("soup")), asks(PAY), says("still here")
    async with process(LastingRunStore(), conversations, *replies, services=(Patient,)) as here:
        await here.get(Patient).chat("7", "soup, please")
        room = here.conversations.of(Patient, "7")
        at_once = await room.fork("8")
        await here.get(Patient).chat("7", "hello?")
        later = await room.fork("9")

        assert [await items(conversations, "patient", each) for each in ("8", "9")] == [["soup"], ["soup"]]
        assert await at_once.history() == []
        assert [each.message.text for each in await later.history()] == (["hello?", "still here"] if view else [])


@pytest.mark.parametrize("view", [FullHistory(), None])
async def test_a_run_that_waits_for_its_next_try_does_not_overwrite_what_others_change_until_then(view: Any) -> None:
    @register_ai_service(name="patient", tools=Cart, chat_memory=view, run_retries=Retries(attempts=2, wait=HOUR))
    class Patient(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    conversations = InMemoryChatMemoryStore()
    replies = asks(add("soup")), ConnectionError("away"), asks(add("bread")), says("done"), says("done")
    async with process(InMemoryRunStore(), conversations, *replies, services=(Patient,)) as here:
        run = await here.runs.start(Patient.chat, "7", "soup")
        await until_it_waits(here, run.id)
        await here.get(Patient).chat("7", "bread")
        assert [each.message.text for each in await here.conversations.of(Patient, "7").history()][-1:] == (
            ["done"] if view else []
        )
        await skip_time(here, 2 * HOUR)
        assert await here.runs.result(run.id, timeout=30) == "done"

    assert await items(conversations, "patient") == ["soup", "bread"]


async def test_a_changed_bean_is_in_the_record_of_the_tool_result_before_which_it_changed() -> None:
    runs, conversations = LastingRunStore(), InMemoryChatMemoryStore()
    replies = asks(add("soup")), asks(tool_call("look", {})), asks(add("bread")), says("done")

    @tool
    async def look() -> str:
        """Look around."""
        return "nothing"

    @register_ai_service(name="shop", tools=[Cart, look])
    class Looking(Protocol):
        @durable
        async def buy(self, run: RunId, room: MemoryId[str], text: str) -> str: ...

    async with process(runs, conversations, *replies, services=(Looking,)) as here:
        await here.get(Looking).buy("order 1", "7", "soup and bread")

    results = [each.data for each in runs.written if each.kind == "result"]
    assert [NAME in each for each in results] == [True, False, True]


async def test_a_deferred_call_keeps_what_it_changed() -> None:
    runs, conversations = LastingRunStore(), InMemoryChatMemoryStore()
    async with process(runs, conversations, asks(tool_call("order", {"item": "cake"}))) as here:
        run_id = (await here.get(Shop).chat("7", "a cake")).run_id
        assert run_id is not None
    async with process(runs, conversations, says("done")) as here:
        await here.runs.resume(run_id, {"0": respond("it is here")})

    assert await items(conversations) == ["cake (ordered)"]


async def test_services_that_are_tools_record_the_beans_of_their_callers_run() -> None:
    @register_ai_service(tools=Cart)
    class Inner(Protocol):
        @tool
        async def fill(self, text: str) -> str:
            """Fill the cart."""
            ...

    @register_ai_service(name="shop", tools=[Inner, Cart])
    class Outer(Protocol):
        @durable
        async def buy(self, run: RunId, room: MemoryId[str], text: str) -> str: ...

    runs, conversations = LastingRunStore(loses="0/#r1".replace("/", "")), InMemoryChatMemoryStore()
    services = (Outer, Inner)
    script = asks(tool_call("fill", {"text": "soup"})), asks(add("soup")), says("filled"), says("done")
    async with process(runs, conversations, *script[:3], services=services) as here:
        with pytest.raises(RunStoreError):
            await here.get(Outer).buy("order 1", "7", "soup")
    async with process(runs, conversations, *script[2:], services=services) as here:
        assert await here.get(Outer).buy("order 1", "7", "soup") == "done"

    assert await items(conversations) == ["soup"]


async def test_a_conversation_with_a_suspended_run_is_refused_to_calls_and_blocks_also_without_chat_memory() -> None:
    runs, conversations = LastingRunStore(), InMemoryChatMemoryStore()
    async with process(runs, conversations, asks(add("soup")), asks(PAY), says("done")) as here:
        run_id = (await here.get(Till).chat("7", "soup, please")).run_id
        assert run_id is not None
        with pytest.raises(ConversationSuspendedError):
            await here.get(Till).chat("7", "hello?")
        with pytest.raises(ConversationSuspendedError):
            async with here.conversation_scope(Till, "7"):
                raise AssertionError
        async with here.conversation_scope(Till, "8"):
            (await here.aget(Cart)).items.append("bread")

        await here.runs.resume(run_id, {"1": approve()})
        async with here.conversation_scope(Till, "7"):
            assert (await here.aget(Cart)).items == ["soup", "paid"]
    assert await conversations.get_messages(ChatMemoryKey("till", "7")) == ()


async def test_a_run_that_waits_beside_other_calls_never_overwrites_what_they_change() -> None:
    @register_ai_service(name="shop", tools=Cart, on_suspended="continue")
    class Going(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    runs, conversations, services = LastingRunStore(), InMemoryChatMemoryStore(), (Going,)
    replies = asks(add("soup")), asks(PAY), asks(add("bread")), says("here it is")
    async with process(runs, conversations, *replies, services=services) as here:
        run_id = (await here.get(Going).chat("7", "soup, please")).run_id
        assert run_id is not None
        assert await items(conversations) == ["soup"]
        await here.get(Going).chat("7", "bread, please")
        async with here.conversation_scope(Going, "7"):
            (await here.aget(Cart)).items.append("cake")
    async with process(runs, conversations, says("done"), services=services) as here:
        await here.runs.resume(run_id, {"1": approve()})

    assert await items(conversations) == ["soup", "bread", "cake", "paid"]


async def test_a_durable_call_inside_a_block_joins_it() -> None:
    runs, conversations = LastingRunStore(), InMemoryChatMemoryStore()
    here = process(runs, conversations, asks(add("bread")), says("done"))
    async with here, asyncio.timeout(5), here.conversation_scope(Shop, "7"):
        cart = await here.aget(Cart)
        cart.items.append("soup")
        await here.get(Shop).buy("order 1", "7", "bread")
        assert cart.items == ["soup", "bread"]
        assert await items(conversations) == ["soup", "bread"]


async def test_a_run_that_was_started_changes_the_beans_of_its_conversation() -> None:
    runs, conversations = LastingRunStore(), InMemoryChatMemoryStore()
    async with process(runs, conversations, asks(add("soup")), says("done")) as here:
        started = await here.runs.start(Shop.buy, "order 1", "7", "soup")
        await here.runs.result(started)

    assert await items(conversations) == ["soup"]


async def test_what_interceptors_change_before_a_tool_is_recorded_with_its_result() -> None:
    class Counting(ToolInterceptor):
        async def around_tool(self, call: ToolInvocation, proceed: ToolProceed) -> Any:
            if not call.replayed:
                (await here.aget(Cart)).items.append(f"before {call.specification.name}")
            return await proceed(call)

    @tool
    async def look(cart: Inject[Cart]) -> str:
        """Look into the cart."""
        return ", ".join(cart.items)

    @register_ai_service(name="shop", tools=[look])
    @interceptors(Counting)
    class Looking(Protocol):
        @durable
        async def buy(self, run: RunId, room: MemoryId[str], text: str) -> str: ...

    runs, conversations = LastingRunStore(loses="#r1"), InMemoryChatMemoryStore()
    services = (Looking, Counting, Cart)
    async with process(runs, conversations, asks(tool_call("look", {})), says("done"), services=services) as here:
        with pytest.raises(RunStoreError):
            await here.get(Looking).buy("order 1", "7", "look")
    async with process(runs, conversations, says("done"), services=services) as here:
        assert await here.get(Looking).buy("order 1", "7", "look") == "done"

    assert await items(conversations) == ["before look"]
