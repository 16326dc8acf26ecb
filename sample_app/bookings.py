"""The customer support agent of "Miles of Smiles", known from Quarkus and LangChain4j: its tools change a database.

Not here: its endpoint (`support`), the choice of the model (`application`).
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from datetime import date, timedelta
from enum import StrEnum
from typing import Annotated, Protocol

from pydantic import BaseModel, ConfigDict
from sqlalchemy import ForeignKey, func, select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

from toolbox import (
    Instance,
    InvocationContext,
    MemoryId,
    Result,
    ToolRetry,
    produces,
    register_ai_service,
    system_message,
    tool,
)
from toolbox.conversations import conversation_scoped
from toolbox.guardrails import GuardrailResult, InputGuardrail, InputGuardrailRequest, input_guardrails
from toolbox.security import roles_allowed
from toolbox.sql import transactional

CANCELLATION_DEADLINE = timedelta(days=7)  # before the booking begins
MIN_CANCELLABLE_STAY = timedelta(days=3)
CARD_NUMBER = re.compile(r"(?<!\d)\d{4}(?:[ -]?\d{4}){3}(?!\d)")

FirstName = Annotated[str, "the customer's first name"]
LastName = Annotated[str, "the customer's last name"]


# --- tables


class Table(DeclarativeBase):
    """Base class of the tables."""


class Status(StrEnum):
    """The status of a booking."""

    BOOKED = "booked"
    CANCELLED = "cancelled"


class CustomerRow(Table):
    """A customer."""

    __tablename__ = "customers"

    id: Mapped[int] = mapped_column(primary_key=True)
    first_name: Mapped[str]
    last_name: Mapped[str]


class CarGroupRow(Table):
    """A group of cars, and the number of cars in it."""

    __tablename__ = "car_groups"

    name: Mapped[str] = mapped_column(primary_key=True)
    cars: Mapped[int]


class BookingRow(Table):
    """A booking of one car, from the first to the last day."""

    __tablename__ = "bookings"

    id: Mapped[int] = mapped_column(primary_key=True)
    customer_id: Mapped[int] = mapped_column(ForeignKey(CustomerRow.id), index=True)
    car_group: Mapped[str] = mapped_column(ForeignKey(CarGroupRow.name), index=True)
    date_from: Mapped[date]
    date_to: Mapped[date]
    status: Mapped[Status] = mapped_column(default=Status.BOOKED)
    customer: Mapped[CustomerRow] = relationship(lazy="joined", innerjoin=True)


# --- data for the model


class Booking(BaseModel):
    """A booking as customers see it."""

    model_config = ConfigDict(from_attributes=True)

    id: int
    car_group: str
    date_from: date
    date_to: date
    status: Status


class BookingError(ToolRetry):
    """An error whose message the model reads, to explain it to the customer."""


class CustomerNotFoundError(BookingError):
    """The customer does not exist."""


class BookingNotFoundError(BookingError):
    """The booking does not exist, or belongs to another customer; the message does not say which."""


class BookingCannotBeCancelledError(BookingError):
    """The rules do not allow this cancellation."""


class NoCarFreeError(BookingError):
    """All cars of the group are booked on one of the days."""


# --- the reservation that a customer is making


@conversation_scoped
class Reservation(BaseModel):
    """What the customer of a conversation wants to reserve, and has said so far. It is stored with the conversation.

    The model does not have to remember it, and the page shows it.
    """

    car_group: str | None = None
    date_from: date | None = None
    date_to: date | None = None

    @tool("Notes what the customer wants to reserve; nothing is booked yet")
    def plan_reservation(
        self, car_group: str | None = None, date_from: date | None = None, date_to: date | None = None
    ) -> dict[str, object]:
        """Keep what is known now, and return all of it."""
        self.car_group = car_group or self.car_group
        self.date_from, self.date_to = date_from or self.date_from, date_to or self.date_to
        return self.model_dump(mode="json")

    def clear(self) -> None:
        """Begin again."""
        self.car_group = self.date_from = self.date_to = None


# --- tools


class BookingRepository:
    """Tools for bookings. Each call has its own session and transaction, committed if the call succeeds."""

    def __init__(self, session: AsyncSession, reservation: Instance[Reservation]) -> None:
        self._session, self._reservation = session, reservation

    @tool("Lists the bookings of a customer")
    @transactional
    async def list_bookings(self, first_name: FirstName, last_name: LastName) -> list[Booking]:
        """Return all bookings of the customer, the earliest first."""
        customer = await self._customer(first_name, last_name)
        rows = select(BookingRow).where(BookingRow.customer_id == customer.id).order_by(BookingRow.date_from)
        return [Booking.model_validate(row) for row in await self._session.scalars(rows)]

    @tool("Lists the names of all customers")
    @roles_allowed("staff")
    @transactional
    async def list_customers(self) -> list[str]:
        """Return the names of all customers; only for staff."""
        rows = select(CustomerRow).order_by(CustomerRow.id)
        return [f"{row.first_name} {row.last_name}" for row in await self._session.scalars(rows)]

    @tool("Looks a booking up by its number")
    @transactional
    async def find_booking(self, booking_id: int, first_name: FirstName, last_name: LastName) -> Booking:
        """Return the booking if it belongs to this customer."""
        return Booking.model_validate(await self._booking(booking_id, first_name, last_name))

    @tool("Cancels a booking", requires_approval=True)
    @transactional
    async def cancel_booking(self, booking_id: int, first_name: FirstName, last_name: LastName) -> Booking:
        """Cancel the booking and return it."""
        row = await self._booking(booking_id, first_name, last_name, to_change=True)
        if row.status is Status.CANCELLED:
            raise BookingCannotBeCancelledError(f"booking {booking_id} is cancelled already")
        if row.date_from - date.today() < CANCELLATION_DEADLINE:
            days = CANCELLATION_DEADLINE.days
            raise BookingCannotBeCancelledError(f"booking {booking_id} begins in less than {days} days")
        if row.date_to - row.date_from < MIN_CANCELLABLE_STAY:
            days = MIN_CANCELLABLE_STAY.days
            raise BookingCannotBeCancelledError(f"booking {booking_id} is for less than {days} days")
        row.status = Status.CANCELLED
        return Booking.model_validate(row)

    @tool("Books a car of a group for a customer, from the first to the last day")
    @transactional
    async def book_car(
        self, first_name: FirstName, last_name: LastName, car_group: str, date_from: date, date_to: date
    ) -> Booking:
        """Create a booking and return it."""
        if not date.today() <= date_from <= date_to:
            raise BookingError("a booking begins today or later, and does not end before it begins")
        customer = await self._customer(first_name, last_name)
        # The lock makes bookings of one group wait for each other, so that two of them cannot take the last car.
        group = await self._session.get(CarGroupRow, car_group, with_for_update=True)
        if group is None:
            names = ", ".join(await self._session.scalars(select(CarGroupRow.name).order_by(CarGroupRow.name)))
            raise BookingError(f"there is no car group {car_group!r}, only {names}")
        if await self._booked(group, date_from, date_to) >= group.cars:
            raise NoCarFreeError(f"no {group.name} is free from {date_from} to {date_to}")
        row = BookingRow(customer=customer, car_group=group.name, date_from=date_from, date_to=date_to)
        self._session.add(row)
        await self._session.flush()
        self._reservation.get().clear()
        return Booking.model_validate(row)

    # --- queries

    async def _customer(self, first_name: str, last_name: str) -> CustomerRow:
        named = select(CustomerRow).filter_by(first_name=first_name, last_name=last_name)
        customer = (await self._session.scalars(named)).first()
        if customer is None:
            raise CustomerNotFoundError(f"there is no customer {first_name} {last_name}")
        return customer

    async def _booking(
        self, booking_id: int, first_name: str, last_name: str, *, to_change: bool = False
    ) -> BookingRow:
        lock = {"of": BookingRow} if to_change else None
        row = await self._session.get(BookingRow, booking_id, with_for_update=lock)
        if row is None or (row.customer.first_name, row.customer.last_name) != (first_name, last_name):
            raise BookingNotFoundError(f"{first_name} {last_name} has no booking {booking_id}")
        return row

    async def _booked(self, group: CarGroupRow, date_from: date, date_to: date) -> int:
        """Count the bookings of the group that overlap these days."""
        overlapping = (
            select(func.count())
            .select_from(BookingRow)
            .where(BookingRow.car_group == group.name, BookingRow.status == Status.BOOKED)
            .where(BookingRow.date_from <= date_to, BookingRow.date_to >= date_from)
        )
        return await self._session.scalar(overlapping) or 0


# --- the agent


def instructions(context: InvocationContext) -> str:
    """Return the system message of the agent."""
    return f"""
        You are a customer support agent of the car rental company 'Miles of Smiles'.
        You are friendly, polite and concise.
        Before you say anything about a booking or change one, you must know the customer's first and last name.
        Note at once what a customer wants to reserve, and book only when the car group and both days are known.
        If a question has nothing to do with car rental, say politely that you cannot help with it.
        Today is {date.today():%A, %Y-%m-%d}.
        """


class NoCardNumbers(InputGuardrail):
    """Keeps the numbers of payment cards from the model, the database and the logs."""

    def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
        """Replace card numbers in the customer's message."""
        text = request.user_message.text
        masked = CARD_NUMBER.sub("[card number]", text)
        return self.success() if masked == text else self.success_with(masked)


