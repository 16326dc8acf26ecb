"""Runners and workers: threads, limits, cancellation and the end of calls."""

import asyncio
import contextvars
import functools
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError as FutureCancelled
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import pytest

from toolbox import (
    AiMessage,
    Result,
    blocking,
    create_ai_service,
    non_blocking,
    run_on,
    run_on_thread,
)
from toolbox.execution.markers import (
    BLOCKING,
    COROUTINE,
    EXECUTION_MARK,
    NON_BLOCKING,
    THREAD,
    Execution,
    ExecutionModel,
    execution_of,
)
from toolbox.execution.runners import CallerRunner, LoopRunner
from toolbox.execution.threads import LoopThread, Workers
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio
variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


def here() -> tuple[threading.Thread, str, str]:
    thread = threading.current_thread()
    return thread, thread.name, variable.get()


# --- execution models


def function() -> None: ...


async def coroutine() -> None: ...


def test_def_functions_are_blocking_and_async_functions_are_not() -> None:
    assert execution_of(function, None) == BLOCKING
    assert execution_of(coroutine, None) == COROUTINE
    assert execution_of(function, None, Awaitable[int]) == NON_BLOCKING


def test_markers_set_the_execution_model_and_return_the_function() -> None:
    def marked() -> None: ...

    assert non_blocking(marked) is marked
    assert execution_of(marked, getattr(marked, EXECUTION_MARK)) == NON_BLOCKING
    assert getattr(run_on_thread(marked), EXECUTION_MARK) == THREAD
    assert getattr(blocking(marked), EXECUTION_MARK) == BLOCKING
    assert getattr(run_on("named")(marked), EXECUTION_MARK) == Execution(ExecutionModel.EXECUTOR, "named")


# --- asynchronous services


async def test_blocking_calls_run_on_the_pool_with_their_name_and_context() -> None:
    variable.set("seen")
    thread, name, value = await LoopRunner(Workers()).run(BLOCKING, here, "add")

    assert thread is not threading.current_thread()
    assert (name, value) == ("add", "seen")
    assert thread.name.startswith("toolbox-pool")


@pytest.mark.parametrize("execution", [BLOCKING, NON_BLOCKING, THREAD])
async def test_returned_awaitables_are_awaited_on_the_event_loop(execution: Execution) -> None:
    async def later() -> threading.Thread:
        return threading.current_thread()

    assert await LoopRunner(Workers()).run(execution, later, "add") is threading.current_thread()


async def test_pool_size_limits_running_calls() -> None:
    workers, release = Workers(pool_size=2), threading.Event()
    running, most = 0, 0
    lock = threading.Lock()
    two_inside = asyncio.Event()
    loop = asyncio.get_running_loop()

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            if running == 2:
                loop.call_soon_threadsafe(two_inside.set)
        release.wait()
        with lock:
            running -= 1

    calls = [asyncio.create_task(LoopRunner(workers).run(BLOCKING, work, "work")) for _ in range(5)]
    await two_inside.wait()
    assert workers.is_full
    release.set()
    await asyncio.gather(*calls)

    assert most == 2
    assert not workers.is_full


async def test_thread_limit_limits_new_threads() -> None:
    workers, release = Workers(thread_limit=1), threading.Event()
    inside = asyncio.Event()
    loop = asyncio.get_running_loop()
    order: list[int] = []

    def work(number: int) -> None:
        order.append(number)
        loop.call_soon_threadsafe(inside.set)
        release.wait()
        order.append(number)

    runner = LoopRunner(workers)
    first = asyncio.create_task(runner.run(THREAD, lambda: work(1), "one"))
    await inside.wait()
    second = asyncio.create_task(runner.run(THREAD, lambda: work(2), "two"))
    await asyncio.sleep(0)
    release.set()
    await asyncio.gather(first, second)

    assert order == [1, 1, 2, 2]


