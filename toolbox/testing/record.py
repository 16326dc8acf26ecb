"""`EventRecord`: a listener that keeps what the services of a container did, on whatever thread, loop or task.

Not here: what happens, as data (`events`), assertions on it (`assertions`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..chat import ChatRequest, ToolExecution
from ..events import EventListener, InvocationEvent, ModelRequestEvent, ToolExecutedEvent


@dataclass(slots=True, eq=False)
class EventRecord(EventListener):
    """Keeps all events of its container: `record = EventRecord(); container.register_instance(record)`.

    Unlike `invocation_record()`, which follows a context, it sees also what a server under test does.
    """

    events: list[InvocationEvent] = field(default_factory=list)

    def on_event(self, event: InvocationEvent) -> None:
        """Keeps it."""
        self.events.append(event)

    @property
    def tool_executions(self) -> list[ToolExecution]:
        """The tool calls that have a result, in the order they ended."""
        return [each.execution for each in self.events if isinstance(each, ToolExecutedEvent)]

    @property
    def requests(self) -> list[ChatRequest]:
        """What models were sent, in order."""
        return [each.request for each in self.events if isinstance(each, ModelRequestEvent)]
