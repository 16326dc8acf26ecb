"""The arguments that a model writes for a tool of an MCP server: what the server gets, and what it may reject."""

import asyncio
import json
from pathlib import Path
from typing import Any, Protocol

import httpx2
import pytest
from fastapi import FastAPI, Request, Response

from tests import programs
from tests.mcp.test_hostile_servers import LISTED, answered, handshake
from tests.mcp.uvicorn_server import serving
from tests.mcp.warm_servers import stdio_command
from toolbox import Container, OpenAiChatModel, Result, ToolErrors, register_ai_service
from toolbox.mcp import McpConnectionError, McpError, McpServers, mcp_server, mcp_toolbox
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox.tools.failures import fail

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]  # starts processes
ECHOING = Path(__file__).parent / "echoing_server.py"
SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "fixed": {"const": 1},
        "place": {"$ref": "#/$defs/Place"},
        "old": {"allOf": [{"$ref": "#/definitions/Name"}], "default": "x"},
        "either": {"oneOf": [{"type": "string"}, {"type": "integer"}]},
        "twin": {"$ref": "#/properties/text"},
        "nullable": {"type": ["string", "null"]},
        "optional": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "choice": {"enum": ["a", None]},
        "named": {"$ref": "#/$defs/Nullable"},
        "anything": {"description": "of any type"},
        "required": {"type": "string"},
        "endless": {"$ref": "#/properties/endless"},
        "elsewhere": {"$dynamicRef": "http://127.0.0.1:9/schema"},
    },
    "required": ["required"],
    "$defs": {
        "Place": {"type": "object", "properties": {"city": {"type": "string"}}},
        "Nullable": {"type": ["integer", "null"]},
    },
    "definitions": {"Name": {"type": "string"}},
}
LEFT_OUT = ("text", "unit", "fixed", "place", "old", "either", "twin")
KEPT = ("nullable", "optional", "choice", "named", "anything", "required", "endless", "elsewhere", "undeclared")


def echoing(schema: dict[str, Any]) -> Any:
    command, *arguments = stdio_command(ECHOING, json.dumps(schema))
    return mcp_server("far", command=command, args=arguments, connect_timeout=110)


@register_ai_service
class Assistant(Protocol):
    @mcp_toolbox("far")
    async def chat(self, question: str) -> Result[str]: ...


async def asked(arguments: dict[str, Any], schema: dict[str, Any] = SCHEMA) -> Any:
    """Return the execution of one call that a model makes with these arguments."""
    model = ScriptedChatModel([tool_call("echo", arguments), "done"])
    container = Container(models={"default": model}).register(Assistant)
    async with container.register_instance(echoing(schema), name="far"):
        [execution] = (await container.get(Assistant).chat("q")).tool_executions
    return execution


async def test_a_null_that_an_optional_argument_does_not_admit_is_left_out() -> None:
    execution = await asked(dict.fromkeys((*LEFT_OUT, *KEPT)))

    assert json.loads(execution.result) == dict.fromkeys(KEPT)
    assert json.loads(execution.request.arguments) == dict.fromkeys((*LEFT_OUT, *KEPT))  # as the model wrote it


async def test_nested_nulls_and_empty_values_reach_the_server_as_they_are() -> None:
    arguments = {"required": "", "place": {"city": None}, "text": "", "anything": [None, 0, False]}

    assert json.loads((await asked(arguments)).result) == arguments


async def test_a_schema_without_properties_leaves_nothing_out() -> None:
    assert json.loads((await asked({"a": None}, {"type": "object"})).result) == {"a": None}


def every_property_or_null(request: httpx2.Request) -> httpx2.Response:
    """Answer as a model that a strict schema makes write every property."""
    body = json.loads(request.content)
    message: dict[str, Any] = {"content": "done"}
    if body["messages"][-1]["role"] != "tool":
        function = body["tools"][0]["function"]
        assert function["strict"]
        assert function["parameters"]["required"] == ["query", "country", "limit", "note"]
        arguments = json.dumps({"query": "q", "country": None, "limit": None, "note": None})
        call = {"id": "c", "type": "function", "function": {"name": "search", "arguments": arguments}}
        message = {"content": None, "tool_calls": [call]}
    return httpx2.Response(200, json={"choices": [{"message": message, "finish_reason": "stop"}]})


