"""Stores runs in SQLite or PostgreSQL: headers, leases, records and events.

Every write of an owner checks the run's generation in its own statement or transaction. Lock order: the header, then
the lease, then the conversation (`together`). Not here: the tables (`run_tables`), executing runs (`toolbox.runs`),
when a tool's transaction ends (`transactions`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar, get_args

from sqlalchemy import (
    Connection,
    Engine,
    FromClause,
    Integer,
    Row,
    Select,
    Text,
    and_,
    bindparam,
    case,
    column,
    delete,
    func,
    insert,
    literal,
    or_,
    select,
    true,
    tuple_,
    union_all,
    update,
)
from sqlalchemy import cast as cast_to
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.sql.elements import ColumnElement

from ..conversations.keys import ChatMemoryKey
from ..conversations.stores import is_log_store
from ..di.conditions import only_if
from ..di.decorators import application_scoped
from ..errors import IllegalConfigurationError, LeaseLostError, Problem, TransactionRolledBackError
from ..runs.documents import reduced_document, shown_document
from ..runs.new_documents import conversation_key
from ..runs.store import (
    ENDED,
    KEEP,
    Keep,
    Ownership,
    Position,
    RunChanges,
    RunLook,
    RunStatus,
    RunStore,
    StoredEvent,
    StoredRecord,
    StoredRun,
    next_at_after,
    ownership_after,
)
from ..settings import RecordsOfEndedRuns, SqlSettings, ToolboxSettings
from .dialects import INSERT_OF, DatabaseNow, has_ended, new_clock
from .engines import FOR_WRITING, SeparateConnections, address_of, joined_connection, joining, shares_pool
from .migrations import StoreTables
from .outages import retried
from .run_tables import INDEXED, RunTables, beginning_of

T = TypeVar("T")

_AT_ONCE = 500  # runs that `purge` deletes in one transaction, and that one statement names
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SHORTEST_LIMIT = 30.0  # seconds for one try of a statement on PostgreSQL, which takes at most two leases


@only_if(missing=RunStore)
@application_scoped
class SqlRunStore(RunStore):
    """Stores runs in a database, whose tables it creates and migrates when the container starts.

        container.register(sql.engine, sql.SqlRunStore)  # TOOLBOX_SQL__URL=postgresql://…

    A process owns a run for `lease` seconds and renews the lease while it executes the run; after a crash another one
    continues. Tools marked `@sql.transactional` that use `engine` record their result in their own transaction.
    With `records_of_ended_runs="delete"` only the outcome and the history of a run stay when it ends: its arguments,
    records, messages and events are deleted. With `migrate=False` the tables are only checked at start, and
    `toolbox migrate` creates them. As a bean, the store takes the options that it was not given from the settings, such
    as `TOOLBOX_SQL__MIGRATE=false`. Supports SQLite and PostgreSQL.

    While the database cannot be reached, calls are tried again for up to `lease` seconds, then its error is raised.
    Raises `TypeError`, `ValueError` or, for another database, `IllegalConfigurationError` for invalid arguments.
    """

    persistent = True
    supports = frozenset({"retries", "expiry", "wishes", "conversations", "tell"})

    def __init__(
        self,
        engine: AsyncEngine,
        lease: float = 15.0,
        *,
        table: str = "toolbox_runs",
        migrate: bool | None = None,
        records_of_ended_runs: RecordsOfEndedRuns | None = None,
        settings: ToolboxSettings | None = None,
    ) -> None:
        if not isinstance(engine, AsyncEngine):
            raise TypeError(
                f"SqlRunStore needs an AsyncEngine, such as sql.engine creates; got {type(engine).__name__}"
            )
        if not isinstance(lease, (int, float)) or isinstance(lease, bool) or not 0 < lease < float("inf"):
            raise ValueError(f"invalid lease={lease!r}; use a number of seconds above 0")
        if engine.dialect.name not in INSERT_OF:
            what = f"unsupported database {engine.dialect.name}"
            raise IllegalConfigurationError([Problem("SqlRunStore", what, "use an engine for SQLite or PostgreSQL")])
        self.lease = float(lease)
        given = SqlSettings() if settings is None else settings.sql
        records = given.records_of_ended_runs if records_of_ended_runs is None else records_of_ended_runs
        if records not in get_args(RecordsOfEndedRuns):
            raise ValueError(f"invalid records_of_ended_runs={records!r}; use 'keep' or 'delete'")
        self._deletes_ended = records == "delete"
        self.clock = new_clock(engine.sync_engine)
        self._engine = engine
        self._separate = SeparateConnections(engine)
        self._is_postgresql = engine.dialect.name == "postgresql"
        self._limit = max(2 * self.lease, _SHORTEST_LIMIT) if self._is_postgresql else None
        self._tables = RunTables(table)
        self.store_tables = StoreTables(
            engine, self._tables.schema(), migrates=given.migrate if migrate is None else migrate
        )
        self._single = engine.execution_options(isolation_level="AUTOCOMMIT") if self._is_postgresql else engine
        self._add_record = self._insert_record_if_owned()  # built once, because it is most of what a store does
        leases = self._tables.leases.alias()
        counted = select(func.coalesce(leases.c.messages, 0)).where(leases.c.run_id == bindparam("run_id"))
        self._add_record_and_count = self._add_record.returning(counted.scalar_subquery())

    @retried
    async def open(self) -> None:
        """Create, migrate or check the tables; processes that start at the same time wait for each other."""
        await self.store_tables.prepare()

    async def ready(self) -> bool:
        """Return True if the tables can be read; raise the database's error otherwise. For readiness checks."""
        async with self._reading() as connection:
            await connection.execute(select(self._tables.runs.c.id).limit(1))
        return True

    @retried
    async def now(self) -> datetime:
        """Return the time by the clock with which the store measures leases, in UTC."""
        if self.clock is not None:
            return self.clock.now()
        async with self._reading() as connection:
            milliseconds: int = (await connection.execute(select(self._now()))).scalar_one()
            return _read_time(milliseconds)

    # --- headers

    @retried
    async def create(self, run: StoredRun, records: Sequence[StoredRecord] = (), *, owner: str | None = None) -> bool:
        """Store a new run with its first records. Returns False if the id exists.

        False also if a connection was lost after an earlier try had created the run.
        """
        runs, leases = self._tables.runs, self._tables.leases
        now, generation = self._now(), 1 if owner is not None else 0
        header = (
            INSERT_OF[self._engine.dialect.name](runs)
            .values(
                id=run.id,
                service=run.service,
                method=run.method,
                status=run.status,
                generation=generation,
                version=run.version,
                conversation=run.conversation,
                created_at=now,
                updated_at=now,
                document=run.document,
                shown=shown_document(run.document),
                shown_version=run.version,
                started_by=run.started_by,
                memory_id=run.memory_id,
                waiting_since=_write_time_or_none(run.waiting_since),
                next_at=_write_time_or_none(run.next_at),
            )
            .on_conflict_do_nothing(index_elements=[runs.c.id])
            .returning(runs.c.id)
        )
        until: Any = self._end_of_lease() if owner is not None else literal(0)
        async with self._writing() as connection:
            if (await connection.execute(header)).first() is None:
                return False
            lease = {"run_id": run.id, "generation": generation, "owner": owner, "until": until, "events": 0}
            await connection.execute(insert(leases).values(lease))
            await self._add_records(connection, run.id, records)
        return True

    @retried
    async def load(self, run_id: str) -> StoredRun | None:
        """Return the header, or None for an unknown id."""
        async with self._reading() as connection:
            return await self._read_header(connection, run_id)

    @retried
    async def look(self, run_id: str) -> RunLook | None:
        """Return the values that change while the run goes on, or None for an unknown id."""
        runs, leases = self._tables.runs, self._tables.leases
        is_runnable = and_(runs.c.status == "running", self._has_ended(), self._is_due())
        seen = runs.c.status, runs.c.version, runs.c.generation, leases.c.events, is_runnable
        found = select(*seen).join_from(runs, leases, leases.c.run_id == runs.c.id).where(runs.c.id == run_id)
        async with self._reading() as connection:
            row = (await connection.execute(found)).first()
            return None if row is None else RunLook(*row)

    @retried
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
        runs = self._tables.runs
        # An earlier release has left out what lists show now.
        is_whole = and_(runs.c.shown_version == runs.c.version, runs.c.shown.contains('"identity_attributes": {'))
        shown = case((is_whole, runs.c.shown), else_=runs.c.document)
        found = self._select_headers(shown).order_by(runs.c.created_at.desc(), runs.c.id.desc()).limit(limit)
        if status is not None:
            found = found.where(runs.c.status == status)
        if service is not None:
            found = found.where(runs.c.service == service)
        if before is not None:
            found = found.where(tuple_(runs.c.created_at, runs.c.id) < tuple_(_write_time(before[0]), before[1]))
        if started_by is not None:
            is_indexed = beginning_of(runs.c.started_by) == started_by[:INDEXED]
            found = found.where(is_indexed, runs.c.started_by == started_by)
        if memory_id is not None:
            is_indexed = and_(runs.c.memory_id.is_not(None), beginning_of(runs.c.memory_id) == memory_id[:INDEXED])
            lies_in = and_(is_indexed, runs.c.memory_id == memory_id)
            if service is not None:  # release 0.1 has stored the key alone
                key = conversation_key(ChatMemoryKey(service, memory_id))
                lies_in = or_(lies_in, and_(runs.c.memory_id.is_(None), runs.c.conversation == key))
            found = found.where(lies_in)
        if waiting_longer_than is not None:
            since = func.coalesce(runs.c.waiting_since, runs.c.updated_at)
            longest = waiting_longer_than // timedelta(milliseconds=1)
            found = found.where(runs.c.status == "suspended", since < self._now() - longest)
        async with self._reading() as connection:
            return [_read_run(row) for row in await connection.execute(found)]

    @retried
    async def suspended_in(self, conversation: str) -> str | None:
        """Return the id of the suspended run of a conversation, or None."""
        runs = self._tables.runs
        found = select(runs.c.id).where(runs.c.conversation == conversation, runs.c.status == "suspended").limit(1)
        async with self._reading() as connection:
            run_id: str | None = await connection.scalar(found)
            return run_id

    async def change(
        self, run_id: str, version: int, changes: RunChanges, records: Sequence[StoredRecord] = ()
    ) -> StoredRun | None:
        """Change the header and add records. Returns the new header, or None if it has another version."""
        runs, after = self._tables.runs, ownership_after(changes, by_owner=False)
        mine = and_(runs.c.id == run_id, runs.c.version == version)
        changed = update(runs).where(mine).values(self._new_values(changes, after))
        async with self._writing() as connection:
            if not await _write_row(connection, changed):
                return None
            await self._change_lease(connection, run_id, changes, after)
            await self._add_records(connection, run_id, records)
            await self._delete_ended(connection, run_id, changes)
            return await self._read_header(connection, run_id)

    async def _change_lease(
        self, connection: AsyncConnection, run_id: str, changes: RunChanges, after: Ownership
    ) -> None:
        """End the lease, or begin one of a new owner. The row of the lease has the generation as well."""
        leases, owner = self._tables.leases, after.owner
        if owner is KEEP:
            return
        values: dict[str, Any] = {"owner": owner, "until": 0 if owner is None else self._end_of_lease()}
        if after.raises_generation:
            values["generation"] = leases.c.generation + 1
        if changes.status in ENDED:
            values["wish"] = None
        values["closed"] = 1 if changes.status in ENDED else None
        await connection.execute(update(leases).where(leases.c.run_id == run_id).values(values))

    @retried
    async def delete(self, run_id: str) -> None:
        """Delete the run, its records and its events; does nothing for an unknown id."""
        async with self._writing() as connection:
            await self._delete(connection, [run_id])

    @retried
    async def purge(self, before: datetime) -> int:
        """Delete the ended runs whose last change is older than `before`. Returns their number.

        Deletes in portions, so that others can write in between.
        """
        runs, deleted = self._tables.runs, 0
        ended = (
            select(runs.c.id)
            .where(runs.c.status.in_(sorted(ENDED)), runs.c.updated_at < _write_time(before))
            .limit(_AT_ONCE)
        )
        while True:
            async with self._writing() as connection:
                found = list(await connection.scalars(ended))
                deleted += await self._delete(connection, found) if found else 0
            if len(found) < _AT_ONCE:
                return deleted

    async def _delete(self, connection: AsyncConnection, run_ids: list[str]) -> int:
        tables = self._tables
        deleted = await connection.execute(delete(tables.runs).where(tables.runs.c.id.in_(run_ids)))
        for table in (tables.leases, tables.records, tables.events, tables.messages):
            await connection.execute(delete(table).where(table.c.run_id.in_(run_ids)))
        return int(deleted.rowcount)

    # --- records and events

    @retried
    async def records(self, run_id: str) -> list[StoredRecord]:
        """Return all records of the run, in the order in which they were added."""
        records = self._tables.records
        found = select(records.c.key, records.c.kind, records.c.data).where(records.c.run_id == run_id)
        async with self._reading() as connection:
            return [StoredRecord(*row) for row in await connection.execute(found.order_by(records.c.number))]

    @retried
    async def append(
        self,
        run_id: str,
        generation: int,
        records: Sequence[StoredRecord],
        changes: RunChanges | None = None,
        events: Sequence[str] = (),
    ) -> int | None:
        """Add records and events, and change the header, at once. Returns how many messages the run has, if it knows.

        Raises `LeaseLostError` for another generation.
        """
        if len(records) == 1 and changes is None and not events and not records[0].replaces:
            # By far the most writes: one statement that checks the generation itself.
            values = _record_values(run_id, records[0], generation=generation)
            async with self._writing(single=True) as connection:
                if (written := (await connection.execute(self._add_record_and_count, values)).first()) is not None:
                    return int(written[0])
            # The run is not this owner's, or the key exists: below, the lock tells which.
        runs = self._tables.runs
        after = None if changes is None else ownership_after(changes, by_owner=True)
        mine = and_(runs.c.id == run_id, runs.c.generation == generation)
        async with self._writing() as connection:
            if changes is None or after is None:
                await connection.run_sync(self._lock, run_id, generation)
            elif not await _write_row(connection, update(runs).where(mine).values(self._new_values(changes, after))):
                raise LeaseLostError(run_id)
            await self._add_records(connection, run_id, records)
            if events:
                await self._add_events(connection, run_id, generation, events)
            if changes is not None and after is not None:
                await self._change_lease(connection, run_id, changes, after)
                await self._delete_ended(connection, run_id, changes)
        return None

    async def _delete_ended(self, connection: AsyncConnection, run_id: str, changes: RunChanges) -> None:
        """Delete the records and events of a run that ends, if the store does not keep them."""
        if self._deletes_ended and changes.status in ENDED:
            for table in (self._tables.records, self._tables.events, self._tables.messages):
                await connection.execute(delete(table).where(table.c.run_id == run_id))

    def _lock(self, connection: Connection, run_id: str, generation: int) -> None:
        """Check the generation, and lock it until the end of the transaction. Raises `LeaseLostError`."""
        # Fencing: a process that was paused may be here after another one has taken the run. Its own clock says
        # nothing, so the time of the lease is not asked: only the generation counts, which each owner raises. On
        # PostgreSQL the lock keeps it until the transaction ends, so that nobody takes the run between this check and
        # the commit. It is shared, because several tools of a run commit at once. SQLite has one writer at a time.
        runs = self._tables.runs
        mine = select(runs.c.id).where(runs.c.id == run_id, runs.c.generation == generation)
        if connection.execute(mine.with_for_update(read=True)).first() is None:
            raise LeaseLostError(run_id)

    async def _add_records(self, connection: AsyncConnection, run_id: str, records: Sequence[StoredRecord]) -> None:
        for record in records:
            await connection.execute(self._insert_record(run_id, record))

    def _insert_record(self, run_id: str, record: StoredRecord) -> Any:
        """Return the statement that adds or replaces a record, in a transaction that has checked the generation."""
        records = self._tables.records
        adding = INSERT_OF[self._engine.dialect.name](records).values(_record_values(run_id, record))
        same = [records.c.run_id, records.c.key]
        if record.replaces:
            replaced = {"kind": adding.excluded.kind, "data": adding.excluded.data}
            return adding.on_conflict_do_update(index_elements=same, set_=replaced)
        return adding.on_conflict_do_nothing(index_elements=same)

    def _insert_record_if_owned(self) -> Any:
        """Return the statement that adds one record, unless its key exists, if the generation is still this one."""
        runs, records = self._tables.runs, self._tables.records
        columns = ("run_id", "key", "kind", "data")
        mine = and_(runs.c.id == bindparam("run_id"), runs.c.generation == bindparam("generation"))
        source = select(*(bindparam(name, type_=Text()) for name in columns)).where(mine)
        source = source.select_from(self._with_safe_commit(runs)).with_for_update(read=True, of=runs)
        same = [records.c.run_id, records.c.key]
        adding = INSERT_OF[self._engine.dialect.name](records).from_select(columns, source)
        return adding.on_conflict_do_nothing(index_elements=same)

    @retried
    async def add_events(self, run_id: str, generation: int, events: Sequence[str]) -> None:
        """Add events, numbered from 1 in each run. Raises `LeaseLostError` for another generation."""
        if events:
            # On PostgreSQL it is one statement, so that a process that stands still afterwards holds no lock.
            async with self._writing(single=self._is_postgresql) as connection:
                await self._add_events(connection, run_id, generation, events)

    async def _add_events(
        self, connection: AsyncConnection, run_id: str, generation: int, events: Sequence[str]
    ) -> None:
        if self._is_postgresql:
            if (await connection.execute(self._insert_events(run_id, generation, events))).first() is None:
                raise LeaseLostError(run_id)
            return
        leases, table = self._tables.leases, self._tables.events
        mine = and_(leases.c.run_id == run_id, leases.c.generation == generation)
        counted = update(leases).where(mine).values(events=leases.c.events + len(events)).returning(leases.c.events)
        last = await connection.scalar(counted)
        if last is None:
            raise LeaseLostError(run_id)
        first = last - len(events) + 1
        rows = [{"run_id": run_id, "number": first + index, "data": data} for index, data in enumerate(events)]
        await connection.execute(insert(table).values(at=self._now()), rows)

    def _insert_events(self, run_id: str, generation: int, events: Sequence[str]) -> Any:
        """Return the statement of PostgreSQL that numbers and adds events."""
        leases, table = self._tables.leases, self._tables.events
        counted = (
            update(leases)
            .where(leases.c.run_id == run_id, leases.c.generation == generation)
            .values(events=leases.c.events + len(events))
            .returning((leases.c.events - len(events)).label("before"))
            .cte("counted")
        )
        given = (
            func.unnest(literal([*events], postgresql.ARRAY(Text())))
            .table_valued(column("data", Text()), with_ordinality="ordinal")
            .render_derived(name="event")
        )
        number = cast_to(counted.c.before + given.c.ordinal, Integer())
        source = select(literal(run_id, Text()), number, self._now(), given.c.data)
        source = source.select_from(self._with_safe_commit(counted).join(given, true()))
        return insert(table).from_select(["run_id", "number", "at", "data"], source).returning(table.c.number)

    @retried
    async def events(self, run_id: str, after: int, limit: int = 1000) -> list[StoredEvent]:
        """Return the events with a number above `after`, in order, at most `limit`."""
        table = self._tables.events
        found = select(table.c.number, table.c.at, table.c.data).where(table.c.run_id == run_id, table.c.number > after)
        async with self._reading() as connection:
            rows = await connection.execute(found.order_by(table.c.number).limit(limit))
            return [StoredEvent(row.number, _read_time(row.at), row.data) for row in rows]

    # --- leases

    @retried
    async def acquire(self, run_id: str, owner: str) -> StoredRun | None:
        """Take a runnable run with a new lease and generation. Returns the header, or None if it is not runnable."""
        runs, leases = self._tables.runs, self._tables.leases
        free = self._has_ended()
        found = (
            select(runs.c.generation)
            .join_from(runs, leases, leases.c.run_id == runs.c.id)
            .where(runs.c.id == run_id, runs.c.status == "running", free, self._is_due())
        )
        async with self._reading() as connection:
            generation: int | None = await connection.scalar(found)
        if generation is None:
            return None
        mine = and_(
            runs.c.id == run_id,
            runs.c.generation == generation,
            runs.c.status == "running",
            self._is_due(),
        )
        taken = {"generation": generation + 1, "owner": owner, "until": self._end_of_lease(), "closed": None}
        taking = RunChanges(owner=owner)
        values = self._new_values(taking, ownership_after(taking, by_owner=False))
        async with self._writing() as connection:
            if not await _write_row(connection, update(runs).where(mine).values(values)):
                return None
            same = and_(leases.c.run_id == run_id, leases.c.generation == generation, free)
            if not await _write_row(connection, update(leases).where(same).values(taken)):
                await connection.rollback()  # its owner has just renewed it
                return None
            return await self._read_header(connection, run_id)

    def _has_ended(self) -> ColumnElement[bool]:
        return has_ended(self._tables.leases.c.until, 2 * self._lease_milliseconds, self.clock)

    def _is_due(self) -> ColumnElement[bool]:
        """Return the condition that a run without an owner need not wait for its next try."""
        next_at = self._tables.runs.c.next_at
        return or_(next_at.is_(None), next_at <= self._now())

    def renewing(self) -> AbstractAsyncContextManager[None]:
        """Renew and release leases on separate connections inside the block."""
        return self._separate.opened()

    @retried
    async def renew(self, run_id: str, generation: int) -> bool:
        """Extend the lease to a full duration from now. Returns False if the run has another generation or no owner."""
        # Not by the time: an owner that is late keeps the run until another one has taken it.
        return await self._set_lease(run_id, generation, {"until": self._end_of_lease()})

    @retried
    async def release(self, run_id: str, generation: int) -> None:
        """End the lease of this generation now; does nothing for another one."""
        await self._set_lease(run_id, generation, {"owner": None, "until": 0})

    async def _set_lease(self, run_id: str, generation: int, values: dict[str, Any]) -> bool:
        leases = self._tables.leases
        mine = and_(
            leases.c.run_id == run_id,
            leases.c.generation == generation,
            leases.c.owner.is_not(None),
        )
        async with self._writing(single=True, engine=self._separate.engine) as connection:
            return await _write_row(connection, update(leases).where(mine).values(values))

    @retried
    async def lapsed(self, limit: int = 100) -> list[str]:
        """Return the ids of runs that wait for a process, oldest first, at most `limit`."""
        runs, leases = self._tables.runs, self._tables.leases
        seen = select(runs.c.id, runs.c.created_at)
        runnable = seen.join_from(runs, leases, leases.c.run_id == runs.c.id)
        # Two queries with two indexes: most suspended runs never expire.
        both = union_all(
            runnable.where(runs.c.status == "running", self._has_ended(), self._is_due()),
            seen.where(runs.c.status == "suspended", runs.c.next_at <= self._now()),
        ).subquery()
        found = select(both.c.id).order_by(both.c.created_at).limit(limit)
        async with self._reading() as connection:
            return list(await connection.scalars(found))

    @retried
    async def add_wish(self, run_id: str, wish: str) -> bool:
        """Leave a wish for the owner of a run, unless there is one. Returns False for a run without owner."""
        # In the row of the lease: the header waits for the transactions of tools, and its document is the owner's.
        leases = self._tables.leases
        owned = and_(leases.c.run_id == run_id, leases.c.owner.is_not(None))
        left = update(leases).where(owned).values(wish=func.coalesce(leases.c.wish, wish))
        async with self._writing(single=True) as connection:
            return await _write_row(connection, left)

    @retried
    async def wishes(self, run_ids: Collection[str]) -> dict[str, str]:
        """Return the wishes for these runs, by their ids."""
        leases, wished = self._tables.leases, dict[str, str]()
        ids = [*run_ids]
        # As renewals do: the tools of these runs can take all connections of the engine.
        async with self._reading(self._separate.engine) as connection:
            for first in range(0, len(ids), _AT_ONCE):
                some = leases.c.run_id.in_(ids[first : first + _AT_ONCE])
                found = select(leases.c.run_id, leases.c.wish).where(some, leases.c.wish.is_not(None))
                wished |= {row.run_id: row.wish for row in await connection.execute(found)}
        return wished

    # --- messages

    @retried
    async def add_message(self, run_id: str, message_id: str, message: str) -> bool:
        """Add a message for a run, unless it is there. Returns False for a run that takes none."""
        # The row of the lease is locked first, by everyone who adds or closes. The end of a run sets `closed` in the
        # same transaction, so that a message that is stored is never overlooked.
        runs, leases, messages = self._tables.runs, self._tables.leases, self._tables.messages
        going_on = select(runs.c.id).where(runs.c.id == run_id, runs.c.status.not_in(sorted(ENDED))).exists()
        taking = and_(leases.c.run_id == run_id, leases.c.closed.is_(None), going_on)
        number = func.coalesce(leases.c.messages, 0) + 1
        counted = update(leases).where(taking).values(messages=number).returning(leases.c.messages)
        same = select(messages.c.number).where(messages.c.run_id == run_id, messages.c.id == message_id)
        async with self._writing() as connection:
            added = await connection.scalar(counted)
            if (await connection.execute(same)).first() is not None:  # an earlier try has added it
                await connection.rollback()
                return True
            if added is None:
                return False
            row = {"run_id": run_id, "number": added, "id": message_id, "data": message}
            await connection.execute(insert(messages).values(row))
            return True

    @retried
    async def messages(self, run_id: str, after: int = 0) -> list[str]:
        """Return the messages of a run without the first `after`, in order."""
        messages = self._tables.messages
        found = select(messages.c.data).where(messages.c.run_id == run_id, messages.c.number > after)
        async with self._reading() as connection:
            return list(await connection.scalars(found.order_by(messages.c.number)))

    @retried
    async def close_messages(self, run_id: str, generation: int, count: int) -> bool:
        """Let a run take no more messages. Returns False, and changes nothing, if it has more than `count`."""
        leases = self._tables.leases
        mine = and_(leases.c.run_id == run_id, leases.c.generation == generation)
        number = func.coalesce(leases.c.messages, 0)
        closed = case((number <= count, 1), else_=leases.c.closed)
        async with self._writing(single=True) as connection:
            written = await connection.execute(update(leases).where(mine).values(closed=closed).returning(number))
            if (found := written.first()) is None:
                raise LeaseLostError(run_id)
            return bool(found[0] <= count)

    # --- in one transaction with a conversation

    def joins(self, conversations: object) -> bool:
        """Return True if a store of conversations is on the same engine, so that `together` can write in both.

        Not for a subclass that keeps messages itself, which may write elsewhere.
        """
        tables = getattr(conversations, "store_tables", None)
        if not (isinstance(tables, StoreTables) and is_log_store(type(conversations))):
            return False
        return shares_pool(tables.engine, self._engine)

    @retried
    async def together(self, conversations: Any, work: Callable[[], Awaitable[T]]) -> T:
        """Await writes of this store and one that it `joins`, in one transaction: all of them, or none if one raises.

        `work` is awaited again while the database is away. It writes the run first, then the conversation.
        """
        await conversations.store_tables.prepare()
        async with self._writing() as connection:
            with joining(connection):
                return await work()

    # --- in a tool's transaction

    def uses(self, bind: Any) -> bool:
        """Return True if a session with this engine or connection writes to the database of the store.

        That is the case for the store's engine, and for a synchronous engine with the same URL apart from its driver.
        """
        engine = getattr(bind, "engine", None)
        if isinstance(engine, AsyncEngine):
            engine = engine.sync_engine
        if not isinstance(engine, Engine):
            return False
        ours = self._engine.sync_engine
        if engine is ours or engine.pool is ours.pool:
            return True
        return not engine.dialect.is_async and address_of(engine) == address_of(ours)

    def record_in(self, connection: Connection, run_id: str, generation: int, record: StoredRecord) -> None:
        """Add the result of a tool in the tool's transaction, as its last statement before the commit.

        Raises `LeaseLostError` if another process has taken the run, and `TransactionRolledBackError` if the call has
        another result: the transaction must then be rolled back.
        """
        # The lock comes last and is held for one commit: a process that was paused before it blocks no other process.
        self._guard(connection)
        values = _record_values(run_id, record, generation=generation)
        done = connection.execute(self._add_record, values, execution_options={"preserve_rowcount": True})
        if not done.rowcount:
            self._lock(connection, run_id, generation)
            raise TransactionRolledBackError(f"call {record.key} of run {run_id}", "it has another recorded result")

    def note_in(self, connection: Connection, run_id: str, generation: int, record: StoredRecord) -> None:
        """Add a record in the tool's transaction, unless it exists. Raises `LeaseLostError` as `record_in` does."""
        self._guard(connection)
        self._lock(connection, run_id, generation)
        connection.execute(self._insert_record(run_id, record))

    async def committed(self, run_id: str, generation: int, key: str) -> StoredRecord | None:
        """Return a record of a tool's transaction, or None, after each commit that is under way has ended.

        Waits as long as this process can renew its lease. Raises `LeaseLostError`, and the error of the database.
        """
        while True:
            try:
                return await self._committed(run_id, generation, key)
            except TimeoutError:  # a commit takes longer than the limit of one statement
                if not await self.renew(run_id, generation):
                    raise LeaseLostError(run_id) from None

    @retried
    async def _committed(self, run_id: str, generation: int, key: str) -> StoredRecord | None:
        # A transaction that has recorded holds a shared lock on the header until its backend has committed it, also if
        # its connection is lost. SQLite has one writer at a time. The two statements are two transactions on
        # PostgreSQL, so that the second one sees what was committed while the first one waited.
        runs, records = self._tables.runs, self._tables.records
        mine = select(runs.c.id).where(runs.c.id == run_id, runs.c.generation == generation)
        found = select(records.c.key, records.c.kind, records.c.data)
        async with self._writing(single=True) as connection:
            if (await connection.execute(mine.with_for_update(key_share=True))).first() is None:
                raise LeaseLostError(run_id)
            row = (await connection.execute(found.where(records.c.run_id == run_id, records.c.key == key))).first()
            return None if row is None else StoredRecord(*row)

    def system_database_url(self) -> str:
        """Return the URL of a database for a queue next to the runs: the same on PostgreSQL, another file on SQLite."""
        url = self._engine.url.set(drivername=self._engine.dialect.name)
        if url.drivername == "sqlite":
            url = url.set(database=f"{url.database}.dbos", query={})
        return url.render_as_string(hide_password=False)

    # --- rows and connections

    @property
    def _lease_milliseconds(self) -> int:
        return round(self.lease * 1000)

    def _now(self) -> DatabaseNow:
        return DatabaseNow(self.clock)

    def _end_of_lease(self) -> ColumnElement[int]:
        return self._now() + self._lease_milliseconds

    def _select_headers(self, document: ColumnElement[Any] | None = None) -> Select[Any]:
        """Return the statement that reads whole headers: what `_read_run` needs. `document` may be a shorter one."""
        runs, leases = self._tables.runs, self._tables.leases
        others = [each for each in runs.c if each.name not in ("document", "shown", "shown_version")]
        shown = runs.c.document if document is None else document.label("document")
        return select(*others, shown, leases.c.owner).join_from(runs, leases, leases.c.run_id == runs.c.id)

    async def _read_header(self, connection: AsyncConnection, run_id: str) -> StoredRun | None:
        """Return a header with what the row of its lease has of it: also after each write that returns one."""
        row = (await connection.execute(self._select_headers().where(self._tables.runs.c.id == run_id))).first()
        return None if row is None else _read_run(row)

    def _new_values(self, changes: RunChanges, after: Ownership) -> dict[str, Any]:
        """Return the new values of a header."""
        columns = self._tables.runs.c
        values: dict[str, Any] = {**changes.values, "version": columns.version + 1, "updated_at": self._now()}
        if (since := values.get("waiting_since")) is not None:
            values["waiting_since"] = _write_time(since)
        if not isinstance(next_at := next_at_after(changes), Keep):
            values["next_at"] = _write_time_or_none(next_at)
        if (document := values.get("document")) is not None:
            if self._deletes_ended and changes.status in ENDED:
                document = reduced_document(document)
            values |= {"document": document, "shown": shown_document(document), "shown_version": columns.version + 1}
        else:
            is_shown = columns.shown_version == columns.version
            values["shown_version"] = case((is_shown, columns.version + 1), else_=columns.shown_version)
        if after.raises_generation:
            values["generation"] = columns.generation + 1
        return values

    @asynccontextmanager
    async def _reading(self, engine: AsyncEngine | None = None) -> AsyncIterator[AsyncConnection]:
        await self.store_tables.prepare()  # no start has opened a store that is used without a container
        if engine is None and (joined := joined_connection(self._engine)) is not None:
            yield joined
            return
        async with (engine or self._single).connect() as connection:
            if engine is not None and self._is_postgresql:
                await connection.execution_options(isolation_level="AUTOCOMMIT")
            yield connection

    @asynccontextmanager
    async def _writing(
        self, *, single: bool = False, engine: AsyncEngine | None = None
    ) -> AsyncIterator[AsyncConnection]:
        """Open a connection in a transaction that ends with the block; `single` is for one statement.

        Inside of `together`, it is the connection of that.
        """
        await self.store_tables.prepare()
        if engine is None and (joined := joined_connection(self._engine)) is not None:
            yield joined
            return
        async with (engine or self._engine).connect() as connection:
            # One statement is one transaction. The driver of SQLite needs to begin it as a writer.
            at_once = {"isolation_level": "AUTOCOMMIT"} if single and self._is_postgresql else {}
            await connection.execution_options(**FOR_WRITING, **at_once)
            async with connection.begin():
                if self._is_postgresql and not single:
                    await connection.run_sync(self._guard)
                yield connection

    # Two options of PostgreSQL keep what other processes rely on. They apply to the current transaction only:
    #
    # - A session that stands still within a transaction is ended after one lease. Its locks would keep another process
    #   from taking the run.
    # - The commit waits until the data is on disk. With `synchronous_commit = off`, a server that crashes forgets what
    #   it has confirmed, and a process that continues would leave effects without the ones before.

    def _guard(self, connection: Connection) -> None:
        """Set both options for the current transaction. It comes before anything is locked."""
        if self._is_postgresql:
            idle = func.set_config("idle_in_transaction_session_timeout", str(self._lease_milliseconds), True)
            connection.execute(select(idle, _SAFE_COMMIT))

    def _with_safe_commit(self, source: FromClause) -> FromClause:
        """Return `source`, joined with the option for commits: for a statement that is its own transaction."""
        if not self._is_postgresql:
            return source
        return source.join(select(_SAFE_COMMIT.label("commits")).cte("options"), true())


