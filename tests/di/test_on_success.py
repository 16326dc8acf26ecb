"""Tests `@on_success`: in which scopes, in which order and where the methods run, and what their errors do."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Protocol

import pytest

from toolbox import (
    Container,
    Inject,
    RunSuspendedError,
    ScopeNotActiveError,
    application_scoped,
    call_scoped,
    decorates,
    dependent,
    on_start,
    on_success,
    produces,
    request_scoped,
)

pytestmark = pytest.mark.anyio

log: list[str] = []


@pytest.fixture(autouse=True)
def _forget() -> None:
    log.clear()


@request_scoped
class Outbox:
    @on_success
    async def send(self) -> None:
        await asyncio.sleep(0)
        log.append("sent")


@request_scoped
class Transaction:
    def __init__(self, outbox: Outbox) -> None: ...

    @on_success
    def commit(self) -> None:
        log.append("committed")


def failing(error: BaseException) -> type[Any]:
    @request_scoped
    class Failing:
        @on_success
        def commit(self) -> None:
            log.append("failing")
            raise error

    return Failing


# --- when


async def test_the_methods_are_called_in_the_order_in_which_the_beans_were_made() -> None:
    async with Container().register(Transaction, Outbox) as container:
        async with container.request_scope():
            await container.aget(Transaction)
            log.append("worked")

        assert log == ["worked", "sent", "committed"]


def test_threads_without_a_loop_call_the_same_methods() -> None:
    with Container().register(Transaction, Outbox) as container:
        with container.request_scope():
            container.get(Transaction)
            log.append("worked")

        assert log == ["worked", "sent", "committed"]


async def test_only_beans_that_were_made_are_asked_and_only_once() -> None:
    async with Container().register(Transaction, Outbox) as container:
        async with container.request_scope():
            assert await container.aget(Outbox) is await container.aget(Outbox)

        assert log == ["sent"]


async def test_work_that_failed_calls_nothing() -> None:
    container = Container().register(Transaction, Outbox)
    async with container:
        with pytest.raises(LookupError):
            async with container.request_scope():
                await container.aget(Transaction)
                raise LookupError
    with container, pytest.raises(LookupError), container.request_scope():
        container.get(Transaction)
        raise LookupError

    assert log == []


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RunSuspendedError("7"), ["committed"]),
        (ExceptionGroup("", [RunSuspendedError("7"), RunSuspendedError("8")]), ["committed"]),
        (ExceptionGroup("", [RunSuspendedError("7"), LookupError()]), []),
    ],
    ids=["one", "a group", "a group with a failure"],
)
async def test_a_suspension_has_not_failed(error: Exception, expected: list[str]) -> None:
    async with Container().register(Transaction, Outbox) as container:
        with pytest.raises(type(error)):
            async with container.request_scope():
                await container.aget(Transaction)
                raise error

    assert log == (["sent", *expected] if expected else [])


async def test_a_cancelled_request_calls_nothing() -> None:
    async with Container().register(Transaction, Outbox) as container:
        began = asyncio.Event()

        async def work() -> None:
            async with container.request_scope():
                await container.aget(Transaction)
                began.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(work())
        await began.wait()
        task.cancel()
        await asyncio.wait([task])

    assert log == []


async def test_a_cancellation_waits_until_the_methods_have_ended() -> None:
    began, may_end = asyncio.Event(), asyncio.Event()

    @request_scoped
    class Slow:
        @on_success
        async def commit(self) -> None:
            began.set()
            await may_end.wait()
            log.append("slow")

    async with Container().register(Slow, Transaction, Outbox) as container:

        async def work() -> None:
            async with container.request_scope():
                await container.aget(Slow)
                await container.aget(Transaction)

        task = asyncio.create_task(work())
        await began.wait()
        task.cancel()
        await asyncio.sleep(0)
        may_end.set()
        await asyncio.wait([task])

        assert task.cancelled()
    assert log == ["slow", "sent", "committed"]


async def test_beans_that_a_method_makes_are_asked_too() -> None:
    @request_scoped
    class Late:
        @on_success
        async def make(self) -> None:
            await container.aget(Transaction)
            log.append("late")

    container = Container().register(Late, Transaction, Outbox)
    async with container, container.request_scope():
        await container.aget(Late)

    assert log == ["late", "sent", "committed"]


async def test_the_scope_is_still_open() -> None:
    class Connection: ...

    @produces(scope="request")
    async def connection() -> AsyncIterator[Connection]:
        yield Connection()
        log.append("closed")

    @request_scoped
    class Unit:
        def __init__(self, connection: Connection) -> None:
            self._connection = connection

        @on_success
        async def commit(self) -> None:
            assert await container.aget(Connection) is self._connection
            log.append("committed")

    container = Container().register(connection, Unit)
    async with container, container.request_scope():
        await container.aget(Unit)

    assert log == ["committed", "closed"]


async def test_a_request_inside_of_another_calls_its_own_beans_only() -> None:
    async with Container().register(Outbox) as container, container.request_scope():
        await container.aget(Outbox)
        async with container.request_scope():
            await container.aget(Outbox)
        log.append("inner ended")

    assert log == ["sent", "inner ended", "sent"]


# --- errors


@pytest.mark.parametrize("on_thread", [False, True], ids=["async", "def"])
async def test_what_a_method_raises_is_the_error_of_the_work(on_thread: bool) -> None:
    class Connection: ...

    @produces(scope="request")
    def connection() -> Iterator[Connection]:
        try:
            yield Connection()
        except LookupError as error:
            log.append(f"rolled back: {error}")
            raise

    bad = failing(LookupError("constraint"))
    container = Container().register(connection, bad, Outbox)

    def work() -> None:
        with container, container.request_scope():
            for each in (Connection, bad, Outbox):
                container.get(each)

    async def work_async() -> None:
        async with container, container.request_scope():
            for each in (Connection, bad, Outbox):
                await container.aget(each)

    with pytest.raises(LookupError, match="constraint"):
        await (asyncio.to_thread(work) if on_thread else work_async())

    assert log == ["failing", "rolled back: constraint"]


# --- where


async def test_a_def_method_does_not_block_the_event_loop() -> None:
    threads: dict[str, int] = {}

    @request_scoped
    class Unit:
        @on_success
        def on_thread(self) -> None:
            threads["def"] = threading.get_ident()
            assert container.get(Unit) is self

        @on_success
        async def on_loop(self) -> None:
            threads["async"] = threading.get_ident()

    container = Container().register(Unit)
    async with container, container.request_scope():
        await container.aget(Unit)

    assert threads["async"] == threading.get_ident() != threads["def"]


def test_a_thread_calls_def_methods_itself_and_awaits_on_the_containers_loop() -> None:
    threads: dict[str, Any] = {}

    @request_scoped
    class Unit:
        @on_success
        def here(self) -> None:
            threads["def"] = threading.get_ident()

        @on_success
        async def on_loop(self) -> None:
            threads["async"] = asyncio.get_running_loop()
            assert container.get(Unit) is self

    container = Container().register(Unit)

    async def loop_of_the_container() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    with container:
        with container.request_scope():
            container.get(Unit)
        here = threading.get_ident()

    assert threads["def"] == here
    assert threads["async"].is_closed()  # that of the container, which has stopped


async def test_a_scope_that_blocks_the_loop_cannot_await_a_method() -> None:
    async with Container().register(Outbox) as container:
        blocked = pytest.raises(ScopeNotActiveError, match=r"Outbox\.send: its scope was entered with `with`")
        with blocked, container.request_scope():
            container.get(Outbox)


# --- which beans


class Port(Protocol):
    @on_success
    def finish(self) -> None: ...


class Base:
    @on_success
    def finish(self) -> None:
        log.append("base")


class Changed(Base):
    def finish(self) -> None:
        log.append("changed")


def make_produced(returned: Any, declared: Any) -> Callable[..., Any]:
    def make() -> Any:
        return returned()

    make.__annotations__["return"] = declared
    return produces(scope="request")(make)


@pytest.mark.parametrize(
    ("declared", "returned", "expected"),
    [(Base, Base, "base"), (Base, Changed, "changed"), (Port, Changed, "changed")],
    ids=["its class", "a subclass", "a protocol"],
)
async def test_produced_beans_are_asked_by_what_they_are(declared: Any, returned: Any, expected: str) -> None:
    async with Container().register(make_produced(returned, declared)) as container, container.request_scope():
        await container.aget(declared)

    assert log == [expected]


async def test_one_object_that_is_the_bean_of_two_types_is_asked_once() -> None:
    @produces(scope="request")
    def port(base: Changed) -> Port:
        return base

    @produces(scope="request")
    def changed() -> Changed:
        return Changed()

    async with Container().register(port, changed) as container, container.request_scope():
        await container.aget(Port)

    assert log == ["changed"]


async def test_a_decorator_with_the_method_takes_the_place_of_its_bean() -> None:
    class Unit(Protocol):
        @on_success
        def finish(self) -> None: ...

    @request_scoped
    class Plain(Unit):
        def finish(self) -> None:
            log.append("plain")

    @decorates(Unit)
    class Around(Unit):
        def __init__(self, inner: Unit) -> None:
            self._inner = inner

        def finish(self) -> None:
            self._inner.finish()
            log.append("around")

    async with Container().register(Plain, Around) as container, container.request_scope():
        await container.aget(Unit)

    assert log == ["plain", "around"]


async def test_a_seed_in_place_of_a_bean_is_asked() -> None:
    class Fake(Transaction):
        def __init__(self) -> None: ...

        def commit(self) -> None:
            log.append("fake")

    container = Container().register(Transaction, Outbox)
    async with container, container.request_scope({Transaction: Fake()}):
        await container.aget(Transaction)

    assert log == ["fake"]


# --- functions with a scope of their own


async def test_an_injected_coroutine_returns_after_the_methods() -> None:
    container = Container().register(Transaction, Outbox)

    @container.injected
    async def job(unit: Inject[Transaction]) -> str:
        return "done"

    async with container:
        assert await job() == "done"
        assert log == ["sent", "committed"]


def test_an_injected_function_returns_after_the_methods_and_raises_their_error() -> None:
    bad = failing(LookupError("constraint"))
    container = Container().register(Transaction, Outbox, bad)

    @container.injected
    def job(unit: Inject[Transaction]) -> str:
        return "done"

    @container.injected
    def broken(unit: Inject[bad]) -> str:  # type: ignore[valid-type]
        return "done"

    with container:
        assert job() == "done"
        assert log == ["sent", "committed"]
        with pytest.raises(LookupError, match="constraint"):
            broken()


def test_an_error_at_the_end_of_a_start_function_ends_the_start() -> None:
    bad = failing(LookupError("constraint"))

    @on_start
    def load(unit: Inject[bad]) -> None:  # type: ignore[valid-type]
        log.append("loaded")

    with pytest.raises(LookupError, match="constraint"), Container().register(load, bad):
        pass
    assert log == ["loaded", "failing"]


# --- problems at start


def make_unit() -> type[Any]:
    class Unit:
        @on_success
        def commit(self) -> None: ...

    return Unit


@pytest.mark.parametrize(
    ("mark", "scope"),
    [(application_scoped, "application"), (call_scoped, "call"), (dependent, "dependent"), (None, "dependent")],
    ids=["application", "call", "dependent", "no mark"],
)
def test_on_other_beans_it_is_a_problem(mark: Any, scope: str) -> None:
    unit = make_unit()
    [problem] = Container().register(mark(unit) if mark is not None else unit).check()

    assert str(problem).startswith(f"Unit.commit: @on_success has no effect: the bean is {scope}-scoped")
    assert problem.fix == "mark the class @request_scoped"


def test_it_is_a_problem_on_each_bean_of_another_scope() -> None:
    unit = request_scoped(make_unit())

    @produces(scope="application", name="shared")
    def shared() -> unit:  # type: ignore[valid-type]
        return unit()

    [problem] = Container().register(unit, shared).check()

    assert "application-scoped" in problem.what


def test_a_method_with_parameters_or_a_yield_is_a_problem() -> None:
    @request_scoped
    class Unit:
        @on_success
        def commit(self, how: str) -> None: ...

        @on_success
        async def finish(self) -> AsyncIterator[None]:
            yield

    problems = Container().register(Unit).check()

    assert [each.where for each in problems] == ["Unit.commit", "Unit.finish"]
    assert problems[0].what == "a @on_success method is called without arguments"
    assert problems[1].what == "@on_success does not support generators"


@pytest.mark.parametrize("kind", [staticmethod, classmethod])
@pytest.mark.parametrize("marked_first", [True, False])
def test_static_and_class_methods_are_called_whatever_the_order_of_the_decorators(
    kind: Callable[[Any], Any], marked_first: bool
) -> None:
    def commit(*classes: Any) -> None:
        log.append("committed")

    method = kind(on_success(commit)) if marked_first else on_success(kind(commit))
    unit = request_scoped(type("Unit", (), {"commit": method}))

    with Container().register(unit) as container, container.request_scope():
        container.get(unit)

    assert log == ["committed"]


@pytest.mark.parametrize("target", [3, Base], ids=["a value", "a class"])
def test_only_methods_can_be_marked(target: Any) -> None:
    with pytest.raises(TypeError, match="@on_success: expected a method"):
        on_success(target)
