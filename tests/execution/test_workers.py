"""Where calls run, and what becomes of them when nobody waits any more."""

import asyncio
import contextvars
import functools
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError as FutureCancelled
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from typing import Protocol

import pytest

from toolbox import (
    AiMessage,
    BlockingCallNotAllowedError,
    Container,
    InvocationContext,
    Result,
    blocking,
    create_ai_service,
    non_blocking,
    register_ai_service,
    run_on,
    run_on_thread,
)
from toolbox.context import current_attributes, invocation_attributes
from toolbox.execution import (
    BLOCKING,
    COROUTINE,
    EXECUTION_MARK,
    NON_BLOCKING,
    THREAD,
    CallerRunner,
    Execution,
    ExecutionModel,
    LoopRunner,
    LoopThread,
    Workers,
    execution_of,
    execution_problems,
    refuse_on_event_loop,
)
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]
variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


def here() -> tuple[threading.Thread, str, str]:
    thread = threading.current_thread()
    return thread, thread.name, variable.get()


# --- which model a function has


def function() -> None: ...


async def coroutine() -> None: ...


def test_a_def_blocks_and_an_async_def_does_not() -> None:
    assert execution_of(function, None) == BLOCKING
    assert execution_of(coroutine, None) == COROUTINE
    assert execution_of(function, None, Awaitable[int]) == NON_BLOCKING


def test_a_marker_says_otherwise_and_leaves_the_function_what_it_was() -> None:
    def marked() -> None: ...

    assert non_blocking(marked) is marked
    assert execution_of(marked, getattr(marked, EXECUTION_MARK)) == NON_BLOCKING
    assert getattr(run_on_thread(marked), EXECUTION_MARK) == THREAD
    assert getattr(blocking(marked), EXECUTION_MARK) == BLOCKING
    assert getattr(run_on("named")(marked), EXECUTION_MARK) == Execution(ExecutionModel.EXECUTOR, "named")


@pytest.mark.parametrize("execution", [BLOCKING, THREAD, Execution(ExecutionModel.EXECUTOR, "x")])
def test_an_async_def_cannot_leave_the_loop(execution: Execution) -> None:
    [problem] = execution_problems("Tool.run", coroutine, execution)

    assert problem.where == "Tool.run"
    assert execution.model.value in problem.what


# --- for an asynchronous service


async def test_a_blocking_call_runs_on_the_pool_under_its_own_name_with_the_callers_context() -> None:
    variable.set("seen")
    thread, name, value = await LoopRunner(Workers()).run(BLOCKING, here, "add")

    assert thread is not threading.current_thread()
    assert (name, value) == ("add", "seen")
    assert thread.name.startswith("toolbox-pool")


async def test_a_thread_call_gets_a_fresh_thread_each_time() -> None:
    runner = LoopRunner(Workers())
    first, name, _ = await runner.run(THREAD, here, "add")
    second, _, _ = await runner.run(THREAD, here, "add")

    assert first is not second
    assert name == "add"


async def test_a_non_blocking_call_stays_on_the_loop() -> None:
    thread, _, _ = await LoopRunner(Workers()).run(NON_BLOCKING, here, "add")

    assert thread is threading.current_thread()


@pytest.mark.parametrize("execution", [BLOCKING, NON_BLOCKING, THREAD])
async def test_what_turns_out_to_be_awaitable_is_awaited_on_the_loop(execution: Execution) -> None:
    async def later() -> threading.Thread:
        return threading.current_thread()

    assert await LoopRunner(Workers()).run(execution, later, "add") is threading.current_thread()


async def test_an_executor_is_used_by_object_and_by_name() -> None:
    with ThreadPoolExecutor(1, thread_name_prefix="mine") as mine:
        workers = Workers(executors={"mine": mine})
        for which in (mine, "mine"):
            execution = Execution(ExecutionModel.EXECUTOR, which)
            thread, _, _ = await LoopRunner(workers).run(execution, here, "add")
            assert thread.name.startswith("mine")


def whose(context: InvocationContext) -> tuple[object, object, object]:
    current = InvocationContext.current()
    assert current == context
    return context.attributes, dict(current_attributes()), variable.get()


@run_on("processes")
def attributes_there(context: InvocationContext) -> list[object]:
    return list(whose(context))


@pytest.mark.parametrize("start", ["fork", "spawn"])
async def test_another_process_knows_the_picklable_attributes_of_this_call_and_nothing_else(start: str) -> None:
    asks = AiMessage(None, [tool_call("attributes_there")])
    model = ScriptedChatModel([asks, "ok", asks, "ok"])
    variable.set("here")
    with ProcessPoolExecutor(1, mp_context=get_context(start)) as processes:
        container = Container(models={"default": model}, executors={"processes": processes}).register(Asking)
        async with container:
            seen = []
            for tenant in ("ann", "bob"):
                with invocation_attributes(tenant=tenant, lock=threading.Lock()):
                    result = await container.get(Asking).ask("whose?")
                seen.append(result.tool_executions[0].result_object)

    assert seen == [[{"tenant": name}, {"tenant": name}, "unset"] for name in ("ann", "bob")]


@register_ai_service(tools=attributes_there)
class Asking(Protocol):
    async def ask(self, question: str) -> Result[str]: ...


async def test_the_pool_is_bounded_and_further_calls_wait() -> None:
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


