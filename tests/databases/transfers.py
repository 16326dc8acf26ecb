"""Money transfers of an AI service, as programs that tests kill, stop and restart.

`python -c "from … import transfers; …"` is slow to start, so one process imports everything and forks the others.
Commands come on standard input, one JSON list per line: `[name, [arguments …]]`; each runs in a forked child, whose
exit status is printed as `[name, status]`.
"""

import asyncio
import gc
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import timedelta
from typing import Any, Protocol

from sqlalchemy import Connection, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from toolbox import (
    AiMessage,
    ChatRequest,
    ChatResponse,
    Container,
    Inject,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    UserMessage,
    application_scoped,
    register_ai_service,
    sql,
    tool,
    user_message,
)
from toolbox.errors import IllegalConfigurationError, LeaseLostError
from toolbox.runs import IdempotencyKey, RunAnswerError, RunId, RunStore, respond, retry
from toolbox.sql import SqlRunStore
from toolbox.testing import skip_time, tool_call

TABLES = (
    "CREATE TABLE ledger (run VARCHAR, account VARCHAR, cents INTEGER)",
    "CREATE TABLE mails (key VARCHAR PRIMARY KEY, run VARCHAR)",
    "CREATE TABLE asked (run VARCHAR, results INTEGER)",
    "CREATE TABLE stamps (run VARCHAR)",
)

PAUSE = 0.3
"""Seconds between two looks at what other processes have done. Each look takes milliseconds of processor time."""

FOREVER = 10**9
"""The number of runs of a worker that does not end."""

# --- steps at which a process can be killed


