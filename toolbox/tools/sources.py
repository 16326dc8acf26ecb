"""Reads what can be listed in `tools=` (classes, objects, functions, mappings) into `Tool`s, ready to be called.

Not here: the specification for the model (`specification`), running a tool (`pipeline`), tools without a service
(`executors`).
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from types import ModuleType
from typing import Annotated, Any, Protocol, TypeGuard
from weakref import WeakKeyDictionary, ref

from ..bean_references import definitions_of
from ..chat import Message, ToolExecutor, ToolSpecification, UserMessage
from ..context import InvocationContext
from ..errors import McpConnectionError, Problem
from ..execution.markers import EXECUTION_MARK, Execution, execution_of, execution_problems
from ..introspection import EMPTY, Unresolved, arguments_for, may_be_marked_in, takes
from ..parameters import TAKES_PROGRESS
from ..safe_text import brief
from ..security import OF_KNOWN, access_to
from ..service_names import SERVICE_MARK
from .codec import ArgumentDecoder
from .function_calls import has_own_tool_calls, member_of
from .marks import (
    OWN_TOOL_CALLS,
    ApprovalRule,
    ReturnBehavior,
    SearchBehavior,
    ToolMark,
    ToolOptions,
    compensated_by,
    effects_of,
    tool_mark_of,
)
from .results import ResultEncoder
from .retrievers import is_retriever, read_search
from .single_methods import Home, class_defining, find_stricter, home_of
from .specification import Taken, describe_tool, limit_problems, name_problems, read_parameters
from .tool_calls import Tool, call_options_problems, read_hidden

_NO_MARK = ToolMark()


@dataclass(frozen=True, slots=True)
class Member:
    """A marked member of a class: the attribute `raw`, its function, and what the function is bound to.

    `definitions` are the attribute in the class and its bases, nearest first.
    """

    owner: type
    attribute: str
    raw: Any
    function: Any
    bound_to: str  # "instance", "class" or "nothing"
    mark: ToolMark
    execution: Execution | None
    documentation: str | None
    definitions: tuple[Any, ...]

    @property
    def where(self) -> str:
        """The place that problems name: `Class.attribute`."""
        return f"{self.owner.__name__}.{self.attribute}"

    def type_variables(self) -> dict[Any, Any]:
        """Return the types that replace the type variables of a generic base class."""
        definers = (each for each in self.owner.__mro__ if vars(each).get(self.attribute) is self.raw)
        return arguments_for(self.owner, next(definers, self.owner))


def members_of(cls: type, mark_of: Callable[[object], ToolMark | None] = tool_mark_of) -> Iterator[Member]:
    """Yield the tools of a class and its bases, those of bases first. An override without a mark keeps the mark.

    `mark_of` returns the mark of a member that is run like a tool, or None.
    """
    names: dict[str, None] = {}
    for base in cls.__mro__[-2::-1]:  # without `object`
        for name, raw in may_be_marked_in(base):
            if mark_of(raw) is not None:
                names[name] = None
    return (member for name in names if (member := _member(cls, name, mark_of)) is not None)


def _member(cls: type, name: str, mark_of: Callable[[object], ToolMark | None]) -> Member | None:
    found = definitions_of(cls, name)
    raw = found[0]
    function = getattr(raw, "__func__", raw)
    # `name = None` in a subclass removes the tool. A compensation is never offered to a model.
    if not callable(function) or any(compensated_by(each) is not None for each in found):
        return None
    bound_to = "instance"
    if isinstance(raw, staticmethod):
        bound_to = "nothing"
    elif isinstance(raw, classmethod):
        bound_to = "class"
    mark = next(mark for each in found if (mark := mark_of(each)) is not None)
    documentation = next((text for each in found if (text := getattr(each, "__doc__", None))), None)
    return Member(cls, name, raw, function, bound_to, mark, _execution_mark(found), documentation, found)


def _execution_mark(found: Sequence[Any]) -> Execution | None:
    """Return the nearest execution marker. An `async def` override ignores the markers of its bases."""
    for each in found:
        function = getattr(each, "__func__", each)
        mark = getattr(each, EXECUTION_MARK, None) or getattr(function, EXECUTION_MARK, None)
        if isinstance(mark, Execution):
            return mark
        if inspect.iscoroutinefunction(function):
            return None
    return None


# Descriptions without instance or bean, by class and by function. Services that list the same tools share them.
_of_classes: WeakKeyDictionary[type, dict[str, tuple[Any, Tool]]] = WeakKeyDictionary()
_of_functions: WeakKeyDictionary[Any, dict[str, tuple[Any, Tool]]] = WeakKeyDictionary()


def read_member(member: Member, bean: Any, instance: Any, problems: list[Problem]) -> Tool | None:
    """Return the tool of a member of a bean (looked up for each call) or of an instance; None if it has problems."""
    facts = (ref(member.function), member.bound_to, ref(member.mark), member.execution, member.documentation)
    cache = _of_classes.setdefault(member.owner, {})
    described = _describe_once(cache, member.attribute, facts, lambda: _describe_member(member, problems))
    if described is None or member.bound_to == "instance":
        function = None if instance is None else member_of(instance, member.attribute)
    else:
        function = getattr(member.owner, member.attribute)
    bean = bean if function is None else None
    return _with_target(described, function, bean, member.attribute, instance, member.owner, member.definitions)


def _describe_member(member: Member, problems: list[Problem]) -> tuple[Tool, bool] | None:
    local = {**{each.__name__: each for each in reversed(member.owner.__mro__)}, **member.mark.local_names}
    reading = _Reading(member.function, member.where, member.mark, member.execution, member.documentation, problems)
    bound = member.bound_to != "nothing"
    taken = read_parameters(
        member.function, member.where, local, problems, bound=bound, variables=member.type_variables()
    )
    if not _is_service(member.owner):
        problems += call_options_problems(taken.parameters, member.where)
    return reading.tool(taken)


def read_function(function: Any, problems: list[Problem], mark: ToolMark | None = None) -> Tool | None:
    """Return the tool of a function or bound method, marked or not; None if it has problems."""
    mark = mark or tool_mark_of(function) or _NO_MARK
    inner = getattr(function, "func", function)
    inner = getattr(inner, "__func__", inner)
    instance = function.__self__ if inspect.ismethod(function) else None
    own_name = str(getattr(inner, "__name__", type(function).__name__))
    where = own_name if instance is None else f"{type(instance).__name__}.{own_name}"
    called = function if callable(function) else inner
    execution = getattr(function, EXECUTION_MARK, None) or getattr(inner, EXECUTION_MARK, None)
    documentation = getattr(inner, "__doc__", None)

    def describe() -> tuple[Tool, bool] | None:
        reading = _Reading(inner, where, mark, execution, documentation, problems)
        taken = read_parameters(called, where, mark.local_names, problems, bound=False)
        if not _is_service(type(instance)):
            problems.extend(call_options_problems(taken.parameters, where))
        return reading.tool(taken)

    if inspect.isfunction(function):  # the parameters of a partial depend on its arguments
        facts = (ref(mark), execution, documentation)
        described = _describe_once(_of_functions.setdefault(function, {}), "", facts, describe)
    else:
        made = describe()
        described = None if made is None else made[0]
    if instance is not None and has_own_tool_calls(instance):
        called = member_of(instance, own_name)
    owner, definitions = home_of(function)
    return _with_target(described, called, None, "", instance, owner, definitions)


def _is_service(cls: type) -> bool:
    return hasattr(cls, SERVICE_MARK) or hasattr(cls, OWN_TOOL_CALLS)


def _describe_once(
    cache: dict[str, tuple[Any, Tool]], name: str, facts: Any, describe: Callable[[], tuple[Tool, bool] | None]
) -> Tool | None:
    """Return the cached description if `facts` are unchanged; otherwise create one, and cache it if it is final."""
    known = cache.get(name)
    if known is not None and known[0] == facts:
        return known[1]
    made = describe()
    if made is None:
        return None
    described, is_lasting = made
    if is_lasting:
        cache[name] = facts, described
    return described


def _with_target(
    described: Tool | None,
    function: Any,
    bean: Any,
    member: str,
    instance: Any,
    owner: type | None,
    definitions: tuple[Any, ...],
) -> Tool | None:
    """Return the tool with the function to call: `function`, or `member` of `bean`."""
    if described is None:
        return None
    access = access_to(owner, definitions)
    # A service that runs as a tool has no memory and needs no memory id.
    without_memory = instance is not None and has_own_tool_calls(instance)
    return replace(
        described,
        function=function,
        bean=bean,
        member=member,
        owner=owner,
        definitions=definitions,
        needs_memory_id=described.needs_memory_id and not without_memory,
        access=OF_KNOWN if access is None and described.not_self else access,
        effects=effects_of(definitions[0], owner) if definitions else (),
    )


class _Reading:
    """Creates a tool from a function. Adds mistakes to `problems`; then there is no tool."""

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

    def tool(self, taken: Taken) -> tuple[Tool, bool] | None:
        """Return the tool, without the function to call, and whether this description is final."""
        where, mark, problems = self.where, self.mark, self.problems
        name = mark.name if mark.name is not None else self.function.__name__
        problems += _kind_problems(self.function, taken, where)
        described = describe_tool(name, self.documentation, mark, taken, where, problems)
        execution = execution_of(self.function, self.execution, taken.returns)
        problems += execution_problems(where, self.function, execution)
        if described is None or len(problems) > self._found_before:
            return None
        decoder = ArgumentDecoder(described.adapter, described.visible)
        tool = Tool(
            specification=described.specification,
            execution=execution,
            where=where,
            function=None,
            encode=ResultEncoder(name, taken.returns).encode,
            decode=decoder.decode,
            complete=decoder.complete,
            validate=decoder.validate,
            visible=described.visible,
            returns=taken.returns,
            **mark.options(),
            **read_hidden(taken.parameters),
        )
        # A name that cannot be resolved yet may be defined later.
        return tool, not isinstance(taken.returns, Unresolved)


def _kind_problems(function: Any, taken: Taken, where: str) -> Iterator[Problem]:
    inner = inspect.unwrap(function)
    fix = "return a list or a joined text"
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        yield Problem(where, "a generator cannot be a tool: a tool must return one result", fix)
    elif taken.returns is not EMPTY and not isinstance(taken.returns, Unresolved):
        kind = typing.get_origin(taken.returns) or taken.returns
        if isinstance(kind, type) and hasattr(kind, "__aiter__"):
            yield Problem(where, "a tool cannot return a stream: a tool must return one result", fix)


# --- lists of tools


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
    requires_approval: bool | ApprovalRule = False
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
    `AiServiceTool`s. `unreachable` has the errors of servers whose tools are missing now: a stored run that
    needs one of them is tried again later.
    """

    tools: Mapping[ToolSpecification, ToolExecutor] | Sequence[Any] = field(hash=False)
    unreachable: tuple[McpConnectionError, ...] = field(default=(), compare=False)

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


