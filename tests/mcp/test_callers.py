"""What an MCP client sends for each caller, which tools it accepts, and what it offers beside tools."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest
from fastapi import FastAPI, Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.mcp.test_hostile_servers import answered, handshake
from tests.mcp.uvicorn_server import serving
from tests.mcp.warm_servers import stdio_command
from toolbox import (
    AiMessage,
    Container,
    IllegalConfigurationError,
    PdfContent,
    Result,
    ToolErrors,
    UserMessage,
    register_ai_service,
    request_scoped,
    return_to_model,
    tool,
)
from toolbox.mcp import (
    McpError,
    McpEvent,
    McpListener,
    McpServer,
    McpServers,
    McpToolChanged,
    connection,
    mcp_server,
    mcp_toolbox,
)
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox_fastapi import install, mount_mcp

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]  # starts processes
LIBRARY = Path(__file__).parent / "library_server.py"


class User:
    def __init__(self, name: str) -> None:
        self.name = name


@request_scoped
class OnBehalf:
    def __init__(self, user: User) -> None:
        self._user = user

    def __call__(self) -> dict[str, str | None]:
        return {"Authorization": f"Bearer {self._user.name}", "X-Missing": None}


@register_ai_service
class Assistant(Protocol):
    @mcp_toolbox("far")
    async def chat(self, question: str) -> Result[str]: ...


class Recorder:
    """An ASGI application that keeps the headers and the body of each request."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.seen: list[tuple[dict[str, str], dict[str, Any]]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.seen.append((headers, json.loads(body) if body else {}))
        sent = False

        async def again() -> Message:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, again, send)

    def of(self, method: str, header: str = "authorization") -> list[str | None]:
        return [headers.get(header) for headers, body in self.seen if body.get("method") == method]


class Orders:
    @tool
    def mine(self) -> str:
        """Return my orders."""
        return "one order"


@asynccontextmanager
async def far() -> AsyncIterator[tuple[str, Recorder]]:
    """Serve `Orders` over MCP and record the requests."""
    app, recorders = FastAPI(), []
    install(app, served := Container())
    mount_mcp(app, served, [Orders])

    class Recording(Recorder):
        def __init__(self, app: ASGIApp) -> None:
            super().__init__(app)
            recorders.append(self)

    app.add_middleware(Recording)
    async with serving(app) as base:
        yield f"{base}/mcp", recorders[0]


def asking(*users: str) -> ScriptedChatModel:
    return ScriptedChatModel([each for _ in users for each in (AiMessage(None, [tool_call("mine")]), "done")])


def using(server: McpServer, model: ScriptedChatModel | None = None) -> Container:
    made = Container(models={"default": model or ScriptedChatModel([])}, seeds=(User,))
    return made.register(Assistant).register_instance(server, name="far")


async def test_each_call_sends_the_headers_of_its_caller() -> None:
    users = ["ann", "bob", "ann"]
    async with far() as (url, recorder):
        container = using(mcp_server("far", url=url, headers=OnBehalf), asking(*users))
        async with container:
            for user in users:
                async with container.request_scope({User: User(user)}):
                    result = await container.get(Assistant).chat("What did I order?")
                    assert result.tool_executions[0].result == "one order"

    assert recorder.of("tools/call") == ["Bearer ann", "Bearer bob", "Bearer ann"]
    assert set(recorder.of("tools/list")) == {"Bearer ann", "Bearer bob"}
    assert all("authorization" in headers and "x-missing" not in headers for headers, _ in recorder.seen)


async def test_concurrent_callers_do_not_share_headers() -> None:
    async with far() as (url, recorder):
        container = using(mcp_server("far", url=url, headers=OnBehalf)).register(McpServers)

        async def call(user: str) -> None:
            async with container.request_scope({User: User(user)}):
                await container.get(McpServers).server("far").call("mine", {})

        async with container:
            await asyncio.gather(*(call(f"user {number}") for number in range(5)))

    assert sorted(map(str, recorder.of("tools/call"))) == [f"Bearer user {number}" for number in range(5)]


@pytest.mark.parametrize("is_async", [False, True])
async def test_headers_can_come_from_a_function_and_replace_constant_ones(is_async: bool) -> None:
    def plain(user: User) -> dict[str, str]:
        return {"authorization": user.name}

    async def later(user: User) -> dict[str, str]:
        return {"authorization": user.name}

    async with far() as (url, recorder):
        server = mcp_server("far", url=url, headers=later if is_async else plain)
        constant = mcp_server("far", url=url, headers={"Authorization": "constant", "X-App": "shop"})
        both = McpServer("far", constant.settings, server.headers)
        container = using(both).register(McpServers)
        async with container, container.request_scope({User: User("ann")}):
            await container.get(McpServers).server("far").call("mine", {})

    assert set(recorder.of("tools/call")) == {"ann"}
    assert set(recorder.of("tools/call", "x-app")) == {"shop"}


