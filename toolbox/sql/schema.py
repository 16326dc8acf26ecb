"""Creates the library's own tables and brings those of an earlier release up to date.

A table of versions says, for each schema, how many of its steps a database has taken. Not here: the steps themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from sqlalchemy import Column, Connection, Integer, MetaData, Table, Text, insert, select, text, update
from sqlalchemy.ext.asyncio import AsyncEngine

from ..errors import IllegalConfigurationError, Problem
from .engines import FOR_WRITING

Step: TypeAlias = Callable[[Connection], None]
"""Brings a schema from one version to the next, in the transaction of the connection."""

VERSIONS = Table(
    "toolbox_schemas", MetaData(), Column("name", Text, primary_key=True), Column("version", Integer, nullable=False)
)

_LOCK = 0x746F6F6C626F78  # of PostgreSQL's advisory locks, "toolbox"


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
