"""Stored runs as plain values, and stores of runs: the protocol `RunStore`, and `InMemoryRunStore`.

A run has one header (`StoredRun`) and records (`StoredRecord`). Every write of an owner names its generation, so that a
process that has lost the run writes nothing more. A run of a durable service, or one that `runs.start` began, is stored
before its first effect; a call that is neither becomes a stored run when it is suspended, with what it has done until
then, and nobody owns it. Not here: what documents and records contain (`documents`,
`record_contents`), runs as callers see them (`run_answers`), stores in databases (`toolbox.sql`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import Enum
from threading import Lock
from typing import Any, Final, Literal, Protocol, TypeAlias, runtime_checkable

from ..errors import LeaseLostError, Problem
from ..introspection import is_number
from ..store_clock import StoreClock, clock_of

RunStatus: TypeAlias = Literal["running", "suspended", "completed", "failed", "cancelled"]
"""The status of a run. The last three are final."""

ENDED: frozenset[RunStatus] = frozenset({"completed", "failed", "cancelled"})
"""The statuses of a run that has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """The header of a run.

    - `id` has 1 to 200 characters, none of them NUL or half a surrogate. It often comes from a client, and is compared
      exactly: ids that differ only in case are two runs.
    - `service` is the stored name of the service, by default `module.Class`.
    - `generation` is the token that every write of the owner must name. It increases whenever a process takes the run,
      also one that then cannot execute it, so it counts neither executions nor crashes.
    - `version` increases with each change of the header. A writer that does not own the run names the version that it
      has read, and reads again if that has changed: two answers, or an answer and a cancellation, do not overwrite each
      other.
    - `owner` names the process that runs it; None without an owner.
    - `updated_at` is the time of the last change of the header, or of the creation; renewing or ending a lease does not
      move it. `purge` counts from it.
    - `conversation` is a key of the run's conversation, at most 64 characters, or None.
    - `document` is versioned JSON.
    - `started_by` is the name of the identity that asked for the run, and `memory_id` its conversation's id as text.
    - `waiting_since` is the time since when the oldest pending call waits, if it waited before the last suspension.
      Without it, a suspended run waits since `updated_at`.
    - `next_at` is the time at which something is due: the next try of a running run, which nobody takes before, or the
      expiry of a pending call of a suspended one. None if nothing is.
    """

    id: str
    service: str
    method: str
    status: RunStatus
    document: str
    created_at: datetime
    updated_at: datetime
    conversation: str | None = None
    generation: int = 0
    version: int = 0
    owner: str | None = None
    started_by: str | None = None
    memory_id: str | None = None
    waiting_since: datetime | None = None
    next_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """One record of a run. `key` is unique in the run; `data` is versioned JSON.

    A record whose key exists is ignored, unless it `replaces` the one that is stored: its kind and data, at its place.
    """

    key: str
    kind: str
    data: str
    replaces: bool = False


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """One event of a run; `number` counts from 1 in each run."""

    number: int
    at: datetime
    data: str


@dataclass(frozen=True, slots=True)
class RunLook:
    """The values that change while a run goes on. A reader that waits for the run compares two of them.

    `events` is the number of events so far. `is_runnable` is True if no process executes a run that is running.
    """

    status: RunStatus
    version: int
    generation: int
    events: int
    is_runnable: bool


class Keep(Enum):
    """The type of `KEEP`."""

    KEEP = "keep"


