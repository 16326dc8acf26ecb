"""The end of a run and the turn that it leaves in its conversation: one commit on one engine, else the turn first."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from contextvars import Context
from typing import Any, Protocol

import pytest
from pydantic import BaseModel
from sqlalchemy import Connection, event
from sqlalchemy.ext.asyncio import AsyncEngine

from toolbox import (
    AiMessage,
    ChatMemoryKey,
    ChatMemoryStore,
    CompleteResponse,
    Container,
    MemoryId,
    Result,
    compensate_for,
    on_success,
    register_ai_service,
    request_scoped,
    sql,
    tool,
)
from toolbox.conversations import conversation_scoped
from toolbox.conversations.log import Turn
from toolbox.errors import ConversationStoppedError, MemoryLeaseLostError, RunCancelledError
from toolbox.runs import RunId, RunStore, approve, durable, reject
from toolbox.sql import SqlChatMemoryStore, SqlRunStore
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


@conversation_scoped
class Cart(BaseModel):
    items: list[str] = []

    @tool
    def add(self, item: str) -> str:
        """Add an item."""
        self.items.append(item)
        return item

    @compensate_for("add")
    def remove(self, item: str) -> None:
        undone.append(item)

    @tool(requires_approval=True)
    def pay(self) -> str:
        """Pay."""
        self.items.append("paid")
        return "paid"


undone: list[str] = []
waits: list[asyncio.Event] = []


@tool
async def wait() -> str:
    waits[-1].set()
    await asyncio.Event().wait()
    return "never"


@request_scoped
class Books:
    def __init__(self) -> None:
        self.is_open = False

    @tool
    def keep(self, is_open: bool) -> str:
        """Keep the books open."""
        self.is_open = is_open
        return "kept"

    @on_success
    async def close(self) -> None:
        if self.is_open:
            raise PermissionError("the books are closed")


class Shop(Protocol):
    async def buy(self, run: RunId, room: MemoryId[str], text: str) -> str: ...
    async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...


def shop(option: Any, tools: Any = (Cart, wait, Books), **options: Any) -> type[Shop]:
    @register_ai_service(name="shop", tools=[*tools], on_suspended=option, **options)
    class Marked(Shop, Protocol):
        @durable
        async def buy(self, run: RunId, room: MemoryId[str], text: str) -> str: ...

    return Marked


ADD, PAY, WAIT = tool_call("add", {"item": "tea"}), tool_call("pay"), tool_call("wait")


class Commits:
    """What each transaction of an engine has written: names of tables, with what was done."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.all: list[set[str]] = []
        self._open: dict[int, set[str]] = {}
        event.listen(engine.sync_engine, "before_cursor_execute", self._note)
        event.listen(engine.sync_engine, "commit", self._commit)
        event.listen(engine.sync_engine, "rollback", lambda connection: self._open.pop(id(connection), None))

    def _note(self, connection: Connection, cursor: Any, sql: str, *_: Any) -> None:
        verb, *rest = sql.replace('"', "").split()
        if verb in ("INSERT", "UPDATE", "DELETE"):
            self._open.setdefault(id(connection), set()).add(f"{verb} {rest[0 if verb == 'UPDATE' else 1]}")

    def _commit(self, connection: Connection) -> None:
        self.all.append(self._open.pop(id(connection), set()))

    def with_turns(self) -> Iterator[set[str]]:
        for each in self.all:
            if "INSERT toolbox_conversations_turns" in each and "INSERT toolbox_schemas" not in each:  # it migrates
                yield each


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    undone.clear()
    waits[:] = [asyncio.Event()]
    async with sql.open_engine(database_url) as opened:
        yield opened


def program(engine: AsyncEngine, service: Any, *replies: Any, runs: AsyncEngine | None = None) -> Container:
    made = [AiMessage(None, each) if isinstance(each, list) else each for each in replies]
    return with_model(engine, service, ScriptedChatModel(made), runs)


