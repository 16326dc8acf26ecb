"""Lifetimes of beans, and closing them."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from tests.di.conftest import call_scope
from toolbox import (
    Container,
    Instance,
    ScopeNotActiveError,
    ToolboxSettings,
    application_scoped,
    call_scoped,
    compensate_for,
    dependent,
    produces,
    request_scoped,
    tool,
)
from toolbox.container import internals_of

pytestmark = pytest.mark.anyio


@application_scoped
class Pool:
    pass


@request_scoped
class Basket:
    def __init__(self, pool: Pool) -> None:
        self.pool = pool


@call_scoped
class Transaction:
    def __init__(self, basket: Basket) -> None:
        self.basket = basket


@dependent
class Line:
    def __init__(self, basket: Basket) -> None:
        self.basket = basket


class Unmarked:
    pass


def container() -> Container:
    return Container().register(Pool, Basket, Transaction, Line, Unmarked)


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
        found = [task.result() for task in tasks] + await asyncio.gather(ask(), asyncio.to_thread(c.get, Basket))
        assert len(set(map(id, found))) == 1


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


# --- closing


class Log(list[str]):
    pass


def test_beans_are_closed_in_reverse_order_of_creation() -> None:
    log = Log()

    @produces(scope="request")
    def first(log: Log) -> Iterator[int]:
        yield 1
        log.append("first")

    @produces(scope="request")
    def second(first: int, log: Log) -> Iterator[str]:
        yield "2"
        log.append("second")

    @request_scoped
    class Third:
        def __init__(self, second: str, log: Log) -> None:
            self.log = log

        def stop(self) -> None:
            self.log.append("third")

    c = Container().register(first, second, Third).register_instance(log)
    with c:
        with c.request_scope():
            c.get(Third)
        assert log == ["third", "second", "first"]


async def test_async_beans_are_closed() -> None:
    log = Log()

    @produces(scope="application")
    async def first(log: Log) -> AsyncIterator[int]:
        yield 1
        await asyncio.sleep(0)
        log.append("first")

    @application_scoped
    class Second:
        def __init__(self, first: int, log: Log) -> None:
            self.log = log

        async def stop(self) -> None:
            await asyncio.sleep(0)
            self.log.append("second")

    async with Container().register(first, Second).register_instance(log) as c:
        c.get(Second)
    assert log == ["second", "first"]


async def test_a_dependent_bean_is_closed_with_its_owner() -> None:
    log = Log()

    @dependent
    class Part:
        def __init__(self, log: Log) -> None:
            self.log = log

        def stop(self) -> None:
            self.log.append("part")

    @application_scoped
    class Long:
        def __init__(self, part: Part) -> None:
            pass

    @request_scoped
    class Short:
        def __init__(self, part: Part) -> None:
            pass

    async with Container().register(Part, Long, Short).register_instance(log) as c:
        async with c.request_scope():
            c.get(Long)
        assert log == []
        async with c.request_scope():
            with call_scope(c) as call:
                c.get(Short)
            await call.aclose(None)
            assert log == []
        assert log == ["part"]
        c.get(Part)
        assert log == ["part"]
    assert log == ["part"] * 3


async def test_an_instance_closes_dependent_beans_with_the_current_scope() -> None:
    log = Log()

    @dependent
    class Part:
        def __init__(self, log: Log) -> None:
            self.log = log

        def stop(self) -> None:
            self.log.append("part")

    @application_scoped
    class Long:
        def __init__(self, part: Instance[Part]) -> None:
            self.part = part

    async with Container().register(Part, Long).register_instance(log) as c:
        async with c.request_scope():
            c.get(Long).part.get()
            await c.get(Long).part.aget()
            assert log == []
        assert log == ["part", "part"]


async def test_dependent_beans_do_not_accumulate_in_an_application_bean() -> None:
    import gc
    import weakref

    @dependent
    class Part:
        pass

    @application_scoped
    class Long:
        def __init__(self, part: Instance[Part]) -> None:
            self.part = part

    async with Container().register(Part, Long) as c:
        made = [weakref.ref(c.get(Long).part.get()) for _ in range(10)]
        gc.collect()
        assert [each for each in made if each() is not None] == []


async def test_all_beans_are_closed_if_one_fails_to_close() -> None:
    log = Log()

    @produces(scope="request")
    def first(log: Log) -> Iterator[int]:
        yield 1
        log.append("first")
        raise ValueError("first")

    @produces(scope="request")
    async def second(first: int, log: Log) -> AsyncIterator[str]:
        yield "2"
        log.append("second")
        raise KeyError("second")

    @produces(scope="request")
    def third(second: str, log: Log) -> Iterator[float]:
        yield 3.0
        log.append("third")

    async with Container().register(first, second, third).register_instance(log) as c:
        with pytest.raises(ExceptionGroup) as raised:
            async with c.request_scope():
                await c.aget(float)
        assert log == ["third", "second", "first"]
        assert [type(each) for each in raised.value.exceptions] == [KeyError, ValueError]


@pytest.mark.parametrize("asynchronous", [True, False])
async def test_the_exception_that_ends_a_scope_is_thrown_into_its_generators(asynchronous: bool) -> None:
    seen: list[BaseException] = []

    @produces(scope="request")
    def first() -> Iterator[int]:
        try:
            yield 1
        except ValueError as error:
            seen.append(error)
            raise

    @produces(scope="request")
    def second(first: int) -> Iterator[str]:
        try:
            yield "2"
        except ValueError as error:
            seen.append(error)  # and is not raised again: the others see it all the same

    @produces(scope="request")
    async def third(second: str) -> AsyncIterator[float]:
        try:
            yield 3.0
        except ValueError as error:
            seen.append(error)
            raise

    error = ValueError("the request failed")
    async with Container().register(first, second, third) as c:
        with pytest.raises(ValueError) as raised:
            if asynchronous:
                async with c.request_scope():
                    await c.aget(float)
                    raise error
            else:
                with c.request_scope():
                    c.get(str)
                    raise error
    assert raised.value is error
    assert seen == [error] * (3 if asynchronous else 2)


@pytest.mark.parametrize("error", [StopIteration("a"), StopAsyncIteration("b"), KeyError("c"), KeyboardInterrupt()])
async def test_exceptions_pass_through_generators_unchanged(error: BaseException) -> None:
    @produces(scope="request")
    def first() -> Iterator[int]:
        yield 1

    @produces(scope="request")
    async def second(first: int) -> AsyncIterator[str]:
        yield "2"

    async with Container().register(first, second) as c:
        with pytest.raises(type(error)) as raised:
            async with c.request_scope():
                await c.aget(str)
                raise error
    assert raised.value is error


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_errors_that_a_producer_raises_while_closing_are_reported(asynchronous: bool) -> None:
    @produces(scope="request")
    def plain() -> Iterator[int]:
        try:
            yield 1
        except KeyError as error:
            raise RuntimeError("cannot roll back") from error

    @produces(scope="request")
    async def awaited() -> AsyncIterator[str]:
        try:
            yield "1"
        except KeyError as error:
            raise RuntimeError("cannot roll back") from error

    async with Container().register(plain, awaited) as c:
        with pytest.raises(ExceptionGroup) as raised:
            async with c.request_scope():
                await c.aget(str if asynchronous else int)
                raise KeyError("the request failed")
    [failure] = raised.value.exceptions
    assert str(failure) == "cannot roll back"


async def test_an_exception_that_ends_the_container_is_thrown_into_application_beans() -> None:
    seen: list[BaseException] = []

    @produces(scope="application")
    async def first() -> AsyncIterator[int]:
        try:
            yield 1
        except KeyError as error:
            seen.append(error)
            raise

    with pytest.raises(KeyError):
        async with Container().register(first):
            raise KeyError("the program failed")
    assert len(seen) == 1


async def test_a_producer_must_yield_once() -> None:
    @produces(scope="request")
    def twice() -> Iterator[int]:
        yield 1
        yield 2

    @produces(scope="request")
    async def never() -> AsyncIterator[str]:
        for each in ():
            yield each

    async with Container().register(twice, never) as c:
        with pytest.raises(ExceptionGroup) as raised:
            async with c.request_scope():
                c.get(int)
        assert "yielded a second time" in str(raised.value.exceptions[0])
        async with c.request_scope():
            with pytest.raises(RuntimeError, match="did not yield"):
                await c.aget(str)


async def test_only_stop_methods_without_arguments_are_called() -> None:
    @request_scoped
    class Vehicle:
        def stop(self, at: str) -> None:
            raise AssertionError("this is the program's own")

    @request_scoped
    class Field:
        stop = 3

    class Robot:
        @tool
        def stop(self) -> None:
            raise AssertionError("only a model calls a tool")

    class Rover(Robot):
        def stop(self) -> None:
            raise AssertionError("an override of a tool is a tool")

    class Rocket:
        @compensate_for("launch")
        async def stop(self) -> None:
            raise AssertionError("only a failure calls it")

    @produces(scope="request")
    def made() -> Engine:
        return Engine()

    beans = (Vehicle, Field, *map(request_scoped, (Robot, Rover, Rocket)), made)
    container = Container().register(*beans).register_instance(Engine(), name="given")
    async with container as c, c.request_scope():
        c.get(Vehicle)
        c.get(Field)
        c.get(Robot)
        c.get(Rover)
        c.get(Rocket)
        c.get(Engine)
        c.get(Engine, "given")


class Engine:
    def stop(self) -> None:
        raise AssertionError("only the code of a producer closes its bean")


async def test_created_beans_are_closed_if_the_creation_of_others_fails() -> None:
    log = Log()

    @produces(scope="request")
    def first(log: Log) -> Iterator[int]:
        yield 1
        log.append("first")

    @request_scoped
    class Broken:
        def __init__(self, first: int) -> None:
            raise OSError("no connection")

    async with Container().register(first, Broken).register_instance(log) as c, c.request_scope():
        with pytest.raises(OSError):
            c.get(Broken)
    assert log == ["first"]


# --- cancellation


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
    import anyio

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
    import anyio

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
    import anyio

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
    import anyio

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
    import anyio

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
