"""The execution-model markers: a tool says by them where it runs.

Not here: the places (`threads`), which of them a call gets (`runners`).
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from ..errors import Problem

F = TypeVar("F", bound=Callable[..., Any])

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
    is_coroutine: bool = False  # of a non-blocking one: calling it makes a coroutine, which needs the loop


BLOCKING = Execution(ExecutionModel.BLOCKING)
NON_BLOCKING = Execution(ExecutionModel.NON_BLOCKING)
COROUTINE = Execution(ExecutionModel.NON_BLOCKING, is_coroutine=True)
THREAD = Execution(ExecutionModel.THREAD)


def _leave(execution: Execution, target: F) -> F:
    # A static or class method keeps its marks on the wrapper, which takes attributes since Python 3.10.
    setattr(target, EXECUTION_MARK, execution)
    return target


def blocking(target: F) -> F:
    """Mark a tool that waits (files, sockets, locks): it is kept off the event loop. The default for `def`."""
    return _leave(BLOCKING, target)


def non_blocking(target: F) -> F:
    """Mark a tool that never waits: it may run on the event loop. The default for `async def`."""
    return _leave(NON_BLOCKING, target)


def run_on_thread(target: F) -> F:
    """Run each call of the tool on a fresh thread."""
    return _leave(THREAD, target)


def run_on(executor: Executor | str) -> Callable[[F], F]:
    """Run the tool on this `concurrent.futures.Executor`, or on the one of this name in `Container(executors=…)`."""
    execution = Execution(ExecutionModel.EXECUTOR, executor)
    return lambda target: _leave(execution, target)


def is_async(function: object) -> bool:
    """Return True if calling `function` makes a coroutine; a `def` around an `async def` may itself wait for it."""
    return inspect.iscoroutinefunction(getattr(function, "__func__", function))


def returns_awaitable(annotation: object) -> bool:
    """Return True if a resolved return annotation says that the value must be awaited."""
    origin = typing.get_origin(annotation) or annotation
    return isinstance(origin, type) and issubclass(origin, Awaitable)


def execution_of(function: object, mark: Execution | None, returns: object = None) -> Execution:
    """Return how `function` runs: as `mark` says, else by its kind and by its resolved return annotation."""
    if is_async(function):
        return COROUTINE if mark is None or mark.model is ExecutionModel.NON_BLOCKING else mark
    if mark is not None:
        return mark
    return NON_BLOCKING if returns_awaitable(returns) else BLOCKING


def execution_problems(where: str, function: object, execution: Execution) -> Iterator[Problem]:
    """Yield a problem if `function` cannot be run as its marker says."""
    if is_async(function) and execution.model is not ExecutionModel.NON_BLOCKING:
        yield Problem(
            where,
            f"an `async def` tool cannot be marked {execution.model.value}: it runs on the event loop",
            "remove the marker, or make it a `def`",
        )


def unknown_executor(where: str, execution: Execution) -> Problem:
    """Return the problem of an executor that the container does not have."""
    return Problem(
        where,
        f"unknown executor {execution.executor!r}",
        f'add it: Container(executors={{"{execution.executor}": …}})',
    )
