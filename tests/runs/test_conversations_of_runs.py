"""Conversations with a suspended run."""

from collections.abc import Sequence
from typing import Any, Protocol

import pytest

from toolbox import ChatMemoryStore, InMemoryChatMemoryStore, MemoryId, Result, register_ai_service
from toolbox.runs import (
    ConversationSuspendedError,
    InMemoryRunStore,
    RunAnswerError,
    RunChanges,
    RunId,
    RunStoreError,
    StoredRecord,
    approve,
    durable,
)

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


async def test_a_call_that_says_the_same_as_the_one_before_is_stored_as_well() -> None:
    async with container(asks(REFUND), says("done"), asks(REFUND), says("done")) as here:
        for _ in range(2):
            waiting = await here.get(Desk).chat("room", "refund")
            await here.runs.resume(waiting.run_id or "", {"0": approve()})
        messages = await here.chat_memory(Desk, "room").messages()
    assert len(messages) == 8
    assert messages[:4] == messages[4:]


async def test_messages_that_were_stored_before_a_crash_are_not_stored_again() -> None:
    class Crashing(InMemoryRunStore):
        persistent = True
        ends = 0

        async def append(
            self,
            run_id: str,
            generation: int,
            records: Sequence[StoredRecord],
            changes: RunChanges | None = None,
            events: Sequence[str] = (),
        ) -> None:
            if changes is not None and changes.status == "completed":
                self.ends += 1
                if self.ends == 1:
                    raise ConnectionError
            await super().append(run_id, generation, records, changes, events)

    @register_ai_service
    class Kept(Protocol):
        @durable
        async def chat(self, run: RunId, room: MemoryId[str], text: str) -> str: ...

    runs, conversations = Crashing(), InMemoryChatMemoryStore()

    def process(*replies: Any) -> Any:
        made = container(*replies, store=runs, services=(Kept,))
        return made.register_instance(conversations, ChatMemoryStore)

    async with process(says("hello")) as here:
        with pytest.raises(RunStoreError):
            await here.get(Kept).chat("run", "room", "hi")
        assert len(await here.chat_memory(Kept, "room").messages()) == 2
    async with process() as here:
        assert await here.get(Kept).chat("run", "room", "hi") == "hello"
        assert len(await here.chat_memory(Kept, "room").messages()) == 2
