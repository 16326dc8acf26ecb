"""Tools of one reply that run at the same time: order of results, executors, limits and errors."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import pytest

from tests.services.rounds import Assistant, results
from toolbox import AiMessage, Container, Result, ToolboxSettings, create_ai_service, register_ai_service, tool
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


class Meeting:
    """Tools that end only if all of them run at the same time."""

    def __init__(self, parties: int) -> None:
        self.barrier = threading.Barrier(parties, timeout=60)
        self.met = asyncio.Event()
        self.waiting = 0
        self.parties = parties
        self.threads: list[threading.Thread] = []

    @tool
    def block(self, n: int) -> int:
        self.threads.append(threading.current_thread())
        self.barrier.wait()
        return n

    @tool
    async def wait(self, n: int) -> int:
        self.waiting += 1
        if self.waiting == self.parties:
            self.met.set()
        await asyncio.wait_for(self.met.wait(), 60)
        return n


@pytest.mark.parametrize("name", ["block", "wait"])
async def test_concurrent_tools_run_at_the_same_time_and_keep_the_order_of_results(name: str) -> None:
    meeting = Meeting(3)
    message = AiMessage(None, [tool_call(name, {"n": n}) for n in range(3)])
    model = ScriptedChatModel([message, "done"])
    service = create_ai_service(Assistant, chat_model=model, tools=(meeting,), concurrent_tools=True)
    result = await service.chat("x")

    assert results(model) == ["0", "1", "2"]
    assert [each.result_object for each in result.tool_executions] == [0, 1, 2]
    assert threading.current_thread() not in meeting.threads


async def test_concurrent_tools_can_run_on_a_given_executor() -> None:
    meeting = Meeting(2)
    message = AiMessage(None, [tool_call("block", {"n": n}) for n in range(2)])
    model = ScriptedChatModel([message, "done"])
    with ThreadPoolExecutor(2, thread_name_prefix="mine") as executor:
        service = create_ai_service(Assistant, chat_model=model, tools=(meeting,), concurrent_tools=executor)
        await service.chat("x")
        assert set(meeting.threads) == set(executor._threads)


async def test_max_concurrent_tools_limits_concurrency() -> None:
    running: list[int] = [0]
    most: list[int] = [0]

    @tool
    async def count(n: int) -> int:
        running[0] += 1
        most[0] = max(most[0], running[0])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        running[0] -= 1
        return n

    @register_ai_service(tools=(count,), concurrent_tools=True)
    class Together(Protocol):
        async def chat(self, text: str) -> str: ...

    message = AiMessage(None, [tool_call("count", {"n": n}) for n in range(7)])
    model = ScriptedChatModel([message, "done"])
    container = Container(models={"default": model}, settings=ToolboxSettings(max_concurrent_tools=2))
    async with container.register(Together):
        await container.get(Together).chat("x")
    assert most == [2]
    assert results(model) == [str(n) for n in range(7)]


async def test_errors_of_a_handler_cancel_the_other_concurrent_tools() -> None:
    cancelled = asyncio.Event()
    error = LookupError("handler")

    @tool
    async def slow() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return "never"

    @tool
    async def bad() -> str:
        await asyncio.sleep(0)
        raise ValueError

    def handler(failed: Exception, context: Any) -> str:
        raise error

    model = ScriptedChatModel([AiMessage(None, [tool_call("slow"), tool_call("bad")])])
    service = create_ai_service(
        Assistant, chat_model=model, tools=(slow, bad), concurrent_tools=True, on_tool_execution_error=handler
    )
    with pytest.raises(LookupError) as raised:
        await asyncio.wait_for(service.chat("x"), 60)
    assert raised.value is error
    assert cancelled.is_set()
    assert len(model.requests) == 1


def test_single_tool_calls_of_synchronous_methods_stay_on_the_callers_thread() -> None:
    threads: list[threading.Thread] = []

    @tool
    def where(n: int) -> int:
        threads.append(threading.current_thread())
        return n

    class Sync(Protocol):
        def chat(self, text: str) -> str: ...

    several = AiMessage(None, [tool_call("where", {"n": n}) for n in range(2)])
    model = ScriptedChatModel([tool_call("where", {"n": 0}), several, "done"])
    service = create_ai_service(Sync, chat_model=model, tools=(where,), concurrent_tools=True)
    assert service.chat("x") == "done"

    assert threads[0] is threading.current_thread()
    assert threading.current_thread() not in threads[1:]


@pytest.mark.parametrize("is_own", [False, True])
def test_concurrent_tools_of_synchronous_streams_run_at_the_same_time(is_own: bool) -> None:
    meeting = Meeting(2)
    model = ScriptedChatModel([AiMessage(None, [tool_call("block", {"n": n}) for n in range(2)]), "done"])

    class Sync(Protocol):
        def chat(self, text: str) -> Iterator[str]: ...

    with ThreadPoolExecutor(2) as executor:
        concurrent = executor if is_own else True
        service = create_ai_service(Sync, chat_model=model, tools=meeting, concurrent_tools=concurrent)
        assert list(service.chat("x")) == ["done"]
        assert (set(meeting.threads) == set(executor._threads)) is is_own

    assert results(model) == ["0", "1"]
    assert threading.current_thread() not in meeting.threads


async def test_thousands_of_concurrent_tool_calls_run_in_linear_time() -> None:
    """With quadratic cost, this would take minutes."""
    count = 5000

    @tool
    async def note(n: int) -> int:
        await asyncio.sleep(0)
        return n

    calls = [tool_call("note", {"n": n}) for n in range(count)]
    model = ScriptedChatModel([AiMessage(tool_execution_requests=calls), "noted"])

    class Assistant(Protocol):
        async def chat(self, text: str) -> Result[str]: ...

    assistant = create_ai_service(Assistant, chat_model=model, tools=[note], concurrent_tools=True)
    async with asyncio.timeout(15):
        result = await assistant.chat("x")

    assert [execution.result for execution in result.tool_executions] == [str(n) for n in range(count)]
