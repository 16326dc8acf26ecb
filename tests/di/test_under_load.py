"""64 threads and 1,000 tasks at once: each bean made once per scope, closed once, nothing left."""

import asyncio
import contextvars
import gc
import random
import threading
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.di.conftest import call_scope
from toolbox import Container, application_scoped, call_scoped, dependent, produces, request_scoped

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("only_new_garbage")]


class Made(Counter[str]):
    """Counts how often each bean was created and closed."""


@application_scoped
class Pool:
    def __init__(self, made: Made) -> None:
        made["pool"] += 1


@produces(scope="application")
def engine(pool: Pool, made: Made) -> Iterator[memoryview]:
    made["engine"] += 1
    yield memoryview(b"")
    made["engine closed"] += 1


class Session:
    pass


@produces(scope="request")
async def session(engine: memoryview) -> AsyncIterator[Session]:
    await asyncio.sleep(0)
    made = Session()
    SESSIONS.add(made)
    yield made
    await asyncio.sleep(0)
    CLOSED.append(id(made))


@request_scoped
class Basket:
    def __init__(self, engine: memoryview) -> None:
        BASKETS.add(self)

    def stop(self) -> None:
        CLOSED.append(id(self))


@dependent
class Line:
    def __init__(self, basket: Basket, pool: Pool) -> None:
        self.basket = basket


@request_scoped
class Order:
    def __init__(self, basket: Basket, session: Session, line: Line) -> None:
        self.basket, self.session, self.line = basket, session, line


@call_scoped
class Call:
    def __init__(self, basket: Basket) -> None:
        self.basket = basket


SESSIONS: weakref.WeakSet[Session] = weakref.WeakSet()
BASKETS: weakref.WeakSet[Basket] = weakref.WeakSet()
CLOSED: list[int] = []


async def test_many_threads_and_tasks_create_each_bean_once() -> None:
    made = Made()
    CLOSED.clear()
    container = Container().register(Pool, engine, session, Basket, Line, Order, Call).register_instance(made)
    start = threading.Event()

    async with container as c:

        async def one_request(number: int) -> None:
            async with c.request_scope():
                ask = [c.aget(Order) for _ in range(random.randrange(1, 4))]
                orders = await asyncio.gather(*ask)
                assert all(order is orders[0] for order in orders)
                assert (await c.aget(Line)).basket is orders[0].basket
                assert await c.aget(Session) is orders[0].session
                if number % 50 == 0:
                    in_context = contextvars.copy_context().run
                    loop = asyncio.get_running_loop()
                    assert await loop.run_in_executor(requests, in_context, c.get, Order) is orders[0]
                async with asyncio.TaskGroup() as group:
                    for _ in range(2):
                        group.create_task(one_call(orders[0].basket))

        async def one_call(basket: Basket) -> None:
            with call_scope(c) as scope:
                call = c.get(Call)
                await asyncio.sleep(0)
                assert c.get(Call) is call
                assert call.basket is basket
            await scope.aclose(None)

        def in_a_thread() -> None:
            start.wait()
            for _ in range(20):
                with c.request_scope():
                    basket = c.get(Basket)
                    assert c.get(Line).basket is basket
                    assert c.get(Call) is c.get(Call)

        # Threads that have ended: others may keep their last result for a moment.
        with ThreadPoolExecutor(64) as pool, ThreadPoolExecutor(4) as requests:
            threads = [pool.submit(in_a_thread) for _ in range(64)]
            start.set()
            await asyncio.gather(*(one_request(number) for number in range(1000)))
            await asyncio.to_thread(lambda: [thread.result() for thread in threads])
        assert made == {"pool": 1, "engine": 1}
        assert len(CLOSED) == 2 * 1000 + 64 * 20
    assert made == {"pool": 1, "engine": 1, "engine closed": 1}
    gc.collect()
    assert len(SESSIONS) == 0
    assert len(BASKETS) == 0


async def test_many_threads_share_one_request() -> None:
    made = Made()
    async with Container().register(Pool, engine, session, Basket, Line, Order, Call).register_instance(made) as c:
        for _ in range(20):
            async with c.request_scope():
                found = await asyncio.gather(*(asyncio.to_thread(c.get, Basket) for _ in range(8)), c.aget(Order))
                assert len({id(each) for each in found[:-1]} | {id(found[-1].basket)}) == 1


async def test_scopes_leave_no_objects_behind() -> None:
    @request_scoped
    class Bean:
        pass

    async with Container().register(Bean) as c:
        bean = None
        for _ in range(50):
            async with c.request_scope():
                bean = weakref.ref(c.get(Bean))
        gc.collect()
        before = len(gc.get_objects())
        for _ in range(2000):
            async with c.request_scope():
                bean = weakref.ref(c.get(Bean))
        gc.collect()
        assert bean is not None
        assert bean() is None
        assert len(gc.get_objects()) - before < 200
