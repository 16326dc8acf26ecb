"""Plans of service methods, with everything that can be prepared before a call; and tools added for a block of code.

Message templates are parsed once and rendered for each call; values are never parsed as templates. Not here: creating
plans (`planning`), running them (`invocation`, `driver`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, Protocol, TypeAlias
from uuid import UUID

from pydantic_core import to_json

from ..chat import ChatRequestParameters, ToolExecutionResultMessage, ToolSpecification, UserMessage
from ..context import InvocationContext, current_invocation
from ..errors import IllegalConfigurationError, ModelError, Problem
from ..execution.markers import Execution
from ..introspection import Unresolved, type_name
from ..models.routing import router_in
from ..models.selection import DEFAULT_NAME
from ..security import Access, SecurityIdentity
from ..tools.codec import awaited
from ..tools.failures import ToolErrors
from ..tools.function_calls import with_layers
from ..tools.marks import ReturnBehavior
from ..tools.sources import clashes, read_tools
from ..tools.tool_calls import InjectedParameter, Tool, ToolLayer
from .declaration import CallLimits, MessageFunction, ServiceOptions
from .loop import AnswerChecked, CallModel, CheckAnswer, ModelReplied, Rules, RunTool, ToolFinished, ToolSuspended
from .memory import ChatMemoryKey, Window
from .method_marks import MethodMarks
from .outputs import ANSWER_TOOL, Output, OutputMode, can_be

MAX_VISIBLE_TOOLSETS = 256
"""So many different selections of a method's tools are kept, for identities with different roles."""


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


@dataclass(frozen=True, slots=True)
class FunctionMessage:
    """A system message that a function creates; `injected` are its parameters after the context."""

    function: MessageFunction
    injected: tuple[InjectedParameter, ...]


class AnswerWithoutModel(Protocol):
    """Gives the answer of a method if no model does; see `fallback_answers`."""

    @property
    def where(self) -> str:
        """The place of the function, for problems."""
        ...

    @property
    def execution(self) -> Execution:
        """The place of its runs: the event loop, a thread or an executor."""
        ...

    async def give(self, error: ModelError, invocation: Any, /) -> Any:
        """Return the `Finish` of the invocation."""
        ...


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
        return cls(tuple(tools), specifications, by_name, immediate, if_last, is_restricted, former)

    def stored(self, name: str) -> Tool | None:
        """Return the tool of a call in a stored run, which may have a former name of the tool."""
        return self.by_name.get(name) or self.former.get(name)

    def joined_by(self, others: Sequence[Tool], plan: MethodPlan) -> Toolset:
        """Return the toolset with `others` added. Raises `IllegalConfigurationError` for duplicate names."""
        if not others:
            return self
        joined = [*self.tools, *(with_layers(each, plan.layers.tools) for each in others)]
        if problems := list(clashes(joined, plan.where)):
            raise IllegalConfigurationError(problems)
        return Toolset.of(joined)


# Layers take the `Invocation`, which has a plan; plans do not know its class.

InvocationLayer: TypeAlias = Callable[[Any], AbstractAsyncContextManager[None]]
"""Wraps an invocation: takes the `Invocation` and returns an async context manager."""

PerformEffect: TypeAlias = Callable[[CallModel | RunTool, Any], Awaitable[ModelReplied | ToolFinished | ToolSuspended]]
"""Performs one effect of an `Invocation`, a model request or a tool call, and returns its result."""

