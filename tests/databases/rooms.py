"""Rooms whose calls wait for a person while others go on, as programs that tests kill before a write of the database.

`transfers` forks these programs, and says what a step is: a process is killed between any two effects that the
database keeps.
"""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from sqlalchemy.ext.asyncio import AsyncEngine

from toolbox import (
    AiMessage,
    ChatMemoryStore,
    ChatRequest,
    ChatResponse,
    Container,
    MemoryId,
    Result,
    ToolExecutionResultMessage,
    UserMessage,
    register_ai_service,
    tool,
)
from toolbox.conversations.views import FullHistory
from toolbox.runs import RunStore, approve
from toolbox.sql import SqlChatMemoryStore, SqlRunStore
from toolbox.testing import tool_call

from . import transfers
from .transfers import kill_in

TABLES = ("CREATE TABLE steps (taken INTEGER)",)


@tool(requires_approval=True)
async def refund(order: int) -> str:
    return f"refunded {order}"


@register_ai_service(tools=refund, chat_memory=FullHistory(), on_suspended="continue")
class Room(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...


class Model:
    """Asks for a refund when the last message of the user says so, and answers everything else."""

    async def chat(self, request: ChatRequest) -> ChatResponse:
        last = request.messages[-1]
        if isinstance(last, ToolExecutionResultMessage):
            return ChatResponse(AiMessage(f"done: {last.text}"))
        assert isinstance(last, UserMessage)
        if last.text == "refund":
            return ChatResponse(AiMessage(None, [tool_call("refund", {"order": 7})]))
        return ChatResponse(AiMessage("an answer"))


def new_rooms(database: AsyncEngine, lease: float, take_over: bool) -> Container:
    """Return a container of the service, with both stores on one engine."""
    container = Container(models={"default": Model()}, take_over_runs=take_over).register(Room)
    container.register_instance(SqlChatMemoryStore(database, lease=lease), ChatMemoryStore)
    return container.register_instance(SqlRunStore(database, lease), RunStore)


def rooms(url: str, lease: float) -> AbstractAsyncContextManager[tuple[Container, AsyncEngine]]:
    """A started container of the service, with its database engine."""
    return transfers.started(new_rooms, url, lease, False)


# --- the programs


async def ask(url: str, lease: float, room: str, kill_at: int | None) -> None:
    """Makes a call that waits."""
    async with rooms(url, lease) as (container, database):
        await kill_in(database, container.get(Room).chat(room, "refund"), kill_at)


async def ask_first(url: str, lease: float, names: Sequence[str]) -> None:
    """Makes a call that waits, and then another one, in each room."""
    async with rooms(url, lease) as (container, _):
        for name in names:
            await container.get(Room).chat(name, "refund")
            await container.get(Room).chat(name, "before")


async def answer(url: str, lease: float, room: str, kill_at: int | None) -> None:
    """Answers the call that waits."""
    async with rooms(url, lease) as (container, database):
        [run] = await container.runs.list(memory_id=room, service=Room)
        work = container.runs.resume(run.id, {each.id: approve() for each in run.pending})
        await kill_in(database, work, kill_at)


async def cancel(url: str, lease: float, room: str, kill_at: int | None) -> None:
    """Cancels the call that waits."""
    async with rooms(url, lease) as (container, database):
        [run] = await container.runs.list(memory_id=room, service=Room)
        await kill_in(database, container.runs.cancel(run.id), kill_at)


async def go_on_talking(url: str, lease: float, names: Sequence[str]) -> None:
    """Makes one more call in each room."""
    async with rooms(url, lease) as (container, _):
        await transfers.skip_leases(container, lease)
        for name in names:
            await container.get(Room).chat(name, "after")


async def answer_all(url: str, lease: float, names: Sequence[str]) -> None:
    """Lets all runs end."""
    async with rooms(url, lease) as (container, _):
        await transfers.skip_leases(container, lease)
        for name in names:
            while (run := await container.runs.run_of(Room, name)) is not None:
                await container.runs.resume(run.id, {each.id: approve() for each in run.pending})


async def warm_up() -> None:
    """Use what the rooms need, so that the children begin at once."""
    async with rooms("sqlite://", 5.0) as (container, _):
        result = await container.get(Room).chat("first", "refund")
        await container.runs.resume(result.run_id or "", {"0": approve()})


_ALL = (ask, ask_first, answer, cancel, go_on_talking, answer_all)
transfers.PROGRAMS.update({each.__name__: each for each in _ALL})
transfers.CONTAINERS.update({each.__name__: (new_rooms, False) for each in _ALL})
transfers.WARM_UPS.append(warm_up)
