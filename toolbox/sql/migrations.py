"""Creates and migrates the tables of the stores, in steps that a database has applied or not.

A step is frozen once it is released: databases exist that have applied it, and new ones apply all steps in order. So
the first step creates the tables of version 1, not today's. A change of a table is a new step, and the same change in
the class that describes today's tables:

    class RunTables(FirstRunTables):
        def __init__(self, name: str) -> None:
            super().__init__(name)
            self.runs.append_column(Column("priority", Integer))  # version 2

        def steps(self) -> tuple[Step, ...]:
            def add_priority(connection: Connection) -> None:
                connection.execute(DDL(f"ALTER TABLE {self.name} ADD COLUMN priority INTEGER"))

            return (*super().steps(), add_priority)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeAlias

from sqlalchemy import Column, Connection, Integer, MetaData, Table, Text, insert, select, text, update
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine

from ..errors import IllegalConfigurationError, Problem
from .engines import FOR_WRITING

Step: TypeAlias = Callable[[Connection], None]
"""Migrates a schema from one version to the next, in the transaction of the connection."""

VERSIONS = Table(
    "toolbox_schemas", MetaData(), Column("name", Text, primary_key=True), Column("version", Integer, nullable=False)
)

_LOCK = 0x746F6F6C626F78  # key of a PostgreSQL advisory lock: "toolbox" in ASCII


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
