"""Nothing is lost while a model works: any sequence of statements, six requests at once, runs, and cancellations.

What a program does between two model requests must have the same outcome as without the model, whatever it does.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, Protocol

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, String, delete, func, insert, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from toolbox import Container, Named, RunSuspendedError, ToolboxSettings, produces, register_ai_service, sql, tool
from toolbox.interceptors import ToolInterceptor, ToolInvocation, ToolProceed, interceptors
from toolbox.runs import RunId, Runs, RunStore, approve, durable
from toolbox.settings import SqlSettings
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


class Base(DeclarativeBase): ...


class Row(Base):
    __tablename__ = "rows"
    id: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[str] = mapped_column(String(50))


@register_ai_service()
class Desk(Protocol):
    async def chat(self, question: str) -> str: ...


@register_ai_service()
class SyncDesk(Protocol):
    def chat(self, question: str) -> str: ...


numbers = itertools.count(100)
ROWS = select(Row.id, Row.value).order_by(Row.id)

# --- any sequence of statements

Step = Callable[[Session], Any]


def change_row(session: Session) -> None:
    if (row := session.get(Row, 1)) is not None:
        row.value += "!"


def remove_row(session: Session) -> None:
    if (row := session.get(Row, 2)) is not None:
        session.delete(row)


def in_savepoint(session: Session) -> None:
    with session.begin_nested():
        session.add(Row(id=next(numbers), value="in a savepoint"))


def undone_savepoint(session: Session) -> None:
    savepoint = session.begin_nested()
    session.execute(insert(Row).values(id=next(numbers), value="undone"))
    savepoint.rollback()


def refresh_all(session: Session) -> None:
    session.flush()  # a refresh drops changes that are not flushed, and then nothing may be lost
    for row in [*session.identity_map.values()]:
        if row not in session.deleted:
            session.refresh(row)


READING: dict[str, Step] = {
    "get": lambda session: session.get(Row, 1),
    "scalars": lambda session: session.scalars(select(Row)).all(),
    "count": lambda session: session.scalar(select(func.count()).select_from(Row)),
    "text": lambda session: session.execute(text("SELECT value FROM rows WHERE id > :id"), {"id": 0}).all(),
    "cte": lambda session: session.execute(select(select(Row.id).cte("ids"))).all(),
    "exists": lambda session: session.scalar(select(select(Row.id).exists())),
    "query": lambda session: session.query(Row).filter(Row.id > 0).all(),
    "refresh": refresh_all,
    "driver": lambda session: session.connection().exec_driver_sql("SELECT id FROM rows").all(),
}
CHANGING: dict[str, Step] = {
    "add": lambda session: session.add(Row(id=next(numbers), value="added")),
    "add and flush": lambda session: (session.add(Row(id=next(numbers), value="flushed")), session.flush()),
    "change": change_row,
    "remove": remove_row,
    "insert": lambda session: session.execute(insert(Row).values(id=next(numbers), value="inserted")),
    "insert many": lambda session: session.execute(insert(Row), [{"id": next(numbers), "value": "m"} for _ in "ab"]),
    "update": lambda session: session.execute(update(Row).where(Row.id == 1).values(value=Row.value + "?")),
    "delete": lambda session: session.execute(delete(Row).where(Row.id == 2)),
    "text insert": lambda session: session.execute(
        text("INSERT INTO rows VALUES (:id, 'text')"), {"id": next(numbers)}
    ),
    "text update": lambda session: session.execute(text("/* now */ UPDATE rows SET value = value || '.' WHERE id = 1")),
    "driver": lambda session: session.connection().exec_driver_sql(f"INSERT INTO rows VALUES ({next(numbers)}, 'd')"),
    "bulk": lambda session: session.bulk_save_objects([Row(id=next(numbers), value="bulk")]),
    "merge": lambda session: session.merge(Row(id=1, value="merged")),
    "savepoint": in_savepoint,
    "undone savepoint": undone_savepoint,
    "lock": lambda session: session.scalars(select(Row).with_for_update()).all(),
    "function": lambda session: session.scalar(select(func.length("four"))),
}
STEPS = {f"read: {name}": step for name, step in READING.items()} | {f"change: {k}": v for k, v in CHANGING.items()}
SEQUENCES = st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=6)


def may_lose(names: list[str]) -> bool:
    return any(name.startswith("change") for name in names)


async def new_rows(connection: AsyncConnection) -> None:
    await connection.run_sync(Base.metadata.create_all)
    await connection.execute(delete(Row))
    await connection.execute(insert(Row), [{"id": 1, "value": "one"}, {"id": 2, "value": "two"}])


async def stored(engine: AsyncEngine) -> list[tuple[int, str]]:
    async with engine.connect() as connection:
        return [(each.id, each.value) for each in await connection.execute(ROWS)]


def container_of(url: str, *replies: Any, **options: Any) -> Container:
    model = ScriptedChatModel(replies or ["ok"] * 10_000)
    made = Container(models={"default": model}, settings=ToolboxSettings(sql=SqlSettings(url=url, **options)))
    return made.register(sql.engine, sql.session, sql.sync_engine, sql.sync_session, Desk, SyncDesk)


BEFORE = [(1, "one"), (2, "two")]


async def test_what_a_rollback_undoes_is_the_same_with_a_model_in_between(database_url: str) -> None:
    """A release never commits a change: after a rollback, everything is as before. And a commit keeps everything."""
    async with container_of(database_url) as container:
        engine, desk = container.get(AsyncEngine), container.get(Desk)

        async def check(before: list[str], after: list[str], *, commits: bool) -> None:
            async with engine.begin() as connection:
                await new_rows(connection)
            async with container.request_scope():
                session = await container.aget(AsyncSession)
                for name in before:
                    await session.run_sync(STEPS[name])
                seen = await session.run_sync(lambda inner: {each: each.value for each in inner.identity_map.values()})
                await desk.chat("?")
                assert {each: vars(each).get("value") for each in seen} == seen  # loaded objects stay loaded
                if may_lose(before):
                    assert session.in_transaction()
                if before and not may_lose(before) and "read: driver" not in before:
                    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]  # of a queue pool
                for name in after:
                    await session.run_sync(STEPS[name])
                await desk.chat("?")
                if not commits:
                    await session.rollback()
                    assert await stored(engine) == BEFORE
                    return
                await session.flush()
                expected = [(each.id, each.value) for each in await session.execute(ROWS)]
                await session.commit()
                assert await stored(engine) == expected

        for name in STEPS:
            await check([name], [], commits=False)
            await check([name], [], commits=True)
        loop = asyncio.get_running_loop()

        @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
        @given(SEQUENCES, SEQUENCES, st.booleans())
        def run(before: list[str], after: list[str], commits: bool) -> None:
            asyncio.run_coroutine_threadsafe(check(before, after, commits=commits), loop).result(60)

        await asyncio.to_thread(run)


def test_the_same_holds_on_threads(database_url: str) -> None:
    with container_of(database_url) as container:
        engine, desk = container.get(Engine), container.get(SyncDesk)
        Base.metadata.create_all(engine)

        @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
        @given(SEQUENCES)
        def run(before: list[str]) -> None:
            with engine.begin() as connection:
                connection.execute(delete(Row))
                connection.execute(insert(Row), [{"id": 1, "value": "one"}, {"id": 2, "value": "two"}])
            with container.request_scope():
                session = container.get(Session)
                for name in before:
                    STEPS[name](session)
                desk.chat("?")
                if not may_lose(before) and "read: driver" not in before:
                    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]  # of a queue pool
                session.rollback()
            with engine.connect() as connection:
                assert [tuple(each) for each in connection.execute(ROWS)] == BEFORE

        run()


# --- few connections


@pytest.mark.parametrize("reads", [True, False], ids=["session", "nothing"])
async def test_six_requests_share_two_connections(reads: bool, database_url: str) -> None:
    asked, answer = asyncio.Semaphore(0), asyncio.Event()

    async def think(_: object) -> str:
        asked.release()
        await answer.wait()
        return "ok"

    options = {"pool_size": 2, "max_overflow": 0, "pool_timeout": 5.0}
    async with container_of(database_url, *[think] * 6, **options) as container:
        engine = container.get(AsyncEngine)
        async with engine.begin() as connection:
            await new_rows(connection)

        async def request() -> str:
            async with container.request_scope():
                session = await container.aget(AsyncSession)
                row = await session.get_one(Row, 1) if reads else None
                await container.get(Desk).chat("?")
                return "one" if row is None else row.value

        requests = [asyncio.create_task(request()) for _ in range(6)]
        async with asyncio.timeout(20):
            for _ in requests:
                await asked.acquire()  # all six models work at the same time
            if engine.dialect.name == "postgresql":
                async with engine.connect() as connection:
                    states = (
                        "SELECT state, count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> "
                    )
                    found = await connection.execute(text(f"{states}pg_backend_pid() GROUP BY state"))
                    assert "idle in transaction" not in {state for state, _ in found}
            assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]  # of a queue pool
            answer.set()
            assert await asyncio.gather(*requests) == ["one"] * 6


# --- cancellation, and statements at the same time


async def test_a_cancelled_request_leaves_a_session_that_works(database_url: str) -> None:
    async with container_of(database_url) as container:
        engine, desk = container.get(AsyncEngine), container.get(Desk)
        async with engine.begin() as connection:
            await new_rows(connection)
        async with container.request_scope():
            session = await container.aget(AsyncSession)
            for turns in range(30):
                row = await session.get_one(Row, 1)
                asking = asyncio.create_task(desk.chat("?"))
                for _ in range(turns):
                    await asyncio.sleep(0)
                asking.cancel()
                await asyncio.wait([asking])
                assert row.value == "one"
                assert await session.scalar(select(func.count()).select_from(Row)) == 2
        assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]  # of a queue pool


async def test_statements_at_any_moment_of_a_release_see_no_error(database_url: str) -> None:
    async with container_of(database_url) as container:
        engine, desk = container.get(AsyncEngine), container.get(Desk)
        async with engine.begin() as connection:
            await new_rows(connection)
        async with container.request_scope():
            session = await container.aget(AsyncSession)
            for turns in range(30):
                await session.get_one(Row, 1)
                asking = [asyncio.create_task(desk.chat("?")) for _ in range(2)]
                for _ in range(turns):
                    await asyncio.sleep(0)
                assert await session.scalar(select(func.count()).select_from(Row)) == 2
                await asyncio.gather(*asking)
            session.add(Row(id=3, value="three"))
            asking = [asyncio.create_task(desk.chat("?")) for _ in range(2)]
            await session.commit()
            await asyncio.gather(*asking)
        assert len(await stored(engine)) == 3


# --- runs


class Till:
    def __init__(self, session: AsyncSession) -> None:
        self.session = session

    @tool(requires_approval=True)
    @sql.transactional
    async def pay(self) -> str:
        """Pay."""
        await self.session.execute(update(Row).where(Row.id == 1).values(value="paid"))
        return "paid"


async def test_durable_calls_and_resumed_runs_release_too(database_url: str) -> None:
    used: list[int] = []

    def noting(reply: Any) -> Callable[[object], Any]:
        def note(_: object) -> Any:
            used.append(container.get(AsyncEngine).pool.checkedout())  # type: ignore[attr-defined]  # of a queue pool
            return reply

        return note

    class Books:
        def __init__(self, session: AsyncSession, desk: Desk) -> None:
            self.session, self.desk = session, desk

        @tool
        async def look(self) -> str:
            """Look, and ask another service."""
            await self.session.get_one(Row, 1)
            return await self.desk.chat("?")

    @register_ai_service(tools=(Books, Till))
    class Keeper(Protocol):
        @durable
        async def chat(self, question: str) -> str: ...

    look, answer = noting(tool_call("look")), noting("inner")
    replies = [look, answer, noting(tool_call("pay")), look, answer, noting("done")]
    container = container_of(database_url, *replies)
    async with container.register(sql.SqlRunStore, Books, Till, Keeper):
        async with container.get(AsyncEngine).begin() as connection:
            await new_rows(connection)
        async with container.request_scope():
            session = await container.aget(AsyncSession)
            await session.get_one(Row, 1)  # the connection of the caller, who waits
            with pytest.raises(RunSuspendedError) as suspended:
                await container.get(Keeper).chat("?")
        [pending] = suspended.value.pending
        runs = await container.aget(Runs)
        result = await runs.resume(suspended.value.run_id, {pending.id: approve()})
        assert result.content == "done"
    assert used == [0] * 6


async def test_a_tool_in_the_transaction_of_the_program_is_recorded_apart(postgres_url: str) -> None:
    """Such a tool never counts as recorded in its own transaction: its work is committed later, or not at all."""

    @produces(scope="request", name="shared")
    async def shared(engine: AsyncEngine) -> AsyncIterator[AsyncSession]:
        async with sql.open_session(engine) as session:
            yield session

    class Shop:
        def __init__(self, shared: Annotated[AsyncSession, Named("shared")]) -> None:
            self.session = shared

        @tool
        @sql.transactional
        async def sell(self) -> str:
            """Sell."""
            await self.session.execute(update(Row).where(Row.id == 1).values(value="sold"))
            return "sold"

    class Around(ToolInterceptor):
        async def around_tool(self, call: ToolInvocation, proceed: ToolProceed) -> Any:
            session = await container.aget(AsyncSession, "shared")
            async with session.begin():
                result = await proceed(call)
                assert (await stored(container.get(AsyncEngine)))[0] == (1, "one")  # nothing is committed
                records = await (await container.aget(RunStore)).records("run 1")
                assert any("sold" in each.data for each in records)
            return result

    @register_ai_service(tools=Shop)
    @interceptors(Around)
    class Seller(Protocol):
        @durable
        async def chat(self, run: RunId, question: str) -> str: ...

    container = container_of(postgres_url, tool_call("sell"), "done")
    async with container.register(sql.SqlRunStore, shared, Shop, Seller):
        async with container.get(AsyncEngine).begin() as connection:
            await new_rows(connection)
        assert await container.get(Seller).chat("run 1", "?") == "done"
        assert (await stored(container.get(AsyncEngine)))[0] == (1, "sold")
