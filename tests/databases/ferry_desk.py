"""A program whose process is killed in a call that changes a conversation-scoped bean.

It is killed right before a write of the conversation or of the run, or right after it. `transfers` forks it.
"""

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from pydantic import BaseModel
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from toolbox import ChatMemoryStore, Container, MemoryId, register_ai_service, sql, tool
from toolbox.conversations import conversation_scoped
from toolbox.conversations.keys import ChatMemoryKey
from toolbox.runs import RunId, RunStore, durable
from toolbox.testing import ScriptedChatModel, tool_call

from . import transfers

TABLES = ("CREATE TABLE steps (taken INTEGER)",)
NAME = f"{__name__}.Reservation"


@conversation_scoped
class Reservation(BaseModel):
    seats: list[str] = []

    @tool
    def add_seat(self, seat: str) -> str:
        """Add a seat."""
        self.seats.append(seat)
        return seat


@register_ai_service(name="ferry", tools=Reservation)
class Ferry(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> str: ...

    @durable
    async def book(self, run: RunId, room: MemoryId[str], text: str) -> str: ...


class Dying:
    """Counts the writes of a process, and kills it at one of them: before it, or after it."""

    def __init__(self) -> None:
        self.writes = 0
        self.at: tuple[int, str] | None = None

    def around(self, when: str) -> None:
        self.writes += when == "before"
        if self.at == (self.writes, when):
            os.kill(os.getpid(), signal.SIGKILL)


dying = Dying()


class DyingChatMemoryStore(sql.SqlChatMemoryStore):
    async def write(self, key: ChatMemoryKey, write: Any) -> None:
        dying.around("before")
        await super().write(key, write)
        dying.around("after")


class DyingRunStore(sql.SqlRunStore):
    async def append(
        self, run_id: str, generation: int, records: Sequence[Any], changes: Any = None, events: Sequence[str] = ()
    ) -> None:
        dying.around("before")
        await super().append(run_id, generation, records, changes, events)
        dying.around("after")


def reply(request: Any) -> Any:
    """Book two seats, one after another."""
    done = [each for each in request.messages if type(each).__name__ == "ToolExecutionResultMessage"]
    return tool_call("add_seat", {"seat": "AB"[len(done)]}) if len(done) < 2 else "Booked."


def new_desk(database: AsyncEngine, lease: float, take_over: bool) -> Container:
    """Return a container of the service, with both stores on one engine."""
    made = Container(models={"default": ScriptedChatModel([reply] * 100)}, take_over_runs=take_over).register(Ferry)
    made.register_instance(DyingChatMemoryStore(database, lease=lease), ChatMemoryStore)
    return made.register_instance(DyingRunStore(database, lease), RunStore)


def desk(url: str, lease: float) -> AbstractAsyncContextManager[tuple[Container, AsyncEngine]]:
    """A started container of the service, with its database engine."""
    return transfers.started(new_desk, url, lease, False)


async def state(container: Container, room: str) -> tuple[Mapping[str, Any] | None, list[str]]:
    """Return the beans of a conversation, and the results of tools in its log."""
    store: Any = await container.aget(ChatMemoryStore)
    log = await store.read_since(ChatMemoryKey("ferry", room), lambda head: 0)
    messages = [] if log is None else [message for turn in log.turns for message in turn.shown]
    texts = [each.text for each in messages if type(each).__name__ == "ToolExecutionResultMessage"]
    return None if log is None else log.head.beans, texts


# --- the programs


async def ferry_chat(url: str, lease: float, room: str, number: int, when: str) -> None:
    """Makes a call, in a process that is killed at a write."""
    async with desk(url, lease) as (container, _):
        dying.at = (number, when)
        await container.get(Ferry).chat(room, "Two seats")


async def ferry_book(url: str, lease: float, room: str, number: int) -> None:
    """Executes a run, in a process that is killed before a write. Writes their number if it is not."""
    async with desk(url, lease) as (container, database):
        dying.at = (number, "before")
        await container.get(Ferry).book(room, room, "Two seats")
        async with database.begin() as connection:
            await connection.execute(text("INSERT INTO steps VALUES (:taken)"), {"taken": dying.writes})


async def warm_up() -> None:
    """Use what the ferry needs, so that the children begin at once."""
    async with desk("sqlite://", 5.0) as (container, _):
        await container.get(Ferry).book("first", "first", "Two seats")
    dying.writes = 0


_ALL = (ferry_chat, ferry_book)
transfers.PROGRAMS.update({each.__name__: each for each in _ALL})
transfers.CONTAINERS.update({each.__name__: (new_desk, False) for each in _ALL})
transfers.WARM_UPS.append(warm_up)