KEEP: Final = Keep.KEEP
"""In `RunChanges`: the value of the header stays as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunChanges:
    """Changes of a header. Fields that are not given keep their value (`KEEP`).

    With an `owner`, this process takes the run; None removes the owner. A `status` other than `"running"` removes the
    owner as well. `ownership_after` has the rule. `service` and `conversation` are given when the run lies under a
    former name of its service. `waiting_since=None` removes that time. `next_at` is the time of the
    next try or expiry; `next_at_after` has the rule. Each change increases `version` and sets `updated_at`, so an empty
    change still lets a concurrent answer fail.
    """

    status: RunStatus | Keep = KEEP
    document: str | Keep = KEEP
    owner: str | Keep | None = KEEP
    waiting_since: datetime | Keep | None = KEEP
    next_at: datetime | Keep | None = KEEP
    service: str | Keep = KEEP
    conversation: str | Keep | None = KEEP

    @property
    def values(self) -> dict[str, Any]:
        """Return the new values of the header's fields by their names, without the owner and `next_at`."""
        given = {"status": self.status, "document": self.document, "waiting_since": self.waiting_since}
        given |= {"service": self.service, "conversation": self.conversation}
        return {name: value for name, value in given.items() if not isinstance(value, Keep)}


@dataclass(frozen=True, slots=True)
class Ownership:
    """The effect of a change on the owner, the lease and the generation of a run.

    `owner` is KEEP if the owner and its lease stay. With a name, a new lease begins; None ends the lease. The
    generation increases by 1 if `raises_generation` is True.
    """

    owner: str | Keep | None
    raises_generation: bool


def ownership_after(changes: RunChanges, *, by_owner: bool) -> Ownership:
    """Return what changes do to the owner of a run; `by_owner` is True for `RunStore.append`. All stores use this rule.

    - A process that takes the run gets a new generation, so that an earlier owner writes nothing more.
    - A run that is taken from its owner, for example because it was cancelled, gets a new generation for the same
      reason. An owner that ends or suspends its run itself keeps the generation: it may still write its last events.
    """
    if isinstance(changes.owner, str):
        return Ownership(changes.owner, raises_generation=True)
    if changes.owner is None or changes.status not in (KEEP, "running"):
        return Ownership(None, raises_generation=not by_owner)
    return Ownership(KEEP, raises_generation=False)


def next_at_after(changes: RunChanges) -> datetime | Keep | None:
    """Return what changes do to `StoredRun.next_at`. All stores that keep it use this rule.

    A change of the status or the owner removes it, unless it sets another one: a time that was left over would keep
    the next process from taking the run.
    """
    if changes.next_at is KEEP and (changes.status, changes.owner) != (KEEP, KEEP):
        return None
    return changes.next_at


Position: TypeAlias = tuple[datetime, str]
"""The position of a run in lists: its `created_at` and its `id`."""


def position_of(run: StoredRun) -> Position:
    """Return the position of a run in lists."""
    return run.created_at, run.id


