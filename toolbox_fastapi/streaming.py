"""A stream of text, items or events on its way to a client: as server-sent events, or over a WebSocket.

Both use the same words: `data` is JSON, an event is named after its type, `failure` and `done` end the stream. Not
here: how the stream comes about (`toolbox.services`), which problem a failure is (`problems`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias, get_args

import anyio
from fastapi.sse import EventSourceResponse, ServerSentEvent, format_sse_event
from pydantic_core import to_json
from starlette.background import BackgroundTask
from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from toolbox.chat import ServiceEvent, ToolExecuted, ToolExecution, ToolExecutionResult
from toolbox.context import WhileCallerWaits
from toolbox.services.outputs import Result

from .exchanges import EXCHANGE_KEY, ApplicationStoppingError, ClientDisconnectedError, Exchange, current_exchange
from .problems import log, problem_details

Stream: TypeAlias = AsyncIterable[Any] | Iterable[Any]
"""What a streaming service method returns, or any other iterable of texts, items and events."""

EVENTS: tuple[type[Any], ...] = get_args(ServiceEvent)

# A blank line behind it would make some clients see an event without data.
PING = b": ping\n"


def as_json(value: object) -> str:
    """`value` as compact JSON; what JSON has no form for, as its text."""
    return to_json(value, fallback=_fallback, bytes_mode="base64", inf_nan_mode="null").decode()


# What a tool returned is the program's own object: a model never saw it, and a browser must not by accident.
_PRIVATE: dict[type[Any], Any] = {
    ToolExecuted: {"execution": {"result_object"}},
    ToolExecution: {"result_object"},
    ToolExecutionResult: {"result_object"},
    Result: {"tool_executions": {"__all__": {"result_object"}}},
}


def for_clients(item: object) -> str:
    """Return `item` as JSON, a tool call without its `result_object`."""
    private = _PRIVATE.get(type(item))
    if private is None:
        return as_json(item)
    return to_json(item, exclude=private, fallback=_fallback, bytes_mode="base64", inf_nan_mode="null").decode()


Filter: TypeAlias = Callable[[Any], Any]
"""Returns what a client gets instead of an item of a stream; None for nothing."""


def seen_by_client(item: object, chosen: Filter | None) -> str | None:
    """Return the JSON that a client gets of `item`, or None when `chosen` leaves it out."""
    if chosen is None:
        return for_clients(item)
    seen = chosen(item)
    return None if seen is None else as_json(seen)


def _fallback(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else str(value)


def name_of(item: object) -> str | None:
    """What `item` is called on the wire; None for texts and items, which are just data."""
    return type(item).__name__ if isinstance(item, EVENTS) else None


def steps_of(stream: Stream) -> AsyncIterable[Any]:
    """A stream's steps, those of a synchronous one on threads."""
    return stream if isinstance(stream, AsyncIterable) else iterate_in_threadpool(stream)


def refuse_other_than_streams(stream: object, where: str) -> None:
    """Raises `TypeError` for an answer that is not a stream, and for one that was not awaited."""
    if isinstance(stream, Coroutine):
        stream.close()
        called = getattr(stream, "__qualname__", "a call").rpartition("<locals>.")[2]
        what = f"the coroutine of {called}"
    elif isinstance(stream, (str, bytes, Mapping)) or not isinstance(stream, (AsyncIterable, Iterable)):
        what = f"a {type(stream).__name__}"
    else:
        return
    raise TypeError(
        f"{where} is given {what}, which is no stream; "
        "give it what a method returns that is declared `def …(…) -> AsyncIterator[str]`, or return the answer itself"
    )


async def close_stream(stream: object) -> None:
    """Ends a stream, so that what it holds is given back."""
    if close := getattr(stream, "aclose", None):
        await close()
    elif close := getattr(stream, "close", None):
        with suppress(ValueError):  # a generator whose thread is still inside it; it ends when it is dropped
            await run_in_threadpool(close)


# --- server-sent events


def sse(
    stream: Stream,
    *,
    filter: Filter | None = None,  # noqa: A002 - the word that people look for
    ping: float = 15.0,
    headers: Mapping[str, str] | None = None,
    background: BackgroundTask | None = None,
) -> EventSourceResponse:
    """Send `stream` to the client as server-sent events, and close it when the client leaves.

    Tool calls are sent without their `result_object`. `filter` decides instead what a client may see: it gets each item
    and returns what to send, or None to leave the item out; `filter=lambda item: item` sends everything.

    Every `data:` is JSON, a text being a JSON string; a service's events carry their type's name as `event:`; a stream
    that fails ends with `event: failure` and the problem details, any other with `event: done`. After `ping` seconds of
    silence a comment is sent. A client that connects again (`Last-Event-ID`) is answered 204, and nothing is started.
    Raises `TypeError` for what is no stream.
    """
    refuse_other_than_streams(stream, "sse(…)")
    return EventStreamResponse(stream, ping, headers, background, filter)