@register_ai_service(tools=[BookingRepository, Reservation], on_suspended="cancel")
@input_guardrails(NoCardNumbers)
class CustomerSupportAgent(Protocol):
    """Answers questions of customers about their bookings, and remembers the conversation.

    A cancellation waits until the customer confirms it; another message instead withdraws it.
    """

    @system_message(instructions)
    async def chat(self, conversation: MemoryId[str], message: str) -> Result[str]:
        """Return the answer with the tool calls behind it."""
        ...


# --- example data


class BookingData:
    """A bean whose creation fills the database: a dependency on it means that the tables exist."""


@produces(scope="application")
async def booking_data(engine: AsyncEngine) -> AsyncIterator[BookingData]:
    """Create the tables, and example bookings if there are none."""
    async with engine.begin() as connection:
        await connection.run_sync(Table.metadata.create_all)
    async with AsyncSession(engine) as session:
        if await session.scalar(select(func.count()).select_from(CustomerRow)) == 0:
            session.add_all(example_rows(date.today()))
            await session.commit()
    yield BookingData()


def example_rows(today: date) -> list[Table]:
    """Return customers, cars, and bookings around `today`."""
    names = ("Speedy McWheels", "Zoom Thunderfoot", "Vroom Lightyear", "Turbo Gearshift", "Drifty Skidmark")
    customers = [CustomerRow(first_name=first, last_name=last) for first, last in map(str.split, names)]
    groups = [CarGroupRow(name=name, cars=cars) for name, cars in (("compact", 4), ("van", 2), ("convertible", 1))]
    # customer, group, first day from today on, days
    stays = [
        (0, "compact", 2, 4),
        (0, "compact", 30, 7),
        (0, "convertible", 60, 2),
        (1, "van", 14, 5),
        (1, "compact", 90, 10),
        (2, "van", -3, 5),
        (2, "compact", 21, 6),
        (3, "compact", 10, 14),
    ]
    bookings = [
        BookingRow(
            customer=customers[customer],
            car_group=group,
            date_from=today + timedelta(days=begins),
            date_to=today + timedelta(days=begins + days),
        )
        for customer, group, begins, days in stays
    ]
    return [*customers, *groups, *bookings]
