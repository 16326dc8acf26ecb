"""The run store on SQLite and on PostgreSQL: the checks of all stores, and what only databases have."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from toolbox import Container, IllegalConfigurationError, sql
from toolbox.errors import LeaseLostError
from toolbox.runs.store import RunChanges, RunStore, StoredRecord, StoredRun
from toolbox.sql import SqlRunStore
from toolbox.store_checks.run_stores import NewRunStore, RunStoreCheck
from toolbox.testing import run_store_checks

pytestmark = pytest.mark.anyio

_ids = itertools.count(1)


def new_run(status: str = "running", **values: Any) -> StoredRun:
    """A run with an id that no other test uses."""
    now = datetime.now(UTC)
    given = {"service": "bank:Transfers", "method": "transfer", "document": '{"version": 1}'} | values
    return StoredRun(id=f"run {next(_ids)}", status=status, created_at=now, updated_at=now, **given)  # type: ignore[arg-type]


@pytest.fixture(params=["sqlite", "postgresql"])
async def new_store(request: pytest.FixtureRequest) -> AsyncIterator[NewRunStore]:
    """Creates stores of the same runs, like those of two processes."""
    url = request.getfixturevalue("sqlite_runs_url" if request.param == "sqlite" else "postgres_runs_url")
    async with sql.open_engine(url) as one, sql.open_engine(url) as other:
        engines = itertools.cycle((one, other))
        yield lambda lease: SqlRunStore(next(engines), lease)


@pytest.mark.parametrize("check", run_store_checks())
async def test_the_store_keeps_the_promises_of_a_run_store(check: RunStoreCheck, new_store: NewRunStore) -> None:
    await check(new_store)


async def test_ten_thousand_suspended_runs_stay_fast(database_url: str) -> None:
    async with sql.open_engine(database_url) as engine:
        store = SqlRunStore(engine)
        await store.open()
        rows = [
            {"id": f"r{n}", "at": n, "conversation": f"room {n}", "document": '{"text": "' + "x" * 2000 + '"}'}
            for n in range(10_000)
        ]
        async with engine.begin() as connection:
            await connection.execute(
                text(
                    "INSERT INTO toolbox_runs (id, service, method, status, generation, version, conversation, "
                    "created_at, updated_at, document) "
                    "VALUES (:id, 'shop:Desk', 'chat', 'suspended', 1, 1, :conversation, :at, :at, :document)"
                ),
                rows,
            )
            await connection.execute(
                text(
                    "INSERT INTO toolbox_runs_leases (run_id, generation, until, events) "
                    "SELECT id, generation, 0, 0 FROM toolbox_runs"
                )
            )
        started = time.perf_counter()
        assert len(await store.find(status="suspended")) == 100
        assert await store.suspended_in("room 5000") == "r5000"
        assert await store.lapsed() == []
        assert await store.change("r5000", 1, RunChanges(status="running")) is not None
        assert await store.acquire("r5000", "one") is not None
        assert await store.purge(datetime.now(UTC)) == 0
        assert time.perf_counter() - started < 1

        async with engine.connect() as connection:
            explain = "EXPLAIN QUERY PLAN" if engine.dialect.name == "sqlite" else "EXPLAIN"
            if engine.dialect.name == "postgresql":
                await connection.execute(text("ANALYZE toolbox_runs"))
            listed = "SELECT id FROM toolbox_runs WHERE status = 'suspended' ORDER BY created_at DESC, id DESC LIMIT 9"
            plan = str((await connection.execute(text(f"{explain} {listed}"))).all())
            assert "toolbox_runs_status_created" in plan or "toolbox_runs_created" in plan


# --- databases


async def test_concurrent_programs_can_prepare_a_new_database(database_url: str) -> None:
    async with AsyncExitStack() as stack:
        stores = [SqlRunStore(await stack.enter_async_context(sql.open_engine(database_url))) for _ in range(6)]

        await asyncio.gather(*(each.open() for each in stores))

        assert all([await each.ready() for each in stores])


async def test_an_engine_of_the_programs_own_will_do(sqlite_url: str) -> None:
    engines = [create_async_engine(sqlite_url.replace("sqlite:", "sqlite+aiosqlite:")) for _ in range(3)]
    stores = [SqlRunStore(each) for each in engines]

    await asyncio.gather(*(each.open() for each in stores))
    runs = [new_run() for _ in range(10)]
    created = await asyncio.gather(*(each.create(run, owner="x") for run in runs for each in stores))

    assert created.count(True) == len(runs)
    for each in engines:
        await each.dispose()


async def test_a_tools_transaction_and_its_record_are_one(database_url: str) -> None:
    async with sql.open_engine(database_url) as engine:
        store = SqlRunStore(engine)
        await store.open()
        run, record = new_run(), StoredRecord("0", "result", "a")
        await store.create(run, owner="one")

        async def write(generation: int, *, commit: bool) -> None:
            async with AsyncSession(engine) as session:
                await session.run_sync(
                    lambda session: store.record_in(session.connection(), run.id, generation, record)
                )
                if commit:
                    await session.commit()

        await write(1, commit=False)
        assert await store.records(run.id) == []
        with pytest.raises(LeaseLostError):
            await write(2, commit=True)
        assert await store.records(run.id) == []
        await write(1, commit=True)
        assert await store.records(run.id) == [record]


async def test_a_lease_is_renewed_while_a_serializable_transaction_waits(postgres_url: str) -> None:
    async with sql.open_engine(postgres_url) as engine:
        store = SqlRunStore(engine)
        await store.open()
        run = new_run()
        await store.create(run, owner="one")

        async with AsyncSession(engine) as session:
            await session.connection(execution_options={"isolation_level": "SERIALIZABLE"})
            await session.execute(text("SELECT 1"))
            assert await store.renew(run.id, 1)  # after the transaction's snapshot
            await store.append(run.id, 1, [StoredRecord("1", "result", "of another tool")])
            await store.add_events(run.id, 1, ["of another tool"])
            await session.run_sync(
                lambda session: store.record_in(session.connection(), run.id, 1, StoredRecord("0", "result", "a"))
            )
            assert await asyncio.wait_for(store.renew(run.id, 1), 60)  # seconds; the lock would never end
            await session.commit()

        assert len(await store.records(run.id)) == 2


async def test_the_stores_database_is_recognized(sqlite_url: str, postgres_url: str) -> None:
    async with sql.open_engine(sqlite_url) as engine, sql.open_engine(postgres_url) as other:
        store = SqlRunStore(engine)
        assert store.uses(engine)
        assert store.uses(engine.sync_engine)
        assert store.uses(engine.execution_options(isolation_level="SERIALIZABLE"))
        assert not store.uses(other)
        assert not store.uses(None)
        blocking, elsewhere = create_engine(sqlite_url), create_engine(f"{sqlite_url}2")
        assert store.uses(blocking)
        assert not store.uses(elsewhere)
        async with engine.connect() as connection:
            assert store.uses(connection.sync_connection)


async def test_invalid_arguments_are_rejected() -> None:
    with pytest.raises(TypeError, match="SqlRunStore needs an AsyncEngine"):
        SqlRunStore(create_engine("sqlite://"))  # type: ignore[arg-type]
    engine = create_async_engine("sqlite+aiosqlite://")
    for lease in (0, -1, float("inf"), float("nan"), True):
        with pytest.raises(ValueError, match="lease="):
            SqlRunStore(engine, lease=lease)


async def test_a_database_with_a_newer_schema_is_not_changed(database_url: str) -> None:
    async with sql.open_engine(database_url) as engine:
        await SqlRunStore(engine).open()
        async with engine.begin() as connection:
            await connection.execute(text("UPDATE toolbox_schemas SET version = 99"))

        with pytest.raises(IllegalConfigurationError, match="version 99"):
            await SqlRunStore(engine).open()


async def test_a_container_finds_it_as_its_run_store() -> None:
    assert RunStore in SqlRunStore.__mro__  # so that it needs no bind
    assert Container  # registered in the tests of runs
