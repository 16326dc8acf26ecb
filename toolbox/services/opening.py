"""The first steps of a call: its model, its tools, its messages, and the first effect of the loop, or the next one.

Not here: tools that are added to those of the method (`added_tools`), performing the effects (`driver`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..bean_references import BeanReference
from ..chat import ChatModel, ChatRequest, ChatRequestParameters, Message, UserMessage
from ..errors import IllegalConfigurationError, Problem, RunIncompatibleError
from ..execution.markers import marked_execution
from ..models.routing import names_of_router
from ..passages import NumberedPassages
from ..tools.tool_calls import ToolEnvironment
from . import loop
from .added_tools import find_dynamic_tools, find_toolset
from .answers import restored_result
from .compaction import summarize_first
from .invocation import Invocation
from .loop import Effect, Rules, next_effect, request_of
from .outputs import OutputMode
from .recording_needs import MODEL_CHOICE
from .state import State
from .teams import callers_in
from .toolsets import Toolset


def _read_call_options(invocation: Invocation, parameter: str) -> ChatRequestParameters | None:
    """Return the options of this call. Raises `TypeError` for a value of another type."""
    given = invocation.arguments_in_charge[parameter]
    if given is not None and not isinstance(given, ChatRequestParameters):
        where = f"{invocation.where}(): {parameter}"
        raise TypeError(f"{where} must be a ChatRequestParameters or None, got {type(given).__name__}")
    return given


# --- the model


async def find_model(invocation: Invocation) -> None:
    """Find the model that was recorded, that the call chose, or of the method. A router chooses later, by the request.

    A run keeps the model with which it began, also if the call chose it; a method that takes the call over has its own.
    """
    plan, stored = invocation.plan, invocation.stored_state
    recorded = stored.model if stored is not None and not invocation.has_begun else None
    if plan.call_options is not None:
        invocation.call_options = _read_call_options(invocation, plan.call_options)
    options = invocation.call_options
    chosen = options.model if options is not None else None
    if recorded is not None and recorded != plan.model_name:
        invocation.model_name, invocation.model = recorded, await _find_recorded(recorded, invocation)
    elif chosen is not None and recorded is None:
        model = await invocation.host.models.choose(chosen, invocation.where, invocation.context)
        invocation.model_name, invocation.model = chosen, model
    elif plan.model_name is not None:
        invocation.model_name = plan.model_name
        invocation.model = await invocation.host.models.find(plan.model_name, invocation.context)


async def _find_recorded(name: str, invocation: Invocation) -> ChatModel:
    """Return the model of a stored invocation. Raises `RunIncompatibleError` if this program has lost it."""
    try:
        return await invocation.host.models.choose(name, invocation.where, invocation.context)
    except IllegalConfigurationError as error:
        if invocation.place is None:
            raise
        raise RunIncompatibleError(invocation.place.run_id, error.problems[0].what) from error


async def _route(invocation: Invocation, request: ChatRequest, number: int = 1) -> None:
    """Take the model that the router chooses, or has chosen before this process continued the run.

    `number` counts the choices of a call: there is one more after each hand-over.
    """

    async def choose() -> str:
        name = await _ask_router(invocation, request)
        invocation.model_name, invocation.model = name, await invocation.host.models.find(name, invocation.context)
        return name

    place = invocation.place
    name = await (choose() if place is None else place.effect(MODEL_CHOICE, choose, number))
    if not invocation.model_name:
        invocation.model_name, invocation.model = name, await _find_recorded(name, invocation)


async def _ask_router(invocation: Invocation, request: ChatRequest) -> str:
    """Return the name of the model that the router chooses. Raises `IllegalConfigurationError` for one it lacks."""
    bean = await BeanReference.to(invocation.plan.options.model).find(invocation.host.scope)
    choose = bean.choose
    execution = marked_execution(choose)
    place = f"{type(bean).__name__}.choose"
    name = await invocation.runner.run(execution, lambda: choose(request, invocation.context), place)
    if name not in names_of_router(bean):
        known = ", ".join(names_of_router(bean))
        fact = f"it chose the model {name!r}, which is not one of its names: {known}"
        raise IllegalConfigurationError([Problem(place, fact, "add it to `names`, or choose one of them")])
    return str(name)


# --- the tools


async def find_tools(invocation: Invocation) -> None:
    """Find the tools, the rules of the loop for them, and what they need to run."""
    host, toolset, team = invocation.host, invocation.plan.toolset, invocation.entry.team
    if invocation.added or invocation.plan.providers or toolset.is_restricted:
        toolset = await find_toolset(invocation)
    plan = invocation.plan  # another one, if the tools may suspend the call
    invocation.toolset, invocation.rules = toolset, _rules_for(toolset, invocation)
    invocation.environment = ToolEnvironment(
        tools=toolset.by_name,
        context=invocation.context,
        scope=host.scope,
        runner=invocation.runner,
        failures=plan.failures.over(host.failures),
        max_result_chars=plan.call_limits.max_result_chars,
        on_unknown_outcome=plan.options.on_unknown_outcome,
        listeners=host.listeners,
        attempts={},
        abandon_runs=host.abandon_runs,
        model=host.models.find,
        passages=_number_passages(invocation) if plan.retrievers or toolset.has_retrievers else None,
        elsewhere=invocation.entry.tools_of_team,
        callers=(lambda: _callers_in(invocation)) if team else None,
    )


def _callers_in(invocation: Invocation) -> dict[str, str]:
    state, entry = invocation.state, invocation.entry.where
    added = {each.name: entry for each in invocation.added if each.access is None}
    return added | callers_in((*state.history, *state.messages), entry)


def _rules_for(toolset: Toolset, invocation: Invocation) -> Rules:
    plan, options = invocation.plan, invocation.call_options
    rules = plan.rules if toolset is plan.toolset else plan.rules_of(toolset)
    rules = rules if options is None else plan.rules_of_call(rules, options)
    if invocation.place is not None and invocation.place.takes_messages:
        rules = replace(rules, listens=True)
    return replace(rules, passages=invocation.passages) if invocation.passages else rules


def _number_passages(invocation: Invocation) -> NumberedPassages:
    """Return the passages that an earlier part of the run has found; none of a call that begins."""
    if (stored := invocation.stored_state) is None:
        return NumberedPassages((), invocation.conversation)
    return NumberedPassages(stored.passages, stored.history)


async def add_dynamic_tools(invocation: Invocation, messages: Sequence[Message]) -> bool:
    """Ask the dynamic providers, and add tools with new names. Returns True if there are any."""
    toolset = await find_dynamic_tools(invocation, messages)
    if toolset is invocation.toolset:
        return False
    invocation.toolset, invocation.rules = toolset, _rules_for(toolset, invocation)
    invocation.environment.tools = toolset.by_name
    if toolset.has_retrievers and invocation.environment.passages is None:
        invocation.environment.passages = _number_passages(invocation)
    invocation.state = invocation.state.changed(offered=invocation.rules.names)
    return True


# --- the state


async def begin(invocation: Invocation) -> Effect:
    """Begin with the messages of the arguments. Without a model by now, the router chooses it by the first request."""
    plan = invocation.plan
    host, context = invocation.host, invocation.context
    system = None
    if plan.messages.system is not None:
        arguments = invocation.arguments_in_charge
        system = await plan.messages.make_system_message(arguments, context, host.scope, invocation.runner)
    if invocation.excerpt is not None and invocation.excerpt.unsummarized is not None:
        await summarize_first(invocation)
    history = invocation.conversation if plan.messages.history else invocation.history
    recalled = len(invocation.history)
    asked: UserMessage | None = invocation.user_message
    if plan.messages.continues_history:
        asked = None
        if invocation.ends_with_user_message:
            history = (*history, invocation.user_message)

    mode, rules = plan.output_mode, invocation.rules
    if not invocation.model_name:
        _, first = loop.begin(rules, system, history, asked, mode=mode or "schema", recalled=recalled)
        await _route(invocation, first.request)
    mode = mode or _mode_of(invocation)
    name = invocation.model_name
    state, effect = loop.begin(rules, system, history, asked, mode=mode, model=name, recalled=recalled)
    if plan is not invocation.entry:
        state = state.changed(in_charge=plan.where)
    summarized = invocation.summary_usage
    invocation.state = state if summarized is None else state.with_summary_usage(summarized)
    invocation.has_begun = True
    return loop.listening(effect) if rules.listens else effect


def _mode_of(invocation: Invocation) -> OutputMode:
    """Return how a structured answer is requested, if the model decides it by what it supports."""
    return "schema" if getattr(invocation.model, "supports_response_format", False) else "prompt"


async def open_charge(invocation: Invocation) -> loop.Charge:
    """Find the model, the tools and the system message of a method that takes the call over, and return its charge."""
    plan, before = invocation.plan, invocation.environment
    invocation.model_name, invocation.call_options = "", None
    await find_model(invocation)
    if invocation.call_options is not None:  # a choice of a tool is for the first request of a call
        invocation.call_options = replace(invocation.call_options, tool_choice=None)
    invocation.dynamic_providers, invocation.passages = (), ""
    await find_tools(invocation)
    found = invocation.environment
    found.attempts, found.on_progress = before.attempts, before.on_progress
    if before.passages is not None:
        found.passages = before.passages
    arguments = invocation.arguments_in_charge
    system = await plan.messages.make_system_message(
        arguments, invocation.context, invocation.host.scope, invocation.runner
    )
    if not invocation.model_name:
        rules, state = invocation.rules, invocation.state.changed(system=system, offered=invocation.rules.names)
        await _route(invocation, request_of(rules, state.changed(pending=())), 2 + state.handovers)
    mode = plan.output_mode or _mode_of(invocation)
    later = None if invocation.account is None or plan.team_limits is None else invocation.account.later
    used = None if later is None else later.counted_from
    return loop.Charge(plan.where, system, mode, invocation.model_name, invocation.user_message, used)


async def open_invocation(invocation: Invocation) -> None:
    """Find what a stored call has, such as its tools, for code that does not run it."""
    await find_model(invocation)
    await find_tools(invocation)
    stored = invocation.stored_state
    await (begin(invocation) if stored is None else resume(invocation, stored))


async def resume(invocation: Invocation, stored: State) -> Effect:
    """Continue from a stored state. Raises the failure of the invocation that was recorded, if there is one."""
    toolset = invocation.toolset
    found = (toolset.stored(name) for name in stored.offered)
    # Those of the stored request come first, and then what only this version of the program has.
    names = [*(tool.name for tool in found if tool is not None), *invocation.rules.names]

    def restore(name: str, written: Any) -> Any:
        """Return the stored result of a tool in the tool's return type, if this program still has the tool."""
        tool = invocation.find_tool(name)
        return written if tool is None else restored_result(tool.returns, written)

    invocation.state = stored.with_results(restore).changed(offered=tuple(dict.fromkeys(names)))
    invocation.has_begun = True
    invocation.environment.sent = invocation.state.sent
    if invocation.dynamic_providers:  # the state may use their tools
        await add_dynamic_tools(invocation, [*invocation.state.history, *invocation.state.messages])
    if invocation.stored is not None and invocation.stored.failure is not None:
        raise invocation.stored.failure.make_error()
    if not invocation.model_name:  # the state is of a version without a router
        await _route(invocation, request_of(invocation.rules, invocation.state))
    return next_effect(invocation.rules, invocation.state)
