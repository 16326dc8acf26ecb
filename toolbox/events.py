"""Events of invocations, and `EventListener`, which receives them.

Listeners are called immediately, in the context of the code that causes the event. Not here: sending the events
(`tools.pipeline`, `services.layers`), stream events (`chat`), listeners for logs (`logs`) and traces (`otel`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

from .chat import (
    ChatModel,
    ChatRequest,
    ChatResponse,
    Message,
    PendingCall,
    TokenUsage,
    ToolExecution,
    ToolExecutionRequest,
    ToolSpecification,
    UserMessage,
)
from .context import InvocationContext
from .errors import ModelError
from .limits import Usage, UsageLimits
from .passages import Passage
from .retrieval import Query

__all__ = [
    "CompensatedEvent",
    "ConnectionReleasedEvent",
    "EventListener",
    "FallbackUsedEvent",
    "GuardrailExecutedEvent",
    "HandedOverEvent",
    "InvocationEvent",
    "MemoryWrittenEvent",
    "ModelFailedEvent",
    "ModelRequestEvent",
    "ModelResponseEvent",
    "ModelSkippedEvent",
    "RetrievedEvent",
    "RunAnsweredEvent",
    "RunResumedEvent",
    "RunStartedEvent",
    "ServiceCompletedEvent",
    "ServiceFailedEvent",
    "ServiceStartedEvent",
    "ServiceSuspendedEvent",
    "ToldEvent",
    "ToolExecutedEvent",
    "ToolFailedEvent",
    "ToolProgressEvent",
    "ToolStartedEvent",
    "ToolSuspendedEvent",
    "UsageCountedEvent",
]

logger = logging.getLogger("toolbox.events")


@dataclass(frozen=True, slots=True)
class InvocationEvent:
    """Base class of all events. `context` is the invocation.

    The events of a tool call share one context object, whose `request` is the tool call.
    """

    context: InvocationContext

    is_end: ClassVar[bool] = False
    """True for events that end an operation, such as `ToolExecutedEvent`."""

    @property
    def invocation_id(self) -> str:
        """Return the id of the invocation, which all its events share."""
        return self.context.invocation_id

    @property
    def outer_invocation_id(self) -> str | None:
        """Return the id of the invocation that started this one, for example when a service is a tool, or None."""
        return self.context.outer_invocation_id


# --- the service


@dataclass(frozen=True, slots=True)
class ServiceStartedEvent(InvocationEvent):
    """A service method was called. It may still wait for its conversation."""


@dataclass(frozen=True, slots=True)
class ServiceCompletedEvent(InvocationEvent):
    """A service call succeeded, and its conversation is saved.

    `response` is the model's last response, `value` the method's return value, `token_usage` the sum of all responses
    of the call (None if no response had a usage), `duration` is in seconds.
    """

    response: ChatResponse
    value: Any
    token_usage: TokenUsage | None
    tool_executions: tuple[ToolExecution, ...]
    duration: float

    is_end: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class ServiceFailedEvent(InvocationEvent):
    """A service call failed. `error` is `asyncio.CancelledError` if the call was cancelled or its stream was closed.

    `duration` is in seconds.
    """

    error: BaseException
    duration: float

    is_end: ClassVar[bool] = True


# --- the model


@dataclass(frozen=True, slots=True)
class ConnectionReleasedEvent(InvocationEvent):
    """A database session gave its connection back, right before a model request."""


@dataclass(frozen=True, slots=True)
class ModelRequestEvent(InvocationEvent):
    """A model request starts. `streaming` is True for a streaming request. Each model of a chain that is asked has one.

    `request` is one object for all events of this request, and for no other request, also if an equal one is sent.
    """

    request: ChatRequest
    model: ChatModel
    streaming: bool

    @property
    def model_name(self) -> str:
        """Return the model's name: its attribute `model`, otherwise the name of its class."""
        name = getattr(self.model, "model", None)
        return name if isinstance(name, str) else type(self.model).__name__


