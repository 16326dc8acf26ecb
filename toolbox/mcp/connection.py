"""The connection to one MCP server: sends requests, opens a session for the first one and a new one after a failure.

A session is a task that opens the connection, keeps it open and closes it. Also: notifications for the program, and
errors. Not here: processes and HTTP clients (`transports`), the servers of a container and their tools in services
(`servers`).
"""

from __future__ import annotations

import asyncio
import fnmatch
import hashlib
import json
import logging
import math
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from contextvars import Context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from pydantic import SecretStr

from ..chat import Message
from ..context import current_progress
from ..errors import McpConnectionError, McpError, McpInputRequiredError, McpTimeoutError
from ..safe_text import brief, hide_secrets, without_secrets
from ..search import SEARCH_TOOL
from ..services.outputs import ANSWER_TOOL
from ..settings import McpSettings
from ..tools.specification import name_problems
from .blocks import messages_of
from .screening import MAX_TOOLS, SkippedTools, remove_unusable_tools, too_large, visible

if TYPE_CHECKING:
    import httpx2
    from mcp import Client
    from mcp_types import (
        CallToolResult,
        GetPromptResult,
        PaginatedResult,
        Prompt,
        ReadResourceResult,
        Resource,
        ResourceTemplate,
        Tool,
    )


logger = logging.getLogger("toolbox.mcp")

P = TypeVar("P", bound="PaginatedResult")
T = TypeVar("T")

_INVALID_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]")

LONGEST_MESSAGE = 1000
"""Characters of the text of a server's progress that streams and listeners of tools receive."""

FIRST_WITH_INPUT = "2026-07-28"
"""The first protocol version in which a server returns a question instead of asking while the call runs."""

INVALID_PARAMS = -32602
"""JSON-RPC: the arguments of a call are invalid."""
_METHOD_NOT_FOUND = -32601

RESERVED_NAMES = frozenset({SEARCH_TOOL, ANSWER_TOOL, "list_resources", "get_resource"})
"""Names of the framework's own tools: a server's tool would take their place, or end every call of a service."""

MAX_PAGES = 100
"""Pages that are read of one list."""
MAX_ITEMS = 10_000
"""Number of tools, resources or prompts after which no further page is read."""
MAX_MESSAGE_CHARS = 4000
"""Characters that are kept of a server's error message."""
FIRST_WAIT, LAST_WAIT = 0.05, 0.25
"""Seconds between two calls of a tool whose server only returns a state."""
MAX_GROUPS = 64
"""Sessions of one server with different headers; the one that was not used for the longest time is closed first."""

# Codes of the SDK's client for missing answers; servers use the same numbers for their own errors.
_REQUEST_TIMEOUT = -32001
_CONNECTION_CLOSED = -32000
# Transport errors: the connection closed, or an HTTP error status without a JSON-RPC error.
_TRANSPORT_ERRORS = ((_CONNECTION_CLOSED, ""), (-32603, "server returned an error response"))


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Return True if a tool has one of these names, or fits one of these patterns."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


# --- the connection to one server


class _SessionLostError(Exception):
    """The server does not know the session, so it has not run the request."""


Headers: TypeAlias = tuple[tuple[str, str], ...]


@dataclass(eq=False, slots=True)
class _HeaderGroup:
    """The session and the tools for the calls with the same headers. `running` counts their requests."""

    settings: McpSettings
    session: McpSession | None = None
    tools: tuple[Tool, ...] | None = None
    tools_version: int = 0
    running: int = 0

    def tools_changed(self) -> None:
        """Forget the list of tools."""
        self.tools = None
        self.tools_version += 1


