"""Durable calls that are handed over, as programs that tests kill before a write of the database.

`transfers` forks these programs, and says what a step is.
"""

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from toolbox import (
    ChatMemoryStore,
    ChatRequest,
    ChatResponse,
    Container,
    MemoryId,
    Result,
    ToolExecutionResultMessage,
    register_ai_service,
    tool,
)
from toolbox.chat import AiMessage
from toolbox.handover import hands_over_to
from toolbox.runs import RunId, RunNotFoundError, RunStateError, RunStore, approve
from toolbox.sql import SqlChatMemoryStore, SqlRunStore
from toolbox.testing import tool_call

from . import transfers
from .transfers import kill_in

PAUSE = 0.1
"""Seconds in which a model writes, while another process adds messages."""

TABLES = ("CREATE TABLE steps (taken INTEGER)", "CREATE TABLE accepted (run TEXT, message TEXT)")


@tool
async def find(order: int) -> str:
    """Find an order."""
    return f"order {order}"


@tool(requires_approval=True)
async def refund(order: int) -> str:
    """Refund an order."""
    return f"refunded {order}"


@register_ai_service(tools=[find, refund])
class Billing(Protocol):
    """Invoices."""

    async def chat(self, run: RunId, room: MemoryId[str], text: str) -> Result[str]: ...


@register_ai_service(tools=find, durable=True, on_suspended="continue")
class Desk(Protocol):
    @hands_over_to(Billing.chat)
    async def chat(self, run: RunId, room: MemoryId[str], text: str) -> Result[str]: ...


class Model:
    """Lets Desk hand over beside a tool; Billing finds an order, refunds it if the user says so, and answers.

    A process sets `pause` if another one adds messages while the model writes a reply.
    """

    pause = 0.0

    async def chat(self, request: ChatRequest) -> ChatResponse:
        await asyncio.sleep(self.pause)
        results = [each.tool_name for each in request.messages if isinstance(each, ToolExecutionResultMessage)]
        said = [tool_call("find", {"order": 7}), tool_call("transfer_to_billing", {})]
        if "transfer_to_billing" in results:
            wanted = ["find", "find", "refund"] if "refund" in (request.messages[0].text or "") else ["find", "find"]
            missing = [each for each in wanted if results.count(each) < wanted.count(each)]
            if not missing:
                return ChatResponse(AiMessage(f"done after {len(results)} results"))
            said = [tool_call(missing[0], {"order": 7}, id=f"c{len(results)}")]
        return ChatResponse(AiMessage(None, said))


def new_desk(database: AsyncEngine, lease: float, take_over: bool) -> Container:
    """Return a container of the services, with both stores on one engine."""
    container = Container(models={"default": Model()}, take_over_runs=take_over).register(Desk, Billing)
    container.register_instance(SqlChatMemoryStore(database, lease=lease), ChatMemoryStore)
    return container.register_instance(SqlRunStore(database, lease), RunStore)


def desk(url: str, lease: float) -> AbstractAsyncContextManager[tuple[Container, AsyncEngine]]:
    """A started container of the services, with its database engine."""
    return transfers.started(new_desk, url, lease, False)


# --- the programs


async def hand_over(url: str, lease: float, run_id: str, said: str, kill_at: int | None, is_told: bool = False) -> None:
    """Makes a call in a room of its own that is handed over, in a process that is killed at a step."""
    Model.pause = PAUSE if is_told else 0.0
    async with desk(url, lease) as (container, database):

        async def call() -> None:
            run = await container.runs.start(Desk.chat, run_id, run_id, said)
            await container.runs.execute(run.id, timeout=60)

        await kill_in(database, call(), kill_at)


async def tell_much(url: str, lease: float, run_id: str) -> None:
    """Adds messages to a run while another process executes it, until it has its answer or nobody executes it."""
    async with desk(url, lease) as (container, database):
        for number in range(12):
            try:
                await container.runs.tell(run_id, f"m{number}")
            except RunStateError:
                return
            except RunNotFoundError:  # not yet begun, or its process was killed before
                await asyncio.sleep(PAUSE)
                continue
            async with database.begin() as connection:
                values = {"run": run_id, "message": f"m{number}"}
                await connection.execute(text("INSERT INTO accepted VALUES (:run, :message)"), values)


async def tell_once(url: str, lease: float, run_id: str, kill_at: int | None) -> None:
    """Adds one message to a run that waits, in a process that is killed at a step."""
    async with desk(url, lease) as (container, database):
        await kill_in(database, container.runs.tell(run_id, "m0"), kill_at)


async def finish_all(url: str, lease: float) -> None:
    """Lets all runs end, and adds a message to each one that waits."""
    async with desk(url, lease) as (container, _):
        await transfers.skip_leases(container, lease)
        for run in await container.runs.list(limit=1000):
            now = await container.runs.execute(run.id, timeout=60) if run.status == "running" else run
            if now.status == "suspended":
                await container.runs.tell(run.id, "last")
                await container.runs.resume(run.id, {each.id: approve() for each in now.pending})


async def warm_up() -> None:
    """Use what the programs need, so that the children begin at once."""
    async with desk("sqlite://", 5.0) as (container, _):
        result = await container.get(Desk).chat("r", "r", "refund")
        await container.runs.tell("r", "m")
        await container.runs.resume("r", {each.id: approve() for each in result.pending})


_ALL = (hand_over, tell_much, tell_once, finish_all)
transfers.PROGRAMS.update({each.__name__: each for each in _ALL})
transfers.CONTAINERS.update({each.__name__: (new_desk, False) for each in _ALL})
transfers.WARM_UPS.append(warm_up)