class Steps:
    """Counts the steps of this process, and kills or stops it at the chosen one."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.kill_at: int | None = None
        self.stop_at: str | None = None
        self.kill_when: str | None = None

    def take(self, name: str) -> None:
        self.taken.append(name)
        if self.kill_at is not None and len(self.taken) >= self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kill_when == name:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.stop_at == name:
            self.stop_at = None
            os.kill(os.getpid(), signal.SIGSTOP)


steps = Steps()


STATEMENTS = ("before_cursor_execute", "commit")
"""Events before each statement and before each commit."""


def step_at(engine: AsyncEngine, *events: str) -> None:
    """Take a step at each of these events of an engine."""
    for name in events:

        def happens(*_: object, name: str = name) -> None:
            steps.take(name)

        event.listen(engine.sync_engine, name, happens)


def step_before_writes(engine: AsyncEngine) -> None:
    """Take a step before each commit, and before each statement that is committed at once.

    These are all the states in which a process that is killed can leave the database: of a transaction that was not
    committed, nothing is left.
    """

    for name, commits_at_once in (("before_cursor_execute", True), ("commit", False)):

        def happens(connection: Connection, *_: object, at_once: bool = commits_at_once) -> None:
            if at_once == (connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT"):
                steps.take("write")

        event.listen(engine.sync_engine, name, happens)


async def kill_in(database: AsyncEngine, work: Coroutine[Any, Any, object], kill_at: int | None) -> None:
    """Await work that is killed before a write or at its end. Writes the number of steps to `steps` if it is not."""
    step_before_writes(database)
    steps.kill_at = kill_at
    await work
    steps.take("end")
    taken, steps.kill_at = len(steps.taken), None
    async with database.begin() as connection:
        await connection.execute(text("INSERT INTO steps VALUES (:taken)"), {"taken": taken})


class SteppingStore(SqlRunStore):
    """Takes a step before and after each write."""


def _stepping(name: str) -> Any:
    written = getattr(SqlRunStore, name)

    async def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        steps.take(f"before {name}")
        value = await written(self, *args, **kwargs)
        steps.take(f"after {name}")
        return value

    return step


for _name in ("create", "append", "acquire", "add_events", "add_wish"):
    setattr(SteppingStore, _name, _stepping(_name))

# --- the service


class Bank:
    @tool
    @sql.transactional
    async def debit(self, run: str, cents: int, session: Inject[AsyncSession]) -> str:
        await _book(session, run, "payer", -cents)
        steps.take("debited")
        return "debited"

    @tool
    @sql.transactional
    async def credit(self, run: str, cents: int, session: Inject[AsyncSession]) -> str:
        await _book(session, run, "payee", cents)
        steps.take("credited")
        return "credited"


async def _book(session: AsyncSession, run: str, account: str, cents: int) -> None:
    statement = text("INSERT INTO ledger VALUES (:run, :account, :cents)")
    await session.execute(statement, {"run": run, "account": account, "cents": cents})


@application_scoped
class Mail:
    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    @tool(on_unknown_outcome="retry")
    async def send(self, run: str, key: IdempotencyKey) -> str:
        steps.take("sending")
        async with self._engine.connect() as connection:
            await connection.execution_options(toolbox_for_writing=True)
            if connection.dialect.name == "postgresql":  # a mail server does not forget what it has sent
                await connection.execute(text("SET LOCAL synchronous_commit = on"))
            statement = text("INSERT INTO mails VALUES (:key, :run) ON CONFLICT DO NOTHING")
            await connection.execute(statement, {"key": key, "run": run})
            await connection.commit()
        steps.take("sent")
        return "sent"


@application_scoped
class Notary:
    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    @tool(on_unknown_outcome="ask")
    async def stamp(self, run: str) -> str:
        async with self._engine.connect() as connection:
            await connection.execution_options(toolbox_for_writing=True)
            await connection.execute(text("INSERT INTO stamps VALUES (:run)"), {"run": run})
            await connection.commit()
        steps.take("stamped")
        return "stamped"


@register_ai_service(tools=[Bank, Mail, Notary], durable=True)
class StampedTransfers(Protocol):
    @user_message("{cents} {run}")
    async def transfer(self, run: RunId, cents: int) -> str: ...


@register_ai_service(tools=[Bank, Mail], durable=True)
class Transfers(Protocol):
    @user_message("{cents} {run}")
    async def transfer(self, run: RunId, cents: int) -> str: ...


class Clerk:
    """A model that debits, credits, writes a mail, has it stamped if it can, and answers; notes each question."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def chat(self, request: ChatRequest) -> ChatResponse:
        question = next(each for each in reversed(request.messages) if isinstance(each, UserMessage))
        cents, _, run = question.text.partition(" ")
        results = [each for each in request.messages if isinstance(each, ToolExecutionResultMessage)]
        steps.take("asked")
        with suppress(OSError, DBAPIError):  # the database restarts
            async with self._engine.connect() as connection:
                await connection.execution_options(toolbox_for_writing=True)
                statement = text("INSERT INTO asked VALUES (:run, :results)")
                await connection.execute(statement, {"run": run, "results": len(results)})
                await connection.commit()
        done = {each.tool_name for each in results if not each.is_error}
        calls: list[ToolExecutionRequest] = []
        if "debit" not in done:
            calls.append(tool_call("debit", {"run": run, "cents": int(cents)}))
        else:
            if "credit" not in done:
                calls.append(tool_call("credit", {"run": run, "cents": int(cents)}))
            if "send" not in done:
                calls.append(tool_call("send", {"run": run}))
            if not calls and "stamp" not in done and any(each.name == "stamp" for each in request.tool_specifications):
                calls.append(tool_call("stamp", {"run": run}))
        steps.take("replies")
        return ChatResponse(AiMessage(None if calls else f"transferred {cents}", calls))


class Nobody:
    """An engine that executes no run."""

    async def submit(self, run_id: str, generation: int) -> None:
        pass


def new_bank(
    database: AsyncEngine, lease: float, take_over: bool, engine: Any = None, settings: Any = None
) -> Container:
    """Return a container of the service."""
    container = Container(models={"default": Clerk(database)}, take_over_runs=take_over, settings=settings)
    container.register_instance(database, AsyncEngine)
    container.register_instance(SteppingStore(database, lease), RunStore)
    container.register(sql.session, Transfers, StampedTransfers)
    if engine is not None:
        from toolbox.runs import RunEngine

        container.register_instance(engine, RunEngine)
    return container


def bank(url: str, lease: float, *, take_over: bool, **options: Any) -> Any:
    """A started container of the service, with its database engine."""
    return started(new_bank, url, lease, take_over, **options)


# --- containers


_ready: dict[tuple[Any, ...], tuple[Container, AsyncEngine, Any]] = {}
"""Containers and engines of `prepare`, by its arguments."""


