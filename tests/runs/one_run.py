"""A store with one run, which is running, and its events."""

from datetime import UTC, datetime
from typing import Any

from toolbox.runs import InMemoryRunStore, StoredRun
from toolbox.runs.event_log import RunEvents, RunSignals, number_after

NOW = datetime(2026, 1, 2, tzinfo=UTC)


async def store_with_a_run() -> InMemoryRunStore:
    """Return a store with the run `run`, which the process `one` executes."""
    store = InMemoryRunStore()
    run = StoredRun(
        id="run", service="shop:Desk", method="chat", status="running", document="{}", created_at=NOW, updated_at=NOW
    )
    await store.create(run, owner="one")
    return store


def events_of(
    store: InMemoryRunStore, after: int | str | None = None, run_id: str = "run", why: str | None = None
) -> RunEvents:
    """Return the events of a run, read on the loop of the test; `why` is the reason of its end."""

    async def here(work: Any) -> Any:
        return await work()

    async def opened() -> InMemoryRunStore:
        return store

    return RunEvents(run_id, number_after(after), here, opened, RunSignals(), lambda run: why)
