"""A reply that comes in pieces: bytes in, values out, as soon as each is complete.

Lines of text, JSON lines, server-sent events, or a JSON list. Not here: getting the bytes (`drivers`).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json, to_json

from ..errors import RestDecodeError
from .replies import ReplyPlan, ServerSentEvent, Shape, decode_json, excerpt


class PieceDecoder:
    """Takes the bytes of a body as they come and gives the pieces that are complete."""

    def __init__(self, plan: ReplyPlan, content_type: str, url: str, status: int, where: str) -> None:
        self._plan, self._url, self._status, self._where = plan, url, status, where
        media_type, _, parameters = content_type.lower().partition(";")
        self._media_type = media_type.strip()
        self._text = codecs.getincrementaldecoder(_charset(parameters))("replace")
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
            for line in lines:
                yield from self._line(line.removesuffix("\r"))
        self._pending.append(text)

    def end(self) -> Iterator[Any]:
        """What is left when the body has ended."""
        rest = "".join((*self._pending, self._text.decode(b"", True)))
        if self._is_one_document:
            yield from self._document(rest)
        elif rest:
            yield from self._line(rest.removesuffix("\r"))
        if self._event or self._data:
            yield from self._line("")

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
            raise RestDecodeError(message, self._url, self._status, excerpt(text)) from error
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
            if data:
                yield self._of_event(ServerSentEvent("\n".join(data), event.get("event", "message"), event.get("id")))
            return
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name in ("event", "id"):
            self._event[name] = value

    def _of_event(self, event: ServerSentEvent) -> Any:
        if self._plan.shape is Shape.EVENT:
            return event
        return event.data if self._plan.shape is Shape.TEXT else self._value(event.data)

    def _value(self, text: bytes | str) -> Any:
        return decode_json(self._plan, text, self._url, self._status, self._where)


def _charset(parameters: str) -> str:
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip() == "charset":
            try:
                return codecs.lookup(value.strip(' "')).name
            except LookupError:
                break
    return "utf-8"
