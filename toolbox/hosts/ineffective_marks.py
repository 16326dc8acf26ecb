"""Checks at start: marks that can have no effect where a decorator has left them.

Not here: mistakes in marks that have an effect, which their readers report; marks of roles (`bean_checks`,
`toolbox_fastapi.endpoint_roles`), which are checked in abstract classes too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Flag, auto
from functools import cached_property
from types import FunctionType
from typing import Any

from ..bean_references import COMPENSATION_MARK, REFERENCES_MARK, REST_MARKS, TOOL_MARK, is_rest_client
from ..di.conditions import CONDITIONS_MARK
from ..di.decorators import PRODUCER_MARK, SCOPE_MARK, Scope, scope_mark_of
from ..di.graph import BeanGraph
from ..errors import Problem
from ..execution.markers import EXECUTION_MARK, decorator_of
from ..handover import HANDOVERS_MARK
from ..introspection import class_of, has_body, may_be_marked, may_be_marked_in, type_name
from ..models.fallback_marks import FALLBACK_MARK, fallbacks_at
from ..request_hooks import BEFORE_MODEL_REQUEST, ON_SUCCESS
from ..retrieval import RETRIEVES_MARK
from ..security import ACCESS_MARK
from ..services.call_messages import FunctionMessage
from ..services.declaration import (
    DURABLE_MARK,
    HANDLER_MARK,
    PROVIDERS_MARK,
    SYSTEM_MARK,
    USER_MARK,
    is_interface,
    method_names,
    service_options_of,
)
from ..services.plans import MethodPlan
from ..tools.marks import OWN_TOOL_CALLS, TOOLBOX_MARK, mcp_marked, tool_mark_of
from ..tools.sources import members_of


class Use(Flag):
    """What the library uses a class, a method or a function for. A method also has the uses of its class."""

    NONE = 0
    SERVICE = auto()
    CLIENT = auto()
    TOOLS = auto()  # a class with tools
    TOOL = auto()
    ANSWERED = auto()  # a method that a model answers
    CALLED = auto()  # at start, for an event, before a model request, after an error, and the like
    ENDPOINT = auto()
    DEPENDENCY = auto()  # of an endpoint
    MEMBER = auto()  # a method of any bean


# --- where marks have an effect


@dataclass(frozen=True, slots=True)
class _Rule:
    """Where a mark has an effect: at methods and functions with one of the uses `at`, at classes with one of `classes`.

    `lacks` and `class_lacks` say what is missing elsewhere, and `fix` where to put the decorator.
    """

    at: Use
    lacks: str
    fix: str
    classes: Use = Use.NONE
    class_lacks: str = "it does not support classes"


_NO_ANSWER = "no model answers it"
_OF_TOOLS = _Rule(
    Use.TOOL | Use.ANSWERED,
    "it is neither a tool nor answered by a model",
    "put it on a tool, on a class with tools, on an AI service, or on a method of it that has no body",
    Use.TOOLS | Use.SERVICE,
    "the class has no tools and is not an AI service",
)
_OF_SERVICES = _Rule(
    Use.ANSWERED,
    _NO_ANSWER,
    "put it on an AI service, or on a method of it that has no body",
    Use.SERVICE,
    "the class is not an AI service",
)
# Those of tools are reported with the other guardrails of the tool.
_OF_ANSWERS = replace(_OF_SERVICES, at=Use.ANSWERED | Use.TOOL, classes=Use.SERVICE | Use.TOOLS)
_OF_METHODS = _Rule(Use.ANSWERED, _NO_ANSWER, "put it on a method of an AI service that has no body")
_OF_CLIENTS = _Rule(
    Use.CLIENT,
    "the class is not a REST client",
    "add @register_rest_client to the class",
    Use.CLIENT,
    "the class is not a REST client",
)
_OF_CALLS = _Rule(Use.TOOL | Use.CALLED, "it is not a tool", "remove it, or put it on a tool")
_OF_HANDLERS = _Rule(Use.SERVICE, "the class is not an AI service", "put it on a static method of an AI service")

_RULES: Mapping[str, tuple[str, _Rule]] = {
    **{attribute: (decorator, _OF_CLIENTS) for attribute, decorator in REST_MARKS.items()},
    "interceptors": ("@interceptors", _OF_TOOLS),
    "tool_input_guardrails": ("@tool_input_guardrails", _OF_TOOLS),
    "tool_output_guardrails": ("@tool_output_guardrails", _OF_TOOLS),
    "input_guardrails": ("@input_guardrails", _OF_ANSWERS),
    "output_guardrails": ("@output_guardrails", _OF_ANSWERS),
    HANDOVERS_MARK: ("@hands_over_to", _OF_METHODS),
    SYSTEM_MARK: ("@system_message", _OF_SERVICES),
    PROVIDERS_MARK: ("@mcp_toolbox", _OF_SERVICES),
    USER_MARK: ("@user_message", _OF_METHODS),
    DURABLE_MARK: ("@durable", _OF_METHODS),
    FALLBACK_MARK: ("@fallback", replace(_OF_METHODS, fix="name a method without a body")),
    TOOLBOX_MARK: (
        "@toolbox",
        _Rule(
            Use.ANSWERED | Use.ENDPOINT,
            _NO_ANSWER,
            "put @toolbox on a method of an AI service, or on an endpoint",
        ),
    ),
    RETRIEVES_MARK: ("@retrieves", _OF_METHODS),
    COMPENSATION_MARK: (
        "@compensate_for",
        _Rule(Use.TOOLS | Use.TOOL, "the class has no tools", "put it on a method of the class that has the tool"),
    ),
    BEFORE_MODEL_REQUEST.mark: (
        BEFORE_MODEL_REQUEST.decorator,
        _Rule(Use.MEMBER, "it is not a method of a bean", "put it on a method of a request- or call-scoped bean"),
    ),
    ON_SUCCESS.mark: (
        ON_SUCCESS.decorator,
        _Rule(Use.MEMBER, "it is not a method of a bean", "put it on a method of a request-scoped bean"),
    ),
    ACCESS_MARK: (
        "a mark of roles",
        _Rule(
            Use.TOOL | Use.ENDPOINT | Use.DEPENDENCY | Use.MEMBER,  # these have their own checks
            "the function is neither a tool nor an endpoint",
            "put it on a tool or an endpoint",
            Use.MEMBER,
        ),
    ),
}


def _named_in(marks: Mapping[str, Any]) -> Iterator[tuple[str, _Rule]]:
    """Yield the decorators that have left these marks, with their rules."""
    for attribute, value in {**marks, **marks.get(REFERENCES_MARK, {})}.items():
        if attribute == EXECUTION_MARK:
            yield decorator_of(value), _OF_CALLS
        elif attribute == HANDLER_MARK:
            yield f"@{value.replace('on_', 'handle_', 1)}", _OF_HANDLERS
        elif attribute in _RULES:
            yield _RULES[attribute]


def _problems_at(
    where: str, marks: Mapping[str, Any], uses: Use, function: Any
) -> Iterator[tuple[str, Problem | None]]:
    """Yield each decorator of a method or function with its problem, or with None if it has an effect."""
    for decorator, rule in _named_in(marks):
        if rule.at & uses:
            yield decorator, None
        elif decorator == "@durable" and has_body(function):
            yield decorator, Problem(where, "@durable on a function with a body is not supported", rule.fix)
        else:
            is_other = rule.lacks == _NO_ANSWER and Use.MEMBER in uses and Use.SERVICE not in uses
            lacks = "the class is not an AI service" if is_other else rule.lacks
            yield decorator, Problem(where, f"{decorator} has no effect here: {lacks}", rule.fix)


# --- a whole program


def mark_problems(
    graph: BeanGraph,
    plans: Collection[MethodPlan],
    functions: Iterable[tuple[str, Any, Use]],
    called: Collection[str],
) -> Iterator[Problem]:
    """Yield a problem for each mark that can have no effect where it is.

    `plans` are those of the services. `functions` are those of the program that are not beans, with their places.
    `called` are the attributes of functions and methods that the container calls itself.
    """
    functions = [*functions]
    yield from class_problems(_classes_in(graph), plans, called, [function for _, function, _ in functions])
    for where, function, uses in functions:
        yield from function_problems(where, function, uses)
    tools = {id(each): each for plan in plans for tool in plan.toolset.tools for each in tool.definitions[:1]}
    for each in graph.definitions:
        if inspect.isroutine(each.source) and id(each.source) not in tools:
            yield from function_problems(type_name(each.source), each.source)


# --- functions


def function_problems(where: str, function: Any, uses: Use = Use.NONE) -> Iterator[Problem]:
    """Yield a problem for each mark of a function that can have no effect there, unless it is marked as a tool."""
    plain = getattr(function, "__func__", function)
    if not isinstance(plain, FunctionType):
        return
    if TOOL_MARK in vars(plain):
        uses |= Use.TOOL
    for _, problem in _problems_at(where, vars(plain), uses, inspect.unwrap(plain)):
        if problem is not None:
            yield problem


# --- classes


def class_problems(
    classes: Iterable[type[Any]],
    plans: Collection[MethodPlan],
    called: Collection[str] = (),
    functions: Iterable[Any] = (),
) -> Iterator[Problem]:
    """Yield a problem for each mark in these classes, and at the services' tools, that has no effect in any of them."""
    tools = [tool for plan in plans for tool in (*plan.toolset.tools, *plan.compensations.values())]
    # The implementation of a service has copies of the marks.
    owners = [each.owner for each in tools if each.owner is not None and not hasattr(each.owner, OWN_TOOL_CALLS)]
    listed = {id(_plain(each)) for tool in tools for each in (*tool.definitions, tool.function)}
    services = frozenset(plan.service for plan in plans)
    named = {*_functions_named(plans), *(id(_plain(each)) for each in functions)}
    reader = _MarkReader(services, frozenset(owners), listed, named, frozenset(called))
    found: dict[tuple[type[Any], str, str], Problem | None] = {}
    for cls in dict.fromkeys((*classes, *owners)):
        for base, name, decorator, problem in reader.marks_of(cls):
            key = base, name, decorator
            # A mixin or a base class may be useful in one of the classes only.
            found[key] = problem if found.get(key, problem) is not None else None
    yield from (problem for problem in found.values() if problem is not None)
    for tool in tools:
        if tool.owner is None and tool.definitions:
            yield from function_problems(tool.where, tool.definitions[0], Use.TOOL | Use.ENDPOINT)


