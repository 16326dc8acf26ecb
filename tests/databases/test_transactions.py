"""`@transactional` and call-scoped sessions: what is kept, when others see it; nothing is shared or left open."""

import asyncio
import contextlib
import inspect
import threading
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, Protocol

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from toolbox import (
    AiMessage,
    ChatRequest,
    Container,
    IllegalConfigurationError,
    Inject,
    Instance,
    Named,
    Result,
    ScopeNotActiveError,
    ToolAbort,
    ToolboxSettings,
    application_scoped,
    produces,
    register_ai_service,
    sql,
    tool,
    tool_specification_from,
)
from toolbox.errors import MissingBeanError, TransactionRolledBackError
from toolbox.settings import SqlSettings
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


class Notes:
    """A table of texts, written in every way."""

    waiting: asyncio.Event  # of the test that makes it

    def __init__(self, session: AsyncSession) -> None:
        self.session = session

    async def insert(self, note: str) -> None:
        await self.session.execute(text("INSERT INTO notes VALUES (:note)"), {"note": note})

    @tool
    @sql.transactional
    async def add(self, note: str) -> str:
        await self.insert(note)
        return note

    @tool
    @sql.transactional
    async def add_and_fail(self, note: str) -> None:
        await self.insert(note)
        raise LookupError(f"no {note}")

    @tool
    @sql.transactional
    async def add_and_abort(self, note: str) -> None:
        await self.insert(note)
        raise ToolAbort("stop")

    @tool
    async def forget_to_commit(self, note: str) -> None:
        await self.insert(note)

    @tool
    @sql.transactional
    async def add_and_wait(self, note: str) -> None:
        await self.insert(note)
        self.waiting.set()
        await asyncio.Event().wait()


@register_ai_service(tools=Notes)
class Assistant(Protocol):
    async def chat(self, question: str) -> Result[str]: ...


@register_ai_service(tools=Notes, concurrent_tools=True)
class Together(Protocol):
    async def chat(self, question: str) -> Result[str]: ...


NewContainer = Callable[..., Container]


@pytest.fixture
def new_container(database_url: str) -> NewContainer:
    def make(*registered: object, replies: Any = (), **more: Any) -> Container:
        settings = ToolboxSettings(sql=SqlSettings(url=database_url))
        container = Container(models={"default": ScriptedChatModel(replies)}, settings=settings, **more)
        return container.register(sql.engine, sql.session, sql.sync_engine, sql.sync_session, Notes, *registered)

    return make


@contextlib.asynccontextmanager
async def started(container: Container) -> AsyncIterator[Container]:
    async with container:
        async with container.get(AsyncEngine).begin() as connection:
            await connection.execute(text("CREATE TABLE notes (note VARCHAR)"))
        yield container
        assert container.get(AsyncEngine).pool.checkedout() == 0  # type: ignore[attr-defined]  # of a queue pool


async def notes_in(container: Container) -> list[str]:
    """Return the notes that other transactions see."""
    async with container.get(AsyncEngine).connect() as connection:
        return sorted((await connection.scalars(text("SELECT note FROM notes"))).all())


# --- tools


async def test_transactions_are_committed_before_the_model_gets_the_result(new_container: NewContainer) -> None:
    async def describe(request: ChatRequest) -> str:
        return f"{await notes_in(container)} {container.get(AsyncEngine).pool.checkedout()}"  # type: ignore[attr-defined]

    container = new_container(Assistant, replies=[tool_call("add", {"note": "a"}), describe])
    async with started(container):
        assert (await container.get(Assistant).chat("?")).content == "['a'] 0"


async def test_a_failed_tool_is_rolled_back(new_container: NewContainer) -> None:
    replies = [tool_call("add_and_fail", {"note": "a"}), tool_call("add", {"note": "b"}), "done"]
    container = new_container(Assistant, replies=replies)
    async with started(container):
        result = await container.get(Assistant).chat("?")

        assert [each.result for each in result.tool_executions] == ["no a", "b"]
        assert await notes_in(container) == ["b"]


