"""Chains of dependencies of any length can be created and closed.

Python's limit of recursion is low in these tests, so chains need not be very long to exceed it.
"""

import asyncio
import functools
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from tests.di.conftest import call_scope
from toolbox import AsyncBeanError, Container, application_scoped, call_scoped, dependent, produces, request_scoped
from toolbox.container import internals_of

pytestmark = pytest.mark.anyio

NESTED = 300
"""How many calls can be nested in a test."""
LENGTH = 500  # more than can be nested
LONG = 1500
LONGEST = 5001
"""Long enough to overflow the stack of C where each bean takes 2 KB of it."""

Mark = Callable[[type[Any]], type[Any]]

creates_nothing = pytest.mark.parametrize("resolution", [True], ids=["any"], indirect=True)
"""For tests that create no bean: they do not depend on how beans are created."""


def link(number: int, holds: Any, mark: Mark | None = None) -> type[Any]:
    """Return a class whose instances hold a bean of type `holds` as `below`, or no bean without `holds`."""

    def __init__(self: Any, below: Any = None) -> None:
        self.below = below

    __init__.__annotations__["below"] = holds
    body = {"__init__": __init__} if holds is not None else {"below": None}
    cls = type(f"Link{number}", (), {**body, "__module__": f"{__name__}.links"})
    return cls if mark is None else mark(cls)


def chain(*marks: Mark, length: int = LENGTH) -> list[type[Any]]:
    """Return classes that each hold the previous one, with alternating marks."""
    links: list[type[Any]] = []
    for number in range(length):
        links.append(link(number, links[-1] if links else None, marks[number % len(marks)]))
    return links


@functools.cache
def _long(mark: Mark) -> list[type[Any]]:
    return chain(mark, length=LONG)


def shared_chain(mark: Mark, length: int = LENGTH) -> list[type[Any]]:
    """Return the beginning of the long chain of one scope, for tests that do not change its classes."""
    return _long(mark)[:length]


@pytest.fixture(autouse=True, scope="module")
def _classes_are_released() -> Iterator[None]:
    yield
    _long.cache_clear()


@pytest.fixture(autouse=True)
def _few_calls_can_be_nested() -> Iterator[None]:
    normal = sys.getrecursionlimit()
    sys.setrecursionlimit(sum(1 for _ in traceback.walk_stack(None)) + NESTED)
    yield
    sys.setrecursionlimit(normal)


def depth(top: Any) -> int:
    count = 0
    while top is not None:
        top, count = top.below, count + 1
    return count


@pytest.fixture(params=["first to last", "last to first"])
def ordered(request: pytest.FixtureRequest) -> Callable[[list[Any]], list[Any]]:
    return lambda links: links if request.param == "first to last" else links[::-1]


@pytest.mark.parametrize("mark", [application_scoped, dependent, request_scoped])
def test_a_long_chain_of_one_scope_is_created(mark: Mark, ordered: Callable[[list[Any]], list[Any]]) -> None:
    links = shared_chain(mark)
    with Container().register(*ordered(links)) as container, container.request_scope():
        top = container.get(links[-1])

        assert depth(top) == LENGTH
        assert (container.get(links[-1]) is top) == (mark is not dependent)


@pytest.mark.parametrize("mark", [application_scoped, dependent, request_scoped])
def test_a_chain_that_is_much_longer_than_the_limit_of_recursion_is_created(mark: Mark) -> None:
    links = shared_chain(mark, LONG)
    with Container().register(*links) as container, container.request_scope():
        assert depth(container.get(links[-1])) == LONG