async def test_fresh_threads_are_limited_too() -> None:
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


async def test_a_slow_non_blocking_def_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    runner = LoopRunner(Workers(slow_call_warning=0.0))

    with caplog.at_level(logging.WARNING):
        await runner.run(NON_BLOCKING, function, "slow_tool")
        await runner.run(NON_BLOCKING, function, "slow_tool")

    [record] = caplog.records
    assert "slow_tool" in record.getMessage()


# --- when nobody waits any more


async def test_cancelled_on_a_thread_the_caller_goes_on_at_once_and_the_end_follows_the_thread() -> None:
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


async def test_a_call_that_has_not_started_never_starts_and_is_finished_at_once() -> None:
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
async def test_the_end_is_told_what_the_call_raised(execution: Execution) -> None:
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


async def test_stopping_reports_the_calls_that_go_on() -> None:
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
    assert await workers.stop(5) == []


# --- for a synchronous service


def on_callers_thread(run: Callable[[CallerRunner], Awaitable[object]], workers: Workers | None = None) -> object:
    """What `run` gives, run on a loop of another thread while this one serves its jobs."""
    runner = CallerRunner(workers or Workers())
    loop = LoopThread()
    loop.start()
    try:

        async def work() -> object:
            return await run(runner)

        return runner.wait_for(asyncio.run_coroutine_threadsafe(work(), loop.loop))
    finally:
        loop.stop()


@pytest.mark.parametrize("execution", [BLOCKING, NON_BLOCKING])
def test_a_synchronous_services_def_tools_run_on_the_callers_thread(execution: Execution) -> None:
    variable.set("seen")
    thread, name, value = on_callers_thread(lambda runner: runner.run(execution, here, "add"))  # type: ignore[misc]  # here's

    assert thread is threading.current_thread()
    assert (name, value) == ("add", "seen")


def test_a_synchronous_services_async_tools_run_on_the_loop() -> None:
    async def where() -> threading.Thread:
        return threading.current_thread()

    thread = on_callers_thread(lambda runner: runner.run(COROUTINE, where, "add"))

    assert thread is not threading.current_thread()


def test_together_the_pool_takes_them_while_it_has_room_and_then_the_caller() -> None:
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


def test_what_the_invocation_raises_reaches_the_caller() -> None:
    async def fail(runner: CallerRunner) -> object:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        on_callers_thread(fail)


async def test_a_waiting_call_is_refused_on_a_loops_thread() -> None:
    with pytest.raises(BlockingCallNotAllowedError, match="worker thread"):
        refuse_on_event_loop("Assistant.chat()")


def test_nothing_is_refused_elsewhere() -> None:
    refuse_on_event_loop("Assistant.chat()")


def test_attributes_are_merged() -> None:
    with invocation_attributes(a=1, b=1), invocation_attributes(b=2):
        assert dict(current_attributes()) == {"a": 1, "b": 2}
    assert dict(current_attributes()) == {}


@pytest.mark.parametrize("execution", [BLOCKING, THREAD])
async def test_a_cancelled_future_that_a_call_waited_for_is_its_failure_and_no_cancellation(
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
def test_a_tool_that_exits_the_program_exits_its_caller_and_stops_no_other_call(asynchronous: bool) -> None:
    def leave() -> None:
        raise SystemExit(3)

    async def leave_later() -> None:
        raise SystemExit(3)

    tool = leave_later if asynchronous else leave
    with pytest.raises(SystemExit, match="3"):
        asking(tool, AiMessage(None, [tool_call(tool.__name__)])).ask("q")

    assert asking(tool, "still there").ask("q").content == "still there"


@pytest.mark.parametrize("waits", [False, True])
async def test_a_def_around_a_coroutine_function_may_wait_for_it_or_hand_it_on(waits: bool) -> None:
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
async def test_what_an_executor_does_not_take_is_finished_all_the_same(runner: type[LoopRunner]) -> None:
    executor = ThreadPoolExecutor(1)
    executor.shutdown()
    finished: list[BaseException | None] = []

    async def finish(error: BaseException | None) -> None:
        finished.append(error)

    with pytest.raises(RuntimeError, match="shutdown"):
        await runner(Workers()).run(Execution(ExecutionModel.EXECUTOR, executor), here, "here", finish=finish)

    assert [type(each) for each in finished] == [RuntimeError]


def test_a_thread_of_a_users_executor_that_calls_a_synchronous_service_keeps_its_name() -> None:
    def where() -> str:
        return threading.current_thread().name

    service = asking(where, AiMessage(None, [tool_call("where")]), "there")
    with ThreadPoolExecutor(1, thread_name_prefix="mine") as mine:
        result = mine.submit(service.ask, "q").result(30)

    assert result.tool_executions[0].result == "mine_0"


async def test_the_threads_of_an_executor_for_concurrent_tools_keep_their_names() -> None:
    def where() -> str:
        return threading.current_thread().name

    class Awaited(Protocol):
        async def ask(self, question: str) -> Result[str]: ...

    model = ScriptedChatModel([AiMessage(None, [tool_call("where"), tool_call("where")]), "there"])
    with ThreadPoolExecutor(2, thread_name_prefix="mine") as mine:
        service = create_ai_service(Awaited, chat_model=model, tools=[where], concurrent_tools=mine)
        result = await service.ask("q")

    assert all(each.result.startswith("mine_") for each in result.tool_executions)
