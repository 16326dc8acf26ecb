"""What listeners, traces and logs see of runs that are suspended and continue."""

import pytest

from toolbox import EventListener, InvocationEvent
from toolbox.events import (
    RunAnsweredEvent,
    RunResumedEvent,
    RunStartedEvent,
    ServiceStartedEvent,
    ServiceSuspendedEvent,
    ToolSuspendedEvent,
)
from toolbox.runs import RunSuspended, approve

from .approved_refunds import REFUND, Desk, container
from .replies import asks, says

pytestmark = pytest.mark.anyio


class Seen(EventListener):
    def __init__(self) -> None:
        self.events: list[InvocationEvent] = []

    def on_event(self, event: InvocationEvent) -> None:
        self.events.append(event)


async def test_listeners_see_suspensions_answers_and_the_continuation() -> None:
    seen = Seen()
    async with container(asks(REFUND), says("done")).register_instance(seen, EventListener) as here:
        result = await here.get(Desk).chat("room", "refund")
        assert isinstance(seen.events[-1], ServiceSuspendedEvent)
        assert (seen.events[-1].run_id, seen.events[-1].pending) == (result.run_id, result.pending)
        [suspended] = [each for each in seen.events if isinstance(each, ToolSuspendedEvent)]
        assert (suspended.kind, suspended.request.name) == ("approval", "refund")
        seen.events.clear()
        await here.runs.resume(result.run_id or "", {"0": approve()}, by="bob")

    answered, resumed = seen.events[0], seen.events[1]
    assert isinstance(answered, RunAnsweredEvent)
    assert (answered.call.id, answered.answer, answered.by) == ("0", "approve", "bob")
    assert isinstance(resumed, RunResumedEvent)
    assert type(seen.events[-1]).__name__ == "ServiceCompletedEvent"


async def test_a_run_is_started_once_and_then_resumed() -> None:
    seen = Seen()
    async with container(asks(REFUND), says("done")).register_instance(seen, EventListener) as here:
        run = await here.runs.start(here.get(Desk).chat, "room", "refund")
        async for event in here.runs.events(run):
            if isinstance(event.event, RunSuspended):
                break
        kinds = [type(each) for each in seen.events]
        assert kinds.index(RunStartedEvent) == kinds.index(ServiceStartedEvent) - 1
        assert RunResumedEvent not in kinds
        seen.events.clear()
        await here.runs.resume(run.id, {"0": approve()})

    kinds = [type(each) for each in seen.events]
    assert kinds.count(RunResumedEvent) == 1
    assert RunStartedEvent not in kinds


async def test_spans_of_a_suspended_call_end_and_name_the_run(caplog: pytest.LogCaptureFixture) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from toolbox import LoggingListener
    from toolbox.otel import OpenTelemetryListener

    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    listener = OpenTelemetryListener(provider)
    made = container(asks(REFUND), says("done")).register_instance(listener, EventListener)
    with caplog.at_level("INFO", "toolbox.invocations"):
        async with made.register_instance(LoggingListener(), EventListener) as here:
            result = await here.get(Desk).chat("room", "refund")
            before = {each.name: dict(each.attributes or {}) for each in spans.get_finished_spans()}
            spans.clear()
            await here.runs.resume(result.run_id or "", {"0": approve()}, by="bob")
    after = {each.name: dict(each.attributes or {}) for each in spans.get_finished_spans()}

    assert before["invoke_agent Desk"]["toolbox.run.suspended"] is True
    assert before["invoke_agent Desk"]["toolbox.run.id"] == result.run_id
    assert before["execute_tool refund"]["toolbox.run.suspended_by"] == "approval"
    assert after["answer refund"]["toolbox.run.answer"] == "approve"
    assert "bob" not in str(after)
    assert after["invoke_agent Desk"]["toolbox.run.resumed"] is True
    assert after["invoke_agent Desk"]["toolbox.run.id"] == result.run_id
    assert "execute_tool refund" in after
    logged = [record.event for record in caplog.records]  # type: ignore[attr-defined]  # set by the listener
    assert [
        each for each in logged if each in ("tool_suspended", "service_suspended", "run_answered", "run_resumed")
    ] == ["tool_suspended", "service_suspended", "run_answered", "run_resumed"]
