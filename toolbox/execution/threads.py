"""Threads of a container: a bounded pool, new threads, executors, and an event loop for programs without one.

All of them are daemon threads, so a tool that never returns does not keep the process alive.
Not here: the choice for each call (`runners`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent import futures
from concurrent.futures import CancelledError as FutureCancelled
from concurrent.futures import Executor, Future
from contextlib import suppress
from contextvars import ContextVar
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeAlias, TypeVar
from weakref import WeakSet

from ..errors import BlockingCallNotAllowedError, IllegalConfigurationError, Problem
from .cancellation import OwnCode
from .markers import Execution, awaitable_of

logger = logging.getLogger("toolbox.execution")

T = TypeVar("T")

Finish: TypeAlias = Callable[[BaseException | None], Awaitable[None]]
"""Runs on the event loop after a call; the argument is the exception of the call, or None."""


# --- after a fork


class Forkable(Protocol):
    """Holds threads, locks, event loops or connections, which do not work in a forked process."""

    def renew_after_fork(self) -> None:
        """Drop everything that belongs to the parent process. Closes nothing: the parent still uses it."""
        ...


FORKED = "the container was started before this process was forked, and runs in the parent only"
"""Reason why a container of the parent does not count as started in a forked process."""

_forkables: WeakSet[Forkable] = WeakSet()
_inherited: list[object] = []

# A process uses an executor, also if its containers get new `Workers` at each start.
_used_executors: WeakSet[Executor] = WeakSet()
_dead_executors: WeakSet[Executor] = WeakSet()  # used before the fork: their threads exist only in the parent


def register_for_fork(holder: Forkable) -> None:
    """Call `holder.renew_after_fork()` in each process forked from this one, while `holder` is alive."""
    _forkables.add(holder)


def keep_inherited(*things: object) -> None:
    """Keep objects of the parent process alive, so that their finalizers do not close them in this process."""
    _inherited.extend(things)


def _after_fork_in_child() -> None:
    _dead_executors.update(_used_executors)
    _used_executors.clear()
    for each in list(_forkables):
        each.renew_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


# --- threads and their names


thread_watcher: ContextVar[Callable[[str, str], None] | None] = ContextVar("toolbox.thread_watcher", default=None)
"""Called on each thread that runs a call, with the label of the call and the usual name of the thread."""


def run_labelled(call: Callable[[], T], label: str, *, rename: bool) -> T:
    """Return `call()`. If `rename` is true, the thread is named `label` during the call."""
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


_UNNAMED = re.compile(r"MainThread|Thread-\d+.*|asyncio_\d+|AnyIO worker thread")
"""The names of threads that Python, asyncio and anyio give."""


def has_own_name(thread: threading.Thread) -> bool:
    """Return True if a thread has a name that somebody chose, such as that of a user's executor."""
    return _UNNAMED.fullmatch(thread.name) is None


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that this thread runs, or None."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def on_event_loop() -> bool:
    """Return True on a thread that runs an event loop."""
    return running_loop() is not None


def call_on(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: Any) -> None:
    """Call a function at once on the thread of `loop`, and soon from another thread; not if the loop is closed."""
    if running_loop() is loop:
        function(*arguments)
        return
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(function, *arguments)


