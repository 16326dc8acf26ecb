"""Every run store: headers, records, events, leases and fencing; in memory, on SQLite and on PostgreSQL."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from toolbox import Container, IllegalConfigurationError, sql
from toolbox.errors import LeaseLostError
from toolbox.runs.store import InMemoryRunStore, RunChanges, RunStore, StoredRecord, StoredRun
from toolbox.sql import SqlRunStore

pytestmark = pytest.mark.anyio

_ids = itertools.count(1)
LEASE = 1.0  # seconds, in the tests that wait for its end


def new_run(status: str = "running", **values: Any) -> StoredRun:
    """A run with an id that no other test uses."""
    now = datetime.now(UTC)
    given = {"service": "bank:Transfers", "method": "transfer", "document": '{"version": 1}'} | values
    return StoredRun(id=f"run {next(_ids)}", status=status, created_at=now, updated_at=now, **given)  # type: ignore[arg-type]


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
async def stores(request: pytest.FixtureRequest) -> AsyncIterator[Callable[[], Awaitable[RunStore]]]:
    """Creates stores of the same runs: those of separate processes, where there can be several."""
    lease = LEASE if request.node.get_closest_marker("waits_for_the_lease") else 60
    if request.param == "memory":
        only = InMemoryRunStore(lease=lease)

        async def same() -> RunStore:
            return only

        yield same
        return
    url = request.getfixturevalue("sqlite_runs_url" if request.param == "sqlite" else "postgres_runs_url")
    async with AsyncExitStack() as stack:

        async def another() -> RunStore:
            store = SqlRunStore(await stack.enter_async_context(sql.open_engine(url)), lease=lease)
            await store.open()
            return store

        yield another


@pytest.fixture
async def store(stores: Callable[[], Awaitable[RunStore]]) -> RunStore:
    return await stores()


@pytest.fixture
async def other(stores: Callable[[], Awaitable[RunStore]]) -> RunStore:
    """The store of another process."""
    return await stores()


async def test_a_stored_run_is_read_unchanged(store: RunStore, other: RunStore) -> None:
    run = new_run(conversation="room 7", document='{"text": "ä 🦜 \\u0000 \'quoted\' \\\\"}')
    before = datetime.now(UTC) - timedelta(seconds=1)

    assert await store.create(run, [StoredRecord("#begin", "begin", '"é\\u0000"')], owner="one")

    found = await other.load(run.id)
    assert found is not None
    assert (found.id, found.service, found.method) == (run.id, "bank:Transfers", "transfer")
    assert (found.status, found.conversation, found.document) == ("running", "room 7", run.document)
    assert (found.generation, found.owner) == (1, "one")
    assert before < found.created_at <= found.updated_at < datetime.now(UTC) + timedelta(seconds=1)
    assert await other.records(run.id) == [StoredRecord("#begin", "begin", '"é\\u0000"')]


async def test_an_id_is_used_once(store: RunStore, other: RunStore) -> None:
    run = new_run()
    assert await store.create(run, owner="one")

    assert not await other.create(run, [StoredRecord("#begin", "begin", "{}")], owner="other")

    found = await store.load(run.id)
    assert found is not None
    assert found.owner == "one"
    assert await store.records(run.id) == []


async def test_one_of_many_creators_wins(store: RunStore, other: RunStore) -> None:
    run = new_run()

    created = await asyncio.gather(*(each.create(run, owner="x") for each in (store, other) * 4))

    assert created.count(True) == 1


async def test_an_unknown_run_has_nothing(store: RunStore) -> None:
    assert await store.load("unknown") is None
    assert await store.records("unknown") == []
    assert await store.events("unknown", 0) == []
    assert await store.acquire("unknown", "one") is None
    assert not await store.renew("unknown", 1)
    await store.delete("unknown")


# --- records


async def test_records_come_back_in_the_order_written(store: RunStore, other: RunStore) -> None:
    run = new_run()
    await store.create(run, [StoredRecord("#begin", "begin", "{}")], owner="one")

    await store.append(run.id, 1, [StoredRecord("#0", "reply", "a")])
    await store.append(run.id, 1, [StoredRecord("0#start", "start", "b"), StoredRecord("0", "result", "c")])
    await store.append(run.id, 1, [StoredRecord("#1", "reply", "d")], RunChanges(document='{"version": 2}'))

    assert [each.key for each in await other.records(run.id)] == ["#begin", "#0", "0#start", "0", "#1"]
    found = await other.load(run.id)
    assert found is not None
    assert found.document == '{"version": 2}'


@pytest.mark.parametrize("along", [(), (StoredRecord("1", "result", "b"),)])
async def test_the_same_record_again_is_ignored(store: RunStore, along: tuple[StoredRecord, ...]) -> None:
    run = new_run()
    await store.create(run, owner="one")
    record = StoredRecord("0", "result", "a")
    await store.append(run.id, 1, [record])

    await store.append(run.id, 1, [record, *along])

    assert await store.records(run.id) == [record, *along]


@pytest.mark.parametrize("along", [(), (StoredRecord("0#start", "start", "{}"),)])
async def test_a_record_that_replaces_another_one_keeps_its_place(
    store: RunStore, along: tuple[StoredRecord, ...]
) -> None:
    run = new_run(status="running")
    await store.create(run, owner="a")
    first = StoredRecord("0", "result", "raw")
    await store.append(run.id, 1, [first, StoredRecord("#r1", "reply", "{}")])
    await store.append(run.id, 1, [StoredRecord("0", "result", "judged", replaces=True), *along])
    await store.append(run.id, 1, [first])

    found = await store.records(run.id)
    assert found[:2] == [StoredRecord("0", "result", "judged"), StoredRecord("#r1", "reply", "{}")]
    with pytest.raises(LeaseLostError):
        await store.append(run.id, 7, [StoredRecord("0", "result", "late", replaces=True)])
    assert await store.records(run.id) == found


async def test_records_of_the_same_place_belong_to_one_run_each(store: RunStore) -> None:
    one, two = new_run(), new_run()
    for run in (one, two):
        await store.create(run, owner="one")
        await store.append(run.id, 1, [StoredRecord("0", "result", run.id)])

    assert [each.data for each in await store.records(two.id)] == [two.id]


# --- leases and fencing


async def test_a_run_has_one_owner(store: RunStore, other: RunStore) -> None:
    run = new_run()
    await store.create(run, owner="one")

    assert await other.acquire(run.id, "other") is None
    assert run.id not in await other.lapsed()


async def test_a_run_without_an_owner_is_taken_once(store: RunStore, other: RunStore) -> None:
    run = new_run()
    await store.create(run, owner=None)
    assert run.id in await other.lapsed()

    taken = await asyncio.gather(*(each.acquire(run.id, "x") for each in (store, other) * 4))

    [owned] = [each for each in taken if each is not None]
    assert owned.generation == 1
    assert owned.status == "running"
    assert run.id not in await other.lapsed()


@pytest.mark.waits_for_the_lease
async def test_renewing_keeps_a_run(store: RunStore, other: RunStore) -> None:
    run = new_run()
    await store.create(run, owner="one")

    until = time.monotonic() + 2 * LEASE
    while time.monotonic() < until:
        assert await store.renew(run.id, 1)
        assert await other.acquire(run.id, "other") is None
        await asyncio.sleep(LEASE / 10)


async def lapse(store: RunStore, run_id: str) -> None:
    """Waits until the lease has lapsed."""
    until = time.monotonic() + 30
    while run_id not in await store.lapsed():
        assert time.monotonic() < until
        await asyncio.sleep(0.02)


@pytest.mark.waits_for_the_lease
async def test_an_owner_that_lost_its_run_writes_nothing_more(store: RunStore, other: RunStore) -> None:
    run = new_run()
    await store.create(run, owner="one")
    await lapse(other, run.id)
    taken = await other.acquire(run.id, "other")
    assert taken is not None
    assert taken.generation == 2

    record = StoredRecord("0", "result", "late")
    with pytest.raises(LeaseLostError):
        await store.append(run.id, 1, [record])
    with pytest.raises(LeaseLostError):
        await store.append(run.id, 1, [record, StoredRecord("1", "result", "late")])
    with pytest.raises(LeaseLostError):
        await store.append(run.id, 1, [record], RunChanges(status="completed"))
    with pytest.raises(LeaseLostError):
        await store.append(run.id, 1, [record], None, ["late"])
    with pytest.raises(LeaseLostError):
        await store.add_events(run.id, 1, ["late"])
    assert not await store.renew(run.id, 1)
    await store.release(run.id, 1)

    assert await other.records(run.id) == []
    assert await other.events(run.id, 0) == []
    found = await other.load(run.id)
    assert found is not None
    assert (found.status, found.owner) == ("running", "other")
    await other.append(run.id, 2, [record])


@pytest.mark.waits_for_the_lease
async def test_an_owner_that_is_only_late_keeps_its_run(store: RunStore, other: RunStore) -> None:
    run = new_run()
    await store.create(run, owner="one")
    await lapse(other, run.id)

    assert await store.renew(run.id, 1)
    await store.append(run.id, 1, [StoredRecord("0", "result", "a")])

    assert await other.acquire(run.id, "other") is None


async def test_a_released_run_is_available_immediately(store: RunStore, other: RunStore) -> None:
    run = new_run()
    await store.create(run, owner="one")

    await store.release(run.id, 1)

    assert run.id in await other.lapsed()
    assert not await store.renew(run.id, 1)
    assert await other.acquire(run.id, "other") is not None


@pytest.mark.parametrize("status", ["suspended", "completed", "failed", "cancelled"])
async def test_only_running_runs_are_taken_over(store: RunStore, other: RunStore, status: str) -> None:
    run = new_run()
    await store.create(run, owner="one")
    await store.append(run.id, 1, [], RunChanges(status=status))

    assert await other.acquire(run.id, "other") is None
    assert run.id not in await other.lapsed()
    found = await other.load(run.id)
    assert found is not None
    assert (found.status, found.owner) == (status, None)


# --- changes from elsewhere


async def test_one_of_two_concurrent_changes_wins(store: RunStore, other: RunStore) -> None:
    run = new_run()
    await store.create(run, owner="one")
    await store.append(run.id, 1, [], RunChanges(status="suspended"))
    found = await store.load(run.id)
    assert found is not None

    changed = await asyncio.gather(
        *(
            each.change(
                run.id,
                found.version,
                RunChanges(status="running", document=str(name), owner=str(name)),
                [StoredRecord(f"answer {name}", "answer", str(name))],
            )
            for name, each in enumerate([store, other] * 3)
        )
    )

    [winner] = [each for each in changed if each is not None]
    assert winner.document == winner.owner
    assert (winner.status, winner.generation) == ("running", 2)
    assert await other.load(run.id) == winner
    assert [each.data for each in await other.records(run.id)] == [winner.document]
    assert await other.acquire(run.id, "third") is None
    await store.append(run.id, 2, [StoredRecord("0", "result", "a")])


async def test_a_resumed_run_without_an_owner_is_available_immediately(store: RunStore, other: RunStore) -> None:
    run = new_run()
    await store.create(run, owner="one")
    await store.append(run.id, 1, [], RunChanges(status="suspended"))
    found = await store.load(run.id)
    assert found is not None

    assert await other.change(run.id, found.version, RunChanges(status="running")) is not None

    assert await other.acquire(run.id, "other") is not None


async def test_a_change_of_the_status_fences_the_owner(store: RunStore, other: RunStore) -> None:
    run = new_run()
    await store.create(run, owner="one")
    found = await other.load(run.id)
    assert found is not None

    assert await other.change(run.id, found.version, RunChanges(status="cancelled")) is not None

    with pytest.raises(LeaseLostError):
        await store.append(run.id, 1, [StoredRecord("0", "result", "a")])
    assert not await store.renew(run.id, 1)


async def test_a_run_can_lose_its_owner_and_is_then_available_immediately(store: RunStore, other: RunStore) -> None:
    run = new_run()
    await store.create(run, owner="one")
    found = await other.load(run.id)
    assert found is not None

    changed = await other.change(run.id, found.version, RunChanges(owner=None))

    assert changed is not None
    assert (changed.status, changed.owner, changed.document) == ("running", None, found.document)
    with pytest.raises(LeaseLostError):
        await store.append(run.id, 1, [StoredRecord("0", "result", "a")])
    assert await other.acquire(run.id, "other") is not None


async def test_an_owner_keeps_its_run_when_something_else_changes(store: RunStore, other: RunStore) -> None:
    run = new_run()
    await store.create(run, owner="one")
    found = await other.load(run.id)
    assert found is not None

    assert await other.change(run.id, found.version, RunChanges(document="{}")) is not None

    assert await store.renew(run.id, 1)
    await store.append(run.id, 1, [StoredRecord("0", "result", "a")])


# --- events


async def test_events_are_numbered_and_read_by_any_process(store: RunStore, other: RunStore) -> None:
    run = new_run()
    await store.create(run, owner="one")

    await store.add_events(run.id, 1, ["a", "b"])
    await store.append(run.id, 1, [], RunChanges(status="suspended"), ["c"])

    found = await other.events(run.id, 0)
    assert [(each.number, each.data) for each in found] == [(1, "a"), (2, "b"), (3, "c")]
    assert all(abs(datetime.now(UTC) - each.at) < timedelta(minutes=1) for each in found)
    assert [each.number for each in await other.events(run.id, 2)] == [3]
    assert [each.number for each in await other.events(run.id, 0, limit=2)] == [1, 2]
    assert await other.events(run.id, 3) == []


async def test_the_next_owner_continues_the_numbers(store: RunStore, other: RunStore) -> None:
    run = new_run()
    await store.create(run, owner="one")
    await store.add_events(run.id, 1, ["a"])
    await store.release(run.id, 1)
    await other.acquire(run.id, "other")

    await other.add_events(run.id, 2, ["b"])

    assert [(each.number, each.data) for each in await store.events(run.id, 0)] == [(1, "a"), (2, "b")]


async def test_events_written_at_once_have_separate_numbers(store: RunStore) -> None:
    run = new_run()
    await store.create(run, owner="one")

    await asyncio.gather(*(store.add_events(run.id, 1, [str(each), str(each)]) for each in range(8)))

    assert [each.number for each in await store.events(run.id, 0)] == list(range(1, 17))


# --- finding and deleting


async def test_runs_are_found_by_status_and_service_newest_first(store: RunStore) -> None:
    service = f"shop:Desk{next(_ids)}"
    runs = [new_run(status, service=service) for status in ("running", "suspended", "running")]
    for run in runs:
        await store.create(run, owner=None)
        await asyncio.sleep(0.003)  # times are stored in milliseconds

    assert [each.id for each in await store.find(service=service)] == [each.id for each in reversed(runs)]
    assert [each.id for each in await store.find(service=service, status="running")] == [runs[2].id, runs[0].id]
    assert [each.id for each in await store.find(service=service, limit=1)] == [runs[2].id]
    assert await store.find(service="shop:Unknown") == []


async def test_the_suspended_run_of_a_conversation_is_found(store: RunStore, other: RunStore) -> None:
    run = new_run(conversation=f"room {next(_ids)}")
    await store.create(run, owner="one")
    assert run.conversation is not None
    assert await other.suspended_in(run.conversation) is None

    await store.append(run.id, 1, [], RunChanges(status="suspended"))

    assert await other.suspended_in(run.conversation) == run.id
    assert await other.suspended_in("room 0") is None


async def test_purging_deletes_old_runs_that_have_ended(store: RunStore) -> None:
    kept, ended = new_run(), new_run()
    for run in (kept, ended):
        await store.create(run, [StoredRecord("#begin", "begin", "{}")], owner="one")
        await store.add_events(run.id, 1, ["a"])
    await store.append(ended.id, 1, [], RunChanges(status="failed"))

    assert await store.purge(datetime.now(UTC) - timedelta(hours=1)) == 0
    assert await store.purge(datetime.now(UTC) + timedelta(hours=1)) == 1

    assert await store.load(ended.id) is None
    assert await store.records(ended.id) == []
    assert await store.events(ended.id, 0) == []
    assert await store.load(kept.id) is not None
    assert len(await store.records(kept.id)) == len(await store.events(kept.id, 0)) == 1


async def test_a_deleted_run_leaves_nothing(store: RunStore) -> None:
    run = new_run()
    await store.create(run, [StoredRecord("#begin", "begin", "{}")], owner="one")
    await store.add_events(run.id, 1, ["a"])

    await store.delete(run.id)

    assert await store.load(run.id) is None
    assert await store.create(run, owner="one")
    assert await store.records(run.id) == []
    assert await store.events(run.id, 0) == []


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