def with_model(engine: AsyncEngine, service: Any, model: Any, runs: AsyncEngine | None = None) -> Container:
    made = Container(models={"default": model}).register(service, Cart, Books)
    made.register_instance(SqlChatMemoryStore(engine), ChatMemoryStore)
    return made.register_instance(SqlRunStore(engine if runs is None else runs), RunStore)


async def turns_of(container: Container) -> list[Turn]:
    store: Any = container.get(ChatMemoryStore)
    log = await store.read_since(ChatMemoryKey("shop", "r"), lambda head: 0)
    return [] if log is None else [*log.turns]


def fails(_: Any) -> Any:
    raise ConnectionError("no answer")


async def completed(here: Container, service: Any) -> None:
    await here.get(service).buy("1", "r", "tea")


async def failed(here: Container, service: Any) -> None:
    with pytest.raises(ConnectionError):
        await here.get(service).buy("1", "r", "tea")


async def stopped(here: Container, service: Any) -> None:
    buying = asyncio.ensure_future(here.get(service).buy("1", "r", "tea"))
    await asyncio.wait_for(waits[-1].wait(), 10)
    assert await here.conversations.of(service, "r").stop()
    with pytest.raises((RunCancelledError, ConversationStoppedError)):
        await buying


async def answered(here: Container, service: Any) -> None:
    result = await here.get(service).chat("r", "pay")
    await here.runs.resume(result.run_id, {each.id: approve() for each in result.pending})


async def cancelled(here: Container, service: Any) -> None:
    result = await here.get(service).chat("r", "pay")
    await here.runs.cancel(result.run_id)


ENDS: Any = {
    "completed": (completed, [ADD, "fine"], "answered"),
    "failed": (failed, [ADD, fails], "failed"),
    "stopped": (stopped, [[ADD, WAIT]], "stopped"),
    "answered": (answered, [[ADD, PAY], "fine"], "answered"),
    "cancelled": (cancelled, [[ADD, PAY]], "stopped"),
}


@pytest.mark.parametrize("option", ["raise", "continue"])
@pytest.mark.parametrize("end", [*ENDS])
async def test_each_end_of_a_run_is_committed_with_its_turn(engine: AsyncEngine, end: str, option: Any) -> None:
    act, replies, state = ENDS[end]
    service, commits = shop(option), Commits(engine)
    async with program(engine, service, *replies) as here:
        await here.conversations.create(service, "r")
        await act(here, service)
        found = [*commits.with_turns()]
        waits_before = option == "continue" and end in ("answered", "cancelled")
        assert len(found) == (2 if waits_before else 1)
        for each in found:
            assert {"UPDATE toolbox_runs", "UPDATE toolbox_conversations"} <= each or (
                waits_before and each is found[0] and "INSERT toolbox_runs" in each
            )
        # Nothing of the conversation or of the run's header is written after that.
        rest = commits.all[commits.all.index(found[-1]) + 1 :]
        assert not any(each & {"UPDATE toolbox_runs", "UPDATE toolbox_conversations"} for each in rest)
        [turn] = await turns_of(here)
        assert turn.state == state
        assert (await here.conversations.of(service, "r").export())["beans"]


async def test_a_cancelled_run_whose_tools_are_undone_keeps_its_turn_with_each_write(engine: AsyncEngine) -> None:
    service, commits = shop("raise", compensate_on_failure=True), Commits(engine)
    async with program(engine, service, [ADD, WAIT]) as here:
        await stopped(here, service)
        assert undone == ["tea"]
        assert len(found := [*commits.with_turns()]) == 2  # when it is cancelled, and when its tools are undone
        assert all("UPDATE toolbox_runs" in each for each in found)
        [turn] = await turns_of(here)
        assert turn.state == "stopped"
        assert any("rolled back" in (each.text or "") for each in turn.messages)
        assert (await here.runs.get("1")).status == "cancelled"


