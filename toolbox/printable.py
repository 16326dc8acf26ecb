"""Makes text from outside safe to print on a terminal and to write as one line of a log.

The text of a model, a tool, a document or a URL can contain characters that move the cursor, set the clipboard,
reverse the text direction or start a new line. Not here: shortening texts (`validation_text`).
"""

from __future__ import annotations

import logging
import re

# C0 and C1 controls, DEL, line separators, text direction marks, tags, lone surrogates.
_UNSAFE = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\U000e0000-\U000e007f\ud800-\udfff"
)
_FOR_TERMINAL = re.compile(f"[{_UNSAFE}]")
_FOR_LINE = re.compile(f"[\n{_UNSAFE}]")

LOGGERS = tuple(
    f"toolbox{name}"
    for name in (
        "",
        ".cli",
        ".container",
        ".dbos",
        ".events",
        ".execution",
        ".fastapi",
        ".limits",
        ".mcp",
        ".memory",
        ".models",
        ".openapi",
        ".rest",
        ".runs",
        ".services",
        ".sql",
        ".tools",
    )
)
"""The names of all loggers of the library."""


def for_terminal(text: str) -> str:
    r"""Return the text with visible control characters, such as `\x1b`; line breaks and tabs stay."""
    return _FOR_TERMINAL.sub(_visible, text.replace("\r\n", "\n"))


def for_line(text: str) -> str:
    r"""Return the text as one line with visible control characters; line breaks become `\n`."""
    return _FOR_LINE.sub(_visible, text)


def for_json(text: str) -> str:
    """Return equivalent JSON without characters that are unsafe on a terminal."""
    return _FOR_TERMINAL.sub(_escaped, text)


def _visible(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


def _escaped(found: re.Match[str]) -> str:
    number = ord(found[0])
    if number > 0xFFFF:
        number -= 0x10000
        return f"\\u{0xD800 + (number >> 10):04x}\\u{0xDC00 + (number & 0x3FF):04x}"
    return f"\\u{number:04x}"


class SingleLine(logging.Filter):
    """A log filter that makes each message one line without control characters."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Rewrite an unsafe message; return True for every record."""
        message = record.getMessage()
        if _FOR_LINE.search(message):
            record.msg, record.args = for_line(message), ()
        return True


_single_line = SingleLine()


def protect_logs() -> None:
    """Add the filter to all loggers of the library. Calling it again has no effect."""
    for name in LOGGERS:
        # To each logger: a filter does not see the records of child loggers.
        logging.getLogger(name).addFilter(_single_line)
