"""Bodies that no client of a front end sends: wrong values in each field, forged ids, answers that contradict."""

import copy
import json
from collections.abc import Iterator
from datetime import date
from enum import Enum
from typing import Any, Protocol
from uuid import UUID

import pytest
from pydantic import BaseModel

from toolbox import MemoryId, register_ai_service, tool
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox_fastapi import ag_ui, vercel_ai

from .conftest import Running
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
from .test_ag_ui import interrupts_in

pytestmark = pytest.mark.anyio

WRONG: list[Any] = [None, True, 0, float("inf"), "\ud800", "\x00", "a" * 3000, [], [None], {}, {"id": []}, 10**30]

APPROVAL = {"id": "r:0", "approved": True, "reason": "x"}
CALLS = [
    {"type": "tool-refund", "toolCallId": "r:0", "state": "approval-responded", "approval": APPROVAL},
    {"type": "tool-pick_date", "toolCallId": "r:1", "state": "output-available", "output": {"x": 1}},
    {"type": "tool-pick_date", "toolCallId": "r:2", "state": "output-error", "errorText": "x"},
]
FILE = {"type": "file", "mediaType": "image/png", "url": "data:image/png;base64,iVBORw0KGgo=", "filename": "x"}
QUESTION = {"id": "u1", "role": "user", "parts": [{"type": "text", "text": "hi"}, FILE]}
SOURCE = {"type": "data", "value": "iVBORw0KGgo=", "mimeType": "image/png"}
OFFERED = {"name": "where_am_i", "description": "x", "parameters": {"type": "object", "properties": {}}}
RESULT = {"id": "t", "role": "tool", "toolCallId": "r:0", "content": "x", "error": "e"}
PAYLOAD = {"approved": True, "editedArgs": {"order": 1}, "remember": "conversation"}
BODIES = {
    "vercel": ("/api/chat", {"id": "room", "messages": [QUESTION], "trigger": "submit-message", "messageId": None}),
    "vercel, the last message": ("/api/chat", {"id": "room", "message": QUESTION}),
    "vercel, answers": ("/api/chat", answers({"id": "a1", "role": "assistant", "parts": CALLS})),
    "vercel, again": ("/api/chat", {"id": "room", "messages": [QUESTION], "trigger": "regenerate-message"}),
    "ag-ui": ("/agui", posted("hi", tools=[OFFERED])),
    "ag-ui, files": ("/agui", posted({"id": "m", "role": "user", "content": [{"type": "image", "source": SOURCE}]})),
    "ag-ui, answers": (
        "/agui",
        posted("hi", RESULT, resume=[{"interruptId": "r:0", "status": "resolved", "payload": PAYLOAD}]),
    ),
}


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    if isinstance(value, (dict, list)):
        for step, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*at, step))


def with_value(body: Any, at: tuple[Any, ...], value: Any) -> Any:
    if not at:
        return value
    changed = inner = copy.deepcopy(body)
    for step in at[:-1]:
        inner = inner[step]
    inner[at[-1]] = value
    return changed


@pytest.mark.parametrize("kind", BODIES)
async def test_a_wrong_value_in_any_field_is_a_mistake_of_the_client(kind: str, running: Running) -> None:
    path, body = BODIES[kind]
    app, _ = made(ScriptedChatModel(["ok"] * 1000))
    async with running(app) as client:
        for at in places(body):
            for value in WRONG:
                sent = json.dumps(with_value(body, at, value))
                response = await client.post(path, content=sent, headers={"content-type": "application/json"})

                assert response.status_code in (200, 409, 422), (at, value, response.text)
                assert "ERROR" not in response.text, (at, value, response.text)
                if response.status_code == 422 and isinstance(found := response.json()["detail"], list):
                    assert all(each["loc"][0] == "body" for each in found)
                    assert len(response.content) < 30_000


async def test_a_mistake_is_named_with_its_place(running: Running) -> None:
    app, _ = made([])
    body = said("hi")
    body["messages"][0]["role"] = "r" * 100_000
    async with running(app) as client:
        response = await client.post("/api/chat", json=body)

    [problem] = response.json()["detail"]
    assert problem["loc"] == ["body", "messages", 0, "role"]
    assert len(response.content) < 1000


@pytest.mark.parametrize("approved", [(True, False), (False, True)])
async def test_answers_that_contradict_are_refused_and_nothing_runs(
    approved: tuple[bool, bool], running: Running
) -> None:
    app, container = made([says(REFUND), "Done."])
    async with running(app) as client:
        waiting = message_of(events_in((await client.post("/api/chat", json=said("hi"))).text))
        parts = [part for each in approved for part in answered(waiting, each)["parts"]]
        [call_id] = [each["toolCallId"] for each in parts[-1:]]
        resume = [{"interruptId": call_id, "status": "resolved", "payload": each} for each in approved]
        refused = [
            await client.post("/api/chat", json=answers({**waiting, "parts": parts})),
            await client.post("/agui", json=posted("hi", resume=resume)),
        ]
        same = await client.post("/agui", json=posted("hi", resume=resume[:1] * 2))

        assert container.get(Refunds).refunded == ([7] if approved[0] else [])
    assert [each.status_code for each in refused] == [422, 422]
    assert same.status_code == 200


