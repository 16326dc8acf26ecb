"""Reads docstrings: the first paragraph, and the parameters' descriptions (Google, NumPy or Sphinx style).

The parsing is done by `docstring_parser`.
"""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import dataclass, field

SECTIONS = frozenset({"Args:", "Arguments:", "Parameters:", "Params:", "Returns:", "Raises:", "Yields:"})
"""Headings that may begin a Google-style docstring without a summary."""


@dataclass(frozen=True, slots=True)
class Docstring:
    """The parts of a docstring: the first paragraph (or None), and descriptions by parameter name."""

    first_paragraph: str | None = None
    parameters: dict[str, str] = field(default_factory=dict)


def read_docstring(text: str | None) -> Docstring:
    """Parse a docstring. Never raises."""
    if not text or not text.strip():
        return Docstring()
    import docstring_parser

    cleaned = inspect.cleandoc(text.replace("\r\n", "\n"))
    # docstring_parser treats a section at the beginning as the description.
    first, _, rest = cleaned.partition("\n")
    begins_with_section = first.strip() in SECTIONS
    if begins_with_section and not rest.startswith((" ", "-")):  # the indentation of the first line is unknown
        cleaned = f"{first}\n{textwrap.indent(rest, '    ')}"
    try:
        parsed = docstring_parser.parse(f"…\n\n{cleaned}" if begins_with_section else cleaned)
    except docstring_parser.ParseError:
        return Docstring(_first_paragraph(cleaned))
    parameters = {
        each.arg_name.lstrip("*"): " ".join(each.description.split())
        for each in parsed.params
        if each.description and each.args[:1] != ["attribute"]
    }
    return Docstring(None if begins_with_section else _first_paragraph(parsed.description), parameters)


def _first_paragraph(text: str | None) -> str | None:
    return text.strip().split("\n\n", 1)[0].rstrip() if text and text.strip() else None
