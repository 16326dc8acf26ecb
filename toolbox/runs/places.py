"""Names the places of a run and the keys of its records.

A place is a text, so that it can be the id of a pending call. Not here: what a record contains (`record_contents`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast, get_args

RecordedFact: TypeAlias = Literal["", "start", "outside", "model", "summary", "r", "s", "failed", "sources", "handover"]
"""What a record can say about a place. A new kind of effect adds one; earlier releases refuse to read its records."""

BEFORE_THE_FIRST_REQUEST: frozenset[RecordedFact] = frozenset({"model", "sources"})
"""Facts that do not say that a run has begun: what is chosen and searched before the first request to a model."""


@dataclass(frozen=True, slots=True)
class RecordKey:
    """The key of a record: a place, and which fact about it was recorded.

    A place is a path of tool calls, by their positions in their invocations:

    - an empty text: the run itself, which is the invocation of the method that was called
    - `0`, `3`: its first and its fourth tool call
    - `0/1`: the second call of the service that runs as call `0`
    - `0.2`: the second attempt of call `0`; an interceptor called `proceed` again, or a deferred call got its answer
    - `0.2/1`: the second call of the service that runs as that attempt
    - `0.0`: the compensation of call `0`

    The facts about a tool call, or one of its attempts:

    - `0/1`: its result, or that it is deferred
    - `0/1#start`, `0/1#start.2`: it starts, and starts again in a process that continues the run
    - `0/1#outside`: its transaction cannot contain the record of its result

    The facts about an invocation:

    - `#model`, `0/1#model`: the model that a router has chosen for it
    - `#summary`, `0/1#summary.2`: the first summary of its conversation, and the second
    - `#r0`, `0/1#r3`: the first reply of its model, and the fourth
    - `#s1`, `0/1#s2`: its state when it was suspended for the first time, and for the second time
    - `#sources`, `0/1#sources`: what its retrievers found first, without the texts
    - `#handover`, `#handover.2`: it was handed over for the first time, and for the second time
    - `#failed`, `0/1#failed`: the error that ends it, and what to undo
    """

    place: str
    fact: RecordedFact = ""
    number: int = 1

    def __str__(self) -> str:
        match self.fact:
            case "":
                return self.place
            case "r" | "s":
                return f"{self.place}#{self.fact}{self.number}"
            case _:
                number = f".{self.number}" if self.number > 1 else ""
                return f"{self.place}#{self.fact}{number}"

    @classmethod
    def read(cls, text: str) -> RecordKey:
        """Read a key. Raises `ValueError` for other texts."""
        place, mark, written = text.partition("#")
        if not mark:
            return cls(place)
        found = _FACT.fullmatch(written)
        if found is None or found["fact"] not in get_args(RecordedFact):
            raise ValueError(f"unknown key of a record: {text!r}")
        return cls(place, cast("RecordedFact", found["fact"]), int(found["number"] or 1))


_FACT = re.compile(r"(?P<fact>[rs](?=\d)|[a-z]{2,}(?=\.\d|$))\.?(?P<number>\d*)")  # such as r0, s1, failed, start.2


def place_below(place: str, position: int) -> str:
    """Return the place of a tool call of the invocation at `place`."""
    return f"{place}/{position}" if place else str(position)


def calls_around(place: str) -> list[str]:
    """Return the places of the calls that a place is part of, outermost first, and the place: `0.2`, `0.2/1`."""
    steps = place.split("/") if place else []
    return ["/".join(steps[:depth]) for depth in range(1, len(steps) + 1)]


def invocation_of(call: str) -> str:
    """Return the place of the invocation that made a call."""
    return call.rpartition("/")[0]


def place_of_attempt(call: str, number: int) -> str:
    """Return the place of an attempt of a call, counted from 1."""
    return call if number == 1 else f"{call}.{number}"


def without_attempt(place: str) -> str:
    """Return the place of the call of which `place` is an attempt."""
    outer, mark, step = place.rpartition("/")
    return f"{outer}{mark}{step.partition('.')[0]}"


def position_of(call: str) -> int:
    """Return the position of a call, or of the call of an attempt, in the invocation that made it."""
    return int(call.rpartition("/")[2].partition(".")[0])


def is_attempt_of(place: str, call: str) -> bool:
    """Return True if `place` is a call or one of its attempts; not for its compensation and the places within."""
    number = place.removeprefix(f"{call}.")
    return place == call or (number != place and number.isdigit() and number != "0")


def is_within(place: str, call: str) -> bool:
    """Return True if `place` is a call, one of its attempts, or a place within one of these."""
    return place == call or place.startswith((f"{call}/", f"{call}."))


def place_to_undo(call: str) -> str:
    """Return the place of the compensation of a call. It is recorded once, whichever attempts the call had."""
    return f"{call}.0"


def is_compensation(place: str) -> bool:
    """Return True for the place of a compensation."""
    return place.endswith(".0")


def place_order(path: str) -> tuple[int, ...]:
    """Return a key that sorts places as calls were made: `0`, `0/1`, `0.2/0`, `2`, `10`."""
    return tuple(int(part) for step in path.split("/") for part in (*step.split("."), "1")[:2]) if path else ()
