"""One run while this process executes it: its invocations, their model requests and tool calls, and its suspension.

Without a stored run a session only remembers results, until the run is suspended; with one it writes each record before
the next effect starts. Not here: continuing runs (`run_execution`), what is recorded of a tool (`tool_records`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..chat import ChatResponse, PendingCall, RunSuspended, ToolExecutionRequest
from ..di.scopes import RequestScope
from ..errors import RunConflictError, RunIncompatibleError
from ..limits import Account, UsageLimits, narrowest, remaining
from ..safe_text import printable
from ..services.invocation import Invocation, Perform
from ..services.loop import CallModel, Finish, ModelReplied, RunTool
from ..services.state import PendingToolCall, State
from ..settings import settings_key
from ..store_clock import clock_of
from ..tools.results import Encoded, EncodedInFull
from ..tools.tool_calls import Tool, ToolCall, ToolStep
from .documents import RunDocument
from .event_log import event_to_json
from .new_documents import StoringHost, current_trace, describe_run, new_header, with_message
from .places import RecordKey, calls_around, is_within, place_below, place_to_undo
from .record_contents import (
    RecordedFailureError,
    RecordedToolError,
    failure_to_json,
    model_to_json,
    reply_from_dict,
    reply_to_json,
    state_from_dict,
)
from .run_records import OpenReply, RunRecords, read_usage, write_usage
from .store import RunChanges, RunStatus, RunStore, StoredRecord, StoredRun
from .stored_calls import find_fault, find_misfit, find_other_origin, find_stored_tool, origin_of, tool_that_gives
from .suspensions import collect_unstored_results, collect_waiting, make_snapshots, with_outer_calls
from .tool_records import CancelledInsideError, ToolRecords


class RunPlace:
    """The place of a tool call, or of a service called as a tool, in its run.

    `call` is the place of the call, such as `0/1`. `path` is that of the attempt that runs now, such as `0/1.2`: the
    context of a call is shared by its attempts.
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
        return self.session.at(self.path).is_entered

    @property
    def is_recorded(self) -> bool:
        """True if the next attempt of this call has a recorded result, so that the tool does not run."""
        return self.session.next_record(self.call) == "result"

    def enter(self) -> RunPlace | None:
        """Return the place of a service that runs as the tool here; None if it is taken.

        It is taken if a tool's own code called the service, in addition to the call that the model made.
        """
        state = self.session.at(self.path)
        if state.is_entered:
            return None
        state.is_entered = True
        return RunPlace(self.session, self.call, self.path)  # it stays in this attempt

    def to_undo(self, position: int) -> RunPlace:
        """Return the place of the compensation of a tool call of this invocation."""
        place = place_to_undo(place_below(self.path, position))
        return RunPlace(self.session, place, place)


def path_of(invocation: Invocation) -> str:
    """Return the place of an invocation that is part of a run."""
    assert invocation.place is not None
    return invocation.place.path


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
            account.usage = read_usage(self.usage)


