"""Every way to ask a model releases sessions: tools, streams, interceptors, producers, and models used directly."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any, Protocol, cast

import pytest
from sqlalchemy import Engine, select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from tests.databases.open_sessions.desk import Base, Desk, Order, Start, User, Watching, change, session_of
from toolbox import (
    ChatModel,
    ChatRequest,
    Container,
    MemoryId,
    Named,
    Result,
    TokenStream,
    ToolboxSettings,
    UserMessage,
    produces,
    register_ai_service,
    sql,
    tool,
)
from toolbox.chat import StreamingChatModel
from toolbox.interceptors import ModelInterceptor, ModelInvocation, ModelProceed, interceptors
from toolbox.runs import RunId, durable
from toolbox.settings import SqlSettings
from toolbox.testing import tool_call

pytestmark = pytest.mark.anyio


# --- every way to ask a model


class Tools:
    def __init__(self, session: AsyncSession, desk: Desk) -> None:
        self.session, self.desk = session, desk

    @tool
    async def look_up(self) -> str:
        """Read a row."""
        return (await self.session.get_one(User, 7)).name

    @tool
    async def ask_another(self) -> str:
        """Read a row, and ask another service in the code of the tool."""
        await self.session.get_one(User, 7)
        return await self.desk.chat("?")

    @tool
    @sql.transactional
    async def ask_in_transaction(self) -> str:
        """Ask another service inside of a transaction."""
        await self.session.get_one(User, 7)
        return await self.desk.chat("?")


@register_ai_service(tools=Tools)
class Agent(Protocol):
    async def chat(self, question: str) -> str: ...


async def test_a_service_called_in_the_code_of_a_tool_releases_the_sessions_of_both(start: Start) -> None:
    replies = [tool_call("ask_another"), "inner", "outer"]
    async with start(Tools, Agent, replies=replies) as program, program.container.request_scope():
        session = await session_of(program)
        await session.get_one(User, 7)

        assert await program.container.get(Agent).chat("?") == "outer"

        assert program.model.used == [0, 0, 0]


async def test_the_session_of_a_transaction_is_kept_with_a_warning_per_function(
    start: Start, warnings: list[str]
) -> None:
    replies = [tool_call("ask_in_transaction"), "inner", tool_call("ask_in_transaction"), "inner", "outer"]
    async with start(Tools, Agent, replies=replies) as program, program.container.request_scope():
        await (await session_of(program)).get_one(User, 7)

        assert await program.container.get(Agent).chat("?") == "outer"

        assert program.model.used == [0, 1, 0, 1, 0]  # other sessions follow the setting
    [warning] = warnings
    assert "@transactional Tools.ask_in_transaction" in warning


async def test_streams_release_before_each_request(start: Start) -> None:
    replies = [tool_call("look_up"), tool_call("look_up"), "It is Ada"]

    @register_ai_service(tools=Tools)
    class Streaming(Protocol):
        def chat(self, question: str) -> TokenStream: ...

    async with start(Tools, Streaming, replies=replies) as program, program.container.request_scope():
        session = await session_of(program)
        async for _ in program.container.get(Streaming).chat("?"):
            await session.scalar(select(User.name))  # the reader holds a connection between two items
        assert program.model.used == [0, 0, 0]


async def test_interceptors_that_answer_themselves_release_nothing(start: Start) -> None:
    class Cache(ModelInterceptor):
        answered = False

        async def around_model(self, call: ModelInvocation, proceed: ModelProceed) -> Any:
            if self.answered:
                return self.reply
            self.reply, self.answered = await proceed(call), True
            return self.reply

    @register_ai_service()
    @interceptors(Cache)
    class Cached(Protocol):
        async def chat(self, question: str) -> str: ...

    async with start(Cached) as program, program.container.request_scope():
        session, cached = await session_of(program), program.container.get(Cached)
        await session.get_one(User, 7)
        await cached.chat("?")
        assert not session.in_transaction()
        await session.get_one(User, 7)
        await cached.chat("?")
        assert session.in_transaction()


async def test_the_release_comes_after_what_interceptors_read(start: Start) -> None:
    class Reading(ModelInterceptor):
        async def around_model(self, call: ModelInvocation, proceed: ModelProceed) -> Any:
            await (await program.container.aget(AsyncSession)).get_one(User, 7)
            return await proceed(call)

    @register_ai_service()
    @interceptors(Reading)
    class Read(Protocol):
        async def chat(self, question: str) -> str: ...

    async with start(Read) as program, program.container.request_scope():
        await program.container.get(Read).chat("?")

        assert program.model.used == [0]


def test_synchronous_services_release_synchronous_sessions(database_url: str, warnings: list[str]) -> None:
    @register_ai_service()
    class Sync(Protocol):
        def chat(self, question: str) -> str: ...

    class SyncTools:
        def __init__(self, session: Session, sync: Sync) -> None:
            self.session, self.sync = session, sync

        @tool
        def ask(self) -> str:
            """Read, and ask another service."""
            assert self.session.get_one(User, 7).name == "Ada"
            return self.sync.chat("?")

    @register_ai_service(tools=SyncTools)
    class Outer(Protocol):
        def chat(self, question: str) -> str: ...

    model = Watching("ok", "ok", tool_call("ask"), "inner", "outer")
    settings = ToolboxSettings(sql=SqlSettings(url=database_url))
    container = Container(models={"default": model}, settings=settings)
    with container.register(sql.sync_engine, sql.sync_session, Sync, SyncTools, Outer), container.request_scope():
        engine = container.get(Engine)
        model.engines.append(engine)
        Base.metadata.create_all(engine)
        session, sync = container.get(Session), container.get(Sync)
        session.add(User(id=7, name="Ada"))
        session.commit()
        user = session.get_one(User, 7)
        sync.chat("?")
        assert user.name == "Ada"
        user.name = "Grace"
        session.flush()
        sync.chat("?")
        session.rollback()
        assert container.get(Outer).chat("?") == "outer"
    assert model.used == [0, 1, 0, 0, 0]
    assert len(warnings) == 1


async def test_the_tools_of_an_asynchronous_service_may_be_synchronous(start: Start) -> None:
    class SyncTools:
        def __init__(self, session: Session) -> None:
            self.session = session

        @tool
        def look_up(self) -> str:
            """Read a row."""
            return self.session.get_one(User, 7).name

    @register_ai_service(tools=SyncTools)
    class Outer(Protocol):
        async def chat(self, question: str) -> str: ...

    replies = [tool_call("look_up"), "Ada"]
    async with start(SyncTools, Outer, replies=replies) as program, program.container.request_scope():
        session = await asyncio.to_thread(program.container.get, Session)
        await asyncio.to_thread(session.get_one, User, 7)
        await program.container.get(Outer).chat("?")
        assert program.model.used == [0, 0]


# --- producers of the program


@pytest.mark.parametrize("scope", ["request", "call", "dependent"])
async def test_sessions_of_other_producers_are_released_too(scope: Any, start: Start) -> None:
    @produces(scope=scope, name="own")
    async def own(engine: AsyncEngine) -> AsyncIterator[AsyncSession]:
        async with sql.open_session(engine) as session:
            yield session

    async with start(own) as program, program.container.request_scope():
        session = await program.container.aget(AsyncSession, "own")
        user = await session.get_one(User, 7)

        assert await program.ask() == 0

        await session.commit()
        assert user.name == "Ada"  # `expire_on_commit=False`


async def test_a_session_that_is_a_seed_is_released_too(start: Start, warnings: list[str]) -> None:
    async with start() as program:
        engine = program.container.get(AsyncEngine)
        async with sql.open_session(engine) as session, program.container.request_scope({AsyncSession: session}):
            await session.get_one(User, 7)
            assert await program.ask() == 0
            await change(session)
            await program.ask()
            assert session.in_transaction()
    assert len(warnings) == 1


async def test_open_session_returns_a_session_for_its_engine(start: Start) -> None:
    async with start() as program:
        async with sql.open_session(program.container.get(AsyncEngine)) as session:
            assert isinstance(session, AsyncSession)
        with sql.open_session(await asyncio.to_thread(program.container.get, Engine)) as sync_session:
            assert isinstance(sync_session, Session)


async def test_tools_get_the_transaction_of_their_endpoint(start: Start, warnings: list[str]) -> None:
    @produces(scope="request", name="shared")
    async def shared(engine: AsyncEngine) -> AsyncIterator[AsyncSession]:
        async with sql.open_session(engine) as session:
            yield session

    class Sharing:
        def __init__(self, session: Annotated[AsyncSession, Named("shared")]) -> None:
            self.session = session

        @tool
        @sql.transactional
        async def order(self) -> int:
            """Order for the new user."""
            self.session.add(Order(id=5, user_id=8))
            return 5

        @tool
        @sql.transactional
        async def order_and_fail(self) -> int:
            """Order, and fail."""
            self.session.add(Order(id=6, user_id=8))
            raise LookupError("no such article")

    @register_ai_service(tools=Sharing)
    class Clerk(Protocol):
        async def chat(self, question: str) -> Result[str]: ...

    replies = [tool_call("order_and_fail"), tool_call("order"), "ordered"]
    async with start(shared, Sharing, Clerk, replies=replies) as program, program.container.request_scope():
        session = await program.container.aget(AsyncSession, "shared")
        clerk = program.container.get(Clerk)
        with sql.keep_transaction():
            async with session.begin():
                session.add(User(id=8, name="Grace"))
                await session.flush()
                result = await clerk.chat("?")
                async with program.container.get(AsyncEngine).connect() as other:
                    assert (await other.scalars(select(Order.id))).all() == [1000]  # nothing is committed
        assert [each.is_error for each in result.tool_executions] == [True, False]
        async with program.container.get(AsyncEngine).connect() as other:
            assert sorted((await other.scalars(select(Order.id))).all()) == [5, 1000]
    assert warnings == []


# --- models that a program uses directly


async def test_a_model_that_is_used_directly_is_asked_without_a_connection(start: Start, warnings: list[str]) -> None:
    request = ChatRequest(messages=[UserMessage("?")])

    class Summaries:
        def __init__(self, session: AsyncSession, model: ChatModel) -> None:
            self.session, self.model = session, model

        async def write(self) -> str:
            user = await self.session.get_one(User, 7)
            reply = await self.model.chat(request)
            return f"{user.name}: {reply.ai_message.text}"

    async with start(Summaries) as program, program.container.request_scope():
        assert await (await program.container.aget(Summaries)).write() == "Ada: ok"
        session, model = await session_of(program), program.container.get(ChatModel)
        await session.get_one(User, 7)
        assert [event async for event in cast(StreamingChatModel, model).stream(request)]
        assert program.model.used == [0, 0]
        await change(session)
        await model.chat(request)
        assert session.in_transaction()
    assert len(warnings) == 1


@register_ai_service()
class Rooms(Protocol):
    async def chat(self, room: MemoryId[str], question: str) -> str: ...

    @durable
    async def order(self, question: str) -> str: ...

    @durable
    async def order_once(self, run: RunId, question: str) -> str: ...


async def test_requests_with_a_conversation_or_a_run_need_no_second_connection(start: Start) -> None:
    one: Any = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 10}
    async with start(Rooms, *sql.stores, **one) as program:

        async def request(ask: Callable[[Rooms], Awaitable[str]]) -> str:
            async with program.container.request_scope():
                session = await session_of(program)
                user = await session.get_one(User, 7)
                return f"{await ask(program.container.get(Rooms))} {user.name}"

        def chat(rooms: Rooms) -> Awaitable[str]:
            return rooms.chat("a", "?")

        def order_once(rooms: Rooms) -> Awaitable[str]:
            return rooms.order_once("r", "?")

        asked = (chat, chat, lambda rooms: rooms.order("?"), order_once, order_once)
        answers = await asyncio.gather(*map(request, asked))

        assert answers == ["ok Ada"] * 5
