"""`@on_start`: marks functions and methods that run once at each start of a container, checks them, and runs them.

Not here: starting beans, services and runs, which is the container's work (`container`).
"""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, Final, TypeVar, overload

from .context import ActiveScope
from .di.beans import point_of
from .di.decorators import producer_mark_of
from .di.graph import BeanGraph, Registration, SingleBean
from .di.scopes import outside_scopes
from .errors import MissingBeanError, Problem
from .execution.markers import (
    EXECUTION_MARK,
    Execution,
    ExecutionModel,
    execution_of,
    execution_problems,
    unknown_executor,
)
from .execution.runners import LoopRunner
from .execution.threads import Workers
from .hosts.bean_checks import injection_problems
from .introspection import EMPTY, Unresolved, class_of, local_names, type_name
from .security import SecurityIdentity
from .tools.marks import ToolMark
from .tools.sources import Member, members_of
from .tools.specification import Role, read_parameters
from .tools.tool_calls import InjectedParameter

F = TypeVar("F", bound="Callable[..., Any] | staticmethod[..., Any] | classmethod[Any, ..., Any]")

START_MARK: Final = "__toolbox_on_start__"


@dataclass(frozen=True, slots=True)
class StartMark:
    """The options of `@on_start`, and the local names in the function's annotations."""

    order: int = 0
    local_names: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False, repr=False)


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
        return _mark(order, 0, sys._getframe(1))
    if not isinstance(order, int) or isinstance(order, bool):
        raise TypeError(f"@on_start: order must be an integer, got {order!r}")
    return lambda target: _mark(target, order, sys._getframe(1))


def _mark(target: Any, order: int, frame: FrameType | None) -> Any:
    function = getattr(target, "__func__", target)
    if inspect.ismethod(target) or isinstance(target, type) or not callable(function):
        raise TypeError(f"@on_start: expected a function or method, got {target!r}; put @on_start above a `def`")
    setattr(target, START_MARK, StartMark(order, local_names([function], frame)))
    return target


def start_mark_of(member: object) -> StartMark | None:
    """Return the mark of a function, or of a bound, static or class method; None without one."""
    mark = getattr(member, START_MARK, None) or getattr(getattr(member, "__func__", None), START_MARK, None)
    return mark if isinstance(mark, StartMark) else None


def has_start_methods(cls: type[Any]) -> bool:
    """Return True if a class, or one of its bases, has a marked method."""
    return any(True for _ in members_of(cls, _as_member))


_MEMBER: Final = ToolMark()


def _as_member(raw: object) -> ToolMark | None:
    return None if start_mark_of(raw) is None else _MEMBER


# --- reading


@dataclass(frozen=True, slots=True)
class StartFunction:
    """A marked function, or a marked method: then `bean` is its bean in the graph, and `member` its name."""

    where: str
    order: int
    execution: Execution
    injected: tuple[InjectedParameter, ...]
    function: Callable[..., Any] | None = None
    bean: int | None = None
    member: str = ""
    problems: tuple[Problem, ...] = ()


def read_function(registered: object) -> Registration | None:
    """Read a marked function at registration; None for other objects."""
    if isinstance(registered, type) or not callable(registered) or (mark := start_mark_of(registered)) is None:
        return None
    where = type_name(registered)
    execution = getattr(registered, EXECUTION_MARK, None)
    made = _read(registered, where, mark, mark.local_names, execution, bound=False, function=registered)
    return Registration((), start=made)


def start_functions(readings: Iterable[Registration]) -> tuple[StartFunction, ...]:
    """Return everything that is marked, in the order in which it runs. `readings` are in the order of registration."""
    found: list[StartFunction] = []
    instances: set[tuple[int, str]] = set()  # one that is registered for two types runs once
    bean = 0
    for reading in readings:
        if reading.start is not None:
            found.append(reading.start)
        for definition in reading.definitions:
            source = definition.source
            is_instance = not (isinstance(source, type) or inspect.isroutine(source))
            own = (type(source),) if is_instance else ()
            for name, member in _methods_of(class_of(definition.provides), *own).items():
                if not is_instance or (id(source), name) not in instances:
                    found.append(_read_method(member, bean))
                if is_instance:
                    instances.add((id(source), name))
            bean += 1
    return tuple(sorted(found, key=lambda each: each.order))


def _methods_of(*classes: Any) -> dict[str, Member]:
    """Return the marked methods of a bean by name: of the type that it provides, and of its class."""
    return {each.attribute: each for cls in classes if isinstance(cls, type) for each in members_of(cls, _as_member)}


