"""Beans as providers for containers of dependency_injector, and for its wiring."""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Annotated, Any

import pytest
from dependency_injector import containers, providers
from dependency_injector.wiring import Provide, inject

from tests.di.legacy import Engine, Mailer, answer, legacy
from tests.di.scoped_beans import Basket, Pool
from toolbox import Container, MissingBeanError, Named, application_scoped, dependent, produces, request_scoped

pytestmark = pytest.mark.anyio


async def test_dependencies_of_an_included_container_are_filled_with_beans() -> None:
    class Legacy(containers.DeclarativeContainer):
        engine = providers.Dependency(instance_of=Engine)
        mailer = providers.Factory(Mailer, engine=engine)

    @application_scoped
    class OurEngine(Engine):
        def __init__(self) -> None:
            super().__init__("ours")

    old = Legacy()
    container = Container().include(old).register(OurEngine)
    async with container as c:
        assert c.get(Mailer).engine is c.get(OurEngine)
        assert old.mailer().engine is c.get(OurEngine)
    assert not old.engine.is_defined
    [problem] = Container().include(Legacy()).check()
    assert problem.where == "Legacy.mailer"
    assert "Engine" in problem.what


async def test_included_singletons_cannot_hold_request_scoped_beans() -> None:
    class Legacy(containers.DeclarativeContainer):
        engine = providers.Dependency(instance_of=Engine)
        mailer = providers.Singleton(Mailer, engine=engine)

    @request_scoped
    class OurEngine(Engine):
        def __init__(self) -> None:
            super().__init__("ours")

    [problem] = Container().include(Legacy()).register(OurEngine).check()

    assert problem.where == "Legacy.mailer"
    assert "OurEngine" in problem.what


@dependent
class Line:
    def __init__(self, basket: Basket, amount: int = 1) -> None:
        self.basket, self.amount = basket, amount


class HTTPClient:
    pass


class Parent:
    """A class whose provider name is an attribute of every dependency_injector container."""


@produces(scope="request")
async def session() -> AsyncIterator[bytearray]:
    yield bytearray(b"session")


def ours() -> Container:
    return Container().register(Pool, Basket, Line, HTTPClient, Parent, session, answer)


async def test_each_bean_is_a_provider_by_its_name() -> None:
    async with ours() as c:
        assert {"pool", "basket", "line", "http_client", "parent", "bytearray", "answer", "container"} <= set(
            c.providers.providers
        )
        assert c.providers.answer() == 42
        assert c.providers.pool() is c.get(Pool)
        assert c.providers.parent is None
        assert isinstance(c.providers.providers["parent"](), Parent)
        async with c.request_scope():
            assert c.providers.basket() is c.get(Basket)
            assert c.providers.line(amount=3).amount == 3
            assert c.providers.line().basket is c.get(Basket)
            assert await c.providers.bytearray() is c.get(bytearray)
            assert c.providers.bytearray() is c.get(bytearray)


async def test_overriding_a_provider_reaches_our_beans() -> None:
    async with ours() as c:
        real = c.get(Pool)
        fake, other = Pool(), Pool()
        with c.providers.pool.override(fake):
            async with c.request_scope():
                assert c.get(Basket).pool is fake
            with c.providers.override_providers(pool=other):
                assert c.get(Pool) is other
            assert c.get(Pool) is fake
        async with c.request_scope():
            assert c.get(Basket).pool is real
        c.providers.pool.override(fake)
        c.providers.pool.override(other)
        assert c.get(Pool) is other
        c.providers.pool.reset_override()
        assert c.get(Pool) is real


async def test_beans_can_be_used_in_providers_of_another_container() -> None:
    async with ours() as c:

        class Legacy(containers.DeclarativeContainer):
            pool = c.providers.pool
            pair = providers.Factory(dict, pool=c.providers.pool, basket=c.providers.basket)

        async with c.request_scope():
            assert Legacy().pair() == {"pool": c.get(Pool), "basket": c.get(Basket)}


@inject
def injected(pool: Any = Provide["pool"], line: Any = Provide["line"]) -> Any:
    return pool, line


@inject
async def awaited(value: Any = Provide["bytearray"], pool: Any = Provide["pool"]) -> Any:
    return value, pool


async def test_the_wiring_of_dependency_injector_works_with_beans() -> None:
    async with ours() as c:
        c.providers.wire(modules=[sys.modules[__name__]])
        try:
            async with c.request_scope():
                pool, line = injected()
                assert pool is c.get(Pool)
                assert line.basket is c.get(Basket)
                assert await awaited() == (c.get(bytearray), pool)
                fake = Pool()
                with c.override(Pool, fake):
                    assert injected()[0] is fake
        finally:
            c.providers.unwire()


class LegacyOfModule(containers.DeclarativeContainer):
    legacy_engine = providers.Singleton(Engine, url="legacy")


@inject
def still_injected(engine: Any = Provide["legacy_engine"]) -> Any:
    return engine


async def test_the_wiring_of_an_included_container_still_works() -> None:
    old = LegacyOfModule()
    old.wire(modules=[sys.modules[__name__]])
    try:
        async with Container().include(old) as c:
            assert still_injected() is c.get(Engine)
            with old.legacy_engine.override(Engine("fake")):
                assert still_injected() is c.get(Engine)
    finally:
        old.unwire()


async def test_a_provider_finds_its_container_after_a_restart() -> None:
    c = ours()
    async with c:
        provider = c.providers.pool
        first = provider()
    async with c:
        assert provider() is c.get(Pool)
        assert provider() is not first


async def test_providers_of_unknown_type_are_beans_by_name() -> None:
    async with Container().include(legacy()()) as c:
        with pytest.raises(MissingBeanError):
            c.get(float)
        assert c.providers.untyped() == 1
        assert c.get(Annotated[Any, Named("untyped")]) == 1
        assert c.get(Annotated[object, Named("untyped")]) == 1
        with pytest.raises(MissingBeanError):
            c.get(Any)


def test_dependencies_are_as_before_after_the_stop() -> None:
    class Legacy(containers.DeclarativeContainer):
        engine = providers.Dependency(instance_of=Engine)
        mailer = providers.Factory(Mailer, engine=engine)

    @produces(scope="application")
    async def ours() -> Engine:
        return Engine("ours")

    old = Legacy()
    first, second = Container().include(old).register(ours), Container().include(old).register(Engine)
    with first as c:
        assert asyncio.run(c.aget(Mailer)).engine.url == "ours"
        old.engine.override(Engine("later"))
    assert len(old.engine.overridden) == 1
    assert old.mailer().engine.url == "later"
    old.engine.reset_override()
    old.engine.reset_async_mode()
    with second as c:
        assert c.get(Mailer).engine.url == ""
    assert not old.engine.is_defined
    assert old.engine.is_async_mode_undefined()


def test_a_singleton_does_not_keep_a_closed_bean_for_the_next_start() -> None:
    class Legacy(containers.DeclarativeContainer):
        engine = providers.Dependency(instance_of=Engine)
        mailer = providers.Singleton(Mailer, engine=engine)

    container = Container().include(Legacy()).register(application_scoped(Engine))
    with container as c:
        first = c.get(Mailer)
        assert first.engine is c.get(Engine)
    with container as c:
        assert c.get(Mailer) is not first
        assert c.get(Mailer).engine is c.get(Engine)