EffectLayer: TypeAlias = Callable[[PerformEffect], PerformEffect]
"""Wraps each model request and each tool call: takes the next step and returns a new one."""


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers of a method, outermost first. They are chosen once, and a method has only those that it needs.

    `around_turn` layers wrap the invocation and its turn in the conversation, `effects` layers each model request and
    each tool call, and `tools` layers each tool call with decoded arguments. `check_input` judges the user message
    before the invocation begins, or before its run is stored, and may replace it. With `whole_replies`, tools start
    only when the reply is complete, because a layer may change it. `check_answer` performs a `CheckAnswer`, and
    `max_answer_retries` is how often the model is asked again after a refused answer.
    """

    around_turn: tuple[InvocationLayer, ...] = ()
    check_input: Callable[[Any], Awaitable[None]] | None = None
    effects: tuple[EffectLayer, ...] = ()
    tools: tuple[ToolLayer, ...] = ()
    whole_replies: bool = False
    check_answer: Callable[[CheckAnswer, Any], Awaitable[AnswerChecked]] | None = None
    max_answer_retries: int = 0


class Layering(Protocol):
    """Chooses what acts around the methods of a service: guardrails, interceptors, recording, compensation, search."""

    def of_method(
        self, marks: MethodMarks, options: ServiceOptions, *, has_providers: bool = False, in_run: bool = False
    ) -> Layers:
        """Return the layers of a method; `in_run` for calls that can be suspended, or are recorded."""
        ...

    def compensations_of(
        self, options: ServiceOptions, tools: Sequence[Tool], sources: Iterable[object]
    ) -> tuple[Mapping[str, Tool], Sequence[Problem]]:
        """Return what undoes each tool, by the tool's name, and the problems with it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodPlan:
    """Everything that a call of one method needs."""

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
    spoken: tuple[str, ...]
    call_options: str | None  # the parameter of type `ChatRequestParameters`
    toolset: Toolset
    providers: tuple[Provider, ...]
    options: ServiceOptions
    call_limits: CallLimits
    failures: ToolErrors
    compensations: Mapping[str, Tool] = field(default_factory=dict)  # name of a tool -> what undoes it
    layers: Layers = Layers()
    run_layers: Callable[[], Layers] = Layers  # made for the first call that is part of a run
    annotations: Mapping[str, Any] = field(default_factory=dict)
    run_id_parameter: str | None = None
    durable: bool = False
    fallback: AnswerWithoutModel | None = None
    may_suspend: bool = field(init=False, default=False)
    has_inner_provider: bool = field(init=False, default=False)
    checks_suspended: bool = field(init=False, default=False)
    _in_run: list[MethodPlan] = field(init=False, default_factory=list, repr=False, compare=False)
    access: Access | None = None
    model_name: str | None = field(init=False)
    output_mode: OutputMode | None = field(init=False)
    continues_history: bool = field(init=False)
    where: str = field(init=False)
    is_async: bool = field(init=False)
    has_handlers: bool = field(init=False)
    rules: Rules = field(init=False)
    _visible: dict[tuple[str, ...], tuple[Toolset, Rules]] = field(
        init=False, compare=False, repr=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        """Compute the values that are the same for all calls.

        `where` names the method in problems and errors. `is_async` is True if the caller awaits or uses `async for`.
        `has_handlers` is True if the service sets error handlers. `access` is None if everyone may call the method.
        `model_name` is None if a router chooses the model of each call, `output_mode` if the model decides by what it
        supports. With `continues_history`, the messages of a parameter are all that is sent, without a user message.

        `settle` sets `may_suspend`, if a tool may suspend the call, `has_inner_provider`, if a service that is a tool
        has a tool provider, and `checks_suspended`, if its conversations may have a suspended run.
        """
        toolset = self.toolset
        if self.layers.tools:
            toolset = Toolset.of([with_layers(tool, self.layers.tools) for tool in toolset.tools])
        object.__setattr__(self, "toolset", toolset)
        object.__setattr__(self, "where", f"{self.service.__name__}.{self.name}")
        object.__setattr__(self, "is_async", self.is_coroutine or (self.output.is_stream and not self.is_sync_stream))
        object.__setattr__(self, "has_handlers", self.failures != ToolErrors())
        model = self.options.model
        object.__setattr__(self, "model_name", None if router_in(model) is not None else str(model or DEFAULT_NAME))
        object.__setattr__(self, "output_mode", self._choose_output_mode())
        continues = bool(self.history) and self.user is None and not self.spoken
        object.__setattr__(self, "continues_history", continues)
        object.__setattr__(self, "rules", self.rules_for(toolset))

    @property
    def in_run(self) -> MethodPlan:
        """The same plan for a call that is part of a run: it can be suspended, and is recorded."""
        if not self._in_run:
            plan = replace(self, layers=self.run_layers())
            plan._in_run.append(plan)
            for name in ("may_suspend", "has_inner_provider", "checks_suspended"):
                object.__setattr__(plan, name, getattr(self, name))
            self._in_run.append(plan)
        return self._in_run[0]

    def _choose_output_mode(self) -> OutputMode | None:
        if self.output.structure is None:
            return "prompt"
        mode = self.options.output_mode
        return None if mode == "tool" and self.output.is_stream else mode

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments of a call by name, with defaults.

        Raises `TypeError`, and `ValueError` for a history that is sent alone and that a model cannot answer.
        """
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.where}(): {error}") from None
        bound.apply_defaults()
        if self.continues_history:
            last = next((given[-1] for name in reversed(self.history) if (given := bound.arguments[name])), None)
            if not isinstance(last, (UserMessage, ToolExecutionResultMessage)):
                found = "nothing" if last is None else f"{type(last).__name__}"
                needed = "must end with a UserMessage or a ToolExecutionResultMessage"
                raise ValueError(f"{self.where}(): {self.history[-1]} {needed}, but ends with {found}")
        return bound.arguments

    def find_memory_id(self, arguments: Mapping[str, Any]) -> Any:
        """Return the memory id in the arguments of a call; None if there is none."""
        return None if self.memory_parameter is None else arguments[self.memory_parameter]

    def find_conversation(self, memory_id: object) -> ChatMemoryKey | None:
        """Return the conversation of a call with this memory id; None if its messages are not kept.

        Raises `InvalidMemoryIdError`.
        """
        return None if self.window is None or memory_id is None else ChatMemoryKey.of(self.service, memory_id)

    @property
    def is_sync_stream(self) -> bool:
        """Return True if the method returns a plain iterator."""
        return self.output.synchronous

    def offer_problems(self, toolset: Toolset) -> Iterator[Problem]:
        """Yield problems with these tools, after providers and endpoints have added theirs."""
        yield from offer_problems(self.where, toolset, self.output, self.memory_parameter, self.options.output_mode)

    def visible_to(self, identity: SecurityIdentity) -> Toolset:
        """Return the tools that this identity may call.

        The objects are the same for the same tools, because models cache the encoded form of tools by their identity.
        """
        tools = [each for each in self.toolset.tools if each.access is None or each.access.allows(identity)]
        if len(tools) == len(self.toolset.tools):
            return self.toolset
        names = tuple(each.name for each in tools)
        found = self._visible.get(names)
        if found is None:
            toolset = Toolset.of(tools)
            found = toolset, self.rules_for(toolset)
            if len(self._visible) < MAX_VISIBLE_TOOLSETS:
                found = self._visible.setdefault(names, found)
        return found[0]

    def rules_of(self, toolset: Toolset) -> Rules:
        """Return the loop's rules for a call that offers `toolset`, from the cache if possible."""
        if toolset is self.toolset:
            return self.rules
        known = self._visible.get(tuple(toolset.by_name))
        return known[1] if known is not None and known[0] is toolset else self.rules_for(toolset)

    def rules_for(self, toolset: Toolset) -> Rules:
        """Return the loop's rules for a call that offers `toolset`."""
        structure, options = self.output.structure, self.options
        specifications = toolset.specifications
        if options.strict is not None:
            structure = None if structure is None else replace(structure, strict=options.strict)
            specifications = tuple(
                replace(each, strict=options.strict) if each.strict is None else each for each in specifications
            )
        choice = options.tool_choice
        if choice in self.toolset.by_name and choice not in toolset.by_name:
            choice = None  # the identity may not call this tool, so the model must not read its name
        return Rules(
            max_rounds=self.call_limits.max_tool_rounds,
            max_calls=self.call_limits.max_tool_calls_per_response,
            max_output_retries=options.max_output_retries,
            immediate=toolset.immediate,
            immediate_if_last=toolset.immediate_if_last,
            immediate_type=self.output.adapter if self.output.wants_immediate_value else None,
            kind=self.output.kind,
            structure=structure,
            reads_answer=not self.output.is_stream or self.layers.check_answer is not None,
            specifications=specifications,
            answer_too=(*specifications, structure.tool) if structure is not None else (),
            tool_choice=choice,
            parameters=dict(options.parameters),
            temperature=options.temperature,
            reasoning=options.reasoning,
            whole_replies=self.layers.whole_replies,
            continues_history=self.continues_history,
            checks_answers=self.layers.check_answer is not None,
            max_answer_retries=self.layers.max_answer_retries,
        )

    def rules_of_call(self, rules: Rules, given: ChatRequestParameters) -> Rules:
        """Return `rules` with the options of one call. Raises `IllegalConfigurationError`."""
        choice = given.tool_choice
        offered = [each.name for each in rules.specifications]
        forced = choice in ("required", "any") and (offered or given.parameters.get("tools"))
        if choice not in (None, "auto", "none", *offered) and not forced:
            fact = f"invalid tool_choice={choice!r}: no tool of this name is offered"
            names = ", ".join(map(repr, offered)) or "no tools are offered"
            raise IllegalConfigurationError([Problem(self.where, fact, f'use "auto", "none", or one of: {names}')])
        parameters = {**rules.parameters, **given.parameters}
        if rules.parameters.get("tools") and given.parameters.get("tools"):
            parameters["tools"] = [*rules.parameters["tools"], *given.parameters["tools"]]
        temperature = rules.temperature
        if given.temperature is not None or "temperature" in given.parameters:  # the call's value wins in both forms
            temperature = given.temperature
        return replace(
            rules,
            tool_choice=rules.tool_choice if choice is None else choice,
            parameters=parameters,
            temperature=temperature,
            reasoning=rules.reasoning if given.reasoning is None else given.reasoning,
            max_output_tokens=given.max_output_tokens,
        )


# --- plans whose calls may be suspended


def may_suspend(tool: Tool, plans: Mapping[Any, Mapping[str, MethodPlan]]) -> bool:
    """Return True if a call of this tool may be suspended, or needs its run's id. `plans` are those of services."""
    if tool.requires_approval or tool.deferred or tool.key_names or tool.run_id_names:
        return True
    inner = _inner_plan(tool, plans)
    return inner is not None and inner.may_suspend


def leads_to_provider(tool: Tool, plans: Mapping[Any, Mapping[str, MethodPlan]]) -> bool:
    """Return True if this tool is a service with a tool provider, also indirectly: its tools may suspend the call."""
    inner = _inner_plan(tool, plans)
    return inner is not None and (bool(inner.providers) or inner.has_inner_provider)


def call_may_suspend(tool: Tool, plans: Mapping[Any, Mapping[str, MethodPlan]]) -> bool:
    """Return True if a call of this tool may be suspended, also by a tool that a provider offers."""
    return may_suspend(tool, plans) or leads_to_provider(tool, plans)


def _inner_plan(tool: Tool, plans: Mapping[Any, Mapping[str, MethodPlan]]) -> MethodPlan | None:
    """Return the plan of a service that is the tool."""
    if not tool.is_service:
        return None
    return plan_behind(tool) if tool.function is not None else plans.get(tool.bean, {}).get(tool.member)


def plan_behind(tool: Tool) -> MethodPlan | None:
    """Return the plan of a tool that is a method of a service made without a container."""
    return next((each for each in getattr(tool.function, "args", ()) if isinstance(each, MethodPlan)), None)


def services_below(plan: MethodPlan) -> Iterator[MethodPlan]:
    """Yield the plans of the services that a method has as tools, also indirectly."""
    for tool in plan.toolset.tools:
        if (inner := plan_behind(tool)) is not None:
            yield inner
            yield from services_below(inner)


def settle(plans: Mapping[Any, Mapping[str, MethodPlan]]) -> None:
    """Set `may_suspend`, `has_inner_provider` and `checks_suspended` of all plans; `plans` are those of each service,
    by class.
    """
    everything = [plan for methods in plans.values() for plan in methods.values()]
    changed = True
    while changed:
        changed = False
        for plan in everything:
            for name, holds in (("may_suspend", may_suspend), ("has_inner_provider", leads_to_provider)):
                if not getattr(plan, name) and any(holds(tool, plans) for tool in plan.toolset.tools):
                    object.__setattr__(plan, name, True)
                    changed = True
    for methods in plans.values():
        # A provider may add tools that suspend.
        checks = any(
            plan.may_suspend or plan.durable or plan.providers or plan.has_inner_provider for plan in methods.values()
        )
        for plan in methods.values():
            object.__setattr__(plan, "checks_suspended", checks)


# --- tools added for a block of code

current_additional_tools: ContextVar[tuple[Sequence[Tool], InvocationContext | None, str] | None]
current_additional_tools = ContextVar("toolbox.added_tools", default=None)
"""The tools that surrounding blocks add, the invocation that contains the innermost block, and that block's place."""


@contextmanager
def additional_tools(sources: Sequence[Any], where: str = "@toolbox") -> Iterator[None]:
    """Add tools to the services that the block calls directly, but not to services called as tools.

    Raises `IllegalConfigurationError` for invalid tools.
    """
    tools, problems = read_tools(sources, where)
    if problems:
        raise IllegalConfigurationError(problems)
    with tools_added(tools):
        yield


@contextmanager
def tools_added(tools: Sequence[Tool], place: str = "") -> Iterator[None]:
    """Add tools that have already been read; see `additional_tools`.

    `place` names the code that adds them, so that a stored run finds them again; the container must know it.
    """
    token = current_additional_tools.set((tools, current_invocation.get(), place))
    try:
        yield
    finally:
        current_additional_tools.reset(token)


def place_of_added_tools() -> str:
    """Return the place that adds tools to a call that starts here; an empty text if none does."""
    added = current_additional_tools.get()
    return "" if added is None or added[1] is not current_invocation.get() else added[2]


# --- message templates


_TOKEN = re.compile(r"\{\{|\}\}|\{([A-Za-z_]\w*)\}|[{}]")


@dataclass(frozen=True, slots=True)
class Variable:
    """A placeholder for the value of this name."""

    name: str


@dataclass(frozen=True, slots=True)
class Template:
    """A parsed template: texts and variables in order."""

    parts: tuple[str | Variable, ...]

    @property
    def variables(self) -> frozenset[str]:
        """The names in the template."""
        return frozenset(part.name for part in self.parts if isinstance(part, Variable))

    def render(self, values: Mapping[str, object]) -> str:
        """Return the text with the variables replaced by `values`."""
        return "".join([part if isinstance(part, str) else text_of(values[part.name]) for part in self.parts])


def parse(text: str) -> tuple[Template, list[str]]:
    """Parse a template. Returns it with its mistakes, one text each; the list is empty if it is valid."""
    parts: list[str | Variable] = []
    faults: list[str] = []
    literal: list[str] = []
    position = 0
    for token in _TOKEN.finditer(text):
        literal.append(text[position : token.start()])
        position = token.end()
        if token[1] is not None:
            parts += ["".join(literal), Variable(token[1])]
            literal = []
        elif token[0] in ("{{", "}}"):
            literal.append(token[0][0])
        else:
            place = text[token.start() : token.start() + 20]
            faults.append(f"a single brace {token[0]!r} at {place!r}")
    literal.append(text[position:])
    parts.append("".join(literal))
    return Template(tuple(part for part in parts if part != "")), faults


def doubled_names(text: str, names: frozenset[str]) -> list[str]:
    """Return the names that `text` contains as `{{name}}`, which renders as braces instead of the value."""
    return [name for name in re.findall(r"(?<!\{)\{\{\s*([A-Za-z_]\w*)\s*\}\}(?!\})", text) if name in names]


def text_of(value: object) -> str:
    """Return a value as text for a prompt: scalars, enums and dates as text, all other values as compact JSON."""
    match value:
        case str() if type(value) is str:
            return value
        case Enum():
            return str(value.value)
        case str() | bool() | int() | float() | Decimal() | UUID():
            return str(value)
        case datetime() | date() | time():
            return value.isoformat()
        case timedelta():
            return str(value)
        case _:
            return to_json(value, inf_nan_mode="constants").decode()
