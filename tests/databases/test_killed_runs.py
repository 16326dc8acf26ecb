"""Durable runs in processes that are killed at every step, stopped past their lease, and raced by others."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from . import transfers
from .conftest import restart
from .forge import LEASE, Forge, check_books, create_tables, end_leases, prepared, rows, sweep, until

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that fork"),
    pytest.mark.timeout(400),  # starts many processes
]


@pytest.fixture
def url(database_url: str) -> str:
    """A database with the tables of the bank and those of the runs."""
    return prepared(database_url, transfers.TABLES)


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
    end_leases(url)
    for step in range(1 + 3 * every, number, 3 * every):  # killed again while it goes on
        forge.begin("go_on", url, LEASE, f"killed at {step}", 3 + step % 7)
    forge.wait()
    end_leases(url)
    begun = rows(url, "SELECT COUNT(*) FROM toolbox_runs")[0][0]
    forge.begin("inherit", url, LEASE, begun)
    forge.begin("inherit", url, LEASE, begun)
    assert forge.wait() == [0, 0]

    check_books(url, begun)
    # A reply that was recorded is not asked for again; each process asks at most once for one that was not.
    records = rows(url, "SELECT run_id, COUNT(*) FROM toolbox_runs_records WHERE kind = 'reply' GROUP BY run_id")
    assert {each[1] for each in records} == {3}
    asked = rows(url, "SELECT run, results, COUNT(*) FROM asked WHERE run LIKE 'killed%' GROUP BY run, results")
    assert max(each[2] for each in asked) <= 3
    assert {each[1] for each in asked} == {0, 1, 3}


def test_a_process_is_killed_at_statements_of_every_kind_of_tool(forge: Forge, url: str) -> None:
    # `make crash` kills at every statement.
    assert sweep(forge, url, 9 if url.startswith("sqlite") else 11) > 12


@pytest.mark.parametrize("step", ["asked", "before append", "debited"])
def test_a_process_that_was_stopped_past_its_lease_writes_nothing_more(forge: Forge, url: str, step: str) -> None:
    if step == "debited" and url.startswith("sqlite"):
        pytest.skip("a stopped writer locks the whole SQLite database")
    pid = forge.begin("execute", url, LEASE, "order", None, step)
    until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    end_leases(url)
    forge.begin("inherit", url, LEASE, 1)
    until(lambda: rows(url, "SELECT COUNT(*) FROM toolbox_runs WHERE status = 'completed'") == [(1,)])
    before = rows(url, "SELECT * FROM toolbox_runs_records ORDER BY number")

    os.kill(pid, signal.SIGCONT)
    assert forge.wait() == [0, 0]

    check_books(url, 1)
    assert rows(url, "SELECT * FROM toolbox_runs_records ORDER BY number") == before


def start_runs(url: str, count: int) -> None:
    """Starts transfers that nothing executes yet."""

    async def start() -> None:
        async with transfers.bank(url, LEASE, take_over=False, engine=transfers.Nobody()) as (container, _):
            for number in range(count):
                await container.runs.start(transfers.Transfers.transfer, f"order {number}", 100)

    asyncio.run(start())


def test_workers_that_race_share_the_runs(forge: Forge, url: str) -> None:
    start_runs(url, 12)
    for _ in range(3):
        forge.begin("work", url, 60.0, 12)  # a long lease: none of them stops
    assert forge.wait() == [0, 0, 0]

    check_books(url, 12)
    asked = rows(url, "SELECT run, results, COUNT(*) FROM asked GROUP BY run, results")
    assert {each[2] for each in asked} == {1}


def test_a_database_that_restarts_loses_nothing(forge: Forge, forgetful_postgres: Any, forgetful_url: str) -> None:
    create_tables(forgetful_url, transfers.TABLES)
    start_runs(forgetful_url, 12)
    for _ in range(2):
        forge.begin("work", forgetful_url, 6.0, 12)
    for mode in ("immediate", "fast", "immediate"):
        until(lambda: rows(forgetful_url, "SELECT 1 FROM toolbox_runs_records LIMIT 1"))
        restart(forgetful_postgres, mode)
    assert forge.wait() == [0, 0]

    check_books(forgetful_url, 12, mails_may_repeat=True)
