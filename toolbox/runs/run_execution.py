"""`RunExecution`: executes the runs that this process owns, and waits for those that others execute.

Every execution is one task. What differs is who waits for it: `settle` and `wait_unless_lost` leave it running when
their caller leaves; `execute_or_wait` cancels it, so that another process can continue the run. Not here: becoming the
owner with an answer (`resuming`), making the header of a new run (`service_calls`), what it does (`run_body`),
recording it (`run_session`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import Context
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

from ..chat import RunSuspended
from ..context import context_of_a_run, current_invocation, current_limit
from ..conversations.memories import Program
from ..conversations.stopping import STOPPED
from ..errors import (
    InvocationTimeoutError,
    LeaseLostError,
    MemoryInUseError,
    RunBusyError,
    RunCancelledError,
    RunIncompatibleError,
    ToolboxError,
    leaves_run_unchanged,
)
from ..service_events import ServiceEvent
from ..services.outputs import Result
from ..services.recording_needs import RecordedFailureError, RecordedToolError
from ..store_clock import clock_of
from ..tools.failures import message_of
from .documents import RunDocument, with_cancellation
from .event_log import EventLog
from .next_tries import describe_failure, wait_before_next_try
from .prepared_runs import PreparedRuns, admit, open_scope
from .run_answers import HistoryEntry
from .run_body import PreparedRun, RunBody
from .run_leases import HeldRun, RunLeases
from .run_session import RunSession
from .runs_host import RunsHost
from .store import RunChanges, RunLook, RunStore, StoredRecord, StoredRun
from .stored_runs import StoredRuns
from .waiting_entries import WaitingEntries

logger = logging.getLogger("toolbox.runs")

_MOST_STARTERS = 1000
"""Started runs whose users are kept: another process may execute a run, so that this one never does."""

T = TypeVar("T")

PutEvent: TypeAlias = Callable[[ServiceEvent | None], Awaitable[None]]
"""Passes on an event of a run, and waits until its reader has room. None: the answers are stored, the run begins."""


@dataclass(frozen=True, slots=True)
class NewRun:
    """A run that was not stored so far: its header, what an execution needs of it, and all arguments as JSON values."""

    stored: StoredRun
    prepared: PreparedRun
    given: Mapping[str, Any]

    def with_document(self, document: RunDocument) -> NewRun:
        """Return the run with another document."""
        stored = replace(self.stored, document=document.to_json())
        return replace(self, stored=stored, prepared=replace(self.prepared, document=document))


class RunExecution:
    """Executes runs of a host. `report_to` may name a function that gets each start and end, for the worker.

    `when_one_ends` is called after the task of a run, for those that wait for room.
    """

    def __init__(
        self,
        host: RunsHost,
        runs: StoredRuns,
        preparing: PreparedRuns,
        watch_times: Callable[[], Awaitable[None]],
    ) -> None:
        self._host, self._runs, self._preparing, self._watch_times = host, runs, preparing, watch_times
        self.leases, self.waiting_entries = RunLeases(runs), WaitingEntries(host, runs)
        self.report_to: Callable[[str, StoredRun], None] | None = None
        self.when_one_ends: Callable[[], None] = lambda: None
        self._tasks: dict[asyncio.Task[Any], str] = {}
        self._starters: dict[str, Any] = {}

    # --- tasks

    def spawn(self, run_id: str, work: Coroutine[Any, Any, T], context: Context | None = None) -> asyncio.Task[T]:
        """Await `work` in a task, which goes on if its caller leaves, and which the stop cancels.

        The context is empty by default: a run that continues belongs to no request, limit or trace of the code that
        continues it.
        """

        def forget(done: asyncio.Task[Any]) -> None:
            self._tasks.pop(done, None)
            self.when_one_ends()
            if not done.cancelled() and (error := done.exception()) is not None:  # also reads it for callers that left
                logger.debug("run %s ended with %s", run_id, type(error).__name__)

        task = asyncio.create_task(work, context=context or context_of_a_run())
        self._tasks[task] = run_id
        task.add_done_callback(forget)
        return task

    def kept_ids(self) -> set[str]:
        """Return the ids of the runs that have a task here."""
        return {*self._tasks.values()}

    async def stop(self) -> None:
        """Cancel the runs that this process executes, and end their leases."""
        running = [*self._tasks]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self.leases.stop()

    # --- waiting for a run

    async def settle(
        self, run_id: str, put: PutEvent | None = None, stored: StoredRun | None = None, person: Any = None
    ) -> Result[Any]:
        """Wait until a run has ended or is suspended, and return its result; continue it if no process runs it.

        `stored` is its header, if it was read just now. `person` is who waits; see `admit`. Raises the errors of
        the method, `RunFailedError`, `RunCancelledError` and `RunNotFoundError`.
        """
        seen: RunLook | None = None
        while True:
            stored = stored or await self._runs.load(run_id)
            if stored.status != "running":
                result = await self._preparing.result_of(stored)
                if put is not None:
                    await put(None)
                    if result.pending:
                        await put(RunSuspended(run_id, tuple(result.pending)))
                return result
            task = self.spawn(run_id, self._take(stored, put, person))
            if (found := await wait_unless_lost(task, run_id)) is not None:
                return found
            seen, stored = await self._until_free(run_id, seen), None

    async def _take(self, stored: StoredRun, put: PutEvent | None, person: Any) -> Result[Any] | None:
        """Continue a run that no process runs; None while another process runs it."""
        # First: a run that does not fit, or may not continue, keeps its owner.
        prepared = await admit(self._host, stored.id, self._preparing.prepare(stored), person)
        owned = await self._runs.acquire(stored.id)
        if owned is None:
            return None
        same = prepared if owned.document == stored.document else None
        return await self.execute_acquired(owned, put, same, person)

    async def execute_or_wait(self, run_id: str, timeout: float | None) -> StoredRun:
        """Execute a run here, or wait while another process owns it; return it when it has ended or is suspended.

        Raises `RunBusyError` after `timeout` seconds without owning it, and the errors of `execute_taken`.
        """
        until = None if timeout is None else time.monotonic() + timeout
        seen: RunLook | None = None
        while True:
            was_free = await self.spawn(run_id, self._execute_if_free(run_id))
            stored = await self._runs.load(run_id)
            if stored.status != "running" or not (was_free or stored.owner is None):
                self._starters.pop(run_id, None)
            if stored.status != "running":
                return stored
            if was_free:  # it was lost, or is tried again later
                continue
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                raise RunBusyError(run_id)
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    seen = await self._until_free(run_id, seen)

    async def _execute_if_free(self, run_id: str) -> bool:
        """Take a run and execute it; False if it is not runnable."""
        # It is taken before anything is checked, so that each try has another generation: an engine may deliver a run
        # only once in each generation.
        owned = await self._runs.acquire(run_id)
        if owned is not None:
            starter = self._starters.get(run_id)
            await self.execute_taken(owned, self.execute_acquired(owned, person=starter))
        return owned is not None

    async def _until_free(self, run_id: str, seen: RunLook | None) -> RunLook:
        """Wait for a look after `seen` at which no process executes the run, and return it."""
        while True:
            seen = await self._runs.looks.after(run_id, seen)
            if seen.status != "running" or seen.is_runnable:
                return seen

    def remember_starter(self, run_id: str, identity: Any) -> None:
        """Keep who has started a run while this process executes it: the token is not stored with the run.

        It is kept after an error and until the next try too, which are here, perhaps.
        """
        if not identity.is_anonymous:
            self._starters[run_id] = identity
            if len(self._starters) > _MOST_STARTERS:
                self._starters.pop(next(iter(self._starters)))

    async def execute_taken(self, owned: StoredRun, execution: Coroutine[Any, Any, object]) -> None:
        """Await the execution of a run that this process has just taken. An error that has ended it is not raised.

        Returns also if the run is tried again later, or was lost. Raises the errors after which the run goes on
        elsewhere or later.
        """
        if self.report_to is not None:
            self.report_to("executes", owned)
        try:
            await execution
        except Exception as error:
            if isinstance(error, LeaseLostError) and error.run_id == owned.id:
                logger.warning("another process has taken over run %s", owned.id)
            elif leaves_run_unchanged(error, owned.id) or await self._is_still_running(owned):
                raise
            else:
                _log_end(owned.id, error)
        finally:
            if self.report_to is not None:
                await self._report_end(self.report_to, owned)

    async def _is_still_running(self, owned: StoredRun) -> bool:
        """Return True if an error came before or after the method, so that no end of the run is written."""
        now = await self._runs.find(owned.id)
        return now is not None and (now.status, now.generation) == ("running", owned.generation)

    async def _report_end(self, report_to: Callable[[str, StoredRun], None], owned: StoredRun) -> None:
        with suppress(Exception):  # the database is away
            now = await self._runs.find(owned.id)
            report_to(now.status if now is not None else "deleted", owned)

    @asynccontextmanager
    async def within_time_limit(self, run_id: str) -> AsyncIterator[None]:
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
            stored = await self._runs.load(run_id)
            raise InvocationTimeoutError(self._runs.label_of(stored.service), stored.method, around.seconds) from None

    async def refuse_inside_conversation(self, run_id: str) -> None:
        """Raise `MemoryInUseError` in code for which a call or block of the run's conversation waits.

        The run would wait for its turn for ever.
        """
        if entered := (await self._host.memories()).entered_by(Program()):
            key = self._runs.conversation_of(await self._runs.load(run_id))
            if key is not None and key in entered:
                raise MemoryInUseError(key.service, key.memory_id)

    # --- one execution

    async def create_and_execute(self, new: NewRun) -> Result[Any] | None:
        """Store a new run with this process as its owner, and execute it. Returns None if the id exists.

        What was encoded a moment ago is not read again.
        """
        async with self._runs.using(new.stored.id) as store:
            is_new = await store.create(new.stored, owner=self._runs.owner)
        if not is_new:
            return None
        owned = replace(new.stored, generation=1, owner=self._runs.owner)
        async with self.leases.hold(owned) as held:
            return await self._execute_held(held, new.prepared, (), None)

    async def continue_run(
        self, owned: StoredRun, put: PutEvent | None = None, prepared: PreparedRun | None = None, person: Any = None
    ) -> Result[Any] | None:
        """Continue a run that this process has taken. Raises the errors of the method; None if it is tried again later.

        `put` takes None when the run begins, and then its events. `prepared` is what the caller has prepared and
        admitted before it took the run. Without it, `person` is who makes the run continue.
        """
        async with self.leases.hold(owned) as held:
            return await self._continue_held(held, prepared or await self._prepare(owned, person), put)

    async def execute_acquired(
        self, owned: StoredRun, put: PutEvent | None = None, prepared: PreparedRun | None = None, person: Any = None
    ) -> Result[Any] | None:
        """Do the same with a run that this process has acquired: that is one more execution, unless it is undone."""
        async with self.leases.hold(owned) as held:
            prepared = prepared or await self._prepare(owned, person)
            if not prepared.document.cancels:
                prepared = await self._count(owned, prepared)
            return await self._continue_held(held, prepared, put)

    async def _prepare(self, owned: StoredRun, person: Any) -> PreparedRun:
        return await admit(self._host, owned.id, self._preparing.prepare(owned), person)

    async def _count(self, owned: StoredRun, prepared: PreparedRun) -> PreparedRun:
        """Store that an execution of the run begins. One that does not fit this program has not begun."""
        document = prepared.document
        document = document.changed(attempts=document.attempts + 1, error_type=None, error_text=None)
        changes = self._runs.moved(owned, document, RunChanges(document=document.to_json()))
        async with self._runs.using(owned.id) as store:
            await store.append(owned.id, owned.generation, [], changes)
        return replace(prepared, document=document)

    async def _continue_held(self, held: HeldRun, prepared: PreparedRun, put: PutEvent | None) -> Result[Any] | None:
        if put is not None:
            await put(None)
        records = await self._runs.records(held.run.id)
        return await self._execute_held(held, prepared, records, put)

    async def _execute_held(
        self, held: HeldRun, prepared: PreparedRun, records: Sequence[StoredRecord], put: PutEvent | None
    ) -> Result[Any] | None:
        """Execute the method of a run that this process owns, and write the end. Raises the errors of the method.

        Returns None if it has failed and is tried again later.
        """
        # An error of the method ends the run, in the store and for the caller. Four errors do not: the run is lost, the
        # store does not answer, this program does not fit, or the token of the run's user is needed, who is not there.
        # What really happened is then in the store, and the next owner continues from there. Writing an end would
        # overwrite it with a guess.
        #
        # An error of the store is known by its type, so everything between here and the end uses the store through the
        # session: another error would be taken for one of the method.
        session = RunSession.of(held.run, prepared.document, records, await self._runs.open())
        session.is_without_user = prepared.is_without_user
        session.leave, session.is_wished = held.leave, lambda: held.wish is not None
        session.stop = partial(_stop, held, await self._runs.open())
        log = EventLog(session, self._runs.looks) if prepared.document.follows else None
        goes_on = prepared.body.waits_in_conversation
        try:
            if goes_on:
                session.without_turn = await self.waiting_entries.when_run_ends(prepared.conversation, session.id)
            if log is not None:
                session.write_events = log.flush
                await log.open()
            if not prepared.document.cancels:
                held.begin()
            return await self._run_method(session, prepared, log, put)
        except (Exception, asyncio.CancelledError) as error:
            # If it has left, it is suspended; then something around it failed, such as a bean that is closed.
            before = None if held.wish is not None or session.has_left else prepared.before
            if before is not None and _is_incompatible(error, session.id):
                await session.write_back(before)
            if session.has_left or session.stays_after(error):
                raise
            if held.wish is None:
                if isinstance(error, Exception) and await self._write_failure(session, prepared.body, error):
                    return None
                raise
            if (wish := await held.take_wish()) is None:
                raise
            prepared = await self._cancel(session, prepared, wish)
        finally:
            held.has_left = session.has_left
            await session.leave_conversation()
            if session.ended is not None and goes_on:
                await self.waiting_entries.end(prepared.conversation, session.id, session.ended)
            if log is not None:
                await log.close()
        return await self._continue_held(held, prepared, None)

    async def _cancel(self, session: RunSession, prepared: PreparedRun, wish: HistoryEntry) -> PreparedRun:
        """End a run for a wish, with what was said until then. Raises `RunCancelledError`.

        Returns what to execute next, in place of the method, if the tools of the run are to be undone.
        """
        document = with_cancellation(prepared.document, wish)
        if not self._preparing.may_undo_tools():
            await session.write_end("cancelled", reason=document.reason, history=document.history)
            raise RunCancelledError(session.id, document.reason) from None
        document = document.changed(cancels=True)
        await session.write_document(document)
        return await admit(self._host, session.id, replace(prepared, document=document), prepared.identity)

    async def _write_failure(self, session: RunSession, body: RunBody, error: Exception) -> bool:
        """Write that a run ends with an error, or when it is tried again; return True in the second case.

        Raises `RunCancelledError` for a run that was cancelled, and is undone.
        """
        document = session.document
        if document is not None and document.cancels:
            # A recorded failure is raised when the tools are undone: the run had failed when it was cancelled.
            if not isinstance(error, (RunCancelledError, RecordedFailureError, RecordedToolError)):
                logger.error("run %s was cancelled, but not all its tools are undone", session.id, exc_info=error)
            await session.write_end("cancelled", cancels=False)
            raise RunCancelledError(session.id, document.reason) from None
        facts = describe_failure(error, session)
        wait = wait_before_next_try(error, body.wait_after, session)
        if wait is None:
            await session.write_end("failed", **facts)
            return False
        next_at = await session.write_next_try(wait, **facts)
        await self._watch_times()
        logger.info("run %s failed with %s; it is tried again at %s", session.id, facts["error_type"], next_at)
        return True

    async def _run_method(
        self, session: RunSession, prepared: PreparedRun, log: EventLog | None, put: PutEvent | None
    ) -> Result[Any]:
        """Call the method of a run in its own scope, and write that it has completed, unless it is suspended."""

        last: list[ServiceEvent] = []

        async def send(event: ServiceEvent) -> None:
            # With a turn that is written with the end of the run, its readers get the last events after that write.
            if log is not None and not isinstance(event, RunSuspended):
                (log.put_last if session.has_turn else log.put)(event)
            if put is not None and session.has_turn:
                last.append(event)
            elif put is not None:
                await put(event)

        is_followed, show = log is not None or put is not None, None if log is None else log.put
        async with open_scope(self._host, prepared) as session.scope:
            result, completed = await prepared.body.execute(session, prepared, send if is_followed else None, show)
        if completed is not None:
            await session.write_end("completed", **completed)
        for each in last:
            assert put is not None
            await put(each)
        return result


def _is_incompatible(error: BaseException, run_id: str) -> bool:
    return isinstance(error, RunIncompatibleError) and error.run_id == run_id


def _stop(held: HeldRun, store: RunStore, by: str | None) -> None:
    """Grant the wish of somebody who stops the conversation of a run."""
    held.grant(HistoryEntry(clock_of(store).now(), by, None, None, "cancel", STOPPED))


async def wait_unless_lost(task: asyncio.Task[Result[Any] | None], run_id: str) -> Result[Any] | None:
    """Wait for a run that a task executes; None if another process has or takes it, for example to cancel it.

    Cancelling the caller does not cancel the task.
    """
    # Shielded: a caller leaves when its request is gone or its time limit has passed, and a run is there to survive
    # that. Its task belongs to the container, which cancels it at the stop, so that the lease ends at once.
    try:
        return await asyncio.shield(task)
    except LeaseLostError as error:
        if error.run_id != run_id:  # a tool's error about another run
            raise
        return None
    except asyncio.CancelledError:
        task.add_done_callback(lambda done: None if done.cancelled() else _log_end(run_id, done.exception()))
        raise


def _log_end(run_id: str, error: BaseException | None) -> None:
    """Log the error that ended a run and that no caller gets: without it, only the store would know."""
    if isinstance(error, RunCancelledError):
        logger.info("run %s was cancelled: %s", run_id, message_of(error))
    elif error is not None and leaves_run_unchanged(error, run_id):
        logger.info("run %s does not end here: %s", run_id, message_of(error))
    elif isinstance(error, ToolboxError):
        logger.warning("run %s failed: %s: %s", run_id, type(error).__name__, message_of(error))
    elif error is not None:
        logger.error("run %s failed", run_id, exc_info=error)