async def test_slow_non_blocking_functions_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    runner = LoopRunner(Workers(slow_call_warning=0.0))

    with caplog.at_level(logging.WARNING):
        await runner.run(NON_BLOCKING, function, "slow_tool")
        await runner.run(NON_BLOCKING, function, "slow_tool")

    [record] = caplog.records
    assert "slow_tool" in record.getMessage()


# --- cancelled callers


async def test_cancelled_callers_continue_and_finish_runs_when_the_thread_ends() -> None:
    workers, release = Workers(), threading.Event()
    inside, finished = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    ends: list[BaseException | None] = []

    def work() -> None:
        loop.call_soon_threadsafe(inside.set)
        release.wait()

    async def finish(error: BaseException | None) -> None:
        ends.append(error)
        finished.set()

    call = asyncio.create_task(LoopRunner(workers).run(BLOCKING, work, "work", finish=finish))
    await inside.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert ends == []
    assert workers.abandoned == ["work"]

    release.set()
    await finished.wait()

    assert ends == [None]
    assert workers.abandoned == []


async def test_cancelled_calls_that_have_not_started_never_run() -> None:
    workers, release = Workers(pool_size=1), threading.Event()
    inside = asyncio.Event()
    loop = asyncio.get_running_loop()
    ran: list[str] = []
    ends: list[BaseException | None] = []

    def hold() -> None:
        loop.call_soon_threadsafe(inside.set)
        release.wait()

    async def finish(error: BaseException | None) -> None:
        ends.append(error)

    runner = LoopRunner(workers)
    holder = asyncio.create_task(runner.run(BLOCKING, hold, "hold"))
    await inside.wait()
    waiting = asyncio.create_task(runner.run(BLOCKING, lambda: ran.append("x"), "late", finish=finish))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    release.set()
    await holder

    assert ran == []
    assert [type(each) for each in ends] == [asyncio.CancelledError]


@pytest.mark.parametrize("execution", [BLOCKING, NON_BLOCKING, COROUTINE, THREAD])
async def test_finish_receives_the_error_of_the_call(execution: Execution) -> None:
    ends: list[BaseException | None] = []
    error = ValueError("no")

    def fail() -> None:
        raise error

    async def finish(raised: BaseException | None) -> None:
        ends.append(raised)

    with pytest.raises(ValueError) as caught:
        await LoopRunner(Workers()).run(execution, fail, "fail", finish=finish)

    assert caught.value is error
    assert ends == [error]


async def test_stop_returns_the_calls_that_still_run() -> None:
    workers, release = Workers(), threading.Event()
    inside = asyncio.Event()
    loop = asyncio.get_running_loop()

    def work() -> None:
        loop.call_soon_threadsafe(inside.set)
        release.wait()

    call = asyncio.create_task(LoopRunner(workers).run(BLOCKING, work, "stuck"))
    await inside.wait()
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)

    assert await workers.stop(0.01) == ["stuck"]
    release.set()
    assert await workers.stop(60) == []


# --- synchronous services


def on_callers_thread(run: Callable[[CallerRunner], Awaitable[object]], workers: Workers | None = None) -> object:
    """Return the result of `run` on the event loop of another thread while this thread serves its jobs."""
    runner = CallerRunner(workers or Workers())
    loop = LoopThread()
    loop.start()
    try:

        async def work() -> object:
            return await run(runner)

        return runner.wait_for(asyncio.run_coroutine_threadsafe(work(), loop.loop))
    finally:
        loop.stop()


def test_concurrent_tools_use_the_pool_first_and_then_the_caller() -> None:
    workers, release = Workers(pool_size=1), threading.Event()

    async def both(runner: CallerRunner) -> object:
        runner.together = True
        first = asyncio.create_task(runner.run(BLOCKING, lambda: (release.wait(), here())[1], "first"))
        await asyncio.sleep(0)
        second, _, _ = await runner.run(BLOCKING, here, "second")
        release.set()
        return (await first)[0], second

    first, second = on_callers_thread(both, workers)  # type: ignore[misc]  # a pair

    assert first.name.startswith("toolbox-pool")
    assert second is threading.current_thread()


