"""The streams that service methods return: each step is taken in the context of the call that made the stream.

A stream starts nothing before its first step, and is closed when it is left, dropped, or when its container stops.
Not here: what the steps do (`driver`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from contextvars import Context, copy_context
from typing import Any, Generic, Self, TypeVar, cast

from ..chat import ServiceEvent
from ..context import WhileCallerWaits, current_invocation
from ..execution import CallerRunner, refuse_on_event_loop
from .driver import Invocation, within
from .outputs import TokenStream

T = TypeVar("T")


_NOT_BEGUN = object()


class _InContext(Awaitable[T]):
    """Awaits a step, an awaitable that is its own iterator, with every piece of its code run in `context`.

    `asked` is what it waits for, when it has been begun already.
    """

    __slots__ = ("_asked", "_context", "_step")

    def __init__(self, context: Context, step: Any, asked: Any = _NOT_BEGUN) -> None:
        self._context, self._step, self._asked = context, step, asked

    def __await__(self) -> Generator[Any, Any, T]:
        run, step, asked = self._context.run, self._step, self._asked
        answer: Any = None
        error: BaseException | None = None
        while True:
            if asked is not _NOT_BEGUN:
                answer, error = None, None
                try:
                    answer = yield asked
                except BaseException as thrown:  # GeneratorExit too: the code inside decides what to do
                    error = thrown
            try:
                asked = run(step.send, answer) if error is None else run(step.throw, error)
            except StopIteration as stop:
                return cast("T", stop.value)


class ServiceStream(AsyncIterator[T], Generic[T]):
    """What a streaming service method returns; `aclose()`, or leaving `async with`, ends the call where it stands."""

    def __init__(self, begin: Callable[[], Invocation], read: Callable[[Invocation], AsyncGenerator[T, None]]) -> None:
        self._begin, self._read = begin, read
        self._context = copy_context()
        self._invocation: Invocation | None = None
        self._steps: AsyncGenerator[T, None] | None = None
        self._ended: Callable[[], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._done = False

    def __aiter__(self) -> ServiceStream[T]:
        return self

    async def __anext__(self) -> T:
        if self._done:
            raise StopAsyncIteration
        invocation = self._started()
        home = invocation.host.loop
        if home is None or home is asyncio.get_running_loop():
            return await self._step(invocation)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._step(invocation), home))

    def _started(self) -> Invocation:
        if self._invocation is None:
            self._invocation = invocation = self._context.run(self._begin)
            self._context.run(current_invocation.set, invocation.context)
            self._steps = self._context.run(self._read, invocation)
        return self._invocation

    async def _step(self, invocation: Invocation) -> T:
        assert self._steps is not None
        if self._ended is None:
            self._loop = asyncio.get_running_loop()
            self._ended = invocation.host.running.open_stream(self)
        step: Any = self._steps.__anext__()
        asked: Any = _NOT_BEGUN
        try:
            if invocation.deadline is None:
                # What is there already needs no watching: most pieces of a stream come several at a time.
                try:
                    asked = self._context.run(step.send, None)
                except StopIteration as stop:
                    return cast("T", stop.value)
            with WhileCallerWaits(), invocation.host.running.task(invocation.label):
                async with within(invocation):
                    return await _InContext(self._context, step, asked)
        except BaseException:
            await self._close()  # a limit may have passed between two steps
            raise

    def _end(self) -> None:
        self._done = True
        if self._ended is not None:
            self._ended()

    async def aclose(self) -> None:
        """Ends the call: its model's stream is closed, its tools are cancelled, nothing is remembered."""
        begun, self._done = self._ended is not None and not self._done, True
        if begun and self._steps is not None and self._loop is not None:
            closing = self._close()
            if self._loop is asyncio.get_running_loop():
                await closing
            else:
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(closing, self._loop))

    async def _close(self) -> None:
        assert self._steps is not None
        try:
            await _InContext(self._context, self._steps.aclose())
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
                item = runner.wait_for(asyncio.run_coroutine_threadsafe(_step_of(stream), loop))
            except StopAsyncIteration:
                return
            yield item
    finally:
        if begun:
            runner.wait_for(asyncio.run_coroutine_threadsafe(stream.aclose(), loop))


async def _step_of(stream: ServiceStream[T]) -> T:
    return await anext(stream)
