"""The MCP servers of a container, from code and settings, and their tools in services: `@mcp_toolbox`, `mcp_tools`.

Not here: sending requests to a server (`connection`), a container's tools as an MCP server (`serving`).
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, assert_never

from pydantic import SecretStr

from ..chat import (
    Content,
    ImageContent,
    TextContent,
    ToolExecutionRequest,
    ToolExecutionResult,
    ToolSpecification,
    joined_text,
)
from ..di.graph import BeanGraph
from ..di.marks import application_scoped
from ..errors import Problem, ToolArgumentsError
from ..json_text import compact_json, read_arguments
from ..services.declaration import provided_by
from ..settings import McpSettings, ToolboxSettings, settings_key
from ..tools.sources import AiServiceTool, ToolProviderRequest, ToolProviderResult
from ..validation_text import brief
from .connection import INVALID_PARAMS, McpConnection
from .errors import McpError
from .session import McpEvent, McpListener

logger = logging.getLogger("toolbox.mcp")

D = TypeVar("D", bound=Callable[..., Any])


# --- servers and their connections


@dataclass(frozen=True, slots=True)
class McpServer:
    """An MCP server with its settings, made by `mcp_server`. Register it as a bean to make it available."""

    name: str
    settings: McpSettings


def mcp_server(
    name: str,
    *,
    command: str | None = None,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    url: str | None = None,
    headers: Mapping[str, str] | None = None,
    **options: Any,
) -> McpServer:
    """Declare an MCP server: a process (`command`, `args`, `env`, `cwd`) or an address (`url`, `headers`).

        files = mcp_server("files", command="npx", args=["@modelcontextprotocol/server-filesystem", "/srv/files"])
        container.register_instance(files, name="files")

    `url` is that of a server over streamable HTTP. `options` are the other fields of `McpSettings`: `timeout` and
    `connect_timeout` (seconds), `include`, `exclude`, `prefix`, `names`, `max_reply_bytes`. A registered server
    replaces settings with the same name. Raises `ValueError` without `command` and `url`, or with both.
    """
    if (command is None) == (url is None):
        raise ValueError(f"mcp_server({name!r}): pass either command= or url=")
    settings = McpSettings(
        command=command,
        args=tuple(args),
        env={key: SecretStr(value) for key, value in (env or {}).items()},
        cwd=cwd,
        url=url,
        headers={key: SecretStr(value) for key, value in (headers or {}).items()},
        **options,
    )
    return McpServer(name, settings)


def _all_servers(settings: ToolboxSettings, registered: Sequence[McpServer]) -> dict[str, McpSettings]:
    """Return the settings of all servers, by the key of the name; registered servers replace settings."""
    return {**settings.mcp, **{settings_key(each.name): each.settings for each in registered}}


@application_scoped
class McpServers:
    """The connections to the MCP servers of a container; a bean.

    A connection opens at its first use and closes when the container stops.
    """

    def __init__(self, settings: ToolboxSettings, registered: list[McpServer], listeners: list[McpListener]) -> None:
        self._settings = _all_servers(settings, registered)
        self._listeners = listeners
        self._connections: dict[str, McpConnection] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all servers."""
        return tuple(self._settings)

    def server(self, name: str) -> McpConnection:
        """Return the connection to a server: tools, resources, prompts. Raises `KeyError` for an unknown name."""
        key = settings_key(name)
        if key not in self._connections:
            on_event = self._notify if self._listeners else None
            self._connections[key] = McpConnection(name, self._settings[key], on_event)
        return self._connections[key]

    def _notify(self, event: McpEvent) -> None:
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
        await asyncio.gather(*(each.close() for each in self._connections.values()))


# --- tools of servers in services


def mcp_toolbox(*names: str) -> Callable[[D], D]:
    """Offer the tools of these MCP servers to a service method, or to all methods of a service class.

        @mcp_toolbox("files")
        async def chat(self, question: str) -> str: ...

    Without names, the tools of all servers are offered.
    """
    return provided_by(mcp_tools(*names))


@cache
def mcp_tools(*names: str) -> type[McpTools]:
    """Return a tool provider class for `tool_provider=`: it offers the tools of these MCP servers. No names: all."""
    return application_scoped(type(f"McpTools_{'_'.join(names) or 'all'}", (McpTools,), {"server_names": names}))


