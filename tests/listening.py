"""A listener that keeps the events of a test."""

from typing import Any

from toolbox import EventListener, InvocationEvent, application_scoped


@application_scoped
class Events(EventListener):
    """Keeps all events, the oldest first."""

    def __init__(self) -> None:
        self.seen: list[InvocationEvent] = []

    def on_event(self, event: InvocationEvent) -> None:
        self.seen.append(event)

    def of(self, *kinds: type[InvocationEvent]) -> list[Any]:
        """Return the events of these kinds."""
        return [each for each in self.seen if isinstance(each, kinds)]
