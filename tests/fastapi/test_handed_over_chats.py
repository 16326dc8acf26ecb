"""Front ends are told that another method has taken the conversation over."""

from collections.abc import Callable
from typing import Any, Protocol

import pytest

from toolbox import MemoryId, register_ai_service
from toolbox.handover import hands_over_to
from toolbox.testing import tool_call

from .front_desk import events_in, made, said

pytestmark = pytest.mark.anyio

Running = Callable[..., Any]


@register_ai_service
class Billing(Protocol):
    """Invoices."""

    async def chat(self, room: MemoryId[str], text: str) -> str: ...


@register_ai_service
class Greeter(Protocol):
    @hands_over_to(Billing.chat)
    async def chat(self, room: MemoryId[str], text: str) -> str: ...


NAMES = {"source": "Greeter.chat", "target": "Billing.chat"}


async def test_a_vercel_stream_has_a_part_of_data(running: Running) -> None:
    app, _ = made([tool_call("transfer_to_billing", {}), "Billing."], Greeter.chat, Greeter, Billing, client_tools=())
    async with running(app) as client:
        chunks = events_in((await client.post("/api/chat", json=said("Hi"))).text)
    assert [each["data"] for each in chunks if each["type"] == "data-handed-over"] == [NAMES]
    assert "tool-output-available" in [each["type"] for each in chunks]


async def test_an_ag_ui_stream_has_a_custom_event(running: Running) -> None:
    app, _ = made([tool_call("transfer_to_billing", {}), "Billing."], Greeter.chat, Greeter, Billing, client_tools=())
    body = {
        "threadId": "room",
        "runId": "r1",
        "messages": [{"id": "u1", "role": "user", "content": "Hi"}],
        "tools": [],
        "context": [],
        "state": None,
        "forwardedProps": None,
    }
    async with running(app) as client:
        events = events_in((await client.post("/agui", json=body)).text)
    custom = [(each["name"], each["value"]) for each in events if each["type"] == "CUSTOM"]
    assert custom == [("handed_over", NAMES)]
    assert events[-1]["type"] == "RUN_FINISHED"
