"""`Instance.close` and `aclose`: dependent beans that are given back before their scope ends."""

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.di.conftest import call_scope
from toolbox import (
    Container,
    IllegalConfigurationError,
    Instance,
    ScopeNotActiveError,
    application_scoped,
    call_scoped,
    dependent,
    produces,
    request_scoped,
)

pytestmark = pytest.mark.anyio


class Log(list[str]): ...


class Value:
    def __init__(self, name: str) -> None:
        self.name = name


class Stopped(Value):
    def __init__(self, log: Log) -> None:
        super().__init__("stopped")
        self._log = log

    def stop(self) -> None:
        self._log.append(self.name)


class StoppedAwaiting(Stopped):
    async def stop(self) -> None:  # type: ignore[override]  # the container looks which one it is
        await asyncio.sleep(0)
        self._log.append(self.name)


class Yielded(Value): ...


@produces()
def yielded(log: Log) -> Iterator[Yielded]:
    yield Yielded("yielded")
    log.append("yielded")


class YieldedAwaiting(Value): ...


@produces()
async def yielded_awaiting(log: Log) -> AsyncIterator[YieldedAwaiting]:
    yield YieldedAwaiting("yielded")
    await asyncio.sleep(0)
    log.append("yielded")


class InOwnTask(Value): ...


@produces(own_task=True)
async def in_own_task(log: Log) -> AsyncIterator[InOwnTask]:
    async with asyncio.timeout(60):
        yield InOwnTask("own")
    log.append("own")


@dependent
class Outer(Value):
    """It has nothing to close, but what it holds has."""

    def __init__(self, first: Stopped, second: Yielded) -> None:
        super().__init__("outer")
        self.held = first, second


SYNC = {Stopped: ["stopped"], Yielded: ["yielded"], Outer: ["yielded", "stopped"]}
ASYNC = {StoppedAwaiting: ["stopped"], YieldedAwaiting: ["yielded"], InOwnTask: ["own"]}
BEANS = (Stopped, StoppedAwaiting, yielded, yielded_awaiting, in_own_task, Outer)


def new_container(*others: object) -> tuple[Container, Log]:
    log = Log()
    return Container().register(*BEANS, *others).register_instance(log), log


def instance_of(container: Container, wanted: Any) -> Instance[Any]:
    return container.get(Instance[wanted])


@pytest.mark.parametrize("wanted", SYNC)
@pytest.mark.parametrize("in_scope", [True, False])
def test_a_dependent_bean_is_closed_once_before_its_scope_ends(wanted: Any, in_scope: bool) -> None:
    def use() -> None:
        beans = instance_of(container, wanted)
        bean, other = beans.get(), beans.get()
        beans.close(bean)
        assert log == SYNC[wanted]
        beans.close(bean)
        assert log == SYNC[wanted]
        log.clear()
        assert other is not bean

    container, log = new_container()
    with container:
        if in_scope:
            with container.request_scope():
                use()
            assert log == SYNC[wanted]  # the other one, with the scope
        else:
            use()
            assert log == []
    assert log == SYNC[wanted]


@pytest.mark.parametrize("wanted", [*SYNC, *ASYNC])
async def test_aclose_awaits_what_must_be_awaited(wanted: Any) -> None:
    expected = {**SYNC, **ASYNC}[wanted]
    container, log = new_container()
    async with container:
        beans = instance_of(container, wanted)
        bean, _ = await beans.aget(), await beans.aget()
        await beans.aclose(bean)
        await beans.aclose(bean)
        assert log == expected
    assert log == expected * 2


@pytest.mark.parametrize("wanted", SYNC)
def test_a_bean_that_was_given_back_is_not_kept(wanted: Any) -> None:
    container, _ = new_container()
    with container:
        beans = instance_of(container, wanted)
        bean = beans.get()
        there = weakref.ref(bean)
        beans.close(bean)
        del bean
        assert there() is None


def test_the_beans_of_a_scope_that_has_ended_are_not_kept() -> None:
    container, _ = new_container()
    with container:
        with container.request_scope():
            there = weakref.ref(instance_of(container, Yielded).get())
            assert there() is not None
        assert there() is None


@application_scoped
class Shared(Stopped): ...


