"""What a caller gets of an invocation's events: its value, its texts, its items; or that its time is over.

Not here: the events (`driver`), how a caller waits for them (`implementation`, `streams`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from typing import Any

from ..chat import IntermediateResponse, PartialResponse
from ..context import current_invocation
from .driver import Invocation
from .loop import Finish
from .outputs import ItemReader


async def texts(invocation: Invocation) -> AsyncGenerator[str, None]:
    """The text of all rounds."""
    async with aclosing(invocation.events()) as events:
        async for event in events:
            if isinstance(event, PartialResponse):
                yield event.text


async def items(invocation: Invocation) -> AsyncGenerator[Any, None]:
    """The items of the list that the last reply holds, each as soon as it is complete."""
    structure = invocation.plan.output.structure
    assert structure is not None
    assert structure.item_adapter is not None
    reader = ItemReader(structure.item_adapter, structure.item_beginnings)

    def check(finish: Finish) -> None:
        if not finish.response.ai_message.has_tool_execution_requests:
            reader.finish()

    invocation.check = check
    async with aclosing(invocation.events()) as events:
        async for event in events:
            match event:
                case PartialResponse(text):
                    for item in reader.feed(text):
                        yield item
                case IntermediateResponse():
                    reader = ItemReader(structure.item_adapter, structure.item_beginnings)


async def run_to_end(invocation: Invocation) -> Any:
    """The call, on the loop this is awaited on; its value."""
    token = current_invocation.set(invocation.context)
    try:
        with invocation.host.running.task(invocation.label):
            async with within(invocation), aclosing(invocation.events()) as events:
                async for _ in events:
                    pass
        return invocation.value()
    finally:
        current_invocation.reset(token)


def within(invocation: Invocation) -> AbstractAsyncContextManager[None]:
    """Ends what is awaited inside with `InvocationTimeoutError` when the invocation's deadline passes."""
    return nullcontext() if invocation.deadline is None else _until(invocation.deadline.at, invocation)


@asynccontextmanager
async def _until(deadline: float, invocation: Invocation) -> AsyncIterator[None]:
    left = deadline - time.monotonic()
    if left <= 0:
        raise invocation.timed_out()
    limit = asyncio.timeout(left)
    try:
        async with limit:
            yield
    except TimeoutError:
        if limit.expired():
            raise invocation.timed_out() from None
        raise
