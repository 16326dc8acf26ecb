"""How scopes close their beans."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.di.conftest import call_scope
from toolbox import (
    Container,
    Instance,
    application_scoped,
    compensate_for,
    dependent,
    produces,
    request_scoped,
    tool,
)

pytestmark = pytest.mark.anyio


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
        @tool
        def launch(self) -> None: ...

        @compensate_for(launch)
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
