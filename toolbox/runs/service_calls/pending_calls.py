"""Finds what the pending calls of a stored run are in this program: methods, tools and services within.

Not here: what an answer to one contains (`answered_calls`), calls that are not pending (`run_invocations`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from ...chat import ToolExecutionRequest
from ...errors import RunIncompatibleError
from ...introspection import class_of
from ...service_names import stored_name, stored_names
from ...services.inner_plans import plan_behind
from ...services.plans import MethodPlan
from ...services.toolsets import Toolset
from ...tools.tool_calls import Tool
from ..documents import RunDocument, WaitingCall
from ..places import invocation_of
from ..runs_host import RunsHost
from .client_tools import read_client_tools
from .stored_calls import find_fault


def find_added(host: RunsHost, document: RunDocument) -> tuple[Tool, ...] | None:
    """Return the tools that the endpoint and the client of a call add to it; None if there is no such endpoint."""
    of_endpoint = host.tools_added_by(document.added_by) if document.added_by else ()
    return None if of_endpoint is None else (*of_endpoint, *read_client_tools(document.client_tools))


def find_plan(host: RunsHost, run_id: str, service: str, method: str) -> MethodPlan:
    """Return the plan of a method. Raises `RunIncompatibleError`."""
    plan = host.plans_of(service).get(method)
    if plan is None:
        raise RunIncompatibleError(run_id, f"this program has no method {method!r} in {service}")
    return plan


def find_tool(host: RunsHost, run_id: str, waiting: WaitingCall, added: Sequence[Tool]) -> Tool | None:
    """Return the tool of a pending call; None for one that a tool provider adds during the call."""
    plan = find_plan(host, run_id, waiting.call.service, waiting.method)
    return find_offered(run_id, plan, waiting.call.id, waiting.call.tool_name, added)


def find_offered(run_id: str, plan: MethodPlan, call: str, name: str, added: Sequence[Tool]) -> Tool | None:
    """Return the tool of a call; None if only a tool provider can have it. Raises `RunIncompatibleError`.

    `plan` is that of the method that made the call. `added` are the tools that only the outermost method has.
    """
    tool = plan.toolset.stored(name)
    if tool is None and not invocation_of(call):
        tool = Toolset.of(added).stored(name)
    if tool is None and not plan.providers:
        raise RunIncompatibleError(run_id, f"{plan.where} no longer offers the tool {name!r}")
    return tool


def service_behind(host: RunsHost, tool: Tool) -> MethodPlan | None:
    """Return the plan of a tool that is a method of a service; None for other tools."""
    if (inner := plan_behind(tool)) is not None or tool.bean is None:
        return inner
    return host.plans_of(stored_name(class_of(tool.bean))).get(tool.member)


def find_in_charge(plan: MethodPlan, waiting: WaitingCall) -> MethodPlan | None:
    """Return the plan of the method that was in charge of a run when it asked for this call; None if out of reach."""
    return _find_reached(plan, *_asked_by(waiting))


def refuse_misfits(host: RunsHost, run_id: str, plan: MethodPlan, document: RunDocument, added: Sequence[Tool]) -> None:
    """Raise `RunIncompatibleError` if a pending call of a run of this method does not fit this program."""
    edited = {each.call_id for each in document.answers if each.answer.arguments is not None}
    for each in document.waiting:
        tool, call = find_tool(host, run_id, each, added), each.call
        # Those that are shown have passed the validators, which may not accept them again.
        _refuse_misfit(run_id, tool, call.id, call.tool_name, each.requested or json.dumps(dict(call.arguments)))
        _refuse_other_outer(host, run_id, each, added, edited)
        if find_in_charge(plan, each) is None:
            lost = ".".join(_asked_by(each))
            raise RunIncompatibleError(run_id, f"{plan.where} no longer hands over to {lost}, which is in charge")


def _refuse_other_outer(
    host: RunsHost, run_id: str, waiting: WaitingCall, added: Sequence[Tool], edited: Collection[str]
) -> None:
    """Raise `RunIncompatibleError` if a service that a call waits in is no longer reached by the same calls."""
    inside = [*((each.service, each.method) for each in waiting.outer), (waiting.call.service, waiting.method)][1:]
    for outer, (service, method) in zip(waiting.outer, inside, strict=True):
        plan = find_plan(host, run_id, outer.service, outer.method)
        tool = find_offered(run_id, plan, outer.id, outer.tool_name, added)
        if tool is None:
            continue
        inner = service_behind(host, tool)
        if inner is None or _find_reached(inner, service, method) is None:  # it may have handed its call over
            reason = f"the tool {outer.tool_name!r} of {plan.where} is no longer {service}.{method}"
            raise RunIncompatibleError(run_id, reason)
        if outer.id not in edited:
            _refuse_misfit(run_id, tool, outer.id, outer.tool_name, outer.arguments)


def _find_reached(plan: MethodPlan, service: str, method: str) -> MethodPlan | None:
    """Return the plan of a method among this one and those that may take its call over; None if it is not there."""
    reached = (plan, *plan.team.values())
    return next((each for each in reached if each.name == method and service in stored_names(each.service)), None)


def _asked_by(waiting: WaitingCall) -> tuple[str, str]:
    """Return the service and the method of the outermost call that a pending call is part of."""
    outermost = waiting.outer[0] if waiting.outer else None
    return (waiting.call.service, waiting.method) if outermost is None else (outermost.service, outermost.method)


def _refuse_misfit(run_id: str, tool: Tool | None, call_id: str, name: str, arguments: str) -> None:
    """Raise `RunIncompatibleError` if a tool no longer accepts the arguments of a call."""
    if tool is not None and (fault := find_fault(tool, ToolExecutionRequest(call_id, name, arguments))) is not None:
        reason = f"the tool {name!r} no longer accepts the arguments of call {call_id} ({fault})"
        raise RunIncompatibleError(run_id, reason)
