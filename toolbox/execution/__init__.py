"""Where code runs: execution-model markers, the threads of a container, and who picks a place for each call."""

from __future__ import annotations

from .markers import (
    BLOCKING,
    COROUTINE,
    EXECUTION_MARK,
    NON_BLOCKING,
    THREAD,
    Execution,
    ExecutionModel,
    blocking,
    execution_of,
    execution_problems,
    is_async,
    non_blocking,
    returns_awaitable,
    run_on,
    run_on_thread,
    unknown_executor,
)
from .runners import CallerRunner, LoopRunner, Runner
from .threads import (
    Finish,
    LoopThread,
    Workers,
    keep_inherited,
    on_event_loop,
    refuse_on_event_loop,
    renewed_after_fork,
    thread_watcher,
)

__all__ = [
    "BLOCKING",
    "COROUTINE",
    "EXECUTION_MARK",
    "NON_BLOCKING",
    "THREAD",
    "CallerRunner",
    "Execution",
    "ExecutionModel",
    "Finish",
    "LoopRunner",
    "LoopThread",
    "Runner",
    "Workers",
    "blocking",
    "execution_of",
    "execution_problems",
    "is_async",
    "keep_inherited",
    "non_blocking",
    "on_event_loop",
    "refuse_on_event_loop",
    "renewed_after_fork",
    "returns_awaitable",
    "run_on",
    "run_on_thread",
    "thread_watcher",
    "unknown_executor",
]
