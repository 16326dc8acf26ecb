"""Blocking tools under load: 200 runs at once in a FastAPI app, and a `def /health`; eight tools at once.

    make bench-execution                       # or ARGS="--rounds 5 --runs 200"

Each peer is the same app under uvicorn in a separate process. The peers are measured in turn, one at a time. A model
server that costs next to nothing answers in another process. The table shows medians over the rounds, and ratios to
the loop written by hand.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from statistics import median

import aiohttp

from . import results
from .ports import free_port

PEERS = ("by hand", "toolbox", "pydantic-ai", "langchain")
NEEDS = {"pydantic-ai": "pydantic_ai", "langchain": "langchain"}


@dataclass
class Measured:
    """One peer's numbers, a list entry a round: seconds for all runs, health latencies in ms, eight tools in ms."""

    total: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    worst: list[float] = field(default_factory=list)
    eight_sync: list[float] = field(default_factory=list)
    eight_async: list[float] = field(default_factory=list)


@asynccontextmanager
async def process(*arguments: str, port: int, **environment: str) -> AsyncIterator[None]:
    """A server of this folder, up as long as the block lasts."""
    child = subprocess.Popen(  # noqa: ASYNC220 - no other task waits
        [sys.executable, "-m", *arguments], env={**os.environ, **environment}, stdout=subprocess.DEVNULL
    )
    try:
        async with aiohttp.ClientSession() as session:
            for _ in range(600):
                try:
                    async with session.get(f"http://127.0.0.1:{port}/health"):
                        break
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(0.05)
            else:
                raise SystemExit(f"{arguments} did not start")
        yield
    finally:
        child.terminate()
        child.wait()


async def load(base: str, runs: int, measured: Measured) -> None:
    """One round: all runs at once, and one health request after another until they have ended."""
    latencies: list[float] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def run() -> None:
            async with session.post(f"{base}/run") as response:
                assert response.status == 200, await response.text()
                assert await response.json() == "done"

        async def watch() -> None:
            while True:
                began = time.perf_counter()
                async with session.get(f"{base}/health") as response:
                    await response.read()
                latencies.append((time.perf_counter() - began) * 1000)
                await asyncio.sleep(0.005)

        watching = asyncio.create_task(watch())
        began = time.perf_counter()
        await asyncio.gather(*(run() for _ in range(runs)))
        measured.total.append(time.perf_counter() - began)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        measured.health.append(median(latencies))
        measured.worst.append(max(latencies))
        for kind, into in (("sync", measured.eight_sync), ("async", measured.eight_async)):
            async with session.post(f"{base}/eight/{kind}") as response:
                assert response.status == 200, await response.text()
                into.append(await response.json())


async def measure(rounds: int, runs: int, peers: list[str], *, warm_up: bool) -> dict[str, Measured]:
    model_port = free_port()
    measured = {peer: Measured() for peer in peers}
    async with process("benchmarks.model_server", str(model_port), port=model_port):
        for number in range(0 if warm_up else 1, rounds + 1):
            for peer in peers if number % 2 else reversed(peers):
                port = free_port()
                environment = {
                    "OPENAI_BASE_URL": f"http://127.0.0.1:{model_port}/v1",
                    "OPENAI_API_KEY": "none",
                    "OPENAI_MODEL": "m",
                }
                target = "benchmarks.execution_apps"
                async with process(target, peer, str(port), port=port, **environment):
                    base = f"http://127.0.0.1:{port}"
                    await load(base, min(runs, 20), Measured())
                    # The first round warms the machine, not only the app.
                    await load(base, runs, measured[peer] if number else Measured())
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count; one more comes before them")
    parser.add_argument("--runs", type=int, default=200, help="runs at once, each with a tool that blocks 100 ms")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS)
    parser.set_defaults(warm_up=True)
    options = results.parse(parser, rounds=1, runs=10, warm_up=False)
    peers = results.installed(options.peers, NEEDS)
    found = asyncio.run(measure(options.rounds, options.runs, peers, warm_up=options.warm_up))
    if not options.json:
        report(found, options.rounds, options.runs)
    groups = (
        ("Time until all runs are done", "s", "total"),
        ("Median latency of /health during the runs", "ms", "health"),
        ("Worst latency of /health during the runs", "ms", "worst"),
        ("Eight blocking tools called at once", "ms", "eight_sync"),
        ("Eight coroutine tools called at once", "ms", "eight_async"),
    )
    chart = results.Chart(
        "execution",
        f"Blocking tools: {options.runs} runs at once",
        f"A FastAPI application under uvicorn receives {options.runs} requests at once. Each calls a tool that blocks "
        "for 100 ms. During the runs, a client asks a `def /health` endpoint again and again.",
        tuple(
            results.compare(title, unit, {peer: getattr(each, name) for peer, each in found.items()})
            for title, unit, name in groups
        ),
        ("fastapi", "uvicorn", "openai", "pydantic-ai-slim", "langchain"),
    )
    results.finish(options, chart, {peer: asdict(each) for peer, each in found.items()})


def report(found: dict[str, Measured], rounds: int, runs: int) -> None:
    """Print the table."""
    base = found.get("by hand")
    print(f"{runs} runs at once, each with a tool that blocks 100 ms; medians of {rounds} rounds")
    print(f"{'':12} {'all done':>10} {'/health p50':>12} {'ratio':>7} {'max':>9} {'8 sync':>9} {'8 async':>9}")
    for peer, each in found.items():
        ratio = f"{median(each.health) / median(base.health):.2f}x" if base else ""
        print(
            f"{peer:12} {median(each.total):8.2f} s {median(each.health):9.2f} ms {ratio:>7}"
            f" {median(each.worst):6.0f} ms {median(each.eight_sync):6.1f} ms {median(each.eight_async):6.1f} ms"
        )


if __name__ == "__main__":
    main()