def _itself(cls: type) -> type:
    return cls


def read_tools(
    sources: Iterable[object], where: str, home: Home = _itself
) -> tuple[tuple[Tool, ...], tuple[Problem, ...]]:
    """Return the tools of `sources`, in order, and all problems with them.

    Sources are classes (beans, also `Annotated` with a name), methods of classes, functions, instances,
    `AiServiceTool`s and mappings `{ToolSpecification: ToolExecutor}`. `where` is the place that problems name. `home`
    returns the class whose method is used for one that is listed by itself.
    """
    tools, problems = read_each(sources, where, home)
    return tools, (*problems, *clashes(tools, where))


def read_each(
    sources: Iterable[object], where: str, home: Home = _itself
) -> tuple[tuple[Tool, ...], tuple[Problem, ...]]:
    """Do the same as `read_tools`, but allow several tools with the same name."""
    problems: list[Problem] = []
    tools: list[Tool] = []
    for source in sources:
        tools += _read(source, where, home, problems)
    return tuple(tools), tuple(problems)


def clashes(tools: Iterable[Tool], where: str) -> Iterator[Problem]:
    """Yield a problem for each name that several tools share, also if one of them had it formerly."""
    by_name: dict[str, list[str]] = {}
    former: list[tuple[str, str]] = []
    for each in tools:
        by_name.setdefault(each.specification.name, []).append(each.where)
        former += [(name, each.where) for name in each.former_names]
    for name, places in by_name.items():
        if len(places) > 1:
            fix = 'rename one of them with @tool(name="…"), or offer only one'
            if len(set(places)) == 1:
                fix = f"list {places[0]} only once"
            yield Problem(where, f"{len(places)} tools have the same name {name!r}: {', '.join(places)}", fix)
    for position, (name, place) in enumerate(former):
        others = [*by_name.get(name, ()), *(other for same, other in former[:position] if same == name)]
        if others:
            fact = f"the former name {name!r} of {place} is also a name of {others[0]}"
            yield Problem(where, fact, "remove it from former_names=, so that stored calls have one tool")


