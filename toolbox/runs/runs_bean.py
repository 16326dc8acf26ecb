"""`Runs`: the runs of a container for callers, put together from its parts.

Each part does one thing: `new_runs` creates, `resuming` answers, `cancelling` cancels, `run_execution` executes,
`take_over` looks for runs whose process is gone, and `stored_runs` reads. What they execute is chosen here: calls of
services (`service_calls`). Not here: what a run asks of it (`run_body`), what happens within a run (`run_session`).
"""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, get_args, overload

from ..callers import WhileApplicationRuns
from ..chat import ToolSpecification, UserMessage
from ..conversations.keys import ChatMemoryKey, Owner
from ..conversations.log import TurnState
from ..errors import IllegalConfigurationError, Problem, RunIncompatibleError, RunStateError
from ..introspection import checked_limit
from ..safe_text import is_text
from ..security import SecurityIdentity, identity_in
from ..service_names import stored_name
from ..services.outputs import Result
from ..services.plans import MethodPlan
from .cancelling import Cancelling
from .conversation_runs import ConversationRuns
from .new_runs import NewRuns
from .persons import is_person
from .prepared_runs import PreparedRuns
from .recorded_turns import RecordedTurns
from .resuming import ResumedEvents, Resuming
from .retrying import Retrying
from .run_answers import Answer, Run
from .run_events import RunEvents, number_after
from .run_execution import RunExecution
from .run_owners import RunOwners
from .runs_host import RunsHost
from .service_calls.new_calls import ClientMessage, NewServiceCalls
from .service_calls.pending_calls import service_behind
from .service_calls.service_body import ServiceBodies
from .store import ENDED, RunStatus, RunStore, StoredRun, position_of, supports_of
from .stored_runs import StoredRuns, read_document
from .take_over import TakeOver
from .telling import Telling

if TYPE_CHECKING:
    from ..conversations.conversations_bean import Conversation

P = ParamSpec("P")
T = TypeVar("T")

_LONGEST = timedelta(days=365_000)  # longer ones would begin before the year 1