def prepare(make: Callable[..., Container], url: str, lease: float, take_over: bool) -> None:
    """Create an engine and a container, and check it, before programs are forked; nothing is started or connected."""
    if (make, url, lease, take_over) in _ready:
        return
    opened = sql.open_engine(url)
    loop = asyncio.new_event_loop()  # `asyncio.run` would end `opened`
    database = loop.run_until_complete(opened.__aenter__())
    loop.close()
    container = make(database, lease, take_over)
    assert container.check() == []
    _ready[make, url, lease, take_over] = container, database, opened


@asynccontextmanager
async def started(make: Callable[..., Container], url: str, lease: float, take_over: bool, **options: Any) -> Any:
    """A started container that was prepared, or that `make` returns, with its database engine."""
    ready = None if options else _ready.get((make, url, lease, take_over))
    async with AsyncExitStack() as stack:
        if ready is not None:
            container, database, _ = ready
            stack.push_async_callback(database.dispose)
        else:
            database = await stack.enter_async_context(sql.open_engine(url))
            container = make(database, lease, take_over, **options)
        yield await stack.enter_async_context(container), database


async def skip_leases(container: Container, lease: float) -> None:
    """Let the leases of killed processes end at once, where the clock is that of this process.

    All processes that live on must do it.
    """
    with suppress(IllegalConfigurationError):
        await skip_time(container, timedelta(seconds=lease))


# --- the programs


async def execute(url: str, lease: float, run_id: str, kill_at: int | None, stop_at: str | None = None) -> None:
    """Starts the transfer or continues it, in a process that is killed or stopped at a step."""
    async with bank(url, lease, take_over=False) as (container, _):
        steps.kill_at, steps.stop_at = kill_at, stop_at
        run = await container.runs.start(Transfers.transfer, run_id, 100)
        await container.runs.result(run, timeout=60)


async def go_on(url: str, lease: float, run_id: str, kill_at: int | None) -> None:
    """Continues the transfer, if it has begun, in a process that is killed at a step."""
    async with bank(url, lease, take_over=False) as (container, _):
        steps.kill_at = kill_at
        await container.runs.execute(run_id, timeout=60)


async def count(url: str, lease: float, run_id: str) -> None:
    """Writes the number of steps of a whole transfer to the table of steps."""
    async with bank(url, lease, take_over=False) as (container, database):
        run = await container.runs.start(Transfers.transfer, run_id, 100)
        await container.runs.result(run, timeout=60)
        taken = len(steps.taken)
        async with database.begin() as connection:
            await connection.execute(text("INSERT INTO asked VALUES ('steps', :taken)"), {"taken": taken})


async def transfer_stamped(url: str, lease: float, run_id: str, kill_at: int | None) -> None:
    """Make a stamped transfer in a process that is killed at a statement; write the number of steps if it is not."""
    async with bank(url, lease, take_over=False) as (container, database):
        step_at(database, *STATEMENTS, "after_cursor_execute")
        steps.kill_at = kill_at
        run = await container.runs.start(StampedTransfers.transfer, run_id, 100)
        await container.runs.result(run, timeout=60)
        taken, steps.kill_at = len(steps.taken), None
        if kill_at is None:
            async with database.begin() as connection:
                await connection.execute(text("INSERT INTO asked VALUES ('steps', :taken)"), {"taken": taken})


async def finish_stamped(url: str, lease: float, last: int) -> None:
    """Take over transfers until `last` have completed, and answer for stamps whose outcome is unknown."""
    async with bank(url, lease, take_over=True) as (container, database):
        await skip_leases(container, lease)
        while await _completed(database) < last:
            for run in await container.runs.list(status="suspended"):
                [call] = run.pending
                assert (call.kind, call.tool_name) == ("unknown_outcome", "stamp")
                async with database.connect() as connection:
                    known = text("SELECT COUNT(*) FROM stamps WHERE run = :run")
                    is_stamped = await connection.scalar(known, {"run": run.id})
                with suppress(RunAnswerError, LeaseLostError):  # another process was faster
                    await container.runs.resume(run.id, {call.id: respond("stamped") if is_stamped else retry()})
            await asyncio.sleep(PAUSE)


async def _completed(database: AsyncEngine) -> int:
    """Return how many runs have completed; 0 while the database restarts."""
    with suppress(OSError, DBAPIError):
        async with database.connect() as connection:
            counted = text("SELECT COUNT(*) FROM toolbox_runs WHERE status = 'completed'")
            return int(await connection.scalar(counted) or 0)
    return 0


