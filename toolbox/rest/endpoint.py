"""Where a REST client's requests go and what they all carry: its settings, read and checked.

Not here: the settings' fields (`settings`), a single request (`building`), connections (`connections`).
"""

from __future__ import annotations

import base64
import re
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from ..errors import Problem
from .encoding import PROTECTED_HEADERS, EncodingError, header_value, is_header_name, secrets_in_header

if TYPE_CHECKING:
    from ..settings import RestSettings


_NO_BASE = re.compile(r"[\s\\{}]")
"""What no URL has: a template's braces neither, since a base is the same for all requests."""


@dataclass(frozen=True, slots=True, eq=False)
class KeySettings:
    """The settings of one config key, given in code; a bean, which the REST clients of that key find."""

    key: str
    settings: RestSettings
    transport: Any = None
    auth: Any = None

    def bean(self) -> KeySettings:
        """Itself: the factory of its bean, by which the check knows the settings before any bean is made."""
        return self


def rest_settings(key: str, *, transport: Any = None, auth: Any = None, **settings: Any) -> KeySettings:
    """The settings of a config key, for `container.register`: what is given here wins over the environment.

    `settings` are the fields of `toolbox.settings.RestSettings` (`url`, `timeout`, `headers`, `retries`, …). `auth` is
    an `httpx2.Auth`, or a function or bean class that gives one; `transport` an httpx2 transport, for another network.
    """
    from ..settings import RestSettings, settings_key

    return KeySettings(settings_key(key), RestSettings(**settings), transport, auth)


@dataclass(frozen=True, slots=True)
class RestEndpoint:
    """Where the requests of one config key go. `url` has no user, no query and no slash at its end.

    `credentials` are headers that are sent to this very origin only, and only where a request does not set them itself;
    so is `query`. `secrets` are texts that no error may show.
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


def merged(key: str, environment: Mapping[str, RestSettings], given: list[KeySettings]) -> KeySettings:
    """The settings of a key (as `settings_key` writes it): the environment's, and over them those given in code."""
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
    """What is wrong with the settings of a key."""
    url = settings.url or base_url
    variable = f"TOOLBOX_REST__{key.upper()}__URL"
    if not url:
        fix = f"set {variable}, or container.register(rest.rest_settings({key!r}, url=…))"
        yield Problem(where, f"no URL is configured for the config key {key!r}", fix)
        return
    if not _is_base_url(url):
        # The URL is not shown: it may hold a password, and one that cannot be read cannot be masked.
        what = f"the URL of {key!r} is no http:// or https:// URL of a host and a path"
        yield Problem(where, what, f"mend {variable}; for a query, declare @rest.client_query_param(…)")
        return
    yield from _header_problems(where, read_endpoint(KeySettings(key, settings), base_url))
    for path in (settings.verify, settings.client_certificate):
        if isinstance(path, str) and not Path(path).is_file():
            yield Problem(where, f"the settings of {key!r} name the file {path!r}, which is not there", "mend the path")
            break
    else:
        yield from _certificate_problems(where, key, settings)
    proxy = settings.proxy.get_secret_value() if settings.proxy is not None else "http://"
    if urlsplit(proxy).scheme not in ("http", "https", "socks5", "socks5h"):
        yield Problem(where, f"the proxy of {key!r} is no URL of a proxy", "use http://, https:// or socks5://")


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
        fix = "give PEM: certificates to trust for VERIFY, key and certificate for CLIENT_CERTIFICATE"
        yield Problem(where, f"a certificate that the settings of {key!r} name cannot be read", fix)


def _header_problems(where: str, endpoint: RestEndpoint) -> Iterator[Problem]:
    propagated = ((name, "") for name in endpoint.settings.propagate_headers)
    for name, value in (*endpoint.headers, *endpoint.credentials, *propagated):
        if not is_header_name(name) or name.lower() in PROTECTED_HEADERS:
            yield Problem(where, f"{name!r} cannot be a header of {endpoint.key!r}", "mend the settings")
        try:
            header_value(value)
        except EncodingError as error:
            yield Problem(where, f"the header {name} of {endpoint.key!r} cannot be sent: {error}", "mend its value")


def read_endpoint(given: KeySettings, base_url: str | None) -> RestEndpoint:
    """The endpoint of settings that have no problems."""
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
        given.key,
        f"{parts.scheme}://{host}{parts.path.rstrip('/')}",
        settings,
        tuple((name, value.get_secret_value()) for name, value in settings.headers.items()),
        tuple(credentials),
        query,
        tuple(secrets),
        given.auth,
        given.transport,
    )
