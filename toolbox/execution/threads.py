"""The threads of a container: a bounded pool, fresh threads, its executors, and an event loop where none runs.

All of them are daemon threads: a tool that never returns does not keep the process alive. Not here: which of them a
call gets (`runners`).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent import futures
from concurrent.futures import CancelledError as FutureCancelled
from concurrent.futures import Executor, Future
from contextvars import ContextVar
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeAlias, TypeVar
from weakref import WeakSet

from ..errors import BlockingCallNotAllowedError, IllegalConfigurationError, Problem
from .markers import Execution

logger = logging.getLogger("toolbox.execution")

T = TypeVar("T")

Finish: TypeAlias = Callable[[BaseException | None], Awaitable[None]]
"""Follows a call, on the loop; its argument is what the call raised, or None."""


# --- after a fork


class Forkable(Protocol):
    """Holds threads, locks, loops or connections, none of which work in a forked process."""

    def renew_after_fork(self) -> None:
        """Forgets, in the new process, what belongs to the parent. Closes nothing: the parent still uses it."""
        ...


FORKED = "the container was started before this process was forked, and runs in the parent only"
"""Why a container is not started in a forked process."""

_forkables: WeakSet[Forkable] = WeakSet()
_inherited: list[object] = []


def renewed_after_fork(holder: Forkable) -> None:
    """Calls `holder.renew_after_fork()` in each process that is forked from this one, as long as `holder` lives."""
    _forkables.add(holder)


def keep_inherited(*things: object) -> None:
    """Keeps what belongs to the parent process from being finalized, and so closed, in this one."""
    _inherited.extend(things)


def _after_fork_in_child() -> None:
    for each in list(_forkables):
        each.renew_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


# --- threads and their names


thread_watcher: ContextVar[Callable[[str, str], None] | None] = ContextVar("toolbox.thread_watcher", default=None)
"""Called on each thread that runs a call, with the call's label and the thread's usual name."""


def run_labelled(call: Callable[[], T], label: str, *, rename: bool) -> T:
    """Call `call()`; meanwhile the thread is called `label` if `rename` is true."""
    thread = threading.current_thread()
    name = thread.name
    if (watcher := thread_watcher.get()) is not None:
        watcher(label, name)
    if not rename:
        return call()
    thread.name = label
    try:
        return call()
    finally:
        thread.name = name


def is_of_an_executor(thread: threading.Thread) -> bool:
    """Return True for a thread of a user's `ThreadPoolExecutor`: this library makes none.

    asyncio's default executor is nobody's own, and the names of its threads say nothing.
    """
    # Nothing public tells; the executor's own list of threads may not have its newest yet.
    work = getattr(sys.modules.get("concurrent.futures.thread"), "_worker", None)
    is_worker = work is not None and getattr(thread, "_target", None) is work
    return is_worker and not thread.name.startswith("asyncio_")


def on_event_loop() -> bool:
    """Return True on a thread that runs an event loop."""
    return asyncio._get_running_loop() is not None


def refuse_on_event_loop(what: str) -> None:
    """Raise `BlockingCallNotAllowedError` on a thread that runs an event loop."""
    if on_event_loop():
        raise BlockingCallNotAllowedError(what)


# --- a loop in a thread


class LoopThread:
    """An event loop in a thread of its own, for programs that run none."""

    def __init__(self, name: str = "toolbox-loop") -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self.loop: asyncio.AbstractEventLoop = asyncio.new_event_loop()

    def start(self) -> None:
        """Start the thread; its loop runs when this returns. Closes the loop if no thread can be started."""
        running = threading.Event()

        def work() -> None:
            asyncio.set_event_loop(self.loop)
            self.loop.call_soon(running.set)
            while True:
                try:
                    return self.loop.run_forever()
                except (SystemExit, KeyboardInterrupt):
                    continue  # raised by a task, whose caller gets it; all others go on

        thread = threading.Thread(target=work, name=self._name, daemon=True)
        try:
            thread.start()
        except BaseException:
            self.loop.close()
            raise
        self._thread = thread
        running.wait()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run `coroutine` on the loop, in the caller's context, and wait for its result on this thread.

        Raises `TimeoutError` after `timeout` seconds; then the coroutine is cancelled.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout)
        except BaseException:
            future.cancel()
            raise

    def answers(self, timeout: float) -> bool:
        """Return True if the loop takes a step within `timeout` seconds: nothing blocks it."""
        answered = threading.Event()
        self.loop.call_soon_threadsafe(answered.set)
        return answered.wait(timeout)

    def stop(self, timeout: float = 10.0) -> None:
        """Cancel what still runs on the loop, wait for it, end the thread and close the loop.

        A task that ignores its cancellation, or code that blocks the loop, is left behind after `timeout` seconds.
        """
        if self._thread is None:
            self.loop.close()
            return
        try:
            self.run(_cancel_all_tasks(timeout), timeout + 1.0)
        except TimeoutError:
            logger.error("the event loop of thread %s is blocked; the program ends without it", self._name)
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


async def _cancel_all_tasks(timeout: float) -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        _, late = await asyncio.wait(others, timeout=timeout)
        for task in late:
            logger.error("a task ignores its cancellation, and is left behind: %r", task)
    await asyncio.get_running_loop().shutdown_asyncgens()


# --- worker threads


_Job: TypeAlias = "tuple[Future[Any], Callable[[], Any]]"


class _Load:
    """Counts the jobs of a pool that are queued or running."""

    __slots__ = ("jobs", "lock")

    def __init__(self) -> None:
        self.lock, self.jobs = threading.Lock(), 0

    def less(self) -> None:
        with self.lock:
            self.jobs -= 1


class _Pool:
    """Up to `size` daemon threads that share one queue.

    A thread is started when there are more jobs than threads. When none can be started, the job waits for another
    thread of the pool; if there is no other, it is refused.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._load = _Load()
        self._threads = 0

    @property
    def is_full(self) -> bool:
        """Return True if a further job has to wait."""
        return self._load.jobs >= self._size

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue `work`. Raises what `Thread.start` raises if the pool cannot start its first thread."""
        future: Future[T] = Future()
        with self._load.lock:
            if self._load.jobs >= self._threads and self._threads < self._size:
                try:
                    self._start_thread()
                except Exception as error:
                    if not self._threads:
                        raise
                    logger.warning("no thread could be started, so a call waits for one of the pool: %s", error)
            self._load.jobs += 1
            self._queue.put((future, work))
        return future

    def _start_thread(self) -> None:
        name = f"toolbox-pool_{self._threads}"
        threading.Thread(target=_serve, args=(self._queue, self._load), name=name, daemon=True).start()
        self._threads += 1

    def shutdown(self) -> None:
        """Cancel the jobs that wait, and end each thread when its job has ended."""
        while True:
            try:
                job = self._queue.get_nowait()
            except Empty:
                break
            if job is not None:
                job[0].cancel()
                job[0].set_running_or_notify_cancel()
                self._load.less()
        for _ in range(self._threads):
            self._queue.put(None)

    def __del__(self) -> None:
        for _ in range(self._threads):  # those that have ended already leave theirs unread
            self._queue.put(None)


def _serve(queue: SimpleQueue[_Job | None], load: _Load) -> None:
    """Run the jobs of a pool, on one of its threads. The thread does not hold the pool, which may be dropped."""
    while (job := queue.get()) is not None:
        settle(*job, before=load.less)
        del job  # not held while waiting for the next


class _FreshThreads:
    """A thread for each job, up to `limit` at once; further jobs wait for one of them to end."""

    def __init__(self, limit: int) -> None:
        self._limit, self._running = limit, 0
        self._waiting: deque[_Job] = deque()
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` on a fresh thread. The future fails if no thread can be started."""
        future: Future[T] = Future()
        with self._lock:
            if self._running >= self._limit:
                self._waiting.append((future, work))
                return future
            self._running += 1
        self._start((future, work))
        return future

    def _start(self, job: _Job | None) -> None:
        """Start a thread for a job that has its place; if that fails, the place goes to the next."""
        while job is not None:
            try:
                threading.Thread(target=self._run, args=job, name="toolbox-thread", daemon=True).start()
            except Exception as error:
                if job[0].set_running_or_notify_cancel():
                    job[0].set_exception(error)
                job = self._next()
            else:
                return

    def _run(self, future: Future[Any], work: Callable[[], Any]) -> None:
        settle(future, work, before=lambda: self._start(self._next()))

    def _next(self) -> _Job | None:
        """Return the job that gets a place that has become free; if there is none, give the place back."""
        with self._lock:
            while self._waiting:
                job = self._waiting.popleft()
                if not job[0].cancelled():
                    return job
                job[0].set_running_or_notify_cancel()
            self._running -= 1
            return None

    def stop(self) -> None:
        """Cancel the jobs that wait."""
        with self._lock:
            waiting, self._waiting = self._waiting, deque()
        for future, _ in waiting:
            future.cancel()
            future.set_running_or_notify_cancel()


