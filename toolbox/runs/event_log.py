"""The events of a run: their versioned JSON, which any process can read, and `EventLog`, which writes them.

Not here: numbering and storing events (`store`), waiting for them (`following`).
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast, get_args

from ..chat import (
    BeforeToolExecution,
    ChatResponse,
    CompleteResponse,
    CompleteToolCall,
    IntermediateResponse,
    PartialReasoning,
    PartialResponse,
    PartialToolCall,
    PendingCall,
    RunSuspended,
    ServiceEvent,
    ToolExecuted,
    ToolProgress,
)
from ..errors import LeaseLostError, TranscriptError
from ..services.state import (
    execution_from_dict,
    execution_to_dict,
    request_from_dict,
    request_to_dict,
    response_from_dict,
    response_to_dict,
)
from ..transcripts import Json, read_json, write_json
from .store import RunStore

if TYPE_CHECKING:
    from .following import RunSignals

VERSION = 1

_EVENT_PAUSE = 0.05  # seconds between two writes of pieces
_PIECES = (PartialResponse, PartialReasoning, PartialToolCall)

_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(ServiceEvent)}


def event_to_json(event: ServiceEvent) -> str:
    """Write an event as JSON. A tool's `result_object` is written as JSON if possible, or lost."""
    return write_json({"version": VERSION, "type": type(event).__name__, **_fields(event)})


def event_from_json(text: str) -> ServiceEvent:
    """Read an event written by `event_to_json`. Raises `TranscriptError` if it is invalid."""
    written = read_json(text, VERSION)
    try:
        kind = _KINDS[written["type"]]
        values = {name: value for name, value in written.items() if name not in ("version", "type")}
        if kind in (CompleteResponse, IntermediateResponse):
            return cast("ServiceEvent", kind(cast("ChatResponse", response_from_dict(values["response"]))))
        if kind is ToolExecuted:
            return ToolExecuted(execution_from_dict(values["execution"]))
        if kind is RunSuspended:
            return RunSuspended(values["run_id"], tuple(PendingCall(**each) for each in values["pending"]))
        if "request" in values:
            values["request"] = request_from_dict(values["request"])
        return cast("ServiceEvent", kind(**values))
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, TranscriptError):
            raise
        raise TranscriptError("", f"invalid event of a run: {error!r}") from error


def _fields(event: ServiceEvent) -> Json:
    match event:
        case PartialResponse() | PartialReasoning():
            return {"text": event.text}
        case PartialToolCall():
            names = ("index", "id", "name", "partial_arguments")
            return {name: getattr(event, name) for name in names}
        case CompleteToolCall():
            return {"index": event.index, "request": request_to_dict(event.request)}
        case BeforeToolExecution():
            return {"request": request_to_dict(event.request)}
        case CompleteResponse() | IntermediateResponse():
            return {"response": response_to_dict(event.response)}
        case ToolProgress():
            values = {"done": event.done, "total": event.total, "message": event.message}
            return {"request": request_to_dict(event.request), **values}
        case ToolExecuted():
            return {"execution": execution_to_dict(event.execution)}
        case RunSuspended():
            return {"run_id": event.run_id, "pending": [_call(each) for each in event.pending]}


def _call(call: PendingCall) -> Json:
    values = {name: getattr(call, name) for name in PendingCall.__slots__}
    return {**values, "arguments": dict(call.arguments), "attributes": dict(call.attributes)}


# --- writing


class EventLog:
    """Writes the events of a run that this process executes.

    Pieces of text are written a few times a second, everything else as soon as possible; nothing waits for them.
    `taken` hands over what is not written yet, for a transaction that writes something else too.
    """

    def __init__(self, store: RunStore, run_id: str, generation: int, signals: RunSignals) -> None:
        self._store, self._run_id, self._generation, self._signals = store, run_id, generation, signals
        self._ready: list[str] = []
        self._seen: list[str] = []  # written by an earlier owner in the round that continues now
        self._writing: asyncio.Task[None] | None = None
        self._is_urgent = asyncio.Event()

    async def open(self) -> None:
        """Read which events of the current round an earlier owner has written."""
        if self._generation <= 1:
            return
        after = 0
        while found := await self._store.events(self._run_id, after):
            after = found[-1].number
            for each in found:
                event = event_from_json(each.data)
                if isinstance(event, IntermediateResponse):
                    self._seen.clear()
                elif not isinstance(event, _PIECES):
                    self._seen.append(_identity(event))

    def put(self, event: ServiceEvent) -> None:
        """Write this event soon, unless an earlier owner has written it."""
        if not isinstance(event, _PIECES):
            identity = _identity(event)
            if identity in self._seen:
                self._seen.remove(identity)
                return
            self._is_urgent.set()
        self._ready.append(event_to_json(event))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())

    def taken(self) -> list[str]:
        """Return the events that are not written yet; the caller writes them."""
        ready, self._ready = self._ready, []
        return ready

    async def _write(self) -> None:
        while self._ready:
            with suppress(TimeoutError):
                async with asyncio.timeout(_EVENT_PAUSE):
                    await self._is_urgent.wait()
            self._is_urgent.clear()
            if ready := self.taken():
                try:
                    await self._store.add_events(self._run_id, self._generation, ready)
                except LeaseLostError:
                    return
                except BaseException:
                    self._ready[:0] = ready
                    raise
                self._signals.announce(self._run_id)

    async def flush(self) -> None:
        """Wait until all events are written. Raises the store's errors."""
        while self._writing is not None and not self._writing.done():
            self._is_urgent.set()
            await asyncio.shield(self._writing)
        if self._writing is not None and not self._writing.cancelled():
            self._writing.result()


def _identity(event: ServiceEvent) -> str:
    request = getattr(event, "request", None) or getattr(getattr(event, "execution", None), "request", None)
    return (
        f"{type(event).__name__} {request.id} {request.name} {request.arguments}" if request else type(event).__name__
    )
