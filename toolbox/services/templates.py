"""Message templates: `{name}` is a value, `{{` and `}}` are braces; parsed once, rendered per call.

Pure. A value is never read as a template. Not here: which names a template may use (`planning`).
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
    """A place in a template where the value of this name goes."""

    name: str


@dataclass(frozen=True, slots=True)
class Template:
    """A parsed template: texts and variables in order."""

    parts: tuple[str | Variable, ...]

    @property
    def variables(self) -> frozenset[str]:
        """The names it uses."""
        return frozenset(part.name for part in self.parts if isinstance(part, Variable))

    def render(self, values: Mapping[str, object]) -> str:
        """The text, with each variable's value from `values`."""
        return "".join([part if isinstance(part, str) else text_of(values[part.name]) for part in self.parts])


def parse(text: str) -> tuple[Template, list[str]]:
    """The template that `text` is, and what is wrong with it, a sentence each (none: it is well-formed)."""
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
            faults.append(f"a lone {token[0]!r} at {place!r}: a variable is written {{name}}, a brace is doubled")
    literal.append(text[position:])
    parts.append("".join(literal))
    return Template(tuple(part for part in parts if part != "")), faults


def doubled_names(text: str, names: frozenset[str]) -> list[str]:
    """Those of `names` that `text` holds as `{{name}}`, which renders as braces and not as the value."""
    return [name for name in re.findall(r"(?<!\{)\{\{\s*([A-Za-z_]\w*)\s*\}\}(?!\})", text) if name in names]


def text_of(value: object) -> str:
    """A value as it stands in a prompt: scalars, enums and dates as text, anything else as compact JSON."""
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
