"""Tells who cancels a task: code that runs in it, with its own timeouts and task groups, or others from outside.

Both call `Task.cancel`, and the task only counts the calls. The difference is the context in which they call it:
timers, tasks and callbacks inherit the context of the code that made them. So code that is awaited here has a mark in
its context, and the task waits for a `_WatchedWait` in place of each future that the code waits for. `Task.cancel`
cancels this object, which then runs in the context of the caller.

Not here: limits and timeouts, which cancel (`context`, `services`), closing beans (`di.scopes`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from contextvars import Context, ContextVar, Token, copy_context
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")

GROUPS_ARE_COUNTED = sys.version_info < (3, 13)
"""True if this Python counts a failed `TaskGroup` as a cancellation of its task for ever."""

logger = logging.getLogger("toolbox")

_running: ContextVar[tuple[object, ...]] = ContextVar("toolbox.running_code", default=())


class running:  # noqa: N801 - reads as a state: `with running(code)`
    """Marks the context as that of `code` inside the block, and with it the timers and tasks that `code` starts."""

    __slots__ = ("_code", "_token")

    _token: Token[tuple[object, ...]]

    def __init__(self, code: object) -> None:
        self._code = code

    def __enter__(self) -> None:
        self._token = _running.set((*_running.get(), self._code))

    def __exit__(self, *_: object) -> None:
        with suppress(ValueError):  # closed in another context, for example by the garbage collector
            _running.reset(self._token)


class _Watched(Generic[T]):
    """Awaits `work` in this task, and sees each cancellation of the task.

    Afterwards, the task's count has only the cancellations from outside. Before Python 3.13 it also counted one for
    each `TaskGroup` that had failed, for ever: timeouts, limits and anyio then take the task for a cancelled one.
    """

    def __init__(self, work: Awaitable[T], code: object | None = None) -> None:
        self._work = work
        self._code = self if code is None else code
        self._task: asyncio.Task[Any] | None = None
        self._before = self._seen = self._outside = 0

    def is_own(self, message: Any) -> bool:
        """Return True if the work itself cancels the task: in the context of the caller of `Task.cancel`."""
        return any(each is self._code for each in _running.get())

    def holds(self, message: Any, *, is_counted: bool) -> bool:
        """Return True if the work must not get this cancellation from outside."""
        return False

    def begin(self, pause: _WatchedWait) -> None:
        """Prepare for a wait of the work."""

    def end(self) -> None:
        """End a wait."""

    def cancelled(self, message: Any) -> bool:
        """Note a cancellation, in the context of its caller. Return True if the work must not get it."""
        assert self._task is not None
        # The task counts the cancellations of timeouts and task groups. One that it does not count was thrown by hand.
        count, seen = self._task.cancelling(), self._seen
        self._seen = count
        if count > seen and self.is_own(message):
            return False
        if self.holds(message, is_counted=count > seen):
            self._seen = self._task.cancelling()
            return True
        self._outside += 1
        return False

    def enter(self) -> asyncio.Task[Any] | None:
        """Begin to watch the running task, if there is one: tools can also run without an event loop."""
        if (task := task_here()) is not None:
            self._task, self._before = task, task.cancelling()
            self._seen = self._before
        return self._task

    def __await__(self) -> Generator[Any, Any, T]:
        if (task := self.enter()) is None:
            return (yield from self._work.__await__())
        steps: Any = self._work.__await__()
        thrown: BaseException | None = None
        least = 0
        try:
            with running(self._code):
                while True:
                    try:
                        waiting = steps.send(None) if thrown is None else steps.throw(thrown)
                    except StopIteration as end:
                        result: T = end.value
                        return result
                    thrown = None
                    try:
                        yield from self._wait(waiting, task)
                    except GeneratorExit:
                        steps.close()
                        raise
                    except BaseException as error:
                        thrown = error
        except asyncio.CancelledError:
            least = 1  # code that cancels its own task, and lets the error through, has cancelled it
            raise
        finally:
            for _ in range(task.cancelling() - self._before - max(self._outside, least)):
                task.uncancel()

    def _wait(self, waiting: Any, task: asyncio.Task[Any]) -> Generator[Any, Any, None]:
        """Wait for what the work waits for; None is the next iteration of the loop."""
        if waiting is None:
            waiting = task.get_loop().create_future()
            task.get_loop().call_soon(_wake, waiting)
        elif waiting is task or not getattr(waiting, "_asyncio_future_blocking", False):
            yield waiting  # a mistake, which the task reports
            return
        waiting._asyncio_future_blocking = False
        self._seen = min(self._seen, task.cancelling())
        pause = _WatchedWait(self, waiting)
        self.begin(pause)
        try:
            while True:
                try:
                    yield pause
                    return
                except asyncio.CancelledError:
                    if not pause.can_go_on():
                        raise
        finally:
            self.end()


class _WatchedWait:
    """What a task waits for in place of a future of watched work: the future, which is not cancelled unseen."""

    __slots__ = ("_asyncio_future_blocking", "_future", "_is_held", "_watched")

    def __init__(self, watched: _Watched[Any], future: asyncio.Future[Any]) -> None:
        self._watched, self._future = watched, future
        self._asyncio_future_blocking = True
        self._is_held = False

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop of the future; the task reports another one than its own."""
        return self._future.get_loop()

    def add_done_callback(self, wake: Callable[[Any], object], *, context: Context | None = None) -> None:
        """Wake the task when the future has ended."""
        self._future.add_done_callback(wake, context=context)

    def cancel(self, msg: Any = None) -> bool:
        """Called by `Task.cancel`, in the context of the code that cancels the task."""
        self._is_held = self._watched.cancelled(msg)
        return self._is_held or self.end(msg)

    def can_go_on(self) -> bool:
        """Return True after a cancellation that was held back, and thrown all the same: the task waits again."""
        self._asyncio_future_blocking = self._is_held and not self._future.done()
        return self._asyncio_future_blocking

    def end(self, message: Any = None) -> bool:
        """Cancel what the work waits for. The work goes on when that has ended."""
        return self._future.cancel(message)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class OwnCode(_Watched[T]):
    """Awaits `work`, code of the program. Its task groups, timeouts and `gather`s that fail cancel nothing."""

    @property
    def was_cancelled(self) -> bool:
        """True if others have cancelled the task since it began, also if `work` caught the cancellation."""
        return self.is_task_cancelled and (self._outside > 0 or not GROUPS_ARE_COUNTED)

    @property
    def is_task_cancelled(self) -> bool:
        """True if the task counts a cancellation since it began, by others or by `work` itself."""
        return self._task is not None and self._task.cancelling() > self._before

    @property
    def has_task(self) -> bool:
        """True if `work` was awaited in a task. Without one, nobody counts cancellations."""
        return self._task is not None

    def __await__(self) -> Generator[Any, Any, T]:
        if GROUPS_ARE_COUNTED:
            return super().__await__()
        self.enter()
        return self._work.__await__()


