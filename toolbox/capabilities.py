"""The capabilities that act around invocations, model requests and tool calls: all of them, in their order.

The order of one tool call, outermost first: error handlers, roles, and arguments decoded and validated (these three are
in `tools.pipeline`), then the turn of a tool that uses conversation-scoped beans (`services.conversation_beans`), then
`tool_layers`: tool input guardrails, approval, interceptors, recording, `RetryOnError`; then the tool. Tool output
guardrails are outside of the interceptors: they have the last word on what a model reads. Of one model request: limits
(`services.usage_layers`, which `services.driver` adds to calls that have an account), then `Capabilities.of_method`:
dynamic tool providers, tool search, recording, interceptors, recorded replies; the innermost counts (`usage_layers`).
Of one invocation: roles, the turn of the conversation with its messages and beans (`services.layers`), compensation of
failures, the write of the turn, input guardrails, rounds (each with its compensation), parsing, output guardrails.

A new capability is a function in its module, a line in `Late`, and a place in one of the lists below. `Late` names
modules of packages that a program without the capability does not import. What every program imports, such as a module
of `toolbox.tools`, is imported above. Not here: the layers themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib import import_module
from typing import Any

from .bean_references import BeanReference
from .errors import Problem
from .services.declaration import ServiceOptions
from .services.method_marks import GUARDRAILS, MethodMarks, NamedAt
from .services.plans import EffectLayer, Layers
from .tools.tool_calls import Tool, ToolLayer, ToolStep


class Late(Enum):
    """The functions of capabilities that are imported when a plan needs them: a program loads only what it uses."""

    INPUT_GUARDRAILS = "toolbox.guardrails.guard_layers:InputCheck"
    OUTPUT_GUARDRAILS = "toolbox.guardrails.guard_layers:OutputCheck"
    RETRIES_OF_OUTPUT_GUARDRAILS = "toolbox.guardrails.kinds:answer_retries"
    TOOL_INPUT_GUARDRAILS = "toolbox.guardrails.guard_layers:guarded_input"
    TOOL_OUTPUT_GUARDRAILS = "toolbox.guardrails.guard_layers:guarded_output"
    CHECKS_OF_GUARDRAILS = "toolbox.guardrails.kinds:guardrail_problems"
    INTERCEPTORS_OF_MODELS = "toolbox.interceptors.intercepted_calls:model_layers"
    INTERCEPTORS_OF_TOOLS = "toolbox.interceptors.intercepted_calls:intercepted_tool"
    INNERMOST_INTERCEPTORS_OF_TOOLS = "toolbox.interceptors.intercepted_calls:retried_tool"
    CHECKS_OF_INTERCEPTORS = "toolbox.interceptors.interception:interceptor_problems"
    TOOL_SEARCH = "toolbox.services.offering:searching"
    DYNAMIC_TOOL_PROVIDERS = "toolbox.services.offering:refreshing"
    COMPENSATION_OF_FAILURES = "toolbox.services.compensation:compensating_failure"
    COMPENSATION_OF_ROUNDS = "toolbox.services.compensation:undo_failed_round"
    WHAT_UNDOES_THE_TOOLS = "toolbox.services.compensation:compensations_of"
    RECORDING_OF_EFFECTS = "toolbox.runs.service_calls.run_layers:in_run"
    RECORDED_REPLIES = "toolbox.runs.service_calls.run_layers:replaying"
    ANSWERS_OF_PEOPLE = "toolbox.runs.service_calls.run_layers:answered"
    CHECKS_BEFORE_THE_FIRST_RUN = "toolbox.runs.service_calls.run_layers:unless_run"
    APPROVAL = "toolbox.runs.service_calls.run_layers:approval"
    APPROVAL_WITHOUT_A_RUN = "toolbox.runs.service_calls.run_layers:without_approval"
    RECORDING_OF_JUDGEMENTS = "toolbox.runs.service_calls.run_layers:judging"
    RECORDING_OF_RESULTS = "toolbox.runs.service_calls.run_layers:recording"
    A_NEW_RUN = "toolbox.runs.service_calls.run_invocations:new_place"
    RUNS = "toolbox.runs.runs_bean:Runs"
    RUN_STORE = "toolbox.runs.store:RunStore"
    RUN_STORE_IN_MEMORY = "toolbox.runs.store:InMemoryRunStore"
    RUN_ENGINE = "toolbox.runs.run_engines:RunEngine"
    RUN_ENGINE_OF_THIS_PROCESS = "toolbox.runs.run_engines:LocalRunEngine"
    CHECKS_OF_RUNS = "toolbox.runs.service_calls.call_checks:run_problems"
    CHECKS_WITH_THE_OPENED_RUN_STORE = "toolbox.runs.service_calls.call_checks:problems_with_opened_store"
    CHECKS_OF_DURABLE_METHODS = "toolbox.runs.service_calls.call_checks:durable_problems"
    CHECK_OF_PERSISTENCE = "toolbox.runs.start_checks:not_persistent"
    CHECKS_OF_APPROVED_ARGUMENTS = "toolbox.runs.service_calls.call_checks:hidden_argument_problems"


@cache
def load(late: Late) -> Any:
    """Return the function. Its module is imported now."""
    module, _, function = late.value.partition(":")
    return getattr(import_module(module), function)


# --- the lists


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Chooses the layers of all methods of a host. `interceptors` are the global ones, outermost first.

    `around_tools` are layers around all others of a tool.
    """

    interceptors: tuple[BeanReference, ...] = ()
    around_tools: tuple[ToolLayer, ...] = ()

    def of_method(
        self, marks: MethodMarks, options: ServiceOptions, *, has_providers: bool = False, in_run: bool = False
    ) -> Layers:
        """Return the layers of a service method; `in_run` for calls that can be suspended, or are recorded."""
        interceptors = (*self.interceptors, *marks.named_by("interceptors"))
        checks, output_checks = marks.named_by("input_guardrails"), marks.named_by("output_guardrails")
        models: tuple[EffectLayer, ...] = load(Late.INTERCEPTORS_OF_MODELS)(interceptors) if interceptors else ()
        search = options.tool_search
        effects: list[EffectLayer] = [
            *_load_when(has_providers, Late.DYNAMIC_TOOL_PROVIDERS),
            *([load(Late.TOOL_SEARCH)(BeanReference.to(search))] if search is not None else ()),
            *_load_when(in_run, Late.RECORDING_OF_EFFECTS),
            *models,
            *_load_when(in_run, Late.RECORDED_REPLIES),
        ]
        return Layers(
            around_turn=_load_when(options.compensate_on_failure, Late.COMPENSATION_OF_FAILURES),
            check_input=load(Late.INPUT_GUARDRAILS)(checks) if checks else None,
            effects=tuple(effects),
            models=models,
            tools=(*self.around_tools, *tool_layers(interceptors, marks, in_run=in_run)),
            whole_replies=bool(models or output_checks),  # the reply may be changed, or asked for again
            after_round=load(Late.COMPENSATION_OF_ROUNDS) if options.compensate_on_tool_errors else None,
            check_answer=load(Late.OUTPUT_GUARDRAILS)(output_checks) if output_checks else None,
            max_answer_retries=load(Late.RETRIES_OF_OUTPUT_GUARDRAILS)(marks.definitions) if output_checks else 0,
        )

    def compensations_of(
        self, options: ServiceOptions, tools: Sequence[Tool], sources: Iterable[object]
    ) -> tuple[Mapping[str, Tool], Sequence[Problem]]:
        """Return what undoes each tool, by the tool's name, and the problems with it."""
        found: tuple[Mapping[str, Tool], Sequence[Problem]] = {}, ()
        return load(Late.WHAT_UNDOES_THE_TOOLS)(tools, sources) if _compensates(options) else found


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
        Late.TOOL_INPUT_GUARDRAILS, "tool_input_guardrails", find_named("tool_input_guardrails")
    )
    output_guardrails = _NamedLayer(
        Late.TOOL_OUTPUT_GUARDRAILS, "tool_output_guardrails", find_named("tool_output_guardrails")
    )
    checks: tuple[ToolLayer, ...] = (input_guardrails, _refuse_approval)
    judgement: ToolLayer = output_guardrails
    if in_run:  # a recorded call has passed the checks, and its result was judged
        checks = (_InRunLayer(Late.CHECKS_BEFORE_THE_FIRST_RUN, _Approval(input_guardrails)),)
        judgement = _InRunLayer(Late.RECORDING_OF_JUDGEMENTS, output_guardrails)
    return (
        *_load_when(in_run, Late.ANSWERS_OF_PEOPLE),
        *checks,
        judgement,
        # Arguments that an interceptor has changed pass through the checks again.
        _NamedLayer(Late.INTERCEPTORS_OF_TOOLS, "interceptors", tuple(interceptors), (checks,)),
        *_load_when(in_run, Late.RECORDING_OF_RESULTS),
        # Inside of the record: all attempts of a call are one effect of its run.
        _NamedLayer(Late.INNERMOST_INTERCEPTORS_OF_TOOLS, "interceptors", tuple(interceptors)),
    )


