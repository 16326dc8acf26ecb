"""Functions and methods of beans that the container calls itself: their marks, how they are read, checked and called.

Not here: when they are called (`startup`, `observers`).
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from .di.decorators import producer_mark_of
from .di.graph import BeanGraph, Registration
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
from .tools.marks import ToolMark
from .tools.sources import Member, members_of
from .tools.specification import Role, ToolParameter, read_parameters
from .tools.tool_calls import InjectedParameter

if TYPE_CHECKING:
    from .di.wiring import Wiring


@dataclass(frozen=True, slots=True)
class CalledMark:
    """The options of a decorator, and the local names in the function's annotations."""

    options: Any = None
    local_names: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class CalledFunction:
    """A marked function, or a marked method: then `bean` is its bean in the graph, and `member` its name.

    `others` are the parameters that are not injected.
    """

    decorator: str
    where: str
    options: Any
    execution: Execution
    injected: tuple[InjectedParameter, ...]
    others: tuple[ToolParameter, ...] = ()
    function: Callable[..., Any] | None = None
    bean: int | None = None
    member: str = ""
    problems: tuple[Problem, ...] = ()


# --- marks and reading

_MEMBER: Final = ToolMark()


@dataclass(frozen=True, slots=True)
class CallDecorator:
    """A decorator of functions that the container calls: its `name`, such as `@on_start`, and the attribute of marks.

    `check_others(where, parameters)` yields the problems of the parameters that are not injected.
    """

    name: str
    attribute: str
    check_others: Callable[[str, tuple[ToolParameter, ...]], Iterator[Problem]]

    def mark(self, target: Any, options: Any, frame: FrameType | None) -> Any:
        """Mark a function, or a static or class method, and return it. Raises `TypeError` for anything else."""
        function = getattr(target, "__func__", target)
        if inspect.ismethod(target) or isinstance(target, type) or not callable(function):
            fix = f"put {self.name} above a `def`"
            raise TypeError(f"{self.name}: expected a function or method, got {target!r}; {fix}")
        setattr(target, self.attribute, CalledMark(options, local_names([function], frame)))
        return target

    def mark_of(self, member: object) -> CalledMark | None:
        """Return the mark of a function, or of a bound, static or class method; None without one."""
        function = getattr(member, "__func__", None)
        mark = getattr(member, self.attribute, None) or getattr(function, self.attribute, None)
        return mark if isinstance(mark, CalledMark) else None

    def has_methods(self, cls: type[Any]) -> bool:
        """Return True if a class, or one of its bases, has a marked method."""
        return any(True for _ in members_of(cls, self._as_member))

    def read_function(self, registered: object) -> CalledFunction | None:
        """Read a marked function at registration; None for other objects."""
        if isinstance(registered, type) or not callable(registered) or (mark := self.mark_of(registered)) is None:
            return None
        where, execution = type_name(registered), getattr(registered, EXECUTION_MARK, None)
        return self._read_function(
            registered, where, mark, mark.local_names, execution, bound=False, function=registered
        )

    def functions_in(self, readings: Iterable[Registration], graph: BeanGraph) -> Iterator[CalledFunction]:
        """Yield the marked functions and methods of all registered objects, which are `readings` in their order."""
        instances: set[tuple[int, str]] = set()  # one that is registered for two types is called once
        for reading in readings:
            yield from (each for each in reading.called if each.decorator == self.name)
            for definition in reading.definitions:
                yield from self._find_methods(graph.key_of(definition), graph, instances)
            if reading.decorator is not None:
                for outer, inner in graph.decorations.inner_of.items():
                    if graph.definitions[outer].source is reading.decorator.definition.source:
                        of_inner = self._find_members(class_of(graph.definitions[inner].provides))
                        found = self._find_methods(outer, graph, instances)
                        yield from (each for each in found if each.member not in of_inner)

    def _find_methods(self, key: int, graph: BeanGraph, instances: set[tuple[int, str]]) -> Iterator[CalledFunction]:
        definition = graph.definitions[key]
        source = definition.source
        is_instance = not (isinstance(source, type) or inspect.isroutine(source))
        own = (type(source),) if is_instance else ()
        for name, member in self._find_members(class_of(definition.provides), *own).items():
            if not is_instance or (id(source), name) not in instances:
                yield self._read_method(member, key)
            if is_instance:
                instances.add((id(source), name))

    def _as_member(self, raw: object) -> ToolMark | None:
        return None if self.mark_of(raw) is None else _MEMBER

    def _find_members(self, *classes: Any) -> dict[str, Member]:
        """Return the marked methods of a bean by name: of the type that it provides, and of an instance's class."""
        found = (each for cls in classes if isinstance(cls, type) for each in members_of(cls, self._as_member))
        return {each.attribute: each for each in found}

    def _read_method(self, member: Member, bean: int) -> CalledFunction:
        marks = [mark for each in member.definitions if (mark := self.mark_of(each)) is not None]
        names = {**{each.__name__: each for each in reversed(member.owner.__mro__)}, **marks[0].local_names}
        return self._read_function(
            member.function,
            member.where,
            marks[0],
            names,
            member.execution,
            bound=member.bound_to != "nothing",
            bean=bean,
            member=member.attribute,
        )

    def _read_function(
        self,
        called: Any,
        where: str,
        mark: CalledMark,
        names: Mapping[str, Any],
        execution: Execution | None,
        *,
        bound: bool,
        **place: Any,
    ) -> CalledFunction:
        problems: list[Problem] = []
        taken = read_parameters(called, where, names, problems, bound=bound)
        injected = [each for each in taken.parameters if each.role is Role.INJECTED]
        others = tuple(each for each in taken.parameters if each.role is not Role.INJECTED)
        problems += self.check_others(where, others)
        for each in taken.parameters:
            if each.kind is inspect.Parameter.POSITIONAL_ONLY:
                fact = f"the positional-only parameter {each.name!r} is not supported"
                problems.append(Problem(where, fact, "remove the `/`"))
        run_as = execution_of(called, execution, taken.returns)
        problems += [*self._problems_of_kind(called, taken.returns, where), *execution_problems(where, called, run_as)]
        return CalledFunction(
            self.name,
            where,
            mark.options,
            run_as,
            tuple(InjectedParameter(each.name, each.wanted, each.has_default) for each in injected),
            others,
            problems=tuple(problems),
            **place,
        )

    def _problems_of_kind(self, function: Any, returns: Any, where: str) -> Iterator[Problem]:
        if producer_mark_of(function) is not None:
            fix = f"put {self.name} on another function that takes the bean with Inject[…]"
            yield Problem(where, f"a producer cannot have {self.name}: it creates a bean when the bean is needed", fix)
        inner = inspect.unwrap(function)
        kind = typing.get_origin(returns) or returns
        is_stream = kind is not EMPTY and not isinstance(kind, Unresolved) and hasattr(kind, "__aiter__")
        if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner) or is_stream:
            yield Problem(where, f"{self.name} does not support generators and streams", "use a function that returns")


