"""Call scopes of tools: begin, end, errors, late threads and nested services."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any, Protocol

import pytest

from tests.conftest import Clock
from toolbox import (
    AiMessage,
    Container,
    Inject,
    Result,
    ScopeNotActiveError,
    ToolAbort,
    ToolRetry,
    call_scoped,
    produces,
    register_ai_service,
    tool,
)
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


class Log:
    def __init__(self) -> None:
        self.said: list[str] = []


@call_scoped
class Transaction:
    def __init__(self, log: Log) -> None:
        self.log = log
        self.thread = threading.current_thread()
        log.said.append("begin")

    def stop(self) -> None:
        self.log.said.append("end")


class Repository:
    def __init__(self, transaction: Transaction, log: Log) -> None:
        self.transaction, self.log = transaction, log

    @tool
    def save(self, same: Inject[Transaction]) -> str:
        assert same is self.transaction
        assert self.transaction.thread is threading.current_thread()
        self.log.said.append("save")
        return "saved"

    @tool
    async def later(self, same: Inject[Transaction]) -> str:
        assert same is self.transaction
        self.log.said.append("later")
        return "saved"

    @tool
    def fail(self, same: Inject[Transaction]) -> str:
        raise ValueError("broken")


@register_ai_service(tools=(Repository,))
class Keeper(Protocol):
    async def chat(self, text: str) -> Result[str]: ...

    def wait(self, text: str) -> Result[str]: ...


async def test_call_scopes_end_before_the_result_is_sent_to_the_model() -> None:
    log = Log()

    def reply(request: Any) -> str:
        log.said.append("model")
        return "done"

    model = ScriptedChatModel([AiMessage(None, [tool_call("save"), tool_call("later")]), reply])
    container = Container(models={"default": model}).register(Keeper, Transaction).register_instance(log)
    async with container:
        await container.get(Keeper).chat("x")
    assert log.said == ["begin", "save", "end", "begin", "later", "end", "model"]


def test_tools_of_synchronous_methods_have_call_scopes() -> None:
    log = Log()
    model = ScriptedChatModel([AiMessage(None, [tool_call("save"), tool_call("later")]), "done"])
    container = Container(models={"default": model}).register(Keeper, Transaction).register_instance(log)
    with container:
        result = container.get(Keeper).wait("x")
    assert not any(each.is_error for each in result.tool_executions)
    assert log.said == ["begin", "save", "end", "begin", "later", "end"]


class Connection:
    pass


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_tool_exceptions_are_thrown_into_producers_of_the_call_scope(asynchronous: bool) -> None:
    thrown: list[BaseException | None] = []

    @produces(scope="call")
    def connection() -> Iterator[Connection]:
        try:
            yield Connection()
        except BaseException as error:
            thrown.append(error)
            raise
        thrown.append(None)

    @produces(scope="call")
    async def async_connection() -> AsyncIterator[Connection]:
        try:
            yield Connection()
        except BaseException as error:
            thrown.append(error)
            raise
        thrown.append(None)

    class Tools:
        @tool
        def fine(self, connection: Inject[Connection]) -> str:
            return "fine"

        @tool
        def fail(self, connection: Inject[Connection]) -> str:
            raise ValueError("broken")

        @tool
        async def fail_later(self, connection: Inject[Connection]) -> str:
            raise ValueError("broken later")

        @tool
        def retry(self, connection: Inject[Connection]) -> str:
            raise ToolRetry("again")

        @tool
        def abort(self, connection: Inject[Connection]) -> str:
            raise ToolAbort("stop")

    @register_ai_service(tools=(Tools,))
    class Service(Protocol):
        async def chat(self, text: str) -> Result[str]: ...

    names = ["fine", "fail", "fail_later", "retry", "abort"]
    model = ScriptedChatModel([AiMessage(None, [tool_call(name) for name in names])])
    producer = async_connection if asynchronous else connection
    async with Container(models={"default": model}).register(Service, producer) as container:
        with pytest.raises(ToolAbort):
            await container.get(Service).chat("x")
    assert [type(each) for each in thrown] == [type(None), ValueError, ValueError, ToolRetry, ToolAbort]


async def test_errors_while_closing_a_call_scope_are_tool_failures() -> None:
    @produces(scope="call")
    def connection() -> Iterator[Connection]:
        yield Connection()
        raise OSError("commit failed")

    class Tools:
        @tool
        def save(self, connection: Inject[Connection]) -> str:
            return "saved"

        @tool
        async def save_later(self, connection: Inject[Connection]) -> str:
            return "saved"

    @register_ai_service(tools=(Tools,))
    class Service(Protocol):
        async def chat(self, text: str) -> Result[str]: ...

    model = ScriptedChatModel([AiMessage(None, [tool_call("save"), tool_call("save_later")]), "done"])
    async with Container(models={"default": model}).register(Service, connection) as container:
        result = await container.get(Service).chat("x")
    assert [each.is_error for each in result.tool_executions] == [True, True]
    assert [each.result for each in result.tool_executions] == ["commit failed"] * 2


async def test_late_threads_close_their_call_scope_when_they_end(clock: Clock) -> None:
    log = Log()
    release = threading.Event()
    loop = asyncio.get_running_loop()

    class Tools:
        @tool(timeout=100)
        def slow(self, transaction: Inject[Transaction]) -> str:
            clock.advance(101, loop)
            release.wait()
            log.said.append("leaves")
            return "late"

    @register_ai_service(tools=(Tools,))
    class Service(Protocol):
        async def chat(self, text: str) -> Result[str]: ...

    model = ScriptedChatModel([tool_call("slow"), "done"])
    container = Container(models={"default": model}).register(Service, Transaction).register_instance(log)
    async with container:
        result = await container.get(Service).chat("x")
        assert result.content == "done"
        assert log.said == ["begin"]
        release.set()
    assert log.said == ["begin", "leaves", "end"]


async def test_tools_of_inner_services_have_their_own_call_scopes() -> None:
    log = Log()

    @register_ai_service(tools=(Repository,))
    class Inner(Protocol):
        @tool
        async def ask(self, question: str) -> str: ...

    @register_ai_service(tools=(Inner,))
    class Outer(Protocol):
        async def chat(self, text: str) -> str: ...

    model = ScriptedChatModel([tool_call("ask", {"question": "q"}), tool_call("save"), "inner", "outer"])
    container = Container(models={"default": model}).register(Outer, Transaction).register_instance(log)
    async with container:
        await container.get(Outer).chat("x")
    assert log.said == ["begin", "save", "end"]


async def test_call_scoped_beans_are_unavailable_outside_of_a_call() -> None:
    container = Container(models={"default": ScriptedChatModel([])}).register(Transaction)
    async with container.register_instance(Log()):
        with pytest.raises(ScopeNotActiveError):
            container.get(Transaction)