class RunStore(Protocol):
    """Stores runs. Register a bean of this type, and all services of the container use it.

    Each method is atomic. `persistent` is True if runs outlive the process. `lease` is the duration of a lease in
    seconds, measured by the store's clock. A run is *runnable* if its status is `"running"`, no lease is valid, and its
    `next_at` is not in the future. `supports` names what the store has of later releases: `"retries"` and `"expiry"`
    if it keeps `next_at`, which `run_retries=` and `approval_expires=` need, `"conversations"` if `find` takes
    `memory_id`, which `runs.list(memory_id=…)` needs, and `"tell"` if it keeps messages, which `runs.tell` needs.
    Everything else works without.
    `toolbox.testing.run_store_checks` checks these promises for a store of your own. It cannot interrupt a write: that
    a crash leaves none half done is for your own tests.

    Methods are awaited on the event loop: a store does blocking work in a thread, for example with `asyncio.to_thread`.
    Derive a store from this class: later releases may add methods that have a default, as `look` does, and keywords
    that have one, as `find` did. `supports` names what a store does of what came later: `"wishes"` (`add_wish` and
    `wishes`); without it, the owner of a run that is cancelled elsewhere does not learn of it in time.

    A store can also have these, which the container uses if they exist:

    - `stop()` and `ready()`, as every bean: the end of the application, and the readiness check.
    - `renewing()`: a block around the time in which this process owns runs (`RenewsApart`).
    - `store_tables`: what `toolbox migrate` migrates.
    - `uses`, `record_in`, `note_in` and `committed`: record the result of a transactional tool in its transaction.
    - `joins` and `together`: write a run and a turn of its conversation in one transaction.
    - `system_database_url()`: the database of the DBOS engine.
    - `clock`: the `toolbox.store_clock.StoreClock` with which it measures time, for `toolbox.testing.skip_time`.

    `SqlRunStore` has all but `stop`, and describes them.
    """

    persistent: bool
    lease: float
    supports: frozenset[str] = frozenset()

    async def open(self) -> None:
        """Prepare the store, for example create or migrate its tables. Called at start; may be called again."""
        ...

    async def now(self) -> datetime:
        """Return the time by the clock with which the store measures leases, in UTC."""
        return clock_of(self).now()

    async def create(self, run: StoredRun, records: Sequence[StoredRecord] = (), *, owner: str | None = None) -> bool:
        """Store a new run with its first records. Returns False if the id exists.

        With `owner`, the run has generation 1 and a new lease; without, generation 0 and no lease. All other values of
        the header are stored as given; but a store that several processes share sets both times by the clock with
        which it measures leases, because the clocks of the processes differ.
        """
        ...

    async def load(self, run_id: str) -> StoredRun | None:
        """Return the header, or None for an unknown id."""
        ...

    async def look(self, run_id: str) -> RunLook | None:
        """Return the values that change while the run goes on, or None for an unknown id.

        It is called several times a second. A store that does not override it reads the whole run each time.
        """
        run, number = await self.load(run_id), 0
        if run is None:
            return None
        while found := await self.events(run_id, number):
            number = found[-1].number
        is_runnable = run.status == "running" and run_id in await self.lapsed(10_000)
        return RunLook(run.status, run.version, run.generation, number, is_runnable)

    async def find(
        self,
        *,
        status: RunStatus | None = None,
        service: str | None = None,
        limit: int = 100,
        before: Position | None = None,
        waiting_longer_than: timedelta | None = None,
        started_by: str | None = None,
        memory_id: str | None = None,
    ) -> list[StoredRun]:
        """Return at most `limit` headers, newest first: by `created_at`, then by `id`, both descending.

        `service` is a stored name, `started_by` the name of an identity, `memory_id` the id of a conversation as text,
        which is only given to stores with `"conversations"`. A condition that is None matches all runs.
        `before` is the position of a run, which need not exist any more; those after it in this order are returned. A
        store may leave out the parts of the documents that lists do not show (`documents.shown_document`), so that
        large ones are not read. `waiting_longer_than` returns suspended runs whose oldest pending call waits for longer
        by the store's clock.
        """
        ...

    async def suspended_in(self, conversation: str) -> str | None:
        """Return the id of the suspended run of a conversation, or None."""
        ...

    async def records(self, run_id: str) -> list[StoredRecord]:
        """Return all records, in the order in which they were added."""
        ...

    async def append(
        self,
        run_id: str,
        generation: int,
        records: Sequence[StoredRecord],
        changes: RunChanges | None = None,
        events: Sequence[str] = (),
    ) -> int | None:
        """Add records and events, and change the header, in one transaction.

        A record whose key exists is ignored, unless it `replaces` that one. Returns how many messages the run has by
        then; None if that is not known. Raises `LeaseLostError`, and writes nothing, unless the run has this
        generation.
        """
        ...

    async def change(
        self, run_id: str, version: int, changes: RunChanges, records: Sequence[StoredRecord] = ()
    ) -> StoredRun | None:
        """Change the header and add records if the header still has this version. Returns the new header, or None."""
        ...

    async def acquire(self, run_id: str, owner: str) -> StoredRun | None:
        """Take a runnable run: the generation increases by 1, and a new lease begins. Returns None if not runnable."""
        ...

    async def renew(self, run_id: str, generation: int) -> bool:
        """Extend the lease to a full duration from now. Returns False if the run has another generation or no owner."""
        ...

    async def release(self, run_id: str, generation: int) -> None:
        """End the lease of this generation now; the status does not change."""
        ...

    async def lapsed(self, limit: int = 100) -> list[str]:
        """Return the ids of at most `limit` runs that wait for a process, oldest first.

        These are the runnable runs and, with `"expiry"` in `supports`, the suspended ones whose `next_at` has come.
        """
        ...

    async def add_wish(self, run_id: str, wish: str) -> bool:
        """Leave a wish for the owner of a run; one that is there already stays. Returns False for a run without owner.

        Changes nothing else: not the header, nor the lease. A wish stays when another process takes the run, and when
        it is suspended; the change that ends the run removes it.
        """
        return False

    async def wishes(self, run_ids: Collection[str]) -> dict[str, str]:
        """Return the wishes for these runs, by their ids. An owner asks once a second for all that it executes."""
        return {}

    async def add_message(self, run_id: str, message_id: str, message: str) -> bool:
        """Add a message for a run, after those that it has; one whose id exists stays as it is.

        Returns False for a run that has ended, whose owner has closed its messages, or that is unknown. Changes nothing
        else: not the header, nor the lease. Messages stay until the run is deleted; a store that deletes the records of
        ended runs deletes them too.
        """
        return False

    async def messages(self, run_id: str, after: int = 0) -> list[str]:
        """Return the messages of a run without the first `after`, in order."""
        return []

    async def close_messages(self, run_id: str, generation: int, count: int) -> bool:
        """Let a run that is about to end take no more messages.

        Returns False, and changes nothing, if it has more than `count`. A process that takes the run opens them again.
        Raises `LeaseLostError` as `append` does.
        """
        return True

    async def add_events(self, run_id: str, generation: int, events: Sequence[str]) -> None:
        """Add events, numbered 1, 2, … in each run. Raises `LeaseLostError` as `append` does."""
        ...

    async def events(self, run_id: str, after: int, limit: int = 1000) -> list[StoredEvent]:
        """Return at most `limit` events with a number above `after`, in order."""
        ...

    async def delete(self, run_id: str) -> None:
        """Delete the run, its records and its events; does nothing for an unknown id."""
        ...

    async def purge(self, before: datetime) -> int:
        """Delete the ended runs whose last change is before `before` (with a time zone). Returns their number."""
        ...


