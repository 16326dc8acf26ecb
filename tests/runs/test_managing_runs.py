"""Runs that are listed, cancelled, deleted and purged, also while they run."""

import asyncio
from datetime import timedelta
from typing import Any, Protocol

import pytest

from toolbox import ChatRequest, Container, Result, register_ai_service, tool
from toolbox.runs import (
    InMemoryRunStore,
    RunCancelledError,
    RunFailedError,
    RunNotFoundError,
    RunStateError,
    RunStore,
    StoredRecord,
    approve,
    reject,
)
from toolbox.security import SecurityIdentity
from toolbox.testing import ScriptedChatModel, skip_time, tool_call

from .approved_refunds import REFUND, Clerk, Desk, container, run_id_of
from .replies import asks, ran, says

pytestmark = pytest.mark.anyio


async def test_runs_are_listed_cancelled_deleted_and_purged() -> None:
    async with container(asks(REFUND), asks(REFUND), says("done")) as here:
        first = await run_id_of(here.get(Desk).invoice("one"))
        second = (await here.get(Desk).chat("room", "two")).run_id or ""
        assert [each.id for each in await here.runs.list(status="suspended")] == [second, first]
        assert [each.id for each in await here.runs.list(service=Desk, limit=1)] == [second]
        assert await here.runs.list(service="shop:Other") == []

        with pytest.raises(RunStateError, match="suspended"):
            await here.runs.delete(first)
        run = await here.runs.cancel(first, "not needed")
        assert (run.status, run.pending, run.error) == ("cancelled", (), "not needed")
        assert [(each.answer, each.reason) for each in run.history] == [("cancel", "not needed")]
        with pytest.raises(RunCancelledError, match="not needed"):
            await here.runs.resume(first, {})
        assert await here.runs.purge(timedelta(days=1)) == 0
        assert await here.runs.purge(timedelta(0)) == 1
        with pytest.raises(RunNotFoundError):
            await here.runs.get(first)
        await here.runs.resume(second, {"0": reject()})
        await here.runs.delete(second)
        assert await here.runs.list() == []


async def test_arguments_of_other_types_name_what_is_expected() -> None:
    async with container() as here:
        runs: Any = here.runs
        with pytest.raises(TypeError, match=r"runs\.list\(service=\): expected a class or its stored name, got int"):
            await runs.list(service=5)
        with pytest.raises(TypeError, match=r"runs\.list\(started_by=\): expected a str, got int"):
            await runs.list(started_by=5)
        with pytest.raises(ValueError, match="invalid limit='5'"):
            await runs.list(limit="5")
        with pytest.raises(TypeError, match=r"cancel\(run_id, reason=\): expected a str, got int"):
            await runs.cancel("x", reason=5)


@pytest.mark.parametrize(
    ("by", "name"),
    [
        (None, None),
        ("ann", "ann"),
        (SecurityIdentity("bob"), "bob"),
        (SecurityIdentity.anonymous(), None),
        ("\ud800", "\\ud800"),  # a client must be able to read the history
    ],
    ids=str,
)
async def test_the_history_says_who_cancelled_a_run_and_why(by: object, name: str | None) -> None:
    async with container(asks(REFUND)) as here:
        run_id = await run_id_of(here.get(Desk).invoice("one"))

        run = await here.runs.cancel(run_id, "too late", by=by)
        again = await here.runs.cancel(run_id, "once more", by="carl")

        assert [(each.by, each.answer, each.reason) for each in run.history] == [(name, "cancel", "too late")]
        assert again == await here.runs.get(run_id) == run


async def test_only_a_person_cancels_a_run() -> None:
    async with container(asks(REFUND)) as here:
        run_id = await run_id_of(here.get(Desk).invoice("one"))

        with pytest.raises(TypeError, match="expected a str or a SecurityIdentity, got int"):
            await here.runs.cancel(run_id, by=7)

        assert (await here.runs.get(run_id)).status == "suspended"


