"""The programs that `benchmarks.connections` asks, once for each peer, and the server of their model.

    python -m benchmarks.connections_apps PEER PORT MODEL_URL DATABASE_URL
    python -m benchmarks.connections_apps model PORT SECONDS

`GET /ask` reads a row, asks the model, and answers with both. `GET /health` makes a query. The pool has five
connections and the other defaults of SQLAlchemy. The two peers without toolbox are one program, but for one line.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from typing import Annotated, Any

import uvicorn
from fastapi import Depends, FastAPI
from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

POOL = 5


class Base(DeclarativeBase): ...


class Customer(Base):
    __tablename__ = "customers"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]


def toolbox_app(model: str, database: str) -> FastAPI:
    from typing import Protocol

    from toolbox import Container, OpenAiChatModel, ToolboxSettings, register_ai_service, sql
    from toolbox.settings import SqlSettings
    from toolbox_fastapi import Inject, install

    @register_ai_service()
    class Desk(Protocol):
        async def chat(self, question: str) -> str: ...

    settings = ToolboxSettings(sql=SqlSettings(url=database, pool_size=POOL, max_overflow=0))
    models = {"default": OpenAiChatModel("m", base_url=model, api_key="key")}
    app = FastAPI()
    install(app, Container(models=models, settings=settings).register(sql.engine, sql.session, Desk))

    @app.get("/ask")
    async def ask(session: Inject[AsyncSession], desk: Inject[Desk]) -> str:
        customer = (await session.scalars(select(Customer))).one()
        return f"{customer.name}: {await desk.chat('Hello')}"

    @app.get("/health")
    async def health(session: Inject[AsyncSession]) -> int:
        return int(await session.scalar(text("SELECT 1")) or 0)

    return app


def pydantic_ai_app(model: str, database: str, *, commits: bool) -> FastAPI:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    address = database.replace("postgresql:", "postgresql+asyncpg:")
    engine: AsyncEngine = create_async_engine(address, pool_size=POOL, max_overflow=0)
    agent = Agent(OpenAIChatModel("m", provider=OpenAIProvider(base_url=model, api_key="key")))
    app = FastAPI()

    async def open_session() -> AsyncIterator[AsyncSession]:
        async with AsyncSession(engine, expire_on_commit=False) as session:
            yield session

    OpenSession = Annotated[AsyncSession, Depends(open_session)]  # noqa: N806 - a type

    @app.get("/ask")
    async def ask(session: OpenSession) -> str:
        customer = (await session.scalars(select(Customer))).one()
        if commits:
            await session.commit()
        return f"{customer.name}: {(await agent.run('Hello')).output}"

    @app.get("/health")
    async def health(session: OpenSession) -> int:
        return int(await session.scalar(text("SELECT 1")) or 0)

    return app


def model_app(seconds: float) -> FastAPI:
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def complete() -> dict[str, Any]:
        await asyncio.sleep(seconds)
        choice = {"index": 0, "message": {"role": "assistant", "content": "done"}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return {
            "id": "c",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [choice],
            "usage": usage,
        }

    @app.get("/health")
    async def health() -> int:
        return 1

    return app


def main() -> None:
    """Serve one of the programs."""
    peer, port, *others = sys.argv[1:]
    if peer == "model":
        app = model_app(float(others[0]))
    elif peer == "toolbox":
        app = toolbox_app(*others)
    else:
        app = pydantic_ai_app(*others, commits=peer == "by-hand")
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="critical", access_log=False, backlog=2048)


if __name__ == "__main__":
    os.environ.setdefault("OPENAI_API_KEY", "key")
    main()