class RunSession(RunRecords):
    """One run while this process executes it. `tools` records its tool calls.

    `scope` is the request scope of the run; None while the run is part of another request. `leave` is called before the
    write that suspends or ends the stored run, and `has_left` is True after it: it has also ended the lease.
    """

    def __init__(self, run_id: str | None = None) -> None:
        super().__init__(run_id)
        self.tools = ToolRecords(self)
        self.pending: tuple[PendingCall, ...] = ()
        self.wants_result = False
        self.has_left = False
        self.scope: RequestScope | None = None
        self.write_events: Callable[[], Awaitable[None]] | None = None
        self.leave: Callable[[], None] = lambda: None

    @classmethod
    def of(
        cls, stored: StoredRun, document: RunDocument, records: Sequence[StoredRecord], store: RunStore
    ) -> RunSession:
        """Return the session of a stored run that this process owns."""
        session = cls(stored.id)
        session.store, session.generation, session.document = store, stored.generation, document
        with session.reading():
            for each in records:
                session.add_record(each)
        return session

    @property
    def has_effects(self) -> bool:
        """True if something of the run has begun: more is recorded than the choice of a model."""
        return any(
            place.result or place.starts or place.replies or place.snapshots or place.failure
            for place in self.places.values()
        )

    # --- invocations

    @property
    def root(self) -> RunPlace:
        """The place of the run itself."""
        return RunPlace(self, "", "")

    def restored(self, path: str) -> Restored | None:
        """Return the stored state of the invocation at this place; None if it begins now."""
        # Resuming runs no code of the invocation again. Its last snapshot, if it was ever suspended, has the whole
        # state. Each reply since then is recorded with what the state had gained before it: the results of the tools.
        # The last reply is not part of the state: it stays open, and `ask` gives it again, so that its calls run, or
        # are read from their own records.
        place = self.places.get(path)
        if place is None or not (place.snapshots or place.replies):
            return None
        state: State | None = None
        left, notes, usage, number = None, {}, None, 0
        with self.reading():
            if place.snapshots:
                written = self.read_record(place.snapshots[-1])
                state, about = state_from_dict(written["state"], None), written["about"]
                number, left, notes, usage = about["replies"], about["remaining"], about["notes"], about["usage"]
            place.next_reply, last = number, None
            while (record := place.replies.get(number)) is not None:
                last = self.read_record(record)
                state, usage = state_from_dict(last["before"], state), last["usage"]
                place.next_reply = number
                number += 1
            if last is not None:
                place.open_reply = OpenReply(replace(reply_from_dict(last), is_replayed=True), last.get("unfit", ()))
        if state is None:
            return None
        place.written = state
        return Restored(self._with_answered(path, state), left, notes, usage)

    def _with_answered(self, path: str, state: State) -> State:
        """Return the state in which the answered calls wait to be run."""
        pending = list(state.pending)
        for index, call in enumerate(pending):
            place = place_below(path, state.position_of(index))
            if call.status == "suspended" and any(is_within(each.call_id, place) for each in self.answers):
                pending[index] = PendingToolCall(call.request)
        return state.changed(pending=tuple(pending))

    def model_at(self, path: str) -> str | None:
        """Return the recorded name of the model that a router has chosen for the invocation at this place."""
        place = self.places.get(path)
        return None if place is None or place.model is None else str(self.facts_of(place.model)["model"])

    async def record_model(self, path: str, name: str) -> None:
        """Record the model that a router has chosen; before the run is stored, the state has its name."""
        await self.write_record(RecordKey(path, "model"), "model", model_to_json(name))

    def failure_at(self, path: str) -> dict[str, Any] | None:
        """Return the recorded failure of the invocation at this place, with the executions to undo."""
        place = self.places.get(path)
        return None if place is None or place.failure is None else self.read_record(place.failure)

    async def record_failure(self, path: str, error: Exception, undo: list[dict[str, Any]]) -> None:
        """Record that the invocation at this place fails, before its tools are undone."""
        await self.write_record(RecordKey(path, "failed"), "failed", failure_to_json(error, undo))

    def raise_failure(self, path: str) -> None:
        """Raise the recorded failure of the invocation at this place, if there is one."""
        if (failure := self.failure_at(path)) is not None:
            kind = RecordedFailureError if failure["ends"] else RecordedToolError
            raise kind(failure["error"], failure["text"])

    def replies_within(self, path: str) -> Iterator[tuple[ChatResponse, str | None]]:
        """Yield the replies that services within an invocation got after its own last record, with their models' names.

        Not those that are replayed. The recorded usage of the invocation does not contain them.
        """
        for key in self.keys_after(path):
            if key.fact != "r" or (path and not is_within(key.place, path)):
                continue
            replies = self.places[key.place].replies
            has_ended = any(self.result_at(call) is not None for call in calls_around(key.place))
            if has_ended or key.number < max(replies):
                written = self.read_record(replies[key.number])
                with self.reading():
                    yield reply_from_dict(written).response, written["before"]["state"].get("model")

    def _make_cancelled_error(self) -> CancelledInsideError:
        """Return the error that ends the invocations of a cancelled run."""
        return CancelledInsideError(self.id, None if self.document is None else self.document.reason)

    def refuse_end(self, _: Finish) -> None:
        """Raise the error of a cancelled run, although all calls beside its answer are recorded."""
        raise self._make_cancelled_error()

    def limits_of(self, path: str, own: UsageLimits | None) -> UsageLimits | None:
        """Return the limits of the invocation at a place: its own, for the outermost one also those of the run."""
        return own if path or self.document is None else narrowest(own, self.document.limits)

    # --- effects

    async def ask_or_replay(
        self, effect: CallModel, invocation: Invocation, perform: Callable[..., Any]
    ) -> ModelReplied:
        """Return the recorded reply to a model request; else ask the model, and record its reply."""
        path = path_of(invocation)
        place = self.at(path)
        number, opened = place.next_reply, place.open_reply
        place.next_reply, place.open_reply = number + 1, None
        if opened is not None:
            recorded = opened.replied
            if not self.cancels:
                # Interceptors see it again; the record has what they returned, and calls that have happened.
                await perform(CallModel(effect.request, recorded), invocation)
                return recorded
            if invocation.tool_calls_in(recorded.response):
                return recorded
        if self.cancels:
            raise self._make_cancelled_error()
        usage = write_usage(invocation)
        replied: ModelReplied = await perform(effect, invocation)
        if self.is_stored:
            await self.flush_events()  # after a crash, only events since the last reply are produced again
            state = invocation.state
            data = reply_to_json(state, place.written, replied, usage, _find_refused_calls(replied, invocation))
            await self.write_record(RecordKey(path, "r", number), "reply", data)
            place.written = state
        return replied

    def run_call(self, effect: RunTool, invocation: Invocation, perform: Perform) -> Awaitable[Any]:
        """Run one tool call at its place."""
        self._raise_if_elsewhere(invocation)
        path = place_below(path_of(invocation), invocation.state.position_of(effect.index))
        place = self.at(path)
        if self.next_record(path) is None:  # else they were used for the recorded attempt
            place.edits = self.tools.find_edits(path)
        environment = invocation.environment
        context = replace(environment.context, place=RunPlace(self, path, path))
        tools, listeners, name = environment.tools, environment.listeners, effect.request.name
        if self.next_record(path) == "result":
            tools, listeners = {name: self._find_recorded_tool(effect.request, path, invocation)}, None
        elif name not in tools and (refusal := self._refusal_of(path)) is not None:
            tools = {name: tool_that_gives(lambda _: refusal, name)}
        elif place.was_requested_before and (tool := invocation.toolset.former.get(name)) is not None:
            tools = {name: tool, **tools}
        environment = replace(environment, context=context, tools=tools, listeners=listeners)
        return perform(replace(effect, environment=environment), invocation)

    def run_tool(self, step: ToolStep, call: ToolCall) -> Awaitable[Encoded]:
        """Return the recorded result of a tool; else run it, and record its result."""
        return self.tools.run_once(step, call)

    def _refusal_of(self, call: str) -> Encoded | None:
        """Return the result of a call that a person rejected or failed; None for others.

        The model reads it also if the identity of the run may not call the tool any more.
        """
        given = self.answers_to(call)
        if not given or given[-1].answer.kind not in ("reject", "fail"):
            return None
        answer = given[-1].answer
        return EncodedInFull(printable(answer.reason or ""), is_error=True, failed=answer.kind == "fail")

    def _find_recorded_tool(self, request: ToolExecutionRequest, place: str, invocation: Invocation) -> Tool:
        """Return the tool of a call with a recorded result, for every identity.

        If this program no longer has it, or it takes other arguments, the tool only gives the result.
        """
        tool = find_stored_tool(request.name, invocation)
        if tool is not None and find_fault(tool, request) is None:
            return tool if tool.access is None else replace(tool, access=None)

        def give(call: ToolCall) -> Encoded:
            record = self.last_result(place)
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
        if self.cancels or not self.answers:  # nothing runs any more, or nobody saw a call
            return
        state, environment = invocation.state, invocation.environment
        for index, pending in enumerate(state.pending):
            place = place_below(path_of(invocation), state.position_of(index))
            given = self.answers_to(place)
            if not given or given[-1].answer.kind in ("reject", "fail") or self.has_result(place):
                continue
            tool, seen = environment.tools.get(pending.request.name), given[-1].origin
            now = None if tool is None else origin_of(tool, pending.request)
            reason = find_other_origin(pending.request.name, now, seen)
            if reason is None:
                continue
            server = "" if seen is None else settings_key(seen.mcp_server)
            away = next((each for each in invocation.unreachable if settings_key(each.server) == server), None)
            raise RunIncompatibleError(self.id, reason) from away

    def check_fits(self, invocation: Invocation) -> None:
        """Raise `RunIncompatibleError` if a stored call without a result does not fit this program.

        Called before the first effect of an invocation. While programs are replaced, an older one may get a run with
        calls that only the newer one knows. If it went on, the model would read that a tool is unknown, and pay again.
        A call that was refused when the reply came, such as one of a tool that the model made up, is refused again.
        """
        path, state = path_of(invocation), invocation.state
        place = self.at(path)
        if place.is_checked:
            return
        place.is_checked = True
        if not invocation.is_resumed or self.cancels:
            return
        unfit: Sequence[int] = ()
        requests = {index: each.request for index, each in enumerate(state.pending) if each.status == "waiting"}
        if (opened := place.open_reply) is not None:
            unfit = opened.unfit
            requests = dict(enumerate(invocation.tool_calls_in(opened.replied.response)))
        for index, request in requests.items():
            call = place_below(path, state.position_of(index))
            if index in unfit:
                continue
            self.at(call).was_requested_before = True
            if not self.has_result(call) and (reason := find_misfit(request, invocation, is_stored=True)) is not None:
                raise RunIncompatibleError(self.id, reason) from next(iter(invocation.unreachable), None)

    # --- suspending

    async def suspend(self, invocation: Any) -> None:
        """Store the run of an invocation that was suspended; an inner invocation waits for the outermost one."""
        # A suspended call does not stop the other calls of its round, nor those of the rounds around it. So an inner
        # invocation only leaves its state here, and the outermost one, which is the last, stores all of them with the
        # pending calls in one transaction. Nobody can answer a call of a run that still works.
        if self.cancels:
            raise self._make_cancelled_error()
        self.at(path_of(invocation)).suspended = invocation
        if not path_of(invocation):
            if self.scope is not None:
                await self.scope.settle()
            await self._store_suspension(await self._describe_run(invocation) if self.document is None else None)
            self.has_left = True

    async def _describe_run(self, invocation: Any) -> StoredRun:
        """Make the header of a run that was not stored so far."""
        host: StoringHost = invocation.host
        self.store = await host.run_store()
        plan, account = invocation.plan, invocation.account
        left = None
        if account is not None:  # the blocks around the call have ended when the run continues
            left = remaining(account.outer, account.usage if account.limits is not None else None)
        attributes = invocation.context.attributes
        described = await describe_run(plan, host, invocation.arguments, attributes, invocation.added_by, left)
        self.document = described.document
        if invocation.has_other_message:
            self.document = with_message(self.document, plan, invocation.arguments, invocation.user_message)
        return new_header(self.id, plan, invocation.memory_key, self.document, clock_of(self.store).now())

    async def _store_suspension(self, run: StoredRun | None) -> None:
        """Store the suspended run, in one transaction. `run` is the header of a run that is not stored yet."""
        assert self.document is not None
        self.leave()
        await self.flush_events()
        waiting = tuple(with_outer_calls(each, self) for each in collect_waiting(self).values())
        document = self.document = self.document.changed(waiting=waiting, trace=current_trace())
        self.pending = document.pending
        records = make_snapshots(self)
        with self.using_store() as store:
            if self.generation is not None:
                text, since = document.to_json(), document.waiting_since
                changes = RunChanges(status="suspended", document=text, waiting_since=since)
                await store.append(self.id, self.generation, records, changes, [event_to_json(self.suspension)])
                return
            assert run is not None
            run = replace(run, status="suspended", document=document.to_json())
            if await store.create(run, [*collect_unstored_results(self), *records]):
                return
            # A connection that was lost after the commit has let the store try again, and find the run of the first
            # try. No other call has the same document: its digest has a random salt.
            found = await store.load(self.id)
        if found is None or found.document != run.document:
            raise RunConflictError(self.id, "another call")

    def pending_below(self, path: str) -> tuple[PendingCall, ...]:
        """Return the pending calls of the invocation at a place, and of services within."""
        waiting = collect_waiting(self)
        return tuple(each.call for place, each in waiting.items() if not path or is_within(place, path))

    @property
    def suspension(self) -> RunSuspended:
        """The event of the suspension."""
        return RunSuspended(self.id, self.pending)

    async def flush_events(self) -> None:
        """Wait until all events so far are stored. Raises `LeaseLostError` and `RunStoreError`."""
        if self.write_events is not None:
            with self.using_store():
                await self.write_events()

    async def write_end(self, status: RunStatus, **facts: Any) -> None:
        """Write the end of the run into its header, with these facts, and all events. The lease ends with it."""
        assert self.document is not None
        assert self.generation is not None
        # An owner that suspends its run keeps the generation: the store would let it overwrite the pending calls.
        assert not self.has_left
        self.leave()
        await self.flush_events()
        changes = RunChanges(status=status, document=self.document.changed(waiting=(), **facts).to_json())
        with self.using_store() as store:
            await store.append(self.id, self.generation, [], changes)
        self.has_left = True

    async def write_document(self, document: RunDocument) -> None:
        """Write all events, and another document; the run goes on."""
        assert self.generation is not None
        await self.flush_events()
        with self.using_store() as store:
            await store.append(self.id, self.generation, [], RunChanges(document=document.to_json()))
        self.document = document


def _find_refused_calls(replied: ModelReplied, invocation: Invocation) -> list[int]:
    """Return the positions of the calls of a reply that this program refuses."""
    sent = replied.sent
    return [
        index
        for index, each in enumerate(invocation.tool_calls_in(replied.response))
        if (sent is not None and each.name not in sent) or find_misfit(each, invocation) is not None
    ]
