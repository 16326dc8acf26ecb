"""Reads and checks the settings of a config key: base URL, headers, credentials, certificates, proxy.

Includes the headers of the incoming request that clients pass on. Not here: the settings' fields (`settings`), single
requests and connections (`connections`).
"""

from __future__ import annotations

import base64
import re
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from ..callers import Caller, current_caller
from ..context import headers_of_current_span
from ..errors import Problem
from .encoding import PROTECTED_HEADERS, EncodingError, encode_header_value, is_header_name, secrets_in_header

if TYPE_CHECKING:
    from ..settings import RestSettings

_incoming: ContextVar[tuple[Mapping[str, str], Caller | None] | None]
_incoming = ContextVar("toolbox.rest.incoming", default=None)


@contextmanager
def propagate_headers(headers: Mapping[str, str]) -> Iterator[None]:
    """Let the REST clients that are used in this block pass on headers of an incoming request.

    Each client sends the headers that its `propagate_headers` setting names, by default `traceparent` and
    `tracestate`. The same setting applies to the headers of the current OpenTelemetry span.
    """
    token = _incoming.set((headers, current_caller.get()))  # read only when a request is sent
    try:
        yield
    finally:
        _incoming.reset(token)


def propagated_headers(names: tuple[str, ...]) -> dict[str, str]:
    """Return the headers with these names for an outgoing request; those of the current span take precedence."""
    incoming = {name.lower(): value for name, value in _incoming_headers().items()}
    found = {name.lower(): incoming[name.lower()] for name in names if name.lower() in incoming}
    allowed = {name.lower() for name in names}
    # A propagator also adds baggage, which may identify the user. Only named headers are sent.
    return found | {name: value for name, value in headers_of_current_span().items() if name.lower() in allowed}


def _incoming_headers() -> Mapping[str, str]:
    """Return the headers of the innermost `propagate_headers` block or web request."""
    given, caller = _incoming.get(), current_caller.get()
    if given is not None and given[1] is caller:
        return given[0]
    of_request: Mapping[str, str] | None = getattr(caller, "headers", None)
    return of_request if of_request is not None else given[0] if given is not None else {}


_NO_BASE = re.compile(r"[\s\\{}]")
"""Characters that a base URL cannot contain. Braces are among them: the base is the same for all requests."""


@dataclass(frozen=True, slots=True, eq=False)
class KeySettings:
    """The settings of one config key, set in code. Register it; the REST clients of that key use it."""

    key: str
    settings: RestSettings
    transport: Any = None
    auth: Any = None

    def bean(self) -> KeySettings:
        """Return itself: the factory of the bean. Through it, the check reads the settings before beans are made."""
        return self


def rest_settings(key: str, *, transport: Any = None, auth: Any = None, **settings: Any) -> KeySettings:
    """Create the settings of a config key for `container.register`; they override the environment.

        container.register(Weather, rest.rest_settings("weather", url="https://weather.example", timeout=10))

    `settings` are the fields of `toolbox.settings.RestSettings` (`url`, `timeout`, `headers`, `retries`, …). `auth` is
    an `httpx2.Auth`, a function or bean class that returns one, or a `ClientCredentials` or `TokenExchange` of
    `toolbox.oauth`. `transport` is an httpx2 transport to use instead of the network, such as `httpx2.MockTransport`.
    Raises pydantic's `ValidationError`.
    """
    from ..settings import RestSettings, settings_key

    return KeySettings(settings_key(key), RestSettings(**settings), transport, auth)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestEndpoint:
    """The target of all requests of one config key. `url` has no user, no query and no trailing slash.

    `credentials` (headers) and `query` are only sent to this origin. A header that a request sets itself replaces the
    one in `credentials`. `secrets` are texts that errors must not show.
    """

    key: str
    url: str
    settings: RestSettings = field(hash=False, repr=False)
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    credentials: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    query: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    secrets: tuple[str, ...] = field(default=(), repr=False)
    auth: Any = field(default=None, hash=False, repr=False)
    transport: Any = field(default=None, hash=False, repr=False)


def merge_settings(key: str, environment: Mapping[str, RestSettings], given: list[KeySettings]) -> KeySettings:
    """Return the settings of a normalized key: those of the environment, overridden by those set in code."""
    from ..settings import RestSettings

    settings = environment.get(key, RestSettings())
    transport = auth = None
    for each in given:
        if each.key == key:
            fields = {name: getattr(each.settings, name) for name in each.settings.model_fields_set}
            settings = settings.model_copy(update=fields)
            transport = transport if each.transport is None else each.transport
            auth = auth if each.auth is None else each.auth
    return KeySettings(key, settings, transport, auth)