async def await_on(loop: asyncio.AbstractEventLoop, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Await `work()` on a loop that runs on another thread, with the context variables of the caller.

    Returns its result, and raises its error. A cancellation of the caller cancels the work, and is raised when the work
    has ended, as if the caller had awaited it here. Raises `RuntimeError` if the loop is closed.
    """
    here = asyncio.get_running_loop()
    ended = here.create_future()
    task: asyncio.Task[T] | None = None
    cancellation: asyncio.CancelledError | None = None
    is_cancelling = False

    def begin() -> None:
        nonlocal task
        task = loop.create_task(work())
        task.add_done_callback(lambda _: call_on(here, ended.set_result, None))

    def cancel(message: Any = None) -> None:
        nonlocal is_cancelling
        is_cancelling = False
        if task is not None:
            task.cancel(message)

    loop.call_soon_threadsafe(begin)
    while not ended.done():
        try:
            await asyncio.wait((ended,))
        except asyncio.CancelledError as error:
            cancellation = error
            if is_cancelling:  # anyio cancels again in each iteration of its loop
                continue
            is_cancelling = True
            try:
                loop.call_soon_threadsafe(cancel, *error.args[:1])
            except RuntimeError:  # the loop is closed, and the work with it
                raise error from None
    assert task is not None
    if cancellation is not None and task.cancelled():
        raise cancellation
    return task.result()


def refuse_on_event_loop(what: str) -> None:
    """Raise `BlockingCallNotAllowedError` on a thread that runs an event loop."""
    if on_event_loop():
        raise BlockingCallNotAllowedError(what)


# --- a loop in a thread


class LoopThread:
    """An event loop in a separate thread, for programs without one."""

    def __init__(self, name: str = "toolbox-loop") -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self.loop: asyncio.AbstractEventLoop = asyncio.new_event_loop()

    def start(self) -> None:
        """Start the thread and wait until its loop runs. Closes the loop if no thread can be started."""
        running = threading.Event()

        def work() -> None:
            asyncio.set_event_loop(self.loop)
            self.loop.call_soon(running.set)
            while True:
                try:
                    return self.loop.run_forever()
                except (SystemExit, KeyboardInterrupt):
                    continue  # raised by a task: its caller receives it, other tasks continue

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

        Raises `TimeoutError` and cancels the coroutine after `timeout` seconds.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout)
        except BaseException:
            future.cancel()
            raise

    def answers(self, timeout: float) -> bool:
        """Return True if the loop responds within `timeout` seconds."""
        answered = threading.Event()
        self.loop.call_soon_threadsafe(answered.set)
        return answered.wait(timeout)

    def stop(self, timeout: float = 10.0) -> None:
        """Cancel all tasks of the loop, wait for them, end the thread and close the loop.

        Tasks that ignore their cancellation and code that blocks the loop are abandoned after `timeout` seconds.
        """
        if self._thread is None:
            self.loop.close()
            return
        try:
            self.run(_cancel_all_tasks(timeout), timeout + 1.0)
        except TimeoutError:
            logger.error("the event loop of thread %s is blocked; the program ends without stopping it", self._name)
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
            logger.error("abandoned a task that ignores its cancellation: %r", task)
    await asyncio.get_running_loop().shutdown_asyncgens()


# --- worker threads


_Job: TypeAlias = "tuple[Future[Any], Callable[[], Any]]"


class _Pool:
    """Up to `size` daemon threads that share one queue.

    A thread is started if there are more jobs than threads. If none can be started, the job waits for another thread of
    the pool. If the pool has no threads, the job is rejected.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._jobs: list[None] = []  # one entry per job that is queued or running; adding and removing are atomic
        self._starting = threading.Lock()
        self._threads = 0

    @property
    def is_full(self) -> bool:
        """Return True if another job would have to wait."""
        return len(self._jobs) >= self._size

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue `work`. Raises the error of `Thread.start` if the pool cannot start its first thread."""
        future: Future[T] = Future()
        with self._starting:
            if len(self._jobs) >= self._threads and self._threads < self._size:
                try:
                    self._start_thread()
                except Exception as error:
                    if not self._threads:
                        raise
                    logger.warning("cannot start another thread; the call waits for a thread of the pool: %s", error)
            self._jobs.append(None)
            self._queue.put((future, work))
        return future

    def _start_thread(self) -> None:
        name = f"toolbox-pool_{self._threads}"
        threading.Thread(target=_serve, args=(self._queue, self._jobs), name=name, daemon=True).start()
        self._threads += 1

    def shutdown(self) -> None:
        """Cancel waiting jobs, and end each thread after its current job."""
        while True:
            try:
                job = self._queue.get_nowait()
            except Empty:
                break
            if job is not None:
                job[0].cancel()
                job[0].set_running_or_notify_cancel()
                self._jobs.pop()
        for _ in range(self._threads):
            self._queue.put(None)

    def __del__(self) -> None:
        for _ in range(self._threads):  # threads that have ended do not read theirs
            self._queue.put(None)


def _serve(queue: SimpleQueue[_Job | None], jobs: list[None]) -> None:
    """Run the jobs of a pool on one of its threads. Holds no reference to the pool, so that it can be collected."""
    while (job := queue.get()) is not None:
        settle(*job, before=jobs.pop)
        del job  # do not keep it alive while waiting for the next one


class _FreshThreads:
    """Runs each job on a new thread, at most `limit` at a time; other jobs wait."""

    def __init__(self, limit: int) -> None:
        self._limit, self._running = limit, 0
        self._waiting: deque[_Job] = deque()
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` on a new thread. The future fails if no thread can be started."""
        future: Future[T] = Future()
        with self._lock:
            if self._running >= self._limit:
                self._waiting.append((future, work))
                return future
            self._running += 1
        self._start((future, work))
        return future

    def _start(self, job: _Job | None) -> None:
        """Start a thread for a job that has a slot. If that fails, the next job gets the slot."""
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
        """Return the next job for a free slot, or None after releasing the slot."""
        with self._lock:
            while self._waiting:
                job = self._waiting.popleft()
                if not job[0].cancelled():
                    return job
                job[0].set_running_or_notify_cancel()
            self._running -= 1
            return None

    def stop(self) -> None:
        """Cancel waiting jobs."""
        with self._lock:
            waiting, self._waiting = self._waiting, deque()
        for future, _ in waiting:
            future.cancel()
            future.set_running_or_notify_cancel()


class Workers:
    """The threads of one container: a bounded pool, a limited number of new threads, and the given executors.

    `executors` maps names to `concurrent.futures.Executor` objects. They belong to the caller and are not shut down
    here. In a forked process, the pool and the new threads start again; executors used before the fork are rejected.
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
        self._warned: set[str] = set()
        self._begin()
        register_for_fork(self)

    def _begin(self) -> None:
        self.pool, self.threads = _Pool(self._pool_size), _FreshThreads(self._thread_limit)
        self._finishing: set[asyncio.Task[None]] = set()
        self._abandoned: dict[Future[Any], str] = {}

    def renew_after_fork(self) -> None:
        """Begin with new threads: those of the parent process do not exist here."""
        keep_inherited(self.pool, self.threads, self._finishing, self._abandoned)
        self._begin()

    def executor(self, execution: Execution) -> Executor | None:
        """Return the executor of an `EXECUTOR` execution, or None for an unknown name."""
        if isinstance(execution.executor, str):
            return self._executors.get(execution.executor)
        return execution.executor

    @property
    def is_full(self) -> bool:
        """Return True if another call would have to wait for the pool."""
        return self.pool.is_full

    @property
    def abandoned(self) -> list[str]:
        """The labels of abandoned calls: their caller stopped waiting, and their thread still runs."""
        return list(self._abandoned.values())

    def submit_to_executor(self, executor: Executor, label: str, work: Callable[..., T], *args: Any) -> Future[T]:
        """Run `work(*args)` on a user's executor.

        Raises `IllegalConfigurationError` if the executor was used before this process was forked: its threads exist
        only in the parent, so it would never run anything here.
        """
        try:
            if executor in _dead_executors:
                raise IllegalConfigurationError([_dead_executor(label)])
            _used_executors.add(executor)
        except TypeError:  # an executor of another library without support for weak references
            pass
        return executor.submit(work, *args)

    async def outcome(self, future: Future[Any], label: str, finish: Finish | None) -> Any:
        """Wait for a call on a thread and then await `finish`, also if waiting is cancelled.

        If the call returned an awaitable, it is awaited here, before `finish`.
        """
        waiting = asyncio.wrap_future(future)
        try:
            value = await waiting
        except asyncio.CancelledError as error:
            if not waiting.cancelled() and isinstance(raised := _raised_by(future), FutureCancelled):
                if finish is not None:
                    await finish(raised)
                raise raised from raised.__cause__
            # Either the call never starts, or it has already ended, or its thread continues without us.
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
        if (awaited := awaitable_of(value)) is not None:
            return await finished(awaited, finish)
        if finish is not None:
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
            except RuntimeError:  # the loop is closed, so `finish` cannot run
                self._abandoned.pop(future, None)

        future.add_done_callback(left)

    def warn_if_slow(self, label: str, began: float) -> None:
        """Log a warning, once per `label`, if a call that began at `began` blocked the loop for too long."""
        took = time.perf_counter() - began
        if took > self.slow_call_warning and label not in self._warned:
            self._warned.add(label)
            logger.warning(
                "%s is @non_blocking and blocked the event loop for %.3f s; mark it @blocking or make it `async def`",
                label,
                took,
            )

    async def stop(self, timeout: float) -> list[str]:
        """Wait up to `timeout` seconds for abandoned calls; return the labels of those that still run."""
        end_by = time.monotonic() + timeout
        ends = [asyncio.wrap_future(_shadow(future)) for future in list(self._abandoned)]
        if ends:
            await asyncio.wait(ends, timeout=timeout)
            await asyncio.sleep(0)
        if self._finishing:
            await asyncio.wait(set(self._finishing), timeout=max(end_by - time.monotonic(), 0.1))
        self.threads.stop()
        self.pool.shutdown()
        self.pool = _Pool(self._pool_size)
        return self.abandoned

    def wait_for_abandoned(self, timeout: float) -> list[str]:
        """Wait like `stop`, on a thread without an event loop; return the labels of the calls that still run."""
        futures.wait(list(self._abandoned), timeout)
        return [label for future, label in list(self._abandoned.items()) if not future.done()]


async def finished(value: Awaitable[T], finish: Finish | None) -> T:
    """Return the awaited value of a call, after `finish`, also if it fails."""
    try:
        result = await OwnCode(value)
    except BaseException as error:
        if finish is not None:
            await finish(error)
        raise
    if finish is not None:
        await finish(None)
    return result


def _dead_executor(label: str) -> Problem:
    return Problem(
        label,
        "its executor was used before this process was forked, and its threads exist only in the parent",
        "create the executor in each process, after the fork",
    )


def _raised_by(future: Future[Any]) -> BaseException | None:
    return future.exception() if future.done() and not future.cancelled() else None


def _shadow(future: Future[Any]) -> Future[None]:
    """Return a future that ends with `future` and can be cancelled without cancelling `future`."""
    shadow: Future[None] = Future()
    future.add_done_callback(lambda _: shadow.set_result(None) if shadow.set_running_or_notify_cancel() else None)
    return shadow


def settle(future: Future[T], work: Callable[[], T], before: Callable[[], object] | None = None) -> None:
    """Run `work` for `future` unless it was cancelled. `before` is called before the result is set."""
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
        logger.exception("cannot close the scope of %s, whose invocation ended earlier", label)
