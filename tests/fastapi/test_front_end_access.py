"""Front ends: who may see and answer the runs of others, in both protocols."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import pytest

from toolbox import Container, MemoryId, TokenStream, register_ai_service
from toolbox.errors import ConversationStoppedError
from toolbox.security import roles_allowed
from toolbox.testing import tool_call

from .front_desk import (
    ANN,
    BOB,
    MIA,
    REFUND,
    Desk,
    Refunds,
    answered,
    answers,
    events_in,
    made,
    message_of,
    posted,
    said,
    says,
)
from .test_ag_ui import interrupts_in, resumed
from .test_vercel_ai import Gated

pytestmark = pytest.mark.anyio

Running = Callable[..., Any]


@dataclass
class VercelClient:
    """A client of `useChat`. `shown` is what it has got."""

    http: Any
    shown: Any = None

    async def say(self, who: dict[str, str], room: str = "room") -> Any:
        response = await self.http.post("/api/chat", json=said("hi", room), headers=who)
        if response.status_code == 200:
            self.shown = message_of(events_in(response.text))
        return response

    async def approve(self, who: dict[str, str], room: str = "room") -> Any:
        return await self.http.post("/api/chat", json=answers(answered(self.shown), room), headers=who)

    async def look(self, who: dict[str, str], room: str = "room") -> Any:
        return await self.http.get(f"/api/chat/{room}/stream", headers=who)


@dataclass
class AgUiClient:
    """A client of AG-UI. `shown` is what it has got."""

    http: Any
    shown: Any = None

    async def say(self, who: dict[str, str], room: str = "room") -> Any:
        response = await self.http.post("/agui", json=posted("hi", room=room), headers=who)
        if response.status_code == 200:
            self.shown = events_in(response.text)
        return response

    async def approve(self, who: dict[str, str], room: str = "room") -> Any:
        return await self.http.post("/agui", json=resumed(interrupts_in(self.shown), True, room=room), headers=who)

    async def look(self, who: dict[str, str], room: str = "room") -> Any:
        return await self.http.post("/agui", json=posted(room=room), headers=who)


@pytest.fixture(params=[VercelClient, AgUiClient])
def client_kind(request: pytest.FixtureRequest) -> Any:
    return request.param


def refunded(container: Container) -> list[int]:
    return container.get(Refunds).refunded


NOBODY: dict[str, str] = {}


async def test_the_waiting_run_of_another_is_unknown(running: Running, client_kind: Any) -> None:
    app, container = made([says(REFUND), "Done."])
    async with running(app) as http:
        client = client_kind(http)
        await client.say(ANN)
        for who in (BOB, NOBODY, MIA):
            for response in (await client.say(who), await client.look(who), await client.approve(who)):
                assert (response.status_code, response.headers["content-type"]) == (404, "application/problem+json")
            assert (await client.approve(who, "room of their own")).status_code == 404
            assert (await http.post("/api/chat/room/stop", headers=who)).status_code == 404
        assert (await client.say(BOB)).json()["detail"] == "There is no such conversation."

        assert refunded(container) == []
        assert (await client.look(ANN)).status_code == 200
        assert (await client.approve(ANN)).status_code == 200
        assert refunded(container) == [7]


async def test_approvers_answer_calls_of_others(running: Running, client_kind: Any) -> None:
    app, container = made([says(tool_call("pay_out", {"euros": 5})), "Done."])
    async with running(app) as http:
        client = client_kind(http)
        await client.say(ANN)
        assert (await client.approve(BOB)).status_code == 404
        own = await client.approve(ANN)
        assert (own.status_code, own.json()["title"]) == (403, "Forbidden")
        answered_once = await client.approve(MIA)
        answered_twice = await client.approve(MIA)
        [run] = await container.runs.list()

    assert (answered_once.status_code, answered_once.text) == (200, answered_twice.text)
    assert [each.by for each in run.history] == ["mia"]
    assert run.status == "completed"


async def test_answers_count_in_their_own_conversation_only(running: Running, client_kind: Any) -> None:
    app, container = made([says(REFUND), "Done."])
    async with running(app) as http:
        client = client_kind(http)
        await client.say(ANN)
        response = await client.approve(ANN, "another room")

        assert (response.status_code, response.json()["code"]) == (409, "not_pending")
        assert refunded(container) == []


async def test_equal_answers_at_the_same_time_count_once(running: Running, client_kind: Any) -> None:
    app, container = made([says(REFUND), "Done."])
    async with running(app) as http:
        client = client_kind(http)
        await client.say(ANN)
        responses = await asyncio.gather(*(client.approve(ANN) for _ in range(5)))

        assert refunded(container) == [7]
    assert {each.status_code for each in responses} == {200}
    assert len({each.text for each in responses}) == 1


async def test_the_same_name_of_another_tenant_is_another_person(running: Running, client_kind: Any) -> None:
    app, container = made([says(REFUND), "Done."])
    here, elsewhere = ({**ANN, "x-tenant": tenant} for tenant in ("acme/east", "acme/west"))
    async with running(app) as http:
        client = client_kind(http)
        await client.say(here)
        for response in (await client.look(elsewhere), await client.approve(elsewhere)):
            assert response.status_code == 404
        assert refunded(container) == []
        assert (await client.approve(here)).status_code == 200


async def test_a_service_that_needs_a_role_answers_with_a_problem(running: Running, client_kind: Any) -> None:
    @register_ai_service
    @roles_allowed("manager")
    class Office(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    app, container = made(["Hello."], Office.chat, Office)
    async with running(app) as http:
        client = client_kind(http)
        assert (await client.say(NOBODY)).status_code == 401
        assert (await client.say(ANN)).status_code == 403
        assert (await client.say(MIA)).status_code == 200
        assert len(await container.runs.list()) == 1


async def test_the_conversation_of_another_is_unknown_also_when_nothing_is_at_work(
    running: Running, client_kind: Any
) -> None:
    app, container = made(["Hello.", "Again."])
    async with running(app) as http:
        client = client_kind(http)
        await client.say(ANN)
        for who in (BOB, NOBODY):
            for response in (await client.say(who), await client.look(who)):
                assert (response.status_code, response.headers["content-type"]) == (404, "application/problem+json")
            assert (await http.post("/api/chat/room/stop", headers=who)).status_code == 404
        assert (await http.post("/api/chat/room/stop", headers=ANN)).json() is False
        assert (await client.say(ANN)).status_code == 200
        assert len(await container.runs.list()) == 2


async def test_a_stop_is_that_of_the_conversation_and_says_who(running: Running) -> None:
    model = Gated(["Hello there."])
    app, container = made(model)
    async with running(app) as http:
        streaming = asyncio.create_task(http.post("/api/chat", json=said("hi"), headers=ANN))
        await model.waits.wait()
        assert (await http.post("/api/chat/room/stop", headers=BOB)).status_code == 404
        assert (await http.post("/api/chat/room/stop", headers=ANN)).json() is True
        chunks = events_in((await streaming).text)
        [run] = await container.runs.list()
        states = [each.state for each in await container.conversations.of(Desk, "room").history()]

    assert (chunks[-1], run.status, run.history[-1].by) == ({"type": "abort"}, "cancelled", "ann")
    assert states == ["stopped", "stopped"]


async def test_a_stop_ends_a_call_that_is_not_a_run(running: Running) -> None:
    model = Gated(["Hello there."])

    async def read() -> None:
        async for _ in container.get(Talk).chat("room", "hi"):
            pass

    @register_ai_service(name="talk")
    class Talk(Protocol):
        def chat(self, room: MemoryId[str], text: str) -> TokenStream: ...

        async def answer(self, room: MemoryId[str], text: str) -> str: ...

    app, container = made(model, Talk.answer, Talk)
    async with running(app) as http:
        reading = asyncio.create_task(read())
        await model.waits.wait()
        assert (await http.post("/api/chat/room/stop")).json() is True
        with pytest.raises(ConversationStoppedError):
            await reading
