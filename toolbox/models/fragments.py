"""The argument text of one call: what a fragment of it says, and what all of them mean together.

Not here: which call a fragment belongs to (`accumulator`), the repairs of one text (`json_text`).
"""

from __future__ import annotations

from itertools import pairwise

from ..json_text import arguments_text, compact_json, strict_arguments


def argument_text(arguments: object) -> str:
    """The text of a fragment; some servers send an object."""
    if arguments is None:
        return ""
    return arguments if isinstance(arguments, str) else compact_json(arguments)


def can_only_continue(arguments: object) -> bool:
    """Whether this piece of arguments can only continue others."""
    text = argument_text(arguments).lstrip()
    return bool(text) and text[0] not in '{"n'


def settled(fragments: list[str]) -> str:
    """The argument text to be used: a JSON object where the fragments mean one, else as it came."""
    text = whole_characters("".join(fragments))
    try:
        return arguments_text(text)
    except ValueError:
        pieces = [piece for piece in fragments if piece.strip()]
        if len(pieces) < 2 or strict_arguments(pieces[-1]) is None:
            return text
        cumulative = all(later.startswith(piece) for piece, later in pairwise(pieces))
        return pieces[-1] if cumulative or pieces[-1].startswith("".join(pieces[:-1])) else text


def whole_characters(text: str) -> str:
    """`text` with the two halves of a character joined, and lone halves replaced."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
