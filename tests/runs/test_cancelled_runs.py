"""A run that is cancelled: its owner ends it, wherever it is; it is taken only from an owner that does not answer.

Not here: what readers see of it (`test_cancelled_events`), undoing its tools in killed processes (`tests/databases`).
"""

import asyncio
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any, Protocol

import pytest

from tests.conftest import Clock
from toolbox import AiMessage, ChatRequest, ChatResponse, Container, compensate_for, register_ai_service, tool
from toolbox.errors import RunCancelledError
from toolbox.runs import InMemoryRunStore, Run, RunChanges, RunStore
from toolbox.runs.store import StoredRecord
from toolbox.testing import ScriptedChatModel, skip_time, tool_call

pytestmark = pytest.mark.anyio


class Desk:
    """A tool that works until it is cancelled, and then cleans up."""

    def __init__(self) -> None:
        self.begun, self.steps = asyncio.Event(), list[str]()
        self.may_end, self.may_undo = asyncio.Event(), asyncio.Event()
        self.may_end.set()
        self.may_undo.set()

    @tool
    async def book(self) -> str:
        self.steps.append("booked")
        return "booked"

    @compensate_for(book)
    async def unbook(self) -> None:
        await self.may_undo.wait()
        self.steps.append("undone")

    @tool
    async def work(self) -> str:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await self.may_end.wait()
            self.steps.append("cleaned up")
        return "never"

    @tool
    async def insist(self) -> str:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.steps.append("insisted")
        return "done all the same"


@register_ai_service(tools=[Desk])
class Clerk(Protocol):
    async def do(self, text: str) -> str: ...


@register_ai_service(tools=[Desk], compensate_on_failure=True)
class Careful(Protocol):
    async def do(self, text: str) -> str: ...


def program(service: Any, store: RunStore, desk: Desk, *calls: str) -> Container:
    replies = [ChatResponse(AiMessage(None, [tool_call(each)])) for each in calls]
    made = Container(models={"default": ScriptedChatModel([*replies, "done"])}).register(service)
    return made.register_instance(desk).register_instance(store, as_type=RunStore)


async def soon(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), 60)


@pytest.mark.parametrize("is_elsewhere", [False, True])
@pytest.mark.parametrize("service", [Clerk, Careful])
async def test_the_owner_of_a_run_ends_it_before_the_cancellation_returns(service: Any, is_elsewhere: bool) -> None:
    store, desk = InMemoryRunStore(lease=60), Desk()
    async with (
        program(service, store, desk, "book", "work") as here,
        program(service, store, Desk()) as there,
    ):
        run = await here.runs.start(service.do, "x")
        await soon(desk.begun)
        cancelled = await asyncio.wait_for((there if is_elsewhere else here).runs.cancel(run.id, "enough", "ann"), 30)
        steps = [*desk.steps]
        with pytest.raises(RunCancelledError, match="enough"):
            await there.runs.result(run)

    undone = ["undone"] if service is Careful else []
    assert steps == ["booked", "cleaned up", *undone]
    assert cancelled.status == "cancelled"
    assert [(each.by, each.answer, each.reason) for each in cancelled.history] == [("ann", "cancel", "enough")]


async def test_a_tool_that_catches_the_cancellation_does_not_keep_its_run() -> None:
    store, desk = InMemoryRunStore(lease=60), Desk()
    async with program(Clerk, store, desk, "insist") as here:
        run = await here.runs.start(Clerk.do, "x")
        await soon(desk.begun)
        cancelled = await asyncio.wait_for(here.runs.cancel(run.id), 30)

    assert desk.steps == ["insisted"]
    assert cancelled.status == "cancelled"


async def test_two_who_cancel_a_run_at_once_cancel_it_once() -> None:
    store, desk = InMemoryRunStore(lease=60), Desk()
    async with program(Careful, store, desk, "book", "work") as here, program(Careful, store, Desk()) as there:
        run = await here.runs.start(Careful.do, "x")
        await soon(desk.begun)
        both = await asyncio.gather(there.runs.cancel(run.id, "one"), here.runs.cancel(run.id, "two"))

    assert [each.status for each in both] == ["cancelled", "cancelled"]
    assert [len(each.history) for each in both] == [1, 1]
    assert desk.steps == ["booked", "cleaned up", "undone"]


class Watched(InMemoryRunStore):
    """Notes the looks for wishes after the first that found one."""

    def __init__(self) -> None:
        super().__init__(lease=60)
        self.found, self.looked_again = 0, asyncio.Event()

    async def wishes(self, run_ids: Collection[str]) -> dict[str, str]:
        wishes = await super().wishes(run_ids)
        self.found += bool(wishes)
        if self.found > 2:
            self.looked_again.set()
        return wishes