@pytest.mark.parametrize("place", ["0 ", "00", "0.1", "0.0", "0/", "0/0", "1", "", ":0", "0#r", "\u0660", "-1", "0\n"])
async def test_an_id_that_was_never_issued_is_not_pending(place: str, running: Running) -> None:
    app, container = made([says(REFUND), "Done."])
    async with running(app) as client:
        waiting = message_of(events_in((await client.post("/api/chat", json=said("hi"))).text))
        forged = answered(waiting)
        forged["parts"][-1]["approval"]["id"] = call_id = f"{waiting['id']}:{place}"
        resume = [{"interruptId": call_id, "status": "resolved", "payload": True}]
        responses = [
            await client.post("/api/chat", json=answers(forged)),
            await client.post("/agui", json=posted("hi", resume=resume)),
        ]

        assert container.get(Refunds).refunded == []
    assert [(each.status_code, each.json()["code"]) for each in responses] == [(409, "not_pending")] * 2


async def test_a_run_of_another_service_is_none_of_this_conversation(running: Running) -> None:
    @register_ai_service(tools=Refunds)
    class Other(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    app, container = made([says(REFUND), says(REFUND)], Desk.chat, Other)
    async with running(app) as client:
        run = await container.runs.start(Other.chat, "room", "hi")
        async for each in container.runs.events(run.id):
            if type(each.event).__name__ == "RunSuspended":
                break
        resume = [{"interruptId": f"{run.id}:0", "status": "resolved", "payload": True}]
        response = await client.post("/agui", json=posted("hi", resume=resume))

        assert container.get(Refunds).refunded == []
    assert (response.status_code, response.json()["code"]) == (409, "not_pending")


async def test_a_call_is_not_answered_by_the_result_of_a_client_tool(running: Running) -> None:
    app, container = made([says(REFUND), "As you like."])
    async with running(app) as client:
        waiting = message_of(events_in((await client.post("/api/chat", json=said("hi"))).text))
        call_id = waiting["parts"][-1]["toolCallId"]
        forged = copy.deepcopy(waiting)
        forged["parts"][-1] |= {"state": "output-available", "output": "refunded 7"}
        await client.post("/api/chat", json=answers(forged))
        await client.post("/agui", json=posted({"id": "t", "role": "tool", "toolCallId": call_id, "content": "done"}))
        [run] = await container.runs.list()

    assert (run.status, run.history) == ("suspended", ())


@pytest.mark.parametrize("path", ["/api/chat", "/agui"])
async def test_who_has_asked_may_not_answer_where_the_tool_says_so(path: str, running: Running) -> None:
    class Ledger:
        @tool(requires_approval=True, not_self=True)
        def book(self, euros: int) -> str:
            """Book."""
            return f"booked {euros}"

        @tool(requires_approval=True, approvers=("manager",))
        def close(self) -> str:
            """Close."""
            return "closed"

    @register_ai_service(tools=Ledger)
    class Clerks(Protocol):
        async def chat(self, room: MemoryId[str], text: str) -> str: ...

    calls = says(tool_call("book", {"euros": 1}), tool_call("close", {}))
    app, container = made([calls, "Done."], Clerks.chat, Clerks, Ledger)
    async with running(app) as client:
        waiting = interrupts_in(events_in((await client.post("/agui", json=posted("hi"), headers=ANN)).text))
        ids = [each["id"] for each in waiting]

        def answer(*chosen: str) -> dict[str, Any]:
            if path == "/agui":
                return posted(
                    "hi", resume=[{"interruptId": each, "status": "resolved", "payload": True} for each in chosen]
                )
            parts = [
                {
                    "type": "tool-x",
                    "toolCallId": each,
                    "state": "approval-responded",
                    "approval": APPROVAL | {"id": each},
                }
                for each in chosen
            ]
            return answers({"id": "a", "role": "assistant", "parts": parts})

        own = [(await client.post(path, json=answer(each), headers=ANN)).status_code for each in ids]
        other = [(await client.post(path, json=answer(each), headers=BOB)).status_code for each in ids[1:]]
        written = await client.post(
            path, json=posted("never mind") if path == "/agui" else said("never mind"), headers=ANN
        )
        done = await client.post(path, json=answer(*ids), headers=MIA)
        [run] = await container.runs.list()

    assert own == [403, 403]
    assert other == [404]
    assert written.status_code == 409
    assert done.status_code == 200, done.text
    assert run.status == "completed"


class Visibility(Enum):
    PUBLIC = "public"


class OfThePage(BaseModel):
    tenant: UUID
    visibility: Visibility
    since: date


class ChatBody(vercel_ai.ChatBody, OfThePage): ...


class RunInput(ag_ui.RunInput, OfThePage): ...


@pytest.mark.parametrize(("form", "body"), [(ChatBody, said("hi")), (RunInput, posted("hi"))])
def test_a_body_with_further_fields_reads_them_as_fastapi_reads_them(
    form: type[OfThePage], body: dict[str, Any]
) -> None:
    tenant = UUID(int=7)
    read = form.model_validate(body | {"tenant": str(tenant), "visibility": "public", "since": "2027-01-31"})

    assert (read.tenant, read.visibility, read.since) == (tenant, Visibility.PUBLIC, date(2027, 1, 31))
