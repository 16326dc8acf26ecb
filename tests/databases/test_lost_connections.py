"""Runs on PostgreSQL while connections are lost, stand still, or lead to a server that crashes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from tests.runs.one_run import stored_in
from toolbox import sql
from toolbox.errors import LeaseLostError
from toolbox.runs.run_leases import RunLeases
from toolbox.runs.store import InMemoryRunStore, RunChanges, StoredRecord, StoredRun
from toolbox.sql import SqlRunStore

from .conftest import restart
from .network import Network

pytestmark = pytest.mark.anyio

NOW = datetime.now(UTC)


def run_of(run_id: str, status: Any = "running") -> StoredRun:
    return StoredRun(
        id=run_id,
        service="shop.Desk",
        method="chat",
        status=status,
        generation=0,
        owner=None,
        version=1,
        conversation=None,
        created_at=NOW,
        updated_at=NOW,
        document="{}",
    )


def record(key: str) -> StoredRecord:
    return StoredRecord(key, "result", "{}")


@asynccontextmanager
async def store_in(url: str, lease: float = 15.0) -> AsyncIterator[tuple[SqlRunStore, AsyncEngine]]:
    async with sql.open_engine(url) as engine:
        store = SqlRunStore(engine, lease)
        await store.open()
        yield store, engine


async def test_everything_a_run_has_written_survives_a_crash_of_a_server_that_commits_late(
    forgetful_postgres: Any, forgetful_url: str
) -> None:
    async with store_in(forgetful_url, 60.0) as (store, engine):
        async with engine.begin() as connection:
            await connection.execute(text("CREATE TABLE ledger (cents INTEGER)"))

        async def crashed() -> None:
            await asyncio.to_thread(restart, forgetful_postgres, "immediate")

        await store.create(run_of("made"))
        await crashed()
        assert await store.load("made") is not None

        owned = await store.acquire("made", "me")
        assert owned is not None
        await crashed()
        assert await store.renew("made", owned.generation)

        await store.append("made", owned.generation, [record("0")])
        await crashed()
        assert [each.key for each in await store.records("made")] == ["0"]

        async with engine.begin() as connection:
            await connection.execute(text("INSERT INTO ledger VALUES (100)"))
            await connection.run_sync(store.record_in, "made", owned.generation, record("1"))
        await crashed()
        assert [each.key for each in await store.records("made")] == ["0", "1"]
        async with engine.connect() as connection:
            assert await connection.scalar(text("SELECT SUM(cents) FROM ledger")) == 100

        await store.add_events("made", owned.generation, ["one", "two"])
        await crashed()
        assert [each.number for each in await store.events("made", 0)] == [1, 2]

        await store.append("made", owned.generation, [], RunChanges(status="completed"), ["three"])
        await crashed()
        ended = await store.load("made")
        assert ended is not None
        assert ended.status == "completed"


async def test_an_owner_that_is_paused_within_its_transaction_loses_the_run(postgres_url: str) -> None:
    async with store_in(postgres_url, 0.5) as (store, engine), store_in(postgres_url, 0.5) as (other, _):
        await store.create(run_of("run"), owner="still")
        async with engine.connect() as connection:
            transaction = await connection.begin()
            await connection.run_sync(store.record_in, "run", 1, record("0"))  # and no commit
            taken = None
            async with asyncio.timeout(60):
                while taken is None:
                    with suppress(DBAPIError):
                        taken = await other.acquire("run", "other")
            assert taken.generation == 2
            with pytest.raises(DBAPIError):
                await transaction.commit()
            await connection.invalidate()
        assert await other.records("run") == []
        with pytest.raises(LeaseLostError):
            await store.append("run", 1, [record("0")])


async def test_writing_events_never_leaves_a_lock_to_a_paused_process(postgres_url: str) -> None:
    async with store_in(postgres_url) as (store, engine):
        await store.create(run_of("run"), owner="me")
        sent: list[str] = []
        event.listen(engine.sync_engine, "before_cursor_execute", lambda *args: sent.append(args[2]))
        event.listen(engine.sync_engine, "commit", lambda _: sent.append("COMMIT"))
        await store.add_events("run", 1, ["one", "two", "three"])

        assert len([each for each in sent if each != "COMMIT"]) == 1
        found = await store.events("run", 0)
        assert [(each.number, each.data) for each in found] == [(1, "one"), (2, "two"), (3, "three")]


# --- a network that stops delivering


async def test_a_connection_whose_other_end_is_gone_does_not_hold_up_a_write(postgres_url: str) -> None:
    network = Network(postgres_url)
    async with network.opened() as url, store_in(url, 60.0) as (store, _):
        await store.create(run_of("run"), owner="me")
        store._limit = 1.5  # seconds; else two leases
        network.cut()
        async with asyncio.timeout(50):
            await store.append("run", 1, [record("0")])  # the next try gets a new connection
        assert [each.key for each in await store.records("run")] == ["0"]


async def test_a_renewal_that_waits_does_not_delay_the_others() -> None:
    waits = asyncio.Event()
    renewed: dict[str, int] = {}
    enough = asyncio.Event()

    class Store(InMemoryRunStore):
        async def renew(self, run_id: str, generation: int) -> bool:
            renewed[run_id] = renewed.get(run_id, 0) + 1
            if run_id == "slow":
                await waits.wait()
            elif renewed[run_id] == 5:
                enough.set()
            return True

    store = Store()
    store.lease = 0.06
    for name in ("slow", "fast"):
        await store.create(run_of(name), owner="me")

    owned, (slow, fast) = (
        RunLeases(stored_in(store)),
        [replace(run_of(each), generation=1) for each in ("slow", "fast")],
    )
    async with asyncio.timeout(60), owned.hold(slow), owned.hold(fast):
        await enough.wait()
        assert renewed["slow"] == 1
        waits.set()
    await owned.stop()
