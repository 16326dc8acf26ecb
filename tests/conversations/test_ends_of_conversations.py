"""What is left of a call whose run ends badly: after a store that fails, after undone tools, in a restored log."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Protocol

import pytest

from toolbox import (
    ChatMemoryStore,
    ChatRequest,
    Container,
    InMemoryChatMemoryStore,
    MemoryId,
    PartialResponse,
    Result,
    TokenStream,
    compensate_for,
    register_ai_service,
    tool,
)
from toolbox.chat import StreamEvent
from toolbox.errors import RunStoreError
from toolbox.runs import RunStore, approve
from toolbox.testing import ScriptedChatModel, tool_call

from .test_stop import Kept, soon

pytestmark = pytest.mark.anyio


class Seats:
    def __init__(self) -> None:
        self.undone: list[int] = []

    @tool
    async def reserve(self, seat: int) -> str:
        """Reserve a seat."""
        return f"reserved {seat}"

    @compensate_for(reserve)
    async def release(self, seat: int) -> None:
        self.undone.append(seat)

    @tool(requires_approval=True)
    async def pay(self) -> str:
        """Pay."""
        return "paid"


@register_ai_service(name="kiosk", tools=Seats, compensate_on_failure=True)
class Strict(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...
    def stream(self, room: MemoryId[str], text: str) -> TokenStream: ...


class Place:
    """A container whose stores outlive it."""

    def __init__(self, *replies: Any) -> None:
        self.seats, self.model = Seats(), ScriptedChatModel(replies)
        self.memory, self.runs = InMemoryChatMemoryStore(), Kept()

    def program(self, **options: Any) -> Container:
        made = Container(models={"default": self.model}, **options).register(Strict).register_instance(self.seats)
        made.register_instance(self.memory, as_type=ChatMemoryStore)
        return made.register_instance(self.runs, as_type=RunStore)


RESERVE, PAY = tool_call("reserve", {"seat": 7}), tool_call("pay")


async def test_a_run_that_cannot_load_its_conversation_stays_and_undoes_its_tools_when_it_fails() -> None:
    place = Place(RESERVE, PAY, ConnectionError("no model"))
    async with place.program(take_over_runs=False) as here:
        waiting: Any = await here.get(Strict).chat("r", "a seat")
        read = place.memory.read_since

        async def fail(*_: Any) -> Any:
            raise ConnectionError("no connection")

        place.memory.read_since = fail  # type: ignore[method-assign]
        with pytest.raises(RunStoreError, match="its conversation cannot be loaded: ConnectionError: no connection"):
            await here.runs.resume(waiting.run_id, {each.id: approve() for each in waiting.pending})
        assert (await here.runs.get(waiting.run_id)).status == "running"
        assert place.seats.undone == []
        place.memory.read_since = read  # type: ignore[method-assign]
        with pytest.raises(ConnectionError, match="no model"):
            await here.runs.resume(waiting.run_id, {})
        assert (await here.runs.get(waiting.run_id)).status == "failed"
        assert place.seats.undone == [7]
        states = {each.state for each in await here.conversations.of(Strict, "r").history()}
        assert states == {"failed"}


class Slow(ScriptedChatModel):
    """Sends two pieces of a text, and then nothing more."""

    async def stream(self, request: ChatRequest) -> AsyncIterator[StreamEvent]:
        pieces = 0
        async for each in super().stream(request):
            if isinstance(each, PartialResponse) and (pieces := pieces + 1) > 2:
                await asyncio.Event().wait()
            yield each


@pytest.mark.parametrize("model", [ScriptedChatModel, Slow])
async def test_a_cancelled_run_keeps_its_text_and_says_that_its_tools_were_undone(model: Any) -> None:
    place = Place()
    place.model = model([RESERVE, PAY, "one two three"])
    async with place.program() as here:
        waiting: Any = await here.get(Strict).chat("r", "a seat")
        answers = {each.id: approve() for each in waiting.pending}
        events = here.runs.resume_stream(waiting.run_id, answers)
        async for each in events:
            if isinstance(each, PartialResponse) and each.text == "two ":
                break
        await soon(here.runs.cancel(waiting.run_id))
        assert place.seats.undone == [7]
        history = await here.conversations.of(Strict, "r").history()
    assert {each.state for each in history} == {"stopped"}
    texts = [each.message.text or "" for each in history]
    assert any("rolled back" in each for each in texts)
    assert texts[-1] == ("one two " if model is Slow else "one two three")  # the answer was there already


async def test_a_model_reads_that_a_turn_which_waited_has_failed_in_a_restored_log() -> None:
    @register_ai_service(name="open", tools=Seats, on_suspended="continue")
    class Open(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    model = ScriptedChatModel([PAY, "next"])
    async with Container(models={"default": model}).register(Open).register_instance(Seats()) as here:
        await here.get(Open).chat("r", "a seat")
        exported = await here.conversations.of(Open, "r").export()
        assert [each["state"] for each in exported["turns"]] == ["waiting"]
        room = await here.conversations.restore(Open, "copy", exported)
        assert [each.state for each in await room.history()] == ["waiting"]
        await here.get(Open).chat("copy", "next")
        assert "failed" in (model.requests[-1].messages[-2].text or "")
