"""The dev UI's inbox over HTTP: lists runs that wait for a person, answers and cancels them.

Not here: its page (`test_dev_ui_page`).
"""

from collections.abc import Iterator
from typing import Any, Protocol

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from toolbox import (
    AiMessage,
    ChatRequest,
    Container,
    Result,
    ToolExecutionResultMessage,
    UserMessage,
    register_ai_service,
    tool,
)
from toolbox.security import SecurityIdentity
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox_fastapi import DevUi, install
from toolbox_fastapi.dev_ui import routes


class Orders:
    @tool(requires_approval=True)
    def refund(self, order: int) -> str:
        return f"refunded {order}"

    @tool(requires_approval=True)
    def note(self, order: int, text: str) -> str:
        return f"noted {order} {text}"


@register_ai_service(tools=Orders)
class Desk(Protocol):
    async def ask(self, question: str) -> Result[str]: ...


def reply_to(request: ChatRequest) -> Any:
    last = request.messages[-1]
    if isinstance(last, ToolExecutionResultMessage):
        return AiMessage(last.text)
    if isinstance(last, UserMessage) and last.text == "note":
        return tool_call("note", {"order": 9007199254740993, "text": "ab\u202ecd\u3164\ufe0f"})
    return tool_call("refund", {"order": 7})


def desk() -> FastAPI:
    app = FastAPI(title="The desk")
    container = Container(models={"default": ScriptedChatModel([reply_to] * 100)}).register(Desk)
    install(app, container, dev_ui=DevUi(token=False), identity=user_of)
    return app


def user_of(request: Request) -> SecurityIdentity | None:
    name = request.headers.get("user")
    return None if name is None else SecurityIdentity(name)


@pytest.fixture
def client() -> Iterator[TestClient]:
    with TestClient(desk(), base_url="http://127.0.0.1", client=("127.0.0.1", 5000)) as client:
        yield client


def suspended(client: TestClient) -> str:
    """Ask the desk, and return the id of the suspended run."""
    body = {"method": "Desk.ask", "arguments": '{"question": "refund 7"}'}
    sent = client.post("/dev-ui/api/ask", json=body).text
    assert '"type":"suspended"' in sent
    [run] = [each for each in client.get("/dev-ui/api/runs").json() if each["status"] == "suspended"]
    assert [each["tool_name"] for each in run["pending"]] == ["refund"]
    return str(run["id"])


def test_an_approved_call_runs_and_the_run_completes(client: TestClient) -> None:
    run = suspended(client)

    reply = client.post("/dev-ui/api/runs", json={"run_id": run, "answers": {"0": {"kind": "approve"}}})

    assert (reply.status_code, reply.json()["content"]) == (200, "refunded 7")
    [run_now] = client.get("/dev-ui/api/runs").json()
    assert (run_now["status"], run_now["history"][0]["answer"]) == ("completed", "approve")


@pytest.mark.parametrize(
    ("answer", "content"),
    [
        ({"kind": "approve", "text": '{"order": 9007199254740993}'}, "refunded 9007199254740993"),
        ({"kind": "approve"}, "refunded 7"),
    ],
)
def test_arguments_can_be_sent_as_text_with_all_their_digits(client: TestClient, answer: Any, content: str) -> None:
    run = suspended(client)
    [listed] = client.get("/dev-ui/api/runs").json()
    assert listed["pending"][0]["text"] == '{\n  "order": 7\n}'

    reply = client.post("/dev-ui/api/runs", json={"run_id": run, "answers": {"0": answer}})

    assert (reply.status_code, reply.json()["content"]) == (200, content)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"kind": "approve", "text": "{"}, ""),
        ({"kind": "approve", "text": "[]"}, "the arguments must be a JSON object"),
        ({"kind": "reject", "text": "{}"}, "reject has no text"),
    ],
)
def test_a_text_that_does_not_fit_its_answer_is_refused(client: TestClient, answer: Any, text: str) -> None:
    run = suspended(client)

    reply = client.post("/dev-ui/api/runs", json={"run_id": run, "answers": {"0": answer}})

    assert reply.status_code == 422
    assert text in reply.json()["detail"]
    [listed] = client.get("/dev-ui/api/runs").json()
    assert listed["status"] == "suspended"


def test_invalid_arguments_are_refused_and_the_run_still_waits(client: TestClient) -> None:
    run = suspended(client)
    answers = {"0": {"kind": "approve", "arguments": {"order": "seven"}}}

    reply = client.post("/dev-ui/api/runs", json={"run_id": run, "answers": answers})

    assert reply.status_code == 422
    assert client.get("/dev-ui/api/runs").json()[0]["status"] == "suspended"


def test_a_run_can_be_cancelled(client: TestClient) -> None:
    run = suspended(client)

    reply = client.post("/dev-ui/api/runs", json={"run_id": run, "cancel": True, "reason": "too late"})

    assert reply.json() == {"status": "cancelled"}
    assert client.get("/dev-ui/api/runs").json()[0]["status"] == "cancelled"


def test_a_run_that_waits_is_listed_however_many_are_newer(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "MAX_RUNS", 1)
    waiting, newer = suspended(client), suspended(client)
    client.post("/dev-ui/api/runs", json={"run_id": newer, "cancel": True})

    assert [each["id"] for each in client.get("/dev-ui/api/runs").json()] == [waiting, newer]


def test_the_history_names_who_cancelled(client: TestClient) -> None:
    run = suspended(client)

    client.post("/dev-ui/api/runs", json={"run_id": run, "cancel": True, "reason": "late"}, headers={"user": "ann"})

    [entry] = client.get("/dev-ui/api/runs").json()[0]["history"]
    assert (entry["answer"], entry["by"], entry["reason"]) == ("cancel", "ann", "late")


def test_unknown_runs_are_reported(client: TestClient) -> None:
    reply = client.post("/dev-ui/api/runs", json={"run_id": "nope", "answers": {}})

    assert reply.json()["kind"] == "RunNotFoundError"
