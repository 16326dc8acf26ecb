"""The ways to an MCP server, with bounds on what it sends: the process of a stdio server, an HTTP client.

Not here: how long a connection lasts (`lives`), which tools of a listing can be used (`screening`).
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

from ..models.log_filter import hide_queries
from ..settings import McpSettings
from .screening import too_large

if TYPE_CHECKING:
    from anyio.abc import Process

logger = logging.getLogger("toolbox.mcp")

_LINE = re.compile(rb"[^\n]*\n|[^\n]+")
_WRITE_GRACE = 0.5
"""Seconds in which messages that were accepted may still reach the server."""
_EXIT_GRACE = 2.0
"""Seconds in which a server may end by itself once its standard input is closed, and again once it is terminated."""


# --- over HTTP


async def http_transport(settings: McpSettings, stack: AsyncExitStack, on_response: Callable[[Any], Any]) -> Any:
    """Return the transport of a streamable HTTP server; its client lives as long as `stack`."""
    from mcp.client.streamable_http import streamable_http_client

    limit, url = settings.max_reply_bytes, settings.url or ""
    if "?" in url:  # httpx2 logs the address of each request
        hide_queries(url.partition("?")[0])

    async def bound(response: httpx2.Response) -> None:
        response.stream = _BoundedBody(response, limit)

    headers = {name: value.get_secret_value() for name, value in settings.headers.items()}
    # A stream of events may be silent for long: the limit of a call is the client's to watch.
    timeout = httpx2.Timeout(settings.connect_timeout, read=None)
    hooks = {"response": [on_response, bound]}
    client = await stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=timeout, event_hooks=hooks))
    return streamable_http_client(url, http_client=client, max_sse_event_size=limit)


class _BoundedBody(httpx2.AsyncByteStream):
    """A reply's body, decoded, with an error once it is larger than `limit`.

    A stream of events may be open for days: each of its events is bounded instead, by the SDK.
    """

    def __init__(self, response: httpx2.Response, limit: int) -> None:
        self._encoded = httpx2.Response(
            response.status_code, headers=response.headers, stream=response.stream, request=response.request
        )
        is_stream = response.headers.get("content-type", "").lower().startswith("text/event-stream")
        self._limit = None if is_stream else limit
        for name in ("content-encoding", "content-length"):
            response.headers.pop(name, None)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        count = 0
        async for piece in self._encoded.aiter_bytes():
            count += len(piece)
            if self._limit is not None and count > self._limit:
                raise httpx2.StreamError(too_large("the reply", self._limit))  # the SDK answers the call with it
            yield piece

    async def aclose(self) -> None:
        await self._encoded.aclose()


# --- over stdio


@asynccontextmanager
async def stdio_transport(settings: McpSettings, on_fault: Callable[[str], None]) -> AsyncIterator[tuple[Any, Any]]:
    """Start a server's process and exchange lines with it; yields the streams of messages from and to it.

    `on_fault` is called with the reason when the server sends a line that is longer than `max_reply_bytes`: the
    connection cannot be used then. The SDK's client bounds no line, and takes quadratic time for one.
    """
    process = await _started(settings)
    arrived, reading = anyio.create_memory_object_stream[Any](0)
    writing, sent = anyio.create_memory_object_stream[Any](0)
    written = anyio.Event()

    async def write() -> None:
        assert process.stdin is not None
        try:
            async for each in sent:
                line = each.message.model_dump_json(by_alias=True, exclude_unset=True) + "\n"
                await process.stdin.send(line.encode())
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, OSError):
            arrived.close()  # nobody answers any more
        finally:
            written.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_read, process, arrived, settings.max_reply_bytes, on_fault)
        tasks.start_soon(write)
        try:
            yield reading, writing
        finally:
            with anyio.CancelScope(shield=True):  # a process must not outlive its connection; every wait is bounded
                reading.close()
                writing.close()
                with anyio.move_on_after(_WRITE_GRACE):
                    await written.wait()
                await _stop(process)
                for each in (arrived, sent):
                    each.close()
            tasks.cancel_scope.cancel()


async def _started(settings: McpSettings) -> Process:
    from mcp.client.stdio import get_default_environment

    environment = {name: value.get_secret_value() for name, value in settings.env.items()}
    command = settings.command or ""
    if sys.platform == "win32":  # pragma: no cover - scripts such as npx.cmd are found by their whole name only
        command = shutil.which(command) or command
    return await anyio.open_process(
        [command, *settings.args],
        env={**get_default_environment(), **environment},
        stderr=sys.stderr,
        cwd=settings.cwd,
        start_new_session=True,
    )


async def _read(process: Process, arrived: Any, limit: int, on_fault: Callable[[str], None]) -> None:
    """Pass on the messages of a server; what it writes after the connection has ended is discarded."""
    assert process.stdout is not None
    deliver = _Deliver(arrived)
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
                if size > limit + 1:  # with its line break
                    is_open = False
                    on_fault(too_large("a message", limit))
                elif part.endswith(b"\n"):
                    is_open = await deliver(b"".join(pieces))
                    pieces, size = [], 0
                if not is_open:
                    pieces = []
                    arrived.close()
                    break
    arrived.close()


class _Deliver:
    """Passes on one line as a message."""

    def __init__(self, arrived: Any) -> None:
        self._arrived, self._complained = arrived, False

    async def __call__(self, line: bytes) -> bool:
        """Return False once nobody reads the messages."""
        from mcp.shared.message import SessionMessage

        if not line.strip():
            return True
        try:
            message = _message_in(line)
        except (ValueError, RecursionError):
            if not self._complained:  # the line itself may hold what the server was given, and is not logged
                self._complained = True
                logger.warning("an MCP server wrote a line to standard output that is not an MCP message; ignored")
            return True
        try:
            await self._arrived.send(SessionMessage(message))
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            return False
        return True


def _message_in(line: bytes) -> Any:
    """Return the message that a line holds. Raises `ValueError` or `RecursionError`."""
    from mcp_types import jsonrpc_message_adapter

    try:
        return jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValueError:
        # pydantic reads fewer levels, and no half of a surrogate pair: neither must lose the rest of the message.
        text = json.dumps(json.loads(line), ensure_ascii=False).encode("utf-8", "replace")
        return jsonrpc_message_adapter.validate_python(json.loads(text), by_name=False)


async def _stop(process: Process) -> None:
    """End a server: close its input, wait, then terminate it and the processes that it started."""
    assert process.stdin is not None
    with suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
        await process.stdin.aclose()
    if not await _has_ended(process):
        if sys.platform == "win32":  # pragma: no cover
            process.terminate()
        else:
            from mcp.os.posix.utilities import terminate_posix_process_tree

            await terminate_posix_process_tree(process, _EXIT_GRACE)
        if not await _has_ended(process):
            logger.warning("the process %d of an MCP server did not end when it was killed", process.pid)
    with anyio.move_on_after(_EXIT_GRACE), suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
        await process.aclose()


async def _has_ended(process: Process) -> bool:
    """Return whether the process ends in time. `Process.wait` would also wait for children that hold its pipes."""
    with anyio.move_on_after(_EXIT_GRACE):
        while process.returncode is None:  # noqa: ASYNC110 - nothing tells of the end alone
            await anyio.sleep(0.01)
    return process.returncode is not None


# --- the messages of both


class WatchedStream:
    """A stream of messages from a server; `screen` may change each result, `ended` is called when no more can come."""

    def __init__(self, stream: Any, screen: Callable[[dict[str, Any]], None], ended: Callable[[], None]) -> None:
        self._stream, self._screen, self._ended = stream, screen, ended

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __aiter__(self) -> WatchedStream:
        return self

    async def __anext__(self) -> Any:
        try:
            message = await self._stream.__anext__()
        except BaseException:
            self._ended()
            raise
        result = getattr(getattr(message, "message", None), "result", None)
        if isinstance(result, dict):
            self._screen(result)
        return message

    async def __aenter__(self) -> WatchedStream:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> Any:
        return await self._stream.__aexit__(*error)
