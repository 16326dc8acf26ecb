"""The tools and resources of MCP servers as tools of services: `@mcp_toolbox`, `mcp_tools`.

Not here: the servers and their connections (`servers`), the questions that a server asks (`questions`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

from ..chat import ToolExecutionRequest, ToolExecutionResult, ToolSpecification
from ..context import InvocationContext
from ..deferred_answers import (
    TAKES_ANSWERS,
    TOOL_ORIGIN,
    ToolOrigin,
    current_answer,
)
from ..di.decorators import application_scoped
from ..di.graph import BeanGraph
from ..errors import (
    McpConnectionError,
    McpError,
    McpInputRequiredError,
    Problem,
    ToolArgumentsError,
    ToolDeferred,
    ToolRetry,
)
from ..json_text import compact_json, read_arguments
from ..parameters import TAKES_PROGRESS
from ..safe_text import brief
from ..services.declaration import provided_by
from ..settings import McpSettings, settings_key
from ..tools.codec import decode_request
from ..tools.sources import AiServiceTool, ToolProviderRequest, ToolProviderResult
from .blocks import resource_result, tool_result
from .connection import McpConnection
from .error_codes import INVALID_PARAMS
from .questions import read_answers
from .screening import admits_null, visible
from .servers import NAMED_SERVERS, McpServers, servers_in
from .tool_choice import address_of, fingerprint_of, matches_any

logger = logging.getLogger("toolbox.mcp")

D = TypeVar("D", bound=Callable[..., Any])


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
    return application_scoped(type(f"McpTools_{'_'.join(names) or 'all'}", (McpTools,), {NAMED_SERVERS: names}))


class McpTools:
    """Tool provider for the tools of MCP servers; empty `__toolbox_mcp_servers__` means all servers.

    If a server cannot be reached, the call continues without its tools, and a warning is logged; without a `required`
    server it fails. A tool is skipped and logged if the service or an earlier server has a tool with the same name.
    """

    __toolbox_mcp_servers__: tuple[str, ...] = ()
    __toolbox_implies__ = (McpServers,)

    def __init__(self, servers: McpServers) -> None:
        self._servers = servers
        self._logged_duplicates: set[tuple[str, str]] = set()

    @classmethod
    def __toolbox_may_suspend__(cls, graph: BeanGraph) -> bool:
        """Return True if a person must approve calls of one of the servers."""
        known = servers_in(graph)
        names = [settings_key(name) for name in cls.__toolbox_mcp_servers__] or [*known]
        return any(known[name].settings.approval is not None for name in names if name in known)

    @classmethod
    def __toolbox_check__(cls, graph: BeanGraph) -> Iterator[Problem]:
        known = servers_in(graph)
        for name in cls.__toolbox_mcp_servers__:
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
        servers = [self._servers.server(name) for name in self.__toolbox_mcp_servers__ or self._servers.names]
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
        arguments = _without_nulls(decode_request(request, tool.input_schema), tool.input_schema)
        answers, state = read_answers(current_answer.get())
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
                raise _ask_to_try_again(error) from error
            raise
        answer = tool_result(result)
        if answer.is_error:
            raise McpError(server.name, server.shown(answer.text) or "the tool failed without a message")
        return answer

    metadata: dict[str, Any] = {"mcp_server": server.name}
    if tool.annotations is not None:
        metadata["annotations"] = tool.annotations.model_dump(by_alias=True, exclude_none=True)
    specification = ToolSpecification(server.offered_name(tool.name), tool.description, tool.input_schema, metadata)
    origin = ToolOrigin(server.name, fingerprint_of(tool), address_of(server.settings))
    setattr(execute_tool, TAKES_ANSWERS, True)
    setattr(execute_tool, TOOL_ORIGIN, lambda request: origin)
    setattr(execute_tool, TAKES_PROGRESS, True)
    needs_approval = _needs_approval(server.settings, tool)
    return AiServiceTool(specification, execute_tool, requires_approval=needs_approval, deferred=takes_input)


def _without_nulls(arguments: dict[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments without each null that stands for an optional argument and that its schema does not admit.

    Models write null for what they leave out; with `strict=True` they have to. Nested values stay as they are.
    """
    properties, required = schema.get("properties", {}), schema.get("required")
    optional = properties.keys() - (required if isinstance(required, list) else ())
    return {
        name: value
        for name, value in arguments.items()
        if value is not None or name not in optional or admits_null(schema, name)
    }


def _ask_to_try_again(error: McpError) -> ToolRetry:
    """Return the error for a call with parameters that the server rejects: only the model can correct them."""
    return ToolRetry(f"MCP server {error.server!r} rejected the call: {error.message or 'invalid parameters'}")


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
        server = None
        with suppress(ValueError):
            server = by_name.get(str(server_in(read_arguments(request.arguments, schema))))
        if server is None:
            return ToolOrigin("", "get_resource")
        return ToolOrigin(server.name, "get_resource", address_of(server.settings))

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
                raise _ask_to_try_again(error) from error
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
