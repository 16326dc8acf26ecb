"""Connections while a model works: 100 requests at once that read a row and then ask a model that takes 2 s.

    make bench-connections                     # or ARGS="--rounds 2 --requests 50"

A FastAPI application under uvicorn with a pool of five connections to PostgreSQL: with toolbox, with `Depends` and
pydantic-ai, and the same with a commit written before the call of the model. All else is SQLAlchemy's default, such as
the 30 s after which a request without a connection fails. During the requests, a client asks a `/health` endpoint that
makes a query, and another one counts the connections that are `idle in transaction`.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from statistics import fmean

import aiohttp
import asyncpg

from benchmarks import results
from benchmarks.app import database, running, until_ready
from benchmarks.ports import free_port

PROGRAMS = "benchmarks.connections_apps"
PEERS = {"toolbox": "toolbox", "Depends and pydantic-ai": "pydantic-ai", "the same, commit by hand": "by-hand"}
ROW = "CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT NOT NULL); INSERT INTO customers VALUES (1, 'Ada')"
IDLE = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction' "
    "AND pid <> pg_backend_pid()"
)


@dataclass(slots=True)
class Measured:
    """The rounds of one peer: answered requests per second, time-outs, `/health` in ms, and idle connections."""

    per_second: list[float] = field(default_factory=list)
    timeouts: list[float] = field(default_factory=list)
    worst: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)


async def one_round(base: str, url: str, count: int, measured: Measured) -> None:
    """Send the requests at once, and watch the program until all have an answer."""
    health: list[float] = []
    idle: list[int] = []
    answers: list[bool] = []

    async def ask(session: aiohttp.ClientSession) -> None:
        async with session.get(f"{base}/ask") as response:
            text = await response.text()
            assert response.status in (200, 500), text
            answers.append(response.status == 200 and text == '"Ada: done"')

    async def watch_health(session: aiohttp.ClientSession) -> None:
        while True:
            begin = time.perf_counter()
            try:
                async with session.get(f"{base}/health") as response:
                    await response.read()
            finally:  # also if the requests end first
                health.append((time.perf_counter() - begin) * 1000)
            await asyncio.sleep(0.05)

    async def count_idle(connection: asyncpg.Connection) -> None:
        while True:
            await asyncio.sleep(0.1)
            idle.append(await connection.fetchval(IDLE))

    connector, limit = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=120)
    connection = await asyncpg.connect(url)
    async with aiohttp.ClientSession(connector=connector, timeout=limit) as session:
        watching = [asyncio.create_task(watch_health(session)), asyncio.create_task(count_idle(connection))]
        begin = time.perf_counter()
        await asyncio.gather(*(ask(session) for _ in range(count)))
        seconds = time.perf_counter() - begin
        for each in watching:
            each.cancel()
        await asyncio.wait(watching)
    await connection.close()
    measured.per_second.append(sum(answers) / seconds)
    measured.timeouts.append(answers.count(False))
    measured.worst.append(max(health))
    measured.idle.append(fmean(idle))


async def measure(peers: list[str], rounds: int, count: int, seconds: float) -> dict[str, Measured]:
    """Return the figures of the peers, which take turns."""
    found = {peer: Measured() for peer in peers}
    with database("postgresql") as url, running("model", str(model := free_port()), str(seconds), programs=PROGRAMS):
        connection = await asyncpg.connect(url)
        await connection.execute(ROW)
        await connection.close()
        async with aiohttp.ClientSession() as session:
            await until_ready(session, f"http://127.0.0.1:{model}/health")
        for number in range(rounds):
            for peer in peers[:: 1 if number % 2 == 0 else -1]:
                base = f"http://127.0.0.1:{(port := free_port())}"
                with running(PEERS[peer], str(port), f"http://127.0.0.1:{model}/v1", url, programs=PROGRAMS):
                    async with aiohttp.ClientSession() as session:
                        await until_ready(session, f"{base}/health")
                        async with session.get(f"{base}/ask") as response:  # loads what the first request loads
                            assert await response.text() == '"Ada: done"'
                    await one_round(base, url, count, found[peer])
    return found


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=2.0, help="the time that the model takes")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS)
    options = results.parse(parser, rounds=1, requests=5, seconds=0.1, peers=list(PEERS)[:2])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the processes it has started end with it
    peers = results.installed(options.peers, {peer: "pydantic_ai" for peer in PEERS if peer != "toolbox"})
    found = asyncio.run(measure(peers, options.rounds, options.requests, options.seconds))
    groups = (
        ("Answered requests", "requests/s", "per_second", True),
        ("Requests that timed out without a connection", "requests", "timeouts", False),
        ("Worst latency of /health with a query", "ms", "worst", False),
        ("Connections that were idle in transaction, on average", "connections", "idle", False),
    )
    compared = tuple(
        results.compare(
            title, unit, {peer: getattr(each, name) for peer, each in found.items()}, more_is_better=more_is_better
        )
        for title, unit, name, more_is_better in groups
    )
    if not options.json:
        for group in compared:
            print(group.title)
            for bar in group.bars:
                ratio = f"{bar.ratio:8.2f}x" if bar.ratio is not None else ""
                print(f"  {bar.label:26} {bar.median:10.2f} {group.unit}{ratio}")
    chart = results.Chart(
        "connections",
        f"Connections: {options.requests} requests at once that ask a model",
        f"A FastAPI application with five connections to PostgreSQL receives {options.requests} requests at once. Each "
        f"reads a row, and then asks a model that takes {options.seconds:g} s. During the requests, a client asks a "
        "`/health` endpoint that makes a query.",
        compared,
        ("fastapi", "uvicorn", "sqlalchemy", "asyncpg", "pydantic-ai-slim"),
    )
    results.finish(options, chart, {peer: asdict(each) for peer, each in found.items()})


if __name__ == "__main__":
    main()
