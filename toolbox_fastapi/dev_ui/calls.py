"""What the page can do: call a tool as a model would, and ask a service's method; each in a request scope of its own.

Not here: HTTP (`routes`), what is typed into a form (`forms`).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from typing import Any

from pydantic_core import from_json
from starlette.concurrency import run_in_threadpool

from toolbox.chat import (
    BeforeToolExecution,
    CompleteResponse,
    IntermediateResponse,
    PartialReasoning,
    PartialResponse,
    TokenUsage,
    ToolExecuted,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    UserMessage,
)
from toolbox.container import Container
from toolbox.context import WhileCallerWaits
from toolbox.errors import FrameworkError, ToolAbort
from toolbox.services.outputs import Result
from toolbox.services.records import invocation_record
from toolbox.tools.failures import ToolErrors, message_of, return_to_model
from toolbox.tools.invocation import Tool

from ..streaming import EVENTS, as_json, close_stream, steps_of
from .journal import Entry, Journal, shortened
from .program import Method

logger = logging.getLogger("toolbox.fastapi")

AS_A_MODEL_SEES = ToolErrors(on_unknown_tool=return_to_model, on_tool_arguments_error=return_to_model)


class DevUiPage:
    """What `InvocationContext.service` is in a tool that is called from the page."""


def plain(value: object) -> Any:
    """A value as JSON has it."""
    return from_json(as_json(value))


def failure(error: BaseException) -> Entry:
    """What went wrong, for the developer."""
    if isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return {"type": "failure", "kind": type(error).__name__, "message": message_of(error)}


# --- one tool


async def call_tool(
    container: Container, journal: Journal, tool: Tool, arguments: str, memory_id: str | None
) -> dict[str, Any]:
    """Calls a tool with the argument text a model would send; what came of it, as a model would read it."""
    run = journal.run(tool.where, user_message=None, memory_id=memory_id)
    request = ToolExecutionRequest(f"dev-ui-{run.number}", tool.specification.name, arguments)
    began = time.perf_counter()
    try:
        with WhileCallerWaits(), run.watching_threads():
            async with container.request_scope():
                outcome = await container.host.execute(
                    {request.name: tool}, request, DevUiPage, AS_A_MODEL_SEES, memory_id
                )
    except Exception as error:  # what a model never reads, the developer does
        run.ended(time.perf_counter() - began, failed=failure(error))
        if not isinstance(error, (FrameworkError, ToolAbort)):
            raise
        return failure(error)
    execution = outcome.execution
    run.tool(execution)
    run.ended(execution.duration)
    return {
        "type": "result",
        "text": execution.result,
        "is_error": execution.is_error,
        "duration": execution.duration,
        "contents": _contents(outcome.message),
    }


def _contents(message: ToolExecutionResultMessage) -> list[Any]:
    return [{"type": type(each).__name__, **plain(each)} for each in message.contents]


# --- a service's method


async def ask(
    container: Container, journal: Journal, method: Method, arguments: Mapping[str, Any]
) -> AsyncGenerator[Entry, None]:
    """Calls a method; what happens, as it happens: texts, items, tool calls, at the end an answer or a failure."""
    entries: asyncio.Queue[Entry | None] = asyncio.Queue()
    task = asyncio.create_task(_Asking(container, journal, method, arguments, entries).to_the_end())
    try:
        while (entry := await entries.get()) is not None:
            yield entry
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


class _Asking:
    """One call of a method, and what is told of it."""

    def __init__(
        self,
        container: Container,
        journal: Journal,
        method: Method,
        arguments: Mapping[str, Any],
        entries: asyncio.Queue[Entry | None],
    ) -> None:
        self._container, self._plan, self._arguments = container, method.plan, arguments
        self._tell = entries.put_nowait
        self._run = journal.run(
            self._plan.where,
            user_message=_said(self._plan.user_parameter, arguments),
            memory_id=arguments.get(self._plan.memory_parameter or ""),
            tap=self._tell,
        )
        self._text: list[str] = []

    async def to_the_end(self) -> None:
        """Calls, and tells; the last is None."""
        began = time.perf_counter()
        answer: Entry | None = None
        failed: Entry | None = None
        try:
            with invocation_record() as record, self._run.watching_threads():
                try:
                    answer = await self._called()
                finally:
                    self._run.tools(record.tool_executions)
        except Exception as error:
            logger.debug("%s, asked from the dev UI, failed", self._plan.where, exc_info=error)
            failed = failure(error)
        except asyncio.CancelledError:
            failed = {"type": "failure", "kind": "Cancelled", "message": "it was stopped from the page"}
            raise
        finally:
            self._run.ended(time.perf_counter() - began, answer=answer, failed=failed)
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
        if isinstance(value, Result):
            return _answer(value.content, value.token_usage, value.finish_reason)
        return _answer(value)

    async def _streamed(self, stream: Any) -> Entry:
        usage, reason = None, None
        items = False
        try:
            async for each in steps_of(stream):
                match each:
                    case str() as text:
                        self._say(text)
                    case PartialResponse(text):
                        self._say(text)
                    case PartialReasoning(text):
                        self._tell({"type": "reasoning", "text": text})
                    case BeforeToolExecution(request):
                        self._run.tool_started(request)
                    case ToolExecuted(execution):
                        self._run.tool(execution)
                    case IntermediateResponse(response) | CompleteResponse(response):
                        usage, reason = _sum(usage, response.token_usage), response.finish_reason
                    case _ if not isinstance(each, EVENTS):
                        items = True
                        self._tell({"type": "item", "value": plain(each)})
        finally:
            await close_stream(stream)
        return _answer(None if items else "".join(self._text), usage, reason)

    def _say(self, text: str) -> None:
        self._text.append(text)
        self._tell({"type": "text", "text": text})


def _said(parameter: str | None, arguments: Mapping[str, Any]) -> str:
    """What a person would say was asked."""
    value = arguments.get(parameter) if parameter is not None else dict(arguments)
    text = value.text if isinstance(value, UserMessage) else value
    return shortened(text if isinstance(text, str) else as_json(text))


def _sum(one: TokenUsage | None, other: TokenUsage | None) -> TokenUsage | None:
    return one + other if one is not None and other is not None else one or other


def _answer(value: object, usage: TokenUsage | None = None, reason: object = None) -> Entry:
    return {
        "type": "answer",
        "value": plain(value),
        "usage": None if usage is None else {**plain(usage), "total_tokens": usage.total_tokens},
        "finish_reason": reason,
    }
