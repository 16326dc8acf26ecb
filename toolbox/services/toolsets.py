"""The tools that a method offers, as one object for all its calls, and the providers that add more.

Not here: reading tools (`tools.sources`), what providers give to a call (`added_tools`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..chat import ToolSpecification
from ..errors import IllegalConfigurationError, Problem
from ..introspection import Unresolved, type_name
from ..tools.marks import ReturnBehavior
from ..tools.results import awaited
from ..tools.retrievers import search
from ..tools.sources import clashes
from ..tools.tool_calls import Tool
from .outputs import ANSWER_TOOL, Output, OutputMode, can_be


@dataclass(frozen=True, slots=True)
class Provider:
    """A tool provider: either `bean`, a type to look up for each call, or `given`, an object or function."""

    given: Any = None
    bean: Any = None


@dataclass(frozen=True, slots=True)
class Toolset:
    """The tools of a method and their specifications; the same object for every call."""

    tools: tuple[Tool, ...] = ()
    specifications: tuple[ToolSpecification, ...] = ()
    by_name: Mapping[str, Tool] = field(default_factory=dict)
    immediate: frozenset[str] = frozenset()
    immediate_if_last: frozenset[str] = frozenset()
    is_restricted: bool = False  # some tools are not for all identities
    former: Mapping[str, Tool] = field(default_factory=dict)  # by the names that stored runs may have
    has_retrievers: bool = False
    handovers: Mapping[str, str] = field(default_factory=dict)  # name of a tool -> the method that takes the call over

    @classmethod
    def of(cls, tools: Sequence[Tool]) -> Toolset:
        """Return the toolset of these tools."""
        by_name = {tool.specification.name: tool for tool in tools}
        immediate, if_last = (
            frozenset(
                name for tool in tools if tool.return_behavior is behavior for name in (tool.name, *tool.former_names)
            )
            for behavior in (ReturnBehavior.IMMEDIATE, ReturnBehavior.IMMEDIATE_IF_LAST)
        )
        specifications = tuple(tool.specification for tool in tools)
        is_restricted = any(tool.access is not None for tool in tools)
        former = {name: tool for tool in tools for name in tool.former_names}
        searches = any(tool.run is search for tool in tools)
        handovers = {tool.name: tool.hands_over_to for tool in tools if tool.hands_over_to is not None}
        return cls(
            tuple(tools), specifications, by_name, immediate, if_last, is_restricted, former, searches, handovers
        )

    def stored(self, name: str) -> Tool | None:
        """Return the tool of a call in a stored run, which may have a former name of the tool."""
        return self.by_name.get(name) or self.former.get(name)

    def joined_by(self, others: Sequence[Tool], where: str) -> Toolset:
        """Return the toolset with `others` added. Raises `IllegalConfigurationError` for duplicate names."""
        if not others:
            return self
        joined = [*self.tools, *others]
        if problems := list(clashes(joined, where)):
            raise IllegalConfigurationError(problems)
        return Toolset.of(joined)


def offer_problems(
    where: str, toolset: Toolset, output: Output | None, memory: str | None, mode: OutputMode | None
) -> Iterator[Problem]:
    """Yield problems with offering these tools in a method with this output and memory parameter."""
    for tool in toolset.tools:
        if tool.needs_memory_id and memory is None and not tool.is_service:
            yield Problem(
                where,
                f"tool {tool.specification.name!r} needs a memory id, but the method has none",
                "add a MemoryId parameter to the method, or use `MemoryId[… | None]` in the tool",
            )
    if output is None:
        return
    for tool in toolset.tools:
        if output.wants_immediate_value and tool.name in toolset.immediate | toolset.immediate_if_last:
            returns = awaited(tool.returns)
            if not isinstance(returns, Unresolved) and not can_be(returns, output.type):
                yield Problem(
                    where,
                    f"the immediate tool {tool.name!r} returns {type_name(returns)}, which cannot be the method's "
                    f"{type_name(output.type)}",
                    "return Result[…], None or a stream, or let the result go to the model",
                )
    clashing = toolset.by_name.get(ANSWER_TOOL) if mode == "tool" and output.structure is not None else None
    if clashing is not None:
        yield Problem(
            where,
            f"the tool name {ANSWER_TOOL!r} of {clashing.where} is reserved in output mode 'tool'",
            'rename the tool with @tool(name="…"), or use another output_mode',
        )
