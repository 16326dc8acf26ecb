"""`Runs`: lists suspended runs, takes answers, and continues runs where they stopped.

Not here: the part of `Runs` that starts and takes over runs (`starting`), what happens within a run (`places`).
"""

from __future__ import annotations

import asyncio
import builtins
import json
import logging
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import Context, copy_context
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from inspect import isawaitable
from typing import Any, Protocol, TypeAlias, TypeVar, cast, get_args

from pydantic import ValidationError
from pydantic_core import to_json

from ..chat import (
    FinishReason,
    PendingCall,
    RunSuspended,
    ServiceEvent,
    ToolExecutionRequest,
)
from ..context import (
    TAKES_ANSWERS,
    InvocationContext,
    current_attributes,
    current_invocation,
    current_limit,
    restored_attributes,
)
from ..errors import (
    AnswerForbiddenError,
    InvocationTimeoutError,
    LeaseLostError,
    RunAnswerError,
    RunCancelledError,
    RunConflictError,
    RunFailedError,
    RunIncompatibleError,
    RunNotFoundError,
    RunStateError,
    RunStoreError,
    RunSuspendedError,
    ScopeNotActiveError,
    ToolArgumentsError,
)
from ..events import Listeners, RunAnsweredEvent, RunResumedEvent, ServiceFailedEvent, ServiceStartedEvent
from ..introspection import class_of, type_name
from ..limits import current_account, remaining
from ..safe_text import faults_of
from ..security import ForbiddenError, SecurityIdentity, identity_from
from ..services.answers import accepted_result
from ..services.driver import run, stream
from ..services.invocation import Invocation
from ..services.loop import Finish, Suspend
from ..services.methods import arguments_as_tool
from ..services.outputs import Result, Shape
from ..services.plans import MethodPlan, Toolset, place_of_added_tools, plan_behind, services_below, tools_added
from ..tools.codec import printable
from ..tools.failures import message_of
from ..tools.pipeline import Tool
from .documents import (
    GivenAnswer,
    RunDocument,
    StoringHost,
    UnreadableDocumentError,
    WaitingCall,
    conversation_key,
    current_identity,
    describe,
    header,
    json_value,
    output_fingerprint,
    person_name,
    qualified,
    read_arguments,
    read_identity,
    read_seeds,
    read_value,
    reason_of,
    type_name_of,
    write_person,
    write_value,
)
from .event_log import EventLog, pauses
from .run_session import RunPlace, RunSession
from .starting import RunEngine, RunStarting
from .store import (
    ENDED,
    KINDS,
    Answer,
    AnswerKind,
    HistoryEntry,
    Run,
    RunChanges,
    RunStatus,
    RunStore,
    StoredRecord,
    StoredRun,
)

logger = logging.getLogger("toolbox.runs")

T = TypeVar("T")


_UNCHANGED = (LeaseLostError, RunStoreError, RunIncompatibleError)
"""Errors after which the run stays as it is, so that it can be continued."""


def _leaves_unchanged(error: Exception, run_id: str) -> bool:
    """Return True for an error of this run itself; a tool may raise the same kinds of errors about other runs."""
    return isinstance(error, _UNCHANGED) and error.run_id == run_id


class IdentityLoader(Protocol):
    """Refreshes the identity of a run that continues. Register a bean of this type.

        class Directory(IdentityLoader):
            async def load(self, identity: SecurityIdentity) -> SecurityIdentity | None: ...

    `load` may be `def` or `async def`. None refuses to continue, and the run stays as it is.
    """

    def load(self, identity: Any) -> Any:
        """Return the current identity of this person; None if it may no longer act."""
        ...


