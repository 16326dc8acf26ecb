"""Finds the tools of classes and functions, and makes each of them callable: everything decided that can be.

Not here: what a tool is to a model (`specification`), calling one (`invocation`), lists of tools (`sources`).
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
from .codec import ArgumentDecoder, ResultEncoder
from .invocation import InjectedParameter, Tool, member_of
from .marks import ToolMark, tool_mark_of
from .parameters import Role, Taken, ToolParameter, read_parameters
from .specification import Described, describe_tool

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
    name = member.mark.name if member.mark.name is not None else member.function.__name__
    names = {**{each.__name__: each for each in reversed(member.owner.__mro__)}, **member.mark.local_names}
    found = len(problems)
    problems += _kind_problems(member.function, member.where)
    taken = read_parameters(member.function, member.where, names, problems, bound=member.bound_to != "nothing")
    described = describe_tool(name, member.documentation, member.mark, taken, member.where, problems)
    execution = execution_of(member.function, member.execution, taken.returns)
    problems += execution_problems(member.where, member.function, execution)
    problems += _stream_problems(taken, member.where)
    if described is None or len(problems) > found:
        return None
    function = None
    if member.bound_to != "instance":
        function = getattr(member.owner, member.attribute)
    elif instance is not None:
        function = member_of(instance, member.attribute)
    return _tool(
        described,
        taken,
        member.mark,
        execution,
        member.where,
        function,
        bean if function is None else None,
        member.attribute,
    )


def read_function(function: Any, problems: list[Problem]) -> Tool | None:
    """The tool that a function is, marked or not; also a bound method."""
    mark = tool_mark_of(function) or ToolMark()
    inner = getattr(function, "func", function)
    inner = getattr(inner, "__func__", inner)
    own_name = getattr(inner, "__name__", type(function).__name__)
    owner = type(function.__self__).__name__ + "." if inspect.ismethod(function) else ""
    where = f"{owner}{own_name}"
    found = len(problems)
    called = function if callable(function) else inner
    problems += _kind_problems(inner, where)
    taken = read_parameters(called, where, mark.local_names, problems, bound=False)
    name = mark.name if mark.name is not None else own_name
    described = describe_tool(name, inspect.getdoc(inner), mark, taken, where, problems)
    execution_mark = getattr(function, EXECUTION_MARK, None) or getattr(inner, EXECUTION_MARK, None)
    execution = execution_of(inner, execution_mark, taken.returns)
    problems += execution_problems(where, inner, execution)
    problems += _stream_problems(taken, where)
    if described is None or len(problems) > found:
        return None
    return _tool(described, taken, mark, execution, where, called, None, "")


def _tool(
    described: Described,
    taken: Taken,
    mark: ToolMark,
    execution: Execution,
    where: str,
    function: Any,
    bean: Any,
    member: str,
) -> Tool:
    parameters = taken.parameters
    return Tool(
        specification=described.specification,
        execution=execution,
        where=where,
        function=function,
        encode=ResultEncoder(described.specification.name, taken.returns).encode,
        decode=ArgumentDecoder(described.adapter, described.visible).decode,
        return_behavior=mark.return_behavior,
        timeout=mark.timeout,
        max_result_chars=mark.max_result_chars,
        bean=bean,
        member=member,
        positional=tuple((each.name, each.default) for each in parameters if each.kind is _POSITIONAL_ONLY),
        memory_id_names=_names(parameters, Role.MEMORY_ID),
        context_names=_names(parameters, Role.CONTEXT),
        needs_memory_id=any(
            each.role is Role.MEMORY_ID and not each.admits_none and not each.has_default for each in parameters
        ),
        injected=tuple(
            InjectedParameter(each.name, each.wanted, each.has_default)
            for each in parameters
            if each.role is Role.INJECTED
        ),
    )


def _names(parameters: Sequence[ToolParameter], role: Role) -> tuple[str, ...]:
    return tuple(each.name for each in parameters if each.role is role)


def _kind_problems(function: Any, where: str) -> Iterator[Problem]:
    inner = inspect.unwrap(function)
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        yield Problem(where, "a generator cannot be a tool: it has no one result", "return a list, or the joined text")


def _stream_problems(taken: Taken, where: str) -> Iterator[Problem]:
    returns = taken.returns
    if returns is EMPTY or isinstance(returns, Unresolved):
        return
    origin = typing.get_origin(returns) or returns
    if isinstance(origin, type) and hasattr(origin, "__aiter__"):
        yield Problem(where, "a tool cannot return a stream: it has one result", "return a list, or the joined text")