async def test_an_aborted_tool_is_rolled_back(new_container: NewContainer) -> None:
    container = new_container(Assistant, replies=[tool_call("add_and_abort", {"note": "a"})])
    async with started(container):
        with pytest.raises(ToolAbort, match="stop"):
            await container.get(Assistant).chat("?")

        assert await notes_in(container) == []


async def test_a_cancelled_tool_is_rolled_back(new_container: NewContainer) -> None:
    waiting = Notes.waiting = asyncio.Event()
    container = new_container(Assistant, replies=[tool_call("add_and_wait", {"note": "a"})])
    async with started(container):
        call = asyncio.create_task(container.get(Assistant).chat("?"))
        await waiting.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

        assert await notes_in(container) == []


async def test_the_work_of_an_abandoned_tool_is_rolled_back(new_container: NewContainer) -> None:
    told, ended = threading.Event(), threading.Event()

    @tool(timeout=0.1)
    def linger(note: str, session: Inject[Session]) -> None:
        try:
            write(note, session)
        finally:
            ended.set()

    @sql.transactional
    def write(note: str, session: Session) -> None:
        session.execute(text("INSERT INTO notes VALUES (:note)"), {"note": note})
        told.wait()

    @register_ai_service(tools=linger)
    class Impatient(Protocol):
        async def chat(self, question: str) -> Result[str]: ...

    def answer(request: ChatRequest) -> str:
        told.set()
        return "too late"

    container = new_container(Impatient, replies=[tool_call("linger", {"note": "a"}), answer])
    async with started(container):
        result = await container.get(Impatient).chat("?")
        await asyncio.to_thread(ended.wait)

        assert "timeout" in result.tool_executions[0].result
        assert await notes_in(container) == []


async def test_work_without_transactional_is_not_committed(new_container: NewContainer) -> None:
    container = new_container(Assistant, replies=[tool_call("forget_to_commit", {"note": "a"}), "done"])
    async with started(container):
        await container.get(Assistant).chat("?")

        assert await notes_in(container) == []


async def test_parallel_tools_never_share_a_session(new_container: NewContainer) -> None:
    seen: list[AsyncSession] = []
    together = asyncio.Barrier(8)

    class Meeting:
        def __init__(self, session: AsyncSession, notes: Notes) -> None:
            assert notes.session is session
            self.session = session

        @tool
        @sql.transactional
        async def meet(self, note: str) -> None:
            seen.append(self.session)
            if self.session.bind is not None and self.session.bind.dialect.name == "postgresql":
                await together.wait()  # all of them are in a transaction at the same time
            await self.session.execute(text("INSERT INTO notes VALUES (:note)"), {"note": note})

    @register_ai_service(tools=Meeting, concurrent_tools=True)
    class Parallel(Protocol):
        async def chat(self, question: str) -> Result[str]: ...

    def all_at_once(request: ChatRequest) -> Any:
        return AiMessage(None, [tool_call("meet", {"note": str(number)}) for number in range(8)])

    container = new_container(Meeting, Parallel, replies=[all_at_once, "done"])
    async with started(container):
        result = await container.get(Parallel).chat("?")

        assert [each.is_error for each in result.tool_executions] == [False] * 8
        assert len({id(session) for session in seen}) == 8
        assert await notes_in(container) == list("01234567")


async def test_tools_on_threads_have_separate_synchronous_sessions(new_container: NewContainer) -> None:
    class Written:
        def __init__(self, session: Session) -> None:
            self.session = session

        @tool
        @sql.transactional
        def write(self, note: str) -> None:
            self.session.execute(text("INSERT INTO notes VALUES (:note)"), {"note": note})
            if note == "3":
                raise LookupError("no 3")

    @register_ai_service(tools=Written, concurrent_tools=True)
    class OnThreads(Protocol):
        async def chat(self, question: str) -> Result[str]: ...

    calls = AiMessage(None, [tool_call("write", {"note": str(number)}) for number in range(6)])
    container = new_container(Written, OnThreads, replies=[calls, "done"])
    async with started(container):
        result = await container.get(OnThreads).chat("?")

        assert [each.result for each in result.tool_executions] == ["Success"] * 3 + ["no 3"] + ["Success"] * 2
        assert await notes_in(container) == ["0", "1", "2", "4", "5"]
        assert container.get(Engine).pool.checkedout() == 0  # type: ignore[attr-defined]  # of a queue pool