class McpConnection:
    """The connection to one server. Any task of the event loop that used it first may call its methods.

    `headers` returns the headers of the current call. Calls with different headers never share a session or a list of
    tools, because the server may offer other tools to another user.
    """

    def __init__(
        self,
        name: str,
        settings: McpSettings,
        on_event: Callable[[McpEvent], None] | None = None,
        headers: Callable[[], Awaitable[Mapping[str, str]]] | None = None,
    ) -> None:
        self.name, self.settings, self._on_event, self._headers = name, settings, on_event, headers
        self._groups: OrderedDict[Headers, _HeaderGroup] = OrderedDict()
        self._evicted: set[McpSession] = set()
        self._pins: dict[str, dict[str, str]] = {}
        self._reported: set[tuple[str, tuple[str, ...]]] = set()
        self._refused: frozenset[str] = frozenset()
        self._unmatched: set[str] = set()
        self._closed = ""  # why, once it is closed
        self._running = 0
        self._is_idle = asyncio.Event()

    # --- requests

    async def tools(self) -> tuple[Tool, ...]:
        """Return the usable tools of the server. The list is cached until the server reports a change.

        Tools that cannot be used are skipped and logged: an invalid or duplicate name, an invalid or too large schema,
        or a tool that only runs as a task. With `pin_tools`, so are tools that have changed since they were listed
        first. Raises `McpError`.
        """
        group = await self._current_group()
        self._current_session(group)  # a new session discards the tools of the previous one
        if group.tools is not None:
            return group.tools
        version = group.tools_version
        offered = self._usable(await self._request("list its tools", self._all_tools, group), group)
        if version == group.tools_version:  # they did not change in the meantime
            group.tools = offered
        return offered

    def _usable(self, found: list[Tool], group: _HeaderGroup) -> tuple[Tool, ...]:
        """Return the tools to offer; each name occurs once."""
        self._report_patterns([each.name for each in found])
        skipped = SkippedTools(self.name)
        tools: dict[str, Tool] = {}
        for each in found:
            if not self._is_offered(each.name):
                continue
            name = self.offered_name(each.name)
            if name in RESERVED_NAMES:
                skipped.add(each.name, "toolbox has a tool of this name; rename it with names= or prefix=")
            elif name_problems(name, ""):
                skipped.add(each.name, "models do not accept this name; rename it with names= or prefix=")
            elif name in tools:
                skipped.add(each.name, f"another tool has the name {name!r}; rename one with names=")
            elif len(tools) == MAX_TOOLS:
                skipped.add(each.name, f"more than {MAX_TOOLS}")
            elif (changed := self._changed(each)) and self.settings.pin_tools:
                skipped.add(each.name, f"it has changed since it was first listed: {', '.join(changed)}")
            else:
                tools[name] = each
        skipped.log()
        schemas = group.session.output_schemas if group.session is not None else {}
        return tuple(
            each.model_copy(update={"output_schema": schemas[each.name]}) if each.name in schemas else each
            for each in tools.values()
        )

    def _report_patterns(self, names: list[str]) -> None:
        """Log each pattern of `approval` that matches no tool, once: a typing error would leave a tool unguarded."""
        patterns = self.settings.approval if isinstance(self.settings.approval, tuple) else ()
        known = [*names, "get_resource"] if self.settings.expose_resources else names
        for pattern in patterns:
            if pattern not in self._unmatched and not any(matches_any(name, (pattern,)) for name in known):
                self._unmatched.add(pattern)
                logger.warning("MCP server %r: approval=%r matches none of its tools", self.name, pattern)

    def _changed(self, tool: Tool) -> tuple[str, ...]:
        """Return what differs from the first listing of a tool, and report it. Remembers a tool that is new."""
        now = _fingerprints(tool)
        if tool.name not in self._pins and len(self._pins) < MAX_ITEMS:
            self._pins[tool.name] = now
        first = self._pins.get(tool.name, {})
        changed = tuple(part for part, value in now.items() if first.get(part) != value)
        refused = self._refused - {tool.name}
        self._refused = refused | {tool.name} if changed and self.settings.pin_tools else refused
        if changed and (tool.name, tuple(now.values())) not in self._reported:
            if len(self._reported) < MAX_ITEMS:
                self._reported.add((tool.name, tuple(now.values())))
            self._notify(McpToolChanged(self.name, tool.name, changed, self.settings.pin_tools))
            if not self.settings.pin_tools:
                logger.warning(
                    "MCP server %r: the %s of tool %r changed after it was first listed; review it, or refuse changed "
                    "tools with pin_tools=True",
                    self.name,
                    " and the ".join(changed),
                    tool.name,
                )
        return changed

    def _is_offered(self, name: str) -> bool:
        include, exclude = self.settings.include, self.settings.exclude
        return (not include or matches_any(name, include)) and not matches_any(name, exclude)

    def offered_name(self, name: str) -> str:
        """Return the name that models see; MCP allows characters such as dots, which models do not accept."""
        new_name = self.settings.names.get(name)
        return _INVALID_IN_NAMES.sub("_", f"{self.settings.prefix}{name}")[:64] if new_name is None else new_name

    async def takes_input(self) -> bool:
        """Return True if the server can return questions instead of results. Raises `McpError`."""
        session = self._current_session(await self._current_group())
        await session.client()
        return session.takes_input

    async def call(
        self,
        tool: str,
        arguments: dict[str, Any],
        *,
        answers: Mapping[str, Mapping[str, Any]] | None = None,
        state: str | None = None,
    ) -> CallToolResult:
        """Call a tool and return its result. `tool` is the server's name of the tool.

        Raises `McpInputRequiredError` if the server needs input. Then call the tool again with `answers` by the keys of
        its requests, such as `{"action": "accept", "content": {…}}`, and with its `state`. Raises `McpError`.
        """
        if tool in self._refused:
            raise McpError(self.name, f"refused tool {tool}: it has changed since it was first listed")

        report = current_progress.get()

        async def on_progress(progress: float, total: float | None, message: str | None) -> None:
            self._notify(McpProgress(self.name, tool, progress, total, message))
            if report is not None and math.isfinite(progress) and math.isfinite(total or 0):
                report(progress, total, message if message is None else message[:LONGEST_MESSAGE])

        async def call(client: Client) -> CallToolResult:
            return await _call_tool(self.name, client, tool, arguments, answers, state, on_progress)

        return await self._request(f"run {tool}", call)

    async def resources(self) -> list[Resource]:
        """Return the resources of the server. Raises `McpError`."""
        return await self._request("list its resources", self._all_resources)

    async def resource_templates(self) -> list[ResourceTemplate]:
        """Return the templates of URIs of the server's resources. Raises `McpError`."""
        return await self._request("list its resource templates", self._all_templates)

    async def read_resource(self, uri: str) -> ReadResourceResult:
        """Return the contents of a resource. Raises `McpError`."""
        return await self._request(f"read {uri}", lambda client: client.read_resource(uri))

    async def prompts(self) -> list[Prompt]:
        """Return the prompts of the server. Raises `McpError`."""
        return await self._request("list its prompts", self._all_prompts)

    async def prompt(self, name: str, arguments: dict[str, str] | None = None) -> GetPromptResult:
        """Return the messages of a prompt with its arguments filled in. Raises `McpError`."""
        return await self._request(f"return prompt {name}", lambda client: client.get_prompt(name, arguments))

    async def prompt_messages(self, name: str, arguments: dict[str, str] | None = None) -> tuple[Message, ...]:
        """Return the messages of a prompt as messages of a conversation. Raises `McpError`.

        history = await servers.server("kitchen").prompt_messages("order", {"dish": "soup"})
        """
        return messages_of(await self.prompt(name, arguments))

    async def _all_tools(self, client: Client) -> list[Tool]:
        return await self._paged("tools", lambda cursor: client.list_tools(cursor=cursor), lambda page: page.tools)

    async def _all_resources(self, client: Client) -> list[Resource]:
        return await self._paged(
            "resources", lambda cursor: client.list_resources(cursor=cursor), lambda page: page.resources
        )

    async def _all_templates(self, client: Client) -> list[ResourceTemplate]:
        return await self._paged(
            "resource templates",
            lambda cursor: client.list_resource_templates(cursor=cursor),
            lambda page: page.resource_templates,
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
        """Request the first page of the tools; open the connection if it is not open. Raises `McpError`.

        A server whose headers depend on the caller is not asked.
        """
        if self._headers is not None:
            return
        try:
            await self._request("list its tools", lambda client: client.list_tools(cache_mode="bypass"))
        except McpError as error:
            if error.code != _METHOD_NOT_FOUND:  # a server without tools
                raise

    # --- the connection

    async def finish(self, timeout: float) -> None:
        """Close the connection when its running requests have ended, or after `timeout` seconds."""
        if self._running:
            self._is_idle.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._is_idle.wait()
        await self.close("the server was removed")

    async def close(self, reason: str = "the container is stopped") -> None:
        """Close the connection, and end the process of a stdio server."""
        self._closed = reason
        sessions = {*self._evicted, *(each.session for each in self._groups.values() if each.session is not None)}
        for session in sessions:
            session.end()
        for session in sessions:
            await session.wait_ended()

    async def _current_group(self) -> _HeaderGroup:
        """Return the state for the headers of the current call."""
        headers: Headers = ()
        if self._headers is not None:
            headers = tuple(sorted((await self._headers()).items()))
        group = self._groups.get(headers)
        if group is None:
            self._make_room()
            settings = self.settings
            if headers:
                names = {name.lower() for name, _ in headers}
                kept = {name: value for name, value in settings.headers.items() if name.lower() not in names}
                given = {name: SecretStr(value) for name, value in headers}
                settings = settings.model_copy(update={"headers": {**kept, **given}})
            group = self._groups[headers] = _HeaderGroup(settings)
        self._groups.move_to_end(headers)
        return group

    def _make_room(self) -> None:
        """Close the sessions that were not used for the longest time, if there are too many."""
        self._evicted = {each for each in self._evicted if not each.is_closed}
        for headers, group in list(self._groups.items()):
            if len(self._groups) < MAX_GROUPS:
                return
            if not group.running:
                del self._groups[headers]
                if group.session is not None:
                    group.session.end()
                    self._evicted.add(group.session)

    def _current_session(self, group: _HeaderGroup) -> McpSession:
        """Return the open session; start a new one if it has ended."""
        if self._closed:
            raise McpConnectionError(self.name, self._closed)
        if group.session is None or group.session.has_ended:
            group.tools_changed()
            callbacks = SessionCallbacks(self._notify, group.tools_changed)
            group.session = McpSession(self.name, group.settings, callbacks, group.session)
        return group.session

    def _notify(self, event: McpEvent) -> None:
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception:  # a failing listener must not break the connection
                logger.exception("an McpListener failed on %r", event)

    async def _request(
        self, action: str, request: Callable[[Client], Awaitable[T]], group: _HeaderGroup | None = None
    ) -> T:
        """Return the server's answer; a request that a lost session did not run is sent once more in a new session.

        `action` completes "could not …" in errors. Errors become `McpError` and show no secret of the settings.
        """
        if group is None:
            group = await self._current_group()
        group.running += 1
        self._running += 1
        try:
            try:
                return await self._request_in(self._current_session(group), action, request)
            except _SessionLostError:
                try:
                    return await self._request_in(self._current_session(group), action, request)
                except _SessionLostError as error:
                    raise self._broken(action, str(error)) from error
        except McpError as error:
            hide_secrets(error, secrets_of(group.settings))
            raise
        finally:
            group.running -= 1
            self._running -= 1
            if not self._running:
                self._is_idle.set()

    def shown(self, text: str) -> str:
        """Return a server's text for an error message: shortened, without secrets and invisible characters."""
        groups = [each.settings for each in self._groups.values()] or [self.settings]
        secrets = {secret for settings in groups for secret in secrets_of(settings)}
        return without_secrets(visible(brief(text, MAX_MESSAGE_CHARS)), list(secrets))

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
                refusal = session.refusal if error.code != _CONNECTION_CLOSED else None
                raise self._broken(action, session.end_reason or message, refusal) from error
            raise McpError(self.name, visible(message), error.code) from error
        except ValidationError as error:
            # Not its text: it repeats the server's data.
            count = error.error_count()
            text = f"MCP server {self.name!r} could not {action}: its reply does not follow the MCP protocol"
            raise McpError(self.name, f"{text} ({count} validation error{'s' if count > 1 else ''})") from None
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, anyio.EndOfStream, ConnectionError) as error:
            session.end()
            raise self._broken(action, session.end_reason or type(error).__name__) from error

    def _broken(self, action: str, reason: str, refusal: RefusedRequest | None = None) -> McpConnectionError:
        fact = "the connection broke" if refusal is None else f"it answered with status {refusal.status}"
        text = f"could not {action}: {fact} ({reason}); the next call opens a new connection"
        return _connection_error(self.name, text, refusal)


