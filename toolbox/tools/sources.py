"""Reads everything that can be listed in `tools=` (classes, objects, functions, mappings) into a list of tools.

Not here: the tools of one class (`members`), running a tool (`pipeline`), tools without a service (`executors`).
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Annotated, Any, Protocol, TypeGuard

from ..chat import Message, ToolExecutor, ToolSpecification, UserMessage
from ..context import TAKES_PROGRESS, InvocationContext
from ..errors import Problem
from ..execution.markers import EXECUTION_MARK, execution_of, execution_problems
from ..introspection import takes
from ..safe_text import brief
from ..security import access_to
from .codec import ResultEncoder
from .marks import ReturnBehavior, SearchBehavior, compensated_by, effects_of
from .members import members_of, read_function, read_member
from .pipeline import Tool
from .specification import limit_problems, name_problems

SEARCHABLE = SearchBehavior.SEARCHABLE


@dataclass(frozen=True, slots=True)
class AiServiceTool:
    """A tool from a specification and an executor, for tools that are known only at run time.

        AiServiceTool(ToolSpecification("count", "Count all rows."), lambda request, memory_id: 3)

    `executor` takes the `ToolExecutionRequest` and the memory id, `def` or `async def`. `timeout` is in seconds.
    `requires_approval` and `deferred` are those of `@tool`.
    """

    specification: ToolSpecification
    executor: ToolExecutor
    return_behavior: ReturnBehavior = ReturnBehavior.TO_LLM
    timeout: float | None = None
    search_behavior: SearchBehavior = SearchBehavior.SEARCHABLE
    requires_approval: bool | Callable[..., Any] = False
    deferred: bool = False


@dataclass(frozen=True, slots=True)
class ToolProviderRequest:
    """The argument of a tool provider.

    `user_message`, `memory_id` and `context` are those of the invocation. `tool_names` are the names in use. `messages`
    is the conversation so far, for a dynamic provider; empty for others.
    """

    user_message: UserMessage
    memory_id: Any
    context: InvocationContext
    tool_names: tuple[str, ...] = ()
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolProviderResult:
    """The tools that a provider adds to one invocation.

    `tools` is a mapping `{ToolSpecification: ToolExecutor}`, or a list of functions, objects, classes and
    `AiServiceTool`s.
    """

    tools: Mapping[ToolSpecification, ToolExecutor] | Sequence[Any] = field(hash=False)

    def __post_init__(self) -> None:
        if not isinstance(self.tools, (Mapping, tuple)):
            object.__setattr__(self, "tools", tuple(self.tools))


class ToolProvider(Protocol):
    """Adds tools to each invocation of a service, for example by user: `@register_ai_service(tool_provider=…)`.

        class BookingTools:
            async def provide_tools(self, request: ToolProviderRequest) -> ToolProviderResult | None:
                return ToolProviderResult([find_booking])

    `provide_tools` is `def` or `async def`, and is called once per invocation. A provider with an attribute
    `dynamic = True` is called before each model request, with the conversation so far in `request.messages`. Its tools
    are added and stay until the invocation ends; a tool whose name is in use is skipped.
    """

    def provide_tools(
        self, request: ToolProviderRequest
    ) -> ToolProviderResult | Awaitable[ToolProviderResult | None] | None:
        """Return the tools for this invocation, or None for no tools."""
        ...


class HoldsTool(Protocol):
    """An executor that was created from a tool. A service runs that tool directly."""

    tool: Tool


def read_tools(sources: Iterable[object], where: str) -> tuple[tuple[Tool, ...], tuple[Problem, ...]]:
    """Return the tools of `sources`, in order, and all problems with them.

    Sources are classes (beans, also `Annotated` with a name), functions, instances, `AiServiceTool`s and mappings
    `{ToolSpecification: ToolExecutor}`. `where` is the place that problems name.
    """
    tools, problems = read_each(sources, where)
    return tools, (*problems, *clashes(tools, where))


def read_each(sources: Iterable[object], where: str) -> tuple[tuple[Tool, ...], tuple[Problem, ...]]:
    """Do the same as `read_tools`, but allow several tools with the same name."""
    problems: list[Problem] = []
    tools: list[Tool] = []
    for source in sources:
        tools += _read(source, where, problems)
    return tuple(tools), tuple(problems)


def clashes(tools: Iterable[Tool], where: str) -> Iterator[Problem]:
    """Yield a problem for each name that several tools share."""
    by_name: dict[str, list[str]] = {}
    for each in tools:
        by_name.setdefault(each.specification.name, []).append(each.where)
    for name, places in by_name.items():
        if len(places) > 1:
            fix = 'rename one of them with @tool(name="…"), or offer only one'
            if len(set(places)) == 1:
                fix = f"list {places[0]} only once"
            yield Problem(where, f"{len(places)} tools have the same name {name!r}: {', '.join(places)}", fix)


def bean_types(sources: Iterable[object]) -> tuple[type, ...]:
    """Return the classes in `sources` whose tools need an instance."""
    return tuple(
        each
        for each in sources
        if isinstance(each, type) and any(member.bound_to == "instance" for member in members_of(each))
    )


# --- one source


def _read(source: Any, where: str, problems: list[Problem]) -> Iterator[Tool]:
    if isinstance(source, AiServiceTool):
        made = _by_hand(source.specification, source.executor, where, problems)
        problems += limit_problems(made.where, source.timeout)
        timeout = made.timeout if source.timeout is None else source.timeout
        visibility = made.search_behavior if source.search_behavior is SEARCHABLE else source.search_behavior
        yield replace(
            made,
            return_behavior=source.return_behavior,
            timeout=timeout,
            search_behavior=visibility,
            requires_approval=source.requires_approval or made.requires_approval,
            deferred=source.deferred or made.deferred,
        )
    elif isinstance(source, Mapping):
        for specification, executor in source.items():
            if isinstance(specification, ToolSpecification) and callable(executor):
                yield _by_hand(specification, executor, where, problems)
            else:
                fact = f"invalid entry in a mapping of tools: {specification!r}: {executor!r}"
                fix = "map each ToolSpecification to a function of the request and the memory id"
                problems.append(Problem(where, fact, fix))
    elif compensated_by(source) is not None:
        return  # it undoes a tool and is not offered
    elif is_function(source):
        yield from _some(read_function(source, problems))
    elif isinstance(source, ModuleType):
        fact = f"the module {source.__name__} is not a tool"
        problems.append(Problem(where, fact, "list its classes and functions"))
    elif _is_collection(source):
        fact = f"{source!r} is not a tool"
        problems.append(
            Problem(where, fact, "list the tools themselves, not a collection of tools or the name of a tool")
        )
    else:
        yield from _read_members(source, where, problems)


def _read_members(source: Any, where: str, problems: list[Problem]) -> Iterator[Tool]:
    named = typing.get_origin(source) is Annotated
    cls = typing.get_args(source)[0] if named else source
    cls = typing.get_origin(cls) or cls
    owner = cls if isinstance(cls, type) else type(cls)
    members = list(members_of(owner))
    if cls is None or (not isinstance(cls, type) and owner.__module__ == "builtins" and owner is not object):
        fact = f"{brief(repr(source))} is not a tool"
        problems.append(Problem(where, fact, "list a class, an object or a function"))
    elif not members:
        fact = f"{owner.__name__} has no tools"
        problems.append(Problem(where, fact, "add @tool to the methods that the model may call"))
    for member in members:
        if isinstance(cls, type):
            yield from _some(read_member(member, source, None, problems))
        else:
            yield from _some(read_member(member, None, source, problems))


def _some(tool: Tool | None) -> tuple[Tool, ...]:
    return () if tool is None else (tool,)


def is_function(source: object) -> bool:
    """Return True for a function, a method or a partial; False for an object with tools."""
    return inspect.isroutine(source) or isinstance(source, (functools.partial, staticmethod, classmethod))


def _is_collection(source: object) -> bool:
    if isinstance(source, type) or typing.get_origin(source) is not None:
        return False
    return isinstance(source, Iterable) and not any(True for _ in members_of(type(source)))


def holds_tool(executor: object) -> TypeGuard[HoldsTool]:
    """Return True if this executor was created from a tool."""
    return isinstance(getattr(executor, "tool", None), Tool)


def _by_hand(specification: ToolSpecification, executor: Any, where: str, problems: list[Problem]) -> Tool:
    name = specification.name
    place = f"{where} (tool {name})"
    problems += name_problems(name, place)
    if holds_tool(executor):
        made: Tool = executor.tool
        return made if made.specification is specification else replace(made, specification=specification)
    execution = execution_of(
        getattr(executor, "__call__", executor) if not is_function(executor) else executor,  # noqa: B004
        getattr(executor, EXECUTION_MARK, None),
    )
    problems += execution_problems(place, executor, execution)
    if not takes(executor, 2):
        fact = f"the executor {executor!r} must take two parameters, the request and the memory id"
        problems.append(Problem(place, fact, "declare it as `def executor(request, memory_id)`"))
    return Tool(
        specification=specification,
        execution=execution,
        where=place,
        function=executor,
        encode=ResultEncoder(name).encode,
        definitions=(executor,),
        access=access_to(None if is_function(executor) else type(executor), [executor]),
        effects=(*effects_of(executor), *_declared_effects(specification)),
        search_behavior=_search_behavior_in(specification),
        progress_names=("progress",) if getattr(executor, TAKES_PROGRESS, False) else (),
    )


def _declared_effects(specification: ToolSpecification) -> tuple[str, ...]:
    """Return `destructive` for a tool of an MCP server whose annotations say so; the default of a tool that writes."""
    hints = specification.metadata.get("annotations")
    if not isinstance(hints, Mapping):
        return ()
    return ("destructive",) if hints.get("destructiveHint", hints.get("readOnlyHint") is False) is True else ()


def _search_behavior_in(specification: ToolSpecification) -> SearchBehavior:
    """Return the behavior in the metadata of a specification, for tools that are not marked with `@tool`."""
    for key in ("search_behavior", "searchBehavior"):
        with suppress(ValueError):
            return SearchBehavior(str(specification.metadata.get(key)).lower())
    return SEARCHABLE
