"""Performs the effects of the tool loop: `run` returns a value, `stream` yields events.

Both pass the result of each effect to the loop and perform the next effect. Only `stream` creates stream events. Not
here: deciding the next effect (`loop`), running a tool (`tools.pipeline`), waiting for a call (`implementation`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeAlias

from ..chat import (
    BeforeToolExecution,
    ChatResponse,
    CompleteResponse,
    CompleteToolCall,
    IntermediateResponse,
    PartialReasoning,
    PartialResponse,
    RunSuspended,
    ServiceEvent,
    StreamEvent,
    ToolExecuted,
    ToolExecutionRequest,
    ToolProgress,
)
from ..chat_streams import TextPieces, answer_pieces, answer_stream, events_of, no_response, pieces_in, response_of
from ..context import current_bean_caller, current_invocation
from ..execution.cancellation import own_code
from ..tools.codec import SUCCESS
from ..tools.pipeline import ToolSuspension, execute_tool
from .invocation import Invocation, Perform, abandon_runs
from .layers import NOTHING, ObservedModel, around, counted, limited, within
from .loop import (
    AnswerChecked,
    CallModel,
    CheckAnswer,
    Effect,
    Fail,
    Finish,
    ModelReplied,
    RunTool,
    RunTools,
    Suspend,
    ToolFinished,
    ToolSuspended,
    advance,
    immediate_executions,
    may_end,
    with_early_call,
)
from .outputs import ANSWER_TOOL, Shape

News: TypeAlias = RunTool | ToolProgress | ToolFinished | ToolSuspended
"""What happens while tools run: a call starts, reports its progress, ends or is suspended."""


# --- performing one effect


async def perform(effect: CallModel | RunTool, invocation: Invocation) -> Any:
    """Run one tool call or ask the model: the innermost `Perform`, inside all layers.

    In a stream, the pieces of the model's reply are passed on as they arrive.
    """
    if isinstance(effect, RunTool):
        try:
            return ToolFinished(effect.index, await execute_tool(effect.request, invocation.environment))
        except ToolSuspension as suspension:
            return ToolSuspended(effect.index, suspension.details)
    model, request, sent = invocation.model, effect.request, sent_tools(effect, invocation)
    if invocation.pieces is None:
        response = await own_code(model.chat(request))
        return ModelReplied(response if type(response) is ChatResponse else response_of(model, response), sent=sent)
    invocation.environment.sent = sent  # tools may start before the reply is complete
    async with aclosing(answer_stream(model, request)) as events:
        async for event in events:
            if isinstance(event, CompleteResponse):
                return ModelReplied(response_of(model, event.response), sent=sent)
            await invocation.pieces.put(event)
    raise no_response(model)


def sent_tools(effect: CallModel, invocation: Invocation) -> tuple[str, ...]:
    """Return the names of the tools in a request that goes to the model; the answer tool is not one."""
    specifications, rules = effect.request.tool_specifications, invocation.rules
    if specifications is rules.specifications:
        return rules.names
    return tuple([each.name for each in specifications if each.name != ANSWER_TOOL])


def check_answer(effect: CheckAnswer, invocation: Invocation) -> Awaitable[AnswerChecked]:
    """Check the model's answer with the method's guardrails."""
    check = invocation.plan.layers.check_answer
    assert check is not None
    return check(effect, invocation)


def layered(invocation: Invocation) -> Perform:
    """Return the function that performs the effects of an open invocation: `perform` inside the layers it needs."""
    if invocation.host.listeners is not None:
        invocation.model = ObservedModel(invocation.model, invocation.host.listeners, invocation.context)
    performing: Perform = perform
    if invocation.account is not None:
        performing = counted(performing)
    for layer in reversed(invocation.plan.layers.effects):
        performing = layer(performing)
    if invocation.dynamic_providers:
        from .offering import refreshing

        performing = refreshing(performing)
    if invocation.account is not None:
        performing = limited(performing)
    return performing


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
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        invocation = self._invocation
        for news in self._news:
            if not isinstance(news, asyncio.Task) or not invocation.state.pending:
                continue
            if not news.cancelled() and news.exception() is None:
                invocation.state, _ = advance(invocation.rules, invocation.state, news.result())
        self._news.clear()
        self._unread = 0


# --- the two drivers


async def run(invocation: Invocation) -> Any:
    """Run an invocation on the current event loop, and return the method's value."""
    token = current_invocation.set(invocation.context)
    caller = current_bean_caller.set(invocation.call_with_beans)
    running = invocation.host.running
    number = running.begin(invocation.plan.where, invocation.host.running_loop)
    try:
        limit, layers = within(invocation), around(invocation)
        if limit is NOTHING and layers is NOTHING:
            await _perform_effects(invocation)
        else:
            async with limit, layers:
                await _perform_effects(invocation)
        return invocation.value()
    except BaseException as error:
        invocation.context.cancellation.cancel()
        await _abandon_runs(error, invocation)
        raise
    finally:
        running.end(number)
        invocation.note()
        current_bean_caller.reset(caller)
        current_invocation.reset(token)


