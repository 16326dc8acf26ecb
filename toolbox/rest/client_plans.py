"""Plans of a REST client as plain data: its class, methods, requests and parameters. A call only reads them.

Collaborators are the functions and beans that take part in a call: headers, authentication, filters, exception mappers;
each is the class of a callable bean, or a function whose additional parameters are injected. Not
here: reading annotations and signatures into plans (`reading`), building requests from them (`building`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from ..context import InvocationContext
from ..di.beans import MISSING, InjectionPoint, point_of, points_of
from ..errors import MissingBeanError, Problem
from .annotations import Collaborator, FixedValue, Place, PlaceMark
from .replies import ReplyPlan

BODILESS = frozenset({"GET", "HEAD", "DELETE"})
_TEMPLATE = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True, slots=True)
class ParameterPlan:
    """One parameter of a method: the place and name its value is sent under.

    With `spread`, each field of the value is sent. `adapter` writes a body as JSON.
    """

    name: str
    place: Place
    wire_name: str
    spread: bool = False
    mark: PlaceMark | None = None
    adapter: TypeAdapter[Any] | None = None


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """All that a call of one method needs.

    `path` alternates between literal text (even indexes) and names of path parameters (odd indexes). Computed fixed
    values are `CollaboratorPlan`s. `mappers` are called in order for a failure, those with a status only for it.
    """

    where: str
    verb: str
    path: tuple[str, ...]
    parameters: tuple[ParameterPlan, ...]
    reply: ReplyPlan
    fixed: tuple[FixedValue, ...] = ()
    mappers: tuple[tuple[int | None, CollaboratorPlan], ...] = ()
    timeout: float | None = None
    idempotent: bool = False

    @property
    def template(self) -> str:
        """Return the path template."""
        return "".join(f"{{{part}}}" if at % 2 else part for at, part in enumerate(self.path))


@dataclass(frozen=True, slots=True)
class RestMethodPlan:
    """One method: its function, its signature and the plan of its request."""

    name: str
    function: Callable[..., Any]
    signature: inspect.Signature
    is_async: bool
    request: RequestPlan


@dataclass(frozen=True, slots=True)
class ClientPlan:
    """A client class: its methods and their shared collaborators. `auth` may also be an `httpx2.Auth`."""

    methods: tuple[RestMethodPlan, ...]
    headers: CollaboratorPlan | None = None
    auth: Any = None
    request_filters: tuple[CollaboratorPlan, ...] = ()
    response_filters: tuple[CollaboratorPlan, ...] = ()

    def collaborators(self) -> Iterator[CollaboratorPlan]:
        """Yield all collaborators of the class and its methods; one that is used twice appears twice."""
        yield from (each for each in (self.headers, self.auth) if isinstance(each, CollaboratorPlan))
        yield from (*self.request_filters, *self.response_filters)
        for method in self.methods:
            yield from (each.value for each in method.request.fixed if isinstance(each.value, CollaboratorPlan))
            yield from (mapper for _, mapper in method.request.mappers)


def path_parts(template: str) -> tuple[str, ...]:
    """Split a path template as `RequestPlan.path` describes."""
    return tuple(_TEMPLATE.split(template))


# --- collaborators


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
