"""Sends the parts of an answer as server-sent events: `PartStream` asks a protocol's writer for the frames.

Not here: the writers (`vercel_ai`, `ag_ui`), reading the parts (`run_reading`), pings and clients that leave
(`streaming`).
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Mapping
from typing import Any, Protocol

from starlette.types import Scope

from ..problems import problem_text
from ..streaming import EventStreamResponse, as_json
from .stream_parts import Broken, Part


class PartWriter(Protocol):
    """Writes the parts of an answer as the events of a protocol. `last` is sent after the last one."""

    last: bytes

    def write(self, part: Part) -> Iterable[Mapping[str, Any]]:
        """Yield the events of a part."""
        ...


class PartFrames:
    """The frames of a stream of parts."""

    def __init__(self, writer: PartWriter) -> None:
        self._writer = writer

    def encode_item(self, item: Any) -> bytes | None:
        """Return the frames of a part."""
        return b"".join(f"data: {as_json(each)}\n\n".encode() for each in self._writer.write(item))

    def encode_end(self) -> bytes | None:
        """Return the frame of a stream that is complete."""
        return self._writer.last or None

    def encode_failure(self, problem: Mapping[str, Any]) -> bytes | None:
        """Return the frames of a stream that cannot go on; the run may."""
        failed = self.encode_item(Broken(problem_text(problem), str(problem["status"]))) or b""
        return failed + self._writer.last


class PartStream(EventStreamResponse):
    """The response with the stream of an answer. The run goes on when the client leaves."""

    def __init__(self, parts: AsyncIterable[Part], writer: PartWriter, headers: Mapping[str, str]) -> None:
        super().__init__(parts, PartFrames(writer), 15.0, headers, None)

    async def _is_over(self, scope: Scope) -> bool:
        return False
