"""Resources that included providers open: when they are shut down, and how often they are opened."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import pytest
from dependency_injector import containers, providers

from tests.di.legacy import Connection, Report, log, opening_awaiting
from toolbox import Container, Named, application_scoped

pytestmark = pytest.mark.anyio


def opening(name: str) -> Any:
    """Return a resource function that logs when it opens and closes."""

    def connection(*needs: object) -> Iterator[Connection]:
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
