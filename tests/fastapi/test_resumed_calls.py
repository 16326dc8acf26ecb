"""A run that a person continues with a web request: nothing of that request reaches the run."""

from typing import Annotated, Any, Protocol

import httpx2
import pytest
from fastapi import FastAPI, Header
from fastapi.testclient import TestClient

from toolbox import AiMessage, ChatResponse, Container, Result, register_ai_service, rest, tool
from toolbox import Inject as ToolInject
from toolbox.runs import Runs, approve
from toolbox.security import SecurityIdentity
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox_fastapi import Inject, install, runs_router

seen: list[tuple[str, str | None]] = []


@rest.register_rest_client(config_key="ledger")
class Ledger(Protocol):
    @rest.post("/payments")
    async def book(self) -> None: ...


class Payments:
    @tool(requires_approval=True)
    async def pay(self, by: ToolInject[SecurityIdentity], ledger: ToolInject[Ledger]) -> str:
        await ledger.book()
        seen[-1] = (by.name, seen[-1][1])
        return "paid"


@register_ai_service(tools=Payments)
class Desk(Protocol):
    async def chat(self, text: str) -> Result[str]: ...


def record(request: httpx2.Request) -> httpx2.Response:
    seen.append(("", request.headers.get("authorization")))
    return httpx2.Response(204)


def client() -> TestClient:
    app = FastAPI()
    replies = [ChatResponse(AiMessage(None, [tool_call("pay", {})])), ChatResponse(AiMessage("done"))]
    settings = rest.rest_settings(
        "ledger",
        url="http://ledger.example",
        transport=httpx2.MockTransport(record),
        propagate_headers=("authorization",),
    )
    container = Container(models={"default": ScriptedChatModel(replies)}).register(Desk, Payments, Ledger, settings)

    async def user(authorization: Annotated[str | None, Header()] = None) -> SecurityIdentity | None:
        return None if authorization is None else SecurityIdentity(authorization)

    install(app, container, identity=user)
    app.include_router(runs_router(container))

    @app.post("/chat")
    async def chat(desk: Inject[Desk]) -> str:
        return (await desk.chat("pay")).run_id or ""

    @app.post("/own/{run_id}")
    async def own(run_id: str, runs: Inject[Runs]) -> Any:
        return (await runs.resume(run_id, {"0": approve()})).content

    return TestClient(app)


@pytest.mark.parametrize("starter", ["", "ann"], ids=["anonymous", "named"])
@pytest.mark.parametrize("path", ["/own/{}", "/runs/{}/answers"])
def test_a_resumed_run_has_neither_the_identity_nor_the_headers_of_the_request_that_resumed_it(
    path: str, starter: str
) -> None:
    seen.clear()
    with client() as http:
        run_id = http.post("/chat", headers={"authorization": starter} if starter else {}).json()
        body = {"answers": {"0": {"kind": "approve"}}}
        answered = http.post(path.format(run_id), headers={"authorization": "boss"}, json=body)
    assert answered.status_code == 200
    assert seen == [(starter, None)]
