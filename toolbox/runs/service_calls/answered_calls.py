"""Checks what an answer to a pending tool call contains: changed arguments, a value, an approval to be remembered.

Not here: who may answer, and with which kind of answer (`runs.answer_checks`), the tool of the call (`pending_calls`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from ...chat import PendingCall, ToolExecutionRequest
from ...deferred_answers import TAKES_ANSWERS
from ...errors import RunAnswerError, ToolArgumentsError
from ...introspection import type_name
from ...safe_text import faults_of, faults_text
from ...services.answers import accepted_result
from ...services.invocation import Invocation
from ...services.methods import arguments_as_tool
from ...services.opening import open_invocation
from ...services.plans import MethodPlan
from ...tools.tool_calls import Tool
from ...tools.written_arguments import change_arguments
from ..answer_checks import refuse_long
from ..documents import WaitingCall
from ..persons import starter_of
from ..places import invocation_of
from ..prepared_runs import admit, open_scope
from ..program_values import json_value, reason_of
from ..run_answers import Answer
from ..run_body import PreparedRun
from ..runs_host import RunsHost
from ..store import StoredRun
from ..stored_runs import StoredRuns, shortened
from .pending_calls import find_added, find_offered, find_plan, find_tool
from .run_invocations import RunPlace, ServiceCall

MAX_ANSWER = 1_000_000
"""The maximum length of replaced arguments, and of the value of a response, in characters of JSON."""


class AnsweredCall:
    """A pending call of a suspended run of a method, for which there is an answer."""

    def __init__(
        self,
        host: RunsHost,
        runs: StoredRuns,
        plan: MethodPlan,
        stored: StoredRun,
        prepared: PreparedRun,
        waiting: WaitingCall,
    ) -> None:
        self._host, self._runs, self._plan = host, runs, plan
        self._stored, self._prepared, self._waiting = stored, prepared, waiting
        self._run_id, self._call = stored.id, waiting.call
        self._added = find_added(host, prepared.document) or ()

    async def check(self, answer: Answer) -> Answer:
        """Return the answer as it is stored. Raises `RunAnswerError` if its contents are invalid."""
        run_id, call = self._run_id, self._call
        if answer.remember is not None:
            await self._check_remembering(answer)
        if answer.kind == "approve" and answer.arguments is not None:
            answer = replace(answer, arguments=_write_replaced_arguments(run_id, call, answer.arguments))
            await self._check_arguments(answer.arguments or {})
        if answer.kind == "respond":
            try:
                written = json_value(answer.value)
            except Exception as error:  # any exception of the value's own serializers
                kind = type(answer.value).__name__
                raise RunAnswerError(run_id, f"call {call.id}: a {kind} cannot be written as JSON") from error
            refuse_long(run_id, call.id, "the value", json.dumps(written), MAX_ANSWER)
            answer = replace(answer, value=await self._check_value(answer.value, written))
        return answer

    async def _check_value(self, value: Any, written: Any) -> Any:
        """Return the JSON of a supplied result. Raises `RunAnswerError` if it is not of the tool's return type."""
        call = self._call
        tool = await self._find_tool()
        if tool is None or getattr(tool.function, TAKES_ANSWERS, False):  # the tool reads the answer itself
            return written
        try:
            return accepted_result(tool.returns, value, written)
        except ValidationError as error:
            faults = [*faults_of(error)]
            what = f"call {call.id}: the value is not what {call.tool_name} returns, {type_name(tool.returns)}"
            raise RunAnswerError(self._run_id, f"{what}: {reason_of(error)}", faults) from None

    async def _check_remembering(self, answer: Answer) -> None:
        """Raise `RunAnswerError` if the conversation cannot remember this answer. The tool as it is now counts."""
        call, prepared = self._call, self._prepared
        tool = find_tool(self._host, self._run_id, self._waiting, self._added)
        may_remember = call.may_remember if tool is None else tool.may_remember
        key, fact = prepared.conversation, None
        if answer.kind != "approve" or answer.remember != "conversation":
            fact = f'invalid remember={answer.remember!r}; use approve(remember="conversation")'
        elif not may_remember:
            fact = f"an approval of {call.tool_name} cannot be remembered; it needs @tool(may_remember=True)"
        elif key is None:
            method = self._stored.method
            fact = f"the approval cannot be remembered: {method} keeps no conversation; it needs a MemoryId"
        elif starter_of(prepared.document.identity, self._host.run_identity) is None:
            fact = "the approval cannot be remembered: an anonymous caller started the run"
        elif not (await self._host.memories()).keeps_logs:
            fact = "the approval cannot be remembered: the store of the conversation has only the three methods"
        if fact is not None:
            raise RunAnswerError(self._run_id, f"call {call.id}: {fact}")

    async def _check_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Raise `RunAnswerError` for changed arguments that are not valid, or that the tool would not get as sent."""
        call = self._call
        if (tool := await self._find_tool()) is None:
            return
        request = ToolExecutionRequest(call.id, call.tool_name, self._waiting.requested)
        try:
            change_arguments(tool, request, {}, call.arguments, arguments)
        except ToolArgumentsError as error:
            fact = f"call {call.id}: invalid arguments for {call.tool_name}: {faults_text(error.problems)}"
            raise RunAnswerError(self._run_id, fact, error.problems) from error

    async def _find_tool(self) -> Tool | None:
        """Return the tool of the call, also one that a tool provider offers now; None if nobody does."""
        return find_tool(self._host, self._run_id, self._waiting, self._added) or await self._ask_providers()

    async def _ask_providers(self) -> Tool | None:
        """Ask the tool providers of the method that the call waits in for its tool."""
        host, run_id, prepared = self._host, self._run_id, self._prepared
        body = ServiceCall(await self._runs.session_of(self._stored, prepared.document))
        plan, arguments, place = self._plan, prepared.arguments, body.root
        if self._waiting.outer:
            found = self._decode_inner_call()
            if found is None:
                return None
            path = invocation_of(self._call.id)
            (plan, arguments), place = found, RunPlace(body, path, path)
        admitted = await admit(host, run_id, prepared)
        async with open_scope(host, admitted):
            invocation = Invocation(plan, host, arguments, place=place)
            invocation.added, invocation.added_by = self._added, prepared.document.added_by
            await open_invocation(invocation)
            return invocation.toolset.stored(self._call.tool_name)

    def _decode_inner_call(self) -> tuple[MethodPlan, Mapping[str, Any]] | None:
        """Return the method that a call waits in, called as a tool, and its arguments; None for a provider's tool."""
        host, run_id, waiting = self._host, self._run_id, self._waiting
        outer = waiting.outer[-1]
        plan = find_plan(host, run_id, outer.service, outer.method)
        tool = find_offered(run_id, plan, outer.id, outer.tool_name, self._added)
        if tool is None or tool.decode is None:
            return None
        inner = find_plan(host, run_id, waiting.call.service, waiting.method)
        request = ToolExecutionRequest(outer.id, outer.tool_name, outer.arguments)
        decoded = tool.decode(request)
        for each in self._prepared.document.answers:
            if each.call_id == outer.id and each.answer.arguments is not None:
                decoded, _ = change_arguments(tool, request, decoded, each.asked, each.answer.arguments)
        return inner, arguments_as_tool(inner, (), decoded)


def _write_replaced_arguments(run_id: str, call: PendingCall, arguments: Mapping[str, Any]) -> dict[str, Any]:
    try:
        written = dict(json_value(dict(arguments)))
    except Exception as error:  # any exception of a value's own serializers
        fact = f"call {call.id}: the arguments cannot be written as JSON ({shortened(str(error))})"
        raise RunAnswerError(run_id, fact) from error
    refuse_long(run_id, call.id, "the arguments", json.dumps(written), MAX_ANSWER)
    return written
