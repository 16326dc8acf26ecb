"""Transports to MCP servers, with limits for the data they send: the process of a stdio server, an HTTP client.

Not here: opening and closing a session (`client_session`), checking the listed tools (`screening`).
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import anyio
import httpx2

from ..http_replies import BoundedBody, RefusedBody
from ..library_logs import hidden_queries, hide_secrets_in_logs
from ..settings import McpSettings
from ..tls import tls_context
from .event_streams import HttpStreamPauses
from .screening import too_large

if TYPE_CHECKING:
    from anyio.abc import Process

logger = logging.getLogger("toolbox.mcp")

_LINE = re.compile(rb"[^\n]*\n|[^\n]+")
_WRITE_GRACE = 0.5
"""Seconds that accepted messages have to reach the server before it is stopped."""
_EXIT_GRACE = 2.0
"""Seconds that a server has to exit after its standard input is closed, and again after it is terminated."""


# --- over HTTP


async def http_transport(
    settings: McpSettings,
    stack: AsyncExitStack,
    on_response: Callable[[Any], Any],
    auth: httpx2.Auth | None = None,
) -> Any:
    """Return the transport of a streamable HTTP server; its client lives as long as `stack`."""
    from mcp.client.streamable_http import streamable_http_client

    limit, url = settings.max_reply_bytes, settings.url or ""
    hide_secrets_in_logs()

    pauses = HttpStreamPauses(settings.timeout)

    async def limit_reply(response: httpx2.Response) -> None:
        response.stream = _McpBody(response, limit, pauses.watch(response))

    headers = {"accept-encoding": "gzip, deflate"}
    headers |= {name.lower(): value.get_secret_value() for name, value in settings.headers.items()}
    # No read timeout: an event stream can be silent for a long time. The client limits the time of each call.
    timeout = httpx2.Timeout(settings.connect_timeout, read=None)
    hooks: dict[str, list[Callable[..., Any]]] = {
        "request": [pauses.before_request],
        "response": [on_response, limit_reply],
    }
    client = _QuietClient(headers=headers, timeout=timeout, event_hooks=hooks, auth=auth, verify=tls_context())
    await stack.enter_async_context(client)
    return streamable_http_client(url, http_client=client, max_sse_event_size=limit)


class _QuietClient(httpx2.AsyncClient):
    """An HTTP client that logs no query."""

    async def send(self, request: httpx2.Request, **others: Any) -> httpx2.Response:
        with hidden_queries():
            return await super().send(request, **others)


class _McpBody(BoundedBody):
    """The decoded body of a reply; raises `StreamError` when it exceeds `limit` bytes or cannot be decoded.

    Event streams have no total limit, because they can stay open for days: the SDK limits each event. Closing the
    body calls `on_end`.
    """

    def __init__(self, response: httpx2.Response, limit: int, on_end: Callable[[], None] | None) -> None:
        is_stream = response.headers.get("content-type", "").lower().startswith("text/event-stream")
        super().__init__(response, None if is_stream else limit)
        self._limit, self._on_end = limit, on_end

    async def aclose(self) -> None:
        if self._on_end is not None:
            self._on_end()
        await super().aclose()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for piece in super().__aiter__():
                yield piece
        except RefusedBody as refused:  # the SDK fails the call with this error
            if refused.refusal == "too long":
                raise httpx2.StreamError(too_large("the reply", self._limit)) from refused
            raise httpx2.DecodingError(f"{refused.refusal} compression: {refused.detail[:100]}") from refused


# --- over stdio


@asynccontextmanager
async def stdio_transport(settings: McpSettings, on_oversized: Callable[[str], None]) -> AsyncIterator[tuple[Any, Any]]:
    """Start a server's process and exchange lines with it; yield the streams of messages from and to it.

    When the server sends a line longer than `max_reply_bytes`, `on_oversized` is called with the reason, and the
    connection is unusable. (The SDK's client has no limit, and its time is quadratic in the length of a line.)
    """
    process = await _start_server(settings)
    arrived, reading = anyio.create_memory_object_stream[Any](0)
    writing, sent = anyio.create_memory_object_stream[Any](0)
    written = anyio.Event()

    async def write_messages() -> None:
        assert process.stdin is not None
        try:
            async for each in sent:
                line = each.message.model_dump_json(by_alias=True, exclude_unset=True) + "\n"
                await process.stdin.send(line.encode())
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, OSError):
            arrived.close()  # the server has gone
        finally:
            written.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_read_messages, process, arrived, settings.max_reply_bytes, on_oversized)
        tasks.start_soon(write_messages)
        try:
            yield reading, writing
        finally:
            with anyio.CancelScope(
                shield=True
            ):  # the process must not outlive the connection; every wait below has a limit
                reading.close()
                writing.close()
                with anyio.move_on_after(_WRITE_GRACE):
                    await written.wait()
                await _stop_server(process)
                for each in (arrived, sent):
                    each.close()
            tasks.cancel_scope.cancel()


async def _start_server(settings: McpSettings) -> Process:
    from mcp.client.stdio import get_default_environment

    environment = {name: value.get_secret_value() for name, value in settings.env.items()}
    command = settings.command or ""
    if sys.platform == "win32":  # pragma: no cover - Windows finds scripts such as npx.cmd only by their full name
        command = shutil.which(command) or command
    return await anyio.open_process(
        [command, *settings.args],
        env={**get_default_environment(), **environment},
        stderr=sys.stderr,
        cwd=settings.cwd,
        start_new_session=True,
    )


async def _read_messages(process: Process, arrived: Any, limit: int, on_oversized: Callable[[str], None]) -> None:
    """Send the server's messages to `arrived`; discard output after the connection has ended."""
    assert process.stdout is not None
    send_line = _LineParser(arrived)
    pieces: list[bytes] = []
    size = 0
    is_open = True
    with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError, ConnectionError):
        async for chunk in process.stdout:
            if not is_open:
                continue
            for part in _LINE.findall(chunk):
                pieces.append(part)
                size += len(part)
                if size > limit + 1:  # 1 for the line break
                    is_open = False
                    on_oversized(too_large("a message", limit))
                elif part.endswith(b"\n"):
                    is_open = await send_line(b"".join(pieces))
                    pieces, size = [], 0
                if not is_open:
                    pieces = []
                    arrived.close()
                    break
    arrived.close()


