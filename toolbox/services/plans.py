"""Plans of service methods, with everything that can be prepared before a call, and the layers that a method has.

Not here: creating plans (`planning`), what depends on the plans of other services (`inner_plans`), running them
(`invocation`, `driver`).
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, TypeAlias

from ..chat import ChatRequestParameters
from ..conversations.keys import ChatMemoryKey
from ..conversations.views import ChosenView
from ..errors import IllegalConfigurationError, ModelError, Problem
from ..execution.markers import Execution
from ..handover import HandoverMark
from ..limits import UsageLimits
from ..models.routing import router_in
from ..models.selection import DEFAULT_NAME
from ..schemas import NotStrict
from ..security import Access, SecurityIdentity
from ..tools.failures import ToolErrors
from ..tools.function_calls import with_layers
from ..tools.retrievers import BoundRetriever
from ..tools.tool_calls import Tool, ToolLayer, ToolOfTeam
from .call_messages import MethodMessages
from .declaration import CallLimits, ServiceOptions
from .loop import AnswerChecked, CallModel, CheckAnswer, ModelReplied, Rules, RunTool, ToolFinished, ToolSuspended
from .method_marks import MethodMarks
from .outputs import Output, OutputMode
from .toolsets import Provider, Toolset, offer_problems

MAX_VISIBLE_TOOLSETS = 256
"""So many different selections of a method's tools are kept, for identities with different roles."""


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


# Layers take the `Invocation`, which has a plan; plans do not know its class.

InvocationLayer: TypeAlias = Callable[[Any], AbstractAsyncContextManager[None]]
"""Wraps an invocation: takes the `Invocation` and returns an async context manager."""

PerformEffect: TypeAlias = Callable[[CallModel | RunTool, Any], Awaitable[ModelReplied | ToolFinished | ToolSuspended]]
"""Performs one effect of an `Invocation`, a model request or a tool call, and returns its result."""

AfterRound: TypeAlias = Callable[[Any, int], Awaitable[None]]
"""Takes the `Invocation` after a round, and the position of its first tool in `State.executions`."""

