"""Trips of an AI service whose bookings are undone when a call fails, as programs for the process of `transfers`."""

import asyncio
from contextlib import suppress
from typing import Any, Protocol

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from toolbox import (
    AiMessage,
    ChatRequest,
    ChatResponse,
    Container,
    Inject,
    ToolExecution,
    ToolExecutionResultMessage,
    UserMessage,
    compensate_for,
    register_ai_service,
    sql,
    tool,
    user_message,
)
from toolbox.errors import RunCancelledError, RunFailedError
from toolbox.runs import RunId, RunStore
from toolbox.testing import tool_call

from . import transfers
from .transfers import SteppingStore, steps

TABLES = (
    "CREATE TABLE bookings (run VARCHAR, what VARCHAR)",
    "CREATE TABLE undone (run VARCHAR, what VARCHAR)",
    "CREATE TABLE trips_asked (run VARCHAR, results INTEGER)",
)
PARTS = ("flight", "hotel", "car")


class Travel:
    @tool
    @sql.transactional
    async def flight(self, run: str, session: Inject[AsyncSession]) -> str:
        return await _book(session, run, "flight")

    @tool
    @sql.transactional
    async def hotel(self, run: str, session: Inject[AsyncSession]) -> str:
        return await _book(session, run, "hotel")

    @tool
    @sql.transactional
    async def car(self, run: str, session: Inject[AsyncSession]) -> str:
        return await _book(session, run, "car")

    @compensate_for(flight)
    @sql.transactional
    async def undo_flight(self, run: str, session: Inject[AsyncSession]) -> None:
        await _undo(session, run, "flight")

    @compensate_for(hotel)
    @sql.transactional
    async def undo_hotel(self, execution: ToolExecution, session: Inject[AsyncSession]) -> None:
        assert execution.result == "booked hotel"
        await _undo(session, execution.request.arguments.split('"')[3], "hotel")

    @compensate_for(car)
    @sql.transactional
    async def undo_car(self, run: str, session: Inject[AsyncSession]) -> None:
        await _undo(session, run, "car")


async def _book(session: AsyncSession, run: str, what: str) -> str:
    await session.execute(text("INSERT INTO bookings VALUES (:run, :what)"), {"run": run, "what": what})
    return f"booked {what}"


async def _undo(session: AsyncSession, run: str, what: str) -> None:
    steps.take(f"undo {what}")
    await session.execute(text("INSERT INTO undone VALUES (:run, :what)"), {"run": run, "what": what})
    deleted = text("DELETE FROM bookings WHERE run = :run AND what = :what")
    await session.execute(deleted, {"run": run, "what": what})
    steps.take(f"undid {what}")


@register_ai_service(tools=[Travel], durable=True, compensate_on_failure=True)
class Trips(Protocol):
    @user_message("{run}")
    async def book(self, run: RunId) -> str: ...


class Agent:
    """A model that books flight and hotel, then the car, then fails once, and would then answer.

    It waits for ever in trips whose id begins with "waiting".
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def chat(self, request: ChatRequest) -> ChatResponse:
        run = next(each.text for each in request.messages if isinstance(each, UserMessage))
        done = len([each for each in request.messages if isinstance(each, ToolExecutionResultMessage)])
        if done < 3:
            names = PARTS[:2] if done == 0 else PARTS[2:]
            return ChatResponse(AiMessage(None, [tool_call(each, {"run": run}) for each in names]))
        if run.startswith("waiting"):
            steps.take("waits")
            await asyncio.Event().wait()
        values = {"run": run, "results": done}
        async with self._engine.connect() as connection:
            await connection.execution_options(toolbox_for_writing=True)
            known = text("SELECT COUNT(*) FROM trips_asked WHERE run = :run AND results = :results")
            asked = await connection.scalar(known, values)
            await connection.execute(text("INSERT INTO trips_asked VALUES (:run, :results)"), values)
            await connection.commit()
        if not asked:
            steps.take("fails")
            raise ConnectionError("the model is away")
        return ChatResponse(AiMessage("booked"))


def new_agency(database: AsyncEngine, lease: float, take_over: bool) -> Container:
    """Return a container of the service."""
    container = Container(models={"default": Agent(database)}, take_over_runs=take_over)
    container.register_instance(database, AsyncEngine)
    container.register_instance(SteppingStore(database, lease), RunStore)
    return container.register(sql.session, Trips)


def agency(url: str, lease: float, *, take_over: bool) -> Any:
    """A started container of the service, with its database engine."""
    return transfers.started(new_agency, url, lease, take_over)


# --- the programs


async def trip(url: str, lease: float, run_id: str, kill_at: int | None) -> None:
    """Book a trip in a process that is killed at a step."""
    async with agency(url, lease, take_over=False) as (container, _):
        steps.kill_at = kill_at
        run = await container.runs.start(Trips.book, run_id)
        with suppress(RunFailedError):
            await container.runs.result(run, timeout=60)


async def count_trip(url: str, lease: float) -> None:
    """Write the numbers of the steps of two trips to the table of questions: the failure and the last step, each."""
    async with agency(url, lease, take_over=False) as (container, database):
        found = []
        run = await container.runs.start(Trips.book, "counted")
        with suppress(RunFailedError):
            await container.runs.result(run, timeout=60)
        found += [steps.taken.index("fails"), len(steps.taken)]
        steps.taken.clear()
        run = await container.runs.start(Trips.book, "waiting")
        while "waits" not in steps.taken:  # noqa: ASYNC110 - it is not announced
            await asyncio.sleep(0.01)
        await container.runs.cancel(run.id)
        found += [steps.taken.index("waits"), len(steps.taken)]
        async with database.begin() as connection:
            for each in found:
                await connection.execute(text("INSERT INTO trips_asked VALUES ('steps', :step)"), {"step": each})


async def cancel_trip(url: str, lease: float, run_id: str, kill_at: int | None) -> None:
    """Book a trip that waits, and cancel it in the same process, which is killed at a step after that."""
    async with agency(url, lease, take_over=False) as (container, _):
        run = await container.runs.start(Trips.book, run_id)
        while "waits" not in steps.taken:  # noqa: ASYNC110 - it is not announced
            await asyncio.sleep(0.01)
        steps.kill_at = None if kill_at is None else len(steps.taken) + kill_at
        await container.runs.cancel(run.id, "too expensive")


async def finish_trips(url: str, lease: float) -> None:
    """Continue all trips until none is running; a trip that still waits is cancelled here."""
    async with agency(url, lease, take_over=True) as (container, _):
        await transfers.skip_leases(container, lease)
        while running := await container.runs.list(status="running"):
            for each in running:
                if each.id.startswith("waiting"):
                    await container.runs.cancel(each.id, "too expensive")
                else:
                    with suppress(RunFailedError, RunCancelledError):
                        await container.runs.result(each.id, timeout=60)


async def warm_up() -> None:
    """Use what trips need, so that the children begin at once."""
    async with agency("sqlite://", 5.0, take_over=False) as (container, database):
        async with database.begin() as connection:
            for each in TABLES:
                await connection.execute(text(each))
        run = await container.runs.start(Trips.book, "first")
        with suppress(RunFailedError):
            await container.runs.result(run, timeout=60)


transfers.PROGRAMS.update({each.__name__: each for each in (trip, count_trip, cancel_trip, finish_trips)})
transfers.CONTAINERS.update({each.__name__: (new_agency, False) for each in (trip, count_trip, cancel_trip)})
transfers.CONTAINERS[finish_trips.__name__] = (new_agency, True)
transfers.WARM_UPS.append(warm_up)
