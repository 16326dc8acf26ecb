"""A process that forks programs, and reading of the databases that those programs write."""

import asyncio
import functools
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

from sqlalchemy import NullPool, create_engine, inspect, text

from tests import programs
from toolbox import sql

from . import conversation, ferry_desk, handed_over, rooms, stoppable, suspensions, transfers, trips

LEASE = 3.0

PROGRAMS = tuple(
    each.__name__ for each in (suspensions, trips, rooms, handed_over, ferry_desk, stoppable, conversation)
)
"""Modules with more programs."""


class Forge:
    """The process that forks the programs of `transfers` and of other modules."""

    def __init__(self, *modules: str) -> None:
        """Start it; it imports `modules` once for all programs, those of `PROGRAMS` by default."""
        imported = "".join(f"import {each}; " for each in modules or PROGRAMS)
        program = f"{imported}from {transfers.__name__} import main; main()"
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent.parent)}
        self._process = subprocess.Popen(
            programs.command("-c", program),
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


class Reporting:
    """A forked program that sends through a connection how far it is. It gets the address first."""

    def __init__(self, forge: Forge, name: str, *arguments: Any) -> None:
        with Listener() as listener:
            self._pid = forge.begin(name, listener.address, *arguments)
            self.connection: Any = listener.accept()

    def kill(self) -> None:
        """Kill the process, unless it has ended, and wait for its end."""
        os.kill(self._pid, signal.SIGKILL)  # nobody else has its id: the forge waits for it later
        with suppress(EOFError, OSError):
            while True:
                self.connection.recv()
        self.connection.close()


def create_tables(url: str, tables: Sequence[str]) -> None:
    """Create the tables of a program."""
    with blocking(url).begin() as connection:
        for each in tables:
            connection.execute(text(each))


def prepared(url: str, tables: Sequence[str]) -> str:
    """Create the tables of a program and those of the runs; return the URL."""
    create_tables(url, tables)
    return create_run_tables(url)


def create_run_tables(url: str) -> str:
    """Create the tables of runs in a database, and return its URL."""

    async def migrate() -> None:
        async with sql.open_engine(url) as engine:
            await sql.SqlRunStore(engine).open()

    with ThreadPoolExecutor(1) as other:  # asynchronous fixtures call this while their loop runs
        other.submit(lambda: asyncio.run(migrate())).result()
    return url


@functools.cache  # the first connection of an engine asks for the server's version and settings
def blocking(url: str) -> Any:
    """Return an engine for code that is not async."""
    return create_engine(url.replace("postgresql:", "postgresql+psycopg:"), poolclass=NullPool)


def rows(url: str, statement: str) -> list[Any]:
    """Return the rows that a statement selects."""
    with blocking(url).connect() as connection:
        return [tuple(each) for each in connection.execute(text(statement))]


def end_leases(url: str) -> None:
    """Let all leases end at once, on a server too. No process that lives may have one."""
    with blocking(url).begin() as connection:
        for table in ("toolbox_runs_leases", "toolbox_conversations_leases"):
            if inspect(connection).has_table(table):
                connection.execute(text(f"UPDATE {table} SET until = 0"))


def until(holds: Callable[[], Any], seconds: float = 100) -> None:
    """Wait until a condition holds, at most so many seconds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(transfers.PAUSE)


# --- transfers


def check_books(url: str, runs: int, *, mails_may_repeat: bool = False) -> None:
    """Each transfer has happened once, whole.

    A mail is sent outside of the transaction of its record. If its connection breaks during the COMMIT, the tool fails
    although the mail was sent, and the model calls it again, with another key.
    """
    assert rows(url, "SELECT status, COUNT(*) FROM toolbox_runs GROUP BY status") == [("completed", runs)]
    booked = rows(url, "SELECT run, account, COUNT(*), SUM(cents) FROM ledger GROUP BY run, account")
    assert sorted({each[1:] for each in booked}) == [("payee", 1, 100), ("payer", 1, -100)]
    assert len(booked) == 2 * runs
    [(mailed, mails)] = rows(url, "SELECT COUNT(DISTINCT run), COUNT(*) FROM mails")
    assert mailed == runs
    assert mails == runs or (mails_may_repeat and mails > runs)
    results = rows(url, "SELECT document FROM toolbox_runs")
    assert {json.dumps(json.loads(each[0])["result"]) for each in results} == {'["transferred 100"]'}
    ends = rows(url, "SELECT run_id, data FROM toolbox_runs_events WHERE data LIKE '%CompleteResponse%'")
    assert len({each[0] for each in ends}) == runs


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
    end_leases(url)
    # No process is killed from here on. A slow one must not lose its run while it stamps: another one would look for
    # the stamp too early, and stamp again. No store can prevent this for a tool without a transaction.
    for _ in range(3):
        forge.begin("finish_stamped", url, 4 * LEASE, begun)
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
