"""The MCP servers of a container, from code and settings; their tools in services: `@mcp_toolbox`, `mcp_tools`.

Not here: sending requests to a server (`connection`), a container's tools as an MCP server (`serving`).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

from pydantic import SecretStr

from ..chat import ToolExecutionRequest, ToolExecutionResult, ToolSpecification
from ..container import Container, internals_of
from ..context import InvocationContext
from ..deferred_answers import (
    TAKES_ANSWERS,
    TOOL_ORIGIN,
    DeferredAnswer,
    ToolOrigin,
    current_answer,
)
from ..di.decorators import application_scoped
from ..di.graph import BeanGraph
from ..di.injection_points import point_of, points_of
from ..errors import McpConnectionError, McpError, McpInputRequiredError, Problem, ToolArgumentsError, ToolDeferred
from ..json_text import compact_json, read_arguments
from ..parameters import TAKES_PROGRESS
from ..rest.encoding import encode_header_value, is_header_name
from ..safe_text import brief
from ..services.declaration import provided_by
from ..services.plans import MethodPlan
from ..settings import McpSettings, ToolboxSettings, settings_key
from ..tools.codec import decode_request
from ..tools.sources import AiServiceTool, ToolProviderRequest, ToolProviderResult
from .blocks import resource_result, tool_result
from .connection import INVALID_PARAMS, McpConnection
from .notifications import McpEvent, McpListener
from .screening import visible
from .tool_choice import fingerprint_of, matches_any

logger = logging.getLogger("toolbox.mcp")

D = TypeVar("D", bound=Callable[..., Any])


# --- servers and their connections


@dataclass(frozen=True, slots=True)
class McpServer:
    """An MCP server with its settings, made by `mcp_server`. Register it as a bean to make it available.

    `headers` is a function or the class of a callable bean that returns the headers of a call, or None.
    """

    name: str
    settings: McpSettings
    headers: Callable[..., Any] | None = None

    @property
    def __toolbox_implies__(self) -> tuple[type[Any], ...]:
        """Return the class of the headers, which needs no registration."""
        headers = self.headers
        is_bean = (
            isinstance(headers, type) and not inspect.isabstract(headers) and not getattr(headers, "_is_protocol", 0)
        )
        return (headers,) if is_bean and isinstance(headers, type) else ()

    def __toolbox_check__(self, graph: BeanGraph) -> Iterator[Problem]:
        where = f"mcp_server({self.name!r}).headers"
        if isinstance(self.headers, type):
            yield from graph.problems_of(point_of(self.headers, where))
        elif inspect.isroutine(self.headers):
            for point in points_of(self.headers, where):
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
    **options: Any,
) -> McpServer:
    """Declare an MCP server: a process (`command`, `args`, `env`, `cwd`) or an address (`url`, `headers`).

        files = mcp_server("files", command="npx", args=["@modelcontextprotocol/server-filesystem", "/srv/files"])
        container.register_instance(files, name="files")

    `url` is that of a server over streamable HTTP. `headers` are the same for all calls, or a function or the class of
    a callable bean, `def` or `async def`, that returns the headers of each call, such as the token of the current user.
    It is looked up in the scope of the caller.

    `options` are the other fields of `McpSettings`: `timeout` and `connect_timeout` (seconds), `include`, `exclude`,
    `prefix`, `names`, `max_reply_bytes`, `approval`, `pin_tools`, `expose_resources`, `required`. A registered server
    replaces settings with the same name. Raises `ValueError` without `command` and `url`, or with both, for headers of
    a process, and for invalid options.
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
    settings = McpSettings(
        command=command,
        args=tuple(args),
        env={key: SecretStr(value) for key, value in (env or {}).items()},
        cwd=cwd,
        url=url,
        headers={key: SecretStr(value) for key, value in (headers or {}).items()},
        **options,
    )
    return McpServer(name, settings, per_call)


def _all_servers(settings: ToolboxSettings, registered: Sequence[McpServer]) -> dict[str, McpServer]:
    """Return all servers by the key of the name; registered servers replace settings."""
    configured = {key: McpServer(key, each) for key, each in settings.mcp.items()}
    return {**configured, **{settings_key(each.name): each for each in registered}}


