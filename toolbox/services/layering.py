"""Chooses the layers of a method and of a single tool, in the documented order. Each capability has its place here.

One invocation: roles, conversation, input guardrails, rounds, output guardrails, parsing. One model request: tool
search, limits, recording, interceptors. One tool call: input guardrails, approval, output guardrails, interceptors,
recording. Includes the checks of what decorators name. Not here: the layers themselves (in the module of each
capability), those of every host (`layers`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..bean_references import BeanReference, definitions_of, is_marked, named_at_first, named_in_class
from ..errors import Problem
from ..tools.pipeline import Tool, ToolLayer, ToolStep
from .declaration import ServiceOptions
from .plans import EffectLayer, InvocationLayer, Layers

GUARDRAILS = ("input_guardrails", "output_guardrails", "tool_input_guardrails", "tool_output_guardrails")
"""The decorators that name guardrails."""

DECORATORS = ("interceptors", *GUARDRAILS)
"""The decorators that name beans, at services and their methods, and at tools."""


@dataclass(frozen=True, slots=True)
class HostLayers:
    """The capabilities that a host adds to all calls: `interceptors` are the global ones, outermost first."""

    interceptors: tuple[BeanReference, ...] = ()


NO_LAYERS = HostLayers()


@dataclass(frozen=True, slots=True)
class MethodMarks:
    """Finds what decorators name at a service class and at one of its methods."""

    cls: type[Any]
    method: str
    is_marked: bool = field(init=False)

    def __post_init__(self) -> None:
        """Look once for any mark: most methods have none."""
        object.__setattr__(self, "is_marked", is_marked(*self.cls.__mro__, *definitions_of(self.cls, self.method)))

    def named_by(self, decorator: str) -> tuple[BeanReference, ...]:
        """Return what a decorator names at the class and its bases, then at the method."""
        if not self.is_marked:
            return ()
        return (*self.at_class(decorator), *self.at_method(decorator))

    def at_class(self, decorator: str) -> tuple[BeanReference, ...]:
        """Return what a decorator names at the class and its bases."""
        return named_in_class(self.cls, decorator)

    def at_method(self, decorator: str) -> tuple[BeanReference, ...]:
        """Return what a decorator names at the method."""
        return named_at_first(definitions_of(self.cls, self.method), decorator) if self.is_marked else ()

    def answer_retries(self) -> int:
        """Return the largest `max_retries` of `@output_guardrails` at the class and the method."""
        from ..guardrails.kinds import RETRIES_MARK

        targets = [*self.cls.__mro__, *definitions_of(self.cls, self.method)]
        found: list[int] = [vars(each).get(RETRIES_MARK, 0) for each in targets if hasattr(each, "__dict__")]
        return max(found)


def method_layers(marks: MethodMarks, host: HostLayers, options: ServiceOptions, *, in_run: bool = False) -> Layers:
    """Return the layers of a service method; `in_run` for calls that can be suspended, or are recorded."""
    interceptors = (*host.interceptors, *marks.named_by("interceptors"))
    models = _model_interceptors(interceptors)
    invocation: tuple[InvocationLayer, ...] = _input_check(marks.named_by("input_guardrails"))
    # Compensation, limits, tool search, recording, interceptors.
    recording, replaying = _recording(in_run)
    effects = (*_compensation(options), *_tool_search(options), *recording, *models, *replaying)
    output = marks.named_by("output_guardrails")
    return Layers(
        invocation=invocation,
        effects=effects,
        tools=tool_layers(interceptors, marks, in_run=in_run),
        whole_replies=bool(models or output),  # the reply may be changed, or asked for again
        check_answer=_output_check(output),
        max_answer_retries=marks.answer_retries() if output else 0,
    )


def tool_layers(
    interceptors: Sequence[BeanReference] = (),
    marks: MethodMarks | None = None,
    *,
    in_run: bool = False,
) -> tuple[ToolLayer, ...]:
    """Return the layers of the tools of a method, or of tools without a service.

    Each layer adds what decorators name at the tool itself.
    """

    def named(decorator: str) -> tuple[BeanReference, ...]:
        return marks.named_by(decorator) if marks is not None else ()

    # These also run for arguments that an interceptor changed.
    before: tuple[ToolLayer, ...] = (_ToolInputGuards(named("tool_input_guardrails")), _approval)
    output: ToolLayer = _ToolOutputGuards(named("tool_output_guardrails"))
    if in_run:
        before, output = tuple(_UnlessRun(each) for each in before), _Judging(output)
    around: tuple[ToolLayer, ...] = (*before, output, _ToolInterceptors(tuple(interceptors), before))
    return (_answered, *around, _recorded) if in_run else around


# --- runs


def _recording(in_run: bool) -> tuple[tuple[EffectLayer, ...], tuple[EffectLayer, ...]]:
    """Return the layer that records effects, and the one that gives a recorded reply to the layers between the two."""
    if not in_run:
        return (), ()
    from ..runs.run_layers import in_run as layer
    from ..runs.run_layers import replaying

    return (layer,), (replaying,)


@dataclass(frozen=True, slots=True)
class _UnlessRun:
    """A layer of checks before a tool, without effect on a call of a stored run that has passed them and has run."""

    layer: ToolLayer

    def __call__(self, step: ToolStep, tool: Tool) -> ToolStep:
        checked = self.layer(step, tool)
        if checked is step:
            return step
        from ..runs.run_layers import unless_run

        return unless_run(checked, step)


@dataclass(frozen=True, slots=True)
class _Judging:
    """The layer of the output guardrails, whose result is recorded instead of the tool's."""

    layer: ToolLayer

    def __call__(self, step: ToolStep, tool: Tool) -> ToolStep:
        guarded = self.layer(step, tool)
        if guarded is step:
            return step
        from ..runs.run_layers import judging

        return judging(guarded, step)


