"""The promises of a `RunStore`, a check for each: headers, records, owners and their leases, events, finding runs.

Not here: the promises themselves (`runs.store`), interrupted writes, which need a database (`tests/databases`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias
from uuid import uuid4

from ..errors import LeaseLostError
from ..runs.store import ENDED, RunChanges, RunStatus, RunStore, StoredRecord, StoredRun, supports_of
from ..store_clock import own_clock_of, skip
from . import DISTINCT_TEXTS, PATIENCE

NewRunStore: TypeAlias = Callable[[float], RunStore]
"""Creates a store of the same runs, whose leases last this many seconds: that of another process, or the same again."""
RunStoreCheck: TypeAlias = Callable[[NewRunStore], Awaitable[None]]

LONG, SHORT = 60.0, 1.0
"""Seconds of leases: of one that does not end within a check, and of one for whose end a check waits."""


async def _open_two(new_store: NewRunStore, lease: float = LONG) -> tuple[RunStore, RunStore]:
    """Return the stores of two processes."""
    stores = new_store(lease), new_store(lease)
    for each in stores:
        await each.open()
    return stores


def _new_run(status: RunStatus = "running", **values: Any) -> StoredRun:
    """Return a run with an id that no other check uses."""
    now = datetime.now(UTC)
    given = {"service": "bank:Transfers", "method": "transfer", "document": '{"version": 1}', **values}
    return StoredRun(id=f"run {uuid4().hex}", status=status, created_at=now, updated_at=now, **given)


async def _load_run(store: RunStore, run: StoredRun) -> StoredRun:
    found = await store.load(run.id)
    assert found is not None
    return found


async def _pass_time(store: RunStore, seconds: float) -> None:
    """Skip time where the store has a clock in this process; else wait."""
    clock = own_clock_of(store)
    if clock is None:
        await asyncio.sleep(seconds)
    else:
        skip([clock], timedelta(seconds=seconds))


async def _wait_until_lapsed(store: RunStore, run: StoredRun) -> None:
    await _pass_time(store, SHORT)
    until = time.monotonic() + PATIENCE
    while run.id not in await store.lapsed(10_000):
        assert time.monotonic() < until, "the lease does not end"
        await asyncio.sleep(0.02)


async def _raises_lease_lost(writing: Awaitable[object], run: StoredRun) -> None:
    """Expect that an owner which has lost the run cannot write."""
    [found] = await asyncio.gather(writing, return_exceptions=True)
    assert isinstance(found, LeaseLostError), f"expected LeaseLostError for a write of an earlier owner, got {found!r}"
    assert found.run_id == run.id


async def a_store_can_be_opened_again(new_store: NewRunStore) -> None:
    """Its runs stay."""
    store, other = await _open_two(new_store)
    run = _new_run()
    await store.create(run, owner="one")

    for each in (store, other):
        await each.open()

    assert (await _load_run(store, run)) == (await _load_run(other, run))
    await store.append(run.id, 1, [StoredRecord("0", "result", "a")])


async def a_stored_run_is_read_unchanged(new_store: NewRunStore) -> None:
    """With its first records, its owner and generation 1."""
    store, other = await _open_two(new_store)
    run = _new_run(conversation="room 7", document='{"text": "ä 🦜 \\u0000 \'quoted\' \\\\"}')
    before = datetime.now(UTC) - timedelta(seconds=1)

    assert await store.create(run, [StoredRecord("#begin", "begin", '"é\\u0000"')], owner="one")

    found = await _load_run(other, run)
    assert (found.id, found.service, found.method) == (run.id, run.service, run.method)
    assert (found.status, found.conversation, found.document) == ("running", "room 7", run.document)
    assert (found.generation, found.owner) == (1, "one")
    assert before < found.created_at <= found.updated_at < datetime.now(UTC) + timedelta(seconds=1)
    assert await other.records(run.id) == [StoredRecord("#begin", "begin", '"é\\u0000"')]


async def a_new_header_is_stored_as_given(new_store: NewRunStore) -> None:
    """All of it, but for the owner, the generation and, in a store that processes share, both times."""
    store, other = await _open_two(new_store)
    since = datetime.now(UTC).replace(microsecond=0) - timedelta(hours=1)
    run = _new_run("suspended", version=3, conversation="room 7", started_by="ann", memory_id="7", waiting_since=since)

    await store.create(replace(run, generation=5, owner="given"))

    found = await _load_run(other, run)
    assert found == replace(run, created_at=found.created_at, updated_at=found.updated_at)
    assert run.created_at - timedelta(minutes=1) < found.created_at <= found.updated_at


async def an_id_is_used_once(new_store: NewRunStore) -> None:
    """A second `create` returns False and writes nothing."""
    store, other = await _open_two(new_store)
    run = _new_run()
    assert await store.create(run, owner="one")

    assert not await other.create(run, [StoredRecord("#begin", "begin", "{}")], owner="other")

    assert (await _load_run(store, run)).owner == "one"
    assert await store.records(run.id) == []


async def ids_of_runs_never_collide(new_store: NewRunStore) -> None:
    """An id has up to 200 characters, often comes from a client, and is compared exactly: also its case counts."""
    store, other = await _open_two(new_store)
    unique = uuid4().hex
    longest = [("日" * 200 + unique + end)[-200:] for end in "ab"]
    runs = [replace(_new_run(), id=each) for each in (*(text + unique for text in DISTINCT_TEXTS), *longest)]
    for run in runs:
        assert await store.create(run, [StoredRecord("#begin", "begin", run.id)], owner="one"), run.id
    for run in runs:
        await store.add_events(run.id, 1, [run.id])

    for run in runs:
        assert (await _load_run(other, run)).id == run.id
        assert [each.data for each in await other.records(run.id)] == [run.id]
        assert [each.data for each in await other.events(run.id, 0)] == [run.id]


async def one_of_many_creators_wins(new_store: NewRunStore) -> None:
    """Of concurrent calls of `create` with one id, one returns True."""
    stores = await _open_two(new_store)
    run = _new_run()

    created = await asyncio.gather(*(each.create(run, owner="x") for each in stores * 4))

    assert created.count(True) == 1


async def an_unknown_run_has_nothing(new_store: NewRunStore) -> None:
    """Nothing raises for an unknown id, except the writes of an owner."""
    store, _ = await _open_two(new_store)
    unknown = _new_run()

    assert await store.load(unknown.id) is None
    assert await store.records(unknown.id) == []
    assert await store.events(unknown.id, 0) == []
    assert await store.acquire(unknown.id, "one") is None
    assert await store.change(unknown.id, 0, RunChanges()) is None
    assert not await store.renew(unknown.id, 1)
    await _raises_lease_lost(store.append(unknown.id, 1, []), unknown)
    await store.release(unknown.id, 1)
    await store.delete(unknown.id)


async def records_come_back_in_the_order_written(new_store: NewRunStore) -> None:
    """One by one, several at once, and along with a change of the header."""
    store, other = await _open_two(new_store)
    run = _new_run()
    await store.create(run, [StoredRecord("#begin", "begin", "{}")], owner="one")

    await store.append(run.id, 1, [StoredRecord("#0", "reply", "a")])
    await store.append(run.id, 1, [StoredRecord("0#start", "start", "b"), StoredRecord("0", "result", "c")])
    await store.append(run.id, 1, [StoredRecord("#1", "reply", "d")], RunChanges(document='{"version": 2}'))

    assert [each.key for each in await other.records(run.id)] == ["#begin", "#0", "0#start", "0", "#1"]
    assert (await _load_run(other, run)).document == '{"version": 2}'


async def a_record_whose_key_exists_is_ignored(new_store: NewRunStore) -> None:
    """Alone, and together with a new one, which is added."""
    store, _ = await _open_two(new_store)
    run = _new_run()
    await store.create(run, owner="one")
    first, second = StoredRecord("0", "result", "first"), StoredRecord("1", "result", "b")
    await store.append(run.id, 1, [first])

    await store.append(run.id, 1, [StoredRecord("0", "result", "again")])
    await store.append(run.id, 1, [StoredRecord("0", "result", "again"), second])

    assert await store.records(run.id) == [first, second]


async def a_record_that_replaces_another_one_keeps_its_place(new_store: NewRunStore) -> None:
    """`StoredRecord.replaces`; it is fenced like every write."""
    store, _ = await _open_two(new_store)
    run = _new_run()
    await store.create(run, owner="one")
    await store.append(run.id, 1, [StoredRecord("0", "result", "raw"), StoredRecord("#r1", "reply", "{}")])

    await store.append(run.id, 1, [StoredRecord("0", "result", "judged", replaces=True)])
    more = [StoredRecord("1", "result", "new", replaces=True), StoredRecord("1#start", "start", "{}")]
    await store.append(run.id, 1, more)
    await store.append(run.id, 1, [StoredRecord("0", "result", "raw")])

    found = await store.records(run.id)
    assert found == [
        StoredRecord("0", "result", "judged"),
        StoredRecord("#r1", "reply", "{}"),
        StoredRecord("1", "result", "new"),
        StoredRecord("1#start", "start", "{}"),
    ]
    await _raises_lease_lost(store.append(run.id, 7, [StoredRecord("0", "result", "late", replaces=True)]), run)
    assert await store.records(run.id) == found


async def a_record_that_replaces_another_one_has_its_own_kind(new_store: NewRunStore) -> None:
    """The whole record is replaced, not only its data."""
    store, other = await _open_two(new_store)
    run = _new_run()
    await store.create(run, owner="one")
    await store.append(run.id, 1, [StoredRecord("0", "start", "a")])

    await store.append(run.id, 1, [StoredRecord("0", "result", "b", replaces=True)])

    assert await other.records(run.id) == [StoredRecord("0", "result", "b")]


async def records_of_the_same_place_belong_to_one_run_each(new_store: NewRunStore) -> None:
    """Keys are unique in a run, not in the store."""
    store, _ = await _open_two(new_store)
    one, two = _new_run(), _new_run()
    for run in (one, two):
        await store.create(run, owner="one")
        await store.append(run.id, 1, [StoredRecord("0", "result", run.id)])

    assert [each.data for each in await store.records(two.id)] == [two.id]


async def a_run_has_one_owner(new_store: NewRunStore) -> None:
    """A run with a valid lease is not taken."""
    store, other = await _open_two(new_store)
    run = _new_run()
    await store.create(run, owner="one")

    assert await other.acquire(run.id, "other") is None
    assert run.id not in await other.lapsed()


async def a_run_without_an_owner_is_taken_once(new_store: NewRunStore) -> None:
    """Of concurrent calls of `acquire`, one gets the run."""
    store, other = await _open_two(new_store)
    run = _new_run()
    await store.create(run)
    assert run.id in await other.lapsed()

    taken = await asyncio.gather(*(each.acquire(run.id, "x") for each in (store, other) * 4))

    [owned] = [each for each in taken if each is not None]
    assert (owned.generation, owned.status, owned.owner) == (1, "running", "x")
    assert run.id not in await other.lapsed()


async def runs_that_nobody_executes_are_listed_oldest_first(new_store: NewRunStore) -> None:
    """`lapsed`, and its limit."""
    store, other = await _open_two(new_store)
    runs = [_new_run() for _ in range(3)]
    for run in runs:
        await store.create(run)
        await asyncio.sleep(0.003)  # a store may round times to milliseconds

    ids = [each.id for each in runs]
    assert [each for each in await other.lapsed() if each in ids] == ids
    assert len(await other.lapsed(limit=1)) == 1


async def renewing_keeps_a_run(new_store: NewRunStore) -> None:
    """Longer than one lease."""
    store, other = await _open_two(new_store, SHORT)
    run = _new_run()
    await store.create(run, owner="one")

    for _ in range(20):
        assert await store.renew(run.id, 1)
        assert await other.acquire(run.id, "other") is None
        await _pass_time(store, SHORT / 10)


async def an_owner_that_lost_its_run_writes_nothing_more(new_store: NewRunStore) -> None:
    """Each write names the generation, and another one has taken the run."""
    store, other = await _open_two(new_store, SHORT)
    run = _new_run()
    await store.create(run, owner="one")
    await _wait_until_lapsed(other, run)
    taken = await other.acquire(run.id, "other")
    assert taken is not None
    assert (taken.generation, taken.owner) == (2, "other")

    record = StoredRecord("0", "result", "late")
    await _raises_lease_lost(store.append(run.id, 1, [record]), run)
    await _raises_lease_lost(store.append(run.id, 1, [record, StoredRecord("1", "result", "late")]), run)
    await _raises_lease_lost(store.append(run.id, 1, [record], RunChanges(status="completed")), run)
    await _raises_lease_lost(store.append(run.id, 1, [record], None, ["late"]), run)
    await _raises_lease_lost(store.add_events(run.id, 1, ["late"]), run)
    assert not await store.renew(run.id, 1)
    await store.release(run.id, 1)

    assert await other.records(run.id) == []
    assert await other.events(run.id, 0) == []
    found = await _load_run(other, run)
    assert (found.status, found.owner) == ("running", "other")
    await other.append(run.id, 2, [record])


async def an_owner_that_is_only_late_keeps_its_run(new_store: NewRunStore) -> None:
    """The generation decides, never the time: the end of a lease only allows another one to take the run."""
    store, other = await _open_two(new_store, SHORT)
    run = _new_run()
    await store.create(run, owner="one")
    await _wait_until_lapsed(other, run)

    assert await store.renew(run.id, 1)
    await store.append(run.id, 1, [StoredRecord("0", "result", "a")])

    assert await other.acquire(run.id, "other") is None


async def a_released_run_is_available_immediately(new_store: NewRunStore) -> None:
    """Its status stays `running`; the next owner has the next generation."""
    store, other = await _open_two(new_store)
    run = _new_run()
    await store.create(run, owner="one")

    await store.release(run.id, 1)

    assert run.id in await other.lapsed()
    assert not await store.renew(run.id, 1)
    taken = await other.acquire(run.id, "other")
    assert taken is not None
    assert taken.generation == 2


async def only_running_runs_are_taken_over(new_store: NewRunStore) -> None:
    """A run that its owner suspends or ends has no owner."""
    store, other = await _open_two(new_store)
    statuses: tuple[RunStatus, ...] = ("suspended", "completed", "failed", "cancelled")
    for status in statuses:
        run = _new_run()
        await store.create(run, owner="one")
        await store.append(run.id, 1, [StoredRecord("0", "result", "a")], RunChanges(status=status, document="{}"))

        assert await other.acquire(run.id, "other") is None
        assert run.id not in await other.lapsed()
        assert not await store.renew(run.id, 1)
        found = await _load_run(other, run)
        assert (found.status, found.owner, found.document) == (status, None, "{}")


async def a_change_needs_the_current_version(new_store: NewRunStore) -> None:
    """`change` returns None and writes nothing if the header has changed since it was read."""
    store, other = await _open_two(new_store)
    run = _new_run("suspended")
    await store.create(run)
    found = await _load_run(store, run)

    changed = await other.change(run.id, found.version, RunChanges(document='"a"'), [StoredRecord("x", "answer", "a")])
    assert changed is not None
    assert (changed.version, changed.document, changed.status) == (found.version + 1, '"a"', "suspended")
    late = RunChanges(document='"b"')
    assert await store.change(run.id, found.version, late, [StoredRecord("y", "answer", "b")]) is None

    assert await other.load(run.id) == changed
    assert [each.key for each in await other.records(run.id)] == ["x"]


async def one_of_several_concurrent_changes_wins(new_store: NewRunStore) -> None:
    """The one that takes the run has it, with its own records only."""
    store, other = await _open_two(new_store)
    run = _new_run()
    await store.create(run, owner="one")
    await store.append(run.id, 1, [], RunChanges(status="suspended"))
    version = (await _load_run(store, run)).version

    changed = await asyncio.gather(
        *(
            each.change(
                run.id,
                version,
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


async def only_changes_of_the_header_move_its_time(new_store: NewRunStore) -> None:
    """`updated_at`, from which `purge` counts. Each change raises the version, too; nothing else does."""
    store, other = await _open_two(new_store)
    run = _new_run()
    await store.create(run)

    async def is_moved_by(write: Callable[[], Awaitable[object]]) -> bool:
        before = await _load_run(other, run)
        await asyncio.sleep(0.005)  # a store may round times to milliseconds
        await write()
        after = await _load_run(other, run)
        assert (after.updated_at > before.updated_at) == (after.version > before.version)
        assert after.created_at == before.created_at
        return after.version > before.version

    assert await is_moved_by(lambda: store.acquire(run.id, "one"))
    assert not await is_moved_by(lambda: store.renew(run.id, 1))
    assert not await is_moved_by(lambda: store.append(run.id, 1, [StoredRecord("0", "result", "a")]))
    assert not await is_moved_by(lambda: store.add_events(run.id, 1, ["a"]))
    assert await is_moved_by(lambda: store.append(run.id, 1, [], RunChanges(document="{}")))
    assert not await is_moved_by(lambda: store.release(run.id, 1))
    version = (await _load_run(store, run)).version
    assert await is_moved_by(lambda: store.change(run.id, version, RunChanges()))


async def a_resumed_run_without_an_owner_is_available_immediately(new_store: NewRunStore) -> None:
    """A change to `running` gives it no lease."""
    store, other = await _open_two(new_store)
    run = _new_run()
    await store.create(run, owner="one")
    await store.append(run.id, 1, [], RunChanges(status="suspended"))
    found = await _load_run(store, run)

    assert await other.change(run.id, found.version, RunChanges(status="running")) is not None

    assert await other.acquire(run.id, "other") is not None


async def a_change_of_the_status_fences_the_owner(new_store: NewRunStore) -> None:
    """For example, a cancellation."""
    store, other = await _open_two(new_store)
    run = _new_run()
    await store.create(run, owner="one")
    found = await _load_run(other, run)

    assert await other.change(run.id, found.version, RunChanges(status="cancelled")) is not None

    await _raises_lease_lost(store.append(run.id, 1, [StoredRecord("0", "result", "a")]), run)
    assert not await store.renew(run.id, 1)


async def a_run_can_lose_its_owner(new_store: NewRunStore) -> None:
    """`RunChanges(owner=None)`: the run is available immediately."""
    store, other = await _open_two(new_store)
    run = _new_run()
    await store.create(run, owner="one")
    found = await _load_run(other, run)

    changed = await other.change(run.id, found.version, RunChanges(owner=None))

    assert changed is not None
    assert (changed.status, changed.owner, changed.document) == ("running", None, found.document)
    await _raises_lease_lost(store.append(run.id, 1, [StoredRecord("0", "result", "a")]), run)
    assert await other.acquire(run.id, "other") is not None


async def an_owner_keeps_its_run_when_something_else_changes(new_store: NewRunStore) -> None:
    """A change of the document alone does not raise the generation."""
    store, other = await _open_two(new_store)
    run = _new_run()
    await store.create(run, owner="one")
    found = await _load_run(other, run)

    assert await other.change(run.id, found.version, RunChanges(document="{}")) is not None

    assert await store.renew(run.id, 1)
    await store.append(run.id, 1, [StoredRecord("0", "result", "a")])


async def a_wish_reaches_the_owner(new_store: NewRunStore) -> None:
    """The first one stays, and nothing else changes: the owner may be writing the header. Of stores with `"wishes"`."""
    store, other = await _open_two(new_store)
    if "wishes" not in supports_of(store):
        return
    wished, another = _new_run(), _new_run()
    for each in (wished, another):
        await store.create(each, owner="one")
    before = await _load_run(store, wished)

    assert await other.add_wish(wished.id, '{"text": "ä 🦜"}')
    assert await other.add_wish(wished.id, "a later one")

    assert await store.wishes([another.id, wished.id, "an unknown run"]) == {wished.id: '{"text": "ä 🦜"}'}
    assert await store.wishes([]) == {}
    assert await _load_run(store, wished) == before
    await store.append(wished.id, 1, [StoredRecord("0", "result", "a")])


async def only_a_run_with_an_owner_takes_a_wish(new_store: NewRunStore) -> None:
    """Others are changed by the caller. An owner that is late may still answer."""
    store, _ = await _open_two(new_store, SHORT)
    if "wishes" not in supports_of(store):
        return
    late, *others = _new_run(), _new_run(), _new_run("suspended"), _new_run("completed")
    await store.create(late, owner="one")
    for each in others:
        await store.create(each)
    await _wait_until_lapsed(store, late)

    assert [await store.add_wish(each.id, "a wish") for each in others] == [False, False, False]
    assert not await store.add_wish("an unknown run", "a wish")
    assert await store.add_wish(late.id, "a wish")


async def a_wish_stays_until_the_run_ends(new_store: NewRunStore) -> None:
    """Also when another process takes the run, and while it is suspended. A run that begins again has no wish."""
    store, other = await _open_two(new_store)
    if "wishes" not in supports_of(store):
        return
    runs = [_new_run(), _new_run()]
    for run in runs:
        await store.create(run, owner="one")
        await store.add_wish(run.id, "a wish")
        await store.release(run.id, 1)
        assert await other.acquire(run.id, "other") is not None
        assert await other.wishes([run.id]) == {run.id: "a wish"}
        await other.append(run.id, 2, [], RunChanges(status="suspended"))
        assert await store.change(
            run.id, (await _load_run(store, run)).version, RunChanges(status="running", owner="one")
        )
        assert await store.wishes([run.id]) == {run.id: "a wish"}
    by_owner, by_another = [await _load_run(store, run) for run in runs]

    await store.append(by_owner.id, by_owner.generation, [], RunChanges(status="failed"))
    await other.change(by_another.id, by_another.version, RunChanges(status="cancelled"))

    for run in runs:
        await store.change(run.id, (await _load_run(store, run)).version, RunChanges(status="running", owner="one"))
    assert await store.wishes([run.id for run in runs]) == {}


async def messages_come_back_in_their_order(new_store: NewRunStore) -> None:
    """Each is there once, by its id, and nothing else changes. The next write says how many there are."""
    store, other = await _open_two(new_store)
    if "tell" not in supports_of(store):
        return
    run, another, waiting = _new_run(), _new_run(), _new_run("suspended")
    await store.create(run, owner="one")
    await store.create(another, owner="one")
    await store.create(waiting)
    before = await _load_run(store, run)

    for number in range(12):
        assert await other.add_message(run.id, f"id {number}", f'{{"n": {number}, "text": "ä 🦜"}}')
    assert await other.add_message(run.id, "id 3", "the same again")
    assert await other.add_message(waiting.id, "id", "waits")

    expected = [f'{{"n": {number}, "text": "ä 🦜"}}' for number in range(12)]
    assert await store.messages(run.id) == expected
    assert await store.messages(run.id, 10) == expected[10:]
    assert await store.messages(another.id) == await store.messages("an unknown run") == []
    assert await store.messages(waiting.id) == ["waits"]
    assert await _load_run(store, run) == before
    counts = [await store.append(each.id, 1, [StoredRecord("0", "result", "a")]) for each in (run, another)]
    assert counts in ([12, 0], [None, None])


async def messages_added_at_once_are_all_kept(new_store: NewRunStore) -> None:
    """Also beside an owner that ends the run: a message is kept, or its writer learns that it is not."""
    store, other = await _open_two(new_store)
    if "tell" not in supports_of(store):
        return
    run = _new_run()
    await store.create(run, owner="one")

    async def add(writer: int) -> list[str]:
        kept = []
        for number in range(5):
            if await (store if writer % 2 else other).add_message(run.id, f"{writer}.{number}", f"{writer}.{number}"):
                kept.append(f"{writer}.{number}")
        return kept

    async def close() -> int:
        while not await store.close_messages(run.id, 1, count := len(await store.messages(run.id))):
            pass
        return count

    *kept, count = await asyncio.gather(*(add(writer) for writer in range(4)), close())

    stored = await store.messages(run.id)
    assert isinstance(count, int)
    assert len(stored) == count
    assert sorted(stored) == sorted(each for writer in kept if isinstance(writer, list) for each in writer)
    for writer in range(4):
        own = [each for each in stored if each.startswith(f"{writer}.")]
        assert own == sorted(own)


async def a_run_that_ends_takes_no_messages(new_store: NewRunStore) -> None:
    """Nor does one that is about to end, until another process takes it."""
    store, other = await _open_two(new_store)
    if "tell" not in supports_of(store):
        return
    run, *ended = _new_run(), _new_run("completed"), _new_run("cancelled")
    await store.create(run, owner="one")
    for each in ended:
        await store.create(each)
    assert await other.add_message(run.id, "first", "first")

    assert not await store.close_messages(run.id, 1, 0)
    assert await other.add_message(run.id, "second", "second")
    assert await store.close_messages(run.id, 1, 2)
    assert not await other.add_message(run.id, "third", "third")
    assert not any([await other.add_message(each.id, "id", "text") for each in ended])
    assert not await other.add_message("an unknown run", "id", "text")
    try:
        await store.close_messages(run.id, 7, 2)
    except LeaseLostError:
        pass
    else:
        raise AssertionError("another generation closed the messages")

    await store.release(run.id, 1)
    assert await other.acquire(run.id, "other") is not None
    assert await store.add_message(run.id, "third", "third")
    await other.append(run.id, 2, [], RunChanges(status="failed"))
    assert not await store.add_message(run.id, "fourth", "fourth")
    version = (await _load_run(store, run)).version
    assert await store.change(run.id, version, RunChanges(status="running", owner="one")) is not None
    assert await store.add_message(run.id, "fourth", "fourth")
    assert len(await store.messages(run.id)) in (2, 4)  # a store may delete those of an ended run
    await store.delete(run.id)
    assert await store.messages(run.id) == []


async def events_are_numbered_in_each_run(new_store: NewRunStore) -> None:
    """From 1, and any process reads them."""
    store, other = await _open_two(new_store)
    run, second = _new_run(), _new_run()
    for each in (run, second):
        await store.create(each, owner="one")

    await store.add_events(run.id, 1, ["a", "b"])
    await store.add_events(second.id, 1, ["x"])
    await store.append(run.id, 1, [], RunChanges(status="suspended"), ["c"])

    found = await other.events(run.id, 0)
    assert [(each.number, each.data) for each in found] == [(1, "a"), (2, "b"), (3, "c")]
    assert all(abs(datetime.now(UTC) - each.at) < timedelta(minutes=1) for each in found)
    assert [each.number for each in await other.events(run.id, 2)] == [3]
    assert [each.number for each in await other.events(run.id, 0, limit=2)] == [1, 2]
    assert await other.events(run.id, 3) == []
    assert [each.number for each in await other.events(second.id, 0)] == [1]


async def the_next_owner_continues_the_numbers_of_events(new_store: NewRunStore) -> None:
    """Numbers are those of the run, not of its owner."""
    store, other = await _open_two(new_store)
    run = _new_run()
    await store.create(run, owner="one")
    await store.add_events(run.id, 1, ["a"])
    await store.release(run.id, 1)
    await other.acquire(run.id, "other")

    await other.add_events(run.id, 2, ["b"])

    assert [(each.number, each.data) for each in await store.events(run.id, 0)] == [(1, "a"), (2, "b")]


async def events_written_at_once_have_separate_numbers(new_store: NewRunStore) -> None:
    """Tools that run together write events at the same time."""
    store, _ = await _open_two(new_store)
    run = _new_run()
    await store.create(run, owner="one")

    await asyncio.gather(*(store.add_events(run.id, 1, [str(each), str(each)]) for each in range(8)))

    assert [each.number for each in await store.events(run.id, 0)] == list(range(1, 17))


async def runs_are_found_by_status_and_service_newest_first(new_store: NewRunStore) -> None:
    """`find`, and its limit."""
    store, _ = await _open_two(new_store)
    service = f"shop:Desk{uuid4().hex}"
    statuses: tuple[RunStatus, ...] = ("running", "suspended", "running")
    ids: list[str] = []
    for status in statuses:
        run = _new_run(status, service=service)
        await store.create(run)
        ids.append(run.id)
        await asyncio.sleep(0.003)  # a store may round times to milliseconds

    assert [each.id for each in await store.find(service=service)] == ids[::-1]
    assert [each.id for each in await store.find(service=service, status="running")] == [ids[2], ids[0]]
    assert [each.id for each in await store.find(service=service, limit=1)] == [ids[2]]
    assert await store.find(service="shop:Unknown") == []


async def runs_are_found_in_pages(new_store: NewRunStore) -> None:
    """`before` is the position of a run, also of one that was deleted."""
    store, other = await _open_two(new_store)
    service = f"shop:Desk{uuid4().hex}"
    for _ in range(5):
        await store.create(_new_run(service=service))
    everything = await store.find(service=service)

    first = await store.find(service=service, limit=2)
    await store.delete(first[-1].id)
    second = await other.find(service=service, limit=2, before=(first[-1].created_at, first[-1].id))
    last = await other.find(service=service, before=(second[-1].created_at, second[-1].id))

    assert [each.id for each in (*first, *second, *last)] == [each.id for each in everything]


async def runs_are_found_by_who_asked(new_store: NewRunStore) -> None:
    """`started_by`, which the header keeps with the id of the conversation."""
    store, other = await _open_two(new_store)
    service = f"shop:Desk{uuid4().hex}"
    run = _new_run(service=service, started_by="ann", memory_id="room 7")
    for each in (run, _new_run(service=service, started_by="bob"), _new_run(service=service)):
        await store.create(each)

    [found] = await other.find(service=service, started_by="ann")

    assert (found.id, found.started_by, found.memory_id) == (run.id, "ann", "room 7")
    assert await other.find(service=service, started_by="") == []


async def waiting_runs_are_found_by_their_oldest_call(new_store: NewRunStore) -> None:
    """`waiting_longer_than` counts from `waiting_since`; without it, from the suspension."""
    store, other = await _open_two(new_store)
    service = f"shop:Desk{uuid4().hex}"
    old, new, running = (_new_run(status, service=service) for status in ("suspended", "suspended", "running"))
    for each in (old, new, running):
        await store.create(each)
    an_hour_ago = (await _load_run(store, old)).updated_at - timedelta(hours=1)
    await store.change(old.id, (await _load_run(store, old)).version, RunChanges(waiting_since=an_hour_ago))
    await asyncio.sleep(0.003)  # a store may round times to milliseconds

    assert (await _load_run(other, old)).waiting_since == an_hour_ago
    longer = await other.find(service=service, waiting_longer_than=timedelta(minutes=59))
    assert [each.id for each in longer] == [old.id]
    assert {each.id for each in await other.find(service=service, waiting_longer_than=timedelta())} == {old.id, new.id}
    assert await other.find(service=service, waiting_longer_than=timedelta(hours=2)) == []
    found = await other.find(service=service, waiting_longer_than=timedelta(minutes=59), status="suspended")
    assert [each.id for each in found] == [old.id]
    assert await other.find(service=service, waiting_longer_than=timedelta(), status="running") == []


async def each_write_can_set_and_remove_the_time_of_the_oldest_call(new_store: NewRunStore) -> None:
    """`waiting_since`, written by the owner that suspends its run, and by others; None removes it, `KEEP` does not."""
    store, other = await _open_two(new_store)
    run = _new_run()
    await store.create(run, owner="one")
    since = datetime.now(UTC).replace(microsecond=0) - timedelta(hours=1)

    async def append(changes: RunChanges) -> None:
        await store.append(run.id, 1, [], changes)

    async def change(changes: RunChanges) -> None:
        assert await store.change(run.id, (await _load_run(store, run)).version, changes) is not None

    for write in (append, change):
        await write(RunChanges(status="suspended", waiting_since=since))
        assert (await _load_run(other, run)).waiting_since == since
        await write(RunChanges(document='"a"'))
        assert (await _load_run(other, run)).waiting_since == since
        await write(RunChanges(waiting_since=None))
        assert (await _load_run(other, run)).waiting_since is None


async def a_run_is_not_taken_before_its_time(new_store: NewRunStore) -> None:
    """`next_at` of a running run, by the store's clock: its owner ends the lease, and nobody takes the run before."""
    store, other = await _open_two(new_store)
    if "retries" not in store.supports:
        return
    run = _new_run()
    await store.create(run, owner="one")
    await store.append(run.id, 1, [], RunChanges(owner=None, next_at=await store.now() + timedelta(seconds=SHORT)))

    found, look = await _load_run(other, run), await other.look(run.id)
    assert (found.status, found.owner, found.generation) == ("running", None, 1)
    assert found.next_at is not None
    assert look is not None
    assert not look.is_runnable
    assert run.id not in await other.lapsed()
    assert await other.acquire(run.id, "early") is None

    await _wait_until_lapsed(other, run)
    taken = await asyncio.gather(*(each.acquire(run.id, "x") for each in (store, other) * 4))
    [owned] = [each for each in taken if each is not None]
    assert (owned.generation, owned.next_at) == (2, None)
    await store.release(run.id, 2)
    assert run.id in await other.lapsed()


