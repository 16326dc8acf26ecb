"""What conversations know of front ends: the ids of messages, what is shown after a reload, editing, regenerating."""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

import pytest

from toolbox import Container, MemoryId, register_ai_service, tool
from toolbox.chat import AiMessage, UserMessage
from toolbox.conversations import LogEntry
from toolbox.testing import ScriptedChatModel, tool_call

from .front_desk import (
    ANN,
    BOB,
    MIA,
    REFUND,
    Clerk,
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
from .test_ag_ui import EVENTS, interrupts_in, messages_of, resumed
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


# --- what a page shows after a reload


async def shown(client: Any, path: str = "/api/chat/room/messages", **more: Any) -> Any:
    response = await client.get(path, **more)
    assert response.status_code == 200, response.text
    return response.json()


def without_progress(message: dict[str, Any]) -> dict[str, Any]:
    parts = [each for each in message["parts"] if each["type"] != "data-tool-progress"]
    return {"id": message["id"], "role": message["role"], "parts": parts}


CALLS = says(tool_call("look_up", {"order": 7}), tool_call("fail", {}), REFUND, text="Let me see.", thought="Hm.")


async def test_the_history_has_the_messages_that_the_client_got(running: Running) -> None:
    app, _ = made([CALLS, "All is done.", "Bye."])
    async with running(app) as client:
        assert await shown(client) == []
        first = message_of(events_in((await client.post("/api/chat", json=asked("hi", "u1"))).text))
        waiting = await shown(client)
        again = message_of(events_in((await client.get("/api/chat/room/stream")).text))
        second = await client.post("/api/chat", json=answers(answered(first)))
        whole = message_of(events_in(second.text), first)
        bye = message_of(events_in((await client.post("/api/chat", json=asked("bye", "u2"))).text))
        found = await shown(client)

    question = {"id": "u1", "role": "user", "parts": [{"type": "text", "text": "hi"}]}
    assert first.pop("metadata") is None
    assert waiting == [question, first]
    assert again["parts"] == first["parts"]
    assert [each["id"] for each in found] == ["u1", first["id"], "u2", bye["id"]]
    assert found[0] == question
    for part in whole["parts"]:
        part.pop("approval", None)  # the log does not know who approved what
    assert without_progress(found[1]) == without_progress(whole)


async def test_the_history_of_an_ag_ui_client_has_the_messages_that_it_got(running: Running) -> None:
    app, _ = made([CALLS, "All is done."])
    message = {"id": "u1", "role": "user", "content": "hi"}
    async with running(app) as client:
        first = events_in((await client.post("/agui", json=posted(message))).text)
        waiting = await shown(client, "/agui/room/messages")
        again = events_in((await client.post("/agui", json=posted())).text)
        resume = resumed(interrupts_in(first), True)
        second = events_in((await client.post("/agui", json=posted(message, resume=resume["resume"]))).text)
        found = await shown(client, "/agui/room/messages")

    assert waiting == [message, *with_functions(messages_of(first))]
    assert again[1] == {"type": "MESSAGES_SNAPSHOT", "messages": [message]}
    assert EVENTS.validate_python(again[1])
    assert [again[0], *again[2:]] == first
    assert found == [message, *with_functions(messages_of(second, messages_of(first)))]
    assert EVENTS.validate_python({"type": "MESSAGES_SNAPSHOT", "messages": found})


def with_functions(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages in the form of the protocol: the helper of the tests has calls in a shorter one."""
    for call in [call for message in messages for call in message.get("toolCalls", ())]:
        call |= {"type": "function", "function": {"name": call.pop("name"), "arguments": call.pop("arguments")}}
    return messages


async def test_an_answer_that_goes_on_is_left_to_its_stream(running: Running) -> None:
    model = Gated(["Hello there."])
    app, _ = made(model)
    async with running(app) as client:
        streaming = asyncio.create_task(client.post("/api/chat", json=asked("hi", "u1")))
        await model.waits.wait()
        before = await shown(client)
        model.may_go_on.set()
        await streaming
        after = await shown(client)

    assert [each["id"] for each in before] == ["u1"]
    assert [each["role"] for each in after] == ["user", "assistant"]


async def test_files_come_back_as_they_were_sent(running: Running) -> None:
    files = [
        {"type": "file", "mediaType": "image/png", "url": "data:image/png;base64,iVBORw0KGgo="},
        {
            "type": "file",
            "mediaType": "application/pdf",
            "url": "data:application/pdf;base64,JVBERi0=",
            "filename": "a",
        },
        {"type": "file", "mediaType": "image/jpeg", "url": "https://example.org/a.jpg"},
        {"type": "file", "mediaType": "audio/wav", "url": "data:audio/wav;base64,AAAA"},
    ]
    body = asked("Look", "u1")
    body["messages"][0]["parts"] += files
    app, _ = made(["Nice."])
    async with running(app) as client:
        await client.post("/api/chat", json=body)
        assert (await shown(client))[0] == body["messages"][0]
        agui = await shown(client, "/agui/room/messages")
    assert EVENTS.validate_python({"type": "MESSAGES_SNAPSHOT", "messages": agui})
    assert [each["type"] for each in agui[0]["content"]] == ["text", "image", "document", "image", "audio"]


async def test_the_history_of_another_is_unknown(running: Running) -> None:
    model = Gated(["Hello.", "Hello."])
    app, _ = made(model)
    async with running(app) as client:
        streaming = asyncio.create_task(client.post("/api/chat", json=asked("hi", "u1"), headers=ANN))
        await model.waits.wait()
        assert await shown(client, headers=BOB) == []  # nobody owns it yet
        model.may_go_on.set()
        await streaming
        for path in ("/api/chat/room/messages", "/agui/room/messages"):
            assert (await client.get(path, headers=BOB)).status_code == 404
            assert len(await shown(client, path, headers=ANN)) == 2
