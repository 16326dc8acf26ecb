"""What a REST client's call reads: the plan of its class, of each method, of each request and parameter.

Plain data. Not here: reading marks and signatures into plans (`reading`), building requests from them (`building`).
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
    """One parameter of a method: where its value goes, under which name.

    `spread` for a value that gives its fields; `adapter` writes a body as JSON.
    """

    name: str
    place: Place
    wire_name: str
    spread: bool = False
    mark: PlaceMark | None = None
    adapter: TypeAdapter[Any] | None = None


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """Everything about one method that a call needs.

    `path` alternates: literal text at even places, names of path parameters at odd ones. Fixed values that are computed
    have a `CollaboratorPlan`. `mappers` are asked, in order, what exception a failure is: those with a status for that.
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
        """The path as it was written."""
        return "".join(f"{{{part}}}" if at % 2 else part for at, part in enumerate(self.path))


@dataclass(frozen=True, slots=True)
class RestMethodPlan:
    """One method: its function, how it is called, and the plan of its request."""

    name: str
    function: Callable[..., Any]
    signature: inspect.Signature
    is_async: bool
    request: RequestPlan


@dataclass(frozen=True, slots=True)
class ClientPlan:
    """A whole class: its methods, and the collaborators of all of them. `auth` may also be an `httpx2.Auth`."""

    methods: tuple[RestMethodPlan, ...]
    headers: CollaboratorPlan | None = None
    auth: Any = None
    request_filters: tuple[CollaboratorPlan, ...] = ()
    response_filters: tuple[CollaboratorPlan, ...] = ()

    def collaborators(self) -> Iterator[CollaboratorPlan]:
        """All of them, each once for each place it is named in."""
        yield from (each for each in (self.headers, self.auth) if isinstance(each, CollaboratorPlan))
        yield from (*self.request_filters, *self.response_filters)
        for method in self.methods:
            yield from (each.value for each in method.request.fixed if isinstance(each.value, CollaboratorPlan))
            yield from (mapper for _, mapper in method.request.mappers)


def path_parts(template: str) -> tuple[str, ...]:
    """A path template taken apart, as `RequestPlan.path` has it."""
    return tuple(_TEMPLATE.split(template))


def join_paths(*paths: str) -> str:
    """Paths put one below the other: one slash between them, the last one's end as it was written."""
    joined = ""
    for path in paths:
        if path:
            joined = f"{joined.rstrip('/')}/{path.lstrip('/')}"
    return joined
