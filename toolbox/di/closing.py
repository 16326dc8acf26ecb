"""Closes beans one at a time, newest first, also after failures and during cancellation.

Not here: which beans a scope has and when it ends (`scopes`).
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from typing import Any, NamedTuple

CANCELLATION_GRACE = 2.0
"""Seconds for which a bean that is being closed is protected from cancellation."""


class Closer(NamedTuple):
    """Closes one bean with `close(target, error)`; if `loop` is set, the result must be awaited on that loop.

    `key` is the key of the bean in `store`, from which it is removed first; None for a dependent bean.
    """

    close: Callable[[Any, BaseException | None], Any]
    target: Any
    store: dict[int, Any]
    key: int | None = None
    loop: asyncio.AbstractEventLoop | None = None

    def begin(self, error: BaseException | None) -> Any:
        """Close the bean. If `loop` is set, return an awaitable that closes it."""
        if self.key is not None:
            self.store.pop(self.key, None)
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


async def close_awaiting(closers: list[Closer], error: BaseException | None, failures: list[BaseException]) -> None:
    """Close all beans. If the task is cancelled during this, finish first, then raise the cancellation."""
    task = asyncio.current_task()
    cancelling = task.cancelling() if task is not None else 0
    held: asyncio.CancelledError | None = None
    while closers:
        close_on_this_thread(closers, error, failures)
        if closers:
            held = await _close_one(closers.pop(), error, failures) or held
    # A timeout inside a producer cancels the task too, and uncancels it.
    if held is not None and task is not None and task.cancelling() > cancelling:
        raise held


async def _close_one(
    closer: Closer, error: BaseException | None, failures: list[BaseException]
) -> asyncio.CancelledError | None:
    work = closer.begin(error)
    if closer.loop is not asyncio.get_running_loop() and closer.loop is not None:
        if not closer.loop.is_running():
            work.close()
            failures.append(RuntimeError(f"cannot close {closer.target!r}: the event loop that created it has ended"))
            return None
        work = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, closer.loop))
    steps = shielded(work)
    try:
        await steps
    except asyncio.CancelledError as cancellation:
        if steps.held is None:
            failures.append(cancellation)
    except BaseException as failure:
        failures.append(failure)
    return steps.held


def close_waiting(
    closers: list[Closer],
    error: BaseException | None,
    failures: list[BaseException],
    home: asyncio.AbstractEventLoop | None,
) -> None:
    """Close all beans and block this thread until then; async closers run on the loop that created the bean.

    The loop of this thread is blocked, so its beans are closed on the `home` loop.
    """
    here = asyncio._get_running_loop()
    while closers:
        close_on_this_thread(closers, error, failures)
        if not closers:
            return
        closer = closers.pop()
        work = closer.begin(error)
        loop = home if closer.loop is here else closer.loop
        try:
            if loop is not None and loop.is_running():
                asyncio.run_coroutine_threadsafe(work, loop).result()
            else:
                asyncio.run(work)
        except BaseException as failure:
            failures.append(failure)


def raise_failures(what: str, failures: list[BaseException]) -> None:
    """Raise an `ExceptionGroup` of the failures, if there are any."""
    if failures:
        raise BaseExceptionGroup(f"closing {what} failed", failures)


# --- cancellation


class shielded:  # noqa: N801 - reads as a verb: `await uninterrupted(work)`
    """Awaits `work` in this task to its end, even if the task is cancelled; `held` is the delayed cancellation.

    `asyncio.shield` would run `work` in another task, which cannot exit a cancel scope that a producer entered. A
    shielding anyio scope has the same problem. Cancellation is delayed by at most `CANCELLATION_GRACE`, because a
    timeout inside `work` cancels in the same way.
    """

    def __init__(self, work: Awaitable[None]) -> None:
        self._work = work
        self._until = 0.0
        self._was_cancelled = _is_cancelled_by_anyio()
        self.held: asyncio.CancelledError | None = None

    def __await__(self) -> Generator[Any, Any, None]:
        steps: Any = self._work.__await__()
        passed_on: asyncio.CancelledError | None = None
        while True:
            try:
                waiting = next(steps) if passed_on is None else steps.throw(passed_on)
            except StopIteration:
                return
            passed_on = None
            if waiting is None or not hasattr(waiting, "_asyncio_future_blocking"):
                try:
                    yield waiting
                except asyncio.CancelledError as cancellation:
                    passed_on = cancellation if self._lets_through(cancellation) else None
                continue
            waiting._asyncio_future_blocking = False
            while not waiting.done():
                try:
                    yield from self._pause(waiting)
                except asyncio.CancelledError as cancellation:
                    if self._lets_through(cancellation):
                        waiting.cancel(*cancellation.args)
                else:
                    if self.held is not None and not waiting.done():  # the grace is over
                        waiting.cancel(*self.held.args)

    def _lets_through(self, cancellation: asyncio.CancelledError) -> bool:
        now = asyncio.get_running_loop().time()
        if self.held is None:
            self._until = now + CANCELLATION_GRACE
        self.held = cancellation
        # A scope that is cancelled only now was entered by `work`, for example for a timeout.
        return now >= self._until or (not self._was_cancelled and _is_cancelled_by_anyio())

    def _pause(self, waiting: asyncio.Future[Any]) -> Generator[Any, Any, None]:
        """Wait for a future through a second one, which absorbs cancellation; at most until the grace ends."""
        loop = asyncio.get_running_loop()
        stand_in: asyncio.Future[None] = loop.create_future()

        def wake(_: object = None) -> None:
            if not stand_in.done():
                stand_in.set_result(None)

        waiting.add_done_callback(wake)
        timer = loop.call_at(self._until, wake) if self.held is not None and loop.time() < self._until else None
        try:
            yield from stand_in
        finally:
            waiting.remove_done_callback(wake)
            if timer is not None:
                timer.cancel()


def _is_cancelled_by_anyio() -> bool:
    """Return True if an enclosing anyio cancel scope is cancelled; False if anyio is not loaded."""
    anyio = sys.modules.get("anyio")
    return anyio is not None and bool(anyio.current_effective_deadline() == -math.inf)


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
        error = await self._ending
        await finish_async(self._generator, error)


async def close_own_task(task: OwnTask, error: BaseException | None) -> None:
    """Finish a producer that runs in a separate task."""
    await task.close(error)
