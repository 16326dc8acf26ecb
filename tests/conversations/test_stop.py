"""Stopping a conversation: who gets which error, what stays of the turn, and stops from inside, outside and beside.

Not here: other processes and killed ones (`tests/databases/test_stopped_conversations`), turns that end without a stop
(`test_unfinished_turns`).
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, Protocol

import pytest

from toolbox import (
    AiMessage,
    ChatMemoryKey,
    ChatMemoryStore,
    Container,
    ConversationStoppedError,
    InvocationContext,
    InvocationTimeoutError,
    MemoryId,
    Message,
    Result,
    UserMessage,
    create_ai_service,
    register_ai_service,
    time_limit,
    tool,
)
from toolbox.conversations.log import NOTES, entries_of
from toolbox.conversations.stores import InMemoryChatMemoryStore
from toolbox.errors import RunCancelledError
from toolbox.guardrails import GuardrailResult, InputGuardrail, InputGuardrailRequest, input_guardrails
from toolbox.retrieval import Passage, Query, Retriever
from toolbox.runs import InMemoryRunStore, Retries, RunId, RunStore, approve, durable
from toolbox.security import SecurityIdentity
from toolbox.testing import ScriptedChatModel, skip_time, tool_call

from .test_unfinished_turns import PAY, WAIT, Room, Till, result

pytestmark = pytest.mark.anyio


async def stop(container: Container, service: type[Any], room: str, by: Any = None) -> bool:
    """Stop a conversation, as `Conversation.stop` does."""
    host: Any = container._internals.running_host
    key = ChatMemoryKey.of(service, room)
    return bool(await host.on_own_loop(lambda: host.stop_conversation(key, by)))


async def soon(work: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(work, 10)


# --- calls


async def test_the_caller_gets_who_stopped_the_call_and_its_turn_is_stored_when_stop_returns() -> None:
    async with Room(AiMessage(None, [PAY, WAIT])) as room:
        task = asyncio.create_task(room.chat.chat("r", "pay"))
        await room.till.waits.wait()

        assert await soon(stop(room.container, room.service, "r", "ann"))

        assert await room.state() == {"stopped"}
        with pytest.raises(ConversationStoppedError, match="ann") as stopped:
            await task
        assert stopped.value.by == "ann"
        assert not task.cancelled()
        kept = await room.said()
        assert kept[2:] == [result(PAY, "paid 7"), result(WAIT, "interrupted", is_error=True)]
        assert (await room.sent_next())[-1] == AiMessage(NOTES["stopped"])


async def test_a_turn_is_also_stored_if_no_tool_had_begun() -> None:
    asked = asyncio.Event()

    async def think(_: Any) -> str:
        asked.set()
        await asyncio.Event().wait()
        return "never"

    async with Room(think) as room:
        task = asyncio.create_task(room.chat.chat("r", "hm"))
        await asked.wait()
        assert await soon(stop(room.container, room.service, "r", SecurityIdentity("bob")))
        with pytest.raises(ConversationStoppedError) as stopped:
            await task
        assert stopped.value.by == "bob"
        assert await room.said() == [UserMessage("hm")]
        assert await room.state() == {"stopped"}


@pytest.mark.parametrize("judged", [True, False])
async def test_before_the_first_request_only_a_message_that_guardrails_have_let_through_is_stored(judged: bool) -> None:
    begun = asyncio.Event()

    class Known(InputGuardrail):
        async def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
            if not judged:
                begun.set()
                await asyncio.Event().wait()
            return self.success_with(UserMessage("rewritten"))

    class Handbook(Retriever):
        async def retrieve(self, query: Query) -> list[Passage]:
            begun.set()
            await asyncio.Event().wait()
            return []

    @register_ai_service(retrievers=Handbook)
    @input_guardrails(Known)
    class Clerk(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    async with Container(models={"default": ScriptedChatModel([])}).register(Clerk) as container:
        task = asyncio.create_task(container.get(Clerk).chat("r", "leave?"))
        await begun.wait()
        assert await soon(container.conversations.of(Clerk, "r").stop())
        with pytest.raises(ConversationStoppedError):
            await task
        kept = [(each.state, each.message) for each in await container.conversations.of(Clerk, "r").history()]
    assert kept == ([("stopped", UserMessage("rewritten"))] if judged else [])


async def test_nothing_under_way_and_an_unknown_conversation_give_false() -> None:
    async with Room() as room:
        assert not await soon(stop(room.container, room.service, "r"))
        assert not await soon(stop(room.container, room.service, "unknown"))
        memories = await room.container._internals.running_host.memories()  # type: ignore[union-attr]
        async with memories.enter(room.key):
            assert not await soon(stop(room.container, room.service, "r"))  # the program itself is not stopped


async def test_a_stream_ends_with_the_error_and_keeps_what_its_reader_has() -> None:
    async with Room("one two three") as room:
        stream = room.chat.text("r", "count")
        assert await anext(stream) == "one "
        assert await anext(stream) == "two "
        assert await soon(stop(room.container, room.service, "r", "ann"))  # by the reader of the stream itself
        with pytest.raises(ConversationStoppedError, match="ann"):
            async for _ in stream:
                pass
        assert await room.said() == [UserMessage("count"), AiMessage("one two ")]


async def test_a_stop_in_the_call_itself_returns_at_once() -> None:
    answers: list[bool] = []

    class Panic:
        container: Container

        @tool
        async def panic(self) -> str:
            answers.append(await stop(self.container, Service, "r", "the tool"))
            await asyncio.Event().wait()
            return "never"

        @tool
        def on_thread(self) -> str:
            answers.append(asyncio.run(stop(self.container, Service, "r", "the tool")))
            return "done"

    @register_ai_service(tools=Panic)
    class Service(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    for name in ("panic", "on_thread"):
        panic = Panic()
        model = ScriptedChatModel([tool_call(name), "not asked for"])
        async with Container(models={"default": model}).register(Service).register_instance(panic) as container:
            panic.container = container
            with pytest.raises(ConversationStoppedError, match="the tool"):
                await soon(container.get(Service).chat("r", "go"))
            messages = await container.chat_memory(Service, "r").messages()
        assert len(messages) == 3
    assert answers == [True, True]


async def test_a_thread_that_goes_on_is_not_waited_for() -> None:
    may_end, begun = threading.Event(), asyncio.Event()

    class Stubborn:
        @tool
        def work(self, context: InvocationContext) -> str:
            loop.call_soon_threadsafe(begun.set)
            may_end.wait(30)
            return "done"

    @register_ai_service(tools=Stubborn)
    class Service(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    loop = asyncio.get_running_loop()
    model = ScriptedChatModel([tool_call("work")])
    async with Container(models={"default": model}).register(Service, Stubborn) as container:
        task = asyncio.create_task(container.get(Service).chat("r", "go"))
        await begun.wait()
        assert await soon(stop(container, Service, "r"))
        may_end.set()
        with pytest.raises(ConversationStoppedError):
            await task
        kept = await container.chat_memory(Service, "r").messages()
    assert getattr(kept[-1], "text", "") == "interrupted"


async def test_who_cancels_a_call_from_outside_is_not_taken_for_one_who_stops_it() -> None:
    async with Room(WAIT, WAIT, timeout=None) as room:
        for with_stop in (False, True):
            room.till.waits.clear()
            task = asyncio.create_task(room.chat.chat("r", "wait"))
            await room.till.waits.wait()
            task.cancel()
            stopping = asyncio.create_task(stop(room.container, room.service, "r")) if with_stop else None
            with pytest.raises(asyncio.CancelledError):  # both: who waits for the call has cancelled it
                await task
            if stopping is not None:
                await soon(stopping)
        assert await room.state() == {"stopped"}


async def test_a_stop_beats_a_time_limit_that_has_not_passed() -> None:
    async with Room(WAIT, WAIT, timeout=60) as room:
        task = asyncio.create_task(room.chat.chat("r", "wait"))
        await room.till.waits.wait()
        await soon(stop(room.container, room.service, "r"))
        with pytest.raises(ConversationStoppedError):
            await task
        with pytest.raises(InvocationTimeoutError), time_limit(0.05):
            await room.chat.chat("r", "wait")
        states = [each.state for each in await room.entries() if isinstance(each.message, UserMessage)]
    assert states == ["stopped", "failed"]


async def test_several_who_stop_a_call_all_wait_for_its_end_and_one_who_leaves_does_not_disturb() -> None:
    async with Room(WAIT) as room:
        task = asyncio.create_task(room.chat.chat("r", "wait"))
        await room.till.waits.wait()
        stopping = [asyncio.create_task(stop(room.container, room.service, "r", name)) for name in ("ann", "bob")]
        leaving = asyncio.create_task(stop(room.container, room.service, "r", "cy"))
        await asyncio.sleep(0)
        leaving.cancel()
        assert await soon(asyncio.gather(*stopping)) == [True, True]
        with pytest.raises(ConversationStoppedError, match="ann"):
            await task
        assert await room.state() == {"stopped"}


async def test_the_next_call_takes_its_turn_after_a_stop() -> None:
    async with Room(WAIT, "fine") as room:
        task = asyncio.create_task(room.chat.chat("r", "wait"))
        await room.till.waits.wait()
        following = asyncio.create_task(room.chat.chat("r", "and now?"))
        await asyncio.sleep(0)
        await soon(stop(room.container, room.service, "r"))
        assert await soon(following) == "fine"
        with pytest.raises(ConversationStoppedError):
            await task


async def test_a_stop_while_the_answer_is_written_leaves_the_answer() -> None:
    class Writing(InMemoryChatMemoryStore):
        begins = False

        async def write(self, key: ChatMemoryKey, write: Any) -> None:
            if self.begins:
                stopping.append(asyncio.create_task(stop(room.container, room.service, "r")))
                await asyncio.sleep(0.01)
            await super().write(key, write)

    stopping: list[Any] = []
    store = Writing()
    async with Room("fine", store=store) as room:
        store.begins = True
        assert await soon(room.chat.chat("r", "go")) == "fine"
        assert await soon(stopping[0])
        assert await room.state() == {"answered"}


async def test_containers_that_share_a_store_in_memory_stop_each_others_calls_at_once() -> None:
    store = InMemoryChatMemoryStore()
    async with Room(WAIT, store=store) as room:
        other = Container(models={"default": ScriptedChatModel()}).register(room.service)
        other.register_instance(Till()).register_instance(store, as_type=ChatMemoryStore)
        async with other:
            task = asyncio.create_task(room.chat.chat("r", "wait"))
            await room.till.waits.wait()
            assert await soon(stop(other, room.service, "r", "ann"))
            with pytest.raises(ConversationStoppedError, match="ann"):
                await task


async def test_calls_in_memory_and_without_a_conversation_start_no_tasks() -> None:
    seen: list[int] = []

    async def count(_: Any) -> str:
        seen.append(len(asyncio.all_tasks()))
        return "fine"

    class Plain(Protocol):
        async def chat(self, room: MemoryId[str] | None, text: str) -> str: ...

    service: Any = create_ai_service(Plain, chat_model=ScriptedChatModel([count, count]))
    before = len(asyncio.all_tasks())
    await service.chat("r", "a")
    await service.chat(None, "b")
    assert seen == [before, before]


# --- runs


class Desk:
    def __init__(self) -> None:
        self.waits = asyncio.Event()

    @tool
    async def look(self) -> str:
        return "seen"

    @tool
    async def wait(self) -> str:
        self.waits.set()
        await asyncio.Event().wait()
        return "never"

    @tool(requires_approval=True)
    async def refund(self) -> str:
        return "refunded"


@register_ai_service(tools=Desk)
class Clerk(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    @durable
    async def chat_durably(self, run: RunId, room: MemoryId[str], text: str) -> str: ...


class Kept(InMemoryRunStore):
    persistent = True


class Office:
    """A container with runs in its conversations."""

    def __init__(self, *replies: Any, lease: float = 60) -> None:
        self.desk, self.model = Desk(), ScriptedChatModel(replies)
        self.memory, self.store = InMemoryChatMemoryStore(), Kept(lease=lease)

    def program(self, **options: Any) -> Container:
        made = Container(models={"default": self.model}, **options).register(Clerk).register_instance(self.desk)
        made.register_instance(self.memory, as_type=ChatMemoryStore)
        return made.register_instance(self.store, as_type=RunStore)

    async def turns(self) -> list[tuple[str, list[Message]]]:
        log = await self.memory.read_since(ChatMemoryKey.of(Clerk, "r"), lambda head: 0)
        turns = () if log is None else log.turns
        return [(turn.state, [each.message for each in entries_of([turn])]) for turn in turns]


LOOK, REFUND, WAITS = tool_call("look"), tool_call("refund"), tool_call("wait")

End: Any = Callable[[Container, str], Awaitable[Any]]


async def by_stop(container: Container, run_id: str) -> None:
    assert await stop(container, Clerk, "r", "ann")


async def by_cancel(container: Container, run_id: str) -> None:
    await container.runs.cancel(run_id, by="ann")


ENDS = pytest.mark.parametrize("end", [by_stop, by_cancel])


@ENDS
async def test_a_run_at_work_ends_as_cancelled_and_keeps_its_turn(end: Any) -> None:
    office = Office(LOOK, WAITS)
    async with office.program() as here:
        run = await here.runs.start(Clerk.chat, "r", "go")
        await office.desk.waits.wait()
        await soon(end(here, run.id))
        ended = await here.runs.get(run.id)
        with pytest.raises(RunCancelledError):
            await here.runs.result(run.id)

    assert ended.status == "cancelled"
    assert [(each.by, each.answer) for each in ended.history] == [("ann", "cancel")]
    [(state, messages)] = await office.turns()
    assert state == "stopped"
    assert messages[2:] == [result(LOOK, "seen"), AiMessage(None, [WAITS]), result(WAITS, "interrupted", is_error=True)]


@ENDS
async def test_a_suspended_run_ends_as_cancelled_and_is_stored_from_its_records(end: Any) -> None:
    for replies, count in (((AiMessage("hm", [LOOK, REFUND]),), 4), ((LOOK, REFUND), 5), ((REFUND,), 3)):
        office = Office(*replies)
        async with office.program() as here:
            waiting = await here.get(Clerk).chat("r", "refund")
            assert await office.turns() == []
            await soon(end(here, waiting.run_id or ""))
            assert (await here.runs.get(waiting.run_id or "")).status == "cancelled"

            [(state, messages)] = await office.turns()
            assert state == "stopped"
            assert messages[0] == UserMessage("refund")
            assert messages[-1] == result(REFUND, "interrupted", is_error=True)
            assert len(messages) == count
            assert not await stop(here, Clerk, "r")


async def test_a_run_that_is_retried_after_it_was_cancelled_replaces_its_turn() -> None:
    office = Office(LOOK, REFUND, "refunded it", "next")
    async with office.program() as here:
        waiting = await here.get(Clerk).chat("r", "refund")
        run_id = waiting.run_id or ""
        await here.runs.cancel(run_id)
        assert [state for state, _ in await office.turns()] == ["stopped"]
        await here.runs.retry(run_id)
        await here.runs.resume(run_id, {"1": approve()})
        assert [state for state, _ in await office.turns()] == ["answered"]


async def test_a_durable_call_that_is_stopped_ends_and_its_caller_reads_it() -> None:
    office = Office(LOOK, WAITS)
    async with office.program() as here:
        task = asyncio.create_task(here.get(Clerk).chat_durably("run", "r", "go"))
        await office.desk.waits.wait()
        assert await soon(stop(here, Clerk, "r", "ann"))
        with pytest.raises(RunCancelledError, match="stopped"):
            await task
    assert [state for state, _ in await office.turns()] == ["stopped"]


async def test_a_failed_run_keeps_its_turn() -> None:
    office = Office(LOOK, ConnectionError("down"))
    async with office.program() as here:
        run = await here.runs.start(Clerk.chat, "r", "go")
        with pytest.raises(Exception, match="down"):
            await here.runs.result(run.id, timeout=30)
    [(state, messages)] = await office.turns()
    assert (state, len(messages)) == ("failed", 3)


async def test_a_run_that_is_tried_again_keeps_nothing_until_it_has_failed_for_good() -> None:
    @register_ai_service(tools=Desk, run_retries=Retries(attempts=2, wait=timedelta(hours=1)))
    class Patient(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    class Waiting(InMemoryRunStore):
        """Says when a run waits for its next try."""

        waits = asyncio.Event()

        async def append(self, run_id: str, generation: int, *args: Any, **options: Any) -> None:
            await super().append(run_id, generation, *args, **options)
            if (await self.load(run_id)).next_at is not None:  # type: ignore[union-attr]
                self.waits.set()

    memory, store, down = InMemoryChatMemoryStore(), Waiting(), ConnectionError("down")
    made = Container(models={"default": ScriptedChatModel([LOOK, down, down])}).register(Patient, Desk)
    made.register_instance(store, as_type=RunStore)
    async with made.register_instance(memory, as_type=ChatMemoryStore) as here:
        run = await here.runs.start(Patient.chat, "r", "go")
        await soon(store.waits.wait())
        assert await here.chat_memory(Patient, "r").messages() == []
        await skip_time(here, timedelta(hours=2))
        with pytest.raises(Exception, match="down"):
            await here.runs.result(run.id, timeout=30)
        log = await memory.read_since(ChatMemoryKey.of(Patient, "r"), lambda head: 0)
    assert [each.state for each in log.turns] == ["failed"]  # type: ignore[union-attr]


async def test_a_run_that_a_stopping_container_interrupts_stores_nothing() -> None:
    office = Office(LOOK, WAITS)
    async with office.program() as here:
        run = await here.runs.start(Clerk.chat, "r", "go")
        await office.desk.waits.wait()
    assert (await office.store.load(run.id)).status == "running"  # type: ignore[union-attr]
    assert await office.turns() == []


async def test_a_run_whose_owner_is_gone_is_stored_from_its_records() -> None:
    office = Office(AiMessage(None, [LOOK, WAITS]), lease=0.2)
    async with office.program() as here:
        run = await here.runs.start(Clerk.chat, "r", "go")
        await office.desk.waits.wait()
    async with (
        Container(models={"default": ScriptedChatModel()}, take_over_runs=False)
        .register(Clerk)
        .register_instance(Desk())
        .register_instance(office.memory, as_type=ChatMemoryStore)
        .register_instance(office.store, as_type=RunStore) as there
    ):
        assert await soon(stop(there, Clerk, "r", "ann"))
        assert (await there.runs.get(run.id)).status == "cancelled"
    [(state, messages)] = await office.turns()
    assert state == "stopped"
    assert messages[2:] == [result(LOOK, "seen"), result(WAITS, "interrupted", is_error=True)]
