"""Tools of MCP servers in services: real servers over stdio, our own and those of other authors."""

import asyncio
import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import pytest
from mcp_types import TextContent

from tests.conftest import Clock
from tests.listening import Events
from tests.mcp.warm_servers import stdio_command
from toolbox import (
    AiMessage,
    Container,
    IllegalConfigurationError,
    ImageContent,
    Progress,
    Result,
    TokenStream,
    ToolArgumentsError,
    ToolProgress,
    register_ai_service,
    return_to_model,
)
from toolbox.events import ToolProgressEvent
from toolbox.mcp import (
    McpConnectionError,
    McpError,
    McpEvent,
    McpListener,
    McpLog,
    McpProgress,
    McpServers,
    McpTimeoutError,
    mcp_server,
    mcp_toolbox,
    mcp_tools,
)
from toolbox.mcp.connection import McpConnection
from toolbox.parameters import current_progress
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]  # starts processes
COUNTER = Path(__file__).parent / "counting_server.py"
TELLING = Path(__file__).parent / "telling_server.py"
LEVELS = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")


def counter(name: str = "counter", **options: Any) -> Any:
    command, *arguments = stdio_command(COUNTER)
    return mcp_server(name, command=command, args=arguments, env=environment(), **{"connect_timeout": 110, **options})


async def first_text(server: McpConnection, tool: str, arguments: dict[str, Any]) -> str:
    """Call a tool and return the first text of its result."""
    content = (await server.call(tool, arguments)).content[0]
    assert isinstance(content, TextContent)
    return content.text


def telling() -> Any:
    command, *arguments = stdio_command(TELLING)
    return mcp_server("counter", command=command, args=arguments, connect_timeout=110)


def environment() -> dict[str, str]:
    return {"PYTHONPATH": str(Path(__file__).parent.parent.parent)}


@register_ai_service(on_tool_arguments_error=return_to_model)
class Assistant(Protocol):
    @mcp_toolbox("counter")
    async def chat(self, question: str) -> Result[str]: ...

    async def plain(self, question: str) -> str: ...


def container(*replies: Any, server: Any = None, cls: Any = Assistant) -> tuple[Container, ScriptedChatModel]:
    model = ScriptedChatModel(replies)
    made = Container(models={"default": model}).register(cls)
    made.register_instance(server or counter(), name="counter")
    return made, model


async def test_mcp_toolbox_offers_and_runs_the_tools_of_a_server() -> None:
    asks = AiMessage(None, [tool_call("add", {"a": 2}, id="1"), tool_call("visit_number", id="2")])
    made, model = container(asks, "three", "none")
    async with made:
        service = made.get(Assistant)
        result = await service.chat("q")
        assert await service.plain("q") == "none"

    names = [each.name for each in model.requests[0].tool_specifications]
    assert names == ["add", "visit_number", "fail", "die", "wait"]
    assert model.requests[0].tool_specifications[0].description == "Adds two numbers"
    assert [each.result for each in result.tool_executions] == ["3", '{"number":2}']
    assert model.requests[2].tool_specifications == ()


async def test_each_call_of_a_served_tool_has_a_separate_request_scope() -> None:
    made, _ = container()
    async with made:
        server = made.get(McpServers).server("counter")
        texts = [await first_text(server, "visit_number", {}) for _ in range(3)]

    assert texts == ['{"number":1}', '{"number":2}', '{"number":3}']


async def test_failing_tools_and_invalid_arguments_are_reported_to_the_model() -> None:
    failing = AiMessage(None, [tool_call("fail", id="1")])
    made, model = container(failing, "sorry")
    async with made:
        assert (await made.get(Assistant).chat("q")).content == "sorry"
    last = model.requests[1].messages[-1]
    assert last.text == "The tool 'fail' failed."  # the server hides the exception

    made, model = container(AiMessage(None, [tool_call("add", "not json", id="1")]), "sorry")
    async with made:
        result = await made.get(Assistant).chat("q")
    assert result.tool_executions[0].is_error
    assert issubclass(ToolArgumentsError, Exception)


async def test_a_doubled_name_in_the_arguments_does_not_reach_the_server() -> None:
    made, _ = container(tool_call("add", '{"a": 1, "a": 2}'), "sorry")
    async with made:
        [execution] = (await made.get(Assistant).chat("q")).tool_executions

    assert execution.is_error
    assert "a: this name occurs twice in one JSON object" in execution.result


