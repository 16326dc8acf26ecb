"""Conversations with runs: while one waits, and when they are deleted."""

from datetime import timedelta
from typing import Any, Protocol

import pytest

from toolbox import (
    ChatMemoryStore,
    Container,
    InMemoryChatMemoryStore,
    MemoryId,
    Result,
    ToolExecution,
    compensate_for,
    register_ai_service,
    tool,
)
from toolbox.errors import ConversationNotFoundError, ConversationSuspendedError, RunNotFoundError
from toolbox.runs import InMemoryRunStore, Run, RunStore, approve
from toolbox.security import SecurityIdentity
from toolbox.testing import ScriptedChatModel, skip_time, tool_call

pytestmark = pytest.mark.anyio

ANN = SecurityIdentity("ann")


@tool(requires_approval=True)
async def refund() -> str:
    """Refund."""
    return "refunded"


@register_ai_service(name="desk", tools=refund)
class Desk(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...
    async def ask(self, text: str) -> Result[str]: ...


def answer(request: Any) -> Any:
    return tool_call("refund") if request.messages[-1].text == "refund" else "ok"


def container_of() -> Container:
    return Container(models={"default": ScriptedChatModel([answer] * 50)}, seeds=[SecurityIdentity]).register(Desk)


async def test_while_a_run_waits_the_conversation_shows_it_and_is_not_rewound() -> None:
    async with container_of() as container:
        desk, room = container.get(Desk), container.conversations.of(Desk, "room")
        await desk.chat("room", "hello")
        assert await room.run() is None
        waiting = await desk.chat("room", "refund")
        run = await room.run()
        assert isinstance(run, Run)
        assert (run.id, run.status) == (waiting.run_id, "suspended")
        entry = (await room.history())[0]
        with pytest.raises(ConversationSuspendedError, match="Desk") as raised:
            await room.rewind(entry)
        assert raised.value.run_id == run.id
        await container.runs.resume(run.id, {run.pending[0].id: approve()})
        assert await room.run() is None
        await room.rewind(entry)


async def test_deleting_a_conversation_cancels_its_run() -> None:
    async with container_of() as container:
        waiting = await container.get(Desk).chat("room", "refund")
        await container.conversations.of(Desk, "room").delete()
        assert (await container.runs.get(waiting.run_id or "")).status == "cancelled"
        with pytest.raises(ConversationNotFoundError):
            await container.conversations.of(Desk, "room").info()


async def test_clearing_the_memory_of_a_conversation_cancels_its_run() -> None:
    async with container_of() as container:
        waiting = await container.get(Desk).chat("room", "refund")
        await container.chat_memory(Desk, "room").clear()
        assert (await container.runs.get(waiting.run_id or "")).status == "cancelled"
        assert (await container.get(Desk).chat("room", "hi")).content == "ok"


async def test_forgetting_deletes_runs_that_wait_and_have_ended() -> None:
    async with container_of() as container:
        desk, conversations = container.get(Desk), container.conversations
        async with container.request_scope({SecurityIdentity: ANN}):
            ids = [(await desk.chat(room, "refund")).run_id or "" for room in ("1", "2")]
            started = [
                await container.runs.start(desk.chat, "3", "hello"),
                await container.runs.start(desk.ask, "hello"),
            ]
            waiting = await desk.ask("refund")
        other = await desk.chat("4", "refund")
        for each in started:
            await container.runs.result(each)
        assert await conversations.forget(service=Desk, memory_id="1") == {
            "conversations": 1,
            "messages": 0,
            "beans": 0,
            "runs": 1,
        }
        deleted = await conversations.forget(owner="ann")
        assert deleted == {"conversations": 2, "messages": 2, "beans": 0, "runs": 3}
        for each in (*ids, *(run.id for run in started)):
            with pytest.raises(RunNotFoundError):
                await container.runs.get(each)
        assert {each.id for each in await container.runs.list()} == {waiting.run_id, other.run_id}
        assert (await conversations.forget(service="desk"))["runs"] == 1


class Trips:
    def __init__(self) -> None:
        self.undone: list[str] = []

    @tool
    async def reserve(self, place: str) -> str:
        """Reserve a trip."""
        return f"reserved {place}"

    @compensate_for("reserve")
    async def release(self, execution: ToolExecution) -> None:
        """Release the trip."""
        self.undone.append(execution.arguments["place"])


@register_ai_service(name="agency", tools=[Trips, refund], compensate_on_failure=True)
class Agency(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...


@pytest.mark.parametrize("how", ["delete", "forget"])
async def test_what_a_waiting_run_did_is_undone_when_its_conversation_is_deleted(how: str) -> None:
    replies = ["hello", tool_call("reserve", {"place": "Oslo"}), tool_call("refund")]
    trips = Trips()
    container = Container(models={"default": ScriptedChatModel(replies)}).register(Agency).register_instance(trips)
    async with container:
        await container.get(Agency).chat("room", "hi")
        waiting = await container.get(Agency).chat("room", "reserve")
        if how == "delete":
            await container.conversations.of(Agency, "room").delete()
            assert (await container.runs.get(waiting.run_id or "")).status == "cancelled"
        else:
            counts = await container.conversations.forget(service=Agency, memory_id="room")
            assert counts == {"conversations": 1, "messages": 2, "beans": 0, "runs": 1}
        assert trips.undone == ["Oslo"]
        assert await container.conversations.list() == []


@register_ai_service(name="new-desk", tools=refund, former_names=["desk"])
class NewDesk(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...


async def test_a_run_under_a_former_name_is_forgotten_with_its_conversation() -> None:
    store, runs, models = InMemoryChatMemoryStore(), InMemoryRunStore(), {"default": ScriptedChatModel([answer] * 9)}
    for service in (Desk, NewDesk):
        container = Container(models=models).register(service)
        container.register_instance(store, ChatMemoryStore).register_instance(runs, RunStore)
        async with container:
            if service is Desk:
                await container.get(Desk).chat("room", "hello")
                await container.get(Desk).chat("room", "refund")
                continue
            run = await container.conversations.of(NewDesk, "room").run()
            assert run.status == "suspended"
            counts = await container.conversations.forget(service=NewDesk, memory_id="room")
            assert counts == {"conversations": 1, "messages": 2, "beans": 0, "runs": 1}
            assert await container.conversations.list() == await container.runs.list() == []


async def test_a_conversation_is_listed_by_the_time_of_its_store() -> None:
    async with container_of() as container:
        desk, conversations = container.get(Desk), container.conversations
        await desk.chat("1", "hello")
        await skip_time(container, timedelta(hours=1))
        await conversations.create(Desk, "2")
        first, second = reversed(await conversations.list())
        assert timedelta(hours=1) <= second.created_at - first.updated_at < timedelta(hours=2)
