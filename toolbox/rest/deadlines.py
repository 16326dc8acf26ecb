"""Ends the network work of a synchronous REST call at its deadline.

Asynchronous calls use `asyncio.timeout`. Not here: the time-outs of single steps (`connections`).
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from typing import Any

import httpx2

_WRITTEN_AT_ONCE = 64 * 1024  # bytes; between two parts of a body, the deadline is checked
_network_deadline: ContextVar[float | None] = ContextVar("toolbox.rest.network_deadline", default=None)


@contextlib.contextmanager
def deadline_for_network(deadline: float, request: httpx2.Request | None = None) -> Iterator[None]:
    """End all synchronous network work inside at `deadline`, a moment of `time.monotonic()`.

    Raises `httpx2.TimeoutException`. httpx2's own time-outs are for each read and write, so a server that sends one
    byte at a time, or one interim reply after the other, would never exceed them.
    """
    if request is not None:
        request.extensions["trace"] = functools.partial(_limit_network_stream, request.extensions.get("trace"))
    token = _network_deadline.set(deadline)
    try:
        yield
    finally:
        _network_deadline.reset(token)


# A class swap, as nothing public limits a whole request (pydantic/httpx2#557): a read time-out is for each read, so
# a server that sends its headers byte by byte never exceeds it, and `HTTPTransport` takes no network backend. An own
# transport could give one to `httpcore2.ConnectionPool`, but then httpx2's choice of proxies and its translation of
# errors would exist twice.
def _limit_network_stream(other_trace: Callable[[str, Any], Any] | None, event: str, info: dict[str, Any]) -> None:
    """Replace the class of each network stream that is opened: a trace function of the HTTP library."""
    if other_trace is not None:
        other_trace(event, info)
    if event.endswith(".started") and "timeout" in info:  # connecting, which may begin after a wait for the pool
        info["timeout"] = _remaining(info["timeout"], httpx2.ConnectTimeout)
    stream = info.get("return_value")
    if event.endswith(".complete") and hasattr(stream, "start_tls"):
        kind: Any = type(stream)
        stream.__class__ = _limited_class(kind)


@functools.cache
def _limited_class(kind: Hashable) -> type[Any]:
    """Return a class of network streams whose reads and writes end at the deadline."""

    class LimitedStream(kind):  # type: ignore[misc,valid-type]  # the class of a stream that the HTTP library opened
        def read(self, max_bytes: int, timeout: float | None = None) -> Any:
            return super().read(max_bytes, _remaining(timeout, httpx2.ReadTimeout))

        def write(self, buffer: bytes, timeout: float | None = None) -> None:
            view = memoryview(buffer)
            for start in range(0, len(view), _WRITTEN_AT_ONCE):
                part = view[start : start + _WRITTEN_AT_ONCE]
                super().write(part, _remaining(timeout, httpx2.WriteTimeout))

    return LimitedStream


def _remaining(timeout: float | None, error: type[httpx2.TimeoutException]) -> float | None:
    """Return the seconds that the next step may take. Raises `error` when no time is left."""
    deadline = _network_deadline.get()
    if deadline is None:
        return timeout
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise error("the time for the whole request is used up")
    return remaining if timeout is None else min(timeout, remaining)


class BodyUntil(httpx2.SyncByteStream):
    """A body that must be complete at a moment of `time.monotonic()`, also if it does not come from a network."""

    def __init__(self, stream: httpx2.SyncByteStream, deadline: float) -> None:
        self._stream, self._deadline = stream, deadline

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._stream:
            if time.monotonic() > self._deadline:
                raise httpx2.ReadTimeout("the body took too long")
            yield chunk

    def close(self) -> None:
        self._stream.close()
