"""The tool calls of a run: what their effects record, the answers of persons to them, and what guardrails make of them.

Not here: recording and replaying an effect (`effects`), the layers that call this (`run_layers`), a tool's own
transaction (`recorder`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from pydantic_core import to_jsonable_python

from ...chat import PendingCall
from ...context import CallPlace
from ...conversations.log import KeptApproval
from ...deferred_answers import TAKES_ANSWERS, DeferredAnswer, current_answer
from ...errors import (
    EndsInvocation,
    LeaseLostError,
    RunCancelledError,
    RunIncompatibleError,
    RunStoreError,
    StoredBeanError,
    ToolArgumentsError,
    ToolDeferred,
)
from ...safe_text import describe_store_error, printable
from ...service_names import stored_name, stored_names
from ...services.answers import restored_result, supplied_result
from ...tools.codec import decode_request
from ...tools.results import Encoded, EncodedInFull
from ...tools.tool_calls import Tool, ToolAttempt, ToolCall, ToolStep, ToolSuspension
from ...tools.written_arguments import change_arguments, with_recorded_arguments
from ..documents import GivenAnswer, WaitingCall
from ..effects import Start, effect
from ..persons import has_role
from ..places import RecordKey, is_compensation, place_of_attempt
from ..recorder import recorder_of
from ..run_answers import Answer, HistoryEntry
from ..run_session import Recorded, RunSession
from .record_contents import has_run_in, result_from_dict, result_to_json
from .stored_calls import json_attributes, origin_of

logger = logging.getLogger("toolbox.runs")

UNKNOWN = (
    "The program stopped during this call of {tool!r}, so it is unknown if the call took effect. "
    "Check its effect before you call it again."
)


def place_of(call: ToolCall) -> CallPlace:
    """Return the place of a call that is part of a run."""
    assert call.context.place is not None
    return call.context.place


@dataclass(frozen=True, slots=True)
class Unjudged:
    """An attempt of a call that output guardrails have not judged. `result` is None if a record has it."""

    place: str
    arguments: Mapping[str, Any] | None
    result: Encoded | None
    has_run: bool


@dataclass(frozen=True, slots=True)
class EditedCall:
    """A call with arguments that a person changed in an approval; `changed` are the names of their parameters."""

    given: GivenAnswer
    call: ToolCall
    changed: frozenset[str]

    def keep_unchanged(self, call: ToolCall) -> ToolCall:
        """Return this call after guardrails have rewritten arguments: they may only rewrite what the person changed."""
        if call is self.call:
            return call
        kept = {name: value for name, value in (self.call.arguments or {}).items() if name not in self.changed}
        rewritten = {name: value for name, value in (call.arguments or {}).items() if name in self.changed}
        return call.with_arguments({**kept, **rewritten})


class CancelledInsideError(RunCancelledError, EndsInvocation):
    """Ends an invocation of a cancelled run, past handlers and interceptors."""


@dataclass(slots=True)
class CallState:
    """What this process knows about one tool call of a run, besides its records."""

    attempts: int = 0
    as_decoded: ToolCall | None = None
    """The call with the arguments that the model gave it, to know later whether they were changed."""
    edits: list[GivenAnswer] = field(default_factory=list)
    """The approvals that change the arguments of the call, and have not been used."""
    was_requested_before: bool = False
    """True if the model made the call before this process continued the run."""
    has_ended_run: bool = False
    """True if the program had refused the call when the model made it, and the run has failed with that reply."""
    is_judged_next: bool = False
    """True while output guardrails wait for the result, which is then recorded as they let it through."""
    unjudged: Unjudged | None = None


class ToolRecords:
    """The tool calls of a run. `call.context.place` says which call it is. `waiting` has those that wait for an answer.

    A call and its attempts are different places: `CallState` is of the call.
    """

    def __init__(self, session: RunSession) -> None:
        self._session = session
        self._calls: dict[str, CallState] = {}
        self._beans: dict[str, dict[str, Any]] = {}
        self.waiting: dict[str, WaitingCall] = {}

    def at(self, call: str) -> CallState:
        """Return what is known about a call."""
        if (state := self._calls.get(call)) is None:
            state = self._calls[call] = CallState()
        return state

    def next_record(self, call: str) -> str | None:
        """Return the kind of the record that the next attempt of a call has; None if the tool will run."""
        record = self._session.recorded(RecordKey(place_of_attempt(call, self.at(call).attempts + 1)))
        return None if record is None else record.kind

    def run_again(self, call: str) -> None:
        """Let a service whose recorded error has ended the run go on from its own records."""
        state = self.at(call)
        self._session.forget(RecordKey(place_of_attempt(call, state.attempts)))
        state.attempts -= 1

    def last_result(self, call: str) -> Recorded:
        """Return the record of the last attempt of a call that has a result."""
        last, number = self._session.recorded(RecordKey(call)), 2
        assert last is not None
        while (after := self._session.recorded(RecordKey(place_of_attempt(call, number)))) and after.kind == "result":
            last, number = after, number + 1
        return last

    # --- running a tool

    async def run_once(self, step: ToolStep, call: ToolCall) -> Encoded:
        """Return the recorded result of the next attempt of a call; else run the tool, and record its result."""
        session, place, call = self._session, place_of(call), call.with_own_attempts()
        state = self.at(place.call)
        state.attempts += 1
        await self._write_unjudged(state)  # of an earlier attempt
        attempt = place.path = place_of_attempt(place.call, state.attempts)
        record = session.recorded(RecordKey(attempt))
        if record is not None and record.kind == "deferred":
            return await self._continue_deferred(step, call, attempt, session.read_record(record))
        if record is None:
            if state.edits and not (session.cancels or session.recorded(RecordKey(attempt, "start"))):
                # What arrives here is not what a person has seen and changed.
                raise self.suspend(call, place.call, "approval")
            if session.cancels and not (call.tool.is_service or is_compensation(place.call)):
                raise ToolSuspension({"kind": "cancelled"})  # the other calls of the reply are read from their records
        try:
            outcome = await self._effect(step, call, attempt)
        except CancelledInsideError:
            if call.tool.is_service:
                raise ToolSuspension({"kind": "cancelled"}) from None
            raise
        if not isinstance(outcome, ToolDeferred):
            return outcome
        if not call.tool.deferred:
            raise outcome
        attributes = json_attributes(call.tool, outcome)
        raise self.suspend(call, attempt, "deferred", outcome.reason, attributes)

    async def _effect(self, step: ToolStep, call: ToolCall, attempt: str) -> Encoded | ToolDeferred:
        """Run a tool as an effect: what it gives is its result, its exception, or that its result comes later."""
        state = self._state_of(call)

        async def run() -> Encoded | ToolDeferred:
            try:
                return await step(call)
            except ToolDeferred as deferred:
                if not call.tool.deferred:
                    raise
                return deferred

        def write(outcome: Encoded | ToolDeferred) -> tuple[str, str] | None:
            has_run = isinstance(outcome, Encoded) and _has_run(call, outcome)
            if isinstance(outcome, Encoded) and state.is_judged_next:  # they record what the model reads
                self._note_unjudged(attempt, call, outcome, has_run=has_run)
                return None
            return self._encode_result(outcome, call, has_run)

        def write_error(error: Exception) -> tuple[str, str] | None:
            if isinstance(error, EndsInvocation):
                return None
            self._note_unjudged(attempt, call, has_run=False)
            return self._encode_result(error, call, has_run=False)

        def read(record: Recorded) -> Encoded | ToolDeferred:
            if record.kind == "deferred":
                written = self._session.read_record(record)
                return ToolDeferred(written["reason"], written["attributes"])
            self.restore_attempt(call, record)
            self._note_unjudged(attempt, call, has_run=has_run_in(self._session.facts_of(record)))
            return self.read_result(record, call.tool)

        start: Start[Encoded | ToolDeferred] | None = None
        if self._session.is_stored and not call.tool.is_service:  # the tool calls of a service have records themselves
            start = Start(
                arguments=call.written_arguments(),
                when_unknown=lambda starts: self._decide_outcome(call, attempt, starts),
                transaction=lambda: recorder_of(self._session, call, attempt, self._encode_result),
            )
        key = RecordKey(attempt)
        outcome = await effect(self._session, key, run, write=write, read=read, write_error=write_error, start=start)
        if isinstance(outcome, Encoded) and (state.unjudged is None or state.unjudged.place != attempt):
            self._note_unjudged(attempt, call, has_run=_has_run(call, outcome))  # its transaction has recorded it
        return outcome

    def _decide_outcome(self, call: ToolCall, attempt: str, starts: Sequence[Recorded]) -> Encoded | None:
        """Return the result of a call that an earlier process has started; None to run the tool.

        Raises `ToolSuspension` to ask a person.
        """
        answers = [each.answer for each in self._session.answers_at(attempt)]
        supplied = [each for each in answers if each.kind in ("respond", "fail")]
        retries = [each for each in answers if each.kind == "retry"]
        decision = call.tool.on_unknown_outcome or call.environment.on_unknown_outcome
        if supplied:
            known = _encode_answer(call.tool, supplied[-1])
            # For compensation, a person's word that the call failed is a failure of the tool.
            if supplied[-1].kind == "fail":
                known = EncodedInFull(known.text, is_error=True, failed=True)
        elif decision == "retry" or len(retries) >= len(starts):
            return None
        elif decision == "ask":
            raise self.suspend(call, attempt, "unknown_outcome")
        else:
            known = EncodedInFull(UNKNOWN.format(tool=call.tool.name), is_error=True)
        self._restore_attempt(call, self._session.read_record(starts[-1]), has_run=not known.is_error)
        return known

    # --- recorded results

    def restore_attempt(self, call: ToolCall, record: Recorded) -> None:
        """Note the attempt of a call whose result is recorded, with its arguments, if the tool ran."""
        self._restore_attempt(
            call, self._session.read_record(record), has_run=has_run_in(self._session.facts_of(record))
        )

    def _restore_attempt(self, call: ToolCall, written: Mapping[str, Any], *, has_run: bool) -> None:
        # Not those of `call`: interceptors are called again around a recorded result, and change its arguments again.
        recorded = written.get("arguments")
        if recorded is None:  # the function of the tool was not called, or the record is of an earlier version
            if not has_run:
                return
            recorded = (self._state_of(call).as_decoded or call).written_arguments()
        arguments = None
        with suppress(ToolArgumentsError):
            arguments = self._call_as_recorded(call, recorded).arguments
        attempt = ToolAttempt(arguments, recorded)
        if has_run:
            call.attempts.note_succeeded(attempt)
        else:
            call.attempts.note_begun(attempt)

    def _call_as_recorded(self, call: ToolCall, recorded: Mapping[str, Any]) -> ToolCall:
        """Return a call with the arguments of a record. Raises `ToolArgumentsError` if they cannot be read back."""
        decoded = self._state_of(call).as_decoded
        return with_recorded_arguments(call, recorded, *([] if decoded is None else [decoded]))

    async def _continue_deferred(
        self, step: ToolStep, call: ToolCall, attempt: str, written: Mapping[str, Any]
    ) -> Encoded:
        """Return the answer to a deferred call, or run the tool again with it. Raises `ToolSuspension` without one."""
        recorded = written.get("arguments")
        for each in reversed(self._session.answers_at(attempt)):
            if each.answer.kind == "respond" and getattr(call.tool.function, TAKES_ANSWERS, False):
                token = current_answer.set(DeferredAnswer(written["attributes"], each.answer.value))
                try:
                    # The next attempt, with its own records, and the arguments that guardrails and persons have seen.
                    seen = call if recorded is None else self._call_as_recorded(call, recorded)
                    return await self.run_once(step, seen)
                finally:
                    current_answer.reset(token)
            if each.answer.kind in ("respond", "fail"):
                encoded = _encode_answer(call.tool, each.answer)
                self._restore_attempt(call, written, has_run=not encoded.is_error)
                return encoded
        raise self.suspend(call, attempt, "deferred", written["reason"], written["attributes"])

    def read_result(self, record: Recorded, tool: Tool | None = None) -> Encoded:
        """Return the result in a record, in the type of `tool`. Raises a recorded error."""
        written = self._session.read_record(record)
        with self._session.reading():
            result = result_from_dict(written)
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
        session, place = self._session, place_of(call)
        last, first = self.last_result(place.call), session.recorded(RecordKey(place.call))
        assert first is not None
        if session.facts_of(first).get("arguments") is not None:
            try:
                call = with_recorded_arguments(call, session.read_record(first)["arguments"])
            except ToolArgumentsError:
                return self.read_result(last, call.tool)
        self.at(place.call).as_decoded = call
        if not self.is_judged(place.call):
            return await step(call)
        try:
            await step(call)
        except EndsInvocation:
            raise
        except Exception as error:
            logger.debug("an interceptor of tool %r failed around its recorded result: %s", call.tool.name, error)
        return self.read_result(last, call.tool)

    def is_judged(self, call: str) -> bool:
        """Return True if the record of a call has what output guardrails let the model read."""
        return bool(self._session.facts_of(self.last_result(call)).get("judged", False))

    # --- recording

    def _encode_result(
        self, result: Encoded | Exception | ToolDeferred, call: ToolCall, has_run: bool
    ) -> tuple[str, str]:
        """Return the kind and the data of the record of a result, with the arguments that the tool had."""
        beans = self._changed_beans(place_of(call).path)
        if isinstance(result, ToolDeferred):
            attributes = to_jsonable_python(result.attributes, serialize_unknown=True)
            about = {"version": 1, "arguments": call.attempts.written_arguments, **({"beans": beans} if beans else {})}
            return "deferred", json.dumps({**about, "reason": result.reason, "attributes": attributes})
        return "result", result_to_json(result, call.attempts.written_arguments, has_run=has_run, beans=beans)

    def _changed_beans(self, attempt: str) -> Mapping[str, Any]:
        """Return the beans of the conversation that have changed before the result of an attempt, as JSON values.

        All since the last attempt: a transaction that has one record of this one may be rolled back, and another record
        replaces it.
        """
        if (beans := self._session.beans) is None:
            return {}
        changed = self._beans.setdefault(attempt, {})
        with suppress(
            StoredBeanError
        ):  # the tool has run, which must be known; the error comes when the turn is stored
            changed.update(beans.note_changes())
        if changed:
            self._session.last_with_beans = attempt
        return changed

    async def judge(self, guarded: ToolStep, call: ToolCall) -> Encoded:
        """Run a call and its output guardrails, and record what they let the model read in place of the tool's result.

        The tool's own result is recorded if the guardrails fail or are cancelled, because the tool has run.
        """
        state = self._state_of(call)
        state.is_judged_next = True
        try:
            encoded = await guarded(call)
            if (unjudged := state.unjudged) is not None:
                beans = self._changed_beans(unjudged.place)
                data = result_to_json(
                    encoded, unjudged.arguments, has_run=unjudged.has_run, is_judged=True, beans=beans
                )
                await self._session.write_record(
                    RecordKey(unjudged.place), "result", data, replaces=unjudged.result is None
                )
            return encoded
        except BaseException:
            with suppress(LeaseLostError, RunStoreError):  # the next owner then finds an unknown outcome
                await self._write_unjudged(state)
            raise
        finally:
            state.is_judged_next, state.unjudged = False, None

    async def _write_unjudged(self, state: CallState) -> None:
        """Record the result of a call that output guardrails have not judged, if there is one."""
        unjudged = state.unjudged
        if unjudged is not None and unjudged.result is not None:
            state.unjudged = replace(unjudged, result=None)
            beans = self._changed_beans(unjudged.place)
            data = result_to_json(unjudged.result, unjudged.arguments, has_run=unjudged.has_run, beans=beans)
            await self._session.write_record(RecordKey(unjudged.place), "result", data)

    def _note_unjudged(self, attempt: str, call: ToolCall, result: Encoded | None = None, *, has_run: bool) -> None:
        """Remember an attempt whose result output guardrails will judge; `result` is not recorded yet."""
        state = self._state_of(call)
        if state.is_judged_next:
            state.unjudged = Unjudged(attempt, call.attempts.written_arguments, result, has_run)

    # --- persons

    def note_decoded(self, call: ToolCall) -> None:
        """Remember the arguments that the model gave to a call, to know later whether they were changed."""
        self._state_of(call).as_decoded = call

    def find_rejection(self, call: str) -> Answer | None:
        """Return the rejection of a call, if it was not approved with other arguments since."""
        for each in reversed(self._session.answers_at(call)):
            if each.answer.kind == "reject":
                return each.answer
            if each.answer.arguments is not None:
                return None
        return None

    def find_edits(self, call: str) -> list[GivenAnswer]:
        """Return the approvals of a call that change its arguments, oldest first."""
        return [each for each in self._session.answers_at(call) if each.answer.arguments is not None]

    def find_approval(self, call: ToolCall) -> GivenAnswer | None:
        """Return the last approval of a call with these arguments, as the person saw them; an edit only once.

        Where the model gave no value, a default of another version of the program voids no approval: a parameter may be
        new. What a guardrail or an interceptor changed must be what the person saw.
        """
        edits = self._state_of(call).edits
        approvals = [
            each
            for each in self._session.answers_at(place_of(call).call)
            if each.answer.kind == "approve" and (each.answer.arguments is None or each in edits)
        ]
        if not approvals:
            return None
        arguments = call.json_arguments()
        written, known = decode_request(call.request), self._state_of(call).as_decoded
        model = written if known is None or known.arguments is None else known.json_arguments()
        defaults = {name for name in arguments if name not in written and arguments[name] == model.get(name)}

        def without_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in values.items() if name not in defaults}

        shown = without_defaults(arguments)
        return next((each for each in reversed(approvals) if without_defaults(each.asked) == shown), None)

    def as_seen(self, call: ToolCall, given: GivenAnswer) -> ToolCall | None:
        """Return an approved call with the arguments that the person saw; None if they cannot be read back."""
        try:
            return _as_asked(call, given)
        except ToolArgumentsError:
            return None

    def note_used(self, call: ToolCall, given: GivenAnswer) -> None:
        """Note that an approval is used. It voids the edits before it, whose arguments have not come again."""
        state, answers = self._state_of(call), self._session.answers_at(place_of(call).call)
        last = max(number for number, each in enumerate(answers) if each == given)
        state.edits = [each for each in state.edits if each in answers[last + 1 :]]

    def edit(self, call: ToolCall, given: GivenAnswer) -> EditedCall:
        """Return a call with what a person changed in its arguments. Raises `RunIncompatibleError`."""
        assert given.answer.arguments is not None
        self.note_used(call, given)
        try:
            seen = _as_asked(call, given)
            shown, sent = seen.json_arguments(), given.answer.arguments
            edited, names = change_arguments(call.tool, call.request, seen.arguments or {}, shown, sent)
        except ToolArgumentsError as error:
            reason = f"the tool {call.tool.name!r} no longer accepts the arguments of an approval: {error}"
            raise RunIncompatibleError(self._session.id, reason) from error
        return EditedCall(given, call.with_arguments(edited), names)

    async def find_remembered(self, call: ToolCall) -> KeptApproval | None:
        """Return an approval of an earlier call of this tool that the conversation remembers, and that counts now.

        The present rules of the tool count: a person who lacks a role that is required now has approved nothing. If the
        store of the conversation fails, a person is asked.
        """
        tool, find = call.tool, self._session.find_approvals
        if not tool.may_remember or find is None:
            return None
        try:
            found = await find()
        except Exception as error:
            what = describe_store_error(error)
            logger.warning("tool %r needs approval, because its conversation cannot be read: %s", tool.name, what)
            return None
        services, names = stored_names(call.context.service), {tool.name, call.request.name, *tool.former_names}
        for each in reversed(found):
            admits = not tool.approvers or has_role(each.person, tool.approvers)
            if each.service in services and each.shown.tool_name in names and admits:
                return each
        return None

    def note_remembered(self, call: ToolCall, kept: KeptApproval) -> None:
        """Note in the history of the run that a call has the approval of an earlier one."""
        entry = HistoryEntry(
            datetime.now(UTC), kept.shown.by, place_of(call).call, call.request.name, "approve", remembered=True
        )
        self._session.note(entry)

    def suspend(
        self,
        call: ToolCall,
        place: str,
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
            place,
            call.request.name,
            call.json_arguments(),
            stored_name(context.service),
            kind,
            reason,
            attributes,
            call_id=call.request.id,
            may_remember=tool.may_remember and kind == "approval",
        )
        self.waiting[place] = WaitingCall(
            call=pending,
            method=context.method,
            approvers=tool.approvers,
            not_self=tool.not_self,
            origin=origin,
            requested=call.request.arguments,
            expires_after=tool.approval_expires if kind == "approval" else None,
        )
        return ToolSuspension({"kind": kind})

    def _state_of(self, call: ToolCall) -> CallState:
        return self.at(place_of(call).call)


def _as_asked(call: ToolCall, given: GivenAnswer) -> ToolCall:
    return call if given.asked == call.json_arguments() else with_recorded_arguments(call, given.asked)


def _has_run(call: ToolCall, result: Encoded) -> bool:
    """Return True if a result is of the tool itself, and not of a layer that answered for it."""
    return not result.is_error and call.attempts.succeeded is not None


def _encode_answer(tool: Tool, answer: Answer) -> Encoded:
    """Return the result that a person or another system supplied."""
    if answer.kind == "fail":
        return EncodedInFull(printable(answer.reason or ""), is_error=True)
    return tool.encode(supplied_result(tool.returns, answer.value))
