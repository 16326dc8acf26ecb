"""`RunSession`: one run while this process executes it: what is recorded at its places, and everything it writes.

Without a stored run a session only remembers results, until the run is suspended. Not here: which process may execute
the run (`run_leases`), what an effect records (`effects`), what the run does (`run_body`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, TypeVar
from uuid import uuid4

from ..di.scopes import RequestScope
from ..di.stored_beans import StoredBeans
from ..errors import (
    IllegalConfigurationError,
    LeaseLostError,
    OAuthError,
    RunConflictError,
    RunIncompatibleError,
    RunStoreError,
    StoredBeanError,
    TranscriptError,
    leaves_run_unchanged,
)
from ..safe_text import describe_store_error, error_of_database
from ..security import UnauthenticatedError
from ..services.recording_needs import FindApprovals, ToldMessage, TurnWrite
from ..tools.tool_calls import ToolSuspension
from .documents import GivenAnswer, RunDocument, next_expiry, read_stored_json, told_from_json
from .places import BEFORE_THE_FIRST_REQUEST, RecordedFact, RecordKey, is_attempt_of
from .run_answers import HistoryEntry
from .store import (
    RunChanges,
    RunStatus,
    RunStore,
    StoredRecord,
    StoredRun,
    joins,
    supports_of,
    unsupported_problem,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Recorded:
    """A record that is stored."""

    kind: str
    data: str

    @cached_property
    def facts(self) -> Mapping[str, Any]:
        """The JSON object, read once. A program's own code may change what it gets, so it gets nothing of this."""
        return read_stored_json(self.data)


