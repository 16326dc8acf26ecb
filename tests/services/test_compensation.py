"""`@compensate_for`: tools that succeeded are undone when another tool or the whole call fails."""

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar, Protocol

import pytest

from tests.conftest import Clock
from toolbox import (
    AiMessage,
    CompensatedEvent,
    Compensation,
    Container,
    EventListener,
    IllegalConfigurationError,
    Inject,
    InvocationContext,
    InvocationEvent,
    MemoryId,
    Result,
    TokenStream,
    ToolAbort,
    ToolboxSettings,
    ToolExecuted,
    ToolExecution,
    ToolExecutionResult,
    ToolExecutionResultMessage,
    ToolProviderResult,
    ToolRetry,
    ToolRoundsExceededError,
    application_scoped,
    call_scoped,
    compensate_for,
    create_ai_service,
    hide_details,
    produces,
    register_ai_service,
    return_to_model,
    run_on,
    tool,
    tool_specifications_from,
)
from toolbox.interceptors import ToolInterceptor, ToolInvocation, ToolProceed, interceptors
from toolbox.runs import InMemoryRunStore, RunStore, approve
from toolbox.services.state import State
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


class Bank:
    def __init__(self) -> None:
        self.accounts: dict[str, Decimal] = {}
        self.undone: list[Any] = []

    @tool
    def credit(self, name: str, euros: Decimal, note: str = "none") -> str:
        self.accounts[name] = self.accounts.get(name, Decimal()) + euros
        return f"TX-{name}"

    @compensate_for(credit)
    def uncredit(self, execution: ToolExecution) -> None:
        self.undone.append((execution.request.name, execution.request.arguments, execution.result))
        name = execution.result.removeprefix("TX-")
        self.accounts[name] = Decimal()

    @tool
    async def book(self, what: str, nights: int = 1) -> str:
        if what == "full":
            raise ValueError("no room")
        return f"booked {what}"

    @compensate_for("book")
    async def _cancel(self, what: str, nights: int) -> None:
        self.undone.append((what, nights))
        if what == "stuck":
            raise RuntimeError("cannot cancel")

    @tool
    def withdraw(self, name: str) -> str:
        raise ValueError(f"{name} has no money")

    @tool
    def again(self) -> str:
        raise ToolRetry("try again")


class Assistant(Protocol):
    async def ask(self, text: str) -> Result[str]: ...

    async def chat(self, room: MemoryId[str], text: str) -> str: ...

    def events(self, text: str) -> TokenStream: ...

    def wait(self, text: str) -> str: ...


CREDIT = tool_call("credit", {"name": "ada", "euros": "10.50"})
WITHDRAW = tool_call("withdraw", {"name": "bob"})


def book(what: str, **more: Any) -> Any:
    return tool_call("book", {"what": what, **more})


def assistant(*replies: Any, **options: Any) -> tuple[Any, ScriptedChatModel, Bank]:
    model, bank = ScriptedChatModel(replies), Bank()
    options = {"tools": [bank], "compensate_on_tool_errors": True, **options}
    return create_ai_service(Assistant, chat_model=model, **options), model, bank


def results(model: ScriptedChatModel) -> list[tuple[str, bool]]:
    found = (each for each in model.requests[-1].messages if isinstance(each, ToolExecutionResultMessage))
    return [(each.text, each.is_error) for each in found]


def rolled_back(name: str, by: str = "withdraw") -> tuple[str, bool]:
    return f"Tool '{name}' was executed successfully but was rolled back due to failure of tool '{by}'", True


# --- a failed tool


async def test_a_failed_tool_undoes_the_tools_of_earlier_rounds() -> None:
    service, model, bank = assistant(CREDIT, WITHDRAW, "sorry")
    result = await service.ask("q")

    assert bank.accounts == {"ada": 0}
    assert bank.undone == [("credit", CREDIT.arguments, "TX-ada")]
    assert result.content == "sorry"
    assert results(model) == [rolled_back("credit"), ("bob has no money", True)]
    assert [each.result for each in result.tool_executions] == ["TX-ada", "bob has no money"]


