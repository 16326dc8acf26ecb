"""Reads a docstring: its first paragraph, and what it says of each parameter (Google, NumPy or Sphinx style).

The reading is done by `docstring_parser`.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Docstring:
    """A docstring as read; None and empty where it says nothing."""

    first_paragraph: str | None = None
    parameters: dict[str, str] = field(default_factory=dict)


def read_docstring(text: str | None) -> Docstring:
    """What `text` says; never raises."""
    if not text or not text.strip():
        return Docstring()
    import docstring_parser

    cleaned = inspect.cleandoc(text)
    try:
        parsed = docstring_parser.parse(cleaned)
    except docstring_parser.ParseError:
        return Docstring(_first_paragraph(cleaned))
    parameters = {
        each.arg_name.lstrip("*"): " ".join(each.description.split())
        for each in parsed.params
        if each.description and each.args[:1] != ["attribute"]
    }
    return Docstring(_first_paragraph(parsed.description), parameters)


def _first_paragraph(text: str | None) -> str | None:
    return text.strip().split("\n\n", 1)[0].rstrip() if text and text.strip() else None
