"""The program that `benchmarks.app` measures, written with toolbox and written by hand.

    python -m benchmarks.app_programs toolbox|by-hand PORT MODEL_URL DATABASE_URL

`POST /chat/{conversation}` asks the model, which calls one tool; the tool changes a row in a transaction. The
conversation is kept in the database, and two requests for one conversation do not overwrite each other. `GET /cpu`
tells the seconds of CPU time that the process has used.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

import uvicorn

try:
    from uvloop import run as run_loop
except ImportError:
    from asyncio import run as run_loop
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

POOL = 20
SYSTEM = "You sell tea. Use the tool to take pieces out of the stock."


class Base(DeclarativeBase): ...


class Stock(Base):
    __tablename__ = "stock"
    article: Mapped[str] = mapped_column(primary_key=True)
    pieces: Mapped[int]


class Conversation(Base):
    """The conversations of the program by hand; `version` notices two requests at once."""

    __tablename__ = "conversations"
    id: Mapped[str] = mapped_column(primary_key=True)
    version: Mapped[int]
    messages: Mapped[str]


class Question(BaseModel):
    text: str


class Answer(BaseModel):
    text: str


async def prepare(engine: AsyncEngine, articles: int = 50) -> None:
    """Make the tables, and a row for each client."""
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.drop_all)
        await connection.run_sync(Base.metadata.create_all)
    async with AsyncSession(engine) as session:
        session.add_all(Stock(article=f"article-{number}", pieces=10**9) for number in range(articles))
        await session.commit()


# --- with toolbox


def toolbox_app(model_url: str, database_url: str) -> FastAPI:
    from toolbox import Container, MemoryId, OpenAiChatModel, register_ai_service, sql, system_message, tool
    from toolbox.settings import SqlSettings, ToolboxSettings
    from toolbox_fastapi import Inject, install

    class Warehouse:
        def __init__(self, session: AsyncSession) -> None:
            self._session = session

        @tool
        @sql.transactional
        async def take_out(self, article: str, pieces: int) -> int:
            """Takes pieces of an article out; returns how many are left."""
            stock = await self._session.get_one(Stock, article, with_for_update=True)
            stock.pieces -= pieces
            return stock.pieces

    @register_ai_service(tools=Warehouse)
    class Clerk(Protocol):
        @system_message(SYSTEM)
        async def answer(self, conversation: MemoryId[str], question: str) -> str: ...

    model = OpenAiChatModel(model="m", base_url=f"{model_url}/v1", api_key="none")
    settings = ToolboxSettings(sql=SqlSettings(url=database_url, pool_size=POOL, max_overflow=0))
    container = Container(models={"default": model}, settings=settings)
    container.register(sql.engine, sql.session, sql.SqlChatMemoryStore, Warehouse, Clerk)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await prepare(container.get(AsyncEngine))
        yield

    app = FastAPI(lifespan=lifespan)
    install(app, container)

    async def chat(conversation: str, question: Question, clerk: Any) -> Answer:
        return Answer(text=await clerk.answer(conversation, question.text))

    chat.__annotations__["clerk"] = Inject[Clerk]
    app.post("/chat/{conversation}")(chat)
    return app


# --- by hand


TOOL = {
    "type": "function",
    "function": {
        "name": "take_out",
        "description": "Takes pieces of an article out; returns how many are left.",
        "parameters": {
            "type": "object",
            "properties": {"article": {"type": "string"}, "pieces": {"type": "integer"}},
            "required": ["article", "pieces"],
        },
    },
}


class TakeOut(BaseModel):
    article: str
    pieces: int


def by_hand_app(model_url: str, database_url: str) -> FastAPI:
    import openai

    client: Any = None
    driver = "sqlite+aiosqlite" if database_url.startswith("sqlite") else "postgresql+asyncpg"
    address = make_url(database_url).set(drivername=driver)
    engine = create_async_engine(address, pool_size=POOL, max_overflow=0, pool_pre_ping=True)
    sessions = async_sessionmaker(engine, expire_on_commit=False)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        nonlocal client
        async with openai.AsyncOpenAI(base_url=f"{model_url}/v1", api_key="none") as client:
            await prepare(engine)
            yield
        await engine.dispose()

    async def take_out(asked: TakeOut) -> int:
        async with sessions() as session, session.begin():
            stock = await session.get_one(Stock, asked.article, with_for_update=True)
            stock.pieces -= asked.pieces
            return stock.pieces

    async def load(conversation: str) -> tuple[int, list[Any]]:
        async with sessions() as session:
            found = await session.get(Conversation, conversation)
            return (0, []) if found is None else (found.version, json.loads(found.messages))

    async def save(conversation: str, version: int, messages: list[Any]) -> None:
        text = json.dumps(messages)
        async with sessions() as session, session.begin():
            if version == 0:
                session.add(Conversation(id=conversation, version=1, messages=text))
                return
            found = await session.get_one(Conversation, conversation, with_for_update=True)
            if found.version != version:
                raise HTTPException(409, "the conversation has changed; send the question again")
            found.version, found.messages = version + 1, text

    app = FastAPI(lifespan=lifespan)

    @app.post("/chat/{conversation}")
    async def chat(conversation: str, question: Question) -> Answer:
        version, messages = await load(conversation)
        messages.append({"role": "user", "content": question.text})
        while True:
            asked: Any = [{"role": "system", "content": SYSTEM}, *messages]
            tools: Any = [TOOL]
            reply = await client.chat.completions.create(model="m", messages=asked, tools=tools)
            said = reply.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            if not said.tool_calls:
                break
            for call in said.tool_calls:
                left = await take_out(TakeOut.model_validate_json(call.function.arguments))  # type: ignore[union-attr]
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(left)})
        await save(conversation, version, messages)
        return Answer(text=said.content or "")

    return app


PROGRAMS: dict[str, Callable[[str, str], FastAPI]] = {
    "toolbox": toolbox_app,
    "by-hand": by_hand_app,
}


# --- the model server


async def serve_model(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer chat completions on one connection: the tool for the article that the user names last, then a sentence."""
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
            last = json.loads(await reader.readexactly(length))["messages"][-1]
            message: dict[str, Any] = {"role": "assistant", "content": "One is on its way."}
            if last["role"] == "user":
                arguments = json.dumps({"article": last["content"].split()[-1], "pieces": 1})
                function = {"name": "take_out", "arguments": arguments}
                message = {"role": "assistant", "content": None}
                message["tool_calls"] = [{"id": "call_1", "type": "function", "function": function}]
            reason = "tool_calls" if "tool_calls" in message else "stop"
            choice = {"index": 0, "message": message, "finish_reason": reason}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            body = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
            answer = json.dumps({**body, "usage": usage}).encode()
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(answer)
            writer.write(head + answer)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def serve_models(port: int) -> None:
    server = await asyncio.start_server(serve_model, "127.0.0.1", port, backlog=1024, limit=1 << 22)
    async with server:
        await server.serve_forever()


def main() -> None:
    name, port = sys.argv[1], int(sys.argv[2])
    if name == "model":
        run_loop(serve_models(port))
        return
    app = PROGRAMS[name](sys.argv[3], sys.argv[4])

    async def cpu() -> float:
        return time.process_time()

    app.get("/cpu")(cpu)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")  # on uvloop, if it is installed


if __name__ == "__main__":
    main()