def test_a_chain_of_thousands_of_beans_of_all_scopes_is_created() -> None:
    marks = [application_scoped] * (LONGEST // 3) + [request_scoped] * (LONGEST // 3) + [dependent] * (LONGEST // 3)
    links = chain(*marks, length=len(marks))
    with Container().register(*links) as container, container.request_scope():
        assert depth(container.get(links[-1])) == LONGEST


async def test_a_long_chain_of_mixed_scopes_is_created_with_and_without_await() -> None:
    links = chain(application_scoped, dependent, dependent, length=LENGTH // 2)
    for number in range(LENGTH // 2, LENGTH):
        links.append(link(number, links[-1], (request_scoped, dependent)[number % 2]))
    async with Container().register(*links) as container:
        async with container.request_scope():
            assert depth(container.get(links[-1])) == LENGTH
        async with container.request_scope():
            assert depth(await container.aget(links[-1])) == LENGTH


async def test_a_long_chain_is_created_inside_a_call_scope() -> None:
    links = chain(call_scoped, dependent)
    async with Container().register(*links) as container, container.request_scope():
        with call_scope(container) as scope:
            assert depth(container.get(links[-1])) == LENGTH
        await scope.aclose(None)


def test_a_long_chain_through_lists_is_created() -> None:
    links = [link(0, None, dependent)]
    for number in range(1, LENGTH):
        links.append(link(number, list[links[-1]], (dependent, application_scoped)[number % 2]))
    with Container().register(*links) as container:
        top, count = container.get(links[-1]), 0
        while top is not None:
            top, count = (top.below[0] if top.below else None), count + 1

        assert count == LENGTH


@pytest.mark.parametrize("scopes", [("application",), ("dependent",), ("application", "dependent")])
async def test_a_long_chain_of_async_producers_is_created_and_closed(scopes: tuple[str, ...]) -> None:
    links = [link(number, None) for number in range(LENGTH)]
    closed: list[int] = []

    def producer(number: int) -> Any:
        async def make(below: Any = None) -> AsyncIterator[Any]:
            made = links[number]()
            made.below = below
            yield made
            closed.append(number)

        make.__annotations__ = {"return": AsyncIterator[links[number]]}  # type: ignore[name-defined]
        if number:
            make.__annotations__["below"] = links[number - 1]
        return produces(scope=scopes[number % len(scopes)])(make)  # type: ignore[arg-type]

    async with Container().register(*map(producer, range(LENGTH))) as container:
        assert depth(await container.aget(links[-1])) == LENGTH

    assert closed == list(range(LENGTH))[::-1]


async def test_async_and_plain_beans_can_alternate_in_a_long_chain() -> None:
    links = chain(dependent)

    def producer(number: int) -> Any:
        async def make(below: Any = None) -> Any:
            await asyncio.sleep(0)
            made = links[number].__new__(links[number])
            made.below = below
            return made

        make.__annotations__ = {"return": links[number]}
        if number:
            make.__annotations__["below"] = links[number - 1]
        return produces(scope="dependent")(make)

    producers = [producer(number) for number in range(0, LENGTH, 3)]
    plain = [each for number, each in enumerate(links) if number % 3]
    async with Container().register(
        *producers,
        *plain,
    ) as container:
        with pytest.raises(AsyncBeanError) as raised:
            container.get(links[-1])

        assert len(str(raised.value)) < 2000
        top = await container.aget(links[-1])
        assert depth(top) == LENGTH


def test_producers_in_a_long_chain_are_closed_newest_first() -> None:
    links = [link(number, None) for number in range(LENGTH)]
    closed: list[int] = []

    def producer(number: int) -> Any:
        def make(below: Any = None) -> Iterator[Any]:
            made = links[number]()
            made.below = below
            yield made
            closed.append(number)

        make.__annotations__ = {"return": Iterator[links[number]]}  # type: ignore[name-defined]
        if number:
            make.__annotations__["below"] = links[number - 1]
        return produces(scope="request")(make)

    with Container().register(*map(producer, range(LENGTH))) as container:
        with container.request_scope():
            assert depth(container.get(links[-1])) == LENGTH
        assert closed == list(range(LENGTH))[::-1]


@pytest.mark.parametrize("mark", [application_scoped, dependent])
def test_any_bean_of_a_long_chain_can_be_overridden(mark: Mark) -> None:
    links = shared_chain(mark)
    with Container().register(*links) as container:
        assert depth(container.get(links[-1])) == LENGTH
        for place in (0, LENGTH // 2, LENGTH - 1):
            fake = links[place].__new__(links[place])
            fake.below = None
            with container.override(links[place], fake):
                assert depth(container.get(links[-1])) == LENGTH - place
                assert depth(container.providers.providers[f"link{LENGTH - 1}"]()) == LENGTH - place
        assert depth(container.get(links[-1])) == LENGTH


@pytest.mark.parametrize("mark", [request_scoped, dependent])
async def test_a_seed_in_a_long_chain_ends_it(mark: Mark) -> None:
    links = shared_chain(mark)
    seed = links[LENGTH // 2].__new__(links[LENGTH // 2])
    seed.below = None
    program = Container().register(*links)
    async with program as container, container.request_scope({links[LENGTH // 2]: seed}):
        assert depth(container.get(links[-1])) == LENGTH // 2
        assert depth(await container.aget(links[-1])) == LENGTH // 2


def test_many_threads_create_the_beans_of_a_long_chain_once() -> None:
    links = shared_chain(application_scoped)
    made: list[Any] = []
    with Container().register(*links) as container:
        start = threading.Barrier(4)

        def ask() -> None:
            start.wait()
            made.append(container.get(links[-1]))

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()

        assert depth(made[0]) == LENGTH
        assert [each is made[0] for each in made] == [True] * 4


def test_an_error_deep_in_a_long_chain_is_raised_unchanged_and_creation_can_be_retried() -> None:
    links = chain(application_scoped)
    fails = [True]

    def __init__(self: Any) -> None:
        self.below = None
        if fails:
            raise LookupError("not yet")

    links[0].__init__ = __init__  # type: ignore[misc]
    with Container().register(*links) as container:
        with pytest.raises(LookupError, match="not yet"):
            container.get(links[-1])
        fails.clear()
        assert depth(container.get(links[-1])) == LENGTH


@creates_nothing
@pytest.mark.parametrize("length", [2, 200, LENGTH])
def test_long_cycles_are_reported_at_start(length: int) -> None:
    links = chain(application_scoped, length=length)
    links[0].__init__ = lambda self, below: None  # type: ignore[misc]
    links[0].__init__.__annotations__ = {"below": links[-1]}  # type: ignore[misc]

    problems = Container().register(*links).check()

    assert [each.what[:17] for each in problems] == ["dependency cycle:"]
    assert len(problems[0].what) < 2000


@creates_nothing
def test_a_long_cycle_and_a_short_one_inside_it_are_both_reported() -> None:
    links = chain(application_scoped, length=50)

    def __init__(self: Any, below: Any, near: Any) -> None: ...

    __init__.__annotations__.update(below=links[-1], near=links[2])
    links[0].__init__ = __init__  # type: ignore[misc]

    problems = Container().register(*links).check()

    long, short = (each.what for each in problems)
    assert long.startswith("dependency cycle: Link0 -> Link49 -> Link48")
    assert short == "dependency cycle: Link0 -> Link2 -> Link1 -> Link0"


@creates_nothing
def test_a_container_with_a_long_chain_can_be_described() -> None:
    links = shared_chain(application_scoped)

    assert len(internals_of(Container().register(*links)).describe()) == LENGTH + 2
