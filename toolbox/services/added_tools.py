"""Finds the tools of a call beyond those of its method: of enclosing blocks, of tool providers, and by identity.

Not here: which of them each request offers (`offering`), reading tools (`tools.sources`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..bean_references import BeanReference
from ..chat import Message
from ..errors import IllegalConfigurationError, McpError, OAuthError, Problem, RunIncompatibleError
from ..execution.markers import marked_execution
from ..introspection import type_name
from ..security import UnauthenticatedError, identity_in
from ..tools.function_calls import with_layers
from ..tools.sources import ToolProviderRequest, ToolProviderResult, read_each
from ..tools.tool_calls import Tool
from .invocation import Invocation
from .plans import MethodPlan
from .toolsets import Provider, Toolset


async def find_toolset(invocation: Invocation) -> Toolset:
    """Return the method's tools with those of enclosing blocks and of providers.

    Tools that the identity may not call are left out first, so that nothing names them. If a tool may suspend the call,
    the call becomes a run; also with a dynamic provider, which may add such a tool later.

    Raises `IllegalConfigurationError` for tools that cannot be added.
    """
    plan, host = invocation.plan, invocation.host
    own = plan.toolset
    if own.is_restricted:
        own = plan.visible_to(await identity_in(host.scope))
    toolset = _join(own, await _keep_allowed(invocation.added_tools, invocation), plan)
    for provider in plan.providers:
        found = provider if provider.bean is None else Provider(await host.scope.aget(provider.bean))
        if getattr(found.given, "dynamic", False) is True:
            invocation.dynamic_providers = (*invocation.dynamic_providers, found)
        else:
            names = await _names_in_use(toolset, invocation)
            toolset = _join(toolset, await _tools_of(found, names, (), invocation), plan)
    if toolset is not own:
        _refuse_problems(plan.offer_problems(toolset))
    may_suspend = invocation.dynamic_providers or any(host.tool_may_suspend(tool) for tool in toolset.tools)
    if invocation.place is None and may_suspend:
        invocation.become_run()
        layers = invocation.plan.layers.tools
        toolset = Toolset.of([with_layers(tool, layers) for tool in toolset.tools])
    return toolset


async def find_dynamic_tools(invocation: Invocation, messages: Sequence[Message]) -> Toolset:
    """Ask the dynamic providers. Return the invocation's tools with those that have new names.

    Raises `IllegalConfigurationError` for tools that cannot be added.
    """
    toolset, plan = invocation.toolset, invocation.plan
    for provider in invocation.dynamic_providers:
        tools = await _tools_of(provider, await _names_in_use(toolset, invocation), tuple(messages), invocation)
        toolset = _join(toolset, [tool for tool in tools if tool.name not in toolset.by_name], plan)
    if toolset is not invocation.toolset:
        _refuse_problems(plan.offer_problems(toolset))
    return toolset


def _join(toolset: Toolset, tools: Sequence[Tool], plan: MethodPlan) -> Toolset:
    """Return the toolset with these tools in the method's layers. Raises `IllegalConfigurationError`."""
    return toolset.joined_by([with_layers(tool, plan.layers.tools) for tool in tools], plan.where)


async def _keep_allowed(tools: Sequence[Tool], invocation: Invocation) -> tuple[Tool, ...]:
    """Return the tools that the current identity may call."""
    if all(each.access is None for each in tools):
        return tuple(tools)
    identity = await identity_in(invocation.host.scope)
    return tuple(each for each in tools if each.access is None or each.access.allows(identity))


async def _names_in_use(toolset: Toolset, invocation: Invocation) -> tuple[str, ...]:
    """Return the names that a provider's tools cannot have: those of the tools, and of the search tool."""
    search = invocation.plan.options.tool_search
    if search is None:
        return tuple(toolset.by_name)
    strategy = await BeanReference.to(search).find(invocation.host.scope)
    return (*toolset.by_name, strategy.specification.name)


async def _tools_of(
    provider: Provider, names: tuple[str, ...], messages: tuple[Message, ...], invocation: Invocation
) -> Sequence[Tool]:
    """Return the tools of a provider that was found. Raises `IllegalConfigurationError` for invalid ones."""
    where, host = invocation.plan.where, invocation.host
    provided = await _ask_provider(provider.given, names, messages, invocation)
    tools, problems = read_each(provided, where, host.class_behind)
    tools = await _keep_allowed(tools, invocation)
    _refuse_problems([*problems, *(problem for tool in tools for problem in host.tool_problems(where, tool))])
    return tools


def _refuse_problems(problems: Iterable[Problem]) -> None:
    if found := tuple(problems):
        raise IllegalConfigurationError(found)


async def _ask_provider(
    bean: Any, names: tuple[str, ...], messages: tuple[Message, ...], invocation: Invocation
) -> Sequence[Any]:
    """Return what a provider gives: its tools, not read yet."""
    context, place = invocation.context, invocation.place
    provide = getattr(bean, "provide_tools", bean)
    request = ToolProviderRequest(invocation.user_message, context.memory_id, context, names, messages)
    where = f"{invocation.plan.where} tool provider"
    try:
        provided = await invocation.runner.run(marked_execution(provide), lambda: provide(request), where)
    except (McpError, OAuthError, UnauthenticatedError) as error:
        if not invocation.is_resumed or place is None:
            raise
        if place.run.cancels:  # its tools are undone, and none of the server's is called
            return ()
        if not isinstance(error, McpError):
            raise
        # A server that is away for a minute must not end a run that waited for a day.
        raise RunIncompatibleError(place.run_id, str(error)) from error
    tools = provided
    if isinstance(provided, ToolProviderResult):
        tools = provided.tools
        invocation.unreachable = (*invocation.unreachable, *provided.unreachable)
    if tools is None:
        return ()
    if isinstance(tools, Mapping):
        return (tools,)
    if isinstance(tools, (list, tuple)):
        return tools
    fact = f"the tool provider {type_name(type(bean))} returned {tools!r}"
    raise IllegalConfigurationError([Problem(invocation.plan.where, fact, "return a ToolProviderResult, or None")])