def test_headers_without_their_beans_are_a_problem_at_start() -> None:
    container = Container(models={"default": ScriptedChatModel([])}).register(Assistant)
    container.register_instance(mcp_server("far", url="http://127.0.0.1:1", headers=OnBehalf), name="far")

    def of_user(user: User) -> dict[str, str]:
        return {}

    container.register_instance(mcp_server("other", url="http://127.0.0.1:1", headers=of_user), name="other")

    where = [each.where for each in container.check()]

    assert "OnBehalf.user" in where
    assert any("mcp_server('other').headers" in each for each in where)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"A B": "secret-4711"}, "invalid name 'A B'"),
        ({"X": "secret-4711\r\nY: z"}, "the value of X contains control characters"),
        ({"X": 4711}, "expected texts, got str: int"),
        ("secret-4711", "expected a mapping of texts, got str"),
    ],
)
async def test_invalid_headers_are_errors_that_show_no_value(given: Any, message: str) -> None:
    container = using(mcp_server("far", url="http://127.0.0.1:1", headers=lambda: given)).register(McpServers)
    async with container:
        with pytest.raises((TypeError, ValueError)) as raised:
            await container.get(McpServers).server("far").tools()

    assert message in str(raised.value)
    assert "the headers of MCP server 'far'" in str(raised.value)
    assert "4711" not in str(raised.value)


def test_headers_of_a_process_and_headers_of_another_kind_are_errors() -> None:
    with pytest.raises(ValueError, match="no effect on a process"):
        mcp_server("far", command="x", headers=OnBehalf)
    with pytest.raises(ValueError, match="use a mapping, a function or a bean class"):
        mcp_server("far", url="http://x", headers=7)  # type: ignore[arg-type]  # on purpose


async def test_the_number_of_sessions_with_different_headers_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_GROUPS", 2)
    async with far() as (url, recorder):
        container = using(mcp_server("far", url=url, headers=OnBehalf)).register(McpServers)
        async with container:
            server = container.get(McpServers).server("far")
            for user in ("ann", "bob", "cid", "ann"):
                async with container.request_scope({User: User(user)}):
                    await server.call("mine", {})
            assert len(server._groups) == 2

    assert [str(each).removeprefix("Bearer ") for each in recorder.of("server/discover")] == [
        "ann",
        "bob",
        "cid",
        "ann",
    ]


async def test_a_session_that_a_call_still_waits_for_is_not_closed_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_GROUPS", 1)
    began, go = asyncio.Event(), asyncio.Event()
    app = FastAPI()

    @app.post("/mcp")
    async def mcp(request: Request) -> Response:
        message = await request.json()
        if request.headers["authorization"] == "Bearer ann":
            began.set()
            await go.wait()
        return answered(message, {"tools": []}) if message.get("method") == "tools/list" else handshake(message)

    async with serving(app) as base:
        container = using(mcp_server("far", url=f"{base}/mcp", headers=OnBehalf)).register(McpServers)
        async with container:
            server = container.get(McpServers).server("far")
            async with container.request_scope({User: User("ann")}):
                waiting = asyncio.create_task(server.takes_input())
                await began.wait()
            async with container.request_scope({User: User("bob")}):
                assert await server.tools() == ()
            go.set()
            assert await waiting is False


async def test_readiness_does_not_ask_servers_whose_headers_depend_on_the_caller() -> None:
    container = using(mcp_server("far", url="http://127.0.0.1:1", headers=OnBehalf)).register(McpServers)
    async with container:
        servers = container.get(McpServers)
        servers.server("far")
        assert await servers.ready()


async def test_secrets_of_a_caller_are_hidden_in_errors() -> None:
    app = FastAPI()

    @app.post("/mcp")
    async def mcp(request: Request) -> dict[str, Any]:
        message = await request.json()
        error = {"code": -32000, "message": f"no access for {request.headers['authorization']}"}
        return {"jsonrpc": "2.0", "id": message.get("id"), "error": error}

    async with serving(app) as base:
        container = using(mcp_server("far", url=f"{base}/mcp", headers=OnBehalf)).register(McpServers)
        async with container, container.request_scope({User: User("sk-live-4711")}):
            with pytest.raises(McpError) as raised:
                await container.get(McpServers).server("far").tools()

    assert "4711" not in str(raised.value)


# --- deprecated features