async def a_suspended_run_is_found_when_its_time_has_come(new_store: NewRunStore) -> None:
    """`next_at` of a suspended run: `lapsed` lists it then, but nobody takes it."""
    store, other = await _open_two(new_store)
    if "expiry" not in store.supports:
        return
    at = await store.now() + timedelta(seconds=SHORT)
    new, owned, waits = _new_run("suspended", next_at=at), _new_run(), _new_run("suspended")
    await store.create(new)
    await store.create(owned, owner="one")
    await store.append(owned.id, 1, [], RunChanges(status="suspended", next_at=at))
    await store.create(waits)

    assert not {new.id, owned.id, waits.id} & {*await other.lapsed(10_000)}
    for run in (new, owned):
        await _wait_until_lapsed(other, run)
        assert await other.acquire(run.id, "other") is None
        look = await other.look(run.id)
        assert look is not None
        assert not look.is_runnable
    assert waits.id not in await other.lapsed(10_000)


async def a_change_of_the_status_or_the_owner_removes_the_next_time(new_store: NewRunStore) -> None:
    """As `next_at_after` says: unless the change sets another one. A change of the document keeps it."""
    store, other = await _open_two(new_store)
    if not {"retries", "expiry"} & store.supports:
        return
    at = (await store.now()).replace(microsecond=0) + timedelta(hours=1)
    run = _new_run("suspended", next_at=at)
    await store.create(run)

    async def change(changes: RunChanges) -> datetime | None:
        changed = await store.change(run.id, (await _load_run(store, run)).version, changes)
        assert changed is not None
        assert (await _load_run(other, run)) == changed
        return changed.next_at

    assert (await _load_run(other, run)).next_at == at
    assert await change(RunChanges(document='"a"')) == at
    assert await change(RunChanges(next_at=None)) is None
    assert await change(RunChanges(status="running", owner="one", next_at=at)) == at
    assert await change(RunChanges(owner="other")) is None
    assert await change(RunChanges(next_at=at)) == at
    assert await change(RunChanges(status="suspended")) is None


