"""Sends a stream of text, items or events to a client: as server-sent events or over a WebSocket.

Both use the same format: `data` is JSON, events have the name of their class, and the stream ends with `done` or
`failure`. Not here: the stream of a service (`toolbox.services`), the problem details of a failure (`problems`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, get_args

import anyio
from fastapi.sse import EventSourceResponse, ServerSentEvent, format_sse_event
from pydantic_core import PydanticSerializationError, to_json, to_jsonable_python
from starlette.background import BackgroundTask
from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from toolbox.callers import WhileCallerWaits
from toolbox.chat import Retrieved, ToolExecuted, ToolExecution, ToolExecutionResult
from toolbox.events import ToldEvent
from toolbox.execution.markers import is_async
from toolbox.runs.resuming import ResumedEvents
from toolbox.runs.run_events import RunEnded, RunEvent, RunEvents
from toolbox.service_events import InnerEvent, ServiceEvent
from toolbox.services.outputs import Result

from .exchanges import (
    EXCHANGE_KEY,
    ApplicationStoppingError,
    ClientDisconnectedError,
    ClientExchange,
    record_failure,
    settle_exchange,
)
from .problems import log, problem_details

Stream: TypeAlias = AsyncIterable[Any] | Iterable[Any]
"""The return value of a streaming service method, or any other iterable of texts, items and events."""

EVENTS: tuple[type[Any], ...] = (*get_args(ServiceEvent), RunEnded)

PING = b": ping\n"
"""A comment. It has no blank line after it: some clients would read that as an event without data."""


def as_json(value: object) -> str:
    """Return `value` as compact JSON; objects without a JSON form become text."""
    return _write_json(value, None)


def _write_json(value: object, private: Any) -> str:
    """Return compact JSON without `private` fields. Half a surrogate, which UTF-8 cannot encode, is escaped."""
    options: dict[str, Any] = {"fallback": _write_unknown, "bytes_mode": "base64", "inf_nan_mode": "null"}
    try:
        return to_json(value, exclude=private, **options).decode()
    except PydanticSerializationError:
        return json.dumps(to_jsonable_python(value, exclude=private, **options), separators=(",", ":"))


# The object that a tool returned, the arguments that interceptors gave it, and what a passage has for the program can
# hold data that the model never read; a browser must not get it by accident.
_PRIVATE: dict[type[Any], Any] = {
    ToldEvent: {"context"},
    ToolExecuted: {"execution": {"result_object", "arguments"}},
    ToolExecution: {"result_object", "arguments"},
    ToolExecutionResult: {"result_object"},
    Result: {
        "tool_executions": {"__all__": {"result_object", "arguments"}},
        "sources": {"__all__": {"score", "attributes"}},
    },
    Retrieved: {"passages": {"__all__": {"score", "attributes"}}},
}


def public_json(item: object) -> str:
    """Return `item` as JSON, a tool call without its `result_object`, the error of a run without its text."""
    item = _hide_error_text(item)
    private = _PRIVATE.get(type(item))
    if isinstance(item, InnerEvent):
        private = {"context": True, "event": _PRIVATE.get(type(item.event), set())}
    return _write_json(item, private)


def _hide_error_text(item: object) -> object:
    """Return the end of a failed run with only the type of its error: the text can name hosts, keys and data."""
    if isinstance(item, RunEnded) and item.status == "failed" and item.error is not None:
        return RunEnded(item.status, item.error.partition(":")[0])
    return item


Filter: TypeAlias = Callable[[Any], Any]
"""Returns the value to send for an item of a stream, or None to leave the item out."""


def client_json(item: object, chosen: Filter | None) -> str | None:
    """Return the JSON to send for `item`, or None if the filter `chosen` leaves it out."""
    if chosen is None:
        return public_json(item)
    seen = chosen(item)
    return None if seen is None else as_json(_hide_error_text(seen))


def _write_unknown(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else str(value)


def name_of(item: object) -> str | None:
    """Return the event name of `item`, or None for texts and items, which have no name."""
    return type(item).__name__ if isinstance(item, EVENTS) else None


def iterate(stream: Stream) -> AsyncIterable[Any]:
    """Return the stream as an async iterable; a synchronous one runs on worker threads."""
    return stream if isinstance(stream, AsyncIterable) else iterate_in_threadpool(stream)


def require_stream(stream: object, where: str) -> None:
    """Raise `TypeError` unless `stream` is a stream; an answer and a coroutine are not."""
    if isinstance(stream, Coroutine):
        stream.close()
        called = getattr(stream, "__qualname__", "a call").rpartition("<locals>.")[2]
        what = f"the coroutine of {called}"
    elif isinstance(stream, (str, bytes, Mapping)) or not isinstance(stream, (AsyncIterable, Iterable)):
        what = f"a {type(stream).__name__}"
    else:
        return
    raise TypeError(
        f"{where} expects a stream, got {what}; "
        "call a method declared `def …(…) -> AsyncIterator[str]`, or return the answer itself"
    )


async def close_stream(stream: object) -> None:
    """Close a stream and release its resources."""
    if close := getattr(stream, "aclose", None):
        await close()
    elif close := getattr(stream, "close", None):
        with suppress(ValueError):  # a generator that a thread is still running
            await run_in_threadpool(close)


# --- server-sent events


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """What `encode=` of `sse` gets at the end of a stream."""


@dataclass(frozen=True, slots=True)
class StreamFailed:
    """What `encode=` of `sse` gets if a stream has failed: the problem details (RFC 9457) of its error."""

    problem: Mapping[str, Any]


Encode: TypeAlias = Callable[[Any], Any]
"""Returns a `ServerSentEvent` or a JSON value for an item of a stream, or None to send nothing."""


def sse(
    stream: Stream,
    *,
    filter: Filter | None = None,  # noqa: A002 - the usual name
    encode: Encode | None = None,
    ping: float = 15.0,
    headers: Mapping[str, str] | None = None,
    background: BackgroundTask | None = None,
) -> EventSourceResponse:
    """Return a response that sends `stream` as server-sent events, and closes it when the client disconnects.

        @app.get("/chat")
        async def chat(question: str, assistant: Inject[Assistant]):
            return sse(assistant.stream(question))

    Each `data:` is JSON; a text is a JSON string. The events of a service have the name of their class in `event:`. A
    stream ends with `event: done`, or with `event: failure` and problem details. `filter` gets each item and returns
    the value to send, or None to leave the item out. Without `filter`, tool calls are sent without `result_object`;
    `filter=lambda item: item` sends it as well.

    `encode` writes the format of an existing front end: it gets each item, then `StreamEnded()` or, as the last,
    `StreamFailed(problem)`, and decides every frame. It returns a JSON value, which is sent as `data:` alone, a
    `ServerSentEvent`, or None to send nothing.

    A comment is sent after `ping` seconds of silence. `headers` are added to the response; `background` runs after it.
    A client that reconnects (`Last-Event-ID`) gets 204, and the stream is closed without starting it. Raises
    `TypeError` if `stream` is not a stream, with both `filter` and `encode`, and if one of them is `async def`.

    The events of a run, `sse(runs.events(run_id, after=last_event_id))`, are sent with their numbers as `id:`, so a
    client that reconnects misses nothing; it gets 204 when the run has ended and nothing is newer. `filter` and
    `encode` get the event without its number, which is the `id:` of the frame, unless `encode` sets one.
    `RunEnded.error` of a failed run is sent as the type of the error, without its text; a `filter` that wants the text
    sent returns it, `{"error": event.error}`.
    `sse(runs.resume_stream(run_id, answers))` stores the answers first; an invalid answer gets an error response.
    """
    require_stream(stream, "sse(…)")
    if filter is not None and encode is not None:
        raise TypeError("sse(…): pass filter= or encode=, not both; encode= can leave items out as well")
    if is_async(filter) or is_async(encode):
        raise TypeError("sse(…): filter= and encode= are called without await; use functions declared with `def`")
    # The first event has an id, so that a reconnecting client sends `Last-Event-ID`.
    first_id = None if isinstance(stream, RunEvents) else "0"
    frames: StreamFrames = Frames(filter, first_id) if encode is None else OwnFrames(encode)
    return EventStreamResponse(stream, frames, ping, headers, background)


class StreamFrames(Protocol):
    """Encodes a stream as server-sent events. What returns None sends nothing."""

    def encode_item(self, item: Any) -> bytes | None:
        """Return the frames of an item."""
        ...

    def encode_end(self) -> bytes | None:
        """Return the frame of a stream that has ended well."""
        ...

    def encode_failure(self, problem: Mapping[str, Any]) -> bytes | None:
        """Return the frame of a stream that has failed."""
        ...


class Frames:
    """Encodes the events of a stream: as JSON with the names of their classes; `done` or `failure` is the last.

    `first_id` is the `id:` of the first frame. `chosen` is the filter.
    """

    def __init__(self, chosen: Filter | None, first_id: str | None) -> None:
        self._chosen, self._id = chosen, first_id

    def encode_item(self, item: object) -> bytes | None:
        """Return the frame of an item, or None if the filter leaves it out."""
        if isinstance(item, ServerSentEvent):
            return _encode_event(item, self._take_id())
        event = item.event if isinstance(item, RunEvent) else item
        if (data := client_json(event, self._chosen)) is None:
            return None
        number = self._take_id()
        return format_sse_event(
            data_str=data, event=name_of(event), id=str(item.number) if isinstance(item, RunEvent) else number
        )

    def encode_end(self) -> bytes | None:
        """Return the frame of a stream that has ended well."""
        return format_sse_event(event="done", data_str="null", id=self._take_id())

    def encode_failure(self, problem: Mapping[str, Any]) -> bytes | None:
        """Return the frame of a stream that has failed."""
        return format_sse_event(event="failure", data_str=json.dumps(problem), id=self._take_id())

    def _take_id(self) -> str | None:
        number, self._id = self._id, None
        return number


class OwnFrames:
    """Encodes the events of a stream as a function of the program says."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode

    def encode_item(self, item: object) -> bytes | None:
        """Return the frame for an item, with its `id:`."""
        if isinstance(item, RunEvent):
            return self._frame(item.event, str(item.number))
        return self._frame(item, item.id if isinstance(item, ServerSentEvent) else None)

    def encode_end(self) -> bytes | None:
        """Return the frame for `StreamEnded()`."""
        return self._frame(StreamEnded(), None)

    def encode_failure(self, problem: Mapping[str, Any]) -> bytes | None:
        """Return the frame for `StreamFailed(problem)`; None if the function fails, too."""
        try:
            return self._frame(StreamFailed(problem), None)
        except Exception as error:
            log(error, "encode= of a stream of server-sent events")
            return None

    def _frame(self, item: object, number: str | None) -> bytes | None:
        chosen = self._encode(item)
        if chosen is None:
            return None
        if isinstance(chosen, ServerSentEvent):
            return _encode_event(chosen, number)
        return format_sse_event(data_str=as_json(_hide_error_text(chosen)), id=number)