# --- calls


async def _call_tool(
    server: str,
    client: Client,
    tool: str,
    arguments: dict[str, Any],
    answers: Mapping[str, Mapping[str, Any]] | None,
    state: str | None,
    on_progress: Any,
) -> CallToolResult:
    """Call a tool once, or repeatedly while the server only returns a state. Raises `McpInputRequiredError`."""
    from mcp import MCPError
    from mcp_types import HEADER_MISMATCH, ElicitResult, InputRequiredResult

    responses: Any = None if answers is None else {key: ElicitResult(**each) for key, each in answers.items()}
    wait, listed = FIRST_WAIT, False
    while True:
        try:
            result = await client.session.call_tool(
                tool,
                arguments,
                progress_callback=on_progress,
                input_responses=responses,
                request_state=state,
                allow_input_required=True,
            )
        except MCPError as error:
            if error.code != HEADER_MISMATCH or listed:
                raise
            listed = True
            await client.list_tools(cache_mode="bypass")  # headers repeat arguments, as the listed schema says
            continue
        if not isinstance(result, InputRequiredResult):
            return result
        responses, state = None, result.request_state
        if result.input_requests:
            requests = {key: _question(server, each) for key, each in result.input_requests.items()}
            refused = [each["url"] for each in requests.values() if "url" in each and not is_web_address(each["url"])]
            if not refused:
                raise McpInputRequiredError(server, requests, state)
            logger.warning(
                "MCP server %r: its questions are declined: %r is not an http or https address",
                server,
                brief(refused[0], 80),
            )
            responses = {key: ElicitResult(action="decline") for key in requests}
        await asyncio.sleep(wait)  # the limit of the call ends this
        wait = min(wait * 2, LAST_WAIT)


