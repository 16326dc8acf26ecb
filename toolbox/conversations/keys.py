"""Keys of conversations: `ChatMemoryKey`, the service and the memory id; `Owner`, the person whom one belongs to.

Not here: what is stored under them (`log`, `stores`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import InvalidMemoryIdError
from ..security import AccessDeniedError, SecurityIdentity, without_token
from ..service_names import stored_names

LONGEST_MEMORY_ID = 2048
"""The maximum length of a memory id in bytes, because PostgreSQL cannot index much more."""


@dataclass(frozen=True, slots=True)
class ChatMemoryKey:
    """The key of a conversation: the service's stored name, and the memory id as text.

    `former` are earlier names of the service. What lies under one of them is found where nothing lies under `service`.
    """

    service: str
    memory_id: str
    former: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        """Raise `InvalidMemoryIdError` for an id that a database cannot store."""
        text = str(self.memory_id)
        if "\0" in text:
            raise InvalidMemoryIdError(self.service, text, "it contains a NUL character")
        try:
            size = len(text) if text.isascii() else len(text.encode())
        except UnicodeEncodeError:
            reason = "it contains a lone surrogate, which is not a valid character"
            raise InvalidMemoryIdError(self.service, text, reason) from None
        if size > LONGEST_MEMORY_ID:
            raise InvalidMemoryIdError(self.service, text, f"it has {size} bytes, more than {LONGEST_MEMORY_ID}")

    @classmethod
    def of(cls, service: type[Any], memory_id: object) -> ChatMemoryKey:
        """Return the key of a conversation of this service.

        `memory_id` becomes text with `str`. Raises `InvalidMemoryIdError` for a NUL character, for a lone surrogate,
        and for more than 2,048 bytes of UTF-8.
        """
        name, *former = stored_names(service)
        return cls(name, str(memory_id), tuple(former))

    @property
    def places(self) -> tuple[ChatMemoryKey, ...]:
        """The keys under which the conversation may lie: this one first, then those of the former names."""
        if not self.former:
            return (self,)
        return tuple(ChatMemoryKey(each, self.memory_id) for each in (self.service, *self.former))


@dataclass(frozen=True, slots=True)
class Owner:
    """The person whom a conversation belongs to: a name, and the attributes that `run_identity` names, as JSON values.

    Two identities with equal names and attributes are one owner.
    """

    name: str
    attributes: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @classmethod
    def of(cls, identity: SecurityIdentity, names: Iterable[str] = ()) -> Owner | None:
        """Return the owner that an identity is; None for an anonymous one. `names` are those of `run_identity`.

        The token of the identity is never part of it.
        """
        if identity.is_anonymous:
            return None
        known = without_token(identity.attributes)
        named = {name: known[name] for name in names if name in known}
        return cls(identity.name, _as_json(named) if named else {})

    @classmethod
    def given(cls, owner: object, names: Iterable[str] = ()) -> Owner | None:
        """Return the owner that the argument `owner=` of the program means; None for nobody: an anonymous one, or None.

        Raises `ValueError` for a name where `run_identity` names attributes, which a name does not have, and
        `TypeError` for anything but a name or an identity.
        """
        if owner is None or isinstance(owner, SecurityIdentity):
            return None if owner is None else cls.of(owner, names)
        if not isinstance(owner, str):
            raise TypeError(f"invalid owner={owner!r}; use a SecurityIdentity, or a name")
        if owner and (missing := ", ".join(names)):
            fix = f"use a SecurityIdentity with its attributes ({missing}), which run_identity= names"
            raise ValueError(f"owner={owner!r} is only a name; {fix}")
        return cls(owner) if owner else None

    @property
    def digest(self) -> str:
        """64 characters that are equal for equal owners only, for indexes of databases."""
        written = json.dumps([self.name, self.attributes], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(written.encode()).hexdigest()


def refuse_other(
    owner: Owner | None, key: ChatMemoryKey, identity: SecurityIdentity | None, names: Iterable[str]
) -> None:
    """Raise `AccessDeniedError` if a conversation has an owner, and this identity is another one.

    None in place of an identity is the program itself, which may use all conversations.
    """
    if owner is not None and identity is not None and Owner.of(identity, names) != owner:
        raise AccessDeniedError(key.service, key.memory_id, identity.name)


def _as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    from pydantic_core import to_jsonable_python  # late: most programs name no attributes

    read: dict[str, Any] = to_jsonable_python(dict(values), fallback=str)
    return read
