"""A container that stops, and callers that leave: its runs end, and nothing of them uses the store afterwards."""

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

import pytest

from toolbox import Container, ToolboxSettings, application_scoped, register_ai_service, tool
from toolbox.errors import LeaseLostError
from toolbox.runs import InMemoryRunStore, RunEngine, RunId, RunStore, durable
from toolbox.runs.run_execution import wait_unless_lost
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio

SETTINGS = ToolboxSettings(stop_timeout=0.01)


class Kept(InMemoryRunStore):
    persistent = True


class SlowStore(Kept):
    """Renewing a lease never ends."""

    def __init__(self) -> None:
        super().__init__(lease=0.03)
        self.renews = asyncio.Event()
        self.in_use = 0

    async def renew(self, run_id: str, generation: int) -> bool:
        self.renews.set()
        self.in_use += 1
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # as a connection that is returned
            self.in_use -= 1
        return True


@application_scoped
class Room:
    """Notes that its tool waits, and that it has ended."""

    def __init__(self) -> None:
        self.waits, self.has_ended = asyncio.Event(), False

    @tool
    async def wait(self) -> str:
        """Wait."""
        self.waits.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.has_ended = True
        return "waited"


@register_ai_service(tools=Room)
class Waiter(Protocol):
    @durable
    async def ask(self, run: RunId, question: str) -> str: ...


async def test_renewals_have_ended_when_the_store_is_closed() -> None:
    store = SlowStore()
    container = Container(
        models={"default": ScriptedChatModel([tool_call("wait")])}, take_over_runs=False, settings=SETTINGS
    )
    container.register(Waiter, Room).register_instance(store, RunStore)

    async with container:
        asking = asyncio.create_task(container.get(Waiter).ask("run", "Hi"))
        await store.renews.wait()
        assert store.in_use == 1

    assert store.in_use == 0
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


class Nowhere(RunEngine):
    """Executes nothing."""

    async def submit(self, run_id: str, generation: int) -> None:
        pass


def container(store: InMemoryRunStore) -> Container:
    made = Container(
        models={"default": ScriptedChatModel([tool_call("wait")])}, take_over_runs=False, settings=SETTINGS
    )
    made.register(Waiter, Room).register_instance(store, RunStore)
    return made.register_instance(Nowhere(), RunEngine)


async def execute_until_it_waits(here: Container) -> tuple[Room, asyncio.Task[Any]]:
    """Let the program execute a run itself. Return the room in which its tool waits, and the task."""
    room = here.get(Room)
    await here.runs.start(Waiter.ask, "run", "Hi")
    executing = asyncio.create_task(here.runs.execute("run"))
    await room.waits.wait()
    return room, executing


async def test_a_run_that_the_program_executes_ends_with_the_container() -> None:
    store = Kept()
    async with container(store) as here:
        room, executing = await execute_until_it_waits(here)

    assert room.has_ended
    stored = await store.load("run")
    assert stored is not None
    assert (stored.status, stored.owner) == ("running", None)
    await asyncio.gather(executing, return_exceptions=True)


async def test_a_caller_of_execute_that_is_cancelled_ends_the_execution() -> None:
    store = Kept()
    async with container(store) as here:
        room, executing = await execute_until_it_waits(here)

        executing.cancel()
        await asyncio.wait([executing])

        assert room.has_ended
        stored = await store.load("run")
    assert stored is not None
    assert (stored.status, stored.owner) == ("running", None)


async def test_the_events_of_a_run_are_written_no_more_when_the_store_is_closed() -> None:
    class WritesForEver(Kept):
        def __init__(self) -> None:
            super().__init__()
            self.writes, self.in_use = asyncio.Event(), 0

        async def add_events(self, run_id: str, generation: int, events: Sequence[str]) -> None:
            self.writes.set()
            self.in_use += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.in_use -= 1

    store = WritesForEver()
    async with container(store) as here:
        await here.runs.start(Waiter.ask, "run", "Hi")
        executing = asyncio.create_task(here.runs.execute("run"))
        await store.writes.wait()
        assert store.in_use == 1

    assert store.in_use == 0
    await asyncio.gather(executing, return_exceptions=True)


async def test_a_run_that_another_process_takes_is_not_logged_as_failed(caplog: pytest.LogCaptureFixture) -> None:
    is_taken = asyncio.Event()

    async def execute() -> None:
        await is_taken.wait()
        raise LeaseLostError("7")

    execution = asyncio.create_task(execute())
    caller = asyncio.create_task(wait_unless_lost(execution, "7"))
    caplog.set_level("INFO", "toolbox.runs")
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    is_taken.set()
    with pytest.raises(LeaseLostError):
        await execution
    await asyncio.sleep(0)

    assert [each.levelname for each in caplog.records] == ["INFO"]
    assert "failed" not in caplog.text