def _question(server: str, request: Any) -> dict[str, Any]:
    """Return a question of a server as JSON values. Raises `McpError` for deprecated kinds."""
    params = request.params
    if request.method != "elicitation/create":
        raise McpError(server, f"the server asks for {request.method}, which is not supported")
    message = visible(brief(params.message, MAX_MESSAGE_CHARS))
    if params.mode == "url":
        return {"message": message, "url": params.url}
    return {"message": message, "schema": params.requested_schema}


def is_web_address(url: object) -> bool:
    """Return True for an address of http or https that a person can be asked to open.

    A page that shows `javascript:`, `data:` or `file:` addresses as links would run the server's code, or open files.
    """
    try:
        parts = urlsplit(str(url))
        return parts.scheme in ("http", "https") and bool(parts.hostname) and visible(str(url)) == url
    except ValueError:
        return False


# --- pinned tools


def _fingerprints(tool: Tool) -> dict[str, str]:
    """Return a short hash of each part of a tool that a model or an approval depends on."""
    annotations = None if tool.annotations is None else tool.annotations.model_dump(mode="json", exclude_none=True)
    parts = {"description": [tool.title, tool.description], "schema": tool.input_schema, "annotations": annotations}
    return {name: _hash(value) for name, value in parts.items()}


def fingerprint_of(tool: Tool) -> str:
    """Return a short hash of what an approval of a call covers: the tool's own name, input schema and annotations."""
    parts = _fingerprints(tool)
    return _hash([tool.name, parts["schema"], parts["annotations"]])


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()[:16]


