"""Conversations in a table of SQLite or PostgreSQL: one row each, with who has it at the moment.

Each step is one short transaction of its own: none is open while a model or a tool works. Not here: how a lease is
held (`toolbox.services.leases`), the messages' JSON (`toolbox.transcripts`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from time import monotonic
from typing import Any, TypeAlias

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    and_,
    delete,
    insert,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.elements import ColumnElement
from sqlalchemy.sql.functions import FunctionElement

from ..chat import Message
from ..di.marks import application_scoped
from ..errors import IllegalConfigurationError, MemoryLeaseLostError, Problem
from ..services.leases import LEASE, Leases
from ..services.memory import ChatMemoryKey, ChatMemoryStore
from ..transcripts import messages_from_json, messages_to_json
from .engines import FOR_WRITING

_INSERT: dict[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}
_BETWEEN_PURGES = 60.0  # seconds
Step: TypeAlias = Callable[[Connection], None]
"""Brings a schema from one version to the next, in the transaction of the connection."""

VERSIONS = Table(
    "toolbox_schemas", MetaData(), Column("name", Text, primary_key=True), Column("version", Integer, nullable=False)
)

_LOCK = 0x746F6F6C626F78  # of PostgreSQL's advisory locks, "toolbox"


class _Now(FunctionElement[int]):
    """Milliseconds since 1970 by the database's clock, the one that all processes share."""

    type = BigInteger()
    inherit_cache = True


@compiles(_Now, "sqlite")
def _now_sqlite(element: _Now, compiler: Any, **options: Any) -> str:
    return "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"


@compiles(_Now, "postgresql")
def _now_postgresql(element: _Now, compiler: Any, **options: Any) -> str:
    return "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)"


def conversations_table(name: str) -> Table:
    """One row per conversation. `messages`: JSON, null when there are none. Times: see `_Now`, null for never."""
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


def steps_of(table: Table) -> tuple[Step, ...]:
    """How the table has come to be what it is; a new form of it is a further step."""

    def create(connection: Connection) -> None:
        table.create(connection, checkfirst=False)

    return (create,)


# --- tables


async def migrate(engine: AsyncEngine, name: str, steps: Sequence[Step]) -> None:
    """Takes those of `steps` that the database has not taken yet; processes that come at once wait for each other.

    Raises `IllegalConfigurationError` when the database has taken more steps than there are.
    """
    async with engine.connect() as connection:
        await connection.execution_options(**FOR_WRITING)
        async with connection.begin():
            await connection.run_sync(_migrate, name, steps)


def _migrate(connection: Connection, name: str, steps: Sequence[Step]) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK})"))
    VERSIONS.create(connection, checkfirst=True)
    version = connection.scalar(select(VERSIONS.c.version).where(VERSIONS.c.name == name))
    if version is None:
        connection.execute(insert(VERSIONS).values(name=name, version=0))
        version = 0
    if version > len(steps):
        what = f"the database has version {version} of it, this release knows {len(steps)}"
        raise IllegalConfigurationError([Problem(f"the tables of {name}", what, "use the newer release of toolbox-di")])
    for step in steps[version:]:
        step(connection)
    connection.execute(update(VERSIONS).where(VERSIONS.c.name == name).values(version=len(steps)))


# --- the store


