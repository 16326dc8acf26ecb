"""Stores conversations in SQLite or PostgreSQL: one row each, with the lease of the current call; migrates its table.

Each step is one short transaction: none is open while a model or a tool runs. Not here: holding leases
(`toolbox.services.conversation_leases`), the JSON of messages (`toolbox.transcripts`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Index,
    MetaData,
    Table,
    Text,
    Update,
    and_,
    delete,
    func,
    or_,
    select,
    update,
)
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.sql.elements import ColumnElement

from ..chat import Message
from ..di.conditions import only_if
from ..di.decorators import application_scoped
from ..errors import IllegalConfigurationError, MemoryLeaseLostError, Problem
from ..introspection import is_number
from ..services.conversation_leases import LEASE, Leases
from ..services.memory import ChatMemoryKey, ChatMemoryStore
from ..settings import SqlSettings, ToolboxSettings
from ..store_clock import clock_of
from ..transcripts import messages_from_json, messages_to_json
from .dialects import INSERT_OF, DatabaseNow, has_ended, new_clock
from .engines import FOR_WRITING, SeparateConnections
from .migrations import Schema, Step, StoreTables

_BETWEEN_PURGES = 60.0  # seconds


def first_conversations_table(name: str) -> Table:
    """Return the table of version 1: one row per conversation. Frozen: change `conversations_table` instead.

    `messages` is JSON or null. Times are in milliseconds as in `DatabaseNow`; null means never.
    """
    return Table(
        name,
        MetaData(),
        Column("service", Text, primary_key=True),
        Column("memory_id", Text, primary_key=True),
        Column("messages", Text),
        Column("expires_at", BigInteger),
        Column("lease_token", Text),
        Column("lease_until", BigInteger),
        Index(f"{name}_expires_at", "expires_at"),
    )


def conversations_table(name: str) -> Table:
    """Return today's table: that of version 1, which `conversation_steps` create."""
    return first_conversations_table(name)


def conversation_steps(name: str) -> tuple[Step, ...]:
    """Return the migration steps of the table. A change of the table adds one; see `migrations`."""

    def create_table(connection: Connection) -> None:
        first_conversations_table(name).create(connection, checkfirst=False)

    return (create_table,)