def test_errors_of_the_invocation_reach_the_caller() -> None:
    async def fail(runner: CallerRunner) -> object:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        on_callers_thread(fail)


@pytest.mark.parametrize("execution", [BLOCKING, THREAD])
async def test_cancelled_futures_inside_a_tool_are_failures_and_not_cancellations(
    execution: Execution,
) -> None:
    finished: list[BaseException | None] = []

    async def finish(error: BaseException | None) -> None:
        finished.append(error)

    def work() -> None:
        future: Future[None] = Future()
        future.cancel()
        future.result()

    with pytest.raises(FutureCancelled):
        await LoopRunner(Workers()).run(execution, work, "work", finish=finish)

    assert [type(each) for each in finished] == [FutureCancelled]


class Waiting(Protocol):
    def ask(self, question: str) -> Result[str]: ...


def asking(tool: Callable[..., object], *replies: AiMessage | str) -> Waiting:
    return create_ai_service(Waiting, chat_model=ScriptedChatModel(replies), tools=[tool])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_tools_that_raise_system_exit_stop_their_caller_only(asynchronous: bool) -> None:
    def leave() -> None:
        raise SystemExit(3)

    async def leave_later() -> None:
        raise SystemExit(3)

    tool = leave_later if asynchronous else leave
    with pytest.raises(SystemExit, match="3"):
        asking(tool, AiMessage(None, [tool_call(tool.__name__)])).ask("q")

    assert asking(tool, "still there").ask("q").content == "still there"


@pytest.mark.parametrize("waits", [False, True])
async def test_def_wrappers_of_coroutine_functions_can_run_or_return_them(waits: bool) -> None:
    async def inside(number: int) -> int:
        return number + 1

    @functools.wraps(inside)
    def around(number: int) -> object:
        return asyncio.run(inside(number)) if waits else inside(number)

    class Awaited(Protocol):
        async def ask(self, question: str) -> Result[str]: ...

    calls = AiMessage(None, [tool_call("inside", {"number": 1})])
    service = create_ai_service(Awaited, chat_model=ScriptedChatModel([calls, "two"]), tools=[around])

    assert [each.result_object for each in (await service.ask("q")).tool_executions] == [2]


@pytest.mark.parametrize("runner", [LoopRunner, CallerRunner])
async def test_calls_rejected_by_an_executor_are_finished(runner: type[LoopRunner]) -> None:
    executor = ThreadPoolExecutor(1)
    executor.shutdown()
    finished: list[BaseException | None] = []

    async def finish(error: BaseException | None) -> None:
        finished.append(error)

    with pytest.raises(RuntimeError, match="shutdown"):
        await runner(Workers()).run(Execution(ExecutionModel.EXECUTOR, executor), here, "here", finish=finish)

    assert [type(each) for each in finished] == [RuntimeError]


def test_threads_of_an_executor_that_call_a_service_keep_their_name() -> None:
    def where() -> str:
        return threading.current_thread().name

    service = asking(where, AiMessage(None, [tool_call("where")]), "there")
    with ThreadPoolExecutor(1, thread_name_prefix="mine") as mine:
        result = mine.submit(service.ask, "q").result(30)

    assert result.tool_executions[0].result == "mine_0"


async def test_threads_of_an_executor_for_concurrent_tools_keep_their_names() -> None:
    def where() -> str:
        return threading.current_thread().name

    class Awaited(Protocol):
        async def ask(self, question: str) -> Result[str]: ...

    model = ScriptedChatModel([AiMessage(None, [tool_call("where"), tool_call("where")]), "there"])
    with ThreadPoolExecutor(2, thread_name_prefix="mine") as mine:
        service = create_ai_service(Awaited, chat_model=model, tools=[where], concurrent_tools=mine)
        result = await service.ask("q")

    assert all(each.result.startswith("mine_") for each in result.tool_executions)
