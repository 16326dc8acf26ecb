"""How a client gets its tokens, as data: `ClientCredentials` and `TokenExchange`, their problems and their settings.

Not here: requesting and keeping tokens (`token_sources`).
"""

from __future__ import annotations

import inspect
import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args
from urllib.parse import urlsplit

from pydantic import SecretStr
from typing_extensions import is_protocol

from ..environment_variables import expand_variables, is_variable, variables_missing
from ..errors import Problem
from ..introspection import class_of, unwrapped

if TYPE_CHECKING:
    from ..settings import OAuthSettings

ClientAuth: TypeAlias = Literal["basic", "body"]
"""How a client proves its identity to the token server."""


@dataclass(frozen=True, slots=True)
class ClientCredentials:
    """Tokens for the program itself (RFC 6749, section 4.4). Pass it as `auth=` of a REST client or an MCP server.

        token = ClientCredentials("https://login.example/token", client_id="desk", client_secret="${DESK_SECRET}")

    `client_secret` is a string, a `SecretStr`, or `"${NAME}"` for an environment variable, which is read at the start.
    `scope` and `audience` are sent as they are. `client_auth` is `"basic"` for HTTP Basic authentication of the client,
    or `"body"` for its id and secret in the body. Mistakes are problems at start.
    """

    token_url: str = field(repr=False)
    client_id: str
    client_secret: str | SecretStr = field(repr=False)
    scope: str | None = None
    audience: str | None = None
    client_auth: ClientAuth = "basic"


@dataclass(frozen=True, slots=True)
class TokenExchange:
    """Tokens for the user: the token of the current caller is exchanged (RFC 8693). Pass it as `auth=`.

        token = TokenExchange(
            "https://login.example/token", client_id="desk", client_secret="${DESK_SECRET}", audience="orders"
        )

    The caller's token is `SecurityIdentity.attributes["token"]`, or that of the bean `subject`, a class whose method
    `token()` returns it. A call without it raises `UnauthenticatedError`, and sends nothing. The other parameters are
    those of `ClientCredentials`.
    """

    token_url: str = field(repr=False)
    client_id: str
    client_secret: str | SecretStr = field(repr=False)
    audience: str | None = None
    scope: str | None = None
    subject: type[Any] | None = None
    client_auth: ClientAuth = "basic"


Grant: TypeAlias = ClientCredentials | TokenExchange


def label_of(grant: Grant) -> str:
    """Return the name of a grant for messages."""
    return f"{type(grant).__name__}(client_id={grant.client_id!r})"


def grant_from(settings: OAuthSettings) -> Grant:
    """Return the grant that settings describe."""
    kind = TokenExchange if settings.kind == "token_exchange" else ClientCredentials
    return kind(**settings.model_dump(exclude={"kind"}))


def subject_classes(grant: Grant) -> tuple[type[Any], ...]:
    """Return the class of the bean with the user's token, if it needs no registration."""
    subject = grant.subject if isinstance(grant, TokenExchange) else None
    is_bean = isinstance(subject, type) and not inspect.isabstract(subject) and not is_protocol(subject)
    return (subject,) if is_bean and subject is not None else ()


def token_method(grant: object) -> Any:
    """Return the method `token` of the class that a grant names; None without one."""
    subject = grant.subject if isinstance(grant, TokenExchange) else None
    cls = class_of(unwrapped(subject).type)
    method = getattr(cls, "token", None) if isinstance(cls, type) else None
    return method if callable(method) else None


def read_secret(grant: Grant) -> str:
    """Return the client secret; "" if its environment variable is not set."""
    secret = grant.client_secret
    if isinstance(secret, SecretStr):
        return secret.get_secret_value()
    return str(expand_variables(secret) or "") if is_variable(secret) else secret


def grant_problems(grant: Grant, where: str) -> Iterator[Problem]:
    """Yield what is wrong with a grant. No problem shows the URL or the secret."""
    if not _is_url(grant.token_url):
        yield Problem(where, "invalid token URL: expected https:// and a host, without user info", "correct token_url")
    elif not _is_protected(grant.token_url):
        what = "the token URL is not encrypted: everybody on the way could read the secret and the tokens"
        yield Problem(where, what, "use https://; http:// is allowed for loopback addresses only")
    if not isinstance(grant.client_id, str) or not grant.client_id:
        yield Problem(where, "missing client id", "set client_id")
    yield from _secret_problems(grant, where)
    if grant.client_auth not in get_args(ClientAuth):
        yield Problem(where, f"invalid client_auth={grant.client_auth!r}", "use 'basic' or 'body'")
    for name, value in (("scope", grant.scope), ("audience", grant.audience)):
        if value is not None and not isinstance(value, str):
            yield Problem(where, f"invalid {name}: expected a string, got {type(value).__name__}", f"correct {name}")
    if isinstance(grant, TokenExchange) and grant.subject is not None and token_method(grant) is None:
        what = f"invalid subject={grant.subject!r}: expected a class with the method token() -> str"
        yield Problem(where, what, "name the class of the bean that has the user's token")


def _secret_problems(grant: Grant, where: str) -> Iterator[Problem]:
    given = grant.client_secret
    if isinstance(given, str) and is_variable(given) and (missing := [*variables_missing(given)]):
        yield Problem(where, f"the environment variable {missing[0]} is not set", f"set {missing[0]}")
    elif not isinstance(given, (str, SecretStr)):
        yield Problem(where, "invalid client secret: expected a string or a SecretStr", "correct client_secret")
    elif not (secret := read_secret(grant)):
        yield Problem(where, "the client secret is empty", "correct client_secret")
    elif secret.encode("utf-8", "replace").decode() != secret:
        yield Problem(where, "the client secret contains a lone surrogate", "correct client_secret")


def _is_url(url: object) -> bool:
    try:
        parts = urlsplit(url) if isinstance(url, str) and url.isprintable() and not {*" \\"} & {*url} else None
        is_whole = parts is not None and parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        return is_whole and parts is not None and "@" not in parts.netloc and not parts.fragment
    except ValueError:
        return False


def _is_protected(url: str) -> bool:
    """Return True for https, and for addresses that do not leave this machine."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme == "https" or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