async def a_look_shows_what_changes(new_store: NewRunStore) -> None:
    """`look`: the status, the version, the generation, the number of events, and whether a process executes the run."""
    store, other = await _open_two(new_store)
    run = _new_run()
    assert await store.look(run.id) is None
    await store.create(run)

    new = await other.look(run.id)
    taken = await store.acquire(run.id, "one")
    owned = await other.look(run.id)
    await store.add_events(run.id, 1, ["a", "b"])
    followed = await other.look(run.id)
    await store.append(run.id, 1, [], RunChanges(status="suspended"), ["c"])
    waiting = await other.look(run.id)

    assert None not in (new, taken, owned, followed, waiting)
    assert new is not None
    assert (new.status, new.generation, new.events, new.is_runnable) == ("running", 0, 0, True)
    assert owned is not None
    assert (owned.generation, owned.is_runnable) == (1, False)
    assert followed is not None
    assert followed == replace(owned, events=2)
    assert waiting is not None
    assert (waiting.status, waiting.events, waiting.is_runnable) == ("suspended", 3, False)
    assert waiting.version > followed.version


async def runs_are_found_by_their_conversation(new_store: NewRunStore) -> None:
    """By `memory_id`, exactly, also long ones; together with the other conditions. For stores that say so."""
    store, other = await _open_two(new_store)
    if "conversations" not in store.supports:
        return
    room, service = f"room {uuid4().hex}", f"shop.{uuid4().hex}"
    ids = [room, room, room.upper(), room + "x" * 2000, room + "x" * 1999 + "y", None]
    runs = [_new_run(service=service, memory_id=each) for each in ids]
    for run in runs:
        await store.create(run)
    await store.create(_new_run(service="other", memory_id=room))

    for index in (2, 3, 4):
        assert [each.id for each in await other.find(memory_id=ids[index])] == [runs[index].id]
    found = await other.find(service=service, memory_id=room)
    assert {each.id for each in found} == {runs[0].id, runs[1].id}
    assert len(await other.find(memory_id=room)) == 3
    assert [each.id for each in await other.find(service=service, memory_id=room, limit=1)] == [found[0].id]
    later = (found[0].created_at, found[0].id)
    assert [each.id for each in await other.find(service=service, memory_id=room, before=later)] == [found[1].id]
    assert await other.find(status="suspended", memory_id=room) == []


