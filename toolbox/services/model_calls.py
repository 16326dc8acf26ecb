"""Asks a model: the innermost layer around a model request, for all callers.

Services come here through their layers (limits, recording, interceptors), a model that a program uses directly comes
here through the limits. Right before a model is asked, `@before_model_request` methods are called: once per request,
also if a chain of fallbacks answers it, and not for replies that were recorded. Not here: the layers around it
(`layers`, `interceptors`), the models (`models`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from time import perf_counter
from typing import Any, Protocol

from ..chat import ChatModel, ChatRequest, ChatResponse, CompleteResponse, StreamEvent
from ..chat_streams import answer_stream, no_response, response_of
from ..context import InvocationContext
from ..di.scopes import request_hooks
from ..events import InvocationEvent, Listeners, ModelFailedEvent, ModelRequestEvent, ModelResponseEvent
from ..execution.cancellation import own_code
from ..execution.markers import EXECUTION_MARK, execution_of
from ..execution.runners import Runner


class AskingHost(Protocol):
    """What a model request needs of the host of its service."""

    listeners: Listeners | None


async def _call(
    hooks: Iterable[Callable[[], Any]], context: InvocationContext, host: AskingHost, runner: Runner
) -> None:
    """Call what beans want to do before a model request, one after the other. Raises what they raise.

    One that returns a class of events has it sent: a database session knows no listeners.
    """
    for hook in hooks:
        execution = execution_of(hook, getattr(hook, EXECUTION_MARK, None))
        done = await runner.run(execution, hook, getattr(hook, "__qualname__", "@before_model_request"))
        is_event = isinstance(done, type) and issubclass(done, InvocationEvent)
        if is_event and host.listeners is not None:
            host.listeners.tell(done(context))


async def ask_model(
    model: ChatModel, request: ChatRequest, context: InvocationContext, host: AskingHost, runner: Runner
) -> ChatResponse:
    """Return the reply of a model, and send the events of the request. Raises what the model raises.

    The `def` methods to call before run where `runner` places them.
    """
    if hooks := request_hooks():
        await _call(hooks, context, host, runner)
    if (listeners := host.listeners) is None:
        return response_of(model, await own_code(model.chat(request)))
    began = perf_counter()
    listeners.tell(ModelRequestEvent(context, request, model, streaming=False))
    try:
        response = response_of(model, await own_code(model.chat(request)))
    except BaseException as error:
        listeners.tell(ModelFailedEvent(context, request, error, perf_counter() - began))
        raise
    listeners.tell(ModelResponseEvent(context, request, response, perf_counter() - began))
    return response


async def model_stream(
    model: ChatModel, request: ChatRequest, context: InvocationContext, host: AskingHost, runner: Runner
) -> AsyncGenerator[StreamEvent, None]:
    """Yield the reply of a model as events, the last of which is `CompleteResponse`; otherwise as `ask_model`."""
    if hooks := request_hooks():
        await _call(hooks, context, host, runner)
    listeners, began, first = host.listeners, perf_counter(), None
    response: ChatResponse | None = None
    if listeners is not None:
        listeners.tell(ModelRequestEvent(context, request, model, streaming=True))
    try:
        async with aclosing(answer_stream(model, request)) as events:
            async for event in events:
                if first is None:
                    first = perf_counter() - began
                if isinstance(event, CompleteResponse):
                    response = response_of(model, event.response)
                    if listeners is not None:
                        taken = perf_counter() - began
                        listeners.tell(ModelResponseEvent(context, request, response, taken, first))
                yield event
        if response is None:
            raise no_response(model)
    except BaseException as error:
        if response is None and listeners is not None:
            listeners.tell(ModelFailedEvent(context, request, reported(error), perf_counter() - began))
        raise


def reported(error: BaseException) -> BaseException:
    """Return the error for listeners: a stream that is left counts as cancelled."""
    return asyncio.CancelledError("the stream was left") if isinstance(error, GeneratorExit) else error
