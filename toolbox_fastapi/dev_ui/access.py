"""Access control of the dev UI: `DevUi`, the checks of client address, host name and origin, and the token.

A client of the dev UI can call every tool. So the client's address must be allowed, also the one that a proxy reports;
the host name must be allowed, because another site's name could resolve to this machine; and pages of other sites may
not send requests. A token is needed as well: behind a proxy on this machine that adds no headers, every client has a
local address. Not here: the pages (`routes`), the program's dependencies that run before them (`passed_on_routes`).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote_plus

from fastapi import params
from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.responses import Response
from starlette.types import Scope

from toolbox.errors import IllegalConfigurationError, Problem


@dataclass(frozen=True, slots=True)
class DevUi:
    """The path of the dev UI and who may use it.

        install(app, container, dev_ui=DevUi(allowed_clients=["172.17.0.0/16"]))

    A request must pass all of these checks:

    - `allowed_hosts`: host names as in the address bar, without a port. Local names are always allowed.
    - `allowed_clients`: IP addresses or networks. Clients on this machine are always allowed.
    - `token`: True uses `TOOLBOX_DEV_UI_TOKEN` or creates a token, a text of 8 or more characters is the token, False
      turns it off. The address with the token is printed at startup.
    - `dependencies`: FastAPI dependencies, such as `[Depends(login)]`, that run before each request below the path.

    Raises `IllegalConfigurationError` for invalid values.
    """

    path: str = "/dev-ui"
    allowed_hosts: Sequence[str] = ()
    allowed_clients: Sequence[str] = ()
    token: str | bool = field(default=True, repr=False)
    dependencies: Sequence[Any] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", self.path.rstrip("/"))
        object.__setattr__(self, "allowed_hosts", tuple(self.allowed_hosts))
        object.__setattr__(self, "allowed_clients", tuple(self.allowed_clients))
        object.__setattr__(self, "dependencies", tuple(self.dependencies))
        problems = list(self._problems_of_options())
        if problems:
            raise IllegalConfigurationError(problems)

    @classmethod
    def of(cls, given: bool | str | DevUi) -> DevUi:
        """Convert the `dev_ui` argument of `install`: True, a path or a `DevUi`."""
        if isinstance(given, DevUi):
            return given
        return cls(given) if isinstance(given, str) else cls()

    def _problems_of_options(self) -> Iterator[Problem]:
        if not self.path.startswith("/") or set(self.path) & set("{}?#"):
            yield Problem("DevUi", f"invalid path={self.path!r}", "use a path below the root, such as '/dev-ui'")
        for each in self.allowed_clients:
            try:
                ip_network(each)
            except ValueError as error:
                yield Problem("DevUi", f"allowed_clients: {error}", "use IP addresses or networks: '172.17.0.0/16'")
        for each in self.allowed_hosts:
            if not each or any(character in each for character in "/:* "):
                yield Problem("DevUi", f"invalid allowed_hosts={each!r}", "use host names without scheme and port")
        if not isinstance(self.token, (str, bool)) or (isinstance(self.token, str) and len(self.token) < 8):
            yield Problem("DevUi", "invalid token", "use 8 characters or more, True to make one, or False for none")
        yield from dependency_problems("DevUi", self.dependencies)

    @property
    def networks(self) -> tuple[IPv4Network | IPv6Network, ...]:
        """Return `allowed_clients` as networks."""
        return tuple(ip_network(each) for each in self.allowed_clients)

    def refusal(self, scope: Scope) -> str | None:
        """Return why this request is rejected, or None if it is allowed."""
        headers = Headers(scope=scope)
        for client in _find_clients(scope, headers):
            if not self._knows_client(client):
                return f"The dev UI allows only clients on this machine, not {client}; {_access_hint(client)}"
        for host in _find_hosts(headers):
            if not self._knows_host(host):
                fix = f"DevUi(allowed_hosts=[{host!r}])"
                return f"The dev UI allows only local host names, not {host!r}; to allow it, use {fix}"
        if not self._is_own_page(scope, headers):
            return "The dev UI rejects requests from pages of other sites."
        return None

    def _is_own_page(self, scope: Scope, headers: Headers) -> bool:
        """Return True unless a page of another site sent this request; following a link to the dev UI is allowed."""
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if origin is not None:
            address = origin.partition("://")[2]
            # A proxy may change the host name; the browser says that the page has the same origin.
            renamed = site == "same-origin" and self._knows_host(_remove_port(address.lower()))
            if address != headers.get("host") and not renamed:
                return False
        return scope["method"] in ("GET", "HEAD") or site in (None, "same-origin", "none")

    def _knows_client(self, client: str) -> bool:
        try:
            address = ip_address(client)
        except ValueError:
            return False
        if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return address.is_loopback or any(address in network for network in self.networks)

    def _knows_host(self, host: str) -> bool:
        if host == "localhost" or host in {each.lower() for each in self.allowed_hosts}:
            return True
        try:
            return ip_address(host.strip("[]")).is_loopback
        except ValueError:
            return False


def _find_clients(scope: Scope, headers: Headers) -> Iterator[str]:
    """Yield the address of the connected client and those that proxies report."""
    yield scope["client"][0] if scope.get("client") else "unknown"
    for name in ("x-forwarded-for", "x-real-ip"):
        for line in headers.getlist(name):
            yield from (each.strip() for each in line.split(","))
    for value in _read_forwarded("for", headers):
        yield (value if value.count(":") > 1 and "[" not in value else _remove_port(value)).strip("[]")


def _access_hint(client: str) -> str:
    try:
        ip_address(client)
    except ValueError:
        return "serve it on an IP address, or behind a proxy that reports the client's IP address"
    return f"to allow it, use DevUi(allowed_clients=[{client!r}])"


def _find_hosts(headers: Headers) -> Iterator[str]:
    """Yield the host names of the request, without ports."""
    named = (*headers.getlist("x-forwarded-host"), *_read_forwarded("host", headers))
    for line in [*(headers.getlist("host") or [""]), *named]:
        for each in line.split(","):
            yield _remove_port(each.strip().lower())


def _read_forwarded(key: str, headers: Headers) -> Iterator[str]:
    """Yield the values of a parameter of the `Forwarded` header."""
    for line in headers.getlist("forwarded"):
        for part in line.replace(";", ",").split(","):
            name, _, value = part.partition("=")
            if name.strip().lower() == key:
                yield value.strip().strip('"')


def _remove_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).removesuffix(".")


# --- the token

TOKEN_KEY = "toolbox.dev_ui_token"
"""The key in an ASGI scope of the token that was in the URL."""

LOCAL = {"", "0.0.0.0", "127.0.0.1", "::", "::1", "localhost"}


class Token:
    """The token of the dev UI; `value` is None if the token is turned off."""

    def __init__(self, chosen: str | bool) -> None:
        self.is_chosen = chosen is not True
        self.value = chosen if isinstance(chosen, str) else make_token() if chosen else None

    def opens(self, scope: Scope) -> bool:
        """Return True if the request has the token, in its URL or as a cookie."""
        if self.value is None:
            return True
        return self.matches(scope.get(TOKEN_KEY, "")) or self._is_cookie_of(scope)

    def matches(self, given: str) -> bool:
        """Return True for the right token; compare in constant time."""
        return self.value is None or hmac.compare_digest(given.encode(), self.value.encode())

    def _is_cookie_of(self, scope: Scope) -> bool:
        found = False
        for name, value in scope["headers"]:
            if name == b"cookie":
                given = cookie_parser(value.decode("latin-1")).get(self._cookie_name, "")
                found |= hmac.compare_digest(given.encode(), self._cookie_value.encode())
        return found

    def remember(self, response: Response, scope: Scope) -> None:
        """Set the cookie: a session cookie for the path of the dev UI."""
        is_secure = scope.get("scheme") == "https"
        response.set_cookie(
            self._cookie_name, self._cookie_value, path=None, httponly=True, samesite="lax", secure=is_secure
        )

    # All ports of a host share cookies, so the name depends on the token.
    @property
    def _cookie_name(self) -> str:
        return f"toolbox_dev_ui_{self._make_digest('name')[:12]}"

    @property
    def _cookie_value(self) -> str:
        return self._make_digest("value")

    def _make_digest(self, purpose: str) -> str:
        return hmac.new((self.value or "").encode(), purpose.encode(), hashlib.sha256).hexdigest()


def take_token(scope: Scope, path: str) -> None:
    """Move the token of a URL below `path` from the query into the scope, so that access logs do not contain it."""
    query: bytes = scope.get("query_string", b"")
    here: str = scope["path"]
    candidates = (here, here.removeprefix(scope.get("root_path", "")))
    if b"=" not in query or not any(f"{each}/".startswith(f"{path}/") for each in candidates):
        return
    rest = []
    for pair in query.split(b"&"):
        name, _, value = pair.decode("latin-1").partition("=")
        if unquote_plus(name) == "token":
            scope[TOKEN_KEY] = unquote_plus(value)
        else:
            rest.append(pair)
    scope["query_string"] = b"&".join(rest)


def print_address(path: str, token: str | None, server: str | None) -> None:
    """Print the address of the dev UI. To the terminal and not to a log, because it contains the token."""
    query = "" if token is None else f"?token={quote(token, safe='')}"
    where = f"{server}{path}/{query}" if server else f"{path}/{query} (below the address of this server)"
    if sys.stderr is not None:
        sys.stderr.write(f"Dev UI: {where}\n")
        sys.stderr.flush()


def server_address() -> str | None:
    """Return the address of the uvicorn server that is starting this application, or None for other servers.

    An ASGI application learns its address with the first request. Before that, the configuration is found in the frame
    of uvicorn's lifespan, which called this code.
    """
    frame = sys._getframe()
    while frame.f_globals.get("__name__") != "uvicorn.lifespan.on":
        if frame.f_back is None:
            return None
        frame = frame.f_back
    config: Any = getattr(frame.f_locals.get("self"), "config", None)
    host, port = getattr(config, "host", None), getattr(config, "port", None)
    if not isinstance(host, str) or not isinstance(port, int) or not port:
        return None
    if getattr(config, "uds", None) is not None or getattr(config, "fd", None) is not None:
        return None
    shown = "localhost" if host in LOCAL else f"[{host}]" if ":" in host else host
    return f"{'https' if getattr(config, 'is_ssl', False) else 'http'}://{shown}:{port}"


def make_token() -> str:
    """Create a token that stays the same after a reload and in all workers: they have the same parent process."""
    secret = secret_of_user() or secrets.token_bytes(32)
    return hmac.new(secret, str(os.getppid()).encode(), hashlib.sha256).hexdigest()[:48]


def secret_of_user() -> bytes | None:
    """Return the secret in the user's cache folder; create it if missing. None if it cannot be stored privately."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "toolbox")
        file = folder / "dev-ui-secret"
        if not file.exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft = folder / f"{file.name}-{secrets.token_hex(8)}"
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as opened:
                opened.write(secrets.token_bytes(32))
            try:
                os.link(draft, file)  # atomic, and does not replace the file of another process
            except FileExistsError:
                pass
            finally:
                draft.unlink()
        return _read_private(file)
    except (OSError, RuntimeError):  # RuntimeError: no home folder
        return None


def _read_private(file: Path) -> bytes | None:
    with file.open("rb") as opened:
        facts = os.fstat(opened.fileno())
        if os.name == "posix" and (facts.st_uid != os.getuid() or facts.st_mode & 0o077):
            return None
        secret = opened.read(64)
    return secret if len(secret) == 32 else None


def dependency_problems(where: str, dependencies: Sequence[Any]) -> Iterator[Problem]:
    """Yield a problem for each of `dependencies` that is not made with `Depends` or `Security`."""
    for each in dependencies:
        if not isinstance(each, params.Depends):
            name = getattr(each, "__name__", repr(each))
            yield Problem(where, f"dependencies has {name!r}, which is not a dependency", f"write Depends({name})")