class RunsHost(StoringHost, Protocol):
    """Hosts services and runs: a container, or a service without one."""

    listeners: Listeners | None

    def plans_of(self, service: str) -> Mapping[str, MethodPlan]:
        """Return the plans of the service with this qualified name, by method; empty for an unknown one."""
        ...

    def open_request(self, seeds: Mapping[Any, Any]) -> AbstractAsyncContextManager[Any]:
        """Return a new request scope with these seeds."""
        ...

    async def on_own_loop(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Await `work()` on the host's loop."""
        ...


PutEvent: TypeAlias = Callable[[ServiceEvent | None], Awaitable[None]]
"""Passes on an event of a run, and waits until its reader has room. None: the answers are stored, the run begins."""


class _Prepared:
    """A stored run that fits this program: its plan, arguments, seeds, document and the tools of its endpoint."""

    __slots__ = ("added", "arguments", "document", "plan", "seeds")

    def __init__(
        self,
        plan: MethodPlan,
        arguments: dict[str, Any],
        seeds: dict[Any, Any],
        document: RunDocument,
        added: Sequence[Tool],
    ) -> None:
        self.plan, self.arguments, self.seeds, self.document = plan, arguments, seeds, document
        self.added = added


class Runs(RunStarting):
    """The runs of a container: a bean, and `container.runs`.

        run = await runs.get(run_id)
        result = await runs.resume(run.id, {call.id: approve() for call in run.pending}, by="ann")

    All methods work in any process that uses the same `RunStore`.
    """

    def __init__(self, host: RunsHost) -> None:
        super().__init__()
        self._host: Any = host

    # --- reading

    async def get(self, run_id: str) -> Run[Any]:
        """Return a run. Raises `RunNotFoundError`."""

        async def read() -> Run[Any]:
            return self._public(await self._loaded(run_id))

        return await self._on_own_loop(read)

    async def list(
        self, status: RunStatus | None = None, service: str | type[Any] | None = None, limit: int = 100
    ) -> builtins.list[Run[Any]]:
        """Return runs, newest first. `service` is a service class or its qualified name `module.Class`.

        Raises `ValueError` for an unknown status and for a negative limit.
        """
        if status is not None and status not in get_args(RunStatus):
            raise ValueError(f"unknown status {status!r}; use one of: {', '.join(get_args(RunStatus))}")
        if limit < 0:
            raise ValueError(f"limit={limit}; use 0 or more")
        name = qualified(service) if isinstance(service, type) else service
        if name is not None and not is_text(name):
            return []

        async def find() -> builtins.list[Run[Any]]:
            found = await (await self._opened()).find(status=status, service=name, limit=limit)
            return [self._public(each) for each in found]

        return await self._on_own_loop(find)

    # --- answering

    async def resume(self, run_id: str, answers: Mapping[str, Answer], by: Any = None) -> Result[Any]:
        """Answer pending calls, by their ids, and continue the run until it ends or is suspended again.

        `by` is the person, a name or a `SecurityIdentity`. Without answers, a run whose process is gone continues. Some
        of the pending calls may be answered; `Result.pending` has the others. Raises `RunAnswerError`,
        `RunIncompatibleError` and `RunNotFoundError`, after which the run is unchanged, and the errors of the method.
        Also unchanged is the run of somebody who may no longer call the method (`ForbiddenError`).
        """
        return await self._on_own_loop(lambda: self._resume(run_id, answers, by))

    async def _resume(
        self, run_id: str, answers: Mapping[str, Answer], by: Any, put: PutEvent | None = None
    ) -> Result[Any]:
        """Wait for a run that continues; cancelling this ends the waiting, not the run. `put` takes its events.

        The run belongs to no request: not to the one that resumes it, whose beans, headers, limits and identity it must
        not see, and not to a caller who leaves. So it is a task of the container, in an empty context.
        """
        if not isinstance(answers, Mapping):
            got = type(answers).__name__
            raise TypeError(f"resume(run_id, answers): expected a dictionary of answers by the ids of calls, got {got}")
        request = copy_context()

        def tell(*answered: Any) -> None:  # the answers, unlike the run, belong to this request
            request.run(self._tell_answers, *answered)

        async with self._within_time_limit(run_id):
            if answers:
                task = await self._detached(self._answer(run_id, answers, by, tell, put))
                if (result := await _result_unless_lost(task, run_id)) is not None:
                    return result
            return await self._until_settled(run_id, put)

    async def _until_settled(self, run_id: str, put: PutEvent | None = None) -> Result[Any]:
        """Wait until a run has ended or is suspended, and return its result; continue it if no process runs it.

        Raises the errors of the method, `RunFailedError`, `RunCancelledError` and `RunNotFoundError`.
        """
        pause = pauses(run_id, self.signals)
        while True:
            stored = await self._loaded(run_id)
            if stored.status != "running":
                result = self._result_of(stored)
                if put is not None:
                    await put(None)
                    if result.pending:
                        await put(RunSuspended(run_id, tuple(result.pending)))
                return result
            task = await self._detached(self._take(stored, put))
            if task is None:
                await pause(stored)
            elif (found := await _result_unless_lost(task, run_id)) is not None:
                return found

    async def _take(self, stored: StoredRun, put: PutEvent | None) -> asyncio.Task[Result[Any]] | None:
        """Continue a run that no process runs, in a task; None while another process runs it."""
        prepared = self._prepared(stored)
        if not prepared.document.cancels:
            await self._identity_of(stored.id, prepared)
        owned = await (await self._opened()).acquire(stored.id, self.owner)
        return None if owned is None else self._in_background(owned, Context(), put)

    async def _detached(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work` in a task with an empty context, which ends also if the caller leaves."""
        task = asyncio.create_task(work, context=Context())
        self._detached_tasks.add(task)
        task.add_done_callback(self._detached_tasks.discard)
        return await asyncio.shield(task)

    @asynccontextmanager
    async def _within_time_limit(self, run_id: str) -> AsyncIterator[None]:
        """Raise `InvocationTimeoutError` inside the block when the caller's `time_limit` passes; the run goes on."""
        around = current_limit.get()
        if around is None or around.within is not current_invocation.get():
            yield
            return
        limit = asyncio.timeout(max(around.deadline - time.monotonic(), 0))
        try:
            async with limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            stored = await self._loaded(run_id)
            service = stored.service.rpartition(".")[2]
            raise InvocationTimeoutError(service, stored.method, around.seconds) from None

    def resume_stream(self, run_id: str, answers: Mapping[str, Answer], by: Any = None) -> ResumedEvents:
        """Do the same as `resume`, and return the events of the call. The last is `CompleteResponse` or `RunSuspended`.

            async for event in runs.resume_stream(run_id, {call.id: approve()}, by=person): ...

        A reader that leaves misses the other events; the run continues.
        """
        return ResumedEvents(self._resume_events(run_id, answers, by), self._on_own_loop)

    async def _resume_events(
        self, run_id: str, answers: Mapping[str, Answer], by: Any
    ) -> AsyncGenerator[ServiceEvent | None, None]:
        """Yield the events of a run that continues. The first item is None: the answers are stored."""
        ready: asyncio.Queue[ServiceEvent | None] = asyncio.Queue(1)
        has_left = False

        async def put(event: ServiceEvent | None) -> None:
            if not has_left:
                await ready.put(event)

        # Not in this generator's own context: its steps run in different tasks.
        task = asyncio.create_task(self._on_own_loop(lambda: self._resume(run_id, answers, by, put)))
        getting: asyncio.Task[ServiceEvent | None] | None = None
        has_begun = False
        try:
            while True:
                getting = asyncio.create_task(ready.get())
                await asyncio.wait({getting, task}, return_when=asyncio.FIRST_COMPLETED)
                if getting.done():
                    event = getting.result()
                    if event is not None or not has_begun:  # None comes again if the run was lost and taken again
                        has_begun = True
                        yield event
                elif ready.empty():
                    break
            await task
        finally:
            has_left = True
            for each in (task, getting):
                if each is not None:
                    each.cancel()
                    await asyncio.gather(each, return_exceptions=True)
            if not ready.empty():
                ready.get_nowait()  # the run waits for room

    async def cancel(self, run_id: str, reason: str | None = None) -> Run[Any]:
        """Cancel a run. An ended run stays as it is. Raises `RunNotFoundError`.

        With `compensate_on_failure` its tools are undone first; if that is interrupted, another process continues it.
        """
        return await self._on_own_loop(lambda: self._cancel(run_id, reason))

    async def _cancel(self, run_id: str, reason: str | None) -> Run[Any]:
        store, reason = await self._opened(), None if reason is None else printable(reason)
        while True:
            stored = await self._loaded(run_id)
            if stored.status in ENDED:
                return self._public(stored)
            try:
                document = self._document(stored)
            except RunIncompatibleError:  # of another version of the program; what it says is dropped
                document = RunDocument()
            if document.cancels:  # by another caller, or before a crash
                await self._execute(run_id, None)
                continue
            entry = HistoryEntry(datetime.now(UTC), None, None, None, "cancel", reason)
            changed = document.changed(waiting=(), reason=reason, history=(*document.history, entry))
            undoes = self._undoes(stored)
            if undoes:  # it ends when its tools are undone; after a crash another process continues
                document = changed.changed(cancels=True)
                changes = RunChanges(status="running", document=document.to_json(), owner=self.owner)
            else:
                changes = RunChanges(status="cancelled", document=changed.to_json())
            if (taken := await store.change(run_id, stored.version, changes)) is None:
                continue
            self.signals.announce(run_id)
            if not undoes:
                return self._public(taken)
            await asyncio.shield(self._undoing(taken))

    def _undoes(self, stored: StoredRun) -> bool:
        """Return True if tools of this run may have to be undone when it is cancelled."""
        own = [plan for methods in self._host.plans.values() for plan in methods.values()]
        everything = [*own, *(inner for plan in own for inner in services_below(plan))]
        if not any(each.options.compensate_on_failure for each in everything):
            return False
        try:
            self._prepared(stored)
        except RunIncompatibleError as error:  # without a traceback, which would show the stored arguments
            logger.error(
                "run %s was cancelled; if its tools have compensations, they did not run: %s", stored.id, error
            )
            return False
        return True

    def _undoing(self, taken: StoredRun) -> asyncio.Task[None]:
        """Undo the tools of a cancelled run in a task, which continues when its caller leaves."""

        async def work() -> None:
            await self._owned.give_up(taken.id)
            await self._continue(taken)

        task = asyncio.create_task(work(), context=Context())
        self._keep_in_background(f"{taken.id}\0cancel", task)
        return task

    async def delete(self, run_id: str) -> None:
        """Delete an ended run. Raises `RunStateError` if it has not ended, and `RunNotFoundError`."""

        async def delete() -> None:
            stored = await self._loaded(run_id)
            if stored.status not in ENDED:
                raise RunStateError(run_id, f"it is {stored.status}; cancel it before you delete it")
            await (await self._opened()).delete(run_id)

        await self._on_own_loop(delete)

    async def purge(self, older_than: timedelta) -> int:
        """Delete the runs that ended longer ago than `older_than`. Returns their number.

        Raises `ValueError` for a negative duration, which would also delete runs that end now.
        """
        if not isinstance(older_than, timedelta):
            raise TypeError(f"older_than={older_than!r}; use a datetime.timedelta")
        if older_than < timedelta():
            raise ValueError(f"older_than={older_than!r}; use a duration of 0 or more")

        async def purge() -> int:
            return await (await self._opened()).purge(datetime.now(UTC) - older_than)

        return await self._on_own_loop(purge)

    # --- checking answers

    async def _answer(
        self,
        run_id: str,
        answers: Mapping[str, Answer],
        by: Any,
        tell: Callable[..., object],
        put: PutEvent | None = None,
    ) -> asyncio.Task[Result[Any]]:
        """Store the answers and take the run, in one step; then continue it in a task. `tell` sends the events."""
        store = await self._opened()
        stored = await self._loaded(run_id)
        if stored.status != "suspended":
            raise RunAnswerError(run_id, f"it is {stored.status}, so it has no pending calls to answer")
        prepared = self._prepared(stored)
        document = prepared.document
        person = write_person(run_id, by)
        given = [await self._checked(stored, prepared, call_id, answer, by) for call_id, answer in answers.items()]
        identity, access = await self._identity_of(run_id, prepared), prepared.plan.access
        if access is not None and not access.allows(identity):
            raise access.refusal(identity, prepared.plan.where)
        now, name = datetime.now(UTC), person_name(by)
        document = document.changed(
            waiting=tuple(each for each in document.waiting if each.call.id not in answers),
            answers=(
                *document.answers,
                *(
                    GivenAnswer(
                        call_id=each.call.id,
                        answer=answer,
                        asked=each.call.arguments,
                        by=person,
                        origin=each.origin,
                    )
                    for each, answer in given
                ),
            ),
            history=(
                *document.history,
                *(
                    HistoryEntry(now, name, each.call.id, each.call.tool_name, answer.kind, answer.reason)
                    for each, answer in given
                ),
            ),
        )
        changes = RunChanges(status="running", document=document.to_json(), owner=self.owner)
        taken = await store.change(run_id, stored.version, changes)
        if taken is None:
            raise RunAnswerError(run_id, "another answer came first; read the run again")
        tell(prepared.plan, run_id, given, name)
        return self._in_background(taken, Context(), put)

    async def _checked(
        self, stored: StoredRun, prepared: _Prepared, call_id: str, answer: object, by: Any
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
                run_id, f"call {call_id} is of kind {call.kind!r}, so {answer.kind}() does not fit; use {allowed}"
            )
        self._check_person(run_id, waiting, prepared, answer.kind, by)
        if answer.kind == "approve" and answer.arguments is not None:
            answer = replace(answer, arguments=_json_arguments(run_id, call, answer.arguments))
            await self._check_arguments(stored, prepared, waiting, answer.arguments or {})
        if answer.kind == "respond":
            try:
                written = json_value(answer.value)
            except Exception as error:  # any exception of the value's own serializers
                kind = type(answer.value).__name__
                raise RunAnswerError(run_id, f"call {call_id}: a {kind} cannot be written as JSON") from error
            _check_size(run_id, call, "the value", json.dumps(written), MAX_ANSWER)
            written = await self._checked_value(stored, prepared, waiting, answer.value, written)
            answer = replace(answer, value=written)
        if answer.reason is not None:
            if not isinstance(answer.reason, str):
                raise RunAnswerError(run_id, f"call {call_id}: the reason must be text")
            _check_size(run_id, call, "the reason", answer.reason, MAX_REASON)
            answer = replace(answer, reason=printable(answer.reason))
        return waiting, answer

    async def _checked_value(
        self, stored: StoredRun, prepared: _Prepared, waiting: WaitingCall, value: Any, written: Any
    ) -> Any:
        """Return the JSON of a supplied result. Raises `RunAnswerError` if it is not of the tool's return type."""
        call = waiting.call
        tool = self._tool_of(stored.id, waiting, prepared.added)
        if tool is None:
            tool = await self._provided_tool(stored, prepared, waiting)
        if tool is None or getattr(tool.function, TAKES_ANSWERS, False):  # the tool reads the answer itself
            return written
        try:
            return accepted_result(tool.returns, value, written)
        except ValidationError as error:
            faults = [*faults_of(error)]
            what = f"call {call.id}: the value is not what {call.tool_name} returns, {type_name(tool.returns)}"
            raise RunAnswerError(stored.id, f"{what}: {reason_of(error)}", faults) from None

    def _check_person(self, run_id: str, waiting: WaitingCall, prepared: _Prepared, kind: AnswerKind, by: Any) -> None:
        """Raise `AnswerForbiddenError` if this person may not answer the call. The present rules of its tool count."""
        call_id, name, starter = waiting.call.id, person_name(by), prepared.document.identity
        verb = "approve" if waiting.call.kind == "approval" else "answer"
        tool = self._tool_of(run_id, waiting, prepared.added)
        approvers, not_self = waiting.approvers, waiting.not_self
        if tool is not None and (tool.requires_approval or tool.deferred or tool.on_unknown_outcome == "ask"):
            approvers, not_self = tool.approvers, tool.not_self
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
                fact = f"call {call_id}: {name!r} asked for it, and another person must {verb}"
                raise AnswerForbiddenError(run_id, fact)
            if starter is None and kind not in ("reject", "fail"):
                # From a release in which anonymous callers could ask for it: this person may be the one who asked.
                fact = f"call {call_id}: it is unknown who asked for it; use reject(…) or fail(…), or cancel the run"
                raise AnswerForbiddenError(run_id, fact)

    async def _check_arguments(
        self, stored: StoredRun, prepared: _Prepared, waiting: WaitingCall, arguments: Mapping[str, Any]
    ) -> None:
        """Raise `RunAnswerError` for replaced arguments that are not valid."""
        run_id = stored.id
        tool = self._tool_of(run_id, waiting, prepared.added)
        if tool is None and (tool := await self._provided_tool(stored, prepared, waiting)) is None:
            return
        known = {each.shown_name for each in tool.visible}
        unknown = [(name, "unknown argument") for name in arguments if tool.decode is not None and name not in known]
        call = waiting.call
        try:
            if tool.decode is not None:
                tool.decode(ToolExecutionRequest(call.id, call.tool_name, json.dumps(dict(arguments))))
        except ToolArgumentsError as error:
            unknown = [*error.problems, *unknown]
        if unknown:
            faults = "; ".join(f"{path}: {message}" if path else message for path, message in unknown)
            raise RunAnswerError(run_id, f"call {call.id}: invalid arguments for {call.tool_name}: {faults}", unknown)

    async def _provided_tool(self, stored: StoredRun, prepared: _Prepared, waiting: WaitingCall) -> Tool | None:
        """Ask the tool providers of the call that waits for a tool. Returns None if they do not offer it now."""
        store = await self._opened()
        session = RunSession.of(stored, prepared.document, await store.records(stored.id), store)
        plan, place = prepared.plan, session.root
        arguments: Mapping[str, Any] = prepared.arguments
        if waiting.outer:
            found = self._inner_arguments(stored.id, prepared, waiting)
            if found is None:
                return None
            path = waiting.call.id.rpartition("/")[0]
            (plan, arguments), place = found, RunPlace(session, path, path)
        async with self._scope_of(prepared, await self._identity_of(stored.id, prepared)):
            invocation = Invocation(plan, self._host, arguments, place=place)
            await invocation.open()
        return invocation.toolset.stored(waiting.call.tool_name)

    def _inner_arguments(
        self, run_id: str, prepared: _Prepared, waiting: WaitingCall
    ) -> tuple[MethodPlan, Mapping[str, Any]] | None:
        """Return the method that a call waits in, called as a tool, and its arguments; None for a provider's tool."""
        outer, edited = waiting.outer[-1], prepared.document.answers
        plan = self._plan_of(run_id, outer.service, outer.method)
        tool = self._offered(run_id, plan, outer.tool_name, prepared.added if "/" not in outer.id else ())
        if tool is None or tool.decode is None:
            return None
        written = next((each.answer.arguments for each in edited if each.call_id == outer.id), None)
        text = outer.arguments if written is None else json.dumps(dict(written))
        inner = self._plan_of(run_id, waiting.call.service, waiting.method)
        decoded = tool.decode(ToolExecutionRequest(outer.id, outer.tool_name, text))
        return inner, arguments_as_tool(inner, (), decoded)

    # --- does the run fit this program?

    def _prepared(self, stored: StoredRun) -> _Prepared:
        """Return what is needed to continue a run. Raises `RunIncompatibleError`."""
        document, run_id = self._document(stored), stored.id
        plans = self._host.plans_of(stored.service)
        if not plans:
            raise RunIncompatibleError(run_id, f"this program has no service {stored.service}")
        plan = plans.get(stored.method)
        if plan is None:
            raise RunIncompatibleError(run_id, f"the service {stored.service} has no method {stored.method!r}")
        if document.output != output_fingerprint(plan):
            raise RunIncompatibleError(run_id, f"the return type of {plan.where} has changed")
        arguments = read_arguments(run_id, plan, document)
        for name in document.unwritten:
            if name == plan.call_options:
                raise RunIncompatibleError(run_id, f"the argument {name!r} of {plan.where} was not stored")
        seeds = read_seeds(run_id, self._host.run_seeds, document)
        added: Sequence[Tool] | None = self._host.tools_added_by(document.added_by) if document.added_by else ()
        if added is None:
            raise RunIncompatibleError(run_id, f"this program has no endpoint {document.added_by}, which adds tools")
        edited = {each.call_id for each in document.answers if each.answer.arguments is not None}
        for each in document.waiting:
            tool, call = self._tool_of(run_id, each, added), each.call
            _check_fits(run_id, tool, call.id, call.tool_name, json.dumps(dict(call.arguments)))
            self._check_outer(run_id, each, added, edited)
        return _Prepared(plan, arguments, seeds, document, added)

    def _check_outer(self, run_id: str, waiting: WaitingCall, added: Sequence[Tool], edited: Collection[str]) -> None:
        """Raise `RunIncompatibleError` if a service that a call waits in is no longer reached by the same calls."""
        inside = [*((each.service, each.method) for each in waiting.outer), (waiting.call.service, waiting.method)][1:]
        for outer, (service, method) in zip(waiting.outer, inside, strict=True):
            plan = self._plan_of(run_id, outer.service, outer.method)
            tool = self._offered(run_id, plan, outer.tool_name, added if "/" not in outer.id else ())
            if tool is None:
                continue
            inner = plan_behind(tool)
            if inner is None and tool.bean is not None:
                inner = self._host.plans_of(qualified(class_of(tool.bean))).get(tool.member)
            if inner is None or (qualified(inner.service), inner.name) != (service, method):
                reason = f"the tool {outer.tool_name!r} of {plan.where} is no longer {service}.{method}"
                raise RunIncompatibleError(run_id, reason)
            if outer.id not in edited:
                _check_fits(run_id, tool, outer.id, outer.tool_name, outer.arguments)

    def _tool_of(self, run_id: str, waiting: WaitingCall, added: Sequence[Tool]) -> Tool | None:
        """Return the tool of a pending call; None for one that a tool provider adds during the call.

        `added` are the tools of the endpoint, which only the outermost call has.
        """
        call = waiting.call
        plan = self._plan_of(run_id, call.service, waiting.method)
        return self._offered(run_id, plan, call.tool_name, added if "/" not in call.id else ())

    def _plan_of(self, run_id: str, service: str, method: str) -> MethodPlan:
        plan: MethodPlan | None = self._host.plans_of(service).get(method)
        if plan is None:
            raise RunIncompatibleError(run_id, f"this program has no method {method!r} in {service}")
        return plan

    def _offered(self, run_id: str, plan: MethodPlan, name: str, added: Sequence[Tool]) -> Tool | None:
        """Return a tool of a method; None if only a tool provider can have it. Raises `RunIncompatibleError`."""
        tool = plan.toolset.stored(name) or Toolset.of(added).stored(name)
        if tool is None and not plan.providers:
            raise RunIncompatibleError(run_id, f"{plan.where} no longer offers the tool {name!r}")
        return tool

    async def _identity_of(self, run_id: str, prepared: _Prepared) -> Any:
        """Return the identity for a run that continues. Raises `ForbiddenError` if the loader refuses it."""
        identity = read_identity(prepared.document.identity)
        if identity.is_anonymous:
            return identity
        try:
            loader: Any = await self._host.application_bean(IdentityLoader)
        except ScopeNotActiveError:
            return identity
        if loader is None:
            return identity
        loaded = loader.load(identity)
        if isawaitable(loaded):
            loaded = await loaded
        if loaded is None:
            reason = f"{type(loader).__name__} no longer knows this identity"
            raise ForbiddenError(f"run {run_id}", identity.name, (), reason)
        return identity_from(loaded, f"{type(loader).__name__}.load")

    # --- executing

    async def _execute_owned(
        self,
        stored: StoredRun,
        put: PutEvent | None = None,
    ) -> Result[Any]:
        """Execute a run that this process owns, and write its end. Raises the errors of the method."""
        store = await self._opened()
        prepared = self._prepared(stored)
        cancels = prepared.document.cancels
        identity = (
            read_identity(prepared.document.identity) if cancels else await self._identity_of(stored.id, prepared)
        )
        session = RunSession.of(stored, prepared.document, await store.records(stored.id), store)
        session.wants_result = True
        log = None
        if prepared.document.follows:
            log = EventLog(store, stored.id, stored.generation, self.signals)
            await log.open()
            session.new_events, session.write_events = log.taken, log.flush
        try:
            async with self._scope_of(prepared, identity):
                invocation = Invocation(prepared.plan, self._host, prepared.arguments, place=session.root)
                if self._host.listeners is not None:
                    self._host.listeners.tell(RunResumedEvent(invocation.context, stored.id))
                result = await self._value_of(invocation, log, put)
        except Exception as error:
            if _leaves_unchanged(error, stored.id):
                raise
            if cancels:
                if not isinstance(error, RunCancelledError):
                    logger.error("run %s was cancelled, but not all its tools are undone", stored.id, exc_info=error)
                await self._write_end(session, "cancelled", cancels=False)
                raise RunCancelledError(stored.id, prepared.document.reason) from None
            await self._write_end(session, "failed", error_type=type_name_of(error), error_text=message_of(error))
            raise
        if not isinstance(invocation.end, Suspend):
            await self._write_end(session, "completed", result=write_value(prepared.plan, result.content))
        return result

    async def _value_of(self, invocation: Invocation, log: EventLog | None, put: Any) -> Result[Any]:
        if log is None and put is None:
            value = await run(invocation)
        else:

            async def send(event: ServiceEvent) -> None:
                if log is not None and not isinstance(event, RunSuspended):
                    log.put(event)
                if put is not None:
                    await put(event)

            invocation.yields_suspension = True
            await stream(invocation, send)
            value = invocation.value()
        if isinstance(value, Result):
            return value
        end, state = invocation.end, invocation.state
        assert isinstance(end, Finish)
        output = invocation.plan.output
        reply = end.response.ai_message
        if value is None and output.is_stream and output.structure is not None and not reply.tool_execution_requests:
            value = output.structure.read(reply.text or "").value
        return Result(value, state.executions, state.token_usage, end.finish_reason, state.remembered)

    async def _write_end(self, session: RunSession, status: RunStatus, **facts: Any) -> None:
        """Write the end of a run into its header."""
        assert session.document is not None
        await session.written_events()
        document = session.document.changed(waiting=(), **facts)
        await session.end(RunChanges(status=status, document=document.to_json()))

    async def _drive(self, stored: StoredRun) -> None:
        """See `RunStarting`: execute a run that this process owns; an error of its method is written, not raised."""
        try:
            await self._execute_owned(stored)
        except Exception as error:
            if _leaves_unchanged(error, stored.id):
                raise
            logger.info("run %s failed: %s: %s", stored.id, type(error).__name__, message_of(error))

    @asynccontextmanager
    async def _scope_of(self, prepared: _Prepared, identity: Any) -> AsyncIterator[None]:
        """Open the request scope of a run, with its seeds, its identity and its attributes, outside of other calls.

        The identity is a seed also if it is anonymous: a producer, or the one of a web request, must not replace it.
        """
        seeds = {**prepared.seeds, SecurityIdentity: identity}
        token = current_invocation.set(None)
        try:
            added = tools_added(prepared.added, prepared.document.added_by)
            with added, restored_attributes(prepared.document.attributes):
                async with self._host.open_request(seeds):
                    yield
        finally:
            current_invocation.reset(token)

    # --- for `RunStarting`

    async def _opened(self) -> RunStore:
        return cast("RunStore", await self._host.run_store())

    def _public(self, stored: StoredRun) -> Run[Any]:
        try:
            document = RunDocument.from_json(stored.document)
            _check_shown(document)
        except UnreadableDocumentError as error:
            document = RunDocument(error_type="RunIncompatibleError", error_text=str(error))
        return Run(
            id=stored.id,
            service=stored.service,
            method=stored.method,
            status=stored.status,
            pending=document.pending if stored.status == "suspended" else (),
            created_at=stored.created_at,
            updated_at=stored.updated_at,
            history=document.history,
            error=_error_text(document),
        )

    def _error_text(self, stored: StoredRun) -> str | None:
        return self._public(stored).error

    def _outcome(self, stored: StoredRun) -> Any:
        """Return the value of the method, for a method that returns a `Result` a `Result` with its content."""
        result = self._result_of(stored)
        plan = self._host.plans_of(stored.service)[stored.method]
        return result if plan.output.shape is Shape.RESULT else result.content

    def _result_of(self, stored: StoredRun) -> Result[Any]:
        """Return the stored result of a run that does not run. Raises `RunFailedError` or `RunCancelledError`."""
        document = self._document(stored)
        if stored.status == "failed":
            raise RunFailedError(stored.id, document.error_type or "", document.error_text or "")
        if stored.status == "cancelled":
            raise RunCancelledError(stored.id, document.reason)
        if stored.status == "suspended":
            return Result(None, (), None, FinishReason.TOOL_EXECUTION, (), document.pending, stored.id)
        plan = self._host.plans_of(stored.service).get(stored.method)
        if plan is None:
            raise RunIncompatibleError(stored.id, f"this program has no method {stored.service}.{stored.method}")
        try:
            return Result(read_value(plan, document.result))
        except Exception as error:  # pydantic raises many kinds of exceptions
            raise RunIncompatibleError(stored.id, f"its result no longer fits {plan.where}: {error}") from error

    def _document(self, stored: StoredRun) -> RunDocument:
        try:
            return RunDocument.from_json(stored.document)
        except UnreadableDocumentError as error:
            raise RunIncompatibleError(stored.id, str(error)) from error

    async def _new_run(
        self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[StoredRun, builtins.list[StoredRecord]]:
        plan, bound = self._host.bound_call(method, args, kwargs)
        await self._refuse_without_role(plan, bound)
        return await self.new_run(plan, bound, follows=True), []

    async def call(self, plan: MethodPlan, arguments: Mapping[str, Any]) -> Any:
        """Call a durable method: start its run, or wait for the run with the same id, and return the method's value.

        Cancelling the caller ends the waiting, not the run. Raises the errors of the method, or `RunFailedError` if
        the run failed earlier, and `RunConflictError`.
        """
        return await self._on_own_loop(lambda: self._call(plan, arguments))

    async def _call(self, plan: MethodPlan, arguments: Mapping[str, Any]) -> Any:
        await self._refuse_without_role(plan, arguments)
        store = await self._opened()
        wanted = await self.new_run(plan, arguments, follows=False)
        # Shielded: if the caller leaves while the run is created, the run must still be executed.
        task = await asyncio.shield(asyncio.ensure_future(self._created(store, wanted)))
        result = None if task is None else await _result_unless_lost(task, wanted.id)
        if task is None:
            found = await self._loaded(wanted.id)
            if (reason := self._conflict(found, wanted)) is not None:
                raise RunConflictError(wanted.id, reason)
        if result is None:
            async with self._within_time_limit(wanted.id):
                result = await self._until_settled(wanted.id)
        if plan.output.shape is Shape.RESULT:
            return result
        if result.pending:
            raise RunSuspendedError(wanted.id, result.pending)
        return result.content

    async def _created(self, store: RunStore, wanted: StoredRun) -> asyncio.Task[Result[Any]] | None:
        """Create a run and execute it in a task. Returns None if the id exists."""
        if not await store.create(wanted, owner=self.owner):
            return None
        return self._in_background(replace(wanted, generation=1, owner=self.owner), copy_context())

    def _in_background(
        self, owned: StoredRun, context: Context, put: PutEvent | None = None
    ) -> asyncio.Task[Result[Any]]:
        """Execute a run that this process owns in a task, which continues when its caller leaves.

        `put` takes None when the run begins, and then its events.
        """

        async def work() -> Result[Any]:
            try:
                async with self._owned.owned(owned.id, owned.generation):
                    if put is not None:
                        await put(None)
                    return await self._execute_owned(owned, put)
            finally:
                self.signals.announce(owned.id)

        task = asyncio.create_task(work(), context=context)
        self._keep_in_background(owned.id, task)
        return task

    async def new_run(self, plan: MethodPlan, arguments: Mapping[str, Any], *, follows: bool) -> StoredRun:
        """Return the header of a new run, with a new id unless the method has a `RunId` parameter.

        Raises `IllegalConfigurationError` for arguments, seeds and attributes that cannot be stored.
        """
        from uuid import uuid4

        from ..errors import IllegalConfigurationError, Problem
        from ..services.memory import ChatMemoryKey

        given = None if plan.run_id_parameter is None else arguments[plan.run_id_parameter]
        if given is not None and not is_storable(given):
            raise ValueError(f"{plan.where}: the run id must be a text of 1 to 200 characters")
        attributes, added_by = current_attributes.get(), place_of_added_tools()
        left = remaining(current_account.get())
        document = await describe(plan, self._host, arguments, attributes, added_by, left)
        if document.unwritten:
            fact = f"the argument {document.unwritten[0]!r} cannot be stored with the run"
            fix = "use a value of the declared type, which pydantic can write and read"
            raise IllegalConfigurationError([Problem(plan.where, fact, fix)])
        memory_id = None if plan.memory_parameter is None else arguments[plan.memory_parameter]
        key = None if plan.window is None or memory_id is None else ChatMemoryKey.of(plan.service, memory_id)
        stored = header(given or uuid4().hex, plan, key)
        return replace(stored, document=document.changed(follows=follows).to_json())

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
            memory_id = None if plan.memory_parameter is None else arguments[plan.memory_parameter]
            context = InvocationContext(plan.service, plan.name, memory_id, attributes=current_attributes.get())
            self._host.listeners.tell(ServiceStartedEvent(context))
            self._host.listeners.tell(ServiceFailedEvent(context, error, 0.0))
        raise error

    def _conflict(self, found: StoredRun, wanted: StoredRun) -> str | None:
        """Return how a stored run differs from a call with its id; None if the call may have its answer."""
        if (found.service, found.method) != (wanted.service, wanted.method):
            return "another method"
        old, new = self._document(found), self._document(wanted)
        person, caller = old.identity or {}, new.identity or {}
        if person.get("name") != caller.get("name"):
            return "another identity"
        attributes = person.get("attributes", {}), caller.get("attributes", {})
        if keys := [each for each in _differing(*attributes) if each in self._host.run_identity]:
            return f"other attributes of the identity: {', '.join(keys)}"
        if new.identity is None and (keys := _differing(old.seeds, new.seeds)):
            return f"other seeds: {', '.join(keys)}"
        if old.arguments != new.arguments:
            return "other arguments"
        if keys := _differing(old.attributes, new.attributes):
            return f"other invocation attributes: {', '.join(keys)}"
        return None

    # --- the rest

    async def _run_engine(self) -> RunEngine:
        return cast("RunEngine", await self._host.run_engine())

    def _home(self) -> asyncio.AbstractEventLoop | None:
        return cast("asyncio.AbstractEventLoop | None", self._host.loop)

    async def _loaded(self, run_id: str) -> StoredRun:
        # No run has another id, and databases refuse some of them with other errors.
        stored = await (await self._opened()).load(run_id) if is_storable(run_id) else None
        if stored is None:
            raise RunNotFoundError(run_id if is_storable(run_id) else shortened(run_id))
        return stored

    async def _on_own_loop(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return cast("T", await self._host.on_own_loop(work))

    def _tell_answers(
        self, plan: MethodPlan, run_id: str, given: Sequence[tuple[WaitingCall, Answer]], by: str | None
    ) -> None:
        if self._host.listeners is None:
            return
        context = InvocationContext(plan.service, plan.name)
        for each, answer in given:
            self._host.listeners.tell(RunAnsweredEvent(context, run_id, each.call, answer.kind, by))

    async def suspended_in(self, key: Any) -> str | None:
        """Return the id of the suspended run of a conversation, or None."""
        return await (await self._opened()).suspended_in(conversation_key(key))


def _differing(stored: Mapping[str, Any], given: Mapping[str, Any]) -> builtins.list[str]:
    """Return the keys whose values differ, sorted."""
    nothing = object()
    keys = sorted({*stored, *given})
    return [each for each in keys if stored.get(each, nothing) != given.get(each, nothing)]


MAX_REASON = 10_000
"""The maximum length of a reason, in characters."""

MAX_ANSWER = 1_000_000
"""The maximum length of replaced arguments, and of the value of a response, in characters of JSON."""


def is_storable(run_id: object) -> bool:
    """Return True for a text that can be the id of a run: 1 to 200 characters that a database can store."""
    return isinstance(run_id, str) and 0 < len(run_id) <= 200 and is_text(run_id)


def is_text(given: str) -> bool:
    """Return True for a text that a database can store."""
    return "\0" not in given and not any("\ud800" <= each <= "\udfff" for each in given)


def shortened(given: object) -> str:
    """Return what a client sent, for an error text."""
    text = repr(given)
    return text if len(text) <= 100 else f"{text[:99]}…"


def _json_arguments(run_id: str, call: PendingCall, arguments: Mapping[str, Any]) -> dict[str, Any]:
    try:
        written = dict(json_value(dict(arguments)))
    except Exception as error:  # any exception of a value's own serializers
        fact = f"call {call.id}: the arguments cannot be written as JSON ({shortened(str(error))})"
        raise RunAnswerError(run_id, fact) from error
    _check_size(run_id, call, "the arguments", json.dumps(written), MAX_ANSWER)
    return written


def _check_size(run_id: str, call: PendingCall, what: str, text: str, limit: int) -> None:
    """Raise `RunAnswerError` for a part of an answer that is too long."""
    if len(text) > limit:
        fact = f"{what} must have at most {limit:,} characters; got {len(text):,}"
        raise RunAnswerError(run_id, f"call {call.id}: {fact}")


def _check_fits(run_id: str, tool: Tool | None, call_id: str, name: str, arguments: str) -> None:
    """Raise `RunIncompatibleError` if a tool no longer accepts the arguments of a call."""
    if tool is None or tool.decode is None:
        return
    try:
        tool.decode(ToolExecutionRequest(call_id, name, arguments))
    except ToolArgumentsError as error:
        faults = "; ".join(f"{path}: {message}" if path else message for path, message in error.problems)
        reason = f"the tool {name!r} no longer accepts the arguments of call {call_id} ({faults})"
        raise RunIncompatibleError(run_id, reason) from error


def _error_text(document: RunDocument) -> str | None:
    if document.error_type is not None:
        return printable(f"{document.error_type}: {document.error_text}")
    return None if document.reason is None else printable(document.reason)


_ROOM = 10
"""The levels of JSON that a client may put around a run: pydantic writes 255 levels."""


def _check_shown(document: RunDocument) -> None:
    """Raise `UnreadableDocumentError` if a client cannot get the pending calls and the history as JSON.

    A model can write half a surrogate, or nest its arguments too deeply: one such run must not break all lists.
    """
    shown: Any = (document.pending, document.history)
    for _ in range(_ROOM):
        shown = [shown]
    try:
        to_json(shown)
    except (ValueError, RecursionError):
        reason = "its pending calls or its history have half a surrogate or are nested too deeply"
        raise UnreadableDocumentError(reason) from None


async def _result_unless_lost(task: asyncio.Task[Result[Any]], run_id: str) -> Result[Any] | None:
    """Wait for a run that a task executes; None if another process has taken it, for example to cancel it.

    Cancelling the caller does not cancel the task.
    """
    try:
        return await asyncio.shield(task)
    except LeaseLostError as error:
        if error.run_id != run_id:  # a tool's error about another run
            raise
        return None


_END = object()


class ResumedEvents(AsyncIterator[ServiceEvent]):
    """The events of a run that continues, from `runs.resume_stream(…)`. Close it with `aclose()` to leave it early."""

    def __init__(
        self,
        steps: AsyncGenerator[ServiceEvent | None, None],
        on_home: Callable[[Callable[[], Coroutine[Any, Any, Any]]], Awaitable[Any]],
    ) -> None:
        self._steps, self._on_home = steps, on_home
        self._has_begun = False

    async def begin(self) -> None:
        """Store the answers and continue the run; without this call, the first step of the iteration does it.

        Raises the errors of `resume` about the answers, such as `RunAnswerError` and `RunNotFoundError`.
        """
        if not self._has_begun:
            self._has_begun = True
            await self._next()  # None, unless the run has ended

    def __aiter__(self) -> ResumedEvents:
        return self

    async def __anext__(self) -> ServiceEvent:
        """Return the next event. Raises the errors of `resume`."""
        await self.begin()
        event = await self._next()
        if event is _END:
            raise StopAsyncIteration
        return cast("ServiceEvent", event)

    async def aclose(self) -> None:
        """End the iteration. The run continues."""
        self._has_begun = True
        await self._on_home(self._close)

    async def _next(self) -> object:
        """Return the next item of the steps; `_END` at the end, because no coroutine can raise StopAsyncIteration."""

        async def step() -> object:
            return await anext(self._steps, _END)

        try:
            return await self._on_home(step)
        except BaseException:
            await self._on_home(self._close)
            raise

    async def _close(self) -> None:
        await self._steps.aclose()


def runs_of(service: object) -> Runs:
    """Return the runs of a service that `create_ai_service` made.

        await runs_of(desk).resume(run_id, {call.id: approve()})

    Raises `TypeError` for other objects; in a container use `container.runs`, or inject `Runs`.
    """
    find: Callable[[], Runs] | None = getattr(type(service), "__toolbox_runs__", None)
    if find is None:
        raise TypeError(f"runs_of: expected a service made by create_ai_service, got {type(service).__name__}")
    return find()
