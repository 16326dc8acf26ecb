"""`RetryOnError` in a durable run: a call with all its attempts is one effect."""

from pathlib import Path
from typing import Any, Protocol

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from toolbox import Container, Inject, Result, ToolboxSettings, register_ai_service, sql, tool, user_message
from toolbox.errors import ModelHttpError, RunStoreError
from toolbox.interceptors import RetryOnError, interceptors
from toolbox.runs import RunId, RunStore, approve
from toolbox.settings import SqlSettings
from toolbox.testing import ScriptedChatModel, tool_call

from .replies import asks, ran, says
from .test_durable import Kept

pytestmark = pytest.mark.anyio


class Quick(RetryOnError):
    def __init__(self) -> None:
        super().__init__(attempts=3, on=(ConnectionError,), wait_initial=0, wait_max=0)


@tool
@interceptors(Quick)
async def fetch() -> str:
    ran.append("fetch")
    if len(ran) < 3:
        raise ConnectionError("lost")
    return "fetched"


@tool(requires_approval=True)
async def send() -> str:
    ran.append("send")
    return "sent"


@register_ai_service(tools=(fetch, send), durable=True)
class Desk(Protocol):
    @user_message("{text}")
    async def ask(self, run: RunId, text: str) -> Result[str]: ...


def container(store: Any, *replies: Any, services: Any = (Desk,)) -> Container:
    made = Container(models={"default": ScriptedChatModel(replies)}, take_over_runs=False)
    return made.register(*services).register_instance(store, RunStore)


FETCH = tool_call("fetch")


async def test_all_attempts_of_a_call_have_one_record_and_do_not_run_again() -> None:
    store = Kept()
    async with container(store, asks(FETCH), asks(tool_call("send"))) as here:
        [pending] = (await here.get(Desk).ask("r", "x")).pending
        records = [(each.key, each.kind) for each in await store.records("r")]
    async with container(store, says("done")) as here:
        result = await here.runs.resume("r", {pending.id: approve()})

    assert ran == ["fetch"] * 3 + ["send"]
    assert [each for each in records if each[0].startswith("0")] == [("0#start", "start"), ("0", "result")]
    assert [each.result for each in result.tool_executions] == ["fetched", "sent"]


async def test_a_call_that_failed_in_all_attempts_fails_at_once_when_it_is_replayed() -> None:
    calls: list[int] = []

    @tool
    @interceptors(Quick)
    async def broken() -> str:
        calls.append(1)
        raise ConnectionError("lost")

    @register_ai_service(tools=(broken, send), durable=True)
    class Till(Protocol):
        async def ask(self, run: RunId, text: str) -> Result[str]: ...

    store = Kept()
    async with container(store, asks(tool_call("broken"), tool_call("send")), services=[Till]) as here:
        [pending] = (await here.get(Till).ask("r", "x")).pending
    async with container(store, says("done"), services=[Till]) as here:
        result = await here.runs.resume("r", {pending.id: approve()})

    assert len(calls) == 3
    assert [each.is_error for each in result.tool_executions] == [True, False]


async def test_a_process_that_dies_before_the_result_is_recorded_leaves_one_call_with_an_unknown_outcome() -> None:
    store = Kept()
    store.dies_on = "result:0"
    async with container(store, asks(FETCH)) as here:
        with pytest.raises(RunStoreError):
            await here.get(Desk).ask("r", "x")
    async with container(store.restarted(), says("done")) as here:
        result = await here.runs.resume("r", {})

    [execution] = result.tool_executions
    assert ran == ["fetch"] * 3
    assert "unknown" in execution.result


async def test_a_transactional_tool_commits_once(tmp_path: Path) -> None:
    attempts: list[int] = []

    class Bank:
        @tool
        @interceptors(Quick)
        @sql.transactional
        async def pay(self, session: Inject[AsyncSession]) -> str:
            attempts.append(1)
            await session.execute(text("INSERT INTO paid VALUES (1)"))
            if len(attempts) < 3:
                raise ConnectionError("lost")
            return "paid"

    @register_ai_service(tools=Bank, durable=True)
    class Till(Protocol):
        async def ask(self, run: RunId, text: str) -> Result[str]: ...

    settings = ToolboxSettings(sql=SqlSettings(url=f"sqlite:///{tmp_path}/runs.sqlite"))
    model = ScriptedChatModel([asks(tool_call("pay")), says("done")])
    made = Container(models={"default": model}, settings=settings)
    async with made.register(sql.engine, sql.session, sql.SqlRunStore, Till) as here:
        async with here.request_scope():
            session = await here.aget(AsyncSession)
            await session.execute(text("CREATE TABLE paid (euros INTEGER)"))
            await session.commit()
        result = await here.get(Till).ask("r", "x")
        records = [each.key for each in await (await here.runs.store()).records("r") if each.key.startswith("0")]
        async with here.request_scope():
            rows = (await (await here.aget(AsyncSession)).execute(text("SELECT * FROM paid"))).all()

    assert (result.tool_executions[0].result, len(attempts), len(rows)) == ("paid", 3, 1)
    assert records == ["0#start", "0"]


async def test_a_service_is_called_again_without_repeating_its_tools() -> None:
    @tool
    async def look() -> str:
        ran.append("look")
        return "seen"

    @register_ai_service(tools=look)
    class Inner(Protocol):
        @tool
        async def check(self, text: str = "x") -> str: ...

    @register_ai_service(tools=Inner, durable=True)
    @interceptors(RetryOnError(wait_initial=0, wait_max=0))
    class Outer(Protocol):
        async def ask(self, run: RunId, text: str) -> Result[str]: ...

    unavailable = ModelHttpError(503, "unavailable")
    replies = (asks(tool_call("check")), asks(tool_call("look")), unavailable, says("fine"), says("done"))
    async with container(Kept(), *replies, services=[Outer]) as here:
        result = await here.get(Outer).ask("r", "x")

    assert (result.content, result.tool_executions[0].result, ran) == ("done", "fine", ["look"])
