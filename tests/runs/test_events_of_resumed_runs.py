"""What listeners, traces and logs see of runs that are suspended and continue."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

import pytest

from toolbox import (
    ChatRequest,
    EventListener,
    InvocationContext,
    InvocationEvent,
    ModelConnectionError,
    RunFailedError,
    register_ai_service,
    tool,
)
from toolbox.errors import RunStoreError
from toolbox.events import (
    RunAnsweredEvent,
    RunResumedEvent,
    RunStartedEvent,
    ServiceStartedEvent,
    ServiceSuspendedEvent,
    ToolSuspendedEvent,
)
from toolbox.models import ModelRouter
from toolbox.runs import InMemoryRunStore, RunEngine, RunId, RunSuspended, StoredRecord, approve
from toolbox.runs.event_log import event_from_json
from toolbox.testing import tool_call

from .approved_refunds import REFUND, Desk, container, refund
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


@pytest.mark.parametrize("is_routed", [False, True])
async def test_a_run_whose_first_owner_died_before_its_first_effect_is_started_by_the_next(is_routed: bool) -> None:
    @register_ai_service(tools=[refund], model=Chooser if is_routed else None)
    class Shop(Protocol):
        async def ask(self, text: str) -> str: ...

    seen, store = Seen(), InMemoryRunStore()
    made = container(asks(REFUND), says("done"), store=store, services=(Shop,), take_over_runs=False)
    made.register_instance(Nowhere(), RunEngine)
    async with made.register_instance(seen, EventListener) as here:
        run = await here.runs.start(Shop.ask, "refund")
        owned = await store.acquire(run.id, "a process that dies")
        assert owned is not None
        if is_routed:
            await store.append(
                run.id, owned.generation, [StoredRecord("#model", "model", '{"version": 1, "model": "default"}')]
            )
        await store.release(run.id, owned.generation)
        await here.runs.execute(run.id)
        kinds = [type(each) for each in seen.events]
        assert kinds.index(RunStartedEvent) == kinds.index(ServiceStartedEvent) - 1
        assert RunResumedEvent not in kinds
        seen.events.clear()
        await here.runs.resume(run.id, {"0": approve()})

    kinds = [type(each) for each in seen.events]
    assert (kinds.count(RunResumedEvent), kinds.count(RunStartedEvent)) == (1, 0)


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


async def test_the_span_of_a_retried_run_is_linked_to_the_one_that_failed() -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from toolbox.otel import OpenTelemetryListener

    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    made = container(ModelConnectionError("away"), says("done"))
    async with made.register_instance(OpenTelemetryListener(provider), EventListener) as here:
        run = await here.runs.start(here.get(Desk).chat, "room", "refund")
        with pytest.raises(RunFailedError):
            await here.runs.result(run)
        await here.runs.retry(run.id)

    failed, retried = (each for each in spans.get_finished_spans() if each.name == "invoke_agent Desk")
    assert failed.context is not None
    assert [link.context.span_id for link in retried.links] == [failed.context.span_id]
    assert retried.attributes is not None
    assert retried.attributes["toolbox.run.resumed"] is True


class Nowhere(RunEngine):
    """Executes nothing."""

    async def submit(self, run_id: str, generation: int) -> None:
        pass


class SlowEvents(InMemoryRunStore):
    """Writing events takes longer than a suspension. It fails for events of the type `fails_on`."""

    persistent = True
    fails_on = "no type"

    async def add_events(self, run_id: str, generation: int, events: Sequence[str]) -> None:
        for _ in range(1000):
            await asyncio.sleep(0)
        if any(self.fails_on in each for each in events):
            raise ConnectionError("the store is away")
        await super().add_events(run_id, generation, events)


class Chooser(ModelRouter):
    names = ("default",)

    def choose(self, request: ChatRequest, context: InvocationContext) -> str:
        return "default"


@tool
async def look(order: int) -> str:
    return "seen"


@register_ai_service(tools=[look, refund])
class Looking(Protocol):
    async def ask(self, run: RunId, text: str) -> str: ...


LOOK_AND_REFUND = asks(tool_call("look", {"order": 7}), REFUND)


async def test_the_suspension_comes_after_all_events_before_it() -> None:
    store = SlowEvents()
    async with container(LOOK_AND_REFUND, store=store, services=(Looking,), take_over_runs=False) as here:
        await here.runs.start(Looking.ask, "r", "hi")
        assert (await here.runs.execute("r")).status == "suspended"

    kinds = [type(event_from_json(each.data)).__name__ for each in await store.events("r", 0)]
    assert kinds.index("ToolExecuted") < kinds.index("RunSuspended") == len(kinds) - 1


async def test_a_run_is_not_suspended_while_its_events_cannot_be_stored() -> None:
    store = SlowEvents()
    made = container(LOOK_AND_REFUND, LOOK_AND_REFUND, store=store, services=(Looking,), take_over_runs=False)
    made.register_instance(Nowhere(), RunEngine)
    async with made as here:
        await here.runs.start(Looking.ask, "r", "hi")
        store.fails_on = "ToolExecuted"
        with pytest.raises(RunStoreError, match="the store is away"):
            await here.runs.execute("r")
        assert (await here.runs.get("r")).status == "running"
        store.fails_on = "no type"
        assert (await here.runs.execute("r")).status == "suspended"
