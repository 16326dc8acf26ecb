"""Who is in charge of a conversation, in each store: what another process reads, goes back to, copies and continues."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Protocol
from uuid import uuid4

import pytest

from tests.databases.conftest import open_store
from toolbox import (
    ChatMemoryStore,
    Container,
    InMemoryChatMemoryStore,
    MemoryId,
    Result,
    ToolboxSettings,
    UserMessage,
    register_ai_service,
    sql,
    tool,
)
from toolbox.handover import hands_over_to
from toolbox.runs import InMemoryRunStore, RunIncompatibleError, RunStore, approve
from toolbox.settings import SqlSettings
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio

TO_BILLING, TO_DESK = tool_call("transfer_to_billing", {}), tool_call("transfer_to_desk", {})


@tool(requires_approval=True)
async def refund(order: int) -> str:
    """Refund an order."""
    return f"refunded {order}"


@register_ai_service(tools=refund)
class Billing(Protocol):
    """Invoices."""

    @hands_over_to("Desk.chat", description="anything else")
    async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...


@register_ai_service(name="handed-desk")
class Desk(Protocol):
    """Greets."""

    @hands_over_to(Billing.chat)
    async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...


@register_ai_service(name="handed-desk")
class DeskAlone(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...


Process = Callable[..., Any]


@pytest.fixture(params=["memory", "sqlite_url", "shared_postgres_url", "redis_url"])
def process(request: pytest.FixtureRequest) -> Process:
    """A program with separate connections, as in another process; what databases do not keep is shared."""
    url = None if request.param == "memory" else request.getfixturevalue(request.param)
    chats, runs = InMemoryChatMemoryStore(), InMemoryRunStore()

    @asynccontextmanager
    async def start(*replies: Any, services: tuple[Any, ...] = (Desk, Billing)) -> AsyncIterator[Any]:
        async with AsyncExitStack() as stack:
            container = Container(models={"default": ScriptedChatModel([*replies])}).register(*services)
            store = chats if url is None else await stack.enter_async_context(open_store(url))
            if url is None or url.startswith("unix:"):
                container.register_instance(runs, RunStore)
            else:
                engine = await stack.enter_async_context(sql.open_engine(url))
                container.register_instance(sql.SqlRunStore(engine), RunStore)
            yield await stack.enter_async_context(container.register_instance(store, ChatMemoryStore))

    return start


@pytest.fixture
def room() -> str:
    return f"room-{uuid4().hex}"


async def test_another_process_goes_on_with_who_is_in_charge(process: Process, room: str) -> None:
    async with process(TO_BILLING, "Billing.") as container:
        assert (await container.get(Desk).chat(room, "Money")).answered_by == "Billing.chat"
    async with process("Order 7?", TO_DESK, "Desk.") as container:
        conversation = container.conversations.of(Desk, room)
        assert (await conversation.info()).in_charge == "Billing.chat"
        assert (await container.get(Desk).chat(room, "Again")).answered_by == "Billing.chat"
        assert (await container.get(Desk).chat(room, "Thanks")).answered_by == "Desk.chat"
    async with process("Hello.") as container:
        conversation = container.conversations.of(Desk, room)
        assert (await conversation.info()).in_charge == "Desk.chat"
        answered = [each.answered_by for each in await conversation.history() if each.answered_by]
        assert answered == ["Billing.chat", "Billing.chat", "Desk.chat"]
        await conversation.put_in_charge(Billing.chat)
    async with process("Billing.") as container:
        assert (await container.get(Desk).chat(room, "Hi")).answered_by == "Billing.chat"


async def test_going_back_copying_and_restoring_begin_with_who_was_in_charge_then(process: Process, room: str) -> None:
    async with process("Hello.", TO_BILLING, "Billing.", TO_DESK, "Desk.") as container:
        for text in ("one", "two", "three"):
            await container.get(Desk).chat(room, text)
    async with process(*["."] * 5) as container:
        desk, conversation = container.get(Desk), container.conversations.of(Desk, room)
        first, second, third = (each for each in await conversation.history() if isinstance(each.message, UserMessage))
        exported = await conversation.export()
        assert [each["answered_by"] for each in exported["turns"]] == ["Desk.chat", "Billing.chat", "Desk.chat"]
        assert [each["in_charge"] for each in exported["turns"]] == ["Desk.chat", "Billing.chat", "Desk.chat"]
        await conversation.fork(f"{room} fork", upto=second.id)
        assert (await desk.chat(f"{room} fork", "?")).answered_by == "Billing.chat"
        exported["turns"].pop()
        await container.conversations.restore(Desk, f"{room} restored", exported)
        assert (await desk.chat(f"{room} restored", "?")).answered_by == "Billing.chat"
        await conversation.rewind(third.id)
        assert (await conversation.info()).in_charge == "Billing.chat"
        assert (await desk.chat(room, "?")).answered_by == "Billing.chat"
        await conversation.rewind(first.id)
        assert (await desk.chat(room, "?")).answered_by == "Desk.chat"
        for turn in exported["turns"]:
            del turn["in_charge"], turn["answered_by"]
        await container.conversations.restore(Desk, f"{room} plain", exported)
        assert (await desk.chat(f"{room} plain", "?")).answered_by == "Desk.chat"


async def test_a_run_that_waits_in_the_target_goes_on_in_another_process(process: Process, room: str) -> None:
    async with process(TO_BILLING, tool_call("refund", {"order": 7})) as container:
        waiting = await container.get(Desk).chat(room, "Money")
        assert waiting.answered_by == "Billing.chat"
    answers = {waiting.pending[0].id: approve()}
    async with process(services=(DeskAlone,)) as container:
        with pytest.raises(RunIncompatibleError):
            await container.runs.resume(waiting.run_id or "", answers)
    async with process("Refunded.", "Welcome.") as container:
        await container.runs.tell(waiting.run_id or "", "Hurry")
        result = await container.runs.resume(waiting.run_id or "", answers)
        assert (result.content, result.answered_by) == ("Refunded.", "Billing.chat")
        assert [each.text for each in result.messages if isinstance(each, UserMessage)] == ["Money", "Hurry"]
    async with process("Welcome.") as container:
        assert (await container.runs.result(waiting.run_id or "")).answered_by == "Billing.chat"
        assert (await container.get(Desk).chat(room, "Thanks")).answered_by == "Billing.chat"


async def test_calls_of_two_processes_beside_a_hand_over_come_one_after_the_other(process: Process, room: str) -> None:
    """Whoever comes second finds the first one's hand-over, whole or not begun."""
    to_billing = [lambda request: TO_BILLING if "transfer_to_billing" in names_in(request) else "."] * 9
    async with process(*to_billing) as one, process(*to_billing) as two:
        calls = (each.get(Desk).chat(room, "Hi") for each in (one, two))
        first, second = sorted(await asyncio.gather(*calls), key=lambda each: -len(each.tool_executions))
        assert [len(each.tool_executions) for each in (first, second)] == [1, 0]
        assert {first.answered_by, second.answered_by} == {"Billing.chat"}
        history = await one.conversations.of(Desk, room).history()
        assert [type(each.message).__name__ for each in history] == [
            *("UserMessage", "AiMessage", "ToolExecutionResultMessage", "AiMessage"),
            *("UserMessage", "AiMessage"),
        ]


def names_in(request: Any) -> list[str]:
    return [each.name for each in request.tool_specifications]


async def test_a_durable_call_in_a_database_is_retried_with_the_target(database_url: str) -> None:
    settings = ToolboxSettings(sql=SqlSettings(url=database_url))

    def program(*replies: Any) -> Container:
        container = Container(models={"default": ScriptedChatModel([*replies])}, settings=settings)
        return container.register(Desk, Billing, sql.engine, sql.SqlRunStore, sql.SqlChatMemoryStore)

    async with program(TO_BILLING, ValueError("broken")) as container:
        run = await container.runs.start(Desk.chat, "r", "Hi")
        with pytest.raises(Exception, match="broken"):
            await container.runs.result(run.id)
    async with program("Billing.") as container:
        result = await container.runs.retry(run.id)
        assert (result.content, result.answered_by) == ("Billing.", "Billing.chat")
        assert (await container.conversations.of(Desk, "r").info()).in_charge == "Billing.chat"