def endpoint_problems(where: str, key: str, settings: RestSettings, base_url: str | None) -> Iterator[Problem]:
    """Yield the problems in the settings of a key."""
    url = settings.url or base_url
    variable = f"TOOLBOX_REST__{key.upper()}__URL"
    if not url:
        fix = f"set {variable}, or container.register(rest.rest_settings({key!r}, url=…))"
        yield Problem(where, f"no URL is configured for the config key {key!r}", fix)
        return
    if not _is_base_url(url):
        # The URL is not shown: it may contain a password, and a URL that cannot be parsed cannot be masked.
        what = f"invalid URL for the config key {key!r}: expected http:// or https://, a host and an optional path"
        yield Problem(where, what, f"correct {variable}; for a query, declare @rest.client_query_param(…)")
        return
    yield from _header_problems(where, read_endpoint(KeySettings(key, settings), base_url))
    for path in (settings.verify, settings.client_certificate):
        if isinstance(path, str) and not Path(path).is_file():
            yield Problem(
                where, f"the settings of {key!r} name the file {path!r}, which does not exist", "correct the path"
            )
            break
    else:
        yield from _certificate_problems(where, key, settings)
    proxy = settings.proxy.get_secret_value() if settings.proxy is not None else "http://"
    if urlsplit(proxy).scheme not in ("http", "https", "socks5", "socks5h"):
        yield Problem(where, f"invalid proxy URL for the config key {key!r}", "use http://, https:// or socks5://")


def _is_base_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        return is_whole and not any(parts[3:]) and not _NO_BASE.search(f"{parts.hostname}{parts.path}")
    except ValueError:
        return False


def _certificate_problems(where: str, key: str, settings: RestSettings) -> Iterator[Problem]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if isinstance(settings.verify, str):
            context.load_verify_locations(settings.verify)
        if settings.client_certificate is not None:
            context.load_cert_chain(settings.client_certificate)
    except OSError:  # an SSLError is one too
        fix = "use PEM files: trusted certificates for VERIFY, a key with its certificate for CLIENT_CERTIFICATE"
        yield Problem(where, f"invalid certificate file in the settings of {key!r}", fix)


def _header_problems(where: str, endpoint: RestEndpoint) -> Iterator[Problem]:
    propagated = ((name, "") for name in endpoint.settings.propagate_headers)
    for name, value in (*endpoint.headers, *endpoint.credentials, *propagated):
        if not is_header_name(name) or name.lower() in PROTECTED_HEADERS:
            yield Problem(
                where, f"invalid header name {name!r} in the settings of {endpoint.key!r}", "correct the settings"
            )
        try:
            encode_header_value(value)
        except EncodingError as error:
            yield Problem(where, f"the header {name} of {endpoint.key!r} cannot be sent: {error}", "correct its value")


def read_endpoint(given: KeySettings, base_url: str | None) -> RestEndpoint:
    """Return the endpoint of settings that have no problems."""
    settings = given.settings
    parts = urlsplit(settings.url or base_url or "")
    host = parts.netloc.rpartition("@")[2]
    credentials: list[tuple[str, str]] = []
    secrets = [
        secret
        for name, value in settings.headers.items()
        for secret in secrets_in_header(name, value.get_secret_value())
    ]
    username = settings.username if settings.username is not None else unquote(parts.username or "")
    password = settings.password.get_secret_value() if settings.password else unquote(parts.password or "")
    if settings.bearer_token is not None:
        token = settings.bearer_token.get_secret_value()
        credentials.append(("Authorization", f"Bearer {token}"))
        secrets.append(token)
    elif username or password:
        encoded = base64.b64encode(f"{username}:{password}".encode()).decode()
        credentials.append(("Authorization", f"Basic {encoded}"))
        secrets += [encoded, password]
    if settings.proxy is not None:
        secrets.append(unquote(urlsplit(settings.proxy.get_secret_value()).password or ""))
    query: tuple[tuple[str, str], ...] = ()
    if settings.api_key is not None:
        key = settings.api_key.get_secret_value()
        secrets.append(key)
        if settings.api_key_query is not None:
            query = ((settings.api_key_query, key),)
        else:
            credentials.append((settings.api_key_header, key))
    return RestEndpoint(
        key=given.key,
        url=f"{parts.scheme}://{host}{parts.path.rstrip('/')}",
        settings=settings,
        headers=tuple((name, value.get_secret_value()) for name, value in settings.headers.items()),
        credentials=tuple(credentials),
        query=query,
        secrets=tuple(secrets),
        auth=given.auth,
        transport=given.transport,
    )