class RunSession:
    """One run while this process executes it. `document` is its header's, once there is one.

    `generation` is the token of this process, None until the run is stored. `scope` is the request scope of the run;
    None while the run is part of another request. `beans` are those of its conversation, if it has one and the program
    has such beans. `find_approvals` reads what that conversation remembers. `leave` is called before the write that
    suspends or ends the stored run, and `has_left` is True after it: it has also ended the lease. `is_wished` returns
    True once somebody's wish to cancel the run was granted, and `stop` is the wish of one who stops its conversation.
    `has_new_records` is True after the first record that this process has written. `unstored` are the results that are
    stored if the run is suspended. `is_without_user` is that of `PreparedRun`. `last_events` are written with the end
    of the run and its turn. `without_turn` returns what an end without a turn writes into the conversation. `ended` is
    the status with which the run has ended.
    `trace` has the headers of the span in which this process has first asked a model.
    """

    def __init__(self, run_id: str | None = None) -> None:
        self.id = run_id or uuid4().hex
        self.generation: int | None = None
        self.document: RunDocument | None = None
        self.scope: RequestScope | None = None
        self.beans: StoredBeans | None = None
        self.find_approvals: FindApprovals | None = None
        self._noted: list[HistoryEntry] = []
        self.write_events: Callable[[], Awaitable[None]] | None = None
        self.leave: Callable[[], None] = lambda: None
        self.is_wished: Callable[[], bool] = lambda: False
        self.stop: Callable[[str | None], None] = lambda by: None
        self.has_left = self.has_new_records = self.is_without_user = False
        self.ended: RunStatus | None = None
        self.trace: Mapping[str, str] = {}
        self.unstored: dict[str, StoredRecord] = {}
        self._messages: int | None = None  # how many the run has, by its last write; None if that is not known
        self._store: RunStore | None = None
        self._turn: TurnWrite | None = None
        self.last_events: list[str] = []
        self.without_turn: Callable[[RunStatus], TurnWrite] | None = None
        self._conversation: AsyncExitStack | None = None
        self._recorded: dict[str, dict[RecordKey, Recorded]] = {}
        self._counted: list[RecordKey] = []
        self._with_beans: list[RecordKey] = []
        self.last_with_beans = ""
        self._forgotten: set[RecordKey] = set()
        self._awaiting_reply: set[str] = set()

    @classmethod
    def of(
        cls, stored: StoredRun, document: RunDocument, records: Sequence[StoredRecord], store: RunStore
    ) -> RunSession:
        """Return the session of a stored run that this process owns."""
        session = cls(stored.id)
        session._store, session.generation, session.document = store, stored.generation, document
        with session.reading():
            for each in records:
                session.add_record(each)
        return session

    @property
    def is_stored(self) -> bool:
        """True if this process owns a stored run, so that each record is written before the next effect."""
        return self.generation is not None

    @property
    def cancels(self) -> bool:
        """True if the run was cancelled: what is recorded is undone, and nothing else happens."""
        return self.document is not None and self.document.cancels

    @property
    def is_cancelled(self) -> bool:
        """True if the run ends as cancelled: now, or when its tools are undone."""
        return self.cancels or self.is_wished()

    def waits_for_user(self, error: BaseException) -> bool:
        """Return True if the token of the run's user is missing, and only that user can help, who may be gone.

        A run that goes on after an interruption or a suspension, or in another process, is kept for its user, with its
        answers. One that was cancelled ends: anyone who may cancel it can end it.
        """
        is_continued = self.is_without_user or bool(self.answers) or (self.generation or 0) > 1
        return _lacks_token(error) and is_continued and not self.cancels

    def end_without_result(self, error: Exception) -> Mapping[str, Any] | None:
        """Return what to record of a call that ends with this error, and no result; None if its outcome is unknown.

        The call runs again if there was no token for it, and else only in a run that goes on after it has failed.
        """
        if self.cancels or isinstance(error, ToolSuspension) or leaves_run_unchanged(error, self.id):
            return None
        return {} if _lacks_token(error) or isinstance(error, OAuthError) else {"failures": self.failures}

    @property
    def failures(self) -> int:
        """The number of failures before this process continued the run."""
        return 0 if self.document is None else self.document.failures

    def stays_after(self, error: BaseException) -> bool:
        """Return True for an error after which the run stays as it is, so that it can be continued."""
        return leaves_run_unchanged(error, self.id) or self.waits_for_user(error)

    # --- answers

    @property
    def answers(self) -> Sequence[GivenAnswer]:
        """All answers so far, oldest first."""
        return self.document.answers if self.document is not None else ()

    def answers_at(self, place: str) -> list[GivenAnswer]:
        """Return the answers to the call with this id, oldest first."""
        return [each for each in self.answers if each.call_id == place]

    def answers_to(self, call: str) -> list[GivenAnswer]:
        """Return the answers to a call and its attempts, oldest first."""
        return [each for each in self.answers if is_attempt_of(each.call_id, call)]

    # --- history

    def note(self, entry: HistoryEntry) -> None:
        """Add an entry about a call to the history; it is stored with the next suspension, or the end of the run."""
        known = (*self._noted, *(() if self.document is None else self.document.history))
        if not any((each.call_id, each.remembered) == (entry.call_id, entry.remembered) for each in known):
            self._noted.append(entry)

    def with_noted(self, document: RunDocument) -> RunDocument:
        """Return a document that is about to be stored, with these entries."""
        return document.changed(history=(*document.history, *self._noted)) if self._noted else document

    # --- messages that the user adds

    @property
    def takes_messages(self) -> bool:
        """True if the user may add messages to the run: its store keeps them."""
        return self.is_stored and not self.cancels and "tell" in supports_of(self._store)

    def forget_messages(self) -> None:
        """Note that something was written that did not say how many messages there are."""
        self._messages = None

    async def messages_after(self, count: int) -> Sequence[ToldMessage]:
        """Return the messages after the first `count`. The store is asked only if the last write named more."""
        if self._messages is not None and self._messages <= count:
            return ()
        found = await self._read_messages(count)
        self._messages = count + len(found)
        return found

    async def _read_messages(self, count: int) -> list[ToldMessage]:
        with self.using_store() as store:
            found = await store.messages(self.id, count)
        with self.reading():
            return [told_from_json(each) for each in found]

    async def client_ids(self, added: int) -> list[str | None]:
        """Return the ids that a client gave to the message of the call, and to the first `added` ones after it."""
        asked = None if self.document is None else self.document.client_id
        messages = (await self._read_messages(0))[:added] if added else []
        return [asked, *(each.client_id for each in messages)]

    async def close_messages(self, count: int) -> bool:
        """Let the user add no more messages; False if there are more than `count`."""
        assert self.generation is not None
        with self.using_store() as store:
            is_closed = await store.close_messages(self.id, self.generation, count)
        if not is_closed:
            self.forget_messages()
        return is_closed

    # --- the turn of the run in its conversation

    def take_turn(self, turn: TurnWrite) -> bool:
        """Write a turn with the next change of the header, in one transaction.

        Returns False, and does nothing, unless the store of the run can write in both.
        """
        if not joins(self._store, turn.store):
            return False
        self._turn = turn
        return True

    @property
    def has_turn(self) -> bool:
        """True if there is a turn to write."""
        return self._turn is not None

    def drop_turn(self) -> None:
        """Do not write the turn."""
        turn, self._turn = self._turn, None
        if turn is not None:
            turn.end(False)

    def stay_in(self, conversation: AsyncExitStack) -> None:
        """Stay in the conversation until the turn is written, so that no other call comes in between."""
        if not self.is_stored:  # its suspension could not be stored, and no other write follows
            self.drop_turn()
        if self._turn is not None:
            self._conversation = conversation.pop_all()

    async def leave_conversation(self) -> None:
        """Leave the conversation of a turn that was written, or that nobody writes any more."""
        self.drop_turn()
        conversation, self._conversation = self._conversation, None
        if conversation is not None:
            await conversation.aclose()

    async def _write_with_turn(self, write: Callable[[RunStore], Awaitable[T]]) -> T:
        """Await a write of the header, and that of the turn in the same transaction. Raises the errors of both."""
        if (turn := self._turn) is None:
            with self.using_store() as store:
                return await write(store)
        self._turn, is_written = None, False
        try:
            with self.using_store() as store:
                found = await write_together(store, turn.store, lambda: write(store), turn.write)
            is_written = True
            return found
        except TurnWriteError as failed:
            if not turn.may_fail:
                raise failed.error from None
        finally:
            turn.end(is_written)
            await self.leave_conversation()
        return await self._write_with_turn(write)

    # --- what is recorded

    def recorded(self, key: RecordKey) -> Recorded | None:
        """Return the record with this key, or None."""
        return self._recorded.get(key.place, {}).get(key)

    @property
    def places(self) -> Iterator[str]:
        """The places of which something is recorded."""
        return (place for place, records in self._recorded.items() if records)

    def forget(self, key: RecordKey) -> None:
        """Forget a record with which the run can only fail again; the next one with this key replaces it."""
        del self._recorded[key.place][key]
        self._forgotten.add(key)
        if key in self._counted:
            self._counted.remove(key)

    def await_reply(self, path: str) -> None:
        """Note that an invocation needs another reply: its last one has led to the failure of the run."""
        self._awaiting_reply.add(path)

    @property
    def lacks_reply(self) -> bool:
        """True if an invocation needs another reply than the one that has led to a failure, and has none so far."""
        return bool(self._awaiting_reply)

    @property
    def suspensions(self) -> int:
        """The number of suspensions so far: the outermost invocation has a state of each."""
        return len(self.numbered("", "s"))

    def numbered(self, place: str, fact: RecordedFact) -> dict[int, Recorded]:
        """Return all records of one fact about a place, by their numbers."""
        found = self._recorded.get(place, {})
        return {key.number: record for key, record in found.items() if key.fact == fact}

    def has_result(self, call: str) -> bool:
        """Return True if a call, or an attempt of it, has a recorded result."""
        for place in self._recorded:
            if is_attempt_of(place, call):
                record = self.recorded(RecordKey(place))
                if record is not None and record.kind == "result":
                    return True
        return False

    @property
    def has_begun(self) -> bool:
        """True if something of the run has happened: more is recorded than the choice of a model, and passages."""
        return any(key.fact not in BEFORE_THE_FIRST_REQUEST for records in self._recorded.values() for key in records)

    def add_record(self, record: StoredRecord) -> None:
        """Take in a record that was read from the store."""
        self._add(RecordKey.read(record.key), Recorded(record.kind, record.data))

    def _add(self, key: RecordKey, record: Recorded) -> None:
        self._recorded.setdefault(key.place, {})[key] = record
        if key.fact in ("r", "s"):
            self._counted.append(key)
        if '"beans"' in record.data:  # perhaps inside of a result, see `recorded_beans`
            self._with_beans.append(key)
            self.last_with_beans = str(key)

    @property
    def recorded_beans(self) -> dict[str, Any]:
        """The JSON values of the conversation's beans that are recorded and not stored with a turn, by name."""
        found: dict[str, Any] = {}
        for key in self._with_beans:
            if (record := self.recorded(key)) is None:  # forgotten
                continue
            facts = self.facts_of(record)
            if key.fact == "s" and not key.place:  # all that changed until the suspension, but for what it stored
                found = dict(facts["about"].get("beans", {}))
            elif key.fact == "" and isinstance(beans := facts.get("beans"), Mapping):
                found.update(beans)
            if self.document is not None and str(key) == self.document.beans_until:
                found = {}
        return found

    def _note_stored_beans(self, document: RunDocument) -> RunDocument:
        """Return the document of a run that ends, which says until where its beans are stored with a turn."""
        if self.beans is None or not self.last_with_beans:
            return document
        with suppress(StoredBeanError):
            if not self.beans.changed():
                return document.changed(beans_until=self.last_with_beans)
        return document

    def keys_after(self, place: str) -> Sequence[RecordKey]:
        """Return the keys of the replies and states that were stored after the last one of an invocation."""
        own = [position for position, key in enumerate(self._counted) if key.place == place]
        return self._counted[own[-1] + 1 :] if own else ()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read records inside the block. Raises `RunIncompatibleError` for those of another version of the program."""
        try:
            yield
        except (ValueError, KeyError, TypeError, TranscriptError) as error:
            raise RunIncompatibleError(self.id, f"its records cannot be read: {error}") from error

    def read_record(self, record: Recorded) -> dict[str, Any]:
        """Return the content of a record, for a program's code. Raises `RunIncompatibleError`."""
        with self.reading():
            return read_stored_json(record.data)

    def facts_of(self, record: Recorded) -> Mapping[str, Any]:
        """Return the content of a record, for questions about it. Raises `RunIncompatibleError`."""
        with self.reading():
            return record.facts

    # --- writing

    @contextmanager
    def using_store(self) -> Iterator[RunStore]:
        """Use the store inside the block. Raises `LeaseLostError`, and `RunStoreError` for errors of the store.

        There is no other way to the store of a session: after any other error the run would be written as failed.
        """
        assert self._store is not None
        with store_errors_of(self.id):
            yield self._store

    def keeps(self, key: RecordKey) -> bool:
        """Return True if a record with this key is written, or remembered until the run is suspended."""
        # The first suspension stores the states of all invocations, which have everything but the results inside of
        # the calls that are suspended.
        return self.is_stored or key.fact == ""

    async def write_record(self, key: RecordKey, kind: str, data: str, *, replaces: bool = False) -> None:
        """Write a record; before the run is stored, remember a result for a suspension.

        Raises `LeaseLostError` and `RunStoreError`.
        """
        record = StoredRecord(str(key), kind, data, replaces or key in self._forgotten)
        if self.generation is None:
            if self.keeps(key):
                self.unstored[key.place] = record
            return
        # Fencing: a process can be paused for minutes between two statements, and wake up after another one has taken
        # the run. Neither its clock nor its lease tells it so. Therefore taking a run raises the generation in the
        # header, and each write names the generation that its process took: the store refuses a late owner. The next
        # effect begins only after this returns.
        with self.using_store() as store:
            self._messages = await store.append(self.id, self.generation, [record])
        self._forgotten.discard(key)
        if key.fact == "r":
            self._awaiting_reply.discard(key.place)
        self._add(key, Recorded(kind, data))
        self.has_new_records = True

    async def flush_events(self) -> None:
        """Wait until all events so far are stored. Raises `LeaseLostError` and `RunStoreError`."""
        if self.write_events is not None:
            await self.write_events()

    async def write_document(self, document: RunDocument) -> None:
        """Write all events, and another document; the run goes on."""
        assert self.generation is not None
        await self.flush_events()
        await self._append([], RunChanges(document=document.to_json()))
        self.document = document

    async def _append(self, records: Sequence[StoredRecord], changes: RunChanges, events: Sequence[str] = ()) -> None:
        """Write a change of the header, with the turn of the run if there is one."""
        generation = self.generation
        assert generation is not None
        await self._write_with_turn(lambda store: store.append(self.id, generation, records, changes, events))

    async def write_suspension(self, records: Sequence[StoredRecord], event: str) -> None:
        """Write that the run waits, with the calls in its document, in one transaction. The lease ends with it."""
        assert self.document is not None
        assert self.generation is not None
        self.leave()
        await self.flush_events()
        text, since, next_at = self.document.to_json(), self.document.waiting_since, next_expiry(self.document.waiting)
        changes = RunChanges(status="suspended", document=text, waiting_since=since, next_at=next_at)
        await self._append(records, changes, [event])
        self.has_left = True

    def use_store(self, store: RunStore) -> None:
        """Let the session of a run that is not stored so far use this store."""
        self._store = store

    async def time_for_expiry(self, tool_name: str) -> datetime:
        """Return the time of the store. Raises `IllegalConfigurationError` if it keeps no times for such a tool."""
        with self.using_store() as store:
            if "expiry" in supports_of(store):
                return await store.now()
        raise IllegalConfigurationError([unsupported_problem(f"the tool {tool_name}", "approval_expires", store)])

    async def refuse_known_id(self) -> None:
        """Raise `RunConflictError` if a run has the id of this one, which is not stored so far."""
        with self.using_store() as store:
            found = await store.load(self.id)
        if found is not None:
            raise RunConflictError(self.id, "another call")

    async def create_suspended(self, run: StoredRun, records: Sequence[StoredRecord]) -> None:
        """Store a run that was not stored so far, and waits. Raises `RunConflictError` if its id exists."""
        assert self.document is not None
        run = replace(run, status="suspended", next_at=next_expiry(self.document.waiting))

        async def create(store: RunStore) -> None:
            if not await store.create(run, records):
                # A connection that was lost after the commit has let the store try again, and find the run of the first
                # try. No other call has the same document: its digest has a random salt.
                found = await store.load(self.id)
                if found is None or found.document != run.document:
                    raise RunConflictError(self.id, "another call")

        await self._write_with_turn(create)
        self.has_left = True

    async def write_next_try(self, wait: timedelta, **facts: Any) -> datetime:
        """Write that the run has failed, with these facts, and is tried again after this time. The lease ends with it.

        Returns the time of the next try.
        """
        assert self.document is not None
        assert self.generation is not None
        assert not self.has_left
        self.leave()
        await self.leave_conversation()  # the next try says something else
        await self.flush_events()
        document = self._note_stored_beans(self.document).changed(failures=self.document.failures + 1, **facts)
        document = self._with_trace(self.with_noted(document))
        with self.using_store() as store:
            next_at = await store.now() + wait
            changes = RunChanges(document=document.to_json(), owner=None, next_at=next_at)
            await store.append(self.id, self.generation, [], changes)
        self.has_left = True
        return next_at

    async def write_end(self, status: RunStatus, **facts: Any) -> None:
        """Write the end of the run into its header, with these facts, and all events. The lease ends with it."""
        assert self.document is not None
        assert self.generation is not None
        # An owner that suspends its run keeps the generation: the store would let it overwrite the pending calls.
        assert not self.has_left
        self.leave()
        await self.flush_events()
        document = self.with_noted(self._note_stored_beans(self.document).changed(waiting=(), **facts))
        document = self._with_trace(document)  # for `runs.retry`
        changes = RunChanges(status=status, document=document.to_json())
        events = self.last_events if self.has_turn else ()
        if not self.has_turn and self.without_turn is not None:
            self.take_turn(self.without_turn(status))
        await self._append([], changes, events)
        self.has_left, self.ended = True, status

    def _with_trace(self, document: RunDocument) -> RunDocument:
        return document.changed(trace=self.trace) if self.trace else document

    async def write_back(self, before: StoredRun) -> None:
        """Let a run end as it had ended before it went on. The lease ends with it."""
        assert self.generation is not None
        self.leave()
        await self.flush_events()
        changes = RunChanges(status=before.status, document=before.document)
        with self.using_store() as store:
            await store.append(self.id, self.generation, [], changes)
        self.has_left = True