def supports_of(store: object) -> frozenset[str]:
    """Return what a store, or a class of stores, says that it supports; nothing if it does not say it."""
    supports = getattr(store, "supports", None)
    return supports if isinstance(supports, frozenset) else frozenset()


def joins(store: object, conversations: object) -> bool:
    """Return True if a store can write runs in one transaction with this store of conversations."""
    asks: Any = getattr(store, "joins", None)
    return asks is not None and bool(asks(conversations))


def no_messages(store: object) -> Problem:
    """Return the problem of `runs.tell` with a store of runs that does not say that it keeps messages."""
    name = type(store).__name__
    fix = 'add add_message, messages and close_messages to the store, and "tell" to its supports'
    return Problem("runs.tell", f"{name} does not keep messages", fix)


def unsupported_problem(where: str, option: str, store: object) -> Problem:
    """Return the problem of an option that needs more of a store of runs than it says that it `supports`."""
    name = store.__name__ if isinstance(store, type) else type(store).__name__
    fact = f"{option}= needs a RunStore that keeps next_at, and {name} does not say that it does"
    return Problem(where, fact, 'keep it, and set supports = frozenset({"retries", "expiry"}) in the store')


@runtime_checkable
class RenewsApart(Protocol):
    """A store that renews leases on connections that nothing else uses."""

    def renewing(self) -> AbstractAsyncContextManager[None]:
        """Have such connections inside the block: this process owns runs."""
        ...


