"""A store with one run, which is running, and its events."""

from datetime import UTC, datetime
from typing import Any

from toolbox.runs import InMemoryRunStore, StoredRun
from toolbox.runs.run_events import RunEvents, number_after
from toolbox.runs.stored_runs import StoredRuns

NOW = datetime(2026, 1, 2, tzinfo=UTC)


async def store_with_a_run(store: InMemoryRunStore | None = None) -> InMemoryRunStore:
    """Return a store with the run `run`, which the process `one` executes."""
    store = store or InMemoryRunStore()
    run = StoredRun(
        id="run", service="shop:Desk", method="chat", status="running", document="{}", created_at=NOW, updated_at=NOW
    )
    await store.create(run, owner="one")
    return store


class Host:
    """A host without services, on the loop of the test."""

    loop = None

    def __init__(self, store: InMemoryRunStore) -> None:
        self._store = store

    async def run_store(self) -> InMemoryRunStore:
        return self._store


def stored_in(store: InMemoryRunStore) -> StoredRuns:
    """Return the runs of a store, as one process sees them."""
    host: Any = Host(store)
    return StoredRuns(host)


def events_of(
    store: InMemoryRunStore, after: int | str | None = None, run_id: str = "run", why: str | None = None
) -> RunEvents:
    """Return the events of a run, read on the loop of the test; `why` is the reason of its end."""
    return RunEvents(stored_in(store), run_id, number_after(after), lambda run: why)
