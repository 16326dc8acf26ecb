"""`Resuming`: stores the answers of persons and continues the run, with or without its events.

Not here: whether an answer is valid (`answer_checks`), executing the run (`run_execution`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextvars import copy_context
from dataclasses import replace
from datetime import datetime
from typing import Any, cast

from ..context import InvocationContext
from ..conversations.log import KeptApproval, RememberedApproval
from ..errors import RunAnswerError
from ..events import RunAnsweredEvent
from ..safe_text import describe_store_error
from ..service_events import ServiceEvent
from ..services.outputs import Result
from .answer_checks import check_answer
from .documents import GivenAnswer, RunDocument, WaitingCall, find_expired, next_expiry
from .persons import history_name, person_name, starter_of, write_person
from .prepared_runs import PreparedRuns
from .run_answers import Answer, HistoryEntry, reject
from .run_body import PreparedRun
from .run_execution import PutEvent, RunExecution, wait_unless_lost
from .runs_host import RunsHost
from .store import RunChanges, StoredRun
from .stored_runs import StoredRuns

logger = logging.getLogger("toolbox.runs")

EXPIRED = "expired"
"""What the model and the history read about a call that nobody has answered in time."""


class Resuming:
    """Answers and continues the runs of a host."""

    def __init__(self, host: RunsHost, runs: StoredRuns, preparing: PreparedRuns, execution: RunExecution) -> None:
        self._host, self._runs, self._preparing, self._execution = host, runs, preparing, execution

    async def resume_run(
        self, run_id: str, answers: Mapping[str, Answer], by: Any, put: PutEvent | None = None
    ) -> Result[Any]:
        """Wait for a run that continues; cancelling this ends the waiting, not the run. `put` takes its events.

        The run belongs to no request: not to the one that resumes it, whose beans, headers, limits and identity it must
        not see, and not to a caller who leaves. So it is a task of the container, in an empty context.
        """
        if not isinstance(answers, Mapping):
            got = type(answers).__name__
            raise TypeError(f"resume(run_id, answers): expected a dictionary of answers by the ids of calls, got {got}")
        await self._execution.refuse_inside_conversation(run_id)
        request = copy_context()

        def tell(*answered: Any) -> None:  # the answers, unlike the run, belong to this request
            request.run(self._tell_answers, *answered)

        async with self._execution.within_time_limit(run_id):
            if answers:
                task = self._execution.spawn(run_id, self._answer_and_continue(run_id, answers, by, tell, put))
                if (result := await wait_unless_lost(task, run_id)) is not None:
                    return result
            return await self._execution.settle(run_id, put, person=by)

    async def _answer_and_continue(
        self,
        run_id: str,
        answers: Mapping[str, Answer],
        by: Any,
        tell: Callable[..., object],
        put: PutEvent | None = None,
    ) -> Result[Any] | None:
        """Store the answers and take the run, in one step; then continue it. `tell` sends the events."""
        stored = await self._runs.load(run_id)
        if stored.status != "suspended":
            raise RunAnswerError(run_id, f"it is {stored.status}, so it has no pending calls to answer")

        prepared = self._preparing.prepare(stored)
        person = write_person(run_id, by)
        given = [await check_answer(stored, prepared, call_id, answer, by) for call_id, answer in answers.items()]
        await self._refuse_expired(run_id, given)
        prepared = await self._preparing.admit_to_method(run_id, prepared, by)
        name = person_name(by)
        now = await self._runs.now()
        document = _with_answers(prepared.document, now, stored.updated_at, given, person, history_name(by))
        taken = await self._take(stored, document)
        if taken is None:
            raise RunAnswerError(run_id, "someone else answered this run first; reload it with runs.get(run_id)")
        tell(stored, prepared, given, name)
        await self._remember(prepared, run_id, given, person, document.history[-len(given) :])
        return await self._execution.continue_run(taken, put, replace(prepared, document=document))

    async def _remember(
        self,
        prepared: PreparedRun,
        run_id: str,
        given: Sequence[tuple[WaitingCall, Answer]],
        person: Any,
        entries: Sequence[HistoryEntry],
    ) -> None:
        """Let the conversation of a run that was taken remember approvals; log what keeps them from being stored.

        After the answers: an approval that another person was faster to reject must not count for other calls. If the
        process ends in between, or the store fails, further calls ask again.
        """
        key, owner = prepared.conversation, starter_of(prepared.document.identity, self._host.run_identity)
        kept = [
            KeptApproval(
                shown=RememberedApproval(each.call.tool_name, entry.by, entry.at),
                service=each.call.service,
                owner=owner,
                person=person,
                run_id=run_id,
                call_id=each.call.call_id,
            )
            for (each, answer), entry in zip(given, entries, strict=True)
            if answer.remember is not None and owner is not None
        ]
        if not kept or key is None:
            return
        try:
            await (await self._host.memories()).remember(key, kept)
        except Exception as error:
            what = describe_store_error(error)
            logger.error("the conversation of run %s does not remember an approval: %s", run_id, what)

    async def _take(self, stored: StoredRun, document: RunDocument) -> StoredRun | None:
        """Store the answers in this document and take the run, in one step; None if it has changed."""
        changes = RunChanges(status="running", document=document.to_json(), owner=self._runs.owner)
        return await self._runs.change(stored, document, changes)

    # --- calls that nobody has answered in time

    async def _refuse_expired(self, run_id: str, given: Sequence[tuple[WaitingCall, Answer]]) -> None:
        """Raise `RunAnswerError` for a call that has expired, by the clock of the store."""
        waiting = [each for each, _ in given]
        if next_expiry(waiting) is not None:
            for call in (each.call for each in find_expired(waiting, await self._runs.store_time())):
                raise RunAnswerError(run_id, f"call {call.id}: it expired at {call.expires_at} and is rejected")

    async def expire(self, run_id: str) -> Coroutine[Any, Any, object] | None:
        """Reject the calls of a suspended run that have expired, and take it, as for an answer of nobody.

        Returns the execution that continues it; None if there is nothing to reject.
        """
        stored, now = await self._runs.load(run_id), await self._runs.store_time()
        if stored.status != "suspended":
            return None
        prepared = self._preparing.prepare(stored)
        expired = [(each, reject(EXPIRED)) for each in find_expired(prepared.document.waiting, now)]
        if not expired:
            return None
        prepared = await self._preparing.admit_to_method(run_id, prepared)
        document = _with_answers(prepared.document, now, stored.updated_at, expired, None, None)
        if (taken := await self._take(stored, document)) is None:
            return None  # a person, or another process, was faster
        self._runs.looks.announce(run_id)
        self._tell_answers(stored, prepared, expired, None)
        continued = self._execution.continue_run(taken, None, replace(prepared, document=document))
        return self._execution.execute_taken(taken, continued)

    def _tell_answers(
        self, stored: StoredRun, prepared: PreparedRun, given: Sequence[tuple[WaitingCall, Answer]], by: str | None
    ) -> None:
        if self._host.listeners is None:
            return
        context = InvocationContext(self._runs.find_service(stored.service) or object, stored.method)
        run_id, trace = stored.id, prepared.document.trace
        for each, answer in given:
            remembered = answer.remember is not None
            self._host.listeners.tell(RunAnsweredEvent(context, run_id, each.call, answer.kind, by, trace, remembered))

    async def stream_events(
        self, run_id: str, answers: Mapping[str, Answer], by: Any
    ) -> AsyncGenerator[ServiceEvent | None, None]:
        """Yield the events of a run that continues. The first item is None: the answers are stored."""
        ready: asyncio.Queue[ServiceEvent | None] = asyncio.Queue(1)
        has_left = False

        async def put(event: ServiceEvent | None) -> None:
            if not has_left:
                await ready.put(event)

        # Not in this generator's own context: its steps run in different tasks.
        task = asyncio.create_task(self._host.on_own_loop(lambda: self.resume_run(run_id, answers, by, put)))
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


def _with_answers(
    document: RunDocument,
    now: datetime,
    suspended_at: datetime,
    given: Sequence[tuple[WaitingCall, Answer]],
    person: Any,
    name: str | None,
) -> RunDocument:
    """Return the document of a run with these answers, whose calls wait no longer.

    The other calls keep the time since when they wait. Both times are of the store.
    """
    ids = {each.call.id for each, _ in given}
    answers = [
        GivenAnswer(call_id=each.call.id, answer=answer, asked=each.call.arguments, by=person, origin=each.origin)
        for each, answer in given
    ]
    history = [
        HistoryEntry(
            now, name, each.call.id, each.call.tool_name, answer.kind, answer.reason, answer.remember is not None
        )
        for each, answer in given
    ]
    return document.changed(
        waiting=tuple(
            replace(each, since=each.since or suspended_at) for each in document.waiting if each.call.id not in ids
        ),
        answers=(*document.answers, *answers),
        history=(*document.history, *history),
    )


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
