"""What SQLite and PostgreSQL write differently in the stores: inserts that may meet an existing row, and the clock."""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Column, or_
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.elements import ColumnElement
from sqlalchemy.sql.functions import FunctionElement

INSERT_OF: dict[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}
"""The `insert` with `on_conflict_do_nothing` and `on_conflict_do_update`, by database."""


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
