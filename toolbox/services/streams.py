"""The streams that service methods return: each step is taken in the context of the call that made the stream.

A stream starts nothing before its first step, and is closed when it is left, dropped, or when its container stops.
Not here: what the steps do (`driver`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, TypeVar, cast

from ..chat import ServiceEvent
from ..context import NOT_BEGUN, InContext, WhileCallerWaits, current_invocation, given_up_with_outer
from ..execution import CallerRunner, on_event_loop, refuse_on_event_loop
from .driver import Invocation
from .memory import Caller, caller_here
from .outcomes import within
from .outputs import TokenStream

T = TypeVar("T")


class ServiceStream(AsyncIterator[T], Generic[T]):
    """What a streaming service method returns; `aclose()`, or leaving `async with`, ends the call where it stands."""

    def __init__(self, begin: Callable[[], Invocation], read: Callable[[Invocation], AsyncGenerator[T, None]]) -> None:
        self._begin, self._read = begin, read
        self._context = copy_context()
        self._invocation: Invocation | None = None
        self._steps: AsyncGenerator[T, None] | None = None
        self._ended: Callable[[], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._done = self._closing = False
        self._taken_by: asyncio.Task[Any] | None = None  # who takes a step at the moment
        self._left: asyncio.Event | None = None  # left while a step was taken; set when that has ended
        self._interrupted = False  # the task that took it was cancelled for that

    def __aiter__(self) -> ServiceStream[T]:
        return self

    if not TYPE_CHECKING:

        def __iter__(self) -> NoReturn:
            raise TypeError("a service's stream is iterated with `async for`; an endpoint sends it by `return sse(…)`")

    def __anext__(self) -> Coroutine[Any, Any, T]:
        return self.step()

    async def step(self, reader: Caller | None = None) -> T:
        """The next item, for `reader`; None: for the task this is awaited in."""
        if self._done:
            raise StopAsyncIteration
        invocation = self._started()
        if invocation.remembers:
            invocation.caller = reader or caller_here()
        home = invocation.host.loop
        if home is None or home is asyncio.get_running_loop():
            return await self._step(invocation)
        step = asyncio.run_coroutine_threadsafe(self._step(invocation), home)
        return await asyncio.wrap_future(given_up_with_outer(step))

    def _started(self) -> Invocation:
        if self._invocation is None:
            self._invocation = invocation = self._context.run(self._begin)
            self._context.run(current_invocation.set, invocation.context)
            self._steps = self._context.run(self._read, invocation)
        return self._invocation

    async def _step(self, invocation: Invocation) -> T:
        assert self._steps is not None
        if self._done:
            raise StopAsyncIteration
        if self._taken_by is not None:
            raise RuntimeError(
                f"{invocation.label}: a task is waiting for the stream's next item; let one at a time read"
            )
        if self._ended is None:
            self._loop = asyncio.get_running_loop()
            self._ended = invocation.host.running.open_stream(self)
        self._taken_by = task = asyncio.current_task(self._loop)
        step: Any = None
        asked: Any = NOT_BEGUN
        cancelling = 0
        try:
            if invocation.deadline is None:
                # What is there already needs no watching: most pieces of a stream come several at a time.
                step = self._steps.__anext__()
                try:
                    asked = self._context.run(step.send, None)
                except StopIteration as stop:
                    return cast("T", stop.value)
            cancelling = task.cancelling() if task is not None else 0
            with WhileCallerWaits(), invocation.host.running.task(invocation.label):
                async with within(invocation):
                    # Made no earlier: since 3.13 a step that a limit keeps from being taken is complained of.
                    return await InContext(self._context, step or self._steps.__anext__(), asked)
        except BaseException as error:
            await self._close()  # a limit may have passed between two steps
            # Someone else may have cancelled the task as well, and then it stays cancelled.
            was_left = self._interrupted and task is not None and task.cancelling() - 1 <= cancelling
            if was_left and isinstance(error, asyncio.CancelledError):
                raise StopAsyncIteration from None
            raise
        finally:
            self._taken_by = None
            if self._left is not None:
                self._left.set()
            if self._interrupted and task is not None:
                task.uncancel()

    def _has_no_reader(self) -> None:
        """Nobody has to wait for themselves who waits for its conversation now."""
        if self._invocation is not None:
            self._invocation.caller = None

    def _end(self) -> None:
        self._done = True
        if self._ended is not None:
            self._ended()

    async def aclose(self) -> None:
        """Ends the call: its model's stream is closed, its tools are cancelled, nothing is remembered.

        Whoever waits for the next item finds that there is none.
        """
        if self._taken_by is not None and self._taken_by is asyncio.current_task():
            raise RuntimeError("a stream cannot be left from inside its own step; raise ToolAbort(…) to end the call")
        begun, self._done = self._ended is not None and (not self._done or self._taken_by is not None), True
        self._has_no_reader()
        if begun and self._steps is not None and self._loop is not None:
            closing = self._leave()
            if self._loop is asyncio.get_running_loop():
                await closing
            else:
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(closing, self._loop))

    async def _leave(self) -> None:
        if self._taken_by is not None:
            if self._left is None:
                self._left, self._interrupted = asyncio.Event(), not self._closing
                if self._interrupted:
                    self._taken_by.cancel()
            await self._left.wait()
        await self._close()

    async def _close(self) -> None:
        assert self._steps is not None
        self._closing = True
        self._has_no_reader()
        try:
            await InContext(self._context, self._steps.aclose())
        finally:
            self._end()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if self._done or self._ended is None or self._loop is None or self._loop.is_closed():
            return
        # Dropped half-way: what it holds is given back on its own loop.
        self._has_no_reader()
        closing = self._close()
        try:
            self._loop.call_soon_threadsafe(_spawn, self._loop, closing)
        except RuntimeError:  # the loop was closed at this moment
            closing.close()


_closing: set[asyncio.Task[None]] = set()


def _spawn(loop: asyncio.AbstractEventLoop, closing: Coroutine[Any, Any, None]) -> None:
    task = loop.create_task(closing)
    _closing.add(task)
    task.add_done_callback(_closing.discard)


class EventStream(ServiceStream[ServiceEvent], TokenStream):
    """The `TokenStream` that a service method returns."""


def iterate(stream: ServiceStream[T], runner: CallerRunner, loop: asyncio.AbstractEventLoop, what: str) -> Iterator[T]:
    """The items of `stream`, on a thread without an event loop, which serves its blocking tools while it waits.

    The steps are taken on `loop`. Raises `BlockingCallNotAllowedError` on a thread that runs an event loop.
    """
    refuse_on_event_loop(what)
    return _iterate(stream, runner, loop)


def _iterate(stream: ServiceStream[T], runner: CallerRunner, loop: asyncio.AbstractEventLoop) -> Iterator[T]:
    begun = False
    try:
        while True:
            begun = True
            try:
                step = asyncio.run_coroutine_threadsafe(stream.step(caller_here()), loop)
                item = runner.wait_for(given_up_with_outer(step))
            except StopAsyncIteration:
                return
            yield item
    finally:
        if begun:
            left = asyncio.run_coroutine_threadsafe(stream.aclose(), loop)
            if not on_event_loop():  # the garbage collector drops it on whatever thread it runs
                runner.wait_for(left)
