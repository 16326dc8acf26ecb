"""Limits and decodes the bodies of replies, for all HTTP clients: those of models, REST clients and MCP servers.

A client replaces the body of each response with a `BoundedBody` in a response hook. So the limit also holds for proxies
and for transports of the program. Not here: the errors that users see (`models.transport`, `rest.exchange` and
`mcp.transports` make them).
"""

from __future__ import annotations

import email.utils
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime
from typing import Literal, TypeAlias

import httpx2

Refusal: TypeAlias = Literal["too long", "not requested", "unsupported", "broken"]

_PIECE = 2**16
"""Bytes of output per step, so that a small compressed body cannot fill the memory before the limit applies."""


class RefusedBody(Exception):  # noqa: N818 - internal; each client replaces it
    """A body that is not read further. `detail`: the limit, the compression, or the fault in it."""

    def __init__(self, refusal: Refusal, status: int, detail: str = "") -> None:
        super().__init__(refusal, status, detail)
        self.refusal, self.status, self.detail = refusal, status, detail


class BoundedBody(httpx2.AsyncByteStream, httpx2.SyncByteStream):
    """The decoded body of a response. Reading more than `max_bytes` raises `RefusedBody` after that many bytes.

    gzip and deflate are decoded if the request allowed them. The response then no longer names its compression.
    """

    def __init__(self, response: httpx2.Response, max_bytes: int | None) -> None:
        self.max_bytes = max_bytes
        self._status = response.status_code
        self._stream = response.stream
        self._count = 0
        self._decode: Callable[[bytes], Iterator[bytes]] | None = None
        given = (each.strip().lower() for each in response.headers.get("content-encoding", "").split(","))
        self._codings = [each for each in given if each not in ("", "identity")]
        self._accepted = response.request.headers.get("accept-encoding", "")
        if self._codings and not response.is_stream_consumed:
            for name in ("content-encoding", "content-length"):
                response.headers.pop(name, None)

    def __iter__(self) -> Iterator[bytes]:
        assert isinstance(self._stream, httpx2.SyncByteStream)
        for chunk in self._stream:
            yield from self._decode_chunk(chunk)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        assert isinstance(self._stream, httpx2.AsyncByteStream)
        async for chunk in self._stream:
            for piece in self._decode_chunk(chunk):
                yield piece

    def close(self) -> None:
        assert isinstance(self._stream, httpx2.SyncByteStream)
        self._stream.close()

    async def aclose(self) -> None:
        assert isinstance(self._stream, httpx2.AsyncByteStream)
        await self._stream.aclose()

    def check_read(self, response: httpx2.Response) -> None:
        """Raise `RefusedBody` if the response came with a body that is read already and too long.

        Transports without a network, such as `MockTransport`, return such responses.
        """
        if self.max_bytes is not None and response.is_stream_consumed and len(response.content) > self.max_bytes:
            raise RefusedBody("too long", self._status, str(self.max_bytes))

    def _decode_chunk(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the decoded pieces of a chunk. Raises `RefusedBody`."""
        if self._decode is None:
            self._decode = self._choose_decoder()
        try:
            for piece in self._decode(chunk):
                self._count += len(piece)
                if self.max_bytes is not None and self._count > self.max_bytes:
                    yield piece[: self.max_bytes - self._count]
                    raise RefusedBody("too long", self._status, str(self.max_bytes))
                yield piece
        except zlib.error as error:
            raise RefusedBody("broken", self._status, str(error)) from error

    def _choose_decoder(self) -> Callable[[bytes], Iterator[bytes]]:
        """Return the function that decodes a chunk into pieces. Raises `RefusedBody` for other compression."""
        if not self._codings:
            return lambda chunk: iter((chunk,))
        names = ", ".join(self._codings)
        if not is_accepted(names, self._accepted):
            raise RefusedBody("not requested", self._status, names)
        name = names.removeprefix("x-")
        if name not in ("gzip", "deflate"):
            raise RefusedBody("unsupported", self._status, names)
        return make_decoder(name)


def is_accepted(coding: str, accepted: str) -> bool:
    """Return True if a request with this `Accept-Encoding` allows the compression."""
    parts = (each.lower().partition(";") for each in accepted.split(","))
    names = {
        name.strip()
        for name, _, weight in parts
        if weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    }
    return not names.isdisjoint({coding, coding.removeprefix("x-"), "*"})


def make_decoder(coding: str) -> Callable[[bytes], Iterator[bytes]]:
    """Return a function that decodes a chunk of gzip or deflate data in small pieces. It raises `zlib.error`."""
    decoder = zlib.decompressobj(zlib.MAX_WBITS | 16) if coding == "gzip" else None

    def decode(chunk: bytes) -> Iterator[bytes]:
        nonlocal decoder
        if decoder is None:
            # "deflate" means the zlib format, but some servers send raw deflate data.
            is_zlib = chunk[:1] and chunk[0] & 0x0F == 8 and (len(chunk) < 2 or (chunk[0] * 256 + chunk[1]) % 31 == 0)
            decoder = zlib.decompressobj(zlib.MAX_WBITS if is_zlib else -zlib.MAX_WBITS)
        while chunk:
            yield decoder.decompress(chunk, _PIECE)
            chunk = decoder.unconsumed_tail
            if decoder.eof and coding == "gzip" and decoder.unused_data.strip(b"\0"):
                chunk = decoder.unused_data  # another gzip member follows
                decoder = zlib.decompressobj(zlib.MAX_WBITS | 16)

    return decode


def read_retry_after(text: str) -> float | None:
    """Return the seconds of a `Retry-After` header, given as such or as a date; None for an invalid header."""
    text = text.strip()
    if len(text) > 100:
        return None
    try:
        if text.isdecimal():
            return float(text)
        moment = email.utils.parsedate_to_datetime(text)
        moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
        return max(0.0, (moment - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError, ArithmeticError, LookupError):  # the parser raises all of them for odd dates
        return None
