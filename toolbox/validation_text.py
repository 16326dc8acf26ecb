"""Texts that errors may show: pydantic's faults, kept short whatever the value was, and texts without secrets.

Not here: the errors themselves (`errors`), and what counts as a secret of a request (`rest`, `models`).
"""

from __future__ import annotations

import base64
import re
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError

SHOWN = 100
"""Faults that are listed; of more, how many they are."""
COUNTED = 10_000
"""Faults from which on none is listed: to build the list would cost more than reading the value did."""
HIDDEN = "***"
LONGEST = 500
"""Characters of a path or a message: either may hold what was sent."""
SHORTEST_SECRET = 4
"""Characters from which on a text counts as a secret."""
PIECE = 8
"""Bytes of a secret that are enough to recognize it by."""
LONGEST_CAUSE = 20_000
"""Characters of a cause's text that are searched for secrets; a longer one is removed."""


def faults_of(error: ValidationError) -> list[tuple[str, str]]:
    """The faults, as (path, message)."""
    count = error.error_count()
    if count > COUNTED:
        return [("", f"{count} values in it are wrong")]
    faults = [
        (brief(".".join(map(str, each["loc"]))), brief(each["msg"]))
        for each in error.errors(include_url=False, include_context=False, include_input=False)[:SHOWN]
    ]
    return [*faults, ("", f"and {count - SHOWN} more")] if count > SHOWN else faults


def brief(text: str, longest: int = LONGEST) -> str:
    """The beginning of `text`, where it is too long to be shown."""
    return text if len(text) <= longest else f"{text[:longest]}…"


def without_secrets(text: str, secrets: Collection[str]) -> str:
    """Return the text with each secret, and each part of one that can be recognized, replaced by `***`.

    A secret is also found percent-encoded, escaped as in JSON, HTML or Python, and in base64. Secrets of fewer than
    `SHORTEST_SECRET` characters are ignored: they would hide ordinary words.
    """
    sought = _Sought(secrets)
    if not sought.longest or not text:
        return text
    plain = [character.encode("utf-8", "surrogatepass") for character in text]
    hidden = sought.positions(plain, list(range(len(text) + 1)))
    if "%" in text or "\\" in text or "&" in text:
        hidden |= sought.positions(*_unescaped(text))
    if not hidden:
        return text
    shown: list[str] = []
    for at, character in enumerate(text):
        if at not in hidden:
            shown.append(character)
        elif at - 1 not in hidden:
            shown.append(HIDDEN)
    return "".join(shown)


def hide_secrets(error: BaseException, secrets: Collection[str]) -> None:
    """Hide these secrets in the error's arguments, attributes and notes; a cause whose text shows one is removed."""
    error.args = tuple(_hidden_in(each, secrets) for each in error.args)
    for name, value in list(vars(error).items()):
        setattr(error, name, _hidden_in(value, secrets))
    shown: BaseException = error
    while (below := shown.__cause__ or shown.__context__) is not None:
        text = f"{below!r} {below}"
        if len(text) > LONGEST_CAUSE or without_secrets(text, secrets) != text:
            shown.__cause__ = shown.__context__ = None
            return
        shown = below


def _hidden_in(value: Any, secrets: Collection[str]) -> Any:
    if isinstance(value, str):
        return without_secrets(value, secrets)
    if type(value) in (list, tuple):
        return type(value)(_hidden_in(each, secrets) for each in value)
    return value


class _Sought:
    """The secrets to look for, as pieces of `PIECE` bytes: a text that was cut may hold only a part of a secret."""

    def __init__(self, secrets: Collection[str]) -> None:
        self._pieces: dict[int, set[bytes]] = {}
        self._beginnings: dict[int, set[bytes]] = {}
        self.longest = 0
        for secret in {each for each in secrets if len(each) >= SHORTEST_SECRET}:
            for spelled in _spellings(secret):
                self._add(spelled)

    def _add(self, secret: bytes) -> None:
        length = min(PIECE, len(secret))
        self.longest = max(self.longest, length)
        pieces = self._pieces.setdefault(length, set())
        pieces.update(secret[at : at + length] for at in range(len(secret) - length + 1))
        for short in range(SHORTEST_SECRET, length):
            self._beginnings.setdefault(short, set()).add(secret[:short])

    def positions(self, characters: list[bytes], places: list[int]) -> set[int]:
        """Return the places in the text that belong to a secret.

        `characters` are what the text says, as UTF-8; each stands at `places[i]` up to `places[i + 1]` of the text.
        """
        whole = b"".join(characters)
        owner = [at for at, character in enumerate(characters) for _ in character]
        covered: set[int] = set()
        for length, pieces in self._pieces.items():
            for start in range(len(whole) - length + 1):
                if whole[start : start + length] in pieces:
                    covered.update(owner[start : start + length])
        ends = [len(whole), *(match.start() for match in re.finditer("…".encode(), whole))]
        for length, beginnings in self._beginnings.items():
            for end in ends:
                if end >= length and whole[end - length : end] in beginnings:
                    covered.update(owner[end - length : end])
        return {place for at in covered for place in range(places[at], places[at + 1])}


def _spellings(secret: str) -> Iterator[bytes]:
    """Yield the forms in which a secret is looked for; escapes are undone in the text instead."""
    plain = secret.encode("utf-8", "surrogatepass")
    yield plain
    if " " in secret:
        yield plain.replace(b" ", b"+")
    if not PIECE <= len(plain) <= 4096:
        return
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        # Text before the secret moves it by up to two bytes; characters that also depend on its neighbours are cut.
        for before, cut in ((0, 0), (1, 2), (2, 3)):
            encoded = encode(bytes(before) + plain).rstrip(b"=")
            complete = (before + len(plain)) * 8 // 6
            yield encoded[cut:complete]


_ESCAPE = re.compile(
    r"(?:%[0-9A-Fa-f]{2})|\\u[dD][89abAB][0-9A-Fa-f]{2}\\u[dD][c-fC-F][0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}"
    r"|\\x[0-9A-Fa-f]{2}|\\[\"'\\/bfnrt]|&(?:amp|lt|gt|quot|apos|#[0-9]{1,7}|#[xX][0-9A-Fa-f]{1,6});"
)
_SHORT_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


def _unescaped(text: str) -> tuple[list[bytes], list[int]]:
    """Return what a text says without its escapes, as `_Sought.positions` takes it."""
    characters: list[bytes] = []
    places: list[int] = []
    at = 0
    while at < len(text):
        match = _ESCAPE.match(text, at)
        places.append(at)
        if match is None:
            characters.append(text[at].encode("utf-8", "surrogatepass"))
            at += 1
        else:
            characters.append(_meaning(match[0]))
            at = match.end()
    return characters, [*places, len(text)]


def _meaning(escape: str) -> bytes:
    if escape[0] == "%":
        return bytes.fromhex(escape[1:])
    if escape[0] == "&":
        import html  # its table of names is large, and only errors need it

        return html.unescape(escape).encode("utf-8", "surrogatepass")
    if escape[1] == "x":
        return bytes.fromhex(escape[2:])
    if escape[1] != "u":
        return _SHORT_ESCAPES.get(escape[1], escape[1]).encode()
    units = b"".join(int(unit, 16).to_bytes(2, "big") for unit in escape.split("\\u")[1:])
    return units.decode("utf-16-be", "surrogatepass").encode("utf-8", "surrogatepass")