def values_missing(where: str, parameters: Iterable[ToolParameter]) -> Iterator[Problem]:
    """Yield a problem for each parameter that gets no value."""
    for each in parameters:
        if not each.has_default:
            fix = f"annotate it as a bean, `{each.name}: Inject[…]`, or give it a default"
            yield Problem(where, f"the parameter {each.name!r} has no value", fix)


# --- checking


def called_problems(functions: Iterable[CalledFunction], graph: BeanGraph, workers: Workers) -> Iterator[Problem]:
    """Yield the problems of marked functions: of their declaration, their beans and their executor."""
    for each in functions:
        yield from each.problems
        yield from injection_problems(each.where, each.injected, graph)
        if each.execution.model is ExecutionModel.EXECUTOR and workers.executor(each.execution) is None:
            yield unknown_executor(each.where, each.execution)
        if each.bean in graph.templates:
            fact = "a generic class has no bean at startup, because its type arguments are unknown"
            yield Problem(each.where, fact, f"put {each.decorator} on a class or a function that takes the bean")


# --- calling


async def call_in_scope(
    called: CalledFunction, beans: Wiring, runner: LoopRunner, given: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Call a function with `given` and its injected parameters, in the active scope, where a tool would run."""
    function = called.function
    if called.bean is not None:
        function = getattr(await beans.find_bean(called.bean), called.member, None)
    # A producer may return None, and what replaces the bean, an override or a seed, may have no such method.
    if function is None:
        return
    arguments = dict(given)
    for each in called.injected:
        try:
            arguments[each.name] = await beans.aget(each.wanted)
        except MissingBeanError:
            if not each.optional:
                raise
    await runner.run(called.execution, partial(function, **arguments), called.where)
