"""Runs through a DBOS queue: one process adds to it, workers execute, and what a dead worker left goes on."""

import asyncio
import logging
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import pytest

from toolbox import Container, IllegalConfigurationError, register_ai_service
from toolbox.dbos import DbosRunEngine
from toolbox.runs import InMemoryRunStore, RunEngine, RunId, RunStore
from toolbox.testing import ScriptedChatModel, skip_time

from . import transfers
from .forge import LEASE, Forge, check_books, create_tables, rows, until

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that fork"),
    pytest.mark.timeout(400),  # starts many processes
]


@pytest.fixture(scope="module")
def forge() -> Iterator[Forge]:
    """A process that forks, and has imported DBOS."""
    made = Forge("toolbox.dbos", "dbos")
    yield made
    made.close()


@pytest.fixture
def url(database_url: str) -> str:
    create_tables(database_url, transfers.TABLES)
    return database_url


async def start(url: str, *runs: str) -> None:
    """Starts transfers in a process that only adds to the queue."""
    engine = DbosRunEngine(polling=0.1)
    async with transfers.bank(url, LEASE, take_over=False, engine=engine) as (container, _):
        for each in runs:
            await container.runs.start(transfers.Transfers.transfer, each, 100)


def test_a_process_adds_to_the_queue_and_workers_execute(forge: Forge, url: str) -> None:
    asyncio.run(start(url, *(f"order {number}" for number in range(6))))
    for _ in range(2):
        forge.begin("work_with_dbos", url, LEASE, 6)

    assert forge.wait() == [0, 0]

    check_books(url, 6)


def test_what_a_killed_worker_left_is_delivered_again(forge: Forge, url: str) -> None:
    asyncio.run(start(url, "order"))
    forge.begin("work_with_dbos", url, LEASE, 1, "credited")
    assert forge.wait() == [-9]
    assert rows(url, "SELECT status FROM toolbox_runs") == [("running",)]

    forge.begin("work_with_dbos", url, LEASE, 1)
    assert forge.wait() == [0]

    check_books(url, 1)


def test_a_run_is_delivered_once_while_it_waits_in_the_queue(url: str) -> None:
    async def submit() -> int:
        engine = DbosRunEngine(polling=0.1)
        async with transfers.bank(url, LEASE, take_over=False, engine=engine) as (container, _):
            for _ in range(3):
                await container.runs.start(transfers.Transfers.transfer, "order", 100)
            client = await engine._open_client()
            return len(await asyncio.to_thread(client.list_workflows))

    assert asyncio.run(submit()) == 1


def test_the_engine_joins_the_instance_of_the_program(forge: Forge, sqlite_url: str, tmp_path: Path) -> None:
    create_tables(sqlite_url, transfers.TABLES)

    forge.begin("join_dbos", sqlite_url, f"sqlite:///{tmp_path}/own.sqlite")
    assert forge.wait() == [0]

    check_books(sqlite_url, 1)
    own = f"sqlite:///{tmp_path}/own.sqlite"
    until(lambda: rows(own, "SELECT COUNT(*) FROM workflow_status")[0][0] >= 1)
    assert set(rows(own, FORMAT)) == {("portable_json", "{")}


FORMAT = """
    SELECT status.serialization, SUBSTR(input.inputs, 1, 1)
    FROM workflow_status AS status JOIN workflow_input AS input USING (workflow_uuid)
    WHERE status.name = 'toolbox.execute_run'
"""


def test_what_is_written_for_dbos_is_json(forge: Forge, sqlite_url: str) -> None:
    create_tables(sqlite_url, transfers.TABLES)
    asyncio.run(start(sqlite_url, "order"))
    system = f"{sqlite_url}.dbos"
    assert rows(system, FORMAT) == [("portable_json", "{")]

    forge.begin("work_with_dbos", sqlite_url, LEASE, 1)
    assert forge.wait() == [0]

    check_books(sqlite_url, 1)
    assert set(rows(system, FORMAT)) == {("portable_json", "{")}
    assert {output for [output] in rows(system, "SELECT output FROM workflow_output")} <= {"null", None}


class AtOnce(DbosRunEngine):
    """Delivers each run when it is submitted, without a database of DBOS."""

    def __init__(self) -> None:
        super().__init__()
        self.submitted: list[str] = []

    async def attach(self, runs: Any, executes: bool) -> None:
        self._runs, self._loop = runs, asyncio.get_running_loop()

    async def submit(self, run_id: str, generation: int) -> None:
        self.submitted.append(run_id)
        await self.execute(run_id)


class Nowhere(RunEngine):
    """Executes nothing."""

    async def submit(self, run_id: str, generation: int) -> None:
        pass


@register_ai_service
class Old(Protocol):
    async def ask(self, run: RunId, text: str) -> str: ...


@register_ai_service
class New(Protocol):
    async def ask(self, run: RunId, text: str) -> str: ...


def test_a_run_that_no_worker_can_continue_is_delivered_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = AtOnce()

    async def deploy() -> None:
        store, models = InMemoryRunStore(), {"default": ScriptedChatModel([])}
        before = Container(models=models, take_over_runs=False).register(Old).register_instance(store, RunStore)
        async with before.register_instance(Nowhere(), RunEngine) as here:
            await here.runs.start(Old.ask, "r", "hi")
        after = Container(models=models).register(New).register_instance(store, RunStore)
        async with after.register_instance(engine, RunEngine):
            for _ in range(3):
                await skip_time(after, timedelta(minutes=1))

    with caplog.at_level(logging.ERROR, "toolbox"):
        asyncio.run(deploy())

    assert engine.submitted == ["r"]
    assert len([each for each in caplog.records if "has no service" in each.getMessage()]) == 1


def test_mistakes_are_named() -> None:
    for mistake, options in (
        ("concurrency", {"concurrency": 0}),
        ("polling", {"polling": 0}),
        ("queue", {"queue": ""}),
    ):
        with pytest.raises(ValueError, match=mistake):
            DbosRunEngine(**options)  # type: ignore[arg-type]


def test_a_store_in_memory_has_no_database_for_dbos() -> None:
    async def begin() -> None:
        container = Container()
        container.register_instance(InMemoryRunStore(), RunStore)
        container.register_instance(DbosRunEngine(), RunEngine)
        async with container:
            pass

    with pytest.raises(IllegalConfigurationError, match="give DbosRunEngine a database_url"):
        asyncio.run(begin())
