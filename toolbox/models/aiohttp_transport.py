"""An HTTP transport on aiohttp, which is faster than httpx2's own. It keeps no cookies, so that models can share it.

The packages of the providers bring such a transport too, whose session has a jar of cookies that cannot be turned off.
Imported with the first model that uses it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from ssl import SSLContext
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import httpx2

MOST_CONNECTIONS = 1000
KEEP_ALIVE = 5.0
"""Seconds for which an unused connection is kept."""

# The first that fits. The texts of errors tell the causes apart (`server_errors`); the packages retry all of these.
_ERRORS: tuple[tuple[type[Exception], type[httpx2.RequestError]], ...] = (
    (aiohttp.SocketTimeoutError, httpx2.ReadTimeout),
    (aiohttp.ServerTimeoutError, httpx2.ConnectTimeout),
    (aiohttp.ClientProxyConnectionError, httpx2.ProxyError),
    (aiohttp.ClientHttpProxyError, httpx2.ProxyError),
    (aiohttp.ClientConnectorError, httpx2.ConnectError),
    (aiohttp.InvalidURL, httpx2.UnsupportedProtocol),
    (aiohttp.ClientPayloadError, httpx2.ReadError),
    (aiohttp.ClientConnectionError, httpx2.ReadError),
)


class AiohttpTransport(httpx2.AsyncBaseTransport):
    """Sends the requests of an httpx2 client with aiohttp, all to the server of `address`.

    `tls` is for addresses that begin with https. The proxy is that of the environment.
    """

    def __init__(self, address: str, tls: SSLContext) -> None:
        # aiohttp would look for the proxy, and for a user in ~/.netrc, in a thread before each request.
        self._proxy = _find_proxy(address)
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request; return the reply when its headers have arrived. Raises `httpx2.RequestError`."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=MOST_CONNECTIONS, keepalive_timeout=KEEP_ALIVE, ssl=self._tls)
            jar = aiohttp.DummyCookieJar()
            self._session = aiohttp.ClientSession(connector=connector, cookie_jar=jar, proxy=self._proxy)
        limits: Mapping[str, Any] = request.extensions.get("timeout", {})
        timeout = aiohttp.ClientTimeout(
            connect=limits.get("pool"), sock_connect=limits.get("connect"), sock_read=limits.get("read")
        )
        try:
            content: Any = request.content or None
        except httpx2.RequestNotRead:  # a large body, which is sent in parts
            content = request.stream
        with _translate_errors():
            response = await self._session.request(
                request.method,
                str(request.url),
                headers=request.headers.multi_items(),
                data=content,
                allow_redirects=False,
                auto_decompress=False,
                compress=False,
                timeout=timeout,
                server_hostname=request.extensions.get("sni_hostname"),
            )
        extensions = {"http_version": b"HTTP/1.1", "reason_phrase": (response.reason or "").encode()}
        headers = list(response.raw_headers)
        return httpx2.Response(response.status, headers=headers, stream=_ArrivingReply(response), extensions=extensions)

    async def aclose(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()


class _ArrivingReply(httpx2.AsyncByteStream):
    """The body of a reply as it arrives. A body that was read to its end leaves its connection for other requests."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _translate_errors():
            async for piece in self._response.content.iter_any():
                yield piece

    async def aclose(self) -> None:
        self._response.release()
        with _translate_errors():
            await self._response.wait_for_close()


def _find_proxy(address: str) -> str | None:
    """Return the URL of the proxy that the environment names for the server of an address."""
    parts = urlsplit(address)
    if proxy_bypass(parts.hostname or ""):
        return None
    proxy = getproxies().get(parts.scheme)
    return f"http://{proxy}" if proxy and "://" not in proxy else proxy


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Turn errors of aiohttp into those of httpx2, which the packages of the providers know."""
    try:
        yield
    except Exception as error:
        for kind, ours in _ERRORS:
            if isinstance(error, kind):
                raise ours(str(error)) from error
        raise
