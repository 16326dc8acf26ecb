"""Stores conversations in SQLite or PostgreSQL: their heads, turns and leases.

Each write is one short transaction with a fixed number of statements: none is open while a model or a tool runs. Lock
order: the lease, then the head, then turns. Not here: the tables (`conversation_tables`), holding leases
(`toolbox.conversations.leases`), what changes in a log (`toolbox.conversations.log`).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime
from typing import Any

from sqlalchemy import Row, and_, case, delete, func, insert, or_, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.sql.elements import ColumnElement

from ..conversations.keys import ChatMemoryKey, Owner
from ..conversations.leases import LEASE, Leases
from ..conversations.log import (
    Head,
    Log,
    LogWrite,
    Position,
    Replaced,
    Turn,
    backwards,
    before_entry,
    begin_head,
    choose_newest,
    emptied,
    head_after,
    head_before,
    knows_state,
    place_of_entry,
    place_of_user_message,
    read_entry_id,
    with_beans_of,
)
from ..conversations.log_forms import (
    beans_from_json,
    beans_to_json,
    head_from_json,
    head_to_json,
    time_from_number,
    time_to_number,
    turn_from_json,
    turn_to_json,
)
from ..conversations.stores import ChatMemoryStore, Deleted, LogStore
from ..di.conditions import only_if
from ..di.decorators import application_scoped
from ..errors import IllegalConfigurationError, MemoryLeaseLostError, Problem
from ..introspection import is_number
from ..settings import SqlSettings, ToolboxSettings
from ..store_clock import clock_of
from ..transcripts import messages_from_json, messages_to_json
from .conversation_tables import ConversationTables
from .dialects import INSERT_OF, DatabaseNow, has_ended, new_clock
from .engines import FOR_WRITING, SeparateConnections, joined_connection
from .migrations import StoreTables

_BETWEEN_PURGES = 60.0  # seconds
_TURNS_AT_ONCE = 100  # of the first range, when turns are looked for backwards


@only_if(missing=ChatMemoryStore)
@application_scoped
class SqlChatMemoryStore(LogStore):
    """Stores conversations in tables, which it creates and migrates on first use.

        container.register(sql.engine, sql.SqlChatMemoryStore)  # TOOLBOX_SQL__URL=postgresql://…

    A call holds a lease of `lease` seconds on its conversation and renews it until it ends; other processes wait. A
    call whose lease was lost raises `MemoryLeaseLostError` and writes nothing. Conversations are deleted
    `expires_after` seconds after their last call, with all that belongs to them; None keeps them. With `migrate=False`
    the tables are only checked at start, and `toolbox migrate` creates them. As a bean, the store takes the options
    that it was not given from the settings, such as `TOOLBOX_SQL__MIGRATE=false`. Supports SQLite and PostgreSQL.

    Raises `TypeError`, `ValueError` or, for another database, `IllegalConfigurationError` for invalid arguments.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        lease: float = LEASE,
        expires_after: float | None = None,
        table: str = "toolbox_conversations",
        migrate: bool | None = None,
        settings: ToolboxSettings | None = None,
    ) -> None:
        if not isinstance(engine, AsyncEngine):
            raise TypeError(
                f"SqlChatMemoryStore needs an AsyncEngine, such as sql.engine creates; got {type(engine).__name__}"
            )
        if expires_after is not None and not (is_number(expires_after) and expires_after > 0):
            raise ValueError(f"invalid expires_after={expires_after!r}; use a number of seconds above 0, or None")
        if engine.dialect.name not in INSERT_OF:
            what = f"unsupported database {engine.dialect.name}"
            raise IllegalConfigurationError(
                [Problem("SqlChatMemoryStore", what, "use an engine for SQLite or PostgreSQL")]
            )
        given = SqlSettings() if settings is None else settings.sql
        self.clock = new_clock(engine.sync_engine)
        self._engine = engine
        tables = ConversationTables(table)
        self._heads, self._turns, self._held = tables.tables
        self.store_tables = StoreTables(engine, tables.schema(), migrates=given.migrate if migrate is None else migrate)
        self._lifetime = expires_after
        self._leases = Leases(self, lease)
        self._longest = round(2 * lease * 1000)
        self._separate = SeparateConnections(engine)
        self._purged_at = clock_of(self).monotonic()

    # --- reading

    async def read_since(self, key: ChatMemoryKey, first: Callable[[Head], int]) -> Log | None:
        async with self._open_transaction() as connection:
            if (head := await self._find(connection, key)) is None:
                return None
            return Log(head, await self._read_turns(connection, head, first(head)))

    async def read_newest(self, key: ChatMemoryKey, messages: int, before: str | None = None) -> Log | None:
        async with self._open_transaction() as connection:
            if (head := await self._find(connection, key)) is None:
                return None
            place = None if before is None else await self._place_of(connection, head, before)
            if (first := await self._find_newest(connection, head, messages, place)) is None:
                return Log(head)
            read = await self._read_turns(connection, head, first, None if place is None else place.turn)
            earlier = read if place is None else before_entry(read, place)
            return Log(head, tuple(each for each in earlier if each.shown))

    async def _find_newest(
        self, connection: AsyncConnection, head: Head, messages: int, place: Position | None
    ) -> int | None:
        """Return the number of the first turn to read for so many messages, before a place; None if there is none.

        Reads ranges of numbers. With a limit alone, PostgreSQL may read and sort the whole conversation, if that has
        grown since the server last counted the rows.
        """
        turns, shown, sizes = self._turns.c, self._shown(), list[tuple[int, int]]()
        # Of the turn of the place, what stands before it.
        size = shown if place is None else case((turns.number == place.turn, place.index - turns.first), else_=shown)
        newest = head.next_number - 1 if place is None else place.turn
        for first, last in backwards(newest, messages + 1):
            found = select(turns.number, size).where(turns.conversation == head.id, shown > 0)
            rows = await connection.execute(
                found.where(turns.number.between(first, last)).order_by(turns.number.desc())
            )
            sizes += [(row[0], row[1]) for row in rows]
            if sum(each for _, each in sizes) >= messages:
                break
        return choose_newest(sizes, messages)

    async def read_run(self, key: ChatMemoryKey, run_id: str) -> Turn | None:
        async with self._open_transaction() as connection:
            if (head := await self._find(connection, key)) is None:
                return None
            row = await self._find_turn_of_run(connection, head, run_id, self._turns)
            return None if row is None else _read_turn(row)

    async def find_heads(
        self,
        *,
        owner: Owner | None = None,
        services: Collection[str] | None = None,
        limit: int,
        before: tuple[datetime, str] | None = None,
    ) -> list[Head]:
        heads = self._heads.c
        found = self._select_heads(heads.shown).where(~self._is_expired())
        if owner is not None:
            found = found.where(heads.owner == owner.digest)
        if services is not None:
            found = found.where(heads.service.in_(sorted(services)))
        if before is not None:
            found = found.where(tuple_(heads.updated_at, heads.id) < tuple_(time_to_number(before[0]), before[1]))
        newest = found.order_by(heads.updated_at.desc(), heads.id.desc()).limit(limit)
        async with self._open_transaction() as connection:
            return [_read_head(row, None) for row in await connection.execute(newest)]

    async def _find(self, connection: AsyncConnection, key: ChatMemoryKey, *, to_write: bool = False) -> Head | None:
        """Return the head of a conversation that has not expired; `to_write` lets others wait until this is written."""
        heads = self._heads.c
        found = self._select_heads(heads.shown, heads.kept).where(self._lies_under(key), ~self._is_expired())
        rows = await connection.execute(found.with_for_update() if to_write else found)
        by_service = {row.service: row for row in rows}
        row = next((by_service[each.service] for each in key.places if each.service in by_service), None)
        return None if row is None else _read_head(row, row.kept)

    async def _read_turns(
        self, connection: AsyncConnection, head: Head, first: int, last: int | None = None
    ) -> tuple[Turn, ...]:
        turns = self._turns.c
        found = select(self._turns).where(turns.conversation == head.id, turns.number >= first, self._counts())
        if last is not None:
            found = found.where(turns.number <= last)
        return tuple(map(_read_turn, await connection.execute(found.order_by(turns.number))))

    async def _find_turn(self, connection: AsyncConnection, head: Head, entry: str) -> Turn | None:
        turn_id, _ = read_entry_id(entry)
        # By its id alone: for both conditions, PostgreSQL may look at the whole conversation, as in `_find_newest`.
        row = (await connection.execute(select(self._turns).where(self._turns.c.id == turn_id))).first()
        return None if row is None or row.conversation != head.id else _read_turn(row)

    async def _find_turn_of_run(
        self, connection: AsyncConnection, head: Head, run_id: str, *values: Any, but: str = ""
    ) -> Row[Any] | None:
        """Return the values of the turn of a run in a conversation, but for the turn with the id `but`."""
        turns = self._turns.c
        # By the run alone, as `_find_turn`. A copy of the conversation may have it too.
        found = select(turns.conversation.label("lies_in"), *values).where(turns.run_id == run_id, turns.id != but)
        rows: Any = await connection.execute(found)
        return next((each for each in rows if each.lies_in == head.id), None)

    async def _place_of(self, connection: AsyncConnection, head: Head, entry: str) -> Position:
        return place_of_entry(await self._find_turn(connection, head, entry), entry)

    # --- writing

    async def write(self, key: ChatMemoryKey, write: LogWrite) -> None:
        if write.leaves:
            self._leases.leave(key)
        async with self._open_transaction(writing=True) as connection:
            await self._check_lease(connection, key, leaves=write.leaves)
            head = await self._find(connection, key, to_write=True)
            if head is None:
                if write.turn is None:
                    return
                head = await self._begin(connection, begin_head(key, time_from_number(0), write.owner))
            replaced = Replaced()
            if write.turn is not None:
                if not await self._insert_turn(connection, head, write.turn):
                    return
                replaced = await self._delete_replaced(connection, head, write.turn)
                head = await self._move(connection, head, key.places[0])
            values: dict[str, Any] = self._values_of(head_after(head, write, head.updated_at, replaced))
            values["expires_at"] = self._expires_at()
            if write.turn is not None and write.turn.messages:
                values["updated_at"] = DatabaseNow(self.clock)
            await connection.execute(update(self._heads).where(self._heads.c.id == head.id).values(values))
            await self._purge_rows(connection)
        if write.leaves:
            self._leases.released(key)

    async def _begin(self, connection: AsyncConnection, head: Head) -> Head:
        """Insert a head, unless another process has just done it. An expired one in its place is deleted first."""
        await self._delete_heads(connection, head.key, only_expired=True)
        now = DatabaseNow(self.clock)
        values = {**self._values_of(head), "id": head.id, "created_at": now, "updated_at": now}
        same = [self._heads.c.service, self._heads.c.memory_id]
        row = INSERT_OF[self._engine.dialect.name](self._heads).values(values)
        await connection.execute(row.on_conflict_do_nothing(index_elements=same))
        found = await self._find(connection, head.key, to_write=True)
        assert found is not None
        return found

    async def _move(self, connection: AsyncConnection, head: Head, key: ChatMemoryKey) -> Head:
        """Let a head lie under the present name of its service, once it is written."""
        if head.key != key:
            await self._delete_heads(connection, key, only_expired=True)
        return replace(head, key=key)

    async def _insert_turn(self, connection: AsyncConnection, head: Head, turn: Turn) -> bool:
        """Insert a turn behind all others. Returns False if its id is there."""
        numbered = replace(turn, number=head.next_number)
        values = {**_values_of_turn(numbered, head.id), "at": DatabaseNow(self.clock)}
        row = INSERT_OF[self._engine.dialect.name](self._turns).values(values)
        return await self._changes_row(connection, row.on_conflict_do_nothing(index_elements=[self._turns.c.id]))

    async def _delete_replaced(self, connection: AsyncConnection, head: Head, turn: Turn) -> Replaced:
        """Delete what the run of a turn has stored before, and return what it was."""
        if turn.run_id is None:
            return Replaced()
        turns = self._turns.c
        found = turns.id, turns.first, turns.size, turns.hidden_from, turns.details, turns.beans
        row = await self._find_turn_of_run(connection, head, turn.run_id, *found, but=turn.id)
        if row is None:
            return Replaced()
        await connection.execute(delete(self._turns).where(turns.id == row.id))
        if (kept := with_beans_of(turn, beans_from_json(row.beans), head)) is not turn:
            beans = {"beans": beans_to_json(kept.beans)}
            await connection.execute(update(self._turns).where(turns.id == turn.id).values(beans))
        shown = row.size if row.hidden_from is None else row.hidden_from - row.first
        return Replaced(shown, turn_from_json(row.details).usage)

    async def change(self, key: ChatMemoryKey, change: Callable[[Head], Head]) -> Head | None:
        async with self._open_transaction(writing=True) as connection:
            if (head := await self._find(connection, key, to_write=True)) is None:
                return None
            return await self._write_head(connection, change(head))

    async def _write_head(self, connection: AsyncConnection, head: Head) -> Head:
        values = self._values_of(head)
        await connection.execute(update(self._heads).where(self._heads.c.id == head.id).values(values))
        return head

    async def rewind(self, key: ChatMemoryKey, entry: str) -> Head | None:
        turns = self._turns.c
        async with self._open_transaction(writing=True) as connection:
            await self._check_lease(connection, key)
            if (head := await self._find(connection, key, to_write=True)) is None:
                return None
            place = place_of_user_message(await self._find_turn(connection, head, entry), entry)
            following = and_(turns.conversation == head.id, turns.number >= place.turn)
            shown_before = await connection.scalar(select(func.sum(self._shown())).where(following))
            index = case((turns.number == place.turn, place.index), else_=turns.first)
            is_earlier = or_(turns.hidden_from.is_(None), turns.hidden_from > index)
            await connection.execute(update(self._turns).where(following, is_earlier).values(hidden_from=index))
            shown_after = await connection.scalar(select(func.sum(self._shown())).where(following))
            before = await self._read_state(connection, head, place)
            hidden = int(shown_before or 0) - int(shown_after or 0)
            return await self._write_head(connection, head_before(head, place, hidden, before))

    async def _read_state(self, connection: AsyncConnection, head: Head, place: Position) -> list[Turn]:
        """Return the beans, and who is in charge, of as many turns before a place as a rewind needs."""
        turns, read = self._turns.c, list[Turn]()
        has_state = or_(turns.beans.is_not(None), turns.details.contains('"in_charge"'))
        for first, last in backwards(place.turn - 1, _TURNS_AT_ONCE):
            if knows_state(head, read):
                break
            found = select(turns.details, turns.beans).where(turns.conversation == head.id, self._counts(), has_state)
            rows = await connection.execute(found.where(turns.number.between(first, last)).order_by(turns.number))
            read[:0] = [turn_from_json(row.details, beans=beans_from_json(row.beans)) for row in rows]
        return read

    async def create(self, key: ChatMemoryKey, log: Log) -> bool:
        async with self._open_transaction(writing=True) as connection:
            if await self._find(connection, key) is not None:
                return False
            head = log.head
            await self._delete_heads(connection, key, only_expired=True)
            times = {"created_at": time_to_number(head.created_at), "updated_at": time_to_number(head.updated_at)}
            values = {**self._values_of(head), **times, "id": head.id, "expires_at": self._expires_at()}
            same = [self._heads.c.service, self._heads.c.memory_id]
            row = INSERT_OF[self._engine.dialect.name](self._heads).values(values)
            if not await self._changes_row(connection, row.on_conflict_do_nothing(index_elements=same)):
                return False
            if log.turns:
                written = [_values_of_turn(each, head.id) for each in log.turns]
                await connection.execute(insert(self._turns), written)
            return True

    async def replace(self, key: ChatMemoryKey, turn: Turn) -> None:
        async with self._open_transaction(writing=True) as connection:
            await self._check_lease(connection, key)
            if (head := await self._find(connection, key, to_write=True)) is None:
                head = await self._begin(connection, begin_head(key, time_from_number(0)))
            await connection.execute(delete(self._turns).where(self._turns.c.conversation == head.id))
            await self._insert_turn(connection, head, turn)
            changed = head_after(emptied(head), LogWrite(turn=turn), head.updated_at)
            values: dict[str, Any] = self._values_of(changed)
            values |= {"expires_at": self._expires_at(), "updated_at": DatabaseNow(self.clock)}
            await connection.execute(update(self._heads).where(self._heads.c.id == head.id).values(values))

    async def delete(self, key: ChatMemoryKey) -> Deleted:
        async with self._open_transaction(writing=True) as connection:
            await self._check_lease(connection, key)
            return await self._delete_heads(connection, key)

    async def _delete_heads(
        self, connection: AsyncConnection, key: ChatMemoryKey, *, only_expired: bool = False
    ) -> Deleted:
        """Delete what lies under a key with its turns. What has expired is deleted too, but does not count."""
        heads = self._heads.c
        chosen = and_(self._lies_under(key), self._is_expired()) if only_expired else self._lies_under(key)
        gone = delete(self._heads).where(chosen)
        rows = (await connection.execute(gone.returning(heads.id, heads.kept, heads.entries, heads.expires_at))).all()
        if not rows:
            return Deleted()
        ids = [row.id for row in rows]
        await connection.execute(delete(self._turns).where(self._turns.c.conversation.in_(ids)))
        return Deleted(len(rows), sum(row.entries for row in rows), sum(len(beans_from_json(row.kept)) for row in rows))

    async def _purge_rows(self, connection: AsyncConnection) -> None:
        """Delete expired conversations and leases, at most once a minute."""
        now = clock_of(self).monotonic()
        if now - self._purged_at < _BETWEEN_PURGES:
            return
        self._purged_at = now
        heads, held = self._heads.c, self._held.c
        same = and_(held.service == heads.service, held.memory_id == heads.memory_id)
        is_held = select(held.token).where(same, ~self._is_free()).exists()
        gone = delete(self._heads).where(self._is_expired(), ~is_held).returning(heads.id)
        if ids := list((await connection.execute(gone)).scalars()):
            await connection.execute(delete(self._turns).where(self._turns.c.conversation.in_(ids)))
        await connection.execute(delete(self._held).where(self._is_free()))

    # --- one caller at a time

    @asynccontextmanager
    async def lock(self, key: ChatMemoryKey, *, wait: bool = True) -> AsyncIterator[None]:
        """Lock the conversation for one call at a time, across all processes that use the tables."""
        async with self._separate.opened(), self._leases.lock(key, wait=wait):
            yield

    async def holder(self, key: ChatMemoryKey) -> str | None:
        async with self._open_transaction() as connection:
            token: str | None = await connection.scalar(
                select(self._held.c.token).where(self._is_lease_of(key), ~self._is_free())
            )
            return token

    async def ask_to_stop(self, key: ChatMemoryKey, by: str | None) -> bool:
        asking = update(self._held).where(self._is_lease_of(key), ~self._is_free()).values(wish=json.dumps(by))
        async with self._open_transaction(writing=True) as connection:
            return await self._changes_row(connection, asking)

    async def wishes(self) -> Mapping[ChatMemoryKey, str | None]:
        if not (tokens := self._leases.tokens):
            return {}
        # As renewals do: the tools of these calls can take all connections of the engine.
        async with self._open_transaction(engine=self._separate.engine) as connection:
            # Few conversations are held at a time, so the table is small.
            rows = (await connection.execute(select(self._held).where(self._held.c.wish.is_not(None)))).all()
        found = ((ChatMemoryKey(row.service, row.memory_id), row) for row in rows)
        return {key: json.loads(row.wish) for key, row in found if tokens.get(key) == row.token}

    async def take(self, key: ChatMemoryKey, token: str, seconds: float) -> bool:
        """Take the lease for `seconds` if it is free. Returns True if `token` has it now."""
        taken = {"token": token, "until": self._end_after(seconds), "wish": None}
        row = INSERT_OF[self._engine.dialect.name](self._held).values(
            service=key.service, memory_id=key.memory_id, **taken
        )
        same = [self._held.c.service, self._held.c.memory_id]
        taking = row.on_conflict_do_update(index_elements=same, set_=taken, where=self._is_free())
        async with self._open_transaction(writing=True) as connection:
            return await self._changes_row(connection, taking)

    async def renew(self, key: ChatMemoryKey, token: str, seconds: float) -> bool:
        """Extend the lease to `seconds` from now. Returns False if `token` has lost it."""
        renewing = update(self._held).where(self._is_lease_of(key, token)).values(until=self._end_after(seconds))
        async with self._open_transaction(writing=True, engine=self._separate.engine) as connection:
            return await self._changes_row(connection, renewing)

    async def give_back(self, key: ChatMemoryKey, token: str) -> None:
        """Release the lease if `token` has it."""
        async with self._open_transaction(writing=True) as connection:
            await connection.execute(delete(self._held).where(self._is_lease_of(key, token)))

    async def renew_leases(self) -> None:
        """Renew all leases of this process outside of their turn: for tests, which have moved the clock."""
        await self._leases.renew_all()

    async def _check_lease(self, connection: AsyncConnection, key: ChatMemoryKey, *, leaves: bool = False) -> None:
        """Raise `MemoryLeaseLostError` if this process held the conversation and has lost it, even in this moment.

        With `leaves`, the lease is released if the transaction is committed.

        A lease that is overdue counts until another process takes it: a long write in SQLite blocks all other writers,
        also renewals, and must not cost its own process the lease.
        """
        if (token := self._leases.token(key)) is None:
            return
        # The row is locked until the transaction ends, so that nobody takes the lease before.
        own = self._is_lease_of(key, token)
        locking = delete(self._held).where(own) if leaves else update(self._held).where(own).values(token=token)
        if not await self._changes_row(connection, locking):
            raise MemoryLeaseLostError(key.service, key.memory_id)

    # --- start and end

    async def open_at_start(self) -> None:
        """Check the engine, and with `migrate=False` the tables. Raises `IllegalConfigurationError`.

        Otherwise the first call migrates the tables, so that a program starts while its database is not reachable.
        """
        self.store_tables.check_engine()
        if not self.store_tables.migrates:
            await self.store_tables.prepare()

    async def stop(self) -> None:
        """Release all leases that are still held."""
        await self._leases.stop()

    async def ready(self) -> bool:
        """Return True if the tables can be read; raise the database's error otherwise. For readiness checks."""
        async with self._open_transaction() as connection:
            await connection.execute(select(self._heads.c.service).limit(1))
        return True

    # --- conditions and values

    def _lies_under(self, key: ChatMemoryKey) -> ColumnElement[bool]:
        heads = self._heads.c
        return and_(heads.memory_id == key.memory_id, heads.service.in_([each.service for each in key.places]))

    def _is_lease_of(self, key: ChatMemoryKey, token: str | None = None) -> ColumnElement[bool]:
        held = self._held.c
        mine = and_(held.service == key.service, held.memory_id == key.memory_id)
        return mine if token is None else and_(mine, held.token == token)

    def _is_free(self) -> ColumnElement[bool]:
        return has_ended(self._held.c.until, self._longest, self.clock)

    def _is_expired(self) -> ColumnElement[bool]:
        # Never null: SQL cannot negate null.
        expires_at = self._heads.c.expires_at
        return and_(expires_at.is_not(None), expires_at <= DatabaseNow(self.clock))

    def _shown(self) -> ColumnElement[int]:
        """Return how many messages of a turn are not hidden; see `Turn.shown`."""
        turns = self._turns.c
        return case((turns.hidden_from.is_(None), turns.size), else_=turns.hidden_from - turns.first)

    def _counts(self) -> ColumnElement[bool]:
        """Return if a turn is not hidden as a whole; see `Turn.counts`."""
        turns = self._turns.c
        return or_(self._shown() > 0, and_(turns.size == 0, turns.hidden_from.is_(None)))

    def _end_after(self, seconds: float) -> ColumnElement[int]:
        return DatabaseNow(self.clock) + round(seconds * 1000)

    def _expires_at(self) -> ColumnElement[int] | None:
        return None if self._lifetime is None else self._end_after(self._lifetime)

    def _select_heads(self, *documents: Any) -> Any:
        heads = self._heads.c
        counts = heads.created_at, heads.updated_at, heads.entries, heads.next_number
        return select(heads.service, heads.memory_id, heads.id, *counts, *documents)

    def _values_of(self, head: Head) -> dict[str, Any]:
        """Return the values of a head but for its id and its times."""
        shown, kept = head_to_json(head)
        return {
            "service": head.key.service,
            "memory_id": head.key.memory_id,
            "owner": None if head.owner is None else head.owner.digest,
            "shown": shown,
            "kept": kept,
            "entries": head.messages,
            "next_number": head.next_number,
        }

    async def _changes_row(self, connection: AsyncConnection, statement: Any) -> bool:
        done = await connection.execute(statement, execution_options={"preserve_rowcount": True})
        return bool(done.rowcount)

    # --- connections

    @asynccontextmanager
    async def _open_transaction(
        self, *, writing: bool = False, engine: AsyncEngine | None = None
    ) -> AsyncIterator[AsyncConnection]:
        """Open a connection in a transaction that ends with the block, or join the one that is open."""
        await self.store_tables.prepare()
        if engine is None and (joined := joined_connection(self._engine)) is not None:
            yield joined
            return
        async with (engine or self._engine).connect() as connection:
            if writing:
                await connection.execution_options(**FOR_WRITING)
            async with connection.begin():
                yield connection


def _read_head(row: Row[Any], kept: str | None) -> Head:
    return head_from_json(
        row.shown,
        kept,
        key=ChatMemoryKey(row.service, row.memory_id),
        id=row.id,
        created_at=time_from_number(row.created_at),
        updated_at=time_from_number(row.updated_at),
        messages=row.entries,
        next_number=row.next_number,
    )


def _read_turn(row: Row[Any]) -> Turn:
    return turn_from_json(
        row.details,
        id=row.id,
        messages=messages_from_json(row.messages),
        run_id=row.run_id,
        beans=beans_from_json(row.beans),
        at=time_from_number(row.at),
        number=row.number,
        start=row.first,
        hidden_from=row.hidden_from,
    )


def _values_of_turn(turn: Turn, conversation: str) -> dict[str, Any]:
    return {
        "id": turn.id,
        "conversation": conversation,
        "number": turn.number,
        "run_id": turn.run_id,
        "first": turn.start,
        "size": len(turn.messages),
        "hidden_from": turn.hidden_from,
        "at": None if turn.at is None else time_to_number(turn.at),
        "messages": messages_to_json(turn.messages),
        "details": turn_to_json(turn),
        "beans": beans_to_json(turn.beans),
    }