class _LineParser:
    """Parses lines of a server's standard output and sends the messages to `arrived`."""

    def __init__(self, arrived: Any) -> None:
        self._arrived, self._has_warned = arrived, False

    async def __call__(self, line: bytes) -> bool:
        """Send the message of a line. Return False when the connection no longer reads messages."""
        from mcp.shared.message import SessionMessage

        if not line.strip():
            return True
        try:
            message = _parse_message(line)
        except (ValueError, RecursionError):
            if not self._has_warned:  # the line is not logged: it can contain secrets of the server
                self._has_warned = True
                logger.warning("ignored a line on an MCP server's standard output that is not an MCP message")
            return True
        try:
            await self._arrived.send(SessionMessage(message))
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            return False
        return True


def _parse_message(line: bytes) -> Any:
    """Parse a line as a JSON-RPC message. Raises `ValueError` or `RecursionError`."""
    from mcp_types import jsonrpc_message_adapter

    try:
        return jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValueError:
        # pydantic rejects deep nesting and lone surrogates; Python's json accepts both, so the message is not lost.
        text = json.dumps(json.loads(line), ensure_ascii=False).encode("utf-8", "replace")
        return jsonrpc_message_adapter.validate_python(json.loads(text), by_name=False)


async def _stop_server(process: Process) -> None:
    """Stop a server: close its standard input, wait, then terminate it and its child processes."""
    assert process.stdin is not None
    with suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
        await process.stdin.aclose()
    if not await _has_exited(process):
        if sys.platform == "win32":  # pragma: no cover
            process.terminate()
        else:
            from mcp.os.posix.utilities import terminate_posix_process_tree

            await terminate_posix_process_tree(process, _EXIT_GRACE)
        if not await _has_exited(process):
            logger.warning("process %d of an MCP server did not exit after it was killed", process.pid)
    with anyio.move_on_after(_EXIT_GRACE), suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
        await process.aclose()


async def _has_exited(process: Process) -> bool:
    """Return True if the process exits in time. `Process.wait` would also wait for child processes with its pipes."""
    with anyio.move_on_after(_EXIT_GRACE):
        while process.returncode is None:  # noqa: ASYNC110 - anyio has no event for the exit alone
            await anyio.sleep(0.01)
    return process.returncode is not None
