"""Asks a model: the innermost layer around a model request, for all callers.

Services come here through their layers (limits, recording, interceptors), a model that a program uses directly comes
here through its limits (`injected_models`). Right before a model is asked, `@before_model_request` methods are called:
once per request, also if a chain of fallbacks answers it, and not for replies that were recorded. Not here: the layers
around it (`usage_layers`, `interceptors`), the models (`models`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from contextvars import ContextVar
from copy import copy
from functools import partial
from time import perf_counter

from ..chat import ChatModel, ChatRequest, ChatResponse, CompleteResponse, StreamEvent
from ..chat_streams import answer_stream, no_response, response_of
from ..context import InvocationContext, current_invocation
from ..di.scopes import request_hooks
from ..events import ConnectionReleasedEvent, ModelFailedEvent, ModelRequestEvent, ModelResponseEvent
from ..execution.cancellation import OwnCode
from ..execution.markers import marked_execution
from ..models.fallbacks import FallbackModel, name_answering_model
from ..models.pools import current_pools
from ..request_hooks import BEFORE_MODEL_REQUEST, RELEASES_CONNECTION, Hook, is_marked
from .interruptions import ModelCall


async def ask_model(call: ModelCall, request: ChatRequest) -> ChatResponse:
    """Return the reply of the call's model, and send the events of the request. Raises what the model raises.

    Of a chain, each model that is asked has its own events.
    """
    await call_hooks(call)
    model = call.model
    if isinstance(model, FallbackModel):
        return await model.first_answer(partial(_ask, call, request))
    return await _ask(call, request, model)


async def _ask(call: ModelCall, request: ChatRequest, model: ChatModel) -> ChatResponse:
    asked = _AskedModel(call, request, model)
    try:
        with _inside_model(call):
            reply = await OwnCode(model.chat(request))
        return asked.complete(reply)
    except BaseException as error:
        asked.fail(error)
        raise


async def model_stream(call: ModelCall, request: ChatRequest) -> AsyncGenerator[StreamEvent, None]:
    """Return the reply of the call's model as events, the last of which is `CompleteResponse`; else as `ask_model`."""
    await call_hooks(call)
    model = call.model
    if isinstance(model, FallbackModel):
        return model.first_stream(partial(_read, call, request))
    return _read(call, request, model)


async def _read(call: ModelCall, request: ChatRequest, model: ChatModel) -> AsyncGenerator[StreamEvent, None]:
    asked, inside_model = _AskedModel(call, request, model, streaming=True), _inside_model(call)
    try:
        async with aclosing(answer_stream(model, request)) as events:
            while True:
                # One step at a time: between two of them, the reader's code runs in the same context.
                with inside_model:
                    event = await anext(events, None)
                if event is None:
                    break
                if asked.first is None:
                    asked.note_first()
                if isinstance(event, CompleteResponse):
                    event = CompleteResponse(asked.complete(event.response))
                yield event
        if asked.response is None:
            raise no_response(model)
    except BaseException as error:
        asked.fail(error)
        raise


async def call_hooks(call: ModelCall, moment: Hook = BEFORE_MODEL_REQUEST) -> None:
    """Call the methods of beans for this moment: once, whatever models a chain asks. Raises what they raise."""
    for hook in request_hooks(moment):
        execution = marked_execution(hook)
        done = await call.runner.run(execution, hook, getattr(hook, "__qualname__", "@before_model_request"))
        has_released = done is True and is_marked(hook, RELEASES_CONNECTION)  # a database session, its connection
        if has_released and call.host.listeners is not None:
            call.host.listeners.tell(ConnectionReleasedEvent(call.context))


class _AskedModel:
    """One request to one model, whole or in pieces: its events for listeners, and how the model did."""

    response: ChatResponse | None = None
    first: float | None = None
    """Seconds until the model began to answer."""

    def __init__(self, call: ModelCall, request: ChatRequest, model: ChatModel, *, streaming: bool = False) -> None:
        self._call, self._request, self._model, self._streaming = call, request, model, streaming
        self._began = perf_counter()
        if (listeners := call.host.listeners) is not None:
            # A copy for the events: a program can send one request several times at once, and a chain asks several
            # models with one. Listeners tell them apart.
            self._request = copy(request)
            listeners.tell(ModelRequestEvent(call.context, self._request, model, streaming))

    def note_first(self) -> None:
        """Note that the reply, or its first piece, has arrived."""
        self.first = perf_counter() - self._began
        self._call.host.models.cooling.note_answer(self._call.model_name, self._call.model)

    def complete(self, reply: object) -> ChatResponse:
        """Return the whole reply. Raises `TypeError` for anything but a `ChatResponse`."""
        response = response_of(self._model, reply)
        if self._model is not self._call.model:  # a model of a chain
            response = name_answering_model(response, self._model)
        self.response = response
        if self.first is None:
            self.note_first()
        if (listeners := self._call.host.listeners) is not None:
            taken, first = perf_counter() - self._began, self.first if self._streaming else None
            listeners.tell(ModelResponseEvent(self._call.context, self._request, response, taken, first))
        return response

    def fail(self, error: BaseException) -> None:
        """Note that the request has failed; of a reply that is complete, only its reader can have."""
        if self.first is None:
            self._call.host.models.cooling.note_error(self._call.model_name, self._call.model, error)
        if self.response is None and (listeners := self._call.host.listeners) is not None:
            taken = perf_counter() - self._began
            listeners.tell(ModelFailedEvent(self._call.context, self._request, reported(error), taken))


def reported(error: BaseException) -> BaseException:
    """Return the error for listeners: a stream that is left counts as cancelled."""
    return asyncio.CancelledError("the stream was left") if isinstance(error, GeneratorExit) else error


# --- the code of a model

_asking: ContextVar[tuple[InvocationContext | None] | None] = ContextVar("toolbox.asking", default=None)


class _inside_model:  # noqa: N801 - reads as a state: `with _inside_model(call)`
    """Runs the code of a model inside the block: for each whole reply, and for each piece of a stream."""

    __slots__ = ("_asking", "_call", "_pools")

    def __init__(self, call: ModelCall) -> None:
        self._call = call

    def __enter__(self) -> None:
        self._asking = _asking.set((current_invocation.get(),))
        self._pools = current_pools.set(self._call.host.pools)

    def __exit__(self, *_: object) -> None:
        current_pools.reset(self._pools)
        _asking.reset(self._asking)


def is_inside_model() -> bool:
    """Return True in the code of a model, such as one that asks another model: its request is already counted.

    A service that such code calls is a separate invocation.
    """
    asking = _asking.get()
    return asking is not None and asking[0] is current_invocation.get()
