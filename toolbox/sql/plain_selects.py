"""Reads the SQL of a statement: whether it is a plain SELECT, which changes nothing, and a short form for messages.

It knows the SQL of PostgreSQL and of SQLite. What cannot be read for certain is not plain. Not here: the statements of
a session (`transaction_notes`).
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TypeAlias

Tokens: TypeAlias = list[re.Match[str]]

# In both databases, every character beyond ASCII is part of a name, also one that Python counts as a space.
_TOKEN = re.compile(
    r"""
      [ \t\r\n\f\v]+ | --[^\r\n]*(?=\r?\n|\Z) | /\*(?!!)(?:(?!/\*|\*/).)*\*/
    | (?P<literal>'(?:[^'\\]|'')*')
    | (?P<name>"(?:[^"\\]|"")*"|`[^`\\]*`)
    | (?P<number>\$\d+|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)
    | (?P<unclear>[uU]&['"]|\$[\w\x80-\U0010ffff]*\$|--|/\*|['"`\\])
    | (?P<word>[A-Za-z_\x80-\U0010ffff][\w$\x80-\U0010ffff]*)
    | (?P<mark>::|.)
    """,
    re.VERBOSE | re.DOTALL | re.ASCII,
)
_UNCLEAR_MARKS = {"postgresql": ("`",), "sqlite": ("[",)}
"""An operator of PostgreSQL that quotes names in SQLite, and a mark of SQLite that belongs to arrays in PostgreSQL."""
_CHANGING = {"INTO", "INSERT", "UPDATE", "DELETE", "MERGE", "CALL", "EXECUTE", "LOCK"}
_BEFORE_A_TABLE = {"FROM", "INTO", "JOIN", "TABLE", "UPDATE"}
_AFTER_THE_TABLES = set(
    """
    except fetch for group having intersect limit offset order union where window
    """.upper().split()
)
_BEFORE_A_TYPE = {"AS", "::"}
_RESERVED = set(
    """
    all and any array as asc between case cast desc distinct else except exists from group having in intersect lateral
    limit not offset on only or order row select some then union using values when where with
    """.upper().split()
)
"""Words that are never functions, and after which no operator follows."""
_NO_TABLES = _RESERVED | _AFTER_THE_TABLES
_KEYWORDS_AFTER = {
    "BY": {"ORDER", "GROUP", "PARTITION"},
    "FILTER": {")"},
    "MATERIALIZED": {"AS", "NOT"},
    "OVER": {")"},
    "SETS": {"GROUPING"},
}
"""Words that are functions before a parenthesis, except after one of these."""
_OPERATORS = {"ILIKE", "IS", "JOIN", "LIKE"}
"""Words that are functions before a parenthesis, except after an operand."""
_FUNCTIONS_WITHOUT_PARENTHESES = set(
    """
    current_catalog current_date current_role current_schema current_time current_timestamp current_user localtime
    localtimestamp session_user system_user
    """.upper().split()
)
_CALLS = "calls a function"
_UNCLEAR = "is not a plain SELECT"


def split_tokens(sql: str) -> Tokens:
    """Return the words, names, literals and marks of a statement, without comments."""
    return [each for each in _TOKEN.finditer(sql) if each.lastgroup is not None]


def describe_statement(tokens: Tokens) -> str:
    """Return the kind of a statement and its first table, without values."""
    kind = tokens[0][0].upper() if tokens and tokens[0].lastgroup == "word" else "a statement"
    for before, token in pairwise(tokens):
        if before.lastgroup == "unclear":  # it is unknown what is a literal from here on
            break
        if before[0].upper() in _BEFORE_A_TABLE and token.lastgroup in ("word", "name"):
            return f"{kind} … {token[0]}"
    return kind


def find_doubt(tokens: Tokens, dialect: str) -> str | None:
    """Return why a statement may be more than one SELECT that changes nothing, or None if it is plain.

    A SELECT without a table that calls a function may do anything. So may a function in place of a table.
    """
    if not tokens or tokens[0][0].upper() not in ("SELECT", "WITH"):
        return _UNCLEAR
    reader = _SelectReader(tokens, dialect)
    for index in range(len(tokens)):
        if (doubt := reader.read_token(index)) is not None:
            return doubt
    return reader.find_doubt_at_end()


class _Level:
    """The text between two parentheses, or outside of all: SELECTs, tables of a SELECT, or a part of one."""

    __slots__ = ("calls", "has_table", "in_tables", "is_select", "is_table", "is_with", "reads_table")

    def __init__(self, *, is_table: bool = False) -> None:
        self.is_table, self.in_tables = is_table, is_table
        """It takes the place of a table; what follows a comma or JOIN is a table."""
        self.is_select = self.is_with = False
        """A SELECT has begun; before that, the subqueries of a WITH."""
        self.calls = self.has_table = self.reads_table = False
        """The current SELECT calls a function; it has a table; one of the SELECTs of a UNION has one."""

    def begin_select(self) -> None:
        self.is_select, self.is_with, self.in_tables = True, False, False
        self.calls = self.has_table = False

    def add_table(self) -> None:
        self.has_table = self.reads_table = True

    @property
    def doubt(self) -> str | None:
        return _CALLS if self.calls and not self.has_table else None


class _SelectReader:
    """Reads one token after the other. `read_token` returns why the tokens so far are not part of a plain SELECT."""

    def __init__(self, tokens: Tokens, dialect: str) -> None:
        self._tokens, self._unclear = tokens, _UNCLEAR_MARKS.get(dialect, ())
        self._keys = _find_keys(tokens)
        self._levels = [_Level()]
        self._subqueries: dict[str, _Level] = {}  # of WITH, by their names
        self._tables: set[int] = set()  # opening parentheses in place of tables

    def read_token(self, index: int) -> str | None:
        kind, text = self._tokens[index].lastgroup, self._tokens[index][0]
        if kind == "unclear" or text.startswith(self._unclear):
            return _UNCLEAR
        if kind == "mark":
            return self._read_mark(index, text)
        if kind in ("word", "name"):
            return self._read_word(index, self._keys[index])
        return None

    def find_doubt_at_end(self) -> str | None:
        level = self._levels[-1]
        return level.doubt if len(self._levels) == 1 and level.is_select else _UNCLEAR

    # --- parentheses, and brackets of arrays

    def _read_mark(self, index: int, mark: str) -> str | None:
        level = self._levels[-1]
        if mark in ("(", "["):
            self._open_level(index)
        elif mark in (")", "]"):
            return self._close_level()
        elif mark == "," and level.in_tables:
            self._look_for_table(level, index + 1)
        elif mark == ";" and index + 1 < len(self._tokens):
            return _UNCLEAR
        return None

    def _open_level(self, index: int) -> None:
        level = _Level(is_table=index in self._tables)
        if self._levels[-1].is_with and (name := self._name_of_subquery(index)) is not None:
            self._subqueries[name] = level
        self._levels.append(level)
        if level.is_table:
            self._look_for_table(level, index + 1)

    def _close_level(self) -> str | None:
        level = self._levels.pop()
        if not self._levels:
            return _UNCLEAR
        around = self._levels[-1]
        if level.is_table and level.reads_table:
            around.add_table()
        if level.is_select:
            return level.doubt
        around.calls = around.calls or level.calls
        return None

    # --- words

    def _read_word(self, index: int, keyword: str) -> str | None:
        level, before, following = self._levels[-1], self._key_at(index - 1), self._key_at(index + 1)
        if keyword in _CHANGING and following != ".":
            return _UNCLEAR
        if keyword == "SELECT" or (keyword == "VALUES" and following == "("):
            doubt = level.doubt  # of the SELECT before a UNION
            level.begin_select()
            return doubt
        if keyword == "WITH" and (index == 0 or before == "("):
            level.is_with = True
        elif keyword == "FROM" and level.is_select and before != "DISTINCT" and (before, following) != ("ROWS", "("):
            level.in_tables = True
            self._look_for_table(level, index + 1)
        elif keyword == "JOIN" and level.in_tables and self._is_operator(index):
            self._look_for_table(level, index + 1)
        elif keyword in _AFTER_THE_TABLES:
            level.in_tables = False
        elif self._is_call(index, keyword):
            level.calls = True
        return None

    def _is_call(self, index: int, keyword: str) -> bool:
        before = self._key_at(index - 1)
        if keyword in _FUNCTIONS_WITHOUT_PARENTHESES or (before == "." and self._key_at(index - 2) == ")"):
            return True  # `(row).function` calls it with the row
        if self._key_at(index + 1) != "(" or keyword in _RESERVED or before in _BEFORE_A_TYPE:
            return False
        if self._levels[-1].is_with and before in ("WITH", "RECURSIVE", ","):
            return False  # the columns of a subquery
        if keyword in _OPERATORS:
            return not self._is_operator(index)
        return before not in _KEYWORDS_AFTER.get(keyword, ())

    def _is_operator(self, index: int) -> bool:
        """Return True for a word that follows an operand, and so is an operator."""
        before = self._key_at(index - 1)
        return before in ("", ")", "]") or (before.isidentifier() and before not in _RESERVED)

    def _look_for_table(self, level: _Level, index: int) -> None:
        """Note the table or view at `index`. A parenthesis has its own level, for a subquery or joined tables."""
        while self._key_at(index) in ("ONLY", "LATERAL"):
            index += 1
        if self._key_at(index) == "(":
            self._tables.add(index)
        if not self._is_name(index) or self._key_at(index) in _NO_TABLES:
            return
        subquery = self._subqueries.get(self._name_at(index)) if self._key_at(index + 1) != "." else None
        while self._key_at(index + 1) == ".":
            index += 2
        is_function = self._key_at(index + 1) in ("(", "FROM")  # ROWS FROM (…)
        if not is_function and (subquery is None or subquery.reads_table):
            level.add_table()

    def _name_of_subquery(self, index: int) -> str | None:
        """Return the name in `WITH name (columns) AS MATERIALIZED (…)`, whose last parenthesis opens at `index`."""
        index -= 1
        while self._tokens[index][0].upper() in ("MATERIALIZED", "NOT"):
            index -= 1
        if self._key_at(index) != "AS":
            return None
        index -= 1
        if self._key_at(index) == ")":
            while self._key_at(index) != "(" and index > 0:
                index -= 1
            index -= 1
        return self._name_at(index)

    def _is_name(self, index: int) -> bool:
        return index < len(self._tokens) and self._tokens[index].lastgroup in ("word", "name")

    def _name_at(self, index: int) -> str:
        return self._tokens[index][0].strip('"`').lower()

    def _key_at(self, index: int) -> str:
        return self._keys[index] if 0 <= index < len(self._keys) else ""


def _find_keys(tokens: Tokens) -> list[str]:
    """Return marks, and words that may be keywords in capitals; "" for others, such as labels after AS, and fields."""
    keys: list[str] = []
    for token in tokens:
        kind, text = token.lastgroup, token[0]
        is_label = bool(keys) and keys[-1] in (".", "AS")
        # Some letters beyond ASCII have capitals that are ASCII, but only in Python.
        keys.append(
            text if kind == "mark" else text.upper() if kind == "word" and text.isascii() and not is_label else ""
        )
    return keys