def _read_method(member: Member, bean: int) -> StartFunction:
    marks = [mark for each in member.definitions if (mark := start_mark_of(each)) is not None]
    names = {**{each.__name__: each for each in reversed(member.owner.__mro__)}, **marks[0].local_names}
    bound = member.bound_to != "nothing"
    where, execution = member.where, member.execution
    return _read(member.function, where, marks[0], names, execution, bound=bound, bean=bean, member=member.attribute)


def _read(
    called: Any,
    where: str,
    mark: StartMark,
    names: Mapping[str, Any],
    execution: Execution | None,
    *,
    bound: bool,
    **place: Any,
) -> StartFunction:
    problems: list[Problem] = []
    taken = read_parameters(called, where, names, problems, bound=bound)
    injected = [each for each in taken.parameters if each.role is Role.INJECTED]
    for each in taken.parameters:
        if each.role is not Role.INJECTED and not each.has_default:
            fix = f"annotate it as a bean, `{each.name}: Inject[…]`, or give it a default"
            problems.append(Problem(where, f"the parameter {each.name!r} has no value", fix))
    run_as = execution_of(called, execution, taken.returns)
    problems += [*_kind_problems(called, taken.returns, where), *execution_problems(where, called, run_as)]
    return StartFunction(
        where,
        mark.order,
        run_as,
        tuple(InjectedParameter(each.name, each.wanted, each.has_default) for each in injected),
        problems=tuple(problems),
        **place,
    )


def _kind_problems(function: Any, returns: Any, where: str) -> Iterator[Problem]:
    if producer_mark_of(function) is not None:
        fix = "put @on_start on another function that takes the bean with Inject[…]"
        yield Problem(where, "a producer cannot have @on_start: it creates a bean when the bean is needed", fix)
    inner = inspect.unwrap(function)
    kind = typing.get_origin(returns) or returns
    is_stream = kind is not EMPTY and not isinstance(kind, Unresolved) and hasattr(kind, "__aiter__")
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner) or is_stream:
        yield Problem(where, "@on_start does not support generators and streams", "use a function that returns")


# --- checking


def start_problems(functions: Iterable[StartFunction], graph: BeanGraph, workers: Workers) -> Iterator[Problem]:
    """Yield the problems of what runs at start: of its declaration, its beans and its executor."""
    for each in functions:
        yield from each.problems
        yield from injection_problems(each.where, each.injected, graph)
        if each.execution.model is ExecutionModel.EXECUTOR and workers.executor(each.execution) is None:
            yield unknown_executor(each.where, each.execution)
        if each.bean in graph.templates:
            fact = "a generic class has no bean at startup, because its type arguments are unknown"
            yield Problem(each.where, fact, "put @on_start on a class or a function that takes the bean")
        elif each.bean is not None:
            yield from _seed_problems(each.where, SingleBean(each.bean), graph)
        for parameter in each.injected:
            value = graph.value_of(point_of(parameter.wanted, each.where))
            if not (parameter.optional and isinstance(value, SingleBean) and graph.is_seed(value.bean)):
                yield from _seed_problems(each.where, value, graph)


def _seed_problems(where: str, value: Any, graph: BeanGraph) -> Iterator[Problem]:
    for path in graph.seeds_behind(value, {SecurityIdentity}):
        labels = [graph.definitions[key].label for key in path]
        fact = f"it needs the request seed {labels[-1]}, which does not exist at startup"
        fix = f"take `{labels[-1]} | None`, or remove the dependency"
        yield Problem(" -> ".join((where, *labels)), fact, fix)


# --- running


async def run_start_functions(
    functions: Iterable[StartFunction],
    scope: ActiveScope,
    workers: Workers,
    open_request: Callable[[Mapping[Any, Any]], AbstractAsyncContextManager[Any]],
    bean_of: Callable[[int], Awaitable[Any]],
) -> None:
    """Run everything in order, each in its own request scope. Raises the first error as it is.

    `bean_of` returns a bean by its place in the graph, in the active scope; None if it has no value.
    """
    runner = LoopRunner(workers)
    for each in functions:
        # The container may be started inside the request of another one.
        with outside_scopes():
            async with open_request({SecurityIdentity: SecurityIdentity.anonymous()}):
                function = each.function
                if each.bean is not None:
                    function = getattr(await bean_of(each.bean), each.member, None)
                if function is not None:  # an overridden bean may have no such method
                    beans = await _beans_for(each.injected, scope)
                    await runner.run(each.execution, partial(function, **beans), each.where)


async def _beans_for(injected: Iterable[InjectedParameter], scope: ActiveScope) -> dict[str, Any]:
    beans: dict[str, Any] = {}
    for each in injected:
        try:
            beans[each.name] = await scope.aget(each.wanted)
        except MissingBeanError:
            if not each.optional:
                raise
    return beans
