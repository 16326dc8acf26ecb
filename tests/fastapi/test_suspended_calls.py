"""HTTP statuses of suspended calls and of errors of runs."""

from http import HTTPStatus
from typing import Any, Protocol

import pytest
from fastapi import FastAPI, Request, WebSocket
from fastapi.testclient import TestClient
from starlette.requests import HTTPConnection

from toolbox import (
    AiMessage,
    ChatResponse,
    Container,
    Instance,
    MemoryId,
    Result,
    TokenStream,
    application_scoped,
    register_ai_service,
    request_scoped,
    tool,
    toolbox,
)
from toolbox import Inject as ToolInject
from toolbox.errors import (
    AnswerForbiddenError,
    ConversationBusyError,
    ConversationStoppedError,
    ConversationSuspendedError,
    RunAnswerError,
    RunBusyError,
    RunConflictError,
    RunIncompatibleError,
    RunNotFoundError,
    RunStateError,
)
from toolbox.runs import Runs, approve
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox_fastapi import Inject, install, sse


@tool(requires_approval=True)
def refund(order: int) -> str:
    return f"refunded {order}"


@register_ai_service(tools=refund)
class Desk(Protocol):
    async def chat(self, room: MemoryId[str], text: str) -> str: ...
    def events(self, text: str) -> TokenStream: ...


def client(*replies: Any) -> TestClient:
    app = FastAPI()
    container = Container(models={"default": ScriptedChatModel(replies)}).register(Desk)

    @app.get("/chat")
    async def chat(desk: Inject[Desk]) -> str:
        return await desk.chat("room", "refund order 7")

    @app.get("/events")
    async def events(desk: Inject[Desk]) -> Any:
        return sse(desk.events("refund order 7"))

    @app.get("/approve/{run_id}")
    async def approved(run_id: str, runs: Inject[Runs]) -> Any:
        return (await runs.resume(run_id, {"0": approve()})).content

    @app.get("/continue/{run_id}/{call_id}")
    async def continued(run_id: str, call_id: str, runs: Inject[Runs]) -> Any:
        return sse(runs.resume_stream(run_id, {call_id: approve()}))

    @app.get("/raises/{number}")
    async def raises(number: int) -> None:
        raise ERRORS[number][0]

    install(app, container)
    return TestClient(app, raise_server_exceptions=False)


ERRORS: list[tuple[Exception, int]] = [
    (RunNotFoundError("secret"), 404),
    (RunAnswerError("secret", "secret"), 409),
    (RunIncompatibleError("secret", "secret"), 409),
    (RunConflictError("secret", "secret"), 409),
    (RunStateError("secret", "secret"), 409),
    (RunBusyError("secret"), 409),
    (ConversationBusyError("secret", "secret"), 409),
    (ConversationStoppedError("secret"), 409),
    (ConversationSuspendedError("secret", "secret"), 409),
]

ASKS = ChatResponse(AiMessage(None, [tool_call("refund", {"order": 7})]))


def test_a_suspended_call_is_accepted_with_its_run_and_pending_calls() -> None:
    with client(ASKS, ChatResponse(AiMessage("done"))) as http:
        response = http.get("/chat")
        body = response.json()

        assert response.status_code == 202
        assert response.headers["content-type"] == "application/json"
        assert set(body) == {"run_id", "pending"}
        [call] = body["pending"]
        assert (call["id"], call["tool_name"], call["arguments"], call["kind"]) == (
            "0",
            "refund",
            {"order": 7},
            "approval",
        )
        assert http.get("/chat").status_code == 409
        assert http.get(f"/approve/{body['run_id']}").json() == "done"
        assert http.get(f"/approve/{body['run_id']}").status_code == 409
        assert http.get("/approve/unknown").status_code == 404


def test_a_stream_sends_the_suspension_as_its_last_event() -> None:
    with client(ASKS) as http:
        text = http.get("/events").text

    assert "RunSuspended" in text
    assert '"tool_name"' in text


def test_invalid_answers_of_a_resumed_stream_get_an_error_status() -> None:
    with client(ASKS, ChatResponse(AiMessage("done"))) as http:
        run_id = http.get("/chat").json()["run_id"]

        assert http.get("/continue/unknown/0").status_code == 404
        refused = http.get(f"/continue/{run_id}/7")
        assert (refused.status_code, refused.headers["content-type"]) == (409, "application/problem+json")

        stream = http.get(f"/continue/{run_id}/0")
        assert (stream.status_code, stream.text.count("event: CompleteResponse")) == (200, 1)
        assert http.get(f"/continue/{run_id}/0").status_code == 409
        assert http.get(f"/continue/{run_id}/0", headers={"Last-Event-ID": "0"}).status_code == 204


