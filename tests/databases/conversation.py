"""A program that makes calls in a conversation stored in a database: one of several processes of a service.

It sends through a connection how far it is. `transfers` forks it.
"""

import asyncio
from collections.abc import Callable
from multiprocessing.connection import Client
from typing import Any, Protocol

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from toolbox import (
    ChatMemoryStore,
    ChatRequest,
    Container,
    MemoryId,
    MessageWindow,
    ToolboxSettings,
    UserMessage,
    produces,
    register_ai_service,
    sql,
    tool,
)
from toolbox.settings import RedisSettings, SqlSettings
from toolbox.testing import ScriptedChatModel, tool_call

from . import transfers

LEASE = 3.0


class Notes:
    def __init__(self, session: AsyncSession) -> None:
        self.session = session

    @tool
    @sql.transactional
    async def add(self, note: str) -> str:
        await self.session.execute(text("INSERT INTO notes VALUES (:note)"), {"note": note})
        if note == "never committed":
            await stand_still("in the tool")
        return note


reports: list[Any] = []
"""The connection to the test."""


@register_ai_service(tools=Notes, chat_memory=MessageWindow(10_000))
class Assistant(Protocol):
    async def chat(self, room: MemoryId[str], question: str) -> str: ...


async def stand_still(where: str) -> None:
    reports[0].send(where)
    await asyncio.Event().wait()


def container_of(store_url: str, sql_url: str, reply: Callable[[ChatRequest], Any]) -> Container:
    settings = ToolboxSettings(sql=SqlSettings(url=sql_url), redis=RedisSettings(url=store_url))
    container = Container(models={"default": ScriptedChatModel([reply] * 1000)}, settings=settings)
    container.register(sql.engine, sql.session, Notes, Assistant)
    if not store_url.startswith("unix:"):
        return container.register(sql_store)
    from toolbox import redis

    @produces(scope="application")
    def redis_store(client: redis.Redis) -> ChatMemoryStore:
        return redis.RedisChatMemoryStore(client, lease=LEASE)

    return container.register(redis.client, redis_store)


@produces(scope="application")
def sql_store(engine: AsyncEngine) -> ChatMemoryStore:
    return sql.SqlChatMemoryStore(engine, lease=LEASE)


async def count(container: Container, memory_id: str, name: str, calls: int) -> None:
    reports[0].send("ready")
    await asyncio.to_thread(reports[0].recv)
    for number in range(calls):
        await container.get(Assistant).chat(memory_id, f"{name} {number}")
    reports[0].send("done")


async def converse(address: str, store_url: str, sql_url: str, memory_id: str, what: str, *arguments: str) -> None:
    """Makes one call, which stands still at some place, or counts in several ones."""
    reports.append(Client(address))

    async def reply(request: ChatRequest) -> Any:
        question = request.messages[-1]
        if what == "count":
            return f"answer to {question.text}"
        if isinstance(question, UserMessage):
            return tool_call("add", {"note": what})
        return await stand_still("after the tool")

    async with container_of(store_url, sql_url, reply) as container:
        if what == "count":
            await count(container, memory_id, arguments[0], int(arguments[1]))
        else:
            await container.get(Assistant).chat(memory_id, what)


transfers.PROGRAMS[converse.__name__] = converse
