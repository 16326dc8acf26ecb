"""The FastAPI dependency that finds the caller of a request, `identity=` of `install`.

Not here: adding it to the routes (`endpoint_checks`), the roles of endpoints (`endpoint_roles`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from fastapi import Depends, params
from fastapi.dependencies.utils import get_dependant
from fastapi.security.base import SecurityBase
from starlette.requests import HTTPConnection

from toolbox.errors import IllegalConfigurationError, Problem
from toolbox.security import SecurityIdentity, identity_from

from .exchanges import ANY_CHALLENGE, exchange_of

OWN_IDENTITY_MARK = "__toolbox_own_identity__"
"""Marks an endpoint that does not get the identity of the application."""

IDENTITY_DEPENDENCY = "toolbox_identity"
"""Name of the attribute of an application's `state` that has the dependency which resolves the identity."""


def identity_dependency(identity: Any, where: str) -> Callable[..., Any]:
    """Return the dependency that resolves `identity`, a FastAPI dependency, for the beans of the request.

    Raises `IllegalConfigurationError` if it is not a dependency; `where` is the place.
    """
    dependency = identity if isinstance(identity, params.Depends) else Depends(identity)
    if not callable(dependency.dependency) or isinstance(identity, SecurityIdentity):
        fix = "pass a function that FastAPI can call, such as `async def current_user(…) -> SecurityIdentity | None`"
        raise IllegalConfigurationError([Problem(where, f"identity={identity!r} is not a FastAPI dependency", fix)])
    name = getattr(dependency.dependency, "__name__", repr(dependency.dependency))

    async def resolve_identity(connection: HTTPConnection, found: Any = dependency) -> None:
        exchange = exchange_of(connection)
        exchange.identity = identity_from(found, f"the dependency {name}, identity= of install(…),")
        exchange.find_challenge = find_challenge

    find_challenge = functools.cache(functools.partial(challenge_of, resolve_identity))
    return resolve_identity


def challenge_of(dependency: Callable[..., Any]) -> str:
    """Return the `WWW-Authenticate` header for the security schemes that a dependency uses, such as `Bearer`."""
    found: dict[str, None] = {}
    todo = [get_dependant(path="/", call=dependency)]
    while todo:
        dependant = todo.pop(0)
        todo += dependant.dependencies
        if isinstance(dependant.call, SecurityBase):
            make_error = getattr(dependant.call, "make_not_authenticated_error", None)
            headers = make_error().headers if make_error is not None else None
            found[(headers or {}).get("WWW-Authenticate", ANY_CHALLENGE)] = None
    return ", ".join(found) or ANY_CHALLENGE
