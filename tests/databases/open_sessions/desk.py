"""A service, its tables, and a model that counts the connections in use while it is asked."""

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from sqlalchemy import ForeignKey
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

from toolbox import ChatRequest, Container, TokenStream, register_ai_service
from toolbox.testing import ScriptedChatModel


class Base(DeclarativeBase): ...


class User(Base):
    __tablename__ = "users"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    questions: Mapped[int] = mapped_column(default=0)
    orders: Mapped[list["Order"]] = relationship(lazy="selectin")


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))


@register_ai_service()
class Desk(Protocol):
    async def chat(self, question: str) -> str: ...


@register_ai_service()
class StreamingDesk(Protocol):
    def chat(self, question: str) -> TokenStream: ...


class Watching(ScriptedChatModel):
    """Notes how many connections are used while it is asked; `then` runs at each request."""

    def __init__(self, *replies: Any) -> None:
        super().__init__(replies or [lambda _: "ok"] * 100)
        self.used: list[int] = []
        self.engines: list[Any] = []
        self.then: Callable[[], Awaitable[object]] | None = None

    async def chat(self, request: ChatRequest) -> Any:
        self.used.append(sum(each.pool.checkedout() for each in self.engines))
        if self.then is not None:
            await self.then()
        return await super().chat(request)


class Program:
    """A started container, with its model and engine."""

    def __init__(self, container: Container, model: Watching) -> None:
        self.container, self.model = container, model
        self.desk = container.get(Desk)

    async def ask(self) -> int:
        """Ask the model; return how many connections were used meanwhile."""
        await self.desk.chat("?")
        return self.model.used[-1]


Start = Callable[..., contextlib.AbstractAsyncContextManager[Program]]


async def session_of(program: Program) -> AsyncSession:
    return await program.container.aget(AsyncSession)


async def change(session: AsyncSession) -> None:
    (await session.get_one(User, 7)).name = "Grace"
