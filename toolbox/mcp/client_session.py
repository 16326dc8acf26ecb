"""One session with an MCP server: a task that opens the connection, keeps it open and closes it.

Not here: requests, and a new session after a failure (`connection`), processes and HTTP clients (`transports`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import Context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

from ..errors import McpConnectionError, OAuthError
from ..safe_text import brief, without_secrets
from ..settings import McpSettings
from .notifications import McpEvent, McpLog
from .screening import lists_tools, remove_unusable_tools

if TYPE_CHECKING:
    import httpx2
    from mcp import Client

    from .bearer_auth import BearerAuth

logger = logging.getLogger("toolbox.mcp")

FIRST_WITH_INPUT = "2026-07-28"
"""The first protocol version in which a server returns a question instead of asking while the call runs."""


@dataclass(frozen=True, slots=True)
class RefusedRequest:
    """The reply of an HTTP server that refused a request."""

    status: int
    www_authenticate: str | None


def connection_error(server: str, text: str, refusal: RefusedRequest | None) -> McpConnectionError:
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
    `end_reason`: why this side ended the session, if it said so.
    `refusal`: the last reply of an HTTP server that refused a request.
    `output_schemas`: output schemas of the listed tools, by name.
    """

    def __init__(
        self,
        name: str,
        settings: McpSettings,
        callbacks: SessionCallbacks,
        previous: McpSession | None,
        auth: BearerAuth | None = None,
    ) -> None:
        self._name, self._settings, self._callbacks, self._auth = name, settings, callbacks, auth
        self.is_unknown_to_server = False
        self.end_reason = ""
        self.refusal: RefusedRequest | None = None
        self.output_schemas: dict[str, Any] = {}
        self._version: str | None = None
        self._checked_list = b""  # the fingerprint of the last list of tools, and what can be used of it
        self._usable_tools: list[Any] = []
        self._leave = asyncio.Event()
        self._opened: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        # An empty context: later notifications must not appear to belong to the call that opened the session.
        self._task = asyncio.create_task(self._run_client(previous), name=f"mcp {name}", context=Context())

    @property
    def has_ended(self) -> bool:
        """Return True if the session accepts no more requests."""
        return self._leave.is_set() or self._task.done()

    @property
    def takes_input(self) -> bool:
        """Return True if the server can return a question instead of the result of a call."""
        return (self._version or "") >= FIRST_WITH_INPUT

    @property
    def token_failure(self) -> OAuthError | None:
        """Return why the last request without a token had none; None if all had one."""
        return self._auth.failure if self._auth is not None else None

    @property
    def secrets(self) -> list[str]:
        """Return the values to hide in errors and logs."""
        return [*secrets_of(self._settings), *(self._auth.sent if self._auth is not None else ())]

    @property
    def is_closed(self) -> bool:
        """Return True if the session is closed, and the process of a stdio server has ended."""
        return self._task.done()

    async def wait_for_client(self) -> Client:
        """Return the SDK's client once the server is ready. Raises `McpConnectionError` if connecting fails."""
        return await asyncio.shield(self._opened)

    def end(self, reason: str = "") -> None:
        """Start closing the session, which also ends a stdio server. `wait_ended` waits until it is closed.

        Calls that still wait for the connection read the first `reason`.
        """
        self.end_reason = self.end_reason or reason
        if not self._leave.is_set():
            self._leave.set()
            if not self._opened.done():
                self._task.cancel()  # only once: a second cancellation would interrupt ending the server's process

    async def wait_ended(self) -> None:
        """Wait until the session is closed."""
        await asyncio.wait([self._task])

    async def _run_client(self, previous: McpSession | None) -> None:
        """Open the client, wait for the end, close it: all in one task, because anyio's task groups require it."""
        reason, refusal = "", None
        try:
            if previous is not None:
                await previous.wait_ended()  # two processes of one server could conflict
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(self._settings.connect_timeout):
                    client: Client = await stack.enter_async_context(await self._open_client(stack))
                self._version = client.protocol_version
                stack.push_async_callback(_cancel_task, asyncio.create_task(self._follow_changes(client)))
                self._opened.set_result(client)
                await self._leave.wait()
        except TimeoutError:
            reason = self.end_reason or f"no answer within {self._settings.connect_timeout:g} s"
        except Exception as error:  # an ExceptionGroup of any error of the server or its transport
            reason = self.end_reason or brief(without_secrets(_innermost_text(error), self.secrets))
            refusal = self.refusal
            if refusal is not None:
                reason = f"it answered with status {refusal.status} ({reason})"
            if self._opened.done():
                logger.info("the connection to MCP server %r ended: %s", self._name, reason)
            reason = f"cannot be reached: {reason}"
        finally:
            self._leave.set()
            if not self._opened.done():
                # Without a reason here, `end` has cancelled this task.
                text = reason or self.end_reason or "the connection was closed"
                self._opened.set_exception(self.token_failure or connection_error(self._name, text, refusal))
                self._opened.exception()  # mark it as retrieved, because possibly no call waits for it

    async def _open_client(self, stack: AsyncExitStack) -> Any:
        try:
            from mcp import Client
        except ImportError:
            raise ImportError(
                "toolbox.mcp needs the package mcp; install it with: pip install 'toolbox-di[mcp]'"
            ) from None

        transport = await self._open_transport(stack)
        return Client(
            self._watch_streams(transport),
            read_timeout_seconds=self._settings.timeout,
            logging_callback=self._on_log,
            message_handler=self._on_message,
            elicitation_callback=_cancel_question,
            cache=None,
        )

    async def _open_transport(self, stack: AsyncExitStack) -> Any:
        from .transports import http_transport, stdio_transport

        if self._settings.url is None:
            return stdio_transport(self._settings, self._on_oversized_message)
        return await http_transport(self._settings, stack, self._on_response, self._auth)

    @asynccontextmanager
    async def _watch_streams(self, transport: Any) -> AsyncIterator[tuple[Any, Any]]:
        """Yield the transport's streams; the session ends when the server can send nothing more."""
        async with transport as (reading, writing):
            yield _WatchedStream(reading, self._on_result, self._leave.set), writing

    # --- messages of the server

    def _on_result(self, result: dict[str, Any]) -> None:
        if not lists_tools(result):
            return
        # Each readiness check lists the same tools again, and checking 100 tools takes about 60 ms.
        fingerprint = hashlib.sha256(json.dumps(result).encode()).digest()
        if fingerprint == self._checked_list:
            result["tools"] = self._usable_tools
            return
        self.output_schemas.update(remove_unusable_tools(self._name, self._version, result))
        self._checked_list, self._usable_tools = fingerprint, result["tools"]

    def _on_oversized_message(self, reason: str) -> None:
        logger.warning("closing the connection to MCP server %r: %s", self._name, reason)
        self.end(reason)

    async def _on_response(self, response: httpx2.Response) -> None:
        # Only the last refused message counts, because a call that failed must not be sent again. Many servers answer
        # 404 to the request that would open an event stream, and some refuse invalid arguments with 400.
        if response.request.method == "POST" and response.status_code >= 400:
            has_session = "mcp-session-id" in response.request.headers
            self.is_unknown_to_server = has_session and response.status_code in (400, 404)
            self.refusal = RefusedRequest(response.status_code, response.headers.get("www-authenticate"))

    async def _on_log(self, params: Any) -> None:
        self._callbacks.on_event(McpLog(self._name, str(params.level), params.logger, params.data))

    async def _on_message(self, message: Any) -> None:
        inner = getattr(message, "root", message)
        if getattr(inner, "method", "") == "notifications/tools/list_changed":
            self._callbacks.on_tools_changed()

    async def _follow_changes(self, client: Client) -> None:
        """Subscribe to changes of the tool list, and again after the stream of a subscription has ended.

        Servers of older protocol versions refuse, and send notifications instead.
        """
        from .event_streams import StreamPauses

        pauses, has_subscribed = StreamPauses(), False
        while True:
            try:
                async with client.listen(tools_list_changed=True) as changes:
                    has_subscribed = True
                    self._callbacks.on_tools_changed()  # changes before the subscription are not reported
                    async for _ in changes:
                        self._callbacks.on_tools_changed()
            except Exception as error:  # without a subscription, only the news of changes are lost
                logger.debug("no subscription to MCP server %r: %s", self._name, error)
            if not has_subscribed:
                return
            pauses.note_end()
            await pauses.before_opening()


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


async def _cancel_task(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


def _innermost_text(error: BaseException) -> str:
    """Return the text of the innermost error of nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, FileNotFoundError):
        return f"command {error.filename!r} not found; install it, or use its full path"
    return str(error) or type(error).__name__
