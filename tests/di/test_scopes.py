"""Scopes of beans: which instance code gets, and what happens after a scope has ended."""

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.di.conftest import call_scope
from toolbox import (
    Container,
    ScopeNotActiveError,
    application_scoped,
    call_scoped,
    dependent,
    produces,
)
from toolbox.container import internals_of

from .scoped_beans import (
    Basket,
    Line,
    Pool,
    Transaction,
    Unmarked,
    container,
)

pytestmark = pytest.mark.anyio


async def test_an_application_bean_is_created_once() -> None:
    async with container() as c:
        pool = c.get(Pool)
        async with c.request_scope():
            assert c.get(Pool) is pool
            assert await c.aget(Pool) is pool


async def test_a_request_bean_is_created_once_per_request_scope() -> None:
    async with container() as c:
        async with c.request_scope():
            first = c.get(Basket)
            assert await c.aget(Basket) is first
        async with c.request_scope():
            assert c.get(Basket) is not first
            assert c.get(Basket).pool is first.pool


async def test_a_dependent_bean_is_created_for_each_lookup() -> None:
    async with container() as c, c.request_scope():
        assert c.get(Line) is not c.get(Line)
        assert c.get(Line).basket is c.get(Line).basket
        assert c.get(Unmarked) is not c.get(Unmarked)


async def test_a_call_bean_is_created_once_per_tool_call() -> None:
    async with container() as c, c.request_scope():
        with call_scope(c) as call:
            first = c.get(Transaction)
            assert c.get(Transaction) is first
        await call.aclose(None)
        with call_scope(c) as other:
            assert c.get(Transaction) is not first
            assert c.get(Transaction).basket is first.basket
        await other.aclose(None)


async def test_outside_a_tool_call_a_call_bean_is_created_once_per_request() -> None:
    async with container() as c, c.request_scope():
        assert c.get(Transaction) is c.get(Transaction)


async def test_a_call_scope_works_without_a_request_scope() -> None:
    @call_scoped
    class Alone:
        pass

    async with Container().register(Alone) as c:
        with pytest.raises(ScopeNotActiveError):
            c.get(Alone)
        with call_scope(c) as call:
            assert c.get(Alone) is c.get(Alone)
        await call.aclose(None)


async def test_nested_call_scopes_are_independent() -> None:
    async with container() as c, c.request_scope():
        with call_scope(c):
            outer = c.get(Transaction)
            with call_scope(c):
                assert c.get(Transaction) is not outer
                assert c.get(Transaction).basket is outer.basket
            assert c.get(Transaction) is outer


@pytest.mark.parametrize("wanted", [Basket, Transaction, Line])
async def test_beans_are_rejected_outside_their_scope(wanted: type) -> None:
    async with container() as c:
        with pytest.raises(ScopeNotActiveError, match="no request scope is active"):
            c.get(wanted)
        with pytest.raises(ScopeNotActiveError, match="no request scope is active"):
            await c.aget(wanted)


async def test_a_request_scope_inside_another_is_independent() -> None:
    async with container() as c, c.request_scope():
        outer = c.get(Basket)
        async with c.request_scope():
            assert c.get(Basket) is not outer
        assert c.get(Basket) is outer


async def test_a_request_scope_can_be_entered_synchronously() -> None:
    async with container() as c:
        with c.request_scope():
            assert c.get(Basket) is c.get(Basket)


async def test_a_scope_can_be_entered_only_once() -> None:
    async with container() as c:
        scope = c.request_scope()
        async with scope:
            with pytest.raises(Exception, match="already entered"):
                await scope.__aenter__()


async def test_tasks_and_threads_of_a_request_share_its_beans() -> None:
    async with container() as c, c.request_scope():

        async def ask() -> Basket:
            await asyncio.sleep(0)
            return c.get(Basket)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask()) for _ in range(5)]
        others = await asyncio.gather(ask(), asyncio.to_thread(c.get, Basket))
        assert len({id(each) for each in (*(task.result() for task in tasks), *others)}) == 1


async def test_anyio_tasks_of_a_request_share_its_beans() -> None:
    import anyio

    found: list[Basket] = []
    async with container() as c, c.request_scope():

        async def ask() -> None:
            found.append(await c.aget(Basket))

        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            group.start_soon(ask)
        found.append(await anyio.to_thread.run_sync(c.get, Basket))
    assert len(set(map(id, found))) == 1