async def the_suspended_run_of_a_conversation_is_found(new_store: NewRunStore) -> None:
    """Only while it is suspended."""
    store, other = await _open_two(new_store)
    conversation = f"room {uuid4().hex}"
    run = _new_run(conversation=conversation)
    await store.create(run, owner="one")
    assert await other.suspended_in(conversation) is None

    await store.append(run.id, 1, [], RunChanges(status="suspended"))

    assert await other.suspended_in(conversation) == run.id
    assert await other.suspended_in("another room") is None


async def purging_deletes_old_runs_that_have_ended(new_store: NewRunStore) -> None:
    """With their records and events; `before` is compared with the last change. Runs that wait for an answer stay."""
    store, _ = await _open_two(new_store)
    runs: dict[RunStatus, StoredRun] = {}
    statuses: tuple[RunStatus, ...] = ("running", "suspended", "completed", "failed", "cancelled")
    for status in statuses:
        run = runs[status] = _new_run()
        await store.create(run, [StoredRecord("#begin", "begin", "{}")], owner="one")
        await store.add_events(run.id, 1, ["a"])
        if status != "running":
            await store.append(run.id, 1, [], RunChanges(status=status))

    assert await store.purge(datetime.now(UTC) - timedelta(hours=1)) == 0
    assert await store.purge(datetime.now(UTC) + timedelta(hours=1)) >= 3

    for status, run in runs.items():
        left = 0 if status in ENDED else 1
        assert (await store.load(run.id) is not None) == bool(left), status
        assert len(await store.records(run.id)) == len(await store.events(run.id, 0)) == left, status


