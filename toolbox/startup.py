"""`@on_start`: functions and methods that run once at each start of a container: their mark, checks and calls.

Not here: starting beans, services and runs, which is the container's work (`container`), how marked functions are read
and called (`called_functions`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload

from .called_functions import (
    CallDecorator,
    CalledFunction,
    call_in_scope,
    called_problems,
    values_missing,
)
from .di.graph import BeanGraph, Registration
from .di.injection_points import point_of
from .di.scopes import outside_scopes
from .di.values import SingleBean
from .errors import Problem
from .execution.runners import LoopRunner
from .execution.threads import Workers
from .security import SecurityIdentity

if TYPE_CHECKING:
    from .di.wiring import Wiring

F = TypeVar("F", bound="Callable[..., Any] | staticmethod[..., Any] | classmethod[Any, ..., Any]")

ON_START: Final = CallDecorator("@on_start", "__toolbox_on_start__", values_missing)


@overload
def on_start(function: F, /) -> F: ...


@overload
def on_start(order: int = 0) -> Callable[[F], F]: ...


def on_start(order: Any = 0) -> Any:
    """Run a registered function, or a method of a bean, once at each start of the container.

        @on_start
        async def load_prices(prices: Inject[Prices]) -> None: ...

        class Catalogue:
            @on_start(order=1)
            def read(self) -> None: ...

    It runs after all checks, before the first request and before runs of other processes are taken over. Smaller orders
    run first, equal ones in the order of registration. A `def` runs on a thread, as a tool does. Each runs in its own
    request scope without seeds, as the anonymous identity. An error ends the start: what was started is stopped, and
    the error is raised. Parameters are `Inject[…]`.

    Raises `TypeError` for anything but a function or method, and for an order that is not an integer.
    """
    if callable(order) or isinstance(order, (staticmethod, classmethod)):
        return ON_START.mark(order, 0, sys._getframe(1))
    if not isinstance(order, int) or isinstance(order, bool):
        raise TypeError(f"@on_start: order must be an integer, got {order!r}")
    return lambda target: ON_START.mark(target, order, sys._getframe(1))


def start_functions(readings: Iterable[Registration], graph: BeanGraph) -> tuple[CalledFunction, ...]:
    """Return everything that is marked, in the order in which it runs. `readings` are in the order of registration."""
    return tuple(sorted(ON_START.functions_in(readings, graph), key=lambda each: each.options))


def start_problems(functions: Iterable[CalledFunction], graph: BeanGraph, workers: Workers) -> Iterator[Problem]:
    """Yield the problems of what runs at start, also with request seeds, which do not exist then."""
    for each in functions:
        yield from called_problems([each], graph, workers)
        if each.bean is not None and each.bean not in graph.templates:
            yield from _problems_of_seed(each.where, SingleBean(each.bean), graph)
        for parameter in each.injected:
            value = graph.resolve(point_of(parameter.wanted, each.where))
            if not (parameter.optional and isinstance(value, SingleBean) and graph.is_seed(value.bean)):
                yield from _problems_of_seed(each.where, value, graph)


def _problems_of_seed(where: str, value: Any, graph: BeanGraph) -> Iterator[Problem]:
    for path in graph.seeds_behind(value, {SecurityIdentity}):
        labels = [graph.definitions[key].label for key in path]
        fact = f"it needs the request seed {labels[-1]}, which does not exist at startup"
        fix = f"take `{labels[-1]} | None`, or remove the dependency"
        yield Problem(" -> ".join((where, *labels)), fact, fix)


async def run_start_functions(
    functions: Iterable[CalledFunction],
    beans: Wiring,
    workers: Workers,
) -> None:
    """Run everything in order, each in its own request scope. Raises the first error as it is."""
    runner = LoopRunner(workers)
    for each in functions:
        # The container may be started inside the request of another one.
        with outside_scopes():
            async with beans.open_request({SecurityIdentity: SecurityIdentity.anonymous()}):
                await call_in_scope(each, beans, runner)