# Stricter settings, such as `remote_apply`, stay.
_SAFE_COMMIT = case(
    (func.current_setting("synchronous_commit") == "off", func.set_config("synchronous_commit", "on", True)),
    else_="kept",
)


def _record_values(run_id: str, record: StoredRecord, **others: Any) -> dict[str, Any]:
    return {"run_id": run_id, "key": record.key, "kind": record.kind, "data": record.data, **others}


def _read_run(row: Row[Any]) -> StoredRun:
    return StoredRun(
        id=row.id,
        service=row.service,
        method=row.method,
        status=row.status,
        generation=row.generation,
        owner=row.owner,
        version=row.version,
        conversation=row.conversation,
        created_at=_read_time(row.created_at),
        updated_at=_read_time(row.updated_at),
        document=row.document,
        started_by=row.started_by,
        memory_id=row.memory_id,
        waiting_since=_read_time_or_none(row.waiting_since),
        next_at=_read_time_or_none(row.next_at),
    )


def _read_time(milliseconds: int) -> datetime:
    return _EPOCH + timedelta(milliseconds=milliseconds)


def _read_time_or_none(milliseconds: int | None) -> datetime | None:
    return None if milliseconds is None else _read_time(milliseconds)


def _write_time(time: datetime) -> int:
    return (time - _EPOCH) // timedelta(milliseconds=1)


def _write_time_or_none(time: datetime | None) -> int | None:
    return None if time is None else _write_time(time)


async def _write_row(connection: AsyncConnection, statement: Any, values: dict[str, Any] | None = None) -> bool:
    """Execute a statement, and return True if it has written a row."""
    done = await connection.execute(statement, values, execution_options={"preserve_rowcount": True})
    return bool(done.rowcount)
