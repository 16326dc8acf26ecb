"""JSON texts that models write: strict reading, and the few repairs a tool call's arguments are given.

Not here: what a tool makes of its arguments (`tools.codec`), how a reply's fragments are put together (`models`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from pydantic_core import from_json

_TRAILING_COMMA = re.compile(r",(?=\s*[}\]])")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_SPACE = " \t\r\n"


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_decoder = json.JSONDecoder(parse_constant=_refuse)


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text, by RFC 8259: no NaN, nothing after the value. Raises `ValueError`.

    What the quick parser is too strict for, depth and lone surrogates, is left to the standard library's.
    """
    try:
        return from_json(text, allow_inf_nan=False)
    except (ValueError, TypeError) as refusal:
        try:
            return json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError):
            raise ValueError(str(refusal)) from None


def strict_arguments(text: str) -> dict[str, Any] | None:
    """The object that a call's argument text plainly is, or None: nothing is repaired.

    Empty, blank and `null` text are no arguments, `{}`; an object encoded once more as a string is that object.
    """
    try:
        value = parse_json(text)
    except ValueError:
        return None if text.strip() else {}
    if isinstance(value, str):
        if value.strip() in ("", "null"):
            return {}
        try:
            value = parse_json(value)
        except ValueError:
            return None
    if value is None:
        return {}
    return value if isinstance(value, dict) else None


def read_arguments(text: str) -> dict[str, Any]:
    """The arguments of a tool call. Raises `ValueError` with what is wrong.

    Repaired, and nothing else: what `strict_arguments` reads, trailing commas, a leading `{}` before the object, the
    same object twice.
    """
    found = strict_arguments(text)
    if found is None:
        found = _repaired(text)
    if found is not None:
        return found
    try:
        value = parse_json(text)
    except ValueError as error:
        raise ValueError(f"not a JSON object: {error}") from None
    raise ValueError(f"a JSON object is needed, this is {_kind(value)}")


def object_text(text: str) -> str:
    """`text` if it is a JSON object, else the object that it means, else `{}`: what may go into a history.

    A server that finds broken arguments in the history refuses every later request.
    """
    try:
        if isinstance(parse_json(text), dict):
            return text
    except ValueError:
        pass
    try:
        return compact_json(read_arguments(text))
    except ValueError:
        return "{}"


def compact_json(value: Mapping[str, Any] | Any) -> str:
    """`value` as JSON without spaces, non-ASCII kept. Lone surrogates, which UTF-8 cannot say, are escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text if text.isascii() or _encodable(text) else json.dumps(value, separators=(",", ":"))


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _repaired(text: str) -> dict[str, Any] | None:
    objects = _objects(text)
    if objects is None:
        objects = _objects(_without_trailing_commas(text))
    if not objects:
        return None
    rest = objects[1:] if len(objects) > 1 and not objects[0] else objects
    first = rest[0]
    return first if all(other == first for other in rest[1:2]) and len(rest) <= 2 else None


def _objects(text: str) -> list[dict[str, Any]] | None:
    """The JSON objects that stand one after the other in `text`; None when there is anything else."""
    objects: list[dict[str, Any]] = []
    position = 0
    while rest := text[position:].lstrip(_SPACE):
        if len(objects) == 3:
            return None
        try:
            value, length = _decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, dict):
            return None
        objects.append(value)
        position = len(text) - len(rest) + length
    return objects


def _without_trailing_commas(text: str) -> str:
    """`text` without the commas that stand before a closing bracket, outside of strings."""
    pieces: list[str] = []
    position = 0
    for string in _STRING.finditer(text):
        pieces += (_TRAILING_COMMA.sub("", text[position : string.start()]), string.group())
        position = string.end()
    pieces.append(_TRAILING_COMMA.sub("", text[position:]))
    return "".join(pieces)


def _kind(value: object) -> str:
    match value:
        case bool():
            return "a boolean"
        case str():
            return "a string"
        case int() | float():
            return "a number"
        case list():
            return "a list"
        case _:
            return "null"