def named_problems(named: NamedAt) -> Iterator[Problem]:
    """Yield problems with the class that a decorator names."""
    checks = load(Late.CHECKS_OF_GUARDRAILS if named.decorator in GUARDRAILS else Late.CHECKS_OF_INTERCEPTORS)
    yield from checks(named.where, named.decorator, named.reference.type, of_tool=named.is_at_tool)


def _compensates(options: ServiceOptions) -> bool:
    return options.compensate_on_tool_errors or options.compensate_on_failure


# --- layers whose module is imported when the first tool needs them


def _load_when(needed: bool, late: Late) -> tuple[Any, ...]:
    return (load(late),) if needed else ()


def _refuse_approval(step: ToolStep, tool: Tool) -> ToolStep:
    refusing: ToolLayer | None = load(Late.APPROVAL_WITHOUT_A_RUN) if tool.requires_approval else None
    return step if refusing is None else refusing(step, tool)


@dataclass(frozen=True, slots=True)
class _Approval:
    """The layer of approval in a run, with the layer of tool input guardrails, which judge changed arguments again."""

    guardrails: ToolLayer

    def __call__(self, step: ToolStep, tool: Tool) -> ToolStep:
        approved: ToolStep = load(Late.APPROVAL)(step, tool, self.guardrails)
        return approved


@dataclass(frozen=True, slots=True)
class _NamedLayer:
    """The layer of what a decorator names: `named` for all tools, then what it names at the tool."""

    function: Late
    decorator: str
    named: tuple[BeanReference, ...]
    more: tuple[Any, ...] = ()

    def __call__(self, step: ToolStep, tool: Tool) -> ToolStep:
        if not (named := (*self.named, *tool.named_by(self.decorator))):
            return step
        wrapped: ToolStep = load(self.function)(step, tool, named, *self.more)
        return wrapped


@dataclass(frozen=True, slots=True)
class _InRunLayer:
    """A layer in a run: the `function` chooses, for each call, between the layer's step and the one within."""

    function: Late
    layer: ToolLayer

    def __call__(self, step: ToolStep, tool: Tool) -> ToolStep:
        layered = self.layer(step, tool)
        if layered is step:
            return step
        chosen: ToolStep = load(self.function)(layered, step)
        return chosen
