"""Runs the tool calls of one reply at the same time, each in a task, and returns what happens in order.

Not here: running one call (`tools.pipeline`), deciding which calls run together (`driver`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, TypeAlias

from ..chat import ToolExecutionRequest, ToolProgress
from .invocation import Invocation, Perform
from .loop import RunTool, RunTools, ToolFinished, ToolSuspended, advance

News: TypeAlias = RunTool | ToolProgress | ToolFinished | ToolSuspended
"""What happens while tools run: a call starts, reports its progress, ends or is suspended."""

MOST_PROGRESS = 1000
"""Reports of progress that a slow reader of a stream has not read; further ones replace the oldest."""


class ToolTasks:
    """Runs the tool calls of one reply at the same time, each in a separate task, within the host's limit.

    With `progress`, reports of the tools are news too, for a stream.
    """

    def __init__(self, invocation: Invocation, performing: Perform, *, progress: bool = False) -> None:
        self._invocation, self._perform = invocation, performing
        if progress:
            invocation.environment.on_progress = self._add_progress
        self._tasks: dict[int, asyncio.Task[Any]] = {}
        self._news: deque[Any] = deque()
        self._unread = 0  # reports in `_news`
        self._waiting: asyncio.Future[None] | None = None
        self._places = asyncio.Semaphore(invocation.host.max_concurrent_tools)
        self._all_started = False

    def start(self, index: int, request: ToolExecutionRequest) -> None:
        """Start one call."""
        task = self._tasks[index] = asyncio.create_task(self._run(RunTool(index, request)))
        task.add_done_callback(self._add)

    def start_all(self, effect: RunTools) -> None:
        """Start the calls of the complete reply that have not been started."""
        if not self._all_started:
            self._all_started = True
            for index in effect.indexes:
                if index not in self._tasks:
                    self.start(index, effect.pending[index].request)

    async def _run(self, effect: RunTool) -> Any:
        async with self._places:
            self._add(effect)
            return await self._perform(effect, self._invocation)

    def _add(self, news: RunTool | ToolProgress | asyncio.Task[Any]) -> None:
        self._news.append(news)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _add_progress(self, report: ToolProgress) -> None:
        if self._unread < MOST_PROGRESS:
            self._unread += 1
        else:
            del self._news[next(index for index, each in enumerate(self._news) if isinstance(each, ToolProgress))]
        self._add(report)

    @property
    def has_news(self) -> bool:
        """True if `next` returns at once."""
        return bool(self._news)

    async def next(self) -> News:
        """Return a started call as a `RunTool`, a report, or the result of a call. Raises the exception of a call."""
        while not self._news:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        news = self._news.popleft()
        if isinstance(news, ToolProgress):
            self._unread -= 1
            return news
        found: News = news if isinstance(news, RunTool) else news.result()
        return found

    async def cancel(self) -> None:
        """Cancel the running calls, wait for them, and store the finished ones in the invocation's state."""
        running = [task for task in self._tasks.values() if not task.done()]
        for task in running:
            task.cancel()
        if running:
            self._invocation.context.cancellation.cancel()
        try:
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        finally:  # a second cancellation, such as that of the deadline, is raised when all calls have ended
            self._store_finished()

    def _store_finished(self) -> None:
        invocation = self._invocation
        for news in self._news:
            if not isinstance(news, asyncio.Task) or not invocation.state.pending:
                continue
            if not news.cancelled() and news.exception() is None:
                invocation.state, _ = advance(invocation.rules, invocation.state, news.result())
        self._news.clear()
        self._unread = 0
