"""Token counts under the names that servers give them.

Not here: summing them up (`chat.TokenUsage`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..chat import TokenUsage


def usage_of(usage: Mapping[str, Any]) -> TokenUsage | None:
    """Token counts under the names that servers give them; None when there are none."""
    given = _count(usage, "prompt_tokens", "input_tokens")
    made = _count(usage, "completion_tokens", "output_tokens")
    if given is None and made is None:
        return None
    into = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    out_of = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
    cached = _count(into, "cached_tokens") if isinstance(into, dict) else None
    if cached is None:
        cached = _count(usage, "prompt_cache_hit_tokens", "cached_tokens")
    thought = _count(out_of, "reasoning_tokens") if isinstance(out_of, dict) else None
    return TokenUsage(given or 0, made or 0, cached or 0, thought or 0)


_KNOWN = frozenset(
    {"prompt_tokens", "input_tokens", "completion_tokens", "output_tokens", "total_tokens", "cached_tokens"}
    | {"prompt_cache_hit_tokens", "prompt_cache_miss_tokens"}
)
_DETAILS = frozenset({"cached_tokens", "reasoning_tokens"})


def further_usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `TokenUsage` does not hold: costs, times, tokens of audio; without zeros."""
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
