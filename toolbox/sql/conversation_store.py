"""Stores conversations in SQLite or PostgreSQL: one row each, with the lease of the current call; migrates its table.

Each step is one short transaction: none is open while a model or a tool runs. Not here: holding leases
(`toolbox.services.memory`), the JSON of messages (`toolbox.transcripts`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
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
    bindparam,
    delete,
    func,
    insert,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.elements import ColumnElement
from sqlalchemy.sql.functions import FunctionElement

from ..chat import Message
from ..di.decorators import application_scoped
from ..errors import IllegalConfigurationError, MemoryLeaseLostError, Problem
from ..services.memory import LEASE, ChatMemoryKey, ChatMemoryStore, Leases
from ..transcripts import messages_from_json, messages_to_json
from .engines import FOR_WRITING, SeparateConnections, prepare_to_write

INSERT_OF: dict[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}
_BETWEEN_PURGES = 60.0  # seconds
Step: TypeAlias = Callable[[Connection], None]
"""Migrates a schema from one version to the next, in the transaction of the connection."""

VERSIONS = Table(
    "toolbox_schemas", MetaData(), Column("name", Text, primary_key=True), Column("version", Integer, nullable=False)
)

_LOCK = 0x746F6F6C626F78  # key of a PostgreSQL advisory lock: "toolbox" in ASCII


class DatabaseNow(FunctionElement[int]):
    """Milliseconds since 1970 by the clock of the database, which all processes share."""

    type = BigInteger()
    inherit_cache = True


@compiles(DatabaseNow, "sqlite")
def _now_sqlite(element: DatabaseNow, compiler: Any, **options: Any) -> str:
    return "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"


@compiles(DatabaseNow, "postgresql")
def _now_postgresql(element: DatabaseNow, compiler: Any, **options: Any) -> str:
    return "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)"


def has_ended(until: Column[int], longest: int, dialect: str) -> ColumnElement[bool]:
    """Return the condition that a lease has ended. `longest` milliseconds from now are more than any lease lasts.

    The clock of SQLite is that of the process: one that was wrong must not keep its lease until that time comes.
    """
    ended = until <= DatabaseNow()
    return or_(ended, until > DatabaseNow() + longest) if dialect == "sqlite" else ended


def conversations_table(name: str) -> Table:
    """Return the table: one row per conversation.

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


def steps_of(table: Table) -> tuple[Step, ...]:
    """Return the migration steps of the table. A new version of the table adds a step."""

    def create(connection: Connection) -> None:
        table.create(connection, checkfirst=False)

    return (create,)


# --- tables


async def migrate(engine: AsyncEngine, name: str, steps: Sequence[Step]) -> None:
    """Apply the migration steps that the database does not have yet; concurrent processes wait for each other.

    A database that has them all is only read, so that no start waits for another program's writing. Raises
    `IllegalConfigurationError` if the database has a newer version than this release supports.
    """
    async with engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            # At other levels a transaction that has waited for the lock does not see what the others have created.
            await connection.execution_options(isolation_level="READ COMMITTED")
        async with connection.begin():
            if await connection.run_sync(_version, name) == len(steps):
                return
        await connection.execution_options(**FOR_WRITING)
        async with connection.begin():
            await connection.run_sync(_migrate, name, steps)


def _migrate(connection: Connection, name: str, steps: Sequence[Step]) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK})"))
    else:
        with suppress(OperationalError):  # `open_engine` has begun as a writer; other engines have not
            connection.exec_driver_sql("BEGIN IMMEDIATE")
    version = _version(connection, name)
    if version is None:
        VERSIONS.create(connection, checkfirst=True)
        connection.execute(insert(VERSIONS).values(name=name, version=0))
        version = 0
    if version > len(steps):
        what = f"the database has version {version}, but this release supports versions up to {len(steps)}"
        raise IllegalConfigurationError(
            [Problem(f"the tables of {name}", what, "install a newer release of toolbox-di")]
        )
    if version == len(steps):
        return
    for step in steps[version:]:
        step(connection)
    connection.execute(update(VERSIONS).where(VERSIONS.c.name == name).values(version=len(steps)))


