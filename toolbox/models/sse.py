"""Reads the bytes of an event stream into the JSON objects of its events.

Also reads what some servers send instead: a JSON document, lines of JSON, events without blank lines between them.
Bytes that begin with a brace, a bracket or `<` are not an event stream. They are read at the end, not while they
arrive, because a document may have line breaks anywhere. A line that is not JSON is then skipped; it is shown only in
the error of a reply that contains nothing else. Only for wires whose streams are JSON lines, a brace begins the first
line of a stream.
Not here: the meaning of the objects (`chat_wire`, `responses_wire`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json

EVENT_STREAM = "text/event-stream"
JSON_LINES = "application/x-ndjson"
STREAM_TYPES = (EVENT_STREAM, JSON_LINES)
"""The media types of streams: a wire names one of them as its `stream_type`."""
DONE = "[DONE]"
EXCERPT = 500
"""Characters of a body that an error shows."""
KEPT = 4096
"""Bytes of a body that an error keeps until secrets are hidden. Cutting earlier could leave a part of a secret."""

_MARK = b"\xef\xbb\xbf"
_SILENT = frozenset({b"ping", b"keepalive", b"keep-alive", b"heartbeat", b"done", b"end", b"close"})
_decoder = json.JSONDecoder(strict=False)


def excerpt(body: bytes) -> str:
    """Return the beginning of a reply's body for an error. It is cut further after secrets are hidden."""
    text = body[:KEPT].decode("utf-8", "replace").strip()
    return text if len(body) <= KEPT else f"{text}…"


class EventReader:
    """Reads blocks of bytes with `feed` and `finish`, and returns JSON objects.

    Of a list, each object is returned. Other JSON values are skipped. An event named `error` becomes `{"error": …}`.

    `done`: `[DONE]` was read. `broken`: the beginning of an event that is not JSON. After either, the rest is ignored.
    `is_document`: the bytes are not a stream of the type `stream_type`.
    """

    def __init__(self, stream_type: str = EVENT_STREAM) -> None:
        self._document_starts = b"[<" if stream_type == JSON_LINES else b"{[<"
        self.done = False
        self.broken: str | None = None
        self.is_document = False
        self._event: bytes | None = None
        self._begun = False
        self._tail: list[bytes] = []  # of the unfinished line
        self._document: list[bytes] = []
        self._pending: list[bytes] = []  # the data of an incomplete event
        self._strange: list[bytes] = []  # unknown lines, for the error

    def feed(self, block: bytes) -> list[dict[str, Any]]:
        """Return the objects of the events that ended in this block."""
        if not self._begun:
            block = self._detect_kind(block)
        if self.is_document:
            self._document.append(block)
            return []
        # A carriage return at the end may be the first half of a line break.
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
        return self._read_lines(lines)

    def finish(self) -> list[dict[str, Any]]:
        """Return the objects of the remaining bytes."""
        if self.is_document:
            body = b"".join(self._document)
            values = _parse_values(body)
            objects = self._read_lines(body) if values is None else list(self._take_objects(values))
            if not objects:
                self._strange = [body[: KEPT + 1]]
        else:
            objects = self._read_lines(b"".join(self._tail))
        self._flush_event(objects)
        return objects

    def excerpt(self) -> str:
        """Return the beginning of the unknown lines."""
        return excerpt(b"\n".join(self._strange))

    def _detect_kind(self, block: bytes) -> bytes:
        """Decide from the first bytes whether this is an event stream or a document."""
        block = b"".join((*self._tail, block))
        self._tail.clear()
        text = block.removeprefix(_MARK).lstrip()
        if not text or _MARK.startswith(block):
            return block if _MARK.startswith(block) else b""
        self._begun = True
        self.is_document = text[:1] in self._document_starts
        return text

    def _read_lines(self, lines: bytes) -> list[dict[str, Any]]:
        objects: list[dict[str, Any]] = []
        for line in lines.splitlines():
            if self.done or self.broken is not None:
                break
            if line.startswith(b"data:"):
                self._add_data(line[5:].strip(), objects)
            elif not line:
                if self._pending:
                    self._flush_event(objects)
                self._event = None
            elif line.startswith(b"event:"):
                self._flush_event(objects)
                self._event = line[6:].strip()
            elif self._pending:
                self._pending.append(line)
            elif line.startswith(b"{") and (values := _parse_values(line)) is not None:
                objects += self._take_objects(values)
            elif line.startswith(b"error:") and (values := _parse_values(line[6:])) is not None:
                objects.append({"error": values[0]})  # llama.cpp until autumn 2025
            elif line.lstrip().startswith((b"data:", DONE.encode())):
                self._add_data(line.strip().removeprefix(b"data:").strip(), objects)
            elif not line.startswith((b":", b"id:", b"retry:", b"data")) and line.strip():
                self._strange.append(line)
        return objects

    def _add_data(self, data: bytes, objects: list[dict[str, Any]]) -> None:
        if not data:
            return
        if not self._pending and self._event != b"error":
            # Most servers send one event per line. It is read at once, even if no blank line follows.
            try:
                value = from_json(data)
            except ValueError:
                pass
            else:
                if type(value) is dict:
                    objects.append(value)
                else:
                    objects += self._take_objects([value])
                return
        if data.strip(b'"').upper() == DONE.encode():
            self._flush_event(objects)
            self.done = True
        elif not data.startswith(b":") and data.lower() not in _SILENT:
            self._pending.append(data)

    def _flush_event(self, objects: list[dict[str, Any]]) -> None:
        """Read an event whose data is pending."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        values = _parse_values(b"\n".join(pending))
        if values is None:
            # Perhaps there is no blank line between events, and one of them is broken.
            each = [_parse_values(line) for line in pending]
            values = None if None in each or not each else [value for found in each for value in found or ()]
        if values is not None:
            objects += self._take_objects(values)
        elif self._event == b"error":
            objects.append({"error": b"\n".join(pending).decode("utf-8", "replace")})
        elif self._event not in _SILENT:
            self.broken = excerpt(b"\n".join(pending))

    def _take_objects(self, values: list[Any]) -> Iterator[dict[str, Any]]:
        for value in values:
            if value == DONE:
                self.done = True
                return
            if self._event == b"error" and not (isinstance(value, dict) and ("error" in value or "choices" in value)):
                yield {"error": value}
            elif isinstance(value, dict):
                yield value
            elif isinstance(value, list):
                yield from (each for each in value if isinstance(each, dict))


def _parse_values(data: bytes) -> list[Any] | None:
    """Return the JSON values in `data`, one after the other, or None if it contains anything else.

    Unlike the arguments of a call, the envelope of a reply is read leniently: NaN, line breaks in texts, bytes that are
    not UTF-8, and several events on one line are accepted.
    """
    try:
        return [from_json(data)]
    except ValueError:
        text = data.decode("utf-8", "replace").strip()
    values: list[Any] = []
    position = 0
    while position < len(text):
        if text.startswith(DONE, position):
            values.append(DONE)
            break  # the rest is ignored
        try:
            value, position = _decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            return None
        values.append(value)
        while text[position : position + 1].isspace() or text.startswith("data:", position):
            position += 5 if text.startswith("data:", position) else 1
    return values or None
