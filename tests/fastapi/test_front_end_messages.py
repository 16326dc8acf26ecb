"""What conversations know of front ends: the ids of messages, what is shown after a reload, editing, regenerating."""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

import pytest

from toolbox import Container, MemoryId, register_ai_service
from toolbox.conversations import LogEntry
from toolbox.testing import tool_call

from .front_desk import REFUND, Desk, Refunds, answered, answers, events_in, made, message_of, posted, said, says
from .test_vercel_ai import Gated

pytestmark = pytest.mark.anyio

Running = Callable[..., Any]


def asked(text: str, message_id: str, room: str = "room", **more: Any) -> dict[str, Any]:
    """The body of `useChat` with a new message with this id."""
    body = said(text, room, **more)
    body["messages"][0]["id"] = message_id
    return body


async def entries(container: Container, room: str = "room", service: type[Any] = Desk) -> list[LogEntry]:
    return await container.conversations.of(service, room).history()


# --- ids


async def test_user_messages_keep_the_ids_of_their_clients(running: Running) -> None:
    app, container = made([says(tool_call("help", {"question": "?"})), "helped", "One.", "Two."])
    async with running(app) as client:
        await client.post("/api/chat", json=asked("hi", "from vercel"))
        await client.post("/agui", json=posted({"id": "from ag-ui", "role": "user", "content": "ho"}))
        found = await entries(container)

    assert [each.client_id for each in found] == ["from vercel", None, None, None, "from ag-ui", None]
    assert len({each.run_id for each in found}) == 2


async def test_the_ids_stay_when_an_answer_waits_and_goes_on(running: Running) -> None:
    app, container = made([says(REFUND), "Done."])
    async with running(app) as client:
        message = message_of(events_in((await client.post("/api/chat", json=asked("hi", "u1"))).text))
        await client.post("/api/chat", json=answers(answered(message)))
        assert [each.client_id for each in await entries(container)] == ["u1", None, None, None]


@pytest.mark.parametrize("begun", [False, True])
async def test_the_ids_stay_when_an_answer_is_stopped(begun: bool, running: Running) -> None:
    model = Gated([*([says(tool_call("look_up", {"order": 7}))] if begun else []), "Hello there."])
    app, container = made(model)
    async with running(app) as client:
        streaming = asyncio.create_task(client.post("/api/chat", json=asked("hi", "u1")))
        await model.waits.wait()
        if begun:
            model.may_go_on.set()
        await client.post("/api/chat/room/stop")
        await streaming
        assert (await entries(container))[0].client_id == "u1"


async def test_the_ids_stay_when_a_waiting_answer_is_stopped(running: Running) -> None:
    app, container = made([says(REFUND)])
    async with running(app) as client:
        await client.post("/api/chat", json=asked("hi", "u1"))
        assert (await client.post("/api/chat/room/stop")).json() is True
        found = await entries(container)

    assert [(each.client_id, each.state) for each in found[:1]] == [("u1", "stopped")]


async def test_the_question_of_an_answer_that_waits_beside_others_has_its_id(running: Running) -> None:
    @register_ai_service(tools=Refunds, on_suspended="continue")
    class Patient(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    app, container = made([says(REFUND)], Patient.chat, Patient)
    async with running(app) as client:
        await client.post("/api/chat", json=asked("hi", "u1"))
        [waiting] = await entries(container, service=Patient)
        assert (waiting.client_id, waiting.state) == ("u1", "waiting")
