"""Event loops: the one of this thread, calls to those of other threads, and one in a separate thread.

Not here: the loop of a container (`hosts`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from ...errors import BlockingCallNotAllowedError, ContainerNotStartedError

logger = logging.getLogger("toolbox.execution")

T = TypeVar("T")


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


_IDLE = (
    "the event loop on which the container was started does not run, such as that of a fixture with another scope; "
    "start the container with `with container:`, or on the loop that runs"
)


def refuse_idle(loop: asyncio.AbstractEventLoop | None, what: str) -> None:
    """Raise `ContainerNotStartedError` if the container's loop does not run: a thread would wait for it forever."""
    if loop is not None and not loop.is_running():
        raise ContainerNotStartedError(what, _IDLE)


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
