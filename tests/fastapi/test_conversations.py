"""Endpoints that show conversations: `Inject[Conversations]`, and its items as responses."""

from typing import Any, Protocol

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from pydantic import TypeAdapter, ValidationError

from toolbox import (
    AiMessage,
    Container,
    ImageContent,
    MemoryId,
    Message,
    SystemMessage,
    ToolExecutionRequest,
    ToolExecutionResultMessage,
    UserMessage,
    produces,
    register_ai_service,
)
from toolbox.conversations import ConversationInfo, Conversations, LogEntry
from toolbox.security import SecurityIdentity
from toolbox.testing import ScriptedChatModel
from toolbox_fastapi import Inject, install


@register_ai_service(name="assistant")
class Assistant(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> str: ...


@produces(scope="request")
def identity(request: Request) -> SecurityIdentity:
    name = request.headers.get("x-user")
    return SecurityIdentity(name) if name else SecurityIdentity.anonymous()


def build() -> tuple[FastAPI, Container]:
    app = FastAPI()
    model = ScriptedChatModel([lambda request: f"a{request.messages[-1].text}"] * 20)
    container = Container(models={"default": model}).register(Assistant, identity)

    @app.get("/rooms")
    async def rooms(
        conversations: Inject[Conversations], user: Inject[SecurityIdentity], before: str | None = None
    ) -> list[ConversationInfo]:
        return await conversations.list(owner=user.name, limit=2, before=before)

    @app.get("/rooms/{room}")
    async def history(room: str, conversations: Inject[Conversations]) -> list[LogEntry]:
        return await conversations.of(Assistant, room).history(limit=50)

    @app.get("/rooms/{room}/info")
    async def info(room: str, conversations: Inject[Conversations]) -> ConversationInfo:
        return await conversations.of(Assistant, room).info()

    @app.post("/rooms/{room}")
    async def chat(room: str, text: str, assistant: Inject[Assistant]) -> str:
        return await assistant.chat(room, text)

    install(app, container)
    return app, container


def test_a_history_page_gets_lists_and_logs_as_json() -> None:
    app, _ = build()
    with TestClient(app) as client:
        ann, bob = {"x-user": "ann"}, {"x-user": "bob"}
        for room in ("1", "2", "3"):
            assert client.post(f"/rooms/{room}", params={"text": "hi"}, headers=ann).json() == "ahi"
        listed = client.get("/rooms", headers=ann).json()
        assert [(each["memory_id"], each["service"], each["owner"]) for each in listed] == [
            ("3", "assistant", "ann"),
            ("2", "assistant", "ann"),
        ]
        rest = client.get("/rooms", headers=ann, params={"before": listed[-1]["cursor"]}).json()
        assert [each["memory_id"] for each in rest] == ["1"]
        assert client.get("/rooms").json() == client.get("/rooms", headers=bob).json() == []

        question, answer = client.get("/rooms/1", headers=ann).json()
        assert question["message"] == {"type": "user", "contents": [{"type": "text", "text": "hi"}]}
        assert answer["message"] == {"type": "ai", "text": "ahi"}
        assert (answer["state"], answer["run_id"]) == ("answered", None)
        for headers in (bob, {}):
            assert client.get("/rooms/1", headers=headers).status_code == 403
            assert client.post("/rooms/1", params={"text": "hi"}, headers=headers).status_code == 403
        assert client.get("/rooms/9", headers=ann).json() == []
        assert client.get("/rooms/9/info", headers=ann).status_code == 404


def test_the_documents_of_the_endpoints_describe_messages() -> None:
    app, _ = build()
    schemas = app.openapi()["components"]["schemas"]
    kinds = {
        each["properties"]["type"]["const"]: each for each in schemas["LogEntry"]["properties"]["message"]["oneOf"]
    }
    assert {*kinds} == {"system", "user", "ai", "tool_result"}
    assert kinds["user"]["required"] == ["type", "contents"]
    assert {"service", "memory_id", "cursor", "usage"} <= {*schemas["ConversationInfo"]["properties"]}


MESSAGES: list[Message] = [
    SystemMessage("s"),
    UserMessage(["look", ImageContent(data=b"\x89PNG\r\n\x1a\n\xff\xfe")], "ann"),
    AiMessage(None, [ToolExecutionRequest("1", "add", "{}")]),
    AiMessage("half \ud800", reasoning="because", attributes={"x": [1]}),
    ToolExecutionResultMessage("1", "add", "3", True),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda each: type(each).__name__)
def test_an_entry_with_any_message_is_written_and_read(message: Message) -> None:
    adapter = TypeAdapter(LogEntry)
    at: Any = "2026-11-28T12:00:00Z"
    entry = adapter.validate_python({"id": "a.0", "at": at, "message": message, "state": "answered"})
    written = adapter.dump_json(entry)

    assert adapter.validate_python(adapter.dump_python(entry)) == adapter.validate_json(written)
    read = adapter.validate_json(written)
    assert adapter.dump_json(read) == written
    if message != MESSAGES[3]:
        assert read == entry


def test_an_entry_with_an_invalid_message_is_refused() -> None:
    fields = {"id": "a.0", "at": "2026-11-28T12:00:00Z", "state": "answered"}
    for message in ({"type": "?"}, {"text": "x"}, 7):
        with pytest.raises(ValidationError):
            TypeAdapter(LogEntry).validate_python({**fields, "message": message})
