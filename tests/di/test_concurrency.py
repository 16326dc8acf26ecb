"""Concurrent lookups of one bean, and beans that need themselves."""

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from toolbox import (
    Container,
    IllegalConfigurationError,
    Instance,
    application_scoped,
    produces,
    request_scoped,
)
from toolbox.di.creating import BeanStore

pytestmark = pytest.mark.anyio


async def test_threads_create_one_instance() -> None:
    made: list[int] = []
    barrier = threading.Barrier(8)

    @application_scoped
    class Slow:
        def __init__(self) -> None:
            made.append(1)
            time.sleep(0.01)

    async with Container().register(Slow) as c:

        def ask() -> Slow:
            barrier.wait()
            return c.get(Slow)

        with ThreadPoolExecutor(8) as pool:
            found = [each.result() for each in [pool.submit(ask) for _ in range(8)]]
    assert made == [1]
    assert len(set(map(id, found))) == 1


async def test_tasks_create_one_instance() -> None:
    made: list[int] = []

    @produces(scope="request")
    async def slow() -> AsyncIterator[object]:
        made.append(1)
        await asyncio.sleep(0.001)
        yield str(object())

    @request_scoped
    class Uses:
        def __init__(self, slow: Any = None) -> None:
            made.append(2)

    @produces(scope="request")
    async def text() -> str:
        made.append(1)
        await asyncio.sleep(0.001)
        return "x"

    @request_scoped
    class Reads:
        def __init__(self, text: str) -> None:
            made.append(2)
            self.text = text

    async with Container().register(text, Reads) as c, c.request_scope():
        found = await asyncio.gather(*(c.aget(Reads) for _ in range(10)))
    assert made == [1, 2]
    assert len(set(map(id, found))) == 1


async def test_threads_and_tasks_together_create_one_instance() -> None:
    made: list[str] = []
    started, go_on = threading.Event(), threading.Event()

    @application_scoped
    class Slow:
        def __init__(self) -> None:
            made.append(threading.current_thread().name)
            started.set()
            assert go_on.wait(60)

    @request_scoped
    class Uses:
        def __init__(self, slow: Slow) -> None:
            self.slow = slow

    async with Container().register(Slow, Uses) as c, c.request_scope():
        first = asyncio.create_task(asyncio.to_thread(c.get, Slow))
        await asyncio.to_thread(started.wait)
        tasks = [asyncio.create_task(c.aget(Uses)) for _ in range(3)]
        threads = [asyncio.create_task(asyncio.to_thread(c.get, Uses)) for _ in range(2)]
        # The loop does not stand still while a thread is making what its tasks want.
        for _ in range(5):
            await asyncio.sleep(0)
        assert not any(task.done() for task in tasks)
        go_on.set()
        slow = await first
        found = await asyncio.gather(*tasks, *threads)
    assert len(made) == 1
    assert all(each.slow is slow and each is found[0] for each in found)


async def test_tasks_of_several_loops_create_one_instance() -> None:
    made: list[int] = []

    @produces(scope="request")
    async def slow() -> int:
        made.append(1)
        await asyncio.sleep(0.01)
        return len(made)

    async with Container().register(slow) as c, c.request_scope():
        other = asyncio.to_thread(asyncio.run, c.aget(int))
        assert await asyncio.gather(c.aget(int), other) == [1, 1]


async def test_a_failed_creation_is_not_remembered() -> None:
    attempts: list[int] = []

    @application_scoped
    class Flaky:
        def __init__(self) -> None:
            attempts.append(1)
            if len(attempts) == 1:
                raise OSError("not yet")

    @produces(scope="request")
    async def flaky() -> int:
        attempts.append(1)
        if len(attempts) == 3:
            raise OSError("not yet")
        return 1

    async with Container().register(Flaky, flaky) as c, c.request_scope():
        with pytest.raises(OSError):
            c.get(Flaky)
        assert c.get(Flaky) is c.get(Flaky)
        with pytest.raises(OSError):
            await c.aget(int)
        assert await c.aget(int) == 1


async def test_a_waiter_tries_again_if_the_creator_fails() -> None:
    attempts: list[int] = []

    @produces(scope="request")
    async def flaky() -> int:
        attempts.append(1)
        number = len(attempts)
        await asyncio.sleep(0)
        if number < 3:
            raise OSError(str(number))
        return number

    async with Container().register(flaky) as c, c.request_scope():
        found = await asyncio.gather(*(c.aget(int) for _ in range(4)), return_exceptions=True)
    assert [str(each) for each in found] == ["1", "2", "3", "3"]
    assert len(attempts) == 3


async def test_a_waiter_takes_over_when_the_creator_is_cancelled() -> None:
    attempts: list[int] = []
    gate = asyncio.Event()

    @produces(scope="request")
    async def slow() -> AsyncIterator[int]:
        attempts.append(1)
        await gate.wait()
        yield len(attempts)

    async with Container().register(slow) as c, c.request_scope():
        first, second, third = (asyncio.create_task(c.aget(int)) for _ in range(3))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not second.done()
        third.cancel()
        gate.set()
        assert await second == 2
        for task in (first, third):
            with pytest.raises(asyncio.CancelledError):
                await task


