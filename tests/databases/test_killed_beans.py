"""A process that is killed between a tool and the write of its turn: the bean and the turn agree."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.databases import ferry_desk
from tests.databases.ferry_desk import NAME, Ferry, desk, state

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that can be killed"),
    pytest.mark.timeout(300),  # starts many processes
]

BOOKED = ({NAME: {"seats": ["A", "B"]}}, ["A", "B"])


def run(url: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    program = [sys.executable, "-m", ferry_desk.__name__, url, *arguments]
    folder = Path(__file__).parents[2]
    return subprocess.run(program, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_call_that_is_killed_at_its_write_stores_the_turn_with_the_bean_or_neither(
    database_url: str, when: str
) -> None:
    assert run(database_url, "chat", "7", "1", when).returncode == -signal.SIGKILL

    async with desk(database_url) as container:
        assert await state(container, "7") == ((None, []) if when == "before" else BOOKED)
        await container.get(Ferry).chat("8", "Two seats")
        assert await state(container, "8") == BOOKED


async def test_a_run_that_is_killed_at_any_write_ends_with_each_change_of_the_bean_once(database_url: str) -> None:
    writes = int(run(database_url, "book", "whole", "0", "before").stdout)
    killed = [str(number) for number in range(2, writes + 1)]  # the last one is the end of the run, with its turn
    for number in killed:
        assert run(database_url, "book", number, number, "before").returncode == -signal.SIGKILL

    async with desk(database_url) as container:
        store = await container.runs.store()
        for room in killed:
            found = await store.load(room)
            assert found is not None
            if found.status == "running":
                await store.release(room, found.generation)  # as if its lease had ended
            await container.get(Ferry).book(room, room, "Two seats")

            beans, texts = await state(container, room)
            # A tool that had begun, and whose result is not recorded, is not run again: the model reads that.
            done = [each for each in texts if len(each) == 1]
            assert beans == ({NAME: {"seats": done}} if done else {}), room
            assert len(texts) == 2
