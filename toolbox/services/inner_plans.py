"""What a plan knows only with the plans of the services that are its tools: whether its calls may be suspended.

Not here: the checks at start that depend on it (`runs.service_calls.call_checks`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..introspection import class_of
from ..tools.tool_calls import Tool
from .plans import MethodPlan
from .teams import targets_of

PROVIDER_MAY_SUSPEND = "__toolbox_may_suspend__"
"""At classes of tool providers: a function of the `BeanGraph` that tells if they may offer tools that suspend calls."""
PLAN_MARK = "__toolbox_plan__"
"""At the methods of a service as tools: their plan."""


def may_suspend(tool: Tool, plans: Mapping[Any, Mapping[str, MethodPlan]]) -> bool:
    """Return True if a call of this tool may be suspended, or needs its run's id. `plans` are those of services."""
    if tool.requires_approval or tool.deferred or tool.key_names or tool.run_id_names:
        return True
    inner = inner_plan(tool, plans)
    return inner is not None and inner.may_suspend


def leads_to_provider(tool: Tool, plans: Mapping[Any, Mapping[str, MethodPlan]]) -> bool:
    """Return True if this tool is a service with a tool provider, also indirectly: its tools may suspend the call."""
    inner = inner_plan(tool, plans)
    return inner is not None and (bool(inner.providers) or inner.has_inner_provider)


def is_run(plan: MethodPlan, graph: Any) -> bool:
    """Return True if it is known at start that calls of a method are runs: durable ones, and those that may wait.

    `graph` are the beans, in which tool providers find out if they may offer tools that suspend.
    """
    providers = [each for plan in (plan, *plan.team.values()) for each in plan.providers]
    asked = (getattr(each.bean, PROVIDER_MAY_SUSPEND, None) for each in providers)
    return plan.durable or plan.may_suspend or any(each is not None and each(graph) for each in asked)


def call_may_suspend(tool: Tool, plans: Mapping[Any, Mapping[str, MethodPlan]]) -> bool:
    """Return True if a call of this tool may be suspended, also by a tool that a provider offers."""
    return may_suspend(tool, plans) or leads_to_provider(tool, plans)


def inner_plan(tool: Tool, plans: Mapping[Any, Mapping[str, MethodPlan]]) -> MethodPlan | None:
    """Return the plan of a service that is the tool."""
    if not tool.is_service:
        return None
    return plan_behind(tool) if tool.function is not None else plans.get(class_of(tool.bean), {}).get(tool.member)


def plan_behind(tool: Tool) -> MethodPlan | None:
    """Return the plan of a tool that is a method of a service made without a container."""
    plan: MethodPlan | None = getattr(tool.function, PLAN_MARK, None)
    return plan


def services_below(plan: MethodPlan) -> Iterator[MethodPlan]:
    """Yield the plans of the services that a method has as tools, also indirectly."""
    for tool in plan.toolset.tools:
        if (inner := plan_behind(tool)) is not None:
            yield inner
            yield from services_below(inner)


def settled(plans: Mapping[type[Any], Mapping[str, MethodPlan]]) -> dict[type[Any], dict[str, MethodPlan]]:
    """Return the plans of each service, by class, with what depends on the plans of the others."""
    known = {cls: dict(methods) for cls, methods in plans.items()}
    changed = True
    while changed:
        changed = False
        for methods in known.values():
            for name, plan in methods.items():
                team = [plan, *targets_of(plan, known)] if plan.targets else [plan]
                tools = [tool for each in team for tool in each.toolset.tools]
                waits = any(may_suspend(tool, known) for tool in tools)
                leads = any(leads_to_provider(tool, known) for tool in tools)
                if (waits, leads) != (plan.may_suspend, plan.has_inner_provider):
                    methods[name] = replace(plan, may_suspend=waits, has_inner_provider=leads)
                    changed = True
    for methods in known.values():
        # A provider may add tools that suspend.
        checks = any(
            plan.may_suspend
            or plan.durable
            or plan.has_inner_provider
            or any(each.providers for each in [plan, *targets_of(plan, known)])
            for plan in methods.values()
        )
        for name, plan in methods.items():
            if plan.checks_suspended != checks:
                methods[name] = replace(plan, checks_suspended=checks)
    return known
