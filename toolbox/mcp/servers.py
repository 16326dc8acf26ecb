"""The MCP servers of a container, from code and settings; their tools in services: `@mcp_toolbox`, `mcp_tools`.

Each server has a connection, which sends requests and starts sessions. Not here: one session (`session`), a
container's tools as an MCP server (`serving`).
"""

from __future__ import annotations

import asyncio
import base64
import fnmatch
import logging
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from pydantic import SecretStr

from ..chat import ToolExecutionRequest, ToolExecutionResult, ToolSpecification
from ..contents import PDF, AudioContent, Content, ImageContent, PdfContent, TextContent, joined_text, media_in
from ..di.decorators import application_scoped
from ..di.graph import BeanGraph
from ..errors import Problem, ToolArgumentsError
from ..json_text import compact_json, read_arguments
from ..services.declaration import provided_by
from ..settings import McpSettings, ToolboxSettings, settings_key
from ..tools.sources import AiServiceTool, ToolProviderRequest, ToolProviderResult
from ..tools.specification import name_problems
from ..validation_text import brief, hide_secrets, without_secrets
from .screening import MAX_TOOLS, SkippedTools, too_large, visible
from .session import (
    McpConnectionError,
    McpError,
    McpEvent,
    McpListener,
    McpProgress,
    McpSession,
    McpTimeoutError,
    SessionCallbacks,
    secrets_of,
)

if TYPE_CHECKING:
    from mcp import Client
    from mcp_types import (
        CallToolResult,
        GetPromptResult,
        PaginatedResult,
        Prompt,
        ReadResourceResult,
        Resource,
        Tool,
    )

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
    """Convert a server's result: the model reads its texts, images, PDF documents and audio, the program gets the
    structured value.

    Without texts, the model reads the structured value as JSON. Raises `McpError` for an error result.
    """
    contents = tuple(_content(each) for each in result.content)
    structured = result.structured_content
    text = joined_text(contents)
    media = media_in(contents)
    if not text and structured is not None:
        shown = {each.data: each.type for each in result.content if each.type in ("image", "audio")}
        text = compact_json(_without_media(structured, shown))
        contents = (TextContent(text), *media)
    if result.is_error:
        raise McpError(server.name, server.shown(text) or "the tool failed without a message")
    value = text if structured is None else structured
    return ToolExecutionResult(text, value, contents=contents if media else ())


def _without_media(value: Any, shown: Mapping[str, str]) -> Any:
    """Replace images and audio in a structured value by `[image]` and `[audio]`: the model already has them."""
    if isinstance(value, dict):
        return {key: _without_media(each, shown) for key, each in value.items()} if shown else value
    if isinstance(value, list):
        return [_without_media(each, shown) for each in value] if shown else value
    return f"[{shown[value]}]" if isinstance(value, str) and value in shown else value


def _content(block: Any) -> Content:
    match block.type:
        case "text":
            return TextContent(block.text)
        case "image" | "audio" as kind:
            return _media(kind, block.data, block.mime_type)
        case "resource" if hasattr(block.resource, "text"):
            return TextContent(block.resource.text)
        case "resource":
            resource = block.resource
            kind = _kind_of(resource.mime_type)
            if kind is None:
                return TextContent(f"[binary resource {resource.uri}]")
            return _media(kind, resource.blob, resource.mime_type, str(resource.uri))
        case "resource_link":
            return TextContent(f"[resource {block.name}: {block.uri}]")
        case kind:
            return TextContent(f"[{kind} content, not supported]")


def _kind_of(media_type: str | None) -> str | None:
    """Return the kind of content that carries a binary resource, or None if no kind does."""
    kind = (media_type or "").partition(";")[0].strip().lower()
    if kind == PDF:
        return "document"
    return next((each for each in ("image", "audio") if kind.startswith(f"{each}/")), None)


def _media(kind: str, data: str, media_type: str, uri: str = "") -> Content:
    """Return an image, audio or a document of a server, or a note if it is invalid or too large."""
    try:
        decoded = base64.b64decode(data, validate=True)
    except ValueError:
        return TextContent(f"[{kind} with invalid base64]")
    try:
        match kind:
            case "image":
                return ImageContent(data=decoded, mime_type=media_type)
            case "audio":
                return AudioContent(decoded, media_type)
            case _:
                return PdfContent(data=decoded, name=_file_name(uri))
    except ValueError:
        return TextContent(f"[{kind} of an invalid type, or too large]")


def _file_name(uri: str) -> str | None:
    """Return the last part of a URI's path as a file name, or None."""
    name = visible(unquote(urlsplit(uri).path.rpartition("/")[2])).strip()
    return name[:200] or None


P = TypeVar("P", bound="PaginatedResult")
T = TypeVar("T")

_INVALID_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]")

INVALID_PARAMS = -32602
_METHOD_NOT_FOUND = -32601
"""JSON-RPC: the arguments of a call are invalid."""

MAX_PAGES = 100
"""Pages that are read of one list."""
MAX_ITEMS = 10_000
"""Number of tools, resources or prompts after which no further page is read."""
MAX_MESSAGE_CHARS = 4000
"""Characters that are kept of a server's error message."""

