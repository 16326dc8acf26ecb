"""Conversations that go on while a call waits, with `on_suspended="continue"`: in each kind of store."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol
from uuid import uuid4

import pytest
from pydantic import BaseModel, field_serializer

from tests.runs.approved_refunds import REFUND, refund
from tests.runs.replies import asks, ran, says
from toolbox import (
    AiMessage,
    ChatMemoryKey,
    ChatMemoryStore,
    Container,
    Inject,
    InMemoryChatMemoryStore,
    MemoryId,
    Result,
    TokenStream,
    ToolExecutionResultMessage,
    UserMessage,
    compensate_for,
    register_ai_service,
    sql,
    tool,
)
from toolbox.conversations import conversation_scoped
from toolbox.conversations.log import LogEntry, entries_of
from toolbox.conversations.stores import LogStore
from toolbox.errors import MemoryInUseError, StoredBeanError
from toolbox.runs import (
    InMemoryRunStore,
    RunConflictError,
    RunId,
    Runs,
    RunStore,
    RunStoreError,
    RunSuspended,
    ToolDeferred,
    approve,
    durable,
    reject,
    respond,
)
from toolbox.runs.store import joins
from toolbox.service_names import stored_name
from toolbox.sql import SqlChatMemoryStore, SqlRunStore
from toolbox.store_clock import own_clock_of
from toolbox.testing import ScriptedChatModel, skip_time, tool_call

from .conftest import open_store

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _nothing_ran() -> None:
    ran.clear()


class Kept(InMemoryRunStore):
    """Outlives its container, as far as durable methods know."""

    persistent = True


@dataclass
class Stores:
    """The stores of conversations and runs, and the log of a conversation."""

    conversations: LogStore
    runs: RunStore

    def process(self, model: Any, *services: type[Any]) -> Container:
        """Return the container of a process."""
        made = Container(models={"default": model}).register(*(services or (Open,)))
        made.register_instance(self.conversations, ChatMemoryStore)
        return made.register_instance(self.runs, RunStore)

    async def log(self, room: str = "room") -> list[LogEntry]:
        """Return the entries of a conversation."""
        log = await self.conversations.read_since(ChatMemoryKey.of(Open, room), lambda head: 0)
        return [] if log is None else [*entries_of(log.turns)]

    async def states(self) -> list[tuple[str | None, str]]:
        """Return what the user has said, and what became of it."""
        return [(each.message.text, each.state) for each in await self.log() if isinstance(each.message, UserMessage)]


@pytest.fixture(params=["memory", "sqlite_url", "postgres_url", "redis_url"])
async def stores(request: pytest.FixtureRequest) -> AsyncIterator[Stores]:
    """Stores of each kind."""
    async with AsyncExitStack() as stack:
        if request.param == "memory":
            yield Stores(InMemoryChatMemoryStore(), Kept())
            return
        if request.param == "redis_url":
            prefix = f"test-{uuid4().hex}"  # the server is shared
            url = request.getfixturevalue(request.param)
            yield Stores(await stack.enter_async_context(open_store(url, prefix=prefix)), Kept())
            return
        engine = await stack.enter_async_context(sql.open_engine(request.getfixturevalue(request.param)))
        yield Stores(SqlChatMemoryStore(engine), SqlRunStore(engine))


@tool(deferred=True)
async def quote(order: int) -> str:
    raise ToolDeferred("a person looks it up")


@register_ai_service(tools=[refund, quote], on_suspended="continue")
class Open(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...
    @durable
    async def order(self, run: RunId, room: MemoryId[str], text: str) -> Result[str]: ...
    async def named(self, run: RunId, room: MemoryId[str], text: str) -> Result[str]: ...


WAITS = "[This turn waits for the approval of a person for refund. It has no answer yet.]"


def texts(messages: Any) -> list[tuple[str, str]]:
    kinds = {UserMessage: "user", AiMessage: "ai", ToolExecutionResultMessage: "result"}
    return [(kinds[type(each)], each.text or "…") for each in messages if type(each) in kinds]


async def test_a_conversation_goes_on_while_a_call_waits_and_the_model_sees_what_waits(stores: Stores) -> None:
    model = ScriptedChatModel([asks(REFUND), says("on it"), says("refunded"), says("you had two questions")])
    async with stores.process(model) as here:
        desk = here.get(Open)
        waiting = await desk.chat("room", "refund 7")
        assert [(each.state, each.run_id, each.usage) for each in await stores.log()] == [
            ("waiting", waiting.run_id, None)
        ]
        assert (await desk.chat("room", "and now?")).content == "on it"
        assert texts(model.requests[1].messages) == [("user", "refund 7"), ("ai", WAITS), ("user", "and now?")]

        done = await here.runs.resume(waiting.run_id, {"0": approve()})
        assert done.content == "refunded"
        # It goes on from the request in which it asked for the tool: nothing of the conversation came in between.
        assert texts(model.requests[2].messages) == [("user", "refund 7"), ("ai", "…"), ("result", "refunded 7")]
        await desk.chat("room", "what did I ask?")
        assert texts(model.requests[3].messages) == [
            ("user", "and now?"),
            ("ai", "on it"),
            ("user", "refund 7"),
            ("ai", "…"),
            ("result", "refunded 7"),
            ("ai", "refunded"),
            ("user", "what did I ask?"),
        ]
    assert {each.state for each in await stores.log()} == {"answered"}


async def test_several_calls_of_a_conversation_wait_at_once_and_are_answered_in_any_order(stores: Stores) -> None:
    other = tool_call("refund", {"order": 8})
    model = ScriptedChatModel([asks(REFUND), asks(other), asks(tool_call("quote", {"order": 9})), *map(says, "bca")])
    async with stores.process(model) as here:
        desk = here.get(Open)
        first, second, third = [(await desk.chat("room", each)).run_id for each in ("one", "two", "three")]
        assert [each.message.text for each in await stores.log()] == ["one", "two", "three"]
        await here.runs.resume(second, {"0": approve()})
        await here.runs.resume(third, {"0": respond("9 euros")})
        await here.runs.resume(first, {"0": approve()})
        assert await here.runs.run_of(Open, "room") is None
    said = [each.message.text for each in await stores.log() if isinstance(each.message, UserMessage)]
    assert said == ["two", "three", "one"]
    assert ran == [8, 7]


async def test_a_run_that_waits_again_has_one_entry_with_what_waits_now(stores: Stores) -> None:
    model = ScriptedChatModel(
        [asks(REFUND, tool_call("quote", {"order": 1})), says("next"), says("later"), says("done")]
    )
    async with stores.process(model) as here:
        desk = here.get(Open)
        waiting = await desk.chat("room", "both")
        await desk.chat("room", "next?")
        assert dict(texts(model.requests[1].messages))["ai"] == (
            "[This turn waits for the approval of a person for refund and the result of quote. It has no answer yet.]"
        )
        again = await here.runs.resume(waiting.run_id, {"0": approve()})
        assert [each.tool_name for each in again.pending] == ["quote"]
        await desk.chat("room", "later?")
        assert texts(model.requests[2].messages)[-3:-1] == [
            ("user", "both"),
            ("ai", "[This turn waits for the result of quote. It has no answer yet.]"),
        ]
        assert sum(each.state == "waiting" for each in await stores.log()) == 1
        await here.runs.resume(waiting.run_id, {"1": respond("9")})
    assert {each.state for each in await stores.log()} == {"answered"}


async def test_a_cancelled_run_leaves_a_turn_that_was_stopped_and_waits_again_when_it_is_retried(
    stores: Stores,
) -> None:
    model = ScriptedChatModel([asks(REFUND), says("next"), says("refunded")])
    async with stores.process(model) as here:
        waiting = await here.get(Open).chat("room", "refund 7")
        await here.get(Open).chat("room", "next?")
        await here.runs.cancel(waiting.run_id)
        assert (await stores.states())[-1] == ("refund 7", "stopped")
        result = await here.runs.retry(waiting.run_id)
        assert result.pending
        assert (await stores.states())[-1] == ("refund 7", "waiting")
        await here.runs.resume(waiting.run_id, {"0": approve()})
    assert {each.state for each in await stores.log()} == {"answered"}


async def test_a_run_that_fails_after_it_has_waited_leaves_a_turn_that_failed(stores: Stores) -> None:
    def fails(_: Any) -> Any:
        raise ConnectionError("no answer")

    model = ScriptedChatModel([asks(REFUND), fails, says("next")])
    async with stores.process(model) as here:
        waiting = await here.get(Open).chat("room", "refund 7")
        with pytest.raises(Exception, match="no answer"):
            await here.runs.resume(waiting.run_id, {"0": reject("no")})
        assert [(each.message.text, each.state) for each in await stores.log()][:1] == [("refund 7", "failed")]
        assert {each.state for each in await stores.log()} == {"failed"}
        await here.get(Open).chat("room", "next?")
        sent = texts(model.requests[-1].messages)
        assert sent[0] == ("user", "refund 7")
        assert "failed" in sent[-2][1]


async def test_a_durable_call_that_waits_is_shown_too(stores: Stores) -> None:
    model = ScriptedChatModel([asks(REFUND), says("next"), says("refunded")])
    async with stores.process(model) as here:
        await here.get(Open).order("order 7", "room", "refund 7")
        await here.get(Open).chat("room", "next?")
    async with stores.process(model) as here:
        await here.runs.resume("order 7", {"0": approve()})
    assert await stores.states() == [("next?", "answered"), ("refund 7", "answered")]
    assert texts(model.requests[1].messages)[:2] == [("user", "refund 7"), ("ai", WAITS)]
    assert texts(model.requests[2].messages)[0] == ("user", "refund 7")


async def test_a_call_with_the_id_of_another_run_stores_nothing(stores: Stores) -> None:
    model = ScriptedChatModel([asks(REFUND), says("refunded"), *[asks(REFUND)] * 3])
    async with stores.process(model) as here:
        for number in range(2):
            waiting = await here.get(Open).named(str(number), "room", f"refund {number}")
            if number == 0:
                await here.runs.resume(waiting.run_id, {"0": approve()})
        before = await stores.log()
        for number in range(2):
            with pytest.raises(RunConflictError):
                await here.get(Open).named(str(number), "room", "another")
        assert await stores.log() == before


async def test_a_run_that_is_answered_takes_its_turn_after_the_call_that_is_at_work(stores: Stores) -> None:
    model, order = Gated(asks(REFUND), says("long"), says("refunded")), list[str]()
    change, answered = stores.runs.change, asyncio.Event()

    async def note(*arguments: Any) -> Any:
        answered.set()
        return await change(*arguments)

    stores.runs.change = note  # type: ignore[method-assign]
    async with stores.process(model) as here:
        waiting = await here.get(Open).chat("room", "refund 7")
        model.gate.clear()
        long = asyncio.create_task(here.get(Open).chat("room", "long?"))
        await model.asked.wait()
        resumed = asyncio.create_task(here.runs.resume(waiting.run_id, {"0": approve()}))
        for name, task in (("long", long), ("resumed", resumed)):
            task.add_done_callback(lambda _, name=name: order.append(name))
        await answered.wait()
        model.gate.set()
        await asyncio.gather(long, resumed)
    assert order == ["long", "resumed"]
    assert await stores.states() == [("long?", "answered"), ("refund 7", "answered")]


async def test_code_of_a_tool_cannot_answer_a_run_of_its_own_conversation(stores: Stores) -> None:
    @tool
    async def answer(run_id: str, runs: Inject[Runs]) -> str:
        for act in (runs.resume(run_id, {"0": approve()}), runs.retry(run_id)):
            with pytest.raises(MemoryInUseError):
                await act
        return "refused"

    @register_ai_service(tools=[refund, answer], on_suspended="continue")
    class Bold(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    def answers(request: Any) -> Any:
        return asks(tool_call("answer", {"run_id": waiting.run_id}))

    async with stores.process(ScriptedChatModel([asks(REFUND), answers, says("done")]), Bold) as here:
        waiting = await here.get(Bold).chat("room", "refund 7")
        result = await here.get(Bold).chat("room", "approve it yourself")
        assert [each.result for each in result.tool_executions] == ["refused"]
        assert (await here.runs.get(waiting.run_id)).status == "suspended"


async def test_a_call_whose_run_could_not_be_stored_failed_for_the_next_call(stores: Stores) -> None:
    create = stores.runs.create

    async def fails(*_: Any, **__: Any) -> bool:
        raise RuntimeError("no connection")  # one of the network would be tried again for a lease

    model = ScriptedChatModel([asks(REFUND), says("next")])
    async with stores.process(model) as here:
        stores.runs.create = fails  # type: ignore[method-assign]
        with pytest.raises(RunStoreError):
            await here.get(Open).chat("room", "refund 7")
        stores.runs.create = create  # type: ignore[method-assign]
        await here.get(Open).chat("room", "next?")
    if joins(stores.runs, stores.conversations):  # no tool had begun, so nothing of the call is left
        assert await stores.states() == [("next?", "answered")]
        return
    assert await stores.states() == [("refund 7", "failed"), ("next?", "answered")]
    assert "failed" in texts(model.requests[-1].messages)[-2][1]


async def test_a_turn_that_could_not_be_written_when_its_run_ended_is_written_by_the_next_call(
    stores: Stores, caplog: pytest.LogCaptureFixture
) -> None:
    write = stores.conversations.write

    async def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no connection")  # one of the network would be tried again for a lease

    async with stores.process(ScriptedChatModel([asks(REFUND), says("next")])) as here:
        waiting = await here.get(Open).chat("room", "refund 7")
        stores.conversations.write = fails  # type: ignore[method-assign]
        assert (await here.runs.cancel(waiting.run_id)).status == "cancelled"
        stores.conversations.write = write  # type: ignore[method-assign]
        assert await stores.states() == [("refund 7", "waiting")]
        assert "does not show that its state has changed: RuntimeError" in caplog.text
        await here.get(Open).chat("room", "next?")
    assert await stores.states() == [("refund 7", "stopped"), ("next?", "answered")]


@conversation_scoped
class Unwritable(BaseModel):
    notes: str = ""

    @tool
    def note(self, text: str) -> str:
        """Note something that cannot be stored."""
        self.notes = text
        return text

    @field_serializer("notes")
    def _write(self, notes: str) -> str:
        if notes:
            raise ValueError("it cannot be written")
        return notes


async def test_a_call_whose_suspension_cannot_be_written_leaves_its_conversation(stores: Stores) -> None:
    @register_ai_service(tools=[Unwritable, refund], on_suspended="continue", unfinished_turns="discard")
    class Noting(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    model = ScriptedChatModel([asks(tool_call("note", {"text": "x"})), asks(REFUND), says("next")])
    async with stores.process(model, Noting) as here, asyncio.timeout(30):
        with pytest.raises(StoredBeanError):
            await here.get(Noting).chat("room", "refund 7")
        assert (await here.get(Noting).chat("room", "next?")).content == "next"


async def test_an_expired_approval_ends_the_waiting(stores: Stores) -> None:
    @tool(requires_approval=True, approval_expires=timedelta(hours=1))
    async def wire(order: int) -> str:
        return "wired"

    @register_ai_service(tools=wire, on_suspended="continue", name=stored_name(Open))
    class Short(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    if own_clock_of(stores.conversations) is None:
        pytest.skip("the clock of a server cannot be moved")
    model = ScriptedChatModel([asks(tool_call("wire", {"order": 7})), says("next"), says("nobody approved it")])
    async with stores.process(model, Short) as here:
        waiting = await here.get(Short).chat("room", "wire 7")
        await here.get(Short).chat("room", "next?")
        await skip_time(here, timedelta(hours=2))
        assert (await here.runs.result(waiting.run_id)).content == "nobody approved it"
    assert await stores.states() == [("next?", "answered"), ("wire 7", "answered")]


async def test_a_stream_that_waits_is_shown_and_its_conversation_goes_on(stores: Stores) -> None:
    @register_ai_service(tools=refund, on_suspended="continue", name=stored_name(Open))
    class Flowing(Protocol):
        def chat(self, room: MemoryId[str], text: str) -> TokenStream: ...

    async with stores.process(ScriptedChatModel([asks(REFUND), says("next"), says("refunded")]), Flowing) as here:
        events = [each async for each in here.get(Flowing).chat("room", "refund 7")]
        assert isinstance(events[-1], RunSuspended)
        async for _ in here.get(Flowing).chat("room", "next?"):
            pass
        async for _ in here.runs.resume_stream(events[-1].run_id, {"0": approve()}):
            pass
    assert await stores.states() == [("next?", "answered"), ("refund 7", "answered")]


async def test_a_program_that_does_not_continue_any_more_shows_what_became_of_the_runs(stores: Stores) -> None:
    @register_ai_service(tools=refund, on_suspended="cancel", name=stored_name(Open))
    class Strict(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    async with stores.process(ScriptedChatModel([asks(REFUND), asks(REFUND)])) as here:
        for each in ("one", "two"):
            await here.get(Open).chat("room", each)
    async with stores.process(ScriptedChatModel([says("fine")]), Strict) as here:
        await here.get(Strict).chat("room", "three")
        assert await here.runs.list(status="suspended") == []
    assert sorted(await stores.states()) == [("one", "stopped"), ("three", "answered"), ("two", "stopped")]


@pytest.mark.parametrize("option", ["continue", "cancel"])
async def test_cancelling_undoes_the_tools_of_a_run_of_a_conversation(stores: Stores, option: Any) -> None:
    class Orders:
        @tool
        async def reserve(self, order: int) -> str:
            ran.append("reserve")
            return "reserved"

        @compensate_for(reserve)
        async def release(self, order: int) -> None:
            ran.append("release")

    @register_ai_service(
        tools=[Orders, refund], on_suspended=option, compensate_on_failure=True, name=stored_name(Open)
    )
    class Careful(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    first = asks(tool_call("reserve", {"order": 7}), REFUND)
    async with stores.process(ScriptedChatModel([first, says("next")]), Careful) as here:
        waiting = await here.get(Careful).chat("room", "refund 7")
        async with asyncio.timeout(20):
            await here.get(Careful).chat("room", "next?")
            await here.runs.cancel(waiting.run_id)
    assert ran == ["reserve", "release"]
    assert [each for each in await stores.states() if each[1] == "waiting"] == []


@conversation_scoped
class Basket(BaseModel):
    goods: tuple[str, ...] = ()

    @tool
    def put(self, goods: str) -> str:
        """Put something into the basket."""
        self.goods = (*self.goods, goods)
        return ", ".join(self.goods)


async def test_beans_are_stored_when_a_call_waits_and_a_run_does_not_take_back_later_changes(stores: Stores) -> None:
    @register_ai_service(tools=[Basket, refund], on_suspended="continue", name=stored_name(Open))
    class Shop(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    def put(goods: str) -> Any:
        return tool_call("put", {"goods": goods})

    model = ScriptedChatModel(
        [asks(put("apples"), REFUND), asks(put("bread")), says("next"), asks(put("cheese")), says("done")]
    )
    async with stores.process(model, Shop, Basket) as here:
        waiting = await here.get(Shop).chat("room", "one")
        await here.get(Shop).chat("room", "two")
        done = await here.runs.resume(waiting.run_id, {"1": approve()})
        assert [each.result for each in done.tool_executions if each.request.name == "put"] == [
            "apples",
            "apples, bread, cheese",
        ]
        log = await stores.conversations.read_since(ChatMemoryKey.of(Open, "room"), lambda head: 0)
        assert log is not None
        assert [[*each.beans.values()] for each in log.turns] == [
            [{"goods": ["apples", "bread"]}],
            [{"goods": ["apples", "bread", "cheese"]}],
        ]


class Gated(ScriptedChatModel):
    """Waits for a gate before each reply, and says that it was asked."""

    def __init__(self, *replies: Any) -> None:
        super().__init__(replies)
        self.gate, self.asked = asyncio.Event(), asyncio.Event()
        self.gate.set()

    async def chat(self, request: Any) -> Any:
        if not self.gate.is_set():
            self.asked.set()
        await self.gate.wait()
        return await super().chat(request)
