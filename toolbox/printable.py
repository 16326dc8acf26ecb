"""Makes text from outside safe to print on a terminal and to write as one line of a log.

A model, a tool's result, a document or a request's path may hold characters that move the cursor, set the clipboard,
reorder what is shown or begin a new line.
"""

from __future__ import annotations

import logging
import re

# C0 and C1 controls, DEL, line separators, what changes the direction of text, tags, lone surrogates.
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
        ".events",
        ".execution",
        ".fastapi",
        ".mcp",
        ".memory",
        ".openapi",
        ".rest",
        ".services",
        ".sql",
        ".tools",
    )
)
"""Every logger of the library."""


def for_terminal(text: str) -> str:
    r"""Return the text with its line breaks and tabs; other control characters become visible, as `\x1b`."""
    return _FOR_TERMINAL.sub(_visible, text.replace("\r\n", "\n"))


def for_line(text: str) -> str:
    r"""Return the text as one line: line breaks become `\n`, other control characters visible too."""
    return _FOR_LINE.sub(_visible, text)


def for_json(text: str) -> str:
    """Return JSON with the same meaning in which no character is unsafe on a terminal."""
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
    """Keeps what a record was made of from beginning a line of its own, or from moving a terminal's cursor."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass; rewrite the message of an unsafe one."""
        message = record.getMessage()
        if _FOR_LINE.search(message):
            record.msg, record.args = for_line(message), ()
        return True


_single_line = SingleLine()


def protect_logs() -> None:
    """Make each record of every logger of the library one line."""
    for name in LOGGERS:
        # Of each, because a filter does not see the records of the loggers below. Added once, however often.
        logging.getLogger(name).addFilter(_single_line)
