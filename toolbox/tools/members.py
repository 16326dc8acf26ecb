"""Finds the tools of classes and functions, and makes each of them callable: everything decided that can be.

Not here: what a tool is to a model (`specification`), calling one (`pipeline`), lists of tools (`sources`).
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import Problem
from ..execution import EXECUTION_MARK, Execution, execution_of, execution_problems
from ..signatures import EMPTY, Unresolved
from ..type_keys import arguments_for
from .codec import ArgumentDecoder, ResultEncoder
from .marks import ToolMark, tool_mark_of
from .parameters import Role, Taken, ToolParameter, read_parameters
from .pipeline import InjectedParameter, Tool, has_own_tool_calls, member_of
from .specification import describe_tool

_POSITIONAL_ONLY = inspect.Parameter.POSITIONAL_ONLY


@dataclass(frozen=True, slots=True)
class Member:
    """A marked member of a class: what is in the class, the function in it, and what its first parameter is."""

    owner: type
    attribute: str
    raw: Any
    function: Any
    bound_to: str  # "instance", "class" or "nothing"
    mark: ToolMark
    execution: Execution | None
    documentation: str | None

    @property
    def where(self) -> str:
        """The place in the program."""
        return f"{self.owner.__name__}.{self.attribute}"

    def type_variables(self) -> dict[Any, Any]:
        """What the type variables of a generic base stand for in the class that inherits from it."""
        definers = (each for each in self.owner.__mro__ if vars(each).get(self.attribute) is self.raw)
        return arguments_for(self.owner, next(definers, self.owner))


def members_of(cls: type) -> list[Member]:
    """The tools of a class along its MRO, those of its bases first; an override replaces, and keeps the mark."""
    names: dict[str, None] = {}
    for base in reversed(cls.__mro__):
        names.update(dict.fromkeys(name for name, raw in vars(base).items() if tool_mark_of(raw) is not None))
    return [member for name in names if (member := _member(cls, name)) is not None]


def _member(cls: type, name: str) -> Member | None:
    found = [vars(base)[name] for base in cls.__mro__ if name in vars(base)]
    raw = found[0]
    function = getattr(raw, "__func__", raw)
    if not callable(function):  # an override that takes the tool away: `name = None`
        return None
    bound_to = "instance"
    if isinstance(raw, staticmethod):
        bound_to = "nothing"
    elif isinstance(raw, classmethod):
        bound_to = "class"
    mark = next(mark for each in found if (mark := tool_mark_of(each)) is not None)
    documentation = next((text for each in found if (text := getattr(each, "__doc__", None))), None)
    return Member(cls, name, raw, function, bound_to, mark, _execution_mark(found), documentation)


def _execution_mark(found: Sequence[Any]) -> Execution | None:
    """Where the nearest of these says to be run; an override that is a coroutine does not heed what its base says."""
    for each in found:
        function = getattr(each, "__func__", each)
        mark = getattr(each, EXECUTION_MARK, None) or getattr(function, EXECUTION_MARK, None)
        if isinstance(mark, Execution):
            return mark
        if inspect.iscoroutinefunction(function):
            return None
    return None


def read_member(member: Member, bean: Any, instance: Any, problems: list[Problem]) -> Tool | None:
    """The tool that `member` is: of a bean, looked up for each call, or of an instance."""
    local = {**{each.__name__: each for each in reversed(member.owner.__mro__)}, **member.mark.local_names}
    function = None
    if member.bound_to != "instance":
        function = getattr(member.owner, member.attribute)
    elif instance is not None:
        function = member_of(instance, member.attribute)
    reading = _Reading(member.function, member.where, member.mark, member.execution, member.documentation, problems)
    bound = member.bound_to != "nothing"
    taken = read_parameters(
        member.function, member.where, local, problems, bound=bound, variables=member.type_variables()
    )
    return reading.tool(taken, function, bean if function is None else None, member.attribute, instance)


def read_function(function: Any, problems: list[Problem]) -> Tool | None:
    """The tool that a function is, marked or not; also a bound method."""
    mark = tool_mark_of(function) or ToolMark()
    inner = getattr(function, "func", function)
    inner = getattr(inner, "__func__", inner)
    instance = function.__self__ if inspect.ismethod(function) else None
    own_name = str(getattr(inner, "__name__", type(function).__name__))
    where = own_name if instance is None else f"{type(instance).__name__}.{own_name}"
    called = function if callable(function) else inner
    execution = getattr(function, EXECUTION_MARK, None) or getattr(inner, EXECUTION_MARK, None)
    reading = _Reading(inner, where, mark, execution, getattr(inner, "__doc__", None), problems)
    taken = read_parameters(called, where, mark.local_names, problems, bound=False)
    if instance is not None and has_own_tool_calls(instance):
        called = member_of(instance, own_name)
    return reading.tool(taken, called, None, "", instance)


class _Reading:
    """Makes a tool of a function; what is wrong goes to `problems`, and then there is no tool."""

    def __init__(
        self,
        function: Any,
        where: str,
        mark: ToolMark,
        execution: Execution | None,
        documentation: str | None,
        problems: list[Problem],
    ) -> None:
        self.function, self.where, self.mark = function, where, mark
        self.execution, self.documentation = execution, documentation
        self.problems, self._found_before = problems, len(problems)

    def tool(self, taken: Taken, function: Any, bean: Any, member: str, instance: Any) -> Tool | None:
        """The tool, called through `function`, or `member` of `bean`."""
        where, mark, problems = self.where, self.mark, self.problems
        name = mark.name if mark.name is not None else self.function.__name__
        problems += _kind_problems(self.function, taken, where)
        described = describe_tool(name, self.documentation, mark, taken, where, problems)
        execution = execution_of(self.function, self.execution, taken.returns)
        problems += execution_problems(where, self.function, execution)
        if described is None or len(problems) > self._found_before:
            return None
        # A service runs as a tool without memory, and so needs no id.
        without_memory = instance is not None and has_own_tool_calls(instance)
        parameters = taken.parameters
        return Tool(
            specification=described.specification,
            execution=execution,
            where=where,
            function=function,
            encode=ResultEncoder(name, taken.returns).encode,
            decode=ArgumentDecoder(described.adapter, described.visible, described.specification.parameters).decode,
            return_behavior=mark.return_behavior,
            timeout=mark.timeout,
            max_result_chars=mark.max_result_chars,
            bean=bean,
            member=member,
            positional=tuple((each.name, each.default) for each in parameters if each.kind is _POSITIONAL_ONLY),
            memory_id_names=_names(parameters, Role.MEMORY_ID),
            context_names=_names(parameters, Role.CONTEXT),
            needs_memory_id=not without_memory and any(map(_needs_memory_id, parameters)),
            injected=tuple(
                InjectedParameter(each.name, each.wanted, each.has_default)
                for each in parameters
                if each.role is Role.INJECTED
            ),
            returns=taken.returns,
        )


def _needs_memory_id(parameter: ToolParameter) -> bool:
    return parameter.role is Role.MEMORY_ID and not parameter.admits_none and not parameter.has_default


def _names(parameters: Sequence[ToolParameter], role: Role) -> tuple[str, ...]:
    return tuple(each.name for each in parameters if each.role is role)


def _kind_problems(function: Any, taken: Taken, where: str) -> Iterator[Problem]:
    inner = inspect.unwrap(function)
    fix = "return a list, or the joined text"
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        yield Problem(where, "a generator cannot be a tool: it has no one result", fix)
    elif taken.returns is not EMPTY and not isinstance(taken.returns, Unresolved):
        kind = typing.get_origin(taken.returns) or taken.returns
        if isinstance(kind, type) and hasattr(kind, "__aiter__"):
            yield Problem(where, "a tool cannot return a stream: it has one result", fix)
