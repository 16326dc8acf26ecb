"""Reads the SQL of a statement: whether it is a plain SELECT, which changes nothing, and a short form for messages.

What cannot be read for certain is not plain. Not here: the statements of a session (`transaction_notes`).
"""

from __future__ import annotations

import re
from itertools import pairwise

_TOKEN = re.compile(
    r"""
      \s+ | --[^\n]* | /\*(?:(?!/\*).)*?\*/ | (?P<literal>'(?:[^'\\]|'')*')
    | (?P<name>"(?:[^"]|"")*"|`[^`]*`) | (?P<word>[A-Za-z_][\w$]*) | (?P<mark>\$\w*\$|/\*|.)
    """,
    re.VERBOSE | re.DOTALL,
)
_CHANGING = {"INTO", "INSERT", "UPDATE", "DELETE", "MERGE", "REPLACE", "CALL", "EXECUTE", "LOCK"}
_BEFORE_A_TABLE = {"FROM", "INTO", "JOIN", "TABLE", "UPDATE"}
_BEFORE_A_TYPE = {"AS", ":"}
_WITH_PARENTHESES = set(
    """
    all and any array as asc between by case cast desc distinct else end except exists filter from group grouping having
    ilike in intersect is join lateral like limit materialized not null offset on or order over partition recursive row
    select sets some then union using values when where with within
    """.upper().split()
)
"""Words that may stand before a parenthesis and are not functions."""
_FUNCTIONS_WITHOUT_PARENTHESES = set(
    """
    current_catalog current_date current_role current_schema current_time current_timestamp current_user localtime
    localtimestamp session_user system_user
    """.upper().split()
)


def describe_statement(sql: str) -> str:
    """Return the kind of a statement and its first table, without values."""
    tokens = _split_tokens(sql)
    kind = tokens[0][0].upper() if tokens and tokens[0].lastgroup == "word" else "a statement"
    for before, token in pairwise(tokens):
        if _is_unreadable(before[0]):
            break
        if before[0].upper() in _BEFORE_A_TABLE and token.lastgroup in ("word", "name"):
            return f"{kind} … {token[0]}"
    return kind


def is_plain_select(sql: str) -> bool:
    """Return True for the text of one SELECT that changes nothing.

    A SELECT without a table that calls a function may do anything. So may a function in place of a table.
    """
    tokens = _split_tokens(sql)
    if not tokens or tokens[0][0].upper() not in ("SELECT", "WITH"):
        return False
    reader = _SelectReader(tokens)
    return all(reader.read_token(index) for index in range(len(tokens))) and reader.is_complete


def _split_tokens(sql: str) -> list[re.Match[str]]:
    """Return the words, names, literals and marks of a statement, without comments."""
    return [each for each in _TOKEN.finditer(sql) if each.lastgroup is not None]


def _is_unreadable(mark: str) -> bool:
    """Return True for a mark after which it is unknown what is a literal, such as a quote without an end."""
    return mark in ("'", '"', "`", "\\", "/*") or (len(mark) > 1 and mark[0] == "$")


class _Level:
    """What stands between two parentheses, or outside of all: a SELECT, or a part of one."""

    __slots__ = ("calls", "has_table", "is_select")

    def __init__(self, *, is_select: bool = False) -> None:
        self.is_select, self.calls, self.has_table = is_select, False, False

    @property
    def is_plain(self) -> bool:
        return self.has_table or not (self.is_select and self.calls)


class _SelectReader:
    """Reads one token after the other. `read_token` returns False for one that is not part of a plain SELECT."""

    def __init__(self, tokens: list[re.Match[str]]) -> None:
        self._tokens = tokens
        self._levels = [_Level()]

    @property
    def is_complete(self) -> bool:
        return len(self._levels) == 1 and self._levels[0].is_plain

    def read_token(self, index: int) -> bool:
        kind, text = self._tokens[index].lastgroup, self._tokens[index][0]
        if kind == "mark":
            return self._read_mark(text, is_last=index + 1 == len(self._tokens))
        if kind == "literal":
            return True
        is_keyword = kind == "word" and self._text_at(index - 1) != "."
        return self._read_word(index, text.upper() if is_keyword else "")

    def _read_mark(self, mark: str, *, is_last: bool) -> bool:
        if _is_unreadable(mark) or (mark == ";" and not is_last):
            return False
        if mark == "(":
            self._levels.append(_Level())
        elif mark == ")":
            return len(self._levels) > 1 and self._levels.pop().is_plain
        return True

    def _read_word(self, index: int, keyword: str) -> bool:
        level, following = self._levels[-1], self._text_at(index + 1)
        if keyword in _CHANGING and following != ".":
            return False
        if keyword == "SELECT":
            self._levels[-1] = _Level(is_select=True)
            return level.is_plain  # of the SELECT before a UNION
        if keyword == "FROM" and level.is_select:
            level.has_table = level.has_table or self._has_table_at(index + 1)
        elif keyword in _FUNCTIONS_WITHOUT_PARENTHESES or (
            following == "("
            and keyword not in _WITH_PARENTHESES
            and self._text_at(index - 1).upper() not in _BEFORE_A_TYPE
        ):
            self._note_call()
        return True

    def _note_call(self) -> None:
        for level in reversed(self._levels):
            level.calls = True
            if level.is_select:
                return

    def _has_table_at(self, index: int) -> bool:
        """Return True if a table, a view or a subquery stands here. A subquery has its own level."""
        while self._text_at(index).upper() in ("ONLY", "LATERAL"):
            index += 1
        while self._text_at(index + 1) == ".":
            index += 2
        is_name = index < len(self._tokens) and self._tokens[index].lastgroup in ("word", "name")
        return self._text_at(index) == "(" or (is_name and self._text_at(index + 1) != "(")

    def _text_at(self, index: int) -> str:
        return self._tokens[index][0] if 0 <= index < len(self._tokens) else ""
