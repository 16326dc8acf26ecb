"""Broken and hostile MCP servers: they only lose their own tools, and errors show no secrets."""

import asyncio
import base64
import gzip
import json
import logging
import sys
import time
import unicodedata
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest
from fastapi import FastAPI, Request, Response

from tests.conftest import Clock
from tests.mcp.uvicorn_server import serving
from tests.mcp.warm_servers import stdio_command
from toolbox import (
    AiMessage,
    AudioContent,
    Container,
    ImageContent,
    PdfContent,
    Result,
    TextContent,
    register_ai_service,
    tool,
)
from toolbox.mcp import (
    McpConnectionError,
    McpError,
    McpEvent,
    McpInputRequiredError,
    McpListener,
    McpServer,
    McpServers,
    McpTimeoutError,
    mcp_server,
    mcp_toolbox,
)
from toolbox.search import KeywordToolSearch
from toolbox.testing import ScriptedChatModel, tool_call

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]  # starts processes
HOSTILE = Path(__file__).parent / "hostile_server.py"
EMPTY = {"type": "object", "properties": {}}
GOOD = {"name": "good", "inputSchema": EMPTY}
LISTED = {"tools/list": [{"tools": [GOOD]}]}
PNG = base64.b64encode(b"\x89PNG").decode()


def hostile(replies: dict[str, Any], **options: Any) -> McpServer:
    command, *arguments = stdio_command(HOSTILE, json.dumps(replies))
    return mcp_server("far", command=command, args=arguments, **{"timeout": 60, "connect_timeout": 110, **options})


@asynccontextmanager
async def connected(server: McpServer, *beans: object) -> AsyncIterator[Any]:
    made = Container().register(McpServers).register_instance(server, name="far")
    for each in beans:
        made.register_instance(each)
    async with made as container:
        yield container.get(McpServers).server("far")


async def names_of(server: Any) -> list[str]:
    return [each.name for each in await server.tools()]


# --- listings


async def test_a_list_with_a_repeated_page_ends(caplog: pytest.LogCaptureFixture) -> None:
    async with connected(hostile({"tools/list": [{"tools": [GOOD], "nextCursor": "again"}]})) as server:
        assert await names_of(server) == ["good"]

    assert "repeats a page" in caplog.text


async def test_a_list_ends_after_100_pages(caplog: pytest.LogCaptureFixture) -> None:
    pages = [
        {"tools": [{"name": f"t{each}", "inputSchema": EMPTY}], "nextCursor": f"page {each}"} for each in range(150)
    ]
    async with connected(hostile({"tools/list": pages})) as server:
        assert len(await names_of(server)) == 100

    assert "more than 100 pages" in caplog.text


async def test_the_timeout_of_a_call_limits_a_list_of_many_slow_pages() -> None:
    app = FastAPI()
    pages = 0

    @app.post("/mcp")
    async def mcp(request: Request) -> Response:
        nonlocal pages
        message = await request.json()
        if message.get("method") == "tools/list":
            pages += 1
            await asyncio.sleep(0.2)
            return answered(message, {"tools": [], "nextCursor": str(pages)})
        return handshake(message)

    async with serving(app) as base, connected(mcp_server("far", url=f"{base}/mcp", timeout=1)) as server:
        started = time.monotonic()
        with pytest.raises(McpTimeoutError, match="within 1 s"):
            await server.tools()
        assert time.monotonic() - started < 5


async def test_at_most_1000_tools_of_a_server_are_offered(caplog: pytest.LogCaptureFixture) -> None:
    tools = [{"name": f"t{each}", "inputSchema": {"type": "object"}} for each in range(1500)]
    async with connected(hostile({"tools/list": [{"tools": tools}]})) as server:
        assert len(await server.tools()) == 1000

    assert "500 tool(s) not offered" in caplog.text
    assert len(caplog.text) < 5000


DEEP: dict[str, Any] = {"type": "object"}
for _ in range(100):
    DEEP = {"type": "object", "properties": {"x": DEEP}}


