"""The events of a service's `TokenStream`, and of a run: what its model says, its tools do, and its user adds.

Not here: the events of a model's stream (`chat`), events for listeners (`events`), sending them (`services`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from .chat import (
    BeforeToolExecution,
    IntermediateResponse,
    Retrieved,
    RunSuspended,
    StreamEvent,
    ToolExecuted,
    ToolProgress,
)
from .context import InvocationContext
from .events import ToldEvent

__all__ = ["InnerEvent", "ServiceEvent"]


@dataclass(frozen=True, slots=True)
class InnerEvent:
    """An event of a service within this call, with `@register_ai_service(inner_events=True)`.

    - `context`: the call of the inner service; its `outer_invocation_id` is the call around it.
    - `service`: the stored name of the inner service, by default `module.Class`.
    - `call_id`: the model's own id of the tool call in which the service was called.
    - `event`: the event, at any depth: never another `InnerEvent`.
    """

    context: InvocationContext
    service: str
    call_id: str
    event: ServiceEvent


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The call was handed over: `source` and `target` are methods, such as `"Desk.chat"` and `"Billing.chat"`."""

    source: str
    target: str


ServiceEvent: TypeAlias = (
    StreamEvent
    | IntermediateResponse
    | BeforeToolExecution
    | ToolExecuted
    | RunSuspended
    | ToolProgress
    | Retrieved
    | ToldEvent
    | HandedOver
    | InnerEvent
)
"""The events of a service's `TokenStream`."""


WorkState: TypeAlias = Literal["running", "replied", "finished", "failed"]
"""A service begins or goes on, its model has replied, it has ended, or it has failed."""


@dataclass(frozen=True, slots=True)
class ServiceWork:
    """What a service within a run does, for front ends: no stream of a program has it.

    - `id`: the place of the service in the run; its invocation's id if it has none there.
    - `call`: the place of the tool call in which it works, or an empty text.
    - `parent`: the `id` of the service that made this call, or an empty text.
    - `service`: its stored name.
    - `text`: of a reply; the type of the error of a failure.
    """

    id: str
    call: str
    parent: str
    service: str
    state: WorkState = "running"
    text: str = ""