async def test_nothing_deprecated_is_requested_or_offered() -> None:
    class Listening(McpListener):
        def on_mcp_event(self, event: McpEvent) -> None: ...

    async with far() as (url, recorder):
        container = using(mcp_server("far", url=url)).register(McpServers).register_instance(Listening())
        async with container:
            server = container.get(McpServers).server("far")
            await server.tools()
            await server.call("mine", {})

    bodies = [body for _, body in recorder.seen]
    allowed = {"server/discover", "tools/list", "tools/call", "subscriptions/listen"}
    assert {each.get("method") for each in bodies} <= allowed
    text = json.dumps(bodies)
    assert "clientCapabilities" in text
    for word in ("sampling", "roots", "logLevel", "logging"):
        assert word not in text


# --- changed tools


def library(**options: Any) -> McpServer:
    command, *arguments = stdio_command(LIBRARY)
    return mcp_server("far", command=command, args=arguments, **{"connect_timeout": 110, **options})


class Heard(McpListener):
    def __init__(self) -> None:
        self.events: list[McpEvent] = []

    def on_mcp_event(self, event: McpEvent) -> None:
        self.events.append(event)


async def renovated(server: Any) -> dict[str, Any]:
    """Let the server change its tools; return them once the change has arrived."""
    before = await server.tools()
    await server.call("renovate", {})
    async with asyncio.timeout(60):
        while (after := await server.tools()) is before:
            await server.call("add", {"title": "x"})  # the notification can arrive after the reply
    return {each.name: each for each in after}


async def test_changed_tools_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    heard = Heard()
    container = using(library()).register(McpServers).register_instance(heard)
    async with container:
        server = container.get(McpServers).server("far")
        with caplog.at_level(logging.WARNING, "toolbox.mcp"):
            tools = await renovated(server)
            await server.tools()

    assert tools.keys() >= {"find", "burn", "new"}
    assert McpToolChanged("far", "find", ("description",), False) in heard.events
    assert McpToolChanged("far", "burn", ("annotations",), False) in heard.events
    assert len([each for each in heard.events if isinstance(each, McpToolChanged)]) == 2
    assert "the description of tool 'find' changed after it was first listed" in caplog.text
    assert "passwords" not in caplog.text


async def test_pinned_tools_are_refused_when_they_change(caplog: pytest.LogCaptureFixture) -> None:
    heard = Heard()
    container = using(library(pin_tools=True)).register(McpServers).register_instance(heard)
    async with container:
        server = container.get(McpServers).server("far")
        with caplog.at_level(logging.WARNING, "toolbox.mcp"):
            tools = await renovated(server)
        with pytest.raises(McpError, match="has changed since it was first listed"):
            await server.call("find", {"title": "x"})

    assert "find" not in tools
    assert "burn" not in tools
    assert tools.keys() >= {"add", "new"}
    assert McpToolChanged("far", "find", ("description",), True) in heard.events
    assert "'find' (it has changed since it was first listed: description)" in caplog.text


@asynccontextmanager
async def projects() -> AsyncIterator[str]:
    """Serve a tool whose schema has the project of the user; `ann` and `ann 2` have the same one."""
    app = FastAPI()

    @app.post("/mcp")
    async def mcp(request: Request) -> Response:
        message = await request.json()
        user = request.headers["authorization"].split()[1]
        schema = {"type": "object", "properties": {"project": {"enum": [f"{user}-1"]}}}
        if message.get("method") == "tools/list":
            return answered(message, {"tools": [{"name": "find", "inputSchema": schema}]})
        if message.get("method") == "tools/call":
            return answered(message, {"content": [{"type": "text", "text": f"for {user}"}]})
        return handshake(message)

    async with serving(app) as base:
        yield f"{base}/mcp"


async def test_a_tool_that_another_user_sees_differently_stays_callable() -> None:
    async with projects() as url:
        container = using(mcp_server("far", url=url, headers=OnBehalf, pin_tools=True)).register(McpServers)
        async with container:
            server = container.get(McpServers).server("far")
            async with container.request_scope({User: User("ann")}):
                assert [each.name for each in await server.tools()] == ["find"]
            async with container.request_scope({User: User("bob")}):
                assert await server.tools() == ()
                with pytest.raises(McpError, match="refused tool find: it has changed"):
                    await server.call("find", {})
            async with container.request_scope({User: User("ann")}):
                found = await server.call("find", {})

    assert found.content[0].text == "for ann"  # type: ignore[union-attr]  # a text


async def test_a_changed_tool_is_also_refused_with_a_token_that_has_listed_no_tools() -> None:
    async with projects() as url:
        container = using(mcp_server("far", url=url, headers=OnBehalf, pin_tools=True)).register(McpServers)
        async with container:
            server = container.get(McpServers).server("far")
            async with container.request_scope({User: User("ann")}):
                await server.tools()
            async with container.request_scope({User: User("ann 2")}):
                await server.call("find", {})
            async with container.request_scope({User: User("bob")}):
                with pytest.raises(McpError, match="refused tool find: it has changed"):
                    await server.call("find", {})


