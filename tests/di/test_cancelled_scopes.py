"""Scopes whose task is cancelled while they create or close beans."""

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import nullcontext
from typing import Any

import anyio
import pytest

from toolbox import (
    Container,
    ToolboxSettings,
    produces,
)

pytestmark = pytest.mark.anyio


async def test_cancellation_closes_everything() -> None:
    log: list[str] = []
    entered = asyncio.Event()

    async with Container().register(*_slow_to_close(log)) as c:

        async def work() -> None:
            async with c.request_scope():
                await c.aget(float)
                entered.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(work())
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert log == ["float CancelledError", "str CancelledError", "int CancelledError"]


async def test_a_second_cancellation_during_closing_closes_everything() -> None:
    log: list[str] = []
    closing = asyncio.Event()
    go_on = asyncio.Event()

    @produces(scope="request")
    async def last(value: float) -> AsyncIterator[bytes]:
        try:
            yield b"4"
        finally:
            closing.set()
            await go_on.wait()
            log.append("bytes")

    async with Container().register(*_slow_to_close(log), last) as c:

        async def work() -> None:
            async with c.request_scope():
                await c.aget(bytes)
                await asyncio.Event().wait()

        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await closing.wait()
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert log == ["bytes", "float CancelledError", "str CancelledError", "int CancelledError"]


async def test_a_cancellation_during_closing_is_not_lost() -> None:
    closing = asyncio.Event()
    go_on = asyncio.Event()

    @produces(scope="request")
    async def slow() -> AsyncIterator[int]:
        yield 1
        closing.set()
        await go_on.wait()

    async with Container().register(slow) as c:

        async def work() -> None:
            async with c.request_scope():
                await c.aget(int)

        task = asyncio.create_task(work())
        await closing.wait()
        task.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_timeout_inside_a_close_method_works() -> None:
    log: list[str] = []

    @produces(scope="request")
    async def hanging() -> AsyncIterator[int]:
        yield 1
        try:
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        except TimeoutError:
            log.append("given up")

    async with Container().register(hanging) as c:
        async with c.request_scope():
            await c.aget(int)
        assert log == ["given up"]


async def test_an_anyio_scope_inside_a_close_method_works() -> None:
    log: list[str] = []

    @produces(scope="request")
    async def hanging() -> AsyncIterator[int]:
        yield 1
        with anyio.move_on_after(0.01):
            await anyio.sleep_forever()
        log.append("given up")

    async with Container().register(hanging) as c:
        async with c.request_scope():
            await c.aget(int)
        assert log == ["given up"]


async def test_all_beans_are_closed_in_a_cancelled_anyio_scope() -> None:
    log: list[str] = []
    async with Container().register(*_slow_to_close(log)) as c:
        with anyio.CancelScope() as scope:
            async with c.request_scope():
                await c.aget(float)
                scope.cancel()
                await anyio.sleep_forever()
        assert scope.cancelled_caught
        assert log == ["float CancelledError", "str CancelledError", "int CancelledError"]


@pytest.mark.parametrize("canceller", ["task", "timeout", "anyio"])
async def test_a_scope_that_is_cancelled_while_it_closes_closes_whole(canceller: str) -> None:
    log: list[str] = []
    closing, go_on = asyncio.Event(), asyncio.Event()

    @produces(scope="request")
    async def first() -> AsyncIterator[int]:
        yield 1
        await go_on.wait()
        await asyncio.sleep(0)
        log.append("first")

    @produces(scope="request")
    async def second(first: int) -> AsyncIterator[str]:
        yield ""
        log.append("closing")
        closing.set()
        for _ in range(5):
            await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(0.05, go_on.set)
        await go_on.wait()
        log.append("second")

    async with Container().register(first, second) as c:

        async def work() -> None:
            async with c.request_scope():
                await c.aget(str)
            log.append("went on")
            await asyncio.sleep(0)

        if canceller == "anyio":
            with anyio.move_on_after(0.01) as scope:
                await work()
            assert scope.cancelled_caught
        elif canceller == "timeout":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await work()
        else:
            task = asyncio.create_task(work())
            await closing.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
    assert log == ["closing", "second", "first"]
    current = asyncio.current_task()
    assert current is not None
    assert current.cancelling() == 0


async def test_a_task_that_cancels_itself_before_the_end_closes_its_scope() -> None:
    log: list[str] = []

    async with Container().register(*_slow_to_close(log)) as c:

        async def work() -> None:
            async with c.request_scope():
                await c.aget(float)
                asyncio.current_task().cancel()  # type: ignore[union-attr]

        task = asyncio.create_task(work())
        with pytest.raises(asyncio.CancelledError):
            await task
    assert log == []  # no producer saw an error


async def test_a_close_that_takes_longer_than_the_stop_timeout_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    log: list[str] = []
    closing = asyncio.Event()

    @produces(scope="request")
    async def hanging() -> AsyncIterator[int]:
        yield 1
        closing.set()
        try:
            await asyncio.Event().wait()
        finally:
            log.append("given up")

    async with Container(settings=ToolboxSettings(stop_timeout=0.05)).register(hanging) as c:

        async def work() -> None:
            async with c.request_scope():
                await c.aget(int)

        task = asyncio.create_task(work())
        await closing.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert log == ["given up"]
    assert "given up after 0.05 seconds" in caplog.text


