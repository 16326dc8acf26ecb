"""What conversations know of front ends: the ids of messages, what is shown after a reload, editing, regenerating."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any, Protocol

import pytest
from fastapi import FastAPI, Response
from pydantic import BaseModel

from toolbox import (
    ChatMemoryStore,
    ChatRequest,
    ChatResponse,
    Container,
    MemoryId,
    ToolExecutionRequest,
    UserMessage,
    produces,
    register_ai_service,
    tool,
)
from toolbox.conversations import LogEntry, conversation_scoped
from toolbox.retrieval import Passage, Query, Retriever
from toolbox.runs import Runs
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox_fastapi import Inject, ag_ui, install
from toolbox_fastapi.front_ends.chats import find_newest_answer
from toolbox_fastapi.front_ends.run_reading import follow_run
from toolbox_fastapi.front_ends.stream_parts import BlockPiece

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


@pytest.mark.parametrize("reason", [None, "too much"])
async def test_a_rejected_call_is_shown_as_the_client_has_it(reason: str | None, running: Running) -> None:
    app, container = made([says(REFUND, text="Sure?"), "As you like."])
    async with running(app) as client:
        [first] = await talk(client, ("refund", "u1"))
        decided = answered(first, approved=False, reason=reason)
        chunks = events_in((await client.post("/api/chat", json=answers(decided))).text)
        whole = message_of(chunks, decided)
        found = await shown(client)
        [run] = await container.runs.list()
        await container.runs.delete(run.id)
        without_run = await shown(client)

    assert found[1]["parts"][2]["state"] == "output-denied"
    if reason is None:  # what the model has read
        assert "rejected" in found[1]["parts"][2]["approval"].pop("reason")
    assert without_progress(found[1]) == without_progress(whole)
    assert without_run[1]["parts"][2]["state"] == "output-error"  # nobody knows any more


async def test_a_reason_of_the_tool_is_shown_with_its_request(running: Running) -> None:
    class Payments:
        @tool(requires_approval=lambda arguments, context: f"{arguments['euros']} euros are much")
        def pay(self, euros: int) -> str:
            """Pay."""
            return "paid"

    @register_ai_service(tools=Payments)
    class Bank(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    app, _ = made([says(tool_call("pay", {"euros": 900}))], Bank.chat, Bank, Payments)
    async with running(app) as client:
        await talk(client, ("pay", "u1"))
        found = await shown(client)

    approval = found[1]["parts"][1]["approval"]
    assert approval == {"id": found[1]["parts"][1]["toolCallId"], "requestReason": "900 euros are much"}


async def test_a_client_that_reconnects_gets_the_answer_to_a_message_that_the_run_has_not_read(
    running: Running,
) -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()

    class Slow:
        @tool
        async def wait(self) -> str:
            """Wait."""
            begun.set()
            await may_end.wait()
            return "waited"

    @register_ai_service(tools=Slow)
    class Sloth(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    app, container = made([says(tool_call("wait", {}), text="One moment."), "To both."], Sloth.chat, Sloth, Slow)
    async with running(app) as client:
        streaming = asyncio.create_task(client.post("/api/chat", json=asked("hi", "u1")))
        await begun.wait()
        [run] = await container.runs.list()
        await container.runs.tell_message(run.id, UserMessage("and bye"), None, "u2")
        found = await shown(client)
        place = await find_newest_answer(container.runs, run.id)  # what a client that reconnects gets
        may_end.set()
        parts = [each async for each in follow_run(container.runs, run.id, passed=place.passed, answer=place.answer)]
        await streaming
        after = await shown(client)

    assert [each["id"] for each in found] == ["u1", run.id, "u2"]
    assert place.answer == 1
    assert "".join(each.text for each in parts if isinstance(each, BlockPiece)) == "To both."
    assert [each["id"] for each in after] == ["u1", run.id, "u2", f"{run.id}#1"]


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


async def test_halves_of_characters_and_nan_do_not_keep_a_page_from_loading(running: Running) -> None:
    class Odd:
        @tool
        def half(self) -> dict[str, str]:
            """Return half a character."""
            return {"x\ud800": "\ud800"}

        @tool(requires_approval=lambda arguments, context: "why \ud800")
        def ask(self, number: float) -> str:
            """Ask."""
            return "asked"

    @register_ai_service(tools=Odd)
    class Oddity(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    asks = ToolExecutionRequest("c2", "ask", '{"number": NaN}')
    app, _ = made([says(tool_call("half", {}), text="\ud800"), says(asks), "Done \udfff"], Oddity.chat, Oddity, Odd)
    async with running(app) as client:
        await client.post("/api/chat", json=asked("hi", "u1"))
        waiting = await shown(client), await shown(client, "/agui/room/messages")
        await client.post("/api/chat", json=answers(answered(waiting[0][1])))
        done = await shown(client), await shown(client, "/agui/room/messages")

    assert all(json.dumps(each, ensure_ascii=False, allow_nan=False).encode() for each in (*waiting, *done))
    assert waiting[0][1]["parts"][2]["output"] == {"x\ufffd": "\ufffd"}


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


async def test_a_shared_conversation_has_no_others(running: Running) -> None:
    @register_ai_service(shared_conversations=True)
    class Lobby(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    model = Gated(["One.", "Two."])
    app, _ = made(model, Lobby.chat, Lobby)
    async with running(app) as client:
        streaming = asyncio.create_task(client.post("/api/chat", json=asked("a", "u1"), headers=ANN))
        await model.waits.wait()
        assert texts(await shown(client, headers=BOB)) == ["a"]
        assert (await client.post("/api/chat/room/stop", headers=BOB)).json() is True
        assert events_in((await streaming).text)[-1] == {"type": "abort"}
        model.may_go_on.set()
        assert (await client.post("/api/chat", json=edited("A", "u1"), headers=BOB)).status_code == 200
        assert texts(await shown(client, headers=ANN)) == ["A", "Two."]


# --- editing, and answering again


def edited(text: str, message_id: str, **more: Any) -> dict[str, Any]:
    return asked(text, message_id, messageId=message_id, **more)


def regenerated(*messages: dict[str, Any], message_id: str | None = None) -> dict[str, Any]:
    body = {"id": "room", "messages": [*messages], "trigger": "regenerate-message"}
    return body if message_id is None else {**body, "messageId": message_id}


def user(text: str, message_id: str) -> dict[str, Any]:
    return {"id": message_id, "role": "user", "parts": [{"type": "text", "text": text}]}


def texts(messages: list[dict[str, Any]]) -> list[str]:
    return ["".join(part.get("text", "") for part in each["parts"]) for each in messages]


async def talk(client: Any, *said: tuple[str, str]) -> list[dict[str, Any]]:
    """The answers to messages with these texts and ids."""
    return [
        message_of(events_in((await client.post("/api/chat", json=asked(text, message_id))).text))
        for text, message_id in said
    ]


async def test_an_edited_message_replaces_what_followed_it(running: Running) -> None:
    model = ScriptedChatModel(["One.", "Two.", "Three.", "New."])
    app, _ = made(model)
    async with running(app) as client:
        await talk(client, ("a", "u1"), ("b", "u2"), ("c", "u3"))
        answer = message_of(events_in((await client.post("/api/chat", json=edited("B", "u2"))).text))
        found = await shown(client)

    assert [getattr(each, "text", None) for each in model.requests[-1].messages] == ["a", "One.", "B"]
    assert texts(found) == ["a", "One.", "B", "New."]
    assert [each["id"] for each in found[2:]] == ["u2", answer["id"]]


@pytest.mark.parametrize("by", ["answer", "user", None])
async def test_an_answer_is_given_again(by: str | None, running: Running) -> None:
    model = ScriptedChatModel(["One.", "Two.", "Again."])
    app, _ = made(model)
    async with running(app) as client:
        one, two = await talk(client, ("a", "u1"), ("b", "u2"))
        named = {"answer": two["id"], "user": "u2", None: None}[by]
        known = [user("a", "u1"), one, user("forged", "u2")]
        response = await client.post("/api/chat", json=regenerated(*known, message_id=named))
        found = await shown(client)

    assert response.status_code == 200, response.text
    assert [getattr(each, "text", None) for each in model.requests[-1].messages] == ["a", "One.", "b"]
    assert [each["id"] for each in found] == ["u1", one["id"], "u2", events_in(response.text)[0]["messageId"]]


async def test_an_earlier_answer_is_given_again_from_the_history_alone(running: Running) -> None:
    app, container = made(["One.", "Two.", "Again."])
    async with running(app) as client:
        await container.get(Desk).chat("room", "a")  # no client has given an id
        await container.get(Desk).chat("room", "b")
        messages = await shown(client)
        body = regenerated(messages[0], message_id=messages[1]["id"])
        assert (await client.post("/api/chat", json=body)).status_code == 200
        found = await shown(client)

    assert texts(found) == ["a", "Again."]
    assert found[0]["id"] == messages[0]["id"]


async def test_the_message_of_a_call_that_failed_is_a_new_one(running: Running) -> None:
    app, _ = made([RuntimeError("broken"), "Again."])
    async with running(app) as client:
        await client.post("/api/chat", json=asked("a", "u1"))
        assert await shown(client) == []
        assert (await client.post("/api/chat", json=regenerated(user("a", "u1")))).status_code == 200
        assert (await shown(client))[0]["id"] == "u1"


async def test_unknown_messages_change_nothing(running: Running) -> None:
    app, container = made(["One.", says(REFUND)])
    async with running(app) as client:
        [one] = await talk(client, ("a", "u1"))
        await client.post("/api/chat", json=asked("b", "u2"))
        before = await shown(client)
        bodies = [
            edited("x", "nobody"),
            edited("x", one["id"]),  # is not a message of the user
            regenerated(user("a", "u1"), message_id="nobody"),
            regenerated(user("a", "u1"), message_id=""),
        ]
        for body in bodies:
            response = await client.post("/api/chat", json=body)
            assert (response.status_code, response.headers["content-type"]) == (409, "application/problem+json")
        assert await shown(client) == before
        assert [each.status for each in await container.runs.list()] == ["suspended", "completed"]


async def test_the_question_of_an_answer_that_waits_is_edited(running: Running) -> None:
    app, container = made(["One.", says(REFUND), "New."])
    async with running(app) as client:
        await talk(client, ("a", "u1"), ("b", "u2"))
        assert (await client.post("/api/chat", json=edited("B", "u2"))).status_code == 200
        assert texts(await shown(client)) == ["a", "One.", "B", "New."]
        assert [each.status for each in await container.runs.list()] == ["completed", "cancelled", "completed"]
        assert container.get(Refunds).refunded == []


async def test_the_question_of_an_answer_that_goes_on_is_edited(running: Running) -> None:
    model = Gated(["One.", "New."])
    app, _ = made(model)
    async with running(app) as client:
        streaming = asyncio.create_task(client.post("/api/chat", json=asked("a", "u1")))
        await model.waits.wait()
        model.may_go_on.set()
        assert (await client.post("/api/chat", json=edited("A", "u1"))).status_code == 200
        await streaming
        assert texts(await shown(client))[0] == "A"
        assert len(await shown(client)) == 2


async def test_calls_that_others_answer_keep_a_conversation_from_going_back(running: Running) -> None:
    app, container = made(["One.", says(tool_call("pay_out", {"euros": 5}))])
    async with running(app) as client:
        for text, message_id in (("a", "u1"), ("b", "u2")):
            await client.post("/api/chat", json=asked(text, message_id), headers=ANN)
        before = await shown(client, headers=ANN)
        for body in (edited("B", "u2"), edited("A", "u1"), regenerated(user("a", "u1"), message_id="u1")):
            assert (await client.post("/api/chat", json=body, headers=ANN)).status_code == 409
            assert (await client.post("/api/chat", json=body, headers=BOB)).status_code == 404
        assert await shown(client, headers=ANN) == before
        assert (await container.runs.list())[0].status == "suspended"


# --- a user who writes while calls wait


async def test_who_writes_while_calls_wait_rejects_them(running: Running) -> None:
    model = ScriptedChatModel([says(REFUND, text="Sure?"), "As you like.", "Bye."])
    app, container = made(model)
    async with running(app) as client:
        [first] = await talk(client, ("refund", "u1"))
        chunks = events_in((await client.post("/api/chat", json=asked("never mind", "u2"))).text)
        second = message_of(chunks)
        reconnected = await client.get("/api/chat/room/stream")
        found = await shown(client)
        [run] = await container.runs.list()
        logged = await entries(container)
        edit = await client.post("/api/chat", json=edited("go on", "u2"))

    assert (run.status, [(each.answer, each.reason) for each in run.history]) == (
        "completed",
        [("reject", "the user wrote instead")],
    )
    assert not [each for each in chunks if "toolCallId" in each]
    assert second["id"] != first["id"]
    assert texts([second]) == ["As you like."]
    assert reconnected.status_code == 204
    assert [each["id"] for each in found] == ["u1", first["id"], "u2", second["id"]]
    assert texts(found) == ["refund", "Sure?", "never mind", "As you like."]
    assert [each.client_id for each in logged] == ["u1", None, None, "u2", None]
    assert [type(each).__name__ for each in model.requests[1].messages][-2:] == [
        "ToolExecutionResultMessage",
        "UserMessage",
    ]
    assert edit.status_code == 200


async def test_calls_of_others_are_not_rejected_by_who_writes(running: Running) -> None:
    app, container = made([says(tool_call("pay_out", {"euros": 5}), REFUND), "Done."])
    async with running(app) as client:
        await client.post("/api/chat", json=asked("hi", "u1"), headers=ANN)
        for path, body in (("/api/chat", asked("stop it", "u2")), ("/agui", posted("stop it"))):
            assert (await client.post(path, json=body, headers=ANN)).status_code == 409
            assert (await client.post(path, json=body, headers=BOB)).status_code == 404
        [run] = await container.runs.list()
        assert (run.status, run.history) == ("suspended", ())


async def test_deferred_calls_fail_when_the_user_writes_instead(running: Running) -> None:
    model = ScriptedChatModel([says(tool_call("pick_date", {"hint": "soon"}), REFUND), "Well."])
    app, container = made(model)
    async with running(app) as client:
        await talk(client, ("hi", "u1"), ("never mind", "u2"))
        [run] = await container.runs.list()
    assert [each.answer for each in run.history] == ["fail", "reject"]


async def test_answers_in_an_ag_ui_body_come_before_its_message(running: Running) -> None:
    model = ScriptedChatModel([says(REFUND, tool_call("pay_out", {"euros": 5})), "As you like."])
    app, container = made(model)
    message = {"id": "u1", "role": "user", "content": "hi"}
    async with running(app) as client:
        first = events_in((await client.post("/agui", json=posted(message), headers=MIA)).text)
        [refund, pay_out] = interrupts_in(first)
        resume = [{"interruptId": refund["id"], "status": "resolved", "payload": True}]
        resume += [{"interruptId": pay_out["id"], "status": "cancelled"}]
        body = posted(message, {"id": "u2", "role": "user", "content": "never mind"}, resume=resume)
        events = events_in((await client.post("/agui", json=body, headers=MIA)).text)
        found = await shown(client, "/agui/room/messages", headers=MIA)
        [run] = await container.runs.list()
        assert container.get(Refunds).refunded == [7]

    assert [each.answer for each in run.history] == ["approve", "reject"]
    assert [each["content"] for each in messages_of(events)] == ["As you like."]
    assert [each["id"] for each in found if each["role"] == "user"] == ["u1", "u2"]


@pytest.mark.parametrize("on_suspended", ["continue", "cancel"])
async def test_other_services_do_what_they_say_when_the_user_writes(on_suspended: Any, running: Running) -> None:
    @register_ai_service(tools=Refunds, on_suspended=on_suspended)
    class Other(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    app, container = made([says(REFUND), "Hello."], Other.chat, Other)
    async with running(app) as client:
        await talk(client, ("refund", "u1"))
        [answer] = await talk(client, ("hi", "u2"))
        statuses = [each.status for each in await container.runs.list()]

    assert texts([answer]) == ["Hello."]
    assert statuses == ["completed", "suspended" if on_suspended == "continue" else "cancelled"]


async def test_messages_that_a_program_adds_are_shown_within_the_answer(running: Running) -> None:
    model = ScriptedChatModel([says(REFUND), "Direct, then."])
    app, container = made(model)
    async with running(app) as client:
        [first] = await talk(client, ("hi", "u1"))
        await container.runs.tell(first["id"], "only direct flights", by="ann")
        chunks = events_in((await client.post("/api/chat", json=answers(answered(first)))).text)
        found = await shown(client)
        agui = await shown(client, "/agui/room/messages")

    told = {"type": "data-told", "data": {"text": "only direct flights", "by": "ann"}}
    assert told in chunks
    assert [each["id"] for each in found] == ["u1", first["id"]]
    assert [each["type"] for each in found[1]["parts"]] == [
        "step-start",
        "tool-refund",
        "data-told",
        "step-start",
        "text",
    ]
    assert [each["content"] for each in agui if each["role"] == "user"] == ["hi", "only direct flights"]


async def test_a_message_is_edited_while_answers_wait_beside_others(running: Running) -> None:
    @register_ai_service(tools=Refunds, on_suspended="continue")
    class Calm(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    app, container = made([says(REFUND), "Two.", "New."], Calm.chat, Calm)
    async with running(app) as client:
        await talk(client, ("a", "u1"), ("b", "u2"))
        waiting = await shown(client)
        await client.post("/api/chat", json=edited("A", "u1"))
        after = await shown(client)
        statuses = sorted(each.status for each in await container.runs.list())

    assert [each["id"] for each in waiting][::2] == ["u1", "u2"]
    assert waiting[1]["parts"][-1]["state"] == "approval-requested"
    assert texts(after) == ["A", "New."]
    assert statuses == ["cancelled", "completed", "completed"]


class OnlyViews(ChatMemoryStore):
    """A store with the three methods alone."""

    def __init__(self) -> None:
        self.kept: dict[Any, Any] = {}

    async def get_messages(self, key: Any) -> Any:
        return self.kept.get(key, [])

    async def update_messages(self, key: Any, messages: Any) -> None:
        self.kept[key] = [*messages]

    async def delete_messages(self, key: Any) -> None:
        self.kept.pop(key, None)


async def test_a_store_without_logs_can_do_all_but_going_back(running: Running) -> None:
    @produces()
    def views() -> ChatMemoryStore:
        return OnlyViews()

    app, container = made([says(REFUND), "As you like.", "Bye."], Desk.chat, Desk, views)
    async with running(app) as client:
        [first] = await talk(client, ("a", "u1"))
        reconnected = events_in((await client.get("/api/chat/room/stream")).text)
        [second] = await talk(client, ("never mind", "u2"))
        for body in (edited("A", "u1"), regenerated(user("a", "u1"))):
            assert (await client.post("/api/chat", json=body)).status_code == 409
        assert (await client.post("/api/chat/room/stop")).json() is False
        [run] = await container.runs.list()

    assert message_of(reconnected)["parts"] == first["parts"]
    assert (texts([second]), run.status) == (["As you like."], "completed")


# --- sources, and state


class Handbook(Retriever):
    async def retrieve(self, query: Query) -> list[Passage]:
        return [
            Passage("Secret text.", source="https://example.org/leave", title="Leave", attributes={"secret": 1}),
            Passage("More.", source="hr/handbook.pdf"),
        ]


async def test_sources_are_sent_and_come_back(running: Running) -> None:
    @register_ai_service(retrievers=Handbook)
    class Hr(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    app, _ = made(["30 days [1].", "30 days [1]."], Hr.chat, Hr, Handbook)
    async with running(app) as client:
        response = await client.post("/api/chat", json=asked("leave?", "u1"))
        chunks, found = events_in(response.text), await shown(client)
        events = events_in((await client.post("/agui", json=posted("leave?"))).text)

    sources = [
        {"type": "source-url", "sourceId": "1", "url": "https://example.org/leave", "title": "Leave"},
        {
            "type": "source-document",
            "sourceId": "2",
            "mediaType": "text/plain",
            "title": "hr/handbook.pdf",
            "filename": "hr/handbook.pdf",
        },
    ]
    assert [each for each in chunks if each["type"].startswith("source-")] == sources
    assert [each for each in found[1]["parts"] if each["type"].startswith("source-")] == sources
    [custom] = [each["value"] for each in events if each.get("name") == "sources"]
    assert [each["source"] for each in custom] == ["https://example.org/leave", "hr/handbook.pdf"]
    assert "secret" not in response.text.lower()


@conversation_scoped
class Reservation(BaseModel):
    departure: str | None = None

    @tool
    def set_departure(self, day: str) -> str:
        """Set the departure."""
        self.departure = day
        return "ok"


async def test_the_state_of_a_conversation_is_sent_when_it_changes(serving: Running) -> None:
    @register_ai_service(tools=[Reservation, Refunds])
    class Travel(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    has_state = asyncio.Event()

    def leave_on(day: str) -> Callable[[ChatRequest], Awaitable[ChatResponse]]:
        async def reply(_: ChatRequest) -> ChatResponse:
            await has_state.wait()  # the client has the state from before the change
            return ChatResponse(says(tool_call("set_departure", {"day": day})))

        return reply

    model = ScriptedChatModel(
        [
            leave_on("monday"),
            says(REFUND),
            leave_on("friday"),
            "Done.",
            "Hello.",
        ]
    )
    app = FastAPI()
    container = Container(models={"default": model}).register(Travel, Reservation, Refunds)
    install(app, container)

    @app.post("/agui")
    async def agui(body: ag_ui.RunInput, runs: Inject[Runs]) -> Response:
        return await ag_ui.respond(runs, Travel.chat, body, state=(Reservation,))

    async with serving(app) as client:

        async def post(body: dict[str, Any]) -> list[dict[str, Any]]:
            has_state.clear()
            frames = []
            async with client.stream("POST", "/agui", json=body) as response:
                async for line in response.aiter_lines():
                    frames.append(line)
                    if "STATE_SNAPSHOT" in line:
                        has_state.set()
            return events_in("\n".join(frames))

        first = await post(posted("hi"))
        second = await post(resumed(interrupts_in(first), True))
        third = await post(posted("bye"))

    def states(events: list[dict[str, Any]]) -> list[Any]:
        return [each["snapshot"]["Reservation"]["departure"] for each in events if each["type"] == "STATE_SNAPSHOT"]

    assert [states(each) for each in (first, second, third)] == [[None, "monday"], ["monday", "friday"], ["friday"]]
    assert [each["type"] for each in first[:2]] == ["RUN_STARTED", "STATE_SNAPSHOT"]
    for each in (*first, *second):
        assert EVENTS.validate_python(each)


async def test_an_interrupt_says_when_it_expires(running: Running) -> None:
    class Timed:
        @tool(requires_approval=True, approval_expires=timedelta(minutes=5))
        def pay(self) -> str:
            """Pay."""
            return "paid"

    @register_ai_service(tools=Timed)
    class Shop(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    app, container = made([says(tool_call("pay", {}))], Shop.chat, Shop, Timed)
    async with running(app) as client:
        [interrupt] = interrupts_in(events_in((await client.post("/agui", json=posted("hi"))).text))
        [run] = await container.runs.list()

    expires = run.pending[0].expires_at
    assert expires is not None
    assert datetime.fromisoformat(interrupt["expiresAt"]) == expires