async def test_a_tool_that_ends_a_resumed_call_fails_the_run() -> None:
    from toolbox import ToolAbort

    @tool(requires_approval=True)
    def stop() -> str:
        raise ToolAbort("the customer has no account")

    @register_ai_service(tools=stop)
    class Stopping(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    async with container(asks(tool_call("stop")), services=(Stopping,)) as here:
        run_id = (await here.get(Stopping).ask("x")).run_id or ""
        with pytest.raises(ToolAbort):
            await here.runs.resume(run_id, {"0": approve()})
        run = await here.runs.get(run_id)
        assert (run.status, run.error) == ("failed", "ToolAbort: the customer has no account")
        with pytest.raises(RunFailedError):
            await here.runs.resume(run_id, {})


async def test_a_run_that_is_cancelled_while_it_continues_ends_with_the_cancellation() -> None:
    started = asyncio.Event()

    @tool(requires_approval=True)
    async def slow() -> str:
        started.set()
        await asyncio.Event().wait()
        return "never"

    @register_ai_service(tools=slow)
    class Slow(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    async with container(asks(tool_call("slow")), services=(Slow,)) as here:
        run_id = (await here.get(Slow).ask("x")).run_id or ""
        resuming = asyncio.create_task(here.runs.resume(run_id, {"0": approve()}))
        await started.wait()
        await here.runs.cancel(run_id, "changed our minds")
        with pytest.raises(RunCancelledError, match="changed our minds"):
            await resuming


async def test_a_process_whose_event_loop_stood_still_for_a_lease_does_not_take_its_own_run_over() -> None:
    class Late(InMemoryRunStore):
        """Renews a lease only after the process has looked for lapsed runs."""

        def __init__(self) -> None:
            super().__init__()
            self.looked = asyncio.Event()

        async def renew(self, run_id: str, generation: int) -> bool:
            await self.looked.wait()
            for _ in range(20):
                await asyncio.sleep(0)  # and after it has tried to take them over
            return await super().renew(run_id, generation)

        async def lapsed(self, limit: int = 100) -> list[str]:
            if found := await super().lapsed(limit):
                self.looked.set()
            return found

    store, started = Late(), asyncio.Event()

    @tool(requires_approval=True)
    async def slow() -> str:
        ran.append("slow")
        started.set()
        await store.looked.wait()
        for _ in range(50):
            await asyncio.sleep(0)
        return "done"

    @register_ai_service(tools=slow)
    class Slow(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    async with container(asks(tool_call("slow")), says("done"), store=store, services=(Slow,)) as here:
        run_id = (await here.get(Slow).ask("x")).run_id or ""
        resuming = asyncio.create_task(here.runs.resume(run_id, {"0": approve()}))
        await started.wait()
        await skip_time(here, timedelta(minutes=1))
        result = await resuming

    assert store.looked.is_set()
    assert result.content == "done"
    assert ran == ["slow"]


async def test_a_run_that_runs_here_ends_at_once_when_it_is_cancelled() -> None:
    async def never(request: ChatRequest) -> str:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return "never"

    asked, ended = asyncio.Event(), asyncio.Event()
    store = InMemoryRunStore(lease=600)  # the next renewal would be much later
    made = Container(models={"default": ScriptedChatModel([never])}).register(Clerk).register_instance(store, RunStore)
    async with made as here:
        run = await here.runs.start(here.get(Clerk).do, "x")
        await asked.wait()

        assert (await here.runs.cancel(run.id, "enough")).status == "cancelled"

        async with asyncio.timeout(60):
            await ended.wait()
        with pytest.raises(RunCancelledError, match="enough"):
            await here.runs.result(run)


async def test_a_run_that_is_cancelled_and_loses_its_records_while_its_result_is_read_is_cancelled() -> None:
    """As with `records_of_ended_runs="delete"`."""

    class Deletes(InMemoryRunStore):
        deletes = False

        async def records(self, run_id: str) -> list[StoredRecord]:
            if self.deletes:
                await here.runs.cancel(run_id, "too late")
                self._runs[run_id].records.clear()
            return await super().records(run_id)

    store = Deletes()
    async with container(asks(REFUND), store=store) as here:
        run_id = (await here.get(Desk).chat("room", "refund")).run_id or ""
        store.deletes = True
        with pytest.raises(RunCancelledError, match="too late"):
            await here.runs.resume(run_id, {})
