"""Payments whose COMMIT takes seconds, with few connections for many runs, on PostgreSQL.

A payment by `pay` may lose its connection during the COMMIT. One by `pay_in_time` may also reach its time limit there,
while its thread goes on. Not here: dropping the connections and killing the workers (`crash`).
"""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from toolbox import (
    AiMessage,
    ChatRequest,
    ChatResponse,
    Container,
    Inject,
    ToolExecutionResultMessage,
    UserMessage,
    register_ai_service,
    sql,
    tool,
    user_message,
)
from toolbox.runs import RunEngine, RunId, RunStore
from toolbox.sql import SqlRunStore
from toolbox.testing import tool_call

from . import transfers
from .forge import rows

TABLES = (
    "CREATE TABLE ledger (run VARCHAR, cents INTEGER)",
    """CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN PERFORM pg_sleep(random() * 2); RETURN NULL; END $$""",
    """CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON ledger DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW EXECUTE FUNCTION slow()""",
)

FEW = {"pool_size": 3, "max_overflow": 0, "pool_timeout": 5}
"""Connections that the tools of a worker fill."""

PAY = text("INSERT INTO ledger VALUES (:run, 100)")


class Bank:
    @tool
    @sql.transactional
    async def pay(self, run: str, session: Inject[AsyncSession]) -> str:
        await session.execute(PAY, {"run": run})
        return "paid"

    @tool(timeout=1.0)
    @sql.transactional
    def pay_in_time(self, run: str, session: Inject[Session]) -> str:
        session.execute(PAY, {"run": run})
        return "paid"


@register_ai_service(tools=Bank, durable=True)
class Payments(Protocol):
    @user_message("{run}")
    async def pay(self, run: RunId) -> str: ...


class Payer:
    """A model that pays until it reads that it has paid, in two ways by turns."""

    async def chat(self, request: ChatRequest) -> ChatResponse:
        run = next(each.text for each in request.messages if isinstance(each, UserMessage))
        results = [each for each in request.messages if isinstance(each, ToolExecutionResultMessage)]
        if results and not results[-1].is_error:
            return ChatResponse(AiMessage("paid"))
        name = "pay_in_time" if (int(run.split()[-1]) + len(results)) % 2 else "pay"
        return ChatResponse(AiMessage(None, [tool_call(name, {"run": run})]))


@asynccontextmanager
async def bank(url: str, lease: float, *, take_over: bool) -> AsyncIterator[tuple[Container, AsyncEngine]]:
    """A started container of the service, with its database engine."""
    async with sql.open_engine(url, **FEW) as database:
        with sql.open_sync_engine(url, **FEW) as blocking:
            container = Container(models={"default": Payer()}, take_over_runs=take_over)
            container.register_instance(database, AsyncEngine).register_instance(blocking, Engine)
            container.register_instance(SqlRunStore(database, lease), RunStore)
            container.register(sql.session, sql.sync_session, Payments)
            if not take_over:
                nobody: Any = transfers.Nobody()
                container.register_instance(nobody, RunEngine)
            async with container:
                yield container, database


async def start(url: str, lease: float, names: Sequence[str]) -> None:
    """Start payments that workers execute."""
    async with bank(url, lease, take_over=False) as (container, _):
        for each in names:
            await container.runs.start(Payments.pay, each)


async def work(url: str, lease: float, last: int) -> None:
    """Takes over payments until `last` have completed, in any process."""
    async with bank(url, lease, take_over=True) as (_, database):
        await transfers.until_completed(database, last)


def check_payments(url: str, runs: int) -> tuple[int, int]:
    """Each payment was made once, as its record says. Returns how many calls the model made, and how many failed."""
    assert rows(url, "SELECT status, COUNT(*) FROM toolbox_runs GROUP BY status") == [("completed", runs)]
    paid = rows(url, "SELECT COUNT(DISTINCT run), COUNT(*) FROM ledger")
    assert paid == [(runs, runs)], paid
    records = rows(url, "SELECT run_id, data FROM toolbox_runs_records WHERE kind = 'result'")
    succeeded = [run for run, data in records if "error" not in json.loads(data)]
    assert sorted(succeeded) == sorted({run for run, _ in records})
    return len(records), len(records) - len(succeeded)
