"""The decorators `@tool`, for functions that a model may call, and `@toolbox`, for the tools of one method or endpoint.

Both set an attribute and return the same object. Not here: creating the specification (`specification`), finding marked
members (`sources`), where a tool runs (`toolbox.execution`).
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from enum import StrEnum
from functools import partial
from inspect import signature
from types import FrameType, FunctionType
from typing import Any, Literal, TypeAlias, TypeVar, get_args, get_overloads, overload

from ..bean_references import COMPENSATION_MARK, MCP_MARK, TOOL_MARK
from ..context import InvocationContext
from ..introspection import local_names, may_be_marked, may_be_marked_in, name_decorator, takes
from ..safe_text import did_you_mean

F = TypeVar("F", bound="Callable[..., Any] | staticmethod[..., Any] | classmethod[Any, ..., Any]")

TOOLBOX_MARK = "__toolbox_toolbox__"
EFFECTS_MARK = "__toolbox_effects__"
OWN_TOOL_CALLS = "__toolbox_tool_call__"
"""Attribute of a class: a method that returns the function to call for a member as a tool."""


UnknownOutcome: TypeAlias = Literal["tell", "ask", "retry"]
"""After a crash during a tool call: send the model an error, ask a person, or run the call again."""

ApprovalRule: TypeAlias = Callable[[dict[str, Any], InvocationContext], bool | str | Awaitable[bool | str]]
"""Decides from the arguments whether a call needs the approval of a person; a text says why."""


class ReturnBehavior(StrEnum):
    """Destination of a tool's result: the model (`TO_LLM`), or the caller at once.

    `IMMEDIATE` ends the call of the service if all tools of the round are immediate. `IMMEDIATE_IF_LAST` ends it if the
    tool is the last one that the model called in the round, whatever the others are. A failed tool prevents both.
    """

    TO_LLM = "to_llm"
    IMMEDIATE = "immediate"
    IMMEDIATE_IF_LAST = "immediate_if_last"


class SearchBehavior(StrEnum):
    """Visibility of a tool in a service with `tool_search=`: after a search found it, or always."""

    SEARCHABLE = "searchable"
    ALWAYS_VISIBLE = "always_visible"


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class ToolOptions:
    """The options of `@tool` that a call needs: they are fields of its mark and of the `Tool`."""

    return_behavior: ReturnBehavior = ReturnBehavior.TO_LLM
    search_behavior: SearchBehavior = SearchBehavior.SEARCHABLE
    timeout: float | None = None
    max_result_chars: int | None = None
    requires_approval: bool | ApprovalRule = False
    approvers: tuple[str, ...] = ()
    not_self: bool = False
    deferred: bool = False
    on_unknown_outcome: UnknownOutcome | None = None
    former_names: tuple[str, ...] = ()
    approval_expires: timedelta | None = None
    may_remember: bool = False


OPTIONS = tuple(each.name for each in fields(ToolOptions))


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class ToolMark(ToolOptions):
    """All options of `@tool`.

    `local_names` are the names in its annotations that are local to the enclosing function. They are saved here because
    they cannot be looked up later.
    """

    name: str | None = None
    description: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)
    strict: bool | None = None
    local_names: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False, repr=False)

    def options(self) -> dict[str, Any]:
        """Return the options that are fields of the `Tool`, by name."""
        return {each: getattr(self, each) for each in OPTIONS}


@overload
def tool(function: F, /) -> F: ...


@overload
def tool(
    *description_lines: str,
    name: str | None = None,
    description: str | None = None,
    return_behavior: ReturnBehavior = ReturnBehavior.TO_LLM,
    metadata: Mapping[str, Any] | None = None,
    timeout: float | None = None,
    max_result_chars: int | None = None,
    requires_approval: bool | ApprovalRule = False,
    approvers: Sequence[str] = (),
    not_self: bool = False,
    deferred: bool = False,
    on_unknown_outcome: UnknownOutcome | None = None,
    search_behavior: SearchBehavior = SearchBehavior.SEARCHABLE,
    strict: bool | None = None,
    former_names: Sequence[str] = (),
    approval_expires: timedelta | None = None,
    may_remember: bool = False,
) -> Callable[[F], F]: ...


def tool(*lines: Any, **options: Any) -> Any:
    """Mark a function or method as a tool that a language model may call. The function itself is not changed.

        @tool("Add two numbers.")
        def add(a: int, b: Annotated[int, "the number to add"]) -> int:
            return a + b

    Use it without parentheses, or with options:

    - strings, joined with newlines, or `description=`: what the model reads; by default the docstring's beginning.
    - `name`: the name for the model, 1 to 64 characters of `A-Z a-z 0-9 _ -`; by default the function's name.
    - `return_behavior`: `ReturnBehavior.IMMEDIATE` or `IMMEDIATE_IF_LAST` ends the call with the result instead of
      sending it to the model.
    - `metadata`: values for your program; they are not sent to the model.
    - `timeout`: the limit in seconds; a slower tool fails with `ToolTimeoutError`.
    - `max_result_chars`: longer results are cut, with a note for the model.
    - `requires_approval`: True, or a function `(arguments, context) -> bool | str`, `def` or `async def`: a person must
      approve the call before it runs. A text is the reason that the person reads. If the function raises, the call
      needs approval.
    - `approvers`: roles; only a `SecurityIdentity` with one of them may answer a call that waits. `not_self`: the
      identity that asked may not answer, and anonymous callers do not see the tool.
    - `may_remember`: True lets a person answer `approve(remember="conversation")`: then further calls of the tool, in
      the same conversation and for the same user, need no approval.
    - `approval_expires`: a `timedelta` after which a call that waits for approval is rejected with "expired".
    - `deferred`: the tool may raise `ToolDeferred`; its result comes later.
    - `on_unknown_outcome`: in a durable run, after a crash during the call: `"tell"` the model that the outcome is
      unknown, `"ask"` a person, or `"retry"` the call; by default as the service says.
    - `strict`: True asks the server to enforce the schema of the arguments, False not to; None leaves it to the
      service and the model.
    - `former_names`: a tuple or list of the names that the tool had; stored runs that call it by one of them continue.
    - `search_behavior`: `SearchBehavior.ALWAYS_VISIBLE` shows the tool without a search, in services with
      `tool_search=`.

    Raises `TypeError` for anything but a function, and `TypeError` or `ValueError` for invalid options about approvals,
    runs and search. Other mistakes are problems at start.
    """
    if len(lines) == 1 and not isinstance(lines[0], str) and not options:
        return _mark(lines[0], ToolMark(), sys._getframe(1))
    if not all(isinstance(line, str) for line in lines):
        raise TypeError("@tool: the description must be a string; write @tool or @tool('…') above the function")
    if lines and options.get("description") is not None:
        raise TypeError("@tool: the description is given twice; pass it as strings or as description=, not both")
    if lines:
        options["description"] = "\n".join(lines)
    mark = _make_mark(options)
    return lambda target: _mark(target, mark, sys._getframe(1))


# Type checkers read the overloads. So does a person who calls `help`.
tool.__signature__ = signature(get_overloads(tool)[1])  # type: ignore[attr-defined]  # read by inspect


def _make_mark(given: dict[str, Any]) -> ToolMark:
    """Return the mark with these options. Raises `TypeError` or `ValueError` for invalid ones."""
    known = [each.name for each in fields(ToolMark) if each.name != "local_names"]
    for name in given:
        if name not in known:
            raise TypeError(f"@tool: unknown option {name!r}{did_you_mean(name, known)}")
    converted = {name: convert(given[name]) for name, convert in _CONVERSIONS.items() if name in given}
    mark = ToolMark(**{**given, **converted})
    _check_run_options(mark)
    return mark


def _check_run_options(mark: ToolMark) -> None:
    """Raise `TypeError` for invalid options about runs."""
    if not isinstance(mark.requires_approval, bool) and not takes(mark.requires_approval, 2):
        fix = "use True, or a function that takes the arguments and the InvocationContext"
        raise TypeError(f"@tool: invalid requires_approval={mark.requires_approval!r}; {fix}")
    waits = mark.requires_approval is not False or mark.deferred is True or mark.on_unknown_outcome == "ask"
    if (mark.approvers or mark.not_self) and not waits:
        fix = 'requires_approval=, deferred=True or on_unknown_outcome="ask"'
        raise TypeError(f"@tool: approvers= and not_self= have no effect without {fix}")
    if mark.approval_expires is not None:
        if not isinstance(mark.approval_expires, timedelta):
            raise TypeError(f"@tool: invalid approval_expires={mark.approval_expires!r}; use a datetime.timedelta")
        if mark.approval_expires <= timedelta():
            raise ValueError(f"@tool: invalid approval_expires={mark.approval_expires!r}; use a duration above 0")
        if mark.requires_approval is False:
            raise TypeError("@tool: approval_expires= has no effect without requires_approval=")
    flags = {"not_self": mark.not_self, "deferred": mark.deferred, "may_remember": mark.may_remember}
    for option, given in flags.items():
        if not isinstance(given, bool):
            raise TypeError(f"@tool: invalid {option}={given!r}; use True or False")
    if mark.on_unknown_outcome not in (None, *get_args(UnknownOutcome)):
        raise TypeError(f'@tool: invalid on_unknown_outcome={mark.on_unknown_outcome!r}; use "tell", "ask" or "retry"')


def _read_approvers(given: Any) -> tuple[str, ...]:
    names = tuple(given)
    if isinstance(given, str) or not all(isinstance(each, str) for each in names):
        raise TypeError(f'@tool: invalid approvers={given!r}; use names of roles: approvers=("manager",)')
    return names


def _read_former_names(given: Any) -> tuple[str, ...]:
    if not isinstance(given, (tuple, list)) or not all(isinstance(each, str) and each for each in given):
        raise TypeError(f'@tool: invalid former_names={given!r}; use a tuple of names: former_names=("refund",)')
    return tuple(given)


_CONVERSIONS: Mapping[str, Callable[[Any], Any]] = {
    "return_behavior": ReturnBehavior,
    "search_behavior": SearchBehavior,
    "metadata": lambda given: dict(given or {}),
    "approvers": _read_approvers,
    "former_names": _read_former_names,
}


def toolbox(*tools: Any) -> Callable[[F], F]:
    """Set the tools of one method of an AI service, or add tools to a FastAPI endpoint.

        @toolbox(Calculator, find_order)
        def answer(self, question: str) -> str: ...

    On a method of a service, it replaces the `tools=` of the class; `@toolbox()` offers no tools. On an endpoint, it
    adds tools to those of its services; write it below the route decorator. Tools are classes (beans), functions,
    instances, AI services, REST clients, mappings and `AiServiceTool`s. Raises `TypeError` for a class below it.
    """

    def apply(target: F) -> F:
        if isinstance(target, type):
            raise TypeError(
                f"@toolbox: {target.__name__} is a class; put @toolbox on a method or an endpoint, "
                "or list the tools of a class in @register_ai_service(tools=…)"
            )
        setattr(target, TOOLBOX_MARK, tools)
        return target

    return name_decorator("@toolbox", apply, tools[0] if tools else None)


def compensate_for(tool: Callable[..., Any] | str) -> Callable[[F], F]:
    """Mark the method that undoes a tool of the same class: `tool` is the tool or its name.

        class Accounts:
            @tool
            def credit(self, name: str, euros: Decimal) -> str: ...

            @compensate_for(credit)
            def uncredit(self, execution: ToolExecution) -> None: ...

    The method takes the `ToolExecution`, or the tool's own parameters. It is called when another tool fails
    (`compensate_on_tool_errors=True` in `@register_ai_service`), or when the whole call fails
    (`compensate_on_failure=True`). A model never sees it. Raises `TypeError` if `tool` is not a function or a name.
    """
    if not isinstance(tool, str) and not callable(getattr(tool, "__func__", tool)):
        raise TypeError(f"@compensate_for: expected a tool or its name, got {tool!r}")

    def leave(target: F) -> F:
        setattr(target, COMPENSATION_MARK, tool)
        return target

    return leave


def compensated_by(member: object) -> Any:
    """Return the tool, or its name, that a function or method compensates; None for others."""
    if not (callable(member) or isinstance(member, classmethod)):
        return None  # some members of pydantic's models raise an error for every attribute
    for each in (member, getattr(member, "__func__", None)):
        mark = getattr(each, "__dict__", {}).get(COMPENSATION_MARK)
        if mark is not None:
            return mark
    return None


def tool_mark_of(member: object) -> ToolMark | None:
    """Return the mark of a function, bound, static or class method (in either order of the decorators), or None."""
    if not may_be_marked(member):
        return None
    if type(member) is FunctionType:
        mark = member.__dict__.get(TOOL_MARK)
    else:
        mark = getattr(member, TOOL_MARK, None) or getattr(getattr(member, "__func__", None), TOOL_MARK, None)
    return mark if isinstance(mark, ToolMark) else None


def mcp_marked(cls: type[Any]) -> tuple[str, ...]:
    """Return the names of the methods of a class that are resources or prompts for MCP clients."""
    bases = cls.__mro__[:-1]  # without `object`
    return tuple(dict.fromkeys(name for base in bases for name, raw in may_be_marked_in(base) if _has_mcp_mark(raw)))


def _has_mcp_mark(raw: object) -> bool:
    return hasattr(raw, MCP_MARK) or hasattr(getattr(raw, "__func__", None), MCP_MARK)


def with_effects(function: F, *effects: str | Callable[[type | None], str]) -> F:
    """Add known effects, such as `transactional`, to a function; reports show them. Returns the same function.

    An effect may be a function of the class that has the tool.
    """
    setattr(function, EFFECTS_MARK, (*_effects_at(function), *effects))
    return function


def effects_of(function: object, owner: type | None = None) -> tuple[str, ...]:
    """Return the known effects of a function, or of a static or class method; `owner` is its class."""
    return tuple(each if isinstance(each, str) else each(owner) for each in _effects_at(function))


def _effects_at(function: object) -> tuple[Any, ...]:
    while isinstance(function, partial):
        function = function.func
    effects = getattr(function, EFFECTS_MARK, None) or getattr(getattr(function, "__func__", None), EFFECTS_MARK, ())
    return effects if isinstance(effects, tuple) else ()


def toolbox_of(function: object) -> tuple[Any, ...] | None:
    """Return the tools of `@toolbox`; None without the decorator."""
    tools = getattr(function, TOOLBOX_MARK, None)
    return tools if isinstance(tools, tuple) else None


def _mark(target: Any, mark: ToolMark, frame: FrameType | None) -> Any:
    function = getattr(target, "__func__", target)
    if not callable(function) or isinstance(target, type):
        raise TypeError(f"@tool: expected a function or method, got {target!r}; put @tool above a `def`")
    names = local_names([function], frame)
    if names:
        mark = replace(mark, local_names=names)
    setattr(target, TOOL_MARK, mark)
    return target