class EventStreamResponse(EventSourceResponse):
    """The response that `sse` makes."""

    def __init__(
        self,
        stream: Stream,
        ping: float,
        headers: Mapping[str, str] | None,
        background: BackgroundTask | None,
        chosen: Filter | None = None,
    ) -> None:
        own = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_encoded(stream, chosen), headers={**own, **(headers or {})}, background=background)
        self._stream, self._ping = stream, ping
        self._sent = time.monotonic()
        self._sending = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if any(name == b"last-event-id" for name, _ in scope["headers"]):
            # A browser connects again by itself when a connection has ended; 204 is how it is told not to.
            await close_stream(self._stream)
            await Response(status_code=204)(scope, receive, send)
        else:
            exchange: Exchange | None = scope.get(EXCHANGE_KEY)
            stopping = exchange.stopping if exchange is not None else None
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._send_all(receive, send, stopping.begun if stopping is not None else asyncio.Event())
        if self.background is not None:
            await self.background()

    async def _send_all(self, receive: Receive, send: Send, stopping: asyncio.Event) -> None:
        """Sends the body until it ends, the client leaves or the application stops; pings in silence."""
        body = asyncio.create_task(self._send_body(send))
        left = asyncio.create_task(_until_disconnected(receive))
        stopped = asyncio.create_task(stopping.wait())
        tasks: tuple[asyncio.Task[Any], ...] = (body, left, stopped)
        try:
            while not await self._any_ends(tasks):
                await self._send_ping(send)
        finally:
            for task in tasks:
                task.cancel()
            # The stream is closed before the request's scope is, whoever cancels us, and how often.
            with anyio.CancelScope(shield=True):
                await asyncio.wait(tasks)
        if not body.cancelled():
            body.result()
        elif left.cancelled():
            failure = format_sse_event(
                event="failure", data_str=json.dumps(problem_details(ApplicationStoppingError()))
            )
            await self._send(send, failure, more=False)

    async def _any_ends(self, tasks: Iterable[asyncio.Task[Any]]) -> bool:
        """Waits until one of the tasks has ended (True), or it has been silent for too long."""
        patience = self._sent + self._ping - time.monotonic()
        ended, _ = await asyncio.wait(tasks, timeout=max(patience, 0.0), return_when=asyncio.FIRST_COMPLETED)
        return bool(ended)

    async def _send_ping(self, send: Send) -> None:
        if self._sending.locked():  # what is being sent is not silence, however slow the client is
            self._sent = time.monotonic()
        else:
            await self._send(send, PING)

    async def _send_body(self, send: Send) -> None:
        async for event in self.body_iterator:
            await self._send(send, event)
        await self._send(send, b"", more=False)

    async def _send(self, send: Send, chunk: Any, more: bool = True) -> None:
        async with self._sending:
            with suppress(OSError):  # the client has left: `_until_disconnected` says so
                await send({"type": "http.response.body", "body": chunk, "more_body": more})
            self._sent = time.monotonic()


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _encoded(stream: Stream, chosen: Filter | None) -> AsyncIterator[bytes]:
    """The stream's events as they stand on the wire; the first has an id, so that a second connection can be told."""
    number: str | None = "0"
    try:
        async for item in steps_of(stream):
            if (event := _encode(item, number, chosen)) is not None:
                yield event
                number = None
    except ClientDisconnectedError as error:
        _note(error)
    except Exception as error:
        _note(error)
        log(error, "a stream of server-sent events")
        yield _failure(error, number)
    else:
        yield format_sse_event(event="done", data_str="null", id=number)
    finally:
        await close_stream(stream)


def _encode(item: object, number: str | None, chosen: Filter | None) -> bytes | None:
    if isinstance(item, ServerSentEvent):
        data = item.raw_data if item.raw_data is not None or item.data is None else as_json(item.data)
        return format_sse_event(
            data_str=data, event=item.event, id=item.id or number, retry=item.retry, comment=item.comment
        )
    if (data := seen_by_client(item, chosen)) is None:
        return None
    return format_sse_event(data_str=data, event=name_of(item), id=number)


def _failure(error: Exception, number: str | None = None) -> bytes:
    return format_sse_event(event="failure", data_str=json.dumps(problem_details(error)), id=number)


def _note(error: Exception) -> None:
    exchange = current_exchange()
    if exchange is not None:
        exchange.fail(error)


# --- WebSockets


async def send_stream(
    websocket: WebSocket,
    stream: Stream,
    *,
    filter: Filter | None = None,  # noqa: A002 - the word that people look for
) -> None:
    """Send `stream` over a WebSocket, which has been accepted and stays open; close it when the client leaves.

    Each item is a text frame `{"event": …, "data": …}`: a service's events by their type's name, texts and items as
    `message`; at the end `done`, or `failure` with the problem details. `filter` is that of `sse`. Raises
    `ClientDisconnectedError`.
    """
    refuse_other_than_streams(stream, "send_stream(…)")
    try:
        with WhileCallerWaits():
            async for item in steps_of(stream):
                if (data := seen_by_client(item, filter)) is not None:
                    await _send_frame(websocket, name_of(item) or "message", data)
    except (ClientDisconnectedError, WebSocketDisconnect) as error:
        raise ClientDisconnectedError from error
    except Exception as error:
        log(error, "a stream over a WebSocket")
        await _send_frame(websocket, "failure", json.dumps(problem_details(error)))
    else:
        await _send_frame(websocket, "done", "null")
    finally:
        await close_stream(stream)


async def _send_frame(websocket: WebSocket, event: str, data: str) -> None:
    await websocket.send_text(f'{{"event":{json.dumps(event)},"data":{data}}}')
