"""Who may see the dev UI: clients of this machine, and those that are allowed by name.

What reaches it can call every tool. So the client's address must be allowed, and that of each proxy's client; the name
in the address bar too, or a foreign page could have its own name lead here; and no foreign page may ask by itself.
Not here: the token (`tokens`), what is shown (`program`) and done (`calls`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from toolbox.errors import IllegalConfigurationError, Problem

from ..guarding import dependency_problems


@dataclass(frozen=True, slots=True)
class DevUi:
    """Says where the dev UI is and who may see it: `install(app, container, dev_ui=DevUi(…))`.

    `allowed_hosts` are names as in the address bar, without a port; `allowed_clients` are IP addresses or networks,
    such as `172.17.0.0/16`. Besides, a request needs the `token`: True takes `TOOLBOX_DEV_UI_TOKEN` or makes one, a
    text of at least 8 characters is the token itself, False needs none. The address with the token is printed at
    start. `dependencies`, such as `[Depends(login)]`, run before anything below the path is answered. A request must
    pass all of these. Raises `IllegalConfigurationError`.
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
        problems = list(self._problems())
        if problems:
            raise IllegalConfigurationError(problems)

    @classmethod
    def of(cls, given: bool | str | DevUi) -> DevUi:
        """What `install` was given, True or a path, in full."""
        if isinstance(given, DevUi):
            return given
        return cls(given) if isinstance(given, str) else cls()

    def _problems(self) -> Iterator[Problem]:
        if not self.path.startswith("/") or set(self.path) & set("{}?#"):
            yield Problem("DevUi", f"path is {self.path!r}", "use a path below the root, such as '/dev-ui'")
        for each in self.allowed_clients:
            try:
                ip_network(each)
            except ValueError as error:
                yield Problem("DevUi", f"allowed_clients: {error}", "use IP addresses or networks: '172.17.0.0/16'")
        for each in self.allowed_hosts:
            if not each or any(character in each for character in "/:* "):
                yield Problem("DevUi", f"allowed_hosts has {each!r}", "use host names without scheme and port")
        if not isinstance(self.token, (str, bool)) or (isinstance(self.token, str) and len(self.token) < 8):
            yield Problem("DevUi", "invalid token", "use 8 characters or more, True to make one, or False for none")
        yield from dependency_problems("DevUi", self.dependencies)

    @property
    def networks(self) -> tuple[IPv4Network | IPv6Network, ...]:
        """`allowed_clients`, read."""
        return tuple(ip_network(each) for each in self.allowed_clients)

    def refusal(self, scope: Scope) -> str | None:
        """Why this request is not answered, for the developer; None when it is."""
        headers = Headers(scope=scope)
        for client in _clients(scope, headers):
            if not self._knows_client(client):
                return f"The dev UI answers this machine only, and the client is {client}; {_way_in(client)}"
        for host in _hosts(headers):
            if not self._knows_host(host):
                fix = f"DevUi(allowed_hosts=[{host!r}])"
                return f"The dev UI answers to the names of this machine only, not to {host!r}; allow it: {fix}"
        if not self._is_own_page(scope, headers):
            return "The dev UI answers no other page than its own."
        return None

    def _is_own_page(self, scope: Scope, headers: Headers) -> bool:
        """Whether no foreign page has sent this: a browser says who did. The page may be linked from anywhere."""
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if origin is not None:
            address = origin.partition("://")[2]
            # A proxy may ask by another name than the browser, which knows that the page is of this very origin.
            renamed = site == "same-origin" and self._knows_host(_without_port(address.lower()))
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


def _clients(scope: Scope, headers: Headers) -> Iterator[str]:
    """Everyone who is said to ask: the one who is connected, and whom proxies name."""
    yield scope["client"][0] if scope.get("client") else "unknown"
    for name in ("x-forwarded-for", "x-real-ip"):
        for line in headers.getlist(name):
            yield from (each.strip() for each in line.split(","))
    for value in _forwarded("for", headers):
        yield (value if value.count(":") > 1 and "[" not in value else _without_port(value)).strip("[]")


def _way_in(client: str) -> str:
    try:
        ip_address(client)
    except ValueError:
        return "serve it at an address, or by a proxy that names its clients: by IP address they can be allowed"
    return f"allow it: DevUi(allowed_clients=[{client!r}])"


def _hosts(headers: Headers) -> Iterator[str]:
    """The names it is asked by, without ports."""
    named = (*headers.getlist("x-forwarded-host"), *_forwarded("host", headers))
    for line in [*(headers.getlist("host") or [""]), *named]:
        for each in line.split(","):
            yield _without_port(each.strip().lower())


def _forwarded(key: str, headers: Headers) -> Iterator[str]:
    """The values of a parameter of `Forwarded`."""
    for line in headers.getlist("forwarded"):
        for part in line.replace(";", ",").split(","):
            name, _, value = part.partition("=")
            if name.strip().lower() == key:
                yield value.strip().strip('"')


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).removesuffix(".")