@pytest.mark.parametrize(("is_anonymous", "status"), [(False, 403), (True, 401)])
def test_a_person_who_may_not_answer_reads_why(is_anonymous: bool, status: int) -> None:
    with client() as http:
        ERRORS.append((AnswerForbiddenError("secret", "it needs one of: manager", is_anonymous=is_anonymous), status))
        response = http.get(f"/raises/{len(ERRORS) - 1}")
        ERRORS.pop()

    assert response.status_code == status
    assert response.json()["detail"] == "it needs one of: manager"
    assert ("www-authenticate" in response.headers) == is_anonymous
    assert "secret" not in response.text


@pytest.mark.parametrize("number", range(len(ERRORS)), ids=lambda each: type(ERRORS[each][0]).__name__)
def test_errors_of_runs_have_their_status_and_show_no_inner_text(number: int) -> None:
    with client() as http:
        response = http.get(f"/raises/{number}")

    assert response.status_code == ERRORS[number][1]
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert (problem["status"], problem["title"]) == (ERRORS[number][1], HTTPStatus(ERRORS[number][1]).phrase)
    assert problem["detail"].endswith(".")
    assert "secret" not in response.text


# --- tools that an endpoint adds


class Approved:
    @tool(requires_approval=True)
    def pay(self, euros: int) -> str:
        return "paid"


class Reading:
    @tool
    def path(self, request: ToolInject[Request]) -> str:
        return request.url.path


@register_ai_service
class Plain(Protocol):
    async def chat(self, text: str) -> str: ...


@pytest.mark.parametrize("tools", [(Reading, Approved), (Reading,), (Approved,)], ids=["both", "reading", "approved"])
def test_a_tool_of_an_endpoint_that_needs_a_seed_which_is_not_kept_is_a_problem_at_start(tools: Any) -> None:
    app, container = FastAPI(), Container(models={"default": ScriptedChatModel([])}).register(Plain)
    install(app, container)

    @app.post("/chat")
    @toolbox(*tools)
    async def chat(desk: Inject[Plain]) -> str: ...

    problems = [str(each) for each in container.check()]
    assert len(problems) == (len(tools) == 2)
    assert all("Reading.path -> Request" in each and "run_seeds" in each for each in problems)


# --- what needs the web request


@request_scoped
class Client:
    def __init__(self, request: Request) -> None: ...


@application_scoped
class Clients:
    def __init__(self, client: Instance[Client]) -> None: ...


@request_scoped
class Visitor:
    """Knows the web request while there is one."""

    def __init__(self, request: Request | None, later: Instance[Request | None]) -> None:
        self.address = None if request is None else request.url.path
        assert later.get() is request


def paying_tool(wanted: Any) -> Any:
    def pay(bean: Any) -> str:
        return f"paid from {bean.address}"

    pay.__annotations__["bean"] = ToolInject[wanted]
    return tool(requires_approval=True)(pay)


def paying(wanted: Any) -> type[Any]:
    @register_ai_service(tools=paying_tool(wanted))
    class Till(Protocol):
        async def ask(self, text: str) -> Result[str]: ...

    return Till


@pytest.mark.parametrize(
    ("wanted", "way"),
    [
        (Request, "Request"),
        (WebSocket, "WebSocket"),
        (HTTPConnection, "HTTPConnection"),
        (Instance[Request], "Request"),
        (Client, "Client -> Request"),
        (Clients, "Clients -> Client -> Request"),
    ],
)
def test_a_call_that_may_wait_and_needs_the_web_request_is_a_problem_at_startup(wanted: Any, way: str) -> None:
    container = Container(models={"default": ScriptedChatModel([])}).register(paying(wanted), Client, Clients)
    install(FastAPI(), container)

    [problem] = container.check()

    seed = way.rpartition(" ")[2]
    assert problem.where == f"Till.ask -> pay -> {way}"
    assert f"take `{seed} | None`" in problem.fix
    assert "Container(run_seeds=…)" in problem.fix


@register_ai_service(tools=paying_tool(Visitor))
class Shop(Protocol):
    async def ask(self, text: str) -> Result[str]: ...


def test_a_call_that_can_do_without_the_web_request_continues_after_its_approval() -> None:
    model = ScriptedChatModel([tool_call("pay"), "done"])
    container = Container(models={"default": model}).register(Shop, Visitor)
    install(app := FastAPI(), container)

    @app.post("/ask")
    async def ask(shop: Inject[Shop]) -> str:
        return (await shop.ask("x")).run_id or ""

    @app.post("/approve/{run_id}")
    async def approved(run_id: str, runs: Inject[Runs]) -> list[str]:
        return [each.result for each in (await runs.resume(run_id, {"0": approve()})).tool_executions]

    with TestClient(app) as browser:
        run_id = browser.post("/ask").json()
        assert browser.post(f"/approve/{run_id}").json() == ["paid from None"]