async def test_nothing_is_undone_without_the_options() -> None:
    service, model, bank = assistant(CREDIT, WITHDRAW, "sorry", compensate_on_tool_errors=False)
    await service.ask("q")
    assert bank.undone == []
    assert results(model)[0] == ("TX-ada", False)


@pytest.mark.parametrize(
    ("calls", "undone"),
    [
        (("full", "hotel", "car"), ["car", "hotel"]),
        (("flight", "full", "car"), ["car", "flight"]),
        (("flight", "hotel", "full"), ["hotel", "flight"]),
    ],
)
@pytest.mark.parametrize("together", [False, True])
async def test_all_tools_of_the_round_run_and_are_undone_in_reverse_order(
    calls: tuple[str, ...], undone: list[str], together: bool
) -> None:
    reply = AiMessage(None, [book(each) for each in calls])
    service, model, bank = assistant(reply, "sorry", concurrent_tools=together)
    await service.ask("q")
    assert [each[0] for each in bank.undone] == undone
    texts = results(model)
    assert [text == rolled_back("book", "book") for text in texts] == [each != "full" for each in calls]


async def test_each_success_is_undone_once_when_the_model_tries_again() -> None:
    service, model, bank = assistant(CREDIT, WITHDRAW, CREDIT, WITHDRAW, "sorry")
    await service.ask("q")
    assert len(bank.undone) == 2
    assert results(model) == [
        rolled_back("credit"),
        ("bob has no money", True),
        rolled_back("credit"),
        ("bob has no money", True),
    ]


async def test_successes_after_a_compensation_stay() -> None:
    service, model, bank = assistant(WITHDRAW, CREDIT, "done")
    await service.ask("q")
    assert bank.undone == []
    assert results(model)[1] == ("TX-ada", False)


async def test_the_first_failed_call_of_the_reply_gives_the_name() -> None:
    service, model, _ = assistant(AiMessage(None, [CREDIT, book("full"), WITHDRAW]), "sorry", concurrent_tools=True)
    await service.ask("q")
    assert results(model)[0] == rolled_back("credit", "book")


async def test_the_conversation_remembers_what_was_rolled_back() -> None:
    service, model, _ = assistant(CREDIT, WITHDRAW, "sorry", "later")
    await service.chat("room", "a")
    await service.chat("room", "b")
    assert results(model) == [rolled_back("credit"), ("bob has no money", True)]


async def test_a_compensation_can_take_the_tools_own_parameters_with_defaults() -> None:
    service, _, bank = assistant(AiMessage(None, [book("hotel"), book("car", nights="3"), WITHDRAW]), "sorry")
    await service.ask("q")
    assert bank.undone == [("car", 3), ("hotel", 1)]


async def test_a_failing_compensation_is_logged_and_the_others_still_run(caplog: pytest.LogCaptureFixture) -> None:
    service, model, bank = assistant(AiMessage(None, [CREDIT, book("stuck"), book("car"), WITHDRAW]), "sorry")
    with caplog.at_level(logging.ERROR):
        assert (await service.ask("q")).content == "sorry"
    assert [each[0] for each in bank.undone] == ["car", "stuck", "credit"]
    [record] = [each for each in caplog.records if "failed to undo" in each.message]
    assert record.getMessage() == "Bank._cancel failed to undo tool 'book': cannot cancel"
    assert record.exc_info is not None
    texts = results(model)
    assert texts[0] == rolled_back("credit")
    assert texts[1] == (
        "Tool 'book' was executed successfully; undoing it after the failure of tool 'withdraw' failed",
        True,
    )


@pytest.mark.parametrize(
    "call",
    [tool_call("again"), tool_call("credit", {"name": 1}), tool_call("unknown")],
    ids=["retry", "arguments", "unknown"],
)
async def test_retries_bad_arguments_and_unknown_tools_undo_nothing(call: Any) -> None:
    service, _, bank = assistant(
        CREDIT, call, "x", on_unknown_tool=return_to_model, on_tool_arguments_error=return_to_model
    )
    await service.ask("q")
    assert bank.undone == []


