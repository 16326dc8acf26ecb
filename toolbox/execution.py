"""Where code runs: the execution-model markers, the pool, threads, executors and event loop of a container.

A tool says with a marker how it must be run (`Execution`); the kind of service that calls it decides, with that, which
place it gets (`Runner`). Not here: what is run (`tools.invocation`), for whom (`services`).
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import sys
import threading
import time
import typing
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from queue import SimpleQueue
from typing import Any, Protocol, TypeAlias, TypeVar

from .context import InvocationContext, invocation_attributes
from .errors import BlockingCallNotAllowedError, IllegalConfigurationError, Problem

logger = logging.getLogger("toolbox.execution")

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

EXECUTION_MARK = "__toolbox_execution__"


class ExecutionModel(StrEnum):
    """How a tool must be run."""

    BLOCKING = "blocking"
    NON_BLOCKING = "non_blocking"
    THREAD = "thread"
    EXECUTOR = "executor"


@dataclass(frozen=True, slots=True)
class Execution:
    """How one tool is run: its model, and for `EXECUTOR` the executor or its name in `Container(executors=…)`."""

    model: ExecutionModel
    executor: Executor | str | None = None
    is_coroutine: bool = False  # of a non-blocking one: it only makes a coroutine, which needs the loop


BLOCKING = Execution(ExecutionModel.BLOCKING)
NON_BLOCKING = Execution(ExecutionModel.NON_BLOCKING)
COROUTINE = Execution(ExecutionModel.NON_BLOCKING, is_coroutine=True)
THREAD = Execution(ExecutionModel.THREAD)


def _leave(execution: Execution, target: F) -> F:
    # A static or class method keeps its marks on the wrapper, which takes attributes since Python 3.10.
    setattr(target, EXECUTION_MARK, execution)
    return target


def blocking(target: F) -> F:
    """The tool waits (files, sockets, locks): it is kept off the event loop. The default for `def`."""
    return _leave(BLOCKING, target)


def non_blocking(target: F) -> F:
    """The tool never waits: it may run on the event loop. The default for `async def`."""
    return _leave(NON_BLOCKING, target)


def run_on_thread(target: F) -> F:
    """The tool gets a fresh thread for each call."""
    return _leave(THREAD, target)


def run_on(executor: Executor | str) -> Callable[[F], F]:
    """The tool runs on this `concurrent.futures.Executor`, or the one of this name in `Container(executors=…)`."""
    execution = Execution(ExecutionModel.EXECUTOR, executor)
    return lambda target: _leave(execution, target)


def is_async(function: object) -> bool:
    """Whether calling `function` makes a coroutine."""
    return inspect.iscoroutinefunction(inspect.unwrap(function) if callable(function) else function)


def returns_awaitable(annotation: object) -> bool:
    """Whether a resolved return annotation says that the value has to be awaited."""
    origin = typing.get_origin(annotation) or annotation
    return isinstance(origin, type) and issubclass(origin, Awaitable)


def execution_of(function: object, mark: Execution | None, returns: object = None) -> Execution:
    """How `function` is run: as `mark` says, else by its kind and by its resolved return annotation."""
    if is_async(function):
        return COROUTINE if mark is None or mark.model is ExecutionModel.NON_BLOCKING else mark
    if mark is not None:
        return mark
    return NON_BLOCKING if returns_awaitable(returns) else BLOCKING


def execution_problems(where: str, function: object, execution: Execution) -> Iterator[Problem]:
    """What is wrong with running `function` so."""
    if is_async(function) and execution.model is not ExecutionModel.NON_BLOCKING:
        yield Problem(
            where,
            f"an `async def` tool cannot be marked {execution.model.value}: it runs on the event loop",
            "remove the marker, or make it a `def`",
        )


Finish: TypeAlias = Callable[[BaseException | None], Awaitable[None]]
"""What follows a call on the loop; it is told how the call ended."""


class Runner(Protocol):
    """Runs the parts of one invocation where they belong."""

    async def run(
        self,
        execution: Execution,
        call: Callable[[], Any],
        label: str,
        *,
        finish: Finish | None = None,
        shipped: Callable[[], Callable[[], Any]] | None = None,
    ) -> Any:
        """`call()` in the place that `execution` means for this invocation, in a copy of the current context.

        A value that turns out to be awaitable is awaited on the loop. `finish(error)` is awaited on the loop exactly
        once: when the call has ended (`error` is what it raised, or None), or when it is certain that it never starts.
        Cancelled while the call is on a thread, this raises `CancelledError` at once; the thread goes on, and `finish`
        follows when it leaves. `label` names the thread meanwhile. `shipped` makes a picklable form of the call for an
        executor of other processes.
        """
        ...


# --- threads


def _named(call: Callable[[], T], label: str) -> T:
    """`call()`, with the thread carrying `label` as its name."""
    thread = threading.current_thread()
    name, thread.name = thread.name, label
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
            self.loop.run_forever()

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
                    _settle(future, work)
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
        try:
            value = await asyncio.wrap_future(future)
        except asyncio.CancelledError as error:
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


def _shadow(future: Future[Any]) -> Future[None]:
    """A future that ends when `future` does, and that may be cancelled without cancelling it."""
    shadow: Future[None] = Future()
    future.add_done_callback(lambda _: shadow.set_result(None) if shadow.set_running_or_notify_cancel() else None)
    return shadow


def _settle(future: Future[T], work: Callable[[], T]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)


async def _finish_quietly(finish: Finish, future: Future[Any], label: str) -> None:
    try:
        await finish(future.exception())
    except Exception:
        logger.exception("closing the scope of %s, whose invocation had ended before it, failed", label)


# --- runners


def _crosses_process(executor: Executor) -> bool:
    """Whether what this executor runs has to be pickled."""
    processes = sys.modules.get("concurrent.futures.process")  # not imported: then it is none of them
    if processes is not None and isinstance(executor, processes.ProcessPoolExecutor):
        return True
    return type(executor).__module__.partition(".")[0] in {"distributed", "loky", "mpi4py"}


def _run_elsewhere(call: Callable[[], Any], attributes: Mapping[str, Any]) -> Any:
    """In the other process: only the attributes have come along."""
    with invocation_attributes(**attributes):
        return call()


def _picklable(attributes: Mapping[str, Any]) -> dict[str, Any]:
    import pickle

    kept = {}
    for name, value in attributes.items():
        try:
            pickle.dumps(value)
        except Exception:  # whatever an object's own pickling raises: it cannot travel
            continue
        kept[name] = value
    return kept


async def _on_loop(call: Callable[[], Any], finish: Finish | None) -> Any:
    try:
        value = call()
        if inspect.isawaitable(value):
            value = await value
    except BaseException as error:
        if finish is not None:
            await finish(error)
        raise
    if finish is not None:
        await finish(None)
    return value


class LoopRunner:
    """Runs the tools of an asynchronous service method: the loop is never held up.

    `blocking_on`: the executor for blocking tools, instead of the container's pool.
    """

    def __init__(self, workers: Workers, blocking_on: Executor | None = None) -> None:
        self._workers, self._blocking_on = workers, blocking_on

    async def run(
        self,
        execution: Execution,
        call: Callable[[], Any],
        label: str,
        *,
        finish: Finish | None = None,
        shipped: Callable[[], Callable[[], Any]] | None = None,
    ) -> Any:
        """See `Runner.run`."""
        if execution.model is ExecutionModel.NON_BLOCKING:
            began = time.perf_counter()

            def timed() -> Any:
                value = call()
                self._workers.warn_if_slow(label, began)
                return value

            return await _on_loop(timed, finish)
        return await self._awaited(self._submit(execution, call, label, shipped), label, finish)

    async def _awaited(self, future: Future[Any], label: str, finish: Finish | None) -> Any:
        value = await self._workers.outcome(future, label, finish)
        if inspect.isawaitable(value):
            pending = value

            async def rest() -> Any:
                return await pending

            return await _on_loop(rest, finish)
        return value

    def _submit(
        self,
        execution: Execution,
        call: Callable[[], Any],
        label: str,
        shipped: Callable[[], Callable[[], Any]] | None,
    ) -> Future[Any]:
        context = contextvars.copy_context()

        def work() -> Any:
            return context.run(_named, call, label)

        if execution.model is ExecutionModel.THREAD:
            return self._workers.submit_to_thread(work)
        if execution.model is ExecutionModel.EXECUTOR:
            executor = self._workers.executor(execution)
            if executor is None:
                raise IllegalConfigurationError([unknown_executor(label, execution)])
            if shipped is not None and _crosses_process(executor):
                current = InvocationContext.current()
                return executor.submit(_run_elsewhere, shipped(), _picklable(current.attributes if current else {}))
            return executor.submit(work)
        return self._submit_blocking(work)

    def _submit_blocking(self, work: Callable[[], Any]) -> Future[Any]:
        if self._blocking_on is not None:
            return self._blocking_on.submit(work)
        return self._workers.submit_to_pool(work)


class CallerRunner(LoopRunner):
    """Runs the tools of a synchronous service method: its caller's thread serves them while it waits.

    `together`: whether several tools may run at once; then the blocking ones go to the pool while it has room.
    """

    def __init__(self, workers: Workers, blocking_on: Executor | None = None) -> None:
        super().__init__(workers, blocking_on)
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.together = False

    async def run(
        self,
        execution: Execution,
        call: Callable[[], Any],
        label: str,
        *,
        finish: Finish | None = None,
        shipped: Callable[[], Callable[[], Any]] | None = None,
    ) -> Any:
        """See `Runner.run`."""
        if execution.model is ExecutionModel.NON_BLOCKING and not execution.is_coroutine:
            context = contextvars.copy_context()
            future = self._submit_to_caller(lambda: context.run(_named, call, label))
            return await self._awaited(future, label, finish)
        return await super().run(execution, call, label, finish=finish, shipped=shipped)

    def _submit_blocking(self, work: Callable[[], Any]) -> Future[Any]:
        if self.together and (self._blocking_on is not None or not self._workers.is_full):
            return super()._submit_blocking(work)
        return self._submit_to_caller(work)

    def _submit_to_caller(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()

        def job() -> None:
            if future.set_running_or_notify_cancel():
                _settle(future, work)

        self._jobs.put(job)
        return future

    def wait_for(self, future: Future[T]) -> T:
        """On the caller's thread: serves jobs until `future`, the invocation on the loop, has ended."""
        future.add_done_callback(lambda _: self._jobs.put(None))
        try:
            while (job := self._jobs.get()) is not None:
                job()
            return future.result()
        except BaseException:
            future.cancel()
            raise


def unknown_executor(where: str, execution: Execution) -> Problem:
    """What to say of an executor that the container does not have."""
    return Problem(
        where,
        f"there is no executor {execution.executor!r}",
        f'give it: Container(executors={{"{execution.executor}": …}})',
    )