async def test_the_next_call_of_the_conversation_begins_after_the_end_of_the_run(engine: AsyncEngine) -> None:
    service, model = shop("raise"), ScriptedChatModel([ADD, "fine", "next"])
    async with with_model(engine, service, model) as here:
        append, waiting = SqlRunStore.append, list[Any]()

        async def begin_next(
            self: Any, run_id: str, generation: int, records: Any, changes: Any = None, *rest: Any
        ) -> Any:
            if changes is not None and changes.status == "completed":
                waiting.append(asyncio.create_task(here.get(service).chat("r", "next"), context=Context()))
                await asyncio.sleep(0.05)
                assert not waiting[0].done()
            return await append(self, run_id, generation, records, changes, *rest)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(SqlRunStore, "append", begin_next)
            await here.get(service).buy("1", "r", "tea")
        await waiting[0]
        assert [each.state for each in await turns_of(here)] == ["answered", "answered"]
        [_, sent, last] = model.requests
        assert len(last.messages) == len(sent.messages) + 2


async def test_who_reads_the_last_event_of_a_run_finds_its_turn(engine: AsyncEngine) -> None:
    service = shop("raise")
    async with program(engine, service, "first", PAY, "second") as here:
        await here.runs.start(here.get(service).buy, "1", "r", "tea")
        async for event in here.runs.events("1"):
            if isinstance(event.event, CompleteResponse):
                assert [each.state for each in await turns_of(here)] == ["answered"]
        result = await here.get(service).chat("r", "pay")
        answers = {each.id: approve() for each in result.pending}
        found = []
        async for each in here.runs.resume_stream(result.run_id or "", answers):
            if isinstance(each, CompleteResponse):
                found = await turns_of(here)
        assert [each.state for each in found] == ["answered", "answered"]


async def test_a_turn_that_cannot_be_written_fails_its_run_and_changes_nothing_else(engine: AsyncEngine) -> None:
    service = shop("raise")
    async with program(engine, service, ADD, "fine") as here:
        store: Any = here.get(ChatMemoryStore)
        write = store.write

        async def lose(key: Any, written: Any) -> None:
            await write(key, written)
            raise MemoryLeaseLostError("shop", "r")

        store.write = lose
        with pytest.raises(MemoryLeaseLostError):
            await here.get(service).buy("1", "r", "tea")
        store.write = write
        assert (await here.runs.get("1")).status == "failed"
        assert await turns_of(here) == []
        # It goes on from its records: the change of the bean is not lost with the turn.
        assert await here.runs.retry("1")
        [turn] = await turns_of(here)
        assert turn.state == "answered"
        assert (await here.conversations.of(service, "r").export())["beans"] == {f"{__name__}.Cart": {"items": ["tea"]}}


async def test_a_turn_that_cannot_be_written_undoes_the_tools_of_a_service_that_compensates(
    engine: AsyncEngine,
) -> None:
    service = shop("raise", compensate_on_failure=True)
    async with program(engine, service, ADD, "fine") as here:
        store: Any = here.get(ChatMemoryStore)
        write = store.write

        async def lose(key: Any, written: Any) -> None:
            store.write = write
            raise MemoryLeaseLostError("shop", "r")

        store.write = lose
        with pytest.raises(MemoryLeaseLostError):
            await here.get(service).buy("1", "r", "tea")
        assert (await here.runs.get("1")).status == "failed"
        assert undone == ["tea"]
        assert {each.state for each in await turns_of(here)} == {"failed"}


async def test_a_transaction_that_the_database_ends_is_repeated_as_a_whole(engine: AsyncEngine) -> None:
    service, lost = shop("raise"), list[str]()
    async with program(engine, service, ADD, "fine") as here:
        store: Any = await here.runs.store()
        append = SqlRunStore.append

        async def break_once(
            self: Any, run_id: str, generation: int, records: Any, changes: Any = None, *rest: Any
        ) -> Any:
            written = await append(self, run_id, generation, records, changes, *rest)
            if changes is not None and changes.status == "completed" and not lost:
                lost.append("it")
                raise ConnectionResetError
            return written

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(SqlRunStore, "append", break_once)
            assert await here.get(service).buy("1", "r", "tea") == "fine"
        assert lost
        assert (await store.load("1")).status == "completed"
        assert [each.state for each in await turns_of(here)] == ["answered"]


