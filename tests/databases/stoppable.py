"""A program with a call or a run at work in a stored conversation, for tests that stop or kill it.

It sends through a connection how far it is. `transfers` forks it.
"""

import asyncio
from multiprocessing.connection import Client
from typing import Any, Protocol

from sqlalchemy.ext.asyncio import AsyncEngine

from toolbox import (
    AiMessage,
    ChatMemoryStore,
    Container,
    MemoryId,
    ToolboxSettings,
    produces,
    register_ai_service,
    sql,
    tool,
)
from toolbox.errors import ConversationStoppedError, RunCancelledError
from toolbox.runs import RunId, RunStore, durable
from toolbox.settings import RedisSettings, SqlSettings
from toolbox.testing import ScriptedChatModel, tool_call

from . import transfers

LEASE = 2.0

reports: list[Any] = []
"""The connection to the test."""


@tool
async def pay() -> str:
    return "paid"


@tool
async def wait() -> str:
    if reports:
        reports[0].send("at work")
    await asyncio.Event().wait()
    return "never"


@register_ai_service(tools=(pay, wait), name="stoppable")
class Desk(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> str: ...

    @durable
    async def run(self, run_id: RunId, room: MemoryId[str], text: str) -> str: ...


@produces(scope="application")
def memory(engine: AsyncEngine) -> ChatMemoryStore:
    return sql.SqlChatMemoryStore(engine, lease=LEASE)


@produces(scope="application")
def runs(engine: AsyncEngine) -> RunStore:
    return sql.SqlRunStore(engine, lease=LEASE)


def desk(store_url: str, sql_url: str, *replies: Any, **options: Any) -> Container:
    """Return a container on these databases: conversations in the first, runs in the second."""
    settings = ToolboxSettings(sql=SqlSettings(url=sql_url), redis=RedisSettings(url=store_url))
    made = Container(models={"default": ScriptedChatModel(replies)}, settings=settings, **options)
    made.register(sql.engine, sql.session, runs, Desk)
    if not store_url.startswith("unix:"):
        return made.register(memory)
    from toolbox import redis

    @produces(scope="application")
    def redis_memory(client: redis.Redis) -> ChatMemoryStore:
        return redis.RedisChatMemoryStore(client, lease=LEASE)

    return made.register(redis.client, redis_memory)


PAYS = AiMessage("a moment", [tool_call("pay", id="1"), tool_call("wait", id="2")])


async def stoppable(address: str, store_url: str, sql_url: str, room: str, what: str) -> None:
    """Makes a call or executes a run, which is to be stopped, and sends how it ended."""
    reports.append(Client(address))
    async with desk(store_url, sql_url, PAYS) as here:
        service = here.get(Desk)
        try:
            await (service.chat(room, "go") if what == "call" else service.run(room, room, "go"))
        except (ConversationStoppedError, RunCancelledError) as error:
            reports[0].send(f"{type(error).__name__}: {error}")


transfers.PROGRAMS[stoppable.__name__] = stoppable
