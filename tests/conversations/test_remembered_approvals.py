"""`approve(remember="conversation")`: which further calls need no approval, and when it is forgotten."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from tests.conversations.three_methods import ThreeMethods
from toolbox import (
    AiMessage,
    ChatMemoryStore,
    Container,
    EventListener,
    IllegalConfigurationError,
    InMemoryChatMemoryStore,
    InvocationContext,
    MemoryId,
    Result,
    application_scoped,
    create_ai_service,
    register_ai_service,
    tool,
)
from toolbox.conversations import Conversation, RememberedApproval
from toolbox.errors import ConversationNotFoundError, RunAnswerError
from toolbox.events import InvocationEvent, RunAnsweredEvent
from toolbox.guardrails import GuardrailResult, ToolInputGuardrail, ToolInputGuardrailRequest, tool_input_guardrails
from toolbox.runs import Answer, approve, reject, runs_of
from toolbox.security import SecurityIdentity
from toolbox.sql import SqlChatMemoryStore
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio

ANN, BOB = SecurityIdentity("ann"), SecurityIdentity("bob")
BOSS = SecurityIdentity("boss", frozenset({"manager"}))
ran: list[tuple[str, int, Any]] = []


@pytest.fixture(autouse=True)
def nothing_ran() -> None:
    ran.clear()


class NotThirteen(ToolInputGuardrail):
    def validate(self, request: ToolInputGuardrailRequest) -> GuardrailResult:
        return self.failure("unlucky") if request.arguments["order"] == 13 else self.success()


@tool(requires_approval=True, may_remember=True)
@tool_input_guardrails(NotThirteen)
async def refund(order: int, context: InvocationContext) -> str:
    """Refund an order."""
    ran.append(("refund", order, context.approved_by))
    return f"refunded {order}"


@tool(requires_approval=True, may_remember=True)
async def ship(order: int) -> str:
    """Ship an order."""
    ran.append(("ship", order, None))
    return "shipped"


@tool(requires_approval=True)
async def delete(order: int) -> str:
    """Delete an order."""
    ran.append(("delete", order, None))
    return "deleted"


class Chat(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...


@register_ai_service(name="desk", tools=[refund, ship, delete])
class Desk(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...
    async def ask(self, text: str) -> Result[str]: ...


@register_ai_service(name="shared", tools=refund, shared_conversations=True)
class Shared(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...


@register_ai_service(name="open", tools=refund, on_suspended="continue")
class Open(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...


def answer(request: Any) -> Any:
    """Call the tools that the user names, such as "refund 7"; else answer."""
    text = request.messages[-1].text or ""
    words = text.split()
    if type(request.messages[-1]).__name__ != "UserMessage" or len(words) < 2 or len(words) % 2:
        return f"done: {text}"
    return AiMessage(
        None, [tool_call(name, {"order": int(n)}) for name, n in zip(words[::2], words[1::2], strict=True)]
    )


@pytest.fixture(params=["memory", "sqlite"])
async def new_store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Callable[[], Any]]:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/rooms.db")
    store = InMemoryChatMemoryStore()
    yield lambda: store if request.param == "memory" else SqlChatMemoryStore(engine)
    await engine.dispose()


def container_of(store: Any = None, *services: Any, **options: Any) -> Container:
    made = Container(models={"default": ScriptedChatModel([answer] * 99)}, seeds=[SecurityIdentity], **options)
    made.register(*(services or (Desk,)))
    return made.register_instance(store or InMemoryChatMemoryStore(), ChatMemoryStore)


@asynccontextmanager
async def acting(container: Container, by: SecurityIdentity | None) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        if by is not None:
            await stack.enter_async_context(container.request_scope({SecurityIdentity: by}))
        yield


async def say(
    container: Container, text: str, by: SecurityIdentity | None = ANN, room: str = "room", service: Any = Desk
) -> Result[str]:
    async with acting(container, by):
        result: Result[str] = await container.get(service).chat(room, text)
        return result


async def approve_all(container: Container, waiting: Result[str], given: Answer, by: Any = BOSS) -> Result[str]:
    assert waiting.run_id is not None
    return await container.runs.resume(waiting.run_id, {each.id: given for each in waiting.pending}, by=by)


async def remember_refunds(container: Container, text: str = "refund 1", **options: Any) -> Result[str]:
    waiting = await say(container, text, **options)
    assert [each.may_remember for each in waiting.pending] == [True]
    return await approve_all(container, waiting, approve(remember="conversation"))


def room_of(container: Container, name: str = "room", service: Any = Desk) -> Conversation:
    return container.conversations.of(service, name)


async def asks(container: Container, text: str = "refund 9", **options: Any) -> bool:
    """Return True if a call waits for an approval; then reject it."""
    result = await say(container, text, **options)
    if not result.pending:
        return False
    await approve_all(container, result, reject(), by=SecurityIdentity("all", frozenset({"manager", "director"})))
    return True


# --- which calls need no approval


async def test_further_calls_of_the_tool_need_no_approval_also_in_another_process(new_store: Any) -> None:
    began = datetime.now(UTC)
    async with container_of(new_store()) as container:
        done = await remember_refunds(container)
        assert done.content == "done: refunded 1"
    async with container_of(new_store()) as container:
        result = await say(container, "refund 2")
        assert (result.pending, result.content) == ((), "done: refunded 2")
        assert [(name, order) for name, order, _ in ran] == [("refund", 1), ("refund", 2)]
        assert ran[0][2] == ran[1][2] == BOSS
        [found] = await room_of(container).approvals()
        assert found == RememberedApproval("refund", "boss", found.at)
        assert found.at.tzinfo is not None
        assert began.replace(microsecond=0) <= found.at <= datetime.now(UTC)


async def test_an_approval_without_remember_is_not_remembered(new_store: Any) -> None:
    async with container_of(new_store()) as container:
        await approve_all(container, await say(container, "refund 1"), approve())
        assert await room_of(container).approvals() == []
        assert await asks(container)


async def test_other_tools_rooms_services_and_people_still_need_one(new_store: Any) -> None:
    async with container_of(new_store(), Desk, Shared) as container:
        await remember_refunds(container, service=Shared)
        assert not await asks(container, service=Shared)
        assert await asks(container, service=Shared, by=BOB)
        assert await asks(container, service=Shared, by=None)
        assert await asks(container, service=Shared, room="other")
        await remember_refunds(container)
        assert not await asks(container)
        assert await asks(container, "ship 1")
        assert await asks(container, "delete 1")


async def test_people_with_one_name_are_told_apart_by_their_tenants() -> None:
    one, other = (SecurityIdentity("ann", frozenset(), {"tenant": each}) for each in ("a", "b"))
    async with container_of(None, Shared, run_identity=("tenant",)) as container:
        await remember_refunds(container, service=Shared, by=one)
        assert not await asks(container, service=Shared, by=one)
        assert await asks(container, service=Shared, by=other)


async def test_a_remembered_approval_counts_at_once_for_later_calls_of_the_same_run() -> None:
    replies: list[Any] = [tool_call("refund", {"order": 1}), tool_call("refund", {"order": 2}), "both"]
    container = Container(models={"default": ScriptedChatModel(replies)}, seeds=[SecurityIdentity]).register(Desk)
    async with container:
        done = await remember_refunds(container, "please")
        assert done.content == "both"
        assert [order for _, order, _ in ran] == [1, 2]


async def test_a_call_that_waits_already_needs_its_own_answer() -> None:
    async with container_of() as container:
        waiting = await say(container, "refund 1 refund 2")
        first, second = waiting.pending
        given = {first.id: approve(remember="conversation")}
        waiting = await container.runs.resume(waiting.run_id or "", given)
        assert [each.id for each in waiting.pending] == [second.id]
        assert (await container.runs.resume(waiting.run_id or "", {second.id: approve()})).pending == ()


async def test_guardrails_of_the_tool_still_judge_each_call() -> None:
    async with container_of() as container:
        await remember_refunds(container)
        result = await say(container, "refund 13")
        assert (result.pending, result.content) == ((), "done: Input validation failed: unlucky")
        assert [order for _, order, _ in ran] == [1]


async def test_an_edited_approval_can_be_remembered() -> None:
    async with container_of() as container:
        waiting = await say(container, "refund 1")
        await approve_all(container, waiting, approve({"order": 5}, remember="conversation"))
        assert not await asks(container, "refund 2")
        assert [order for _, order, _ in ran] == [5, 2]


async def test_the_present_rules_of_the_tool_count() -> None:
    store = InMemoryChatMemoryStore()

    def desk(**options: Any) -> Any:
        @tool(name="pay", **options)
        async def pay(order: int) -> str:
            return "paid"

        @register_ai_service(name="rules", tools=pay)
        class Rules(Protocol):
            async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

        return Rules

    async def asks_with(**options: Any) -> bool:
        service = desk(**options)
        async with container_of(store, service) as container:
            return await asks(container, "pay 2", service=service)

    remembering: dict[str, Any] = {"requires_approval": True, "may_remember": True}
    service = desk(**remembering)
    async with container_of(store, service) as container:
        await remember_refunds(container, "pay 1", service=service)
    assert not await asks_with(**remembering)
    assert not await asks_with(**remembering, approvers=("manager",))
    assert await asks_with(**remembering, approvers=("director",))
    assert await asks_with(requires_approval=True)


async def test_a_renamed_tool_of_a_renamed_service_is_still_approved() -> None:
    store = InMemoryChatMemoryStore()

    @tool(name="repay", requires_approval=True, may_remember=True, former_names=("refund",))
    async def repay(order: int) -> str:
        return "repaid"

    @register_ai_service(name="counter", former_names=("desk",), tools=repay)
    class Counter(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    async with container_of(store) as container:
        await remember_refunds(container)
    async with container_of(store, Counter) as container:
        assert not await asks(container, "repay 1", service=Counter)


async def test_a_tool_of_a_service_that_is_a_tool_is_approved_in_the_conversation_of_its_caller() -> None:
    @register_ai_service(name="clerk", tools=refund)
    class Clerk(Protocol):
        @tool(name="clerk")
        async def do(self, text: str) -> str:
            """Do something."""
            ...

    @register_ai_service(name="front", tools=[Clerk, refund])
    class Front(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    inner: list[Any] = [tool_call("clerk", {"text": "refund 1"}), tool_call("refund", {"order": 1}), "inner", "outer"]
    outer: list[Any] = [tool_call("refund", {"order": 2}), "no"]
    model = ScriptedChatModel([*inner, *inner, *outer])
    container = Container(models={"default": model}, seeds=[SecurityIdentity]).register(Clerk, Front)
    async with container:
        done = await remember_refunds(container, "x", service=Front)
        assert done.content == "outer"
        result = await say(container, "x", service=Front)
        assert (result.pending, result.content) == ((), "outer")
        assert await asks(container, "x", service=Front)  # that of the other service is another tool
        room = room_of(container, service=Front)
        await room.rewind((await room.history())[0])
        assert await room.approvals() == []


async def test_it_counts_while_the_conversation_goes_on() -> None:
    async with container_of(None, Open) as container:
        waiting = await say(container, "refund 1", service=Open)
        await say(container, "hello", service=Open)
        await approve_all(container, waiting, approve(remember="conversation"))
        assert not await asks(container, service=Open)
        room = room_of(container, service=Open)
        asked = {each.message.text: each for each in await room.history()}
        await room.rewind(asked["refund 9"])
        assert len(await room.approvals()) == 1
        await room.rewind(asked["refund 1"])
        assert await room.approvals() == []


class CutOff(InMemoryChatMemoryStore):
    """A store whose reads or changes fail while they are in `fails`."""

    def __init__(self) -> None:
        super().__init__()
        self.fails: set[str] = set()

    async def read_since(self, key: Any, first: Any) -> Any:
        if "reads" in self.fails:
            raise ConnectionError("gone")
        return await super().read_since(key, first)

    async def change(self, key: Any, change: Any) -> Any:
        if "changes" in self.fails:
            raise ConnectionError("gone")
        return await super().change(key, change)


async def test_a_person_is_asked_while_the_conversation_cannot_be_read(caplog: pytest.LogCaptureFixture) -> None:
    store = CutOff()

    def cut_off(request: Any) -> Any:
        store.fails = {"reads"}
        return tool_call("refund", {"order": 2})

    replies: list[Any] = [answer, answer, cut_off]
    container = Container(models={"default": ScriptedChatModel(replies)}, seeds=[SecurityIdentity]).register(Desk)
    async with container.register_instance(store, ChatMemoryStore) as container:
        await remember_refunds(container)
        waiting = await say(container, "please")
        assert [each.tool_name for each in waiting.pending] == ["refund"]
        assert "'refund' needs approval, because its conversation cannot be read: ConnectionError: gone" in caplog.text


async def test_the_approved_call_runs_if_the_approval_cannot_be_stored(caplog: pytest.LogCaptureFixture) -> None:
    store = CutOff()
    async with container_of(store) as container:
        waiting = await say(container, "refund 1")
        store.fails = {"changes"}
        assert (await approve_all(container, waiting, approve(remember="conversation"))).content == "done: refunded 1"
        assert "does not remember an approval: ConnectionError: gone" in caplog.text
        assert await asks(container)


# --- forgetting


async def test_forgetting_takes_one_tool_or_all(new_store: Any) -> None:
    async with container_of(new_store()) as container:
        room = room_of(container)
        await remember_refunds(container)
        await remember_refunds(container, "ship 1")
        assert [each.tool_name for each in await room.approvals()] == ["refund", "ship"]
        await room.forget_approvals("refund")
        assert [each.tool_name for each in await room.approvals()] == ["ship"]
        assert await asks(container)
        await remember_refunds(container)
        await room.forget_approvals()
        assert await room.approvals() == []
        assert await asks(container)
        assert await asks(container, "ship 2")


async def test_a_rewind_to_before_the_approved_call_forgets_it(new_store: Any) -> None:
    async with container_of(new_store()) as container:
        room = room_of(container)
        await say(container, "hello")
        await remember_refunds(container)
        await say(container, "thanks")
        asked = {each.message.text: each for each in await room.history()}
        await room.rewind(asked["thanks"])
        assert len(await room.approvals()) == 1
        assert not await asks(container)
        await room.rewind(asked["refund 1"])
        assert await room.approvals() == []
        assert await asks(container)


async def test_approvals_do_not_travel(new_store: Any) -> None:
    async with container_of(new_store()) as container:
        room = room_of(container)
        await remember_refunds(container)
        copy = await room.fork("copy")
        exported = await room.export()
        assert "approval" not in str(exported)
        restored = await container.conversations.restore(Desk, "restored", exported, owner=ANN)
        assert await copy.approvals() == await restored.approvals() == []
        assert len(await room.approvals()) == 1
        assert await asks(container, room="copy")
        assert await asks(container, room="restored")


async def test_a_deleted_conversation_has_none(new_store: Any) -> None:
    async with container_of(new_store()) as container:
        room = room_of(container)
        await remember_refunds(container)
        await room.delete()
        for refused in (room.approvals, room.forget_approvals):
            with pytest.raises(ConversationNotFoundError):
                await refused()
        assert await asks(container)


# --- who sees it


async def test_the_history_of_a_run_shows_what_is_remembered_and_what_ran_because_of_it() -> None:
    seen: list[tuple[str, bool]] = []

    @application_scoped
    class Journal(EventListener):
        def on_event(self, event: InvocationEvent) -> None:
            if isinstance(event, RunAnsweredEvent):
                seen.append((event.answer, event.remembered))

    async with container_of(None, Desk, Journal) as container:
        waiting = await say(container, "refund 1")
        await approve_all(container, waiting, approve(remember="conversation"))
        [entry] = (await container.runs.get(waiting.run_id or "")).history
        assert (entry.answer, entry.by, entry.tool_name, entry.remembered) == ("approve", "boss", "refund", True)

        waiting = await say(container, "refund 2 delete 3")
        [call] = waiting.pending
        assert (call.tool_name, call.may_remember) == ("delete", False)
        [entry] = (await container.runs.get(waiting.run_id or "")).history
        assert (entry.answer, entry.by, entry.tool_name, entry.remembered) == ("approve", "boss", "refund", True)
        await approve_all(container, waiting, approve(), by="carl")
        history = (await container.runs.get(waiting.run_id or "")).history
        assert [(each.tool_name, each.by, each.remembered) for each in history] == [
            ("refund", "boss", True),
            ("delete", "carl", False),
        ]
    assert seen == [("approve", True), ("approve", False)]


# --- answers that cannot be remembered


async def refused(container: Container, waiting: Result[str], given: Answer, match: str) -> None:
    with pytest.raises(RunAnswerError, match=match):
        await approve_all(container, waiting, given)
    assert (await container.runs.get(waiting.run_id or "")).status == "suspended"


async def test_answers_that_no_conversation_can_remember_are_invalid() -> None:
    remembering = approve(remember="conversation")
    async with container_of(None, Desk) as container:
        await refused(container, await say(container, "refund 1", by=None), remembering, "anonymous caller")
        await refused(container, await say(container, "delete 1", room="b"), remembering, "may_remember=True")
        wrong = Answer("approve", remember="always")  # type: ignore[arg-type]
        await refused(container, await say(container, "refund 1", room="c"), wrong, "'always'")
        wrong = Answer("reject", reason="no", remember="conversation")
        await refused(container, await say(container, "refund 1", room="d"), wrong, "use approve")
        async with acting(container, ANN):
            waiting = await container.get(Desk).ask("refund 1")
        await refused(container, waiting, remembering, "ask keeps no conversation; it needs a MemoryId")
    async with container_of(ThreeMethods()) as container:
        await refused(container, await say(container, "refund 1"), remembering, "three methods")


@pytest.mark.parametrize("given", ["always", "", True, 1])
async def test_only_the_conversation_can_remember(given: Any) -> None:
    with pytest.raises(ValueError, match='"conversation"'):
        approve(remember=given)


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({}, "no effect without an approval"),
        ({"requires_approval": True, "not_self": True}, "contradicts not_self=True"),
    ],
)
async def test_tools_that_can_remember_nothing_are_problems_at_start(options: Any, fact: str) -> None:
    @tool(may_remember=True, **options)
    async def pay(order: int) -> str:
        return "paid"

    @register_ai_service(tools=pay)
    class Payer(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    with pytest.raises(IllegalConfigurationError, match=fact):
        async with container_of(None, Payer):
            pass


async def test_services_without_a_container_remember_too() -> None:
    desk = create_ai_service(Chat, chat_model=ScriptedChatModel([answer] * 9), tools=[refund], identity=ANN)
    waiting = await desk.chat("room", "refund 1")
    await runs_of(desk).resume(waiting.run_id or "", {waiting.pending[0].id: approve(remember="conversation")})
    assert (await desk.chat("room", "refund 2")).pending == ()