def _classes_in(graph: BeanGraph) -> Iterator[type[Any]]:
    """Yield the classes of the beans; of an instance also its own class."""
    for each in graph.definitions:
        is_instance = not (isinstance(each.source, type) or inspect.isroutine(each.source))
        for cls in (class_of(each.provides), *((type(each.source),) if is_instance else ())):
            if isinstance(cls, type):
                yield cls


def _plain(function: Any) -> Any:
    return getattr(function, "__func__", function)


def _function_of(member: Any) -> Any:
    """Return the function of a member of a class: of a method of any kind, or the getter of a property."""
    if isinstance(member, property):
        return member.fget
    return member.func if isinstance(member, cached_property) else _plain(member)


def _functions_named(plans: Iterable[MethodPlan]) -> Iterator[int]:
    """Yield the identities of functions that options and decorators of services name."""
    for plan in plans:
        failures = plan.failures
        named: list[Callable[..., Any] | None] = [
            failures.on_unknown_tool,
            failures.on_tool_arguments_error,
            failures.on_tool_execution_error,
            *fallbacks_at(getattr(plan.service, plan.name)),
            *(each.given for each in plan.providers),
        ]
        if isinstance(plan.messages.system, FunctionMessage):
            named.append(plan.messages.system.function)
        yield from (id(_plain(each)) for each in named)


