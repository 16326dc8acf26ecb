"""The tools of MCP servers as tools of services: `@mcp_toolbox("files")`, or `tool_provider=mcp_tools("files")`.

Not here: the servers (`servers`), how they are reached (`connection`).
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TypeVar, assert_never

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
from ..settings import ToolboxSettings, settings_key
from ..tools.sources import AiServiceTool, ToolProviderRequest, ToolProviderResult
from ..validation_text import brief
from .connection import INVALID_PARAMS, McpConnection
from .errors import McpError
from .servers import McpServer, McpServers, servers_named

logger = logging.getLogger("toolbox.mcp")

D = TypeVar("D", bound=Callable[..., Any])


def mcp_toolbox(*names: str) -> Callable[[D], D]:
    """Adds the tools of these MCP servers, or of all, to a service (above the class) or to one of its methods."""
    return provided_by(mcp_tools(*names))


@cache
def mcp_tools(*names: str) -> type[McpTools]:
    """A tool provider, as a bean type, for the tools of these MCP servers, or of all."""
    return application_scoped(type(f"McpTools_{'_'.join(names) or 'all'}", (McpTools,), {"server_names": names}))


class McpTools:
    """Provides the tools of MCP servers; `server_names` is empty for all of them.

    A server that cannot be reached costs a call its tools, not its answer: it is logged. So is a tool whose name is
    taken by a tool of the service or of a server before: it is left out.
    """

    server_names: tuple[str, ...] = ()
    __toolbox_implies__ = (McpServers,)

    def __init__(self, servers: McpServers) -> None:
        self._servers = servers
        self._doubled: set[tuple[str, str]] = set()  # those that have been logged

    @classmethod
    def __toolbox_check__(cls, graph: BeanGraph) -> Iterator[Problem]:
        made = [each.factory() for each in graph.definitions if each.provides in (ToolboxSettings, McpServer)]
        settings = next((each for each in made if isinstance(each, ToolboxSettings)), None) or ToolboxSettings()
        there = servers_named(settings, [each for each in made if isinstance(each, McpServer)])
        for name in cls.server_names:
            key = settings_key(name)
            if key not in there:
                yield Problem(
                    f"MCP server {name!r}",
                    "there is no server of this name",
                    f"set TOOLBOX_MCP__{key.upper()}__COMMAND or __URL, or register_instance(mcp_server({name!r}, …))",
                )
            elif (there[key].command is None) == (there[key].url is None):
                yield Problem(f"MCP server {name!r}", "it needs a command or a URL, one of the two", "set one")

    async def provide_tools(self, request: ToolProviderRequest) -> ToolProviderResult:
        """See `ToolProvider`."""
        taken = set(request.tool_names)
        tools: list[AiServiceTool] = []
        for name in self.server_names or self._servers.names:
            server = self._servers.server(name)
            try:
                offered = [_offered(server, tool) for tool in await server.tools()]
            except McpError as error:
                logger.warning("the tools of MCP server %r are not offered: %s", name, error)
                continue
            for tool in offered:
                tool_name = tool.specification.name
                if tool_name not in taken:
                    taken.add(tool_name)
                    tools.append(tool)
                elif (name, tool_name) not in self._doubled:
                    self._doubled.add((name, tool_name))
                    logger.warning(
                        "tool %r of MCP server %r is not offered: the name is taken; use names= or prefix=",
                        tool_name,
                        name,
                    )
        return ToolProviderResult(tools)


def _offered(server: McpConnection, tool: Any) -> AiServiceTool:
    """A server's tool as one of ours; it is called by the server's own name."""

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
    """What a server answered: the model reads its texts and images, the program its structured value.

    Without a text the model reads the structured value. An error is raised.
    """
    contents = tuple(_content(each) for each in result.content)
    structured = result.structured_content
    text = joined_text(contents)
    beside_text = tuple(each for each in contents if _is_beside_text(each))
    if not text and structured is not None:
        text = compact_json(_without_images(structured, {each.data for each in result.content if each.type == "image"}))
        contents = (TextContent(text), *beside_text)
    if result.is_error:
        raise McpError(server.name, server.shown(text) or "the tool failed and did not say why")
    value = text if structured is None else structured
    return ToolExecutionResult(text, value, contents=contents if beside_text else ())


def _is_beside_text(content: Content) -> bool:
    match content:
        case TextContent():
            return False
        case ImageContent():
            return True
        case _:
            assert_never(content)


def _without_images(value: Any, images: set[str]) -> Any:
    """A structured value whose images, which the model sees already, are not repeated as text."""
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
                return TextContent("[image that cannot be read: its base64 is invalid]")
            return ImageContent(data=data, mime_type=block.mime_type)
        case "resource" if hasattr(block.resource, "text"):
            return TextContent(block.resource.text)
        case "resource":
            return TextContent(f"[binary resource {block.resource.uri}]")
        case "resource_link":
            return TextContent(f"[resource {block.name}: {block.uri}]")
        case kind:
            return TextContent(f"[{kind} content, which cannot be shown]")
