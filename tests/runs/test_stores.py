"""Stores of runs: headers, records, leases, fencing and events. Every store passes the same tests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from toolbox.runs import (
    KEEP,
    InMemoryRunStore,
    LeaseLostError,
    RunChanges,
    RunStore,
    StoredRecord,
    StoredRun,
    ownership_after,
)

pytestmark = pytest.mark.anyio

NOW = datetime(2026, 1, 2, tzinfo=UTC)


@asynccontextmanager
async def in_memory(lease: float) -> AsyncIterator[RunStore]:
    yield InMemoryRunStore(lease)


STORES = [in_memory]


@pytest.fixture(params=STORES, ids=lambda each: each.__name__)
async def store(request: pytest.FixtureRequest) -> AsyncIterator[RunStore]:
    async with request.param(60.0) as made:
        await made.open()
        yield made


@pytest.fixture(params=STORES, ids=lambda each: each.__name__)
async def short(request: pytest.FixtureRequest) -> AsyncIterator[RunStore]:
    """A store whose leases are too short for a second write."""
    async with request.param(0.001) as made:
        await made.open()
        yield made


def run(name: str = "r1", **changes: Any) -> StoredRun:
    made = StoredRun(
        id=name, service="shop:Desk", method="chat", status="running", document="{}", created_at=NOW, updated_at=NOW
    )
    return replace(made, **changes)


def record(key: str, data: str = "{}") -> StoredRecord:
    return StoredRecord(key, "reply", data)


async def test_a_run_is_stored_once_with_its_first_records(store: RunStore) -> None:
    assert await store.create(run(), [record("#begin"), record("#r0", '{"a": 1}')])
    assert not await store.create(run(document='{"other": 1}'), [record("#r1")])

    assert await store.load("r1") == run()
    assert [each.key for each in await store.records("r1")] == ["#begin", "#r0"]
    assert await store.load("unknown") is None
    assert await store.records("unknown") == []


async def test_an_owner_of_a_new_run_has_generation_one(store: RunStore) -> None:
    await store.create(run(), owner="a")

    made = await store.load("r1")
    assert made is not None
    assert (made.generation, made.owner) == (1, "a")
    assert await store.acquire("r1", "b") is None


async def test_records_with_an_existing_key_are_ignored(store: RunStore) -> None:
    await store.create(run(), owner="a")
    await store.append("r1", 1, [record("0", '"first"')])
    await store.append("r1", 1, [record("0", '"second"'), record("1")])

    assert [(each.key, each.data) for each in await store.records("r1")] == [("0", '"first"'), ("1", "{}")]


async def test_writes_of_an_older_generation_change_nothing(store: RunStore) -> None:
    await store.create(run(), owner="a")
    await store.release("r1", 1)
    taken = await store.acquire("r1", "b")
    assert taken is not None
    assert taken.generation == 2

    with pytest.raises(LeaseLostError) as raised:
        await store.append("r1", 1, [record("0")], RunChanges(status="completed"))
    with pytest.raises(LeaseLostError):
        await store.add_events("r1", 1, ["{}"])
    await store.release("r1", 1)

    assert raised.value.run_id == "r1"
    assert not await store.renew("r1", 1)
    assert await store.renew("r1", 2)
    assert await store.records("r1") == []
    assert (await store.load("r1")) == taken
    assert await store.acquire("r1", "c") is None


async def test_changes_need_the_current_version(store: RunStore) -> None:
    await store.create(run(status="suspended"))

    changed = await store.change("r1", 0, RunChanges(document='{"answer": 1}'), [record("x")])
    assert changed is not None
    assert (changed.version, changed.document, changed.status) == (1, '{"answer": 1}', "suspended")
    assert await store.change("r1", 0, RunChanges(document='{"answer": 2}'), [record("y")]) is None
    assert await store.change("unknown", 0, RunChanges()) is None

    assert await store.load("r1") == changed
    assert [each.key for each in await store.records("r1")] == ["x"]


async def test_two_changes_of_one_version_have_one_winner(store: RunStore) -> None:
    await store.create(run(status="suspended"))

    changes = [store.change("r1", 0, RunChanges(document=f'"{number}"')) for number in range(5)]
    results = [each for each in await asyncio.gather(*changes) if each is not None]

    assert len(results) == 1
    assert await store.load("r1") == results[0]


def test_the_rule_of_owners_and_generations() -> None:
    def after(by_owner: bool, **changes: Any) -> tuple[object, bool]:
        found = ownership_after(RunChanges(**changes), by_owner=by_owner)
        return found.owner, found.raises_generation

    for by_owner in (True, False):
        assert after(by_owner) == (KEEP, False)
        assert after(by_owner, document="{}", status="running") == (KEEP, False)
        assert after(by_owner, owner="a", status="running") == ("a", True)
    for changes in ({"status": "cancelled"}, {"status": "suspended"}, {"owner": None}):
        assert after(True, **changes) == (None, False)
        assert after(False, **changes) == (None, True)


async def test_a_change_can_take_the_run(store: RunStore) -> None:
    await store.create(run(status="suspended"))

    taken = await store.change("r1", 0, RunChanges(status="running", owner="a"))

    assert taken is not None
    assert (taken.status, taken.owner, taken.generation) == ("running", "a", 1)
    assert await store.acquire("r1", "b") is None
    assert await store.lapsed() == []


@pytest.mark.parametrize("status", ["suspended", "completed", "failed", "cancelled"])
async def test_a_run_that_does_not_run_has_no_owner(store: RunStore, status: Any) -> None:
    await store.create(run(), owner="a")
    await store.append("r1", 1, [record("0")], RunChanges(status=status, document='{"done": 1}'))

    ended = await store.load("r1")
    assert ended is not None
    assert (ended.status, ended.owner, ended.document, ended.version) == (status, None, '{"done": 1}', 1)
    assert await store.acquire("r1", "b") is None
    assert not await store.renew("r1", 1)
    assert await store.lapsed() == []


async def test_a_run_can_be_taken_over_after_its_lease(short: RunStore) -> None:
    await short.create(run(), owner="a")
    await short.create(run("r2", status="suspended"))
    await asyncio.sleep(0.02)  # the lease itself is the behaviour

    assert await short.lapsed() == ["r1"]
    taken = await short.acquire("r1", "b")
    assert taken is not None
    assert (taken.generation, taken.owner) == (2, "b")


async def test_a_run_without_an_owner_can_be_acquired_by_one_process(store: RunStore) -> None:
    await store.create(run())
    assert await store.lapsed() == ["r1"]

    taken = [each for each in await asyncio.gather(*(store.acquire("r1", f"p{n}") for n in range(5))) if each]

    assert len(taken) == 1
    assert await store.lapsed() == []
    await store.release("r1", taken[0].generation)
    assert await store.lapsed() == ["r1"]


async def test_runs_are_found_by_status_and_service_newest_first(store: RunStore) -> None:
    for number in range(4):
        at = NOW + timedelta(seconds=number)
        service = "shop:Desk" if number % 2 else "shop:Bank"
        await store.create(run(f"r{number}", created_at=at, service=service, status="suspended"))
    await store.create(run("r9"))

    assert [each.id for each in await store.find(status="suspended")] == ["r3", "r2", "r1", "r0"]
    assert [each.id for each in await store.find(status="suspended", service="shop:Desk")] == ["r3", "r1"]
    assert [each.id for each in await store.find(limit=2)] == ["r3", "r2"]


async def test_the_suspended_run_of_a_conversation_is_found(store: RunStore) -> None:
    await store.create(run("r1", conversation="c1", status="suspended"))
    await store.create(run("r2", conversation="c2", status="completed"))

    assert await store.suspended_in("c1") == "r1"
    assert await store.suspended_in("c2") is None
    assert await store.suspended_in("c3") is None


async def test_events_are_numbered_in_each_run(store: RunStore) -> None:
    await store.create(run(), owner="a")
    await store.create(run("r2"), owner="a")
    await store.add_events("r1", 1, ['"a"', '"b"'])
    await store.add_events("r2", 1, ['"x"'])
    await store.add_events("r1", 1, ['"c"'])

    assert [(each.number, each.data) for each in await store.events("r1", 1)] == [(2, '"b"'), (3, '"c"')]
    assert [(each.number, each.data) for each in await store.events("r1", 0, 2)] == [(1, '"a"'), (2, '"b"')]
    assert [each.number for each in await store.events("r2", 0)] == [1]
    assert await store.events("unknown", 0) == []


async def test_deleted_runs_are_gone_with_their_records_and_events(store: RunStore) -> None:
    await store.create(run(), [record("0")], owner="a")
    await store.add_events("r1", 1, ["{}"])
    await store.delete("r1")
    await store.delete("r1")

    assert await store.load("r1") is None
    assert await store.records("r1") == []
    assert await store.events("r1", 0) == []
    assert await store.create(run())


async def test_purge_deletes_only_ended_runs_that_are_old_enough(store: RunStore) -> None:
    await store.create(run("old", status="completed"), [record("0")])
    await store.create(run("suspended", status="suspended"))
    await store.create(run("recent", status="failed", updated_at=datetime.now(UTC)))

    assert await store.purge(NOW + timedelta(days=1)) == 1
    assert [each is not None for each in [await store.load(n) for n in ("old", "suspended", "recent")]] == [
        False,
        True,
        True,
    ]


@pytest.mark.parametrize("lease", [0, -1])
def test_leases_must_be_positive(lease: float) -> None:
    with pytest.raises(ValueError, match="lease"):
        InMemoryRunStore(lease)
