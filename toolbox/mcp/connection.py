"""The connection to one MCP server: opened when first used, held by one task, opened anew when the server has died.

Not here: which servers there are (`servers`), what their tools become (`offering`).
"""

from __future__ import annotations

import asyncio
import fnmatch
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from ..errors import ToolboxError
from ..settings import McpSettings
from .events import McpEvent, McpLog, McpProgress

if TYPE_CHECKING:
    from mcp import Client
    from mcp_types import CallToolResult, GetPromptResult, Prompt, ReadResourceResult, Resource, Tool

logger = logging.getLogger("toolbox.mcp")

INVALID_PARAMS = -32602
"""JSON-RPC: the arguments of a call are wrong."""


class McpError(ToolboxError):
    """An MCP server refused a request or reports an error: `.server`, `.message`, `.code` (JSON-RPC's, or None)."""

    def __init__(self, server: str, message: str, code: int | None = None) -> None:
        super().__init__(server, message, code)
        self.server, self.message, self.code = server, message, code

    def __str__(self) -> str:
        return self.message


class McpConnectionError(McpError):
    """An MCP server cannot be reached, or the connection to it has broken; it is opened anew by the next call."""

    def __str__(self) -> str:
        return f"MCP server {self.server!r}: {self.message}"


class McpTimeoutError(McpError, TimeoutError):
    """An MCP server did not answer in time."""

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.server, self.message, self.code)


