"""Tools that return a `concurrent.futures.Future`: it is awaited, wherever the tool runs."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import pytest

from toolbox import (
    AiMessage,
    Result,
    blocking,
    create_ai_service,
    non_blocking,
    run_on_thread,
    tool,
    tool_executor_from,
)
from toolbox.chat import ToolExecutionRequest
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as made:
        yield made


class Desk(Protocol):
    async def ask(self, text: str) -> Result[str]: ...


class Waiting(Protocol):
    def ask(self, text: str) -> Result[str]: ...


@pytest.mark.parametrize("marker", [lambda each: each, blocking, non_blocking, run_on_thread])
async def test_a_future_is_awaited_wherever_the_tool_runs(marker: Any, pool: ThreadPoolExecutor) -> None:
    @tool
    @marker
    def annotated(a: int) -> Future[int]:
        return pool.submit(lambda: a + 1)

    @tool
    @marker
    def returned(a: int):  # type: ignore[no-untyped-def]
        return pool.submit(lambda: a + 2)

    calls = AiMessage(None, (tool_call("annotated", {"a": 1}), tool_call("returned", {"a": 1})))
    desk = create_ai_service(Desk, chat_model=ScriptedChatModel([calls, "done"]), tools=[annotated, returned])

    result = await desk.ask("x")

    assert [(each.result, each.result_object) for each in result.tool_executions] == [("2", 2), ("3", 3)]


async def test_synchronous_services_and_executors_await_it_too(pool: ThreadPoolExecutor) -> None:
    @tool
    def add(a: int) -> Future[int]:
        return pool.submit(lambda: a + 1)

    model = ScriptedChatModel([tool_call("add", {"a": 1}), "done"])
    desk = create_ai_service(Waiting, chat_model=model, tools=add)
    executed: Any = await tool_executor_from(add)(ToolExecutionRequest("1", "add", '{"a": 5}'), None)  # type: ignore[misc]

    assert (await asyncio.to_thread(desk.ask, "x")).tool_executions[0].result == "2"
    assert executed.text == "6"


async def test_its_error_is_the_tool_s_and_a_cancelled_call_cancels_it() -> None:
    waiting: Future[int] = Future()
    called = asyncio.Event()

    @tool
    def fail() -> Future[int]:
        future: Future[int] = Future()
        future.set_exception(ValueError("no"))
        return future

    @tool
    def wait() -> Future[int]:
        called.set()
        return waiting

    model = ScriptedChatModel([tool_call("fail"), tool_call("wait")])
    task = asyncio.ensure_future(create_ai_service(Desk, chat_model=model, tools=[fail, wait]).ask("x"))
    await called.wait()
    await asyncio.sleep(0)
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert model.requests[1].messages[-1].text == "no"
    assert waiting.cancelled()
