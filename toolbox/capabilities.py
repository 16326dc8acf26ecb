"""The capabilities that act around invocations, model requests and tool calls: all of them, in their order.

The order of one tool call, outermost first: error handlers, roles, and arguments decoded and validated (these three are
in `tools.pipeline`), then `tool_layers`: tool input guardrails, approval, interceptors, recording, `RetryOnError`; then
the tool. Tool output guardrails are outside of the interceptors: they have the last word on what a model reads. Of one
model request: limits (`services.usage_layers`, which `services.driver` adds to calls that have an account), then
`Capabilities.of_method`: dynamic tool providers, tool search, recording, interceptors, recorded replies; the innermost
counts (`usage_layers`). Of one invocation: roles, compensation of failures, the turn of the conversation
(`services.layers`), input guardrails, rounds (each with its compensation), parsing, output guardrails, memory.

A new capability is a function in its module, a line in `LATE`, and a place in one of the lists below. `LATE` names
modules of packages that a program without the capability does not import. What every program imports, such as a module
of `toolbox.tools`, is imported above. Not here: the layers themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from .bean_references import BeanReference
from .errors import Problem
from .services.declaration import ServiceOptions
from .services.method_marks import GUARDRAILS, MethodMarks, NamedAt
from .services.plans import EffectLayer, Layers
from .tools.tool_calls import Tool, ToolLayer, ToolStep

LATE: Mapping[str, str] = {
    "input guardrails": "toolbox.guardrails.guard_layers:InputCheck",
    "output guardrails": "toolbox.guardrails.guard_layers:OutputCheck",
    "retries of output guardrails": "toolbox.guardrails.kinds:answer_retries",
    "tool input guardrails": "toolbox.guardrails.guard_layers:guarded_input",
    "tool output guardrails": "toolbox.guardrails.guard_layers:guarded_output",
    "checks of guardrails": "toolbox.guardrails.kinds:guardrail_problems",
    "interceptors of models": "toolbox.interceptors.intercepted_calls:model_layers",
    "interceptors of tools": "toolbox.interceptors.intercepted_calls:intercepted_tool",
    "innermost interceptors of tools": "toolbox.interceptors.intercepted_calls:retried_tool",
    "checks of interceptors": "toolbox.interceptors.interception:interceptor_problems",
    "tool search": "toolbox.services.offering:searching",
    "dynamic tool providers": "toolbox.services.offering:refreshing",
    "compensation of failures": "toolbox.services.compensation:compensating_failure",
    "compensation of rounds": "toolbox.services.compensation:undo_failed_round",
    "what undoes the tools": "toolbox.services.compensation:compensations_of",
    "recording of effects": "toolbox.runs.run_layers:in_run",
    "recorded replies": "toolbox.runs.run_layers:replaying",
    "answers of people": "toolbox.runs.run_layers:answered",
    "checks before the first run": "toolbox.runs.run_layers:unless_run",
    "approval": "toolbox.runs.run_layers:approval",
    "approval without a run": "toolbox.runs.run_layers:without_approval",
    "recording of judgements": "toolbox.runs.run_layers:judging",
    "recording of results": "toolbox.runs.run_layers:recording",
    "a new run": "toolbox.runs.run_session:RunSession",
    "runs": "toolbox.runs.runs_bean:Runs",
    "run store": "toolbox.runs.store:RunStore",
    "run store in memory": "toolbox.runs.store:InMemoryRunStore",
    "run engine": "toolbox.runs.run_engines:RunEngine",
    "run engine of this process": "toolbox.runs.run_engines:LocalRunEngine",
    "checks of runs": "toolbox.runs.start_checks:run_problems",
    "checks with the opened run store": "toolbox.runs.start_checks:lost_transactions_at_start",
    "checks of durable methods": "toolbox.runs.start_checks:durable_problems",
    "check of persistence": "toolbox.runs.start_checks:not_persistent",
    "checks of approved arguments": "toolbox.runs.start_checks:hidden_argument_problems",
}
"""The functions of capabilities that are imported when a plan needs them: a program loads only what it uses."""


@cache
def load(name: str) -> Any:
    """Return a function of `LATE`. Its module is imported now."""
    module, _, function = LATE[name].partition(":")
    return getattr(import_module(module), function)


# --- the lists


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Chooses the layers of all methods of a host. `interceptors` are the global ones, outermost first."""

    interceptors: tuple[BeanReference, ...] = ()

    def of_method(
        self, marks: MethodMarks, options: ServiceOptions, *, has_providers: bool = False, in_run: bool = False
    ) -> Layers:
        """Return the layers of a service method; `in_run` for calls that can be suspended, or are recorded."""
        interceptors = (*self.interceptors, *marks.named_by("interceptors"))
        checks, output_checks = marks.named_by("input_guardrails"), marks.named_by("output_guardrails")
        models: tuple[EffectLayer, ...] = load("interceptors of models")(interceptors) if interceptors else ()
        effects: list[EffectLayer] = [
            *_load_when(has_providers, "dynamic tool providers"),
            *([load("tool search")(BeanReference.to(options.tool_search))] if options.tool_search is not None else ()),
            *_load_when(in_run, "recording of effects"),
            *models,
            *_load_when(in_run, "recorded replies"),
        ]
        return Layers(
            around_turn=_load_when(options.compensate_on_failure, "compensation of failures"),
            check_input=load("input guardrails")(checks) if checks else None,
            effects=tuple(effects),
            tools=tool_layers(interceptors, marks, in_run=in_run),
            whole_replies=bool(models or output_checks),  # the reply may be changed, or asked for again
            after_round=load("compensation of rounds") if options.compensate_on_tool_errors else None,
            check_answer=load("output guardrails")(output_checks) if output_checks else None,
            max_answer_retries=load("retries of output guardrails")(marks.definitions) if output_checks else 0,
        )

    def compensations_of(
        self, options: ServiceOptions, tools: Sequence[Tool], sources: Iterable[object]
    ) -> tuple[Mapping[str, Tool], Sequence[Problem]]:
        """Return what undoes each tool, by the tool's name, and the problems with it."""
        found: tuple[Mapping[str, Tool], Sequence[Problem]] = {}, ()
        return load("what undoes the tools")(tools, sources) if _compensates(options) else found


