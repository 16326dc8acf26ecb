"""Guardrails and interceptors in a web application: responses, endpoints' tools, the dev UI, and MCP."""

import json
from typing import Any, Protocol

import pytest
from fastapi import FastAPI
from mcp import Client, MCPError

from tests.services.log import LOG
from toolbox import (
    Container,
    IllegalConfigurationError,
    TokenStream,
    ToolExecutionResult,
    application_scoped,
    register_ai_service,
    tool,
    toolbox,
)
from toolbox.events import EventListener, GuardrailExecutedEvent, InvocationEvent
from toolbox.guardrails import (
    GuardrailResult,
    InputGuardrail,
    InputGuardrailRequest,
    MaskSecrets,
    OutputGuardrail,
    OutputGuardrailRequest,
    ToolInputGuardrail,
    ToolInputGuardrailRequest,
    input_guardrails,
    output_guardrails,
    tool_input_guardrails,
    tool_output_guardrails,
)
from toolbox.interceptors import ToolInterceptor, ToolInvocation, ToolProceed, global_interceptor, interceptors
from toolbox.mcp import mcp_server_of
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox_fastapi import DevUi, Inject, install, sse

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def fresh_log() -> None:
    LOG.clear()


class NoSecrets(InputGuardrail):
    def validate(self, request: InputGuardrailRequest) -> GuardrailResult:
        return self.failure("secret reason") if "bad" in request.user_message.text else self.success()


class NoAnswers(OutputGuardrail):
    def validate(self, request: OutputGuardrailRequest) -> GuardrailResult:
        return self.fatal("secret reason") if "secret" in request.text else self.success()


class Allowed(ToolInputGuardrail):
    def __init__(self, names: "Names") -> None:
        self.names = names

    def validate(self, request: ToolInputGuardrailRequest) -> GuardrailResult:
        LOG.append("Allowed")
        name = request.arguments["name"]
        if name == "fatal":
            return self.fatal("secret reason")
        return self.success() if name in self.names.known else self.failure("unknown name")


class Names:
    known = ("ada", "bob")


class Noting(ToolInterceptor):
    async def around_tool(self, call: ToolInvocation, proceed: ToolProceed) -> ToolExecutionResult:
        LOG.append(type(self).__name__)
        return await proceed(call)


@global_interceptor
class Everywhere(Noting): ...


@tool
@tool_input_guardrails(Allowed)
@tool_output_guardrails(MaskSecrets)
@interceptors(Noting)
def account(name: str) -> dict[str, str]:
    """Finds an account."""
    return {"name": name, "password": "hunter2"}


class Accounts:
    @tool
    @tool_input_guardrails(Allowed)
    @interceptors(Noting)
    def find(self, name: str) -> dict[str, str]:
        return {"name": name}


@register_ai_service
@input_guardrails(NoSecrets)
class Desk(Protocol):
    @output_guardrails(NoAnswers)
    async def chat(self, text: str) -> str: ...

    @output_guardrails(NoAnswers)
    def stream(self, text: str) -> TokenStream: ...


def application(*replies: Any, dev_ui: Any = None) -> FastAPI:
    app = FastAPI()
    container = Container(models={"default": ScriptedChatModel([*replies])}).register(Desk, Names, Everywhere)

    @app.get("/chat")
    async def chat(text: str, desk: Inject[Desk]) -> str:
        return await desk.chat(text)

    @app.get("/tools")
    @toolbox(account)
    async def with_tools(text: str, desk: Inject[Desk]) -> str:
        return await desk.chat(text)

    @app.get("/stream")
    async def stream(text: str, desk: Inject[Desk]) -> Any:
        return sse(desk.stream(text))

    install(app, container, dev_ui=dev_ui)
    return app


async def test_refusals_are_responses_without_the_texts_of_guardrails(running: Any) -> None:
    async with running(application("a secret")) as client:
        refused = await client.get("/chat", params={"text": "bad"})
        unusable = await client.get("/chat", params={"text": "good"})

    assert (refused.status_code, refused.json()["detail"]) == (422, "The message was refused.")
    assert (unusable.status_code, unusable.json()["title"]) == (502, "Bad Gateway")
    assert "secret" not in refused.text + unusable.text


