"""The store of runs in memory passes the checks of all stores; and the rule of owners that all stores use."""

from typing import Any

import pytest

from toolbox.runs import KEEP, InMemoryRunStore, RunChanges, ownership_after
from toolbox.store_checks import RunStoreCheck, an_id_is_used_once
from toolbox.testing import run_store_checks

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("check", run_store_checks())
async def test_the_store_in_memory_keeps_the_promises_of_a_run_store(check: RunStoreCheck) -> None:
    stores: dict[float, InMemoryRunStore] = {}

    await check(lambda lease: stores.setdefault(lease, InMemoryRunStore(lease)))


async def test_two_stores_that_do_not_share_their_runs_fail() -> None:
    with pytest.raises(AssertionError):
        await an_id_is_used_once(InMemoryRunStore)


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
