"""Sessions while a model works: what has only read gives its connection back, and what may be lost is kept."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Annotated, Any, Protocol, cast

import pytest
from sqlalchemy import Engine, ForeignKey, delete, func, insert, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship
from sqlalchemy.util import await_only

from toolbox import (
    ChatModel,
    ChatRequest,
    Container,
    Named,
    OpenTransactionError,
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
from toolbox.settings import SqlSettings
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


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


@pytest.fixture
def start(database_url: str) -> Start:
    @contextlib.asynccontextmanager
    async def starting(*registered: Any, replies: Any = (), **options: Any) -> AsyncIterator[Program]:
        model = Watching(*replies)
        settings = ToolboxSettings(sql=SqlSettings(url=database_url, **options))
        container = Container(models={"default": model}, settings=settings)
        container.register(sql.engine, sql.session, sql.sync_engine, sql.sync_session, Desk, StreamingDesk)
        async with container.register(*registered):
            engine, sync_engine = await container.aget(AsyncEngine), await asyncio.to_thread(container.get, Engine)
            model.engines += [engine, sync_engine]
            async with engine.begin() as connection:
                await connection.run_sync(Base.metadata.create_all)
                await connection.execute(insert(User).values(id=7, name="Ada"))
                await connection.execute(insert(Order).values(id=1000, user_id=7))
            yield Program(container, model)
            assert engine.pool.checkedout() == sync_engine.pool.checkedout() == 0  # type: ignore[attr-defined]

    return starting


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """The warnings that were logged, in order."""
    found: list[str] = []

    class Found(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler, logger = Found(logging.WARNING), logging.getLogger("toolbox.sql")
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


async def session_of(program: Program) -> AsyncSession:
    return await program.container.aget(AsyncSession)


# --- what has only read


async def test_a_session_that_has_only_read_gives_its_connection_back(start: Start, warnings: list[str]) -> None:
    async with start() as program, program.container.request_scope():
        session = await session_of(program)
        user = await session.get_one(User, 7)

        assert await program.ask() == 0

        assert (user.name, [order.id for order in user.orders]) == (("Ada", [1000]))  # still loaded
        user.questions += 1
        await session.commit()
        assert await session.scalar(select(User.questions)) == 1
    assert warnings == []


READS: dict[str, Callable[[AsyncSession], Awaitable[Any]]] = {
    "orm": lambda session: session.scalars(select(User)),
    "core": lambda session: session.execute(select(User.__table__.c.name)),
    "aggregate": lambda session: session.execute(select(func.count()).select_from(User)),
    "cte": lambda session: session.execute(select(select(User.id).cte("named").c.id)),
    "union": lambda session: session.execute(select(User.id).union(select(Order.id))),
    "text": lambda session: session.execute(text("SELECT name FROM users WHERE id = :id"), {"id": 7}),
    "text in two lines": lambda session: session.execute(text("-- a comment\n select name\n from users;")),
    "literal": lambda session: session.execute(text("SELECT name FROM users WHERE name <> 'DROP TABLE ('")),
    "constant": lambda session: session.execute(select(1)),
    "unread": lambda session: session.execute(select(User)),
    "on its connection": lambda session: select_on_connection(session),
    "many statements": lambda session: many_statements(session),
    "ended savepoint": lambda session: read_in_savepoint(session),
    "same value": lambda session: set_same_value(session),
    "nothing": lambda session: session.run_sync(lambda _: None),
}


async def select_on_connection(session: AsyncSession) -> None:
    await (await session.connection()).execute(select(User))


async def many_statements(session: AsyncSession) -> None:
    for number in range(120):
        await session.execute(text(f"SELECT name FROM users WHERE id = {number}"))


async def read_in_savepoint(session: AsyncSession) -> None:
    async with session.begin_nested():
        await session.execute(select(User))


async def set_same_value(session: AsyncSession) -> None:
    user = await session.get_one(User, 7)
    user.name = "Ada"  # `session.dirty` has it, `session.is_modified` knows better


@pytest.mark.parametrize("kind", READS)
async def test_every_kind_of_reading_is_released(kind: str, start: Start, warnings: list[str]) -> None:
    async with start() as program, program.container.request_scope():
        session = await session_of(program)
        kept = await READS[kind](session)

        assert await program.ask() == 0

        assert not session.in_transaction()
        del kept
    assert warnings == []


# --- what may be lost


async def lock_row(session: AsyncSession) -> None:
    await session.get_one(User, 7, with_for_update=True)


async def add(session: AsyncSession) -> None:
    session.add(Order(user_id=7))


async def add_and_flush(session: AsyncSession) -> None:
    await add(session)
    await session.flush()


async def change(session: AsyncSession) -> None:
    (await session.get_one(User, 7)).name = "Grace"


async def remove(session: AsyncSession) -> None:
    await session.delete(await session.get_one(Order, 1000))


async def keep_connection(session: AsyncSession) -> AsyncConnection:
    connection = await session.connection()
    await connection.execute(select(User))
    return connection


CHANGES: dict[str, tuple[Callable[[AsyncSession], Awaitable[Any]], str]] = {
    "added": (add, "new objects of orders"),
    "flushed": (add_and_flush, "INSERT into orders"),
    "changed": (change, "changed objects of users"),
    "deleted": (remove, "deleted objects of orders"),
    "insert": (lambda s: s.execute(insert(Order).values(user_id=7)), "INSERT into orders"),
    "update": (lambda s: s.execute(update(User).values(name="x")), "UPDATE of users"),
    "delete": (lambda s: s.execute(delete(Order)), "DELETE from orders"),
    "returning": (lambda s: s.execute(insert(Order).values(user_id=7).returning(Order.id)), "INSERT into orders"),
    "text insert": (lambda s: s.execute(text("INSERT INTO orders (user_id) VALUES (7)")), "INSERT … orders"),
    "text update": (lambda s: s.execute(text("update users set name = 'x'")), "UPDATE … users"),
    "from text": (
        lambda s: s.scalars(select(User).from_statement(text("UPDATE users SET questions = 5 RETURNING *"))),
        "UPDATE",
    ),
    "with": (lambda s: s.execute(text("WITH u AS (SELECT 1) SELECT id FROM users")), "WITH in a text"),
    "lock": (lock_row, "SELECT FOR UPDATE of users"),
    "lock of rows": (lambda s: s.scalars(select(User).with_for_update(read=True)), "SELECT FOR UPDATE of users"),
    "function": (lambda s: s.execute(select(func.abs(-1))), "calls a function"),
    "now": (lambda s: s.execute(select(func.now())), "calls a function"),
    "text function": (lambda s: s.execute(text("SELECT abs(-1)")), "calls a function"),
    "two functions": (lambda s: s.execute(text("SELECT 1 UNION SELECT abs(-1)")), "calls a function"),
    "ddl": (lambda s: s.execute(text("CREATE TABLE more (id INTEGER)")), "CREATE … more"),
    "isolation": (lambda s: s.connection(execution_options={"isolation_level": "SERIALIZABLE"}), "SERIALIZABLE"),
    "begun": (lambda s: begin(s), "began the transaction"),
    "savepoint": (lambda s: s.begin_nested(), "or a savepoint"),
    "connection": (keep_connection, "session.connection()"),
}


async def begin(session: AsyncSession) -> Any:
    transaction = await session.begin()
    await session.execute(select(User))
    return transaction


@pytest.mark.parametrize("kind", CHANGES)
async def test_what_may_be_lost_is_kept_with_one_warning(kind: str, start: Start, warnings: list[str]) -> None:
    do, named = CHANGES[kind]
    async with start() as program, program.container.request_scope():
        session = await session_of(program)
        kept = await do(session)

        await program.ask()
        await program.ask()

        assert session.in_transaction()
        [warning] = warnings
        assert warning.startswith("Desk.chat: ")
        assert named in warning
        assert "commit before the call" in warning
        assert "with sql.keep_transaction():" in warning
        await session.rollback()
        assert await session.scalar(select(func.count()).select_from(Order)) == 1
        assert await session.scalar(select(User.name)) == "Ada"
        del kept
        await session.rollback()


@pytest.mark.parametrize("kind", CHANGES)
async def test_with_the_setting_raise_nothing_is_sent(kind: str, start: Start, warnings: list[str]) -> None:
    do, named = CHANGES[kind]
    async with start(while_a_model_works="raise") as program, program.container.request_scope():
        session = await session_of(program)
        kept = await do(session)

        with pytest.raises(OpenTransactionError) as raised:
            await program.ask()

        assert raised.value.where == "Desk.chat"
        assert named in raised.value.what
        assert program.model.requests == []
        assert session.in_transaction()
        del kept
        await session.rollback()
    assert warnings == []


async def test_with_the_setting_raise_reading_is_released(start: Start) -> None:
    async with start(while_a_model_works="raise") as program, program.container.request_scope():
        await (await session_of(program)).get_one(User, 7)

        assert await program.ask() == 0


@pytest.mark.parametrize("do", [change, lambda session: session.get_one(User, 7)], ids=["changed", "read"])
async def test_with_the_setting_keep_nothing_happens(do: Any, start: Start, warnings: list[str]) -> None:
    async with start(while_a_model_works="keep") as program, program.container.request_scope():
        await do(await session_of(program))

        assert await program.ask() == 1
    assert warnings == []


async def test_a_block_keeps_its_transactions(start: Start, warnings: list[str]) -> None:
    async with start(while_a_model_works="raise") as program, program.container.request_scope():
        session = await session_of(program)
        await change(session)
        with sql.keep_transaction():
            asked = asyncio.create_task(program.ask())
        assert await asked == 1  # a task inherits it
        await session.rollback()
        await session.get_one(User, 7)
        with sql.keep_transaction():
            stream = program.container.get(StreamingDesk).chat("?")
        assert [each async for each in stream]
        assert program.model.used[-1] == 1  # as in the call that made the stream
        stream = program.container.get(StreamingDesk).chat("?")
        with sql.keep_transaction():
            assert [each async for each in stream]
        assert program.model.used[-1] == 0
    assert warnings == []


async def test_each_place_is_warned_about_once(start: Start, warnings: list[str]) -> None:
    async with start() as program:
        for _ in range(3):
            async with program.container.request_scope():
                await change(await session_of(program))
                await program.ask()
        assert len(warnings) == 1
        async with program.container.request_scope():
            await change(await session_of(program))
            assert [each async for each in program.container.get(StreamingDesk).chat("?")]
        assert len(warnings) == 2
        assert warnings[1].startswith("StreamingDesk.chat: ")


async def test_values_are_not_in_warnings(start: Start, warnings: list[str]) -> None:
    async with start() as program, program.container.request_scope():
        session = await session_of(program)
        await session.execute(text("UPDATE users SET name = 'from secret' WHERE name = 'secret'"))
        await session.execute(text("SELECT length('from secret')"))
        await session.execute(insert(Order).values(user_id=7))
        await program.ask()
    assert "secret" not in warnings[0]


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT name FROM users FOR UPDATE",
        "SELECT name FROM users FOR NO KEY UPDATE",
        "SELECT name FROM users FOR SHARE",
        "SELECT set_config('a.b', name, true) FROM users",
        "SELECT pg_advisory_xact_lock(id) FROM users",
        "SELECT pg_try_advisory_xact_lock_shared(id) FROM users",
        "SELECT pg_notify('a', 'b') FROM users",
        "SELECT * FROM generate_series(1, 2)",
        "SELECT name INTO TEMPORARY TABLE others FROM users",
        "SELECT name FROM users; DELETE FROM orders",
        "SELECT $$x$$ FROM users",
        "SELECT E'\\'' FROM users",
        "SET LOCAL statement_timeout = 1000",
        "LOCK TABLE users",
        "TABLE users",
        "DECLARE c CURSOR FOR SELECT 1",
    ],
)
async def test_text_that_may_do_more_than_read_is_kept_on_postgresql(
    statement: str, postgres_url: str, warnings: list[str]
) -> None:
    settings = ToolboxSettings(sql=SqlSettings(url=postgres_url.replace("postgresql:", "postgresql+psycopg:")))
    container = Container(models={"default": ScriptedChatModel(["ok"])}, settings=settings)
    async with container.register(sql.engine, sql.session, Desk), container.request_scope():
        session = await container.aget(AsyncSession)
        async with container.get(AsyncEngine).begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        await session.execute(text(statement))

        await container.get(Desk).chat("?")

        assert session.in_transaction()
        assert len(warnings) == 1


@pytest.mark.parametrize("called", [func.pg_advisory_xact_lock(User.id), func.set_config("a.b", User.name, True)])
async def test_functions_with_a_state_are_kept_in_statements_too(
    called: Any, postgres_url: str, warnings: list[str]
) -> None:
    settings = ToolboxSettings(sql=SqlSettings(url=postgres_url))
    container = Container(models={"default": ScriptedChatModel(["ok"])}, settings=settings)
    async with container.register(sql.engine, sql.session, Desk), container.request_scope():
        async with container.get(AsyncEngine).begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        session = await container.aget(AsyncSession)
        await session.execute(select(called))

        await container.get(Desk).chat("?")

        assert session.in_transaction()
        assert len(warnings) == 1


async def test_a_statement_that_changes_in_a_cte_is_kept(postgres_url: str, warnings: list[str]) -> None:
    settings = ToolboxSettings(sql=SqlSettings(url=postgres_url))
    container = Container(models={"default": ScriptedChatModel(["ok"])}, settings=settings)
    async with container.register(sql.engine, sql.session, Desk), container.request_scope():
        async with container.get(AsyncEngine).begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        session = await container.aget(AsyncSession)
        removed = delete(Order).returning(Order.id).cte("removed")
        await session.execute(select(removed.c.id))

        await container.get(Desk).chat("?")

        assert session.in_transaction()
        assert len(warnings) == 1


# --- at the same time


async def test_an_unread_stream_of_rows_is_left_alone(start: Start, warnings: list[str]) -> None:
    async with start() as program, program.container.request_scope():
        session = await session_of(program)
        await session.execute(insert(Order), [{"user_id": 7} for _ in range(100)])
        await session.commit()
        count = 0
        async for _ in await session.stream(select(Order).execution_options(yield_per=10)):
            if count % 30 == 0:
                assert await program.ask() == 1
            count += 1
        assert count == 101

        assert await program.ask() == 0
        result = await session.stream_scalars(text("SELECT id FROM orders"))
        assert await program.ask() == 1
        assert len(await result.all()) == 101
        assert await program.ask() == 0
        result = await (await session.connection()).stream_scalars(select(Order.id))
        assert await program.ask() == 1
        assert len(await result.all()) == 101
    assert warnings == []


async def test_a_session_that_another_task_uses_is_left_alone(start: Start, warnings: list[str]) -> None:
    async with start(while_a_model_works="raise") as program, program.container.request_scope():
        session = await session_of(program)
        begun, may_end = asyncio.Event(), asyncio.Event()

        def use(inner: Session) -> None:
            inner.execute(insert(Order).values(user_id=7))
            begun.set()
            await_only(may_end.wait())
            inner.rollback()

        other = asyncio.create_task(session.run_sync(use))
        await begun.wait()
        assert await program.ask() == 1
        may_end.set()
        await other
    assert warnings == []


async def test_statements_that_begin_during_a_release_wait_for_it(start: Start) -> None:
    async with start() as program, program.container.request_scope():
        session = await session_of(program)
        for _ in range(20):
            await session.get_one(User, 7)
            several = [program.ask(), *(session.scalar(select(User.name)) for _ in range(1)), program.ask()]
            answers = await asyncio.gather(*several, return_exceptions=True)
            assert [each for each in answers if isinstance(each, BaseException)] == []


async def test_two_services_at_once_share_a_session(start: Start) -> None:
    async with start() as program, program.container.request_scope():
        session = await session_of(program)
        for _ in range(10):
            await session.get_one(User, 7)
            await asyncio.gather(*(program.ask() for _ in range(5)))
            assert program.model.used[-5:] == [0] * 5


# --- failures


async def test_a_release_that_fails_is_logged_and_the_request_goes_on(
    postgres_url: str, postgres: Any, warnings: list[str]
) -> None:
    model = Watching()
    settings = ToolboxSettings(sql=SqlSettings(url=postgres_url))
    container = Container(models={"default": model}, settings=settings)
    async with container.register(sql.engine, sql.session, Desk), container.request_scope():
        engine = container.get(AsyncEngine)
        model.engines.append(engine)
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
            await connection.execute(insert(User).values(id=7, name="Ada"))
            await connection.execute(insert(Order).values(id=100, user_id=7))
        session = await container.aget(AsyncSession)
        user = await session.get_one(User, 7)
        backend = await session.scalar(text("SELECT pid FROM pg_stat_activity WHERE pid = pg_backend_pid()"))
        async with engine.connect() as other:
            await other.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": backend})
            await other.rollback()

        assert await container.get(Desk).chat("?") == "ok"

        assert model.used == [0]
        assert len(warnings) == 1
        assert "cannot give a connection back" in warnings[0]
        assert (user.name, [order.id for order in user.orders]) == (("Ada", [100]))  # still loaded
        user.questions += 1
        await session.commit()
        assert await session.scalar(select(User.questions)) == 1


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