# --- notifications for the program


@dataclass(frozen=True, slots=True)
class McpProgress:
    """A server reports the progress of a tool call: `progress` out of `total`, if the total is known."""

    server: str
    tool: str
    progress: float
    total: float | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True)
class McpLog:
    """A server sent a log message; `level` is the MCP name of the level (`debug` … `emergency`).

    Protocol logging is deprecated in MCP. Servers are not asked for log messages; older ones send them all the same.
    """

    server: str
    level: str
    logger: str | None
    data: Any


@dataclass(frozen=True, slots=True)
class McpToolChanged:
    """A tool differs from its first listing. `changed` are parts of it: `description`, `schema`, `annotations`.

    `refused` is True if the tool is no longer offered (`pin_tools=True`).
    """

    server: str
    tool: str
    changed: tuple[str, ...]
    refused: bool = False


McpEvent: TypeAlias = McpProgress | McpLog | McpToolChanged


class McpListener(Protocol):
    """Receives progress, log messages and changed tools of MCP servers. Implement it in a bean.

        @application_scoped
        class ProgressBar(McpListener):
            def on_mcp_event(self, event: McpEvent) -> None: ...

    `on_mcp_event` must return quickly: the connection waits for it. Exceptions are logged and ignored.
    """

    def on_mcp_event(self, event: McpEvent) -> None:
        """Handle `event`: an `McpProgress`, `McpLog` or `McpToolChanged`."""


