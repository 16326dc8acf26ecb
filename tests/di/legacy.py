"""Beans and a container of dependency_injector, as in a program that already uses it."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

from dependency_injector import containers, providers, resources

from toolbox import produces


class Engine:
    def __init__(self, url: str = "") -> None:
        self.url = url


class Mailer:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine


class Report:
    pass


def make_report() -> Report:
    return Report()


def open_file() -> Iterator[bytes]:
    log.append("open")
    yield b"file"
    log.append("close")


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


@produces(scope="application", name="answer")
def answer() -> int:
    return 42


class Connection:
    def __init__(self, name: str = "") -> None:
        self.name = name


def opening_awaiting(name: str) -> Any:
    async def connection(*needs: object) -> AsyncIterator[Connection]:
        log.append(f"open {name}")
        yield Connection(name)
        log.append(f"close {name}")

    return connection
