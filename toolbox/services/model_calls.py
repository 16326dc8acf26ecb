"""Asks a model: the innermost layer around a model request, for all callers.

Services come here through their layers (limits, recording, interceptors), a model that a program uses directly comes
here through its limits (`injected_models`). Right before a model is asked, `@before_model_request` methods are called:
once per request, also if a chain of fallbacks answers it, and not for replies that were recorded. Not here: the layers
around it (`usage_layers`, `interceptors`), the models (`models`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager
from contextvars import ContextVar
from copy import copy
from time import perf_counter
from types import TracebackType
from typing import Any, Protocol

from ..chat import ChatModel, ChatRequest, ChatResponse, CompleteResponse, StreamEvent
from ..chat_streams import answer_stream, no_response, response_of
from ..context import InvocationContext, current_invocation
from ..di.scopes import request_hooks
from ..events import InvocationEvent, Listeners, ModelFailedEvent, ModelRequestEvent, ModelResponseEvent
from ..execution.cancellation import OwnCode
from ..execution.markers import marked_execution
from ..execution.runners import Runner
from ..models.fallbacks import FallbackModel, name_answering_model
from ..models.pools import ConnectionPools, current_pools
from .host_needs import HostModels


class AskingHost(Protocol):
    """What a model request needs of the host of its service."""

    listeners: Listeners | None

    @property
    def pools(self) -> ConnectionPools | None:
        """The connections that the models of a container share; None without a container."""
        ...

    @property
    def models(self) -> HostModels:
        """The models of the host."""
        ...


class ModelCall(Protocol):
    """A call that sends requests to a model: an invocation, or one request to a model that a program uses directly."""

    model: ChatModel
    model_name: str
    context: InvocationContext

    @property
    def runner(self) -> Runner:
        """Runs the `def` methods that are called before a request."""
        ...

    @property
    def host(self) -> AskingHost:
        """The host of the call."""
        ...


async def _call_hooks(call: ModelCall) -> None:
    """Call what beans want to do before a model request: once, whatever models a chain asks."""
    for hook in request_hooks():
        await _call_hook(hook, call)


async def _call_hook(hook: Callable[[], Any], call: ModelCall) -> None:
    """Call what a bean wants to do before a model request. Raises what it raises.

    One that returns a class of events has it sent: a database session knows no listeners.
    """
    execution = marked_execution(hook)
    done = await call.runner.run(execution, hook, getattr(hook, "__qualname__", "@before_model_request"))
    is_event = isinstance(done, type) and issubclass(done, InvocationEvent)
    if is_event and call.host.listeners is not None:
        call.host.listeners.tell(done(call.context))


class _OpenRequest(AbstractAsyncContextManager["_OpenRequest"]):
    """One request to one model, whole or in pieces: its events, and how the model did."""

    response: ChatResponse | None = None
    _first: float | None = None  # seconds until the model began to answer

    def __init__(self, call: ModelCall, request: ChatRequest, model: ChatModel, *, streaming: bool) -> None:
        # A copy for the events: a program can send one request several times at once, and a chain asks several models
        # with one. Listeners tell them apart.
        self._call, self._request, self._model, self._streaming = call, copy(request), model, streaming

    async def __aenter__(self) -> _OpenRequest:
        self._began = perf_counter()
        if (listeners := self._call.host.listeners) is not None:
            listeners.tell(ModelRequestEvent(self._call.context, self._request, self._model, self._streaming))
        return self

    def note_piece(self) -> None:
        """Note that a piece of the reply has arrived."""
        if self._first is None:
            self._first = perf_counter() - self._began
            self._call.host.models.cooling.note_answer(self._call.model_name, self._call.model)

    def complete(self, reply: object) -> ChatResponse:
        """Return the whole reply. Raises `TypeError` for anything but a `ChatResponse`."""
        response = response_of(self._model, reply)
        if self._model is not self._call.model:  # a model of a chain
            response = name_answering_model(response, self._model)
        self.response = response
        self.note_piece()
        if (listeners := self._call.host.listeners) is not None:
            taken, first = perf_counter() - self._began, self._first if self._streaming else None
            listeners.tell(ModelResponseEvent(self._call.context, self._request, response, taken, first))
        return response

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        if self._first is None:
            self._call.host.models.cooling.note_error(self._call.model_name, self._call.model, error)
        if self.response is None and (listeners := self._call.host.listeners) is not None:
            taken = perf_counter() - self._began
            listeners.tell(ModelFailedEvent(self._call.context, self._request, reported(error), taken))


async def ask_model(call: ModelCall, request: ChatRequest) -> ChatResponse:
    """Return the reply of the call's model, and send the events of the request. Raises what the model raises.

    Of a chain, each model that is asked has its own events.
    """

    async def ask(model: ChatModel) -> ChatResponse:
        async with _OpenRequest(call, request, model, streaming=False) as opened:
            with _inside_model(call):
                reply = await OwnCode(model.chat(request))
            return opened.complete(reply)

    await _call_hooks(call)
    model = call.model
    return await (model.first_answer(ask) if isinstance(model, FallbackModel) else ask(model))


async def model_stream(call: ModelCall, request: ChatRequest) -> AsyncGenerator[StreamEvent, None]:
    """Yield the reply of the call's model as events, the last of which is `CompleteResponse`; else as `ask_model`."""

    async def read(model: ChatModel) -> AsyncGenerator[StreamEvent, None]:
        async with _OpenRequest(call, request, model, streaming=True) as opened:
            async with aclosing(answer_stream(model, request)) as events:
                while (event := await _next_event(events, call)) is not None:
                    opened.note_piece()
                    if isinstance(event, CompleteResponse):
                        event = CompleteResponse(opened.complete(event.response))
                    yield event
            if opened.response is None:
                raise no_response(model)

    await _call_hooks(call)
    model = call.model
    stream = model.first_stream(read) if isinstance(model, FallbackModel) else read(model)
    async with aclosing(stream) as events:
        async for event in events:
            yield event


async def _next_event(events: AsyncGenerator[StreamEvent, None], call: ModelCall) -> StreamEvent | None:
    # One step at a time: between two of them, the reader's code runs in the same context.
    with _inside_model(call):
        return await anext(events, None)


def reported(error: BaseException) -> BaseException:
    """Return the error for listeners: a stream that is left counts as cancelled."""
    return asyncio.CancelledError("the stream was left") if isinstance(error, GeneratorExit) else error


# --- the code of a model

_asking: ContextVar[tuple[InvocationContext | None] | None] = ContextVar("toolbox.asking", default=None)


@contextmanager
def _inside_model(call: ModelCall) -> Iterator[None]:
    """Run the code of a model inside the block."""
    asking, pools = _asking.set((current_invocation.get(),)), current_pools.set(call.host.pools)
    try:
        yield
    finally:
        current_pools.reset(pools)
        _asking.reset(asking)


def is_inside_model() -> bool:
    """Return True in the code of a model, such as one that asks another model: its request is already counted.

    A service that such code calls is a separate invocation.
    """
    asking = _asking.get()
    return asking is not None and asking[0] is current_invocation.get()
