"""Runners: place the calls of one invocation, for asynchronous and for synchronous methods.

Not here: threads and executors (`threads`), the calls (`tools.pipeline`), invocations (`services`).
"""

from __future__ import annotations

import contextvars
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from ..context import InvocationContext, run_for
from ..errors import IllegalConfigurationError
from .markers import Execution, ExecutionModel, awaitable_of, unknown_executor
from .threads import Finish, Workers, finished, has_own_name, run_labelled, settle

T = TypeVar("T")


class Runner(Protocol):
    """Runs the calls of one invocation: each on the event loop, on a thread or on an executor."""

    is_for_loop: bool
    """True if non-blocking calls run in the current task; coroutines always do."""
    together: bool
    """True while several calls may run at the same time. Set by the code that starts them."""

    def warn_if_slow(self, label: str, began: float) -> None:
        """Log a warning, once per `label`, if a call that began at `began` (`time.perf_counter`) blocked the loop."""
        ...

    async def run(
        self,
        execution: Execution,
        call: Callable[[], Any],
        label: str,
        *,
        finish: Finish | None = None,
        shipped: Callable[[], Callable[[], Any]] | None = None,
        has_timeout: bool = False,
    ) -> Any:
        """Run `call()` where `execution` requires it, in a copy of the current context, and return its value.

        An awaitable value is awaited on the event loop. `finish(error)` is awaited on the loop exactly once: after the
        call ended (`error` is its exception or None), or when it can no longer start. If this coroutine is cancelled
        while the call is on a thread, it raises `CancelledError` immediately. The thread continues, and `finish` runs
        when it ends.

        `label` is the name of the thread during the call (threads of this library only). `shipped` returns a picklable
        form of the call for executors of other processes. `has_timeout`: the caller may stop waiting for this call.
        """
        ...


def _crosses_process(executor: Executor) -> bool:
    """Return True if the executor pickles its work."""
    processes = sys.modules.get("concurrent.futures.process")  # not imported: then no process pool exists
    if processes is not None and isinstance(executor, processes.ProcessPoolExecutor):
        return True
    return type(executor).__module__.partition(".")[0] in {"distributed", "loky", "mpi4py"}


class LoopRunner:
    """Runs the calls of an asynchronous service method without blocking the event loop.

    `blocking_on`: the executor for blocking tools, instead of the pool of the container.
    """

    is_for_loop = True
    together = False

    def __init__(self, workers: Workers, blocking_on: Executor | None = None) -> None:
        self._workers, self._blocking_on = workers, blocking_on
        self.warn_if_slow = workers.warn_if_slow

    async def run(
        self,
        execution: Execution,
        call: Callable[[], Any],
        label: str,
        *,
        finish: Finish | None = None,
        shipped: Callable[[], Callable[[], Any]] | None = None,
        has_timeout: bool = False,
    ) -> Any:
        """Run a call on the event loop, on a thread or on an executor, as its execution says."""
        if execution.model is ExecutionModel.NON_BLOCKING:
            began = time.perf_counter()

            async def timed() -> Any:
                value = call()
                self._workers.warn_if_slow(label, began)
                awaited = awaitable_of(value)
                return value if awaited is None else await awaited

            return await finished(timed(), finish)
        try:
            if execution.model is ExecutionModel.BLOCKING:
                future = self._submit_blocking(call, label, has_timeout)
            else:
                future = self._submit(execution, call, label, shipped)
        except BaseException as error:  # for example an executor that has been shut down: the call never starts
            if finish is not None:
                await finish(error)
            raise
        return await self._workers.outcome(future, label, finish)

    def _submit(
        self,
        execution: Execution,
        call: Callable[[], Any],
        label: str,
        shipped: Callable[[], Callable[[], Any]] | None,
    ) -> Future[Any]:
        if execution.model is ExecutionModel.THREAD:
            return self._workers.threads.submit(_in_context(call, label))
        executor = self._workers.executor(execution)
        if executor is None:
            raise IllegalConfigurationError([unknown_executor(label, execution)])
        if shipped is not None and _crosses_process(executor):
            context = InvocationContext.current()
            return self._workers.submit_to_executor(executor, label, run_for, context, shipped())
        return self._submit_to(executor, call, label)

    def _submit_blocking(self, call: Callable[[], Any], label: str, has_timeout: bool) -> Future[Any]:
        if self._blocking_on is not None:
            return self._submit_to(self._blocking_on, call, label)
        return self._workers.pool.submit(_in_context(call, label))

    def _submit_to(self, executor: Executor, call: Callable[[], Any], label: str) -> Future[Any]:
        work = _in_context(call, label, rename=False)

        def occupying() -> Any:
            before = _occupied.executors
            _occupied.executors = (*before, executor)
            try:
                return work()
            finally:
                _occupied.executors = before

        return self._workers.submit_to_executor(executor, label, occupying)


