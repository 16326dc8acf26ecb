"""Spans of runs: linked over processes, with their compensations."""

from typing import Any, Protocol

import pytest
from opentelemetry.trace import StatusCode

from tests.otel.telemetry import SECRET, Telemetry
from toolbox import AiMessage, Container, Result, compensate_for, register_ai_service, tool
from toolbox.runs import InMemoryRunStore, RunStore, RunSuspended, approve
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio


@tool(requires_approval=True)
def pay(euros: int) -> str:
    return f"paid {euros}"


@register_ai_service(tools=pay)
class Desk(Protocol):
    async def ask(self, text: str) -> Result[str]: ...


def desk(telemetry: Telemetry, store: InMemoryRunStore, *replies: Any) -> Container:
    made = Container(models={"default": ScriptedChatModel(replies)}, take_over_runs=False).register(Desk)
    return made.register_instance(store, RunStore).register_instance(telemetry.listener())


def linked(span: Any) -> list[int]:
    return [each.context.span_id for each in span.links]


async def test_the_spans_of_one_run_are_linked_over_processes(telemetry: Telemetry) -> None:
    store = InMemoryRunStore()
    async with desk(telemetry, store, tool_call("pay", {"euros": 1})) as here:
        with telemetry.tracer.start_as_current_span("request"):
            run = await here.runs.start(here.get(Desk).ask, "Pay")
        async for event in here.runs.events(run):
            if isinstance(event.event, RunSuspended):
                break
    async with desk(telemetry, store, "done") as there:
        with telemetry.tracer.start_as_current_span("answer"):
            await there.runs.resume(run.id, {"0": approve()})

    started, resumed = [each for each in telemetry.spans if each.name == "invoke_agent Desk"]
    assert linked(started) == [telemetry.span("request").context.span_id]
    assert linked(resumed) == [started.context.span_id]
    assert linked(telemetry.span("answer pay")) == [started.context.span_id]
    facts = [(each.attributes or {}) for each in (started, resumed)]
    assert [each["toolbox.run.id"] for each in facts] == [run.id, run.id]
    assert [each["toolbox.run.resumed"] for each in facts] == [False, True]


async def test_a_compensation_is_a_span_inside_its_call(telemetry: Telemetry) -> None:
    class Hotel:
        @tool
        def book(self, seats: int) -> str:
            return "booked"

        @compensate_for(book)
        def unbook(self, seats: int) -> None:
            raise ValueError(SECRET)

        @tool
        def fail(self) -> str:
            raise ValueError("full")

    @register_ai_service(tools=Hotel, compensate_on_tool_errors=True)
    class Trips(Protocol):
        async def plan(self, text: str) -> str: ...

    model = ScriptedChatModel([AiMessage(None, [tool_call("book", {"seats": 2}), tool_call("fail", {})]), "done"])
    made = Container(models={"default": model}).register(Trips, Hotel).register_instance(telemetry.listener())
    async with made as here:
        await here.get(Trips).plan("x")

    span = telemetry.span("compensate book")
    assert span.parent is not None
    assert span.parent.span_id == telemetry.span("invoke_agent Trips").context.span_id
    assert span.attributes is not None
    assert span.attributes["gen_ai.tool.name"] == "book"
    assert span.attributes["toolbox.compensation.failed"] is True
    assert span.attributes["error.type"] == "ValueError"
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, None)
