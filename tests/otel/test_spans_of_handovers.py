"""Spans and log lines of calls that are handed over: they name the agent in charge."""

import logging
from typing import Any, Protocol

import pytest

from tests.otel.telemetry import Telemetry
from toolbox import (
    Container,
    InvocationLogFilter,
    LoggingListener,
    MemoryId,
    Result,
    TokenStream,
    UserMessage,
    register_ai_service,
    tool,
)
from toolbox.handover import hands_over_to
from toolbox.runs import approve
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = pytest.mark.anyio

TO_BILLING = tool_call("transfer_to_billing", {})
logger = logging.getLogger("tests.billing")


@tool
def invoice() -> str:
    """Find an invoice."""
    logger.warning("searching")
    return "invoice 7"


@register_ai_service(tools=invoice)
class Billing(Protocol):
    """Invoices."""

    async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    def texts(self, text: str) -> TokenStream: ...


@register_ai_service
class Desk(Protocol):
    @hands_over_to(Billing.chat)
    async def chat(self, room: MemoryId[str], text: str) -> Result[str]: ...

    @hands_over_to(Billing.texts)
    def texts(self, text: str) -> TokenStream: ...


def started(telemetry: Telemetry, *replies: Any) -> Container:
    container = Container(models={"default": ScriptedChatModel([*replies])})
    return container.register(Desk, Billing, LoggingListener).register_instance(telemetry.listener())


def agents(telemetry: Telemetry) -> list[tuple[str, str]]:
    return [(each.name, each.attributes["gen_ai.agent.name"]) for each in telemetry.spans]


async def test_spans_name_the_agent_in_charge_and_the_call_has_the_hand_over() -> None:
    telemetry = Telemetry()
    async with started(telemetry, TO_BILLING, tool_call("invoice", {}), "Here.", "Bye.") as container:
        await container.get(Desk).chat("ada", "My invoice")
        in_charge = ["chat", "execute_tool invoice", "chat"]
        expected = [("invoke_agent Desk", "Desk"), ("chat", "Desk"), *((name, "Billing") for name in in_charge)]
        assert agents(telemetry) == expected
        [event] = telemetry.spans[0].events
        assert (event.name, dict(event.attributes)) == (
            "toolbox.handed_over",
            {"toolbox.handover.source": "Desk.chat", "toolbox.handover.target": "Billing.chat"},
        )
        telemetry.exporter.clear()
        await container.get(Desk).chat("ada", "Thanks")  # Billing is in charge
        assert agents(telemetry) == [("invoke_agent Desk", "Desk"), ("chat", "Billing")]
        assert telemetry.spans[0].events == ()


async def test_spans_of_streams_name_the_agent_in_charge_too() -> None:
    telemetry = Telemetry()
    async with started(telemetry, TO_BILLING, tool_call("invoice", {}), "Here.") as container:
        events: list[Any] = [each async for each in container.get(Desk).texts("Hi")]
        assert events[-1].response.ai_message.text == "Here."
    assert [agent for _, agent in agents(telemetry)] == ["Desk", "Desk", "Billing", "Billing", "Billing"]
    assert [each.name for each in telemetry.spans[0].events] == ["toolbox.handed_over"]


async def test_a_message_for_a_run_is_an_event_of_its_span() -> None:
    telemetry = Telemetry()

    @tool(requires_approval=True)
    def pay() -> str:
        """Pay."""
        return "paid"

    @register_ai_service(tools=pay)
    class Till(Protocol):
        async def chat(self, text: str) -> Result[str]: ...

    model = ScriptedChatModel([tool_call("pay", {}), "Paid."])
    container = Container(models={"default": model}).register(Till).register_instance(telemetry.listener())
    async with container:
        waiting = await container.get(Till).chat("Pay")
        await container.runs.tell(waiting.run_id or "", UserMessage("a secret"))
        telemetry.exporter.clear()
        await container.runs.resume(waiting.run_id or "", {waiting.pending[0].id: approve()})
    [span] = [each for each in telemetry.spans if each.name == "invoke_agent Till"]
    assert [(each.name, dict(each.attributes)) for each in span.events] == [("toolbox.message_added", {})]
    assert "a secret" not in telemetry.text


async def test_log_lines_name_the_agent_in_charge(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    caplog.handler.addFilter(InvocationLogFilter())
    async with started(Telemetry(), TO_BILLING, tool_call("invoice", {}), "Here.") as container:
        await container.get(Desk).chat("ada", "My invoice")
    records: list[Any] = caplog.records
    [handed] = [each for each in records if getattr(each, "event", None) == "handed_over"]
    assert (handed.service, handed.source, handed.target) == ("Billing", "Desk.chat", "Billing.chat")
    assert "source=Desk.chat target=Billing.chat" in handed.getMessage()
    [own] = [each for each in records if each.name == "tests.billing"]
    assert (own.service, own.method, own.tool) == ("Billing", "chat", "invoice")
    by_event = [(each.event, each.service) for each in records if hasattr(each, "event")]
    assert [name for event, name in by_event if event == "model_request"] == ["Desk", "Billing", "Billing"]
    assert ("service_started", "Desk") in by_event
    assert ("service_completed", "Billing") in by_event