@dataclass(frozen=True, slots=True)
class _MarkReader:
    """Reads the marks in classes.

    `services` have plans, also without their decorator. `owners` are the classes of the services' tools. `listed` and
    `named` are the identities of the functions of these tools, and of other functions that the program names.
    """

    services: frozenset[type[Any]]
    owners: frozenset[type[Any]]
    listed: Collection[int]
    named: Collection[int]
    called: frozenset[str]

    def marks_of(self, cls: type[Any]) -> Iterator[tuple[type[Any], str, str, Problem | None]]:
        """Yield each mark: its class, the name of the method or "", the decorator, and the problem or None."""
        bases = [each for each in cls.__mro__[:-1] if each is cls or not _is_declaration(each)]
        members = [(base, *each) for base in bases for each in _marked_members(base)]
        if not members and all(map(_ATTRIBUTES.isdisjoint, map(vars, bases))):
            return  # nearly all classes
        answered = method_names(cls) if cls in self.services or service_options_of(cls) is not None else None
        kind = Use.NONE if answered is None else Use.SERVICE
        kind |= Use.CLIENT if is_rest_client(cls) else Use.NONE
        tools = {each.attribute for each in members_of(cls)}
        # What a tool provider returns is known only in a call.
        provides = hasattr(cls, "provide_tools")
        kind |= Use.TOOLS if tools or provides or cls in self.owners else Use.NONE
        for base in bases:
            for decorator, problem in _at_class(base, kind):
                yield base, "", decorator, problem
        for base, name, raw, function in members:
            marks = {**vars(function), **getattr(raw, "__dict__", {})}
            uses = kind | Use.MEMBER
            if provides or name in tools or id(function) in self.listed:
                uses |= Use.TOOL
            if answered is not None and name in answered:
                uses |= Use.ANSWERED
            if id(function) in self.named or self._is_called(cls, name, function, marks):
                uses |= Use.CALLED
            if isinstance(raw, _PROPERTIES):  # nobody calls it as a method
                uses = Use.NONE
            for decorator, problem in _at_member(f"{base.__name__}.{name}", marks, uses, raw):
                yield base, name, decorator, problem

    def _is_called(self, cls: type[Any], name: str, function: Any, marks: Mapping[str, Any]) -> bool:
        """Return True for a method that the library calls itself."""
        if not self.called.isdisjoint(marks) or not _CALLED_MARKS.isdisjoint(marks) or name in mcp_marked(cls):
            return True
        if name in _INTERFACES and hasattr(cls, _INTERFACES[name]):
            return True
        found = (tool_mark_of(raw) for base in cls.__mro__ for _, raw in may_be_marked_in(base))
        rules = (mark.requires_approval for mark in found if mark is not None)
        is_rule = any(_plain(each) is function for each in rules)
        return is_rule or "request" in inspect.signature(function).parameters  # an executor