@dataclass(slots=True)
class StoredRunState:
    """One stored run, and the rules by which writes change it: what a store needs that has no database to do it.

    It checks no generation, version or lease, and reads no clock: the store does, and locks. `lease_until` is a time of
    the clock that the store measures leases with.
    """

    run: StoredRun
    lease_until: float = 0.0
    wish: str | None = None
    records: dict[str, StoredRecord] = field(default_factory=dict)
    events: list[StoredEvent] = field(default_factory=list)
    messages: dict[str, str] = field(default_factory=dict)
    is_closed: bool = False

    def is_runnable(self, now: float, time: datetime) -> bool:
        """Return True if the run is running, has no valid lease, and need not wait. Both are the present time."""
        is_free = self.run.owner is None or self.lease_until <= now
        return self.run.status == "running" and is_free and (self.run.next_at is None or self.run.next_at <= time)

    def has_expired(self, time: datetime) -> bool:
        """Return True if a pending call of the suspended run has expired."""
        return self.run.status == "suspended" and self.run.next_at is not None and self.run.next_at <= time

    def waits_since_before(self, time: datetime) -> bool:
        """Return True for a suspended run whose oldest pending call waits since before `time`."""
        return self.run.status == "suspended" and (self.run.waiting_since or self.run.updated_at) < time

    def change(self, changes: RunChanges, *, by_owner: bool, now: datetime, lease_until: float) -> None:
        """Change the header; `lease_until` is the end of a lease that begins now. `by_owner` is as in the rule."""
        run, after = self.run, ownership_after(changes, by_owner=by_owner)
        generation = run.generation + after.raises_generation
        self.run = replace(run, **changes.values, generation=generation, version=run.version + 1, updated_at=now)
        if (next_at := next_at_after(changes)) is not KEEP:
            self.run = replace(self.run, next_at=next_at)
        if after.owner is not KEEP:
            self.set_owner(after.owner, lease_until)
            self.is_closed = False
        if self.run.status in ENDED:
            self.wish = None

    def add_wish(self, wish: str) -> bool:
        """Keep the first wish for the owner. Returns False without an owner."""
        if self.run.owner is None:
            return False
        self.wish = self.wish or wish
        return True

    def add_message(self, message_id: str, message: str) -> bool:
        """Add a message, unless it is there. Returns False if the run takes none."""
        if self.run.status in ENDED or self.is_closed:
            return message_id in self.messages
        self.messages.setdefault(message_id, message)
        return True

    def set_owner(self, owner: str | None, lease_until: float) -> None:
        """Begin a lease of this owner, or end the lease; the rest of the header stays, `updated_at` as well."""
        self.run = replace(self.run, owner=owner)
        self.lease_until = 0.0 if owner is None else lease_until

    def add_records(self, records: Sequence[StoredRecord]) -> None:
        """Add the records whose keys are new, and replace those that are to be replaced, at their places."""
        for each in records:
            if each.replaces:
                self.records[each.key] = replace(each, replaces=False)
            else:
                self.records.setdefault(each.key, each)

    def add_events(self, events: Sequence[str], now: datetime) -> None:
        """Add events with the next numbers."""
        first = len(self.events) + 1
        self.events += [StoredEvent(first + index, now, each) for index, each in enumerate(events)]


