"""Closes the beans of a scope, newest first, also after failures and while the task is cancelled.

A `Closer` closes one bean: it calls `stop()`, or runs the code after a producer's `yield`. Async closers run on the
loop that created the bean. Not here: which beans a scope holds (`scopes`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any

from ..execution.cancellation import Patience, shielded
from ..execution.threads import running_loop

# --- closing one bean


@dataclass(slots=True, eq=False)  # equal to itself only, so that a list removes it in one step
class Closer:
    """Closes one bean with `close(target, error)`; if `loop` is set, the result must be awaited on that loop.

    `key` is the key of the bean in `store`, from which it is removed first; None for a dependent `bean`. `around` is an
    anyio scope in which the producer has opened another one, which is still open. `begun` is called with the closer
    when it begins.
    """

    close: Callable[[Any, BaseException | None], Any]
    target: Any
    store: dict[int, Any]
    key: int | None = None
    loop: asyncio.AbstractEventLoop | None = None
    bean: Any = None
    around: Any = None
    begun: Callable[[Closer], object] | None = None

    def begin(self, error: BaseException | None) -> Any:
        """Close the bean. If `loop` is set, return an awaitable that closes it."""
        if self.key is not None:
            self.store.pop(self.key, None)
        if self.begun is not None:
            self.begun(self)
        return self.close(self.target, error)


def stop(bean: Any, error: BaseException | None) -> None:
    """Call the bean's `stop()`."""
    bean.stop()


async def stop_async(bean: Any, error: BaseException | None) -> None:
    """Await the bean's `stop()`."""
    await bean.stop()


def finish(generator: Generator[Any, None, None], error: BaseException | None) -> None:
    """Run the code after a producer's `yield`; raise `error` at the `yield`."""
    try:
        if error is None:
            next(generator)
        else:
            generator.throw(error)
    except StopIteration:
        return
    except BaseException as raised:
        if not _is_the_same(raised, error):
            raise
        return
    generator.close()
    raise _yielded_twice(generator)


async def finish_async(generator: AsyncGenerator[Any, None], error: BaseException | None) -> None:
    """Run the code after an async producer's `yield`; raise `error` at the `yield`."""
    try:
        if error is None:
            await anext(generator)
        else:
            await generator.athrow(error)
    except StopAsyncIteration:
        return
    except BaseException as raised:
        if not _is_the_same(raised, error):
            raise
        return
    await generator.aclose()
    raise _yielded_twice(generator)


def _is_the_same(raised: BaseException, error: BaseException | None) -> bool:
    """Return True if `raised` is the error thrown into a generator; Python wraps `StopIteration`."""
    is_wrapped = isinstance(error, (StopIteration, StopAsyncIteration)) and isinstance(raised, RuntimeError)
    return raised is error or (is_wrapped and raised.__cause__ is error)


def yielded_nothing(generator: Any) -> RuntimeError:
    """Return the error for a producer that ended without a yield."""
    return RuntimeError(f"{generator.__qualname__} did not yield; a producer must yield exactly once")


def _yielded_twice(generator: Any) -> RuntimeError:
    return RuntimeError(f"{generator.__qualname__} yielded a second time; a producer must yield exactly once")


# --- closing several beans, newest first


def close_on_this_thread(closers: list[Closer], error: BaseException | None, failures: list[BaseException]) -> None:
    """Close beans, newest first, up to the first that needs `await`. Append their errors to `failures`."""
    while closers and closers[-1].loop is None:
        closer = closers.pop()
        try:
            closer.begin(error)
        except BaseException as failure:
            failures.append(failure)


async def close_awaiting(
    closers: list[Closer], error: BaseException | None, failures: list[BaseException], seconds: float
) -> None:
    """Close all beans. If the task is cancelled during this, finish first, then raise the cancellation.

    Closing may take `seconds` after the cancellation. Then it is cancelled as well.
    """
    async with Patience(seconds) as patience:
        while closers:
            close_on_this_thread(closers, error, failures)
            if closers:
                await _close_one(closers.pop(), error, failures, patience)


async def _close_one(
    closer: Closer, error: BaseException | None, failures: list[BaseException], patience: Patience
) -> None:
    work = closer.begin(error)
    if closer.loop is not asyncio.get_running_loop() and closer.loop is not None:
        if not closer.loop.is_running():
            work.close()
            failures.append(RuntimeError(f"cannot close {closer.target!r}: the event loop that created it has ended"))
            return
        work = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, closer.loop))
    steps = shielded(work, closer.target, patience, closer.around)
    try:
        await steps
    except asyncio.CancelledError as cancellation:
        if not steps.is_given_up:
            failures.append(cancellation)
    except BaseException as failure:
        failures.append(failure)


def close_waiting(
    closers: list[Closer],
    error: BaseException | None,
    failures: list[BaseException],
    home: asyncio.AbstractEventLoop | None,
) -> None:
    """Close all beans and block this thread until then; async closers run on the loop that created the bean.

    The loop of this thread is blocked, so its beans are closed on the `home` loop.
    """
    here = running_loop()
    while closers:
        close_on_this_thread(closers, error, failures)
        if not closers:
            return
        closer = closers.pop()
        work = closer.begin(error)
        loop = home if closer.loop is here else closer.loop
        try:
            wait_on_loop(work, loop)
        except BaseException as failure:
            failures.append(failure)


def wait_on_loop(work: Awaitable[Any], loop: asyncio.AbstractEventLoop | None) -> None:
    """Await `work` on a loop that runs on another thread, or on a new one, and block this thread until then."""

    async def wait() -> None:
        await work

    if loop is not None and loop.is_running():
        asyncio.run_coroutine_threadsafe(wait(), loop).result()
    else:
        asyncio.run(wait())


def raise_failures(what: str, failures: list[BaseException]) -> None:
    """Raise an `ExceptionGroup` of the failures, if there are any."""
    if failures:
        raise BaseExceptionGroup(f"closing {what} failed", failures)


# --- producers with own_task=


class OwnTask:
    """Runs an async generator in one task from start to end, so that it can hold a cancel scope."""

    def __init__(self, generator: AsyncGenerator[Any, None]) -> None:
        self._generator = generator
        loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[Any] = loop.create_future()
        self._ending: asyncio.Future[BaseException | None] = loop.create_future()
        self._task = loop.create_task(self._live())

    async def open(self) -> Any:
        """Start the generator and return the value that it yields."""
        try:
            await asyncio.wait((self._opened, self._task), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._task.cancel()
            await asyncio.wait((self._task,))
            raise
        if not self._opened.done():
            self._task.result()
            raise yielded_nothing(self._generator)
        return self._opened.result()

    async def close(self, error: BaseException | None) -> None:
        """Finish the generator; raise `error` at its `yield`."""
        if not self._ending.done():
            self._ending.set_result(error)
        await self._task

    async def _live(self) -> None:
        try:
            value = await anext(self._generator)
        except StopAsyncIteration:
            return
        self._opened.set_result(value)
        error: BaseException | None
        try:
            error = await self._ending
        except asyncio.CancelledError as cancellation:  # by the producer's own scope, which must get it at its `yield`
            error = cancellation
        await finish_async(self._generator, error)


async def close_own_task(task: OwnTask, error: BaseException | None) -> None:
    """Finish a producer that runs in a separate task."""
    await task.close(error)
