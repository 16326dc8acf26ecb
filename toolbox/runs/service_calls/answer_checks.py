"""`AnswerChecks`: checks the answers to pending calls before they are stored.

Not here: storing them and continuing the run (`resuming`), the program's part of a stored run (`prepared_runs`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from ...chat import PendingCall, ToolExecutionRequest
from ...deferred_answers import TAKES_ANSWERS
from ...errors import AnswerForbiddenError, RunAnswerError, ToolArgumentsError
from ...introspection import type_name
from ...safe_text import faults_of, faults_text, printable
from ...services.answers import accepted_result
from ...services.methods import arguments_as_tool
from ...services.plans import MethodPlan
from ...tools.tool_calls import Tool
from ...tools.written_arguments import change_arguments
from ..documents import WaitingCall
from ..persons import person_name, starter_of
from ..places import invocation_of
from ..prepared_runs import PreparedRuns
from ..program_values import json_value, reason_of
from ..run_answers import KINDS, Answer, AnswerKind
from ..runs_host import RunsHost
from ..store import StoredRun
from ..stored_runs import StoredRuns, shortened
from .run_invocations import PreparedRun, RunPlace, ServiceCall, find_provided_tool

MAX_REASON = 10_000
"""The maximum length of a reason, in characters."""

MAX_ANSWER = 1_000_000
"""The maximum length of replaced arguments, and of the value of a response, in characters of JSON."""


class AnswerChecks:
    """Checks answers against the pending calls of a run, the present rules of their tools, and the person."""

    def __init__(self, host: RunsHost, runs: StoredRuns, preparing: PreparedRuns) -> None:
        self._host, self._runs, self._preparing = host, runs, preparing

    async def check_answer(
        self, stored: StoredRun, prepared: PreparedRun, call_id: str, answer: object, by: Any
    ) -> tuple[WaitingCall, Answer]:
        """Return the pending call and its answer. Raises `RunAnswerError` if the answer is invalid."""
        run_id = stored.id
        waiting = next((each for each in prepared.document.waiting if each.call.id == call_id), None)
        if waiting is None:
            pending = ", ".join(each.call.id for each in prepared.document.waiting) or "none"
            raise RunAnswerError(run_id, f"no pending call has the id {shortened(call_id)}; pending: {pending}")
        call = waiting.call
        if not isinstance(answer, Answer):
            fix = "use approve(), reject(…), respond(…), fail(…) or retry()"
            raise RunAnswerError(run_id, f"call {call_id}: expected an answer, got {type(answer).__name__}; {fix}")
        if answer.kind not in KINDS[call.kind]:
            allowed = " or ".join(f"{each}()" for each in KINDS[call.kind])
            raise RunAnswerError(
                run_id,
                f"call {call_id} is of kind {call.kind!r}, so {answer.kind}() is not a valid answer; use {allowed}",
            )
        self.check_person(run_id, waiting, prepared, answer.kind, by)
        if answer.remember is not None:
            await self._check_remembering(stored, prepared, waiting, answer)
        if answer.kind == "approve" and answer.arguments is not None:
            answer = replace(answer, arguments=_write_replaced_arguments(run_id, call, answer.arguments))
            await self._check_arguments(stored, prepared, waiting, answer.arguments or {})
        if answer.kind == "respond":
            try:
                written = json_value(answer.value)
            except Exception as error:  # any exception of the value's own serializers
                kind = type(answer.value).__name__
                raise RunAnswerError(run_id, f"call {call_id}: a {kind} cannot be written as JSON") from error
            _refuse_long(run_id, call, "the value", json.dumps(written), MAX_ANSWER)
            written = await self._check_value(stored, prepared, waiting, answer.value, written)
            answer = replace(answer, value=written)
        if answer.reason is not None:
            if not isinstance(answer.reason, str):
                raise RunAnswerError(run_id, f"call {call_id}: the reason must be a string")
            _refuse_long(run_id, call, "the reason", answer.reason, MAX_REASON)
            answer = replace(answer, reason=printable(answer.reason))
        return waiting, answer

    async def _check_value(
        self, stored: StoredRun, prepared: PreparedRun, waiting: WaitingCall, value: Any, written: Any
    ) -> Any:
        """Return the JSON of a supplied result. Raises `RunAnswerError` if it is not of the tool's return type."""
        call = waiting.call
        tool = self._preparing.find_tool(stored.id, waiting, prepared.added)
        if tool is None:
            tool = await self._ask_providers(stored, prepared, waiting)
        if tool is None or getattr(tool.function, TAKES_ANSWERS, False):  # the tool reads the answer itself
            return written
        try:
            return accepted_result(tool.returns, value, written)
        except ValidationError as error:
            faults = [*faults_of(error)]
            what = f"call {call.id}: the value is not what {call.tool_name} returns, {type_name(tool.returns)}"
            raise RunAnswerError(stored.id, f"{what}: {reason_of(error)}", faults) from None

    async def _check_remembering(
        self, stored: StoredRun, prepared: PreparedRun, waiting: WaitingCall, answer: Answer
    ) -> None:
        """Raise `RunAnswerError` if the conversation cannot remember this answer. The tool as it is now counts."""
        run_id, call = stored.id, waiting.call
        tool = self._preparing.find_tool(run_id, waiting, prepared.added)
        may_remember = call.may_remember if tool is None else tool.may_remember
        key, fact = prepared.conversation, None
        if answer.kind != "approve" or answer.remember != "conversation":
            fact = f'invalid remember={answer.remember!r}; use approve(remember="conversation")'
        elif not may_remember:
            fact = f"an approval of {call.tool_name} cannot be remembered; it needs @tool(may_remember=True)"
        elif key is None:
            fact = f"the approval cannot be remembered: {stored.method} keeps no conversation; it needs a MemoryId"
        elif starter_of(prepared.document.identity, self._host.run_identity) is None:
            fact = "the approval cannot be remembered: an anonymous caller started the run"
        elif not (await self._host.memories()).keeps_logs:
            fact = "the approval cannot be remembered: the store of the conversation has only the three methods"
        if fact is not None:
            raise RunAnswerError(run_id, f"call {call.id}: {fact}")

    def find_rules(self, run_id: str, waiting: WaitingCall, prepared: PreparedRun) -> tuple[tuple[str, ...], bool]:
        """Return the roles of a call's `approvers=`, and its `not_self=`: those of its tool now, else as stored."""
        tool = self._preparing.find_tool(run_id, waiting, prepared.added)
        if tool is not None and (tool.requires_approval or tool.deferred or tool.on_unknown_outcome == "ask"):
            return tool.approvers, tool.not_self
        return waiting.approvers, waiting.not_self

    def check_person(self, run_id: str, waiting: WaitingCall, prepared: PreparedRun, kind: AnswerKind, by: Any) -> None:
        """Raise `AnswerForbiddenError` if this person may not answer the call. The present rules of its tool count."""
        call_id, name, starter = waiting.call.id, person_name(by), prepared.document.identity
        verb = "approve" if waiting.call.kind == "approval" else "answer"
        approvers, not_self = self.find_rules(run_id, waiting, prepared)
        if approvers:
            roles = getattr(by, "roles", None)
            needed = ", ".join(approvers)
            if roles is None:
                fact = f"call {call_id} needs a person with one of the roles {needed}; pass by=SecurityIdentity(…)"
                raise AnswerForbiddenError(run_id, fact, is_anonymous=by is None)
            if not set(approvers) & set(roles):
                person = repr(name) if name else "an anonymous person"
                fact = f"call {call_id}: {person} may not {verb} it; it needs one of: {needed}"
                raise AnswerForbiddenError(run_id, fact, is_anonymous=not name)
        if not_self:
            if not name:
                fact = f"call {call_id}: another person must {verb} it; pass by="
                raise AnswerForbiddenError(run_id, fact, is_anonymous=True)
            if starter is not None and starter["name"] == name:
                fact = f"call {call_id}: {name!r} started it and cannot {verb} it (not_self=True); another person must"
                raise AnswerForbiddenError(run_id, fact)
            if starter is None and kind not in ("reject", "fail"):
                # From a release in which anonymous callers could ask for it: this person may be the one who asked.
                fact = f"call {call_id}: it is unknown who asked for it; use reject(…) or fail(…), or cancel the run"
                raise AnswerForbiddenError(run_id, fact)

    async def _check_arguments(
        self, stored: StoredRun, prepared: PreparedRun, waiting: WaitingCall, arguments: Mapping[str, Any]
    ) -> None:
        """Raise `RunAnswerError` for changed arguments that are not valid, or that the tool would not get as sent."""
        run_id = stored.id
        tool = self._preparing.find_tool(run_id, waiting, prepared.added)
        if tool is None and (tool := await self._ask_providers(stored, prepared, waiting)) is None:
            return
        call = waiting.call
        request = ToolExecutionRequest(call.id, call.tool_name, waiting.requested)
        try:
            change_arguments(tool, request, {}, call.arguments, arguments)
        except ToolArgumentsError as error:
            fact = f"call {call.id}: invalid arguments for {call.tool_name}: {faults_text(error.problems)}"
            raise RunAnswerError(run_id, fact, error.problems) from error

    async def _ask_providers(self, stored: StoredRun, prepared: PreparedRun, waiting: WaitingCall) -> Tool | None:
        """Ask the tool providers of the call that waits for a tool. Returns None if they do not offer it now."""
        session = await self._runs.session_of(stored, prepared.document)
        plan, body = prepared.plan, ServiceCall(session)
        place = body.root
        arguments: Mapping[str, Any] = prepared.arguments
        if waiting.outer:
            found = self._decode_inner_call(stored.id, prepared, waiting)
            if found is None:
                return None
            path = invocation_of(waiting.call.id)
            (plan, arguments), place = found, RunPlace(body, path, path)
        async with self._preparing.open_scope(await self._preparing.admit(stored.id, prepared)):
            return await find_provided_tool(self._host, place, plan, arguments, waiting.call.tool_name)

    def _decode_inner_call(
        self, run_id: str, prepared: PreparedRun, waiting: WaitingCall
    ) -> tuple[MethodPlan, Mapping[str, Any]] | None:
        """Return the method that a call waits in, called as a tool, and its arguments; None for a provider's tool."""
        outer, edited = waiting.outer[-1], prepared.document.answers
        plan = self._preparing.find_plan(run_id, outer.service, outer.method)
        tool = self._preparing.find_offered(run_id, plan, outer.id, outer.tool_name, prepared.added)
        if tool is None or tool.decode is None:
            return None
        inner = self._preparing.find_plan(run_id, waiting.call.service, waiting.method)
        request = ToolExecutionRequest(outer.id, outer.tool_name, outer.arguments)
        decoded = tool.decode(request)
        for each in edited:
            if each.call_id == outer.id and each.answer.arguments is not None:
                decoded, _ = change_arguments(tool, request, decoded, each.asked, each.answer.arguments)
        return inner, arguments_as_tool(inner, (), decoded)


def _write_replaced_arguments(run_id: str, call: PendingCall, arguments: Mapping[str, Any]) -> dict[str, Any]:
    try:
        written = dict(json_value(dict(arguments)))
    except Exception as error:  # any exception of a value's own serializers
        fact = f"call {call.id}: the arguments cannot be written as JSON ({shortened(str(error))})"
        raise RunAnswerError(run_id, fact) from error
    _refuse_long(run_id, call, "the arguments", json.dumps(written), MAX_ANSWER)
    return written


def _refuse_long(run_id: str, call: PendingCall, what: str, text: str, limit: int) -> None:
    """Raise `RunAnswerError` for a part of an answer that is too long."""
    if len(text) > limit:
        fact = f"{what} must have at most {limit:,} characters; got {len(text):,}"
        raise RunAnswerError(run_id, f"call {call.id}: {fact}")