async def test_a_generator_consumed_elsewhere_keeps_the_scope_of_its_context() -> None:
    async with container() as c:

        async def baskets() -> AsyncIterator[Basket]:
            async with c.request_scope():
                yield c.get(Basket)
                yield c.get(Basket)

        stream = baskets()
        first = await anext(stream)
        second = await anext(stream)
        assert first is second
        await stream.aclose()  # type: ignore[attr-defined]  # a generator behind the annotation


async def test_scopes_of_two_containers_are_independent() -> None:
    async with container() as a, container() as b, a.request_scope():
        of_a = a.get(Basket)
        with pytest.raises(ScopeNotActiveError):
            b.get(Basket)
        async with b.request_scope():
            assert b.get(Basket) is not of_a
            assert a.get(Basket) is of_a
            assert b.get(Pool) is not a.get(Pool)
        async with a.request_scope():
            assert a.get(Basket) is not of_a


# --- after the end


async def test_lookups_in_a_request_scope_that_has_ended_are_rejected() -> None:
    @produces(scope="request")
    async def session() -> AsyncIterator[float]:
        yield 1.0

    async with container().register(session) as c:
        go_on = asyncio.Event()

        async def late() -> list[BaseException]:
            await go_on.wait()
            errors: list[BaseException] = []
            for wanted in (Basket, float, Line, Transaction):
                try:
                    await c.aget(wanted)
                except ScopeNotActiveError as error:
                    errors.append(error)
            assert c.get(Pool) is c.get(Pool)
            assert c.get(Unmarked) is not None
            return errors

        async with c.request_scope():
            c.get(Basket)
            await c.aget(float)
            task = asyncio.create_task(late())
        async with c.request_scope():
            c.get(Basket)
            go_on.set()
            errors = await task
        assert len(errors) == 4
        assert "request scope has ended" in str(errors[0])


async def test_a_request_scope_and_its_beans_are_freed_when_it_ends() -> None:
    async with container() as c:
        gc.disable()
        try:
            async with c.request_scope() as scope:
                freed = [weakref.ref(scope), weakref.ref(c.get(Basket))]
            del scope
            assert [each() for each in freed] == [None, None]
        finally:
            gc.enable()


async def test_a_bean_that_is_created_too_late_is_closed() -> None:
    log: list[str] = []
    making, go_on = asyncio.Event(), asyncio.Event()

    @produces(scope="request")
    async def slow() -> AsyncIterator[int]:
        making.set()
        await go_on.wait()
        yield 1
        log.append("closed")

    async with Container().register(slow) as c:
        async with c.request_scope():
            task = asyncio.create_task(c.aget(int))
            await making.wait()
        go_on.set()
        with pytest.raises(ScopeNotActiveError):
            await task
        assert log == ["closed"]


async def test_no_beans_are_created_in_a_scope_that_closes() -> None:
    seen: list[str] = []

    @produces(scope="request")
    async def first(c: Container) -> AsyncIterator[int]:
        yield 1
        try:
            c.get(Basket)
        except ScopeNotActiveError as error:
            seen.append(str(error))

    async with container().register(first) as c, c.request_scope():
        await c.aget(int)
    assert "has ended" in seen[0]


async def test_a_producer_with_its_own_task_can_hold_a_task_group() -> None:
    import anyio

    log: list[str] = []

    @produces(scope="request", own_task=True)
    async def group() -> AsyncIterator[int]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep_forever)
            try:
                yield 1
            except ValueError:
                log.append("seen")
            finally:
                tasks.cancel_scope.cancel()
        log.append("closed")

    async with Container().register(group) as c:
        async with c.request_scope():
            assert await asyncio.create_task(c.aget(int)) == 1
        assert log == ["closed"]
        with pytest.raises(ValueError):
            async with c.request_scope():
                await asyncio.create_task(c.aget(int))
                raise ValueError
        assert log == ["closed", "seen", "closed"]


async def test_errors_in_a_producer_with_its_own_task_reach_the_caller() -> None:
    @produces(scope="request", own_task=True)
    async def failing() -> AsyncIterator[int]:
        raise OSError("no server")
        yield 1

    async with Container().register(failing) as c, c.request_scope():
        with pytest.raises(OSError, match="no server"):
            await c.aget(int)


