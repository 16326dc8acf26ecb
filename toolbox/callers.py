"""Callers that can disconnect before their invocation ends, such as the client of a web request.

Not here: how a web framework notices it (`toolbox_fastapi`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from types import TracebackType
from typing import Any, Protocol

from .context import current_invocation


class Caller(Protocol):
    """The caller that waits for an invocation and can disconnect before its end: the client of a web request.

    If it has an attribute `headers`, REST clients can pass them on.
    """

    def watch(self, leave: Callable[[Exception], None]) -> Callable[[], object]:
        """Call `leave(error)` on any thread when the caller disconnects. Return a function that stops watching."""
        ...

    def watch_application(self, leave: Callable[[Exception], None]) -> Callable[[], object]:
        """Do the same, but only when the application stops: what is awaited goes on without the caller."""
        ...


current_caller: ContextVar[Caller | None] = ContextVar("toolbox.caller", default=None)


class WhileCallerWaits:
    """Context manager that ends the awaited code with the caller's error when the caller disconnects.

    As in `asyncio.timeout`, the task is cancelled, and the `CancelledError` is replaced by the caller's error. Only the
    outermost invocation gets this error; invocations of its tools are cancelled. A stream enters it for each step,
    because between steps the task belongs to the stream's consumer.
    """

    _loop: asyncio.AbstractEventLoop
    _task: asyncio.Task[Any] | None = None
    _cancelling = 0
    _context: Context
    _end: Callable[[], object] | None = None
    _error: Exception | None = None

    def __enter__(self) -> None:
        caller = current_caller.get()
        if caller is None or current_invocation.get() is not None:
            return
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._cancelling = self._task.cancelling() if self._task is not None else 0
        self._context = copy_context()  # in which it cancels: for the awaited code this comes from outside
        self._end = self._watch(caller)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._end is None:
            return
        self._end()
        task, self._task = self._task, None
        if self._error is None or task is None:
            return
        # If other code cancelled the task as well, it stays cancelled.
        if task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise self._error from error

    def _watch(self, caller: Caller) -> Callable[[], object]:
        return caller.watch(self._leave_task)

    def _leave_task(self, error: Exception) -> None:
        self._loop.call_soon_threadsafe(self._cancel_task, error, context=self._context)

    def _cancel_task(self, error: Exception) -> None:
        if self._task is not None and self._error is None:
            self._error = error
            self._task.cancel()


class WhileApplicationRuns(WhileCallerWaits):
    """The same for code that waits for a run: a caller that disconnects does not end it, but an application that stops.

    The run goes on in another process, and the server would wait for the end of the response.
    """

    def _watch(self, caller: Caller) -> Callable[[], object]:
        return caller.watch_application(self._leave_task)