@dataclass(frozen=True, slots=True)
class ModelResponseEvent(InvocationEvent):
    """A model responded. Durations are in seconds; `time_to_first_chunk` is None for requests without streaming."""

    request: ChatRequest
    response: ChatResponse
    duration: float
    time_to_first_chunk: float | None = None

    is_end: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class ModelFailedEvent(InvocationEvent):
    """A model request failed. `duration` is in seconds."""

    request: ChatRequest
    error: BaseException
    duration: float

    is_end: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class ModelSkippedEvent(InvocationEvent):
    """A model of a chain of fallbacks was not asked, because it failed a short time ago.

    `model` is its name in the container; `until` is when one request tries it again.
    """

    model: str
    until: datetime


@dataclass(frozen=True, slots=True)
class FallbackUsedEvent(InvocationEvent):
    """No model answered, and a `@fallback` gives the answer of the call. `error` is that of the last model."""

    error: ModelError


@dataclass(frozen=True, slots=True)
class UsageCountedEvent(InvocationEvent):
    """A model's reply was counted in a call with limits. `usage` is that of the innermost `limits` so far."""

    usage: Usage
    limits: UsageLimits


# --- tools


@dataclass(frozen=True, slots=True)
class ToolStartedEvent(InvocationEvent):
    """A tool call starts. `specification` is None for an unknown tool."""

    request: ToolExecutionRequest
    specification: ToolSpecification | None


@dataclass(frozen=True, slots=True)
class ToolProgressEvent(InvocationEvent):
    """A running tool reported its progress: `done` of `total` units (None: unknown), and a text for people."""

    request: ToolExecutionRequest
    done: float
    total: float | None
    message: str | None


@dataclass(frozen=True, slots=True)
class ToolExecutedEvent(InvocationEvent):
    """A tool call has a result for the model. `error` is the exception of the tool, or None."""

    execution: ToolExecution
    error: Exception | None

    is_end: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class ToolFailedEvent(InvocationEvent):
    """A tool call has no result: its exception ends the invocation, or it was cancelled. `duration` is in seconds."""

    request: ToolExecutionRequest
    error: BaseException
    duration: float

    is_end: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class ToolSuspendedEvent(InvocationEvent):
    """A tool call waits for an answer, or for a service that waits for one.

    `kind` is `"approval"`, `"deferred"` or `"unknown_outcome"`, or `"service"` for a service that was suspended.
    `duration` is in seconds.
    """

    request: ToolExecutionRequest
    kind: str
    duration: float

    is_end: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class CompensatedEvent(InvocationEvent):
    """A tool call was undone. `context` is that of the tool call.

    `arguments` are those that the tool ran with, as JSON values by the model's names. `error` is the exception of the
    method that should have undone it; None if it succeeded. `duration` is in seconds.
    """

    tool_name: str
    arguments: Mapping[str, Any]
    error: Exception | None
    duration: float = 0.0

    is_end: ClassVar[bool] = True


# --- runs


@dataclass(frozen=True, slots=True)
class ServiceSuspendedEvent(InvocationEvent):
    """A service call was suspended, and the run is stored. A service that was called as a tool sends it, too.

    `pending` are the calls that wait for an answer. `duration` is in seconds.
    """

    run_id: str
    pending: tuple[PendingCall, ...]
    duration: float

    is_end: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class RunAnsweredEvent(InvocationEvent):
    """A pending call of a run was answered. `answer` is `"approve"`, `"reject"`, `"respond"`, `"fail"` or `"retry"`.

    `by` is the name of the person, or None. `trace` has the headers of the span in which the run was suspended.
    `remembered` is True for `approve(remember="conversation")`.
    """

    run_id: str
    call: PendingCall
    answer: str
    by: str | None
    trace: Mapping[str, str] = field(default_factory=dict, hash=False)
    remembered: bool = False


