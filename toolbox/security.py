"""Identities and roles: which tools and services a caller may use. `Reach` is one row of a report.

Not here: filtering the tools of a call (`services.invocation`), computing the report (`overview`), HTTP
(`toolbox_fastapi`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from .context import ActiveScope
from .errors import FrameworkError, ScopeNotActiveError
from .introspection import may_be_marked
from .safe_text import HIDDEN, brief

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema, SchemaSerializer

__all__ = [
    "AccessDeniedError",
    "ForbiddenError",
    "Reach",
    "SecurityIdentity",
    "UnauthenticatedError",
    "authenticated",
    "permit_all",
    "roles_allowed",
]

F = TypeVar("F")

ACCESS_MARK: Final = "__toolbox_access__"
TOKEN: Final = "token"
"""The attribute of an identity that has the caller's own access token. It stays in memory: nothing writes it."""


# --- identities


@dataclass(frozen=True, slots=True, init=False)
class SecurityIdentity:
    """The caller: a name, roles, and further attributes of your own.

        SecurityIdentity("ann", roles={"support"}, attributes={"tenant": "acme"})

    It is a bean of the request: inject it with `Inject[SecurityIdentity]`. `roles` may be any collection of strings.
    `attributes["token"]`, the caller's own access token, stays in memory: it is in no JSON form of the identity, so
    neither in stored runs nor in responses, and `repr` hides it. Raises `ValueError` for an empty name, `TypeError` for
    a name or a role that is not a string.
    """

    name: str
    roles: frozenset[str]
    attributes: Mapping[str, Any] = field(hash=False, repr=False)  # a subclass's own `repr` would show the token

    def __init__(self, name: str, roles: Collection[str] = (), attributes: Mapping[str, Any] | None = None) -> None:
        if not isinstance(name, str):
            raise TypeError(f"SecurityIdentity: the name must be a string, got {type(name).__name__}")
        if not name.strip():
            raise ValueError(
                "SecurityIdentity: the name is empty; use SecurityIdentity.anonymous() for unknown callers"
            )
        if isinstance(roles, str) or not isinstance(roles, Iterable):
            raise TypeError(f"SecurityIdentity: roles must be a collection of strings, got {type(roles).__name__}")
        if wrong := [each for each in frozenset(roles) if not isinstance(each, str)]:
            raise TypeError(f"SecurityIdentity: each role must be a string, got {type(wrong[0]).__name__}")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "roles", frozenset(roles))
        object.__setattr__(self, "attributes", dict(attributes or {}))

    @staticmethod
    def anonymous() -> SecurityIdentity:
        """Return the identity of an unknown caller. Its name is empty and it has no roles."""
        return _ANONYMOUS

    @property
    def is_anonymous(self) -> bool:
        """Return True for an unknown caller."""
        return not self.name

    def __str__(self) -> str:
        return self.name or "anonymous"

    def __repr__(self) -> str:
        shown = {key: HIDDEN if key == TOKEN else value for key, value in self.attributes.items()}
        return f"{type(self).__name__}(name={self.name!r}, roles={self.roles!r}, attributes={shown!r})"

    # The JSON form is the same wherever pydantic meets an identity: in a type that it knows, and among other values.

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of the fields. The JSON form leaves the token out."""
        from pydantic_core import core_schema

        schema: Any = handler(source)
        schema["serialization"] = core_schema.wrap_serializer_function_ser_schema(_write_fields, when_used="json")
        return cast("CoreSchema", schema)

    @property
    def __pydantic_serializer__(self) -> SchemaSerializer:
        """Return the serializer with which pydantic writes an identity where no type says that it is one."""
        kind: Any = type(self)
        return cast("SchemaSerializer", _serializer_of(kind))


@cache
def _serializer_of(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind).serializer


def _write_fields(identity: SecurityIdentity, write: Callable[[SecurityIdentity], dict[str, Any]]) -> dict[str, Any]:
    written = write(identity)
    return {**written, "attributes": without_token(written["attributes"])}


def without_token(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of an identity that may be written."""
    return {name: value for name, value in attributes.items() if name != TOKEN}


def _make_anonymous() -> SecurityIdentity:
    identity = object.__new__(SecurityIdentity)
    for name, value in (("name", ""), ("roles", frozenset()), ("attributes", {})):
        object.__setattr__(identity, name, value)
    return identity


_ANONYMOUS: Final = _make_anonymous()


def identity_from(found: object, where: str) -> SecurityIdentity:
    """Return an identity; the anonymous one for None. Raises `TypeError` for anything else; `where` is the source."""
    if found is None:
        return _ANONYMOUS
    if not isinstance(found, SecurityIdentity):
        raise TypeError(f"{where} returned {type(found).__name__}; return a SecurityIdentity or None")
    return found


async def identity_in(scope: ActiveScope) -> SecurityIdentity:
    """Return the identity of the active scope; the anonymous one if there is none, or no scope."""
    try:
        found = await scope.find(SecurityIdentity)
    except ScopeNotActiveError:
        return _ANONYMOUS
    return identity_from(found, "the producer of the SecurityIdentity")