# --- counting


def task_here() -> asyncio.Task[Any] | None:
    """Return the current task; None outside of tasks and on threads without an event loop."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


class CancellationsHere:
    """Counts the cancellations of the current task from now on. Without a task, there are none.

    A task that catches a `CancelledError` still counts it, so code that called something else can tell whether it was
    cancelled in the meantime. Code that cancels its own task, as a timeout does, calls `take_back` for it afterwards:
    others may have cancelled the task as well, and then it must stay cancelled.
    """

    def __init__(self) -> None:
        self.task = task_here()
        self._before = 0 if self.task is None else self.task.cancelling()

    @property
    def came(self) -> bool:
        """True if the task was cancelled, also if other code caught the error."""
        return self.task is not None and self.task.cancelling() > self._before

    def take_back(self) -> bool:
        """Take back one cancellation. Return True if the task is not cancelled otherwise."""
        return self.task is None or self.task.uncancel() <= self._before


# --- cancel scopes of anyio


def new_anyio_scope() -> Any:
    """Return a cancel scope of anyio; None if the program has not imported anyio, so that there are no others."""
    create = getattr(sys.modules.get("anyio"), "CancelScope", None)
    return None if create is None else create()


def is_cancelled_by_anyio() -> bool:
    """Return True if the task is in a cancelled scope of anyio, which cancels each of its waits."""
    deadline_of = getattr(sys.modules.get("anyio"), "current_effective_deadline", None)
    return deadline_of is not None and deadline_of() == -math.inf


class opening:  # noqa: N801 - reads as a verb: `with opening() as outside`
    """Opens a producer inside of an anyio scope, which ends with the block.

    If the producer keeps another scope open, the one around it must stay open too: it is `left_open` then.
    """

    left_open: Any = None

    def __enter__(self) -> Self:
        self._scope = new_anyio_scope()
        if self._scope is not None:
            self._scope.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._scope is None:
            return
        try:
            self._scope.__exit__(kind, error, trace)
        except RuntimeError:  # it is not the innermost scope
            self.left_open = self._scope


# --- closing


class Patience:
    """Holds back the cancellations from outside while several things are closed, for `seconds` after the first.

        async with Patience(10.0) as patience:
            await shielded(work, target, patience)

    A cancellation that is held back is taken off the task's count, because a timeout in a closing bean would else take
    the task for one that others have cancelled. The end of the block gives all of them back.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.until: float | None = None
        self._count, self._message = 0, None

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None, "asynchronous code runs in a task"
        self._task = task
        self.unshielded_at = task.get_loop().time() + self.seconds
        if is_cancelled_by_anyio():
            self.until = self.unshielded_at
        if task.cancelling():
            # A task that has cancelled itself gets the cancellation at its next `await`, which must not be one of a
            # bean.
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError as pending:
                self.hold(task, *pending.args[:1])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _ in range(self._count):
            self._task.cancel(self._message)
        if self._count or is_cancelled_by_anyio():
            await asyncio.sleep(0)  # raises the cancellation

    def hold(self, task: asyncio.Task[Any], message: Any = None, *, is_counted: bool = True) -> None:
        """Hold back a cancellation."""
        if not self._count or message is None:  # asyncio's own, without a message, must not pass for one of anyio
            self._message = message
        self._count += 1
        if is_counted:
            task.uncancel()
        if self.until is None:
            self.until = task.get_loop().time() + self.seconds

    @property
    def is_over(self) -> bool:
        """True if no more time is left."""
        return self.until is not None and asyncio.get_running_loop().time() >= self.until


