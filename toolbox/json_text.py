"""JSON texts that models write: strict reading, and the few repairs a tool call's arguments are given.

Not here: what a tool makes of its arguments (`tools.codec`), how a reply's fragments are put together (`models`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from pydantic_core import from_json

# The closing quote may be missing: then there is one long string, and not a new attempt at each quote inside it.
_STRING_OR_COMMA = re.compile(r'"(?:[^"\\]++|\\.)*+"?|,(?=[ \t\r\n]*[}\]])', re.DOTALL)
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
        value = parse_json(_unwrapped(text))
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def arguments_text(text: str) -> str:
    """The text of the JSON object that a call's argument text means. Raises `ValueError` with what is wrong.

    Repaired, and nothing else: what `strict_arguments` reads, trailing commas, a leading `{}` before the object, the
    same object twice. What is not repaired stays as it was written, numbers to the last digit.
    """
    text = _unwrapped(text)
    try:
        value = parse_json(text)
    except ValueError as error:
        repaired = _one_object(text) or _one_object(_without_trailing_commas(text))
        if repaired is None:
            raise ValueError(f"not a JSON object: {error}") from None
        return repaired
    if not isinstance(value, dict):
        raise ValueError(f"a JSON object is needed, this is {_kind(value)}")
    return text


def read_arguments(text: str) -> dict[str, Any]:
    """The arguments of a tool call, read from `arguments_text`. Raises `ValueError` with what is wrong."""
    value: dict[str, Any] = parse_json(arguments_text(text))
    return value


def object_text(text: str) -> str:
    """`text` if it is a JSON object, else the object that it means, else `{}`: what may go into a history.

    A server that finds broken arguments in the history refuses every later request.
    """
    try:
        return arguments_text(text)
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


def _unwrapped(text: str) -> str:
    """`{}` for text that means no arguments; what a string holds, where the text is a JSON string; else the text."""
    bare = text.strip()
    if bare.startswith('"'):
        try:
            value = parse_json(text)
        except ValueError:
            return text
        text = value if isinstance(value, str) else text
        bare = text.strip()
    return "{}" if bare in ("", "null") else text


def _one_object(text: str) -> str | None:
    """The text of the one object that `text` consists of, once or twice, after a leading `{}` or without."""
    objects: list[tuple[str, str]] = []  # as written, and in a form that can be compared
    position = 0
    while rest := text[position:].lstrip(_SPACE):
        if len(objects) == 3:
            return None
        try:
            value, length = _decoder.raw_decode(rest)
            compared = json.dumps(value, sort_keys=True)
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, dict):
            return None
        objects.append((rest[:length], compared))
        position = len(text) - len(rest) + length
    if len(objects) > 1 and objects[0][1] == "{}":
        del objects[0]
    if len(objects) > 2 or len({compared for _, compared in objects}) != 1:
        return None
    return objects[0][0]


def _without_trailing_commas(text: str) -> str:
    """`text` without the commas that stand before a closing bracket, outside of strings."""
    return _STRING_OR_COMMA.sub(lambda found: "" if found.group().startswith(",") else found.group(), text)


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
