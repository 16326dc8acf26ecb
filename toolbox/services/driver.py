"""Performs the effects of the tool loop: `run` returns a value, `stream` also sends the events on the way.

Not here: deciding the next effect (`loop`), running a tool (`tools.pipeline`), waiting for a call (`methods`), reading
a stream (`streams`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, TypeAlias

from ..chat import (
    BeforeToolExecution,
    ChatResponse,
    CompleteResponse,
    CompleteToolCall,
    IntermediateResponse,
    PartialReasoning,
    PartialResponse,
    PartialToolCall,
    RunSuspended,
    ServiceEvent,
    StreamEvent,
    ToolExecuted,
    ToolExecutionRequest,
    ToolProgress,
)
from ..chat_streams import events_of, no_response
from ..context import current_bean_caller, current_invocation
from ..errors import ModelError
from ..execution.cancellation import CancellationsHere
from ..models.fallbacks import is_worth_another_model
from ..tools.pipeline import execute_tool
from ..tools.results import SUCCESS
from ..tools.tool_calls import ToolSuspension
from .abandoned_runs import abandon_runs
from .bean_calls import call_with_beans
from .interruptions import within_limits
from .invocation import Invocation, Perform
from .invocation_records import note_in_records
from .layers import enter_layers
from .loop import (
    AnswerChecked,
    CallModel,
    CheckAnswer,
    Effect,
    Event,
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
    request_of,
    with_early_call,
)
from .model_calls import ask_model, model_stream
from .opening import open_invocation
from .outputs import ANSWER_TOOL, Shape
from .plans import AnswerWithoutModel
from .tool_tasks import News, ToolTasks
from .usage_layers import counted, limited

Send: TypeAlias = Callable[[ServiceEvent], Awaitable[None]]
"""Sends an event to the reader of a stream, and returns when the reader requests the next one."""


# --- performing one effect


async def perform(effect: CallModel | RunTool, invocation: Invocation) -> Any:
    """Run one tool call or ask the model: the innermost `Perform`, inside all layers.

    In a stream, the pieces of the model's reply are passed on as they arrive.
    """
    if isinstance(effect, RunTool):
        try:
            outcome = await execute_tool(effect.request, effect.environment or invocation.environment)
            return ToolFinished(effect.index, outcome)
        except ToolSuspension as suspension:
            return ToolSuspended(effect.index, suspension.details)
    sent = find_sent_tools(effect, invocation)
    if invocation.pieces is None:
        return ModelReplied(await ask_model(invocation, effect.request), sent=sent)
    invocation.environment.sent = sent  # tools may start before the reply is complete
    async with aclosing(model_stream(invocation, effect.request)) as events:
        async for event in events:
            if isinstance(event, CompleteResponse):
                return ModelReplied(event.response, sent=sent)
            await invocation.pieces.put(event)
    raise no_response(invocation.model)


def find_sent_tools(effect: CallModel, invocation: Invocation) -> tuple[str, ...]:
    """Return the names of the tools in a request that goes to the model; the answer tool is not one."""
    specifications, rules = effect.request.tool_specifications, invocation.rules
    if specifications is rules.specifications:
        return rules.names
    return tuple([each.name for each in specifications if each.name != ANSWER_TOOL])


def wrap_perform(invocation: Invocation) -> Perform:
    """Return the function that performs the effects of an open invocation: `perform` inside the layers it needs."""
    performing: Perform = perform
    if invocation.account is not None:
        performing = counted(performing)
    for layer in reversed(invocation.plan.layers.effects):
        performing = layer(performing)
    if invocation.account is not None:
        performing = limited(performing)
    return performing


# --- the two drivers


async def run(invocation: Invocation) -> Any:
    """Run an invocation on the current event loop, and return the method's value."""
    with invocation.host.running.task(invocation.where):
        async with CurrentCall(invocation), within_limits(invocation):
            await invocation.host.note_caller(invocation.context)
            async with enter_layers(invocation):
                await Rounds(invocation, None).run()
            return invocation.value()


