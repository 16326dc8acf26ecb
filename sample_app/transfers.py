"""Money transfers by an agent that survives a killed process, and the page `/` that shows the ledger.

    uvicorn sample_app.transfers:app
    toolbox worker sample_app.transfers:container       # in another terminal; kill the page

Not here: the other agents of the sample (`application`).
"""

from __future__ import annotations

import asyncio
import html
import os
from typing import Annotated, Protocol

from fastapi import FastAPI, Header
from fastapi.responses import HTMLResponse
from fastapi.sse import EventSourceResponse
from pydantic import BaseModel, Field
from sqlalchemy import String, func, select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from toolbox import (
    AiMessage,
    ChatRequest,
    ChatResponse,
    Container,
    Inject,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    UserMessage,
    produces,
    register_ai_service,
    sql,
    system_message,
    tool,
    user_message,
)
from toolbox.runs import RunId, Runs, RunStore
from toolbox_fastapi import install, sse

from .application import uses_real_model

Cents = Annotated[int, Field(gt=0, le=1_000_000)]


class Tables(DeclarativeBase):
    """The tables of the bank."""


class Entry(Tables):
    """One line of the ledger. The cents of one transfer add up to 0."""

    __tablename__ = "ledger"
    number: Mapped[int] = mapped_column(primary_key=True)
    account: Mapped[str] = mapped_column(String(50))
    cents: Mapped[int]


# --- the agent


class Bank:
    """Books money. Each booking and the record of its tool call are one commit, so it happens once."""

    @tool
    @sql.transactional
    async def debit(self, account: str, cents: Cents, session: Inject[AsyncSession]) -> str:
        """Take money from an account."""
        session.add(Entry(account=account, cents=-cents))
        return f"took {cents} cents from {account}"

    @tool
    async def check_payee(self, account: str) -> str:
        """Ask the payee's bank if the account exists; this takes a while."""
        await asyncio.sleep(float(os.environ.get("TRANSFER_PAUSE", "5")))
        return f"{account} exists"

    @tool
    @sql.transactional
    async def credit(self, account: str, cents: Cents, session: Inject[AsyncSession]) -> str:
        """Give money to an account."""
        session.add(Entry(account=account, cents=cents))
        return f"gave {cents} cents to {account}"


@register_ai_service(tools=Bank, durable=True)
class TransferAgent(Protocol):
    """Moves money from one account to another."""

    @system_message("Debit the payer, check the payee's account, then credit the payee. Then say what you did.")
    @user_message("Transfer {cents} cents from {payer} to {payee}")
    async def transfer(self, run: RunId, payer: str, payee: str, cents: int) -> str: ...


class Teller:
    """Plans the three calls of a transfer; used instead of a language model."""

    async def chat(self, request: ChatRequest) -> ChatResponse:
        """Return the next call, or the answer."""
        [question] = [each.text for each in request.messages if isinstance(each, UserMessage)]
        _, cents, _, _, payer, _, payee = question.split()
        done = {each.tool_name for each in request.messages if isinstance(each, ToolExecutionResultMessage)}
        plan = {"debit": payer, "check_payee": payee, "credit": payee}
        for name, account in plan.items():
            if name not in done:
                amount = "" if name == "check_payee" else f', "cents": {cents}'
                call = ToolExecutionRequest(f"call-{name}", name, f'{{"account": "{account}"{amount}}}')
                return ChatResponse(AiMessage(None, [call]))
        return ChatResponse(AiMessage(f"Transferred {cents} cents from {payer} to {payee}."))


# --- the container


@produces(scope="application")
async def run_store(engine: AsyncEngine) -> RunStore:
    """Create the tables of the bank, and keep runs in the same database. Leases last 5 seconds."""
    async with engine.begin() as connection:
        await connection.run_sync(Tables.metadata.create_all)
    return sql.SqlRunStore(engine, lease=float(os.environ.get("TRANSFER_LEASE", "5")))


def transfer_container(*, take_over_runs: bool = True) -> Container:
    """Return a container with the agent; its database is `TOOLBOX_SQL__URL`, or a file in the current folder."""
    os.environ.setdefault("TOOLBOX_SQL__URL", "sqlite:///transfers.sqlite")
    models = {} if uses_real_model() else {"default": Teller()}
    container = Container(models=models, take_over_runs=take_over_runs)
    return container.register(sql.engine, sql.session, run_store, TransferAgent)


container = transfer_container()

# --- the web application, whose process also executes the transfers that it starts


class Order(BaseModel):
    """A transfer. The same id is the same transfer, however often it is sent."""

    id: str = Field(pattern=r"^[\w-]{1,50}$")
    payer: str = Field(pattern=r"^\w{1,50}$")
    payee: str = Field(pattern=r"^\w{1,50}$")
    cents: Cents


app = FastAPI(title="Transfers")
install(app, transfer_container())


@app.post("/transfers", status_code=202)
async def transfer(order: Order, runs: Inject[Runs]) -> dict[str, str]:
    """Start a transfer, which continues if this process ends."""
    run = await runs.start(TransferAgent.transfer, order.id, order.payer, order.payee, order.cents)
    return {"run_id": run.id, "status": run.status}


@app.get("/transfers/{run_id}/events", response_model=None)
async def follow(
    run_id: str, runs: Inject[Runs], last_event_id: Annotated[str | None, Header()] = None
) -> EventSourceResponse:
    """Send the events of a transfer; a browser that reconnects misses nothing."""
    return sse(runs.events(run_id, after=last_event_id))


@app.get("/", response_class=HTMLResponse, include_in_schema=False)
async def ledger(runs: Inject[Runs], session: Inject[AsyncSession]) -> str:
    """Show the transfers, the ledger and its sum, which is 0 when no transfer is running."""
    entries = (await session.scalars(select(Entry).order_by(Entry.number))).all()
    total = await session.scalar(select(func.coalesce(func.sum(Entry.cents), 0)))
    running = [[each.id, each.status] for each in await runs.list()]
    booked = [[str(each.number), each.account, f"{each.cents / 100:.2f}"] for each in entries]
    return (
        "<!doctype html><title>Ledger</title><meta http-equiv=refresh content=2>"
        f"<h1>Transfers</h1>{_table(running)}<h1>Ledger</h1>{_table(booked)}<p>Sum: {(total or 0) / 100:.2f}"
    )


def _table(rows: list[list[str]]) -> str:
    lines = ("".join(f"<td>{html.escape(each)}" for each in row) for row in rows)
    return "<table>" + "".join(f"<tr>{line}" for line in lines) + "</table>"
