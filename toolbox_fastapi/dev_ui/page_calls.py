"""The calls that the page makes: of one tool, and of a method of a service, whose entries are reported as they happen.

Not here: the routes (`routes`), the arguments (`forms`).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

from starlette.concurrency import run_in_threadpool

from toolbox.callers import WhileCallerWaits
from toolbox.chat import PartialReasoning, PartialResponse, PendingCall, RunSuspended, ToolExecutionRequest
from toolbox.container import Container, internals_of
from toolbox.contents import media_in
from toolbox.errors import FrameworkError, RunSuspendedError, ToolAbort
from toolbox.services.outputs import Result
from toolbox.tools.failures import ToolErrors, return_to_model
from toolbox.tools.tool_calls import Tool

from ..problems import suspension
from ..streaming import EVENTS, close_stream, iterate
from .journal import Entry, entry_callback, make_failure_entry, media_entry, plain
from .program import Method

logger = logging.getLogger("toolbox.fastapi")

ERRORS_TO_MODEL = ToolErrors(on_unknown_tool=return_to_model, on_tool_arguments_error=return_to_model)


class DevUiPage:
    """The `InvocationContext.service` of a tool that is called from the page."""


_numbers = count(1)


# --- a call of one tool


async def call_tool(container: Container, tool: Tool, arguments: str, memory_id: str | None) -> Entry:
    """Call a tool with the arguments as text, like a model does; return the result as a model would read it."""
    request = ToolExecutionRequest(f"dev-ui-{next(_numbers)}", tool.specification.name, arguments)
    try:
        with WhileCallerWaits():
            async with container.request_scope() as scope:
                outcome = await internals_of(container).host.execute(
                    scope, {request.name: tool}, request, DevUiPage, ERRORS_TO_MODEL, memory_id
                )
    except (FrameworkError, ToolAbort) as error:  # a model never sees these, the developer does
        return make_failure_entry(error)
    execution = outcome.execution
    return {
        "type": "result",
        "text": execution.result,
        "is_error": execution.is_error,
        "duration": execution.duration,
        "contents": [media_entry(each) for each in media_in(outcome.message.contents)],
    }


# --- a service's method


def _suspended_entry(run_id: str | None, pending: Sequence[PendingCall]) -> Entry:
    return {"type": "suspended", **suspension(run_id, pending)}


async def ask(container: Container, method: Method, arguments: Mapping[str, Any]) -> AsyncGenerator[Entry, None]:
    """Call a method; yield texts, items and tool calls as they happen, then an answer or a failure."""
    call = _MethodCall(container, method, arguments)
    task = asyncio.create_task(call.run_method())
    try:
        while (entry := await call.entries.get()) is not None:
            yield entry
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


class _MethodCall:
    """One call of a service method, which puts its entries into a queue."""

    def __init__(self, container: Container, method: Method, arguments: Mapping[str, Any]) -> None:
        self._container, self._plan, self._arguments = container, method.plan, arguments
        self.entries: asyncio.Queue[Entry | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._text: list[str] = []

    def _emit(self, entry: Entry | None) -> None:
        # Entries can come from other threads and loops: the container may run on another loop than the application.
        self._loop.call_soon_threadsafe(self.entries.put_nowait, entry)

    async def run_method(self) -> None:
        """Call the method and emit its entries; the last one is None."""
        began = time.perf_counter()
        entry_callback.set(self._emit)  # in this task and the calls it makes
        self._emit({"type": "asked", "at": time.time() * 1000})
        try:
            outcome = await self._call_method()
        except RunSuspendedError as error:
            outcome = _suspended_entry(error.run_id, error.pending)
        except Exception as error:
            logger.debug("%s, called from the dev UI, failed", self._plan.where, exc_info=error)
            outcome = make_failure_entry(error)
        self._emit({**outcome, "at": time.time() * 1000, "duration": time.perf_counter() - began})
        self._emit(None)

    async def _call_method(self) -> Entry:
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
                return await self._emit_stream(value)
        if isinstance(value, Result) and value.pending:
            return _suspended_entry(value.run_id, value.pending)
        return {"type": "answer", "value": plain(value.content if isinstance(value, Result) else value)}

    async def _emit_stream(self, stream: Any) -> Entry:
        has_items = False
        try:
            async for each in iterate(stream):
                match each:
                    case str() | PartialResponse():
                        text = each if isinstance(each, str) else each.text
                        self._text.append(text)
                        self._emit({"type": "text", "text": text})
                    case PartialReasoning(text):
                        self._emit({"type": "reasoning", "text": text})
                    case RunSuspended(run_id, pending):
                        return _suspended_entry(run_id, pending)
                    case _ if not isinstance(each, EVENTS):
                        has_items = True
                        self._emit({"type": "item", "value": plain(each)})
        finally:
            await close_stream(stream)
        return {"type": "answer", "value": None if has_items else "".join(self._text)}
