"""The functions and beans that take part in a client's calls: read once into what each needs.

A collaborator is a bean's class, whose object is called, or a function, whose further parameters are injected. Not
here: calling them (`exchange`).
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
    """What to call: `target`, or the bean that `point` asks for; `points` are injected after what it is given."""

    label: str
    target: Any = None
    point: InjectionPoint | None = None
    points: tuple[InjectionPoint, ...] = ()

    @property
    def is_awaited(self) -> bool:
        """Whether calling it makes a coroutine."""
        called = self.target if self.point is None else getattr(self.point.wants, "__call__", None)  # noqa: B004
        return inspect.iscoroutinefunction(called)

    def all_points(self) -> Iterator[InjectionPoint]:
        """Every bean it needs."""
        yield from self.points if self.point is None else (self.point,)


def read_collaborator(
    collaborator: Collaborator, where: str, given: int, names: Mapping[str, Any] | None = None
) -> CollaboratorPlan:
    """The plan for a collaborator that is given so many arguments."""
    label = getattr(collaborator, "__name__", type(collaborator).__name__)
    if isinstance(collaborator, type):
        return CollaboratorPlan(label, point=point_of(collaborator, f"{where}: {label}"))
    if not (inspect.isfunction(collaborator) or inspect.ismethod(collaborator)):
        return CollaboratorPlan(label, collaborator)
    return CollaboratorPlan(label, collaborator, points=points_of(collaborator, f"{where}: {label}", names)[given:])


def collaborator_problems(plan: CollaboratorPlan, where: str, may_await: bool) -> Iterator[Problem]:
    """What is wrong with a collaborator by itself."""
    if not may_await and plan.is_awaited:
        yield Problem(
            where,
            f"{plan.label} has to be awaited, and the method is a `def`",
            "make the method `async def`, or the function a `def`",
        )


def is_context(point: InjectionPoint) -> bool:
    """Whether the point is filled with the invocation that is under way."""
    return point.wants is InvocationContext


@contextmanager
def missing_bean_allowed(point: InjectionPoint) -> Iterator[None]:
    """Goes on after the block when there is no bean for a point that can do without."""
    try:
        yield
    except MissingBeanError:
        if not point.optional and point.default is MISSING:
            raise


def default_of(point: InjectionPoint) -> object:
    """What a point gets when there is no bean for it."""
    return None if point.default is MISSING else point.default
