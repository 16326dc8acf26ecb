"""The connection to one MCP server: sends requests, opens a session for the first one and a new one after a failure.

Not here: one session (`client_session`), which tools are used (`tool_choice`), the servers of a container (`servers`)
and their tools in services (`server_tools`).
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from pydantic import SecretStr

from ..chat import Message
from ..errors import McpConnectionError, McpError, McpInputRequiredError, McpTimeoutError
from ..oauth.token_sources import SubjectTokens
from ..parameters import current_progress
from ..rest.authorization import refuse_other_authorization
from ..safe_text import brief, hide_secrets, without_secrets
from ..settings import McpSettings
from .blocks import messages_of
from .client_session import McpSession, RefusedRequest, SessionCallbacks, connection_error, secrets_of
from .error_codes import CONNECTION_CLOSED, INTERNAL_ERROR, METHOD_NOT_FOUND, REQUEST_TIMEOUT
from .notifications import McpEvent, McpProgress
from .questions import is_web_address, read_question
from .screening import MAX_MESSAGE_CHARS, too_large, visible
from .tool_choice import ToolChoice

if TYPE_CHECKING:
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

    from .bearer_auth import ServerTokens

logger = logging.getLogger("toolbox.mcp")

P = TypeVar("P", bound="PaginatedResult")
T = TypeVar("T")

LONGEST_MESSAGE = 1000
"""Characters of the text of a server's progress that streams and listeners of tools receive."""

MAX_PAGES = 100
"""Pages that are read of one list."""
MAX_ITEMS = 10_000
"""Number of tools, resources or prompts after which no further page is read."""
FIRST_WAIT, LAST_WAIT = 0.05, 0.25
"""Seconds between two calls of a tool whose server only returns a state."""
MAX_GROUPS = 64
"""Sessions of one server with different headers; the one that was not used for the longest time is closed first."""

_USER_INFO = re.compile(r"//[^/?#]*@")
# Transport errors: the connection closed, or an HTTP error status without a JSON-RPC error.
_TRANSPORT_ERRORS = ((CONNECTION_CLOSED, ""), (INTERNAL_ERROR, "server returned an error response"))


# --- the connection to one server


class _SessionLostError(Exception):
    """The server does not know the session, so it has not run the request."""


Headers: TypeAlias = tuple[tuple[str, str], ...]


@dataclass(eq=False, slots=True)
class _HeaderGroup:
    """The session and the tools for the calls with the same headers, and the OAuth tokens of the same user.

    `refused` names the tools that have changed since they were listed first; None before the first list. `running`
    counts the requests.
    """

    settings: McpSettings
    tokens: SubjectTokens | None = None
    session: McpSession | None = None
    tools: tuple[Tool, ...] | None = None
    tools_version: int = 0
    refused: frozenset[str] | None = None
    running: int = 0

    def tools_changed(self) -> None:
        """Forget the list of tools."""
        self.tools = None
        self.tools_version += 1

    @property
    def secrets(self) -> list[str]:
        """Return the values to hide in errors and logs."""
        return secrets_of(self.settings) if self.session is None else self.session.secrets