# --- the session


@dataclass(frozen=True, slots=True)
class RefusedRequest:
    """The reply of an HTTP server that refused a request."""

    status: int
    www_authenticate: str | None


def _connection_error(server: str, text: str, refusal: RefusedRequest | None) -> McpConnectionError:
    if refusal is None:
        return McpConnectionError(server, text)
    return McpConnectionError(server, text, None, refusal.status, refusal.www_authenticate)


@dataclass(frozen=True, slots=True)
class SessionCallbacks:
    """Functions that a session calls for notifications."""

    on_event: Callable[[McpEvent], None]
    on_tools_changed: Callable[[], None]


class McpSession:
    """One session with a server. It ends when the server closes it, when `end` is called, or when connecting fails.

    `is_unknown_to_server`: an HTTP server rejected the session id, for example after a restart; it ran nothing.
    `end_reason`: why this side ended the session, if the server caused it.
    `refusal`: the last reply of an HTTP server that refused a request.
    `output_schemas`: output schemas of the listed tools, by name.
    """

    def __init__(
        self, name: str, settings: McpSettings, callbacks: SessionCallbacks, previous: McpSession | None
    ) -> None:
        self._name, self._settings, self._callbacks = name, settings, callbacks
        self.is_unknown_to_server = False
        self.end_reason = ""
        self.refusal: RefusedRequest | None = None
        self.output_schemas: dict[str, Any] = {}
        self._version: str | None = None
        self._leave = asyncio.Event()
        self._opened: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        # An empty context: later notifications must not appear to belong to the call that opened the session.
        self._task = asyncio.create_task(self._run(previous), name=f"mcp {name}", context=Context())

    @property
    def has_ended(self) -> bool:
        """Return True if the session accepts no more requests."""
        return self._leave.is_set() or self._task.done()

    @property
    def takes_input(self) -> bool:
        """Return True if the server can return a question instead of the result of a call."""
        return (self._version or "") >= FIRST_WITH_INPUT

    @property
    def is_closed(self) -> bool:
        """Return True if the session is closed, and the process of a stdio server has ended."""
        return self._task.done()

    async def client(self) -> Client:
        """Return the SDK's client once the server is ready. Raises `McpConnectionError` if connecting fails."""
        return await asyncio.shield(self._opened)

    def end(self) -> None:
        """Start closing the session, which also ends a stdio server. `wait_ended` waits until it is closed."""
        if not self._leave.is_set():
            self._leave.set()
            if not self._opened.done():
                self._task.cancel()  # only once: a second cancellation would interrupt ending the server's process

    async def wait_ended(self) -> None:
        """Wait until the session is closed."""
        await asyncio.wait([self._task])

    async def _run(self, previous: McpSession | None) -> None:
        """Open the client, wait for the end, close it: all in one task, because anyio's task groups require it."""
        reason, refusal = "the container is stopped", None
        try:
            if previous is not None:
                await previous.wait_ended()  # two processes of one server could conflict
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(self._settings.connect_timeout):
                    client: Client = await stack.enter_async_context(await self._new_client(stack))
                self._version = client.protocol_version
                stack.push_async_callback(_cancel, asyncio.create_task(self._follow_changes(client)))
                self._opened.set_result(client)
                await self._leave.wait()
        except TimeoutError:
            reason = self.end_reason or f"no answer within {self._settings.connect_timeout:g} s"
        except Exception as error:  # an ExceptionGroup of any error of the server or its transport
            reason = self.end_reason or brief(without_secrets(_innermost_text(error), secrets_of(self._settings)))
            refusal = self.refusal
            if refusal is not None:
                reason = f"it answered with status {refusal.status} ({reason})"
            if self._opened.done():
                logger.info("the connection to MCP server %r ended: %s", self._name, reason)
            reason = f"cannot be reached: {reason}"
        finally:
            self._leave.set()
            if not self._opened.done():
                self._opened.set_exception(_connection_error(self._name, reason, refusal))
                self._opened.exception()  # mark it as retrieved, because possibly no call waits for it

    async def _new_client(self, stack: AsyncExitStack) -> Any:
        try:
            from mcp import Client
        except ImportError:
            raise ImportError(
                "toolbox.mcp needs the package mcp; install it with: pip install 'toolbox-di[mcp]'"
            ) from None

        transport = await self._transport(stack)
        return Client(
            self._watched(transport),
            read_timeout_seconds=self._settings.timeout,
            logging_callback=self._on_log,
            message_handler=self._on_message,
            elicitation_callback=_cancel_question,
            cache=None,
        )

    async def _transport(self, stack: AsyncExitStack) -> Any:
        from .transports import http_transport, stdio_transport

        if self._settings.url is None:
            return stdio_transport(self._settings, self._on_oversized_message)
        return await http_transport(self._settings, stack, self._on_response)

    @asynccontextmanager
    async def _watched(self, transport: Any) -> AsyncIterator[tuple[Any, Any]]:
        """Yield the transport's streams; the session ends when the server can send nothing more."""
        async with transport as (reading, writing):
            yield _WatchedStream(reading, self._on_result, self._leave.set), writing

    # --- messages of the server

    def _on_result(self, result: dict[str, Any]) -> None:
        self.output_schemas.update(remove_unusable_tools(self._name, self._version, result))

    def _on_oversized_message(self, reason: str) -> None:
        self.end_reason = reason
        logger.warning("closing the connection to MCP server %r: %s", self._name, reason)
        self.end()

    async def _on_response(self, response: httpx2.Response) -> None:
        if response.status_code in (400, 404) and "mcp-session-id" in response.request.headers:
            self.is_unknown_to_server = True
        if response.request.method == "POST" and response.status_code >= 400:
            self.refusal = RefusedRequest(response.status_code, response.headers.get("www-authenticate"))

    async def _on_log(self, params: Any) -> None:
        self._callbacks.on_event(McpLog(self._name, str(params.level), params.logger, params.data))

    async def _on_message(self, message: Any) -> None:
        inner = getattr(message, "root", message)
        if getattr(inner, "method", "") == "notifications/tools/list_changed":
            self._callbacks.on_tools_changed()

    async def _follow_changes(self, client: Client) -> None:
        """Subscribe to changes of the tool list; servers of older protocol versions send notifications instead."""
        try:
            async with client.listen(tools_list_changed=True) as changes:
                self._callbacks.on_tools_changed()  # changes before the subscription are not reported
                async for _ in changes:
                    self._callbacks.on_tools_changed()
        except Exception as error:  # older servers refuse; losing the subscription only loses news of changes
            logger.debug("no subscription to MCP server %r: %s", self._name, error)


