"""`when_busy="raise"`: a call of a conversation at work does not wait."""

import asyncio
from collections.abc import AsyncIterator
from contextvars import Context
from typing import Any, Protocol

import pytest

from toolbox import (
    Container,
    ConversationBusyError,
    MemoryId,
    MemoryInUseError,
    Result,
    UserMessage,
    create_ai_service,
    register_ai_service,
    tool,
)
from toolbox.parameters import RunId
from toolbox.runs import approve
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


class Gate:
    def __init__(self) -> None:
        self.entered, self.opened = asyncio.Event(), asyncio.Event()

    @tool
    async def wait(self) -> str:
        """Wait."""
        self.entered.set()
        await self.opened.wait()
        return "done"

    @tool(requires_approval=True)
    async def refund(self) -> str:
        """Refund."""
        return "done"


@register_ai_service(name="desk", former_names=("app.Desk",), tools=Gate, when_busy="raise")
class Desk(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...
    async def order(self, run: RunId, room: MemoryId[str], text: str) -> Result[str]: ...
    def words(self, room: MemoryId[str], text: str) -> AsyncIterator[str]: ...


def answer(request: Any) -> Any:
    text = request.messages[-1].text
    return tool_call(text) if text in ("wait", "refund") else "ok"


def container_of(gate: Gate) -> Container:
    return Container(models={"default": ScriptedChatModel([answer] * 50)}).register(Desk).register_instance(gate)


async def test_calls_and_runs_of_a_conversation_at_work_are_refused_at_once() -> None:
    gate = Gate()
    async with container_of(gate) as container, asyncio.TaskGroup() as tasks:
        desk, runs = container.get(Desk), container.runs
        tasks.create_task(desk.chat("room", "wait"))
        await gate.entered.wait()
        with pytest.raises(ConversationBusyError) as raised:
            await desk.chat("room", "hello")
        assert (raised.value.service, raised.value.memory_id) == ("desk", "room")
        with pytest.raises(ConversationBusyError):
            await runs.start(desk.chat, "room", "hello")
        with pytest.raises(ConversationBusyError):
            async for _ in desk.words("room", "hello"):
                pass
        assert (await desk.chat("other", "hello")).content == "ok"
        assert await runs.list() == []
        adding = tasks.create_task(container.chat_memory(Desk, "room").add(UserMessage("x")))  # the program waits
        await asyncio.sleep(0)
        assert not adding.done()
        gate.opened.set()


async def test_a_started_run_makes_its_conversation_busy() -> None:
    gate = Gate()
    async with container_of(gate) as container:
        desk, runs = container.get(Desk), container.runs
        run = await runs.start(desk.order, "run-1", "room", "wait")
        with pytest.raises(ConversationBusyError):
            await runs.start(desk.order, "run-2", "room", "hello")
        assert (await runs.start(desk.order, "run-1", "room", "wait")).id == run.id  # it is the same call
        gate.opened.set()
        await runs.result(run)
        assert (await runs.result(await runs.start(desk.order, "run-2", "room", "hello"))).content == "ok"


async def test_a_run_that_goes_on_waits_for_its_turn() -> None:
    gate = Gate()
    async with container_of(gate) as container, asyncio.TaskGroup() as tasks:
        desk = container.get(Desk)
        suspended = await desk.chat("room", "refund")
        holding = container.chat_memory(Desk, "room")
        memories = await container._internals.host.memories()
        async with memories.enter(holding._key):
            resume = container.runs.resume(suspended.run_id or "", {"0": approve()})
            resuming = tasks.create_task(resume, context=Context())  # not by the one who has the conversation
            await asyncio.sleep(0.05)
            assert not resuming.done()
        assert (await resuming).content == "ok"


async def test_a_block_cannot_wait_for_a_run_of_its_own_conversation() -> None:
    async with asyncio.timeout(10), container_of(Gate()) as container:
        async with container.conversation_scope(Desk, "room"):
            suspended = await container.get(Desk).chat("room", "refund")
            with pytest.raises(MemoryInUseError):
                await container.runs.resume(suspended.run_id or "", {"0": approve()})
        assert (await container.runs.resume(suspended.run_id or "", {"0": approve()})).content == "ok"


async def test_a_call_from_within_is_still_an_error_of_the_program() -> None:
    @tool
    async def ask_again() -> str:
        """Ask again."""
        with pytest.raises(MemoryInUseError):
            await made.chat("room", "hello")
        return "refused"

    class Own(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    model = ScriptedChatModel([tool_call("ask_again"), "ok"])
    made = create_ai_service(Own, chat_model=model, tools=[ask_again], when_busy="raise")
    assert await made.chat("room", "hello") == "ok"


async def test_a_service_without_a_container_refuses_too() -> None:
    gate = Gate()

    class Own(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    made = create_ai_service(Own, chat_model=ScriptedChatModel([answer] * 9), tools=[gate.wait], when_busy="raise")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(made.chat("room", "wait"))
        await gate.entered.wait()
        with pytest.raises(ConversationBusyError):
            await made.chat("room", "hello")
        gate.opened.set()
