"""The tables of stored runs in SQL, and the steps that migrate them.

Not here: reading and writing them (`run_store`), executing steps (`migrations`).
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    func,
    literal_column,
    text,
)
from sqlalchemy.sql.elements import ColumnElement

from .migrations import Schema, Step

INDEXED = 100
"""Characters of a name that its index has: PostgreSQL refuses long texts in an index."""


class FirstRunTables:
    """The tables of version 1. Frozen: databases have them; change `RunTables` instead.

    Times are milliseconds of the database's clock, as in `DatabaseNow`.

    The lease is a separate row: renewing it neither waits for a tool's transaction that checks the generation in the
    header, nor breaks one that is serializable.
    """

    def __init__(self, name: str) -> None:
        self.name, self.metadata = name, MetaData()
        self.runs = Table(
            name,
            self.metadata,
            Column("id", Text, primary_key=True),
            Column("service", Text, nullable=False),
            Column("method", Text, nullable=False),
            Column("status", Text, nullable=False),
            Column("generation", Integer, nullable=False),
            Column("version", Integer, nullable=False),
            Column("conversation", Text),
            Column("created_at", BigInteger, nullable=False),
            Column("updated_at", BigInteger, nullable=False),
            Column("document", Text, nullable=False),
            Index(f"{name}_created", "created_at"),
            Index(f"{name}_status_created", "status", "created_at"),
            Index(f"{name}_service_created", "service", "created_at"),
            Index(f"{name}_status_updated", "status", "updated_at"),
            Index(f"{name}_conversation", "conversation", "status"),
        )
        self.leases = Table(
            f"{name}_leases",
            self.metadata,
            Column("run_id", Text, primary_key=True),
            Column("generation", Integer, nullable=False),
            Column("owner", Text),
            Column("until", BigInteger, nullable=False),
            Column("events", Integer, nullable=False),  # how many the run has
        )
        number = BigInteger().with_variant(Integer, "sqlite")
        self.records = Table(
            f"{name}_records",
            self.metadata,
            Column("number", number, primary_key=True, autoincrement=True),
            Column("run_id", Text, nullable=False),
            Column("key", Text, nullable=False),
            Column("kind", Text, nullable=False),
            Column("data", Text, nullable=False),
            UniqueConstraint("run_id", "key", name=f"{name}_records_key"),
        )
        self.events = Table(
            f"{name}_events",
            self.metadata,
            Column("run_id", Text, primary_key=True),
            Column("number", Integer, primary_key=True, autoincrement=False),
            Column("at", BigInteger, nullable=False),
            Column("data", Text, nullable=False),
        )

    def steps(self) -> tuple[Step, ...]:
        """Return the migration steps."""

        def create(connection: Connection) -> None:
            FirstRunTables(self.name).metadata.create_all(connection, checkfirst=False)

        return (create,)

    def schema(self) -> Schema:
        """Return the steps and the tables, for a migration."""
        return Schema(self.name, self.steps(), tuple(self.metadata.sorted_tables))


class RunTables(FirstRunTables):
    """Today's tables. A change is made here, with a step; `migrations` has an example.

    `shown` is the document as lists need it, of the header with the version `shown_version`: where that is another one,
    a program of an earlier release has written the header, and the document itself counts.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        for each in ("started_by", "memory_id", "shown"):  # version 2
            self.runs.append_column(Column(each, Text))
        for each in ("shown_version", "waiting_since"):
            self.runs.append_column(Column(each, BigInteger))
        Index(f"{name}_started_by", beginning_of(self.runs.c.started_by), self.runs.c.created_at)
        self.leases.append_column(Column("wish", Text))  # version 3
        self.runs.append_column(Column("next_at", BigInteger))  # version 4
        has_time = self.runs.c.next_at.is_not(None)
        Index(f"{name}_next_at", self.runs.c.next_at, sqlite_where=has_time, postgresql_where=has_time)
        indexed = beginning_of(self.runs.c.memory_id), self.runs.c.created_at  # version 5
        has_room = self.runs.c.memory_id.is_not(None)
        Index(f"{name}_memory_id", *indexed, sqlite_where=has_room, postgresql_where=has_room)
        self.leases.append_column(Column("messages", Integer))  # version 6: how many; None is 0
        self.leases.append_column(Column("closed", Integer))  # 1 if the run takes no more messages
        self.messages = Table(
            f"{name}_messages",
            self.metadata,
            Column("run_id", Text, primary_key=True),
            Column("number", Integer, primary_key=True, autoincrement=False),
            Column("id", Text, nullable=False),
            Column("data", Text, nullable=False),
        )

    def steps(self) -> tuple[Step, ...]:
        """Return the migration steps."""

        def add_columns_of_lists(connection: Connection) -> None:
            quote = connection.dialect.identifier_preparer.quote
            table, index = quote(self.name), quote(f"{self.name}_started_by")
            texts, numbers = ("started_by", "memory_id", "shown"), ("shown_version", "waiting_since")
            for each in (*(f"{name} TEXT" for name in texts), *(f"{name} BIGINT" for name in numbers)):
                connection.execute(text(f"ALTER TABLE {table} ADD COLUMN {each}"))
            _fill(connection, table, "started_by", "identity.name")
            indexed = f"substr(started_by, 1, {INDEXED}), created_at"
            connection.execute(text(f"CREATE INDEX {index} ON {table} ({indexed})"))

        def add_wishes(connection: Connection) -> None:
            quote = connection.dialect.identifier_preparer.quote
            connection.execute(text(f"ALTER TABLE {quote(self.leases.name)} ADD COLUMN wish TEXT"))

        def add_next_at(connection: Connection) -> None:
            quote = connection.dialect.identifier_preparer.quote
            table, index = quote(self.name), quote(f"{self.name}_next_at")
            connection.execute(text(f"ALTER TABLE {table} ADD COLUMN next_at BIGINT"))
            connection.execute(text(f"CREATE INDEX {index} ON {table} (next_at) WHERE next_at IS NOT NULL"))

        def add_index_of_conversations(connection: Connection) -> None:
            quote = connection.dialect.identifier_preparer.quote
            table, index = quote(self.name), quote(f"{self.name}_memory_id")
            _fill(connection, table, "memory_id", "memory_id")
            indexed = f"substr(memory_id, 1, {INDEXED}), created_at"
            connection.execute(text(f"CREATE INDEX {index} ON {table} ({indexed}) WHERE memory_id IS NOT NULL"))

        def add_messages(connection: Connection) -> None:
            leases = connection.dialect.identifier_preparer.quote(self.leases.name)
            for each in ("messages INTEGER", "closed INTEGER"):
                connection.execute(text(f"ALTER TABLE {leases} ADD COLUMN {each}"))
            self.messages.create(connection, checkfirst=False)

        steps = add_columns_of_lists, add_wishes, add_next_at, add_index_of_conversations, add_messages
        return (*super().steps(), *steps)


