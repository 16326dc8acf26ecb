"""A service's methods as plans: everything a call needs, decided beforehand; and tools put around a call from outside.

Not here: making a plan (`planning`), following it (`invocation`, `driver`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ..chat import ToolSpecification
from ..context import current_invocation
from ..errors import IllegalConfigurationError, Problem
from ..tools.failures import ToolErrors
from ..tools.marks import ReturnBehavior
from ..tools.pipeline import InjectedParameter, Tool, ToolLayer
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

    def joined_by(self, others: Sequence[Tool], plan: MethodPlan) -> Toolset:
        """Return it with `others` after its own. Raises `IllegalConfigurationError` where a name comes twice."""
        if not others:
            return self
        joined = [*self.tools, *(each.with_layers(plan.layers.tools) for each in others)]
        if problems := list(clashes(joined, plan.where)):
            raise IllegalConfigurationError(problems)
        return Toolset.of(joined)


InvocationLayer: TypeAlias = Callable[[Any], AbstractAsyncContextManager[None]]
"""Takes an `Invocation` and puts something around it: what it does before `yield`, after it, and when that raises."""

EffectLayer: TypeAlias = Callable[[Any], Any]
"""Takes a `Perform` and returns one: what it does around each model request and each tool call."""


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers of a method, the outermost first: chosen once, none that the method does not need.

    Around an invocation stand those of `invocation`, around each request to the model and each tool call those of
    `effects`, and around each tool, once its arguments are decoded, those of `tools`.
    """

    invocation: tuple[InvocationLayer, ...] = ()
    effects: tuple[EffectLayer, ...] = ()
    tools: tuple[ToolLayer, ...] = ()


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
    providers: tuple[Provider, ...]
    options: ServiceOptions
    call_limits: CallLimits
    failures: ToolErrors
    layers: Layers = Layers()
    where: str = field(init=False)
    is_async: bool = field(init=False)
    has_handlers: bool = field(init=False)
    rules: Rules = field(init=False)

    def __post_init__(self) -> None:
        """Decide what is the same for all calls.

        `where` names the method in problems and errors; `is_async`: its caller awaits, or iterates asynchronously;
        `has_handlers`: the service has error handlers of its own.
        """
        toolset = self.toolset
        if self.layers.tools:
            toolset = Toolset.of([tool.with_layers(self.layers.tools) for tool in toolset.tools])
        object.__setattr__(self, "toolset", toolset)
        object.__setattr__(self, "where", f"{self.service.__name__}.{self.name}")
        object.__setattr__(self, "is_async", self.is_coroutine or (self.output.is_stream and not self.is_sync_stream))
        object.__setattr__(self, "has_handlers", self.failures != ToolErrors())
        object.__setattr__(self, "rules", self.rules_for(toolset))

    @property
    def is_sync_stream(self) -> bool:
        """Return True if the method returns a plain iterator."""
        return self.output.synchronous

    def offer_problems(self, toolset: Toolset) -> Iterator[Problem]:
        """Yield what is wrong with offering these tools, when providers and endpoints have added theirs."""
        yield from offer_problems(self.where, toolset, self.output, self.memory_parameter, self.options.output_mode)

    def rules_for(self, toolset: Toolset) -> Rules:
        """Return the loop's rules for a call that offers `toolset`."""
        structure, options = self.output.structure, self.options
        parameters = dict(options.parameters)
        if options.temperature is not None:
            parameters["temperature"] = options.temperature
        return Rules(
            max_rounds=self.call_limits.max_tool_rounds,
            max_calls=self.call_limits.max_tool_calls_per_response,
            max_output_retries=options.max_output_retries,
            immediate=toolset.immediate,
            kind=self.output.kind,
            structure=structure,
            reads_answer=not self.output.is_stream,
            specifications=toolset.specifications,
            answer_too=(*toolset.specifications, structure.tool) if structure is not None else (),
            tool_choice=options.tool_choice,
            parameters=parameters,
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
