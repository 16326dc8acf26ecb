"""Durable runs in processes that are killed at every step, stopped past their lease, and raced by others."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import NullPool, create_engine, text

from toolbox import sql

from . import transfers
from .conftest import restart

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that fork")

LEASE = 3.0


class Forge:
    """The process that forks the programs of `transfers`."""

    def __init__(self, *modules: str) -> None:
        imported = "".join(f"import {each}; " for each in modules)
        program = f"{imported}from {transfers.__name__} import main; main()"
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent.parent)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        assert self._says() == "ready"
        self.is_idle = True

    def _says(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def begin(self, name: str, *arguments: Any) -> int:
        """Starts a program, and returns its process id."""
        assert self._process.stdin is not None
        self.is_idle = False
        self._process.stdin.write(json.dumps([name, arguments]) + "\n")
        self._process.stdin.flush()
        _, _, pid = json.loads(self._says())
        return int(pid)

    def wait(self) -> list[int]:
        """Waits for all programs, and returns their exit statuses; -9 is SIGKILL."""
        assert self._process.stdin is not None
        self._process.stdin.write('["wait", []]\n')
        self._process.stdin.flush()
        found = []
        while len(said := json.loads(self._says())) == 3:
            found.append(said[2])
        self.is_idle = True
        return found

    def close(self) -> None:
        """Kills the process and all that it has forked."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


@pytest.fixture(scope="module")
def forges() -> Iterator[list[Forge]]:
    """The current process that forks, if there is one."""
    made: list[Forge] = []
    yield made
    for each in made:
        each.close()


@pytest.fixture
def forge(forges: list[Forge]) -> Iterator[Forge]:
    """A process that forks, shared by the tests; a test that fails leaves none of its programs to the next one."""
    if not forges:
        forges.append(Forge())
    yield forges[0]
    if not forges[0].is_idle:
        forges.pop().close()


@pytest.fixture
def url(database_url: str) -> str:
    """A database with the tables of the bank and those of the runs."""
    with blocking(database_url).begin() as connection:
        for each in transfers.TABLES:
            connection.execute(text(each))

    async def migrate() -> None:
        async with sql.open_engine(database_url) as engine:
            await sql.SqlRunStore(engine).open()

    asyncio.run(migrate())
    return database_url


def blocking(url: str) -> Any:
    return create_engine(url.replace("postgresql:", "postgresql+psycopg:"), poolclass=NullPool)


def rows(url: str, statement: str) -> list[Any]:
    with blocking(url).connect() as connection:
        return [tuple(each) for each in connection.execute(text(statement))]


