"""`runs.tell` with databases: from another process, and beside a tool whose transaction has its record."""

import asyncio
from typing import Any, Protocol

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from toolbox import Container, Inject, Result, ToolboxSettings, UserMessage, register_ai_service, sql, tool
from toolbox.runs import RunId, RunStateError, durable
from toolbox.settings import SqlSettings
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio

gates: dict[str, asyncio.Event] = {}


class Desk:
    @tool
    @sql.transactional
    async def book(self, flight: str, session: Inject[AsyncSession]) -> str:
        """Book a flight."""
        await session.execute(text("INSERT INTO booked VALUES (:flight)"), {"flight": flight})
        gates["begun"].set()
        await gates["may end"].wait()
        return "booked"


@register_ai_service(tools=Desk)
class Travel(Protocol):
    @durable
    async def plan(self, run: RunId, wish: str) -> Result[str]: ...


def program(url: str, model: Any) -> Container:
    settings = ToolboxSettings(sql=SqlSettings(url=url))
    container = Container(models={"default": model}, settings=settings)
    return container.register(Travel, Desk, sql.engine, sql.session, sql.SqlRunStore)


async def test_a_message_of_another_process_is_read_after_a_transaction(database_url: str) -> None:
    gates.update({"begun": asyncio.Event(), "may end": asyncio.Event()})
    model = ScriptedChatModel([tool_call("book", {"flight": "AF 1"}), "Booked.", "By the window."])
    async with program(database_url, model) as one, program(database_url, ScriptedChatModel([])) as other:
        async with (await one.aget(AsyncEngine)).begin() as connection:
            await connection.execute(text("CREATE TABLE booked (flight TEXT)"))
        calling = asyncio.create_task(one.get(Travel).plan("r", "Fly me to Rome"))
        await asyncio.wait_for(gates["begun"].wait(), 60)
        telling = asyncio.create_task(other.runs.tell("r", "By the window, please.", by="ann"))
        if not database_url.startswith("sqlite"):  # which has one writer at a time: the transaction of the tool is one
            await asyncio.wait_for(telling, 60)
        gates["may end"].set()
        await telling
        result = await asyncio.wait_for(calling, 60)
        with pytest.raises(RunStateError):
            await other.runs.tell("r", "Too late.")

    users = [each.text for each in result.messages if isinstance(each, UserMessage)]
    assert users == ["Fly me to Rome", "By the window, please."]
    read = [each.text for request in model.requests for each in request.messages if isinstance(each, UserMessage)]
    assert read.count("By the window, please.") == 1


async def test_messages_beside_the_end_of_a_run_are_read_or_refused(database_url: str) -> None:
    """Two programs write while a third one's answers arrive: what is accepted is read, once and in order."""

    class Talking(ScriptedChatModel):
        async def chat(self, request: Any) -> Any:
            await asyncio.sleep(0)
            return await super().chat(request)

    model, accepted = Talking(["An answer."] * 200), list[list[str]]()
    async with program(database_url, model) as one, program(database_url, model) as two:

        async def write(here: Container, name: str) -> None:
            own: list[str] = []
            accepted.append(own)
            for number in range(8):
                try:
                    await here.runs.tell("r", f"{name}{number}")
                except RunStateError:
                    return
                own.append(f"{name}{number}")

        run = await one.runs.start(Travel.plan, "r", "Fly me to Rome")
        await asyncio.gather(write(one, "a"), write(two, "b"))
        result = await one.runs.result(run, timeout=60)

    users = [each.text for each in result.messages if isinstance(each, UserMessage)][1:]
    assert sorted(users) == sorted(each for own in accepted for each in own)
    for own in accepted:
        assert [each for each in users if each in own] == own
