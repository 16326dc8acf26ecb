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

from ..settings import McpSettings
from .errors import McpConnectionError
from .events import McpEvent, McpLog

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
    """

    def __init__(self, name: str, settings: McpSettings, hearing: Hearing, before: Life | None) -> None:
        self._name, self._settings, self._hearing = name, settings, hearing
        self.is_forgotten = False
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
                stack.push_async_callback(_end, asyncio.create_task(self._follow_changes(client)))
                self._opened.set_result(client)
                await self._leave.wait()
        except TimeoutError:
            reason = f"no answer within {self._settings.connect_timeout:g} s"
        except Exception as error:  # an ExceptionGroup of whatever the server or its transport did
            reason = _reason(error)
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
            _watched(transport, self._leave.set),
            read_timeout_seconds=self._settings.timeout,
            logging_callback=self._on_log,
            log_level="debug" if self._hearing.logs else None,
            message_handler=self._on_message,
        )

    async def _transport(self, stack: AsyncExitStack) -> Any:
        settings = self._settings
        if settings.url is None:
            from mcp.client.stdio import StdioServerParameters, stdio_client

            environment = {name: value.get_secret_value() for name, value in settings.env.items()}
            return stdio_client(
                StdioServerParameters(
                    command=settings.command or "", args=list(settings.args), env=environment or None, cwd=settings.cwd
                )
            )
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        headers = {name: value.get_secret_value() for name, value in settings.headers.items()}
        # A stream of events may be silent for long: the limit of a call is the client's to watch.
        timeout = httpx2.Timeout(settings.connect_timeout, read=None)
        hooks = {"response": [self._on_response]}
        client = httpx2.AsyncClient(headers=headers, timeout=timeout, event_hooks=hooks)
        http = await stack.enter_async_context(client)
        return streamable_http_client(settings.url, http_client=http)

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


@asynccontextmanager
async def _watched(transport: Any, ended: Callable[[], None]) -> AsyncIterator[tuple[Any, Any]]:
    """The transport, which calls `ended` when no more can come from the server."""
    async with transport as (reading, writing):
        yield _Watched(reading, ended), writing


class _Watched:
    """A stream of messages, which calls `ended` when it ends."""

    def __init__(self, stream: Any, ended: Callable[[], None]) -> None:
        self._stream, self._ended = stream, ended

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __aiter__(self) -> _Watched:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self._stream.__anext__()
        except BaseException:
            self._ended()
            raise

    async def __aenter__(self) -> _Watched:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> Any:
        return await self._stream.__aexit__(*error)


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