@pytest.mark.parametrize("kind", ["asyncio", "anyio"])
async def test_a_timeout_inside_a_close_method_works_while_a_cancellation_is_held_back(kind: str) -> None:
    log: list[str] = []
    closing = asyncio.Event()

    @produces(scope="request")
    async def limited() -> AsyncIterator[int]:
        yield 1
        closing.set()
        try:
            with anyio.fail_after(0.05) if kind == "anyio" else nullcontext():
                async with asyncio.timeout(None if kind == "anyio" else 0.05):
                    await asyncio.Event().wait()
        except TimeoutError:
            log.append("late")
        await asyncio.sleep(0)
        log.append("closed")

    async with Container().register(limited) as c:

        async def work() -> None:
            async with c.request_scope():
                await c.aget(int)

        task = asyncio.create_task(work())
        await closing.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert log == ["late", "closed"]


@pytest.mark.parametrize("kind", ["asyncio", "anyio"])
async def test_a_timeout_around_a_yield_ends_the_closing_of_its_own_producer(kind: str) -> None:
    log: list[str] = []

    @produces(scope="request")
    async def limited() -> AsyncIterator[int]:
        try:
            with anyio.fail_after(0.05) if kind == "anyio" else nullcontext():
                async with asyncio.timeout(None if kind == "anyio" else 0.05):
                    yield 1
                    await asyncio.Event().wait()
        except TimeoutError:
            log.append("late")

    async with Container().register(limited) as c, c.request_scope():
        await c.aget(int)
    assert log == ["late"]


def _slow_to_close(log: list[str]) -> tuple[Any, ...]:
    @produces(scope="request")
    async def first() -> AsyncIterator[int]:
        try:
            yield 1
        except BaseException as error:
            await asyncio.sleep(0.001)
            log.append(f"int {type(error).__name__}")
            raise

    @produces(scope="request")
    def second(first: int) -> Iterator[str]:
        try:
            yield "2"
        except BaseException as error:
            log.append(f"str {type(error).__name__}")
            raise

    @produces(scope="request")
    async def third(second: str) -> AsyncIterator[float]:
        try:
            yield 3.0
        except BaseException as error:
            await asyncio.sleep(0)
            await asyncio.sleep(0.001)
            log.append(f"float {type(error).__name__}")
            raise

    return first, second, third


async def test_a_scope_stays_cancelled_if_a_close_method_fails(caplog: pytest.LogCaptureFixture) -> None:
    @produces(scope="request")
    async def failing() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            raise OSError("cannot close")

    entered = asyncio.Event()
    async with Container().register(failing) as c:

        async def work() -> None:
            async with c.request_scope():
                await c.aget(int)
                entered.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(work())
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert "closing a request scope failed" in caplog.text


# --- producers with scopes of anyio


async def cancel_own_scope(log: list[str]) -> None:
    with anyio.CancelScope() as scope:
        await asyncio.sleep(0.02)
        scope.cancel()
        await anyio.sleep(1)


async def move_on(log: list[str]) -> None:
    with anyio.move_on_after(0.02):
        await anyio.sleep_forever()


async def fail_late(log: list[str]) -> None:
    with pytest.raises(TimeoutError), anyio.fail_after(0.02):
        await asyncio.Event().wait()


async def flush_in_a_group(log: list[str]) -> None:
    async def flush() -> None:
        await anyio.sleep(0.02)
        log.append("flushed")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(flush)
    log.remove("flushed")


async def cancel_own_group(log: list[str]) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.sleep_forever)
        await asyncio.sleep(0.02)
        tasks.cancel_scope.cancel()


async def fail_in_a_group(log: list[str]) -> None:
    async def fail() -> None:
        await asyncio.sleep(0.02)
        raise ValueError

    with pytest.raises(ExceptionGroup):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fail)
            tasks.start_soon(anyio.sleep_forever)


async def use_a_stream(log: list[str]) -> None:
    sending, receiving = anyio.create_memory_object_stream[int](1)
    async with sending, receiving:
        await asyncio.sleep(0.02)
        await sending.send(1)
        await receiving.receive()


CLOSING = [cancel_own_scope, move_on, fail_late, flush_in_a_group, cancel_own_group, fail_in_a_group, use_a_stream]


