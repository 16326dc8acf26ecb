"""Reads the blocks of an event stream into the JSON values its events carry.

Takes what servers send in its place, too: a JSON document, lines of JSON, events without blank lines between them.
Not here: what the values mean (`chat_wire`, `responses_wire`).
"""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

from ..errors import ModelProtocolError
from ..json_text import parse_json

DONE = b"[DONE]"
EXCERPT = 500


def excerpt(body: bytes) -> str:
    """The beginning of a reply's body, to show in an error."""
    text = body[:EXCERPT].decode("utf-8", "replace").strip()
    return text if len(body) <= EXCERPT else f"{text}…"


class EventReader:
    """Bytes in, values out. `done` is true once `[DONE]` was read; what comes after it is ignored.

    `feed` takes blocks as they come from the network, `finish` says that no more will come. A value is a JSON object;
    other JSON values are skipped, except a list, whose objects count one by one. An event named `error` is given as
    `{"error": …}`. `is_document`: what came is no event stream. Raises `ModelProtocolError`.
    """

    def __init__(self) -> None:
        self.done = False
        self.is_document = False
        self._event: bytes | None = None
        self._begun = False
        self._tail: list[bytes] = []  # of the unfinished line
        self._document: list[bytes] | None = None  # what came in place of an event stream
        self._pending: list[bytes] = []  # the data of an event that is not complete yet
        self._strange: list[bytes] = []  # lines that mean nothing, for the error

    def feed(self, block: bytes) -> list[dict[str, Any]]:
        """The values whose events ended in this block."""
        if not self._begun:
            block = self._first(block)
        if self._document is not None:
            self._document.append(block)
            return []
        # A carriage return at the end may be the first half of a line's end.
        end = max(block.rfind(b"\n"), block.rfind(b"\r", 0, len(block) - 1)) + 1 if block else 0
        if not end:
            self._tail.append(block)
            return []
        if self._tail:
            lines = b"".join((*self._tail, block[:end]))
            self._tail.clear()
        else:
            lines = block[:end]
        if end < len(block):
            self._tail.append(block[end:])
        values: list[dict[str, Any]] = []
        for line in lines.splitlines():
            self._line(line, values)
        return values

    def finish(self) -> list[dict[str, Any]]:
        """The values of what was still open."""
        values: list[dict[str, Any]] = []
        if not self._begun:
            self._begun, left = True, b"".join(self._tail)
            self._tail = [left]
        if self._document is not None:
            return self._document_values()
        for line in b"".join(self._tail).splitlines():
            self._line(line, values)
        self._tail.clear()
        self._flush(values)
        return values

    def excerpt(self) -> str:
        """The beginning of what could not be read."""
        return excerpt(b"\n".join(self._strange))

    def _first(self, block: bytes) -> bytes:
        """Looks at the beginning: an event stream, or a document in its place."""
        block = b"".join((*self._tail, block))
        text = block.removeprefix(b"\xef\xbb\xbf").lstrip()
        if not text or b"\xef\xbb\xbf".startswith(block):
            self._tail = [block]
            return b""
        self._tail.clear()
        self._begun = True
        if text[:1] in b"{[<":
            self._document = []
            self.is_document = True
        return text

    def _line(self, line: bytes, values: list[dict[str, Any]]) -> None:
        if self.done:
            return
        if line.startswith(b"data:"):
            self._data(line[5:].strip(), values)
        elif not line:
            self._flush(values)
            self._event = None
        elif line.startswith(b"event:"):
            self._event = line[6:].strip()
        elif self._pending:
            self._pending.append(line)
        elif line.startswith(b"{") and (value := _value(line)) is not None:
            self._emit(value, values)
        elif not line.startswith((b":", b"id:", b"retry:", b"data")) and line.strip():
            self._strange.append(line)

    def _data(self, data: bytes, values: list[dict[str, Any]]) -> None:
        if not data:
            return
        if not self._pending:
            # Most servers send an event per line: it is read at once, whether or not a blank line follows.
            try:
                value = from_json(data, allow_inf_nan=False)
            except ValueError:
                if data.strip(b'"') == DONE:
                    self.done = True
                    return
            else:
                if value == "[DONE]":
                    self.done = True
                else:
                    self._emit(value, values)
                return
        elif data == DONE:
            self._flush(values)
            self.done = True
            return
        self._pending.append(data)

    def _flush(self, values: list[dict[str, Any]]) -> None:
        if not self._pending:
            return
        data = b"\n".join(self._pending)
        self._pending.clear()
        value = _value(data)
        if value is not None:
            self._emit(value, values)
        elif self._event == b"error":
            self._emit(data.decode("utf-8", "replace"), values)
        elif self._event not in _SILENT:
            self._lines(data, values)

    def _lines(self, data: bytes, values: list[dict[str, Any]]) -> None:
        """Reads the data of events that no blank line separates."""
        for line in data.splitlines():
            value = _value(line)
            if line == DONE:
                self.done = True
                return
            if value is None:
                raise ModelProtocolError("an event of the model's stream is not JSON", excerpt(data))
            self._emit(value, values)

    def _emit(self, value: object, values: list[dict[str, Any]]) -> None:
        if self._event == b"error":
            says_so = isinstance(value, dict) and ("error" in value or "choices" in value)
            values.append(value if says_so else {"error": value})  # type: ignore[arg-type]  # a dict if it says so
        elif type(value) is dict:
            values.append(value)
        elif isinstance(value, list):
            values += (each for each in value if isinstance(each, dict))

    def _document_values(self) -> list[dict[str, Any]]:
        body, self._document = b"".join(self._document or ()), None
        value = _value(body)
        values: list[dict[str, Any]] = []
        if value is not None:
            self._emit(value, values)
            return values
        for line in body.splitlines():
            self._line(line, values)
        self._flush(values)
        if not values:
            self._strange = [body[: EXCERPT + 1]]
        return values


_SILENT = frozenset({b"ping", b"keepalive", b"keep-alive", b"heartbeat"})


def _value(data: bytes) -> Any:
    """The JSON value, or None. Bytes that are no UTF-8 are replaced rather than losing the whole event."""
    try:
        return parse_json(data)
    except ValueError:
        try:
            return parse_json(data.decode("utf-8", "replace"))
        except ValueError:
            return None