def identity_now(scope: ActiveScope) -> SecurityIdentity:
    """Return the same as `identity_in`, without await. Raises `AsyncBeanError` if async code must create it."""
    try:
        found = scope.find_now(SecurityIdentity)
    except ScopeNotActiveError:
        return _ANONYMOUS
    return identity_from(found, "the producer of the SecurityIdentity")


caller_of_request: ContextVar[SecurityIdentity | None] = ContextVar("toolbox.caller_of_request", default=None)
"""The identity that a server has found for the request it handles; it goes into the request scopes opened there."""


def caller_seeds() -> dict[Any, Any]:
    """Return the seeds of a request scope for the caller that a server has found, if there is one."""
    caller = caller_of_request.get()
    return {} if caller is None else {SecurityIdentity: caller}


# --- errors


class UnauthenticatedError(FrameworkError):
    """An anonymous caller called a service method or an endpoint that needs an identity. FastAPI answers 401.

    `.lacks_token` is True if the caller's own token is missing, which is needed to act for it (`toolbox.oauth`).
    """

    def __init__(self, where: str, lacks_token: bool = False) -> None:
        super().__init__(where, lacks_token)
        self.where, self.lacks_token = where, lacks_token

    def __str__(self) -> str:
        if self.lacks_token:
            fix = "put it into SecurityIdentity.attributes['token'], or name its bean with subject="
            return f"{self.where}: no token of the user to exchange; {fix}"
        return f"{self.where} needs an identity, but the caller is anonymous; check what provides the SecurityIdentity"


class ForbiddenError(FrameworkError):
    """The caller has none of the roles that a service method or an endpoint needs. FastAPI answers 403.

    `.identity` is the caller's name, `.roles` are the allowed roles, sorted. `.reason` is None, or why the roles do not
    decide.
    """

    def __init__(self, where: str, identity: str, roles: Sequence[str], reason: str | None = None) -> None:
        super().__init__(where, identity, tuple(roles), reason)
        self.where, self.identity, self.roles, self.reason = where, identity, tuple(roles), reason

    def __str__(self) -> str:
        if self.reason is not None:
            return f"{self.where}: {self.identity!r} is not allowed to call it: {self.reason}"
        needed = f"one of the roles {', '.join(self.roles)}" if self.roles else "no role: @roles_allowed() denies all"
        return f"{self.where}: {self.identity!r} is not allowed to call it; allowed: {needed}"


class AccessDeniedError(ForbiddenError):
    """The conversation belongs to another identity. FastAPI answers 403.

    `.service` is the stored name of the service, `.memory_id` the conversation's id, and `.identity` the caller's name,
    which is empty for an anonymous one.
    """

    def __init__(self, service: str, memory_id: str, identity: str) -> None:
        super().__init__(service, identity, (), "the conversation belongs to another identity")
        self.service, self.memory_id = service, memory_id
        self.args = (service, memory_id, identity)

    def __str__(self) -> str:
        caller = repr(self.identity) if self.identity else "an anonymous caller"
        return (
            f"conversation {brief(self.memory_id)!r} of {self.service} belongs to another identity than {caller}; "
            "let its owner call, or set shared_conversations=True on a service for several people"
        )


# --- access to a tool or a method


@dataclass(frozen=True, slots=True)
class Access:
    """The identities that may call a tool or a method: those with one of `roles`; None allows every known identity.

    `is_declared` is False if no decorator declares it.
    """

    roles: frozenset[str] | None = None
    is_open: bool = False
    is_declared: bool = True

    def allows(self, identity: SecurityIdentity) -> bool:
        """Return True if this identity may call."""
        if self.is_open:
            return True
        if identity.is_anonymous:
            return False
        return self.roles is None or not self.roles.isdisjoint(identity.roles)

    def refusal(self, identity: SecurityIdentity, where: str) -> FrameworkError:
        """Return the error for an identity that may not call."""
        if identity.is_anonymous:
            return UnauthenticatedError(where)
        return ForbiddenError(where, identity.name, sorted(self.roles or ()))


_AUTHENTICATED: Final = Access()
_OPEN: Final = Access(is_open=True)


def roles_allowed(*roles: str) -> Callable[[F], F]:
    """Allow only identities that have at least one of these roles. Without roles it denies all.

        @tool
        @roles_allowed("support", "admin")
        def refund(self, order: int) -> str: ...

    Put it on a tool, a class of tools, an AI service or one of its methods, or on an endpoint of FastAPI. That of a
    method or tool replaces that of its class. A tool that the identity may not call is not offered to the model. A
    service method that it may not call raises `UnauthenticatedError` or `ForbiddenError`; an endpoint answers 401 or
    403. Raises `TypeError` for a role that is not a string, and with `@authenticated` or `@permit_all` on the same
    object.
    """
    for each in roles:
        if not isinstance(each, str) or not each.strip():
            raise TypeError(f'@roles_allowed: expected names of roles, got {each!r}; write @roles_allowed("admin")')
    access = Access(frozenset(roles))
    return lambda target: _leave_access_mark(target, access, "@roles_allowed")


