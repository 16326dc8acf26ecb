"""How soon an event stream of an MCP server is opened again after it has ended.

Not here: reading a stream (the SDK), deciding that it is opened again (the SDK, `client_session`).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import httpx2

if TYPE_CHECKING:
    from asyncio import Task

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds from the end of a stream until it is opened again: each pause is twice as long as the one before."""


class StreamPauses:
    """The pauses of one stream. After the stream has been open for `LONGEST_PAUSE`, they begin with the first again."""

    def __init__(self, limit: float = math.inf) -> None:
        """Start with the first opening. `limit`: seconds after which the stream is not opened again."""
        self._pause = FIRST_PAUSE
        self._opened = time.monotonic()
        self._last = self._opened + limit
        self._ended: float | None = None

    async def before_opening(self) -> None:
        """Wait for the end of the pause. Raises `httpx2.ReadTimeout` after the limit."""
        if self._ended is not None:
            await asyncio.sleep(max(0.0, self._ended + self._pause - time.monotonic()))
            self._pause = min(self._pause * 2, LONGEST_PAUSE)
        self._opened, self._ended = time.monotonic(), None
        if self._opened >= self._last:
            raise httpx2.ReadTimeout("the time for the call is used up")

    def note_end(self) -> None:
        """Start a pause: the stream has ended."""
        self._ended = time.monotonic()
        if self._ended - self._opened >= LONGEST_PAUSE:
            self._pause = FIRST_PAUSE


class HttpStreamPauses:
    """The pauses of all event streams of one HTTP client, for its hooks.

    The SDK opens a stream again as soon as the server says, also at once and without end. It reads each stream in a
    separate task, and so it does with the stream of the reply to a call, which goes on after the call has timed out:
    such a stream is not opened again after `limit` seconds.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._streams: WeakKeyDictionary[Task[Any], StreamPauses] = WeakKeyDictionary()

    async def before_request(self, request: httpx2.Request) -> None:
        """Wait if the request opens a stream again."""
        if request.method == "GET" and (stream := self._streams.get(_current_task())) is not None:
            await stream.before_opening()

    def watch(self, response: httpx2.Response) -> Callable[[], None] | None:
        """Return the function to call when the body has ended, if it is an event stream or its refusal."""
        asks_for_stream = response.request.method == "GET"
        is_stream = response.headers.get("content-type", "").lower().startswith("text/event-stream")
        if response.has_redirect_location or not (asks_for_stream or is_stream):
            return None
        task = _current_task()
        if task not in self._streams:
            self._streams[task] = StreamPauses(math.inf if asks_for_stream else self._limit)
        return self._streams[task].note_end


def _current_task() -> Task[Any]:
    task = asyncio.current_task()
    assert task is not None  # the hooks are coroutines of the client
    return task
