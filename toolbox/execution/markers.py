"""The execution-model markers, which set where a tool runs.

Not here: threads and executors (`threads`), the choice for each call (`runners`).
"""

from __future__ import annotations

import asyncio
import inspect
import typing
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from ..errors import Problem

F = TypeVar("F", bound=Callable[..., Any])

EXECUTION_MARK = "__toolbox_execution__"


class ExecutionModel(StrEnum):
    """The place where a tool runs: on a pool thread, on the event loop, on a new thread or on an executor."""

    BLOCKING = "blocking"
    NON_BLOCKING = "non_blocking"
    THREAD = "thread"
    EXECUTOR = "executor"


@dataclass(frozen=True, slots=True)
class Execution:
    """The execution of one tool: its model, and for `EXECUTOR` the executor or its name in `Container(executors=…)`."""

    model: ExecutionModel
    executor: Executor | str | None = None
    is_coroutine: bool = False  # for non-blocking tools: the call returns a coroutine, which needs the event loop
    is_non_blocking: bool = field(init=False)  # the call itself does not wait, and returns a value

    def __post_init__(self) -> None:
        """Note how the call runs."""
        non_blocking = self.model is ExecutionModel.NON_BLOCKING and not self.is_coroutine
        object.__setattr__(self, "is_non_blocking", non_blocking)


BLOCKING = Execution(ExecutionModel.BLOCKING)
NON_BLOCKING = Execution(ExecutionModel.NON_BLOCKING)
COROUTINE = Execution(ExecutionModel.NON_BLOCKING, is_coroutine=True)
THREAD = Execution(ExecutionModel.THREAD)


def is_executor(value: object) -> bool:
    """Return True for a `concurrent.futures.Executor`, and for objects with its `submit`, such as those of Dask."""
    return callable(getattr(value, "submit", None)) and not isinstance(value, type)


def _mark(execution: Execution, target: F) -> F:
    # Static and class methods store the mark on their wrapper, which has attributes since Python 3.10.
    try:
        setattr(target, EXECUTION_MARK, execution)
    except AttributeError:
        raise TypeError(f"{decorator_of(execution)}: expected a function or method, got {target!r}") from None
    return target


def blocking(target: F) -> F:
    """Run the tool on a thread of the container's pool, because it waits for files, sockets or locks.

    This is the default for `def`.

    ```python
    @tool
    @blocking
    def read(path: str) -> str: ...
    ```
    """
    return _mark(BLOCKING, target)


def non_blocking(target: F) -> F:
    """Run the tool on the event loop, because it never blocks. This is the default for `async def`.

    ```python
    @tool
    @non_blocking
    def add(a: int, b: int) -> int: ...
    ```
    """
    return _mark(NON_BLOCKING, target)


def run_on_thread(target: F) -> F:
    """Run each call of the tool on a new thread.

    ```python
    @tool
    @run_on_thread
    def render(page: str) -> str: ...
    ```
    """
    return _mark(THREAD, target)


def run_on(executor: Executor | str) -> Callable[[F], F]:
    """Run the tool on a `concurrent.futures.Executor`.

    `executor` is the executor, or its name in `Container(executors=…)`; an unknown name is a problem at start. Raises
    `TypeError` for anything else.

    ```python
    @tool
    @run_on("reports")
    def report(month: int) -> str: ...
    ```
    """
    if not isinstance(executor, str) and not is_executor(executor):
        raise TypeError(f'@run_on: expected an Executor or its name, got {executor!r}; write @run_on("reports")')
    execution = Execution(ExecutionModel.EXECUTOR, executor)
    return lambda target: _mark(execution, target)


def is_async(function: object) -> bool:
    """Return True if `function` is a coroutine function. A `def` wrapper of one is not: it may run it itself."""
    return inspect.iscoroutinefunction(getattr(function, "__func__", function))


def returns_awaitable(annotation: object) -> bool:
    """Return True if a resolved return annotation is an awaitable type, or a `concurrent.futures.Future`."""
    origin = typing.get_origin(annotation) or annotation
    return isinstance(origin, type) and issubclass(origin, (Awaitable, Future))


def awaitable_of(value: object) -> Awaitable[Any] | None:
    """Return what must be awaited for the value of a function, also for a `concurrent.futures.Future`, or None."""
    if isinstance(value, Future):
        return _result_of(value)
    return value if inspect.isawaitable(value) else None


async def _result_of(future: Future[Any]) -> Any:
    return await asyncio.wrap_future(future)


def execution_of(function: object, mark: Execution | None, returns: object = None) -> Execution:
    """Return the execution of `function`: its `mark`, or the default for its kind and resolved return annotation."""
    if is_async(function):
        return COROUTINE if mark is None or mark.model is ExecutionModel.NON_BLOCKING else mark
    if mark is not None:
        return mark
    return NON_BLOCKING if returns_awaitable(returns) else BLOCKING


def marked_execution(function: object) -> Execution:
    """Return the execution of a function that is not a tool, such as a handler or a provider."""
    return execution_of(function, getattr(function, EXECUTION_MARK, None))


_MARKERS = {
    ExecutionModel.BLOCKING: "@blocking",
    ExecutionModel.NON_BLOCKING: "@non_blocking",
    ExecutionModel.THREAD: "@run_on_thread",
    ExecutionModel.EXECUTOR: "@run_on",
}
"""The decorator of each execution model."""


def decorator_of(execution: Execution) -> str:
    """Return the decorator that leaves this mark, such as `@blocking`."""
    return _MARKERS[execution.model]


def execution_problems(where: str, function: object, execution: Execution) -> Iterator[Problem]:
    """Yield a problem if the marker does not support `function`."""
    if is_async(function) and execution.model is not ExecutionModel.NON_BLOCKING:
        yield Problem(
            where,
            f"an `async def` tool cannot have {_MARKERS[execution.model]}, because it runs on the event loop",
            "remove the marker, or make it a `def`",
        )


def unknown_executor(where: str, execution: Execution) -> Problem:
    """Return the problem of an unknown executor."""
    return Problem(
        where,
        f"unknown executor {execution.executor!r}",
        f'add it: Container(executors={{"{execution.executor}": …}})',
    )
