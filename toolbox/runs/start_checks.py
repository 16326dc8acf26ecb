"""Checks at start: what a run needs when it continues, in another request or another process.

Not here: checks of services that do not concern runs (`services.hosting`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

from ..di.graph import BeanGraph
from ..errors import Problem
from ..services.plans import MethodPlan
from ..type_keys import type_name


def run_problems(
    plans: Mapping[type[Any], Mapping[str, MethodPlan]], graph: BeanGraph, run_seeds: Iterable[Any]
) -> Iterator[Problem]:
    """Yield problems of suspendable and durable methods, and of the kept seeds."""
    yield from _seed_problems(run_seeds)


def _seed_problems(run_seeds: Iterable[Any]) -> Iterator[Problem]:
    for each in run_seeds:
        is_model = isinstance(each, type) and hasattr(each, "__pydantic_validator__")
        if not (is_model or (isinstance(each, type) and is_dataclass(each))):
            fact = f"{type_name(each)} is neither a pydantic model nor a dataclass, so it cannot be stored with a run"
            yield Problem("Container(run_seeds=…)", fact, "use a pydantic model or a dataclass")
