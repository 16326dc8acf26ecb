"""A container's tools as an MCP server, called by the official client: in process, over stdio, over HTTP in FastAPI."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Protocol, cast

import httpx2
import pytest
from fastapi import Depends, FastAPI, Header, HTTPException, Request
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from pydantic import AfterValidator, BaseModel, model_serializer

from tests import programs
from tests.mcp.uvicorn_server import serving
from toolbox import (
    AiMessage,
    AudioContent,
    Container,
    IllegalConfigurationError,
    ImageContent,
    Inject,
    PdfContent,
    Result,
    TextContent,
    ToolAbort,
    ToolErrors,
    ToolRetry,
    ToolSpecification,
    register_ai_service,
    request_scoped,
    tool,
)
from toolbox.mcp import mcp_prompt, mcp_server_of
from toolbox.security import authenticated
from toolbox.testing import ScriptedChatModel, tool_call
from toolbox.tls import tls_context
from toolbox_fastapi import Inject as EndpointInject
from toolbox_fastapi import install, mount_mcp

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parent.parent.parent


@request_scoped
class Visit:
    made = 0

    def __init__(self) -> None:
        Visit.made += 1


class Tools:
    def __init__(self, visit: Visit) -> None:
        self.visit = visit

    @tool("Adds")
    def add(self, a: int, b: int = 1) -> int:
        return a + b

    @tool("Fails")
    async def fail(self) -> None:
        raise ValueError("no luck")

    @tool("Gives up")
    async def abort(self) -> None:
        raise ToolAbort("stopped by hand")

    @tool("Looks for what is not there")
    async def broken(self, missing: Inject[int | None], container: Inject[Container]) -> str:
        return str(container.get(dict))

    @tool("Draws")
    async def draw(self) -> list[TextContent | ImageContent]:
        return [TextContent("a dot"), ImageContent(data=b"\x89PNG", mime_type="image/png")]


@register_ai_service
class Expert(Protocol):
    @tool("Answers")
    async def ask(self, question: str) -> str: ...


def container() -> Container:
    return Container(models={"default": ScriptedChatModel(["forty-two"])}).register(Visit)


async def test_the_official_client_lists_and_calls_tools() -> None:
    made = container()
    server = mcp_server_of(made, [Tools, Expert])
    Visit.made = 0
    async with made, Client(server) as client:
        offered = (await client.list_tools()).tools
        added = await client.call_tool("add", {"a": 2})
        asked = await client.call_tool("ask", {"question": "?"})
        await client.call_tool("add", {"a": 2, "b": 3})

    assert [each.name for each in offered] == ["add", "fail", "abort", "broken", "draw", "ask"]
    assert offered[0].input_schema["required"] == ["a"]
    assert (added.content[0].text, added.is_error) == ("3", False)
    assert asked.content[0].text == "forty-two"
    assert Visit.made == 2


async def test_the_schema_of_each_served_tool_has_properties() -> None:
    bare = ToolSpecification("stop", "Stops.", {"type": "object"})
    made = container()
    server = mcp_server_of(made, [{bare: lambda request, memory_id: "stopped"}])
    async with made, Client(server) as client:
        [offered] = (await client.list_tools()).tools

    assert offered.input_schema == {"type": "object", "properties": {}}


class Cut(BaseModel):
    name: str


class Halves:
    """Tools whose results have half a character."""

    @tool("Returns a text")
    def text(self) -> str:
        return "cut \ud83d"

    @tool("Returns a model")
    def model(self) -> Cut:
        return Cut(name="cut \ud83d")

    @tool("Returns names")
    def names(self) -> dict[str, str]:
        return {"x": "cut \ud83d"}


async def test_half_a_character_does_not_cost_a_client_the_result() -> None:
    made = Container()
    server = mcp_server_of(made, [Halves])
    async with made, Client(server) as client:
        text, model, names = [await client.call_tool(each, {}) for each in ("text", "model", "names")]

    assert text.content[0].text == "cut \ufffd"
    assert (model.structured_content, names.structured_content) == ({"name": "cut \ufffd"}, {"x": "cut \ufffd"})


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("fail", {}, "The tool 'fail' failed."),
        ("abort", {}, "stopped by hand"),
        ("add", {"a": "x"}, "a"),
        ("nowhere", {}, "nowhere"),
    ],
)
async def test_tool_failures_are_error_results(name: str, arguments: dict[str, Any], text: str) -> None:
    made = container()
    server = mcp_server_of(made, [Tools])
    async with made, Client(server) as client:
        result = await client.call_tool(name, arguments)

    assert result.is_error
    assert text in result.content[0].text
    assert "no luck" not in str(result)


class Leaky:
    """Tools that fail in different places, with a password in the message."""

    text = "cannot connect to postgresql://shop:pa55@10.0.0.7/stock"

    @tool("Fails below another error")
    def nested(self) -> str:
        try:
            raise ConnectionError(self.text)
        except ConnectionError as error:
            raise RuntimeError(self.text) from error

    @tool("Fails while arguments are read")
    def validated(self, place: Annotated[str, AfterValidator(_connect)]) -> str:
        return place

    @tool("Fails while its result is written")
    def written(self) -> Unwritable:
        return Unwritable()

    @tool("Waits for another scope")
    def closing(self, session: Inject[Session]) -> str:
        return "done"

    @tool("Asks for other values")
    def retried(self) -> str:
        raise ToolRetry("try a later date") from ConnectionError(self.text)

    @tool("Refuses a value")
    def positive(self, number: Annotated[int, AfterValidator(_positive)]) -> int:
        return number


def _connect(place: str) -> str:
    raise ConnectionError(Leaky.text)


def _positive(number: int) -> int:
    if number < 1:
        raise ValueError("use 1 or more")
    return number


class Unwritable(BaseModel):
    @model_serializer
    def write(self) -> str:
        raise ConnectionError(Leaky.text)


@request_scoped
class Session:
    def close(self) -> None:
        raise ConnectionError(Leaky.text)


@pytest.mark.parametrize("name", ["nested", "validated", "written", "closing"])
@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_clients_do_not_read_exceptions_of_tools(name: str, mode: str, caplog: pytest.LogCaptureFixture) -> None:
    made = container()
    made.register(Session)
    server = mcp_server_of(made, [Leaky])
    async with made, Client(server, mode=mode) as client:
        arguments = {"place": "Bern"} if name == "validated" else {}
        try:
            read = str(await client.call_tool(name, arguments))
        except MCPError as error:
            read = str(error) + str(error.error)

    assert "pa55" not in read
    assert "pa55" in caplog.text or name == "closing"


async def test_clients_read_why_their_arguments_are_invalid() -> None:
    made = container()
    server = mcp_server_of(made, [Leaky])
    async with made, Client(server) as client:
        assert "use 1 or more" in (await client.call_tool("positive", {"number": 0})).content[0].text
        assert (await client.call_tool("retried", {})).content[0].text == "try a later date"


async def test_error_handlers_of_the_container_write_the_text_for_clients() -> None:
    failures = ToolErrors(on_tool_execution_error=lambda error, context: "ask again tomorrow")
    made = Container(tool_errors=failures).register(Visit)
    server = mcp_server_of(made, [Tools])
    async with made, Client(server) as client:
        assert (await client.call_tool("fail", {})).content[0].text == "ask again tomorrow"


# --- structured content


class Dish(BaseModel):
    name: str
    price: Decimal
    sides: list[Dish] = []


@dataclass
class Order:
    dish: Dish
    served: date | None


class Mood(StrEnum):
    GOOD = "good"


class Kitchen:
    @tool
    def dish(self) -> Dish:
        return Dish(name="soup", price=Decimal("4.50"), sides=[Dish(name="bread", price=Decimal(1))])

    @tool
    async def order(self) -> Order:
        return Order(self.dish(), date(2026, 1, 2))

    @tool
    def maybe(self, there: bool) -> Dish | None:
        return self.dish() if there else None

    @tool
    def counts(self) -> dict[str, int]:
        return {"soup": 2}

    @tool
    def price(self) -> float:
        return 4.5

    @tool
    def names(self) -> list[str]:
        return ["soup"]

    @tool
    def mood(self) -> Mood:
        return Mood.GOOD

    @tool
    def text(self) -> str:
        return "plain"

    @tool
    def nothing(self) -> None: ...

    @tool
    def picture(self) -> list[TextContent | ImageContent | AudioContent | PdfContent]:
        return [
            ImageContent(data=b"1", mime_type="image/png"),
            ImageContent(url="https://example.org/a.png"),
            AudioContent(b"2", "audio/wav"),
            PdfContent(data=b"3", name="in voice.pdf"),
            PdfContent(url="https://example.org/b.pdf"),
        ]

    @tool
    def wrong(self) -> Dish:
        return cast("Dish", "soup")

    @tool(max_result_chars=5)
    def short(self) -> list[str]:
        return ["a long text"]


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_structured_content_and_output_schemas_are_sent(mode: str) -> None:
    made = container()
    server = mcp_server_of(made, [Kitchen])
    soup = {"name": "soup", "price": "4.50", "sides": [{"name": "bread", "price": "1", "sides": []}]}
    expected: dict[str, Any] = {
        "dish": soup,
        "order": {"dish": soup, "served": "2026-01-02"},
        "counts": {"soup": 2},
        "price": {"result": 4.5},
        "names": {"result": ["soup"]},
        "mood": {"result": "good"},
        "text": None,
        "nothing": None,
        "picture": None,
        "short": None,
    }
    async with made, Client(server, mode=mode) as client:  # the client validates each value
        offered = {each.name: each.output_schema for each in (await client.list_tools()).tools}
        got = {name: (await client.call_tool(name, {})).structured_content for name in expected}
        there = await client.call_tool("maybe", {"there": True})
        missing = await client.call_tool("maybe", {"there": False})
        picture = (await client.call_tool("picture", {})).content

    assert got == expected
    assert {name for name, schema in offered.items() if schema is None} == {"text", "nothing", "picture", "short"}
    assert all(schema["type"] == "object" for schema in offered.values() if schema is not None)
    assert (there.structured_content, missing.structured_content) == ({"result": soup}, {"result": None})
    assert json.loads(there.content[0].text) == soup
    shown = [each.model_dump(by_alias=True, exclude_none=True) for each in picture]
    assert shown == [
        {"type": "image", "data": "MQ==", "mimeType": "image/png"},
        {"type": "resource_link", "name": "image", "uri": "https://example.org/a.png"},
        {"type": "audio", "data": "Mg==", "mimeType": "audio/wav"},
        {
            "type": "resource",
            "resource": {"uri": "attachment:///in%20voice.pdf", "mimeType": "application/pdf", "blob": "Mw=="},
        },
        {
            "type": "resource_link",
            "name": "document.pdf",
            "uri": "https://example.org/b.pdf",
            "mimeType": "application/pdf",
        },
    ]


async def test_values_that_do_not_match_their_annotation_are_failures(caplog: pytest.LogCaptureFixture) -> None:
    made = container()
    server = mcp_server_of(made, [Kitchen])
    async with made, Client(server) as client:
        result = await client.call_tool("wrong", {})

    assert (result.is_error, result.content[0].text) == (True, "The tool 'wrong' failed.")
    assert "does not match its return annotation" in caplog.text


# --- single tools


class Orders:
    def __init__(self, visit: Visit) -> None:
        self.visit = visit

    @tool
    def find(self, number: int) -> str:
        return f"order {number} of {type(self).__name__}"

    @tool
    def cancel(self, number: int) -> str:
        return "cancelled"

    def unmarked(self) -> str:
        return ""


class OldOrders(Orders):
    pass


@tool
def lonely(number: int) -> str:
    return f"alone with {number}"


async def test_single_tools_of_classes_instances_services_and_functions_are_offered() -> None:
    class Local:
        @tool
        def inner(self, number: int) -> str:
            return f"inner {number}"

    made = container()
    server = mcp_server_of(made, [Orders.find, Kitchen().text, lonely, Expert.ask, Local.inner])
    async with made, Client(server) as client:
        names = [each.name for each in (await client.list_tools()).tools]
        texts = [
            (await client.call_tool(name, {"number": 7})).content[0].text
            for name in ("find", "text", "lonely", "inner")
        ]
        texts.append((await client.call_tool("ask", {"question": "?"})).content[0].text)
        refused = await client.call_tool("cancel", {"number": 7})

    assert names == ["find", "text", "lonely", "ask", "inner"]
    assert texts == ["order 7 of Orders", "plain", "alone with 7", "inner 7", "forty-two"]
    assert refused.is_error


async def test_inherited_tools_run_on_the_bean_of_the_subclass() -> None:
    made = container().register(OldOrders)
    server = mcp_server_of(made, [OldOrders.find])
    async with made, Client(server) as client:
        assert (await client.call_tool("find", {"number": 7})).content[0].text == "order 7 of OldOrders"


def test_methods_without_a_tool_mark_are_rejected() -> None:
    with pytest.raises(IllegalConfigurationError, match="self"):
        mcp_server_of(container(), [Orders.unmarked])


def test_a_tool_with_not_self_does_not_require_an_identity() -> None:
    @tool(deferred=True, not_self=True)
    def pay(euros: int) -> str:
        return "paid"

    @tool
    @authenticated
    def refund(euros: int) -> str:
        return "refunded"

    made = Container()
    mcp_server_of(made, [pay])
    assert made.check() == []
    mcp_server_of(made, [refund])
    [problem] = made.check()
    assert problem.what == "refund: roles are used, but no bean provides a SecurityIdentity"


def test_duplicate_tools_are_rejected() -> None:
    with pytest.raises(IllegalConfigurationError, match="find"):
        mcp_server_of(container(), [Orders, Orders.find])


async def test_clients_do_not_read_framework_errors() -> None:
    made = container()
    server = mcp_server_of(made, [Tools])
    async with made, Client(server) as client:
        with pytest.raises(MCPError) as caught:
            await client.call_tool("broken", {})

    assert "dict" not in str(caught.value)


class Till:
    @tool(requires_approval=True)
    def pay(self, euros: int) -> str:
        return f"paid {euros}"


@register_ai_service(tools=Till)
class Cashier(Protocol):
    @tool("Pays")
    async def pay_text(self, wish: str) -> str: ...

    @tool("Pays")
    async def pay_result(self, wish: str) -> Result[str]: ...

    @tool("Pays")
    async def pay_number(self, wish: str) -> int: ...

    @tool("Pays")
    async def pay_number_result(self, wish: str) -> Result[int]: ...

    @mcp_prompt
    async def advise(self, wish: str) -> str:
        """Advise."""
        ...


def shop() -> Container:
    asks = AiMessage(None, [tool_call("pay", {"euros": 3})])
    return Container(models={"default": ScriptedChatModel([asks])}).register(Cashier)


@pytest.mark.parametrize("name", ["pay_text", "pay_result", "pay_number", "pay_number_result"])
async def test_clients_read_that_a_call_waits_for_a_person(name: str, caplog: pytest.LogCaptureFixture) -> None:
    made = shop()
    server = mcp_server_of(made, [Cashier])
    async with made, Client(server) as client:
        answer = await client.call_tool(name, {"wish": "Pay."})
        [run] = await made.runs.list()

    assert run.status == "suspended"
    assert answer.content[0].text == (
        f"The call waits for the approval or the answer of a person, in the run {run.id}. "
        "Do not call the tool again: that would start another run."
    )
    # A client rejects a result that does not follow the output schema of the tool, except if it is an error.
    assert answer.is_error == ("number" in name)
    assert not caplog.records


async def test_clients_read_that_a_prompt_waits_for_a_person() -> None:
    made = shop()
    server = mcp_server_of(made, [Cashier])
    async with made, Client(server) as client:
        with pytest.raises(MCPError, match=r"waits for the approval or the answer of a person, in the run \w+\."):
            await client.get_prompt("advise", {"wish": "Pay."})


async def test_images_are_sent_to_clients() -> None:
    made = container()
    server = mcp_server_of(made, [Tools])
    async with made, Client(server) as client:
        result = await client.call_tool("draw", {})

    assert [each.type for each in result.content] == ["text", "image"]


def test_objects_without_tools_are_rejected() -> None:
    with pytest.raises(IllegalConfigurationError):
        mcp_server_of(container(), [object()])


async def test_tools_are_served_over_stdio() -> None:
    command, *arguments = programs.command(str(Path(__file__).parent / "counting_server.py"))
    server = StdioServerParameters(command=command, args=arguments, env={"PYTHONPATH": str(ROOT)})
    async with Client(server) as client:
        assert (await client.call_tool("add", {"a": 41})).content[0].text == "42"


def command_line_server(tools: str) -> StdioServerParameters:
    arguments = ("-m", "toolbox.cli", "mcp", "tests.mcp.program:container", "--tools", tools)
    command, *rest = programs.command(*arguments)
    return StdioServerParameters(command=command, args=rest, env={"PYTHONPATH": str(ROOT)}, cwd=str(ROOT))


async def test_the_command_line_keeps_printed_text_away_from_the_client(caplog: pytest.LogCaptureFixture) -> None:
    server = command_line_server("tests.mcp.program:Adder")
    async with Client(server) as client:
        assert [each.name for each in (await client.list_tools()).tools] == ["add"]
        assert (await client.call_tool("add", {"a": 41})).content[0].text == "42"
    assert not [each for each in caplog.records if each.name.startswith("mcp")]  # the client logs invalid lines


@pytest.mark.parametrize(
    ("target", "text"),
    [("Adder.add", "42"), ("Doubler.add", "84"), ("adder.add", "42"), ("lonely", "41")],
)
async def test_the_command_line_offers_single_tools(target: str, text: str) -> None:
    server = command_line_server(f"tests.mcp.program:{target}")
    async with Client(server) as client:
        [offered] = (await client.list_tools()).tools
        assert (await client.call_tool(offered.name, {"a": 41})).content[0].text == text


async def test_tools_are_served_over_http_in_fastapi() -> None:
    app, made = FastAPI(), container()
    install(app, made)
    mount_mcp(app, made, [Tools])

    @app.get("/health")
    async def health() -> str:
        return "up"

    Visit.made = 0
    async with serving(app) as base, Client(f"{base}/mcp") as client, Client(f"{base}/mcp/") as other:
        assert (await client.call_tool("add", {"a": 41})).content[0].text == "42"
        assert (await other.call_tool("fail", {})).is_error
        async with httpx2.AsyncClient(
            base_url=base, verify=tls_context()
        ) as http:  # no redirect, which can fail behind a proxy
            assert (await http.post("/mcp", json={})).status_code == 400
            assert (await http.post("/mcp", json={}, headers={"Host": "evil.example"})).status_code == 421
            assert (await http.get("/health")).json() == "up"
    assert Visit.made == 2
    assert "/mcp" not in str(app.openapi())


async def test_a_container_that_already_runs_is_served_too() -> None:
    app, made = FastAPI(), container()
    install(app, made)
    mount_mcp(app, made, [Tools])

    async with made, serving(app) as base, Client(f"{base}/mcp") as client:
        assert (await client.call_tool("add", {"a": 41})).content[0].text == "42"


async def test_get_is_rejected_immediately() -> None:
    app, made = FastAPI(), container()
    install(app, made)
    mount_mcp(app, made, [Tools])
    async with serving(app) as base, httpx2.AsyncClient(base_url=base, timeout=5, verify=tls_context()) as http:
        for path in ("/mcp", "/mcp/"):
            for method in ("GET", "DELETE", "PUT"):
                answer = await http.request(method, path, headers={"Accept": "text/event-stream"})
                assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


async def test_dependencies_guard_the_mounted_server() -> None:
    app, made = FastAPI(), container()
    install(app, made)
    seen: list[str] = []

    async def signed(
        request: Request, visit: EndpointInject[Visit], authorization: Annotated[str, Header()] = ""
    ) -> None:
        if authorization != "Bearer ada":
            raise HTTPException(401, "who are you?", {"WWW-Authenticate": "Bearer"})
        seen.append((await request.body()).decode())  # like a dependency that verifies a signature

    mount_mcp(app, made, [Tools], dependencies=[Depends(signed)])
    async with serving(app) as base:
        async with httpx2.AsyncClient(base_url=base, verify=tls_context()) as http:
            for path in ("/mcp", "/mcp/"):
                answer = await http.post(path, json={"jsonrpc": "2.0", "id": 1, "method": "tools/list"})
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert seen == []
        async with (
            httpx2.AsyncClient(headers={"Authorization": "Bearer ada"}, verify=tls_context()) as http,
            Client(streamable_http_client(f"{base}/mcp", http_client=http)) as client,
        ):
            assert (await client.call_tool("add", {"a": 41})).content[0].text == "42"
    assert any("tools/call" in each for each in seen)

    app.dependency_overrides[signed] = lambda: None
    async with serving(app) as base, Client(f"{base}/mcp") as client:
        assert (await client.call_tool("add", {"a": 41})).content[0].text == "42"
