"""What a stream adds to a call: the events that its reader gets, in the order of the call, and when each is sent.

`driver.run_call` says here what has happened: a request begins and ends, a result was taken in, the call has ended.
Not here: handing an item over to the reader (`streams`), asking the model for pieces (`model_calls`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..chat import (
    BeforeToolExecution,
    ChatResponse,
    CompleteResponse,
    CompleteToolCall,
    IntermediateResponse,
    PartialReasoning,
    PartialResponse,
    PartialToolCall,
    Retrieved,
    RunSuspended,
    StreamEvent,
    ToolExecuted,
    ToolExecutionRequest,
    ToolProgress,
)
from ..chat_streams import events_of
from ..passages import Passage
from ..service_events import ServiceEvent
from ..tools.results import SUCCESS
from .inner_events import Send
from .invocation import Invocation, Perform
from .loop import (
    AnswerChecked,
    CallModel,
    CheckAnswer,
    Effect,
    Event,
    Fail,
    Finish,
    Listen,
    ModelReplied,
    ReadAnswer,
    RunTool,
    Suspend,
    ToolFinished,
    immediate_executions,
    may_end,
    with_early_call,
)
from .outputs import ANSWER_TOOL, Shape
from .state import ReachedLimit
from .tool_tasks import InnerNews, News, ToolTasks


class StreamedCall:
    """Sends the events of one call to the reader of its stream. Each method waits until the reader wants more.

    With output guardrails, the text is held back until the answer was checked.
    """

    _delayed: IntermediateResponse | None = None  # for a round that may be the last
    _has_pieces = False  # the current reply sent events
    _has_sent_text = False  # a part of an answer reached the reader
    _has_sent_pieces = False  # a part of the current reply did

    def __init__(self, invocation: Invocation, send: Send) -> None:
        self._invocation, self._send_event = invocation, send
        self.tasks = ToolTasks(invocation, self.send_news)
        self._held = HeldText() if invocation.plan.layers.check_answer is not None else None
        invocation.put_piece = self.put

    async def send_passages(self, passages: tuple[Passage, ...]) -> None:
        """Send the passages of the call, after retrievers have found new ones."""
        await self._send(Retrieved(passages))

    def requesting(self, perform: Perform, *, may_be_given: bool) -> Perform:
        """Return the layer around model requests that sends the reply, also one that layers give without pieces."""

        async def ask(effect: CallModel | RunTool, invocation: Invocation) -> Any:
            if isinstance(effect, RunTool):
                return await perform(effect, invocation)
            await self._begin_request()
            event: Any = await perform(effect, invocation)
            if isinstance(event, ModelReplied):
                # The execution that has asked for a recorded reply has sent it.
                if may_be_given and not event.is_replayed:
                    await self._send_unsent(event.response)
                self._end_reply()
            return event

        return ask

    async def _begin_request(self) -> None:
        """The model is asked: the round before it was not the last."""
        await self._send_delayed()
        if (self._invocation.plan.layers.check_answer is None) != (self._held is None):  # another method is in charge
            self._held = HeldText() if self._held is None else None
        self._has_pieces = self._has_sent_pieces = False
        self._invocation.said.clear()
        self.tasks.begin_reply()
        if self._held is not None:
            self._held.clear()  # of an answer that could not be read

    async def put(self, event: StreamEvent) -> None:
        """Send a piece of the model's reply, and what happens in tools that it starts."""
        self._has_pieces = True
        if self._held is not None and (self._held.takes(event) or self._is_of_answer(event)):
            return
        self._has_sent_pieces = True
        if isinstance(event, PartialResponse):
            self._invocation.said.append(event.text)
        if isinstance(event, CompleteToolCall) and self._invocation.starts_early:
            self._start_early(event.request)
        await self._send(event)
        while self.tasks.news:
            await self.send_news(self.tasks.next_beside_reply())

    async def _send_unsent(self, response: ChatResponse) -> None:
        """Send all of a reply that has no pieces, because a layer has given it."""
        if not self._has_pieces:
            for event in events_of(response):
                if not isinstance(event, CompleteResponse):
                    await self.put(event)

    def _end_reply(self) -> None:
        """The reply is complete: let the loop take in the results of tools that have ended beside it."""
        self.tasks.take_in_results()

    @property
    def has_sent_pieces(self) -> bool:
        """True if the reader has a part of the current reply."""
        return self._has_sent_pieces

    @property
    def has_sent(self) -> bool:
        """True if the reader has a part of an answer, or of the current reply."""
        return self._has_sent_text or self._has_sent_pieces

    async def give_fallback(self, finished: Finish) -> None:
        """Send the text of an answer that no model gave."""
        if (text := finished.response.ai_message.text) and self._invocation.plan.output.shape is not Shape.ITEM_STREAM:
            await self._send(PartialResponse(text))

    async def advanced(self, effect: Effect, event: Event, following: Effect) -> None:
        """Send the event of a result that the loop has taken in; `following` is the next effect."""
        if not (isinstance(following, Fail) and self._invocation.plan.output.is_stream):
            self._invocation.said.clear()  # the state has it; of a reply that ends the stream, the reader has the text
        if isinstance(event, ToolFinished):
            await self.send_news(event)
        elif isinstance(event, ReachedLimit):
            for each in self._invocation.state.all_executions:
                if each.started_at is event.at:  # it did not finish
                    await self._send(ToolExecuted(each))
        elif isinstance(event, ModelReplied) and not isinstance(following, (CheckAnswer, Fail, Finish)):
            is_asking = isinstance(following, Listen) and isinstance(following.before, CallModel)
            is_dropped = (is_asking or isinstance(following, CallModel)) and self._invocation.state.stopped is not None
            await self._send_round(event.response, is_alone=is_dropped)
        elif isinstance(event, AnswerChecked) and isinstance(effect, CheckAnswer) and self._held is not None:
            for each in self._held.released(effect, event):
                await self._send(each)

    async def end_intermediate(self, listened: Listen) -> None:
        """The user has added a message: send the reply before it, which is not the last."""
        await self._send_delayed()
        before, invocation = listened.before, self._invocation
        if isinstance(before, CallModel):
            return
        is_answer = isinstance(before, ReadAnswer) and not before.beside
        if isinstance(before, Finish) and invocation.state.stopped is None:
            is_answer = not immediate_executions(invocation.rules, invocation.state)
        if is_answer:
            await self._send_round(before.response, is_alone=True)

    async def put_event(self, event: ServiceEvent) -> None:
        """Send an event that is neither of the model nor of a tool."""
        await self._send(event)

    async def _send_delayed(self) -> None:
        if self._delayed is not None:
            await self._send(self._delayed)
        self._delayed = None

    async def send_news(self, news: News) -> None:
        """Send the event of a call that begins, reports or ends; none for a call that is suspended."""
        if isinstance(news, RunTool):
            await self._send(BeforeToolExecution(news.request))
        elif isinstance(news, ToolProgress):
            await self._send(news)
        elif isinstance(news, ToolFinished):
            await self._send(ToolExecuted(news.outcome.execution))
        elif isinstance(news, InnerNews):
            await self._send(news.event)
            news.read()

    async def end(self) -> None:
        """Send the last events, after the blocks around the call have ended: the conversation is stored by then."""
        invocation, end = self._invocation, self._invocation.end
        if isinstance(end, Suspend):
            if not invocation.yields_suspension or invocation.place is None:
                invocation.value()  # raises
            else:
                await self._send(RunSuspended(invocation.place.run_id, invocation.place.pending))
        if isinstance(end, Finish):
            if invocation.plan.output.shape is Shape.TEXT_STREAM and not end.is_fallback:
                for text in _immediate_texts(invocation):
                    await self._send(PartialResponse(text))
            await self._send(CompleteResponse(replace(end.response, token_usage=invocation.state.token_usage)))

    # --- sending

    async def _send(self, event: ServiceEvent) -> None:
        self._has_sent_text = self._has_sent_text or isinstance(event, PartialResponse)
        await self._send_event(event)
        # A reader that has blocked the loop requests the next event before the timer of the deadline can run. Without
        # this check, the call would go on to its next effect.
        if self._invocation.deadline is not None and self._invocation.is_late:
            raise self._invocation.make_timeout_error()

    def _is_of_answer(self, event: StreamEvent) -> bool:
        """Return True for a piece of the answer tool's call: the reader gets the answer as text, once it is judged."""
        call = event.request if isinstance(event, CompleteToolCall) else event
        if self._invocation.state.mode != "tool" or self._invocation.rules.structure is None:
            return False
        # Servers may send a name in pieces, or after the first arguments.
        return isinstance(call, (ToolExecutionRequest, PartialToolCall)) and ANSWER_TOOL.startswith(call.name or "")

    def _start_early(self, request: ToolExecutionRequest) -> None:
        """Start a tool call before the reply is complete, unless the reply may still be refused."""
        invocation = self._invocation
        invocation.state, index = with_early_call(invocation.rules, invocation.state, request)
        if index is not None:
            self.tasks.start_early(index, request)

    async def _send_round(self, response: ChatResponse, *, is_alone: bool = False) -> None:
        """Send the response of a round with tool calls, later if one of its tools may end the invocation.

        Of a reply that is dropped, or is an intermediate answer, the text was sent: it does not belong to the next one.
        """
        requests = self._invocation.tool_calls_in(response)
        if not requests and not is_alone:
            return
        response = replace(response, ai_message=replace(response.ai_message, tool_execution_requests=requests))
        event = IntermediateResponse(response if self._held is None else self._held.dropped_from(response))
        if may_end(self._invocation.rules, requests):
            self._delayed = event
        else:
            await self._send(event)


def _immediate_texts(invocation: Invocation) -> Iterator[str]:
    """Yield the values of the immediate tools that ended a stream of text, as text; nothing for None."""
    for each in immediate_executions(invocation.rules, invocation.state):
        text = each.result_object if isinstance(each.result_object, str) else each.result
        # Without an object, the text is that of an executor or a guardrail; or it stands for None.
        if text and (each.result_object is not None or text not in ("null", SUCCESS)):
            yield text


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
