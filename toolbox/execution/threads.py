"""The threads of a container: a bounded pool, fresh threads, its executors, and an event loop where none runs.

Not here: which of them a call gets (`runners`).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import CancelledError as FutureCancelled
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, TypeAlias, TypeVar

from ..errors import BlockingCallNotAllowedError
from .markers import Execution

logger = logging.getLogger("toolbox.execution")

T = TypeVar("T")

Finish: TypeAlias = Callable[[BaseException | None], Awaitable[None]]
"""What follows a call on the loop; it is told how the call ended."""


thread_watcher: ContextVar[Callable[[str, str], None] | None] = ContextVar("toolbox.thread_watcher", default=None)
"""Told, on each thread that a call is run on, the call's label and what the thread is called otherwise."""


def named(call: Callable[[], T], label: str) -> T:
    """`call()`, with the thread carrying `label` as its name."""
    thread = threading.current_thread()
    name, thread.name = thread.name, label
    if (watcher := thread_watcher.get()) is not None:
        watcher(label, name)
    try:
        return call()
    finally:
        thread.name = name


def on_event_loop() -> bool:
    """Whether this thread is running an event loop."""
    return asyncio._get_running_loop() is not None


def refuse_on_event_loop(what: str) -> None:
    """Raises `BlockingCallNotAllowedError` on a thread that runs an event loop."""
    if on_event_loop():
        raise BlockingCallNotAllowedError(what)


class LoopThread:
    """An event loop in a thread of its own, for programs that run none."""

    def __init__(self, name: str = "toolbox-loop") -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self.loop: asyncio.AbstractEventLoop = asyncio.new_event_loop()

    def start(self) -> None:
        """Starts the thread; its loop runs when this returns."""
        running = threading.Event()

        def work() -> None:
            asyncio.set_event_loop(self.loop)
            self.loop.call_soon(running.set)
            while True:
                try:
                    return self.loop.run_forever()
                except (SystemExit, KeyboardInterrupt):
                    continue  # raised by a task, whose caller gets it; all others go on

        self._thread = threading.Thread(target=work, name=self._name, daemon=True)
        self._thread.start()
        running.wait()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs `coroutine` on the loop, in the caller's context, and waits for its result on this thread."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Cancels what still runs on the loop, waits for it, ends the thread and closes the loop."""
        if self._thread is None:
            self.loop.close()
            return
        self.run(_wind_up())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


async def _wind_up() -> None:
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


