"""What the page can do: call a tool as a model would, and ask a service's method; each in a request scope of its own.

Not here: HTTP (`routes`), what is typed into a form (`forms`), what happens on the way (`listener`).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from itertools import count
from typing import Any

from starlette.concurrency import run_in_threadpool

from toolbox.chat import PartialReasoning, PartialResponse, ToolExecutionRequest
from toolbox.container import Container, internals_of
from toolbox.context import WhileCallerWaits
from toolbox.errors import FrameworkError, ToolAbort
from toolbox.services.outputs import Result
from toolbox.tools.failures import ToolErrors, return_to_model
from toolbox.tools.pipeline import Tool

from ..streaming import EVENTS, close_stream, steps_of
from .entries import Entry, failure, plain
from .journal import tap
from .program import Method

logger = logging.getLogger("toolbox.fastapi")

AS_A_MODEL_SEES = ToolErrors(on_unknown_tool=return_to_model, on_tool_arguments_error=return_to_model)


class DevUiPage:
    """What `InvocationContext.service` is in a tool that is called from the page."""


_numbers = count(1)


# --- one tool


async def call_tool(container: Container, tool: Tool, arguments: str, memory_id: str | None) -> Entry:
    """Calls a tool with the argument text a model would send; what came of it, as a model would read it."""
    request = ToolExecutionRequest(f"dev-ui-{next(_numbers)}", tool.specification.name, arguments)
    try:
        with WhileCallerWaits():
            async with container.request_scope():
                outcome = await internals_of(container).host.execute(
                    {request.name: tool}, request, DevUiPage, AS_A_MODEL_SEES, memory_id
                )
    except (FrameworkError, ToolAbort) as error:  # what a model never reads, the developer does
        return failure(error)
    execution = outcome.execution
    return {
        "type": "result",
        "text": execution.result,
        "is_error": execution.is_error,
        "duration": execution.duration,
        "contents": [{"type": type(each).__name__, **plain(each)} for each in outcome.message.contents],
    }


# --- a service's method


async def ask(container: Container, method: Method, arguments: Mapping[str, Any]) -> AsyncGenerator[Entry, None]:
    """Calls a method; what happens, as it happens: texts, items, tool calls, at the end an answer or a failure."""
    asking = _Asking(container, method, arguments)
    task = asyncio.create_task(asking.to_the_end())
    try:
        while (entry := await asking.entries.get()) is not None:
            yield entry
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


class _Asking:
    """One call of a method, and what is told of it."""

    def __init__(self, container: Container, method: Method, arguments: Mapping[str, Any]) -> None:
        self._container, self._plan, self._arguments = container, method.plan, arguments
        self.entries: asyncio.Queue[Entry | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._text: list[str] = []

    def _tell(self, entry: Entry | None) -> None:
        # In order, from whatever loop or thread: a container's loop may be another than the application's.
        self._loop.call_soon_threadsafe(self.entries.put_nowait, entry)

    async def to_the_end(self) -> None:
        """Calls, and tells; the last is None."""
        began = time.perf_counter()
        tap.set(self._tell)  # for this task, and all that is called in it
        self._tell({"type": "asked", "at": time.time() * 1000})
        try:
            told = await self._called()
        except Exception as error:
            logger.debug("%s, asked from the dev UI, failed", self._plan.where, exc_info=error)
            told = failure(error)
        self._tell({**told, "at": time.time() * 1000, "duration": time.perf_counter() - began})
        self._tell(None)

    async def _called(self) -> Entry:
        async with self._container.request_scope():
            service = await self._container.aget(self._plan.service)
            function = getattr(service, self._plan.name)
            if self._plan.is_async:
                value = function(**self._arguments)
            else:
                value = await run_in_threadpool(function, **self._arguments)
            if inspect.isawaitable(value):
                value = await value
            if self._plan.output.is_stream:
                return await self._streamed(value)
        return {"type": "answer", "value": plain(value.content if isinstance(value, Result) else value)}

    async def _streamed(self, stream: Any) -> Entry:
        has_items = False
        try:
            async for each in steps_of(stream):
                match each:
                    case str() | PartialResponse():
                        text = each if isinstance(each, str) else each.text
                        self._text.append(text)
                        self._tell({"type": "text", "text": text})
                    case PartialReasoning(text):
                        self._tell({"type": "reasoning", "text": text})
                    case _ if not isinstance(each, EVENTS):
                        has_items = True
                        self._tell({"type": "item", "value": plain(each)})
        finally:
            await close_stream(stream)
        return {"type": "answer", "value": None if has_items else "".join(self._text)}
