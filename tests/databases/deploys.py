"""Money transfers while a new version of their program is deployed: old and new workers take the same runs.

The new version has renamed the tool `debit` to `withdraw`, and has added a parameter to `credit`. Not here: killing the
workers (`crash`).
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal, Protocol, TypeAlias

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

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

Version: TypeAlias = Literal["old", "new"]

TABLES = ("CREATE TABLE ledger (run VARCHAR, account VARCHAR, cents INTEGER)",)


async def _book(session: AsyncSession, run: str, account: str, cents: int) -> None:
    statement = text("INSERT INTO ledger VALUES (:run, :account, :cents)")
    await session.execute(statement, {"run": run, "account": account, "cents": cents})


class OldBank:
    @tool
    @sql.transactional
    async def debit(self, run: str, cents: int, session: Inject[AsyncSession]) -> str:
        await _book(session, run, "payer", -cents)
        return "debited"

    @tool
    @sql.transactional
    async def credit(self, run: str, cents: int, session: Inject[AsyncSession]) -> str:
        await _book(session, run, "payee", cents)
        return "credited"


class NewBank:
    @tool(former_names=("debit",))
    @sql.transactional
    async def withdraw(self, run: str, cents: int, session: Inject[AsyncSession]) -> str:
        await _book(session, run, "payer", -cents)
        return "debited"

    @tool
    @sql.transactional
    async def credit(self, run: str, cents: int, session: Inject[AsyncSession], note: str = "") -> str:
        await _book(session, run, "payee", cents)
        return "credited"


def service_of(version: Version) -> Any:
    """Return the service of a version, which has the same name in both."""

    @register_ai_service(tools=OldBank if version == "old" else NewBank, durable=True)
    class Payments(Protocol):
        @user_message("{cents} {run}")
        async def pay(self, run: RunId, cents: int) -> str: ...

    Payments.__qualname__ = "Payments"
    return Payments


SERVICES: dict[Version, Any] = {"old": service_of("old"), "new": service_of("new")}


class Clerk:
    """A model that debits by the name that it is offered, then credits, and answers."""

    async def chat(self, request: ChatRequest) -> ChatResponse:
        question = next(each for each in reversed(request.messages) if isinstance(each, UserMessage))
        cents, _, run = question.text.partition(" ")
        results = [each for each in request.messages if isinstance(each, ToolExecutionResultMessage)]
        assert not any(each.is_error for each in results), results
        offered = {each.name for each in request.tool_specifications}
        debit = "withdraw" if "withdraw" in offered else "debit"
        if len(results) == 2:
            return ChatResponse(AiMessage(f"paid {cents}"))
        name = "credit" if results else debit
        return ChatResponse(AiMessage(None, [tool_call(name, {"run": run, "cents": int(cents)})]))


@asynccontextmanager
async def bank(url: str, lease: float, version: Version, *, take_over: bool) -> AsyncIterator[tuple[Container, Any]]:
    """A started container of a version, which executes only what it takes over, and its database engine."""
    async with sql.open_engine(url) as database:
        container = Container(models={"default": Clerk()}, take_over_runs=take_over)
        container.register_instance(database, AsyncEngine)
        container.register_instance(SqlRunStore(database, lease), RunStore)
        container.register(sql.session, SERVICES[version])
        if not take_over:
            container.register_instance(transfers.Nobody(), RunEngine)
        async with container:
            yield container, database


async def work(url: str, lease: float, version: Version, last: int) -> None:
    """Take over runs with a version of the program, until `last` have completed in any process."""
    async with bank(url, lease, version, take_over=True) as (_, database):
        await transfers.until_completed(database, last)


async def start(url: str, lease: float, version: Version, names: list[str]) -> None:
    """Start payments with a version of the program, without executing them."""
    async with bank(url, lease, version, take_over=False) as (container, _):
        for each in names:
            await container.runs.start(SERVICES[version].pay, each, 100)
            await asyncio.sleep(0)


def check_payments(url: str, runs: int) -> None:
    """Each payment has happened once, whole."""
    assert rows(url, "SELECT status, COUNT(*) FROM toolbox_runs GROUP BY status") == [("completed", runs)]
    booked = rows(url, "SELECT run, account, COUNT(*), SUM(cents) FROM ledger GROUP BY run, account")
    assert sorted({each[1:] for each in booked}) == [("payee", 1, 100), ("payer", 1, -100)]
    assert len(booked) == 2 * runs