def _encode_event(event: ServerSentEvent, number: str | None) -> bytes:
    data = event.raw_data if event.raw_data is not None or event.data is None else as_json(event.data)
    return format_sse_event(
        data_str=data,
        event=event.event,
        id=number if event.id is None else event.id,
        retry=event.retry,
        comment=event.comment,
    )


class EventStreamResponse(EventSourceResponse):
    """The response that `sse` returns."""

    def __init__(
        self,
        stream: Stream,
        frames: StreamFrames,
        ping: float,
        headers: Mapping[str, str] | None,
        background: BackgroundTask | None,
    ) -> None:
        own = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_encode_stream(stream, frames), headers={**own, **(headers or {})}, background=background)
        self._stream, self._frames, self._ping = stream, frames, ping
        self._sent = time.monotonic()
        self._sending = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if await self._is_over(scope):
            # A browser reconnects when a connection ends, unless it gets 204.
            await close_stream(self._stream)
            await Response(status_code=204)(scope, receive, send)
        else:
            if isinstance(self._stream, ResumedEvents):
                await self._stream.begin()  # an invalid answer gets an error response instead of a stream
            exchange: ClientExchange | None = scope.get(EXCHANGE_KEY)
            begun = exchange.shutdown_begun if exchange is not None else None
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._send_all(receive, send, begun or asyncio.Event())
        if self.background is not None:
            await self.background()

    async def _is_over(self, scope: Scope) -> bool:
        """Return True if the client has everything. Raises `RunNotFoundError`."""
        if isinstance(self._stream, RunEvents):
            return await self._stream.is_over()
        return any(name == b"last-event-id" for name, _ in scope["headers"])

    async def _send_all(self, receive: Receive, send: Send, shutdown_begun: asyncio.Event) -> None:
        """Send the body until it ends, the client disconnects or the application stops; send pings in between."""
        body = asyncio.create_task(self._send_body(send))
        left = asyncio.create_task(_wait_for_disconnect(receive))
        stopped = asyncio.create_task(shutdown_begun.wait())
        tasks: tuple[asyncio.Task[Any], ...] = (body, left, stopped)
        try:
            while not await self._wait_for_first(tasks):
                await self._send_ping(send)
        finally:
            for task in tasks:
                task.cancel()
            # The stream must be closed before the request's scope, even if this task is cancelled again.
            with anyio.CancelScope(shield=True):
                await asyncio.wait(tasks)
        if not body.cancelled():
            body.result()
        elif left.cancelled():
            error: BaseException = ApplicationStoppingError()
            if stopped.cancelled():  # then only the stream itself can have cancelled the body
                error = asyncio.CancelledError()
                log(error, "a stream of server-sent events")
            record_failure(error)
            frame = self._frames.encode_failure(problem_details(error))
            await self._send_chunk(send, frame or b"", more=False)

    async def _wait_for_first(self, tasks: Iterable[asyncio.Task[Any]]) -> bool:
        """Wait until a task ends (True), or until a ping is due (False)."""
        patience = self._sent + self._ping - time.monotonic()
        ended, _ = await asyncio.wait(tasks, timeout=max(patience, 0.0), return_when=asyncio.FIRST_COMPLETED)
        return bool(ended)

    async def _send_ping(self, send: Send) -> None:
        if self._sending.locked():  # an event is being sent to a slow client: no ping is needed
            self._sent = time.monotonic()
        else:
            await self._send_chunk(send, PING)

    async def _send_body(self, send: Send) -> None:
        async for event in self.body_iterator:
            await self._send_chunk(send, event)
        await self._send_chunk(send, b"", more=False)

    async def _send_chunk(self, send: Send, chunk: Any, more: bool = True) -> None:
        async with self._sending:
            with suppress(OSError):  # the client disconnected, which `_wait_for_disconnect` reports
                await send({"type": "http.response.body", "body": chunk, "more_body": more})
            self._sent = time.monotonic()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _encode_stream(stream: Stream, frames: StreamFrames) -> AsyncIterator[bytes]:
    """Yield the frames of the events, and of the end."""
    try:
        async for item in iterate(stream):
            if (frame := frames.encode_item(item)) is not None:
                yield frame
        await settle_exchange()  # what a bean of the stream raises is its failure
        if (frame := frames.encode_end()) is not None:
            yield frame
    except ClientDisconnectedError as error:
        record_failure(error)
    except Exception as error:
        record_failure(error)
        log(error, "a stream of server-sent events")
        if (frame := frames.encode_failure(problem_details(error))) is not None:
            yield frame
    finally:
        await close_stream(stream)


