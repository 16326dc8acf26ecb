"""Plans the functions and beans that take part in calls: headers, authentication, filters, exception mappers.

A collaborator is the class of a callable bean, or a function whose additional parameters are injected. Not here:
calling them (`exchange`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..context import InvocationContext
from ..di.beans import MISSING, InjectionPoint, point_of, points_of
from ..errors import MissingBeanError, Problem
from .marks import Collaborator


@dataclass(frozen=True, slots=True)
class CollaboratorPlan:
    """A collaborator to call: `target`, or the bean of `point`. `points` are the injected parameters."""

    label: str
    target: Any = None
    point: InjectionPoint | None = None
    points: tuple[InjectionPoint, ...] = ()

    @property
    def is_awaited(self) -> bool:
        """Return True if calling it returns a coroutine."""
        called = self.target if self.point is None else getattr(self.point.wants, "__call__", None)  # noqa: B004
        return inspect.iscoroutinefunction(called)

    def all_points(self) -> Iterator[InjectionPoint]:
        """Yield the injection points of all beans that it needs."""
        yield from self.points if self.point is None else (self.point,)


def read_collaborator(
    collaborator: Collaborator, where: str, given: int, names: Mapping[str, Any] | None = None
) -> CollaboratorPlan:
    """Return the plan of a collaborator that is called with `given` positional arguments."""
    label = getattr(collaborator, "__name__", type(collaborator).__name__)
    if isinstance(collaborator, type):
        return CollaboratorPlan(label, point=point_of(collaborator, f"{where}: {label}"))
    if not (inspect.isfunction(collaborator) or inspect.ismethod(collaborator)):
        return CollaboratorPlan(label, collaborator)
    return CollaboratorPlan(label, collaborator, points=points_of(collaborator, f"{where}: {label}", names)[given:])


def collaborator_problems(plan: CollaboratorPlan, where: str, may_await: bool) -> Iterator[Problem]:
    """Yield the problems of a collaborator that do not depend on the bean graph."""
    if not may_await and plan.is_awaited:
        yield Problem(
            where,
            f"{plan.label} must be awaited, but the method is a `def`",
            "make the method `async def`, or the function a `def`",
        )


def is_context(point: InjectionPoint) -> bool:
    """Return True if the parameter gets the current `InvocationContext`."""
    return point.wants is InvocationContext


@contextmanager
def missing_bean_allowed(point: InjectionPoint) -> Iterator[None]:
    """Continue after the block if the bean of an optional injection point is missing."""
    try:
        yield
    except MissingBeanError:
        if not point.optional and point.default is MISSING:
            raise


def default_of(point: InjectionPoint) -> object:
    """Return the value of an injection point whose bean is missing."""
    return None if point.default is MISSING else point.default
