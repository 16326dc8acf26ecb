"""`NewServiceCalls`: makes the run of a new call of a service method, after the checks that come before it is stored.

Not here: creating the run once (`new_runs`), what its document has of the call (`call_documents`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from ...chat import ToolSpecification, UserMessage
from ...context import InvocationContext, current_attributes
from ...errors import IllegalConfigurationError, Problem, RunSuspendedError
from ...events import ServiceFailedEvent, ServiceStartedEvent
from ...limits import current_account, refuse_if_used_up, remaining
from ...request_hooks import RELEASES_CONNECTION
from ...services.invocation import Invocation
from ...services.layers import check_conversation_first
from ...services.model_calls import call_hooks
from ...services.outputs import Shape
from ...services.plans import MethodPlan
from ...services.tools_of_blocks import place_of_added_tools
from ..new_documents import new_header
from ..new_runs import NewRuns
from ..persons import current_identity
from ..run_body import PreparedRun
from ..run_execution import NewRun
from ..runs_host import RunsHost
from ..store import StoredRun
from ..stored_runs import StoredRuns, is_storable
from .call_documents import describe_call, refuse_other_type, with_message
from .client_tools import write_client_tool
from .service_body import ServiceBody, check_input


@dataclass(frozen=True, slots=True)
class ClientMessage:
    """What the client of a front end has sent: `message` is None if it is that of the arguments.

    The client runs `client_tools`, and gave `client_id` to the message.
    """

    message: UserMessage | None = None
    client_tools: Sequence[ToolSpecification] = ()
    client_id: str | None = None


class NewServiceCalls:
    """Makes the runs of the service methods of a host, and hands them to `NewRuns`."""

    def __init__(self, host: RunsHost, runs: StoredRuns, new: NewRuns) -> None:
        self._host, self._runs, self._new = host, runs, new

    async def start_run(
        self, plan: MethodPlan, arguments: Mapping[str, Any], said: ClientMessage | None = None
    ) -> StoredRun:
        """Create a run of a service method and hand it to the engine; return it, or the run of the same call.

        `said` is what a front end has sent, for a call of its user.
        """
        await self._refuse_without_role(plan, arguments)
        message, client_tools = (None, ()) if said is None else (said.message, said.client_tools)
        new = await self._make_run(plan, arguments, follows=True, client_tools=client_tools)
        if message is not None:
            new = new.with_document(with_message(new.prepared.document, plan, arguments, message))
        if said is not None:
            new = new.with_document(new.prepared.document.changed(client_id=said.client_id, front_end=True))
        account = current_account.get()
        if not await self._exists(plan, new):
            await self._check_conversation(plan, arguments)
            if account is not None:
                refuse_if_used_up(account)
            new = await self._with_checked_input(plan, new, arguments, message)
        return await self._new.start_run(new)

    async def call_durably(self, plan: MethodPlan, arguments: Mapping[str, Any]) -> Any:
        """Create the run of a durable method and execute it here, or wait for the run of the same call.

        Returns the value of the method. Raises its errors.
        """
        await self._refuse_without_role(plan, arguments)
        new, result = await self._make_run(plan, arguments, follows=False), None
        await self._release_connections(plan, arguments)
        if not await self._exists(plan, new):
            await self._check_conversation(plan, arguments)
            new = await self._with_checked_input(plan, new, arguments)
            result = await self._new.execute_here(new)
        if result is None:
            result = await self._new.wait_for(new)
        if result.pending and plan.output.shape is not Shape.RESULT:
            raise RunSuspendedError(new.stored.id, result.pending)
        return new.prepared.body.value_of(result)

    async def _exists(self, plan: MethodPlan, new: NewRun) -> bool:
        """Return True if there is a run with the id that the caller gave."""
        return plan.run_id_parameter is not None and await self._runs.find(new.stored.id) is not None

    async def _release_connections(self, plan: MethodPlan, arguments: Mapping[str, Any]) -> None:
        """Let the caller's database sessions give their connections back: the call takes one to look for its run.

        Where all connections of a pool are held by requests whose runs wait for one, nobody would go on.
        """
        await call_hooks(Invocation(plan, self._host, arguments), RELEASES_CONNECTION)

    async def _check_conversation(self, plan: MethodPlan, arguments: Mapping[str, Any]) -> None:
        """Raise `AccessDeniedError` or `ConversationBusyError` if the run would have to."""
        if (key := plan.find_conversation(plan.find_memory_id(arguments))) is not None:
            await check_conversation_first(self._host, plan, key)

    async def _with_checked_input(
        self, plan: MethodPlan, new: NewRun, arguments: Mapping[str, Any], message: UserMessage | None = None
    ) -> NewRun:
        """Return the run with the message that the input guardrails let through. Raises `InputGuardrailError`."""
        document = new.prepared.document
        if not plan.checks_input:
            return new
        checked, in_charge = await check_input(self._host, plan, arguments, message)
        # A guardrail may have asked a model, which counts for the limits around this call.
        by = in_charge if plan.team else None
        document = document.changed(is_checked=True, checked_by=by, limits=remaining(current_account.get()))
        if checked is not None:
            document = with_message(document, plan, arguments, checked)
        return new.with_document(document)

    async def _make_run(
        self,
        plan: MethodPlan,
        arguments: Mapping[str, Any],
        *,
        follows: bool,
        client_tools: Sequence[ToolSpecification] = (),
    ) -> NewRun:
        """Return a new run, with a new id unless the method has a `RunId` parameter.

        Raises `TypeError` for an argument of another type than the method declares, and `IllegalConfigurationError`
        for arguments, seeds and attributes that cannot be stored.
        """
        given = None if plan.run_id_parameter is None else arguments[plan.run_id_parameter]
        if given is not None and not is_storable(given):
            raise ValueError(f"{plan.where}: the run id must be a string of 1 to 200 characters")
        attributes, added_by = current_attributes.get(), place_of_added_tools()
        left = remaining(current_account.get())
        described, read_again = await describe_call(plan, self._host, arguments, attributes, added_by, left)
        document = described.document
        if document.unwritten:
            name = document.unwritten[0]
            refuse_other_type(plan, name, arguments[name])
            fact = f"the argument {name!r} cannot be stored with the run"
            fix = "use a value of the declared type, which pydantic can write and read"
            raise IllegalConfigurationError([Problem(plan.where, fact, fix)])
        written = tuple(map(write_client_tool, client_tools))
        asked = document.arguments
        document = document.changed(follows=follows, attempts=0 if follows else 1, client_tools=written)
        conversation, now = plan.find_conversation(plan.find_memory_id(arguments)), await self._runs.now()
        stored = new_header(given or uuid4().hex, plan.service, plan.name, conversation, document, now)
        body = ServiceBody(self._host, self._runs, plan)
        # The identity is not loaded: the caller is there now.
        return NewRun(stored, PreparedRun(body, read_again, described.seeds, document, described.identity), asked)

    async def _refuse_without_role(self, plan: MethodPlan, arguments: Mapping[str, Any]) -> None:
        """Raise `UnauthenticatedError` or `ForbiddenError` for callers who may not call the method.

        Before the id of a run is looked up: who knows the id of another's run must not read its answer.
        """
        if plan.access is None:
            return
        identity = await current_identity(self._host.scope)
        if plan.access.allows(identity):
            return
        error = plan.access.refusal(identity, plan.where)
        if self._host.listeners is not None:
            memory_id = plan.find_memory_id(arguments)
            attributes, user = current_attributes.get(), identity.name or None
            context = InvocationContext(plan.service, plan.name, memory_id, attributes=attributes, user=user)
            self._host.listeners.tell(ServiceStartedEvent(context))
            self._host.listeners.tell(ServiceFailedEvent(context, error, 0.0))
        raise error