class InMemoryRunStore(RunStore):
    """Stores runs in the memory of this process. This is the default store; runs end with the process."""

    persistent = False
    supports = frozenset({"retries", "expiry", "wishes", "conversations", "tell"})

    def __init__(self, lease: float = 15.0) -> None:
        """`lease` is the duration of a lease in seconds. Raises `ValueError` unless it is above 0."""
        if not (is_number(lease) and lease > 0):
            raise ValueError(f"invalid lease={lease!r}; use a number of seconds greater than 0")
        self.lease = lease
        self.clock = StoreClock()
        self._runs: dict[str, StoredRunState] = {}
        self._lock = Lock()  # a store may be shared by containers on several threads

    async def open(self) -> None:
        """Do nothing: there is nothing to prepare."""

    async def create(self, run: StoredRun, records: Sequence[StoredRecord] = (), *, owner: str | None = None) -> bool:
        """Store a new run with its first records. Returns False if the id exists."""
        with self._lock:
            if run.id in self._runs:
                return False
            kept = self._runs[run.id] = StoredRunState(replace(run, generation=1 if owner is not None else 0))
            kept.set_owner(owner, self._end_of_lease())
            kept.add_records(records)
            return True

    async def load(self, run_id: str) -> StoredRun | None:
        """Return the header, or None for an unknown id."""
        kept = self._runs.get(run_id)
        return None if kept is None else kept.run

    async def look(self, run_id: str) -> RunLook | None:
        """Return the values that change while the run goes on, or None for an unknown id."""
        with self._lock:
            kept = self._runs.get(run_id)
            if kept is None:
                return None
            run = kept.run
            return RunLook(run.status, run.version, run.generation, len(kept.events), self._is_runnable(kept))

    async def find(
        self,
        *,
        status: RunStatus | None = None,
        service: str | None = None,
        limit: int = 100,
        before: Position | None = None,
        waiting_longer_than: timedelta | None = None,
        started_by: str | None = None,
        memory_id: str | None = None,
    ) -> list[StoredRun]:
        """Return the headers that match all given conditions, newest first, at most `limit`."""
        with self._lock:
            runs = [*self._runs.values()]
        waiting_before = None if waiting_longer_than is None else self.clock.now() - waiting_longer_than
        found = [
            run
            for kept in runs
            if status in (None, (run := kept.run).status)
            and service in (None, run.service)
            and started_by in (None, run.started_by)
            and memory_id in (None, run.memory_id)
            and (before is None or position_of(run) < before)
            and (waiting_before is None or kept.waits_since_before(waiting_before))
        ]
        return sorted(found, key=position_of, reverse=True)[:limit]

    async def suspended_in(self, conversation: str) -> str | None:
        """Return the id of the suspended run of a conversation, or None."""
        with self._lock:
            runs = [each.run for each in self._runs.values()]
        return next(
            (each.id for each in runs if each.conversation == conversation and each.status == "suspended"), None
        )

    async def records(self, run_id: str) -> list[StoredRecord]:
        """Return all records of the run, in the order in which they were added."""
        with self._lock:
            kept = self._runs.get(run_id)
            return [] if kept is None else [*kept.records.values()]

    async def append(
        self,
        run_id: str,
        generation: int,
        records: Sequence[StoredRecord],
        changes: RunChanges | None = None,
        events: Sequence[str] = (),
    ) -> int:
        """Add records and events, and change the header, at once. Returns how many messages there are.

        Raises `LeaseLostError` for another generation.
        """
        with self._lock:
            kept = self._find_owned(run_id, generation)
            kept.add_records(records)
            kept.add_events(events, self.clock.now())
            if changes is not None:
                self._change(kept, changes, by_owner=True)
            return len(kept.messages)

    async def change(
        self, run_id: str, version: int, changes: RunChanges, records: Sequence[StoredRecord] = ()
    ) -> StoredRun | None:
        """Change the header and add records. Returns the new header, or None if it has another version."""
        with self._lock:
            kept = self._runs.get(run_id)
            if kept is None or kept.run.version != version:
                return None
            kept.add_records(records)
            self._change(kept, changes, by_owner=False)
            return kept.run

    async def acquire(self, run_id: str, owner: str) -> StoredRun | None:
        """Take a runnable run with a new lease and generation. Returns the header, or None if it is not runnable."""
        with self._lock:
            kept = self._runs.get(run_id)
            if kept is None or not self._is_runnable(kept):
                return None
            self._change(kept, RunChanges(owner=owner), by_owner=False)
            return kept.run

    async def renew(self, run_id: str, generation: int) -> bool:
        """Extend the lease to a full duration from now. Returns False if the run has another generation or no owner."""
        with self._lock:
            kept = self._runs.get(run_id)
            if kept is None or kept.run.generation != generation or kept.run.owner is None:
                return False
            kept.lease_until = self._end_of_lease()
            return True

    async def release(self, run_id: str, generation: int) -> None:
        """End the lease of this generation now; does nothing for another one."""
        with self._lock:
            kept = self._runs.get(run_id)
            if kept is not None and kept.run.generation == generation:
                kept.set_owner(None, 0.0)

    async def lapsed(self, limit: int = 100) -> list[str]:
        """Return the ids of runs that wait for a process, oldest first, at most `limit`."""
        with self._lock:
            time = self.clock.now()
            return [run_id for run_id, kept in self._runs.items() if self._is_runnable(kept) or kept.has_expired(time)][
                :limit
            ]

    async def add_wish(self, run_id: str, wish: str) -> bool:
        """Leave a wish for the owner of a run, unless there is one. Returns False for a run without owner."""
        with self._lock:
            kept = self._runs.get(run_id)
            return kept is not None and kept.add_wish(wish)

    async def wishes(self, run_ids: Collection[str]) -> dict[str, str]:
        """Return the wishes for these runs, by their ids."""
        with self._lock:
            found = {each: self._runs[each].wish for each in run_ids if each in self._runs}
            return {run_id: wish for run_id, wish in found.items() if wish is not None}

    async def add_message(self, run_id: str, message_id: str, message: str) -> bool:
        """Add a message for a run, unless it is there. Returns False for a run that takes none."""
        with self._lock:
            kept = self._runs.get(run_id)
            return kept is not None and kept.add_message(message_id, message)

    async def messages(self, run_id: str, after: int = 0) -> list[str]:
        """Return the messages of a run without the first `after`, in order."""
        with self._lock:
            kept = self._runs.get(run_id)
            return [] if kept is None else [*kept.messages.values()][after:]

    async def close_messages(self, run_id: str, generation: int, count: int) -> bool:
        """Let a run take no more messages. Returns False, and changes nothing, if it has more than `count`."""
        with self._lock:
            kept = self._find_owned(run_id, generation)
            kept.is_closed = kept.is_closed or len(kept.messages) <= count
            return len(kept.messages) <= count

    async def add_events(self, run_id: str, generation: int, events: Sequence[str]) -> None:
        """Add events, numbered from 1 in each run. Raises `LeaseLostError` for another generation."""
        with self._lock:
            self._find_owned(run_id, generation).add_events(events, self.clock.now())

    async def events(self, run_id: str, after: int, limit: int = 1000) -> list[StoredEvent]:
        """Return the events with a number above `after`, in order, at most `limit`."""
        with self._lock:
            kept = self._runs.get(run_id)
            return [] if kept is None else kept.events[max(after, 0) :][:limit]

    async def delete(self, run_id: str) -> None:
        """Delete the run, its records and its events; does nothing for an unknown id."""
        with self._lock:
            self._runs.pop(run_id, None)

    async def purge(self, before: datetime) -> int:
        """Delete the ended runs whose last change is older than `before`. Returns their number."""
        with self._lock:
            old = [
                run_id
                for run_id, kept in self._runs.items()
                if kept.run.status in ENDED and kept.run.updated_at < before
            ]
            for run_id in old:
                del self._runs[run_id]
            return len(old)

    def _find_owned(self, run_id: str, generation: int) -> StoredRunState:
        kept = self._runs.get(run_id)
        if kept is None or kept.run.generation != generation:
            raise LeaseLostError(run_id)
        return kept

    def _is_runnable(self, kept: StoredRunState) -> bool:
        return kept.is_runnable(self.clock.monotonic(), self.clock.now())

    def _change(self, kept: StoredRunState, changes: RunChanges, *, by_owner: bool) -> None:
        kept.change(changes, by_owner=by_owner, now=self.clock.now(), lease_until=self._end_of_lease())

    def _end_of_lease(self) -> float:
        return self.clock.monotonic() + self.lease
