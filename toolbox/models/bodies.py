"""Bodies of HTTP messages: sends a large request in parts, decodes and limits a reply while it arrives.

Not here: sending and receiving (`transport`), reading the reply (`openai`). Imported with the first client.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx2

from ..errors import ModelProtocolError
from .server_errors import too_large

LARGE = 2**20
"""Requests with more bytes are sent in parts: aiohttp warns about larger writes."""
LARGEST_ERROR = 2**20
"""Bytes that are read of the body of an error or a redirect. The rest is ignored."""
_PIECE = 2**16
"""Bytes of output per step when a compressed reply is decoded."""


def prepared(http_client: Any, max_reply_bytes: int | None) -> Any:
    """Return the client, changed to build requests faster and to limit replies.

    An unchanged client parses its address for every request and writes a large body at once.
    """
    build_request, read = http_client.build_request, functools.lru_cache(maxsize=64)(type(http_client.base_url))

    def build(method: str, url: Any, **others: Any) -> Any:
        if len(body := others.get("content") or b"") > LARGE:
            others["content"] = _LargeBody(body)
            others["headers"] = httpx2.Headers(others["headers"])
            others["headers"]["content-length"] = str(len(body))
        return build_request(method, read(url), **others)

    async def bound(response: Any) -> None:
        response.stream = BoundedBody(response, max_reply_bytes)

    http_client.build_request = build
    http_client.event_hooks = {"response": [bound]}
    return http_client


class _LargeBody:
    """Yields a large body in parts; can be sent more than once."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for start in range(0, len(self._body), LARGE):
            yield self._body[start : start + LARGE]


class BoundedBody(httpx2.AsyncByteStream):
    """Decodes a reply's body and yields at most `limit` bytes.

    If the body is too large or has an unexpected compression, it ends early and `fault` holds the error. The error is
    not raised here, because the `openai` package would then retry the request. Of an error's body, only the beginning
    is read.
    """

    def __init__(self, response: Any, limit: int | None) -> None:
        self.fault: ModelProtocolError | None = None
        self._limit = limit
        self._is_error = response.status_code >= 300
        self._stream = response.stream
        self._encoding = response.headers.get("content-encoding", "").strip().lower()
        if self._encoding and self._encoding != "identity":
            self._asked = response.request.headers.get("accept-encoding", "").lower()
            del response.headers["content-encoding"]
        else:
            self._encoding = ""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        limit = self._limit
        if self._is_error:
            limit = LARGEST_ERROR if limit is None else min(limit, LARGEST_ERROR)
        decode = self._decoder()
        if self.fault is not None:
            return
        count = 0
        async for chunk in self._stream:
            try:
                for piece in (chunk,) if decode is None else decode(chunk):
                    count += len(piece)
                    if limit is not None and count > limit:
                        if not self._is_error:
                            self.fault = too_large(limit)
                        else:
                            yield piece[: limit - count]
                        return
                    yield piece
            except zlib.error as error:
                self.fault = ModelProtocolError(f"the reply contains invalid compressed data: {error}")
                return

    def _decoder(self) -> Callable[[bytes], Iterator[bytes]] | None:
        if not self._encoding:
            return None
        name = self._encoding.removeprefix("x-")
        if name not in self._asked:
            self.fault = ModelProtocolError(
                f"the reply is compressed ({name[:40]}), but the request did not accept that"
            )
        elif name not in ("gzip", "deflate"):
            what = f"unsupported compression of the reply: {name[:40]}"
            self.fault = ModelProtocolError(f"{what}; set the header accept-encoding to gzip or deflate, or remove it")
        return _decoded(name)

    async def aclose(self) -> None:
        await self._stream.aclose()


def _decoded(encoding: str) -> Callable[[bytes], Iterator[bytes]]:
    """Return a function that decodes a chunk in small parts, so that memory stays small until the limit applies."""
    decoder = zlib.decompressobj(zlib.MAX_WBITS | 16) if encoding == "gzip" else None

    def decode(chunk: bytes) -> Iterator[bytes]:
        nonlocal decoder
        if decoder is None:
            # "deflate" means the zlib format, but some servers send raw deflate data.
            is_zlib = chunk[:1] and chunk[0] & 0x0F == 8 and (len(chunk) < 2 or (chunk[0] * 256 + chunk[1]) % 31 == 0)
            decoder = zlib.decompressobj(zlib.MAX_WBITS if is_zlib else -zlib.MAX_WBITS)
        while chunk:
            yield decoder.decompress(chunk, _PIECE)
            chunk = decoder.unconsumed_tail
            if decoder.eof and encoding == "gzip" and decoder.unused_data.strip(b"\0"):
                chunk = decoder.unused_data  # another gzip member follows
                decoder = zlib.decompressobj(zlib.MAX_WBITS | 16)

    return decode
