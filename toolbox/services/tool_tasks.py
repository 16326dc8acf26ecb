"""Runs the tool calls of a reply at the same time, each in a task, and returns what happens in order.

Only calls with `concurrent_tools` come here, streams, whose reader gets what happens in a tool while it runs, and calls
that a limit may stop in the middle of a round. Not here: running one call (`tools.pipeline`), the events of a stream
(`streamed_call`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from ..chat import ToolExecutionRequest, ToolProgress
from ..service_events import InnerEvent
from .inner_events import InnerReader, current_reader
from .invocation import Invocation
from .loop import RunTool, RunTools, ToolFinished, ToolSuspended, advance
from .state import ReachedLimit
from .usage_layers import or_reached_limit


@dataclass(frozen=True, slots=True)
class InnerNews:
    """An event of a service within a call. The service waits until it `is_read`, so that a slow reader slows it."""

    event: InnerEvent
    is_read: asyncio.Future[None]

    def read(self) -> None:
        """Let the service go on, if it still waits."""
        if not self.is_read.done():
            self.is_read.set_result(None)


News: TypeAlias = RunTool | ToolProgress | ToolFinished | ToolSuspended | InnerNews
"""What happens while tools run: a call starts, reports its progress, ends or is suspended, or a service in it acts."""

MOST_PROGRESS = 1000
"""Reports of progress that a slow reader of a stream has not read; further ones replace the oldest."""


class ToolTasks:
    """Runs the tool calls of one reply after another: each call in a separate task, within the host's limit, or alone.

    `tell` is that of a stream: its reader gets the start of each call and the reports of the tools.
    """

    def __init__(self, invocation: Invocation, tell: Callable[[News], Awaitable[None]] | None = None) -> None:
        self._invocation, self._tell = invocation, tell
        self._places = asyncio.Semaphore(invocation.host.max_concurrent_tools)
        self._waiting: asyncio.Future[None] | None = None
        self._reads_inner = tell is not None and invocation.plan.options.inner_events
        self.begin_reply()

    def begin_reply(self) -> None:
        """Forget the calls of the reply before this one, which have ended."""
        self._tasks: dict[int, asyncio.Task[Any]] = {}
        self.news: deque[Any] = deque()  # what has happened and was not read
        self._taken = self._unread = 0  # results that were taken from `news`; reports that are in it
        self._reported: list[ToolFinished | ToolSuspended] = []  # results that the loop has not taken in
        self._all_started = False

    async def run_next(self, effect: RunTools) -> Any:
        """Run the next call alone, or wait for the next result of calls that run at the same time.

        Returns the limit that has ended it, with all others that were running, if the model is to be asked for its
        answer then.
        """
        if not self._invocation.answers_at_limit:
            return await self._run_next(effect)
        event = await or_reached_limit(partial(self._run_next, effect), self._invocation)
        if isinstance(event, ReachedLimit):
            await self._stop()
        return event

    async def _run_next(self, effect: RunTools) -> Any:
        invocation = self._invocation
        request = effect.pending[effect.first].request
        if not self._tasks:
            invocation.runner.together = invocation.together and len(effect.pending) > 1
        if self._tasks or invocation.runner.together:
            self._start_all(effect)
        elif self._tell is not None and (self._reads_inner or self._reports_progress(request)):
            self._start(effect.first, request)
        else:
            call = RunTool(effect.first, request)
            if self._tell is not None:
                await self._tell(call)
            return await invocation.perform(call, invocation)
        result = await self._next_result()
        if self._taken == len(self._tasks):
            self.begin_reply()
        return result

    def _reports_progress(self, request: ToolExecutionRequest) -> bool:
        tool = self._invocation.environment.tools.get(request.name)
        return tool is not None and bool(tool.progress_names)

    def _start_all(self, effect: RunTools) -> None:
        """Start the calls of the complete reply that have not been started."""
        if not self._all_started:
            self._all_started = True
            # Recorded results first: a call that ends the invocation cancels the others, and what is recorded has
            # happened. It must be in the state, to be undone.
            recorded = [index for index in effect.indexes if self._has_result(index)]
            for index in dict.fromkeys((*recorded, *effect.indexes)):
                if index not in self._tasks:
                    first = () if index in recorded else [self._tasks[each] for each in recorded]
                    self._start(index, effect.pending[index].request, first)

    def _has_result(self, index: int) -> bool:
        """Return True if the result of a call is recorded, in a run that continues."""
        invocation = self._invocation
        return invocation.place is not None and invocation.place.has_result(invocation.state.position_of(index))

    def _start(self, index: int, request: ToolExecutionRequest, first: Collection[asyncio.Task[Any]] = ()) -> None:
        if self._tell is not None:
            self._invocation.environment.on_progress = self._add_progress
        task = self._tasks[index] = asyncio.create_task(self._run(RunTool(index, request), first))
        task.add_done_callback(self._add)

    async def _run(self, effect: RunTool, first: Collection[asyncio.Task[Any]]) -> Any:
        """Run a call when the calls of `first` have ended."""
        if first:
            await asyncio.wait(first)
        async with self._places:
            self._add(effect)
            around = current_reader.get()
            if self._reads_inner and (around is None or around.put is None):  # else the stream around this call reads
                front_end = None if around is None else around.front_end
                current_reader.set(InnerReader(asyncio.get_running_loop(), self._put_inner, front_end))
            return await self._invocation.perform(effect, self._invocation)

    async def _put_inner(self, event: InnerEvent) -> None:
        news = InnerNews(event, asyncio.get_running_loop().create_future())
        self._add(news)
        await news.is_read

    def _add(self, news: RunTool | ToolProgress | InnerNews | asyncio.Task[Any]) -> None:
        self.news.append(news)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _add_progress(self, report: ToolProgress) -> None:
        if self._unread < MOST_PROGRESS:
            self._unread += 1
        else:
            del self.news[next(index for index, each in enumerate(self.news) if isinstance(each, ToolProgress))]
        self._add(report)

    async def _next_result(self) -> ToolFinished | ToolSuspended:
        """Return the next result; tell what happens before it. Raises the exception of a call."""
        while True:
            while not self.news:
                self._waiting = asyncio.get_running_loop().create_future()
                await self._waiting
            news = self._take_news()
            if isinstance(news, (ToolFinished, ToolSuspended)):
                return news
            if self._tell is not None:
                await self._tell(news)

    def _take_news(self) -> News:
        news = self.news.popleft()
        if isinstance(news, ToolProgress):
            self._unread -= 1
        if not isinstance(news, asyncio.Task):
            begun: News = news
            return begun
        self._taken += 1
        found: News = news.result()
        return found

    # --- beside a reply that is still streamed

    def start_early(self, index: int, request: ToolExecutionRequest) -> None:
        """Start a call before its reply is complete; further ones may follow."""
        self._invocation.runner.together = True
        self._start(index, request)

    def next_beside_reply(self) -> News:
        """Return the first of `news` about these calls. Raises the exception of a call.

        The loop takes the results in when it has the reply; see `take_in_results`.
        """
        news = self._take_news()
        if isinstance(news, (ToolFinished, ToolSuspended)):
            self._reported.append(news)
        return news

    def take_in_results(self) -> None:
        """Let the loop take in the results that came before the end of the reply."""
        for result in self._reported:
            self._take_in(result)
        self._reported.clear()

    # --- the end

    async def cancel(self) -> None:
        """Cancel the running calls, wait for them, and store the finished ones in the invocation's state."""
        running = [task for task in self._tasks.values() if not task.done()]
        if running:
            self._invocation.context.cancellation.cancel()
        for task in running:
            task.cancel()
        try:
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        finally:  # a second cancellation, such as that of the deadline, is raised when all calls have ended
            self.take_in_results()
            for news in self._unread_news():
                if isinstance(news, (ToolFinished, ToolSuspended)):
                    self._take_in(news)
            self.begin_reply()

    async def _stop(self) -> None:
        """Cancel the running calls of a call that goes on. What has happened is reported, and stored in its state."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for news in self._unread_news():
            if self._tell is not None:
                await self._tell(news)
            if isinstance(news, (ToolFinished, ToolSuspended)):
                self._take_in(news)
        self.begin_reply()

    def _unread_news(self) -> Iterator[News]:
        """Yield what has happened and was not read; nothing of a call that has failed or was cancelled."""
        for news in self.news:
            if not isinstance(news, asyncio.Task):
                yield news
            elif not news.cancelled() and news.exception() is None:
                yield news.result()

    def _take_in(self, result: ToolFinished | ToolSuspended) -> None:
        invocation = self._invocation
        if invocation.state.pending:
            invocation.state, _ = advance(invocation.rules, invocation.state, result)
