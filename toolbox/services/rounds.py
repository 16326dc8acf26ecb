"""The tool calls of one reply: one after another, or together, with what happens told as it happens.

Not here: a single tool call (`tools.pipeline`), what follows from the results (`loop`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from ..chat import BeforeToolExecution, ServiceEvent, ToolExecuted, ToolExecutionRequest
from ..execution import CallerRunner
from ..tools.pipeline import ToolEnvironment, ToolOutcome, execute_tool


class Round:
    """The tool calls of one reply: one after another, or together."""

    def __init__(self, surroundings: ToolEnvironment, *, together: bool, at_once: int) -> None:
        self._surroundings = surroundings
        self._together = together
        self._started: dict[int, asyncio.Task[ToolOutcome]] = {}
        self._events: asyncio.Queue[ServiceEvent | None] = asyncio.Queue()
        self._places = asyncio.Semaphore(at_once)
        self._running = 0
        self._failed = False
        self._one_by_one: list[ToolOutcome] = []

    @property
    def outcomes(self) -> list[ToolOutcome]:
        """What came of the calls that have ended, in the order of the reply; of all of them once `run` has ended."""
        ended = [task for _, task in sorted(self._started.items()) if task.done() and not _has_failed(task)]
        return self._one_by_one + [task.result() for task in ended]

    def raise_failure(self) -> None:
        """Raises what a call that was started has failed with, if any has by now."""
        for task in self._started.values() if self._failed else ():
            if task.done() and _has_failed(task):
                task.result()

    async def run(self, requests: Sequence[ToolExecutionRequest]) -> AsyncGenerator[ServiceEvent, None]:
        """Runs the calls that have not been started yet; `outcomes` has what came of them."""
        runner = self._surroundings.runner
        if isinstance(runner, CallerRunner):
            runner.together = self._together and len(requests) > 1
        if not self._together or (len(requests) == 1 and not self._started):
            for request in requests:
                yield BeforeToolExecution(request)
                outcome = await self._execute(request)
                self._one_by_one.append(outcome)
                yield ToolExecuted(outcome.execution)
            return
        try:
            for index, request in enumerate(requests):
                self.start(index, request)
            tasks = [self._started[index] for index in range(len(requests))]
            while self._running and not self._failed:
                event = await self._events.get()
                if event is not None:
                    yield event
            for task in sorted(tasks, key=lambda each: not (each.done() and _has_failed(each))):  # what failed first
                await task
            for event in self.happened():
                yield event
        finally:
            await self.cancel()

    def start(self, index: int, request: ToolExecutionRequest) -> None:
        """Starts the call at this place of the reply in a task of its own, unless it has been."""
        if index not in self._started:
            task = self._started[index] = asyncio.create_task(self._execute_in_place(request))
            self._running += 1
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[ToolOutcome]) -> None:
        self._running -= 1
        self._failed = self._failed or _has_failed(task)
        self._events.put_nowait(None)  # wakes whoever waits for events

    def happened(self) -> list[ServiceEvent]:
        """The events since the last look."""
        events: list[ServiceEvent] = []
        while not self._events.empty():
            event = self._events.get_nowait()
            if event is not None:
                events.append(event)
        return events

    async def cancel(self) -> None:
        """Cancels what still runs, and waits until it is gone."""
        running = [task for task in self._started.values() if not task.done()]
        for task in running:
            task.cancel()
        if running:
            self._surroundings.context.cancellation.cancel()
        await asyncio.gather(*self._started.values(), return_exceptions=True)

    async def _execute_in_place(self, request: ToolExecutionRequest) -> ToolOutcome:
        async with self._places:
            self._events.put_nowait(BeforeToolExecution(request))
            outcome = await self._execute(request)
            self._events.put_nowait(ToolExecuted(outcome.execution))
            return outcome

    async def _execute(self, request: ToolExecutionRequest) -> ToolOutcome:
        return await execute_tool(request, self._surroundings)


def _has_failed(task: asyncio.Task[ToolOutcome]) -> bool:
    return task.cancelled() or task.exception() is not None
