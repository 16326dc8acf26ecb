"""Finds for each expected call the actual one it fits, in order or in any order: positions only.

Not here: what a call is and when it fits (`assertions`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import zip_longest
from typing import TypeAlias


class Likeness(IntEnum):
    """How an expected call and an actual one are alike."""

    NONE = 0
    SAME_TOOL = 1
    FITS = 2


Table: TypeAlias = Sequence[Sequence[Likeness]]
"""For each expected call its likeness with each actual one."""


@dataclass(frozen=True, slots=True)
class Pair:
    """What is shown in one line: the positions of an expected and an actual call; one of them may be None."""

    expected: int | None
    actual: int | None
    fits: bool


def pairs_in_order(table: Table, actual: int) -> list[Pair]:
    """As many that fit as can be, then as many of the same tool, and beside each other what is left between."""
    pairs: list[Pair] = []
    start = (0, 0)
    for left, right in _longest_run(table, actual):
        pairs += _unlike(range(start[0], left), range(start[1], right))
        pairs.append(Pair(left, right, table[left][right] is Likeness.FITS))
        start = left + 1, right + 1
    return [*pairs, *_unlike(range(start[0], len(table)), range(start[1], actual))]


def _longest_run(table: Table, actual: int) -> Iterator[tuple[int, int]]:
    # One that fits counts more than all that are of the same tool together.
    worth = {Likeness.SAME_TOOL: 1, Likeness.FITS: len(table) + 1}
    best = [[0] * (actual + 1) for _ in range(len(table) + 1)]
    for left in reversed(range(len(table))):
        for right in reversed(range(actual)):
            apart = max(best[left + 1][right], best[left][right + 1])
            likeness = table[left][right]
            best[left][right] = max(apart, best[left + 1][right + 1] + worth[likeness]) if likeness else apart
    left = right = 0
    while left < len(table) and right < actual:
        likeness = table[left][right]
        if likeness and best[left][right] == best[left + 1][right + 1] + worth[likeness]:
            yield left, right
            left, right = left + 1, right + 1
        elif best[left + 1][right] >= best[left][right + 1]:
            left += 1
        else:
            right += 1


def pairs_in_any_order(table: Table, actual: int) -> list[Pair]:
    """As many that fit as can be: a call that two expected ones fit goes to the one that has no other."""
    fitting = _matched(table, range(len(table)), range(actual), Likeness.FITS)
    expected = [left for left in range(len(table)) if left not in fitting]
    unexpected = [right for right in range(actual) if right not in fitting.values()]
    alike = _matched(table, expected, unexpected, Likeness.SAME_TOOL)
    return [
        *(Pair(left, right, True) for left, right in sorted(fitting.items())),
        *(Pair(left, right, False) for left, right in sorted(alike.items())),
        *_unlike(
            [left for left in expected if left not in alike],
            [right for right in unexpected if right not in alike.values()],
        ),
    ]


def _matched(table: Table, expected: Sequence[int], actual: Sequence[int], least: Likeness) -> dict[int, int]:
    """A largest matching: who comes later may send an earlier one on to another call."""
    taken: dict[int, int] = {}

    def find(left: int, seen: set[int]) -> bool:
        for right in actual:
            if table[left][right] >= least and right not in seen:
                seen.add(right)
                if right not in taken or find(taken[right], seen):
                    taken[right] = left
                    return True
        return False

    for left in expected:
        find(left, set())
    return {left: right for right, left in taken.items()}


def _unlike(expected: Sequence[int], actual: Sequence[int]) -> Iterator[Pair]:
    for left, right in zip_longest(expected, actual):
        yield Pair(left, right, False)