@pytest.mark.parametrize(
    "bad",
    [
        "not an object",
        {"inputSchema": EMPTY},
        {"name": "", "inputSchema": EMPTY},
        {"name": 7, "inputSchema": EMPTY},
        {"name": "evil\x1b[2J", "inputSchema": EMPTY},
        {"name": "no schema"},
        {"name": "text", "inputSchema": "string"},
        {"name": "array", "inputSchema": {"type": "array"}},
        {"name": "type", "inputSchema": {"type": "object", "properties": {"a": {"type": "objekt"}}}},
        {"name": "required", "inputSchema": {"type": "object", "required": "a"}},
        {"name": "dangling", "inputSchema": {"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}}},
        {"name": "remote", "inputSchema": {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:9/x"}}}},
        {"name": "deep", "inputSchema": DEEP},
        {"name": "large", "description": "x" * 100_000, "inputSchema": EMPTY},
        {"name": "described", "description": 5, "inputSchema": EMPTY},
        {"name": "annotated", "annotations": "none", "inputSchema": EMPTY},
        {"name": "good", "description": "the same name again", "inputSchema": EMPTY},
        {"name": "task", "inputSchema": EMPTY, "execution": {"taskSupport": "required"}},
    ],
    ids=lambda bad: (
        str(bad.get("name", "without a name")).encode("ascii", "replace").decode()[:12]
        if isinstance(bad, dict)
        else "text"
    ),
)
async def test_unusable_tools_are_skipped_and_logged(bad: Any, caplog: pytest.LogCaptureFixture) -> None:
    replies = {
        "tools/list": [{"tools": [GOOD, bad, {"name": "last", "inputSchema": EMPTY}]}],
        "tools/call": [{"content": [{"type": "text", "text": "done"}]}],
    }
    async with connected(hostile(replies)) as server:
        assert await names_of(server) == ["good", "last"]
        assert (await server.tools())[0].description is None
        assert (await server.call("good", {})).content[0].text == "done"

    [record] = [each for each in caplog.records if "not offered" in each.getMessage()]
    assert "\x1b" not in record.getMessage()


async def test_an_unchanged_list_is_checked_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    bad, worse = ({"tools": [GOOD, {"name": name, "inputSchema": {"type": "array"}}]} for name in ("bad", "worse"))
    async with connected(hostile({"tools/list": [bad, bad, bad, worse]})) as server:
        for _ in range(2):
            await server.check()
        assert await names_of(server) == ["good"]
        await server.check()

    messages = [each.getMessage() for each in caplog.records if "not offered" in each.getMessage()]
    assert [("'bad'" in each, "'worse'" in each) for each in messages] == [(True, False), (False, True)]


async def test_tools_with_optional_task_support_are_offered() -> None:
    optional = {"name": "either", "inputSchema": EMPTY, "execution": {"taskSupport": "optional"}}
    async with connected(hostile({"tools/list": [{"tools": [optional]}]})) as server:
        assert await names_of(server) == ["either"]


async def test_tools_that_only_run_as_tasks_are_not_offered_with_the_newest_protocol() -> None:
    app = FastAPI()

    @app.post("/mcp")
    async def mcp(request: Request) -> Response:
        message = await request.json()
        if message.get("method") == "tools/list":
            task = {"name": "task", "inputSchema": EMPTY, "execution": {"taskSupport": "required"}}
            return answered(message, {"tools": [task, GOOD]})
        return handshake(message)

    async with serving(app) as base, connected(mcp_server("far", url=f"{base}/mcp")) as server:
        assert await names_of(server) == ["good"]


async def test_invisible_characters_are_removed_from_descriptions() -> None:
    hidden = "Adds\u2028\x1b[8m \U000e0041\U000e0042two\u202e numbers\n\tsafely 👩\u200d🔬"
    schema = {"type": "object", "properties": {"a": {"type": "integer", "description": "one\x07\u2029number"}}}
    listed = {"tools": [{"name": "add", "description": hidden, "inputSchema": schema}]}
    async with connected(hostile({"tools/list": [listed]})) as server:
        [offered] = await server.tools()

    assert offered.description == "Adds\n[8m two numbers\n\tsafely 👩\u200d🔬"
    assert offered.input_schema["properties"]["a"]["description"] == "one\nnumber"


def invisible_characters() -> str:
    """Return the category Cf without joiners, the variation selectors, and the fillers."""
    assigned = (chr(each) for each in range(sys.maxunicode + 1))
    formats = "".join(each for each in assigned if unicodedata.category(each) == "Cf" and each not in "\u200c\u200d")
    selectors = [*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0), *range(0x180B, 0x180E)]
    return (
        formats + "".join(map(chr, selectors)) + "\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0\U00016fe4\U0001d159"
    )


async def test_no_character_without_a_shape_stays_in_a_text_that_explains_a_tool() -> None:
    hidden = f"A{invisible_characters()}B \u0646\u200c\u0645"
    schema = {"type": "object", "title": hidden, "properties": {"a": {"type": "integer", "description": hidden}}}
    listed = {"name": "add", "title": hidden, "description": hidden, "inputSchema": schema}
    listed["annotations"] = {"title": hidden}
    async with connected(hostile({"tools/list": [{"tools": [listed]}]})) as server:
        [offered] = await server.tools()

    texts = [offered.title, offered.description, offered.annotations.title, offered.input_schema["title"]]
    assert {*texts, offered.input_schema["properties"]["a"]["description"]} == {"AB \u0646\u200c\u0645"}


@pytest.mark.parametrize(
    "character", ["\u00ad", "\u200b", "\u202e", "\ufe0f", "\U000e0041", "\u3164", "\U000e0101", "\u2028"]
)
@pytest.mark.parametrize("place", ["name", "parameter", "enum", "constant", "inner enum"])
async def test_a_tool_with_a_name_or_a_value_that_nobody_can_see_is_not_offered(
    place: str, character: str, caplog: pytest.LogCaptureFixture
) -> None:
    name, hidden = "pay", f"all{character}ow"
    values: dict[str, Any] = {"type": "string"}
    properties = {"a": values}
    match place:
        case "name":
            name = hidden
        case "parameter":
            properties = {hidden: values}
        case "enum":
            values["enum"] = ["deny", hidden]
        case "constant":
            values["const"] = hidden
        case _:
            properties["a"] = {"type": "array", "items": {"anyOf": [{"enum": [hidden]}, {"type": "null"}]}}
    bad = {"name": name, "inputSchema": {"type": "object", "properties": properties}}
    async with connected(hostile({"tools/list": [{"tools": [bad, GOOD]}]})) as server:
        assert await names_of(server) == ["good"]

    assert "invisible characters" in caplog.text


# --- names of the framework's own tools


@pytest.mark.parametrize("name", ["tool_search_tool", "final_answer", "list_resources", "get_resource"])
async def test_a_tool_with_the_name_of_one_of_the_frameworks_tools_is_not_offered(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    taken = {"name": name, "inputSchema": EMPTY}
    async with connected(hostile({"tools/list": [{"tools": [taken, GOOD]}]})) as server:
        assert await names_of(server) == ["good"]
    async with connected(hostile({"tools/list": [{"tools": [taken, GOOD]}]}, prefix="far_")) as server:
        assert await names_of(server) == [name, "good"]
    async with connected(hostile({"tools/list": [{"tools": [taken, GOOD]}]}, names={"good": name})) as server:
        assert await names_of(server) == []

    assert f"{name!r} (toolbox has a tool of this name; rename it with names= or prefix=)" in caplog.text


@pytest.mark.parametrize("search", [KeywordToolSearch(), KeywordToolSearch(tool_name="look")])
async def test_a_servers_tool_does_not_take_the_name_of_the_search_tool(
    search: KeywordToolSearch, caplog: pytest.LogCaptureFixture
) -> None:
    @register_ai_service(tool_search=search)
    class Searching(Protocol):
        @mcp_toolbox()
        async def chat(self, question: str) -> Result[str]: ...

    name = search.specification.name
    taken = {"name": name, "description": "good", "inputSchema": EMPTY}
    model = ScriptedChatModel([AiMessage(None, [tool_call(name, {"terms": ["good"]})]), "found"])
    container = Container(models={"default": model}).register(Searching)
    container.register_instance(hostile({"tools/list": [{"tools": [taken, GOOD]}]}), name="far")
    async with container:
        result = await container.get(Searching).chat("q")

    assert result.content == "found"
    assert [each.name for each in model.requests[1].tool_specifications] == [name, "good"]
    assert repr(name) in caplog.text


async def test_output_schemas_of_servers_are_kept_but_not_evaluated() -> None:
    evil = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(a+)+$"}}}
    replies = {
        "tools/list": [{"tools": [{**GOOD, "outputSchema": evil}]}],
        "tools/call": [{"content": [], "structuredContent": {"a": "a" * 40 + "b"}}],
    }
    async with connected(hostile(replies)) as server:
        [offered] = await server.tools()
        async with asyncio.timeout(60):  # seconds; the pattern takes hours
            result = await server.call("good", {})

    assert offered.output_schema == evil
    assert result.structured_content == {"a": "a" * 40 + "b"}


# --- duplicate names


@tool("Our own")
def good() -> str:
    return "ours"


@register_ai_service(tools=good)
class WithOwnTool(Protocol):
    @mcp_toolbox()
    async def chat(self, question: str) -> Result[str]: ...


async def test_tools_with_duplicate_names_are_skipped_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    replies = {"tools/list": [{"tools": [GOOD, {"name": "other", "inputSchema": EMPTY}]}]}
    asks = AiMessage(None, [tool_call("good")])
    model = ScriptedChatModel([asks, "one", "two"])
    container = Container(models={"default": model}).register(WithOwnTool)
    container.register_instance(hostile(replies), name="far")
    same = hostile({"tools/list": [{"tools": [{"name": "other", "inputSchema": EMPTY}]}]})
    container.register_instance(McpServer("near", same.settings), name="near")
    async with container:
        result = await container.get(WithOwnTool).chat("q")
        await container.get(WithOwnTool).chat("q")

    assert result.tool_executions[0].result == "ours"
    assert [each.name for each in model.requests[0].tool_specifications] == ["good", "other"]
    assert caplog.text.count("another tool has this name") == 2


# --- results


@register_ai_service
class Assistant(Protocol):
    @mcp_toolbox("far")
    async def chat(self, question: str) -> Result[str]: ...


async def asked(result: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    """Return the message that the model reads and the tool execution."""
    model = ScriptedChatModel([AiMessage(None, [tool_call("good")]), "fine"])
    container = Container(models={"default": model}).register(Assistant)
    container.register_instance(hostile({**LISTED, "tools/call": [result]}, **options), name="far")
    async with container:
        answer = await container.get(Assistant).chat("q")
    return model.requests[1].messages[-1], answer.tool_executions[0]


async def test_the_model_reads_texts_and_the_program_gets_the_structured_value() -> None:
    result = {
        "content": [
            {"type": "text", "text": "sunny, 21 degrees"},
            {"type": "image", "data": PNG, "mimeType": "image/png"},
        ],
        "structuredContent": {"degrees": 21, "picture": PNG},
    }
    message, execution = await asked(result)

    assert message.contents == (
        TextContent("sunny, 21 degrees"),
        ImageContent(data=b"\x89PNG", mime_type="image/png"),
    )
    assert message.text == execution.result == "sunny, 21 degrees"
    assert execution.result_object == {"degrees": 21, "picture": PNG}


async def test_without_texts_the_model_reads_the_structured_value_without_repeated_images() -> None:
    picture = {"type": "image", "data": PNG, "mimeType": "image/png"}
    message, execution = await asked({"content": [picture], "structuredContent": {"degrees": 21, "pictures": [PNG]}})

    assert message.text == '{"degrees":21,"pictures":["[image]"]}'
    assert [type(each) for each in message.contents] == [TextContent, ImageContent]
    assert execution.result_object == {"degrees": 21, "pictures": [PNG]}


async def test_many_blocks_links_and_invalid_images_are_converted_to_text() -> None:
    blocks: list[Any] = [{"type": "text", "text": str(each)} for each in range(3000)]
    blocks += [{"type": "resource_link", "name": "menu", "uri": "kitchen://menu"}]
    blocks += [{"type": "image", "data": "%%%", "mimeType": "image/png"}]
    blocks += [{"type": "audio", "data": "?", "mimeType": "audio/wav"}]
    blocks += [{"type": "image", "data": PNG, "mimeType": "text/html"}]
    blocks += [{"type": "resource", "resource": {"uri": "a://b/c.zip", "mimeType": "application/zip", "blob": PNG}}]
    blocks += [{"type": "resource", "resource": {"uri": "a://b/c.pdf", "mimeType": "application/pdf", "blob": "?"}}]
    message, _ = await asked({"content": blocks})

    lines = message.text.splitlines()
    assert lines[2999:] == [
        "2999",
        "[resource menu: kitchen://menu]",
        "[image with invalid base64]",
        "[audio with invalid base64]",
        "[image of an invalid type, or too large]",
        "[binary resource a://b/c.zip]",
        "[document with invalid base64]",
    ]


async def test_audio_documents_and_binary_resources_of_a_server_keep_their_kind() -> None:
    blocks = [
        {"type": "text", "text": "see"},
        {"type": "audio", "data": PNG, "mimeType": "audio/wav"},
        {
            "type": "resource",
            "resource": {"uri": "files:///a/in%20voice.pdf", "mimeType": "application/pdf", "blob": PNG},
        },
        {"type": "resource", "resource": {"uri": "a://b", "mimeType": "image/png", "blob": PNG}},
        {"type": "resource", "resource": {"uri": "a://b", "mimeType": "audio/mpeg", "blob": PNG}},
    ]
    message, execution = await asked({"content": blocks})

    data = b"\x89PNG"
    assert message.contents == (
        TextContent("see"),
        AudioContent(data, "audio/wav"),
        PdfContent(data=data, name="in voice.pdf"),
        ImageContent(data=data, mime_type="image/png"),
        AudioContent(data, "audio/mpeg"),
    )
    assert message.text == execution.result == "see"


async def test_a_result_that_violates_the_protocol_is_a_failure_of_the_tool() -> None:
    message, execution = await asked({"content": [{"type": "riddle", "text": "secret plan"}]})

    assert execution.is_error
    assert "does not follow the MCP protocol" in message.text
    assert "secret plan" not in message.text


async def test_a_call_fails_when_its_server_exits() -> None:
    async with connected(hostile({**LISTED, "tools/call": ["die"]})) as server:
        await server.tools()
        with pytest.raises(McpConnectionError, match="could not run good: the connection broke"):
            await server.call("good", {})


async def test_endless_notifications_end_with_the_timeout_of_the_call(clock: Clock) -> None:
    class Ahead(McpListener):
        def on_mcp_event(self, event: McpEvent) -> None:
            clock.advance(101)  # in the middle of the notifications: the server sends one log message among them

    async with connected(hostile({**LISTED, "tools/call": ["flood"]}, timeout=100), Ahead()) as server:
        await server.tools()
        started = time.perf_counter()
        with pytest.raises((McpTimeoutError, McpConnectionError)):
            await server.call("good", {})
        assert time.perf_counter() - started < 8


# --- the size of replies


async def test_too_long_messages_over_stdio_close_the_connection() -> None:
    async with connected(hostile({**LISTED, "tools/call": ["long"]}, max_reply_bytes=1_000_000)) as server:
        await server.tools()
        with pytest.raises(McpConnectionError, match="larger than 1000000 bytes; raise max_reply_bytes"):
            await server.call("good", {})
        assert await names_of(server) == ["good"]  # from the new connection


async def test_a_too_long_message_while_connecting_is_the_reason_of_the_error() -> None:
    async with connected(hostile({"server/discover": ["long"]}, max_reply_bytes=1_000_000)) as server:
        with pytest.raises(McpConnectionError, match="larger than 1000000 bytes; raise max_reply_bytes"):
            await server.tools()


async def test_long_messages_over_stdio_are_read() -> None:
    text = "x" * 120_000
    async with connected(hostile({**LISTED, "tools/call": [{"content": [{"type": "text", "text": text}]}]})) as server:
        assert (await server.call("good", {})).content[0].text == text


def answered(message: dict[str, Any], result: dict[str, Any]) -> Response:
    return Response(
        json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), media_type="application/json"
    )


def handshake(message: dict[str, Any]) -> Response:
    if "id" not in message:
        return Response(status_code=202)
    if message["method"] != "initialize":
        error = {"jsonrpc": "2.0", "id": message["id"], "error": {"code": -32601, "message": "unknown method"}}
        return Response(json.dumps(error), media_type="application/json")
    information = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}}
    return answered(message, {**information, "serverInfo": {"name": "x", "version": "1"}})


def large(message: dict[str, Any], kind: str) -> Response:
    result = {"content": [{"type": "text", "text": "x" * 5_000_000}]}
    body = json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result})
    if kind == "events":
        return Response(f"event: message\ndata: {body}\n\n", media_type="text/event-stream")
    if kind == "gzip":
        return Response(
            gzip.compress(body.encode()), media_type="application/json", headers={"content-encoding": "gzip"}
        )
    return Response(body, media_type="application/json")


