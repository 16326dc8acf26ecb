"""`NewRuns`: makes the header of a new run, creates the run once, and refuses a different call with its id.

Not here: executing it (`run_execution`), the values in the header (`new_documents`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from ..chat import ToolSpecification, UserMessage
from ..context import InvocationContext, current_attributes
from ..errors import IllegalConfigurationError, Problem, RunConflictError, RunSuspendedError
from ..events import ServiceFailedEvent, ServiceStartedEvent
from ..limits import current_account, refuse_if_used_up, remaining
from ..service_names import stored_names
from ..services.layers import check_conversation_first
from ..services.outputs import Shape
from ..services.plans import MethodPlan
from ..services.tools_of_blocks import place_of_added_tools
from .documents import are_arguments_of, make_comparable
from .new_documents import describe_run, new_header, with_message
from .persons import current_identity
from .program_values import refuse_other_type
from .run_execution import NewRun, RunExecution, wait_unless_lost
from .runs_host import RunsHost
from .service_calls.client_tools import read_client_tools, write_client_tool
from .service_calls.run_invocations import PreparedRun, check_input
from .store import StoredRun
from .stored_runs import StoredRuns, is_storable, read_document


@dataclass(frozen=True, slots=True)
class ClientMessage:
    """What the client of a front end has sent: `message` is None if it is that of the arguments.

    The client runs `client_tools`, and gave `client_id` to the message.
    """

    message: UserMessage | None = None
    client_tools: Sequence[ToolSpecification] = ()
    client_id: str | None = None


class NewRuns:
    """Creates the runs of a host."""

    def __init__(
        self,
        host: RunsHost,
        runs: StoredRuns,
        execution: RunExecution,
        submit: Callable[[StoredRun], Awaitable[None]],
    ) -> None:
        self._host, self._runs, self._execution = host, runs, execution
        self._submit = submit

    async def start_run(
        self,
        plan: MethodPlan,
        arguments: Mapping[str, Any],
        said: ClientMessage | None = None,
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
        if not await self._exists(new):
            await self._check_conversation(plan, arguments)
            if account is not None:
                refuse_if_used_up(account)
            new = await self._with_checked_input(new, arguments, message)
        wanted = new.stored
        while True:
            async with self._runs.using(wanted.id) as store:
                is_new = await store.create(wanted)
            if is_new:
                self._execution.remember_starter(wanted.id, new.prepared.identity)
                await self._submit(wanted)
            found = await self._runs.find(wanted.id)
            if found is None:  # deleted in between
                continue
            if not is_new:
                self._refuse_conflict(found, new)
                if found.status == "running" and found.owner is None:  # the process that created it may have crashed
                    self._execution.remember_starter(found.id, new.prepared.identity)
                    await self._submit(found)
            return found

    async def call_durably(self, plan: MethodPlan, arguments: Mapping[str, Any]) -> Any:
        """Create the run of a durable method and execute it here, or wait for the run of the same call."""
        await self._refuse_without_role(plan, arguments)
        new = await self._make_run(plan, arguments, follows=False)
        run_id, result = new.stored.id, None
        if not await self._exists(new):
            await self._check_conversation(plan, arguments)
            new = await self._with_checked_input(new, arguments)
            # In a task: if the caller leaves while the run is created, the run must still be executed.
            task = self._execution.spawn(run_id, self._execution.create_and_execute(new), copy_context())
            result = await wait_unless_lost(task, run_id)
        if result is None:
            async with self._execution.within_time_limit(run_id):
                found = await self._runs.load(run_id)
                self._refuse_conflict(found, new)
                result = await self._execution.settle(run_id, stored=found, person=new.prepared.identity)
        if plan.output.shape is Shape.RESULT:
            return result
        if result.pending:
            raise RunSuspendedError(run_id, result.pending)
        return result.content

    async def _exists(self, new: NewRun) -> bool:
        """Return True if there is a run with the id that the caller gave."""
        if new.prepared.plan.run_id_parameter is None:
            return False
        return await self._runs.find(new.stored.id) is not None

    async def _check_conversation(self, plan: MethodPlan, arguments: Mapping[str, Any]) -> None:
        """Raise `AccessDeniedError` or `ConversationBusyError` if the run would have to."""
        if (key := plan.find_conversation(plan.find_memory_id(arguments))) is not None:
            await check_conversation_first(self._host, plan, key)

    async def _with_checked_input(
        self, new: NewRun, arguments: Mapping[str, Any], message: UserMessage | None = None
    ) -> NewRun:
        """Return the run with the message that the input guardrails let through. Raises `InputGuardrailError`."""
        plan, document = new.prepared.plan, new.prepared.document
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
        described = await describe_run(plan, self._host, arguments, attributes, added_by, left)
        if described.document.unwritten:
            name = described.document.unwritten[0]
            refuse_other_type(plan, name, arguments[name])
            fact = f"the argument {name!r} cannot be stored with the run"
            fix = "use a value of the declared type, which pydantic can write and read"
            raise IllegalConfigurationError([Problem(plan.where, fact, fix)])
        written = tuple(map(write_client_tool, client_tools))
        document = described.document.changed(follows=follows, attempts=0 if follows else 1, client_tools=written)
        conversation = plan.find_conversation(plan.find_memory_id(arguments))
        stored = new_header(given or uuid4().hex, plan, conversation, document, await self._runs.now())
        of_endpoint = (self._host.tools_added_by(added_by) or ()) if added_by else ()
        added = (*of_endpoint, *read_client_tools(written))
        # The identity is not loaded: the caller is there now.
        prepared = PreparedRun(plan, described.arguments, described.seeds, document, added, described.identity)
        return NewRun(stored, prepared, described.document.arguments)

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

    def _refuse_conflict(self, found: StoredRun, new: NewRun) -> None:
        """Raise `RunConflictError` if the stored run with this id belongs to another call."""
        if (reason := self._find_conflict(found, new)) is not None:
            raise RunConflictError(found.id, reason)

    def _find_conflict(self, found: StoredRun, new: NewRun) -> str | None:
        """Return how a stored run differs from a call with its id; None if the call may have its answer."""
        plan = new.prepared.plan
        if found.service not in stored_names(plan.service) or found.method != plan.name:
            return "another method"
        old, now = read_document(found), new.prepared.document
        person, caller = old.identity or {}, now.identity or {}
        if person.get("name") != caller.get("name"):
            return "another identity"
        attributes = person.get("attributes", {}), make_comparable(old, caller.get("attributes", {}))
        if keys := [each for each in _find_differing(*attributes) if each in self._host.run_identity]:
            return f"other attributes of the identity: {', '.join(keys)}"
        if now.identity is None and (keys := _find_differing(old.seeds, make_comparable(old, now.seeds))):
            return f"other seeds: {', '.join(keys)}"
        if not are_arguments_of(old, new.given):
            return "other arguments"
        if keys := _find_differing(old.attributes, make_comparable(old, now.attributes)):
            return f"other invocation attributes: {', '.join(keys)}"
        return None


def _find_differing(stored: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values differ, sorted."""
    nothing = object()
    keys = sorted({*stored, *given})
    return [each for each in keys if stored.get(each, nothing) != given.get(each, nothing)]
