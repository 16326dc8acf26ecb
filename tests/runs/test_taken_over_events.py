"""The events of a run that another process continues: none is missing, and none comes twice."""

import asyncio
from typing import Any, Protocol

import pytest

from toolbox import AiMessage, ChatRequest, Container, MemoryId, register_ai_service, tool
from toolbox.chat import PartialResponse, RunSuspended, ToolExecuted
from toolbox.runs import InMemoryRunStore, RunEnded, RunStore, approve
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


class Gate:
    """Blocks what has its name, until the process stops."""

    def __init__(self, name: str) -> None:
        self.name, self.is_reached = name, asyncio.Event()

    async def pass_through(self, name: str) -> None:
        if name == self.name:
            self.is_reached.set()
            await asyncio.Event().wait()


class Steps:
    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    @tool
    async def first(self) -> str:
        await self.gate.pass_through("first")
        return "one"

    @tool
    async def second(self) -> str:
        await self.gate.pass_through("second")
        return "two"

    @tool(requires_approval=True)
    def pay(self) -> str:
        return "paid"


@register_ai_service(tools=Steps)
class Desk(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> str: ...


def container(store: InMemoryRunStore, gate: Gate) -> Container:
    async def answer(request: ChatRequest) -> Any:
        if len(request.messages) == 1:
            return AiMessage("Let me see.", [tool_call("first", {}), tool_call("second", {})])
        await gate.pass_through("model")
        return "All is done."

    model = ScriptedChatModel([answer] * 2)
    found = Container(models={"default": model}).register(Desk)
    return found.register_instance(store, RunStore).register_instance(gate)


async def events_of(here: Container, run_id: str) -> list[Any]:
    return [each.event async for each in here.runs.events(run_id)]


def shown(events: list[Any]) -> list[Any]:
    """The events, the pieces of a text joined."""
    found: list[Any] = []
    for each in events:
        if isinstance(each, PartialResponse) and found and isinstance(found[-1], PartialResponse):
            found[-1] = PartialResponse(found[-1].text + each.text)
        elif isinstance(each, ToolExecuted):
            found.append((each.execution.request.name, each.execution.result))
        else:
            found.append(each)
    return found


@pytest.mark.parametrize("place", ["first", "second", "model"])
async def test_a_process_that_takes_a_run_over_repeats_no_events(place: str) -> None:
    store = InMemoryRunStore()
    async with container(store, Gate("")) as here:
        whole = await events_of(here, (await here.runs.start(Desk.chat, "whole", "hi")).id)
    gate = Gate(place)
    async with container(store, gate) as dies:
        run_id = (await dies.runs.start(Desk.chat, "room", "hi")).id
        await gate.is_reached.wait()
    async with container(store, Gate("")) as continues:
        await continues.runs.execute(run_id)
        events = await events_of(continues, run_id)

    assert events[-1] == RunEnded("completed")
    assert [type(each) for each in shown(events)] == [type(each) for each in shown(whole)]
    assert [each for each in shown(events) if isinstance(each, PartialResponse)] == [
        PartialResponse("Let me see."),
        PartialResponse("All is done."),
    ]


async def test_equal_calls_that_are_answered_one_after_another_both_have_results() -> None:
    twin = tool_call("pay", {}, id="same")
    model = ScriptedChatModel([AiMessage(None, (twin, twin)), "Done."])
    here = Container(models={"default": model}).register(Desk).register_instance(Gate(""))
    async with here:
        run = await here.runs.start(Desk.chat, "room", "hi")
        async for each in here.runs.events(run.id):
            if isinstance(each.event, RunSuspended):
                break
        await here.runs.resume(run.id, {"1": approve()})
        await here.runs.resume(run.id, {"0": approve()})
        events = await events_of(here, run.id)

    assert [each for each in shown(events) if isinstance(each, tuple)] == [("pay", "paid"), ("pay", "paid")]
