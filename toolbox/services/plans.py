"""A service's methods as plans: everything a call needs, decided beforehand; and tools put around a call from outside.

Not here: making a plan (`planning`), following it (`driver`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from ..chat import ToolSpecification
from ..context import current_invocation
from ..errors import IllegalConfigurationError, Problem
from ..tools.failures import ToolErrors
from ..tools.marks import ReturnBehavior
from ..tools.pipeline import InjectedParameter, Tool
from ..tools.sources import clashes, read_tools
from ..type_keys import type_name
from .declaration import SERVICE_MARK, CallLimits, MessageFunction, ServiceOptions
from .loop import Rules
from .memory import Window
from .outputs import ANSWER_TOOL, Output, OutputMode
from .templates import Template


def offer_problems(
    where: str, toolset: Toolset, output: Output | None, memory: str | None, mode: OutputMode | None
) -> Iterator[Problem]:
    """What is wrong with a method that offers these tools, given its output and its memory parameter, if known."""
    for tool in toolset.tools:
        if tool.needs_memory_id and memory is None and not _is_service(tool):
            yield Problem(
                where,
                f"offers tool {tool.specification.name!r}, which needs a memory id, and has none",
                "add a MemoryId parameter here, or say `MemoryId[… | None]` in the tool",
            )
    if output is None:
        return
    if toolset.immediate and not output.allows_immediate:
        yield Problem(
            where,
            f"offers immediate tools ({', '.join(sorted(toolset.immediate))}) and returns {type_name(output.type)}",
            "return a Result[…], None or a stream",
        )
    clashing = toolset.by_name.get(ANSWER_TOOL) if mode == "tool" and output.structure is not None else None
    if clashing is not None:
        yield Problem(
            where,
            f"{clashing.where} is called {ANSWER_TOOL!r}, as the tool that gives the answer in output mode 'tool'",
            'give it another name: @tool(name="…"), or use another output_mode',
        )


def _is_service(tool: Tool) -> bool:
    """Whether a tool is a call of a service, which has no memory then."""
    marked = tool.function is not None and hasattr(tool.function, SERVICE_MARK)
    return marked or (isinstance(tool.bean, type) and SERVICE_MARK in vars(tool.bean))


@dataclass(frozen=True, slots=True)
class FunctionMessage:
    """A system message made by a function; `injected` are its further parameters."""

    function: MessageFunction
    injected: tuple[InjectedParameter, ...]


@dataclass(frozen=True, slots=True)
class Provider:
    """A tool provider: `bean`, a type to look up for each call, or else `given`, the object or function itself."""

    given: Any = None
    bean: Any = None


@dataclass(frozen=True, slots=True)
class Toolset:
    """The tools of a method, and what the model is told of them; the same object for every call."""

    tools: tuple[Tool, ...] = ()
    specifications: tuple[ToolSpecification, ...] = ()
    by_name: Mapping[str, Tool] = field(default_factory=dict)
    immediate: frozenset[str] = frozenset()

    @classmethod
    def of(cls, tools: Sequence[Tool]) -> Toolset:
        """The toolset of these tools."""
        by_name = {tool.specification.name: tool for tool in tools}
        immediate = frozenset(
            name for name, tool in by_name.items() if tool.return_behavior is ReturnBehavior.IMMEDIATE
        )
        return cls(tuple(tools), tuple(tool.specification for tool in tools), by_name, immediate)

    def joined_by(self, others: Sequence[Tool], where: str) -> Toolset:
        """With `others` after its own. Raises `IllegalConfigurationError` where a name comes twice."""
        if not others:
            return self
        joined = [*self.tools, *others]
        if problems := list(clashes(joined, where)):
            raise IllegalConfigurationError(problems)
        return Toolset.of(joined)


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodPlan:
    """All that a call of one method needs."""

    service: type[Any]
    name: str
    signature: inspect.Signature
    is_coroutine: bool
    output: Output
    memory_parameter: str | None
    window: Window | None
    system: Template | FunctionMessage | None
    user: Template | None
    user_parameter: str | None
    values: Mapping[str, str]  # template variable -> parameter
    history: tuple[str, ...]
    contents: tuple[str, ...]
    toolset: Toolset
    specifications_and_answer: tuple[ToolSpecification, ...]
    providers: tuple[Provider, ...]
    options: ServiceOptions
    call_limits: CallLimits
    failures: ToolErrors

    @property
    def where(self) -> str:
        """As problems and errors name the method."""
        return f"{self.service.__name__}.{self.name}"

    @property
    def is_async(self) -> bool:
        """Whether its caller awaits or iterates asynchronously."""
        return self.is_coroutine or (self.output.is_stream and not self.is_sync_stream)

    @property
    def is_sync_stream(self) -> bool:
        """Whether it returns a plain iterator."""
        return self.output.synchronous

    def with_answer_tool(self, toolset: Toolset) -> tuple[ToolSpecification, ...]:
        """What is offered in output mode `tool`; the same object for every call that offers the plan's own toolset."""
        assert self.output.structure is not None
        if toolset is not self.toolset:
            return (*toolset.specifications, self.output.structure.tool)
        return self.specifications_and_answer

    def offer_problems(self, toolset: Toolset) -> Iterator[Problem]:
        """What is wrong with offering these tools, when providers and endpoints have added theirs."""
        yield from offer_problems(self.where, toolset, self.output, self.memory_parameter, self.options.output_mode)

    def rules(self, toolset: Toolset, mode: OutputMode) -> Rules:
        """The loop's rules for a call that offers `toolset`."""
        read_here = self.output.structure if not self.output.is_stream else None
        return Rules(
            max_rounds=self.call_limits.max_tool_rounds,
            max_calls=self.call_limits.max_tool_calls_per_response,
            immediate=toolset.immediate,
            kind=self.output.kind,
            structure=read_here,
            mode=mode,
            max_output_retries=self.options.max_output_retries,
        )


# --- tools put around a call from outside

_added: ContextVar[tuple[Sequence[Tool], object] | None] = ContextVar("toolbox.added_tools", default=None)


@contextmanager
def additional_tools(sources: Sequence[Any], where: str = "@toolbox") -> Iterator[None]:
    """Adds tools to those of the services called directly inside, not to those of services their tools call.

    Raises `IllegalConfigurationError` for what is no tool.
    """
    tools, problems = read_tools(sources, where)
    if problems:
        raise IllegalConfigurationError(problems)
    with tools_added(tools):
        yield


@contextmanager
def tools_added(tools: Sequence[Tool]) -> Iterator[None]:
    """`additional_tools` with tools that have been read already."""
    token = _added.set((tools, current_invocation.get()))
    try:
        yield
    finally:
        _added.reset(token)


def added_tools() -> Sequence[Tool]:
    """The tools added for a call that begins now."""
    added = _added.get()
    if added is None or added[1] is not current_invocation.get():
        return ()
    return added[0]
