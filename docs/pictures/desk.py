"""The program in the pictures: a refund desk with tools on a thread and in a transaction, a guardrail and an approval.

Served by `take.py`. Its model waits a little before each reply, as a real one does.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Protocol

from fastapi import FastAPI, Request
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from toolbox import (
    ChatRequest,
    ChatResponse,
    Container,
    Inject,
    MemoryId,
    ToolExecutionResultMessage,
    UserMessage,
    application_scoped,
    on_start,
    register_ai_service,
    sql,
    system_message,
    tool,
)
from toolbox.guardrails import MaskSecrets, tool_output_guardrails
from toolbox.security import SecurityIdentity, roles_allowed
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox_fastapi import install


@dataclass(frozen=True)
class Order:
    number: int
    article: str
    euros: int
    bought: date
    card: str


@application_scoped
class OrderArchive:
    """In a real program: the client of an old system, which blocks its thread."""

    def find(self, number: int) -> Order:
        time.sleep(0.04)
        return Order(number, "reading lamp", 80, date(2026, 11, 2), "4111 1111 1111 1111")


class Orders:
    def __init__(self, archive: OrderArchive) -> None:
        self._archive = archive

    @tool
    @tool_output_guardrails(MaskSecrets())
    def find_order(self, number: Annotated[int, "as printed on the invoice"]) -> Order:
        """Find an order."""
        return self._archive.find(number)

    @tool
    async def warranty(self, article: str, bought: date) -> str:
        """Return how long the warranty of an article lasts."""
        return f"until {bought.replace(year=bought.year + 2)}"


class Refunds:
    def __init__(self, session: AsyncSession, user: SecurityIdentity) -> None:
        self._session, self._user = session, user

    @tool(requires_approval=True, approvers=("manager",))
    @roles_allowed("support")
    @sql.transactional
    async def refund(self, order: int, euros: int) -> str:
        """Pay an order back."""
        values = {"who": self._user.name, "number": order, "euros": euros}
        await self._session.execute(text("INSERT INTO refunds VALUES (:who, :number, :euros)"), values)
        return f"refunded {euros} euros"


@register_ai_service(tools=[Orders, Refunds])
@system_message("You help customers with their orders. Refund what broke within its warranty.")
class RefundDesk(Protocol):
    async def chat(self, conversation: MemoryId[str], text: str) -> str: ...


@on_start
async def create_tables(engine: Inject[AsyncEngine]) -> None:
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE IF NOT EXISTS refunds (who TEXT, number INTEGER, euros INTEGER)"))


class SupportModel(ScriptedChatModel):
    """Finds the order, looks at its warranty, asks for the refund, and answers."""

    model = "support-model"

    def __init__(self) -> None:
        super().__init__([])

    async def chat(self, request: ChatRequest) -> ChatResponse:
        question = [each for each in request.messages if isinstance(each, UserMessage)][-1].text
        number = int((re.search(r"\d+", question) or ["0"])[0])
        since = request.messages[request.messages.index(UserMessage(question)) :]
        results = [each for each in since if isinstance(each, ToolExecutionResultMessage)]
        steps = [
            tool_call("find_order", {"number": number}),
            tool_call("warranty", {"article": "reading lamp", "bought": "2026-11-02"}),
            tool_call("refund", {"order": number, "euros": 80}),
            f"I have refunded 80 euros for order {number}: the lamp is still under warranty.",
        ]
        await asyncio.sleep(0.4)
        return await ScriptedChatModel([steps[len(results)]]).chat(request)


def login(request: Request) -> SecurityIdentity:
    return SecurityIdentity("ann", ("support", "manager"))


app = FastAPI(title="Refund desk")
container = Container(models={"default": SupportModel()})
container.register(OrderArchive, RefundDesk, sql.engine, sql.session, sql.SqlChatMemoryStore, create_tables)
install(app, container, dev_ui=True, identity=login)


@app.post("/chat")
async def chat(conversation: str, text: str, desk: Inject[RefundDesk]) -> str:
    """Answer a customer."""
    return await desk.chat(conversation, text)
