"""Tells listeners what an invocation and the model it asks do.

Not here: tool calls (`toolbox.tools.pipeline`), what is told (`toolbox.events`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from time import perf_counter
from typing import Any

from ..chat import ChatModel, ChatRequest, ChatResponse, CompleteResponse, Message, StreamEvent
from ..chat_streams import answer_stream, no_response, response_of
from ..context import InvocationContext
from ..events import (
    InvocationEvent,
    Listeners,
    MemoryWrittenEvent,
    ModelFailedEvent,
    ModelRequestEvent,
    ModelResponseEvent,
    ServiceCompletedEvent,
    ServiceFailedEvent,
    ServiceStartedEvent,
)
from .loop import State


class Observation:
    """One invocation, told to the listeners."""

    def __init__(self, listeners: Listeners, context: InvocationContext) -> None:
        self._tell, self._context = listeners.tell, context
        self._began = 0.0
        self._has_ended = True

    def started(self) -> None:
        """It begins."""
        self._began, self._has_ended = perf_counter(), False
        self._tell(ServiceStartedEvent(self._context))

    def completed(self, response: ChatResponse, value: Any, state: State) -> None:
        """It has its answer; what happens from here on, as when a stream's reader leaves, changes nothing of that."""
        self._has_ended = True
        taken = perf_counter() - self._began
        self._tell(
            ServiceCompletedEvent(self._context, response, value, state.token_usage, tuple(state.executions), taken)
        )

    def failed(self, error: BaseException) -> None:
        """It has ended otherwise."""
        if not self._has_ended:
            self._has_ended = True
            self._tell(ServiceFailedEvent(self._context, _told(error), perf_counter() - self._began))

    def remembered(self, messages: tuple[Message, ...]) -> None:
        """Its conversation has been written."""
        self._tell(MemoryWrittenEvent(self._context, messages))

    def of(self, model: ChatModel) -> ChatModel:
        """The model, for this invocation to ask."""
        return _ObservedModel(model, self._tell, self._context)


class _ObservedModel:
    """A model whose requests are told."""

    def __init__(self, model: ChatModel, tell: Callable[[InvocationEvent], None], context: InvocationContext) -> None:
        self._model, self._tell, self._context = model, tell, context

    async def chat(self, request: ChatRequest) -> ChatResponse:
        """See `ChatModel`."""
        began = perf_counter()
        self._tell(ModelRequestEvent(self._context, request, self._model, streaming=False))
        try:
            response = response_of(self._model, await self._model.chat(request))
        except BaseException as error:
            self._tell(ModelFailedEvent(self._context, request, error, perf_counter() - began))
            raise
        self._tell(ModelResponseEvent(self._context, request, response, perf_counter() - began))
        return response

    async def stream(self, request: ChatRequest) -> AsyncIterator[StreamEvent]:
        """See `StreamingChatModel`."""
        began, first = perf_counter(), None
        response: ChatResponse | None = None
        self._tell(ModelRequestEvent(self._context, request, self._model, streaming=True))
        try:
            async with aclosing(answer_stream(self._model, request)) as events:
                async for event in events:
                    if first is None:
                        first = perf_counter() - began
                    if isinstance(event, CompleteResponse):
                        response = response_of(self._model, event.response)
                        taken = perf_counter() - began
                        self._tell(ModelResponseEvent(self._context, request, response, taken, first))
                    yield event
            if response is None:
                raise no_response(self._model)
        except BaseException as error:
            if response is None:
                self._tell(ModelFailedEvent(self._context, request, _told(error), perf_counter() - began))
            raise


def _told(error: BaseException) -> BaseException:
    """What is told of an error: a stream that is left is cancelled, as any call that is given up."""
    return asyncio.CancelledError("the stream was left") if isinstance(error, GeneratorExit) else error