@application_scoped
class McpServers:
    """The connections to the MCP servers of a container; a bean.

    A connection opens at its first use and closes when the container stops. `add` and `remove` change the servers while
    the container runs: `@mcp_toolbox()` without names offers those of the moment.
    """

    def __init__(
        self,
        settings: ToolboxSettings,
        registered: list[McpServer],
        listeners: list[McpListener],
        container: Container,
    ) -> None:
        self._servers = _all_servers(settings, registered)
        self._container = container
        self._listeners = listeners
        self._connections: dict[str, McpConnection] = {}
        self._removed: set[McpConnection] = set()
        self._stop_timeout = settings.stop_timeout

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
            self._connections[key] = McpConnection(server.name, server.settings, on_event, headers)
        return self._connections[key]

    async def add(self, server: McpServer) -> None:
        """Add a server while the container runs; calls that begin from now on can use its tools.

        Only a `required` server is connected at once, and is not added if it cannot be reached (`McpConnectionError`).
        Raises `ValueError` if the name is taken.
        """
        key = settings_key(server.name)
        if key in self._servers:
            raise ValueError(f"there is an MCP server {server.name!r}; use another name, or remove it first")
        self._servers[key] = server
        if server.settings.required and server.headers is None:
            try:
                await self.server(server.name).takes_input()
            except BaseException:
                await self._forget_server(key)
                raise

    async def remove(self, name: str) -> None:
        """Remove a server while the container runs. Its running calls have `stop_timeout`; then it is closed.

        Raises `KeyError` for an unknown name, and `ValueError` for a server that a service names.
        """
        key = settings_key(name)
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

        Servers that were never used are not started. Raises `McpError` if a server does not answer.
        """
        await asyncio.gather(*(each.check() for each in self._connections.values()))
        return True

    async def stop(self) -> None:
        """Close all connections and end the processes of stdio servers."""
        await asyncio.gather(*(each.close() for each in (*self._connections.values(), *self._removed)))


def _servers_named_by(plan: MethodPlan) -> Iterator[str]:
    """Yield the names of the servers that a service's method names."""
    for provider in plan.providers:
        if isinstance(provider.bean, type) and issubclass(provider.bean, McpTools):
            yield from provider.bean.server_names


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


# --- tools of servers in services


def mcp_toolbox(*names: str) -> Callable[[D], D]:
    """Offer the tools of these MCP servers to a service method, or to all methods of a service class.

        @mcp_toolbox("files")
        async def chat(self, question: str) -> str: ...

    Without names, the tools of all servers are offered. A name without a server is a problem at start.
    """
    return provided_by(mcp_tools(*names))


@cache
def mcp_tools(*names: str) -> type[McpTools]:
    """Return a tool provider class for `tool_provider=`: it offers the tools of these MCP servers.

    Without names, it offers the tools of all servers. A name without a server is a problem at start.
    """
    return application_scoped(type(f"McpTools_{'_'.join(names) or 'all'}", (McpTools,), {"server_names": names}))