def authenticated(target: F) -> F:
    """Allow every identity except the anonymous one.

    Put it where `roles_allowed` can be. It works and raises `TypeError` as `roles_allowed` does.
    """
    return _leave_access_mark(target, _AUTHENTICATED, "@authenticated")


def permit_all(target: F) -> F:
    """Allow everyone: open a tool or a method of a restricted class, or mark an endpoint as open.

    Raises `TypeError` with `@roles_allowed` or `@authenticated` on the same object.
    """
    return _leave_access_mark(target, _OPEN, "@permit_all")


def _leave_access_mark(target: F, access: Access, decorator: str) -> F:
    if not (callable(target) or isinstance(target, (staticmethod, classmethod))):
        raise TypeError(f"{decorator}: expected a function, a method or a class, got {target!r}")
    if ACCESS_MARK in getattr(target, "__dict__", {}):
        name = getattr(target, "__name__", repr(target))
        raise TypeError(f"{decorator}: {name} already has @roles_allowed, @authenticated or @permit_all; use only one")
    setattr(target, ACCESS_MARK, access)
    return target


def marked_access(member: object) -> Access | None:
    """Return the mark of a function, of a bound, static or class method, or of an object with an attribute; or None."""
    if not may_be_marked(member):
        return None
    for each in (member, getattr(member, "__func__", None), getattr(member, "func", None)):
        mark = None if isinstance(each, type) else getattr(each, ACCESS_MARK, None)
        # Objects also have the attributes of their class, whose mark is further away than those of its methods.
        if isinstance(mark, Access) and (
            ACCESS_MARK in getattr(each, "__dict__", ()) or mark is not class_access(type(each))
        ):
            return mark
    return None


def class_access(cls: type[Any]) -> Access | None:
    """Return the mark of a class; a class without one has that of its nearest base class."""
    return next((vars(base)[ACCESS_MARK] for base in cls.__mro__ if ACCESS_MARK in vars(base)), None)


def access_to(owner: type[Any] | None, members: Iterable[object]) -> Access | None:
    """Return the access to a member of `owner`: the nearest mark of `members`, its overrides, or that of the class.

    None if everyone may call it.
    """
    found = declared_access(owner, members)
    return None if found is None or found.is_open else found


def declared_access(owner: type[Any] | None, members: Iterable[object]) -> Access | None:
    """Return the same mark, also that of `@permit_all`; None without a mark."""
    found = next((mark for each in members if (mark := marked_access(each)) is not None), None)
    return class_access(owner) if found is None and owner is not None else found


OF_KNOWN: Final = Access(is_declared=False)
"""The access of tools with `not_self`: as `@authenticated`, but the program may have no identity."""


def access_to_member(owner: type[Any], name: str) -> Access | None:
    """Return the access to an attribute of a class, which may be inherited; None if everyone may call it."""
    return access_to(owner, [vars(base)[name] for base in owner.__mro__ if name in vars(base)])


# --- the report


@dataclass(frozen=True, slots=True)
class Reach:
    """One way from an entry of the program to a tool. `Container.reach()` returns all of them.

    - `entry`: where a call comes in: an endpoint (`POST /chat`), an MCP server (`MCP /mcp`) or a method (`Desk.chat`).
    - `path`: the service methods on the way, such as `Expert.ask`. `tool`: the name for the model, `?` for a provider;
      `Handbook.retrieve` for a retriever that is asked for each message.
    - `roles`: one of these roles is enough for the whole way. If no single role is, all roles that it names.
    - `requires_approval`, `guardrails`: those of the tool and of everything on the way.
    - `effects`: those that the library knows: `transactional`, `DELETE /menu/{dish}`, `destructive`.
    - `needs_identity`: True if anonymous callers cannot take this way.
    - `checks`: the sets of roles of which the caller needs one each, outermost first.
    - `approvers`: the roles that may answer calls on the way that wait for a person; empty if everyone may.
    """

    entry: str
    path: tuple[str, ...]
    tool: str
    roles: frozenset[str] = frozenset()
    requires_approval: bool = False
    guardrails: tuple[type, ...] = ()
    effects: tuple[str, ...] = ()
    needs_identity: bool = False
    checks: tuple[frozenset[str], ...] = ()
    approvers: tuple[str, ...] = ()

    def allows(self, identity: SecurityIdentity) -> bool:
        """Return True if this identity can take this way."""
        if self.needs_identity and identity.is_anonymous:
            return False
        return not any(each.isdisjoint(identity.roles) for each in self.checks)

    def as_json(self) -> dict[str, Any]:
        """Return the row as JSON data."""
        return {
            "entry": self.entry,
            "path": list(self.path),
            "tool": self.tool,
            "roles": sorted(self.roles),
            "needs_identity": self.needs_identity,
            "checks": [sorted(each) for each in self.checks],
            "requires_approval": self.requires_approval,
            "approvers": list(self.approvers),
            "guardrails": [each.__name__ for each in self.guardrails],
            "effects": list(self.effects),
        }

    def __str__(self) -> str:
        return " -> ".join((self.entry, *self.path, self.tool))