async def _perform_effects(invocation: Invocation) -> None:
    """Perform one effect after the other, up to the last one."""
    tasks: ToolTasks | None = None
    this: Any = asyncio.current_task(invocation.host.running_loop)
    cancelling = this.cancelling()
    try:
        effect, performing = await invocation.open(), layered(invocation)
        while True:
            event: Any
            if isinstance(effect, CallModel):
                tasks = None
                event = await performing(effect, invocation)
                invocation.environment.sent = event.sent
            elif isinstance(effect, CheckAnswer):
                event = await check_answer(effect, invocation)
            elif not isinstance(effect, RunTools):
                break
            elif (tasks := _tasks_for(effect, invocation, performing, tasks)) is None:
                request = effect.pending[effect.first].request
                event = await performing(RunTool(effect.first, request), invocation)
            else:
                while isinstance(event := await tasks.next(), (RunTool, ToolProgress)):
                    pass
            invocation.state, effect = advance(invocation.rules, invocation.state, event)
            if this.cancelling() > cancelling:
                raise _caught_cancellation()
        await _end(effect, invocation)
    finally:
        if tasks is not None:
            await tasks.cancel()


def _tasks_for(
    effect: RunTools, invocation: Invocation, performing: Perform, tasks: ToolTasks | None, *, progress: bool = False
) -> ToolTasks | None:
    """Return the tasks of calls that run at the same time, all started; None if the next call runs alone.

    `tasks` are those of calls that have been started already.
    """
    if tasks is None:
        invocation.runner.together = invocation.together and len(effect.pending) > 1
        if not invocation.runner.together:
            return None
        tasks = ToolTasks(invocation, performing, progress=progress)
    tasks.start_all(effect)
    return tasks


async def _end(effect: Effect, invocation: Invocation) -> None:
    """End the invocation with its last effect. Raises the error of a `Fail`."""
    if isinstance(effect, Fail):
        raise effect.error
    if isinstance(effect, Finish) and invocation.before_end is not None:
        invocation.before_end(effect)
    invocation.end = effect
    if isinstance(effect, Suspend):
        await invocation.suspend()


def _caught_cancellation() -> asyncio.CancelledError:
    """Return the error for a cancellation that a tool or a model caught; the invocation ends all the same."""
    return asyncio.CancelledError("cancelled; a tool or a model caught the first CancelledError")


