"""Sessions that are in use while they are released, and releases that fail."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import insert, select, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session
from sqlalchemy.util import await_only

from tests.databases.open_sessions.desk import Base, Desk, Order, Start, User, Watching, session_of
from toolbox import Container, ToolboxSettings, sql
from toolbox.settings import SqlSettings

pytestmark = pytest.mark.anyio


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
