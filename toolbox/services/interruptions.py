"""What ends a call from outside: its deadline, and limits and persons that interrupt the step that it is at.

Not here: callers that leave (`toolbox.callers`), the usage that limits count (`usage_layers`).
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from contextvars import copy_context
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from ..chat import ChatModel, ChatResponse
from ..context import InvocationContext, current_limit
from ..errors import InvocationTimeoutError, ToolboxError
from ..execution.cancellation import CancellationsHere
from ..execution.runners import Runner
from ..execution.threads import call_on
from ..limits import Account, UsageLimitExceededError
from .host_needs import ServiceHost

NOTHING: AbstractAsyncContextManager[None] = nullcontext()


class ModelCall(ABC):
    """A call that asks models, and that its deadline or a limit can end.

    That is the call of a service method (`Invocation`), or one request of a program to a model.
    """

    host: ServiceHost
    context: InvocationContext
    runner: Runner
    """Runs the functions of the program that are called on the way."""
    model: ChatModel
    model_name: str
    where: str
    """The place of the call, `Service.method`, for messages."""
    account: Account | None = None
    """Counts the usage, if the call or one around it has limits."""
    refused: UsageLimitExceededError | None = None
    """The error of the limit that ends the call."""
    stopped: ToolboxError | None = None
    """The error with which somebody outside of the call has ended it."""
    deadline: Deadline | None = None
    limit: asyncio.Timeout | None = None
    """The timeout that ends the call at its deadline, while it runs."""
    _step: StepOfTask | None = None

    @abstractmethod
    def count_tool_calls(self, response: ChatResponse) -> int:
        """Return the number of tool calls in a reply."""

    def may_exceed(self, limit: str, allowed: object) -> bool:
        """Return True if the call may exceed its own limit of this name and value."""
        return False

    @property
    def is_late(self) -> bool:
        """True if the deadline has passed."""
        return self.deadline is not None and time.monotonic() >= self.deadline.at

    def make_timeout_error(self) -> InvocationTimeoutError:
        """Return the error for a deadline that has passed."""
        assert self.deadline is not None
        service, _, method = self.where.rpartition(".")
        return InvocationTimeoutError(service, method, self.deadline.seconds)

    @property
    def can_be_stopped(self) -> bool:
        """True if somebody outside of the call may end it."""
        return False

    @property
    def ended_by(self) -> ToolboxError | None:
        """The error of the limit, or of the person, that ends the call; None while nobody does."""
        return self.refused or self.stopped

    def error_behind(self, error: BaseException) -> BaseException:
        """Return the error of the limit, the person or the deadline that has cancelled the call; else `error` itself.

        The code inside of the call sees only the cancellation. At the deadline of an outer call, the call is cancelled
        and has no other error: the outer call raises the `InvocationTimeoutError`.
        """
        if not isinstance(error, asyncio.CancelledError):
            return error
        return self.ended_by or (self.make_timeout_error() if self.is_late else error)

    def end_with(self, error: UsageLimitExceededError) -> None:
        """End the call with `error`, from any thread: cancel the task that runs its current step."""
        if self.refused is None:
            self.refused = error
        self._interrupt()

    def stop_with(self, error: ToolboxError) -> None:
        """End the call with `error`, as `end_with` does; the first error counts."""
        if self.stopped is None:
            self.stopped = error
        self._interrupt()

    def _interrupt(self) -> None:
        if (step := self._step) is not None:
            step.interrupt()

    @property
    def step(self) -> StepOfTask | None:
        """The step that runs now."""
        return self._step

    def enter_step(self, step: StepOfTask | None) -> None:
        """Set the step that runs now, which `end_with` interrupts."""
        self._step = step


# --- deadlines


@dataclass(frozen=True, slots=True)
class Deadline:
    """The deadline of a call in `time.monotonic()` seconds, and the seconds that it had, for the error."""

    at: float
    seconds: float

    @classmethod
    def after(cls, left: float, seconds: float) -> Deadline:
        """Return a deadline that passes `left` seconds from now."""
        return cls(time.monotonic() + left, seconds)


def find_deadlines(own: Deadline | None, outer: InvocationContext | None) -> tuple[Deadline | None, float | None]:
    """Return the deadline that a call inside of `outer` enforces, and the earliest one that is known.

    The limit of a `time_limit` block is enforced by the calls directly in the block; they cancel the calls within.
    """
    around, enforced = current_limit.get(), own
    if around is not None and around.within is outer and (own is None or around.deadline < own.at):
        enforced = Deadline(around.deadline, around.seconds)
    earliest = None if enforced is None else enforced.at
    for known in (outer, around):
        if known is not None and known.deadline is not None and (earliest is None or known.deadline < earliest):
            earliest = known.deadline
    return enforced, earliest


def within_limits(call: ModelCall) -> AbstractAsyncContextManager[None]:
    """Let the deadline and the limits of a call end the block: it raises their error in place of a `CancelledError`."""
    if call.deadline is None:
        return _step_of(call)
    return _within_deadline(call.deadline.at, call)


def _step_of(call: ModelCall) -> AbstractAsyncContextManager[None]:
    return StepOfTask(call) if call.account is not None or call.can_be_stopped else NOTHING


@asynccontextmanager
async def _within_deadline(deadline: float, call: ModelCall) -> AsyncIterator[None]:
    left = deadline - time.monotonic()
    if left <= 0:
        raise call.make_timeout_error()
    limit = call.limit = asyncio.timeout(left)
    try:
        async with limit, _step_of(call):
            yield
    except TimeoutError:
        if limit.expired():
            raise call.make_timeout_error() from None
        raise


# --- limits, and those who stop a call


class StepOfTask(AbstractAsyncContextManager[None]):
    """A step of a call in the current task, which a limit or a person can interrupt from any thread.

    Like a timeout, they cancel the task, and the `CancelledError` becomes their error. Unlike one, they
    may find that the code in between has swallowed the cancellation, or that it is still to come because the code has
    just ended. And others may have cancelled the task at the same time: then it stays cancelled.
    """

    def __init__(self, call: ModelCall) -> None:
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._cancellations = CancellationsHere()
        assert self._cancellations.task is not None, "such a call runs in a task"
        self._task: asyncio.Task[Any] = self._cancellations.task
        self._context = copy_context()  # in which it cancels: for the code in between this comes from outside
        self._is_interrupted = self._has_ended = False
        self._around: StepOfTask | None = None

    def interrupt(self) -> None:
        """Cancel the task, from any thread."""
        call_on(self._loop, self._cancel)

    def _cancel(self) -> None:
        if not (self._has_ended or self._is_interrupted):
            self._is_interrupted = True
            self._context.run(self._task.cancel)

    async def __aenter__(self) -> None:
        if (ended := self._call.ended_by) is not None:
            raise ended
        self._around = self._call.step
        self._call.enter_step(self)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._has_ended = True
        self._call.enter_step(self._around)
        ended = self._call.ended_by
        if ended is None:
            return
        if self._is_interrupted:
            if kind is None or not issubclass(kind, asyncio.CancelledError):
                with suppress(asyncio.CancelledError):  # other code has swallowed it, or it is still to come
                    await asyncio.sleep(0)
            if not self._cancellations.take_back() and kind is asyncio.CancelledError:
                return  # other code cancelled the task as well
        if error is not ended and not isinstance(error, GeneratorExit):
            raise ended from None