async def stream(invocation: Invocation) -> AsyncGenerator[ServiceEvent | TextPieces, None]:
    """Run an invocation and yield its events; pauses until the next event is requested.

    Pieces of text that arrived together may be one `TextPieces`, which saves two steps of generators for each.
    """
    tasks: ToolTasks | None = None
    delayed: IntermediateResponse | None = None  # for a round that may be the last
    held: HeldText | None = HeldText() if invocation.plan.layers.check_answer is not None else None
    news: Any
    try:
        async with around(invocation):
            try:
                effect, performing = await invocation.open(), layered(invocation)
                while True:
                    if isinstance(effect, CallModel):
                        if delayed is not None:
                            yield delayed
                        tasks = delayed = None
                        if held is not None:
                            held.clear()  # of an answer that could not be read
                        async with aclosing(_asking(effect, invocation, performing)) as events:
                            async for event in events:
                                kind = type(event)
                                if kind is ModelReplied or kind is CompleteResponse:
                                    break
                                if held is not None and held.takes(event):
                                    continue
                                if kind is CompleteToolCall and invocation.starts_early:
                                    tasks = _early(event, invocation, tasks, performing)
                                yield event
                                while tasks is not None and tasks.has_news:
                                    if (early := _event_of(await tasks.next(), invocation)) is not None:
                                        yield early
                            else:
                                raise no_response(invocation.model)
                        if isinstance(event, CompleteResponse):
                            sent = invocation.environment.sent
                            event = ModelReplied(response_of(invocation.model, event.response), sent=sent)
                        invocation.environment.sent = event.sent
                        invocation.state, effect = advance(invocation.rules, invocation.state, event)
                        requests = event.response.ai_message.tool_execution_requests
                        if requests and not isinstance(effect, Fail):
                            response = event.response if held is None else held.dropped_from(event.response)
                            intermediate = IntermediateResponse(response)
                            if may_end(invocation.rules, requests):
                                delayed = intermediate
                            else:
                                yield intermediate
                    elif isinstance(effect, CheckAnswer):
                        checked = await check_answer(effect, invocation)
                        released = held.released(effect, checked) if held is not None else ()
                        invocation.state, effect = advance(invocation.rules, invocation.state, checked)
                        for each in released:
                            yield each
                    elif not isinstance(effect, RunTools):
                        break
                    else:
                        tasks = _tasks_for(effect, invocation, performing, tasks, progress=True)
                        if tasks is not None:
                            news = await tasks.next()
                            if isinstance(news, (RunTool, ToolProgress)):
                                yield BeforeToolExecution(news.request) if isinstance(news, RunTool) else news
                                continue
                        else:
                            request = effect.pending[effect.first].request
                            yield BeforeToolExecution(request)
                            if _reports_progress(request, invocation):
                                tasks = ToolTasks(invocation, performing, progress=True)
                                tasks.start(effect.first, request)
                                while not isinstance(news := await tasks.next(), (ToolFinished, ToolSuspended)):
                                    if isinstance(news, ToolProgress):
                                        yield news
                                tasks = None
                            else:
                                this: Any = asyncio.current_task(invocation.host.running_loop)
                                cancelling = this.cancelling()
                                news = await performing(RunTool(effect.first, request), invocation)
                                if this.cancelling() > cancelling:
                                    invocation.state, _ = advance(invocation.rules, invocation.state, news)
                                    raise _caught_cancellation()
                        invocation.state, effect = advance(invocation.rules, invocation.state, news)
                        if isinstance(news, ToolFinished):
                            yield ToolExecuted(news.outcome.execution)
                await _end(effect, invocation)
            finally:
                if tasks is not None:
                    await tasks.cancel()
        if type(invocation.end) is Suspend:
            if not invocation.yields_suspension:
                invocation.value()  # raises
            yield RunSuspended(invocation.place.run_id, invocation.place.session.pending)
        if isinstance(invocation.end, Finish):
            if invocation.plan.output.shape is Shape.TEXT_STREAM:
                for text in _immediate_texts(invocation):
                    yield PartialResponse(text)
            yield CompleteResponse(replace(invocation.end.response, token_usage=invocation.state.token_usage))
    except BaseException as error:
        invocation.context.cancellation.cancel()
        await _abandon_runs(error, invocation)
        raise
    finally:
        invocation.note()


def _immediate_texts(invocation: Invocation) -> Iterator[str]:
    """Yield the values of the immediate tools that ended a stream of text, as text; nothing for None."""
    for each in immediate_executions(invocation.rules, invocation.state):
        text = each.result_object if isinstance(each.result_object, str) else each.result
        # Without an object, the text is that of an executor or a guardrail; or it stands for None.
        if text and (each.result_object is not None or text not in ("null", SUCCESS)):
            yield text


async def _abandon_runs(error: BaseException, invocation: Invocation) -> None:
    """Cancel the suspended runs of services that code of this invocation called, such as a guardrail."""
    own = invocation.place.run_id if invocation.place is not None else None
    await abandon_runs(error, invocation.host, own)


def _reports_progress(request: ToolExecutionRequest, invocation: Invocation) -> bool:
    tool = invocation.environment.tools.get(request.name)
    return tool is not None and bool(tool.progress_names)


