"""Interoperation with programs that already use dependency_injector."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import pytest
from dependency_injector import containers, providers, resources
from dependency_injector.wiring import Provide, inject

from toolbox import (
    AsyncBeanError,
    Container,
    MissingBeanError,
    Named,
    application_scoped,
    dependent,
    produces,
    request_scoped,
)
from toolbox.container import internals_of

pytestmark = pytest.mark.anyio


class Engine:
    def __init__(self, url: str = "") -> None:
        self.url = url


class Mailer:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine


class Post:
    def __init__(self, mailer: Mailer) -> None:
        self.mailer = mailer


class Report:
    pass


def make_report() -> Report:
    return Report()


def open_file() -> Iterator[bytes]:
    log.append("open")
    yield b"file"
    log.append("close")


async def open_session() -> AsyncIterator[bytearray]:
    log.append("open session")
    yield bytearray(b"session")
    log.append("close session")


async def load() -> complex:
    await asyncio.sleep(0)
    return 1j


class Lock(resources.Resource):  # type: ignore[type-arg]  # generic in its stubs only
    def init(self) -> memoryview:
        return memoryview(b"lock")


log: list[str] = []


def legacy() -> Any:
    class Legacy(containers.DeclarativeContainer):
        config = providers.Configuration()
        engine = providers.Singleton(Engine, url=config.url)
        second = providers.ThreadSafeSingleton(Engine, url="second")
        mailer = providers.Factory(Mailer, engine=engine)
        report = providers.Callable(make_report)
        answer = providers.Object(42)
        file = providers.Resource(open_file)
        lock = providers.Resource(Lock)
        untyped = providers.Callable(lambda: 1)
        names = providers.List(providers.Object("a"))

    return Legacy


async def test_providers_of_an_included_container_are_beans_by_type_and_name() -> None:
    log.clear()

    class Uses:
        def __init__(
            self,
            mailer: Mailer,
            engine: Annotated[Engine, Named("engine")],
            second: Annotated[Engine, Named("second")],
            report: Report,
            answer: int,
            engines: dict[str, Engine],
            config: Annotated[dict[str, Any], Named("config")],
        ) -> None:
            self.__dict__.update(locals())

    old = legacy()()
    old.config.from_dict({"url": "first"})
    async with Container().include(old).register(Uses) as c:
        found = vars(c.get(Uses))
        assert found["mailer"].engine is found["engine"] is old.engine()
        assert found["engine"].url == "first"
        assert found["second"] is old.second()
        assert isinstance(found["report"], Report)
        assert found["answer"] == 42
        assert list(found["engines"]) == ["engine", "second"]
        assert found["config"] == {"url": "first"}
        assert c.get(bytes) is c.get(bytes)
        assert bytes(c.get(memoryview)) == b"lock"
        assert log == ["open"]
    assert log == ["open", "close"]


async def test_container_classes_can_be_included() -> None:
    old = legacy()
    async with Container().include(old) as c:
        assert c.get(Engine, "engine") is old.engine()


async def test_overrides_of_an_included_container_apply() -> None:
    old = legacy()()

    @request_scoped
    class Uses:
        def __init__(self, mailer: Mailer) -> None:
            self.url = mailer.engine.url

    async with Container().include(old).register(Uses) as c:
        real = c.get(Engine, "engine")
        with old.engine.override(Engine("fake")):
            assert c.get(Engine, "engine").url == "fake"
            async with c.request_scope():
                assert c.get(Uses).url == "fake"
        assert c.get(Engine, "engine") is real
        c.get(bytes)
        with old.file.override(b"fake"):
            assert c.get(bytes) == b"fake"
        assert c.get(bytes) == b"file"


async def test_beans_of_an_included_container_can_be_overridden() -> None:
    old = legacy()()
    async with Container().include(old) as c:
        with c.override(Engine, Engine("fake"), name="engine"):
            assert c.get(Engine, "engine").url == "fake"


async def test_an_override_of_an_included_bean_reaches_the_providers_that_use_it() -> None:
    class Legacy(containers.DeclarativeContainer):
        engine = providers.Singleton(Engine, url="real")
        mailer = providers.Factory(Mailer, engine=engine)
        kept = providers.Singleton(Post, mailer=mailer)

    @application_scoped
    class Uses:
        def __init__(self, mailer: Mailer, post: Post) -> None:
            self.engines = mailer.engine, post.mailer.engine

    container = Container().include(Legacy).register(Uses)
    one, two = Engine("one"), Engine("two")
    async with container as c:
        uses, post = c.get(Uses), c.get(Post)
        with c.override(Engine, one):
            assert c.get(Mailer).engine is one
            assert c.get(Post).mailer.engine is one
            assert c.get(Uses).engines == (one, one)
            with c.override(Engine, two):
                assert c.get(Uses).engines == (two, two)
            assert c.get(Uses).engines == (one, one)
        assert c.get(Uses) is uses
        assert c.get(Post) is post
        assert c.get(Mailer).engine.url == "real"
    with container.override(Engine, one):
        async with container as c:
            assert c.get(Uses).engines == (one, one)
        assert Legacy.mailer().engine.url == "real"


async def test_an_override_reaches_included_providers_that_use_the_bean() -> None:
    class Legacy(containers.DeclarativeContainer):
        engine = providers.Dependency(instance_of=Engine)
        mailer = providers.Singleton(Mailer, engine=engine)

    @application_scoped
    class Own(Engine):
        pass

    fake = Engine("fake")
    async with Container().include(Legacy).register(Own) as c:
        mailer = c.get(Mailer)
        with c.override(Engine, fake):
            assert c.get(Mailer).engine is fake
        assert c.get(Mailer) is mailer


async def test_async_providers_are_awaited() -> None:
    log.clear()

    class Legacy(containers.DeclarativeContainer):
        number = providers.Coroutine(load)
        session = providers.Resource(open_session)

    @dependent
    class Uses:
        def __init__(self, number: complex, session: bytearray) -> None:
            self.found = number, session

    async with Container().include(Legacy()).register(Uses) as c:
        assert c.get(bytearray) == b"session"
        assert (await c.aget(Uses)).found == (1j, c.get(bytearray))
    assert log == ["open session", "close session"]


async def test_threads_create_one_instance_of_included_singletons() -> None:
    made: list[int] = []
    barrier = threading.Barrier(6)

    class Slow:
        def __init__(self) -> None:
            made.append(1)
            threading.Event().wait(0.01)

    class Legacy(containers.DeclarativeContainer):
        slow = providers.Singleton(Slow)

    async with Container().include(Legacy()) as c:

        def ask() -> Slow:
            barrier.wait()
            return c.get(Slow)

        with ThreadPoolExecutor(6) as pool:  # the loop's pool is smaller on a machine with one core
            loop = asyncio.get_running_loop()
            found = await asyncio.gather(*(loop.run_in_executor(pool, ask) for _ in range(6)))
    assert made == [1]
    assert len(set(map(id, found))) == 1


async def test_nested_containers_are_included() -> None:
    class Gateways(containers.DeclarativeContainer):
        engine = providers.Singleton(Engine, url="gateway")

    class Legacy(containers.DeclarativeContainer):
        gateways = providers.Container(Gateways)
        mailer = providers.Factory(Mailer, engine=gateways.engine)

    async with Container().include(Legacy()) as c:
        assert c.get(Engine, "gateways.engine").url == "gateway"
        assert c.get(Mailer).engine is c.get(Engine)


@pytest.mark.parametrize("other", [5, Container()])
def test_other_objects_cannot_be_included(other: Any) -> None:
    with pytest.raises(TypeError, match="dependency_injector container"):
        Container().include(other)


def test_unsafe_providers_are_reported_with_a_reason() -> None:
    class Legacy(containers.DeclarativeContainer):
        per_thread = providers.ThreadLocalSingleton(Engine)
        per_context = providers.ContextLocalSingleton(Report)
        resource = providers.ContextLocalResource(open_file)
        mailer = providers.Factory(Mailer, engine=providers.ThreadLocalSingleton(Engine))

    problems = Container().include(Legacy()).check()

    assert [problem.where for problem in problems] == [
        "Legacy.per_thread",
        "Legacy.per_context",
        "Legacy.resource",
        "Legacy, Engine",
    ]
    assert "per thread" in problems[0].what
    assert "tasks" in problems[1].what
    assert all("@request_scoped" in problem.fix for problem in problems)


def test_a_name_in_both_containers_is_reported() -> None:
    [problem] = Container().include(legacy()()).register(Engine).check()

    assert "'engine'" in problem.what


# --- our beans for its providers


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


@application_scoped
class Pool:
    pass


@request_scoped
class Basket:
    def __init__(self, pool: Pool) -> None:
        self.pool = pool


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


@produces(scope="application", name="answer")
def answer() -> int:
    return 42


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


# --- what included providers open


class Connection:
    def __init__(self, name: str = "") -> None:
        self.name = name


def opening(name: str) -> Any:
    """Return a resource function that logs when it opens and closes."""

    def connection(*needs: object) -> Iterator[Connection]:
        log.append(f"open {name}")
        yield Connection(name)
        log.append(f"close {name}")

    return connection


def opening_awaiting(name: str) -> Any:
    async def connection(*needs: object) -> AsyncIterator[Connection]:
        log.append(f"open {name}")
        yield Connection(name)
        log.append(f"close {name}")

    return connection


class Client:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection


def test_a_resource_that_another_provider_opens_is_shut_down() -> None:
    log.clear()

    class Legacy(containers.DeclarativeContainer):
        connection = providers.Resource(opening("connection"))
        client = providers.Factory(Client, connection=connection)

    legacy = Legacy()
    with Container().include(legacy) as c:
        assert c.get(Client).connection.name == "connection"
    assert log == ["open connection", "close connection"]
    assert not legacy.connection.initialized


async def test_an_async_resource_that_another_provider_opens_is_shut_down() -> None:
    log.clear()

    class Legacy(containers.DeclarativeContainer):
        connection = providers.Resource(opening_awaiting("connection"))
        client = providers.Factory(Client, connection=connection)

    async with Container().include(Legacy()) as c:
        assert (await c.aget(Client)).connection.name == "connection"
    assert log == ["open connection", "close connection"]


def test_included_resources_close_after_everything_that_needs_them() -> None:
    log.clear()

    class Legacy(containers.DeclarativeContainer):
        clock = providers.Dependency(instance_of=Report)
        transaction = providers.Resource(opening("transaction"))
        session = providers.Resource(opening("session"))
        pool = providers.Resource(opening("pool"), clock)
        session.add_args(pool)
        transaction.add_args(session)
        client = providers.Singleton(Client, connection=transaction)

    @application_scoped
    class Clock(Report):
        def stop(self) -> None:
            log.append("stop clock")

    @application_scoped
    class Uses:
        def __init__(self, client: Client) -> None:
            self.client = client

        def stop(self) -> None:
            log.append("stop uses")

    with Container().include(Legacy()).register(Uses, Clock) as c:
        c.get(Uses)
        c.get(Connection, "pool")
    assert log == [
        *("open pool", "open session", "open transaction"),
        *("stop uses", "close transaction", "close session", "close pool", "stop clock"),
    ]


def test_all_included_resources_close_and_all_errors_are_raised() -> None:
    log.clear()

    def failing() -> Iterator[bytearray]:
        yield bytearray()
        raise OSError("cannot close")

    class Legacy(containers.DeclarativeContainer):
        first = providers.Resource(opening("first"))
        second = providers.Resource(failing)
        third = providers.Resource(opening("third"))

    @application_scoped
    class Uses:
        def stop(self) -> None:
            raise ValueError("cannot stop")

    with pytest.raises(ExceptionGroup) as raised, Container().include(Legacy()).register(Uses) as c:
        c.get(Connection, "first")
        c.get(bytearray)
        c.get(Connection, "third")
        c.get(Uses)
    assert [str(each) for each in raised.value.exceptions] == ["cannot stop", "cannot close"]
    assert log == ["open first", "open third", "close third", "close first"]


async def test_resources_that_the_programs_own_code_opens_are_shut_down() -> None:
    log.clear()

    class Legacy(containers.DeclarativeContainer):
        early = providers.Resource(opening("early"))
        connection = providers.Resource(opening("connection"))
        session = providers.Resource(opening("session"), connection)
        remote = providers.Resource(opening_awaiting("remote"), session)

    legacy = Legacy()
    legacy.early()
    async with Container().include(legacy) as c:
        await legacy.remote()
        assert c.get(Connection, "early") is legacy.early()
    assert log == [
        *("open early", "open connection", "open session", "open remote"),
        *("close remote", "close session", "close connection"),
    ]


def test_a_resource_behind_a_selector_or_an_override_is_shut_down() -> None:
    log.clear()

    class Legacy(containers.DeclarativeContainer):
        config = providers.Configuration(default={"kind": "one"})
        chosen = providers.Selector(
            config.kind, one=providers.Resource(opening("one")), two=providers.Resource(opening("two"))
        )
        client = providers.Factory(Client, connection=chosen)
        lazy = providers.Factory(dict, connection=providers.Resource(opening("delegated")).provider)

    legacy = Legacy()
    with Container().include(legacy) as c:
        assert c.get(Client).connection.name == "one"
        with legacy.chosen.override(providers.Resource(opening("other"))):
            assert c.get(Client).connection.name == "other"
        assert callable(c.get(dict)["connection"])
    assert log == ["open one", "open other", "close other", "close one"]


def test_a_resource_that_the_program_shut_down_is_not_opened_again_for_a_singleton_that_exists() -> None:
    log.clear()

    class Legacy(containers.DeclarativeContainer):
        connection = providers.Resource(opening("connection"))
        client = providers.Singleton(Client, connection=connection)

    legacy = Legacy()
    with Container().include(legacy) as c:
        client = c.get(Client)
        legacy.connection.shutdown()
        assert c.get(Client) is client
        assert log == ["open connection", "close connection"]
        assert c.get(Connection) is not client.connection
    assert log == ["open connection", "close connection"] * 2


# --- overrides and resets of async providers


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


def test_threads_open_included_providers_once_however_they_reach_them() -> None:
    made: list[str] = []
    barrier = threading.Barrier(6)

    class Slow:
        def __init__(self) -> None:
            made.append("slow")
            threading.Event().wait(0.01)

    class Holder:
        def __init__(self, slow: Slow) -> None:
            self.slow = slow

    def open_bytes(slow: Slow) -> Iterator[bytes]:
        made.append("resource")
        threading.Event().wait(0.01)
        yield b"resource"

    class Legacy(containers.DeclarativeContainer):
        slow = providers.Singleton(Slow)
        factory = providers.Factory(Holder, slow=slow)
        both = providers.Callable(lambda *each: each, slow, providers.List(slow))
        opened = providers.Resource(open_bytes, slow)
        length = providers.Factory(memoryview, opened)

    with Container().include(Legacy()) as c:

        def ask(how: int) -> Slow:
            barrier.wait()
            if how == 0:
                return c.get(Slow)
            if how == 1:
                return c.get(Holder).slow
            if how == 2:
                return c.get(Annotated[Any, Named("both")])[0]
            if how == 3:
                c.get(bytes)
            else:
                c.get(memoryview)
            return c.get(Slow)

        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(ask, range(6)))
    assert sorted(made) == ["resource", "slow"]
    assert len(set(map(id, found))) == 1


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


class Remote:
    async def __aenter__(self) -> "Remote":
        log.append("enter")
        return self

    async def __aexit__(self, *error: object) -> None:
        log.append("exit")


def make_remote() -> Remote:
    return Remote()


@pytest.mark.parametrize("made_by", [Remote, make_remote])
async def test_async_context_managers_can_be_resources(made_by: Any) -> None:
    log.clear()

    class Legacy(containers.DeclarativeContainer):
        remote = providers.Resource(made_by)

    async with Container().include(Legacy()) as c:
        assert c.get(Remote) is await c.aget(Remote)
    assert log == ["enter", "exit"]