def _answered(step: ToolStep, tool: Tool) -> ToolStep:
    from ..runs.run_layers import answered

    return answered(step, tool)


def _approval(step: ToolStep, tool: Tool) -> ToolStep:
    if not tool.requires_approval:
        return step
    from ..runs.run_layers import approval

    return approval(step, tool)


def _recorded(step: ToolStep, tool: Tool) -> ToolStep:
    from ..runs.run_layers import recording

    return recording(step, tool)


# --- guardrails


def _input_check(named: Sequence[BeanReference]) -> tuple[InvocationLayer, ...]:
    if not named:
        return ()
    from ..guardrails.guard_layers import InputCheck

    return (InputCheck(named),)


def _output_check(named: Sequence[BeanReference]) -> Callable[[Any, Any], Awaitable[Any]] | None:
    if not named:
        return None
    from ..guardrails.guard_layers import OutputCheck

    return OutputCheck(named)


@dataclass(frozen=True, slots=True)
class _ToolInputGuards:
    """The layer of the tool input guardrails: `named` for all tools, then those of the tool."""

    named: tuple[BeanReference, ...]

    def __call__(self, step: ToolStep, tool: Tool) -> ToolStep:
        if named := (*self.named, *tool.named_by("tool_input_guardrails")):
            from ..guardrails.guard_layers import guarded_input

            return guarded_input(step, named)
        return step


@dataclass(frozen=True, slots=True)
class _ToolOutputGuards:
    """The layer of the tool output guardrails: `named` for all tools, then those of the tool."""

    named: tuple[BeanReference, ...]

    def __call__(self, step: ToolStep, tool: Tool) -> ToolStep:
        if named := (*self.named, *tool.named_by("tool_output_guardrails")):
            from ..guardrails.guard_layers import guarded_output

            return guarded_output(step, named)
        return step


# --- compensation


def compensates(options: ServiceOptions) -> bool:
    """Return True if the service undoes tools."""
    return options.compensate_on_tool_errors or options.compensate_on_failure


def _compensation(options: ServiceOptions) -> tuple[EffectLayer, ...]:
    if not compensates(options):
        return ()
    from .compensation import compensating

    return (compensating,)


# --- tool search


def _tool_search(options: ServiceOptions) -> tuple[EffectLayer, ...]:
    if options.tool_search is None:
        return ()
    from .offering import searching

    return (searching(BeanReference.to(options.tool_search)),)


# --- interceptors


def _model_interceptors(named: Sequence[BeanReference]) -> tuple[EffectLayer, ...]:
    if not named:
        return ()
    from ..interceptors import model_layers

    return model_layers(named)


@dataclass(frozen=True, slots=True)
class _ToolInterceptors:
    """The layer of the interceptors: `named` for all tools, then those of the tool."""

    named: tuple[BeanReference, ...]
    before: tuple[ToolLayer, ...]

    def __call__(self, step: ToolStep, tool: Tool) -> ToolStep:
        if named := (*self.named, *tool.named_by("interceptors")):
            from ..interceptors import intercepted_tool

            return intercepted_tool(step, tool, named, self.before)
        return step


# --- what decorators name, for checks


@dataclass(frozen=True, slots=True)
class NamedAt:
    """A class or instance that a decorator names; `where` is the place for problems."""

    where: str
    decorator: str
    reference: BeanReference
    is_at_tool: bool

    def problems(self) -> Iterator[Problem]:
        """Yield problems with the kind of the class."""
        if self.decorator in GUARDRAILS:
            from ..guardrails.kinds import guardrail_problems

            yield from guardrail_problems(self.where, self.decorator, self.reference.type, of_tool=self.is_at_tool)
            return
        from ..interceptors import interceptor_problems

        yield from interceptor_problems(self.where, self.reference.type, of_tool=self.is_at_tool)


def named_at_method(cls: type[Any], method: str) -> Iterator[NamedAt]:
    """Yield everything that decorators name at a service class and at one of its methods."""
    marks = MethodMarks(cls, method)
    for decorator in DECORATORS if marks.is_marked else ():
        for where, named in ((cls.__name__, marks.at_class), (f"{cls.__name__}.{method}", marks.at_method)):
            yield from (NamedAt(f"{where}, @{decorator}", decorator, each, False) for each in named(decorator))


def named_at_tool(tool: Tool) -> Iterator[NamedAt]:
    """Yield everything that decorators name at a tool and its class."""
    classes = tool.owner.__mro__ if tool.owner is not None else ()
    for decorator in DECORATORS if is_marked(*classes, *tool.definitions) else ():
        for each in tool.named_by(decorator):
            yield NamedAt(f"{tool.where}, @{decorator}", decorator, each, True)
