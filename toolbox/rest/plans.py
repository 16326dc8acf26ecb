"""Plans of a REST client as plain data: its class, methods, requests and parameters. A call only reads them.

Not here: reading marks and signatures into plans (`reading`), building requests from them (`building`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from .collaborators import CollaboratorPlan
from .marks import FixedValue, Place, PlaceMark
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


def join_paths(*paths: str) -> str:
    """Join paths with one slash between them; a trailing slash of the last one is kept."""
    joined = ""
    for path in paths:
        if path:
            joined = f"{joined.rstrip('/')}/{path.lstrip('/')}"
    return joined