class McpConnection:
    """One server. Its methods may be called from any task of the loop it was first used on."""

    def __init__(self, name: str, settings: McpSettings, tell: Callable[[McpEvent], None]) -> None:
        self.name, self.settings, self._tell = name, settings, tell
        self._holder: asyncio.Task[None] | None = None
        self._opened: asyncio.Future[Client] | None = None
        self._leave = asyncio.Event()
        self._tools: tuple[Tool, ...] | None = None
        self._closed = False

    # --- what a server offers

    async def tools(self) -> tuple[Tool, ...]:
        """Its tools, as far as they are offered; asked for once, and again when it says that they changed."""
        if self._tools is None:
            found: list[Tool] = []
            async with self._asking("list its tools") as client:
                cursor: str | None = None
                while True:
                    page = await client.list_tools(cursor=cursor, cache_mode="refresh")
                    found += page.tools
                    if (cursor := page.next_cursor) is None:
                        break
            self._tools = tuple(each for each in found if self._is_offered(each.name))
        return self._tools

    def _is_offered(self, name: str) -> bool:
        include, exclude = self.settings.include, self.settings.exclude
        wanted = not include or any(fnmatch.fnmatchcase(name, pattern) for pattern in include)
        return wanted and not any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude)

    def offered_name(self, name: str) -> str:
        """What a tool is called here."""
        return self.settings.names.get(name, f"{self.settings.prefix}{name}")

    async def call(self, tool: str, arguments: dict[str, Any]) -> CallToolResult:
        """Calls a tool by the server's own name for it."""

        async def tell(progress: float, total: float | None, message: str | None) -> None:
            self._tell(McpProgress(self.name, tool, progress, total, message))

        async with self._asking(f"run {tool}") as client:
            return await client.call_tool(tool, arguments, progress_callback=tell)

    async def resources(self) -> list[Resource]:
        """Its resources."""
        async with self._asking("list its resources") as client:
            found: list[Resource] = []
            cursor: str | None = None
            while True:
                page = await client.list_resources(cursor=cursor)
                found += page.resources
                if (cursor := page.next_cursor) is None:
                    return found

    async def read_resource(self, uri: str) -> ReadResourceResult:
        """A resource's contents."""
        async with self._asking(f"read {uri}") as client:
            return await client.read_resource(uri)

    async def prompts(self) -> list[Prompt]:
        """Its prompts."""
        async with self._asking("list its prompts") as client:
            found: list[Prompt] = []
            cursor: str | None = None
            while True:
                page = await client.list_prompts(cursor=cursor)
                found += page.prompts
                if (cursor := page.next_cursor) is None:
                    return found

    async def prompt(self, name: str, arguments: dict[str, str] | None = None) -> GetPromptResult:
        """A prompt's messages, filled in."""
        async with self._asking(f"give prompt {name}") as client:
            return await client.get_prompt(name, arguments)

    # --- the connection

    async def close(self) -> None:
        """Ends the connection, and a server over stdio with it."""
        self._closed = True
        self._leave.set()
        if self._holder is not None:
            await asyncio.wait([self._holder])

    @asynccontextmanager
    async def _asking(self, what: str) -> AsyncIterator[Client]:
        """The client for one request, with its errors as ours."""
        import anyio
        from mcp import MCPError

        client = await self._client()
        try:
            yield client
        except MCPError as error:
            message = error.message
            if "timed out" in message.lower():
                late = f"MCP server {self.name!r} did not {what} within {self.settings.timeout:g} s"
                raise McpTimeoutError(self.name, late, error.code) from error
            if error.code == -32000 or "connection closed" in message.lower():
                raise self._died(what) from error
            raise McpError(self.name, message, error.code) from error
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, anyio.EndOfStream, ConnectionError) as error:
            raise self._died(what) from error

    def _died(self, what: str) -> McpConnectionError:
        """The server is gone: the connection is let go, so that the next request opens another."""
        self._leave.set()
        self._opened = None
        self._tools = None
        return McpConnectionError(self.name, f"the connection broke before it could {what}; it is being opened anew")

    async def _client(self) -> Client:
        if self._closed:
            raise McpConnectionError(self.name, "the container is stopped")
        if self._opened is None:
            if self._holder is not None:
                await asyncio.wait([self._holder])  # what is left of the connection before
            self._leave = asyncio.Event()
            self._opened = asyncio.get_running_loop().create_future()
            self._holder = asyncio.create_task(self._hold(self._opened, self._leave), name=f"mcp {self.name}")
        opened = self._opened
        try:
            async with asyncio.timeout(self.settings.connect_timeout):
                return await asyncio.shield(opened)
        except TimeoutError:
            self._opened = None
            if self._holder is not None:
                self._holder.cancel()
            limit = f"no answer within {self.settings.connect_timeout:g} s"
            raise McpConnectionError(self.name, limit) from None

    async def _hold(self, opened: asyncio.Future[Client], leave: asyncio.Event) -> None:
        """One life of the connection: entered and left in this task, as anyio's task groups demand."""
        try:
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(await self._new_client(stack))
                stack.push_async_callback(_end, asyncio.create_task(self._follow_changes(client)))
                opened.set_result(client)
                await leave.wait()
        except asyncio.CancelledError:
            if not opened.done():
                opened.cancel()
            raise
        except BaseException as error:  # an ExceptionGroup of whatever the server or its transport did
            reason = _reason(error)
            if not opened.done():
                self._opened = None
                opened.set_exception(McpConnectionError(self.name, f"cannot be reached: {reason}"))
                opened.exception()  # nobody may be waiting any more
            else:
                logger.info("the connection to MCP server %r ended: %s", self.name, reason)
        finally:
            if self._opened is opened and opened.done():
                self._opened = None
                self._tools = None

    async def _new_client(self, stack: AsyncExitStack) -> Any:
        try:
            from mcp import Client, StdioServerParameters
            from mcp.client.streamable_http import streamable_http_client
        except ImportError as error:
            raise McpConnectionError(self.name, "the library mcp is missing: pip install 'toolbox-di[mcp]'") from error

        settings = self.settings
        target: Any
        if settings.url is not None:
            import httpx2

            headers = {name: value.get_secret_value() for name, value in settings.headers.items()}
            # A stream of events may be silent for long: the limit of a call is the client's to watch.
            timeout = httpx2.Timeout(settings.connect_timeout, read=None)
            http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=timeout))
            target = streamable_http_client(settings.url, http_client=http)
        else:
            environment = {name: value.get_secret_value() for name, value in settings.env.items()}
            target = StdioServerParameters(
                command=settings.command or "", args=list(settings.args), env=environment or None, cwd=settings.cwd
            )
        return Client(
            target,
            read_timeout_seconds=settings.timeout,
            logging_callback=self._on_log,
            message_handler=self._on_message,
        )

    # --- what the server tells

    async def _on_log(self, params: Any) -> None:
        self._tell(McpLog(self.name, str(params.level), params.logger, params.data))

    async def _on_message(self, message: Any) -> None:
        inner = getattr(message, "root", message)
        if getattr(inner, "method", "") == "notifications/tools/list_changed":
            self._tools = None

    async def _follow_changes(self, client: Client) -> None:
        """Of a server that speaks the newer protocol: changes come over a subscription."""
        try:
            async with client.listen(tools_list_changed=True) as changes:
                self._tools = None  # what changed before is not told again
                async for _ in changes:
                    self._tools = None
        except asyncio.CancelledError:
            raise
        except Exception as error:  # an older server has none; a lost one costs only news of changes
            logger.debug("no subscription to MCP server %r: %s", self.name, error)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


def _reason(error: BaseException) -> str:
    """What went wrong, of the innermost of nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, FileNotFoundError):
        return f"there is no command {error.filename!r}"
    return str(error) or type(error).__name__