def until(holds: Any, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def check_books(url: str, runs: int) -> None:
    """Each transfer has happened once, whole."""
    assert rows(url, "SELECT status, COUNT(*) FROM toolbox_runs GROUP BY status") == [("completed", runs)]
    booked = rows(url, "SELECT run, account, COUNT(*), SUM(cents) FROM ledger GROUP BY run, account")
    assert sorted({each[1:] for each in booked}) == [("payee", 1, 100), ("payer", 1, -100)]
    assert len(booked) == 2 * runs
    assert rows(url, "SELECT COUNT(DISTINCT run), COUNT(*) FROM mails") == [(runs, runs)]
    results = rows(url, "SELECT document FROM toolbox_runs")
    assert {json.dumps(json.loads(each[0])["result"]) for each in results} == {'["transferred 100"]'}
    ends = rows(url, "SELECT run_id, data FROM toolbox_runs_events WHERE data LIKE '%CompleteResponse%'")
    assert len({each[0] for each in ends}) == runs


def test_a_process_is_killed_at_every_step(forge: Forge, url: str) -> None:
    forge.begin("count", url, LEASE, "whole")
    assert forge.wait() == [0]
    [(number,)] = rows(url, "SELECT results FROM asked WHERE run = 'steps'")
    assert number > 25

    # `make crash` kills at all steps, at random. Here each database has its share of them.
    every = 2 if url.startswith("sqlite") else 3
    for step in range(1, number, every):
        forge.begin("execute", url, LEASE, f"killed at {step}", step)
        if step % 6 == 1:
            assert set(forge.wait()) <= ({-9} if step < 25 else {-9, 0})  # events are written in varying portions
    forge.wait()
    for step in range(1 + 3 * every, number, 3 * every):  # killed again while it goes on
        forge.begin("go_on", url, LEASE, f"killed at {step}", 3 + step % 7)
    forge.wait()
    begun = rows(url, "SELECT COUNT(*) FROM toolbox_runs")[0][0]
    forge.begin("work", url, LEASE, begun)
    forge.begin("work", url, LEASE, begun)
    assert forge.wait() == [0, 0]

    check_books(url, begun)
    # A reply that was recorded is not asked for again; each process asks at most once for one that was not.
    records = rows(url, "SELECT run_id, COUNT(*) FROM toolbox_runs_records WHERE kind = 'reply' GROUP BY run_id")
    assert {each[1] for each in records} == {3}
    asked = rows(url, "SELECT run, results, COUNT(*) FROM asked WHERE run LIKE 'killed%' GROUP BY run, results")
    assert max(each[2] for each in asked) <= 3
    assert {each[1] for each in asked} == {0, 1, 3}


def sweep(forge: Forge, url: str, every: int) -> int:
    """Kill a process at every `every`th statement of a transfer, finish all, and check; returns how many were killed.

    Tools of all kinds take part: transactional ones, one with an idempotency key, one that asks about its outcome.
    """
    forge.begin("transfer_stamped", url, LEASE, "counted", None)
    assert forge.wait() == [0]
    [(number,)] = rows(url, "SELECT results FROM asked WHERE run = 'steps'")
    assert number > 60
    killed = 0
    for step in range(1, number, every):
        forge.begin("transfer_stamped", url, LEASE, f"killed at {step}", step)
        killed += 1
        if killed % 6 == 0:
            assert set(forge.wait()) <= {-9, 0}  # events are written in varying portions
    assert set(forge.wait()) <= {-9, 0}
    begun = rows(url, "SELECT COUNT(*) FROM toolbox_runs")[0][0]
    for _ in range(3):
        forge.begin("finish_stamped", url, LEASE, begun)
    assert forge.wait() == [0, 0, 0]

    check_books(url, begun)
    assert rows(url, "SELECT COUNT(DISTINCT run), COUNT(*) FROM stamps") == [(begun, begun)]
    replies = rows(url, "SELECT run_id, COUNT(*) FROM toolbox_runs_records WHERE kind = 'reply' GROUP BY run_id")
    assert {each[1] for each in replies} == {4}
    # Each owner of a run asks at most once for a reply that is not recorded, and never for one that is.
    asked = dict(rows(url, "SELECT run, COUNT(*) FROM asked WHERE run <> 'steps' GROUP BY run"))
    for run, generation in rows(url, "SELECT id, generation FROM toolbox_runs"):
        assert 4 <= asked[run] <= 4 + generation - 1, run
    return killed


def test_a_process_is_killed_at_statements_of_every_kind_of_tool(forge: Forge, url: str) -> None:
    # `make crash` kills at every statement.
    assert sweep(forge, url, 9 if url.startswith("sqlite") else 11) > 12


@pytest.mark.parametrize("step", ["asked", "before append", "debited"])
def test_a_process_that_was_stopped_past_its_lease_writes_nothing_more(forge: Forge, url: str, step: str) -> None:
    if step == "debited" and url.startswith("sqlite"):
        pytest.skip("a stopped writer locks the whole SQLite database")
    pid = forge.begin("execute", url, LEASE, "order", None, step)
    until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    forge.begin("work", url, LEASE, 1)
    until(lambda: rows(url, "SELECT COUNT(*) FROM toolbox_runs WHERE status = 'completed'") == [(1,)])
    before = rows(url, "SELECT * FROM toolbox_runs_records ORDER BY number")

    os.kill(pid, signal.SIGCONT)
    assert forge.wait() == [0, 0]

    check_books(url, 1)
    assert rows(url, "SELECT * FROM toolbox_runs_records ORDER BY number") == before


def start_runs(url: str, count: int) -> None:
    """Starts transfers that nothing executes yet."""

    async def start() -> None:
        async with transfers.bank(url, LEASE, take_over=False, engine=_Nobody()) as (container, _):
            for number in range(count):
                await container.runs.start(transfers.Transfers.transfer, f"order {number}", 100)

    asyncio.run(start())


def test_workers_that_race_share_the_runs(forge: Forge, url: str) -> None:
    start_runs(url, 12)
    for _ in range(3):
        forge.begin("work", url, LEASE, 12)
    assert forge.wait() == [0, 0, 0]

    check_books(url, 12)
    asked = rows(url, "SELECT run, results, COUNT(*) FROM asked GROUP BY run, results")
    assert {each[2] for each in asked} == {1}


class _Nobody:
    async def submit(self, run_id: str, generation: int) -> None:
        pass


def test_a_database_that_restarts_loses_nothing(forge: Forge, forgetful_postgres: Any, forgetful_url: str) -> None:
    with blocking(forgetful_url).begin() as connection:
        for each in transfers.TABLES:
            connection.execute(text(each))
    start_runs(forgetful_url, 12)
    for _ in range(2):
        forge.begin("work", forgetful_url, 6.0, 12)
    for mode in ("immediate", "fast", "immediate"):
        until(lambda: rows(forgetful_url, "SELECT 1 FROM toolbox_runs_records LIMIT 1"))
        restart(forgetful_postgres, mode)
    assert forge.wait() == [0, 0]

    check_books(forgetful_url, 12)
