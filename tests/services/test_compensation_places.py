"""Where compensations are found, and where they run: thread, call scope and transaction."""

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, Protocol

import pytest

from tests.services.bank import CREDIT, WITHDRAW, Bank, Session, assistant, book
from toolbox import (
    AiMessage,
    Container,
    Inject,
    InvocationContext,
    ToolExecution,
    ToolProviderResult,
    compensate_for,
    produces,
    register_ai_service,
    run_on,
    tool,
    tool_specifications_from,
)
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


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
