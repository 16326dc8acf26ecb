"""`PreparedRuns`: checks that a stored run fits this program, and restores the call that it continues.

Not here: executing it (`run_execution`), checking answers (`answer_checks`).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from inspect import isawaitable
from typing import Any, Protocol

from ..chat import ToolExecutionRequest
from ..context import current_invocation, restored_attributes
from ..di.scopes import RequestScope
from ..errors import RunIncompatibleError, ScopeNotActiveError
from ..introspection import class_of
from ..security import ForbiddenError, SecurityIdentity, identity_from
from ..service_names import stored_name, stored_names
from ..services.inner_plans import plan_behind, services_below
from ..services.plans import MethodPlan
from ..services.tools_of_blocks import tools_added
from ..services.toolsets import Toolset
from ..tools.tool_calls import Tool
from .documents import WaitingCall
from .persons import is_same_person, read_identity, with_token_of
from .places import invocation_of
from .program_values import output_fingerprint, read_arguments, read_seeds
from .runs_host import RunsHost
from .service_calls.client_tools import read_client_tools
from .service_calls.run_invocations import PreparedRun
from .service_calls.stored_calls import find_fault
from .store import StoredRun
from .stored_runs import read_document


class IdentityLoader(Protocol):
    """Refreshes the identity of a run that continues. Register a bean of this type.

        class Directory(IdentityLoader):
            async def load(self, identity: SecurityIdentity) -> SecurityIdentity | None: ...

    `load` may be `def` or `async def`. None refuses to continue, and the run stays as it is.
    """

    def load(self, identity: Any) -> Any:
        """Return the current identity of this person; None if it may no longer act."""
        ...


class PreparedRuns:
    """Prepares stored runs of a host, and finds the parts of this program that they need."""

    def __init__(self, host: RunsHost) -> None:
        self._host = host

    def prepare(self, stored: StoredRun) -> PreparedRun:
        """Return what is needed to continue a run. Raises `RunIncompatibleError`."""
        document, run_id = read_document(stored), stored.id
        plans = self._host.plans_of(stored.service)
        if not plans:
            raise RunIncompatibleError(run_id, f"this program has no service {stored.service}")
        plan = plans.get(stored.method)
        if plan is None:
            raise RunIncompatibleError(run_id, f"the service {stored.service} has no method {stored.method!r}")
        if document.output != output_fingerprint(plan):
            raise RunIncompatibleError(run_id, f"the return type of {plan.where} has changed")
        arguments = read_arguments(run_id, plan, document)
        for name in document.unwritten:
            if name == plan.call_options:
                raise RunIncompatibleError(run_id, f"the argument {name!r} of {plan.where} was not stored")
        seeds = read_seeds(run_id, self._host.run_seeds, document)
        added: Sequence[Tool] | None = self._host.tools_added_by(document.added_by) if document.added_by else ()
        if added is None:
            raise RunIncompatibleError(run_id, f"this program has no endpoint {document.added_by}, which adds tools")
        added = (*added, *read_client_tools(document.client_tools))
        edited = {each.call_id for each in document.answers if each.answer.arguments is not None}
        for each in document.waiting:
            tool, call = self.find_tool(run_id, each, added), each.call
            # Those that are shown have passed the validators, which may not accept them again.
            _refuse_misfit(run_id, tool, call.id, call.tool_name, each.requested or json.dumps(dict(call.arguments)))
            self._refuse_other_outer(run_id, each, added, edited)
            if _find_in_charge(plan, each) is None:
                lost = ".".join(_asked_by(each))
                raise RunIncompatibleError(run_id, f"{plan.where} no longer hands over to {lost}, which is in charge")
        return PreparedRun(plan, arguments, seeds, document, added)

    def _refuse_other_outer(
        self, run_id: str, waiting: WaitingCall, added: Sequence[Tool], edited: Collection[str]
    ) -> None:
        """Raise `RunIncompatibleError` if a service that a call waits in is no longer reached by the same calls."""
        inside = [*((each.service, each.method) for each in waiting.outer), (waiting.call.service, waiting.method)][1:]
        for outer, (service, method) in zip(waiting.outer, inside, strict=True):
            plan = self.find_plan(run_id, outer.service, outer.method)
            tool = self.find_offered(run_id, plan, outer.id, outer.tool_name, added)
            if tool is None:
                continue
            inner = self.service_behind(tool)
            if inner is None or _find_reached(inner, service, method) is None:  # it may have handed its call over
                reason = f"the tool {outer.tool_name!r} of {plan.where} is no longer {service}.{method}"
                raise RunIncompatibleError(run_id, reason)
            if outer.id not in edited:
                _refuse_misfit(run_id, tool, outer.id, outer.tool_name, outer.arguments)

    def find_tool(self, run_id: str, waiting: WaitingCall, added: Sequence[Tool]) -> Tool | None:
        """Return the tool of a pending call; None for one that a tool provider adds during the call."""
        call = waiting.call
        plan = self.find_plan(run_id, call.service, waiting.method)
        return self.find_offered(run_id, plan, call.id, call.tool_name, added)

    def find_plan(self, run_id: str, service: str, method: str) -> MethodPlan:
        """Return the plan of a method. Raises `RunIncompatibleError`."""
        plan = self._host.plans_of(service).get(method)
        if plan is None:
            raise RunIncompatibleError(run_id, f"this program has no method {method!r} in {service}")
        return plan

    def find_offered(self, run_id: str, plan: MethodPlan, call: str, name: str, added: Sequence[Tool]) -> Tool | None:
        """Return the tool of a call; None if only a tool provider can have it. Raises `RunIncompatibleError`.

        `plan` is that of the method that made the call. `added` are the tools of the endpoint, which only the outermost
        method has.
        """
        tool = plan.toolset.stored(name)
        if tool is None and not invocation_of(call):
            tool = Toolset.of(added).stored(name)
        if tool is None and not plan.providers:
            raise RunIncompatibleError(run_id, f"{plan.where} no longer offers the tool {name!r}")
        return tool

    def service_behind(self, tool: Tool) -> MethodPlan | None:
        """Return the plan of a tool that is a method of a service; None for other tools."""
        if (inner := plan_behind(tool)) is not None or tool.bean is None:
            return inner
        return self._host.plans_of(stored_name(class_of(tool.bean))).get(tool.member)

    def undoes_tools(self) -> bool:
        """Return True if a service of this program undoes tools when a call fails."""
        own = [plan for methods in self._host.plans.values() for plan in methods.values()]
        everything = [*own, *(inner for plan in own for inner in services_below(plan))]
        return any(each.options.compensate_on_failure for each in everything)

    async def admit(self, run_id: str, prepared: PreparedRun, person: Any = None) -> PreparedRun:
        """Return a run with the identity under which it continues. Raises `ForbiddenError` if the loader refuses it.

        `person` is who makes it continue: if the run is theirs, it has their token. A cancelled run is undone under the
        stored identity, whatever its person may still do.
        """
        identity = stored = read_identity(prepared.document.identity)
        if not identity.is_anonymous and not prepared.document.cancels:
            identity = await self._load_identity(run_id, identity)
        if is_same_person(person, stored, self._host.run_identity):
            identity = with_token_of(person, identity)
        return replace(prepared, identity=identity, is_without_user=person is None and not stored.is_anonymous)

    async def admit_to_method(self, run_id: str, prepared: PreparedRun, person: Any = None) -> PreparedRun:
        """Do the same. Raises `ForbiddenError` also if the identity may no longer call it, or the method in charge."""
        prepared = await self.admit(run_id, prepared, person)
        in_charge = (_find_in_charge(prepared.plan, each) for each in prepared.document.waiting)
        for plan in (prepared.plan, *in_charge):
            access = None if plan is None else plan.access
            if plan is not None and access is not None and not access.allows(prepared.identity):
                raise access.refusal(prepared.identity, plan.where)
        return prepared

    async def _load_identity(self, run_id: str, identity: Any) -> Any:
        try:
            loader: Any = await self._host.application_bean(IdentityLoader)
        except ScopeNotActiveError:
            return identity
        if loader is None:
            return identity
        loaded = loader.load(identity)
        if isawaitable(loaded):
            loaded = await loaded
        if loaded is None:
            reason = f"{type(loader).__name__} no longer knows this identity"
            raise ForbiddenError(f"run {run_id}", identity.name, (), reason)
        return identity_from(loaded, f"{type(loader).__name__}.load")

    @asynccontextmanager
    async def open_scope(self, prepared: PreparedRun) -> AsyncIterator[RequestScope | None]:
        """Open the request scope of a run, with its seeds, its identity and its attributes, outside of other calls.

        Yields the scope; None without a container. The identity is a seed also if it is anonymous: a producer, or the
        one of a web request, must not replace it.
        """
        seeds = {**prepared.seeds, SecurityIdentity: prepared.identity}
        token = current_invocation.set(None)
        try:
            added = tools_added(prepared.added, prepared.document.added_by)
            with added, restored_attributes(prepared.document.attributes):
                async with self._host.open_request(seeds) as scope:
                    yield scope
        finally:
            current_invocation.reset(token)


def _find_in_charge(plan: MethodPlan, waiting: WaitingCall) -> MethodPlan | None:
    """Return the plan of the method that was in charge of a run when it asked for this call; None if out of reach."""
    return _find_reached(plan, *_asked_by(waiting))


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
