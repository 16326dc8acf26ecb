"""Containers of dependency_injector that are included: their providers are beans, and overrides apply on both sides.

Not here: our beans as providers (`test_interop_providers`), resources (`test_interop_resources`), asynchronous
providers (`test_interop_overrides`).
"""

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import pytest
from dependency_injector import containers, providers

from tests.di.legacy import Engine, Mailer, Report, legacy, log, open_file
from toolbox import Container, Named, application_scoped, dependent, request_scoped

pytestmark = pytest.mark.anyio


class Post:
    def __init__(self, mailer: Mailer) -> None:
        self.mailer = mailer


async def open_session() -> AsyncIterator[bytearray]:
    log.append("open session")
    yield bytearray(b"session")
    log.append("close session")


async def load() -> complex:
    await asyncio.sleep(0)
    return 1j


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
