"""Generates values from bytes: Hypothesis draws the bytes, each of which decides one choice.

Hypothesis takes ten times as long to draw a nested value choice by choice. It still makes a failing example smaller:
fewer and smaller bytes are smaller values, because 0 decides for the first alternative and for nothing optional.
"""

import functools
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

SIZE = 512
BLOCK = 32  # bytes are drawn as they are needed, because Hypothesis takes microseconds for each

NUMBERS = (0.0, -0.0, 0.5, 1e16, -1.0, 1e308, 5e-324, float("inf"), float("-inf"), float("nan"))
CHARACTERS = 'a0 "\\\n\r\t\x00{}[]:,/-_.é€😀\u2028\ufeff\ufffd\U0010ffff\x7f\x85ß\u0301'
LAST_CHARACTER, SURROGATES = 0x10FFFF, range(0xD800, 0xE000)


class Choices:
    """The choices of one example. After its last byte, each choice is the first one."""

    def __init__(self, data: Iterable[int]) -> None:
        self._bytes: Iterator[int] = iter(data)

    def below(self, limit: int) -> int:
        number, size = next(self._bytes, 0), 256
        while size < limit:
            number, size = number << 8 | next(self._bytes, 0), size << 8
        return number % limit

    def one_of(self, values: Sequence[Any]) -> Any:
        return values[self.below(len(values))]

    def shuffled(self, values: list[Any]) -> list[Any]:
        left = list(values)
        return [left.pop(self.below(len(left))) for _ in values]

    def bytes(self, count: int) -> bytes:
        return bytes(next(self._bytes, 0) for _ in range(count))

    def integer(self) -> int:
        """Return an integer of 1 to 17 bytes, positive or negative."""
        size = self.one_of((1, 1, 2, 4, 8, 9, 17))
        return int.from_bytes(self.bytes(size), "big", signed=True)

    def number(self) -> float:
        if kind := self.below(2 * len(NUMBERS)):
            return NUMBERS[kind % len(NUMBERS)]
        value: float
        [value] = struct.unpack(">d", self.bytes(8))
        return value

    def character(self) -> str:
        """Return any character but a surrogate; every second one is one of those that are often read wrongly."""
        if self.below(2) == 0:
            return str(self.one_of(CHARACTERS))
        code = self.below(self.one_of((0x80, 0x800, 0x10000, LAST_CHARACTER + 1)))
        return chr(code) if code not in SURROGATES else "\ufffd"

    def text(self, longest: int) -> str:
        return "".join(self.character() for _ in range(self.below(longest + 1)))


Make = Callable[[Choices], Any]


def made(*makers: Make, size: int = SIZE) -> st.SearchStrategy[Any]:
    """Return a strategy for a tuple with a value of each maker, decided by at most `size` bytes."""
    return _made(makers, size)


@st.composite
def _made(draw: st.DrawFn, makers: tuple[Make, ...], size: int) -> tuple[Any, ...]:
    choices = Choices(byte for block in range(0, size, BLOCK) for byte in draw(_blocks(min(BLOCK, size - block))))
    return tuple(make(choices) for make in makers)


@functools.cache
def _blocks(size: int) -> st.SearchStrategy[bytes]:
    return st.binary(min_size=size, max_size=size)


def just(value: Any) -> Make:
    return lambda choices: value


def sampled(*values: Any) -> Make:
    return lambda choices: choices.one_of(values)


def below(limit: int) -> Make:
    return lambda choices: choices.below(limit)


def texts(longest: int) -> Make:
    return lambda choices: choices.text(longest)


def blobs(longest: int) -> Make:
    return lambda choices: choices.bytes(choices.below(longest + 1))


def one_of(*makers: Make) -> Make:
    return lambda choices: choices.one_of(makers)(choices)


def built(create: Callable[..., Any], *makers: Make) -> Make:
    return lambda choices: create(*[make(choices) for make in makers])


def lists(make: Make, longest: int) -> Make:
    return lambda choices: [make(choices) for _ in range(choices.below(longest + 1))]


def dictionaries(key: Make, make: Make, most: int) -> Make:
    return lambda choices: {key(choices): make(choices) for _ in range(choices.below(most + 1))}


def objects(**fields: Make) -> Make:
    """Return a maker of dictionaries with any of these fields."""
    return lambda choices: {name: make(choices) for name, make in fields.items() if choices.below(2)}


def nested(leaf: Make, around: Callable[[Make], Make], depth: int = 3) -> Make:
    """Return a maker of leaves, and of values around them that are at most this deep."""
    make = leaf
    for _ in range(depth):
        make = one_of(leaf, leaf, around(make))
    return make
