"""Reads the reply of a server with the interpreter of a wire: a stream of blocks, or a whole body.

All wires use it. Not here: events in bytes (`sse`), assembling the parts of a reply (`accumulator`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from pydantic_core import from_json

from ..chat import ChatResponse, StreamEvent
from ..errors import ModelConnectionError, ModelError, ModelProtocolError
from ..json_text import compact_json
from .accumulator import ReplyAccumulator
from .sse import EVENT_STREAM, EventReader, excerpt

if TYPE_CHECKING:
    from .transport import Stream


class Interpreter(Protocol):
    """Interprets the JSON objects of one wire and passes the parts to the accumulator.

    A `CompleteToolCall` is more than a display: a service starts the tool at once, before the reply is complete. So
    finish a call only when the server has said that it is complete, or when the next part cannot belong to it.

    `kind`: the name of a reply, for errors. `answered`: a part of a reply has arrived. `ended`: the server has said
    that the reply is complete. `final`: everything that follows is ignored. `is_paused`: the server has stopped before
    the reply is complete, and another request continues it with the same interpreter.
    """

    kind: str
    reply: ReplyAccumulator
    answered: bool

    @property
    def ended(self) -> bool: ...
    @property
    def final(self) -> bool: ...
    @property
    def is_paused(self) -> bool: ...

    def take(self, value: dict[str, Any], is_document: bool) -> None:
        """Read one object of a stream, or the whole reply. Raises `ModelHttpError` if it is an error.

        `is_document`: the object is the whole reply, also where a stream was requested.
        """
        ...

    def close(self) -> None:
        """Finish reading; called before the reply is assembled."""
        ...


class ReplyReader:
    """Reads the reply to one request: a stream with `feed` and `finish`, or a whole body with `load` and `end`.

    Both accept a stream as well as a document, because some servers send the other one. `begun`: an event has arrived.

    The pieces of a reply that arrived before an error belong to the caller, even if one network block brought both.
    Whether a failed request is repeated, or another model is asked, depends on them too. `feed` and `flush` therefore
    keep an error that follows pieces, and the next call raises it.
    """

    def __init__(self, interpreter: Interpreter, stream_type: str = EVENT_STREAM) -> None:
        self.begun = False
        self._failure: ModelError | None = None
        self._is_flushed = False
        self._latest: dict[str, Any] | str | None = None
        self._interpreter, self._stream_type = interpreter, stream_type
        self._events = EventReader(stream_type)

    @property
    def is_done(self) -> bool:
        """True if everything that follows is ignored."""
        return self._events.done or self._interpreter.final

    @property
    def is_ended(self) -> bool:
        """True if the server has said that the reply is complete. Token counts may still follow."""
        return self._events.done or self._interpreter.ended

    def feed(self, block: bytes) -> list[StreamEvent]:
        """Return the events of this block. Raises `ModelHttpError` and `ModelProtocolError`."""
        self.raise_failure()
        values = self._events.feed(block)
        if not values:  # no line ended in this block
            return []
        try:
            self._take_objects(values)
        except ModelError as error:
            self._failure = error
        return self._pending_events()

    def flush(self) -> list[StreamEvent]:
        """Read the rest of a stream, and return its events. Raises any `ModelError`."""
        self.raise_failure()
        if self._is_flushed:
            return []
        self._is_flushed = True
        try:
            self._take_objects(self._events.finish())
            self._check_end()
        except ModelError as error:
            self._failure = error
        return self._pending_events()

    def finish(self) -> list[StreamEvent]:
        """Return the last events; the very last is `CompleteResponse`. Raises any `ModelError`."""
        events = self.flush()
        self.end()
        return [*events, *self._interpreter.reply.take_events()]

    def raise_failure(self) -> None:
        """Raise the error that followed the last events."""
        if self._failure is not None:
            raise self._failure

    def restart(self) -> None:
        """Forget the bytes of a connection that broke before the first event: the request was sent again."""
        self._events = EventReader(self._stream_type)

    def _pending_events(self) -> list[StreamEvent]:
        events = self._interpreter.reply.take_events()
        if not events:
            self.raise_failure()
        return events

    def load(self, body: bytes) -> None:
        """Read a whole body."""
        try:
            value = from_json(body)
        except ValueError:
            value = None
        if type(value) is dict:
            self._latest = value
            self._interpreter.take(value, True)
        else:
            self._take_objects(self._events.feed(body))
            self._take_objects(self._events.finish())
        self._check_end()

    def _take_objects(self, values: Iterable[dict[str, Any]]) -> None:
        events, interpreter = self._events, self._interpreter
        for value in values:
            self._latest = value
            self.begun = True
            interpreter.take(value, events.is_document)
        if self._events.broken is not None and not self.is_ended:
            raise ModelProtocolError("an event of the model's stream is not valid JSON", self._events.broken)

    def _check_end(self) -> None:
        if not self._interpreter.answered:
            raise ModelProtocolError(f"the reply is not a {self._interpreter.kind}", self._excerpt())
        if not self.is_ended:
            raise ModelProtocolError("the stream ended before the reply was complete", self._excerpt())

    def end(self) -> ChatResponse:
        """Return the reply, when all of it has been read. Raises any `ModelError`."""
        self.raise_failure()
        interpreter = self._interpreter
        try:
            interpreter.close()
            return interpreter.reply.finish()
        except ModelProtocolError as error:
            raise ModelProtocolError(error.message, self._excerpt()) from error.__cause__

    def _excerpt(self) -> str:
        """Return the unknown lines, else the last object."""
        strange, latest = self._events.excerpt(), self._latest
        return strange or (excerpt(compact_json(latest).encode()) if latest is not None else "")


async def receive_block(stream: Stream, reader: ReplyReader, said: bool) -> bytes | None:
    """Return the next block, or None. A connection that broke before the first event is retried.

    `said`: the previous block contained a part of the reply. Raises the error in the previous block, if there was one.
    """
    reader.raise_failure()
    if reader.is_done:
        return None
    if reader.is_ended:  # token counts may follow the finish_reason
        return await stream.more(said)
    while True:
        try:
            return await stream.next_block()
        except ModelConnectionError:
            if reader.begun or not await stream.again():
                raise
            reader.restart()
