"""A tool's call on whatever thread it is made: finds the bean, fills in what the model does not, closes its scope.

Not here: the model's request and what it is told (`invocation`), where code runs (`toolbox.execution`).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from contextlib import suppress
from types import CoroutineType
from typing import Any

from ..chat import ToolExecutionRequest
from ..context import ActiveScope, CallScope, Cancellation, InvocationContext
from ..errors import FrameworkError, MissingBeanError, ToolTimeoutError
from ..execution import Runner
from .codec import Encoded
from .failures import logger
from .prepared import Tool


class ToolCall:
    """One call, on whatever thread it is made: finds the bean, fills in what the model does not, encodes, closes.

    `given_up` is set when nobody waits for it any more.
    """

    __slots__ = ("_arguments", "_on_start", "_opened", "_request", "_scope", "context", "given_up", "tool")

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
        self._on_start: Callable[[], None] | None = None

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
            running = runner.run(
                tool.execution,
                self,
                self.name,
                finish=self.finish,
                shipped=self.shipped,
                has_timeout=tool.timeout is not None,
            )
        try:
            returned = await (running if tool.timeout is None else self._limited(running, tool.timeout))
        except asyncio.CancelledError as error:
            self.given_up = error
            raise
        # What another process returned has not been encoded there.
        return returned if isinstance(returned, Encoded) else tool.encode(returned)

    async def _limited(self, running: Any, timeout: float) -> Any:
        late = ToolTimeoutError(self.name, timeout)
        if self.tool.execution.is_coroutine:
            limit = asyncio.timeout(timeout)
        else:
            limit = asyncio.timeout(None)
            self._on_start = _start_of(limit, timeout)  # it may wait for a thread, which is not its own time
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
            self.context.cancellation.cancel()
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
        if self._on_start is not None:
            self._on_start()
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
        if self._on_start is not None:
            self._on_start()
        function, args, kwargs = self._bound()
        return functools.partial(function, *args, **kwargs)

    # --- the end of its scope

    def _close_here(self, error: BaseException | None) -> None:
        """Closes, on this thread, what can be closed here."""
        try:
            self._opened.close_here(error)
        except Exception as failure:
            judge(failure, error, self.tool)

    async def finish(self, error: BaseException | None) -> None:
        """Closes the rest, on the loop."""
        await close_scope(self._opened, error or self.given_up, self.tool)


def _start_of(limit: asyncio.Timeout, timeout: float) -> Callable[[], None]:
    """Return a function, for any thread, that lets `limit` end `timeout` seconds from when it is called."""
    loop = asyncio.get_running_loop()

    def begin(at: float) -> None:
        with suppress(RuntimeError):  # the waiting has ended meanwhile
            limit.reschedule(at)

    def start() -> None:
        at = loop.time() + timeout
        if asyncio._get_running_loop() is loop:
            begin(at)
        else:
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(begin, at)

    return start


async def close_scope(opened: CallScope, error: BaseException | None, tool: Tool) -> None:
    """Closes what is left of a call's scope; a failure to do so is the call's, unless it has failed by `error`."""
    try:
        await opened.aclose(error)
    except Exception as failure:
        judge(failure, error, tool)


def judge(failure: Exception, error: BaseException | None, tool: Tool) -> None:
    """Raises the failure to close a call's scope, unless the call has failed by `error` before; then it is logged."""
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


class CallCancellation(Cancellation):
    """Of a tool with a time-out: given up when the tool is late, or with the invocation."""

    __slots__ = ("_invocation",)

    def __init__(self, invocation: Cancellation) -> None:
        super().__init__()
        self._invocation = invocation

    @property
    def cancelled(self) -> bool:
        return self._given_up or self._invocation.cancelled

    def followed_by(self, follow: Callable[[], object]) -> Callable[[], object]:
        ends = super().followed_by(follow), self._invocation.followed_by(follow)
        return lambda: [end() for end in ends]
