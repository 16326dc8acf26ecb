"""Services whose conversations are stored in a database: statements and connections per call."""

import asyncio
from typing import Any, Protocol

import pytest
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncEngine

from toolbox import (
    AiMessage,
    ChatMemoryKey,
    ChatMemoryStore,
    ChatRequest,
    Container,
    MemoryId,
    ToolboxSettings,
    UserMessage,
    produces,
    register_ai_service,
    sql,
    tool,
)
from toolbox.errors import MemoryInUseError, MemoryLeaseLostError
from toolbox.settings import SqlSettings
from toolbox.sql import SqlChatMemoryStore
from toolbox.testing import ScriptedChatModel, tool_call

from .conftest import open_store

pytestmark = pytest.mark.anyio


@register_ai_service(tools=())
class Assistant(Protocol):
    async def chat(self, room: MemoryId[str], question: str) -> str: ...


def container_on(url: str, *replies: Any, registered: Any = SqlChatMemoryStore, **options: Any) -> Container:
    settings = ToolboxSettings(sql=SqlSettings(url=url, **options))
    container = Container(models={"default": ScriptedChatModel(replies)}, settings=settings)
    return container.register(sql.engine, sql.session, registered, Assistant)


async def test_a_conversation_outlives_its_container(database_url: str) -> None:
    async with container_on(database_url, "hello") as container:
        await container.get(Assistant).chat("room 7", "hi")

    model = ScriptedChatModel(["again"])
    async with container_on(database_url, model.chat) as container:
        await container.get(Assistant).chat("room 7", "and now?")

    assert model.requests[0].messages == (UserMessage("hi"), AiMessage("hello"), UserMessage("and now?"))


async def test_no_transaction_is_open_while_the_model_replies(database_url: str) -> None:
    async def reply(request: ChatRequest) -> str:
        engine = container.get(AsyncEngine)
        if engine.dialect.name == "postgresql":
            here = "FROM pg_stat_activity WHERE datname = current_database()"
            idle = f"SELECT count(*) {here} AND state LIKE 'idle in transaction%'"
            async with engine.connect() as connection:
                assert await connection.scalar(text(idle)) == 0
        return f"{engine.pool.checkedout()} connections in use"  # type: ignore[attr-defined]  # of a queue pool

    container = container_on(database_url, reply)
    async with container:
        assert await container.get(Assistant).chat("room 7", "hi") == "0 connections in use"