async def a_deleted_run_leaves_nothing(new_store: NewRunStore) -> None:
    """Its id can be used again."""
    store, _ = await _open_two(new_store)
    run = _new_run()
    await store.create(run, [StoredRecord("#begin", "begin", "{}")], owner="one")
    await store.add_events(run.id, 1, ["a"])

    await store.delete(run.id)

    assert await store.load(run.id) is None
    assert await store.create(run, owner="one")
    assert await store.records(run.id) == []
    assert await store.events(run.id, 0) == []


RUN_STORE_CHECKS: tuple[RunStoreCheck, ...] = (
    a_store_can_be_opened_again,
    a_stored_run_is_read_unchanged,
    a_new_header_is_stored_as_given,
    an_id_is_used_once,
    ids_of_runs_never_collide,
    one_of_many_creators_wins,
    an_unknown_run_has_nothing,
    records_come_back_in_the_order_written,
    a_record_whose_key_exists_is_ignored,
    a_record_that_replaces_another_one_keeps_its_place,
    a_record_that_replaces_another_one_has_its_own_kind,
    records_of_the_same_place_belong_to_one_run_each,
    a_run_has_one_owner,
    a_run_without_an_owner_is_taken_once,
    runs_that_nobody_executes_are_listed_oldest_first,
    renewing_keeps_a_run,
    an_owner_that_lost_its_run_writes_nothing_more,
    an_owner_that_is_only_late_keeps_its_run,
    a_released_run_is_available_immediately,
    only_running_runs_are_taken_over,
    a_change_needs_the_current_version,
    one_of_several_concurrent_changes_wins,
    only_changes_of_the_header_move_its_time,
    a_resumed_run_without_an_owner_is_available_immediately,
    a_change_of_the_status_fences_the_owner,
    a_run_can_lose_its_owner,
    an_owner_keeps_its_run_when_something_else_changes,
    a_wish_reaches_the_owner,
    only_a_run_with_an_owner_takes_a_wish,
    a_wish_stays_until_the_run_ends,
    messages_come_back_in_their_order,
    messages_added_at_once_are_all_kept,
    a_run_that_ends_takes_no_messages,
    events_are_numbered_in_each_run,
    the_next_owner_continues_the_numbers_of_events,
    events_written_at_once_have_separate_numbers,
    runs_are_found_by_status_and_service_newest_first,
    runs_are_found_in_pages,
    runs_are_found_by_who_asked,
    runs_are_found_by_their_conversation,
    waiting_runs_are_found_by_their_oldest_call,
    each_write_can_set_and_remove_the_time_of_the_oldest_call,
    a_run_is_not_taken_before_its_time,
    a_suspended_run_is_found_when_its_time_has_come,
    a_change_of_the_status_or_the_owner_removes_the_next_time,
    a_look_shows_what_changes,
    the_suspended_run_of_a_conversation_is_found,
    purging_deletes_old_runs_that_have_ended,
    a_deleted_run_leaves_nothing,
)
