"""Reads one reply of either wire: bytes in, stream events or the whole response out.

Not here: what a wire's JSON objects mean (`chat_wire`, `responses_wire`), finding them among bytes (`sse`).
"""

from __future__ import annotations

from typing import Any, Protocol

from pydantic_core import from_json

from ..chat import ChatResponse, StreamEvent
from ..errors import ModelProtocolError
from ..json_text import compact_json
from .accumulator import ReplyAccumulator
from .sse import EventReader, excerpt


class Interpreter(Protocol):
    """Knows what the objects of one wire mean, and tells the accumulator.

    `kind`: what a reply is called. `answered`: some of a reply has come. `ended`: it has said that it is complete.
    `final`: nothing that follows counts.
    """

    kind: str
    reply: ReplyAccumulator
    answered: bool

    @property
    def ended(self) -> bool: ...
    @property
    def final(self) -> bool: ...

    def take(self, value: dict[str, Any], is_document: bool) -> None:
        """Reads one object. Raises `ModelHttpError` when it is an error."""
        ...

    def close(self) -> None:
        """Called before the reply is put together."""
        ...


class ReplyReader:
    """Reads one reply: the blocks of a stream with `feed`, then `finish`; or a whole body with `read`.

    Each takes what came in place of the other, a document for a stream or a stream for a document. `begun`: an event
    has come. `is_ended`: the reply has said that it is complete; a connection that breaks after that has lost nothing.
    """

    def __init__(self, interpreter: Interpreter) -> None:
        self.begun = False
        self._latest: list[dict[str, Any]] = []
        self._interpreter = interpreter
        self._events = EventReader()

    @property
    def is_done(self) -> bool:
        """Whether nothing that follows counts."""
        return self._events.done or self._interpreter.final

    @property
    def is_ended(self) -> bool:
        """Whether the reply is complete, though more may follow."""
        return self._events.done or self._interpreter.ended

    def feed(self, block: bytes) -> list[StreamEvent]:
        """The events of this block. Raises `ModelHttpError` and `ModelProtocolError`."""
        self._take(self._events.feed(block))
        return self._interpreter.reply.take_events()

    def finish(self) -> list[StreamEvent]:
        """The last events, a `CompleteResponse` in the end; nothing more will come. Raises any `ModelError`."""
        self._take(self._events.finish())
        self._end()
        return self._interpreter.reply.take_events()

    def read(self, body: bytes) -> ChatResponse:
        """The reply that a body is. Raises any `ModelError`."""
        try:
            value = from_json(body)
        except ValueError:
            value = None
        if type(value) is dict:
            self._latest = [value]
            self._interpreter.take(value, True)
        else:
            self._take(self._events.feed(body))
            self._take(self._events.finish())
        return self._end()

    def _take(self, values: list[dict[str, Any]]) -> None:
        if values:
            self._latest = values
        for value in values:
            self.begun = True
            self._interpreter.take(value, self._events.is_document)
        if self._events.broken is not None and not self.is_ended:
            raise ModelProtocolError("an event of the model's stream is not JSON", self._events.broken)

    def _end(self) -> ChatResponse:
        interpreter = self._interpreter
        if not interpreter.answered:
            raise ModelProtocolError(f"what came is no {interpreter.kind}", self._excerpt())
        if not self.is_ended:
            raise ModelProtocolError("the stream stopped before the reply ended", self._excerpt())
        try:
            interpreter.close()
            return interpreter.reply.finish()
        except ModelProtocolError as error:
            raise ModelProtocolError(error.message, self._excerpt()) from error.__cause__

    def _excerpt(self) -> str:
        """What meant nothing, else what came last."""
        strange = self._events.excerpt()
        return strange or (excerpt(compact_json(self._latest[-1]).encode()) if self._latest else "")
