"""Runs a tool once for all processes of a run: records its start and its result, and gives recorded results again.

Not here: how records are stored (`run_records`), the layers that call this (`run_layers`), a tool's own transaction
(`recorder`).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from pydantic_core import to_jsonable_python

from ..chat import PendingCall
from ..context import CallPlace
from ..deferred_answers import TAKES_ANSWERS, DeferredAnswer, current_answer
from ..errors import (
    EndsInvocation,
    LeaseLostError,
    RunCancelledError,
    RunIncompatibleError,
    RunStoreError,
    ToolArgumentsError,
    ToolDeferred,
)
from ..safe_text import printable
from ..services.answers import restored_result, supplied_result
from ..tools.codec import decode_request
from ..tools.results import Encoded, EncodedInFull
from ..tools.tool_calls import Tool, ToolAttempt, ToolCall, ToolStep, ToolSuspension
from ..tools.written_arguments import change_arguments, with_recorded_arguments
from ..transaction_recorder import current_recorder
from .documents import GivenAnswer, WaitingCall
from .places import RecordKey, is_compensation, place_of_attempt
from .program_values import qualified
from .record_contents import has_run_in, result_from_dict, result_to_json
from .recorder import RecorderInTransaction, recorder_of
from .run_answers import Answer
from .run_records import PlaceState, Recorded, RunRecords, Unjudged, describe_store_error
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


class ToolRecords:
    """Records the tool calls of a run. `call.context.place` says which call it is."""

    def __init__(self, records: RunRecords) -> None:
        self._records = records

    # --- running a tool

    async def run_once(self, step: ToolStep, call: ToolCall) -> Encoded:
        """Return the recorded result of the next attempt of a call; else run the tool, and record its result."""
        # A process that continues a run comes here again with each call of the last reply. A recorded result counts:
        # nothing is asked, checked or run for it. A recorded start without a result means that the tool may have run,
        # and nobody knows; `_decide_outcome` decides. Only a call without both has certainly not run. So the start
        # is written before the tool begins, and the result before the model can read it.
        records, place, call = self._records, place_of(call), call.with_own_attempts()
        state = records.at(place.call)
        state.attempts += 1
        await self._write_unjudged(state)  # of an earlier attempt
        attempt = place.path = place_of_attempt(place.call, state.attempts)
        if (record := records.result_at(attempt)) is not None:
            return await self._give_recorded(step, call, attempt, record)
        if state.edits and not (records.cancels or records.at(attempt).starts):
            # What arrives here is not what a person has seen and changed.
            raise self.suspend(call, place.call, "approval")
        if call.tool.is_service:  # its own tool calls have records, so it may run again
            try:
                return await self._run_and_record(step, call, attempt)
            except CancelledInsideError:
                raise ToolSuspension({"kind": "cancelled"}) from None
        if records.cancels and not is_compensation(place.call):
            raise ToolSuspension({"kind": "cancelled"})  # the other calls of the reply are read from their records
        if not records.is_stored:
            return await self._run_and_record(step, call, attempt)
        if (known := self._decide_outcome(call, attempt)) is not None:
            start = self._open_starts(attempt)[-1]
            self._restore_attempt(call, records.read_record(start), has_run=not known.is_error)
            await self._write_result(attempt, known, call)
            return known
        recorder = recorder_of(records, call, attempt, self._encode_result)
        await self._write_start(attempt, {"atomic": recorder is not None, "arguments": call.written_arguments()})
        if recorder is None:
            return await self._run_and_record(step, call, attempt)
        token = current_recorder.set(recorder)
        try:
            return await self._run_and_record(step, call, attempt, recorder)
        finally:
            current_recorder.reset(token)

    async def _run_and_record(
        self, step: ToolStep, call: ToolCall, attempt: str, recorder: RecorderInTransaction | None = None
    ) -> Encoded:
        """Run a tool and record its result, unless its transaction or output guardrails do that."""
        try:
            encoded = await step(call)
        except ToolDeferred as deferred:
            if not call.tool.deferred:
                raise
            await self._write_result(attempt, deferred, call)
            attributes = json_attributes(call.tool, deferred)
            raise self.suspend(call, attempt, "deferred", deferred.reason, attributes) from None
        except (Exception, asyncio.CancelledError) as error:
            if recorder is not None and (record := await self._read_back(recorder, attempt, error)) is not None:
                logger.warning(
                    "tool %r of run %s has committed its result, so its error is dropped: %s",
                    call.tool.name,
                    self._records.id,
                    describe_store_error(error),
                )
                return await self._give_recorded(step, call, attempt, record)
            if not isinstance(error, (EndsInvocation, asyncio.CancelledError)):
                await self._write_result(attempt, error, call)
            elif self._records.waits_for_user(error) and self._open_starts(attempt):
                # Else the next owner could not know that the call has ended, and would not run it again.
                await self._write_start(attempt, {"atomic": True, "ended": True})
            raise
        if recorder is not None and recorder.is_written:
            self._note_unjudged(attempt, call, has_run=_has_run(call, encoded))
        elif self._state_of(call).is_judged_next:
            self._note_unjudged(attempt, call, encoded, has_run=_has_run(call, encoded))
        else:
            await self._write_result(attempt, encoded, call)
        return encoded

    async def _read_back(self, recorder: RecorderInTransaction, attempt: str, error: BaseException) -> Recorded | None:
        """Return the result that a transaction has recorded although its call raised an error; None if it has not.

        Raises `LeaseLostError`, and `RunStoreError` if the store does not answer until the lease has ended: the run
        then stays as it is.
        """
        # A commit can be under way while its call ends: the connection breaks after the COMMIT was sent, or the call is
        # cancelled while its thread commits. An error then says nothing about what happened. If the tool was undone or
        # called again on the strength of it, its effect would be there twice, or a record without its effect. So
        # nobody gets a result before the store has said which of the two it was, and a cancellation waits for it too.
        recorder.close()
        if not recorder.has_begun:
            return None
        cancelled = error if isinstance(error, asyncio.CancelledError) else None
        reading = asyncio.ensure_future(recorder.read_back())
        while not reading.done():
            try:
                await asyncio.wait({reading})
            except asyncio.CancelledError as again:
                cancelled = again
        try:
            record = reading.result()
        except LeaseLostError:
            if cancelled is not None:  # for example because the lease was lost
                raise cancelled from None
            raise
        if record is not None:
            self._records.add_record(record)
        elif cancelled is not None:
            raise cancelled
        return self._records.result_at(attempt)

    def _decide_outcome(self, call: ToolCall, attempt: str) -> Encoded | None:
        """Return the result of a call that an earlier process has started; None to run the tool.

        Raises `ToolSuspension` to ask a person.
        """
        state, starts = self._records.at(attempt), self._open_starts(attempt)
        if not starts:
            return None
        if self._records.facts_of(starts[-1])["atomic"] and not state.is_outside:
            return None  # its transaction contains the record, so it did not happen
        answers = [each.answer for each in self._records.answers_at(attempt)]
        supplied = [each for each in answers if each.kind in ("respond", "fail")]
        if supplied:
            encoded = _encode_answer(call.tool, supplied[-1])
            # For compensation, a person's word that the call failed is a failure of the tool.
            return EncodedInFull(encoded.text, is_error=True, failed=True) if supplied[-1].kind == "fail" else encoded
        retries = [each for each in answers if each.kind == "retry"]
        decision = call.tool.on_unknown_outcome or call.environment.on_unknown_outcome
        if decision == "retry" or len(retries) >= len(starts):
            return None
        if decision == "ask":
            raise self.suspend(call, attempt, "unknown_outcome")
        return EncodedInFull(UNKNOWN.format(tool=call.tool.name), is_error=True)

    # --- recorded results

    async def _give_recorded(self, step: ToolStep, call: ToolCall, attempt: str, record: Recorded) -> Encoded:
        """Return the recorded result of a call. Raises `ToolSuspension` while a deferred one has no answer."""
        if record.kind == "deferred":
            return await self._continue_deferred(step, call, attempt, self._records.read_record(record))
        self.restore_attempt(call, record)
        self._note_unjudged(attempt, call, has_run=has_run_in(self._records.facts_of(record)))
        return self.read_result(record, call.tool)

    def restore_attempt(self, call: ToolCall, record: Recorded) -> None:
        """Note the attempt of a call whose result is recorded, with its arguments, if the tool ran."""
        self._restore_attempt(
            call, self._records.read_record(record), has_run=has_run_in(self._records.facts_of(record))
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
        for each in reversed(self._records.answers_at(attempt)):
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
        written = self._records.read_record(record)
        with self._records.reading():
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
        records, place = self._records, place_of(call)
        state = records.at(place.call)
        last, first = records.last_result(place.call), state.result
        assert first is not None
        if records.facts_of(first).get("arguments") is not None:
            try:
                call = with_recorded_arguments(call, records.read_record(first)["arguments"])
            except ToolArgumentsError:
                return self.read_result(last, call.tool)
        state.as_decoded = call
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
        return bool(self._records.facts_of(self._records.last_result(call)).get("judged", False))

    # --- recording

    async def _write_start(self, attempt: str, facts: Mapping[str, Any]) -> None:
        """Record that a tool starts, or with `ended` that the last start has ended with an error, and no result."""
        key = RecordKey(attempt, "start", len(self._records.at(attempt).starts) + 1)
        await self._records.write_record(key, "start", json.dumps({"version": 1, **facts}))

    def _open_starts(self, attempt: str) -> list[Recorded]:
        """Return the starts of an attempt of which nobody knows how they ended."""
        starts: list[Recorded] = []
        for each in self._records.at(attempt).starts:
            if self._records.facts_of(each).get("ended", False):
                del starts[-1:]
            else:
                starts.append(each)
        return starts

    async def _write_result(self, attempt: str, result: Encoded | Exception | ToolDeferred, call: ToolCall) -> None:
        """Record a result."""
        has_run = isinstance(result, Encoded) and _has_run(call, result)
        if not isinstance(result, ToolDeferred):
            self._note_unjudged(attempt, call, has_run=has_run)
        await self._records.write_record(RecordKey(attempt), *self._encode_result(result, call, has_run))

    def _encode_result(
        self, result: Encoded | Exception | ToolDeferred, call: ToolCall, has_run: bool
    ) -> tuple[str, str]:
        """Return the kind and the data of the record of a result, with the arguments that the tool had."""
        if isinstance(result, ToolDeferred):
            attributes = to_jsonable_python(result.attributes, serialize_unknown=True)
            about = {"version": 1, "arguments": call.attempts.written_arguments}
            return "deferred", json.dumps({**about, "reason": result.reason, "attributes": attributes})
        return "result", result_to_json(result, call.attempts.written_arguments, has_run=has_run)

    async def judge(self, guarded: ToolStep, call: ToolCall) -> Encoded:
        """Run a call and its output guardrails, and record what they let the model read in place of the tool's result.

        The tool's own result is recorded if the guardrails fail or are cancelled, because the tool has run.
        """
        state = self._state_of(call)
        state.is_judged_next = True
        try:
            encoded = await guarded(call)
            if (unjudged := state.unjudged) is not None:
                data = result_to_json(encoded, unjudged.arguments, has_run=unjudged.has_run, is_judged=True)
                await self._records.write_record(
                    RecordKey(unjudged.place), "result", data, replaces=unjudged.result is None
                )
            return encoded
        except BaseException:
            with suppress(LeaseLostError, RunStoreError):  # the next owner then finds an unknown outcome
                await self._write_unjudged(state)
            raise
        finally:
            state.is_judged_next, state.unjudged = False, None

    async def _write_unjudged(self, state: PlaceState) -> None:
        """Record the result of a call that output guardrails have not judged, if there is one."""
        unjudged = state.unjudged
        if unjudged is not None and unjudged.result is not None:
            state.unjudged = replace(unjudged, result=None)
            data = result_to_json(unjudged.result, unjudged.arguments, has_run=unjudged.has_run)
            await self._records.write_record(RecordKey(unjudged.place), "result", data)

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
        for each in reversed(self._records.answers_at(call)):
            if each.answer.kind == "reject":
                return each.answer
            if each.answer.arguments is not None:
                return None
        return None

    def find_edits(self, call: str) -> list[GivenAnswer]:
        """Return the approvals of a call that change its arguments, oldest first."""
        return [each for each in self._records.answers_at(call) if each.answer.arguments is not None]

    def find_approval(self, call: ToolCall) -> GivenAnswer | None:
        """Return the last approval of a call with these arguments, as the person saw them; an edit only once.

        Where the model gave no value, a default of another version of the program voids no approval: a parameter may be
        new. What a guardrail or an interceptor changed must be what the person saw.
        """
        edits = self._state_of(call).edits
        approvals = [
            each
            for each in self._records.answers_at(place_of(call).call)
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
        state, answers = self._state_of(call), self._records.answers_at(place_of(call).call)
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
            raise RunIncompatibleError(self._records.id, reason) from error
        return EditedCall(given, call.with_arguments(edited), names)

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
            qualified(context.service),
            kind,
            reason,
            attributes,
            call_id=call.request.id,
        )
        self._records.at(place).waiting = WaitingCall(
            call=pending,
            method=context.method,
            approvers=tool.approvers,
            not_self=tool.not_self,
            origin=origin,
            requested=call.request.arguments,
        )
        return ToolSuspension({"kind": kind})

    def _state_of(self, call: ToolCall) -> PlaceState:
        return self._records.at(place_of(call).call)


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
