"""Details of a reply besides its text and calls: token counts, and attributes for all other fields.

Not here: the names of these fields (`chat_wire`, `responses_wire`), adding up token counts (`chat.TokenUsage`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping
from typing import Any

from pydantic_core import from_json, to_json

from ..chat import TokenUsage


def usage_of(usage: Mapping[str, Any]) -> TokenUsage | None:
    """Return the token counts, under any of the names that servers use, or None."""
    given = _count(usage, "prompt_tokens", "input_tokens")
    made = _count(usage, "completion_tokens", "output_tokens")
    if given is None and made is None:
        return None
    given, into = given or 0, _mapping(usage, "prompt_tokens_details", "input_tokens_details")
    cached = _count(into, "cached_tokens")
    if cached is None:
        cached = _count(usage, "prompt_cache_hit_tokens", "cached_tokens", "cache_read_input_tokens")
    written = _count(into, *_WRITTEN)
    if written is None:
        written = _count(usage, *_WRITTEN)
    if not into and usage.get("prompt_tokens") is None:  # Anthropic counts only the rest as input
        given += (_count(usage, "cache_read_input_tokens") or 0) + (_count(usage, "cache_creation_input_tokens") or 0)
    out_of = _mapping(usage, "completion_tokens_details", "output_tokens_details")
    thought = _count(out_of, "reasoning_tokens", "thinking_tokens")
    return TokenUsage(given, made or 0, cached or 0, thought or 0, written or 0)


def _mapping(usage: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    found = next(filter(None, map(usage.get, names)), None)
    return found if isinstance(found, Mapping) else {}


_WRITTEN = ("cache_write_tokens", "cache_creation_tokens", "cache_creation_input_tokens")

_KNOWN = frozenset(
    {"prompt_tokens", "input_tokens", "completion_tokens", "output_tokens", "total_tokens", "cached_tokens"}
    | {"prompt_cache_hit_tokens", "prompt_cache_miss_tokens", "cache_read_input_tokens", *_WRITTEN}
)
_DETAILS = frozenset({"cached_tokens", "reasoning_tokens", "thinking_tokens", *_WRITTEN})


def further_usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Return the usage that `TokenUsage` does not contain, such as costs, times and audio tokens, without zeros."""
    found: dict[str, Any] = {}
    for name in usage.keys() - _KNOWN if len(usage) > 3 else ():
        value = usage[name]
        if isinstance(value, dict):
            value = {key: each for key, each in value.items() if key not in _DETAILS and each}
        if value:
            found[name] = value
    return found


def _count(counts: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        count = counts.get(name)
        if isinstance(count, (int, float)) and not isinstance(count, bool) and 0 <= count < 1e15:
            return int(count)
    return None


# --- attributes


def add_extras(extras: dict[str, Any], values: Mapping[str, Any], names: Collection[str]) -> None:
    """Add fields of a message or a choice to `extras`. In a stream, lists and texts arrive in parts and are joined."""
    for name in names:
        if not _is_empty(value := values[name]):
            extras[name] = _merged(extras.get(name), value, name)


def replace_extras(extras: dict[str, Any], values: Mapping[str, Any], names: Collection[str]) -> None:
    """Set fields of a reply in `extras`. The chunks of a stream repeat them."""
    for name in names:
        if not _is_empty(value := values[name]):
            extras[name] = value


def _is_empty(value: object) -> bool:
    return value is None or (isinstance(value, (str, list, dict)) and not value)


_IN_PIECES = frozenset(
    {"arguments", "content", "data", "input", "reasoning", "reasoning_content", "text", "transcript"}
)


def _merged(before: Any, more: Any, name: str) -> Any:
    if isinstance(before, dict) and isinstance(more, dict):
        return {**before, **{key: _merged(before.get(key), value, key) for key, value in more.items()}}
    if isinstance(before, list) and isinstance(more, list):
        before.extend(more)  # a copy, made below
        return before
    if isinstance(before, str) and isinstance(more, str) and name in _IN_PIECES:
        return before + more
    if more is None:
        return before
    return list(more) if isinstance(more, list) else _merged({}, more, name) if isinstance(more, dict) else more


def bounded(values: Mapping[str, Any], largest: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split values into those that fit into `largest` bytes of JSON together, as JSON values, and the others."""
    kept: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in values.items():
        try:
            form = _json_form({name: value})
        except ValueError:
            others[name] = None
            continue
        largest -= len(form)
        if largest < 0:
            others[name] = value
            largest += len(form)
        else:
            kept |= from_json(form)
    return kept, others


def storable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values that stores can write as JSON: numbers that JSON does not have become None."""
    return bounded(values, sys.maxsize)[0]


def _json_form(value: object) -> bytes:
    """Return a value as JSON. Raises `ValueError` if it is nested too deeply."""
    try:
        return to_json(value, inf_nan_mode="null")
    except ValueError:  # a lone surrogate, or too deeply nested
        try:
            text = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
            return to_json(json.loads(text), inf_nan_mode="null")
        except RecursionError as error:
            raise ValueError(str(error)) from error
