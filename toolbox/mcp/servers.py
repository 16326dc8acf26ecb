"""The MCP servers of a container, from code and settings: `mcp_server`, and the connections in the bean `McpServers`.

Not here: sending requests to a server (`connection`), its tools in services (`server_tools`).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pydantic import SecretStr
from typing_extensions import is_protocol

from ..container import Container, internals_of
from ..di.decorators import application_scoped
from ..di.graph import BeanGraph
from ..di.injection_points import InjectionPoint, point_of, points_of
from ..errors import Problem
from ..oauth.grants import Grant, grant_from, grant_problems
from ..oauth.token_sources import TokenSources, subject_problems, token_auth
from ..rest.client_plans import ClientPlan
from ..rest.clients import RestConnections
from ..rest.encoding import encode_header_value, is_header_name
from ..rest.endpoint import KeySettings
from ..services.plans import MethodPlan
from ..settings import McpSettings, RestSettings, ToolboxSettings, settings_key
from .connection import McpConnection
from .notifications import McpEvent, McpListener

if TYPE_CHECKING:
    from .bearer_auth import ServerTokens

NAMED_SERVERS = "__toolbox_mcp_servers__"
"""The attribute of tool providers with the names of their servers, which cannot be removed."""


@dataclass(frozen=True, slots=True)
class McpServer:
    """An MCP server with its settings, made by `mcp_server`. Register it as a bean to make it available.

    `headers` is a function or the class of a callable bean that returns the headers of a call, or None. `auth` are the
    tokens that are sent.
    """

    name: str
    settings: McpSettings
    headers: Callable[..., Any] | None = None
    auth: Grant | None = None

    @property
    def __toolbox_implies__(self) -> tuple[Any, ...]:
        """Return the class of the headers and the tokens, which need no registration."""
        return (*self._headers_class(), *(() if self.auth is None else (self.auth,)))

    def _headers_class(self) -> tuple[type[Any], ...]:
        headers = self.headers
        is_bean = isinstance(headers, type) and not inspect.isabstract(headers) and not is_protocol(headers)
        return (headers,) if is_bean and isinstance(headers, type) else ()

    @property
    def __toolbox_later__(self) -> tuple[InjectionPoint, ...]:
        """Return the beans that the headers need."""
        where = f"mcp_server({self.name!r}).headers"
        if isinstance(self.headers, type):
            return (point_of(self.headers, where),)
        return tuple(points_of(self.headers, where)) if inspect.isroutine(self.headers) else ()

    def __toolbox_check__(self, graph: BeanGraph) -> Iterator[Problem]:
        for point in self.__toolbox_later__:
            yield from graph.problems_of(point)


def mcp_server(
    name: str,
    *,
    command: str | None = None,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    url: str | None = None,
    headers: Mapping[str, str] | Callable[..., Any] | None = None,
    auth: Grant | None = None,
    **options: Any,
) -> McpServer:
    """Declare an MCP server: a process (`command`, `args`, `env`, `cwd`) or an address (`url`, `headers`, `auth`).

        files = mcp_server("files", command="npx", args=["@modelcontextprotocol/server-filesystem", "/srv/files"])
        container.register_instance(files, name="files")

    `url` is that of a server over streamable HTTP. `headers` are the same for all calls, or a function or the class of
    a callable bean, `def` or `async def`, that returns the headers of each call, such as the token of the current user.
    It is looked up in the scope of the caller. `auth` is a `ClientCredentials` or `TokenExchange` of `toolbox.oauth`,
    whose tokens are sent.

    `options` are the other fields of `McpSettings`: `timeout` and `connect_timeout` (seconds), `include`, `exclude`,
    `prefix`, `names`, `max_reply_bytes`, `approval`, `pin_tools`, `expose_resources`, `required`. A registered server
    replaces settings with the same name. Raises `ValueError` without `command` and `url`, or with both, for headers or
    `auth` of a process, and for invalid options.
    """
    if (command is None) == (url is None):
        raise ValueError(f"mcp_server({name!r}): pass either command= or url=")
    per_call: Callable[..., Any] | None = None
    if headers is not None and not isinstance(headers, Mapping):
        if not callable(headers):
            raise ValueError(
                f"mcp_server({name!r}): invalid headers={headers!r}; use a mapping, a function or a bean class"
            )
        if url is None:
            raise ValueError(f"mcp_server({name!r}): headers= has no effect on a process; pass url=, or env=")
        per_call, headers = headers, None
    if auth is not None and not isinstance(auth, Grant):
        got = type(auth).__name__
        raise ValueError(f"mcp_server({name!r}): expected auth=ClientCredentials(…) or TokenExchange(…), got {got}")
    if auth is not None and url is None:
        raise ValueError(f"mcp_server({name!r}): auth= has no effect on a process; pass url=, or env=")
    settings = McpSettings(
        command=command,
        args=tuple(args),
        env={key: SecretStr(value) for key, value in (env or {}).items()},
        cwd=cwd,
        url=url,
        headers={key: SecretStr(value) for key, value in (headers or {}).items()},
        **options,
    )
    return McpServer(name, settings, per_call, auth)


def all_servers(settings: ToolboxSettings, registered: Sequence[McpServer]) -> dict[str, McpServer]:
    """Return all servers by the key of the name; registered servers replace settings."""
    configured = {
        key: McpServer(key, each, auth=None if each.auth is None else grant_from(each.auth))
        for key, each in settings.mcp.items()
    }
    return {**configured, **{settings_key(each.name): each for each in registered}}


def servers_in(graph: BeanGraph) -> dict[str, McpServer]:
    """Return all servers of a program that starts, by the key of the name."""
    made = [each.factory() for each in graph.definitions if each.provides in (ToolboxSettings, McpServer)]
    settings = next((each for each in made if isinstance(each, ToolboxSettings)), None) or ToolboxSettings()
    return all_servers(settings, [each for each in made if isinstance(each, McpServer)])


def auth_problems(server: McpServer, graph: BeanGraph) -> Iterator[Problem]:
    """Yield the problems of the tokens of a server."""
    grant, settings, where = server.auth, server.settings, f"MCP server {server.name!r}"
    if grant is None:
        return
    if settings.auth is not None:  # that of code is checked where its secret is read
        yield from grant_problems(grant, f"{where}: AUTH")
    if settings.url is None:
        yield Problem(where, "auth has no effect on a process", "set its URL, or its ENV")
    named = {name.lower() for name in settings.headers}
    if "authorization" in named or "@" in urlsplit(settings.url or "").netloc:
        what = "its headers, or the user in its URL, set Authorization, but auth= sets it"
        yield Problem(where, what, "remove one of the two")
    yield from subject_problems(grant, graph, where)


@application_scoped
class McpServers:
    """The connections to the MCP servers of a container; a bean.

    A connection opens at its first use and closes when the container stops. `add` and `remove` change the servers while
    the container runs: `@mcp_toolbox()` without names offers those of the moment.
    """

    __toolbox_implies__ = (RestConnections, TokenSources)

    def __init__(
        self,
        settings: ToolboxSettings,
        registered: list[McpServer],
        listeners: list[McpListener],
        container: Container,
        http: RestConnections,
        sources: TokenSources,
    ) -> None:
        self._http, self._sources = http, sources
        self._servers = all_servers(settings, registered)
        self._container = container
        self._listeners = listeners
        self._connections: dict[str, McpConnection] = {}
        self._removed: set[McpConnection] = set()
        self._stop_timeout = settings.stop_timeout

    @classmethod
    def __toolbox_check__(cls, graph: BeanGraph) -> Iterator[Problem]:
        for server in servers_in(graph).values():
            yield from auth_problems(server, graph)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all servers."""
        return tuple(self._servers)

    def server(self, name: str) -> McpConnection:
        """Return the connection to a server: tools, resources, prompts. Raises `KeyError` for an unknown name."""
        key = settings_key(name)
        if key not in self._connections:
            server = self._servers[key]
            on_event = self._notify_listeners if self._listeners else None
            headers = None if server.headers is None else partial(self._headers_of, server.headers, key)
            # Always the declared name, because it is stored with calls that wait for approval.
            tokens = None if server.auth is None else self._tokens_for(server, server.auth)
            self._connections[key] = McpConnection(server.name, server.settings, on_event, headers, tokens)
        return self._connections[key]

    def _tokens_for(self, server: McpServer, grant: Grant) -> ServerTokens:
        from ..rest.exchange import RestExchange
        from .bearer_auth import ServerTokens

        limits = RestSettings(timeout=server.settings.timeout, connect_timeout=server.settings.connect_timeout)
        connection = self._http.connection(KeySettings("token server", limits), grant.token_url)
        exchange = RestExchange(connection, ClientPlan(), internals_of(self._container))
        auth = token_auth(self._sources.source_of(grant))
        return ServerTokens(exchange, auth, f"MCP server {server.name!r}", server.settings.timeout)

    async def add(self, server: McpServer) -> None:
        """Add a server while the container runs; calls that begin from now on can use its tools.

        Only a `required` server is connected at once, and is not added if it cannot be reached (`McpConnectionError`).
        Raises `ValueError` if the name is taken, `IllegalConfigurationError` if its `auth` has problems, and
        `TypeError` for anything but an `McpServer`.
        """
        if not isinstance(server, McpServer):
            raise TypeError(f"McpServers.add: expected an mcp_server(…), got {type(server).__name__}")
        key = settings_key(server.name)
        if key in self._servers:
            raise ValueError(f"there is an MCP server {server.name!r}; use another name, or remove it first")
        self._servers[key] = server
        try:
            connection = self.server(server.name)
            if server.settings.required and not connection.depends_on_caller:
                await connection.takes_input()
        except BaseException:
            await self._forget_server(key)
            raise

    async def remove(self, name: str) -> None:
        """Remove a server while the container runs. Its running calls have `stop_timeout`; then it is closed.

        Raises `KeyError` for an unknown name, and `ValueError` for a server that a service names.
        """
        key = settings_key(name) if isinstance(name, str) else ""
        if key not in self._servers:
            raise KeyError(name)
        for methods in internals_of(self._container).host.plans.values():
            for plan in methods.values():
                if any(key == settings_key(each) for each in _servers_named_by(plan)):
                    raise ValueError(f"MCP server {name!r} cannot be removed: {plan.where} names it")
        await self._forget_server(key)

    async def _forget_server(self, key: str) -> None:
        """Forget a server, wait for its running calls, and close its connection."""
        del self._servers[key]
        connection = self._connections.pop(key, None)
        if connection is None:
            return
        self._removed.add(connection)  # the container can stop while calls are running
        try:
            await connection.finish(self._stop_timeout)
        finally:
            self._removed.discard(connection)

    async def _headers_of(self, given: Callable[..., Any], key: str) -> dict[str, str]:
        """Return the headers of the current call."""
        if isinstance(given, type):
            given = await self._container.aget(given)
        if inspect.isroutine(given):
            headers = await self._container.acall(given)
        else:
            headers = given()
            if inspect.isawaitable(headers):
                headers = await headers
        return _check_headers(key, headers)

    def _notify_listeners(self, event: McpEvent) -> None:
        for listener in self._listeners:
            listener.on_mcp_event(event)

    async def ready(self) -> bool:
        """Return True if all servers in use answer; a broken connection is opened again. For readiness checks.

        Servers that were never used are not started. Raises `McpError` or `OAuthError` if a server does not answer.
        """
        await asyncio.gather(*(each.check() for each in self._connections.values()))
        return True

    async def stop(self) -> None:
        """Close all connections and end the processes of stdio servers."""
        await asyncio.gather(*(each.close() for each in (*self._connections.values(), *self._removed)))


def _servers_named_by(plan: MethodPlan) -> Iterator[str]:
    """Yield the names of the servers that a service's method names."""
    for provider in plan.providers:
        yield from getattr(provider.bean, NAMED_SERVERS, ())


def _check_headers(server: str, headers: Any) -> dict[str, str]:
    """Return the headers of a call without None values. Raises `TypeError` or `ValueError`, which show no value."""
    where = f"the headers of MCP server {server!r}"
    if not isinstance(headers, Mapping):
        raise TypeError(f"{where}: expected a mapping of texts, got {type(headers).__name__}")
    found: dict[str, str] = {}
    for name, value in headers.items():
        if value is None:
            continue
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"{where}: expected texts, got {type(name).__name__}: {type(value).__name__}")
        if not is_header_name(name):
            raise ValueError(f"{where}: invalid name {name!r}")
        try:
            encode_header_value(value)
        except ValueError:
            raise ValueError(f"{where}: the value of {name} contains control characters") from None
        found[name] = value
    return found