async def test_a_wish_does_not_interrupt_what_it_has_begun(clock: Clock) -> None:
    """It stays in the store until the run ends."""
    store, desk = Watched(), Desk()
    desk.may_undo = store.looked_again
    async with program(Careful, store, desk, "book", "work") as here, program(Careful, store, Desk()) as there:
        run = await here.runs.start(Careful.do, "x")
        await soon(desk.begun)
        cancelling = asyncio.create_task(there.runs.cancel(run.id))
        while not store.looked_again.is_set():
            clock.advance(1)  # an owner looks for wishes once a second
            await asyncio.sleep(0.01)
        cancelled = await asyncio.wait_for(cancelling, 30)

    assert cancelled.status == "cancelled"
    assert desk.steps == ["booked", "cleaned up", "undone"]


@pytest.mark.parametrize("is_elsewhere", [False, True])
async def test_a_run_is_taken_from_an_owner_that_does_not_end_it_within_its_lease(is_elsewhere: bool) -> None:
    store, desk = InMemoryRunStore(lease=0.5), Desk()
    desk.may_end.clear()
    async with program(Clerk, store, desk, "work") as here, program(Clerk, store, Desk()) as there:
        run = await here.runs.start(Clerk.do, "x")
        await soon(desk.begun)
        cancelled = await asyncio.wait_for((there if is_elsewhere else here).runs.cancel(run.id, "enough"), 30)
        steps = [*desk.steps]
        desk.may_end.set()
        with pytest.raises(RunCancelledError, match="enough"):
            await here.runs.result(run)

    assert cancelled.status == "cancelled"
    assert steps == []


class Deaf(InMemoryRunStore):
    """Shows no wish until it may."""

    shows = False

    async def wishes(self, run_ids: Collection[str]) -> dict[str, str]:
        return await super().wishes(run_ids) if self.shows else {}


async def test_a_wish_outlives_its_owner_and_whoever_had_it() -> None:
    store, first, second = Deaf(lease=60), Desk(), Desk()
    async with program(Clerk, store, second, "work") as there:
        async with program(Clerk, store, first, "work") as here:
            run = await here.runs.start(Clerk.do, "x")
            await soon(first.begun)
            cancelling = asyncio.create_task(there.runs.cancel(run.id, "enough"))
            await asyncio.sleep(0.2)
            cancelling.cancel()
            await asyncio.gather(cancelling, return_exceptions=True)
        assert second.steps == []  # `here` has stopped, and left its run
        await skip_time(there, timedelta(minutes=2))
        await soon(second.begun)
        store.shows = True
        with pytest.raises(RunCancelledError, match="enough"):
            await there.runs.result(run, timeout=30)


class SlowEnds(InMemoryRunStore):
    """Waits inside of the write that ends or suspends a run."""

    def __init__(self) -> None:
        super().__init__(lease=60)
        self.writing, self.may_write = asyncio.Event(), asyncio.Event()

    async def append(
        self,
        run_id: str,
        generation: int,
        records: Sequence[StoredRecord],
        changes: RunChanges | None = None,
        events: Sequence[str] = (),
    ) -> None:
        await super().append(run_id, generation, records, changes, events)
        if changes is not None and changes.status == "completed":
            self.writing.set()
            await self.may_write.wait()


async def test_a_run_that_is_just_being_completed_stays_completed() -> None:
    store = SlowEnds()
    async with program(Clerk, store, Desk()) as here:
        run = await here.runs.start(Clerk.do, "x")
        await soon(store.writing)
        cancelled: Run[Any] = await asyncio.wait_for(here.runs.cancel(run.id, "too late"), 30)
        store.may_write.set()
        assert await here.runs.result(run) == "done"

    assert (cancelled.status, cancelled.history) == ("completed", ())


async def test_a_tool_can_cancel_its_own_run() -> None:
    ended = asyncio.Event()

    class Quitter:
        @tool
        async def quit(self) -> str:
            try:
                await made.runs.cancel(run.id, "no more")
            finally:
                ended.set()
            return "never"

    @register_ai_service(tools=[Quitter])
    class Quits(Protocol):
        async def do(self, text: str) -> str: ...

    async def calls(request: ChatRequest) -> ChatResponse:
        await started.wait()
        return ChatResponse(AiMessage(None, [tool_call("quit")]))

    started = asyncio.Event()
    made = Container(models={"default": ScriptedChatModel([calls, "done"])}).register(Quits)
    async with made:
        run = await made.runs.start(Quits.do, "x")
        started.set()
        with pytest.raises(RunCancelledError, match="no more"):
            await made.runs.result(run, timeout=30)
    assert ended.is_set()
