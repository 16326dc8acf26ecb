"""Message templates: texts with `{name}`, which are parsed once and rendered for each call.

Values are never parsed as templates. Not here: what a method's templates may name (`planning`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from uuid import UUID

from pydantic_core import to_json

_TOKEN = re.compile(r"\{\{|\}\}|\{([A-Za-z_]\w*)\}|[{}]")


@dataclass(frozen=True, slots=True)
class Variable:
    """A placeholder for the value of this name."""

    name: str


@dataclass(frozen=True, slots=True)
class Template:
    """A parsed template: texts and variables in order."""

    parts: tuple[str | Variable, ...]

    @property
    def variables(self) -> frozenset[str]:
        """The names in the template."""
        return frozenset(part.name for part in self.parts if isinstance(part, Variable))

    def render(self, values: Mapping[str, object]) -> str:
        """Return the text with the variables replaced by `values`."""
        return "".join([part if isinstance(part, str) else text_of(values[part.name]) for part in self.parts])


def parse(text: str) -> tuple[Template, list[str]]:
    """Parse a template. Returns it with its mistakes, one text each; the list is empty if it is valid."""
    parts: list[str | Variable] = []
    faults: list[str] = []
    literal: list[str] = []
    position = 0
    for token in _TOKEN.finditer(text):
        literal.append(text[position : token.start()])
        position = token.end()
        if token[1] is not None:
            parts += ["".join(literal), Variable(token[1])]
            literal = []
        elif token[0] in ("{{", "}}"):
            literal.append(token[0][0])
        else:
            place = text[token.start() : token.start() + 20]
            faults.append(f"a single brace {token[0]!r} at {place!r}")
    literal.append(text[position:])
    parts.append("".join(literal))
    return Template(tuple(part for part in parts if part != "")), faults


def doubled_names(text: str, names: frozenset[str]) -> list[str]:
    """Return the names that `text` contains as `{{name}}`, which renders as braces instead of the value."""
    return [name for name in re.findall(r"(?<!\{)\{\{\s*([A-Za-z_]\w*)\s*\}\}(?!\})", text) if name in names]


def text_of(value: object) -> str:
    """Return a value as text for a prompt: scalars, enums and dates as text, all other values as compact JSON."""
    match value:
        case str() if type(value) is str:
            return value
        case Enum():
            return str(value.value)
        case str() | bool() | int() | float() | Decimal() | UUID():
            return str(value)
        case datetime() | date() | time():
            return value.isoformat()
        case timedelta():
            return str(value)
        case _:
            return to_json(value, inf_nan_mode="constants").decode()