# --- approval


@pytest.mark.parametrize(
    ("approval", "needed"),
    [
        (None, set()),
        ("destructive", {"burn"}),
        ("all", {"find", "burn", "add", "renovate"}),
    ],
)
async def test_approval_follows_the_annotations_of_the_tools(approval: Any, needed: set[str]) -> None:
    container = using(library(approval=approval))
    async with container:
        plan = await offered_by(container)

    assert {each.specification.name for each in plan if each.requires_approval} == needed


async def offered_by(container: Container) -> Any:
    """Return the tools that the provider of `Assistant.chat` offers."""
    from toolbox import ToolProviderRequest
    from toolbox.mcp import mcp_tools

    context: Any = None
    provider = container.get(mcp_tools("far"))
    return (await provider.provide_tools(ToolProviderRequest(UserMessage(""), None, context))).tools


def test_invalid_options_are_errors() -> None:
    with pytest.raises(ValueError, match="approval"):
        library(approval="sometimes")


# --- resources and prompts


async def test_resources_are_offered_as_tools() -> None:
    calls = [
        tool_call("list_resources"),
        tool_call("get_resource", {"uri": "library://rules"}),
        tool_call("get_resource", {"uri": "library://map.pdf"}),
        tool_call("get_resource", {"uri": "library://books/emma"}),
        tool_call("get_resource", {"uri": "library://nothing"}),
        tool_call("get_resource", {"uri": 7}),
    ]
    model = ScriptedChatModel([AiMessage(None, calls), "done"])
    container = Container(
        models={"default": model}, tool_errors=ToolErrors(on_tool_arguments_error=return_to_model)
    ).register(Assistant)
    container.register_instance(library(expose_resources=True), name="far")
    async with container:
        result = await container.get(Assistant).chat("What are the rules?")

    listed, rules, plan, book, missing, wrong = result.tool_executions
    assert json.loads(listed.result) == [
        {"uri": "library://rules", "name": "rules", "description": "What is allowed", "mimeType": "text/plain"},
        {"uri": "library://map.pdf", "name": "floor_map", "mimeType": "application/pdf"},
        {"uriTemplate": "library://books/{title}", "name": "book", "description": "One book", "mimeType": "text/plain"},
    ]
    assert rules.result == "Be quiet."
    assert book.result == "the text of emma"
    assert model.requests[1].messages[4].contents == (PdfContent(data=b"%PDF", name=None),)  # type: ignore[union-attr]  # a result
    assert plan.result == ""
    assert missing.is_error
    assert wrong.is_error
    assert "uri: this argument must be a string" in wrong.result
    specifications = {each.name: each for each in model.requests[0].tool_specifications}
    assert list(specifications["get_resource"].parameters["properties"]) == ["uri"]


async def test_resources_of_several_servers_are_named_and_failing_servers_are_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @register_ai_service
    class Reader(Protocol):
        @mcp_toolbox("far", "dead", "silent")
        async def chat(self, question: str) -> Result[str]: ...

    calls = [
        tool_call("list_resources"),
        tool_call("get_resource", {"server": "far", "uri": "library://rules"}),
        tool_call("get_resource", {"server": "silent", "uri": "library://rules"}),
    ]
    model = ScriptedChatModel([AiMessage(None, calls), "done"])
    container = Container(
        models={"default": model}, tool_errors=ToolErrors(on_tool_arguments_error=return_to_model)
    ).register(Reader)
    container.register_instance(library(expose_resources=True), name="far")
    container.register_instance(mcp_server("dead", command="no-such-command", expose_resources=True), name="dead")
    container.register_instance(mcp_server("silent", command="no-such-command"), name="silent")
    async with container:
        result = await container.get(Reader).chat("What are the rules?")

    listed, rules, hidden = result.tool_executions
    assert {each["server"] for each in json.loads(listed.result)} == {"far"}
    assert rules.result == "Be quiet."
    assert "use one of: far, dead" in hidden.result
    assert "its resources are not listed" in caplog.text


async def test_prompts_become_messages() -> None:
    container = using(library()).register(McpServers)
    async with container:
        server = container.get(McpServers).server("far")
        assert await server.prompt_messages("lend", {"title": "Emma"}) == (UserMessage("Lend me Emma."),)


async def test_wrong_servers_of_a_service_are_still_problems_at_start() -> None:
    container = Container(models={"default": ScriptedChatModel([])}).register(Assistant)
    with pytest.raises(IllegalConfigurationError, match="unknown server"):
        async with container:
            pass
