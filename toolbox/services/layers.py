"""The built-in layers: the turn and memory of a conversation, event listeners, and the deadline.

A layer of an invocation is an async context manager, so that it works for coroutines and streams. Not here: the types
of layers (`plans`), layers of tools (`tools.pipeline`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager, nullcontext
from time import perf_counter
from typing import Any

from ..chat import ChatModel, ChatRequest, ChatResponse, CompleteResponse, StreamEvent
from ..chat_streams import answer_stream, no_response, response_of
from ..context import InvocationContext
from ..errors import ConversationSuspendedError
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
    ServiceSuspendedEvent,
)
from .invocation import Invocation
from .loop import Finish, Suspend
from .memory import ChatMemoryKey

NOTHING: AbstractAsyncContextManager[None] = nullcontext()


def around(invocation: Invocation) -> AbstractAsyncContextManager[None]:
    """Return the layers of an invocation: listeners, its conversation, and those of its plan."""
    layers = [
        *([observed] if invocation.host.listeners is not None else ()),
        *([in_conversation] if invocation.memory_key is not None else ()),
        *invocation.plan.layers.invocation,
    ]
    if not layers:
        return NOTHING
    return layers[0](invocation) if len(layers) == 1 else _all_around(layers, invocation)


@asynccontextmanager
async def _all_around(layers: list[Any], invocation: Invocation) -> AsyncIterator[None]:
    async with AsyncExitStack() as entered:
        for layer in layers:
            await entered.enter_async_context(layer(invocation))
        yield


# --- the conversation


@asynccontextmanager
async def in_conversation(invocation: Invocation) -> AsyncIterator[None]:
    """Take the turn in the conversation, load its messages, and store them if the invocation succeeds."""
    key, window = invocation.memory_key, invocation.plan.window
    assert key is not None
    assert window is not None
    memories = await invocation.host.memories()
    async with memories.turn(key, invocation):
        if invocation.plan.checks_suspended or invocation.plan.providers:
            await _refuse_suspended(key, invocation)
        invocation.history = history = await memories.load(key, window)
        yield
        if isinstance(invocation.end, Finish):
            kept = window.newest((*history, *invocation.state.remembered))
            await memories.store.update_messages(key, kept)
            if invocation.host.listeners is not None:
                invocation.host.listeners.tell(MemoryWrittenEvent(invocation.context, kept))


async def _refuse_suspended(key: ChatMemoryKey, invocation: Invocation) -> None:
    """Raise `ConversationSuspendedError` if the conversation has a suspended run, or cancel that run."""
    host, plan = invocation.host, invocation.plan
    if (run_id := await host.suspended_run(key)) is None:
        return
    if plan.options.on_suspended == "raise":
        raise ConversationSuspendedError(plan.service.__name__, run_id)
    await host.cancel_run(run_id, "a new call began in its conversation")


# --- the deadline


def within(invocation: Invocation) -> AbstractAsyncContextManager[None]:
    """Raise `InvocationTimeoutError` inside the block when the invocation's deadline passes.

    A stream uses it for each step, because its reader's task runs between two steps.
    """
    return NOTHING if invocation.deadline is None else _until(invocation.deadline.at, invocation)


@asynccontextmanager
async def _until(deadline: float, invocation: Invocation) -> AsyncIterator[None]:
    left = deadline - time.monotonic()
    if left <= 0:
        raise invocation.timed_out()
    limit = asyncio.timeout(left)
    try:
        async with limit:
            yield
    except TimeoutError:
        if limit.expired():
            raise invocation.timed_out() from None
        raise


# --- listeners


@asynccontextmanager
async def observed(invocation: Invocation) -> AsyncIterator[None]:
    """Send events to the listeners when an invocation starts, completes or fails."""
    listeners, context = invocation.host.listeners, invocation.context
    assert listeners is not None
    began = perf_counter()
    listeners.tell(ServiceStartedEvent(context))
    try:
        yield
    except BaseException as error:
        late = invocation.deadline is not None and time.monotonic() >= invocation.deadline.at
        failure = invocation.timed_out() if late and isinstance(error, asyncio.CancelledError) else _reported(error)
        listeners.tell(ServiceFailedEvent(context, failure, perf_counter() - began))
        raise
    end = invocation.end
    if isinstance(end, Suspend) and invocation.place is not None:
        session, path = invocation.place.session, invocation.place.path
        taken = perf_counter() - began
        listeners.tell(ServiceSuspendedEvent(context, session.id, session.pending_below(path), taken))
    if isinstance(end, Finish):
        state = invocation.state
        executions, taken = tuple(state.executions), perf_counter() - began
        listeners.tell(
            ServiceCompletedEvent(context, end.response, invocation.value(), state.token_usage, executions, taken)
        )


class ObservedModel:
    """Wraps a model and sends its requests and replies to the listeners."""

    def __init__(self, model: ChatModel, listeners: Listeners, context: InvocationContext) -> None:
        self._model, self._context = model, context
        self._tell: Callable[[InvocationEvent], None] = listeners.tell

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
                self._tell(ModelFailedEvent(self._context, request, _reported(error), perf_counter() - began))
            raise


def _reported(error: BaseException) -> BaseException:
    """Return the error for listeners: a stream that is left counts as cancelled."""
    return asyncio.CancelledError("the stream was left") if isinstance(error, GeneratorExit) else error
