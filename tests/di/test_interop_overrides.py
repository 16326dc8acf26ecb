"""Overrides and resets of included asynchronous providers, and lookups at the same time."""

import asyncio
from typing import Any

import pytest
from dependency_injector import containers, providers

from tests.di.legacy import Connection, Engine, Mailer, log, opening_awaiting
from toolbox import AsyncBeanError, Container, application_scoped, dependent, request_scoped
from toolbox.container import internals_of

pytestmark = pytest.mark.anyio


async def make_engine(url: str = "real") -> Engine:
    await asyncio.sleep(0)
    return Engine(url)


class AsyncLegacy(containers.DeclarativeContainer):
    engine = providers.Singleton(make_engine)
    mailer = providers.Factory(Mailer, engine=engine)
    connection = providers.Resource(opening_awaiting("connection"))


@pytest.mark.parametrize(
    "fake",
    [
        pytest.param(lambda: Engine("fake"), id="object"),
        pytest.param(lambda: providers.Factory(Engine, "fake"), id="factory"),
        pytest.param(lambda: providers.Singleton(make_engine, "fake"), id="async singleton"),
        pytest.param(lambda: providers.Coroutine(make_engine, "fake"), id="coroutine"),
    ],
)
async def test_an_override_of_an_included_async_singleton_applies_at_once(fake: Any) -> None:
    legacy = AsyncLegacy()

    @request_scoped
    class Uses:
        def __init__(self, engine: Engine) -> None:
            self.url = engine.url

    async with Container().include(legacy).register(Uses) as c:
        real = c.get(Engine)
        assert (await c.aget(Mailer)).engine is real
        with legacy.engine.override(fake()):
            assert (await c.aget(Engine)).url == "fake"
            assert c.get(Engine).url == "fake"
            assert (await asyncio.to_thread(c.get, Engine)).url == "fake"
            assert (await c.aget(Mailer)).engine.url == "fake"
            async with c.request_scope():
                assert (await c.aget(Uses)).url == "fake"
        assert await c.aget(Engine) is real
        assert c.get(Engine) is real
        assert await asyncio.to_thread(c.get, Engine) is real


async def test_an_override_of_an_included_async_resource_applies_at_once() -> None:
    log.clear()
    legacy = AsyncLegacy()
    async with Container().include(legacy) as c:
        real = c.get(Connection)
        with legacy.connection.override(Connection("fake")):
            assert c.get(Connection).name == "fake"
            assert (await c.aget(Connection)).name == "fake"
        assert c.get(Connection) is await c.aget(Connection) is real
        with legacy.connection.override(providers.Resource(opening_awaiting("other"))):
            assert (await c.aget(Connection)).name == "other"
    assert log == ["open connection", "open other", "close other", "close connection"]


async def test_a_reset_of_included_async_providers_applies_at_once() -> None:
    log.clear()
    legacy = AsyncLegacy()
    async with Container().include(legacy) as c:
        first, opened = c.get(Engine), c.get(Connection)
        legacy.reset_singletons()
        with pytest.raises(AsyncBeanError):
            c.get(Engine)
        second = await c.aget(Engine)
        assert second is not first
        assert c.get(Engine) is await asyncio.to_thread(c.get, Engine) is second
        await legacy.shutdown_resources()  # type: ignore[misc]  # None only if no resource is async
        with pytest.raises(AsyncBeanError):
            await asyncio.to_thread(c.get, Connection)
        assert await c.aget(Connection) is not opened
    assert log == ["open connection", "close connection"] * 2


async def make_fake_engine() -> Engine:
    await asyncio.sleep(0)
    return Engine("fake")


@pytest.mark.parametrize(
    "real", [pytest.param(providers.Singleton, id="singleton"), pytest.param(providers.Factory, id="factory")]
)
@pytest.mark.parametrize(
    "fake",
    [
        pytest.param(lambda: providers.Coroutine(make_fake_engine), id="coroutine"),
        pytest.param(lambda: providers.Singleton(make_fake_engine), id="async singleton"),
        pytest.param(lambda: providers.Callable(lambda: make_fake_engine()), id="callable"),
    ],
)
async def test_an_async_override_of_an_included_synchronous_provider_applies_at_once(real: Any, fake: Any) -> None:
    class Legacy(containers.DeclarativeContainer):
        engine = real(Engine, "real")

    @application_scoped
    class Garage:
        def __init__(self, engine: Engine) -> None:
            self.url = engine.url

    @request_scoped
    class Trip:
        def __init__(self, engine: Engine, others: list[Engine]) -> None:
            self.urls = [engine.url, *(each.url for each in others)]

    @dependent
    class Part:
        def __init__(self, engine: Engine) -> None:
            self.url = engine.url

    legacy = Legacy()
    async with Container().include(legacy).register(Garage, Trip, Part) as c:
        assert (await c.aget(Engine)).url == c.get(Engine).url == "real"
        with legacy.engine.override(fake()):
            assert (await c.aget(Engine)).url == "fake"
            assert (await c.aget(Part)).url == "fake"
            async with c.request_scope():
                assert (await c.aget(Trip)).urls == ["fake", "fake"]
                await internals_of(c).prepare(Part)
                assert c.get(Part).url == "fake"
            with pytest.raises(AsyncBeanError, match="use `await aget"):
                c.get(Part)
            assert (await c.aget(Garage)).url == "fake"
        assert (await c.aget(Engine)).url == c.get(Engine).url == "real"
        async with c.request_scope():
            assert c.get(Trip).urls == ["real", "real"]
        assert c.get(Part).url == (await c.aget(Part)).url == "real"


async def test_an_async_override_of_a_bean_of_ours_reaches_its_holders() -> None:
    @application_scoped
    class Garage:
        def __init__(self, engine: Engine) -> None:
            self.url = engine.url

    async with Container().register(Garage, Engine) as c:
        assert c.get(Garage).url == ""
        with c.providers.engine.override(providers.Coroutine(make_fake_engine)):
            assert (await c.aget(Engine)).url == (await c.aget(Garage)).url == "fake"
        assert c.get(Garage).url == ""


def test_overrides_and_resets_of_included_async_providers_apply_without_an_event_loop() -> None:
    legacy = AsyncLegacy()
    with Container().include(legacy) as c:
        real = c.get(Engine)
        with legacy.engine.override(Engine("fake")):
            assert c.get(Engine).url == "fake"
        assert c.get(Engine) is real


async def test_a_cancelled_lookup_does_not_cancel_others_that_wait_for_an_included_bean() -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow() -> Engine:
        begun.set()
        await go_on.wait()
        return Engine("slow")

    class Legacy(containers.DeclarativeContainer):
        engine = providers.Singleton(slow)

    go_on.set()
    legacy = Legacy()
    async with Container().include(legacy) as c:
        go_on.clear()
        begun.clear()
        legacy.reset_singletons()
        first, second = asyncio.create_task(c.aget(Engine)), asyncio.create_task(c.aget(Engine))
        await begun.wait()
        first.cancel()
        await asyncio.wait((first,))
        go_on.set()
        assert (await second).url == "slow"
        assert first.cancelled()
