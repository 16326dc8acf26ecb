"""Output guardrails of transactional tools: the record of the transaction is replaced by what the model reads."""

from pathlib import Path
from typing import Any, Protocol

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from toolbox import (
    Compensation,
    Container,
    Inject,
    Result,
    ToolboxSettings,
    compensate_for,
    register_ai_service,
    sql,
    tool,
    user_message,
)
from toolbox.errors import RunStoreError
from toolbox.guardrails import ToolOutputGuardrail, ToolOutputGuardrailRequest, tool_output_guardrails
from toolbox.runs import RunId
from toolbox.settings import SqlSettings
from toolbox.sql import SqlRunStore
from toolbox.testing import ScriptedChatModel, tool_call

from ..runs.replies import asks, says

pytestmark = pytest.mark.anyio

judged: list[str] = []


class Masking(ToolOutputGuardrail):
    def validate(self, request: ToolOutputGuardrailRequest) -> Any:
        judged.append(request.result.text)
        return self.success_with(request.result.text.replace("7", "*"))


class Bank:
    @tool
    @sql.transactional
    @tool_output_guardrails(Masking)
    async def pay(self, euros: int, session: Inject[AsyncSession]) -> str:
        await session.execute(text("INSERT INTO paid VALUES (:euros)"), {"euros": euros})
        return f"paid {euros}"


@register_ai_service(tools=Bank, durable=True)
class Till(Protocol):
    @user_message("{text}")
    async def ask(self, run: RunId, text: str) -> Result[str]: ...


class Refusing(ToolOutputGuardrail):
    def validate(self, request: ToolOutputGuardrailRequest) -> Any:
        return self.failure("secret")


class Shop:
    @tool
    @sql.transactional
    @tool_output_guardrails(Refusing)
    async def pay(self, euros: int, session: Inject[AsyncSession]) -> str:
        await session.execute(text("INSERT INTO paid VALUES (:euros)"), {"euros": euros})
        return f"paid {euros}"

    @compensate_for(pay)
    @sql.transactional
    async def pay_back(self, euros: int, session: Inject[AsyncSession]) -> None:
        await session.execute(text("DELETE FROM paid WHERE euros = :euros"), {"euros": euros})

    @tool
    def ship(self) -> str:
        raise ValueError("no ship")


@register_ai_service(tools=Shop, durable=True, compensate_on_tool_errors=True)
class Seller(Protocol):
    @user_message("{text}")
    async def ask(self, run: RunId, text: str) -> Result[str]: ...


class Dying(SqlRunStore):
    """A store whose process dies before it writes its `last` record after the start of a call."""

    last: str | None = None

    async def append(self, run_id: str, generation: int, records: Any, *args: Any) -> None:
        if self.last is not None and any(each.key == self.last for each in records):
            raise ValueError("the process died")
        await super().append(run_id, generation, records, *args)


def program(url: str, last: str | None, *replies: Any) -> Container:
    settings = ToolboxSettings(sql=SqlSettings(url=url))
    model = ScriptedChatModel(replies)
    made = Container(models={"default": model}, settings=settings, take_over_runs=False)
    made.register(sql.engine, sql.session, Till, Seller)

    class Store(Dying):
        pass

    Store.last = last
    return made.register(Store)


async def make_table(here: Container) -> None:
    async with here.request_scope():
        session = await here.aget(AsyncSession)
        await session.execute(text("CREATE TABLE paid (euros INTEGER)"))
        await session.commit()


async def paid_in(here: Container) -> list[int]:
    async with here.request_scope():
        session = await here.aget(AsyncSession)
        return [*(await session.execute(text("SELECT euros FROM paid"))).scalars()]


@pytest.mark.parametrize(("last", "times"), [("0", 2), ("#r1", 1)])
async def test_a_transactional_result_is_judged_once_and_replaced(tmp_path: Path, last: str, times: int) -> None:
    judged.clear()
    url = f"sqlite:///{tmp_path}/runs.sqlite"
    call = asks(tool_call("pay", {"euros": 7}))
    async with program(url, last, call, says("lost")) as here:
        await make_table(here)
        with pytest.raises(RunStoreError):
            await here.get(Till).ask("r", "x")
    async with program(url, None, says("done")) as here:
        result = await here.runs.resume("r", {})
        records = await (await here.runs.store()).records("r")
        paid = await paid_in(here)

    assert (len(judged), result.tool_executions[0].result, len(paid)) == (times, "paid *", 1)
    assert "paid 7" not in "".join(each.data for each in records)


@pytest.mark.parametrize("last", ["0", "#r1"])
async def test_a_committed_tool_whose_result_was_refused_is_undone_after_a_crash(tmp_path: Path, last: str) -> None:
    url = f"sqlite:///{tmp_path}/runs.sqlite"
    async with program(url, last, asks(tool_call("pay", {"euros": 7})), says("lost")) as here:
        await make_table(here)
        with pytest.raises(RunStoreError):
            await here.get(Seller).ask("r", "x")
        assert await paid_in(here) == [7]
    async with program(url, None, asks(tool_call("ship")), says("failed")) as here:
        result = await here.runs.resume("r", {})
        assert await paid_in(here) == []

    assert result.tool_executions[0].result == "Output validation failed: secret"
    assert result.compensations == (Compensation("pay", {"euros": 7}),)
