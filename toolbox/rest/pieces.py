"""A reply that comes in pieces: bytes in, values out, as soon as each is complete.

Lines of text, JSON lines, server-sent events, or a JSON list. Not here: getting the bytes (`drivers`).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json, to_json

from ..errors import RestClientError, RestDecodeError
from .replies import ReplyPlan, ServerSentEvent, Shape, beginning, charset, decode_json


class PieceDecoder:
    """Takes the bytes of a body as they come and gives the pieces that are complete."""

    def __init__(
        self, plan: ReplyPlan, content_type: str, url: str, status: int, where: str, max_piece: int = 64 * 2**20
    ) -> None:
        self._plan, self._url, self._status, self._where = plan, url, status, where
        self._media_type = content_type.lower().partition(";")[0].strip()
        self._text = codecs.getincrementaldecoder(charset(content_type))("replace")
        self._max_piece = max_piece
        self._held = 0  # characters in what follows
        self._pending: list[str] = []  # of a line that has not ended, or of the document
        self._event: dict[str, str] = {}
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> Iterator[Any]:
        """The pieces that `chunk` completes."""
        if self._plan.shape is Shape.BYTES:
            yield chunk
            return
        text = self._text.decode(chunk)
        if not self._is_one_document and "\n" in text:
            *lines, text = "".join((*self._pending, text)).split("\n")
            self._pending.clear()
            self._held = sum(map(len, self._data))
            for line in lines:
                yield from self._line(line.removesuffix("\r"))
        self._pending.append(text)
        self._hold(len(text))

    def end(self) -> Iterator[Any]:
        """What is left when the body has ended."""
        rest = "".join((*self._pending, self._text.decode(b"", True)))
        if self._is_one_document:
            yield from self._document(rest)
        elif rest:
            yield from self._line(rest.removesuffix("\r"))
        if self._event or self._data:
            yield from self._line("")

    def _hold(self, characters: int) -> None:
        """Count what is kept until a piece is complete. Raises `RestClientError` when it becomes too much."""
        self._held += characters
        if self._held > self._max_piece:
            message = f"{self._where}: a piece of the reply is longer than max_reply_bytes ({self._max_piece} bytes)"
            raise RestClientError(message, self._url, self._status)

    @property
    def _is_one_document(self) -> bool:
        return self._plan.shape is Shape.JSON and self._media_type == "application/json"

    def _document(self, text: str) -> Iterator[Any]:
        if not text.strip():
            return
        try:
            document = from_json(text)
        except ValueError as error:
            message = f"{self._where}: the reply is no JSON ({error})"
            raise RestDecodeError(message, self._url, self._status, beginning(text)) from error
        for item in document if isinstance(document, list) else (document,):
            yield self._value(to_json(item))

    def _line(self, line: str) -> Iterator[Any]:
        if self._media_type == "text/event-stream":
            yield from self._event_line(line)
        elif self._plan.shape is Shape.TEXT:
            yield line
        elif line.strip("\x1e \t"):
            yield self._value(line.strip("\x1e \t"))

    def _event_line(self, line: str) -> Iterator[Any]:
        if not line:
            event, self._event = self._event, {}
            data, self._data = self._data, []
            self._held -= sum(map(len, data))
            if data:
                yield self._of_event(ServerSentEvent("\n".join(data), event.get("event", "message"), event.get("id")))
            return
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
            self._hold(len(value))
        elif name in ("event", "id"):
            self._event[name] = value

    def _of_event(self, event: ServerSentEvent) -> Any:
        if self._plan.shape is Shape.EVENT:
            return event
        return event.data if self._plan.shape is Shape.TEXT else self._value(event.data)

    def _value(self, text: bytes | str) -> Any:
        return decode_json(self._plan, text, self._url, self._status, self._where)
