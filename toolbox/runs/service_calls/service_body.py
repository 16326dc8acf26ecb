"""`ServiceBody`: a call of a service method as the body of a run, and `ServiceBodies`, those of a program.

Not here: making a new run (`new_calls`), what the invocations of a run do at their places (`run_invocations`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ...chat import UserMessage
from ...conversations.keys import ChatMemoryKey
from ...conversations.log import NO_USAGE, Turn, only_beans
from ...errors import RunIncompatibleError
from ...events import RunResumedEvent, RunStartedEvent
from ...services.driver import run, stream
from ...services.host_needs import ServiceHost
from ...services.inner_events import FrontEnd, InnerReader, current_reader
from ...services.inner_plans import PROVIDER_MAY_SUSPEND, services_below
from ...services.invocation import Invocation
from ...services.layers import check_input_first
from ...services.loop import Finish, Suspend, read_items
from ...services.outputs import Result, Shape
from ...services.plans import MethodPlan
from ...services.turns import client_ids_in, unfinished_messages
from ..documents import RunDocument, WaitingCall
from ..prepared_runs import admit, open_scope
from ..run_answers import Answer
from ..run_body import PreparedRun, SendEvent, ShowWork
from ..run_session import RunSession
from ..runs_host import RunsHost
from ..store import StoredRun
from ..stored_runs import StoredRuns
from .answered_calls import AnsweredCall
from .call_documents import (
    output_fingerprint,
    read_arguments,
    read_details,
    read_user_message,
    read_value,
    with_restored_results,
    write_details,
    write_value,
)
from .pending_calls import find_added, find_in_charge, find_tool, refuse_misfits
from .run_invocations import ServiceCall, wait_after


class ServiceBodies:
    """The service methods of a host as bodies of runs, and what a run may need of any of them."""

    def __init__(self, host: RunsHost, runs: StoredRuns) -> None:
        self._host, self._runs = host, runs

    def of(self, service: str) -> Mapping[str, ServiceBody]:
        """Return the bodies of the service with this stored name, also a former one; empty for an unknown one."""
        plans = self._host.plans_of(service)
        return {name: ServiceBody(self._host, self._runs, plan) for name, plan in plans.items()}

    def may_undo_tools(self) -> bool:
        """Return True if a service of this program undoes tools when a call fails."""
        own = [plan for methods in self._host.plans.values() for plan in methods.values()]
        everything = [*own, *(inner for plan in own for inner in services_below(plan))]
        return any(each.options.compensate_on_failure for each in everything)

    def may_wait(self) -> bool:
        """Return True if runs of this program may wait for a next try, or for the expiry of a pending call.

        A tool provider of the program may offer a tool with `approval_expires=`.
        """
        return self._host.added_may_suspend or any(
            plan.options.run_retries is not None
            or any(tool.approval_expires is not None for tool in plan.toolset.tools)
            or any(not hasattr(each.bean, PROVIDER_MAY_SUSPEND) for each in plan.providers)
            for methods in self._host.plans.values()
            for plan in methods.values()
        )


@dataclass(frozen=True, slots=True)
class ServiceBody:
    """A service method as the body of runs: a `RunBody`."""

    host: RunsHost
    runs: StoredRuns
    plan: MethodPlan

    @property
    def waits_in_conversation(self) -> bool:
        """True if its conversation goes on while a run is suspended, with an entry for the turn that waits."""
        return self.plan.options.on_suspended == "continue"

    def conversation_of(self, arguments: Mapping[str, Any], /) -> ChatMemoryKey | None:
        """Return the conversation of a run with these arguments; None without one."""
        return self.plan.find_conversation(self.plan.find_memory_id(arguments))

    def wait_after(self, failures: int, /) -> timedelta | None:
        """Return the time until a run that has failed so often is tried again; None if it has failed for good."""
        return wait_after(self.plan, failures)

    # --- a run that continues

    def restore(self, run_id: str, document: RunDocument, /) -> Mapping[str, Any]:
        """Return the arguments of a stored run. Raises `RunIncompatibleError` if it does not fit this program."""
        plan = self.plan
        if document.output != output_fingerprint(plan):
            raise RunIncompatibleError(run_id, f"the return type of {plan.where} has changed")
        arguments = read_arguments(run_id, plan, document)
        for name in document.unwritten:
            if name == plan.call_options:
                raise RunIncompatibleError(run_id, f"the argument {name!r} of {plan.where} was not stored")
        if (added := find_added(self.host, document)) is None:
            raise RunIncompatibleError(run_id, f"this program has no endpoint {document.added_by}, which adds tools")
        refuse_misfits(self.host, run_id, plan, document, added)
        return arguments

    def refuse(self, prepared: PreparedRun, /) -> None:
        """Raise `ForbiddenError` if the identity of a run may no longer call the method, or the one in charge."""
        in_charge = (find_in_charge(self.plan, each) for each in prepared.document.waiting)
        for plan in (self.plan, *in_charge):
            access = None if plan is None else plan.access
            if plan is not None and access is not None and not access.allows(prepared.identity):
                raise access.refusal(prepared.identity, plan.where)

    async def execute(
        self, session: RunSession, prepared: PreparedRun, send: SendEvent | None, show: ShowWork | None, /
    ) -> tuple[Result[Any], Mapping[str, Any] | None]:
        """Call the method of a run in its open scope. Returns its result, and what the document of a completed run has.

        None in place of that if the run is suspended. `send` gets the events of the call. Raises the method's errors.
        """
        body, document = ServiceCall(session), prepared.document
        message = read_user_message(session.id, document)
        invocation = Invocation(self.plan, self.host, prepared.arguments, place=body.root, message=message)
        invocation.added, invocation.added_by = find_added(self.host, document) or (), document.added_by
        invocation.is_input_checked, invocation.input_checked_by = document.is_checked, document.checked_by
        if (in_charge := body.handed_over_to) is not None:
            invocation.find_stored_member(in_charge)  # raises if this program has it no more
        if document.cancels:
            invocation.before_end = body.refuse_end
        if self.host.listeners is not None:
            # An owner that died before its first effect has started nothing. It may have chosen the model.
            has_begun = session.has_begun or document.failures or document.history or document.cancels
            event = RunResumedEvent if has_begun else RunStartedEvent
            await self.host.note_caller(invocation.context)
            self.host.listeners.tell(event(invocation.context, session.id, document.trace))
        if show is not None and document.front_end:
            loop = asyncio.get_running_loop()
            current_reader.set(InnerReader(loop, front_end=FrontEnd(session.id, show, loop)))
        if send is None:
            result = _result_of(invocation, await run(invocation))
        else:
            invocation.yields_suspension = True
            await stream(invocation, send)
            result = _result_of(invocation, invocation.value())
        if isinstance(invocation.end, Suspend):
            return result, None
        details = write_details(result) if self.plan.output.shape is Shape.RESULT else None
        return result, {"result": write_value(self.plan, result.content), "details": details}

    # --- what is read of a stored run

    def question(self, run_id: str, prepared: PreparedRun, /) -> UserMessage:
        """Return what the user has asked. Raises `RunIncompatibleError`."""
        message = read_user_message(run_id, prepared.document)
        return self.plan.messages.make_user_message(prepared.arguments) if message is None else message

    async def read_result(self, stored: StoredRun, document: RunDocument, /) -> Result[Any] | None:
        """Return the result of a completed or suspended run; None if the run has changed since it was read.

        Raises `RunIncompatibleError`.
        """
        plan = self.plan
        if stored.status == "suspended":
            restored = ServiceCall(await self.runs.session_of(stored, document)).root.restored()
            if restored is None:  # the run has ended since the header was read, and its store has deleted the records
                return None
            state = with_restored_results(plan, restored.state)
            return state.result_while_suspended(document.pending, stored.id, state.in_charge or plan.where)
        try:
            return read_details(plan, read_value(plan, document.result), document.details)
        except Exception as error:  # pydantic raises many kinds of exceptions
            raise RunIncompatibleError(stored.id, f"its result no longer fits {plan.where}: {error}") from error

    def value_of(self, result: Result[Any], /) -> Any:
        """Return the value of the method: the whole `Result` if it returns one."""
        return result if self.plan.output.shape is Shape.RESULT else result.content

    async def read_turn(self, stored: StoredRun, document: RunDocument, /) -> tuple[ChatMemoryKey, Turn] | None:
        """Return the turn that a run leaves in its conversation if it is cancelled now; None if it leaves none."""
        plan = self.plan
        if plan.options.unfinished_turns != "keep":
            return None
        key = plan.find_conversation(document.memory_id)
        if key is None or not (await self.host.memories()).keeps_logs:
            return None

        turn = await self._read_turn_until_now(stored, document)
        if turn is None:
            return None
        return key, turn if plan.window is not None else only_beans(turn)

    async def _read_turn_until_now(self, stored: StoredRun, document: RunDocument) -> Turn | None:
        """Return the turn of a run with everything that is recorded; None if it leaves none.

        Raises `RunIncompatibleError`.
        """
        session = await self.runs.session_of(stored, document)
        state = ServiceCall(session).state_until_now()
        ids = await session.client_ids(0 if state is None else len(state.added))
        if state is not None:
            client_ids = client_ids_in(state, ids)
            messages, usage = unfinished_messages(state), state.token_usage or NO_USAGE
        elif self.plan.messages.continues_history:
            return None
        else:  # before its first reply
            prepared = PreparedRun(self, self.restore(stored.id, document), {}, document)
            client_ids = {0: ids[0]} if ids[0] is not None else {}
            messages, usage = (self.question(stored.id, prepared),), NO_USAGE
        return Turn(
            run_id=session.id,
            messages=messages,
            usage=usage,
            state="stopped",
            beans=session.recorded_beans,
            client_ids=client_ids,
            in_charge=state.in_charge if state is not None and self.plan.team else None,
        )

    # --- what persons send to it

    def find_rules(self, run_id: str, prepared: PreparedRun, waiting: WaitingCall, /) -> tuple[tuple[str, ...], bool]:
        """Return the roles of a call's `approvers=`, and its `not_self=`: those of its tool now, else as stored."""
        tool = find_tool(self.host, run_id, waiting, find_added(self.host, prepared.document) or ())
        if tool is not None and (tool.requires_approval or tool.deferred or tool.on_unknown_outcome == "ask"):
            return tool.approvers, tool.not_self
        return waiting.approvers, waiting.not_self

    async def check_answer(
        self, stored: StoredRun, prepared: PreparedRun, waiting: WaitingCall, answer: Answer, /
    ) -> Answer:
        """Return an answer as it is stored. Raises `RunAnswerError` if what it contains is invalid for the call."""
        return await AnsweredCall(self.host, self.runs, self.plan, stored, prepared, waiting).check(answer)

    async def check_message(
        self, stored: StoredRun, prepared: PreparedRun, message: UserMessage, by: Any, /
    ) -> UserMessage:
        """Return a message that the user adds, after the input guardrails of the method in charge have judged it."""
        if not self.plan.checks_input:
            return message
        admitted = await admit(self.host, stored.id, prepared, by)
        in_charge = await self._in_charge_of(stored, prepared.document) if self.plan.team else None
        async with open_scope(self.host, admitted):
            checked, _ = await check_input(self.host, self.plan, prepared.arguments, message, in_charge)
            return checked or message

    async def _in_charge_of(self, stored: StoredRun, document: RunDocument) -> str | None:
        """Return the method to which the call of a run was handed over, as its records say; None for the called one."""
        call = ServiceCall(await self.runs.session_of(stored, document))
        if (in_charge := call.handed_over_to) is not None:
            return in_charge
        restored = call.root.restored()
        return None if restored is None else restored.state.in_charge


