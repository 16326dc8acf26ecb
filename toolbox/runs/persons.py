"""The persons of a run as JSON: who asked for it, and who answers its pending calls.

Not here: roles and identities themselves (`security`), refreshing the identity of a run (`prepared_runs`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

from ..context import ActiveScope
from ..conversations.keys import Owner
from ..errors import RunAnswerError
from ..safe_text import printable
from ..security import TOKEN, SecurityIdentity, identity_in, without_token
from .program_values import writable_values, write_attributes


async def current_identity(scope: ActiveScope) -> Any:
    """Return the identity of the active scope; the anonymous one without any."""
    return await identity_in(scope)


def write_identity(identity: Any) -> dict[str, Any] | None:
    """Return an identity as JSON values, without its token; None for an anonymous one."""
    if identity is None or identity.is_anonymous:
        return None
    return {
        "name": identity.name,
        "roles": sorted(identity.roles),
        "attributes": write_attributes(without_token(identity.attributes), "SecurityIdentity.attributes"),
    }


def with_token_of(caller: Any, identity: Any) -> Any:
    """Return an identity that was read from what is stored, with the token of the caller, who is there now."""
    if identity.is_anonymous or TOKEN not in caller.attributes:
        return identity
    return SecurityIdentity(identity.name, identity.roles, {**identity.attributes, TOKEN: caller.attributes[TOKEN]})


def is_same_person(by: Any, stored: SecurityIdentity, names: Collection[str]) -> bool:
    """Return True if a person is that of a stored identity, also in the attributes with these names."""
    owner = Owner.of(by, names) if isinstance(by, SecurityIdentity) else None
    return owner is not None and owner == Owner.of(stored, names)


def read_identity(written: Mapping[str, Any] | None) -> Any:
    """Return the identity that `write_identity` wrote."""
    if written is None:
        return SecurityIdentity.anonymous()
    return SecurityIdentity(written["name"], frozenset(written["roles"]), written["attributes"])


def starter_of(identity: Mapping[str, Any] | None, names: Iterable[str]) -> Owner | None:
    """Return the person of a stored identity as the owner of conversations; None for an anonymous one.

    `names` are those of `run_identity`.
    """
    return Owner.of(read_identity(identity), names)


def is_person(by: Any) -> bool:
    """Return True for what `by=` accepts: a name, an identity, or None."""
    return by is None or isinstance(by, (str, SecurityIdentity))


def write_person(run_id: str, by: Any) -> Any:
    """Return the JSON form of the person who answers: a name, an identity, or None. Raises `RunAnswerError`."""
    if not is_person(by):
        raise RunAnswerError(run_id, f"by= must be a str or a SecurityIdentity, got {type(by).__name__}")
    if by is None or isinstance(by, str):
        return by
    if by.is_anonymous:
        return None
    return {"name": by.name, "roles": sorted(by.roles), "attributes": writable_values(without_token(by.attributes))}


def read_person(written: Any) -> Any:
    """Return the person that `write_person` wrote."""
    return read_identity(written) if isinstance(written, dict) else written


def has_role(written: Any, roles: Iterable[str]) -> bool:
    """Return True if the person that `write_person` wrote has one of these roles."""
    return isinstance(written, dict) and bool(set(roles) & set(written["roles"]))


def person_name(by: Any) -> str | None:
    """Return the name of a person, or None for an anonymous one."""
    return by.name or None if isinstance(by, SecurityIdentity) else cast("str | None", by)


def history_name(by: Any) -> str | None:
    """Return the same for the history, which clients get as JSON."""
    name = person_name(by)
    return None if name is None else printable(name)