class _WatchedStream:
    """Wraps the stream of messages from a server: calls `on_result` with each result, `on_end` at the end."""

    def __init__(self, stream: Any, on_result: Callable[[dict[str, Any]], None], on_end: Callable[[], None]) -> None:
        self._stream, self._on_result, self._on_end = stream, on_result, on_end

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __aiter__(self) -> _WatchedStream:
        return self

    async def __anext__(self) -> Any:
        try:
            message = await self._stream.__anext__()
        except BaseException:
            self._on_end()
            raise
        result = getattr(getattr(message, "message", None), "result", None)
        if isinstance(result, dict):
            self._on_result(result)
        return message

    async def __aenter__(self) -> _WatchedStream:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> Any:
        return await self._stream.__aexit__(*error)


async def _cancel_question(context: Any, params: Any) -> Any:
    """Cancel the question of a server with an older protocol, which waits for the answer while the call runs."""
    from mcp_types import ElicitResult

    return ElicitResult(action="cancel")


def secrets_of(settings: McpSettings) -> list[str]:
    """Return the values to hide in errors and logs: headers, environment, the URL's password and query values."""
    values = [each.get_secret_value() for each in (*settings.headers.values(), *settings.env.values())]
    words = [word for each in values for word in each.split()]  # the key of `Bearer key`
    parts = urlsplit(settings.url or "")
    queries = [value for _, value in parse_qsl(parts.query)]
    return [*values, *words, *queries, unquote(parts.password or "")]


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


def _innermost_text(error: BaseException) -> str:
    """Return the text of the innermost error of nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, FileNotFoundError):
        return f"command {error.filename!r} not found; install it, or use its full path"
    return str(error) or type(error).__name__