def beginning_of(name: ColumnElement[Any]) -> ColumnElement[str]:
    """Return what the index has of a name."""
    return func.substr(name, literal_column("1"), literal_column(str(INDEXED)))


def _fill(connection: Connection, table: str, column: str, path: str) -> None:
    """Fill a column with what the documents have at a path of names."""
    within = path.partition(".")[0]
    filling = _FILL[connection.dialect.name]
    connection.execute(text(filling.format(table=table, column=column, within=within, path=path)))


# Fills a column from the documents of earlier releases, except from those that are not JSON, and except for texts with
# characters that the databases cannot take out of JSON. The document itself still has these texts. With two paths,
# SQLite returns JSON, in which they are escaped.
_FILL = {
    "sqlite": """UPDATE {table} SET {column} = json_extract(document, '$.{path}')
WHERE {column} IS NULL AND CASE WHEN json_valid(document) THEN json_extract(document, '$.{path}') IS NOT NULL
AND instr(json_extract(document, '$.{within}', '$.{within}'), '\\u0000') = 0
AND instr(json_extract(document, '$.{within}', '$.{within}'), '\\ud') = 0 END""",
    "postgresql": """DO $fill$
DECLARE run record;
BEGIN
  FOR run IN SELECT id, document FROM {table} WHERE {column} IS NULL LOOP
    BEGIN
      UPDATE {table} SET {column} = run.document::json #>> string_to_array('{path}', '.')
      WHERE id = run.id AND run.document::json #>> string_to_array('{path}', '.') IS NOT NULL;
    EXCEPTION WHEN OTHERS THEN NULL;
    END;
  END LOOP;
END
$fill$""",
}
