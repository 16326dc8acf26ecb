"""Calls the function of a tool: in a call scope, where its execution says, within its timeout; encodes the result.

Not here: decoding and layers (`pipeline`), threads and processes (`toolbox.execution`).
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from time import perf_counter
from typing import Any

from ..chat import (
    ToolProgress,
)
from ..context import (
    InvocationContext,
    ToolCallScope,
)
from ..errors import (
    FrameworkError,
    ScopeNotActiveError,
    ToolDeferred,
    ToolTimeoutError,
)
from ..events import (
    ToolProgressEvent,
)
from ..execution.cancellation import OwnCode
from ..execution.markers import awaitable_of
from ..execution.threads import call_on
from ..parameters import (
    Progress,
    current_progress,
)
from ..security import SecurityIdentity, identity_now
from .codec import with_written_arguments
from .failures import logger
from .marks import OWN_TOOL_CALLS
from .results import Encoded
from .tool_calls import NoService, Tool, ToolAttempt, ToolCall, ToolLayer


def run_tool(call: ToolCall) -> Awaitable[Encoded]:
    """Run the tool in a new call scope and encode the result: the step inside all layers."""
    attempt = ToolAttempt(call.arguments, call.written_arguments())
    return _run_reporting(call, attempt) if call.tool.progress_names else run_function(call, attempt)


def run_function(call: ToolCall, attempt: ToolAttempt) -> Awaitable[Encoded]:
    """Call the tool's function with the arguments of `call`; `attempt` has those that are known of it."""
    timeout = call.tool.timeout
    return _FunctionCall(call, attempt).run() if timeout is None else _run_in_time(call, attempt, timeout)


def with_layers(tool: Tool, layers: Iterable[ToolLayer]) -> Tool:
    """Return the tool with `layers` around its calls, in place of the layers it had. The first one is outermost."""
    step = innermost = tool.run or run_tool
    for layer in reversed(tuple(layers)):
        step = layer(step, tool)
    outermost = None if step is innermost else step
    return tool if tool.step is outermost else replace(tool, step=outermost)


# --- reporting progress


async def _run_reporting(call: ToolCall, attempt: ToolAttempt) -> Encoded:
    """Run the tool with its `Progress`, which is ignored after the tool's end."""
    progress = Progress(_reporter(call))
    token, given = None, call
    if call.tool.decode is None:
        token = current_progress.set(progress)
    else:
        hidden = dict.fromkeys(call.tool.progress_names, progress)
        given = call.with_arguments({**(call.arguments or {}), **hidden})
    try:
        return await run_function(given, attempt)
    finally:
        progress.end()
        if token is not None:
            current_progress.reset(token)


def _reporter(call: ToolCall) -> Callable[[float, float | None, str | None], None] | None:
    """Return the function that sends progress to the listeners and the stream; it can be called on any thread."""
    listeners, context, on_progress = call.environment.listeners, call.context, call.environment.on_progress
    if listeners is None and on_progress is None:
        return None
    loop = asyncio.get_running_loop()

    def send(event: ToolProgress) -> None:
        if listeners is not None:
            listeners.tell(ToolProgressEvent(context, event.request, event.done, event.total, event.message))
        if on_progress is not None:
            on_progress(event)

    def report(done: float, total: float | None, message: str | None) -> None:
        call_on(loop, send, ToolProgress(call.request, done, total, message))

    return report


# --- within the timeout


async def _run_in_time(call: ToolCall, attempt: ToolAttempt, timeout: float) -> Encoded:
    """Run the tool within its timeout in seconds; waiting for beans or for a thread does not count.

    Raises `ToolTimeoutError`.
    """
    late = ToolTimeoutError(call.tool.name, timeout)
    limit = asyncio.timeout(None)
    run = _FunctionCall(call, attempt, _start_of(limit, timeout))
    try:
        async with limit:
            try:
                return await run.run()
            except asyncio.CancelledError:
                if limit.expired():
                    run.abandoned_by = late
                raise
    except TimeoutError:
        if not limit.expired():
            raise  # raised by the tool itself
        call.context.cancellation.cancel()
        raise late from None


def _start_of(limit: asyncio.Timeout, timeout: float) -> Callable[[], None]:
    """Return a function, callable on any thread, that starts `limit` with `timeout` seconds."""
    loop = asyncio.get_running_loop()

    def begin(at: float) -> None:
        with suppress(RuntimeError):  # the caller is no longer waiting
            limit.reschedule(at)

    return lambda: call_on(loop, begin, loop.time() + timeout)