class Runs:
    """The runs of a container: a bean, and `container.runs`.

        run = await runs.get(run_id)
        result = await runs.resume(run.id, {call.id: approve() for call in run.pending}, by="ann")

    All methods work in any process that uses the same `RunStore`.
    """

    def __init__(self, host: RunsHost) -> None:
        self._host, self._stored = host, StoredRuns(host)
        # The bodies of runs are the service methods of this program. Those of another kind would be added to them here.
        bodies = ServiceBodies(host, self._stored)
        self._preparing = preparing = PreparedRuns(host, self._stored, bodies.of, bodies.may_undo_tools)
        self._execution = RunExecution(host, self._stored, preparing, self.watch_times)
        self._resuming = Resuming(host, self._stored, preparing, self._execution)
        self._take_over = TakeOver(host, self._stored, self._execution, self._resuming.expire, bodies.may_wait)
        new = NewRuns(host, self._stored, self._execution, self._submit)
        self._new = NewServiceCalls(host, self._stored, new)
        self._retrying = Retrying(self._stored, preparing, self._execution, self.watch_times)
        self._telling = Telling(self._stored, preparing)
        self._turns = RecordedTurns(host, self._stored, preparing)
        self._cancelling = Cancelling(self._stored, preparing, self._execution, self._turns)
        self._owners = RunOwners(host, self._stored, preparing)
        self._conversations = ConversationRuns(host, self._stored, self._cancelling.cancel_run)

    # --- reading

    async def get(self, run_id: str) -> Run[Any]:
        """Return a run. Raises `RunNotFoundError`."""

        async def read() -> Run[Any]:
            return self._stored.show(await self._stored.load(run_id))

        return await self._host.on_own_loop(read)

    async def list(
        self,
        status: RunStatus | None = None,
        service: str | type[Any] | None = None,
        limit: int = 100,
        before: str | Run[Any] | None = None,
        waiting_longer_than: timedelta | None = None,
        started_by: str | None = None,
        memory_id: Any = None,
    ) -> builtins.list[Run[Any]]:
        """Return at most `limit` runs, newest first.

        - `service`: a service class or its stored name, by default `module.Class`. Also finds runs of its former names.
        - `before`: the last run of the previous page, or its id.
        - `waiting_longer_than`: only suspended runs whose oldest pending call waits for longer, by the store's clock.
        - `started_by`: only runs that the identity with this name asked for.
        - `memory_id`: only runs of the conversation with this id, as a rule with its `service`.

        A run that this program cannot read has an `error`, and can be cancelled. Raises `ValueError` for an unknown
        status and for a negative limit or duration, `TypeError` for arguments of other types,
        `RunNotFoundError` if `before` is the id of an unknown run, and `IllegalConfigurationError` for a `memory_id`
        where a `RunStore` of your own does not support `"conversations"`.
        """
        if status is not None and status not in get_args(RunStatus):
            raise ValueError(f"unknown status {status!r}; use one of: {', '.join(get_args(RunStatus))}")
        limit = checked_limit(limit)
        if waiting_longer_than is not None:
            waiting_longer_than = _checked_duration("waiting_longer_than", waiting_longer_than)
        for name, given, kinds in (("service", service, (str, type)), ("started_by", started_by, str)):
            if given is not None and not isinstance(given, kinds):
                expected = "a str" if kinds is str else "a class or its stored name"
                raise TypeError(f"runs.list({name}=): expected {expected}, got {type(given).__name__}")
        names: tuple[str | None, ...] = (None,) if service is None else self._stored.names_of(service)
        room = None if memory_id is None else str(memory_id)
        if not all(each is None or is_text(each) for each in (*names, started_by, room)):
            return []

        async def find() -> builtins.list[Run[Any]]:
            last = await self._stored.load(before) if isinstance(before, str) else before
            store, found = await self._stored.open(), builtins.list[StoredRun]()
            in_room = {} if room is None else {"memory_id": room}
            if in_room and "conversations" not in supports_of(store):
                raise IllegalConfigurationError([_no_conversations(store)])
            for name in names:
                found += await store.find(
                    status=status,
                    service=name,
                    limit=limit,
                    before=None if last is None else (last.created_at, last.id),
                    waiting_longer_than=waiting_longer_than,
                    started_by=started_by,
                    **in_room,
                )
            found.sort(key=position_of, reverse=True)
            return [self._stored.show(each) for each in found[:limit]]

        return await self._host.on_own_loop(find)

    def events(self, run_id: str | Run[Any], after: int | str | None = None) -> RunEvents:
        """Return the events of a run, in any process: `async for event in runs.events(run_id): ...`.

        Yields `RunEvent(number, at, event)`, waits for more, continues over suspensions, and ends after `RunEnded`.
        `after` is the number of the last event that the reader has, also as the text of the header `Last-Event-ID`;
        None yields all. Raises `ValueError` or `TypeError` for an invalid number; the iteration raises
        `RunNotFoundError`.
        """
        return RunEvents(self._stored, _id_of(run_id), number_after(after), self._error_of)

    def _error_of(self, run: StoredRun) -> str | None:
        return self._stored.show(run).error

    @overload
    async def result(self, run: Run[T], timeout: float | None = None) -> T: ...

    @overload
    async def result(self, run: str, timeout: float | None = None) -> Any: ...

    async def result(self, run: str | Run[Any], timeout: float | None = None) -> Any:
        """Wait for the end of a run, also over suspensions, and return the value of its method.

        For a method that returns a `Result`, that is the whole `Result`. Raises `RunFailedError`, `RunCancelledError`,
        `RunNotFoundError`, and `TimeoutError` after `timeout` seconds; None waits without a limit.
        """
        with WhileApplicationRuns():
            async with asyncio.timeout(timeout):
                stored = await self._stored.on_home(lambda: self._stored.wait_for_end(_id_of(run)))
        return await self._stored.on_home(lambda: self._preparing.outcome_of(stored))

    # --- starting and executing

    @overload
    async def start(self, method: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> Run[T]: ...

    @overload
    async def start(
        self, method: Callable[Concatenate[Any, P], Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Run[T]: ...

    async def start(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Run[Any]:
        """Start a call of a service method as a run, and return without waiting for it.

            run = await runs.start(transfers.transfer, "order-7", order)

        `method` is a method of a service bean, or of a service class that one registered service has. The run continues
        when the caller leaves. If the run of this id exists with the same call, it is returned. Inside a `usage_limits`
        block, or in a tool with limits, what is left of them is the run's own limit. Raises `RunConflictError` if the
        run exists with another method, identity, arguments or attributes, `UsageLimitExceededError` if nothing is left,
        `UnauthenticatedError` or `ForbiddenError`, and `TypeError` for arguments that do not fit.
        """

        async def start() -> Run[Any]:
            plan = self._host.plan_of(method)
            return self._stored.show(await self._new.start_run(plan, plan.bind(args, kwargs)))

        return await self._host.on_own_loop(start)

    async def execute(self, run_id: str, timeout: float | None = None) -> Run[Any]:
        """Continue one run in this process, and return it when it has ended or is suspended.

        Waits while another process owns the run. After `timeout` seconds without owning it, raises `RunBusyError`, so
        that a queue can deliver the run again. Safe to call any number of times, in any process. If the caller is
        cancelled, the run stays `running` for another process. Raises `RunNotFoundError`, and if the run cannot go on
        here and stays as it is, `RunIncompatibleError`, `RunStoreError` or the error of the `IdentityLoader`.
        """

        async def execute() -> Run[Any]:
            return self._stored.show(await self._execution.execute_or_wait(run_id, timeout))

        with WhileApplicationRuns():
            return await self._stored.on_home(execute)

    # --- answering and cancelling

    async def resume(self, run_id: str, answers: Mapping[str, Answer], by: Any = None) -> Result[Any]:
        """Answer pending calls, by their ids, and continue the run until it ends or is suspended again.

        `by` is the person, a name or a `SecurityIdentity`. Without answers, a run whose process is gone continues. Some
        of the pending calls may be answered; `Result.pending` has the others. Raises `RunAnswerError`
        (`AnswerForbiddenError` for a person who may not answer), `RunIncompatibleError`, `RunNotFoundError`, and
        `ForbiddenError` if the identity of the run may no longer call the method; then the run is unchanged. Raises
        `TypeError` if `answers` is not a mapping, and the errors of the method.
        """
        with WhileApplicationRuns():
            return await self._host.on_own_loop(lambda: self._resuming.resume_run(run_id, answers, by))

    def resume_stream(self, run_id: str, answers: Mapping[str, Answer], by: Any = None) -> ResumedEvents:
        """Do the same as `resume`, and return the events of the call. The last is `CompleteResponse` or `RunSuspended`.

            async for event in runs.resume_stream(run_id, {call.id: approve()}, by=person): ...

        A reader that leaves misses the other events; the run continues. The iteration raises the errors of `resume`.
        """
        return ResumedEvents(self._resuming.stream_events(run_id, answers, by), self._host.on_own_loop)

    async def retry(self, run_id: str, by: Any = None) -> Result[Any]:
        """Let a failed or cancelled run go on from its records, and wait until it ends or is suspended, as `resume`.

            result = await runs.retry(run_id, by="ann")

        A run that was waiting waits for its answers again. Raises `RunStateError` for another status, if its tools were
        undone or its records are deleted, `ConversationSuspendedError` if another run of its conversation waits for an
        answer, `RunIncompatibleError`, `RunNotFoundError` and `ForbiddenError`; then the run is unchanged. The history
        has the name of `by`: a name or a `SecurityIdentity`; for anything else, raises `TypeError`. Raises the errors
        of the method.
        """
        if not is_person(by):
            raise TypeError(f"retry(run_id, by=): expected a str or a SecurityIdentity, got {type(by).__name__}")
        with WhileApplicationRuns():
            return await self._host.on_own_loop(lambda: self._retrying.retry_run(run_id, by))

    async def cancel(self, run_id: str, reason: str | None = None, by: Any = None) -> Run[Any]:
        """Cancel a run, and return it when it has ended. An ended run stays as it is. Raises `RunNotFoundError`.

        The process that executes the run ends it, and stores the events so far. If it does not within one lease, the
        run is taken from it. With `compensate_on_failure` the run's tools are undone first; if that is interrupted,
        another process continues it. The history has `reason`, and the name of `by`: a name or a `SecurityIdentity`.
        Raises `TypeError` for arguments of other types.
        """
        if not is_person(by):
            raise TypeError(f"cancel(run_id, by=): expected a str or a SecurityIdentity, got {type(by).__name__}")
        if not (reason is None or isinstance(reason, str)):
            raise TypeError(f"cancel(run_id, reason=): expected a str, got {type(reason).__name__}")

        async def cancel() -> Run[Any]:
            return self._stored.show(await self._cancelling.cancel_run(run_id, reason, by))

        return await self._host.on_own_loop(cancel)

    async def tell(self, run_id: str, message: str | UserMessage, by: Any = None) -> None:
        """Add a message of the user to a running or suspended run, in front of its next model request.

            await runs.tell(run_id, "Only direct flights, please.", by="ann")

        Messages are read in their order, each exactly once, in whatever process executes the run. An answer that
        arrives while a message waits is an intermediate one: the model is asked again. Raises `InputGuardrailError` if
        an input guardrail of the method refuses the message, `RunStateError` for a run that has ended,
        `RunNotFoundError`, `RunIncompatibleError`, and `IllegalConfigurationError` with a `RunStore` that keeps no
        messages. `by` is a name or a `SecurityIdentity`; for anything else, raises `TypeError`.
        """
        if not is_person(by):
            raise TypeError(
                f"tell(run_id, message, by=): expected a str or a SecurityIdentity, got {type(by).__name__}"
            )
        if not isinstance(message, (str, UserMessage)):
            got = type(message).__name__
            raise TypeError(f"tell(run_id, message): expected a str or a UserMessage, got {got}")
        given = UserMessage(message) if isinstance(message, str) else message
        await self._host.on_own_loop(lambda: self._telling.tell_run(run_id, given, by))

    # --- deleting

    async def delete(self, run_id: str) -> None:
        """Delete an ended run. Raises `RunStateError` if it has not ended, and `RunNotFoundError`."""

        async def delete() -> None:
            stored = await self._stored.load(run_id)
            if stored.status not in ENDED:
                raise RunStateError(run_id, f"it is {stored.status}; cancel it before you delete it")
            async with self._stored.using(run_id) as store:
                await store.delete(run_id)

        await self._host.on_own_loop(delete)

    async def purge(self, older_than: timedelta) -> int:
        """Delete the runs that ended longer ago than `older_than`. Returns their number.

        Raises `TypeError` unless it is a `timedelta`, and `ValueError` for a negative one, which would also delete runs
        that end now.
        """
        duration = _checked_duration("older_than", older_than)

        async def purge() -> int:
            return await (await self._stored.open()).purge(await self._stored.now() - duration)

        return await self._host.on_own_loop(purge)

    # --- for services, engines and commands

    @property
    def owner(self) -> str:
        """Return the name of this process in leases."""
        return self._stored.owner

    async def store(self) -> RunStore:
        """Return the opened store."""
        return await self._stored.open()

    def plan_of(self, method: Callable[..., Any]) -> MethodPlan:
        """Return the plan of a method that `start` takes. Raises `TypeError` for others."""
        return self._host.plan_of(method)

    def services_of(self, plan: MethodPlan) -> Mapping[str, str]:
        """Return the stored names of the services that a method has as tools, by the names of the tools."""
        found = {tool.name: service_behind(self._host, tool) for tool in plan.toolset.tools}
        return {name: stored_name(each.service) for name, each in found.items() if each is not None}

    async def tells_services(self, run_id: str) -> bool:
        """Return True if `all_events` has the work of the services within a run: a front end has started it."""

        async def read() -> bool:
            with suppress(RunIncompatibleError):
                return read_document(await self._stored.load(run_id)).front_end
            return False

        return await self._host.on_own_loop(read)

    def all_events(self, run_id: str) -> RunEvents:
        """Return the events of a run as `events` does, with the work of the services within, for front ends."""
        return RunEvents(self._stored, run_id, 0, self._error_of, hidden=())

    async def beans_of(self, run_id: str) -> Mapping[str, Any]:
        """Return the JSON values of the beans of a run's conversation as the run has left them so far, by name."""
        return await self._host.on_own_loop(lambda: self._turns.beans_of(run_id))

    async def caller(self) -> SecurityIdentity:
        """Return the identity of the active scope; the anonymous one without any."""
        return await identity_in(self._host.scope)

    def is_of(self, run: Run[Any], identity: SecurityIdentity) -> bool:
        """Return True if the identity has started the run, with what `run_identity` names, or if nobody known has."""
        return self._owners.is_of(run, identity)

    async def find_answerable(self, run_id: str, identity: SecurityIdentity) -> frozenset[str]:
        """Return the ids of the pending calls that a person may answer.

        Those of another's run only if their own rules, `approvers=` or `not_self=`, admit the person.
        """
        return await self._host.on_own_loop(lambda: self._owners.find_answerable(run_id, identity))

    async def start_message(
        self,
        plan: MethodPlan,
        arguments: Mapping[str, Any],
        message: UserMessage | None,
        client_tools: Sequence[ToolSpecification] = (),
        client_id: str | None = None,
    ) -> Run[Any]:
        """Start a call as `start` does, for a front end. `message` replaces its user message.

        The caller runs `client_tools`, and gave `client_id` to the message.
        """

        async def start() -> Run[Any]:
            bound = plan.bind((), arguments)
            return self._stored.show(
                await self._new.start_run(plan, bound, ClientMessage(message, client_tools, client_id))
            )

        return await self._host.on_own_loop(start)

    async def call(self, plan: MethodPlan, arguments: Mapping[str, Any]) -> Any:
        """Call a durable method: start its run, or wait for the run with the same id, and return the method's value.

        Cancelling the caller ends the waiting, not the run. Raises the errors of the method, or `RunFailedError` if
        the run failed earlier, and `RunConflictError`.
        """
        return await self._host.on_own_loop(lambda: self._new.call_durably(plan, arguments))

    async def tell_message(self, run_id: str, message: UserMessage, by: Any, client_id: str) -> None:
        """Add a message to a run as `tell` does. `client_id` is the id that the caller gave to it."""
        await self._host.on_own_loop(lambda: self._telling.tell_run(run_id, message, by, client_id))

    async def suspended_in(self, key: ChatMemoryKey) -> str | None:
        """Return the id of the suspended run of a conversation, or None."""
        return await self._stored.suspended_in(key)

    async def turn_state_after(self, run_id: str) -> TurnState | None:
        """Return the state in which the turn of a run ends that has stored no other; None while the run goes on."""
        return await self._execution.waiting_entries.state_after(run_id)

    async def run_of(self, service: str | type[Any], memory_id: str) -> Run[Any] | None:
        """Return the newest run of a conversation that has not ended, or None; also under former names."""
        return next(iter(await self.unended_in(service, memory_id)), None)

    async def unended_in(self, service: str | type[Any], memory_id: str) -> builtins.list[Run[Any]]:
        """Return the runs of a conversation that have not ended, newest first; also under former names."""

        async def find() -> builtins.list[Run[Any]]:
            return [self._stored.show(each) for each in await self._conversations.unended(service, memory_id)]

        return await self._host.on_own_loop(find)

    async def question_of(self, run_id: str) -> tuple[UserMessage, str | None]:
        """Return the user's message of a run that has not ended, and the id that a client gave to it.

        Raises `RunNotFoundError` and `RunIncompatibleError`.
        """

        async def read() -> tuple[UserMessage, str | None]:
            prepared = self._preparing.prepare(await self._stored.load(run_id))
            return prepared.body.question(run_id, prepared), prepared.document.client_id

        return await self._host.on_own_loop(read)

    async def room_of(self, service: type[Any], memory_id: object) -> Conversation | None:
        """Return a conversation of a service; None if its store keeps no logs."""

        async def find() -> Conversation | None:
            keeps_logs = (await self._host.memories()).keeps_logs
            return self._host.conversations.of(service, memory_id) if keeps_logs else None

        return await self._host.on_own_loop(find)

    async def stop_in(self, key: ChatMemoryKey, by: Any, stop_call: Callable[[], Awaitable[bool]]) -> bool:
        """End what is at work in a conversation: a call, which `stop_call` stops, or a run, which may be suspended.

        Returns False if nothing is, as `stop_call` does for calls. Takes no lock.
        """
        return await self._conversations.stop(key, by, stop_call)

    async def cancel_waiting(self, service: str | type[Any], memory_id: str | None, reason: str, by: Any = None) -> int:
        """Cancel the runs of a conversation that wait, for an answer or their next try; return their number.

        Without a memory id, those of all conversations of the service. Call it before you hold the conversation:
        undoing the tools of a run takes its turn.
        """
        return await self._conversations.cancel_waiting(service, memory_id, reason, by)

    async def forget_runs(
        self,
        *,
        owner: Owner | None = None,
        service: str | type[Any] | None = None,
        memory_id: str | None = None,
    ) -> int:
        """Delete ended runs, and return their number. Cancel those that wait first, with `cancel_waiting`.

        With a memory id, those of this conversation; with a service alone, those of all its conversations; with an
        `owner`, those that this person has started outside of conversations, or in one that does not exist any more.
        It takes no lock, and may be called inside one.
        """
        return await self._conversations.forget_ended(owner, service, memory_id)

    async def execute_in_background(self, run_id: str) -> None:
        """Execute the run in a task, unless it already has one."""
        await self._take_over.execute_in_background(run_id)

    async def execute_or_try_later(self, run_id: str) -> None:
        """Execute the run, and return also if another process has it, or it cannot go on here.

        What keeps it from going on is logged. It is then submitted again after a pause, or only by other processes.
        """
        await self._take_over.execute_or_try_later(run_id)

    async def watch_times(self) -> None:
        """Look often for runs whose time has come from now on, unless this container takes over no runs."""
        if self._host.takes_over_runs:
            if not self._take_over.is_open:
                await self.open(take_over=False)
            self._take_over.watch_times(await self._stored.open())

    def report_to(self, report: Callable[[str, StoredRun], None]) -> None:
        """Call `report` at each start and end of an execution here, for the worker."""
        self._execution.report_to = report

    async def open(self, *, take_over: bool) -> None:
        """Open the store and the engine; take over lapsed runs from now on if asked for. Called at start."""
        await self._take_over.open(self, take_over=take_over)

    async def stop_taking_over(self) -> None:
        """Take over no more runs; those that run here continue. The first part of the stop."""
        await self._take_over.stop()

    async def follow_clock(self) -> None:
        """Do at once what the store's clock lets become due: for tests, which have moved it.

        Renew the leases of the runs that this process executes, look for lapsed runs, and wake all waiting.
        """
        await asyncio.gather(self._execution.leases.renew_now(), self._take_over.look_now())
        self._stored.looks.announce_all()

    async def close(self) -> None:
        """Cancel the runs that this process executes, and end their leases and all waiting."""
        try:
            await self._stored.looks.close()
            await self._take_over.close()
        finally:  # also if the engine fails
            await self._execution.stop()

    async def _submit(self, stored: StoredRun) -> None:
        if not self._take_over.is_open:  # without a bean for runs, the first run opens what it needs
            await self.open(take_over=False)
        await self._take_over.submit(stored)


def _checked_duration(name: str, given: object) -> timedelta:
    """Return a duration before now. Raises `TypeError` unless it is a `timedelta`, `ValueError` if it is negative."""
    if not isinstance(given, timedelta):
        raise TypeError(f"invalid {name}={given!r}; use a datetime.timedelta")
    if given < timedelta():
        raise ValueError(f"invalid {name}={given!r}; use a duration of 0 or more")
    return min(given, _LONGEST)


def _no_conversations(store: RunStore) -> Problem:
    fact = f"{type(store).__name__} does not say that its find() takes memory_id"
    fix = 'let it take memory_id, and set supports = frozenset({"conversations"}) in the store'
    return Problem("runs.list(memory_id=…)", fact, fix)


def _id_of(run: str | Run[Any]) -> str:
    return run.id if isinstance(run, Run) else run


def runs_of(service: object) -> Runs:
    """Return the runs of a service that `create_ai_service` made.

        await runs_of(desk).resume(run_id, {call.id: approve()})

    Raises `TypeError` for other objects; in a container use `container.runs`, or inject `Runs`.
    """
    find: Callable[[], Runs] | None = getattr(type(service), "__toolbox_runs__", None)
    if find is None:
        raise TypeError(f"runs_of: expected a service made by create_ai_service, got {type(service).__name__}")
    return find()
