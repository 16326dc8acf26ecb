"""Suspended runs of nested services, as programs that tests kill before a write of the database while they resume.

`transfers` forks these programs, and says what a step is: a process is killed between any two effects that the
database keeps.
"""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from toolbox import (
    AiMessage,
    ChatRequest,
    ChatResponse,
    Container,
    Inject,
    Result,
    ToolExecutionResultMessage,
    UserMessage,
    application_scoped,
    register_ai_service,
    sql,
    tool,
    user_message,
)
from toolbox.runs import LeaseLostError, RunStore, approve
from toolbox.sql import SqlRunStore
from toolbox.testing import tool_call

from . import transfers
from .transfers import kill_in

TABLES = (
    "CREATE TABLE effects (name VARCHAR, tool VARCHAR)",
    "CREATE TABLE suspended (name VARCHAR PRIMARY KEY, run VARCHAR)",
    "CREATE TABLE steps (taken INTEGER)",
)

INSERTED = text("INSERT INTO effects VALUES (:name, :tool)")


# --- the services


@application_scoped
class Notes:
    """Tools whose effects are outside of the transaction that records them."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def _write(self, name: str, tool: str) -> str:
        async with self._engine.connect() as connection:
            await connection.execution_options(toolbox_for_writing=True)
            await connection.execute(INSERTED, {"name": name, "tool": tool})
            await connection.commit()
        return tool

    @tool
    async def note(self, name: str) -> str:
        return await self._write(name, "note")

    @tool(on_unknown_outcome="retry")
    async def again(self, name: str) -> str:
        return await self._write(name, "again")

    @tool(requires_approval=True)
    async def risky(self, name: str) -> str:
        return await self._write(name, "risky")


class Books:
    @tool(requires_approval=True)
    @sql.transactional
    async def book(self, name: str, session: Inject[AsyncSession]) -> str:
        await session.execute(INSERTED, {"name": name, "tool": "book"})
        return "booked"


@register_ai_service(tools=[Notes, Books])
class Clerk(Protocol):
    @tool
    @user_message("{name} clerk")
    async def delegate(self, name: str) -> str: ...


@register_ai_service(tools=[Notes, Clerk])
class Office(Protocol):
    @user_message("{name} office")
    async def ask(self, name: str) -> Result[str]: ...


class Model:
    """Asks for the tools in a fixed order: those of the clerk wait for a person."""

    async def chat(self, request: ChatRequest) -> ChatResponse:
        question = next(each for each in reversed(request.messages) if isinstance(each, UserMessage))
        name, _, who = question.text.partition(" ")
        done = sum(isinstance(each, ToolExecutionResultMessage) for each in request.messages)
        asked: dict[tuple[str, int], Sequence[str]] = {
            ("office", 0): ["delegate"],
            ("office", 1): ["note", "again"],
            ("clerk", 0): ["book", "risky"],
        }
        calls = [tool_call(each, {"name": name}) for each in asked.get((who, done), ())]
        return ChatResponse(AiMessage(None if calls else f"{who} done", calls))


def new_office(database: AsyncEngine, lease: float, take_over: bool) -> Container:
    """Return a container of the services."""
    container = Container(models={"default": Model()}, take_over_runs=take_over)
    container.register_instance(database, AsyncEngine)
    container.register_instance(SqlRunStore(database, lease), RunStore)
    return container.register(sql.session, Office, Clerk)


def office(url: str, lease: float) -> AbstractAsyncContextManager[tuple[Container, AsyncEngine]]:
    """A started container of the services, with its database engine."""
    return transfers.started(new_office, url, lease, False)


# --- the programs


async def suspend(url: str, lease: float, names: Sequence[str]) -> None:
    """Suspends a run for each name."""
    async with office(url, lease) as (container, database):
        for name in names:
            result = await container.get(Office).ask(name)
            assert [each.tool_name for each in result.pending] == ["book", "risky"]
            async with database.begin() as connection:
                await connection.execute(
                    text("INSERT INTO suspended VALUES (:name, :run)"), {"name": name, "run": result.run_id}
                )


async def resume(url: str, lease: float, name: str, kill_at: int | None) -> None:
    """Answers a run, in a process that is killed at a step."""
    async with office(url, lease) as (container, database):
        run_id = await _run_of(database, name)
        run = await container.runs.get(run_id)

        async def answer() -> None:
            result = await container.runs.resume(run_id, {each.id: approve() for each in run.pending}, by="boss")
            assert result.content == "office done"

        await kill_in(database, answer(), kill_at)


async def finish(url: str, lease: float, names: Sequence[str]) -> None:
    """Continues the runs as people and programs would who see them after a crash."""
    async with office(url, lease) as (container, database):
        await transfers.skip_leases(container, lease)
        for name in names:
            run_id = await _run_of(database, name)
            while (run := await container.runs.get(run_id)).status != "completed":
                assert run.status in ("suspended", "running"), run
                try:
                    await container.runs.resume(run_id, {each.id: approve() for each in run.pending}, by="boss")
                except LeaseLostError:  # the machine is slow
                    continue


async def _run_of(database: AsyncEngine, name: str) -> str:
    statement = text("SELECT run FROM suspended WHERE name = :name")
    async with database.connect() as connection:
        return str((await connection.execute(statement, {"name": name})).scalar_one())


async def warm_up() -> None:
    """Use what suspended runs need, so that the children begin at once."""
    async with office("sqlite://", 5.0) as (container, database):
        async with database.begin() as connection:
            for each in TABLES:
                await connection.execute(text(each))
        result = await container.get(Office).ask("first")
        await container.runs.resume(result.run_id, {each.id: approve() for each in result.pending}, by="boss")


_ALL = (suspend, resume, finish)
transfers.PROGRAMS.update({each.__name__: each for each in _ALL})
transfers.CONTAINERS.update({each.__name__: (new_office, False) for each in _ALL})
transfers.WARM_UPS.append(warm_up)
