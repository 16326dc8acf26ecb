"""In what a request differs from a recorded one, for a reader: a line for each place.

Not here: whether they are the same (`tapes`, by `==`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from .tapes import Asked, Json

_EXCERPT = 40
_MOST = 12


def differences(recorded: Asked, asked: Asked) -> list[str]:
    """In what a request differs from a recorded one, a line each."""
    if recorded.path != asked.path:
        return [f"path: recorded {recorded.path}, now {asked.path}"]
    found = list(_differences(recorded.body, asked.body, ""))
    more = len(found) - _MOST
    return [*found[:_MOST], f"… and {more} more"] if more > 0 else found


def _differences(recorded: Json, asked: Json, path: str) -> Iterator[str]:
    if isinstance(recorded, dict) and isinstance(asked, dict):
        for name in dict.fromkeys([*recorded, *asked]):
            inner = f"{path}.{name}" if path else name
            if name not in asked:
                yield f"{inner}: recorded {_shown(recorded[name])}, now absent"
            elif name not in recorded:
                yield f"{inner}: recorded nothing, now {_shown(asked[name])}"
            else:
                yield from _differences(recorded[name], asked[name], inner)
    elif isinstance(recorded, list) and isinstance(asked, list):
        for number, (one, other) in enumerate(zip(recorded, asked, strict=False)):
            yield from _differences(one, other, f"{path}[{number}]")
        if len(recorded) != len(asked):
            longer, where = (recorded, "recorded") if len(recorded) > len(asked) else (asked, "now")
            first = min(len(recorded), len(asked))
            counts = f"{len(recorded)} recorded, now {len(asked)}"
            yield f"{path}: {counts}; the first more, {where}: {_shown(longer[first])}"
    elif recorded != asked or type(recorded) is not type(asked):
        start = _common_start(recorded, asked)
        yield f"{path}: recorded {_shown(recorded, start)}, now {_shown(asked, start)}"


def _common_start(one: Json, other: Json) -> int:
    if not isinstance(one, str) or not isinstance(other, str):
        return 0
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(one), len(other)))


def _shown(value: Json, place: int = 0) -> str:
    """As JSON, cut; of a long text what stands around `place`."""
    if isinstance(value, str) and place > _EXCERPT:
        value = f"…{value[place - _EXCERPT // 2 :]}"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 2 * _EXCERPT else f"{text[: 2 * _EXCERPT]}…"