async def test_an_async_bean_is_rejected_in_a_scope_that_cannot_await_its_end() -> None:
    @produces(scope="request")
    async def session() -> AsyncIterator[int]:
        yield 1

    async with Container().register(session) as c:
        with c.request_scope(), pytest.raises(ScopeNotActiveError, match="async with"):
            await c.aget(int)


def test_a_synchronous_program_closes_async_beans_on_the_containers_loop() -> None:
    log: list[tuple[str, str]] = []

    @produces(scope="application")
    async def first() -> AsyncIterator[int]:
        yield 1
        log.append(("async", threading.current_thread().name))

    @produces(scope="application")
    def second(first: int) -> Iterator[str]:
        yield "2"
        log.append(("sync", threading.current_thread().name))

    with Container().register(first, second) as c:
        assert c.get(str) == "2"
        assert c.get(int) == 1
    assert log == [("sync", "MainThread"), ("async", "toolbox-loop")]


async def test_stopping_synchronously_on_a_running_loop_does_not_block() -> None:
    log: list[str] = []

    @application_scoped
    class Client:
        async def stop(self) -> None:
            log.append(threading.current_thread().name)

    @produces(scope="application")
    async def session(client: Client) -> AsyncIterator[int]:
        yield 1
        log.append(threading.current_thread().name)

    with Container().register(Client) as c:
        c.get(Client)
        await c.aget(Client)
    with Container().register(Client, session) as c:
        await c.aget(int)
    assert log == ["toolbox-loop"] * 3


async def test_a_call_scope_closes_beans_on_the_thread_that_created_them() -> None:
    log: list[tuple[str, int]] = []

    @produces(scope="call")
    async def session() -> AsyncIterator[int]:
        yield 1
        log.append(("session", threading.get_ident()))

    @produces(scope="call")
    def connection(session: int) -> Iterator[str]:
        ident = threading.get_ident()
        yield "connection"
        log.append(("connection", threading.get_ident() - ident))

    @dependent
    class Tool:
        def __init__(self, connection: str) -> None:
            self.connection = connection

    async with Container().register(session, connection, Tool) as c, c.request_scope():
        with call_scope(c) as scope:
            await internals_of(c).prepare(Tool)

            def call() -> str:
                try:
                    return c.get(Tool).connection
                finally:
                    scope.close_here(None)

            assert await asyncio.to_thread(call) == "connection"
            assert log == [("connection", 0)]
        await scope.aclose(None)
        assert log == [("connection", 0), ("session", threading.get_ident())]


async def test_prepare_creates_async_dependent_beans() -> None:
    @produces(scope="dependent")
    async def client() -> int:
        return 7

    @dependent
    class Tool:
        def __init__(self, client: int) -> None:
            self.client = client

    async with Container().register(client, Tool) as c:
        with call_scope(c):
            await internals_of(c).prepare(Tool)
            assert (await asyncio.to_thread(c.get, Tool)).client == 7
            await internals_of(c).prepare(int)
            assert c.get(int) == 7


async def test_a_task_group_can_span_a_yield_if_one_task_creates_and_closes_it() -> None:
    import anyio
    from anyio.abc import TaskGroup

    log: list[str] = []

    def producer(scope: Any) -> Any:
        @produces(scope=scope)
        async def group() -> AsyncIterator[TaskGroup]:
            async with anyio.create_task_group() as tasks:
                try:
                    yield tasks
                finally:
                    tasks.cancel_scope.cancel()
            log.append(scope)

        return group

    async with Container().register(producer("application")) as c:
        c.get(TaskGroup).start_soon(anyio.sleep_forever)
    async with Container().register(producer("request")) as c, c.request_scope():
        (await c.aget(TaskGroup)).start_soon(anyio.sleep_forever)
    assert log == ["application", "request"]


async def test_context_variables_set_by_a_producer_reach_the_caller() -> None:
    from contextvars import ContextVar

    variable = ContextVar("variable", default=0)

    @produces(scope="request")
    async def value() -> AsyncIterator[int]:
        token = variable.set(5)
        yield 1
        variable.reset(token)

    async with Container().register(value) as c:
        async with c.request_scope():
            await c.aget(int)
            assert variable.get() == 5
        assert variable.get() == 0
