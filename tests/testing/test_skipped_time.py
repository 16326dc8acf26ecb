"""`skip_time`: leases, expiries and sweeps follow at once, in memory and on SQLite; a test waits for nothing."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

import pytest
from redis.asyncio import Redis

from toolbox import (
    ChatMemoryKey,
    ChatMemoryStore,
    Container,
    ContainerNotStartedError,
    IllegalConfigurationError,
    MemoryId,
    UserMessage,
    application_scoped,
    register_ai_service,
    sql,
    tool,
)
from toolbox.redis import RedisChatMemoryStore
from toolbox.runs import InMemoryRunStore, RunBusyError, RunId, RunNotFoundError, RunStore, RunSuspended, approve
from toolbox.runs.run_engines import RunEngine
from toolbox.store_clock import StoreClock
from toolbox.testing import ScriptedChatModel, skip_time, tool_call

pytestmark = pytest.mark.anyio

SECOND, HOUR, DAY = timedelta(seconds=1), timedelta(hours=1), timedelta(days=1)


@application_scoped
class Desk:
    def __init__(self) -> None:
        self.waits, self.go_on = asyncio.Event(), asyncio.Event()
        self.is_cancelled = asyncio.Event()

    @tool
    async def wait(self) -> str:
        self.waits.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.is_cancelled.set()
            raise
        return "waited"

    @tool(requires_approval=True)
    async def pay(self) -> str:
        return "paid"


@register_ai_service(tools=Desk, durable=True)
class Clerk(Protocol):
    async def ask(self, run: RunId, text: str) -> str: ...


@register_ai_service(tools=Desk)
class Friend(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> str: ...


class Nobody(RunEngine):
    """Executes no run."""

    async def submit(self, run_id: str, generation: int) -> None: ...


class Kept(InMemoryRunStore):
    persistent = True


Start = Callable[..., Awaitable[Container]]


@pytest.fixture(params=["memory", "SQLite"])
async def start(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Start]:
    """Starts containers of one database, each with stores of its own, or with one store in memory."""
    in_memory = Kept()
    async with AsyncExitStack() as stack:

        async def make(*replies: Any, is_idle: bool = False, **options: Any) -> Container:
            container = Container(models={"default": ScriptedChatModel(replies)}, **options).register(Clerk, Friend)
            if request.param == "memory":
                container.register_instance(in_memory, RunStore)
            else:
                engine = await stack.enter_async_context(sql.open_engine(f"sqlite:///{tmp_path / 'data.db'}"))
                container.register_instance(sql.SqlRunStore(engine), RunStore)
                container.register_instance(sql.SqlChatMemoryStore(engine, expires_after=3600.0), ChatMemoryStore)
            if is_idle:
                container.register_instance(Nobody(), RunEngine)
            return await stack.enter_async_context(container)

        yield make


@pytest.fixture
async def on_sqlite(tmp_path: Path) -> AsyncIterator[Callable[..., Container]]:
    """Makes containers of one SQLite database, which are not started."""
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(sql.open_engine(f"sqlite:///{tmp_path}/data.db")) for _ in range(3)]

        def make(*replies: Any) -> Container:
            engine = engines.pop()
            made = Container(models={"default": ScriptedChatModel(replies)}).register(Friend)
            return made.register_instance(sql.SqlChatMemoryStore(engine, expires_after=3600.0), ChatMemoryStore)

        yield make


# --- leases of runs


async def test_a_run_whose_process_is_gone_is_taken_over_when_its_lease_has_ended(start: Start) -> None:
    dead, living = await start(is_idle=True, take_over_runs=False), await start("done")
    run = await dead.runs.start(Clerk.ask, "r", "Hello")
    assert await dead.get(RunStore).acquire("r", "a process that is gone") is not None

    await skip_time(living, 14 * SECOND)
    with pytest.raises(RunBusyError):
        await living.runs.execute("r", timeout=0)

    await skip_time(living, 2 * SECOND)
    assert await living.runs.result(run) == "done"


async def test_the_container_whose_time_is_skipped_keeps_its_runs(start: Start) -> None:
    here, other = await start(tool_call("wait"), "done"), await start("of the other")
    run = await here.runs.start(Clerk.ask, "r", "Hello")
    await here.get(Desk).waits.wait()

    for _ in range(3):
        await skip_time(here, DAY)
        with pytest.raises(RunBusyError):
            await other.runs.execute("r", timeout=0)

    here.get(Desk).go_on.set()
    assert await here.runs.result(run) == "done"


async def test_a_container_takes_the_run_of_one_that_does_not_renew_its_lease_any_more(start: Start) -> None:
    stuck, other = await start(tool_call("wait")), await start("of the other")
    run = await stuck.runs.start(Clerk.ask, "r", "Hello")
    await stuck.get(Desk).waits.wait()

    await skip_time(other, DAY)

    assert await other.runs.result(run) == "of the other"
    await skip_time(stuck, SECOND)  # it notices that it has lost the run
    await stuck.get(Desk).is_cancelled.wait()


async def test_who_waits_for_a_run_of_a_process_that_is_gone_continues_it(start: Start) -> None:
    dead, here = await start(is_idle=True, take_over_runs=False), await start("done", take_over_runs=False)
    await dead.runs.start(Clerk.ask, "r", "Hello")
    assert await dead.get(RunStore).acquire("r", "a process that is gone") is not None
    waiting = asyncio.create_task(here.runs.execute("r"))
    await asyncio.sleep(0)

    await skip_time(here, HOUR)

    assert (await waiting).status == "completed"


async def test_every_time_of_a_run_is_of_the_clock_that_was_moved(start: Start) -> None:
    here = await start(tool_call("pay"), "done")
    await skip_time(here, 30 * DAY)
    began = datetime.now(UTC) + 30 * DAY - SECOND
    await suspend(here)

    run = await here.runs.get("r")
    assert began < run.created_at <= run.updated_at < began + HOUR
    assert await here.runs.list(waiting_longer_than=SECOND) == []
    await skip_time(here, 2 * DAY)
    assert [each.id for each in await here.runs.list(waiting_longer_than=DAY)] == ["r"]
    await here.runs.resume("r", {"0": approve()}, by="ann")

    run = await here.runs.get("r")
    [answer] = run.history
    assert run.created_at + 2 * DAY <= answer.at <= run.updated_at
    assert [each.at >= run.created_at async for each in here.runs.events("r")].count(False) == 0


async def suspend(here: Container) -> None:
    await here.runs.start(Clerk.ask, "r", "Pay")
    async for each in here.runs.events("r"):
        if isinstance(each.event, RunSuspended):
            break


async def test_old_runs_are_purged(start: Start) -> None:
    here = await start("done")
    await here.runs.result(await here.runs.start(Clerk.ask, "r", "Hello"))
    assert await here.runs.purge(older_than=7 * DAY) == 0

    await skip_time(here, 8 * DAY)

    assert await here.runs.purge(older_than=7 * DAY) == 1
    with pytest.raises(RunNotFoundError):
        await here.runs.get("r")


# --- conversations


async def test_a_conversation_expires(on_sqlite: Callable[..., Container]) -> None:
    async with on_sqlite("one", "two", "three") as here:
        memory = here.chat_memory(Friend, "room")
        await here.get(Friend).chat("room", "a")
        await skip_time(here, timedelta(minutes=59))
        await here.get(Friend).chat("room", "b")  # the time begins again
        await skip_time(here, timedelta(minutes=59))
        assert len(await memory.messages()) == 4

        await skip_time(here, timedelta(minutes=2))

        assert await memory.messages() == []


async def test_the_conversation_of_a_process_that_is_gone_is_free_when_its_lease_has_ended(
    on_sqlite: Callable[..., Container],
) -> None:
    async with on_sqlite("hello") as here:
        store: Any = here.get(ChatMemoryStore)
        assert await store.take(ChatMemoryKey.of(Friend, "room"), "of a process that is gone", 15.0)

        await skip_time(here, 16 * SECOND)

        assert await here.get(Friend).chat("room", "a") == "hello"


async def test_the_container_whose_time_is_skipped_keeps_its_conversations(on_sqlite: Callable[..., Container]) -> None:
    async with on_sqlite(tool_call("wait"), "hello") as here, on_sqlite() as other:
        call = asyncio.create_task(here.get(Friend).chat("room", "a"))
        await here.get(Desk).waits.wait()
        store: Any = other.get(ChatMemoryStore)

        await skip_time(here, DAY)

        assert not await store.take(ChatMemoryKey.of(Friend, "room"), "of the other", 15.0)
        here.get(Desk).go_on.set()
        assert await call == "hello"


# --- which clocks are moved


async def test_stores_of_other_data_keep_their_time(tmp_path: Path) -> None:
    async with (
        sql.open_engine("sqlite://") as first,
        sql.open_engine("sqlite://") as second,
        sql.open_engine(f"sqlite:///{tmp_path}/a.db") as third,
        Container().register_instance(sql.SqlRunStore(first), RunStore) as here,
    ):
        others: list[Any] = [sql.SqlRunStore(second), sql.SqlRunStore(third), InMemoryRunStore()]

        await skip_time(here, DAY)

        assert here.get(RunStore).clock.skipped == DAY  # type: ignore[attr-defined]  # it has one
        assert [each.clock.skipped for each in others] == [timedelta()] * 3


class Files(ChatMemoryStore):
    """A store of a program: it knows no time."""

    async def get_messages(self, key: ChatMemoryKey) -> Any:
        return ()

    async def update_messages(self, key: ChatMemoryKey, messages: Any) -> None: ...

    async def delete_messages(self, key: ChatMemoryKey) -> None: ...


async def test_a_store_of_conversations_that_knows_no_time_is_left_alone() -> None:
    async with Container().register_instance(Files(), ChatMemoryStore) as here:
        await skip_time(here, HOUR)


class Own(RunStore):
    """A store of a program, on a server."""

    persistent, lease = True, 15.0

    async def open(self) -> None: ...


async def test_a_clock_that_is_on_a_server_is_not_moved_and_then_none_is() -> None:
    clock_in_memory = InMemoryRunStore()
    async with sql.open_engine("postgresql://shop:sesame@127.0.0.1:1/shop") as postgres:
        refused: list[tuple[Any, Any, str]] = [
            (clock_in_memory, sql.SqlChatMemoryStore(postgres), "SqlChatMemoryStore"),
            (clock_in_memory, RedisChatMemoryStore(Redis()), "RedisChatMemoryStore"),
            (Own(), None, "Own"),
        ]
        for runs, conversations, name in refused:
            made = Container(take_over_runs=False).register_instance(runs, RunStore)
            if conversations is not None:
                made.register_instance(conversations, ChatMemoryStore)
            async with made as here:
                with pytest.raises(IllegalConfigurationError, match=rf"skip_time: the clock of {name} cannot be moved"):
                    await skip_time(here, HOUR)
        assert sql.SqlRunStore(postgres).clock is None
    assert clock_in_memory.clock.skipped == timedelta()


async def test_a_store_of_a_program_has_its_clock_moved() -> None:
    class WithClock(Own):
        def __init__(self) -> None:
            self.clock = StoreClock()

    store = WithClock()
    async with Container(take_over_runs=False).register_instance(store, RunStore) as here:
        await skip_time(here, HOUR)

    assert store.clock.skipped == HOUR


async def test_durations_are_checked() -> None:
    async with Container() as here:
        with pytest.raises(TypeError, match=r"expected a datetime\.timedelta, got int"):
            await skip_time(here, 3600)  # type: ignore[arg-type]  # seconds are a mistake
        with pytest.raises(ValueError, match="clocks move forward only"):
            await skip_time(here, -HOUR)
    with pytest.raises(ContainerNotStartedError):
        await skip_time(here, HOUR)


def test_time_is_skipped_from_another_loop_than_the_containers() -> None:
    with Container(models={"default": ScriptedChatModel(["hello"])}).register(Friend) as here:
        asyncio.run(skip_time(here, HOUR))
        assert asyncio.run(here.get(Friend).chat("room", "a")) == "hello"
        assert asyncio.run(here.chat_memory(Friend, "room").messages())[0] == UserMessage("a")
