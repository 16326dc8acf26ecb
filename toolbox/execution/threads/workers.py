"""The threads of one container, and waiting for the calls on them, also for those that nobody waits for any more."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent import futures
from concurrent.futures import CancelledError as FutureCancelled
from concurrent.futures import Executor, Future
from typing import Any, TypeAlias, TypeVar

from ...errors import IllegalConfigurationError, Problem
from ..cancellation import OwnCode
from ..markers import Execution, awaitable_of
from .forks import keep_inherited, register_for_fork, use_executor
from .thread_pools import NewThreads, ThreadPool

logger = logging.getLogger("toolbox.execution")

T = TypeVar("T")

Finish: TypeAlias = Callable[[BaseException | None], Awaitable[None]]
"""Runs on the event loop after a call; the argument is the exception of the call, or None."""


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
        self.pool, self.threads = ThreadPool(self._pool_size), NewThreads(self._thread_limit)
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
        if not use_executor(executor):
            raise IllegalConfigurationError([_dead_executor(label)])
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
        self.pool = ThreadPool(self._pool_size)
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


async def _finish_quietly(finish: Finish, future: Future[Any], label: str) -> None:
    try:
        await finish(future.exception())
    except Exception:
        logger.exception("cannot close the scope of %s, whose invocation ended earlier", label)
