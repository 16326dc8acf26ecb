"""Stopping what another process does in a conversation, also of a process that was killed."""

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol
from uuid import uuid4

import pytest

from tests.conversations.made_logs import check_pairs
from tests.conversations.test_stop import stop
from toolbox import AiMessage, ChatMemoryKey, ChatMemoryStore, Container, MemoryId, register_ai_service
from toolbox.conversations.log import entries_of
from toolbox.errors import ConversationStoppedError
from toolbox.runs import Run
from toolbox.testing import ScriptedChatModel

from .forge import Reporting
from .stoppable import LEASE, PAYS, Desk, desk, stoppable

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that fork"),
    pytest.mark.timeout(400),  # starts processes
]


@pytest.fixture
def places(store_url: str, sqlite_url: str) -> tuple[str, str]:
    """The databases of the conversations and of the runs."""
    return store_url, sqlite_url if store_url.startswith("unix:") else store_url


@pytest.fixture
def room() -> str:
    """A conversation, and the id of a run, in databases that tests share."""
    return uuid4().hex


@register_ai_service
class Talk(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> str: ...


class Working:
    """A process that is at work in the conversation."""

    def __init__(self, program: Reporting) -> None:
        self._program = program

    async def says(self) -> str:
        connection = self._program.connection
        assert await asyncio.to_thread(connection.poll, 100)
        return str(connection.recv())

    def kill(self) -> None:
        """Kill the process, unless it has ended, and wait for its end."""
        self._program.kill()


@pytest.fixture
def working(begin_reporting: Callable[..., Reporting]) -> Callable[..., AbstractContextManager[Working]]:
    """Runs a process that is at work."""

    @contextmanager
    def run(*arguments: str) -> Iterator[Working]:
        process = Working(begin_reporting(stoppable.__name__, *arguments))
        try:
            yield process
        finally:
            process.kill()

    return run


async def turns_of(here: Container, room: str) -> list[tuple[str, list[Any]]]:
    store: Any = here.get(ChatMemoryStore)
    log = await store.read_since(ChatMemoryKey.of(Desk, room), lambda head: 0)
    turns = () if log is None else log.turns
    return [(turn.state, [each.message for each in entries_of([turn])]) for turn in turns]


async def runs_of(here: Container, room: str) -> list[Run[Any]]:
    return await here.runs.list(memory_id=room)


@pytest.mark.parametrize("what", ["call", "run"])
async def test_a_process_stops_what_another_one_does(
    places: tuple[str, str], room: str, working: Any, what: str
) -> None:
    async with desk(*places, "next", take_over_runs=False) as here:
        with working(*places, room, what) as there:
            assert await there.says() == "at work"
            assert await asyncio.wait_for(stop(here, Desk, room, "ann"), 60)
            [(state, messages)] = await turns_of(here, room)
            assert await there.says() in (
                "ConversationStoppedError: the conversation was stopped by ann",
                f"RunCancelledError: run {room} was cancelled: its conversation was stopped",
            )
        assert [each.status for each in await runs_of(here, room)] == (["cancelled"] if what == "run" else [])
        assert await here.get(Desk).chat(room, "and now?") == "next"

    assert state == "stopped"
    assert messages[1] == PAYS
    assert [each.text for each in messages[2:]] == ["paid", "interrupted"]


@pytest.mark.timeout(400)  # a longer stop waits for a clock that stands still
async def test_a_stop_takes_no_more_than_one_look_of_each_process(
    new_store: Any, room: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock stands still. It moves one second, and a quarter of one: less than the two that a stop may take."""
    now = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    one, other = await new_store(), await new_store()  # each like the one of another process
    waits, is_asked, looks, wishes, ask = asyncio.Event(), asyncio.Event(), list[str](), one.wishes, other.ask_to_stop

    async def look() -> Any:
        looks.append("look")
        return await wishes()

    async def ask_to_stop(*arguments: Any) -> bool:
        asked = bool(await ask(*arguments))
        is_asked.set()
        return asked

    async def think(_: Any) -> str:
        waits.set()
        await asyncio.Event().wait()
        return "never"

    one.wishes, other.ask_to_stop = look, ask_to_stop
    here = Container(models={"default": ScriptedChatModel([think])}).register(Talk)
    there = Container(models={"default": ScriptedChatModel([])}).register(Talk)
    async with here.register_instance(one, ChatMemoryStore), there.register_instance(other, ChatMemoryStore):
        call = asyncio.create_task(here.get(Talk).chat(room, "go"))
        await waits.wait()
        stopping = asyncio.create_task(there.conversations.of(Talk, room).stop(by="ann"))
        await is_asked.wait()
        assert looks == []

        now[0] += 1.0
        with pytest.raises(ConversationStoppedError):
            await call
        assert looks == ["look"]
        now[0] += 0.25
        assert await stopping is True


@pytest.mark.parametrize("what", ["call", "run"])
async def test_what_a_killed_process_did_in_a_run_is_stored_and_a_call_leaves_nothing(
    places: tuple[str, str], room: str, working: Any, what: str
) -> None:
    async with desk(*places, "next", take_over_runs=False) as here:
        with working(*places, room, what) as there:
            assert await there.says() == "at work"
            there.kill()
            began = time.monotonic()
            assert await asyncio.wait_for(stop(here, Desk, room, "ann"), 60)
            assert time.monotonic() - began < 10 * LEASE
        turns = await turns_of(here, room)
        assert [each.status for each in await runs_of(here, room)] == (["cancelled"] if what == "run" else [])
        assert await here.get(Desk).chat(room, "and now?") == "next"

    if what == "call":
        assert turns == []
        return
    [(state, messages)] = turns
    check_pairs(messages)
    assert state == "stopped"
    assert isinstance(messages[1], AiMessage)
    assert [each.text for each in messages[2:]] == ["paid", "interrupted"]


async def test_a_conversation_in_which_nothing_happens_is_not_stopped(places: tuple[str, str], room: str) -> None:
    async with desk(*places, "one", take_over_runs=False) as here:
        assert not await stop(here, Desk, room)
        await here.get(Desk).chat(room, "hi")
        assert not await stop(here, Desk, room)
        memories = await here._internals.running_host.memories()  # type: ignore[union-attr]
        async with memories.enter(ChatMemoryKey.of(Desk, room)):
            assert not await asyncio.wait_for(stop(here, Desk, room), 10)  # the program itself is not stopped


async def test_a_block_of_the_program_is_not_stopped_after_a_call_in_it(places: tuple[str, str], room: str) -> None:
    async with desk(*places, "one", take_over_runs=False) as here, here.conversation_scope(Desk, room) as held:
        await here.get(Desk).chat(room, "hi")
        assert not await asyncio.wait_for(held.stop(), 10)