async def test_strict_schemas_do_not_send_null_to_a_server(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(
        "from mcp.server import MCPServer\n"
        "server = MCPServer('s')\n"
        "@server.tool()\n"
        "def search(query: str, country: str = 'any', limit: int = 3, note: str | None = 'none') -> str:\n"
        "    return f'{query} {country} {limit} {note}'\n"
        "server.run()\n"
    )

    @register_ai_service(strict=True)
    class Desk(Protocol):
        @mcp_toolbox("far")
        async def ask(self, text: str) -> Result[str]: ...

    transport = httpx2.MockTransport(every_property_or_null)
    container = Container(models={"default": OpenAiChatModel("m", "http://m.test/v1", "k", transport=transport)})
    command, *arguments = programs.command(str(script))
    server = mcp_server("far", command=command, args=arguments, connect_timeout=110)
    async with container.register(Desk).register_instance(server, name="far"):
        [execution] = (await container.get(Desk).ask("x")).tool_executions

    assert (execution.result, execution.is_error) == ("q any 3 None", False)


# --- calls that a server rejects


@pytest.mark.parametrize("code", [-32602, -32601, -32600, -32603, -32700, -32000, 17])
async def test_the_model_reads_why_a_server_rejects_a_call_and_goes_on(code: int) -> None:
    execution = await asked({"reject": code, "text": "Bern"})

    assert execution.is_error
    assert "no place for Bern" in execution.result


async def test_no_error_handler_ends_a_call_with_invalid_parameters() -> None:
    model = ScriptedChatModel([tool_call("echo", {"reject": -32602, "text": "\u202eBern"}), "done"])
    failures = ToolErrors(on_tool_arguments_error=fail, on_tool_execution_error=fail, on_unknown_tool=fail)
    container = Container(models={"default": model}, tool_errors=failures).register(Assistant)
    async with container.register_instance(echoing(SCHEMA), name="far"):
        result = await container.get(Assistant).chat("q")

    assert result.content == "done"
    [execution] = result.tool_executions
    assert execution.result == "MCP server 'far' rejected the call: no place for Bern"


def rejected(message: dict[str, Any]) -> Response:
    error = {"code": -32602, "message": "invalid"}
    body = json.dumps({"jsonrpc": "2.0", "id": message["id"], "error": error})
    return Response(body, 400, media_type="application/json")


async def test_a_call_that_failed_is_not_repeated_because_the_server_refused_something_before() -> None:
    calls: list[str] = []
    has_no_stream = asyncio.Event()
    app = FastAPI()

    @app.get("/mcp")
    async def open_stream() -> Response:
        has_no_stream.set()
        return Response(status_code=404)

    @app.post("/mcp")
    async def mcp(request: Request) -> Response:
        message = await request.json()
        match message["method"]:
            case "tools/list":
                return answered(message, LISTED["tools/list"][0])
            case "tools/call":
                calls.append(message["params"]["arguments"]["how"])
                return rejected(message) if calls[-1] == "wrong" else Response("the proxy gave up", 504)
            case _:
                answer = handshake(message)
                answer.headers["Mcp-Session-Id"] = "1"
                return answer

    made = Container().register(McpServers)
    async with serving(app) as base, made.register_instance(mcp_server("far", url=f"{base}/mcp"), name="far"):
        server = made.get(McpServers).server("far")
        await server.tools()
        await has_no_stream.wait()
        with pytest.raises(McpConnectionError, match="504"):
            await server.call("good", {"how": "pay"})
        with pytest.raises(McpError, match="invalid"):
            await server.call("good", {"how": "wrong"})
        with pytest.raises(McpConnectionError, match="504"):
            await server.call("good", {"how": "pay again"})

    assert calls == ["pay", "wrong", "pay again"]
