"""The tools that a call offers: those of its method, those put around it, and what its providers give.

Not here: what a method offers by itself (`planning`), running the tools (`rounds`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..chat import UserMessage
from ..context import InvocationContext
from ..errors import IllegalConfigurationError, Problem
from ..execution import BLOCKING, COROUTINE, Runner, is_async
from ..tools.pipeline import Tool
from ..tools.sources import ToolProviderRequest, ToolProviderResult, read_tools
from ..type_keys import type_name
from .host import ServiceHost
from .plans import MethodPlan, Provider, Toolset


async def offered(
    plan: MethodPlan, added: Sequence[Tool], host: ServiceHost, context: InvocationContext, runner: Runner
) -> Toolset:
    """The toolset of this call. Raises `IllegalConfigurationError` for what may not be added to the method's own."""
    toolset = plan.toolset.joined_by(added, plan.where)
    for provider in plan.providers:
        names = tuple(toolset.by_name)
        tools, problems = read_tools(await _provided_by(provider, plan, host, context, runner, names), plan.where)
        problems += tuple(problem for tool in tools for problem in host.tool_problems(plan.where, tool))
        if problems:
            raise IllegalConfigurationError(problems)
        toolset = toolset.joined_by(tools, plan.where)
    if toolset is not plan.toolset and (problems := tuple(plan.offer_problems(toolset))):
        raise IllegalConfigurationError(problems)
    return toolset


async def _provided_by(
    provider: Provider,
    plan: MethodPlan,
    host: ServiceHost,
    context: InvocationContext,
    runner: Runner,
    tool_names: tuple[str, ...],
) -> Sequence[Any]:
    bean = provider.given if provider.bean is None else await host.scope.aget(provider.bean)
    provide = getattr(bean, "provide_tools", bean)
    request = ToolProviderRequest(context.user_message or UserMessage(""), context.memory_id, context, tool_names)
    kind = COROUTINE if is_async(provide) else BLOCKING
    provided = await runner.run(kind, lambda: provide(request), f"{plan.where} tool provider")
    tools = provided.tools if isinstance(provided, ToolProviderResult) else provided
    if tools is None:
        return ()
    if isinstance(tools, Mapping):
        return (tools,)
    if isinstance(tools, (list, tuple)):
        return tools
    fact = f"the tool provider {type_name(type(bean))} gave {tools!r}"
    raise IllegalConfigurationError([Problem(plan.where, fact, "return a ToolProviderResult, or None")])
