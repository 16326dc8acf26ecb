"""Texts that are safe to show: short validation errors of pydantic, texts without secrets, without control characters.

The text of a model, a tool, a document or a URL can contain characters that move the cursor, set the clipboard,
reverse the text direction or start a new line. Not here: the errors (`errors`), the secrets of a request (`rest`,
`models`).
"""

from __future__ import annotations

import base64
import json
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from difflib import get_close_matches
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError


SHOWN = 100
"""Number of validation errors that are listed; the rest is only counted."""
COUNTED = 10_000
"""Above this number of validation errors, none is listed: the list would cost more than the validation."""
HIDDEN = "***"
SAFE_HEADERS = frozenset(
    {"accept", "accept-encoding", "accept-language", "cache-control", "connection", "content-encoding"}
    | {"content-length", "content-type", "date", "etag", "expires", "host", "last-modified", "retry-after"}
    | {"server", "traceparent", "tracestate", "transfer-encoding", "user-agent", "vary"}
)
"""Well-known headers that hold no secret, in lower case."""
LONGEST = 500
"""Maximum characters of a path or message: both may contain input."""
SHORTEST_SECRET = 4
"""Minimum characters of a secret."""
PIECE = 8
"""Bytes of a secret that are enough to recognize it."""
LONGEST_CAUSE = 20_000
"""Maximum characters of a cause that are searched for secrets; longer causes are removed."""


# --- validation errors and secrets


def faults_of(error: ValidationError) -> list[tuple[str, str]]:
    """Return the validation errors as (path, message) pairs."""
    count = error.error_count()
    if count > COUNTED:
        return [("", f"{count} values are invalid")]
    faults = [
        (brief(".".join(map(str, each["loc"]))), brief(each["msg"]))
        for each in error.errors(include_url=False, include_context=False, include_input=False)[:SHOWN]
    ]
    return [*faults, ("", f"and {count - SHOWN} more")] if count > SHOWN else faults


def faults_text(faults: Iterable[tuple[str, str]]) -> str:
    """Return (path, message) pairs in one line."""
    return "; ".join([f"{path}: {message}" if path else message for path, message in faults])


def brief(text: str, longest: int = LONGEST) -> str:
    """Return `text`, cut to `longest` characters and `…` if it is longer."""
    return text if len(text) <= longest else f"{text[:longest]}…"


def is_text(given: str) -> bool:
    """Return True for a text that a database can store: without NUL characters and lone surrogates."""
    return "\0" not in given and not any("\ud800" <= each <= "\udfff" for each in given)


def did_you_mean(name: str, known: Iterable[str], form: str = "{!r}") -> str:
    """Return `; did you mean …?` with the most similar of the known names, written in `form`; "" if none is similar."""
    near = get_close_matches(name, tuple(known), n=1)
    return f"; did you mean {form.format(near[0])}?" if near else ""


def without_secrets(text: str, secrets: Collection[str]) -> str:
    """Return the text with each secret, and each part of one that can be recognized, replaced by `***`.

    Secrets are also found percent-encoded, escaped as in JSON, HTML or Python, and in base64. Secrets with fewer than
    `SHORTEST_SECRET` characters are ignored: they would hide ordinary words.
    """
    return _SecretSearch(secrets).hide_in(text)


def hide_secrets(error: BaseException, secrets: Collection[str]) -> None:
    """Hide the secrets in the arguments, attributes and notes of an error; remove causes that contain one."""
    sought = _SecretSearch(secrets)
    error.args = tuple(_hide_in(each, sought) for each in error.args)
    for name, value in list(vars(error).items()):
        setattr(error, name, _hide_in(value, sought))
    shown: BaseException = error
    seen = {id(error)}  # an error may be its own cause
    while (below := shown.__cause__ or shown.__context__) is not None and id(below) not in seen:
        text = f"{below!r} {below}"
        if len(text) > LONGEST_CAUSE or sought.hide_in(text) != text:
            shown.__cause__ = shown.__context__ = None
            return
        shown = below
        seen.add(id(below))


def _hide_in(value: Any, sought: _SecretSearch) -> Any:
    if isinstance(value, str):
        return sought.hide_in(value)
    if type(value) in (list, tuple):
        return type(value)(_hide_in(each, sought) for each in value)
    return value


class _SecretSearch:
    """Finds secrets in texts that others wrote, such as the reply of a server that repeats the request.

    Such a text may have cut a secret or escaped it. Therefore a secret is sought as pieces of `PIECE` bytes, each of
    which is enough to recognize it, and also in base64; a shorter beginning counts at the end of the text, or before
    `…`, where it was cut. Escapes are removed from the text instead, because there are too many ways to write them.
    """

    def __init__(self, secrets: Collection[str]) -> None:
        spelled = {each for secret in secrets if len(secret) >= SHORTEST_SECRET for each in _spell(secret)}
        self._pieces = {secret[at : at + PIECE] for secret in spelled for at in range(max(len(secret) - PIECE, 0) + 1)}
        self._lengths = {len(piece) for piece in self._pieces}
        self._beginnings = {secret[:length] for secret in spelled for length in range(SHORTEST_SECRET, PIECE)}

    def hide_in(self, text: str) -> str:
        """Return the text with the secrets replaced by `***`."""
        if not self._pieces or not text:
            return text
        is_hidden = bytearray(len(text))
        self._mark_characters([text], is_hidden)
        if len(parts := _ESCAPE.split(text)) > 1:
            self._mark_characters(parts, is_hidden)
        if not any(is_hidden):
            return text
        runs = groupby(zip(is_hidden, text, strict=True), lambda each: each[0])
        return "".join(HIDDEN if hide else "".join([each for _, each in run]) for hide, run in runs)

    def _mark_characters(self, parts: Sequence[str], is_hidden: bytearray) -> None:
        """Mark the characters of a text that belong to a secret. Every second one of its parts is an escape."""
        characters: list[str] = []
        for at, part in enumerate(parts):
            characters += [part] if at % 2 else part
        encoded = [_encode_character(each) for each in characters]
        found = self._find_bytes(b"".join(encoded))
        start = first = 0  # of a character: in the text, and in its bytes
        for character, its_bytes in zip(characters, encoded, strict=True) if any(found) else ():
            if any(found[first : first + len(its_bytes)]):
                is_hidden[start : start + len(character)] = bytes([1]) * len(character)
            start, first = start + len(character), first + len(its_bytes)

    def _find_bytes(self, whole: bytes) -> bytearray:
        """Return 1 for each byte that belongs to a secret, and 0 for the others."""
        found = bytearray(len(whole))
        for length in self._lengths:
            mark = bytes([1]) * length
            for at in range(len(whole) - length + 1):
                if whole[at : at + length] in self._pieces:
                    found[at : at + length] = mark
        for end in (len(whole), *(match.start() for match in re.finditer("…".encode(), whole))):
            for start in range(max(end - PIECE, 0), end):
                if whole[start:end] in self._beginnings:
                    found[start:end] = bytes([1]) * (end - start)
        return found


