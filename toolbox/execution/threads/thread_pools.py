"""Runs jobs on daemon threads: on those of a bounded pool, or each on a new one.

Not here: which of them a call gets (`runners`), and who waits for it (`workers`).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias, TypeVar

logger = logging.getLogger("toolbox.execution")

T = TypeVar("T")

_Job: TypeAlias = "tuple[Future[Any], Callable[[], Any]]"


class ThreadPool:
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


class NewThreads:
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
