"""Compensation over suspensions and processes: which tools ran is part of the stored state."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.conftest import Clock
from tests.listening import Events
from tests.services.bank import CREDIT, WITHDRAW, Bank, Trips, book, results, rolled_back, trips
from toolbox import (
    AiMessage,
    ChatMemoryKey,
    ChatMemoryStore,
    ChatRequest,
    ChatResponse,
    CompensatedEvent,
    Compensation,
    Container,
    InMemoryChatMemoryStore,
    InvocationTimeoutError,
    MemoryId,
    Result,
    TokenUsage,
    ToolboxSettings,
    ToolExecution,
    ToolExecutionResult,
    ToolStartedEvent,
    compensate_for,
    register_ai_service,
    tool,
    user_message,
)
from toolbox.errors import RunIncompatibleError, RunStoreError
from toolbox.guardrails import (
    GuardrailResult,
    ToolOutputGuardrail,
    ToolOutputGuardrailRequest,
    tool_output_guardrails,
)
from toolbox.interceptors import RetryOnError, ToolInterceptor, ToolInvocation, ToolProceed, interceptors
from toolbox.limits import UsageLimitExceededError, UsageLimits
from toolbox.runs import InMemoryRunStore, RunId, RunStore, approve, fail
from toolbox.services.state import State
from toolbox.store_clock import skip
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


# --- the state


def test_failures_and_compensations_are_part_of_the_stored_state() -> None:
    from toolbox import UserMessage

    state = State(None, (), (UserMessage("q"),), failed=frozenset({1}), undone=frozenset({0}))
    assert State.from_json(state.to_json()) == state


# --- suspended runs


class Approved:
    @tool(requires_approval=True)
    async def pay(self) -> str:
        return "paid"

    @compensate_for(pay)
    async def pay_back(self) -> None: ...


async def test_cancelling_a_suspended_run_undoes_what_ran_before() -> None:
    @register_ai_service(tools=[Bank, Approved], compensate_on_failure=True)
    class Desk(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    bank = Bank()
    models = {"default": ScriptedChatModel([CREDIT, tool_call("pay")])}
    container = Container(models=models).register(Desk).register_instance(bank)
    async with container:
        result = await container.get(Desk).ask("q")
        assert result.pending
        assert bank.undone == []
        assert result.run_id is not None
        await container.runs.cancel(result.run_id)
        assert [each[0] for each in bank.undone] == ["credit"]
        await container.runs.cancel(result.run_id)
    assert len(bank.undone) == 1


class LockThatFails(InMemoryChatMemoryStore):
    """A store whose turn in a conversation fails when it ends."""

    @asynccontextmanager
    async def lock(self, key: ChatMemoryKey) -> AsyncIterator[None]:
        yield
        raise ConnectionError("the database is away")


@pytest.mark.parametrize("durable", [False, True])
async def test_an_error_after_a_suspension_was_stored_undoes_nothing(durable: bool) -> None:
    @register_ai_service(tools=[Bank, Approved], compensate_on_failure=True, durable=durable)
    class Desk(Protocol):
        async def ask(self, conversation: MemoryId[str], run: RunId, text: str) -> Result[str]: ...

    bank, models = Bank(), {"default": ScriptedChatModel([CREDIT, tool_call("pay"), "done"])}
    container = Container(models=models).register(Desk).register_instance(bank)
    container.register_instance(LockThatFails(), as_type=ChatMemoryStore)
    container.register_instance(Kept(), as_type=RunStore)
    async with container:
        with pytest.raises(ConnectionError):
            await container.get(Desk).ask("room", "run", "q")
        stored = await container.runs.get("run")

    assert (stored.status, [each.tool_name for each in stored.pending]) == ("suspended", ["pay"])
    assert bank.undone == []


async def test_a_suspended_call_that_continues_undoes_nothing() -> None:
    from toolbox.runs import approve, reject

    @register_ai_service(tools=[Bank, Approved], compensate_on_failure=True, compensate_on_tool_errors=True)
    class Desk(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    for answer in (approve(), reject("no")):
        bank = Bank()
        models = {"default": ScriptedChatModel([CREDIT, tool_call("pay"), "done"])}
        async with Container(models=models).register(Desk).register_instance(bank) as container:
            result = await container.get(Desk).ask("q")
            assert result.run_id is not None
            ended = await container.runs.resume(result.run_id, {result.pending[0].id: answer})
        assert ended.content == "done"
        assert bank.undone == []


async def test_a_tool_that_fails_after_the_call_was_resumed_undoes_earlier_tools() -> None:
    from toolbox.runs import approve

    class Failing:
        @tool(requires_approval=True)
        async def pay(self) -> str:
            raise ValueError("no money")

    @register_ai_service(tools=[Bank, Failing], compensate_on_tool_errors=True)
    class Desk(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    bank = Bank()
    model = ScriptedChatModel([CREDIT, tool_call("pay"), "sorry"])
    async with Container(models={"default": model}).register(Desk).register_instance(bank) as container:
        result = await container.get(Desk).ask("q")
        assert result.run_id is not None
        await container.runs.resume(result.run_id, {result.pending[0].id: approve()})
    assert [each[0] for each in bank.undone] == ["credit"]
    assert results(model) == [rolled_back("credit", "pay"), ("no money", True)]


class Hiding(ToolInterceptor):
    """Answers for `credit`, and lets the model believe that `book` failed."""

    async def around_tool(self, call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
        if call.specification.name == "credit":
            return ToolExecutionResult("from a cache")
        result = await proceed(call)
        return ToolExecutionResult("refused", is_error=True) if call.specification.name == "book" else result


async def test_a_resumed_call_undoes_what_ran_and_not_what_the_model_read() -> None:
    from toolbox.runs import approve

    class Failing:
        @tool(requires_approval=True)
        async def pay(self) -> str:
            raise ValueError("no money")

    @register_ai_service(tools=[Bank, Failing], compensate_on_tool_errors=True)
    @interceptors(Hiding)
    class Desk(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    bank = Bank()
    model = ScriptedChatModel([AiMessage(None, [CREDIT, book("car")]), tool_call("pay"), "sorry"])
    async with Container(models={"default": model}).register(Desk, Hiding).register_instance(bank) as container:
        result = await container.get(Desk).ask("q")
        assert result.run_id is not None
        await container.runs.resume(result.run_id, {result.pending[0].id: approve()})
    assert bank.undone == [("car", 1)]
    assert results(model) == [("from a cache", False), rolled_back("book", "pay"), ("no money", True)]


def test_a_state_of_an_earlier_version_has_run_what_succeeded() -> None:
    def execution(is_error: bool) -> ToolExecution:
        return ToolExecution(CREDIT, "text", None, is_error, datetime.now(UTC), 0.0)

    executions = (execution(False), execution(True), execution(False))
    written = json.loads(State(None, (), (), executions=executions, failed=frozenset({2})).to_json())
    assert written.pop("ran") == []
    assert State.from_json(json.dumps(written)).ran == {0}


async def test_a_durable_run_that_another_process_continues_undoes_each_tool_once(tmp_path: Path) -> None:
    from toolbox.sql import SqlRunStore, open_engine

    @register_ai_service(tools=Bank, compensate_on_tool_errors=True, compensate_on_failure=True, durable=True)
    class Desk(Protocol):
        async def ask(self, text: str) -> str: ...

    asked = asyncio.Event()

    class Stuck(ScriptedChatModel):
        async def chat(self, request: Any) -> Any:
            if len(self.requests) == 2:
                asked.set()
                await asyncio.Event().wait()
            return await super().chat(request)

    bank = Bank()

    def container(model: Any, engine: Any) -> Container:
        settings = ToolboxSettings(stop_timeout=0.05)
        made = Container(models={"default": model}, settings=settings).register(Desk).register_instance(bank)
        return made.register_instance(SqlRunStore(engine), as_type=RunStore)

    url = f"sqlite+aiosqlite:///{tmp_path / 'runs.db'}"
    async with open_engine(url) as engine, container(Stuck([CREDIT, WITHDRAW]), engine) as first:
        run = await first.runs.start(first.get(Desk).ask, "q")
        await asyncio.wait_for(asked.wait(), 60)
        assert len(bank.undone) == 1
    model = ScriptedChatModel(["sorry"])
    async with open_engine(url) as engine, container(model, engine) as second:
        assert await second.runs.result(run, timeout=60) == "sorry"
    assert len(bank.undone) == 1
    assert results(model) == [rolled_back("credit"), ("bob has no money", True)]


async def test_a_durable_run_that_fails_with_an_error_about_another_run_undoes_its_tools() -> None:
    class Waiting(Bank):
        @tool
        async def resume(self) -> str:
            raise RunIncompatibleError("another run", "it has changed")

    class Ledger(InMemoryRunStore):
        persistent = True

    @register_ai_service(tools=Waiting, compensate_on_failure=True, durable=True)
    class Desk(Protocol):
        async def ask(self, text: str) -> str: ...

    bank = Waiting()
    container = Container(models={"default": ScriptedChatModel([CREDIT, tool_call("resume")])})
    async with container.register(Desk).register_instance(bank).register_instance(Ledger(), RunStore):
        with pytest.raises(RunIncompatibleError, match="another run"):
            await container.get(Desk).ask("q")
        assert [each[0] for each in bank.undone] == ["credit"]
        [run] = await container.runs.list(status="failed")
        assert run.method == "ask"


async def test_the_deadline_of_an_outer_call_undoes_the_tools_of_a_service_and_is_recorded(clock: Clock) -> None:
    waits = asyncio.Event()

    class Waiting(Bank):
        @tool
        async def wait_for_ever(self) -> str:
            waits.set()
            await asyncio.Event().wait()
            return ""

    class Ledger(InMemoryRunStore):
        persistent = True

    @register_ai_service(tools=Waiting, compensate_on_failure=True)
    class Payments(Protocol):
        @tool
        @user_message("{text}")
        async def pay(self, text: str) -> str: ...

    @register_ai_service(tools=Payments, durable=True, timeout=100)
    class Desk(Protocol):
        @user_message("{text}")
        async def ask(self, run: RunId, text: str) -> str: ...

    bank, store = Waiting(), Ledger()
    model = ScriptedChatModel([tool_call("pay", {"text": "q"}), CREDIT, tool_call("wait_for_ever")])
    container = Container(models={"default": model}).register(Desk, Payments)
    async with container.register_instance(bank).register_instance(store, RunStore):
        call = asyncio.create_task(container.get(Desk).ask("run", "q"))
        await waits.wait()
        clock.advance(101)
        with pytest.raises(InvocationTimeoutError, match="limit of 100 s"):
            await call
    assert [each[0] for each in bank.undone] == ["credit"]
    [failure] = [json.loads(each.data) for each in await store.records("run") if each.kind == "failed"]
    assert (failure["error"], failure["text"]) == (
        "TimeoutError",
        "Payments.pay: the time limit of an outer call is over",
    )


async def test_cancelling_a_durable_run_that_is_running_undoes_its_tools(tmp_path: Path) -> None:
    from toolbox.sql import SqlRunStore, open_engine

    asked, undone = asyncio.Event(), asyncio.Event()

    class Watched(Bank):
        @compensate_for("credit")
        async def uncredit(self, execution: ToolExecution) -> None:  # type: ignore[override]  # async, too
            undone.set()

    @register_ai_service(tools=Watched, compensate_on_failure=True, durable=True)
    class Desk(Protocol):
        async def ask(self, text: str) -> str: ...

    class Stuck(ScriptedChatModel):
        async def chat(self, request: Any) -> Any:
            if len(self.requests) == 1:
                asked.set()
                await asyncio.Event().wait()
            return await super().chat(request)

    async with open_engine(f"sqlite+aiosqlite:///{tmp_path / 'runs.db'}") as engine:
        container = Container(models={"default": Stuck([CREDIT])}).register(Desk).register_instance(Watched())
        container.register_instance(SqlRunStore(engine), as_type=RunStore)
        async with container:
            run = await container.runs.start(container.get(Desk).ask, "q")
            await asyncio.wait_for(asked.wait(), 60)
            await container.runs.cancel(run.id)
            await asyncio.wait_for(undone.wait(), 60)


async def test_undoing_a_cancelled_run_passes_no_layers_of_calls_that_have_not_ended() -> None:
    asked, passed, events = asyncio.Event(), [], Events()

    class Watched(ToolInterceptor):
        async def around_tool(self, call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
            passed.append((call.request.name, call.replayed))
            return await proceed(call)

    @tool
    async def wait() -> str:
        asked.set()
        await asyncio.Event().wait()
        return ""

    @tool
    async def look() -> str:
        return ""

    @register_ai_service(tools=[Bank, wait, look], compensate_on_failure=True)
    @interceptors(Watched)
    class Desk(Protocol):
        async def ask(self, text: str) -> str: ...

    model = ScriptedChatModel([AiMessage(None, [CREDIT, tool_call("wait"), tool_call("look")])])
    container = Container(models={"default": model}).register(Desk).register_instance(Bank())
    async with container.register_instance(events) as here:
        run = await here.runs.start(Desk.ask, "q")
        await asyncio.wait_for(asked.wait(), 60)
        await here.runs.cancel(run.id)

    assert passed == [("credit", False), ("wait", False), ("credit", True)]
    assert [each.request.name for each in events.of(ToolStartedEvent)] == ["credit", "wait"]
    assert len(events.of(CompensatedEvent)) == 1


async def test_a_run_that_waited_undoes_with_the_arguments_that_ran() -> None:
    store, events = InMemoryRunStore(), Events()
    async with trips(tool_call("book", {"seats": 2}), tool_call("sign", {}), store=store) as here:
        run_id = (await here.get(Trips).plan("x")).run_id or ""
    async with trips("failed", events=events, store=store) as there:
        result = await there.runs.resume(run_id, {"1": approve()})

        assert result.compensations == (Compensation("book", {"seats": 4}),)
        assert [(each.tool_name, each.arguments) for each in events.of(CompensatedEvent)] == [("book", {"seats": 4})]
        assert await there.runs.result(run_id) == result


# --- durable runs whose process dies


class Kept(InMemoryRunStore):
    """A store whose process dies before it writes the record `dies_on`."""

    persistent = True
    dies_on: str | None = None

    async def append(self, run_id: str, generation: int, records: Any, *args: Any) -> None:
        if any(each.key == self.dies_on for each in records):
            raise ConnectionError("the process died")
        await super().append(run_id, generation, records, *args)


class Refusing(ToolOutputGuardrail):
    def validate(self, request: ToolOutputGuardrailRequest) -> GuardrailResult:
        return self.failure("secret")


class Answering(RetryOnError):
    """An interceptor inside of the record of a run, which answers for the tool."""

    async def around_tool(self, call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
        return ToolExecutionResult("from a cache")


class Hotel:
    @tool
    @tool_output_guardrails(Refusing)
    def book(self, nights: int) -> str:
        return "booked"

    @compensate_for(book)
    def cancel(self, nights: int) -> None: ...

    @tool
    @interceptors(Answering)
    def look(self, nights: int) -> str:
        raise AssertionError

    @compensate_for(look)
    def look_away(self, nights: int) -> None: ...

    @tool(on_unknown_outcome="ask")
    def pay(self) -> str:
        raise ValueError("no money")


@register_ai_service(tools=Hotel, compensate_on_tool_errors=True, durable=True)
class Stay(Protocol):
    @user_message("{text}")
    async def plan(self, run: RunId, text: str) -> Result[str]: ...


def stays(store: RunStore, *replies: Any) -> Container:
    made = Container(models={"default": ScriptedChatModel(replies)}, take_over_runs=False)
    return made.register(Stay).register_instance(store, as_type=RunStore)


@pytest.mark.parametrize("dies_on", [None, "#r1", "#r2"])
@pytest.mark.parametrize(
    ("name", "undone", "text"),
    [
        ("book", (Compensation("book", {"nights": 2}),), "Output validation failed: secret"),
        ("look", (), "from a cache"),
    ],
)
async def test_a_continued_run_undoes_what_ran_whatever_the_model_read(
    dies_on: str | None, name: str, undone: tuple[Compensation, ...], text: str
) -> None:
    store = Kept()
    store.dies_on = dies_on
    replies = [tool_call(name, {"nights": 2}), tool_call("pay"), "failed"]
    async with stays(store, *replies) as here:
        if dies_on is None:
            result = await here.get(Stay).plan("run", "x")
        else:
            with pytest.raises(RunStoreError, match="the process died"):
                await here.get(Stay).plan("run", "x")
            store.dies_on = None
            async with stays(store, *replies[int(dies_on.removeprefix("#r")) :]) as there:
                result = await there.runs.resume("run", {})
    assert result.compensations == undone
    assert result.tool_executions[0].result == text


async def test_a_call_that_a_person_declared_failed_is_so_for_every_process() -> None:
    store = Kept()
    store.dies_on = "1"
    async with stays(store, tool_call("book", {"nights": 2}), tool_call("pay")) as here:
        with pytest.raises(RunStoreError, match="the process died"):
            await here.get(Stay).plan("run", "x")
    store.dies_on = "#r2"
    async with stays(store, "lost") as here:
        assert [each.kind for each in (await here.runs.resume("run", {})).pending] == ["unknown_outcome"]
        with pytest.raises(RunStoreError, match="the process died"):
            await here.runs.resume("run", {"1": fail("no money")})
    store.dies_on = None
    async with stays(store, "failed") as here:
        result = await here.runs.resume("run", {})
    assert result.compensations == (Compensation("book", {"nights": 2}),)


class DiesBeforeItFails(InMemoryRunStore):
    """A store whose first process dies before it writes that the run has failed."""

    persistent = True

    def __init__(self) -> None:
        super().__init__()
        self.has_booked, self.is_dead = asyncio.Event(), False

    async def append(self, run_id: str, generation: int, records: Any, *args: Any) -> None:
        if generation == 1 and (self.is_dead or not records or records[0].kind == "failed"):
            self.is_dead = True
            raise ConnectionError("the process died")
        await super().append(run_id, generation, records, *args)
        if any(each.key == "1" for each in records):
            self.has_booked.set()

    async def release(self, run_id: str, generation: int) -> None:
        if not self.is_dead:
            await super().release(run_id, generation)


@register_ai_service
class Inside(Protocol):
    @tool
    async def inside(self, text: str) -> str:
        """Ask inside."""
        ...


@register_ai_service(
    tools=[Inside, Bank],
    durable=True,
    concurrent_tools=True,
    compensate_on_failure=True,
    limits=UsageLimits(total_tokens=15),
)
class Limited(Protocol):
    async def ask(self, run: RunId, text: str) -> str: ...


async def test_a_recorded_tool_is_undone_although_another_call_ends_the_run_at_once() -> None:
    store, bank = DiesBeforeItFails(), Bank()

    async def answer(_: ChatRequest) -> ChatResponse:
        await store.has_booked.wait()
        return ChatResponse(AiMessage("long"), TokenUsage(10, 10))

    calls = AiMessage(None, (tool_call("inside", {"text": "x"}), tool_call("book", {"what": "room"})))
    model = ScriptedChatModel({Limited: [ChatResponse(calls, TokenUsage(1, 1))], Inside: [answer]})

    def container() -> Container:
        made = Container(models={"default": model}, take_over_runs=False).register(Limited)
        return made.register_instance(bank).register_instance(store, RunStore)

    async with container() as first:
        with pytest.raises(RunStoreError):
            await first.get(Limited).ask("r", "q")
    assert bank.undone == []
    skip([store.clock], timedelta(seconds=store.lease))

    async with container() as second:  # the first call only reads records, and reaches the limit again
        with pytest.raises(UsageLimitExceededError):
            await second.get(Limited).ask("r", "q")
    assert bank.undone == [("room", 1)]


async def test_a_run_that_fails_after_a_crash_while_it_undid_its_tools_leaves_its_whole_turn() -> None:
    @register_ai_service(tools=Bank, compensate_on_failure=True, durable=True)
    class Teller(Protocol):
        async def chat(self, room: MemoryId[str], run: RunId, text: str) -> str: ...

    def program(*replies: Any) -> Container:
        made = Container(models={"default": ScriptedChatModel(replies)}, take_over_runs=False).register(Teller)
        made.register_instance(conversations, as_type=ChatMemoryStore).register_instance(store, as_type=RunStore)
        return made.register_instance(bank)

    store, conversations, bank = Kept(), InMemoryChatMemoryStore(), Bank()
    store.dies_on = "0.0"  # the result of the compensation
    async with program(CREDIT, OSError("away")) as here:
        with pytest.raises(RunStoreError, match="the process died"):
            await here.get(Teller).chat("r", "run", "pay")
    store.dies_on = None
    async with program() as there:
        with pytest.raises(Exception, match="away"):
            await there.runs.resume("run", {})
        kept = await there.conversations.of(Teller, "r").history()

    assert [(each.state, type(each.message).__name__) for each in kept] == [
        ("failed", "UserMessage"),
        ("failed", "AiMessage"),
        ("failed", "ToolExecutionResultMessage"),
    ]
    assert "rolled back" in str(kept[-1].message)
