"""The kinds of classes and producers that beans are made of."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple, Optional

import pytest
from pydantic import BaseModel

from tests.di.payments import CardPayments, Heir, Payments, Shape, Square
from toolbox import AsyncBeanError, Container, application_scoped, dependent, produces, request_scoped

pytestmark = pytest.mark.anyio


# --- kinds of classes


@dataclass
class Base:
    shape: Shape


@dataclass
class Data(Base):
    payments: Payments
    label: str = "x"
    init: InitVar[Square | None] = None
    made: list[int] = field(default_factory=list)


class Tuple(NamedTuple):
    shape: Shape
    sides: int = 2


class Model(BaseModel):
    model_config = {"arbitrary_types_allowed": True}
    shape: Shape
    count: int = 2


class OnlyNew:
    shape: Shape

    def __new__(cls, shape: Shape) -> "OnlyNew":
        made = super().__new__(cls)
        made.shape = shape
        return made


@pytest.mark.parametrize("cls", [Data, Tuple, Model, OnlyNew, Heir])
async def test_all_kinds_of_classes_can_be_beans(cls: Any) -> None:
    payments = [CardPayments] if cls is Data else []
    async with Container().register(cls, Square, *payments) as c:
        assert isinstance(c.get(cls).shape, Square)


async def test_a_class_without_a_signature_is_created_without_arguments() -> None:
    class Numbers(dict[str, int]):
        pass

    async with Container().register(Numbers) as c:
        assert c.get(Numbers) == {}


# --- producers


async def test_all_kinds_of_producers_are_supported() -> None:
    @produces(scope="request")
    def plain() -> int:
        return 1

    @produces(scope="request")
    async def coroutine(plain: int) -> str:
        return str(plain)

    @produces(scope="request")
    def generator(coroutine: str) -> Iterator[float]:
        yield float(coroutine)

    @produces(scope="request")
    async def async_generator(generator: float) -> AsyncIterator[bytes]:
        yield str(generator).encode()

    async with Container().register(plain, coroutine, generator, async_generator) as c, c.request_scope():
        assert await c.aget(bytes) == b"1.0"
        assert c.get(bytes) is await c.aget(bytes)
        assert c.get(float) == 1.0


def make_nothing_in_an_older_spelling(calls: list[int]) -> Any:
    @produces(scope="application")
    def nothing() -> Optional[Square]:  # noqa: UP045
        calls.append(1)
        return None

    return nothing


def make_nothing(calls: list[int]) -> Any:
    @produces(scope="application")
    def nothing() -> Square | None:
        calls.append(1)
        return None

    return nothing


@pytest.mark.parametrize("making", [make_nothing, make_nothing_in_an_older_spelling])
async def test_a_producer_that_returns_none_is_called_once(making: Any) -> None:
    calls: list[int] = []
    nothing = making(calls)

    class Uses:
        def __init__(self, square: Square | None) -> None:
            self.square = square

    async with Container().register(nothing, Uses) as c:
        assert c.get(Uses).square is None
        assert c.get(Uses).square is None
        assert calls == [1]


async def test_dependent_beans_can_be_async() -> None:
    made: list[int] = []

    @produces()
    async def number() -> int:
        await asyncio.sleep(0)
        made.append(1)
        return len(made)

    @dependent
    class Part:
        def __init__(self, number: int) -> None:
            self.number = number

    @application_scoped
    class Long:
        def __init__(self, one: Part, two: Part, every: list[Part], named: dict[str, Part]) -> None:
            self.numbers = [one.number, two.number, *(each.number for each in every)]

    @request_scoped
    class Short:
        def __init__(self, long: Long, number: int) -> None:
            self.long, self.number = long, number

    async with Container().register(number, Part, Long, Short) as c:
        assert c.get(Long).numbers == [1, 2, 3]
        with pytest.raises(AsyncBeanError, match="Part -> int"):
            c.get(Part)
        async with c.request_scope():
            with pytest.raises(AsyncBeanError, match="Short -> int"):
                c.get(Short)
            short = await c.aget(Short)
            assert short.number == 4
            assert c.get(Short) is short
        assert (await c.aget(Part)).number == 5
        assert [each.number for each in await c.aget(list[Part])] == [6]


async def test_async_application_beans_are_created_at_start_and_others_at_first_use() -> None:
    made: list[str] = []

    @produces(scope="application")
    async def first() -> int:
        made.append("awaited")
        return 1

    @application_scoped
    class Second:
        def __init__(self, first: int) -> None:
            made.append("lazy")

    async with Container().register(Second, first) as c:
        assert made == ["awaited"]
        c.get(Second)
        assert made == ["awaited", "lazy"]


async def test_get_of_an_async_bean_reports_the_path_to_the_async_producer() -> None:
    @produces(scope="request")
    async def session() -> int:
        return 1

    @request_scoped
    class Repo:
        def __init__(self, session: int) -> None: ...

    @request_scoped
    class Service:
        def __init__(self, repo: Repo) -> None: ...

    async with Container().register(session, Repo, Service) as c, c.request_scope():
        with pytest.raises(AsyncBeanError) as raised:
            c.get(Service)
        assert (raised.value.wanted, raised.value.path) == ("Service", "Service -> Repo -> int")
        await c.aget(int)
        assert c.get(Service) is await c.aget(Service)