async def test_a_call_reads_once_and_writes_one_turn(database_url: str) -> None:
    async with container_on(database_url, "hello", "again") as container:
        await container.get(Assistant).chat("room 7", "hi")
        said: list[str] = []
        sync_engine = container.get(AsyncEngine).sync_engine

        def listen(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
            said.append(statement)

        event.listen(sync_engine, "before_cursor_execute", listen)
        await container.get(Assistant).chat("room 7", "hi")
        event.remove(sync_engine, "before_cursor_execute", listen)

    assert len([each for each in said if each.startswith("SELECT")]) == 3  # the head, turns, the head to write it
    assert len([each for each in said if each.startswith("INSERT INTO toolbox_conversations_turns")]) == 1
    assert len([each for each in said if each.startswith("UPDATE toolbox_conversations SET")]) == 1


async def test_an_empty_conversation_leaves_no_row(database_url: str) -> None:
    async with container_on(database_url, "hello", "again") as container:
        await container.get(Assistant).chat("room 7", "hi")
        await container.get(Assistant).chat("room 8", "hi")
        await container.chat_memory(Assistant, "room 7").clear()
        async with container.get(AsyncEngine).connect() as connection:
            rows = (await connection.execute(text("SELECT memory_id FROM toolbox_conversations"))).all()
            held = (await connection.execute(text("SELECT memory_id FROM toolbox_conversations_leases"))).all()
            turns = (await connection.execute(text("SELECT number FROM toolbox_conversations_turns"))).all()

    assert (rows, held, turns) == ([("room 8",)], [], [(1,)])


async def test_each_step_of_a_call_is_one_transaction_with_few_statements(postgres_url: str) -> None:
    async with container_on(postgres_url, "hello", "again", pool_size=1, max_overflow=0) as container:
        await container.get(Assistant).chat("room 7", "hi")
        engine = container.get(AsyncEngine)
        statements: list[str] = []
        event.listen(engine.sync_engine, "before_cursor_execute", lambda *given: statements.append(given[2].split()[0]))
        others: list[str] = []  # queries without parameters, such as BEGIN and COMMIT
        async with engine.connect() as connection:
            driver = (await connection.get_raw_connection()).driver_connection
            assert driver is not None
            driver.add_query_logger(lambda record: others.append(record.query))
        await container.get(Assistant).chat("room 7", "hi")

    # Take the lease; read; release the lease, if it is not lost, read, and write the turn and the head.
    assert statements == ["INSERT", *["SELECT"] * 2, "DELETE", "SELECT", "INSERT", "UPDATE"]
    ours = [each for each in others if each not in ("BEGIN;", ";", "ROLLBACK;")]  # the test of the connection
    assert ours == ["BEGIN ISOLATION LEVEL READ COMMITTED;", "COMMIT;"] * 3


async def test_what_a_program_sets_at_the_begin_of_a_transaction_holds_for_conversations(postgres_url: str) -> None:
    async with container_on(postgres_url, "hello") as container:
        engine = container.get(AsyncEngine)
        async with engine.begin() as connection:
            await connection.execute(text("CREATE SCHEMA tenant"))
        settings = "SET LOCAL search_path = tenant"
        event.listen(engine.sync_engine, "begin", lambda connection: connection.exec_driver_sql(settings))
        await container.get(Assistant).chat("room 7", "hi")
        async with engine.connect() as connection:
            rows = (await connection.execute(text("SELECT memory_id FROM tenant.toolbox_conversations"))).all()

    assert rows == [("room 7",)]


async def test_each_schema_of_a_database_has_its_own_conversations(postgres_url: str) -> None:
    async with sql.open_engine(postgres_url) as engine:
        async with engine.begin() as connection:
            await connection.execute(text("CREATE SCHEMA tenant"))
        for each in (engine, engine.execution_options(schema_translate_map={None: "tenant"})):
            store, key = SqlChatMemoryStore(each), ChatMemoryKey("s", "room 7")
            assert await store.get_messages(key) == ()
            async with store.lock(key):
                await store.update_messages(key, [UserMessage("hi")])
            assert len(await store.get_messages(key)) == 1
            await store.stop()


async def test_a_long_write_of_a_tool_in_sqlite_does_not_lose_the_conversation(sqlite_url: str) -> None:
    @produces(scope="application")
    def store(engine: AsyncEngine) -> ChatMemoryStore:
        return SqlChatMemoryStore(engine, lease=0.2)

    @tool
    @sql.transactional
    async def work() -> str:
        """Writes, and keeps everybody else from writing, for longer than a lease."""
        await asyncio.sleep(0.5)
        return "done"

    @register_ai_service(tools=work)
    class Working(Protocol):
        async def chat(self, room: MemoryId[str], question: str) -> str: ...

    container = container_on(sqlite_url, tool_call("work"), "done", registered=store).register(Working)
    async with container:
        assert await container.get(Working).chat("room 7", "work!") == "done"
        assert len(await container.chat_memory(Working, "room 7").messages()) == 4


async def test_a_call_that_lost_its_lease_fails_and_writes_nothing(database_url: str, another_writes: Any) -> None:
    key = ChatMemoryKey.of(Assistant, "room 7")

    @produces(scope="application")
    def store(engine: AsyncEngine) -> ChatMemoryStore:
        return SqlChatMemoryStore(engine, lease=0.2)

    def late(request: ChatRequest) -> str:
        another_writes(database_url, key, "the other's")
        return "late"

    async with container_on(database_url, late, registered=store) as container:
        with pytest.raises(MemoryLeaseLostError, match="room 7"):
            await container.get(Assistant).chat("room 7", "hi")

        assert await container.chat_memory(Assistant, "room 7").messages() == [UserMessage("the other's")]


@tool(requires_approval=True)
def pay() -> str:
    return "paid"


@register_ai_service(tools=pay)
class Desk(Protocol):
    async def chat(self, room: MemoryId[str], question: str) -> str: ...


@pytest.mark.parametrize("store_url", ["sqlite_url", "shared_postgres_url", "redis_url"], indirect=True)
async def test_a_call_that_lost_its_lease_is_not_suspended(store_url: str, another_writes: Any) -> None:
    """Its run would close the conversation to the process that has it now."""
    room = f"room of {store_url}"

    def late(request: ChatRequest) -> Any:
        another_writes(store_url, ChatMemoryKey.of(Desk, room), "the other's")
        return tool_call("pay")

    async with open_store(store_url, lease=0.2) as store:
        container = Container(models={"default": ScriptedChatModel([late, "free"])}).register(Desk)
        async with container.register_instance(store, ChatMemoryStore):
            with pytest.raises(MemoryLeaseLostError):
                await container.get(Desk).chat(room, "pay")

            assert await container.runs.list() == []
            assert await container.get(Desk).chat(room, "hi") == "free"


def test_a_conversation_can_be_used_on_another_loop_than_the_containers(database_url: str) -> None:
    with container_on(database_url, "hello") as container:
        memory = container.chat_memory(Assistant, "room 7")
        asyncio.run(memory.add(UserMessage("before")))
        assert asyncio.run(memory.messages()) == [UserMessage("before")]
        asyncio.run(container.get(Assistant).chat("room 7", "hi"))
        assert len(asyncio.run(memory.messages())) == 3
        asyncio.run(memory.clear())
        assert asyncio.run(memory.messages()) == []


def test_using_a_conversation_inside_its_own_call_on_another_loop_is_rejected() -> None:
    refused: list[str] = []

    async def reply(request: ChatRequest) -> str:
        def write() -> None:
            try:
                asyncio.run(container.chat_memory(Assistant, "room 7").add(UserMessage("in between")))
            except MemoryInUseError as error:
                refused.append(type(error).__name__)

        await asyncio.to_thread(write)
        return "hello"

    with Container(models={"default": ScriptedChatModel([reply])}).register(Assistant) as container:
        asyncio.run(container.get(Assistant).chat("room 7", "hi"))
        assert len(asyncio.run(container.chat_memory(Assistant, "room 7").messages())) == 2
    assert refused == ["MemoryInUseError"]