async def test_a_refused_stream_ends_with_a_failure_and_never_shows_the_answer(running: Any) -> None:
    async with running(application("a secret")) as client:
        reply = await client.get("/stream", params={"text": "good"})
    assert "failure" in reply.text
    assert "secret" not in reply.text


async def test_tools_of_endpoints_are_guarded_and_their_guardrails_are_beans(running: Any) -> None:
    app = application(tool_call("account", {"name": "ada"}), "done", tool_call("account", {"name": "eve"}), "no")
    async with running(app) as client:
        assert (await client.get("/tools", params={"text": "ada"})).json() == "done"
        assert LOG == ["Allowed", "Everywhere", "Noting"]
        assert (await client.get("/tools", params={"text": "eve"})).json() == "no"
        assert LOG[3:] == ["Allowed"]


async def test_wrong_guardrails_of_endpoints_are_problems_at_start(running: Any) -> None:
    @tool
    @tool_input_guardrails(NoSecrets)
    def wrong(name: str) -> str:
        return name

    app = FastAPI()

    @app.get("/")
    @toolbox(wrong)
    async def endpoint(desk: Inject[Desk]) -> str:
        return "never"

    install(app, Container(models={"default": ScriptedChatModel([])}).register(Desk))
    with pytest.raises(IllegalConfigurationError, match="NoSecrets is not a ToolInputGuardrail"):
        async with running(app):
            pass


async def test_the_timeline_of_the_dev_ui_shows_runs_of_guardrails(running: Any) -> None:
    async with running(application("fine", dev_ui=DevUi(token=False))) as client:
        shown = []
        for text in ("good", "bad"):
            body = {"method": "Desk.chat", "arguments": json.dumps({"text": text})}
            reply = await client.post("/dev-ui/api/ask", json=body, headers={"host": "localhost"})
            events = [each for each in reply.text.split("\n\n") if each.startswith("data:")]
            entries = [json.loads(each.removeprefix("data: ").splitlines()[0]) for each in events]
            shown += [each for each in entries if each["type"] == "guardrail"]

    assert [(each["name"], each["result"], each["refused"]) for each in shown] == [
        ("guardrail NoSecrets", "success", False),
        ("guardrail NoAnswers", "success", False),
        ("guardrail NoSecrets", "failure", True),
    ]
    assert len({each["call"] for each in shown}) == 3
    assert all(each["duration"] > 0 and each["at"] > 0 for each in shown)


# --- MCP


@application_scoped
class Events(EventListener):
    def on_event(self, event: InvocationEvent) -> None:
        if isinstance(event, GuardrailExecutedEvent):
            LOG.append((event.guardrail.__name__, event.outcome))


async def test_tools_over_mcp_have_their_guardrails_and_all_interceptors() -> None:
    container = Container().register(Names, Everywhere, Events)
    server = mcp_server_of(container, [account, Accounts])
    async with container, Client(server) as client:
        tools = {each.name: each for each in (await client.list_tools()).tools}
        assert tools["account"].output_schema is None  # a guardrail may replace the result
        assert tools["find"].output_schema is not None

        done = await client.call_tool("account", {"name": "ada"})
        assert (done.content[0].text, done.structured_content) == ('{"name":"ada","password":"***"}', None)
        calls = ["Allowed", ("Allowed", "success"), "Everywhere", "Noting", ("MaskSecrets", "modified")]
        assert calls == LOG

        found = await client.call_tool("find", {"name": "bob"})
        assert found.structured_content == {"name": "bob"}
        refused = await client.call_tool("find", {"name": "eve"})
        assert (refused.content[0].text, refused.is_error) == ("Input validation failed: unknown name", True)
        with pytest.raises(MCPError) as caught:
            await client.call_tool("find", {"name": "fatal"})
    assert "secret" not in str(caught.value)


def test_wrong_guardrails_of_tools_over_mcp_are_problems_at_start() -> None:
    container = Container()
    mcp_server_of(container, [account])
    [problem] = container.check()
    assert "Allowed" in str(problem)
    assert "no bean provides Names" in str(problem)