EffectLayer: TypeAlias = Callable[[PerformEffect], PerformEffect]
"""Wraps each model request and each tool call: takes the next step and returns a new one."""


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers of a method, outermost first. They are chosen once, and a method has only those that it needs.

    `around_turn` layers wrap the invocation with the write of its turn, `effects` layers each model request and
    each tool call, and `tools` layers each tool call with decoded arguments. `models` are those of `effects` that wrap
    a request for a summary too: interceptors. `check_input` judges the user message
    before the invocation begins, or before its run is stored, and may replace it. With `whole_replies`, tools start
    only when the reply is complete, because a layer may change it. `after_round` is called when all tools of a reply
    have ended, with the position of the first one in `State.executions`, and may change the state. `check_answer`
    performs a `CheckAnswer`, and `max_answer_retries` is how often the model is asked again after a refused answer.
    """

    around_turn: tuple[InvocationLayer, ...] = ()
    check_input: Callable[[Any], Awaitable[None]] | None = None
    effects: tuple[EffectLayer, ...] = ()
    models: tuple[EffectLayer, ...] = ()
    tools: tuple[ToolLayer, ...] = ()
    whole_replies: bool = False
    after_round: AfterRound | None = None
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


@dataclass(frozen=True, kw_only=True)
class MethodPlan:
    """Everything that a call of one method needs.

    `may_suspend`, if a tool may suspend the call, `has_inner_provider`, if a service that is a tool has a tool
    provider, and `checks_suspended`, if its conversations may have a suspended run, depend on other services: the plans
    of `settled` have them. `where` names the method in problems and errors. `is_async` is True if the caller awaits or
    uses `async for`. `keeps_beans` is True if the program has conversation-scoped beans. `access` is None if everyone
    may call the method, `model_name` if a router chooses the model of each call, `output_mode` if the model decides by
    what it supports.

    `handovers` are the marks of `@hands_over_to`, and `targets` what they name: service and method. `team` has a plan
    for each method that a call of this one can be handed over to, by its place such as `"Billing.chat"`: what shapes
    requests, replies and tools is that method's, everything about the call as a whole is this one's. `team_limits` are
    the method's own limits in such a plan, which count from the hand-over on. `tools_of_team` says which methods have
    a tool, by its name. `spoken_parameter` is the parameter that is the user message.
    """

    service: type[Any]
    name: str
    signature: inspect.Signature
    is_coroutine: bool
    output: Output
    memory_parameter: str | None
    window: ChosenView | None
    messages: MethodMessages
    call_options: str | None  # the parameter of type `ChatRequestParameters`
    toolset: Toolset
    providers: tuple[Provider, ...]
    options: ServiceOptions
    call_limits: CallLimits
    failures: ToolErrors
    compensations: Mapping[str, Tool] = field(default_factory=dict)  # name of a tool -> what undoes it
    layers: Layers = Layers()
    run_layers: Callable[[], Layers] | None = Layers  # those of `in_run`; None in a plan that is one
    annotations: Mapping[str, Any] = field(default_factory=dict)
    run_id_parameter: str | None = None
    durable: bool = False
    fallback: AnswerWithoutModel | None = None
    retrievers: tuple[BoundRetriever, ...] = ()
    may_suspend: bool = False
    has_inner_provider: bool = False
    checks_suspended: bool = False
    access: Access | None = None
    keeps_beans: bool = False
    handovers: tuple[HandoverMark, ...] = ()
    unused: tuple[str, ...] = ()  # parameters that only methods to which it hands over may need
    targets: tuple[tuple[type[Any], str], ...] = ()
    team: Mapping[str, MethodPlan] = field(default_factory=dict, compare=False, repr=False)
    team_limits: UsageLimits | None = None
    tools_of_team: Mapping[str, Sequence[ToolOfTeam]] = field(default_factory=dict, compare=False, repr=False)
    spoken_parameter: str | None = None
    model_name: str | None = field(init=False)
    output_mode: OutputMode | None = field(init=False)
    where: str = field(init=False)
    is_async: bool = field(init=False)
    rules: Rules = field(init=False)
    _visible: dict[tuple[str, ...], tuple[Toolset, Rules]] = field(
        init=False, compare=False, repr=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        """Compute the values that are the same for all calls."""
        toolset = self.toolset
        if self.layers.tools:
            toolset = Toolset.of([with_layers(tool, self.layers.tools) for tool in toolset.tools])
        object.__setattr__(self, "toolset", toolset)
        if self.spoken_parameter is None:
            object.__setattr__(self, "spoken_parameter", self.messages.user_parameter)
        object.__setattr__(self, "where", f"{self.service.__name__}.{self.name}")
        object.__setattr__(self, "is_async", self.is_coroutine or (self.output.is_stream and not self.is_sync_stream))
        model = self.options.model
        object.__setattr__(self, "model_name", None if router_in(model) is not None else str(model or DEFAULT_NAME))
        object.__setattr__(self, "output_mode", self._choose_output_mode())
        object.__setattr__(self, "rules", self.rules_for(toolset))

    @cached_property
    def in_run(self) -> MethodPlan:
        """The same plan for a call that is part of a run: it can be suspended, and is recorded."""
        # Made for the first such call: a program without runs does not import their layers.
        return self if self.run_layers is None else replace(self, layers=self.run_layers(), run_layers=None)

    def _choose_output_mode(self) -> OutputMode | None:
        if self.output.structure is None:
            return "prompt"
        mode = self.options.output_mode
        return None if mode == "tool" and self.output.is_stream else mode

    @cached_property
    def checks_input(self) -> bool:
        """True if input guardrails may judge the user message of a call."""
        return any(each.layers.check_input is not None for each in (self, *self.team.values()))

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments of a call by name, with defaults.

        Raises `TypeError`, also for a history with anything but messages, and `ValueError` for one that is sent alone
        and that a model cannot answer.
        """
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.where}(): {error}") from None
        bound.apply_defaults()
        if self.messages.history:
            self.messages.check_history(bound.arguments)
        return bound.arguments

    def find_memory_id(self, arguments: Mapping[str, Any]) -> Any:
        """Return the memory id in the arguments of a call; None if there is none."""
        return None if self.memory_parameter is None else arguments[self.memory_parameter]

    def find_conversation(self, memory_id: object) -> ChatMemoryKey | None:
        """Return the conversation of a call with this memory id; None if neither messages nor beans are kept.

        Raises `InvalidMemoryIdError`.
        """
        is_kept = memory_id is not None and (self.window is not None or self.keeps_beans)
        return ChatMemoryKey.of(self.service, memory_id) if is_kept else None

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
        """Return the loop's rules for a call that offers another toolset, from the cache if possible."""
        known = self._visible.get(tuple(toolset.by_name))
        return known[1] if known is not None and known[0] is toolset else self.rules_for(toolset)

    def rules_for(self, toolset: Toolset) -> Rules:
        """Return the loop's rules for a call that offers `toolset`."""
        structure, options = self.output.structure, self.options
        specifications = toolset.specifications
        if options.strict is not None:
            with suppress(NotStrict):  # a problem at start
                structure = None if structure is None else structure.enforced(options.strict)
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
            streams=self.output.is_stream,
            specifications=specifications,
            answer_too=(*specifications, structure.tool) if structure is not None else (),
            tool_choice=choice,
            parameters=options.parameters,
            temperature=options.temperature,
            reasoning=options.reasoning,
            whole_replies=self.layers.whole_replies,
            continues_history=self.messages.continues_history,
            checks_answers=self.layers.check_answer is not None,
            max_answer_retries=self.layers.max_answer_retries,
            answers_at_limit=options.on_limit == "answer",
            handovers=frozenset(toolset.handovers),
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