async def test_an_error_that_a_handler_answers_still_counts_as_a_failure() -> None:
    service, _, bank = assistant(CREDIT, WITHDRAW, "x", on_tool_execution_error=hide_details)
    await service.ask("q")
    assert len(bank.undone) == 1


async def test_streams_and_synchronous_methods_undo_too() -> None:
    service, model, bank = assistant(CREDIT, WITHDRAW, "sorry")
    assert [type(each).__name__ async for each in service.events("q")][-1] == "CompleteResponse"
    assert len(bank.undone) == 1
    assert results(model)[0] == rolled_back("credit")

    service, model, bank = assistant(CREDIT, book("full"), "sorry")
    assert await asyncio.to_thread(service.wait, "q") == "sorry"
    assert len(bank.undone) == 1


# --- where it runs


async def test_a_compensation_runs_where_the_tool_ran() -> None:
    pool = ThreadPoolExecutor(1, thread_name_prefix="bookkeeping")
    threads: list[str] = []

    class Books:
        @tool
        @run_on(pool)
        def enter(self) -> str:
            threads.append(threading.current_thread().name)
            return "ok"

        @compensate_for(enter)
        def remove(self) -> None:
            threads.append(threading.current_thread().name)

        @tool
        async def ok(self) -> str:
            return "ok"

        @compensate_for(ok)
        async def not_ok(self) -> None:
            threads.append(threading.current_thread().name)

    service, _, _ = assistant(
        AiMessage(None, [tool_call("ok"), tool_call("enter"), WITHDRAW]), "x", tools=[Books(), Bank()]
    )
    await service.ask("q")
    pool.shutdown()
    assert threads == ["bookkeeping_0", "bookkeeping_0", threading.current_thread().name]


async def test_a_synchronous_service_undoes_on_the_thread_of_its_caller() -> None:
    threads: list[threading.Thread] = []

    class Books:
        @tool
        def enter(self) -> str:
            return "ok"

        @compensate_for(enter)
        def remove(self) -> None:
            threads.append(threading.current_thread())

    service, _, _ = assistant(tool_call("enter"), WITHDRAW, "x", tools=[Books(), Bank()])
    caller = threading.Thread(target=service.wait, args=("q",))
    caller.start()
    await asyncio.to_thread(caller.join, 60)
    assert threads == [caller]


@call_scoped
class Session:
    def __init__(self) -> None:
        self.rows: list[str] = []


class Ledger:
    seen: ClassVar[list[Any]] = []

    @tool
    async def add(self, row: str, session: Inject[Session]) -> str:
        self.seen.append(session)
        return "added"

    @compensate_for(add)
    async def remove(self, execution: ToolExecution, session: Inject[Session], context: InvocationContext) -> None:
        self.seen.append((session, context.request, InvocationContext.current() is context))

    @tool
    async def fail(self) -> str:
        raise ValueError("x")


async def test_a_compensation_has_its_own_call_scope_and_hidden_parameters() -> None:
    @register_ai_service(tools=Ledger, compensate_on_tool_errors=True)
    class Desk(Protocol):
        async def ask(self, text: str) -> str: ...

    Ledger.seen.clear()
    call = tool_call("add", {"row": "a"})
    models = {"default": ScriptedChatModel([call, tool_call("fail"), "x"])}
    async with Container(models=models).register(Desk, Session) as container:
        await container.get(Desk).ask("q")
    first, (second, request, is_current) = Ledger.seen
    assert isinstance(second, Session)
    assert second is not first
    assert request == call
    assert is_current


async def test_a_transaction_of_a_compensation_commits_by_itself() -> None:
    closed: list[str] = []

    class Transaction: ...

    @produces(scope="call")
    async def transaction() -> AsyncIterator[Transaction]:
        try:
            yield Transaction()
        except BaseException:
            closed.append("rolled back")
            raise
        closed.append("committed")

    class Store:
        @tool
        async def add(self, it: Inject[Transaction]) -> str:
            return "ok"

        @compensate_for(add)
        async def remove(self, it: Inject[Transaction]) -> None: ...

        @tool
        async def fail(self, it: Inject[Transaction]) -> str:
            raise ValueError("x")

    @register_ai_service(tools=Store, compensate_on_tool_errors=True)
    class Desk(Protocol):
        async def ask(self, text: str) -> str: ...

    models = {"default": ScriptedChatModel([tool_call("add"), tool_call("fail"), "x"])}
    async with Container(models=models).register(Desk, transaction) as container:
        await container.get(Desk).ask("q")
    assert closed == ["committed", "rolled back", "committed"]


