"""Teams: the methods to which a service method hands calls over, also indirectly, and the plan for each of them.

A *team* is known when all services have their plans. Here is the one place that says which part of a plan is that of
the method that was called, the *entry*, and which that of the method in charge. Not here: the decorator
(`toolbox.handover`), handing a call over (`handing_over`).
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from ..bean_references import BeanReference, definitions_of
from ..chat import Message, ToolExecutionResultMessage, ToolSpecification, UserMessage
from ..errors import Problem
from ..handover import HandoverMark
from ..introspection import EMPTY, snake_case, type_name
from ..tools.marks import SearchBehavior, toolbox_of
from ..tools.sources import AiServiceTool, clashes, read_tools
from ..tools.tool_calls import Tool, ToolOfTeam
from .declaration import ServiceOptions
from .declared_sources import as_sources
from .method_marks import MethodMarks
from .option_checks import choice_problems
from .plans import Layering, MethodPlan
from .toolsets import Toolset, offer_problems

Plans = Mapping[type[Any], Mapping[str, MethodPlan]]

OPTIONS_OF_ENTRY: Final = (
    *("name", "former_names", "chat_memory", "shared_conversations", "when_busy", "unfinished_turns", "on_suspended"),
    *("limits", "on_limit", "timeout", "max_tool_rounds", "concurrent_tools", "inner_events", "durable", "run_retries"),
    *("compensate_on_tool_errors", "compensate_on_failure"),
)
"""The options that are about the call as a whole. All others shape a request, its reply or its tools."""


# --- the tools that hand over


def with_handovers(plans: Plans) -> tuple[dict[type[Any], dict[str, MethodPlan]], list[Problem]]:
    """Return the plans with the tools that hand over, and all problems with the targets."""
    known = {cls: dict(methods) for cls, methods in plans.items()}
    problems: list[Problem] = []
    for methods in known.values():
        for name, plan in methods.items():
            if plan.handovers and not plan.targets:
                methods[name] = _with_own_handovers(plan, plans, problems)
    for methods in known.values():
        for plan in methods.values():
            if plan.targets:
                problems += _problems_of_team(plan, known)
    return known, problems


def _with_own_handovers(plan: MethodPlan, plans: Plans, problems: list[Problem]) -> MethodPlan:
    found: list[tuple[HandoverMark, MethodPlan]] = []
    for mark in plan.handovers:
        targets = _find_targets(mark.target, plans)
        if len(targets) != 1:
            problems.append(_not_one(plan.where, mark.target, targets))
        elif targets[0] is plan:
            problems.append(Problem(plan.where, "@hands_over_to names the method itself", "name another method"))
        else:
            found.append((mark, targets[0]))
    classes = [target.service for _, target in found]
    tools = []
    for mark, target in found:
        name = f"{_TOOL_PREFIX}{snake_case(target.service)}"
        if classes.count(target.service) > 1:
            name = f"{name}_{target.name}"
        if (description := mark.description or _describe(target)) is None or not description.strip():
            fact = f"@hands_over_to: the model does not know what {target.where} is for"
            problems.append(Problem(plan.where, fact, 'add description="…", or a docstring to the method or its class'))
        tools.append(_make_tool(name, description, target))
    problems += clashes([*plan.toolset.tools, *tools], plan.where)
    toolset = Toolset.of([*plan.toolset.tools, *tools])
    problems += choice_problems(plan.where, plan.options, list(toolset.by_name), has_providers=bool(plan.providers))
    problems += offer_problems(plan.where, Toolset.of(tools), plan.output, None, plan.options.output_mode)
    return replace(plan, toolset=toolset, targets=tuple((each.service, each.name) for _, each in found))


def _find_targets(named: Any, plans: Plans) -> list[MethodPlan]:
    """Return the methods that a target names; a method that several services inherit is that of the nearest one."""
    if isinstance(named, str):
        service, _, method = named.rpartition(".")
        return [
            plan
            for cls, methods in plans.items()
            if service in (cls.__name__, f"{cls.__module__}.{cls.__name__}", f"{cls.__module__}.{cls.__qualname__}")
            if (plan := methods.get(method)) is not None
        ]
    found = [
        (cls, plan)
        for cls, methods in plans.items()
        for name, plan in methods.items()
        if inspect.getattr_static(cls, name, None) is named
    ]
    own = [plan for cls, plan in found if vars(cls).get(plan.name) is named]
    return own or [plan for _, plan in found]


def _not_one(where: str, named: Any, found: Sequence[MethodPlan]) -> Problem:
    name = named if isinstance(named, str) else getattr(named, "__qualname__", repr(named))
    if not found:
        fact = f"@hands_over_to({name}): no AI service that is registered has this method"
        return Problem(where, fact, "register the service, or correct the name")
    several = ", ".join(f"{each.service.__module__}.{each.where}" for each in found)
    return Problem(where, f"@hands_over_to({name}) names several methods: {several}", "use module.Class.method")


def _describe(target: MethodPlan) -> str | None:
    """Return the docstring of a method, else that of its class."""
    function = inspect.getattr_static(target.service, target.name)
    text = getattr(function, "__doc__", None) or vars(target.service).get("__doc__")
    return inspect.cleandoc(text) if isinstance(text, str) else None


def _make_tool(name: str, description: str | None, target: MethodPlan) -> Tool:
    """Return the tool that hands over to a method. Identities that may not call the method do not see it."""
    source = AiServiceTool(ToolSpecification(name, description), _refuse, search_behavior=SearchBehavior.ALWAYS_VISIBLE)
    [tool], _ = read_tools([source], target.where)
    return replace(tool, where=target.where, access=target.access, hands_over_to=target.where)


def _refuse(*_: object) -> str:
    raise RuntimeError("a tool that hands over is run by the loop")


_TOOL_PREFIX: Final = "transfer_to_"
"""How the names of tools that hand over begin."""

HANDED_OVER: Final = "Handed over to {method}."
"""What the model reads as the result of a hand-over."""


def callers_in(messages: Iterable[Message], entry: str) -> dict[str, str]:
    """Return which method of the team of `entry` has last called each tool with a result, by the names of the tools."""
    found: dict[str, str] = {}
    here = following = entry
    before, after = HANDED_OVER.split("{method}")
    for each in messages:
        if not isinstance(each, ToolExecutionResultMessage):
            here = following
        elif each.tool_name.startswith(_TOOL_PREFIX) and each.text.startswith(before):
            following = each.text.removeprefix(before).removesuffix(after)  # from the next reply on
        elif not each.is_error:
            found[each.tool_name] = here
    return found


# --- who is in a team


def targets_of(plan: MethodPlan, plans: Plans) -> list[MethodPlan]:
    """Return the methods that a call can be handed over to, also indirectly, the nearest first; not the method itself.

    The plans of `plans` are used.
    """
    seen, todo, found = {(plan.service, plan.name)}, [*plan.targets], list[MethodPlan]()
    while todo:
        here = todo.pop(0)
        if here in seen or (target := plans.get(here[0], {}).get(here[1])) is None:
            continue
        seen.add(here)
        found.append(target)
        todo += target.targets
    return found


def with_teams(plans: Plans, layering: Layering) -> dict[type[Any], dict[str, MethodPlan]]:
    """Return plans that are settled with the plans of their teams."""
    known = {cls: dict(methods) for cls, methods in plans.items()}
    for methods in known.values():
        for name, plan in methods.items():
            if plan.targets:
                methods[name] = _with_team(plan, targets_of(plan, plans), layering)
    return known


def _with_team(entry: MethodPlan, targets: Sequence[MethodPlan], layering: Layering) -> MethodPlan:
    undoing = [_compensations_of(each, _joint_options(entry, each), layering) for each in targets]
    compensations = {name: tool for found in (*undoing, entry.compensations) for name, tool in found.items()}
    tools: dict[str, list[ToolOfTeam]] = defaultdict(list)
    for plan in (entry, *targets):
        for tool in plan.toolset.tools:
            tools[tool.name].append(ToolOfTeam(plan.where, tool, plan.access))
    entry = replace(entry, compensations=compensations, tools_of_team=dict(tools))
    return replace(entry, team={each.where: _plan_in_charge(entry, each, layering) for each in targets})


def _joint_options(entry: MethodPlan, target: MethodPlan) -> ServiceOptions:
    return replace(target.options, **{name: getattr(entry.options, name) for name in OPTIONS_OF_ENTRY})


def _plan_in_charge(entry: MethodPlan, target: MethodPlan, layering: Layering) -> MethodPlan:
    """Return the plan of calls of `entry` while `target` is in charge."""
    # Of the target: everything that is not replaced here, such as its tools, its model, its retrievers, its handlers.
    options = _joint_options(entry, target)
    marks = _TeamMarks(target.service, target.name, MethodMarks(entry.service, entry.name))
    layers = partial(layering.of_method, marks, options, has_providers=bool(target.providers))
    limits = entry.call_limits
    return replace(
        target,
        window=entry.window,
        # The user message and the history are made of the arguments of the entry, the system message of the target's.
        messages=replace(entry.messages, system=target.messages.system, values=target.messages.values),
        options=options,
        call_limits=replace(target.call_limits, max_tool_rounds=limits.max_tool_rounds, timeout=limits.timeout),
        compensations=entry.compensations,
        layers=layers(),
        run_layers=partial(layers, in_run=True),
        spoken_parameter=target.messages.user_parameter,
        durable=entry.durable,
        fallback=entry.fallback,
        may_suspend=entry.may_suspend,
        has_inner_provider=entry.has_inner_provider,
        checks_suspended=entry.checks_suspended,
        keeps_beans=entry.keeps_beans,
        team_limits=target.options.limits,
        tools_of_team=entry.tools_of_team,
    )


def _compensations_of(target: MethodPlan, options: ServiceOptions, layering: Layering) -> Mapping[str, Tool]:
    """Return what undoes the tools of a target, if the entry says that they are undone."""
    own = toolbox_of(inspect.getattr_static(target.service, target.name))
    sources = as_sources(options.tools) if own is None else own
    tools = [each for each in target.toolset.tools if each.hands_over_to is None]
    return layering.compensations_of(options, tools, sources)[0]


@dataclass(frozen=True, slots=True)
class _TeamMarks(MethodMarks):
    """What decorators name at a target, with the guardrails of the entry.

    The entry's input guardrails run when the call begins; its output guardrails have the last word on an answer.
    """

    entry: MethodMarks

    @property
    def definitions(self) -> tuple[Any, ...]:
        """The classes and methods of both."""
        return *self.cls.__mro__, *definitions_of(self.cls, self.method), *self.entry.definitions

    def named_by(self, decorator: str) -> tuple[BeanReference, ...]:
        """Return what a decorator names at the target, and of the entry its output guardrails."""
        own, entry = MethodMarks.named_by(self, decorator), self.entry.named_by(decorator)
        if decorator not in ("input_guardrails", "output_guardrails"):
            return own
        added = tuple(each for each in own if each not in entry)
        return added if decorator == "input_guardrails" else (*added, *entry)


# --- arguments


def arguments_in_charge(
    entry: MethodPlan, target: MethodPlan, arguments: Mapping[str, Any], message: UserMessage
) -> dict[str, Any]:
    """Return the arguments of a target: `arguments` are those of the entry, and `message` its user message.

    Memory id, run's id and user message go by their kind, all others by their name.
    """
    given: dict[str, Any] = {}
    for name, parameter in target.signature.parameters.items():
        if name == target.memory_parameter and entry.memory_parameter is not None:
            given[name] = arguments[entry.memory_parameter]
        elif name == target.run_id_parameter and entry.run_id_parameter is not None:
            given[name] = arguments[entry.run_id_parameter]
        elif name == target.spoken_parameter:
            given[name] = message if target.annotations.get(name) is UserMessage else message.text
        elif name in arguments:
            given[name] = arguments[name]
        elif parameter.default is not EMPTY:
            given[name] = parameter.default
    return given


# --- problems


def _problems_of_team(entry: MethodPlan, plans: Plans) -> Iterator[Problem]:
    """Yield problems of a method with each method that its calls can be handed over to."""
    places, targets = {entry.where: entry}, targets_of(entry, plans)
    for name in entry.unused:
        if not any(name in target.signature.parameters for target in targets):
            fact = f"parameter {name!r} is not used in any message, nor by a method that it hands over to"
            yield Problem(entry.where, fact, "remove it")
    for target in targets:
        if target.where in places:
            fact = f"two methods of its team are named {target.where}, so nobody can tell them apart"
            yield Problem(entry.where, fact, "rename one of the classes")
        places[target.where] = target
        yield from _problems_with_target(entry, target)


def _problems_with_target(entry: MethodPlan, target: MethodPlan) -> Iterator[Problem]:
    where, other = entry.where, target.where
    if _kind_of_return(entry) != _kind_of_return(target):
        fact = f"hands over to {other}, which returns another type: {_returns(target)}, not {_returns(entry)}"
        yield Problem(where, fact, "declare the same return type, and both with `def` or both with `async def`")
    if entry.memory_parameter is not None and target.memory_parameter is None:
        fact = f"has a memory id, but hands over to {other}, which has none"
        yield Problem(where, fact, f"add a MemoryId parameter to {other}")
    for name, parameter in target.signature.parameters.items():
        is_known = _is_filled_by_kind(name, target, entry) or name in entry.signature.parameters
        if is_known or parameter.default is not EMPTY:
            continue
        fact = f"hands over to {other}, whose parameter {name!r} it does not have"
        yield Problem(where, fact, f"add a parameter {name!r}, or give that of {other} a default")


def _is_filled_by_kind(name: str, target: MethodPlan, entry: MethodPlan) -> bool:
    """Return True for a parameter that gets the memory id, the run's id or the user message, whatever its name is."""
    if name == target.memory_parameter:
        return entry.memory_parameter is not None
    if name == target.run_id_parameter:
        return entry.run_id_parameter is not None
    return name == target.spoken_parameter


def _kind_of_return(plan: MethodPlan) -> tuple[Any, ...]:
    output = plan.output
    return output.shape, output.kind, output.type, output.synchronous, plan.is_async


def _returns(plan: MethodPlan) -> str:
    said = plan.signature.return_annotation
    text = said if isinstance(said, str) else type_name(said)
    return f"{'async def' if plan.is_coroutine else 'def'} -> {text}"