@only_if(missing=ChatMemoryStore)
@application_scoped
class SqlChatMemoryStore(ChatMemoryStore):
    """Stores conversations in a table, which it creates and migrates on first use.

        container.register(sql.engine, sql.SqlChatMemoryStore)  # TOOLBOX_SQL__URL=postgresql://…

    A call holds a lease of `lease` seconds on its conversation and renews it until it ends; other processes wait. A
    call whose lease was lost raises `MemoryLeaseLostError` and writes nothing. Conversations are deleted
    `expires_after` seconds after their last call; None keeps them. With `migrate=False` the table is only checked at
    start, and `toolbox migrate` creates it. As a bean, the store takes the options that it was not given from the
    settings, such as `TOOLBOX_SQL__MIGRATE=false`. Supports SQLite and PostgreSQL.

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
        self._table = conversations_table(table)
        self.store_tables = StoreTables(
            engine,
            Schema(table, conversation_steps(table), (self._table,)),
            migrates=given.migrate if migrate is None else migrate,
        )
        self._lifetime = expires_after
        self._leases = Leases(self, lease)
        self._longest = round(2 * lease * 1000)
        self._separate = SeparateConnections(engine)
        self._purged_at = clock_of(self).monotonic()

    # --- ChatMemoryStore

    async def get_messages(self, key: ChatMemoryKey) -> Sequence[Message]:
        async with self._open_transaction() as connection:
            reading = select(self._table.c.messages).where(self._matches_key(key), ~self._is_expired())
            text = await connection.scalar(reading)
        return messages_from_json(text) if text is not None else ()

    async def update_messages(self, key: ChatMemoryKey, messages: Sequence[Message]) -> None:
        """Replace the stored messages. Raises `MemoryLeaseLostError` if another process has the conversation."""
        await self._write_messages(key, messages_to_json(messages))

    async def delete_messages(self, key: ChatMemoryKey) -> None:
        """Delete the conversation. Raises `MemoryLeaseLostError` if another process has it."""
        await self._write_messages(key, None)

    @asynccontextmanager
    async def lock(self, key: ChatMemoryKey) -> AsyncIterator[None]:
        """Lock the conversation for one call at a time, across all processes that use the table."""
        async with self._separate.opened(), self._leases.lock(key):
            yield

    async def open_at_start(self) -> None:
        """Check the engine, and with `migrate=False` the table. Raises `IllegalConfigurationError`.

        Otherwise the first call migrates the table, so that a program starts while its database is not reachable.
        """
        self.store_tables.check_engine()
        if not self.store_tables.migrates:
            await self.store_tables.prepare()

    async def stop(self) -> None:
        """Release all leases that are still held."""
        await self._leases.stop()

    async def ready(self) -> bool:
        """Return True if the table can be read; raise the database's error otherwise. For readiness checks."""
        async with self._open_transaction() as connection:
            await connection.execute(select(self._table.c.service).limit(1))
        return True

    # --- reading and writing

    async def _write_messages(self, key: ChatMemoryKey, text: str | None) -> None:
        expires = None if self._lifetime is None else self._end_after(self._lifetime)
        values = {"messages": text, "expires_at": expires if text is not None else None}
        token = self._leases.token(key)
        async with self._open_transaction(writing=True) as connection:
            if token is None:
                await connection.execute(self._upsert(key, values))
            elif not await self._changes_row(connection, self._update(key, token).values(values)):
                raise MemoryLeaseLostError(key.service, key.memory_id)
            await self._purge_rows(connection)

    async def _purge_rows(self, connection: AsyncConnection) -> None:
        """Delete expired and empty rows, at most once a minute."""
        now = clock_of(self).monotonic()
        if now - self._purged_at < _BETWEEN_PURGES:
            return
        self._purged_at = now
        columns = self._table.c
        await connection.execute(
            delete(self._table).where(or_(columns.messages.is_(None), self._is_expired()), self._is_free())
        )

    # --- leases

    async def take(self, key: ChatMemoryKey, token: str, seconds: float) -> bool:
        """Take the lease for `seconds` if it is free. Returns True if `token` has it now."""
        taken = {"lease_token": token, "lease_until": self._end_after(seconds)}
        async with self._open_transaction(writing=True) as connection:
            return await self._changes_row(connection, self._upsert(key, taken, where=self._is_free()))

    async def renew(self, key: ChatMemoryKey, token: str, seconds: float) -> bool:
        """Extend the lease to `seconds` from now. Returns False if `token` has lost it."""
        async with self._open_transaction(writing=True, engine=self._separate.engine) as connection:
            return await self._changes_row(
                connection, self._update(key, token).values(lease_until=self._end_after(seconds))
            )

    async def give_back(self, key: ChatMemoryKey, token: str) -> None:
        """Release the lease if `token` has it."""
        columns = self._table.c
        giving_back = self._update(key, token).values(lease_token=None, lease_until=None)
        # Null without messages. SQLite 3.40 returns a wrong value for `messages IS NULL` here.
        giving_back = giving_back.returning(func.substr(columns.messages, 1, 1))
        async with self._open_transaction(writing=True) as connection:
            given_back = (await connection.execute(giving_back)).first()
            if given_back is not None and given_back[0] is None:
                # Not if another call has taken it since, which it can where each statement is a transaction.
                empty = and_(columns.messages.is_(None), columns.lease_token.is_(None))
                await connection.execute(delete(self._table).where(self._matches_key(key), empty))

    async def renew_leases(self) -> None:
        """Renew all leases of this process outside of their turn: for tests, which have moved the clock."""
        await self._leases.renew_all()

    # --- statements

    def _matches_key(self, key: ChatMemoryKey) -> ColumnElement[bool]:
        return and_(self._table.c.service == key.service, self._table.c.memory_id == key.memory_id)

    def _is_free(self) -> ColumnElement[bool]:
        until = self._table.c.lease_until
        return or_(until.is_(None), has_ended(until, self._longest, self.clock))

    def _is_expired(self) -> ColumnElement[bool]:
        # Never null: SQL cannot negate null.
        columns = self._table.c
        return and_(columns.expires_at.is_not(None), columns.expires_at <= DatabaseNow(self.clock))

    def _end_after(self, seconds: float) -> ColumnElement[int]:
        return DatabaseNow(self.clock) + round(seconds * 1000)

    def _update(self, key: ChatMemoryKey, token: str) -> Update:
        """Return an update that applies while `token` has the lease, even an overdue one.

        A long write in SQLite blocks all other writers, also renewals: it must not cost its own process the lease.
        """
        return update(self._table).where(self._matches_key(key), self._table.c.lease_token == token)

    def _upsert(self, key: ChatMemoryKey, values: dict[str, Any], where: ColumnElement[bool] | None = None) -> Any:
        """Return a statement that inserts the row of the conversation, or updates it if `where` holds."""
        row = INSERT_OF[self._engine.dialect.name](self._table).values(
            service=key.service, memory_id=key.memory_id, **values
        )
        same = [self._table.c.service, self._table.c.memory_id]
        return row.on_conflict_do_update(index_elements=same, set_=values, where=where)

    async def _changes_row(self, connection: AsyncConnection, statement: Any) -> bool:
        done = await connection.execute(statement, execution_options={"preserve_rowcount": True})
        return bool(done.rowcount)

    # --- connections

    @asynccontextmanager
    async def _open_transaction(
        self, *, writing: bool = False, engine: AsyncEngine | None = None
    ) -> AsyncIterator[AsyncConnection]:
        """Open a connection in a transaction that ends with the block."""
        await self.store_tables.prepare()
        async with (engine or self._engine).connect() as connection:
            if writing:
                await connection.execution_options(**FOR_WRITING)
            async with connection.begin():
                yield connection