# --- where it is found


async def test_compensations_are_inherited_and_can_be_overridden() -> None:
    class Child(Bank):
        def uncredit(self, execution: ToolExecution) -> None:
            self.undone.append("child")

    bank = Child()
    service, _, _ = assistant(AiMessage(None, [book("car"), CREDIT, WITHDRAW]), "x", tools=[bank])
    await service.ask("q")
    assert bank.undone == ["child", ("car", 1)]


async def test_static_and_class_methods_and_functions_can_compensate() -> None:
    undone: list[str] = []

    class Static:
        @tool
        @staticmethod
        def one() -> str:
            return "1"

        @compensate_for(one)
        @staticmethod
        def not_one(execution: ToolExecution) -> None:
            undone.append(execution.request.name)

        @tool
        @classmethod
        def two(cls) -> str:
            return "2"

        @classmethod
        @compensate_for("two")
        def not_two(cls) -> None:
            undone.append(cls.__name__)

    @tool
    def three() -> str:
        return "3"

    @compensate_for(three)
    def not_three() -> None:
        undone.append("three")

    calls = AiMessage(None, [tool_call("one"), tool_call("two"), tool_call("three"), WITHDRAW])
    service, model, _ = assistant(calls, "x", tools=[Static(), three, not_three, Bank()])
    await service.ask("q")
    assert undone == ["three", "Static", "one"]
    assert "not_three" not in [each.name for each in model.requests[0].tool_specifications]


async def test_tools_of_a_provider_are_undone() -> None:
    bank = Bank()
    service, _, _ = assistant(CREDIT, WITHDRAW, "x", tools=(), tool_provider=lambda request: ToolProviderResult([bank]))
    await service.ask("q")
    assert len(bank.undone) == 1


def test_a_compensation_is_never_offered_to_a_model() -> None:
    class Marked:
        @tool
        def one(self) -> str:
            return "1"

        @tool
        @compensate_for("one")
        def not_one(self) -> None: ...

    assert [each.name for each in tool_specifications_from(Marked)] == ["one"]


# --- problems at start


def problems_of(cls: Any, **options: Any) -> list[str]:
    try:
        assistant(tools=[cls()], **options)
    except IllegalConfigurationError as error:
        return [f"{each.where}: {each.what}" for each in error.problems]
    return []


class Base:
    @tool
    def credit(self, name: str, euros: int) -> str:
        return ""


def wrong_type() -> type[Base]:
    class Wrong(Base):
        @compensate_for("credit")
        def uncredit(self, name: str, euros: str) -> None: ...

    return Wrong


def fewer_parameters() -> type[Base]:
    class Wrong(Base):
        @compensate_for("credit")
        def uncredit(self, name: str) -> None: ...

    return Wrong


def more_than_the_execution() -> type[Base]:
    class Wrong(Base):
        @compensate_for(Base.credit)
        def uncredit(self, execution: ToolExecution, name: str) -> None: ...

    return Wrong


@pytest.mark.parametrize("make", [wrong_type, fewer_parameters, more_than_the_execution])
def test_a_signature_that_fits_neither_form_is_a_problem(make: Callable[[], type[Base]]) -> None:
    expected = ['Wrong.uncredit: @compensate_for("credit") has other parameters than the tool'] * 4
    assert problems_of(make())[:1] == expected[:1]
    assert problems_of(make(), compensate_on_tool_errors=False, compensate_on_failure=True)[:1] == expected[:1]
    assert problems_of(make(), compensate_on_tool_errors=False) == []
    with pytest.raises(IllegalConfigurationError, match="the same parameter types as the tool"):
        assistant(tools=[make()()])