# --- in a call scope, on the loop, on a thread or in another process


class _FunctionCall:
    """One call of a tool's function in its call scope.

    `abandoned_by` is the error because of which the caller stopped waiting for a thread, or None. The thread continues,
    and the scope is closed when the function ends. What must be closed on a thread, such as a generator that a blocking
    function has opened, is closed there; the rest is closed on the loop, also after an error.
    """

    __slots__ = ("_attempt", "_call", "_on_start", "_opened", "abandoned_by")

    _opened: ToolCallScope

    def __init__(self, call: ToolCall, attempt: ToolAttempt, on_start: Callable[[], None] | None = None) -> None:
        self._call, self._attempt, self._on_start = call, attempt, on_start
        self.abandoned_by: BaseException | None = None

    async def run(self) -> Encoded:
        """Run the function where its execution says, and wait for its result."""
        tool, environment = self._call.tool, self._call.environment
        on_loop = tool.execution.is_coroutine or (tool.execution.is_non_blocking and environment.runner.is_for_loop)
        self._opened = environment.scope.open_call_scope()
        try:
            if tool.bean is not None or tool.injected:
                await self._prepare_beans()
            encoded = await (self._run_here() if on_loop else self._run_elsewhere())
            if not encoded.is_error:
                self._call.attempts.note_succeeded(self._attempt)
            return encoded
        except asyncio.CancelledError as error:
            self.abandoned_by = error
            raise
        finally:
            self._opened.leave()

    async def _prepare_beans(self) -> None:
        """Create, on the loop, the beans that must be awaited."""
        tool, scope = self._call.tool, self._call.environment.scope
        try:
            if tool.bean is not None:
                await scope.prepare(tool.bean)
            for each in tool.injected:
                try:
                    await scope.prepare(each.wanted)
                except ScopeNotActiveError:
                    if each.wanted is not SecurityIdentity:  # it is anonymous outside its scope
                        raise
        except BaseException as error:
            await self._close(error)
            raise

    # --- on the loop

    async def _run_here(self) -> Encoded:
        """Run the function in the current task."""
        tool = self._call.tool
        try:
            began = perf_counter()
            value = self._call_function()
            if not tool.execution.is_coroutine:
                self._call.environment.runner.warn_if_slow(tool.name, began)
            if (awaited := awaitable_of(value)) is not None:  # a bean that replaces another may have a `def`
                value = await self._result_of(awaited)
            encoded = tool.encode(value)
        except BaseException as error:
            await self._close(error)
            raise
        if not self._opened.close_if_empty():
            await self._close(None)
        return encoded

    async def _result_of(self, value: Awaitable[Any]) -> Any:
        """Return what a tool's coroutine returns.

        A `CancelledError` of a task or future that the tool awaited is a failure of the tool, if nobody cancelled the
        call.
        """
        code = OwnCode(value)
        try:
            return await code
        except asyncio.CancelledError as error:
            is_cancelled = self._call.environment.context.cancellation.cancelled
            if not code.has_task or code.is_task_cancelled or is_cancelled:
                raise
            raise RuntimeError("something that the tool awaited was cancelled, but not the call itself") from error

    # --- on a thread, or in another process

    async def _run_elsewhere(self) -> Encoded:
        tool = self._call.tool
        value = await self._call.environment.runner.run(
            tool.execution,
            self._run_on_thread,
            tool.name,
            finish=self._close,
            shipped=self._ship,
            has_timeout=tool.timeout is not None,
        )
        # A result from another process is not encoded yet.
        return value if isinstance(value, Encoded) else tool.encode(value)

    def _run_on_thread(self) -> Any:
        """Call the function on this thread. Returns the encoded result, or an awaitable of it."""
        tool = self._call.tool
        try:
            value = self._call_function()
            if (awaited := awaitable_of(value)) is not None:
                return self._encode_awaited(awaited)
            encoded = tool.encode(value)
        except BaseException as error:
            self._close_on_thread(None if isinstance(error, ToolDeferred) else error)
            if isinstance(error, StopIteration):  # coroutines and futures cannot raise it
                raise RuntimeError("the tool raised StopIteration") from error
            raise
        if not self._opened.close_if_empty():
            self._close_on_thread(self.abandoned_by)
        return encoded

    async def _encode_awaited(self, value: Any) -> Encoded:
        return self._call.tool.encode(await value)

    def _ship(self) -> Callable[[], Any]:
        """Return the call for another process, where there are no beans and no scope."""
        function, args, kwargs = self._begin()
        return functools.partial(function, *args, **kwargs)

    # --- everywhere

    def _call_function(self) -> Any:
        function, args, kwargs = self._begin()
        return function(*args, **kwargs)

    def _begin(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        if self._on_start is not None:
            self._on_start()
        bound = _bind(self._call)
        self._call.attempts.note_begun(self._attempt)
        return bound

    def _close_on_thread(self, error: BaseException | None) -> None:
        """Close the beans that can be closed on this thread."""
        try:
            self._opened.close_here(error)
        except Exception as failure:
            self._judge(failure, error)

    async def _close(self, error: BaseException | None) -> None:
        """Close the other beans, on the loop. Raises a failure to close, unless the call has already failed."""
        if self._opened.close_if_empty():
            return
        error = None if isinstance(error, ToolDeferred) else error  # the call ends normally, its result comes later
        error = error or self.abandoned_by
        try:
            await self._opened.aclose(error)
        except Exception as failure:
            self._judge(failure, error)

    def _judge(self, failure: Exception, error: BaseException | None) -> None:
        """Raise a failure to close the call scope; if the call has already failed with `error`, log it instead."""
        if isinstance(failure, ExceptionGroup) and len(failure.exceptions) == 1:
            failure = failure.exceptions[0]
        if error is None or isinstance(failure, FrameworkError):
            raise failure
        if failure is not error:
            name = self._call.tool.name
            logger.error("closing the call scope of tool %r failed: %s", name, failure, exc_info=failure)


# --- the arguments of a function


def _bind(call: ToolCall) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return the function to call, its positional arguments, and its keyword arguments."""
    tool, kwargs, function = call.tool, call.arguments, call.tool.function
    if function is None:
        function = member_of(call.environment.scope.get(tool.bean), tool.member)
    if tool.decode is None:
        request = call.request if kwargs is None else with_written_arguments(call.request, kwargs)
        return function, (request, call.context.memory_id), {}
    assert kwargs is not None
    if tool.has_hidden:
        kwargs = {**kwargs}  # a layer may run the call again
        for name in tool.run_id_names:
            kwargs[name] = run_id_of(call.context)
        for name in tool.key_names:
            kwargs[name] = idempotency_key_of(call)
        for name in tool.memory_id_names:
            kwargs[name] = call.context.memory_id
        for name in tool.context_names:
            kwargs[name] = call.context if call.context.service is not NoService else None
        for each in tool.injected:
            if each.wanted is SecurityIdentity:
                kwargs[each.name] = identity_now(call.environment.scope)
            elif not each.optional:
                kwargs[each.name] = call.environment.scope.get(each.wanted)
            elif (bean := call.environment.scope.find_now(each.wanted)) is not None:
                kwargs[each.name] = bean
        if tool.positional:
            return function, tuple(kwargs.pop(name, default) for name, default in tool.positional), kwargs
    return function, (), kwargs


def run_id_of(context: InvocationContext) -> str:
    """Return the id of the run of a tool call; outside of runs, the invocation's id."""
    place = context.place
    return context.invocation_id if place is None else str(place.run_id)


def idempotency_key_of(call: ToolCall) -> str:
    """Return the same text for the same call of a run, in each process; outside of runs, one for this call."""
    context = call.context
    place = context.place
    if place is not None:
        text = f"{place.run_id}:{place.call}"
    else:  # the compensation of a call has the same request
        text = f"{context.invocation_id}:{call.request.id}:{call.tool.where}"
    return hashlib.sha256(text.encode()).hexdigest()


def has_own_tool_calls(bean: Any) -> bool:
    """Return True if the bean runs differently as a tool: a service runs without memory."""
    return hasattr(type(bean), OWN_TOOL_CALLS)


def member_of(bean: Any, name: str) -> Callable[..., Any]:
    """Return the function to call for a member of a bean."""
    own_calls = getattr(type(bean), OWN_TOOL_CALLS, None)
    function: Callable[..., Any] = getattr(bean, name) if own_calls is None else own_calls(bean, name)
    return function
