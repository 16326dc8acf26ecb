"""Sessions while a model works: what has only read gives its connection back, and what may be lost is kept.

Not here: other tasks and failures (`test_concurrent_releases`), and other ways to ask a model
(`test_releases_before_requests`).
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from sqlalchemy import delete, func, insert, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession

from tests.databases.open_sessions.desk import Base, Desk, Order, Start, StreamingDesk, User, change, session_of
from toolbox import Container, OpenTransactionError, ToolboxSettings, sql
from toolbox.settings import SqlSettings
from toolbox.testing import ScriptedChatModel

pytestmark = pytest.mark.anyio


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


async def is_kept(statement: Any, url: str) -> bool:
    """Return True if a session that has executed the statement keeps its transaction while a model is asked."""
    container = Container(
        models={"default": ScriptedChatModel(["ok"])}, settings=ToolboxSettings(sql=SqlSettings(url=url))
    )
    async with container.register(sql.engine, sql.session, Desk), container.request_scope():
        async with container.get(AsyncEngine).begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        session = await container.aget(AsyncSession)
        await session.execute(statement)
        await container.get(Desk).chat("?")
        return session.in_transaction()


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
    url = postgres_url.replace("postgresql:", "postgresql+psycopg:")

    assert await is_kept(text(statement), url)
    assert len(warnings) == 1


@pytest.mark.parametrize("called", [func.pg_advisory_xact_lock(User.id), func.set_config("a.b", User.name, True)])
async def test_functions_with_a_state_are_kept_in_statements_too(
    called: Any, postgres_url: str, warnings: list[str]
) -> None:
    assert await is_kept(select(called), postgres_url)
    assert len(warnings) == 1


async def test_a_statement_that_changes_in_a_cte_is_kept(postgres_url: str, warnings: list[str]) -> None:
    removed = delete(Order).returning(Order.id).cte("removed")

    assert await is_kept(select(removed.c.id), postgres_url)
    assert len(warnings) == 1
