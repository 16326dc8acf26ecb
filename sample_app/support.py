"""The endpoints of the other two agents: customer support at `/support`, with a database, and experts at `/experts`.

Not here: the agents themselves (`bookings`, `experts`), the choice of the model (`application`).
"""

from __future__ import annotations

import os
import secrets
from datetime import date
from hashlib import sha256
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Cookie, Response
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, Field
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.requests import HTTPConnection

from toolbox import Container, Inject, produces, sql
from toolbox.conversations import ConversationInfo, Conversations, LogEntry
from toolbox.runs import Runs, approve, reject
from toolbox.security import SecurityIdentity

from .answers import Answer
from .bookings import Booking, BookingRepository, BookingRow, CustomerSupportAgent, Reservation, booking_data
from .experts import LegalExpert, MedicalExpert, RouterAgent, TechnicalExpert

router = APIRouter()


@produces(scope="request")
def caller(connection: HTTPConnection | None = None) -> SecurityIdentity:
    """Return the caller: staff with the key `SAMPLE_STAFF_KEY` in the header `X-Staff-Key`, otherwise a visitor.

    The support page gives each browser a secret. A visitor has a name made from it, and without it none.
    """
    key = os.environ.get("SAMPLE_STAFF_KEY", "")
    given = connection.headers.get("x-staff-key", "") if connection is not None else ""
    if key and secrets.compare_digest(key.encode(), given.encode()):
        return SecurityIdentity("staff", frozenset({"staff"}))
    secret = connection.cookies.get("visitor", "") if connection is not None else ""
    if not secret:
        return SecurityIdentity.anonymous()
    return SecurityIdentity(f"visitor {sha256(secret.encode()).hexdigest()[:16]}")


def with_support(container: Container) -> Container:
    """Register the two agents; their database is `TOOLBOX_SQL__URL`, or one in memory."""
    os.environ.setdefault("TOOLBOX_SQL__URL", "sqlite://")
    container.register(sql.engine, sql.session, sql.SqlChatMemoryStore)
    container.register(caller, booking_data, BookingRepository, Reservation, CustomerSupportAgent)
    return container.register(RouterAgent, MedicalExpert, LegalExpert, TechnicalExpert)


class SupportMessage(BaseModel):
    """A customer's message; the client chooses the id of the conversation."""

    conversation: str = Field(min_length=1, max_length=100)
    message: str = Field(min_length=1, max_length=2000)


class Decision(BaseModel):
    """A customer's decision about a tool call that waits: `confirmed` or not."""

    run_id: str = Field(min_length=1, max_length=100)
    call_id: str = Field(min_length=1, max_length=100)
    confirmed: bool


class Request(BaseModel):
    """A question to the experts."""

    question: str = Field(min_length=1, max_length=2000)


class BookedCar(Booking):
    """A booking with the name of its customer."""

    customer: str


@router.get("/support", response_class=HTMLResponse, include_in_schema=False)
async def page(response: Response, visitor: Annotated[str, Cookie()] = "") -> str:
    """Return the support page, with a secret for a new visitor."""
    if not visitor:
        response.set_cookie("visitor", secrets.token_urlsafe(), httponly=True, samesite="strict")
    return Path(__file__).with_name("support.html").read_text(encoding="utf-8")


@router.post("/support")
async def support(message: SupportMessage, agent: Inject[CustomerSupportAgent]) -> Answer:
    """Return the agent's answer in this conversation."""
    return Answer.of(await agent.chat(message.conversation, message.message))


@router.get("/support/conversations")
async def list_own(conversations: Inject[Conversations], user: Inject[SecurityIdentity]) -> list[ConversationInfo]:
    """Return the visitor's conversations, newest first."""
    return await conversations.list(owner=user.name, service=CustomerSupportAgent)


@router.get("/support/conversations/{conversation}")
async def history(conversation: str, conversations: Inject[Conversations]) -> list[LogEntry]:
    """Return what was said in a conversation of the visitor."""
    return await conversations.of(CustomerSupportAgent, conversation).history()


@router.post("/support/conversations/{conversation}/stop")
async def stop(conversation: str, conversations: Inject[Conversations], user: Inject[SecurityIdentity]) -> bool:
    """Stop the answer that the visitor waits for; false if there is none."""
    return await conversations.of(CustomerSupportAgent, conversation).stop(by=user)


@router.post("/support/decision")
async def decide(decision: Decision, runs: Inject[Runs]) -> Answer:
    """Continue a conversation that waits for the customer, and return the agent's answer."""
    answer = approve() if decision.confirmed else reject("The customer does not want this.")
    return Answer.of(await runs.resume(decision.run_id, {decision.call_id: answer}, by="customer"))


@router.get("/support/reservation")
async def reservation(conversation: str, container: Inject[Container]) -> Reservation:
    """Return the reservation that the customer of this conversation is making; 409 while a call waits for them."""
    async with container.conversation_scope(CustomerSupportAgent, conversation):
        return await container.aget(Reservation)


@router.get("/bookings")
async def bookings(session: Inject[AsyncSession]) -> list[BookedCar]:
    """Return all bookings in the database that have not ended."""
    rows = select(BookingRow).where(BookingRow.date_to >= date.today()).order_by(BookingRow.id)
    return [
        BookedCar(
            id=row.id,
            car_group=row.car_group,
            date_from=row.date_from,
            date_to=row.date_to,
            status=row.status,
            customer=f"{row.customer.first_name} {row.customer.last_name}",
        )
        for row in await session.scalars(rows)
    ]


@router.post("/experts")
async def experts(request: Request, agent: Inject[RouterAgent]) -> Answer:
    """Return the answer of the expert that the router chooses."""
    return Answer.of(await agent.ask_expert(request.question))
