"""What happens inside a run: places, suspended calls, answers, records, and their replay.

A `RunSession` exists while a run is executed in this process. Without a stored run it only remembers results, until the
call is suspended; with one it writes each record before the next effect starts. Includes the layers of a service that
can be suspended. Not here: loading and continuing runs (`inbox`), the header's values (`documents`).
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from typing import Any, Protocol, cast
from uuid import uuid4

from ..chat import PendingCall, RunSuspended, TokenUsage, ToolExecutionRequest, ToolSpecification
from ..context import (
    TAKES_ANSWERS,
    TOOL_ORIGIN,
    TRANSACTIONAL_MARK,
    DeferredAnswer,
    InvocationContext,
    ToolOrigin,
    TransactionRecorder,
    current_answer,
    current_recorder,
)
from ..errors import (
    EndsInvocation,
    IllegalConfigurationError,
    LeaseLostError,
    Problem,
    RunCancelledError,
    RunConflictError,
    RunIncompatibleError,
    RunStoreError,
    ToolArgumentsError,
    ToolDeferred,
    TransactionRolledBackError,
    TranscriptError,
)
from ..execution.markers import COROUTINE, EXECUTION_MARK, execution_of
from ..limits import Account, Usage, UsageLimits, narrowest, remaining
from ..services.answers import restored_result, supplied_result
from ..services.loop import CallModel, ModelReplied, RunTool, ToolFinished, ToolSuspended
from ..services.state import PendingToolCall, State
from ..tools.codec import Encoded, EncodedInFull, printable, read_arguments
from ..tools.failures import message_of
from ..tools.pipeline import Tool, ToolCall, ToolStep, ToolSuspension, execute_tool
from ..tools.specification import is_field
from .documents import (
    GivenAnswer,
    OuterCall,
    RecordedFailureError,
    RecordedToolError,
    RunDocument,
    StoringHost,
    WaitingCall,
    describe,
    failure_to_json,
    header,
    place_order,
    qualified,
    read,
    reply_from_dict,
    reply_to_json,
    result_from_dict,
    result_to_json,
    snapshot_to_json,
    state_from_dict,
    writable,
)
from .event_log import event_to_json
from .store import Answer, RunChanges, RunStore, StoredRecord, StoredRun

logger = logging.getLogger("toolbox.runs")

UNKNOWN = (
    "The program stopped during this call of {tool!r}, so it is unknown if the call took effect. "
    "Check its effect before you call it again."
)
NOT_APPROVABLE = "This tool needs the approval of a person, which is not available here."


_COMPENSATION = ".0"  # how the place of a compensation ends


class CancelledInsideError(RunCancelledError, EndsInvocation):
    """Ends an invocation of a cancelled run, past handlers and interceptors."""


class RunPlace:
    """The place of a tool call, or of a service called as a tool, in its run.

    `call` is the place of the call, such as `0/1`. `path` also counts the attempts of interceptors: `0/1.2`.
    """

    __slots__ = ("call", "path", "session")

    def __init__(self, session: RunSession, call: str, path: str) -> None:
        self.session, self.call, self.path = session, call, path

    @property
    def run_id(self) -> str:
        """The id of the run."""
        return self.session.id

    @property
    def is_entered(self) -> bool:
        """True if a service already runs as the tool at this place."""
        return self.session.is_entered(self.path)

    @property
    def is_recorded(self) -> bool:
        """True if the next attempt of this call has a recorded result, so that the tool does not run."""
        return self.session.next_record(self.call) == "result"


def place_of_compensation(invocation: RunPlace, position: int) -> RunPlace:
    """Return the place of the compensation of an execution: attempt 0 of its call. It is recorded once."""
    place = f"{_below(invocation.path, position)}{_COMPENSATION}"
    return RunPlace(invocation.session, place, place)


class Suspendable(Protocol):
    """The parts of an `Invocation` that a session uses."""

    place: Any
    state: State
    context: InvocationContext
    environment: Any
    toolset: Any
    plan: Any
    is_resumed: bool
    deadline: Any
    account: Account | None


class Restored:
    """An invocation as it was stored: its state, the seconds until its deadline, and its notes."""

    __slots__ = ("notes", "remaining", "state", "usage")

    def __init__(
        self, state: State, remaining: float | None, notes: Mapping[str, Any], usage: Mapping[str, Any] | None
    ) -> None:
        self.state, self.remaining, self.notes, self.usage = state, remaining, notes, usage

    def account_for(self, account: Account) -> None:
        """Let an account with limits continue with the usage of the invocation so far."""
        if self.usage is not None and account.limits is not None:
            account.usage = usage_from_dict(self.usage)


class RunSession:
    """One run while this process executes it.

    `generation` is None until the run is stored. `document` is its header, once there is one.
    """

    def __init__(self, run_id: str | None = None) -> None:
        self.id = run_id or uuid4().hex
        self.store: RunStore | None = None
        self.generation: int | None = None
        self.document: RunDocument | None = None
        self.pending: tuple[PendingCall, ...] = ()
        self.wants_result = False
        self.new_events: Callable[[], Sequence[str]] | None = None
        self.write_events: Callable[[], Awaitable[None]] | None = None
        self._records: dict[str, StoredRecord] = {}
        self._starts: dict[str, int] = {}
        self._outside: set[str] = set()
        self._results: dict[str, StoredRecord] = {}
        self._waiting: dict[str, WaitingCall] = {}
        self._suspended: dict[str, tuple[Suspendable, bool]] = {}
        self._snapshots: dict[str, int] = {}
        self._attempts: dict[str, int] = {}
        self._entered: set[str] = set()
        self._fresh: set[str] = set()
        self._edited: set[str] = set()
        self._checked: set[str] = set()
        self._stored_calls: set[str] = set()
        self._decoded: dict[str, dict[str, Any] | None] = {}
        self._to_judge: dict[str, _Unjudged | None] = {}
        self._replies: dict[str, int] = {}
        self._written: dict[str, State] = {}

    @classmethod
    def of(
        cls, stored: StoredRun, document: RunDocument, records: Sequence[StoredRecord], store: RunStore
    ) -> RunSession:
        """Return the session of a stored run that this process owns."""
        session = cls(stored.id)
        session.store, session.generation, session.document = store, stored.generation, document
        for each in records:
            session._records[each.key] = each
            place = each.key.partition("#")[0]
            if each.kind == "snapshot":
                session._snapshots[place] = session._snapshots.get(place, 0) + 1
            elif each.kind == "start":
                session._starts[place] = session._starts.get(place, 0) + 1
            elif each.kind == "outside":
                session._outside.add(place)
        return session

    # --- entering places

    @property
    def root(self) -> RunPlace:
        """The place of the run itself."""
        return RunPlace(self, "", "")

    def is_entered(self, path: str) -> bool:
        """Return True if a service already runs as the tool at this place."""
        return path in self._entered

    def enter(self, place: RunPlace) -> RunPlace | None:
        """Return the place of a service that runs as the tool at `place`; None if it is taken.

        It is taken if a tool's own code called the service, in addition to the call that the model made.
        """
        if place.path in self._entered:
            return None
        self._entered.add(place.path)
        return place

    def restored(self, path: str) -> Restored | None:
        """Return the stored state of the invocation at this place; None if it begins now."""
        state: State | None = None
        remaining, notes, usage = None, {}, None
        first = 0
        with self._reading():
            if count := self._snapshots.get(path):
                written = read(self._records[f"{path}#s{count}"].data)
                state, about = state_from_dict(written["state"], None), written["about"]
                first, remaining, notes = about["replies"], about["remaining"], about["notes"]
                usage = about["usage"]
            replies = first
            while (record := self._records.get(f"{path}#r{replies}")) is not None:
                written = read(record.data)
                state, usage = state_from_dict(written["before"], state), written["usage"]
                replies += 1
        if state is None:
            return None
        self._written[path] = state
        # The last reply is given again, by `ask`.
        self._replies[path] = max(replies - 1, first) if replies > first else first
        return Restored(self._with_answered(path, state), remaining, notes, usage)

    def _with_answered(self, path: str, state: State) -> State:
        """Return the state in which the answered calls wait to be run."""
        pending = list(state.pending)
        for index, call in enumerate(pending):
            place = _below(path, len(state.executions) + index)
            if call.status == "suspended" and self._is_answered(place):
                pending[index] = PendingToolCall(call.request)
        return state.changed(pending=tuple(pending))

    def _is_answered(self, place: str) -> bool:
        return any(_is_within(each.call_id, place) for each in self._given())

    def failure_at(self, path: str) -> dict[str, Any] | None:
        """Return the recorded failure of the invocation at this place, with the executions to undo."""
        record = self._records.get(f"{path}#failed")
        if record is None:
            return None
        with self._reading():
            return read(record.data)

    async def record_failure(self, path: str, error: Exception, undo: list[dict[str, Any]]) -> None:
        """Record that the invocation at this place fails, before its tools are undone."""
        await self._write(StoredRecord(f"{path}#failed", "failed", failure_to_json(error, undo)))

    def raise_failure(self, path: str) -> None:
        """Raise the recorded failure of the invocation at this place, if there is one."""
        if (failure := self.failure_at(path)) is not None:
            kind = RecordedFailureError if failure["ends"] else RecordedToolError
            raise kind(failure["error"], failure["text"])

    @property
    def cancels(self) -> bool:
        """True if the run was cancelled: what is recorded is undone, and nothing else happens."""
        return self.document is not None and self.document.cancels

    def cancelled(self) -> CancelledInsideError:
        """Return the error that ends the invocations of a cancelled run."""
        return CancelledInsideError(self.id, None if self.document is None else self.document.reason)

    def limits_of(self, path: str, own: UsageLimits | None) -> UsageLimits | None:
        """Return the limits of the invocation at a place: its own, for the outermost one also those of the run."""
        return own if path or self.document is None else narrowest(own, self.document.limits)

    # --- effects

    async def ask(self, effect: CallModel, invocation: Suspendable, perform: Callable[..., Any]) -> ModelReplied:
        """Return the recorded reply to a model request; else ask the model, and record its reply."""
        path = invocation.place.path
        number = self._replies.get(path, 0)
        key = f"{path}#r{number}"
        self._replies[path] = number + 1
        if (record := self._records.get(key)) is not None:
            with self._reading():
                recorded = replace(reply_from_dict(read(record.data)), is_replayed=True)
            if not self.cancels:
                # Interceptors see it again; the record has what they returned, and calls that have happened.
                await perform(CallModel(effect.request, recorded), invocation)
                return recorded
            if recorded.response.ai_message.tool_execution_requests:
                return recorded
        if self.cancels:
            raise self.cancelled()
        usage = usage_of(invocation)
        replied: ModelReplied = await perform(effect, invocation)
        if self.generation is not None:
            if self.write_events is not None:  # after a crash, only events since the last reply are produced again
                await self.written_events()
            state = invocation.state
            requests = replied.response.ai_message.tool_execution_requests
            sent = replied.sent
            refused = [
                (sent is not None and each.name not in sent) or _misfit(each, invocation) is not None
                for each in requests
            ]
            unfit = [index for index, is_refused in enumerate(refused) if is_refused]
            data = reply_to_json(state, self._written.get(path), replied, usage, unfit)
            await self._write(StoredRecord(key, "reply", data))
            self._written[path] = state
        return replied

    async def call(self, effect: RunTool, invocation: Suspendable) -> ToolFinished | ToolSuspended:
        """Run one tool call at its place."""
        self._raise_if_elsewhere(invocation)
        number = len(invocation.state.executions) + effect.index
        place = _below(invocation.place.path, number)
        self._fresh.add(place)
        environment = invocation.environment
        context = replace(environment.context, place=RunPlace(self, place, place))
        tools, listeners, name = environment.tools, environment.listeners, effect.request.name
        if self.next_record(place) == "result":
            tools, listeners = {name: self._recorded_tool(effect.request, place, invocation)}, None
        elif name not in tools and (refusal := self._refusal_of(place)) is not None:
            tools = {name: _tool_that(lambda _: refusal, name)}
        elif place in self._stored_calls and (tool := invocation.toolset.former.get(name)) is not None:
            tools = {name: tool, **tools}
        environment = replace(environment, context=context, tools=tools, listeners=listeners)
        try:
            return ToolFinished(effect.index, await execute_tool(effect.request, environment))
        except ToolSuspension as suspension:
            return ToolSuspended(effect.index, suspension.details)

    def _refusal_of(self, place: str) -> Encoded | None:
        """Return the result of a call that a person rejected or failed; None for others.

        The model reads it also if the identity of the run may not call the tool any more.
        """
        given = self._answers_at(place)
        if not given or given[-1].answer.kind not in ("reject", "fail"):
            return None
        answer = given[-1].answer
        return EncodedInFull(printable(answer.reason or ""), is_error=True, failed=answer.kind == "fail")

    def _answers_at(self, place: str) -> list[GivenAnswer]:
        """Return the answers to a call and its attempts, oldest first."""
        return [each for each in self._given() if each.call_id == place or each.call_id.startswith(f"{place}.")]

    def _raise_if_elsewhere(self, invocation: Suspendable) -> None:
        """Raise `RunIncompatibleError` if an answered call would run on another server than its person saw.

        A name says nothing about a tool of an MCP server: while the call waited, the server can have gone, another one
        can list a tool of that name, or the server can have changed the tool. All calls of the reply are checked before
        one of them runs. The answer stays, for a worker that reaches the same tool.
        """
        if self.cancels:  # nothing runs any more
            return
        state, environment = invocation.state, invocation.environment
        for index, pending in enumerate(state.pending):
            place = _below(invocation.place.path, len(state.executions) + index)
            given = self._answers_at(place)
            if not given or given[-1].answer.kind in ("reject", "fail") or self._has_result(place):
                continue
            tool, seen = environment.tools.get(pending.request.name), given[-1].origin
            now = None if tool is None else origin_of(tool, pending.request)
            if now == seen:
                continue
            name = repr(pending.request.name)
            if seen is None:
                reason = f"the tool {name} was not of an MCP server when its call was answered, and now is"
            else:
                reason = f"MCP server {seen.mcp_server!r} does not offer the tool {name} now, or has changed it"
            raise RunIncompatibleError(self.id, reason)

    def check_fits(self, invocation: Suspendable) -> None:
        """Raise `RunIncompatibleError` if a stored call without a result does not fit this program.

        Called before the first effect of an invocation. While programs are replaced, an older one may get a run with
        calls that only the newer one knows. If it went on, the model would read that a tool is unknown, and pay again.
        A call that was refused when the reply came, such as one of a tool that the model made up, is refused again.
        """
        path, state = invocation.place.path, invocation.state
        if path in self._checked:
            return
        self._checked.add(path)
        if not invocation.is_resumed or self.cancels:
            return
        unfit: Sequence[int] = ()
        requests = {index: each.request for index, each in enumerate(state.pending) if each.status == "waiting"}
        if (record := self._records.get(f"{path}#r{self._replies.get(path, 0)}")) is not None:
            with self._reading():
                written = read(record.data)
                reply, unfit = reply_from_dict(written).response.ai_message, written.get("unfit", ())
            requests = dict(enumerate(reply.tool_execution_requests))
        for index, request in requests.items():
            place = _below(path, len(state.executions) + index)
            if index in unfit:
                continue
            self._stored_calls.add(place)
            if not self._has_result(place) and (reason := _misfit(request, invocation, is_stored=True)) is not None:
                raise RunIncompatibleError(self.id, reason)

    def _has_result(self, place: str) -> bool:
        """Return True if the call at a place, or an attempt of it, has a recorded result."""
        return any(
            record.kind == "result" and (key == place or key.startswith(f"{place}."))
            for key, record in self._records.items()
        )

    # --- recorded results

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Read records inside the block. Raises `RunIncompatibleError` for those of another version of the program."""
        try:
            yield
        except (ValueError, KeyError, TypeError, TranscriptError) as error:
            raise RunIncompatibleError(self.id, f"its records cannot be read: {error}") from error

    def next_record(self, call: str) -> str | None:
        """Return the kind of the record that the next attempt of a call has; None if the tool will run."""
        record = self._records.get(_attempt(call, self._attempts.get(call, 0) + 1))
        return None if record is None else record.kind

    def _recorded_tool(self, request: ToolExecutionRequest, place: str, invocation: Suspendable) -> Tool:
        """Return the tool of a call with a recorded result, for every identity.

        If this program no longer has it, or it takes other arguments, the tool only gives the result.
        """
        tool = _stored_tool(request.name, invocation)
        if tool is not None and _fault_of(tool, request) is None:
            return tool if tool.access is None else replace(tool, access=None)

        def give(call: ToolCall) -> Encoded:
            encoded = self._result_in(self._last_record(place))
            if call.environment.ran is not None and not encoded.is_error:  # for its compensation
                call.environment.ran[id(call.request)] = call
            return encoded

        return _tool_that(give, request.name)

    def _last_record(self, call: str) -> StoredRecord:
        """Return the record of the last attempt of a call that has one."""
        number = 1
        while (after := self._records.get(_attempt(call, number + 1))) is not None and after.kind == "result":
            number += 1
        return self._records[_attempt(call, number)]

    def _result_in(self, record: StoredRecord, tool: Tool | None = None, call: ToolCall | None = None) -> Encoded:
        """Return the result in a record, in the type of `tool`. Raises a recorded error.

        `call` gets the arguments that the tool had.
        """
        with self._reading():
            written = read(record.data)
            result = result_from_dict(written)
        if call is not None and written.get("arguments") is not None:
            with suppress(ToolArgumentsError):
                call.arguments = decoded(call.tool, call, written["arguments"])
        if isinstance(result, Exception):
            raise result
        if tool is not None:
            result.value = restored_result(tool.returns, result.value)
        return result

    async def replay(self, step: ToolStep, call: ToolCall) -> Encoded:
        """Let the interceptors of a call see its recorded result again.

        They see the arguments that the tool had. What they return counts, unless the record has what output guardrails
        let the model read.
        """
        place: RunPlace = call.context.place
        last, is_judged = self._last_record(place.call), self.is_judged(place.call)
        with self._reading():
            arguments = read(self._records[place.call].data).get("arguments")
        if arguments is not None:
            try:
                call = call.with_arguments(decoded(call.tool, call, arguments))
            except ToolArgumentsError:
                return self._result_in(last, call.tool)
        self._decoded[place.call] = call.arguments
        if not is_judged:
            return await step(call)
        try:
            await step(call)
        except EndsInvocation:
            raise
        except Exception as error:
            logger.debug("an interceptor of tool %r failed around its recorded result: %s", call.tool.name, error)
        return self._result_in(last, call.tool)

    def is_judged(self, call: str) -> bool:
        """Return True if the record of a call has what output guardrails let the model read."""
        with self._reading():
            return bool(read(self._last_record(call).data).get("judged", False))

    async def judge(self, guarded: ToolStep, call: ToolCall) -> Encoded:
        """Run a call and its output guardrails, and record what they let the model read in place of the tool's result.

        The tool's own result is recorded if the guardrails fail or are cancelled, because the tool has run.
        """
        place: RunPlace = call.context.place
        self._to_judge[place.call] = None
        try:
            encoded = await guarded(call)
            unjudged = self._to_judge[place.call]
            if unjudged is not None:
                record = _result_record(unjudged.path, encoded, unjudged.arguments, is_judged=True)
                await self._add_record(replace(record, replaces=unjudged.result is None))
            return encoded
        except BaseException:
            with suppress(LeaseLostError, RunStoreError):  # the next owner then finds an unknown outcome
                await self._record_unjudged(place.call)
            raise
        finally:
            del self._to_judge[place.call]

    async def _record_unjudged(self, call: str) -> None:
        """Record the result of a call that output guardrails have not judged, if there is one."""
        unjudged = self._to_judge.get(call)
        if unjudged is not None and unjudged.result is not None:
            self._to_judge[call] = replace(unjudged, result=None)
            await self._add_record(_result_record(unjudged.path, unjudged.result, unjudged.arguments))

    # --- one tool

    def note_decoded(self, call: ToolCall) -> None:
        """Remember the arguments that the model gave to a call, to know later whether they were changed."""
        self._decoded[call.context.place.call] = call.arguments

    def _changed_arguments(self, call: ToolCall) -> dict[str, Any] | None:
        """Return the arguments of a call as JSON values if a person, a guardrail or an interceptor changed them."""
        given = self._decoded.get(call.context.place.call, call.arguments)
        if call.arguments is None or call.arguments is given:
            return None
        with suppress(Exception):  # any exception of a value's own serializers
            return json_arguments(call)
        return None

    def first_answer(self, place: RunPlace) -> Answer | None:
        """Return the rejection of a call, or the approval that changed its arguments; only once for each call."""
        if place.call not in self._fresh:
            return None
        self._fresh.discard(place.call)
        for each in reversed(self._answers(place.call)):
            if each.answer.kind == "reject":
                return each.answer
            if each.answer.kind == "approve" and each.answer.arguments is not None:
                self._edited.add(place.call)
                return each.answer
        return None

    def approval_of(self, call: ToolCall, arguments: Mapping[str, Any]) -> GivenAnswer | None:
        """Return the approval of a call with these arguments, which are those of `call` as JSON values.

        Where the model gave no value, a default of another version of the program voids no approval: a parameter may be
        new. What a guardrail or an interceptor changed must be what the person saw.
        """
        place: RunPlace = call.context.place
        approvals = [each for each in self._answers(place.call) if each.answer.kind == "approve"]
        if not approvals:
            return None
        if place.call in self._edited:  # a person chose them; guardrails may have changed them since
            self._edited.discard(place.call)
            return approvals[-1]
        written = read_arguments(call.request)
        known = self._decoded.get(place.call)
        model = written if known is None else json_arguments(call.with_arguments(known))
        defaults = {name for name in arguments if name not in written and arguments[name] == model.get(name)}

        def without_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in values.items() if name not in defaults}

        # The arguments that a person replaced are not approved.
        unchanged = [each for each in approvals if each.answer.arguments is None]
        shown = without_defaults(arguments)
        return next((each for each in reversed(unchanged) if without_defaults(each.asked) == shown), None)

    def forget_edit(self, call: str) -> None:
        """Forget that a person chose the arguments of a call: its next attempt needs a separate approval."""
        self._edited.discard(call)

    def _given(self) -> Sequence[GivenAnswer]:
        return self.document.answers if self.document is not None else ()

    def _answers(self, place: str) -> list[GivenAnswer]:
        return [each for each in self._given() if each.call_id == place]

    def suspend(
        self,
        call: ToolCall,
        path: str,
        kind: Any,
        reason: str | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> ToolSuspension:
        """Add a pending call, and return the exception that suspends the call."""
        tool, context, origin = call.tool, call.context, origin_of(call.tool, call.request)
        attributes = attributes or {}
        if origin is not None:
            attributes = {"mcp_server": origin.mcp_server, **attributes}
        pending = PendingCall(
            path, call.request.name, json_arguments(call), qualified(context.service), kind, reason, attributes
        )
        self._waiting[path] = WaitingCall(
            call=pending,
            method=context.method,
            approvers=tool.approvers,
            not_self=tool.not_self,
            origin=origin,
        )
        return ToolSuspension({"kind": kind})

    async def run_tool(self, step: ToolStep, call: ToolCall) -> Encoded:
        """Return the recorded result of a tool; else run it, and record its result."""
        place: RunPlace = call.context.place
        attempt = self._attempts[place.call] = self._attempts.get(place.call, 0) + 1
        path = _attempt(place.call, attempt)
        await self._record_unjudged(place.call)  # of an earlier attempt
        if path != place.path:
            object.__setattr__(call.context, "place", RunPlace(self, place.call, path))
        if (record := self._records.get(path)) is not None:
            return await self._recorded(step, call, path, record)
        if call.tool.is_service:
            try:
                return await self._run(step, call, path)
            except CancelledInsideError:
                raise ToolSuspension({"kind": "cancelled"}) from None
        if self.cancels and not place.call.endswith(_COMPENSATION):
            raise ToolSuspension({"kind": "cancelled"})  # the other calls of the reply are read from their records
        if self.generation is not None:
            if (starts := self._starts.get(path, 0)) and (known := self._unknown(call, path, starts)) is not None:
                await self._keep(path, known, call)
                return known
            return await self._run_recorded(step, call, path)
        return await self._run(step, call, path)

    async def _run_recorded(self, step: ToolStep, call: ToolCall, path: str) -> Encoded:
        """Run a tool between the records of its start and its result."""
        number = self._starts[path] = self._starts.get(path, 0) + 1
        recorder = _Recorder.of(self, call, path)
        start = json.dumps({"version": 1, "atomic": recorder is not None})
        await self._write(StoredRecord(f"{path}#start" + (f".{number}" if number > 1 else ""), "start", start))
        if recorder is None:
            return await self._run(step, call, path)
        token = current_recorder.set(recorder)
        try:
            return await self._run(step, call, path, recorder)
        finally:
            current_recorder.reset(token)

    async def _run(self, step: ToolStep, call: ToolCall, path: str, recorder: _Recorder | None = None) -> Encoded:
        try:
            encoded = await step(call)
        except ToolDeferred as deferred:
            if not call.tool.deferred:
                raise
            await self._keep(path, deferred, call)
            raise self.suspend(call, path, "deferred", deferred.reason, _json_attributes(call.tool, deferred)) from None
        except (Exception, asyncio.CancelledError) as error:
            if recorder is not None and (record := await self._read_back(recorder, path, error)) is not None:
                logger.warning(
                    "tool %r of run %s has committed its result, so its error is dropped: %s",
                    call.tool.name,
                    self.id,
                    fact_of(error),
                )
                return await self._recorded(step, call, path, record)
            if not isinstance(error, (EndsInvocation, asyncio.CancelledError)):
                await self._keep(path, error, call)
            raise
        if recorder is not None and recorder.is_written:
            self._note_unjudged(path, call)
        elif call.context.place.call in self._to_judge:
            self._note_unjudged(path, call, encoded)
        else:
            await self._keep(path, encoded, call)
        return encoded

    async def _recorded(self, step: ToolStep, call: ToolCall, path: str, record: StoredRecord) -> Encoded:
        """Return the recorded result of a call. Raises `ToolSuspension` while a deferred one has no answer."""
        if record.kind == "deferred":
            with self._reading():
                deferred = read(record.data)
            return await self._deferred(step, call, path, deferred)
        self._note_unjudged(path, call)
        return self._result_in(record, call.tool, call)

    async def _read_back(self, recorder: _Recorder, path: str, error: BaseException) -> StoredRecord | None:
        """Return the result that a transaction has recorded although its call raised an error; None if it has not.

        Nobody gets a result before this is known, so a cancellation waits for it. Raises `LeaseLostError`, and
        `RunStoreError` if the store does not answer until the lease has ended: the run then stays as it is.
        """
        recorder.close()
        if not recorder.has_begun:
            return None
        cancelled = error if isinstance(error, asyncio.CancelledError) else None
        reading = asyncio.ensure_future(self._using(recorder.read_back))
        while not reading.done():
            try:
                await asyncio.wait({reading})
            except asyncio.CancelledError as again:
                cancelled = again
        try:
            record: StoredRecord | None = reading.result()
        except LeaseLostError:
            if cancelled is not None:  # for example because the lease was lost
                raise cancelled from None
            raise
        if record is not None:
            self._records[path] = record
        elif cancelled is not None:
            raise cancelled
        return record

    def _note_unjudged(self, path: str, call: ToolCall, result: Encoded | None = None) -> None:
        """Remember an attempt whose result output guardrails will judge; `result` is not recorded yet."""
        place: RunPlace = call.context.place
        if place.call in self._to_judge:
            self._to_judge[place.call] = _Unjudged(path, self._changed_arguments(call), result)

    async def _keep(self, path: str, result: Encoded | Exception | ToolDeferred, call: ToolCall) -> None:
        """Record a result."""
        if not isinstance(result, ToolDeferred):
            self._note_unjudged(path, call)
        await self._add_record(self.result_record(path, result, call))

    def result_record(self, path: str, result: Encoded | Exception | ToolDeferred, call: ToolCall) -> StoredRecord:
        """Return the record of a result, with the arguments of the call if they are not the model's."""
        return _result_record(path, result, self._changed_arguments(call))

    async def _add_record(self, record: StoredRecord) -> None:
        """Write a record now, or remember it for a suspension."""
        if self.generation is not None:
            await self._write(record)
        else:
            self._results[record.key] = record

    async def _deferred(self, step: ToolStep, call: ToolCall, path: str, written: Mapping[str, Any]) -> Encoded:
        """Return the answer to a deferred call, or run the tool again with it. Raises `ToolSuspension` without one."""
        for each in reversed(self._answers(path)):
            if each.answer.kind == "respond" and getattr(call.tool.function, TAKES_ANSWERS, False):
                token = current_answer.set(DeferredAnswer(written["attributes"], each.answer.value))
                try:
                    return await self.run_tool(step, call)  # the next attempt, with its own records
                finally:
                    current_answer.reset(token)
            if each.answer.kind in ("respond", "fail"):
                return _supplied(call.tool, each.answer)
        raise self.suspend(call, path, "deferred", written["reason"], written["attributes"])

    def _unknown(self, call: ToolCall, path: str, starts: int) -> Encoded | None:
        """Return the result of a call that had started; None to run it again. Raises `ToolSuspension` to ask."""
        key = f"{path}#start" + (f".{starts}" if starts > 1 else "")
        if read(self._records[key].data)["atomic"] and path not in self._outside:
            return None  # its transaction contains the record, so it did not happen
        answers = [each.answer for each in self._answers(path)]
        supplied = [each for each in answers if each.kind in ("respond", "fail")]
        if supplied:
            encoded = _supplied(call.tool, supplied[-1])
            # For compensation, a person's word that the call failed is a failure of the tool.
            return EncodedInFull(encoded.text, is_error=True, failed=True) if supplied[-1].kind == "fail" else encoded
        mode = call.tool.on_unknown_outcome
        if mode == "retry" or len([each for each in answers if each.kind == "retry"]) >= starts:
            return None
        if mode == "ask":
            raise self.suspend(call, path, "unknown_outcome")
        return EncodedInFull(UNKNOWN.format(tool=call.tool.name), is_error=True)

    # --- suspending

    def note_suspended(self, invocation: Suspendable) -> None:
        """Remember an invocation that was suspended, for `store_suspension`."""
        self._suspended[invocation.place.path] = (invocation, True)

    def pending_below(self, path: str) -> tuple[PendingCall, ...]:
        """Return the pending calls of the invocation at a place, and of services within."""
        waiting = {**{each.call.id: each for each in self._retained()}, **self._waiting}
        found = [each for each in waiting if not path or _is_within(each, path)]
        return tuple(waiting[each].call for each in sorted(found, key=place_order))

    def _retained(self) -> Sequence[WaitingCall]:
        return self.document.waiting if self.document is not None else ()

    async def store_suspension(self, run: StoredRun | None) -> None:
        """Store the suspended run, in one transaction. `run` is the header of a run that is not stored yet."""
        assert self.document is not None
        waiting = {**{each.call.id: each for each in self._retained()}, **self._waiting}
        ordered = tuple(self._with_outer(waiting[each]) for each in sorted(waiting, key=place_order))
        document = self.document = self.document.changed(waiting=ordered)
        self.pending = document.pending
        records = [*self._snapshot_records()]
        events = [*(self.new_events() if self.new_events is not None else ()), event_to_json(self.suspension)]
        if self.generation is not None:
            changes = RunChanges(status="suspended", document=document.to_json())
            await self._using(lambda store: store.append(self.id, self._owned, records, changes, events))
            return
        assert run is not None
        run = replace(run, id=self.id, status="suspended", document=document.to_json())
        if not await self._using(lambda store: store.create(run, [*self._buffered(), *records])):
            raise RunConflictError(self.id, "another call")

    def _with_outer(self, waiting: WaitingCall) -> WaitingCall:
        """Return the pending call with the calls of services that it is part of."""
        steps = waiting.call.id.split("/")
        if len(steps) == 1 or waiting.outer:
            return waiting
        outer = []
        for depth, step in enumerate(steps[:-1]):
            invocation = self._suspended["/".join(steps[:depth])][0]
            number = int(step.partition(".")[0])
            request = invocation.state.pending[number - len(invocation.state.executions)].request
            context = invocation.context
            place = "/".join((*steps[:depth], str(number)))
            service = qualified(context.service)
            outer.append(
                OuterCall(
                    id=place,
                    service=service,
                    method=context.method,
                    tool_name=request.name,
                    arguments=request.arguments,
                )
            )
        return replace(waiting, outer=tuple(outer))

    @property
    def suspension(self) -> RunSuspended:
        """The event of the suspension."""
        return RunSuspended(self.id, self.pending)

    def _snapshot_records(self) -> Sequence[StoredRecord]:
        records = []
        for path, (invocation, _) in self._suspended.items():
            number = self._snapshots[path] = self._snapshots.get(path, 0) + 1
            deadline = invocation.deadline
            remaining = None if deadline is None else max(deadline.at - time.monotonic(), 0.0)
            notes = writable(invocation.context.notes)
            replies, usage = self._replies.get(path, 0), usage_of(invocation)
            data = snapshot_to_json(invocation.state, replies, remaining, notes, usage)
            records.append(StoredRecord(f"{path}#s{number}", "snapshot", data))
        return records

    def _buffered(self) -> Sequence[StoredRecord]:
        """Return the records of results within suspended calls; the states contain all others."""
        calls = [
            _below(path, len(invocation.state.executions) + index)
            for path, (invocation, _) in self._suspended.items()
            for index, each in enumerate(invocation.state.pending)
            if each.status == "suspended"
        ]
        return [record for path, record in self._results.items() if any(_is_within(path, call) for call in calls)]

    async def written_events(self) -> None:
        """Wait until all events so far are stored. Raises `LeaseLostError` and `RunStoreError`."""
        if (write := self.write_events) is not None:
            await self._using(lambda _: write())

    async def end(self, changes: RunChanges) -> None:
        """Write the end of the run into its header."""
        await self._using(lambda store: store.append(self.id, self._owned, [], changes))

    # --- the store

    @property
    def _owned(self) -> int:
        assert self.generation is not None
        return self.generation

    async def _write(self, record: StoredRecord) -> None:
        await self._using(lambda store: store.append(self.id, self._owned, [record]))
        self._records[record.key] = record

    async def _using(self, use: Callable[[RunStore], Awaitable[Any]]) -> Any:
        """Use the store. Raises `LeaseLostError`, and `RunStoreError` for errors of the store."""
        assert self.store is not None
        try:
            return await use(self.store)
        except LeaseLostError:
            raise
        except Exception as error:
            raise RunStoreError(self.id, fact_of(error)) from error


def fact_of(error: BaseException) -> str:
    """Return the type and the text of an error of a store, without the statement and its values, such as documents."""
    cause = getattr(error, "orig", None)  # of SQLAlchemy: the error of the database
    return f"{type(error).__name__}: {error if cause is None else cause}"


# --- recording in the tool's own transaction


class _Recorder(TransactionRecorder):
    """Records the result of one tool call in the tool's own transaction.

    A call can end before its transaction: by its time limit while its thread goes on, by its cancellation, or with its
    connection. Then `close` is called, and `read_back` tells what happened:

    - A transaction that has recorded before `close` may be committed. `read_back` waits until it has ended.
    - One that records later finds that the recorder is closed, and is rolled back.

    Therefore `record_in` looks after its statement, and `close` comes before reading.
    """

    def __init__(self, session: RunSession, call: ToolCall, path: str, function: Any) -> None:
        self._session, self._call, self._path, self._function = session, call, path, function
        self.has_begun = self.is_written = self._is_closed = False
        self._loop = asyncio.get_running_loop()

    @classmethod
    def of(cls, session: RunSession, call: ToolCall, path: str) -> _Recorder | None:
        """Return the recorder of a call; None if its tool is not transactional, or the store has no database."""
        tool = call.tool
        function = transactional_function(tool)
        if function is None or not hasattr(session.store, "record_in"):
            return None
        if tool.execution.is_non_blocking and call.environment.runner.is_for_loop:
            return None  # it blocks the event loop, on which the store writes
        return cls(session, call, path, function)

    def belongs_to(self, function: object) -> bool:
        """See `TransactionRecorder`."""
        return function is self._function

    def writes_to(self, bind: Any) -> bool:
        """See `TransactionRecorder`."""
        store: Any = self._session.store
        return bool(store.uses(bind))

    async def outside(self) -> None:
        """See `TransactionRecorder`."""
        session = self._session
        session._outside.add(self._path)
        await session._write(StoredRecord(f"{self._path}#outside", "outside", '{"version":1}'))

    def outside_waiting(self) -> None:
        """See `TransactionRecorder`."""
        asyncio.run_coroutine_threadsafe(self.outside(), self._loop).result()

    def outside_in(self, connection: Any) -> None:
        """See `TransactionRecorder`."""
        record = StoredRecord(f"{self._path}#outside", "outside", '{"version":1}')
        self._store.note_in(connection, self._session.id, self._session._owned, record)
        self._raise_if_closed()
        self._session._outside.add(self._path)

    def record_in(self, connection: Any, value: Any) -> None:
        """See `TransactionRecorder`."""
        result = value if isinstance(value, ToolDeferred) else self._call.tool.encode(value)
        record = self._session.result_record(self._path, result, self._call)
        self.has_begun = True
        self._store.record_in(connection, self._session.id, self._session._owned, record)
        self._raise_if_closed()
        self.is_written = True

    def close(self) -> None:
        """Let every transaction of the call fail that has not recorded its result yet."""
        self._is_closed = True

    async def read_back(self, store: Any) -> StoredRecord | None:
        """Return the result that was committed, or None, after a commit that is under way has ended."""
        found: StoredRecord | None = await store.committed(self._session.id, self._session._owned, self._path)
        return found

    @property
    def _store(self) -> Any:
        return self._session.store

    def _raise_if_closed(self) -> None:
        if self._is_closed:
            raise TransactionRolledBackError(self._call.tool.where, "its call ended before its transaction")


def transactional_function(tool: Tool) -> Any:
    """Return the function of a tool if `@sql.transactional` made it, else None."""
    function = tool.function
    if function is None and isinstance(tool.bean, type):
        function = getattr(tool.bean, tool.member, None)
    function = getattr(function, "__func__", function)
    return function if getattr(function, TRANSACTIONAL_MARK, None) is function else None


def origin_of(tool: Tool, request: ToolExecutionRequest) -> ToolOrigin | None:
    """Return where a call of the tool goes, if that is another server."""
    origin = getattr(tool.function, TOOL_ORIGIN, None)
    return None if origin is None else cast("ToolOrigin", origin(request))


# --- the layers


def in_run(perform: Callable[..., Any]) -> Callable[..., Any]:
    """Return the layer of effects: model requests are recorded, tool calls get their places."""

    def performing(effect: CallModel | RunTool, invocation: Suspendable) -> Awaitable[Any]:
        session: RunSession = invocation.place.session
        session.check_fits(invocation)
        if isinstance(effect, RunTool):
            return session.call(effect, invocation)
        return session.ask(effect, invocation, perform)

    return performing


def replaying(perform: Callable[..., Any]) -> Callable[..., Any]:
    """Return the layer inside of interceptors that answers a model request with its recorded reply."""

    def performing(effect: CallModel | RunTool, invocation: Suspendable) -> Awaitable[Any]:
        if isinstance(effect, CallModel) and effect.recorded is not None:
            return _awaited(effect.recorded)
        return cast("Awaitable[Any]", perform(effect, invocation))

    return performing


async def _awaited(reply: ModelReplied) -> ModelReplied:
    return reply


def answered(step: ToolStep, tool: Tool) -> ToolStep:
    """Return the outermost layer of a tool: it answers rejected calls, and replaces arguments that a person changed."""

    async def run(call: ToolCall) -> Encoded:
        place: RunPlace | None = call.context.place
        if place is None:
            return await step(call)
        session = place.session
        answer = session.first_answer(place)
        if answer is not None and answer.kind == "reject":
            return EncodedInFull(printable(answer.reason or ""), is_error=True)
        if place.is_recorded:
            session.forget_edit(place.call)
            return await session.replay(step, call)
        session.note_decoded(call)
        if answer is None:
            return await step(call)
        return await step(call.with_arguments(decoded(tool, call, answer.arguments or {})))

    return run


def unless_run(checked: ToolStep, step: ToolStep) -> ToolStep:
    """Return a step that takes the checks before a tool only if the tool will run: a recorded call has passed them."""

    async def run(call: ToolCall) -> Encoded:
        place: RunPlace | None = call.context.place
        has_run = place is not None and place.session.next_record(place.call) is not None
        return await (step if has_run else checked)(call)

    return run


def judging(guarded: ToolStep, step: ToolStep) -> ToolStep:
    """Return the layer around output guardrails: what they let the model read is recorded, and not judged again."""

    async def run(call: ToolCall) -> Encoded:
        place: RunPlace | None = call.context.place
        if place is None:
            return await guarded(call)
        if place.is_recorded and place.session.is_judged(place.call):
            return await step(call)
        return await place.session.judge(guarded, call)

    return run


def decoded(tool: Tool, call: ToolCall, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return validated arguments for a tool, from JSON values. Raises `ToolArgumentsError`."""
    request = replace(call.request, arguments=json.dumps(dict(arguments)))
    return dict(arguments) if tool.decode is None else tool.decode(request)


def approval(step: ToolStep, tool: Tool) -> ToolStep:
    """Return the layer that suspends calls that need approval; tools that never do keep their step."""
    if not tool.requires_approval:
        return step

    async def run(call: ToolCall) -> Encoded:
        place: RunPlace | None = call.context.place
        if place is None:
            return EncodedInFull(NOT_APPROVABLE, is_error=True)
        arguments = json_arguments(call)
        given = place.session.approval_of(call, arguments)
        if given is not None:
            from .documents import read_person

            object.__setattr__(call.context, "approved_by", read_person(given.by))
            if given.answer.arguments is None and given.asked != arguments:  # it runs with what the person saw
                call = call.with_arguments(decoded(tool, call, given.asked))
        elif await _needs_approval(tool, call):
            raise place.session.suspend(call, place.call, "approval")
        return await step(call)

    return run


async def _needs_approval(tool: Tool, call: ToolCall) -> bool:
    needed: Any = tool.requires_approval
    if isinstance(needed, bool):
        return needed
    execution = execution_of(needed, getattr(needed, EXECUTION_MARK, None))
    try:
        visible = {name: _default(value) for name, value in call.visible_arguments().items()}
        ask = functools.partial(needed, visible, call.context)
        return bool(await call.environment.runner.run(execution, ask, f"{tool.name} (requires_approval)"))
    except asyncio.CancelledError:
        raise
    except Exception as error:
        logger.warning("requires_approval of tool %r failed, so the call needs approval: %s", tool.name, error)
        return True


def recording(step: ToolStep, tool: Tool) -> ToolStep:
    """Return the innermost layer of a tool, which records its results."""

    async def run(call: ToolCall) -> Encoded:
        place: RunPlace | None = call.context.place
        if place is None:
            return await step(call)
        return await place.session.run_tool(step, call)

    return run


# --- values


def usage_of(invocation: Suspendable) -> dict[str, Any] | None:
    """Return the usage that an invocation with limits has counted, as JSON values."""
    account = invocation.account
    if account is None or account.limits is None:
        return None
    usage = account.usage
    tokens = {each.name: getattr(usage.tokens, each.name) for each in fields(usage.tokens)}
    cost = None if usage.cost is None else str(usage.cost)
    return {"model_calls": usage.model_calls, "tool_calls": usage.tool_calls, "tokens": tokens, "cost": cost}


def usage_from_dict(written: Mapping[str, Any]) -> Usage:
    """Return the usage that `usage_of` wrote."""
    cost = None if written["cost"] is None else Decimal(written["cost"])
    return Usage(written["model_calls"], written["tool_calls"], TokenUsage(**written["tokens"]), cost)


def json_arguments(call: ToolCall) -> dict[str, Any]:
    """Return the validated arguments of a call as JSON values, by the model's names, with defaults."""
    from pydantic_core import to_jsonable_python

    names = {each.name: each.shown_name for each in call.tool.visible}
    written = {
        names.get(name, name): to_jsonable_python(_default(value), by_alias=True, serialize_unknown=True)
        for name, value in call.visible_arguments().items()
    }
    return dict(json.loads(json.dumps(written)))


def _default(value: Any) -> Any:
    return value.get_default(call_default_factory=True) if is_field(value) else value


def _json_attributes(tool: Tool, deferred: ToolDeferred) -> dict[str, Any]:
    from pydantic_core import to_jsonable_python

    try:
        return dict(json.loads(json.dumps(to_jsonable_python(deferred.attributes))))
    except Exception as error:
        fact = f"the attributes of ToolDeferred cannot be written as JSON ({error})"
        raise IllegalConfigurationError([Problem(tool.where, fact, "use JSON values")]) from error


def _supplied(tool: Tool, answer: Answer) -> Encoded:
    """Return the result that a person or another system supplied."""
    if answer.kind == "fail":
        return EncodedInFull(printable(answer.reason or ""), is_error=True)
    return tool.encode(supplied_result(tool.returns, answer.value))


def _tool_that(give: Callable[[ToolCall], Encoded], name: str) -> Tool:
    """Return a tool that runs nothing: it gives a known result."""

    async def run(call: ToolCall) -> Encoded:
        return give(call)

    return Tool(
        specification=ToolSpecification(name),
        execution=COROUTINE,
        where=name,
        function=None,
        encode=lambda value: Encoded("", value),
        run=run,
    )


def _stored_tool(name: str, invocation: Suspendable) -> Tool | None:
    """Return the tool of a stored call, also if the identity may no longer call it or a search has not found it."""
    tool: Tool | None = invocation.environment.tools.get(name)
    return tool or invocation.toolset.stored(name) or invocation.plan.toolset.stored(name)


def _misfit(request: ToolExecutionRequest, invocation: Suspendable, *, is_stored: bool = False) -> str | None:
    """Return why a call does not fit this program; None if it fits."""
    tool = _stored_tool(request.name, invocation)
    if tool is None or (not is_stored and request.name in tool.former_names):
        return f"{invocation.plan.where} does not offer the tool {request.name!r}"
    if (fault := _fault_of(tool, request)) is not None:
        return f"the tool {request.name!r} does not accept the arguments of a stored call ({fault})"
    return None


def _fault_of(tool: Tool, request: ToolExecutionRequest) -> str | None:
    """Return what is wrong with the arguments of a call; None if they are valid."""
    if tool.decode is None:
        return None
    try:
        tool.decode(request)
    except ToolArgumentsError as error:
        return "; ".join(f"{path}: {message}" if path else message for path, message in error.problems)
    except Exception as error:  # of a type's own validators
        return message_of(error)
    return None


@dataclass(frozen=True, slots=True)
class _Unjudged:
    """An attempt of a call that output guardrails have not judged. `result` is None if a record has it."""

    path: str
    arguments: dict[str, Any] | None
    result: Encoded | None


def _result_record(
    path: str,
    result: Encoded | Exception | ToolDeferred,
    arguments: Mapping[str, Any] | None = None,
    *,
    is_judged: bool = False,
) -> StoredRecord:
    if isinstance(result, ToolDeferred):
        from pydantic_core import to_jsonable_python

        attributes = to_jsonable_python(result.attributes, serialize_unknown=True)
        data = json.dumps({"version": 1, "reason": result.reason, "attributes": attributes})
        return StoredRecord(path, "deferred", data)
    return StoredRecord(path, "result", result_to_json(result, arguments, is_judged=is_judged))


def _attempt(call: str, number: int) -> str:
    """Return the place of an attempt of a call; interceptors can make several."""
    return call if number == 1 else f"{call}.{number}"


def _below(path: str, number: int) -> str:
    return f"{path}/{number}" if path else str(number)


def _is_within(place: str, call: str) -> bool:
    """Return True if `place` is the place `call`, an attempt of it, or a place within."""
    return place == call or place.startswith((f"{call}/", f"{call}."))


# --- suspending a call


async def suspend(invocation: Any) -> None:
    """Store the run of an invocation that was suspended; an inner invocation waits for the outermost one."""
    session: RunSession = invocation.place.session
    if session.cancels:
        raise session.cancelled()
    session.note_suspended(invocation)
    if invocation.place.path:
        return
    host: StoringHost = invocation.host
    store = await host.run_store()
    stored = None
    if session.document is None:
        plan, context = invocation.plan, invocation.context
        account: Account | None = invocation.account
        left = None
        if account is not None:  # the blocks around the call have ended when the run continues
            left = remaining(account.outer, account.usage if account.limits is not None else None)
        session.document = await describe(
            plan, host, invocation.arguments, context.attributes, invocation.added_by, left
        )
        stored = header(session.id, plan, invocation.memory_key)
        session.store = store
    await session.store_suspension(stored)