@request_scoped
class OfRequest(Stopped): ...


@call_scoped
class OfCall(Stopped): ...


@dependent
class HoldsAll(Stopped):
    def __init__(self, log: Log, shared: Shared, of_request: OfRequest, of_call: OfCall, own: Yielded) -> None:
        super().__init__(log)
        self.others = shared, of_request, of_call
        self.name = "holder"


def test_beans_of_other_scopes_stay_open() -> None:
    container, log = new_container(Shared, OfRequest, OfCall, HoldsAll)
    with container, container.request_scope(), call_scope(container):
        beans = instance_of(container, HoldsAll)
        holder = beans.get()  # creates all of them
        beans.close(holder)
        assert log == ["holder", "yielded"]
        assert beans.get().others == holder.others

        for each in (*holder.others, container.get(Stopped), object(), None, 1):
            beans.close(each)
        assert log == ["holder", "yielded"]


def test_a_call_scoped_bean_is_not_created_for_a_dependent_one_outside_of_scopes() -> None:
    @dependent
    class Holder:
        def __init__(self, of_call: OfCall) -> None: ...

    container, _ = new_container(OfCall, Holder)
    with container, pytest.raises(ScopeNotActiveError, match="OfCall"):
        instance_of(container, Holder).get()


def test_a_bean_can_be_given_back_from_another_scope_and_thread() -> None:
    container, log = new_container()
    with container:
        beans = instance_of(container, Yielded)
        with container.request_scope():
            bean = beans.get()
            closing = threading.Thread(target=beans.close, args=(bean,))
            closing.start()
            closing.join()
            assert log == ["yielded"]
        outside = beans.get()
        with container.request_scope():
            instance_of(container, Yielded).close(outside)
        assert log == ["yielded"] * 2


@pytest.mark.parametrize("wanted", ASYNC)
def test_close_waits_for_async_code_on_a_thread_without_a_loop(wanted: Any) -> None:
    container, log = new_container()
    with container:
        beans = instance_of(container, wanted)
        bean = asyncio.run(container.acall(beans.aget))
        beans.close(bean)
        assert log == ASYNC[wanted]


@pytest.mark.parametrize("wanted", ASYNC)
async def test_close_on_an_event_loop_leads_to_aclose_and_closes_nothing(wanted: Any) -> None:
    container, log = new_container()
    async with container:
        beans = instance_of(container, wanted)
        bean = await beans.aget()
        with pytest.raises(IllegalConfigurationError, match="async code closes this bean"):
            beans.close(bean)
        assert log == []
        await beans.aclose(bean)
        assert log == ASYNC[wanted]


def test_the_errors_of_a_close_are_raised() -> None:
    @produces()
    def failing(value: Yielded) -> Iterator[float]:
        yield 1.5
        raise OSError("cannot close")

    container, log = new_container(failing)
    with container:
        beans = instance_of(container, float)
        bean = beans.get()
        with pytest.raises(ExceptionGroup, match="closing bean failed") as raised:
            beans.close(bean)
        assert raised.group_contains(OSError, match="cannot close")
        assert log == ["yielded"]


def test_an_object_that_was_lent_twice_is_closed_twice() -> None:
    lent = Value("pooled")

    @produces()
    def pooled(log: Log) -> Iterator[Value]:
        log.append("taken")
        yield lent
        log.append("released")

    log = Log()
    with Container().register(pooled).register_instance(log) as container:
        beans = instance_of(container, Value)
        for _ in range(2):
            assert beans.get() is lent
        for _ in range(3):
            beans.close(lent)
        assert log == ["taken"] * 2 + ["released"] * 2


def test_nothing_happens_after_the_stop() -> None:
    container, log = new_container()
    with container:
        beans = instance_of(container, Yielded)
        bean = beans.get()
    beans.close(bean)
    asyncio.run(beans.aclose(bean))
    assert log == ["yielded"]


def test_each_of_many_threads_closes_its_own_beans() -> None:
    container, log = new_container()
    with container:
        beans = instance_of(container, Outer)

        def work() -> None:
            for _ in range(50):
                beans.close(beans.get())

        threads = [threading.Thread(target=work) for _ in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert (log.count("yielded"), log.count("stopped")) == (400, 400)
    assert len(log) == 800