async def until_completed(database: AsyncEngine, last: int) -> None:
    """Wait until `last` runs have completed in any process."""
    if last == FOREVER:
        await asyncio.Event().wait()
    while await _completed(database) < last:  # noqa: ASYNC110 - other processes complete them
        await asyncio.sleep(PAUSE if last < 100 else 1.0)


async def work(url: str, lease: float, last: int) -> None:
    """Takes over runs until `last` have completed, in any process."""
    async with bank(url, lease, take_over=True) as (_, database):
        await until_completed(database, last)


async def inherit(url: str, lease: float, last: int) -> None:
    """Takes over the runs of processes that were killed, until `last` have completed."""
    async with bank(url, lease, take_over=True) as (container, database):
        await skip_leases(container, lease)
        await until_completed(database, last)


async def work_with_dbos(url: str, lease: float, last: int, kill_at: str | None = None) -> None:
    """Executes what the DBOS queue delivers, until `last` runs have completed, or until a step kills it."""
    from toolbox.dbos import DbosRunEngine

    steps.kill_when = kill_at
    async with bank(url, lease, take_over=True, engine=DbosRunEngine(polling=0.1)) as (container, database):
        if kill_at is None:
            await skip_leases(container, lease)
        await until_completed(database, last)


async def join_dbos(url: str, own: str) -> None:
    """Executes a transfer with the DBOS instance that the program has launched."""
    from dbos import DBOS

    from toolbox.dbos import DbosRunEngine

    DBOS(config={"name": "program", "system_database_url": own})
    await asyncio.to_thread(DBOS.launch)
    async with bank(url, 5.0, take_over=True, engine=DbosRunEngine(polling=0.1)) as (container, _):
        run = await container.runs.start(Transfers.transfer, "order", 100)
        await container.runs.result(run, timeout=60)
    [workflow] = await asyncio.to_thread(DBOS.list_workflows)
    # The result of the run is stored just before the workflow ends.
    handle: Any = await DBOS.retrieve_workflow_async(workflow.workflow_id)
    await handle.get_result()
    assert [each.status for each in await asyncio.to_thread(DBOS.list_workflows)] == ["SUCCESS"]
    await asyncio.to_thread(DBOS.destroy)


async def warm_up() -> None:
    """Imports what a transfer needs, so that the children begin at once."""
    import asyncpg as _  # noqa: F401

    async with bank("sqlite://", 5.0, take_over=True) as (container, database):
        async with database.begin() as connection:
            for each in TABLES:
                await connection.execute(text(each))
        run = await container.runs.start(Transfers.transfer, "first", 100)
        await container.runs.result(run, timeout=60)


_ALL = (execute, go_on, count, transfer_stamped, finish_stamped, work, inherit, work_with_dbos, join_dbos)
PROGRAMS: dict[str, Any] = {each.__name__: each for each in _ALL}
CONTAINERS: dict[str, tuple[Callable[..., Container], bool]] = {
    **{each.__name__: (new_bank, False) for each in (execute, go_on, count, transfer_stamped)},
    **{each.__name__: (new_bank, True) for each in (finish_stamped, work, inherit)},
}
"""The containers that are prepared for programs, and whether they take over runs."""
WARM_UPS: list[Callable[[], Coroutine[Any, Any, None]]] = [warm_up]
"""Whole uses of the services, in the process that forks."""


def main() -> None:
    """Forks a child for each command, and prints how each ended."""
    for each in WARM_UPS:
        asyncio.run(each())
    steps.taken.clear()
    gc.collect()
    gc.disable()  # for the children: a collection writes to each object, and so copies the memory of this process
    print("ready", flush=True)
    running: dict[int, str] = {}
    numbers = itertools.count()
    for line in sys.stdin:
        name, arguments = json.loads(line)
        if name == "wait":
            while running:
                pid, status = os.wait()
                print(json.dumps(["ended", running.pop(pid), os.waitstatus_to_exitcode(status)]), flush=True)
            print(json.dumps(["all ended"]), flush=True)
            continue
        label = f"{name} {next(numbers)}"
        if name in CONTAINERS:
            make, take_over = CONTAINERS[name]
            prepare(make, *arguments[:2], take_over)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.close(0)
                asyncio.run(PROGRAMS[name](*arguments))
                status = 0
            except BaseException as error:
                print(f"{label}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            finally:
                os._exit(status)
        running[pid] = label
        print(json.dumps(["began", label, pid]), flush=True)
