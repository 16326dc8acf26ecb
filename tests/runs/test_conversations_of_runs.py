"""Conversations with a suspended run."""

from typing import Protocol

import pytest

from toolbox import MemoryId, Result, register_ai_service
from toolbox.runs import ConversationSuspendedError, RunAnswerError, approve

from .approved_refunds import REFUND, Desk, container, refund
from .replies import asks, ran, says

pytestmark = pytest.mark.anyio


async def test_a_suspended_run_holds_no_turn_and_blocks_new_calls_of_its_conversation() -> None:
    async with container(asks(REFUND), says("other room"), says("done"), says("next")) as here:
        desk = here.get(Desk)
        waiting = await desk.chat("room", "refund")
        with pytest.raises(ConversationSuspendedError) as raised:
            await desk.chat("room", "hello?")
        assert raised.value.run_id == waiting.run_id
        assert (await desk.chat("other", "hello")).content == "other room"
        assert await here.chat_memory(Desk, "room").messages() == []

        await here.runs.resume(waiting.run_id or "", {"0": approve()})
        messages = await here.chat_memory(Desk, "room").messages()
        assert [type(each).__name__ for each in messages] == [
            "UserMessage",
            "AiMessage",
            "ToolExecutionResultMessage",
            "AiMessage",
        ]
        assert (await desk.chat("room", "and now?")).content == "next"


async def test_a_service_can_cancel_the_suspended_run_of_a_conversation() -> None:
    @register_ai_service(tools=refund, on_suspended="cancel")
    class Eager(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    async with container(asks(REFUND), says("fine"), services=(Eager,)) as here:
        waiting = await here.get(Eager).chat("room", "refund")
        assert (await here.get(Eager).chat("room", "never mind")).content == "fine"
        assert (await here.runs.get(waiting.run_id or "")).status == "cancelled"
        with pytest.raises(RunAnswerError, match="cancelled"):
            await here.runs.resume(waiting.run_id or "", {"0": approve()})
    assert ran == []
