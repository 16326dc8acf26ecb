"""The store of runs in memory passes the checks of all stores, broken ones fail; and the rule of owners.

Not here: stores of runs in databases (`tests/databases/test_run_stores.py`).
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any

import pytest

from toolbox.runs import KEEP, InMemoryRunStore, RunChanges, ownership_after
from toolbox.runs.store import StoredRecord, StoredRun
from toolbox.store_checks.run_stores import (
    RunStoreCheck,
    a_store_can_be_opened_again,
    a_wish_reaches_the_owner,
    a_wish_stays_until_the_run_ends,
    an_id_is_used_once,
    each_write_can_set_and_remove_the_time_of_the_oldest_call,
    ids_of_runs_never_collide,
    only_a_run_with_an_owner_takes_a_wish,
    purging_deletes_old_runs_that_have_ended,
    waiting_runs_are_found_by_their_oldest_call,
)
from toolbox.testing import run_store_checks

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("check", run_store_checks())
async def test_the_store_in_memory_keeps_the_promises_of_a_run_store(check: RunStoreCheck) -> None:
    stores: dict[float, InMemoryRunStore] = {}

    await check(lambda lease: stores.setdefault(lease, InMemoryRunStore(lease)))


async def test_two_stores_that_do_not_share_their_runs_fail() -> None:
    with pytest.raises(AssertionError):
        await an_id_is_used_once(InMemoryRunStore)


# --- stores that break one promise each


class DropsTimeOfOwner(InMemoryRunStore):
    async def append(
        self,
        run_id: str,
        generation: int,
        records: Sequence[StoredRecord],
        changes: RunChanges | None = None,
        events: Sequence[str] = (),
    ) -> None:
        kept = None if changes is None else replace(changes, waiting_since=KEEP)
        await super().append(run_id, generation, records, kept, events)


class NeverRemovesTime(InMemoryRunStore):
    def _change(self, kept: Any, changes: RunChanges, *, by_owner: bool) -> None:
        since = KEEP if changes.waiting_since is None else changes.waiting_since
        super()._change(kept, replace(changes, waiting_since=since), by_owner=by_owner)


class PurgesWaitingRuns(InMemoryRunStore):
    async def purge(self, before: datetime) -> int:
        waiting = [each for each in await self.find(status="suspended") if each.updated_at < before]
        for each in waiting:
            await self.delete(each.id)
        return len(waiting) + await super().purge(before)


class IgnoresStatusOfWaitingRuns(InMemoryRunStore):
    async def find(self, **conditions: Any) -> list[StoredRun]:
        if conditions.get("waiting_longer_than") is not None:
            conditions.pop("status", None)
        return await super().find(**conditions)


class StartsEmpty(InMemoryRunStore):
    async def open(self) -> None:
        self._runs.clear()


class OpensTwice(InMemoryRunStore):
    """It is opened by the two processes of a check, and then no more."""

    opened = 0

    async def open(self) -> None:
        self.opened += 1
        assert self.opened <= 2


class UsesFileNames(InMemoryRunStore):
    """It keeps a run under a name that is made of its id."""

    async def create(self, run: StoredRun, records: Sequence[StoredRecord] = (), *, owner: str | None = None) -> bool:
        name = self.name_of(run.id)
        return await super().create(replace(run, id=name), records, owner=owner)

    def name_of(self, run_id: str) -> str:
        raise NotImplementedError


class IgnoresFolders(UsesFileNames):
    def name_of(self, run_id: str) -> str:
        return PurePosixPath(run_id).name


class IgnoresCase(UsesFileNames):
    def name_of(self, run_id: str) -> str:
        return run_id.lower()


class CutsIds(UsesFileNames):
    def name_of(self, run_id: str) -> str:
        return run_id[:199]


class ForgetsWishes(InMemoryRunStore):
    """It keeps a wish with the lease."""

    async def release(self, run_id: str, generation: int) -> None:
        await super().release(run_id, generation)
        self._runs[run_id].wish = None


class KeepsWishes(InMemoryRunStore):
    def _change(self, kept: Any, changes: RunChanges, *, by_owner: bool) -> None:
        wish = kept.wish
        super()._change(kept, changes, by_owner=by_owner)
        kept.wish = wish


class TakesAllWishes(InMemoryRunStore):
    async def add_wish(self, run_id: str, wish: str) -> bool:
        await super().add_wish(run_id, wish)
        return True


class TakesLastWish(InMemoryRunStore):
    async def add_wish(self, run_id: str, wish: str) -> bool:
        if (kept := self._runs.get(run_id)) is not None:
            kept.wish = None
        return await super().add_wish(run_id, wish)


@pytest.mark.parametrize(
    ("store", "check"),
    [
        (ForgetsWishes, a_wish_stays_until_the_run_ends),
        (KeepsWishes, a_wish_stays_until_the_run_ends),
        (TakesAllWishes, only_a_run_with_an_owner_takes_a_wish),
        (TakesLastWish, a_wish_reaches_the_owner),
        (DropsTimeOfOwner, each_write_can_set_and_remove_the_time_of_the_oldest_call),
        (NeverRemovesTime, each_write_can_set_and_remove_the_time_of_the_oldest_call),
        (PurgesWaitingRuns, purging_deletes_old_runs_that_have_ended),
        (IgnoresStatusOfWaitingRuns, waiting_runs_are_found_by_their_oldest_call),
        (StartsEmpty, a_store_can_be_opened_again),
        (OpensTwice, a_store_can_be_opened_again),
        (IgnoresFolders, ids_of_runs_never_collide),
        (IgnoresCase, ids_of_runs_never_collide),
        (CutsIds, ids_of_runs_never_collide),
    ],
)
async def test_a_store_that_breaks_a_promise_fails_its_check(
    store: type[InMemoryRunStore], check: RunStoreCheck
) -> None:
    shared = store(60)

    def new_store(lease: float) -> InMemoryRunStore:
        shared.lease = lease
        return shared

    with pytest.raises(AssertionError):
        await check(new_store)


# --- owners


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


@pytest.mark.parametrize("lease", [0, -1])
def test_leases_must_be_positive(lease: float) -> None:
    with pytest.raises(ValueError, match="lease"):
        InMemoryRunStore(lease)