def _version(connection: Connection, name: str) -> int | None:
    """Return how many steps have been applied, or None if the database has no versions or none of this name."""
    schema = connection.schema_for_object(VERSIONS)
    if not connection.dialect.has_table(connection, VERSIONS.name, schema=schema):
        return None
    return connection.scalar(select(VERSIONS.c.version).where(VERSIONS.c.name == name))


# --- the store


def _named(key: ChatMemoryKey, token: str | None = None, seconds: float | None = None) -> dict[str, Any]:
    """Return the values of a statement: of a conversation, its lease, and how long the lease lasts from now."""
    named: dict[str, Any] = {"its_service": key.service, "its_memory_id": key.memory_id}
    if token is not None:
        named["its_token"] = token
    if seconds is not None:
        named["milliseconds"] = round(seconds * 1000)
    return named


@application_scoped
class SqlChatMemoryStore(ChatMemoryStore):
    """Stores conversations in a table, which it creates and migrates on first use.

        container.register(sql.engine, sql.SqlChatMemoryStore)  # TOOLBOX_SQL__URL=postgresql://…

    A call holds a lease of `lease` seconds on its conversation and renews it until it ends; other processes wait. A
    call whose lease was lost raises `MemoryLeaseLostError` and writes nothing. Conversations are deleted
    `expires_after` seconds after their last call; None keeps them.
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
                f"SqlChatMemoryStore needs an AsyncEngine, such as sql.engine creates; got {type(engine).__name__}"
            )
        if expires_after is not None and not expires_after > 0:
            raise ValueError(f"expires_after={expires_after}; use a number of seconds above 0, or None")
        if engine.dialect.name not in INSERT_OF:
            what = f"unsupported database {engine.dialect.name}"
            raise IllegalConfigurationError(
                [Problem("SqlChatMemoryStore", what, "use an engine for SQLite or PostgreSQL")]
            )
        prepare_to_write(engine.sync_engine)
        self._engine = engine
        self._table = conversations_table(table)
        self._lifetime = expires_after
        self._leases = Leases(self, lease)
        self._longest = round(2 * lease * 1000)
        self._separate = SeparateConnections(engine)
        self._prepared = False
        self._preparing = asyncio.Lock()
        self._purged_at = monotonic()

        # The statements of each call, built once; `_named` gives them their values.
        columns, token = self._table.c, bindparam("its_token", type_=Text())
        until = DatabaseNow() + bindparam("milliseconds", type_=BigInteger())
        self._is = and_(columns.service == bindparam("its_service"), columns.memory_id == bindparam("its_memory_id"))
        self._reading = select(columns.messages).where(self._is, ~self._expired())
        self._taking = self._upsert({"lease_token": token, "lease_until": until}, where=self._free())
        # They apply while `its_token` has the lease, even an overdue one. A long write in SQLite blocks all other
        # writers, also renewals: it must not cost its own process the lease.
        self._updating = update(self._table).where(self._is, columns.lease_token == token)
        self._renewing = self._updating.values(lease_until=until)
        given_back = self._updating.values(lease_token=None, lease_until=None)
        # Null without messages. SQLite 3.40 returns a wrong value for `messages IS NULL` here.
        self._giving_back = given_back.returning(func.substr(columns.messages, 1, 1))
        # Not if another call has taken it since, which it can where each statement is a transaction.
        self._removing = delete(self._table).where(self._is, columns.messages.is_(None), columns.lease_token.is_(None))

    # --- ChatMemoryStore

    async def get_messages(self, key: ChatMemoryKey) -> Sequence[Message]:
        """See `ChatMemoryStore`."""
        async with self._connection() as connection:
            text = await connection.scalar(self._reading, _named(key))
        return messages_from_json(text) if text is not None else ()

    async def update_messages(self, key: ChatMemoryKey, messages: Sequence[Message]) -> None:
        """See `ChatMemoryStore`. Raises `MemoryLeaseLostError` if another process has taken the conversation."""
        await self._write(key, messages_to_json(messages))

    async def delete_messages(self, key: ChatMemoryKey) -> None:
        """See `ChatMemoryStore`. Raises `MemoryLeaseLostError` if another process has taken the conversation."""
        await self._write(key, None)

    @asynccontextmanager
    async def lock(self, key: ChatMemoryKey) -> AsyncIterator[None]:
        """Lock the conversation for one call at a time, across all processes that use the table."""
        async with self._separate.opened(), self._leases.lock(key):
            yield

    async def stop(self) -> None:
        """Release all leases that are still held."""
        await self._leases.stop()

    async def ready(self) -> bool:
        """Return True if the table can be read; raise the database's error otherwise. For readiness checks."""
        async with self._connection() as connection:
            await connection.execute(select(self._table.c.service).limit(1))
        return True

    # --- reading and writing

    async def _write(self, key: ChatMemoryKey, text: str | None) -> None:
        expires = None if self._lifetime is None else DatabaseNow() + round(self._lifetime * 1000)
        values = {"messages": text, "expires_at": expires if text is not None else None}
        token = self._leases.token(key)
        async with self._connection(writing=True) as connection:
            if token is None:
                await connection.execute(self._upsert(values), _named(key))
            elif not await self._changes(connection, self._updating.values(values), _named(key, token)):
                raise MemoryLeaseLostError(key.service, key.memory_id)
            await self._purge(connection)

    async def _purge(self, connection: AsyncConnection) -> None:
        """Delete expired and empty rows, at most once a minute."""
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
        async with self._connection(writing=True) as connection:
            return await self._changes(connection, self._taking, _named(key, token, seconds))

    async def renew(self, key: ChatMemoryKey, token: str, seconds: float) -> bool:
        """See `LeaseKeeper`."""
        async with self._connection(writing=True, engine=self._separate.engine) as connection:
            return await self._changes(connection, self._renewing, _named(key, token, seconds))

    async def give_back(self, key: ChatMemoryKey, token: str) -> None:
        """See `LeaseKeeper`."""
        async with self._connection(writing=True) as connection:
            given_back = (await connection.execute(self._giving_back, _named(key, token))).first()
            if given_back is not None and given_back[0] is None:
                await connection.execute(self._removing, _named(key))

    # --- statements

    def _free(self) -> ColumnElement[bool]:
        until = self._table.c.lease_until
        return or_(until.is_(None), has_ended(until, self._longest, self._engine.dialect.name))

    def _expired(self) -> ColumnElement[bool]:
        # Never null: SQL cannot negate null.
        columns = self._table.c
        return and_(columns.expires_at.is_not(None), columns.expires_at <= DatabaseNow())

    def _upsert(self, values: dict[str, Any], where: ColumnElement[bool] | None = None) -> Any:
        """Return a statement that inserts the row of the conversation, or updates it if `where` holds."""
        row = INSERT_OF[self._engine.dialect.name](self._table).values(
            service=bindparam("its_service"), memory_id=bindparam("its_memory_id"), **values
        )
        same = [self._table.c.service, self._table.c.memory_id]
        return row.on_conflict_do_update(index_elements=same, set_=values, where=where)

    async def _changes(self, connection: AsyncConnection, statement: Any, named: dict[str, Any]) -> bool:
        done = await connection.execute(statement, named, execution_options={"preserve_rowcount": True})
        return bool(done.rowcount)

    # --- connections

    @asynccontextmanager
    async def _connection(
        self, *, writing: bool = False, engine: AsyncEngine | None = None
    ) -> AsyncIterator[AsyncConnection]:
        """Open a connection in a transaction that ends with the block."""
        await self._prepare()
        async with (engine or self._engine).connect() as connection:
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
                    error.add_note(f"while preparing the conversations table in {self._engine.url!r}")
                    raise
                self._prepared = True
