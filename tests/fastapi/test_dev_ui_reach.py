"""The dev UI's view of the reach, in a real browser: which tools can be called from where, and who may do so."""

import socket
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import pytest
import uvicorn
from fastapi import FastAPI

from toolbox import Container, register_ai_service, tool
from toolbox.guardrails import GuardrailResult, ToolInputGuardrail, ToolInputGuardrailRequest, tool_input_guardrails
from toolbox.security import SecurityIdentity, authenticated, roles_allowed
from toolbox.testing import ScriptedChatModel
from toolbox_fastapi import DevUi, Inject, install


class KnownOrder(ToolInputGuardrail):
    def validate(self, request: ToolInputGuardrailRequest) -> GuardrailResult:
        return self.success()


class Orders:
    @tool(requires_approval=True)
    @roles_allowed("support", "admin")
    @tool_input_guardrails(KnownOrder)
    def refund(self, order: int) -> str: ...

    @tool
    @authenticated
    def my_orders(self) -> str: ...

    @tool
    def opening_hours(self) -> str: ...

    @tool
    @roles_allowed()
    def never(self) -> str: ...


@register_ai_service(tools=Orders)
class Expert(Protocol):
    @tool
    @roles_allowed("boss")
    async def consult(self, text: str) -> str: ...


@register_ai_service(tools=Expert)
class Desk(Protocol):
    async def chat(self, text: str) -> str: ...


def shop() -> FastAPI:
    app = FastAPI(title="The <b>shop</b>")
    install(
        app,
        Container(models={"default": ScriptedChatModel([])}).register(Desk, Expert),
        dev_ui=DevUi(token=False),
        identity=nobody,
    )

    @app.post("/chat")
    async def chat(desk: Inject[Desk]) -> None: ...

    return app


def nobody() -> SecurityIdentity | None:
    return None


@pytest.fixture
def address() -> Iterator[str]:
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(shop(), log_level="error", ws="none", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/dev-ui/"
    server.should_exit = True
    thread.join()
    listening.close()


def test_the_reach_is_a_table_that_says_who_may_call_what(browser: Any, address: str) -> None:
    page = browser.new_page(viewport={"width": 320, "height": 800})
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(f"{address}#reach")
    table = page.get_by_role("region", name="Table of the reach")
    table.get_by_role("row").first.wait_for()

    [head, *rows] = [
        [cell.inner_text() for cell in row.locator("th, td").all()] for row in table.get_by_role("row").all()
    ]
    assert [each.lower() for each in head] == ["entry", "through", "tool", "roles", "approval", "guardrails", "effects"]
    through = ["POST /chat", "Desk.chat → Expert.consult"]
    assert [row for row in rows if row[0] == "POST /chat"] == [
        ["POST /chat", "Desk.chat", "consult", "boss", "", "", ""],
        [*through, "refund", "boss, and admin or support", "yes", "KnownOrder", ""],
        [*through, "my_orders", "boss", "", "", ""],
        [*through, "opening_hours", "boss", "", "", ""],
    ]
    assert not [row for row in rows if row[2] == "never"]  # no identity may call it
    assert page.get_by_role("link", name="Reach").get_attribute("aria-current") == "page"
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")

    page.get_by_role("link", name="Chat").click()
    page.get_by_role("link", name="Reach").click()
    assert table.count() == 1  # made once
    page.close()
    assert complaints == []
