"""The marks of this package: `@tool` on what a model may call, `@toolbox` on what a method or endpoint offers.

A mark is left on the object, which stays what it was. Not here: what a mark means for a signature (`specification`),
finding marked members (`sources`), where a tool runs (`toolbox.execution`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import FrameType
from typing import Any, TypeVar, overload

from ..signatures import local_names

F = TypeVar("F", bound="Callable[..., Any] | staticmethod[..., Any] | classmethod[Any, ..., Any]")

TOOL_MARK = "__toolbox_tool__"
TOOLBOX_MARK = "__toolbox_toolbox__"


class ReturnBehavior(StrEnum):
    """What becomes of a tool's result."""

    TO_LLM = "to_llm"
    IMMEDIATE = "immediate"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ToolMark:
    """What `@tool` was given.

    `local_names` are the names its annotations use that are local to the function the tool is defined in: later on,
    nothing else knows what they mean.
    """

    name: str | None = None
    description: str | None = None
    return_behavior: ReturnBehavior = ReturnBehavior.TO_LLM
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)
    timeout: float | None = None
    max_result_chars: int | None = None
    local_names: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False, repr=False)


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
) -> Callable[[F], F]: ...


def tool(
    *lines: Any,
    name: str | None = None,
    description: str | None = None,
    return_behavior: ReturnBehavior = ReturnBehavior.TO_LLM,
    metadata: Mapping[str, Any] | None = None,
    timeout: float | None = None,
    max_result_chars: int | None = None,
) -> Any:
    """Makes a function or method a tool; bare, or with what the model should read about it.

    `lines`: the description, joined by newlines; else `description`, else the docstring's first paragraph. `timeout` is
    in seconds. `max_result_chars` cuts longer results. `metadata` is for the program, not for the model.
    """
    if len(lines) == 1 and not isinstance(lines[0], str):
        return _mark(lines[0], ToolMark(), sys._getframe(1))
    if not all(isinstance(line, str) for line in lines):
        raise TypeError("@tool takes a description in strings; write @tool or @tool('…') above the function")
    if lines and description is not None:
        raise TypeError("@tool has a description twice: give it as strings or as description=, not both")
    mark = ToolMark(
        name,
        "\n".join(lines) if lines else description,
        ReturnBehavior(return_behavior),
        dict(metadata or {}),
        timeout,
        max_result_chars,
    )
    return lambda target: _mark(target, mark, sys._getframe(1))


def toolbox(*tools: Any) -> Callable[[F], F]:
    """The tools of one service method, in place of its class's; on an endpoint, in addition to its services' tools."""

    def apply(target: F) -> F:
        if isinstance(target, type):
            raise TypeError(
                f"@toolbox stands above a method or an endpoint, not above the class {target.__name__}; "
                "a class names its tools in @register_ai_service(tools=…)"
            )
        setattr(target, TOOLBOX_MARK, tools)
        return target

    return apply


def tool_mark_of(member: object) -> ToolMark | None:
    """The mark of a function, bound method, static or class method, in either order of the decorators."""
    mark = getattr(member, TOOL_MARK, None) or getattr(getattr(member, "__func__", None), TOOL_MARK, None)
    return mark if isinstance(mark, ToolMark) else None


def toolbox_of(function: object) -> tuple[Any, ...] | None:
    """What `@toolbox` was given; None where it does not stand."""
    tools = getattr(function, TOOLBOX_MARK, None)
    return tools if isinstance(tools, tuple) else None


def _mark(target: Any, mark: ToolMark, frame: FrameType | None) -> Any:
    function = getattr(target, "__func__", target)
    if not callable(function) or isinstance(target, type):
        raise TypeError(f"@tool stands above a function or method, not above {target!r}")
    names = local_names([function], frame)
    if names:
        mark = replace(mark, local_names=names)
    setattr(target, TOOL_MARK, mark)
    return target