async def test_a_cancelled_waiter_does_not_affect_the_creator() -> None:
    gate = asyncio.Event()

    @produces(scope="request")
    async def slow() -> int:
        await gate.wait()
        return 1

    async with Container().register(slow) as c, c.request_scope():
        first, second = asyncio.create_task(c.aget(int)), asyncio.create_task(c.aget(int))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        gate.set()
        assert await first == 1


# --- beans that want themselves


async def test_a_bean_that_looks_itself_up_during_creation_is_an_error() -> None:
    @application_scoped
    class A:
        def __init__(self, b: "Instance[B]") -> None:
            b.get()

    @application_scoped
    class B:
        def __init__(self, c: Instance[A]) -> None:
            c.get()

    async with Container().register(A, B) as c:
        with pytest.raises(IllegalConfigurationError, match="A -> B -> A"):
            c.get(A)
        with pytest.raises(IllegalConfigurationError, match="B -> A -> B"):
            await c.aget(B)


async def test_an_async_bean_that_looks_itself_up_during_creation_is_an_error() -> None:
    @produces(scope="application")
    async def first(c: Container) -> int:
        return len(await c.aget(str))

    @produces(scope="request")
    async def second(c: Container) -> str:
        return str(await asyncio.create_task(c.aget(float)))

    @produces(scope="request")
    async def third(c: Container) -> float:
        async with asyncio.timeout(60):
            return float((await asyncio.gather(c.aget(str)))[0])

    async with Container().register(second, third) as c, c.request_scope():
        with pytest.raises(IllegalConfigurationError, match="str -> float -> str"):
            await c.aget(str)


async def test_beans_that_wait_for_each_other_in_tasks_are_an_error() -> None:
    both = asyncio.Event()
    started: list[int] = []

    async def meet() -> None:
        started.append(1)
        if len(started) == 2:
            both.set()
        await both.wait()

    @produces(scope="request")
    async def first(c: Container) -> int:
        await meet()
        return int(await c.aget(str))

    @produces(scope="request")
    async def second(c: Container) -> str:
        await meet()
        return str(await c.aget(int))

    async with Container().register(first, second) as c, c.request_scope():
        async with asyncio.timeout(60):
            found = await asyncio.gather(c.aget(int), c.aget(str), return_exceptions=True)
    assert all(isinstance(each, IllegalConfigurationError) for each in found)


async def test_beans_that_wait_for_each_other_in_threads_are_an_error() -> None:
    meeting = threading.Barrier(2)

    def once(meet: Callable[[], Any]) -> Callable[[], None]:
        met: list[int] = []

        def call() -> None:
            if not met:
                met.append(1)
                meet()

        return call

    meet_a, meet_b = once(meeting.wait), once(meeting.wait)

    @application_scoped
    class A:
        def __init__(self, b: "Instance[B]") -> None:
            meet_a()
            b.get()

    @application_scoped
    class B:
        def __init__(self, a: Instance[A]) -> None:
            meet_b()
            a.get()

    async with Container().register(A, B) as c:
        async with asyncio.timeout(60):
            found = await asyncio.gather(
                asyncio.to_thread(c.get, A), asyncio.to_thread(c.get, B), return_exceptions=True
            )
    assert any(isinstance(each, IllegalConfigurationError) for each in found)


class Settled(BeanStore):
    """A scope in which a bean was settled between the look at `making` and the wait."""

    def __init__(self) -> None:
        self.store, self.making = {1: "bean"}, {}


def wait_on_loop(scope: Settled) -> None:
    asyncio.run(scope.wait_until_settled(1))


def wait_on_thread(scope: Settled) -> None:
    assert scope._wait_on_thread(1, threading.get_ident())


@pytest.mark.parametrize("wait", [wait_on_loop, wait_on_thread])
def test_waiting_for_a_settled_bean_wakes_all_and_does_not_keep_the_scope(wait: Callable[[Settled], None]) -> None:
    scope, woken = Settled(), threading.Event()
    scope._notify(1, woken.set)  # another one has just begun to wait

    wait(scope)

    assert woken.is_set()
    kept = weakref.ref(scope)
    del scope
    gc.collect()
    assert kept() is None


async def test_slow_beans_do_not_delay_others() -> None:
    making, go_on = threading.Event(), threading.Event()

    @application_scoped
    class Slow:
        def __init__(self) -> None:
            making.set()
            assert go_on.wait(60)

    @application_scoped
    class Quick:
        pass

    async with Container().register(Slow, Quick) as c:
        task = asyncio.create_task(asyncio.to_thread(c.get, Slow))
        await asyncio.to_thread(making.wait)
        assert c.get(Quick) is await c.aget(Quick)
        go_on.set()
        await task
