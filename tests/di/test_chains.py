"""Long chains of dependencies: created up to what Python can nest, a problem at the start beyond."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from toolbox import Container, IllegalConfigurationError, application_scoped, dependent, request_scoped
from toolbox.container import internals_of

pytestmark = pytest.mark.anyio

Mark = Callable[[type[Any]], type[Any]]
LENGTH = 150


@pytest.fixture(autouse=True)
def _normal_limit() -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


def chain(*marks: Mark, length: int = LENGTH) -> list[type[Any]]:
    """Return classes that each hold the previous one, with alternating marks."""
    links: list[type[Any]] = []
    for number in range(length):

        def __init__(self: Any, below: Any = None) -> None:
            self.below = below

        if links:
            __init__.__annotations__["below"] = links[-1]
        cls = type(f"Link{number}", (), {"__init__": __init__, "__module__": __name__})
        links.append(marks[number % len(marks)](cls))
    return links


def depth(top: Any) -> int:
    count = 0
    while top is not None:
        top, count = top.below, count + 1
    return count


@pytest.mark.parametrize(
    "marks", [(application_scoped,), (request_scoped,), (dependent,), (application_scoped, dependent)]
)
async def test_a_long_chain_is_created(marks: tuple[Mark, ...]) -> None:
    links = chain(*marks)
    async with Container().register(*links) as container, container.request_scope():
        assert depth(container.get(links[-1])) == LENGTH
        assert depth(await container.aget(links[-1])) == LENGTH


async def test_a_chain_that_python_cannot_nest_is_a_problem_at_start() -> None:
    container = Container().register(*chain(application_scoped, length=300))
    with pytest.raises(IllegalConfigurationError) as raised:
        await container.__aenter__()

    (problem,) = raised.value.problems
    assert problem.where == "Link299"
    assert problem.what.startswith(
        "a chain of 300 beans is too long for Python, which can nest 250: Link299 -> Link298"
    )
    assert "Instance[…]" in problem.fix
    assert len(str(problem)) < 1000


@pytest.mark.parametrize("length", [2, 200, 500])
def test_long_cycles_are_reported_at_start(length: int) -> None:
    links = chain(application_scoped, length=length)
    links[0].__init__ = lambda self, below: None  # type: ignore[misc]
    links[0].__init__.__annotations__ = {"below": links[-1]}  # type: ignore[misc]

    problems = Container().register(*links).check()

    assert problems[0].what.startswith("dependency cycle:")
    assert len(problems[0].what) < 2000


def test_a_long_cycle_and_a_short_one_inside_it_are_both_reported() -> None:
    links = chain(application_scoped, length=50)

    def __init__(self: Any, below: Any, near: Any) -> None: ...

    __init__.__annotations__.update(below=links[-1], near=links[2])
    links[0].__init__ = __init__  # type: ignore[misc]

    long, short = (each.what for each in Container().register(*links).check())

    assert long.startswith("dependency cycle: Link0 -> Link49 -> Link48")
    assert short == "dependency cycle: Link0 -> Link2 -> Link1 -> Link0"


def test_a_container_with_a_long_chain_can_be_described() -> None:
    assert len(internals_of(Container().register(*chain(application_scoped))).describe()) == LENGTH + 2
