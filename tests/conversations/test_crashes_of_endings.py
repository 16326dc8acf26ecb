"""Crashes at every write while a run ends without an answer: afterwards its turn is there once, as the run has ended.

A crash is a pair of stores that fail from one write on, before or after that write has happened. Another container with
the same data then continues.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from tests.conversations.made_logs import check_pairs
from toolbox import AiMessage, ChatMemoryKey, ChatRequest, UserMessage
from toolbox.conversations.stores import InMemoryChatMemoryStore
from toolbox.runs.store import RunChanges, StoredRecord, StoredRun
from toolbox.testing import skip_time

from .test_stop import LOOK, REFUND, Clerk, Kept, Office, stop

pytestmark = pytest.mark.anyio


class CrashedError(Exception):
    pass


class Crash:
    """Fails from the write with the number `at` on, before or after it has happened; never with 0."""

    def __init__(self, at: int = 0, *, after: bool = False) -> None:
        self.at, self.after, self.writes = at, after, 0

    @property
    def came(self) -> bool:
        return 0 < self.at <= self.writes

    async def around(self, write: Any) -> Any:
        self.writes += 1
        if self.writes == self.at and self.after:
            await write
        elif not self.came:
            return await write
        write.close()
        raise CrashedError


class Memory(InMemoryChatMemoryStore):
    crash = Crash()

    async def write(self, key: ChatMemoryKey, write: Any) -> None:
        await self.crash.around(super().write(key, write))


class Runs(Kept):
    crash = Crash()

    async def create(self, run: StoredRun, records: Sequence[StoredRecord] = (), *, owner: str | None = None) -> bool:
        return bool(await self.crash.around(super().create(run, records, owner=owner)))

    async def append(
        self,
        run_id: str,
        generation: int,
        records: Sequence[StoredRecord],
        changes: RunChanges | None = None,
        events: Sequence[str] = (),
    ) -> None:
        await self.crash.around(super().append(run_id, generation, records, changes, events))

    async def change(
        self, run_id: str, version: int, changes: RunChanges, records: Sequence[StoredRecord] = ()
    ) -> StoredRun | None:
        found: StoredRun | None = await self.crash.around(super().change(run_id, version, changes, records))
        return found


def office(*replies: Any) -> Office:
    made = Office(*replies)
    made.memory, made.store = Memory(), Runs(lease=60)
    return made


async def crashing(made: Office, crash: Crash, work: Any) -> bool:
    """Do work in a process that dies at a write. Return True if it has."""
    made.memory.crash = made.store.crash = crash  # type: ignore[attr-defined]
    async with made.program(take_over_runs=False) as here:
        try:
            await work(here)
        except Exception:
            assert crash.came
    made.memory.crash = made.store.crash = Crash()  # type: ignore[attr-defined]
    return crash.came


@pytest.mark.parametrize("after", [False, True])
async def test_a_suspended_run_that_is_cancelled(after: bool) -> None:
    at, came = 0, True
    while came:
        at += 1
        made = office(AiMessage("hm", [LOOK, REFUND]))
        async with made.program(take_over_runs=False) as here:
            await here.get(Clerk).chat("r", "refund")
        came = await crashing(made, Crash(at, after=after), lambda here: stop(here, Clerk, "r", "ann"))
        async with made.program(take_over_runs=False) as there:
            await stop(there, Clerk, "r", "ann")
            [run] = await there.runs.list()
        assert run.status == "cancelled"
        [(state, messages)] = await made.turns()
        check_pairs(messages)
        assert (state, len(messages)) == ("stopped", 4)
    assert at == 3  # the turn, and the end of the run


def reply(request: ChatRequest) -> Any:
    if isinstance(request.messages[-1], UserMessage):
        return LOOK
    raise ConnectionError("down")


@pytest.mark.parametrize("after", [False, True])
async def test_a_run_that_fails(after: bool) -> None:
    at, came = 0, True
    while came:
        at += 1
        made = office(*[reply] * 4)

        async def fail(here: Any) -> None:
            run = await here.runs.start(Clerk.chat, "r", "go")
            await here.runs.execute(run.id, timeout=0)

        came = await crashing(made, Crash(at, after=after), fail)
        async with made.program(take_over_runs=False) as there:
            await skip_time(there, timedelta(hours=1))  # the lease of the process that died
            for run in await there.runs.list("running"):
                await there.runs.execute(run.id)
            runs = await there.runs.list()
        turns = await made.turns()
        assert [each.status for each in runs] == ["failed"] * len(runs)
        assert [state for state, _ in turns] == ["failed"] * len(runs)
        for _, messages in turns:
            check_pairs(messages)
    assert at > 4