class McpTools:
    """Tool provider for the tools of MCP servers; empty `server_names` means all servers.

    If a server cannot be reached, the call continues without its tools, and a warning is logged; without a `required`
    server it fails. A tool is skipped and logged if the service or an earlier server has a tool with the same name.
    """

    server_names: tuple[str, ...] = ()
    __toolbox_implies__ = (McpServers,)

    def __init__(self, servers: McpServers) -> None:
        self._servers = servers
        self._logged_duplicates: set[tuple[str, str]] = set()

    @classmethod
    def __toolbox_check__(cls, graph: BeanGraph) -> Iterator[Problem]:
        made = [each.factory() for each in graph.definitions if each.provides in (ToolboxSettings, McpServer)]
        settings = next((each for each in made if isinstance(each, ToolboxSettings)), None) or ToolboxSettings()
        known = _all_servers(settings, [each for each in made if isinstance(each, McpServer)])
        for name in cls.server_names:
            key = settings_key(name)
            if key not in known:
                yield Problem(
                    f"MCP server {name!r}",
                    "unknown server",
                    f"set TOOLBOX_MCP__{key.upper()}__COMMAND or __URL, or register_instance(mcp_server({name!r}, …))",
                )
            elif (known[key].settings.command is None) == (known[key].settings.url is None):
                yield Problem(f"MCP server {name!r}", "needs either a command or a URL", "set exactly one of them")

    async def provide_tools(self, request: ToolProviderRequest) -> ToolProviderResult:
        """Return the tools of the servers; see `ToolProvider`."""
        taken = set(request.tool_names)
        tools: list[AiServiceTool] = []
        unreachable: list[McpConnectionError] = []
        servers = [self._servers.server(name) for name in self.server_names or self._servers.names]
        for server in servers:
            try:
                listed = await server.tools()
                takes_input = await server.takes_input()
                offered = [_make_service_tool(server, tool, takes_input) for tool in listed]
            except McpError as error:
                if server.settings.required:
                    raise
                if isinstance(error, McpConnectionError):
                    unreachable.append(error)
                logger.warning("MCP server %r: its tools are not offered: %s", server.name, error)
                continue
            tools += self._skip_duplicates(offered, server.name, taken)
        if exposing := [each for each in servers if each.settings.expose_resources]:
            tools += self._skip_duplicates(
                _make_resource_tools(exposing), ", ".join(each.name for each in exposing), taken
            )
        return ToolProviderResult(tools, tuple(unreachable))

    def _skip_duplicates(
        self, offered: Sequence[AiServiceTool], server: str, taken: set[str]
    ) -> Iterator[AiServiceTool]:
        """Yield the tools whose names are free, and log the others once."""
        for tool in offered:
            name = tool.specification.name
            if name not in taken:
                taken.add(name)
                yield tool
            elif (server, name) not in self._logged_duplicates:
                self._logged_duplicates.add((server, name))
                logger.warning(
                    "tool %r of MCP server %r is not offered: another tool has this name; use names= or prefix=",
                    name,
                    server,
                )


def _make_service_tool(server: McpConnection, tool: Any, takes_input: bool) -> AiServiceTool:
    """Return a server's tool as a tool of a service; calls use the server's name of the tool.

    `takes_input`: the server may ask for input, which suspends the call.
    """

    async def execute_tool(request: ToolExecutionRequest, memory_id: object) -> ToolExecutionResult:
        arguments = decode_request(request, tool.input_schema)
        answers, state = _answers_to(current_answer.get())
        try:
            try:
                result = await server.call(tool.name, arguments, answers=answers, state=state)
            except McpError as error:
                if state is None or error.code != INVALID_PARAMS or "state" not in error.message.lower():
                    raise
                result = await server.call(tool.name, arguments)  # the server forgot its question, and asks again
        except McpInputRequiredError as error:
            context = InvocationContext.current()
            if not takes_input or context is None or context.place is None:
                text = f"the server asks for input, which is not possible here: {error.message}"
                raise McpError(server.name, text) from error
            attributes = {"mcp_server": server.name, "requests": error.requests, "state": error.state}
            raise ToolDeferred(error.message, attributes) from None
        except McpError as error:
            if error.code == INVALID_PARAMS:
                raise ToolArgumentsError(request, [("", brief(error.message))]) from error
            raise
        answer = tool_result(result)
        if answer.is_error:
            raise McpError(server.name, server.shown(answer.text) or "the tool failed without a message")
        return answer

    metadata: dict[str, Any] = {"mcp_server": server.name}
    if tool.annotations is not None:
        metadata["annotations"] = tool.annotations.model_dump(by_alias=True, exclude_none=True)
    specification = ToolSpecification(server.offered_name(tool.name), tool.description, tool.input_schema, metadata)
    origin = ToolOrigin(server.name, fingerprint_of(tool))
    setattr(execute_tool, TAKES_ANSWERS, True)
    setattr(execute_tool, TOOL_ORIGIN, lambda request: origin)
    setattr(execute_tool, TAKES_PROGRESS, True)
    needs_approval = _needs_approval(server.settings, tool)
    return AiServiceTool(specification, execute_tool, requires_approval=needs_approval, deferred=takes_input)