def test_two_compensations_of_one_tool_are_a_problem() -> None:
    class Wrong(Base):
        @compensate_for("credit")
        def first(self, execution: ToolExecution) -> None: ...

        @compensate_for("credit")
        def second(self, execution: ToolExecution) -> None: ...

    expected = "Wrong.second: the tool 'credit' has two compensations: Wrong.first and Wrong.second"
    assert expected in problems_of(Wrong)


def test_an_unknown_tool_is_a_problem() -> None:
    class Wrong(Base):
        @compensate_for("debit")
        def first(self, execution: ToolExecution) -> None: ...

    assert "Wrong.first: @compensate_for names an unknown tool: 'debit'" in problems_of(Wrong)
    with pytest.raises(TypeError, match="expected a tool or its name, got 3"):
        compensate_for(3)  # type: ignore[arg-type]  # the mistake


def test_missing_beans_of_a_compensation_are_problems() -> None:
    class Needs(Base):
        @compensate_for("credit")
        def uncredit(self, execution: ToolExecution, session: Inject[Session]) -> None: ...

    @register_ai_service(tools=Needs, compensate_on_failure=True)
    class Desk(Protocol):
        async def ask(self, text: str) -> str: ...

    found = Container(models={"default": ScriptedChatModel([])}).register(Desk).check()
    assert any("Session" in each.what for each in found)
    assert any("session needs a container" in each for each in problems_of(Needs))


def test_the_options_must_be_booleans() -> None:
    with pytest.raises(IllegalConfigurationError, match="invalid compensate_on_failure='yes'; use True or False"):
        assistant(compensate_on_failure="yes")


# --- the whole call fails

ON_FAILURE = {"compensate_on_tool_errors": False, "compensate_on_failure": True}


async def test_an_error_of_the_model_undoes_everything_in_reverse_order() -> None:
    service, _, bank = assistant(CREDIT, book("car"), ConnectionError("down"), **ON_FAILURE)
    with pytest.raises(ConnectionError):
        await service.ask("q")
    assert [each[0] for each in bank.undone] == ["car", "credit"]


async def test_a_failed_tool_alone_undoes_nothing_when_the_call_succeeds() -> None:
    service, model, bank = assistant(CREDIT, WITHDRAW, "sorry", **ON_FAILURE)
    await service.ask("q")
    assert bank.undone == []
    assert results(model)[0] == ("TX-ada", False)


async def test_a_limit_undoes_everything() -> None:
    service, _, bank = assistant(CREDIT, CREDIT, max_tool_rounds=1, **ON_FAILURE)
    with pytest.raises(ToolRoundsExceededError):
        await service.ask("q")
    assert len(bank.undone) == 1


async def test_an_abort_undoes_the_finished_tools_of_the_same_round() -> None:
    class Stop:
        @tool
        async def stop(self) -> str:
            raise ToolAbort("stop")

    for together in (False, True):
        bank = Bank()
        calls = AiMessage(None, [CREDIT, tool_call("stop")])
        service, _, _ = assistant(calls, tools=[bank, Stop()], concurrent_tools=together, **ON_FAILURE)
        with pytest.raises(ToolAbort):
            await service.ask("q")
        assert len(bank.undone) <= 1
        if not together:
            assert len(bank.undone) == 1


async def test_both_options_undo_each_success_once() -> None:
    service, _, bank = assistant(CREDIT, WITHDRAW, ConnectionError("down"), compensate_on_failure=True)
    with pytest.raises(ConnectionError):
        await service.ask("q")
    assert len(bank.undone) == 1


# --- services as tools


@register_ai_service(tools=Bank, compensate_on_failure=True)
class Clerk(Protocol):
    @tool
    async def transfer(self, text: str) -> str: ...


async def office(*replies: Any) -> tuple[object, list[Any], list[str]]:
    """Call a service with the clerk as a tool. Returns its answer or error, what the bank undid, undone transfers."""
    bank, undone = Bank(), []

    @compensate_for("transfer")
    def take_back(execution: ToolExecution) -> None:
        undone.append(execution.result)

    @register_ai_service(tools=[Clerk, take_back], compensate_on_failure=True)
    class Office(Protocol):
        async def ask(self, text: str) -> str: ...

    container = Container(models={"default": ScriptedChatModel(replies)}).register(Office, Clerk)
    async with container.register_instance(bank):
        try:
            answer: object = await container.get(Office).ask("q")
        except ConnectionError as error:
            answer = error
    return answer, bank.undone, undone


