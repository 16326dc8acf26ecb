"""Holds the HTTP clients of one config key (one per event loop, one for threads) and creates their requests.

The home of httpx2 with `exchange`; loaded when the first REST client is created. Not here: the content of requests
(`building`), redirects and retries (`exchange`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ssl
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Hashable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any
from urllib.parse import urljoin

import httpx2

from ..errors import ContainerNotStartedError, RestClientError
from ..execution.threads import keep_inherited, renewed_after_fork
from ..safe_text import brief
from ..tls import tls_context
from .building import Outgoing
from .encoding import is_dot_segment, shown_url
from .endpoint import RestEndpoint
from .replies import EXCERPT

# Headers that a redirect may send to another origin: none of them identifies the caller.
_IMPERSONAL = frozenset({"accept", "accept-encoding", "accept-language", "user-agent", "host"})
_CLOSE_LIMIT = 5.0
_WRITTEN_AT_ONCE = 64 * 1024  # bytes; between two parts of a body, the deadline is checked
# One generator per client keeps it open. They are held here because garbage collection of a client together with its
# sockets would finalize the sockets first, with a ResourceWarning.
_open: dict[httpx2.AsyncClient, AsyncGenerator[None]] = {}
_closing: set[asyncio.Task[None]] = set()


class ShownUrl(httpx2.URL):
    """A URL whose text hides its secrets, because httpx2 and other libraries log URLs."""

    shown = ""

    def __str__(self) -> str:
        return self.shown

    def __repr__(self) -> str:
        return f"URL({self.shown!r})"

    def join(self, url: httpx2.URL | str) -> httpx2.URL:
        """Resolve `url` against the real URL, not against its text."""
        return httpx2.URL(self).join(url)


class RefusedBody(Exception):  # noqa: N818 - internal; drivers replace it
    """A body that is not read: it is too long, or compressed although the request did not allow it."""

    def __init__(self, reason: str, status: int, is_too_long: bool) -> None:
        super().__init__(reason, status, is_too_long)
        self.reason, self.status, self.is_too_long = reason, status, is_too_long


class BoundedResponse(httpx2.Response):
    """A response whose body is limited to `max_bytes`, counted after decoding; None for no limit.

    Only encodings that the request allowed with `Accept-Encoding` are decoded.
    """

    max_bytes: int | None

    @classmethod
    def limit(cls, response: httpx2.Response, max_bytes: int) -> None:
        """Convert a response that has not been read yet."""
        response.__class__ = cls
        assert isinstance(response, cls)
        response.max_bytes = max_bytes

    def read(self) -> bytes:
        """Return the whole body. Raises `RefusedBody`."""
        return self._checked(super().read())

    async def aread(self) -> bytes:
        """Return the whole body. Raises `RefusedBody`."""
        return self._checked(await super().aread())

    def iter_bytes(self, chunk_size: int | None = None) -> Iterator[bytes]:
        """Yield the decoded body. Raises `RefusedBody`."""
        size = 0
        for chunk in super().iter_bytes(chunk_size):
            size += len(chunk)
            self._check_size(size)
            yield chunk

    async def aiter_bytes(self, chunk_size: int | None = None) -> AsyncGenerator[bytes]:
        """Yield the decoded body. Raises `RefusedBody`."""
        size = 0
        async with contextlib.aclosing(super().aiter_bytes(chunk_size)) as chunks:
            async for chunk in chunks:
                size += len(chunk)
                self._check_size(size)
                yield chunk

    def iter_raw(self, chunk_size: int | None = None) -> Iterator[bytes]:
        """Yield the body as it comes. Raises `RefusedBody`."""
        for chunk in super().iter_raw(chunk_size):
            self._check_encoding()
            self._check_size(self.num_bytes_downloaded)
            yield chunk

    async def aiter_raw(self, chunk_size: int | None = None) -> AsyncGenerator[bytes]:
        """Yield the body as it comes. Raises `RefusedBody`."""
        async with contextlib.aclosing(super().aiter_raw(chunk_size)) as chunks:
            async for chunk in chunks:
                self._check_encoding()
                self._check_size(self.num_bytes_downloaded)
                yield chunk

    def _checked(self, body: bytes) -> bytes:
        # Transports without a network, such as MockTransport, return bodies that are already read.
        if body:
            self._check_encoding()
        self._check_size(len(body))
        return body

    def _check_size(self, size: int) -> None:
        if self.max_bytes is not None and size > self.max_bytes:
            reason = f"the reply is longer than max_reply_bytes ({self.max_bytes} bytes)"
            raise RefusedBody(reason, self.status_code, is_too_long=True)

    def _check_encoding(self) -> None:
        codings = [each.strip().lower() for each in self.headers.get("content-encoding", "").split(",") if each.strip()]
        if not codings or codings == ["identity"]:
            return
        asked = {
            name.strip()
            for name, _, weight in (
                each.lower().partition(";") for each in self.request.headers.get("accept-encoding", "").split(",")
            )
            if weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
        }
        if "*" not in asked and not set(codings) <= asked | {"identity"}:
            reason = (
                f"the reply is compressed ({brief(', '.join(codings), 50)}), which was not requested; "
                "to accept it, send the header Accept-Encoding"
            )
            raise RefusedBody(reason, self.status_code, is_too_long=False)


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


class RestConnection:
    """Holds the HTTP clients of one config key. Each is created on first use and closed with its loop at the latest."""

    def __init__(self, endpoint: RestEndpoint) -> None:
        self.endpoint = endpoint
        self._base = httpx2.URL(endpoint.url)
        self._lock = threading.Lock()
        self._sync: httpx2.Client | None = None
        self._async: dict[asyncio.AbstractEventLoop, httpx2.AsyncClient] = {}
        self._tls: ssl.SSLContext | None = None
        self._is_closed = False
        renewed_after_fork(self)

    def renew_after_fork(self) -> None:
        """Forget the clients: two processes that share a socket would read each other's replies."""
        keep_inherited(self._sync, self._async)
        self._lock, self._sync, self._async = threading.Lock(), None, {}

    def sync_client(self) -> httpx2.Client:
        """Return the client that all threads share. Raises `ContainerNotStartedError` after `aclose`."""
        self._refuse_closed()
        with self._lock:
            if self._sync is None:
                self._sync = httpx2.Client(**self._options(), event_hooks={"response": [self._limit]})
                weakref.finalize(self, self._sync.close)
            return self._sync

    async def async_client(self) -> httpx2.AsyncClient:
        """Return the client of the running loop. Raises `ContainerNotStartedError` after the connection is closed."""
        self._refuse_closed()
        loop = asyncio.get_running_loop()
        client = self._async.get(loop)
        if client is None:
            client = httpx2.AsyncClient(**self._options(), event_hooks={"response": [self._limit_async]})
            with self._lock:
                for other in [other for other in self._async if other.is_closed()]:
                    del self._async[other]
                self._async[loop] = client
            keeper = _open[client] = _keep_open(client)
            weakref.finalize(self, _close_soon, client, loop)
            # After its first step the loop knows the generator, and closes it when the loop ends.
            await anext(keeper)
        return client

    async def aclose(self) -> None:
        """Close all clients, also those of other running loops."""
        self._is_closed = True
        with self._lock:
            clients, self._async = self._async, {}
            shared, self._sync = self._sync, None
        if shared is not None:
            shared.close()
        for loop, client in clients.items():
            if loop is asyncio.get_running_loop():
                await _close(client)
            elif loop.is_running():
                closing = asyncio.run_coroutine_threadsafe(_close(client), loop)
                await asyncio.wait([asyncio.wrap_future(closing)], timeout=_CLOSE_LIMIT)

    def _limit(self, response: httpx2.Response) -> None:
        BoundedResponse.limit(response, self.endpoint.settings.max_reply_bytes)

    async def _limit_async(self, response: httpx2.Response) -> None:
        self._limit(response)

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise ContainerNotStartedError(f"the REST client of {self.endpoint.key!r}")

    def _options(self) -> dict[str, Any]:
        settings = self.endpoint.settings
        if self._tls is None:
            self._tls = tls_context(settings.verify, settings.client_certificate, settings.trust_environment)
        return {
            "verify": self._tls,
            "transport": self.endpoint.transport,
            "proxy": settings.proxy.get_secret_value() if settings.proxy else None,
            "trust_env": settings.trust_environment,
            # Cookies of one caller must not be sent with requests of another.
            "cookies": CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            "limits": httpx2.Limits(
                max_connections=settings.max_connections,
                max_keepalive_connections=settings.max_keepalive_connections,
            ),
        }

    def request(self, outgoing: Outgoing, timeout: float, where: str) -> httpx2.Request:
        """Return the request for httpx2.

        Raises `RestClientError` for a URL that is too long or not below the base URL of the endpoint.
        """
        shown = brief(outgoing.shown_url, EXCERPT)
        try:
            request = self._request(outgoing, timeout)
        except httpx2.InvalidURL as error:
            raise RestClientError(f"{where}: invalid URL: {error}", shown) from error
        if not self._is_below_base(request.url):
            raise RestClientError(f"{where}: the request is not sent: its URL is not below {self.endpoint.url}", shown)
        outgoing.sent.append(request)
        return request

    def _is_below_base(self, url: httpx2.URL) -> bool:
        """Return True if the URL has the origin of the endpoint and a path below its base path.

        This keeps credentials from being sent anywhere else, whatever the arguments were.
        """
        base = self._base
        if (url.raw_scheme, url.raw_host, url.port, url.userinfo) != (base.raw_scheme, base.raw_host, base.port, b""):
            return False
        start, path = base.raw_path.rstrip(b"/"), url.raw_path.partition(b"?")[0]
        if path != start and not path.startswith(start + b"/"):
            return False
        return not any(map(is_dot_segment, path[len(start) :].decode("ascii").split("/")))

    def _request(self, outgoing: Outgoing, timeout: float) -> httpx2.Request:
        connect = min(timeout, self.endpoint.settings.connect_timeout)
        request = httpx2.Request(
            outgoing.verb,
            outgoing.url,
            headers=[(name.encode(), value) for name, value in outgoing.headers.values()],
            content=outgoing.content,
            data=_grouped(outgoing.fields) if outgoing.files else None,
            files=[(name, (each.filename, each.content, each.media_type)) for name, each in outgoing.files] or None,
            extensions={"timeout": httpx2.Timeout(timeout, connect=connect).as_dict()},
        )
        if "user-agent" not in request.headers:
            request.headers["User-Agent"] = "toolbox-di"
        if "accept-encoding" not in request.headers:
            request.headers["Accept-Encoding"] = "identity"
        _set_shown_url(request, outgoing.shown_url)
        return request