def tool_layers(
    interceptors: Sequence[BeanReference] = (),
    marks: MethodMarks | None = None,
    *,
    in_run: bool = False,
) -> tuple[ToolLayer, ...]:
    """Return the layers of the tools of a method, or of tools without a service.

    Each layer of guardrails or interceptors adds what decorators name at the tool itself.
    """

    def find_named(decorator: str) -> tuple[BeanReference, ...]:
        return marks.named_by(decorator) if marks is not None else ()

    input_guardrails = _NamedLayer(
        "tool input guardrails", "tool_input_guardrails", find_named("tool_input_guardrails")
    )
    output_guardrails = _NamedLayer(
        "tool output guardrails", "tool_output_guardrails", find_named("tool_output_guardrails")
    )
    checks: tuple[ToolLayer, ...] = (input_guardrails, _refuse_approval)
    judgement: ToolLayer = output_guardrails
    if in_run:  # a recorded call has passed the checks, and its result was judged
        checks = (_InRunLayer("checks before the first run", _Approval(input_guardrails)),)
        judgement = _InRunLayer("recording of judgements", output_guardrails)
    return (
        *_load_when(in_run, "answers of people"),
        *checks,
        judgement,
        # Arguments that an interceptor has changed pass through the checks again.
        _NamedLayer("interceptors of tools", "interceptors", tuple(interceptors), (checks,)),
        *_load_when(in_run, "recording of results"),
        # Inside of the record: all attempts of a call are one effect of its run.
        _NamedLayer("innermost interceptors of tools", "interceptors", tuple(interceptors)),
    )


def named_problems(named: NamedAt) -> Iterator[Problem]:
    """Yield problems with the class that a decorator names."""
    checks = load("checks of guardrails" if named.decorator in GUARDRAILS else "checks of interceptors")
    yield from checks(named.where, named.decorator, named.reference.type, of_tool=named.is_at_tool)


def _compensates(options: ServiceOptions) -> bool:
    return options.compensate_on_tool_errors or options.compensate_on_failure


# --- layers whose module is imported when the first tool needs them


def _load_when(needed: bool, name: str) -> tuple[Any, ...]:
    return (load(name),) if needed else ()


def _refuse_approval(step: ToolStep, tool: Tool) -> ToolStep:
    refusing: ToolLayer | None = load("approval without a run") if tool.requires_approval else None
    return step if refusing is None else refusing(step, tool)


@dataclass(frozen=True, slots=True)
class _Approval:
    """The layer of approval in a run, with the layer of tool input guardrails, which judge changed arguments again."""

    guardrails: ToolLayer

    def __call__(self, step: ToolStep, tool: Tool) -> ToolStep:
        approved: ToolStep = load("approval")(step, tool, self.guardrails)
        return approved


@dataclass(frozen=True, slots=True)
class _NamedLayer:
    """The layer of what a decorator names: `named` for all tools, then what it names at the tool."""

    name: str
    decorator: str
    named: tuple[BeanReference, ...]
    more: tuple[Any, ...] = ()

    def __call__(self, step: ToolStep, tool: Tool) -> ToolStep:
        if not (named := (*self.named, *tool.named_by(self.decorator))):
            return step
        wrapped: ToolStep = load(self.name)(step, tool, named, *self.more)
        return wrapped


@dataclass(frozen=True, slots=True)
class _InRunLayer:
    """A layer in a run: the function `name` chooses, for each call, between the layer's step and the one within."""

    name: str
    layer: ToolLayer

    def __call__(self, step: ToolStep, tool: Tool) -> ToolStep:
        layered = self.layer(step, tool)
        if layered is step:
            return step
        chosen: ToolStep = load(self.name)(layered, step)
        return chosen