# --- questions of servers

_ACTIONS = ("accept", "decline", "cancel")
_CHECKED = ("type", "enum", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems")


def _answers_to(answer: DeferredAnswer | None) -> tuple[dict[str, dict[str, Any]] | None, str | None]:
    """Return a person's answers to the questions of a server, as its protocol wants them, and the server's state.

    Raises `ToolDeferred` if the answer is invalid, so that the question is asked again.
    """
    if answer is None:
        return None, None
    requests: dict[str, dict[str, Any]] = answer.attributes["requests"]
    value = answer.value
    if len(requests) == 1 and not (isinstance(value, Mapping) and value.keys() == requests.keys()):
        value = dict.fromkeys(requests, value)
    if not isinstance(value, Mapping) or value.keys() != requests.keys():
        wrong = f"expected an object with the answers to: {', '.join(requests)}"
        raise _ask_again(answer, wrong)
    found = {key: _answer_to(each) for key, each in value.items()}
    for key, each in found.items():
        misfit = _find_misfit(requests[key], each.get("content")) if each["action"] == "accept" else None
        if misfit is not None:
            raise _ask_again(answer, misfit)
    return found, answer.attributes["state"]


def _answer_to(value: Any) -> dict[str, Any]:
    """Return an answer in the protocol's form: an object accepts with its values, None and False decline."""
    if value is None or value is False:
        return {"action": "decline"}
    if isinstance(value, Mapping) and value.keys() <= {"action", "content"} and value.get("action") in _ACTIONS:
        return dict(value)
    return {"action": "accept"} if value is True else {"action": "accept", "content": value}


def _find_misfit(request: Mapping[str, Any], content: Any) -> str | None:
    """Return why values do not match the schema of a question, or None."""
    if "schema" not in request:
        return None if content is None else "this question needs no values: answer True or False"
    from jsonschema.validators import Draft202012Validator  # type: ignore[import-untyped]  # no type hints

    values = {} if content is None else content
    if not isinstance(values, Mapping):
        return "expected an object with the values"
    for name, value in values.items():
        is_list = isinstance(value, list) and all(isinstance(each, str) for each in value)
        if not (value is None or is_list or isinstance(value, (str, int, float))):
            return f"{name}: expected a string, a number, a boolean or a list of strings"
    try:
        error = next(iter(Draft202012Validator(_flatten_schema(request["schema"])).iter_errors(values)), None)
    except Exception as failure:  # schemas of servers can be invalid
        return f"the server's schema cannot be read ({type(failure).__name__})"
    if error is None:
        return None
    place = ".".join(map(str, error.absolute_path))
    return f"{place}: {error.message}" if place else str(error.message)


def _flatten_schema(schema: Any) -> dict[str, Any]:
    """Return a question's schema with what the protocol allows: no references to follow, no patterns to run."""
    given = schema.get("properties") if isinstance(schema, Mapping) else None
    properties = {
        name: {key: value for key, value in about.items() if key in _CHECKED}
        for name, about in (given.items() if isinstance(given, Mapping) else ())
        if isinstance(about, Mapping)
    }
    required = schema.get("required", []) if isinstance(schema, Mapping) else []
    return {"type": "object", "properties": properties, "required": required}


def _ask_again(answer: DeferredAnswer, wrong: str) -> ToolDeferred:
    messages = "; ".join(str(each.get("message", "")) for each in answer.attributes["requests"].values())
    return ToolDeferred(f"{messages} (the last answer was invalid: {brief(wrong, 500)})", answer.attributes)


def _needs_approval(settings: McpSettings, tool: Any) -> bool:
    """Return True if a person must approve calls. A tool counts as destructive unless it says otherwise."""
    if isinstance(settings.approval, tuple):
        return matches_any(tool.name, settings.approval)
    if settings.approval != "destructive":
        return settings.approval == "all"
    hints = tool.annotations
    return hints is None or (hints.read_only_hint is not True and hints.destructive_hint is not False)


# --- resources as tools


def _guards_resources(settings: McpSettings) -> bool:
    """Return True if a person must approve `get_resource`."""
    approval = settings.approval
    return matches_any("get_resource", approval) if isinstance(approval, tuple) else approval == "all"


def _make_resource_tools(servers: Sequence[McpConnection]) -> list[AiServiceTool]:
    """Return two tools that list and read the resources of these servers."""
    by_name = {each.name: each for each in servers}
    uri = {"type": "string", "description": "The URI of the resource"}
    properties: dict[str, Any] = {"uri": uri}
    if len(by_name) > 1:
        properties = {"server": {"type": "string", "enum": list(by_name)}, "uri": uri}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    metadata = {"annotations": {"readOnlyHint": True}}
    guarded = {each.name for each in servers if _guards_resources(each.settings)}
    names = {settings_key(each): each for each in by_name}

    def server_in(arguments: Mapping[str, Any]) -> Any:
        """Return the server's name; a stored call can have it in another spelling."""
        given = arguments.get("server", servers[0].name)
        return names.get(settings_key(given), given) if isinstance(given, str) else given

    async def needs_approval(arguments: dict[str, Any], context: InvocationContext) -> bool:
        return server_in(arguments) in guarded

    def origin(request: ToolExecutionRequest) -> ToolOrigin:
        with suppress(ValueError):
            return ToolOrigin(str(server_in(read_arguments(request.arguments, schema))), "get_resource")
        return ToolOrigin("", "get_resource")

    async def list_resources(request: ToolExecutionRequest, memory_id: object) -> str:
        found: list[dict[str, Any]] = []
        failures: list[McpError] = []
        for server in servers:
            try:
                found += await _describe_resources(server, named=len(by_name) > 1)
            except McpError as error:
                failures.append(error)
                logger.warning("MCP server %r: its resources are not listed: %s", server.name, error)
        if len(failures) == len(servers):
            raise failures[0]
        return compact_json(found)

    async def get_resource(request: ToolExecutionRequest, memory_id: object) -> ToolExecutionResult:
        arguments = decode_request(request, schema)
        problems = [
            (name, "this argument must be a string") for name in properties if type(arguments.get(name)) is not str
        ]
        name = server_in(arguments)
        if not problems and name not in by_name:
            problems = [("server", f"unknown server; use one of: {', '.join(by_name)}")]
        if problems:
            raise ToolArgumentsError(request, problems)
        try:
            result = await by_name[name].read_resource(arguments["uri"])
        except McpError as error:
            if error.code == INVALID_PARAMS:
                raise ToolArgumentsError(request, [("uri", brief(error.message))]) from error
            raise
        return resource_result(result.contents)

    setattr(get_resource, TOOL_ORIGIN, origin)
    places = ", ".join(by_name)
    return [
        AiServiceTool(
            ToolSpecification(
                "list_resources", f"List the resources of {places}: documents and data.", metadata=metadata
            ),
            list_resources,
        ),
        AiServiceTool(
            ToolSpecification(
                "get_resource", f"Read a resource of {places}. list_resources returns the URIs.", schema, metadata
            ),
            get_resource,
            requires_approval=needs_approval if guarded else False,
        ),
    ]


async def _describe_resources(server: McpConnection, named: bool) -> list[dict[str, Any]]:
    """Return the resources of a server, and the templates of their URIs, as JSON values for a model."""
    found: list[tuple[str, str, Any]] = [("uri", str(each.uri), each) for each in await server.resources()]
    try:
        found += [("uriTemplate", each.uri_template, each) for each in await server.resource_templates()]
    except McpError as error:
        logger.debug("MCP server %r has no resource templates: %s", server.name, error)
    where = {"server": server.name} if named else {}
    return [
        {
            **where,
            key: uri,
            "name": visible(brief(each.name, 200)),
            **({"description": visible(brief(each.description, 1000))} if each.description else {}),
            **({"mimeType": each.mime_type} if each.mime_type else {}),
        }
        for key, uri, each in found
    ]
