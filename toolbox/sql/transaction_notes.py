"""Notes the statements of a transaction: what a commit between two of them may lose, and what to do instead.

A transaction that has only read loses nothing, unless it reads a snapshot. What cannot be judged counts as a change.
Statements are noted when they run, each kind once, and judged when somebody asks. Not here: sessions (`open_sessions`).
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import Connection, Dialect, event
from sqlalchemy.engine import CursorResult
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import visitors
from sqlalchemy.sql.elements import ReleaseSavepointClause, RollbackToSavepointClause, SavepointClause
from sqlalchemy.sql.selectable import CompoundSelect, ForUpdateArg, Select, TableClause

from .plain_selects import describe_statement, find_doubt, split_tokens

_MOST_UNJUDGED = 50  # statements that wait for a judgement
_MOST_FOUND = 20  # what a warning names
_MOST_UNREAD = 100  # results with rows that were not read


COMMIT: Final = "commit before the call"
LOCK_AGAIN: Final = f"{COMMIT} and lock again after it"
READ_AGAIN: Final = f"{COMMIT} and read again after it"


@dataclass(frozen=True, slots=True)
class Loss:
    """What a commit may lose, as a warning says it, and what to do instead of keeping the transaction."""

    what: str
    fix: str = COMMIT


class TransactionNotes:
    """What the current transaction of a session has done so far."""

    def __init__(self) -> None:
        self.connections: list[Connection] = []
        self._rows: list[CursorResult[Any]] = []
        self._streams: WeakSet[Any] = WeakSet()  # contexts of streams that the connection itself made
        self._found: dict[Loss, None] = {}
        # Compiled statements by their SQL. SQLite has one SQL for a SELECT with and without FOR UPDATE.
        self._unjudged: dict[tuple[str, int, str], Any] = {}

    def begin(self, connection: Connection) -> None:
        """Note the statements of a connection from now on. A savepoint begins on the same connection again."""
        if connection in self.connections:
            return
        self.connections.append(connection)
        event.listen(connection, "before_cursor_execute", self._note_statement)
        of_engine = connection.engine.get_execution_options()
        for name, value in connection.get_execution_options().items():
            if name not in of_engine or of_engine[name] != value:
                fix = READ_AGAIN if name == "isolation_level" else f"{COMMIT} and set it again after it"
                self._add(Loss(f"its own {name.replace('_', ' ')} {value}", fix))

    def end(self) -> None:
        """Forget everything: the transaction has ended."""
        self.connections.clear()
        self._found.clear()
        self._unjudged.clear()
        self._rows.clear()
        self._streams.clear()

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

    def find_losses(self) -> list[Loss]:
        """Return what a commit may lose. Judges the statements that were noted since the last call."""
        unjudged, self._unjudged = self._unjudged, {}
        for (sql, _, dialect), compiled in unjudged.items():
            if (found := judge_statement(sql, getattr(compiled, "statement", None), dialect)) is not None:
                self._add(found)
        return list(self._found)

    def find_snapshots(self) -> list[Loss]:
        """Return isolation levels above `READ COMMITTED`, whose snapshots a commit ends. May ask the database.

        Raises `DBAPIError` if a connection is lost.
        """
        return [loss for each in self.connections if (loss := _find_snapshot(each)) is not None]

    def _add(self, loss: Loss) -> None:
        if len(self._found) < _MOST_FOUND:
            self._found[loss] = None

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
                what = f"{verb} {_table_name_of(table)}" if table is not None else describe_statement(split_tokens(sql))
                return self._add(Loss(what))
        if len(self._unjudged) >= _MOST_UNJUDGED:
            self.find_losses()
        self._unjudged[sql, id(compiled), connection.dialect.name] = compiled
        return None


def _table_name_of(table: Any) -> str:
    return str(getattr(table, "fullname", None) or getattr(table, "name", None) or "a table")


# --- the isolation level

_WITHOUT_SNAPSHOT = {"AUTOCOMMIT", "READ UNCOMMITTED", "READ COMMITTED"}
_levels: WeakKeyDictionary[Dialect, str] = WeakKeyDictionary()
"""What the databases answered, by engine: an engine with other options has the same dialect."""


def _find_snapshot(connection: Connection) -> Loss | None:
    """Return the isolation level of a transaction if a commit ends its snapshot, or why it is not known."""
    if connection.dialect.name == "sqlite":  # it has only snapshots; a program that needs one keeps its transaction
        return None
    try:
        level = _find_isolation_level(connection)
    except NotImplementedError:
        level = "unknown"
    except DBAPIError as error:
        if error.connection_invalidated:
            raise
        return Loss("a statement has failed", "roll back before the call")  # so the database answers nothing more
    return None if level in _WITHOUT_SNAPSHOT else Loss(f"isolation level {level}", READ_AGAIN)


def _find_isolation_level(connection: Connection) -> str:
    """Return the isolation level of a transaction. The database is asked once per engine.

    The answer is that of the transaction itself, so it does not matter who has set the level. If the program has a
    listener for the begin of transactions, it may set one for each, and so each is asked.
    """
    if connection.dispatch.begin:
        return connection.get_isolation_level()
    if own := connection.engine.get_execution_options().get("isolation_level"):
        return str(own).upper().replace("_", " ")
    if (level := _levels.get(connection.dialect)) is None:
        level = _levels[connection.dialect] = connection.get_isolation_level()
    return level


# --- judging one statement

_LOCKS = re.compile(r"\bfor (no key )?update\b|\bfor (key )?share\b", re.IGNORECASE)
_WITH = re.compile(r"\bwith\b", re.IGNORECASE)
_OF_THE_TRANSACTION = re.compile(
    r"(set|reset|declare|fetch|move|prepare|listen|unlisten|discard|load|pragma|attach|detach)\b"
    r"|create (or replace )?((global|local) )?temp(orary)?\b",
    re.IGNORECASE,
)
"""Statements about the transaction itself, or about its connection, which another transaction gets after a commit."""


def _do_later(what: str) -> str:
    return f"run {what} after the call, or for each transaction in the engine's `begin` event"


_FUNCTIONS = (
    (re.compile(r"(pg_(?:try_)?advisory)", re.IGNORECASE), LOCK_AGAIN),
    (re.compile(r"(set_config)", re.IGNORECASE), _do_later("set_config")),
    (re.compile(r"(pg_export_snapshot)", re.IGNORECASE), READ_AGAIN),
    (re.compile(r"\b(pg_notify|lo_\w+|lowrite|dblink\w*)\"? \(", re.IGNORECASE), COMMIT),
)
"""Functions that do more than read, also beside a table, and what to do instead."""


def judge_statement(sql: str, statement: Any, dialect: str) -> Loss | None:
    """Return what a commit after this statement may lose, or None after a plain SELECT."""
    if isinstance(statement, (SavepointClause, ReleaseSavepointClause, RollbackToSavepointClause)):
        return None  # what was done in the savepoint counts
    is_built = isinstance(statement, (Select, CompoundSelect))
    if is_built and any(isinstance(each, ForUpdateArg) for each in visitors.iterate(statement)):
        tables = sorted({_table_name_of(each) for each in visitors.iterate(statement) if isinstance(each, TableClause)})
        return Loss(f"SELECT FOR UPDATE of {', '.join(tables) or 'rows'}", LOCK_AGAIN)
    return _judge_text(sql, dialect, is_built)


@functools.lru_cache(maxsize=1000)
def _judge_text(sql: str, dialect: str, is_built: bool) -> Loss | None:
    tokens = split_tokens(sql)
    text = " ".join(token[0] for token in tokens)  # without comments
    if _LOCKS.search(text):
        return Loss(f"SELECT FOR UPDATE: {describe_statement(tokens)}", LOCK_AGAIN)
    for pattern, fix in _FUNCTIONS:
        if (called := pattern.search(text)) is not None:
            return Loss(f"a call of {called[1].lower()}: {describe_statement(tokens)}", fix)
    if (begins := _OF_THE_TRANSACTION.match(text)) is not None:
        return Loss(describe_statement(tokens), _do_later(begins[0].upper()))
    if not is_built and _WITH.search(text):
        return Loss(f"WITH in a text: {describe_statement(tokens)}")
    if not is_built and dialect not in ("postgresql", "sqlite"):
        return Loss(f"{describe_statement(tokens)}, which cannot be judged on {dialect}")
    if (doubt := find_doubt(tokens, dialect)) is None:
        return None
    described = describe_statement(tokens)
    if described.startswith("SELECT"):
        return Loss(f"{described}, which {doubt}", f"{COMMIT} if that loses nothing")
    return Loss(described, LOCK_AGAIN if described.startswith("LOCK") else COMMIT)
