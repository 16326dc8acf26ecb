"""Notes the statements of a transaction, and tells what a commit between two of them may lose.

A transaction that has only read loses nothing. What cannot be judged counts as a change. Statements are noted when they
run, each kind once, and judged when somebody asks. Not here: sessions (`open_sessions`).
"""

from __future__ import annotations

import re
from typing import Any
from weakref import WeakSet

from sqlalchemy import Connection, event
from sqlalchemy.engine import CursorResult
from sqlalchemy.sql import visitors
from sqlalchemy.sql.elements import ReleaseSavepointClause, RollbackToSavepointClause, SavepointClause
from sqlalchemy.sql.selectable import CompoundSelect, ForUpdateArg, Select, TableClause

from .plain_selects import describe_statement, is_plain_select

_MOST_UNJUDGED = 50  # statements that wait for a judgement
_MOST_FOUND = 20  # what a warning names
_MOST_UNREAD = 100  # results with rows that were not read


class TransactionNotes:
    """What the current transaction of a session has done so far."""

    def __init__(self) -> None:
        self.connections: list[Connection] = []
        self._rows: list[CursorResult[Any]] = []
        self._streams: WeakSet[Any] = WeakSet()  # contexts of streams that the connection itself made
        self._found: dict[str, None] = {}
        # Compiled statements by their SQL. SQLite has one SQL for a SELECT with and without FOR UPDATE.
        self._unjudged: dict[tuple[str, int], Any] = {}

    def begin(self, connection: Connection) -> None:
        """Note the statements of a connection from now on. A savepoint begins on the same connection again."""
        if connection in self.connections:
            return
        self.connections.append(connection)
        event.listen(connection, "before_cursor_execute", self._note_statement)
        of_engine = connection.engine.get_execution_options()
        for name, value in connection.get_execution_options().items():
            if name not in of_engine or of_engine[name] != value:
                self.add(f"its own {name.replace('_', ' ')} {value}")

    def end(self) -> None:
        """Forget everything: the transaction has ended."""
        self.connections.clear()
        self._found.clear()
        self._unjudged.clear()
        self._rows.clear()
        self._streams.clear()

    def add(self, found: str) -> None:
        """Note something that a commit may lose."""
        if len(self._found) < _MOST_FOUND:
            self._found[found] = None

    def add_rows(self, result: CursorResult[Any]) -> None:
        """Note a result whose rows are read from the connection when the program asks for them."""
        self._streams.discard(result.context)
        self._rows = [each for each in self._rows if each.cursor is not None]
        if len(self._rows) < _MOST_UNREAD:
            self._rows.append(result)

    @property
    def has_unread_rows(self) -> bool:
        """True if the program may still read rows from the connection."""
        return bool(self._streams) or any(each.cursor is not None for each in self._rows)

    @property
    def has_savepoint(self) -> bool:
        """True if a connection is in a savepoint."""
        return any(each.in_nested_transaction() for each in self.connections)

    def find_losses(self) -> list[str]:
        """Return what a commit may lose, for a warning. Judges the statements that were noted since the last call."""
        unjudged, self._unjudged = self._unjudged, {}
        for (sql, _), compiled in unjudged.items():
            if (found := _judge_statement(sql, getattr(compiled, "statement", None))) is not None:
                self.add(found)
        return list(self._found)

    def _note_statement(
        self, connection: Connection, cursor: Any, sql: str, parameters: Any, context: Any, executemany: bool
    ) -> None:
        # Called for every statement, those of a flush too: no judgement here.
        # Without a context, it is a default value that the database computes.
        if context is not None and context.execution_options.get("stream_results"):
            self._streams.add(context)
        compiled = getattr(context, "compiled", None)
        for verb, is_it in (("INSERT into", "isinsert"), ("UPDATE of", "isupdate"), ("DELETE from", "isdelete")):
            if getattr(context, is_it, False):
                table = getattr(getattr(compiled, "statement", None), "table", None)
                return self.add(f"{verb} {_table_name_of(table)}" if table is not None else describe_statement(sql))
        if len(self._unjudged) >= _MOST_UNJUDGED:
            self.find_losses()
        self._unjudged[sql, id(compiled)] = compiled
        return None


def _table_name_of(table: Any) -> str:
    return str(getattr(table, "fullname", None) or getattr(table, "name", None) or "a table")


# --- judging one statement

_LOCKS = re.compile(r"\bfor\s+(no\s+key\s+)?update\b|\bfor\s+(key\s+)?share\b", re.IGNORECASE)
_STATEFUL = re.compile(r"set_config|pg_(?:try_)?advisory|pg_notify", re.IGNORECASE)
_WITH = re.compile(r"\bwith\b", re.IGNORECASE)


def _judge_statement(sql: str, statement: Any) -> str | None:
    """Return what a commit after this statement may lose, or None after a plain SELECT."""
    if isinstance(statement, (SavepointClause, ReleaseSavepointClause, RollbackToSavepointClause)):
        return None  # what was done in the savepoint counts
    is_built = isinstance(statement, (Select, CompoundSelect))
    if is_built and any(isinstance(each, ForUpdateArg) for each in visitors.iterate(statement)):
        tables = sorted({_table_name_of(each) for each in visitors.iterate(statement) if isinstance(each, TableClause)})
        return f"SELECT FOR UPDATE of {', '.join(tables) or 'rows'}"
    if _LOCKS.search(sql):
        return f"SELECT FOR UPDATE: {describe_statement(sql)}"
    if (called := _STATEFUL.search(sql)) is not None:
        return f"a call of {called[0].lower()}: {describe_statement(sql)}"
    if not is_built and _WITH.search(sql):
        return f"WITH in a text: {describe_statement(sql)}"
    if is_plain_select(sql):
        return None
    kind = describe_statement(sql)
    return f"{kind}, which calls a function" if kind.startswith("SELECT") else kind
