"""`SqlRunStore(records_of_ended_runs="delete")`: of a run that has ended, only the outcome and the history stay."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from toolbox import Container, FinishReason, Result, invocation_attributes, register_ai_service, sql, tool
from toolbox.errors import RunConflictError
from toolbox.runs import RunEnded, RunId, approve, reject
from toolbox.security import SecurityIdentity
from toolbox.settings import SqlSettings, ToolboxSettings
from toolbox.sql import SqlRunStore
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio

SECRET = "my illness"
ANN = SecurityIdentity("ann", frozenset({"clerk"}), {"note": SECRET})


class Letters:
    @tool(requires_approval=True)
    def send(self, words: str) -> str:
        """Send a letter."""
        return f"sent: {words}"


@register_ai_service(tools=Letters, durable=True)
class Desk(Protocol):
    async def write(self, run: RunId, about: str) -> Result[str]: ...


REPLIES = [tool_call("send", {"words": SECRET}), "done"]


@asynccontextmanager
async def desk(url: str, *replies: Any, **options: Any) -> AsyncIterator[Container]:
    settings = ToolboxSettings(sql=SqlSettings(url=url, records_of_ended_runs="delete", **options))
    container = Container(models={"default": ScriptedChatModel(replies)}, settings=settings, seeds=[SecurityIdentity])
    async with container.register(sql.engine, *sql.stores, Desk):
        yield container


async def write(container: Container, run_id: str, about: str = SECRET, who: SecurityIdentity = ANN) -> Result[str]:
    async with container.request_scope({SecurityIdentity: who}):
        return await (await container.aget(Desk)).write(run_id, about)


async def stored_text(container: Container) -> str:
    """Return everything that the tables of runs have."""
    rows = []
    async with (await container.aget(AsyncEngine)).connect() as connection:
        for table in ("toolbox_runs", "toolbox_runs_records", "toolbox_runs_events", "toolbox_runs_messages"):
            rows += (await connection.execute(text(f"SELECT * FROM {table}"))).all()
    return repr(rows)


async def test_only_the_outcome_and_the_history_of_a_run_stay(database_url: str) -> None:
    async with desk(database_url, *REPLIES) as container:
        waiting = await write(container, "order-7")
        await container.runs.tell("order-7", f"Not {SECRET}, please")
        assert SECRET in await stored_text(container)
        whole = await container.runs.resume("order-7", {"0": approve()}, by="carl")
        stored, again = await stored_text(container), await write(container, "order-7")
        run, result = await container.runs.get("order-7"), await container.runs.result("order-7")
        store = await container.runs.store()
        records = await store.records("order-7")

    assert waiting.pending
    assert whole.tool_executions
    assert SECRET not in stored
    assert records == []
    assert (again.content, again.token_usage, again.finish_reason) == ("done", whole.token_usage, FinishReason.STOP)
    assert (again.tool_executions, again.messages) == ((), ())
    assert result == again
    assert (run.status, run.started_by, run.pending) == ("completed", "ann", ())
    assert [(each.by, each.answer) for each in run.history] == [("carl", "approve")]


async def test_the_id_still_belongs_to_the_same_call_only(database_url: str) -> None:
    async with desk(database_url, *REPLIES) as container:
        with invocation_attributes(tenant="a"):
            await write(container, "order-7")
        await container.runs.resume("order-7", {"0": reject("no")})
        with invocation_attributes(tenant="a"):
            assert (await write(container, "order-7")).content == "done"
            with pytest.raises(RunConflictError, match="other arguments"):
                await write(container, "order-7", "something else")
            with pytest.raises(RunConflictError, match="another identity"):
                await write(container, "order-7", who=SecurityIdentity("bob"))
        with invocation_attributes(tenant="b"), pytest.raises(RunConflictError, match="tenant"):
            await write(container, "order-7")


@pytest.mark.parametrize("end", ["cancelled", "failed"])
async def test_runs_that_do_not_complete_keep_their_reason(database_url: str, end: str) -> None:
    def fails(request: Any) -> Any:
        raise LookupError("the model is away")

    async with desk(database_url, REPLIES[0], fails) as container:
        await write(container, "order-7")
        if end == "cancelled":
            await container.runs.cancel("order-7", "a mistake")
        else:
            with pytest.raises(LookupError):
                await container.runs.resume("order-7", {"0": approve()})
        run, stored = await container.runs.get("order-7"), await stored_text(container)

    assert (run.status, run.error) == (end, "a mistake" if end == "cancelled" else "LookupError: the model is away")
    assert SECRET not in stored


async def test_followers_get_the_end_after_the_last_event(database_url: str) -> None:
    async with desk(database_url, "done") as container:
        run = await container.runs.start(Desk.write, "order-7", SECRET)
        await container.runs.result(run.id)
        events = [each async for each in container.runs.events(run.id)]
        [end] = events
        seen = [each async for each in container.runs.events(run.id, after=end.number)]

    assert end.event == RunEnded("completed")
    assert end.number > 1
    assert seen == []


async def test_a_waiting_run_keeps_everything(database_url: str) -> None:
    async with desk(database_url, *REPLIES) as container:
        await write(container, "order-7")
    async with desk(database_url, "done") as container:
        result = await container.runs.resume("order-7", {"0": approve()})

    assert result.content == "done"


async def test_other_values_are_rejected(sqlite_url: str) -> None:
    async with sql.open_engine(sqlite_url) as engine:
        with pytest.raises(ValueError, match="records_of_ended_runs"):
            SqlRunStore(engine, records_of_ended_runs="forget")  # type: ignore[arg-type]
