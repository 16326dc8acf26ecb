"""One call of a tool: from the model's request, through the call scope, to what the model is told.

What a model can read is decided here, and nothing the library says of itself passes. Not here: finding tools
(`sources`), what JSON means (`codec`), where code runs (`toolbox.execution`).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from time import perf_counter
from types import CoroutineType
from typing import Any

from ..chat import (
    Content,
    ToolExecution,
    ToolExecutionRequest,
    ToolExecutionResult,
    ToolExecutionResultMessage,
    ToolSpecification,
)
from ..context import (
    ActiveScope,
    CallScope,
    Cancellation,
    InvocationContext,
    current_invocation,
)
from ..errors import (
    FrameworkError,
    MissingBeanError,
    ToolAbort,
    ToolArgumentsError,
    ToolRetry,
    ToolTimeoutError,
    UnknownToolError,
)
from ..events import Listeners
from ..execution import EXECUTION_MARK, Execution, Runner, execution_of
from .codec import Encoded, EncodedInFull, cut, printable
from .failures import DEFAULTS, READY, Handler, ToolErrors, check_answer, logger, message_of
from .marks import ReturnBehavior
from .observation import observed


@dataclass(frozen=True, slots=True)
class InjectedParameter:
    """A tool's parameter that is a bean: `wanted` is as annotated; `optional` ones keep their default without one."""

    name: str
    wanted: Any
    optional: bool


MUCH = 100_000
"""Characters in a result from which on one may have forgotten that a model is to read it, and is paid for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One tool as a call offers it, everything decided beforehand.

    `bean` is looked up for each call in the scope that is active then, and asked for `member`; without one, `function`
    is called as it is. `decode` is None for an executor made by hand, which is given the request itself. `positional`
    has the names and defaults of the parameters that cannot be given by name. `is_simple`: a coroutine function that
    takes what the model fills in, and its time; there is nothing to look up and no other place to go to.
    """

    specification: ToolSpecification
    execution: Execution
    where: str
    function: Callable[..., Any] | None
    encode: Callable[[Any], Encoded]
    decode: Callable[[ToolExecutionRequest], dict[str, Any]] | None = None
    return_behavior: ReturnBehavior = ReturnBehavior.TO_LLM
    timeout: float | None = None
    max_result_chars: int | None = None
    bean: Any = None
    member: str = ""
    positional: tuple[tuple[str, Any], ...] = ()
    memory_id_names: tuple[str, ...] = ()
    context_names: tuple[str, ...] = ()
    needs_memory_id: bool = False
    injected: tuple[InjectedParameter, ...] = ()
    is_simple: bool = field(init=False)

    def __post_init__(self) -> None:
        filled_in = self.memory_id_names or self.context_names or self.injected or self.positional
        simple = self.execution.is_coroutine and self.function is not None and self.decode is not None
        object.__setattr__(self, "is_simple", simple and not filled_in and self.timeout is None)


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
        context = outer.in_tool(request, _CallCancellation(outer.cancellation))
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
                        _judge(failure, None, tool)
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


# --- the call