def bean_types(sources: Iterable[object]) -> tuple[type, ...]:
    """Return the classes in `sources` whose tools need an instance."""
    return tuple(
        each
        for each in sources
        if isinstance(each, type) and any(member.bound_to == "instance" for member in members_of(each))
    )


def classes_of_methods(sources: Iterable[object]) -> tuple[type, ...]:
    """Return the classes of the methods in `sources` that are listed by themselves and need an instance."""
    found: list[type] = []
    for each in sources:
        cls = class_defining(each)
        member = None if cls is None else _member_named(cls, each)
        if member is not None and member.bound_to == "instance":
            found.append(member.owner)
    return tuple(dict.fromkeys(found))


# --- one source


def _member_named(cls: type, function: Any) -> Member | None:
    """Return the tool of a class that has the name of this method."""
    name = function.__qualname__.rpartition(".")[2]
    return next((each for each in members_of(cls) if each.attribute == name), None)


def read_method(source: Any, home: Home, problems: list[Problem]) -> tuple[Tool, ...] | None:
    """Return the tool of a method that is listed by itself; empty if it has problems, None for other sources."""
    defining = class_defining(source)
    if defining is None:
        return None
    cls = home(defining)
    member = _member_named(cls, source)
    if member is None:
        return None
    if (other := find_stricter(defining, member.attribute, cls)) is not None:
        name = f"{other.__name__}.{member.attribute}"
        fact = f"is the same function as {name}, whose class adds roles, guardrails or interceptors"
        fix = f"define {name} as well, or list the class that you mean instead of its method"
        problems.append(Problem(member.where, fact, fix))
        return ()
    return _some(read_member(member, defining, None, problems))


def _read(source: Any, where: str, home: Home, problems: list[Problem]) -> Iterator[Tool]:
    if isinstance(source, AiServiceTool):
        made = _by_hand(source.specification, source.executor, where, problems)
        problems += limit_problems(made.where, source.timeout)
        given: dict[str, Any] = {
            each.name: value
            for each in fields(ToolOptions)
            if (value := getattr(source, each.name, each.default)) != each.default
        }
        yield replace(made, **given)
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
        method = read_method(source, home, problems)
        yield from _some(read_function(source, problems)) if method is None else method
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
    if is_retriever(source):
        yield from _some(read_search(source, where, problems))
    elif cls is None or (not isinstance(cls, type) and owner.__module__ == "builtins" and owner is not object):
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
        access=access_to(*home_of(executor)),
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
