"""Transactional tools of durable runs whose call ends while their COMMIT is under way: the record decides."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from toolbox import (
    AiMessage,
    ChatRequest,
    ChatResponse,
    Container,
    Inject,
    InvocationContext,
    InvocationTimeoutError,
    compensate_for,
    register_ai_service,
    sql,
    tool,
)
from toolbox.chat import ToolExecutionResultMessage
from toolbox.errors import RunFailedError, RunStoreError, TransactionRolledBackError
from toolbox.runs import RunId, RunStore
from toolbox.runs.store import StoredRecord
from toolbox.testing import tool_call

from .network import Network
from .test_lost_connections import run_of, store_in

pytestmark = pytest.mark.anyio

SLOW_COMMIT = (
    "CREATE TABLE ledger (cents INTEGER)",
    """CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN PERFORM pg_advisory_xact_lock_shared(1); RETURN NULL; END $$""",
    """CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON ledger DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW EXECUTE FUNCTION wait()""",
)
"""The COMMIT of a transaction that has inserted into the ledger waits for an advisory lock."""

PAY = "INSERT INTO ledger VALUES (:cents)"
LIMIT = 2.0
"""Seconds of a tool that must end during its commit. Also a slow machine has connected and begun the commit by then."""

# Of this test's database: other tests use the same server at the same time.
BACKENDS = "FROM pg_stat_activity WHERE datname = current_database() AND wait_event"
WAITING_BACKENDS = f"{BACKENDS} = 'advisory'"


class Commits:
    """Holds up the commits of a PostgreSQL database until `go_on`."""

    def __init__(self, url: str) -> None:
        import psycopg

        self._connection = psycopg.connect(url, autocommit=True, application_name="tests")
        for each in SLOW_COMMIT:
            self._connection.execute(each.encode())
        self.hold()

    def hold(self) -> None:
        """Let commits wait from now on."""
        self._connection.execute("SELECT pg_advisory_lock(1)")

    def go_on(self) -> None:
        """Let all commits go on."""
        self._connection.execute("SELECT pg_advisory_unlock_all()")

    async def begun(self, call: asyncio.Task[Any]) -> None:
        """Wait until a commit of `call` is under way. Raises the error of a call that ends before."""
        waits = f"SELECT count(*) {WAITING_BACKENDS}"
        # On a thread: a slow server must not keep the loop from renewing the lease of the call.
        while await asyncio.to_thread(self.counted, waits) == 0:
            assert not call.done(), f"the call ended without a commit: {call.result()}"
            await asyncio.sleep(0.01)

    async def is_awaited(self) -> None:
        """Wait until another session waits for a transaction whose commit is under way."""
        waits = f"SELECT count(*) {BACKENDS} IN ('transactionid', 'tuple')"
        while await asyncio.to_thread(self.counted, waits) == 0:  # noqa: ASYNC110 - another process waits
            await asyncio.sleep(0.01)

    def counted(self, query: str) -> int:
        """Return a number."""
        return int(self._connection.execute(query.encode()).fetchall()[0][0])

    @property
    def payments(self) -> int:
        """How many payments are committed."""
        return self.counted("SELECT count(*) FROM ledger")

    def close(self) -> None:
        """End the connection, and so its locks."""
        self._connection.close()


@pytest.fixture
def commits(postgres_url: str) -> Iterator[Commits]:
    held = Commits(postgres_url)
    yield held
    held.close()


class Base(DeclarativeBase):
    """The base of the tables of these tests."""


class Entry(Base):
    """A row that is written by a flush."""

    __tablename__ = "entries"
    cents: Mapped[int] = mapped_column(primary_key=True)


class Bank:
    """Pays on the event loop, or on a thread with a time limit."""

    @tool
    @sql.transactional
    async def pay(self, cents: int, session: Inject[AsyncSession]) -> str:
        await session.execute(text(PAY), {"cents": cents})
        return "paid"

    @tool(timeout=LIMIT)
    @sql.transactional
    async def pay_in_time(self, cents: int, session: Inject[AsyncSession]) -> str:
        await session.execute(text(PAY), {"cents": cents})
        return "paid"

    @tool(timeout=LIMIT)
    @sql.transactional
    def pay_on_a_thread(self, cents: int, session: Inject[Session]) -> str:
        session.execute(text(PAY), {"cents": cents})
        return "paid"

    @tool
    @sql.transactional
    def pay_without_limit(self, cents: int, session: Inject[Session]) -> str:
        session.execute(text(PAY), {"cents": cents})
        return "paid"


class Payer:
    """A model that calls a tool until it has paid, and notes what it reads."""

    def __init__(self, tool_name: str) -> None:
        self.tool_name = tool_name
        self.read: list[str] = []

    async def chat(self, request: ChatRequest) -> ChatResponse:
        last = request.messages[-1]
        if isinstance(last, ToolExecutionResultMessage):
            self.read.append(last.text)
            if not last.is_error:
                return ChatResponse(AiMessage(last.text))
        return ChatResponse(AiMessage(None, [tool_call(self.tool_name, {"cents": 5})]))


@register_ai_service(tools=Bank, durable=True)
class Transfers(Protocol):
    async def transfer(self, run: RunId, order: str) -> str: ...


@register_ai_service(tools=Bank, durable=True, timeout=2.0)
class Hasty(Protocol):
    async def transfer(self, run: RunId, order: str) -> str: ...


@asynccontextmanager
async def bank(
    url: str, model: Any, *services: type, lease: float = 15.0, take_over: bool = False
) -> AsyncIterator[Container]:
    """A started container of the services."""
    blocking = url.replace("postgresql:", "postgresql+psycopg:") if url.startswith("postgresql:") else url
    engine = create_engine(blocking)
    async with sql.open_engine(url) as database:
        container = Container(models={"default": model}, take_over_runs=take_over)
        container.register_instance(database, AsyncEngine).register_instance(engine, Engine)
        container.register_instance(sql.SqlRunStore(database, lease), RunStore)
        async with container.register(sql.session, sql.sync_session, *(services or (Transfers, Hasty))):
            yield container
    engine.dispose()


async def test_a_connection_lost_during_the_commit_does_not_hide_its_success(
    postgres_url: str, commits: Commits
) -> None:
    network, model = Network(postgres_url), Payer("pay")
    async with network.opened() as url, bank(url, model) as container:
        call = asyncio.create_task(container.get(Transfers).transfer("run", "order"))
        await commits.begun(call)
        network.drop()
        await commits.is_awaited()
        commits.go_on()

        assert await call == "paid"
        assert model.read == ["paid"]
        assert commits.payments == 1


@pytest.mark.parametrize("starts", ["call", "start"])
async def test_a_commit_that_a_time_limit_interrupts_is_undone(
    postgres_url: str, commits: Commits, starts: str
) -> None:
    class Undoable(Bank):
        @compensate_for("pay_without_limit")
        @sql.transactional
        async def refund(self, cents: int, session: Inject[AsyncSession]) -> None:
            await session.execute(text(PAY), {"cents": -cents})

    @register_ai_service(tools=Undoable, durable=True, timeout=2.0, compensate_on_failure=True)
    class Compensated(Protocol):
        async def transfer(self, run: RunId, order: str) -> str: ...

    async with bank(postgres_url, Payer("pay_without_limit"), Compensated) as container:
        if starts == "call":
            call: Any = asyncio.create_task(container.get(Compensated).transfer("run", "order"))
        else:
            await container.runs.start(Compensated.transfer, "run", "order")
            call = asyncio.create_task(container.runs.result("run"))
        await commits.begun(call)
        await commits.is_awaited()
        commits.go_on()
        with pytest.raises((InvocationTimeoutError, RunFailedError)):
            await call

        assert (await container.runs.get("run")).status == "failed"
        assert commits.payments == 2
        assert commits.counted("SELECT sum(cents) FROM ledger") == 0


async def test_a_commit_that_the_server_ends_is_an_error_and_can_be_repeated(
    postgres_url: str, commits: Commits
) -> None:
    model = Payer("pay")
    async with bank(postgres_url, model) as container:
        call = asyncio.create_task(container.get(Transfers).transfer("run", "order"))
        await commits.begun(call)
        commits.counted(f"SELECT count(pg_terminate_backend(pid)) {WAITING_BACKENDS}")
        commits.go_on()

        assert await call == "paid"
        assert len(model.read) == 2
        assert model.read[1] == "paid"
        assert commits.payments == 1


@pytest.mark.parametrize("tool_name", ["pay_in_time", "pay_on_a_thread"])
async def test_a_tool_whose_time_ends_during_the_commit_has_the_recorded_result(
    postgres_url: str, commits: Commits, tool_name: str
) -> None:
    model = Payer(tool_name)
    async with bank(postgres_url, model) as container:
        call = asyncio.create_task(container.get(Transfers).transfer("run", "order"))
        await commits.begun(call)
        await asyncio.wait({call}, timeout=1.25 * LIMIT)  # the time of the tool ends
        assert not call.done()
        commits.go_on()
        await call

        records = await container.get(RunStore).records("run")
        results = [each.data for each in records if each.kind == "result"]
        assert len(results) == len(model.read)  # the record decides, also if the server gave the commit up
        assert commits.payments == 1
        assert model.read[-1] == "paid"
        if tool_name == "pay_on_a_thread":
            assert model.read == ["paid"]


async def test_a_time_limit_of_the_call_waits_for_the_commit(postgres_url: str, commits: Commits) -> None:
    async with bank(postgres_url, Payer("pay_without_limit")) as container:
        call = asyncio.create_task(container.get(Hasty).transfer("run", "order"))
        await commits.begun(call)
        await commits.is_awaited()
        assert not call.done()
        commits.go_on()
        with pytest.raises(InvocationTimeoutError):
            await call

        records = await container.get(RunStore).records("run")
        assert [each.kind for each in records] == ["reply", "start", "result"]
        assert commits.payments == 1


@pytest.mark.parametrize("tool_name", ["pay", "pay_in_time"])
async def test_a_run_whose_database_is_away_until_its_lease_ends_is_let_go_without_a_result(
    postgres_url: str, commits: Commits, tool_name: str
) -> None:
    network, model = Network(postgres_url), Payer(tool_name)
    async with network.opened() as url, bank(url, model, lease=2.0) as container:
        call = asyncio.create_task(container.get(Transfers).transfer("run", "order"))
        await commits.begun(call)
        network.refuse()
        if tool_name == "pay":
            network.drop()
        else:  # nobody notices but the time limit
            network.cut()
        with pytest.raises(RunStoreError):
            await call
        assert model.read == []
        network.drop()
    commits.go_on()

    async with bank(postgres_url, model, lease=2.0, take_over=True) as container:
        assert await container.runs.result("run", timeout=60) == "paid"
    assert commits.payments == 1


@pytest.mark.parametrize("moment", ["flush", "record"])
async def test_a_thread_that_goes_on_after_its_time_is_rolled_back(database_url: str, moment: str) -> None:
    def wait_for_the_end(*_: object) -> None:
        invocation = InvocationContext.current()
        assert invocation is not None
        ended = threading.Event()
        invocation.cancellation.followed_by(ended.set)
        ended.wait()

    calls: list[int] = []

    class Slow:
        @tool(timeout=0.5)
        @sql.transactional
        def pay(self, cents: int, session: Inject[Session]) -> str:
            session.execute(text(PAY), {"cents": cents})
            calls.append(cents)
            if len(calls) == 1:  # what follows comes after the last look at the time
                if moment == "flush":
                    session.add(Entry(cents=cents))
                    event.listen(session, "before_flush", wait_for_the_end)
                else:
                    event.listen(session.connection(), "before_cursor_execute", wait_for_the_end, once=True)
            return "paid"

    @register_ai_service(tools=Slow, durable=True)
    class Payments(Protocol):
        async def pay(self, run: RunId, order: str) -> str: ...

    model = Payer("pay")
    async with bank(database_url, model, Payments) as container:
        engine = container.get(AsyncEngine)
        async with engine.begin() as connection:
            await connection.execute(text("CREATE TABLE ledger (cents INTEGER)"))
            await connection.execute(text("CREATE TABLE entries (cents INTEGER PRIMARY KEY)"))
        assert await container.get(Payments).pay("run", "order") == "paid"
        assert "timeout" in model.read[0]
        assert model.read[1:] == ["paid"]
        async with engine.connect() as connection:
            assert await connection.scalar(text("SELECT count(*) FROM ledger")) == 1


async def test_a_commit_beside_another_recorded_result_is_rolled_back(database_url: str) -> None:
    async with store_in(database_url) as (store, engine):
        await store.create(run_of("run"), owner="me")
        async with engine.begin() as connection:
            await connection.execute(text("CREATE TABLE ledger (cents INTEGER)"))
        await store.append("run", 1, [StoredRecord("0", "result", "an error")])

        with pytest.raises(TransactionRolledBackError, match="another recorded result"):
            async with engine.begin() as connection:
                await connection.execute(text(PAY), {"cents": 5})
                await connection.run_sync(store.record_in, "run", 1, StoredRecord("0", "result", "paid"))

        async with engine.connect() as connection:
            assert await connection.scalar(text("SELECT count(*) FROM ledger")) == 0
        assert [each.data for each in await store.records("run")] == ["an error"]