@pytest.mark.parametrize("outer", ["anyio", "group", "timeout"])
@pytest.mark.parametrize("close", CLOSING)
async def test_a_close_with_a_scope_of_its_own_ends_while_another_one_is_cancelled(
    close: Callable[[list[str]], Awaitable[None]], outer: str
) -> None:
    log: list[str] = []
    closing = asyncio.Event()

    @produces(scope="request")
    async def first() -> AsyncIterator[int]:
        yield 1
        await anyio.sleep(0.001)
        log.append("first")

    @produces(scope="request")
    async def second(first: int) -> AsyncIterator[str]:
        yield ""
        closing.set()
        await close(log)
        await asyncio.sleep(0)
        log.append("second")

    async with Container().register(first, second) as c:

        async def work() -> None:
            async with c.request_scope():
                await c.aget(str)
            log.append("went on")
            await asyncio.sleep(0)

        if outer == "anyio":
            with anyio.CancelScope() as scope:
                cancelling = asyncio.create_task(_when(closing, scope.cancel))
                await work()
            assert scope.cancelled_caught
            await cancelling
        elif outer == "group":
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_when, closing, tasks.cancel_scope.cancel)
                await work()
        else:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await work()
    assert log == ["second", "first"]
    assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]


async def _when(event: asyncio.Event, act: Callable[[], object]) -> None:
    await event.wait()
    await asyncio.sleep(0.005)
    act()


@pytest.mark.parametrize("before", [True, False])
async def test_a_close_that_hangs_in_a_cancelled_anyio_scope_is_given_up(
    before: bool, caplog: pytest.LogCaptureFixture
) -> None:
    closing = asyncio.Event()
    log: list[str] = []

    @produces(scope="request")
    async def hanging() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            closing.set()
            try:
                await asyncio.Event().wait()
            finally:
                log.append("given up")

    async with Container(settings=ToolboxSettings(stop_timeout=0.05)).register(hanging) as c:
        with anyio.CancelScope() as scope:
            cancelling = asyncio.create_task(_when(closing, scope.cancel))
            async with c.request_scope():
                await c.aget(int)
                if before:
                    scope.cancel()
                    await anyio.sleep_forever()
        assert scope.cancelled_caught
        await cancelling
    assert log == ["given up"]
    assert "given up after 0.05 seconds" in caplog.text


async def test_a_scope_around_a_yield_ends_its_own_producer_while_another_one_is_cancelled() -> None:
    log: list[str] = []
    closing = asyncio.Event()

    @produces(scope="request")
    async def first() -> AsyncIterator[int]:
        yield 1
        await anyio.sleep(0.001)
        log.append("first")

    @produces(scope="request")
    async def second(first: int) -> AsyncIterator[str]:
        with anyio.move_on_after(0.05):
            yield ""
            closing.set()
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        log.append("second")

    @produces(scope="request")
    async def third(second: str) -> AsyncIterator[float]:
        yield 1.0
        await asyncio.sleep(0.08)  # meanwhile, the scope of the second one is cancelled
        log.append("third")

    for wanted, expected in ((str, ["second", "first"]), (float, ["third", "second", "first"])):
        async with Container().register(first, second, third) as c:
            with anyio.CancelScope() as scope:
                cancelling = asyncio.create_task(_when(closing, scope.cancel))
                async with c.request_scope():
                    await c.aget(wanted)
                await anyio.sleep_forever()
            await cancelling
        assert log == expected
        log.clear()
        closing.clear()


def fail_group_of_anyio(log: list[str], fail: Callable[[], Awaitable[None]]) -> Any:
    return anyio.create_task_group(), lambda tasks: tasks.start_soon(fail)


def fail_group_of_asyncio(log: list[str], fail: Callable[[], Awaitable[None]]) -> Any:
    return asyncio.TaskGroup(), lambda tasks: tasks.create_task(fail())


def time_out(log: list[str], fail: Callable[[], Awaitable[None]]) -> Any:
    return asyncio.timeout(0.005), lambda _: None


@pytest.mark.parametrize("own", [fail_group_of_anyio, fail_group_of_asyncio, time_out])
async def test_a_producer_in_its_own_task_is_closed_if_its_scope_is_cancelled_meanwhile(own: Any) -> None:
    log: list[str] = []
    ended = asyncio.Event()

    async def fail() -> None:
        await asyncio.sleep(0.005)
        raise ValueError("child")

    @produces(scope="request")
    async def first() -> AsyncIterator[int]:
        yield 1
        log.append("first")

    @produces(scope="request", own_task=True)
    async def second(first: int) -> AsyncIterator[str]:
        scope, begin = own(log, fail)
        try:
            async with scope as entered:
                begin(entered)
                yield ""
        finally:
            await asyncio.sleep(0)
            log.append("second")
            ended.set()

    async with Container().register(first, second) as c:
        with pytest.raises(ExceptionGroup) as raised:
            async with c.request_scope():
                await c.aget(str)
                await ended.wait()
    gc.collect()

    assert log == ["second", "first"]
    assert raised.group_contains((ValueError, TimeoutError))


async def test_a_producer_in_its_own_task_that_moves_on_closes_without_an_error() -> None:
    log: list[str] = []
    ended = asyncio.Event()

    @produces(scope="request", own_task=True)
    async def limited() -> AsyncIterator[str]:
        with anyio.move_on_after(0.005):
            yield ""
        await asyncio.sleep(0)
        log.append("closed")
        ended.set()

    async with Container().register(limited) as c, c.request_scope():
        await c.aget(str)
        await ended.wait()
    assert log == ["closed"]