class ToolCall:
    """One call, on whatever thread it is made: finds the bean, fills in what the model does not, encodes, closes.

    `given_up` is set when nobody waits for it any more.
    """

    __slots__ = ("_arguments", "_opened", "_request", "_scope", "context", "given_up", "tool")

    def __init__(
        self,
        tool: Tool,
        request: ToolExecutionRequest,
        arguments: dict[str, Any] | None,
        context: InvocationContext,
        scope: ActiveScope,
        opened: CallScope,
    ) -> None:
        self.tool, self.context = tool, context
        self._request, self._arguments, self._scope, self._opened = request, arguments, scope, opened
        self.given_up: BaseException | None = None

    @property
    def name(self) -> str:
        """The tool's name."""
        return self.tool.specification.name

    async def prepare(self) -> None:
        """Makes, on the loop, what has to be awaited for the beans of this call."""
        try:
            if self.tool.bean is not None:
                await self._scope.prepare(self.tool.bean)
            for each in self.tool.injected:
                try:
                    await self._scope.prepare(each.wanted)
                except MissingBeanError:
                    if not each.optional:
                        raise
        except BaseException as error:
            await self.finish(error)
            raise

    async def run(self, runner: Runner) -> Encoded:
        """The whole call: its beans, its place, its time."""
        tool = self.tool
        if tool.bean is not None or tool.injected:
            await self.prepare()
        if tool.execution.is_coroutine:
            running: Any = self.here()
        else:
            running = runner.run(tool.execution, self, self.name, finish=self.finish, shipped=self.shipped)
        try:
            returned = await (running if tool.timeout is None else self._limited(running, tool.timeout))
        except asyncio.CancelledError as error:
            self.given_up = error
            raise
        # What another process returned has not been encoded there.
        return returned if isinstance(returned, Encoded) else tool.encode(returned)

    async def _limited(self, running: Any, timeout: float) -> Any:
        late = ToolTimeoutError(self.name, timeout)
        limit = asyncio.timeout(timeout)
        try:
            async with limit:
                try:
                    return await running
                except asyncio.CancelledError:
                    if limit.expired():
                        self.given_up = late
                    raise
        except TimeoutError:
            if not limit.expired():
                raise  # the tool's own
            if isinstance(self.context.cancellation, _CallCancellation):
                self.context.cancellation.late = True
            raise late from None

    async def here(self) -> Encoded:
        """The whole call of a coroutine function, which needs no other place than the loop and the task it is in."""
        try:
            function, args, kwargs = self._bound()
            value = function(*args, **kwargs)
            if type(value) is CoroutineType or inspect.isawaitable(value):
                value = await value
            encoded = self.tool.encode(value)
        except BaseException as error:
            await self.finish(error)
            raise
        await self.finish(None)
        return encoded

    def __call__(self) -> Any:
        """Calls the tool; an awaitable stands for a result that is not there yet."""
        try:
            function, args, kwargs = self._bound()
            value = function(*args, **kwargs)
            kind = type(value)
            if kind is CoroutineType or (kind.__module__ != "builtins" and inspect.isawaitable(value)):
                return self._awaited(value)
            encoded = self.tool.encode(value)
        except BaseException as error:
            self._close_here(error)
            if isinstance(error, StopIteration):  # no coroutine and no future can raise it
                raise RuntimeError("the tool raised StopIteration") from error
            raise
        self._close_here(self.given_up)
        return encoded

    async def _awaited(self, value: Any) -> Encoded:
        return self.tool.encode(await value)

    def _bound(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """The function to call, its positional arguments, and its arguments by name."""
        tool, kwargs, function = self.tool, self._arguments, self.tool.function
        if function is None:
            function = member_of(self._scope.get(tool.bean), tool.member)
        if kwargs is None:
            return function, (self._request, self.context.memory_id), {}
        for name in tool.memory_id_names:
            kwargs[name] = self.context.memory_id
        for name in tool.context_names:
            kwargs[name] = self.context
        for each in tool.injected:
            try:
                kwargs[each.name] = self._scope.get(each.wanted)
            except MissingBeanError:
                if not each.optional:
                    raise
        if not tool.positional:
            return function, (), kwargs
        return function, tuple(kwargs.pop(name, default) for name, default in tool.positional), kwargs

    def shipped(self) -> Callable[[], Any]:
        """The call as it can be sent to another process, which has no beans and no scope."""
        function, args, kwargs = self._bound()
        return functools.partial(function, *args, **kwargs)

    # --- the end of its scope

    def _close_here(self, error: BaseException | None) -> None:
        """Closes, on this thread, what can be closed here."""
        try:
            self._opened.close_here(error)
        except Exception as failure:
            _judge(failure, error, self.tool)

    async def finish(self, error: BaseException | None) -> None:
        """Closes the rest, on the loop."""
        await close_scope(self._opened, error or self.given_up, self.tool)


async def close_scope(opened: CallScope, error: BaseException | None, tool: Tool) -> None:
    """Closes what is left of a call's scope; a failure to do so is the call's, unless it has failed by `error`."""
    try:
        await opened.aclose(error)
    except Exception as failure:
        _judge(failure, error, tool)


def _judge(failure: Exception, error: BaseException | None, tool: Tool) -> None:
    if isinstance(failure, ExceptionGroup) and len(failure.exceptions) == 1:
        failure = failure.exceptions[0]
    if error is None or isinstance(failure, FrameworkError):
        raise failure
    if failure is not error:
        name = tool.specification.name
        logger.error("closing the call scope of tool %r failed: %s", name, failure, exc_info=failure)


def is_called_otherwise(bean: Any) -> bool:
    """Whether calls of this bean as a tool differ from others: a service's, which run without memory."""
    return hasattr(type(bean), "__toolbox_tool_call__")


def member_of(bean: Any, name: str) -> Callable[..., Any]:
    """What to call of a bean; one whose calls as a tool differ from others says so by `__toolbox_tool_call__`."""
    function: Callable[..., Any] = (
        bean.__toolbox_tool_call__(name) if is_called_otherwise(bean) else getattr(bean, name)
    )
    return function


class _CallCancellation(Cancellation):
    """Of a tool with a time-out: given up when the tool is late, or with the invocation."""

    __slots__ = ("_invocation", "late")

    def __init__(self, invocation: Cancellation) -> None:
        self._invocation, self.late = invocation, False

    @property
    def cancelled(self) -> bool:  # type: ignore[override]  # read only: nobody but the invocation sets it
        return self.late or self._invocation.cancelled


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