def _in_context(call: Callable[[], Any], label: str, *, rename: bool = True) -> Callable[[], Any]:
    """Return `call` bound to a copy of the current context; its thread is named `label` during the call."""
    run: Callable[..., Any] = contextvars.copy_context().run
    return partial(run, run_labelled, call, label, rename=rename)


class _Occupied(threading.local):
    """The executors that currently occupy this thread."""

    executors: tuple[Executor, ...] = ()


_occupied = _Occupied()


class CallerRunner(LoopRunner):
    """Runs the calls of a synchronous service method: the thread of the caller runs blocking tools while it waits.

    `together`: several tools may run at the same time; blocking tools then use the pool while it has free threads.
    `has_deadline`: the invocation has a time limit. A thread cannot be stopped, so tools that may be late get a new
    thread, and the caller can continue without it.
    """

    is_for_loop = False

    def __init__(self, workers: Workers, blocking_on: Executor | None = None) -> None:
        super().__init__(workers, blocking_on)
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._caller_works_for = _occupied.executors
        # A thread of a user's executor keeps its name.
        self._rename_caller = not self._caller_works_for and not has_own_name(threading.current_thread())
        self.has_deadline = False

    async def run(
        self,
        execution: Execution,
        call: Callable[[], Any],
        label: str,
        *,
        finish: Finish | None = None,
        shipped: Callable[[], Callable[[], Any]] | None = None,
        has_timeout: bool = False,
    ) -> Any:
        """Run a call in the same way; a non-blocking one runs on the thread of the caller."""
        if execution.is_non_blocking:
            return await self._workers.outcome(self._submit_to_caller(call, label), label, finish)
        return await super().run(
            execution, call, label, finish=finish, shipped=shipped, has_timeout=has_timeout or self.has_deadline
        )

    def _submit_blocking(self, call: Callable[[], Any], label: str, has_timeout: bool) -> Future[Any]:
        if self.together and (self._blocking_on is not None or not self._workers.is_full):
            return super()._submit_blocking(call, label, has_timeout)
        if has_timeout:
            return self._workers.threads.submit(_in_context(call, label))
        return self._submit_to_caller(call, label)

    def _submit_to(self, executor: Executor, call: Callable[[], Any], label: str) -> Future[Any]:
        if all(each is not executor for each in self._caller_works_for):
            return super()._submit_to(executor, call, label)
        # The caller occupies a thread of this executor, and its other threads may wait in the same way. So the job goes
        # to both the executor and the caller; the first that is free runs it.
        future: Future[Any] = Future()
        work = _in_context(call, label, rename=False)
        free = iter((True,))

        def job() -> None:
            if next(free, False):
                settle(future, work)

        self._workers.submit_to_executor(executor, label, job)
        self._jobs.put(job)
        return future

    def _submit_to_caller(self, call: Callable[[], Any], label: str) -> Future[Any]:
        future: Future[Any] = Future()
        work = _in_context(call, label, rename=self._rename_caller)
        self._jobs.put(lambda: settle(future, work))
        return future

    def wait_for(self, future: Future[T]) -> T:
        """On the caller's thread: serve jobs until `future`, the invocation on the loop, has ended."""
        future.add_done_callback(lambda _: self._jobs.put(None))
        try:
            while (job := self._jobs.get()) is not None:
                job()
            return future.result()
        except BaseException:
            future.cancel()
            raise
