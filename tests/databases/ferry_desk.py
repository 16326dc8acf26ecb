"""A program whose process is killed in a call that changes a conversation-scoped bean.

It is killed right before a write of the conversation or of the run, or right after it.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncEngine

from toolbox import ChatMemoryStore, Container, MemoryId, ToolboxSettings, produces, register_ai_service, sql, tool
from toolbox.conversations import conversation_scoped
from toolbox.conversations.keys import ChatMemoryKey
from toolbox.runs import RunId, RunStore, durable
from toolbox.settings import SqlSettings
from toolbox.testing import ScriptedChatModel, tool_call

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


@produces(scope="application")
def conversations(engine: AsyncEngine) -> ChatMemoryStore:
    return DyingChatMemoryStore(engine, lease=1)


@produces(scope="application")
def runs(engine: AsyncEngine) -> RunStore:
    return DyingRunStore(engine, lease=1)


def reply(request: Any) -> Any:
    """Book two seats, one after another."""
    done = [each for each in request.messages if type(each).__name__ == "ToolExecutionResultMessage"]
    return tool_call("add_seat", {"seat": "AB"[len(done)]}) if len(done) < 2 else "Booked."


def desk(url: str) -> Container:
    settings = ToolboxSettings(sql=SqlSettings(url=url))
    made = Container(models={"default": ScriptedChatModel([reply] * 10)}, settings=settings, take_over_runs=False)
    return made.register(sql.engine, conversations, runs, Ferry)


async def state(container: Container, room: str) -> tuple[Mapping[str, Any] | None, list[str]]:
    """Return the beans of a conversation, and the results of tools in its log."""
    store: Any = await container.aget(ChatMemoryStore)
    log = await store.read_since(ChatMemoryKey("ferry", room), lambda head: 0)
    messages = [] if log is None else [message for turn in log.turns for message in turn.shown]
    texts = [each.text for each in messages if type(each).__name__ == "ToolExecutionResultMessage"]
    return None if log is None else log.head.beans, texts


async def main(url: str, what: str, room: str, number: str, when: str) -> None:
    async with desk(url) as container:
        ferry = container.get(Ferry)
        dying.writes, dying.at = 0, (int(number), when)
        await (ferry.chat(room, "Two seats") if what == "chat" else ferry.book(room, room, "Two seats"))
        print(dying.writes)


if __name__ == "__main__":
    from tests.databases.ferry_desk import main as run  # the service has the name of this module

    asyncio.run(run(*sys.argv[1:]))