class shielded(_Watched[None]):  # noqa: N801 - reads as a verb: `await shielded(work, target, patience)`
    """Awaits `work`, which closes `target`, to its end in this task, even if the task is cancelled from outside.

    Timeouts and task groups of `target` itself work. `asyncio.shield` would run `work` in another task, which cannot
    exit a cancel scope that a producer entered. When the patience ends, `work` is cancelled, and `is_given_up` is True.

    A cancelled scope of anyio around it would also cancel the tasks that `work` starts, and decides how the scopes of
    `work` end. So `work` runs in a shielded one: a new one, or `around`, inside of which the producer opened its own.
    Nobody can see a cancellation outside of a shield. So it ends when closing has taken as long as the patience.
    """

    _context: Context

    def __init__(self, work: Awaitable[None], target: object, patience: Patience, around: Any = None) -> None:
        super().__init__(work, target)
        self._patience, self._around = patience, around
        self._scope: Any = None
        self._pause: _WatchedWait | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.is_given_up = False

    def __await__(self) -> Generator[Any, Any, None]:
        self._scope = scope = new_anyio_scope() if self._around is None else self._around
        if scope is None:
            return (yield from super().__await__())
        if self._around is None:
            scope.__enter__()
        scope.shield = True
        self._context = copy_context()
        try:
            yield from super().__await__()
        finally:
            with suppress(RuntimeError):  # `around` was entered in another task
                scope.__exit__(None, None, None)  # nobody cancels it, so it has nothing to do with an error

    def is_own(self, message: Any) -> bool:
        """Return True also for anyio inside of the shield: that is a scope of the work, which others can cancel."""
        is_shielded = self._scope is not None and self._scope.shield
        return super().is_own(message) or (is_shielded and "cancel scope" in str(message))

    def holds(self, message: Any, *, is_counted: bool) -> bool:
        """Hold the cancellation back, unless the patience is over."""
        if self._task is None:
            return False
        if self._patience.is_over:  # before its timer, which a busy loop runs late
            self._note_given_up()
            return False
        self._patience.hold(self._task, message, is_counted=is_counted)
        self._set_timer()
        return True

    def begin(self, pause: _WatchedWait) -> None:
        """Set the timer."""
        self._pause = pause
        self._set_timer()

    def end(self) -> None:
        """Cancel the timer."""
        self._pause = None
        self._cancel_timer()

    def _set_timer(self) -> None:
        self._cancel_timer()
        loop = asyncio.get_running_loop()
        if self._patience.until is not None:
            self._timer = loop.call_at(self._patience.until, self._give_up)
        elif self._scope is not None and self._scope.shield:
            # In the context outside: what anyio delivers then does not come from the work.
            unshield = partial(setattr, self._scope, "shield", False)
            self._timer = loop.call_at(self._patience.unshielded_at, unshield, context=self._context)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._note_given_up()
        if self._pause is not None:
            self._pause.end()

    def _note_given_up(self) -> None:
        if not self.is_given_up:
            self.is_given_up = True
            name = getattr(self._code, "__qualname__", None) or type(self._code).__qualname__
            logger.error("closing %s was given up after %g seconds", name, self._patience.seconds)


async def finish_before_cancellation(work: Awaitable[None], target: object, seconds: float) -> None:
    """Await `work`, which closes `target`. If the task is cancelled from outside, raise the cancellation afterwards.

    The work may take `seconds` after the cancellation. Then it is cancelled as well.
    """
    async with Patience(seconds) as patience:
        await shielded(work, target, patience)