# --- a model's reply in a stream


def _asking(effect: CallModel, invocation: Invocation, performing: Perform) -> AsyncGenerator[Any, None]:
    """Return the events of the model's reply; the last is a `CompleteResponse`, or a `ModelReplied` of a layer."""
    if performing is perform:
        invocation.environment.sent = sent_tools(effect, invocation)
        return answer_pieces(invocation.model, effect.request)
    return _through_layers(effect, invocation, performing)


async def _through_layers(
    effect: CallModel, invocation: Invocation, performing: Perform
) -> AsyncGenerator[StreamEvent | ModelReplied, None]:
    """Yield the events while the layers run in a task: they may wait, set timeouts, or ask several times."""
    invocation.pieces = pieces = Pieces()
    task = asyncio.ensure_future(performing(effect, invocation))
    task.add_done_callback(pieces.end)
    try:
        while (event := await pieces.next()) is not None:
            yield event
        replied: Any = task.result()
        invocation.environment.sent = replied.sent
        if not pieces.handed_over:  # a layer replied without asking the model
            for event in events_of(replied.response):
                if not isinstance(event, CompleteResponse):
                    yield event
        yield replied
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class HeldText:
    """Holds back the text of a stream until the answer was checked. The text of other rounds is dropped."""

    def __init__(self) -> None:
        self._pieces: list[Any] = []

    def takes(self, event: object) -> bool:
        """Return True if the event is a piece of text, which is held back."""
        if isinstance(event, (TextPieces, PartialResponse, PartialReasoning)):
            self._pieces.append(event)
            return True
        return False

    def clear(self) -> None:
        """Drop the held text."""
        self._pieces.clear()

    def dropped_from(self, response: ChatResponse) -> ChatResponse:
        """Drop the held text of a round with tool calls. Return its response without text."""
        self.clear()
        message = replace(response.ai_message, text=None, reasoning=None, attributes={})
        return replace(response, ai_message=message, attributes={})

    def released(self, answer: CheckAnswer, checked: AnswerChecked) -> Sequence[Any]:
        """Return the held pieces of an accepted answer; for a changed one, its text. Drop those of a refused one."""
        pieces, self._pieces = self._pieces, []
        if checked.refusal is not None:
            return ()
        texts = [piece.text for each in pieces for piece in pieces_in(each) if isinstance(piece, PartialResponse)]
        if checked.text == answer.text == "".join(texts):
            return pieces
        return (PartialResponse(checked.text),) if checked.text else ()  # a guardrail or an interceptor changed it


class Pieces:
    """Passes the pieces of a reply from the task that asks the model to the stream, one per request."""

    def __init__(self) -> None:
        self._ready: asyncio.Queue[StreamEvent | None] = asyncio.Queue()
        self._asked = asyncio.Event()
        self.handed_over = False

    async def put(self, event: StreamEvent) -> None:
        """Pass on one piece, and wait until the next one is requested."""
        self.handed_over = True
        self._asked.clear()
        self._ready.put_nowait(event)
        await self._asked.wait()

    async def next(self) -> StreamEvent | None:
        """Return the next piece; None after the last."""
        self._asked.set()
        return await self._ready.get()

    def end(self, _: object) -> None:
        """End the pieces."""
        self._ready.put_nowait(None)


def _early(
    event: CompleteToolCall, invocation: Invocation, tasks: ToolTasks | None, performing: Perform
) -> ToolTasks | None:
    """Start a tool call before the reply is complete, unless the reply may still be refused."""
    invocation.state, index = with_early_call(invocation.rules, invocation.state, event.request)
    if index is None:
        return tasks
    tasks = tasks or ToolTasks(invocation, performing, progress=True)
    tasks.start(index, event.request)
    return tasks


def _event_of(news: News, invocation: Invocation) -> ServiceEvent | None:
    """Add the result of an early call to the state, and return its event; None for a call that was suspended."""
    if isinstance(news, ToolProgress):
        return news
    if isinstance(news, RunTool):
        return BeforeToolExecution(news.request)
    invocation.state, _ = advance(invocation.rules, invocation.state, news)
    if isinstance(news, ToolFinished):
        return ToolExecuted(news.outcome.execution)
    return None