# Codes of the SDK's client for missing answers; servers use the same numbers for their own errors.
_REQUEST_TIMEOUT = -32001
_CONNECTION_CLOSED = -32000
# Transport errors: the connection closed, or an HTTP error status without a JSON-RPC error.
_TRANSPORT_ERRORS = ((_CONNECTION_CLOSED, ""), (-32603, "server returned an error response"))


# --- the connection to one server


class _SessionLostError(Exception):
    """The server does not know the session, so it has not run the request."""


class McpConnection:
    """The connection to one server. Any task of the event loop that used it first may call its methods."""

    def __init__(self, name: str, settings: McpSettings, on_event: Callable[[McpEvent], None] | None = None) -> None:
        self.name, self.settings, self._on_event = name, settings, on_event
        self._session: McpSession | None = None
        self._tools: tuple[Tool, ...] | None = None
        self._tools_version = 0
        self._closed = False

    # --- requests

    async def tools(self) -> tuple[Tool, ...]:
        """Return the usable tools of the server. The list is cached until the server reports a change.

        Tools that cannot be used are skipped and logged: an invalid or duplicate name, an invalid or too large schema,
        or a tool that only runs as a task. Raises `McpError`.
        """
        self._current_session()  # a new session discards the tools of the previous one
        if self._tools is not None:
            return self._tools
        version = self._tools_version
        offered = self._usable(await self._request("list its tools", self._all_tools))
        if version == self._tools_version:  # they did not change in the meantime
            self._tools = offered
        return offered

    def _usable(self, found: list[Tool]) -> tuple[Tool, ...]:
        """Return the tools to offer; each name occurs once."""
        skipped = SkippedTools(self.name)
        tools: dict[str, Tool] = {}
        for each in found:
            if not self._is_offered(each.name):
                continue
            name = self.offered_name(each.name)
            if name_problems(name, ""):
                skipped.add(each.name, "models do not accept this name; rename it with names= or prefix=")
            elif name in tools:
                skipped.add(each.name, f"another tool has the name {name!r}; rename one with names=")
            elif len(tools) == MAX_TOOLS:
                skipped.add(each.name, f"more than {MAX_TOOLS}")
            else:
                tools[name] = each
        skipped.log()
        schemas = self._session.output_schemas if self._session is not None else {}
        return tuple(
            each.model_copy(update={"output_schema": schemas[each.name]}) if each.name in schemas else each
            for each in tools.values()
        )

    def _tools_changed(self) -> None:
        self._tools = None
        self._tools_version += 1

    def _is_offered(self, name: str) -> bool:
        include, exclude = self.settings.include, self.settings.exclude
        wanted = not include or any(fnmatch.fnmatchcase(name, pattern) for pattern in include)
        return wanted and not any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude)

    def offered_name(self, name: str) -> str:
        """Return the name that models see; MCP allows characters such as dots, which models do not accept."""
        new_name = self.settings.names.get(name)
        return _INVALID_IN_NAMES.sub("_", f"{self.settings.prefix}{name}")[:64] if new_name is None else new_name

    async def call(self, tool: str, arguments: dict[str, Any]) -> CallToolResult:
        """Call a tool and return its result. `tool` is the server's name of the tool. Raises `McpError`."""

        async def on_progress(progress: float, total: float | None, message: str | None) -> None:
            self._notify(McpProgress(self.name, tool, progress, total, message))

        return await self._request(
            f"run {tool}", lambda client: client.call_tool(tool, arguments, progress_callback=on_progress)
        )

    async def resources(self) -> list[Resource]:
        """Return the resources of the server. Raises `McpError`."""
        return await self._request("list its resources", self._all_resources)

    async def read_resource(self, uri: str) -> ReadResourceResult:
        """Return the contents of a resource. Raises `McpError`."""
        return await self._request(f"read {uri}", lambda client: client.read_resource(uri))

    async def prompts(self) -> list[Prompt]:
        """Return the prompts of the server. Raises `McpError`."""
        return await self._request("list its prompts", self._all_prompts)

    async def prompt(self, name: str, arguments: dict[str, str] | None = None) -> GetPromptResult:
        """Return the messages of a prompt with its arguments filled in. Raises `McpError`."""
        return await self._request(f"return prompt {name}", lambda client: client.get_prompt(name, arguments))

    async def _all_tools(self, client: Client) -> list[Tool]:
        return await self._paged("tools", lambda cursor: client.list_tools(cursor=cursor), lambda page: page.tools)

    async def _all_resources(self, client: Client) -> list[Resource]:
        return await self._paged(
            "resources", lambda cursor: client.list_resources(cursor=cursor), lambda page: page.resources
        )

    async def _all_prompts(self, client: Client) -> list[Prompt]:
        return await self._paged(
            "prompts", lambda cursor: client.list_prompts(cursor=cursor), lambda page: page.prompts
        )

    async def _paged(
        self, kind: str, read_page: Callable[[str | None], Awaitable[P]], items: Callable[[P], list[T]]
    ) -> list[T]:
        """Return the items of all pages of a list; stop at the limits and log a warning."""
        found: list[T] = []
        seen: set[str] = set()
        cursor: str | None = None
        size = 0
        while True:
            page = await read_page(cursor)
            found += items(page)
            cursor = page.next_cursor
            if not cursor:
                return found
            size += len(page.model_dump_json())
            limit = self.settings.max_reply_bytes
            if cursor in seen:
                reason = "the server repeats a page"
            elif len(seen) + 1 >= MAX_PAGES:
                reason = f"more than {MAX_PAGES} pages"
            elif len(found) >= MAX_ITEMS:
                reason = f"more than {MAX_ITEMS} items"
            elif size > limit:
                reason = f"larger than {limit} bytes (max_reply_bytes)"
            else:
                seen.add(cursor)
                continue
            logger.warning("MCP server %r: only the first part of its list of %s was read: %s", self.name, kind, reason)
            return found

    async def check(self) -> None:
        """Request the first page of the tools; open the connection if it is not open. Raises `McpError`."""
        try:
            await self._request("list its tools", lambda client: client.list_tools(cache_mode="bypass"))
        except McpError as error:
            if error.code != _METHOD_NOT_FOUND:  # a server without tools
                raise

    # --- the connection

    async def close(self) -> None:
        """Close the connection, and end the process of a stdio server."""
        self._closed = True
        if self._session is not None:
            self._session.end()
            await self._session.wait_ended()

    def _current_session(self) -> McpSession:
        """Return the open session; start a new one if it has ended."""
        if self._closed:
            raise McpConnectionError(self.name, "the container is stopped")
        if self._session is None or self._session.has_ended:
            self._tools_changed()
            callbacks = SessionCallbacks(self._notify, self._tools_changed, wants_logs=self._on_event is not None)
            self._session = McpSession(self.name, self.settings, callbacks, self._session)
        return self._session

    def _notify(self, event: McpEvent) -> None:
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception:  # a failing listener must not break the connection
                logger.exception("an McpListener failed on %r", event)

    async def _request(self, action: str, request: Callable[[Client], Awaitable[T]]) -> T:
        """Return the server's answer; a request that a lost session did not run is sent once more in a new session.

        `action` completes "could not …" in errors. Errors become `McpError` and show no secret of the settings.
        """
        try:
            try:
                return await self._request_in(self._current_session(), action, request)
            except _SessionLostError:
                try:
                    return await self._request_in(self._current_session(), action, request)
                except _SessionLostError as error:
                    raise self._broken(action, str(error)) from error
        except McpError as error:
            hide_secrets(error, secrets_of(self.settings))
            raise

    def shown(self, text: str) -> str:
        """Return a server's text for an error message: shortened, without secrets and invisible characters."""
        return without_secrets(visible(brief(text, MAX_MESSAGE_CHARS)), secrets_of(self.settings))

    async def _request_in(self, session: McpSession, action: str, request: Callable[[Client], Awaitable[T]]) -> T:
        import anyio
        from mcp import MCPError
        from pydantic import ValidationError

        client = await session.client()
        limit = self.settings.timeout
        late = f"MCP server {self.name!r} did not {action} within {limit:g} s"
        expiring = asyncio.timeout(limit)  # the SDK's limit only applies to one page
        try:
            async with expiring:
                return await request(client)
        except TimeoutError as error:
            if not expiring.expired():
                raise
            raise McpTimeoutError(self.name, late) from error
        except MCPError as error:
            message = brief(error.message, MAX_MESSAGE_CHARS)
            text = message.lower()
            if error.code == _REQUEST_TIMEOUT and "timed out" in text:
                raise McpTimeoutError(self.name, late, error.code) from error
            if error.code == _CONNECTION_CLOSED and "event exceeded" in text:  # the SDK's limit of one event
                raise McpError(self.name, too_large("the reply", self.settings.max_reply_bytes), error.code) from error
            is_transport_error = any(error.code == code and each in text for code, each in _TRANSPORT_ERRORS)
            if session.is_unknown_to_server and (is_transport_error or "session" in text):
                session.end()
                raise _SessionLostError(message) from error
            if is_transport_error and (session.has_ended or self.settings.url is not None):
                session.end()
                raise self._broken(action, session.end_reason or message) from error
            raise McpError(self.name, visible(message), error.code) from error
        except ValidationError as error:
            # Not its text: it repeats the server's data.
            count = error.error_count()
            text = f"MCP server {self.name!r} could not {action}: its reply does not follow the MCP protocol"
            raise McpError(self.name, f"{text} ({count} validation error{'s' if count > 1 else ''})") from None
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, anyio.EndOfStream, ConnectionError) as error:
            session.end()
            raise self._broken(action, session.end_reason or type(error).__name__) from error

    def _broken(self, action: str, reason: str) -> McpConnectionError:
        text = f"could not {action}: the connection broke ({reason}); the next call opens a new connection"
        return McpConnectionError(self.name, text)
