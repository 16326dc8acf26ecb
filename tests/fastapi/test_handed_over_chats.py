"""Hand-overs in applications: what front ends get, and tools of endpoints."""

from collections.abc import Callable
from typing import Any, Protocol

import pytest
from fastapi import FastAPI

from toolbox import Container, MemoryId, register_ai_service, tool, toolbox
from toolbox.handover import hands_over_to
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox_fastapi import Inject, install

from .front_desk import events_in, made, posted, said

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


@tool
def pay() -> str:
    """Pay an invoice."""
    return "paid"


@register_ai_service(tools=pay)
class Invoices(Protocol):
    """Invoices."""

    async def chat(self, room: MemoryId[str], text: str) -> str: ...


@register_ai_service
class Reception(Protocol):
    @hands_over_to(Invoices.chat)
    async def chat(self, room: MemoryId[str], text: str) -> str: ...


async def test_a_client_cannot_offer_a_tool_of_a_method_that_may_take_over(running: Running) -> None:
    app, container = made([], Reception.chat, Reception, Invoices, client_tools=("pay",))
    async with running(app) as client:
        response = await client.post("/agui", json=posted("Hi", tools=[{"name": "pay", "description": "x"}]))
        assert await container.runs.list() == []

    assert response.status_code == 422
    assert "'pay'" in response.json()["detail"]


@tool
def discount() -> str:
    """Return a discount."""
    return "10 %"


async def test_tools_of_an_endpoint_are_those_of_the_method_that_it_calls(running: Running) -> None:
    model = ScriptedChatModel([tool_call("transfer_to_billing", {}), "Billing.", "Billing."])
    app = FastAPI()
    install(app, Container(models={"default": model}).register(Greeter, Billing))

    @app.get("/")
    @toolbox(discount)
    async def ask(greeter: Inject[Greeter]) -> str:
        return await greeter.chat("room", "Hi")

    async with running(app) as client:
        for _ in range(2):
            assert (await client.get("/")).json() == "Billing."
    offered = [[each.name for each in request.tool_specifications] for request in model.requests]
    assert offered == [["transfer_to_billing", "discount"], [], []]
