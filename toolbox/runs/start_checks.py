"""Checks at start that concern all runs of a container: its store and its engine, what is kept, and of whom.

Not here: checks of what runs execute (`service_calls`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from typing import Any

from ..di.graph import BeanGraph
from ..di.injection_points import point_of
from ..di.values import SingleBean
from ..errors import Problem
from ..introspection import type_name
from ..security import TOKEN
from .run_engines import RunEngine
from .store import RunStore


def setting_problems(graph: BeanGraph, run_seeds: Iterable[Any], run_identity: Iterable[str]) -> Iterator[Problem]:
    """Yield problems of the settings of a container for runs, and of its beans for them."""
    yield from _seed_problems(run_seeds)
    yield from _identity_problems(run_identity)
    yield from _bean_problems(graph)


def store_problems(where: str, graph: BeanGraph) -> Iterator[Problem]:
    """Yield a problem of a durable method if the graph has no store that outlives the process."""
    value = graph.resolve(point_of(RunStore | None, "the store of the runs"))
    if isinstance(value, SingleBean):
        definition = graph.definitions[value.bean]
        persistent = getattr(definition.source, "persistent", getattr(definition.provides, "persistent", None))
        if persistent is not False:  # a producer's store is checked when it is there
            return
    yield not_persistent(where)


def not_persistent(where: str) -> Problem:
    """Return the problem of a durable method without a store that outlives the process."""
    fact = "is durable, but there is no persistent RunStore"
    return Problem(where, fact, "register one, for example sql.engine and sql.SqlRunStore (from toolbox import sql)")


def _bean_problems(graph: BeanGraph) -> Iterator[Problem]:
    for kind, subject in ((RunStore, "the store of the runs"), (RunEngine, "the engine of the runs")):
        point = point_of(kind | None, subject)
        yield from graph.problems_of(point)
        value = graph.resolve(point)
        if not isinstance(value, SingleBean):
            continue
        definition = graph.definitions[value.bean]
        if definition.scope.is_temporary:
            fact = f"{definition.label} is {definition.scope.value}-scoped, but runs live longer than a request"
            yield Problem(point.where, fact, "mark it @application_scoped")


def _seed_problems(run_seeds: Iterable[Any]) -> Iterator[Problem]:
    for each in run_seeds:
        is_model = isinstance(each, type) and hasattr(each, "__pydantic_validator__")
        if not (is_model or (isinstance(each, type) and is_dataclass(each))):
            fact = f"{type_name(each)} is neither a pydantic model nor a dataclass, so it cannot be stored with a run"
            yield Problem("Container(run_seeds=…)", fact, "use a pydantic model or a dataclass")


def _identity_problems(run_identity: Iterable[str]) -> Iterator[Problem]:
    if TOKEN in run_identity:
        fact = f"the attribute {TOKEN!r} is the caller's own access token, which is never stored with a run"
        yield Problem("Container(run_identity=…)", fact, "name attributes such as 'tenant'")
