"""One life of the connection to an MCP server: opened, held and left by one task, as anyio's task groups demand.

A server that dies ends it. Not here: what is asked of a server, and when a next life begins (`connection`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import Context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

from ..settings import McpSettings
from ..validation_text import brief, without_secrets
from .errors import McpConnectionError
from .events import McpEvent, McpLog
from .screening import screen_tools

if TYPE_CHECKING:
    import httpx2
    from mcp import Client

logger = logging.getLogger("toolbox.mcp")


@dataclass(frozen=True, slots=True)
class Hearing:
    """Who is told what a server says by itself; without `logs` it is not asked for log messages."""

    tell: Callable[[McpEvent], None]
    tools_changed: Callable[[], None]
    logs: bool


class Life:
    """One life. It is over when the server has gone, when `end` was called, or when it could not begin.

    `is_forgotten`: a server over HTTP has refused a request of this session unread, as one that was restarted does.
    `fault`: why the connection was ended, if the server is to blame. `output_schemas`: of the tools it has listed.
    """

    def __init__(self, name: str, settings: McpSettings, hearing: Hearing, before: Life | None) -> None:
        self._name, self._settings, self._hearing = name, settings, hearing
        self.is_forgotten = False
        self.fault = ""
        self.output_schemas: dict[str, Any] = {}
        self._version: str | None = None
        self._leave = asyncio.Event()
        self._opened: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        # Of no call: what a server tells later must not be seen as told within the call that happened to be the first.
        self._task = asyncio.create_task(self._live(before), name=f"mcp {name}", context=Context())

    @property
    def is_over(self) -> bool:
        """Whether nothing can be asked any more."""
        return self._leave.is_set() or self._task.done()

    async def client(self) -> Client:
        """The client, when the server is ready. Raises `McpConnectionError` when it cannot be reached."""
        return await asyncio.shield(self._opened)

    def end(self) -> None:
        """Lets go of the server, which ends over stdio; `ended` says when it has."""
        if not self._leave.is_set():
            self._leave.set()
            if not self._opened.done():
                self._task.cancel()  # once only: a second time would cut the end of the server's process short

    async def ended(self) -> None:
        """Waits for the end."""
        await asyncio.wait([self._task])

    async def _live(self, before: Life | None) -> None:
        reason = "the container is stopped"
        try:
            if before is not None:
                await before.ended()  # two servers at once might be in each other's way
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(self._settings.connect_timeout):
                    client: Client = await stack.enter_async_context(await self._new_client(stack))
                self._version = client.protocol_version
                stack.push_async_callback(_end, asyncio.create_task(self._follow_changes(client)))
                self._opened.set_result(client)
                await self._leave.wait()
        except TimeoutError:
            reason = self.fault or f"no answer within {self._settings.connect_timeout:g} s"
        except Exception as error:  # an ExceptionGroup of whatever the server or its transport did
            reason = self.fault or brief(without_secrets(_reason(error), secrets_of(self._settings)))
            if self._opened.done():
                logger.info("the connection to MCP server %r ended: %s", self._name, reason)
            reason = f"cannot be reached: {reason}"
        finally:
            self._leave.set()
            if not self._opened.done():
                self._opened.set_exception(McpConnectionError(self._name, reason))
                self._opened.exception()  # nobody may be waiting any more

    async def _new_client(self, stack: AsyncExitStack) -> Any:
        try:
            from mcp import Client
        except ImportError:
            raise ImportError("the library mcp is missing: pip install 'toolbox-di[mcp]'") from None

        transport = await self._transport(stack)
        return Client(
            self._watched(transport),
            read_timeout_seconds=self._settings.timeout,
            logging_callback=self._on_log,
            log_level="debug" if self._hearing.logs else None,
            message_handler=self._on_message,
            cache=None,
        )

    async def _transport(self, stack: AsyncExitStack) -> Any:
        from .transports import http_transport, stdio_transport

        if self._settings.url is None:
            return stdio_transport(self._settings, self._on_fault)
        return await http_transport(self._settings, stack, self._on_response)

    @asynccontextmanager
    async def _watched(self, transport: Any) -> AsyncIterator[tuple[Any, Any]]:
        """The transport, which ends this life when no more can come from the server."""
        from .transports import WatchedStream

        async with transport as (reading, writing):
            yield WatchedStream(reading, self._on_result, self._leave.set), writing

    def _on_result(self, result: dict[str, Any]) -> None:
        self.output_schemas.update(screen_tools(self._name, self._version, result))

    def _on_fault(self, reason: str) -> None:
        self.fault = reason
        logger.warning("the connection to MCP server %r is ended: %s", self._name, reason)
        self.end()

    # --- what the server tells

    async def _on_response(self, response: httpx2.Response) -> None:
        if response.status_code in (400, 404) and "mcp-session-id" in response.request.headers:
            self.is_forgotten = True

    async def _on_log(self, params: Any) -> None:
        self._hearing.tell(McpLog(self._name, str(params.level), params.logger, params.data))

    async def _on_message(self, message: Any) -> None:
        inner = getattr(message, "root", message)
        if getattr(inner, "method", "") == "notifications/tools/list_changed":
            self._hearing.tools_changed()

    async def _follow_changes(self, client: Client) -> None:
        """Of a server that speaks the newer protocol: changes come over a subscription."""
        try:
            async with client.listen(tools_list_changed=True) as changes:
                self._hearing.tools_changed()  # what changed before is not told again
                async for _ in changes:
                    self._hearing.tools_changed()
        except Exception as error:  # an older server has none; a lost one costs only news of changes
            logger.debug("no subscription to MCP server %r: %s", self._name, error)


def secrets_of(settings: McpSettings) -> list[str]:
    """Return what no error or log message may show: headers, the environment, the password and query of the URL."""
    values = [each.get_secret_value() for each in (*settings.headers.values(), *settings.env.values())]
    words = [word for each in values for word in each.split()]  # the key of `Bearer key`
    parts = urlsplit(settings.url or "")
    queries = [value for _, value in parse_qsl(parts.query)]
    return [*values, *words, *queries, unquote(parts.password or "")]


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