TRANSFER = tool_call("transfer", {"text": "10 to ada"})


async def test_a_service_that_fails_as_a_tool_undoes_its_tools_although_the_caller_goes_on() -> None:
    answer, bank, undone = await office(TRANSFER, CREDIT, ConnectionError("down"), "try tomorrow")
    assert (answer, [each[0] for each in bank], undone) == ("try tomorrow", ["credit"], [])


async def test_a_service_whose_model_answers_after_a_failed_tool_undoes_nothing() -> None:
    answer, bank, undone = await office(TRANSFER, CREDIT, WITHDRAW, "half of it worked", "done")
    assert (answer, bank, undone) == ("done", [], [])


async def test_a_call_of_a_service_that_succeeded_is_undone_by_its_own_compensation() -> None:
    answer, bank, undone = await office(TRANSFER, CREDIT, "transferred", ConnectionError("down"))
    assert isinstance(answer, ConnectionError)
    assert (bank, undone) == ([], ["transferred"])


class Waiting:
    def __init__(self) -> None:
        self.started = asyncio.Event()

    @tool
    async def wait_for_ever(self) -> str:
        self.started.set()
        await asyncio.Event().wait()
        return ""


async def test_cancelling_the_caller_undoes_everything() -> None:
    bank, waiting = Bank(), Waiting()
    service, _, _ = assistant(CREDIT, tool_call("wait_for_ever"), tools=[bank, waiting], **ON_FAILURE)
    task = asyncio.create_task(service.ask("q"))
    await waiting.started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(bank.undone) == 1


async def test_a_deadline_undoes_everything(clock: Clock) -> None:
    bank, waiting = Bank(), Waiting()
    service, _, _ = assistant(CREDIT, tool_call("wait_for_ever"), tools=[bank, waiting], timeout=100, **ON_FAILURE)
    task = asyncio.create_task(service.ask("q"))
    await waiting.started.wait()
    clock.advance(101)
    with pytest.raises(TimeoutError):
        await task
    assert len(bank.undone) == 1


async def test_leaving_a_stream_undoes_everything() -> None:
    service, _, bank = assistant(CREDIT, "x", **ON_FAILURE)
    stream = service.events("q")
    async for event in stream:
        if isinstance(event, ToolExecuted):
            break
    await stream.aclose()
    assert len(bank.undone) == 1


async def test_a_stream_that_is_read_to_its_end_undoes_nothing() -> None:
    service, _, bank = assistant(CREDIT, "x", **ON_FAILURE)
    assert [type(each).__name__ async for each in service.events("q")][-1] == "CompleteResponse"
    assert bank.undone == []


async def test_a_failed_call_is_not_remembered() -> None:
    service, model, _ = assistant(CREDIT, ConnectionError("down"), "again", **ON_FAILURE)
    with pytest.raises(ConnectionError):
        await service.chat("room", "a")
    await service.chat("room", "b")
    assert len(model.requests[-1].messages) == 1


# --- the state


def test_failures_and_compensations_are_part_of_the_stored_state() -> None:
    from toolbox import UserMessage

    state = State(None, (), (UserMessage("q"),), failed=frozenset({1}), undone=frozenset({0}))
    assert State.from_json(state.to_json()) == state


# --- interceptors