async def test_counting_in_parallel_loses_nothing(new_container: NewContainer) -> None:
    """Each reads and then writes; PostgreSQL is asked for the row's lock, SQLite has one writer."""

    class Counter:
        def __init__(self, session: AsyncSession) -> None:
            self.session = session

        @tool
        @sql.transactional
        async def count(self) -> int:
            locking = "FOR UPDATE" if self.session.get_bind().dialect.name == "postgresql" else ""
            [number] = (await self.session.scalars(text(f"SELECT number FROM counter {locking}"))).all()
            await asyncio.sleep(0)
            await self.session.execute(text("UPDATE counter SET number = :number"), {"number": number + 1})
            return int(number) + 1

    @register_ai_service(tools=Counter, concurrent_tools=True)
    class Counting(Protocol):
        async def chat(self, question: str) -> Result[str]: ...

    calls = AiMessage(None, [tool_call("count") for _ in range(24)])
    container = new_container(Counter, Counting, replies=[calls, "done"])
    async with started(container):
        async with container.get(AsyncEngine).begin() as connection:
            await connection.execute(text("CREATE TABLE counter (number INTEGER)"))
            await connection.execute(text("INSERT INTO counter VALUES (0)"))

        result = await container.get(Counting).chat("?")

        assert sorted(each.result_object for each in result.tool_executions) == list(range(1, 25))


async def test_a_session_may_be_injected_into_a_function(new_container: NewContainer) -> None:
    @tool
    @sql.transactional
    async def jot(note: str, session: Inject[AsyncSession]) -> None:
        await session.execute(text("INSERT INTO notes VALUES (:note)"), {"note": note})

    @register_ai_service(tools=jot)
    class Jotting(Protocol):
        async def chat(self, question: str) -> str: ...

    container = new_container(Jotting, replies=[tool_call("jot", {"note": "a"}), "done"])
    async with started(container):
        await container.get(Jotting).chat("?")

        assert await notes_in(container) == ["a"]


async def test_a_longer_lived_bean_reaches_the_session_of_each_call(new_container: NewContainer) -> None:
    @application_scoped
    class Keeper:
        def __init__(self, sessions: Instance[AsyncSession]) -> None:
            self._sessions = sessions

        @tool
        @sql.transactional
        async def keep(self, note: str) -> None:
            session = await self._sessions.aget()
            await session.execute(text("INSERT INTO notes VALUES (:note)"), {"note": note})
            if note == "b":
                raise LookupError

    @register_ai_service(tools=Keeper)
    class Keeping(Protocol):
        async def chat(self, question: str) -> str: ...

    calls = [tool_call("keep", {"note": note}) for note in "abc"]
    container = new_container(Keeper, Keeping, replies=[*calls, "done"])
    async with started(container):
        await container.get(Keeping).chat("?")

        assert await notes_in(container) == ["a", "c"]


# --- outside of tools


async def test_each_request_has_one_session(new_container: NewContainer) -> None:
    container = new_container()
    async with started(container):
        async with container.request_scope():
            notes = await container.aget(Notes)
            assert notes.session is (await container.aget(Notes)).session
            await notes.add("a")
            await notes.insert("b")
        async with container.request_scope():
            assert (await container.aget(Notes)).session is not notes.session

        assert await notes_in(container) == ["a"]


