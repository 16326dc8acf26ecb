"""What a page and a rewind of a long conversation read does not grow with the conversation."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncEngine

from toolbox import AiMessage, UserMessage
from toolbox.conversations.log import LogEntry, LogWrite, Turn, entries_of
from toolbox.conversations.log_forms import restore_log
from toolbox.conversations.stores import LogStore
from toolbox.store_clock import clock_of
from toolbox.transcripts import message_to_dict

from .conftest import open_store
from .log_checks import new_key

pytestmark = pytest.mark.anyio

SAID = UserMessage("q"), AiMessage("a")


class Room:
    """A conversation of so many turns, and two more that are written by calls; `last` are fields of these."""

    def __init__(self, store: LogStore, turns: int) -> None:
        self.store, self.key, self._turns = store, new_key(), turns

    async def fill(self, **last: Any) -> None:
        turn = {"at": "2026-01-01T00:00:00+00:00", "state": "answered", "messages": [*map(message_to_dict, SAID)]}
        exported = {"version": 1, "turns": [turn] * self._turns, "beans": {}}
        await self.store.create(self.key, restore_log(self.key, exported, None, clock_of(self.store).now()))
        for _ in range(2):
            await self.store.write(self.key, LogWrite(turn=Turn(messages=SAID, **last)))

    async def page(self, before: str | None = None) -> list[LogEntry]:
        log = await self.store.read_newest(self.key, 50, before)
        assert log is not None
        return [*entries_of(log.turns)]

    async def use(self) -> None:
        """Read two pages, and rewind the last turn."""
        newest = await self.page()
        assert len(await self.page(newest[0].id)) == 50
        head = await self.store.rewind(self.key, newest[-2].id)
        assert head is not None
        assert head.messages == 2 * self._turns + 2
        assert await self.store.read_run(self.key, "a run") is None


@asynccontextmanager
async def examined_rows(engine: AsyncEngine) -> AsyncIterator[list[int]]:
    """Yield a list. At the end, it has the numbers of rows that each query of the block has looked at."""
    queries, rows = list[tuple[str, Any]](), list[int]()

    def note(connection: Any, cursor: Any, statement: str, parameters: Any, *_: object) -> None:
        if statement.startswith(("SELECT", "DELETE FROM toolbox_conversations_turns")):
            queries.append((statement, parameters))

    event.listen(engine.sync_engine, "before_cursor_execute", note)
    yield rows
    event.remove(engine.sync_engine, "before_cursor_execute", note)
    async with engine.connect() as connection:
        for statement, parameters in queries:
            explained = await connection.exec_driver_sql(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", parameters)
            rows.append(sum(_rows_of(explained.scalar()[0]["Plan"])))


def _rows_of(plan: dict[str, Any]) -> Iterator[float]:
    if "Plans" not in plan or "Heap" in plan["Node Type"]:
        yield plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)
    else:
        for each in plan["Plans"]:
            yield from _rows_of(each)


@pytest.mark.parametrize(
    "last", [{}, {"beans": {"plan": {"day": 1}}, "in_charge": "Desk.chat"}], ids=["plain", "state"]
)
async def test_postgresql_looks_at_few_rows_also_if_it_has_not_counted_them(
    postgres_url: str, last: dict[str, Any]
) -> None:
    async with open_store(postgres_url) as store:
        short, long = Room(store, 30), Room(store, 5_000)
        await short.fill()
        async with store._engine.begin() as connection:
            await connection.execute(text("ANALYZE"))
        await long.fill(**last)

        async with examined_rows(store._engine) as rows:
            await long.use()
            await long.store.write(long.key, LogWrite(turn=Turn(messages=SAID, run_id="a run")))

    assert len(rows) >= 12
    assert max(rows) <= 101


@pytest.mark.parametrize(
    "last", [{}, {"beans": {"plan": {"day": 1}}, "in_charge": "Desk.chat"}], ids=["plain", "state"]
)
async def test_redis_reads_few_turns(redis_url: str, last: dict[str, Any]) -> None:
    read = []
    for turns in (1_000, 5_000):
        async with open_store(redis_url) as store:
            room, fields = Room(store, turns), list[int]()
            await room.fill(**last)
            hmget = store._client.hmget

            async def counted(name: str, keys: list[str], hmget: Any = hmget, fields: list[int] = fields) -> Any:
                fields.append(len(keys))
                return await hmget(name, keys)

            store._client.hmget = counted
            await room.use()
            read.append(sum(fields))

    assert read[0] == read[1]
