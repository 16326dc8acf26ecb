"""Code on another event loop than the container's: what it awaits runs on the container's loop, as services do."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import anyio
import pytest

from toolbox import Container, ContainerNotStartedError, Inject, application_scoped, produces, request_scoped
from toolbox.settings import ToolboxSettings

CALLER: ContextVar[str] = ContextVar("caller", default="nobody")


@application_scoped
class Home:
    """The loop of the container, and what happened in which order."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.steps: list[str] = []

    def note(self, step: str) -> None:
        self.steps.append(step if asyncio.get_running_loop() is self.loop else f"{step} elsewhere")


class Pool: ...


@produces(scope="application")
async def pool(home: Home) -> AsyncIterator[Pool]:
    home.loop = asyncio.get_running_loop()
    yield Pool()
    home.note("pool closed")


class Session: ...


@produces(scope="request")
async def session(home: Home, pool: Pool) -> AsyncIterator[Session]:
    home.note("session opened")
    try:
        yield Session()
    except BaseException as error:
        home.note(type(error).__name__)
        raise
    finally:
        await asyncio.sleep(0)
        home.note("session closed")


async def work(session: Inject[Session], home: Inject[Home], number: int = 1) -> tuple[int, str]:
    home.note("work")
    await asyncio.sleep(0)
    return number, CALLER.get()


def new_container(**settings: Any) -> Container:
    return Container(settings=ToolboxSettings(**settings)).register(Home, pool, session)


async def in_scope(container: Container, wait: Callable[[], Awaitable[Any]]) -> Any:
    async with container.request_scope():
        return await wait()


USES: list[Callable[[Container], Callable[[], Awaitable[Any]]]] = [
    lambda container: container.injected(work),
    lambda container: lambda: in_scope(container, lambda: container.acall(work)),
]


@pytest.mark.parametrize("use", USES)
def test_work_of_another_loop_runs_on_that_of_the_container(use: Callable[[Container], Callable[[], Any]]) -> None:
    async def job() -> Any:
        CALLER.set("job")
        return await use(container)()

    with new_container() as container:
        home = container.get(Home)
        assert [asyncio.run(job()) for _ in range(2)] == [(1, "job")] * 2

    assert home.steps == ["session opened", "work", "session closed"] * 2 + ["pool closed"]


def test_a_scope_of_another_loop_closes_its_beans_on_that_of_the_container() -> None:
    async def job() -> None:
        async with container.request_scope():
            assert await container.aget(Session) is await container.aget(Session)
            raise ValueError("no")

    with new_container() as container:
        home = container.get(Home)
        with pytest.raises(ValueError, match="no"):
            asyncio.run(job())

    assert home.steps == ["session opened", "ValueError", "session closed", "pool closed"]


def test_an_error_reaches_the_scope_and_the_caller_on_its_own_loop() -> None:
    error = ValueError("no")

    async def failing(session: Inject[Session]) -> None:
        raise error

    with new_container() as container:
        home = container.get(Home)
        with pytest.raises(ValueError, match="no") as raised:
            asyncio.run(container.injected(failing)())

    assert raised.value is error
    assert home.steps == ["session opened", "ValueError", "session closed", "pool closed"]


async def time_out(job: Callable[[], Awaitable[Any]], begun: threading.Event) -> None:
    task = asyncio.ensure_future(job())
    await asyncio.to_thread(begun.wait)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(task, 0)


async def cancel_scope(job: Callable[[], Awaitable[Any]], begun: threading.Event) -> None:
    with anyio.CancelScope() as scope:

        async def cancel() -> None:
            await anyio.to_thread.run_sync(begun.wait)
            scope.cancel()

        canceller = asyncio.ensure_future(cancel())
        await job()
    assert scope.cancelled_caught
    await canceller


@pytest.mark.parametrize("cancel", [time_out, cancel_scope])
def test_a_cancelled_caller_continues_when_the_work_has_ended(cancel: Callable[..., Awaitable[None]]) -> None:
    begun = threading.Event()

    async def endless(session: Inject[Session]) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def main() -> None:
        await cancel(container.injected(endless), begun)
        assert home.steps == ["session opened", "CancelledError", "session closed"]

    with new_container() as container:
        home = container.get(Home)
        asyncio.run(main())


def test_work_that_catches_its_cancellation_returns_its_value() -> None:
    begun = threading.Event()

    async def stubborn() -> str:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "done"

    async def main() -> str:
        task = asyncio.ensure_future(container.acall(stubborn))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        return await task

    with new_container() as container:
        assert asyncio.run(main()) == "done"


def test_the_stop_ends_the_work_of_other_loops_before_it_closes_beans(caplog: pytest.LogCaptureFixture) -> None:
    begun = threading.Event()
    ended: list[BaseException] = []

    async def endless(session: Inject[Session]) -> None:
        begun.set()
        await asyncio.Event().wait()

    def run_job() -> None:
        try:
            asyncio.run(container.injected(endless)())
        except BaseException as error:
            ended.append(error)

    with caplog.at_level(logging.WARNING, "toolbox"), new_container(stop_timeout=0.1) as container:
        home = container.get(Home)
        thread = threading.Thread(target=run_job)
        thread.start()
        begun.wait()
    thread.join()

    assert home.steps == ["session opened", "CancelledError", "session closed", "pool closed"]
    assert [type(each) for each in ended] == [asyncio.CancelledError]
    assert "endless" in caplog.text
    with pytest.raises(ContainerNotStartedError):
        asyncio.run(container.injected(endless)())


def test_the_stop_waits_for_work_that_ends_in_time() -> None:
    begun, may_end = threading.Event(), threading.Event()
    results: list[str] = []

    async def slow() -> str:
        begun.set()
        await asyncio.to_thread(may_end.wait)
        return "done"

    with new_container() as container:
        thread = threading.Thread(target=lambda: results.append(asyncio.run(container.acall(slow))))
        thread.start()
        begun.wait()
        threading.Timer(0.05, may_end.set).start()
    thread.join()

    assert results == ["done"]


def test_work_runs_here_if_the_loop_of_the_container_does_not_run() -> None:
    container = new_container()
    home_loop = asyncio.new_event_loop()
    home_loop.run_until_complete(container.__aenter__())
    try:
        assert asyncio.run(container.injected(work)(2)) == (2, "nobody")
    finally:
        home_loop.run_until_complete(container.__aexit__(None, None, None))
        home_loop.close()


@request_scoped
class Counter:
    def __init__(self) -> None:
        self.thread = threading.current_thread()


def test_a_def_is_still_called_on_the_thread_of_its_caller() -> None:
    def count(counter: Inject[Counter]) -> threading.Thread:
        return counter.thread

    async def job() -> threading.Thread:
        return container.injected(count)()

    with new_container().register(Counter) as container:
        assert asyncio.run(job()) is threading.current_thread()