async def test_tools_can_be_filtered_and_renamed() -> None:
    server = counter(include=["add", "visit_*"], exclude=["visit_number"], prefix="count_")
    made, model = container(AiMessage(None, [tool_call("count_add", {"a": 1})]), "2", server=server)
    async with made:
        result = await made.get(Assistant).chat("q")

    assert [each.name for each in model.requests[0].tool_specifications] == ["count_add"]
    assert result.tool_executions[0].result == "2"


async def test_invalid_characters_in_tool_names_are_replaced() -> None:
    made, model = container(AiMessage(None, [tool_call("notes_list")]), "none", server=telling())
    async with made:
        result = await made.get(Assistant).chat("q")

    assert [each.name for each in model.requests[0].tool_specifications] == ["work", "notes_list"]
    assert result.tool_executions[0].result == "no notes"


async def test_a_dead_server_fails_the_call_and_is_restarted_by_the_next() -> None:
    made, _ = container()
    async with made:
        server = made.get(McpServers).server("counter")
        assert await first_text(server, "add", {"a": 1}) == "2"
        with pytest.raises(McpConnectionError, match="counter"):
            await server.call("die", {})
        assert await first_text(server, "add", {"a": 2}) == "3"


async def test_an_unreachable_server_is_logged_and_the_call_continues_without_its_tools(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made, model = container("without", server=mcp_server("counter", command="no-such-command"))
    with caplog.at_level(logging.WARNING, "toolbox.mcp"):
        async with made:
            assert (await made.get(Assistant).chat("q")).content == "without"

    assert model.requests[0].tool_specifications == ()
    assert "no-such-command" in caplog.text


@register_ai_service(tool_provider=mcp_tools("nowhere"))
class Wrong(Protocol):
    async def chat(self, question: str) -> str: ...


def test_unknown_servers_are_reported_at_startup() -> None:
    made, _ = container(cls=Wrong)

    [problem] = made.check()
    assert "nowhere" in problem.where
    assert "TOOLBOX_MCP__NOWHERE__COMMAND" in problem.fix


def test_servers_can_be_configured_in_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLBOX_MCP__NOWHERE__COMMAND", "somewhere")
    made, _ = container(cls=Wrong)

    assert made.check() == []


def test_a_server_needs_either_a_command_or_a_url() -> None:
    with pytest.raises(ValueError, match="either"):
        mcp_server("x")
    with pytest.raises(IllegalConfigurationError):
        Container(models={}).register(Wrong).__enter__()


# --- servers of other authors


def script(servers: Path, name: str, *arguments: str) -> list[str]:
    return [str(servers / f"server-{name}" / "dist" / "index.js"), *arguments]


class Heard(McpListener):
    def __init__(self) -> None:
        self.events: list[McpEvent] = []
        self.logged = asyncio.Event()

    def on_mcp_event(self, event: McpEvent) -> None:
        self.events.append(event)
        if isinstance(event, McpLog):
            self.logged.set()
        raise ValueError("a failing listener does not affect the server")


async def test_server_everything_works(node_servers: Path) -> None:
    args = script(node_servers, "everything", "stdio")
    everything = mcp_server("counter", command="node", args=args, connect_timeout=110)
    heard = Heard()
    made, model = container(AiMessage(None, [tool_call("echo", {"message": "hällo"})]), "ok", server=everything)
    made.register_instance(heard)
    async with made:
        result = await made.get(Assistant).chat("q")
        server = made.get(McpServers).server("counter")
        names = [each.name for each in await server.tools()]
        assert "echo" in names
        long = next(name for name in names if "long" in name)
        await server.call(long, {"duration": 0.2, "steps": 2})
        resources = await server.resources()
        assert (await server.read_resource(str(resources[0].uri))).contents
        assert "args-prompt" in [each.name for each in await server.prompts()]
        prompt = await server.prompt("args-prompt", {"city": "Bern"})
        structured = await server.call("get-structured-content", {"location": "Chicago"})
        await server.call("toggle-simulated-logging", {})
        async with asyncio.timeout(60):
            await heard.logged.wait()

    assert "hällo" in result.tool_executions[0].result
    assert "Bern" in str(prompt.messages)
    assert structured.structured_content
    progress = [each for each in heard.events if isinstance(each, McpProgress)]
    assert [(each.server, each.tool, each.progress, each.total) for each in progress] == [
        ("counter", long, 1, 2),
        ("counter", long, 2, 2),
    ]
    log = next(each for each in heard.events if isinstance(each, McpLog))
    assert (log.server, log.level in LEVELS) == ("counter", True)
    assert "message" in log.data
    assert {each.name for each in model.requests[0].tool_specifications} >= {"echo"}


async def test_listeners_receive_events_of_servers_with_the_newer_protocol() -> None:
    made, _ = container(server=telling())
    heard = Heard()
    made.register_instance(heard)
    async with made:
        assert await first_text(made.get(McpServers).server("counter"), "work", {}) == "done"

    assert heard.events == [  # and no log messages, which are deprecated: the server was not asked for them
        McpProgress("counter", "work", 1, 2, "half"),
        McpProgress("counter", "work", 2, 2),
    ]


@register_ai_service
class Reporter(Protocol):
    @mcp_toolbox("counter")
    def stream(self, question: str) -> TokenStream: ...


async def test_progress_of_servers_reaches_streams_and_listeners_of_tools() -> None:
    made, _ = container(
        AiMessage(None, [tool_call("work", id="1")]),
        "done",
        server=telling(),
        cls=Reporter,
    )
    heard = Events()
    made.register_instance(heard)
    async with made:
        events = [event async for event in made.get(Reporter).stream("q")]

    expected = [(1, 2, "half"), (2, 2, None)]
    progress = [each for each in events if isinstance(each, ToolProgress)]
    assert [(each.done, each.total, each.message) for each in progress] == expected
    assert {each.request.name for each in progress} == {"work"}
    assert [(each.done, each.total, each.message) for each in heard.of(ToolProgressEvent)] == expected


async def test_invalid_progress_of_servers_is_ignored_and_long_texts_are_cut() -> None:
    heard: list[tuple[float, float | None, str | None]] = []
    connection = McpConnection("counter", mcp_server("counter", url="http://127.0.0.1:1").settings, lambda _: None)
    sent = [(math.nan, None, None), (1, math.inf, None), (1, None, "x" * 5000)]

    async def request(what: str, call: Any, group: Any) -> Any:
        class Session:
            async def call_tool(self, *_: Any, progress_callback: Any, **__: Any) -> str:
                for each in sent:
                    await progress_callback(*each)
                return "done"

        return await call(SimpleNamespace(session=Session()))

    connection._send_request = request  # type: ignore[method-assign]  # without a server
    token = current_progress.set(Progress(lambda *report: heard.append(report)))
    try:
        await connection.call("work", {})
    finally:
        current_progress.reset(token)

    assert heard == [(1, None, "x" * 1000)]


async def test_images_of_a_result_reach_the_model(node_servers: Path) -> None:
    everything = mcp_server("counter", command="node", args=script(node_servers, "everything", "stdio"))
    made, model = container(
        lambda request: AiMessage(
            None,
            [tool_call(next(each.name for each in request.tool_specifications if "image" in each.name.lower()), {})],
        ),
        "seen",
        server=everything,
    )
    async with made:
        await made.get(Assistant).chat("q")

    message = model.requests[1].messages[-1]
    assert any(isinstance(each, ImageContent) for each in message.contents)  # type: ignore[union-attr]  # a result


async def test_server_filesystem_works(node_servers: Path, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("remember the milk")
    files = mcp_server("counter", command="node", args=script(node_servers, "filesystem", str(tmp_path)))
    path = str(tmp_path / "note.txt")
    made, _ = container(AiMessage(None, [tool_call("read_text_file", {"path": path})]), "ok", server=files)
    async with made:
        result = await made.get(Assistant).chat("q")

    assert "milk" in result.tool_executions[0].result


async def test_server_time_works(time_server: tuple[str, ...]) -> None:
    clocks = mcp_server("counter", command=time_server[0], args=time_server[1:])
    asks = AiMessage(None, [tool_call("get_current_time", {"timezone": "Europe/Zurich"})])
    made, _ = container(asks, "ok", server=clocks)
    async with made:
        result = await made.get(Assistant).chat("q")

    assert "Europe/Zurich" in result.tool_executions[0].result


async def test_a_timeout_does_not_break_the_connection(clock: Clock) -> None:
    made, _ = container(server=counter(timeout=100))
    async with made:
        server = made.get(McpServers).server("counter")
        await server.tools()
        waiting = asyncio.create_task(server.call("wait", {}))
        await asyncio.sleep(0)
        await server.call("add", {"a": 0})  # the server has also read the other call
        clock.advance(101)
        with pytest.raises(McpTimeoutError, match="100 s") as caught:
            await waiting
        assert await first_text(server, "add", {"a": 1}) == "2"

    assert isinstance(caught.value, (TimeoutError, McpError))