async def test_what_the_success_of_a_run_calls_decides_before_its_turn_is_stored(engine: AsyncEngine) -> None:
    service = shop("raise")
    async with program(engine, service, tool_call("keep", {"is_open": True}), "fine") as here:
        with pytest.raises(PermissionError):
            await here.get(service).buy("1", "r", "tea")
        assert (await here.runs.get("1")).status == "failed"
        assert [each.state for each in await turns_of(here)] == ["failed"]


@pytest.mark.parametrize("end", ["answered", "cancelled"])
async def test_the_end_and_the_turn_need_one_connection(database_url: str, end: str) -> None:
    act, replies, state = ENDS[end]
    service = shop("continue")
    one: Any = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 5}
    async with sql.open_engine(database_url, **one) as engine, program(engine, service, *replies) as here:
        await act(here, service)
        assert [each.state for each in await turns_of(here)] == [state]


@pytest.mark.parametrize("option", ["raise", "continue"])
async def test_on_two_engines_the_turn_comes_first(engine: AsyncEngine, option: Any) -> None:
    service, commits = shop(option), Commits(engine)
    async with sql.open_engine("sqlite://") as other:
        of_runs = Commits(other)
        async with program(engine, service, [ADD, PAY], "fine", runs=other) as here:
            await answered(here, service)
            assert [each.state for each in await turns_of(here)] == ["answered"]
        assert len([*commits.with_turns()]) == (2 if option == "continue" else 1)
        assert not any("toolbox_runs" in name for each in commits.all for name in each)
        assert any("UPDATE toolbox_runs" in each for each in of_runs.all)


@asynccontextmanager
async def broken_create(store: Any) -> AsyncIterator[None]:
    create = store.create

    async def fail(*_: Any, **__: Any) -> bool:
        raise RuntimeError("no connection")  # one of the network would be tried again for a lease

    store.create = fail
    yield
    store.create = create


@pytest.mark.parametrize("shared", [True, False])
async def test_a_call_whose_suspension_is_not_stored_says_its_message_once(engine: AsyncEngine, shared: bool) -> None:
    service = shop("continue")
    async with (
        sql.open_engine("sqlite://") as other,
        program(engine, service, [ADD, PAY], "next", runs=None if shared else other) as here,
    ):
        async with broken_create(await here.runs.store()):
            with pytest.raises(Exception, match="no connection"):
                await here.get(service).chat("r", "pay")
        await here.get(service).chat("r", "next")
        assert [each.state for each in await turns_of(here)] == ["failed", "answered"]
        beans = (await here.conversations.of(service, "r").export())["beans"]
        assert beans == {f"{__name__}.Cart": {"items": ["tea"]}}


async def test_a_rejected_call_of_a_conversation_that_went_on_ends_with_its_turn(engine: AsyncEngine) -> None:
    service, commits = shop("continue"), Commits(engine)
    async with program(engine, service, [ADD, PAY], AiMessage("meanwhile"), AiMessage("as you like")) as here:
        result = await here.get(service).chat("r", "pay")
        await here.get(service).chat("r", "and?")
        await here.runs.resume(result.run_id, {each.id: reject("no") for each in result.pending})
        assert [each.state for each in await turns_of(here)] == ["answered", "answered"]
    assert sum("UPDATE toolbox_runs" in each for each in commits.with_turns()) == 1


async def test_a_waiting_turn_ends_with_a_run_that_leaves_no_other_one(engine: AsyncEngine) -> None:
    service, commits = shop("continue"), Commits(engine)
    async with program(engine, service, [PAY], fails) as here:
        result = await here.get(service).chat("r", "pay")
        with pytest.raises(ConnectionError):
            await here.runs.resume(result.run_id or "", {each.id: reject("no") for each in result.pending})
        assert [each.state for each in await turns_of(here)] == ["failed"]
    [_, end] = commits.with_turns()
    assert "UPDATE toolbox_runs" in end
