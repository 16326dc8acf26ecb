"""The connection to one MCP server: opened when first used, and anew when the server has died.

Not here: one life of it (`lives`), which servers there are (`servers`), what their tools become (`offering`).
"""

from __future__ import annotations

import asyncio
import fnmatch
import logging
import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ..settings import McpSettings
from ..tools.specification import name_problems
from ..validation_text import brief, hide_secrets, without_secrets
from .errors import McpConnectionError, McpError, McpTimeoutError
from .events import McpEvent, McpProgress
from .lives import Hearing, Life, secrets_of
from .screening import MAX_TOOLS, LeftOut, too_large, visible

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

MAX_PAGES = 100
"""Pages of a list that are read."""
MAX_ITEMS = 10_000
"""Tools, resources or prompts from which on no further page is read."""
LONGEST_MESSAGE = 4000
"""Characters of a server's error message that are kept."""

# What the client says when there will be no answer; servers use the same numbers for errors of their own.
_LATE = -32001
_CLOSED = -32000
_OF_THE_WAY = ((_CLOSED, ""), (-32603, "server returned an error response"))  # closed; an HTTP status, nothing more


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
        """Its tools, as far as they are offered; asked for once, and again when it says that they changed.

        A tool that cannot be used is left out and logged: with a name that no model takes, or one that another tool
        has, with a broken or too large schema, or one that only runs as a task.
        """
        self._living()  # the tools of a server that has gone are not those of the next
        if self._tools is not None:
            return self._tools
        asked = self._tools_asked
        offered = self._usable(await self._ask("list its tools", self._all_tools))
        if asked == self._tools_asked:  # else they have changed meanwhile
            self._tools = offered
        return offered

    def _usable(self, found: list[Tool]) -> tuple[Tool, ...]:
        """The tools that may be offered, a name once."""
        left_out = LeftOut(self.name)
        tools: dict[str, Tool] = {}
        for each in found:
            if not self._is_offered(each.name):
                continue
            name = self.offered_name(each.name)
            if name_problems(name, ""):
                left_out.add(each.name, "a model cannot call it by this name; use names= or prefix=")
            elif name in tools:
                left_out.add(each.name, f"another tool is called {name!r}; use names= to rename one")
            elif len(tools) == MAX_TOOLS:
                left_out.add(each.name, f"more than {MAX_TOOLS}")
            else:
                tools[name] = each
        left_out.log()
        schemas = self._life.output_schemas if self._life is not None else {}
        return tuple(
            each.model_copy(update={"output_schema": schemas[each.name]}) if each.name in schemas else each
            for each in tools.values()
        )

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
        return await self._ask("list its resources", self._all_resources)

    async def read_resource(self, uri: str) -> ReadResourceResult:
        """A resource's contents."""
        return await self._ask(f"read {uri}", lambda client: client.read_resource(uri))

    async def prompts(self) -> list[Prompt]:
        """Its prompts."""
        return await self._ask("list its prompts", self._all_prompts)

    async def prompt(self, name: str, arguments: dict[str, str] | None = None) -> GetPromptResult:
        """A prompt's messages, filled in."""
        return await self._ask(f"give prompt {name}", lambda client: client.get_prompt(name, arguments))

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
        self, what: str, ask: Callable[[str | None], Awaitable[P]], items: Callable[[P], list[T]]
    ) -> list[T]:
        """The items of all pages of a list; of one that does not end, those of its first pages."""
        found: list[T] = []
        seen: set[str] = set()
        cursor: str | None = None
        size = 0
        while True:
            page = await ask(cursor)
            found += items(page)
            cursor = page.next_cursor
            if not cursor:
                return found
            size += len(page.model_dump_json())
            limit = self.settings.max_reply_bytes
            if cursor in seen:
                reason = "it repeats a page"
            elif len(seen) + 1 >= MAX_PAGES:
                reason = f"it has more than {MAX_PAGES} pages"
            elif len(found) >= MAX_ITEMS:
                reason = f"it has more than {MAX_ITEMS} items"
            elif size > limit:
                reason = f"it is larger than {limit} bytes (max_reply_bytes)"
            else:
                seen.add(cursor)
                continue
            logger.warning("MCP server %r: the list of its %s is read in part: %s", self.name, what, reason)
            return found

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
        """What the server answers to a request, with its errors as ours; they show no secret of the settings."""
        try:
            try:
                return await self._ask_life(self._living(), what, request)
            except _ForgottenError:
                try:
                    return await self._ask_life(self._living(), what, request)
                except _ForgottenError as error:
                    raise self._broken(what, str(error)) from error
        except McpError as error:
            hide_secrets(error, secrets_of(self.settings))
            raise

    def shown(self, text: str) -> str:
        """A text of the server that becomes part of an error: without secrets of the settings, and not endless."""
        return without_secrets(visible(brief(text, LONGEST_MESSAGE)), secrets_of(self.settings))

    async def _ask_life(self, life: Life, what: str, request: Callable[[Client], Awaitable[T]]) -> T:
        import anyio
        from mcp import MCPError
        from pydantic import ValidationError

        client = await life.client()
        limit = self.settings.timeout
        late = f"MCP server {self.name!r} did not {what} within {limit:g} s"
        expiring = asyncio.timeout(limit)  # the SDK's own limit is for one page, one round
        try:
            async with expiring:
                return await request(client)
        except TimeoutError as error:
            if not expiring.expired():
                raise
            raise McpTimeoutError(self.name, late) from error
        except MCPError as error:
            message = brief(error.message, LONGEST_MESSAGE)
            text = message.lower()
            if error.code == _LATE and "timed out" in text:
                raise McpTimeoutError(self.name, late, error.code) from error
            if error.code == _CLOSED and "event exceeded" in text:  # of the SDK, which bounds events
                raise McpError(self.name, too_large("the reply", self.settings.max_reply_bytes), error.code) from error
            is_of_the_way = any(error.code == code and each in text for code, each in _OF_THE_WAY)
            if life.is_forgotten and (is_of_the_way or "session" in text):
                life.end()
                raise _ForgottenError(message) from error
            if is_of_the_way and (life.is_over or self.settings.url is not None):
                life.end()
                raise self._broken(what, life.fault or message) from error
            raise McpError(self.name, visible(message), error.code) from error
        except ValidationError as error:
            # Its text repeats what the server sent.
            count = error.error_count()
            broken = f"MCP server {self.name!r} could not {what}: its reply is not as the protocol says"
            raise McpError(self.name, f"{broken} ({count} fault{'s' if count > 1 else ''})") from None
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, anyio.EndOfStream, ConnectionError) as error:
            life.end()
            raise self._broken(what, life.fault or type(error).__name__) from error

    def _broken(self, what: str, reason: str) -> McpConnectionError:
        broke = f"the connection broke before it could {what} ({reason})"
        return McpConnectionError(self.name, f"{broke}; the next call opens it anew")
