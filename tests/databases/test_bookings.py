"""The sample's bookings through its agent: the rules, and many customers at the same time."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import date, timedelta
from typing import Any

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from sample_app.bookings import (
    BookingRepository,
    BookingRow,
    CarGroupRow,
    CustomerRow,
    CustomerSupportAgent,
    Status,
    booking_data,
)
from toolbox import ChatRequest, ChatResponse, Container, ToolboxSettings, UserMessage, sql
from toolbox.chat import AiMessage, ToolExecutionRequest
from toolbox.runs import approve
from toolbox.security import SecurityIdentity
from toolbox.settings import SqlSettings
from toolbox.testing import tool_call

pytestmark = pytest.mark.anyio

SPEEDY = {"first_name": "Speedy", "last_name": "McWheels"}
TODAY = date.today()


class Obedient:
    """Calls the tools that the user's message names, a line of `name {arguments}` each, and ends."""

    async def chat(self, request: ChatRequest) -> ChatResponse:
        last = request.messages[-1]
        if isinstance(last, UserMessage):
            calls = [line.partition(" ")[::2] for line in last.text.splitlines()]
            return ChatResponse(AiMessage(None, [tool_call(name, arguments) for name, arguments in calls]))
        return ChatResponse(AiMessage("done"))


@asynccontextmanager
async def desk(url: str, **more: Any) -> AsyncIterator[Container]:
    settings = ToolboxSettings(sql=SqlSettings(url=url, **more))
    container = Container(models={"default": Obedient()}, settings=settings, seeds=(SecurityIdentity,))
    container.register(sql.engine, sql.session, sql.SqlChatMemoryStore)
    async with container.register(booking_data, BookingRepository, CustomerSupportAgent):
        yield container


async def tell(container: Container, conversation: str, *calls: ToolExecutionRequest) -> list[str]:
    """Return the results of the tools. The customer confirms every cancellation."""
    message = "\n".join(f"{each.name} {each.arguments}" for each in calls)
    result = await container.get(CustomerSupportAgent).chat(conversation, message)
    if result.pending:
        assert result.run_id is not None
        result = await container.runs.resume(result.run_id, {each.id: approve() for each in result.pending})
    return [each.result for each in result.tool_executions]


async def statuses(container: Container) -> dict[int, Status]:
    async with AsyncSession(container.get(AsyncEngine)) as session:
        return dict((await session.execute(select(BookingRow.id, BookingRow.status))).all())


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (1, "begins in less than 7 days"),
        (3, "is for less than 3 days"),
        (4, "Speedy McWheels has no booking 4"),
        (99, "Speedy McWheels has no booking 99"),
    ],
)
async def test_a_cancellation_against_the_rules_is_rejected(database_url: str, number: int, why: str) -> None:
    async with desk(database_url) as container:
        before = await statuses(container)
        [texts] = await tell(container, "a", tool_call("cancel_booking", {"booking_id": number, **SPEEDY}))

        assert why in texts
        assert await statuses(container) == before


async def test_a_booking_is_cancelled_once(database_url: str) -> None:
    cancel = tool_call("cancel_booking", {"booking_id": 2, **SPEEDY})
    async with desk(database_url) as container:
        first, second = await tell(container, "a", cancel, cancel)

        assert '"status":"cancelled"' in first
        assert second == "booking 2 is cancelled already"
        assert (await statuses(container))[2] is Status.CANCELLED


async def test_a_customer_must_be_known(database_url: str) -> None:
    async with desk(database_url) as container:
        texts = await tell(container, "a", tool_call("list_bookings", {"first_name": "No", "last_name": "Body"}))

    assert texts == ["there is no customer No Body"]


async def test_existing_tables_are_not_created_again(database_url: str) -> None:
    for _ in range(2):
        async with desk(database_url) as container:
            assert len(await statuses(container)) == 8


# --- many at the same time

BEGINS, CARS = TODAY + timedelta(days=150), 25
STAY = {"car_group": "compact", "date_from": str(BEGINS), "date_to": str(BEGINS + timedelta(days=6))}


async def add_cars_and_bookings(engine: AsyncEngine) -> list[int]:
    """`CARS` compact cars, and 40 bookings of vans that may be cancelled."""
    async with AsyncSession(engine) as session, session.begin():
        compact = await session.get_one(CarGroupRow, "compact")
        compact.cars = CARS
        customer = (await session.scalars(select(CustomerRow).filter_by(first_name="Speedy"))).one()
        days = {"date_from": BEGINS, "date_to": BEGINS + timedelta(days=6)}
        rows = [BookingRow(customer=customer, car_group="van", **days) for _ in range(40)]
        session.add_all(rows)
        await session.flush()
        return [row.id for row in rows]


@pytest.mark.timeout(400)
async def test_200_concurrent_customers_lose_no_update_and_leave_no_connection_open(postgres_url: str) -> None:
    """100 want one of 25 cars; 100 cancel one of 40 bookings, most of them one that others cancel as well."""
    async with desk(postgres_url, pool_timeout=300) as container:  # the last ones wait for all others
        engine = container.get(AsyncEngine)
        numbers = await add_cars_and_bookings(engine)
        books = [tool_call("book_car", {**SPEEDY, **STAY}) for _ in range(100)]
        cancels = [tool_call("cancel_booking", {"booking_id": numbers[n % 40], **SPEEDY}) for n in range(100)]
        calls = [call for pair in zip(books, cancels, strict=True) for call in pair]

        texts = await asyncio.gather(*(tell(container, f"customer {n}", call) for n, call in enumerate(calls)))

        kinds = Counter(kind(text) for [text] in texts)
        assert kinds == {"booked": CARS, "no car": 100 - CARS, "cancelled": 40, "cancelled already": 60}
        async with AsyncSession(engine) as session:
            booked = await session.scalar(
                select(func.count()).where(BookingRow.car_group == "compact", BookingRow.date_from == BEGINS)
            )
            cancelled = select(func.count()).where(BookingRow.id.in_(numbers), BookingRow.status == Status.CANCELLED)
            assert (booked, await session.scalar(cancelled)) == (CARS, 40)
            await session.commit()
            here = "FROM pg_stat_activity WHERE datname = current_database()"
            idle = f"SELECT count(*) {here} AND state LIKE 'idle in transaction%'"
            kinds_of_lock = "locktype IN ('tuple', 'transactionid')"
            held = f"SELECT count(*) FROM pg_locks WHERE pid IN (SELECT pid {here}) AND {kinds_of_lock} AND NOT granted"
            assert (await session.scalar(text(idle)), await session.scalar(text(held))) == (0, 0)
        assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]  # of a queue pool


async def test_several_tools_of_one_reply_take_their_turns(database_url: str) -> None:
    books = [tool_call("book_car", {**SPEEDY, **STAY, "car_group": "van"}) for _ in range(4)]
    async with desk(database_url, pool_size=2, max_overflow=0) as container:
        texts = await tell(container, "a", *books)

    assert [kind(each) for each in texts] == ["booked", "booked", "no car", "no car"]


def kind(text: str) -> str:
    for words, meaning in (
        ('"status":"booked"', "booked"),
        ('"status":"cancelled"', "cancelled"),
        ("is cancelled already", "cancelled already"),
        ("is free from", "no car"),
    ):
        if words in text:
            return meaning
    return text
