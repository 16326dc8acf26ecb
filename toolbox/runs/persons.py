"""The persons of a run as JSON: who asked for it, and who answers its pending calls.

Not here: roles and identities themselves (`security`), refreshing the identity of a run (`prepared_runs`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..context import ActiveScope
from ..errors import RunAnswerError
from ..security import SecurityIdentity, identity_in
from .program_values import writable_values, write_attributes


async def current_identity(scope: ActiveScope) -> Any:
    """Return the identity of the active scope; the anonymous one without any."""
    return await identity_in(scope)


def write_identity(identity: Any) -> dict[str, Any] | None:
    """Return an identity as JSON values; None for an anonymous one."""
    if identity is None or identity.is_anonymous:
        return None
    return {
        "name": identity.name,
        "roles": sorted(identity.roles),
        "attributes": write_attributes(identity.attributes, "SecurityIdentity.attributes"),
    }


def read_identity(written: Mapping[str, Any] | None) -> Any:
    """Return the identity that `write_identity` wrote."""
    if written is None:
        return SecurityIdentity.anonymous()
    return SecurityIdentity(written["name"], frozenset(written["roles"]), written["attributes"])


def write_person(run_id: str, by: Any) -> Any:
    """Return the JSON form of the person who answers: a name, an identity, or None. Raises `RunAnswerError`."""
    if by is None or isinstance(by, str):
        return by
    if not hasattr(by, "is_anonymous"):
        raise RunAnswerError(run_id, f"by= must be a str or a SecurityIdentity, got {type(by).__name__}")
    if by.is_anonymous:
        return None
    return {"name": by.name, "roles": sorted(by.roles), "attributes": writable_values(by.attributes)}


def read_person(written: Any) -> Any:
    """Return the person that `write_person` wrote."""
    return read_identity(written) if isinstance(written, dict) else written


def person_name(by: Any) -> str | None:
    """Return the name of a person for the history."""
    if by is None or isinstance(by, str):
        return by
    return str(by.name) or None