async def check_input(
    host: ServiceHost,
    plan: MethodPlan,
    arguments: Mapping[str, Any],
    message: UserMessage | None = None,
    in_charge: str | None = None,
) -> tuple[UserMessage | None, str]:
    """Let the input guardrails judge a call. Returns the message that they wrote in place of the user's, or None.

    Returns the method in charge too, such as `"Billing.chat"`.

    `message` is the user message, if it is not that of the arguments. `in_charge` is the method that has taken the call
    over already, by default that of the conversation. Raises `InputGuardrailError`.
    """
    invocation = Invocation(plan, host, arguments, message=message)
    if in_charge is not None and (found := invocation.find_member(in_charge)) is not None:
        invocation.put_in_charge(found)
    await check_input_first(invocation)
    return invocation.user_message if invocation.has_other_message else None, invocation.plan.where


def _result_of(invocation: Invocation, value: Any) -> Result[Any]:
    if isinstance(value, Result):
        return value
    end = invocation.end
    assert isinstance(end, Finish)
    output = invocation.plan.output
    reply = end.response.ai_message
    if value is None and output.is_stream and output.structure is not None and not reply.tool_execution_requests:
        value = read_items(output.structure, end.response)
    return invocation.state.result(value, end.finish_reason, invocation.plan.where)
