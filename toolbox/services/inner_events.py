"""What happens in services that run within tool calls: how their events reach the reader of a stream, and front ends.

Not here: the events themselves (`toolbox.service_events`), the stream (`streamed_call`, `tool_tasks`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TypeAlias

from ..chat import CompleteResponse, IntermediateResponse
from ..context import CallPlace, InvocationContext, current_invocation
from ..service_events import InnerEvent, ServiceEvent, ServiceWork, WorkState
from ..service_names import stored_name
from .invocation import Invocation
from .loop import Suspend

Send: TypeAlias = Callable[[ServiceEvent], Awaitable[None]]
"""Sends an event to the reader of a stream, and returns when the reader requests the next one."""


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """Gets the `ServiceWork` in a run: `put` is called on `loop`, and nothing waits for it."""

    run_id: str
    put: Callable[[ServiceWork], None]
    loop: asyncio.AbstractEventLoop

    def tell(self, work: ServiceWork) -> None:
        """Pass it on from any loop; at once from its own, because the end of the tool call comes next."""
        if asyncio.get_running_loop() is self.loop:
            self.put(work)
        else:
            self.loop.call_soon_threadsafe(self.put, work)

    def work_of(self, invocation: Invocation, outer: InvocationContext) -> ServiceWork:
        """Return the work of a service that begins within the tool call `outer`."""
        own, id_ = invocation.place, invocation.context.invocation_id
        if own is not None and own.run_id == self.run_id and own.path:
            id_ = own.path
        around: CallPlace | None = outer.place
        if around is not None and around.run_id == self.run_id:
            call, parent = around.call, around.call.rpartition("/")[0]
        else:
            call, parent = "", outer.invocation_id
        return ServiceWork(id_, call, parent, stored_name(invocation.entry.service))


@dataclass(frozen=True, slots=True)
class InnerReader:
    """Who gets what happens in services within the current tool call.

    `put` is that of a stream; it waits, on `loop`, until the reader has the event. `front_end` is that of a run.
    """

    loop: asyncio.AbstractEventLoop
    put: Callable[[InnerEvent], Awaitable[None]] | None = None
    front_end: FrontEnd | None = None

    async def send(self, event: InnerEvent) -> None:
        """Send an event to the reader of the stream from any loop."""
        assert self.put is not None
        if asyncio.get_running_loop() is self.loop:
            await self.put(event)
            return

        async def put() -> None:
            assert self.put is not None
            await self.put(event)

        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(put(), self.loop))


current_reader: ContextVar[InnerReader | None] = ContextVar("toolbox.inner_events", default=None)


@asynccontextmanager
async def sent_around(invocation: Invocation) -> AsyncIterator[Send | None]:
    """Give what sends the events of a call to those around it, and tell front ends how the call begins and ends.

    None if nobody around it wants the events.
    """
    reader, outer = current_reader.get(), current_invocation.get()
    if reader is None or outer is None or outer.request is None:
        yield None
        return
    call_id, service, front_end = outer.request.id, stored_name(invocation.entry.service), reader.front_end
    work = None if front_end is None else front_end.work_of(invocation, outer)

    def tell(state: WorkState, text: str = "") -> None:
        if front_end is not None and work is not None:
            front_end.tell(replace(work, state=state, text=text))

    async def send(event: ServiceEvent) -> None:
        if isinstance(event, (IntermediateResponse, CompleteResponse)) and (text := event.response.ai_message.text):
            tell("replied", text)
        if reader.put is not None:
            await reader.send(InnerEvent(invocation.context, service, call_id, event))

    tell("running")
    try:
        yield send
    except Exception as error:  # one that was cancelled may go on in another process
        if not isinstance(invocation.end, Suspend):
            tell("failed", type(error).__name__)
        raise
    if not isinstance(invocation.end, Suspend):
        tell("finished")
