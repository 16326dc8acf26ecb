"""The HTTP clients of REST clients: each config key has one per event loop and one for threads.

Not here: building a request (`outgoing`), redirects and retries (`exchange`).
"""

from __future__ import annotations

import asyncio
import ssl
import threading
import weakref
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

import httpx2

from ..errors import ContainerNotStartedError, RestArgumentError
from ..execution.threads import keep_inherited, register_for_fork
from ..http_replies import BoundedBody
from ..library_logs import hide_secrets_in_logs
from ..safe_text import brief
from ..tls import tls_context
from .encoding import shown_url
from .endpoint import RestEndpoint
from .origins import is_below, mask_url
from .outgoing import Outgoing
from .replies import EXCERPT

_CLOSE_LIMIT = 5.0  # seconds to wait for another loop to close its client
# One generator per client keeps it open. They are held here because garbage collection of a client together with its
# sockets would finalize the sockets first, with a ResourceWarning.
_open: dict[httpx2.AsyncClient, AsyncGenerator[None]] = {}
_closing: set[asyncio.Task[None]] = set()


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
        register_for_fork(self)
        hide_secrets_in_logs()

    def renew_after_fork(self) -> None:
        """Forget the clients: two processes that share a socket would read each other's replies."""
        keep_inherited(self._sync, self._async)
        self._lock, self._sync, self._async = threading.Lock(), None, {}

    def sync_client(self) -> httpx2.Client:
        """Return the client that all threads share. Raises `ContainerNotStartedError` after `aclose`."""
        self._raise_if_closed()
        with self._lock:
            if self._sync is None:
                self._sync = httpx2.Client(**self._client_options(), event_hooks={"response": [self._limit_body]})
                weakref.finalize(self, self._sync.close)
            return self._sync

    async def async_client(self) -> httpx2.AsyncClient:
        """Return the client of the running loop. Raises `ContainerNotStartedError` after the connection is closed."""
        self._raise_if_closed()
        loop = asyncio.get_running_loop()
        client = self._async.get(loop)
        if client is None:
            client = httpx2.AsyncClient(**self._client_options(), event_hooks={"response": [self._limit_body_async]})
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
                await _close_client(client)
            elif loop.is_running():
                closing = asyncio.run_coroutine_threadsafe(_close_client(client), loop)
                await asyncio.wait([asyncio.wrap_future(closing)], timeout=_CLOSE_LIMIT)

    def _limit_body(self, response: httpx2.Response) -> None:
        response.stream = BoundedBody(response, self.endpoint.settings.max_reply_bytes)

    async def _limit_body_async(self, response: httpx2.Response) -> None:
        self._limit_body(response)

    def _raise_if_closed(self) -> None:
        if self._is_closed:
            raise ContainerNotStartedError(f"the REST client of {self.endpoint.key!r}")

    def _client_options(self) -> dict[str, Any]:
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

    def request_for(self, outgoing: Outgoing, timeout: float, where: str) -> httpx2.Request:
        """Return the request for httpx2.

        Raises `RestArgumentError` for a URL that is too long or not below the base URL of the endpoint.
        """
        shown = brief(outgoing.url.shown, EXCERPT)
        try:
            request = self._build_request(outgoing, timeout)
        except httpx2.InvalidURL as error:
            raise RestArgumentError(f"{where}: invalid URL: {error}", shown) from error
        if not is_below(request.url, self._base):  # credentials are sent nowhere else, whatever the arguments were
            fact = f"the request is not sent: its URL is not below {self.endpoint.url}"
            raise RestArgumentError(f"{where}: {fact}", shown)
        outgoing.sent.append(request)
        return request

    def token_request(self, url: str, headers: Mapping[str, str], content: bytes, timeout: float) -> httpx2.Request:
        """Return the request to a token server: it has nothing of the endpoint but the connection."""
        own = {"User-Agent": "toolbox-di", "Accept-Encoding": "identity", **headers}
        extensions = self._timeouts(timeout)
        request = httpx2.Request("POST", url, headers=own, content=content, extensions=extensions)
        mask_url(request, shown_url(url))
        return request

    def _timeouts(self, timeout: float) -> dict[str, Any]:
        connect = min(timeout, self.endpoint.settings.connect_timeout)
        return {"timeout": httpx2.Timeout(timeout, connect=connect).as_dict()}

    def _build_request(self, outgoing: Outgoing, timeout: float) -> httpx2.Request:
        request = httpx2.Request(
            outgoing.verb,
            outgoing.url.sent,
            headers=[(name.encode(), value) for name, value in outgoing.headers.values()],
            content=outgoing.content,
            data=_group_fields(outgoing.fields) if outgoing.files else None,
            files=[(name, (each.filename, each.content, each.media_type)) for name, each in outgoing.files] or None,
            extensions=self._timeouts(timeout),
        )
        if "user-agent" not in request.headers:
            request.headers["User-Agent"] = "toolbox-di"
        if "accept-encoding" not in request.headers:
            request.headers["Accept-Encoding"] = "identity"
        mask_url(request, outgoing.url.shown)
        return request


async def _keep_open(client: httpx2.AsyncClient) -> AsyncGenerator[None]:
    """Keep a client open while its loop runs: a loop closes its asynchronous generators when it ends."""
    try:
        yield
    finally:
        _open.pop(client, None)
        await client.aclose()


async def _close_client(client: httpx2.AsyncClient) -> None:
    keeper = _open.get(client)
    if keeper is not None:
        await keeper.aclose()


def _close_soon(client: httpx2.AsyncClient, loop: asyncio.AbstractEventLoop) -> None:
    """Close the client of a garbage-collected connection on its loop."""

    def start_closing() -> None:
        task = loop.create_task(_close_client(client))
        _closing.add(task)
        task.add_done_callback(_closing.discard)

    if client in _open:
        with suppress(RuntimeError):  # the loop is closed already, and the client with it
            loop.call_soon_threadsafe(start_closing)


def _group_fields(fields: list[tuple[str, str]]) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for name, text in fields:
        grouped.setdefault(name, []).append(text)
    return grouped
