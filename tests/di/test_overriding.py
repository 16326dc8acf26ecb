"""Replacing beans with `override`."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from toolbox import (
    AmbiguousBeanError,
    Container,
    IllegalConfigurationError,
    Instance,
    MissingBeanError,
    application_scoped,
    dependent,
    produces,
    request_scoped,
)

pytestmark = pytest.mark.anyio


@application_scoped
class Clock:
    def __init__(self, zone: str = "real") -> None:
        self.zone = zone


@dependent
class Stamp:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock


@application_scoped
class Diary:
    def __init__(self, stamp: Stamp, later: Instance[Clock]) -> None:
        self.stamp, self.later = stamp, later


@application_scoped
class Library:
    def __init__(self, diaries: list[Diary]) -> None:
        self.diaries = diaries


@application_scoped
class Unconcerned:
    pass


@request_scoped
class Visit:
    def __init__(self, library: Library) -> None:
        self.zone = library.diaries[0].stamp.clock.zone


def container() -> Container:
    return Container().register(Clock, Stamp, Diary, Library, Unconcerned, Visit)


async def test_an_override_replaces_a_bean_everywhere() -> None:
    fake = Clock("fake")
    async with container() as c:
        diary, unconcerned = c.get(Diary), c.get(Unconcerned)
        with c.override(Clock, fake) as given:
            assert given is fake
            assert c.get(Clock) is await c.aget(Clock) is fake
            assert c.get(Stamp).clock is fake
            assert c.get(Diary) is not diary
            assert c.get(Diary) is c.get(Diary)
            assert c.get(Diary).stamp.clock is fake
            assert diary.later.get() is fake
            assert c.get(Library).diaries == [c.get(Diary)]
            assert c.get(Unconcerned) is unconcerned
            async with c.request_scope():
                assert c.get(Visit).zone == "fake"
            assert (await asyncio.to_thread(c.get, Clock)) is fake
        assert c.get(Diary) is diary
        assert c.get(Clock).zone == "real"
        assert c.get(Library).diaries == [diary]
        async with c.request_scope():
            assert c.get(Visit).zone == "real"


async def test_overrides_nest_and_are_restored_after_an_error() -> None:
    async with container() as c:
        with c.override(Clock, Clock("outer")):
            outer = c.get(Diary)
            with pytest.raises(ValueError), c.override(Clock, Clock("inner")):
                assert c.get(Diary).stamp.clock.zone == "inner"
                raise ValueError
            assert c.get(Diary) is outer
            with c.override(Unconcerned, Unconcerned()):
                assert c.get(Diary) is outer
        assert c.get(Diary).stamp.clock.zone == "real"


async def test_overrides_can_end_in_another_order() -> None:
    async with container() as c:
        first, second = c.override(Clock, Clock("first")), c.override(Clock, Clock("second"))
        first.__enter__()
        second.__enter__()
        assert c.get(Diary).stamp.clock.zone == "second"
        first.__exit__(None, None, None)
        assert c.get(Diary).stamp.clock.zone == "second"
        second.__exit__(None, None, None)
        assert c.get(Diary).stamp.clock.zone == "real"


async def test_an_override_can_begin_before_start_and_outlive_a_restart() -> None:
    c = container()
    with c.override(Clock, Clock("fake")):
        async with c:
            assert c.get(Diary).stamp.clock.zone == "fake"
        async with c:
            assert c.get(Diary).stamp.clock.zone == "fake"
    async with c:
        assert c.get(Diary).stamp.clock.zone == "real"


async def test_overridden_beans_are_not_created() -> None:
    made: list[int] = []

    @produces(scope="application")
    async def connection() -> AsyncIterator[float]:
        made.append(1)
        yield 1.0

    @application_scoped
    class Repo:
        def __init__(self, connection: float) -> None:
            self.connection = connection

    c = Container().register(connection, Repo)
    with c.override(float, 2.0):
        async with c:
            assert c.get(Repo).connection == 2.0
            assert made == []


async def test_a_replacement_for_an_async_bean_can_be_synchronous() -> None:
    @produces(scope="request")
    async def session() -> AsyncIterator[float]:
        yield 1.0

    @request_scoped
    class Repo:
        def __init__(self, session: float) -> None:
            self.session = session

    async with Container().register(session, Repo) as c:
        with c.override(float, 2.0):
            async with c.request_scope():
                assert c.get(Repo).session == 2.0
            async with c.request_scope():
                assert (await c.aget(Repo)).session == 2.0


async def test_beans_created_during_an_override_are_closed_at_its_end() -> None:
    log: list[str] = []

    @application_scoped
    class Cache:
        def __init__(self, clock: Clock) -> None:
            self.zone = clock.zone

        def stop(self) -> None:
            log.append(self.zone)

    @application_scoped
    class Server:
        def __init__(self, clock: Clock) -> None:
            self.zone = clock.zone

        async def stop(self) -> None:
            log.append(f"server {self.zone}")

    c = Container().register(Clock, Cache, Server)
    async with c:
        c.get(Cache)
        with c.override(Clock, Clock("fake")):
            c.get(Server)
            c.get(Cache)
        assert log == ["fake"]
    assert log == ["fake", "server fake", "real"]
    log.clear()

    def synchronously() -> None:
        with c:
            with c.override(Clock, Clock("fake")):
                c.get(Server)
            assert log == ["server fake"]

    await asyncio.to_thread(synchronously)


async def test_overriding_an_unknown_bean_is_rejected() -> None:
    async with container() as c:
        with pytest.raises(MissingBeanError), c.override(bytes, b""):
            pass
        with pytest.raises(IllegalConfigurationError, match="one by one"), c.override(list[Clock], []):
            pass
    with pytest.raises(IllegalConfigurationError, match="no bean provides it"):
        with Container().override(bytes, b"") as _:
            pass
        c = Container()
        with c.override(bytes, b""):
            async with c:
                pass


async def test_named_beans_are_overridden_by_name() -> None:
    @produces(name="a")
    def first() -> int:
        return 1

    @produces(name="b")
    def second() -> int:
        return 2

    async with Container().register(first, second) as c:
        with pytest.raises(AmbiguousBeanError), c.override(int, 3):
            pass
        with c.override(int, 3, name="b"):
            assert c.get(dict[str, int]) == {"a": 1, "b": 3}
        assert c.get(list[int]) == [1, 2]


async def test_a_seed_can_be_overridden() -> None:
    async with Container(seeds=(float,)) as c:
        with c.override(float, 2.0):
            async with c.request_scope({float: 1.0}):
                assert c.get(float) == 2.0


async def test_generators_created_during_an_override_end_with_it() -> None:
    log: list[str] = []

    @produces(scope="application")
    def cache(clock: Clock) -> Iterator[bytes]:
        yield clock.zone.encode()
        log.append(clock.zone)

    async with Container().register(Clock, cache) as c:
        assert c.get(bytes) == b"real"
        with c.override(Clock, Clock("fake")):
            assert c.get(bytes) == b"fake"
        assert log == ["fake"]
        assert c.get(bytes) == b"real"
