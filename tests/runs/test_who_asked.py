"""Who asked for a run, in the run, its pending calls and lists; lists in pages and by waiting time."""

from datetime import timedelta
from typing import Any, Protocol

import pytest

from toolbox import Container, MemoryId, Result, create_ai_service, register_ai_service, tool
from toolbox.runs import InMemoryRunStore, RunChanges, RunNotFoundError, Runs, RunStore, RunSuspended, approve, runs_of
from toolbox.security import SecurityIdentity
from toolbox.testing import ScriptedChatModel, skip_time, tool_call

from .replies import ANN, BOB, asks, says

pytestmark = pytest.mark.anyio


@tool(requires_approval=True)
def pay(euros: int) -> str:
    return f"paid {euros}"


@register_ai_service(tools=pay)
class Payments(Protocol):
    @tool(name="arrange")
    async def ask(self, text: str) -> Result[str]: ...


@register_ai_service(tools=pay)
class Rooms(Protocol):
    async def ask(self, room: MemoryId[int], text: str) -> Result[str]: ...


@register_ai_service(tools=Payments)
class Desk(Protocol):
    async def ask(self, text: str) -> Result[str]: ...


PAY = asks(tool_call("pay", {"euros": 5}))


def container(*replies: Any, store: RunStore | None = None) -> Container:
    made = Container(models={"default": ScriptedChatModel(replies)}, seeds=(SecurityIdentity,), take_over_runs=False)
    return made.register(Payments, Rooms, Desk).register_instance(store or InMemoryRunStore(), RunStore)


async def suspended(here: Container, identity: SecurityIdentity | None = ANN) -> Result[str]:
    async with here.request_scope({} if identity is None else {SecurityIdentity: identity}):
        return await here.get(Payments).ask("Pay")


async def test_a_suspended_call_names_who_asked() -> None:
    async with container(PAY) as here:
        result = await suspended(here)

        assert [each.started_by for each in result.pending] == ["ann"]
        run = await here.runs.get(result.run_id or "")
        assert (run.started_by, run.memory_id) == ("ann", None)
        assert [each.started_by for each in run.pending] == ["ann"]
        assert [each.started_by for each in await here.runs.list()] == ["ann"]


async def test_an_anonymous_starter_has_no_name() -> None:
    async with container(PAY) as here:
        result = await suspended(here, identity=None)

        run = await here.runs.get(result.run_id or "")
        assert run.started_by is None
        assert [each.started_by for each in run.pending] == [None]


async def test_a_call_of_an_inner_service_names_who_asked_the_outermost_one() -> None:
    async with container(asks(tool_call("arrange", {"text": "Pay"})), PAY) as here:
        async with here.request_scope({SecurityIdentity: ANN}):
            [call] = (await here.get(Desk).ask("Pay")).pending

        assert (call.id, call.started_by) == ("0/0", "ann")


async def test_a_run_names_its_conversation() -> None:
    async with container(PAY) as here:
        async with here.request_scope({SecurityIdentity: ANN}):
            result = await here.get(Rooms).ask(7, "Pay")

        assert (await here.runs.get(result.run_id or "")).memory_id == "7"


async def test_events_and_another_process_name_who_asked() -> None:
    store = InMemoryRunStore()
    async with container(PAY, store=store) as here, here.request_scope({SecurityIdentity: ANN}):
        run = await here.runs.start(here.get(Payments).ask, "Pay")
        async for event in here.runs.events(run):
            if isinstance(event.event, RunSuspended):
                assert [each.started_by for each in event.event.pending] == ["ann"]
                break
    async with container(PAY, says("done"), store=store) as there:
        # The person who answers has not asked: the next pending call still names who did.
        result = await there.runs.resume(run.id, {"0": approve()}, by=BOB)

        assert [each.started_by for each in result.pending] == ["ann"]


async def test_a_service_without_a_container_names_who_asked() -> None:
    desk = create_ai_service(Payments, chat_model=ScriptedChatModel([PAY]), identity=lambda: ANN)

    result = await desk.ask("Pay")

    runs: Runs = runs_of(desk)
    assert (await runs.get(result.run_id or "")).started_by == "ann"


# --- lists


async def test_runs_are_listed_by_who_asked() -> None:
    async with container(PAY, PAY, PAY) as here:
        results = [await suspended(here, each) for each in (ANN, BOB, None)]

        assert [each.id for each in await here.runs.list(started_by="ann")] == [results[0].run_id]
        assert [each.id for each in await here.runs.list(started_by="bob")] == [results[1].run_id]
        assert await here.runs.list(started_by="") == []
        assert await here.runs.list(started_by="\0") == []
        assert len(await here.runs.list()) == 3


async def test_runs_are_listed_in_pages() -> None:
    async with container(*[PAY] * 5) as here:
        for _ in range(5):
            await suspended(here)
        everything = await here.runs.list()

        first = await here.runs.list(limit=2)
        second = await here.runs.list(limit=2, before=first[-1])
        third = await here.runs.list(limit=2, before=second[-1].id)

        assert [*first, *second, *third] == everything
        assert await here.runs.list(before=third[-1]) == []
        with pytest.raises(RunNotFoundError):
            await here.runs.list(before="unknown")


async def test_waiting_counts_from_the_oldest_pending_call() -> None:
    first, day = asks(tool_call("pay", {"euros": 1}), tool_call("pay", {"euros": 2})), timedelta(days=1)
    async with container(first, PAY) as here:
        run_id = (await suspended(here)).run_id or ""
        await skip_time(here, 2 * day)
        assert [each.id for each in await here.runs.list(waiting_longer_than=day)] == [run_id]

        await here.runs.resume(run_id, {"0": approve()})  # the other call waits as before

        assert [each.id for each in await here.runs.list(waiting_longer_than=day)] == [run_id]

        await here.runs.resume(run_id, {"1": approve()})  # now a new call waits

        assert len(await here.runs.list(status="suspended")) == 1
        assert await here.runs.list(waiting_longer_than=day) == []


async def test_only_runs_that_wait_are_listed_as_waiting() -> None:
    async with container(says("done")) as here:
        await here.runs.result(await here.runs.start(here.get(Payments).ask, "Pay"))
        await skip_time(here, timedelta(days=2))

        assert await here.runs.list(waiting_longer_than=timedelta()) == []
        with pytest.raises(ValueError, match="waiting_longer_than"):
            await here.runs.list(waiting_longer_than=timedelta(days=-1))
        with pytest.raises(TypeError, match="timedelta"):
            await here.runs.list(waiting_longer_than=5)  # type: ignore[arg-type]  # seconds are a mistake


async def test_a_run_that_cannot_be_read_is_listed_and_can_be_cancelled() -> None:
    store = InMemoryRunStore()
    async with container(PAY, store=store) as here:
        run_id = (await suspended(here)).run_id or ""
        stored = await store.load(run_id)
        assert stored is not None
        await store.change(run_id, stored.version, RunChanges(document='{"version": 99}'))

        [run] = await here.runs.list(started_by="ann")

        assert "version 99" in (run.error or "")
        assert (run.pending, run.started_by) == ((), "ann")
        assert (await here.runs.cancel(run_id)).status == "cancelled"
