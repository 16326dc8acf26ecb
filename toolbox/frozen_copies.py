"""Copies of frozen data classes."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


def copy_with(instance: T, **changes: Any) -> T:
    """Return a copy of a frozen data class, which has no slots, with some fields changed.

    Takes 0.6 µs where `dataclasses.replace` takes 4 to 6 µs for a dozen fields. A tool call makes one such copy, a
    round of the tool loop five: see the first row of `benchmarks.tools`. Does not call `__init__` and
    `__post_init__`.
    """
    copy = object.__new__(type(instance))
    fields = copy.__dict__
    fields.update(instance.__dict__)
    fields.update(changes)
    return copy
