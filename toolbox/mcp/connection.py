"""The connection to one MCP server: opened when first used, and anew when the server has died.

Not here: one life of it (`lives`), which servers there are (`servers`), what their tools become (`offering`).
"""

from __future__ import annotations

import fnmatch
import logging
import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ..settings import McpSettings
from .errors import McpConnectionError, McpError, McpTimeoutError
from .events import McpEvent, McpProgress
from .lives import Hearing, Life

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

P = TypeVar("P", bound="PaginatedResult")
T = TypeVar("T")

_NO_NAME = re.compile(r"[^A-Za-z0-9_-]")

INVALID_PARAMS = -32602
"""JSON-RPC: the arguments of a call are wrong."""

# What the client says when there will be no answer; servers use the same numbers for errors of their own.
_LATE = -32001
_OF_THE_WAY = ((-32000, ""), (-32603, "server returned an error response"))  # closed; an HTTP status, nothing more


class _ForgottenError(Exception):
    """The server does not know this client any more, and so has done nothing."""


class McpConnection:
    """One server. Its methods may be called from any task of the loop it was first used on."""

    def __init__(self, name: str, settings: McpSettings, tell: Callable[[McpEvent], None] | None = None) -> None:
        self.name, self.settings, self._teller = name, settings, tell
        self._life: Life | None = None
        self._tools: tuple[Tool, ...] | None = None
        self._tools_asked = 0
        self._closed = False

    # --- what a server offers

    async def tools(self) -> tuple[Tool, ...]:
        """Its tools, as far as they are offered; asked for once, and again when it says that they changed."""
        self._living()  # the tools of a server that has gone are not those of the next
        if self._tools is not None:
            return self._tools
        asked = self._tools_asked
        found = await self._ask("list its tools", _all_tools)
        offered = tuple(each for each in found if self._is_offered(each.name))
        if asked == self._tools_asked:  # else they have changed meanwhile
            self._tools = offered
        return offered

    def _tools_changed(self) -> None:
        self._tools = None
        self._tools_asked += 1

    def _is_offered(self, name: str) -> bool:
        include, exclude = self.settings.include, self.settings.exclude
        wanted = not include or any(fnmatch.fnmatchcase(name, pattern) for pattern in include)
        return wanted and not any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude)

    def offered_name(self, name: str) -> str:
        """What a tool is called here; MCP allows characters, such as dots, that models' names cannot have."""
        given = self.settings.names.get(name)
        return _NO_NAME.sub("_", f"{self.settings.prefix}{name}")[:64] if given is None else given

    async def call(self, tool: str, arguments: dict[str, Any]) -> CallToolResult:
        """Calls a tool by the server's own name for it."""

        async def tell(progress: float, total: float | None, message: str | None) -> None:
            self._tell(McpProgress(self.name, tool, progress, total, message))

        return await self._ask(f"run {tool}", lambda client: client.call_tool(tool, arguments, progress_callback=tell))

    async def resources(self) -> list[Resource]:
        """Its resources."""
        return await self._ask("list its resources", _all_resources)

    async def read_resource(self, uri: str) -> ReadResourceResult:
        """A resource's contents."""
        return await self._ask(f"read {uri}", lambda client: client.read_resource(uri))

    async def prompts(self) -> list[Prompt]:
        """Its prompts."""
        return await self._ask("list its prompts", _all_prompts)

    async def prompt(self, name: str, arguments: dict[str, str] | None = None) -> GetPromptResult:
        """A prompt's messages, filled in."""
        return await self._ask(f"give prompt {name}", lambda client: client.get_prompt(name, arguments))

    # --- the connection

    async def close(self) -> None:
        """Ends the connection, and a server over stdio with it."""
        self._closed = True
        if self._life is not None:
            self._life.end()
            await self._life.ended()

    def _living(self) -> Life:
        """The present life, or the next one when that is over."""
        if self._closed:
            raise McpConnectionError(self.name, "the container is stopped")
        if self._life is None or self._life.is_over:
            self._tools_changed()
            hearing = Hearing(self._tell, self._tools_changed, logs=self._teller is not None)
            self._life = Life(self.name, self.settings, hearing, self._life)
        return self._life

    def _tell(self, event: McpEvent) -> None:
        if self._teller is not None:
            try:
                self._teller(event)
            except Exception:  # what a listener does wrong is not the server's
                logger.exception("a listener failed on %r", event)

    async def _ask(self, what: str, request: Callable[[Client], Awaitable[T]]) -> T:
        """What the server answers to a request, with its errors as ours."""
        try:
            return await self._ask_life(self._living(), what, request)
        except _ForgottenError:
            try:
                return await self._ask_life(self._living(), what, request)
            except _ForgottenError as error:
                raise self._broken(what, str(error)) from error

    async def _ask_life(self, life: Life, what: str, request: Callable[[Client], Awaitable[T]]) -> T:
        import anyio
        from mcp import MCPError

        client = await life.client()
        try:
            return await request(client)
        except MCPError as error:
            text = error.message.lower()
            if error.code == _LATE and "timed out" in text:
                late = f"MCP server {self.name!r} did not {what} within {self.settings.timeout:g} s"
                raise McpTimeoutError(self.name, late, error.code) from error
            is_of_the_way = any(error.code == code and each in text for code, each in _OF_THE_WAY)
            if life.is_forgotten and (is_of_the_way or "session" in text):
                life.end()
                raise _ForgottenError(error.message) from error
            if is_of_the_way and (life.is_over or self.settings.url is not None):
                life.end()
                raise self._broken(what, error.message) from error
            raise McpError(self.name, error.message, error.code) from error
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, anyio.EndOfStream, ConnectionError) as error:
            life.end()
            raise self._broken(what, type(error).__name__) from error

    def _broken(self, what: str, reason: str) -> McpConnectionError:
        broke = f"the connection broke before it could {what} ({reason})"
        return McpConnectionError(self.name, f"{broke}; the next call opens it anew")


async def _all_tools(client: Client) -> list[Tool]:
    return await _paged(lambda cursor: client.list_tools(cursor=cursor, cache_mode="refresh"), lambda page: page.tools)


async def _all_resources(client: Client) -> list[Resource]:
    return await _paged(lambda cursor: client.list_resources(cursor=cursor), lambda page: page.resources)


async def _all_prompts(client: Client) -> list[Prompt]:
    return await _paged(lambda cursor: client.list_prompts(cursor=cursor), lambda page: page.prompts)


async def _paged(ask: Callable[[str | None], Awaitable[P]], items: Callable[[P], list[T]]) -> list[T]:
    """The items of all pages of a list."""
    page = await ask(None)
    found = [*items(page)]
    while page.next_cursor is not None:
        page = await ask(page.next_cursor)
        found += items(page)
    return found