class McpTools:
    """Tool provider for the tools of MCP servers; empty `server_names` means all servers.

    If a server cannot be reached, the call continues without its tools, and a warning is logged. A tool is skipped and
    logged if the service or an earlier server has a tool with the same name.
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
            elif (known[key].command is None) == (known[key].url is None):
                yield Problem(f"MCP server {name!r}", "needs either a command or a URL", "set exactly one of them")

    async def provide_tools(self, request: ToolProviderRequest) -> ToolProviderResult:
        """Return the tools of the servers; see `ToolProvider`."""
        taken = set(request.tool_names)
        tools: list[AiServiceTool] = []
        for name in self.server_names or self._servers.names:
            server = self._servers.server(name)
            try:
                offered = [_service_tool(server, tool) for tool in await server.tools()]
            except McpError as error:
                logger.warning("MCP server %r: its tools are not offered: %s", name, error)
                continue
            for tool in offered:
                tool_name = tool.specification.name
                if tool_name not in taken:
                    taken.add(tool_name)
                    tools.append(tool)
                elif (name, tool_name) not in self._logged_duplicates:
                    self._logged_duplicates.add((name, tool_name))
                    logger.warning(
                        "tool %r of MCP server %r is not offered: another tool has this name; use names= or prefix=",
                        tool_name,
                        name,
                    )
        return ToolProviderResult(tools)


def _service_tool(server: McpConnection, tool: Any) -> AiServiceTool:
    """Return a server's tool as a tool of a service; calls use the server's name of the tool."""

    async def execute(request: ToolExecutionRequest, memory_id: object) -> ToolExecutionResult:
        try:
            arguments = read_arguments(request.arguments, tool.input_schema)
        except ValueError as error:
            raise ToolArgumentsError(request, [("", str(error))]) from None
        try:
            result = await server.call(tool.name, arguments)
        except McpError as error:
            if error.code == INVALID_PARAMS:
                raise ToolArgumentsError(request, [("", brief(error.message))]) from error
            raise
        return _result(server, result)

    metadata: dict[str, Any] = {"mcp_server": server.name}
    if tool.annotations is not None:
        metadata["annotations"] = tool.annotations.model_dump(by_alias=True, exclude_none=True)
    specification = ToolSpecification(server.offered_name(tool.name), tool.description, tool.input_schema, metadata)
    return AiServiceTool(specification, execute)


def _result(server: McpConnection, result: Any) -> ToolExecutionResult:
    """Convert a server's result: the model reads its texts and images, the program gets the structured value.

    Without texts, the model reads the structured value as JSON. Raises `McpError` for an error result.
    """
    contents = tuple(_content(each) for each in result.content)
    structured = result.structured_content
    text = joined_text(contents)
    images = tuple(each for each in contents if _is_image(each))
    if not text and structured is not None:
        text = compact_json(_without_images(structured, {each.data for each in result.content if each.type == "image"}))
        contents = (TextContent(text), *images)
    if result.is_error:
        raise McpError(server.name, server.shown(text) or "the tool failed without a message")
    value = text if structured is None else structured
    return ToolExecutionResult(text, value, contents=contents if images else ())


def _is_image(content: Content) -> bool:
    match content:
        case TextContent():
            return False
        case ImageContent():
            return True
        case _:
            assert_never(content)


def _without_images(value: Any, images: set[str]) -> Any:
    """Replace images in a structured value by `[image]`: the model already sees them as images."""
    if isinstance(value, dict):
        return {key: _without_images(each, images) for key, each in value.items()} if images else value
    if isinstance(value, list):
        return [_without_images(each, images) for each in value] if images else value
    return "[image]" if isinstance(value, str) and value in images else value


def _content(block: Any) -> Content:
    match block.type:
        case "text":
            return TextContent(block.text)
        case "image":
            try:
                data = base64.b64decode(block.data, validate=True)
            except ValueError:
                return TextContent("[image with invalid base64]")
            return ImageContent(data=data, mime_type=block.mime_type)
        case "resource" if hasattr(block.resource, "text"):
            return TextContent(block.resource.text)
        case "resource":
            return TextContent(f"[binary resource {block.resource.uri}]")
        case "resource_link":
            return TextContent(f"[resource {block.name}: {block.uri}]")
        case kind:
            return TextContent(f"[{kind} content, not supported]")