class Skipping(ToolInterceptor):
    async def around_tool(self, call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
        if call.specification.name == "credit":
            return ToolExecutionResult("from a cache")
        return await proceed(call)


class Changing(ToolInterceptor):
    async def around_tool(self, call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
        if call.specification.name == "book":
            await proceed(call.with_arguments(what="bus"))
            return ToolExecutionResult("refused", is_error=True)
        return await proceed(call)


async def test_a_tool_that_an_interceptor_skipped_is_not_undone() -> None:
    service, model, bank = assistant(AiMessage(None, [CREDIT, WITHDRAW]), "x", interceptors=[Skipping])
    await service.ask("q")
    assert bank.undone == []
    assert results(model)[0] == ("from a cache", False)


async def test_a_tool_that_ran_with_other_arguments_is_undone_with_these() -> None:
    service, model, bank = assistant(AiMessage(None, [book("car"), WITHDRAW]), "x", interceptors=[Changing])
    await service.ask("q")
    assert bank.undone == [("bus", 1)]
    assert results(model)[0] == rolled_back("book")


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
        return made.register_instance(SqlRunStore(engine, lease=1.0), as_type=RunStore)

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
        container.register_instance(SqlRunStore(engine, lease=0.6), as_type=RunStore)
        async with container:
            run = await container.runs.start(container.get(Desk).ask, "q")
            await asyncio.wait_for(asked.wait(), 60)
            await container.runs.cancel(run.id)
            await asyncio.wait_for(undone.wait(), 60)


# --- what is said about compensations


class Seen(EventListener):
    def __init__(self) -> None:
        self.events: list[CompensatedEvent] = []

    def on_event(self, event: InvocationEvent) -> None:
        if isinstance(event, CompensatedEvent):
            self.events.append(event)


@application_scoped
class Doubles(ToolInterceptor):
    async def around_tool(self, invocation: ToolInvocation, proceed: ToolProceed) -> Any:
        return await proceed(invocation.with_arguments(seats=invocation.arguments["seats"] * 2))


class Hotel:
    @tool
    @interceptors(Doubles)
    def book(self, seats: int) -> str:
        return f"booked {seats}"

    @compensate_for(book)
    def unbook(self, seats: int) -> None:
        if seats > 10:
            raise ValueError("too late")

    @tool
    def pay(self) -> str:
        raise ValueError("no money")

    @tool(requires_approval=True)
    def sign(self) -> str:
        raise ValueError("no pen")


@register_ai_service(tools=Hotel, compensate_on_tool_errors=True)
class Trips(Protocol):
    async def plan(self, text: str) -> Result[str]: ...


def trips(*replies: Any, seen: Seen | None = None, store: RunStore | None = None) -> Container:
    made = Container(models={"default": ScriptedChatModel(replies)}, take_over_runs=False)
    made.register(Trips, Hotel, Doubles).register_instance(seen or Seen(), EventListener)
    return made.register_instance(store or InMemoryRunStore(), RunStore)


async def test_a_result_and_an_event_name_what_was_undone_with_the_arguments_that_ran() -> None:
    seen = Seen()
    calls = [tool_call("book", {"seats": 2}), tool_call("book", {"seats": 6}), tool_call("pay", {})]
    async with trips(AiMessage(None, calls), "failed", seen=seen) as here:
        result = await here.get(Trips).plan("x")

    assert result.compensations == (
        Compensation("book", {"seats": 12}, "too late"),
        Compensation("book", {"seats": 4}),
    )
    assert [(each.tool_name, each.arguments) for each in seen.events] == [
        ("book", {"seats": 12}),
        ("book", {"seats": 4}),
    ]
    assert [str(each.error) for each in seen.events] == ["too late", "None"]
    assert all(each.context.request is not None and each.context.request.name == "book" for each in seen.events)


async def test_a_call_without_compensations_says_so() -> None:
    async with trips(tool_call("book", {"seats": 2}), "booked") as here:
        assert (await here.get(Trips).plan("x")).compensations == ()


async def test_a_run_that_waited_undoes_with_the_arguments_that_ran() -> None:
    store, seen = InMemoryRunStore(), Seen()
    async with trips(tool_call("book", {"seats": 2}), tool_call("sign", {}), store=store) as here:
        run_id = (await here.get(Trips).plan("x")).run_id or ""
    async with trips("failed", seen=seen, store=store) as there:
        result = await there.runs.resume(run_id, {"1": approve()})

        assert result.compensations == (Compensation("book", {"seats": 4}),)
        assert [(each.tool_name, each.arguments) for each in seen.events] == [("book", {"seats": 4})]
        assert await there.runs.result(run_id) == result
