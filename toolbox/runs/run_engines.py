"""`RunEngine`: decides which process executes a run, and the default engine, which uses this process.

Not here: executing a run (`run_execution`), the engine on many machines (`toolbox.dbos`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol


class RunEngine(Protocol):
    """Brings a run to a process that calls `runs.execute(run_id)`. Register a bean of this type to use it.

    An engine that also has `async def attach(runs, executes)` is given the `Runs` of its container at start; `executes`
    is False in a container with `take_over_runs=False`, which only submits. `async def detach()` is called at the stop.
    """

    async def submit(self, run_id: str, generation: int) -> None:
        """Have the run executed at least once, in any process; return without waiting for it.

        Called when a run starts or was resumed, and for each run whose owner is gone, until it has an owner again.
        `generation` is the run's generation at that time, so `run_id` and `generation` name one delivery.
        """
        ...


class ExecutesInBackground(Protocol):
    """The `Runs` that the engine of this process works for. A Protocol, because they import this module."""

    async def execute_in_background(self, run_id: str) -> None:
        """Execute the run in a task, unless it already has one."""
        ...


class LocalRunEngine(RunEngine):
    """Executes runs as tasks of this process. This is the default engine."""

    def __init__(self) -> None:
        self._execute: Callable[[str], Awaitable[None]] | None = None

    async def attach(self, runs: ExecutesInBackground, executes: bool) -> None:
        """Execute the runs of this container."""
        self._execute = runs.execute_in_background

    async def submit(self, run_id: str, generation: int) -> None:
        """Execute the run in a task, unless it already has one."""
        if self._execute is not None:
            await self._execute(run_id)