async def _keep_open(client: httpx2.AsyncClient) -> AsyncGenerator[None]:
    """Keep a client open while its loop runs: a loop closes its asynchronous generators when it ends."""
    try:
        yield
    finally:
        _open.pop(client, None)
        await client.aclose()


async def _close(client: httpx2.AsyncClient) -> None:
    keeper = _open.get(client)
    if keeper is not None:
        await keeper.aclose()


def _close_soon(client: httpx2.AsyncClient, loop: asyncio.AbstractEventLoop) -> None:
    """Close the client of a garbage-collected connection on its loop."""

    def begin() -> None:
        task = loop.create_task(_close(client))
        _closing.add(task)
        task.add_done_callback(_closing.discard)

    if client in _open:
        with suppress(RuntimeError):  # the loop is closed already, and the client with it
            loop.call_soon_threadsafe(begin)


def _grouped(fields: list[tuple[str, str]]) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for name, text in fields:
        grouped.setdefault(name, []).append(text)
    return grouped


def _set_shown_url(request: httpx2.Request, shown: str) -> None:
    url = ShownUrl(request.url)
    url.shown = shown
    request.url = url


def is_same_origin(url: httpx2.URL, other: httpx2.URL) -> bool:
    """Return True if credentials for `url` may be sent to `other`: same origin, or http upgraded to https."""
    if (url.scheme, url.host, url.port) == (other.scheme, other.host, other.port):
        return True
    upgraded = url.scheme == "http" and other.scheme == "https" and url.port is None and other.port is None
    return upgraded and url.host == other.host


def redirected(request: httpx2.Request, response: httpx2.Response, hide: Callable[[str], str]) -> httpx2.Request | None:
    """Return the request that a redirect asks for, None when it must not be followed.

    Another origin gets no personal headers and no body. `hide` removes secrets from the text of the new URL.
    """
    following = response.next_request
    try:
        shown = shown_url(urljoin(str(request.url), response.headers["location"]))
    except ValueError:  # an invalid URL is not followed
        return None
    if following is None or following.url.scheme not in ("http", "https") or not following.url.host:
        return None
    if not is_same_origin(request.url, following.url):
        if following.method not in ("GET", "HEAD"):
            return None
        for name in [name for name in following.headers if name.lower() not in _IMPERSONAL]:
            del following.headers[name]
    elif "cookie" in request.headers:
        following.headers["Cookie"] = request.headers["Cookie"]
    _set_shown_url(following, hide(shown))
    return following