class Workers:
    """The threads of one container: a bounded pool, fresh threads within a limit, and the executors it was given.

    `executors` maps names to `concurrent.futures.Executor`s, which stay their owner's: they are not shut down here.
    """

    def __init__(
        self,
        *,
        pool_size: int = 32,
        thread_limit: int = 256,
        executors: Mapping[str, Executor] | None = None,
        slow_call_warning: float = 0.1,
    ) -> None:
        self.pool_size, self.slow_call_warning = pool_size, slow_call_warning
        self._executors = dict(executors or {})
        self._threads = threading.Semaphore(thread_limit)
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._pooled = 0
        self._warned: set[str] = set()
        self._finishing: set[asyncio.Task[None]] = set()
        self._abandoned: dict[Future[Any], str] = {}

    def executor(self, execution: Execution) -> Executor | None:
        """The executor that an `EXECUTOR` execution means; None when there is none of its name."""
        if isinstance(execution.executor, str):
            return self._executors.get(execution.executor)
        return execution.executor

    @property
    def is_full(self) -> bool:
        """Whether a further call to the pool would have to wait."""
        return self._pooled >= self.pool_size

    @property
    def abandoned(self) -> list[str]:
        """The labels of the calls that nobody waits for any more and whose threads have not left them yet."""
        return list(self._abandoned.values())

    def submit_to_pool(self, work: Callable[[], T]) -> Future[T]:
        """Runs `work` on a thread of the pool, when one is free."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.pool_size, thread_name_prefix="toolbox-pool")
            self._pooled += 1
        future = self._pool.submit(work)
        future.add_done_callback(self._left_pool)
        return future

    def _left_pool(self, _: object) -> None:
        with self._lock:
            self._pooled -= 1

    def submit_to_thread(self, work: Callable[[], T]) -> Future[T]:
        """Runs `work` on a fresh thread, when fewer than the limit are running."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                if future.set_running_or_notify_cancel():
                    settle(future, work)
            finally:
                self._threads.release()

        def start() -> None:
            threading.Thread(target=run, name="toolbox-thread", daemon=True).start()

        def wait_and_start() -> None:
            # Only a thread can wait for a place without holding up the loop; the pool has them.
            self._threads.acquire()
            start()

        if self._threads.acquire(blocking=False):
            start()
        else:
            self.submit_to_pool(wait_and_start)
        return future

    async def outcome(self, future: Future[T], label: str, finish: Finish | None) -> T:
        """Waits for a call on a thread, and lets `finish` follow it, also when the waiting is cancelled."""
        waiting = asyncio.wrap_future(future)
        try:
            value = await waiting
        except asyncio.CancelledError as error:
            if not waiting.cancelled() and isinstance(raised := _raised_by(future), FutureCancelled):
                if finish is not None:
                    await finish(raised)
                raise raised from raised.__cause__
            # Either the call never starts, or it has ended itself, or its thread goes on without us.
            if future.cancel() or future.done():
                if finish is not None:
                    await finish(error)
            else:
                self._abandon(future, label, finish)
            raise
        except BaseException as error:
            if finish is not None:
                await finish(error)
            raise
        if finish is not None and not inspect.isawaitable(value):
            await finish(None)
        return value

    def _abandon(self, future: Future[Any], label: str, finish: Finish | None) -> None:
        loop = asyncio.get_running_loop()
        self._abandoned[future] = label

        def begin() -> None:
            self._abandoned.pop(future, None)
            if finish is not None:
                task = loop.create_task(_finish_quietly(finish, future, label))
                self._finishing.add(task)
                task.add_done_callback(self._finishing.discard)

        def left(_: object) -> None:
            try:
                loop.call_soon_threadsafe(begin)
            except RuntimeError:  # the loop is closed: nobody is left to finish anything
                self._abandoned.pop(future, None)

        future.add_done_callback(left)

    def warn_if_slow(self, label: str, began: float) -> None:
        """Warns once for each `label` when a call that began then held the loop for long."""
        took = time.perf_counter() - began
        if took > self.slow_call_warning and label not in self._warned:
            self._warned.add(label)
            logger.warning(
                "%s is @non_blocking and held the event loop for %.3f s; mark it @blocking or make it `async def`",
                label,
                took,
            )

    async def stop(self, timeout: float) -> list[str]:
        """Waits up to `timeout` seconds for the threads to be left; returns the labels of the calls that go on."""
        ends = [asyncio.wrap_future(_shadow(future)) for future in list(self._abandoned)]
        if ends:
            await asyncio.wait(ends, timeout=timeout)
            await asyncio.sleep(0)
        if self._finishing:
            await asyncio.wait(set(self._finishing), timeout=timeout)
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
        return self.abandoned


def _raised_by(future: Future[Any]) -> BaseException | None:
    return future.exception() if future.done() and not future.cancelled() else None


def _shadow(future: Future[Any]) -> Future[None]:
    """A future that ends when `future` does, and that may be cancelled without cancelling it."""
    shadow: Future[None] = Future()
    future.add_done_callback(lambda _: shadow.set_result(None) if shadow.set_running_or_notify_cancel() else None)
    return shadow


def settle(future: Future[T], work: Callable[[], T]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)


async def _finish_quietly(finish: Finish, future: Future[Any], label: str) -> None:
    try:
        await finish(future.exception())
    except Exception:
        logger.exception("closing the scope of %s, whose invocation had ended before it, failed", label)