# --- WebSockets


async def send_stream(
    websocket: WebSocket,
    stream: Stream,
    *,
    filter: Filter | None = None,  # noqa: A002 - the usual name
) -> None:
    """Send `stream` over an accepted WebSocket, which stays open; close the stream when the client disconnects.

        await websocket.accept()
        await send_stream(websocket, assistant.stream(question))

    Each item is a text frame `{"event": …, "data": …}`. The events of a service have the name of their class; texts
    and items are named `message`. The events of a run also have their number as `"id"`. The last frame is `done`, or
    `failure` with problem details. `filter` works as in `sse`. Raises `ClientDisconnectedError` if the client
    disconnects, and `TypeError` if `stream` is not a stream.
    """
    require_stream(stream, "send_stream(…)")
    try:
        with WhileCallerWaits():
            async for item in iterate(stream):
                event = item.event if isinstance(item, RunEvent) else item
                if (data := client_json(event, filter)) is not None:
                    number = item.number if isinstance(item, RunEvent) else None
                    await _send_frame(websocket, name_of(event) or "message", data, number)
    except (ClientDisconnectedError, WebSocketDisconnect) as error:
        raise ClientDisconnectedError from error
    except Exception as error:
        record_failure(error)
        log(error, "a stream over a WebSocket")
        await _send_frame(websocket, "failure", json.dumps(problem_details(error)))
    else:
        await _send_frame(websocket, "done", "null")
    finally:
        await close_stream(stream)


async def _send_frame(websocket: WebSocket, event: str, data: str, number: int | None = None) -> None:
    known = f',"id":{number}' if number is not None else ""
    await websocket.send_text(f'{{"event":{json.dumps(event)}{known},"data":{data}}}')