class McpConnection:
    """The connection to one server. Any task of the event loop that used it first may call its methods.

    `headers` returns the headers of the current call, `tokens` those of OAuth. Calls with different headers or for
    different users never share a session or a list of tools, because the server may offer other tools to another user.
    """

    def __init__(
        self,
        name: str,
        settings: McpSettings,
        on_event: Callable[[McpEvent], None] | None = None,
        headers: Callable[[], Awaitable[Mapping[str, str]]] | None = None,
        tokens: ServerTokens | None = None,
    ) -> None:
        self.name, self.settings, self._on_event, self._headers = name, settings, on_event, headers
        self._tokens = tokens
        self._groups: OrderedDict[tuple[Headers, SubjectTokens | None], _HeaderGroup] = OrderedDict()
        self._evicted: set[McpSession] = set()
        self._choice = ToolChoice(name, settings, self._notify_listener)
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
        return await self._tools_of(await self._choose_group())

    async def _tools_of(self, group: _HeaderGroup) -> tuple[Tool, ...]:
        self._choose_session(group)  # a new session discards the tools of the previous one
        if group.tools is not None:
            return group.tools
        version = group.tools_version
        found = await self._send_request("list its tools", self._list_tools, group)
        schemas = group.session.output_schemas if group.session is not None else {}
        offered, changed = self._choice.choose(found, schemas)
        # A tool that is not listed any more stays refused: the server may still run it.
        group.refused = changed | (group.refused or frozenset()).difference(each.name for each in found)
        if version == group.tools_version:  # they did not change in the meantime
            group.tools = offered
        return offered

    def offered_name(self, name: str) -> str:
        """Return the name that models see for a tool of the server."""
        return self._choice.offered_name(name)

    async def takes_input(self) -> bool:
        """Return True if the server can return questions instead of results. Raises `McpError`."""
        group = await self._choose_group()
        with self._counted(group):
            session = self._choose_session(group)
            await session.wait_for_client()
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
        group = await self._choose_group()
        if self.settings.pin_tools:
            if group.refused is None:
                await self._tools_of(group)
            if tool in (group.refused or ()):
                raise McpError(self.name, f"refused tool {tool}: it has changed since it was first listed")
        hide = partial(without_secrets, secrets=group.secrets)
        report = current_progress.get()

        async def on_progress(progress: float, total: float | None, message: str | None) -> None:
            self._notify_listener(McpProgress(self.name, tool, progress, total, message))
            if report is not None and math.isfinite(progress) and math.isfinite(total or 0):
                report(progress, total, message if message is None else message[:LONGEST_MESSAGE])

        async def call_tool(client: Client) -> CallToolResult:
            return await _call_until_done(self.name, client, tool, arguments, answers, state, on_progress, hide)

        return await self._send_request(f"run {tool}", call_tool, group)

    async def resources(self) -> list[Resource]:
        """Return the resources of the server. Raises `McpError`."""
        return await self._send_request("list its resources", self._list_resources)

    async def resource_templates(self) -> list[ResourceTemplate]:
        """Return the templates of URIs of the server's resources. Raises `McpError`."""
        return await self._send_request("list its resource templates", self._list_templates)

    async def read_resource(self, uri: str) -> ReadResourceResult:
        """Return the contents of a resource. Raises `McpError`."""
        return await self._send_request(f"read {uri}", lambda client: client.read_resource(uri))

    async def prompts(self) -> list[Prompt]:
        """Return the prompts of the server. Raises `McpError`."""
        return await self._send_request("list its prompts", self._list_prompts)

    async def prompt(self, name: str, arguments: dict[str, str] | None = None) -> GetPromptResult:
        """Return the messages of a prompt with its arguments filled in. Raises `McpError`."""
        return await self._send_request(f"return prompt {name}", lambda client: client.get_prompt(name, arguments))

    async def prompt_messages(self, name: str, arguments: dict[str, str] | None = None) -> tuple[Message, ...]:
        """Return the messages of a prompt as messages of a conversation. Raises `McpError`.

        history = await servers.server("kitchen").prompt_messages("order", {"dish": "soup"})
        """
        return messages_of(await self.prompt(name, arguments))

    async def _list_tools(self, client: Client) -> list[Tool]:
        return await self._read_pages("tools", lambda cursor: client.list_tools(cursor=cursor), lambda page: page.tools)

    async def _list_resources(self, client: Client) -> list[Resource]:
        return await self._read_pages(
            "resources", lambda cursor: client.list_resources(cursor=cursor), lambda page: page.resources
        )

    async def _list_templates(self, client: Client) -> list[ResourceTemplate]:
        return await self._read_pages(
            "resource templates",
            lambda cursor: client.list_resource_templates(cursor=cursor),
            lambda page: page.resource_templates,
        )

    async def _list_prompts(self, client: Client) -> list[Prompt]:
        return await self._read_pages(
            "prompts", lambda cursor: client.list_prompts(cursor=cursor), lambda page: page.prompts
        )

    async def _read_pages(
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
        """Request the first page of the tools; open the connection if it is not open. Raises `McpError`, `OAuthError`.

        A server whose headers or tokens depend on the caller is not asked.
        """
        if self.depends_on_caller:
            return
        try:
            await self._send_request("list its tools", lambda client: client.list_tools(cache_mode="bypass"))
        except McpError as error:
            if error.code != METHOD_NOT_FOUND:  # a server without tools
                raise

    # --- the connection

    @property
    def depends_on_caller(self) -> bool:
        """Return True if the requests of different callers differ, so that nothing can be asked without one."""
        return self._headers is not None or (self._tokens is not None and self._tokens.has_users)

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
            session.end(reason)
        for session in sessions:
            await session.wait_ended()

    async def _choose_group(self) -> _HeaderGroup:
        """Return the state for the headers and the user of the current call."""
        headers: Headers = ()
        if self._headers is not None:
            headers = tuple(sorted((await self._headers()).items()))
        tokens = None
        if self._tokens is not None:
            refuse_other_authorization([*self.settings.headers, *(name for name, _ in headers)], self._tokens.where)
            tokens = await self._tokens.find_tokens()
        group = self._groups.get((headers, tokens))
        if group is None:
            self._make_room()
            settings = self.settings
            if headers:
                names = {name.lower() for name, _ in headers}
                kept = {name: value for name, value in settings.headers.items() if name.lower() not in names}
                given = {name: SecretStr(value) for name, value in headers}
                settings = settings.model_copy(update={"headers": {**kept, **given}})
            group = self._groups[headers, tokens] = _HeaderGroup(settings, tokens)
        self._groups.move_to_end((headers, tokens))
        return group

    def _make_room(self) -> None:
        """Close the sessions that were not used for the longest time, if there are too many."""
        self._evicted = {each for each in self._evicted if not each.is_closed}
        for key, group in list(self._groups.items()):
            if len(self._groups) < MAX_GROUPS:
                return
            if not group.running:
                del self._groups[key]
                if group.session is not None:
                    group.session.end("closed, because calls with other headers need connections")
                    self._evicted.add(group.session)

    def _choose_session(self, group: _HeaderGroup) -> McpSession:
        """Return the open session; start a new one if it has ended."""
        if self._closed:
            raise McpConnectionError(self.name, self._closed)
        if group.session is None or group.session.has_ended:
            group.tools_changed()
            callbacks = SessionCallbacks(self._notify_listener, group.tools_changed)
            auth = None
            if self._tokens is not None and group.tokens is not None:
                auth = self._tokens.auth_for(group.tokens)
            group.session = McpSession(self.name, group.settings, callbacks, group.session, auth)
        return group.session

    def _notify_listener(self, event: McpEvent) -> None:
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception:  # a failing listener must not break the connection
                logger.exception("an McpListener failed on %r", event)

    async def _send_request(
        self, action: str, request: Callable[[Client], Awaitable[T]], group: _HeaderGroup | None = None
    ) -> T:
        """Return the server's answer; a request that a lost session did not run is sent once more in a new session.

        `action` completes "could not …" in errors. Errors become `McpError` and show no secret of the settings.
        """
        if group is None:
            group = await self._choose_group()
        try:
            with self._counted(group):
                try:
                    return await self._send_in_session(self._choose_session(group), action, request)
                except _SessionLostError:
                    try:
                        return await self._send_in_session(self._choose_session(group), action, request)
                    except _SessionLostError as error:
                        raise self._make_error(action, str(error)) from error
        except McpInputRequiredError:
            raise  # its texts were hidden when they were read, and the state goes back to the server as it is
        except McpError as error:
            hide_secrets(error, group.secrets)
            # The name can be equal to a value of `env`, and programs compare it.
            error.server, error.args = self.name, (self.name, *error.args[1:])
            raise

    @contextmanager
    def _counted(self, group: _HeaderGroup) -> Iterator[None]:
        """Count a request, so that its session is not closed for others, and `finish` waits for it."""
        group.running += 1
        self._running += 1
        try:
            yield
        finally:
            group.running -= 1
            self._running -= 1
            if not self._running:
                self._is_idle.set()

    def shown(self, text: str) -> str:
        """Return a server's text for an error message: shortened, without secrets and invisible characters."""
        groups = [each.secrets for each in self._groups.values()] or [secrets_of(self.settings)]
        secrets = {secret for each in groups for secret in each}
        return without_secrets(visible(brief(text, MAX_MESSAGE_CHARS)), list(secrets))

    async def _send_in_session(self, session: McpSession, action: str, request: Callable[[Client], Awaitable[T]]) -> T:
        """Return the server's answer. Raises `OAuthError` if the token server is the reason for another error."""
        earlier = session.token_failure
        try:
            return await self._request_in_session(session, action, request)
        except McpError:
            failure = session.token_failure
            if failure is None or failure is earlier:
                raise
        session.end()
        raise copy.copy(failure)  # calls at the same time have separate errors

    async def _request_in_session(
        self, session: McpSession, action: str, request: Callable[[Client], Awaitable[T]]
    ) -> T:
        import anyio
        from mcp import MCPError
        from pydantic import ValidationError

        client = await session.wait_for_client()
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
            if error.code == REQUEST_TIMEOUT and "timed out" in text:
                raise McpTimeoutError(self.name, late, error.code) from error
            if error.code == CONNECTION_CLOSED and "event exceeded" in text:  # the SDK's limit of one event
                raise McpError(self.name, too_large("the reply", self.settings.max_reply_bytes), error.code) from error
            is_transport_error = any(error.code == code and each in text for code, each in _TRANSPORT_ERRORS)
            if session.is_unknown_to_server and (is_transport_error or "session" in text):
                session.end()
                raise _SessionLostError(message) from error
            if is_transport_error and (session.has_ended or self.settings.url is not None):
                session.end()
                refusal = session.refusal if error.code != CONNECTION_CLOSED else None
                raise self._make_error(action, session.end_reason or message, refusal) from error
            raise McpError(self.name, visible(message), error.code) from error
        except ValidationError as error:
            # Not its text: it repeats the server's data.
            count = error.error_count()
            text = f"MCP server {self.name!r} could not {action}: its reply does not follow the MCP protocol"
            raise McpError(self.name, f"{text} ({count} validation error{'s' if count > 1 else ''})") from None
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, anyio.EndOfStream, ConnectionError) as error:
            session.end()
            raise self._make_error(action, session.end_reason or type(error).__name__) from error

    def _make_error(self, action: str, reason: str, refusal: RefusedRequest | None = None) -> McpConnectionError:
        fact = "the connection broke" if refusal is None else f"it answered with status {refusal.status}"
        text = f"could not {action}: {fact} ({reason}); the next call opens a new connection"
        return connection_error(self.name, text, refusal)


# --- calls


async def _call_until_done(
    server: str,
    client: Client,
    tool: str,
    arguments: dict[str, Any],
    answers: Mapping[str, Mapping[str, Any]] | None,
    state: str | None,
    on_progress: Any,
    hide: Callable[[str], str],
) -> CallToolResult:
    """Call a tool once, or repeatedly while the server only returns a state. Raises `McpInputRequiredError`.

    `hide` removes secrets from the texts of questions.
    """
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
            requests = {key: read_question(server, each, hide) for key, each in result.input_requests.items()}
            refused = [each["url"] for each in requests.values() if "url" in each and not is_web_address(each["url"])]
            if not refused:
                raise McpInputRequiredError(server, requests, state)
            logger.warning(
                "MCP server %r: its questions are declined: %r is not an http or https address without user info",
                server,
                hide(brief(_USER_INFO.sub("//***@", refused[0]), 80)),
            )
            responses = {key: ElicitResult(action="decline") for key in requests}
        await asyncio.sleep(wait)  # the limit of the call ends this
        wait = min(wait * 2, LAST_WAIT)
