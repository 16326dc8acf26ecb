"""The invocations of a run: what they do at their places, how they are restored, and their suspension.

`RunPlace` is what services get of the run, `ServiceCall` has all invocations of one. Not here: executing the method,
and what else a run asks of it (`service_body`), one tool call (`tool_records`), the layers (`run_layers`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, TypeVar, cast

from ...chat import ChatResponse, PendingCall, RunSuspended, ToolExecution, ToolExecutionRequest
from ...errors import EndsInvocation, RunIncompatibleError
from ...limits import UsageLimits, remaining
from ...safe_text import printable
from ...service_names import stored_name
from ...services.invocation import Invocation, Perform
from ...services.loop import CallModel, Finish, ModelReplied, RunTool, ToolSuspended
from ...services.outputs import ANSWER_TOOL
from ...services.plans import MethodPlan
from ...services.recording_needs import FAILURE, HANDOVER, EffectForm, StoredInvocation, ToldMessage, TurnWrite
from ...services.state import PendingToolCall, State
from ...services.stored_forms import usage_from_dict, usage_to_dict
from ...services.usage_layers import take_back_usage
from ...settings import settings_key
from ...store_clock import clock_of
from ...tools.failures import message_of, return_to_model
from ...tools.results import Encoded, EncodedInFull
from ...tools.tool_calls import Tool, ToolCall, ToolOutcome, ToolStep
from ..documents import VERSION, OuterCall, WaitingCall, next_expiry, with_expiries
from ..effects import effect
from ..event_log import event_to_json
from ..new_documents import current_trace, new_header
from ..next_tries import wait_before_next_try
from ..places import (
    RecordedFact,
    RecordKey,
    calls_around,
    invocation_of,
    is_within,
    place_below,
    place_order,
    place_to_undo,
    position_of,
    without_attempt,
)
from ..program_values import writable_values
from ..run_session import Recorded, RunSession
from ..runs_host import RunsHost
from ..store import StoredRecord
from .call_documents import describe_call, with_message
from .record_contents import (
    has_run_in,
    reply_from_dict,
    reply_to_json,
    result_from_dict,
    snapshot_to_json,
    state_from_dict,
)
from .stored_calls import find_fault, find_other_origin, origin_of, tool_that_gives
from .tool_records import CancelledInsideError, ToolRecords

T = TypeVar("T")


@dataclass(slots=True)
class InvocationState:
    """What this process knows about one invocation of a run, besides its records."""

    is_entered: bool = False
    is_checked: bool = False
    next_reply: int = 0
    """The number of the next reply; that of a recorded one, if the invocation continues with the calls of a reply."""
    written: State | None = None
    """The state in the last record: the next one contains only what is new."""
    suspended: Invocation | None = None


class RunPlace:
    """The place of a tool call, or of a service called as a tool, in its run: the `PlaceInRun` of services.

    `call` is the place of the call, such as `0/1`. `path` is that of the attempt that runs now, such as `0/1.2`: the
    context of a call is shared by its attempts.
    """

    __slots__ = ("body", "call", "path")

    def __init__(self, body: ServiceCall, call: str, path: str) -> None:
        self.body, self.call, self.path = body, call, path

    @property
    def run(self) -> RunSession:
        """The run."""
        return self.body.session

    @property
    def run_id(self) -> str:
        """The id of the run."""
        return self.run.id

    def take_turn(self, turn: TurnWrite) -> bool:
        """Write a turn in one transaction with what the run writes next. Returns False if that cannot be."""
        return not self.path and self.run.take_turn(turn)  # services within store theirs when they end

    def drop_turn(self) -> None:
        """Do not write the turn that was taken, if it is not written yet."""
        if not self.path:
            self.run.drop_turn()

    async def settle(self) -> None:
        """Call the `@on_success` methods of a stored run, before its turn is stored. Raises their errors."""
        if not self.path and self.run.scope is not None:
            await self.run.scope.settle()

    @property
    def is_entered(self) -> bool:
        """True if a service already runs as the tool at this place."""
        return self.body.at(self.path).is_entered

    @property
    def is_recorded(self) -> bool:
        """True if the next attempt of this call has a recorded result, so that the tool does not run."""
        return self.body.tools.next_record(self.call) == "result"

    def ends_with(self, error: BaseException, plan: MethodPlan) -> bool:
        """Return True for an error with which a stored run ends as failed or cancelled, and is not tried again."""
        session = self.run
        if session.has_left or session.stays_after(error):
            return False
        if session.is_wished():
            return True
        return isinstance(error, Exception) and not self.is_tried_again(error, plan)

    def is_tried_again(self, error: BaseException, plan: MethodPlan) -> bool:
        """Return True for an error after which a stored run waits for its next try."""
        session = self.run
        if not session.is_stored or session.has_left or session.stays_after(error) or session.is_cancelled:
            return False
        if not isinstance(error, Exception):
            return False
        return wait_before_next_try(error, partial(wait_after, plan), session) is not None

    @property
    def has_recorded_reply(self) -> bool:
        """True if the reply to the next model request of this invocation is recorded."""
        return self.run.recorded(RecordKey(self.path, "r", self.body.at(self.path).next_reply)) is not None

    def has_result(self, position: int) -> bool:
        """Return True if the result of a tool call of this invocation is recorded."""
        return self.run.has_result(place_below(self.path, position))

    @property
    def takes_messages(self) -> bool:
        """True if the user may add messages: to the outermost invocation of a stored run."""
        return not self.path and self.run.takes_messages

    async def messages_after(self, count: int) -> Sequence[ToldMessage]:
        """Return the messages that the user has added after the first `count`, oldest first."""
        if self.has_recorded_reply:
            return ()  # the reply that comes next has not seen them; they are read after it
        return await self.run.messages_after(count)

    async def client_ids(self, added: int) -> Sequence[str | None]:
        """Return the ids that a client gave to the message of the call, and to the first `added` ones after it."""
        # Those of the message to the outermost invocation: no client has written to a service within.
        return [None] if self.path else await self.run.client_ids(added)

    async def close_messages(self, count: int) -> bool:
        """Let the user add no more messages. Returns False, and changes nothing, if there are more than `count`."""
        return await self.run.close_messages(count)

    @property
    def limits(self) -> UsageLimits | None:
        """The limits of the run itself, at its outermost invocation."""
        document = self.run.document
        return None if self.path or document is None else document.limits

    @property
    def pending(self) -> tuple[PendingCall, ...]:
        """The calls of this invocation, and of services within, that wait for an answer."""
        return self.body.pending_below(self.path)

    def enter(self) -> RunPlace | None:
        """Return the place of a service that runs as the tool here; None if it is taken.

        It is taken if a tool's own code called the service, in addition to the call that the model made.
        """
        state = self.body.at(self.path)
        if state.is_entered:
            return None
        state.is_entered = True
        return RunPlace(self.body, self.call, self.path)  # it stays in this attempt

    def to_undo(self, position: int) -> RunPlace:
        """Return the place of the compensation of a tool call of this invocation."""
        place = place_to_undo(place_below(self.path, position))
        return RunPlace(self.body, place, place)

    def restored(self) -> StoredInvocation | None:
        """Return the invocation as it is stored; None if it begins now."""
        return self.body.restored(self.path)

    async def effect(self, form: EffectForm[T], run: Callable[[], Awaitable[T]], number: int = 1) -> T:
        """Return the recorded value of an effect of this invocation; else run it, and record its value."""

        def write(value: T) -> tuple[str, str]:
            return form.fact, json.dumps({"version": VERSION, **form.write(value)})

        def read(record: Recorded) -> T:
            return form.read(self.run.read_record(record))

        fact: RecordedFact = cast("RecordedFact", form.fact)
        return await effect(self.run, RecordKey(self.path, fact, number), run, write=write, read=read)

    def run_tool(self, step: ToolStep, call: ToolCall) -> Awaitable[Encoded]:
        """Return the recorded result of a tool; else run it, and record its result."""
        return self.body.tools.run_once(step, call)

    async def suspend(self, invocation: Any) -> None:
        """Store the run of an invocation that was suspended; an inner invocation waits for the outermost one."""
        await self.body.suspend(invocation)


def wait_after(plan: MethodPlan, failures: int) -> timedelta | None:
    """Return the time until a run that has failed so often is tried again; None if it has failed for good."""
    retries = plan.options.run_retries
    return None if retries is None or failures >= retries.attempts else retries.wait_after(failures)


def path_of(invocation: Invocation) -> str:
    """Return the place of an invocation that is part of a run."""
    assert invocation.place is not None
    return invocation.place.path


def new_place(run_id: str | None) -> RunPlace:
    """Return the place of the outermost invocation of a run that is not stored; without an id, it gets one."""
    return ServiceCall(RunSession(run_id)).root


class ServiceCall:
    """The invocations of one run. `tools` has its tool calls."""

    def __init__(self, session: RunSession) -> None:
        self.session, self.tools = session, ToolRecords(session)
        self._invocations: dict[str, InvocationState] = {}

    def at(self, path: str) -> InvocationState:
        """Return what is known about an invocation."""
        if (state := self._invocations.get(path)) is None:
            state = self._invocations[path] = InvocationState()
        return state

    @property
    def root(self) -> RunPlace:
        """The place of the run itself."""
        return RunPlace(self, "", "")

    @property
    def handed_over_to(self) -> str | None:
        """The method to which the call was handed over last, also before its first reply; None for no hand-over."""
        records = self.session.numbered("", "handover")
        return HANDOVER.read(self.session.read_record(records[max(records)]))[0] if records else None

    # --- invocations

    def restored(self, path: str) -> StoredInvocation | None:
        """Return the stored invocation at this place; None if it begins now."""
        # Resuming runs no code of the invocation again. Its last snapshot, if it was ever suspended, has the whole
        # state. Each reply since then is recorded with what the state had gained before it: the results of the tools.
        # The last reply is not part of the state: `ask` gives it again, so that its calls run, or are read from their
        # own records.
        session = self.session
        snapshots, replies = session.numbered(path, "s"), session.numbered(path, "r")
        state: State | None = None
        before: State | None = None
        last: Mapping[str, Any] | None = None
        left, notes, usage, number, place = None, {}, None, 0, self.at(path)
        dropped: list[tuple[ChatResponse, str | None]] = []
        with session.reading():
            if snapshots:
                written = session.read_record(snapshots[max(snapshots)])
                state, about = state_from_dict(written["state"], None), written["about"]
                number, left, notes, usage = about["replies"], about["remaining"], about["notes"], about["usage"]
            place.next_reply = number
            while (record := replies.get(number)) is not None:
                last = session.read_record(record)
                before, usage = state, last["usage"]
                state = state_from_dict(last["before"], state)
                place.next_reply = number
                number += 1
            if state is None:
                return None
            place.written = state
            if last is not None and self._led_to_failure(last):
                # Giving the reply again would only fail again.
                if not self._has_begun_after(path, state):
                    session.forget(RecordKey(path, "r", place.next_reply))  # the model is asked again
                    session.await_reply(path)
                    place.written = before
                    dropped.append((reply_from_dict(last).response, state.model))  # it was paid, and counts
                    state = state.with_usage(dropped[0][0].token_usage)
                elif _is_wrong(last):
                    session.await_reply(path)
                    state = state.changed(output_retries=state.output_retries - 1)  # the model reads what is wrong
            failed = session.recorded(RecordKey(path, "failed"))
            state = self._with_answered(path, state)
            return StoredInvocation(
                # Nothing runs again after a failure, so nothing reads the last round, which its turn has too.
                state=state if failed is None else self._with_recorded_round(path, state),
                remaining=left,
                notes=notes,
                usage=None if usage is None else usage_from_dict(usage),
                inner_replies=self._replies_within(path),
                dropped=dropped,
                failure=None if failed is None else FAILURE.read(session.read_record(failed)),
            )

    def state_until_now(self) -> State | None:
        """Return the state of the run with everything that is recorded; None before its first reply.

        Raises `RunIncompatibleError`.
        """
        restored = self.restored("")
        if restored is None:
            return None
        return restored.state if restored.failure is not None else self._with_recorded_round("", restored.state)

    def _with_recorded_round(self, path: str, state: State) -> State:
        """Return a restored state with the last reply, and the results of its calls that are recorded."""
        session = self.session
        reply = session.recorded(RecordKey(path, "r", self.at(path).next_reply))
        with session.reading():
            if reply is not None:
                response = reply_from_dict(session.read_record(reply)).response
                requests = response.ai_message.tool_execution_requests
                state = state.with_usage(response.token_usage).changed(
                    messages=(*state.messages, response.ai_message),
                    pending=tuple(
                        PendingToolCall(each) for each in requests if state.mode != "tool" or each.name != ANSWER_TOOL
                    ),
                )
            return state.changed(pending=tuple(self._with_results(path, state)))

    def _with_results(self, path: str, state: State) -> Iterator[PendingToolCall]:
        """Yield the calls of the current round, with the results that are recorded."""
        for index, each in enumerate(state.pending):
            place = place_below(path, state.position_of(index))
            if each.outcome is not None or not self.session.has_result(place):
                yield each
                continue
            written = self.session.facts_of(self.tools.last_result(place))
            result = result_from_dict(written)
            is_error = isinstance(result, Exception) or result.is_error
            text = message_of(result) if isinstance(result, Exception) else result.text
            execution = ToolExecution(each.request, text, None, is_error, datetime.now(UTC), 0.0)
            outcome = ToolOutcome(execution, ran=has_run_in(written))
            if not isinstance(result, Exception):
                outcome.contents = tuple(result.contents)
            yield replace(each, status="finished", outcome=outcome)

    def _led_to_failure(self, reply: Mapping[str, Any]) -> bool:
        """Return True if the run has failed with the last reply, which has this record."""
        document = self.session.document
        return document is not None and document.asks_again and reply.get("failures", 0) < document.failures

    def _has_begun_after(self, path: str, state: State) -> bool:
        """Return True if a call of the recorded reply to this state, or of a later one, has begun."""
        first = state.position_of(0)
        return any(
            invocation_of(outer) == path and position_of(outer) >= first
            for place in self.session.places
            for outer in calls_around(place)
        )

    def _with_answered(self, path: str, state: State) -> State:
        """Return the state in which the answered calls wait to be run.

        So do suspended calls that are not pending, in a run that goes on after its end: they ask again.
        """
        document = self.session.document
        pending, waiting = list(state.pending), () if document is None else document.waiting
        for index, call in enumerate(pending):
            place = place_below(path, state.position_of(index))
            is_answered = any(is_within(each.call_id, place) for each in self.session.answers)
            is_pending = any(is_within(each.call.id, place) for each in waiting)
            if call.status == "suspended" and (is_answered or not (is_pending or self.session.cancels)):
                pending[index] = PendingToolCall(call.request)
        return state.changed(pending=tuple(pending))

    def _replies_within(self, path: str) -> Iterator[tuple[ChatResponse, str | None]]:
        """Yield the replies that services within an invocation got after its own last record, with their models' names.

        Not those that are replayed.
        """
        return map(self._read_with_model, self._taken_replies(path))

    def _taken_replies(self, path: str) -> Iterator[RecordKey]:
        session = self.session
        for key in session.keys_after(path):
            if key.fact != "r" or (path and not is_within(key.place, path)):
                continue
            has_ended = any(session.recorded(RecordKey(call)) is not None for call in calls_around(key.place))
            if has_ended or key.number < max(session.numbered(key.place, "r")):
                yield key

    def _read_with_model(self, key: RecordKey) -> tuple[ChatResponse, str | None]:
        written = self.session.read_record(self.session.numbered(key.place, "r")[key.number])
        with self.session.reading():
            return reply_from_dict(written).response, written["before"]["state"].get("model")

    def _make_cancelled_error(self) -> CancelledInsideError:
        """Return the error that ends the invocations of a cancelled run."""
        document = self.session.document
        return CancelledInsideError(self.session.id, None if document is None else document.reason)

    def refuse_end(self, _: Finish) -> None:
        """Raise the error of a cancelled run, although all calls beside its answer are recorded."""
        raise self._make_cancelled_error()

    # --- effects

    async def ask_or_replay(
        self, asking: CallModel, invocation: Invocation, perform: Callable[..., Any]
    ) -> ModelReplied:
        """Return the recorded reply to a model request; else ask the model, and record its reply."""
        session, place, path = self.session, self.at(path_of(invocation)), path_of(invocation)
        number, usage = place.next_reply, _write_usage(invocation)

        async def ask() -> ModelReplied:
            if session.cancels:
                raise self._make_cancelled_error()
            session.trace = session.trace or current_trace()
            replied: ModelReplied = await perform(asking, invocation)
            await session.flush_events()  # after a crash, only events since the last reply are produced again
            return replied

        def write(replied: ModelReplied) -> tuple[str, str]:
            before, place.written = place.written, invocation.state
            unfit = _find_refused_calls(replied, invocation)
            return "reply", reply_to_json(invocation.state, before, replied, usage, unfit, session.failures)

        replied = await effect(session, RecordKey(path, "r", number), ask, write=write, read=self._read_reply)
        place.next_reply = number + 1  # after an error, such as a full context, the next request has the same number
        if replied.is_replayed:
            has_begun = session.cancels or self._has_begun_after(path, invocation.state)
            replied = replace(replied, is_followed=has_begun)
            if not session.cancels:
                # Interceptors see it again; the record has what they returned, and calls that have happened.
                await perform(CallModel(asking.request, replied), invocation)
            elif not invocation.tool_calls_in(replied.response):
                raise self._make_cancelled_error()
        return replied

    def _read_reply(self, record: Recorded) -> ModelReplied:
        written = self.session.read_record(record)
        with self.session.reading():
            return replace(reply_from_dict(written), is_replayed=True)

    def run_call(self, running: RunTool, invocation: Invocation, perform: Perform) -> Awaitable[Any]:
        """Run one tool call at its place."""
        self._raise_if_elsewhere(invocation)
        path = place_below(path_of(invocation), invocation.state.position_of(running.index))
        if self._never_runs(running.request.name, path, invocation):
            return _leave_out(running)
        state = self.tools.at(path)
        if self.tools.next_record(path) is None:  # else they were used for the recorded attempt
            state.edits = self.tools.find_edits(path)
        environment = invocation.environment
        context = replace(environment.context, place=RunPlace(self, path, path))
        tools, listeners, name = environment.tools, environment.listeners, running.request.name
        if self.tools.next_record(path) == "result":
            tools, listeners = {name: self._find_recorded_tool(running.request, path, invocation)}, None
        elif name not in tools and (refusal := self._refusal_of(path)) is not None:
            tools = {name: tool_that_gives(lambda _: refusal, name)}
        elif state.was_requested_before and (tool := invocation.toolset.former.get(name)) is not None:
            tools = {name: tool, **tools}
        environment = replace(environment, context=context, tools=tools, listeners=listeners)
        if state.has_ended_run:
            read = {"on_unknown_tool": return_to_model, "on_tool_arguments_error": return_to_model}
            environment = replace(environment, failures=replace(environment.failures, **read))
        performing = perform(replace(running, environment=environment), invocation)
        if self.session.failures and self.tools.next_record(path) == "result" and not self.session.cancels:
            return self._give_or_run_again(performing, running, invocation, perform)
        return performing

    def _never_runs(self, name: str, path: str, invocation: Invocation) -> bool:
        """Return True for a call without a record in a run whose tools are undone: no layer sees it any more.

        That of a service may have records below it.
        """
        if not self.session.cancels or self.tools.next_record(path) is not None or self.session.answers_to(path):
            return False
        tool = _find_stored_tool(name, invocation)
        return tool is None or not tool.is_service

    async def _give_or_run_again(
        self, giving: Awaitable[Any], running: RunTool, invocation: Invocation, perform: Perform
    ) -> Any:
        """Give a recorded result; if that is an error that ends the invocation, run the call again.

        This error has ended the run before. A tool gets its next attempt; a service goes on from its own records.
        """
        call = place_below(path_of(invocation), invocation.state.position_of(running.index))
        record = self.tools.last_result(call)
        try:
            return await giving
        except EndsInvocation:
            raise
        except Exception:
            tool = _find_stored_tool(running.request.name, invocation)
            if "error" not in self.session.facts_of(record) or tool is None:
                raise
            if tool.is_service:
                taken = [*self._taken_replies(path_of(invocation))]
                self.tools.run_again(call)
                again = {*taken} - {*self._taken_replies(path_of(invocation))}  # counted when they are replayed
                await take_back_usage(map(self._read_with_model, again), invocation)
        return await self.run_call(running, invocation, perform)

    def _refusal_of(self, call: str) -> Encoded | None:
        """Return the result of a call that a person rejected or failed; None for others.

        The model reads it also if the identity of the run may not call the tool any more.
        """
        given = self.session.answers_to(call)
        if not given or given[-1].answer.kind not in ("reject", "fail"):
            return None
        answer = given[-1].answer
        return EncodedInFull(printable(answer.reason or ""), is_error=True, failed=answer.kind == "fail")

    def _find_recorded_tool(self, request: ToolExecutionRequest, place: str, invocation: Invocation) -> Tool:
        """Return the tool of a call with a recorded result, for every identity.

        If this program no longer has it, or it takes other arguments, the tool only gives the result.
        """
        tool = _find_stored_tool(request.name, invocation)
        if tool is not None and find_fault(tool, request) is None:
            return tool if tool.access is None else replace(tool, access=None)

        def give(call: ToolCall) -> Encoded:
            record = self.tools.last_result(place)
            self.tools.restore_attempt(call, record)
            return self.tools.read_result(record)

        return tool_that_gives(give, request.name)

    # --- stored calls that this program cannot run

    def _raise_if_elsewhere(self, invocation: Invocation) -> None:
        """Raise `RunIncompatibleError` if an answered call would run on another server than its person saw.

        A name says nothing about a tool of an MCP server: while the call waited, the server can have gone, another one
        can have its name or list a tool of that name, or the server can have changed the tool. All calls of the reply
        are checked before one of them runs. The answer stays, for a worker that reaches the same tool.
        """
        if self.session.cancels or not self.session.answers:  # nothing runs any more, or nobody saw a call
            return
        state, environment = invocation.state, invocation.environment
        for index, pending in enumerate(state.pending):
            place = place_below(path_of(invocation), state.position_of(index))
            given = self.session.answers_to(place)
            if not given or given[-1].answer.kind in ("reject", "fail") or self.session.has_result(place):
                continue
            tool, seen = environment.tools.get(pending.request.name), given[-1].origin
            now = None if tool is None else origin_of(tool, pending.request)
            reason = find_other_origin(pending.request.name, now, seen)
            if reason is None:
                continue
            server = "" if seen is None else settings_key(seen.mcp_server)
            away = next((each for each in invocation.unreachable if settings_key(each.server) == server), None)
            raise RunIncompatibleError(self.session.id, reason) from away

    def check_fits(self, invocation: Invocation) -> None:
        """Raise `RunIncompatibleError` if a stored call without a result does not fit this program.

        Called before the first effect of an invocation. While programs are replaced, an older one may get a run with
        calls that only the newer one knows. If it went on, the model would read that a tool is unknown, and pay again.
        A call that was refused when the reply came, such as one of a tool that the model made up, is refused again. If
        the run has failed with it, the model reads why.
        """
        path, state = path_of(invocation), invocation.state
        place = self.at(path)
        if place.is_checked:
            return
        place.is_checked = True
        if not invocation.is_resumed or self.session.cancels:
            return
        unfit: Sequence[int] = ()
        led_to_failure = False
        requests = {index: each.request for index, each in enumerate(state.pending) if each.status == "waiting"}
        if (record := self.session.recorded(RecordKey(path, "r", place.next_reply))) is not None:
            facts = self.session.facts_of(record)
            unfit, led_to_failure = facts.get("unfit", ()), self._led_to_failure(facts)
            requests = dict(enumerate(invocation.tool_calls_in(self._read_reply(record).response)))
        for index, request in requests.items():
            call = place_below(path, state.position_of(index))
            if index in unfit:
                self.tools.at(call).has_ended_run = led_to_failure
                continue
            self.tools.at(call).was_requested_before = True
            if (
                not self.session.has_result(call)
                and (reason := _find_misfit(request, invocation, is_stored=True)) is not None
            ):
                raise RunIncompatibleError(self.session.id, reason) from next(iter(invocation.unreachable), None)

    # --- suspending

    async def suspend(self, invocation: Invocation) -> None:
        """Store the run of an invocation that was suspended; an inner invocation waits for the outermost one."""
        # A suspended call does not stop the other calls of its round, nor those of the rounds around it. So an inner
        # invocation only leaves its state here, and the outermost one, which is the last, stores all of them with the
        # pending calls in one transaction. Nobody can answer a call of a run that still works.
        session = self.session
        if session.cancels:
            raise self._make_cancelled_error()
        self.at(path_of(invocation)).suspended = invocation
        if path_of(invocation):
            return
        if session.scope is not None:
            await session.scope.settle()
        if session.is_stored:
            await self._note_waiting()
            if invocation.before_suspension is not None:
                await invocation.before_suspension()
            await session.write_suspension(self._snapshots(), event_to_json(self.suspension))
        else:
            await self._create_run(invocation)
        if session.document is not None and next_expiry(session.document.waiting) is not None:
            await invocation.host.runs.watch_times()

    async def _create_run(self, invocation: Invocation) -> None:
        """Store a run that was not stored so far: with its states, and with results within suspended calls."""
        session, plan, account = self.session, invocation.entry, invocation.account
        host = cast("RunsHost", invocation.host)
        store = await host.run_store()
        left = None
        if account is not None:  # the blocks around the call have ended when the run continues
            left = remaining(account.outer, account.usage if account.limits is not None else None)
        attributes = invocation.context.attributes
        described, _ = await describe_call(plan, host, invocation.arguments, attributes, invocation.added_by, left)
        session.document = described.document
        if invocation.has_other_message:
            session.document = with_message(session.document, plan, invocation.arguments, invocation.user_message)
        session.use_store(store)
        await self._note_waiting()
        now = clock_of(store).now()
        run = new_header(session.id, plan.service, plan.name, invocation.memory_key, session.document, now)
        if invocation.before_suspension is not None:
            if plan.run_id_parameter is not None:  # nothing may be stored for the run of another call
                await session.refuse_known_id()
            await invocation.before_suspension()
        await session.create_suspended(run, [*self._unstored_results(), *self._snapshots()])

    async def _note_waiting(self) -> None:
        """Write the calls that wait into the document, with the times at which they expire."""
        session = self.session
        assert session.document is not None
        waiting = tuple(self._with_outer_calls(each) for each in self._waiting().values())
        can_expire = next((each for each in waiting if each.expires_after is not None), None)
        if can_expire is not None:
            waiting = with_expiries(waiting, await session.time_for_expiry(can_expire.call.tool_name))
        session.document = session.with_noted(session.document.changed(waiting=waiting, trace=current_trace()))

    def _waiting(self) -> dict[str, WaitingCall]:
        """Return the calls that wait, those of earlier suspensions too, in the order in which they were made."""
        document = self.session.document
        started_by = None if document is None else document.started_by
        waiting = {each.call.id: each for each in (document.waiting if document is not None else ())}
        for path, new in self.tools.waiting.items():
            stored = waiting.get(path)
            since, expires_at = (None, None) if stored is None else (stored.since, stored.call.expires_at)
            call = replace(new.call, started_by=started_by, expires_at=expires_at)
            waiting[path] = replace(new, call=call, since=since)
        return {place: waiting[place] for place in sorted(waiting, key=place_order)}

    def _with_outer_calls(self, waiting: WaitingCall) -> WaitingCall:
        """Return a pending call with the calls of services that it is part of."""
        if waiting.outer:
            return waiting
        outer = []
        for attempt in calls_around(waiting.call.id)[:-1]:
            invocation = self.at(invocation_of(attempt)).suspended
            assert invocation is not None
            request = invocation.state.pending_at(position_of(attempt)).request
            outer.append(
                OuterCall(
                    id=without_attempt(attempt),
                    service=stored_name(invocation.context.service),
                    method=invocation.context.method,
                    tool_name=request.name,
                    arguments=request.arguments,
                )
            )
        return replace(waiting, outer=tuple(outer))

    def _snapshots(self) -> list[StoredRecord]:
        """Return the states of the invocations that were suspended."""
        records = []
        for path, place in self._invocations.items():
            if (invocation := place.suspended) is None:
                continue
            deadline = invocation.deadline
            left = None if deadline is None else max(deadline.at - time.monotonic(), 0.0)
            notes = writable_values(invocation.context.notes)
            beans = None if path or self.session.beans is None else self.session.beans.changed()
            data = snapshot_to_json(invocation.state, place.next_reply, left, notes, _write_usage(invocation), beans)
            key = RecordKey(path, "s", len(self.session.numbered(path, "s")) + 1)
            records.append(StoredRecord(str(key), "snapshot", data))
        return records

    def _unstored_results(self) -> list[StoredRecord]:
        """Return the records of results within suspended calls; the states contain all others."""
        calls = [
            place_below(path, place.suspended.state.position_of(index))
            for path, place in self._invocations.items()
            if place.suspended is not None
            for index, each in enumerate(place.suspended.state.pending)
            if each.status == "suspended"
        ]
        unstored = self.session.unstored
        return [record for path, record in unstored.items() if any(is_within(path, call) for call in calls)]

    def pending_below(self, path: str) -> tuple[PendingCall, ...]:
        """Return the pending calls of the invocation at a place, and of services within."""
        return tuple(each.call for place, each in self._waiting().items() if not path or is_within(place, path))

    @property
    def suspension(self) -> RunSuspended:
        """The event of the suspension."""
        return RunSuspended(self.session.id, self.pending_below(""))


def _find_refused_calls(replied: ModelReplied, invocation: Invocation) -> list[int]:
    """Return the positions of the calls of a reply that this program refuses."""
    sent = replied.sent
    return [
        index
        for index, each in enumerate(invocation.tool_calls_in(replied.response))
        if (sent is not None and each.name not in sent) or _find_misfit(each, invocation) is not None
    ]


def _is_wrong(reply: Mapping[str, Any]) -> bool:
    """Return True for the record of a reply with a call that was refused, or with an answer beside its calls."""
    requests = reply_from_dict(reply).response.ai_message.tool_execution_requests
    return bool(reply.get("unfit")) or any(each.name == ANSWER_TOOL for each in requests)


def _find_stored_tool(name: str, invocation: Invocation) -> Tool | None:
    """Return the tool of a stored call, also if the identity may no longer call it or a search has not found it."""
    tool: Tool | None = invocation.environment.tools.get(name)
    return tool or invocation.toolset.stored(name) or invocation.plan.toolset.stored(name)


async def _leave_out(running: RunTool) -> ToolSuspended:
    return ToolSuspended(running.index, {"kind": "cancelled"})


def _find_misfit(request: ToolExecutionRequest, invocation: Invocation, *, is_stored: bool = False) -> str | None:
    """Return why a call does not fit this program; None if it fits."""
    tool = _find_stored_tool(request.name, invocation)
    if tool is None or (not is_stored and request.name in tool.former_names):
        return f"{invocation.plan.where} does not offer the tool {request.name!r}"
    if (fault := find_fault(tool, request)) is not None:
        return f"the tool {request.name!r} does not accept the arguments of a stored call ({fault})"
    return None


# --- usage


def _write_usage(invocation: Invocation) -> dict[str, Any] | None:
    """Return the usage that an invocation with limits has counted, as JSON values."""
    account = invocation.account
    if account is None or account.limits is None:
        return None
    return usage_to_dict(account.usage)
