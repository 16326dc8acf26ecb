"""Checks at start: what a run needs when it continues, in another request or another process.

Not here: checks of services that do not concern runs (`services.hosting`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

from ..di.decorators import Scope
from ..di.graph import BeanGraph, SingleBean
from ..di.points import point_of
from ..errors import Problem
from ..services.plans import MethodPlan
from ..type_keys import type_name
from .starting import RunEngine
from .store import RunStore


def run_problems(
    plans: Mapping[type[Any], Mapping[str, MethodPlan]], graph: BeanGraph, run_seeds: Iterable[Any]
) -> Iterator[Problem]:
    """Yield problems of suspendable and durable methods, and of the kept seeds."""
    yield from _seed_problems(run_seeds)
    yield from _bean_problems(graph)


def _bean_problems(graph: BeanGraph) -> Iterator[Problem]:
    for kind, subject in ((RunStore, "the store of the runs"), (RunEngine, "the engine of the runs")):
        point = point_of(kind | None, subject)
        yield from graph.problems_of(point)
        value = graph.value_of(point)
        if not isinstance(value, SingleBean):
            continue
        definition = graph.definitions[value.bean]
        if definition.scope in (Scope.REQUEST, Scope.CALL):
            fact = f"{definition.label} is {definition.scope.value}-scoped, but runs live longer than that"
            yield Problem(point.where, fact, "mark it @application_scoped")


def _seed_problems(run_seeds: Iterable[Any]) -> Iterator[Problem]:
    for each in run_seeds:
        is_model = isinstance(each, type) and hasattr(each, "__pydantic_validator__")
        if not (is_model or (isinstance(each, type) and is_dataclass(each))):
            fact = f"{type_name(each)} is neither a pydantic model nor a dataclass, so it cannot be stored with a run"
            yield Problem("Container(run_seeds=…)", fact, "use a pydantic model or a dataclass")
