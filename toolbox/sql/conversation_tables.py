"""The tables of conversations in SQL, and the steps that migrate them.

Not here: reading and writing them (`conversation_store`), executing steps (`migrations`).
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    DDL,
    BigInteger,
    Column,
    Connection,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    delete,
    insert,
    literal,
    literal_column,
    select,
    update,
)

from .migrations import Schema, Step


def first_conversations_table(name: str) -> Table:
    """Return the table of version 1: one row per conversation, with all messages. Frozen: change the class instead.

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


class ConversationTables:
    """Today's tables: heads, turns, and leases. A change is made here, with a step; `migrations` has an example.

    A head and a turn have `shown` and `kept`, the JSON of `log_forms`. The lease is a separate row, which exists while
    somebody holds the conversation, so that renewing it does not write a head. `entries` counts what is not hidden.

    Of a turn, `size` is the number of its messages, `first` the index of the first one, and `hidden_from` the index
    from which on a rewind has hidden it, or null.
    """

    def __init__(self, name: str) -> None:
        self.name, metadata = name, MetaData()
        self.heads = Table(
            name,
            metadata,
            Column("service", Text, primary_key=True),
            Column("memory_id", Text, primary_key=True),
            Column("expires_at", BigInteger),
            Column("id", Text),
            Column("owner", Text),
            Column("shown", Text),
            Column("kept", Text),
            Column("created_at", BigInteger),
            Column("updated_at", BigInteger),
            Column("entries", Integer),
            Column("next_number", Integer),
            Index(f"{name}_expires_at", "expires_at"),
        )
        columns = self.heads.c
        self._new_indexes = (
            Index(f"{name}_id", columns.id, unique=True),
            Index(f"{name}_owner", columns.owner, columns.updated_at, columns.id),
            Index(f"{name}_updated", columns.updated_at, columns.id),
        )
        self.turns = Table(
            f"{name}_turns",
            metadata,
            Column("id", Text, primary_key=True),
            Column("conversation", Text, nullable=False),
            Column("number", Integer, nullable=False),
            Column("run_id", Text),
            Column("first", Integer, nullable=False),
            Column("size", Integer, nullable=False),
            Column("hidden_from", Integer),
            Column("at", BigInteger, nullable=False),
            Column("messages", Text, nullable=False),
            Column("details", Text, nullable=False),
            Column("beans", Text),
            Index(f"{name}_turns_number", "conversation", "number", unique=True),
            Index(f"{name}_turns_run", "run_id"),
        )
        self.leases = Table(
            f"{name}_leases",
            metadata,
            Column("service", Text, primary_key=True),
            Column("memory_id", Text, primary_key=True),
            Column("token", Text, nullable=False),
            Column("until", BigInteger, nullable=False),
            Column("wish", Text),  # who wants the call to stop, as JSON
        )

    @property
    def tables(self) -> tuple[Table, ...]:
        """All tables."""
        return self.heads, self.turns, self.leases

    def schema(self) -> Schema:
        """Return the steps and the tables, for a migration."""
        return Schema(self.name, self.steps(), self.tables)

    def steps(self) -> tuple[Step, ...]:
        """Return the migration steps."""

        def create_table(connection: Connection) -> None:
            first_conversations_table(self.name).create(connection, checkfirst=False)

        return (create_table, self._keep_logs)

    def _keep_logs(self, connection: Connection) -> None:
        """Make the messages of each conversation its first turn (version 2).

        A process of an earlier release fails at its next statement: the columns that it uses are gone.
        """
        self.turns.create(connection, checkfirst=False)
        self.leases.create(connection, checkfirst=False)
        old, heads = first_conversations_table(self.name), self.heads
        # No text but that of `ALTER TABLE`, for schemas that the program translates.
        for name in _NEW_COLUMNS:
            kind = heads.c[name].type.compile(connection.dialect)
            _alter(connection, old, f"ADD COLUMN {name} {kind}")
            old.append_column(Column(name, heads.c[name].type))
        held = select(old.c.service, old.c.memory_id, old.c.lease_token, old.c.lease_until)
        names = ["service", "memory_id", "token", "until"]
        connection.execute(insert(self.leases).from_select(names, held.where(old.c.lease_token.is_not(None))))
        connection.execute(delete(old).where(old.c.messages.is_(None)))
        connection.execute(update(old).values(_first_values(old, connection.dialect.name)))
        c = old.c
        turns = select(c.id, c.id, literal(1), literal(1), c.entries, c.updated_at, c.messages, literal(_EMPTY))
        names = ["id", "conversation", "number", "first", "size", "at", "messages", "details"]
        connection.execute(insert(self.turns).from_select(names, turns))
        for name in ("messages", "lease_token", "lease_until"):
            _alter(connection, old, f"DROP COLUMN {name}")
        for index in self._new_indexes:
            index.create(connection, checkfirst=False)


def _alter(connection: Connection, table: Table, change: str) -> None:
    statement: Any = DDL(f"ALTER TABLE %(fullname)s {change}")  # type: ignore[no-untyped-call]
    connection.execute(statement.against(table))


_NEW_COLUMNS = ("id", "owner", "shown", "kept", "created_at", "updated_at", "entries", "next_number")
_EMPTY = '{"version":1}'
"""The JSON of `log_forms` without any value."""

_NEW_ID = {
    "sqlite": "lower(hex(randomblob(16)))",
    # The key makes it unique, the rest makes it unknown.
    "postgresql": "md5(random()::text || clock_timestamp()::text || service || ' ' || memory_id)",
}
_NOW = {
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)",
    "postgresql": "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)",
}

# The array of messages is cut out of the text, because PostgreSQL takes no member out of an object whose texts have NUL
# characters or lone surrogates; the length of an array it can tell. What begins otherwise is not of `transcripts`.
_BEGIN = '{"version":1,"messages":'
_IS_OURS = f"substr(messages, 1, {len(_BEGIN)}) = '{_BEGIN}'"
_ARRAY = f"substr(messages, {len(_BEGIN) + 1}, length(messages) - {len(_BEGIN) + 1})"
_LENGTH = {"sqlite": f"json_array_length({_ARRAY})", "postgresql": f"json_array_length(CAST({_ARRAY} AS json))"}


def _first_values(old: Table, dialect: str) -> dict[str, Any]:
    """Return the values of the heads of conversations that an earlier release has stored."""
    return {
        "id": literal_column(_NEW_ID[dialect]),
        "shown": _EMPTY,
        "kept": _EMPTY,
        "created_at": literal_column(_NOW[dialect]),
        "updated_at": literal_column(_NOW[dialect]),
        "entries": literal_column(f"CASE WHEN {_IS_OURS} THEN {_LENGTH[dialect]} ELSE 0 END"),
        "next_number": 2,
    }
