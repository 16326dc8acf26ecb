"""What SQLite and PostgreSQL write differently in the stores: inserts that may meet an existing row, and the time."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from sqlalchemy import BigInteger, Column, Engine, bindparam, or_
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.elements import ColumnElement
from sqlalchemy.sql.functions import FunctionElement

from ..store_clock import StoreClock
from .engines import address_of, is_in_memory

INSERT_OF: dict[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}
"""The `insert` with `on_conflict_do_nothing` and `on_conflict_do_update`, by database."""


_MILLISECOND = timedelta(milliseconds=1)


def new_clock(engine: Engine) -> StoreClock | None:
    """Return a clock for a store on SQLite, which measures time in this process; None for other databases."""
    if engine.dialect.name != "sqlite":
        return None
    return StoreClock(engine if is_in_memory(engine.url) else address_of(engine))


class DatabaseNow(FunctionElement[int]):
    """Milliseconds since 1970 by the clock of the database, which all processes share.

    On SQLite, that is the clock of the machine, and what the store's own `clock` has skipped.
    """

    type = BigInteger()
    inherit_cache = True

    def __init__(self, clock: StoreClock | None) -> None:
        if clock is None:
            super().__init__()
            return
        # With a function: a statement that was built once is executed before and after the clock is moved.
        super().__init__(bindparam(None, callable_=lambda: clock.skipped // _MILLISECOND, type_=BigInteger()))


@compiles(DatabaseNow, "sqlite")
def _now_sqlite(element: DatabaseNow, compiler: Any, **options: Any) -> str:
    skipped = compiler.process(element.clauses, **options)
    return f"(CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) + {skipped})"


@compiles(DatabaseNow, "postgresql")
def _now_postgresql(element: DatabaseNow, compiler: Any, **options: Any) -> str:
    return "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)"


def has_ended(until: Column[int], longest: int, clock: StoreClock | None) -> ColumnElement[bool]:
    """Return the condition that a lease has ended. `longest` milliseconds from now are more than any lease lasts.

    The clock of SQLite is that of the process: one that was wrong must not keep its lease until that time comes.
    """
    ended = until <= DatabaseNow(clock)
    return ended if clock is None else or_(ended, until > DatabaseNow(clock) + longest)
