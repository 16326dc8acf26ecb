"""One call of a tool: from the model's request, through the call scope, to what the model is told.

What a model can read is decided here, and nothing the library says of itself passes. Not here: finding tools
(`sources`), what JSON means (`codec`), finding the bean and calling it (`calls`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from time import perf_counter

from ..chat import Content, ToolExecution, ToolExecutionRequest, ToolExecutionResult, ToolExecutionResultMessage
from ..context import ActiveScope, InvocationContext, current_invocation
from ..errors import FrameworkError, ToolAbort, ToolArgumentsError, ToolRetry, UnknownToolError
from ..events import Listeners
from ..execution import EXECUTION_MARK, Runner, execution_of
from .calls import CallCancellation, ToolCall, close_scope, judge
from .codec import Encoded, EncodedInFull, cut, printable
from .failures import DEFAULTS, READY, Handler, ToolErrors, check_answer, logger, message_of
from .observation import observed
from .prepared import Tool

MUCH = 100_000
"""Characters in a result from which on one may have forgotten that a model is to read it, and is paid for it."""


@dataclass(frozen=True, slots=True)
class ToolSurroundings:
    """What a tool call finds: its invocation, scope and threads, the handlers, and the limit of its result's text.

    `listeners` are told of it; into `raised` goes what becomes a result although it was raised.
    """

    context: InvocationContext
    scope: ActiveScope
    runner: Runner
    failures: ToolErrors
    max_result_chars: int | None = None
    listeners: Listeners | None = None
    raised: list[Exception] | None = None


class ToolOutcome:
    """What came of a tool call: `execution` for the caller, `message` for the model."""

    __slots__ = ("_contents", "execution")

    def __init__(self, execution: ToolExecution, contents: Sequence[Content]) -> None:
        self.execution, self._contents = execution, contents

    @property
    def message(self) -> ToolExecutionResultMessage:
        """The answer to the call, made when it is asked for."""
        told = self.execution
        request = told.request
        return ToolExecutionResultMessage(
            request.id, request.name, told.result, told.is_error, told.attributes, self._contents
        )


async def execute_tool(tool: Tool, request: ToolExecutionRequest, surroundings: ToolSurroundings) -> ToolOutcome:
    """Runs one call; what goes wrong in it is an outcome too.

    Raises `ToolAbort`, `FrameworkError`s, cancellation, and what a handler raises.
    """
    if surroundings.listeners is not None:
        return await observed(execute_tool, tool, tool.specification, request, surroundings)
    started_at, clock = datetime.now(UTC), perf_counter()
    outer = surroundings.context
    if tool.timeout is None:
        context = outer.in_tool(request)
    else:
        context = outer.in_tool(request, CallCancellation(outer.cancellation))
    token = current_invocation.set(context)
    try:
        try:
            arguments = None if tool.decode is None else tool.decode(request)
            with surroundings.scope.open_call_scope() as opened:
                if tool.is_simple:
                    # As `ToolCall.run` does it, without what only others need: most calls are such.
                    try:
                        told = tool.encode(await tool.function(**arguments))  # type: ignore[misc, arg-type]  # simple
                    except BaseException as error:
                        await close_scope(opened, error, tool)
                        raise
                    try:
                        await opened.aclose(None)
                    except Exception as failure:
                        judge(failure, None, tool)
                else:
                    call = ToolCall(tool, request, arguments, context, surroundings.scope, opened)
                    told = await call.run(surroundings.runner)
        except Exception as error:
            told = await _told(error, request, context, surroundings)
    finally:
        try:  # noqa: SIM105 - `suppress` would take a tenth of the time that a call has
            current_invocation.reset(token)
        except ValueError:  # left in another context than entered, as when a coroutine is closed from outside
            pass
    limit = tool.max_result_chars or surroundings.max_result_chars
    return _outcome(request, told, limit, started_at, perf_counter() - clock)


async def answer_unknown_tool(
    request: ToolExecutionRequest, tool_names: Sequence[str], surroundings: ToolSurroundings
) -> ToolOutcome:
    """What to say of a call of a tool that is not offered. Raises what the handler raises."""
    if surroundings.listeners is not None:
        return await observed(_answer_unknown_tool, tool_names, None, request, surroundings)
    return await _answer_unknown_tool(tool_names, request, surroundings)


async def _answer_unknown_tool(
    tool_names: Sequence[str], request: ToolExecutionRequest, surroundings: ToolSurroundings
) -> ToolOutcome:
    started_at, clock = datetime.now(UTC), perf_counter()
    context = surroundings.context.in_tool(request)
    token = current_invocation.set(context)
    try:
        handler = surroundings.failures.on_unknown_tool or DEFAULTS.on_unknown_tool
        told = await _handled(handler, UnknownToolError(request, tuple(tool_names)), request, context, surroundings)
    finally:
        current_invocation.reset(token)
    return _outcome(request, told, surroundings.max_result_chars, started_at, perf_counter() - clock)


def _outcome(
    request: ToolExecutionRequest, told: Encoded, limit: int | None, started_at: datetime, duration: float
) -> ToolOutcome:
    text, contents, failed = told.text, told.contents, told.is_error
    if limit is not None and len(text) > limit:
        text, contents = cut(text, tuple(contents), limit)
    elif limit is None and len(text) > MUCH:
        logger.warning(
            "the result of tool %r has %d characters, and all of them go to the model; "
            "let the tool return less, or cut it: @tool(max_result_chars=…), TOOLBOX_MAX_RESULT_CHARS",
            request.name,
            len(text),
        )
    attributes = told.attributes or {}
    return ToolOutcome(ToolExecution(request, text, told.value, failed, started_at, duration, attributes), contents)


# --- what the model is told when a call went wrong


async def _told(
    error: Exception, request: ToolExecutionRequest, context: InvocationContext, surroundings: ToolSurroundings
) -> Encoded:
    if isinstance(error, ToolRetry):
        if surroundings.raised is not None:
            surroundings.raised.append(error)
        return EncodedInFull(printable(message_of(error)), is_error=True)
    if isinstance(error, (FrameworkError, ToolAbort)):
        raise error
    if isinstance(error, ExceptionGroup) and error.subgroup((FrameworkError, ToolAbort)) is not None:
        raise error
    failures = surroundings.failures
    handler = failures.on_tool_execution_error or DEFAULTS.on_tool_execution_error
    # An inner service's arguments error is this tool's failure like any other.
    if isinstance(error, ToolArgumentsError) and error.request == request:
        handler = failures.on_tool_arguments_error or DEFAULTS.on_tool_arguments_error
    return await _handled(handler, error, request, context, surroundings)


async def _handled(
    handler: Handler | None,
    error: Exception,
    request: ToolExecutionRequest,
    context: InvocationContext,
    surroundings: ToolSurroundings,
) -> Encoded:
    assert handler is not None
    if surroundings.raised is not None:
        surroundings.raised.append(error)
    if handler in READY:
        answer = handler(error, context)
    else:
        execution = execution_of(handler, getattr(handler, EXECUTION_MARK, None))
        label = f"{request.name} (handler)"
        answer = await surroundings.runner.run(execution, functools.partial(handler, error, context), label)
    checked = check_answer(answer, handler)
    if isinstance(checked, ToolExecutionResult):
        return EncodedInFull.of(checked)
    return EncodedInFull(printable(checked), is_error=True)