class Workers:
    """The threads of one container: a bounded pool, fresh threads within a limit, and the executors it was given.

    `executors` maps names to `concurrent.futures.Executor`s, which stay their owner's: they are not shut down here. In
    a forked process the pool and the fresh threads begin again; executors used before the fork are refused.
    """

    def __init__(
        self,
        *,
        pool_size: int = 32,
        thread_limit: int = 256,
        executors: Mapping[str, Executor] | None = None,
        slow_call_warning: float = 0.1,
    ) -> None:
        self.slow_call_warning = slow_call_warning
        self._pool_size, self._thread_limit = pool_size, thread_limit
        self._executors = dict(executors or {})
        self._used: WeakSet[Executor] = WeakSet()
        self._dead: WeakSet[Executor] = WeakSet()
        self._warned: set[str] = set()
        self._begin()
        renewed_after_fork(self)

    def _begin(self) -> None:
        self._pool, self._fresh = _Pool(self._pool_size), _FreshThreads(self._thread_limit)
        self._finishing: set[asyncio.Task[None]] = set()
        self._abandoned: dict[Future[Any], str] = {}

    def renew_after_fork(self) -> None:
        """See `Forkable`."""
        keep_inherited(self._pool, self._fresh, self._finishing, self._abandoned)
        self._dead = WeakSet([*self._dead, *self._used])
        self._begin()

    def executor(self, execution: Execution) -> Executor | None:
        """Return the executor that an `EXECUTOR` execution means, None for an unknown name."""
        if isinstance(execution.executor, str):
            return self._executors.get(execution.executor)
        return execution.executor

    @property
    def is_full(self) -> bool:
        """Return True if a further call to the pool has to wait."""
        return self._pool.is_full

    @property
    def abandoned(self) -> list[str]:
        """The labels of the calls that nobody waits for any more and whose threads have not left them yet."""
        return list(self._abandoned.values())

    def submit_to_pool(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` on a thread of the pool, when one is free."""
        return self._pool.submit(work)

    def submit_to_thread(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` on a fresh thread, when fewer than the limit are running."""
        return self._fresh.submit(work)

    def submit_to_executor(self, executor: Executor, label: str, work: Callable[..., T], *args: Any) -> Future[T]:
        """Run `work(*args)` on a user's executor.

        Raises `IllegalConfigurationError` for one that was used before this process was forked: its threads or
        processes are the parent's, so it would never run anything here.
        """
        try:
            if executor in self._dead:
                raise IllegalConfigurationError([_dead_executor(label)])
            self._used.add(executor)
        except TypeError:  # an executor of another library, which has no weak references
            pass
        return executor.submit(work, *args)

    async def outcome(self, future: Future[T], label: str, finish: Finish | None) -> T:
        """Wait for a call on a thread, and let `finish` follow it, also when the waiting is cancelled."""
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
        """Warn once for each `label` when a call that began then held the loop for long."""
        took = time.perf_counter() - began
        if took > self.slow_call_warning and label not in self._warned:
            self._warned.add(label)
            logger.warning(
                "%s is @non_blocking and held the event loop for %.3f s; mark it @blocking or make it `async def`",
                label,
                took,
            )

    async def stop(self, timeout: float) -> list[str]:
        """Wait up to `timeout` seconds for the threads to end their calls; return the labels of those that go on."""
        end_by = time.monotonic() + timeout
        ends = [asyncio.wrap_future(_shadow(future)) for future in list(self._abandoned)]
        if ends:
            await asyncio.wait(ends, timeout=timeout)
            await asyncio.sleep(0)
        if self._finishing:
            await asyncio.wait(set(self._finishing), timeout=max(end_by - time.monotonic(), 0.1))
        self._fresh.stop()
        self._pool.shutdown()
        self._pool = _Pool(self._pool_size)
        return self.abandoned

    def wait_for_abandoned(self, timeout: float) -> list[str]:
        """Wait up to `timeout` seconds, on a thread without a loop; return the labels of the calls that go on."""
        futures.wait(list(self._abandoned), timeout)
        return [label for future, label in list(self._abandoned.items()) if not future.done()]


def _dead_executor(label: str) -> Problem:
    return Problem(
        label,
        "its executor was used before this process was forked, and its threads exist only in the parent",
        "make the executor in each process, after the fork",
    )


def _raised_by(future: Future[Any]) -> BaseException | None:
    return future.exception() if future.done() and not future.cancelled() else None


def _shadow(future: Future[Any]) -> Future[None]:
    """Return a future that ends when `future` does, and that may be cancelled without cancelling it."""
    shadow: Future[None] = Future()
    future.add_done_callback(lambda _: shadow.set_result(None) if shadow.set_running_or_notify_cancel() else None)
    return shadow


def settle(future: Future[T], work: Callable[[], T], before: Callable[[], object] | None = None) -> None:
    """Run `work` for `future`, unless that was cancelled. `before` is called before anybody sees the result."""
    if not future.set_running_or_notify_cancel():
        if before is not None:
            before()
        return
    try:
        value = work()
    except BaseException as error:
        if before is not None:
            before()
        future.set_exception(error)
    else:
        if before is not None:
            before()
        future.set_result(value)


async def _finish_quietly(finish: Finish, future: Future[Any], label: str) -> None:
    try:
        await finish(future.exception())
    except Exception:
        logger.exception("closing the scope of %s, whose invocation had ended before it, failed", label)
