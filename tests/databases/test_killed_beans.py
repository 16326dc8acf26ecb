"""A process that is killed between a tool and the write of its turn: the bean and the turn agree."""

import os
from collections.abc import Callable

import pytest

from . import ferry_desk
from .ferry_desk import NAME, Ferry, desk, state
from .forge import LEASE, Forge, prepared, rows

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that fork"),
    pytest.mark.timeout(300),  # starts many processes
]

BOOKED = ({NAME: {"seats": ["A", "B"]}}, ["A", "B"])


@pytest.fixture
def url(database_url: str) -> str:
    """A database with the tables of the ferry and those of the runs."""
    return prepared(database_url, ferry_desk.TABLES)


@pytest.fixture
def run(forge: Forge, url: str) -> Callable[..., int]:
    """Runs a program, and returns the exit status of its process."""

    def run(name: str, *arguments: object) -> int:
        forge.begin(name, url, LEASE, *arguments)
        [status] = forge.wait()
        return status

    return run


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_call_that_is_killed_at_its_write_stores_the_turn_with_the_bean_or_neither(
    url: str, run: Callable[..., int], when: str
) -> None:
    assert run("ferry_chat", "7", 1, when) == -9

    async with desk(url, LEASE) as (container, _):
        assert await state(container, "7") == ((None, []) if when == "before" else BOOKED)
        await container.get(Ferry).chat("8", "Two seats")
        assert await state(container, "8") == BOOKED


async def test_a_run_that_is_killed_at_any_write_ends_with_each_change_of_the_bean_once(
    url: str, run: Callable[..., int]
) -> None:
    assert run("ferry_book", "whole", 0) == 0
    [(writes,)] = rows(url, "SELECT taken FROM steps")
    killed = [str(number) for number in range(2, writes + 1)]  # the last one is the end of the run, with its turn
    for number in killed:
        assert run("ferry_book", number, int(number)) == -9

    async with desk(url, LEASE) as (container, _):
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