async def stream(invocation: Invocation, send: Send) -> None:
    """Run an invocation and send its events. It pauses at each event until `send` returns.

    A stream does what a call does, in one task: its deadline, its limits and its layers are around all of its rounds,
    while the reader's code runs in the reader's task. The time that the reader takes counts for the deadline.
    """

    async def send_in_time(event: ServiceEvent) -> None:
        await send(event)
        # A reader that has blocked the loop requests the next event before the timer of the deadline can run. Without
        # this check, the call would go on to its next effect.
        if invocation.is_late:
            raise invocation.make_timeout_error()

    async with CurrentCall(invocation), within_limits(invocation):
        await invocation.host.note_caller(invocation.context)
        async with enter_layers(invocation):
            await Rounds(invocation, send_in_time).run()
        await _send_end(invocation, send_in_time)


class CurrentCall(AbstractAsyncContextManager[None]):
    """Makes an invocation the current one inside the block, and ends what it has started elsewhere if it fails."""

    def __init__(self, invocation: Invocation) -> None:
        self._invocation = invocation

    async def __aenter__(self) -> None:
        invocation = self._invocation
        # Not a method of the invocation: timers of its requests keep this context, and would keep its model.
        call = partial(call_with_beans, scope=invocation.host.scope, runner=invocation.runner)
        self._tokens = current_invocation.set(invocation.context), current_bean_caller.set(call)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        invocation = self._invocation
        try:
            if error is not None:
                # Tools on threads, and calls on other loops that its tools have made, see this cancellation; the task's
                # own does not reach them. Runs that the error names wait for an answer that nobody would take: they are
                # suspended calls of services that code of this invocation has called, such as a guardrail.
                invocation.context.cancellation.cancel()
                own = invocation.place.run_id if invocation.place is not None else None
                await abandon_runs(error, invocation.host.cancel_run, own)
        finally:
            if invocation.has_begun:
                note_in_records(invocation.state)
            outer_call, outer_caller = self._tokens
            current_bean_caller.reset(outer_caller)
            current_invocation.reset(outer_call)


async def _send_end(invocation: Invocation, send: Send) -> None:
    """Send the last events of a stream, after its layers have ended: the conversation is stored by then."""
    if isinstance(invocation.end, Suspend):
        if not invocation.yields_suspension or invocation.place is None:
            invocation.value()  # raises
        else:
            await send(RunSuspended(invocation.place.run_id, invocation.place.session.pending))
    if isinstance(invocation.end, Finish):
        if invocation.plan.output.shape is Shape.TEXT_STREAM and not invocation.end.is_fallback:
            for text in _immediate_texts(invocation):
                await send(PartialResponse(text))
        await send(CompleteResponse(replace(invocation.end.response, token_usage=invocation.state.token_usage)))


def _immediate_texts(invocation: Invocation) -> Iterator[str]:
    """Yield the values of the immediate tools that ended a stream of text, as text; nothing for None."""
    for each in immediate_executions(invocation.rules, invocation.state):
        text = each.result_object if isinstance(each.result_object, str) else each.result
        # Without an object, the text is that of an executor or a guardrail; or it stands for None.
        if text and (each.result_object is not None or text not in ("null", SUCCESS)):
            yield text


# --- rounds