@application_scoped
class SqlChatMemoryStore(ChatMemoryStore):
    """Keeps conversations in a table, which it creates and brings up to date when it is first used.

    A call holds a lease of `lease` seconds on its conversation, renewed while it lasts; no other process gets past it.
    If it could not be renewed in time, the call ends with `MemoryLeaseLostError` instead of writing. A conversation is
    forgotten `expires_after` seconds after its last call; None: never.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        lease: float = LEASE,
        expires_after: float | None = None,
        table: str = "toolbox_conversations",
    ) -> None:
        if not isinstance(engine, AsyncEngine):
            raise TypeError(
                f"SqlChatMemoryStore takes an AsyncEngine, as sql.engine makes, not a {type(engine).__name__}"
            )
        if expires_after is not None and not expires_after > 0:
            raise ValueError(f"expires_after={expires_after}; use a number of seconds above 0, or None")
        if engine.dialect.name not in _INSERT:
            what = f"it is for SQLite and PostgreSQL, the engine's database is {engine.dialect.name}"
            raise IllegalConfigurationError(
                [Problem("SqlChatMemoryStore", what, "give it an engine of one of the two")]
            )
        self._engine = engine
        self._table = conversations_table(table)
        self._lifetime = expires_after
        self._leases = Leases(self, lease)
        self._prepared = False
        self._preparing = asyncio.Lock()
        self._purged_at = monotonic()

    # --- ChatMemoryStore

    async def get_messages(self, key: ChatMemoryKey) -> Sequence[Message]:
        """See `ChatMemoryStore`."""
        found = select(self._table.c.messages).where(self._is(key), ~self._expired())
        async with self._connection() as connection:
            text = await connection.scalar(found)
        return messages_from_json(text) if text is not None else ()

    async def update_messages(self, key: ChatMemoryKey, messages: Sequence[Message]) -> None:
        """See `ChatMemoryStore`. Raises `MemoryLeaseLostError` when this process has lost the conversation."""
        await self._write(key, messages_to_json(messages))

    async def delete_messages(self, key: ChatMemoryKey) -> None:
        """See `ChatMemoryStore`. Raises as `update_messages` does."""
        await self._write(key, None)

    def lock(self, key: ChatMemoryKey) -> AbstractAsyncContextManager[None]:
        """Lets one caller at a time into the conversation, over all processes that use the table."""
        return self._leases.lock(key)

    async def stop(self) -> None:
        """Gives back what is still held."""
        await self._leases.stop()

    # --- reading and writing

    async def _write(self, key: ChatMemoryKey, text: str | None) -> None:
        expires = None if self._lifetime is None else _Now() + round(self._lifetime * 1000)
        values = {"messages": text, "expires_at": expires if text is not None else None}
        token = self._leases.token(key)
        async with self._connection(writing=True) as connection:
            if token is None:
                await connection.execute(self._upsert(key, values))
            elif not await self._changes(connection, self._updated(key, token).values(values)):
                raise MemoryLeaseLostError(key.service, key.memory_id)
            await self._purge(connection)

    async def _purge(self, connection: AsyncConnection) -> None:
        """Removes, from time to time, the rows that mean nothing any more."""
        if monotonic() - self._purged_at < _BETWEEN_PURGES:
            return
        self._purged_at = monotonic()
        columns = self._table.c
        await connection.execute(
            delete(self._table).where(or_(columns.messages.is_(None), self._expired()), self._free())
        )

    # --- leases

    async def take(self, key: ChatMemoryKey, token: str, seconds: float) -> bool:
        """See `LeaseKeeper`."""
        taken = self._upsert(key, {"lease_token": token, "lease_until": self._in(seconds)}, where=self._free())
        async with self._connection(writing=True) as connection:
            return await self._changes(connection, taken)

    async def renew(self, key: ChatMemoryKey, token: str, seconds: float) -> bool:
        """See `LeaseKeeper`."""
        async with self._connection(writing=True) as connection:
            return await self._changes(connection, self._updated(key, token).values(lease_until=self._in(seconds)))

    async def give_back(self, key: ChatMemoryKey, token: str) -> None:
        """See `LeaseKeeper`."""
        mine = and_(self._is(key), self._table.c.lease_token == token)
        async with self._connection(writing=True) as connection:
            await connection.execute(delete(self._table).where(mine, self._table.c.messages.is_(None)))
            await connection.execute(update(self._table).where(mine).values(lease_token=None, lease_until=None))

    # --- statements

    def _is(self, key: ChatMemoryKey) -> ColumnElement[bool]:
        return and_(self._table.c.service == key.service, self._table.c.memory_id == key.memory_id)

    def _free(self) -> ColumnElement[bool]:
        return or_(self._table.c.lease_until.is_(None), self._table.c.lease_until <= _Now())

    def _expired(self) -> ColumnElement[bool]:
        # Not null, so that it can be negated.
        columns = self._table.c
        return and_(columns.expires_at.is_not(None), columns.expires_at <= _Now())

    def _in(self, seconds: float) -> ColumnElement[int]:
        return _Now() + round(seconds * 1000)

    def _updated(self, key: ChatMemoryKey, token: str) -> Any:
        """Changes the conversation as long as nobody has taken it from `token`, which may be late as long as that."""
        # So a long write in SQLite, which keeps everybody from writing, does not make its own process lose its lease.
        return update(self._table).where(self._is(key), self._table.c.lease_token == token)

    def _upsert(self, key: ChatMemoryKey, values: dict[str, Any], where: ColumnElement[bool] | None = None) -> Any:
        """Makes the conversation's row, or changes it `where` it may be changed."""
        row = _INSERT[self._engine.dialect.name](self._table).values(
            service=key.service, memory_id=key.memory_id, **values
        )
        same = [self._table.c.service, self._table.c.memory_id]
        return row.on_conflict_do_update(index_elements=same, set_=values, where=where)

    async def _changes(self, connection: AsyncConnection, statement: Any) -> bool:
        done = await connection.execute(statement, execution_options={"preserve_rowcount": True})
        return bool(done.rowcount)

    # --- connections

    @asynccontextmanager
    async def _connection(self, *, writing: bool = False) -> AsyncIterator[AsyncConnection]:
        """A connection in a transaction that ends with the block."""
        await self._prepare()
        async with self._engine.connect() as connection:
            if writing:
                await connection.execution_options(**FOR_WRITING)
            async with connection.begin():
                yield connection

    async def _prepare(self) -> None:
        if self._prepared:
            return
        async with self._preparing:
            if not self._prepared:
                try:
                    await migrate(self._engine, self._table.name, steps_of(self._table))
                except (OSError, DBAPIError) as error:
                    error.add_note(f"while conversations are looked for in {self._engine.url!r}")
                    raise
                self._prepared = True
