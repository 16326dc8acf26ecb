"""What happened in an invocation, as data, and who is told of it: `EventListener`.

Events are told as they happen, in the context in which it happens. Not here: who tells them (`tools.pipeline`,
`services.layers`), the events of a stream (`chat`), listeners that log (`logs`) or trace (`otel`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from .chat import (
    ChatModel,
    ChatRequest,
    ChatResponse,
    Message,
    TokenUsage,
    ToolExecution,
    ToolExecutionRequest,
    ToolSpecification,
)
from .context import InvocationContext

logger = logging.getLogger("toolbox.events")


@dataclass(frozen=True, slots=True)
class InvocationEvent:
    """Something that happened in an invocation.

    The events of one tool call have one context object, in which `request` is set; all others have the invocation's.
    """

    context: InvocationContext

    is_end: ClassVar[bool] = False
    """Whether it ends what another event has begun."""

    @property
    def invocation_id(self) -> str:
        """Names the invocation: the same in all its events, and in no other's."""
        return self.context.invocation_id

    @property
    def outer_invocation_id(self) -> str | None:
        """Names the invocation that this one was begun in, as when a service is another's tool."""
        return self.context.outer_invocation_id


# --- the service


@dataclass(frozen=True, slots=True)
class ServiceStartedEvent(InvocationEvent):
    """A service method was called; it has not waited for its conversation yet."""


@dataclass(frozen=True, slots=True)
class ServiceCompletedEvent(InvocationEvent):
    """The call has ended well, and its conversation is written.

    `response` is the model's last, `value` what the method returns, `token_usage` is summed over the call's replies
    (None when no reply had one), `duration` is in seconds.
    """

    response: ChatResponse
    value: Any
    token_usage: TokenUsage | None
    tool_executions: tuple[ToolExecution, ...]
    duration: float

    is_end: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class ServiceFailedEvent(InvocationEvent):
    """The call has failed; `asyncio.CancelledError` when it was cancelled or its stream was left."""

    error: BaseException
    duration: float

    is_end: ClassVar[bool] = True


# --- the model


@dataclass(frozen=True, slots=True)
class ModelRequestEvent(InvocationEvent):
    """A model is asked."""

    request: ChatRequest
    model: ChatModel
    streaming: bool

    @property
    def model_name(self) -> str:
        """What the model is called: its `model`, else the name of its class."""
        name = getattr(self.model, "model", None)
        return name if isinstance(name, str) else type(self.model).__name__


@dataclass(frozen=True, slots=True)
class ModelResponseEvent(InvocationEvent):
    """The model has answered; durations in seconds. `time_to_first_chunk` is None where nothing was streamed."""

    request: ChatRequest
    response: ChatResponse
    duration: float
    time_to_first_chunk: float | None = None

    is_end: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class ModelFailedEvent(InvocationEvent):
    """The model has not answered."""

    request: ChatRequest
    error: BaseException
    duration: float

    is_end: ClassVar[bool] = True


# --- tools


@dataclass(frozen=True, slots=True)
class ToolStartedEvent(InvocationEvent):
    """A tool is called; `specification` is None when there is none of this name."""

    request: ToolExecutionRequest
    specification: ToolSpecification | None


@dataclass(frozen=True, slots=True)
class ToolExecutedEvent(InvocationEvent):
    """The call has a result, which the model is told; `error` is what the tool raised, if it did."""

    execution: ToolExecution
    error: Exception | None

    is_end: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class ToolFailedEvent(InvocationEvent):
    """The call has no result: what it raised ends the invocation, or it was cancelled."""

    request: ToolExecutionRequest
    error: BaseException
    duration: float

    is_end: ClassVar[bool] = True


# --- the conversation


@dataclass(frozen=True, slots=True)
class MemoryWrittenEvent(InvocationEvent):
    """The conversation `context.memory_id` was written; `messages` is all that is kept of it now."""

    messages: tuple[Message, ...]


# --- who is told


class EventListener(Protocol):
    """Is told of all that happens. A bean that is one is told by its container; register as many as you like.

    It is called where things happen, on the event loop, so it must be quick. It runs in the context in which the
    service or the tool runs: context variables it sets when something starts are seen by what runs inside, and it
    resets them when told of the end. What it raises is logged, and changes nothing.
    """

    def on_event(self, event: InvocationEvent) -> None:
        """Something has happened."""
        ...


class Listeners:
    """Those who are told. The end of something is told in reverse, so that each undoes what it did last."""

    def __init__(self, listeners: Iterable[EventListener]) -> None:
        self._listeners = tuple(listeners)

    def tell(self, event: InvocationEvent) -> None:
        """Tells all of them."""
        for each in reversed(self._listeners) if event.is_end else self._listeners:
            try:
                each.on_event(event)
            except Exception:
                name = type(each).__name__
                logger.exception("%s.on_event failed on a %s; nothing else has", name, type(event).__name__)