async def test_tools_neither_see_uncommitted_changes_of_the_request_nor_wait_for_its_reads(
    new_container: NewContainer,
) -> None:
    container = new_container(Assistant, replies=[tool_call("add", {"note": "tool's"}), "done"])
    async with started(container), container.request_scope():
        session = await container.aget(AsyncSession)
        assert (await session.scalars(text("SELECT note FROM notes"))).all() == []

        await container.get(Assistant).chat("?")
        assert await notes_in(container) == ["tool's"]

        await session.rollback()
        assert (await session.scalars(text("SELECT note FROM notes"))).all() == ["tool's"]


async def test_an_inner_one_is_part_of_the_outer_one(new_container: NewContainer) -> None:
    class Both:
        def __init__(self, notes: Notes, session: AsyncSession) -> None:
            self.notes, self.session = notes, session

        @sql.transactional
        async def add_both(self, fails: bool) -> None:
            await self.notes.add("a")
            assert self.session.in_transaction()
            assert await notes_in(container) == []
            if fails:
                raise LookupError("late")
            await asyncio.wait_for(self.notes.add("b"), 60)  # in a separate task, but part of this transaction

    container = new_container(Both)
    async with started(container), container.request_scope():
        both = await container.aget(Both)
        with pytest.raises(LookupError, match="late"):
            await both.add_both(fails=True)
        assert await notes_in(container) == []

        await both.add_both(fails=False)
        assert await notes_in(container) == ["a", "b"]


async def test_a_failed_nested_call_rolls_back_the_whole_transaction(new_container: NewContainer) -> None:
    class Careless:
        def __init__(self, notes: Notes) -> None:
            self.notes = notes

        @sql.transactional
        async def carry_on(self) -> None:
            await self.notes.insert("a")
            with contextlib.suppress(LookupError):
                await self.notes.add_and_fail("b")

        @sql.transactional
        async def in_a_savepoint(self) -> None:
            await self.notes.insert("c")
            with contextlib.suppress(LookupError):
                async with self.notes.session.begin_nested():
                    await self.notes.insert("d")
                    raise LookupError

    container = new_container(Careless)
    async with started(container), container.request_scope():
        careless = await container.aget(Careless)
        with pytest.raises(TransactionRolledBackError, match=r"carry_on.*begin_nested"):
            await careless.carry_on()
        assert await notes_in(container) == []

        await careless.in_a_savepoint()
        assert await notes_in(container) == ["c"]


async def test_two_tasks_cannot_be_in_transactions_of_one_session(new_container: NewContainer) -> None:
    waiting = Notes.waiting = asyncio.Event()
    container = new_container()
    async with started(container), container.request_scope():
        notes = await container.aget(Notes)
        first = asyncio.create_task(notes.add_and_wait("a"))
        await waiting.wait()

        with pytest.raises(IllegalConfigurationError, match="transaction of another task"):
            await notes.add("b")

        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await notes.add("c")
        assert await notes_in(container) == ["c"]


def test_synchronous_code_has_the_same(new_container: NewContainer) -> None:
    class Written:
        def __init__(self, session: Session) -> None:
            self.session = session

        @sql.transactional
        def write(self, note: str, fails: bool = False) -> str:
            self.session.execute(text("INSERT INTO notes VALUES (:note)"), {"note": note})
            if fails:
                raise LookupError(note)
            return note

        @sql.transactional
        def write_both(self) -> None:
            self.write("c")
            with contextlib.suppress(LookupError):
                self.write("d", fails=True)

    with new_container(Written) as container, container.request_scope():
        with container.get(Engine).begin() as connection:
            connection.execute(text("CREATE TABLE notes (note VARCHAR)"))
        written = container.get(Written)
        assert written.write("a") == "a"
        with pytest.raises(LookupError):
            written.write("b", fails=True)
        with pytest.raises(TransactionRolledBackError):
            written.write_both()

        with container.get(Engine).connect() as connection:
            assert connection.scalars(text("SELECT note FROM notes")).all() == ["a"]


# --- which session