_ATTRIBUTES = frozenset(
    (*_RULES, REFERENCES_MARK, EXECUTION_MARK, HANDLER_MARK, PRODUCER_MARK, CONDITIONS_MARK, SCOPE_MARK)
)
_CALLED_MARKS = frozenset((COMPENSATION_MARK, BEFORE_MODEL_REQUEST.mark, ON_SUCCESS.mark, HANDLER_MARK))
_INTERFACES = {"validate": "success", "choose": "names", "search": "specification", "retrieve": "optional"}
"""The methods of guardrails, routers, search strategies and retrievers, with another member of such a class."""


_PROPERTIES = (property, cached_property)


def _is_declaration(cls: type[Any]) -> bool:
    """Return True for a class whose methods others may answer, implement or offer."""
    return service_options_of(cls) is not None or is_rest_client(cls) or is_interface(cls)


def _marked_members(cls: type[Any]) -> Iterator[tuple[str, Any, FunctionType]]:
    for name, raw in vars(cls).items():
        if not (may_be_marked(raw) or isinstance(raw, property)):
            continue
        function = _function_of(raw)
        if not isinstance(function, FunctionType):
            continue
        if not (_ATTRIBUTES.isdisjoint(vars(function)) and _ATTRIBUTES.isdisjoint(getattr(raw, "__dict__", ()))):
            yield name, raw, function


def _at_class(cls: type[Any], kind: Use) -> Iterator[tuple[str, Problem | None]]:
    """Yield each decorator of a class with its problem, or with None if it has an effect."""
    for decorator, rule in _named_in(vars(cls)):
        if rule.classes & (kind | Use.MEMBER) or (rule is _OF_CALLS and "__call__" in vars(cls)):  # an executor
            yield decorator, None
        else:
            yield decorator, Problem(cls.__name__, f"{decorator} has no effect here: {rule.class_lacks}", rule.fix)
    scope = scope_mark_of(cls)
    if kind & (Use.SERVICE | Use.CLIENT) and scope is not None and scope is not Scope.APPLICATION:
        what = "AI services" if kind & Use.SERVICE else "REST clients"
        decorator = scope.rule.decorator
        fact = f"{decorator} has no effect here: {what} are application-scoped"
        yield decorator, Problem(cls.__name__, fact, "remove it")


def _at_member(where: str, marks: Mapping[str, Any], uses: Use, raw: Any) -> Iterator[tuple[str, Problem | None]]:
    """Yield each decorator of a method with its problem, or with None if it has an effect."""
    yield from _problems_at(where, marks, uses, _function_of(raw))
    if not uses & (Use.SERVICE | Use.CLIENT):
        return  # the reader of a class reports the decorators of beans
    if PRODUCER_MARK in marks and inspect.isfunction(raw):
        fix = "move it to a module-level function with the required beans as parameters, and register that"
        yield "@produces", Problem(where, "@produces does not support methods", fix)
    if CONDITIONS_MARK in marks:
        yield "@only_if", Problem(where, "@only_if does not support methods", f"put it on {where.partition('.')[0]}")