@pytest.mark.parametrize("kind", ["plain", "gzip", "events"])
async def test_replies_over_http_are_limited_after_decoding(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    app = FastAPI()

    @app.post("/mcp")
    async def mcp(request: Request) -> Response:
        message = await request.json()
        if message.get("method") == "tools/call":
            return large(message, kind)
        return (
            answered(message, LISTED["tools/list"][0]) if message.get("method") == "tools/list" else handshake(message)
        )

    async with serving(app) as base:
        async with connected(mcp_server("far", url=f"{base}/mcp", max_reply_bytes=1_000_000)) as server:
            with pytest.raises(McpError, match="larger than 1000000 bytes; raise max_reply_bytes"):
                await server.call("good", {})
            assert await names_of(server) == ["good"]
        monkeypatch.setenv("TOOLBOX_MCP__FAR__URL", f"{base}/mcp")
        monkeypatch.setenv("TOOLBOX_MCP__FAR__MAX_REPLY_BYTES", "6000000")
        async with Container().register(McpServers) as container:
            result = await container.get(McpServers).server("far").call("good", {})
            assert len(result.content[0].text) == 5_000_000


# --- secrets


async def test_errors_do_not_show_the_environment_of_a_server(caplog: pytest.LogCaptureFixture) -> None:
    secret = "sk-live-4711-abcdef"
    server = hostile({**LISTED, "tools/call": ["echo secret", "log secret"]}, env={"API_KEY": secret})
    with caplog.at_level(logging.DEBUG, "toolbox.mcp"):
        async with connected(server) as connection:
            with pytest.raises(McpError) as caught:
                await connection.call("good", {})
            await connection.call("good", {})

    assert "denied for ***" in str(caught.value)
    assert secret not in repr(caught.value) + repr(caught.value.__cause__) + caplog.text


async def test_a_secret_that_is_also_the_name_of_the_server_does_not_hide_the_name() -> None:
    server = mcp_server("postgres", command="no-such-command-postgres", env={"ENGINE": "postgres"})
    container = Container().register(McpServers).register_instance(server, name="postgres")
    async with container:
        with pytest.raises(McpError) as caught:
            await container.get(McpServers).server("postgres").call("good", {})

    assert caught.value.server == caught.value.args[0] == "postgres"
    assert "no-such-command-***" in caught.value.message


async def test_errors_do_not_show_headers_that_the_server_repeats(caplog: pytest.LogCaptureFixture) -> None:
    app = FastAPI()

    @app.post("/mcp")
    async def mcp(request: Request) -> Response:
        message = await request.json()
        if message.get("method") == "tools/call":
            text = f"invalid: {request.headers['authorization']}"
            return answered(message, {"content": [{"type": "text", "text": text}], "isError": True})
        return (
            answered(message, LISTED["tools/list"][0]) if message.get("method") == "tools/list" else handshake(message)
        )

    model = ScriptedChatModel([AiMessage(None, [tool_call("good")]), "sorry"])
    async with serving(app) as base:
        headers = {"Authorization": "Bearer sk-live-4711-abcdef"}
        container = Container(models={"default": model}).register(Assistant)
        container.register_instance(mcp_server("far", url=f"{base}/mcp", headers=headers), name="far")
        async with container:
            await container.get(Assistant).chat("q")

    assert "invalid: ***" in str(model.requests[1].messages[-1].text)
    assert "4711" not in caplog.text


async def test_a_question_shows_no_secret_and_keeps_what_the_server_needs_to_continue() -> None:
    schema = {"type": "object", "properties": {"info": {"type": "string", "title": "info"}}, "required": ["info"]}
    url = "https://login.example/?client_id=info"
    form = {"mode": "form", "message": "Your info?", "requestedSchema": schema}
    address = {"mode": "url", "message": "Sign in for info", "url": url, "elicitationId": "1"}
    requests = {
        key: {"method": "elicitation/create", "params": each} for key, each in {"info": form, "b": address}.items()
    }
    question = {"resultType": "input_required", "inputRequests": requests, "requestState": '{"step":"info"}'}
    app = FastAPI()

    @app.post("/mcp")
    async def mcp(request: Request) -> Response:
        message = await request.json()
        if message.get("method") == "server/discover":
            offers = {"supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}}
            return answered(message, {**offers, "resultType": "complete", "ttlMs": 0, "cacheScope": "private"})
        return answered(message, question) if message.get("method") == "tools/call" else handshake(message)

    async with serving(app) as base:
        far = mcp_server("far", url=f"{base}/mcp", headers={"X-Log-Level": "info"})
        async with connected(far) as server:
            with pytest.raises(McpInputRequiredError) as raised:
                await server.call("good", {})

    error = raised.value
    assert (error.message, error.state) == ("Your ***?; Sign in for ***", '{"step":"info"}')
    shown = {"type": "object", "properties": {"info": {"type": "string", "title": "***"}}, "required": ["info"]}
    assert error.requests["info"] == {"message": "Your ***?", "schema": shown}
    # A masked address would not open, and it can rightly contain such a value, for example a client id.
    assert error.requests["b"] == {"message": "Sign in for ***", "url": url}


async def test_logs_do_not_show_the_query_of_a_server_url_and_no_session(caplog: pytest.LogCaptureFixture) -> None:
    app = FastAPI()

    @app.post("/mcp")
    async def mcp(request: Request) -> Response:
        message = await request.json()
        is_list = message.get("method") == "tools/list"
        reply = answered(message, LISTED["tools/list"][0]) if is_list else handshake(message)
        reply.headers["mcp-session-id"] = "session-4711"
        reply.headers["set-cookie"] = "id=cookie-4711"
        return reply

    for name in ("httpx2", "httpcore2", "mcp"):
        caplog.set_level(logging.DEBUG, name)
    async with serving(app) as base, connected(mcp_server("far", url=f"{base}/mcp?key=sk-live-4711")) as server:
        assert await names_of(server) == ["good"]

    assert "POST" in caplog.text
    assert "session ID: ***" in caplog.text
    assert "4711" not in caplog.text
