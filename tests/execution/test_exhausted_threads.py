"""Calls fail cleanly if the system cannot start more threads; nothing hangs or runs after its failure was reported."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pytest

from toolbox import AiMessage, Container, Result, create_ai_service, register_ai_service, run_on_thread, tool
from toolbox.execution.markers import BLOCKING, THREAD, Execution
from toolbox.execution.runners import LoopRunner
from toolbox.execution.threads import LoopThread, Workers
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


class Exhaustion:
    """Makes `Thread.start` fail like an exhausted system while it is active."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on = False
        start = threading.Thread.start

        def limited(thread: threading.Thread) -> None:
            if self.on:
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", limited)


@pytest.fixture
def exhaustion(monkeypatch: pytest.MonkeyPatch) -> Iterator[Exhaustion]:
    made = Exhaustion(monkeypatch)
    yield made
    made.on = False


class Ends:
    """Records how calls end."""

    def __init__(self) -> None:
        self.errors: list[BaseException | None] = []

    async def finish(self, error: BaseException | None) -> None:
        self.errors.append(error)


@pytest.mark.parametrize("execution", [BLOCKING, THREAD])
async def test_calls_without_a_thread_fail_and_never_run(exhaustion: Exhaustion, execution: Execution) -> None:
    runner, ends, ran = LoopRunner(Workers(pool_size=1, thread_limit=1)), Ends(), []

    exhaustion.on = True
    with pytest.raises(RuntimeError, match="can't start new thread"):
        await runner.run(execution, lambda: ran.append("refused"), "refused", finish=ends.finish)
    exhaustion.on = False
    await runner.run(execution, lambda: ran.append("later"), "later", finish=ends.finish)

    assert ran == ["later"]
    assert [type(each) for each in ends.errors] == [RuntimeError, type(None)]


async def test_failed_thread_starts_free_their_slot(exhaustion: Exhaustion) -> None:
    runner = LoopRunner(Workers(thread_limit=2))

    exhaustion.on = True
    for _ in range(5):
        with pytest.raises(RuntimeError):
            await runner.run(THREAD, lambda: None, "refused")
    exhaustion.on = False

    both = threading.Barrier(2)
    meet: Callable[[], int] = lambda: both.wait(60)  # noqa: E731 - both calls need a place at the same time
    async with asyncio.timeout(60):
        await asyncio.gather(runner.run(THREAD, meet, "one"), runner.run(THREAD, meet, "two"))


async def test_calls_that_wait_for_a_new_thread_fail_if_none_can_be_started(exhaustion: Exhaustion) -> None:
    runner, release, inside = LoopRunner(Workers(thread_limit=1)), threading.Event(), asyncio.Event()
    loop, ends = asyncio.get_running_loop(), Ends()

    def hold() -> None:
        loop.call_soon_threadsafe(inside.set)
        release.wait(60)

    first = asyncio.create_task(runner.run(THREAD, hold, "first"))
    await inside.wait()
    waiting = [asyncio.create_task(runner.run(THREAD, lambda: None, "waits", finish=ends.finish)) for _ in range(3)]
    await asyncio.sleep(0)
    exhaustion.on = True
    release.set()
    async with asyncio.timeout(60):
        await first
        results = await asyncio.gather(*waiting, return_exceptions=True)
    exhaustion.on = False

    assert [type(each) for each in results] == [RuntimeError] * 3
    assert [type(each) for each in ends.errors] == [RuntimeError] * 3
    async with asyncio.timeout(60):
        await runner.run(THREAD, lambda: None, "its place is free again")


async def test_calls_wait_for_a_pool_thread_if_no_other_can_be_started(exhaustion: Exhaustion) -> None:
    runner, release, inside = LoopRunner(Workers(pool_size=2)), threading.Event(), asyncio.Event()
    loop, ends, ran = asyncio.get_running_loop(), Ends(), []

    def hold() -> None:
        loop.call_soon_threadsafe(inside.set)
        release.wait(60)

    first = asyncio.create_task(runner.run(BLOCKING, hold, "first"))
    await inside.wait()
    exhaustion.on = True
    second = asyncio.create_task(runner.run(BLOCKING, lambda: ran.append("second"), "second", finish=ends.finish))
    await asyncio.sleep(0)
    assert not second.done()
    release.set()
    async with asyncio.timeout(60):
        await asyncio.gather(first, second)

    assert ran == ["second"]
    assert ends.errors == [None]


def test_event_loops_without_a_thread_leave_nothing_open(exhaustion: Exhaustion) -> None:
    thread = LoopThread()
    exhaustion.on = True

    with pytest.raises(RuntimeError, match="can't start new thread"):
        thread.start()

    assert thread.loop.is_closed()


class Assistant(Protocol):
    def ask(self, question: str) -> Result[str]: ...


def test_containers_without_a_thread_can_be_started_later(exhaustion: Exhaustion) -> None:
    container = Container(models={"default": ScriptedChatModel(["hello"])}).register(register_ai_service(Assistant))
    exhaustion.on = True
    with pytest.raises(RuntimeError, match="can't start new thread"):
        container.__enter__()
    exhaustion.on = False

    with container:
        assert container.get(Assistant).ask("q").content == "hello"


async def test_invocations_continue_after_a_tool_without_a_thread(exhaustion: Exhaustion) -> None:
    ran: list[int] = []

    class Tools:
        @tool
        @run_on_thread
        def count(self, number: int) -> int:
            ran.append(number)
            return number

    class Counter(Protocol):
        async def ask(self, question: str) -> Result[str]: ...

    class Model(ScriptedChatModel):
        async def chat(self, request: Any) -> Any:
            exhaustion.on = not self.requests  # only for the tools of the first reply
            return await super().chat(request)

    replies = [AiMessage(None, [tool_call("count", {"number": n})]) for n in (1, 2)]
    service = create_ai_service(Counter, chat_model=Model([*replies, "done"]), tools=Tools())

    result = await service.ask("q")

    assert [each.is_error for each in result.tool_executions] == [True, False]
    assert ran == [2]