@dataclass(frozen=True, slots=True)
class RunStartedEvent(InvocationEvent):
    """A run begins: a durable call, or one that `runs.start` has started. A `ServiceStartedEvent` follows.

    A process that takes a run over before its first effect begins it too.

    `trace` has the headers of the span in which the run was created, such as `traceparent`.
    """

    run_id: str
    trace: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class HandedOverEvent(InvocationEvent):
    """A call was handed over: `source` and `target` are methods, such as `"Desk.chat"` and `"Billing.chat"`.

    The context is that of the target. A call that the method in charge of its conversation answers has no such event.
    """

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class ToldEvent(InvocationEvent):
    """A message of the user that `runs.tell` has added goes into the next model request.

    `by` is the name of the person, or None. `client_id` is the id that a client gave to the message, or None. It is
    also an event of streams and of `runs.events`.
    """

    message: UserMessage
    by: str | None = None
    client_id: str | None = None


@dataclass(frozen=True, slots=True)
class RunResumedEvent(InvocationEvent):
    """A stored run continues. A `ServiceStartedEvent` of its method follows.

    `trace` has the headers of the span in which the run was suspended or has failed; after a crash, of an earlier one.
    """

    run_id: str
    trace: Mapping[str, str] = field(default_factory=dict, hash=False)


# --- guardrails

GuardrailOutcome: TypeAlias = Literal["success", "modified", "failure", "fatal", "retry", "reprompt"]
"""How a guardrail judged: it accepted, changed or refused, ended the invocation, or had the model asked again."""


@dataclass(frozen=True, slots=True)
class GuardrailExecutedEvent(InvocationEvent):
    """A guardrail has run once. `guardrail` is its class; `duration` is in seconds.

    A guardrail that raised or was cancelled has the outcome `"fatal"`. For a guardrail of a tool, `context.request` is
    the tool call.
    """

    guardrail: type[Any]
    outcome: GuardrailOutcome
    duration: float

    is_end: ClassVar[bool] = True


# --- retrieval


@dataclass(frozen=True, slots=True)
class RetrievedEvent(InvocationEvent):
    """A retriever has found `passages` for a `query`. `retriever` is its class; `duration` is in seconds.

    For a retriever as a tool, `context.request` is the tool call.
    """

    retriever: type[Any]
    query: Query
    passages: tuple[Passage, ...]
    duration: float

    is_end: ClassVar[bool] = True


# --- the conversation


@dataclass(frozen=True, slots=True)
class MemoryWrittenEvent(InvocationEvent):
    """A turn of the conversation `context.memory_id` was stored; `messages` are those that were sent, with the turn."""

    messages: tuple[Message, ...]


# --- listeners


class EventListener(Protocol):
    """Receives the events of all invocations of a container. Implement it in a bean; register any number of listeners.

        @application_scoped
        class Metrics(EventListener):
            def on_event(self, event: InvocationEvent) -> None: ...

    `on_event` runs on the event loop and must return quickly. It runs in the context of the service or tool: context
    variables that it sets at the start of an operation are visible inside, and it can reset them at the end. Its
    exceptions are logged and have no other effect.
    """

    def on_event(self, event: InvocationEvent) -> None:
        """Handle `event`."""
        ...


class Listeners:
    """Sends events to the registered listeners; end events in reverse order, so that listeners can be nested."""

    def __init__(self, listeners: Iterable[EventListener]) -> None:
        self._listeners = tuple(listeners)

    def with_listener(self, listener: EventListener) -> Listeners:
        """Return these listeners and one more."""
        return Listeners((*self._listeners, listener))

    def without(self, listener: EventListener) -> Listeners | None:
        """Return these listeners without one; None if there are no others."""
        left = tuple(each for each in self._listeners if each is not listener)
        return Listeners(left) if left else None

    def tell(self, event: InvocationEvent) -> None:
        """Send `event` to all listeners."""
        for each in reversed(self._listeners) if event.is_end else self._listeners:
            try:
                each.on_event(event)
            except Exception:
                name = type(each).__name__
                logger.exception("%s.on_event failed on %s; the call continues", name, type(event).__name__)