async def test_without_a_container_the_session_is_an_ordinary_argument(database_url: str) -> None:
    @sql.transactional
    async def create(session: AsyncSession) -> None:
        await session.execute(text("CREATE TABLE notes (note VARCHAR)"))

    async with sql.open_engine(database_url) as engine:
        async with AsyncSession(engine) as session:
            await create(session)
            assert await Notes(session).add("a") == "a"
            assert not session.in_transaction()
        async with engine.connect() as connection:
            assert (await connection.scalars(text("SELECT note FROM notes"))).all() == ["a"]


async def test_two_sessions_among_the_arguments_are_rejected(new_container: NewContainer, sqlite_url: str) -> None:
    @produces(scope="application", name="audit_engine")
    async def audit_engine() -> AsyncIterator[AsyncEngine]:
        async with sql.open_engine("sqlite://") as engine:
            yield engine

    @produces(scope="call", name="audit")
    async def audit(engine: Annotated[AsyncEngine, Named("audit_engine")]) -> AsyncIterator[AsyncSession]:
        async with AsyncSession(engine) as session:
            yield session

    class Two:
        def __init__(self, session: AsyncSession, audit: Annotated[AsyncSession, Named("audit")]) -> None:
            self.session, self.audit = session, audit

        @sql.transactional
        async def unclear(self) -> None: ...

        @sql.transactional(name="audit")
        async def clear(self) -> None:
            await self.audit.execute(text("CREATE TABLE log (line VARCHAR)"))

    container = new_container(audit_engine, audit, Two)
    async with started(container), container.request_scope():
        two = await container.aget(Two)
        with pytest.raises(IllegalConfigurationError, match="2 sessions"):
            await two.unclear()
        await two.clear()
        async with container.get(AsyncEngine, "audit_engine").connect() as connection:
            assert (await connection.scalars(text("SELECT line FROM log"))).all() == []


async def test_a_missing_session_is_reported_with_the_producer_to_register() -> None:
    @sql.transactional
    def write() -> None: ...

    @sql.transactional
    async def write_async() -> None: ...

    async with Container() as container, container.request_scope():
        with pytest.raises(MissingBeanError, match=r"toolbox\.sql\.sync_session"):
            await asyncio.to_thread(write)
        with pytest.raises(MissingBeanError, match=r"toolbox\.sql\.session"):
            await write_async()


async def test_outside_of_any_scope_there_is_no_session() -> None:
    class Nothing:
        @sql.transactional
        async def work(self) -> None: ...

    with pytest.raises(ScopeNotActiveError, match=r"Nothing\.work"):
        await Nothing().work()


async def test_the_isolation_of_a_transaction_can_be_chosen(postgres_url: str) -> None:
    @sql.transactional(isolation="SERIALIZABLE")
    async def level(session: AsyncSession) -> Any:
        return await session.scalar(text("SHOW transaction_isolation"))

    @sql.transactional
    async def usual(session: AsyncSession) -> Any:
        return await session.scalar(text("SHOW transaction_isolation"))

    async with sql.open_engine(postgres_url) as engine, AsyncSession(engine) as session:
        assert await level(session) == "serializable"
        assert await usual(session) == "read committed"


# --- the decorator


def test_transactional_functions_keep_their_name_and_signature() -> None:
    @sql.transactional
    @tool("Adds")
    async def add(note: str) -> str:
        """Adds a note."""
        return note

    assert inspect.iscoroutinefunction(add)
    assert (add.__name__, add.__doc__) == ("add", "Adds a note.")
    assert tool_specification_from(add).description == "Adds"


@pytest.mark.parametrize("kind", [staticmethod, classmethod])
def test_transactional_above_staticmethod_or_classmethod_is_rejected(kind: Any) -> None:
    with pytest.raises(TypeError, match=f"below @{kind.__name__}"):
        sql.transactional(kind(lambda: None))


def test_a_generator_cannot_be_transactional() -> None:
    def numbers() -> Any:
        yield 1

    async def more() -> Any:
        yield 1

    for generator in (numbers, more):
        with pytest.raises(TypeError, match="generator"):
            sql.transactional(generator)
