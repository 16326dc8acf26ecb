"""Creates, migrates and checks the tables of the stores, in steps that a database has applied or not.

A step is frozen once it is released: databases exist that have applied it, and new ones apply all steps in order. So
the first step creates the tables of version 1, not today's, and the class of version 1 is frozen as well. A change of a
table is a new step, and the same change in the one class that describes today's tables, at the end of both methods;
steps of earlier releases stay before it:

    class RunTables(FirstRunTables):
        def __init__(self, name: str) -> None:
            super().__init__(name)
            self.runs.append_column(Column("priority", Integer))  # version 2

        def steps(self) -> tuple[Step, ...]:
            def add_priority(connection: Connection) -> None:
                connection.execute(text(f"ALTER TABLE {self.name} ADD COLUMN priority INTEGER"))

            return (*super().steps(), add_priority)

A step only executes statements and fetches nothing: `toolbox migrate --sql` prints them. What depends on the rows is
part of a statement, as in `UPDATE … WHERE`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast

from sqlalchemy import (
    Column,
    Connection,
    Integer,
    MetaData,
    Table,
    Text,
    create_mock_engine,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from ..errors import IllegalConfigurationError, Problem
from .engines import FOR_WRITING, address_of, prepare_to_write, shares_connections

Step: TypeAlias = Callable[[Connection], None]
"""Migrates a schema from one version to the next, in the transaction of the connection."""

VERSIONS = Table(
    "toolbox_schemas", MetaData(), Column("name", Text, primary_key=True), Column("version", Integer, nullable=False)
)

tables_in_use: Final[set[str]] = set()
"""The names of the tables of all stores that this process has created."""

RIGHTS = ("SELECT", "INSERT", "UPDATE", "DELETE")
"""What a store does with the rows of its tables."""

_LOCK = 0x746F6F6C626F78  # key of a PostgreSQL advisory lock: "toolbox" in ASCII
_LOCKING = {"postgresql": f"SELECT pg_advisory_xact_lock({_LOCK})", "sqlite": "BEGIN IMMEDIATE"}
_NO_RIGHT = "42501"  # the SQLSTATE of a missing right
_MIGRATE = "run `toolbox migrate module:container`"


@dataclass(frozen=True, slots=True)
class Schema:
    """The tables of one store: their name in `toolbox_schemas`, all steps to today's version, and today's tables."""

    name: str
    steps: tuple[Step, ...]
    tables: tuple[Table, ...] = ()


@dataclass(frozen=True, slots=True)
class Migration:
    """What a migration did: the version of a schema before, or None if it was created, and after."""

    name: str
    before: int | None
    after: int


class StoreTables:
    """The tables of one store in its database. They are prepared once: migrated, or only checked.

    The engine is prepared for `@transactional` at once: only how its transactions begin changes, and only on SQLite.
    """

    def __init__(self, engine: AsyncEngine, schema: Schema, *, migrates: bool) -> None:
        self.engine, self.schema, self.migrates = engine, schema, migrates
        self._is_prepared = False
        self._preparing = asyncio.Lock()
        prepare_to_write(engine.sync_engine)
        tables_in_use.update(each.name for each in schema.tables)

    def check_engine(self) -> None:
        """Raise `IllegalConfigurationError` for an engine of SQLite that cannot be prepared for `@transactional`."""
        if self.engine.dialect.name == "sqlite" and shares_connections(self.engine.sync_engine):
            what = "all sessions of their SQLite engine share one connection, and so one transaction"
            fix = 'use a file, or sql.open_engine("sqlite://") for a temporary database'
            raise IllegalConfigurationError([Problem(f"the tables of {self.schema.name}", what, fix)])

    async def prepare(self) -> None:
        """Migrate or check the tables, unless this has been done. Raises `IllegalConfigurationError`."""
        if self._is_prepared:
            return
        self.check_engine()
        async with self._preparing:
            if not self._is_prepared:
                try:
                    if self.migrates:
                        await migrate_together(self.engine, [self.schema])
                    await check(self.engine, self.schema)
                except (OSError, DBAPIError) as error:
                    error.add_note(f"while preparing the tables of {self.schema.name} in {self.engine.url!r}")
                    raise
                self._is_prepared = True


# --- migrating


async def migrate(engine: AsyncEngine, name: str, steps: Sequence[Step]) -> None:
    """Apply the steps of one schema that the database does not have yet; see `migrate_together`."""
    await migrate_together(engine, [Schema(name, tuple(steps))])


async def migrate_together(engine: AsyncEngine, schemas: Sequence[Schema]) -> list[Migration]:
    """Apply the steps that the database does not have yet, in one transaction; concurrent processes wait.

    A database that has them all is only read, so that no start waits for another program's writing. Raises
    `IllegalConfigurationError` if the database has a newer version than this release supports, or refuses a right.
    """
    try:
        async with engine.connect() as connection:
            await _read_committed(connection)
            async with connection.begin():
                found = await connection.run_sync(_read_versions, schemas)
                if all(found[each.name] == len(each.steps) for each in schemas):
                    return []
            await connection.execution_options(**FOR_WRITING)
            async with connection.begin():
                return await connection.run_sync(_migrate, schemas)
    except DBAPIError as error:
        if not _lacks_right(error):
            raise
        where = f"the tables of {', '.join(each.name for each in schemas)}"
        fix = f"{_MIGRATE} as a database user who may create tables, and set TOOLBOX_SQL__MIGRATE=false here"
        raise IllegalConfigurationError([Problem(where, f"they cannot be migrated: {error.orig}", fix)]) from error


def _migrate(connection: Connection, schemas: Sequence[Schema]) -> list[Migration]:
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(_LOCKING["postgresql"])
    else:
        with suppress(OperationalError):  # `open_engine` has begun as a writer; other engines have not
            connection.exec_driver_sql(_LOCKING["sqlite"])
    found = _read_versions(connection, schemas)
    _apply_steps(connection, schemas, found, has_versions=_has_versions(connection))
    return [Migration(name, found[name], last) for name, last in _find_newest(schemas).items() if found[name] != last]


def _apply_steps(
    connection: Connection, schemas: Sequence[Schema], found: Mapping[str, int | None], *, has_versions: bool
) -> None:
    """Execute the steps that a database with the versions `found` does not have."""
    if not has_versions:
        VERSIONS.create(connection, checkfirst=False)
    for schema in schemas:
        version, last = found[schema.name], len(schema.steps)
        for step in schema.steps[version or 0 :]:
            step(connection)
        if version is None:
            connection.execute(insert(VERSIONS).values(name=schema.name, version=last))
        elif version < last:
            connection.execute(update(VERSIONS).where(VERSIONS.c.name == schema.name).values(version=last))


def _read_versions(connection: Connection, schemas: Sequence[Schema]) -> dict[str, int | None]:
    """Return how many steps of each schema the database has applied, or None. Raises for a newer version."""
    found: dict[str, int | None] = dict.fromkeys(each.name for each in schemas)
    if not _has_versions(connection):
        return found
    for name, last in _find_newest(schemas).items():
        found[name] = version = connection.scalar(select(VERSIONS.c.version).where(VERSIONS.c.name == name))
        if version is not None and version > last:
            what = f"the database has version {version}, but this release supports versions up to {last}"
            fix = "install the release of toolbox-di whose `toolbox migrate` made them, or a newer one"
            raise IllegalConfigurationError([Problem(f"the tables of {name}", what, fix)])
    return found


def _has_versions(connection: Connection) -> bool:
    schema = connection.schema_for_object(VERSIONS)
    return connection.dialect.has_table(connection, VERSIONS.name, schema=schema)


def _find_newest(schemas: Iterable[Schema]) -> dict[str, int]:
    return {each.name: len(each.steps) for each in schemas}


async def _read_committed(connection: AsyncConnection) -> None:
    if connection.dialect.name == "postgresql":
        # At other levels a transaction that has waited for the lock does not see what the others have created.
        await connection.execution_options(isolation_level="READ COMMITTED")


def _lacks_right(error: DBAPIError) -> bool:
    """Return True if the database refused a right, or a file can only be read."""
    is_read_only = str(getattr(error.orig, "sqlite_errorname", "")).startswith("SQLITE_READONLY")
    return is_read_only or getattr(error.orig, "sqlstate", None) == _NO_RIGHT


# --- checking


async def check(engine: AsyncEngine, schema: Schema) -> None:
    """Raise `IllegalConfigurationError` if a database does not have today's tables, or refuses a right that they need.

    Changes nothing, and needs no right to create tables.
    """
    async with engine.connect() as connection:
        await _read_committed(connection)
        try:
            problems = await connection.run_sync(lambda connection: [*_problems_of_schema(connection, schema)])
        except DBAPIError as error:
            if not _lacks_right(error):
                raise
            what = f"the database user may not read {VERSIONS.name}: {error.orig}"
            problems = [Problem(f"the tables of {schema.name}", what, f"GRANT SELECT ON {VERSIONS.name}")]
    if problems:
        raise IllegalConfigurationError(problems)


def _problems_of_schema(connection: Connection, schema: Schema) -> Iterator[Problem]:
    where, last = f"the tables of {schema.name}", len(schema.steps)
    version = _read_versions(connection, [schema])[schema.name]
    if version is None:
        yield Problem(where, f"they are missing in {connection.engine.url!r}", f"{_MIGRATE}, before the start")
    elif version < last:
        what = f"the database has version {version}, but this release needs version {last}"
        yield Problem(where, what, f"{_MIGRATE} with this release, before the start")
    elif connection.dialect.name == "postgresql" and (missing := _find_missing_rights(connection, schema)):
        what = f"the database user lacks the rights {', '.join(missing)}"
        yield Problem(where, what, f"GRANT {', '.join(RIGHTS)} on the tables, and USAGE on their sequences")


def _find_missing_rights(connection: Connection, schema: Schema) -> list[str]:
    """Return the rights on the tables and their sequences that the user of a PostgreSQL database does not have."""
    rights: dict[str, Any] = {}
    for table in schema.tables:
        name = connection.dialect.identifier_preparer.format_table(table)
        for right in RIGHTS:
            rights[f"{right} on {name}"] = func.has_table_privilege(name, right)
        if (counted := table.autoincrement_column) is not None:
            sequence = func.pg_get_serial_sequence(name, counted.name)
            rights[f"USAGE on the sequence of {name}"] = func.has_sequence_privilege(sequence, "USAGE")
    if not rights:
        return []
    has = connection.execute(select(*rights.values())).one()
    return [right for right, is_granted in zip(rights, has, strict=True) if is_granted is False]


# --- for `toolbox migrate`


async def migrate_stores(stores: Iterable[StoreTables]) -> list[tuple[str, list[Migration]]]:
    """Migrate the tables of several stores, with one transaction per database. Returns what was done, by database.

    Raises `IllegalConfigurationError`, also if a database cannot be reached.
    """
    done = []
    for engine, schemas in _group_by_database(stores):
        with _explain_unreachable(engine):
            done.append((repr(engine.url), await migrate_together(engine, schemas)))
    return done


async def migration_script(stores: Iterable[StoreTables]) -> list[tuple[str, list[str]]]:
    """Return the statements that `migrate_stores` would execute, by database. Only reads the database.

    Raises `IllegalConfigurationError` as `migrate_stores` does.
    """
    scripts = []
    for engine, schemas in _group_by_database(stores):
        with _explain_unreachable(engine):
            scripts.append((repr(engine.url), await _collect_statements(engine, schemas)))
    return scripts


async def _collect_statements(engine: AsyncEngine, schemas: Sequence[Schema]) -> list[str]:
    async with engine.connect() as connection:
        await _read_committed(connection)
        has_versions = await connection.run_sync(_has_versions)
        found = await connection.run_sync(_read_versions, schemas)
    if found == _find_newest(schemas):
        return []
    written: list[str] = []

    def write_statement(statement: Any, *_: object) -> None:
        written.append(str(statement.compile(dialect=printer.dialect, compile_kwargs={"literal_binds": True})).strip())

    printer = create_mock_engine(f"{engine.dialect.name}://", write_statement)
    _apply_steps(cast("Connection", printer), schemas, found, has_versions=has_versions)
    begin = ["BEGIN", _LOCKING["postgresql"]] if engine.dialect.name == "postgresql" else [_LOCKING["sqlite"]]
    return [*begin, *written, "COMMIT"]


def _group_by_database(stores: Iterable[StoreTables]) -> list[tuple[AsyncEngine, list[Schema]]]:
    """Return the schemas of each database, each once, with an engine."""
    engines: dict[object, AsyncEngine] = {}
    schemas: dict[object, dict[str, Schema]] = {}
    for each in stores:
        address = address_of(each.engine.sync_engine)
        engines.setdefault(address, each.engine)
        schemas.setdefault(address, {})[each.schema.name] = each.schema
    return [(engine, [*schemas[address].values()]) for address, engine in engines.items()]


@contextmanager
def _explain_unreachable(engine: AsyncEngine) -> Iterator[None]:
    """Raise `IllegalConfigurationError` for errors of the database inside the block."""
    try:
        yield
    except (OSError, DBAPIError) as error:
        what = f"{type(error).__name__}: {getattr(error, 'orig', error)}"
        raise IllegalConfigurationError([Problem(f"the database {engine.url!r}", what, "check its URL")]) from error
