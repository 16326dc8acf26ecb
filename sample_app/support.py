"""Two agents beside the weather: the support desk at `/support`, on a database, and the experts at `/experts`.

Not here: the agents themselves (`bookings`, `experts`), which model answers (`application`).
"""

from __future__ import annotations

import os
from datetime import date
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, Field
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from toolbox import Container, sql
from toolbox_fastapi import Inject

from .answers import Answer
from .bookings import Booking, BookingRepository, BookingRow, CustomerSupportAgent, booking_data
from .experts import LegalExpert, MedicalExpert, RouterAgent, TechnicalExpert

router = APIRouter()


def with_support(container: Container) -> Container:
    """Adds the two agents; their database is `TOOLBOX_SQL__URL`, or one that lasts as long as the program."""
    os.environ.setdefault("TOOLBOX_SQL__URL", "sqlite://")
    container.register(sql.engine, sql.session, sql.SqlChatMemoryStore)
    container.register(booking_data, BookingRepository, CustomerSupportAgent)
    return container.register(RouterAgent, MedicalExpert, LegalExpert, TechnicalExpert)


class Said(BaseModel):
    """What a customer says in a conversation, which whoever begins it names."""

    conversation: str = Field(min_length=1, max_length=100)
    message: str = Field(min_length=1, max_length=2000)


class Request(BaseModel):
    """What someone wants to know of an expert."""

    question: str = Field(min_length=1, max_length=2000)


class BookedCar(Booking):
    """A booking as the people at the desk see it."""

    customer: str


@router.get("/support", response_class=HTMLResponse, include_in_schema=False)
async def page() -> str:
    """The support desk for a browser."""
    return Path(__file__).with_name("support.html").read_text(encoding="utf-8")


@router.post("/support")
async def support(said: Said, agent: Inject[CustomerSupportAgent]) -> Answer:
    """The agent's answer, in the conversation so far."""
    return Answer.of(await agent.chat(said.conversation, said.message))


@router.get("/bookings")
async def bookings(session: Inject[AsyncSession]) -> list[BookedCar]:
    """All bookings that are not over, as they are in the database."""
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
    """The answer of the expert whom the router has chosen."""
    return Answer.of(await agent.ask_expert(request.question))
