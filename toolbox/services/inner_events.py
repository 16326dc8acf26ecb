"""The events of services that run within the tool calls of a stream: how they reach its reader.

Not here: the events themselves (`toolbox.service_events`), the stream (`streamed_call`, `tool_tasks`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeAlias

from ..context import current_invocation
from ..service_events import InnerEvent, ServiceEvent
from ..service_names import stored_name
from .invocation import Invocation

Send: TypeAlias = Callable[[ServiceEvent], Awaitable[None]]
"""Sends an event to the reader of a stream, and returns when the reader requests the next one."""


@dataclass(frozen=True, slots=True)
class InnerReader:
    """The reader of the events of services within the current tool call: `put` waits, on `loop`, until it has one."""

    put: Callable[[InnerEvent], Awaitable[None]]
    loop: asyncio.AbstractEventLoop

    async def send(self, event: InnerEvent) -> None:
        """Send an event from any loop."""
        if asyncio.get_running_loop() is self.loop:
            await self.put(event)
            return

        async def put() -> None:
            await self.put(event)

        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(put(), self.loop))


current_reader: ContextVar[InnerReader | None] = ContextVar("toolbox.inner_events", default=None)


def sender_of(invocation: Invocation) -> Send | None:
    """Return what sends the events of a call that begins to the stream around it; None if that does not want them."""
    reader, outer = current_reader.get(), current_invocation.get()
    if reader is None or outer is None or outer.request is None:
        return None
    call_id, service = outer.request.id, stored_name(invocation.entry.service)

    async def send(event: ServiceEvent) -> None:
        await reader.send(InnerEvent(invocation.context, service, call_id, event))

    return send