class Rounds:
    """Performs the effects of one invocation: model requests, tool calls, and checks of the answer.

    Each method performs one effect, passes the result to the loop, and returns the next effect. In a stream, they also
    send the events to the reader. A round and its events are in one place, so that a stream does what a call does.
    """

    _perform: Perform
    _tasks: ToolTasks | None = None  # of calls that run at the same time
    _delayed: IntermediateResponse | None = None  # for a round that may be the last
    _has_pieces = False  # the current reply sent events
    _has_sent_text = False  # a part of an answer reached the reader
    _has_sent_pieces = False  # a part of the current reply did

    def __init__(self, invocation: Invocation, send: Send | None) -> None:
        self._invocation, self._reader = invocation, send
        self._cancellations = CancellationsHere()
        self._held: HeldText | None = None
        if send is not None:
            invocation.pieces = self
            self._held = HeldText() if invocation.plan.layers.check_answer is not None else None

    async def run(self) -> None:
        """Open the invocation, perform one effect after the other, and end with the last one."""
        effect = await open_invocation(self._invocation)
        self._perform = wrap_perform(self._invocation)
        try:
            while True:
                if isinstance(effect, CallModel):
                    effect = await self._ask_model(effect)
                elif isinstance(effect, RunTools):
                    effect = await self._run_tools(effect)
                elif isinstance(effect, CheckAnswer):
                    effect = await self._check_answer(effect)
                else:
                    break
            await self._end(effect)
        finally:
            if self._tasks is not None:
                await self._tasks.cancel()

    async def _ask_model(self, effect: CallModel) -> Effect:
        """Ask the model; the pieces of its reply arrive at `put` in the meantime. If none answers, use `@fallback`."""
        if self._delayed is not None:
            await self._send(self._delayed)
        self._tasks = self._delayed = None
        self._has_pieces = self._has_sent_pieces = False
        if self._held is not None:
            self._held.clear()  # of an answer that could not be read
        failure: ModelError | None = None
        replied: Any = None
        try:
            replied = await self._perform(effect, self._invocation)
        except ModelError as error:
            # A reader who has a part of an answer must not get another one.
            has_sent = self._has_sent_text or self._has_sent_pieces
            if self._invocation.plan.fallback is None or has_sent or not is_worth_another_model(error):
                raise
            failure = error
        if failure is not None:
            return await self._use_fallback(self._invocation.plan.fallback, failure)
        if self._reader is not None and not self._has_pieces and self._perform is not perform:
            await self._send_whole(replied.response)
        self._invocation.environment.sent = replied.sent
        following = self._advance(replied)
        if self._reader is not None and not isinstance(following, (CheckAnswer, Fail, Finish)):
            await self._send_round(replied.response)
        return following

    async def _use_fallback(self, answer: AnswerWithoutModel | None, failure: ModelError) -> Effect:
        """Let the method's `@fallback` end the invocation."""
        assert answer is not None
        finished: Finish = await answer.give(failure, self._invocation)
        if self._cancellations.came:
            raise asyncio.CancelledError("cancelled; a fallback caught the first CancelledError")
        if (text := finished.response.ai_message.text) and self._invocation.plan.output.shape is not Shape.ITEM_STREAM:
            await self._send(PartialResponse(text))
        return finished

    async def put(self, event: StreamEvent) -> None:
        """Send a piece of the model's reply, and what happens in tools that it starts."""
        self._has_pieces = True
        if self._held is not None and (self._held.takes(event) or self._is_of_answer(event)):
            return
        self._has_sent_pieces = True
        if isinstance(event, CompleteToolCall) and self._invocation.starts_early:
            self._start_early(event.request)
        await self._send(event)
        while self._tasks is not None and self._tasks.has_news:
            news = await self._tasks.next()
            if isinstance(news, (ToolFinished, ToolSuspended)):
                self._invocation.state, _ = advance(self._invocation.rules, self._invocation.state, news)
            await self._send_news(news)

    def _is_of_answer(self, event: StreamEvent) -> bool:
        """Return True for a piece of the answer tool's call: the reader gets the answer as text, once it is judged."""
        call = event.request if isinstance(event, CompleteToolCall) else event
        if self._invocation.state.mode != "tool" or self._invocation.rules.structure is None:
            return False
        # Servers may send a name in pieces, or after the first arguments.
        return isinstance(call, (ToolExecutionRequest, PartialToolCall)) and ANSWER_TOOL.startswith(call.name or "")

    async def _check_answer(self, effect: CheckAnswer) -> Effect:
        """Check the model's answer with the method's guardrails, then send the text that was held back."""
        check = self._invocation.plan.layers.check_answer
        assert check is not None
        checked = await check(effect, self._invocation)
        released = self._held.released(effect, checked) if self._held is not None else ()
        following = self._advance(checked)
        for each in released:
            await self._send(each)
        return following

    async def _run_tools(self, effect: RunTools) -> Effect:
        """Run the next call alone, or wait for the next result of calls that run at the same time."""
        invocation = self._invocation
        request, first = effect.pending[effect.first].request, len(invocation.state.executions)
        result: Any
        if self._tasks is None:
            invocation.runner.together = invocation.together and len(effect.pending) > 1
        if self._tasks is not None or invocation.runner.together:
            tasks = self._tasks = self._tasks or self._make_tasks()
            tasks.start_all(effect)
            result = await self._next_result(tasks)
        elif self._reader is not None and self._reports_progress(request):
            tasks = self._tasks = self._make_tasks()
            tasks.start(effect.first, request)
            result = await self._next_result(tasks)
            self._tasks = None
        else:
            call = RunTool(effect.first, request)
            if self._reader is not None:
                await self._send_news(call)
            result = await self._perform(call, invocation)
        following = self._advance(result)
        if self._reader is not None:
            await self._send_news(result)
        after_round, has_ended = invocation.plan.layers.after_round, len(invocation.state.executions) > first
        if after_round is not None and has_ended:
            await after_round(invocation, first)
            if isinstance(following, CallModel):
                following = CallModel(request_of(invocation.rules, invocation.state))
        return following

    def _reports_progress(self, request: ToolExecutionRequest) -> bool:
        tool = self._invocation.environment.tools.get(request.name)
        return tool is not None and bool(tool.progress_names)

    def _advance(self, event: Event) -> Effect:
        """Pass a result to the loop. Return the next effect.

        A tool, a model or an interceptor may catch the `CancelledError` and return a value. The result is kept, and the
        invocation ends all the same, before anything is sent to a reader who has left.
        """
        invocation = self._invocation
        invocation.state, following = advance(invocation.rules, invocation.state, event)
        if self._cancellations.came:
            raise asyncio.CancelledError("cancelled; a tool or a model caught the first CancelledError")
        return following

    async def _end(self, effect: Effect) -> None:
        """End the invocation with its last effect. Raises the error of a `Fail`."""
        invocation = self._invocation
        if isinstance(effect, Fail):
            raise effect.error
        if isinstance(effect, Finish) and invocation.before_end is not None and not effect.is_fallback:
            invocation.before_end(effect)
        invocation.end = effect
        if isinstance(effect, Suspend) and invocation.place is not None:
            await invocation.place.session.suspend(invocation)

    def _start_early(self, request: ToolExecutionRequest) -> None:
        """Start a tool call before the reply is complete, unless the reply may still be refused."""
        invocation = self._invocation
        invocation.state, index = with_early_call(invocation.rules, invocation.state, request)
        if index is not None:
            invocation.runner.together = True  # further calls of the reply may follow
            self._tasks = self._tasks or self._make_tasks()
            self._tasks.start(index, request)

    def _make_tasks(self) -> ToolTasks:
        return ToolTasks(self._invocation, self._perform, progress=self._reader is not None)

    async def _next_result(self, tasks: ToolTasks) -> ToolFinished | ToolSuspended:
        """Return the next result of calls that run at the same time; send what happens before it."""
        while isinstance(news := await tasks.next(), (RunTool, ToolProgress)):
            await self._send_news(news)
        return news

    # --- events, which only a stream has a reader for

    async def _send(self, event: ServiceEvent) -> None:
        if self._reader is not None:
            self._has_sent_text = self._has_sent_text or isinstance(event, PartialResponse)
            await self._reader(event)

    async def _send_news(self, news: News) -> None:
        """Send the event of a call that begins, reports or ends; none for a call that is suspended."""
        if isinstance(news, RunTool):
            await self._send(BeforeToolExecution(news.request))
        elif isinstance(news, ToolProgress):
            await self._send(news)
        elif isinstance(news, ToolFinished):
            await self._send(ToolExecuted(news.outcome.execution))

    async def _send_whole(self, response: ChatResponse) -> None:
        """Send the events of a reply that a layer gave without asking the model."""
        for event in events_of(response):
            if not isinstance(event, CompleteResponse):
                await self.put(event)

    async def _send_round(self, response: ChatResponse) -> None:
        """Send the response of a round with tool calls, later if one of its tools may end the invocation."""
        requests = self._invocation.tool_calls_in(response)
        if not requests:
            return
        response = replace(response, ai_message=replace(response.ai_message, tool_execution_requests=requests))
        event = IntermediateResponse(response if self._held is None else self._held.dropped_from(response))
        if may_end(self._invocation.rules, requests):
            self._delayed = event
        else:
            await self._send(event)


class HeldText:
    """Holds back the text of a stream until the answer was checked. The text of other rounds is dropped."""

    def __init__(self) -> None:
        self._pieces: list[Any] = []

    def takes(self, event: object) -> bool:
        """Return True if the event is a piece of text, which is held back."""
        if isinstance(event, (PartialResponse, PartialReasoning)):
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
        texts = [piece.text for piece in pieces if isinstance(piece, PartialResponse)]
        if checked.text == answer.text == "".join(texts):
            return pieces
        return (PartialResponse(checked.text),) if checked.text else ()  # a guardrail or an interceptor changed it