def _spell(secret: str) -> Iterator[bytes]:
    """Yield the encodings of a secret; escapes are removed from the text instead."""
    plain = secret.encode("utf-8", "surrogatepass")
    yield plain
    if " " in secret:
        yield plain.replace(b" ", b"+")
    if not PIECE <= len(plain) <= 4096:
        return
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        # Text before the secret shifts it by up to two bytes; characters that depend on other bytes are cut.
        for before, cut in ((0, 0), (1, 2), (2, 3)):
            yield encode(bytes(before) + plain)[cut : (before + len(plain)) * 8 // 6]


_ESCAPE = re.compile(
    r"(%[0-9A-Fa-f]{2}|\\u[dD][89abAB][0-9A-Fa-f]{2}\\u[dD][c-fC-F][0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}"
    r"|\\x[0-9A-Fa-f]{2}|\\[\"'\\/bfnrt]|&(?:amp|lt|gt|quot|apos|#[0-9]{1,7}|#[xX][0-9A-Fa-f]{1,6});)"
)


def _encode_character(character: str) -> bytes:
    """Return a character, or what an escape stands for, in UTF-8."""
    if len(character) > 1:
        if character.startswith(("%", "\\x")):
            return bytes.fromhex(character[-2:])
        if character.startswith("&"):
            import html  # imported late: its table of names is large and only errors need it

            character = html.unescape(character)
        else:
            character = "'" if character == "\\'" else json.loads(f'"{character}"')
    return character.encode("utf-8", "surrogatepass")


# --- errors of stores


def describe_store_error(error: BaseException) -> str:
    """Return the type and the text of an error of a store, without the statement and its values, such as documents."""
    inner = error_of_database(error)
    # PostgreSQL's error continues with a detail, which can be a whole row.
    text = str(error) if inner is None else str(inner).split("\n", 1)[0]
    return f"{type(error).__name__}: {text}"


def error_of_database(error: BaseException) -> BaseException | None:
    """Return the error of the database that an error of SQLAlchemy is about; None for other errors."""
    return getattr(error, "orig", None)


# --- characters that a terminal or a log must not get


# Control characters, line separators and lone surrogates.
_CONTROLS = "\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff"
# Characters without a shape: Unicode's category Cf (direction marks, tags, soft hyphens), variation selectors, and
# fillers, which are letters without a shape. Joiners (U+200C, U+200D) stay: emoji and several scripts need them.
_SHAPELESS = (
    "\xad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200e\u200f"
    "\u202a-\u202e\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U000110bd\U000110cd"
    "\U00013430-\U0001343f\U00016fe4\U0001bca0-\U0001bca3\U0001d159\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
_UNSEEN = _CONTROLS + _SHAPELESS
UNSEEN = f"[{_UNSEEN}]"
"""A regular expression for a character that a person does not see, or that controls how others are shown.

It does not match line breaks, tabs and joiners.
"""
# Texts of models are full of emoji with U+FE0F: to a terminal and a log, it is a part of the picture.
_NO_EMOJI = "(?<![\ufe0e\ufe0f])"
_FOR_TERMINAL = re.compile(f"[{_UNSEEN}]{_NO_EMOJI}")
_FOR_LINE = re.compile(f"[\n{_UNSEEN}]{_NO_EMOJI}")

LOGGERS = tuple(
    f"toolbox{name}"
    for name in (
        "",
        ".cli",
        ".container",
        ".events",
        ".execution",
        ".fastapi",
        ".interceptors",
        ".limits",
        ".mcp",
        ".memory",
        ".models",
        ".openapi",
        ".rest",
        ".retrieval",
        ".runs",
        ".services",
        ".sql",
        ".tools",
    )
)
"""The names of all loggers of the library."""


def printable(text: str) -> str:
    """Return `text` with lone surrogates escaped, because UTF-8 cannot encode them."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def for_terminal(text: str) -> str:
    r"""Return the text with its unseen characters as escapes, such as `\x1b`; line breaks and tabs stay."""
    return _FOR_TERMINAL.sub(_show_escaped, text.replace("\r\n", "\n"))


def for_line(text: str) -> str:
    r"""Return the text as one line with its unseen characters as escapes; line breaks become `\n`."""
    return _FOR_LINE.sub(_show_escaped, text)


def for_json(text: str) -> str:
    """Return equivalent JSON without characters that are unsafe on a terminal."""
    return _FOR_TERMINAL.sub(_write_for_json, text)


def _show_escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


def _write_for_json(found: re.Match[str]) -> str:
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