def _lacks_token(error: BaseException) -> bool:
    """Return True if there was no token of the run's user, which a call needed."""
    return isinstance(error, UnauthenticatedError) and error.lacks_token


class TurnWriteError(Exception):
    """The turn of a run could not be written, so nothing was; `error` is why."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


async def write_together(
    store: Any, conversations: Any, write: Callable[[], Awaitable[T]], write_turn: Callable[[], Awaitable[None]]
) -> T:
    """Await a write of a run and that of its turn, in one transaction of a store that `joins` the other.

    Both may be awaited again, while the database is away. Raises `TurnWriteError`, and the errors of the first write.
    """
    failure: Exception | None = None

    async def write_both() -> T:
        nonlocal failure
        failure = None
        written = await write()
        try:
            await write_turn()
        except Exception as error:
            failure = error
            raise
        return written

    try:
        found: T = await store.together(conversations, write_both)
        return found
    except Exception:
        if failure is None:
            raise
    raise TurnWriteError(failure)


@contextmanager
def store_errors_of(run_id: str) -> Iterator[None]:
    """Raise `RunStoreError` for an error of a store inside the block, which may contain what was to be stored."""
    try:
        yield
    except (LeaseLostError, RunStoreError, RunConflictError, TurnWriteError):
        raise
    except Exception as error:
        # Logs show the cause too. That of a database has the values of the statement, such as results of tools.
        cause = None if error_of_database(error) is not None else error
        raise RunStoreError(run_id, describe_store_error(error)) from cause
